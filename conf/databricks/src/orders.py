"""A stream on Databricks: a message about each order in a table. ``availableNow``: it takes what is there, and ends."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pyspark.sql import SparkSession

import rmq_spark as txmq
from rmq_spark.cli.tasks import storage_of

TOPIC = "orders"


def main(arguments: Sequence[str] | None = None) -> None:
    """Send what is new in the source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="a table, or the path of a Delta table")
    parser.add_argument("--log", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--secret-scope")
    given = parser.parse_args(arguments)

    spark = SparkSession.builder.getOrCreate()
    txmq.register(spark)  # the package arrived with the job's environment
    storage = storage_of(given.secret_scope)
    log = txmq.CommitLog.create(given.log, exist_ok=True, storage_options=storage or None)
    log.create_topic(TOPIC, queues=4, exist_ok=True)

    stream = spark.readStream
    rows = stream.format("delta").load(given.source) if "/" in given.source else stream.table(given.source)
    messages = rows.selectExpr("to_json(struct(*)) as body", "cast(order_id as string) as keys", "order_id")
    query = (
        messages.writeStream.queryName("txmq_orders")
        .format("txmq")
        .option("path", given.log)
        .option("topic", TOPIC)
        .option("producerGroup", "order-stream")
        # Plain exactly-once sending. With a local transaction: the "module:attribute" of a listener in your own wheel.
        .option("transactionListener", "none")
        .option("transactionKey", "order_id")
        .option("checkpointLocation", given.checkpoint)
        .options(**{f"storage.{name}": value for name, value in storage.items()})
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
