"""Makes an engine of what names a database: a URL, a reference to a URL, or a function."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import sqlalchemy as sa

from rmq_spark._core.database.url import is_reference, look_up
from rmq_spark._core.vocabulary.redaction import cause_of, sentence_of
from rmq_spark.errors import ListenerError

BACKENDS = ("sqlite", "postgresql", "mariadb", "mysql")
"""Databases that the tests run on, by SQLAlchemy's names (MariaDB may have either of the last two)."""

IDLE_S_MAX = 1.0
"""A pooled connection that was idle for this many seconds is tested before use."""


class Lookup(NamedTuple):
    """Gives a database's URL in the process that needs it: its name for people, and the call."""

    name: str
    find: Callable[[], object]


def lookup_of(address: object) -> Lookup | None:
    """Return the lookup of a reference or a function; None for a URL or an engine."""
    if isinstance(address, str) and is_reference(address):
        return Lookup(address, partial(look_up, address))
    if not callable(address):
        return None
    name = f"{getattr(address, '__qualname__', type(address).__name__)}()"
    try:
        inspect.signature(address).bind()
    except TypeError as problem:
        raise ListenerError(
            f"{name} cannot give the database's URL: a function without arguments is expected ({problem})"
        ) from problem
    return Lookup(name, partial(_from_function, address, name))


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


def engine_or_url(url_or_engine: object) -> tuple[sa.Engine | None, sa.URL]:
    engine, url = _read_url(url_or_engine)
    if url.host is not None and "@" in url.host:  # the part before it belongs to the password
        raise ListenerError(
            "the database URL has an @ in its password, which must be written as %40; or pass a sqlalchemy.URL"
        )
    return engine, url


def _read_url(url_or_engine: object) -> tuple[sa.Engine | None, sa.URL]:
    if isinstance(url_or_engine, sa.Engine):
        if url_or_engine not in _ON_TRIAL:
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
            "a fence promises depends on how a database locks and compares its rows: "
            "rmq_spark.testing.check_fence(url) tries that on a database of yours, and says what does not hold"
        )


_ON_TRIAL: WeakSet[sa.Engine] = WeakSet()


@contextmanager
def on_trial(address: str | sa.URL | sa.Engine) -> Iterator[sa.Engine]:
    """Give an engine that is used though its kind of database may be untested."""
    engine = address if isinstance(address, sa.Engine) else make_engine(sa.make_url(address))
    _ON_TRIAL.add(engine)
    try:
        yield engine
    finally:
        _ON_TRIAL.discard(engine)
        if engine is not address:
            engine.dispose()


def make_engine(url: sa.URL) -> sa.Engine:
    try:
        # A pooler (PgBouncer) gives the session to others after each transaction, so no statement may stay prepared.
        # That costs 0.5 ms of the server's CPU for a local transaction.
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
