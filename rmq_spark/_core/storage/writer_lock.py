"""Turns: processes of one machine that write to a table all the time commit one after the other.

Each commit is made against the newest version, and the loser of a race begins again. Of several processes that only
race, one may win most of the time. So a process that has lost a race takes turns for a while.

A turn is a courtesy: a commit is right without it. Nobody waits long for a turn, since its holder may be stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rmq_spark._core.runtime.runtime import RUNTIME, Runtime

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

TAKES_TURNS_S = 10.0
"""Seconds for which a process takes turns after a lost race."""
WAITS_S_MAX = 1.0
"""Longest wait for a turn. A process that has waited in vain takes no turns for TAKES_TURNS_S."""
LOOKS_S = 0.001
"""Seconds between two tries of a process that waits for a turn."""


class WriterLock:
    """The turns of a table in ``folder``, on a local disk; without a folder no turns can be taken."""

    def __init__(self, folder: Path | None, runtime: Runtime) -> None:
        self._file = None if folder is None or fcntl is None else folder / "_turn"  # Delta's VACUUM leaves it
        self._runtime = runtime
        self._until_s = -math.inf
        self._not_before_s = -math.inf

    def lost(self) -> None:
        """Take turns from now on, after a lost race."""
        now_s = self._runtime.monotonic()
        if now_s >= self._not_before_s:
            self._until_s = now_s + TAKES_TURNS_S

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a turn and hold it, while turns are taken."""
        lock_file = self._take()
        try:
            yield
        finally:
            if lock_file is not None:
                fcntl.flock(lock_file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open, too
                lock_file.close()

    def _take(self) -> IO[bytes] | None:
        started_s = self._runtime.monotonic()
        if self._file is None or started_s >= self._until_s:
            return None
        try:
            lock_file = self._file.open("ab")
        except OSError:  # the commit reports a missing permission
            return None
        while True:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._runtime.monotonic() >= started_s + WAITS_S_MAX:
                    lock_file.close()
                    self._until_s, self._not_before_s = -math.inf, self._runtime.monotonic() + TAKES_TURNS_S
                    return None
                self._runtime.sleep(LOOKS_S)
            except OSError:  # a file system without locks
                lock_file.close()
                self._file = None
                return None
            else:
                return lock_file


NO_LOCK = WriterLock(None, RUNTIME)
