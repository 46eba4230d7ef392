"""A listener without code: the fields of JSON bodies become the columns of a table. See :class:`TableListener`.

What ``work`` does with the messages of a half batch::

    bodies ─▶ rows ─▶ refuse rows that cannot fit ─▶ insert the others at once, in a savepoint ─▶ verdicts
                      (no JSON object, another       │ refused by the database
                      type, a null, no column)       ▼
                                                     insert without rows whose key exists; then by halves, until
                                                     one transaction is refused, or a loop within PostgreSQL is
                                                     faster
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.database.connection import Address
from rmq_spark._core.database.insert import Conflict, as_table, columns_of
from rmq_spark._core.listeners.decode import arrow_schema
from rmq_spark._core.listeners.fence import FENCE_TABLE
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.json_fields import type_in_json
from rmq_spark._core.listeners.sql import LOCK_TIMEOUT_S, ROLLBACK_AFTER_S, MessagesAgain, SqlTransactionListener
from rmq_spark._core.listeners.target_table import Refused, Target
from rmq_spark._core.runtime.log_records import of_batch
from rmq_spark._core.vocabulary.options import Duration, named
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY, VerdictArray
from rmq_spark.errors import ListenerError, MessageError, OptionError

import sqlalchemy as sa  # isort: skip
from sqlalchemy.engine.interfaces import ReflectedColumn

logger = logging.getLogger(__name__)

ON_CONFLICT = ERROR, IGNORE, UPDATE = ("error", "ignore", "update")
ON_BAD_ROW = FAIL, ROLLBACK = ("fail", "rollback")
ON_UNKNOWN_FIELD = (IGNORE, ERROR)


class TableListener(SqlTransactionListener):
    """Inserts a row for each message into a table, in the database transaction of the fence, without a function.

    Parameters
    ----------
    url_or_engine : str, sqlalchemy.URL, callable or sqlalchemy.Engine
        As for :class:`SqlTransactionListener`.
    table : str
        The table, which must exist. The listener inspects it at first use, and again before it refuses a row.
    columns : str, pyarrow.Schema or sequence of str, optional
        The fields to read from the JSON bodies, by the names of the table's columns. Other fields are left out.

        - not given: all columns of the table. A field that is null or missing counts as not given: an insert takes the
          column's default, an update leaves the column as it is
        - ``"order_id, total"``, or a list: these columns, with the types of the table. A field that is null or missing
          is NULL
        - ``"order_id long, total double"``, or a pyarrow.Schema: these columns, read with these types as by
          :meth:`HalfBatch.decode`. The database converts them. A field that is null or missing is NULL

    key : str or sequence of str, optional
        The columns of a unique key of the table. None of its fields may be null. It is independent of
        ``transactionKey``.
    on_conflict : {"error", "ignore", "update"}
        What happens to a row whose key is already in the table. ``error``: the row does not fit. ``ignore``: it is left
        out, and its transaction commits; of several rows of a half batch with the same key, one is inserted.
        ``update``, which needs ``key``: the existing row gets its values; of several rows of a half batch with the same
        key, the last one counts, and the database may not see the others.
    on_bad_row : {"fail", "rollback"}
        What happens to a row that does not fit. ``fail``: MessageError names the first message, nothing is inserted,
        and the half batch stays pending. ``rollback``, which needs ``transactionKey`` or ``transactionPer=message``:
        its transaction is rolled back, with the reason, and the others commit.
    on_unknown_field : {"ignore", "error"}
        What happens to a field that the table has no column for. ``ignore``: it is left out in silence. ``error``: the
        row does not fit, and the reason names the nearest column. A field that has a column, but one that ``columns``
        does not name, is left out.
    schema : str, optional
        The database schema of the table.
    fence_table, fence_schema, rollback_after, lock_timeout, messages : optional
        As for :class:`SqlTransactionListener`, where ``fence_schema`` is ``schema``.

    Notes
    -----
    A row does not fit when its body is no JSON object or has no field of the columns; when a field has another type
    than its column, is null in a column that is NOT NULL or part of the key, or is refused by ``on_unknown_field``; or
    when the database refuses the row, for a key that exists, a CHECK or FOREIGN KEY constraint, or a value that is too
    long. To find such rows, the listener looks up which keys exist, and inserts the other rows by halves, in
    savepoints. A refusal at the commit (a deferred constraint) and an error of a trigger fail the half batch.

    Fields must have the JSON type of their column: a number is not text, and 1.0 is not an integer. Times are ISO 8601;
    a time with a zone is stored as UTC in a column without one. A date may have a time of midnight. Binary columns have
    no form in JSON: name the other columns, or give a schema to read.

    Raises
    ------
    OptionError
        When the arguments contradict each other.
    ListenerError
        Before the first half batch is prepared: when the database has no such table, column or key, or cannot undo what
        is written to it.
    """

    @named
    def __init__(
        self,
        url_or_engine: Address,
        table: str,
        *,
        columns: str | pa.Schema | Sequence[str] | None = None,
        key: str | Sequence[str] | None = None,
        on_conflict: str = ERROR,
        on_bad_row: str = FAIL,
        on_unknown_field: str = IGNORE,
        schema: str | None = None,
        fence_table: str = FENCE_TABLE,
        fence_schema: str | None = None,
        rollback_after: Duration = ROLLBACK_AFTER_S,
        lock_timeout: Duration = LOCK_TIMEOUT_S,
        messages: MessagesAgain | None = None,
    ) -> None:
        super().__init__(
            url_or_engine,
            self._write,
            rollback_after=rollback_after,
            lock_timeout=lock_timeout,
            fence_table=fence_table,
            schema=fence_schema,
            messages=messages,
        )
        if not isinstance(table, str) or not table:
            raise OptionError(f"table={table!r} is not the name of a table")
        for name, value, known in (
            ("on_conflict", on_conflict, ON_CONFLICT),
            ("on_bad_row", on_bad_row, ON_BAD_ROW),
            ("on_unknown_field", on_unknown_field, ON_UNKNOWN_FIELD),
        ):
            if value not in known:
                raise OptionError(f"{name}={value!r} is not one of {', '.join(known)}")
        self.table, self._schema = table, schema
        self._names, self._fields = _columns_in(columns)
        self._key = tuple(_names_in(key, "key")) if key is not None else ()
        if on_conflict == UPDATE and not self._key:
            raise OptionError("on_conflict='update' needs key=…, the columns of a unique key of the table")
        left_out = [name for name in self._key if self._names is not None and name not in self._names]
        if left_out:
            raise OptionError(f"key={left_out[0]!r} is not among columns: each row needs its key")
        self._on_conflict = on_conflict
        self._refuses_unknown_fields = on_unknown_field == ERROR
        self.needs_single_transactions = on_bad_row == ROLLBACK
        self._target: Target | None = None

    def __repr__(self) -> str:
        return f"TableListener({self._fence.where!r}, {self.table!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_target": None}  # the other process inspects the table by itself

    @property
    def update_key(self) -> tuple[str, ...]:
        """The columns of the key of which the last row counts; empty without ``on_conflict="update"``."""
        return self._key if self._on_conflict == UPDATE else ()

    def require_ready(self) -> None:
        """Inspect the table, once in a process.

        Raises
        ------
        ListenerError
            When the table, a column or the key is missing.
        """
        if self._target is None:
            with self._fence.transaction(write=False) as connection:
                self._inspected(connection)

    # ------------------------------------------------------------------ the table
    def _inspected(self, connection: sa.Connection) -> Target:
        target = self._target  # another thread may forget it meanwhile
        if target is None:
            target = self._target = self._inspect(connection)
        return target

    def _inspect(self, connection: sa.Connection) -> Target:
        columns = {column["name"]: column for column in columns_of(connection, self.table, self._schema)}
        for name in (*(self._names or ()), *self._key):
            if name not in columns:
                raise ListenerError(f"table {self.table!r} has no column {name!r}: it has {', '.join(columns)}")
        _require_undoable(connection, self.table, self._schema)
        unique = _unique_keys(connection, self.table, self._schema)
        if self._key and set(self._key) not in unique:
            shown = "; ".join(", ".join(sorted(key)) for key in unique) or "none"
            raise ListenerError(
                f"table {self.table!r} has no unique key of the columns {', '.join(self._key)}: its unique keys are "
                f"{shown}"
            )
        dialect = connection.dialect.name
        if self._on_conflict != ERROR and self._key and dialect in ("mariadb", "mysql") and len(unique) > 1:
            raise ListenerError(
                f"table {self.table!r} has {len(unique)} unique keys, and {dialect} does not tell which of them a row "
                f"conflicts with, so another row than that of key={', '.join(self._key)} could be changed: only "
                "on_conflict='error' can be used"
            )
        types = self._types(columns, dialect)
        names = list(types)
        return Target(
            as_table(self.table, self._schema, list(columns.values())),
            self._schema,
            types,
            is_postgres=dialect == "postgresql",
            never_null=tuple(n for n in names if n in self._key or self._is_required(columns[n])),
            defaults=() if self._names is not None else tuple(n for n in names if _has_default(columns[n])),
            lookup=self._key or _primary_key(connection, self.table, self._schema),
            conflict=self._conflict(names),
            refuses_unknown_fields=self._refuses_unknown_fields,
        )

    def _types(self, columns: dict[str, ReflectedColumn], dialect: str) -> dict[str, pa.DataType | str]:
        """Return what each field is read as: an Arrow type, or ``JSON`` or ``_DATE``."""
        if self._fields is not None:
            return {field.name: field.type for field in self._fields}
        types: dict[str, pa.DataType | str] = {}
        for name in self._names or [name for name, column in columns.items() if not _is_generated(column)]:
            kind = type_in_json(columns[name]["type"], dialect)
            if kind is None:
                raise ListenerError(
                    f"column {name!r} of table {self.table!r} is {columns[name]['type']}, which has no form in JSON: "
                    "name the other columns in columns; or say there what to read, as a pyarrow.Schema or Spark's DDL"
                )
            types[name] = kind
        return types

    def _is_required(self, column: ReflectedColumn) -> bool:
        return not column["nullable"] and (self._names is not None or not _has_default(column))

    def _conflict(self, names: Sequence[str]) -> Conflict | None:
        if self._on_conflict == ERROR:
            return None
        update = [n for n in names if n not in self._key] if self._on_conflict == UPDATE else []
        return Conflict(self._key, tuple(update), keeps=self._names is None)

    # ------------------------------------------------------------------ work
    def _write(self, connection: sa.Connection, batch: HalfBatch) -> VerdictArray | None:
        try:
            return self._write_rows(connection, batch)
        except BaseException:
            self._target = None  # somebody may mend the table before the next try
            raise

    def _write_rows(self, connection: sa.Connection, batch: HalfBatch) -> VerdictArray | None:
        """Insert the rows of each transaction whose rows all fit."""
        target = self._inspected(connection)
        savepoint = connection.begin_nested()
        problem: MessageError | None = None
        try:
            refused = self._insert_rows(connection, batch, target)
        except MessageError as raised:
            problem = raised
        if problem is None and not refused.reasons:
            savepoint.commit()
            return None
        # A refusal is final. So the table is inspected once more: somebody may have altered it.
        newest = self._inspect(connection)
        if newest.shape != target.shape:
            savepoint.rollback()
            target = self._target = newest
            refused = self._insert_rows(connection, batch, target)
        elif problem is not None:
            raise problem
        else:
            savepoint.commit()
        if not refused.reasons:
            return None
        owners = batch.transactions[_owner_column(batch)]
        if 1 < len(owners) == len(refused.reasons) and set(refused.reasons.values()) == {target.taken_reason}:
            logger.warning(
                "all %d transactions of half batch %s are rolled back: %s. Does a query read its input again, under a "
                "new checkpoint or a copy?",
                len(owners), batch.half_id, target.taken_reason, extra=of_batch(batch),
            )  # fmt: skip
        return batch.verdicts(rollback={owners[unit].as_py(): reason for unit, reason in refused.reasons.items()})

    def _insert_rows(self, connection: sa.Connection, batch: HalfBatch, target: Target) -> Refused:
        column = _owner_column(batch)
        messages = batch.messages(["body", column])
        rows, bad = target.read(messages["body"])
        if self.needs_single_transactions:
            self._require_single(batch, messages.num_rows)
            owners = batch.transactions[column].combine_chunks()
            units = pc.index_in(messages[column], value_set=owners).combine_chunks()
        else:
            units = pa.array(range(messages.num_rows), pa.int32())
        refused = Refused(self, batch, units)
        for row in sorted(bad):
            refused.add(units[row].as_py(), bad[row])
        rows, units = refused.others(rows, units)
        if rows.num_rows:
            target.insert(connection, rows, units, refused)
        return refused

    def _require_single(self, batch: HalfBatch, count: int) -> None:
        if batch.transaction_per == BATCH and count > 1:
            raise ListenerError(
                f"half batch {batch.half_id!r} is one transaction of {count} messages, and on_bad_row='rollback' rolls "
                "back single ones: send with transactionKey or transactionPer=message, or set on_bad_row='fail'"
            )


def _owner_column(batch: HalfBatch) -> str:
    """Return the column of messages that names their transaction."""
    return "transaction_key" if batch.transaction_per == KEY else "transaction_id"


# ---------------------------------------------------------------- arguments
def _columns_in(columns: object) -> tuple[tuple[str, ...] | None, pa.Schema | None]:
    """Return the names of the columns, None for all of the table, and the schema if one is given."""
    if columns is None:
        return None, None
    has_types = isinstance(columns, str) and any(len(part.split()) > 1 for part in columns.split(","))
    if isinstance(columns, pa.Schema) or has_types:
        fields = arrow_schema(columns)
        return tuple(_names_in(fields.names, "columns")), fields
    return tuple(_names_in(columns, "columns")), None


def _names_in(value: object, option: str) -> list[str]:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n for n in names):
        raise OptionError(f"{option}={str(value)[:200]!r}: names of columns are expected, such as 'order_id, total'")
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise OptionError(f"{option} names {duplicates[0]!r} twice")
    return list(names)


# ---------------------------------------------------------------- the catalogue
def _has_default(column: ReflectedColumn) -> bool:
    """Whether a row without the column gets another value than NULL."""
    return column["default"] is not None or column.get("identity") is not None or column.get("autoincrement") is True


def _is_generated(column: ReflectedColumn) -> bool:
    """Whether only the database may set the column."""
    return column.get("computed") is not None or bool(dict(column.get("identity") or {}).get("always"))


def _primary_key(connection: sa.Connection, table: str, schema: str | None) -> tuple[str, ...]:
    return tuple(sa.inspect(connection).get_pk_constraint(table, schema=schema)["constrained_columns"])


def _unique_keys(connection: sa.Connection, table: str, schema: str | None) -> list[set[str]]:
    """Return the columns of each unique key that holds for all rows."""
    inspector = sa.inspect(connection)
    keys = [set(_primary_key(connection, table, schema))]
    keys += [set(unique["column_names"]) for unique in inspector.get_unique_constraints(table, schema=schema)]
    for index in inspector.get_indexes(table, schema=schema):
        is_partial = any(name.endswith("_where") for name in index.get("dialect_options", {}))
        if index["unique"] and not is_partial and not index.get("expressions"):
            keys.append({name for name in index["column_names"] if name is not None})
    return [key for position, key in enumerate(keys) if key and key not in keys[:position]]


def _require_undoable(connection: sa.Connection, table: str, schema: str | None) -> None:
    """Require a table of PostgreSQL that tells its defaults, and that MariaDB or MySQL refuses values that do not fit,
    and undoes what is rolled back."""
    if connection.dialect.name == "postgresql" and table in sa.inspect(connection).get_view_names(schema):
        raise ListenerError(f"{table!r} is a view, which does not tell the defaults of its table: name the table")
    if connection.dialect.name not in ("mariadb", "mysql"):
        return
    options = sa.inspect(connection).get_table_options(table, schema=schema)
    engine = next((str(value) for name, value in options.items() if name.endswith("_engine")), "InnoDB")
    if engine.lower() != "innodb":
        raise ListenerError(
            f"table {table!r} has the storage engine {engine}, in which what is rolled back stays: make it InnoDB "
            f"(ALTER TABLE {table} ENGINE=InnoDB)"
        )
    mode = str(connection.exec_driver_sql("SELECT @@sql_mode").scalar_one())
    if "STRICT_TRANS_TABLES" not in mode and "STRICT_ALL_TABLES" not in mode:
        raise ListenerError(
            f"the server's sql_mode is {mode!r}, in which it cuts values that do not fit: add STRICT_TRANS_TABLES"
        )
