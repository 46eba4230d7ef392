"""Pushes the metrics of a registry, or writes them to a file, for programs that end before a scrape."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rmq_spark._core.metrics.prometheus import prometheus
from rmq_spark._core.vocabulary.options import seconds
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import OptionError, StorageError

PUSH_S_MAX = 10.0


def push(
    registry: Any,
    gateway: str,
    job: str,
    *,
    grouping_key: Mapping[str, str] | None = None,
    timeout: float = PUSH_S_MAX,
) -> None:
    """Push the metrics of a registry to Prometheus' Pushgateway, where they replace this job's last push.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry
    gateway : str
        ``host:port`` or a URL.
    job : str
        The label ``job``.
    grouping_key : mapping of str to str, optional
        More labels, which distinguish this program from others of the job.
    timeout : float
        Seconds after which the push fails.

    Raises
    ------
    OptionError
        When the gateway's address is invalid.
    StorageError
        When the gateway does not answer within ``timeout``, or refuses the metrics.
    """
    limit_s = seconds(timeout, "timeout", above=True)
    if not job.strip():
        raise OptionError("job is empty: name the program whose metrics these are")
    if not gateway.strip():
        raise OptionError("gateway is empty: a Pushgateway's host:port or URL is expected")
    try:
        _within(limit_s, lambda: prometheus.push_to_gateway(gateway, job, registry, dict(grouping_key or {}), limit_s))
    except HTTPException as problem:  # its text may contain a part of a password
        raise OptionError(f"{redacted(gateway)} is no address of a Pushgateway ({type(problem).__name__})") from None
    except (OSError, ValueError) as problem:
        raise StorageError(
            f"the metrics could not be pushed to {redacted(gateway)}: {redacted(problem)}. Does it run there?"
        ) from None


def _within(limit_s: float, work: Callable[[], None]) -> None:
    """Run ``work`` in a thread, and abandon the thread after ``limit_s``: urllib limits each single wait, so a gateway
    that sends a byte a second would block a program for ever."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except Exception as problem:
            done.set_exception(problem)

    threading.Thread(target=run, name="txmq-push", daemon=True).start()
    try:
        done.result(limit_s)
    except FuturesTimeoutError:
        raise TimeoutError(f"it has not answered within {limit_s:g} s") from None


def write_textfile(registry: Any, path: str | os.PathLike[str]) -> None:
    """Write the metrics of a registry to a file, for the textfile collector of Prometheus' node exporter.

    The file is replaced as a whole, so a reader never sees half of it.

    Parameters
    ----------
    path : str or path
        Must end in ``.prom``, because the node exporter reads no other files.

    Raises
    ------
    OptionError
        When the file cannot be written, or its name does not end in ``.prom``.
    """
    file = Path(path)
    if file.suffix != ".prom":
        raise OptionError(f"{file} does not end in .prom: the node exporter's textfile collector reads no other file")
    try:
        prometheus.write_to_textfile(str(file), registry)
    except OSError as problem:
        raise OptionError(f"{file} cannot be written: {problem}") from None
