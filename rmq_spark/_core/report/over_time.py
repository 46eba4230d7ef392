"""The events in the span of a report, aggregated by period."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.inspect.history import History, placed
from rmq_spark._core.log.op import OpKind, Who
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.report.span import Span
from rmq_spark._core.vocabulary.message import DLQ_PREFIX, RETRY_PREFIX, TIMESTAMP

TOPICS_MAX = 4
"""The most topics with a colour of their own. Smaller topics are summed up, and so are retries and dead letters."""
OTHERS, RETRIES, DEAD_LETTERS = "other topics", "retries", "dead letters"

COMMITTED = "committed"
ROLLED_BACK = "rolled back"
BY_CHECK = "rolled back by a check"
BY_POLICY = "given up by the policy"
UNKNOWN = "unknown: asked again later"
VERDICTS = (COMMITTED, ROLLED_BACK, BY_CHECK, BY_POLICY)
ANSWERS = (COMMITTED, ROLLED_BACK, UNKNOWN, BY_POLICY)

THROUGHPUT = pa.schema([("at", TIMESTAMP), ("topic", pa.string()), ("messages", pa.int64())])
BY_TIME = pa.schema([("at", TIMESTAMP), ("verdict", pa.string()), ("messages", pa.int64()), ("batches", pa.int64())])


def throughput(engine: Engine, span: Span) -> pa.Table:
    """Return the messages that became visible: ``at, topic, messages``."""
    return by_large_topics(placed(engine, span.since, span.period_s))


def by_large_topics(placed_counts: pa.Table) -> pa.Table:
    """Return counts of :func:`placed`, with the smaller topics summed up: ``at, topic, messages``."""
    topic = placed_counts["topic"]
    topic = pc.if_else(pc.starts_with(topic, DLQ_PREFIX), DEAD_LETTERS, topic)
    topic = pc.if_else(pc.starts_with(topic, RETRY_PREFIX), RETRIES, topic)
    by_topic = pa.table({"topic": topic, "n": placed_counts["messages"]}).group_by("topic", use_threads=False)
    largest = by_topic.aggregate([("n", "sum")]).sort_by([("n_sum", "descending"), ("topic", "ascending")])
    user_topics = [name for name in largest["topic"].to_pylist() if name not in (DEAD_LETTERS, RETRIES)]
    if len(user_topics) > TOPICS_MAX:
        small_topics = pa.array(user_topics[TOPICS_MAX:], pa.string())
        topic = pc.if_else(pc.is_in(topic, value_set=small_topics), OTHERS, topic)
    rows = pa.table({"at": placed_counts["at"], "topic": topic, "messages": placed_counts["messages"]})
    sums = rows.group_by(["at", "topic"], use_threads=False).aggregate([("messages", "sum")])
    return _in_order(sums.rename_columns(["at", "topic", "messages"]), THROUGHPUT)


def verdicts(happened: History, span: Span) -> pa.Table:
    """Return the messages and half batches with a verdict, by period: the last verdict of each message."""
    events = happened.events.drop_columns("messages").rename_columns({"standing": "messages"})
    events = events.filter(pc.greater(events["messages"], 0))
    rolled_back = pc.equal(events["kind"], OpKind.ROLLBACK.value)
    label = case(
        [
            (pc.equal(events["kind"], OpKind.COMMIT.value), COMMITTED),
            (pc.equal(events["kind"], OpKind.QUARANTINE.value), BY_POLICY),
            (pc.and_(rolled_back, _by(events, Who.DISCARD)), BY_POLICY),
            (
                pc.and_(rolled_back, pc.and_not(_by(events, Who.CHECK), pc.fill_null(events["refused"], False))),
                BY_CHECK,
            ),
            (rolled_back, ROLLED_BACK),
        ]
    )
    return _by_time(events, label, span)


def checks(happened: History, span: Span) -> pa.Table:
    """Return the results of checks of half batches, by period. Of checks older than the upkeep's grace, only verdicts
    are known."""
    events = happened.events
    by_check = pc.or_(_by(events, Who.CHECK), pc.equal(events["kind"], OpKind.CHECK.value))
    by_check = pc.or_(by_check, _by(events, Who.DISCARD))
    events = events.filter(by_check)
    label = case(
        [
            (pc.equal(events["kind"], OpKind.CHECK.value), UNKNOWN),
            (_by(events, Who.DISCARD), BY_POLICY),
            (pc.equal(events["kind"], OpKind.QUARANTINE.value), BY_POLICY),
            (pc.equal(events["kind"], OpKind.COMMIT.value), COMMITTED),
            (pc.equal(events["kind"], OpKind.ROLLBACK.value), ROLLED_BACK),
        ]
    )
    return _by_time(events, label, span)


def _by(events: pa.Table, who: Who) -> pa.ChunkedArray:
    return pc.fill_null(pc.equal(events["decided_by"], who.value), False)


def case(cases: Sequence[tuple[pa.ChunkedArray, str]]) -> pa.ChunkedArray:
    """Return the word of the first condition that holds; null when none holds."""
    words = pa.chunked_array([pa.nulls(len(cases[0][0]), pa.string())])
    for condition, word in reversed(cases):
        words = pc.if_else(condition, word, words)
    return words


def _by_time(events: pa.Table, label: pa.ChunkedArray, span: Span) -> pa.Table:
    rows = pa.table(
        {
            "at": span.period_of(events["at"]),
            "verdict": label,
            "messages": events["messages"],
            "half_id": events["half_id"],
        }
    )
    rows = rows.filter(pc.is_valid(label))
    sums = rows.group_by(["at", "verdict"], use_threads=False).aggregate(
        [("messages", "sum"), ("half_id", "count_distinct")]
    )
    return _in_order(sums.rename_columns(["at", "verdict", "messages", "batches"]), BY_TIME)


def _in_order(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    rows = rows.select(schema.names).cast(schema)
    return rows.sort_by([(name, "ascending") for name in schema.names[:2]])
