"""Reads half files wherever they lie now. Executors use this module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.row_range import RowRange

MOVED_CACHED_MAX = 10_000
"""The most new places of half files that are kept in memory."""


class RelocatingReader:
    """Reads half files wherever they lie now: a stripped file is found again by its address. ``read`` is
    ``row_range.read_range`` of the table's folder. ``locate`` returns a half file's present path. It is called only
    when a file is not where ``op`` says: it lists ``half``, and reading must not cost more as the log grows."""

    def __init__(
        self,
        read: Callable[[RowRange, Sequence[str], Filter | None], Iterator[tuple[int, pa.Table]]],
        locate: Callable[[str, int], str],
    ) -> None:
        self._read = read
        self._locate = locate
        self._moved: dict[tuple[str, int], str] = {}

    def read(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows of a range as ``row_range.read_range`` does."""
        if wanted.more:
            yield from self._read_shared(wanted, columns, where)
            return
        address = (wanted.half_id, wanted.file_no)
        rows_read = 0
        try:
            for position, table in self._read(
                replace(wanted, path=self._moved.get(address, wanted.path)), columns, where
            ):
                rows_read = position + table.num_rows
                yield position, table
            return
        except FileNotFoundError:
            path = self._locate(*address)
        if len(self._moved) >= MOVED_CACHED_MAX:
            self._moved.clear()
        self._moved[address] = path
        for position, table in self._read(replace(wanted, path=path), columns, where):
            skipped = max(0, rows_read - position)
            if skipped < table.num_rows:
                yield position + skipped, table.slice(skipped)

    def _read_shared(
        self, row_range: RowRange, columns: Sequence[str], where: Filter | None
    ) -> Iterator[tuple[int, pa.Table]]:
        """The rows of several half batches: at once while their file is there, else one half batch after the other."""
        try:
            yield from self._read(row_range, columns, where)  # one table, or none
            return
        except FileNotFoundError:
            pass
        rows_read = 0
        for part in row_range.each:
            for position, table in self.read(part, columns, where):
                yield rows_read + position, table
            rows_read += part.rows
