"""Asynchronous sends that need no thread of their own: each goes from one thread at work to the next.

::

    caller         txmq-prepare           listener threads      txmq-decide       tellers
    a message ──▶  one commit of many ──▶ local transaction ──▶ one commit of ──▶ callbacks
                                                                many, results

A thread for each of 4,096 sends under way spends more time on waking up than on the send. What is out of the ordinary,
such as a check that was faster, goes on in a thread that may wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from rmq_spark.commitlog.asked import split_by_verdict
from rmq_spark.commitlog.group_commit import GroupCommit
from rmq_spark.commitlog.half_store import HalfRecord
from rmq_spark.commitlog.ledger import Decision, Placed
from rmq_spark.commitlog.op import Who
from rmq_spark.commitlog.single import OneMessage
from rmq_spark.errors import HalfBatchLeftError
from rmq_spark.listener import CommitOncePrepared
from rmq_spark.machine import Machine
from rmq_spark.redaction import traceback_of
from rmq_spark.sink.sent import TransactionSendResult, result_of
from rmq_spark.sink.told import tell_not_sent, tell_sent
from rmq_spark.sink.turns import Turns
from rmq_spark.sink.two_phase import Answered, Outcome, Run, TwoPhase, held_by
from rmq_spark.storage.pools import Once
from rmq_spark.transaction import COMMIT_MESSAGE, ROLLBACK_MESSAGE

logger = logging.getLogger(__name__)


class SendFuture(Future[TransactionSendResult]):
    """The future of a send. Who waits for it hears of the result at once. Its callbacks are called in a thread in which
    they may wait, once :meth:`call_back` is.

    Parameters
    ----------
    leave : callable
        Gives up the room of a future, when the send has come to its end or is cancelled.
    """

    def __init__(self, leave: Callable[[SendFuture], None]) -> None:
        super().__init__()
        self._leave = leave
        self._left: deque[Callable[[Future[TransactionSendResult]], object]] = deque()
        self._is_over = False
        self._beginning = threading.Lock()

    def add_done_callback(self, fn: Callable[[Future[TransactionSendResult]], object]) -> None:
        """Call a function when the send has come to its end; at once when it has."""
        self._left.append(fn)
        if self._is_over:
            with suppress(ValueError):  # when it is being called already
                self._left.remove(fn)
                super().add_done_callback(fn)

    def begin(self) -> bool:
        """Begin the send; False when it is cancelled."""
        with self._beginning:
            return not self.cancelled() and self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the send, unless it has begun."""
        with self._beginning:
            if self.cancelled() or not super().cancel():
                return self.cancelled()
            self.set_running_or_notify_cancel()  # nobody else would tell those who wait for it
        self.end()
        self.call_back()
        return True

    def end(self) -> bool:
        """Give up the room among those in flight. True when there are callbacks to be called."""
        self._leave(self)
        self._is_over = True
        return bool(self._left)

    def call_back(self) -> None:
        """Call the callbacks, all of them whatever one of them raises."""
        interrupt: KeyboardInterrupt | None = None
        while self._left:
            try:
                super().add_done_callback(self._left.popleft())  # it is done, so this calls, and logs an Exception
            except IndexError:  # another thread calls it
                break
            except KeyboardInterrupt as problem:
                interrupt = problem
            except BaseException as problem:
                logger.error("a callback of a send raised: %s", traceback_of(problem))
        if interrupt is not None:
            raise interrupt


class Flight:
    """One asynchronous send of one message.

    Parameters
    ----------
    two_phase : TwoPhase
        With the listener to be asked.
    message : OneMessage
    arg : object
        Handed to the local transaction.
    future : SendFuture
    """

    __slots__ = ("arg", "began_s", "context", "future", "message", "two_phase")

    def __init__(self, two_phase: TwoPhase, message: OneMessage, arg: Any, future: SendFuture) -> None:
        self.two_phase = two_phase
        self.message = message
        self.arg = arg
        self.future = future
        self.context = copy_context()  # what the caller has set, its listener sees
        self.began_s = two_phase.log.machine.monotonic()

    @property
    def asks_nobody(self) -> bool:
        """Whether there is no local transaction."""
        return type(self.two_phase.listener) is CommitOncePrepared


class Flights:
    """Brings flights to their ends.

    Parameters
    ----------
    machine : Machine
    commits : GroupCommit
    turns : Turns
        Of local transactions.
    listeners : ThreadPoolExecutor
        Threads for local transactions, and for what is out of the ordinary.
    callers : ThreadPoolExecutor
        Threads for callbacks, which may wait for other sends: so nothing that a send needs is done in them.
    """

    def __init__(
        self,
        machine: Machine,
        commits: GroupCommit,
        turns: Turns,
        listeners: ThreadPoolExecutor,
        callers: ThreadPoolExecutor,
    ) -> None:
        self._commits = commits
        self._turns = turns
        self._listeners = listeners
        self._callers = callers
        self._machine = machine
        self._lock = threading.Lock()
        self._done: deque[SendFuture] = deque()  # with callbacks to be called
        self._comes = False  # a thread that calls them is on its way

    def start(self, flight: Flight) -> None:
        """Send a message, and wait for nothing."""
        if flight.asks_nobody:
            self._begin(flight)
            return
        try:
            self._turns.admit(flight, partial(self._begin, flight), flight.future.cancel)
        except BaseException:  # an interrupt
            self._turns.leave(flight)
            raise

    # ------------------------------------------------------------------ the way
    def _begin(self, flight: Flight) -> bool:
        begins = flight.future.begin()
        if begins:
            self._commits.prepare_and_go_on(flight.message, partial(self._prepared, flight))
        return begins

    def _prepared(self, flight: Flight, record: HalfRecord | None, problem: BaseException | None) -> None:
        try:
            if record is None:
                raise problem or AssertionError
            header = flight.message.writer.header
            run = Run(record, header.fence_id, flight.arg, Outcome(record), held=held_by([flight.message]))
            if flight.asks_nobody:
                self._go_on(flight, run, _ask(flight, run))
            else:
                self._in_thread(self._listeners, partial(self._execute, flight, run))
        except BaseException as found:
            if not flight.asks_nobody:
                self._turns.leave(flight)
            self._fail(flight, found)

    def _execute(self, flight: Flight, run: Run) -> None:
        try:
            try:
                with self._turns.running():
                    answered = flight.context.run(_ask, flight, run)
            finally:
                self._turns.leave(flight)
            self._go_on(flight, run, answered)
        except BaseException as found:
            self._fail(flight, found)

    def _go_on(self, flight: Flight, run: Run, answered: Answered | None) -> None:
        """Decide what a listener has answered."""
        if answered is None:  # there is nothing to decide
            self._in_thread(self._listeners, partial(self._settle, flight, run))
            return
        batch, rows, verdicts = answered
        split = split_by_verdict(flight.two_phase.log, run.record, rows, batch, verdicts)
        commit, rollback = split[COMMIT_MESSAGE], split[ROLLBACK_MESSAGE]
        if commit or rollback:
            decision = Decision(run.record, batch.attempt, commit, rollback, Who.EXECUTE)
            self._commits.decide_and_go_on(decision, partial(self._decided, flight, run, batch.attempt))
        else:
            self._in_thread(self._listeners, partial(self._settle, flight, run))

    def _decided(
        self, flight: Flight, run: Run, attempt: int, placed: Sequence[Placed] | None, problem: BaseException | None
    ) -> None:
        try:
            if placed is None:
                raise problem or AssertionError
            run.keep(attempt, placed)
            if run.outcome.messages or flight.two_phase.is_settled(run):
                self._land(flight, run.outcome)
            else:
                self._in_thread(self._listeners, partial(self._settle, flight, run))
        except BaseException as found:
            self._fail(flight, found)

    def _settle(self, flight: Flight, run: Run) -> None:
        """Find out what became of it. This may wait, and run the local transaction again."""
        try:
            with self._turns.running():
                outcome = flight.context.run(flight.two_phase.bring_on, run)
            self._land(flight, outcome)
        except BaseException as found:
            self._fail(flight, found)

    # ------------------------------------------------------------------ the end
    def _land(self, flight: Flight, outcome: Outcome) -> None:
        header, log = flight.message.writer.header, flight.two_phase.log
        result = result_of(header, outcome, 1)
        tell_sent(log, header.producer_group, outcome, flight.began_s)
        flight.future.set_result(result)
        self._end(flight.future)

    def _fail(self, flight: Flight, problem: BaseException) -> None:
        if isinstance(problem, Exception):
            tell_not_sent(flight.two_phase.log, flight.message.writer.header.producer_group, problem)
        flight.future.set_exception(problem)
        self._end(flight.future)

    def _end(self, future: SendFuture) -> None:
        if not future.end():
            return
        with self._lock:
            self._done.append(future)
            comes, self._comes = self._comes, True
        if not comes:
            self._in_thread(self._callers, self._call_back)

    def _call_back(self) -> None:
        """Call callbacks while there are any. One of them may wait: then the thread that comes next goes on."""
        with self._lock:
            self._comes = False
        while True:
            with self._lock:
                if not self._done:
                    return
                future = self._done.popleft()
                one_more = bool(self._done) and not self._comes
                self._comes |= one_more
            if one_more:
                self._starts(self._callers, Once(self._call_back))
            future.call_back()

    def _in_thread(self, pool: ThreadPoolExecutor, work: Callable[[], object]) -> None:
        once = Once(work)
        if not self._starts(pool, once):
            once.now()

    def _starts(self, pool: ThreadPoolExecutor, once: Once[object]) -> bool:
        with suppress(RuntimeError):
            pool.submit(once)
            return True
        with suppress(RuntimeError):  # the producer was closed while this flight was under way
            self._machine.start_thread(once, "txmq-left")
            return True
        return False


def _ask(flight: Flight, run: Run) -> Answered | None:
    """Run the local transaction; None when there is nothing to decide."""
    try:
        return flight.two_phase.ask(run, 1, run.record.all_rows)
    except HalfBatchLeftError:  # we slept, and others settled it meanwhile
        return None
