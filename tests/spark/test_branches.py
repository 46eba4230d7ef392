"""One order, three topics, three groups: the branch that fails for a while holds nobody up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support.inside import CommitOncePrepared, retry_topic

TOPICS = ("logistics", "points", "cart")
ORDERS = 6
POISONED = "3"
Status = txmq.ConsumeResult


@pytest.mark.long
def test_three_branches_of_one_order(spark: SparkSession, log_path: str, tmp_path: Path) -> None:
    log = CommitLog.create(log_path)
    for topic in TOPICS:
        log.create_topic(topic, queues=2)
    with txmq.TransactionMQProducer(log, "orders", CommitOncePrepared(), check_interval=None) as producer:
        for order in map(str, range(ORDERS)):
            producer.send_messages_in_transaction([txmq.Message(t, f"{t} {order}", keys=order) for t in TOPICS])
    weather = tmp_path / "points-are-down"
    weather.touch()
    diary = tmp_path / "diary"

    def listener(group: str) -> Any:
        def consume(messages: pa.Table) -> list[txmq.ConsumeResult]:
            found = []
            for row in messages.select(["keys", "reconsume_times"]).to_pylist():
                poisoned = row["keys"] == POISONED and not (tmp_path / "antidote").exists()
                bad = group == "points" and (weather.exists() or poisoned)
                with diary.open("a") as file:
                    file.write(json.dumps({"group": group, "bad": bad, "at": time.time(), **row}) + "\n")
                found.append(Status.FAILURE if bad else Status.SUCCESS)
            return found

        return consume

    def run(group: str) -> None:
        stream = spark.readStream.format("txmq").option("path", log.path).option("subscribe", group)
        stream = stream.option("consumerGroup", group).option("startingOffsets", "earliest").load()
        writer = txmq.consume(stream, group, listener(group), log=log, delay_level=1, max_reconsume_times=2)
        query = writer.option("checkpointLocation", str(tmp_path / group)).trigger(availableNow=True).start()
        query.awaitTermination()

    def seen(group: str, bad: bool | None = None) -> list[str]:
        rows = [json.loads(line) for line in diary.read_text().splitlines()]
        return sorted(r["keys"] for r in rows if r["group"] == group and (bad is None or r["bad"] == bad))

    def come_again(times: int) -> None:
        """The retries of that round are visible."""
        deadline = time.monotonic() + 60
        while log.read(retry_topic("points")).num_rows < times:
            log.engine.ledger.place_due()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    for group in TOPICS:
        run(group)
    everyone = [str(n) for n in range(ORDERS)]
    assert seen("logistics", bad=False) == seen("cart", bad=False) == everyone
    assert seen("points", bad=True) == everyone
    assert sum(txmq.ConsumerGroup(log, "logistics").lag()["lag"].to_pylist()) == 0

    weather.unlink()
    come_again(ORDERS)
    run("points")
    assert seen("points", bad=False) == [k for k in everyone if k != POISONED]
    come_again(ORDERS + 1)
    run("points")
    letters = txmq.DeadLetters(log, "points")
    assert letters.list()["body"].to_pylist() == [f"points {POISONED}".encode()]

    (tmp_path / "antidote").touch()
    assert letters.resend() == 1
    run("points")
    assert seen("points", bad=False) == everyone
    assert seen("logistics") == seen("cart") == everyone  # once each
    first: dict[str, float] = {}
    for row in map(json.loads, diary.read_text().splitlines()):
        if row["group"] == "points" and row["reconsume_times"] == 1:
            assert row["at"] - first[row["keys"]] >= 1, "a retry came before its time"
        if row["group"] == "points":
            first.setdefault(row["keys"], row["at"])
