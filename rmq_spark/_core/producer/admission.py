"""Admission: the sends that a producer has under way, and the slots for local transactions in its threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.transaction_listener import TransactionListener, Verdicts, is_coroutine
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark.errors import ListenerError

WAITING_PART = 0.25
"""Part of ``transaction_timeout`` within which a prepared send should begin, estimated from earlier transactions."""
SMOOTHING = 0.2
"""Weight of the newest duration in the mean duration of a local transaction."""
LOOP_LOOKED_AT_S = 1.0
"""Seconds between checks that the coroutine's event loop is alive."""


class OpenSends:
    """Registers sends while the producer is open, and waits for their end when it closes. :meth:`leave` may also follow
    an interrupted :meth:`enter`."""

    def __init__(self, runtime: Runtime) -> None:
        self.lock = runtime.lock()
        """:meth:`leave` takes it."""
        self._over = runtime.event()  # set when closed with nothing under way
        self._inside: set[object] = set()
        self.is_open = False

    def open(self) -> None:
        self._over.clear()
        self.is_open = True

    def enter(self, send: object) -> bool:
        """Register a send; False when closed."""
        with self.lock:
            if self.is_open:
                self._inside.add(send)
            return self.is_open

    def leave(self, send: object) -> None:
        with self.lock:
            if send in self._inside:
                self._inside.remove(send)
                self._set_when_over()

    def close(self, seconds: float) -> int:
        """Accept no more sends, wait for those under way, and return how many are left when the time is over."""
        with self.lock:
            self.is_open = False
            self._set_when_over()
        self._over.wait(seconds)
        return len(self._inside)

    def _set_when_over(self) -> None:
        if not (self._inside or self.is_open):
            self._over.set()


class SendSlots:
    """Gives a slot to at most ``most`` sends at once; others wait. ``left`` is called with each send that leaves."""

    def __init__(self, most: int, left: Callable[[object], object]) -> None:
        self._most = most
        self._left = left
        self._inside: set[object] = set()
        self.changed = threading.Condition()
        """:meth:`leave` takes its lock."""

    def enter(self, send: object, may_wait: Callable[[], bool]) -> None:
        """Take a slot. When none is free, wait for one if ``may_wait()``, or go on without one."""
        with self.changed:
            if has_slot := len(self._inside) < self._most:
                self._inside.add(send)
        if not has_slot and may_wait():
            with self.changed:
                self.changed.wait_for(lambda: len(self._inside) < self._most)
                self._inside.add(send)

    def leave(self, send: object) -> None:
        with self.changed:
            self._inside.discard(send)
            self.changed.notify()
        self._left(send)


class KeyLocks:
    """Lets sends with the same key run one after another, and others at once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self._known: dict[str, tuple[AbstractContextManager[object], list[None]]] = {}

    @contextmanager
    def hold(self, key: str | None) -> Iterator[None]:
        """Wait for earlier sends with this key; None waits for none."""
        if key is None:
            yield
            return
        with self._lock:
            lock, users = self._known.setdefault(key, (self._runtime.lock(), []))
            users.append(None)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users.pop()
                if not users:
                    self._known.pop(key, None)


class ListenerSlots:
    """Limits how many sends are prepared, and how many of their local transactions run, at once.

    A half batch that waits for a thread longer than ``transaction_timeout`` is checked before its local transaction
    begins. So a send waits before its prepare. As many may be prepared as there are threads, and more when local
    transactions are short: as many as can begin soon.
    """

    def __init__(self, threads: int, transaction_timeout_s: float) -> None:
        self._threads = threads
        self._within_s = transaction_timeout_s * WAITING_PART
        self._free = threading.BoundedSemaphore(threads)
        self.lock = threading.RLock()  # __del__ or a signal handler within it may send, too
        """Taken by :meth:`admit` and :meth:`leave`."""
        self._waiting: deque[tuple[object, Callable[[], bool], Callable[[], object] | None]] = deque()
        self._admitted: set[object] = set()
        self._mean_s: float | None = None  # mean seconds of a local transaction
        self._is_over = False  # the producer waits no more for running sends

    @property
    def prepared_max(self) -> int:
        """How many sends may be prepared, or run."""
        if self._mean_s is None:
            return self._threads
        return max(self._threads, int(self._threads * self._within_s / max(self._mean_s, 1e-6)))

    def admit(self, send: object, begin: Callable[[], bool], give_up: Callable[[], object] | None = None) -> None:
        """Call ``begin`` now, or as soon as a slot is free; or ``give_up`` when the producer closes first. When
        ``begin`` returns False, the next send gets the slot. After an interrupt in here, call :meth:`leave`."""
        with self.lock:
            has_slot = len(self._admitted) < self.prepared_max
            if has_slot:
                self._admitted.add(send)
            elif give_up is None or not self._is_over:  # a later leave() lets it begin
                self._waiting.append((send, begin, give_up))
                return
        if not has_slot and give_up is not None:
            give_up()
        elif not begin():
            self.leave(send)

    def leave(self, send: object) -> None:
        """Free the slot of a send whose local transaction has ended or will not run, and let others begin."""
        with self.lock:
            self._admitted.discard(send)
        while True:
            with self.lock:
                if not self._waiting or len(self._admitted) >= self.prepared_max:
                    return
                next_one, begin, _ = self._waiting.popleft()
                self._admitted.add(next_one)
            if not begin():
                with self.lock:
                    self._admitted.discard(next_one)

    def close(self) -> None:
        """Stop waiting for running sends: waiting sends that can give up do so."""
        with self.lock:
            self._is_over = True
            waiting = list(self._waiting)
            self._waiting = deque(waiter for waiter in waiting if waiter[2] is None)
        for _, _, give_up in waiting:
            if give_up is not None:
                give_up()

    @contextmanager
    def admitted(
        self, listener: TransactionListener, loop: asyncio.AbstractEventLoop | None = None
    ) -> Iterator[TransactionListener]:
        """Wait until one more send may be prepared, and give the listener for it. Its slot is freed when the local
        transaction has ended. ``loop`` runs a local transaction that is a coroutine."""
        may_begin = threading.Event()

        def begin() -> bool:
            may_begin.set()
            return True

        slotted = _SlottedListener(listener, self, loop)
        self.admit(slotted, begin)
        may_begin.wait()
        try:
            yield slotted
        finally:
            slotted.leave()

    def require_alive(self, loop: asyncio.AbstractEventLoop, running: futures.Future[Any]) -> None:
        """Raise ListenerError when the event loop will never finish a local transaction, which would hang its send."""
        is_abandoned = not loop.is_running() and (self._is_over or not threading.main_thread().is_alive())
        if loop.is_closed() or is_abandoned:
            running.cancel()
            raise ListenerError(
                "the event loop ended while the local transaction ran in it: let the loop run until its sends are "
                "done, or close the producer first"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait for a thread's slot, and measure the local transaction that runs within it."""
        with self._free:
            began_s = time.monotonic()
            try:
                yield
            finally:
                took_s = time.monotonic() - began_s
                mean_s = self._mean_s
                self._mean_s = took_s if mean_s is None else mean_s + SMOOTHING * (took_s - mean_s)


class _SlottedListener(TransactionListener):
    """A listener whose local transaction waits for a slot."""

    def __init__(
        self, listener: TransactionListener, slots: ListenerSlots, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self._listener = listener
        self._slots = slots
        self._loop = loop
        self._is_admitted = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    @property
    def store_id(self) -> str | None:  # type: ignore[override]
        return self._listener.store_id

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        with self._slots.running():
            try:
                execute: Any = self._listener.execute_local_transaction
                if not is_coroutine(self._listener):
                    return execute(batch)
                assert self._loop is not None
                running = asyncio.run_coroutine_threadsafe(execute(batch), self._loop)
                while not futures.wait([running], LOOP_LOOKED_AT_S).done:
                    self._slots.require_alive(self._loop, running)
                return running.result()
            finally:
                self.leave()

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return self._listener.check_local_transaction(batch)

    def leave(self) -> None:
        if self._is_admitted:
            self._is_admitted = False
            self._slots.leave(self)
