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
from typing import Any

from rmq_spark._core.producer.admission import SendSlots
from rmq_spark._core.producer.result import TransactionSendResult
from rmq_spark._core.runtime.runtime import callers, owns_lock
from rmq_spark._core.vocabulary.redaction import traceback_of

logger = logging.getLogger(__name__)


_METHODS = (__file__, concurrent.futures._base.__file__)
"""Files with the methods of a future."""


def owns_future_lock() -> bool:
    """Whether this call, from ``__del__`` or a signal handler, interrupts a method that owns the lock of a send's
    future. The end of that send needs the lock."""
    for frame in callers():
        if frame.f_code.co_filename in _METHODS:
            condition = getattr(frame.f_locals.get("self"), "_condition", None)  # not set while it is created
            if isinstance(condition, _LazyCondition) and owns_lock(condition.lock):
                return True
    return False


class _LazyCondition:
    """The condition of a future: only a lock, until a thread waits for it.

    The garbage collector visits every object of the thousands of futures that may be under way, and a
    ``threading.Condition`` is eight objects.
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


def _retrieve_exception(waiter: asyncio.Future[TransactionSendResult]) -> None:
    """Retrieve the exception for a cancelled coroutine: asyncio logs those that are never retrieved."""
    if not waiter.cancelled():
        waiter.exception()


class SendFuture(Future[TransactionSendResult]):
    """The future of a send. Waiting threads get the result at once. Its callbacks run in the thread that calls
    :meth:`call_back`, in which they may wait.

    Parameters
    ----------
    slots : SendSlots
        The future leaves its slot when the send ends or is cancelled.
    """

    _condition: Any

    def __init__(self, slots: SendSlots) -> None:
        super().__init__()
        self._condition = _LazyCondition()
        self._slots = slots
        self._left: deque[Callable[[Future[TransactionSendResult]], object]] | None = None
        self._is_over = False
        self.calls: Callable[[Future[TransactionSendResult]], object] | None = None
        """The callback that is being called."""

    def add_done_callback(self, fn: Callable[[Future[TransactionSendResult]], object]) -> None:
        """Call a function when the send has ended; at once if it has."""
        with self._condition:
            if self._left is None:
                self._left = deque()
        self._left.append(fn)
        if self._is_over:
            with suppress(ValueError):  # it is being called already
                self._left.remove(fn)
                super().add_done_callback(fn)

    def __await__(self) -> Generator[Any, None, TransactionSendResult]:
        """In a coroutine: ``await producer.send_async(message)``. Cancelling the coroutine does not cancel the send."""
        waiter = asyncio.wrap_future(self)
        waiter.add_done_callback(_retrieve_exception)
        return asyncio.shield(waiter).__await__()

    def begin(self) -> bool:
        """Begin the send; False when it is cancelled."""
        with self._condition:
            return not self.cancelled() and self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel a send that has not begun; True when it is cancelled."""
        if self.give_up():
            self.call_back()
        return self.cancelled()

    def give_up(self) -> bool:
        """Cancel a send that has not begun, without its callbacks; True for the call that has cancelled it."""
        with self._condition:
            if self.cancelled() or not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # wakes up the waiting threads
        self.end()
        return True

    def end(self) -> bool:
        """Free the send's slot; True when there are callbacks to call."""
        self._slots.leave(self)
        self._is_over = True
        return bool(self._left)

    def call_back(self) -> None:
        """Call all callbacks, even when one of them raises."""
        interrupt: KeyboardInterrupt | None = None
        while self._left:
            try:
                self.calls = self._left.popleft()
                super().add_done_callback(self.calls)  # the send has ended, so this calls it now, and logs an Exception
            except IndexError:  # another thread has taken it
                break
            except KeyboardInterrupt as problem:
                interrupt = problem
            except BaseException as problem:
                logger.error("a callback of a send raised: %s", traceback_of(problem))
        self.calls = None
        if interrupt is not None:
            raise interrupt
