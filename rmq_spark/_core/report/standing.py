"""The present state of a commit log: pending half batches, lags of consumer groups, sizes of topics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.consumers.consumer_group import BEHIND_SCHEMA, ConsumerGroup, groups
from rmq_spark._core.inspect.history import sizes
from rmq_spark._core.log.batch_state import BatchState, RowState
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.op import Kind, OpRow
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.report.over_time import case
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.verdicts import ROLLBACK_MESSAGE
from rmq_spark.errors import CorruptLogError, GroupNotFoundError, HalfBatchNotFoundError

AGES = ((10, "under 10 s"), (60, "under 1 min"), (600, "under 10 min"), (3600, "under 1 h"), (86400, "under 1 day"))
OLDEST = "1 day or more"
EVERY_AGE = (*(name for _, name in AGES), OLDEST)

AGE_SCHEMA = pa.schema([("age", pa.string()), ("messages", pa.int64()), ("batches", pa.int64())])
LAG_SCHEMA = pa.schema(
    [("group", pa.string()), ("messages", pa.int64()), ("seconds", pa.float64()), ("topics", pa.string())]
)
PENDING_SCHEMA = pa.schema(
    [
        ("half_id", pa.string()),
        ("producer_group", pa.string()),
        ("prepared_at", TIMESTAMP),
        ("messages", pa.int64()),
        ("seconds", pa.float64()),
        ("check_times", pa.int32()),
        ("leased", pa.bool_()),
        ("reason", pa.string()),
    ]
)
TOPIC_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("queues", pa.int32()),
        ("fifo", pa.bool_()),
        ("retention_s", pa.float64()),
        ("committed", pa.int64()),
        ("expired", pa.int64()),
        ("drained", pa.int64()),
        ("bytes", pa.int64()),
    ]
)


def ages(open_batches: pa.Table, now: datetime) -> pa.Table:
    """Return pending messages by age, with a row for every age: ``age, messages, batches``."""
    seconds = since(open_batches["prepared_at"], now)
    cases = [(pc.fill_null(pc.less(seconds, limit), False), name) for limit, name in AGES]
    age = pc.fill_null(case(cases), OLDEST)  # half batches reopened below the mark have no time, and are the oldest
    rows = pa.table({"age": age, "messages": open_batches["messages"]})
    sums = rows.group_by("age", use_threads=False).aggregate([("messages", "sum"), ("messages", "count")])
    sums_by_age = {row["age"]: row for row in sums.to_pylist()}
    age_rows = [
        {"age": age, "messages": sums_by_age[age]["messages_sum"], "batches": sums_by_age[age]["messages_count"]}
        if age in sums_by_age
        else {"age": age, "messages": 0, "batches": 0}
        for age in EVERY_AGE
    ]
    return pa.Table.from_pylist(age_rows, schema=AGE_SCHEMA)


def since(times: pa.ChunkedArray, now: datetime) -> pa.ChunkedArray:
    """Return the seconds since these times, at least 0; null for null."""
    age_us = pc.subtract(int(now.timestamp() * 1_000_000), pc.cast(times, pa.int64()))
    seconds = pc.divide(pc.cast(age_us, pa.float64()), 1e6)
    return pc.if_else(pc.less(seconds, 0.0), 0.0, seconds)


Listed = Sequence[dict[str, Any]]
"""Half batches with the columns of :data:`PENDING_SCHEMA`, but for the reason."""


def pending(engine: Engine, open_batches: pa.Table, now: datetime) -> Listed:
    """Return pending half batches, with their groups and their numbers of checks."""
    rows = []
    for half_id in open_batches["half_id"].to_pylist():
        try:
            record = engine.get(half_id)
        except HalfBatchNotFoundError:  # the half batch was settled meanwhile, and has left
            continue
        state = engine.state_of(record, refresh=False)
        pending_rows = state.rows_in((RowState.PENDING,))
        if pending_rows.count:
            rows.append(_listed(record, state, pending_rows, now))
    return rows


def to_settle(engine: Engine, half_ids: Sequence[str], now: datetime) -> Listed:
    """Return half batches that are quarantined or in conflict, in the form of :func:`pending`. The messages are those
    in that state."""
    rows = []
    for half_id in half_ids:
        try:
            record = engine.get(half_id)
        except HalfBatchNotFoundError:  # a person has settled it meanwhile
            continue
        except CorruptLogError:
            rows.append({"half_id": half_id, "reason": "it cannot be read: txmq doctor says more"})
            continue
        state = engine.state_of(record, refresh=False)
        rows.append(_listed(record, state, state.conflicting() or state.rows_in((RowState.QUARANTINED,)), now))
    return rows


def _listed(record: HalfRecord, state: BatchState, rows: RowSet, now: datetime) -> dict[str, Any]:
    return {
        "half_id": record.half_id,
        "producer_group": record.header.producer_group,
        "prepared_at": record.prepared_at,
        "messages": rows.count,
        "seconds": max(0.0, (now - record.prepared_at).total_seconds()),
        "check_times": state.check_times(rows),
        "leased": state.leased(now),
    }


def with_reasons(engine: Engine, *lists: Listed) -> list[pa.Table]:
    """Return lists of half batches as tables, with what ``op`` last said of each; of one in conflict, both verdicts."""
    said: dict[str, list[OpRow]] = {row["half_id"]: [] for rows in lists for row in rows}
    for fields in engine.ledger.scan(list(said)).to_pylist() if said else ():
        said[fields["half_id"]].append(OpRow.of(fields))
    return [
        pa.Table.from_pylist([{"reason": _reason(said[row["half_id"]]), **row} for row in rows], PENDING_SCHEMA)
        for rows in lists
    ]


def _reason(op_rows: Sequence[OpRow]) -> str | None:
    last = next((row for row in reversed(op_rows) if row.kind is Kind.CONFLICT), None)
    if last is None or last.attempt is None:  # without an attempt, a person has resolved it
        return next((row.reason for row in reversed(op_rows) if row.reason), None)
    counts, late = (Kind.COMMIT, "ROLLBACK") if last.verdict == str(ROLLBACK_MESSAGE) else (Kind.ROLLBACK, "COMMIT")
    first = next((row for row in op_rows if row.kind is counts), OpRow(counts))
    why = f" ({first.reason})" if first.reason else ""
    return f"{counts.value.upper()} by {first.decided_by}{why}; too late: {late} by {last.decided_by}"


def behind(engine: Engine) -> pa.Table:
    """Return how far consumer groups are behind, by group and queue: ``consumer_group, topic, queue_id, next_offset,
    end_offset, lag, lag_seconds``."""
    parts = [BEHIND_SCHEMA.empty_table()]
    for name in groups(engine) if engine.has_groups() else ():  # a look makes no table
        with suppress(GroupNotFoundError):  # the group was deleted meanwhile
            parts.append(ConsumerGroup(engine, name).behind())
    return pa.concat_tables(parts)


def lag(queues: pa.Table) -> pa.Table:
    """Return the lags of consumer groups from those of their queues, the furthest behind first: ``group, messages,
    seconds, topics``.

    ``seconds`` is the time since the commit of the oldest message that the group has not read.
    """
    rows: dict[str, dict[str, Any]] = {}
    for queue in queues.to_pylist():
        row = rows.setdefault(
            queue["consumer_group"],
            {"group": queue["consumer_group"], "messages": 0, "seconds": 0.0, "topics": set()},
        )
        row["messages"] += queue["lag"]
        row["seconds"] = max(row["seconds"], queue["lag_seconds"])
        row["topics"].add(queue["topic"])
    named = [{**row, "topics": ", ".join(sorted(row["topics"]))} for row in rows.values()]
    table = pa.Table.from_pylist(named, schema=LAG_SCHEMA)
    return table.sort_by([("messages", "descending"), ("group", "ascending")])


def topics(engine: Engine) -> pa.Table:
    """Return the topics, the largest first: ``topic, queues, fifo, retention_s, committed, expired``, and ``drained``
    messages and their ``bytes`` in the table messages."""
    names, retentions, fifo = (
        engine.topics(),
        {name: topic.retention_s for name, topic in engine.topic_store.all().items()},
        engine.topic_store.seen().fifo,
    )
    ends, firsts = engine.tails(), engine.firsts(refresh=False)
    sizes_by_topic = {row["topic"]: row for row in sizes(engine).to_pylist()}
    committed, expired = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for sums, offsets in ((committed, ends), (expired, firsts)):
        for (topic, _), offset in offsets.items():
            sums[topic] = sums.get(topic, 0) + offset
    rows = [
        {
            "topic": name,
            "queues": queues,
            "fifo": name in fifo,
            "retention_s": retentions.get(name),
            "committed": committed[name],
            "expired": expired[name],
            "drained": sizes_by_topic[name]["messages"] if name in sizes_by_topic else 0,
            "bytes": sizes_by_topic[name]["bytes"] if name in sizes_by_topic else 0,
        }
        for name, queues in names.items()
    ]
    table = pa.Table.from_pylist(rows, schema=TOPIC_SCHEMA)
    return table.sort_by([("bytes", "descending"), ("committed", "descending"), ("topic", "ascending")])
