"""What the test of a cluster submits: orders into a sink, out of a source, and through a consumer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import rmq_spark as txmq


def main(folder: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    txmq.register(spark)
    incoming = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).json(f"{folder}/in")
    # Round robin, without a sort: a task that runs again may deal its rows out otherwise.
    incoming = incoming.repartition(2)
    sink = incoming.selectExpr("cast(n as string) body", "n").writeStream.format("txmq")
    sink = sink.option("path", f"{folder}/log").option("topic", "orders").option("producerGroup", "shop")
    sink = sink.option("transactionListener", "cluster_shop:listener").option("transactionKey", "n")
    sink = sink.option("checkpointLocation", f"{folder}/sent").trigger(availableNow=True)
    sink.start().awaitTermination()

    source = spark.readStream.format("txmq").option("path", f"{folder}/log").option("subscribe", "orders")
    source = source.option("startingOffsets", "earliest")
    out = source.load().selectExpr("cast(cast(body as string) as long) n").writeStream.format("parquet")
    out = out.option("checkpointLocation", f"{folder}/read").option("path", f"{folder}/out")
    out.trigger(availableNow=True).start().awaitTermination()

    def take(message: txmq.MessageExt) -> txmq.ConsumeResult:
        (Path(folder) / "consumed" / message.body.decode()).touch()
        return txmq.ConsumeResult.SUCCESS

    stream = source.option("consumerGroup", "points").load()
    points = txmq.consume(stream, "points", txmq.EachMessage(take)).option(
        "checkpointLocation", f"{folder}/consumed.cp"
    )
    points.trigger(availableNow=True).start().awaitTermination()

    rows = spark.read.parquet(f"{folder}/out").collect()
    native = txmq.messages(spark, f"{folder}/log", "orders").count()
    txmq.CommitLog.open(f"{folder}/log").drain()
    drained = spark.read.parquet(f"{folder}/log/messages").where("topic = 'orders'").count()
    result = {"read": sorted(row.n for row in rows), "native": native, "drained": drained}
    Path(folder, "result.json").write_text(json.dumps(result))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
