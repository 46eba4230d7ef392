"""Writes and reads the Parquet files of a commit log, with pyarrow alone. This module runs on executors."""

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
"""Rows of a Parquet row group. A reader reads at least one row group, however short its offset range is."""
PAGE_BYTES = 1_048_576
"""Of a column in a Parquet file, as pyarrow has it."""
FEW_ROWS = 2_000
"""A file of up to so many rows has no dictionaries: it is smaller, and faster to write and to read."""
MAP_ENTRY = "key_value"
"""Parquet's name of a pair in a map."""
COMPRESSION = "zstd"
"""On JSON bodies zstd takes half the space of snappy. It is written as fast, and read in two thirds of the time."""
COMPRESSION_OF_SMALL = "snappy"
SMALL_BYTES = 262_144
"""A table of up to so many bytes is not compressed by zstd: its start costs more, for each column, than it saves."""

SHARED_ROWS_MAX = 20_000
"""Of a file with no more rows than this, those of several half batches are found in one pass."""

PAYLOAD_COLUMNS = ("tags", "keys", "properties", "body", "born_timestamp")
"""Columns of ``half`` that are null in rows whose messages were drained, in a file that has to stay for others. Every
other row has a ``born_timestamp``."""
SLICES_MAX = 16
"""More runs of rows of a row group than this are copied: a slice takes a few KB of memory, however short it is."""
THREADS_ROWS_MIN = 8_192
"""Row groups with fewer rows are decoded by one thread: starting others takes longer."""

KEPT = "__kept"
"""Name of the column that says which rows a filter keeps."""

S3_DELAYED_OPEN = int(pa.__version__.split(".")[0]) >= 21
"""True when pyarrow can put a small file with one request. Before 21 it took three, and a crash left parts behind."""

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
        When the write began, by that process's monotonic clock.
    """

    path: str
    size_bytes: int
    rows: int
    stats: str
    written_s: float | None = field(default=None, repr=False, compare=False)


def require_path(path: object, table: str) -> str:
    """Return the path, and require that it stays inside the table's folder.

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
        # delta-rs takes options that are not given from the environment; pyarrow alone would take only some of them.
        known = {k.removeprefix("AWS_").lower(): v for k, v in os.environ.items() if k in S3_ENVIRONMENT}
        options = {**known, **{k.lower().removeprefix("aws_"): v for k, v in (storage_options or {}).items()}}
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
            said = f"path {uri!r} is on a file system that pyarrow does not know: {problem}"
            raise OptionError(said) from cause_of(problem)
        return fs, path.rstrip("/")
    return pafs.LocalFileSystem(), uri.removeprefix("file://").rstrip("/") or "/"


def arange(rows: int, start: int = 0) -> pa.Array:
    """Return the int64 array ``start, start + 1, …``, made without a Python loop."""
    positions = pc.cast(pc.indices_nonzero(pa.repeat(pa.scalar(True), rows)), pa.int64())
    return pc.add(positions, start) if start else positions


def repeated(value: object, kind: pa.DataType, rows: int) -> pa.Array:
    """Return an array with the same value in all rows: of many rows one whose dictionary has it once, as
    :func:`write_table` takes it."""
    scalar = pa.scalar(value, kind)
    if value is None or rows <= FEW_ROWS:
        return pa.repeat(scalar, rows)
    numbers = pa.repeat(pa.scalar(0, pa.int32()), rows)
    return pa.DictionaryArray.from_arrays(numbers, pa.array([value], kind), safe=False)


def column_stats(table: pa.Table, columns: Iterable[str]) -> str:
    """Return Delta's statistics of these columns (numbers, strings and times) as JSON."""
    low: dict[str, object] = {}
    high: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for name in columns:
        column = table[name]
        nulls[name] = column.null_count
        if column.null_count < table.num_rows:
            if pa.types.is_dictionary(column.type):  # the same value in all rows
                column = column.chunk(0).dictionary
            bounds = pc.min_max(column).as_py()
            low[name], high[name] = (_bound(bounds[side], side) for side in ("min", "max"))
    return json.dumps({"numRecords": table.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls})


def _bound(value: object, side: str) -> object:
    """A bound as Delta has it. Times have milliseconds there: a greatest value is rounded up, so that it stays one."""
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
        Columns with statistics in the footer alone. Statistics in the Delta log take memory in every writer.
    plain_columns : sequence of str, optional
        Columns whose values hardly repeat. They get no dictionary. The first rows tell them when not given.
    constant_columns : sequence of str
        Columns with the same value in all rows, best as :func:`repeated` makes them. Their text is hashed and compared
        once, not for each row.
    row_group_rows : int, optional
        :data:`ROW_GROUP_ROWS` when not given.
    holds : str
        Which rows the file holds, for its seal.
    compression : str
        A codec of Parquet, as pyarrow names it. A small table has :data:`COMPRESSION_OF_SMALL` in place of zstd.
    raw_columns : sequence of str
        Columns that are not compressed. With these, no column but maps may be nested.
    close_columns : sequence of str
        Numbers and times without a dictionary whose neighbours are close. Their differences are stored, uncompressed.
    page_bytes : int
        About so many bytes of a column share a page.
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
            at = table.schema.get_field_index(name)
            encoded = encoded.set_column(at, name, repeated(column[0].as_py(), column.type, table.num_rows))

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
            writer.add_key_value_metadata(seal(_as_read(table.schema), path, holds))
        return int(sink.tell())

    with writing(folder), fs.open_output_stream(f"{folder}/{path}") as stream:
        reach("file begins", path=f"{folder}/{path}")
        size = write_to(stream)
    return DataFile(path, size, table.num_rows, column_stats(encoded, stats_columns))


def _as_read(schema: pa.Schema) -> pa.Schema:
    """The schema that readers see: text where the writer has a dictionary."""
    return pa.schema([f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in schema])


def _leaves(rows: pa.Table) -> Iterator[tuple[str, pa.Array | pa.ChunkedArray]]:
    """Columns that may have a dictionary, by their path in Parquet: flat ones, and both of a map."""
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
    """Whether a dictionary of values like these is of use. One that is not costs a reader in Spark a fifth of its time,
    and a tenth of the space."""
    return 2 * len(pc.unique(values)) <= len(values)


def _codecs(schema: pa.Schema, codec: str, raw_columns: Sequence[str]) -> str | dict[str, str]:
    """The codec of each column, as pyarrow wants it: of a map, Parquet has two."""
    if not raw_columns:
        return codec
    columns: list[str] = []
    for field_ in schema:
        is_map = pa.types.is_map(field_.type)
        columns += [f"{field_.name}.{MAP_ENTRY}.{part}" for part in ("key", "value")] if is_map else [field_.name]
    return {name: codec for name in columns if name not in raw_columns}


def rows_of_half_file(half_id: str, file_no: int) -> str:
    """Return what the seal of a half file says of its rows."""
    return f"{half_id} {file_no}"


def _is_as_written(file: pq.ParquetFile, wanted: RowRange, columns: Sequence[str]) -> bool:
    """Return True when row ``i`` of the file is row_no ``i`` of the half file, by the file's seal and row count.

    Statistics in the footer would prove it too, but pyarrow ends the process when it reads those of a damaged file.
    """
    holds = require_seal(file.schema_arrow, wanted.path, "half", columns)
    return holds == rows_of_half_file(wanted.half_id, wanted.file_no) and file.metadata.num_rows == wanted.file_rows


@dataclass(frozen=True)
class RowRange:
    """Rows of one file that a reader wants: everything that an executor needs to know of them.

    Attributes
    ----------
    path : str
        Where the rows lie, relative to the table. In ``half`` it is a hint: the file may have been stripped.
    half_id : str
        Empty for a file of ``messages``.
    file_no, file_rows : int
        The half file's number, and how many rows it was written with.
    ranges : tuple of (first, last)
        row_no of the wanted rows, ascending, both ends included; in ``messages`` their numbers in the file.
    table : {"half", "messages"}
    more : tuple of RowRange
        Rows of other half batches that follow, in a file that they share.
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
        return sum(last - first + 1 for first, last in self.ranges) + sum(other.rows for other in self.more)

    def is_same_half_file(self, other: RowRange) -> bool:
        """Whether the rows of both have one half batch and number of a file."""
        return (self.half_id, self.file_no) == (other.half_id, other.file_no)

    @property
    def each(self) -> tuple[RowRange, ...]:
        """The rows of each half batch for themselves."""
        return (replace(self, more=()), *self.more) if self.more else (self,)


def read_range(
    fs: pafs.FileSystem, folder: str, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of a range in row_no order, one row group at a time; of a file that half batches share,
    all rows in one table.

    Parameters
    ----------
    where : Filter, optional
        Row groups in which it keeps no row are left out, and only the filter's columns of them are read. The others
        come with all their wanted rows and one more column, :data:`KEPT`.

    Yields
    ------
    (position, table)
        How many rows of the range come before the table, and the table with ``columns``.

    Raises
    ------
    LostFileError
        When the file is gone. It was stripped, and the caller has to look where the rows are now.
    StrippedError
        When columns are wanted of which rows have been stripped: their messages are in the table ``messages``.
    CorruptLogError
        When the file does not hold all of the rows, or is damaged.
    """
    path = require_path(wanted.path, wanted.table)
    looked_at = [] if where is None else where.columns
    reach("files read", table=wanted.table, paths=[path])
    with reading(path, wanted.table), fs.open_input_file(f"{folder}/{path}") as source:
        file = pq.ParquetFile(source, page_checksum_verification=True)
        require_row_groups(file.metadata, path, wanted.table)
        if wanted.table != "half":  # its rows are named by their place in this very file
            require_seal(file.schema_arrow, path, wanted.table, [*columns, *looked_at])
            require_count(file.metadata.num_rows, wanted.file_rows, path, wanted.table)
            yield from _read_by_position(file, wanted, columns, where)
            return
        if not wanted.more and _is_as_written(file, wanted, [*columns, *looked_at]):
            yield from _read_by_position(file, wanted, columns, where)
            return
        table = _read_by_address(file, wanted, _with_proof([*columns, *looked_at]))
        if "born_timestamp" in table.column_names and table["born_timestamp"].null_count:
            raise StrippedError(
                f"file {path} of table half has no payload any more of rows of half batch {wanted.half_id!r}: their "
                "messages are in the table messages"
            )
        found = table.select(list(columns))
        yield 0, found if where is None else found.append_column(KEPT, where.keeps(table))


def _read_by_position(
    file: pq.ParquetFile, wanted: RowRange, columns: Sequence[str], where: Filter | None
) -> Iterator[tuple[int, pa.Table]]:
    if wanted.ranges[-1][1] >= wanted.file_rows or wanted.ranges[0][0] < 0:
        raise CorruptLogError(
            f"rows {wanted.ranges[0][0]}–{wanted.ranges[-1][1]} of {wanted.path} in table {wanted.table} are asked "
            f"for, which has {wanted.file_rows} rows"
        )
    position = 0
    start = 0
    for g in range(file.metadata.num_row_groups):
        end = start + file.metadata.row_group(g).num_rows
        inside = [(max(a, start), min(b, end - 1)) for a, b in wanted.ranges if a < end and b >= start]
        if inside:
            slices = [(a - start, b - a + 1) for a, b in inside]
            part = _read_group(file, g, slices, columns, where)
            if part is not None:
                yield position, part
            position += sum(length for _, length in slices)
        start = end


def _read_group(
    file: pq.ParquetFile, g: int, slices: Sequence[tuple[int, int]], columns: Sequence[str], where: Filter | None
) -> pa.Table | None:
    """Return slices (first row, length) of a row group as one table; None when the filter keeps none of their rows."""

    rows = file.metadata.row_group(g).num_rows
    mask = _mask(rows, slices) if len(slices) > SLICES_MAX else None

    def read(names: Iterable[str]) -> pa.Table:
        group = file.read_row_group(g, columns=list(names), use_threads=rows > THREADS_ROWS_MIN)
        if mask is not None:
            return group.filter(mask)
        if len(slices) == 1:
            return group.slice(*slices[0])
        return pa.concat_tables([group.slice(first, length) for first, length in slices])

    if where is None:
        return read(columns)
    looked_at = read(where.columns)
    kept = where.keeps(looked_at)
    if pc.any(kept).as_py() is not True:
        return None
    others = [c for c in columns if c not in where.columns]
    rest = read(others) if others else looked_at
    every = [rest[c] if c in others else looked_at[c] for c in columns]
    return pa.table([*every, kept], names=[*columns, KEPT])


def _with_proof(columns: Sequence[str]) -> list[str]:
    """The columns, and with those of a payload the one that tells whether it is there."""
    proof = ["born_timestamp"] if set(columns).intersection(PAYLOAD_COLUMNS) else []
    return list(dict.fromkeys([*columns, *proof]))


def _mask(rows: int, slices: Sequence[tuple[int, int]]) -> pa.Array:
    """Return which of so many rows are in one of the slices (first row, length)."""
    wanted = bytearray(rows)
    for first, length in slices:
        wanted[first : first + length] = b"\x01" * length
    return pc.equal(bytes_array(wanted), 1)


def _read_by_address(file: pq.ParquetFile, wanted: RowRange, columns: Sequence[str]) -> pa.Table:
    address = ["half_id", "file_no", "row_no"]
    table = file.read(columns=list(dict.fromkeys([*columns, *address])))
    if wanted.more and table.num_rows <= SHARED_ROWS_MAX:
        lies = {at: i for i, at in enumerate(zip(*(table[name].to_pylist() for name in address), strict=True))}
        asked = [(w.half_id, w.file_no, row) for w in wanted.each for a, b in w.ranges for row in range(a, b + 1)]
        found = [lies[at] for at in asked if at in lies]
        if len(found) == len(asked) and len(lies) == table.num_rows:
            return table.select(list(columns)).take(pa.array(found, pa.int64()))
    return pa.concat_tables([_of_half_file(table, one).select(list(columns)) for one in wanted.each])


def _of_half_file(table: pa.Table, wanted: RowRange) -> pa.Table:
    """The wanted rows of one half file, in row_no order."""
    mine = pc.and_(pc.equal(table["half_id"], wanted.half_id), pc.equal(table["file_no"], wanted.file_no))
    table = table.filter(mine).sort_by("row_no")
    # As long as the rows that are there: a range that claims too many rows takes no memory.
    asked = bytearray((pc.max(table["row_no"]).as_py() or 0) + 1)
    for first, last in wanted.ranges:
        end = min(last + 1, len(asked))
        asked[first:end] = b"\x01" * (end - first)
    table = table.filter(pc.equal(bytes_array(asked).take(table["row_no"]), 1))
    if table.num_rows != wanted.rows:
        raise _lacks_rows(wanted, table.num_rows)
    return table


def _lacks_rows(wanted: RowRange, found: int) -> CorruptLogError:
    others = f" and of {len(wanted.more)} others" if wanted.more else ""
    return CorruptLogError(
        f"{wanted.path} holds {found} of the {wanted.rows} rows asked for of file {wanted.file_no} of half batch "
        f"{wanted.half_id!r}{others}"
    )
