"""Processes of a machine that commit to a table all the time do so one after the other."""

from __future__ import annotations

import errno
import fcntl
import os
import runpy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rmq_spark import CommitLog
from rmq_spark._core.storage import writer_lock as turns
from rmq_spark._core.storage.writer_lock import TAKES_TURNS_S, WAITS_S_MAX
from tests.support.half_batches import another, bodies, check_offsets
from tests.support.inside import RUNTIME, Runtime, WriterLock
from tests.support.sends import message, producer_of

DEADLINE_S = 20.0


class Clock(Runtime):
    """A machine whose time passes when somebody waits."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_who_has_lost_no_race_waits_for_nobody(tmp_path: Path) -> None:
    busy, free = WriterLock(tmp_path, RUNTIME), WriterLock(tmp_path, clock := Clock())
    busy.lost()
    with busy.taken(), free.taken():
        assert clock.now_s == 1000.0


def test_who_has_lost_a_race_waits_until_the_other_one_has_committed(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path, RUNTIME), WriterLock(tmp_path, RUNTIME)
    done: list[str] = []
    second_waits = threading.Event()

    def commit() -> None:
        second.lost()
        second_waits.set()
        with second.taken():
            done.append("second")

    first.lost()
    with first.taken():
        thread = threading.Thread(target=commit)
        thread.start()
        assert second_waits.wait(DEADLINE_S)
        thread.join(0.05)
        done.append("first")
    thread.join(DEADLINE_S)
    assert done == ["first", "second"]


def test_one_that_is_stopped_in_its_turn_holds_up_others_once(tmp_path: Path) -> None:
    stopped, other = WriterLock(tmp_path, RUNTIME), WriterLock(tmp_path, clock := Clock())
    stopped.lost()
    with stopped.taken():
        for _ in range(5):
            other.lost()
            with other.taken():
                pass
        assert 1000.0 + WAITS_S_MAX <= clock.now_s < 1000.0 + 1.1 * WAITS_S_MAX
        clock.now_s += TAKES_TURNS_S
        other.lost()
        with other.taken():
            pass
        assert clock.now_s > 1000.0 + TAKES_TURNS_S + 2 * WAITS_S_MAX


def test_a_process_that_was_forked_in_a_turn_does_not_keep_it(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path, RUNTIME), WriterLock(tmp_path, clock := Clock())
    first.lost()
    second.lost()
    with first.taken():
        files = [Path(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
        held = [int(file.name) for file in files if file.exists() and file.readlink().name == "_turn"]
        forked = [os.dup(number) for number in held]
    with second.taken():
        assert clock.now_s == 1000.0
    for number in forked:
        os.close(number)
    assert len(forked) == 1


def test_turns_end_some_time_after_the_last_lost_race(tmp_path: Path) -> None:
    busy, other = WriterLock(tmp_path, RUNTIME), WriterLock(tmp_path, clock := Clock())
    busy.lost()
    other.lost()
    clock.now_s += TAKES_TURNS_S
    with busy.taken(), other.taken():
        assert clock.now_s == 1000.0 + TAKES_TURNS_S


def test_without_file_locks_or_a_folder_to_write_to_nobody_takes_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = WriterLock(tmp_path / "missing", clock := Clock())
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", _no_locks)
        unlocked = WriterLock(tmp_path, clock)
        for _ in range(2):
            unlocked.lost()
            with unlocked.taken():
                assert clock.now_s == 1000.0
    (tmp_path / "_turn").unlink()
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    elsewhere = runpy.run_path(turns.__file__)["WriterLock"](tmp_path, clock)
    for each in (nowhere, elsewhere, turns.NO_LOCK):
        each.lost()
        with each.taken():
            assert clock.now_s == 1000.0
    assert not list(tmp_path.iterdir())


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.log("delta")
def test_handles_that_take_turns_commit_what_they_would_without(log: CommitLog, tmp_path: Path) -> None:
    handles = [another(log) for _ in range(3)]
    begin = threading.Barrier(len(handles))

    def run(number: int) -> None:
        log = handles[number]
        for table in (log.engine.half.table, log.engine.op_table):
            table._turns.lost()  # type: ignore[attr-defined]
        with producer_of(log) as producer:
            begin.wait(DEADLINE_S)
            for i in range(5):
                producer.send(message(f"{number}-{i}"))

    with ThreadPoolExecutor(len(handles)) as pool:
        for done in [pool.submit(run, number) for number in range(len(handles))]:
            done.result(3 * DEADLINE_S)
    assert sorted(bodies(log)) == sorted(f"{n}-{i}" for n in range(3) for i in range(5))
    check_offsets(log)
    assert {path.parent.name for path in tmp_path.glob("log/*/_turn")} == {"half", "op"}
