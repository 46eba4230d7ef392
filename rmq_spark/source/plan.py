"""Planning a read: which offsets, and which half rows they are. It looks at ``op`` alone and never lists ``half``.

A :class:`Planner` follows ``op`` as a stream goes on. It keeps the placements that the stream has not read yet and
reads only op rows newer than those; when it starts cold it walks from the newest op file backwards until the range is
covered. So its cost follows what is to be read, not the age of the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.commitlog.incoming import require_known_topic
from rmq_spark.commitlog.op import OP_SCHEMA
from rmq_spark.commitlog.reading import PLACEMENT_COLUMNS, PlacedRange, out_of_range, select
from rmq_spark.errors import OffsetOutOfRangeError
from rmq_spark.message import RETRY_PREFIX
from rmq_spark.source.offsets import CountedPositions, Positions, Queue, resolve
from rmq_spark.source.options import Subscription

if TYPE_CHECKING:
    from rmq_spark.commitlog.log import CommitLog

logger = logging.getLogger(__name__)

CACHE_ROWS_MAX = 200_000
"""Placements kept in memory beyond the range that is being planned; a stream far behind reads on from there."""
BLOCK_ROWS = 262_144
"""Messages of a partition when no option says otherwise: four row groups of a half file, about 75 MB."""

Ranges = Mapping[Queue, tuple[int, int]]
"""Offsets from the first (included) to the second (excluded), by queue."""

_EMPTY = pa.schema([OP_SCHEMA.field(name) for name in PLACEMENT_COLUMNS]).empty_table()


class Planner:
    """Plans reads of one subscription.

    Parameters
    ----------
    log : CommitLog
        Of this planner alone.
    subscription : Subscription
    fail_on_data_loss : bool
        False: messages that the log does not hold are skipped with a warning.
    """

    def __init__(self, log: CommitLog, subscription: Subscription, fail_on_data_loss: bool = True) -> None:
        self.log = log
        self._subscription = subscription
        self._fail_on_data_loss = fail_on_data_loss
        # The cache: every placement above _floor that was committed below version _until, and some later ones.
        self._rows = _EMPTY
        self._until = log.refresh() + 1
        self._floor: Positions = dict(log.tails(refresh=False))

    @property
    def rows_kept(self) -> int:
        """How many placements are kept in memory."""
        return int(self._rows.num_rows)

    # ------------------------------------------------------------------ what there is
    def queues(self) -> dict[str, int]:
        """The topics subscribed to that are in the log, and their number of queues.

        Raises
        ------
        TopicNotFoundError
            When a topic is named that is not in the log.
        """
        topics = self.log.topics()
        for name in self._subscription.topics:
            require_known_topic(name, topics)
        return {name: count for name, count in topics.items() if self._subscription.matches(name)}

    def latest(self, refresh: bool = True) -> Positions:
        """The next offset of every queue subscribed to that has messages."""
        tails = self.log.tails(refresh)
        mine = {topic for topic in {topic for topic, _ in tails} if self._subscription.matches(topic)}
        return {queue: offset for queue, offset in tails.items() if queue[0] in mine}

    def resolve(self, option: str, given: str | Positions | datetime) -> Positions:
        """Offsets for ``earliest``, ``latest``, offsets with Kafka's marks, or a time of commit.

        For a time it is each queue's first message that was committed then or later; a queue without one starts (or
        ends) at its end. Spark's Kafka source fails in that case unless told otherwise.
        """
        latest = self.latest()
        if isinstance(given, datetime):
            return self._at(given, latest)
        queues = self.queues()
        if isinstance(given, CountedPositions):
            if given.log_id not in (None, self.log.id):
                raise OffsetOutOfRangeError(
                    f"{option} counts in commit log {given.log_id}, and this is commit log {self.log.id}: it was made "
                    "anew, or is another one. Use 'earliest', or offsets of this log"
                )
            # A progress report has a group's retries, too.
            given = {q: n for q, n in given.items() if q[0] in queues or not q[0].startswith(RETRY_PREFIX)}
        if isinstance(given, dict) and (retry := self._subscription.retry) in queues and retry is not None:
            given = {(retry, queue_id): 0 for queue_id in range(queues[retry])} | given  # nobody names it
        return resolve(option, given, queues, latest)

    def _at(self, time: datetime, latest: Positions) -> Positions:
        found = {(topic, q): 0 for topic, count in self.queues().items() for q in range(count)} | latest
        since = pa.scalar(time, OP_SCHEMA.field("op_time").type)
        for rows, rest in self.log.placements():
            placed = self._subscribed(rows.filter(pc.is_valid(rows["queue_offset"])))
            late = placed.filter(pc.greater_equal(placed["op_time"], since))
            first = late.group_by(["topic", "queue_id"], use_threads=False).aggregate([("queue_offset", "min")])
            for r in first.to_pylist():
                queue = (r["topic"], r["queue_id"])
                found[queue] = min(found.get(queue, r["queue_offset_min"]), r["queue_offset_min"])
            # Times never run backwards with the version, so older files than this are too early altogether.
            early = pc.max(rows.filter(pc.less(rows["op_time"], since))["version"]).as_py()
            if early is not None and rest is not None and rest <= early:
                break
        return found

    # ------------------------------------------------------------------ a stream's offsets
    def checked_start(self, start: Positions, latest: Positions, whose: str = "the checkpoint") -> Positions:
        """A stream's start, from its checkpoint or its group, without what this log or subscription does not have.

        Raises
        ------
        OffsetOutOfRangeError
            When it lies past the end of a queue: the checkpoint belongs to another log, or the log was made anew.
        """
        found: Positions = {}
        for (topic, queue_id), offset in start.items():
            end = latest.get((topic, queue_id), 0)
            if not self._subscription.matches(topic):
                logger.warning("topic %r is in %s, but is not subscribed to any more: left out", topic, whose)
            elif offset <= end:
                found[(topic, queue_id)] = offset
            else:
                self._lost(
                    f"{whose} has offset {offset} for topic {topic!r}, queue {queue_id}, which ends at {end}: "
                    "it was made with another commit log, or with one restored since. Start a new one"
                )
                found[(topic, queue_id)] = end
        return found

    def forget(self, start: Positions) -> None:
        """Drop what a stream has read, so that memory does not grow with it."""
        self._rows = self._above(self._rows, start)
        for queue, offset in start.items():
            self._floor[queue] = max(offset, self._floor.get(queue, 0))

    # ------------------------------------------------------------------ ranges
    def ranges(self, start: Positions, end: Positions) -> list[PlacedRange]:
        """The half rows of every queue's offsets from ``start`` (included) to ``end`` (excluded), by queue and offset.

        Raises
        ------
        OffsetOutOfRangeError
            When the log does not hold all of them, unless data loss is to be skipped.
        """
        wanted = {queue: (start.get(queue, 0), offset) for queue, offset in sorted(end.items())}
        wanted = {queue: (first, stop) for queue, (first, stop) in wanted.items() if first < stop}
        if not wanted:
            return []
        rows = self._covering(wanted, start)
        found: list[PlacedRange] = []
        for (topic, queue_id), (first, stop) in wanted.items():
            ranges, gaps = select(rows, topic, queue_id, first, stop)
            found += ranges
            for gap in gaps:
                self._lost(out_of_range(topic, queue_id, *gap))
        return found

    def _lost(self, what: str) -> None:
        if self._fail_on_data_loss:
            raise OffsetOutOfRangeError(f"{what} (failOnDataLoss=false skips them)")
        logger.warning("skipped, because failOnDataLoss=false: %s", what)

    def _covering(self, wanted: Ranges, start: Positions) -> pa.Table:
        """Placements that hold these ranges, and perhaps more; all there are when the log does not hold them."""
        if not self._covered(wanted):
            tails = self.log.tails(refresh=False)
            if any(stop > tails.get(queue, 0) for queue, (_, stop) in wanted.items()):
                self.log.refresh()
            version = self.log.version
            if all(first >= self._floor.get(queue, 0) for queue, (first, _) in wanted.items()):
                known = self._rows.filter(pc.less(self._rows["version"], self._until))
                self._read(known, self._until, wanted, version)
            if not self._covered(wanted):
                queues = {*start, *wanted, *self.latest(refresh=False)}
                self._floor = {queue: start.get(queue, 0) for queue in queues}
                self._read(_EMPTY, 0, wanted, version)
        return self._rows

    def _covered(self, wanted: Ranges) -> bool:
        held = _Held(wanted)
        held.add(self._rows)
        return held.all

    def _read(self, known: pa.Table, since: int, wanted: Ranges, version: int) -> None:
        """Add the placements committed at version ``since`` or later to the known ones."""
        # From cold, the walk backwards ends where everything from the floor up to the head is there.
        to_head = {queue: (self._floor.get(queue, 0), end) for queue, end in self.latest(refresh=False).items()}
        held = _Held(to_head)
        behind = [first for first, end in [*to_head.values(), *wanted.values()] if first < end]
        above = 0 if since else min(behind)
        until = version + 1
        for rows, _ in self.log.placements(since, above):
            new = self._above(self._subscribed(rows), self._floor)
            held.add(new)
            known, until = _bounded(pa.concat_tables([known, new]), until, wanted)
            if not since and held.all:
                break
        self._rows, self._until = known.combine_chunks(), until

    def _subscribed(self, rows: pa.Table) -> pa.Table:
        topics = pc.unique(rows["topic"]).to_pylist()
        mine = [topic for topic in topics if topic is None or self._subscription.matches(topic)]
        return rows if len(mine) == len(topics) else rows.filter(pc.is_in(rows["topic"], pa.array(mine, pa.string())))

    @staticmethod
    def _above(rows: pa.Table, floor: Positions) -> pa.Table:
        return rows.filter(pc.greater(rows["next_offset"], _lookup(rows, floor))) if rows.num_rows else rows


def _lookup(rows: pa.Table, positions: Mapping[Queue, int]) -> pa.ChunkedArray:
    """Each row's queue's position; 0 for a queue that has none."""
    names = pa.array([f"{topic} {queue_id}" for topic, queue_id in positions], pa.string())
    at = pc.index_in(_queue_names(rows), value_set=names)
    return pc.fill_null(pa.array(list(positions.values()), pa.int64()).take(at), 0)


def _queue_names(rows: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(rows["topic"], pc.cast(rows["queue_id"], pa.string()), " ")


def _bounded(rows: pa.Table, until: int, wanted: Ranges) -> tuple[pa.Table, int]:
    """Few enough rows to keep: those of the ranges, and of the others the oldest; with the version they reach."""
    if rows.num_rows <= 2 * CACHE_ROWS_MAX:
        return rows, until
    versions = pc.array_sort_indices(rows["version"])
    cut = rows["version"][versions[CACHE_ROWS_MAX].as_py()].as_py()
    ends = {queue: stop for queue, (_, stop) in wanted.items()}
    needed = pc.fill_null(pc.less(rows["queue_offset"], _lookup(rows, ends)), True)
    return rows.filter(pc.or_(needed, pc.less(rows["version"], cut))), min(until, cut)


class _Held:
    """Counts how much of some ranges the placements seen so far hold."""

    def __init__(self, ranges: Ranges) -> None:
        self._starts = {queue: first for queue, (first, _) in ranges.items()}
        self._ends = {queue: stop for queue, (_, stop) in ranges.items()}
        self._left = {f"{topic} {q}": stop - first for (topic, q), (first, stop) in ranges.items() if first < stop}

    def add(self, rows: pa.Table) -> None:
        placed = rows.filter(pc.is_valid(rows["queue_offset"]))
        if placed.num_rows == 0:
            return
        first = pc.max_element_wise(placed["queue_offset"], _lookup(placed, self._starts))
        stop = pc.min_element_wise(placed["next_offset"], _lookup(placed, self._ends))
        held = pa.table({"queue": _queue_names(placed), "n": pc.max_element_wise(pc.subtract(stop, first), 0)})
        sums = held.group_by("queue", use_threads=False).aggregate([("n", "sum")])
        for queue, n in zip(sums["queue"].to_pylist(), sums["n_sum"].to_pylist(), strict=True):
            if queue in self._left:
                self._left[queue] -= n

    @property
    def all(self) -> bool:
        return all(n <= 0 for n in self._left.values())


# ---------------------------------------------------------------- how much a trigger takes
def admit(start: Positions, latest: Positions, limit: int | None) -> Positions:
    """The end of a micro-batch of at most ``limit`` messages (None: no limit).

    Each queue gets one message, and of the rest a part as large as its part of what waits. When the limit is below the
    number of queues that wait, they take turns.

    Returns
    -------
    dict
        An offset for every queue of ``start`` and every other one that has messages.
    """
    waiting = {queue: end - start.get(queue, 0) for queue, end in sorted(latest.items()) if end > start.get(queue, 0)}
    if limit is None or sum(waiting.values()) <= limit:
        taken = waiting
    else:
        # The sum of the offsets moves on with every trigger, and with it the queue whose turn it is.
        order = sorted({*start, *latest})
        turn = sum(start.values()) % len(order)
        taken = _share([(q, waiting[q]) for q in order[turn:] + order[:turn] if q in waiting], limit)
    queues = {*start, *(queue for queue, end in latest.items() if end > 0)}
    return {queue: start.get(queue, 0) + taken.get(queue, 0) for queue in sorted(queues)}


def _share(waiting: Sequence[tuple[Queue, int]], limit: int) -> dict[Queue, int]:
    """Share out fewer messages than wait; who stands first comes first where it does not come out even."""
    first = waiting[:limit]
    taken = {queue: 1 for queue, _ in first}
    rest = limit - len(first)
    lags = {queue: lag - 1 for queue, lag in first if lag > 1}
    total = sum(lags.values())
    if rest == 0 or total == 0:
        return taken
    for queue, lag in lags.items():
        taken[queue] += rest * lag // total
    left = limit - sum(taken.values())
    for queue, lag in lags.items():
        if left and taken[queue] - 1 < lag:
            taken[queue] += 1
            left -= 1
    return taken


# ---------------------------------------------------------------- partitions
def split(
    ranges: Sequence[PlacedRange],
    ordered: bool = False,
    partitions_min: int | None = None,
    partition_records_max: int | None = None,
) -> list[list[PlacedRange]]:
    """Share ranges out to partitions.

    Parameters
    ----------
    ranges : sequence of PlacedRange
        By queue and offset.
    ordered : bool
        Each queue is read in one partition, in order. Otherwise rows that lie together are read together: no file is
        read twice, and messages come in the order in which they lie there.
    partitions_min : int, optional
        At least so many partitions (as many as there are messages, when those are fewer), of equal size.
    partition_records_max : int, optional
        At most so many messages in a partition.
    """
    if ordered:
        return [list(queue) for _, queue in groupby(ranges, key=lambda r: (r.topic, r.queue_id))]
    laid = sorted(ranges, key=lambda r: (r.commit_timestamp, r.rows.half_id, r.rows.file_no, r.rows.ranges[0]))
    total = sum(r.count for r in laid)
    if partitions_min is None and partition_records_max is None:
        return _blocks(laid)
    count = max(partitions_min or 1, -(-total // (partition_records_max or max(total, 1))))
    count = min(count, total)
    return list(_cut_at(laid, [total * i // count for i in range(1, count + 1)])) if count else []


def _cut_at(ranges: Sequence[PlacedRange], ends: Sequence[int]) -> Iterator[list[PlacedRange]]:
    """The messages up to each of these positions, which ascend to the number of all."""
    part: list[PlacedRange] = []
    position, at = 0, 0
    for whole in ranges:
        offset, stop = whole.queue_offset, whole.queue_offset + whole.count
        while offset < stop:
            take = min(stop - offset, ends[at] - position)
            part.append(whole.cut(offset, offset + take))
            offset, position = offset + take, position + take
            if position == ends[at]:
                yield part
                part, at = [], at + 1


def _blocks(laid: Sequence[PlacedRange]) -> list[list[PlacedRange]]:
    """Whole blocks of row groups, so that no row group is read twice; small ones share a partition."""
    found: list[list[PlacedRange]] = []
    rows = 0
    for _, block in groupby(_by_block(laid), key=lambda piece: piece[0]):
        pieces = [piece for _, piece in block]
        count = sum(piece.count for piece in pieces)
        if not found or rows + count > BLOCK_ROWS:
            found.append([])
            rows = 0
        found[-1] += pieces
        rows += count
    return found


def _by_block(laid: Sequence[PlacedRange]) -> Iterator[tuple[tuple[object, ...], PlacedRange]]:
    for whole in laid:
        rows = whole.rows
        first_block, last_block = rows.ranges[0][0] // BLOCK_ROWS, rows.ranges[-1][1] // BLOCK_ROWS
        offset = whole.queue_offset
        for block in range(first_block, last_block + 1):
            low, high = block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS
            count = sum(max(0, min(b + 1, high) - max(a, low)) for a, b in rows.ranges)
            if count:
                piece = whole if count == whole.count else whole.cut(offset, offset + count)
                yield (whole.commit_timestamp, rows.half_id, rows.file_no, block), piece
            offset += count
