"""Turns: processes of a machine that write to a table all the time commit one after the other.

Each commit is made against the newest version, and whoever loses the race begins anew. Of four processes that only race
one may win most of the time: of four with 16 threads each, one sent 134 messages a second, and another one 8. So who
has lost a race takes turns for a while.

A turn is a courtesy: a commit is right without it. Nobody waits long for one, since who has it may be stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rmq_spark._core.runtime.machine import MACHINE, Machine

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

TAKES_TURNS_S = 10.0
"""So long after a lost race."""
WAITS_S_MAX = 1.0
"""For a turn. Who has waited in vain takes no turns for TAKES_TURNS_S."""
LOOKS_S = 0.001
"""A process that waits looks so often."""


class Turns:
    """The turns of a table.

    Parameters
    ----------
    folder : Path or None
        The table's, on a local disk; None where no turns can be taken.
    machine : Machine
    """

    def __init__(self, folder: Path | None, machine: Machine) -> None:
        self._file = None if folder is None or fcntl is None else folder / "_turn"  # Delta's VACUUM leaves it
        self._machine = machine
        self._until_s = -math.inf
        self._not_before_s = -math.inf

    def lost(self) -> None:
        """A race was lost: take turns from now on."""
        now_s = self._machine.monotonic()
        if now_s >= self._not_before_s:
            self._until_s = now_s + TAKES_TURNS_S

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a turn, if turns are taken, and have it."""
        held = self._take()
        try:
            yield
        finally:
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open, too
                held.close()

    def _take(self) -> IO[bytes] | None:
        began_s = self._machine.monotonic()
        if self._file is None or began_s >= self._until_s:
            return None
        try:
            held = self._file.open("ab")
        except OSError:  # who may not write here hears of it from the commit
            return None
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._machine.monotonic() >= began_s + WAITS_S_MAX:
                    held.close()
                    self._until_s, self._not_before_s = -math.inf, self._machine.monotonic() + TAKES_TURNS_S
                    return None
                self._machine.sleep(LOOKS_S)
            except OSError:  # a file system without locks
                held.close()
                self._file = None
                return None
            else:
                return held


NO_TURNS = Turns(None, MACHINE)
