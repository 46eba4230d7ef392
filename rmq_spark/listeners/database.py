"""A user's database through SQLAlchemy: engines, whole transactions, and what all dialects can be asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rmq_spark.errors import ListenerError

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import postgresql, sqlite
except ImportError as problem:  # pragma: no cover - the test runs this in another process
    raise ListenerError(
        "a database (SqlTransactionListener, SqlInbox) needs SQLAlchemy 2: pip install 'rmq-spark[sql]'"
    ) from problem

_LOCK_STATES = frozenset({"55P03", "40001", "40P01"})


class Database:
    """A database by its URL or engine; connections are made when they are first needed.

    Raises
    ------
    ListenerError
        When it is neither, or SQLAlchemy cannot make an engine of it.
    """

    def __init__(self, url_or_engine: str | sa.URL | sa.Engine) -> None:
        self._engine, self._url = _engine_or_url(url_or_engine)
        self._pid = os.getpid()

    @property
    def where(self) -> str:
        """The database for people: without the password, and the query part, which may hold one."""
        return self._url.set(query={}).render_as_string(hide_password=True)

    @property
    def engine(self) -> sa.Engine:
        if self._engine is None:
            self._engine = _make_engine(self._url)
        if self._pid != os.getpid():
            # Forked: the parent's connections are the parent's. Forget them without closing them.
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine

    @contextmanager
    def transaction(self, lock_timeout: float | None = None, *, write: bool = True) -> Iterator[sa.Connection]:
        """A database transaction: commits at the end, rolls back on an exception.

        ``lock_timeout`` in seconds; None keeps the database's own.
        """
        with self.engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                with _sqlite_transaction(connection, lock_timeout, write):
                    yield connection
                return
            if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
                raise ListenerError(
                    f"the engine of {self.where} is set to AUTOCOMMIT: the work and its fence rows must commit together"
                )
            try:
                with connection.begin():
                    if lock_timeout is not None and connection.dialect.name == "postgresql":
                        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(lock_timeout * 1000)}")
                    yield connection
            except BaseException:
                # The driver's own: after a commit that was refused, SQLAlchemy believes that it is over, and
                # the transaction would stay open, with its locks, in the pool.
                if not connection.invalidated:
                    connection.connection.rollback()
                raise


def insert_absent(connection: sa.Connection, key: sa.Column[Any], rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Insert rows whose key is not there yet; the keys that were."""
    table, dialect = key.table, connection.dialect
    assert isinstance(table, sa.Table)
    if not rows:
        return []
    if dialect.insert_executemany_returning and dialect.name in ("postgresql", "sqlite"):
        make = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
        statement = make(table).on_conflict_do_nothing(index_elements=[key]).returning(key)
        inserted = set(connection.execute(statement, rows).scalars())
        return [row[key.name] for row in rows if row[key.name] not in inserted]
    taken = []
    for row in rows:
        try:
            with connection.begin_nested():
                connection.execute(table.insert(), row)
        except sa.exc.IntegrityError:
            taken.append(row[key.name])
    return taken


@contextmanager
def _sqlite_transaction(connection: sa.Connection, lock_timeout: float | None, write: bool) -> Iterator[None]:
    """BEGIN and COMMIT as SQLite has them; Python's sqlite3 would begin late, and without the write lock.

    A writer takes the write lock at once (BEGIN IMMEDIATE): a transaction that reads first and writes later
    fails when another one wrote in between, without waiting. What is set here is set back: the connection may
    be of a user's own engine.
    """
    driver = connection.connection.dbapi_connection
    assert driver is not None
    isolation_level, driver.isolation_level = driver.isolation_level, None
    busy_timeout = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    try:
        if lock_timeout is not None:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(lock_timeout * 1000)}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
        yield
        connection.commit()
    finally:
        # After a commit there is nothing to roll back. The driver's own: SQLAlchemy's may believe it is done.
        driver.rollback()
        connection.rollback()
        if lock_timeout is not None:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {busy_timeout}")
            connection.rollback()
        driver.isolation_level = isolation_level


@contextmanager
def no_commit_within(connection: sa.Connection) -> Iterator[None]:
    """While ``work`` runs, its connection can neither be committed nor rolled back: the fence rows are in it
    too."""

    def refuse(_: sa.Connection) -> None:
        raise ListenerError(
            "work must not commit or roll back the connection that it is given: return, or raise "
            "txmq.Rollback, and the listener does it with the fence rows"
        )

    for event in ("commit", "rollback"):
        sa.event.listen(connection, event, refuse)
    try:
        yield
    finally:
        for event in ("commit", "rollback"):
            sa.event.remove(connection, event, refuse)


def _engine_or_url(url_or_engine: object) -> tuple[sa.Engine | None, sa.URL]:
    if isinstance(url_or_engine, sa.Engine):
        return url_or_engine, url_or_engine.url
    if isinstance(url_or_engine, sa.URL):
        return None, url_or_engine
    if isinstance(url_or_engine, str):
        try:
            return None, sa.make_url(url_or_engine)
        except (sa.exc.ArgumentError, ValueError):
            # Without its text: it may hold a password. And without the cause, which may quote it.
            raise ListenerError("the database URL cannot be parsed: write it as 'sqlite:///orders.db'") from None
    raise ListenerError(f"{type(url_or_engine).__name__} is no database: pass a URL or a SQLAlchemy engine")


def _make_engine(url: sa.URL) -> sa.Engine:
    try:
        # A connection may idle for hours between two micro-batches: look whether it is alive before its use.
        return sa.create_engine(url, pool_pre_ping=True)
    except sa.exc.NoSuchModuleError:
        raise ListenerError(f"SQLAlchemy knows no database {url.drivername!r}: install its dialect") from None
    except ModuleNotFoundError as problem:
        raise ListenerError(
            f"the driver of {url.drivername!r} is not installed: pip install {problem.name}"
        ) from problem


def is_lock_problem(problem: sa.exc.DBAPIError) -> bool:
    """Whether the database gave up waiting for (or was thrown out by) another transaction."""
    cause = problem.orig
    if getattr(cause, "sqlstate", None) in _LOCK_STATES or getattr(cause, "pgcode", None) in _LOCK_STATES:
        return True
    # SQLite: "database is locked", "database table is locked: ...". Error codes came with Python 3.11.
    return type(cause).__module__.startswith("sqlite3") and "is locked" in str(cause)
