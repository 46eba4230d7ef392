"""Asynchronous sends without threads of their own: each passes from one working thread to the next.

::

    caller         txmq-prepare           listener threads      txmq-decide       callback threads
    a message ──▶  one commit of many ──▶ local transaction ──▶ one commit of ──▶ callbacks
                                                                many, results

A thread for each send would spend more time on waking up than on the send. A send that must wait, as after a check that
was faster, continues in a thread that may wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rmq_spark._core.listeners.transaction_listener import has_local_transaction
from rmq_spark._core.log.decision import Decided
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.producer.future import SendFuture
from rmq_spark._core.producer.result import result_of
from rmq_spark._core.protocol.observe import tell_not_sent, tell_sent
from rmq_spark._core.protocol.outcome import Outcome
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.protocol.steps import Decide, Execute, MayBlock, Prepare, Step, run_all
from rmq_spark._core.runtime.pools import ElasticPool
from rmq_spark.errors import TxmqError

if TYPE_CHECKING:
    from rmq_spark._core.producer.send_threads import SendThreads

Done = TypeVar("Done")


class AsyncSend:
    """Drives one send, step by step, each in the thread that suits the step. ``asks_nobody``: there is no local
    transaction."""

    __slots__ = ("_began_s", "_context", "_future", "_header", "_steps", "_threads", "_two_phase", "asks_nobody")

    def __init__(
        self, threads: SendThreads, two_phase: TwoPhase, message: OneMessage, arg: Any, future: SendFuture
    ) -> None:
        self._threads = threads
        self._two_phase = two_phase
        self._header = message.writer.header
        self._steps = two_phase.steps(self._header, lambda: [message], arg)
        self._future = future
        self.asks_nobody = not has_local_transaction(two_phase.listener)
        self._context = None if self.asks_nobody else copy_context()  # the listener sees the caller's context variables
        self._began_s = two_phase.engine.runtime.monotonic()

    def begin(self) -> bool:
        """Begin the send, up to its prepare; False when it is cancelled."""
        has_begun = self._future.begin()
        if has_begun:
            self._go_on()
        return has_begun

    def _go_on(self, answer: Any = None, problem: BaseException | None = None) -> None:
        """Go to the next step, with the answer or the problem of the last one."""
        try:
            step = self._steps.send(answer) if problem is None else self._steps.throw(problem)
            self._start(step)
        except StopIteration as end:
            self._succeed(end.value)
        except BaseException as raised:
            self._fail(raised)

    def _start(self, step: Step) -> None:
        """Start a step, without waiting. The thread that runs the step calls :meth:`_go_on`."""
        match step:
            case Prepare(files=[OneMessage() as message]):
                self._threads.commits.prepare_async(message, self._prepared)
            case Execute():
                self._pool.put(partial(self._execute, step))
            case Decide():
                self._threads.commits.decide_async(step.decision, self._decided)
            case MayBlock():
                self._leave_turn()
                self._pool.put(partial(self._run_rest, step))
            case _:
                raise AssertionError(step)

    @property
    def _pool(self) -> ElasticPool:
        return self._threads.senders if self.asks_nobody else self._threads.listeners

    def _prepared(self, record: HalfRecord | TxmqError | None, problem: BaseException | None) -> None:
        error = problem or (None if isinstance(record, HalfRecord) else record or AssertionError())
        self._go_on(record, error)

    def _decided(self, decided: Decided | None, problem: BaseException | None) -> None:
        if decided is None:
            self._go_on(problem=problem or AssertionError())
        else:
            self._go_on(decided.placed, decided.problem)

    def _execute(self, step: Execute) -> None:
        """Run the local transaction in its turn, and continue in this thread."""
        answer, problem = None, None
        try:
            with self._turn():
                answer = self._in_context(partial(self._two_phase.run_step, step))
        except BaseException as raised:
            problem = raised
        self._leave_turn()
        self._go_on(answer, problem)

    def _run_rest(self, step: MayBlock) -> None:
        """Run this step and all that follow in this thread, which may wait."""
        run_step = self._two_phase.run_step
        try:
            run_step(step)
            with self._turn():
                outcome = self._in_context(partial(run_all, self._steps, run_step))
            self._succeed(outcome)
        except BaseException as raised:
            self._fail(raised)

    def _turn(self) -> Any:
        return nullcontext() if self.asks_nobody else self._threads.listener_slots.running()

    def _in_context(self, work: Callable[[], Done]) -> Done:
        return work() if self._context is None else self._context.run(work)

    # ------------------------------------------------------------------ the end
    def _leave_turn(self) -> None:
        """Let others be prepared: this send has no local transaction to come."""
        if not self.asks_nobody:
            self._threads.listener_slots.leave(self)

    def _succeed(self, outcome: Outcome) -> None:
        try:
            result = result_of(self._header, outcome, 1)
            tell_sent(self._two_phase.engine, self._header.producer_group, outcome, self._began_s)
        except BaseException as raised:
            self._fail(raised)
            return
        self._leave_turn()
        self._future.set_result(result)
        self._threads.end(self._future)

    def _fail(self, problem: BaseException) -> None:
        self._leave_turn()
        if isinstance(problem, Exception):
            tell_not_sent(self._two_phase.engine, self._header.producer_group, problem)
        self._future.set_exception(problem)
        self._threads.end(self._future)
