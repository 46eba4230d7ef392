"""Runs a local transaction as one commit to a Delta table, fenced by Delta's idempotent writes.

Execute and check commit to the table under the *same* ``txnAppId`` and ``txnVersion``. Delta skips the second such
commit, or refuses it when both come at once. So the table's log never has both, and ``userMetadata`` tells which one it
has. See :class:`DeltaTransactionListener`. ::

    execute first    execute   work commits (executed)     looks: executed        COMMIT_MESSAGE
                     check                                 looks: executed        COMMIT_MESSAGE

    check first      check     empty commit (tombstone)    looks: tombstone       ROLLBACK_MESSAGE
                     execute                               work writes: skipped   looks: tombstone: FencedError

What a check answers, by the attempt's commit in the table's log:

===============  ===========================================  ==========================================================
``userMetadata`` committed by                                 a check answers
===============  ===========================================  ==========================================================
no such commit   nobody                                       UNKNOWN; after ``rollback_after`` it commits a tombstone
``executed``     work                                         COMMIT
``rolled_back``  execute, an empty commit: work rolled back   ROLLBACK, refused: it is final, with work's reason
``tombstone``    a check, an empty commit                     ROLLBACK: it never happened, and a replay runs it again
===============  ===========================================  ==========================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from rmq_spark._core.listeners.delta_fence import TXN_VERSION, app_id_of, fenced_session, state_in
from rmq_spark._core.listeners.fence_row import EXECUTED, ROLLED_BACK, TOMBSTONE
from rmq_spark._core.listeners.half_batch import HalfBatch, normalize_verdicts
from rmq_spark._core.listeners.transaction_listener import TransactionListener, Verdicts, require_work
from rmq_spark._core.runtime.runtime import RUNTIME, Runtime
from rmq_spark._core.vocabulary.options import Duration, named, seconds
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.times import utc
from rmq_spark._core.vocabulary.verdicts import (
    BATCH,
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    LocalTransactionState,
    Rollback,
    Verdict,
    call_for_verdicts,
)
from rmq_spark.errors import FencedError, FenceError, ListenerError, LocalTransactionError, VerdictError

if TYPE_CHECKING:
    from delta.tables import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

ROLLBACK_AFTER_S = 60.0
_SECOND_WRITE = "DELTA_INVALID_IDEMPOTENT_WRITES_OPTIONS"

# Commits that carry the session's txnAppId. Others (ALTER TABLE, RESTORE) carry userMetadata alone.
_FENCED_OPERATIONS = frozenset({"WRITE", "MERGE", "UPDATE", "DELETE"})
# Commits that Delta makes by itself after a write.
_HOUSEKEEPING = frozenset({"OPTIMIZE", "VACUUM START", "VACUUM END"})

# How many of the newest commits to read: first 100, then 1000, then the whole log.
_HISTORY_PAGES = (100, 1000, None)
# Commit times come from the store's clock, which may differ from ours by this much. Searches go that much further back.
_CLOCK_SKEW_S = 3600.0

Work: TypeAlias = Callable[["DataFrame", "DeltaTable"], Verdicts]


class DeltaTransactionListener(TransactionListener):
    """Runs ``work`` as exactly one commit to a Delta table. The half batch's messages commit only with it.

    It needs Spark: use it with ``foreachBatch(TransactionalSink(...))`` and the check job. A half batch must be one
    transaction (neither ``transactionKey`` nor ``transactionPer=message``), because a Delta commit is atomic.

    Parameters
    ----------
    table : str or DeltaTable
        A path (with a ``/``) or a table's name.
    work : callable
        ``work(batch_df, delta_table)`` gets the messages with the columns of ``half``, and the
        :class:`delta.tables.DeltaTable`. It makes **exactly one** commit to that table, by a write (append or
        overwrite), MERGE, UPDATE or DELETE, through ``batch_df``, ``delta_table`` or ``batch_df.sparkSession``. These
        belong to a private copy of ``spark``, with its temporary views. A commit through any other session is not
        fenced. ``work`` must not write to another Delta table, nor set ``txnAppId`` or ``userMetadata``. What it
        returns:

        - ``None``, ``COMMIT_MESSAGE``: its commit is in the table, so the messages commit
        - ``ROLLBACK_MESSAGE``: it made no commit; the messages are rolled back
        - ``raise txmq.Rollback(why)``: the same; the op marker and the table's history keep the reason
        - ``UNKNOWN``: refused (VerdictError): the table has the commit or has not
        - an exception: the half batch stays pending; a check looks for the commit

        ``None`` from ``work`` means COMMIT. ``None`` from a listener's own method means UNKNOWN.
    spark : SparkSession, optional
        The session; the active one when not given, and in another process, to which Spark Connect pickles the listener.
        Its settings are never changed.
    rollback_after : float, default 60.0
        Seconds from prepare (or reopen). Until then a check that finds no commit answers UNKNOWN. After that it writes
        a tombstone (an empty commit) and answers ROLLBACK.

    Notes
    -----
    The table itself is the fence. Each half batch keeps the table's id, so a check against another or a recreated table
    raises an error instead of giving a wrong answer.

    Delta keeps the transaction (``txn``) in its checkpoints, but ``userMetadata`` only in the log's JSON files, which
    clean-up removes (``delta.logRetentionDuration``, 30 days by default). A check that finds a transaction without its
    ``userMetadata`` raises FenceError. ``delta.setTransactionRetentionDuration`` makes Delta forget transactions: leave
    it unset, or set it longer than half batches are kept.

    When another writer's commit conflicts with that of ``work``, Delta raises its own error and writes nothing. The
    half batch stays pending, and a check or a replay settles it.
    """

    requires_spark = True
    runtime: Runtime = RUNTIME
    """The machine whose clock tells the age of half batches."""

    @named
    def __init__(
        self,
        table: str | DeltaTable,
        work: Work,
        *,
        spark: SparkSession | None = None,
        rollback_after: Duration = ROLLBACK_AFTER_S,
    ) -> None:
        require_work(work, "work(batch_df, delta_table)")
        self._table = table if isinstance(table, str) else _location(table)
        self._work = work
        self._spark = spark
        self.rollback_after_s = seconds(rollback_after, "rollback_after")

    def __repr__(self) -> str:
        return f"DeltaTransactionListener({redacted(self._table)!r}, work={getattr(self._work, '__qualname__', '?')})"

    def __getstate__(self) -> dict[str, Any]:
        # Spark Connect pickles a listener. The other process has a session of its own, which is active there.
        return {**self.__dict__, "_spark": None}

    @property
    def store_id(self) -> str:  # type: ignore[override]
        """The id that Delta gave the table when it was created.

        Raises
        ------
        FenceError
            When the Delta table does not exist.
        """
        return self._read_id(self._session())

    # ------------------------------------------------------------------ execute
    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Run ``work`` under the attempt's Delta transaction, then read which commit the table has.

        Returns
        -------
        LocalTransactionState or Rollback
            COMMIT_MESSAGE when ``work`` made the commit, and a rollback with its reason when ``work`` rolled back: in
            this run, or in an earlier one of the same attempt.

        Raises
        ------
        FencedError
            A check rolled this attempt back. Delta skipped what ``work`` wrote.
        FenceError
            The table does not exist, or is not the one that the half batch was prepared with.
        ListenerError
            ``work`` made no commit, or more than one, or one that is not fenced.
        """
        spark = self._session()
        self._require_fit(spark, batch)
        with fenced_session(spark, batch, EXECUTED) as session:
            table = self._open(session)
            try:
                result = call_for_verdicts(self._work, batch.to_spark(session), table)
            except Exception as problem:
                self._explain(problem, self._read_history(table, batch), batch)
                raise
            verdict = _verdict(result, batch)
            is_version_unused = session.conf.get(TXN_VERSION, None) is not None
        if verdict.state is ROLLBACK_MESSAGE:
            return self._record_rollback(spark, batch, is_version_unused, verdict.reason)
        return self._require_one_commit(self._read_history(self._open(spark), batch), batch, is_version_unused)

    def _explain(self, problem: Exception, history: _AttemptHistory, batch: HalfBatch) -> None:
        """Raise a clearer error when Delta refused what ``work`` wrote."""
        if history.state == TOMBSTONE:
            raise self._fenced_error(batch) from problem
        if _SECOND_WRITE in str(problem):
            first_write = (
                "is in the table, so a check will answer COMMIT" if history.state == EXECUTED else "is not in it"
            )
            raise ListenerError(
                f"work for {self._table!r} writes to Delta more than once, in half batch {batch.half_id!r}: "
                f"it must make exactly one commit, to this table, and set no txnAppId. Its second write was "
                f"refused; the first {first_write}"
            ) from problem

    def _record_rollback(
        self, spark: SparkSession, batch: HalfBatch, is_version_unused: bool, reason: str | None
    ) -> LocalTransactionState | Rollback:
        """Record in the table that ``work`` rolled back, so that a check answers the same."""
        if not is_version_unused:
            raise LocalTransactionError(
                f"work for {self._table!r} returned ROLLBACK_MESSAGE for half batch {batch.half_id!r}, but "
                "it has made a Delta commit, which stands: decide before the write"
            )
        history = self._commit_fence_alone(spark, batch, ROLLED_BACK, reason)
        if history.state == TOMBSTONE:
            raise self._fenced_error(batch)
        return self._verdict_of(history, batch)

    def _verdict_of(self, history: _AttemptHistory, batch: HalfBatch) -> LocalTransactionState | Rollback:
        if history.state is None:
            raise self._forgotten_error(batch)
        if history.state == EXECUTED:
            return COMMIT_MESSAGE
        if history.state == ROLLED_BACK:
            return Rollback(history.reason, refused=True)
        return Rollback("it never happened: a check found no commit of it, and made a tombstone")

    def _require_one_commit(
        self, history: _AttemptHistory, batch: HalfBatch, is_version_unused: bool
    ) -> LocalTransactionState | Rollback:
        if history.state == TOMBSTONE:
            raise self._fenced_error(batch)
        if history.state == ROLLED_BACK:
            return self._verdict_of(history, batch)
        if is_version_unused or history.state is None or history.unfenced:
            unfenced = f", and {', '.join(history.unfenced)}, which Delta does not fence" if history.unfenced else ""
            fenced = "one commit" if history.state == EXECUTED else "no commit that is fenced"
            raise ListenerError(
                f"work for {self._table!r} made {fenced}{unfenced}, in half batch {batch.half_id!r}: it must make "
                "exactly one commit to this table, by a write, MERGE, UPDATE or DELETE through batch_df, "
                "delta_table or batch_df.sparkSession, with no userMetadata of its own. (A DELETE or UPDATE "
                "that matches nothing makes no commit: return ROLLBACK_MESSAGE, or use MERGE)"
            )
        return self._verdict_of(history, batch)

    # ------------------------------------------------------------------ check
    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Return the verdict that the table's history shows. An old half batch without a commit gets a tombstone.

        Returns
        -------
        LocalTransactionState or Rollback
            COMMIT_MESSAGE: ``work`` committed. Rollback: ``work`` rolled back (refused, with its reason), or a check
            wrote a tombstone, so ``work`` can never commit. UNKNOWN: there is no commit, and the half batch is younger
            than ``rollback_after`` and not ``restarted``.

        Raises
        ------
        FenceError
            The table does not exist, is another one, or its log no longer tells who committed.
        """
        spark = self._session()
        self._require_fit(spark, batch)
        history = self._read_history(self._open(spark), batch)
        if history.state is None:
            young = self.runtime.now() - utc(batch.prepared_at) < timedelta(seconds=self.rollback_after_s)
            if young and not batch.restarted:
                wait = f"rollback_after ({self.rollback_after_s:g} s) is not over"
                batch.reason = f"the table has no commit of it yet, and {wait}"
                return UNKNOWN
            history = self._commit_fence_alone(spark, batch, TOMBSTONE)
        return self._verdict_of(history, batch)

    def _commit_fence_alone(
        self, spark: SparkSession, batch: HalfBatch, state: str, reason: str | None = None
    ) -> _AttemptHistory:
        """Make an empty commit with this state, and return the attempt's history after it.

        Delta skips the commit when the attempt already has one.
        """
        try:
            with fenced_session(spark, batch, state, reason) as session:
                # This MERGE matches nothing and reads no file. A table with an identity column refuses an empty append.
                self._open(session).merge(session.range(1).toDF("txmq"), "false").whenMatchedDelete().execute()
        except Exception:
            # If the other side committed in between (ConcurrentTransactionException), its commit is the answer.
            history = self._read_history(self._open(spark), batch)
            if history.state is None:
                raise
            return history
        return self._read_history(self._open(spark), batch, whole_log=True)

    def _read_history(self, table: DeltaTable, batch: HalfBatch, whole_log: bool = False) -> _AttemptHistory:
        """Return the attempt's commits in the table's history.

        It reads from the newest commit back to the time of prepare; with ``whole_log``, to the beginning of the log.
        """
        since = utc(batch.prepared_at).timestamp() - _CLOCK_SKEW_S
        own_commits: list[tuple[str, str | None, str]] = []
        for limit in _HISTORY_PAGES:
            commits = table.history() if limit is None else table.history(limit)
            rows = commits.selectExpr(
                "operation", "userMetadata AS said", "unix_millis(timestamp) / 1000 AS seconds"
            ).collect()
            states = ((state_in(row.said, batch), row.operation) for row in rows)
            own_commits = [(*state, operation) for state, operation in states if state is not None]
            seen_all = limit is None or len(rows) < limit
            if own_commits or seen_all or (not whole_log and rows[-1].seconds < since):
                break
        return self._summarize(own_commits, batch)

    def _summarize(self, own_commits: list[tuple[str, str | None, str]], batch: HalfBatch) -> _AttemptHistory:
        fenced = [(state, reason) for state, reason, operation in own_commits if operation in _FENCED_OPERATIONS]
        if len(fenced) > 1:
            raise FenceError(
                f"{self._table!r} has {len(fenced)} commits for one attempt of half batch {batch.half_id!r} "
                f"({', '.join(sorted(state for state, _ in fenced))}): its transactions were lost, by a restored log "
                "or by delta.setTransactionRetentionDuration. Look at the table, then settle it with log.resolve"
            )
        unfenced = {op for _, _, op in own_commits if op not in _FENCED_OPERATIONS and op not in _HOUSEKEEPING}
        state, reason = fenced[0] if fenced else (None, None)
        return _AttemptHistory(state, reason, tuple(sorted(unfenced)))

    # ------------------------------------------------------------------ the table
    def _session(self) -> SparkSession:
        if self._spark is not None:
            return self._spark
        try:
            from pyspark.sql import SparkSession
        except ImportError as problem:
            raise ListenerError(
                "DeltaTransactionListener needs Spark: install rmq_spark with its extra spark"
            ) from problem
        spark = SparkSession.getActiveSession()
        if spark is None:
            raise ListenerError(
                "DeltaTransactionListener finds no active Spark session here: pass spark=, and use it with "
                "foreachBatch(TransactionalSink(...)) or the check job"
            )
        return spark

    def _open(self, spark: SparkSession) -> DeltaTable:
        from delta.tables import DeltaTable

        is_path = "/" in self._table and "`" not in self._table
        return DeltaTable.forPath(spark, self._table) if is_path else DeltaTable.forName(spark, self._table)

    def _read_id(self, spark: SparkSession) -> str:
        from pyspark.errors import AnalysisException

        try:
            detail = self._open(spark).detail().select("id", "properties").collect()[0]
        except AnalysisException as problem:
            raise FenceError(
                f"{self._table!r} is not a Delta table that this session can read: make it before the sink starts"
            ) from problem
        if "delta.setTransactionRetentionDuration" in (detail.properties or {}):
            logger.warning(
                "%s sets delta.setTransactionRetentionDuration=%s: a half batch that stays pending for longer is not "
                "fenced any more",
                self._table,
                detail.properties["delta.setTransactionRetentionDuration"],
            )
        return str(detail.id)

    def _require_fit(self, spark: SparkSession, batch: HalfBatch) -> None:
        if batch.transaction_per != BATCH:
            raise ListenerError(
                f"half batch {batch.half_id!r} has a transaction per {batch.transaction_per}, but one Delta "
                "commit is one transaction: leave transactionKey and transactionPer out for a "
                "DeltaTransactionListener"
            )
        if batch.fence_id is None:
            raise FenceError(
                f"half batch {batch.half_id!r} was prepared without a fence, so {self._table!r} cannot speak "
                "for it: use the listener that it was prepared with, or settle it with log.resolve"
            )
        table_id = self._read_id(spark)
        if batch.fence_id != table_id:
            raise FenceError(
                f"half batch {batch.half_id!r} was prepared with table id {batch.fence_id}, but "
                f"{self._table!r} has the id {table_id}: another table, or it was made anew. Point the listener "
                "to the right one"
            )

    def _fenced_error(self, batch: HalfBatch) -> FencedError:
        return FencedError(
            f"attempt {batch.attempt} of half batch {batch.half_id!r} came too late: a check has put a "
            f"tombstone into {self._table!r}, so Delta skipped what work wrote. The check's verdict stands, "
            "and the next attempt runs it"
        )

    def _forgotten_error(self, batch: HalfBatch) -> FenceError:
        return FenceError(
            f"{self._table!r} has a transaction {app_id_of(batch)!r}, but its log no longer says whose commit "
            "it was (clean-up after delta.logRetentionDuration, or work set userMetadata itself). Look at "
            f"the table, then settle half batch {batch.half_id!r} with log.resolve"
        )


@dataclass(frozen=True)
class _AttemptHistory:
    """One attempt in a table's history: the state in its fenced commit, why ``work`` rolled back, and its unfenced
    operations."""

    state: str | None
    reason: str | None
    unfenced: tuple[str, ...]


def _verdict(result: object, batch: HalfBatch) -> Verdict:
    (verdict,) = normalize_verdicts(COMMIT_MESSAGE if result is None else result, batch).each(1)
    if verdict.state is UNKNOWN:
        raise VerdictError(
            f"work returned UNKNOWN for half batch {batch.half_id!r}: its commit is in the table or it is "
            "not. Return None or COMMIT_MESSAGE after the commit, ROLLBACK_MESSAGE without one, or raise an "
            "exception"
        )
    return verdict


def _location(table: Any) -> str:
    detail = table.detail().select("name", "location").collect()[0]
    return str(detail.name or detail.location)
