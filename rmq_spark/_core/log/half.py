"""The schema of half messages, and the half files that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark._core.log.half_header import HEADER_COLUMNS
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.data_file import DataFile, write_table
from rmq_spark._core.storage.seal import rows_of_half_file
from rmq_spark._core.storage.table import BOUNDS
from rmq_spark._core.vocabulary.immutable import immutable
from rmq_spark._core.vocabulary.message import PROPERTIES, TIMESTAMP

if TYPE_CHECKING:
    from rmq_spark._core.log.half_writer import HalfWriter

HALF_SCHEMA = pa.schema(
    [
        ("half_id", pa.string()),
        ("app_id", pa.string()),
        ("batch_id", pa.int64()),
        ("query_id", pa.string()),
        ("input_hash", pa.string()),
        ("fence_id", pa.string()),
        ("transaction_per", pa.string()),
        ("producer_group", pa.string()),
        ("file_no", pa.int64()),
        ("row_no", pa.int64()),
        ("transaction_key", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("sharding_key", pa.string()),
        ("properties", PROPERTIES),
        ("body", pa.binary()),
        ("born_timestamp", TIMESTAMP),
        ("store_timestamp", TIMESTAMP),
        ("deliver_at", TIMESTAMP),
    ]
)
FOOTER_COLUMNS = ("app_id", "batch_id", "file_no", "row_no", "topic", "queue_id")
PLAIN_COLUMNS = ("row_no", "keys", "transaction_key", "sharding_key", "body", "born_timestamp")
CLOSE_COLUMNS = ("row_no", "born_timestamp")

COMPRESSION = "lz4"
"""Half files stay for minutes, and only rmq_spark and Spark read them: lz4 costs less processor time than zstd. (Trino
cannot read lz4; the table ``messages`` is for every engine.)"""
PAGE_BYTES = 131_072
"""Small pages stay in the processor's cache during the writing."""
SAVED_MIN = 0.2
"""Bodies are compressed when a sample shrinks by at least this share. Bodies that are compressed or random already
would cost processor time for nothing."""
SAMPLES = 3
SAMPLE_ROWS = 64
SAMPLE_BYTES = 1024
"""A sample is the beginnings of the bodies of some rows."""


@immutable
class Segment:
    """A run of rows of one queue within a half file (``first`` and ``last`` row_no, both included)."""

    topic: str
    queue_id: int
    first: int
    last: int


@immutable
class HalfFile:
    """A staged file: written by an executor, not yet in the log."""

    data: DataFile
    file_no: int
    segments: tuple[Segment, ...]
    staged_at: float
    half_id: str
    delayed: bool = False
    """True when some messages are due later."""

    @property
    def rows(self) -> int:
        """Number of rows of this half batch. A shared file has rows of other half batches, too."""
        return sum(segment.last - segment.first + 1 for segment in self.segments)


@immutable
class HalfRows:
    """The checked and ordered messages of a future half file: the rows of ``source`` from row ``at`` on. The source may
    have rows of other half batches, too, since small half batches may share a file."""

    writer: HalfWriter
    source: pa.Table
    file_no: int
    segments: tuple[Segment, ...]
    staged_at: float
    delayed: bool
    at: int = 0

    @property
    def half_id(self) -> str:
        return self.writer.header.half_id

    @property
    def count(self) -> int:
        return self.segments[-1].last + 1

    @property
    def table(self) -> pa.Table:
        return self.source.slice(self.at, self.count)

    def in_file(self, data: DataFile) -> HalfFile:
        """The half file, once the rows are written to ``data``."""
        return HalfFile(data, self.file_no, self.segments, self.staged_at, self.half_id, self.delayed)

    def write(self, fs: pafs.FileSystem, folder: str) -> HalfFile:
        table = self.table
        one_topic = len({segment.topic for segment in self.segments}) == 1
        data = (self.writer.write_file or write_table)(
            fs,
            folder,
            table,
            prefix="half",
            stats_columns=tuple(BOUNDS["half"]),
            footer_columns=FOOTER_COLUMNS,
            plain_columns=PLAIN_COLUMNS,
            constant_columns=[*HEADER_COLUMNS, "topic"] if one_topic else HEADER_COLUMNS,
            contents=rows_of_half_file(self.half_id, self.file_no),
            compression=COMPRESSION,
            raw_columns=() if _is_worth_compressing(table["body"]) else ("body",),
            close_columns=CLOSE_COLUMNS,
            page_bytes=PAGE_BYTES,
        )
        reach("half file written", path=f"{folder}/{data.path}", size_bytes=data.size_bytes)
        return self.in_file(data)


def together(several: Sequence[HalfRows]) -> pa.Table:
    """The rows of several half files, one after the other; not copied if they already lie so in one table."""
    source, first = several[0].source, several[0].at
    end = first
    for rows in several:
        if rows.source is not source or rows.at != end:
            return pa.concat_tables([part.table for part in several]).combine_chunks()
        end += rows.count
    return source.slice(first, end - first)


def _is_worth_compressing(body: pa.ChunkedArray) -> bool:
    rows = len(body)
    if rows <= SAMPLES * SAMPLE_ROWS:
        return True  # too few to cost time
    slices = [body.slice(rows * i // SAMPLES, SAMPLE_ROWS) for i in range(SAMPLES)]
    sample = b"".join(text for piece in slices for text in pc.binary_slice(piece, 0, SAMPLE_BYTES).to_pylist())
    return len(pa.compress(sample, COMPRESSION, asbytes=True)) <= (1 - SAVED_MIN) * len(sample)
