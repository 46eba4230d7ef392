"""What happened in the time of a report, summed up by period."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.inspect.history import Told, placed
from rmq_spark._core.log.op import Kind, Who
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.report.span import Span
from rmq_spark._core.vocabulary.message import DLQ_PREFIX, RETRY_PREFIX, TIMESTAMP

TOPICS_MAX = 4
"""Topics that have a colour of their own; the smaller ones are summed up. So are retries, and dead letters."""
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


def throughput(log: Engine, span: Span) -> pa.Table:
    """Messages that appeared: ``at, topic, messages``."""
    found = placed(log, span.since, span.period_s)
    topic = found["topic"]
    topic = pc.if_else(pc.starts_with(topic, DLQ_PREFIX), DEAD_LETTERS, topic)
    topic = pc.if_else(pc.starts_with(topic, RETRY_PREFIX), RETRIES, topic)
    by_topic = pa.table({"topic": topic, "n": found["messages"]}).group_by("topic", use_threads=False)
    largest = by_topic.aggregate([("n", "sum")]).sort_by([("n_sum", "descending"), ("topic", "ascending")])
    named = [t for t in largest["topic"].to_pylist() if t not in (DEAD_LETTERS, RETRIES)]
    if len(named) > TOPICS_MAX:
        small = pa.array(named[TOPICS_MAX:], pa.string())
        topic = pc.if_else(pc.is_in(topic, value_set=small), OTHERS, topic)
    rows = pa.table({"at": found["at"], "topic": topic, "messages": found["messages"]})
    sums = rows.group_by(["at", "topic"], use_threads=False).aggregate([("messages", "sum")])
    return _in_order(sums.rename_columns(["at", "topic", "messages"]), THROUGHPUT)


def verdicts(happened: Told, span: Span) -> pa.Table:
    """Messages and half batches that got a verdict, by period: the last one of each message."""
    events = happened.events.drop_columns("messages").rename_columns({"standing": "messages"})
    events = events.filter(pc.greater(events["messages"], 0))
    rolled_back = pc.equal(events["kind"], Kind.ROLLBACK.value)
    label = case(
        [
            (pc.equal(events["kind"], Kind.COMMIT.value), COMMITTED),
            (pc.equal(events["kind"], Kind.QUARANTINE.value), BY_POLICY),
            (pc.and_(rolled_back, _by(events, Who.DISCARD)), BY_POLICY),
            (
                pc.and_(rolled_back, pc.and_not(_by(events, Who.CHECK), pc.fill_null(events["refused"], False))),
                BY_CHECK,
            ),
            (rolled_back, ROLLED_BACK),
        ]
    )
    return _by_time(events, label, span)


def checks(happened: Told, span: Span) -> pa.Table:
    """What checks made of half batches, by period. An answered check that is older than the upkeep's grace is known by
    its verdict only."""
    events = happened.events
    asked = pc.or_(_by(events, Who.CHECK), pc.equal(events["kind"], Kind.CHECK.value))
    asked = pc.or_(asked, _by(events, Who.DISCARD))
    events = events.filter(asked)
    label = case(
        [
            (pc.equal(events["kind"], Kind.CHECK.value), UNKNOWN),
            (_by(events, Who.DISCARD), BY_POLICY),
            (pc.equal(events["kind"], Kind.QUARANTINE.value), BY_POLICY),
            (pc.equal(events["kind"], Kind.COMMIT.value), COMMITTED),
            (pc.equal(events["kind"], Kind.ROLLBACK.value), ROLLED_BACK),
        ]
    )
    return _by_time(events, label, span)


def _by(events: pa.Table, who: Who) -> pa.ChunkedArray:
    return pc.fill_null(pc.equal(events["decided_by"], who.value), False)


def case(cases: Sequence[tuple[pa.ChunkedArray, str]]) -> pa.ChunkedArray:
    """The word of the first condition that holds; null when none does."""
    found = pa.chunked_array([pa.nulls(len(cases[0][0]), pa.string())])
    for condition, word in reversed(cases):
        found = pc.if_else(condition, word, found)
    return found


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
