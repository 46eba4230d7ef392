"""A collector for Prometheus' client: the figures of commit logs, read at a scrape."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rmq_spark._core.client.commit_log import CommitLog
from rmq_spark._core.inspect.group_lag import retained_letters
from rmq_spark._core.log.op import Who
from rmq_spark._core.metrics.log_figures import LogFigures, LogWatch
from rmq_spark._core.metrics.metric_names import BY_NAME, COMMON, LOG, METRICS, WATCH_METRICS, Metric
from rmq_spark._core.metrics.prometheus import prometheus
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.log_records import failure
from rmq_spark._core.runtime.runtime import RUNTIME
from rmq_spark._core.vocabulary.message import DLQ_PREFIX, RETRY_PREFIX
from rmq_spark._core.vocabulary.options import seconds
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import OptionError

logger = logging.getLogger(__name__)

CLUSTER = "DefaultCluster"
"""RocketMQ's name for a cluster without a name."""
CACHE_S = 5.0
NORMAL, TRANSACTION, FIFO = "normal", "transaction", "fifo"
"""RocketMQ's words for the kinds of messages (``message_type``)."""

DECISIONS = {
    (verdict, by.value): 0
    for verdict, deciders in {
        "commit": Who,
        "rollback": Who,
        "quarantine": (Who.DISCARD,),
        "reopen": (Who.EXECUTE, Who.ADMIN),
    }.items()
    for by in deciders
}
"""Every possible decision and decider: shown as 0 before the first one, which a rate would miss otherwise."""

Sample = tuple[str, Mapping[str, str], float]
"""A metric's name, its labels besides the common ones, and its value."""


class LogCollector(prometheus.registry.Collector):
    """Exposes the figures of commit logs to Prometheus, under RocketMQ 5's names where they exist.

    Register it in a program's registry, or run ``txmq exporter``. One program a log is enough, because the figures are
    the log's. The reference of the docs lists all of them.

    Parameters
    ----------
    *logs : CommitLog or path
        Each is read through its own handles. A registry accepts one collector, so pass it all logs.
    cluster : str
        The label ``cluster`` of every metric.
    node_id : str, optional
        The label ``node_id`` of a single log. By default the log's path, without secrets.
    cache_seconds : float
        Seconds for which scrapes reuse the figures of the last look. Simultaneous scrapes share one look.
    storage_options : mapping, optional
        For paths: passed to delta-rs.
    once : bool
        True for a short program: counts since the program's start, which would be near 0 each time, are left out.

    Raises
    ------
    OptionError
        When prometheus-client is not installed, no log is given, or a log is given twice.
    NotACommitLogError, StorageError
        When a log cannot be opened.

    Notes
    -----
    A failed look is logged and shown as ``txmq_up 0``, without other figures. The next look tries again. Other
    collectors in the registry are not affected.

    Examples
    --------
    >>> prometheus_client.REGISTRY.register(txmq.metrics.LogCollector("shop/log"))  # doctest: +SKIP
    """

    def __init__(
        self,
        *logs: CommitLog | Engine | str | os.PathLike[str],
        cluster: str = CLUSTER,
        node_id: str | None = None,
        cache_seconds: float = CACHE_S,
        storage_options: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> None:
        if not logs or (node_id is not None and len(logs) > 1):
            raise OptionError(
                f"{len(logs)} logs are given: LogCollector needs one or more, and node_id is for one only"
            )
        self._watches = [LogWatch(log, storage_options) for log in logs]
        paths = [watch.path for watch in self._watches]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            raise OptionError(f"the log {redacted(twice)} is given twice: its figures would be shown twice")
        self._cluster, self._node_id = cluster, node_id
        self._omitted = WATCH_METRICS if once else frozenset[str]()
        self._cache_s = seconds(cache_seconds, "cache_seconds")
        self._lock = threading.RLock()
        self._known: list[tuple[str, list[Sample]]] = []
        self._looked_s: float | None = None

    @property
    def is_up(self) -> bool:
        """True when the last look at every log succeeded."""
        return bool(self._known) and all(("txmq_up", {}, 1.0) in samples for _, samples in self._known)

    def describe(self) -> Iterable[Any]:
        """Name the metrics. With this method, registering does not read the log."""
        return [family(metric) for metric in METRICS if metric.origin == LOG]

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, for a registry."""
        yield from families((self._cluster, node_id, samples) for node_id, samples in self._samples())

    def _samples(self) -> list[tuple[str, list[Sample]]]:
        """Return the samples by log."""
        with self._lock:
            if self._looked_s is None or RUNTIME.monotonic() - self._looked_s >= self._cache_s:
                self._known = [(self._node_id or redacted(watch.path), self._look(watch)) for watch in self._watches]
                self._looked_s = RUNTIME.monotonic()
            return self._known

    def _look(self, watch: LogWatch) -> list[Sample]:
        return [sample for sample in _samples_or_down(watch) if sample[0] not in self._omitted]


class Unreadable(prometheus.registry.Collector):
    """Shows ``txmq_up 0`` for a log that cannot be opened."""

    def __init__(self, path: str, cluster: str = CLUSTER) -> None:
        self._path, self._cluster = path, cluster

    def collect(self) -> Iterator[Any]:
        yield from families([(self._cluster, redacted(self._path), DOWN)])


DOWN: list[Sample] = [("txmq_up", {}, 0.0)]


def _samples_or_down(watch: LogWatch) -> list[Sample]:
    began_s = RUNTIME.monotonic()
    try:
        figures = watch.look()
    except Exception as problem:
        logger.warning("the figures of %s could not be read: %s", redacted(watch.path), failure(problem))
        return DOWN
    took_s = RUNTIME.monotonic() - began_s
    return [("txmq_up", {}, 1.0), ("txmq_collect_seconds", {}, took_s), *samples_of(figures)]


# ---------------------------------------------------------------- from figures to samples
def samples_of(figures: LogFigures) -> Iterator[Sample]:
    """Yield the figures as samples."""
    yield from _of_topics(figures)
    yield from _of_open(figures)
    yield from _of_messages_table(figures)
    yield from _of_groups(figures)
    for name, table in figures.tables.items():
        yield "txmq_live_files", {"table": name}, table.files
        yield "txmq_table_bytes", {"table": name}, table.bytes
        yield "txmq_table_commits_total", {"table": name}, table.version


def _of_topics(figures: LogFigures) -> Iterator[Sample]:
    yield "rocketmq_topic_number", {}, len(figures.topics)
    for topic, fifo in figures.topics.items():
        placed, own = figures.placed.get(topic, 0), topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
        kind = NORMAL if own else FIFO if fifo else TRANSACTION
        labels = {"topic": topic, "message_type": kind, "is_system": "false"}
        yield "rocketmq_messages_in_total", labels, placed
        if not own:
            yield "rocketmq_commit_messages_total", {"topic": topic}, placed
            yield "rocketmq_half_messages", {"topic": topic}, figures.half_messages.get(topic, 0)
            yield "rocketmq_rollback_messages_total", {"topic": topic}, figures.rolled_back.get(topic, 0)
        yield "txmq_expired_messages_total", {"topic": topic}, figures.expired.get(topic, 0)
    if figures.rolled_back.get(""):
        yield "rocketmq_rollback_messages_total", {"topic": ""}, figures.rolled_back[""]


def _of_open(figures: LogFigures) -> Iterator[Sample]:
    for group, open_batches in figures.pending.items():
        yield "txmq_pending_half_batches", {"producer_group": group}, open_batches.half_batches
        yield "txmq_oldest_pending_age_seconds", {"producer_group": group}, open_batches.oldest_s
    yield "txmq_pending_not_looked_at", {}, figures.not_looked_at
    for group, messages in figures.quarantined.items():
        yield "txmq_quarantined_messages", {"producer_group": group}, messages
    yield "txmq_conflicts", {}, figures.conflicts
    yield "txmq_waiting_messages", {"reason": "delayed"}, figures.delayed
    yield "txmq_waiting_messages", {"reason": "ordered"}, figures.ordered
    for (verdict, decided_by), messages in {**DECISIONS, **figures.decided}.items():
        yield "txmq_decided_messages_total", {"verdict": verdict, "decided_by": decided_by}, messages
    if figures.last_check is not None:
        yield "txmq_last_check_timestamp_seconds", {}, figures.last_check.timestamp()


def _of_messages_table(figures: LogFigures) -> Iterator[Sample]:
    yield "txmq_undrained_messages", {}, figures.undrained_messages
    yield "txmq_undrained_bytes", {}, figures.undrained_bytes
    yield "txmq_publish_lag_seconds", {}, figures.publish_lag_s


def _of_groups(figures: LogFigures) -> Iterator[Sample]:
    for (group, topic), lag in figures.lags.items():
        labels = group_labels(group, topic)
        yield "rocketmq_consumer_lag_messages", labels, lag.messages
        yield "rocketmq_consumer_lag_latency", labels, lag.seconds * 1_000
    letters_of = {**dict.fromkeys((group for group, _ in figures.lags), 0), **figures.dead_letters()}
    kept = retained_letters(figures.placed, figures.expired)
    for group, letters in letters_of.items():
        labels = {"consumer_group": group, "topic": f"{DLQ_PREFIX}{group}", "is_system": "false"}
        yield "rocketmq_send_to_dlq_messages_total", labels, letters
        yield "txmq_dead_letters", {"consumer_group": group}, kept.get(group, 0)


def group_labels(group: str, topic: str) -> dict[str, str]:
    """Return RocketMQ's labels of a consumer group's metric."""
    retry = "true" if topic.startswith(RETRY_PREFIX) else "false"
    return {"consumer_group": group, "topic": topic, "is_retry": retry, "is_system": "false"}


# ---------------------------------------------------------------- from samples to families of Prometheus' client
def family(metric: Metric) -> Any:
    """Return an empty family of Prometheus' client for a metric."""
    kind: Any = prometheus.metrics_core.GaugeMetricFamily
    if metric.kind == "counter":
        kind = prometheus.metrics_core.CounterMetricFamily
    return kind(metric.name, metric.help, labels=[*COMMON, *metric.labels])


def families(of_logs: Iterable[tuple[str, str, Iterable[Sample]]]) -> Iterator[Any]:
    """Yield families of Prometheus' client for each log's cluster, node_id and samples."""
    by_name: dict[str, Any] = {}
    for cluster, node_id, samples in of_logs:
        for name, labels, value in samples:
            metric = BY_NAME[name]
            if name not in by_name:
                by_name[name] = family(metric)
            by_name[name].add_metric([cluster, node_id, *(labels[label] for label in metric.labels)], value)
    yield from by_name.values()
