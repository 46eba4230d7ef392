"""The threads of a producer's asynchronous sends, and the slots that the sends take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.producer.admission import ListenerSlots, OpenSends, SendSlots
from rmq_spark._core.producer.async_send import AsyncSend
from rmq_spark._core.producer.future import SendFuture, owns_future_lock
from rmq_spark._core.producer.result import TransactionSendResult
from rmq_spark._core.protocol.group_commit import GroupCommit
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.runtime.callables import name_of
from rmq_spark._core.runtime.pools import ElasticPool, is_in_pool
from rmq_spark._core.runtime.runtime import Runtime, callers, owns_lock


class SendThreads:
    """Starts the asynchronous sends of a producer, from one start to its shutdown. ``enter`` registers a send, or
    raises because the producer is closed. The producer group names the threads."""

    def __init__(
        self,
        producer_group: str,
        commits: GroupCommit,
        open_sends: OpenSends,
        enter: Callable[[object], None],
        in_flight_max: int,
        listener_threads: int,
        transaction_timeout: float,
        runtime: Runtime,
    ) -> None:
        self.listener_slots = ListenerSlots(listener_threads, transaction_timeout)
        self.send_slots = SendSlots(in_flight_max, open_sends.leave)
        name = f"txmq-{producer_group}"
        self.senders = ElasticPool(in_flight_max, name, runtime)
        """Threads for the waiting steps of sends without a local transaction, one for each send."""
        self.listeners = ElasticPool(listener_threads, f"{name}-listener", runtime)
        """Threads for local transactions, and for the waiting steps of their sends."""
        self._callers = ElasticPool(in_flight_max, f"{name}-callback", runtime)  # a callback may wait for other sends
        self.commits = commits
        self._enter = enter
        self._with_thread: set[SendFuture] = set()  # sends that have a thread of their own, or wait for one
        pools = (self.senders, self.listeners, self._callers)
        slots = (self.send_slots.changed, self.listener_slots.lock)
        self._locks = (open_sends.lock, *slots, *(pool.lock for pool in pools))

    def owns_send_lock(self) -> bool:
        """Whether this thread owns a lock that the end of a send takes: ``__del__`` or a signal handler interrupts the
        owner."""
        return any(map(owns_lock, self._locks)) or owns_future_lock()

    def start_shared(self, two_phase: TwoPhase, message: Callable[[], OneMessage], arg: Any) -> SendFuture:
        """Send one message in threads that all sends share. ``message`` makes its half file; the future gets an
        exception that it raises."""
        future = SendFuture(self.send_slots)
        try:
            self._take_slot(future)
        except BaseException:
            future.end()
            raise
        try:
            send = AsyncSend(self, two_phase, message(), arg, future)
            if send.asks_nobody:
                send.begin()
            else:
                self._begin_when_admitted(send, future)
        except Exception as problem:
            future.set_exception(problem)
            future.end()
        except BaseException:
            future.end()
            raise
        return future

    def _begin_when_admitted(self, send: AsyncSend, future: SendFuture) -> None:
        try:
            self.listener_slots.admit(send, send.begin, lambda: self._give_up(future))
        except BaseException:  # an interrupt
            self.listener_slots.leave(send)
            raise

    def start(self, send: Callable[[], TransactionSendResult]) -> SendFuture:
        """Send in a thread that may wait."""
        future = SendFuture(self.send_slots)
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
                self.end(future)

        try:
            self._take_slot(future)
            self._with_thread.add(future)
            self.senders.put(work)
        except BaseException:
            self._with_thread.discard(future)
            future.end()
            raise
        return future

    def _take_slot(self, future: object) -> None:
        """Register a send, and take a slot for it."""
        self._enter(future)
        self.send_slots.enter(future, self._may_wait_for_slot)

    def _may_wait_for_slot(self) -> bool:
        """Whether this call may wait until a send has ended. That send may need this thread: its event loop, the
        listener, callback or commit that runs in it, or the send that this call has interrupted."""
        return event_loop() is None and not is_in_pool() and self.commits.may_wait and not _is_within_a_send()

    # ------------------------------------------------------------------ the end
    def end(self, future: SendFuture) -> None:
        """Have the callbacks of an ended send called."""
        if future.end():
            self._callers.put(future.call_back)

    def _give_up(self, future: SendFuture) -> None:
        """Cancel a send that has not begun. The caller does not run its callbacks, because one may block."""
        if future.give_up():
            self._callers.put(future.call_back)

    def give_up(self) -> bool:
        """Cancel the sends that have not begun, and return whether local transactions run in these threads."""
        self.listener_slots.close()
        for future in list(self._with_thread):
            self._give_up(future)
        return bool(self.listeners.under_way())

    def wait(self, seconds_left: Callable[[], float]) -> list[str]:
        """Wait for the threads' work, and return the names of the callbacks that still run."""
        if is_in_pool():  # a callback that closes the producer runs in one of its threads, which cannot wait for itself
            return []
        for pool in (self.senders, self.listeners):
            pool.wait(seconds_left())
        return [f"callback {_callback_of(work)}" for work in self._callers.wait(seconds_left())]


def event_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _callback_of(work: Callable[[], object]) -> str:
    future = getattr(work, "__self__", None)
    return name_of(future.calls if isinstance(future, SendFuture) and future.calls is not None else work)


def _is_within_a_send() -> bool:
    """Whether this call, from ``__del__`` or a signal handler, interrupts a send that takes a slot."""
    return sum(frame.f_code in _DOORS for frame in callers()) > 1  # one is this send's own


_DOORS = (SendThreads.start_shared.__code__, SendThreads.start.__code__)
