"""A statement and the commands around it in one trip to PostgreSQL, by psycopg 3. Import it where that is the driver.

psycopg waits for each command by itself, and begins a transaction by one more. When many threads send, a trip costs
more than a short statement: a thread that has waited has to get the interpreter's lock back. What SQLAlchemy does for a
statement costs half a trip, so this goes past it, and makes its errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg import generators
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus


def is_possible(connection: sa.Connection) -> bool:
    """Whether a connection is psycopg's own, and SQLAlchemy changes no names in what it compiles."""
    is_own = issubclass(type(connection.connection.dbapi_connection), psycopg.Connection)
    return is_own and not connection.get_execution_options().get("schema_translate_map")


def execute(
    connection: sa.Connection,
    statement: sa.Executable,
    values: Mapping[str, Any],
    before: Sequence[str],
    after: Sequence[str],
) -> int:
    """Execute all of it, and return how many rows the statement wrote.

    Raises
    ------
    sqlalchemy.exc.DBAPIError
        As SQLAlchemy raises it. What comes after the command that failed is not executed.
    """
    driver: Any = connection.connection.dbapi_connection
    text = _text_of(statement, connection.dialect)
    try:
        return _send(driver, text, values, [*_begin(driver), *before], after)
    except psycopg.Error as problem:
        is_lost = driver.closed
        if is_lost:
            connection.invalidate(problem)
        raise sa.exc.DBAPIError.instance(
            text, None, problem, psycopg.Error, connection_invalidated=is_lost, dialect=connection.dialect
        ) from problem


def _send(
    driver: psycopg.Connection[Any], text: str, values: Mapping[str, Any], before: Sequence[str], after: Sequence[str]
) -> int:
    # The values stand in the text: with values beside it, a server takes one command.
    commands = [*before, psycopg.ClientCursor(driver).mogrify(text, values), *after]
    encoding = driver.info.encoding
    driver.pgconn.send_query("; ".join(commands).encode(encoding))
    results = driver.wait(generators.execute(driver.pgconn))
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, encoding)
    return results[len(before)].command_tuples or 0


def _begin(driver: psycopg.Connection[Any]) -> list[str]:
    """The command that begins a transaction as the connection is set; none where one has begun."""
    if driver.info.transaction_status != TransactionStatus.IDLE:
        return []
    begin, level = "BEGIN", driver.isolation_level
    if level is not None:
        begin += f" ISOLATION LEVEL {level.name.replace('_', ' ')}"
    if driver.read_only is not None:
        begin += " READ ONLY" if driver.read_only else " READ WRITE"
    if driver.deferrable is not None:
        begin += " DEFERRABLE" if driver.deferrable else " NOT DEFERRABLE"
    return [begin]


@lru_cache(maxsize=64)
def _text_of(statement: sa.Executable, dialect: sa.Dialect) -> str:
    return str(statement.compile(dialect=dialect))  # type: ignore[attr-defined]
