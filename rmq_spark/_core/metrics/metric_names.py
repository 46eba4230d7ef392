"""All metrics: their names, kinds, labels and help texts. RocketMQ 5's names have their meaning and units there.

Tests hold the exporter, the alert rules and the dashboard to this list; the reference of the docs is made from it.
"""

from __future__ import annotations

from typing import NamedTuple

LOG, PROCESS = "log", "process"
EVER, START = "since the log was made", "since the exporter started"

COMMON = ("cluster", "node_id")
"""Labels of every metric: a name by the user, and the path of the commit log."""
TABLES = ("half", "op", "messages", "topics", "groups")
"""Values of the label ``table``."""
ANSWERS = ("committed", "rolled_back", "unknown", "discarded", "quarantined")
"""Values of the label ``verdict`` of checks, which are names of tallies in a report of checks."""
ROUNDS = ("ok", "problems")
"""Values of the label ``result``: of a round of checks."""
_GROUP_LABELS = ("consumer_group", "topic", "is_retry", "is_system")


class Metric(NamedTuple):
    """A metric.

    Attributes
    ----------
    name : str
        The name in Prometheus.
    kind : str
        ``gauge``, ``counter`` or ``histogram``.
    labels : tuple of str
        The labels besides :data:`COMMON`.
    origin : str
        :data:`LOG`: read from the log, by any process. :data:`PROCESS`: counted in the acting process.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    origin: str = LOG


METRICS: tuple[Metric, ...] = (
    # ---------------------------------------------------------------- RocketMQ's, from the log
    Metric("rocketmq_half_messages", "gauge", ("topic",), "Messages without a verdict (half messages)"),
    Metric(
        "rocketmq_commit_messages_total", "counter", ("topic",),
        f"Committed messages that became visible, {EVER}",
    ),
    Metric(
        "rocketmq_rollback_messages_total", "counter", ("topic",),
        f"Messages that were rolled back, each once, {START}; the topic is empty when the half batch has left",
    ),
    Metric(
        "rocketmq_messages_in_total", "counter", ("topic", "message_type", "is_system"),
        f"Messages that became visible, with retries and dead letters, {EVER}",
    ),
    Metric("rocketmq_topic_number", "gauge", (), "Topics"),
    Metric("rocketmq_consumer_lag_messages", "gauge", _GROUP_LABELS, "Visible messages that a group has not read"),
    Metric(
        "rocketmq_consumer_lag_latency", "gauge", _GROUP_LABELS,
        "Milliseconds since the commit of the oldest message that a group has not read",
    ),
    Metric(
        "rocketmq_send_to_dlq_messages_total", "counter", ("consumer_group", "topic", "is_system"),
        f"Messages that a group gave up (dead letters), {EVER}; the topic is %DLQ%group",
    ),
    # ---------------------------------------------------------------- our own, from the log
    Metric("txmq_up", "gauge", (), "1 when the last look at the log succeeded, else 0"),
    Metric("txmq_collect_seconds", "gauge", (), "How long the last look at the log took"),
    Metric("txmq_pending_half_batches", "gauge", ("producer_group",), "Half batches with messages without a verdict"),
    Metric(
        "txmq_oldest_pending_age_seconds", "gauge", ("producer_group",),
        "Seconds since the oldest of them was prepared",
    ),
    Metric(
        "txmq_pending_not_looked_at", "gauge", (),
        "Pending half batches that the exporter has not read yet: their topics and groups are not in the figures",
    ),
    Metric("txmq_quarantined_messages", "gauge", ("producer_group",), "Messages that checks gave up: a person decides"),
    Metric("txmq_conflicts", "gauge", (), "Half batches with two verdicts that contradict each other"),
    Metric(
        "txmq_waiting_messages", "gauge", ("reason",),
        "Committed messages that are not visible yet: delayed, or ordered behind an open one of their sharding key",
    ),
    Metric(
        "txmq_decided_messages_total", "counter", ("verdict", "decided_by"),
        f"Messages by verdict (commit, rollback, quarantine, reopen) and by whom, {START}",
    ),
    Metric(
        "txmq_last_check_timestamp_seconds", "gauge", (),
        "When a check last left an answer in the log (one with nothing to do leaves none); missing before the first",
    ),
    Metric("txmq_undrained_messages", "gauge", (), "Visible messages that are not in the table messages yet"),
    Metric("txmq_undrained_bytes", "gauge", (), "About how many bytes of half files they have"),
    Metric(
        "txmq_publish_lag_seconds", "gauge", (),
        "Seconds by which the table messages is behind: since the oldest of them was committed",
    ),
    Metric("txmq_expired_messages_total", "counter", ("topic",), f"Messages that their retention ended, {EVER}"),
    Metric("txmq_dead_letters", "gauge", ("consumer_group",), "Dead letters that are kept, sent again or not"),
    Metric("txmq_live_files", "gauge", ("table",), "Files of a table"),
    Metric("txmq_table_bytes", "gauge", ("table",), "Bytes of these files"),
    Metric("txmq_table_commits_total", "counter", ("table",), f"Commits to a table by anybody, {EVER}"),
    # ---------------------------------------------------------------- of a process
    Metric(
        "rocketmq_finish_message_latency", "histogram", ("topic",),
        "Milliseconds from the prepare of a half batch to its verdict", PROCESS,
    ),
    Metric("rocketmq_messages_out_total", "counter", _GROUP_LABELS, "Messages that a PushConsumer consumed", PROCESS),
    Metric(
        "rocketmq_consumer_inflight_messages", "gauge", _GROUP_LABELS,
        "Messages that a PushConsumer has fetched and not finished", PROCESS,
    ),
    Metric("txmq_sent_messages_total", "counter", ("producer_group", "topic"), "Messages that were sent", PROCESS),
    Metric(
        "txmq_send_seconds", "histogram", ("producer_group",),
        "Seconds of a send, or of a sink's micro-batch: both commits and the local transaction", PROCESS,
    ),
    Metric("txmq_send_errors_total", "counter", ("producer_group", "error"), "Sends that raised", PROCESS),
    Metric("txmq_process_seconds", "histogram", ("consumer_group", "topic"), "Seconds of a listener's take", PROCESS),
    Metric(
        "txmq_failed_messages_total", "counter", ("consumer_group", "topic"),
        "Messages that a listener did not consume: they come again, or become dead letters", PROCESS,
    ),
    Metric("txmq_check_rounds_total", "counter", ("checker", "result"), "Rounds of checks: ok, problems", PROCESS),
    Metric("txmq_check_round_seconds", "histogram", ("checker",), "Seconds of a round of checks", PROCESS),
    Metric("txmq_check_last_round_timestamp_seconds", "gauge", ("checker",), "When the last round ended", PROCESS),
    Metric(
        "txmq_checked_transactions_total", "counter", ("verdict",),
        "Transactions by a listener's answer, or by what the discard policy did", PROCESS,
    ),
    Metric("txmq_process_commits_total", "counter", ("table",), "Commits that this process made", PROCESS),
    Metric(
        "txmq_commit_retries_total", "counter", ("table",),
        "Commits that this process tried again, because another writer was faster", PROCESS,
    ),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}
WATCH_METRICS = frozenset(metric.name for metric in METRICS if metric.origin == LOG and START in metric.help)
"""Metrics that only a long-running program can count. A short program would report 0 each time."""
