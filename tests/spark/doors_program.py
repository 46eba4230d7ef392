"""The listeners of one module at each door. ``doors_program FOLDER KIND…`` is the door of Spark Connect, with a server
of its own, and prints what became visible of each kind as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamWriter

import rmq_spark as txmq
from tests.crash.session import SETTINGS
from tests.spark.identity_table import STARTS_MAX

SHOP = """
import sqlalchemy as sa
import rmq_spark as txmq

URL, TABLE = {url!r}, {table!r}


def work(connection, transaction):
    (n,) = transaction.decode("n long")["n"].to_pylist()
    if n == 2:
        raise txmq.Rollback("no two")
    connection.execute(sa.text("insert into taken values (:n)"), {{"n": n}})


class Own(txmq.TransactionListener):
    def execute_local_transaction(self, batch):
        numbers = batch.decode("n long")["n"].to_pylist()
        return [txmq.ROLLBACK_MESSAGE if n == 2 else txmq.COMMIT_MESSAGE for n in numbers]

    def check_local_transaction(self, batch):
        return txmq.UNKNOWN


class Each:
    def execute_local_transaction(self, msg, arg):
        return txmq.ROLLBACK_MESSAGE if b"2" in msg.body else txmq.COMMIT_MESSAGE

    def check_local_transaction(self, msg):
        return txmq.UNKNOWN


def append(batch_df, table):
    batch_df.selectExpr("cast(body as string) body").write.format("delta").mode("append").save(TABLE)


sql = txmq.SqlTransactionListener(URL, work, per_transaction=True)
table = txmq.TableListener(URL, "kept", on_bad_row="rollback")
each = txmq.PerMessageListener(Each())
own = Own()
delta = txmq.DeltaTransactionListener(TABLE, append)
"""
KINDS = ("sql", "table", "each", "own", "delta")
BODIES = ['{"n":1}', '{"n":2}', '{"n":3}']
MODULE = "doors_shop"


def log_of(folder: Path, kind: str) -> str:
    return f"{folder}/log-of-{kind}"


def make(folder: Path) -> None:
    """Make a folder with the module of listeners, a database, commit logs, and a file with messages to come."""
    url = f"sqlite:///{folder}/shop.db"
    (folder / f"{MODULE}.py").write_text(SHOP.format(url=url, table=str(folder / "gold")))
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("create table taken (n integer)")
        connection.exec_driver_sql("create table kept (n integer check (n <> 2))")
    txmq.create_fence(url)
    for kind in KINDS:
        txmq.CommitLog.create(log_of(folder, kind)).create_topic("orders", queues=1)
    (folder / "in").mkdir()
    (folder / "in" / "orders.json").write_text("\n".join(BODIES))


def per(kind: str) -> str:
    """A Delta commit is one transaction; the other listeners answer for each message."""
    return "batch" if kind == "delta" else "message"


def visible(folder: Path, kind: str) -> list[str]:
    log = txmq.CommitLog.open(log_of(folder, kind))
    return sorted(body.decode() for body in log.read("orders")["body"].to_pylist())


def expected(kind: str) -> list[str]:
    return BODIES if kind == "delta" else [BODIES[0], BODIES[2]]


def by_producer(folder: Path, listener: Any, kind: str) -> None:
    with txmq.TransactionMQProducer(log_of(folder, kind), "shop", listener, check_interval=None) as producer:
        messages = pa.table({"body": BODIES})
        producer.send_messages_in_transaction(messages, topic="orders", transaction_per=per(kind))


def by_attribute(spark: SparkSession, folder: Path, kind: str, module: str = MODULE) -> None:
    write = spark.read.schema("n long").json(f"{folder}/in").selectExpr("to_json(struct(n)) body").write.format("txmq")
    options = {"path": log_of(folder, kind), "topic": "orders", "producerGroup": "shop", "transactionPer": per(kind)}
    write.options(**options, transactionListener=f"{module}:{kind}").mode("append").save()


def by_function(spark: SparkSession, folder: Path, listener: Any, kind: str) -> None:
    if kind == "delta":
        spark.sql("select 'none' body where false").write.format("delta").mode("append").save(f"{folder}/gold")
    sink = txmq.TransactionalSink(
        log_of(folder, kind),
        producer_group="shop",
        listener=listener,
        topic="orders",
        transaction_per=per(kind),
        app_id=kind,
        checkpoint_location=f"{folder}/cp-of-{kind}",
    )
    orders = spark.readStream.schema("n long").json(f"{folder}/in").selectExpr("to_json(struct(n)) body")
    _run(orders.writeStream.foreachBatch(sink).option("checkpointLocation", f"{folder}/cp-of-{kind}"))


def _run(writer: DataStreamWriter) -> None:
    for start in range(1, STARTS_MAX + 1):
        try:
            writer.trigger(availableNow=True).start().awaitTermination()
            return
        except Exception as problem:
            is_late = any(words in str(problem) for words in ("connect back", "CANNOT_OPEN_SOCKET"))
            if not is_late or start == STARTS_MAX:  # a Python worker came too late
                raise


def over_connect(folder: Path, kinds: list[str]) -> dict[str, Any]:
    builder = SparkSession.builder.remote("local[1]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    shop = importlib.import_module(MODULE)
    for kind in kinds:
        by_function(spark, folder, getattr(shop, kind), kind)
    spark.stop()
    return {kind: visible(folder, kind) for kind in kinds}


if __name__ == "__main__":
    print(json.dumps(over_connect(Path(sys.argv[1]), sys.argv[2:])))
