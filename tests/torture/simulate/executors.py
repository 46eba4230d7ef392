"""Spark's executors in a simulation: processes of their own, which run the parts of a half batch as tasks of a job."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa

from rmq_spark import HalfBatch, TransactionListener
from rmq_spark.errors import LostFileError
from tests.support.inside import HALF_SCHEMA, PartAnswer, PartRows, run_part
from tests.torture.simulate.scheduler import Process, Task
from tests.torture.simulate.world import World

if TYPE_CHECKING:
    from tests.torture.simulate.simulation import Simulation

EXECUTORS = 2
FAILURES_MAX = 2
"""A job ends when a task has failed so often (``spark.task.maxFailures``)."""
SPECULATION = 0.15
"""How often a look at a running task starts another one for the same part."""
LATE = 0.15
LATE_S = (20.0, 90.0, 400.0)
"""So many parts have one more task, which begins so late: its driver may be dead, and the half batch settled."""


class JobFailed(Exception):
    """A task failed too often. Other tasks of the job may go on."""


@dataclass
class _Part:
    """A part of a job: its tasks, and the first answer of one of them, with the time of it."""

    batch: HalfBatch
    tasks: list[Task] = field(default_factory=list)
    answer: PartAnswer | None = None
    answered_at: float = 0.0

    @property
    def running(self) -> int:
        return sum(not task.done for task in self.tasks)

    @property
    def failures(self) -> int:
        return len(self.tasks) - self.running if self.answer is None else 0


class Executors:
    """Runs each part of a half batch in a task, as a job of Spark does: in any order, perhaps twice, two at once, or
    later than the job. An executor dies with all its tasks."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def __call__(self, listener: TransactionListener, parts: Sequence[HalfBatch]) -> list[PartAnswer]:
        simulation, scheduler, chance = self.simulation, self.simulation.scheduler, self.simulation.chance
        simulation.counts["jobs"] += 1
        driver = simulation.world.process
        executors = [Process(f"{driver}/executor{n}") for n in range(EXECUTORS)]
        for executor in executors:
            executor.clock_offset_s = simulation.world.clock_offset_s()
        job = [_Part(batch) for batch in parts]
        for part in chance.sample(job, len(job)):
            self._start(part, executors)
            if chance.random() < LATE and not simulation.at_ease:
                simulation.counts["late tasks"] += 1
                self._start(part, [Process(f"{driver}/late executor")], chance.choice(LATE_S))
            scheduler.step()
        while any(part.answer is None for part in job):
            scheduler.sleep(chance.choice((0.2, 1.0)))
            scheduler.step()
            if not simulation.at_ease and any(part.failures >= FAILURES_MAX for part in job):
                simulation.counts["jobs that failed"] += 1
                return self.failed(job)
            for part in job:
                self._look_after(part, executors)
        return self.answers(job)

    def answers(self, job: Sequence[_Part]) -> list[PartAnswer]:
        return [part.answer for part in job if part.answer is not None]

    def failed(self, job: Sequence[_Part]) -> list[PartAnswer]:
        raise JobFailed(f"a task of {len(job)} failed {FAILURES_MAX} times")

    def _look_after(self, part: _Part, executors: Sequence[Process]) -> None:
        """Start a task again that has failed, or whose executor is dead; and sometimes one beside it."""
        if part.answer is not None or part.running > 1:
            return
        if part.running == 0 or self.simulation.chance.random() < SPECULATION:
            self.simulation.counts["tasks started again"] += 1
            self._start(part, executors)

    def _start(self, part: _Part, executors: Sequence[Process], after_s: float = 0.0) -> None:
        simulation = self.simulation
        alive = [executor for executor in executors if not executor.dead]
        executor = simulation.chance.choice(alive or [Process(f"{simulation.world.process}/another executor")])
        name = f"{executor.name}/part{part.batch.part}.{len(part.tasks)}"
        part.tasks.append(simulation.scheduler.spawn(executor, lambda: self._run(part, after_s), name))

    def _run(self, part: _Part, after_s: float) -> None:
        """A task: the listener and the places of the rows were pickled to its executor."""
        simulation = self.simulation
        simulation.scheduler.sleep(after_s)
        world = simulation.world
        batch = part.batch.read_by(lambda ranges, is_all: RowsOnExecutor(world, ranges, is_all))
        listener: Any = simulation.listener()
        try:
            answer = run_part(listener, batch)
        except (*simulation.expected, LostFileError, sa.exc.OperationalError) as problem:
            simulation.counts[f"tasks that failed: {type(problem).__name__}"] += 1
            return
        simulation.scheduler.step()  # the executor may die before its answer is there
        if part.answer is None:
            part.answer, part.answered_at = pickle.loads(pickle.dumps(answer)), simulation.scheduler.now


class RowsOnExecutor(PartRows):  # type: ignore[misc]
    """The rows of a part, which an executor reads from the simulated store."""

    def __init__(self, world: World, ranges: Sequence[Any], is_all: bool) -> None:
        super().__init__("simulated:", {}, ranges, is_all)
        self._engine = world.open_log().engine

    def read(self, columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([HALF_SCHEMA.field(name) for name in columns])
        tables = [table for wanted in self.ranges() for _, table in self._engine.half.read_range(wanted, columns)]
        return pa.concat_tables([table.cast(schema) for table in tables])
