"""The kill matrix: producers, checkers, upkeep and readers of one real log, killed and stopped at named points.

A supervisor keeps a few processes alive, each told to die or to stop at some point, or killed at any moment when it
does not come there. A stopped one is woken later, when others have gone on with its work, or killed in its sleep. In
the end everything is settled, and the anomaly checker looks at the whole history.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import rmq_spark as txmq
from rmq_spark import CheckService
from tests.torture.judge.anomalies import Rules, find_anomalies
from tests.torture.judge.history import FINAL, Kind, payload_hash
from tests.torture.judge.observation import READ_COLUMNS, note_listing, note_log, note_messages, note_messages_table
from tests.torture.kill import programs
from tests.torture.kill.points import BY_ROLE, Fate, is_stopped
from tests.torture.kill.programs import CHECKS_MAX, GROUP, TOPIC, Shop, listener

SLOTS = ("producer", "producer", "checker", "reader", "upkeep")
LIFE_S = (3.0, 20.0)
SLEEP_S = (0.3, 2.5)
"""How long a stopped process sleeps before it is woken or killed."""
SLEPT = "this process slept past the clean-up of the table's log"
"""What a LostCommitError says. What a process committed has left half before it looked: the graces are a third of a
second here, and ten minutes or more elsewhere."""
STOPPED = 0.25
WOKEN = 0.7
RETRIED = 0.75
"""Of the batches whose producer died; the others are left to the checks."""
POLL_S = 0.01
SETTLE_S = 90.0


def forkserver() -> ForkServerContext:
    # A server that has imported everything and opened nothing: delta-rs's runtime must not be forked.
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.torture.kill.programs"])
    return context


@dataclass
class _Alive:
    process: BaseProcess
    role: str
    name: str
    fate: Fate
    until: float
    wake_at: float | None = None


@dataclass
class Report:
    """What a run did and found."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    messages: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def points(self) -> set[str]:
        """The named points at which a process was killed or stopped."""
        return {p for p in (*self.kills, *self.stops) if not p.endswith("anywhere")}


class Matrix:
    """One run on one log.

    Parameters
    ----------
    root : path
        An empty folder.
    seed : int
        Chooses who dies where. The system's scheduler has its say too, so a run is repeated, not replayed; its folder
        holds the whole history.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.shop = Shop(root)
        self.chance = random.Random(seed)
        self.report = Report(seed)
        self._alive: list[_Alive | None] = [None] * len(SLOTS)
        self._started = 0
        self._next_batch = 0
        self._to_retry: list[int] = []
        self._context = forkserver()

    def run(self, kills: int, until: float = float("inf")) -> Report:
        """Kill so many processes, or as many as there is time for (``time.monotonic()``), and look at what is left."""
        self.shop.open()
        history = self.shop.history()
        listed_at = 0.0
        try:
            while sum(self.report.kills.values()) < kills and time.monotonic() < until and not self.report.failures:
                for slot, alive in enumerate(self._alive):
                    self._alive[slot] = self._watch(alive) if alive is not None else self._start(SLOTS[slot])
                if time.monotonic() > listed_at:
                    note_listing(history, self.shop.log)
                    listed_at = time.monotonic() + 1.0
                time.sleep(POLL_S)
        finally:
            self._kill_all()
        if not self.report.failures:
            settle(self.shop, self._to_retry)
            self.report.messages, self.report.failures = judge(self.shop)
        self.report.batches = self._next_batch
        return self.report

    # ------------------------------------------------------------------ processes
    def _start(self, role: str) -> _Alive:
        self._started += 1
        name = f"{role}{self._started}"
        fate = Fate(
            self.chance.choice(BY_ROLE[role]),
            stops=self.chance.random() < STOPPED,
            nth=self.chance.choice([1, 1, 1, 2, 2, 3, 5]),
            name=name,
        )
        arguments = (self._batches_to_send(),) if role == "producer" else ()
        process = self._context.Process(
            target=programs.run,
            args=(role, str(self.shop.root), name, self.chance.randrange(2**32), fate, *arguments),
        )
        process.start()
        return _Alive(process, role, name, fate, time.monotonic() + self.chance.uniform(*LIFE_S))

    def _batches_to_send(self) -> Sequence[int]:
        """Those that a dead producer left, new ones, and now and then one that another is sending at this moment."""
        left = [b for b in self._to_retry if not (self.shop.sent / str(b)).exists()]
        self._to_retry = []
        twins = [b for b in range(max(0, self._next_batch - 2), self._next_batch) if self.chance.random() < 0.2]
        new = list(range(self._next_batch, self._next_batch + 4))
        self._next_batch += len(new)
        self._to_retry += [b for b in (*left, *new) if self.chance.random() < RETRIED]
        return [*left, *twins, *new]

    def _watch(self, alive: _Alive) -> _Alive | None:
        """The process while it lives; None when it has ended."""
        now = time.monotonic()
        code = alive.process.exitcode
        if code is not None:
            self._ended(alive, code)
            return None
        if alive.wake_at is None and is_stopped(alive.process.pid):
            self.report.stops[f"{alive.role}: {alive.fate.point}"] += 1
            alive.wake_at = now + self.chance.uniform(*SLEEP_S)
        elif alive.wake_at is not None and now > alive.wake_at:
            if self.chance.random() < WOKEN:
                alive.wake_at, alive.until = float("inf"), now + self.chance.uniform(*LIFE_S)
                with suppress(ProcessLookupError):  # killed in its sleep before, and its exit code is on the way
                    os.kill(alive.process.pid or 0, signal.SIGCONT)
            else:
                alive.process.kill()
        elif alive.wake_at in (None, float("inf")) and now > alive.until:
            alive.process.kill()
        return alive

    def _ended(self, alive: _Alive, code: int) -> None:
        if code == -signal.SIGKILL:
            died_there = (self.shop.reached / alive.name).exists() and not alive.fate.stops
            at = alive.fate.point if died_there else "anywhere"
            self.report.kills[f"{alive.role}: {at}"] += 1
        elif code != 0:
            said = (self.shop.root / f"{alive.name}.out").read_text(errors="replace")
            if SLEPT in said:  # a busy machine held it for longer than the graces here, between a commit and a look
                self.report.kills[f"{alive.role}: refused after a sleep, anywhere"] += 1
                return
            self.report.failures.append(f"{alive.name} ended with {code}:\n{said[-3000:]}")

    def _kill_all(self) -> None:
        for alive in filter(None, self._alive):
            alive.process.kill()
            alive.process.join()
        self._alive = [None] * len(SLOTS)


def settle(shop: Shop, batches: Sequence[int]) -> None:
    """Send again those batches whose send never came back; the rest is the checks' business, until nothing is open."""
    history = shop.history()
    orders = listener(shop, history, "settler")
    with txmq.TransactionMQProducer(shop.log, GROUP, orders, check_interval=None) as producer:
        for batch in batches:
            if not (shop.sent / str(batch)).exists():
                programs.send(shop, producer, history, "settler", batch)
    log = txmq.CommitLog.open(shop.log)
    service = CheckService(log, {GROUP: orders}, transaction_timeout=0.0)
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        for half_id in log.quarantined()["half_id"].to_pylist():
            log.resume(half_id)
        service.run_once()
        if log.pending().num_rows == 0 and log.quarantined().num_rows == 0:
            break
        time.sleep(0.2)


def judge(shop: Shop) -> tuple[int, list[str]]:
    """How many messages are visible in a settled shop, and all that is wrong with its history."""
    history = shop.history()
    log = txmq.CommitLog.open(shop.log)
    with sqlite3.connect(shop.database) as database:
        for body, half_id, transaction_id, attempt in database.execute("SELECT * FROM orders"):
            history.note(
                Kind.LOCAL, half_id=half_id, transaction_id=transaction_id, attempt=attempt, payload=payload_hash(body)
            )  # fmt: skip
        for half_id, transaction_id, attempt in database.execute("SELECT * FROM refused"):
            history.note(Kind.REFUSED, half_id=half_id, transaction_id=transaction_id, attempt=attempt)
    note_listing(history, shop.log)
    note_log(history, shop.log, left=shop.left)
    history.note(Kind.END)
    messages = log.read(TOPIC, columns=READ_COLUMNS)
    note_messages(history, Kind.READ, "judge", FINAL, messages, log.engine.op_table.version)
    log.drain()
    note_messages_table(history, "judge", FINAL, shop.log)
    whole = {FINAL, *(file.name for file in shop.readings.iterdir())}
    events = [e for e in history if e.kind not in (Kind.READ, Kind.DRAINED) or e.operation in whole]
    failures = [str(a) for a in find_anomalies(events, Rules(checks_max=CHECKS_MAX))]
    if log.conflicts():
        failures.append(f"verdicts in conflict: {log.conflicts()}")
    return messages.num_rows, failures


def run(seconds: float, seed: int, kills: int = 1_000) -> dict[str, int | str | list[str]]:
    """Matrices of 100 kills each until the kills or the time are used up; a failed one's folder stays."""
    end = time.monotonic() + seconds
    total: Counter[str] = Counter()
    points: Counter[str] = Counter()
    failures: list[str] = []
    at = seed
    while time.monotonic() < end and total["kills"] < kills and not failures:
        root = Path(tempfile.mkdtemp(prefix=f"txmq_kills_{at}_"))
        report = Matrix(root / "shop", at).run(min(100, kills - total["kills"]), end)
        total.update(
            kills=sum(report.kills.values()), stops=sum(report.stops.values()), messages=report.messages,
            batches=report.batches, logs=1,
        )  # fmt: skip
        points.update(report.kills + report.stops)
        failures += [f"seed {at}, folder {root}: {f}" for f in report.failures]
        if not report.failures:
            shutil.rmtree(root)
        at += 1
        print(f"kills: {total['kills']:,} kills, {total['stops']:,} stops, {len(points)} points", flush=True)
    named = {p: n for p, n in sorted(points.items()) if not p.endswith("anywhere")}
    return {
        **total,
        "named points": len(named),
        "at named points": sum(named.values()),
        "points": ", ".join(f"{p} {n}" for p, n in named.items()),
        "failures": failures,
    }


if __name__ == "__main__":
    import sys

    for name, value in run(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).items():
        print(name, value if not isinstance(value, list) else "\n".join(value))
