"""Files that other writers added to the tables of a commit log. Only rmq_spark may write to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rmq_spark.storage.table import Table, is_ours

NAMED_MAX = 3
"""Files that a finding names."""


def foreign_files(tables: Sequence[Table]) -> Iterator[str]:
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
