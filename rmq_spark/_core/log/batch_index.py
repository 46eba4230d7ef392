"""Tells which half batches are prepared, by the Delta log of ``half``.

A log under load has tens of thousands of half batches above the mark, and nearly all are settled. So half batches stay
in columns, and become objects only when a caller asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.shared_files import UnreadableFile

SCHEMA = pa.schema([
    ("half_id", pa.string()), ("ms", pa.int64()), ("rows", pa.int64()),
])  # fmt: skip


class PrepareEntry(NamedTuple):
    """The entry of a prepared half batch in the Delta log: when it was prepared (ms), and its rows."""

    ms: int
    rows: int


class BatchIndex(Mapping[str, PrepareEntry]):
    """Prepared half batches by half id, from a table of ``half_id`` (each once)``, ms, rows``. ``unreadable`` are files
    with half batches that nobody knows, so these are missing here."""

    def __init__(self, table: pa.Table, unreadable: Sequence[UnreadableFile] = ()) -> None:
        self.table = table.cast(SCHEMA).combine_chunks()
        self.unreadable = unreadable

    @classmethod
    def of(cls, batches: Mapping[str, PrepareEntry]) -> BatchIndex:
        columns = list(zip(*batches.values(), strict=True)) or [()] * len(PrepareEntry._fields)
        return cls(pa.table([list(batches), *columns], schema=SCHEMA))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {half_id: row for row, half_id in enumerate(self.table["half_id"].to_pylist())}

    @cached_property
    def _columns(self) -> tuple[list[int], list[int]]:
        ms, rows = (self.table[name].to_pylist() for name in PrepareEntry._fields)
        return ms, rows

    def __getitem__(self, half_id: str) -> PrepareEntry:
        row = self._places[half_id]
        ms, rows = self._columns
        return PrepareEntry(ms[row], rows[row])

    def __contains__(self, half_id: object) -> bool:
        return half_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def require_all(self) -> None:
        """Raise the problem of a file whose half batches are not among these."""
        for file in self.unreadable:
            raise file.problem

    def updated(self, others: Mapping[str, PrepareEntry]) -> BatchIndex:
        """These half batches with ``others`` added or replaced."""
        if not others:
            return self
        added = BatchIndex.of(others).table
        unchanged = self.table.filter(pc.invert(pc.is_in(self.table["half_id"], value_set=_values(added["half_id"]))))
        return BatchIndex(pa.concat_tables([unchanged, added]), self.unreadable)

    def left_open(self, settled: pa.Table) -> dict[str, int]:
        """Number of unsettled rows of each half batch, without half batches that are settled entirely. ``settled`` has
        ``half_id`` (each once)``, rows``."""
        places = pc.index_in(self.table["half_id"], value_set=_values(settled["half_id"]))
        gone = pc.fill_null(settled["rows"].combine_chunks().take(places.combine_chunks()), 0)
        left = pc.subtract(self.table["rows"], gone)
        is_open = pc.greater(left, 0)
        ids = self.table["half_id"].filter(is_open).to_pylist()
        return dict(zip(ids, left.filter(is_open).to_pylist(), strict=True))

    def lacks(self, half_ids: pa.Array) -> list[str]:
        """The ids among ``half_ids`` that are missing here."""
        is_known = pc.is_in(half_ids, value_set=_values(self.table["half_id"]))
        return [str(half_id) for half_id in half_ids.filter(pc.invert(is_known)).to_pylist()]

    def after(self, ms: int) -> list[str]:
        """The half batches that were prepared after a time (ms)."""
        return [str(h) for h in self.table["half_id"].filter(pc.greater(self.table["ms"], ms)).to_pylist()]

    def newest_ms(self, before: int | None = None) -> int:
        """The newest prepare time, or the newest one before a time; 0 when there is none."""
        times = self.table["ms"] if before is None else self.table["ms"].filter(pc.less(self.table["ms"], before))
        return int(pc.max(times).as_py() or 0)


def _values(ids: pa.ChunkedArray) -> pa.Array:
    return ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
