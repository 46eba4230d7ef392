"""The Spark session of the benchmarks, and how a stream's micro-batches are timed."""

from __future__ import annotations

import os
import sys
from statistics import median

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from delta import configure_spark_with_delta_pip
from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamWriter


def session() -> SparkSession:
    """Spark on all cores with Delta."""
    builder = SparkSession.builder.master("local[*]").appName("rmq_spark benchmark")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "4g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
    }.items():
        builder = builder.config(name, value)
    spark = configure_spark_with_delta_pip(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def micro_batch_ms(writer: DataStreamWriter, warm_up: int) -> list[int]:
    """Run a stream until its input is used up; the time of each micro-batch's write in ms, after the first few."""
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    taken = [p.durationMs["addBatch"] for p in query.recentProgress if p.numInputRows > 0]
    return taken[warm_up:]


def median_ms(writer: DataStreamWriter, warm_up: int) -> float:
    return float(median(micro_batch_ms(writer, warm_up)))
