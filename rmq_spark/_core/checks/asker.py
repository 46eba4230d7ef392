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
"""No listener is asked while this many calls have outlived their round."""


class NoAnswer(Exception):
    """A listener did not answer; the message says why, for the report."""


@dataclass(frozen=True)
class RowsToCheck:
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
class CheckVerdicts:
    """A listener's verdicts on rows, perhaps from a call that began in an earlier round."""

    checked: RowsToCheck
    verdicts: VerdictArray


Replies: TypeAlias = Sequence[VerdictArray | Exception]
"""A listener's replies about several half batches, in their order."""


@dataclass(frozen=True)
class _OpenCheck:
    """Rows to check, the call that asks about them and others, and the index of their reply."""

    rows: RowsToCheck
    call: OpenCall[Replies]
    at: int

    def reply(self) -> VerdictArray | BaseException:
        """The verdicts, or the error in their place. The call must have returned."""
        problem = self.call.result.exception()
        return self.call.result.result()[self.at] if problem is None else problem


class Asker:
    """Calls listeners; with ``in_threads`` in threads of its own."""

    def __init__(self, runtime: Runtime, in_threads: bool) -> None:
        self._runtime = runtime
        self.in_threads = in_threads
        self._open: dict[tuple[str, int], _OpenCheck] = {}  # their calls had not returned when a round ended
        self._warned: set[str] = set()  # half batches of which a warning was logged

    def ask(
        self,
        to_ask: Sequence[RowsToCheck],
        call: Callable[[Sequence[RowsToCheck]], Replies],
        here: bool,
        seconds_left: Callable[[], float],
    ) -> list[CheckVerdicts | BaseException]:
        """Return for each of ``to_ask`` its verdicts; or NoAnswer, or what the listener raised. A call that an earlier
        round made about the same attempt is used first; one new call asks about all others.

        The call is made in this thread if ``here``. ``seconds_left`` returns the seconds that are left to wait.
        """
        new = [rows for rows in to_ask if rows.key not in self._open]
        begun: dict[tuple[str, int], _OpenCheck] = {}
        refused = NoAnswer()
        try:
            begun = {check.rows.key: check for check in self._begin(new, call, here, seconds_left)} if new else {}
        except NoAnswer as reason:
            refused = reason
        checks = [self._open.pop(rows.key, None) or begun.get(rows.key) for rows in to_ask]
        return [refused if check is None else self._verdicts_of(check) for check in checks]

    def _verdicts_of(self, check: _OpenCheck) -> CheckVerdicts | BaseException:
        if not check.call.has_returned:
            self._open[check.rows.key] = check
            waited_s = self._runtime.monotonic() - check.call.began_s
            return NoAnswer(f"its listener has not answered for {waited_s:.1f} s; a later round uses its answer")
        reply = check.reply()
        return reply if isinstance(reply, BaseException) else CheckVerdicts(check.rows, reply)

    def why(self, asked: RowsToCheck, problem: BaseException) -> str:
        """Why a listener gave no answer, for the report. The first failure of a half batch is logged as a warning,
        since nobody reads the report of a producer's own checks; its traceback at level DEBUG."""
        if isinstance(problem, NoAnswer):
            return str(problem)
        half_id, text = asked.key[0], f"{sentence_of(problem)}{line_of(problem)}"
        level = logging.INFO if half_id in self._warned else logging.WARNING
        self._warned.add(half_id)
        fields = of_batch(asked.batch)
        logger.log(level, "the listener of half batch %r did not answer: %s", half_id, text, extra=fields)
        logger.debug("the listener of half batch %r raised: %s", half_id, traceback_of(problem), extra=fields)
        return f"its listener did not answer: {sentence_of(problem)}"

    def forget_all_but(self, half_ids: Collection[str]) -> None:
        """Drop the replies about all other half batches, which are settled."""
        self._warned.intersection_update(half_ids)
        self._open = {
            key: check for key, check in self._open.items() if key[0] in half_ids or not check.call.has_returned
        }

    def _begin(
        self,
        to_ask: Sequence[RowsToCheck],
        call: Callable[[Sequence[RowsToCheck]], Replies],
        here: bool,
        seconds_left: Callable[[], float],
    ) -> list[_OpenCheck]:
        hung = len({id(check.call) for check in self._open.values() if not check.call.has_returned})
        if hung >= HUNG_CALLS_MAX:
            raise NoAnswer(f"it was not asked about: {hung} calls of listeners have not come back; restart the checker")
        thread_name = "txmq-check" if self.in_threads and not here else None
        open_call = OpenCall.begin(self._runtime, lambda: call(to_ask), thread_name)
        wait_for([open_call], seconds_left)
        return [_OpenCheck(rows, open_call, at) for at, rows in enumerate(to_ask)]
