"""Tells a fork (``os.fork``) from the process that it is a copy of, without a system call."""

from __future__ import annotations

import os
import sys
import traceback

_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


def forks() -> int:
    """How many forks lie between this process and its first Python program. Kept, it tells later whether this is still
    the process that has kept it."""
    return _forks


def end_fork_since(before: int, problem: BaseException | None = None) -> None:
    """End this process when it is a fork that was made since :func:`forks` was ``before``.

    A function of the user forked, and returned or raised in the fork, too. The fork is no second consumer. It ends with
    the code 0, with what SystemExit says, or with 1 after another exception, which is printed.
    """
    if forks() == before:
        return
    code = 0 if problem is None else 1
    try:
        if isinstance(problem, SystemExit) and isinstance(problem.code, int | None):
            code = (problem.code or 0) & 0xFF
        elif isinstance(problem, SystemExit):
            print(problem.code, file=sys.stderr)
        elif problem is not None:
            traceback.print_exception(problem)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever the user did to the streams
        os._exit(code)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_count)
