"""Work in a pool: done once, wherever it is done when the pool has no thread for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmq_spark.machine import MACHINE, Machine
from rmq_spark.storage.pools import Crew, submitted

DEADLINE_S = 20.0


def test_work_for_which_no_thread_could_start_is_not_done_a_second_time_by_an_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    may_end = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(may_end.wait)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            assert submitted(pool, done.append, "work").exception() is None
        may_end.set()  # the pool has kept the work, and comes to it now
    assert done == ["work"]


def test_what_work_raises_in_the_callers_thread_is_told_by_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    assert isinstance(submitted(ThreadPoolExecutor(1), int, "no number").exception(), ValueError)


def test_a_crew_does_what_waits_in_as_many_threads_as_the_pool_has() -> None:
    crew, together = Crew(ThreadPoolExecutor(4), MACHINE), threading.Barrier(4)
    for _ in range(8):
        crew.put(lambda: together.wait(DEADLINE_S))  # each four are at work at once, or the barrier breaks
    done = threading.Event()
    crew.put(done.set)
    assert done.wait(DEADLINE_S)
    assert not together.broken


def test_a_crew_goes_on_after_a_piece_that_raises() -> None:
    crew, go_on, done = Crew(ThreadPoolExecutor(1), MACHINE), threading.Event(), threading.Event()

    def fails() -> None:
        go_on.wait(DEADLINE_S)
        raise KeyboardInterrupt

    crew.put(fails)
    crew.put(done.set)
    go_on.set()
    assert done.wait(DEADLINE_S)


def test_a_crew_of_a_closed_pool_takes_other_threads() -> None:
    pool = ThreadPoolExecutor(1)
    crew, done = Crew(pool, MACHINE), threading.Event()
    pool.shutdown()
    crew.put(done.set)
    assert done.wait(DEADLINE_S)


def test_a_crew_works_in_the_caller_s_thread_when_there_is_no_other() -> None:
    found: list[threading.Thread] = []
    late: list[bool] = []

    def note() -> None:
        found.append(threading.current_thread())

    class Crowded(Machine):
        def start_thread(self, work: Callable[[], object], name: str, daemon: bool = False) -> threading.Thread:
            if late.pop():
                crew.put(note)  # another thread does, and leaves it to the one that is on its way
            raise RuntimeError("can't start new thread")

    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    crew = Crew(pool, Crowded())
    for _ in range(2):
        late += [False, False, True]
        crew.put(note)
    assert found == [threading.current_thread()] * 4


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
