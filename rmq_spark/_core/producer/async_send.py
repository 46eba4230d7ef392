"""Asynchronous sends that need no thread of their own: each goes from one thread at work to the next.

::

    caller         txmq-prepare           listener threads      txmq-decide       tellers
    a message ──▶  one commit of many ──▶ local transaction ──▶ one commit of ──▶ callbacks
                                                                many, results

A thread for each of 4,096 sends under way spends more time on waking up than on the send. What is out of the ordinary,
such as a check that was faster, goes on in a thread that may wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from rmq_spark._core.listeners.listener import CommitOncePrepared
from rmq_spark._core.log.half_table import HalfRecord
from rmq_spark._core.log.op import Who
from rmq_spark._core.log.op_table import Decided
from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.producer.admission import Turns
from rmq_spark._core.producer.future import SendFuture
from rmq_spark._core.producer.result import result_of
from rmq_spark._core.protocol.group_commit import GroupCommit
from rmq_spark._core.protocol.half_batch import Split, split_by_verdict
from rmq_spark._core.protocol.observe import tell_not_sent, tell_sent
from rmq_spark._core.protocol.two_phase import OF_THE_LOG, Answered, Outcome, Run, TwoPhase, held_by, left_open
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.pools import Crew
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark._core.vocabulary.rows import NO_ROWS
from rmq_spark.errors import HalfBatchLeftError, TxmqError

FIRST_ATTEMPT = 1
Done = TypeVar("Done")


class Flights:
    """What the flights of a producer share.

    Parameters
    ----------
    commits : GroupCommit
    turns : Turns
        Of local transactions.
    senders : Crew
        Threads for what is out of the ordinary in a send without a local transaction. There is one for each send.
    listeners : Crew
        Threads for local transactions, and for what is out of the ordinary in their sends.
    callers : Crew
        Threads for callbacks, which may wait for other sends: so nothing that a send needs is done in them.
    """

    def __init__(self, commits: GroupCommit, turns: Turns, senders: Crew, listeners: Crew, callers: Crew) -> None:
        self.commits = commits
        self.turns = turns
        self.senders = senders
        self.listeners = listeners
        self.callers = callers

    def start(self, two_phase: TwoPhase, message: OneMessage, arg: Any, future: SendFuture) -> None:
        """Send a message, and wait for nothing.

        Parameters
        ----------
        two_phase : TwoPhase
            With the listener to be asked.
        message : OneMessage
        arg : object
            Handed to the local transaction.
        future : SendFuture
        """
        flight = Flight(self, two_phase, message, arg, future)
        if flight.asks_nobody:
            flight.begin()
            return
        try:
            self.turns.admit(flight, flight.begin, lambda: self.give_up(future))
        except BaseException:  # an interrupt
            self.turns.leave(flight)
            raise

    def give_up(self, future: SendFuture) -> None:
        """Cancel a send that has not begun. Who closes the producer must not call its callbacks: one may block."""
        if future.give_up():
            self.callers.put(future.call_back)

    def end(self, future: SendFuture) -> None:
        """The send has come to its end: see to its callbacks."""
        if future.end():
            self.callers.put(future.call_back)


class Flight:
    """One send, on its way to its end."""

    __slots__ = ("_arg", "_attempt", "_began_s", "_context", "_flights", "_future", "_message", "_run", "_two_phase")

    _run: Run
    _attempt: int

    def __init__(
        self, flights: Flights, two_phase: TwoPhase, message: OneMessage, arg: Any, future: SendFuture
    ) -> None:
        self._flights = flights
        self._two_phase = two_phase
        self._message = message
        self._arg = arg
        self._future = future
        self._context = None if self.asks_nobody else copy_context()  # what the caller has set, its listener sees
        self._began_s = two_phase.log.machine.monotonic()

    @property
    def asks_nobody(self) -> bool:
        """Whether there is no local transaction."""
        return type(self._two_phase.listener) is CommitOncePrepared

    def _in_context(self, work: Callable[[], Done]) -> Done:
        return work() if self._context is None else self._context.run(work)

    # ------------------------------------------------------------------ the way
    def begin(self) -> bool:
        """Begin to prepare; False when the send is cancelled."""
        begins = self._future.begin()
        if begins:
            self._flights.commits.prepare_and_go_on(self._message, self._prepared)
        return begins

    def _prepared(self, found: HalfRecord | TxmqError | None, problem: BaseException | None) -> None:
        try:
            if problem is not None:
                self._flights.senders.put(partial(self._fail_to_prepare, problem))  # it looks what there is
                return
            if not isinstance(found, HalfRecord):
                raise found or AssertionError
            header = self._message.writer.header
            held = held_by([self._message])
            self._run = Run(found, header.fence_id, self._arg, Outcome(found), held=held, numbered=False)
            if self.asks_nobody and self._two_phase.log.is_untouched(found):
                self._commit_all()
            elif self.asks_nobody:
                self._go_on(self._ask())
            else:
                self._flights.listeners.put(self._execute)
        except BaseException as raised:
            if not self.asks_nobody:
                self._flights.turns.leave(self)
            self._fail(raised)

    def _fail_to_prepare(self, problem: BaseException) -> None:
        try:
            if not self.asks_nobody:
                self._flights.turns.leave(self)
            self._two_phase.require_not_prepared(self._message.writer.header, problem)
            raise problem
        except BaseException as raised:
            self._fail(raised)

    def _commit_all(self) -> None:
        """Decide what has no local transaction, and of which nobody has said anything."""
        rows = self._run.record.all_rows
        self._run.executed.append((FIRST_ATTEMPT, rows))
        self._decide(FIRST_ATTEMPT, Split(rows, NO_ROWS, NO_ROWS))

    def _execute(self) -> None:
        try:
            try:
                with self._flights.turns.running():
                    answered = self._in_context(self._ask)
            finally:
                self._flights.turns.leave(self)
            self._go_on(answered)
        except BaseException as raised:
            self._fail(raised)

    def _ask(self) -> Answered | None:
        """Run the local transaction; None when there is nothing to decide."""
        try:
            return self._two_phase.ask(self._run, FIRST_ATTEMPT, self._run.record.all_rows)
        except HalfBatchLeftError:  # we slept, and others settled it meanwhile
            return None

    def _go_on(self, answered: Answered | None) -> None:
        """Decide what a listener has answered."""
        if answered is None:  # there is nothing to decide
            self._find_out()
            return
        record = self._run.record
        batch, rows, verdicts = answered
        split = split_by_verdict(self._two_phase.log, record, rows, batch, verdicts)
        if split.decides:
            self._decide(batch.attempt, split)
        else:
            self._find_out()

    def _decide(self, attempt: int, split: Split) -> None:
        self._attempt = attempt
        decision = split.decision(self._run.record, attempt, Who.EXECUTE)
        self._flights.commits.decide_and_go_on(decision, self._decided)

    def _decided(self, decided: Decided | None, problem: BaseException | None) -> None:
        try:
            if decided is None or decided.problem is not None:
                raise problem or (decided and decided.problem) or AssertionError
            run = self._run
            run.keep(self._attempt, decided.placed)
            reach("decided", header=run.record.header, attempt=self._attempt)
            if run.outcome.messages or self._two_phase.is_settled(run):
                self._land(run.outcome)
            else:
                self._find_out()
        except BaseException as raised:
            self._fail(raised)

    def _find_out(self) -> None:
        """Go on in a thread that may wait."""
        crew = self._flights.senders if self.asks_nobody else self._flights.listeners
        crew.put(self._settle)

    def _settle(self) -> None:
        """Find out what became of it. This may wait, and run the local transaction again."""
        try:
            with nullcontext() if self.asks_nobody else self._flights.turns.running():
                outcome = self._in_context(partial(self._two_phase.bring_on, self._run))
            self._land(outcome)
        except BaseException as raised:
            self._fail(raised)

    # ------------------------------------------------------------------ the end
    def _land(self, outcome: Outcome) -> None:
        header = self._message.writer.header
        result = result_of(header, outcome, 1)
        tell_sent(self._two_phase.log, header.producer_group, outcome, self._began_s)
        self._future.set_result(result)
        self._flights.end(self._future)

    def _fail(self, problem: BaseException) -> None:
        if hasattr(self, "_run") and isinstance(problem, OF_THE_LOG):
            found = left_open(self._run, problem)
            found.__cause__ = cause_of(problem)
            problem = found
        if isinstance(problem, Exception):
            tell_not_sent(self._two_phase.log, self._message.writer.header.producer_group, problem)
        self._future.set_exception(problem)
        self._flights.end(self._future)
