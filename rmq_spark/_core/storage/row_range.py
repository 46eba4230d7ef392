"""Ranges of rows of a data file, and how they are read with pyarrow alone. Executors use this module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.file_system import require_path
from rmq_spark._core.storage.seal import (
    PUT_BACK,
    reading,
    require_count,
    require_row_groups,
    require_seal,
    rows_of_half_file,
)
from rmq_spark._core.vocabulary.rows import Ranges, bits_in, bytes_array, ranges_count
from rmq_spark.errors import CorruptLogError, StrippedError, UnreadableFileError

SHARED_ROWS_MAX = 20_000
"""In a file of at most this many rows, the rows of several half batches are found in one pass."""

PAYLOAD_COLUMNS = ("tags", "keys", "properties", "body", "born_timestamp")
"""Columns of ``half`` that are null in stripped rows: their messages were drained, and the file has to stay for others.
Every other row has a ``born_timestamp``."""
SLICES_MAX = 16
"""More runs of rows of a row group are copied, not sliced: a slice takes a few KB of memory, however short it is."""
THREADS_ROWS_MIN = 8_192
"""One thread decodes a row group with fewer rows: starting others takes longer."""

MATCHES = "__matches"
"""Name of the column that marks the rows that a filter keeps."""


def _is_as_written(file: pq.ParquetFile, row_range: RowRange, columns: Sequence[str]) -> bool:
    """Return True when row ``i`` of the file is row_no ``i`` of the half file, by the file's seal and row count.

    Statistics in the footer would prove it too, but pyarrow ends the process when it reads damaged ones.
    """
    holds = require_seal(file.schema_arrow, row_range.path, "half", columns)
    return (
        holds == rows_of_half_file(row_range.half_id, row_range.file_no)
        and file.metadata.num_rows == row_range.file_rows
    )


@dataclass(frozen=True)
class RowRange:
    """Rows of one file that a reader wants, with everything that an executor needs to read them.

    ``path`` is relative to the table. In ``half`` it is a hint: the file may have been stripped. The half file has the
    number ``file_no``, and was written with ``file_rows`` rows. ``ranges`` are the first and the last row_no of each
    run, ascending. A file of ``messages`` has an empty ``half_id``, and its ranges are positions in the file. ``more``
    are rows of other half batches in the same file, which follow these.
    """

    path: str
    half_id: str
    file_no: int
    file_rows: int
    ranges: tuple[tuple[int, int], ...]
    table: str = "half"
    more: tuple[RowRange, ...] = ()

    @property
    def rows(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges) + sum(part.rows for part in self.more)

    def is_same_half_file(self, other: RowRange) -> bool:
        return (self.half_id, self.file_no) == (other.half_id, other.file_no)

    @property
    def each(self) -> tuple[RowRange, ...]:
        """The rows of each half batch, separately."""
        return (replace(self, more=()), *self.more) if self.more else (self,)


def read_range(
    fs: pafs.FileSystem, folder: str, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of a range in row_no order, one row group at a time, each with the number of rows before it. The
    rows of several half batches, which share a file, come in one table.

    ``where``: of a row group without a match only the filter's columns are read, and it is left out. Any other comes
    with all its wanted rows and one more column, :data:`MATCHES`.

    LostFileError: the file is gone. It was stripped, and the caller has to look up where the rows are now.
    StrippedError: payload columns of stripped rows are wanted, whose messages are in the table ``messages``.
    CorruptLogError: the file lacks some of the rows, or is damaged.
    """
    path = require_path(wanted.path, wanted.table)
    filter_columns = [] if where is None else where.columns
    reach("files read", table=wanted.table, paths=[path])
    with reading(path, wanted.table), fs.open_input_file(f"{folder}/{path}") as source:
        file = pq.ParquetFile(source, page_checksum_verification=True)
        require_row_groups(file.metadata, path, wanted.table)
        if wanted.table != "half":  # a row of messages is named by its position in the file
            require_seal(file.schema_arrow, path, wanted.table, [*columns, *filter_columns])
            require_count(file.metadata.num_rows, wanted.file_rows, path, wanted.table)
            yield from _read_by_position(file, wanted, columns, where)
            return
        if not wanted.more and _is_as_written(file, wanted, [*columns, *filter_columns]):
            yield from _read_by_position(file, wanted, columns, where)
            return
        table = _read_by_address(file, wanted, _with_proof([*columns, *filter_columns]))
        if "born_timestamp" in table.column_names and table["born_timestamp"].null_count:
            raise StrippedError(
                f"file {path} of table half has no payload any more of rows of half batch {wanted.half_id!r}: their "
                "messages are in the table messages"
            )
        selected = table.select(list(columns))
        yield 0, selected if where is None else selected.append_column(MATCHES, where.keeps(table))


def _read_by_position(
    file: pq.ParquetFile, row_range: RowRange, columns: Sequence[str], where: Filter | None
) -> Iterator[tuple[int, pa.Table]]:
    if row_range.ranges[-1][1] >= row_range.file_rows or row_range.ranges[0][0] < 0:
        raise CorruptLogError(
            f"rows {row_range.ranges[0][0]}–{row_range.ranges[-1][1]} of {row_range.path} in table {row_range.table} "
            f"are asked for, which has {row_range.file_rows} rows"
        )
    position = 0
    start = 0
    for group_no in range(file.metadata.num_row_groups):
        end = start + file.metadata.row_group(group_no).num_rows
        overlaps = [(max(a, start), min(b, end - 1)) for a, b in row_range.ranges if a < end and b >= start]
        if overlaps:
            ranges = tuple((a - start, b - start) for a, b in overlaps)
            part = _read_group(file, group_no, ranges, columns, where)
            if part is not None:
                yield position, part
            position += ranges_count(ranges)
        start = end


def _read_group(
    file: pq.ParquetFile, group_no: int, ranges: Ranges, columns: Sequence[str], where: Filter | None
) -> pa.Table | None:
    """Return ranges of a row group's rows as one table; None when the filter keeps none of their rows."""

    rows = file.metadata.row_group(group_no).num_rows
    mask = pc.equal(bytes_array(bits_in(ranges, rows)), 1) if len(ranges) > SLICES_MAX else None

    def read(names: Iterable[str]) -> pa.Table:
        group = file.read_row_group(group_no, columns=list(names), use_threads=rows > THREADS_ROWS_MIN)
        if mask is not None:
            return group.filter(mask)
        slices = [group.slice(first, last - first + 1) for first, last in ranges]
        return slices[0] if len(slices) == 1 else pa.concat_tables(slices)

    if where is None:
        return read(columns)
    filter_rows = read(where.columns)
    kept = where.keeps(filter_rows)
    if pc.any(kept).as_py() is not True:
        return None
    unread = [c for c in columns if c not in where.columns]
    rest = read(unread) if unread else filter_rows
    values = [rest[c] if c in unread else filter_rows[c] for c in columns]
    return pa.table([*values, kept], names=[*columns, MATCHES])


def _with_proof(columns: Sequence[str]) -> list[str]:
    """The columns, and beside payload columns ``born_timestamp``, which tells whether a row still has its payload."""
    proof = ["born_timestamp"] if set(columns).intersection(PAYLOAD_COLUMNS) else []
    return list(dict.fromkeys([*columns, *proof]))


def _read_by_address(file: pq.ParquetFile, row_range: RowRange, columns: Sequence[str]) -> pa.Table:
    names = ["half_id", "file_no", "row_no"]
    table = file.read(columns=list(dict.fromkeys([*columns, *names])))
    if row_range.more and table.num_rows <= SHARED_ROWS_MAX:
        positions = {
            address: i for i, address in enumerate(zip(*(table[name].to_pylist() for name in names), strict=True))
        }
        wanted = [(w.half_id, w.file_no, row) for w in row_range.each for a, b in w.ranges for row in range(a, b + 1)]
        rows = [positions[address] for address in wanted if address in positions]
        if len(rows) == len(wanted) and len(positions) == table.num_rows:
            return table.select(list(columns)).take(pa.array(rows, pa.int64()))
    return pa.concat_tables([_select_half_file(table, part).select(list(columns)) for part in row_range.each])


def _select_half_file(table: pa.Table, row_range: RowRange) -> pa.Table:
    """The wanted rows of one half file, in row_no order."""
    is_in_file = pc.and_(pc.equal(table["half_id"], row_range.half_id), pc.equal(table["file_no"], row_range.file_no))
    table = table.filter(is_in_file).sort_by("row_no")
    # Only as long as the existing rows need: a range that claims too many rows takes no memory.
    bits = bytearray((pc.max(table["row_no"]).as_py() or 0) + 1)
    for first, last in row_range.ranges:
        end = min(last + 1, len(bits))
        bits[first:end] = b"\x01" * (end - first)
    table = table.filter(pc.equal(bytes_array(bits).take(table["row_no"]), 1))
    if table.num_rows != row_range.rows:
        raise _missing_rows_error(row_range, table.num_rows)
    return table


def _missing_rows_error(row_range: RowRange, found_rows: int) -> UnreadableFileError:
    others = f" and of {len(row_range.more)} others" if row_range.more else ""
    return UnreadableFileError(
        f"{row_range.path} holds {found_rows} of the {row_range.rows} rows asked for of file {row_range.file_no} of "
        f"half batch {row_range.half_id!r}{others}: {PUT_BACK}"
    )
