"""The product's protocol, run from a seed on a store, a clock and processes that misbehave, and judged by its history.

``simulate(seed)`` plays a small scenario: streams and senders that crash and come again (also while the first still
sleeps), checkers, readers, a person and upkeep; each in a process of its own, or as threads that share a process and
its commit log. A stream may leave its local transactions to executors. Then all is repaired: no more faults,
everything is brought to its end and read.

``python -m tests.torture.simulate.simulation SEED`` shows a seed's history.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    CheckService,
    CommitLog,
    LocalTransactionState,
    TransactionMQProducer,
)
from rmq_spark._core.storage.table import was_added
from rmq_spark.errors import (
    CheckpointMismatchError,
    ClockError,
    CommitError,
    CorruptLogError,
    FenceError,
    ForeignChangeError,
    HalfBatchLeftError,
    LocalTransactionError,
    LostCommitError,
    LostStagedFileError,
    MessageError,
    OffsetOutOfRangeError,
    StaleAttemptError,
    TopicExistsError,
    UnresolvedTransactionError,
    VerdictConflictError,
)
from tests.support.failpoints import hooked
from tests.support.inside import (
    CHECK_IMMUNITY_PROPERTY,
    PROPERTIES,
    TIMESTAMP,
    BatchState,
    Change,
    DataFile,
    Graces,
    HalfHeader,
    HalfRecord,
    HalfWriter,
    Lineage,
    Naming,
    PartRunner,
    Planner,
    RowState,
    Subscription,
    TwoPhase,
    admit,
    batch_name,
    drained_up_to,
    half_id_of,
    input_hash_of,
    name_of,
    op_merge,
    read_ranges,
    upkeep,
)
from tests.torture.judge.anomalies import Anomaly, Rules, find_anomalies
from tests.torture.judge.history import FINAL, Event, History, Kind, Phase, payload_hash
from tests.torture.judge.observation import PLACE, READ_COLUMNS, note_drained, note_expired, note_messages, note_tables
from tests.torture.simulate.executors import Executors, JobFailed
from tests.torture.simulate.scheduler import NoEnd, Process, Scheduler, Task
from tests.torture.simulate.shop import (
    BareListener,
    Broken,
    Database,
    DeltaTwin,
    FencedListener,
    Listener,
    NoListener,
    Temper,
    VersionedListener,
)
from tests.torture.simulate.sql_shop import SqlDatabase, SqlListener
from tests.torture.simulate.store import Weather, prepared_s
from tests.torture.simulate.world import TOPIC, SimulatedLog, World, create_topic, limits

GROUP = "group"
DAY_S = 86_400.0
NO_TIME_US = -(2**63)
"""The least of Arrow's times, which Python cannot hold."""
INCARNATIONS_MAX = 6
ON_DRIVER = 0.25
"""So many drivers run local transactions themselves, where others of the same query leave them to executors."""
DRAIN_ROUNDS_MAX = 60
APPOINTMENT_S = 10.0
"""Programs that do the same begin together, as if a clock had started them: at every multiple of so many seconds."""
SEEDS_WANTED = 1_000_000
"""In a long run; it ends earlier when its time is up, and says how many there were."""

FENCE_POINTS = frozenset({"fence row written", "tombstone written", "tombstones commit", "asked", "answered"})
"""Failpoints at which others come between, or a process dies."""

EXPECTED = (
    CheckpointMismatchError, ClockError, CommitError, FenceError, HalfBatchLeftError, LocalTransactionError,
    LostCommitError, LostStagedFileError, StaleAttemptError, UnresolvedTransactionError, VerdictConflictError, Broken,
    JobFailed, OSError,
)  # fmt: skip
"""What may end a process that meets a fault; anything else is a finding."""


MOODS = ("storm", "clocks", "wrong clocks", "crowd", "guesses", "history")
"""Kinds of trouble that a scenario may have more of."""


# ---------------------------------------------------------------- what a seed plays
@dataclass
class Scenario:
    """What takes part, and how badly it all behaves."""

    threads: int = 1  # so many of those below are threads of one process, and share its commit log
    streams: int = 1
    senders: int = 0
    rivals: bool = False  # each sender has one more program that sends the same under the same idempotency keys
    unkeyed: bool = False  # senders send once, without an idempotency key
    apart: bool = False  # senders are spread over the processes
    clerks: int = 0  # programs that make the same topics
    batches: int = 2
    rows: int = 3
    partitions: int = 1
    per: str = "batch"
    queues: int = 1
    sharded: bool = False
    fifo: bool = False  # the topic keeps the order of its sharding keys
    checkers: int = 1
    rounds: int = 3
    readers: int = 1
    polls: int = 3
    planner: bool = False
    upkeep: int = 3
    person: bool = False
    zombies: float = 0.0
    restored: str | None = None  # "offsets", "query" or "hidden" (nobody knows): the last batch comes again from
    # another checkpoint
    forks: bool = False  # a copy of each stream's checkpoint is used beside it; its first batch had nothing to send
    changed: bool = False  # a driver that starts again may have transactionListener=none
    stranger: bool = False  # one more checker, which looks into another database
    deletions: int = 0  # so often another writer deletes a row of messages, and a person puts it back later
    listener: str = "fenced"
    prunes: bool = False  # upkeep prunes the fence
    parts: int = 0  # streams run the local transactions of a half batch in so many tasks; the listener is the product's
    slips: bool = False  # each source first sends a time that no consumer could hold; the door must refuse it
    immunity: bool = False  # messages ask for longer, or shorter, than the time-out before their check
    discard: str = "quarantine"
    checks_max: int = 2
    check_timeout_s: float = 6.0
    on_listener_error: str = "fail"
    switch: float = 0.3
    tick: float = 0.02  # a step takes up to so many seconds
    crash: float = 0.0
    pause: float = 0.0
    clock_steps: bool = False
    wrong_clocks: float = 0.0
    op_files_max: int = 5
    retention_s: float | None = None  # after so long the topic's messages expire
    stuck_after_s: float | None = None
    weather: Weather = field(default_factory=Weather)
    temper: Temper = field(default_factory=Temper)

    @classmethod
    def draw(cls, chance: random.Random, large: bool | None = None) -> Scenario:
        """A scenario of any kind; small ones, of which more can be played, are three in four unless told otherwise."""
        pick, often = chance.choice, chance.random
        if large is None:
            large = often() < 0.25
        scenario = cls(
            streams=pick((0, 1, 1, 1, 2)) if large else pick((0, 1, 1, 1)),
            senders=pick((0, 0, 0, 1)) if large else 0,
            batches=pick((1, 1, 2, 3)) if large else pick((1, 1, 1, 2)),
            rows=pick((1, 2, 3)) if large else pick((1, 2)),
            partitions=pick((1, 1, 2)),
            per=pick(("batch", "message", "key")),
            queues=pick((1, 2)),
            sharded=often() < 0.4,
            checkers=pick((0, 1, 1, 2)) if large else pick((0, 1, 1)),
            rounds=pick((1, 2, 3)) if large else pick((1, 1, 2)),
            readers=pick((0, 0, 1, 1)) if large else pick((0, 0, 0, 1)),
            polls=pick((1, 2, 3)) if large else 1,
            planner=often() < 0.4,
            upkeep=pick((0, 1, 2, 4)) if large else pick((0, 0, 1, 1)),
            person=often() < 0.1,
            zombies=pick((0.0, 0.0, 0.5)),
            restored=pick((None,) * 8 + ("offsets", "query")),
            stranger=often() < 0.08,
            listener=pick(("fenced",) * 8 + ("versioned", "versioned", "bare", "bare", "none")),
            immunity=pick((False, False, False, True)),
            discard=pick(("quarantine",) * 3 + ("rollback", "commit")),
            checks_max=pick((1, 2, 3)),
            on_listener_error=pick(("fail", "unknown")),
            switch=pick((0.1, 0.3, 0.6)),
            crash=pick((0.0, 0.005, 0.02, 0.04)) if large else pick((0.0, 0.02, 0.05)),
            pause=pick((0.0, 0.005, 0.02)) if large else pick((0.0, 0.02, 0.05)),
            clock_steps=often() < 0.15,
            op_files_max=pick((3, 5, 9)) if large else pick((2, 3, 5)),
        )
        if often() < 0.8:
            scenario.weather = Weather(
                **{name: pick((0.0, 0.05, 0.15)) for name in Weather.chances()} | {"unreadable": pick((0.0, 0.0, 0.01))}
            )
        scenario.temper = Temper(
            fails_before=pick((0.0, 0.1)),
            fails_after=pick((0.0, 0.1)),
            refuses=pick((0.0, 0.3)),
            says_unknown=pick((0.0, 0.0, 0.3)),
            slow=pick((0.0, 0.0, 0.2)),
            check_fails=pick((0.0, 0.1)),
            check_unknown=pick((0.0, 0.3, 0.8)),
        )
        scenario.retention_s = pick((None, None, None, 0.0, 30.0))
        scenario.fifo = scenario.sharded and scenario.checks_max != 2
        scenario.threads = pick((1, 1, 2, 3))
        if scenario.threads > 1:
            scenario.streams, scenario.senders = pick(((1, 0), (1, 0), (0, 1), (1, 1), (0, 3), (1, 3)))
            scenario.clerks = pick((0, 0, 0, 2))
        scenario.rivals = scenario.senders > 0 and often() < 0.6
        if scenario.senders > 0 and often() < 0.7:
            scenario.apart = pick((False, True, True))
            scenario.unkeyed = not scenario.rivals and often() < 0.6
        scenario.changed = scenario.stranger
        scenario.deletions = 2 if scenario.upkeep > 1 and scenario.polls != 2 else 0
        if scenario.restored == "query" and scenario.planner:
            scenario.restored = "hidden"
        if scenario.restored == "offsets" and scenario.partitions > 1:
            scenario.restored, scenario.forks = None, True
        scenario.slips = scenario.on_listener_error == "unknown"
        scenario.in_mood(pick((None,) * 8 + MOODS))
        scenario.prunes = often() < 0.3
        scenario.parts = pick((0,) * 4 + (2, 3))  # last: what older seeds draw stays
        return scenario.made_possible()

    def in_mood(self, mood: str | None) -> Scenario:
        """The scenario, with more of one kind of trouble."""
        if mood == "storm":
            self.weather = Weather(0.15, 0.15, 0.15, 0.15, 0.15, 0.02)
            self.pause, self.switch, self.zombies = 0.04, 0.6, 0.5
        elif mood == "clocks":
            self.clock_steps, self.upkeep, self.pause = True, max(self.upkeep, 3), 0.04
        elif mood == "wrong clocks":
            self.clock_steps, self.upkeep, self.wrong_clocks = False, max(self.upkeep, 4), 0.4
            self.weather.on_own_disk = self.rows > 1
        elif mood == "crowd":
            self.streams, self.checkers, self.switch, self.zombies, self.op_files_max = 2, 2, 0.6, 0.8, 2
        elif mood == "history":
            self.batches, self.upkeep, self.readers, self.polls = 4, 8, max(self.readers, 1), 4
        elif mood == "guesses":
            self.discard, self.checks_max, self.checkers = "rollback" if self.rows > 1 else "commit", 1, 2
            self.temper.check_unknown, self.temper.says_unknown = 0.5, 0.4
        return self

    def made_possible(self) -> Scenario:
        """The scenario, less what its parts cannot promise together."""
        if self.streams + self.senders == 0:
            self.streams = 1
        if self.streams == 0 or self.listener != "fenced":
            self.parts = 0
        if self.parts:
            if self.per == "batch":
                self.per = "key"
            self.rows = max(self.rows, 2 * self.parts)
            self.fifo = self.prunes = False  # parts deal out anew; the fence of parts lives for a week
        self.fifo = self.fifo and self.sharded
        # Clocks that are wrong by minutes are to a fence's minute what those wrong by weeks are to its week.
        self.prunes = self.prunes and self.listener == "fenced" and not (self.clock_steps or self.wrong_clocks)
        if self.listener == "versioned":
            self.per = "batch"
        if self.listener == "bare":
            self.immunity = False  # leases need their time
            # Without a fence nobody may wake up late or overtake a lease; and a policy that guesses is a guess.
            self.pause, self.zombies, self.clock_steps, self.weather = 0.0, 0.0, False, Weather()
            self.wrong_clocks = 0.0
            self.person, self.check_timeout_s = False, 30.0
            self.rivals = False  # a rival checks what is being executed
        if self.rivals:
            self.unkeyed = False  # a rival sends the same under the same key
        if self.unkeyed and self.sharded:
            self.zombies = 0.0  # a successor sends the next message beside the first one: either may stand first
        self.partitions = min(self.partitions, self.rows)
        return self


@dataclass
class Result:
    """What became of a seed."""

    seed: int
    anomalies: list[Anomaly]
    problems: list[str]
    history: History
    counts: Counter[str]

    @property
    def good(self) -> bool:
        return not self.anomalies and not self.problems


# ---------------------------------------------------------------- the run
class Simulation:
    """One scenario with one chance."""

    def __init__(self, seed: int, scenario: Scenario | None = None) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.scenario = s = Scenario.draw(self.chance) if scenario is None else scenario
        self.scheduler = Scheduler(self.chance, s.switch, s.crash, s.pause, s.tick)
        self.world = World(self.chance, self.scheduler, s.weather)
        self.world.wrong_clocks = s.wrong_clocks
        self.history = self.world.history
        self.database = self._database("fence")
        self.wrong_database = self._database("another fence")
        self.delta = DeltaTwin()
        self.sources: list[Source] = [StreamSource(self, f"app{i}") for i in range(s.streams)]
        self.sources += [StreamSource(self, f"app{i}", f"fork{i}") for i in range(s.streams) if s.forks]
        self.sources += [SendSource(self, f"sender{i}") for i in range(s.senders)]
        self.sources += [SendSource(self, f"sender{i}", f"rival{i}") for i in range(s.senders) if s.rivals]
        self.positions: dict[str, dict[int, int]] = {}
        self.producers: WeakKeyDictionary[SimulatedLog, TransactionMQProducer] = WeakKeyDictionary()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.at_ease = False

    def _database(self, fence_id: str) -> Database:
        if self.scenario.parts:
            return SqlDatabase(self.scheduler, self.history, fence_id, self.world.runtime)
        return Database(self.scheduler, self.history, fence_id)

    def _step_at(self, point: str, **_: object) -> None:
        """A step within the product's fence."""
        if point in FENCE_POINTS:
            self.scheduler.step()

    def run(self) -> Result:
        with limits(self.scenario.op_files_max), hooked(self._step_at) if self.scenario.parts else nullcontext():
            create_topic(self.world, TOPIC, self.scenario.queues, self.scenario.fifo, self.scenario.retention_s)
            try:
                self._play()
                self._repair()
                self._look()
            except NoEnd as problem:
                self.problems.append(f"{type(problem).__name__}: {problem}")
        self.problems += [f"{name}: {type(p).__name__}: {p}" for name, p in self.scheduler.problems]
        rules = Rules(
            checks_max=self.scenario.checks_max,
            stuck_after_s=self.scenario.stuck_after_s,
            conflicts_resolved=self.scenario.temper.poison is None,
            fifo=frozenset({TOPIC} if self.scenario.fifo else ()),
            # Clocks that differ do not agree about how old a message is.
            retention_s=None if self.scenario.clock_steps or self.scenario.wrong_clocks else self.scenario.retention_s,
        )
        anomalies = find_anomalies(self.history, rules)
        self.counts["shared handles"] += self.scenario.threads > 1
        self.counts["shared commits"] += self.world.grouped
        self.counts["steps"] += self.scheduler.steps
        self.counts["crashes"] += self.scheduler.crashes
        self.counts["pauses"] += self.scheduler.pauses
        self.counts["events"] += len(self.history)
        return Result(self.seed, anomalies, self.problems, self.history, self.counts)

    def _play(self) -> None:
        s = self.scenario
        roles = [Role(source.role, source.work) for source in self.sources]
        roles += [Role(f"checker{i}", self.check_rounds) for i in range(s.checkers)]
        readers = [Role(f"reader{i}", Reader(self, f"reader{i}").work) for i in range(s.readers)]
        roles += readers
        roles += [Role(f"clerk{i}", self.make_topics) for i in range(s.clerks)]
        if s.upkeep:
            roles.append(Role("upkeep", self.upkeep))
        for name, group in self._processes(roles):
            names = {role.name for role in group}
            # Two incarnations of a reader at once would each leave out what the other one has read.
            may_sleep = names & {source.role for source in self.sources} and not names & {r.name for r in readers}
            supervisor = Supervisor(self, name, group, s.zombies if may_sleep else 0.0)
            self.world.spawn(f"cluster/{name}", supervisor, True)
        if s.stranger:
            self.world.spawn("stranger", lambda: self.check_rounds(self.world.open_log(), self.wrong_database))
        if s.person:
            self.world.spawn("person", self.person)
        if s.deletions:
            self.world.spawn("another writer", self.delete_rows, immortal=True)
        self.scheduler.run()

    def _processes(self, roles: list[Role]) -> list[tuple[str, list[Role]]]:
        """Who is a process of its own, or shares one."""
        if self.scenario.threads == 1:
            return [(role.name, [role]) for role in roles]
        senders = {source.role for source in self.sources if isinstance(source, SendSource)}
        shares = self.scenario.senders > 1 and not self.scenario.apart
        together = [role for role in roles if role.name in senders] if shares else []
        others = [role for role in roles if role not in together]
        self.chance.shuffle(others)
        count = -(-len(others) // self.scenario.threads)
        groups = [together] if together else []
        return [(f"process{i}", group) for i, group in enumerate([*groups, *(others[i::count] for i in range(count))])]

    def producer(self, log: SimulatedLog) -> TransactionMQProducer:
        """The one producer of a process. Its threads share it, and so their commits."""
        known = self.producers.get(log)
        if known is None:
            s = self.scenario
            known = self.producers[log] = TransactionMQProducer(
                log, GROUP, self.listener(), on_listener_error=s.on_listener_error, check_interval=None
            )
            known.two_phase.replay_check_timeout_s = 8.0
            if s.unkeyed:
                header_of = known._sender._header
                known._sender._header = lambda *given: replace(header_of(*given), naming=Naming.MADE_UP)  # type: ignore[method-assign]
        return known.start()  # whoever comes while another thread starts it waits for that

    # ------------------------------------------------------------------ repair, and the end
    def _repair(self) -> None:
        """No more faults: bring everything to its end."""
        self.at_ease = True
        self.scheduler.crash_rate = self.scheduler.pause_rate = 0.0
        self.scenario.weather.calm()
        for table in (self.world.half, self.world.op, self.world.topics, self.world.messages):
            table.land_all()
        self.scenario.temper.calm()
        self.world.spawn("repair", self._settle, immortal=True)
        self.scheduler.run()

    def _settle(self) -> None:
        for round_ in range(DRAIN_ROUNDS_MAX):
            unfinished = [source for source in self.sources if not source.finished]
            for source in unfinished:
                self.tolerate(lambda source=source: source.work(self.world.open_log()))
            log, listener = self.world.open_log(), self.listener()
            is_open = (
                self._rows_open() and self.check_round(self.service(log, listener, "quarantine"), log, listener) != 0
            )
            if {"quarantine", "conflict"} & set(self.world.op.rows()["kind"].to_pylist()):
                is_open |= self.put_right(log)
            if not unfinished and not is_open:
                break
            # All clocks may have stepped by days, and then everything is young for as long. A wrong one of a single
            # machine must keep nothing open.
            self.scheduler.sleep(30.0 if round_ < 5 or self.scenario.wrong_clocks else DAY_S / 4)
        self.problems += [f"{source.role} never comes to its end" for source in self.sources if not source.finished]

    def _rows_open(self) -> bool:
        """Whether op rows leave half rows open, counted from outside."""
        half, rows = with_what_left(self.world)
        op = rows.select(["kind", "count"]).to_pylist()
        signs = {"commit": 1, "rollback": 1, "quarantine": 1, "reopen": -1}
        return sum(signs.get(row["kind"], 0) * row["count"] for row in op) != half.num_rows

    def _look(self) -> None:
        """Read everything, move everything, and read it again; and note what the tables hold."""
        self.history.note(Kind.END)

        def read(operation: str) -> Callable[[], None]:
            def work() -> None:
                log = self.world.open_log()
                found = log.read(TOPIC, columns=READ_COLUMNS)
                found = self.with_expired(log.engine.firsts(), found)
                note_messages(self.history, Kind.READ, "final", operation, found)

            return work

        self.world.spawn("final", read(FINAL), immortal=True)
        self.scheduler.run()
        if self.scenario.upkeep > 1:
            for work in (self.move, self.vacuum, lambda: self.merge(self.world.open_log()), read(f"{FINAL} again")):
                self.world.spawn("final", work, immortal=True)
                self.scheduler.run()
        for drain in (lambda: self.world.open_log().drain(), lambda: self.read_drained(self.world.open_log(), FINAL)):
            self.world.spawn("final", drain, immortal=True)
            self.scheduler.run()
        half, op = with_what_left(self.world)
        names = self.world.topics.rows()["name"].to_pylist()
        note_tables(self.history, half, op, prepared_s(self.world.half), names)
        note_expired(self.history, self.world.op.ever(), self.world.messages.ever())
        for table in (self.world.half, self.world.op, self.world.topics):
            table.note_versions()

    # ------------------------------------------------------------------ listeners and checkers
    expected = EXPECTED

    def listener(self, database: Database | None = None) -> Listener | NoListener:
        """A listener of a process of its own."""
        s = self.scenario
        if s.listener == "none":
            return NoListener()
        parts = (database or self.database, self.scheduler, self.history, s.temper)
        if s.listener == "versioned":
            return VersionedListener(*parts, DeltaTwin("another table") if database else self.delta)
        if s.parts:
            return SqlListener(*parts)
        if s.listener == "fenced":
            fenced = FencedListener(*parts)
            fenced.prunes = s.prunes
            return fenced
        bare = BareListener(*parts)
        bare.store_id = bare.database.fence_id if s.stranger else None
        return bare

    def check_rounds(self, log: SimulatedLog, database: Database | None = None) -> None:
        """A checker's life: some rounds."""
        listener = self.listener(database)
        service = self.service(log, listener, self.scenario.discard)
        for _ in range(self.scenario.rounds):
            self.check_round(service, log, listener)
            self.scheduler.sleep(self.chance.choice((3.0, 20.0, 40.0)))

    def service(self, log: SimulatedLog, listener: Listener | NoListener, discard: str) -> CheckService:
        return CheckService(
            log, {GROUP: listener}, transaction_timeout=self.scenario.check_timeout_s,
            transaction_check_max=self.scenario.checks_max, discard_policy=discard, round_timeout=None,
        )  # fmt: skip

    def check_round(self, service: CheckService, log: SimulatedLog, listener: Listener | NoListener) -> int | None:
        """A round; how many half batches are open after it, or None when it failed."""
        listener.seen_version = log.seen_version
        self.counts["rounds"] += 1
        try:
            report = service.run_once()
        except OSError:  # a round that fails as a whole is tried again
            return None
        self.counts["checked"] += report.checked.transactions
        self.problems += [f"checker: {sentence}" for _, sentence in report.problems if "CorruptLog" in sentence]
        return report.pending

    # ------------------------------------------------------------------ a person
    def person(self) -> None:
        """Looks now and then at what is open, and decides by what the database says."""
        for _ in range(2):
            self.scheduler.sleep(self.chance.choice((5.0, 30.0, 90.0)))
            self.tolerate(lambda: self.put_right(self.world.open_log(), also_pending=True))

    def put_right(self, log: SimulatedLog, also_pending: bool = False) -> bool:
        """Resolve what waits for a person, when anything does; what the database knows nothing uniform about is asked
        again."""
        waiting = set(log.conflicts()) | set(log.quarantined()["half_id"].to_pylist())
        if also_pending:
            waiting |= set(log.pending()["half_id"].to_pylist())
        waiting = {h for h in waiting if name_of(h) != self.scenario.temper.poison}  # nobody will ever answer for it
        for half_id in sorted(waiting):
            record = log.engine.get(half_id)
            state = log.engine.state_of(record)
            verdict = self._truth(log, record, state)
            if verdict is None and state.in_conflict:
                verdict = COMMIT_MESSAGE
            if verdict is None or (not state.in_conflict and self.chance.random() < 0.5):
                log.resume(half_id, "a person asks for another check")
                continue
            self.counts["resolved"] += 1
            try:
                log.resolve(half_id, verdict, "the database says so")
            except VerdictConflictError:  # it is visible: only this is left
                self.tolerate(lambda half_id=half_id: log.resolve(half_id, COMMIT_MESSAGE, "it is visible already"))
        return bool(waiting)

    def _truth(self, log: CommitLog, record: HalfRecord, state: BatchState) -> LocalTransactionState | None:
        """What became of all that is open; None when that differs, or is not known for good."""
        if self.scenario.listener != "fenced":
            return None
        found = set()
        for attempt in state.attempts(*RowState):
            mask = state.rows_in(tuple(RowState), attempt)
            batch = log.engine.half_batch(record, state, attempt, mask)
            found |= set(self.database.said(batch))
        if found == {"executed"}:
            return COMMIT_MESSAGE
        return ROLLBACK_MESSAGE if found <= {"rolled_back", "tombstone"} else None

    # ------------------------------------------------------------------ another writer
    def delete_rows(self) -> None:
        """Deletes rows of ``messages`` by deletion vectors. A person restores the version before, as the error says."""
        for _ in range(self.scenario.deletions):
            self.scheduler.sleep(self.chance.choice((10.0, 30.0, 90.0)))
            before = self.world.messages.delete_a_row()
            if before is None:
                continue
            self.counts["rows deleted by another writer"] += 1
            self.scheduler.sleep(self.chance.choice((1.0, 30.0, 90.0)))
            self.world.messages.restore(before)

    # ------------------------------------------------------------------ topics
    def make_topics(self, log: SimulatedLog) -> None:
        """A program that makes its topics whenever it starts; others make the same ones."""
        for number in range(2):
            self.scheduler.sleep_to_next(APPOINTMENT_S)
            name = f"topic{number}"
            if name not in log.topics():
                with suppress(TopicExistsError):
                    log.create_topic(name, self.chance.choice((1, 2)), exist_ok=True)

    # ------------------------------------------------------------------ upkeep
    def upkeep(self, log: SimulatedLog) -> None:
        works: dict[str, Callable[[], object]] = {
            "mark": lambda: self.mark(log),
            "drain": lambda: self.drain(log),
            "leave": self.leave,
            "merge": lambda: self.merge(log),
            "move": self.move,
            "vacuum": self.vacuum,
            "clean_up": self.clean_up,
            "step_clock": self.step_clock,
        }
        for _ in range(self.scenario.upkeep):
            self.scheduler.sleep(self.chance.choice((1.0, 10.0, 60.0)))
            name = self.chance.choice(list(works))
            self.counts[name] += 1
            self.tolerate(works[name])

    def mark(self, log: SimulatedLog) -> None:
        log.engine.ledger.mark()

    def drain(self, log: SimulatedLog) -> None:
        """Drain, perhaps beside another process, and read what is there."""
        if self.chance.random() < 0.5:
            rival = f"drainer{self.counts['drain']}"
            self.world.spawn(rival, lambda: self.tolerate(lambda: self._drain(self.world.open_log())))
        self._drain(log)
        self.read_drained(log, str(self.counts["drain"]))

    def _drain(self, log: CommitLog) -> None:
        try:
            log.drain()
        except ForeignChangeError:
            self.counts["upkeep stopped by another writer"] += 1

    def leave(self) -> None:
        """All upkeep of the product, by a process of its own, and perhaps another one beside it."""
        if self.chance.random() < 0.3:
            rival = f"maintainer{self.counts['leave']}"
            self.world.spawn(rival, lambda: self.tolerate(self._leave))
        self._leave()

    def _leave(self) -> None:
        # A sender may try again under its key as long as the outcome is kept.
        forgets = not self.scenario.senders and self.chance.random() < 0.3
        graces = Graces(
            self.chance.choice((0.0, 0.0, 20.0)), self.chance.choice((0.0, 60.0)), 0.0 if forgets else DAY_S * 1000
        )
        try:
            report = upkeep.maintain(self.world.open_log().engine, graces)
        except ForeignChangeError:
            self.counts["upkeep stopped by another writer"] += 1
            return
        self.counts["half batches that left"] += report.archived
        self.counts["half files stripped"] += report.files_stripped
        self.counts["files expired"] += report.files_expired
        self.counts["op rows pruned"] += report.rows_pruned
        if self.scenario.prunes:
            self.counts["fence rows pruned"] += self.database.prune(self.world.open_log().engine.still_in_half)

    def read_drained(self, log: SimulatedLog, operation: str) -> None:
        """The table ``messages`` as it is at some moment, for any reader of Delta."""
        table = log.engine.messages_table
        table.refresh()
        # What has expired by now, whatever this log has read: the files may have gone before it hears of that.
        found, position = table.read(table.actions()["path"].to_pylist()), drained_up_to(table)
        rows = self.with_expired(said_last(self.world), found, drained=position)
        note_drained(self.history, self.world.process, operation, rows, position)

    def merge(self, log: SimulatedLog) -> None:
        op_merge.compact_op(log.engine.op_table)

    def move(self, keeps_time: bool = True) -> None:
        """Half files are written anew under other names, with their time of prepare, as stripping does."""
        table = self.world.open_log().engine.half.table
        table.refresh()
        for file in table.actions().to_pylist():
            if self.chance.random() < 0.3:
                continue
            moved = table.write(table.read([file["path"]]))

            def propose(_: int, file: Mapping[str, Any] = file, moved: DataFile = moved) -> Change | None:
                if file["path"] not in table.actions()["path"].to_pylist():
                    return None
                ms = file["modification_time"] if keeps_time else None
                return Change(add=[moved], remove=[file["path"]], data_change=False, modification_time_ms=ms)

            table.compare_and_set(propose, lambda change: all(was_added(table, f) for f in change.add))

    def vacuum(self) -> None:
        """Half files that moved are deleted."""
        content = self.world.half.content
        for path in set(content.removed) - set(content.versions[-1].files):
            self.world.half.fs.tables.pop(f"half/{path}", None)

    def clean_up(self) -> None:
        kept = self.chance.choice((0, 0, 1, 3))
        self.chance.choice((self.world.half, self.world.op)).clean_up(kept)

    def step_clock(self) -> None:
        if self.scenario.clock_steps:
            self.scheduler.clock_offset_s += self.chance.choice((-DAY_S, -3600.0, -1.0, 1.0, 3600.0, DAY_S))

    def with_expired(
        self,
        firsts: Mapping[tuple[str, int], int],
        found: pa.Table,
        start: Mapping[int, int] | None = None,
        drained: int | None = None,
    ) -> pa.Table:
        """What was read, and before it what has expired by these first offsets, from a reader's start on. So every rule
        of the judge sees whole queues. What was drained up to a version of ``op`` has nothing of later ones."""
        if not firsts:
            return found
        below = dict(firsts)
        for topic, queue, offset in zip(*(found[name].to_pylist() for name in PLACE), strict=True):
            below[topic, queue] = min(offset, below.get((topic, queue), 0))  # what has expired since comes after it
        ever = self.world.messages.ever()
        if drained is not None:
            ever = ever.filter(pc.less_equal(ever["op_version"], drained))
        places = zip(*(ever[name].to_pylist() for name in PLACE), strict=True)
        gone = [(start or {}).get(queue, 0) <= offset < below.get((topic, queue), 0) for topic, queue, offset in places]
        return pa.concat_tables([ever.filter(pa.array(gone, pa.bool_())).select(found.column_names), found])

    # ------------------------------------------------------------------ what processes share
    def tolerate(self, work: Callable[[], object]) -> bool:
        """Do it; True when it came to its end, False when a fault that must be expected stopped it."""
        try:
            work()
        except EXPECTED as problem:
            if isinstance(problem.__cause__, CorruptLogError):
                raise problem.__cause__ from None
            self.counts[type(problem).__name__] += 1
            return False
        return True


def said_last(world: World) -> dict[tuple[str, int], int]:
    """The first offsets that ``op`` has said last; they only grow."""
    ever = world.op.ever()
    firsts: dict[tuple[str, int], int] = {}
    for said in ever.filter(pc.equal(ever["kind"], "expire"))["firsts"].to_pylist():
        for f in said:
            queue = (f["topic"], f["queue_id"])
            firsts[queue] = max(f["first_offset"], firsts.get(queue, 0))
    return firsts


def with_what_left(world: World) -> tuple[pa.Table, pa.Table]:
    """The rows of ``half`` and ``op``, as if nothing had ever left."""
    half, op = world.half.rows(), world.op.rows()
    ever = world.op.ever()
    left = pc.unique(ever.filter(pc.equal(ever["kind"], "archived"))["half_id"])
    gone = left.filter(pc.invert(pc.is_in(left, value_set=pc.unique(half["half_id"]))))
    half_ever = world.half.ever()
    half = _before_it_was_stripped(half, half_ever)
    half = pa.concat_tables([half, half_ever.filter(pc.is_in(half_ever["half_id"], value_set=gone))])
    here = op.filter(pc.invert(pc.is_in(op["half_id"], value_set=left)))
    return half, pa.concat_tables([here, ever.filter(pc.is_in(ever["half_id"], value_set=left))])


def _before_it_was_stripped(half: pa.Table, ever: pa.Table) -> pa.Table:
    """Rows of ``half`` with their payload."""
    is_whole = pc.is_valid(half["body"])
    if pc.all(is_whole).as_py() is not False:
        return half
    columns = ["half_id", "file_no", "row_no"]
    lies = {at: i for i, at in enumerate(zip(*(ever[name].to_pylist() for name in columns), strict=True))}
    stripped = half.filter(pc.invert(is_whole))
    at = [lies[address] for address in zip(*(stripped[name].to_pylist() for name in columns), strict=True)]
    return pa.concat_tables([half.filter(is_whole), ever.take(at)])


@dataclass(frozen=True)
class Role:
    """What a thread does on the commit log of its process."""

    name: str
    work: Callable[[SimulatedLog], object]


class Supervisor:
    """Starts a process again for those of its threads that ended early; sometimes while the one before only sleeps."""

    def __init__(self, simulation: Simulation, name: str, roles: Sequence[Role], zombies: float = 0.0) -> None:
        self._simulation, self._name, self._zombies = simulation, name, zombies
        self._left = list(roles)

    def __call__(self) -> None:
        simulation, scheduler = self._simulation, self._simulation.scheduler
        for number in range(INCARNATIONS_MAX):
            threads = self._start(number)
            if simulation.chance.random() < self._zombies:
                scheduler.sleep(simulation.chance.choice((0.05, 1.0, 30.0)))  # taken for dead
            else:
                for thread in threads:
                    scheduler.join(thread)
            if not self._left:
                return
            scheduler.sleep(simulation.chance.choice((0.1, 5.0, 30.0)))

    def _start(self, number: int) -> list[Task]:
        process = Process(f"{self._name}#{number}")
        process.shared = len(self._left) > 1
        process.clock_offset_s = self._simulation.world.clock_offset_s()
        self._simulation.counts["wrong clocks"] += process.clock_offset_s != 0
        log = self._simulation.world.open_log()
        spawn = self._simulation.scheduler.spawn
        return [spawn(process, lambda role=role: self._live(role, log), f"{role.name}#{number}") for role in self._left]

    def _live(self, role: Role, log: SimulatedLog) -> None:
        simulation, chance = self._simulation, self._simulation.chance
        shared = len(self._left) > 1
        while not simulation.tolerate(lambda: role.work(log)):
            if not shared or chance.random() < 0.5:
                return
            simulation.scheduler.sleep(chance.choice((0.1, 5.0, 30.0)))  # it tries again, with the others' handle
        if role in self._left:
            self._left.remove(role)


# ---------------------------------------------------------------- who sends
class Source:
    """Batches that must be sent once each, by one incarnation after the other.

    Parameters
    ----------
    name : str
        Of the application. Who sends the same has the same.
    role : str, optional
    """

    def __init__(self, simulation: Simulation, name: str, role: str | None = None) -> None:
        self.simulation, self.name, self.role = simulation, name, role or name
        s = simulation.scenario
        self.batches = s.batches
        self.done = 0  # batches that the checkpoint says are done
        self.restored: str | None = None
        self.slipped = not s.slips

    @property
    def finished(self) -> bool:
        return self.done >= self.batches

    def work(self, log: SimulatedLog) -> None:
        raise NotImplementedError

    def keep_appointment(self) -> None:
        if self.simulation.scenario.rivals:
            self.simulation.scheduler.sleep_to_next(APPOINTMENT_S)

    def slip(self, log: SimulatedLog, listener: Listener | NoListener) -> None:
        """Send a time that is out of bounds. Nothing of it may be staged; what is accepted must come to its end."""
        if self.slipped:
            return
        self.slipped = True
        app_id = f"slip-{self.name}"
        half_id = batch_name(app_id, 0)
        header = HalfHeader(half_id, app_id, 0, None, None, listener.store_id, "batch", GROUP)
        writer = HalfWriter(header, {TOPIC: self.simulation.scenario.queues}, TOPIC, None)
        now_us = int(log.engine.runtime.time() * 1_000_000)
        times = pa.array([now_us, NO_TIME_US], pa.int64()).cast(TIMESTAMP)
        columns = {"body": [f"{app_id}.{i}" for i in range(2)]}
        try:
            files = log.engine.stage(writer, self.table(columns).append_column("deliver_at", times).to_batches())
        except MessageError:
            self.simulation.counts["slips refused"] += 1
            return
        begun = self.events(columns, 0, header.name)
        self.simulation.history.extend(begun)
        try:
            TwoPhase(log.engine, listener, on_listener_error="unknown").send(header, lambda: files)
        except Exception as problem:
            self.simulation.problems.append(f"slip: {type(problem).__name__}: {problem}")
        self.told(begun, Phase.UNKNOWN)

    def columns(self, batch_id: int, other: str = "") -> dict[str, list[Any]]:
        """The messages of a batch: the same whenever it is asked for."""
        s = self.simulation.scenario
        bodies = [f"{self.name}.{batch_id}.{i}{other}" for i in range(s.rows)]
        columns: dict[str, list[Any]] = {"body": bodies}
        if s.per == "key":
            columns["k"] = [f"k{i % (s.parts + 1 if s.parts else 2)}" for i in range(s.rows)]
        if s.sharded:
            columns["sharding_key"] = [f"{self.name}-{i % 2}" for i in range(s.rows)]
        if s.immunity:
            columns["properties"] = [[(CHECK_IMMUNITY_PROPERTY, "2" if i % 2 else "25")] for i in range(s.rows)]
        return columns

    def events(self, columns: dict[str, list[Any]], batch_id: int, name: str) -> list[Event]:
        s = self.simulation.scenario
        shards = columns.get("sharding_key")
        return [
            Event(
                Kind.SEND, Phase.BEGIN, self.simulation.world.process, half_id=name, batch_id=batch_id,
                payload=payload_hash(body), topic=TOPIC, operation=f"{self.simulation.world.process}/{batch_id}",
                key=shards[i] if shards and s.partitions == 1 and not s.parts else None,
                sequence=batch_id * s.rows + i if shards and s.partitions == 1 and not s.parts else None,
            )
            for i, body in enumerate(columns["body"])
        ]  # fmt: skip

    @staticmethod
    def table(columns: dict[str, list[Any]]) -> pa.Table:
        """The columns as a program gives them."""
        kinds = {"properties": PROPERTIES}
        return pa.table({name: pa.array(values, kinds.get(name)) for name, values in columns.items()})

    def told(self, begun: Sequence[Event], phase: Phase, verdict: LocalTransactionState | None = None) -> None:
        for event in begun:
            self.simulation.history.note(
                Kind.SEND, phase, event.process, half_id=event.half_id, batch_id=event.batch_id,
                payload=event.payload, topic=TOPIC, operation=event.operation, key=event.key,
                sequence=event.sequence, verdict=None if verdict is None else verdict.value,
            )  # fmt: skip


_VERDICT_OF = {RowState.COMMITTED: COMMIT_MESSAGE, RowState.ROLLED_BACK: ROLLBACK_MESSAGE}


class Checkpoint:
    """The folder of a stream's checkpoint. Spark plans a batch of one as another than that of any other."""

    def __init__(self, name: str) -> None:
        self.name, self.files = name, dict[str, bytes]()

    def plan(self, batch_id: int) -> str:
        """Write the offsets of a batch, and return their hash."""
        self.write(f"offsets/{batch_id}", f"{self.name}, batch {batch_id}".encode())
        return input_hash_of(self.files[f"offsets/{batch_id}"])

    def read(self, file: str) -> bytes | None:
        return self.files.get(file)

    def write(self, file: str, content: bytes) -> None:
        self.files[file] = content


class StreamSource(Source):
    """A streaming query: a driver that runs one micro-batch after the other, and goes on from its checkpoint."""

    def __init__(self, simulation: Simulation, name: str, role: str | None = None) -> None:
        super().__init__(simulation, name, role)
        self.lives = 0
        self.checkpoint = Checkpoint(self.role)
        self.empty = int(self.role != name)  # so many batches have sent nothing

    def work(self, log: SimulatedLog) -> None:
        simulation, world = self.simulation, self.simulation.world
        self.lives += 1
        mistaken = self.changed_listener()
        listener = mistaken or simulation.listener()
        self.slip(log, listener)
        parts = self.parts_of_this_life()
        while not self.finished:
            self.keep_appointment()
            if mistaken is not None and log.engine.find(self.name, self.done + self.empty) is None:
                raise FenceError("the operator sees that the driver has no listener")
            self.send(log, listener, self.done, parts=parts)
            world.scheduler.step()  # Spark's own commit is another moment
        if simulation.scenario.restored and self.restored is None:
            self.restored = simulation.scenario.restored
            self.send(log, listener, self.batches - 1, self.restored, parts)

    def changed_listener(self) -> NoListener | None:
        """What a driver that is started again may be given by mistake."""
        simulation = self.simulation
        if not simulation.scenario.changed or simulation.at_ease or self.lives == 1 or simulation.chance.random() < 0.5:
            return None
        return NoListener()

    def parts_of_this_life(self) -> int:
        """The number of parts that this driver stages; 0: it runs local transactions itself."""
        simulation, most = self.simulation, self.simulation.scenario.parts
        if not most or simulation.chance.random() < ON_DRIVER:
            return 0
        return simulation.chance.choice((most, most, max(2, most - 1)))

    def send(
        self,
        log: SimulatedLog,
        listener: Listener | NoListener,
        batch_id: int,
        restored: str | None = None,
        parts: int = 0,
    ) -> None:
        simulation, s = self.simulation, self.simulation.scenario
        columns = self.columns(batch_id, "'" if restored else "")
        number = batch_id + self.empty
        checkpoint = Checkpoint(f"an older {self.role}") if restored == "offsets" else self.checkpoint
        offsets: str | None = checkpoint.plan(number)
        query: str | None = f"query of {self.name}{'b' if restored == 'query' else ''}"
        if restored == "hidden":
            query = offsets = None
        half_id = half_id_of(self.name, number, query, offsets)
        header = HalfHeader(half_id, self.name, number, query, offsets, listener.store_id, s.per, GROUP)
        fifo = frozenset({TOPIC} if s.fifo else ())
        writer = HalfWriter(header, {TOPIC: s.queues}, TOPIC, "k" if s.per == "key" else None, fifo)
        table = self.table(columns)
        files: list[Any] = []
        for partition, rows in enumerate(self.partitions(table, parts)):
            if rows.num_rows:
                files += log.engine.stage(writer, rows.to_batches(), partition)
        run: dict[str, Any] = {}
        if parts:
            run["run"] = runner = PartRunner(Executors(simulation))

        def stage() -> list[Any]:
            if parts:
                runner.staged_here = header.half_id
            return files

        begun = self.events(columns, batch_id, header.name)
        simulation.history.extend(begun)
        simulation.scheduler.step()
        listener.seen_version = log.seen_version
        two_phase = TwoPhase(
            log.engine, listener, on_listener_error=s.on_listener_error, replay_check_timeout_s=8.0, **run
        )
        try:
            outcome = two_phase.send(header, stage, lineage=Lineage(checkpoint))
        except CheckpointMismatchError:
            self.told(begun, Phase.FAIL)
            if not restored and not s.forks:
                raise
            self.done = self.batches  # an operator goes on with the other one
            return
        except EXPECTED:
            self.told(begun, Phase.UNKNOWN)
            self.abort(log, [f.data.path for f in files])
            raise
        verdicts = {_VERDICT_OF.get(state) for state in outcome.messages}
        self.told(begun, Phase.OK, verdicts.pop() if len(verdicts) == 1 else None)
        self.done = max(self.done, batch_id + 1)

    def abort(self, log: SimulatedLog, paths: Sequence[str]) -> None:
        """What Spark calls after a failed commit. A commit that timed out may still land: nothing is deleted."""

    def partitions(self, table: pa.Table, parts: int) -> list[pa.Table]:
        """The messages by the partition that stages them; with parts, each transaction in one of them."""
        s = self.simulation.scenario
        if not parts:
            size = -(-table.num_rows // s.partitions)
            return [table.slice(n * size, size) for n in range(s.partitions)]
        dealt = [int(key[1:]) for key in table["k"].to_pylist()] if s.per == "key" else range(table.num_rows)
        return [table.filter(pa.array([number % parts == n for number in dealt])) for n in range(parts)]


class SendSource(Source):
    """A program that sends with TransactionMQProducer, and sends again under the same idempotency key."""

    def work(self, log: SimulatedLog) -> None:
        simulation, s = self.simulation, self.simulation.scenario
        producer = simulation.producer(log)
        listener: Any = producer.listener
        self.slip(log, listener)
        while not self.finished:
            self.keep_appointment()
            batch_id = self.done
            columns = self.columns(batch_id)
            idempotency_key = f"{self.name}-{batch_id}"
            if s.unkeyed:  # each has a name of its own, which nothing can have had before, and is not sent again
                idempotency_key += f"-{simulation.world.runtime.unique_id()}"
                self.done = max(self.done, batch_id + 1)
            name = batch_name(f"send.{GROUP}.{idempotency_key}", 0)
            begun = self.events(columns, batch_id, name)
            simulation.history.extend(begun)
            if s.senders == 1:  # else other threads ask the same listener
                listener.seen_version = log.seen_version
            try:
                result = producer.send_messages_in_transaction(
                    self.table(columns), topic=TOPIC, transaction_key="k" if s.per == "key" else None,
                    transaction_per=None if s.per == "key" else s.per, idempotency_key=idempotency_key,
                )  # fmt: skip
            except HalfBatchLeftError:  # rolled back by a check so long ago that it cannot be run again
                self.told(begun, Phase.FAIL)
                self.done = max(self.done, batch_id + 1)
                continue
            except EXPECTED:
                self.told(begun, Phase.UNKNOWN)
                raise
            verdict = result.local_transaction_state
            self.told(begun, Phase.OK, None if verdict is LocalTransactionState.UNKNOWN else verdict)
            self.done = max(self.done, batch_id + 1)
            simulation.scheduler.step()


# ---------------------------------------------------------------- who reads
class Reader:
    """A consumer that remembers how far it has come, over its deaths."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.position: dict[int, int] = {}
        self.polls = 0

    def work(self, log: SimulatedLog) -> None:
        simulation, s = self.simulation, self.simulation.scenario
        planner = Planner(log.engine, Subscription((TOPIC,))) if s.planner else None
        while self.polls < s.polls:
            simulation.scheduler.sleep(simulation.chance.choice((1.0, 20.0, 60.0)))
            self.polls += 1
            operation = f"{simulation.world.process}/{self.polls}"
            if simulation.chance.random() < 0.3:
                self._note_messages(Kind.READ, log, log.read(TOPIC, columns=READ_COLUMNS), operation)
                continue
            limit = simulation.chance.choice((None, 1, 2))
            try:
                found = (
                    self._plan(log, planner, limit) if planner else log.read(TOPIC, self.position, limit, READ_COLUMNS)
                )
            except OffsetOutOfRangeError:
                found = pa.schema(SCHEMA).empty_table()  # it goes on at the first offset
            self._go_on(self._note_messages(Kind.POLL, log, found, operation, self.position), operation)

    def _plan(self, log: SimulatedLog, planner: Planner, limit: int | None) -> pa.Table:
        """As the streaming source does."""
        start = {(TOPIC, q): offset for q, offset in self.position.items()}
        end = admit(start, planner.latest(), limit)
        parts = [pa.schema(SCHEMA).empty_table()]
        parts += read_ranges(planner.ranges(start, end), log.engine.read_range, log.engine.find_again, READ_COLUMNS)
        planner.forget(start)
        return pa.concat_tables(parts)

    def _note_messages(
        self, kind: Kind, log: SimulatedLog, found: pa.Table, operation: str, start: Mapping[int, int] | None = None
    ) -> pa.Table:
        """Note what was read, and before it what has expired, of which ``op`` may tell at a later version."""
        simulation, version = self.simulation, log.read_version
        whole = simulation.with_expired(log.engine.firsts(), found, start)
        expired = whole.slice(0, whole.num_rows - found.num_rows)
        for part, at in ((expired, log.read_version), (found, version)):
            note_messages(simulation.history, kind, simulation.world.process, operation, part, at)
        return whole

    def _go_on(self, found: pa.Table, operation: str) -> None:
        """Go on after what was read."""
        simulation = self.simulation
        process = simulation.world.process
        ends = found.group_by(["queue_id"], use_threads=False).aggregate([("queue_offset", "max")]).to_pylist()
        for end in sorted(ends, key=lambda e: e["queue_id"]):
            queue_id, next_offset = end["queue_id"], end["queue_offset_max"] + 1
            simulation.history.note(
                Kind.POLLED, Phase.OK, process, topic=TOPIC, queue_id=queue_id, operation=operation,
                queue_offset=self.position.get(queue_id, 0), next_offset=next_offset,
            )  # fmt: skip
            self.position[queue_id] = next_offset


SCHEMA = [
    ("topic", pa.string()), ("queue_id", pa.int32()), ("queue_offset", pa.int64()), ("msg_id", pa.string()),
    ("transaction_id", pa.string()), ("sharding_key", pa.string()), ("body", pa.binary()),
]  # fmt: skip


# ---------------------------------------------------------------- many seeds
def simulate(seed: int, scenario: Scenario | None = None) -> Result:
    """Play one seed."""
    return Simulation(seed, scenario).run()


def play_chunk(seeds: range) -> tuple[int, Counter[str], list[tuple[int, str]]]:
    """Play some seeds in this process: how many, what happened in them, and what was wrong in which."""
    logging.disable(logging.CRITICAL)
    pa.set_cpu_count(1)  # tables of a few rows: a pool of threads only costs
    counts: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    gc.disable()
    for seed in seeds:
        result = simulate(seed)
        counts += result.counts
        if not result.good:
            failures.append((seed, "; ".join([*result.problems, *(a.kind.value for a in result.anomalies)])))
    gc.enable()
    return len(seeds), counts, failures


def run(
    seconds: float, seed: int, count: int = SEEDS_WANTED, processes: int = 2, chunk: int = 25
) -> dict[str, int | str | list[Any]]:
    """Play seeds from ``seed`` on until the time, or their number, is reached.

    Parameters
    ----------
    count : int
        At most so many seeds.
    processes : int
        They are spawned: each has a simulation of its own.
    """
    started, told = time.monotonic(), time.monotonic()
    played = 0
    total: Counter[str] = Counter()
    failures: list[str] = []

    def chunks() -> Iterator[range]:
        first = seed
        while first < seed + count and time.monotonic() - started < seconds:
            last = min(first + chunk, seed + count)
            yield range(first, last)
            first = last

    with get_context("spawn").Pool(processes) as pool:
        waiting: list[Any] = []
        supply = chunks()
        while True:
            while len(waiting) < processes + 1 and (seeds := next(supply, None)) is not None:
                waiting.append(pool.apply_async(play_chunk, (seeds,)))
            if not waiting:
                break
            done, counts, failed = waiting.pop(0).get()
            played += done
            total += counts
            failures += [f"seed {number}: {what}" for number, what in failed]
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"simulation: {played:,} seeds, {played / (told - started):.1f} a second, {len(failures)} failed")
    return {
        "what": "deterministic simulation",
        "seeds": played,
        "first seed": seed,
        "seeds wanted": count,
        "seconds": round(time.monotonic() - started),
        "failures": failures,
        **{name.replace("_", " "): n for name, n in sorted(total.items())},
    }


def main(arguments: Sequence[str]) -> int:
    """Show the history of some seeds, and what is wrong in each; 1 when anything is."""
    if not arguments or not all(a.isdigit() for a in arguments):
        print("python -m tests.torture.simulate.simulation SEED [SEED …]: plays these seeds and shows their histories")
        return 2
    logging.disable(logging.CRITICAL)
    good = True
    for argument in arguments:
        shown = simulate(int(argument))
        for line in shown.history:
            print(line)
        for finding in [*shown.problems, *map(str, shown.anomalies)]:
            print(finding)
        print(f"seed {argument}: {len(shown.history)} events, {'nothing' if shown.good else 'something'} is wrong")
        good &= shown.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
