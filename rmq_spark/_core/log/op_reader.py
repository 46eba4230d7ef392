"""Reads ``op`` commit by commit: which half batches are open, what waits, and the next offset of every queue."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.batch_index import BatchIndex, PrepareEntry
from rmq_spark._core.log.batch_state import BatchState
from rmq_spark._core.log.half_header import after_name, batch_name, names_of
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.half_table import HalfTable
from rmq_spark._core.log.key_order import OpenBatch
from rmq_spark._core.log.op import DECIDING, NO_OPS, OpKind, OpRow, pruned_up_to
from rmq_spark._core.log.op_view import OpView, net_settled_table, of_kind
from rmq_spark._core.log.read_op import read_op
from rmq_spark._core.log.shared_files import UnreadableFile
from rmq_spark._core.storage.table import Table, live_paths
from rmq_spark.errors import CorruptLogError, HalfBatchLeftError

HALF_IDS_MAX = 10_000
"""At most this many half batches without op rows are remembered."""
OLDER_CACHED_MAX = 512
"""The older op rows of at most this many half batches are kept in memory until the next mark."""
OPEN_ROWS_CACHED_MAX = 1_000_000
"""The states of at most this many rows of open half batches are kept in memory, at four bytes each."""


@dataclass
class Awaited:
    """A commit of op rows that is under way: the rows of its files by path, and whether they were read."""

    commit_id: str
    written: dict[str, pa.Table] = field(default_factory=dict)
    arrived: bool = False


class OpReader:
    """Reads the new rows of ``op``, and keeps what they say. It writes nothing. Each prepared half batch of ``half`` is
    open until op rows settle it."""

    def __init__(self, table: Table, half: HalfTable) -> None:
        self.table = table
        self.runtime = table.runtime
        self.half = half
        self.view = OpView()
        self._open: dict[str, OpenBatch] = {}  # never modified, dropped when a newer op row is read
        self._open_rows = 0  # their rows; those of dropped half batches count until the next recount
        # Half batches that this process prepares and that have no op rows yet, oldest first.
        self._just_prepared: dict[str, None] = {}
        # A mark's version, and the older op rows that were read since, by half id.
        self._older_rows: tuple[int, dict[str, pa.Table]] = (-1, {})
        self._awaited: Awaited | None = None  # the commit under way
        self.unreadable: Sequence[UnreadableFile] = ()
        """Shared files that could not be read when open half batches were last listed."""

    # ------------------------------------------------------------------ own commits
    @contextmanager
    def awaiting(self, commit_id: str) -> Iterator[Awaited]:
        """While the writer commits op rows under this id: files that it names in :attr:`Awaited.written` are not read
        again, and :attr:`Awaited.arrived` says whether its rows were read."""
        self._awaited = Awaited(commit_id)
        try:
            yield self._awaited
        finally:
            self._awaited = None

    # ------------------------------------------------------------------ new op rows
    def refresh(self) -> int:
        """Read the new op rows, and return the version they reach."""
        with self.table.lock:
            version = self.table.refresh()
            try:
                return self.catch_up()
            except CorruptLogError:
                # This process may have been stopped here, while rows were pruned or files deleted.
                if self.table.refresh() == version:
                    raise
            return self.catch_up()

    def catch_up(self) -> int:
        before, version = self.view, self.table.version
        if version <= before.version:
            return version
        if before.version < 0:
            before = self._start()
        rows = self._read_between(before.version + 1, version)
        if before.is_behind_mark(rows) and before.version < pruned_up_to(self.table):
            self._open.clear()
            before = self._start()
            rows = self._read_between(before.version + 1, version)
        after = before.after(rows, version)
        # An exception (an interrupt, a full memory) may come at any line: each line leaves a true state.
        for half_id in pc.unique(rows["half_id"]).to_pylist():
            self._open.pop(half_id, None)
            self._just_prepared.pop(half_id, None)
        if self._awaited is not None and pc.any(pc.equal(rows["commit_id"], self._awaited.commit_id)).as_py():
            self._awaited.arrived = True
        self.view = after
        return version

    def read_anew(self) -> None:
        """Read the state from the table, not from memory: nobody looks again at half batches that a mark has passed."""
        version = self.table.refresh()
        self._open.clear()
        self._older_rows = (-1, {})
        self._just_prepared.clear()
        start = self._start()
        self.view = start.after(self._read_between(start.version + 1, version), version)

    def _start(self) -> OpView:
        """The state of the newest mark, from which a cold start goes on."""
        actions = self.table.actions()
        marked = pc.max(actions["max.low_water"]).as_py() if actions.num_rows else None
        if marked is None:
            if pruned_up_to(self.table) >= 0:
                raise CorruptLogError("table op has lost its newest mark: restore the table from a copy")
            return OpView()
        self._just_prepared.clear()  # they may have been settled since, and passed by the mark
        paths = actions.filter(pc.equal(actions["max.low_water"], marked))["path"].to_pylist()
        return OpView.from_mark(read_op(self.table, paths))

    def _read_between(self, first: int, last: int) -> pa.Table:
        actions = self.table.actions()
        if actions.num_rows == 0:
            return NO_OPS
        new = pc.fill_null(pc.greater_equal(actions["max.version"], first), True)
        paths = actions.filter(new)["path"].to_pylist()
        # The reader does not filter: it would skip rows by a footer's statistics, which have no checksum
        # against flipped bits.
        written = {} if self._awaited is None else self._awaited.written
        from_files = [read_op(self.table, unread)] if (unread := [p for p in paths if p not in written]) else []
        rows = pa.concat_tables([NO_OPS, *from_files, *(written[p] for p in paths if p in written)])
        between = pc.and_(pc.greater_equal(rows["version"], first), pc.less_equal(rows["version"], last))
        return rows.filter(between).sort_by("version")

    # ------------------------------------------------------------------ questions
    def ms_before_prepare(self) -> int:
        """The time (ms) after which a half batch must be prepared now: that of the mark, below which nobody looks for
        open half batches; or of the last reopen, which was sent before it, whatever the clocks say."""
        self.refresh()
        return max(self.view.low_water, self.reopened_ms)

    @property
    def reopened_ms(self) -> int:
        """When a transaction was last reopened (ms)."""
        return self.view.reopened_ms

    def op_rows_of(self, record: HalfRecord) -> pa.Table:
        """The op rows of one half batch, in version order. Above the mark, all rows of a half batch are in memory."""
        in_memory = _rows_of_batch(self.view.rows, record.half_id)
        if not self._is_below(record):
            return in_memory
        return pa.concat_tables([self._older_rows_of([record.half_id])[record.half_id], in_memory])

    def _is_below(self, record: HalfRecord) -> bool:
        """Whether a half batch was prepared below the mark, so that it may have op rows older than those in memory."""
        return record.prepared_ms <= self.view.low_water

    def _older_rows_of(self, half_ids: Sequence[str]) -> Mapping[str, pa.Table]:
        """By half id, the op rows that are older than those in memory; the mapping may have more half batches. It is
        cached: a commit that lost a race needs the rows again, and by scanning again it would lose the next."""
        marked_at, cache = self._older_rows
        if marked_at != self.view.marked_at or len({*cache, *half_ids}) > OLDER_CACHED_MAX:
            cache = {}
            self._older_rows = (self.view.marked_at, cache)
        if unread := [half_id for half_id in half_ids if half_id not in cache]:
            cache.update(self._read_older(unread))
        return cache

    def read_older(self, records: Iterable[HalfRecord]) -> None:
        """Read the older op rows of several half batches at once, which :meth:`state_of` would read one by one."""
        with self.table.lock:
            half_ids = [record.half_id for record in records if self._is_below(record)]
            if len(half_ids) <= OLDER_CACHED_MAX:
                self._older_rows_of(half_ids)

    def _read_older(self, half_ids: Sequence[str]) -> dict[str, pa.Table]:
        """The op rows that are older than the rows in memory, by half id and in version order. Of a half batch that the
        mark names, only rows of the named versions count."""
        at_mark = self.view.open_at_mark
        versions = sorted({v for h in half_ids if h in at_mark for v in at_mark[h].versions})
        unnamed = [h for h in half_ids if h not in at_mark]
        rows = self.older(unnamed) if unnamed else NO_OPS
        if versions:
            named = [h for h in half_ids if h in at_mark]
            where = pc.field("half_id").isin(named) & pc.field("version").isin(versions)
            named_rows = read_op(self.table, self._paths_of_versions(versions), None, where)
            rows = pa.concat_tables([rows, named_rows.sort_by("version")])
        positions: dict[str, list[int]] = {}
        ids, row_versions = rows["half_id"].to_pylist(), rows["version"].to_pylist()
        for position, (half_id, version) in enumerate(zip(ids, row_versions, strict=True)):
            if half_id not in at_mark or version in at_mark[half_id].versions:
                positions.setdefault(half_id, []).append(position)
        return {h: rows.take(positions[h]) if h in positions else NO_OPS for h in half_ids}

    def _paths_of_versions(self, versions: Sequence[int]) -> list[str]:
        """The files that may have rows of some versions (ascending)."""
        actions = self.table.actions()
        firsts, lasts = actions["min.version"].to_pylist(), actions["max.version"].to_pylist()
        return [
            path
            for path, first, last in zip(actions["path"].to_pylist(), firsts, lasts, strict=True)
            if first is None or last is None or bisect_left(versions, first) < bisect_right(versions, last)
        ]

    def note_prepared(self, half_ids: Sequence[str]) -> None:
        """Note half batches that will be prepared now: ``op`` has no rows of them."""
        with self.table.lock:
            self._just_prepared.update(dict.fromkeys(half_ids))
            for half_id in list(islice(self._just_prepared, max(0, len(self._just_prepared) - HALF_IDS_MAX))):
                del self._just_prepared[half_id]

    def drop_prepared(self, half_ids: Sequence[str]) -> None:
        """Undo :meth:`note_prepared`."""
        with self.table.lock:
            for half_id in half_ids:
                self._just_prepared.pop(half_id, None)

    def scan(self, half_ids: Sequence[str], before: int | None = None) -> pa.Table:
        """Read the op rows of half batches from the table; with ``before``, only those below this version."""
        actions = self.table.actions()
        where = pc.field("half_id").isin(list(half_ids))
        if before is not None:
            where &= pc.field("version") < before
            actions = actions.filter(pc.fill_null(pc.less(actions["min.version"], before), True))
        return read_op(self.table, actions["path"].to_pylist(), None, where).sort_by("version")

    def older(self, half_ids: Sequence[str]) -> pa.Table:
        """The op rows of half batches that are older than the rows in memory."""
        since = self.view.since
        return self.scan(half_ids, before=since) if since else NO_OPS

    def state_of(self, record: HalfRecord, refresh: bool = True) -> BatchState:
        """The state of one half batch after its newest op rows."""
        if not refresh and self.has_no_op_rows(record):
            return record.fresh_state()
        with self.table.lock:
            if refresh:
                self.refresh()
            rows = self.op_rows_of(record).to_pylist()
            self._require_there(record, rows)
            state = record.fresh_state()
            for row in rows:
                state.fold(OpRow.of(row))
            return state

    def has_no_op_rows(self, record: HalfRecord) -> bool:
        """Whether this process prepared a half batch that had no op rows when ``op`` was last read."""
        return record.half_id in self._just_prepared and not self._is_below(record)

    def _require_there(self, record: HalfRecord, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise HalfBatchLeftError when a half batch has left ``half``. If its op rows are gone, too, it would look
        pending, and its messages would be placed twice."""
        for row in rows:
            if row["kind"] == OpKind.ARCHIVED.value:
                raise Archived.of(row).left_error()
        if self.is_gone(record) or self._was_settled(record, rows):
            raise HalfBatchLeftError(
                f"half batch {record.half_id!r} left table half long ago, and nothing is kept of its outcome: this "
                "process slept meanwhile, or table half was set back to an older copy. Read what was committed from "
                "the table messages"
            )

    def is_gone(self, record: HalfRecord) -> bool:
        """Whether a half batch has left ``half``. No half batch above the mark leaves."""
        return self._is_below(record) and not self.half.has(record)

    def _was_settled(self, record: HalfRecord, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a half batch was settled and its deciding op rows are gone: the mark has passed the half batch and
        does not name it."""
        if not self._is_below(record) or record.half_id in self.view.open_at_mark:
            return False
        return not any(row["kind"] in DECIDING for row in rows)

    def archived(self, half_id: str) -> Archived | None:
        """The archive of a half batch that has left or is about to leave; None for any other."""
        with self.table.lock:
            self.refresh()
            rows = read_op(self.table, self.archive_paths(), None, pc.field("half_id") == half_id)
            archive_rows = rows.filter(of_kind(rows, OpKind.ARCHIVED)).to_pylist()
            return Archived.of(archive_rows[-1]) if archive_rows else None

    def archived_as(self, app_id: str, batch_id: int) -> Archived | None:
        """The archive of the half batch of this name that has left or is about to leave; None when there is none."""
        name = batch_name(app_id, batch_id)
        with self.table.lock:
            self.refresh()
            rows = read_op(self.table, self.archive_paths(), None, _may_be_named([name])).sort_by("version")
        rows = rows.filter(pc.and_(of_kind(rows, OpKind.ARCHIVED), pc.equal(names_of(rows["half_id"]), name)))
        return Archived.of(rows.slice(rows.num_rows - 1).to_pylist()[0]) if rows.num_rows else None

    def archived_among(self, names: Collection[str]) -> frozenset[str]:
        with self.table.lock:
            self.refresh()
            rows = self.table.read(self.archive_paths(), ["kind", "half_id"], _may_be_named(names))
        archived_names = names_of(rows.filter(of_kind(rows, OpKind.ARCHIVED))["half_id"])
        return frozenset(archived_names.to_pylist()).intersection(names)

    def committed_among(self, names: Collection[str]) -> frozenset[str]:
        """The names whose half batches have committed messages, even when they have left."""
        with self.table.lock:
            self.refresh()
            paths = live_paths(self.table)
            rows = self.table.read(paths, ["kind", "half_id", "archived"], _may_be_named(names))
        archived_commit = pc.greater(pc.struct_field(rows["archived"], "committed"), 0)
        committed = pc.or_(of_kind(rows, OpKind.COMMIT), pc.fill_null(archived_commit, False))
        return frozenset(names_of(rows.filter(committed)["half_id"]).to_pylist()).intersection(names)

    def commit_ids_at(self, version: int) -> list[str]:
        """The ids of the commits that wrote the op rows of a version: one id, or no id when the version has no rows."""
        rows = self.view.rows
        if not self.view.since <= version <= self.view.version:
            actions = self.table.actions()
            may_hold = pc.and_(
                pc.fill_null(pc.less_equal(actions["min.version"], version), True),
                pc.fill_null(pc.greater_equal(actions["max.version"], version), True),
            )
            rows = self.table.read(actions.filter(may_hold)["path"].to_pylist(), ["version", "commit_id"])
        return [str(c) for c in pc.unique(rows.filter(pc.equal(rows["version"], version))["commit_id"]).to_pylist()]

    def archived_rows(self) -> pa.Table:
        """All ``archived`` rows, as ``op`` was last read: ``half_id, op_time``."""
        rows = self.table.read(self.archive_paths(), ["kind", "half_id", "op_time"])
        return rows.filter(of_kind(rows, OpKind.ARCHIVED)).select(["half_id", "op_time"])

    def archive_paths(self) -> list[str]:
        """The files of ``op`` that have ``archived`` rows."""
        actions = self.table.actions()
        return [str(path) for path in actions.filter(pc.is_valid(actions["max.prepared_ms"]))["path"].to_pylist()]

    def open_batch(self, half_id: str) -> OpenBatch:
        """A half batch and its state, as ``op`` was last read. This returns the same object until a new op row comes,
        so do not change it."""
        batch = self._open.get(half_id)
        if batch is None:
            record = self.half.get(half_id)
            batch = self._open[half_id] = OpenBatch(record, self.state_of(record, refresh=False))
            self._open_rows += record.rows
            if self._open_rows > OPEN_ROWS_CACHED_MAX:
                self._drop_oldest_open()
        return batch

    def _drop_oldest_open(self) -> None:
        """Drop the oldest open half batches, and keep about half of :data:`OPEN_ROWS_CACHED_MAX`."""
        rows = 0
        for half_id, batch in reversed(list(self._open.items())):
            if rows > OPEN_ROWS_CACHED_MAX // 2:
                del self._open[half_id]
            rows += batch.record.rows
        self._open_rows = sum(batch.record.rows for batch in self._open.values())

    def maybe_open(self) -> BatchIndex:
        """Half batches that may be open, by half id: all above the low-water mark, and those named by the mark, with
        their pending rows."""
        above = self.half.contents.prepared_after(self.view.low_water)
        return above.updated({h: PrepareEntry(b.ms, b.pending) for h, b in self.view.open_at_mark.items()})

    def open_half_ids(self) -> list[str]:
        """Half batches that may have pending rows, oldest first."""
        # op is read before half, so half has every half batch that op names. A half batch decided in between looks open
        # here; callers read its state themselves.
        with self.table.lock:
            self.refresh()
            prepared = self.maybe_open()
            open_ids = self.open_among(prepared)
            self.unreadable = prepared.unreadable
        # Messages that were reopened below the mark are older than all above it.
        return sorted(open_ids, key=lambda half_id: prepared[half_id].ms if half_id in prepared else 0)

    def open_among(self, prepared: BatchIndex) -> list[str]:
        """The half batches of ``prepared`` with pending rows, and those below the mark that were reopened and are still
        open."""
        opened = dict.fromkeys(self.open_of(prepared))
        if reopened := self.reopened(prepared):
            pending = self.view.reopened_rows()  # all were settled when the mark was made
            opened.update(dict.fromkeys(half_id for half_id in reopened if pending.get(half_id, 0) > 0))
        return list(opened)

    def open_of(self, prepared: BatchIndex) -> list[str]:
        """The half batches of ``prepared`` with rows that are not settled."""
        return list(prepared.left_open(net_settled_table(self.view.rows)))

    def reopened(self, prepared: BatchIndex) -> list[str]:
        """Half batches that were reopened and are not in ``prepared``: neither above the mark nor named by it."""
        rows = self.view.rows
        ids = pc.unique(rows.filter(of_kind(rows, OpKind.REOPEN))["half_id"])
        return prepared.lacks(ids)


def _may_be_named(names: Collection[str]) -> pc.Expression:
    """A filter for the rows of half batches with these names, and of the few half batches whose ids sort between
    these."""
    return (pc.field("half_id") >= min(names)) & (pc.field("half_id") < after_name(max(names)))


def _rows_of_batch(rows: pa.Table, half_id: str) -> pa.Table:
    return rows.filter(pc.equal(rows["half_id"], half_id))
