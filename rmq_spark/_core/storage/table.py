"""A table of a commit log, as the rooms above know it: what it can do, and the change that one commit makes to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.data_file import DataFile, write_table
from rmq_spark._core.storage.foreign_commits import Changed
from rmq_spark._core.storage.row_range import RowRange

OP_ROW_GROUP_ROWS = 4_096
"""Rows of a row group of ``op``, which is sorted by version. A reader of the newest rows skips earlier row groups."""

BOUNDS: Mapping[str, Mapping[str, pa.DataType]] = {
    "half": {"half_id": pa.string()},
    "op": {"version": pa.int64(), "next_offset": pa.int64(), "low_water": pa.int64(), "prepared_ms": pa.int64()},
    "groups": {"consumer_group": pa.string()},
    "messages": {
        "topic": pa.string(),
        "queue_id": pa.int32(),
        "queue_offset": pa.int64(),
        "commit_timestamp": pa.timestamp("us", "UTC"),
        "op_version": pa.int64(),
    },
    "topics": {"name": pa.string()},
}
"""By table, the columns whose minimum and maximum in each file stand in the Delta log. delta-rs goes through those of
all live files at every commit, so each further column slows down a long log."""


@dataclass(frozen=True)
class Change:
    """The change that one commit makes to a table."""

    add: Sequence[DataFile] = ()
    remove: Sequence[str] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    """By application, its newest batch id."""
    modification_time_ms: int | None = None
    data_change: bool = True
    removed_earlier_s: float = 0.0
    """The removed files count as removed this many seconds earlier, so upkeep deletes them sooner."""
    version: int | None = None
    """The version that the change was proposed for. The loop sets it."""

    def is_stale(self, version: int) -> bool:
        """Whether the table is no longer at the version before this change's. The committing thread itself has moved
        it, in a call in the midst of the loop (``__del__``, a signal handler), or had to open it anew."""
        return self.version is not None and self.version != version + 1


class Clock(Protocol):
    """:class:`rmq_spark._core.storage.clock.StoreClock`, or its twin."""

    def require_near(self) -> None:
        """Raise ClockError when the writer's clock is too far from the store's."""


class Table(Protocol):
    """A table of a commit log: ``DeltaLogTable``, or its twin in memory in ``rmq_spark.testing``."""

    name: str
    schema: pa.Schema
    uri: str
    folder: str
    fs: Any
    """A ``pyarrow.fs.FileSystem``, or as much of one as the tables need."""
    runtime: Runtime
    """Gives the clock, the locks and the threads to the table and to everything built on it."""
    lock: AbstractContextManager[object]
    """Held while the table moves to another version. If another thread refreshed between ``propose`` and its commit,
    the commit would build on a version that ``propose`` never saw. The tables of a commit log share one lock."""

    clock: Clock
    """Compared with the store's before each write. The tables of a commit log share one."""

    @property
    def id(self) -> str:
        """The table's id, made with the table. A table put in its place has another id."""

    @property
    def version(self) -> int:
        """The version that the last refresh saw."""

    @property
    def history_s(self) -> float:
        """Seconds for which entries of the table's Delta log are kept."""

    def refresh(self) -> int:
        """Move to the newest version and return it. ForeignChangeError: another writer has changed the table, and it is
        not in :data:`~rmq_spark._core.storage.foreign_commits.READ_ALL_THE_SAME`."""

    def actions(self) -> pa.Table:
        """Return the live files: ``path, modification_time`` (ms), ``num_records, size_bytes``, and ``min.<column>,
        max.<column>`` of the table's columns in :data:`BOUNDS`."""

    def removed_since(self, age_s: float | None = None) -> set[str]:
        """Return the paths of files that commits removed from the table, as far as its Delta log knows; with ``age_s``
        only those removed within that many seconds, and perhaps some removed up to an hour earlier."""

    def transaction_version(self, app_id: str) -> int | None:
        """Return the newest batch id that a commit noted for this application in ``Change.transactions``."""

    def changed_by_others(self, since: int) -> Changed | None:
        """Return what the commits after version ``since``, all by other writers, changed; None when the table is as it
        was at that version. Raise ForeignChangeError when this cannot be found out any more."""

    def write(self, rows: pa.Table) -> DataFile:
        """Write a data file. It belongs to the table once a commit adds it."""

    def missing(self, files: Sequence[DataFile]) -> list[DataFile]:
        """Return the data files that are gone or have another size."""

    def read(
        self, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        """Return rows of some live files."""

    def read_range(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield rows of one half file as :func:`rmq_spark._core.storage.row_range.read_range` does."""

    def compare_and_set(
        self, propose: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        """Commit what ``propose`` returns at the next version, and ask it again when another writer takes that
        version."""


def write_file(table: Table, rows: pa.Table) -> DataFile:
    """Write rows as a data file of a table, with Parquet's pages and Delta's statistics as its readers want them."""
    began_s = table.runtime.monotonic()
    row_group_rows = OP_ROW_GROUP_ROWS if table.name == "op" else None
    stats_columns = tuple(BOUNDS.get(table.name, ()))
    file = write_table(
        table.fs, table.folder, rows, prefix=table.name, stats_columns=stats_columns, row_group_rows=row_group_rows
    )
    reach("file written", table=table.name)
    return replace(file, written_s=began_s)


def was_added(table: Table, file: DataFile) -> bool:
    """Return True when a commit has added the file: the table holds it, or held it until it was replaced."""
    return file.path in live_paths(table) or file.path in table.removed_since()


def live_paths(table: Table) -> list[str]:
    """The files of a table, as it was last read."""
    paths: list[str] = table.actions()["path"].to_pylist()
    return paths


def take_out(table: Table, paths: Sequence[str], removed_earlier_s: float = 0.0) -> None:
    """Remove those of the files that are still in the table: another process may remove the same ones.

    The commit says that no data changes. Delta refuses any other removal from an append-only table.
    """

    def propose(version: int) -> Change | None:
        remaining = sorted(set(live_paths(table)).intersection(paths))
        return Change(remove=remaining, data_change=False, removed_earlier_s=removed_earlier_s) if remaining else None

    table.compare_and_set(propose, lambda change: set(live_paths(table)).isdisjoint(change.remove))


def actions_schema(table: str) -> pa.Schema:
    """Return the schema of :meth:`Table.actions` for a table of this name."""
    numbers = ("modification_time", "num_records", "size_bytes")
    fields = [("path", pa.string()), *((name, pa.int64()) for name in numbers)]
    bounds = BOUNDS.get(table, {}).items()
    return pa.schema(fields + [(f"{side}.{name}", kind) for side in ("min", "max") for name, kind in bounds])


def bounds_of(table: str, stats: str) -> dict[str, Any]:
    """Return the bounds in :meth:`Table.actions` of a file with these statistics (JSON, as in a Delta log)."""
    statistics, types = json.loads(stats), BOUNDS.get(table, {})
    bounds: dict[str, Any] = {}
    for side in ("min", "max"):
        for name, value in statistics[f"{side}Values"].items():
            is_time = name in types and pa.types.is_timestamp(types[name])
            bounds[f"{side}.{name}"] = datetime.fromisoformat(value.replace("Z", "+00:00")) if is_time else value
    return bounds
