"""Work in the threads of a pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


def submitted(
    pool: ThreadPoolExecutor, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Future[Result]:
    """Hand work to a pool, or do it now when the pool takes none: once the main thread of a program has ended, pools
    are closed, although other threads may still send."""
    try:
        return pool.submit(work, *arguments, **options)
    except RuntimeError:
        done: Future[Result] = Future()
        try:
            done.set_result(work(*arguments, **options))
        except BaseException as problem:
            done.set_exception(problem)
        return done
