"""Every operation of a commit log, interrupted at every moment; and the same handle, used on."""

from __future__ import annotations

import logging
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from rmq_spark import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    CheckService,
    CommitLog,
    ConsumerGroup,
    HalfBatch,
    LocalTransactionState,
    Message,
    TransactionListener,
    TransactionMQProducer,
)
from rmq_spark.errors import AlreadyPreparedError, VerdictConflictError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import be_every_machine
from tests.support.half_batches import (
    commit,
    count_check,
    decide_one,
    header_of,
    merge_op_files,
    pending,
    prepare,
    roll_back,
    split,
)
from tests.support.inside import (
    BatchState,
    Graces,
    HalfRecord,
    OpKind,
    OpRow,
    Planner,
    RowState,
    Runtime,
    Subscription,
    TwoPhase,
    Who,
    maintain,
    op_merge,
)
from tests.support.limits import limited
from tests.torture.interrupt.tracing import KINDS, PRODUCT, Interrupted, Place, Tracer

TOPICS = ("orders", "steps")
GROUP = "readers"
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
HOUR_S = 3600.0
LOCK_S_MAX = 5.0
THREAD_S_MAX = 1.0
COMMIT_S_MAX = 60.0
CALLERS = 3
"""A place that is drawn is a line and so many lines that led to it, less one."""
STATELESS = frozenset(
    "_core/storage/data_file.py _core/storage/file_system.py _core/storage/row_range.py "
    "_core/storage/seal.py _core/storage/stores.py "
    "_core/log/batch_state.py _core/log/half.py _core/log/half_header.py _core/log/half_writer.py "
    "_core/log/message_columns.py _core/log/op.py "
    "_core/messages/message_reader.py _core/vocabulary/rows.py "
    "_core/checks/immunity.py _core/checks/policy.py _core/checks/check_report.py "
    "_core/reads/offsets.py _core/reads/read_options.py "
    "_core/vocabulary/options.py errors.py _core/listeners/transaction_listener.py _core/vocabulary/message.py "
    "_core/vocabulary/verdicts.py".split()
)


# ---------------------------------------------------------------- the machine
class StoppedClock:
    """The product's time, which stands still; and ids that are the same in every run."""

    def __init__(self) -> None:
        self.hours = 0.0
        self.ids = count()

    @property
    def now(self) -> datetime:
        return START + timedelta(hours=self.hours)

    def at(self, hours: float) -> None:
        """Set the clock; ids count from the start."""
        self.hours, self.ids = hours, count(int(hours) * 1_000_000)

    def time(self, runtime: Runtime) -> float:
        return self.now.timestamp()

    def random(self, runtime: Runtime) -> float:
        return 0.0

    def unique_id(self, runtime: Runtime) -> str:
        return f"{next(self.ids):032x}"


@contextmanager
def stopped_clock() -> Iterator[StoppedClock]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        be_every_machine(monkeypatch, clock := StoppedClock(), "time", "random", "unique_id")
        yield clock


# ---------------------------------------------------------------- the content
OLD_H, NEWS_H, NOW_H, LATER_H, END_H = 0.0, 2.0, 50.0, 51.0, 70.0


class Content:
    """A log in which half batches are in every state; and the news of it, which a handle has not seen yet."""

    def __init__(self, clock: StoppedClock) -> None:
        self.clock = clock
        self.records: dict[str, HalfRecord] = {}
        self.masks: dict[str, dict[int, bytes]] = {}

    def fill(self, log: CommitLog) -> None:
        """What a handle has followed before."""
        self.clock.at(OLD_H)
        new = self._prepare(log)
        log.create_topic("orders", 2)
        log.create_topic("steps", 1, fifo=True)
        commit(log, new("done"))
        roll_back(log, new("gone"))
        roll_back(log, new("again"), who=Who.CHECK)
        log.engine.ledger.mark()
        self._reopen(log, "again")
        new("next")
        half = new("half", 6)
        decide_one(log.engine, half, 1, commit=split(pending(log, half), 3)[1], rollback={}, who=Who.EXECUTE)
        new("late", 6)
        aside = new("aside")
        log.engine.ledger.quarantine(aside, 1, pending(log, aside), Who.DISCARD, "nobody knows")
        asked = new("asked")
        count_check(log.engine, asked, 1, pending(log, asked), "UNKNOWN")
        roll_back(log, new("rolled"), who=Who.CHECK)
        for name, key in (("first", "k"), ("second", "k"), ("third", "m"), ("fourth", "m")):
            body = [f"{name}.{i}" for i in range(3)]
            new(name, {"body": body, "sharding_key": [key] * 3}, topic="steps")
        commit(log, self.records["second"])
        commit(log, self.records["fourth"])
        hours = [timedelta(hours=h) for h in (1, 1, 48)]
        delayed = {"body": ["soon.0", "soon.1", "later"], "deliver_at": [self.clock.now + h for h in hours]}
        commit(log, new("delayed", delayed))
        clash = new("clash")
        mask = pending(log, clash)
        commit(log, clash)
        try_to(lambda: decide_one(log.engine, clash, 1, commit={}, rollback=mask, who=Who.CHECK))
        log.engine.groups.publish(GROUP, {("orders", 0): 1})
        merge_op_files(log)

    def bring_news(self, log: CommitLog) -> None:
        """What others do meanwhile: some of every kind of op row, and a mark that moves."""
        self.clock.at(NEWS_H)
        new = self._prepare(log)
        log.create_topic("more", 1)
        log.engine.ledger.place_due()
        commit(log, self.records["next"])
        late = self.records["late"]
        chosen, _ = split(pending(log, late), 3)
        decide_one(log.engine, late, 1, commit=chosen, rollback={}, who=Who.EXECUTE)
        commit(log, self.records["third"])
        asked = self.records["asked"]
        count_check(log.engine, asked, 1, pending(log, asked), "UNKNOWN")
        new("fresh")
        commit(log, new("told"))
        merge_op_files(log)
        log.engine.ledger.mark()
        decide_one(log.engine, late, 1, commit=split(pending(log, late), 2)[0], rollback={}, who=Who.EXECUTE)
        log.engine.ledger.lease([self.records["fresh"]], 60.0)
        log.engine.groups.publish(GROUP, {("orders", 1): 1})
        for name, record in self.records.items():
            state = log.engine.state_of(record)
            self.masks[name] = state.rows_in((RowState.PENDING,))

    def handle(self, warm: bool) -> CommitLog:
        """A handle on a copy of its own: of the log without the news, or with them."""
        raise NotImplementedError

    def add_news(self, log: CommitLog) -> None:
        """Let the news come to such a copy."""
        raise NotImplementedError

    def open(self, op: Operation) -> tuple[CommitLog, Callable[[], object]]:
        """A handle on a copy with the news, and what it is to do."""
        log = self.handle(op.warm)
        log.engine.compaction.is_on = False
        if op.warm:
            warm_up(log)
        call = op.make(log, self)
        if op.warm:
            self.add_news(log)
        self.clock.at(NOW_H)
        return log, call

    def _prepare(self, log: CommitLog) -> Callable[..., HalfRecord]:
        def new(name: str, columns: Any = 3, **more: Any) -> HalfRecord:
            if isinstance(columns, int):
                columns = {"body": [f"{name}.{i}" for i in range(columns)]}
            self.clock.hours += 0.01
            self.records[name] = prepare(log, len(self.records), columns, **more)
            return self.records[name]

        return new

    def _reopen(self, log: CommitLog, name: str) -> None:
        by_check = (RowState.ROLLED_BACK_BY_CHECK,)
        log.engine.ledger.reopen(self.records[name], 1, by_check, 2, Who.EXECUTE, "once more")


def warm_up(log: CommitLog) -> None:
    """Let a handle read what a process that has run for a while has read."""
    log.topics()
    log.engine.open_half_ids()
    log.engine.groups.rows()


class InMemory(Content):
    """The content on tables in memory."""

    def __init__(self, clock: StoppedClock) -> None:
        super().__init__(clock)
        self._old = InMemoryCommitLog()
        self._old.engine.compaction.is_on = False
        self.fill(self._old)
        self._new = self._old.copy()
        self._new.engine.compaction.is_on = False
        self.bring_news(self._new)

    def handle(self, warm: bool) -> CommitLog:
        log = self._new.copy()
        if warm:
            for table, old in zip(log._tables.all, self._old._tables.all, strict=True):
                table._versions.head = old._versions.head
        return log

    def add_news(self, log: CommitLog) -> None:
        assert isinstance(log, InMemoryCommitLog)
        for table, new in zip(log._tables.all, self._new._tables.all, strict=True):
            table._versions.head = new._versions.head


class OnDisk(Content):
    """The content on Delta tables."""

    def __init__(self, clock: StoppedClock, folder: Path) -> None:
        super().__init__(clock)
        self._folder, self._copies = folder, count(1)
        self._copy = folder / "copy0"
        log = CommitLog.create(folder / "old")
        log.engine.compaction.is_on = False
        self.fill(log)
        shutil.copytree(folder / "old", folder / "new")
        log = CommitLog.open(folder / "new")
        log.engine.compaction.is_on = False
        self.bring_news(log)

    def handle(self, warm: bool) -> CommitLog:
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy = folder = self._folder / f"copy{next(self._copies)}"
        shutil.copytree(self._folder / ("old" if warm else "new"), folder)
        return CommitLog.open(folder)

    def add_news(self, log: CommitLog) -> None:
        shutil.copytree(self._folder / "new", log.path, dirs_exist_ok=True)


# ---------------------------------------------------------------- the operations
@dataclass(frozen=True)
class Operation:
    """Something that a program does with a log.

    Attributes
    ----------
    make : callable
        What is to be done, with a handle and its content.
    warm : bool
        Whether the handle has read the log before, but not the news.
    asks : bool
        It changes nothing, and gives the same answer whenever it is asked.
    again : bool
        A program does it again after an interruption.
    prunes : bool
        It takes rows out of the tables, of what is over.
    """

    name: str
    make: Callable[[CommitLog, Content], Callable[[], object]]
    warm: bool = True
    asks: bool = False
    again: bool = True
    prunes: bool = False


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, **more: Any) -> Callable[[Any], Any]:
    def register(make: Callable[[CommitLog, Content], Callable[[], object]]) -> Any:
        OPERATIONS[name] = Operation(name, make, **more)
        return make

    return register


def question(name: str, ask: Callable[[CommitLog], object]) -> None:
    """A question to a handle that knows the log, and to one that does not."""
    for warm in (True, False):
        whole = f"{name}, {'warm' if warm else 'cold'}"
        OPERATIONS[whole] = Operation(whole, lambda log, content: lambda: ask(log), warm=warm, asks=True)


def messages(log: CommitLog, topic: str) -> list[tuple[int, int, str]]:
    """(queue_id, queue_offset, body) of every visible message."""
    read = log.read(topic, columns=["queue_id", "queue_offset", "body"]).to_pydict()
    bodies = [body.decode() for body in read["body"]]
    return list(zip(read["queue_id"], read["queue_offset"], bodies, strict=True))


question("read", lambda log: messages(log, "orders"))
question("refresh", lambda log: log.engine.ledger.refresh())
question("topics", lambda log: (log.topics(), log.fifo_topics()))
question("open half ids", lambda log: log.engine.open_half_ids())
question("pending", lambda log: log.pending().to_pylist())
question("open messages", lambda log: log.open_messages())
question("quarantined", lambda log: log.quarantined().to_pylist())
question("conflicts", lambda log: sorted(log.conflicts()))
question("lag", lambda log: ConsumerGroup(log, GROUP).lag().to_pylist())


def decision(name: str, half: str, verdict: str, every: int = 0, attempt: int = 1) -> None:
    """A verdict for all pending rows of a half batch, or for all but every so-manieth."""

    def make(log: CommitLog, content: Content) -> Callable[[], object]:
        mask = content.masks[half]
        rest: dict[int, bytes] = {}
        if every:
            mask, rest = split(mask, every)
        masks = {"commit": mask, "rollback": rest} if verdict == "commit" else {"commit": rest, "rollback": mask}
        return lambda: decide_one(log.engine, content.records[half], attempt, **masks, who=Who.EXECUTE)

    OPERATIONS[name] = Operation(name, make)


decision("commit", "fresh", "commit")
decision("commit what was reopened", "again", "commit", attempt=2)
decision("commit the rest", "late", "commit")
decision("commit what others wait for", "first", "commit")
decision("roll back", "half", "rollback")
decision("roll back what others wait for", "first", "rollback")
decision("commit a part", "asked", "commit", every=2)


def try_to(call: Callable[[], object]) -> str:
    try:
        call()
    except VerdictConflictError:
        return "conflict"
    return "done"


@operation("a conflict")
def _conflict(log: CommitLog, content: Content) -> Callable[[], object]:
    every = {n: b"\x01" * file.rows for n, file in content.records["told"].files.items()}
    record = content.records["told"]
    return lambda: try_to(lambda: decide_one(log.engine, record, 1, commit={}, rollback=every, who=Who.CHECK))


@operation("reopen")
def _reopen(log: CommitLog, content: Content) -> Callable[[], object]:
    return lambda: content._reopen(log, "rolled")


@operation("quarantine")
def _quarantine(log: CommitLog, content: Content) -> Callable[[], object]:
    record, mask = content.records["fresh"], content.masks["fresh"]
    return lambda: log.engine.ledger.quarantine(record, 1, mask, Who.DISCARD, "nobody knows")


@operation("record a check", again=False)
def _record_check(log: CommitLog, content: Content) -> Callable[[], object]:
    record, mask = content.records["fresh"], content.masks["fresh"]
    return lambda: count_check(log.engine, record, 1, mask, "UNKNOWN")


@operation("lease", again=False)
def _lease(log: CommitLog, content: Content) -> Callable[[], object]:
    return lambda: log.engine.ledger.lease([content.records["fresh"]], 30.0)


@operation("resolve")
def _resolve(log: CommitLog, content: Content) -> Callable[[], object]:
    return lambda: log.resolve(content.records["clash"].half_id, COMMIT_MESSAGE, "it is true")


@operation("resume")
def _resume(log: CommitLog, content: Content) -> Callable[[], object]:
    return lambda: log.resume(content.records["aside"].half_id)


@operation("place what is due")
def _place_due(log: CommitLog, content: Content) -> Callable[[], object]:
    return log.engine.ledger.place_due


@operation("move the mark")
def _move_mark(log: CommitLog, content: Content) -> Callable[[], object]:
    def settle_and_move() -> None:
        commit(log, content.records["half"])
        log.engine.ledger.mark()

    return settle_and_move


@operation("merge op files")
def _compact(log: CommitLog, content: Content) -> Callable[[], object]:
    def compact() -> None:
        with limited(OP_FILES_MAX=2):
            op_merge.compact_op(log.engine.op_table)

    return compact


@operation("upkeep")
def _upkeep(log: CommitLog, content: Content) -> Callable[[], object]:
    def upkeep() -> None:
        with limited(OP_FILES_MAX=2):
            log.engine.compaction.run()

    return upkeep


@operation("drain")
def _drain(log: CommitLog, content: Content) -> Callable[[], object]:
    return lambda: log.drain() and None


@operation("maintain", prunes=True)
def _maintain(log: CommitLog, content: Content) -> Callable[[], object]:
    def upkeep() -> None:
        with limited(OP_FILES_MAX=2, MESSAGES_FILES_MAX=2):
            maintain(log.engine, Graces(0.0, 0.0, 0.0))

    return upkeep


@operation("create a topic")
def _create_topic(log: CommitLog, content: Content) -> Callable[[], object]:
    return lambda: log.create_topic("yet_more", 1, exist_ok=True)


@operation("prepare")
def _prepare(log: CommitLog, content: Content) -> Callable[[], object]:
    def once() -> None:
        with suppress(AlreadyPreparedError):  # a sink then finds it
            prepare(log, 100, {"body": ["prepared"]})

    return once


class Sender(TransactionListener):
    """Remembers what it did: a check's ROLLBACK of what it has not done is final, as with a fence."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def execute_local_transaction(self, batch: HalfBatch) -> LocalTransactionState:
        self.done.append((batch.half_id, batch.attempt))
        return COMMIT_MESSAGE

    def check_local_transaction(self, batch: HalfBatch) -> LocalTransactionState:
        return COMMIT_MESSAGE if (batch.half_id, batch.attempt) in self.done else ROLLBACK_MESSAGE


def agrees(listener: Sender, verdict: LocalTransactionState) -> None:
    """A local transaction happens once, and before its messages are committed."""
    done = len(listener.done)
    if done > 1 or (verdict is COMMIT_MESSAGE and done != 1):
        raise RuntimeError(f"the local transaction ran {done} times, and its messages are {verdict}")


def sending(name: str, key: str | None) -> None:
    def make(log: CommitLog, content: Content) -> Callable[[], object]:
        listener = Sender()
        producer = TransactionMQProducer(log, "group", listener, check_interval=None).start()
        producer._sender._started = "started"  # the same id in every run

        def send() -> None:
            result = producer.send_message_in_transaction(Message("orders", b"sent"), idempotency_key=key)
            agrees(listener, result.local_transaction_state)

        return send

    OPERATIONS[name] = Operation(name, make, again=key is not None)


sending("send", None)
sending("send with an idempotency key", "k1")


@operation("a sink's batch")
def _sink(log: CommitLog, content: Content) -> Callable[[], object]:
    listener = Sender()
    sink = TwoPhase(log.engine, listener)

    def send() -> None:
        from tests.support.inside import HalfWriter

        header = replace(header_of(0, "sink", per="message"), query_id="query")
        writer = HalfWriter(header, log.topics(), "orders", None, log.fifo_topics())
        messages = pa.table({"body": ["sunk.0", "sunk.1"]}).to_batches()
        outcome = sink.send(header, lambda: log.engine.stage(writer, messages))
        agrees(listener, COMMIT_MESSAGE if RowState.COMMITTED in outcome.messages else UNKNOWN)

    return send


class Answers(TransactionListener):
    """Says of each half batch what it always says."""

    def __init__(self, content: Content) -> None:
        said = {"half": COMMIT_MESSAGE, "late": ROLLBACK_MESSAGE, "fresh": UNKNOWN, "first": COMMIT_MESSAGE}
        self._said = {content.records[name].half_id: verdict for name, verdict in said.items()}

    def execute_local_transaction(self, batch: HalfBatch) -> LocalTransactionState:
        return UNKNOWN

    def check_local_transaction(self, batch: HalfBatch) -> LocalTransactionState:
        return self._said.get(batch.half_id, UNKNOWN)


@operation("a round of checks")
def _checks(log: CommitLog, content: Content) -> Callable[[], object]:
    service = CheckService(log, {"group": Answers(content)}, transaction_check_max=2, round_timeout=None)
    return lambda: service.run_once() and None


def planned(planner: Planner) -> object:
    """What a stream asks for: from the start to now, then on from there, then nothing."""
    latest = planner.latest()
    middle = {queue: end // 2 for queue, end in latest.items()}
    first = planner.ranges({}, middle)
    planner.forget(middle)
    return middle, latest, first, planner.ranges(middle, latest), planner.ranges(latest, latest)


for _warm in (True, False):

    @operation(f"plan, {'warm' if _warm else 'cold'}", warm=_warm, asks=True)
    def _plan(log: CommitLog, content: Content) -> Callable[[], object]:
        planner = Planner(log.engine, Subscription(TOPICS))
        return lambda: planned(planner)

    @operation(f"plan from a time, {'warm' if _warm else 'cold'}", warm=_warm, asks=True)
    def _plan_from(log: CommitLog, content: Content) -> Callable[[], object]:
        planner = Planner(log.engine, Subscription(TOPICS))
        return lambda: planner.resolve("startingTimestamp", START + timedelta(hours=1))

    @operation(f"a trigger of a stream, {'warm' if _warm else 'cold'}", warm=_warm, asks=True)
    def _trigger(log: CommitLog, content: Content) -> Callable[[], object]:
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        from tests.support.inside import TxmqStreamReader
        from tests.support.source_logs import source_schema

        options = {"path": "somewhere", "subscribe": ",".join(TOPICS), "consumerGroup": GROUP}
        reader = TxmqStreamReader(options, source_schema())

        def trigger() -> object:
            with patch.object(CommitLog, "open", lambda *given: log):
                start = {"orders": {"0": 1}, "@log": {log.id: 0}}
                end = reader.latestOffset(start, ReadAllAvailable())
                ranges = [part.ranges for part in reader.partitions(start, end)]
                reader.commit(end)
                return end, ranges, reader.latestOffset(end, ReadAllAvailable())

        return trigger


@operation("publish a group's progress")
def _publish(log: CommitLog, content: Content) -> Callable[[], object]:
    return lambda: log.engine.groups.publish(GROUP, {("orders", 0): 2, ("steps", 0): 1})


@operation("reset a group")
def _reset(log: CommitLog, content: Content) -> Callable[[], object]:
    return lambda: ConsumerGroup(log, GROUP).reset("latest")


# ---------------------------------------------------------------- judging
@dataclass
class Finding:
    """What was wrong after an interruption."""

    operation: str
    moment: int
    where: str
    kind: str
    what: list[str]

    def __str__(self) -> str:
        return f"{self.operation}, moment {self.moment} ({self.kind} at {self.where}): {'; '.join(self.what)}"


@dataclass(frozen=True)
class Said:
    """What the tables hold, row by row, in the words in which two of them are compared."""

    commits: list[list[str]]
    """Of op, in the order of their versions."""
    prepared: list[tuple[str, int]]
    topics: list[str]
    progress: set[tuple[Any, ...]]


@dataclass(frozen=True)
class Truth:
    """What that means, found without an OpReader."""

    said: Said
    records: dict[str, HalfRecord]
    states: dict[str, BatchState]
    tails: dict[tuple[str, int], int]
    waiting: Counter[str]
    low_water: int

    @property
    def open(self) -> set[str]:
        return {half_id for half_id, state in self.states.items() if not state.is_settled}


def read_truth(log: CommitLog, content: Content, known: Sequence[Truth] = ()) -> Truth:
    """The tables of a log; one of those that are known, when they say the same."""
    tables = log.another()
    for table in (tables.engine.half.table, tables.engine.op_table, tables.engine.topics_table):
        table.refresh()
    rows = tables.engine.op_table.read(tables.engine.op_table.actions()["path"].to_pylist()).sort_by("version")
    commits: dict[int, list[str]] = {}
    for row in rows.drop_columns(["path", "commit_id"]).to_pylist():
        commits.setdefault(row["version"], []).append(repr(row))
    half = tables.engine.half.contents.prepared_after(-1)
    progress = tables.engine.groups.rows().select(
        ["consumer_group", "topic", "queue_id", "next_offset", "suspended_until"]
    )
    said = Said(
        [sorted(commits[version]) for version in sorted(commits)],
        sorted((half_id, found.rows) for half_id, found in half.items()),
        sorted(tables.topics()),
        {tuple(row.values()) for row in progress.to_pylist()},
    )
    for truth in known:
        if truth.said == said:
            return truth
    mine = {record.half_id: record for record in content.records.values()}
    records = {half_id: mine.get(half_id) or tables.engine.half.get(half_id) for half_id in half}
    states = {half_id: record.fresh_state() for half_id, record in records.items()}
    left = {row["half_id"] for row in rows.to_pylist() if row["kind"] == OpKind.ARCHIVED.value}.difference(records)
    tails: dict[tuple[str, int], int] = {}
    waiting: Counter[str] = Counter()
    low_water = 0
    for row in rows.to_pylist():
        if row["half_id"] is not None and row["half_id"] not in left:
            states[row["half_id"]].fold(OpRow.of(row))
        if row["next_offset"] is not None:
            queue = (row["topic"], row["queue_id"])
            tails[queue] = max(tails.get(queue, 0), row["next_offset"])
        if row["kind"] == OpKind.COMMIT.value and row["queue_offset"] is None:
            waiting[row["half_id"]] += row["count"]
        if row["kind"] == OpKind.PLACE.value:
            waiting[row["half_id"]] -= row["count"]
        low_water = row["low_water"] or low_water
    return Truth(said, records, states, tails, +waiting, low_water)


def held_lock(log: CommitLog) -> list[str]:
    """Whether another thread can have the lock of a log."""
    free: list[bool] = []

    def take() -> None:
        if log.engine.lock.acquire(timeout=LOCK_S_MAX):  # type: ignore[attr-defined]
            log.engine.lock.release()  # type: ignore[attr-defined]
            free.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return [] if free else ["the log's lock is held"]


def followed(log: CommitLog, truth: Truth, who: str) -> list[str]:
    """How what a handle says differs from what the tables say."""
    wrong: list[str] = []

    def expect(what: str, found: object, expected: object) -> None:
        if found != expected:
            wrong.append(f"{who}: {what} is {found}, and in the tables {expected}")

    log.engine.ledger.refresh()
    expect("tails", log.engine.ledger.view.tails, truth.tails)
    expect("waiting", {h: sum(c.values()) for h, c in log.engine.ledger.view.waiting.items()}, dict(truth.waiting))
    expect("the mark", log.engine.ledger.view.low_water, truth.low_water)
    expect("open half batches", set(log.engine.open_half_ids()), truth.open)
    for half_id, record in truth.records.items():
        if record.prepared_ms <= truth.low_water and half_id not in truth.waiting:
            continue  # it is read from the table
        expect(
            f"the state of {half_id}", _words(log.engine.state_of(record, refresh=False)), _words(truth.states[half_id])
        )
    return wrong


def _words(state: BatchState) -> object:
    rows = {n: (bytes(f.state), bytes(f.attempt), bytes(f.checks), f.due, f.reopened) for n, f in state.files.items()}
    return rows, state.in_conflict, state.lease_until, [str(row.kind) for row in state.history]


def finish(log: CommitLog) -> None:
    """Commit whatever is open, quarantined or in conflict, place everything, and move the mark."""
    for half_id in [*log.quarantined()["half_id"].to_pylist(), *log.conflicts()]:
        log.resolve(half_id, COMMIT_MESSAGE, "the end")
    for half_id in log.engine.open_half_ids():
        record = log.engine.get(half_id)
        for attempt in log.engine.state_of(record).attempts(RowState.PENDING):
            commit(log, record, attempt)
    log.engine.ledger.place_due()
    log.engine.ledger.mark()


Visible = dict[str, list[Any]]


def visible(log: CommitLog) -> Visible:
    """By topic, what is visible: sorted in a plain topic, in the order of its offsets in a FIFO topic."""
    orders = sorted(body for _, _, body in messages(log, "orders"))
    return {"orders": orders, "steps": [body for _, _, body in messages(log, "steps")]}


def left_running(before: set[threading.Thread]) -> list[str]:
    """Threads that renew a lease though nobody holds it any more."""
    for thread in threading.enumerate():  # a commit that a caller no longer waits for comes to its end
        if thread not in before and thread.name in ("txmq-prepare", "txmq-decide"):
            thread.join(COMMIT_S_MAX)
    leases = [t for t in threading.enumerate() if t not in before and t.name == "txmq-lease"]
    for thread in leases:
        thread.join(THREAD_S_MAX)
    return [f"thread {thread.name} runs on" for thread in leases if thread.is_alive()]


def gaps(log: CommitLog) -> list[str]:
    found = []
    for topic in TOPICS:
        by_queue: dict[int, list[int]] = {}
        for queue_id, offset, _ in messages(log, topic):
            by_queue.setdefault(queue_id, []).append(offset)
        for queue_id, offsets in by_queue.items():
            if offsets != list(range(len(offsets))):
                found.append(f"queue {queue_id} of {topic} has the offsets {offsets}")
    return found


@dataclass
class Twin:
    """What an operation does when nobody interrupts it.

    Attributes
    ----------
    before, after, marked : Truth
        Before it, after it, and after the mark moved.
    places : list
        Of its moments, the first of which has the number 1.
    """

    operation: Operation
    before: Truth
    after: Truth
    marked: Truth
    answer: object
    ends: list[Visible]
    places: list[tuple[str, Place]]


def uninterrupted(content: Content, op: Operation) -> Twin:
    """Run an operation to the end, and what follows; and what follows without it, when nobody does it again."""
    log, call = content.open(op)
    before = read_truth(log, content)
    found: list[object] = []
    tracer = Tracer(noted=True)
    if problem := tracer.run(lambda: found.append(call())):
        raise problem
    after = read_truth(log, content)
    move_mark_later(log, content)
    twin = Twin(op, before, after, read_truth(log, content), found[0], [], tracer.places)
    twin.ends.append(end_of(log, content))
    if not op.again:
        log, _ = content.open(op)
        twin.ends.append(end_of(log, content))
    return twin


def move_mark_later(log: CommitLog, content: Content) -> None:
    content.clock.at(LATER_H)
    log.engine.ledger.mark()


def end_of(log: CommitLog, content: Content) -> Visible:
    content.clock.at(END_H)
    finish(log)
    seen = visible(log)
    log.drain()
    if visible(log) != seen:
        raise RuntimeError(f"{visible(log)} is visible once all is drained, and before it was {seen}")
    return seen


def interrupt(content: Content, twin: Twin, moment: int, kind: type[BaseException] = Interrupted) -> Finding | None:
    """Interrupt an operation at a moment, use the handle on, and hold all that it says against the tables."""
    threads = set(threading.enumerate())
    log, call = content.open(twin.operation)
    tracer = Tracer(moment, kind)
    kept = tracer.run(call)  # with its frames, as a notebook keeps them
    wrong: list[str] = []
    try:
        # The sink tells of an exception in its listener, of which a full memory is one, with its own error.
        if kept is not None and not (isinstance(kept, kind) or isinstance(kept.__cause__, kind)):
            wrong.append(f"another error came out: {type(kept).__name__}: {kept}")
        wrong += held_lock(log)
        wrong += left_running(threads)
        if not wrong:
            wrong += used_on(content, twin, log, call, goes_on=moment > 0 and kept is None)
            wrong += held_lock(log)
    except Exception as problem:
        wrong.append(f"{type(problem).__name__}: {problem}")
    del kept
    return Finding(twin.operation.name, moment, tracer.where, kind.__name__, wrong) if wrong else None


def used_on(content: Content, twin: Twin, log: CommitLog, call: Callable[[], object], goes_on: bool) -> list[str]:
    """What goes wrong when a handle is used on.

    Parameters
    ----------
    goes_on : bool
        The operation caught the exception and went on without what it was about.
    """
    op, known = twin.operation, (twin.before, twin.after, twin.marked)
    before, after = twin.before.said, twin.after.said
    truth = read_truth(log, content, known)
    said = truth.said
    wrong = followed(log, truth, "the handle")
    whole = len(before.commits) <= len(said.commits) and said.commits == after.commits[: len(said.commits)]
    if not whole and not goes_on and not op.prunes:
        wrong.append("op has other commits than without the interruption")
    for table in ("prepared", "topics"):
        if getattr(said, table) not in (getattr(before, table), getattr(after, table)):
            wrong.append(f"{table}: {getattr(said, table)}")
    if op.again:
        answer = call()
        if op.asks and answer != twin.answer:
            wrong.append(f"the answer is {answer} then, and was {twin.answer}")
    move_mark_later(log, content)
    truth = read_truth(log, content, known)
    if op.again and truth.said.progress != after.progress:
        wrong.append(f"the group stands at {truth.said.progress}, not at {after.progress}")
    wrong += followed(log, truth, "the handle that moved the mark")
    if truth.said == twin.marked.said:  # what comes now is the same as well
        return wrong
    wrong += followed(log.another(), truth, "another handle")
    end = end_of(log, content)
    if end not in twin.ends:
        wrong.append(f"in the end {end} is visible, not {twin.ends}")
    other = log.another()
    if visible(other) != end:
        wrong.append(f"another handle sees {visible(other)} in the end, this one {end}")
    for handle in (log, other):
        waiting = handle.engine.ledger.view.waiting
        if handle.engine.open_half_ids() or waiting:
            wrong.append(f"in the end {handle.engine.open_half_ids()} is open and {dict(waiting)} waits")
    return wrong + gaps(log)


# ---------------------------------------------------------------- which moments
def without_state(code: CodeType) -> bool:
    """True for code that keeps nothing: to its caller all its lines are one."""
    return code.co_filename.removeprefix(f"{PRODUCT}/") in STATELESS


def moments_by_place(twin: Twin, frames: int) -> dict[Any, list[int]]:
    """The moments at each place: a line of code that keeps something, with the lines from which it was called."""
    found: dict[Any, list[int]] = {}
    for moment, (event, place) in enumerate(twin.places, 1):
        kept = tuple((code, line) for code, line in place if not without_state(code))
        inner = "within" if without_state(place[0][0]) else event
        found.setdefault((inner, kept[:frames]), []).append(moment)
    return found


def some_moments(twin: Twin, chance: random.Random, how_many: int) -> list[tuple[int, type[BaseException]]]:
    """Moments at places drawn from all, and what is raised there."""
    places = list(moments_by_place(twin, CALLERS).values())
    drawn = chance.sample(places, min(how_many, len(places)))
    return [(chance.choice(moments), chance.choice(KINDS)) for moments in drawn]


def every_line(twins: Mapping[str, Twin], chance: random.Random) -> Iterator[tuple[str, int, type[BaseException]]]:
    """Each line of the product that any operation comes to, once: in one of these operations, at its first or last
    time there."""
    found: dict[Any, dict[str, list[int]]] = {}
    for name, twin in twins.items():
        for place, moments in moments_by_place(twin, 1).items():
            found.setdefault(place, {})[name] = moments
    for by_name in found.values():
        name = chance.choice(sorted(by_name))
        moments = by_name[name]
        yield name, chance.choice([moments[0], moments[-1]]), chance.choice(KINDS)


# ---------------------------------------------------------------- a long run
def run(seconds: float, seed: int) -> dict[str, Any]:
    """Interrupt operations in memory, drawn at random, at moments drawn at random, until the time is up."""
    started = time.monotonic()
    chance = random.Random(seed)
    found: list[str] = []
    interrupted = 0
    with quiet(), stopped_clock() as clock:
        content = InMemory(clock)
        twins: dict[str, Twin] = {}
        while time.monotonic() - started < seconds:
            name = chance.choice(list(OPERATIONS))
            if name not in twins:
                twins[name] = uninterrupted(content, OPERATIONS[name])
            moment = chance.randint(1, len(twins[name].places))
            finding = interrupt(content, twins[name], moment, chance.choice(KINDS))
            found += [] if finding is None else [str(finding)]
            interrupted += 1
    return {
        "what": "operations interrupted at any line",
        "interruptions": interrupted,
        "operations": len(twins),
        "first seed": seed,
        "seconds": round(time.monotonic() - started),
        "failures": found,
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log lines of what is interrupted, and without a pool of threads for tables of a few rows."""
    threads = pa.cpu_count()
    pa.set_cpu_count(1)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        pa.set_cpu_count(threads)
