"""A user's database through SQLAlchemy: its connections and whole transactions, and which database it is."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from rmq_spark._core.vocabulary.redaction import sentence_of
from rmq_spark.errors import ListenerError, TransactionEndedError

try:
    import sqlalchemy as sa
except ImportError as problem:  # pragma: no cover - the test runs this in another process
    raise ListenerError(
        "a database (SqlTransactionListener, SqlInbox) needs SQLAlchemy 2: install rmq_spark with its extra sql"
    ) from problem

# These import SQLAlchemy as well.
from rmq_spark._core.database.error_codes import sqlstate_of
from rmq_spark._core.database.guard import Owner, add_guards
from rmq_spark._core.database.sql_engine import engine_or_url, lookup_of, make_engine

logger = logging.getLogger(__name__)

PLACE_CHARS_MAX = 64

Address: TypeAlias = "str | sa.URL | sa.Engine | Callable[[], str | sa.URL | sa.Engine]"
"""Names a database: a URL, an engine, a reference to a URL (``env:NAME`` or ``file:/path``), or a function that returns
a URL or an engine. Each process that uses the database looks up the reference, or calls the function, by itself."""


class Database:
    """A database, which connects at first use. It is pickled as its arguments, and the other process connects by
    itself.

    A ListenerError tells that the argument is no :data:`Address`, that this kind of database is untested, or that
    SQLAlchemy cannot make an engine of it. So does pickling a database that was made of an engine.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        database = super().__new__(cls)
        database._arguments = args, kwargs
        return database

    def __init__(self, url_or_engine: Address) -> None:
        self._engine: sa.Engine | None = None
        self._url: sa.URL | None = None
        self._lookup = lookup_of(url_or_engine)
        if self._lookup is None:
            self._engine, self._url = engine_or_url(url_or_engine)
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        args, kwargs = self._arguments
        if any(isinstance(argument, sa.Engine) for argument in (*args, *kwargs.values())):
            raise ListenerError(
                f"the engine of {self.where} cannot go to another process, because it holds connections: in its place "
                "give the database's URL, 'env:NAME', or a function that returns the URL"
            )
        return partial(type(self), **kwargs), args

    @property
    def where(self) -> str:
        """The database's URL for people, without the password and the query part, which may hold one; or the name of
        what gives the URL."""
        if self._url is None:
            assert self._lookup is not None
            return self._lookup.name
        return self._url.set(query={}).render_as_string(hide_password=True)

    @property
    def engine(self) -> sa.Engine:
        if self._engine is None:
            engine, url = None, self._url
            if url is None:
                assert self._lookup is not None
                engine, url = engine_or_url(self._lookup.find())
            self._engine, self._url = engine or make_engine(url), url
        if self._pid != os.getpid():
            # This process was forked, and the connections are its parent's: forget them without closing them.
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        add_guards(self._engine)
        return self._engine

    @contextmanager
    def transaction(self, lock_timeout: float | None = None, *, write: bool = True) -> Iterator[sa.Connection]:
        """Run a database transaction, which commits at the end and rolls back on an exception.

        ``lock_timeout`` is in seconds; None keeps the database's own.
        """
        with self.connect() as connection, Owner().owning(connection):
            self.refuse_unsafe(connection)
            if connection.dialect.name == "sqlite":
                with _sqlite_transaction(connection, lock_timeout, write):
                    yield connection
                return
            with _mysql_lock_timeout(connection, lock_timeout):
                try:
                    with connection.begin():
                        if lock_timeout is not None and connection.dialect.name == "postgresql":
                            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(lock_timeout * 1000)}")
                        yield connection
                except BaseException as problem:
                    # Roll back the driver's connection: SQLAlchemy takes a refused commit for the transaction's end,
                    # and would put the connection into the pool with the transaction open and its locks held.
                    if not connection.invalidated:
                        connection.connection.rollback()
                        if isinstance(problem, TransactionEndedError):
                            connection.invalidate()  # its session may hold other locks: LOCK TABLES
                    raise

    def connect(self) -> sa.Connection:
        """Return a connection; an error names the database."""
        try:
            return self.engine.connect()
        except sa.exc.DBAPIError as problem:
            problem.add_detail(f"no connection to {self.where}")
            raise

    def refuse_unsafe(self, connection: sa.Connection) -> None:
        """Refuse a connection that commits each statement by itself, or that reads uncommitted rows."""
        if _commits_by_itself(connection.connection.dbapi_connection):
            raise ListenerError(
                f"the engine of {self.where} is set to AUTOCOMMIT: the work and its fence rows must commit together"
            )
        # PostgreSQL treats READ UNCOMMITTED as READ COMMITTED.
        if connection.dialect.name != "postgresql" and connection.get_isolation_level() == "READ UNCOMMITTED":
            raise ListenerError(
                f"the engine of {self.where} is set to READ UNCOMMITTED: a check would take for done what may still "
                "be undone. Set isolation_level to READ COMMITTED or higher"
            )


_TELLS_NO_PLACE = frozenset({"42501", "42883", "0A000"})
"""SQLSTATEs: the user may not call the function, or the server does not have or support it."""


def place_of(connection: sa.Connection) -> str | None:
    """Return what distinguishes a database from a copy of it, or None when the database does not tell.

    It stays the same when a server restarts or a replica takes over.
    """
    if connection.dialect.name == "sqlite":
        files = {row.name: row.file for row in connection.exec_driver_sql("PRAGMA database_list")}
        return f"inode {os.stat(files['main']).st_ino}" if files["main"] else None
    if connection.dialect.name == "postgresql":
        query = (
            "SELECT (SELECT system_identifier FROM pg_control_system()), "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        savepoint = connection.begin_nested()
        try:
            cluster, database = connection.exec_driver_sql(query).one()
        except sa.exc.DBAPIError as problem:
            if sqlstate_of(problem.orig) not in _TELLS_NO_PLACE:
                raise  # a fence made without its place would not notice a copy of its database
            savepoint.rollback()
            logger.warning(
                "the database does not say which one it is, so a fence in a copy of it would not be noticed: %s",
                sentence_of(problem),
            )
            return None
        savepoint.commit()
        return f"cluster {cluster}, database {database}"
    if connection.dialect.name not in ("mariadb", "mysql"):
        return None  # a database on trial
    # A server that takes over has another server id, so only the database's name can be used.
    return f"database {connection.exec_driver_sql('SELECT DATABASE()').scalar_one()}"[:PLACE_CHARS_MAX]


@contextmanager
def _sqlite_transaction(connection: sa.Connection, lock_timeout: float | None, write: bool) -> Iterator[None]:
    """Run a SQLite transaction with its own BEGIN and COMMIT: Python's sqlite3 begins late and without the write lock.

    A writer takes the write lock at once (BEGIN IMMEDIATE). If it read first and wrote later, it would fail without
    waiting when another writer came in between. Every setting is restored at the end, because the connection may belong
    to a user's engine.
    """
    driver = connection.connection.dbapi_connection
    assert driver is not None
    isolation_level, driver.isolation_level = driver.isolation_level, None
    busy_timeout = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    try:
        if lock_timeout is not None:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(lock_timeout * 1000)}")
        driver.rollback()  # a user's listener for the engine's event "begin" may have begun without the write lock
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
        yield
        connection.commit()
    finally:
        # Does nothing after a commit. The driver itself rolls back too: SQLAlchemy may believe that this is done.
        driver.rollback()
        connection.rollback()
        if lock_timeout is not None:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {busy_timeout}")
            connection.rollback()
        driver.isolation_level = isolation_level


@contextmanager
def _mysql_lock_timeout(connection: sa.Connection, seconds: float | None) -> Iterator[None]:
    """Set a session's lock timeouts in MariaDB and MySQL, in whole seconds, and restore them at the end."""
    if seconds is None or connection.dialect.name not in ("mariadb", "mysql"):
        yield
        return
    # The timeouts for rows, and for tables that another session alters.
    names = ("innodb_lock_wait_timeout", "lock_wait_timeout")
    before = connection.exec_driver_sql(f"SELECT {', '.join(f'@@{name}' for name in names)}").one()
    _set_session(connection, names, [max(1, math.ceil(seconds))] * len(names))
    try:
        yield
    finally:
        if not connection.invalidated:
            try:
                _set_session(connection, names, before)
            except sa.exc.DBAPIError:
                connection.invalidate()  # no other user may get a connection with our settings


def _set_session(connection: sa.Connection, names: Sequence[str], values: Sequence[int]) -> None:
    settings = ", ".join(f"SESSION {name} = {int(value)}" for name, value in zip(names, values, strict=True))
    connection.exec_driver_sql(f"SET {settings}")
    connection.rollback()


def _commits_by_itself(driver: Any) -> bool:
    get_autocommit = getattr(driver, "get_autocommit", None)  # of MariaDB's and MySQL's drivers
    return bool(get_autocommit()) if get_autocommit is not None else getattr(driver, "autocommit", False) is True
