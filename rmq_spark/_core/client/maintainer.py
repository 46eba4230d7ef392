"""Does the upkeep of a commit log at intervals, in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.log_records import failure
from rmq_spark._core.upkeep.fence_pruner import FencePruner
from rmq_spark._core.upkeep.leave import Graces
from rmq_spark._core.upkeep.schedule import MaintenanceReport, maintain
from rmq_spark._core.vocabulary.options import MAINTENANCE_INTERVAL_S, Duration, seconds

logger = logging.getLogger(__name__)

ORPHANS_EVERY_S = 3600.0
"""Seconds between two searches for orphans of crashes. A search lists all files; orphans younger than 7 days stay."""
FENCES_S_MAX = 5.0
"""Seconds of a round for pruning fence rows. The next round goes on."""
FENCES_ONCE_S_MAX = 60.0
"""The same for a single round."""


class Maintainer:
    """Calls :meth:`CommitLog.maintain` at intervals.

    Parameters
    ----------
    log : CommitLog
        Each round opens a handle of its own.
    interval : float or str
        Seconds between two rounds, with jitter.
    graces : Graces
    turn : context manager, optional
        Entered while a round has messages in memory: :attr:`Draining.turn`, when this process also drains the log.
    fences : FencePruner, optional
        Prunes fence rows after each round.
    """

    def __init__(
        self,
        log: CommitLog | Engine,
        interval: Duration = MAINTENANCE_INTERVAL_S,
        graces: Graces | None = None,
        turn: AbstractContextManager[object] | None = None,
        fences: FencePruner | None = None,
    ) -> None:
        self.engine = engine_of(log)
        self.interval = seconds(interval, "interval", above=True)
        self.graces = graces or Graces()
        self.turn = nullcontext() if turn is None else turn
        self.fences = fences
        self._looked_s: float | None = None  # when orphans were last looked for

    def run_once(self) -> MaintenanceReport:
        """Do a single round."""
        report = self._keep_up()
        self._prune_fences(FENCES_ONCE_S_MAX)
        return report

    def _keep_up(self) -> MaintenanceReport:
        now_s = self.engine.runtime.monotonic()
        orphans = self._looked_s is None or now_s - self._looked_s >= ORPHANS_EVERY_S
        report = maintain(self.engine, self.graces, orphans=orphans, turn=self.turn)
        self._looked_s = now_s if orphans else self._looked_s
        return report

    def run(self, stop_event: threading.Event, on_report: Callable[[MaintenanceReport], None] | None = None) -> None:
        """Do rounds until the event is set, the first after one interval. A failed round is logged; the next follows.

        Parameters
        ----------
        stop_event : threading.Event
        on_report : callable, optional
            Called with the report of each round.
        """
        while not stop_event.wait(self.engine.runtime.jittered(self.interval)):
            try:
                report = self._keep_up()
            except Exception as problem:
                logger.warning("upkeep of %r failed: %s", self.engine, failure(problem))
                continue
            if on_report is not None:
                on_report(report)
            self._prune_fences(FENCES_S_MAX, stop_event.is_set)

    def _prune_fences(self, seconds_max: float, is_over: Callable[[], bool] = lambda: False) -> None:
        if self.fences is None:
            return
        try:
            self.fences.run(seconds_max, is_over)
        except Exception as problem:
            logger.warning("pruning of fence rows failed: %s", failure(problem))
