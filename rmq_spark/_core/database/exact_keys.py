"""Tables whose keys are equal only when all their characters are, and whose changes a transaction can undo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from rmq_spark.errors import ListenerError

INNODB_TABLE: dict[str, Any] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}
"""Makes a table whose changes a transaction can undo, whatever the default engine of a MariaDB or MySQL server is."""

_UTF8_BYTES_MAX = 4


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
    """Require that a table tells apart rows whose keys are alike, and that a rollback removes them, or raise
    ListenerError.

    It inserts such rows and undoes the insert. A table that was not made here may ignore case, accents or spaces at the
    end of a key, or belong to a storage engine without transactions (MyISAM). Rows that were not undone are deleted.
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


def similar_names(prefix: str) -> list[str]:
    """Return names that a careless collation takes for equal."""
    return [f"{prefix}a", f"{prefix}A", f"{prefix}a ", f"{prefix}\u00e4"]
