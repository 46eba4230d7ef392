"""Works on a user's database through SQLAlchemy: engines, whole transactions, and what every dialect can do."""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

from rmq_spark._core.database.url import is_place, look_up
from rmq_spark._core.vocabulary.redaction import cause_of, sentence_of
from rmq_spark.errors import ListenerError, TransactionEndedError

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql, postgresql, sqlite
except ImportError as problem:  # pragma: no cover - the test runs this in another process
    raise ListenerError(
        "a database (SqlTransactionListener, SqlInbox) needs SQLAlchemy 2: install rmq_spark with its extra sql"
    ) from problem

logger = logging.getLogger(__name__)

BACKENDS = ("sqlite", "postgresql", "mariadb", "mysql")
"""Databases that the tests run on, by SQLAlchemy's names (MariaDB may have either of the last two)."""

# PostgreSQL: lock_not_available, serialization_failure, deadlock_detected. Another transaction is running: try later.
_LOCK_STATES = frozenset({"55P03", "40001", "40P01"})
# MariaDB and MySQL: lock wait timeout, deadlock, and a row that was taken or changed since the snapshot.
_LOCK_NUMBERS = frozenset({1205, 1213, 1020, 3572})
# SQLSTATE's classes "data exception" and "integrity constraint violation".
_VALUE_CLASSES = frozenset({"22", "23"})
# MariaDB's and MySQL's constraints (CHECK), which their drivers do not tell from a server that is down.
_VALUE_NUMBERS = frozenset({3819, 4025})
# invalid_savepoint_specification, no_active_sql_transaction; ER_SP_DOES_NOT_EXIST.
_NO_SAVEPOINT_STATES = frozenset({"3B001", "25P01"})
_NO_SAVEPOINT_NUMBER = 1305

_SERVER_STATUS_IN_TRANS = 1  # of the MySQL protocol
_UTF8_BYTES_MAX = 4

PLACE_CHARS_MAX = 64
IDLE_S_MAX = 1.0
"""A pooled connection that was idle for this many seconds is tested before use."""

IN_INNODB: dict[str, Any] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}
"""Makes a table whose changes a transaction can undo, whatever the default engine of a MariaDB or MySQL server is."""


class _Utf8(sa.TypeDecorator[str]):
    """Text that is stored as bytes, so that only identical texts are equal.

    In every collation that both MariaDB and MySQL have, some texts are equal that differ in case, in accents, or at
    least in spaces at the end.
    """

    impl = mysql.VARBINARY
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> bytes | None:
        return None if value is None else value.encode()

    def process_result_value(self, value: bytes | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else value.decode()


def exact_text(chars: int) -> sa.String:
    """Return a column type for names. Two names are equal only if all their characters are."""
    return sa.String(chars).with_variant(_Utf8(chars * _UTF8_BYTES_MAX), "mysql", "mariadb")


Address: TypeAlias = "str | sa.URL | sa.Engine | Callable[[], str | sa.URL | sa.Engine]"
"""Names a database: a URL, an engine, the place of a URL (``env:NAME`` or ``file:/path``), or a function that returns a
URL or an engine. Each process that uses the database looks up the place, or calls the function, by itself."""


class Database:
    """A database, which connects at first use.

    It is pickled as its arguments, and the other process connects by itself.

    Raises
    ------
    ListenerError
        When the argument is no :data:`Address`, the kind of database is untested, or SQLAlchemy cannot make an engine
        of it. When a database that was made of an engine is pickled.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        database = super().__new__(cls)
        database._arguments = args, kwargs
        return database

    def __init__(self, url_or_engine: Address) -> None:
        self._engine: sa.Engine | None = None
        self._url: sa.URL | None = None
        self._lookup = _lookup_of(url_or_engine)
        if self._lookup is None:
            self._engine, self._url = _engine_or_url(url_or_engine)
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
                engine, url = _engine_or_url(self._lookup.find())
            self._engine, self._url = engine or _make_engine(url), url
        if self._pid != os.getpid():
            # This process was forked, and the connections are its parent's: forget them without closing them.
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        _guard(self._engine)
        return self._engine

    @contextmanager
    def transaction(self, lock_timeout: float | None = None, *, write: bool = True) -> Iterator[sa.Connection]:
        """Run a database transaction, which commits at the end and rolls back on an exception.

        ``lock_timeout`` is in seconds; None keeps the database's own.
        """
        with self.connect() as connection, Owner().holding(connection):
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


class Owner:
    """The right to commit the transaction of a driver's connection. A connection has one owner at a time, even when
    several objects of SQLAlchemy share it: sessions bound to it, or users of a pool that shares one connection."""

    def __init__(self) -> None:
        self._held: tuple[sa.PoolProxiedConnection, object] | None = None

    def take(self, connection: sa.Connection) -> None:
        """Own a connection, until :meth:`release`.

        Raises
        ------
        ListenerError
            When the connection has another owner.
        """
        checked_out = connection.connection
        driver = checked_out.dbapi_connection
        self._held = checked_out, driver
        owner = _OWNERS.setdefault(id(driver), self)
        if owner is not self and owner._has(driver):
            self._held = None
            raise ListenerError(
                "the connection is in another transaction() of a producer, or in that of a listener or an inbox: one "
                "at a time commits it. Send with the transaction that is open, or give each a connection"
            )
        _OWNERS[id(driver)] = self

    def _has(self, driver: object) -> bool:
        """Whether the connection is still checked out of its pool, from which others could get it."""
        held = self._held
        return held is not None and held[0].dbapi_connection is driver

    def release(self) -> None:
        """Let others own the connection."""
        held, self._held = self._held, None
        if held is not None and _OWNERS.get(id(held[1])) is self:
            del _OWNERS[id(held[1])]

    @contextmanager
    def holding(self, connection: sa.Connection) -> Iterator[None]:
        """Own a connection within a ``with`` statement."""
        self.take(connection)
        try:
            yield
        finally:
            self.release()


_OWNERS: dict[int, Owner] = {}
"""By the id of a driver's connection, which the owner keeps alive. Without a lock, which a fork could copy held."""


def insert_absent(connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Insert the rows whose primary key is not in the table yet, and return the others."""
    if connection.dialect.name in ("postgresql", "sqlite"):
        insert = _insert_absent(table, connection.dialect.name)
        return [row for row in rows if connection.execute(insert, row).one_or_none() is None]
    return [row for row in rows if not _inserts(connection, table, [row])]


@lru_cache(maxsize=64)
def _insert_absent(table: sa.Table, dialect: str) -> sa.Insert:
    """Return the statement, built once, so that SQLAlchemy finds its compiled form quickly."""
    dialect_insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return dialect_insert(table).on_conflict_do_nothing().returning(*table.primary_key)


def _inserts(connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> bool:
    savepoint = connection.begin_nested()
    try:
        connection.execute(table.insert(), rows)
    except sa.exc.IntegrityError:
        savepoint.rollback()
        return False
    # Other errors propagate: a deadlock has ended the transaction, and its savepoints with it.
    savepoint.commit()
    return True


def require_exact(connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
    """Require that a table tells apart rows whose keys are alike, and that a rollback removes them.

    It inserts such rows and undoes the insert. A table that was not made here may ignore case, accents or spaces at the
    end of a key, or belong to a storage engine without transactions (MyISAM).

    Raises
    ------
    ListenerError
        When the table fails either test. Rows that were not undone are deleted.
    """
    name, keys = table.fullname, list(table.primary_key)
    savepoint = connection.begin_nested()
    are_distinct = _inserts(connection, table, rows)
    savepoint.rollback()
    own_rows = sa.or_(*(sa.and_(*(key == row[key.name] for key in keys)) for row in rows))
    if connection.execute(sa.select(sa.func.count()).select_from(table).where(own_rows)).scalar_one():
        connection.execute(table.delete().where(own_rows))
        raise ListenerError(
            f"table {name!r} has a storage engine without transactions: what is undone stays in it. Make it InnoDB "
            f"(ALTER TABLE {name} ENGINE=InnoDB), and the tables that work writes to as well"
        )
    if not are_distinct:
        raise ListenerError(
            f"table {name!r} takes keys for equal that differ in case, in an accent or in a space at the end: its "
            "collation is wrong. Rename it, have a new one made, and copy its rows"
        )


def alike(prefix: str) -> list[str]:
    """Return names that a careless collation takes for equal."""
    return [f"{prefix}a", f"{prefix}A", f"{prefix}a ", f"{prefix}\u00e4"]


_TELLS_NO_PLACE = frozenset({"42501", "42883", "0A000"})
"""SQLSTATEs: the user may not call the function, or the server does not have or support it."""


def _sqlstate_of(cause: BaseException | None) -> str | None:
    """Return the SQLSTATE of a driver's exception, which psycopg, psycopg2 and pg8000 name differently; None when the
    server sent none."""
    first_argument = cause.args[0] if cause is not None and cause.args else None
    of_pg8000 = first_argument.get("C") if isinstance(first_argument, dict) else None
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or of_pg8000


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
            if _sqlstate_of(problem.orig) not in _TELLS_NO_PLACE:
                raise  # a fence made without its place would not notice a copy of its database
            savepoint.rollback()
            logger.warning(
                "the database does not say which one it is, so a fence in a copy of it would not be noticed: %s",
                sentence_of(problem),
            )
            return None
        savepoint.commit()
        return f"cluster {cluster}, database {database}"
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


# ---------------------------------------------------------------- one transaction for work
ENDED = (
    "work ended the database transaction that it was given: by a COMMIT or ROLLBACK of its own, by a statement that "
    "does it (ON CONFLICT ROLLBACK, executescript, MariaDB's DDL), or by going on after an error that ended it (a "
    "deadlock). A part of what it wrote may be committed"
)


@contextmanager
def no_commit_within(connection: sa.Connection) -> Iterator[None]:
    """Keep ``work`` from committing, rolling back or closing its connection, whose transaction the caller commits.

    Raises
    ------
    ListenerError
        When ``work`` asks SQLAlchemy to do so. Nothing has happened then.
    TransactionEndedError
        When ``work`` runs a statement after the transaction has ended in some other way.
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
_GUARDS = (("commit", _refuse_end), ("rollback", _refuse_end), ("before_cursor_execute", _require_open))


def _guard(engine: sa.Engine) -> None:
    """Let an engine's connections call the guards of ``work``. They stay with the engine, because SQLAlchemy adds and
    removes them slowly."""
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

    A database forgets its savepoints when their transaction ends, however it ends, even if another one begins after.

    Raises
    ------
    TransactionEndedError
        When the savepoint is gone.
    """
    try:
        if not keep:
            connection.exec_driver_sql(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
        connection.exec_driver_sql(f"RELEASE SAVEPOINT {_SAVEPOINT}")
    except sa.exc.DBAPIError as problem:
        if _is_savepoint_gone(problem):
            raise TransactionEndedError(ENDED) from problem
        raise


def _is_savepoint_gone(problem: sa.exc.DBAPIError) -> bool:
    cause = problem.orig
    if _sqlstate_of(cause) in _NO_SAVEPOINT_STATES or _error_number(cause) == _NO_SAVEPOINT_NUMBER:
        return True
    return type(cause).__module__.startswith("sqlite3") and "no such savepoint" in str(cause)


def _is_idle(driver: Any) -> bool:
    """Return True when the driver knows, without asking the database, that no transaction is open."""
    if hasattr(driver, "in_transaction"):  # sqlite3
        return not driver.in_transaction
    if hasattr(driver, "server_status"):  # PyMySQL
        return not driver.server_status & _SERVER_STATUS_IN_TRANS
    status = getattr(getattr(driver, "info", None), "transaction_status", None)  # psycopg
    return status is not None and status == 0


class _Lookup(NamedTuple):
    """Gives a database's URL in the process that needs it: its name for people, and the call."""

    name: str
    find: Callable[[], object]


def _lookup_of(address: object) -> _Lookup | None:
    """Return the lookup of a place or a function; None for a URL or an engine."""
    if isinstance(address, str) and is_place(address):
        return _Lookup(address, partial(look_up, address))
    if not callable(address):
        return None
    name = f"{getattr(address, '__qualname__', type(address).__name__)}()"
    try:
        inspect.signature(address).bind()
    except TypeError as problem:
        raise ListenerError(
            f"{name} cannot give the database's URL: a function without arguments is expected ({problem})"
        ) from problem
    return _Lookup(name, partial(_from_function, address, name))


def _from_function(function: Callable[[], object], name: str) -> object:
    try:
        address = function()
    except Exception as problem:
        raise ListenerError(f"{name}, which gives the database's URL, raised {sentence_of(problem)}") from cause_of(
            problem
        )
    if not isinstance(address, (str, sa.URL, sa.Engine)):
        raise ListenerError(f"{name} returned {type(address).__name__}: the database's URL is expected")
    return address


def _engine_or_url(url_or_engine: object) -> tuple[sa.Engine | None, sa.URL]:
    engine, url = _read_url(url_or_engine)
    if url.host is not None and "@" in url.host:  # the part before it belongs to the password
        raise ListenerError(
            "the database URL has an @ in its password, which must be written as %40; or pass a sqlalchemy.URL"
        )
    return engine, url


def _read_url(url_or_engine: object) -> tuple[sa.Engine | None, sa.URL]:
    if isinstance(url_or_engine, sa.Engine):
        _require_tested(url_or_engine.dialect.name)
        return url_or_engine, url_or_engine.url
    if isinstance(url_or_engine, sa.URL):
        _require_tested(url_or_engine.get_backend_name())
        return None, url_or_engine
    if isinstance(url_or_engine, str):
        try:
            url = sa.make_url(url_or_engine)
            _require_tested(url.get_backend_name())
            return None, url
        except (sa.exc.ArgumentError, ValueError):
            # The error does not show the URL, which may hold a password, nor its cause, which may quote the URL.
            raise ListenerError("the database URL cannot be parsed: write it as 'sqlite:///orders.db'") from None
    raise ListenerError(
        f"{type(url_or_engine).__name__} is no database: pass a URL, 'env:NAME', a function that returns the URL, or a "
        "SQLAlchemy engine"
    )


def _require_tested(backend: str) -> None:
    if backend not in BACKENDS:
        raise ListenerError(
            f"{backend!r} is not a database that this was tested with: use SQLite, PostgreSQL, MariaDB or MySQL. What "
            "a fence promises depends on how a database locks and compares its rows"
        )


def _make_engine(url: sa.URL) -> sa.Engine:
    try:
        # A pooler (PgBouncer) gives the session to others after each transaction, so no statement may stay prepared.
        driver_args = {"prepare_threshold": None} if url.get_driver_name() == "psycopg" else {}
        # Error texts go into logs, so they must not have values of rows.
        engine = sa.create_engine(url, hide_parameters=True, connect_args=driver_args)
    except sa.exc.NoSuchModuleError:
        raise ListenerError(f"SQLAlchemy knows no database {url.drivername!r}: install its dialect") from None
    except ModuleNotFoundError as problem:
        raise ListenerError(
            f"the driver of {url.drivername!r} is not installed: pip install {problem.name}"
        ) from problem
    _test_idle_connections(engine)
    return engine


def _test_idle_connections(engine: sa.Engine) -> None:
    """Test a pooled connection before use after an idle time, such as hours between two micro-batches. SQLAlchemy's own
    ``pool_pre_ping`` tests before each use, which is slow for short transactions."""

    def checked_in(_: object, record: sa.pool.ConnectionPoolEntry) -> None:
        record.info["txmq_used_s"] = time.monotonic()

    def checked_out(driver: Any, record: sa.pool.ConnectionPoolEntry, _: object) -> None:
        used_s = record.info.get("txmq_used_s")
        if used_s is None or time.monotonic() - used_s < IDLE_S_MAX:
            return
        try:
            is_alive = engine.dialect.do_ping(driver)
        except engine.dialect.loaded_dbapi.Error:
            is_alive = False
        if not is_alive:
            raise sa.exc.DisconnectionError  # SQLAlchemy connects anew

    sa.event.listen(engine, "checkin", checked_in)
    sa.event.listen(engine, "checkout", checked_out)


def has_one_connection(pool: sa.Pool) -> bool:
    """Whether a pool has one connection, so that a second user waits until the first gives it back."""
    return isinstance(pool, sa.QueuePool) and pool.size() == 1 and pool._max_overflow == 0


def is_lock_problem(problem: sa.exc.DBAPIError) -> bool:
    """Return True when the database ended a statement because another transaction holds a lock or was faster."""
    cause = problem.orig
    if _sqlstate_of(cause) in _LOCK_STATES or _error_number(cause) in _LOCK_NUMBERS:
        return True
    # SQLite: "database is locked", "database table is locked: ...". Error codes came with Python 3.11.
    return type(cause).__module__.startswith("sqlite3") and "is locked" in str(cause)


def is_refused_value(problem: sa.exc.StatementError) -> bool:
    """Return True when the database or SQLAlchemy refuses a value of a row, and may accept other rows."""
    cause = problem.orig
    if not isinstance(problem, sa.exc.DBAPIError):
        return type(problem) is sa.exc.StatementError
    if is_lock_problem(problem):
        return False
    of_a_value = (_sqlstate_of(cause) or "")[:2] in _VALUE_CLASSES or _error_number(cause) in _VALUE_NUMBERS
    return of_a_value or isinstance(problem, (sa.exc.IntegrityError, sa.exc.DataError))


def _error_number(cause: BaseException | None) -> int | None:
    """Return the number of a MariaDB or MySQL error, or None for another database's."""
    number = cause.args[0] if cause is not None and cause.args else None
    return number if isinstance(number, int) else None
