"""Which messages ``txmq read`` shows: those from an offset on, or the newest ones."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from rmq_spark._core.client.commit_log import CommitLog
from rmq_spark._core.messages.reading import read_messages
from rmq_spark.errors import OffsetOutOfRangeError, OptionError

FILTERED_SPAN = 1000
"""Offsets of a queue that are looked at first for messages that a filter keeps."""
SPAN_GROWS = 4

Offsets = Mapping[int, int]
"""An offset by queue_id."""


@dataclass(frozen=True)
class Choice:
    """Messages of a topic: of some queues, that a filter keeps."""

    log: CommitLog
    topic: str
    queue: int | None = None
    """None stands for all queues."""
    tags: str | None = None
    selector: str | None = None

    def first(self, start: Offsets, limit: int) -> pa.Table:
        """Return at most so many messages from these offsets on, the lowest queues first.

        Parameters
        ----------
        start : mapping of int to int
            A queue that is not named is read from its first message that is kept.
        """
        return self._of_what_is_kept(lambda firsts, ends: self._between({**firsts, **start}, ends, limit))

    def newest(self, count: int) -> pa.Table:
        """Return the newest messages by the time of their commit, in (queue, offset) order.

        It looks at the ends of the queues, and further back only while the filter has not kept enough.
        """
        return self._of_what_is_kept(lambda firsts, ends: self._newest(count, firsts, ends))

    def ends(self) -> dict[int, int]:
        """Return the next offset of each queue."""
        return self._bounds()[1]

    def newest_before(self, count: int, ends: Offsets) -> pa.Table:
        """Return the newest messages before these offsets: see :meth:`newest`."""
        return self._of_what_is_kept(
            lambda firsts, now: self._newest(count, firsts, {q: min(ends.get(q, end), end) for q, end in now.items()})
        )

    def since(self, start: Offsets) -> tuple[pa.Table, dict[int, int]]:
        """Return the messages from these offsets on, and the offsets where they end. Queues that began to move later
        are read from their first message that is kept."""
        reached: dict[int, int] = {}

        def read(firsts: Offsets, ends: Offsets) -> pa.Table:
            begin = {queue: max(start.get(queue, 0), first) for queue, first in firsts.items()}
            behind = {queue: end for queue, end in ends.items() if begin[queue] < end}
            reached.update({queue: max(end, start.get(queue, 0)) for queue, end in ends.items()})
            return self._between({q: begin[q] for q in behind}, behind, None)

        return self._of_what_is_kept(read), reached

    def _newest(self, count: int, firsts: Offsets, ends: Offsets) -> pa.Table:
        found: dict[int, list[tuple[datetime, int]]] = {queue: [] for queue in ends}
        below = dict(ends)
        span = count if self.tags is None and self.selector is None else max(count, FILTERED_SPAN)
        while True:
            wanted = [q for q in ends if len(found[q]) < count and below[q] > firsts[q]]
            if not wanted:
                break
            start = {q: max(firsts[q], below[q] - span) for q in wanted}
            rows = self._between(
                start, {q: below[q] for q in wanted}, None, ["queue_id", "queue_offset", "commit_timestamp"]
            )
            for row in rows.to_pylist():
                found[row["queue_id"]].append((row["commit_timestamp"], row["queue_offset"]))
            below |= start
            span *= SPAN_GROWS
        each = [(when, offset, queue) for queue, of_queue in found.items() for when, offset in of_queue]
        since: dict[int, int] = {}
        for _, offset, queue in heapq.nlargest(count, each):
            since[queue] = min(offset, since.get(queue, offset))
        return self._between(since, {q: ends[q] for q in since}, None)

    def _of_what_is_kept(self, read: Callable[[Offsets, Offsets], pa.Table]) -> pa.Table:
        """Read between the first offsets and the ends; again, when messages expired meanwhile."""
        while True:
            firsts, ends = self._bounds()
            try:
                return read(firsts, ends)
            except OffsetOutOfRangeError:
                if self._bounds()[0] == firsts:
                    raise

    def _bounds(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the first offset that is kept and the next offset of each queue."""
        queues = self.log.engine.require_topic(self.topic)
        if self.queue is not None and not 0 <= self.queue < queues:
            raise OptionError(f"--queue {self.queue}: topic {self.topic!r} has the queues 0 to {queues - 1}")
        tails = self.log.engine.tails()
        kept = self.log.engine.firsts(refresh=False)
        chosen = range(queues) if self.queue is None else [self.queue]
        return {q: kept.get((self.topic, q), 0) for q in chosen}, {q: tails.get((self.topic, q), 0) for q in chosen}

    def _between(
        self, start: Offsets, stop: Offsets, limit: int | None, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return messages of the queues in ``stop`` alone, up to these offsets (excluded)."""
        queues = self.log.engine.require_topic(self.topic)
        ends = {(self.topic, queue): offset for queue, offset in stop.items()}
        begins = {**dict.fromkeys(range(queues), 0), **start}
        return read_messages(
            self.log.engine,
            ends,
            self.topic,
            queues,
            begins,
            limit,
            columns,
            tags=self.tags,
            selector=self.selector,
        )
