"""A queue as its member works on it: what is fetched, what runs, and how far all is finished.

::

    offset        40        43        47               60
                  │ runs    │ done    │ runs, or waits │ not fetched yet
    progress      40: the lowest unfinished offset     fetched_to

After a crash the messages from there on come again, those that were done as well. ``max_span`` bounds how many.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.groups import Claim

Queue = tuple[str, int]


@dataclass(eq=False)
class Take:
    """Messages of one queue that are out since a time of the monotonic clock, in offset order. They are unfinished from
    ``first`` on."""

    queue: ProcessQueue
    messages: pa.Table
    first: int
    since_s: float

    @property
    def finished(self) -> int:
        """How many of its messages lie below ``first``."""
        return int(pc.sum(pc.less(self.messages["queue_offset"], self.first)).as_py() or 0)


@dataclass(frozen=True)
class HeldUp:
    """Why a queue could not be read, for how many seconds it waits, and until when by the monotonic clock."""

    problem: Exception
    pause_s: float
    again_s: float


class ProcessQueue:
    """A claimed queue (RocketMQ: ``ProcessQueue``). Who uses it holds its member's lock.

    Attributes
    ----------
    fetched_to : int
        The next offset to fetch.
    written : int
        The progress that the log has.
    lost : bool
        True when somebody else has the queue. What is still running ends, and is not counted.
    releasing : bool
        True when it is released as soon as nothing of it runs.
    again_s : float
        By the monotonic clock, until when an orderly queue is suspended.
    tries : int
        How often in a row an orderly queue has stopped at its first message.
    held_up : HeldUp, optional
        Set when it could not be read the last time.
    """

    def __init__(self, queue: Queue, claim: Claim) -> None:
        self.queue = queue
        self.generation, self.epoch = claim.generation, claim.epoch
        self.fetched_to = self.written = claim.next_offset
        self.lost = self.releasing = False
        self.again_s = 0.0
        self.tries = 0
        self.held_up: HeldUp | None = None
        self.rows = 0
        self._waiting: deque[pa.Table] = deque()
        self._out: list[Take] = []

    @property
    def is_open(self) -> bool:
        """Whether more may be fetched and taken."""
        return not (self.lost or self.releasing)

    def is_held_up(self, now_s: float) -> bool:
        """Whether it is not read yet, for it could not be read the last time."""
        return self.held_up is not None and now_s < self.held_up.again_s

    @property
    def running(self) -> int:
        """Takes that are not finished."""
        return len(self._out)

    @property
    def lowest(self) -> int:
        """The lowest unfinished offset."""
        waiting = [_first(self._waiting[0])] if self._waiting else []
        return min([take.first for take in self._out] + waiting + [self.fetched_to])

    def put(self, messages: pa.Table, fetched_to: int) -> None:
        """Add what was fetched; a filter may have left none of it."""
        self.fetched_to = fetched_to
        if messages.num_rows:
            self._waiting.append(messages)
            self.rows += messages.num_rows

    def runs_since(self, since_s: float) -> bool:
        """Whether a take is not finished that began at this time or later."""
        return any(take.since_s >= since_s for take in self._out)

    def take(self, count: int, now_s: float = 0.0) -> Take | None:
        """Take at most so many messages; None when none wait."""
        if not self._waiting:
            return None
        messages = self._waiting.popleft()
        if messages.num_rows > count:
            self._waiting.appendleft(messages.slice(count))
            messages = messages.slice(0, count)
        self.rows -= messages.num_rows
        take = Take(self, messages, _first(messages), now_s)
        self._out.append(take)
        return take

    def give_back(self, take: Take, at: int) -> None:
        """A take is finished up to a row. The messages from there on come again, before later ones that wait."""
        self._out.remove(take)
        self._wait_again(take.messages.slice(at))

    def cut(self, take: Take, at: int) -> None:
        """A take ends before a row. The messages from there on come again, and those before it are still out."""
        rest, take.messages = take.messages.slice(at), take.messages.slice(0, at)
        self._wait_again(rest)

    def _wait_again(self, rest: pa.Table) -> None:
        if rest.num_rows and self.is_open:
            # Takes come back in any order, and the first that waits must stay the lowest.
            first = _first(rest)
            at = next((n for n, other in enumerate(self._waiting) if _first(other) > first), len(self._waiting))
            self._waiting.insert(at, rest)
            self.rows += rest.num_rows
        elif rest.num_rows:  # nobody takes them here any more, and the progress stays below them
            self.fetched_to = min(self.fetched_to, _first(rest))

    def drop_waiting(self) -> None:
        """Forget what nobody has taken: the queue is read from there again, by whoever has it then."""
        if self._waiting:
            self.fetched_to = min(self.fetched_to, _first(self._waiting[0]))
        self._waiting.clear()
        self.rows = 0


def _first(messages: pa.Table) -> int:
    return int(messages["queue_offset"][0].as_py())
