"""Looks at a commit log that all who ask share, and that are made only while somebody asks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from rmq_spark._core.runtime.runtime import RUNTIME

T = TypeVar("T")
EVERY_S = 3.0
"""Least seconds from the end of a look to the next one."""
REST = 4.0
"""After a look that took long, so many times as long is waited: a slow store is read a fifth of the time at most."""
WAIT_S = 2.0
"""Most seconds that a reader waits for a look."""
LOOKS_CACHED_MAX = 64
RUNNING_MAX = 8


class Seen(NamedTuple, Generic[T]):
    """What the last look saw.

    Attributes
    ----------
    value : T or None
        None before the first look has ended, or when none has succeeded.
    age_s : float
        Seconds since the value was seen.
    problem : Exception or None
        Why the last look failed.
    running_s : float or None
        Seconds for which a look has been running; None when none runs.
    """

    value: T | None
    age_s: float
    problem: Exception | None
    running_s: float | None


class SharedLook(Generic[T]):
    """One look, made again when its value is old and somebody asks."""

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._value: T | None = None
        self._problem: Exception | None = None
        self._began_s = self._ended_s = self._seen_s = -float("inf")
        self._took_s = 0.0

    @property
    def is_running(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    def ask(self) -> Seen[T]:
        """Return what was seen last. A look that is due is begun, and waited for a little."""
        with self._lock:
            now_s = RUNTIME.monotonic()
            if not self.is_running and now_s - self._ended_s >= max(EVERY_S, REST * self._took_s):
                self._began_s = now_s
                begun = threading.Thread(target=self._run, name="txmq serve: look", daemon=True)
                begun.start()
                self._thread = begun
            thread = self._thread
        if thread is not None:
            thread.join(WAIT_S)
        with self._lock:
            now_s = RUNTIME.monotonic()
            running_s = now_s - self._began_s if self.is_running and self._ended_s < self._began_s else None
            return Seen(self._value, now_s - self._seen_s, self._problem, running_s)

    def _run(self) -> None:
        value: T | None = None
        problem: Exception | None = None
        try:
            value = self._look()
        except Exception as failure:
            problem = failure
        with self._lock:
            self._ended_s = RUNTIME.monotonic()
            self._took_s, self._problem = self._ended_s - self._began_s, problem
            if problem is None:
                self._value, self._seen_s = value, self._ended_s

    def join(self, seconds: float) -> None:
        """Wait for a running look: Python crashes when it exits while a thread is within delta-rs."""
        if (thread := self._thread) is not None:
            thread.join(seconds)


class SharedLooks(Generic[T]):
    """The looks of a server, by what they look at. The ones that nobody has asked for longest are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._looks: OrderedDict[Hashable, SharedLook[T]] = OrderedDict()

    def of(self, key: Hashable, look: Callable[[], T], *, limited: bool = True) -> SharedLook[T] | None:
        """Return the look of a key; None when it is limited and new, and too many others run."""
        with self._lock:
            known = self._looks.pop(key, None)
            if limited and known is None and sum(other.is_running for other in self._looks.values()) >= RUNNING_MAX:
                return None
            self._looks[key] = known = known or SharedLook(look)
            for old in list(self._looks)[:-LOOKS_CACHED_MAX]:
                if not self._looks[old].is_running:
                    del self._looks[old]
            return known

    def join(self, seconds: float) -> None:
        """Wait at most so long for all running looks."""
        end_s = RUNTIME.monotonic() + seconds
        for look in list(self._looks.values()):
            look.join(max(0.0, end_s - RUNTIME.monotonic()))
