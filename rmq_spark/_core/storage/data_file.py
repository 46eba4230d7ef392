"""Data files of a commit log, and how they are written with pyarrow alone. Executors use this module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.seal import seal
from rmq_spark._core.storage.store_errors import writing

ROW_GROUP_ROWS = 65_536
"""Rows of a Parquet row group. A reader decodes whole row groups, however short its offset range is."""
PAGE_BYTES = 1_048_576
"""Size of a column's page in a Parquet file: pyarrow's default."""
FEW_ROWS = 2_000
"""A file of at most this many rows has no dictionaries: it is smaller, and faster to write and to read."""
MAP_ENTRY = "key_value"
"""Parquet's name of an entry of a map."""
COMPRESSION = "zstd"
"""zstd makes JSON bodies smaller than snappy does. It writes them as fast, and reads them faster."""
COMPRESSION_OF_SMALL = "snappy"
SMALL_BYTES = 262_144
"""A table of at most this many bytes is not compressed by zstd: starting zstd for each column costs more than it
saves."""


@dataclass(frozen=True)
class DataFile:
    """A Parquet file that a commit can add to a table. ``path`` is relative to the table's folder, ``stats`` are
    Delta's statistics as JSON, and ``written_s`` is the monotonic time of the writing process when the write began."""

    path: str
    size_bytes: int
    rows: int
    stats: str
    written_s: float | None = field(default=None, repr=False, compare=False)


def repeated(value: object, kind: pa.DataType, rows: int) -> pa.Array:
    """Return an array that has one value in all rows. With many rows it is a dictionary array that holds the value
    once, as :func:`write_table` takes it."""
    scalar = pa.scalar(value, kind)
    if value is None or rows <= FEW_ROWS:
        return pa.repeat(scalar, rows)
    indices = pa.repeat(pa.scalar(0, pa.int32()), rows)
    return pa.DictionaryArray.from_arrays(indices, pa.array([value], kind), safe=False)


def column_stats(table: pa.Table, columns: Iterable[str]) -> str:
    """Return Delta's statistics of these columns (numbers, strings and times) as JSON."""
    low: dict[str, object] = {}
    high: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for name in columns:
        column = table[name]
        nulls[name] = column.null_count
        if column.null_count < table.num_rows:
            if pa.types.is_dictionary(column.type):  # one value in all rows
                column = column.chunk(0).dictionary
            bounds = pc.min_max(column).as_py()
            low[name], high[name] = (_bound(bounds[side], side) for side in ("min", "max"))
    return json.dumps({"numRecords": table.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls})


def _bound(value: object, side: str) -> object:
    """A bound as Delta writes it. Times get milliseconds: a maximum is rounded up, so that it stays one."""
    if not isinstance(value, datetime):
        return value
    utc = value.astimezone(timezone.utc)
    rest_us = utc.microsecond % 1000
    if side == "max" and rest_us:
        utc += timedelta(microseconds=1000 - rest_us)
    return utc.strftime("%Y-%m-%dT%H:%M:%S.") + f"{utc.microsecond // 1000:03d}Z"


def write_table(
    fs: pafs.FileSystem,
    folder: str,
    table: pa.Table,
    *,
    prefix: str,
    stats_columns: Sequence[str],
    footer_columns: Sequence[str] = (),
    plain_columns: Sequence[str] | None = None,
    constant_columns: Sequence[str] = (),
    row_group_rows: int | None = None,
    contents: str = "",
    compression: str = COMPRESSION,
    raw_columns: Sequence[str] = (),
    close_columns: Sequence[str] = (),
    page_bytes: int = PAGE_BYTES,
) -> DataFile:
    """Write one Parquet file under a new name and return what a commit needs to add it. ``contents`` says which rows
    the file has, for its seal.

    =====================  =============================================================================================
    ``stats_columns``      have statistics in the Delta log and in the file's footer
    ``footer_columns``     have statistics only in the footer; those in the Delta log take memory in every writer
    ``plain_columns``      have no dictionary, because their values hardly repeat; by default the first rows decide
    ``constant_columns``   have one value in all rows, best made by :func:`repeated`; it is hashed and compared once
    ``raw_columns``        are not compressed; with these, no column but maps may be nested
    ``close_columns``      are numbers and times whose neighbours are close; their differences are stored, uncompressed
    =====================  =============================================================================================

    A small table gets :data:`COMPRESSION_OF_SMALL` in place of zstd.
    """
    path = f"{prefix}-{uuid4().hex}.parquet"
    flat = [f.name for f in table.schema if not pa.types.is_nested(f.type)]
    has_few = table.num_rows <= FEW_ROWS
    if compression == COMPRESSION and table.nbytes <= SMALL_BYTES:
        compression = COMPRESSION_OF_SMALL
    if has_few:
        dictionary = []
    elif plain_columns is None:
        dictionary = [path for path, values in _leaves(table.slice(0, FEW_ROWS)) if _repeats(values)]
    else:
        dictionary = [c for c in flat if c not in plain_columns]
    close = () if has_few else close_columns
    statistics = [c for c in flat if c in stats_columns or c in footer_columns]
    encoded = table
    for name in () if has_few else constant_columns:
        column = table[name]
        if column.null_count == 0 and not pa.types.is_dictionary(column.type):
            index = table.schema.get_field_index(name)
            encoded = encoded.set_column(index, name, repeated(column[0].as_py(), column.type, table.num_rows))

    def write_to(sink: Any) -> int:
        with pq.ParquetWriter(
            sink,
            encoded.schema,
            use_dictionary=dictionary,
            write_statistics=statistics,
            compression=_codecs(encoded.schema, compression, (*raw_columns, *close)),
            column_encoding=dict.fromkeys(close, "DELTA_BINARY_PACKED") or None,
            data_page_size=page_bytes,
            write_page_checksum=True,
            store_schema=False,  # with the Arrow schema, readers would get dictionaries
        ) as writer:
            writer.write_table(encoded, row_group_size=row_group_rows or ROW_GROUP_ROWS)
            writer.add_key_value_metadata(seal(_schema_as_read(table.schema), path, contents))
        return int(sink.tell())

    with writing(folder), fs.open_output_stream(f"{folder}/{path}") as stream:
        reach("file begins", path=f"{folder}/{path}")
        size = write_to(stream)
    return DataFile(path, size, table.num_rows, column_stats(encoded, stats_columns))


def _schema_as_read(schema: pa.Schema) -> pa.Schema:
    """The schema that readers see: a dictionary's values in place of the dictionary."""
    return pa.schema([f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in schema])


def _leaves(rows: pa.Table) -> Iterator[tuple[str, pa.Array | pa.ChunkedArray]]:
    """Columns that may have a dictionary, by their path in Parquet: flat columns, and the keys and values of maps."""
    for field_ in rows.schema:
        column = rows[field_.name]
        if pa.types.is_map(field_.type):
            entries = column.combine_chunks()
            first, stop = entries.offsets[0].as_py(), entries.offsets[-1].as_py()
            for part, values in (("key", entries.keys), ("value", entries.items)):
                yield f"{field_.name}.{MAP_ENTRY}.{part}", values[first:stop]
        elif not pa.types.is_nested(field_.type):
            yield field_.name, column


def _repeats(values: pa.Array | pa.ChunkedArray) -> bool:
    """Whether a dictionary pays off for values like these. A useless one costs space, and time of Spark's readers."""
    return 2 * len(pc.unique(values)) <= len(values)


def _codecs(schema: pa.Schema, codec: str, raw_columns: Sequence[str]) -> str | dict[str, str]:
    """The codec of each column, by Parquet's column names: a map has two."""
    if not raw_columns:
        return codec
    columns: list[str] = []
    for field_ in schema:
        is_map = pa.types.is_map(field_.type)
        columns += [f"{field_.name}.{MAP_ENTRY}.{part}" for part in ("key", "value")] if is_map else [field_.name]
    return {name: codec for name in columns if name not in raw_columns}
