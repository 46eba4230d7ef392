"""``txmq exporter``: a commit log's figures for Prometheus."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.vocabulary.options import parse_duration
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.cli.output import LogPath, Storage, plainly, storage_options, tell
from rmq_spark.cli.stderr_log import log_to_stderr
from rmq_spark.errors import OptionError, StorageError, TxmqError

if TYPE_CHECKING:
    from rmq_spark.metrics import LogCollector

PORT = 5557
"""The metrics port of RocketMQ's brokers and its exporter."""
JOB = "txmq"


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(exporter)


@plainly
def exporter(
    path: LogPath,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where Prometheus scrapes; 0 takes a free one.")] = PORT,
    address: Annotated[
        str, typer.Option(help='The address to listen at: "0.0.0.0" lets other machines scrape.')
    ] = "127.0.0.1",
    once: Annotated[bool, typer.Option("--once", help="Print the metrics as text, and end.")] = False,
    push_to: Annotated[
        str | None, typer.Option("--push", metavar="URL", help="Push them to a Pushgateway once, and end.")
    ] = None,
    job: Annotated[str, typer.Option(help="With --push: the label job.")] = JOB,
    textfile: Annotated[
        Path | None, typer.Option(metavar="FILE.prom", help="Write them for a node exporter once, and end.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The label cluster; DefaultCluster by default.")] = None,
    cache: Annotated[str, typer.Option(help="A scrape within this time gets the figures of the last one.")] = "5s",
    storage: Storage = None,
) -> None:
    """Show a commit log's figures to Prometheus: pending, quarantined, lag, dead letters, files. It only reads the log.

    One exporter a log is enough. docs/monitoring.md says what to alarm on; --once shows what each metric means.
    """
    modes = [name for name, chosen in (("--once", once), ("--push", push_to), ("--textfile", textfile)) if chosen]
    if len(modes) > 1:
        raise typer.BadParameter(f"{' and '.join(modes)} contradict each other: give one of them")
    if cluster is not None and not cluster.strip():
        raise typer.BadParameter("it is empty: give the label's value, or leave the option out", param_hint="--cluster")
    from rmq_spark._core.metrics.exposition import write_unreadable
    from rmq_spark._core.metrics.log_collector import CLUSTER
    from rmq_spark._core.storage.location import location
    from rmq_spark.metrics import LogCollector

    cache_s, options = parse_duration(cache, "cache"), storage_options(storage)
    try:
        collector = LogCollector(
            path, cluster=cluster or CLUSTER, cache_seconds=cache_s, storage_options=options, once=bool(modes)
        )
    except TxmqError as problem:
        if textfile is not None and not isinstance(problem, OptionError):
            write_unreadable(textfile, location(path), cluster or CLUSTER)  # the old file says that all is well
        raise
    if modes:
        _show_once(collector, path, push_to, job, textfile)
    else:
        _serve(collector, path, address, port)


def _registry(collector: LogCollector) -> Any:
    from rmq_spark._core.metrics.prometheus import prometheus

    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    return registry


def _show_once(collector: LogCollector, path: str, push_to: str | None, job: str, textfile: Path | None) -> None:
    from rmq_spark._core.metrics.prometheus import prometheus
    from rmq_spark.metrics import push, write_textfile

    registry = _registry(collector)
    if push_to is not None:
        push(registry, push_to, job)
        tell(f"pushed to {redacted(push_to)} as job {job}")
    elif textfile is not None:
        write_textfile(registry, textfile)
        tell(f"{textfile} is written")
    else:
        typer.echo(prometheus.generate_latest(registry).decode(), nl=False)
    if not collector.is_up:
        raise StorageError(f"the figures of {redacted(path)} could not be read: the log says why")


def _serve(collector: LogCollector, path: str, address: str, port: int) -> None:
    from rmq_spark._core.metrics.exposition import serving
    from rmq_spark._core.runtime.threads import stopped_by_signals

    log_to_stderr(logging.WARNING)
    stop = threading.Event()
    with serving(_registry(collector), address, port) as url, stopped_by_signals(stop):
        tell(f"the figures of {redacted(path)} are at {url}")
        sys.stdout.flush()
        stop.wait()
