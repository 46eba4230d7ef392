"""The messages that ``txmq read`` shows: those from an offset on, or the newest ones."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from rmq_spark._core.messages.message_reader import read_messages
from rmq_spark.errors import OffsetOutOfRangeError, OptionError
from rmq_spark.log import CommitLog

FILTERED_SPAN = 1000
"""Offsets of a queue in the first step of a search for filtered messages. Later steps grow by SPAN_GROWS."""
SPAN_GROWS = 4

Offsets = Mapping[int, int]
"""An offset by queue_id."""


@dataclass(frozen=True)
class Choice:
    """A choice of messages of a topic, by queue and by filter."""

    log: CommitLog
    topic: str
    queue: int | None = None
    """None stands for all queues."""
    tags: str | None = None
    selector: str | None = None

    def first(self, start: Offsets, limit: int) -> pa.Table:
        """Return at most ``limit`` messages from these offsets on, the lowest queues first. Queues without an offset
        are read from their first kept message."""
        return self._read_retained(lambda firsts, ends: self._between({**firsts, **start}, ends, limit))

    def newest(self, count: int) -> pa.Table:
        """Return the newest messages by commit time, in (queue, offset) order.

        It reads the ends of the queues first, and goes further back only while the filter has not kept enough.
        """
        return self._read_retained(lambda firsts, ends: self._newest(count, firsts, ends))

    def ends(self) -> dict[int, int]:
        return self._bounds()[1]

    def newest_before(self, count: int, ends: Offsets) -> pa.Table:
        """Return the newest messages before these offsets: see :meth:`newest`."""
        return self._read_retained(
            lambda firsts, now: self._newest(count, firsts, {q: min(ends.get(q, end), end) for q, end in now.items()})
        )

    def since(self, start: Offsets) -> tuple[pa.Table, dict[int, int]]:
        """Return the messages from these offsets on, and the offsets where they end. Other queues are read from
        their first kept message."""
        reached: dict[int, int] = {}

        def read(firsts: Offsets, ends: Offsets) -> pa.Table:
            begin = {queue: max(start.get(queue, 0), first) for queue, first in firsts.items()}
            behind = {queue: end for queue, end in ends.items() if begin[queue] < end}
            reached.update({queue: max(end, start.get(queue, 0)) for queue, end in ends.items()})
            return self._between({q: begin[q] for q in behind}, behind, None)

        return self._read_retained(read), reached

    def _newest(self, count: int, firsts: Offsets, ends: Offsets) -> pa.Table:
        times: dict[int, list[tuple[datetime, int]]] = {queue: [] for queue in ends}
        below = dict(ends)
        span = count if self.tags is None and self.selector is None else max(count, FILTERED_SPAN)
        while True:
            unfinished = [q for q in ends if len(times[q]) < count and below[q] > firsts[q]]
            if not unfinished:
                break
            start = {q: max(firsts[q], below[q] - span) for q in unfinished}
            rows = self._between(
                start, {q: below[q] for q in unfinished}, None, ["queue_id", "queue_offset", "commit_timestamp"]
            )
            for row in rows.to_pylist():
                times[row["queue_id"]].append((row["commit_timestamp"], row["queue_offset"]))
            below |= start
            span *= SPAN_GROWS
        candidates = [(when, offset, queue) for queue, queue_times in times.items() for when, offset in queue_times]
        first_offsets: dict[int, int] = {}
        for _, offset, queue in heapq.nlargest(count, candidates):
            first_offsets[queue] = min(offset, first_offsets.get(queue, offset))
        return self._between(first_offsets, {q: ends[q] for q in first_offsets}, None)

    def _read_retained(self, read: Callable[[Offsets, Offsets], pa.Table]) -> pa.Table:
        """Call ``read`` with the first kept offsets and the ends; again when messages expired meanwhile."""
        while True:
            firsts, ends = self._bounds()
            try:
                return read(firsts, ends)
            except OffsetOutOfRangeError:
                if self._bounds()[0] == firsts:
                    raise

    def _bounds(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the first kept offset and the next offset of each queue."""
        queues = self.log.engine.require_topic(self.topic)
        if self.queue is not None and not 0 <= self.queue < queues:
            raise OptionError(f"--queue {self.queue}: topic {self.topic!r} has the queues 0 to {queues - 1}")
        tails = self.log.engine.tails()
        firsts = self.log.engine.firsts(refresh=False)
        chosen = range(queues) if self.queue is None else [self.queue]
        return {q: firsts.get((self.topic, q), 0) for q in chosen}, {q: tails.get((self.topic, q), 0) for q in chosen}

    def _between(
        self, start: Offsets, stop: Offsets, limit: int | None, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return messages of the queues in ``stop``, up to its offsets (exclusive)."""
        queues = self.log.engine.require_topic(self.topic)
        ends = {(self.topic, queue): offset for queue, offset in stop.items()}
        begins = {**dict.fromkeys(range(queues), 0), **start}
        return read_messages(
            self.log.engine, ends, self.topic, queues, begins, limit, columns, tags=self.tags, selector=self.selector
        )
