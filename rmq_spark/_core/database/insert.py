"""Inserts Arrow rows into a table of a database, in the open database transaction.

PostgreSQL gets them by COPY in its binary format, encoded from Arrow without a loop over rows::

    each column has exactly the table's type     rows ─▶ COPY ─▶ the table
    the server must convert columns, or a key    rows ─▶ COPY ─▶ a temporary table ─▶ INSERT … SELECT ─▶ the table
    may be in the table already
    lists and structs; no psycopg or no pgpq     rows ─▶ INSERT of many rows

The encoder does not know the table: bytes of another type would be stored as a wrong value, without an error. So each
column is compared with the catalogue first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

import rmq_spark._core.database.connection  # noqa: F401 - its error says what to install when SQLAlchemy is missing
from rmq_spark.errors import ListenerError, MessageError

import sqlalchemy as sa  # isort: skip
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine.interfaces import ReflectedColumn

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
"""By PostgreSQL's type: the Arrow type with the same bytes, and which Arrow types become that without a loss."""
_CARRIERS = ("bool", "int8", "float8", "text", "bytea", "date", "timestamptz", "timestamp")
"""Types of a temporary table, from which the server converts."""
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_COLUMNS = sa.text(
    "SELECT a.attname, t.typname, CASE t.typname WHEN 'bpchar' THEN 'text' WHEN 'bit' THEN 'bit varying' "
    "ELSE format_type(a.atttypid, NULL) END AS written, "
    "c.relkind IN ('r', 'p', 'f') AND NOT row_security_active(c.oid) AS takes_copy FROM pg_attribute a "
    "JOIN pg_type t ON t.oid = a.atttypid JOIN pg_class c ON c.oid = a.attrelid "
    "WHERE a.attrelid = to_regclass(:name) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' "
    "ORDER BY a.attnum"
)


class _Column(NamedTuple):
    """A column's type: PostgreSQL's short name, and the type without a length for a cast. (A cast to ``char`` or
    ``bit`` would cut a value to one character.) ``takes_copy`` is false for views and where row-level security holds:
    these take an INSERT alone."""

    kind: str
    written: str
    takes_copy: bool


class Conflict(NamedTuple):
    """The fate of a row whose key is already in the table. No two inserted rows may have the same key.

    ``key`` has the columns of the unique key. MariaDB and MySQL consider every unique key of the table. So do others
    when it is empty, which is possible without ``update``. ``update`` has the columns of the existing row that get the
    new row's values; when there are none, the new row is left out. With ``keeps`` a column keeps its value where the
    new row has null.
    """

    key: Sequence[str]
    update: Sequence[str] = ()
    keeps: bool = False


def insert(
    connection: sa.Connection,
    table: str,
    rows: pa.Table,
    schema: str | None = None,
    conflict: Conflict | None = None,
    known: sa.Table | None = None,
) -> int:
    """Insert rows into a table, in the open database transaction, and return their number.

    Columns are matched by name, and those that the rows lack get the table's defaults. Without ``conflict`` the
    database refuses a row whose key exists. ``known`` is the result of :func:`as_table`, so that the table is not
    looked up again.

    A table that does not exist or lacks a column is a ListenerError. Text with a NUL character, or a time outside of
    the years 1 to 9999, which PostgreSQL cannot keep, is a MessageError.
    """
    if not rows.num_columns:
        raise MessageError("the rows have no column: name those that are to be inserted")
    _refuse_translated_schemas(connection)
    rows = rows.unify_dictionaries()
    if connection.dialect.name == "postgresql":
        columns = _columns_of(connection, table, schema)
        _require_columns(rows, table, list(columns))
        _require_storable(rows)
        if _can_copy(connection, rows):
            _copy(connection, table, schema, rows, columns, conflict)
            return int(rows.num_rows)
    _insert_many(connection, table, schema, rows, conflict, known)
    return int(rows.num_rows)


def columns_of(connection: sa.Connection, table: str, schema: str | None) -> list[ReflectedColumn]:
    """Return the table's columns from the database's catalogue, or raise ListenerError when there is no table."""
    _refuse_translated_schemas(connection)
    try:
        return sa.inspect(connection).get_columns(table, schema=schema)
    except sa.exc.NoSuchTableError:
        raise _no_table_error(connection, table, schema) from None


def _refuse_translated_schemas(connection: sa.Connection) -> None:
    """Refuse a connection that renames schemas: the catalogue and COPY would not follow, and INSERT would."""
    if connection.get_execution_options().get("schema_translate_map"):
        raise ListenerError(
            "the engine has a schema_translate_map, which COPY does not follow: give an engine without it, and name "
            "the table's schema"
        )


def as_table(table: str, schema: str | None, columns: Sequence[ReflectedColumn]) -> sa.Table:
    """Return a table of SQLAlchemy with these columns, and nothing else of the catalogue."""
    return sa.Table(
        table, sa.MetaData(), *(sa.Column(c["name"], _bound_type(c["type"])) for c in columns), schema=schema
    )


def _bound_type(kind: sa.types.TypeEngine[Any]) -> sa.types.TypeEngine[Any]:
    return type(kind)(none_as_null=True) if isinstance(kind, sa.JSON) else kind  # a null is not the JSON value null


def _insert_many(
    connection: sa.Connection,
    table: str,
    schema: str | None,
    rows: pa.Table,
    conflict: Conflict | None = None,
    known: sa.Table | None = None,
) -> None:
    target = as_table(table, schema, columns_of(connection, table, schema)) if known is None else known
    _require_columns(rows, table, [column.name for column in target.columns])
    statement = _statement(connection.dialect.name, _with_json_texts(target, rows), rows.column_names, conflict)
    for start in range(0, rows.num_rows, AT_ONCE):
        connection.execute(statement, rows.slice(start, AT_ONCE).to_pylist())


class _JsonText(sa.TypeDecorator[Any]):
    """JSON that is already text, as for COPY. SQLAlchemy's own type would encode the text as a JSON string."""

    impl = sa.JSON
    cache_ok = True

    def bind_processor(self, dialect: sa.Dialect) -> None:
        return None


def _with_json_texts(target: sa.Table, rows: pa.Table) -> sa.Table:
    """Return the table for rows that have text in its JSON columns."""
    text_names = [f.name for f in rows.schema if kinds.is_string(f.type) or kinds.is_large_string(f.type)]
    if not any(isinstance(target.columns[name].type, sa.JSON) for name in text_names):
        return target
    columns = [
        sa.Column(c.name, _JsonText() if c.name in text_names and isinstance(c.type, sa.JSON) else c.type)
        for c in target.columns
    ]
    return sa.Table(target.name, sa.MetaData(), *columns, schema=target.schema)


def _statement(dialect: str, target: sa.Table, names: Sequence[str], conflict: Conflict | None) -> sa.Insert:
    if conflict is None:
        return target.insert()
    existing = target.columns
    update = [name for name in conflict.update if name in names]
    if dialect in ("mariadb", "mysql"):
        mysql_insert = mysql.insert(target)
        new = mysql_insert.inserted
        # Nothing changes when a column of the existing row gets its own value.
        values = {name: sa.func.coalesce(new[name], existing[name]) if conflict.keeps else new[name] for name in update}
        return mysql_insert.on_duplicate_key_update(values or {names[0]: existing[names[0]]})
    statement = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(target)
    if not update:
        return statement.on_conflict_do_nothing(index_elements=list(conflict.key) or None)
    new = statement.excluded
    values = {name: sa.func.coalesce(new[name], existing[name]) if conflict.keeps else new[name] for name in update}
    return statement.on_conflict_do_update(index_elements=list(conflict.key), set_=values)


def _require_columns(rows: pa.Table, table: str, known_names: Sequence[str]) -> None:
    for name in rows.column_names:
        if name not in known_names:
            raise ListenerError(f"table {table!r} has no column {name!r}: it has {', '.join(known_names)}")
        if rows.column_names.count(name) > 1:
            raise ListenerError(f"the rows for table {table!r} have two columns {name!r}")


def _no_table_error(connection: sa.Connection, table: str, schema: str | None) -> ListenerError:
    tables = sorted(sa.inspect(connection).get_table_names(schema=schema))
    return ListenerError(
        f"the database has no table {table!r}{'' if schema is None else f' in schema {schema!r}'}: it has "
        f"{', '.join(tables[:20]) or 'none'}{' and others' if len(tables) > 20 else ''}"
    )


def _require_storable(rows: pa.Table) -> None:
    for name, flaw, has_flaw in unstorable(rows):
        if (row := pc.index(has_flaw, True).as_py()) >= 0:
            raise MessageError(f"column {name!r} has {flaw} in row {row}, which PostgreSQL cannot keep")


def unstorable(rows: pa.Table) -> Iterator[tuple[str, str, pa.ChunkedArray]]:
    """Yield, for each column, which rows PostgreSQL cannot keep: the column's name, the kind of value in words, and
    booleans."""
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if kinds.is_string(column.type) or kinds.is_large_string(column.type):
            yield name, "a NUL character", pc.fill_null(pc.match_substring(column, "\x00"), False)
        elif kinds.is_timestamp(column.type):
            times_us = pc.cast(pc.cast(column, pa.timestamp("us", column.type.tz), safe=False), pa.int64())
            is_outside = pc.or_(pc.less(times_us, _FIRST_US), pc.greater(times_us, _LAST_US))
            yield name, "a time outside of 1 to 9999", pc.fill_null(is_outside, False)


# ------------------------------------------------------------------ COPY
def _columns_of(connection: sa.Connection, table: str, schema: str | None) -> dict[str, _Column]:
    rows = connection.execute(_COLUMNS, {"name": _as_sent(_quoted(connection, table, schema))}).all()
    if not rows:
        raise _no_table_error(connection, table, schema)
    return {name: _Column(*column) for name, *column in rows}


def _quoted(connection: sa.Connection, table: str, schema: str | None) -> str:
    quote = connection.dialect.identifier_preparer.quote_identifier
    return quote(table) if schema is None else f"{quote(schema)}.{quote(table)}"


def _as_sent(statement: str) -> str:
    """Undo the doubled % of quoted names, which only a driver that reads parameters needs."""
    return statement.replace("%%", "%")


def _can_copy(connection: sa.Connection, rows: pa.Table) -> bool:
    has_carriers = all(_carrier_of(column.type) is not None for column in rows.columns)
    return has_carriers and connection.dialect.driver == "psycopg" and find_spec("pgpq") is not None


def _carrier_of(kind: pa.DataType) -> str | None:
    """Return the type in a temporary table that holds a column without a loss; None when there is none."""
    kind = _plain(kind)
    if kinds.is_decimal(kind) or kind == pa.uint64() or kinds.is_null(kind):
        return "text"
    return next((name for name in _CARRIERS if _TYPES[name][1](kind)), None)


def _copy(
    connection: sa.Connection,
    table: str,
    schema: str | None,
    rows: pa.Table,
    columns: Mapping[str, _Column],
    conflict: Conflict | None,
) -> None:
    quote = connection.dialect.identifier_preparer.quote_identifier
    target, names = _quoted(connection, table, schema), [quote(name) for name in rows.column_names]
    types = [columns[name].kind for name in rows.column_names]
    same = all(kind in _TYPES and _TYPES[kind][1](_plain(c.type)) for kind, c in zip(types, rows.columns, strict=True))
    if same and conflict is None and all(column.takes_copy for column in columns.values()):
        _copy_into(connection, target, names, types, rows)
        return
    temporary, source = _stage(connection, rows, columns)
    statement = f"INSERT INTO {target} AS txmq_there ({', '.join(names)}) {source}"
    connection.exec_driver_sql(statement + _on_conflict(quote, rows.column_names, conflict))
    connection.exec_driver_sql(f"DROP TABLE {temporary}")


def _stage(
    connection: sa.Connection, rows: pa.Table, columns: Mapping[str, _Column], units: pa.Array | None = None
) -> tuple[str, str]:
    """Copy rows into a temporary table, with ``units`` as its column ``unit`` if given. Return its name, and a SELECT
    of its rows with the types of ``columns``."""
    temporary = connection.dialect.identifier_preparer.quote_identifier(f"txmq_{uuid4().hex[:16]}")
    names = [f"c{i}" for i in range(rows.num_columns)]
    carriers = [str(_carrier_of(column.type)) for column in rows.columns]
    # Types without a length: a cast would cut a value too long for varchar(n), and an assignment refuses it.
    casts = [f"CAST({n} AS {columns[c].written})" for n, c in zip(names, rows.column_names, strict=True)]
    if units is not None:
        names, carriers, rows = [*names, "unit"], [*carriers, "int8"], rows.append_column("", units)
    fields = ", ".join(f"{n} {carrier}" for n, carrier in zip(names, carriers, strict=True))
    connection.exec_driver_sql(f"CREATE TEMPORARY TABLE {temporary} ({fields}) ON COMMIT DROP")
    _copy_into(connection, temporary, names, carriers, rows)
    return temporary, f"SELECT {', '.join(casts)} FROM {temporary}"


def can_insert_each(connection: sa.Connection, rows: pa.Table) -> bool:
    return connection.dialect.name == "postgresql" and _can_copy(connection, rows)


def insert_each(
    connection: sa.Connection,
    table: str,
    rows: pa.Table,
    units: pa.Array,
    schema: str | None,
    conflict: Conflict | None,
) -> dict[int, str]:
    """Insert rows unit by unit, each in a savepoint of its own, by a loop within PostgreSQL, and return PostgreSQL's
    error text by refused unit. ``units`` has the unit of each row. Units are inserted in the order in which they first
    appear."""
    quote = connection.dialect.identifier_preparer.quote_identifier
    target, names = _quoted(connection, table, schema), ", ".join(quote(name) for name in rows.column_names)
    distinct = pc.unique(units)
    temporary, source = _stage(
        connection, rows, _columns_of(connection, table, schema), pc.cast(pc.index_in(units, distinct), pa.int64())
    )
    refused_table, quote_tag = quote(f"txmq_{uuid4().hex[:16]}"), f"$txmq_{uuid4().hex}$"
    insert_one = f"INSERT INTO {target} AS txmq_there ({names}) {source} WHERE unit = at"
    for statement in (
        f"CREATE INDEX ON {temporary} (unit)",
        f"ANALYZE {temporary}",
        f"CREATE TEMPORARY TABLE {refused_table} (unit bigint, said text) ON COMMIT DROP",
        f"DO {quote_tag} BEGIN FOR at IN 0..{len(distinct) - 1} LOOP "
        f"BEGIN {insert_one}{_on_conflict(quote, rows.column_names, conflict)}; "
        "EXCEPTION WHEN data_exception OR integrity_constraint_violation OR with_check_option_violation THEN "
        f"INSERT INTO {refused_table} VALUES (at, SQLERRM); END; END LOOP; END {quote_tag}",
    ):
        connection.exec_driver_sql(statement)
    refusals = connection.exec_driver_sql(f"SELECT unit, said FROM {refused_table} ORDER BY unit").all()
    connection.exec_driver_sql(f"DROP TABLE {temporary}, {refused_table}")
    return {distinct[unit].as_py(): text for unit, text in refusals}


def _on_conflict(quote: Callable[[str], str], names: Sequence[str], conflict: Conflict | None) -> str:
    if conflict is None:
        return ""
    key = f" ({', '.join(quote(name) for name in conflict.key)})" if conflict.key else ""
    update = [quote(name) for name in conflict.update if name in names]
    if not update:
        return f" ON CONFLICT{key} DO NOTHING"
    new = "COALESCE(EXCLUDED.{0}, txmq_there.{0})" if conflict.keeps else "EXCLUDED.{0}"
    return f" ON CONFLICT{key} DO UPDATE SET {', '.join(f'{name} = {new.format(name)}' for name in update)}"


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if kinds.is_dictionary(kind) else kind


def _copy_into(
    connection: sa.Connection, target: str, names: Sequence[str], types: Sequence[str], rows: pa.Table
) -> None:
    from pgpq import ArrowToPostgresBinaryEncoder
    from pgpq.encoders import StringEncoderBuilder
    from pgpq.schema import Jsonb

    layout = pa.schema([pa.field(f"c{i}", _TYPES[kind][0]) for i, kind in enumerate(types)])
    encoders = {field.name: ArrowToPostgresBinaryEncoder.infer_encoder(field) for field in layout}
    for field, kind in zip(layout, types, strict=True):
        if kind == "jsonb":
            encoders[field.name] = StringEncoderBuilder.new_with_output(field, Jsonb())
    encoder = ArrowToPostgresBinaryEncoder.new_with_encoders(layout, encoders)
    cast = pa.table(
        [_as(column, field.type) for column, field in zip(rows.columns, layout, strict=True)], schema=layout
    )
    statement = _as_sent(f"COPY {target} ({', '.join(names)}) FROM STDIN (FORMAT BINARY)")
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
