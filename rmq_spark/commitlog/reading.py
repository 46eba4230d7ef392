"""From offsets to messages: which half rows an offset range means, and what a reader makes of them.

Planning looks at ``op`` alone. What executors run (:func:`to_messages`) needs pyarrow and this package's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.commitlog.op import ranges_of
from rmq_spark.commitlog.rows import ranges_count
from rmq_spark.config import nearest, whole_number
from rmq_spark.errors import CorruptLogError, OffsetError, OffsetOutOfRangeError, OptionError
from rmq_spark.message import PROPERTIES, TIMESTAMP
from rmq_spark.selector import SUB_ALL, parse_selector, parse_tags, tag_selector
from rmq_spark.selector.tree import Filter
from rmq_spark.storage.files import KEPT, RowRange, arange, require_path
from rmq_spark.transaction import BATCH, KEY, batch_transaction_id, transaction_ids

if TYPE_CHECKING:
    from rmq_spark.commitlog.half_store import HalfStore
    from rmq_spark.storage.table import Table

SOURCE_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("msg_id", pa.string()),
        ("transaction_id", pa.string()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("sharding_key", pa.string()),
        ("properties", PROPERTIES),
        ("body", pa.binary()),
        ("producer_group", pa.string()),
        ("born_timestamp", TIMESTAMP),
        ("store_timestamp", TIMESTAMP),
        ("commit_timestamp", TIMESTAMP),
    ]
)
"""The columns of the source, in order."""

STORED_COLUMNS = ("tags", "keys", "sharding_key", "properties", "body", "born_timestamp", "store_timestamp")
PLACEMENT_COLUMNS = [
    "kind",
    "version",
    "op_time",
    "half_id",
    "file_no",
    "ranges",
    "count",
    "attempt",
    "topic",
    "queue_id",
    "queue_offset",
    "next_offset",
    "path",
    "file_rows",
    "transaction_per",
    "producer_group",
]


@dataclass(frozen=True)
class PlacedRange:
    """Half rows that stand in a queue one after the other; picklable.

    Attributes
    ----------
    queue_offset : int
        Of the first row; the others follow in order.
    """

    rows: RowRange
    topic: str
    queue_id: int
    queue_offset: int
    attempt: int
    transaction_per: str
    producer_group: str
    commit_timestamp: datetime

    @property
    def count(self) -> int:
        return self.rows.rows

    def cut(self, start: int, end: int) -> PlacedRange:
        """The part with offsets from ``start`` (included) to ``end`` (excluded)."""
        skip, take = start - self.queue_offset, end - start
        ranges: list[tuple[int, int]] = []
        for first, last in self.rows.ranges:
            length = last - first + 1
            a = max(0, skip)
            b = min(length, skip + take)
            if a < b:
                ranges.append((first + a, first + b - 1))
            skip -= length
            if skip + take <= 0:
                break
        r = self.rows
        kept = RowRange(r.path, r.half_id, r.file_no, r.file_rows, tuple(ranges))
        return PlacedRange(kept, self.topic, self.queue_id, start, self.attempt, self.transaction_per,
                           self.producer_group, self.commit_timestamp)  # fmt: skip


def read_placements(op: Table, where: pc.Expression | None = None, since_version: int = 0, above: int = 0) -> pa.Table:
    """Op rows that placed messages (``commit`` with an offset, or ``place``), with :data:`PLACEMENT_COLUMNS`.

    Parameters
    ----------
    op : Table
        Refreshed by the caller.
    where : expression, optional
        On the columns of ``op``.
    since_version : int
        Only rows committed at this version of ``op`` or later.
    above : int
        Only rows that place messages at this offset or later, whatever the queue.
    """
    files = [path for path, _ in newest_files(op, since_version, above)]
    wanted = _is_placement() & (pc.field("version") >= since_version) & (pc.field("next_offset") > above)
    return op.read(files, PLACEMENT_COLUMNS, wanted if where is None else wanted & where).sort_by("version")


def walk_placements(
    op: Table, since_version: int = 0, above: int = 0, files_min: int = 16
) -> Iterator[tuple[pa.Table, int | None]]:
    """The same rows from the newest op file backwards: a reader near the head of its queues stops early, so its cost
    does not follow the age of the log.

    Parameters
    ----------
    files_min : int
        Files of the first step; every further step takes twice as many.

    Yields
    ------
    (rows, rest)
        With :data:`PLACEMENT_COLUMNS`; and the highest version that a row in the files not read yet can have (-1 when
        there are none, None when it is not known).
    """
    files = newest_files(op, since_version, above)
    wanted = _is_placement() & (pc.field("next_offset") > above)
    step, at = files_min, 0
    while at < len(files):
        paths = [path for path, _ in files[at : at + step]]
        at, step = at + step, step * 2
        rest = files[at][1] if at < len(files) else -1
        yield op.read(paths, PLACEMENT_COLUMNS, wanted & (pc.field("version") >= since_version)), rest


def newest_files(op: Table, since_version: int = 0, above: int = 0) -> list[tuple[str, int | None]]:
    """Live files of ``op`` by falling highest version (None: without statistics, which come first). Files that can have
    no row of these versions, or no message above this offset, are left out."""
    actions = op.actions()
    if actions.num_rows == 0:
        return []
    version = _bound(actions, "max.version")
    needed = pc.fill_null(pc.greater_equal(version, since_version), True)
    if above > 0:
        needed = pc.and_(needed, pc.fill_null(pc.greater(_bound(actions, "max.next_offset"), above), True))
    files = pa.table({"path": actions["path"], "version": version}).filter(needed)
    files = files.sort_by([("version", "descending")])
    found = list(zip(files["path"].to_pylist(), files["version"].to_pylist(), strict=True))
    return sorted(found, key=lambda f: f[1] is not None)


def _bound(actions: pa.Table, name: str) -> pa.ChunkedArray:
    # A column without a single value in any file has no statistics at all.
    return actions[name] if name in actions.column_names else pa.chunked_array([pa.nulls(actions.num_rows, pa.int64())])


def _is_placement() -> pc.Expression:
    return pc.field("queue_offset").is_valid()


def placed_range(row: Mapping[str, Any]) -> PlacedRange:
    """One placement row as a range.

    Raises
    ------
    CorruptLogError
        When the row names a file outside the log, or its numbers contradict each other.
    """
    ranges = ranges_of(row["ranges"])
    if ranges is None or ranges_count(ranges) != row["count"] or row["queue_offset"] < 0:
        raise CorruptLogError(
            f"op row of half batch {row['half_id']!r} at version {row['version']} says {row['count']} messages, but "
            f"names the rows {ranges}: it was changed by hand"
        )
    if row["next_offset"] != row["queue_offset"] + row["count"] or ranges[-1][1] >= (row["file_rows"] or 0):
        raise CorruptLogError(
            f"op row of half batch {row['half_id']!r} at version {row['version']} places rows up to {ranges[-1][1]} of "
            f"{row['file_rows']} at offsets {row['queue_offset']} to {row['next_offset']}: it was changed by hand"
        )
    rows = RowRange(require_path(row["path"], "op"), row["half_id"], row["file_no"], row["file_rows"], ranges)
    return PlacedRange(rows, row["topic"], row["queue_id"], row["queue_offset"], row["attempt"],
                       row["transaction_per"], row["producer_group"], row["op_time"])  # fmt: skip


def select(
    placements: pa.Table,
    topic: str,
    queue_id: int,
    start: int,
    end: int,
) -> tuple[list[PlacedRange], list[tuple[int, int]]]:
    """The ranges that hold offsets ``start`` (included) to ``end`` (excluded) of a queue, in offset order; and the
    offsets (first, end) that the log does not hold.

    Raises
    ------
    CorruptLogError
        When an offset is placed twice.
    """
    if start >= end:
        return [], []
    of_queue = pc.and_(pc.equal(placements["topic"], topic), pc.equal(placements["queue_id"], queue_id))
    inside = pc.and_(pc.less(placements["queue_offset"], end), pc.greater(placements["next_offset"], start))
    rows = placements.filter(pc.and_(of_queue, inside)).sort_by("queue_offset")
    found: list[PlacedRange] = []
    gaps: list[tuple[int, int]] = []
    position = start
    for row in rows.to_pylist():
        whole = placed_range(row)
        if whole.queue_offset < position and found:
            raise CorruptLogError(f"offset {whole.queue_offset} of queue {queue_id} of topic {topic!r} is placed twice")
        if whole.queue_offset > position:
            gaps.append((position, whole.queue_offset))
            position = whole.queue_offset
        stop = min(end, whole.queue_offset + whole.count)
        found.append(whole.cut(position, stop))
        position = stop
    if position < end:
        gaps.append((position, end))
    return found, gaps


def out_of_range(topic: str, queue_id: int, start: int, end: int) -> str:
    """The sentence for offsets (``end`` excluded) that the log does not hold."""
    return f"topic {topic!r}, queue {queue_id}: offsets {start} to {end - 1} are not in the commit log"


def by_file(ranges: Sequence[PlacedRange]) -> Iterator[list[PlacedRange]]:
    """Ranges that follow each other in one half file, so that a row group is read once for all its queues."""
    together: list[PlacedRange] = []
    for placed in ranges:
        if together:
            last, rows = together[-1].rows, placed.rows
            same = (last.path, last.half_id, last.file_no) == (rows.path, rows.half_id, rows.file_no)
            if not same or rows.ranges[0][0] <= last.ranges[-1][1]:
                yield together
                together = []
        together.append(placed)
    if together:
        yield together


def _pieces(
    together: Sequence[PlacedRange], position: int, table: pa.Table
) -> Iterator[tuple[PlacedRange, int, pa.Table]]:
    """A table read at a position of ranges that lie together, cut to the ranges: (range, position in it, rows)."""
    start = 0
    for placed in together:
        first, end = max(start, position), min(start + placed.count, position + table.num_rows)
        if first < end:
            yield placed, first - start, table.slice(first - position, end - first)
        start += placed.count


def rows_of(together: Sequence[PlacedRange]) -> RowRange:
    """The rows of ranges that follow each other in one half file."""
    return replace(together[0].rows, ranges=tuple(r for placed in together for r in placed.rows.ranges))


def messages_of(
    together: Sequence[PlacedRange], tables: Iterable[tuple[int, pa.Table]], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Rows of :func:`rows_of`, as ``read_range`` yields them, as messages of the source: those that a filter keeps."""
    for position, table in tables:
        for placed, at, part in _pieces(together, position, table):
            messages = to_messages(placed, at, part, columns)
            if KEPT in part.column_names and not pc.all(part[KEPT]).as_py():
                messages = messages.filter(part[KEPT])
            yield messages


def require_source_columns(columns: Sequence[str]) -> list[str]:
    """The columns themselves when the source has them all; OptionError names the nearest right one."""
    if isinstance(columns, (str, bytes)) or not isinstance(columns, Iterable):
        raise OptionError(f"columns={columns!r} is no list of names: columns of the source are expected")
    for name in columns:
        if name not in SOURCE_SCHEMA.names:
            raise OptionError(f"column {name!r} is not a column of the source ({nearest(name, SOURCE_SCHEMA.names)})")
    return list(columns)


def stored_columns(columns: Sequence[str], placed: PlacedRange) -> list[str]:
    """The columns of ``half`` that must be read to make these columns of the source."""
    stored = [c for c in columns if c in STORED_COLUMNS]
    if "transaction_id" in columns and placed.transaction_per == KEY:
        stored.append("transaction_key")
    return stored or ["row_no"]


def to_messages(placed: PlacedRange, position: int, table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Rows read from a half file as messages of the source.

    Parameters
    ----------
    position : int
        Of the table's first row within the range.
    """
    n = table.num_rows
    made: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name in columns:
        kind = SOURCE_SCHEMA.field(name).type
        if name in STORED_COLUMNS:
            made[name] = table[name] if table[name].type == kind else table[name].cast(kind)
        elif name == "queue_offset":
            made[name] = arange(n, placed.queue_offset + position)
        elif name == "msg_id":
            made[name] = _ids(placed.rows.half_id, placed, position, n)
        elif name == "transaction_id":
            made[name] = _transaction_ids(placed, position, table)
        else:
            made[name] = pa.repeat(pa.scalar(getattr(placed, name), kind), n)
    return pa.table(made, schema=pa.schema([SOURCE_SCHEMA.field(c) for c in columns]))


def _row_numbers(placed: PlacedRange, position: int, n: int) -> pa.Array:
    parts: list[pa.Array] = []
    skip, left = position, n
    for first, last in placed.rows.ranges:
        length = last - first + 1
        take = min(left, length - skip)
        if take > 0:
            parts.append(arange(take, first + skip))
            left -= take
        skip = max(0, skip - length)
        if not left:
            break
    return pa.concat_arrays(parts)


def _ids(head: str, placed: PlacedRange, position: int, n: int) -> pa.Array:
    """``<head>:<file_no>.<row_no>``, as :func:`~rmq_spark.transaction.message_ids` makes it, for one file: one join."""
    rows = pc.cast(_row_numbers(placed, position, n), pa.string())
    return pc.binary_join_element_wise(pa.scalar(f"{head}:{placed.rows.file_no}."), rows, "")


def _transaction_ids(placed: PlacedRange, position: int, table: pa.Table) -> pa.Array | pa.ChunkedArray:
    half_id, attempt, per = placed.rows.half_id, placed.attempt, placed.transaction_per
    if per == BATCH:
        return pa.repeat(pa.scalar(batch_transaction_id(half_id, attempt)), table.num_rows)
    if per == KEY:
        return transaction_ids(half_id, attempt, KEY, table["transaction_key"], None, None)
    return _ids(f"{half_id}:{attempt}", placed, position, table.num_rows)


def read_messages(
    half: HalfStore,
    op: Table,
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
    where = _wanted(tags, selector, op.machine.time_ms())
    names = require_source_columns(SOURCE_SCHEMA.names if columns is None else columns)
    for queue_id, offset in start.items():
        tail = tails.get((topic, queue_id), 0)
        if type(queue_id) is not int or not 0 <= queue_id < queues:
            raise OffsetError(f"start names queue {queue_id!r}: topic {topic!r} has the queues 0 to {queues - 1}")
        if type(offset) is not int or not 0 <= offset <= tail:
            raise OffsetError(f"start names offset {offset!r} of queue {queue_id}: 0 to {tail} are there")
    if limit is not None:
        whole_number(limit, "limit", 0)
    lowest = min((start.get(q, 0) for q in range(queues)), default=0)
    placements = read_placements(op, pc.field("topic") == topic, above=lowest)
    parts: list[pa.Table] = []
    left = limit
    for queue_id in range(queues):
        first, end = start.get(queue_id, 0), tails.get((topic, queue_id), 0)
        if left is not None and where is None:
            end = min(end, first + left)
        ranges, gaps = select(placements, topic, queue_id, first, end)
        if gaps:
            raise OffsetOutOfRangeError(out_of_range(topic, queue_id, *gaps[0]))
        for together in by_file(ranges):
            if left == 0:
                break
            tables = half.read_range(rows_of(together), stored_columns(names, together[0]), where)
            for messages in messages_of(together, tables, names):
                kept = messages.slice(0, left)
                parts.append(kept)
                left = None if left is None else left - kept.num_rows
    schema = pa.schema([SOURCE_SCHEMA.field(c) for c in names])
    return pa.concat_tables(parts) if parts else schema.empty_table()


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
