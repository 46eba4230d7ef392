"""Rows of Arrow in a table of PostgreSQL: by COPY they are what an INSERT of SQLAlchemy stores."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

import rmq_spark as txmq
from rmq_spark.errors import ListenerError, MessageError
from tests.support.inside import insert, inserting
from tests.support.seeds import how_many

UTC = dt.timezone.utc


@pytest.fixture(scope="module")
def engine(postgres: sa.URL) -> Iterator[sa.Engine]:
    # psycopg would prepare the statements of these tests, whose tables have other columns each time.
    engine = sa.create_engine(postgres, connect_args={"prepare_threshold": None})
    yield engine
    engine.dispose()


def stored(engine: sa.Engine, declared: str, rows: pa.Table, way: Callable[..., Any] = insert) -> list[Any]:
    """What a fresh table of this column has, in the order of the rows, after the way of inserting: values as text."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TEMPORARY TABLE told (at serial, c " + declared + ") ON COMMIT DROP")
        way(connection, "told", rows)
        query = "SELECT c::text FROM told ORDER BY at"
        return [row[0] for row in connection.exec_driver_sql(query)]


def by_sqlalchemy(connection: sa.Connection, table: str, rows: pa.Table) -> None:
    inserting._insert_many(connection, table, None, rows)


def column(values: list[Any], kind: pa.DataType) -> pa.Table:
    return pa.table({"c": pa.array(values, kind)})


def whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
floats = st.floats(width=64)
times = st.datetimes(dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30))
json_text = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.from_regex(r'"[a-zäß ]{0,5}"', fullmatch=True),
    lambda inner: st.lists(inner, max_size=3).map(lambda v: "[" + ",".join(map(_json, v)) + "]"),
    max_leaves=5,
).map(lambda v: _json(v))


def _json(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if not isinstance(value, str) else value


KINDS: dict[str, tuple[str, pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": ("bool", pa.bool_(), st.booleans()),
    "smallint": ("smallint", pa.int16(), whole(16)),
    "integer": ("integer", pa.int32(), whole(32)),
    "integer of a long": ("integer", pa.int64(), whole(32)),
    "bigint": ("bigint", pa.int64(), whole(64)),
    "bigint of an int": ("bigint", pa.int32(), whole(32)),
    "real": ("real", pa.float32(), st.floats(width=32)),
    "real of a double": ("real", pa.float64(), st.floats(width=32)),
    "double": ("double precision", pa.float64(), floats),
    "double of a long": ("double precision", pa.int64(), whole(53)),
    "numeric of a double": ("numeric(12,2)", pa.float64(), st.floats(-1e9, 1e9)),
    "numeric of a long": ("numeric", pa.int64(), whole(64)),
    "numeric of a decimal": ("numeric(20,4)", pa.decimal128(20, 4), st.decimals(-(10**15), 10**15, places=4)),
    "numeric of text": ("numeric", pa.string(), st.decimals(allow_nan=False, allow_infinity=False).map(str)),
    "text": ("text", pa.string(), text),
    "varchar": ("varchar(20)", pa.string(), text),
    "char": ("char(20)", pa.string(), text),
    "bytea": ("bytea", pa.binary(), st.binary(max_size=20)),
    "date": ("date", pa.date32(), st.dates()),
    "timestamptz": ("timestamptz", pa.timestamp("us", "UTC"), times.map(lambda t: t.replace(tzinfo=UTC))),
    "timestamp": ("timestamp", pa.timestamp("us"), times),
    "uuid": ("uuid", pa.string(), st.uuids().map(str)),
    "jsonb": ("jsonb", pa.string(), json_text),
    "json": ("json", pa.string(), json_text),
    "array": ("integer[]", pa.list_(pa.int32()), st.lists(whole(32), max_size=4)),
    "date of text": ("date", pa.string(), st.dates().map(str)),
    "interval of text": ("interval", pa.string(), st.integers(0, 10_000).map("{} seconds".format)),
    "bits of text": ("bit(4)", pa.string(), st.text("01", min_size=4, max_size=4)),
    "dictionary": ("text", pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a", "b"])),
}


def typed(connection: sa.Connection, table: str, rows: pa.Table) -> None:
    """Plain statements with psycopg, which sends text without a type: what a program of its own would do."""
    cursor = connection.connection.dbapi_connection.cursor()  # type: ignore[union-attr]
    cursor.executemany(f"INSERT INTO {table} (c) VALUES (%s)", [(value,) for value in rows["c"].to_pylist()])


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_is_what_an_insert_stores(engine: sa.Engine, kind: str) -> None:
    declared, arrow, values = KINDS[kind]

    @settings(max_examples=how_many(12, in_all=25), deadline=None)
    @given(st.lists(st.none() | values, min_size=1, max_size=30))
    def compare(given_values: list[Any]) -> None:
        rows = column(given_values, arrow)
        assert stored(engine, declared, rows) == stored(engine, declared, rows, typed)

    compare()


@pytest.mark.parametrize(
    ("declared", "rows", "said"),
    [
        ("smallint", column([40_000], pa.int64()), "out of range"),
        ("varchar(3)", column(["abcd"], pa.string()), "too long"),
        ("numeric(4,2)", column([123.4], pa.float64()), "overflow"),
        ("char(3)", column(["abcd"], pa.string()), "too long"),
        ("bit(3)", column(["1010"], pa.string()), "does not match type"),
        ("uuid", column(["no"], pa.string()), "invalid input syntax for type uuid"),
        ("jsonb", column(["{"], pa.string()), "invalid input syntax for type json"),
        ("date", column([1], pa.int32()), "cannot cast"),
        ("boolean", column([7.5], pa.float64()), "cannot cast"),
        ("integer NOT NULL", column([None], pa.int32()), "null value"),
    ],
)
def test_what_does_not_fit_is_an_error_of_the_database(
    engine: sa.Engine, declared: str, rows: pa.Table, said: str
) -> None:
    with pytest.raises(sa.exc.DBAPIError, match=said):
        stored(engine, declared, rows)


@pytest.mark.parametrize(
    ("declared", "rows", "said"),
    [
        ("text", column(["a", "b\x00"], pa.string()), "column 'c' has a NUL character in row 1"),
        ("timestamptz", column([2**62], pa.timestamp("us", "UTC")), "a time outside of 1 to 9999 in row 0"),
    ],
)
def test_what_the_database_cannot_keep_is_named_with_its_row(
    engine: sa.Engine, declared: str, rows: pa.Table, said: str
) -> None:
    with pytest.raises(MessageError, match=said):
        stored(engine, declared, rows)


def test_a_table_or_column_that_is_missing_is_named_beside_those_that_are_there(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql('CREATE TABLE "Orders of May" (id int, total int GENERATED ALWAYS AS (id) STORED)')
        connection.exec_driver_sql("CREATE SCHEMA bare; CREATE TABLE bare.bought (id int)")
        with pytest.raises(ListenerError, match=r"no table .orders. in schema .bare.: it has bought$"):
            insert(connection, "orders", pa.table({"id": [1]}), schema="bare")
        with pytest.raises(ListenerError, match=r"has no column 'total': it has id$"):
            insert(connection, "Orders of May", pa.table({"total": [1]}))
        assert insert(connection, "Orders of May", pa.table({"id": [1, 2]})) == 2
        connection.exec_driver_sql('CREATE SCHEMA "a b"; CREATE TABLE "a b".t (x int, y text)')
        assert insert(connection, "t", pa.table({"x": [Decimal("1")], "y": ["z"]}), schema="a b") == 1
        assert connection.exec_driver_sql('SELECT * FROM "a b".t').all() == [(1, "z")]
        connection.rollback()


def test_a_listener_inserts_decoded_bodies_with_its_fence(postgres: sa.URL, tmp_path: Any) -> None:
    log = txmq.CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=1)
    engine = sa.create_engine(postgres)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE bought (order_id bigint PRIMARY KEY, total numeric(10,2), note jsonb)")
    listener = txmq.SqlTransactionListener(
        engine, lambda connection, batch: batch.insert(connection, "bought", "order_id long, total double") and None
    )
    listener.create_fence()
    bodies = [f'{{"order_id": {n}, "total": {n}.5}}' for n in range(1000)]
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        sent = producer.send_messages_in_transaction(pa.table({"body": bodies}), topic="orders")
        assert sent.local_transaction_state is txmq.COMMIT_MESSAGE
        again = producer.send_messages_in_transaction(pa.table({"body": bodies[:1]}), topic="orders")
    assert again.local_transaction_state is txmq.LocalTransactionState.UNKNOWN  # the key is there already
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*), sum(total) FROM bought").one() == (
            1000,
            Decimal("500000.00"),
        )
        connection.exec_driver_sql("DROP TABLE bought")
