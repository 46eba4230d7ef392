"""Runs a local transaction in a database, together with a fence row for each attempt of a half batch.

The fence lets a check promise that a local transaction *never will* happen. Execute and a check both try to insert the
attempt's row, and its primary key lets only one of them succeed. See :class:`SqlTransactionListener`. ::

    execute first    execute   BEGIN  insert row (started)  work  set executed  COMMIT
                     check                                  insert row, which waits    finds executed: COMMIT_MESSAGE
                                                            (or waits too long:        UNKNOWN)

    check first      check     BEGIN  insert row (tombstone)  COMMIT                   ROLLBACK_MESSAGE
                     execute                                         BEGIN  insert row  finds tombstone: FencedError

A row has one state for all transactions of the attempt, or one for each where they differ
(:class:`~rmq_spark._core.listeners.fence_row.Recorded`). What a check answers, by the committed state of a transaction:

===============  ======================================  ===========================================================
state            written by                              a check answers
===============  ======================================  ===========================================================
nothing          nobody                                  UNKNOWN; after ``rollback_after`` it writes a tombstone
``executed``     execute, when work's rows commit        COMMIT
``rolled_back``  execute, when work rolled back          ROLLBACK, refused: it is final, with work's reason
``tombstone``    a check, or execute after that check    ROLLBACK: it never happened, and a replay runs it again
``started``      execute, before work                    nothing (FenceError): work ended the database transaction
===============  ======================================  ===========================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.orm import Session

# Imported first: its error says what to install when SQLAlchemy is missing.
from rmq_spark._core.database.connection import Address
from rmq_spark._core.database.engine import has_one_connection
from rmq_spark._core.database.error_codes import is_lock_problem
from rmq_spark._core.database.guard import Owner, begin_savepoint, end_savepoint, no_commit_within
from rmq_spark._core.listeners.decode import decode_json
from rmq_spark._core.listeners.fence import Fence, utc
from rmq_spark._core.listeners.fence_row import EXECUTED, NOTHING, ROLLED_BACK, STARTED, TOMBSTONE, Recorded, State
from rmq_spark._core.listeners.half_batch import HalfBatch, message_name, normalize_verdicts
from rmq_spark._core.listeners.listener import (
    ExecutedAttempt,
    TransactionListener,
    Verdicts,
    require_executing,
    require_work,
)
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.message import Message
from rmq_spark._core.vocabulary.options import FENCE_RETENTION_S_MIN, flag, named, seconds
from rmq_spark._core.vocabulary.redaction import traceback_of
from rmq_spark._core.vocabulary.verdicts import (
    COMMIT_MESSAGE,
    UNKNOWN,
    LocalTransactionState,
    Rollback,
    Verdict,
    VerdictArray,
    returned,
    rollback,
    verdict_of,
)
from rmq_spark.errors import (
    FencedError,
    FenceError,
    ListenerError,
    LocalTransactionError,
    MessageError,
    OptionError,
    TransactionEndedError,
    VerdictError,
)

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

ROLLBACK_AFTER_S = 60.0
LOCK_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S_MIN = 0.001
LOCK_TIMEOUT_S_MAX = 24 * 3600.0
"""PostgreSQL and SQLite keep a lock timeout as milliseconds in an int32, which holds 24 days."""
FENCE_TABLE = "txmq_fence"
CLAIMS_MAX = 4
"""Tries of execute to claim its row while others change it."""

_T = TypeVar("_T")
_COMMIT = Verdict(COMMIT_MESSAGE)
_UNKNOWN = Verdict(UNKNOWN)
_NEVER_HAPPENED = rollback("it never happened: a check found no fence row of it, and put a tombstone there")


def _with_one_retry(query: Callable[[Sequence[HalfBatch]], _T], batches: Sequence[HalfBatch]) -> _T:
    """Query the database, and once more when the pool's connection was lost: a check may run twice."""
    try:
        return query(batches)
    except sa.exc.DBAPIError as problem:
        if not problem.connection_invalidated:
            raise
    return query(batches)


def _verdict(state: State, batch: HalfBatch) -> Verdict:
    """Return the verdict that a check gives for a state.

    Raises
    ------
    FenceError
        When work ended the database transaction in its middle.
    """
    if state.word == STARTED:
        raise FenceError(
            f"work ended the database transaction of half batch {batch.half_id!r}, attempt {batch.attempt}, in its "
            "middle, so a part of what it wrote may be in the database: no check can answer. Look there, undo or "
            "finish that part, and settle the half batch with log.resolve"
        )
    if state.word == TOMBSTONE:
        return _NEVER_HAPPENED
    return _COMMIT if state.word == EXECUTED else rollback(state.reason, refused=True)


def _state(verdict: Verdict) -> State:
    """Return the state to record for a verdict of ``work``."""
    return State(EXECUTED) if verdict.state is COMMIT_MESSAGE else State(ROLLED_BACK, verdict.reason)


def _verdicts(batch: HalfBatch, recorded: Recorded) -> VerdictArray:
    """Return the recorded verdict of each transaction; UNKNOWN where nothing is recorded.

    Raises
    ------
    FenceError
        When work ended the database transaction in its middle, or one transaction has two states.
    """
    codes = recorded.among(batch.rows)
    used = pc.unique(codes)
    distinct = [_UNKNOWN if code is None else _verdict(recorded.states[code], batch) for code in used.to_pylist()]
    if len(distinct) == 1:
        return VerdictArray((distinct[0],))
    which = batch.by_transaction(pc.index_in(codes, value_set=used))
    if which.null_count:
        raise FenceError(
            f"the fence row of half batch {batch.half_id!r}, attempt {batch.attempt}, says two things of one "
            "transaction: the database is damaged, or the row was changed by hand"
        )
    return VerdictArray(tuple(distinct), which)


@dataclass(frozen=True)
class HalfTransaction:
    """One transaction of a half batch. ``work`` gets it with ``per_transaction=True``.

    Attributes
    ----------
    transaction_id : str
    transaction_key : str or None
        The value of ``transactionKey``; None without one.
    batch : HalfBatch
        The half batch that the transaction is part of.
    """

    transaction_id: str
    transaction_key: str | None
    batch: HalfBatch
    _all: _GroupedMessages = field(repr=False)
    _start: int = field(repr=False)
    _length: int = field(repr=False)

    def messages(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return its messages in send order, with the columns of :meth:`HalfBatch.messages`."""
        table = self._all.table if columns is None else self._all.table.select(list(columns))
        return table.slice(self._start, self._length)

    def decode(self, schema: str | pa.Schema, on_error: str = "raise") -> pa.Table:
        """Return its messages' JSON bodies as columns; see :meth:`HalfBatch.decode`. An error counts only the
        bodies of this transaction."""
        return self._all.decode(schema, on_error, self._start, self._length)


class _GroupedMessages:
    """All messages of a half batch, grouped by transaction."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._decoded: dict[tuple[str | pa.Schema, str], pa.Table | None] = {}

    def decode(self, schema: str | pa.Schema, on_error: str, start: int, length: int) -> pa.Table:
        # Decode once for all transactions: starting a JSON reader for each small one would take most of the time.
        if (schema, on_error) not in self._decoded:
            try:
                self._decoded[schema, on_error] = decode_json(self.table["body"], schema, on_error)
            except MessageError:
                self._decoded[schema, on_error] = None
        decoded = self._decoded[schema, on_error]
        if decoded is None:
            # A bad body must fail its own transaction alone.
            own_messages = self.table.slice(start, length)
            return decode_json(own_messages["body"], schema, on_error, partial(message_name, own_messages))
        return decoded.slice(start, length)


BatchWork: TypeAlias = Callable[[sa.Connection, HalfBatch], Verdicts]
TransactionWork: TypeAlias = Callable[[sa.Connection, HalfTransaction], LocalTransactionState | Rollback | str | None]
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

        ============================== ======================================================================
        returned or raised             meaning
        ============================== ======================================================================
        ``None``, ``COMMIT_MESSAGE``   the database transaction commits, and so do all messages
        ``ROLLBACK_MESSAGE``           all that it wrote is undone, all messages are rolled back
        ``batch.verdicts(...)``        a verdict per transaction. All that it wrote stays, even when each is rolled
                                       back: for those it writes nothing, or a record of the refusal
        ``raise txmq.Rollback(why)``   as ``ROLLBACK_MESSAGE``; the op marker and the fence keep the reason
        ``UNKNOWN``                    refused (VerdictError): a database transaction commits or it does not
        any other exception            the database transaction is undone, the half batch stays pending
        the transaction is ended       TransactionEndedError; a part may be committed, so no check answers
        ============================== ======================================================================

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
        rollback_after: float = ROLLBACK_AFTER_S,
        lock_timeout: float = LOCK_TIMEOUT_S,
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
        self._work: Callable[[sa.Connection, Any], Any] = self._refuse_to_execute if work is None else work
        self._per_transaction = flag(per_transaction, "per_transaction")
        self.rollback_after_s = seconds(rollback_after, "rollback_after")
        self._lock_timeout = seconds(lock_timeout, "lock_timeout", LOCK_TIMEOUT_S_MIN, maximum=LOCK_TIMEOUT_S_MAX)

    def __repr__(self) -> str:
        work = "" if self.only_checks else f", work={getattr(self._work, '__qualname__', '?')}"
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

    def prune(self, older_than: float, *logs: Engine) -> int:
        """Delete fence rows older than ``older_than`` seconds, and return the number of deleted rows.

        It deletes only rows of half batches that have left the table ``half`` of these logs: they are settled, and
        neither a check nor a replay asks about them. Without upkeep nothing leaves. Rows of other logs stay.

        Parameters
        ----------
        older_than : float
            Seconds, at least 7 days: a driver may wake up late.
        *logs : Engine

        Raises
        ------
        OptionError
            For less than 7 days, or without a log.
        FenceError
            When the database has no fence.
        """
        return sum(self.pruning(older_than, *logs))

    def pruning(self, older_than: float, *logs: Engine) -> Iterator[int]:
        """Do what :meth:`prune` does, a page of rows at a time, and yield the number of deleted rows of each page."""
        seconds(older_than, "older_than")
        if older_than < FENCE_RETENTION_S_MIN:
            raise OptionError(
                f"{older_than!r} s is less than 7 days ({FENCE_RETENTION_S_MIN:.0f} s): fence rows must outlive the "
                "half batches that they speak for",
                argument="older_than",
            )
        if not logs:
            raise OptionError("prune needs the commit logs whose rows may go: write prune(older_than, log)")
        for log in logs:
            if not callable(getattr(log, "still_in_half", None)):
                raise OptionError(
                    f"prune got {type(log).__name__} {str(log)[:100]!r}: open logs are expected, one after "
                    "the other, as prune(older_than, Engine.open(path), ...)"
                )
        doubt_s = max(log.clock_doubt_s() for log in logs)
        return self._fence.prune(older_than + doubt_s, {log.id: log.still_in_half for log in logs})

    def pruning_in_turn(self, older_than: float, log: Engine, every: float) -> Iterator[int]:
        """Do what :meth:`pruning` does, unless a process has begun it for this log in the last ``every`` seconds."""
        pages = self.pruning(older_than, log)
        if self._fence.take_turn(log.id, every):
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
        return EnlistedSession(self, session)

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
        if fenced:
            raise FencedError(
                f"attempt {batch.attempt} of half batch {batch.half_id!r} came too late: a check has rolled back "
                f"{len(fenced)} of its {batch.transactions.num_rows} transactions (the first is {fenced[0]!r}). None "
                "of them ran, and none will under this attempt; the next attempt runs them"
            )
        return verdicts

    def _execute(self, batch: HalfBatch) -> tuple[list[str], VerdictArray]:
        """Return the ids of transactions that a check rolled back, and the verdicts when there are none."""
        tries = 1
        while True:
            claimed: list[bool] = []
            try:
                return self._try_to_execute(batch, claimed)
            except sa.exc.DBAPIError as problem:
                # Another transaction changed the row after this one's snapshot, or the pool's connection was lost.
                # Before the claim nothing is done, so it can begin again.
                may_begin_anew = is_lock_problem(problem) or problem.connection_invalidated
                if claimed or tries == CLAIMS_MAX or not may_begin_anew:
                    raise
                tries += 1

    def _try_to_execute(self, batch: HalfBatch, claimed: list[bool]) -> tuple[list[str], VerdictArray]:
        """Run one database transaction; ``claimed`` gets an entry when the row is claimed."""
        with self._fence.transaction() as connection:
            recorded = self._fence.claim(connection, batch, State(STARTED))
            claimed.append(True)
            if recorded is None:
                self._fence.require_not_too_late(batch)
                return [], self._run_all_anew(connection, batch)
            fenced = self._fenced_ids(connection, batch, recorded)
            return fenced, VerdictArray(()) if fenced else self._run_rest(connection, batch, recorded)

    def _keep_started(self, batch: HalfBatch) -> bool:
        """Record as started the transactions without a state, so that no check answers "it never happened". Return
        whether that succeeded."""
        try:
            with self._fence.transaction(self._lock_timeout) as connection:
                self._fill(connection, batch, State(STARTED))
            return True
        except (sa.exc.DBAPIError, FenceError) as problem:
            logger.error(
                "%r: could not note that its work ended the database transaction: %s", batch, traceback_of(problem)
            )
            return False

    def _fill(self, connection: sa.Connection, batch: HalfBatch, state: State) -> Recorded:
        """Record a state for all transactions that have none, and return the states of all."""
        recorded = self._fence.claim(connection, batch, state)
        if recorded is None:
            return Recorded.of(state, batch.rows, batch.is_all)
        absent = batch.rows.where(pc.is_null(recorded.among(batch.rows)))
        if absent:
            recorded = recorded.with_rows(absent, [state])
            self._fence.write(connection, batch, recorded)
        return recorded

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

    def _run_all_anew(self, connection: sa.Connection, batch: HalfBatch) -> VerdictArray:
        """Run ``work`` for a half batch that had no fence row, and record its verdicts."""
        verdicts = self._run(connection, batch)
        states = [_state(verdict) for verdict in verdicts.distinct]
        if verdicts.which is None:
            outcome = Recorded.of(states[0], batch.rows, batch.is_all)
        else:
            outcome = NOTHING.with_rows(batch.rows, states, batch.by_row(verdicts.which))
        self._fence.write(connection, batch, outcome)
        return verdicts

    def _run_rest(self, connection: sa.Connection, batch: HalfBatch, recorded: Recorded) -> VerdictArray:
        """Run ``work`` for the transactions that have no state, and return a verdict for each transaction."""
        earlier = _verdicts(batch, recorded)
        count = batch.transactions.num_rows
        before = earlier.each(count)
        fresh = [verdict is _UNKNOWN for verdict in before]
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
        states = [_state(verdict) for verdict in result.distinct]
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
        result = returned(self._work, connection, batch)
        verdicts = normalize_verdicts(COMMIT_MESSAGE if result is None else result, batch)
        _refuse_unknown(verdicts, batch)
        is_one_verdict = result is None or isinstance(result, (str, Rollback))
        end_savepoint(connection, keep=not is_one_verdict or verdicts.distinct[0].state is COMMIT_MESSAGE)
        return verdicts

    def _run_each(self, connection: sa.Connection, batch: HalfBatch, fresh: Sequence[bool] | None) -> VerdictArray:
        verdicts = [_COMMIT] * batch.transactions.num_rows
        for position, transaction in enumerate(split(batch)):
            if fresh is not None and not fresh[position]:
                continue
            begin_savepoint(connection)
            verdicts[position] = _transaction_verdict(returned(self._work, connection, transaction), transaction)
            end_savepoint(connection, keep=verdicts[position].state is COMMIT_MESSAGE)
        return VerdictArray.of(verdicts)

    # ------------------------------------------------------------------ check
    def require_reachable(self) -> None:
        """Read the fence's id.

        Raises
        ------
        FenceError, sqlalchemy.exc.DBAPIError
            The database has no fence, or does not answer. A lock error counts as an answer.
        """
        try:
            _with_one_retry(self._read_rows, [])
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
        rows = _with_one_retry(self._read_rows, batches)
        for batch in batches:
            row = rows.get((batch.half_id, batch.attempt))
            try:
                records[batch] = NOTHING if row is None else self._fence.recorded(row, batch)
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
            records |= _with_one_retry(self._bury, to_bury)
        answers = [self._answer(batch, records[batch]) for batch in batches]
        reach("answered")
        return answers

    def _read_rows(self, batches: Sequence[HalfBatch]) -> dict[tuple[str, int], sa.Row[Any]]:
        with self._fence.transaction(self._lock_timeout, write=False) as connection:
            return self._fence.read(connection, batches)

    def _answer(self, batch: HalfBatch, recorded: Recorded | FenceError) -> VerdictArray | FenceError:
        if isinstance(recorded, FenceError):
            return recorded
        try:
            verdicts = _verdicts(batch, recorded)
        except FenceError as problem:
            return problem
        if _UNKNOWN in verdicts.distinct:
            wait = f"rollback_after ({self.rollback_after_s:g} s) is not over"
            batch.reason = f"the database has no fence row of it yet, and {wait}"
        return verdicts

    def _bury(self, batches: Sequence[HalfBatch]) -> dict[HalfBatch, Recorded]:
        """Record a tombstone for each transaction that has no state, unless execute was faster, and return the states
        of all."""
        with self._fence.transaction(self._lock_timeout) as connection:
            # All insert in the same order, so that two database transactions never wait for each other.
            in_order = sorted(batches, key=lambda batch: (batch.half_id, batch.attempt))
            records = {batch: self._fill(connection, batch, State(TOMBSTONE)) for batch in in_order}
        reach("tombstones commit")
        return records


class EnlistedSession(TransactionListener):
    """A listener whose local transaction is that of an open session. The fence row joins it and commits with it.

    Parameters
    ----------
    listener : SqlTransactionListener
        Answers the checks.
    session : sqlalchemy.orm.Session or sqlalchemy.Connection
    """

    def __init__(self, listener: SqlTransactionListener, session: sa.Connection | Session) -> None:
        if not isinstance(session, (sa.Connection, Session)):
            raise ListenerError(
                f"found {type(session).__name__}: an open sqlalchemy.orm.Session or sqlalchemy.Connection is expected "
                "(of an AsyncSession pass sync_session, within run_sync)"
            )
        self._listener = listener
        self._session = session
        self._transaction: object = None
        self._committed_through: sa.Connection | None = None
        self._owner = Owner()
        self._ended = False

    @property
    def store_id(self) -> str:  # type: ignore[override]
        return self._listener.store_id

    @property
    def _connection(self) -> sa.Connection:
        return self._session.connection() if isinstance(self._session, Session) else self._session

    def begin(self) -> None:
        """Begin the session's database transaction unless it has begun, and require that it can be enlisted.

        Raises
        ------
        ListenerError
        """
        connection = self._connection
        self._owner.take(connection)
        try:
            self._begin(connection)
        except BaseException:
            self.end()
            raise

    def _begin(self, connection: sa.Connection) -> None:
        if not isinstance(self._session, Session) and not connection.in_transaction():
            connection.begin()
        self._listener._fence.refuse_unsafe(connection)
        if connection._is_autocommit_isolation():
            raise ListenerError(
                "the session's engine is set to AUTOCOMMIT: its rows and the messages must commit together"
            )
        pool = self._listener._fence.engine.pool
        if connection is self._session and connection.engine.pool is pool and has_one_connection(pool):
            raise ListenerError(
                "the engine's pool has one connection, and this is it: transaction() looks by another whether it has "
                "committed. Set pool_size=2 or more, or pass a Session, which gives its connection back"
            )
        self._transaction = self._session.get_transaction()
        self._require_whole()
        self._begin_in_database()
        self._committed_through = connection
        sa.event.listen(connection, "commit", _refuse_commit)

    def _begin_in_database(self) -> None:
        """Begin a transaction unless the driver has, and set a savepoint, which lives as long as the transaction."""
        connection = self._connection
        driver: Any = connection.connection.dbapi_connection
        if connection.dialect.name == "sqlite" and not driver.in_transaction:
            connection.exec_driver_sql("BEGIN")  # else a savepoint would be a transaction of its own
        begin_savepoint(connection)

    def _require_whole(self) -> None:
        """Require that a commit of the session commits one database transaction: the one that began."""
        if self._session.get_transaction() is not self._transaction:
            raise ListenerError(
                "the session was committed, rolled back or closed within transaction(): what it held is not known any "
                "more. Nothing was sent; leave the end of the session to transaction()"
            )
        begun = getattr(self._transaction, "_connections", {}).values()  # of a Session, with whether it commits each
        if len({id(connection) for connection, *_ in begun}) > 1:
            raise ListenerError(
                "the session has several databases, which do not commit together: use one of the fence's"
            )
        joined = any(isinstance(transaction, sa.NestedTransaction) for _, transaction, *_ in begun)
        if joined or self._connection.in_nested_transaction():
            raise ListenerError(
                "the session's transaction is a savepoint, which others may still undo: end begin_nested(), and let no "
                "session join a connection's transaction"
            )
        if not all(commits for _, _, commits, *_ in begun):
            raise ListenerError(
                "the session is bound to a connection whose transaction somebody else commits: bind it to the engine, "
                "or pass the connection itself"
            )

    def end(self) -> None:
        """Release the session: others may commit it, and it may be enlisted again."""
        self.let_commit()
        self._owner.release()

    def let_commit(self) -> None:
        """Allow a commit of the session."""
        connection, self._committed_through = self._committed_through, None
        if connection is not None:
            sa.event.remove(connection, "commit", _refuse_commit)

    def _require_same_fence(self) -> None:
        connection, fence = self._connection, self._listener._fence
        try:
            fence_id = fence.read_id(connection, anywhere=True)
        except sa.exc.DBAPIError as problem:
            if is_lock_problem(problem) or problem.connection_invalidated:
                raise
            with fence.connect() as own_connection:
                fence.read_id(own_connection)  # raises when there is no fence
            raise FenceError(
                f"the session's database has no fence like that of {fence.where}: it is another database"
            ) from problem
        if fence_id != self.store_id:
            raise FenceError(
                f"the session's database has fence {fence_id}, and the listener's {self.store_id}: it is another "
                "database"
            )

    def flush(self) -> None:
        """Flush the session to the database, so that its errors show before messages are sent.

        Raises
        ------
        FenceError
            When the session is of another database than the listener's fence.
        ListenerError
            When the session's transaction is not the one that began.
        """
        self._require_whole()
        if isinstance(self._session, Session):
            self._session.flush()
            self._require_whole()  # the flush may have begun with another database
        try:
            end_savepoint(self._connection, keep=True)
        except TransactionEndedError as problem:
            raise ListenerError(
                "the session's database transaction ended within transaction(): by a statement that does it (ON "
                "CONFLICT ROLLBACK, MariaDB's DDL), or by an error after which the session went on. Nothing was sent"
            ) from problem
        # After the session's own statements: in SQLite a transaction that reads first cannot wait for the write lock.
        self._require_same_fence()

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Insert the fence row in the session's database transaction, and commit it.

        Raises
        ------
        LocalTransactionError
            When a check was faster, or the session has ended: its changes are gone, and nothing runs again.
        """
        if self._ended:
            raise LocalTransactionError(
                f"the session that half batch {batch.half_id!r} was sent with has ended: send it again, with its rows"
            )
        self._ended = True
        self._require_whole()
        recorded = self._listener._fence.claim(self._connection, batch, State(EXECUTED))
        if recorded is not None:
            raise LocalTransactionError(
                f"a check has rolled back half batch {batch.half_id!r} before its session committed: nothing was done. "
                "Send it again, with its rows"
            )
        self._listener._fence.require_not_too_late(batch)
        self.let_commit()
        self._session.commit()
        self.end()
        self._require_committed(batch)
        return COMMIT_MESSAGE

    def _require_committed(self, batch: HalfBatch) -> None:
        """Require that another connection sees the fence row: commit() may have ended only a savepoint, or a part."""
        fence = self._listener._fence
        with fence.transaction(self._listener._lock_timeout, write=False) as connection:
            row = fence.read(connection, [batch]).get((batch.half_id, batch.attempt))
        if row is None or fence.recorded(row, batch) != Recorded.of(State(EXECUTED), batch.rows, batch.is_all):
            raise LocalTransactionError(
                f"the session of half batch {batch.half_id!r} said that it has committed, and its fence row is not "
                "there for others: a hook of the session rolled back, or an outer transaction is open. Its messages "
                "stay pending; a check settles them"
            )

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return self._listener.check_local_transaction(batch)


def _refuse_commit(_: sa.Connection) -> None:
    raise ListenerError(
        "the session must not be committed within transaction(), or its rows would be there without their messages: "
        "leave the with statement, which commits both"
    )


def create_fence(
    url_or_engine: Address,
    *,
    fence_table: str = FENCE_TABLE,
    schema: str | None = None,
    moved: bool = False,
) -> str:
    """Make a database's fence from a script: its tables and a random id, unless they exist.

    ``moved=True`` binds the fence to this database: it was moved, upgraded or restored, and is not a copy beside
    another one.

    Returns
    -------
    str
        The fence's id.
    """
    return Fence(url_or_engine, fence_table, schema).create(moved)


def split(batch: HalfBatch) -> Iterator[HalfTransaction]:
    """Yield the transactions of a half batch in the order of ``batch.transactions``, each with its messages."""
    transactions, messages = batch.transactions, batch.messages()
    owner = pc.index_in(messages["transaction_id"], value_set=transactions["transaction_id"].combine_chunks())
    # The sort is stable, so messages of one transaction stay in send order.
    grouped = _GroupedMessages(messages.take(pc.sort_indices(owner)).combine_chunks())
    start = 0
    for row in transactions.to_pylist():
        length = row["messages"]
        yield HalfTransaction(row["transaction_id"], row["transaction_key"], batch, grouped, start, length)
        start += length


def _transaction_verdict(result: object, transaction: HalfTransaction) -> Verdict:
    if result is None:
        return _COMMIT
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
    if _UNKNOWN not in verdicts.distinct:
        return
    count = batch.transactions.num_rows
    unknown = verdicts.counts(count)[UNKNOWN]
    if unknown:
        raise VerdictError(
            f"work returned UNKNOWN for {unknown} of {count} transactions of half batch "
            f"{batch.half_id!r}: its database transaction commits or it does not. Return COMMIT_MESSAGE or "
            "ROLLBACK_MESSAGE, or raise an exception to leave the half batch pending"
        )
