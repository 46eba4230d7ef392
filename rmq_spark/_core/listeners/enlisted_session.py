"""A listener of one half batch, whose local transaction is that of an open session of SQLAlchemy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from rmq_spark._core.database.error_codes import is_lock_problem
from rmq_spark._core.database.guard import Owner, begin_savepoint, end_savepoint
from rmq_spark._core.database.sql_engine import has_one_connection
from rmq_spark._core.listeners.fence import Fence
from rmq_spark._core.listeners.fence_row import EXECUTED, Recorded, State
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.transaction_listener import TransactionListener, Verdicts
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE
from rmq_spark.errors import FenceError, ListenerError, LocalTransactionError, TransactionEndedError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.sql import SqlTransactionListener


class EnlistedSession(TransactionListener):
    """A listener whose local transaction is that of an open session. The fence row joins it and commits with it. Checks
    go to the listener that the fence belongs to."""

    def __init__(
        self, listener: SqlTransactionListener, fence: Fence, lock_timeout_s: float, session: sa.Connection | Session
    ) -> None:
        if not isinstance(session, (sa.Connection, Session)):
            raise ListenerError(
                f"found {type(session).__name__}: an open sqlalchemy.orm.Session or sqlalchemy.Connection is expected "
                "(of an AsyncSession pass sync_session, within run_sync)"
            )
        self._listener, self._fence, self._lock_timeout_s = listener, fence, lock_timeout_s
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
        """Begin the session's database transaction unless it has begun, and require that it can be enlisted."""
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
        self._fence.refuse_unsafe(connection)
        if connection._is_autocommit_isolation():
            raise ListenerError(
                "the session's engine is set to AUTOCOMMIT: its rows and the messages must commit together"
            )
        pool = self._fence.engine.pool
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
        connection, self._committed_through = self._committed_through, None
        if connection is not None:
            sa.event.remove(connection, "commit", _refuse_commit)

    def _require_same_fence(self) -> None:
        connection, fence = self._connection, self._fence
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
        """Flush the session to the database, so that its errors show before messages are sent. Require that it is still
        the transaction that began, and that the database has the listener's fence."""
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
        """Insert the fence row in the session's database transaction, and commit it. When a check was faster, or the
        session has ended, its changes are gone, and nothing runs again: a LocalTransactionError."""
        if self._ended:
            raise LocalTransactionError(
                f"the session that half batch {batch.half_id!r} was sent with has ended: send it again, with its rows"
            )
        self._ended = True
        self._require_whole()
        recorded = self._fence.claim(self._connection, batch, State(EXECUTED))
        if recorded is not None:
            raise LocalTransactionError(
                f"a check has rolled back half batch {batch.half_id!r} before its session committed: nothing was done. "
                "Send it again, with its rows"
            )
        self._fence.require_not_too_late(batch)
        self.let_commit()
        self._session.commit()
        self.end()
        self._require_committed(batch)
        return COMMIT_MESSAGE

    def _require_committed(self, batch: HalfBatch) -> None:
        """Require that another connection sees the fence row: commit() may have ended only a savepoint, or a part."""
        fence = self._fence
        with fence.transaction(self._lock_timeout_s, write=False) as connection:
            rows = fence.read(connection, [batch])
        if fence.record_of(rows, batch) != Recorded.of(State(EXECUTED), batch.rows, batch.is_all):
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
