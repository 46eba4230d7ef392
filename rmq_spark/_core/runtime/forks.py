"""Tells a fork (``os.fork``) from the process that it is a copy of, without a system call."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")

_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


def forks() -> int:
    """How many forks lie between this process and its first Python program. Kept, it tells later whether this is still
    the process that has kept it."""
    return _forks


def called_here(function: Callable[..., T], *given: object) -> T:
    """Call a function of the user. A process that it forks, and in which it returns or raises, ends there.

    The fork is no second consumer. It ends with the code 0, with what SystemExit says, or with 1 after another
    exception, which is printed.
    """
    before = _forks
    try:
        found = function(*given)
    except BaseException as problem:
        if _forks != before:
            _end(problem)
        raise
    if _forks != before:
        _end(None)
    return found


def _end(problem: BaseException | None) -> NoReturn:
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
