"""From half rows to messages: what a reader makes of placed ranges.

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

from rmq_spark._core.log.damage import looks_again
from rmq_spark._core.log.placements import MessageRange, PlacedRange, Placements, out_of_range
from rmq_spark._core.messages.table import MESSAGES_SCHEMA, SOURCE_SCHEMA
from rmq_spark._core.selector import SUB_ALL, parse_selector, parse_tags, tag_selector
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.files import KEPT, RowRange, arange
from rmq_spark._core.vocabulary.ids import batch_transaction_id
from rmq_spark._core.vocabulary.options import nearest, require_time, whole_number
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
FEW_ROWS = 1_000
"""Ranges with fewer rows than this are made into messages together: each table of its own costs half a millisecond, and
20 KB however little is in it."""
TOGETHER_MAX = 1_000
"""So many of them together."""


def by_file(ranges: Iterable[_Range]) -> Iterator[list[_Range]]:
    """Ranges that follow each other in one file, so that a row group is read once for all its queues, and a file that
    half batches share once for all of them."""
    together: list[_Range] = []
    for placed in ranges:
        if together and not _in_same_file(together[-1].rows, placed.rows):
            yield together
            together = []
        together.append(placed)
    if together:
        yield together


def _in_same_file(last: RowRange, rows: RowRange) -> bool:
    if (last.table, last.path) != (rows.table, rows.path):
        return False
    return not last.is_same_half_file(rows) or last.ranges[-1][1] < rows.ranges[0][0]


def _cut(together: Sequence[_Range], position: int, table: pa.Table) -> Iterator[Piece[_Range]]:
    """A table that starts ``position`` rows into these ranges, cut to them."""
    start = 0
    for placed in together:
        if start >= position + table.num_rows:
            return
        first, end = max(start, position), min(start + placed.count, position + table.num_rows)
        if first < end:
            yield placed, first - start, table.slice(first - position, end - first)
        start += placed.count


def rows_of(together: Sequence[MessageRange]) -> RowRange:
    """The rows of ranges that follow each other in one file."""
    found: list[RowRange] = []
    for placed in together:
        rows = placed.rows
        if found and found[-1].is_same_half_file(rows):
            found[-1] = replace(found[-1], ranges=found[-1].ranges + rows.ranges)
        else:
            found.append(rows)
    return replace(found[0], more=tuple(found[1:]))


def messages_of(
    together: Sequence[_Range], tables: Iterable[tuple[int, pa.Table]], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Rows of :func:`rows_of`, as ``read_range`` yields them, as messages of the source: those that a filter keeps."""
    return made_of(pieces_of(together, tables), columns)


Piece = tuple[_Range, int, pa.Table]
"""A range, how many rows of it come before, and rows of it."""


def pieces_of(together: Sequence[_Range], tables: Iterable[tuple[int, pa.Table]]) -> Iterator[Piece[_Range]]:
    """Rows of :func:`rows_of`, as ``read_range`` yields them, cut to their ranges."""
    for position, table in tables:
        yield from _cut(together, position, table)


def made_of(pieces: Iterable[Piece[_Range]], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Pieces as messages of the source, in their order: those that a filter keeps. Small ones that follow each other,
    also of several files and queues, come in one table.

    Parameters
    ----------
    pieces : iterable of Piece
    columns : sequence of str
        Of the source, or of the table ``messages``.
    """
    waiting: list[Piece[PlacedRange]] = []

    def together() -> Iterator[pa.Table]:
        if waiting:
            yield _kept(*_made(waiting, columns))
            waiting.clear()

    for placed, at, part in pieces:
        if not isinstance(placed, PlacedRange):  # a file of messages has them as they are
            yield from together()
            yield _kept(part.select(columns).cast(pa.schema([MESSAGES_SCHEMA.field(c) for c in columns])), part)
            continue
        small = part.num_rows < FEW_ROWS
        if not small or len(waiting) == TOGETHER_MAX or _per(waiting) != placed.transaction_per:
            yield from together()
        waiting.append((placed, at, part))
        if not small:
            yield from together()
    yield from together()


def _per(waiting: Sequence[Piece[PlacedRange]]) -> str | None:
    return waiting[0][0].transaction_per if waiting else None


def _kept(messages: pa.Table, rows: pa.Table) -> pa.Table:
    """The messages that a filter keeps of the rows that they were made of."""
    if KEPT in rows.column_names and not pc.all(rows[KEPT]).as_py():
        return messages.filter(rows[KEPT])
    return messages


def require_source_columns(columns: Sequence[str]) -> list[str]:
    """The columns themselves when the source has them all; OptionError names the nearest right one."""
    if isinstance(columns, (str, bytes)) or not isinstance(columns, Iterable):
        raise OptionError(f"columns={columns!r} is no list of names: columns of the source are expected")
    for name in columns:
        if name not in SOURCE_SCHEMA.names:
            raise OptionError(f"column {name!r} is not a column of the source ({nearest(name, SOURCE_SCHEMA.names)})")
    return list(columns)


def stored_columns(columns: Sequence[str], together: Sequence[MessageRange]) -> list[str]:
    """The columns of a file that must be read to make these columns of the source, of ranges that lie in it."""
    by_key = [isinstance(placed, PlacedRange) and placed.transaction_per == KEY for placed in together]
    if not isinstance(together[0], PlacedRange):
        return list(columns)
    stored = [c for c in columns if c in STORED_COLUMNS]
    if "transaction_id" in columns and "transaction_key" not in stored and any(by_key):
        stored.append("transaction_key")
    return stored or ["row_no"]


def _made(pieces: Sequence[Piece[PlacedRange]], columns: Sequence[str]) -> tuple[pa.Table, pa.Table]:
    """Pieces that have one ``transaction_per``, as one table of messages; and the rows that it was made of."""
    rows = _one_table([part for _, _, part in pieces])
    ranges = [placed for placed, _, _ in pieces]
    counts = [part.num_rows for _, _, part in pieces]
    runs = [run for placed, at, part in pieces for run in _runs(placed, at, part.num_rows)]
    made: dict[str, pa.Array | pa.ChunkedArray] = {}

    def addressed(heads: Iterable[str]) -> pa.Array:
        numbers = pc.cast(_sequences(runs), pa.string())
        return pc.binary_join_element_wise(_repeated(heads, counts, pa.string()), numbers, "")

    for name in columns:
        kind = MESSAGES_SCHEMA.field(name).type
        if name in STORED_COLUMNS:
            made[name] = rows[name]
        elif name == "queue_offset":
            made[name] = _sequences([(p.queue_offset + at, n) for (p, at, _), n in zip(pieces, counts, strict=True)])
        elif name == "row_no":
            made[name] = _sequences(runs)
        elif name in ("half_id", "file_no"):
            made[name] = _repeated((getattr(p.rows, name) for p in ranges), counts, kind)
        elif name == "msg_id":
            made[name] = addressed(f"{p.rows.half_id}:{p.rows.file_no}." for p in ranges)
        elif name != "transaction_id":
            made[name] = _repeated((getattr(p, name) for p in ranges), counts, kind)
        elif ranges[0].transaction_per == MESSAGE:
            made[name] = addressed(f"{p.rows.half_id}:{p.attempt}:{p.rows.file_no}." for p in ranges)
        else:
            ids = _repeated((batch_transaction_id(p.rows.half_id, p.attempt) for p in ranges), counts, kind)
            by_key = ranges[0].transaction_per == KEY
            made[name] = pc.binary_join_element_wise(ids, rows["transaction_key"], ":") if by_key else ids
    return pa.table(made, schema=pa.schema([MESSAGES_SCHEMA.field(c) for c in columns])), rows


def _one_table(parts: Sequence[pa.Table]) -> pa.Table:
    """Stored rows of several files, which need not have one type for a column: another writer of messages may
    have made some."""
    names = parts[0].column_names
    kinds = [MESSAGES_SCHEMA.field(n).type if n in STORED_COLUMNS else parts[0].schema.field(n).type for n in names]
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    same = [p if p.schema.equals(schema) else p.cast(schema) for p in parts]
    return same[0] if len(same) == 1 else pa.concat_tables(same).combine_chunks()


def _repeated(values: Iterable[object], counts: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Each value so many times."""
    found = list(values)
    if len(found) == 1:
        return pa.repeat(pa.scalar(found[0], kind), counts[0])
    ends = pa.array(accumulate(counts), pa.int32())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, pa.array(found, kind)))


def _sequences(runs: Sequence[tuple[int, int]]) -> pa.Array:
    """Numbers that follow each other from a first one on, so many of them; run after run."""
    if len(runs) == 1:
        return arange(runs[0][1], runs[0][0])
    lengths = [length for _, length in runs]
    before = [first - end + length for (first, length), end in zip(runs, accumulate(lengths), strict=True)]
    return pc.add(_repeated(before, lengths, pa.int64()), arange(sum(lengths)))


def _runs(placed: PlacedRange, position: int, n: int) -> Iterator[tuple[int, int]]:
    """Runs of row numbers (first, length) of rows of a range, from a position in it on."""
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
    """Messages of some ranges, a row group and queue at a time, in the order of the ranges.

    Parameters
    ----------
    read : callable
        Reads rows of a file of either table, as ``files.read_range`` does.
    find_again : callable
        Where messages lie now of which the file is gone: they have been drained, or the drained file was merged.
        FileNotFoundError when they are nowhere.
    columns : sequence of str
        Of the source.
    where : Filter, optional
        Only messages that it keeps.
    """
    for together in by_file(ranges):
        done = 0
        try:
            for position, table in read(rows_of(together), stored_columns(columns, together), where):
                yield from messages_of(together, [(position, table)], columns)
                done = position + table.num_rows
        except FileNotFoundError as lost:
            try:
                moved = [found for part in _after(together, done) for found in find_again(part)]
            except FileNotFoundError:  # they are nowhere
                raise lost from None
            for part in by_file(moved):
                yield from messages_of(part, read(rows_of(part), stored_columns(columns, part), where), columns)


def _after(together: Sequence[MessageRange], done: int) -> Iterator[MessageRange]:
    """Ranges without their first rows."""
    for placed in together:
        if done < placed.count:
            yield placed.cut(placed.queue_offset + done, placed.stop)
        done = max(0, done - placed.count)


def starts_since(
    log: Engine, tails: Mapping[tuple[str, int], int], topic: str, queues: int, time: datetime
) -> dict[int, int]:
    """Each queue's first offset that was committed at this time or later and is kept, else its end."""
    first, kept = Placements(log, topic.__eq__).first_since(time), log.firsts(refresh=False)
    found = {}
    for queue in ((topic, queue_id) for queue_id in range(queues)):
        end = tails.get(queue, 0)
        found[queue[1]] = max(kept.get(queue, 0), min(end, first.get(queue, end)))
    return found


def read_messages(
    log: Engine,
    tails: Mapping[tuple[str, int], int],
    topic: str,
    queues: int,
    start: Mapping[int, int],
    limit: int | None,
    columns: Sequence[str] | None,
    tags: str | None = None,
    selector: str | None = None,
) -> pa.Table:
    """Committed messages of a topic in (queue, offset) order: what ``CommitLog.read`` returns."""
    where = _wanted(tags, selector, log.machine.time_ms())
    names = require_source_columns(SOURCE_SCHEMA.names if columns is None else columns)
    if not names:
        raise OptionError(
            "columns is empty: a table without columns does not tell how many messages there are. Name one"
        )
    for queue_id, offset in start.items():
        tail = tails.get((topic, queue_id), 0)
        if type(queue_id) is not int or not 0 <= queue_id < queues:
            kind = "" if type(queue_id) is int else f" ({type(queue_id).__name__}, and int is expected)"
            raise OffsetError(f"start names queue {queue_id!r}{kind}: topic {topic!r} has the queues 0 to {queues - 1}")
        if type(offset) is not int or not 0 <= offset <= tail:
            raise OffsetError(f"start names offset {offset!r} of queue {queue_id}: 0 to {tail} are there")
    left = None if limit is None else whole_number(limit, "limit", 0)
    kept = log.firsts(refresh=False)
    firsts = {(topic, q): start.get(q, kept.get((topic, q), 0)) for q in range(queues)}
    ends = {queue: tails.get(queue, 0) for queue in firsts}
    if left is not None and where is None:
        ends = _first_of(firsts, ends, left)
    ranges, missing = Placements(log, topic.__eq__).between(firsts, ends)
    for queue, first, stop in missing:
        raise OffsetOutOfRangeError(out_of_range(*queue, first, stop, kept))
    parts: list[pa.Table] = []
    for messages in read_ranges(ranges, log.read_range, log.find_again, names, where):
        if left == 0:
            break
        part = messages.slice(0, left)
        parts.append(part)
        left = None if left is None else left - part.num_rows
    schema = pa.schema([SOURCE_SCHEMA.field(c) for c in names])
    return pa.concat_tables(parts) if parts else schema.empty_table()


def _first_of(
    firsts: Mapping[tuple[str, int], int], ends: Mapping[tuple[str, int], int], limit: int
) -> dict[tuple[str, int], int]:
    """Where so many messages end, when the lowest queues come first."""
    found: dict[tuple[str, int], int] = {}
    for queue, first in firsts.items():
        found[queue] = min(ends[queue], first + limit)
        limit -= found[queue] - first
    return found


def _wanted(tags: str | None, selector: str | None, now_ms: int) -> Filter | None:
    """The filter that these expressions mean at a time; None wants all.

    Raises
    ------
    OptionError
        When both are given (in RocketMQ a subscription is of type TAG or SQL92), or one cannot be used.
    """
    if tags is not None and selector is not None:
        raise OptionError("tags and selector contradict each other: give one of them (a selector can say TAGS = 'a')")
    wanted = (
        parse_selector(selector)
        if selector is not None
        else tag_selector(parse_tags(SUB_ALL if tags is None else tags))
    )
    return None if wanted is None else wanted.at(now_ms)


@looks_again
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
        offsets = starts_since(engine, tails, topic, queues, require_time(start, "start"))
    elif start is None or isinstance(start, Mapping):
        offsets = dict(start or {})
    else:
        raise OptionError(
            f"start={start!r} is no mapping and no datetime: the first offset of each queue is expected, as "
            "{0: 23}, or a time"
        )
    return read_messages(engine, tails, topic, queues, offsets, limit, columns, tags, selector)
