"""Serves metrics over HTTP, or writes them to a file for Prometheus' node exporter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rmq_spark._core.metrics.log_collector import CACHE_S, CLUSTER, LogCollector, Unreadable
from rmq_spark._core.metrics.process import ProcessMetrics
from rmq_spark._core.metrics.prometheus import prometheus
from rmq_spark._core.metrics.push_gateway import write_textfile
from rmq_spark._core.protocol.engine import Engine
from rmq_spark.errors import OptionError, TxmqError

logger = logging.getLogger(__name__)


@contextmanager
def serving(registry: Any, address: str, port: int) -> Iterator[str]:
    """Serve the metrics of a registry while a ``with`` statement runs, and yield the URL.

    Raises
    ------
    OptionError
        When the address or port cannot be used.
    """
    try:
        server, thread = prometheus.start_http_server(port, address, registry)
    except OSError as problem:
        raise OptionError(f"nothing can listen at {address}:{port}: {problem}. Choose another port") from None
    try:
        yield f"http://{address}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_unreadable(textfile: str | Path, path: str, cluster: str = CLUSTER) -> None:
    """Write the file of metrics for a log that cannot be opened: only ``txmq_up``, which is 0."""
    registry = prometheus.CollectorRegistry()
    registry.register(Unreadable(path, cluster))
    write_textfile(registry, textfile)


@contextmanager
def showing(
    engine: Engine,
    *,
    port: int | None = None,
    address: str = "127.0.0.1",
    cluster: str = CLUSTER,
    textfile: str = "",
    once: bool = False,
) -> Iterator[Callable[[], None]]:
    """Show the figures of a log and of this process while a ``with`` statement runs.

    Parameters
    ----------
    port : int, optional
        The port that Prometheus scrapes. By default nothing is served.
    textfile : str
        The file for the yielded function; none when empty.
    once : bool
        True for a short program.

    Yields
    ------
    callable
        Writes the file. Failures are logged.
    """
    registry = prometheus.CollectorRegistry()
    cache_s = 0.0 if port is None else CACHE_S  # each write of a file needs fresh figures
    registry.register(LogCollector(engine, cluster=cluster, cache_seconds=cache_s, once=once))
    counting = ProcessMetrics(registry, cluster=cluster)

    def write() -> None:
        try:
            if textfile:
                write_textfile(registry, textfile)
        except TxmqError as problem:
            logger.warning("the metrics were not written: %s", problem)

    with ExitStack() as stack:
        stack.callback(counting.close)
        if port is not None:
            url = stack.enter_context(serving(registry, address, port))
            logger.info("the metrics are at %s", url)
        yield write
