"""Turns half rows into messages: what a reader makes of placed ranges.

Executors run it too (:func:`messages_of`), with nothing but pyarrow and this package's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.damage import retry_on_newest_state
from rmq_spark._core.log.message_range import MessageRange, PlacedRange, out_of_range
from rmq_spark._core.messages.messages_table import MESSAGES_SCHEMA, SOURCE_SCHEMA
from rmq_spark._core.messages.placements import Placements
from rmq_spark._core.selector import SUB_ALL, parse_selector, parse_tags, tag_selector
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.row_range import MATCHES, RowRange
from rmq_spark._core.vocabulary.ids import batch_transaction_id
from rmq_spark._core.vocabulary.options import nearest, require_time, whole_number
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.rows import arange
from rmq_spark._core.vocabulary.verdicts import KEY, MESSAGE
from rmq_spark.errors import OffsetError, OffsetOutOfRangeError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

_Range = TypeVar("_Range", bound=MessageRange)

STORED_COLUMNS = (
    "tags",
    "keys",
    "sharding_key",
    "properties",
    "body",
    "born_timestamp",
    "store_timestamp",
    "transaction_key",
)
"""Columns that are read as ``half`` has them."""
SMALL_PIECE_ROWS = 1_000
"""Ranges with fewer rows are made into messages together, because each table costs time and memory of its own."""
TOGETHER_MAX = 1_000
"""The most ranges that are made into messages together."""


def by_file(ranges: Iterable[_Range]) -> Iterator[list[_Range]]:
    """Group ranges that follow each other in one file, so that a row group is read once for all its queues, and a file
    that half batches share once for all of them."""
    group: list[_Range] = []
    for placed in ranges:
        if group and not _in_same_file(group[-1].rows, placed.rows):
            yield group
            group = []
        group.append(placed)
    if group:
        yield group


def _in_same_file(last: RowRange, rows: RowRange) -> bool:
    if (last.table, last.path) != (rows.table, rows.path):
        return False
    return not last.is_same_half_file(rows) or last.ranges[-1][1] < rows.ranges[0][0]


def _cut(ranges: Sequence[_Range], position: int, table: pa.Table) -> Iterator[Piece[_Range]]:
    """Cut a table that starts ``position`` rows into these ranges into a piece for each range."""
    start = 0
    for placed in ranges:
        if start >= position + table.num_rows:
            return
        first, end = max(start, position), min(start + placed.count, position + table.num_rows)
        if first < end:
            yield placed, first - start, table.slice(first - position, end - first)
        start += placed.count


def row_range_of(together: Sequence[MessageRange]) -> RowRange:
    """The rows of ranges that follow each other in one file."""
    merged: list[RowRange] = []
    for placed in together:
        rows = placed.rows
        if merged and merged[-1].is_same_half_file(rows):
            merged[-1] = replace(merged[-1], ranges=merged[-1].ranges + rows.ranges)
        else:
            merged.append(rows)
    return replace(merged[0], more=tuple(merged[1:]))


def messages_of(
    together: Sequence[_Range], tables: Iterable[tuple[int, pa.Table]], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Messages of the source, from rows as ``read_range`` yields them for :func:`row_range_of`: those that match."""
    return made_of(pieces_of(together, tables), columns)


Piece = tuple[_Range, int, pa.Table]
"""A range, the number of its rows before these, and these rows."""


def pieces_of(together: Sequence[_Range], tables: Iterable[tuple[int, pa.Table]]) -> Iterator[Piece[_Range]]:
    """Cut rows, as ``read_range`` yields them for :func:`row_range_of`, to their ranges."""
    for position, table in tables:
        yield from _cut(together, position, table)


def made_of(pieces: Iterable[Piece[_Range]], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Messages from pieces, in their order: those that a filter keeps. Small pieces that follow each other, even of
    several files and queues, come in one table. The columns are those of the source, or of the table ``messages``."""
    waiting: list[Piece[PlacedRange]] = []

    def flush() -> Iterator[pa.Table]:
        if waiting:
            yield _filtered(*_make_messages(waiting, columns))
            waiting.clear()

    for placed, before, found in pieces:
        if not isinstance(placed, PlacedRange):  # a file of messages has them as they are
            yield from flush()
            yield _filtered(found.select(columns).cast(pa.schema([MESSAGES_SCHEMA.field(c) for c in columns])), found)
            continue
        is_small = found.num_rows < SMALL_PIECE_ROWS
        if not is_small or len(waiting) == TOGETHER_MAX or _transaction_per(waiting) != placed.transaction_per:
            yield from flush()
        waiting.append((placed, before, found))
        if not is_small:
            yield from flush()
    yield from flush()


def _transaction_per(waiting: Sequence[Piece[PlacedRange]]) -> str | None:
    return waiting[0][0].transaction_per if waiting else None


def _filtered(messages: pa.Table, rows: pa.Table) -> pa.Table:
    """The messages that a filter keeps. ``rows`` are the rows that they were made of."""
    if MATCHES in rows.column_names and not pc.all(rows[MATCHES]).as_py():
        return messages.filter(rows[MATCHES])
    return messages


def require_source_columns(columns: Sequence[str]) -> list[str]:
    """Return the columns when the source has them all; else raise OptionError, which names the nearest right one."""
    if isinstance(columns, (str, bytes)) or not isinstance(columns, Iterable):
        raise OptionError(f"columns={columns!r} is no list of names: columns of the source are expected")
    for name in columns:
        if name not in SOURCE_SCHEMA.names:
            raise OptionError(f"column {name!r} is not a column of the source ({nearest(name, SOURCE_SCHEMA.names)})")
    return list(columns)


def stored_columns(columns: Sequence[str], together: Sequence[MessageRange]) -> list[str]:
    """The columns of a file that must be read to make these columns of the source from the ranges in it."""
    by_key = [isinstance(placed, PlacedRange) and placed.transaction_per == KEY for placed in together]
    if not isinstance(together[0], PlacedRange):
        return list(columns)
    stored = [c for c in columns if c in STORED_COLUMNS]
    if "transaction_id" in columns and "transaction_key" not in stored and any(by_key):
        stored.append("transaction_key")
    return stored or ["row_no"]


def _make_messages(pieces: Sequence[Piece[PlacedRange]], columns: Sequence[str]) -> tuple[pa.Table, pa.Table]:
    """One table of messages from pieces that have one ``transaction_per``; and the rows that it was made of."""
    rows = _one_table([found for _, _, found in pieces])
    ranges = [placed for placed, _, _ in pieces]
    counts = [found.num_rows for _, _, found in pieces]
    runs = [run for placed, before, found in pieces for run in _runs(placed, before, found.num_rows)]
    arrays: dict[str, pa.Array | pa.ChunkedArray] = {}

    def addressed(heads: Iterable[str]) -> pa.Array:
        numbers = pc.cast(_sequences(runs), pa.string())
        return pc.binary_join_element_wise(_repeated(heads, counts, pa.string()), numbers, "")

    for name in columns:
        kind = MESSAGES_SCHEMA.field(name).type
        if name in STORED_COLUMNS:
            arrays[name] = rows[name]
        elif name == "queue_offset":
            arrays[name] = _sequences(
                [(p.queue_offset + before, n) for (p, before, _), n in zip(pieces, counts, strict=True)]
            )
        elif name == "row_no":
            arrays[name] = _sequences(runs)
        elif name in ("half_id", "file_no"):
            arrays[name] = _repeated((getattr(p.rows, name) for p in ranges), counts, kind)
        elif name == "msg_id":
            arrays[name] = addressed(f"{p.rows.half_id}:{p.rows.file_no}." for p in ranges)
        elif name != "transaction_id":
            arrays[name] = _repeated((getattr(p, name) for p in ranges), counts, kind)
        elif ranges[0].transaction_per == MESSAGE:
            arrays[name] = addressed(f"{p.rows.half_id}:{p.attempt}:{p.rows.file_no}." for p in ranges)
        else:
            ids = _repeated((batch_transaction_id(p.rows.half_id, p.attempt) for p in ranges), counts, kind)
            by_key = ranges[0].transaction_per == KEY
            arrays[name] = pc.binary_join_element_wise(ids, rows["transaction_key"], ":") if by_key else ids
    return pa.table(arrays, schema=pa.schema([MESSAGES_SCHEMA.field(c) for c in columns])), rows


def _one_table(tables: Sequence[pa.Table]) -> pa.Table:
    """Stored rows of several files. A column may have several types: another writer of messages may have made some
    files."""
    names = tables[0].column_names
    types = [MESSAGES_SCHEMA.field(n).type if n in STORED_COLUMNS else tables[0].schema.field(n).type for n in names]
    schema = pa.schema(list(zip(names, types, strict=True)))
    cast_tables = [p if p.schema.equals(schema) else p.cast(schema) for p in tables]
    return cast_tables[0] if len(cast_tables) == 1 else pa.concat_tables(cast_tables).combine_chunks()


def _repeated(values: Iterable[object], counts: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Each value, repeated as often as its count says."""
    items = list(values)
    if len(items) == 1:
        return pa.repeat(pa.scalar(items[0], kind), counts[0])
    ends = pa.array(accumulate(counts), pa.int32())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, pa.array(items, kind)))


def _sequences(runs: Sequence[tuple[int, int]]) -> pa.Array:
    """Consecutive numbers, run after run: from the first number of each run (first, length) on."""
    if len(runs) == 1:
        return arange(runs[0][1], runs[0][0])
    lengths = [length for _, length in runs]
    before = [first - end + length for (first, length), end in zip(runs, accumulate(lengths), strict=True)]
    return pc.add(_repeated(before, lengths, pa.int64()), arange(sum(lengths)))


def _runs(placed: PlacedRange, position: int, n: int) -> Iterator[tuple[int, int]]:
    """Runs (first, length) of the row numbers of ``n`` rows of a range, from a position in it on."""
    skip, left = position, n
    for first, last in placed.rows.ranges:
        length = last - first + 1
        take = min(left, length - skip)
        if take > 0:
            yield first + skip, take
            left -= take
        skip = max(0, skip - length)
        if not left:
            return


def read_ranges(
    ranges: Sequence[MessageRange],
    read: Callable[[RowRange, Sequence[str], Filter | None], Iterator[tuple[int, pa.Table]]],
    find_again: Callable[[MessageRange], list[MessageRange]],
    columns: Sequence[str],
    where: Filter | None = None,
) -> Iterator[pa.Table]:
    """Messages of some ranges, a row group and queue at a time, in the order of the ranges; with ``where`` only those
    that it keeps.

    ``read`` reads rows of a file of either table, as ``row_range.read_range`` does. ``find_again`` returns where
    messages lie now whose file is gone: they have been drained, or the drained file was merged. It raises
    FileNotFoundError when they are nowhere.
    """
    for file_ranges in by_file(ranges):
        rows_done = 0
        try:
            for position, table in read(row_range_of(file_ranges), stored_columns(columns, file_ranges), where):
                yield from messages_of(file_ranges, [(position, table)], columns)
                rows_done = position + table.num_rows
        except FileNotFoundError as lost:
            try:
                moved = [new_range for part in _ranges_after(file_ranges, rows_done) for new_range in find_again(part)]
            except FileNotFoundError:  # they are nowhere
                raise lost from None
            for part in by_file(moved):
                yield from messages_of(part, read(row_range_of(part), stored_columns(columns, part), where), columns)


def _ranges_after(ranges: Sequence[MessageRange], done: int) -> Iterator[MessageRange]:
    for placed in ranges:
        if done < placed.count:
            yield placed.cut(placed.queue_offset + done, placed.stop)
        done = max(0, done - placed.count)


def read_messages(
    engine: Engine,
    tails: Mapping[Queue, int],
    topic: str,
    queues: int,
    start: Mapping[int, int],
    limit: int | None,
    columns: Sequence[str] | None,
    tags: str | None = None,
    selector: str | None = None,
) -> pa.Table:
    """Committed messages of a topic in (queue, offset) order: the result of ``CommitLog.read``."""
    where = _filter_of(tags, selector, engine.runtime.time_ms())
    names = require_source_columns(SOURCE_SCHEMA.names if columns is None else columns)
    if not names:
        raise OptionError(
            "columns is empty: a table without columns does not tell how many messages there are. Name one"
        )
    for queue_id, offset in start.items():
        tail = tails.get((topic, queue_id), 0)
        if type(queue_id) is not int or not 0 <= queue_id < queues:
            kind = "" if type(queue_id) is int else f" ({type(queue_id).__name__}, and int is expected)"
            raise OffsetError(
                f"there is no queue {queue_id!r}{kind} to start from: topic {topic!r} has the queues 0 to {queues - 1}"
            )
        if type(offset) is not int or not 0 <= offset <= tail:
            raise OffsetError(f"there is no offset {offset!r} of queue {queue_id} to start from: 0 to {tail} are there")
    left = None if limit is None else whole_number(limit, "limit", 0)
    log_firsts = engine.firsts(refresh=False)
    firsts = {(topic, q): start.get(q, log_firsts.get((topic, q), 0)) for q in range(queues)}
    ends = {queue: tails.get(queue, 0) for queue in firsts}
    if left is not None and where is None:
        ends = _limited_ends(firsts, ends, left)
    ranges, missing = Placements(engine, topic.__eq__).between(firsts, ends)
    for queue, first, stop in missing:
        raise OffsetOutOfRangeError(out_of_range(*queue, first, stop, log_firsts))
    tables: list[pa.Table] = []
    for messages in read_ranges(ranges, engine.read_range, engine.find_again, names, where):
        if left == 0:
            break
        rows = messages.slice(0, left)
        tables.append(rows)
        left = None if left is None else left - rows.num_rows
    schema = pa.schema([SOURCE_SCHEMA.field(c) for c in names])
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _limited_ends(firsts: Mapping[Queue, int], ends: Mapping[Queue, int], limit: int) -> dict[Queue, int]:
    """By queue, the end of the first ``limit`` messages, when the lowest queues come first."""
    limited: dict[Queue, int] = {}
    for queue, first in firsts.items():
        limited[queue] = min(ends[queue], first + limit)
        limit -= limited[queue] - first
    return limited


def _filter_of(tags: str | None, selector: str | None, now_ms: int) -> Filter | None:
    """The filter that these expressions mean at a time; None keeps all. OptionError: both are given (in RocketMQ a
    subscription is of type TAG or SQL92), or one cannot be used."""
    if tags is not None and selector is not None:
        raise OptionError("tags and selector contradict each other: give one of them (a selector can say TAGS = 'a')")
    parsed = (
        parse_selector(selector)
        if selector is not None
        else tag_selector(parse_tags(SUB_ALL if tags is None else tags))
    )
    return None if parsed is None else parsed.at(now_ms)


@retry_on_newest_state
def read_topic(
    engine: Engine,
    topic: str,
    start: Mapping[int, int] | datetime | None = None,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
    tags: str | None = None,
    selector: str | None = None,
) -> pa.Table:
    """Committed messages of a topic. See :meth:`CommitLog.read`."""
    queues = engine.require_topic(topic)
    tails = engine.tails()  # of one version, whatever other threads of this process see meanwhile
    if isinstance(start, datetime):
        ends = {(topic, queue_id): tails.get((topic, queue_id), 0) for queue_id in range(queues)}
        starts = Placements(engine, topic.__eq__).starts_since(require_time(start, "start"), ends)
        offsets = {queue_id: offset for (_, queue_id), offset in starts.items()}
    elif start is None or isinstance(start, Mapping):
        offsets = dict(start or {})
    else:
        raise OptionError(
            f"{start!r} is no mapping and no datetime: the first offset of each queue is expected, as {{0: 23}}, or a "
            "time",
            argument="start",
        )
    return read_messages(engine, tails, topic, queues, offsets, limit, columns, tags, selector)
