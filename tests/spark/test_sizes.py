"""Sizes and columns that were trouble elsewhere: each goes through the sink and comes back as it was."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from rmq_spark import CommitLog
from tests.support.seeds import how_many

MIB = 1024 * 1024
MANY = how_many(40, in_all=300)


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    made = CommitLog.create(tmp_path / "log")
    made.create_topic("orders", queues=2)
    return made


def send(frame: DataFrame, log: CommitLog, **options: str) -> None:
    common = {"path": log.path, "topic": "orders", "producerGroup": "shop", "transactionListener": "none"}
    frame.write.format("txmq").options(**common, **options).mode("append").save()


def read(spark: SparkSession, log: CommitLog) -> DataFrame:
    return spark.read.format("txmq").options(path=log.path, subscribe="orders").load()


@pytest.mark.turns(3, among="sizes")
def test_bodies_of_1_mib_in_one_partition(spark: SparkSession, log: CommitLog) -> None:
    send(spark.range(0, MANY, 1, 1).selectExpr(f"rpad(string(id), {MIB}, '.') body", "string(id) keys"), log)
    sizes = read(spark, log).selectExpr("keys", "length(body) size", "string(substring(body, 1, 4)) head").collect()
    assert {row.size for row in sizes} == {MIB}
    assert sorted(int(row.keys) for row in sizes) == list(range(MANY))
    assert all(row.head.startswith(f"{row.keys}."[:4]) for row in sizes)


@pytest.mark.turns(3, among="sizes")
def test_collated_columns(spark: SparkSession, log: CommitLog) -> None:
    """Words that a collation takes for equal stay apart, also as keys of transactions."""
    words = "collate(word, 'UTF8_LCASE')"
    frame = spark.createDataFrame([("a",), ("A",)], "word string")
    frame = frame.selectExpr(f"{words} body", f"{words} tags", f"{words} keys", f"{words} customer")
    send(frame, log, transactionKey="customer")
    rows = read(spark, log).selectExpr("string(body) body", "tags", "keys", "transaction_id").collect()
    assert sorted((row.body, row.tags, row.keys) for row in rows) == [("A", "A", "A"), ("a", "a", "a")]
    assert len({row.transaction_id for row in rows}) == 2


@pytest.mark.turns(3, among="sizes")
def test_the_hour_that_new_york_repeats(spark: SparkSession, log: CommitLog) -> None:
    """Half past one comes twice on that day, as two instants."""
    first = int(datetime(2025, 11, 2, 5, 30, tzinfo=timezone.utc).timestamp())
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    frame = session.range(2).selectExpr("string(id) body", f"timestamp_seconds({first} + id * 3600) born_timestamp")
    assert {row[0] for row in frame.selectExpr("date_format(born_timestamp, 'HH:mm')").collect()} == {"01:30"}
    send(frame, log)
    for reading in (spark, session):
        rows = read(reading, log).selectExpr("int(string(body)) n", "unix_seconds(born_timestamp) at").collect()
        assert {row.n: row.at - first for row in rows} == {0: 0, 1: 3600}
