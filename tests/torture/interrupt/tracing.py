"""An exception that arrives at a chosen moment, as an interrupt of the user or a lack of memory does.

A moment is a line of the product that is about to run, or a call or a return of one of its functions.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import rmq_spark

PRODUCT = str(Path(rmq_spark.__file__).parent)
STORE = f"{PRODUCT}/testing.py"
"""The tables in memory stand for the store, which keeps its own promises: see ``simulate``."""
ENTERS = ("SETUP_WITH", "BEFORE_WITH", "LOAD_SPECIAL")


class Interrupted(KeyboardInterrupt):
    """The user's."""


class NoMemory(MemoryError):
    """It is an ``Exception``, which more code catches."""


KINDS: tuple[type[BaseException], ...] = (Interrupted, NoMemory)

Place = tuple[tuple[CodeType, int], ...]
"""A line of the product, with the lines that led to it."""


class Tracer:
    """Counts the moments of a call, and raises at one of them.

    Parameters
    ----------
    at : int
        The number of the moment, from 1 on; 0 raises nowhere.
    noted : bool
        Whether to note the place of every moment.
    """

    def __init__(self, at: int = 0, kind: type[BaseException] = Interrupted, noted: bool = False) -> None:
        self.at, self.kind, self.noted = at, kind, noted
        self.moments = 0
        self.places: list[tuple[str, Place]] = []
        self.where = ""

    def run(self, call: Callable[[], object]) -> BaseException | None:
        """Run it; what it raised is returned, with its traceback: a notebook keeps the last one too."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except BaseException as problem:
            return problem
        finally:
            sys.settrace(before)
        return None

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if not file.startswith(PRODUCT) or file == STORE or frame.f_code.co_name == "<module>":
            return None
        return self._inside(frame, event, argument)

    def _inside(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            comes_in = not _only_a_tracer(frame)
        else:  # a generator is also called, and returns, where it is thrown away: what is raised there reaches nobody
            comes_in = event in ("call", "return") and not frame.f_code.co_flags & inspect.CO_GENERATOR
        if comes_in:
            self._moment(frame, event)
        return self._inside

    def _moment(self, frame: FrameType, event: str) -> None:
        self.moments += 1
        if self.noted:
            self.places.append((event, _place(frame)))
        if self.moments == self.at:
            code = frame.f_code
            name = getattr(code, "co_qualname", code.co_name)
            file = code.co_filename.removeprefix(f"{PRODUCT}/")
            self.where = f"{event} {file}:{frame.f_lineno} {name}"
            raise self.kind(self.where)


def _place(frame: FrameType | None) -> Place:
    found = []
    while frame is not None and frame.f_code is not Tracer.run.__code__:
        if frame.f_code.co_filename.startswith(PRODUCT):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _only_a_tracer(frame: FrameType) -> bool:
    """True for a line at which no exception arrives but that of a tracer, and which Python therefore does not guard:
    the end of a ``with`` block, before its lock is free, and a ``try`` itself."""
    entered, nothing = _instructions(frame.f_code)
    return frame.f_lasti in nothing or frame.f_lasti > entered.get(frame.f_lineno, frame.f_lasti)


@cache
def _instructions(code: CodeType) -> tuple[dict[int, int], set[int]]:
    """Where the ``with`` of each line is entered, and what does nothing."""
    entered: dict[int, int] = {}
    nothing: set[int] = set()
    lines = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset) or line
        if instruction.opname in ENTERS:
            entered.setdefault(line, instruction.offset)
        if instruction.opname == "NOP":
            nothing.add(instruction.offset)
    return entered, nothing
