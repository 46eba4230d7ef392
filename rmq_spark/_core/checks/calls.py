"""Asks listeners, whose calls may hang. A call cannot be ended from outside: it goes on, and a later round takes its
answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.batch_state import BatchState
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.redaction import sentence_of, traceback_of
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.verdicts import VerdictArray
from rmq_spark.logs import of_batch

logger = logging.getLogger(__name__)

HUNG_CALLS_MAX = 8
"""While this many calls of listeners have outlived their round, no listener is asked."""
STOP_POLL_S = 0.2


class NoAnswer(Exception):
    """A listener did not answer; the message says why, for the report."""


@dataclass(frozen=True)
class Question:
    """Rows of a half batch, under one attempt, about which a listener is asked."""

    record: HalfRecord
    state: BatchState
    attempt: int
    rows: RowSet
    batch: HalfBatch

    @property
    def key(self) -> tuple[str, int]:
        return self.record.half_id, self.attempt


@dataclass(frozen=True)
class Answer:
    """A listener's verdicts, and their question: that of an earlier round, if the call began there."""

    question: Question
    verdicts: VerdictArray


@dataclass(frozen=True)
class _Call:
    question: Question
    began: float
    verdicts: Future[VerdictArray]
    together: object
    """The same object for all questions that share a call of a listener."""


class Asker:
    """Calls listeners, and keeps the calls that have not returned.

    Parameters
    ----------
    in_threads : bool
        False: every call is made in the caller's thread.
    """

    def __init__(self, runtime: Runtime, in_threads: bool) -> None:
        self._runtime = runtime
        self.in_threads = in_threads
        self._calls: dict[tuple[str, int], _Call] = {}
        self._warned: set[str] = set()  # half batches of which a warning was logged

    def ask(
        self, question: Question, call: Callable[[], VerdictArray], here: bool, seconds_left: Callable[[], float]
    ) -> Answer:
        """The answer to a question, or to an earlier round's question about the same attempt.

        Parameters
        ----------
        call : callable
            Asks the listener.
        here : bool
            Whether it must be called in this thread.
        seconds_left : callable
            Returns the seconds that are left to wait for the answer.

        Raises
        ------
        NoAnswer
        """
        open_call = self._calls.pop(question.key, None)
        if open_call is None:
            (open_call,) = self._begin([question], lambda _: [call()], here, seconds_left)
        if not open_call.verdicts.done():
            raise self._keep(open_call)
        if (problem := open_call.verdicts.exception()) is not None:
            half_id, text = question.key[0], traceback_of(problem)
            # Nobody reads the report of a producer's own checks.
            level = logging.INFO if half_id in self._warned else logging.WARNING
            self._warned.add(half_id)
            logger.log(
                level, "the listener of half batch %r did not answer: %s", half_id, text, extra=of_batch(question.batch)
            )
            raise NoAnswer(f"its listener did not answer: {sentence_of(problem)}")
        return Answer(open_call.question, open_call.verdicts.result())

    def ask_many(
        self,
        questions: Sequence[Question],
        call: Callable[[Sequence[Question]], Sequence[VerdictArray | Exception]],
        here: bool,
        seconds_left: Callable[[], float],
    ) -> list[Answer | NoAnswer | None]:
        """The answer to each of several questions, asked in one call of a listener; None for a question that must be
        asked alone, because the call failed. See :meth:`ask`."""
        new = [q for q in questions if q.key not in self._calls]
        begun: dict[tuple[str, int], _Call] = {}
        refused: NoAnswer | None = None
        try:
            begun = {c.question.key: c for c in self._begin(new, call, here, seconds_left)} if new else {}
        except NoAnswer as reason:
            refused = reason
        calls = [self._calls.pop(q.key, None) or begun.get(q.key) for q in questions]
        return [refused if open_call is None else self._answer_of(open_call) for open_call in calls]

    def _answer_of(self, call: _Call) -> Answer | NoAnswer | None:
        if not call.verdicts.done():
            return self._keep(call)
        return None if call.verdicts.exception() is not None else Answer(call.question, call.verdicts.result())

    def _keep(self, call: _Call) -> NoAnswer:
        """Keep a call that has not returned."""
        self._calls[call.question.key] = call
        waited_s = self._runtime.monotonic() - call.began
        return NoAnswer(f"its listener has not answered for {waited_s:.1f} s; a later round uses its answer")

    def forget_all_but(self, half_ids: Collection[str]) -> None:
        """Drop answers about all other half batches: they are settled."""
        self._warned.intersection_update(half_ids)
        self._calls = {key: c for key, c in self._calls.items() if key[0] in half_ids or not c.verdicts.done()}

    def _begin(
        self,
        questions: Sequence[Question],
        call: Callable[[Sequence[Question]], Sequence[VerdictArray | Exception]],
        here: bool,
        seconds_left: Callable[[], float],
    ) -> list[_Call]:
        hung = len({id(c.together) for c in self._calls.values() if not c.verdicts.done()})
        if hung >= HUNG_CALLS_MAX:
            raise NoAnswer(f"it was not asked about: {hung} calls of listeners have not come back; restart the checker")
        shared, began = object(), self._runtime.monotonic()
        calls = [_Call(question, began, Future(), shared) for question in questions]
        if here or not self.in_threads:
            _answer(calls, call, Exception)  # an exit or an interrupt of the user ends this thread
        else:  # nothing else would report what ends such a thread
            self._runtime.start_thread(lambda: _answer(calls, call, BaseException), "txmq-check", daemon=True)
            last = calls[-1].verdicts
            while not last.done() and (left_s := seconds_left()) > 0:
                wait([last], min(STOP_POLL_S, left_s))
        return calls


def _answer(
    calls: Sequence[_Call],
    call: Callable[[Sequence[Question]], Sequence[VerdictArray | Exception]],
    caught: type[BaseException],
) -> None:
    try:
        answers: Sequence[VerdictArray | BaseException] = call([open_call.question for open_call in calls])
    except caught as problem:
        answers = [problem] * len(calls)
    for open_call, answer in zip(calls, answers, strict=True):
        if isinstance(answer, BaseException):
            open_call.verdicts.set_exception(answer)
        else:
            open_call.verdicts.set_result(answer)
