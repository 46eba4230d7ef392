"""The threads of a producer's asynchronous sends, and the room that the sends take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.producer.admission import Admission, InFlight, UnderWay
from rmq_spark._core.producer.async_send import AsyncSends
from rmq_spark._core.producer.future import SendFuture, holds_a_future
from rmq_spark._core.producer.result import TransactionSendResult
from rmq_spark._core.protocol.group_commit import GroupCommit
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.runtime.callables import name_of
from rmq_spark._core.runtime.pools import ElasticPool, is_in_pool
from rmq_spark._core.runtime.runtime import Runtime, callers, is_held


class SendThreads:
    """Starts the asynchronous sends of a producer, from one start to its shutdown.

    Parameters
    ----------
    producer_group : str
        Names the threads.
    enter : callable
        Registers a send, or raises because the producer is closed.
    in_flight_max : int
        Sends that may be under way at once.
    transaction_timeout : float
        Seconds.
    """

    def __init__(
        self,
        producer_group: str,
        commits: GroupCommit,
        under_way: UnderWay,
        enter: Callable[[object], None],
        in_flight_max: int,
        listener_threads: int,
        transaction_timeout: float,
        runtime: Runtime,
    ) -> None:
        self.admission = Admission(listener_threads, transaction_timeout)
        self.in_flight = InFlight(in_flight_max, under_way.leave)
        name = f"txmq-{producer_group}"
        self._senders = ElasticPool(in_flight_max, name, runtime)
        self._listeners = ElasticPool(listener_threads, f"{name}-listener", runtime)
        self._callers = ElasticPool(in_flight_max, f"{name}-callback", runtime)
        self._shared = AsyncSends(commits, self.admission, self._senders, self._listeners, self._callers)
        self._commits = commits
        self._enter = enter
        self._with_thread: set[SendFuture] = set()  # sends that have a thread of their own, or wait for one
        pools = (self._senders, self._listeners, self._callers)
        self._locks = (under_way.lock, self.in_flight.changed, self.admission.lock, *(pool.lock for pool in pools))

    def holds_lock(self) -> bool:
        """Whether this thread holds a lock that the end of a send takes: ``__del__`` or a signal handler interrupts the
        holder."""
        return any(map(is_held, self._locks)) or holds_a_future()

    def start_shared(self, two_phase: TwoPhase, message: Callable[[], OneMessage], arg: Any) -> SendFuture:
        """Send one message in threads that all sends share.

        Parameters
        ----------
        message : callable
            Makes the message's half file. Its exception is the future's.
        """
        future = SendFuture(self.in_flight)
        try:
            self._take_room(future)
        except BaseException:
            future.end()
            raise
        try:
            self._shared.start(two_phase, message(), arg, future)
        except Exception as problem:
            future.set_exception(problem)
            future.end()
        except BaseException:
            future.end()
            raise
        return future

    def start(self, send: Callable[[], TransactionSendResult]) -> SendFuture:
        """Send in a thread that may wait."""
        future = SendFuture(self.in_flight)
        context = copy_context()  # the thread continues the caller's trace

        def work() -> None:
            if not future.begin():
                self._with_thread.discard(future)
                return
            try:
                future.set_result(context.run(send))
            except BaseException as problem:
                future.set_exception(problem)
            finally:
                self._with_thread.discard(future)
                self._shared.end(future)

        try:
            self._take_room(future)
            self._with_thread.add(future)
            self._senders.put(work)
        except BaseException:
            self._with_thread.discard(future)
            future.end()
            raise
        return future

    def _take_room(self, future: object) -> None:
        """Register a send, and take a place among those in flight."""
        self._enter(future)
        self.in_flight.enter(future, self._may_wait_for_room)

    def _may_wait_for_room(self) -> bool:
        """Whether this call may wait until a send has ended. That send may need this thread: its event loop, the
        listener, callback or commit that runs in it, or the send that this call has interrupted."""
        return event_loop() is None and not is_in_pool() and self._commits.may_wait and not _is_within_a_send()

    # ------------------------------------------------------------------ the end
    def give_up(self) -> list[str]:
        """Cancel the sends that have not begun.

        Returns
        -------
        list of str
            ``["listener"]`` when local transactions run in these threads.
        """
        self.admission.close()
        for future in list(self._with_thread):
            self._shared.give_up(future)
        return ["listener"] if self._listeners.under_way() else []

    def wait(self, seconds_left: Callable[[], float]) -> list[str]:
        """Wait for the threads' work, and return the names of the callbacks that still run."""
        if is_in_pool():  # a callback that closes the producer runs in one of its threads, which cannot wait for itself
            return []
        for pool in (self._senders, self._listeners):
            pool.wait(seconds_left())
        return [f"callback {_callback_of(work)}" for work in self._callers.wait(seconds_left())]


def event_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _callback_of(work: Callable[[], object]) -> str:
    """Return the name of the callback that a piece of work of the callback threads calls."""
    future = getattr(work, "__self__", None)
    return name_of(future.calls if isinstance(future, SendFuture) and future.calls is not None else work)


def _is_within_a_send() -> bool:
    """Whether this call, from ``__del__`` or a signal handler, interrupts a send that takes room."""
    return sum(frame.f_code in _DOORS for frame in callers()) > 1  # one is this send's own


_DOORS = (SendThreads.start_shared.__code__, SendThreads.start.__code__)
