"""Work in the threads of a pool, or in the caller's when there are no more threads.

A machine may have no room for one more. And once the main thread of a program has ended, pools are closed and Python
(from 3.12 on) starts no thread, although other threads may still send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, ParamSpec, TypeVar, cast

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


def submitted(
    pool: ThreadPoolExecutor, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Future[Result]:
    """Hand work to a pool, or do it now when the pool has no thread for it."""
    once = Once(lambda: work(*arguments, **options))
    try:
        return cast("Future[Result]", pool.submit(once))
    except RuntimeError:
        return once.now()
