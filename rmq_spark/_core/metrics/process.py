"""Counts this process's work for Prometheus: sends, consumed messages, rounds of checks, commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rmq_spark._core.metrics.log_collector import CLUSTER, families, family, group_labels
from rmq_spark._core.metrics.metric_names import ANSWERS, BY_NAME, COMMON, METRICS, PROCESS, ROUNDS, TABLES
from rmq_spark._core.metrics.prometheus import prometheus
from rmq_spark._core.runtime import observer
from rmq_spark._core.vocabulary.redaction import redacted

FINISH_MS = (10, 25, 50, 100, 250, 500, 1_000, 3_000, 10_000, 30_000, 60_000, 300_000)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BUCKETS = {"rocketmq_finish_message_latency": FINISH_MS}
"""Upper bounds of a histogram's buckets. Other histograms have :data:`SECONDS`."""
IN_FLIGHT = "rocketmq_consumer_inflight_messages"


class ProcessMetrics:
    """Counts this process's work on commit logs, from now on, in a registry of Prometheus' client.

    It counts the work of ``TransactionMQProducer``, ``TransactionalSink``, ``PushConsumer`` and ``CheckService`` on any
    log. A sink ``format("txmq")`` runs in a separate process of Spark's: its work shows in the log, and not here.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry, optional
        By default ``prometheus_client.REGISTRY``.
    cluster : str
        The label ``cluster`` of every metric. ``node_id`` is the path of the log, without secrets.

    Raises
    ------
    OptionError
        When prometheus-client is not installed.
    ValueError
        When the registry already has these metrics: one object a registry is enough.

    Examples
    --------
    >>> txmq.metrics.ProcessMetrics()  # doctest: +SKIP
    >>> prometheus_client.start_http_server(8000)  # doctest: +SKIP
    """

    def __init__(self, registry: Any = None, *, cluster: str = CLUSTER) -> None:
        self._registry = prometheus.REGISTRY if registry is None else registry
        self._cluster = cluster
        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            if metric.origin == PROCESS and metric.name != IN_FLIGHT:
                self._metrics[metric.name] = _make_metric(metric.name)
        self._collectors = [*self._metrics.values(), _InFlight(cluster)]
        registered: list[Any] = []
        try:
            for collector in self._collectors:
                self._registry.register(collector)
                registered.append(collector)
        except ValueError:
            for collector in registered:
                self._registry.unregister(collector)
            raise
        self._observer = _Counting(self._metrics, cluster)
        observer.add(self._observer)

    def close(self) -> None:
        """Stop counting, and leave the registry."""
        observer.remove(self._observer)
        while self._collectors:
            self._registry.unregister(self._collectors.pop())


def _make_metric(name: str) -> Any:
    metric = BY_NAME[name]
    labels = [*COMMON, *metric.labels]
    if metric.kind == "histogram":
        buckets = BUCKETS.get(name, SECONDS)
        return prometheus.Histogram(name, metric.help, labels, buckets=buckets, registry=None)
    kind = prometheus.Counter if metric.kind == "counter" else prometheus.Gauge
    return kind(name, metric.help, labels, registry=None)


class _Counting(observer.Observer):
    """An observer that counts."""

    def __init__(self, metrics: dict[str, Any], cluster: str) -> None:
        self._metrics = metrics
        self._cluster = cluster
        for table in TABLES:  # start at 0, because a rate would miss the first one
            self._labelled("txmq_process_commits_total", "", table)
            self._labelled("txmq_commit_retries_total", "", table)

    def _labelled(self, name: str, log: str, *labels: str) -> Any:
        return self._metrics[name].labels(self._cluster, redacted(log), *labels)

    def sent(self, sent: observer.Sent) -> None:
        self._labelled("txmq_send_seconds", sent.log, sent.producer_group).observe(sent.seconds)
        for topic, messages in sent.topics.items():
            self._labelled("txmq_sent_messages_total", sent.log, sent.producer_group, topic).inc(messages)
            if sent.finish_seconds is not None:
                latency = self._labelled("rocketmq_finish_message_latency", sent.log, topic)
                latency.observe(sent.finish_seconds * 1_000)

    def not_sent(self, log: str, producer_group: str, problem: Exception) -> None:
        self._labelled("txmq_send_errors_total", log, producer_group, type(problem).__name__).inc()

    def consumed(self, consumed: observer.Consumed) -> None:
        log, group, topic = consumed.log, consumed.consumer_group, consumed.topic
        self._labelled("rocketmq_messages_out_total", log, *group_labels(group, topic).values()).inc(consumed.consumed)
        self._labelled("txmq_failed_messages_total", log, group, topic).inc(consumed.failed)
        self._labelled("txmq_process_seconds", log, group, topic).observe(consumed.seconds)

    def checked(self, log: str, checker: str, report: Any) -> None:
        for result in ROUNDS:
            self._labelled("txmq_check_rounds_total", log, checker, result).inc(result == ROUNDS[0 if report.ok else 1])
        self._labelled("txmq_check_round_seconds", log, checker).observe(report.seconds)
        self._labelled("txmq_check_last_round_timestamp_seconds", log, checker).set_to_current_time()
        for verdict in ANSWERS:
            self._labelled("txmq_checked_transactions_total", log, verdict).inc(getattr(report, verdict).transactions)

    def committed(self, table: str) -> None:
        self._labelled("txmq_process_commits_total", "", table).inc()

    def lost_race(self, table: str) -> None:
        self._labelled("txmq_commit_retries_total", "", table).inc()


class _InFlight(prometheus.registry.Collector):
    """At a scrape, counts the messages that this process's consumers have fetched and not finished."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster

    def describe(self) -> Iterable[Any]:
        return [family(BY_NAME[IN_FLIGHT])]

    def collect(self) -> Iterator[Any]:
        sums: Counter[tuple[str, str, str]] = Counter()
        for consumer in list(observer.CONSUMERS):
            for topic, messages in consumer.in_flight().items():
                sums[(consumer.member.engine.path, consumer.member.group, topic)] += messages
        yield from families(
            (self._cluster, redacted(log), [(IN_FLIGHT, group_labels(group, topic), messages)])
            for (log, group, topic), messages in sums.items()
        )
