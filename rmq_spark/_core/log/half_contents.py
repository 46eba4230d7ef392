"""Tells which half batches lie in which files of ``half``, by its Delta log and by the files that small sends share.

When a shared file cannot be read, its half batches are missing, and :attr:`BatchIndex.unreadable` names the file.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.batch_index import BatchIndex
from rmq_spark._core.log.half_header import after_name, name_of, names_of
from rmq_spark._core.log.shared_files import SharedFiles, UnreadableFile
from rmq_spark._core.storage.table import Table
from rmq_spark.errors import CorruptLogError


class LargeFile(NamedTuple):
    """A large half file: its prepare time (ms), and its half batches with their numbers of rows (``half_id, rows``)."""

    path: str
    ms: int
    inside: pa.Table


class HalfContents:
    """The half batches in the files of ``half``. It reads rows only to learn which half batches share a file."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.shared = SharedFiles(lambda paths: self.table.read(paths, ["half_id"])["half_id"], self._is_live)

    def _is_live(self, path: str) -> bool:
        """Whether the newest version of the table names a file."""
        self.table.refresh()
        return bool(pc.index(self.table.actions()["path"], path).as_py() >= 0)

    def ids_named(self, names: Collection[str]) -> dict[str, str]:
        """The ids of the half batches in the table that have these names, by name. The table is not refreshed.
        CorruptLogError: an unreadable file may have one of the missing names, so that name may be taken."""
        actions = self.table.actions()
        (is_single, low), high = single_batch_files(actions), pc.cast(actions["max.half_id"], pa.string())
        wanted_names = pa.array(sorted(names), pa.string())
        outside = pc.or_(pc.less(high, wanted_names[0]), pc.greater_equal(low, after_name(wanted_names[-1].as_py())))
        near = actions.append_column("one", is_single).filter(pc.invert(pc.fill_null(outside, False)))
        id_columns = [near.filter(near["one"])["min.half_id"]]
        shared_paths = near.filter(pc.invert(near["one"]))["path"].to_pylist()
        problem: CorruptLogError | None = None
        for path in shared_paths:
            try:
                id_columns.append(self.shared.of(path)["half_id"])
            except CorruptLogError as lost:
                problem = lost
        ids = pa.chunked_array(
            [chunk for column in id_columns for chunk in pc.cast(column, pa.string()).chunks], pa.string()
        )
        ids = ids.filter(pc.is_in(names_of(ids), value_set=wanted_names))
        named = {name_of(half_id): half_id for half_id in ids.to_pylist()}
        if problem is not None and len(named) < len(wanted_names):
            raise problem
        return named

    def files_that_may_hold(self, half_id: str) -> tuple[list[dict[str, Any]], CorruptLogError | None]:
        """The files that may have rows of a half batch; and, if a file that may have some cannot be read, why."""
        actions = self.table.actions()
        low, high = pc.cast(actions["min.half_id"], pa.string()), pc.cast(actions["max.half_id"], pa.string())
        inside = pc.and_(pc.less_equal(low, half_id), pc.greater_equal(high, half_id))
        candidates = actions.filter(pc.fill_null(inside, True))  # a file without statistics may hold any half batch
        is_single = single_batch_files(candidates)[0]
        shared_paths = candidates["path"].filter(pc.invert(is_single)).to_pylist()
        readable = self.shared.readable(shared_paths)
        with_rows = [path for path, inside in readable if pc.index(inside["half_id"], half_id).as_py() >= 0]
        problems = self.shared.problems(shared_paths).values()
        is_in_shared = pc.is_in(candidates["path"], value_set=pa.array(with_rows, pa.string()))
        return candidates.filter(pc.or_(is_single, is_in_shared)).to_pylist(), next(iter(problems), None)

    def prepared_after(self, low_water_ms: int) -> BatchIndex:
        """Half batches that were prepared after a time (ms), by half id."""
        self.table.refresh()
        actions = self.table.actions()
        return self._batches_in(actions.filter(pc.greater(actions["modification_time"], low_water_ms)))

    def all_batches(self) -> BatchIndex:
        """All half batches of the table."""
        self.table.refresh()
        return self._batches_in(self.table.actions())

    def _batches_in(self, actions: pa.Table) -> BatchIndex:
        is_single, low = single_batch_files(actions)
        is_single = pc.and_(is_single, pc.is_valid(actions["num_records"]))
        files = pa.table({"half_id": low, "ms": actions["modification_time"], "rows": actions["num_records"]})
        tables = [files.filter(is_single)]
        details = actions.select(["path", "modification_time", "num_records"]).filter(pc.invert(is_single)).to_pylist()
        shared = {file["path"]: file for file in details}
        for path, batches in self.shared.readable(shared):
            ms = pa.repeat(pa.scalar(shared[path]["modification_time"], pa.int64()), batches.num_rows)
            tables.append(batches.append_column("ms", ms).select(files.schema.names))
        unreadable = [
            UnreadableFile(path, shared[path]["modification_time"], shared[path]["num_records"], problem)
            for path, problem in self.shared.problems(shared).items()
        ]
        groups = pa.concat_tables(tables).group_by("half_id", use_threads=False)
        totals = groups.aggregate([("ms", "max"), ("rows", "sum")])
        totals = totals.select(["half_id", "ms_max", "rows_sum"]).rename_columns(files.schema.names)
        return BatchIndex(totals, unreadable)

    def paths_of(self, half_ids: Collection[str]) -> list[tuple[str, int]]:
        """The readable files that have rows of these half batches, and how many rows each file has."""
        actions = self.table.actions()
        is_single, low = single_batch_files(actions)
        ids = pa.array(sorted(half_ids), pa.string())
        shared_paths = actions["path"].filter(pc.invert(is_single)).to_pylist()
        with_rows = [path for path, inside in self.shared.readable(shared_paths) if _has_any(inside, ids)]
        is_in_shared = pc.is_in(actions["path"], value_set=pa.array(with_rows, pa.string()))
        needed = actions.filter(pc.or_(is_in_shared, pc.and_(is_single, pc.is_in(low, value_set=ids))))
        rows = pc.fill_null(needed["num_records"], 0).to_pylist()
        return list(zip(needed["path"].to_pylist(), rows, strict=True))

    def files_of_only(self, half_ids: pa.Array) -> list[str]:
        """The readable files that have rows of these half batches alone. A half batch in a shared file has no other
        file."""
        actions = self.table.actions()
        is_single, low = single_batch_files(actions)
        paths: list[str] = actions.filter(pc.and_(is_single, pc.is_in(low, value_set=half_ids)))["path"].to_pylist()
        for path, inside in self.shared.readable(actions["path"].filter(pc.invert(is_single)).to_pylist()):
            if pc.all(pc.is_in(inside["half_id"], value_set=half_ids)).as_py():
                paths.append(path)
        return paths

    def large_files(self, bytes_min: int, low_water_ms: int) -> list[LargeFile]:
        """Readable files of at least ``bytes_min`` bytes that were prepared up to a time (ms)."""
        actions = self.table.actions()
        large = pc.and_(
            pc.greater_equal(actions["size_bytes"], bytes_min),
            pc.less_equal(actions["modification_time"], low_water_ms),
        )
        actions = actions.filter(pc.and_(large, pc.is_valid(actions["num_records"])))
        is_single, low = single_batch_files(actions)
        inside = dict(self.shared.readable(actions["path"].filter(pc.invert(is_single)).to_pylist()))
        own = actions.append_column("half_id", low).filter(is_single)
        for file in own.to_pylist():
            inside[file["path"]] = pa.table({"half_id": [file["half_id"]], "rows": [file["num_records"]]})
        times = zip(actions["path"].to_pylist(), actions["modification_time"].to_pylist(), strict=True)
        return [LargeFile(path, ms, inside[path]) for path, ms in times if path in inside]


def single_batch_files(actions: pa.Table) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """By file: whether all its rows are of one half batch, as far as the Delta log says, and the lowest half id."""
    low, high = pc.cast(actions["min.half_id"], pa.string()), pc.cast(actions["max.half_id"], pa.string())
    return pc.fill_null(pc.equal(low, high), False), low


def _has_any(batches: pa.Table, half_ids: pa.Array) -> bool:
    return bool(pc.any(pc.is_in(batches["half_id"], value_set=half_ids)).as_py())
