"""A job whose local transactions run in parts, and of which something dies again and again, by a seed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import sqlalchemy as sa

from rmq_spark import CheckService, CommitLog, SqlTransactionListener
from tests.process.postgres import crash
from tests.spark.parts_shop import DRIVER_POINTS, GROUP, REFUSED, TASK_POINTS, dead, doom
from tests.support.cluster import DEADLINE_S, wait_until

FILES, ROWS, COPIES = 12, 40, 2
"""Micro-batches that a job begins with, the orders of one, and the messages of an order."""
AT_ONCE_S = 20.0
"""Seconds for which a death waits for a process that comes to its point, before the next death is told."""
EXPECTED_ENDS = (
    "a check has rolled back transactions",
    "OperationalError",
    "LocalTransactionError",
    "UnresolvedTransactionError",
    "Job aborted due to stage failure",
    "server closed the connection",
)
"""What a driver may say when it ends without being killed: the next one goes on."""
NEVER = ("VerdictConflictError", "VerdictError", "FenceError", "KeyError", "AssertionError")
"""What no driver and no check may say."""


VARIES = r"[0-9a-f]{8}[0-9a-f-]*|\d+"


class Job(ABC):
    """Micro-batches of orders, their database and their check job.

    Attributes
    ----------
    kills : Counter of str
        The deaths that no point has met, but a random time.
    ends : list of str
        What drivers printed that ended and were not killed.
    problems : list of str
        What checks had to say.
    """

    has_executors = True
    slowness_s = 6.0
    """How long pauses are at most."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        for name in ("in", "doomed", "met"):
            (folder / name).mkdir()
        self.log = CommitLog.create(folder / "log")
        self.log.create_topic("orders", queues=2)
        self.engine = sa.create_engine(url, poolclass=sa.NullPool)
        with self.engine.begin() as connection:
            connection.execute(sa.text("create table orders (n integer, attempt integer, part integer)"))
        SqlTransactionListener(self.engine).create_fence()
        self.kills: Counter[str] = Counter()
        self.ends: list[str] = []
        self.problems: list[str] = []
        self.drivers = 0
        self.rounds: Counter[str] = Counter()
        self.orders = 0
        self.add_input(FILES)

    def add_input(self, files: int) -> None:
        for _ in range(files):
            numbers = list(range(self.orders, self.orders + ROWS)) * COPIES
            file = self.folder / "in" / f"{self.orders:06}.txt"
            file.write_text("\n".join(map(str, numbers)))
            at_s = 1_700_000_000 + self.orders
            os.utime(file, (at_s, at_s))  # Spark takes the oldest first
            self.orders += ROWS

    @abstractmethod
    def start(self) -> subprocess.Popen[bytes]:
        """Start a driver, in a session of its own."""

    @abstractmethod
    def output(self) -> str:
        """What the last driver printed."""

    @abstractmethod
    def tasks(self) -> list[int]:
        """Processes of tasks."""

    @abstractmethod
    def executors(self) -> list[int]:
        """Processes of executors."""

    def note_end(self, driver: subprocess.Popen[bytes]) -> None:
        """Keep why a driver ended that was not killed."""
        if driver.returncode not in (0, -signal.SIGKILL):
            self.ends.append(self.output())

    def killed(self) -> Counter[str]:
        """All deaths so far, by who died and where."""
        met = [(kind, point) for kind, point in dead(self.folder) if kind != "slow"]
        return self.kills + Counter(f"{kind} {point}" for kind, point in met)

    def check(self, stop: threading.Event, rng: random.Random) -> None:
        """Check again and again."""
        while not stop.wait(rng.uniform(0.2, 1.3) * self.slowness_s):
            listener = SqlTransactionListener(
                self.url, rollback_after=rng.choice([0.0, 1.0, 4.0, 4.0]) * self.slowness_s
            )
            try:
                report = CheckService(self.folder / "log", {GROUP: listener}, transaction_timeout=0.0).run_once()
            except sa.exc.OperationalError:  # the server is down
                self.rounds["that found no server"] += 1
                continue
            self.rounds["done"] += 1
            self.problems += [sentence for _, sentence in report.problems]
            self.rounds["messages committed"] += report.committed.messages
            self.rounds["messages rolled back"] += report.rolled_back.messages

    def begun(self) -> int:
        """How many micro-batches have begun on executors."""
        return len({json.loads(line)[0] for line in self._journal()})

    def _journal(self) -> list[str]:
        journal = self.folder / "journal"
        return journal.read_text().splitlines() if journal.exists() else []

    def twice(self) -> int:
        """How many parts a second task began to run before the first one had ended."""
        spans: dict[tuple[str, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line in self._journal():
            half_id, attempt, part, task, _, at = json.loads(line)
            spans[half_id, attempt, part][task].append(at)
        return sum(
            any(one[0] < other[0] < one[1] for one in tasks.values() if len(one) == 2 for other in tasks.values())
            for tasks in spans.values()
        )

    def tell(self, seed: int) -> None:
        """Print what happened."""
        print(f"seed {seed}: {self.killed().total()} deaths, {self.drivers} drivers, {self.orders} orders")
        print(f"deaths: {json.dumps(dict(sorted(self.killed().items())), indent=1)}")
        pauses = sum(kind == "slow" for kind, _ in dead(self.folder))
        print(f"pauses: {pauses}; parts run twice at once: {self.twice()}; rounds of checks: {dict(self.rounds)}")
        print(f"drivers that nobody killed: {Counter(map(reason_of, self.ends))}")
        print(f"problems of checks: {Counter(re.sub(VARIES, '_', sentence)[:200] for sentence in self.problems)}")

    def agree(self) -> None:
        """Require that each order is in the table once and told, or refused and neither."""
        wait_until(lambda: not self.tasks(), "no task is left")
        good = [n for n in range(self.orders) if n % REFUSED]
        log = CommitLog.open(self.folder / "log")
        with self.engine.connect() as connection:
            in_table = Counter(connection.execute(sa.text("select n from orders")).scalars())
        rows = log.read("orders", columns=["body", "queue_id", "queue_offset"]).to_pylist()
        told = Counter(int(row["body"]) for row in rows)
        assert in_table == dict.fromkeys(good, 1), f"{in_table - Counter(good)} {Counter(good) - in_table}"
        assert told == dict.fromkeys(good, COPIES), f"{set(told) ^ set(good)}"
        for queue in {row["queue_id"] for row in rows}:
            offsets = [row["queue_offset"] for row in rows if row["queue_id"] == queue]
            assert offsets == list(range(len(offsets))), f"queue {queue} has gaps"
        assert log.pending().num_rows == 0
        assert log.conflicts() == []
        unexpected = [text[-6000:] for text in self.ends if not is_expected(text)]
        unexpected += [sentence for sentence in self.problems if any(words in sentence for words in NEVER)]
        assert not unexpected, unexpected[0]


Death: TypeAlias = tuple[str, str] | Callable[[subprocess.Popen[bytes]], None]
"""The point and the kind of a death, or what kills at a random time while a driver runs."""


class Story:
    """A job of which something dies again and again, until so many deaths are there and its input is done."""

    def __init__(self, job: Job, postgres_folder: Path, seed: int) -> None:
        self.job, self.postgres_folder, self.seed = job, postgres_folder, seed
        self.random = random.Random(seed)
        self._deck: list[Death] = []

    def play(self, kills: int) -> None:
        stop = threading.Event()
        checks = threading.Thread(target=self.job.check, args=(stop, random.Random(self.seed + 1)), daemon=True)
        checks.start()
        driver, lives = self.job.start(), 0
        try:
            while True:
                is_over = self.job.killed().total() >= kills
                if is_over:
                    self._spare()
                    driver.wait(DEADLINE_S)
                else:
                    self._next(driver)
                if driver.poll() is None:
                    continue
                self.job.note_end(driver)
                if is_over:
                    lives += 1
                    assert lives < 10, f"no driver comes to the end:\n{self.job.ends[-1:]}"
                    if driver.returncode == 0:
                        break
                elif driver.returncode == 0:
                    self.job.add_input(FILES)
                driver = self.job.start()
        finally:
            stop.set()
            checks.join(DEADLINE_S)
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
        assert not checks.is_alive()

    def _next(self, driver: subprocess.Popen[bytes]) -> None:
        """Let a few things die, and wait until they have, and the next micro-batch begins: of a task that dies four
        times Spark ends the job."""
        files, batches = [], self.job.begun()
        for _ in range(self.random.choice((2, 2, 3, 3, 3, 3, 3, 6))):
            if not self._deck:
                self._deck = self._shuffled()
            death = self._deck.pop()
            if callable(death):
                death(driver)
            else:
                files.append(doom(self.job.folder, *death, self.random.uniform(0.1, 1.0) * self.job.slowness_s))
        end = time.monotonic() + AT_ONCE_S
        while driver.poll() is None and time.monotonic() < end:
            if self.job.begun() > batches and not any(file.exists() for file in files):
                return
            time.sleep(0.1)

    def _shuffled(self) -> list[Death]:
        some = self.random.sample
        deck: list[Death] = [(point, "worker") for point in TASK_POINTS * 3]
        if self.job.has_executors:
            deck += [(point, "executor") for point in some(TASK_POINTS, 3)]
            deck += [(point, "executor alone") for point in some(TASK_POINTS[:4], 2)]
        deck += [(point, "backend") for point in ("in work", "database commits")] * 4
        deck += [(point, "driver") for point in some(DRIVER_POINTS, 3)]
        deck += [(point, "slow") for point in some(TASK_POINTS, 3)]
        deck += [self._executor, self._worker, self._worker, self._driver, self._backend, self._backend, self._server]
        self.random.shuffle(deck)
        return deck

    def _spare(self) -> None:
        """Nobody dies any more."""
        for file in (self.job.folder / "doomed").iterdir():
            file.unlink(missing_ok=True)

    # ------------------------------------------------------------------ at a random time
    def _sometime(self, driver: subprocess.Popen[bytes]) -> bool:
        """Wait for a random time, and return whether the driver lives."""
        time.sleep(self.random.uniform(0.0, 1.0) * self.job.slowness_s)
        return driver.poll() is None

    def _executor(self, driver: subprocess.Popen[bytes]) -> None:
        if self._sometime(driver):
            self._kill_one_of(self.job.executors(), "executor at a random time")

    def _worker(self, driver: subprocess.Popen[bytes]) -> None:
        if self._sometime(driver):
            self._kill_one_of(self.job.tasks(), "worker at a random time")

    def _kill_one_of(self, pids: list[int], name: str) -> None:
        if pids:
            try:
                os.kill(self.random.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                return
            self.job.kills[name] += 1

    def _driver(self, driver: subprocess.Popen[bytes]) -> None:
        if self._sometime(driver):
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            self.job.kills["driver at a random time"] += 1

    def _backend(self, driver: subprocess.Popen[bytes]) -> None:
        others = "from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
        if self._sometime(driver):
            with self.job.engine.connect() as connection:
                pids = sorted(connection.exec_driver_sql(f"select pid {others}").scalars())
                if pids:
                    ended = sa.select(sa.func.pg_terminate_backend(self.random.choice(pids)))
                    self.job.kills["backend at a random time"] += bool(connection.execute(ended).scalar())

    def _server(self, driver: subprocess.Popen[bytes]) -> None:
        if self._sometime(driver):
            crash(self.postgres_folder)
            self.job.kills["server at a random time"] += 1


def is_expected(text: str) -> bool:
    return any(words in text for words in EXPECTED_ENDS) and not any(words in text for words in NEVER)


def reason_of(text: str) -> str:
    """The last error of this package that a driver printed, without what differs."""
    found = re.findall(
        r"^(?:rmq_spark|sqlalchemy|psycopg|org\.apache)[\w.]*\.(\w+(?:Error|Exception): .{0,160})", text, re.M
    )
    return re.sub(VARIES, "_", found[-1]) if found else text[-300:]
