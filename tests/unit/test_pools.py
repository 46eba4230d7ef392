"""Work in a pool: done once, wherever it is done when the pool has no thread for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmq_spark._core.runtime.pools import ElasticPool, is_in_pool, submitted
from tests.support.inside import RUNTIME, Runtime
from tests.support.meanwhile import no_thread_starts
from tests.support.sends import raising

DEADLINE_S = 20.0


def test_work_for_which_no_thread_could_start_is_not_done_a_second_time_by_an_older_one() -> None:
    done: list[str] = []
    may_end = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(may_end.wait)
        with no_thread_starts():
            assert submitted(pool, done.append, "work").exception() is None
        may_end.set()  # the pool has kept the work, and comes to it now
    assert done == ["work"]


def test_what_work_raises_in_the_callers_thread_is_told_by_the_future() -> None:
    with no_thread_starts():
        assert isinstance(submitted(ThreadPoolExecutor(1), int, "no number").exception(), ValueError)


def test_a_pool_does_what_waits_in_as_many_threads_as_it_may_have() -> None:
    pool, together = ElasticPool(4, "pool", RUNTIME), threading.Barrier(4)
    at_work: list[str] = []

    def work() -> None:
        at_work.append(threading.current_thread().name)
        together.wait(DEADLINE_S)  # each four are at work at once, or the barrier breaks

    for _ in range(8):
        pool.put(work)
    pool.wait(DEADLINE_S)
    assert not together.broken
    assert at_work == ["pool"] * 8


def test_a_pool_goes_on_after_a_piece_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    pool, done = ElasticPool(1, "pool", RUNTIME), threading.Event()
    pool.put(raising(KeyboardInterrupt()))
    pool.put(done.set)
    pool.wait(DEADLINE_S)
    assert done.is_set()
    assert "KeyboardInterrupt" in caplog.text


def test_a_piece_of_work_knows_that_it_is_one() -> None:
    pool, found = ElasticPool(2, "pool", RUNTIME), list[bool]()
    pool.put(lambda: found.append(is_in_pool()))
    pool.wait(DEADLINE_S)
    with no_thread_starts():
        ElasticPool(2, "pool", RUNTIME).put(lambda: found.append(is_in_pool()))
    assert found == [True, True]
    assert not is_in_pool()


def test_a_pool_that_had_no_thread_for_a_moment_has_as_many_as_before_again() -> None:
    pool, found = ElasticPool(2, "pool", RUNTIME), list[str]()
    go_on, done = threading.Event(), threading.Event()
    with no_thread_starts():
        for _ in range(3):
            pool.put(lambda: found.append(threading.current_thread().name))
    assert found == [threading.current_thread().name] * 3
    pool.put(lambda: go_on.wait(DEADLINE_S))
    pool.put(done.set)
    assert done.wait(DEADLINE_S)  # while the first one waits
    go_on.set()
    pool.wait(DEADLINE_S)


def test_what_comes_when_the_only_thread_of_a_pool_ends_is_done() -> None:
    pool, done = ElasticPool(1, "pool", RUNTIME), threading.Semaphore(0)
    for _ in range(3000):
        pool.put(done.release)
        assert done.acquire(timeout=DEADLINE_S)
    pool.wait(DEADLINE_S)


def test_what_comes_while_a_pool_fails_to_start_a_thread_is_done() -> None:
    found: list[threading.Thread] = []
    late: list[bool] = []

    def note() -> None:
        found.append(threading.current_thread())

    class Crowded(Runtime):
        def start_thread(self, work: Callable[[], object], name: str, daemon: bool = False) -> threading.Thread:
            if late.pop():
                pool.put(note)  # another thread does, and leaves it to the one that is on its way
            raise RuntimeError("can't start new thread")

    pool = ElasticPool(2, "pool", Crowded())
    for _ in range(2):
        late += [False, False, True]
        pool.put(note)
    assert found == [threading.current_thread()] * 4
