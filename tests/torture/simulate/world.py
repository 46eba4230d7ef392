"""What the protocol's code runs on in a simulation: a log on simulated tables, and a machine whose clock, locks,
threads and ids are the scheduler's. Of the product only that machine is another one; every process starts cold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, CommitLog, LocalTransactionState
from rmq_spark._core.log import op_view as follow
from rmq_spark._core.log.log_tables import LogTables
from rmq_spark._core.log.staged_batches import PrepareError
from rmq_spark._core.protocol.engine import Engine
from rmq_spark.errors import VerdictConflictError
from tests.support.inside import (
    HALF_SCHEMA,
    MESSAGES_SCHEMA,
    OP_SCHEMA,
    TOPICS_SCHEMA,
    Change,
    Decided,
    Decision,
    HalfRecord,
    HalfWriter,
    Placed,
    RowSet,
    Runtime,
    Staged,
    Table,
    Who,
    drained_up_to,
    marking,
    op_merge,
    op_reader,
    pruning,
    stripping,
    table_files,
)
from tests.torture.judge.history import History, Kind, Phase
from tests.torture.simulate import store
from tests.torture.simulate.scheduler import EPOCH_S, Process, Scheduler, SimulatedEvent, SimulatedLock, SimulatedThread
from tests.torture.simulate.store import Files, SimulatedTable, Weather

TOPIC = "orders"
CLOCK_OFFSETS_S = (-86_400.0, -3_600.0, -90.0, -5.0, 5.0, 90.0, 3_600.0, 86_400.0, 3 * 86_400.0)


class World:
    """One run: its chance, its processes, its tables and its history."""

    def __init__(self, chance: random.Random, scheduler: Scheduler, weather: Weather) -> None:
        self.chance = chance
        self.scheduler = scheduler
        self.weather = weather
        self.history = History(clock=lambda: EPOCH_S + scheduler.now)
        self.runtime = SimulatedMachine(scheduler)
        parts = (scheduler, weather, self.history, self.runtime)
        self.half = SimulatedTable("half", HALF_SCHEMA, *parts, Files())
        self.op = SimulatedTable("op", OP_SCHEMA, *parts, Files())
        self.topics = SimulatedTable("topics", TOPICS_SCHEMA, *parts, Files())
        self.messages = SimulatedTable("messages", MESSAGES_SCHEMA, *parts, Files())
        self._keys: dict[str, dict[tuple[int, int], str]] = {}
        self.grouped = 0  # commits that several half batches shared
        self.wrong_clocks = 0.0  # how often a process starts on a machine whose clock is wrong

    def open_log(self) -> SimulatedLog:
        """The log, as a process that has just started opens it."""
        return SimulatedLog(self)

    @property
    def process(self) -> str:
        """Who does something, in the history: a process, or a thread of it."""
        current = self.scheduler.current
        return current.name if current is not None else "main"

    def keys_of(self, half_id: str) -> dict[tuple[int, int], str]:
        """The transaction key of each row of a half batch, as it was prepared. Others may have staged it otherwise."""
        if half_id not in self._keys:
            rows = self.half.ever().select(["half_id", "file_no", "row_no", "transaction_key"])
            found = rows.filter(pc.equal(rows["half_id"], half_id)).to_pylist()
            self._keys[half_id] = {(row["file_no"], row["row_no"]): row["transaction_key"] for row in found}
        return self._keys[half_id]

    def clock_offset_s(self) -> float:
        """How far the clock is ahead of a machine on which a process starts."""
        return self.chance.choice(CLOCK_OFFSETS_S) if self.chance.random() < self.wrong_clocks else 0.0

    def spawn(self, name: str, work: Callable[[], object], immortal: bool = False) -> Process:
        process = Process(name)
        process.immortal = immortal
        self.scheduler.spawn(process, work)
        return process


class SimulatedTables(LogTables):
    """The tables of the simulated store, as one process opens them."""

    def __init__(self, world: World) -> None:
        self.world = world
        super().__init__("simulated:", world.half.another(), world.op.another(), world.topics.another(), 2)

    def messages(self) -> SimulatedTable:
        return self.world.messages.another()

    def has_groups(self) -> bool:
        return False

    def groups(self) -> SimulatedTable:
        raise NotImplementedError("the simulation has no consumer groups")

    def another(self) -> SimulatedTables:
        return SimulatedTables(self.world)


class SimulatedLog(CommitLog):
    """The product's commit log on simulated tables; it notes what it was told of decisions."""

    engine: SimulatedEngine

    def __init__(self, world: World) -> None:
        self.world = world
        super().__init__(SimulatedTables(world))
        self.engine = SimulatedEngine(world)

    def another(self) -> SimulatedLog:
        return self.world.open_log()

    @property
    def seen_version(self) -> int:
        return self.version

    @property
    def read_version(self) -> int:
        """What a reader may have seen: ``messages`` is read later than ``op``, and may be ahead of it."""
        return max(self.version, drained_up_to(self.engine.messages_table))

    def resolve(self, half_id: str, verdict: LocalTransactionState, reason: str) -> list[Placed]:
        placed = super().resolve(half_id, verdict, reason)
        self.world.history.note(
            Kind.RESOLVE, Phase.OK, self.world.process, half_id=half_id, verdict=verdict.value, who="admin"
        )
        return placed


class SimulatedEngine(Engine):
    """The product's engine; it notes what it was told of decisions."""

    def __init__(self, world: World) -> None:
        self.world = world
        super().__init__(SimulatedTables(world))

    def tables(self) -> list[Table]:
        """None: upkeep deletes no files of the simulated store."""
        return []

    def another(self) -> SimulatedEngine:
        return SimulatedEngine(self.world)

    def with_runtime(self, writer: HalfWriter) -> HalfWriter:
        return replace(super().with_runtime(writer), write_file=store.write_table)

    def prepare(self, staged: Sequence[Staged]) -> list[HalfRecord | PrepareError]:
        prepared = super().prepare(staged)
        for found in prepared:
            if isinstance(found, HalfRecord):
                header = found.header
                self.world.history.note(
                    Kind.PREPARE, Phase.OK, self.world.process, half_id=found.half_id, batch_id=header.batch_id
                )
        return prepared

    def decide(self, decisions: Sequence[Decision]) -> list[Decided]:
        decided = super().decide(decisions)
        self.world.grouped += 1
        for d, found in zip(decisions, decided, strict=True):
            verdicts = ((COMMIT_MESSAGE, d.commit), (ROLLBACK_MESSAGE, d.rollback))
            if found.problem is None:
                self._note(Phase.OK, d.record, d.attempt, verdicts, d.who)
            elif isinstance(found.problem, VerdictConflictError):
                self._note(Phase.FAIL, d.record, d.attempt, verdicts, d.who)
        return decided

    def _note(
        self,
        phase: Phase,
        record: HalfRecord,
        attempt: int,
        verdicts: Sequence[tuple[LocalTransactionState, Mapping[int, bytes]]],
        who: Who,
    ) -> None:
        for verdict, rows in verdicts:
            for transaction_id in self._transactions(record, attempt, RowSet(rows)):
                self.world.history.note(
                    Kind.DECIDE, phase, self.world.process, half_id=record.half_id, attempt=attempt,
                    transaction_id=transaction_id, verdict=verdict.value, who=who.value,
                )  # fmt: skip

    def _transactions(self, record: HalfRecord, attempt: int, rows: RowSet) -> list[str]:
        head, per = f"{record.half_id}:{attempt}", record.header.transaction_per
        if per == "batch":
            return [head] if rows else []
        addresses = [(n, i) for n, ranges in rows.ranges() for a, b in ranges for i in range(a, b + 1)]
        if per == "message":
            return [f"{head}:{n}.{i}" for n, i in addresses]
        keys = self.world.keys_of(record.half_id)
        return sorted({f"{head}:{keys[address]}" for address in addresses})


# ---------------------------------------------------------------- the machine
class SimulatedMachine(Runtime):
    """The scheduler's clock, locks and threads, and ids that are the same whenever a seed is played."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._serial = 0

    def time(self) -> float:
        return self._scheduler.machine_s()

    def monotonic(self) -> float:
        return self._scheduler.now

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def random(self) -> float:
        return self._scheduler.chance.random()

    def unique_id(self) -> str:
        self._serial += 1
        return f"{self._serial:012x}{0:020x}"

    def lock(self) -> SimulatedLock:
        return SimulatedLock(self._scheduler)

    def event(self) -> Any:
        return SimulatedEvent(self._scheduler)

    def start_thread(self, work: Callable[[], object], name: str, daemon: bool = False) -> Any:
        return SimulatedThread(self._scheduler, work)


@contextmanager
def limits(op_files_max: int) -> Iterator[None]:
    """Bounds of the product that are low enough for upkeep to happen within a run."""
    found = (
        (op_merge, "OP_FILES_MAX", op_files_max),
        (table_files, "MESSAGES_FILES_MAX", 2),
        (pruning, "PRUNED_SHARE_MIN", 0.0),
        (marking, "ROWS_LET_GO_MIN", 3),
        (stripping, "STRIPPED_BYTES_MIN", 1),
        (follow, "CHUNKS_MAX", 4),
        (op_reader, "HALF_IDS_MAX", 3),
    )
    before = [(module, name, getattr(module, name)) for module, name, _ in found]
    for module, name, value in found:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def create_topic(world: World, name: str, queues: int, fifo: bool = False, retention_s: float | None = None) -> None:
    """As ``CommitLog.create_topic`` does, without the weather."""
    row = {"name": [name], "queues": [queues], "fifo": [fifo], "retention_s": [retention_s], "created": [None]}
    change = Change(add=[world.topics.fs.put("topics", pa.table(row, schema=TOPICS_SCHEMA), "topics", ("name",))])
    assert world.topics.put(1, change)
