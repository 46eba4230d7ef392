"""Prunes op rows of half batches that have left: ``op`` is rewritten without them.

Only the ``archived`` row of such a half batch stays, for the idempotency window, and for as long as rmq_spark itself
may send it again (``own_sends``). It goes last. A reader of ``op`` that has not come as far as the pruned rows goes on
from the newest mark, which is above them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op import PRUNED, PRUNED_PLACED, OpKind, pruned_up_to
from rmq_spark._core.log.op_merge import MERGED_BYTES_MAX
from rmq_spark._core.log.op_view import of_kind
from rmq_spark._core.protocol.own_sends import PREFIXES, OwnSends
from rmq_spark._core.storage.data_file import DataFile
from rmq_spark._core.storage.table import Change, live_paths
from rmq_spark._core.upkeep.leave import Graces

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

PRUNED_SHARE_MIN = 0.5
"""An op file is rewritten when at least this share of its rows can go, so each row is rewritten a few times at most."""


@dataclass(frozen=True)
class _Dead:
    """Half batches that have left: all rows but ``archived`` may go of those in ``ids``, and that row of those in
    ``forgotten``."""

    ids: pa.Array
    forgotten: pa.Array

    def may_go(self, rows: pa.Table) -> pa.ChunkedArray:
        """Which op rows may go, among those that the newest mark has passed."""
        is_archived = of_kind(rows, OpKind.ARCHIVED)
        of_dead = pc.and_(pc.is_in(rows["half_id"], value_set=self.ids), pc.invert(is_archived))
        of_forgotten = pc.and_(pc.is_in(rows["half_id"], value_set=self.forgotten), is_archived)
        return pc.or_(pc.or_(of_dead, of_forgotten), of_kind(rows, OpKind.MARK))


class Pruner:
    def __init__(self, engine: Engine, graces: Graces) -> None:
        self._engine = engine
        self._graces = graces

    def run(self, dry_run: bool = False) -> int:
        """Rewrite the op files of which enough rows can go; return how many rows went."""
        engine = self._engine
        with engine.lock:
            engine.ledger.refresh()
            since = engine.ledger.view.since
            dead = self._dead()
            files = self._files(dead, since)
            if dry_run:
                return sum(file["dropped"] for file in files)
            return sum(self._rewrite(group, dead) for group in _groups(files))

    def _dead(self) -> _Dead:
        engine = self._engine
        rows = engine.ledger.archived_rows()
        present = engine.half.contents.all_batches()  # half is read after op: what it still has was not removed before
        if present.unreadable:  # it may have any half batch
            rows = rows.slice(0, 0)
        gone = rows.filter(pc.invert(pc.is_in(rows["half_id"], value_set=present.table["half_id"].combine_chunks())))
        now = engine.runtime.now()

        def older_than(seconds: float) -> pa.Array:
            return gone.filter(pc.less_equal(gone["op_time"], now - timedelta(seconds=seconds)))["half_id"]

        dead = older_than(self._graces.reader_s).combine_chunks()
        forgotten = older_than(max(self._graces.idempotency_s, self._graces.reader_s)).combine_chunks()
        if len(forgotten):
            forgotten = self._not_asked_for(self._without_other_rows(forgotten))
        return _Dead(dead, forgotten)

    def _not_asked_for(self, half_ids: pa.Array) -> pa.Array:
        """The half batches that nobody may send again."""
        engine = self._engine
        own = half_ids.filter(reduce(pc.or_, (pc.starts_with(half_ids, prefix) for prefix in PREFIXES)))
        if not len(own):
            return half_ids
        rows = engine.op_table.read(
            engine.ledger.archive_paths(), ["kind", "half_id", "archived"], pc.field("half_id").isin(own)
        )
        rows = rows.filter(of_kind(rows, OpKind.ARCHIVED))
        names, sends = pc.struct_field(rows["archived"], "app_id").to_pylist(), OwnSends(engine)
        asked_for = rows.filter(pa.array([sends.may_come(name) for name in names], pa.bool_()))["half_id"]
        return half_ids.filter(pc.invert(pc.is_in(half_ids, value_set=asked_for.combine_chunks())))

    def _without_other_rows(self, half_ids: pa.Array) -> pa.Array:
        """The half batches of which ``op`` has nothing but their ``archived`` row."""
        op = self._engine.op_table
        where = pc.field("half_id").isin(half_ids) & (pc.field("kind") != OpKind.ARCHIVED.value)
        others = op.read(live_paths(op), ["half_id"], where)["half_id"]
        return half_ids.filter(pc.invert(pc.is_in(half_ids, value_set=others.combine_chunks())))

    def _files(self, dead: _Dead, since: int) -> list[dict[str, Any]]:
        """The op files to rewrite, in version order, each with ``path, size_bytes, dropped``."""
        actions = self._engine.op_table.actions()
        passed = actions.filter(pc.fill_null(pc.less(actions["max.version"], since), False)).sort_by("min.version")
        files: list[dict[str, Any]] = []
        for file in passed.select(["path", "size_bytes"]).to_pylist():
            rows = self._engine.op_table.read([file["path"]], ["kind", "half_id"])
            dropped = pc.sum(dead.may_go(rows)).as_py() or 0
            if dropped and dropped >= PRUNED_SHARE_MIN * rows.num_rows:
                files.append({**file, "dropped": dropped})
        return files

    def _rewrite(self, paths: Sequence[str], dead: _Dead) -> int:
        """Replace some files by the rows that stay; return how many rows went."""
        op = self._engine.op_table
        rows = op.read(paths)
        goes = dead.may_go(rows)
        gone, kept = rows.filter(goes), rows.filter(pc.invert(goes))
        placed = gone.filter(pc.is_valid(gone["queue_offset"]))
        last = {PRUNED: pc.max(gone["version"]).as_py(), PRUNED_PLACED: pc.max(placed["version"]).as_py()}
        written = list(self._write(kept))

        def propose(version: int) -> Change | None:
            if not set(live_paths(op)).issuperset(paths):  # merged, or pruned by another process
                return None
            reached = {name: max(n, pruned_up_to(op, name)) for name, n in last.items() if n is not None}
            return Change(add=written, remove=paths, transactions=reached, data_change=False)

        committed = op.compare_and_set(propose, lambda change: set(live_paths(op)).isdisjoint(change.remove))
        return 0 if committed is None else gone.num_rows

    def _write(self, kept: pa.Table) -> Iterator[DataFile]:
        is_archived = of_kind(kept, OpKind.ARCHIVED)
        # Archived rows are looked for by half id, the others by version.
        for rows, order in ((kept.filter(is_archived), "half_id"), (kept.filter(pc.invert(is_archived)), "version")):
            if rows.num_rows:
                yield self._engine.op_table.write(rows.sort_by(order))


def _groups(files: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Files that are rewritten together: few enough to fit into memory."""
    group: list[str] = []
    size = 0
    for file in files:
        if group and size + file["size_bytes"] > MERGED_BYTES_MAX:
            yield group
            group, size = [], 0
        group.append(file["path"])
        size += file["size_bytes"]
    if group:
        yield group
