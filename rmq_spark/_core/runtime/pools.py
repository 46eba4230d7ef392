"""Runs work in the threads of a pool, or in the caller's thread when no other can be started.

A machine may have no room for another thread. And once the main thread of a program has ended, pools are closed and
Python (from 3.12 on) starts no thread, although other threads may still send.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, ParamSpec, TypeVar, cast

from rmq_spark._core.runtime.runtime import Runtime, callers
from rmq_spark._core.vocabulary.redaction import traceback_of

logger = logging.getLogger(__name__)

LINGERS_S = 0.05
"""Seconds for which an idle thread waits for more work."""

P = ParamSpec("P")
Result = TypeVar("Result")


class Once(Generic[Result]):
    """Work that is done once, by the first thread that comes to it. A pool that reports that it has no thread for some
    work keeps it all the same: one of its threads may still come to it later.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._taken = threading.Lock()
        self.done: Future[Result] = Future()

    def __call__(self) -> Result | None:
        """Do the work, unless another thread does. ``done`` gets its outcome, too."""
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
        """Do the work in this thread, for want of another."""
        with suppress(BaseException):  # the future has it
            self()
        return self.done


class ElasticPool:
    """Does pieces of work in at most ``most`` threads of its own. A thread goes on with the next piece, since to wake
    one up for each takes longer than a short piece. It ends soon after nothing is left.

    The caller's thread does the work when no other can be started.
    """

    def __init__(self, most: int, name: str, runtime: Runtime) -> None:
        self._most = most
        self._name = name
        self._runtime = runtime
        self.lock = threading.RLock()  # a signal handler may send, too
        """:meth:`put` takes it."""
        self._more = threading.Condition(self.lock)
        self._done = threading.Condition(self.lock)
        self._waiting: deque[Callable[[], object]] = deque()
        self._under_way: set[Callable[[], object]] = set()
        self._threads = 0
        self._comes = False  # a thread is on its way: it was started, or woken up
        self._idle = 0  # threads that wait for more

    def put(self, work: Callable[[], object]) -> None:
        """Do some work in a thread in which it may wait."""
        with self.lock:
            self._waiting.append(work)
            try:
                has_thread = self._one_more()
            except BaseException:  # an interrupt
                self._waiting.remove(work)
                self._one_more()  # for the work that a call in our midst has put there
                raise
        if not has_thread:
            self._work_off()

    def wait(self, seconds: float) -> list[Callable[[], object]]:
        """Wait until all work is done, and return what is still under way when the time is over."""
        with self.lock:
            is_done = self._done.wait_for(lambda: not self._waiting and self._threads == self._idle, seconds)
        return [] if is_done else self.under_way()

    def under_way(self) -> list[Callable[[], object]]:
        """The work that is being done now."""
        return list(self._under_way)

    def _one_more(self) -> bool:
        """Wake up or start one more thread when there is work for it; False when it cannot start."""
        if not self._waiting or self._comes:
            return True
        if self._idle:
            self._comes = True  # to wake up all takes longer than many a piece of work
            self._more.notify()
            return True
        if self._threads >= self._most:
            return True
        self._comes = True
        self._threads += 1
        try:
            self._runtime.start_thread(self._run, self._name)
        except BaseException as problem:  # there is no room for a thread, or Python ends
            self._comes = False
            self._threads -= 1
            self._done.notify_all()
            if not isinstance(problem, RuntimeError):
                raise
            return False
        return True

    def _run(self) -> None:
        with self.lock:
            self._comes = False
        self._work_off(own_thread=True)

    def _gets_more(self) -> bool:
        """Wait for more work, in a thread of the pool; False when the thread is to end: the next ``put`` then starts
        another."""
        if not self._waiting:
            self._idle += 1
            self._done.notify_all()
            self._more.wait(LINGERS_S)
            self._idle -= 1
            self._comes = False
        # Python may call us in our midst (__del__, a signal handler): this thread resigns before its last look.
        self._threads -= 1
        if not self._waiting:
            return False
        self._threads += 1
        return True

    def _work_off(self, own_thread: bool = False) -> None:
        """Work until nothing is left. A piece of work may wait: the next thread goes on meanwhile."""
        while True:
            with self.lock:
                if not (self._gets_more() if own_thread else self._waiting):
                    self._done.notify_all()
                    return
                work = self._waiting.popleft()
                self._one_more()
            try:
                self._under_way.add(work)
                work()
            except BaseException as problem:  # other work must be done, too
                logger.error("a piece of work ended: %s", traceback_of(problem))
            finally:
                self._under_way.discard(work)
                del work  # its objects, which may have a __del__, must not be dropped while we hold our lock


def is_in_pool() -> bool:
    """Whether this call came from a piece of work of a pool, or from the midst of a thread of one."""
    codes = (ElasticPool._run.__code__, ElasticPool._work_off.__code__)
    return any(frame.f_code in codes for frame in callers())


def submitted(
    pool: ThreadPoolExecutor, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Future[Result]:
    """Hand work to a pool, or do it now when the pool has no thread for it."""
    once = Once(lambda: work(*arguments, **options))
    try:
        return cast("Future[Result]", pool.submit(once))
    except RuntimeError:
        return once.now()
