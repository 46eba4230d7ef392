"""Ranges of messages that stand in a queue one after the other: which rows of which file they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op import ranges_of
from rmq_spark._core.storage.file_system import require_path
from rmq_spark._core.storage.row_range import RowRange
from rmq_spark._core.storage.seal import RESTORE
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import CorruptLogError

QueueOffsets = Mapping[Queue, int]
"""Offsets by queue; 0 for a queue that is not among them."""

_Range = TypeVar("_Range", bound="MessageRange")


@dataclass(frozen=True)
class MessageRange:
    """Messages that stand in a queue one after the other, from ``queue_offset`` on, and where their rows lie;
    picklable. ``since`` is of a file of ``messages``: the version of ``op`` at which its first message was placed."""

    rows: RowRange
    topic: str
    queue_id: int
    queue_offset: int
    since: int = field(default=0, compare=False, kw_only=True)

    @property
    def count(self) -> int:
        return self.rows.rows

    @property
    def stop(self) -> int:
        """The offset after the last row."""
        return self.queue_offset + self.count

    @property
    def file(self) -> tuple[object, ...]:
        """The file of the rows, as a sort key: readers take the files that were committed first before the others."""
        return (0, self.since, self.rows.path)

    def cut(self: _Range, start: int, end: int) -> _Range:
        """The part with offsets from ``start`` (included) to ``end`` (excluded)."""
        skip, take = start - self.queue_offset, end - start
        ranges: list[tuple[int, int]] = []
        for first, last in self.rows.ranges:
            length = last - first + 1
            lower = max(0, skip)
            upper = min(length, skip + take)
            if lower < upper:
                ranges.append((first + lower, first + upper - 1))
            skip -= length
            if skip + take <= 0:
                break
        return replace(self, rows=replace(self.rows, ranges=tuple(ranges)), queue_offset=start)


@dataclass(frozen=True)
class PlacedRange(MessageRange):
    """Rows of ``half`` that were placed at ``op_version``, and what ``op`` says of them."""

    attempt: int
    transaction_per: str
    producer_group: str
    commit_timestamp: datetime
    op_version: int

    @property
    def file(self) -> tuple[object, ...]:
        return (1, self.commit_timestamp, self.rows.half_id, self.rows.file_no, self.rows.path)


def placed_range(row: Mapping[str, Any]) -> PlacedRange:
    """Convert a placement row that ``read_op`` returned. CorruptLogError: the row names a file outside the log."""
    ranges = ranges_of(row["ranges"]) or ()
    rows = RowRange(require_path(row["path"], "op"), row["half_id"], row["file_no"], row["file_rows"], ranges)
    return PlacedRange(rows, row["topic"], row["queue_id"], row["queue_offset"], row["attempt"],
                       row["transaction_per"], row["producer_group"], row["op_time"], row["version"])  # fmt: skip


def select(
    placements: pa.Table,
    topic: str,
    queue_id: int,
    start: int,
    end: int,
) -> tuple[list[PlacedRange], list[tuple[int, int]]]:
    """The ranges that hold offsets ``start`` (included) to ``end`` (excluded) of a queue, in offset order; and the
    offsets (first, end) that the log does not hold. CorruptLogError: an offset is placed twice."""
    of_queue = pc.and_(pc.equal(placements["topic"], topic), pc.equal(placements["queue_id"], queue_id))
    inside = pc.and_(pc.less(placements["queue_offset"], end), pc.greater(placements["next_offset"], start))
    rows = placements.filter(pc.and_(of_queue, inside)).sort_by("queue_offset")
    selected: list[PlacedRange] = []
    gaps: list[tuple[int, int]] = []
    position = start
    for row in rows.to_pylist():
        whole = placed_range(row)
        if whole.queue_offset < position and selected:
            raise CorruptLogError(
                f"table op places offset {whole.queue_offset} of queue {queue_id} of topic {topic!r} twice: {RESTORE}"
            )
        if whole.queue_offset > position:
            gaps.append((position, whole.queue_offset))
            position = whole.queue_offset
        stop = min(end, whole.queue_offset + whole.count)
        selected.append(whole.cut(position, stop))
        position = stop
    if position < end:
        gaps.append((position, end))
    return selected, gaps


def note_first_offsets(offsets: dict[Queue, int], rows: pa.Table) -> None:
    """Lower the offset of each queue to the first offset among these rows."""
    firsts = rows.group_by(["topic", "queue_id"], use_threads=False).aggregate([("queue_offset", "min")])
    for row in firsts.to_pylist():
        queue, first = (row["topic"], row["queue_id"]), row["queue_offset_min"]
        offsets[queue] = min(offsets.get(queue, first), first)


def out_of_range(topic: str, queue_id: int, start: int, end: int, firsts: QueueOffsets | None = None) -> str:
    """The error text for offsets (``end`` excluded) that the log does not hold."""
    where = f"topic {topic!r}, queue {queue_id}: offsets {start} to {end - 1}"
    first = (firsts or {}).get((topic, queue_id), 0)
    if start < end <= first:
        return f"{where} have expired; the queue starts at offset {first} now"
    return f"{where} are not in the commit log, though they have not expired (txmq doctor says what is wrong)"
