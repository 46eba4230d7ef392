"""What the kill tests of parts submit: a stream of orders, whose local transactions run on executors."""

from __future__ import annotations

import sys

import parts_shop
from pyspark.sql import SparkSession

import rmq_spark as txmq


def main(folder: str) -> None:
    parts_shop.arm(is_task=False)
    spark = SparkSession.builder.getOrCreate()
    incoming = spark.readStream.option("maxFilesPerTrigger", 1).text(f"{folder}/in")
    sink = txmq.TransactionalSink(
        f"{folder}/log",
        producer_group=parts_shop.GROUP,
        listener=parts_shop.listener(),
        topic="orders",
        transaction_key="n",
        run_on="executors",
        partitions=4,
    )
    orders = incoming.selectExpr("value body", "cast(value as long) n").writeStream.foreachBatch(sink)
    orders.option("checkpointLocation", f"{folder}/sent").trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
