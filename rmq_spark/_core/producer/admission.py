"""Who may send, and when: what a producer has under way, and the turns of local transactions in its own threads."""

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
from rmq_spark._core.listeners.listener import TransactionListener, Verdicts, is_coroutine
from rmq_spark._core.runtime.machine import Machine
from rmq_spark.errors import ListenerError

WAITING_PART = 0.25
"""What is prepared begins within this part of ``transaction_timeout``, as far as the last transactions can tell."""
SMOOTHING = 0.2
"""The part of the newest time in the mean of how long a local transaction takes."""
LOOP_LOOKED_AT_S = 1.0
"""So often who waits for a coroutine looks whether its event loop is still there."""


class UnderWay:
    """Knows what is under way while the door is open, and waits for its end when it is closed. :meth:`leave` is right
    after an interrupted :meth:`enter`, too.

    Parameters
    ----------
    machine : Machine
    """

    def __init__(self, machine: Machine) -> None:
        self.lock = machine.lock()
        """Who leaves takes it."""
        self._over = machine.event()  # set when the door is closed and nothing is under way
        self._inside: set[object] = set()
        self.is_open = False

    def open(self) -> None:
        """Let everybody in."""
        self._over.clear()
        self.is_open = True

    def enter(self, who: object) -> bool:
        """One more is under way; False when the door is closed."""
        with self.lock:
            if self.is_open:
                self._inside.add(who)
            return self.is_open

    def leave(self, who: object) -> None:
        """One has come to its end, or has not entered."""
        with self.lock:
            if who in self._inside:
                self._inside.remove(who)
                self._tell()

    def close(self, seconds: float) -> int:
        """Let nobody in any more, wait for those who are, and return how many are left when the time is over."""
        with self.lock:
            self.is_open = False
            self._tell()
        self._over.wait(seconds)
        return len(self._inside)

    def _tell(self) -> None:
        if not (self._inside or self.is_open):
            self._over.set()


class InFlight:
    """Lets in so many at once; the others wait.

    Parameters
    ----------
    most : int
    left : callable
        Is told who has left.
    """

    def __init__(self, most: int, left: Callable[[object], object]) -> None:
        self._most = most
        self._left = left
        self._inside: set[object] = set()
        self.changed = threading.Condition()
        """Whose lock :meth:`leave` takes."""

    def enter(self, who: object, may_wait: Callable[[], bool]) -> None:
        """Take room, and wait for it where that is allowed; else one more is let in."""
        with self.changed:
            if has_room := len(self._inside) < self._most:
                self._inside.add(who)
        if not has_room and may_wait():
            with self.changed:
                self.changed.wait_for(lambda: len(self._inside) < self._most)
                self._inside.add(who)

    def leave(self, who: object) -> None:
        """Give up the room, if there is any to give up."""
        with self.changed:
            self._inside.discard(who)
            self.changed.notify()
        self._left(who)


class Keys:
    """Those who come with the same key come one after the other, and others at once.

    Parameters
    ----------
    machine : Machine
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = machine.lock()
        self._known: dict[str, tuple[AbstractContextManager[object], list[None]]] = {}

    @contextmanager
    def one_by_one(self, key: str | None) -> Iterator[None]:
        """Wait for those who came with this key before; None waits for nobody."""
        if key is None:
            yield
            return
        with self._lock:
            lock, users = self._known.setdefault(key, (self._machine.lock(), []))
            users.append(None)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users.pop()
                if not users:
                    self._known.pop(key, None)


class Turns:
    """Lets sends be prepared, and their local transactions run, as many at once as is good.

    A half batch that is prepared and then waits for a free thread would be checked after ``transaction_timeout``,
    before its local transaction has begun. So it waits before it is prepared.

    Parameters
    ----------
    threads : int
        Local transactions that run at once. So many sends may be prepared too, and more when local transactions are
        short: as many as can begin soon.
    transaction_timeout_s : float
        After which a pending half batch is checked.
    """

    def __init__(self, threads: int, transaction_timeout_s: float) -> None:
        self._threads = threads
        self._within_s = transaction_timeout_s * WAITING_PART
        self._free = threading.BoundedSemaphore(threads)
        self.lock = threading.RLock()  # what Python calls in our midst may send, too
        """Who begins and who ends takes it."""
        self._waiting: deque[tuple[object, Callable[[], bool], Callable[[], object] | None]] = deque()
        self._admitted: set[object] = set()
        self._mean_s: float | None = None  # how long a local transaction takes
        self._is_over = False  # nobody waits for those that still run

    @property
    def room(self) -> int:
        """How many may be prepared, or run."""
        if self._mean_s is None:
            return self._threads
        return max(self._threads, int(self._threads * self._within_s / max(self._mean_s, 1e-6)))

    def admit(self, who: object, begin: Callable[[], bool], give_up: Callable[[], object] | None = None) -> None:
        """Call ``begin`` when one more send may be prepared, and ``give_up`` when that will never be. When ``begin``
        returns False, the next one may begin in its place. After an interrupt in here, call :meth:`leave`."""
        with self.lock:
            has_room = len(self._admitted) < self.room
            if has_room:
                self._admitted.add(who)
            elif give_up is None or not self._is_over:  # the next one that leaves lets it begin
                self._waiting.append((who, begin, give_up))
                return
        if not has_room and give_up is not None:
            give_up()
        elif not begin():
            self.leave(who)

    def leave(self, who: object) -> None:
        """One that was admitted has ended its local transaction, or will have none. Others may begin."""
        with self.lock:
            self._admitted.discard(who)
        while True:
            with self.lock:
                if not self._waiting or len(self._admitted) >= self.room:
                    return
                other, begin, _ = self._waiting.popleft()
                self._admitted.add(other)
            if not begin():
                with self.lock:
                    self._admitted.discard(other)

    def close(self) -> None:
        """Nobody waits any more for those that still run: those that can give up do so."""
        with self.lock:
            self._is_over = True
            left = list(self._waiting)
            self._waiting = deque(w for w in left if w[2] is None)
        for _, _, give_up in left:
            if give_up is not None:
                give_up()

    @contextmanager
    def admitted(
        self, listener: TransactionListener, loop: asyncio.AbstractEventLoop | None = None
    ) -> Iterator[TransactionListener]:
        """Wait until one more send may be prepared. Its room is free again when the local transaction has ended.

        Parameters
        ----------
        loop : asyncio.AbstractEventLoop, optional
            Runs the local transaction when that is a coroutine.

        Returns
        -------
        TransactionListener
            The same listener, for this send.
        """
        may_begin = threading.Event()

        def begin() -> bool:
            may_begin.set()
            return True

        in_turn = _InTurn(listener, self, loop)
        self.admit(in_turn, begin)
        may_begin.wait()
        try:
            yield in_turn
        finally:
            in_turn.leave()

    def require_alive(self, loop: asyncio.AbstractEventLoop, running: futures.Future[Any]) -> None:
        """Raise ListenerError when an event loop will never go on with a local transaction: nobody would hear of it."""
        is_left = not loop.is_running() and (self._is_over or not threading.main_thread().is_alive())
        if loop.is_closed() or is_left:
            running.cancel()
            raise ListenerError(
                "the event loop ended while the local transaction ran in it: let the loop run until its sends are "
                "done, or close the producer first"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait for a free thread, and run a local transaction."""
        with self._free:
            began_s = time.monotonic()
            try:
                yield
            finally:
                took_s = time.monotonic() - began_s
                mean_s = self._mean_s
                self._mean_s = took_s if mean_s is None else mean_s + SMOOTHING * (took_s - mean_s)


class _InTurn(TransactionListener):
    """A listener whose local transaction waits for its turn."""

    def __init__(self, listener: TransactionListener, turns: Turns, loop: asyncio.AbstractEventLoop | None) -> None:
        self._listener = listener
        self._turns = turns
        self._loop = loop
        self._is_admitted = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    @property
    def store_id(self) -> str | None:  # type: ignore[override]
        return self._listener.store_id

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        with self._turns.running():
            try:
                execute: Any = self._listener.execute_local_transaction
                if not is_coroutine(self._listener):
                    return execute(batch)
                assert self._loop is not None
                running = asyncio.run_coroutine_threadsafe(execute(batch), self._loop)
                while not futures.wait([running], LOOP_LOOKED_AT_S).done:
                    self._turns.require_alive(self._loop, running)
                return running.result()
            finally:
                self.leave()

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return self._listener.check_local_transaction(batch)

    def leave(self) -> None:
        if self._is_admitted:
            self._is_admitted = False
            self._turns.leave(self)
