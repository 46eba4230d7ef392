"""The decisions of a round of checks, several half batches in one commit; and the state of a running round."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from rmq_spark._core.checks.check_report import CheckReport
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.decision import Decided, Decision
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.log_records import of_batch
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.runtime.spans import settling

logger = logging.getLogger(__name__)

TOGETHER_MAX = 256
"""Most half batches of one commit."""
WAITS_S_MAX = 0.5
"""A decision waits at most this many seconds for others, also while a listener is asked."""


class Decisions:
    """Collects decisions to share a commit. A crash loses the decisions that wait, and a later check asks again.
    ``on_problem`` is called with each decision that was not made, and the reason."""

    def __init__(self, engine: Engine, on_problem: Callable[[Decision, Exception], None]) -> None:
        self._engine = engine
        self._on_problem = on_problem
        self._waiting: dict[str, tuple[Decision, HalfBatch]] = {}  # by half id
        self._since_s = 0.0

    def add(self, decision: Decision, batch: HalfBatch, at_once: bool) -> None:
        """Decide soon, or at once."""
        if decision.record.half_id in self._waiting:
            self.make()
        if not self._waiting:
            self._since_s = self._engine.runtime.monotonic()
        self._waiting[decision.record.half_id] = (decision, batch)
        if at_once or len(self._waiting) >= TOGETHER_MAX:
            self.make()

    def make_if_old(self) -> None:
        """Make the waiting decisions, if the oldest has waited long enough."""
        if self._waiting and self._engine.runtime.monotonic() >= self._since_s + WAITS_S_MAX:
            self.make()

    def make(self) -> None:
        waiting, self._waiting = list(self._waiting.values()), {}
        try:
            if len(waiting) > 1:
                self._tell(waiting, self._engine.decide([decision for decision, _ in waiting]))
                return
        except Exception as problem:  # one of them caused it: find which
            logger.debug("%d decisions could not share a commit: %s", len(waiting), problem)
        for decision, batch in waiting:
            self._make_one(decision, batch)

    def _make_one(self, decision: Decision, batch: HalfBatch) -> None:
        d, topics = decision, decision.record.topics
        counts = d.commit.count, d.rollback.count

        def messages() -> pa.Table:
            return batch.messages(["properties"])

        try:
            with settling(self._engine.path, batch.half_id, batch.attempt, str(d.who), *counts, topics, messages):
                (decided,) = self._engine.decide([decision])
                decided.or_raise()
        except Exception as problem:
            self._on_problem(decision, problem)
        else:
            self._tell([(decision, batch)], [decided])

    def _tell(self, decisions: list[tuple[Decision, HalfBatch]], results: list[Decided]) -> None:
        for (decision, batch), decided in zip(decisions, results, strict=True):
            if decided.problem is not None:
                self._on_problem(decision, decided.problem)
                continue
            text = "%r: %d messages are committed, %d rolled back, by %s"
            commit, rollback = decision.commit.count, decision.rollback.count
            logger.debug(text, batch, commit, rollback, decision.who, extra=of_batch(batch))


@dataclass
class OpenRound:
    """The report, the decisions and the time limit of one round."""

    report: CheckReport
    decisions: Decisions
    timeout_s: float | None
    stop: threading.Event
    runtime: Runtime
    began_s: float

    def seconds(self) -> float:
        return self.runtime.monotonic() - self.began_s

    def seconds_left(self) -> float:
        """Seconds left for the round; 0 when the checker is to stop."""
        if self.stop.is_set():
            return 0.0
        return float("inf") if self.timeout_s is None else self.timeout_s - self.seconds()

    def seconds_to_wait(self) -> float:
        """Seconds left for a call of the listener. It makes old decisions first: a hanging call must not delay them."""
        self.decisions.make_if_old()
        return self.seconds_left()
