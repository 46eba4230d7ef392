"""Work in the threads of a pool, or in the caller's when there are no more threads.

A machine may have no room for one more. And once the main thread of a program has ended, pools are closed and Python
(from 3.12 on) starts no thread, although other threads may still send.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, ParamSpec, TypeVar, cast

from rmq_spark.machine import Machine

P = ParamSpec("P")
Result = TypeVar("Result")


class Once(Generic[Result]):
    """Work that is done by whoever comes first. A pool keeps what it was given also when it has found no thread for
    it and said so: a thread of it may still come to it, later.

    Parameters
    ----------
    work : callable
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._taken = threading.Lock()
        self.done: Future[Result] = Future()

    def __call__(self) -> Result | None:
        """Do it, unless somebody else does. What becomes of it is in ``done``, too."""
        if not self._taken.acquire(blocking=False):
            return None
        try:
            result = self._work()
        except BaseException as problem:
            self.done.set_exception(problem)
            raise
        self.done.set_result(result)
        return result

    def now(self) -> Future[Result]:
        """Do it in this thread, for want of another."""
        with suppress(BaseException):  # the future has it
            self()
        return self.done


class Crew:
    """Does what comes in the threads of a pool, as many pieces at once as it has threads. A thread goes on with the
    next piece: to wake one up for each takes longer than a short piece.

    Once the pool is closed, it takes new threads; and the caller's when there are none to be had.

    Parameters
    ----------
    pool : ThreadPoolExecutor
    machine : Machine
    """

    def __init__(self, pool: ThreadPoolExecutor, machine: Machine) -> None:
        self._pool = pool
        self._machine = machine
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._comes = False  # a thread is on its way

    def put(self, work: Callable[[], object]) -> None:
        """Do it in a thread in which it may wait."""
        with self._lock:
            self._waiting.append(work)
            comes, self._comes = self._comes, True
        if not comes:
            self._call_one()

    def _call_one(self) -> None:
        once = Once(self._work)
        if not self._starts(once):
            once.now()

    def _work(self) -> None:
        """Work while there is something to do. A piece may wait: then the thread that comes next goes on."""
        with self._lock:
            self._comes = False
        while True:
            with self._lock:
                if not self._waiting:
                    return
                work = self._waiting.popleft()
                one_more = self._needs_one_more()
            if one_more and not self._starts(Once(self._work)):
                self._comes = False  # who puts something next tries again
            try:
                work()
            except BaseException:
                with self._lock:
                    one_more = self._needs_one_more()
                if one_more:
                    self._call_one()
                raise

    def _needs_one_more(self) -> bool:
        one_more = bool(self._waiting) and not self._comes
        self._comes |= one_more
        return one_more

    def _starts(self, once: Once[None]) -> bool:
        with suppress(RuntimeError):
            self._pool.submit(once)
            return True
        with suppress(RuntimeError):
            self._machine.start_thread(once, "txmq-left")
            return True
        return False


def submitted(
    pool: ThreadPoolExecutor, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Future[Result]:
    """Hand work to a pool, or do it now when the pool has no thread for it."""
    once = Once(lambda: work(*arguments, **options))
    try:
        return cast("Future[Result]", pool.submit(once))
    except RuntimeError:
        return once.now()
