"""Runs the function ``work`` of a listener in a database transaction, once for a half batch or once for each of its
transactions, and reads its verdicts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pyarrow.compute as pc
import sqlalchemy as sa

from rmq_spark._core.database.guard import begin_savepoint, end_savepoint, no_commit_within
from rmq_spark._core.listeners.fence import Fence
from rmq_spark._core.listeners.fence_row import NOTHING, STARTED, Recorded, State
from rmq_spark._core.listeners.fence_verdicts import COMMIT_VERDICT, UNKNOWN_VERDICT, recorded_as, verdicts_of
from rmq_spark._core.listeners.half_batch import HalfBatch, normalize_verdicts
from rmq_spark._core.listeners.half_transaction import HalfTransaction, transactions_of
from rmq_spark._core.listeners.transaction_listener import Verdicts
from rmq_spark._core.vocabulary.verdicts import (
    COMMIT_MESSAGE,
    UNKNOWN,
    LocalTransactionState,
    Rollback,
    Verdict,
    VerdictArray,
    call_for_verdicts,
    verdict_of,
)
from rmq_spark.errors import LocalTransactionError, VerdictError

logger = logging.getLogger(__name__)

BatchWork: TypeAlias = Callable[[sa.Connection, HalfBatch], Verdicts]
TransactionWork: TypeAlias = Callable[[sa.Connection, HalfTransaction], LocalTransactionState | Rollback | str | None]


class FencedWork:
    """The function ``work`` of a listener, which runs in the database transaction that has claimed an attempt's fence
    row. Its verdicts are recorded there."""

    def __init__(self, fence: Fence, function: Callable[[sa.Connection, Any], Any], per_transaction: bool) -> None:
        self._fence = fence
        self.function = function
        self._per_transaction = per_transaction

    def run_all_anew(self, connection: sa.Connection, batch: HalfBatch) -> VerdictArray:
        """Run ``work`` for a half batch that had no fence row, and record its verdicts."""
        verdicts = self._run(connection, batch)
        states = [recorded_as(verdict) for verdict in verdicts.distinct]
        if verdicts.which is None:
            outcome = Recorded.of(states[0], batch.rows, batch.is_all)
        else:
            outcome = NOTHING.with_rows(batch.rows, states, batch.by_row(verdicts.which))
        self._fence.write(connection, batch, outcome)
        return verdicts

    def run_rest(self, connection: sa.Connection, batch: HalfBatch, recorded: Recorded) -> VerdictArray:
        """Run ``work`` for the transactions that have no state, and return a verdict for each transaction."""
        earlier = verdicts_of(batch, recorded)
        count = batch.transactions.num_rows
        before = earlier.each(count)
        fresh = [verdict is UNKNOWN_VERDICT for verdict in before]
        if not any(fresh):
            logger.info("%r ran before: what it recorded is answered, its work does not run again", batch)
            return earlier
        self._fence.require_not_too_late(batch)
        if not self._per_transaction and not all(fresh):
            raise LocalTransactionError(
                f"{count - sum(fresh)} of the {count} transactions of half batch {batch.half_id!r}, attempt "
                f"{batch.attempt}, ran before, and work handles a half batch as a whole: nothing was done; let a check "
                "settle those first"
            )
        absent = batch.rows.where(pc.is_null(recorded.among(batch.rows)))
        self._fence.write(connection, batch, recorded.with_rows(absent, [State(STARTED)]))
        ran = self._run(connection, batch, fresh)
        verdicts = [new if is_fresh else old for new, old, is_fresh in zip(ran.each(count), before, fresh, strict=True)]
        result = VerdictArray.of(verdicts)
        assert result.which is not None
        which = batch.by_row(result.which).filter(pc.is_null(recorded.among(batch.rows)))
        states = [recorded_as(verdict) for verdict in result.distinct]
        self._fence.write(connection, batch, recorded.with_rows(absent, states, which))
        return result

    def _run(self, connection: sa.Connection, batch: HalfBatch, fresh: Sequence[bool] | None = None) -> VerdictArray:
        """Run ``work``, and return a verdict for each transaction. ``fresh`` tells which of them run; None: all."""
        with no_commit_within(connection):
            return (
                self._run_each(connection, batch, fresh) if self._per_transaction else self._run_all(connection, batch)
            )

    def _run_all(self, connection: sa.Connection, batch: HalfBatch) -> VerdictArray:
        begin_savepoint(connection)
        result = call_for_verdicts(self.function, connection, batch)
        verdicts = normalize_verdicts(COMMIT_MESSAGE if result is None else result, batch)
        _refuse_unknown(verdicts, batch)
        is_one_verdict = result is None or isinstance(result, (str, Rollback))
        end_savepoint(connection, keep=not is_one_verdict or verdicts.distinct[0].state is COMMIT_MESSAGE)
        return verdicts

    def _run_each(self, connection: sa.Connection, batch: HalfBatch, fresh: Sequence[bool] | None) -> VerdictArray:
        verdicts = [COMMIT_VERDICT] * batch.transactions.num_rows
        for position, transaction in enumerate(transactions_of(batch)):
            if fresh is not None and not fresh[position]:
                continue
            begin_savepoint(connection)
            answer = call_for_verdicts(self.function, connection, transaction)
            verdicts[position] = _transaction_verdict(answer, transaction)
            end_savepoint(connection, keep=verdicts[position].state is COMMIT_MESSAGE)
        return VerdictArray.of(verdicts)


def _transaction_verdict(result: object, transaction: HalfTransaction) -> Verdict:
    if result is None:
        return COMMIT_VERDICT
    if isinstance(result, (str, Rollback)):
        verdict = verdict_of(result)
        if verdict.state is not UNKNOWN:
            return verdict
    raise VerdictError(
        f"work returned {result!r} for transaction {transaction.transaction_id!r}: COMMIT_MESSAGE, "
        "ROLLBACK_MESSAGE, a Rollback or None (which is COMMIT) is expected. Its database transaction commits or it "
        "does not; raise an exception to leave it pending"
    )


def _refuse_unknown(verdicts: VerdictArray, batch: HalfBatch) -> None:
    if UNKNOWN_VERDICT not in verdicts.distinct:
        return
    count = batch.transactions.num_rows
    unknown = verdicts.counts(count)[UNKNOWN]
    if unknown:
        raise VerdictError(
            f"work returned UNKNOWN for {unknown} of {count} transactions of half batch "
            f"{batch.half_id!r}: its database transaction commits or it does not. Return COMMIT_MESSAGE or "
            "ROLLBACK_MESSAGE, or raise an exception to leave the half batch pending"
        )
