"""Half files that were stripped: their rows are found again by their address. Executors read through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.files import RowRange

MOVED_KEPT = 10_000
"""New places of half files that are kept in memory."""


class HalfFiles:
    """Half files, which are read wherever they lie now: one that was stripped is found again by its address.

    Parameters
    ----------
    read : callable
        ``files.read_range`` of the table's folder.
    locate : callable
        Where a file of a half batch lies now. It lists ``half``, so it is asked only when a file is not where ``op``
        says: the cost of reading must not follow the age of the log.
    """

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
        """The rows of a range, as ``files.read_range`` has them."""
        if wanted.more:
            yield from self._read_shared(wanted, columns, where)
            return
        address = (wanted.half_id, wanted.file_no)
        done = 0
        try:
            for position, table in self._read(
                replace(wanted, path=self._moved.get(address, wanted.path)), columns, where
            ):
                done = position + table.num_rows
                yield position, table
            return
        except FileNotFoundError:
            path = self._locate(*address)
        if len(self._moved) >= MOVED_KEPT:
            self._moved.clear()
        self._moved[address] = path
        for position, table in self._read(replace(wanted, path=path), columns, where):
            seen = max(0, done - position)
            if seen < table.num_rows:
                yield position + seen, table.slice(seen)

    def _read_shared(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None
    ) -> Iterator[tuple[int, pa.Table]]:
        """The rows of several half batches: at once while their file is there, else one after the other."""
        try:
            yield from self._read(wanted, columns, where)  # one table, or none
            return
        except FileNotFoundError:
            pass
        done = 0
        for one in wanted.each:
            for position, table in self.read(one, columns, where):
                yield done + position, table
            done += one.rows
