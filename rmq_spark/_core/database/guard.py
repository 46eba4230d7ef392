"""Says who may end the transaction of a connection: its one owner, and never the ``work`` that runs in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import sqlalchemy as sa

from rmq_spark._core.database.error_codes import explain_lost_statement, is_savepoint_gone
from rmq_spark.errors import ListenerError, TransactionEndedError

_SERVER_STATUS_IN_TRANS = 1  # of the MySQL protocol


class Owner:
    """The right to commit the transaction of a driver's connection. A connection has one owner at a time, even when
    several objects of SQLAlchemy share it: sessions bound to it, or users of a pool that shares one connection."""

    def __init__(self) -> None:
        self._owned: tuple[sa.PoolProxiedConnection, object] | None = None

    def take(self, connection: sa.Connection) -> None:
        """Own a connection until :meth:`release`, or raise ListenerError when it has another owner."""
        checked_out = connection.connection
        driver = checked_out.dbapi_connection
        self._owned = checked_out, driver
        owner = _OWNERS.setdefault(id(driver), self)
        if owner is not self and owner._has(driver):
            self._owned = None
            raise ListenerError(
                "the connection is in another transaction() of a producer, or in that of a listener or an inbox: one "
                "at a time commits it. Send with the transaction that is open, or give each a connection"
            )
        _OWNERS[id(driver)] = self

    def _has(self, driver: object) -> bool:
        """Whether the connection is still checked out of its pool, from which others could get it."""
        owned = self._owned
        return owned is not None and owned[0].dbapi_connection is driver

    def release(self) -> None:
        owned, self._owned = self._owned, None
        if owned is not None and _OWNERS.get(id(owned[1])) is self:
            del _OWNERS[id(owned[1])]

    @contextmanager
    def owning(self, connection: sa.Connection) -> Iterator[None]:
        self.take(connection)
        try:
            yield
        finally:
            self.release()


_OWNERS: dict[int, Owner] = {}
"""By the id of a driver's connection, which the owner keeps alive. Without a lock, which a fork could copy held."""

ENDED = (
    "work ended the database transaction that it was given: by a COMMIT or ROLLBACK of its own, by a statement that "
    "does it (ON CONFLICT ROLLBACK, executescript, MariaDB's DDL), or by going on after an error that ended it (a "
    "deadlock). A part of what it wrote may be committed"
)


@contextmanager
def no_commit_within(connection: sa.Connection) -> Iterator[None]:
    """Keep ``work`` from committing, rolling back or closing its connection, whose transaction the caller commits.

    When ``work`` asks SQLAlchemy to do so, that is a ListenerError, and nothing has happened. When ``work`` runs a
    statement after the transaction has ended in some other way, it is a TransactionEndedError.
    """
    info = connection.info  # the driver connection's, which all objects of SQLAlchemy share
    info[_AT_WORK] = True
    _WORKING.add(connection)
    try:
        yield
    finally:
        _WORKING.discard(connection)
        for marked in (info, {} if connection.invalidated or connection.closed else connection.info):
            marked.pop(_AT_WORK, None)  # info is cleared when the connection is lost, and copied when work detaches it


_AT_WORK = "txmq_at_work"
_WORKING: WeakSet[sa.Connection] = WeakSet()
"""Connections that ``work`` has. One that loses its driver's connection gets a new one without the mark."""


def _refuse_end(connection: sa.Connection) -> None:
    if connection in _WORKING or (not connection.invalidated and _AT_WORK in connection.info):
        raise ListenerError(
            "work must not commit or roll back the connection that it is given, nor close it: return, or raise "
            "txmq.Rollback, and the listener does it with the fence rows"
        )


def _require_open(connection: sa.Connection, *_: Any) -> None:
    if _AT_WORK in connection.info and _is_idle(connection.connection.dbapi_connection):
        raise TransactionEndedError(ENDED)


_GUARDED: WeakSet[sa.Engine] = WeakSet()
_GUARDS = (
    ("commit", _refuse_end),
    ("rollback", _refuse_end),
    ("before_cursor_execute", _require_open),
    ("handle_error", explain_lost_statement),
)


def add_guards(engine: sa.Engine) -> None:
    """Let an engine's connections call the guards of ``work``, and explain their errors. Both stay with the engine,
    because SQLAlchemy adds and removes them slowly."""
    if engine not in _GUARDED:
        for event, guard in _GUARDS:
            sa.event.listen(engine, event, guard)
        _GUARDED.add(engine)  # last: another thread may use the engine at once


_SAVEPOINT = "txmq_work"


def begin_savepoint(connection: sa.Connection) -> None:
    """Set a savepoint where work begins. It is not SQLAlchemy's nested transaction, which work could end."""
    connection.exec_driver_sql(f"SAVEPOINT {_SAVEPOINT}")


def end_savepoint(connection: sa.Connection, *, keep: bool) -> None:
    """Keep or undo what was written since :func:`begin_savepoint`, and so prove that the transaction is still the same.

    A database forgets its savepoints when their transaction ends, however it ends, even if another one begins after. A
    savepoint that is gone is a TransactionEndedError.
    """
    try:
        if not keep:
            connection.exec_driver_sql(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
        connection.exec_driver_sql(f"RELEASE SAVEPOINT {_SAVEPOINT}")
    except sa.exc.DBAPIError as problem:
        if is_savepoint_gone(problem):
            raise TransactionEndedError(ENDED) from problem
        raise


def _is_idle(driver: Any) -> bool:
    """Return True when the driver knows, without asking the database, that no transaction is open."""
    if hasattr(driver, "in_transaction"):  # sqlite3
        return not driver.in_transaction
    if hasattr(driver, "server_status"):  # PyMySQL
        return not driver.server_status & _SERVER_STATUS_IN_TRANS
    status = getattr(getattr(driver, "info", None), "transaction_status", None)  # psycopg
    return status is not None and status == 0
