"""Work in a pool: done once, wherever it is done when the pool has no thread for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmq_spark._core.runtime.pools import ElasticPool, is_in_crew, submitted
from tests.support.inside import RUNTIME, Runtime

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


def test_a_crew_does_what_waits_in_as_many_threads_as_it_may_have() -> None:
    crew, together = ElasticPool(4, "crew", RUNTIME), threading.Barrier(4)
    at_work: list[str] = []

    def work() -> None:
        at_work.append(threading.current_thread().name)
        together.wait(DEADLINE_S)  # each four are at work at once, or the barrier breaks

    for _ in range(8):
        crew.put(work)
    crew.wait(DEADLINE_S)
    assert not together.broken
    assert at_work == ["crew"] * 8


def test_a_crew_goes_on_after_a_piece_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    crew, done = ElasticPool(1, "crew", RUNTIME), threading.Event()

    def fails() -> None:
        raise KeyboardInterrupt

    crew.put(fails)
    crew.put(done.set)
    crew.wait(DEADLINE_S)
    assert done.is_set()
    assert "KeyboardInterrupt" in caplog.text


def test_a_piece_of_work_knows_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    crew, found = ElasticPool(2, "crew", RUNTIME), list[bool]()
    crew.put(lambda: found.append(is_in_crew()))
    crew.wait(DEADLINE_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        ElasticPool(2, "crew", RUNTIME).put(lambda: found.append(is_in_crew()))
    assert found == [True, True]
    assert not is_in_crew()


def test_a_crew_that_had_no_thread_for_a_moment_has_as_many_as_before_again(monkeypatch: pytest.MonkeyPatch) -> None:
    crew, found = ElasticPool(2, "crew", RUNTIME), list[str]()
    go_on, done = threading.Event(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        for _ in range(3):
            crew.put(lambda: found.append(threading.current_thread().name))
    assert found == [threading.current_thread().name] * 3
    crew.put(lambda: go_on.wait(DEADLINE_S))
    crew.put(done.set)
    assert done.wait(DEADLINE_S)  # while the first one waits
    go_on.set()
    crew.wait(DEADLINE_S)


def test_what_comes_when_the_only_thread_of_a_crew_ends_is_done() -> None:
    crew, done = ElasticPool(1, "crew", RUNTIME), threading.Semaphore(0)
    for _ in range(3000):
        crew.put(done.release)
        assert done.acquire(timeout=DEADLINE_S)
    crew.wait(DEADLINE_S)


def test_what_comes_while_a_crew_fails_to_start_a_thread_is_done() -> None:
    found: list[threading.Thread] = []
    late: list[bool] = []

    def note() -> None:
        found.append(threading.current_thread())

    class Crowded(Runtime):
        def start_thread(self, work: Callable[[], object], name: str, daemon: bool = False) -> threading.Thread:
            if late.pop():
                crew.put(note)  # another thread does, and leaves it to the one that is on its way
            raise RuntimeError("can't start new thread")

    crew = ElasticPool(2, "crew", Crowded())
    for _ in range(2):
        late += [False, False, True]
        crew.put(note)
    assert found == [threading.current_thread()] * 4


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
