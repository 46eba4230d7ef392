"""Spark's own Delta source follows the table messages while upkeep rewrites it and lets the oldest expire."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as pads
import pytest

import rmq_spark as txmq
from tests.support.half_batches import another, commit, let_leave, send
from tests.support.limits import Limit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Found = list[tuple[int, int, bytes]]
COLUMNS = ["queue_id", "queue_offset", "body"]


def of_log(log: txmq.CommitLog) -> Found:
    return sorted(tuple(row.values()) for row in another(log).read("orders", columns=COLUMNS).to_pylist())


def go_on(spark: SparkSession, log: txmq.CommitLog, folder: Path) -> Found:
    """Let the stream take what is new, and return all that it has ever got."""
    stream = spark.readStream.format("delta").load(f"{log.path}/messages").select(*COLUMNS)
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(folder / "rows"))
    query.awaitTermination(240)
    assert not query.isActive
    rows = pads.dataset([str(path) for path in (folder / "rows").glob("*.parquet")]).to_table(columns=COLUMNS)
    return sorted(tuple(row.values()) for row in rows.to_pylist())


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_delta_stream_gets_each_message_once_over_merges_and_expiry(
    spark: SparkSession, log_path: str, tmp_path: Path, limit: Limit
) -> None:
    limit(MESSAGES_FILES_MAX=2)
    log = txmq.CommitLog.create(log_path)
    log.create_topic("orders", queues=2)
    sent = iter(range(100))

    def send_and_drain() -> None:
        for _ in range(2):
            commit(log, send(log, f"key{next(sent)}", 3))
            log.drain()

    send_and_drain()
    assert go_on(spark, log, tmp_path / "early") == of_log(log)
    send_and_drain()
    assert log.maintain().files_merged >= 4  # what the stream has read, and what it has not
    whole = of_log(log)
    assert go_on(spark, log, tmp_path / "early") == whole
    batch = spark.read.format("delta").load(f"{log.path}/messages").select(*COLUMNS)
    assert sorted(tuple(row) for row in batch.collect()) == whole

    log.engine.topic_store.set_retention("orders", 0.0)
    assert let_leave(log).files_expired == 1
    log.set_retention("orders", None)
    send_and_drain()
    kept = of_log(log)
    assert not set(kept) & set(whole)
    assert go_on(spark, log, tmp_path / "early") == sorted([*whole, *kept])
    assert go_on(spark, log, tmp_path / "late") == kept
