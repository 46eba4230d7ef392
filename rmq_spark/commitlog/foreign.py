"""What other writers did to the tables of a commit log. Only rmq_spark may write to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow.fs as pafs

from rmq_spark.storage.seal import taken_out_by_others
from rmq_spark.storage.table import OURS_ALONE, Table, foreign_change, is_ours

NAMED_MAX = 3
"""Files that a finding names."""
ENTRIES_MAX = 100
"""Entries of a Delta log, the newest ones, in which a finding looks for what other writers took out."""


def foreign_changes(tables: Sequence[Table]) -> Iterator[str]:
    """A sentence for each table that has files of another writer, and for each change that took rows out; of a table
    that is ours alone, one for all that another writer changed in it."""
    alone = [table for table in tables if table.name in OURS_ALONE]
    others = [table for table in tables if table.name not in OURS_ALONE]
    for table in alone:
        table.refresh()
        if said := foreign_change(table):
            yield said
    yield from _foreign_files(others)
    for table in others:
        yield from _taken_out(table)


def _taken_out(table: Table) -> Iterator[str]:
    if not isinstance(table.fs, pafs.FileSystem):
        return
    found = table.fs.get_file_info(pafs.FileSelector(f"{table.folder}/_delta_log"))
    entries = sorted(i.path for i in found if i.base_name.endswith(".json") and i.base_name[:-5].isdigit())
    for path in entries[-ENTRIES_MAX:]:
        try:
            with table.fs.open_input_stream(path) as stream:
                entry = stream.readall()
        except FileNotFoundError:  # it was cleaned up meanwhile
            continue
        version = int(path.rpartition("/")[2][:-5])
        if said := taken_out_by_others(entry, table.name, version):
            yield said


def _foreign_files(tables: Sequence[Table]) -> Iterator[str]:
    """A sentence for each table that has files of another writer."""
    for table in tables:
        table.refresh()
        files = sorted(path for path in table.actions()["path"].to_pylist() if not is_ours(table, path))
        if files:
            more = f" and {len(files) - NAMED_MAX} more" if len(files) > NAMED_MAX else ""
            yield (
                f"table {table.name} has files that rmq_spark did not write ({', '.join(files[:NAMED_MAX])}{more}): "
                "somebody ran OPTIMIZE on it, or wrote to it"
            )
