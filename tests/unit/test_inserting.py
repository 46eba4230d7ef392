"""Rows of Arrow in a table of any database: here of SQLite. tests/process has PostgreSQL."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark.errors import ListenerError, LocalTransactionError, MessageError
from tests.support.inside import insert

TABLE = "CREATE TABLE bought (order_id INTEGER PRIMARY KEY, total FLOAT, note TEXT DEFAULT 'none', at TIMESTAMP)"


@pytest.fixture
def engine(tmp_path: Path) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with engine.begin() as connection:
        connection.exec_driver_sql(TABLE)
    return engine


def test_columns_go_by_their_names_and_others_get_the_table_s_defaults(engine: sa.Engine) -> None:
    at = dt.datetime(2026, 11, 27, 12, 30)
    with engine.begin() as connection:
        assert insert(connection, "bought", pa.table({"at": [at, None], "order_id": [2, 1]})) == 2
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT * FROM bought ORDER BY order_id").all()
    assert [tuple(row) for row in rows] == [(1, None, "none", None), (2, None, "none", "2026-11-27 12:30:00.000000")]


def test_a_table_or_column_that_is_missing_is_named_beside_those_that_are_there(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        with pytest.raises(ListenerError, match="no table 'orders': it has bought"):
            insert(connection, "orders", pa.table({"order_id": [1]}))
        with pytest.raises(ListenerError, match="no column 'price': it has order_id, total, note, at"):
            insert(connection, "bought", pa.table({"order_id": [1], "price": [1.0]}))
        with pytest.raises(ListenerError, match="two columns 'order_id'"):
            insert(connection, "bought", pa.table([[1], [2]], names=["order_id", "order_id"]))
        with pytest.raises(MessageError, match="the rows have no column"):
            insert(connection, "bought", pa.table({}))
        assert connection.exec_driver_sql("SELECT count(*) FROM bought").scalar_one() == 0


def test_an_engine_that_renames_schemas_is_refused(engine: sa.Engine) -> None:
    """COPY wrote into the schema that the engine does not use, and INSERT into the one that it uses."""
    renaming = engine.execution_options(schema_translate_map={None: "main"})
    log = txmq.testing.InMemoryCommitLog(topics={"orders": 1})
    listener = txmq.TableListener(renaming, "bought", on_conflict="error")
    listener.create_fence()
    with (
        txmq.TransactionMQProducer(log, "shop", listener, check_interval=None, on_listener_error="fail") as producer,
        pytest.raises(ListenerError, match="give an engine without it, and name the table's schema"),
    ):
        producer.send_message_in_transaction(txmq.Message("orders", '{"order_id": 1}'))
    with renaming.begin() as connection, pytest.raises(ListenerError, match="schema_translate_map"):
        insert(connection, "bought", pa.table({"order_id": [1]}))


def test_a_listener_inserts_the_fields_of_json_bodies_or_rows_of_its_own(engine: sa.Engine) -> None:
    log = txmq.testing.InMemoryCommitLog(topics={"orders": 1})
    given: list[pa.Table | str] = ["order_id long, total double"]

    def work(connection: sa.Connection, batch: txmq.HalfBatch) -> None:
        batch.insert(connection, "bought", given[0])

    listener = txmq.SqlTransactionListener(engine, work)
    listener.create_fence()
    bodies = ['{"order_id": 1, "total": 2.5}', '{"order_id": 2, "total": 3.5}']
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None, on_listener_error="fail") as producer:
        producer.send_messages_in_transaction(pa.table({"body": bodies}), topic="orders")
        given[0] = pa.table({"order_id": [7]})
        producer.send_messages_in_transaction(pa.table({"body": bodies}), topic="orders")
        given[0] = "order_id long"
        with pytest.raises(LocalTransactionError, match="UNIQUE constraint failed"):
            producer.send_messages_in_transaction(pa.table({"body": bodies}), topic="orders")
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT order_id, total FROM bought ORDER BY order_id").all()
    assert [tuple(row) for row in rows] == [(1, 2.5), (2, 3.5), (7, None)]
