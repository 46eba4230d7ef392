"""Planning a read: which offsets, how much of them a trigger takes, and how partitions share it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from rmq_spark._core.log.input import require_known_topic
from rmq_spark._core.log.placements import MessageRange, PlacedRange, Placements, out_of_range
from rmq_spark._core.reads.offsets import CountedPositions, Positions, Queue, resolve
from rmq_spark._core.vocabulary.message import RETRY_PREFIX
from rmq_spark.errors import CorruptLogError, OffsetOutOfRangeError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.reads.options import Subscription

    pass

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

BLOCK_ROWS = 262_144
"""Messages of a partition when no option says otherwise: four row groups of a half file, about 75 MB."""


class Planner:
    """Plans reads of one subscription.

    Parameters
    ----------
    log : Engine
        Of this planner alone.
    subscription : Subscription
    fail_on_data_loss : bool
        False: messages that the log does not hold are skipped with a warning.
    """

    def __init__(self, log: Engine, subscription: Subscription, fail_on_data_loss: bool = True) -> None:
        self.log = log
        self._subscription = subscription
        self._fail_on_data_loss = fail_on_data_loss
        self._placements = Placements(log, subscription.matches)

    @property
    def rows_kept(self) -> int:
        """How many placements are kept in memory."""
        return self._placements.rows_kept

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
        pattern = self._subscription.pattern
        if pattern is not None and not any(map(self._subscription.matches, topics)):
            known = ", ".join(sorted(topics)) or "none yet"
            logger.warning("subscribePattern=%r matches no topic (there are: %s): nothing is read", pattern, known)
        return {name: count for name, count in topics.items() if self._subscription.matches(name)}

    def latest(self, refresh: bool = True) -> Positions:
        """The next offset of every queue subscribed to that has messages."""
        return self._placements.latest(refresh)

    def resolve(self, option: str, given: str | Positions | datetime) -> Positions:
        """Offsets for ``earliest``, ``latest``, offsets (with Kafka's -1, -2), or a commit time.

        For a time it is each queue's first message that was committed then or later; a queue without one starts (or
        ends) at its end. Spark's Kafka source fails in that case unless told otherwise.
        """
        latest = self.latest()
        firsts = self.log.firsts(refresh=False)
        if isinstance(given, datetime):
            starts = {(topic, q): 0 for topic, count in self.queues().items() for q in range(count)}
            first = self._placements.first_since(given)
            found = {queue: min(end, first.get(queue, end)) for queue, end in (starts | latest).items()}
            return {queue: max(offset, firsts.get(queue, 0)) for queue, offset in found.items()}
        queues = self.queues()
        marks: tuple[int, ...] = ()
        if isinstance(given, CountedPositions):
            marks = given.marks
            if given.log_id not in (None, self.log.id):
                raise OffsetOutOfRangeError(
                    f"{option} counts in commit log {given.log_id!r}, and this is commit log {self.log.id}: it was "
                    "made anew, or is another one. Use 'earliest', or offsets of this log"
                )
            # A progress report has a group's retries, too.
            given = {q: n for q, n in given.items() if q[0] in queues or not q[0].startswith(RETRY_PREFIX)}
        if isinstance(given, dict) and (retry := self._subscription.retry) in queues and retry is not None:
            given = {(retry, queue_id): 0 for queue_id in range(queues[retry])} | given  # nobody names it
        return resolve(option, given, queues, latest, firsts, marks)

    # ------------------------------------------------------------------ a stream's offsets
    def require_start(self, start: Positions, latest: Positions, whose: str = "the checkpoint") -> Positions:
        """A stream's start, from its checkpoint or its group, without what this log or subscription does not have.

        Raises
        ------
        OffsetOutOfRangeError
            When it lies past the end of a queue: the checkpoint belongs to another log, or the log was made anew.
        """
        found = self._firsts()
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

    def _firsts(self) -> Positions:
        """Where queues start of which messages have expired: a queue without a position starts at its first offset."""
        firsts = self.log.firsts(refresh=False)
        return {queue: first for queue, first in firsts.items() if self._subscription.matches(queue[0])}

    def forget(self, start: Positions) -> None:
        """Drop what a stream has read, so that memory does not grow with it."""
        self._placements.forget(start)

    # ------------------------------------------------------------------ ranges
    def ranges(self, start: Positions, end: Positions) -> list[MessageRange]:
        """The half rows of every queue's offsets from ``start`` (included) to ``end`` (excluded), by queue and offset.

        Raises
        ------
        OffsetOutOfRangeError
            When the log does not hold all of them, unless data loss is to be skipped.
        """
        found, missing = self._looked_again(lambda: self._placements.between(self._firsts() | start, end))
        for queue, first, stop in missing:
            self._lost(out_of_range(*queue, first, stop, self._firsts()))
        return found

    def tail(self, start: Positions, end: Positions) -> tuple[Mapping[Queue, int], list[PlacedRange]]:
        """The border, below which the table ``messages`` has all; and the ranges above it, as :meth:`ranges` does."""
        (border, found), missing = self._looked_again(lambda: self._tail(self._firsts() | start, end))
        for queue, first, stop in missing:
            self._lost(out_of_range(*queue, first, stop, self._firsts()))
        return border, [placed for queue in sorted(found) for placed in found[queue]]

    def _tail(
        self, start: Positions, end: Positions
    ) -> tuple[tuple[Mapping[Queue, int], Mapping[Queue, list[PlacedRange]]], list[tuple[Queue, int, int]]]:
        border, found, missing = self._placements.tail(start, end)
        return (border, found), missing

    def _looked_again(
        self, look: Callable[[], tuple[Found, list[tuple[Queue, int, int]]]]
    ) -> tuple[Found, list[tuple[Queue, int, int]]]:
        """Look at the newest state before anything counts as damaged or lost: this process may have been stopped for
        longer than the log keeps what was replaced."""
        with suppress(CorruptLogError):
            found, missing = look()
            if not missing:
                return found, missing
        for table in self.log.looked_at():
            table.refresh()
        self._placements = Placements(self.log, self._subscription.matches)
        return look()

    def _lost(self, what: str) -> None:
        if self._fail_on_data_loss:
            raise OffsetOutOfRangeError(f"{what}. failOnDataLoss=false skips them, for good")
        logger.warning("skipped, because failOnDataLoss=false: %s", what)


# ---------------------------------------------------------------- how much a trigger takes
def admit(start: Positions, latest: Positions, limit: int | None) -> Positions:
    """The end of a micro-batch of at most ``limit`` messages (None: no limit).

    Each queue gets one message, and a share of the rest in proportion to its backlog. When the limit is below the
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
    ranges: Sequence[MessageRange],
    ordered: bool = False,
    partitions_min: int | None = None,
    partition_records_max: int | None = None,
) -> list[list[MessageRange]]:
    """Share ranges out to partitions.

    Parameters
    ----------
    ranges : sequence of MessageRange
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
    laid = sorted(ranges, key=lambda r: (r.file, r.rows.ranges[0]))
    total = sum(r.count for r in laid)
    if partitions_min is None and partition_records_max is None:
        return _blocks(laid)
    count = max(partitions_min or 1, -(-total // (partition_records_max or max(total, 1))))
    count = min(count, total)
    return list(_cut_at(laid, [total * i // count for i in range(1, count + 1)])) if count else []


def _cut_at(ranges: Sequence[MessageRange], ends: Sequence[int]) -> Iterator[list[MessageRange]]:
    """Ranges cut after each of these numbers of messages; the last is that of all."""
    part: list[MessageRange] = []
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


def _blocks(laid: Sequence[MessageRange]) -> list[list[MessageRange]]:
    """Whole blocks of row groups, so that no row group is read twice; small ones share a partition."""
    found: list[list[MessageRange]] = []
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


def _by_block(laid: Iterable[MessageRange]) -> Iterator[tuple[tuple[object, ...], MessageRange]]:
    """Ranges cut into blocks of row groups, each piece with its file and the number of its block."""
    for whole in laid:
        rows = whole.rows
        first_block, last_block = rows.ranges[0][0] // BLOCK_ROWS, rows.ranges[-1][1] // BLOCK_ROWS
        offset = whole.queue_offset
        for block in range(first_block, last_block + 1):
            low, high = block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS
            count = sum(max(0, min(b + 1, high) - max(a, low)) for a, b in rows.ranges)
            if count:
                piece = whole if count == whole.count else whole.cut(offset, offset + count)
                yield (*whole.file, block), piece
            offset += count
