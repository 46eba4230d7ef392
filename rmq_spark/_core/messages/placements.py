"""Placements: which half rows stand at which offsets of a queue. They are op rows; ``half`` is never listed for them.

A :class:`Placements` follows ``op`` as a reader goes on. It keeps what the reader has not read yet, and reads only
newer op rows. A cold start walks from the newest op file backwards until it has the offsets asked for. So the cost
depends on how much is to be read, not on the age of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.message_range import MessageRange, PlacedRange, QueueOffsets, note_first_offsets, select
from rmq_spark._core.log.op import OP_SCHEMA
from rmq_spark._core.log.op_walk import PLACEMENT_COLUMNS, walk_placements
from rmq_spark._core.vocabulary.queues import Queue

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

NO_PLACEMENTS = pa.schema([OP_SCHEMA.field(name) for name in PLACEMENT_COLUMNS]).empty_table()
CACHE_ROWS_MAX = 200_000
"""Placements kept in memory beyond the range asked for. A stream far behind reads on from there."""

Spans = Mapping[Queue, tuple[int, int]]
"""Offsets from the first (included) to the second (excluded), by queue."""


@dataclass(frozen=True)
class _Cached:
    """The placements in memory: all above ``floor`` that were committed below version ``until``, and some later
    ones."""

    rows: pa.Table
    until: int
    floor: QueueOffsets

    def __post_init__(self) -> None:
        assert _above(self.rows, self.floor).num_rows == self.rows.num_rows, "a placement is kept that was read"

    def covers(self, wanted: Spans) -> bool:
        """True when the rows hold every offset of these spans."""
        missing = _Missing(wanted)
        missing.found(self.rows)
        return missing.nothing

    def reaches_down_to(self, wanted: Spans) -> bool:
        """True when missing offsets can only be in newer op rows."""
        return all(first >= self.floor.get(queue, 0) for queue, (first, _) in wanted.items())

    def without(self, read: QueueOffsets) -> _Cached:
        """The placements that remain when a reader has read up to these positions."""
        floor = {**self.floor, **{queue: max(offset, self.floor.get(queue, 0)) for queue, offset in read.items()}}
        return _Cached(_above(self.rows, read), self.until, floor)


class Placements:
    """The placements of the topics that one reader ``wants``."""

    def __init__(self, engine: Engine, wants: Callable[[str], bool]) -> None:
        self.engine = engine
        self._wants = wants
        until = engine.refresh() + 1
        self._cached = _Cached(
            NO_PLACEMENTS, until, dict(engine.tails(refresh=False))
        )  # replaced in one step, never changed

    def latest(self, refresh: bool = True) -> dict[Queue, int]:
        """The next offset of every wanted queue that has messages."""
        tails = self.engine.tails(refresh)
        topics = {topic for topic in {topic for topic, _ in tails} if self._wants(topic)}
        return {queue: offset for queue, offset in tails.items() if queue[0] in topics}

    def forget(self, read: QueueOffsets) -> None:
        """Drop the placements that the reader has read, so that memory does not grow."""
        self._cached = self._cached.without(read)

    def between(
        self, start: QueueOffsets, end: QueueOffsets
    ) -> tuple[list[MessageRange], list[tuple[Queue, int, int]]]:
        """Where the messages with offsets from ``start`` (included) to ``end`` (excluded) of every queue lie, by queue
        and offset; and the queues and offsets (first, end) that the log does not hold."""
        spans = _spans(start, end)
        if not spans:
            return [], []
        border, tail, missing = self.tail(start, end)
        ranges: list[MessageRange] = []
        for queue, (first, stop) in spans.items():
            drained, lost = self.engine.drained.ranges(queue, first, min(stop, border.get(queue, 0)))
            ranges += [*drained, *tail.get(queue, ())]
            missing += [(queue, *gap) for gap in lost]
        return ranges, sorted(missing)

    def tail(
        self, start: QueueOffsets, end: QueueOffsets
    ) -> tuple[QueueOffsets, dict[Queue, list[PlacedRange]], list[tuple[Queue, int, int]]]:
        """The border; where the messages of these offsets above it lie, by queue; and the queues and offsets (first,
        end) that the log does not hold. Messages below the border are in the table ``messages``."""
        border = self.engine.drained.border()
        ranges, missing = self._above_border(border, start, end)
        if missing:  # they may have been drained meanwhile, and pruned from op
            border = self.engine.drained.whole_border()
            ranges, missing = self._above_border(border, start, end)
        return border, ranges, missing

    def _above_border(
        self, border: QueueOffsets, start: QueueOffsets, end: QueueOffsets
    ) -> tuple[dict[Queue, list[PlacedRange]], list[tuple[Queue, int, int]]]:
        spans = _spans({queue: max(start.get(queue, 0), border.get(queue, 0)) for queue in end}, end)
        if not spans:
            return {}, []
        floor = {
            queue: max(offset, border.get(queue, 0)) for queue, offset in {**dict.fromkeys(border, 0), **start}.items()
        }
        rows = self._rows_holding(spans, floor)
        ranges: dict[Queue, list[PlacedRange]] = {}
        missing: list[tuple[Queue, int, int]] = []
        for queue, (first, stop) in spans.items():
            ranges[queue], gaps = select(rows, *queue, first, stop)
            missing += [(queue, *gap) for gap in gaps]
        return ranges, missing

    def _rows_holding(self, spans: Spans, start: QueueOffsets) -> pa.Table:
        """Placements that hold these spans, and perhaps more; all there are when the log does not hold the spans."""
        if not self._cached.covers(spans):
            tails = self.engine.tails(refresh=False)
            if any(stop > tails.get(queue, 0) for queue, (_, stop) in spans.items()):
                self.engine.refresh()
            version = self.engine.op_table.version
            if self._cached.reaches_down_to(spans):
                self._read_newer(spans, version)
            if not self._cached.covers(spans):
                self._read_anew(spans, start, version)
        return self._cached.rows

    def _read_newer(self, spans: Spans, version: int) -> None:
        cached = self._cached
        rows, until = cached.rows.filter(pc.less(cached.rows["version"], cached.until)), version + 1
        for new, _ in walk_placements(self.engine.op_table, cached.until):
            rows, until = _bounded(pa.concat_tables([rows, self._wanted_above(new, cached.floor)]), until, spans)
        self._cached = _Cached(rows.combine_chunks(), until, cached.floor)

    def _read_anew(self, spans: Spans, start: QueueOffsets, version: int) -> None:
        """Walk backwards until all placements from ``start`` to the head are read."""
        latest = self.latest(refresh=False)
        floor = {queue: start.get(queue, 0) for queue in {*start, *spans, *latest}}
        to_head = {queue: (floor[queue], end) for queue, end in latest.items()}
        missing = _Missing(to_head)
        above = min(first for first, end in [*to_head.values(), *spans.values()] if first < end)
        rows, until = NO_PLACEMENTS, version + 1
        for new, _ in walk_placements(self.engine.op_table, 0, above):
            own_rows = self._wanted_above(new, floor)
            missing.found(own_rows)
            rows, until = _bounded(pa.concat_tables([rows, own_rows]), until, spans)
            if missing.nothing:
                break
        self._cached = _Cached(rows.combine_chunks(), until, floor)

    def _wanted_above(self, rows: pa.Table, floor: QueueOffsets) -> pa.Table:
        return _above(self._of_wanted_topics(rows), floor)

    def _of_wanted_topics(self, rows: pa.Table) -> pa.Table:
        topics = pc.unique(rows["topic"]).to_pylist()
        kept = [topic for topic in topics if topic is None or self._wants(topic)]
        return rows if len(kept) == len(topics) else rows.filter(pc.is_in(rows["topic"], pa.array(kept, pa.string())))

    def first_since(self, time: datetime) -> dict[Queue, int]:
        """The first offset of each queue that was committed at this time or later. Queues without such an offset are
        left out."""
        since = pa.scalar(time, OP_SCHEMA.field("op_time").type)
        drained = self.engine.drained
        drained.whole_border()
        first_offsets = {queue: offset for queue, offset in drained.first_since(time).items() if self._wants(queue[0])}
        for rows, rest in walk_placements(self.engine.op_table, drained.op_version + 1):
            placed = self._of_wanted_topics(rows.filter(pc.is_valid(rows["queue_offset"])))
            note_first_offsets(first_offsets, placed.filter(pc.greater_equal(placed["op_time"], since)))
            # Times ascend with versions, so older files than this are entirely too early.
            early = pc.max(rows.filter(pc.less(rows["op_time"], since))["version"]).as_py()
            if early is not None and rest is not None and rest <= early:
                break
        return first_offsets

    def starts_since(self, time: datetime, ends: Mapping[Queue, int]) -> dict[Queue, int]:
        """The first kept offset of each queue of ``ends`` that was committed at this time or later, else its end."""
        since, firsts = self.first_since(time), self.engine.firsts(refresh=False)
        return {queue: max(min(end, since.get(queue, end)), firsts.get(queue, 0)) for queue, end in ends.items()}


def _spans(start: QueueOffsets, end: QueueOffsets) -> dict[Queue, tuple[int, int]]:
    """The offsets from ``start`` to ``end`` by queue, without queues that have none between them."""
    spans = {queue: (start.get(queue, 0), stop) for queue, stop in sorted(end.items())}
    return {queue: (first, stop) for queue, (first, stop) in spans.items() if first < stop}


class _Missing:
    """Counts how many offsets of some spans have no known placement yet."""

    def __init__(self, spans: Spans) -> None:
        self._starts = {queue: first for queue, (first, _) in spans.items()}
        self._ends = {queue: stop for queue, (_, stop) in spans.items()}
        self._left = {f"{topic} {q}": stop - first for (topic, q), (first, stop) in spans.items() if first < stop}

    def found(self, rows: pa.Table) -> None:
        placed = rows.filter(pc.is_valid(rows["queue_offset"]))
        if placed.num_rows == 0:
            return
        first = pc.max_element_wise(placed["queue_offset"], _positions_of(placed, self._starts))
        stop = pc.min_element_wise(placed["next_offset"], _positions_of(placed, self._ends))
        inside = pa.table({"queue": _queue_names(placed), "n": pc.max_element_wise(pc.subtract(stop, first), 0)})
        sums = inside.group_by("queue", use_threads=False).aggregate([("n", "sum")])
        for queue, n in zip(sums["queue"].to_pylist(), sums["n_sum"].to_pylist(), strict=True):
            if queue in self._left:
                self._left[queue] -= n

    @property
    def nothing(self) -> bool:
        return all(n <= 0 for n in self._left.values())


def _above(rows: pa.Table, floor: QueueOffsets) -> pa.Table:
    return rows.filter(pc.greater(rows["next_offset"], _positions_of(rows, floor))) if rows.num_rows else rows


def _positions_of(rows: pa.Table, positions: QueueOffsets) -> pa.ChunkedArray:
    """The position of each row's queue; 0 for a queue that has none."""
    names = pa.array([f"{topic} {queue_id}" for topic, queue_id in positions], pa.string())
    at = pc.index_in(_queue_names(rows), value_set=names)
    return pc.fill_null(pa.array(list(positions.values()), pa.int64()).take(at), 0)


def _queue_names(rows: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(rows["topic"], pc.cast(rows["queue_id"], pa.string()), " ")


def _bounded(rows: pa.Table, until: int, spans: Spans) -> tuple[pa.Table, int]:
    """The rows of the spans, and as many of the oldest other rows as the cache may hold; and the version below which
    these are complete."""
    if rows.num_rows <= 2 * CACHE_ROWS_MAX:
        return rows, until
    versions = pc.array_sort_indices(rows["version"])
    cut = rows["version"][versions[CACHE_ROWS_MAX].as_py()].as_py()
    ends = {queue: stop for queue, (_, stop) in spans.items()}
    needed = pc.fill_null(pc.less(rows["queue_offset"], _positions_of(rows, ends)), True)
    return rows.filter(pc.or_(needed, pc.less(rows["version"], cut))), min(until, cut)
