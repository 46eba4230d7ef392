"""Runs a local transaction in a database, together with a fence row for each transaction.

With the fence a check can promise that a local transaction *never will* happen. Execute and check both insert the
transaction's id, and the primary key lets only one of them do so. See :class:`SqlTransactionListener`. ::

    execute first    execute   BEGIN  insert id (started)  work  set executed  COMMIT
                     check                                 insert id, which waits     finds executed: COMMIT_MESSAGE
                                                           (or waits too long:        UNKNOWN)

    check first      check     BEGIN  insert id (tombstone)  COMMIT                   ROLLBACK_MESSAGE
                     execute                                        BEGIN  insert id  finds tombstone: FencedError

What a check makes of the committed state of a row:

===============  ======================================  ===========================================================
state            written by                              a check answers
===============  ======================================  ===========================================================
no row           nobody                                  UNKNOWN; after ``rollback_after`` it inserts a tombstone
``executed``     execute, when work's rows commit        COMMIT
``rolled_back``  execute, when work rolled back          ROLLBACK, refused: it is final, with the reason of work
``tombstone``    a check, or execute after that check    ROLLBACK: it never happened, and a replay runs it again
``started``      execute, before work                    nothing (FenceError): work ended the database transaction
===============  ======================================  ===========================================================
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

# Imported first: it says what to install when SQLAlchemy is missing.
from rmq_spark.listeners.database import (  # isort: skip
    IN_INNODB,
    PLACE_CHARS_MAX,
    Database,
    Owner,
    alike,
    begin_savepoint,
    end_savepoint,
    exact_text,
    insert_absent,
    is_lock_problem,
    no_commit_within,
    place_of,
    require_exact,
)

import sqlalchemy as sa
from sqlalchemy.orm import Session

from rmq_spark.config import FENCE_RETENTION_S_MIN, flag, named, seconds
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
from rmq_spark.listener import ExecutedAttempt, TransactionListener, Verdicts, require_executing, require_work
from rmq_spark.machine import MACHINE, Machine
from rmq_spark.message import Message
from rmq_spark.redaction import traceback_of
from rmq_spark.transaction import (
    COMMIT_MESSAGE,
    UNKNOWN,
    HalfBatch,
    LocalTransactionState,
    Rollback,
    Verdict,
    VerdictArray,
    decode_json,
    message_name,
    normalize_verdicts,
    returned,
    rollback,
    verdict_of,
)

if TYPE_CHECKING:
    from rmq_spark.commitlog.log import CommitLog

logger = logging.getLogger(__name__)

ROLLBACK_AFTER_S = 60.0
LOCK_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S_MIN = 0.001
LOCK_TIMEOUT_S_MAX = 24 * 3600.0
"""PostgreSQL and SQLite keep a lock timeout as milliseconds in an int32, which holds 24 days."""
FENCE_TABLE = "txmq_fence"
PRUNED_AT_ONCE = 10_000
"""Rows that prune looks at in one database transaction, and that others read at once."""

STARTED = "started"
"""Committed only when work ended the database transaction in its middle. Then no check can answer."""
EXECUTED = "executed"
ROLLED_BACK = "rolled_back"
TOMBSTONE = "tombstone"
PRUNED = "pruned"
"""The state of a row that belongs to no transaction: when rows of a log were last pruned."""

_IDS_PER_SELECT = 500
_IN_LOG = "@"
"""Separates a half id, which has none of these, from the id of its commit log."""
# Rows of the table <fence_table>_id. A fence of an earlier version has only the first, until create_fence runs again.
_THE_ID = 1
_THE_PLACE = 2
_ENDS = (EXECUTED, ROLLED_BACK, TOMBSTONE)
_COMMIT = Verdict(COMMIT_MESSAGE)
_UNKNOWN = Verdict(UNKNOWN)
_BURIED = rollback("it never happened: a check found no fence row of it, and put a tombstone there")


def _verdict(state: _State, transaction_id: str) -> Verdict:
    """Return the verdict of a fence row.

    Raises
    ------
    FenceError
        When work ended the database transaction in its middle, or the row was changed by hand or by a failing disk.
    """
    word = state.word
    if word == STARTED:
        raise FenceError(
            f"work ended the database transaction of {transaction_id!r} in its middle, so a part of what it wrote may "
            "be in the database: no check can answer. Look there, undo or finish that part, and settle the half batch "
            "with log.resolve"
        )
    if word not in _ENDS:
        raise FenceError(
            f"the fence row of transaction {transaction_id!r} says {word!r}, which is not one of "
            f"{', '.join(_ENDS)}: the database is damaged, or the row was changed by hand"
        )
    if word == TOMBSTONE:
        return _BURIED
    return _COMMIT if word == EXECUTED else rollback(state.reason, refused=True)


class _State(NamedTuple):
    """What a fence row says: one of the words of this module, and why ``work`` rolled back."""

    word: str
    reason: str | None = None


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
        """Return its messages' JSON bodies as columns; see :meth:`HalfBatch.decode`. An error counts its own bodies
        alone."""
        return self._all.decode(schema, on_error, self._start, self._length)


class _GroupedMessages:
    """All messages of a half batch, those of one transaction together."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._decoded: dict[tuple[str | pa.Schema, str], pa.Table | None] = {}

    def decode(self, schema: str | pa.Schema, on_error: str, start: int, length: int) -> pa.Table:
        # Decode once for all transactions: small ones would spend most of their time in a JSON reader each.
        if (schema, on_error) not in self._decoded:
            try:
                self._decoded[schema, on_error] = decode_json(self.table["body"], schema, on_error)
            except MessageError:
                self._decoded[schema, on_error] = None
        decoded = self._decoded[schema, on_error]
        if decoded is None:
            # A wrong body must fail for its own transaction, not for all.
            mine = self.table.slice(start, length)
            return decode_json(mine["body"], schema, on_error, partial(message_name, mine))
        return decoded.slice(start, length)


BatchWork: TypeAlias = Callable[[sa.Connection, HalfBatch], Verdicts]
TransactionWork: TypeAlias = Callable[[sa.Connection, HalfTransaction], LocalTransactionState | Rollback | str | None]
MessagesAgain: TypeAlias = Callable[[sa.Connection, ExecutedAttempt], "pa.Table | Sequence[Message] | None"]


class SqlTransactionListener(TransactionListener):
    """Runs ``work`` in one database transaction with the fence rows of a half batch.

    Parameters
    ----------
    url_or_engine : str, sqlalchemy.URL or sqlalchemy.Engine
        The database that ``work`` writes to: SQLite, PostgreSQL, MariaDB or MySQL. Another database is refused. From a
        URL the listener makes an engine when it first needs one, in the process that needs it.
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
        ``batch.verdicts(...)``        a verdict per transaction. All that it wrote stays, also when each is rolled
                                       back: for those it writes nothing, or what records the refusal
        ``raise txmq.Rollback(why)``   as ``ROLLBACK_MESSAGE``; the op marker and the fence keep why
        ``UNKNOWN``                    refused (VerdictError): a database transaction commits or it does not
        any other exception            the database transaction is undone, the half batch stays pending
        the transaction is ended       TransactionEndedError; a part may be committed, so no check answers
        ============================== ======================================================================

        ``None`` means COMMIT here, while a listener's own ``None`` means UNKNOWN. Work that returned without an error
        has written its rows, and they commit with the fence.
    per_transaction : bool, default False
        Calls ``work(connection, transaction)`` for each transaction (a key's messages, a message, or the half batch),
        with a :class:`HalfTransaction`, in a savepoint of its own. ROLLBACK_MESSAGE or ``raise txmq.Rollback(why)``
        undoes that transaction alone. This is easier than one call for all keys, and slower.
    rollback_after : float, default 60.0
        Seconds from prepare (or reopen). A check that finds no fence row answers UNKNOWN while the half batch is
        younger. Later it inserts a tombstone and answers ROLLBACK. Give it the time that ``work`` usually needs: a
        check that comes too early costs another attempt, never correctness. A query that starts again does not wait
        for its own half batch.
    lock_timeout : float, default 5.0
        Seconds that a check waits for a fence row which a running local transaction holds. Then it answers UNKNOWN.
    fence_table : str, default "txmq_fence"
        Name of the fence table. The table ``<fence_table>_id`` keeps the fence's id.
    schema : str, optional
        The database schema of both tables.
    messages : callable, optional
        ``messages(connection, attempt)`` returns the messages of an :class:`~rmq_spark.ExecutedAttempt` again, out of
        the rows that ``work`` wrote for it: a table with the columns that the sink takes, or a list of
        :class:`~rmq_spark.Message`; None when it cannot. ``txmq reconcile`` calls it after a restore for messages that
        the log has lost.

    Notes
    -----
    Call :meth:`create_fence` once for a database (or :func:`create_fence` in a script, with a user that may create
    tables). Each half batch keeps the fence's random id. So a check against another database, or an empty one, is an
    error instead of a wrong answer. So is a check against a copy, as far as a database can tell: a SQLite file knows
    its inode, PostgreSQL its cluster and database, MariaDB and MySQL only the database's name. A database restored
    from a backup has the id but not the newest rows: settle what is pending first, then call
    ``create_fence(moved=True)``.

    In one database transaction, execute inserts the transaction ids, runs ``work``, records what it rolled back, and
    commits. When the connection breaks at the commit, nobody knows whether it was made. The exception leaves the half
    batch pending, and the check reads what the database has. For a transaction that a check has rolled back, execute
    raises :class:`~rmq_spark.errors.FencedError` *before* ``work`` runs. The check's verdict stands, and the next
    attempt runs the work.

    Fence rows must outlive their half batches: see :meth:`prune`.
    """

    @named
    def __init__(
        self,
        url_or_engine: str | sa.URL | sa.Engine,
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
        self._fence = _Fence(url_or_engine, fence_table, schema)
        self.only_checks = work is None
        self._work: Callable[[sa.Connection, Any], Any] = self._refuse if work is None else work
        self._per_transaction = flag(per_transaction, "per_transaction")
        self.rollback_after_s = seconds(rollback_after, "rollback_after")
        self._lock_timeout = seconds(lock_timeout, "lock_timeout", LOCK_TIMEOUT_S_MIN, maximum=LOCK_TIMEOUT_S_MAX)

    def __repr__(self) -> str:
        work = "" if self.only_checks else f", work={getattr(self._work, '__qualname__', '?')}"
        return f"SqlTransactionListener({self._fence.where!r}{work})"

    def __getstate__(self) -> object:
        raise ListenerError(
            "a SqlTransactionListener holds database connections and cannot be pickled: make it in the "
            "process that uses it, from a function that transactionListener='module:function' names"
        )

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

        ``moved=True`` says that the fence belongs to this database from now on: the database was moved, upgraded or
        restored, and is not a copy beside another one.
        """
        self.store_id = self._fence.create(moved)
        return self.store_id

    def prune(self, older_than: float, *logs: CommitLog) -> int:
        """Delete fence rows older than ``older_than`` seconds, and return how many were deleted.

        It deletes rows of half batches that have left the table ``half`` of these logs: those are settled, and neither
        a check nor a replay asks about them. Without upkeep nothing leaves. Rows of other logs stay.

        Parameters
        ----------
        older_than : float
            Seconds, at least 7 days: a driver may wake up late.
        *logs : CommitLog

        Raises
        ------
        OptionError
            For less than 7 days, or without a log.
        FenceError
            When the database has no fence.
        """
        return sum(self.pruning(older_than, *logs))

    def pruning(self, older_than: float, *logs: CommitLog) -> Iterator[int]:
        """Do what :meth:`prune` does, a page of rows at a time; yields how many rows of each were deleted."""
        seconds(older_than, "older_than")
        if older_than < FENCE_RETENTION_S_MIN:
            raise OptionError(
                f"older_than={older_than!r} s is less than 7 days ({FENCE_RETENTION_S_MIN:.0f} s): fence "
                "rows must outlive the half batches that they speak for"
            )
        if not logs:
            raise OptionError("prune needs the commit logs whose rows may go: write prune(older_than, log)")
        for log in logs:
            if not callable(getattr(log, "still_in_half", None)):
                raise OptionError(
                    f"prune got {type(log).__name__} {str(log)[:100]!r}: open logs are expected, one after "
                    "the other, as prune(older_than, CommitLog.open(path), ...)"
                )
        doubt_s = max(log.clock_doubt_s() for log in logs)
        return self._fence.prune(older_than + doubt_s, {log.id: log.still_in_half for log in logs})

    def pruning_in_turn(self, older_than: float, log: CommitLog, every: float) -> Iterator[int]:
        """Do what :meth:`pruning` does, unless somebody has begun it for this log in the last ``every`` seconds."""
        pages = self.pruning(older_than, log)
        if self._fence.take_turn(log.id, every):
            yield from pages

    def executed_since(self, log_id: str, since: datetime) -> Iterator[ExecutedAttempt]:
        """Yield each attempt of a log's half batches that this database has executed since a time (UTC)."""
        return self._fence.executed_since(log_id, since)

    def messages_again(self, attempt: ExecutedAttempt) -> pa.Table | Sequence[Message] | None:
        """Return the messages of an attempt again, from the rows that it wrote; None when nobody can make them."""
        if self._messages is None:
            return None
        with self._fence.transaction(write=False) as connection:
            return self._messages(connection, attempt)

    @property
    def machine(self) -> Machine:
        """The machine whose clock tells the age of half batches and fence rows."""
        return self._fence.machine

    @machine.setter
    def machine(self, machine: Machine) -> None:
        self._fence.machine = machine

    def enlist(self, session: sa.Connection | Session) -> EnlistedSession:
        """The listener of one half batch, whose local transaction is what an open session holds."""
        return EnlistedSession(self, session)

    # ------------------------------------------------------------------ execute
    def _refuse(self, connection: sa.Connection, batch: HalfBatch | HalfTransaction) -> None:
        require_executing(self, repr(batch))

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Claim the fence rows, run ``work`` and commit, in one database transaction.

        Returns
        -------
        VerdictArray
            COMMIT_MESSAGE or ROLLBACK_MESSAGE for each row of ``batch.transactions``. For an attempt that ran before,
            it is what that run recorded; ``work`` does not run again.

        Raises
        ------
        FencedError
            A check rolled back one of these transactions. ``work`` did not run, and none of them ever will under this
            attempt.
        FenceError
            The database has no fence, or another one than when the half batch was prepared; or an earlier run of
            ``work`` ended its transaction in the middle.
        TransactionEndedError
            ``work`` ended the database transaction. A part of what it wrote may be committed.
        """
        ids: list[str] = batch.transactions["transaction_id"].to_pylist()
        try:
            fenced, verdicts = self._execute(ids, batch)
        except TransactionEndedError as problem:
            self._keep_started(ids, batch)
            raise TransactionEndedError(
                f"{problem}. Half batch {batch.half_id!r} stays pending, and no check answers for it: look what is in "
                "the database, undo or finish it, and settle the half batch with log.resolve"
            ) from problem
        if fenced:
            raise FencedError(
                f"attempt {batch.attempt} of half batch {batch.half_id!r} came too late: a check has rolled back "
                f"{len(fenced)} of its {len(ids)} transactions (the first is {fenced[0]!r}). None of them ran, and "
                "none will under this attempt; the next attempt runs them"
            )
        return VerdictArray.of(verdicts)

    def _execute(self, ids: Sequence[str], batch: HalfBatch) -> tuple[list[str], list[Verdict]]:
        """Run one database transaction. Return the ids that a check rolled back; when there are none, the verdicts."""
        with self._fence.transaction() as connection:
            self._require_same_fence(connection, [batch])
            recorded = self._fence.claim(connection, dict.fromkeys(ids, batch), STARTED)
            fenced = [i for i in ids if i in recorded and recorded[i].word == TOMBSTONE]
            if fenced:
                self._end_attempt(connection, ids, recorded, batch)
                return fenced, []
            if len(recorded) < len(ids):
                self._fence.require_not_too_late(batch)
            return [], self._run_fresh(connection, ids, recorded, batch)

    def _keep_started(self, ids: Sequence[str], batch: HalfBatch) -> None:
        """Insert a row for each transaction that has lost its own, so that no check answers "it never happened"."""
        try:
            with self._fence.transaction(self._lock_timeout) as connection:
                self._fence.claim(connection, dict.fromkeys(ids, batch), STARTED)
        except (sa.exc.DBAPIError, FenceError) as problem:
            logger.error(
                "%r: could not note that its work ended the database transaction: %s", batch, traceback_of(problem)
            )

    def _end_attempt(
        self, connection: sa.Connection, ids: Sequence[str], recorded: Mapping[str, _State], batch: HalfBatch
    ) -> None:
        """Write a tombstone for each id that has no row: FencedError says of *all* that they never will run."""
        others = sum(state.word != TOMBSTONE for state in recorded.values())
        if others:
            raise LocalTransactionError(
                f"{len(recorded) - others} of the {len(ids)} transactions of half batch {batch.half_id!r}, "
                f"attempt {batch.attempt}, were rolled back by a check, and {others} ran before: nothing was "
                "done; let a check settle each of them"
            )
        self._fence.set_state(connection, [i for i in ids if i not in recorded], TOMBSTONE)

    def _run_fresh(
        self, connection: sa.Connection, ids: Sequence[str], recorded: Mapping[str, _State], batch: HalfBatch
    ) -> list[Verdict]:
        """Run ``work`` for the transactions that did not run before, and return a verdict for each transaction."""
        said = {i: _verdict(state, i) for i, state in recorded.items()}
        fresh = [i not in said for i in ids]
        if not any(fresh):
            logger.info("%r ran before: what it recorded is answered, its work does not run again", batch)
            return [said[i] for i in ids]
        ran = self._run(connection, batch, fresh)
        by_end: dict[_State, list[str]] = {}
        for i, is_fresh, verdict in zip(ids, fresh, ran, strict=True):
            if is_fresh:
                committed = verdict.state is COMMIT_MESSAGE
                end = _State(EXECUTED) if committed else _State(ROLLED_BACK, verdict.reason)
                by_end.setdefault(end, []).append(i)
        for end, some in by_end.items():
            self._fence.set_state(connection, some, *end)
        return [ran[at] if fresh[at] else said[i] for at, i in enumerate(ids)]

    def _run(self, connection: sa.Connection, batch: HalfBatch, fresh: Sequence[bool]) -> list[Verdict]:
        """Run ``work``, and return its verdict for each transaction; those that are not fresh do not run."""
        with no_commit_within(connection):
            if self._per_transaction:
                return self._run_each(connection, batch, fresh)
            if not all(fresh):
                raise LocalTransactionError(
                    f"{len(fresh) - sum(fresh)} of the {len(fresh)} transactions of half batch "
                    f"{batch.half_id!r}, attempt {batch.attempt}, ran before, and work handles a half batch "
                    "as a whole: nothing was done; let a check settle those first"
                )
            return self._run_all(connection, batch)

    def _run_all(self, connection: sa.Connection, batch: HalfBatch) -> list[Verdict]:
        begin_savepoint(connection)
        result = returned(self._work, connection, batch)
        verdicts = normalize_verdicts(COMMIT_MESSAGE if result is None else result, batch)
        count = batch.transactions.num_rows
        _refuse_unknown(verdicts, batch)
        whole = result is None or isinstance(result, (str, Rollback))
        end_savepoint(connection, keep=not whole or verdicts.distinct[0].state is COMMIT_MESSAGE)
        return verdicts.each(count)

    def _run_each(self, connection: sa.Connection, batch: HalfBatch, fresh: Sequence[bool]) -> list[Verdict]:
        verdicts = [_COMMIT] * len(fresh)
        for at, transaction in enumerate(split(batch)):
            if not fresh[at]:
                continue
            begin_savepoint(connection)
            verdicts[at] = _one_verdict(returned(self._work, connection, transaction), transaction)
            end_savepoint(connection, keep=verdicts[at].state is COMMIT_MESSAGE)
        return verdicts

    # ------------------------------------------------------------------ check
    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Return what the fence says of each transaction. An old half batch without a fence row gets a tombstone.

        Returns
        -------
        VerdictArray
            For each row of ``batch.transactions``: COMMIT_MESSAGE (executed), ROLLBACK_MESSAGE (``work`` rolled back:
            refused, with its reason; or a check has inserted a tombstone, and ``work`` never will run), or UNKNOWN
            (younger than ``rollback_after`` and not the asking query's own, or the local transaction is running right
            now and holds the lock).

        Raises
        ------
        FenceError
            The database has no fence, or another one than when the half batch was prepared, or ``work`` ended its
            transaction in the middle: no check can answer.
        """
        try:
            (answer,) = self._checked([batch])
        except sa.exc.DBAPIError as problem:
            if not is_lock_problem(problem):
                raise
            # Somebody holds the lock, so the local transaction is running, and nobody knows yet how it ends.
            logger.info("%r: another transaction holds its fence rows; the answer is UNKNOWN", batch)
            batch.reason = "another database transaction holds its fence rows, so its local transaction is running"
            return UNKNOWN
        if isinstance(answer, FenceError):
            raise answer
        return answer

    def check_local_transactions(self, batches: Sequence[HalfBatch]) -> Sequence[Verdicts | Exception]:
        """Return what :meth:`check_local_transaction` returns for each half batch, or its FenceError in that place. The
        fence is read once for all, and all tombstones are inserted in one database transaction.

        Raises
        ------
        FenceError, sqlalchemy.exc.DBAPIError
            One of them has rows of another log, or somebody holds a row: ask about each alone.
        """
        return self._checked(batches)

    def _checked(self, batches: Sequence[HalfBatch]) -> list[VerdictArray | FenceError]:
        owners = {i: batch for batch in batches for i in batch.transactions["transaction_id"].to_pylist()}
        with self._fence.transaction(self._lock_timeout, write=False) as connection:
            self._require_same_fence(connection, batches)
            recorded = self._fence.read(connection, list(owners), batches[0])
        now, wait = self.machine.now(), timedelta(seconds=self.rollback_after_s)
        absent = {i: b for i, b in owners.items() if i not in recorded}
        if absent := {i: b for i, b in absent.items() if b.restarted or now - _utc(b.prepared_at) >= wait}:
            recorded |= self._bury(absent)
        return [self._answer(batch, recorded) for batch in batches]

    def _answer(self, batch: HalfBatch, recorded: Mapping[str, _State]) -> VerdictArray | FenceError:
        ids: list[str] = batch.transactions["transaction_id"].to_pylist()
        if any(i not in recorded for i in ids):
            wait = f"rollback_after ({self.rollback_after_s:g} s) is not over"
            batch.reason = f"the database has no fence row of it yet, and {wait}"
        try:
            return VerdictArray.of([_verdict(recorded[i], i) if i in recorded else _UNKNOWN for i in ids])
        except FenceError as problem:
            return problem

    def _bury(self, absent: Mapping[str, HalfBatch]) -> dict[str, _State]:
        """Insert a tombstone for each id, unless execute was faster, and return the state of each row."""
        with self._fence.transaction(self._lock_timeout) as connection:
            # Once more in this transaction: the fence may have been dropped meanwhile, or the database failed over.
            self._require_same_fence(connection, list(absent.values()))
            faster = self._fence.claim(connection, absent, TOMBSTONE)
        return dict.fromkeys(absent, _State(TOMBSTONE)) | faster

    def _require_same_fence(self, connection: sa.Connection, batches: Sequence[HalfBatch]) -> None:
        found = self._fence.read_id(connection)
        for batch in batches:
            self._require_fence_of(batch, found)

    def _require_fence_of(self, batch: HalfBatch, found: str) -> None:
        if batch.fence_id is None:
            raise FenceError(
                f"half batch {batch.half_id!r} was prepared without a fence, so this fence ({found}) cannot "
                "speak for it: use the listener that it was prepared with, or settle it with log.resolve"
            )
        if batch.fence_id != found:
            raise FenceError(
                f"half batch {batch.half_id!r} was prepared with fence {batch.fence_id}, but "
                f"{self._fence.where} has fence {found}: another database (or the fence was made anew). "
                "Point the listener to the right one"
            )


class EnlistedSession(TransactionListener):
    """The local transaction of one half batch is what an open session holds: the fence row joins it, and it commits.

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
        """Begin the session's database transaction, unless it has begun, and require that this can be enlisted.

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
        self._transaction = self._session.get_transaction()
        self._require_whole()
        self._begin_in_database()
        self._committed_through = connection
        sa.event.listen(connection, "commit", _refuse_commit)

    def _begin_in_database(self) -> None:
        """Begin a transaction where the driver has not, and set a savepoint, which is there for as long as that is."""
        connection = self._connection
        driver: Any = connection.connection.dbapi_connection
        if connection.dialect.name == "sqlite" and not driver.in_transaction:
            connection.exec_driver_sql("BEGIN")  # else a savepoint would be a transaction of its own
        begin_savepoint(connection)

    def _require_whole(self) -> None:
        """Require that a commit of the session is the commit of one database transaction, and of the one that began."""
        if self._session.get_transaction() is not self._transaction:
            raise ListenerError(
                "the session was committed, rolled back or closed within transaction(): what it held is not known any "
                "more. Nothing was sent; leave the end of the session to transaction()"
            )
        begun = getattr(self._transaction, "_connections", {}).values()  # of a Session: with whether it commits them
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
        """The session may be committed by others, and enlisted again."""
        self.let_commit()
        self._owner.release()

    def let_commit(self) -> None:
        """The session may be committed now."""
        connection, self._committed_through = self._committed_through, None
        if connection is not None:
            sa.event.remove(connection, "commit", _refuse_commit)

    def _require_same_fence(self) -> None:
        connection, fence = self._connection, self._listener._fence
        try:
            found = fence.read_id(connection, anywhere=True)
        except sa.exc.DBAPIError as problem:
            if is_lock_problem(problem):
                raise
            with fence.connect() as own:
                fence.read_id(own)  # raises when nobody has made the fence
            raise FenceError(
                f"the session's database has no fence like that of {fence.where}: it is another database"
            ) from problem
        if found != self.store_id:
            raise FenceError(
                f"the session's database has fence {found}, and the listener's {self.store_id}: it is another database"
            )

    def flush(self) -> None:
        """Send what the session holds to the database, so that what is wrong with it shows before anything is sent.

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
            self._require_whole()  # a flush may have begun with another database
        try:
            end_savepoint(self._connection, keep=True)
        except TransactionEndedError as problem:
            raise ListenerError(
                "the session's database transaction ended within transaction(): by a statement that does it (ON "
                "CONFLICT ROLLBACK, MariaDB's DDL), or by an error after which the session went on. Nothing was sent"
            ) from problem
        # Not before the session's own statements: in SQLite, who reads first cannot wait for the lock to write.
        self._require_same_fence()

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Let the fence rows join the session's database transaction, and commit it.

        Raises
        ------
        LocalTransactionError
            When a check was faster, or the session has ended: what it held is gone, and is not run again.
        """
        if self._ended:
            raise LocalTransactionError(
                f"the session that half batch {batch.half_id!r} was sent with has ended: send it again, with its rows"
            )
        self._ended = True
        self._require_whole()
        ids = batch.transactions["transaction_id"].to_pylist()
        recorded = self._listener._fence.claim(self._connection, dict.fromkeys(ids, batch), EXECUTED)
        if recorded:
            raise LocalTransactionError(
                f"a check has rolled back half batch {batch.half_id!r} before its session committed: nothing was done. "
                "Send it again, with its rows"
            )
        self._listener._fence.require_not_too_late(batch)
        self.let_commit()
        self._session.commit()
        self.end()
        self._require_committed(ids, batch)
        return COMMIT_MESSAGE

    def _require_committed(self, ids: Sequence[str], batch: HalfBatch) -> None:
        """Another connection must see the fence rows: what commit() said may be of a savepoint, or of less than all."""
        fence = self._listener._fence
        with fence.transaction(self._listener._lock_timeout, write=False) as connection:
            seen = fence.read(connection, ids, batch)
        if any(seen.get(i) != _State(EXECUTED) for i in ids):
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
    url_or_engine: str | sa.URL | sa.Engine,
    *,
    fence_table: str = FENCE_TABLE,
    schema: str | None = None,
    moved: bool = False,
) -> str:
    """Make a database's fence from a script: its tables and a random id, unless they exist.

    ``moved=True`` says that the fence belongs to this database from now on: the database was moved, upgraded or
    restored, and is not a copy beside another one.

    Returns
    -------
    str
        The fence's id.
    """
    return _Fence(url_or_engine, fence_table, schema).create(moved)


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


def _one_verdict(result: object, transaction: HalfTransaction) -> Verdict:
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
    count = batch.transactions.num_rows
    unknown = verdicts.counts(count)[UNKNOWN]
    if unknown:
        raise VerdictError(
            f"work returned UNKNOWN for {unknown} of {count} transactions of half batch "
            f"{batch.half_id!r}: its database transaction commits or it does not. Return COMMIT_MESSAGE or "
            "ROLLBACK_MESSAGE, or raise an exception to leave the half batch pending"
        )


class _Fence(Database):
    """The fence's tables in one database, and transactions on them. It reads and writes rows and gives no verdicts."""

    def __init__(self, url_or_engine: str | sa.URL | sa.Engine, name: str, schema: str | None) -> None:
        if not isinstance(name, str) or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,55}", name) is None:
            raise OptionError(f"fence_table={name!r} is not a plain table name of at most 56 letters, digits and _")
        super().__init__(url_or_engine)
        self.machine = MACHINE
        metadata = sa.MetaData(schema=schema)
        self._rows = sa.Table(
            name,
            metadata,
            sa.Column("transaction_id", exact_text(700), primary_key=True),
            sa.Column("state", sa.String(16), nullable=False),
            # Of rolled_back: why. JSON is ASCII, which fits into a database of any encoding.
            sa.Column("reason", sa.JSON(none_as_null=True)),
            sa.Column("half_id", exact_text(700), nullable=False),
            # Its name in the log, by which a restored log is compared with the fence.
            sa.Column("app_id", exact_text(700)),
            sa.Column("batch_id", sa.BigInteger),
            sa.Column("attempt", sa.Integer, nullable=False),
            sa.Column("created_at", sa.DateTime, nullable=False),  # UTC, by the writer's clock
            **IN_INNODB,
        )
        self._id = sa.Table(
            f"{name}_id",
            metadata,
            sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("fence_id", sa.String(PLACE_CHARS_MAX), nullable=False),
            sa.Column("created_at", sa.DateTime, nullable=False),
            **IN_INNODB,
        )
        # Statements are made once: SQLAlchemy then looks up its compiled form at once.
        key = self._rows.c.transaction_id
        self._read_ids = sa.select(self._id.c.one, self._id.c.fence_id)
        self._states: sa.Select[Any] = sa.select(key, self._rows.c.state, self._rows.c.reason, self._rows.c.half_id)
        some = key.in_(sa.bindparam("ids", expanding=True))
        self._states_of_some = self._states.where(some)
        self._update_state = (
            self._rows.update().where(some).values(state=sa.bindparam("to"), reason=sa.bindparam("why"))
        )
        self._in_place = False  # the database is known to be the one where the fence was made
        self._tried = False  # the table of rows is known to compare ids exactly and to undo what is rolled back

    # ------------------------------------------------------------------ the id
    def create(self, moved: bool) -> str:
        try:
            return self._create(moved)
        except sa.exc.DBAPIError:
            # When two processes create a table at once, one of them may fail, even with IF NOT EXISTS.
            return self._create(moved)

    def _create(self, moved: bool) -> str:
        with self.transaction() as connection:
            for table in (self._rows, self._id):
                connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
            now = self.machine.now().replace(tzinfo=None)
            place = place_of(connection)
            rows = [{"one": _THE_ID, "fence_id": secrets.token_hex(16), "created_at": now}]
            if place is not None:
                rows.append({"one": _THE_PLACE, "fence_id": place, "created_at": now})
            insert_absent(connection, self._id.c.one, rows)
            if moved and place is not None:
                here = self._id.update().where(self._id.c.one == _THE_PLACE)
                connection.execute(here.values(fence_id=place, created_at=now))
            self._try_once(connection)
            return self.read_id(connection)

    def _try_once(self, connection: sa.Connection) -> None:
        if self._tried:
            return
        now = self.machine.now().replace(tzinfo=None)
        row = {"state": STARTED, "half_id": "a trial", "attempt": 0, "created_at": now}
        rows = [{"transaction_id": i, **row} for i in alike(f"trial:{secrets.token_hex(8)}:")]
        try:
            require_exact(connection, self._rows, rows)
        except ListenerError as problem:
            raise FenceError(f"{self.where}: {problem}") from problem
        self._tried = True

    def read_id(self, connection: sa.Connection, anywhere: bool = False) -> str:
        """Return the fence's id, or raise FenceError when there is none; must be the transaction's first statement.

        With ``anywhere`` the connection may be of another database than this fence's.
        """
        try:
            rows = connection.execute(self._read_ids).all()
        except sa.exc.DBAPIError as problem:
            if anywhere or is_lock_problem(problem) or self._exists():
                raise
            rows = []
        said = {row.one: row.fence_id for row in rows}
        found = said.get(_THE_ID)
        if found is None:
            raise FenceError(
                f"{self.where} has no fence {self._id.fullname!r}: call create_fence() once, when the "
                "database is set up. If it had one, this is another database, or its tables were dropped"
            )
        if anywhere or not self._in_place:
            self._require_same_place(connection, said.get(_THE_PLACE))
        return str(found)

    def _require_same_place(self, connection: sa.Connection, made_in: str | None) -> None:
        if made_in is None:
            return
        place = place_of(connection)
        if place is not None and place != made_in:
            raise FenceError(
                f"the fence of {self.where} was made in another place ({made_in}; this is {place}). Either this is a "
                "copy, which must not speak for that database: drop its tables "
                f"{self._rows.fullname!r} and {self._id.fullname!r}, and make a fence of its own. Or it is that "
                "database itself, which was moved or restored: call create_fence(moved=True) once"
            )
        self._in_place = True

    def _exists(self) -> bool:
        with self.connect() as connection:
            return sa.inspect(connection).has_table(self._id.name, schema=self._id.schema)

    # ------------------------------------------------------------------ the rows
    def claim(self, connection: sa.Connection, owners: Mapping[str, HalfBatch], state: str) -> dict[str, _State]:
        """Insert a row for each id that has none, and return the states of the ids that had one. Each id has its half
        batch; all are of one commit log.

        It waits for another database transaction that has inserted one of the ids and is still open.
        """
        self._try_once(connection)
        now = self.machine.now().replace(tzinfo=None)
        # Everybody inserts in the same order. So of two transactions one waits for the other, and never both.
        rows = [
            {
                "transaction_id": i,
                "state": state,
                "half_id": _in_its_log(owners[i]),
                "app_id": owners[i].app_id,
                "batch_id": owners[i].batch_id,
                "attempt": owners[i].attempt,
                "created_at": now,
            }
            for i in sorted(owners)
        ]
        taken = insert_absent(connection, self._rows.c.transaction_id, rows)
        found = self._read_newest(connection, taken, owners[taken[0]]) if taken else {}
        hidden = [i for i in taken if i not in found]
        if hidden:
            raise FenceError(
                f"{self.where} refuses a second fence row for transaction {hidden[0]!r} and does not show the first: "
                "it answers from an older snapshot, or takes another id for the same. Nothing can be said; nothing "
                "was done"
            )
        return found

    def require_not_too_late(self, batch: HalfBatch) -> None:
        """Raise LocalTransactionError when a check may have left a row that is pruned by now: absence says nothing."""
        age = self.machine.now() - _utc(batch.prepared_at)
        if age >= timedelta(seconds=FENCE_RETENTION_S_MIN):
            raise LocalTransactionError(
                f"attempt {batch.attempt} of half batch {batch.half_id!r} began {age.days} days ago, and fence rows "
                f"live for {FENCE_RETENTION_S_MIN / 86_400:g}: this process slept, and nothing was done. Start it again"
            )

    def _read_newest(self, connection: sa.Connection, ids: Sequence[str], batch: HalfBatch) -> dict[str, _State]:
        """Return the states of ids that another database transaction has inserted."""
        if connection.dialect.name not in ("mariadb", "mysql"):
            return self.read(connection, ids, batch)
        # At REPEATABLE READ a plain SELECT answers from the transaction's snapshot, which may be older than the row. A
        # SELECT that locks reads the newest row. It takes one id at a time: for a list the server may scan the table,
        # and lock all of it.
        key = self._rows.c.transaction_id
        query = self._states.where(key == sa.bindparam("id")).with_for_update(read=True)
        return self._of_one_log([row for i in ids for row in connection.execute(query, {"id": i})], batch)

    def read(self, connection: sa.Connection, ids: Sequence[str], batch: HalfBatch) -> dict[str, _State]:
        """Return the states of the ids that have a row, or raise FenceError for a row of another log."""
        rows: list[sa.Row[Any]] = []
        for start in range(0, len(ids), _IDS_PER_SELECT):
            rows += connection.execute(self._states_of_some, {"ids": list(ids[start : start + _IDS_PER_SELECT])})
        return self._of_one_log(rows, batch)

    def _of_one_log(self, rows: Sequence[sa.Row[Any]], batch: HalfBatch) -> dict[str, _State]:
        for row in rows:
            log_id = row.half_id.partition(_IN_LOG)[2]
            if log_id and batch.log_id and log_id != batch.log_id:
                raise FenceError(
                    f"transaction {row.transaction_id!r} is in the fence of {self.where} already, for another commit "
                    f"log (its id is {log_id}; this one's is {batch.log_id}). Logs that share a fence need appIds and "
                    "idempotency keys of their own, or a fence_table each; a log that was made anew is another one"
                )
        return {row.transaction_id: _State(row.state, row.reason) for row in rows}

    def set_state(self, connection: sa.Connection, ids: Sequence[str], state: str, reason: str | None = None) -> None:
        """Set the state of rows that this database transaction has claimed."""
        for start in range(0, len(ids), _IDS_PER_SELECT):
            some = list(ids[start : start + _IDS_PER_SELECT])
            connection.execute(self._update_state, {"ids": some, "to": state, "why": reason})

    def executed_since(self, log_id: str, since: datetime) -> Iterator[ExecutedAttempt]:
        """Yield the attempts of a log that were executed since a time, or ended in their middle."""
        columns = self._rows.c
        chosen = (columns.half_id, columns.app_id, columns.batch_id, columns.attempt, columns.state)
        wanted = sa.and_(
            columns.state.in_((EXECUTED, STARTED)),
            columns.created_at >= _utc(since).astimezone(timezone.utc).replace(tzinfo=None),
            columns.half_id.endswith(f"{_IN_LOG}{log_id}", autoescape=True),
        )
        query = sa.select(*chosen, columns.transaction_id, columns.created_at).where(wanted).order_by(*chosen)
        with self.transaction(write=False) as connection:
            self.read_id(connection)
            found = connection.execute(query.execution_options(yield_per=PRUNED_AT_ONCE))
            for _, rows in groupby(found, key=lambda row: row[: len(chosen)]):
                some = list(rows)
                yield ExecutedAttempt(
                    some[0].half_id.removesuffix(f"{_IN_LOG}{log_id}"),
                    some[0].app_id,
                    some[0].batch_id,
                    some[0].attempt,
                    tuple(row.transaction_id for row in some),
                    _utc(min(row.created_at for row in some)),
                    is_whole=some[0].state == EXECUTED,
                )

    # ------------------------------------------------------------------ pruning
    def prune(self, older_than_s: float, logs: Mapping[str, Callable[[Collection[str]], set[str]]]) -> Iterator[int]:
        """Go through all rows in the order of their ids, and yield of each page how many were deleted.

        ``logs`` says by the id of a log which of some half batches it still has. A log is asked after the rows were
        read: a half batch is in its log before it has a row. Each database transaction is short, so nobody waits long
        for its locks.
        """
        with self.transaction(write=False) as connection:
            self.read_id(connection)
            before = min(self.machine.now(), _time_of(connection)) - timedelta(seconds=older_than_s)
        columns = self._rows.c
        key, is_old = columns.transaction_id, columns.created_at < before.replace(tzinfo=None)
        delete = self._rows.delete().where(key.in_(sa.bindparam("ids", expanding=True)), is_old)
        last: str | None = ""
        while last is not None:
            after, page_end = key > last, sa.select(key).order_by(key).offset(PRUNED_AT_ONCE - 1).limit(1)
            with self.transaction(write=False) as connection:
                last = connection.execute(page_end.where(after)).scalar()
                page = after if last is None else sa.and_(after, key <= last)
                rows = connection.execute(sa.select(key, columns.half_id).where(page, is_old)).all()
            by_log: dict[str, dict[str, list[str]]] = {log_id: {} for log_id in logs}
            for row in rows:
                half_id, _, log_id = row.half_id.partition(_IN_LOG)
                if log_id in by_log:
                    by_log[log_id].setdefault(half_id, []).append(row.transaction_id)
            deleted = 0
            for log_id, found in by_log.items():
                stay = logs[log_id](found.keys()) if found else set()
                ids = [i for half_id, some in found.items() if half_id not in stay for i in some]
                for start in range(0, len(ids), _IDS_PER_SELECT):
                    with self.transaction() as connection:
                        done = connection.execute(delete, {"ids": ids[start : start + _IDS_PER_SELECT]})
                        deleted += done.rowcount
            yield deleted

    def take_turn(self, log_id: str, every_s: float) -> bool:
        """Whether nobody has taken the turn to prune a log's rows in the last so many seconds: then it is ours.

        A row of the fence says when, under an id that no transaction has.
        """
        now = self.machine.now().replace(tzinfo=None)
        columns, turn = self._rows.c, f"{PRUNED}{_IN_LOG}{log_id}"
        row = {"transaction_id": turn, "state": PRUNED, "half_id": "", "attempt": 0, "created_at": now}
        ago = now - timedelta(seconds=every_s)
        lately = columns.created_at.between(ago, now + timedelta(seconds=every_s))
        take = self._rows.update().where(columns.transaction_id == turn, ~lately).values(created_at=now)
        with self.transaction() as connection:
            taken = insert_absent(connection, columns.transaction_id, [row])
            return not taken or connection.execute(take).rowcount == 1


def _time_of(connection: sa.Connection) -> datetime:
    """The time by the clock of the database's server."""
    queries = {"sqlite": "SELECT strftime('%s', 'now')", "postgresql": "SELECT extract(epoch FROM now())"}
    said = connection.exec_driver_sql(queries.get(connection.dialect.name, "SELECT unix_timestamp()")).scalar_one()
    return datetime.fromtimestamp(float(said), timezone.utc)


def _in_its_log(batch: HalfBatch) -> str:
    return batch.half_id if batch.log_id is None else f"{batch.half_id}{_IN_LOG}{batch.log_id}"


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment
