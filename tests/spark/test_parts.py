"""``TransactionalSink(run_on="executors")`` on a local Spark: every door, failures of tasks, restarts, and refusals."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession

import rmq_spark as txmq
from rmq_spark import HalfBatch, PerMessageListener, SqlTransactionListener, TransactionalSink
from rmq_spark.errors import find_cause

REFUSED = 7


class Work:
    """Inserts the orders of a part. ``fail_once`` names a file; the first task that sees it fails, and removes it."""

    def __init__(self, fail_once: Path | None = None) -> None:
        self.fail_once = fail_once

    def __call__(self, connection: sa.Connection, batch: HalfBatch) -> Any:
        if self.fail_once is not None and self.fail_once.exists() and batch.part == 1:
            self.fail_once.unlink()
            raise ConnectionError("the database went away")
        numbers = [int(key) for key in batch.transactions["transaction_key"].to_pylist()]
        good = [{"n": n, "part": batch.part} for n in numbers if n % REFUSED]
        connection.execute(sa.text("insert into orders values (:n, :part)"), good)
        return batch.verdicts(rollback=[n for n in numbers if n % REFUSED == 0])


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/orders.db"
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("create table orders (n integer, part integer)")
    txmq.create_fence(url)
    return url


@pytest.fixture
def log(log_path: str) -> txmq.CommitLog:
    log = txmq.CommitLog.create(log_path)
    log.create_topic("orders", queues=2)
    return log


def run(stream: DataFrame, sink: Any, folder: Path) -> None:
    query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", f"{folder}/checkpoint")
    query.trigger(availableNow=True).start().awaitTermination(180)


def rows_of(url: str) -> list[tuple[int, int]]:
    with sa.create_engine(url).connect() as connection:
        return [(row.n, row.part) for row in connection.exec_driver_sql("select n, part from orders")]


def told(log: txmq.CommitLog) -> Counter[int]:
    return Counter(int(body) for body in log.another().read("orders")["body"].to_pylist())


def by_hundreds(spark: SparkSession, folder: Path, files: int) -> DataFrame:
    """A stream of micro-batches with a hundred orders, each of two lines."""
    for n in range(files):
        frame = spark.range(n * 100, n * 100 + 100).selectExpr("cast(id as string) value")
        frame.union(frame).coalesce(1).write.mode("append").text(f"{folder}/in")
    stream = spark.readStream.option("maxFilesPerTrigger", 1).text(f"{folder}/in")
    return stream.selectExpr("value as body", "cast(value as long) as n")


def test_parts_run_on_executors_and_agree_after_a_task_failed(
    spark: SparkSession, log: txmq.CommitLog, url: str, tmp_path: Path
) -> None:
    stream, fail_once = by_hundreds(spark, tmp_path, 2), tmp_path / "fail"
    listener = SqlTransactionListener(url, Work(fail_once))

    def sink() -> TransactionalSink:
        return TransactionalSink(
            log.another(), producer_group="shop", listener=listener, topic="orders", transaction_key="n",
            run_on="executors", partitions=3,
        )  # fmt: skip

    fail_once.touch()
    with pytest.raises(Exception, match="went away") as raised:
        run(stream, sink(), tmp_path)
    cause = find_cause(raised.value)
    assert isinstance(cause, txmq.LocalTransactionError)
    assert re.search(
        r"part 1: ConnectionError: the database went away \(test_parts.py, line \d+, in __call__\)", str(cause)
    )
    assert len(str(cause)) < 1_000
    assert log.another().pending()["messages"].to_pylist() == [200]
    run(stream, sink(), tmp_path)
    good = [n for n in range(200) if n % REFUSED]
    assert sorted(n for n, _ in rows_of(url)) == good
    assert {part for _, part in rows_of(url)} == {0, 1, 2}
    assert told(log) == dict.fromkeys(good, 2)
    assert log.another().pending().num_rows == 0


def test_work_that_asks_an_executor_for_a_session_is_told_what_to_use(
    spark: SparkSession, log: txmq.CommitLog, url: str, tmp_path: Path
) -> None:
    listener = SqlTransactionListener(url, lambda connection, batch: batch.to_spark(None))
    sink = TransactionalSink(log, producer_group="shop", listener=listener, topic="orders", **BY_KEY)
    with pytest.raises(Exception, match="no Spark session") as raised:
        run(by_hundreds(spark, tmp_path, 1), sink, tmp_path)
    told = r"ListenerError: part \d: an executor has no Spark session: use batch.messages\(\) or batch.decode\(\) "
    assert re.search(told + r"\(test_parts.py, line \d+, in <lambda>\)\. Its messages", str(find_cause(raised.value)))


def test_a_worker_that_dies_leaves_its_messages_pending(
    spark: SparkSession, log: txmq.CommitLog, url: str, tmp_path: Path
) -> None:
    listener = SqlTransactionListener(url, lambda connection, batch: os._exit(1))
    sink = TransactionalSink(log, producer_group="shop", listener=listener, topic="orders", **BY_KEY)
    with pytest.raises(Exception, match="exited unexpectedly") as raised:
        run(by_hundreds(spark, tmp_path, 1), sink, tmp_path)
    assert re.search(r"raised Py4JJavaError: .*\n.*Python worker exited unexpectedly", str(find_cause(raised.value)))
    assert log.another().pending()["messages"].to_pylist() == [200]


def test_message_by_message_without_a_fence(spark: SparkSession, log: txmq.CommitLog, tmp_path: Path) -> None:
    class Partner:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def execute_local_transaction(self, msg: txmq.MessageExt, arg: Any) -> Any:
            (self.folder / msg.body.decode()).touch()
            return txmq.COMMIT_MESSAGE if int(msg.body) % REFUSED else txmq.Rollback("no stock")

        def check_local_transaction(self, msg: txmq.MessageExt) -> Any:
            return txmq.COMMIT_MESSAGE if (self.folder / msg.body.decode()).exists() else None

    (tmp_path / "called").mkdir()
    listener = PerMessageListener(Partner(tmp_path / "called"), threads=4, idempotent=True)
    spark.range(50).selectExpr("cast(id as string) value").repartition(3).write.text(f"{tmp_path}/in")
    stream = spark.readStream.text(f"{tmp_path}/in").selectExpr("value as body")
    sink = TransactionalSink(
        log, producer_group="partner", listener=listener, topic="orders", transaction_per="message", run_on="executors"
    )
    run(stream, sink, tmp_path)
    assert len(list((tmp_path / "called").iterdir())) == 50
    assert told(log) == {n: 1 for n in range(50) if n % REFUSED}


class Unfenced(txmq.TransactionListener):
    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        return txmq.COMMIT_MESSAGE

    check_local_transaction = execute_local_transaction


class NeedsSpark(Unfenced):
    requires_spark = True


class Holds(Unfenced):
    idempotent = True

    def __init__(self) -> None:
        import threading

        self.lock = threading.Lock()


BY_KEY = {"transaction_key": "n", "run_on": "executors"}


@pytest.mark.parametrize(
    ("listener", "arguments", "says"),
    [
        (None, {"run_on": "executor"}, "run_on='executor' is neither 'driver' nor 'executors'"),
        (None, {"run_on": "executors"}, "here a whole micro-batch is one: set transaction_key"),
        (None, {"transaction_key": "n", "partitions": 4}, "partitions are those of run_on='executors'"),
        (None, {**BY_KEY, "partitions": 0}, "partitions"),
        (Unfenced(), BY_KEY, "has no fence, and Spark may run a task twice"),
        (NeedsSpark(), BY_KEY, "works with a Spark session"),
        (Holds(), BY_KEY, "cannot go to another process, because .*Holds uses '[a-z_]+', a _thread.lock"),
    ],
    ids=["a word", "a whole batch", "partitions alone", "no partition", "no fence", "needs Spark", "not pickled"],
)
def test_what_cannot_run_on_executors_is_refused_before_the_query_starts(
    log: txmq.CommitLog, listener: Any, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises((txmq.OptionError, txmq.ListenerError), match=says):
        TransactionalSink(log, producer_group="shop", listener=listener, topic="orders", **arguments)


def test_an_engine_is_refused_in_words_that_name_what_travels(log: txmq.CommitLog, url: str) -> None:
    listener = SqlTransactionListener(sa.create_engine(url), Work())
    with pytest.raises(txmq.ListenerError, match="give the database's URL, 'env:NAME', or a function"):
        TransactionalSink(log, producer_group="shop", listener=listener, topic="orders", **BY_KEY)


def test_upserts_of_a_key_lie_in_one_part_or_are_refused(log: txmq.CommitLog, url: str) -> None:
    """The last row of a key counts, and parts run side by side."""
    listener = txmq.TableListener(url, "orders", key="order_id", on_conflict="update")
    sink = {"producer_group": "shop", "listener": listener, "topic": "orders", "run_on": "executors"}
    for per in ({"transaction_per": "message"}, {"transaction_key": "customer"}):
        with pytest.raises(txmq.OptionError, match=r"set transaction_key to a column of the key \(order_id\)"):
            TransactionalSink(log, **sink, **per)
    TransactionalSink(log, **sink, transaction_key="order_id")


def test_a_fifo_topic_keeps_its_order_or_is_refused(
    spark: SparkSession, log: txmq.CommitLog, url: str, tmp_path: Path
) -> None:
    log.create_topic("in-order", queues=1, fifo=True)
    listener = SqlTransactionListener(url, Work())
    refused = "the FIFO topic 'in-order' keeps the order"
    with pytest.raises(txmq.OptionError, match=refused):
        TransactionalSink(log, producer_group="shop", listener=listener, topic="in-order", **BY_KEY)
    spark.range(4).selectExpr("cast(id as string) value").write.text(f"{tmp_path}/in")
    stream = spark.readStream.text(f"{tmp_path}/in")
    stream = stream.selectExpr("value body", "cast(value as long) n", "'k' sharding_key", "'in-order' topic")
    sink = TransactionalSink(log, producer_group="shop", listener=listener, **BY_KEY)
    with pytest.raises(Exception, match=refused):
        run(stream, sink, tmp_path)
    assert log.another().pending().num_rows == 0
