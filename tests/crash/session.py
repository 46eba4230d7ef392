"""Spark sessions of drivers that live for seconds."""

from __future__ import annotations

from delta import configure_spark_with_delta_pip
from pyspark.sql import SparkSession

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    # A short life: what compiles well pays only later.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
DELTA = {
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def start_session(master: str, settings: dict[str, str] | None = None, delta: bool = False) -> SparkSession:
    """A session with these settings besides its own, and with Delta's jars when they are wanted."""
    builder = SparkSession.builder.master(master).appName("crash test")
    for key, value in {**SETTINGS, **(DELTA if delta else {}), **(settings or {})}.items():
        builder = builder.config(key, value)
    spark = (configure_spark_with_delta_pip(builder) if delta else builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
