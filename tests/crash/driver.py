"""A Spark driver that runs streams of a shop to the end of their input: ``driver <folder> <tries> <stream>…``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

import rmq_spark as txmq
from tests.crash import shop
from tests.crash.session import start_session


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
        "transactionListener": f"{shop.__name__}:{name}",
        "appId": name,
    }
    per = {"transactionKey": "k"} if shop.STREAMS[name] == "key" else {"transactionPer": shop.STREAMS[name]}
    return writer.format("txmq").options(**options, **per).start()


def main(root: Path, tries: int, names: list[str]) -> None:
    os.environ[shop.FOLDER] = str(root)  # Spark's workers inherit it
    spark = start_session(
        f"local[1,{tries}]",
        {
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.sql.codegen.wholeStage": "false",
            # A task after the other, in one Python worker: each takes seconds to start.
            "spark.sql.leafNodeDefaultParallelism": "2",
        },
    )
    # On Python 3.13 Spark's own search ends with an error where a sitecustomize imports pyspark, as our points' does.
    txmq.register(spark)
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
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
