"""Plans a read: the offsets, the share of a trigger, and the partitions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from rmq_spark._core.log.message_range import MessageRange, PlacedRange, out_of_range
from rmq_spark._core.messages.placements import Placements
from rmq_spark._core.reads.offsets import CountedPositions, Positions, resolve
from rmq_spark._core.vocabulary.message import RETRY_PREFIX
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import CorruptLogError, OffsetOutOfRangeError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.reads.read_options import Subscription

logger = logging.getLogger(__name__)

Found = TypeVar("Found", bound=tuple[Any, ...])

BLOCK_ROWS = 262_144
"""Default messages of a partition: four row groups of a half file, about 75 MB."""


class Planner:
    """Plans reads of one subscription, by an engine of its own. Without ``fail_on_data_loss``, messages that the log no
    longer holds are skipped with a warning."""

    def __init__(self, engine: Engine, subscription: Subscription, fail_on_data_loss: bool = True) -> None:
        self.engine = engine
        self._subscription = subscription
        self._fail_on_data_loss = fail_on_data_loss
        self._placements = Placements(engine, subscription.matches)

    # ------------------------------------------------------------------ topics and offsets
    def queues(self) -> dict[str, int]:
        """Return the subscribed topics that exist, and their numbers of queues. TopicNotFoundError: the subscription
        names a topic that does not exist."""
        topics = self.engine.topics()
        queues = self._subscription.topics_among(topics)
        pattern = self._subscription.pattern
        if pattern is not None and not any(map(self._subscription.matches, topics)):
            known = ", ".join(sorted(topics)) or "none yet"
            logger.warning("subscribePattern=%r matches no topic (there are: %s): nothing is read", pattern, known)
        return queues

    def latest(self, refresh: bool = True) -> Positions:
        """Return the next offset of every subscribed queue that has messages."""
        return self._placements.latest(refresh)

    def resolve(self, option: str, given: str | Positions | datetime) -> Positions:
        """Return offsets for ``earliest``, ``latest``, offsets (with Kafka's -1, -2), or a commit time.

        A time means each queue's first message that was committed then or later. A queue without one starts (or ends)
        at its end. Spark's Kafka source fails in that case by default.
        """
        latest = self.latest()
        if isinstance(given, datetime):
            starts = {(topic, q): 0 for topic, count in self.queues().items() for q in range(count)}
            return self._placements.starts_since(given, starts | latest)
        queues = self.queues()
        marks: tuple[int, ...] = ()
        if isinstance(given, CountedPositions):
            marks = given.marks
            if given.log_id not in (None, self.engine.id):
                raise OffsetOutOfRangeError(
                    f"{option} counts in commit log {given.log_id!r}, and this is commit log {self.engine.id}: it was "
                    "made anew, or is another one. Use 'earliest', or offsets of this log"
                )
            # A progress report also has the group's retries.
            given = {q: n for q, n in given.items() if q[0] in queues or not q[0].startswith(RETRY_PREFIX)}
        if isinstance(given, dict) and (retry := self._subscription.retry) in queues and retry is not None:
            given = {(retry, queue_id): 0 for queue_id in range(queues[retry])} | given  # users do not name this topic
        return resolve(option, given, queues, latest, self.engine.firsts(refresh=False), marks)

    # ------------------------------------------------------------------ a stream's offsets
    def require_start(self, start: Positions, latest: Positions, whose: str = "the checkpoint") -> Positions:
        """Return a stream's start, from its checkpoint or group, for the queues of this log and subscription.
        OffsetOutOfRangeError: an offset is past the end of its queue, so the checkpoint belongs to another log, or the
        log was made anew."""
        positions = self._firsts()
        for (topic, queue_id), offset in start.items():
            end = latest.get((topic, queue_id), 0)
            if not self._subscription.matches(topic):
                logger.warning("topic %r is in %s, but is not subscribed to any more: left out", topic, whose)
            elif offset <= end:
                positions[(topic, queue_id)] = offset
            else:
                self._lost(
                    f"{whose} has offset {offset} for topic {topic!r}, queue {queue_id}, which ends at {end}: "
                    "it was made with another commit log, or with one restored since. Start a new one"
                )
                positions[(topic, queue_id)] = end
        return positions

    def _firsts(self) -> Positions:
        """Return the first kept offsets of queues with expired messages: a queue without a position starts there."""
        firsts = self.engine.firsts(refresh=False)
        return {queue: first for queue, first in firsts.items() if self._subscription.matches(queue[0])}

    def forget(self, start: Positions) -> None:
        """Drop placements that a stream has read, so that memory does not grow."""
        self._placements.forget(start)

    # ------------------------------------------------------------------ ranges
    def ranges(self, start: Positions, end: Positions) -> list[MessageRange]:
        """Return the rows of every queue's offsets from ``start`` (included) to ``end`` (excluded), by queue and
        offset. OffsetOutOfRangeError: the log does not hold all of them, and data loss is not skipped."""
        placed, missing = self._look_twice(lambda: self._placements.between(self._firsts() | start, end))
        for queue, first, stop in missing:
            self._lost(out_of_range(*queue, first, stop, self._firsts()))
        return placed

    def tail(self, start: Positions, end: Positions) -> tuple[Mapping[Queue, int], list[PlacedRange]]:
        """Return the border, below which the table ``messages`` has all messages, and the ranges above it."""
        border, by_queue, missing = self._look_twice(lambda: self._placements.tail(self._firsts() | start, end))
        for queue, first, stop in missing:
            self._lost(out_of_range(*queue, first, stop, self._firsts()))
        return border, [placed_range for queue in sorted(by_queue) for placed_range in by_queue[queue]]

    def _look_twice(self, look: Callable[[], Found]) -> Found:
        """Look, and look again at the newest state before anything counts as damaged or lost: this process may have
        been stopped for longer than the log keeps replaced files. The missing offsets come last in what is found."""
        with suppress(CorruptLogError):
            found = look()
            if not found[-1]:
                return found
        for table in self.engine.tables_to_refresh():
            table.refresh()
        self._placements = Placements(self.engine, self._subscription.matches)
        return look()

    def _lost(self, what: str) -> None:
        if self._fail_on_data_loss:
            raise OffsetOutOfRangeError(f"{what}. failOnDataLoss=false skips them, for good")
        logger.warning("skipped, because failOnDataLoss=false: %s", what)


# ---------------------------------------------------------------- the share of a trigger
def admit(start: Positions, latest: Positions, limit: int | None) -> Positions:
    """Return the end of a micro-batch of at most ``limit`` messages (None: no limit): an offset for every queue of
    ``start``, and for every other queue that has messages.

    Each queue with a backlog gets one message, and a share of the rest in proportion to its backlog. When the limit is
    below the number of these queues, they take turns.
    """
    backlogs = {queue: end - start.get(queue, 0) for queue, end in sorted(latest.items()) if end > start.get(queue, 0)}
    if limit is None or sum(backlogs.values()) <= limit:
        taken = backlogs
    else:
        # The sum of the offsets grows with every trigger, and so moves the turn to another queue.
        order = sorted({*start, *latest})
        turn = sum(start.values()) % len(order)
        taken = _share([(q, backlogs[q]) for q in order[turn:] + order[:turn] if q in backlogs], limit)
    queues = {*start, *(queue for queue, end in latest.items() if end > 0)}
    return {queue: start.get(queue, 0) + taken.get(queue, 0) for queue in sorted(queues)}


def _share(backlogs: Sequence[tuple[Queue, int]], limit: int) -> dict[Queue, int]:
    """Distribute fewer messages than the backlogs have. The first queues get what cannot be divided evenly."""
    served = backlogs[:limit]
    taken = {queue: 1 for queue, _ in served}
    remaining = limit - len(served)
    lags = {queue: lag - 1 for queue, lag in served if lag > 1}
    total = sum(lags.values())
    if remaining == 0 or total == 0:
        return taken
    for queue, lag in lags.items():
        taken[queue] += remaining * lag // total
    unassigned = limit - sum(taken.values())
    for queue, lag in lags.items():
        if unassigned and taken[queue] - 1 < lag:
            taken[queue] += 1
            unassigned -= 1
    return taken


# ---------------------------------------------------------------- partitions
def partition_ranges(
    ranges: Sequence[MessageRange],
    ordered: bool = False,
    partitions_min: int | None = None,
    partition_records_max: int | None = None,
) -> list[list[MessageRange]]:
    """Distribute ranges, by queue and offset, to partitions of equal size: at least ``partitions_min`` of them (but no
    more than messages), with at most ``partition_records_max`` messages.

    ``ordered``: each queue is read in one partition, in order. Otherwise adjacent rows of a file are read together: no
    file is read twice, and messages come in the file's order.
    """
    if ordered:
        return [list(queue) for _, queue in groupby(ranges, key=lambda r: (r.topic, r.queue_id))]
    by_file = sorted(ranges, key=lambda r: (r.file, r.rows.ranges[0]))
    total = sum(r.count for r in by_file)
    if partitions_min is None and partition_records_max is None:
        return _blocks(by_file)
    count = max(partitions_min or 1, -(-total // (partition_records_max or max(total, 1))))
    count = min(count, total)
    return list(_cut_at(by_file, [total * i // count for i in range(1, count + 1)])) if count else []


def _cut_at(ranges: Sequence[MessageRange], ends: Sequence[int]) -> Iterator[list[MessageRange]]:
    """Cut ranges after each of these numbers of messages, the last of which is their total."""
    partition: list[MessageRange] = []
    position, partition_no = 0, 0
    for whole in ranges:
        offset, stop = whole.queue_offset, whole.queue_offset + whole.count
        while offset < stop:
            take = min(stop - offset, ends[partition_no] - position)
            partition.append(whole.cut(offset, offset + take))
            offset, position = offset + take, position + take
            if position == ends[partition_no]:
                yield partition
                partition, partition_no = [], partition_no + 1


def _blocks(by_file: Sequence[MessageRange]) -> list[list[MessageRange]]:
    """Return partitions of whole blocks of row groups, so that no row group is read twice. Small blocks share one."""
    partitions: list[list[MessageRange]] = []
    rows = 0
    for _, block in groupby(_by_block(by_file), key=lambda piece: piece[0]):
        pieces = [piece for _, piece in block]
        count = sum(piece.count for piece in pieces)
        if not partitions or rows + count > BLOCK_ROWS:
            partitions.append([])
            rows = 0
        partitions[-1] += pieces
        rows += count
    return partitions


def _by_block(by_file: Iterable[MessageRange]) -> Iterator[tuple[tuple[object, ...], MessageRange]]:
    """Cut ranges into blocks of row groups. Yield each piece with its file and its block's number."""
    for whole in by_file:
        rows = whole.rows
        first_block, last_block = rows.ranges[0][0] // BLOCK_ROWS, rows.ranges[-1][1] // BLOCK_ROWS
        offset = whole.queue_offset
        for block in range(first_block, last_block + 1):
            low, high = block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS
            count = sum(max(0, min(last + 1, high) - max(first, low)) for first, last in rows.ranges)
            if count:
                piece = whole if count == whole.count else whole.cut(offset, offset + count)
                yield (*whole.file, block), piece
            offset += count
