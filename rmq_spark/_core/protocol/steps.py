"""The steps of a send. :mod:`rmq_spark._core.protocol.send` yields them in their order, and a driver runs them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.decision import Decision
from rmq_spark._core.log.op import Who
from rmq_spark._core.log.staged_batches import Staged
from rmq_spark._core.protocol.outcome import Outcome, Run
from rmq_spark._core.protocol.split import Split
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.verdicts import VerdictArray


class Prepare(Staged):
    """Commit staged files to ``half``. The answer is a HalfRecord; AlreadyPreparedError when another run was faster."""


class Execute(NamedTuple):
    """Run the local transaction of rows that only this run may execute. The answer is :class:`Executed`, or None when a
    check was faster."""

    run: Run
    attempt: int
    rows: RowSet


class Executed(NamedTuple):
    """The verdicts on rows that were executed. ``who`` gave them: execute, or a check whose tombstone was faster."""

    batch: HalfBatch
    rows: RowSet
    verdicts: VerdictArray
    who: Who


class Decide(NamedTuple):
    """Commit op markers. The answer is the messages that these markers place."""

    run: Run
    attempt: int
    split: Split
    who: Who

    @property
    def decision(self) -> Decision:
        return self.split.decision(self.run.record, self.attempt, self.who)


class MayBlock(NamedTuple):
    """From here on the send reads tables and may sleep, so it needs a thread of its own."""


class Sleep(NamedTuple):
    """Sleep for this many seconds."""

    seconds: float


Step: TypeAlias = Prepare | Execute | Decide | MayBlock | Sleep
Steps: TypeAlias = Generator[Step, Any, Outcome]


def run_all(steps: Steps, run_step: Callable[[Step], Any]) -> Outcome:
    """Run every step that is left in this thread, and return the outcome of the half batch. ``run_step`` runs one step,
    and returns its answer."""
    answer, problem = None, None
    while True:
        try:
            step = steps.send(answer) if problem is None else steps.throw(problem)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        try:
            answer, problem = run_step(step), None
        except BaseException as raised:
            answer, problem = None, raised
