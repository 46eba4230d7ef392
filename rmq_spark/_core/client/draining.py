"""Drains a commit log at intervals, in the background."""

from __future__ import annotations

import logging
import threading

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.messages.drain import Drainer
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.log_records import failure
from rmq_spark._core.vocabulary.options import DRAIN_EVERY_S, Duration, seconds

logger = logging.getLogger(__name__)

AFTER_FAILURE_S = 60.0
"""Least seconds from a failed drain to the next."""


class Draining:
    """Drains a commit log at intervals.

    Any number may run for one log: all but the fastest find nothing to do.

    Parameters
    ----------
    log : CommitLog
        It is drained through another handle, so no sink waits.
    every : float or str
        Seconds between two drains, with jitter.
    """

    def __init__(self, log: CommitLog | Engine, every: Duration = DRAIN_EVERY_S) -> None:
        self.engine = engine_of(log)
        self.every = seconds(every, "every", above=True)
        self.turn = self.engine.runtime.lock()
        """Held while messages are in this process's memory. A maintainer in the same process takes it, too."""
        self._handle: Engine | None = None

    def run_once(self) -> int:
        """Drain once. Returns the version of ``op`` up to which the log is drained."""
        self._handle = self._handle or self.engine.new_handle()
        with self.turn:
            return Drainer(self._handle).run()

    def run(self, stop_event: threading.Event) -> None:
        """Drain at intervals until the event is set, first after one interval. A drain that fails is logged, and tried
        again no sooner than a minute later."""
        pause_s = self.engine.runtime.jittered(self.every)
        while not stop_event.wait(pause_s):
            pause_s = self.engine.runtime.jittered(self.every)
            try:
                self.run_once()
            except Exception as problem:
                logger.warning("a drain of %r failed: %s", self.engine, failure(problem))
                self._handle = None
                pause_s = max(pause_s, AFTER_FAILURE_S)
