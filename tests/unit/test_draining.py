"""Drains between rounds of upkeep: after so many seconds or bytes, and never in a sink's way."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rmq_spark.check import draining as draining_module
from rmq_spark.check.draining import Draining
from rmq_spark.check.maintainer import Maintainer
from rmq_spark.commitlog import maintenance
from rmq_spark.commitlog.drain import Drainer
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.messages import drained_up_to
from rmq_spark.errors import OptionError
from rmq_spark.machine import Machine
from rmq_spark.testing import InMemoryCommitLog
from tests.half_batches import another, commit, make_log, prepare, roll_back

HUGE = "1t"


class Clock(Machine):
    """A machine on which time passes when a test says so."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> CommitLog:
    return InMemoryCommitLog(topics={"orders": 2}, machine=clock)


def drained(log: CommitLog) -> int:
    table = another(log).messages_table
    table.refresh()
    return drained_up_to(table)


def test_messages_are_drained_when_they_have_waited_for_so_long(log: CommitLog, clock: Clock) -> None:
    beside = Draining(log, every=30, bytes_max=HUGE)
    assert beside.look() is None
    clock.now_s = 100.0
    commit(log, prepare(log, 0))
    assert beside.look() is None, "it waits from now on"
    clock.now_s = 129.0
    commit(log, prepare(log, 1))
    assert beside.look() is None
    clock.now_s = 130.0
    assert beside.look() == log.refresh() == drained(log)
    assert beside.look() is None
    commit(log, prepare(log, 2))
    clock.now_s = 200.0
    assert beside.look() is None, "the next ones wait as long"
    clock.now_s = 230.0
    assert beside.look() == drained(log)


def test_so_many_bytes_are_drained_at_once(log: CommitLog) -> None:
    first = prepare(log, 0)
    size = log.half.bytes_of(first)
    beside = Draining(log, every=30, bytes_max=2 * size)
    commit(log, first)
    assert beside.look() is None
    commit(log, prepare(log, 1, 20))
    assert beside.look() == log.refresh() == drained(log)


def test_what_another_one_drained_is_not_waited_for(log: CommitLog, clock: Clock) -> None:
    beside = Draining(log, every=30, bytes_max=HUGE)
    commit(log, prepare(log, 0))
    assert beside.look() is None
    log.drain()
    clock.now_s = 60.0
    assert beside.look() is None
    commit(log, prepare(log, 1))
    assert beside.look() is None, "these have not waited yet"
    roll_back(log, prepare(log, 2))
    assert drained(log) < log.refresh()


def test_one_round_drains_however_little_there_is(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    beside = Draining(log, every=30, bytes_max=HUGE)
    assert beside.run_once() == log.refresh() == drained(log)
    assert beside.run_once() == log.refresh()


def test_a_drain_waits_for_no_lock_of_the_sink_and_holds_none(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, prepare(log, 0))
    beside = Draining(log, every=30, bytes_max=1)
    said: list[int | None] = []
    with log.lock:  # a sink commits meanwhile
        thread = threading.Thread(target=lambda: said.append(beside.look()))
        thread.start()
        thread.join(60)
    assert said == [log.refresh()]


# ---------------------------------------------------------------- again and again
def test_drains_go_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draining_module, "AFTER_FAILURE_S", 0.01)
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, prepare(log, 0))
    stop = threading.Event()
    tries: list[CommitLog] = []
    run = Drainer.run

    def fails_once(self: Drainer) -> int:
        tries.append(self._log)  # type: ignore[arg-type]
        if len(tries) == 1:
            raise OSError("the store does not answer")
        stop.set()
        return run(self)

    monkeypatch.setattr(Drainer, "run", fails_once)
    Draining(log, every=0.01, bytes_max=HUGE).run(stop)
    assert drained(log) == log.refresh()
    assert tries[0] is not tries[1], "the second try opens the log again"
    assert "a drain of CommitLog" in caplog.text
    assert "the store does not answer" in caplog.text


def test_an_old_handle_drains_no_log_that_was_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draining_module, "AFTER_FAILURE_S", 0.01)
    old = make_log("delta", tmp_path / "log", orders=1)
    beside = Draining(old, every=0.01, bytes_max=1)
    beside.look()
    shutil.rmtree(tmp_path / "log")
    new = make_log("delta", tmp_path / "log", orders=1)
    commit(new, prepare(new, 0))
    stop = threading.Event()
    warnings: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())
            if len(warnings) == 2:
                stop.set()

    heard = Heard()
    draining_module.logger.addHandler(heard)
    try:
        beside.run(stop)
    finally:
        draining_module.logger.removeHandler(heard)
    assert "made anew" in warnings[1]
    assert drained(new) == -1


def test_a_round_of_upkeep_and_a_drain_take_turns_with_messages_in_memory(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(log, prepare(log, 0))
    beside = Draining(log, every=30, bytes_max=HUGE)
    held: list[bool] = []

    def is_held() -> bool:
        free: list[bool] = []
        thread = threading.Thread(target=lambda: free.append(beside.turn.acquire(blocking=False)))  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        return not free[0]

    def noting(work: Callable[..., int]) -> Callable[..., int]:
        def noted(*arguments: object) -> int:
            held.append(is_held())
            return work(*arguments)

        return noted

    monkeypatch.setattr(Drainer, "run", noting(Drainer.run))
    monkeypatch.setattr(maintenance, "compact_messages", noting(maintenance.compact_messages))
    Maintainer(log, turn=beside.turn).run_once()
    beside.run_once()
    assert held == [True, True, True]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": "30s"}, {"bytes_max": 0}, {"bytes_max": "some"}])
def test_an_interval_and_a_size_that_cannot_be_used_are_refused(log: CommitLog, wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Draining(log, **wrong)  # type: ignore[arg-type]
