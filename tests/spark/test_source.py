"""The source through Spark: batch and stream, and the tables read by plain Spark SQL."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from rmq_spark import CommitLog
from tests.spark.identity_table import STARTS_MAX
from tests.support.half_batches import move_half, prepare
from tests.support.inside import PROPERTIES, STREAM_TELLS_START
from tests.support.source_logs import decide, send

HALF_JOINED_WITH_OP = """
    with placed as (
      select *, posexplode(ranges) as (nth, rows) from op where queue_offset is not null
    ), numbered as (
      select *, queue_offset + aggregate(slice(ranges, 1, nth), 0L, (n, r) -> n + r.last - r.first + 1) as offset
      from placed
    )
    select h.topic, h.queue_id, n.offset + h.row_no - n.rows.first as queue_offset,
           concat(h.half_id, ':', h.file_no, '.', h.row_no) as msg_id,
           concat(h.half_id, ':', n.attempt, case h.transaction_per
             when 'batch' then ''
             when 'key' then concat(':', h.transaction_key)
             else concat(':', h.file_no, '.', h.row_no) end) as transaction_id,
           h.tags, h.keys, h.sharding_key, h.properties, h.body, h.producer_group,
           h.born_timestamp, h.store_timestamp, n.op_time as commit_timestamp
    from numbered n join half h
      on h.half_id = n.half_id and h.file_no = n.file_no and h.row_no between n.rows.first and n.rows.last
"""


@pytest.fixture
def log(log_path: str) -> CommitLog:
    made = CommitLog.create(log_path)
    made.create_topic("orders", queues=3)
    return made


@pytest.fixture
def follow(spark: SparkSession, log: CommitLog, tmp_path: Path) -> Callable[..., list[str]]:
    """Run the stream to the log's end and return the bodies that were new."""

    def run(checkpoint: str = "cp", **options: str) -> list[str]:
        frame = spark.readStream.format("txmq").schema("topic string, body string").option("path", log.path)
        if "subscribePattern" not in options:
            options = {"subscribe": "orders", **options}
        found: list[str] = []
        batches: list[int] = []

        def take(batch: DataFrame, batch_id: int) -> None:
            rows = [row.body for row in batch.collect()]
            batches.append(len(rows))
            found.extend(rows)

        writer = frame.options(**options).load().writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination(120)
        assert not query.isActive
        if "maxOffsetsPerTrigger" in options and STREAM_TELLS_START:
            assert max(batches) <= int(options["maxOffsetsPerTrigger"])
            assert len(batches) >= 2
        return sorted(found)

    return run


def read(spark: SparkSession, log: CommitLog, **options: Any) -> DataFrame:
    return spark.read.format("txmq").options(**{"path": log.path, "subscribe": "orders", **options}).load()


def in_order(frame: DataFrame) -> DataFrame:
    return frame.orderBy("topic", "queue_id", "queue_offset")


@pytest.mark.long
def test_half_joined_with_op_in_plain_sql_is_what_the_source_gives(spark, log):
    log.create_topic("carts", queues=1)
    send(log, 0, 20, partitions=2)
    decide(log, prepare(log, 1, {"body": [f"m{i}" for i in range(25)]}, per="message"), roll_back_every=3)
    decide(log, prepare(log, 2, {"body": ["a", "b", "c"], "order": [7, 8, 7]}, per="key", key="order", topic="carts"))
    prepare(log, 3, {"body": ["never seen"]})
    spark.read.format("delta").load(f"{log.path}/op").createOrReplaceTempView("op")
    spark.read.format("delta").load(f"{log.path}/half").createOrReplaceTempView("half")
    source = read(spark, log, subscribe="orders, carts")
    assert source.count() == 20 + 16 + 3
    joined = spark.sql(HALF_JOINED_WITH_OP)  # its columns have the tables' comments
    assert_df_equality(source, joined, transforms=[in_order], ignore_nullable=True, ignore_metadata=True)


@pytest.mark.turns(2, among="source: reads")
def test_a_batch_read_is_stable_when_half_files_moved_and_the_old_ones_are_gone(spark, log):
    for batch_id in range(4):
        record = prepare(log, batch_id, {"body": [f"{batch_id}.{i}" for i in range(40)]}, per="message", partitions=2)
        decide(log, record, roll_back_every=4)
    frame = read(spark, log)
    before = in_order(frame).toArrow()
    assert before.equals(log.read("orders"))
    written = list((Path(log.path) / "half").glob("*.parquet"))
    move_half(log)
    for file in written:  # what a vacuum would do, without its minutes
        file.unlink()
    assert in_order(frame).toArrow().equals(before)
    assert in_order(read(spark, log, ordered="true")).toArrow().equals(before)


def test_an_empty_topic_and_a_filter_and_a_projection(spark, log):
    assert read(spark, log).count() == 0
    send(log, 0, 9)
    assert read(spark, log, tags="a || b").where("queue_id = 1").count() == 2
    frame = spark.read.format("txmq").schema("keys string, body string").option("subscribe", "orders").load(log.path)
    assert {row.body for row in frame.collect()} == {f"0.{i}" for i in range(9)}


def send_priced(log: CommitLog, batch_id: int, messages: int) -> None:
    properties = pa.array([[("price", str(i)), ("region", "eu")] for i in range(messages)], PROPERTIES)
    tags = ["paid" if i % 2 else "open" for i in range(messages)]
    table = pa.table({"body": [f"{batch_id}.{i}" for i in range(messages)], "tags": tags, "properties": properties})
    decide(log, prepare(log, batch_id, table))


@pytest.mark.turns(2, among="source: reads")
def test_a_selector_filters_a_batch_that_does_not_read_properties(spark, log):
    send_priced(log, 0, 9)
    wanted = {"path": log.path, "subscribe": "orders", "selector": "price >= 3 AND region = 'eu' AND TAGS = 'paid'"}
    frame = spark.read.format("txmq").schema("body string").options(**wanted).load()
    assert {row.body for row in frame.collect()} == {"0.3", "0.5", "0.7"}
    assert read(spark, log, selector="price > 3").count() == 5
    for options, words in (
        ({"selector": "price >"}, "selector, line 1, column 8: found the end"),
        ({"selector": "TRUE", "tags": "paid"}, "contradict each other"),
    ):
        with pytest.raises(Exception, match=words):
            read(spark, log, **options).collect()


@pytest.mark.long
def test_a_selector_and_tags_filter_a_stream_and_not_its_progress(spark, log, follow, tmp_path):
    send_priced(log, 0, 9)
    assert follow("selector", startingOffsets="earliest", selector="price BETWEEN 2 AND 4") == ["0.2", "0.3", "0.4"]
    assert follow("tags", startingOffsets="earliest", tags="paid") == ["0.1", "0.3", "0.5", "0.7"]
    assert follow("none", startingOffsets="earliest", selector="FALSE") == []
    ends = {(tmp_path / name / "offsets" / "0").read_text().splitlines()[-1] for name in ("selector", "tags", "none")}
    assert [sum(json.loads(end)["orders"].values()) for end in ends] == [9]
    send_priced(log, 1, 5)
    assert follow("selector", selector="price BETWEEN 2 AND 4") == ["1.2", "1.3", "1.4"]
    assert follow("none", selector="price = 0") == ["1.0"]


def test_a_stream_goes_on_from_its_checkpoint(log, follow):
    send(log, 0, 30)
    first = follow(startingOffsets="earliest", maxOffsetsPerTrigger="15")
    assert first == sorted(f"0.{i}" for i in range(30))
    assert follow(startingOffsets="earliest") == []
    send(log, 1, 5)
    send(log, 2, 5)
    assert follow(startingOffsets="earliest") == sorted(f"{b}.{i}" for b in (1, 2) for i in range(5))


@pytest.mark.long
def test_a_stream_starts_at_the_end_or_at_a_time(log, follow):
    send(log, 0, 4)
    assert follow("latest") == []
    send(log, 1, 4)
    assert follow("latest") == [f"1.{i}" for i in range(4)]
    time = max(log.read("orders")["commit_timestamp"].to_pylist()).isoformat()
    assert follow("time", startingTimestamp=time) == [f"1.{i}" for i in range(4)]


@pytest.mark.long
def test_a_pattern_takes_up_a_topic_that_is_added_later(log, follow):
    send(log, 0, 3)
    assert follow(subscribePattern="or.*|later", startingOffsets="earliest") == ["0.0", "0.1", "0.2"]
    log.create_topic("later", queues=2)
    send(log, 1, 3, topic="later")
    assert follow(subscribePattern="or.*|later") == ["1.0", "1.1", "1.2"]


@pytest.mark.turns(2, among="source: reads")
def test_lost_files_stop_a_stream_or_are_skipped(log, follow):
    lost = send(log, 0, 3)
    send(log, 1, 3)
    (Path(log.path) / "half" / next(iter(lost.files.values())).path).unlink()
    with pytest.raises(StreamingQueryException, match=r"OffsetOutOfRangeError: topic 'orders', queue 0"):
        follow(startingOffsets="earliest")
    assert follow(startingOffsets="earliest", failOnDataLoss="false") == ["1.0", "1.1", "1.2"]


@pytest.mark.turns(2, among="source: reads")
def test_options_that_cannot_be_used_are_named(spark, log):
    for options, words in (
        ({"startingOffset": "earliest"}, "did you mean 'startingOffsets'"),
        ({"subscribePattern": "o.*"}, "contradict each other"),
        ({"subscribe": "order"}, "did you mean 'orders'"),
        ({"startingOffsets": '{"orders": {"0": 9, "1": 0, "2": 0}}'}, "past its end"),
    ):
        with pytest.raises(Exception, match=words):
            read(spark, log, **options).collect()


# ---------------------------------------------------------------- the limit of a micro-batch, on every Spark
@dataclass
class Follower:
    """A query that goes on for as long as there are messages, or for one run of availableNow."""

    spark: SparkSession
    log: CommitLog
    folder: Path
    fails_at: int = -1

    def run(self, available_now: bool = False, **options: str) -> list[list[str]]:
        """Run the query; the bodies of each of its micro-batches."""
        batches: dict[int, list[str]] = {}

        def take(batch: DataFrame, batch_id: int) -> None:
            if batch_id == self.fails_at:
                raise RuntimeError("the query dies here")
            batches[batch_id] = [row.body for row in batch.collect()]

        stream = self.spark.readStream.format("txmq").schema("body string").options(
            path=self.log.path, subscribe="orders", startingOffsets="earliest", **options
        )  # fmt: skip
        writer = stream.load().writeStream.foreachBatch(take).option("checkpointLocation", str(self.folder / "cp"))
        for start in range(1, STARTS_MAX + 1):
            query = writer.trigger(availableNow=True).start() if available_now else writer.start()
            try:
                if available_now:
                    query.awaitTermination()
                else:
                    query.processAllAvailable()
                break
            except StreamingQueryException as problem:
                if "connect back" not in str(problem) or start == STARTS_MAX:  # a Python worker came too late
                    raise
            finally:
                query.stop()
        return [batch for _, batch in sorted(batches.items()) if batch]


SEVEN = {"maxOffsetsPerTrigger": "7"}
SEVEN_AT_FIRST = {**SEVEN, "limitFirstBatch": "true"}


def sizes(batches: list[list[str]]) -> list[int]:
    return [len(batch) for batch in batches]


@pytest.fixture
def follower(spark: SparkSession, log: CommitLog, tmp_path: Path) -> Follower:
    return Follower(spark, log, tmp_path)


@pytest.mark.turns(4, among="source: limits")
def test_each_micro_batch_is_limited_from_a_query_s_first_run_on(follower: Follower, log: CommitLog) -> None:
    send(log, 0, 11, partitions=2)
    first = follower.run(**SEVEN_AT_FIRST)
    assert sizes(first) == [7, 4]
    send(log, 1, 9)
    second = follower.run(**SEVEN_AT_FIRST)
    assert sizes(second) == [7, 2]
    send(log, 2, 3)  # below the limit
    third = follower.run(**SEVEN_AT_FIRST)
    assert sizes(third) == [3]
    bodies = [body for run in (first, second, third) for batch in run for body in batch]
    assert sorted(bodies) == sorted(log.read("orders", columns=["body"])["body"].cast("string").to_pylist())


@pytest.mark.turns(4, among="source: limits")
def test_a_micro_batch_that_died_comes_again_and_the_next_ones_are_limited(follower: Follower, log: CommitLog) -> None:
    send(log, 0, 14)
    follower.fails_at = 1
    with pytest.raises(StreamingQueryException, match="the query dies here"):
        follower.run(**SEVEN_AT_FIRST)
    follower.fails_at = -1
    send(log, 1, 4)
    batches = follower.run(**SEVEN)
    assert sizes(batches) == [7, 4]
    assert len({body for batch in batches for body in batch}) == 11


@pytest.mark.turns(4, among="source: limits")
def test_without_limitFirstBatch_an_older_spark_limits_from_a_run_s_second_batch_on(
    follower: Follower, log: CommitLog
) -> None:
    send(log, 0, 10)
    assert sizes(follower.run(**SEVEN)) == ([7, 3] if STREAM_TELLS_START else [10])


@pytest.mark.turns(4, among="source: limits")
def test_available_now_ends_at_what_was_there_whatever_the_limit(follower: Follower, log: CommitLog) -> None:
    for number in range(2):  # a query's first run, and a later one
        send(log, number, 11)
        batches = follower.run(available_now=True, **SEVEN)
        assert sizes(batches) == ([7, 4] if STREAM_TELLS_START else [11])
        assert len({body for batch in batches for body in batch}) == 11
