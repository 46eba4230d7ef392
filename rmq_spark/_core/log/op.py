"""Op markers: their table, their kinds, and the state of a half batch that they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark._core.log.archive import ARCHIVED, Archived
from rmq_spark._core.log.half import Segment
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.options import LEASE_S_MAX
from rmq_spark._core.vocabulary.rows import Ranges, RowSet, both
from rmq_spark.errors import CorruptLogError

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table

RANGES = pa.list_(pa.struct([("first", pa.int64()), ("last", pa.int64())]))
TAILS = pa.list_(pa.struct([("topic", pa.string()), ("queue_id", pa.int32()), ("next_offset", pa.int64())]))
FIRSTS = pa.list_(pa.struct([("topic", pa.string()), ("queue_id", pa.int32()), ("first_offset", pa.int64())]))
WAITING = pa.list_(pa.struct([("until", TIMESTAMP), ("count", pa.int64())]))
BELOW = pa.list_(
    pa.struct(
        [
            ("half_id", pa.string()),
            ("ms", pa.int64()),
            ("pending", pa.int64()),
            ("versions", pa.list_(pa.int64())),
            ("waiting", WAITING),
        ]
    )
)
OP_SCHEMA = pa.schema(
    [
        ("version", pa.int64()),  # of this table, at which the row was committed
        ("op_time", TIMESTAMP),
        ("commit_id", pa.string()),  # one id per commit, by which a writer recognises its own rows
        ("kind", pa.string()),
        ("half_id", pa.string()),
        ("file_no", pa.int64()),  # null = all files of the half batch
        ("ranges", RANGES),  # null = all rows
        ("count", pa.int64()),  # rows named
        ("attempt", pa.int32()),
        ("decided_by", pa.string()),  # execute, check, discard, admin
        ("refused", pa.bool_()),  # rollback: true when the local transaction ran and said no, so it is final
        ("reason", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),  # of the first row named; the others follow in order
        ("next_offset", pa.int64()),  # queue_offset + count
        ("path", pa.string()),  # where the rows lay when this was written: a hint
        ("file_rows", pa.int64()),  # rows of the half file as written
        ("transaction_per", pa.string()),
        ("producer_group", pa.string()),
        ("until", TIMESTAMP),  # lease: its end; commit without an offset: when its messages are due
        ("verdict", pa.string()),  # conflict: the verdict that came too late
        ("low_water", pa.int64()),  # mark: prepare time (ms) up to which everything is settled
        ("since_version", pa.int64()),  # mark: op rows before this one are not needed for what is open
        ("tails", TAILS),  # mark: the next offset of every queue
        ("firsts", FIRSTS),  # expire, mark: the first offset that is kept of queues
        ("reopened_ms", pa.int64()),  # mark: when a transaction was last reopened
        ("below", BELOW),  # mark: half batches at or below low_water that are open, as of since_version
        ("prepared_ms", pa.int64()),  # archived: when the half batch was prepared
        ("archived", ARCHIVED),  # archived: what is kept of a half batch that leaves
    ]
)
NO_OPS = OP_SCHEMA.empty_table()
STATS_COLUMNS = ("version", "next_offset", "low_water", "prepared_ms")


PRUNED = "txmq.pruned"
"""The name under which the table keeps the last version whose rows were pruned (Delta's ``txn``)."""
PRUNED_PLACED = "txmq.pruned.placed"
"""The same for rows that placed messages."""


class Kind(str, Enum):
    """The kinds of op rows."""

    COMMIT = "commit"
    PLACE = "place"
    ROLLBACK = "rollback"
    QUARANTINE = "quarantine"
    CHECK = "check"
    REOPEN = "reopen"
    LEASE = "lease"
    CONFLICT = "conflict"
    MARK = "mark"
    ARCHIVED = "archived"
    EXPIRE = "expire"

    def __str__(self) -> str:
        return self.value


class Who(str, Enum):
    """Who decided."""

    EXECUTE = "execute"
    CHECK = "check"
    DISCARD = "discard"
    ADMIN = "admin"

    def __str__(self) -> str:
        return self.value


class RowState(int, Enum):
    """The state of one row. It takes a byte, so the state of a half file is one bytearray."""

    PENDING = 0
    COMMITTED = 1
    DECIDED = 2  # commit, not yet placed
    ROLLED_BACK = 3  # refused by the local transaction, or rolled back by a person: final
    ROLLED_BACK_BY_CHECK = 4  # it never happened: may be reopened under the next attempt
    ROLLED_BACK_BY_DISCARD = 5  # nobody knows: may be reopened under the same attempt
    QUARANTINED = 6


KINDS = frozenset(k.value for k in Kind)
SETTLING = (Kind.COMMIT, Kind.ROLLBACK, Kind.QUARANTINE)
"""Kinds after which a row is no longer pending; ``reopen`` makes it pending again."""


@dataclass(frozen=True)
class OpenBelow:
    """A half batch that was open when a mark passed it. The mark names it, so that nothing else waits for it.

    Attributes
    ----------
    ms : int
        When it was prepared.
    pending : int
        Its pending rows before ``since_version`` of the mark.
    versions : tuple of int
        Versions before ``since_version`` with op rows of it that still count.
    waiting : mapping of datetime or None to int
        Its committed messages that had no place then, by due time (None: they wait for their sharding key).
    """

    ms: int
    pending: int
    versions: tuple[int, ...]
    waiting: Mapping[datetime | None, int]


@dataclass(slots=True, unsafe_hash=True)
class OpRow:
    """A row of ``op``, without its version and commit id. See :data:`OP_SCHEMA`.

    It gets its offset last, and does not change afterwards.
    """

    kind: Kind
    half_id: str | None = None
    file_no: int | None = None
    ranges: Ranges | None = None
    count: int = 0
    attempt: int | None = None
    decided_by: Who | None = None
    reason: str | None = None
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    path: str | None = None
    file_rows: int | None = None
    transaction_per: str | None = None
    producer_group: str | None = None
    until: datetime | None = None
    verdict: str | None = None
    low_water: int | None = None
    since_version: int | None = None
    tails: Mapping[tuple[str, int], int] | None = None
    firsts: Mapping[tuple[str, int], int] | None = None
    reopened_ms: int | None = None
    below: Mapping[str, OpenBelow] | None = None
    prepared_ms: int | None = None
    archived: Archived | None = None
    refused: bool | None = None
    op_time: datetime | None = None
    """None until it is written. The rows of a commit share one time."""

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> OpRow:
        """Make a row of one half batch from a row that ``read_op`` returned."""
        who = read["decided_by"]
        return cls(
            kind=Kind(read["kind"]),
            half_id=read["half_id"],
            file_no=read["file_no"],
            ranges=ranges_of(read["ranges"]),
            count=read["count"],
            attempt=read["attempt"],
            decided_by=None if who is None else Who(who),
            reason=read["reason"],
            topic=read["topic"],
            queue_id=read["queue_id"],
            queue_offset=read["queue_offset"],
            producer_group=read["producer_group"],
            until=read["until"],
            verdict=read["verdict"],
            refused=read["refused"],
            op_time=read["op_time"],
        )


def pruned_up_to(op: Table, what: str = PRUNED) -> int:
    """The last version of ``op`` whose rows were pruned; -1 when none were. A reader that has not come so far goes on
    from the newest mark, which is later."""
    version = op.transaction_version(what)
    return -1 if version is None else version


def to_table(rows: Sequence[OpRow], version: int, op_time: datetime, commit_id: str) -> pa.Table:
    """The rows of one commit, with the columns of the table."""
    count = len(rows)
    columns = {
        "version": pa.repeat(pa.scalar(version, pa.int64()), count),
        "op_time": pa.repeat(pa.scalar(op_time, TIMESTAMP), count),
        "commit_id": pa.repeat(pa.scalar(commit_id, pa.string()), count),
        "ranges": _ranges_array([r.ranges for r in rows]),
        "next_offset": pa.array(
            [None if r.queue_offset is None else r.queue_offset + r.count for r in rows], pa.int64()
        ),
    }
    return pa.table([columns[f.name] if f.name in columns else _column(f, rows) for f in OP_SCHEMA], schema=OP_SCHEMA)


def _column(field: pa.Field, rows: Sequence[OpRow]) -> pa.Array:
    """The values of a column. Most columns belong to one kind of row, and are null in the others."""
    values = [*map(attrgetter(field.name), rows)]
    if values.count(None) == len(values):
        return pa.nulls(len(values), field.type)
    as_stored = _AS_STORED.get(field.name)
    if as_stored is not None:
        values = [None if v is None else as_stored(v) for v in values]
    return pa.array(values, field.type)


def _offsets_value(name: str, offsets: Mapping[tuple[str, int], int]) -> list[dict[str, object]]:
    return [{"topic": t, "queue_id": q, name: n} for (t, q), n in sorted(offsets.items())]


def _below_value(below: Mapping[str, OpenBelow]) -> list[dict[str, object]]:
    return [
        {
            "half_id": half_id,
            "ms": b.ms,
            "pending": b.pending,
            "versions": list(b.versions),
            "waiting": [{"until": until, "count": count} for until, count in b.waiting.items()],
        }
        for half_id, b in sorted(below.items())
    ]


_AS_STORED: Mapping[str, Callable[[Any], object]] = {
    "kind": str,
    "decided_by": str,
    "tails": partial(_offsets_value, "next_offset"),
    "firsts": partial(_offsets_value, "first_offset"),
    "below": _below_value,
    "archived": Archived.struct,
}


def _ranges_array(values: Sequence[Ranges | None]) -> pa.Array:
    # Built from flat lists: a marker of every other row has a range for each row.
    offsets: list[int | None] = []
    first: list[int] = []
    last: list[int] = []
    for ranges in values:
        offsets.append(None if ranges is None else len(first))
        for first_row, last_row in ranges or ():
            first.append(first_row)
            last.append(last_row)
    offsets.append(len(first))
    structs = pa.StructArray.from_arrays(
        [pa.array(first, pa.int64()), pa.array(last, pa.int64())], fields=list(RANGES.value_type)
    )
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), structs, type=RANGES)


def ranges_of(value: object) -> Ranges | None:
    """Convert ranges from the form in which a table returns them."""
    return None if value is None else tuple((r["first"], r["last"]) for r in value)  # type: ignore[attr-defined]


@dataclass
class FileState:
    """The rows of one half file, a byte each."""

    path: str
    rows: int
    segments: tuple[Segment, ...]
    state: bytearray = field(init=False)
    attempt: bytearray = field(init=False)
    checks: bytearray = field(init=False)
    conflict: bytearray = field(init=False)
    due: list[tuple[int, int, datetime]] = field(default_factory=list)
    """Rows (first, end) that were committed before they were due, and when they are due."""
    reopened: list[tuple[int, int, datetime]] = field(default_factory=list)
    """Rows (first, end) that were reopened, and when."""

    def __post_init__(self) -> None:
        self.state = bytearray(self.rows)
        self.attempt = bytearray(b"\x01") * self.rows
        self.checks = bytearray(self.rows)
        self.conflict = bytearray(self.rows)


_PLUS_ONE = bytes(min(i + 1, 255) for i in range(256))

_NOT_FINAL = {Who.CHECK.value: RowState.ROLLED_BACK_BY_CHECK, Who.DISCARD.value: RowState.ROLLED_BACK_BY_DISCARD}


def rolled_back_as(decided_by: Who | str | None, refused: bool | None) -> RowState:
    """The state of messages after a rollback, by who decided it and whether the local transaction refused them."""
    return RowState.ROLLED_BACK if refused else _NOT_FINAL.get(str(decided_by), RowState.ROLLED_BACK)


class BatchState:
    """The state of one half batch, after all its op markers.

    Parameters
    ----------
    half_id : str
    files : mapping of int to FileState
        By file number, fresh (every row pending under attempt 1).
    """

    def __init__(self, half_id: str, files: Mapping[int, FileState]) -> None:
        self.half_id = half_id
        self.files = dict(sorted(files.items()))
        self.lease_until: datetime | None = None
        self.checked_at: datetime | None = None
        self.opened_at: dict[int, datetime] = {}  # attempt → when it was reopened
        self.history: list[OpRow] = []  # rows that settled or reopened messages, in version order

    def leased(self, now: datetime) -> bool:
        """True while a local transaction is known to run. A lease that ends far ahead (by a wrong clock) is ignored."""
        return self.lease_until is not None and now < self.lease_until <= now + timedelta(seconds=LEASE_S_MAX)

    def checked_lately(self, now: datetime, seconds: float) -> bool:
        """True when a check was counted in the last seconds. A check far ahead (by a wrong clock) is ignored."""
        return self.checked_at is not None and abs((now - self.checked_at).total_seconds()) < seconds

    def fold(self, row: OpRow) -> None:
        """Apply an op row of this half batch. Rows must come in version order.

        Raises
        ------
        CorruptLogError
            When the row names files or rows that the half batch does not have.
        """
        if row.kind is Kind.LEASE:
            self.lease_until = row.until
            return
        if row.kind in (Kind.MARK, Kind.ARCHIVED, Kind.EXPIRE):
            return
        attempt, when = row.attempt or 1, row.op_time
        assert when is not None, "an op row has a time"
        spans = list(self._named_rows(row))
        if row.kind is Kind.CONFLICT:
            # A row without an attempt ends the conflict: a person has resolved it.
            mark = b"\x00" if row.attempt is None else b"\x01"
            for file, first, end in spans:
                file.conflict[first:end] = mark * (end - first)
            return
        named = sum(end - first for _, first, end in spans)
        if named != row.count:
            raise CorruptLogError(
                f"an op row of half batch {self.half_id!r} names {named} rows, but counts {row.count}"
            )
        if row.kind is Kind.CHECK:
            self.checked_at = when
        else:
            self.history.append(row)
        if row.kind is Kind.REOPEN:
            self.opened_at[attempt] = when
        for file, first, end in spans:
            rows = end - first
            if row.kind is Kind.CHECK:
                file.checks[first:end] = file.checks[first:end].translate(_PLUS_ONE)
            elif row.kind is Kind.REOPEN:
                file.state[first:end] = bytes(rows)
                file.attempt[first:end] = bytes([attempt]) * rows
                file.checks[first:end] = bytes(rows)
                file.reopened.append((first, end, when))
            else:
                if row.kind is Kind.COMMIT and row.until is not None:
                    file.due.append((first, end, row.until))
                file.state[first:end] = bytes([_state_after(row)]) * rows

    def _named_rows(self, row: OpRow) -> Iterator[tuple[FileState, int, int]]:
        if row.file_no is None:
            files: Iterable[FileState] = self.files.values()
        elif row.file_no in self.files:
            files = (self.files[row.file_no],)
        else:
            raise CorruptLogError(
                f"an op row names file {row.file_no} of half batch {self.half_id!r}, which has no such file"
            )
        for file in files:
            for first, last in row.ranges or ((0, file.rows - 1),):
                if last >= file.rows:
                    raise CorruptLogError(
                        f"an op row names row {last} of file {row.file_no} of half batch {self.half_id!r}, "
                        f"which has {file.rows} rows"
                    )
                yield file, first, last + 1

    # ------------------------------------------------------------------ questions
    def reason_of(self, file_no: int, row_no: int) -> str | None:
        """The reason of the last op row that settled or reopened a row."""
        for row in reversed(self.history):
            named = row.file_no in (None, file_no)
            if named and (row.ranges is None or any(first <= row_no <= last for first, last in row.ranges)):
                return row.reason
        return None

    @property
    def in_conflict(self) -> bool:
        """True when a verdict came too late for some rows, and no person has resolved that."""
        return any(b"\x01" in f.conflict for f in self.files.values())

    def conflicting(self) -> RowSet:
        """The rows in conflict."""
        return RowSet({n: f.conflict for n, f in self.files.items()})

    def rows_in(self, states: Sequence[RowState], attempt: int | None = None) -> RowSet:
        """The rows in one of these states, of one attempt or of all."""
        in_state = _ones_at(*states)
        if attempt is None:
            return RowSet({n: f.state.translate(in_state) for n, f in self.files.items()})
        in_attempt = _ones_at(attempt)
        return RowSet(
            {n: both(f.state.translate(in_state), f.attempt.translate(in_attempt)) for n, f in self.files.items()}
        )

    def rows_under(self, attempt: int) -> RowSet:
        """The rows of one attempt."""
        in_attempt = _ones_at(attempt)
        return RowSet({n: f.attempt.translate(in_attempt) for n, f in self.files.items()})

    def count(self, *states: RowState) -> int:
        """How many rows are in one of these states."""
        return sum(f.state.count(int(s)) for f in self.files.values() for s in states)

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files.values())

    @property
    def settled(self) -> bool:
        """True when no row is pending."""
        return self.count(RowState.PENDING) == 0

    def attempts(self, *states: RowState) -> list[int]:
        """The attempts of the rows in one of these states, ascending."""
        attempts: set[int] = set()
        for file_no, ranges in self.rows_in(states).ranges():
            for first, last in ranges:
                attempts.update(set(self.files[file_no].attempt[first : last + 1]))
        return sorted(attempts)

    def checked_at_least(self, rows: RowSet, times: int) -> RowSet:
        """Those of ``rows`` that have had at least this many answered checks."""
        enough = (bytes(times) + b"\x01" * 256)[:256]
        return rows & {n: f.checks.translate(enough) for n, f in self.files.items()}

    def check_times(self, rows: RowSet) -> int:
        """The most answered checks that any of these rows has had."""
        if all(f.checks.count(0) == f.rows for f in self.files.values()):
            return 0
        return max(
            (max(self.files[n].checks[first : last + 1]) for n, ranges in rows.ranges() for first, last in ranges),
            default=0,
        )


@lru_cache(maxsize=1024)
def _ones_at(*positions: int) -> bytes:
    """A translation table: 1 for these bytes, 0 for all others."""
    table = bytearray(256)
    for position in positions:
        table[position] = 1
    return bytes(table)


def _state_after(row: OpRow) -> RowState:
    """The state that a settling or placing row gives to the rows it names."""
    if row.kind is Kind.QUARANTINE:
        return RowState.QUARANTINED
    if row.kind is Kind.PLACE:
        return RowState.COMMITTED
    if row.kind is Kind.COMMIT:
        return RowState.DECIDED if row.queue_offset is None else RowState.COMMITTED
    return rolled_back_as(row.decided_by, row.refused)
