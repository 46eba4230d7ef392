"""Merges small files of ``op`` into one, so that a cold start reads few files."""

from __future__ import annotations

import logging

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.storage.merge import compact
from rmq_spark._core.storage.table import Change, Table

logger = logging.getLogger(__name__)

OP_FILES_MAX = 64
"""Small op files are merged when there are this many, so that a cold start reads few files."""
OP_FILE_ROWS_MAX = 50_000
OP_FILE_BYTES_MAX = 1024 * 1024
"""An op file with this many rows or bytes is not merged. A row can be large: it may name every tenth of 250,000
messages."""
MERGED_BYTES_MAX = 8 * OP_FILE_BYTES_MAX
"""Bytes that are merged at once, so that the merge does not take a sink's memory."""


def _to_merge(table: Table) -> list[str]:
    """Small op files, oldest first, as many as fit into memory; none while there are few."""
    actions = table.actions()
    few_rows = pc.less(actions["num_records"], OP_FILE_ROWS_MAX)
    small = actions.filter(pc.and_(few_rows, pc.less(actions["size_bytes"], OP_FILE_BYTES_MAX)))
    if small.num_rows < OP_FILES_MAX:
        return []
    small = small.sort_by([("min.version", "ascending"), ("path", "ascending")])
    together = pc.less_equal(pc.cumulative_sum(small["size_bytes"]), MERGED_BYTES_MAX)
    return [str(path) for path in small["path"].filter(together).to_pylist()]


def _in_version_order(rows: pa.Table) -> pa.Table:
    versions = rows["version"].combine_chunks()
    is_sorted = pc.all(pc.greater_equal(versions[1:], versions[:-1])).as_py() is not False
    return rows if is_sorted else rows.sort_by("version")


def is_due(table: Table) -> bool:
    return table.actions().num_rows >= OP_FILES_MAX and bool(_to_merge(table))


def compact_op(table: Table) -> int:
    """Merge the small files of ``op`` into one, sorted by version. Returns how many were merged.

    Op rows carry their version and time, so readers see the same before and after.
    """

    def merge(small: list[str]) -> Change:
        merged = table.write(_in_version_order(table.read(small)))
        return Change(add=[merged], remove=small, data_change=False)

    return compact(table, _to_merge, merge)
