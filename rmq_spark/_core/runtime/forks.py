"""Calls functions of the user that may fork (``os.fork``)."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


def called_here(function: Callable[..., T], *given: object) -> T:
    """Call a function of the user. If it forks, the fork ends here when the function returns or raises in it.

    The fork is no second consumer. It ends with the code 0, with the code of SystemExit, or with 1 after another
    exception, which is printed.
    """
    before = os.getpid()
    try:
        result = function(*given)
    except BaseException as problem:
        if os.getpid() != before:
            _end(problem)
        raise
    if os.getpid() != before:
        _end(None)
    return result


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
