"""Reads op rows: rows that place messages, from the newest file backwards; or all rows from a version on, forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.read_op import read_op

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table

PLACEMENT_COLUMNS = [
    "kind",
    "version",
    "op_time",
    "half_id",
    "file_no",
    "ranges",
    "count",
    "attempt",
    "topic",
    "queue_id",
    "queue_offset",
    "next_offset",
    "path",
    "file_rows",
    "transaction_per",
    "producer_group",
]

OP_READ_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of files of ``op`` that are read at once. In memory they take about six times as much. An op row that names
every other message of 100,000 is large."""


def walk_placements(op: Table, since_version: int = 0, above: int = 0) -> Iterator[tuple[pa.Table, int | None]]:
    """Placements, from the newest op file backwards. A reader near the head of its queues stops early, so its cost does
    not depend on the age of the log. Each step reads twice as many files as the last one.

    It yields rows with :data:`PLACEMENT_COLUMNS`, and the highest version that rows of the remaining files can have (-1
    when no file remains, None when it is unknown).
    """
    files = newest_files(op, since_version, above)
    is_wanted = pc.field("queue_offset").is_valid() & (pc.field("next_offset") > above)
    step, at = 16, 0
    while at < len(files):
        paths = [path for path, _ in files[at : at + step]]
        at, step = at + step, step * 2
        rest = files[at][1] if at < len(files) else -1
        yield read_op(op, paths, PLACEMENT_COLUMNS, is_wanted & (pc.field("version") >= since_version)), rest


def newest_files(op: Table, since_version: int = 0, above: int = 0) -> list[tuple[str, int | None]]:
    """Live files of ``op`` by descending highest version (None: without statistics, which come first). Files that
    cannot have a row of these versions, or a message above this offset, are left out."""
    actions = op.actions()
    if actions.num_rows == 0:
        return []
    version = actions["max.version"]
    needed = pc.fill_null(pc.greater_equal(version, since_version), True)
    if above > 0:
        needed = pc.and_(needed, pc.fill_null(pc.greater(actions["max.next_offset"], above), True))
    files = pa.table({"path": actions["path"], "version": version}).filter(needed)
    files = files.sort_by([("version", "descending")])
    newest = list(zip(files["path"].to_pylist(), files["version"].to_pylist(), strict=True))
    return sorted(newest, key=lambda f: f[1] is not None)


def rows_above(op: Table, position: int, until: int, rows_max: int, columns: Sequence[str]) -> tuple[pa.Table, int]:
    """The op rows above a version, as many as fit into memory; and the version up to which they are complete, which is
    ``until`` when all were read. Reading ends before the rows would exceed ``rows_max``, or the files
    :data:`OP_READ_BYTES_MAX`."""
    actions = op.actions()
    actions = actions.filter(pc.fill_null(pc.greater(actions["max.version"], position), True))
    # Files without statistics may hold any version, so they come first.
    firsts = pc.fill_null(actions["min.version"], -1)
    actions = actions.set_column(actions.column_names.index("min.version"), "min.version", firsts)
    actions = actions.sort_by("min.version")
    rows = size = 0
    for number, file in enumerate(actions.select(["min.version", "num_records", "size_bytes"]).to_pylist()):
        first = file["min.version"]
        rows, size = rows + (file["num_records"] or 0), size + (file["size_bytes"] or 0)
        # Merged files may share a version. All versions below the first one that is left out are complete.
        if number > 0 and (rows > rows_max or size > OP_READ_BYTES_MAX) and first > position + 1:
            actions, until = actions.slice(0, number), min(until, first - 1)
            break
    table = read_op(op, actions["path"].to_pylist(), columns)
    return table.filter(pc.and_(pc.greater(table["version"], position), pc.less_equal(table["version"], until))), until
