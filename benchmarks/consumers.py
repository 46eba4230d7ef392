"""``make bench-consumers``: what it costs that a result counts once, beside the same consumer at least once, in turn.

Whole micro-batches are timed, with planning and progress. Environment: BENCH_ROUNDS (5), BENCH_ROWS a micro-batch
(20000), BENCH_BATCHES (8).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

import rmq_spark as txmq
from benchmarks.report import Pairs, publish
from benchmarks.spark import session
from benchmarks.throughput import WARM_UP
from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
ROWS = int(os.environ.get("BENCH_ROWS", "20000"))
BATCHES = int(os.environ.get("BENCH_BATCHES", "8"))
INSERT = sa.text("insert into results (body) values (:body)")

Way = Callable[[SparkSession, txmq.CommitLog, Path], DataStreamWriter]


def make_log(path: Path) -> txmq.CommitLog:
    log = txmq.CommitLog.create(path)
    log.create_topic("orders")
    body = pa.array([f'{{"order": {i}, "note": "{"x" * 200}"}}' for i in range(ROWS)])
    with txmq.TransactionMQProducer(log, "bench", CommitOncePrepared(), check_interval=None) as producer:
        for _ in range(BATCHES):
            producer.send_messages_in_transaction(pa.table({"body": body}), topic="orders")
    return log


def stream(spark: SparkSession, log: txmq.CommitLog, group: str | None = None) -> DataFrame:
    frame = spark.readStream.format("txmq").option("path", log.path).option("subscribe", "orders")
    frame = frame.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", ROWS)
    return (frame if group is None else frame.option("consumerGroup", group)).load()


def insert(connection: sa.Connection, messages: pa.Table) -> None:
    connection.execute(INSERT, [{"body": body.decode()} for body in messages["body"].to_pylist()])


def database(folder: Path) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{folder}/results.db")
    with engine.begin() as connection:
        connection.execute(sa.text("create table results (body text)"))
    return engine


def into_database(spark: SparkSession, log: txmq.CommitLog, folder: Path) -> DataStreamWriter:
    engine = database(folder)

    def work(batch: DataFrame, batch_id: int) -> None:
        with engine.begin() as connection:
            insert(connection, batch.toArrow())

    return stream(spark, log).writeStream.foreachBatch(work)


def into_inbox(spark: SparkSession, log: txmq.CommitLog, folder: Path) -> DataStreamWriter:
    inbox = txmq.SqlInbox(database(folder), folder.parent.name, insert)
    inbox.create()
    return stream(spark, log, folder.parent.name).writeStream.foreachBatch(inbox)


def into_delta(spark: SparkSession, log: txmq.CommitLog, folder: Path) -> DataStreamWriter:
    def work(batch: DataFrame, batch_id: int) -> None:
        batch.write.format("delta").mode("append").save(str(folder / "table"))

    return stream(spark, log).writeStream.foreachBatch(work)


def into_delta_once(spark: SparkSession, log: txmq.CommitLog, folder: Path) -> DataStreamWriter:
    def work(batch: DataFrame, batch_id: int) -> None:
        writer = batch.write.format("delta").mode("append").option("txnAppId", "bench").option("txnVersion", batch_id)
        writer.save(str(folder / "table"))

    return stream(spark, log, folder.parent.name).writeStream.foreachBatch(work)


def on_executors(spark: SparkSession, log: txmq.CommitLog, folder: Path) -> DataStreamWriter:
    def listen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        yield pa.record_batch({"done": [1]})

    def work(batch: DataFrame, batch_id: int) -> None:
        batch.mapInArrow(listen, "done long").collect()

    return stream(spark, log).writeStream.foreachBatch(work)


def with_listener(spark: SparkSession, log: txmq.CommitLog, folder: Path) -> DataStreamWriter:
    def listen(messages: pa.Table) -> txmq.ConsumeResult:
        return txmq.ConsumeResult.SUCCESS

    return txmq.consume(stream(spark, log, folder.parent.name), folder.parent.name, listen, log=log)


COMPARED: dict[str, tuple[str, Way, Way]] = {
    "inbox_vs_plain": ("SqlInbox, beside inserts alone (SQLite)", into_inbox, into_database),
    "delta_once_vs_plain": ("group and Delta's txn, beside an append alone", into_delta_once, into_delta),
    "listener_vs_plain": ("consume, beside mapInArrow alone", with_listener, on_executors),
}


def micro_batch_ms(writer: DataStreamWriter, checkpoint: Path) -> float:
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    taken = [p.durationMs["triggerExecution"] for p in query.recentProgress if p.numInputRows > 0]
    return float(median(taken[WARM_UP:]))


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="txmq_bench_"))
    spark = session()
    try:
        log = make_log(root / "log")
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in COMPARED}
        for r in range(ROUNDS + 1):
            for name, (_, *ways) in COMPARED.items():
                for of_way, way in zip(times[name], ways, strict=True):
                    folder = root / f"{name}-{r}" / way.__name__
                    folder.mkdir(parents=True)
                    of_way.append(micro_batch_ms(way(spark, log, folder), folder / "checkpoint"))
        publish(
            f"a micro-batch of {ROWS:,} messages, once beside at least once",
            [
                Pairs(name, what, "ms", times[name][0][1:], times[name][1][1:], False)  # the first round warms up
                for name, (what, *_) in COMPARED.items()
            ],
            "plain",
        )
    finally:
        spark.stop()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
