"""A clock that a test sets, for all logs of the process at once, and also for those on Delta.

A test of one log in memory can give that log a machine of its own: ``InMemoryCommitLog(runtime=…)``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from rmq_spark import CommitLog
from rmq_spark.testing import InMemoryCommitLog
from tests.support.inside import LOOK_INTERVAL_S, Runtime, StoreClock


class Clock:
    """The machine's clock, and so many seconds. Who sleeps moves it on, and does not wait."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.pauses: list[float] = []

    def time(self, runtime: Runtime) -> float:
        return time.time() + self.ahead_s

    def monotonic(self, runtime: Runtime) -> float:
        return time.monotonic() + sum(self.pauses)

    def sleep(self, runtime: Runtime, seconds: float) -> None:
        self.pauses.append(seconds)
        self.ahead_s += seconds


class Pauses(threading.Event):
    """For a loop that pauses until it is to stop: so many pauses, which pass at once, and something happens in each."""

    def __init__(self, count: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._count, self._meanwhile = count, meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        self._meanwhile()
        return len(self.seconds) > self._count


def wait_until(holds: Callable[[], bool], at_most_s: float = 60.0) -> None:
    end_s = time.monotonic() + at_most_s
    while not holds():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)


def set_clock(monkeypatch: pytest.MonkeyPatch, ahead_s: float = 0.0, and_the_stores: bool = True) -> Clock:
    """From now on the product's time is ``clock.ahead_s`` seconds ahead."""
    clock = Clock()
    clock.ahead_s = ahead_s
    be_every_machine(monkeypatch, clock, "time", "monotonic", "sleep", and_the_stores=and_the_stores)
    return clock


def be_every_machine(patch: pytest.MonkeyPatch, instead: object, *names: str, and_the_stores: bool = True) -> None:
    """From now on these methods of another object stand for those of every machine: of all logs at once. They take the
    machine first. The time of the stores goes with it."""
    for name in names:
        method = getattr(instead, name)
        patch.setattr(Runtime, name, lambda *arguments, method=method: method(*arguments))
    if and_the_stores:
        patch.setattr(StoreClock, "stored_at", lambda store: store._runtime.time())


def let_upkeep_believe(clock: Clock, log: CommitLog) -> None:
    """An earlier round of upkeep has looked at the clock: the next one believes it."""
    clock.ahead_s -= LOOK_INTERVAL_S + 5
    log.another().engine.clock_doubt_s()
    clock.ahead_s += LOOK_INTERVAL_S + 5


class Ahead(Runtime):
    """A machine whose clock is so far ahead."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def time(self) -> float:
        return super().time() + self.seconds


class Starts(Runtime):
    """A machine that notes which threads it was asked for, and takes so long to start each."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.names: list[str] = []
        self._takes_s = takes_s

    def start_thread(self, work: Callable[[], object], name: str, daemon: bool = False) -> threading.Thread:
        self.names.append(name)
        super().sleep(self._takes_s)
        return super().start_thread(work, name, daemon)


class Ticking(Runtime):
    """A machine on whose clock nothing happens at the same time as something else, however slow the real one is."""

    def __init__(self, at_s: float, step_s: float) -> None:
        self.at_s, self._step_s = at_s, step_s

    def time(self) -> float:
        self.at_s += self._step_s
        return self.at_s


def on_a_machine(log: InMemoryCommitLog, ahead_s: float) -> InMemoryCommitLog:
    """A handle of a machine whose clock is so far ahead of the others'."""
    twin = log.another()
    engine = twin.engine
    for part in (engine.half.table, engine.op_table, engine.topics_table, engine.ledger, engine):
        part.runtime = Ahead(ahead_s)
    return twin
