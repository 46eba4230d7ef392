"""Runs a local transaction on a Delta table: one commit of the user's own, fenced by Delta's idempotent writes.

Execute and check commit to the table under the *same* ``txnAppId`` and ``txnVersion``. Delta skips the second such
commit, or refuses it when both come at once. So the table's log never has both, and ``userMetadata`` says whose commit
it has. See :class:`DeltaTransactionListener`. ::

    execute first    execute   work commits (executed)     looks: executed        COMMIT_MESSAGE
                     check                                 looks: executed        COMMIT_MESSAGE

    check first      check     empty commit (tombstone)    looks: tombstone       ROLLBACK_MESSAGE
                     execute                               work writes: skipped   looks: tombstone: FencedError

What a check makes of the attempt's commit in the table's log:

===============  ===========================================  ==========================================================
``userMetadata`` committed by                                 a check answers
===============  ===========================================  ==========================================================
no such commit   nobody                                       UNKNOWN; after ``rollback_after`` it commits a tombstone
``executed``     work                                         COMMIT
``rolled_back``  execute, an empty commit: work rolled back   ROLLBACK, refused: it is final, with the reason of work
``tombstone``    a check, an empty commit                     ROLLBACK: it never happened, and a replay runs it again
===============  ===========================================  ==========================================================
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from rmq_spark._core.listeners.half_batch import HalfBatch, normalize_verdicts
from rmq_spark._core.listeners.listener import TransactionListener, Verdicts, require_work
from rmq_spark._core.runtime.machine import MACHINE, Machine
from rmq_spark._core.vocabulary.options import named, seconds
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.verdicts import (
    BATCH,
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    LocalTransactionState,
    Rollback,
    Verdict,
    returned,
)
from rmq_spark.errors import FencedError, FenceError, ListenerError, LocalTransactionError, VerdictError

if TYPE_CHECKING:
    from delta.tables import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

ROLLBACK_AFTER_S = 60.0

EXECUTED = "executed"
ROLLED_BACK = "rolled_back"
TOMBSTONE = "tombstone"
_STATES = (EXECUTED, ROLLED_BACK, TOMBSTONE)

_APP_ID = "spark.databricks.delta.write.txnAppId"
_VERSION = "spark.databricks.delta.write.txnVersion"
# Delta takes the version out of the session when a write uses it. A second write finds half of the setting and fails.
_AUTO_RESET = "spark.databricks.delta.write.txnVersion.autoReset.enabled"
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_SECOND_WRITE = "DELTA_INVALID_IDEMPOTENT_WRITES_OPTIONS"

# Commits that carry the session's txnAppId. Others (ALTER TABLE, RESTORE) carry userMetadata alone.
_FENCED_OPERATIONS = frozenset({"WRITE", "MERGE", "UPDATE", "DELETE"})
# Commits that Delta makes by itself after a write.
_HOUSEKEEPING = frozenset({"OPTIMIZE", "VACUUM START", "VACUUM END"})

# How many of the newest commits to read: first 100, then 1000, then the whole log.
_HISTORY_PAGES = (100, 1000, None)
# A table's times come from its store's clock. Ours may differ by this much: looks go back so much further.
_CLOCK_SKEW_S = 3600.0

Work: TypeAlias = Callable[["DataFrame", "DeltaTable"], Verdicts]


class DeltaTransactionListener(TransactionListener):
    """Runs ``work`` as exactly one commit to a Delta table, which the half batch's messages must agree with.

    It needs Spark: use it with ``foreachBatch(TransactionalSink(...))`` and the check job. A half batch must be one
    transaction (neither ``transactionKey`` nor ``transactionPer=message``), because a Delta commit happens as a whole.

    Parameters
    ----------
    table : str or DeltaTable
        A path (with a ``/``) or a table's name.
    work : callable
        ``work(batch_df, delta_table)`` gets the messages with the columns of ``half``, and the
        :class:`delta.tables.DeltaTable`. It makes **exactly one** commit to that table, by a write (append or
        overwrite), MERGE, UPDATE or DELETE, through ``batch_df``, ``delta_table`` or ``batch_df.sparkSession``. These
        belong to a session of their own, a copy of ``spark`` with its temporary views. A commit through any other
        session is not fenced. ``work`` writes to no other Delta table and sets no ``txnAppId`` and no
        ``userMetadata``. What it returns:

        ============================== ======================================================================
        returned or raised             meaning
        ============================== ======================================================================
        ``None``, ``COMMIT_MESSAGE``   its commit is in the table, so the messages commit
        ``ROLLBACK_MESSAGE``           it made no commit; the messages are rolled back
        ``raise txmq.Rollback(why)``   the same; the op marker and the table's history keep why
        ``UNKNOWN``                    refused (VerdictError): the commit is in the table or it is not
        an exception                   the half batch stays pending; a check looks for the commit
        ============================== ======================================================================

        ``None`` means COMMIT here, while a listener's own ``None`` means UNKNOWN.
    spark : SparkSession, optional
        The session; the active one when not given. Its settings are never changed.
    rollback_after : float, default 60.0
        Seconds from prepare (or reopen). A check that finds no commit answers UNKNOWN while the half batch is younger.
        Later it writes a tombstone (an empty commit) and answers ROLLBACK.

    Notes
    -----
    The fence is the table itself. Each half batch keeps the table's id. So a check against another table, or one that
    was made anew, is an error instead of a wrong answer.

    Delta keeps the transaction (``txn``) in its checkpoints, and who wrote it only in the log's JSON files, which
    clean-up removes (``delta.logRetentionDuration``, 30 days by default). A check that finds the first without the
    second raises FenceError, because nobody can say who wrote it. ``delta.setTransactionRetentionDuration`` makes Delta
    forget transactions: leave it unset, or set it longer than half batches are kept.

    When another writer's commit conflicts with that of ``work``, Delta raises an error of its own and writes nothing.
    The half batch stays pending, and a check or a replay settles it.
    """

    requires_spark = True
    machine: Machine = MACHINE
    """The machine whose clock tells the age of half batches."""

    @named
    def __init__(
        self,
        table: str | DeltaTable,
        work: Work,
        *,
        spark: SparkSession | None = None,
        rollback_after: float = ROLLBACK_AFTER_S,
    ) -> None:
        require_work(work, "work(batch_df, delta_table)")
        self._table = table if isinstance(table, str) else _location(table)
        self._work = work
        self._spark = spark
        self.rollback_after_s = seconds(rollback_after, "rollback_after")

    def __repr__(self) -> str:
        return f"DeltaTransactionListener({redacted(self._table)!r}, work={getattr(self._work, '__qualname__', '?')})"

    @property
    def store_id(self) -> str:  # type: ignore[override]
        """The table's id, which Delta gave it when it was made.

        Raises
        ------
        FenceError
            When there is no such Delta table.
        """
        return self._read_id(self._session())

    # ------------------------------------------------------------------ execute
    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Run ``work`` under the attempt's Delta transaction, then look whose commit the table has.

        Returns
        -------
        LocalTransactionState or Rollback
            COMMIT_MESSAGE when ``work`` made the commit, in this run or in an earlier one of the same attempt.
            A rollback, with its reason, when ``work`` returned that, in this run or in an earlier one.

        Raises
        ------
        FencedError
            A check rolled this attempt back. Delta skipped what ``work`` wrote.
        FenceError
            There is no such table, or another one than when the half batch was prepared.
        ListenerError
            ``work`` made no commit, or more than one, or one that is not fenced.
        """
        spark = self._session()
        self._require_fit(spark, batch)
        with _fenced_session(spark, batch, EXECUTED) as own:
            table = self._open(own)
            try:
                result = returned(self._work, batch.to_spark(own), table)
            except Exception as problem:
                self._explain(problem, self._look(table, batch), batch)
                raise
            verdict = _verdict(result, batch)
            unused = own.conf.get(_VERSION, None) is not None
        if verdict.state is ROLLBACK_MESSAGE:
            return self._refuse(spark, batch, unused, verdict.reason)
        return self._require_one_commit(self._look(self._open(spark), batch), batch, unused)

    def _explain(self, problem: Exception, found: _Found, batch: HalfBatch) -> None:
        """Raise a clearer error when Delta refused what ``work`` wrote; else return."""
        if found.state == TOMBSTONE:
            raise self._fenced(batch) from problem
        if _SECOND_WRITE in str(problem):
            first = "is in the table, so a check will answer COMMIT" if found.state == EXECUTED else "is not in it"
            raise ListenerError(
                f"work for {self._table!r} writes to Delta more than once, in half batch {batch.half_id!r}: "
                f"it must make exactly one commit, to this table, and set no txnAppId. Its second write was "
                f"refused; the first {first}"
            ) from problem

    def _refuse(
        self, spark: SparkSession, batch: HalfBatch, unused: bool, reason: str | None
    ) -> LocalTransactionState | Rollback:
        """Record in the table that ``work`` rolled back, so that a check answers the same."""
        if not unused:
            raise LocalTransactionError(
                f"work for {self._table!r} returned ROLLBACK_MESSAGE for half batch {batch.half_id!r}, but "
                "it has made a Delta commit, which stands: decide before the write"
            )
        found = self._commit_fence_alone(spark, batch, ROLLED_BACK, reason)
        if found.state == TOMBSTONE:
            raise self._fenced(batch)
        return self._verdict_of(found, batch)

    def _verdict_of(self, found: _Found, batch: HalfBatch) -> LocalTransactionState | Rollback:
        if found.state is None:
            raise self._forgotten(batch)
        if found.state == EXECUTED:
            return COMMIT_MESSAGE
        if found.state == ROLLED_BACK:
            return Rollback(found.reason, refused=True)
        return Rollback("it never happened: a check found no commit of it, and made a tombstone")

    def _require_one_commit(self, found: _Found, batch: HalfBatch, unused: bool) -> LocalTransactionState | Rollback:
        if found.state == TOMBSTONE:
            raise self._fenced(batch)
        if found.state == ROLLED_BACK:
            return self._verdict_of(found, batch)
        if unused or found.state is None or found.unfenced:
            also = f", and {', '.join(found.unfenced)}, which Delta does not fence" if found.unfenced else ""
            made = "one commit" if found.state == EXECUTED else "no commit that is fenced"
            raise ListenerError(
                f"work for {self._table!r} made {made}{also}, in half batch {batch.half_id!r}: it must make "
                "exactly one commit to this table, by a write, MERGE, UPDATE or DELETE through batch_df, "
                "delta_table or batch_df.sparkSession, with no userMetadata of its own. (A DELETE or UPDATE "
                "that matches nothing makes no commit: return ROLLBACK_MESSAGE, or use MERGE)"
            )
        return self._verdict_of(found, batch)

    # ------------------------------------------------------------------ check
    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Return a verdict by the commit that the table has. An old half batch without one gets a tombstone.

        Returns
        -------
        LocalTransactionState or Rollback
            COMMIT_MESSAGE (``work`` committed), a rollback (``work`` rolled back: refused, with its reason; or a
            check has committed a tombstone, and ``work`` never will commit), or UNKNOWN (no commit, and younger than
            ``rollback_after``).

        Raises
        ------
        FenceError
            There is no such table, another one, or one whose log no longer tells whose commit it was.
        """
        spark = self._session()
        self._require_fit(spark, batch)
        found = self._look(self._open(spark), batch)
        if found.state is None:
            young = self.machine.now() - _utc(batch.prepared_at) < timedelta(seconds=self.rollback_after_s)
            if young and not batch.restarted:
                wait = f"rollback_after ({self.rollback_after_s:g} s) is not over"
                batch.reason = f"the table has no commit of it yet, and {wait}"
                return UNKNOWN
            found = self._commit_fence_alone(spark, batch, TOMBSTONE)
        return self._verdict_of(found, batch)

    def _commit_fence_alone(
        self, spark: SparkSession, batch: HalfBatch, state: str, reason: str | None = None
    ) -> _Found:
        """Make an empty commit with this state, and return whose commit the table has then.

        Delta skips the commit when the attempt has one already.
        """
        try:
            with _fenced_session(spark, batch, state, reason) as own:
                # This MERGE matches nothing and reads no file. A table with an identity column refuses an empty append.
                self._open(own).merge(own.range(1).toDF("txmq"), "false").whenMatchedDelete().execute()
        except Exception:
            # The other side may have committed in between (ConcurrentTransactionException): its commit is the answer.
            found = self._look(self._open(spark), batch)
            if found.state is None:
                raise
            return found
        return self._look(self._open(spark), batch, thorough=True)

    def _look(self, table: DeltaTable, batch: HalfBatch, thorough: bool = False) -> _Found:
        """Return which commits of this attempt the table's history has.

        It reads the newest commits first, and goes back to when the half batch was prepared; with ``thorough`` to the
        beginning of the log.
        """
        since = _utc(batch.prepared_at).timestamp() - _CLOCK_SKEW_S
        ours: list[tuple[str, str | None, str]] = []
        for limit in _HISTORY_PAGES:
            history = table.history() if limit is None else table.history(limit)
            rows = history.selectExpr(
                "operation", "userMetadata AS said", "unix_millis(timestamp) / 1000 AS seconds"
            ).collect()
            read = ((_state_in(row.said, batch), row.operation) for row in rows)
            ours = [(*said, operation) for said, operation in read if said is not None]
            seen_all = limit is None or len(rows) < limit
            if ours or seen_all or (not thorough and rows[-1].seconds < since):
                break
        return self._judge(ours, batch)

    def _judge(self, ours: list[tuple[str, str | None, str]], batch: HalfBatch) -> _Found:
        fenced = [(state, reason) for state, reason, operation in ours if operation in _FENCED_OPERATIONS]
        if len(fenced) > 1:
            raise FenceError(
                f"{self._table!r} has {len(fenced)} commits for one attempt of half batch {batch.half_id!r} "
                f"({', '.join(sorted(state for state, _ in fenced))}): its transactions were lost, by a restored log "
                "or by delta.setTransactionRetentionDuration. Look at the table, then settle it with log.resolve"
            )
        others = {op for _, _, op in ours if op not in _FENCED_OPERATIONS and op not in _HOUSEKEEPING}
        state, reason = fenced[0] if fenced else (None, None)
        return _Found(state, reason, tuple(sorted(others)))

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
                "%s sets delta.setTransactionRetentionDuration=%s: a half batch that stays pending for "
                "longer is "
                "not fenced any more",
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
        found = self._read_id(spark)
        if batch.fence_id != found:
            raise FenceError(
                f"half batch {batch.half_id!r} was prepared with table id {batch.fence_id}, but "
                f"{self._table!r} has the id {found}: another table, or it was made anew. Point the listener "
                "to the right one"
            )

    def _fenced(self, batch: HalfBatch) -> FencedError:
        return FencedError(
            f"attempt {batch.attempt} of half batch {batch.half_id!r} came too late: a check has put a "
            f"tombstone into {self._table!r}, so Delta skipped what work wrote. The check's verdict stands, "
            "and the next attempt runs it"
        )

    def _forgotten(self, batch: HalfBatch) -> FenceError:
        return FenceError(
            f"{self._table!r} has a transaction {_app_id(batch)!r}, but its log no longer says whose commit "
            "it was (clean-up after delta.logRetentionDuration, or work set userMetadata itself). Look at "
            f"the table, then settle half batch {batch.half_id!r} with log.resolve"
        )


@dataclass(frozen=True)
class _Found:
    """What a table's history has of one attempt: the state in its fenced commit, why ``work`` rolled back, and its
    unfenced operations."""

    state: str | None
    reason: str | None
    unfenced: tuple[str, ...]


def _app_id(batch: HalfBatch) -> str:
    log = "" if batch.log_id is None else f"{batch.log_id}:"
    return f"txmq:{log}{batch.half_id}:{batch.attempt}"


def _user_metadata(batch: HalfBatch, state: str, reason: str | None = None) -> str:
    log = {} if batch.log_id is None else {"log": batch.log_id}
    why = {} if reason is None else {"reason": reason}
    return json.dumps({"txmq": state, **log, "half_id": batch.half_id, "attempt": batch.attempt, **why})


def _state_in(user_metadata: str | None, batch: HalfBatch) -> tuple[str, str | None] | None:
    """The state of this attempt that a commit's userMetadata says, and why; None when it speaks of something else."""
    try:
        said = json.loads(user_metadata or "")
        state, reason = said["txmq"], said.get("reason")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    known = state in _STATES and user_metadata == _user_metadata(batch, state, reason)
    return (state, reason) if known else None


@contextmanager
def _fenced_session(
    spark: SparkSession, batch: HalfBatch, state: str, reason: str | None = None
) -> Iterator[SparkSession]:
    """Give a copy of the session, whose one Delta commit carries the attempt's transaction and this state.

    Other threads may use ``spark`` itself: they would write under our transaction, and Delta would skip their data
    silently. At the end the copy loses these settings, because ``work`` may keep it.
    """
    own = _copy(spark)
    settings = {
        _APP_ID: _app_id(batch),
        _VERSION: "1",
        _AUTO_RESET: "true",
        _USER_METADATA: _user_metadata(batch, state, reason),
    }
    try:
        for name, value in settings.items():
            own.conf.set(name, value)
        with _active(own):
            yield own
    finally:
        for name in settings:
            own.conf.unset(name)


def _is_classic(spark: SparkSession) -> bool:
    return hasattr(spark, "_jsparkSession")


def _copy(spark: Any) -> SparkSession:
    """Return a session with the same settings and temporary views (with Spark Connect: what the client copies)."""
    if _is_classic(spark):
        copy = type(spark)(spark.sparkContext, spark._jsparkSession.cloneSession())
    else:
        copy = spark.cloneSession() if hasattr(spark, "cloneSession") else spark.newSession()
    return cast("SparkSession", copy)


@contextmanager
def _active(spark: Any) -> Iterator[None]:
    """Make this session the thread's active one, for code in ``work`` that asks for it, and at the end the old one.

    Spark's createDataFrame makes its session the active one for good. The copy must not stay active.
    """
    if not _is_classic(spark):
        yield
        return
    kind = type(spark)
    jvm_kind = kind._get_j_spark_session_class(spark._jvm)
    before, jvm_before = kind._activeSession, jvm_kind.getActiveSession()
    kind._activeSession = spark
    jvm_kind.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        kind._activeSession = before
        if jvm_before.isDefined():
            jvm_kind.setActiveSession(jvm_before.get())
        else:
            jvm_kind.clearActiveSession()


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


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment
