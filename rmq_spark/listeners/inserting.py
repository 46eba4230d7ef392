"""Inserts rows of Arrow into a table of a database, in the database transaction that is open.

PostgreSQL takes them by COPY in its binary format, made from Arrow without a loop over rows::

    each column has just the table's type        rows ─▶ COPY ─▶ the table
    the server has to convert some               rows ─▶ COPY ─▶ a temporary table ─▶ INSERT … SELECT ─▶ the table
    lists and structs; no psycopg, no pgpq       rows ─▶ INSERT of many rows

The encoder does not know the table: bytes of another type would be stored as a wrong value, and no error. So each
column is compared with the catalogue first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

import rmq_spark.listeners.database  # noqa: F401 - it says what to install when SQLAlchemy is missing
from rmq_spark.errors import ListenerError, MessageError

import sqlalchemy as sa  # isort: skip

AT_ONCE = 10_000
"""Rows of one INSERT, and of one piece of a COPY."""
_UTC_TIME, _NAIVE_TIME = pa.timestamp("us", "UTC"), pa.timestamp("us")
_TYPES: Mapping[str, tuple[pa.DataType, Callable[[pa.DataType], bool]]] = {
    "bool": (pa.bool_(), kinds.is_boolean),
    "int2": (pa.int16(), lambda t: t in (pa.int8(), pa.int16(), pa.uint8())),
    "int4": (pa.int32(), lambda t: t in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16())),
    "int8": (pa.int64(), lambda t: kinds.is_integer(t) and t != pa.uint64()),
    "float4": (pa.float32(), lambda t: t == pa.float32()),
    "float8": (pa.float64(), lambda t: t in (pa.float32(), pa.float64())),
    "text": (pa.string(), lambda t: kinds.is_string(t) or kinds.is_large_string(t)),
    "varchar": (pa.string(), lambda t: kinds.is_string(t) or kinds.is_large_string(t)),
    "jsonb": (pa.string(), lambda t: kinds.is_string(t) or kinds.is_large_string(t)),
    "bytea": (pa.binary(), lambda t: kinds.is_binary(t) or kinds.is_large_binary(t)),
    "date": (pa.date32(), kinds.is_date32),
    "timestamptz": (_UTC_TIME, lambda t: kinds.is_timestamp(t) and t.tz is not None),
    "timestamp": (_NAIVE_TIME, lambda t: kinds.is_timestamp(t) and t.tz is None),
}
"""PostgreSQL's types, the Arrow type whose bytes they have, and which columns become that without a loss."""
_CARRIERS = ("bool", "int8", "float8", "text", "bytea", "date", "timestamptz", "timestamp")
"""In a temporary table, from which the server converts."""
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_COLUMNS = sa.text(
    "SELECT a.attname, t.typname, CASE t.typname WHEN 'bpchar' THEN 'text' WHEN 'bit' THEN 'bit varying' "
    "ELSE format_type(a.atttypid, NULL) END AS written FROM pg_attribute a "
    "JOIN pg_type t ON t.oid = a.atttypid WHERE a.attrelid = to_regclass(:name) AND a.attnum > 0 "
    "AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum"
)


class _Column(NamedTuple):
    """A column of the table: PostgreSQL's short name of its type, and the type without a length to which a cast brings
    a value. (A cast to ``char`` or ``bit`` would cut it to one character.)"""

    kind: str
    written: str


def insert(connection: sa.Connection, table: str, rows: pa.Table, schema: str | None = None) -> int:
    """Insert rows into a table. They are there when the open database transaction commits.

    Parameters
    ----------
    connection : sqlalchemy.Connection
        The one that ``work`` is given.
    table : str
    rows : pyarrow.Table
        Its columns are some of the table's, by name. Columns that it lacks get the table's defaults.
    schema : str, optional
        The database schema of the table.

    Returns
    -------
    int
        How many rows.

    Raises
    ------
    ListenerError
        When there is no such table, or it lacks a column.
    MessageError
        For text with a NUL character, or a time outside of the years 1 to 9999, which PostgreSQL cannot keep.
    sqlalchemy.exc.DBAPIError
        For whatever the database refuses.
    """
    if not rows.num_columns:
        raise MessageError("the rows have no column: name those that are to be inserted")
    rows = rows.unify_dictionaries()
    if connection.dialect.name == "postgresql":
        columns = _columns_of(connection, table, schema)
        _require_columns(rows, table, list(columns))
        _require_storable(rows)
        if _can_copy(connection, rows):
            _copy(connection, table, schema, rows, columns)
            return int(rows.num_rows)
    _insert_many(connection, table, schema, rows)
    return int(rows.num_rows)


def _insert_many(connection: sa.Connection, table: str, schema: str | None, rows: pa.Table) -> None:
    try:
        target = sa.Table(table, sa.MetaData(), schema=schema, autoload_with=connection)
    except sa.exc.NoSuchTableError:
        raise _no_table(connection, table, schema) from None
    _require_columns(rows, table, [column.name for column in target.columns])
    for start in range(0, rows.num_rows, AT_ONCE):
        connection.execute(target.insert(), rows.slice(start, AT_ONCE).to_pylist())


def _require_columns(rows: pa.Table, table: str, there: Sequence[str]) -> None:
    for name in rows.column_names:
        if name not in there:
            raise ListenerError(f"table {table!r} has no column {name!r}: it has {', '.join(there)}")
        if rows.column_names.count(name) > 1:
            raise ListenerError(f"the rows for table {table!r} have two columns {name!r}")


def _no_table(connection: sa.Connection, table: str, schema: str | None) -> ListenerError:
    there = sorted(sa.inspect(connection).get_table_names(schema=schema))
    return ListenerError(
        f"the database has no table {table!r}{'' if schema is None else f' in schema {schema!r}'}: it has "
        f"{', '.join(there[:20]) or 'none'}{' and others' if len(there) > 20 else ''}"
    )


def _require_storable(rows: pa.Table) -> None:
    """Raise MessageError for what PostgreSQL cannot keep, with the first row that has it."""
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        wrong: Any = None
        if kinds.is_string(column.type) or kinds.is_large_string(column.type):
            wrong, what = pc.match_substring(column, "\x00"), "a NUL character"
        elif kinds.is_timestamp(column.type):
            at = pc.cast(pc.cast(column, pa.timestamp("us", column.type.tz), safe=False), pa.int64())
            wrong, what = pc.or_(pc.less(at, _FIRST_US), pc.greater(at, _LAST_US)), "a time outside of 1 to 9999"
        if wrong is not None and (row := pc.index(pc.fill_null(wrong, False), True).as_py()) >= 0:
            raise MessageError(f"column {name!r} has {what} in row {row}, which PostgreSQL cannot keep")


# ------------------------------------------------------------------ COPY
def _columns_of(connection: sa.Connection, table: str, schema: str | None) -> dict[str, _Column]:
    found = connection.execute(_COLUMNS, {"name": _quoted(connection, table, schema)}).all()
    if not found:
        raise _no_table(connection, table, schema)
    return {name: _Column(kind, written) for name, kind, written in found}


def _quoted(connection: sa.Connection, table: str, schema: str | None) -> str:
    quote = connection.dialect.identifier_preparer.quote_identifier
    return quote(table) if schema is None else f"{quote(schema)}.{quote(table)}"


def _can_copy(connection: sa.Connection, rows: pa.Table) -> bool:
    plain = all(_carrier_of(column.type) is not None for column in rows.columns)
    return plain and connection.dialect.driver == "psycopg" and find_spec("pgpq") is not None


def _carrier_of(kind: pa.DataType) -> str | None:
    """The type in a temporary table that takes a column without a loss; None when there is none."""
    kind = _plain(kind)
    if kinds.is_decimal(kind) or kind == pa.uint64() or kinds.is_null(kind):
        return "text"
    return next((name for name in _CARRIERS if _TYPES[name][1](kind)), None)


def _copy(
    connection: sa.Connection, table: str, schema: str | None, rows: pa.Table, columns: Mapping[str, _Column]
) -> None:
    quote = connection.dialect.identifier_preparer.quote_identifier
    target, names = _quoted(connection, table, schema), [quote(name) for name in rows.column_names]
    wanted = [columns[name].kind for name in rows.column_names]
    if all(kind in _TYPES and _TYPES[kind][1](_plain(c.type)) for kind, c in zip(wanted, rows.columns, strict=True)):
        _copy_into(connection, target, names, wanted, rows)
        return
    staged, numbers = quote(f"txmq_{uuid4().hex[:16]}"), [f"c{i}" for i in range(rows.num_columns)]
    carriers = [str(_carrier_of(column.type)) for column in rows.columns]
    fields = ", ".join(f"{n} {carrier}" for n, carrier in zip(numbers, carriers, strict=True))
    connection.exec_driver_sql(f"CREATE TEMPORARY TABLE {staged} ({fields}) ON COMMIT DROP")
    _copy_into(connection, staged, numbers, carriers, rows)
    # Without its length: what is longer than a varchar(n) is refused when it is assigned, and a cast would cut it.
    casts = [f"CAST({n} AS {columns[c].written})" for n, c in zip(numbers, rows.column_names, strict=True)]
    connection.exec_driver_sql(f"INSERT INTO {target} ({', '.join(names)}) SELECT {', '.join(casts)} FROM {staged}")
    connection.exec_driver_sql(f"DROP TABLE {staged}")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if kinds.is_dictionary(kind) else kind


def _copy_into(
    connection: sa.Connection, target: str, names: Sequence[str], wanted: Sequence[str], rows: pa.Table
) -> None:
    from pgpq import ArrowToPostgresBinaryEncoder
    from pgpq.encoders import StringEncoderBuilder
    from pgpq.schema import Jsonb

    arrow = pa.schema([pa.field(f"c{i}", _TYPES[kind][0]) for i, kind in enumerate(wanted)])
    encoders = {field.name: ArrowToPostgresBinaryEncoder.infer_encoder(field) for field in arrow}
    for field, kind in zip(arrow, wanted, strict=True):
        if kind == "jsonb":
            encoders[field.name] = StringEncoderBuilder.new_with_output(field, Jsonb())
    encoder = ArrowToPostgresBinaryEncoder.new_with_encoders(arrow, encoders)
    cast = pa.table([_as(column, field.type) for column, field in zip(rows.columns, arrow, strict=True)], schema=arrow)
    statement = f"COPY {target} ({', '.join(names)}) FROM STDIN (FORMAT BINARY)"
    driver: Any = connection.connection.dbapi_connection
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            copy.write(encoder.write_header())
            for batch in cast.combine_chunks().to_batches(max_chunksize=AT_ONCE):
                copy.write(encoder.write_batch(batch))
            copy.write(encoder.finish())
    except connection.dialect.loaded_dbapi.Error as problem:
        raise sa.exc.DBAPIError.instance(
            statement, None, problem, connection.dialect.loaded_dbapi.Error, dialect=connection.dialect
        ) from problem


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return pc.cast(pc.cast(column, _plain(column.type)), kind)
