"""Meanings of database errors, by the codes of each server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa

# PostgreSQL: lock_not_available, serialization_failure, deadlock_detected. Another transaction is running: try later.
_LOCK_STATES = frozenset({"55P03", "40001", "40P01"})
# MariaDB and MySQL: lock wait timeout, deadlock, and a row that was taken or changed since the snapshot.
_LOCK_NUMBERS = frozenset({1205, 1213, 1020, 3572})
# SQLSTATE's classes "data exception", "integrity constraint violation" and "with check option violation".
_VALUE_CLASSES = frozenset({"22", "23", "44"})
# MariaDB's and MySQL's constraints (CHECK, of a table or a view), which their drivers do not tell from a server that is
# down.
_VALUE_NUMBERS = frozenset({1369, 3819, 4025})
# invalid_savepoint_specification, no_active_sql_transaction; ER_SP_DOES_NOT_EXIST.
_NO_SAVEPOINT_STATES = frozenset({"3B001", "25P01"})
_NO_SAVEPOINT_NUMBER = 1305
# PostgreSQL: invalid_sql_statement_name, duplicate_prepared_statement, and a statement with other parameters.
_STATEMENT_STATES = frozenset({"26000", "42P05", "08P01"})


_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


def again_when_lost(query: Callable[[_Given], _Result], given: _Given) -> _Result:
    """Query the database, and once more when the pool's connection was lost. The query may run twice."""
    try:
        return query(given)
    except sa.exc.DBAPIError as problem:
        if not problem.connection_invalidated:
            raise
    return query(given)


def is_lock_problem(problem: sa.exc.DBAPIError) -> bool:
    """Return True when the database ended a statement because another transaction holds a lock or was faster."""
    cause = problem.orig
    if sqlstate_of(cause) in _LOCK_STATES or _error_number(cause) in _LOCK_NUMBERS:
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
    of_a_value = (sqlstate_of(cause) or "")[:2] in _VALUE_CLASSES or _error_number(cause) in _VALUE_NUMBERS
    return of_a_value or isinstance(problem, (sa.exc.IntegrityError, sa.exc.DataError))


def misses_a_parent(problem: sa.exc.StatementError) -> bool:
    """Whether a row refers to another one that is not there."""
    cause = problem.orig
    return sqlstate_of(cause) == "23503" or _error_number(cause) == 1452 or "FOREIGN KEY constraint" in str(cause)


def updates_a_row_twice(problem: sa.exc.StatementError) -> bool:
    """Whether PostgreSQL has found two rows of an upsert with one key."""
    return sqlstate_of(problem.orig) == "21000"  # cardinality_violation


def is_savepoint_gone(problem: sa.exc.DBAPIError) -> bool:
    cause = problem.orig
    if sqlstate_of(cause) in _NO_SAVEPOINT_STATES or _error_number(cause) == _NO_SAVEPOINT_NUMBER:
        return True
    return type(cause).__module__.startswith("sqlite3") and "no such savepoint" in str(cause)


def explain_lost_statement(context: sa.engine.ExceptionContext) -> None:
    """Say in an error about a prepared statement who took it away. An engine calls this for each error of its
    database."""
    cause = context.original_exception
    if sqlstate_of(cause) in _STATEMENT_STATES and "prepared statement" in str(cause) and context.sqlalchemy_exception:
        context.sqlalchemy_exception.add_detail(
            "a pooler such as PgBouncer in transaction mode gives each transaction another session, which does not "
            'have the statements that the driver prepared: make the engine with connect_args={"prepare_threshold": '
            "None}, or pass the listener or the inbox the URL, from which it makes such an engine"
        )


def sqlstate_of(cause: BaseException | None) -> str | None:
    """Return the SQLSTATE of a driver's exception, which psycopg, psycopg2 and pg8000 name differently; None when the
    server sent none."""
    first_argument = cause.args[0] if cause is not None and cause.args else None
    of_pg8000 = first_argument.get("C") if isinstance(first_argument, dict) else None
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or of_pg8000


def _error_number(cause: BaseException | None) -> int | None:
    number = cause.args[0] if cause is not None and cause.args else None
    return number if isinstance(number, int) else None
