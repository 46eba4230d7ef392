"""The check service: asks listeners what became of open transactions, and makes their answers final.

It speaks to a ``CommitLog`` and to listeners, and knows neither Spark nor Delta. Any number of checkers may run at
once: each decision is a compare-and-set, and the first one stands.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.check.immunity import COLUMNS, due_rows
from rmq_spark.check.policy import TransactionCheckListener, require_policy
from rmq_spark.check.report import IMMUNE, LEASED, LEFT_OVER, NO_LISTENER, YOUNG, CheckReport, Tally
from rmq_spark.commitlog.asked import split_by_verdict
from rmq_spark.commitlog.half_store import HalfRecord
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import BatchState, RowState, Who
from rmq_spark.commitlog.rows import NO_ROWS, RowSet
from rmq_spark.config import (
    CHECK_ROUND_TIMEOUT_S,
    CHECKS_MAX,
    CLOCK_SKEW_S_MAX,
    FILE_RESERVED_TIME_S,
    TRANSACTION_CHECK_INTERVAL_S,
    TRANSACTION_CHECK_MAX,
    TRANSACTION_TIMEOUT_S,
    seconds,
    whole_number,
)
from rmq_spark.errors import OptionError, StaleAttemptError, VerdictConflictError
from rmq_spark.listener import (
    NO_LISTENER_FENCE,
    CommitOncePrepared,
    TransactionListener,
    require_listener,
    require_same_fence,
)
from rmq_spark.machine import Machine
from rmq_spark.message import require_group_name
from rmq_spark.redaction import redacted, traceback_of
from rmq_spark.transaction import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    HalfBatch,
    LocalTransactionState,
    normalize_verdicts,
)

__all__ = ["CheckReport", "CheckService", "Tally"]

logger = logging.getLogger(__name__)

HUNG_CALLS_MAX = 8
"""So many calls of listeners may be under way beyond their round; with more, nothing is asked."""
STOP_POLL_S = 0.2


class CheckService:
    """Settles transactions that a crash, or a listener's UNKNOWN, left open.

    Mirrors RocketMQ's ``TransactionalMessageCheckService``, which asks producers; here the checker has their listeners.

    Parameters
    ----------
    log_or_path : CommitLog or str
    listeners : mapping of str to TransactionListener
        Who answers for which producer group.
    transaction_timeout : float
        Seconds from prepare (or reopen) during which a transaction is left alone. The message property
        ``CHECK_IMMUNITY_TIME_IN_SECONDS`` overrides it; the largest among a transaction's messages counts.
    transaction_check_interval : float
        Seconds between the rounds of :meth:`run`.
    transaction_check_max : int
        After so many answers of UNKNOWN the discard policy decides.
    file_reserved_time : float
        Seconds after which an open half batch is quarantined, asked or not.
    round_timeout : float or None
        Seconds for a round. When they are used up, no more half batches are taken; the next round begins with those
        that were not reached. A listener that has not answered by then is not waited for: the answer is used in a
        later round. None: no limit.
    discard_policy : {"quarantine", "rollback", "commit"} or TransactionCheckListener
    only_groups : bool
        Leave half batches of groups without a listener here alone, without a word (a producer's own checks).
    storage_options : mapping, optional
        For a path: passed to delta-rs.
    clock : callable, optional
        The time, with a time zone; for tests.

    Raises
    ------
    OptionError, ListenerError
        For a value that cannot be used.

    Notes
    -----
    Half batches of ``transactionListener=none`` need no listener: any check commits them.

    With a ``round_timeout``, listeners are called from threads of the service, one at a time unless one has not come
    back. Listeners that need Spark are called from the thread of the round, and waited for, because a Spark session
    belongs to a thread.
    """

    def __init__(
        self,
        log_or_path: CommitLog | str | os.PathLike[str],
        listeners: Mapping[str, TransactionListener],
        *,
        transaction_timeout: float = TRANSACTION_TIMEOUT_S,
        transaction_check_interval: float = TRANSACTION_CHECK_INTERVAL_S,
        transaction_check_max: int = TRANSACTION_CHECK_MAX,
        file_reserved_time: float = FILE_RESERVED_TIME_S,
        round_timeout: float | None = CHECK_ROUND_TIMEOUT_S,
        discard_policy: str | TransactionCheckListener = "quarantine",
        only_groups: bool = False,
        storage_options: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        if not isinstance(listeners, Mapping):
            raise OptionError(
                f"listeners is {type(listeners).__name__}: which group has which listener is expected, such as "
                "{'shop': listener}"
            )
        self.listeners = {
            require_group_name(group): require_listener(listener, f"listeners[{group!r}]")
            for group, listener in listeners.items()
        }
        self.transaction_timeout = seconds(transaction_timeout, "transaction_timeout")
        self.transaction_check_interval = seconds(transaction_check_interval, "transaction_check_interval", above=True)
        self.file_reserved_time = seconds(file_reserved_time, "file_reserved_time", above=True)
        self.round_timeout = None if round_timeout is None else seconds(round_timeout, "round_timeout", above=True)
        self.transaction_check_max = whole_number(transaction_check_max, "transaction_check_max", 1, CHECKS_MAX)
        self.discard_policy = require_policy(discard_policy)
        self.only_groups = only_groups
        self.log = log_or_path if isinstance(log_or_path, CommitLog) else CommitLog.open(log_or_path, storage_options)
        self._clock = clock or self.log.machine.now
        self._without_fence = CommitOncePrepared()
        self._not_reached: list[str] = []
        self._foreign: set[str] = set()  # open half batches of other groups (only_groups)
        self._calls: dict[tuple[str, int], _Call] = {}  # that have not come back

    # ------------------------------------------------------------------ rounds
    def run(self, stop_event: threading.Event, on_report: Callable[[CheckReport], None] | None = None) -> None:
        """Rounds until the event is set: the first at once, then one every ``transaction_check_interval``.

        A round that fails as a whole (the storage does not answer) is reported, and the next one tries again.

        Parameters
        ----------
        stop_event : threading.Event
        on_report : callable, optional
            Is given the report of each round.
        """
        while not stop_event.is_set():
            started_at = self._clock()
            try:
                report = self._round(stop_event)
            except Exception as problem:
                logger.error("a round of checks failed: %s", traceback_of(problem))
                report = CheckReport(started_at)
                report.problem(None, f"the round failed with {_sentence(problem)}")
            if on_report is not None:
                on_report(report)
            stop_event.wait(self.transaction_check_interval)

    def run_once(self) -> CheckReport:
        """One round: ask about what is due, make the answers final, move the low-water mark.

        Nothing that a single half batch or its listener does wrong ends the round; the report's ``problems`` say it.
        """
        return self._round(self.log.machine.event())

    def _round(self, stop: threading.Event) -> CheckReport:
        work = _Round(CheckReport(self._clock()), self.round_timeout, stop, self.log.machine)
        report = work.report
        waiting = self._open_half_ids()
        self._not_reached = []
        for at, half_id in enumerate(waiting):
            if stop.is_set() or (at > 0 and work.seconds_left() <= 0):
                self._not_reached = waiting[at:]
                report.skip(LEFT_OVER, len(self._not_reached))
                break
            try:
                self._check_half_batch(half_id, work)
            except Exception as problem:  # unreadable, corrupt: the others must not wait for it
                logger.warning("check of half batch %r failed: %s", half_id, traceback_of(problem))
                report.problem(half_id, f"it cannot be checked: {_sentence(problem)}")
        self._finish(report)
        report.seconds = work.seconds()
        return report

    def _finish(self, report: CheckReport) -> None:
        for group, count in report.without_listener.items():
            logger.warning("producer group %r has no listener here: %d half batches stay pending", group, count)
        steps: list[Callable[[], object]] = [
            lambda: self._place_due(report),
            self.log.move_mark,
            lambda: self._count_pending(report),
        ]
        if not self.only_groups:
            steps.append(lambda: self._report_conflicts(report))
        for step in steps:
            try:
                step()
            except Exception as problem:  # what the round has done must still be told
                logger.warning("the end of a round of checks failed: %s", traceback_of(problem))
                report.problem(None, f"the end of the round failed with {_sentence(problem)}")

    def _place_due(self, report: CheckReport) -> None:
        report.placed = sum(p.count for p in self.log.place_due())

    def _count_pending(self, report: CheckReport) -> None:
        still_open = self._open_half_ids()
        report.pending = len(still_open)
        self._calls = {k: c for k, c in self._calls.items() if k[0] in still_open or not c.done.is_set()}

    # ------------------------------------------------------------------ what is open
    def _open_half_ids(self) -> list[str]:
        """Half batches to look at: first those that the last round did not reach, then the oldest first."""
        ids = self.log.open_half_ids()
        self._foreign &= set(ids)
        ids = [i for i in ids if i not in self._foreign]
        first = [i for i in self._not_reached if i in set(ids)]
        return first + [i for i in ids if i not in set(first)]

    def _report_conflicts(self, report: CheckReport) -> None:
        """Name every half batch that waits for a person, also those with nothing pending."""
        reported = {half_id for half_id, _ in report.problems}
        for half_id in self.log.conflicts():
            if half_id not in reported:
                report.problem(half_id, _IN_CONFLICT)

    # ------------------------------------------------------------------ one half batch
    def _check_half_batch(self, half_id: str, work: _Round) -> None:
        record = self.log.get(half_id)
        listener = self._listener_of(record)
        if listener is None and self.only_groups:
            self._foreign.add(half_id)
            return
        state = self.log.state_of(record)
        if state.settled:  # by somebody else, meanwhile
            return
        if state.in_conflict:
            work.report.problem(half_id, _IN_CONFLICT)
            return
        if state.leased(self._clock()):
            work.report.skip(LEASED)
            return
        for attempt in state.attempts(RowState.PENDING):
            try:
                self._check_attempt(_Open(record, state, attempt), listener, work)
            except (VerdictConflictError, StaleAttemptError) as problem:  # somebody else was faster
                logger.warning("verdicts for half batch %r came too late: %s", half_id, problem)
                work.report.problem(half_id, str(problem))

    def _listener_of(self, record: HalfRecord) -> TransactionListener | None:
        if record.header.fence_id == NO_LISTENER_FENCE:
            return self._without_fence
        return self.listeners.get(record.header.producer_group)

    def _check_attempt(self, open_: _Open, listener: TransactionListener | None, work: _Round) -> None:
        """The pending transactions of one attempt: too young, checked too often, too old, or asked about."""
        pending = open_.pending()
        age_s = self._age_s(open_, pending, work.report)

        if age_s >= self.file_reserved_time and listener is not self._without_fence:
            checked_out = (
                NO_ROWS if listener is None else open_.state.checked_at_least(pending, self.transaction_check_max)
            )
            self._discard(open_, checked_out, work)
            self._quarantine_expired(open_, pending - checked_out, age_s, work.report)
            return

        due = self._due(open_, pending, age_s, work.report)
        if not due:
            return
        if listener is None:
            group = open_.record.header.producer_group
            work.report.skip(NO_LISTENER)
            work.report.without_listener[group] = work.report.without_listener.get(group, 0) + 1
            return
        checked_out = open_.state.checked_at_least(due, self.transaction_check_max)
        self._discard(open_, checked_out, work)
        self._ask(open_, due - checked_out, listener, work)

    def _age_s(self, open_: _Open, pending: RowSet, report: CheckReport) -> float:
        ahead_s = (open_.record.prepared_at - self._clock()).total_seconds()
        if ahead_s > CLOCK_SKEW_S_MAX:
            report.problem(
                open_.half_id,
                f"it says that it was prepared at {open_.record.prepared_at}, which is {ahead_s:.0f} s in the future: "
                "the clock of this machine, or of one that wrote to the log, is wrong. It is checked all the same",
            )
        return (self._clock() - self._half_batch(open_, pending).prepared_at).total_seconds()

    def _due(self, open_: _Open, pending: RowSet, age_s: float, report: CheckReport) -> RowSet:
        messages = self._half_batch(open_, pending).messages(COLUMNS)
        due = due_rows(messages, open_.record.header.transaction_per, age_s, self.transaction_timeout)
        if due is True:
            return pending
        chosen = NO_ROWS if due is False else pending.where(due)
        if chosen.count < pending.count:
            report.skip(IMMUNE if age_s >= self.transaction_timeout or due is not False else YOUNG)
        return chosen

    def _half_batch(self, open_: _Open, rows: RowSet) -> HalfBatch:
        return self.log.half_batch(open_.record, open_.state, open_.attempt, rows)

    # ------------------------------------------------------------------ asking
    def _ask(self, open_: _Open, rows: RowSet, listener: TransactionListener, work: _Round) -> None:
        """Ask the listener, make its verdicts final, and count the check for what stays UNKNOWN."""
        if not rows:
            return
        batch = self._half_batch(open_, rows)

        def ask() -> Any:
            if listener is not self._without_fence:
                require_same_fence(open_.half_id, open_.record.header.fence_id, listener.fence_id)
            return normalize_verdicts(listener.check_local_transaction(batch), batch)

        question = _Question(open_, rows, batch)
        call = self._answer(question, ask, listener.requires_spark, work)
        if call is None:
            return
        open_, rows, batch = call.question.open_, call.question.rows, call.question.batch
        split = split_by_verdict(self.log, open_.record, rows, batch, call.result)
        _tally(work.report, batch, split, call.result)
        commit, rollback, unknown = split[COMMIT_MESSAGE], split[ROLLBACK_MESSAGE], split[UNKNOWN]
        if unknown:
            self.log.record_check(open_.record, open_.attempt, unknown, f"UNKNOWN from {type(listener).__name__}")
        if commit or rollback:
            self.log.decide(open_.record, open_.attempt, commit=commit, rollback=rollback, who=Who.CHECK)

    def _answer(self, question: _Question, ask: Callable[[], Any], here: bool, work: _Round) -> _Call | None:
        """The call, when it came back with an answer; else the report has the reason.

        A call that does not come back within the round goes on, and a later round finds it here.
        """
        key = (question.open_.half_id, question.open_.attempt)
        call = self._calls.pop(key, None)
        if call is None:
            hung = sum(not c.done.is_set() for c in self._calls.values())
            if hung >= HUNG_CALLS_MAX:
                work.report.problem(
                    key[0], f"it was not asked about: {hung} calls of listeners have not come back; restart the checker"
                )
                return None
            call = _Call(question, ask, self.log.machine)
            if here or self.round_timeout is None:
                call.run()
            else:
                call.start()
                call.wait(work)
        if not call.done.is_set():
            self._calls[key] = call
            work.report.problem(
                key[0],
                f"its listener has not answered for {call.seconds():.1f} s; a later round uses its answer",
            )
            return None
        if call.problem is not None:
            logger.info("the listener of half batch %r did not answer: %s", key[0], traceback_of(call.problem))
            work.report.problem(key[0], f"its listener did not answer: {_sentence(call.problem)}")
            return None
        return call

    # ------------------------------------------------------------------ giving up
    def _discard(self, open_: _Open, rows: RowSet, work: _Round) -> None:
        """Leave what was checked too often to the discard policy."""
        if not rows:
            return
        batch = self._half_batch(open_, rows)
        limit = self.transaction_check_max
        reason = f"{batch.check_times} checks were answered with UNKNOWN; transactionCheckMax is {limit}"
        try:
            answer = self.discard_policy.resolve_discarded(batch, reason)
            verdict = UNKNOWN if answer is None else LocalTransactionState(answer)
        except Exception as problem:
            work.report.problem(open_.half_id, f"the discard policy did not answer: {_sentence(problem)}")
            return
        transactions, messages = batch.transactions.num_rows, rows.count
        if verdict is UNKNOWN:
            self.log.quarantine(open_.record, open_.attempt, rows, Who.DISCARD, reason, checks_min=limit)
            work.report.quarantined.add(transactions, messages)
            return
        commit, rollback = (rows, NO_ROWS) if verdict is COMMIT_MESSAGE else (NO_ROWS, rows)
        self.log.decide(
            open_.record, open_.attempt, commit=commit, rollback=rollback, who=Who.DISCARD, reason=reason,
            checks_min=limit,
        )  # fmt: skip
        work.report.discarded.add(transactions, messages)

    def _quarantine_expired(self, open_: _Open, rows: RowSet, age_s: float, report: CheckReport) -> None:
        """What is older than fileReservedTime is hidden whatever the policy: it may never have been asked about."""
        if not rows:
            return
        limit_h = self.file_reserved_time / 3600
        reason = f"open for {age_s / 3600:.1f} h, which is not less than fileReservedTime ({limit_h:g} h)"
        batch = self._half_batch(open_, rows)
        self.log.quarantine(open_.record, open_.attempt, rows, Who.DISCARD, reason)
        report.quarantined.add(batch.transactions.num_rows, rows.count)


_IN_CONFLICT = (
    "two of its verdicts contradict each other, and it waits for a person: find out which is true, then "
    "log.resolve(half_id, verdict, reason=…)"
)


@dataclass(frozen=True)
class _Open:
    """One attempt at a half batch that has pending rows."""

    record: HalfRecord
    state: BatchState
    attempt: int

    @property
    def half_id(self) -> str:
        return self.record.half_id

    def pending(self) -> RowSet:
        return self.state.rows_in((RowState.PENDING,), self.attempt)


@dataclass(frozen=True)
class _Question:
    """What a listener is asked about; kept with the call, whose answer may come rounds later."""

    open_: _Open
    rows: RowSet
    batch: HalfBatch


class _Call:
    """A call of a listener. It cannot be ended from outside, only left behind."""

    def __init__(self, question: _Question, ask: Callable[[], Any], machine: Machine) -> None:
        self.question = question
        self.done = machine.event()
        self.result: Any = None
        self.problem: BaseException | None = None
        self._ask = ask
        self._machine = machine
        self._started = machine.monotonic()

    def run(self) -> None:
        """In the caller's thread, which an exit or an interrupt of the user ends."""
        try:
            self.result = self._ask()
        except Exception as problem:
            self.problem = problem
        self.done.set()

    def start(self) -> None:
        """In a thread of its own, which has nobody else to tell."""

        def run() -> None:
            try:
                self.run()
            except BaseException as problem:
                self.problem = problem
                self.done.set()

        self._machine.start_thread(run, "txmq-check", daemon=True)

    def wait(self, work: _Round) -> None:
        while not self.done.wait(min(STOP_POLL_S, max(0.0, work.seconds_left()))):
            if work.stop.is_set() or work.seconds_left() <= 0:
                return

    def seconds(self) -> float:
        return self._machine.monotonic() - self._started


@dataclass
class _Round:
    """The report and the time limit of one round."""

    report: CheckReport
    timeout_s: float | None
    stop: threading.Event
    machine: Machine
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.machine.monotonic()

    def seconds(self) -> float:
        return self.machine.monotonic() - self._started

    def seconds_left(self) -> float:
        return float("inf") if self.timeout_s is None else self.timeout_s - self.seconds()


def _tally(
    report: CheckReport,
    batch: HalfBatch,
    split: Mapping[LocalTransactionState, RowSet],
    verdicts: pa.Array | LocalTransactionState,
) -> None:
    report.checked.add(batch.transactions.num_rows, sum(rows.count for rows in split.values()))
    tallies = {COMMIT_MESSAGE: report.committed, ROLLBACK_MESSAGE: report.rolled_back, UNKNOWN: report.unknown}
    for verdict, tally in tallies.items():
        if isinstance(verdicts, LocalTransactionState):
            transactions = batch.transactions.num_rows if verdicts is verdict else 0
        else:
            transactions = pc.sum(pc.equal(verdicts, verdict.value)).as_py() or 0
        tally.add(transactions, split[verdict].count)


def _sentence(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {redacted(problem)}" if str(problem) else type(problem).__name__
