"""Writes and reads the Parquet files of a commit log with pyarrow alone. This module runs on executors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.seal import reading, require_count, require_row_groups, require_seal, seal
from rmq_spark._core.storage.store_errors import writing
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark._core.vocabulary.rows import bytes_array
from rmq_spark.errors import CorruptLogError, OptionError, StrippedError

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

SHARED_ROWS_MAX = 20_000
"""In a file of at most this many rows, the rows of several half batches are found in one pass."""

PAYLOAD_COLUMNS = ("tags", "keys", "properties", "body", "born_timestamp")
"""Columns of ``half`` that are null in stripped rows: their messages were drained, and the file has to stay for others.
Every other row has a ``born_timestamp``."""
SLICES_MAX = 16
"""More runs of rows of a row group are copied, not sliced: a slice takes a few KB of memory, however short it is."""
THREADS_ROWS_MIN = 8_192
"""One thread decodes a row group with fewer rows: starting others takes longer."""

KEPT = "__kept"
"""Name of the column that marks the rows that a filter keeps."""

S3_DELAYED_OPEN = int(pa.__version__.split(".")[0]) >= 21
"""True when pyarrow can put a small file with one request. Before version 21 it took three, and a crash left parts
behind."""

S3_ENVIRONMENT = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_REGION", "AWS_DEFAULT_REGION",
                  "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_SKIP_SIGNATURE")  # fmt: skip
_RELATIVE_PATH = re.compile(r"(?!/)[A-Za-z0-9_=%.-]+(/[A-Za-z0-9_=%.-]+)*")


@dataclass(frozen=True)
class DataFile:
    """A Parquet file that a commit can add to a table.

    Attributes
    ----------
    path : str
        Relative to the table's folder.
    size_bytes, rows : int
    stats : str
        Delta's statistics, as JSON.
    written_s : float or None
        Monotonic time of the writing process when the write began.
    """

    path: str
    size_bytes: int
    rows: int
    stats: str
    written_s: float | None = field(default=None, repr=False, compare=False)


def require_path(path: object, table: str) -> str:
    """Return the path, after checking that it stays inside the table's folder.

    Raises
    ------
    CorruptLogError
        For an absolute path, a URI, or a path with ``..``. A log edited by hand must not make a reader read elsewhere.
    """
    if not isinstance(path, str) or _RELATIVE_PATH.fullmatch(path) is None or ".." in path.split("/"):
        raise CorruptLogError(
            f"table {table} names the file {path!r}, which is not inside the table: rmq_spark did not write the row"
        )
    return path


def filesystem(uri: str, storage_options: Mapping[str, str] | None = None) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a local folder or an object-store URI, and the path on it.

    Parameters
    ----------
    uri : str
        A local path, ``file://``, ``s3://bucket/prefix`` or another URI that pyarrow knows.
    storage_options : mapping, optional
        delta-rs's names (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ALLOW_HTTP``, …).
    """
    if uri.startswith(("s3://", "s3a://")):
        # delta-rs takes missing options from the environment; pyarrow alone would take only some of them.
        environment = {k.removeprefix("AWS_").lower(): v for k, v in os.environ.items() if k in S3_ENVIRONMENT}
        options = {**environment, **{k.lower().removeprefix("aws_"): v for k, v in (storage_options or {}).items()}}
        endpoint = options.get("endpoint_url") or options.get("endpoint")
        arguments: dict[str, str | bool | None] = {
            "access_key": options.get("access_key_id"),
            "secret_key": options.get("secret_access_key"),
            "session_token": options.get("session_token") or options.get("token"),
            "region": options.get("region") or options.get("default_region"),
            "force_virtual_addressing": options.get("virtual_hosted_style_request", "").lower() == "true",
            "anonymous": options.get("skip_signature", "").lower() == "true",
            "allow_delayed_open": S3_DELAYED_OPEN,
        }
        if endpoint:
            arguments["endpoint_override"] = endpoint.split("://")[-1]
            arguments["scheme"] = "http" if endpoint.startswith("http://") else "https"
        path = unquote(uri.split("://", 1)[1]).rstrip("/")  # as delta-rs reads it
        return pafs.S3FileSystem(**{k: v for k, v in arguments.items() if v}), path
    if "://" in uri and not uri.startswith("file://"):
        try:
            fs, path = pafs.FileSystem.from_uri(uri)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
            message = f"path {uri!r} is on a file system that pyarrow does not know: {problem}"
            raise OptionError(message) from cause_of(problem)
        return fs, path.rstrip("/")
    return pafs.LocalFileSystem(), uri.removeprefix("file://").rstrip("/") or "/"


def arange(rows: int, start: int = 0) -> pa.Array:
    """Return the int64 array of ``rows`` numbers from ``start`` on, made without a Python loop."""
    positions = pc.cast(pc.indices_nonzero(pa.repeat(pa.scalar(True), rows)), pa.int64())
    return pc.add(positions, start) if start else positions


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
    holds: str = "",
    compression: str = COMPRESSION,
    raw_columns: Sequence[str] = (),
    close_columns: Sequence[str] = (),
    page_bytes: int = PAGE_BYTES,
) -> DataFile:
    """Write one Parquet file under a new name and return what a commit needs to add it.

    Parameters
    ----------
    stats_columns : sequence of str
        Columns with statistics in the Delta log and in the file's footer.
    footer_columns : sequence of str
        Columns with statistics only in the footer. Statistics in the Delta log take memory in every writer.
    plain_columns : sequence of str, optional
        Columns without a dictionary, because their values hardly repeat. By default, the first rows decide.
    constant_columns : sequence of str
        Columns with one value in all rows, best made by :func:`repeated`. Their text is hashed and compared once, not
        for each row.
    row_group_rows : int, optional
        :data:`ROW_GROUP_ROWS` by default.
    holds : str
        Which rows the file holds, for its seal.
    compression : str
        A codec of Parquet, by pyarrow's name. A small table gets :data:`COMPRESSION_OF_SMALL` in place of zstd.
    raw_columns : sequence of str
        Columns that are not compressed. With these, no column but maps may be nested.
    close_columns : sequence of str
        Numbers and times without a dictionary whose neighbours are close. Their differences are stored, uncompressed.
    page_bytes : int
        Approximate size of a column's page.
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
            writer.add_key_value_metadata(seal(_schema_as_read(table.schema), path, holds))
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


def rows_of_half_file(half_id: str, file_no: int) -> str:
    """Return the text by which a seal names the rows of a half file."""
    return f"{half_id} {file_no}"


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

    Attributes
    ----------
    path : str
        The file, relative to the table. In ``half`` it is a hint: the file may have been stripped.
    half_id : str
        Empty for a file of ``messages``.
    file_no, file_rows : int
        The half file's number, and the number of rows that it was written with.
    ranges : tuple of (first, last)
        row_no of the wanted rows, ascending, both ends included; in ``messages`` their positions in the file.
    table : {"half", "messages"}
    more : tuple of RowRange
        Rows of other half batches in the same file, which follow these.
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
        """Whether both are rows of the same half file."""
        return (self.half_id, self.file_no) == (other.half_id, other.file_no)

    @property
    def each(self) -> tuple[RowRange, ...]:
        """The rows of each half batch, separately."""
        return (replace(self, more=()), *self.more) if self.more else (self,)


def read_range(
    fs: pafs.FileSystem, folder: str, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of a range in row_no order, one row group at a time; the rows of several half batches, which share
    a file, in one table.

    Parameters
    ----------
    where : Filter, optional
        Row groups in which it keeps no row are left out, and only the filter's columns of them are read. The others
        come with all their wanted rows and one more column, :data:`KEPT`.

    Yields
    ------
    (position, table)
        The number of rows of the range before the table, and the table with ``columns``.

    Raises
    ------
    LostFileError
        When the file is gone. It was stripped, and the caller has to look up where the rows are now.
    StrippedError
        When payload columns of stripped rows are wanted: their messages are in the table ``messages``.
    CorruptLogError
        When the file lacks some of the rows, or is damaged.
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
        yield 0, selected if where is None else selected.append_column(KEPT, where.keeps(table))


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
            slices = [(a - start, b - a + 1) for a, b in overlaps]
            part = _read_group(file, group_no, slices, columns, where)
            if part is not None:
                yield position, part
            position += sum(length for _, length in slices)
        start = end


def _read_group(
    file: pq.ParquetFile, group_no: int, slices: Sequence[tuple[int, int]], columns: Sequence[str], where: Filter | None
) -> pa.Table | None:
    """Return slices (first row, length) of a row group as one table; None when the filter keeps none of their rows."""

    rows = file.metadata.row_group(group_no).num_rows
    mask = _mask(rows, slices) if len(slices) > SLICES_MAX else None

    def read(names: Iterable[str]) -> pa.Table:
        group = file.read_row_group(group_no, columns=list(names), use_threads=rows > THREADS_ROWS_MIN)
        if mask is not None:
            return group.filter(mask)
        if len(slices) == 1:
            return group.slice(*slices[0])
        return pa.concat_tables([group.slice(first, length) for first, length in slices])

    if where is None:
        return read(columns)
    filter_rows = read(where.columns)
    kept = where.keeps(filter_rows)
    if pc.any(kept).as_py() is not True:
        return None
    unread = [c for c in columns if c not in where.columns]
    rest = read(unread) if unread else filter_rows
    values = [rest[c] if c in unread else filter_rows[c] for c in columns]
    return pa.table([*values, kept], names=[*columns, KEPT])


def _with_proof(columns: Sequence[str]) -> list[str]:
    """The columns, and beside payload columns ``born_timestamp``, which tells whether a row still has its payload."""
    proof = ["born_timestamp"] if set(columns).intersection(PAYLOAD_COLUMNS) else []
    return list(dict.fromkeys([*columns, *proof]))


def _mask(rows: int, slices: Sequence[tuple[int, int]]) -> pa.Array:
    """Return, for each of ``rows`` rows, whether it is in one of the slices (first row, length)."""
    bits = bytearray(rows)
    for first, length in slices:
        bits[first : first + length] = b"\x01" * length
    return pc.equal(bytes_array(bits), 1)


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


def _missing_rows_error(row_range: RowRange, found_rows: int) -> CorruptLogError:
    others = f" and of {len(row_range.more)} others" if row_range.more else ""
    return CorruptLogError(
        f"{row_range.path} holds {found_rows} of the {row_range.rows} rows asked for of file {row_range.file_no} of "
        f"half batch {row_range.half_id!r}{others}"
    )
