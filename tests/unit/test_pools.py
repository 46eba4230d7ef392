"""Work is done once, wherever it is done when a pool has no thread for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmq_spark.storage.pools import submitted


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


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
