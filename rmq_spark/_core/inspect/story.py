"""Puts the story of a transaction or a half batch together from ``half``, ``op`` and ``messages``.

What a half batch still tells, by what upkeep has taken::

    in half                        everything
    archived, op rows not pruned   everything; the rows of a transaction by key only when they were committed
    archived, op rows pruned       decisions (the last 100), counted for the half batch as a whole; places
    forgotten                      places of messages that have not expired
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.inspect.trace import Trace, TraceEvent, TraceKind, TracePlace
from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.damage import looks_again
from rmq_spark._core.log.half import Segment, name_of
from rmq_spark._core.log.half_table import HalfRecord
from rmq_spark._core.log.op import BatchState, Kind, OpRow, RowState, rolled_back_as
from rmq_spark._core.vocabulary.ids import parse_message_id, parse_transaction_id
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.text import message_count
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY, MESSAGE
from rmq_spark.errors import HalfBatchLeftError, HalfBatchNotFoundError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

LOOKS = 3
"""A half batch may leave while it is looked at: then it is looked at again."""
EPOCH = datetime.fromtimestamp(0, timezone.utc)
IN_MESSAGES = (
    "half_id", "file_no", "row_no", "attempt", "topic", "queue_id", "queue_offset", "commit_timestamp", "op_version",
    "producer_group", "transaction_per", "store_timestamp",
)  # fmt: skip
COUNTED = {
    RowState.PENDING: "pending",
    RowState.COMMITTED: "committed",
    RowState.DECIDED: "waiting",
    RowState.ROLLED_BACK: "rolled_back",
    RowState.ROLLED_BACK_BY_CHECK: "rolled_back_by_check",
    RowState.ROLLED_BACK_BY_DISCARD: "rolled_back_by_discard",
    RowState.QUARANTINED: "quarantined",
}
"""Names of what became of messages. ``waiting`` ones are committed, and wait for their time or for an earlier message
of their sharding key."""
_OF_KIND = {
    Kind.COMMIT.value: TraceKind.COMMITTED,
    Kind.PLACE.value: TraceKind.PLACED,
    Kind.ROLLBACK.value: TraceKind.ROLLED_BACK,
    Kind.QUARANTINE.value: TraceKind.QUARANTINED,
    Kind.CHECK.value: TraceKind.CHECKED,
    Kind.REOPEN.value: TraceKind.REOPENED,
    Kind.LEASE.value: TraceKind.LEASED,
    Kind.CONFLICT.value: TraceKind.CONFLICT,
    Kind.ARCHIVED.value: TraceKind.ARCHIVED,
}
_DECISIONS = (Kind.COMMIT.value, Kind.ROLLBACK.value, Kind.QUARANTINE.value, Kind.REOPEN.value)
OUTCOMES = ("committed", "rolled_back", "rolled_back_by_check", "rolled_back_by_discard")
"""Of a half batch that has left."""


# ---------------------------------------------------------------- what is asked for
@dataclass(frozen=True)
class _Asked:
    half_id: str
    transaction_id: str | None = None
    message_id: str | None = None
    attempt: int | None = None
    rest: str | None = None  # of a transaction id: the key, or the address
    address: tuple[int, int] | None = None

    @classmethod
    def of(cls, transaction_id: str | None, half_id: str | None, message_id: str | None) -> _Asked:
        given = {"transaction_id": transaction_id, "half_id": half_id, "message_id": message_id}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise OptionError(f"trace needs one of {', '.join(given)}: {' and '.join(named) or 'none'} was given")
        if message_id is not None:
            of, file_no, row_no = parse_message_id(message_id)
            return cls(of, message_id=message_id, address=(file_no, row_no))
        if transaction_id is not None:
            of, attempt, rest = parse_transaction_id(transaction_id)
            return cls(of, transaction_id, attempt=attempt, rest=rest)
        return cls(str(half_id))

    @property
    def name(self) -> str:
        return self.message_id or self.transaction_id or self.half_id

    def is_whole(self, per: str | None) -> bool:
        """True when all messages of the half batch are asked for.

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
        """The address of the one message that is asked for, when the id says it."""
        if self.address is not None:
            return self.address
        file_no, dot, row_no = (self.rest or "").partition(".")
        return (int(file_no), int(row_no)) if dot and file_no.isdecimal() and row_no.isdecimal() else None

    def nothing(self) -> HalfBatchNotFoundError:
        what = "message" if self.message_id is not None else "transaction"
        return HalfBatchNotFoundError(f"half batch {self.half_id!r} has no {what} {self.name!r}")


def _is_utf8(text: str) -> bool:
    """Whether UTF-8 can write a text: it cannot write a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Chosen = Mapping[int, bytes]
"""Of each half file, a byte for each row: 1 for those that are traced."""


@looks_again
def trace(
    log: Engine, transaction_id: str | None = None, half_id: str | None = None, message_id: str | None = None
) -> Trace:
    """See :meth:`CommitLog.trace`."""
    asked = _Asked.of(transaction_id, half_id, message_id)
    for _ in range(LOOKS - 1):
        try:
            return _look(log, asked)
        except HalfBatchLeftError:
            continue
    return _look(log, asked)


def _look(log: Engine, asked: _Asked) -> Trace:
    if not asked.half_id.isascii():  # no half batch is called so
        raise _not_found(log, asked)
    if not _is_utf8(asked.name):  # every key is
        raise asked.nothing()
    with log.lock:
        try:
            record = log.half.get(asked.half_id)
        except HalfBatchNotFoundError:
            record = None
        # op after half: what has left half by now was archived in op before.
        kept = log.ledger.archived(asked.half_id)
        rows = log.ledger.scan([asked.half_id])
        log.drained.border()
    if kept is not None:
        return _of_archived(log, asked, record, kept, rows)
    return _of_forgotten(log, asked) if record is None else _of_half(log, asked, record, rows)


# ---------------------------------------------------------------- still in half
def _of_half(log: Engine, asked: _Asked, record: HalfRecord, rows: pa.Table) -> Trace:
    state = log.state_of(record, refresh=False)
    chosen = _chosen_in_half(log, asked, record)
    traced = _row_set(record, chosen)
    attempt = max(a for a in state.attempts(*RowState) if state.rows_under(a) & traced)
    if asked.attempt is not None and asked.attempt > attempt:
        raise HalfBatchNotFoundError(
            f"{asked.name!r} names attempt {asked.attempt}, and the newest one of these messages is {attempt}"
        )
    events = [TraceEvent(record.prepared_at, TraceKind.PREPARED, traced.count), *_events(rows, chosen, record.rows)]
    return replace(
        _headed(asked, record),
        messages=traced.count,
        outcome=_outcome(state, traced),
        attempt=attempt,
        in_conflict=bool(state.conflicting() & traced),
        lease_until=state.lease_until if state.leased(log.machine.now()) else None,
        waits_for=tuple(log.ledger.holding_up(record)),
        topics=tuple(sorted({s.topic for n in traced for s in record.files[n].segments if _has(traced[n], s)})),
        events=_in_order([*events, *_drained_event(log, events)]),
    )


def _headed(asked: _Asked, record: HalfRecord) -> Trace:
    """A trace with the header of a half batch, and nothing else yet."""
    header = record.header
    return Trace(
        half_id=record.half_id,
        where="half",
        messages=0,
        outcome={},
        transaction_id=asked.transaction_id,
        message_id=asked.message_id,
        app_id=header.app_id,
        batch_id=header.batch_id,
        producer_group=header.producer_group,
        transaction_per=header.transaction_per,
        query_id=header.query_id,
        fence_id=header.fence_id,
        prepared_at=record.prepared_at,
    )


def chosen_rows(log: Engine, of: Trace, record: HalfRecord) -> RowSet:
    """The rows of a half batch that a trace is about."""
    if of.transaction_id is None and of.message_id is None:
        return _row_set(record, None)
    asked = _Asked.of(of.transaction_id, None, of.message_id)
    return _row_set(record, _chosen_in_half(log, asked, record))


def _row_set(record: HalfRecord, chosen: Chosen | None) -> RowSet:
    every = RowSet({n: b"\x01" * f.rows for n, f in record.files.items()})
    return every if chosen is None else every & {n: b.ljust(record.files[n].rows, b"\0") for n, b in chosen.items()}


def _has(bits: bytes, segment: Segment) -> bool:
    return b"\x01" in bits[segment.first : segment.last + 1]


def _outcome(state: BatchState, traced: RowSet) -> dict[str, int]:
    counts = {name: (state.rows_in((s,)) & traced).count for s, name in COUNTED.items()}
    return {name: count for name, count in counts.items() if count}


def _chosen_in_half(log: Engine, asked: _Asked, record: HalfRecord) -> Chosen | None:
    per = record.header.transaction_per
    if asked.is_whole(per):
        return None
    if (at := asked.row()) is not None and (per == MESSAGE or asked.address is not None):
        file_no, row_no = at
        if file_no not in record.files or row_no >= record.files[file_no].rows:
            raise asked.nothing()
        return {file_no: _one(row_no)}
    where = (pc.field("half_id") == record.half_id) & (pc.field("transaction_key") == asked.rest)
    paths = list(dict.fromkeys(file.path for file in record.files.values()))
    found = _bits(log.half.table.read(paths, ["file_no", "row_no"], where))
    if not found:
        raise asked.nothing()
    return found


def _one(row_no: int) -> bytes:
    return bytes(row_no) + b"\x01"


def _bits(rows: pa.Table) -> dict[int, bytes]:
    """Rows by their address (``file_no, row_no``)."""
    found: dict[int, bytearray] = {}
    for file_no, row_no in zip(rows["file_no"].to_pylist(), rows["row_no"].to_pylist(), strict=True):
        bits = found.setdefault(file_no, bytearray())
        bits.extend(bytes(max(0, row_no + 1 - len(bits))))
        bits[row_no] = 1
    return {file_no: bytes(bits) for file_no, bits in found.items()}


# ---------------------------------------------------------------- settled, and gone from half
def _of_archived(log: Engine, asked: _Asked, record: HalfRecord | None, kept: Archived, rows: pa.Table) -> Trace:
    """The story of a half batch that is about to leave (then there is a record), or has left."""
    visible = _visible(log, asked, kept)
    chosen = _chosen_of_archived(log, asked, record, kept, visible)
    unknown: list[str] = []
    decided = rows.filter(pc.is_in(rows["kind"], value_set=pa.array(_DECISIONS)))
    if sum(decided["count"].to_pylist()) < sum(d.count for d in kept.decisions):
        old = pc.is_in(rows["kind"], value_set=pa.array([*_DECISIONS, Kind.PLACE.value]))
        rows = rows.filter(pc.invert(old))
        events = [*_of_archive(kept), *_placed_events(visible), *_events(rows, chosen, kept.rows)]
        unknown.append("checks and leases are forgotten: upkeep pruned what op said of it, but for the decisions")
        if chosen is not None:
            whole = message_count(kept.rows)
            unknown.append(f"the decisions are those on its half batch as a whole, which had {whole}")
    else:
        events = list(_events(rows, chosen, kept.rows))
    messages, outcome = kept.rows, {name: getattr(kept, name) for name in OUTCOMES if getattr(kept, name)}
    if chosen is not None:
        messages, outcome = (
            visible.num_rows,
            {"committed": visible.num_rows} if visible.num_rows else _last_word(events),
        )
        messages = messages or sum(outcome.values())
    if chosen is not None and not messages:
        were = "was" if kept.committed == 1 else "were"
        unknown.append(
            f"table messages does not have it. Of the {message_count(kept.rows)} of its half batch "
            f"{kept.committed} {were} committed: it was rolled back, or has expired, or there never was such a one"
        )
    elif chosen is None and visible.num_rows < kept.committed:
        gone = kept.committed - visible.num_rows
        unknown.append(f"of its {kept.committed} committed messages {gone} {'has' if gone == 1 else 'have'} expired")
    found = _headed(asked, record or HalfRecord.of_archived(kept))
    prepared = TraceEvent(found.prepared_at or kept.at or EPOCH, TraceKind.PREPARED, messages)
    places = {p.topic for event in events for p in event.places}
    return replace(
        found,
        where="left" if record is None else "leaving",
        messages=messages,
        outcome=outcome,
        attempt=kept.attempt,
        topics=tuple(sorted({*pc.unique(visible["topic"]).to_pylist(), *places})),
        events=_in_order([prepared, *events, *_drained_event(log, events)]),
        unknown=tuple(unknown),
    )


def _of_forgotten(log: Engine, asked: _Asked) -> Trace:
    """The story that the visible messages of a half batch tell of which nothing else is kept."""
    visible = _visible(log, asked, None)
    if visible.num_rows == 0:
        raise _not_found(log, asked)
    first = visible.slice(0, 1).to_pylist()[0]
    app_id, _, batch_id = name_of(asked.half_id).rpartition(":")
    events = list(_placed_events(visible))
    return Trace(
        half_id=asked.half_id,
        where="forgotten",
        messages=visible.num_rows,
        outcome={"committed": visible.num_rows},
        transaction_id=asked.transaction_id,
        message_id=asked.message_id,
        app_id=app_id,
        batch_id=int(batch_id),
        producer_group=first["producer_group"],
        transaction_per=first["transaction_per"],
        prepared_at=pc.max(visible["store_timestamp"]).as_py(),
        attempt=pc.max(visible["attempt"]).as_py(),
        topics=tuple(sorted(pc.unique(visible["topic"]).to_pylist())),
        events=_in_order([*events, *_drained_event(log, events)]),
        unknown=("only its visible messages are left: what was decided, why, and what was rolled back, is forgotten",),
    )


def _chosen_of_archived(
    log: Engine, asked: _Asked, record: HalfRecord | None, kept: Archived, visible: pa.Table
) -> Chosen | None:
    """The rows that are asked for: half tells while it has them, then the visible messages, or the id itself."""
    if asked.is_whole(kept.transaction_per):
        return None
    if record is not None:
        return _chosen_in_half(log, asked, record)
    at = asked.row()
    return {at[0]: _one(at[1])} if at is not None and visible.num_rows == 0 else _bits(visible)


def _last_word(events: Sequence[TraceEvent]) -> dict[str, int]:
    """What became of a transaction that is not visible, by the last decision on it."""
    for event in reversed(_in_order(events)):
        if event.kind is TraceKind.ROLLED_BACK and event.op_version is not None:
            return {COUNTED[rolled_back_as(event.decided_by, event.refused)]: event.messages}
    return {}


def _not_found(log: Engine, asked: _Asked) -> HalfBatchNotFoundError:
    app_id, _, batch_id = name_of(asked.half_id).rpartition(":")
    last = log.last_batch_id(app_id) if app_id.isascii() and app_id and batch_id.isdecimal() else None
    if last is not None and int(batch_id) <= last:
        return HalfBatchNotFoundError(
            f"nothing is kept of half batch {asked.half_id!r}: application {app_id!r} has prepared batches up to "
            f"{last}, so it was settled and has been forgotten, and none of its messages is visible any more"
        )
    return HalfBatchNotFoundError(
        f"no half batch {asked.half_id!r} in this commit log. log.pending() lists the open ones; one that was settled "
        "long ago, and has no visible messages, is forgotten"
    )


def _visible(log: Engine, asked: _Asked, kept: Archived | None) -> pa.Table:
    """Those messages that are in the table ``messages``: :data:`IN_MESSAGES`."""
    table = log.messages_table
    with log.lock:
        table.refresh()
        actions = table.actions()
    if kept is not None:
        since = datetime.fromtimestamp(kept.prepared_ms / 1000, timezone.utc) - timedelta(seconds=2 * CLOCK_SKEW_S_MAX)
        kind = actions.schema.field("max.commit_timestamp").type
        may_hold = pc.and_(
            pc.fill_null(pc.greater_equal(actions["max.commit_timestamp"], pa.scalar(since, kind)), True),
            pc.fill_null(pc.less_equal(actions["min.op_version"], kept.last_version), True),
        )
        actions = actions.filter(may_hold)
    where = pc.field("half_id") == asked.half_id
    if asked.address is not None:
        where &= (pc.field("file_no") == asked.address[0]) & (pc.field("row_no") == asked.address[1])
    elif asked.transaction_id is not None:
        where &= pc.field("transaction_id") == asked.transaction_id
    found = table.read(actions["path"].to_pylist(), IN_MESSAGES, where)
    return found.sort_by([("op_version", "ascending"), ("topic", "ascending"), ("queue_id", "ascending"),
                          ("queue_offset", "ascending")])  # fmt: skip


def _of_archive(kept: Archived | None) -> Iterator[TraceEvent]:
    for d in () if kept is None else kept.decisions:
        yield TraceEvent(d.at, _OF_KIND[d.kind], d.count, d.attempt, d.decided_by, d.reason, refused=d.refused)


def _placed_events(visible: pa.Table) -> Iterator[TraceEvent]:
    """Placements as the messages themselves tell them."""
    by_commit: dict[tuple[int, datetime, int], list[TracePlace]] = {}
    names = ["op_version", "commit_timestamp", "attempt", "topic", "queue_id", "queue_offset"]
    for version, at, attempt, topic, queue_id, offset in zip(*(visible[n].to_pylist() for n in names), strict=True):
        by_commit.setdefault((version, at, attempt), []).append(TracePlace(topic, queue_id, offset, offset))
    for (version, at, attempt), places in by_commit.items():
        yield TraceEvent(at, TraceKind.PLACED, len(places), attempt, places=_joined(places), op_version=version)


# ---------------------------------------------------------------- events
def _events(rows: pa.Table, chosen: Chosen | None, every: int | None) -> Iterator[TraceEvent]:
    """What op rows say of the chosen messages: an event for those of a commit that say the same."""
    found: dict[tuple[Any, ...], tuple[int, list[TracePlace]]] = {}
    conflicts: set[OpRow] = set()  # a mark repeats those that are open
    for read in rows.to_pylist():
        row = OpRow.of(read)
        count, places = _named(row, chosen, every)
        if chosen is not None and not count and row.kind not in (Kind.LEASE, Kind.ARCHIVED):
            continue
        kind = _OF_KIND[row.kind]
        if row.kind is Kind.CONFLICT:
            said_once = replace(row, op_time=None)
            if row.attempt is None:
                kind = TraceKind.RESOLVED
                conflicts.clear()
            elif said_once in conflicts:
                continue
            conflicts.add(said_once)
        who = None if row.decided_by is None else str(row.decided_by)
        said = (read["version"], row.op_time, kind, row.attempt, who, row.reason, row.until, row.verdict, row.refused)
        before, more = found.get(said, (0, []))
        found[said] = (before + count, [*more, *places])
    for (version, at, kind, attempt, who, reason, until, verdict, refused), (count, places) in found.items():
        yield TraceEvent(at, kind, count, attempt, who, reason, _joined(places), until, verdict, version, refused)


def _named(row: OpRow, chosen: Chosen | None, every: int | None) -> tuple[int, list[TracePlace]]:
    """How many of the chosen messages an op row names, and where it places them."""
    queue = None if row.topic is None or row.queue_id is None else (row.topic, row.queue_id)
    at = None if queue is None else row.queue_offset
    if chosen is None:
        count = row.count or (every or 0 if row.kind in (Kind.LEASE, Kind.ARCHIVED) else 0)
        places = [] if at is None or queue is None else [TracePlace(*queue, at, at + row.count - 1)]
        return count, places
    files = chosen.items() if row.file_no is None else [(row.file_no, chosen.get(row.file_no, b""))]
    count, found = 0, []
    for _, bits in files:
        passed = 0
        for first, last in row.ranges or ((0, len(bits) - 1),):
            for start in _ones(bits, first, last):
                count += 1
                if at is not None and queue is not None:
                    offset = at + passed + start - first
                    found.append(TracePlace(*queue, offset, offset))
            passed += last - first + 1
    return count, found


def _ones(bits: bytes, first: int, last: int) -> Iterator[int]:
    """The positions of the bytes that are 1, both ends included."""
    at = bits.find(1, first, last + 1)
    while at >= 0:
        yield at
        at = bits.find(1, at + 1, last + 1)


def _joined(places: Sequence[TracePlace]) -> tuple[TracePlace, ...]:
    """Places by queue and offset; those that follow each other are one."""
    found: list[TracePlace] = []
    for place in sorted(places):
        last = found[-1] if found else None
        if last is not None and last[:2] == place[:2] and last.last_offset + 1 == place.first_offset:
            found[-1] = last._replace(last_offset=place.last_offset)
        else:
            found.append(place)
    return tuple(found)


def _drained_event(log: Engine, events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """When the placed messages came into the table ``messages``; nothing when none is there, or all have expired."""
    position = log.drained.position
    count = 0
    paths: set[str] = set()
    with log.lock:
        for event in events:
            if event.op_version is None or event.op_version > position:
                continue
            for place in event.places:
                there, _ = log.drained.ranges(place[:2], place.first_offset, place.last_offset + 1)
                count += sum(part.count for part in there)
                paths.update(part.rows.path for part in there)
        actions = log.messages_table.actions()
    mine = actions.filter(pc.is_in(actions["path"], value_set=pa.array(sorted(paths), pa.string())))
    newest_ms = pc.max(mine["modification_time"]).as_py()
    if newest_ms is not None:
        yield TraceEvent(datetime.fromtimestamp(newest_ms / 1000, timezone.utc), TraceKind.DRAINED, count)


def _in_order(events: Iterable[TraceEvent]) -> tuple[TraceEvent, ...]:
    """Events by time. It begins with the preparation, whatever clock wrote its time."""
    return tuple(sorted(events, key=lambda e: (e.kind is not TraceKind.PREPARED, e.at)))
