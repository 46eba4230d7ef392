"""Turns what ``op`` placed into files of the table ``messages``: what one step of a drain writes.

::

    op rows ─▶ ranges, by half file ─▶ each half file read once ─▶ messages by topic ─▶ files by queue and offset
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.message_range import PlacedRange, placed_range
from rmq_spark._core.messages.message_reader import STORED_COLUMNS, Piece, by_file, made_of, pieces_of, row_range_of
from rmq_spark._core.messages.messages_table import MESSAGES_SCHEMA
from rmq_spark._core.runtime.pools import submitted

if TYPE_CHECKING:
    from rmq_spark._core.storage.data_file import DataFile
    from rmq_spark._core.storage.row_range import RowRange
    from rmq_spark._core.storage.table import Table

MESSAGES_FILE_BYTES_MAX = 96 * 1024 * 1024
"""Collected messages of this size in memory are written as a file, which is a fraction of this size."""
ROWS_AT_ONCE = 10_000
"""Op rows that are made into ranges together, as Python objects."""
RUNS_AT_ONCE = 100_000
"""The most runs of rows that these op rows name; a single op row may name more."""
READS_AT_ONCE = 16
"""Small half files that are read from an object store at the same time. Each read takes a few round trips."""
SMALL_FILE_BYTES = 256 * 1024

Read = Callable[["RowRange", Sequence[str]], Iterator[tuple[int, pa.Table]]]
"""Reads rows of a half file, as ``row_range.read_range`` does."""


def placed_ranges(rows: pa.Table) -> Iterator[PlacedRange]:
    """The ranges that op rows place, in the order of ``op``, but with all ranges of a half file together, so that the
    file is read once. (A half batch that was decided bit by bit is read once for each decision.) CorruptLogError: a row
    names a file outside the log."""
    rows = rows.combine_chunks()
    firsts = rows.group_by("path", use_threads=False).aggregate([("version", "min")])
    file_at = firsts["version_min"].take(pc.index_in(rows["path"], value_set=firsts["path"].combine_chunks()))
    first_row = pc.struct_field(pc.list_element(rows["ranges"], 0), "first")
    order = ("file_at", "path", "half_id", "file_no", "version", "first_row")
    keys = pa.table([file_at, *(rows[name] for name in order[1:-1]), first_row], names=list(order))
    indices = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in order])
    ends = list(accumulate(pc.list_value_length(rows["ranges"]).take(indices).to_pylist()))
    first = runs_before = 0
    while first < len(ends):
        last = bisect_right(ends, runs_before + RUNS_AT_ONCE, first, min(first + ROWS_AT_ONCE, len(ends)))
        last = max(first + 1, last)
        for row in rows.take(indices.slice(first, last - first)).to_pylist():
            yield placed_range(row)
        first, runs_before = last, ends[last - 1]


def message_files(
    ranges: Iterable[PlacedRange],
    read: Read,
    table: Table,
    sizes: Mapping[str, int] | None = None,
) -> Iterator[DataFile]:
    """Write the messages of some ranges as files of the table ``messages``, each of one topic. A commit must add them.
    The ranges of a half file follow each other. ``sizes`` (bytes of half files) are given where each read takes long:
    small half files are then read at the same time."""
    collected: dict[str, _Collected] = {}
    for messages in made_of(_pieces(ranges, read, sizes or {}), MESSAGES_SCHEMA.names):
        for topic, rows in _by_topic(messages):
            collected.setdefault(topic, _Collected()).add(rows)
        if sum(c.size for c in collected.values()) >= MESSAGES_FILE_BYTES_MAX:
            largest = max(collected.values(), key=lambda c: c.size)
            yield table.write(largest.take())
    for rest in collected.values():
        if rest.tables:
            yield table.write(rest.take())


# ---------------------------------------------------------------- reading
def _pieces(ranges: Iterable[PlacedRange], read: Read, sizes: Mapping[str, int]) -> Iterator[Piece[PlacedRange]]:
    if not sizes:
        for file_ranges in by_file(ranges):
            yield from pieces_of(file_ranges, read(row_range_of(file_ranges), STORED_COLUMNS))
        return
    reads: deque[tuple[list[PlacedRange], Future[list[tuple[int, pa.Table]]] | None]] = deque()

    def first() -> Iterator[Piece[PlacedRange]]:
        file_ranges, future = reads.popleft()
        tables = read(row_range_of(file_ranges), STORED_COLUMNS) if future is None else future.result()
        return pieces_of(file_ranges, tables)

    with ThreadPoolExecutor(READS_AT_ONCE, "txmq-read") as pool:
        for file_ranges in by_file(ranges):
            is_small = sizes.get(file_ranges[0].rows.path, SMALL_FILE_BYTES) < SMALL_FILE_BYTES
            reads.append(
                (file_ranges, submitted(pool, _read_whole, read, row_range_of(file_ranges)) if is_small else None)
            )
            if len(reads) == READS_AT_ONCE:
                yield from first()
        while reads:
            yield from first()


def _read_whole(read: Read, row_range: RowRange) -> list[tuple[int, pa.Table]]:
    return list(read(row_range, STORED_COLUMNS))


# ---------------------------------------------------------------- collecting
@dataclass
class _Collected:
    """Messages of one topic that are not in a file yet."""

    tables: list[pa.Table] = field(default_factory=list)
    size: int = 0

    def add(self, messages: pa.Table) -> None:
        self.tables.append(_owned(messages))
        self.size += messages.nbytes

    def take(self) -> pa.Table:
        """Return all of them by queue and offset, and start again with none."""
        tables = sorted(self.tables, key=lambda rows: (rows["queue_id"][0].as_py(), rows["queue_offset"][0].as_py()))
        self.tables, self.size = [], 0
        messages = pa.concat_tables(tables)
        return messages if _is_in_order(messages) else messages.sort_by([(n, "ascending") for n in ORDER])


ORDER = ("queue_id", "queue_offset")


def _owned(messages: pa.Table) -> pa.Table:
    """A copy of the messages: a small slice would keep all that was read with it in memory."""
    if 2 * messages.nbytes >= messages.get_total_buffer_size():
        return messages
    return pa.concat_tables([messages, messages.slice(0, 0)]).combine_chunks()


def _by_topic(messages: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    topics = pc.unique(messages["topic"]).to_pylist()
    for topic in topics:
        yield topic, messages if len(topics) == 1 else messages.filter(pc.equal(messages["topic"], topic))


def _is_in_order(messages: pa.Table) -> bool:
    queue_id, offset = (messages[name].combine_chunks() for name in ORDER)
    same = pc.equal(queue_id[1:], queue_id[:-1])
    rises = pc.if_else(same, pc.greater(offset[1:], offset[:-1]), pc.greater(queue_id[1:], queue_id[:-1]))
    return pc.all(rises).as_py() is not False
