"""The unsettled messages of a commit log: pending, quarantined, in conflict, waiting."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.batch_state import BatchState, RowState
from rmq_spark._core.log.damage import retry_on_newest_state
from rmq_spark._core.log.half_header import name_of
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.op import OpKind
from rmq_spark._core.storage.table import live_paths
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import CorruptLogError, HalfBatchLeftError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

READ_AT_ONCE = 256
"""Half batches whose older op rows are read together. The reader keeps those of twice as many."""

PENDING_SCHEMA = pa.schema(
    [
        ("half_id", pa.string()),
        ("app_id", pa.string()),
        ("batch_id", pa.int64()),
        ("producer_group", pa.string()),
        ("attempt", pa.int32()),
        ("messages", pa.int64()),
        ("check_times", pa.int32()),
        ("prepared_at", TIMESTAMP),
        ("lease_until", TIMESTAMP),
        ("bytes", pa.int64()),
    ]
)


@retry_on_newest_state
def pending(engine: Engine, most: int | None = None) -> pa.Table:
    """See :meth:`CommitLog.pending`; of at most so many half batches, the oldest ones."""
    half_ids = engine.open_half_ids()[:most]
    rows: list[dict[str, object]] = [
        {"messages": file.rows, "prepared_at": _time_of(file.ms)} for file in engine.ledger.unreadable
    ]
    for half_id, record in present(engine, half_ids):
        if isinstance(record, CorruptLogError):
            rows.append(_summary_of_unreadable(engine, half_id))
            continue
        with suppress(HalfBatchLeftError):
            state = engine.state_of(record)
            attempts = state.attempts(RowState.PENDING)
            rows += [_summary(engine, record, state, attempt, RowState.PENDING) for attempt in attempts]
    return pa.Table.from_pylist(rows, schema=PENDING_SCHEMA)


def present(engine: Engine, half_ids: Iterable[str]) -> Iterator[tuple[str, HalfRecord | CorruptLogError]]:
    """Yield the half batches that have not left, and the error of one that cannot be read. The older op rows of many
    are read at once."""
    rest = iter(half_ids)
    while names := list(islice(rest, READ_AT_ONCE)):
        known: list[tuple[str, HalfRecord | CorruptLogError]] = []
        for half_id in names:
            try:
                known.append((half_id, _record(engine, half_id)))
            except HalfBatchLeftError:
                pass
            except CorruptLogError as problem:
                logger.debug("half batch %r cannot be read: %s", half_id, problem)
                known.append((half_id, problem))
        engine.ledger.read_older([record for _, record in known if isinstance(record, HalfRecord)])
        yield from known


@retry_on_newest_state
def _record(engine: Engine, half_id: str) -> HalfRecord:
    return engine.get(half_id)


@retry_on_newest_state
def quarantined(engine: Engine) -> pa.Table:
    """See :meth:`CommitLog.quarantined`."""
    rows: list[dict[str, object]] = []
    for half_id, record in present(engine, _ids_in_op(engine, pc.field("kind") == OpKind.QUARANTINE.value)):
        if isinstance(record, CorruptLogError):  # it was quarantined once, and nobody can look whether it still is
            rows.append(_summary_of_unreadable(engine, half_id))
            continue
        with suppress(HalfBatchLeftError):
            state = engine.state_of(record)
            attempts = state.attempts(RowState.QUARANTINED)
            rows += [_summary(engine, record, state, attempt, RowState.QUARANTINED) for attempt in attempts]
    rows.sort(key=lambda row: str(row["prepared_at"]))
    return pa.Table.from_pylist(rows, schema=PENDING_SCHEMA)


@retry_on_newest_state
def conflicts(engine: Engine) -> list[str]:
    """See :meth:`CommitLog.conflicts`."""
    with engine.lock:
        engine.ledger.refresh()
        return sorted(engine.ledger.view.conflicts)


@retry_on_newest_state
def open_messages(engine: Engine) -> dict[Queue, tuple[int, int]]:
    """See :meth:`CommitLog.open_messages`."""
    batches: dict[str, tuple[HalfRecord, BatchState]] = {}
    for half_id, record in present(engine, dict.fromkeys([*engine.open_half_ids(), *engine.ledger.view.waiting])):
        if isinstance(record, CorruptLogError):  # its messages are not counted
            continue
        with suppress(HalfBatchLeftError):
            state = engine.state_of(record)
            if not state.is_settled or half_id in engine.ledger.view.waiting:
                batches[half_id] = (record, state)
    counts: dict[Queue, tuple[int, int]] = {}
    for record, state in batches.values():
        for file_no, file in record.files.items():
            for segment in file.segments:
                states = state.files[file_no].state[segment.first : segment.last + 1]
                queue = (segment.topic, segment.queue_id)
                pending, waiting = counts.get(queue, (0, 0))
                counts[queue] = (pending + states.count(RowState.PENDING), waiting + states.count(RowState.WAITING))
    return counts


def _summary_of_unreadable(engine: Engine, half_id: str) -> dict[str, object]:
    """Return what the Delta log and the id tell of a half batch whose files cannot be read."""
    app_id, _, batch_id = name_of(half_id).rpartition(":")
    prepared = engine.ledger.maybe_open().get(half_id)
    return {
        "half_id": half_id,
        "app_id": app_id,
        "batch_id": int(batch_id) if batch_id.isdecimal() else None,
        "messages": None if prepared is None else prepared.rows,
        "prepared_at": None if prepared is None else _time_of(prepared.ms),
    }


def _time_of(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, timezone.utc)


def _ids_in_op(engine: Engine, where: pc.Expression) -> list[str]:
    with engine.lock:
        engine.ledger.refresh()
        paths = live_paths(engine.op_table)
    half_ids: list[str] = pc.unique(engine.op_table.read(paths, ["half_id"], where)["half_id"]).to_pylist()
    return half_ids


def _summary(
    engine: Engine, record: HalfRecord, state: BatchState, attempt: int, row_state: RowState
) -> dict[str, object]:
    rows = state.rows_in((row_state,), attempt)
    return {
        "half_id": record.half_id,
        "app_id": record.header.app_id,
        "batch_id": record.header.batch_id,
        "producer_group": record.header.producer_group,
        "attempt": attempt,
        "messages": rows.count,
        "check_times": state.check_times(rows),
        "prepared_at": record.prepared_at,
        "lease_until": state.lease_until,
        "bytes": engine.half.bytes_of(record),
    }
