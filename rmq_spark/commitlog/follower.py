"""What ``op`` says, followed commit by commit: what is open, what waits, and the next offset of every queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.commitlog.follow import Followed, Tails, Waiting, of_kind, settled_rows
from rmq_spark.commitlog.half_store import HalfRecord, HalfStore, Prepared
from rmq_spark.commitlog.op import NO_OPS, BatchState, Kind, OpRow
from rmq_spark.storage.table import Table

HALF_IDS_KEPT = 10_000


class Follower:
    """Follows ``op``. It writes nothing.

    Parameters
    ----------
    table : Table
        ``op``.
    half : HalfStore
        Which half batches are prepared: those are open until op rows settle them.
    """

    def __init__(self, table: Table, half: HalfStore) -> None:
        self.table = table
        self.machine = table.machine
        self._half = half
        self._followed = Followed()
        self._known_whole: dict[str, None] = {}  # half batches with no op rows before the kept ones, oldest first
        self._awaited: str | None = None  # the commit id that is being written
        self._arrived = False  # it was among the rows that were followed

    # ------------------------------------------------------------------ following the table
    def refresh(self) -> int:
        """Read the op rows that are new, and return the version they reach."""
        with self.table.lock:
            self.table.refresh()
            return self._catch_up()

    def _catch_up(self) -> int:
        before, version = self._followed, self.table.version
        if version <= before.version:
            return version
        if before.version < 0:
            before = self._start()
        rows = self._read_between(before.version + 1, version)
        after = before.after(rows, version)
        # An exception (an interrupt, a full memory) may end us at any line: each leaves what is true.
        for half_id in _cut_off(before, rows, after):
            self._known_whole.pop(half_id, None)
        if self._awaited is not None and pc.any(pc.equal(rows["commit_id"], self._awaited)).as_py():
            self._arrived = True
        self._followed = after
        return version

    def _follow_anew(self) -> None:
        """Read what op says from the table, whatever was kept: nobody looks again at what a mark passes."""
        version = self.table.refresh()
        start = self._start()
        self._followed = start.after(self._read_between(start.version + 1, version), version)

    def _start(self) -> Followed:
        """Where a cold start goes on from: the newest mark."""
        actions = self.table.actions()
        marked = pc.max(actions["max.low_water"]).as_py() if actions.num_rows else None
        if marked is None:
            return Followed()
        self._known_whole.clear()  # what was expected before may have been decided, and passed by the mark
        followed, knows_conflicts = Followed.from_mark(
            self.table.read(actions.filter(pc.equal(actions["max.low_water"], marked))["path"].to_pylist())
        )
        if knows_conflicts:
            return followed
        older = self._read_between(0, followed.version)
        return replace(followed, conflicts=Followed().after(older.filter(of_kind(older, Kind.CONFLICT)), 0).conflicts)

    def _read_between(self, first: int, last: int) -> pa.Table:
        """The op rows of these versions, in version order."""
        actions = self.table.actions()
        if actions.num_rows == 0:
            return NO_OPS
        new = pc.fill_null(pc.greater_equal(actions["max.version"], first), True)
        # The reader does not filter: it would skip rows by a footer's statistics, which no checksum guards from a
        # flipped bit.
        rows = self.table.read(actions.filter(new)["path"].to_pylist())
        between = pc.and_(pc.greater_equal(rows["version"], first), pc.less_equal(rows["version"], last))
        return rows.filter(between).sort_by("version")

    # ------------------------------------------------------------------ questions
    @property
    def low_water_ms(self) -> int:
        """Prepare time (ms) up to which every half batch is settled, but for those reopened later."""
        return self._followed.low_water

    def ms_before_prepare(self) -> int:
        """The time after which a half batch must be prepared now: nobody looks for open ones below the mark, and what
        was reopened by now was sent before it, whatever the clocks say."""
        self.refresh()
        return max(self.low_water_ms, self.reopened_ms)

    @property
    def reopened_ms(self) -> int:
        """When a transaction was last reopened, of those whose op rows are kept."""
        rows = self._followed.rows
        newest = pc.max(rows.filter(of_kind(rows, Kind.REOPEN))["op_time"]).as_py()
        return 0 if newest is None else int(newest.timestamp() * 1000)

    def may_hide(self, rewritten_below: str) -> bool:
        """True when other rewritten files lie below the mark than when it was made. They may hold rows from above it,
        which may be open. Nothing is prepared below the mark, so a new file there is a rewritten one.
        """
        return bool(rewritten_below) and rewritten_below != self._followed.rewritten_below

    @property
    def tails(self) -> Tails:
        """The next offset of every queue that has messages."""
        return self._followed.tails

    @property
    def waiting(self) -> Waiting:
        """How many committed messages have no place yet, by half id and due time (None: an earlier message of their
        sharding key is not decided yet)."""
        return self._followed.waiting

    @property
    def conflicts(self) -> frozenset[str]:
        """Half batches with a verdict that came too late and that no person has resolved yet."""
        return self._followed.conflicts

    @property
    def rows_kept(self) -> int:
        """How many op rows are kept in memory."""
        return int(self._followed.rows.num_rows)

    @property
    def half_ids_kept(self) -> int:
        """How many half batches are kept in memory as having all their op rows among the kept ones."""
        return len(self._known_whole)

    def rows_of(self, record: HalfRecord) -> pa.Table:
        """The op rows of one half batch, in version order."""
        half_id = record.half_id
        followed = self._followed
        settled = record.prepared_ms <= followed.low_water and half_id not in followed.waiting
        if settled:  # its markers may be older than the kept ones
            return self._scan([half_id])
        if half_id not in self._known_whole:
            # Somebody's OPTIMIZE gives old rows a new prepare time: look once whether there are older markers.
            if self._older([half_id]).num_rows:
                return self._scan([half_id])
            self._remember_whole([half_id])
        return followed.rows.filter(pc.equal(followed.rows["half_id"], half_id))

    def expect(self, half_ids: Sequence[str]) -> None:
        """Tell of half batches that are about to be prepared: their op markers are all still to come."""
        with self.table.lock:
            self._remember_whole(half_ids)

    def forget(self, half_ids: Sequence[str]) -> None:
        """Take :meth:`expect` back."""
        with self.table.lock:
            for half_id in half_ids:
                self._known_whole.pop(half_id, None)

    def _remember_whole(self, half_ids: Iterable[str]) -> None:
        self._known_whole.update(dict.fromkeys(half_ids))
        while len(self._known_whole) > HALF_IDS_KEPT:
            del self._known_whole[next(iter(self._known_whole))]

    def _scan(self, half_ids: Sequence[str], before: int | None = None) -> pa.Table:
        where = pc.field("half_id").isin(list(half_ids))
        if before is not None:
            where &= pc.field("version") < before
        return self.table.read(self.table.actions()["path"].to_pylist(), None, where).sort_by("version")

    def _older(self, half_ids: Sequence[str]) -> pa.Table:
        """The op rows of half batches before those that are kept in memory."""
        since = self._followed.since
        return self._scan(half_ids, before=since) if since else NO_OPS

    def state_of(self, record: HalfRecord, refresh: bool = True) -> BatchState:
        """What the newest op markers say of one half batch."""
        with self.table.lock:
            if refresh:
                self.refresh()
            state = record.fresh_state()
            for row in self.rows_of(record).to_pylist():
                state.fold(OpRow.of(row))
            return state

    def prepared(self) -> dict[str, Prepared]:
        """Half batches that may be open, by half id: all above the low-water mark, or all when it may hide some."""
        low_water = self.low_water_ms
        above = self._half.prepared_after(low_water)
        return self._half.prepared_after(-1) if self.may_hide(self._half.rewritten_below(low_water)) else above

    def open_half_ids(self) -> list[str]:
        """Half batches that may have pending rows, oldest first."""
        # op is read before half, so half has every half batch that op names. A half batch decided in between looks open
        # here; callers read its state themselves.
        with self.table.lock:
            self.refresh()
            prepared = self.prepared()
            found = self._open_among(prepared)
        # What was reopened below the mark is older than all above it.
        return sorted(found, key=lambda half_id: prepared[half_id].ms if half_id in prepared else 0)

    def _open_among(self, prepared: Mapping[str, Prepared]) -> list[str]:
        """Those with pending rows, and those below the mark that were reopened and are still open."""
        opened = self._open_of(prepared)
        return opened + [h for h in self._reopened(prepared) if h not in opened and self._is_open(h)]

    def _is_open(self, half_id: str) -> bool:
        try:
            return not self.state_of(self._half.get(half_id), refresh=False).settled
        except Exception:
            return True  # it is looked at again, alone, and reported

    def _open_of(self, prepared: Mapping[str, Prepared]) -> list[str]:
        net = settled_rows(self._followed.rows)
        opened = [half_id for half_id, p in prepared.items() if p.rows > net.get(half_id, 0)]
        doubtful = [half_id for half_id in opened if half_id not in self._known_whole]
        older = settled_rows(self._older(doubtful)) if doubtful else {}
        self._remember_whole(h for h in doubtful if h not in older)
        return [h for h in opened if prepared[h].rows > net.get(h, 0) + older.get(h, 0)]

    def _reopened(self, prepared: Mapping[str, Prepared]) -> list[str]:
        """Half batches that were reopened and of which ``prepared`` may not know all rows."""
        rows = self._followed.rows
        ids = pc.unique(rows.filter(of_kind(rows, Kind.REOPEN))["half_id"]).to_pylist()
        return [h for h in ids if h not in prepared or prepared[h].rewritten]


def _cut_off(before: Followed, rows: pa.Table, after: Followed) -> list[str]:
    """Half batches with op rows that a new mark let go."""
    if after.since == before.since:
        return []
    ids = [r.filter(pc.less(r["version"], after.since))["half_id"] for r in (before.rows, rows)]
    return [str(h) for part in ids for h in pc.unique(part).to_pylist()]
