"""A notebook over Spark Connect, which sends orders into PostgreSQL or counts them: ``over_connect <folder> <door>``.

It starts its own Connect server. The server gets ``foreachBatch`` and all that it needs pickled, and runs it in a
process of its own. That process finds the database by its environment, or by a file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession

import rmq_spark as txmq
from tests.crash.session import SETTINGS
from tests.spark.identity_table import STARTS_MAX, WORKER_IS_LATE
from tests.torture.kill.points import Batch, reach

URL = "RMQ_SPARK_TEST_DATABASE"
APP = "orders"
GROUP = "points"
REFUSED_OF = 7
"""Of every so many orders one is refused."""


def send(spark: SparkSession, root: Path, listener: txmq.TransactionListener, **arguments: Any) -> Any:
    sink = txmq.TransactionalSink(
        root / "log",
        producer_group="shop",
        listener=listener,
        topic="orders",
        transaction_key="n",
        app_id=APP,
        checkpoint_location=str(root / "sink"),
        **arguments,
    )
    orders = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).json(str(root / "in"))
    writer = orders.selectExpr("to_json(struct(n)) body", "n").writeStream.foreachBatch(sink)
    return writer.option("checkpointLocation", str(root / "sink"))


def by_function(spark: SparkSession, root: Path, **arguments: Any) -> Any:
    def take(connection: sa.Connection, batch: txmq.HalfBatch) -> Any:
        orders = batch.decode("n long")
        refused = [n for n in orders["n"].to_pylist() if n % REFUSED_OF == 0]
        good = orders.filter(pc.invert(pc.is_in(orders["n"], value_set=pa.array(refused, pa.int64()))))
        batch.insert(connection, "taken", good.append_column("attempt", pa.repeat(batch.attempt, good.num_rows)))
        return batch.verdicts(rollback=dict.fromkeys(refused, "sold out"))

    return send(spark, root, txmq.SqlTransactionListener(f"env:{URL}", take), **arguments)


def on_executors(spark: SparkSession, root: Path) -> Any:
    return by_function(spark, root, run_on="executors", partitions=2)


def by_table(spark: SparkSession, root: Path) -> Any:
    return send(spark, root, txmq.TableListener(f"env:{URL}", "kept", key="n", on_bad_row="rollback"))


def count(spark: SparkSession, root: Path) -> Any:
    def url() -> str:
        return (root / "url").read_text()

    def write(connection: sa.Connection, messages: pa.Table) -> None:
        bodies = [body.decode() for body in messages["body"].to_pylist()]
        connection.execute(sa.text("INSERT INTO counted VALUES (:body)"), [{"body": body} for body in bodies])

    inbox = txmq.SqlInbox(url, GROUP, write, log=root / "log")

    def into_inbox(batch: DataFrame, batch_id: int) -> None:
        inbox(batch, batch_id)
        reach("inbox committed", Batch(GROUP, batch_id))

    options = {"path": str(root / "log"), "subscribe": "orders", "consumerGroup": GROUP, "startingOffsets": "earliest"}
    messages = spark.readStream.format("txmq").options(**options, maxOffsetsPerTrigger="10").load()
    return messages.writeStream.foreachBatch(into_inbox).option("checkpointLocation", str(root / "inbox"))


DOORS = {"sink": by_function, "executors": on_executors, "table": by_table, "inbox": count}


def main(root: Path, door: str) -> None:
    os.environ["SPARK_TESTING"] = "1"  # a port of its own for the server: tests/spark runs at the same time
    builder = SparkSession.builder.remote("local[1]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    for start in range(1, STARTS_MAX + 1):
        try:
            query = DOORS[door](spark, root).trigger(availableNow=True).start()
            query.awaitTermination()
            break
        except Exception as problem:
            if WORKER_IS_LATE not in str(problem) or start == STARTS_MAX:
                raise
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
