"""Readers that know nothing of rmq_spark see the same committed messages, offsets and times in the table messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support.half_batches import another, commit, decide_one, let_leave, pending, prepare, roll_back, send, split
from tests.support.inside import COLUMN_MEANINGS, Who, table_files
from tests.support.limits import limited

pytestmark = pytest.mark.log("delta", orders=2, points=1)

COLUMNS = ["topic", "queue_id", "queue_offset", "msg_id", "transaction_id", "tags", "keys", "body", "commit_timestamp"]
ORDER = [("topic", "ascending"), ("queue_id", "ascending"), ("queue_offset", "ascending")]


def by_deltalake(path: str) -> list[dict[str, Any]]:
    return list(DeltaTable(path).to_pyarrow_table(columns=COLUMNS).sort_by(ORDER).to_pylist())


def by_polars(path: str) -> list[dict[str, Any]]:
    return pl.scan_delta(path).select(COLUMNS).sort("topic", "queue_id", "queue_offset").collect().to_dicts()


def by_duckdb(path: str) -> list[dict[str, Any]]:
    """Through an Arrow dataset: its own reader of Delta is an extension that it downloads."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("messages", DeltaTable(path).to_pyarrow_dataset())
    found = connection.sql(f"SELECT {', '.join(COLUMNS)} FROM messages ORDER BY 1, 2, 3")
    schema = pa.schema(DeltaTable(path).schema().to_arrow())
    return list(found.to_arrow_table().cast(pa.schema([schema.field(name) for name in COLUMNS])).to_pylist())


READERS: list[Callable[[str], list[dict[str, Any]]]] = [by_deltalake, by_polars, by_duckdb]


def fill(log: CommitLog, first: int) -> None:
    for i in range(first, first + 3):
        record = send(log, f"key{i}", 7, per="message")
        kept, dropped = split(pending(log, record), 3)
        decide_one(log.engine, record, 1, commit=kept, rollback=dropped, who=Who.EXECUTE)
        tagged = {"body": [f"p{i}.{j}" for j in range(3)], "tags": ["a", None, "b"], "keys": ["k", "l m", None]}
        commit(log, prepare(log, i, tagged, topic="points"))
        roll_back(log, send(log, f"none{i}"))
    send(log, f"open{first}")


def expected(log: CommitLog) -> list[dict[str, Any]]:
    """What our own reader sees; of what is drained that is the same."""
    tables = [log.read(topic, columns=COLUMNS) for topic in sorted(log.topics())]
    return [row for table in tables for row in table.sort_by(ORDER).to_pylist()]


def test_each_reader_sees_the_same_messages_also_after_they_were_merged_and_expired(log: CommitLog) -> None:
    path = f"{log.path}/messages"
    for step in range(2):
        fill(log, 3 * step)
        log.drain()
        for read in READERS:
            assert read(path) == expected(another(log)), (read.__name__, step)
    with limited(MESSAGES_FILES_MAX=2):
        assert table_files.compact_messages(another(log).engine.messages_table) > 0
    for read in READERS:
        assert read(path) == expected(another(log)), read.__name__
    log.engine.topic_store.set_retention("points", 0.0)
    assert let_leave(log).files_expired > 0
    for read in READERS:
        assert read(path) == expected(another(log)), read.__name__
        assert {row["topic"] for row in read(path)} == {"orders"}


def test_a_filter_on_offsets_gives_the_same_rows(log: CommitLog) -> None:
    fill(log, 0)
    log.drain()
    path = f"{log.path}/messages"
    wanted = [r for r in by_deltalake(path) if r["topic"] == "orders" and r["queue_offset"] >= 3]
    lazy = pl.scan_delta(path).filter((pl.col("topic") == "orders") & (pl.col("queue_offset") >= 3))
    assert lazy.select(COLUMNS).sort("topic", "queue_id", "queue_offset").collect().to_dicts() == wanted
    kept = DeltaTable(path).to_pyarrow_table(
        columns=COLUMNS, filters=(pc.field("topic") == "orders") & (pc.field("queue_offset") >= 3)
    )
    assert kept.sort_by(ORDER).to_pylist() == wanted


def test_each_column_of_a_table_says_what_it_means_also_after_commits_and_upkeep(log: CommitLog) -> None:
    txmq.ConsumerGroup(log, "shop").reset("earliest", ["orders"])  # makes the table groups
    fill(log, 0)
    log.maintain()
    for table, meanings in COLUMN_MEANINGS.items():
        fields = json.loads(DeltaTable(f"{log.path}/{table}").schema().to_json())["fields"]
        assert {field["name"]: field["metadata"].get("comment") for field in fields} == meanings
