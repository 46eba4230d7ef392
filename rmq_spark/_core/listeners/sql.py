"""Runs a local transaction in a database, together with a fence row for each attempt of a half batch.

The fence lets a check promise that a local transaction *never will* happen. Execute and a check both try to insert the
attempt's row, and its primary key lets only one of them succeed. See :class:`SqlTransactionListener`. ::

    execute first    execute   BEGIN  insert row (started)  work  set executed  COMMIT
                     check                                  insert row, which waits    finds executed: COMMIT_MESSAGE
                                                            (or waits too long:        UNKNOWN)

    check first      check     BEGIN  insert row (tombstone)  COMMIT                   ROLLBACK_MESSAGE
                     execute                                         BEGIN  insert row  finds tombstone: FencedError

A row has one state for all transactions of the attempt, or one for each where they differ
(:class:`~rmq_spark._core.listeners.fence_row.Recorded`). ``fence_verdicts.py`` says what a check answers to each state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.orm import Session

# Imported first: its error says what to install when SQLAlchemy is missing.
from rmq_spark._core.database.connection import Address
from rmq_spark._core.database.error_codes import again_when_lost, is_lock_problem
from rmq_spark._core.listeners.enlisted_session import EnlistedSession
from rmq_spark._core.listeners.fence import FENCE_TABLE, Fence, Rows
from rmq_spark._core.listeners.fence_prune import prune_fence
from rmq_spark._core.listeners.fence_row import BY_PART, STARTED, TOMBSTONE, Recorded, State
from rmq_spark._core.listeners.fence_verdicts import UNKNOWN_VERDICT, verdicts_of
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.half_transaction import HalfTransaction
from rmq_spark._core.listeners.transaction_listener import (
    ExecutedAttempt,
    TransactionListener,
    Verdicts,
    require_executing,
    require_work,
)
from rmq_spark._core.listeners.work import BatchWork, FencedWork, TransactionWork
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.message import Message
from rmq_spark._core.vocabulary.options import Duration, flag, named, seconds
from rmq_spark._core.vocabulary.redaction import traceback_of
from rmq_spark._core.vocabulary.times import utc
from rmq_spark._core.vocabulary.verdicts import UNKNOWN, Verdict, VerdictArray
from rmq_spark.errors import FencedError, FenceError, LocalTransactionError, TransactionEndedError

if TYPE_CHECKING:
    from rmq_spark._core.client.commit_log import CommitLog
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

ROLLBACK_AFTER_S = 60.0
LOCK_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S_MIN = 0.001
LOCK_TIMEOUT_S_MAX = 24 * 3600.0
"""PostgreSQL and SQLite keep a lock timeout as milliseconds in an int32, which holds 24 days."""
CLAIMS_MAX = 4
"""Tries of execute to claim its row while others change it."""

_ENDED = Verdict(UNKNOWN, "work ended its database transaction in its middle")
_T = TypeVar("_T")
MessagesAgain: TypeAlias = Callable[[sa.Connection, ExecutedAttempt], "pa.Table | Sequence[Message] | None"]


class SqlTransactionListener(TransactionListener):
    """Runs ``work`` in one database transaction with the fence row of a half batch.

    Parameters
    ----------
    url_or_engine : str, sqlalchemy.URL, callable or sqlalchemy.Engine
        The database that ``work`` writes to: SQLite, PostgreSQL, MariaDB or MySQL. Other databases are refused. From a
        URL the listener makes an engine when it first needs one, in the process that needs it. ``"env:NAME"`` reads the
        URL from that process's environment variable, and a function without arguments returns it. So a listener can be
        pickled to another process, as Spark Connect does, without a password. A listener with an Engine cannot.
    work : callable, optional
        ``work(connection, batch)`` gets the open :class:`sqlalchemy.Connection` and the :class:`~rmq_spark.HalfBatch`.
        It must not commit, roll back or close the connection, nor end its transaction in another way. Without work the
        listener answers checks, and joins the sessions of :meth:`TransactionMQProducer.transaction`; other sends
        refuse it. What work returns:

        - ``None``, ``COMMIT_MESSAGE``: the database transaction commits, and so do all messages
        - ``ROLLBACK_MESSAGE``: all that it wrote is undone, all messages are rolled back
        - ``batch.verdicts(...)``: a verdict per transaction. All that it wrote stays, even when each is rolled back:
          for those it writes nothing, or a record of the refusal
        - ``raise txmq.Rollback(why)``: as ``ROLLBACK_MESSAGE``; the op marker and the fence keep the reason
        - ``UNKNOWN``: refused (VerdictError): a database transaction commits or it does not
        - any other exception: the database transaction is undone, the half batch stays pending
        - the transaction is ended: TransactionEndedError; a part may be committed, so no check answers

        ``None`` from ``work`` means COMMIT, because its rows commit with the fence. ``None`` from a listener's own
        method means UNKNOWN.
    per_transaction : bool, default False
        Calls ``work(connection, transaction)`` for each transaction (a key's messages, a message, or the half batch),
        with a :class:`HalfTransaction`, in a savepoint of its own. ROLLBACK_MESSAGE or ``raise txmq.Rollback(why)``
        undoes that transaction alone. This is easier than one call for all keys, and slower.
    rollback_after : float, default 60.0
        Seconds from prepare (or reopen). Until then a check that finds no fence row answers UNKNOWN. After that it
        inserts a tombstone and answers ROLLBACK. Set it to the time that ``work`` usually needs: a check that comes too
        early costs another attempt, never correctness. A restarted query does not wait for its own half batch.
    lock_timeout : float, default 5.0
        Seconds that a check waits for a fence row that a running local transaction locks. Then it answers UNKNOWN.
    fence_table : str, default "txmq_fence"
        Name of the fence table. The table ``<fence_table>_id`` keeps the fence's id.
    schema : str, optional
        The database schema of both tables.
    messages : callable, optional
        ``messages(connection, attempt)`` rebuilds the messages of an :class:`~rmq_spark.listeners.ExecutedAttempt` from
        the rows that ``work`` wrote for it: a table with the columns that the sink takes, or a list of
        :class:`~rmq_spark.Message`; None when it cannot. ``txmq reconcile`` calls it after a restore for messages that
        the log has lost.

    Notes
    -----
    Call :meth:`create_fence` once for a database (or :func:`create_fence` in a script, with a user that may create
    tables). Each half batch keeps the fence's random id, so a check against another or an empty database raises an
    error instead of giving a wrong answer. So does a check against a copy, as far as a database can tell: a SQLite file
    knows its inode, PostgreSQL its cluster and database, MariaDB and MySQL only the database's name. A database
    restored from a backup has the id but not the newest rows: settle what is pending first, then call
    ``create_fence(moved=True)``.

    In one database transaction, execute inserts the fence row, runs ``work``, records its verdicts, and commits. When
    the connection breaks at the commit, the outcome is unknown. The exception leaves the half batch pending, and a
    check reads what the database has. For a transaction that a check has rolled back, execute raises
    :class:`~rmq_spark.errors.FencedError` *before* ``work`` runs. The check's verdict stands, and the next attempt runs
    the work.

    Fence rows must outlive their half batches: see :meth:`prune`.
    """

    @named
    def __init__(
        self,
        url_or_engine: Address,
        work: BatchWork | TransactionWork | None = None,
        *,
        per_transaction: bool = False,
        rollback_after: Duration = ROLLBACK_AFTER_S,
        lock_timeout: Duration = LOCK_TIMEOUT_S,
        fence_table: str = FENCE_TABLE,
        schema: str | None = None,
        messages: MessagesAgain | None = None,
    ) -> None:
        if work is not None:
            require_work(work, "work(connection, batch)")
        if messages is not None:
            require_work(messages, "messages(connection, attempt)")
        self._messages = messages
        self._fence = Fence(url_or_engine, fence_table, schema)
        self.only_checks = work is None
        function: Callable[[sa.Connection, Any], Any] = self._refuse_to_execute if work is None else work
        self._work = FencedWork(self._fence, function, flag(per_transaction, "per_transaction"))
        self.rollback_after_s = seconds(rollback_after, "rollback_after")
        self._lock_timeout = seconds(lock_timeout, "lock_timeout", LOCK_TIMEOUT_S_MIN, maximum=LOCK_TIMEOUT_S_MAX)

    def __repr__(self) -> str:
        work = "" if self.only_checks else f", work={getattr(self._work.function, '__qualname__', '?')}"
        return f"SqlTransactionListener({self._fence.where!r}{work})"

    def __getstate__(self) -> dict[str, Any]:
        # Spark Connect pickles a listener. The other process connects by itself, and reads the fence's id.
        return {name: value for name, value in self.__dict__.items() if name != "store_id"}

    # ------------------------------------------------------------------ the fence
    @cached_property
    def store_id(self) -> str:  # type: ignore[override]
        """The id of the database's fence.

        Raises
        ------
        FenceError
            When the database has no fence yet.
        """
        with self._fence.transaction(write=False) as connection:
            return self._fence.read_id(connection)

    def create_fence(self, *, moved: bool = False) -> str:
        """Make the fence's tables and its id unless they exist, and return the id.

        ``moved=True`` binds the fence to this database: it was moved, upgraded or restored, and is not a copy beside
        another one.
        """
        self.store_id = self._fence.create(moved)
        return self.store_id

    def prune(self, older_than: Duration, *logs: CommitLog | Engine) -> int:
        """Delete fence rows older than ``older_than``, and return the number of deleted rows.

        It deletes only rows of half batches that have left the table ``half`` of these logs: they are settled, and
        neither a check nor a replay asks about them. Without upkeep nothing leaves. Rows of other logs stay.

        Parameters
        ----------
        older_than : float or str
            At least 7 days: a driver may wake up late.
        *logs : CommitLog

        Raises
        ------
        OptionError
            For less than 7 days, or without an open log.
        FenceError
            When the database has no fence.
        """
        return sum(prune_fence(self._fence, older_than, logs))

    def pruning_in_turn(self, older_than: float, engine: Engine, every: float) -> Iterator[int]:
        """Do what :meth:`prune` does, and yield the number of deleted rows of each page; nothing when a process has
        begun it for this log in the last ``every`` seconds."""
        pages = prune_fence(self._fence, older_than, [engine])
        if self._fence.take_turn(engine.id, every):
            yield from pages

    def executed_since(self, log_id: str, since: datetime) -> Iterator[ExecutedAttempt]:
        """Yield each attempt of a log's half batches that this database has executed since a time (UTC)."""
        return self._fence.executed_since(log_id, since)

    def messages_again(self, attempt: ExecutedAttempt) -> pa.Table | Sequence[Message] | None:
        """Rebuild the messages of an attempt from the rows that it wrote; None when that is not possible."""
        if self._messages is None:
            return None
        with self._fence.transaction(write=False) as connection:
            return self._messages(connection, attempt)

    @property
    def runtime(self) -> Runtime:
        """The machine whose clock tells the age of half batches and fence rows."""
        return self._fence.runtime

    @runtime.setter
    def runtime(self, runtime: Runtime) -> None:
        self._fence.runtime = runtime

    def enlist(self, session: sa.Connection | Session) -> EnlistedSession:
        """Return the listener of one half batch, whose local transaction is that of an open session."""
        return EnlistedSession(self, self._fence, self._lock_timeout, session)

    # ------------------------------------------------------------------ execute
    def _refuse_to_execute(self, connection: sa.Connection, batch: HalfBatch | HalfTransaction) -> None:
        require_executing(self, repr(batch))

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Claim the fence row, run ``work`` and commit, in one database transaction.

        Returns
        -------
        VerdictArray
            COMMIT_MESSAGE or ROLLBACK_MESSAGE for each row of ``batch.transactions``. For an attempt that ran before,
            the verdicts that it recorded; ``work`` does not run again.

        Raises
        ------
        FencedError
            A check rolled back one of these transactions. ``work`` did not run for any of them, and never will in this
            attempt.
        FenceError
            The database has no fence, or not that of the prepare; or an earlier run of ``work`` ended its transaction
            in the middle.
        TransactionEndedError
            ``work`` ended the database transaction. A part of what it wrote may be committed.
        """
        try:
            fenced, verdicts = self._execute(batch)
        except TransactionEndedError as problem:
            noted = self._keep_started(batch)
            effect = "no check answers for it" if noted else "a check may say that it never happened (see the log)"
            raise TransactionEndedError(
                f"{problem}. Half batch {batch.half_id!r} stays pending, and {effect}: look what is in the database, "
                "undo or finish it, and settle the half batch with log.resolve"
            ) from problem
        self._refuse_fenced(batch, fenced)
        return verdicts

    def _refuse_fenced(self, batch: HalfBatch, fenced: Sequence[str]) -> None:
        if fenced:
            raise FencedError(
                f"attempt {batch.attempt} of half batch {batch.half_id!r} came too late: a check has rolled back "
                f"{len(fenced)} of its {batch.transactions.num_rows} transactions (the first is {fenced[0]!r}). None "
                "of them ran, and none will under this attempt; the next attempt runs them"
            )

    def begin_parts(self, batch: HalfBatch) -> bool:
        """Record that executors run the parts of this attempt.

        Raises
        ------
        FencedError, FenceError
            As :meth:`execute_local_transaction`.
        """

        def begin(connection: sa.Connection, recorded: Recorded | None) -> tuple[list[str], bool]:
            if recorded is None:
                self._fence.require_not_too_late(batch)
                return [], True
            if recorded.is_by_part:
                recorded = self._fence.record_of(self._fence.read(connection, [batch]), batch)
                return [], bool(recorded.among(batch.rows).null_count)
            return self._fenced_ids(connection, batch, recorded), False

        fenced, by_part = self._claiming(batch, BY_PART, begin)
        self._refuse_fenced(batch, fenced)
        return by_part

    def _execute(self, batch: HalfBatch) -> tuple[list[str], VerdictArray]:
        """Return the ids of transactions that a check rolled back, and the verdicts when there are none."""

        def execute(connection: sa.Connection, recorded: Recorded | None) -> tuple[list[str], VerdictArray]:
            if recorded is None:
                self._fence.require_not_too_late(batch)
                return [], self._work.run_all_anew(connection, batch)
            if recorded.is_by_part:
                recorded = self._fence.record_of(self._fence.read(connection, [batch]), batch)
                if recorded.among(batch.rows).null_count:
                    raise LocalTransactionError(
                        f"executors have begun attempt {batch.attempt} of half batch {batch.half_id!r} in parts: "
                        "nothing was done here; let a check settle it"
                    )
            fenced = self._fenced_ids(connection, batch, recorded)
            return fenced, VerdictArray(()) if fenced else self._work.run_rest(connection, batch, recorded)

        return self._claiming(batch, STARTED, execute)

    def _claiming(
        self, batch: HalfBatch, word: str, then: Callable[[sa.Connection, Recorded | None], tuple[list[str], _T]]
    ) -> tuple[list[str], _T]:
        """Claim the fence row with a state and go on, in one database transaction. ``then`` gets what the row
        records already."""
        tries = 1
        while True:
            claimed = False
            try:
                with self._fence.transaction() as connection:
                    recorded = self._fence.claim(connection, batch, State(word))
                    claimed = True
                    return then(connection, recorded)
            except sa.exc.DBAPIError as problem:
                # Another transaction changed the row after this one's snapshot, or the pool's connection was lost.
                # Before the claim nothing is done, so it can begin again.
                may_begin_anew = is_lock_problem(problem) or problem.connection_invalidated
                if claimed or tries == CLAIMS_MAX or not may_begin_anew:
                    raise
                tries += 1

    def _keep_started(self, batch: HalfBatch) -> bool:
        """Record as started the transactions without a state, so that no check answers "it never happened". Return
        whether that succeeded."""
        try:
            with self._fence.transaction(self._lock_timeout) as connection:
                self._fence.fill(connection, batch, State(STARTED))
            return True
        except (sa.exc.DBAPIError, FenceError) as problem:
            logger.error(
                "%r: could not note that its work ended the database transaction: %s", batch, traceback_of(problem)
            )
            return False

    def _fenced_ids(self, connection: sa.Connection, batch: HalfBatch, recorded: Recorded) -> list[str]:
        """Return the ids that a check rolled back. If any, bury the rest too: FencedError says that none ever runs."""
        codes = recorded.among(batch.rows)
        buried = {n for n, state in enumerate(recorded.states) if state.word == TOMBSTONE}
        if buried.isdisjoint(pc.unique(codes).to_pylist()):
            return []
        ids = batch.transactions["transaction_id"].to_pylist()
        transaction_codes = batch.by_transaction(pc.fill_null(codes, -1)).to_pylist()
        fenced = [transaction_id for transaction_id, code in zip(ids, transaction_codes, strict=True) if code in buried]
        others = sum(code != -1 for code in transaction_codes) - len(fenced)
        if others:
            raise LocalTransactionError(
                f"{len(fenced)} of the {len(ids)} transactions of half batch {batch.half_id!r}, attempt "
                f"{batch.attempt}, were rolled back by a check, and {others} ran before: nothing was done; let a check "
                "settle each of them"
            )
        absent = batch.rows.where(pc.is_null(codes))
        if absent:
            self._fence.write(connection, batch, recorded.with_rows(absent, [State(TOMBSTONE)]))
        return fenced

    # ------------------------------------------------------------------ check
    def require_reachable(self) -> None:
        """Read the fence's id.

        Raises
        ------
        FenceError, sqlalchemy.exc.DBAPIError
            The database has no fence, or does not answer. A lock error counts as an answer.
        """
        try:
            again_when_lost(self._read_rows, [])
        except sa.exc.DBAPIError as problem:
            if not is_lock_problem(problem):
                raise

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Return the fence's verdict for each transaction. An old half batch without a fence row gets a tombstone.

        Returns
        -------
        VerdictArray
            For each row of ``batch.transactions``. COMMIT_MESSAGE: it was executed. ROLLBACK_MESSAGE: ``work`` rolled
            it back (refused, with its reason), or a check inserted a tombstone, so ``work`` never runs. UNKNOWN: it has
            no state, and the half batch is younger than ``rollback_after`` and not ``restarted``; or the running local
            transaction holds the lock.

        Raises
        ------
        FenceError
            The database has no fence, or not that of the prepare, or ``work`` ended its transaction in the middle: no
            check can answer.
        """
        try:
            (answer,) = self._check_all([batch])
        except sa.exc.DBAPIError as problem:
            if not is_lock_problem(problem):
                raise
            # Another transaction holds the lock, so the local transaction is still running.
            logger.info("%r: another transaction holds its fence rows; the answer is UNKNOWN", batch)
            batch.reason = "another database transaction holds its fence rows, so its local transaction is running"
            return UNKNOWN
        if isinstance(answer, FenceError):
            raise answer
        return answer

    def check_local_transactions(self, batches: Sequence[HalfBatch]) -> Sequence[Verdicts | Exception]:
        """Return the answer of :meth:`check_local_transaction` for each half batch, or a FenceError in its place. The
        fence is read once for all, and all tombstones are inserted in one database transaction.

        Raises
        ------
        FenceError, sqlalchemy.exc.DBAPIError
            One was prepared with another fence, or a row is locked: ask about each alone.
        """
        return self._check_all(batches)

    def _check_all(self, batches: Sequence[HalfBatch]) -> list[VerdictArray | FenceError]:
        reach("asked")
        records: dict[HalfBatch, Recorded | FenceError] = {}
        rows = again_when_lost(self._read_rows, batches)
        for batch in batches:
            try:
                records[batch] = self._fence.record_of(rows, batch)
            except FenceError as problem:
                records[batch] = problem
        now, wait = self.runtime.now(), timedelta(seconds=self.rollback_after_s)
        to_bury = [
            batch
            for batch, recorded in records.items()
            if (batch.restarted or now - utc(batch.prepared_at) >= wait)
            and isinstance(recorded, Recorded)
            and recorded.among(batch.rows).null_count
        ]
        if to_bury:
            records |= again_when_lost(self._bury, to_bury)
        answers = [self._answer(batch, records[batch]) for batch in batches]
        reach("answered")
        return answers

    def _read_rows(self, batches: Sequence[HalfBatch]) -> Rows:
        with self._fence.transaction(self._lock_timeout, write=False) as connection:
            return self._fence.read(connection, batches)

    def _answer(self, batch: HalfBatch, recorded: Recorded | FenceError) -> VerdictArray | FenceError:
        if isinstance(recorded, FenceError):
            return recorded
        try:
            verdicts = verdicts_of(batch, recorded, _ENDED)
        except FenceError as problem:
            return problem
        if _ENDED in verdicts.distinct:
            batch.reason = "work ended the database transaction of a part in its middle, and no check can answer for it"
        elif UNKNOWN_VERDICT in verdicts.distinct:
            wait = f"rollback_after ({self.rollback_after_s:g} s) is not over"
            batch.reason = f"the database has no fence row of it yet, and {wait}"
        return verdicts

    def _bury(self, batches: Sequence[HalfBatch]) -> dict[HalfBatch, Recorded]:
        """Record a tombstone for each transaction that has no state, unless execute was faster, and return the states
        of all."""
        with self._fence.transaction(self._lock_timeout) as connection:
            # All insert in the same order, so that two database transactions never wait for each other.
            in_order = sorted(batches, key=lambda batch: (batch.half_id, batch.attempt))
            records = {batch: self._fence.fill(connection, batch, State(TOMBSTONE)) for batch in in_order}
        reach("tombstones commit")
        return records
