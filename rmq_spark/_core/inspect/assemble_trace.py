"""Assembles the trace of a transaction or a half batch from ``half``, ``op`` and ``messages``.

Upkeep removes rows over time. What remains of a half batch::

    in half                        everything
    archived, op rows not pruned   everything; the rows of a transaction by key only when they were committed
    archived, op rows pruned       decisions (the last 100), counted for the half batch as a whole; places
    forgotten                      places of messages that have not expired
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.inspect.trace import Trace, TraceEvent, TraceKind
from rmq_spark._core.inspect.trace_events import (
    Chosen,
    archived_events,
    by_time,
    drained_event,
    op_events,
    placed_events,
)
from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.batch_state import BatchState, RowState, rolled_back_as
from rmq_spark._core.log.damage import retry_on_newest_state
from rmq_spark._core.log.half import Segment
from rmq_spark._core.log.half_header import name_of
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.op import OpKind
from rmq_spark._core.vocabulary.ids import parse_message_id, parse_transaction_id
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX
from rmq_spark._core.vocabulary.remedy import LIST_PENDING
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.text import message_count
from rmq_spark._core.vocabulary.times import EPOCH
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY, MESSAGE
from rmq_spark.errors import HalfBatchLeftError, HalfBatchNotFoundError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

LOOKS = 3
"""Number of tries, because a half batch may leave while it is read."""
TRACED_COLUMNS = (
    "half_id", "file_no", "row_no", "attempt", "topic", "queue_id", "queue_offset", "commit_timestamp", "op_version",
    "producer_group", "transaction_per", "store_timestamp",
)  # fmt: skip
COUNTED = {
    RowState.PENDING: "pending",
    RowState.COMMITTED: "committed",
    RowState.WAITING: "waiting",
    RowState.ROLLED_BACK: "rolled_back",
    RowState.ROLLED_BACK_BY_CHECK: "rolled_back_by_check",
    RowState.ROLLED_BACK_BY_DISCARD: "rolled_back_by_discard",
    RowState.QUARANTINED: "quarantined",
}
"""Names of the states of messages. ``waiting`` messages are committed, and wait for their time or for an earlier
message of their sharding key."""
_DECISIONS = (OpKind.COMMIT.value, OpKind.ROLLBACK.value, OpKind.QUARANTINE.value, OpKind.REOPEN.value)
OUTCOMES = ("committed", "rolled_back", "rolled_back_by_check", "rolled_back_by_discard")
"""Counts that are kept of a half batch that has left."""


# ---------------------------------------------------------------- the traced id
@dataclass(frozen=True)
class _Target:
    half_id: str
    transaction_id: str | None = None
    message_id: str | None = None
    attempt: int | None = None
    rest: str | None = None  # the end of a transaction id: the key, or the address
    address: tuple[int, int] | None = None

    @classmethod
    def of(cls, transaction_id: str | None, half_id: str | None, message_id: str | None) -> _Target:
        ids = {"transaction_id": transaction_id, "half_id": half_id, "message_id": message_id}
        names = [name for name, value in ids.items() if value is not None]
        if len(names) != 1:
            raise OptionError(f"trace needs one of {', '.join(ids)}: {' and '.join(names) or 'none'} was given")
        if message_id is not None:
            half_batch, file_no, row_no = parse_message_id(message_id)
            return cls(half_batch, message_id=message_id, address=(file_no, row_no))
        if transaction_id is not None:
            half_batch, attempt, rest = parse_transaction_id(transaction_id)
            return cls(half_batch, transaction_id, attempt=attempt, rest=rest)
        return cls(str(half_id))

    @property
    def name(self) -> str:
        return self.message_id or self.transaction_id or self.half_id

    def is_whole(self, per: str | None) -> bool:
        """Return True when all messages of the half batch are traced.

        Raises
        ------
        HalfBatchNotFoundError
            When the id cannot be one of this half batch's transactions.
        """
        if self.address is not None:
            return False
        if self.transaction_id is None or per is None:
            return True
        if (per == BATCH) is not (self.rest is None):
            shape = "" if per == BATCH else ":<key>" if per == KEY else ":<file>.<row>"
            raise HalfBatchNotFoundError(
                f"half batch {self.half_id!r} has no transaction {self.transaction_id!r}: its transactions are named "
                f"{self.half_id}:<attempt>{shape}"
            )
        return per == BATCH

    def row(self) -> tuple[int, int] | None:
        """Return the address of the traced message, when the id contains it."""
        if self.address is not None:
            return self.address
        file_no, dot, row_no = (self.rest or "").partition(".")
        return (int(file_no), int(row_no)) if dot and file_no.isdecimal() and row_no.isdecimal() else None

    def nothing(self) -> HalfBatchNotFoundError:
        what = "message" if self.message_id is not None else "transaction"
        return HalfBatchNotFoundError(f"half batch {self.half_id!r} has no {what} {self.name!r}")


def _is_utf8(text: str) -> bool:
    """Return True when UTF-8 can encode a text: it cannot encode a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@retry_on_newest_state
def trace(
    engine: Engine, transaction_id: str | None = None, half_id: str | None = None, message_id: str | None = None
) -> Trace:
    """See :meth:`CommitLog.trace`."""
    target = _Target.of(transaction_id, half_id, message_id)
    for _ in range(LOOKS - 1):
        try:
            return _trace_once(engine, target)
        except HalfBatchLeftError:
            continue
    return _trace_once(engine, target)


def _trace_once(engine: Engine, target: _Target) -> Trace:
    if not target.half_id.isascii():  # no half batch has such an id
        raise _not_found(engine, target)
    if not _is_utf8(target.name):  # every key is UTF-8
        raise target.nothing()
    with engine.lock:
        try:
            record = engine.half.get(target.half_id)
        except HalfBatchNotFoundError:
            record = None
        # Read op after half: a half batch that has left half was archived in op before.
        archived = engine.ledger.archived(target.half_id)
        rows = engine.ledger.scan([target.half_id])
        engine.drained.border()
    if archived is not None:
        return _trace_of_archived(engine, target, record, archived, rows)
    return _trace_of_forgotten(engine, target) if record is None else _trace_in_half(engine, target, record, rows)


# ---------------------------------------------------------------- still in half
def _trace_in_half(engine: Engine, target: _Target, record: HalfRecord, rows: pa.Table) -> Trace:
    state = engine.state_of(record, refresh=False)
    chosen = _chosen_in_half(engine, target, record)
    traced = _row_set(record, chosen)
    attempt = max(number for number in state.attempts(*RowState) if state.rows_in(tuple(RowState), number) & traced)
    if target.attempt is not None and target.attempt > attempt:
        raise HalfBatchNotFoundError(
            f"{target.name!r} names attempt {target.attempt}, and the newest one of these messages is {attempt}"
        )
    events = [TraceEvent(record.prepared_at, TraceKind.PREPARED, traced.count), *op_events(rows, chosen, record.rows)]
    return replace(
        _bare_trace(target, record),
        messages=traced.count,
        outcome=_count_outcomes(state, traced),
        attempt=attempt,
        in_conflict=bool(state.conflicting() & traced),
        lease_until=state.lease_until if state.leased(engine.runtime.now()) else None,
        waits_for=tuple(engine.ledger.blocked_by(record)),
        topics=tuple(sorted({s.topic for n in traced for s in record.files[n].segments if _has(traced[n], s)})),
        events=by_time([*events, *drained_event(engine, events)]),
    )


def _bare_trace(target: _Target, record: HalfRecord) -> Trace:
    """Return a trace with only the header of a half batch."""
    header = record.header
    return Trace(
        half_id=record.half_id,
        where="half",
        messages=0,
        outcome={},
        transaction_id=target.transaction_id,
        message_id=target.message_id,
        app_id=header.app_id,
        batch_id=header.batch_id,
        producer_group=header.producer_group,
        transaction_per=header.transaction_per,
        query_id=header.query_id,
        fence_id=header.fence_id,
        prepared_at=record.prepared_at,
    )


def chosen_rows(engine: Engine, of: Trace, record: HalfRecord) -> RowSet:
    """Return the rows of a half batch that a trace covers."""
    if of.transaction_id is None and of.message_id is None:
        return _row_set(record, None)
    target = _Target.of(of.transaction_id, None, of.message_id)
    return _row_set(record, _chosen_in_half(engine, target, record))


def _row_set(record: HalfRecord, chosen: Chosen | None) -> RowSet:
    every = RowSet({n: b"\x01" * f.rows for n, f in record.files.items()})
    return every if chosen is None else every & {n: b.ljust(record.files[n].rows, b"\0") for n, b in chosen.items()}


def _has(bits: bytes, segment: Segment) -> bool:
    return b"\x01" in bits[segment.first : segment.last + 1]


def _count_outcomes(state: BatchState, traced: RowSet) -> dict[str, int]:
    counts = {name: (state.rows_in((row_state,)) & traced).count for row_state, name in COUNTED.items()}
    return {name: count for name, count in counts.items() if count}


def _chosen_in_half(engine: Engine, target: _Target, record: HalfRecord) -> Chosen | None:
    per = record.header.transaction_per
    if target.is_whole(per):
        return None
    if (address := target.row()) is not None and (per == MESSAGE or target.address is not None):
        file_no, row_no = address
        if file_no not in record.files or row_no >= record.files[file_no].rows:
            raise target.nothing()
        return {file_no: _one_row(row_no)}
    where = (pc.field("half_id") == record.half_id) & (pc.field("transaction_key") == target.rest)
    paths = list(dict.fromkeys(file.path for file in record.files.values()))
    chosen = _bits(engine.half.table.read(paths, ["file_no", "row_no"], where))
    if not chosen:
        raise target.nothing()
    return chosen


def _one_row(row_no: int) -> bytes:
    return bytes(row_no) + b"\x01"


def _bits(rows: pa.Table) -> dict[int, bytes]:
    """Return rows, given by their addresses (``file_no, row_no``), as bytes by file."""
    bits_by_file: dict[int, bytearray] = {}
    for file_no, row_no in zip(rows["file_no"].to_pylist(), rows["row_no"].to_pylist(), strict=True):
        bits = bits_by_file.setdefault(file_no, bytearray())
        bits.extend(bytes(max(0, row_no + 1 - len(bits))))
        bits[row_no] = 1
    return {file_no: bytes(bits) for file_no, bits in bits_by_file.items()}


# ---------------------------------------------------------------- settled, no longer in half
def _trace_of_archived(
    engine: Engine, target: _Target, record: HalfRecord | None, archived: Archived, rows: pa.Table
) -> Trace:
    """Return the trace of a half batch that is about to leave (then ``record`` is given), or has left."""
    visible = _visible_messages(engine, target, archived)
    chosen = _chosen_of_archived(engine, target, record, archived, visible)
    unknown: list[str] = []
    decided = rows.filter(pc.is_in(rows["kind"], value_set=pa.array(_DECISIONS)))
    if sum(decided["count"].to_pylist()) < sum(decision.count for decision in archived.decisions):
        is_old = pc.is_in(rows["kind"], value_set=pa.array([*_DECISIONS, OpKind.PLACE.value]))
        rows = rows.filter(pc.invert(is_old))
        events = [*archived_events(archived), *placed_events(visible), *op_events(rows, chosen, archived.rows)]
        unknown.append("checks and leases are forgotten: upkeep pruned what op said of it, but for the decisions")
        if chosen is not None:
            batch_size = message_count(archived.rows)
            unknown.append(f"the decisions are those on its half batch as a whole, which had {batch_size}")
    else:
        events = list(op_events(rows, chosen, archived.rows))
    messages, outcome = archived.rows, {name: getattr(archived, name) for name in OUTCOMES if getattr(archived, name)}
    if chosen is not None:
        messages, outcome = (
            visible.num_rows,
            {"committed": visible.num_rows} if visible.num_rows else _last_outcome(events),
        )
        messages = messages or sum(outcome.values())
    if chosen is not None and not messages:
        were = "was" if archived.committed == 1 else "were"
        unknown.append(
            f"table messages does not have it. Of the {message_count(archived.rows)} of its half batch "
            f"{archived.committed} {were} committed: it was rolled back, or has expired, or there never was such a one"
        )
    elif chosen is None and visible.num_rows < archived.committed:
        expired = archived.committed - visible.num_rows
        unknown.append(
            f"of its {archived.committed} committed messages {expired} {'has' if expired == 1 else 'have'} expired"
        )
    bare = _bare_trace(target, record or HalfRecord.of_archived(archived))
    prepared = TraceEvent(bare.prepared_at or archived.at or EPOCH, TraceKind.PREPARED, messages)
    places = {place.topic for event in events for place in event.places}
    return replace(
        bare,
        where="left" if record is None else "leaving",
        messages=messages,
        outcome=outcome,
        attempt=archived.attempt,
        topics=tuple(sorted({*pc.unique(visible["topic"]).to_pylist(), *places})),
        events=by_time([prepared, *events, *drained_event(engine, events)]),
        unknown=tuple(unknown),
    )


def _trace_of_forgotten(engine: Engine, target: _Target) -> Trace:
    """Return the trace of a half batch of which only visible messages are left."""
    visible = _visible_messages(engine, target, None)
    if visible.num_rows == 0:
        raise _not_found(engine, target)
    first = visible.slice(0, 1).to_pylist()[0]
    app_id, _, batch_id = name_of(target.half_id).rpartition(":")
    events = list(placed_events(visible))
    return Trace(
        half_id=target.half_id,
        where="forgotten",
        messages=visible.num_rows,
        outcome={"committed": visible.num_rows},
        transaction_id=target.transaction_id,
        message_id=target.message_id,
        app_id=app_id,
        batch_id=int(batch_id),
        producer_group=first["producer_group"],
        transaction_per=first["transaction_per"],
        prepared_at=pc.max(visible["store_timestamp"]).as_py(),
        attempt=pc.max(visible["attempt"]).as_py(),
        topics=tuple(sorted(pc.unique(visible["topic"]).to_pylist())),
        events=by_time([*events, *drained_event(engine, events)]),
        unknown=("only its visible messages are left: what was decided, why, and what was rolled back, is forgotten",),
    )


def _chosen_of_archived(
    engine: Engine, target: _Target, record: HalfRecord | None, archived: Archived, visible: pa.Table
) -> Chosen | None:
    """Return the traced rows: from half while it has them, then from the visible messages or the id."""
    if target.is_whole(archived.transaction_per):
        return None
    if record is not None:
        return _chosen_in_half(engine, target, record)
    address = target.row()
    return {address[0]: _one_row(address[1])} if address is not None and visible.num_rows == 0 else _bits(visible)


def _last_outcome(events: Sequence[TraceEvent]) -> dict[str, int]:
    """Return the outcome of a transaction that is not visible, by the last decision on it."""
    for event in reversed(by_time(events)):
        if event.kind is TraceKind.ROLLED_BACK and event.op_version is not None:
            return {COUNTED[rolled_back_as(event.decided_by, event.refused)]: event.messages}
    return {}


def _not_found(engine: Engine, target: _Target) -> HalfBatchNotFoundError:
    app_id, _, batch_id = name_of(target.half_id).rpartition(":")
    last = engine.last_batch_id(app_id) if app_id.isascii() and app_id and batch_id.isdecimal() else None
    if last is not None and int(batch_id) <= last:
        return HalfBatchNotFoundError(
            f"nothing is kept of half batch {target.half_id!r}: application {app_id!r} has prepared batches up to "
            f"{last}, so it was settled and has been forgotten, and none of its messages is visible any more"
        )
    return HalfBatchNotFoundError(
        f"no half batch {target.half_id!r} in this commit log, or one that was settled long ago, has no visible "
        "messages, and is forgotten",
        remedy=LIST_PENDING,
    )


def _visible_messages(engine: Engine, target: _Target, archived: Archived | None) -> pa.Table:
    """Return the traced messages in the table ``messages``, with the columns :data:`TRACED_COLUMNS`."""
    table = engine.messages_table
    with engine.lock:
        table.refresh()
        actions = table.actions()
    if archived is not None:
        since = datetime.fromtimestamp(archived.prepared_ms / 1000, timezone.utc) - timedelta(
            seconds=2 * CLOCK_SKEW_S_MAX
        )
        kind = actions.schema.field("max.commit_timestamp").type
        may_hold = pc.and_(
            pc.fill_null(pc.greater_equal(actions["max.commit_timestamp"], pa.scalar(since, kind)), True),
            pc.fill_null(pc.less_equal(actions["min.op_version"], archived.last_version), True),
        )
        actions = actions.filter(may_hold)
    where = pc.field("half_id") == target.half_id
    if target.address is not None:
        where &= (pc.field("file_no") == target.address[0]) & (pc.field("row_no") == target.address[1])
    elif target.transaction_id is not None:
        where &= pc.field("transaction_id") == target.transaction_id
    rows = table.read(actions["path"].to_pylist(), TRACED_COLUMNS, where)
    return rows.sort_by([("op_version", "ascending"), ("topic", "ascending"), ("queue_id", "ascending"),
                          ("queue_offset", "ascending")])  # fmt: skip
