"""Drains of a commit log, again and again, beside everything else."""

from __future__ import annotations

import logging
import threading

from rmq_spark.commitlog.drain import Drainer
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.undrained import Amount, Undrained
from rmq_spark.config import DRAIN_BYTES, DRAIN_EVERY_S, JITTER, byte_count, seconds
from rmq_spark.logs import failure

logger = logging.getLogger(__name__)

LOOKS = 4
"""Within the time after which a drain is due, it is looked so often how much there is to drain."""
LOOK_S_MAX = 5.0
"""The longest pause between two looks. On a local disk a look that finds nothing new takes a fraction of a millisecond;
an object store is asked for a list."""
AFTER_FAILURE_S = 60.0
"""The pause after a drain that failed."""


class Draining:
    """Drains a commit log when messages have waited for so many seconds, or so many bytes of them wait.

    Any number may run for one log. Most of them look and find that another one was faster.

    Parameters
    ----------
    log : CommitLog
        It is drained through a handle of its own, so no sink waits for it.
    every : float
        Seconds that a message waits before a drain, about.
    bytes_max : int or str
        Bytes of half files that wait: with so many a drain does not wait for the time.
    """

    def __init__(
        self,
        log: CommitLog,
        every: float = DRAIN_EVERY_S,
        bytes_max: int | str = DRAIN_BYTES,
    ) -> None:
        self.log = log
        self.every = seconds(every, "every", above=True)
        self.bytes_max = byte_count(bytes_max, "bytes_max")
        self.turn = log.machine.lock()
        """Held while messages are in this process's memory. Who does the same beside it, such as a maintainer, takes
        it too."""
        self._handle: CommitLog | None = None
        self._undrained: Undrained | None = None
        self._since_s: float | None = None  # when it was first seen that messages wait

    def run_once(self) -> int:
        """Drain what is there now, however little it is; returns the version of ``op`` that is reached."""
        self._look()
        return self._drain()

    def run(self, stop_event: threading.Event) -> None:
        """Look and drain until the event is set. A drain that fails is logged; it is tried again a minute later."""
        pause_s = 0.0
        while not stop_event.wait(pause_s):
            pause_s = self._pause()
            try:
                self.look()
            except Exception as problem:
                logger.warning("a drain of %r failed: %s", self.log, failure(problem))
                self._handle = self._undrained = None
                pause_s = max(pause_s, AFTER_FAILURE_S)

    def look(self) -> int | None:
        """Drain when it is due, and return the version of ``op`` that is reached; None when it is not."""
        found = self._look()
        if found.messages == 0 and found.whole:
            self._since_s = None
            return None
        now_s = self.log.machine.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        if found.whole and found.bytes < self.bytes_max and now_s - self._since_s < self.every:
            return None
        return self._drain()

    def _look(self) -> Amount:
        if self._undrained is None:
            self._handle = self.log.another_on_the_same_log()
            self._undrained = Undrained(self._handle)
        return self._undrained.look(self.bytes_max)

    def _drain(self) -> int:
        handle = self._handle
        assert handle is not None, "whoever drains has looked before"
        self._since_s = None
        with self.turn:
            return Drainer(handle).run()

    def _pause(self) -> float:
        return min(self.every / LOOKS, LOOK_S_MAX) * (1 + JITTER * (2 * self.log.machine.random() - 1))
