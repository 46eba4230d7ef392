"""The future of a send."""

from __future__ import annotations

import asyncio
import concurrent.futures._base
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from rmq_spark._core.producer.result import TransactionSendResult
from rmq_spark._core.runtime.machine import callers, is_held
from rmq_spark._core.vocabulary.redaction import traceback_of

logger = logging.getLogger(__name__)


_METHODS = (__file__, concurrent.futures._base.__file__)
"""Where the methods of a future are."""


def holds_a_future() -> bool:
    """Whether this call came in the midst of a method that has the lock of a future of a send, which the end of that
    send needs: from ``__del__``, a signal handler."""
    for frame in callers():
        if frame.f_code.co_filename in _METHODS:
            condition = getattr(frame.f_locals.get("self"), "_condition", None)  # there is none yet while it is made
            if isinstance(condition, _Quiet) and is_held(condition.lock):
                return True
    return False


class _Quiet:
    """The condition of a future for which nobody waits yet: a lock and nothing more.

    Python's look for cycles goes through all objects of the thousands of futures that may be under way, and a
    ``threading.Condition`` is eight of them.
    """

    __slots__ = ("_condition", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._condition: threading.Condition | None = None

    def __enter__(self) -> bool:
        return self.lock.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.lock.release()

    def acquire(self) -> bool:
        return self.lock.acquire()

    def release(self) -> None:
        self.lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        if self._condition is None:
            self._condition = threading.Condition(self.lock)
        return self._condition.wait(timeout)

    def notify_all(self) -> None:
        if self._condition is not None:
            self._condition.notify_all()


def _look_at(waited: asyncio.Future[TransactionSendResult]) -> None:
    """Who was cancelled does not look any more, and asyncio logs an exception that nobody has looked at."""
    if not waited.cancelled():
        waited.exception()


class Room(Protocol):
    """What a future takes a place in."""

    def leave(self, who: object) -> object:
        """Give up the place."""


class SendFuture(Future[TransactionSendResult]):
    """The future of a send. Who waits for it hears of the result at once. Its callbacks are called in a thread in which
    they may wait, once :meth:`call_back` is.

    Parameters
    ----------
    room : Room
        Which the future leaves, when the send has come to its end or is cancelled.
    """

    _condition: Any

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._condition = _Quiet()
        self._room = room
        self._left: deque[Callable[[Future[TransactionSendResult]], object]] | None = None
        self._is_over = False
        self.calls: Callable[[Future[TransactionSendResult]], object] | None = None
        """The callback that is being called."""

    def add_done_callback(self, fn: Callable[[Future[TransactionSendResult]], object]) -> None:
        """Call a function when the send has come to its end; at once when it has."""
        with self._condition:
            if self._left is None:
                self._left = deque()
        self._left.append(fn)
        if self._is_over:
            with suppress(ValueError):  # when it is being called already
                self._left.remove(fn)
                super().add_done_callback(fn)

    def __await__(self) -> Generator[Any, None, TransactionSendResult]:
        """In a coroutine: ``await producer.send_async(message)``. Who is cancelled ends its waiting, not the send."""
        waits = asyncio.wrap_future(self)
        waits.add_done_callback(_look_at)
        return asyncio.shield(waits).__await__()

    def begin(self) -> bool:
        """Begin the send; False when it is cancelled."""
        with self._condition:
            return not self.cancelled() and self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the send, unless it has begun."""
        if self.give_up():
            self.call_back()
        return self.cancelled()

    def give_up(self) -> bool:
        """Cancel the send, unless it has begun, and leave the callbacks to the caller. True for who has done it."""
        with self._condition:
            if self.cancelled() or not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # nobody else would tell those who wait for it
        self.end()
        return True

    def end(self) -> bool:
        """Give up the room among those in flight. True when there are callbacks to be called."""
        self._room.leave(self)
        self._is_over = True
        return bool(self._left)

    def call_back(self) -> None:
        """Call the callbacks, all of them whatever one of them raises."""
        interrupt: KeyboardInterrupt | None = None
        while self._left:
            try:
                self.calls = self._left.popleft()
                super().add_done_callback(self.calls)  # it is done, so this calls, and logs an Exception
            except IndexError:  # another thread calls it
                break
            except KeyboardInterrupt as problem:
                interrupt = problem
            except BaseException as problem:
                logger.error("a callback of a send raised: %s", traceback_of(problem))
        self.calls = None
        if interrupt is not None:
            raise interrupt
