"""A decision: verdicts on rows of a half batch, which verdicts still count, and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from rmq_spark._core.log.batch_state import COMMITTED_STATES, ROLLED_BACK_STATES, BatchState, RowState
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.op import OpKind, OpRow, Who
from rmq_spark._core.vocabulary.immutable import immutable
from rmq_spark._core.vocabulary.remedy import decide_by_hand
from rmq_spark._core.vocabulary.rows import Ranges, RowSet
from rmq_spark._core.vocabulary.text import message_count
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, ROLLBACK_MESSAGE, LocalTransactionState
from rmq_spark.errors import HalfBatchLeftError, StaleAttemptError, VerdictConflictError


@immutable
class Placed:
    """Messages of one queue that a decision made visible."""

    topic: str
    queue_id: int
    queue_offset: int
    count: int
    half_id: str = field(default="", compare=False)


@immutable
class RolledBack:
    """Rows that are rolled back for one reason. ``refused`` says that the local transaction ran and refused the rows,
    so the rollback is final. A rollback by ``execute`` always is."""

    reason: str | None
    refused: bool
    ranges: Mapping[int, Ranges]


@immutable
class Decision:
    """Verdicts on rows of one half batch under one attempt. Each row must have ``checks_min`` answered checks: a row
    with fewer was reopened after the check, and is checked again. ``rolled_back`` has the rows of ``rollback`` by
    reason; if it is empty, all these rows have the decision's reason."""

    record: HalfRecord
    attempt: int
    commit: RowSet
    rollback: RowSet
    who: Who
    reason: str | None = None
    checks_min: int = 0
    rolled_back: Sequence[RolledBack] = ()


@immutable
class Decided:
    """The result of a decision: the messages that it made visible, or why it does not count."""

    placed: Sequence[Placed] = ()
    problem: DecisionError | None = None

    def or_raise(self) -> Sequence[Placed]:
        """Return the messages that the decision made visible, or raise its problem."""
        if self.problem is not None:
            raise self.problem
        return self.placed


@immutable
class UnknownCheck:
    """A check that was answered with UNKNOWN for rows of a half batch. The rows are under one attempt."""

    record: HalfRecord
    attempt: int
    rows: RowSet
    reason: str | None


DecisionError = VerdictConflictError | StaleAttemptError
"""Why a decision does not count."""
TOO_LATE = (VerdictConflictError, StaleAttemptError)
"""The same classes, for ``except``: another writer was faster."""


def states_of(verdict: LocalTransactionState) -> tuple[RowState, ...]:
    return COMMITTED_STATES if verdict is COMMIT_MESSAGE else ROLLED_BACK_STATES


def against(state: BatchState, decision: Decision, verdict: LocalTransactionState) -> RowSet:
    """The rows to which a decision gives this verdict although the opposite one is final."""
    rows, opposite = (
        (decision.commit, ROLLED_BACK_STATES) if verdict is COMMIT_MESSAGE else (decision.rollback, COMMITTED_STATES)
    )
    return rows and rows & state.rows_in(opposite, decision.attempt)


def rows_to_decide(decision: Decision, state: BatchState) -> tuple[RowSet, RowSet]:
    """The rows that a decision still has to commit and to roll back. Raises a DecisionError when it does not count."""
    attempt = decision.attempt
    for verdict in (COMMIT_MESSAGE, ROLLBACK_MESSAGE):
        if opposed := against(state, decision, verdict):
            raise _too_late_error(state, opposed, attempt, verdict)
    commit = _undecided(state, decision.commit, attempt, COMMIT_MESSAGE)
    rollback = _undecided(state, decision.rollback, attempt, ROLLBACK_MESSAGE)
    for undecided in (commit, rollback):
        if decision.checks_min and state.checked_at_least(undecided, decision.checks_min) != undecided:
            raise StaleAttemptError(
                f"attempt {attempt} of half batch {state.half_id!r} was reopened since it was checked "
                f"{decision.checks_min} times: it is asked about again"
            )
    return commit, rollback


def _too_late_error(
    state: BatchState, opposed: RowSet, attempt: int, verdict: LocalTransactionState
) -> VerdictConflictError:
    kind = OpKind.ROLLBACK if verdict is COMMIT_MESSAGE else OpKind.COMMIT
    final_row = next((row for row in state.history if row.kind is kind and (row.attempt or 1) == attempt), OpRow(kind))
    return VerdictConflictError(
        f"{verdict} for {message_count(opposed.count)} of half batch {state.half_id!r}, attempt {attempt}, comes too "
        f"late, since {final_row.kind} by {final_row.decided_by} at {final_row.op_time} is final",
        verdict=str(verdict),
        remedy=decide_by_hand(state.half_id, "find out which is true, then "),
    )


def problem_after_leaving(decision: Decision, left: HalfBatchLeftError) -> DecisionError | None:
    """Why a decision on a half batch that has left does not count; None if the decision repeats the known outcome."""
    archived = left.archived
    if archived is None:
        return StaleAttemptError(str(left))
    if decision.attempt != archived.attempt:
        return StaleAttemptError(f"a verdict under attempt {decision.attempt} comes too late: {left}")
    if archived.agrees(decision.commit.count, decision.rollback.count):
        if archived.committed and archived.not_committed:  # the archive does not say which messages had which verdict
            return StaleAttemptError(f"nobody can tell any more whether these verdicts are those that count: {left}")
        return None
    verdict = COMMIT_MESSAGE if decision.commit.count > archived.committed else ROLLBACK_MESSAGE
    return VerdictConflictError(f"{verdict} comes too late: {left}", verdict=str(verdict))


def _undecided(state: BatchState, rows: RowSet, attempt: int, verdict: LocalTransactionState) -> RowSet:
    """The rows that still wait for this verdict. Raises StaleAttemptError when a row can no longer get it."""
    waiting = rows and rows & state.rows_in((RowState.PENDING,), attempt)
    if waiting.count == rows.count:
        return waiting
    decided = rows & state.rows_in(states_of(verdict), attempt)
    rest = rows.count - waiting.count - decided.count
    if rest:
        raise StaleAttemptError(
            f"{verdict} under attempt {attempt} for {message_count(rest)} of half batch {state.half_id!r} does not "
            f"count: {'it was' if rest == 1 else 'they were'} reopened under another attempt, or quarantined"
        )
    return waiting
