"""Commit logs with messages in them, for the tests of the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rmq_spark.commitlog.half import HalfHeader, HalfWriter, half_id_of
from rmq_spark.commitlog.half_store import HalfRecord
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import RowState, Who

APP = "app"


def prepare(
    log: CommitLog,
    batch_id: int,
    columns: Mapping[str, Sequence[Any]] | pa.Table,
    *,
    topic: str | None = "orders",
    per: str = "batch",
    key: str | None = None,
    partitions: int = 1,
) -> HalfRecord:
    """One half batch, its rows dealt out to so many half files."""
    header = HalfHeader(half_id_of(APP, batch_id), APP, batch_id, None, None, None, per, "group")
    writer = HalfWriter(header, log.topics(), topic, key)
    table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
    size = -(-table.num_rows // partitions)
    parts = [table.slice(i * size, size) for i in range(partitions)]
    files = [f for i, part in enumerate(parts) if part.num_rows for f in log.stage(writer, part.to_batches(), i)]
    return log.prepare(header, files)


def decide(log: CommitLog, record: HalfRecord, roll_back_every: int | None = None) -> None:
    """Commit what is pending, but for every so-manieth row, which is rolled back."""
    commit, rollback = dict(log.state_of(record).rows_in((RowState.PENDING,), 1)), {}
    if roll_back_every:
        for file_no, bits in list(commit.items()):
            no = bytes(1 if i % roll_back_every == 0 else 0 for i in range(len(bits)))
            rollback[file_no] = no
            commit[file_no] = bytes(1 - b for b in no)
    log.decide(record, 1, commit=commit, rollback=rollback, who=Who.EXECUTE)


def send(log: CommitLog, batch_id: int, messages: int = 5, **more: Any) -> HalfRecord:
    """A half batch of numbered messages, committed."""
    bodies = [f"{batch_id}.{i}" for i in range(messages)]
    tags = [("a", "b", None)[i % 3] for i in range(messages)]
    table = pa.table({"body": bodies, "tags": pa.array(tags, pa.string()), "keys": [f"k{i}" for i in range(messages)]})
    record = prepare(log, batch_id, table, **more)
    decide(log, record)
    return record
