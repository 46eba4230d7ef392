"""One round of checks: open → choose → ask → decide.

====== ==========================================================================================================
open   the half batches that are not settled, first those that the last round did not reach
choose which of their rows are old enough, were asked about too often, or are too old to wait for an answer
ask    their listener, about many half batches at once if it can
decide by its verdicts, several half batches in one commit; a check is counted for rows that stay UNKNOWN
====== ==========================================================================================================

A round speaks to an Engine and to listeners, and knows neither Spark nor Delta.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial

import pyarrow as pa

from rmq_spark._core.checks.asker import Asker, CheckVerdicts, NoAnswer, RowsToCheck
from rmq_spark._core.checks.check_report import CHECKED, IMMUNE, LEASED, LEFT_OVER, NO_LISTENER, YOUNG, CheckReport
from rmq_spark._core.checks.decisions import TOGETHER_MAX, Decisions, OpenRound
from rmq_spark._core.checks.immunity import COLUMNS, is_old_enough
from rmq_spark._core.checks.policy import TransactionCheckListener
from rmq_spark._core.checks.probe import Probe
from rmq_spark._core.inspect.unsettled import conflicts
from rmq_spark._core.listeners.half_batch import HalfBatch, normalize_verdicts
from rmq_spark._core.listeners.transaction_listener import (
    NO_LISTENER_FENCE,
    CommitOncePrepared,
    TransactionListener,
    Verdicts,
    answers_many,
    require_same_store,
    store_id_of,
)
from rmq_spark._core.log.batch_state import BatchState, RowState
from rmq_spark._core.log.decision import TOO_LATE, Decision, UnknownCheck
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.op import Who
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.split import Split, split_by_verdict
from rmq_spark._core.runtime.log_records import failure, of_batch, of_header
from rmq_spark._core.runtime.spans import tracing
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX
from rmq_spark._core.vocabulary.redaction import redacted, sentence_of
from rmq_spark._core.vocabulary.rows import NO_ROWS, RowSet
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark._core.vocabulary.verdicts import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    Rollback,
    VerdictArray,
    call_for_verdicts,
    reason_for_log,
    state_of,
)
from rmq_spark.errors import FenceError, HalfBatchLeftError

logger = logging.getLogger(__name__)


class _Todo(Enum):
    """The ways in which a round treats rows that it chose."""

    ASK = "ask"
    DISCARD = "discard"
    EXPIRE = "expire"


@dataclass(frozen=True)
class Rules:
    """The rules by which a checker asks. See :class:`~rmq_spark.CheckService` for the other attributes.

    A half batch is left alone for ``pause_s`` after any process counted a check of it. Without a ``clock`` (tests give
    one) the log's clock counts, and rows expire later by its doubt.
    """

    listeners: Mapping[str, TransactionListener]
    transaction_timeout: float
    transaction_check_max: int
    file_reserved_time: float
    round_timeout: float | None
    discard_policy: TransactionCheckListener
    only_groups: bool
    elsewhere: frozenset[str]
    pause_s: float
    clock: Callable[[], datetime] | None


class Checker:
    """Runs rounds, and remembers the half batches that a round did not reach."""

    def __init__(self, engine: Engine, rules: Rules) -> None:
        self.engine = engine
        self.rules = rules
        self.clock = rules.clock or engine.runtime.now
        self._doubt_s: float | None = None  # of the clock, in this round
        self._no_transaction = CommitOncePrepared()
        in_threads = rules.round_timeout is not None
        self._asker = Asker(engine.runtime, in_threads=in_threads)
        self._probe = Probe(engine.runtime, rules.listeners, in_threads=in_threads)
        self._not_reached: list[str] = []
        self._foreign: set[str] = set()  # open half batches of other groups (only_groups)

    def round(self, stop: threading.Event) -> CheckReport:
        """Run one round. A fault of a single half batch or its listener does not end it."""
        report = CheckReport(self.clock())
        self._doubt_s = None
        runtime = self.engine.runtime
        decisions = Decisions(self.engine, lambda decision, problem: _not_decided(decision, problem, report))
        round_ = OpenRound(report, decisions, self.rules.round_timeout, stop, runtime, runtime.monotonic())
        half_ids = self._open_half_ids()
        self._not_reached = []
        done: set[str] = set()
        for at, half_id in enumerate(half_ids):
            if stop.is_set() or (at > 0 and round_.seconds_left() <= 0):
                self._not_reached = [h for h in half_ids[at:] if h not in done]
                report.skip(LEFT_OVER, len(self._not_reached))
                break
            if at % TOGETHER_MAX == 0:
                done = self._check_together(half_ids[at : at + TOGETHER_MAX], round_)
            if half_id not in done:
                self._check(half_id, round_)
        decisions.make()
        self._finish(report, stop)
        report.seconds = round_.seconds()
        return report

    # ------------------------------------------------------------------ open
    def _open_half_ids(self) -> list[str]:
        """Half batches to check: first those that the last round did not reach, then the others, the oldest first."""
        ids = self.engine.open_half_ids()
        self._foreign &= set(ids)
        ids = [i for i in ids if i not in self._foreign]
        first = [i for i in self._not_reached if i in set(ids)]
        return first + [i for i in ids if i not in set(first)]

    def _check(self, half_id: str, round_: OpenRound) -> None:
        """Check a half batch alone."""
        try:
            record = self.engine.get(half_id)
            listener = self._listener_of(record)
            if listener is None and self.rules.only_groups:
                self._foreign.add(half_id)
                return
            for todo, target in self._targets(record, self.engine.state_of(record), listener, round_.report, None):
                self._do(todo, target, listener, round_)
        except HalfBatchLeftError:  # another process settled it, long ago by now
            pass
        except Exception as problem:  # such as a damaged file: the other half batches must not wait
            _cannot_check(half_id, problem, round_.report)

    def _check_together(self, half_ids: Sequence[str], round_: OpenRound) -> set[str]:
        """Check the small half batches whose listener answers about many at once. Returns the ids that need nothing
        more in this round; the caller checks the rest one by one."""
        if not any(answers_many(listener) for listener in self.rules.listeners.values()):
            return set()
        to_ask: dict[str, list[RowsToCheck]] = {}  # by producer group
        done: set[str] = set()
        try:
            for record, state, rows in self.engine.small_batches(half_ids):
                listener = self._listener_of(record)
                if listener is None or not answers_many(listener):
                    continue
                with suppress(HalfBatchLeftError):  # another process settled it, long ago by now
                    for todo, target in self._targets(record, state, listener, round_.report, rows):
                        if todo is _Todo.ASK:
                            to_ask.setdefault(record.header.producer_group, []).append(target)
                        else:
                            self._do(todo, target, listener, round_)
                done.add(record.half_id)
            for group, of_group in to_ask.items():
                done -= self._ask_many(of_group, self.rules.listeners[group], round_)
        except Exception as problem:
            logger.info("%d half batches are looked at one by one: %s", len(half_ids), failure(problem))
            done -= {target.record.half_id for of_group in to_ask.values() for target in of_group}
        return done

    def _listener_of(self, record: HalfRecord) -> TransactionListener | None:
        if record.header.fence_id == NO_LISTENER_FENCE:
            return self._no_transaction
        return self.rules.listeners.get(record.header.producer_group)

    # ------------------------------------------------------------------ choose
    def _targets(
        self,
        record: HalfRecord,
        state: BatchState,
        listener: TransactionListener | None,
        report: CheckReport,
        in_memory: pa.Table | None,
    ) -> Iterator[tuple[_Todo, RowsToCheck]]:
        """Yield pending rows of a half batch, and how to treat them. The report counts the half batches that are left
        alone.

        ==============================================  =======
        older than ``file_reserved_time``               EXPIRE
        checked ``transaction_check_max`` times         DISCARD
        too young, immune, or without a listener here   --
        all others                                      ASK
        ==============================================  =======
        """
        if state.is_settled:  # by another process, meanwhile
            return
        if state.in_conflict:
            report.problem(record.half_id, self._in_conflict(record.half_id))
        elif state.leased(self.clock()):
            report.skip(LEASED)
        elif state.checked_lately(self.clock(), self.rules.pause_s):
            report.skip(CHECKED)
        else:
            for attempt in state.attempts(RowState.PENDING):
                rows = state.rows_in((RowState.PENDING,), attempt)
                pending = self._to_check(record, state, attempt, rows, in_memory)
                for todo, chosen in self._rows_by_todo(pending, listener, report):
                    is_all = chosen.count == rows.count
                    yield todo, pending if is_all else self._to_check(record, state, attempt, chosen, in_memory)

    def _rows_by_todo(
        self, pending: RowsToCheck, listener: TransactionListener | None, report: CheckReport
    ) -> list[tuple[_Todo, RowSet]]:
        age_s = self._age_s(pending, report)
        expires = listener is not self._no_transaction and self._is_expired(age_s)
        if expires:
            rows = pending.rows
        else:
            rows = self._old_enough(pending, age_s, report)
            if listener is None and rows:
                group = pending.record.header.producer_group
                report.skip(NO_LISTENER)
                report.without_listener[group] = report.without_listener.get(group, 0) + 1
                return []
        # Without a listener here, discarding is left to the checkers that have it: they counted these checks.
        checks_max = self.rules.transaction_check_max
        to_discard = NO_ROWS if listener is None else pending.state.checked_at_least(rows, checks_max)
        todos = [(_Todo.DISCARD, to_discard), (_Todo.EXPIRE if expires else _Todo.ASK, rows - to_discard)]
        return [(todo, chosen) for todo, chosen in todos if chosen]

    def _to_check(
        self, record: HalfRecord, state: BatchState, attempt: int, rows: RowSet, in_memory: pa.Table | None
    ) -> RowsToCheck:
        return RowsToCheck(
            record, state, attempt, rows, self.engine.half_batch(record, state, attempt, rows, in_memory=in_memory)
        )

    def _is_expired(self, age_s: float) -> bool:
        """Whether this age exceeds ``file_reserved_time`` by more than the clock's doubt."""
        if age_s < self.rules.file_reserved_time:
            return False
        if self._doubt_s is None:
            self._doubt_s = 0.0 if self.rules.clock is not None else self.engine.clock_doubt_s()
        return age_s >= self.rules.file_reserved_time + self._doubt_s

    def _age_s(self, pending: RowsToCheck, report: CheckReport) -> float:
        prepared_at = pending.record.prepared_at
        ahead_s = (prepared_at - self.clock()).total_seconds()
        if ahead_s > CLOCK_SKEW_S_MAX:
            report.problem(
                pending.record.half_id,
                f"it says that it was prepared at {prepared_at}, which is {ahead_s:.0f} s in the future: the clock of "
                "this machine, or of one that wrote to the log, is wrong. It is checked all the same",
            )
        return (self.clock() - pending.batch.prepared_at).total_seconds()

    def _old_enough(self, pending: RowsToCheck, age_s: float, report: CheckReport) -> RowSet:
        messages = pending.batch.messages(COLUMNS)
        is_old = is_old_enough(messages, pending.record.header.transaction_per, age_s, self.rules.transaction_timeout)
        if is_old is True:
            return pending.rows
        rows = NO_ROWS if is_old is False else pending.rows.where(is_old)
        if rows.count < pending.rows.count:
            report.skip(IMMUNE if age_s >= self.rules.transaction_timeout or is_old is not False else YOUNG)
        return rows

    # ------------------------------------------------------------------ ask
    def _do(self, todo: _Todo, target: RowsToCheck, listener: TransactionListener | None, round_: OpenRound) -> None:
        """Ask about the target's rows, or settle them without an answer."""
        try:
            match todo:
                case _Todo.ASK:
                    self._ask(target, listener or self._no_transaction, round_)
                case _Todo.DISCARD:
                    self._discard(target, round_.report)
                case _Todo.EXPIRE:
                    self._expire(target, round_.report)
        except TOO_LATE as problem:
            _came_too_late(target.record, target.attempt, problem, round_.report)

    def _ask(self, target: RowsToCheck, listener: TransactionListener, round_: OpenRound) -> None:
        """Ask the listener, make its verdicts final, and count the check for rows that stay UNKNOWN."""
        record, batch = target.record, target.batch

        def call() -> VerdictArray:
            if listener is not self._no_transaction:
                require_same_store(record.half_id, record.header.fence_id, store_id_of(listener))
            return normalize_verdicts(call_for_verdicts(listener.check_local_transaction, batch), batch)

        asks_nobody = listener is self._no_transaction
        here = listener.requires_spark or not self._asker.in_threads
        (answer,) = self._asker.ask([target], lambda _: [call()], here or asks_nobody, round_.seconds_to_wait)
        if not isinstance(answer, CheckVerdicts):
            round_.report.problem(record.half_id, self._asker.why(target, answer))
            return
        # The next listener may hang in this very thread. And with tracing each half batch has its own span.
        at_once = (here and not asks_nobody) or tracing() is not None
        unknown = self._take(answer, listener, round_, at_once)
        if unknown is not None:
            self.engine.ledger.record_checks([unknown], self.rules.pause_s)
        round_.decisions.make_if_old()

    def _ask_many(self, to_ask: Sequence[RowsToCheck], listener: TransactionListener, round_: OpenRound) -> set[str]:
        """Ask about several half batches at once, make the verdicts final, and count the checks for rows that stay
        UNKNOWN. Returns the half batches about which the listener must be asked alone."""

        def call(new: Sequence[RowsToCheck]) -> list[VerdictArray | Exception]:
            store_id = store_id_of(listener)
            of_store = [target for target in new if target.record.header.fence_id == store_id]
            replies = listener.check_local_transactions([target.batch for target in of_store]) if of_store else []
            verdicts = {t.key: _normalized(reply, t.batch) for t, reply in zip(of_store, replies, strict=True)}
            return [verdicts.get(target.key, _OTHER_STORE_ERROR) for target in new]

        here = listener.requires_spark or not self._asker.in_threads
        answers = self._asker.ask(to_ask, call, here, round_.seconds_to_wait)
        alone: set[str] = set()
        unknown: list[UnknownCheck] = []
        for target, answer in zip(to_ask, answers, strict=True):
            if isinstance(answer, CheckVerdicts):
                check = self._take(answer, listener, round_, tracing() is not None)
                unknown += [check] if check is not None else []
            elif isinstance(answer, NoAnswer):
                round_.report.problem(target.record.half_id, str(answer))
            else:
                alone.add(target.record.half_id)
        round_.decisions.make()
        if unknown:
            self.engine.ledger.record_checks(unknown, self.rules.pause_s)
        return alone

    # ------------------------------------------------------------------ decide
    def _take(
        self, answer: CheckVerdicts, listener: TransactionListener, round_: OpenRound, at_once: bool
    ) -> UnknownCheck | None:
        """Add an answer's decision, and return the check to count for rows that stay UNKNOWN."""
        target = answer.checked
        split = split_by_verdict(self.engine, target.record, target.rows, target.batch, answer.verdicts)
        _tally(round_.report, target.batch, split, answer.verdicts)
        if split.decides:
            round_.decisions.add(split.decision(target.record, target.attempt, Who.CHECK), target.batch, at_once)
        if not split.unknown:
            return None
        return UnknownCheck(target.record, target.attempt, split.unknown, _unknown_reason(listener, target.batch))

    def _discard(self, target: RowsToCheck, report: CheckReport) -> None:
        """Let the discard policy decide on rows that were checked too often."""
        record, attempt, rows, batch = target.record, target.attempt, target.rows, target.batch
        limit = self.rules.transaction_check_max
        checks = "1 check was" if batch.check_times == 1 else f"{batch.check_times} checks were"
        reason = f"{checks} answered with UNKNOWN; transactionCheckMax is {limit}"
        try:
            answer = self.rules.discard_policy.resolve_discarded(batch, reason)
            verdict = UNKNOWN if answer is None else state_of(answer)
        except Exception as problem:
            report.problem(record.half_id, f"the discard policy did not answer: {sentence_of(problem)}")
            return
        if verdict is UNKNOWN:
            self._quarantine(target, reason, report, checks_min=limit)
            return
        commit, rollback = (rows, NO_ROWS) if verdict is COMMIT_MESSAGE else (NO_ROWS, rows)
        decision = Decision(record, attempt, commit, rollback, Who.DISCARD, reason, checks_min=limit)
        (decided,) = self.engine.decide([decision])
        decided.or_raise()
        report.discarded.add(batch.transactions.num_rows, rows.count)

    def _expire(self, target: RowsToCheck, report: CheckReport) -> None:
        """Quarantine rows older than fileReservedTime, whatever the policy: perhaps no listener was ever asked."""
        age_s = (self.clock() - target.batch.prepared_at).total_seconds()
        limit_h = self.rules.file_reserved_time / 3600
        reason = f"open for {age_s / 3600:.1f} h, which is not less than fileReservedTime ({limit_h:g} h)"
        self._quarantine(target, reason, report)

    def _quarantine(self, target: RowsToCheck, reason: str, report: CheckReport, checks_min: int = 0) -> None:
        record, attempt, rows, batch = target.record, target.attempt, target.rows, target.batch
        self.engine.ledger.quarantine(record, attempt, rows, Who.DISCARD, reason, checks_min)
        logger.info("%r is quarantined: %s", batch, reason, extra=of_batch(batch))
        report.quarantined.add(batch.transactions.num_rows, rows.count)

    # ------------------------------------------------------------------ the end of a round
    def _finish(self, report: CheckReport, stop: threading.Event) -> None:
        for group, count in report.without_listener.items():
            if group in self.rules.elsewhere:
                continue
            batches = "1 half batch stays" if count == 1 else f"{count} half batches stay"
            extra = {"producer_group": group}
            logger.warning("producer group %r has no listener here: %s pending", group, batches, extra=extra)
        mark = self.engine.ledger.mark
        steps: list[Callable[[CheckReport], object]] = [self._place_due, lambda _: mark(), self._count_pending]
        if not self.rules.only_groups:
            steps += [self._report_conflicts, partial(self._probe.look, stop)]
        for step in steps:
            try:
                step(report)
            except Exception as problem:  # the round must still report what it has done
                logger.warning("the end of a round of checks failed: %s", failure(problem))
                report.problem(None, f"the end of the round failed with {sentence_of(problem)}")

    def _place_due(self, report: CheckReport) -> None:
        report.placed = sum(p.count for p in self.engine.ledger.place_due())
        for half_id, problem in self.engine.ledger.unplaceable.items():
            report.problem(half_id, f"its messages are due, and cannot be placed: {sentence_of(problem)}")

    def _count_pending(self, report: CheckReport) -> None:
        still_open = self._open_half_ids()
        files = self.engine.ledger.unreadable
        report.pending = len(still_open) + len(files)
        for file in files:
            messages = "messages" if file.rows is None else count_of(file.rows, "message")
            sentence = f"half batches with {messages} cannot be checked, because their file cannot be read"
            report.problem(None, f"{sentence}: {sentence_of(file.problem)}")
        self._asker.forget_all_but(still_open)

    def _in_conflict(self, half_id: str) -> str:
        """Why a half batch waits for a person, and what to do."""
        command = f"txmq resolve {shlex.quote(redacted(self.engine.path))} {shlex.quote(half_id)} COMMIT --reason '…'"
        return (
            "two of its verdicts contradict each other, and it waits for a person: find out which is true, then settle "
            f"it with {command} (or the same with ROLLBACK), or with log.resolve"
        )

    def _report_conflicts(self, report: CheckReport) -> None:
        """Report every half batch that waits for a person, even with nothing pending."""
        reported = {half_id for half_id, _ in report.problems}
        for half_id in conflicts(self.engine):
            if half_id not in reported:
                report.problem(half_id, self._in_conflict(half_id))


def _normalized(answer: Verdicts | Exception, batch: HalfBatch) -> VerdictArray | Exception:
    """A listener's answer about one of several half batches. An invalid answer is an error of that half batch alone."""
    try:
        if isinstance(answer, Exception) and not isinstance(answer, Rollback):
            return answer
        return normalize_verdicts(answer, batch)
    except Exception as problem:
        return problem


def _not_decided(decision: Decision, problem: Exception, report: CheckReport) -> None:
    if isinstance(problem, TOO_LATE):
        _came_too_late(decision.record, decision.attempt, problem, report)
    else:
        _cannot_check(decision.record.half_id, problem, report)


def _came_too_late(record: HalfRecord, attempt: int, problem: Exception, report: CheckReport) -> None:
    logger.warning(
        "verdicts for half batch %r came too late: %s", record.half_id, problem,
        extra={**of_header(record.header), "attempt": attempt},
    )  # fmt: skip
    report.problem(record.half_id, str(problem))


def _cannot_check(half_id: str, problem: Exception, report: CheckReport) -> None:
    logger.warning("check of half batch %r failed: %s", half_id, failure(problem), extra={"half_id": half_id})
    report.problem(half_id, f"it cannot be checked: {sentence_of(problem)}")


def _unknown_reason(listener: TransactionListener, batch: HalfBatch) -> str:
    """Why a check changed nothing: the reason that is counted with it."""
    text = f"UNKNOWN from {type(listener).__name__}"
    reason = reason_for_log(batch.reason)
    return text if reason is None else f"{text}: {reason}"


_OTHER_STORE_ERROR = FenceError("it is of another store than the listener: asked alone, that is reported")


def _tally(
    report: CheckReport,
    batch: HalfBatch,
    split: Split,
    verdicts: VerdictArray,
) -> None:
    transactions = batch.transactions.num_rows
    report.checked.add(transactions, split.commit.count + split.rollback.count + split.unknown.count)
    counts = verdicts.counts(transactions)
    report.committed.add(counts[COMMIT_MESSAGE], split.commit.count)
    report.rolled_back.add(counts[ROLLBACK_MESSAGE], split.rollback.count)
    report.unknown.add(counts[UNKNOWN], split.unknown.count)
