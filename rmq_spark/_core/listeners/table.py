"""A listener without code: the fields of JSON bodies become the columns of a table. See :class:`TableListener`.

What ``work`` does with the messages of a half batch::

    bodies ─▶ rows ─▶ refuse rows that cannot fit ─▶ insert the others at once, in a savepoint ─▶ verdicts
                      (no JSON object, another       │ refused by the database
                      type, a null)                  ▼
                                                     insert without rows whose key exists; then by halves, until
                                                     one transaction is refused, or a loop within PostgreSQL is
                                                     faster
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from rmq_spark._core.database.connection import Address
from rmq_spark._core.database.error_codes import is_refused_value
from rmq_spark._core.database.insert import (
    Conflict,
    as_table,
    can_insert_each,
    columns_of,
    insert,
    insert_each,
    unstorable,
)
from rmq_spark._core.listeners.decode import arrow_schema, read_bodies
from rmq_spark._core.listeners.fence import FENCE_TABLE
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.sql import (
    LOCK_TIMEOUT_S,
    ROLLBACK_AFTER_S,
    MessagesAgain,
    SqlTransactionListener,
)
from rmq_spark._core.vocabulary.options import named
from rmq_spark._core.vocabulary.redaction import one_line, text_of
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY, VerdictArray
from rmq_spark.errors import ListenerError, MessageError, OptionError

import sqlalchemy as sa  # isort: skip
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.engine.interfaces import ReflectedColumn

ON_CONFLICT = ERROR, IGNORE, UPDATE = ("error", "ignore", "update")
ON_BAD_ROW = FAIL, ROLLBACK = ("fail", "rollback")

EACH_MAX = 4_000
"""Transactions up to which PostgreSQL inserts them one by one after a refusal, instead of by halves."""
KEYS_AT_ONCE = 5_000
"""Key values that one SELECT looks for."""
EXACT_DIGITS = 15
"""Decimal digits that a double keeps. A numeric column that may have more is read as decimals, which takes longer."""
_DECIMAL = pa.decimal256(76, 38)
_UTC, _NAIVE = pa.timestamp("us", "UTC"), pa.timestamp("us")
_BLANK = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class TableListener(SqlTransactionListener):
    """Inserts a row for each message into a table, in the database transaction of the fence, without a function.

    Parameters
    ----------
    url_or_engine : str, sqlalchemy.URL, callable or sqlalchemy.Engine
        As for :class:`SqlTransactionListener`.
    table : str
        The table, which must exist. The listener inspects it once, at first use.
    columns : str, pyarrow.Schema or sequence of str, optional
        The fields to read from the JSON bodies, by the names of the table's columns. Other fields are left out.

        ======================================= ========================================================================
        ``columns``                             meaning
        ======================================= ========================================================================
        not given                               all columns of the table. A field that is null or missing counts as not
                                                given: an insert takes the column's default, an update leaves the column
                                                as it is
        ``"order_id, total"``, or a list        these columns, with the types of the table. A field that is null or
                                                missing is NULL
        ``"order_id long, total double"``, or   these columns, read with these types as by :meth:`HalfBatch.decode`. The
        a pyarrow.Schema                        database converts them. A field that is null or missing is NULL
        ======================================= ========================================================================

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
    schema : str, optional
        The database schema of the table.
    fence_table, fence_schema, rollback_after, lock_timeout, messages : optional
        As for :class:`SqlTransactionListener`, where ``fence_schema`` is ``schema``.

    Notes
    -----
    A row does not fit when its body is no JSON object or has no field of the columns; when a field has another type
    than its column, or is null in a column that is NOT NULL or part of the key; or when the database refuses it, for a
    key that exists, a CHECK or FOREIGN KEY constraint, or a value that is too long. To find refused rows, the listener
    looks up which keys exist, and inserts the other rows by halves, in savepoints. A refusal at the commit (a deferred
    constraint) and an error of a trigger fail the half batch.

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
        schema: str | None = None,
        fence_table: str = FENCE_TABLE,
        fence_schema: str | None = None,
        rollback_after: float = ROLLBACK_AFTER_S,
        lock_timeout: float = LOCK_TIMEOUT_S,
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
        self.needs_single_transactions = on_bad_row == ROLLBACK
        self._target: _Target | None = None

    def __repr__(self) -> str:
        return f"TableListener({self._fence.where!r}, {self.table!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_target": None}  # the other process inspects the table by itself

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
    def _inspected(self, connection: sa.Connection) -> _Target:
        if self._target is None:
            self._target = self._inspect(connection)
        return self._target

    def _inspect(self, connection: sa.Connection) -> _Target:
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
        return _Target(
            as_table(self.table, self._schema, list(columns.values())),
            self._schema,
            types,
            is_postgres=dialect == "postgresql",
            never_null=tuple(n for n in names if n in self._key or self._is_required(columns[n])),
            defaults=() if self._names is not None else tuple(n for n in names if _has_default(columns[n])),
            lookup=self._key or _primary_key(connection, self.table, self._schema),
            conflict=self._conflict(names),
        )

    def _types(self, columns: dict[str, ReflectedColumn], dialect: str) -> dict[str, pa.DataType | str]:
        """Return what each field is read as: an Arrow type, or ``_JSON`` or ``_DATE``."""
        if self._fields is not None:
            return {field.name: field.type for field in self._fields}
        types: dict[str, pa.DataType | str] = {}
        for name in self._names or [name for name, column in columns.items() if not _is_generated(column)]:
            kind = _type_in_json(columns[name]["type"], dialect)
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
        """Insert the rows of each transaction whose rows all fit."""
        target = self._inspected(connection)
        column = "transaction_key" if batch.transaction_per == KEY else "transaction_id"
        messages = batch.messages(["body", column])
        rows, bad = target.read(messages["body"])
        if self.needs_single_transactions:
            self._require_single(batch, messages.num_rows)
            owners = batch.transactions[column].combine_chunks()
            units = pc.index_in(messages[column], value_set=owners).combine_chunks()
        else:
            units = pa.array(range(messages.num_rows), pa.int32())
        refused = _Refused(self, batch, units)
        for row in sorted(bad):
            refused.add(units[row].as_py(), bad[row])
        rows, units = refused.others(rows, units)
        if rows.num_rows:
            target.insert(connection, rows, units, refused)
        if not refused.reasons:
            return None
        return batch.verdicts(rollback={owners[unit].as_py(): reason for unit, reason in refused.reasons.items()})

    def _require_single(self, batch: HalfBatch, count: int) -> None:
        if batch.transaction_per == BATCH and count > 1:
            raise ListenerError(
                f"half batch {batch.half_id!r} is one transaction of {count} messages, and on_bad_row='rollback' rolls "
                "back single ones: send with transactionKey or transactionPer=message, or set on_bad_row='fail'"
            )


class _Refused:
    """The transactions, or the messages, whose rows do not fit, and why."""

    def __init__(self, listener: TableListener, batch: HalfBatch, units: pa.Array) -> None:
        self._listener, self._batch, self._units = listener, batch, units
        self.reasons: dict[int, str] = {}

    def add(self, unit: int, reason: str, problem: BaseException | None = None) -> None:
        """Refuse a transaction, or raise MessageError when that fails the half batch."""
        if self._listener.needs_single_transactions:
            self.reasons.setdefault(unit, reason)
            return
        row = pc.index(self._units, unit).as_py()
        raise MessageError(
            f"the message of row {row} ({self._batch._name_of(row)}) does not fit table {self._listener.table!r}: "
            f"{reason}. Nothing was inserted. on_bad_row='rollback' rolls back such transactions alone"
        ) from problem

    def others(self, rows: pa.Table, units: pa.Array) -> tuple[pa.Table, pa.Array]:
        """Return the rows of transactions that are not refused."""
        if not self.reasons:
            return rows, units
        keep = pc.invert(pc.is_in(units, value_set=pa.array(list(self.reasons), units.type)))
        return rows.filter(keep), units.filter(keep)


@dataclass(frozen=True)
class _Target:
    """The table, and what is read from a body for it."""

    table: sa.Table
    schema: str | None
    types: dict[str, pa.DataType | str]
    is_postgres: bool
    never_null: tuple[str, ...]
    defaults: tuple[str, ...]
    """Columns that an insert leaves out where a row has null."""
    lookup: tuple[str, ...]
    """A unique key, by which existing rows can be found."""
    conflict: Conflict | None

    # ------------------------------------------------------------------ reading
    def read(self, bodies: pa.ChunkedArray) -> tuple[pa.Table, dict[int, str]]:
        """Return a row for each body, and why rows do not fit, by row."""
        plain = {name: _read_as(kind) for name, kind in self.types.items() if kind != _JSON}
        # The reader needs a field. No body has this one.
        fields = pa.schema(list(plain.items()) or [("\x00", pa.null())])
        decoded, bad = read_bodies(bodies, fields)
        columns = {name: decoded[name] for name in plain}
        if len(plain) < len(self.types):
            columns |= self._read_json(bodies, bad)
        converted = {name: _converted(columns[name], kind) for name, kind in self.types.items()}
        rows = pa.table({name: column for name, (column, _) in converted.items()})
        for name, (_, misfits) in converted.items():
            if misfits is not None:
                _note(bad, misfits, f"column {name!r} is a {self.types[name]}, and the field is none")
        null_masks = [pc.is_null(column) for column in rows.columns]
        all_null = null_masks[0]
        for is_null in null_masks[1:]:
            all_null = pc.and_(all_null, is_null)
        _note(bad, all_null, f"the body has none of the fields {', '.join(rows.column_names)}")
        for name, is_null in zip(rows.column_names, null_masks, strict=True):
            if name in self.never_null:
                _note(bad, is_null, f"column {name!r} cannot be null, and the field is null or missing")
        for name, flaw, misfits in unstorable(rows):
            if self.is_postgres or kinds.is_timestamp(rows[name].type):
                _note(bad, misfits, f"column {name!r} has {flaw}, which the database cannot keep")
        return rows, bad

    def _read_json(self, bodies: pa.ChunkedArray, bad: dict[int, str]) -> dict[str, pa.ChunkedArray]:
        """Return the fields of JSON columns, as they are written in the bodies."""
        names = [name for name, kind in self.types.items() if kind == _JSON]
        texts: dict[str, list[str | None]] = {name: [None] * len(bodies) for name in names}
        for row, body in enumerate(bodies.to_pylist()):
            if row in bad:
                continue
            try:
                for name, text in _fields_of(body.decode() if isinstance(body, bytes) else body):
                    if name in texts:
                        texts[name][row] = text
            except (ValueError, IndexError, RecursionError) as problem:
                bad[row] = f"it is not JSON: {problem}"
        return {name: pa.chunked_array([pa.array(column, pa.string())]) for name, column in texts.items()}

    # ------------------------------------------------------------------ inserting
    def insert(self, connection: sa.Connection, rows: pa.Table, units: pa.Array, refused: _Refused) -> None:
        """Insert the rows, and add the transactions whose rows the database refuses to ``refused``."""
        problem = self._try(connection, rows)
        if problem is not None and self.conflict is None and self._refuse_taken_keys(connection, rows, units, refused):
            rows, units = refused.others(rows, units)
            problem = self._try(connection, rows)
        if problem is None:
            return
        if self.conflict is None:
            self._insert_parts(connection, rows, units, problem, refused)
            return
        # Parts change the order of rows, which decides among rows with one key. So parts only find the refused rows.
        trial = connection.begin_nested()
        self._insert_parts(connection, rows, units, problem, refused)
        trial.rollback()
        problem = self._try(connection, refused.others(rows, units)[0])
        if problem is not None:
            raise problem

    def _insert_parts(
        self,
        connection: sa.Connection,
        rows: pa.Table,
        units: pa.Array,
        problem: sa.exc.StatementError | None,
        refused: _Refused,
    ) -> None:
        """Insert rows part by part, after the database has refused some of them."""
        remaining: list[tuple[pa.Table, pa.Array, sa.exc.StatementError | None]] = [(rows, units, problem)]
        while remaining:
            part, part_units, problem = remaining.pop()
            if problem is None:
                problem = self._try(connection, part)
            if problem is None:
                continue
            distinct = pc.unique(part_units)
            if len(distinct) == 1:
                refused.add(distinct[0].as_py(), _reason(problem), problem)
                continue
            if len(distinct) <= EACH_MAX and self._insert_each(connection, part, part_units, refused):
                continue
            first = pc.is_in(part_units, value_set=distinct[: len(distinct) // 2])
            second = pc.invert(first)
            for half in (second, first):  # the first half is inserted first
                remaining.append((part.filter(half), part_units.filter(half), None))

    def _try(self, connection: sa.Connection, rows: pa.Table) -> sa.exc.StatementError | None:
        """Insert rows in a savepoint, or return the error with which the database refuses one of them."""
        if not rows.num_rows:
            return None
        savepoint = connection.begin_nested()
        try:
            for part in self._parts(rows):
                insert(connection, self.table.name, part, self.schema, self.conflict, self.table)
        except sa.exc.StatementError as problem:
            if not is_refused_value(problem):
                raise
            savepoint.rollback()
            return problem
        savepoint.commit()
        return None

    def _insert_each(self, connection: sa.Connection, rows: pa.Table, units: pa.Array, refused: _Refused) -> bool:
        """Insert transaction by transaction within the database if it can do so. Return whether it did."""
        parts = self._parts(rows)
        is_plain = len(parts) == 1 and parts[0].num_rows == rows.num_rows  # no rows of one key were merged
        if not is_plain or not can_insert_each(connection, rows):
            return False
        reasons = insert_each(connection, self.table.name, parts[0], units, self.schema, self.conflict)
        for unit, reason in reasons.items():
            refused.add(unit, one_line(reason))
        return True

    def _parts(self, rows: pa.Table) -> list[pa.Table]:
        """Split rows into parts that take the defaults of the same columns."""
        if self.conflict is not None and self.conflict.update:
            rows = _last_of_each(rows, self.conflict.key, self.conflict.keeps)
        parts = [rows]
        for name in self.defaults:
            parts = [part for whole in parts for part in _by_null(whole, name)]
        return parts  # each part has a column: each row has a value

    def _refuse_taken_keys(self, connection: sa.Connection, rows: pa.Table, units: pa.Array, refused: _Refused) -> bool:
        """Refuse the transactions with a key that is in the table. Return whether there are any."""
        if not self.lookup or not set(self.lookup) <= set(rows.column_names):
            return False
        keys = list(zip(*(rows[name].to_pylist() for name in self.lookup), strict=True))
        columns = [self.table.columns[name] for name in self.lookup]
        existing: set[tuple[Any, ...]] = set()
        savepoint = connection.begin_nested()
        try:
            for condition in self._key_conditions(columns, keys):
                existing.update(tuple(row) for row in connection.execute(sa.select(*columns).where(condition)))
        except sa.exc.StatementError as problem:  # a value that the key's type refuses, such as a uuid
            if not is_refused_value(problem):
                raise
            savepoint.rollback()
            return False
        savepoint.commit()
        taken = [position for position, key in enumerate(keys) if key in existing] if existing else []
        for position in taken:
            refused.add(units[position].as_py(), f"a row with this {', '.join(self.lookup)} is there already")
        return bool(taken)

    def _key_conditions(
        self, columns: Sequence[sa.Column[Any]], keys: Sequence[Any]
    ) -> Iterator[sa.ColumnElement[bool]]:
        """Yield conditions that each select the rows of a part of the keys."""
        if self.is_postgres and len(columns) == 1:  # an array is one parameter
            array = sa.literal([key for (key,) in keys], postgresql.ARRAY(columns[0].type))
            yield columns[0] == sa.func.any(array)
            return
        for start in range(0, len(keys), KEYS_AT_ONCE):
            part = keys[start : start + KEYS_AT_ONCE]
            yield sa.tuple_(*columns).in_(part) if len(columns) > 1 else columns[0].in_([key for (key,) in part])


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
_JSON, _DATE = "JSON value", "date"


def _type_in_json(kind: sa.types.TypeEngine[Any], dialect: str) -> pa.DataType | str | None:
    """Return what a field of this column type is read as; None for a type that has no form in JSON."""
    postgres, lite = dialect == "postgresql", dialect == "sqlite"
    if isinstance(kind, postgresql.DOMAIN):
        return _type_in_json(kind.data_type, dialect)
    if isinstance(kind, sa.Boolean) or (isinstance(kind, mysql.TINYINT) and kind.display_width == 1):
        return pa.bool_()
    if isinstance(kind, sa.Integer):
        return pa.int64() if lite else _integer(kind)
    if isinstance(kind, sa.Float):
        return pa.float32() if postgres and isinstance(kind, sa.REAL) else pa.float64()
    if isinstance(kind, sa.Numeric):
        return pa.float64() if lite or (kind.precision or EXACT_DIGITS + 1) <= EXACT_DIGITS else _DECIMAL
    if isinstance(kind, sa.JSON):
        return _JSON
    if isinstance(kind, sa.DateTime):
        return _UTC if postgres and kind.timezone else _NAIVE
    if isinstance(kind, sa.Date):
        return _DATE
    if isinstance(kind, sa.ARRAY):
        item = _type_in_json(kind.item_type, dialect)
        return pa.list_(item) if isinstance(item, pa.DataType) else None
    if isinstance(kind, sa.LargeBinary) or (lite and isinstance(kind, sa.Time)):
        return None
    return pa.string()  # PostgreSQL converts text to other types: uuid, enum, inet, interval, time


def _integer(kind: sa.Integer) -> pa.DataType:
    signed = not getattr(kind, "unsigned", False)
    if isinstance(kind, sa.BigInteger):
        return pa.int64() if signed else pa.uint64()
    if isinstance(kind, sa.SmallInteger):
        return pa.int16() if signed else pa.uint16()
    if isinstance(kind, mysql.TINYINT):
        return pa.int8() if signed else pa.uint8()
    return pa.int32() if signed else pa.uint32()


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
    """Require that MariaDB or MySQL refuses values that do not fit, and undoes what is rolled back."""
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


# ---------------------------------------------------------------- fields
def _read_as(kind: pa.DataType | str) -> pa.DataType:
    return _NAIVE if isinstance(kind, str) else kind


def _converted(column: pa.ChunkedArray, kind: pa.DataType | str) -> tuple[pa.ChunkedArray, pa.ChunkedArray | None]:
    """Return the values for the table, and which fields do not fit the column; None where all fit."""
    if kind == _DATE:
        day = pc.floor_temporal(column, unit="day")
        misfits = pc.or_(pc.not_equal(day, column), pc.less(day, pa.scalar(datetime.min, _NAIVE)))
        return pc.cast(day, pa.date32()), pc.fill_null(misfits, False)
    if kinds.is_floating(column.type):  # the reader accepts NaN, Infinity and numbers too large for 32 bits
        return column, pc.fill_null(pc.invert(pc.is_finite(column)), False)
    if kind == _DECIMAL:
        text = pc.replace_substring_regex(pc.cast(column, pa.string()), r"\.?0+$", "")
        return text, None
    return column, None


def _note(bad: dict[int, str], misfits: pa.ChunkedArray, reason: str) -> None:
    for row in pc.indices_nonzero(misfits).to_pylist():
        bad.setdefault(row, reason)


def _fields_of(body: str) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the JSON text of each field, so that numbers keep all digits; None for null."""
    position = _after_blanks(body, _after_blanks(body, 0) + 1)
    while body[position] != "}":
        name, position = scanstring(body, position + 1)
        start = _after_blanks(body, _after_blanks(body, position) + 1)
        value, position = _DECODER.raw_decode(body, start)
        yield name, None if value is None else body[start:position]
        position = _after_blanks(body, position)
        if body[position] == ",":
            position = _after_blanks(body, position + 1)


def _after_blanks(body: str, position: int) -> int:
    blanks = _BLANK.match(body, position)
    return position if blanks is None else blanks.end()


# ---------------------------------------------------------------- rows
def _last_of_each(rows: pa.Table, key: Sequence[str], keeps: bool) -> pa.Table:
    """Return the last row of each key; with ``keeps``, in each column its last value that is not null."""
    numbers = pa.array(range(rows.num_rows), pa.int64())
    others = [name for name in rows.column_names if name not in key]
    number_columns = {f"\0{n}": pc.if_else(pc.is_valid(rows[n]), numbers, None) if keeps else numbers for n in others}
    grouped = pa.table({**{name: rows[name] for name in key}, **number_columns}).group_by(list(key), use_threads=False)
    last = grouped.aggregate([(name, "max") for name in number_columns])
    if last.num_rows == rows.num_rows:
        return rows
    return pa.table({n: last[n] if n in key else rows[n].take(last[f"\0{n}_max"]) for n in rows.column_names})


def _by_null(rows: pa.Table, name: str) -> list[pa.Table]:
    """Return the rows that have a value in a column, and the other rows without the column."""
    nulls = rows[name].null_count
    if not nulls:
        return [rows]
    if nulls == rows.num_rows:
        return [rows.drop_columns([name])]
    has_value = pc.is_valid(rows[name])
    return [rows.filter(has_value), rows.filter(pc.invert(has_value)).drop_columns([name])]


def _reason(problem: sa.exc.StatementError) -> str:
    """Return the database's error text, without the second line, in which PostgreSQL adds values of the row."""
    cause: Any = problem.orig
    if isinstance(cause, BaseException) and len(cause.args) == 2 and isinstance(cause.args[0], int):
        return one_line(str(cause.args[1]))  # MariaDB and MySQL: the text after the number
    lines = text_of(cause).splitlines() if isinstance(cause, BaseException) else []
    return one_line(lines[0]) if lines else type(problem).__name__
