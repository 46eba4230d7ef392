"""A Spark driver that runs streams of a shop to the end of their input: ``driver.py <folder> <stream>…``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import shop
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import rmq_spark as txmq


def start(frame: DataFrame, root: Path, name: str) -> StreamingQuery:
    writer = frame.writeStream.trigger(availableNow=True).option("checkpointLocation", str(root / name / "checkpoint"))
    if name == "foreach":
        sink = txmq.TransactionalSink(
            root / name / "log",
            producer_group=shop.GROUP,
            listener=shop.listener(root, name),
            topic="orders",
            transaction_key="k",
            app_id=name,
            checkpoint_location=str(root / name / "checkpoint"),
        )
        return writer.foreachBatch(sink).start()
    options = {
        "path": str(root / name / "log"),
        "topic": "orders",
        "producerGroup": shop.GROUP,
        "transactionListener": f"shop:{name}",
        "appId": name,
    }
    per = {"transactionKey": "k"} if shop.STREAMS[name] == "key" else {"transactionPer": shop.STREAMS[name]}
    return writer.format("txmq").options(**options, **per).start()


def main(root: Path, names: list[str]) -> None:
    builder = SparkSession.builder.master(f"local[1,{os.environ.get('TASK_TRIES', '1')}]").appName("crash test")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        # A short life: what compiles well pays only later.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.codegen.wholeStage": "false",
        "spark.ui.showConsoleProgress": "false",
        # A task after the other, in one Python worker: each takes seconds to start.
        "spark.sql.leafNodeDefaultParallelism": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    source = spark.readStream.option("maxFilesPerTrigger", shop.FILES).text(str(root / "in"))
    queries = []
    for name in names:
        columns = ["value body"]
        if shop.STREAMS[name] == "key":
            columns.append("cast(cast(value as int) % 4 as string) k")
        queries.append(start(source.selectExpr(*columns), root, name))
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
