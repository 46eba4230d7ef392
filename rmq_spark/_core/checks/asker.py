"""Asks listeners about half batches, and keeps the calls that have not returned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rmq_spark._core.checks.open_call import OpenCall, wait_for
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.batch_state import BatchState
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.runtime.log_records import of_batch
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.redaction import line_of, sentence_of, traceback_of
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.verdicts import VerdictArray

logger = logging.getLogger(__name__)

HUNG_CALLS_MAX = 8
"""While this many calls of listeners have outlived their round, no listener is asked."""


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


Answers: TypeAlias = Sequence[VerdictArray | Exception]
"""A listener's answers about several half batches, in their order."""


@dataclass(frozen=True)
class _Asked:
    """A question, and the call in which it was asked with others."""

    question: Question
    call: OpenCall[Answers]
    at: int

    def answer(self) -> VerdictArray | BaseException:
        """The verdicts, or the error in their place, once the call has returned."""
        problem = self.call.result.exception()
        return self.call.result.result()[self.at] if problem is None else problem


class Asker:
    """Calls listeners, in threads unless ``in_threads`` is False."""

    def __init__(self, runtime: Runtime, in_threads: bool) -> None:
        self._runtime = runtime
        self.in_threads = in_threads
        self._asked: dict[tuple[str, int], _Asked] = {}  # in calls that have not returned
        self._warned: set[str] = set()  # half batches of which a warning was logged

    def ask(
        self,
        questions: Sequence[Question],
        call: Callable[[Sequence[Question]], Answers],
        here: bool,
        seconds_left: Callable[[], float],
    ) -> list[Answer | BaseException]:
        """The answer to each question, from one call of a listener, or from an earlier round's call about the same
        attempt. In place of an answer: NoAnswer, or what the listener raised.

        The call is made in this thread if ``here``. ``seconds_left`` returns the seconds that are left to wait.
        """
        new = [q for q in questions if q.key not in self._asked]
        begun: dict[tuple[str, int], _Asked] = {}
        refused = NoAnswer()
        try:
            begun = {asked.question.key: asked for asked in self._begin(new, call, here, seconds_left)} if new else {}
        except NoAnswer as reason:
            refused = reason
        all_asked = [self._asked.pop(q.key, None) or begun.get(q.key) for q in questions]
        return [refused if asked is None else self._answer_of(asked) for asked in all_asked]

    def _answer_of(self, asked: _Asked) -> Answer | BaseException:
        if not asked.call.has_returned:
            self._asked[asked.question.key] = asked
            waited_s = self._runtime.monotonic() - asked.call.began_s
            return NoAnswer(f"its listener has not answered for {waited_s:.1f} s; a later round uses its answer")
        answer = asked.answer()
        return answer if isinstance(answer, BaseException) else Answer(asked.question, answer)

    def why(self, question: Question, problem: BaseException) -> str:
        """Why a listener gave no answer, for the report. The first failure about a half batch is a warning, since
        nobody reads the report of a producer's own checks. At level DEBUG the traceback is logged, too."""
        if isinstance(problem, NoAnswer):
            return str(problem)
        half_id, text = question.key[0], f"{sentence_of(problem)}{line_of(problem)}"
        level = logging.INFO if half_id in self._warned else logging.WARNING
        self._warned.add(half_id)
        fields = of_batch(question.batch)
        logger.log(level, "the listener of half batch %r did not answer: %s", half_id, text, extra=fields)
        logger.debug("the listener of half batch %r raised: %s", half_id, traceback_of(problem), extra=fields)
        return f"its listener did not answer: {sentence_of(problem)}"

    def forget_all_but(self, half_ids: Collection[str]) -> None:
        """Drop answers about all other half batches: they are settled."""
        self._warned.intersection_update(half_ids)
        self._asked = {
            key: asked for key, asked in self._asked.items() if key[0] in half_ids or not asked.call.has_returned
        }

    def _begin(
        self,
        questions: Sequence[Question],
        call: Callable[[Sequence[Question]], Answers],
        here: bool,
        seconds_left: Callable[[], float],
    ) -> list[_Asked]:
        hung = len({id(asked.call) for asked in self._asked.values() if not asked.call.has_returned})
        if hung >= HUNG_CALLS_MAX:
            raise NoAnswer(f"it was not asked about: {hung} calls of listeners have not come back; restart the checker")
        thread_name = "txmq-check" if self.in_threads and not here else None
        open_call = OpenCall.begin(self._runtime, lambda: call(questions), thread_name)
        wait_for([open_call], seconds_left)
        return [_Asked(question, open_call, at) for at, question in enumerate(questions)]
