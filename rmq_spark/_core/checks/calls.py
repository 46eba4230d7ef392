"""Questions to listeners, whose calls may hang. A call cannot be ended from outside: it goes on, and a later round
takes its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.half_table import HalfRecord
from rmq_spark._core.log.op import BatchState
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.redaction import sentence_of, traceback_of
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.verdicts import VerdictArray
from rmq_spark.logs import of_batch

logger = logging.getLogger(__name__)

HUNG_CALLS_MAX = 8
"""When so many calls of listeners have outlived their round, no listener is asked any more."""
STOP_POLL_S = 0.2


class NoAnswer(Exception):
    """A listener did not answer; the message says why, for the report."""


@dataclass(frozen=True)
class Question:
    """Rows of a half batch, under one attempt, about which somebody is asked."""

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
    """What a listener said, and to which question: that of an earlier round, when its call came back only now."""

    question: Question
    verdicts: VerdictArray


@dataclass(frozen=True)
class _Call:
    question: Question
    began: float
    verdicts: Future[VerdictArray]
    together: object
    """The same in all calls that are one call of a listener."""


class Asker:
    """Calls listeners, and keeps the calls that have not come back.

    Parameters
    ----------
    machine : Machine
    in_threads : bool
        False: every call is made in the caller's thread, and waited for.
    """

    def __init__(self, runtime: Runtime, in_threads: bool) -> None:
        self._machine = runtime
        self.in_threads = in_threads
        self._calls: dict[tuple[str, int], _Call] = {}
        self._told: set[str] = set()  # half batches of which a warning was logged

    def ask(
        self, question: Question, call: Callable[[], VerdictArray], here: bool, seconds_left: Callable[[], float]
    ) -> Answer:
        """The answer to a question, or to the one that was asked about the same attempt in an earlier round.

        Parameters
        ----------
        call : callable
            Asks the listener.
        here : bool
            It must be called in this thread.
        seconds_left : callable
            How long the answer may be waited for, from now on.

        Raises
        ------
        NoAnswer
        """
        asked = self._calls.pop(question.key, None)
        if asked is None:
            (asked,) = self._begin([question], lambda _: [call()], here, seconds_left)
        if not asked.verdicts.done():
            raise self._keep(asked)
        if (problem := asked.verdicts.exception()) is not None:
            half_id, said = question.key[0], traceback_of(problem)
            # A producer's own checks have nobody who reads their report.
            level = logging.INFO if half_id in self._told else logging.WARNING
            self._told.add(half_id)
            logger.log(
                level, "the listener of half batch %r did not answer: %s", half_id, said, extra=of_batch(question.batch)
            )
            raise NoAnswer(f"its listener did not answer: {sentence_of(problem)}")
        return Answer(asked.question, asked.verdicts.result())

    def ask_many(
        self,
        questions: Sequence[Question],
        call: Callable[[Sequence[Question]], Sequence[VerdictArray | Exception]],
        here: bool,
        seconds_left: Callable[[], float],
    ) -> list[Answer | NoAnswer | None]:
        """The answer to each of several questions, which are one call of a listener; None where it gave none, so that
        it is to be asked alone. See :meth:`ask`."""
        new = [q for q in questions if q.key not in self._calls]
        begun: dict[tuple[str, int], _Call] = {}
        refused: NoAnswer | None = None
        try:
            begun = {c.question.key: c for c in self._begin(new, call, here, seconds_left)} if new else {}
        except NoAnswer as reason:
            refused = reason
        calls = [self._calls.pop(q.key, None) or begun.get(q.key) for q in questions]
        return [refused if asked is None else self._answered(asked) for asked in calls]

    def _answered(self, asked: _Call) -> Answer | NoAnswer | None:
        if not asked.verdicts.done():
            return self._keep(asked)
        return None if asked.verdicts.exception() is not None else Answer(asked.question, asked.verdicts.result())

    def _keep(self, asked: _Call) -> NoAnswer:
        """Keep a call that has not come back."""
        self._calls[asked.question.key] = asked
        waited_s = self._machine.monotonic() - asked.began
        return NoAnswer(f"its listener has not answered for {waited_s:.1f} s; a later round uses its answer")

    def forget_all_but(self, half_ids: Collection[str]) -> None:
        """Drop answers about half batches that somebody else has settled."""
        self._told.intersection_update(half_ids)
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
        together, began = object(), self._machine.monotonic()
        asked = [_Call(question, began, Future(), together) for question in questions]
        if here or not self.in_threads:
            _answer(asked, call, Exception)  # an exit or an interrupt of the user ends this thread
        else:  # such a thread has nobody else to tell
            self._machine.start_thread(lambda: _answer(asked, call, BaseException), "txmq-check", daemon=True)
            last = asked[-1].verdicts
            while not last.done() and (left := seconds_left()) > 0:
                wait([last], min(STOP_POLL_S, left))
        return asked


def _answer(
    asked: Sequence[_Call],
    call: Callable[[Sequence[Question]], Sequence[VerdictArray | Exception]],
    caught: type[BaseException],
) -> None:
    try:
        found: Sequence[VerdictArray | BaseException] = call([one.question for one in asked])
    except caught as problem:
        found = [problem] * len(asked)
    for one, answer in zip(asked, found, strict=True):
        if isinstance(answer, BaseException):
            one.verdicts.set_exception(answer)
        else:
            one.verdicts.set_result(answer)
