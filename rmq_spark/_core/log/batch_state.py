"""The state of a half batch, row by row: what its op rows add up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from functools import lru_cache

from rmq_spark._core.log.half import Segment
from rmq_spark._core.log.op import OpKind, OpRow, Who
from rmq_spark._core.storage.seal import RESTORE
from rmq_spark._core.vocabulary.options import LEASE_S_MAX
from rmq_spark._core.vocabulary.rows import RowSet, both
from rmq_spark.errors import CorruptLogError


class RowState(int, Enum):
    """The state of one row, as a byte. So the state of a half file is one bytearray."""

    PENDING = 0
    COMMITTED = 1
    WAITING = 2  # committed, not yet placed
    ROLLED_BACK = 3  # refused by the local transaction, or rolled back by a person: final
    ROLLED_BACK_BY_CHECK = 4  # it never happened: may be reopened under the next attempt
    ROLLED_BACK_BY_DISCARD = 5  # nobody knows: may be reopened under the same attempt
    QUARANTINED = 6


OPEN_STATES = (RowState.PENDING, RowState.QUARANTINED)
COMMITTED_STATES = (RowState.COMMITTED, RowState.WAITING)
ROLLED_BACK_STATES = (RowState.ROLLED_BACK, RowState.ROLLED_BACK_BY_CHECK, RowState.ROLLED_BACK_BY_DISCARD)


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


def is_leased(until: datetime | None, now: datetime) -> bool:
    """Return True while a lease runs. A lease that ends far ahead (by a wrong clock) is ignored."""
    return until is not None and now < until <= now + timedelta(seconds=LEASE_S_MAX)


class BatchState:
    """The state of one half batch, after all its op markers. ``files``, by file number, begin with every row pending
    under attempt 1."""

    def __init__(self, half_id: str, files: Mapping[int, FileState]) -> None:
        self.half_id = half_id
        self.files = dict(sorted(files.items()))
        self.lease_until: datetime | None = None
        self.checked_at: datetime | None = None
        self.opened_at: dict[int, datetime] = {}  # attempt → when it was reopened
        self.history: list[OpRow] = []  # rows that settled or reopened messages, in version order

    def leased(self, now: datetime) -> bool:
        """True while a local transaction is known to run."""
        return is_leased(self.lease_until, now)

    def checked_lately(self, now: datetime, seconds: float) -> bool:
        """True when a check was counted in the last seconds. A check far ahead (by a wrong clock) is ignored."""
        return self.checked_at is not None and abs((now - self.checked_at).total_seconds()) < seconds

    def fold(self, row: OpRow) -> None:
        """Apply an op row of this half batch. Rows must come in version order. CorruptLogError: the row names files or
        rows that the half batch does not have."""
        if row.kind is OpKind.LEASE:
            self.lease_until = row.until
            return
        if row.kind in (OpKind.MARK, OpKind.ARCHIVED, OpKind.EXPIRE):
            return
        attempt, when = row.attempt or 1, row.op_time
        assert when is not None, "an op row has a time"
        spans = list(self._named_rows(row))
        if row.kind is OpKind.CONFLICT:
            # A row without an attempt ends the conflict: a person has resolved it.
            mark = b"\x00" if row.attempt is None else b"\x01"
            for file, first, end in spans:
                file.conflict[first:end] = mark * (end - first)
            return
        named = sum(end - first for _, first, end in spans)
        if named != row.count:
            raise CorruptLogError(
                f"table op: the {row.kind} row of half batch {self.half_id!r}, attempt {row.attempt}, of {row.op_time} "
                f"names {named} rows, but counts {row.count}: {RESTORE}"
            )
        if row.kind is OpKind.CHECK:
            self.checked_at = when
        else:
            self.history.append(row)
        if row.kind is OpKind.REOPEN:
            self.opened_at[attempt] = when
        for file, first, end in spans:
            rows = end - first
            if row.kind is OpKind.CHECK:
                file.checks[first:end] = file.checks[first:end].translate(_PLUS_ONE)
            elif row.kind is OpKind.REOPEN:
                file.state[first:end] = bytes(rows)
                file.attempt[first:end] = bytes([attempt]) * rows
                file.checks[first:end] = bytes(rows)
                file.reopened.append((first, end, when))
            else:
                if row.kind is OpKind.COMMIT and row.until is not None:
                    file.due.append((first, end, row.until))
                file.state[first:end] = bytes([_state_after(row)]) * rows

    def _named_rows(self, row: OpRow) -> Iterator[tuple[FileState, int, int]]:
        if row.file_no is None:
            files: Iterable[FileState] = self.files.values()
        elif row.file_no in self.files:
            files = (self.files[row.file_no],)
        else:
            raise CorruptLogError(
                f"table op: the {row.kind} row of {row.op_time} names file {row.file_no} of half batch "
                f"{self.half_id!r}, which has no such file: {RESTORE}"
            )
        for file in files:
            for first, last in row.ranges or ((0, file.rows - 1),):
                if last >= file.rows:
                    raise CorruptLogError(
                        f"table op: the {row.kind} row of {row.op_time} names row {last} of file {row.file_no} of half "
                        f"batch {self.half_id!r}, which has {file.rows} rows: {RESTORE}"
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
        """True when a verdict came too late for some rows, and no person has resolved the conflict."""
        return any(b"\x01" in f.conflict for f in self.files.values())

    def conflicting(self) -> RowSet:
        return RowSet({n: f.conflict for n, f in self.files.items()})

    def rows_in(self, states: Sequence[RowState], attempt: int | None = None) -> RowSet:
        """The rows in one of these states, of one attempt or of all."""
        in_state = ones_at(*states)
        if attempt is None:
            return RowSet({n: f.state.translate(in_state) for n, f in self.files.items()})
        in_attempt = ones_at(attempt)
        return RowSet(
            {n: both(f.state.translate(in_state), f.attempt.translate(in_attempt)) for n, f in self.files.items()}
        )

    def count(self, *states: RowState) -> int:
        """Number of rows in one of these states."""
        return sum(f.state.count(int(s)) for f in self.files.values() for s in states)

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files.values())

    @property
    def is_settled(self) -> bool:
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
        """The rows among ``rows`` that have had at least this many answered checks."""
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
def ones_at(*positions: int) -> bytes:
    """A translation table: 1 for these bytes, 0 for all others."""
    table = bytearray(256)
    for position in positions:
        table[position] = 1
    return bytes(table)


def _state_after(row: OpRow) -> RowState:
    """The state that a settling or placing row gives to the rows it names."""
    if row.kind is OpKind.QUARANTINE:
        return RowState.QUARANTINED
    if row.kind is OpKind.PLACE:
        return RowState.COMMITTED
    if row.kind is OpKind.COMMIT:
        return RowState.WAITING if row.queue_offset is None else RowState.COMMITTED
    return rolled_back_as(row.decided_by, row.refused)
