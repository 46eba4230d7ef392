"""A stream's progress in its consumer group: after Spark's commit, never before, and for the last batch too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support.inside import STREAM_TELLS_START
from tests.support.source_logs import send
from tests.support.spark_environment import FROM_4_2


@pytest.fixture
def log(log_path: str) -> CommitLog:
    made = CommitLog.create(log_path)
    made.create_topic("orders", queues=1)
    return made


def run(spark: SparkSession, log: CommitLog, checkpoint: Path, work: Any = None, **options: str) -> list[str]:
    found: list[str] = []

    def take(batch: DataFrame, batch_id: int) -> None:
        found.extend(row.body for row in batch.collect())
        if work is not None:
            work(batch_id)

    frame = spark.readStream.format("txmq").schema("body string").option("path", log.path).option("subscribe", "orders")
    frame = frame.option("consumerGroup", "points").option("startingOffsets", "earliest").options(**options).load()
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    query = query.trigger(availableNow=True)
    for _ in range(1 if STREAM_TELLS_START else 2):  # before 4.2 a run's last micro-batch is published by the next run
        query.start().awaitTermination()
    return found


def position(log: CommitLog) -> int | None:
    return txmq.ConsumerGroup(log.path, "points").positions().get(("orders", 0))


@pytest.mark.long
@FROM_4_2
def test_progress_follows_spark_s_commits(spark: SparkSession, log: CommitLog, tmp_path: Path) -> None:
    for i in range(3):
        send(log, i, 5)
    seen: list[int | None] = []
    work = lambda batch_id: seen.append(position(log))  # noqa: E731
    assert len(run(spark, log, tmp_path / "cp", work, maxOffsetsPerTrigger="5")) == 15
    assert seen == [0, 5, 10]  # during a batch, its own messages do not count
    assert position(log) == 15  # the last batch counts
    assert txmq.ConsumerGroup(log.path, "points").lag()["lag"].to_pylist() == [0]


@pytest.mark.turns(3, among="groups")
@FROM_4_2
def test_a_batch_that_fails_is_no_progress(spark: SparkSession, log: CommitLog, tmp_path: Path) -> None:
    for i in range(2):
        send(log, i, 5)

    def fail(batch_id: int) -> None:
        if batch_id == 1:
            raise RuntimeError("the second batch fails")

    with pytest.raises(StreamingQueryException, match="the second batch fails"):
        run(spark, log, tmp_path / "cp", fail, maxOffsetsPerTrigger="5")
    assert position(log) == 5
    assert run(spark, log, tmp_path / "cp") == [f"1.{i}" for i in range(5)]
    assert position(log) == 10


@pytest.mark.turns(3, among="groups")
def test_a_new_query_starts_where_its_group_stands(spark: SparkSession, log: CommitLog, tmp_path: Path) -> None:
    send(log, 0, 4)
    run(spark, log, tmp_path / "one")
    send(log, 1, 4)
    assert run(spark, log, tmp_path / "two") == [f"1.{i}" for i in range(4)]
    txmq.ConsumerGroup(log.path, "points").reset({"orders": {"0": 6}})
    assert run(spark, log, tmp_path / "two") == []  # it has a checkpoint


@pytest.mark.turns(3, among="groups")
def test_a_group_past_the_end_is_refused(spark: SparkSession, log: CommitLog, tmp_path: Path) -> None:
    log.engine.groups.set("points", {("orders", 0): 99}, "by hand")
    with pytest.raises(StreamingQueryException, match="'points' has offset 99"):
        run(spark, log, tmp_path / "cp")


def test_batch_reads_have_no_group(spark: SparkSession, log: CommitLog) -> None:
    frame = spark.read.format("txmq").option("path", log.path).option("subscribe", "orders")
    with pytest.raises(Exception, match="consumerGroup is for streams"):
        frame.option("consumerGroup", "points").load().collect()
