"""``make bench``: the sink and the source beside Spark's own Delta sink and source, on the same input, in turn.

A second table has them beside a Python sink and source that do nothing: no Python data source can be faster than those.

Environment: BENCH_ROUNDS (5), BENCH_ROWS a micro-batch (250000), BENCH_BATCHES (12).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.feather as feather
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

import rmq_spark as txmq
from benchmarks.nothing import BATCH_ROWS, Nothing
from benchmarks.report import Pairs, publish
from benchmarks.spark import median_ms, session
from rmq_spark._core.spark.reader import arrow_schema

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
ROWS = int(os.environ.get("BENCH_ROWS", "250000"))
BATCHES = int(os.environ.get("BENCH_BATCHES", "12"))
SMALL_ROWS = 100
SMALL_BATCHES = 15
WARM_UP = 2
SCHEMA = "body string, keys string, tags string, properties map<string,string>, born_timestamp timestamp"


def write_input(spark: SparkSession, folder: Path, rows: int, batches: int) -> None:
    """``batches`` folders of messages of about 290 bytes, as Parquet with a file per core."""
    for b in range(batches):
        n = spark.range(b * rows, (b + 1) * rows, numPartitions=2)
        n.select(
            F.concat(F.lit('{"order_id":'), F.col("id"), F.lit(',"note":"'), F.sha2(F.col("id").cast("string"), 512),
                     F.lit('","more":"'), F.sha2((F.col("id") + 1).cast("string"), 256), F.lit('"}')).alias("body"),
            F.concat(F.lit("order-"), F.col("id")).alias("keys"),
            F.lit("paid").alias("tags"),
            F.create_map(F.lit("region"), F.lit("eu")).alias("properties"),
            F.timestamp_seconds(F.lit(1_700_000_000) + F.col("id")).alias("born_timestamp"),
        ).write.parquet(str(folder / f"{b:04}"))  # fmt: skip


def stream(spark: SparkSession, folder: Path, files: int) -> DataFrame:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files).parquet(f"{folder}/*")


def txmq_writer(frame: DataFrame, log: txmq.CommitLog, checkpoint: Path) -> DataStreamWriter:
    writer = frame.writeStream.format("txmq").option("path", log.path).option("topic", "orders")
    writer = writer.option("producerGroup", "bench").option("transactionListener", "none")
    return writer.option("checkpointLocation", str(checkpoint))


def delta_writer(frame: DataFrame, table: Path, checkpoint: Path) -> DataStreamWriter:
    return frame.writeStream.format("delta").option("path", str(table)).option("checkpointLocation", str(checkpoint))


def nothing_writer(frame: DataFrame, checkpoint: Path) -> DataStreamWriter:
    return frame.writeStream.format("nothing").option("checkpointLocation", str(checkpoint))


def sinks(
    spark: SparkSession, folder: Path, source: Path, rounds: int, files: int
) -> tuple[list[float], list[float], list[float]]:
    """Median ms of a micro-batch, for the sink, for Delta's and for one that does nothing, in turn."""
    ours: list[float] = []
    delta: list[float] = []
    nothing: list[float] = []
    for r in range(rounds + 1):
        work = folder / f"round{r}"
        log = txmq.CommitLog.create(work / "log")
        log.create_topic("orders")
        mine = median_ms(txmq_writer(stream(spark, source, files), log, work / "cp1"), WARM_UP)
        peer = median_ms(delta_writer(stream(spark, source, files), work / "table", work / "cp2"), WARM_UP)
        none = median_ms(nothing_writer(stream(spark, source, files), work / "cp3"), WARM_UP)
        if r > 0:  # the first round warms the JVM up
            ours.append(mine)
            delta.append(peer)
            nothing.append(none)
        if r < rounds:
            shutil.rmtree(work)
    return ours, delta, nothing


def seconds(read: Callable[[], DataFrame]) -> float:
    started = time.perf_counter()
    read().write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="txmq_bench_"))
    spark = session()
    spark.dataSource.register(Nothing)
    try:
        write_input(spark, folder / "large", ROWS, BATCHES)
        write_input(spark, folder / "small", SMALL_ROWS, SMALL_BATCHES)
        large, large_delta, large_nothing = sinks(spark, folder / "l", folder / "large", ROUNDS, 2)
        small, small_delta, small_nothing = sinks(spark, folder / "s", folder / "small", ROUNDS, 2)

        last = folder / "l" / f"round{ROUNDS}"
        columns = "topic string, tags string, keys string, properties map<string,string>, body binary"
        columns += ", born_timestamp timestamp"

        def read_ours() -> DataFrame:
            reader = spark.read.format("txmq").schema(columns).option("path", str(last / "log"))
            return reader.option("subscribe", "orders").load()

        def read_delta() -> DataFrame:
            return spark.read.format("delta").load(str(last / "table"))

        messages = ROWS * BATCHES
        names = [column.split()[0] for column in columns.split(", ")]
        batch = txmq.CommitLog.open(last / "log").read("orders", limit=BATCH_ROWS, columns=names)
        batch = batch.cast(arrow_schema(read_ours().schema))
        feather.write_feather(batch, str(folder / "batch"), compression="uncompressed")
        parts = read_ours().rdd.getNumPartitions()

        def read_nothing() -> DataFrame:
            reader = spark.read.format("nothing").schema(columns).option("file", str(folder / "batch"))
            return reader.option("rows", messages).option("partitions", parts).load()

        reads = (read_ours, read_delta, read_nothing)
        read, read_by_delta, read_by_nothing = zip(
            *[[messages / seconds(r) for r in reads] for _ in range(2 * ROUNDS + 1)][1:], strict=True
        )
        log = txmq.CommitLog.open(last / "log")

        def read_natively() -> DataFrame:
            return txmq.messages(spark, log, "orders").select(*names)

        def pairs_with_delta() -> tuple[list[float], list[float]]:
            both = [(messages / seconds(read_natively), messages / seconds(read_delta)) for _ in range(2 * ROUNDS + 1)]
            return [a for a, _ in both[1:]], [b for _, b in both[1:]]

        tail, tail_by_delta = pairs_with_delta()
        began = time.process_time()
        log.drain()
        print(f"a drain of {messages:,} messages took {time.process_time() - began:.1f} s of processor time")
        native, native_by_delta = pairs_with_delta()
        publish(
            f"{ROWS:,} messages of about 290 B a micro-batch, full protocol (transactionListener=none)",
            [
                Pairs("sink_vs_delta", f"sink, {ROWS:,} messages a batch", "rows/s",
                      [ROWS / ms * 1000 for ms in large], [ROWS / ms * 1000 for ms in large_delta], True),
                Pairs("small_batch_vs_delta", f"sink, {SMALL_ROWS} messages a batch", "ms", small, small_delta, False),
                Pairs("read_vs_delta", f"source, {messages:,} messages", "rows/s",
                      read, read_by_delta, True),
                Pairs("native_tail_vs_delta", f"txmq.messages, {messages:,} messages, not drained", "rows/s",
                      tail, tail_by_delta, True),
                Pairs("native_read_vs_delta", f"txmq.messages, {messages:,} messages, drained", "rows/s",
                      native, native_by_delta, True),
            ],
            "Delta",
        )  # fmt: skip
        publish(
            "The same beside a Python data source that does nothing",
            [
                Pairs("sink_vs_nothing", f"sink, {ROWS:,} messages a batch", "rows/s",
                      [ROWS / ms * 1000 for ms in large], [ROWS / ms * 1000 for ms in large_nothing], True),
                Pairs("small_batch_vs_nothing", f"sink, {SMALL_ROWS} messages a batch", "ms",
                      small, small_nothing, False),
                Pairs("read_vs_nothing", f"source, {messages:,} messages", "rows/s", read, read_by_nothing, True),
            ],
            "nothing",
        )  # fmt: skip
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
