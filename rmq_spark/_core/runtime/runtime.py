"""The machine as the protocol uses it: the time, a pause, chance, locks and threads.

Each table holds a runtime and passes it on, so a commit log has one. A test gives a log another one with
``InMemoryCommitLog(runtime=…)``. So a simulation runs the same code on another clock, one thread at a time.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from types import FrameType
from uuid import uuid4

from rmq_spark._core.vocabulary.options import JITTER
from rmq_spark.errors import OutOfThreadsError

_SINCE_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def owns_lock(lock: object) -> bool:
    """Whether this thread owns a lock, as far as Python can tell."""
    is_owned = getattr(lock, "_is_owned", None)
    return is_owned is not None and bool(is_owned())


def callers() -> Iterator[FrameType]:
    """The frames that led to this call, the nearest first: code finds out in the midst of what Python called it."""
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


class Runtime:
    """This machine. A test overrides :meth:`time`, :meth:`monotonic` and :meth:`sleep` to have its own clock."""

    def time(self) -> float:
        """Seconds since the epoch by the machine's clock, which may be wrong and may be set back."""
        return time.time()

    def time_ms(self) -> int:
        return int(self.time() * 1_000)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time(), timezone.utc)

    def monotonic(self) -> float:
        """Seconds since some moment; never set back. On Linux the time counts, too, in which the machine was
        suspended."""
        return time.monotonic() if _SINCE_BOOT is None else time.clock_gettime(_SINCE_BOOT)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def random(self) -> float:
        """A random number from 0 (included) to 1 (excluded)."""
        return random.random()

    def jittered(self, seconds: float) -> float:
        """These seconds, a quarter more or less, so that many processes do not act at the same time."""
        return seconds * (1 + JITTER * (2 * self.random() - 1))

    def unique_id(self) -> str:
        """32 hexadecimal digits, which no other call returns."""
        return uuid4().hex

    def lock(self) -> AbstractContextManager[object]:
        """A lock that the thread that holds it may take again."""
        return threading.RLock()

    def event(self) -> threading.Event:
        """An event that is not set."""
        return threading.Event()

    def start_thread(self, work: Callable[[], object], name: str, daemon: bool = False) -> threading.Thread:
        """Run ``work`` in a new thread. OutOfThreadsError, which is also a RuntimeError like Python's own: there is no
        room for another thread, or Python ends."""
        thread = threading.Thread(target=work, name=name, daemon=daemon)
        try:
            thread.start()
        except RuntimeError as problem:
            raise OutOfThreadsError(
                f"thread {name} cannot be started ({problem}): raise the number of threads that this user or container "
                "may have (ulimit -u, --pids-limit of Docker), or start it before Python ends"
            ) from None
        return thread


RUNTIME = Runtime()
"""The real machine."""
