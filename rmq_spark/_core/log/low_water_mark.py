"""The low-water mark: all half batches below it are settled, except those that it names or that were reopened later.

A mark is made from what a reader has just read from the table. Take half batches 1 to 5, prepared in this order, of
which 2 and 5 are open::

    half    1      2      3      4      5
            done   open   done   done   open
                                        └── low_water: the mark names 2 and 5
    op      … … … … … … … … … … … … … … mark …
                                        └── since_version: a cold start reads from here, and the older rows of 2 and 5

So a half batch that stays open for long costs its own op rows, and no later rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.batch_index import BatchIndex, PrepareEntry
from rmq_spark._core.log.half_table import HalfTable
from rmq_spark._core.log.op import NO_OPS, OpenAtMark, OpKind, OpRow
from rmq_spark._core.log.op_view import net_settled, of_kind, still_waiting

if TYPE_CHECKING:
    from rmq_spark._core.log.op_reader import OpReader

NAMED_MAX = 10_000
"""A mark names at most this many half batches, versions and due times. When more are open, the mark stops before
them."""
ROWS_LET_GO_MIN = 64
"""A mark that passes no half batch is made when this many op rows no longer need to be kept."""


class Marker:
    """Makes the next mark. ``reader`` has just read the state of ``op`` from the table."""

    def __init__(self, reader: OpReader, half: HalfTable) -> None:
        self._reader = reader
        self._half = half

    def next_mark(self) -> list[OpRow]:
        """The row of the next mark, and the conflict rows that it repeats; no row when nothing changed. While a file
        above the mark cannot be read, there is no next mark, which could pass open half batches."""
        before = self._reader.view
        prepared = self._reader.maybe_open()
        if prepared.unreadable:
            return []
        unsettled = {*self._reader.open_among(prepared), *before.waiting}
        low_water = self._low_water(prepared, unsettled)
        named_ids = {half_id for half_id in unsettled if half_id not in prepared or prepared[half_id].ms <= low_water}
        since = self._since(set(prepared.after(low_water)) - named_ids)
        dropped = pc.sum(pc.less(before.rows["version"], since)).as_py() or 0
        if not (low_water > before.low_water or named_ids != before.open_at_mark.keys() or dropped >= ROWS_LET_GO_MIN):
            return []
        mark = OpRow(
            OpKind.MARK,
            low_water=low_water,
            since_version=since,
            tails=before.tails,
            firsts=before.firsts or None,
            reopened_ms=before.reopened_ms,
            below=self._entries(sorted(named_ids), prepared, since),
        )
        return [mark, *self._open_conflicts(since)]

    def _low_water(self, prepared: BatchIndex, unsettled: Collection[str]) -> int:
        """The newest prepare time; or, when a mark cannot name all that is open, the newest before the first without
        room."""
        before = self._reader.view
        weights = self._weights(unsettled)
        above = {h: prepared[h].ms for h in unsettled if h in prepared}
        above = {h: ms for h, ms in above.items() if ms > before.low_water}
        room = NAMED_MAX - sum(weights[h] for h in unsettled if h not in above)
        for half_id in sorted(above, key=above.__getitem__):
            room -= weights[half_id]
            if room < 0:
                return max(before.low_water, prepared.newest_ms(before=above[half_id]))
        return max(before.low_water, prepared.newest_ms())

    def _weights(self, half_ids: Collection[str]) -> Mapping[str, int]:
        """How many entries a mark needs for each of these half batches."""
        view = self._reader.view
        counts = _rows_of_batches(view.rows, half_ids)["half_id"].value_counts()
        rows = Counter(dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)))
        older = {h: len(view.open_at_mark[h].versions) if h in view.open_at_mark else 0 for h in half_ids}
        return {h: 1 + rows[h] + older[h] + len(view.waiting.get(h, ())) for h in half_ids}

    def _since(self, half_ids: Collection[str]) -> int:
        """The oldest version with an op row of one of these half batches above the mark: a cold start reads from
        there."""
        rows = _rows_of_batches(self._reader.view.rows, half_ids)
        return int(pc.min(rows["version"]).as_py()) if rows.num_rows else self._reader.table.version + 1

    # ------------------------------------------------------------------ what a mark names
    def _entries(self, named: Sequence[str], prepared: BatchIndex, since: int) -> Mapping[str, OpenAtMark]:
        """The entries of a mark by half id. Most of thousands of open half batches have no op rows, so the rows are
        searched once."""
        rows = _rows_of_batches(self._reader.view.rows, named)
        rows = rows.filter(pc.less(rows["version"], since))
        index: dict[str, list[int]] = {}
        for i, half_id in enumerate(rows["half_id"].to_pylist()):
            index.setdefault(half_id, []).append(i)
        return {h: self._entry(h, prepared, rows.take(index[h]) if h in index else NO_OPS, since) for h in named}

    def _entry(self, half_id: str, prepared: BatchIndex, rows: pa.Table, since: int) -> OpenAtMark:
        """The entry of a half batch in a mark. ``rows`` are the half batch's op rows in memory before a version."""
        before = self._reader.view
        entry = before.open_at_mark.get(half_id)
        if entry is not None and not rows.num_rows:
            return entry
        batch = entry or prepared.get(half_id)
        older: Sequence[int]
        if entry is not None:
            older, waiting = entry.versions, entry.waiting
            pending = entry.pending - _net_settled_count(rows)
        else:
            older, waiting = self._older_versions(half_id, prepared), {}
            pending = self._pending(half_id, prepared.get(half_id), rows, since)
        return OpenAtMark(
            0 if batch is None else batch.ms,
            pending,
            (*older, *_versions_that_count(rows)),
            still_waiting({half_id: waiting}, rows).get(half_id, {}) if waiting or rows.num_rows else {},
        )

    def _older_versions(self, half_id: str, prepared: BatchIndex) -> Sequence[int]:
        """Versions older than the rows in memory. Only a half batch that was settled below the last mark and then
        reopened has op rows there."""
        return () if half_id in prepared else _versions_that_count(self._reader.older([half_id]))

    def _pending(self, half_id: str, prepared: PrepareEntry | None, rows: pa.Table, since: int) -> int:
        """Number of rows that were pending before a version, in a half batch that the last mark does not name."""
        if prepared is None:  # it was settled at the last mark, and reopened since
            return max(0, self._reader.view.reopened_rows(before=since).get(half_id, 0))
        return prepared.rows - _net_settled_count(rows)

    # ------------------------------------------------------------------ conflicts
    def _open_conflicts(self, since: int) -> list[OpRow]:
        """Conflict rows that a mark repeats, because no reader reads the rows before ``since`` again."""
        view = self._reader.view
        rows = view.rows.filter(of_kind(view.rows, OpKind.CONFLICT))
        rows = _rows_of_batches(rows, view.conflicts)
        conflicts: dict[OpRow, bool] = {}  # → whether it also stands at that version or later
        for values in rows.to_pylist():
            row = replace(OpRow.of(values), op_time=None)
            if row.attempt is None:  # earlier conflicts of this half batch were resolved
                conflicts = {c: later for c, later in conflicts.items() if c.half_id != row.half_id}
            else:
                conflicts[row] = values["version"] >= since
        return [row for row, later in conflicts.items() if not later]


def _rows_of_batches(rows: pa.Table, half_ids: Collection[str]) -> pa.Table:
    return rows.filter(pc.is_in(rows["half_id"], value_set=pa.array(sorted(half_ids), pa.string())))


def _net_settled_count(rows: pa.Table) -> int:
    """Number of rows of one half batch that these op rows settle."""
    return sum(net_settled(rows).values()) if rows.num_rows else 0


def _versions_that_count(rows: pa.Table) -> list[int]:
    """The versions of op rows that define a half batch's state. Only the newest lease counts. Open conflicts do not
    count, because the mark repeats them."""
    if not rows.num_rows:
        return []
    kinds, versions = rows["kind"].to_pylist(), rows["version"].to_pylist()
    leases = [v for k, v in zip(kinds, versions, strict=True) if k == OpKind.LEASE.value]
    others = {v for k, v in zip(kinds, versions, strict=True) if k not in (OpKind.LEASE.value, OpKind.CONFLICT.value)}
    return sorted(others.union(leases[-1:]))
