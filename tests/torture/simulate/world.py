"""What the protocol's code runs on in a simulation: a log on simulated tables, and clocks, locks and ids of its own.

The seam is a short list of names in the modules under test, replaced for the length of a run. The rest is theirs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone, tzinfo
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pyarrow as pa

from rmq_spark.check import service
from rmq_spark.commitlog import half, half_store, ledger, log, maintenance, table
from rmq_spark.commitlog.half import HALF_SCHEMA, HalfFile, HalfHeader, HalfWriter
from rmq_spark.commitlog.half_store import HalfRecord
from rmq_spark.commitlog.ledger import Ledger, Mask, Placed
from rmq_spark.commitlog.log import TOPICS_SCHEMA, CommitLog
from rmq_spark.commitlog.op import OP_SCHEMA, Who, runs
from rmq_spark.errors import VerdictConflictError
from rmq_spark.sink import producer, two_phase
from rmq_spark.transaction import COMMIT_MESSAGE, ROLLBACK_MESSAGE, LocalTransactionState
from tests.torture.judge.history import History, Kind, Phase
from tests.torture.simulate import store
from tests.torture.simulate.scheduler import EPOCH_S, Process, Scheduler, SimulatedEvent, SimulatedLock, SimulatedThread
from tests.torture.simulate.store import Files, SimulatedTable, Weather

TOPIC = "orders"


class World:
    """One run: its chance, its processes, its tables and its history."""

    def __init__(self, chance: random.Random, scheduler: Scheduler, weather: Weather) -> None:
        self.chance = chance
        self.scheduler = scheduler
        self.weather = weather
        self.history = History(clock=lambda: EPOCH_S + scheduler.now)
        parts = (scheduler, weather, self.history)
        self.half = SimulatedTable("half", HALF_SCHEMA, *parts, Files())
        self.op = SimulatedTable("op", OP_SCHEMA, *parts, Files())
        self.topics = SimulatedTable("topics", TOPICS_SCHEMA, *parts, Files())
        self.keys: dict[tuple[str, int, int], str] = {}  # the transaction keys of staged rows

    def open_log(self) -> SimulatedLog:
        """The log, as a process that has just started opens it."""
        return SimulatedLog(self)

    @property
    def process(self) -> str:
        current = self.scheduler.current
        return current.process.name if current is not None else "main"

    def spawn(self, name: str, work: Callable[[], object], immortal: bool = False) -> Process:
        process = Process(name)
        process.immortal = immortal
        self.scheduler.spawn(process, work)
        return process


class SimulatedLog(CommitLog):
    """The product's commit log on simulated tables; it notes what it was told of decisions."""

    staged: ClassVar[dict[tuple[object, ...], list[tuple[HalfFile, pa.Table]]]] = {}

    def __init__(self, world: World) -> None:
        self.world = world
        tables = (world.half.another(), world.op.another(), world.topics.another())
        super().__init__("simulated:", *tables, default_queues=2)

    def another(self) -> CommitLog:
        return self.world.open_log()

    def _in_background(self, work: Callable[[], None]) -> None:
        current = self.world.scheduler.current
        if current is None:
            work()
        else:
            self.world.scheduler.spawn(current.process, work)

    @property
    def seen_version(self) -> int:
        return self.op.version

    def stage(self, writer: HalfWriter, batches: Sequence[pa.RecordBatch], partition: int = 0) -> list[HalfFile]:
        """What the writer makes of these messages; the same messages are taken from the last time."""
        content = str([batch.to_pydict() for batch in batches])
        known = (writer.header, writer.transaction_key, tuple(writer.topics.items()), partition, content)
        staged = self.staged.get(known)
        if staged is None:
            files = super().stage(writer, batches, partition)
            self.staged[known] = [(f, self.half.table.fs.get(f"half/{f.data.path}")) for f in files]
            return files
        now = self.world.scheduler.wall_s()
        return [
            replace(f, data=self.half.table.fs.put("half", rows, "half", half.STATS_COLUMNS), staged_at=now)
            for f, rows in staged
        ]

    def decide(
        self, record: HalfRecord, attempt: int, *, commit: Mask, rollback: Mask, who: Who, **more: Any
    ) -> list[Placed]:
        verdicts = ((COMMIT_MESSAGE, commit), (ROLLBACK_MESSAGE, rollback))
        try:
            placed = super().decide(record, attempt, commit=commit, rollback=rollback, who=who, **more)
        except VerdictConflictError:
            self._note(Phase.FAIL, record, attempt, verdicts, who)
            raise
        self._note(Phase.OK, record, attempt, verdicts, who)
        return placed

    def resolve(self, half_id: str, verdict: LocalTransactionState, reason: str) -> list[Placed]:
        placed = super().resolve(half_id, verdict, reason)
        self.world.history.note(
            Kind.RESOLVE, Phase.OK, self.world.process, half_id=half_id, verdict=verdict.value, who="admin"
        )
        return placed

    def prepare(self, header: HalfHeader, files: Sequence[HalfFile]) -> HalfRecord:
        record = super().prepare(header, files)
        self.world.history.note(
            Kind.PREPARE, Phase.OK, self.world.process, half_id=record.half_id, batch_id=header.batch_id
        )
        return record

    def _note(
        self,
        phase: Phase,
        record: HalfRecord,
        attempt: int,
        verdicts: Sequence[tuple[LocalTransactionState, Mask]],
        who: Who,
    ) -> None:
        for verdict, mask in verdicts:
            for transaction_id in self._transactions(record, attempt, mask):
                self.world.history.note(
                    Kind.DECIDE, phase, self.world.process, half_id=record.half_id, attempt=attempt,
                    transaction_id=transaction_id, verdict=verdict.value, who=who.value,
                )  # fmt: skip

    def _transactions(self, record: HalfRecord, attempt: int, mask: Mask) -> list[str]:
        head, per = f"{record.half_id}:{attempt}", record.header.transaction_per
        if per == "batch":
            return [head] if mask else []
        rows = [(n, i) for n, bits in mask.items() for a, b in runs(bits) for i in range(a, b + 1)]
        if per == "message":
            return [f"{head}:{n}.{i}" for n, i in rows]
        return sorted({f"{head}:{self.world.keys[record.half_id, n, i]}" for n, i in rows})


# ---------------------------------------------------------------- the seam
class _Time:
    """The module ``time``, for the code under test."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.sleep = scheduler.sleep
        self.time = scheduler.wall_s
        self.monotonic = lambda: scheduler.now
        self.time_ns = lambda: int(scheduler.wall_s() * 1_000_000) * 1000


class _Datetime:
    """The class ``datetime``, as far as the code under test asks it for the time."""

    fromtimestamp = staticmethod(datetime.fromtimestamp)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now(self, zone: tzinfo | None = None) -> datetime:
        return datetime.fromtimestamp(self._scheduler.wall_s(), zone or timezone.utc)


REMEMBERED = ((ledger, "_check_rows"), (ledger, "_settled_rows"), (half_store, "_stored_files"))
"""Functions of tables that do nothing else. Processes that follow one log ask them the same things."""

Answer = TypeVar("Answer")


def remembered(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """The function, which answers from memory what it was asked before about the very same tables."""
    answers: dict[tuple[int | str, ...], tuple[tuple[Any, ...], Answer]] = {}

    def asked(*arguments: Any) -> Answer:
        key = tuple(a if isinstance(a, str) else id(a) for a in arguments)
        if key not in answers:
            answers[key] = (arguments, function(*arguments))  # the arguments too, so that no other gets their id
        return answers[key][1]

    return asked


def read_together(read_since: Callable[..., pa.Table]) -> Callable[..., pa.Table]:
    """``Ledger._read_since``, whose answer depends on the version of ``op`` and its arguments alone."""
    answers: dict[tuple[int, int, int], pa.Table] = {}

    def asked(ledger: Ledger, since: int, until: int) -> pa.Table:
        key = (ledger.table.version, since, until)
        if key not in answers:
            answers[key] = read_since(ledger, since, until)
        return answers[key]

    return asked


def started_together(catch_up: Callable[[Ledger], int]) -> Callable[[Ledger], int]:
    """``Ledger._catch_up``, whose first call on a ledger depends on the version of ``op`` alone."""
    answers: dict[int, dict[str, Any]] = {}

    def asked(ledger: Ledger) -> int:
        if ledger._seen_version >= 0 or ledger._known_whole or ledger._awaited is not None:
            return catch_up(ledger)
        version = ledger.table.version
        if version in answers:
            vars(ledger).update(copied(answers[version]))
        else:
            catch_up(ledger)
            answers[version] = copied({n: v for n, v in vars(ledger).items() if n not in ("table", "_lock", "_placer")})
        return version

    return asked


def copied(value: Any) -> Any:
    """A copy of whatever can change: tables, numbers and words cannot."""
    if isinstance(value, dict):
        return type(value)({key: copied(v) for key, v in value.items()})
    return type(value)(map(copied, value)) if isinstance(value, (list, set)) else value


@contextmanager
def seam(world: World, settings: Mapping[str, int] | None = None) -> Iterator[None]:
    """Put the simulation's clocks, locks, threads and ids in the place of the real ones.

    Parameters
    ----------
    settings : mapping, optional
        Other values for ``OP_FILES_MAX``, ``TAIL_CHUNKS_MAX`` and ``HALF_IDS_KEPT``, so that upkeep happens soon.
    """
    scheduler = world.scheduler
    serial = iter(range(1 << 60))

    def uuid4() -> SimpleNamespace:
        return SimpleNamespace(hex=f"{next(serial):032x}")

    threads = SimpleNamespace(
        RLock=lambda: SimulatedLock(scheduler),
        Event=lambda: SimulatedEvent(scheduler),
        Thread=lambda target, name="", daemon=False: SimulatedThread(scheduler, target),
    )
    clock, calendar = _Time(scheduler), _Datetime(scheduler)
    replaced: list[tuple[Any, str, Any]] = [
        *[(module, "time", clock) for module in (table, half, half_store, maintenance, two_phase, service)],
        *[(module, "datetime", calendar) for module in (ledger, log)],
        *[(module, "threading", threads) for module in (ledger, log, two_phase)],
        *[(module, "uuid4", uuid4) for module in (ledger, producer)],
        (table, "random", world.chance),
        (half, "write_table", store.write_table),
        (half_store, "read_range", store.read_range),
        (ledger, "OP_SCHEMA", SimpleNamespace(empty_table=lambda: store.no_rows(OP_SCHEMA))),
        *[(module, name, remembered(getattr(module, name))) for module, name in REMEMBERED],
        (Ledger, "_read_since", read_together(Ledger._read_since)),
        (Ledger, "_catch_up", started_together(Ledger._catch_up)),
    ]
    names = {"OP_FILES_MAX": maintenance, "TAIL_CHUNKS_MAX": ledger, "HALF_IDS_KEPT": ledger}
    replaced += [(names[name], name, value) for name, value in (settings or {}).items()]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def wall_clock(world: World) -> Callable[[], datetime]:
    """For a ``CheckService``."""
    return lambda: datetime.fromtimestamp(world.scheduler.wall_s(), timezone.utc)


def create_topic(world: World, name: str, queues: int, fifo: bool = False) -> None:
    """As ``CommitLog.create_topic`` does, without the weather."""
    row = {"name": [name], "queues": [queues], "fifo": [fifo], "retention_s": [None], "created": [None]}
    change = table.Change(add=[world.topics.fs.put("topics", pa.table(row, schema=TOPICS_SCHEMA), "topics", ("name",))])
    assert world.topics.put(1, change)
