"""A claimed queue: the messages that are fetched, those that run, and the offset up to which all are finished.

::

    offset        40        43        47               60
                  │ runs    │ done    │ runs, or waits │ not fetched yet
    progress      40: the lowest unfinished offset     fetched_to

After a crash, all messages from the progress on come again, finished ones too. ``max_span`` limits their number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.group_table import Claim
from rmq_spark._core.vocabulary.queues import Queue


@dataclass(eq=False)
class Take:
    """Messages of one queue, in offset order, that were taken at a time of the monotonic clock. The messages from the
    offset ``first`` on are unfinished."""

    queue: ProcessQueue
    messages: pa.Table
    first: int
    since_s: float

    @property
    def finished(self) -> int:
        """Number of its messages below ``first``."""
        return int(pc.sum(pc.less(self.messages["queue_offset"], self.first)).as_py() or 0)


@dataclass(frozen=True)
class FetchPause:
    """Why a queue could not be read, its pause in seconds, and the monotonic time at which the pause ends."""

    problem: Exception
    pause_s: float
    until_s: float


class ProcessQueue:
    """A claimed queue (RocketMQ: ``ProcessQueue``). Its callers hold the member's lock. An interrupt may come before
    any line: then messages may be in two places, and come twice, but are never in none.

    ``fetched_to`` is the next offset to fetch, ``written`` the progress that was written to the log. A queue is
    ``lost`` when another member has it; calls that still run do not count. One that is ``releasing`` is released as
    soon as none of its messages run. An orderly queue waits until ``suspended_until_s`` (monotonic), and has stopped
    ``tries`` times in a row at its first message. ``fetch_pause`` is set when the last fetch could not read it.
    """

    def __init__(self, queue: Queue, claim: Claim) -> None:
        self.queue = queue
        self.generation, self.epoch = claim.generation, claim.epoch
        self.fetched_to = self.written = claim.next_offset
        self.lost = self.releasing = False
        self.suspended_until_s = 0.0
        self.tries = 0
        self.fetch_pause: FetchPause | None = None
        self._waiting: deque[pa.Table] = deque()
        self._out: list[Take] = []

    @property
    def is_open(self) -> bool:
        """Whether more messages may be fetched and taken."""
        return not (self.lost or self.releasing)

    def fetch_is_paused(self, now_s: float) -> bool:
        """Whether its pause after a failed fetch lasts."""
        return self.fetch_pause is not None and now_s < self.fetch_pause.until_s

    @property
    def rows(self) -> int:
        """Number of waiting messages."""
        return sum(table.num_rows for table in self._waiting)

    @property
    def running(self) -> int:
        """Number of unfinished takes."""
        return len(self._out)

    @property
    def lowest(self) -> int:
        """The lowest unfinished offset."""
        waiting = [_first_offset(self._waiting[0])] if self._waiting else []
        return min([take.first for take in self._out] + waiting + [self.fetched_to])

    def put(self, messages: pa.Table, fetched_to: int) -> None:
        """Add fetched messages; a filter may have left none."""
        if messages.num_rows:
            self._waiting.append(messages)
        self.fetched_to = fetched_to

    def runs_since(self, since_s: float) -> bool:
        """Whether an unfinished take began at this time or later."""
        return any(take.since_s >= since_s for take in self._out)

    def take(self, count: int, now_s: float = 0.0) -> Take:
        """Take at most ``count`` of the messages that wait."""
        messages, rest = self._waiting[0].slice(0, count), self._waiting[0].slice(count)
        take = Take(self, messages, _first_offset(messages), now_s)
        self._out.append(take)
        if rest.num_rows:
            self._waiting[0] = rest
        else:
            self._waiting.popleft()
        return take

    def give_back(self, take: Take, at: int) -> None:
        """End a take before the row ``at``. The messages from there on come again, before later ones that wait."""
        if take in self._out:
            self._put_back(take.messages.slice(at))
            self._out.remove(take)

    def cut(self, take: Take, at: int) -> None:
        """Shorten a take to the rows before ``at``. The messages from there on come again."""
        self._put_back(take.messages.slice(at))
        take.messages = take.messages.slice(0, at)

    def _put_back(self, rest: pa.Table) -> None:
        if rest.num_rows and self.is_open:
            # Takes come back in any order, and the lowest offset must stay first.
            first = _first_offset(rest)
            at = next((i for i, table in enumerate(self._waiting) if _first_offset(table) > first), len(self._waiting))
            self._waiting.insert(at, rest)
        elif rest.num_rows:  # this member takes no more of them, and its progress stays below them
            self.fetched_to = min(self.fetched_to, _first_offset(rest))

    def drop_waiting(self) -> None:
        """Drop the messages that were not taken. The queue's next owner reads them again."""
        if self._waiting:
            self.fetched_to = min(self.fetched_to, _first_offset(self._waiting[0]))
        self._waiting.clear()


def _first_offset(messages: pa.Table) -> int:
    return int(messages["queue_offset"][0].as_py())
