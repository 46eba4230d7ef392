"""``query.stop()`` while the local transaction runs, and a start at once in the same session: what the fence keeps."""

from __future__ import annotations

import importlib
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.spark.identity_table import STARTS_MAX
from tests.support.cluster import wait_until

SHOP = """
import time
from pathlib import Path
import sqlalchemy as sa
import rmq_spark as txmq

FOLDER = Path({folder!r})

def work(connection, batch):
    numbers = [int(body) for body in batch.messages(["body"])["body"].to_pylist()]
    rows = [{{"n": n, "attempt": batch.attempt}} for n in numbers]
    connection.execute(sa.text("insert into orders values (:n, :attempt)"), rows)
    (FOLDER / f"begun-{{time.time_ns()}}").touch()
    for _ in range(6000):
        if (FOLDER / "may end").exists():
            return
        time.sleep(0.01)
    raise TimeoutError("nobody said that work may end")

def listener():
    return txmq.SqlTransactionListener({url!r}, work, lock_timeout=1)
"""
UNTIL_IT_MAY_END_S = 3.0
"""Seconds after the stop, at which work may end: the second run has met the first one by then."""


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> str:
    """The name of a module with a listener whose work waits for a file, and that is known to Spark's workers."""
    url = f"sqlite:///{tmp_path}/orders.db"
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("create table orders (n integer, attempt integer)")
    txmq.create_fence(url)
    name = f"slow_shop_{secrets.token_hex(4)}"
    file = tmp_path / f"{name}.py"
    file.write_text(SHOP.format(folder=str(tmp_path), url=url))
    spark.sparkContext.addPyFile(str(file))
    return name


def by_function(frame: DataFrame, log: CommitLog, shop: str) -> DataStreamWriter:
    listener = importlib.import_module(shop).listener()
    sink = txmq.TransactionalSink(log, producer_group="shop", listener=listener, topic="orders")
    return frame.select("body").writeStream.foreachBatch(sink)


def by_format(frame: DataFrame, log: CommitLog, shop: str) -> DataStreamWriter:
    options = {"path": log.path, "topic": "orders", "producerGroup": "shop", "transactionListener": f"{shop}:listener"}
    return frame.select("body").writeStream.format("txmq").options(**options)


def begun(folder: Path) -> int:
    return len(list(folder.glob("begun-*")))


def started(writer: DataStreamWriter, folder: Path) -> StreamingQuery:
    """The query, whose first local transaction has begun."""
    for _ in range(STARTS_MAX):
        query = writer.start()
        wait_until(lambda q=query: begun(folder) or not q.isActive, "the local transaction")
        if query.isActive:
            return query
        if "connect back" not in str(query.exception()):  # else a Python worker came too late
            break
    raise AssertionError(query.exception())


def finished(writer: DataStreamWriter) -> None:
    for start in range(1, STARTS_MAX + 1):
        query = writer.start()
        try:
            query.processAllAvailable()
            return
        except StreamingQueryException as problem:
            if "connect back" not in str(problem) or start == STARTS_MAX:
                raise
        finally:
            query.stop()


@pytest.mark.turns(4, among="Spark: features and stops")
@pytest.mark.parametrize("door", [by_function, by_format])
def test_a_query_that_is_stopped_within_a_local_transaction_and_started_runs_it_once(
    spark: SparkSession, numbers: Callable[[int], DataFrame], shop: str, tmp_path: Path, door: Callable[..., Any]
) -> None:
    log = CommitLog.create(tmp_path / "log")
    log.create_topic("orders")
    writer = door(numbers(1), log, shop).option("checkpointLocation", str(tmp_path / "cp"))
    query = started(writer, tmp_path)
    end = threading.Timer(UNTIL_IT_MAY_END_S, (tmp_path / "may end").touch)
    end.start()
    query.stop()  # with foreachBatch it waits for the function, which Spark cannot interrupt
    finished(writer)
    end.join()
    time.sleep(0.5)  # a first run that was still at work would have committed by now
    with sa.create_engine(f"sqlite:///{tmp_path}/orders.db").connect() as connection:
        rows = connection.exec_driver_sql("select n, attempt from orders order by n").all()
    assert [n for n, _ in rows] == list(range(10)), "an order is lost, or its local transaction was executed twice"
    assert len({attempt for _, attempt in rows}) == 1
    assert sorted(int(body) for body in log.read("orders")["body"].to_pylist()) == list(range(10))
    assert not log.pending()
