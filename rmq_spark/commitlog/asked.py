"""A half batch as a listener is asked about it, and its answer as rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.commitlog.half import HALF_SCHEMA, HalfRows
from rmq_spark.commitlog.half_store import HalfRecord
from rmq_spark.commitlog.op import BatchState
from rmq_spark.commitlog.rows import NO_ROWS, RowSet
from rmq_spark.config import CLOCK_SKEW_S_MAX, FROM_THE_FUTURE_AGE_S
from rmq_spark.storage.spark_parquet import read_files, spark_schema
from rmq_spark.storage.table import DeltaLogTable
from rmq_spark.transaction import KEY, HalfBatch, LocalTransactionState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rmq_spark.commitlog.steps import ProtocolSteps

WANTED = pa.schema([("wanted_file", pa.int64()), ("first", pa.int64()), ("last", pa.int64())])
"""Runs of rows of half files, which Spark joins with these."""


def half_batch_of(
    log: ProtocolSteps,
    record: HalfRecord,
    state: BatchState,
    attempt: int,
    rows: RowSet,
    arg: Any = None,
    held: HalfRows | None = None,
) -> HalfBatch:
    """The half batch as a listener sees it: these rows, which are under one attempt. ``held`` are all rows of it, where
    the caller has them."""
    return HalfBatch(
        half_id=record.half_id,
        app_id=record.header.app_id,
        batch_id=record.header.batch_id,
        attempt=attempt,
        producer_group=record.header.producer_group,
        prepared_at=_began_at(log, record, state, attempt),
        check_times=state.check_times(rows),
        transaction_per=record.header.transaction_per,
        fence_id=record.header.fence_id,
        rows=_LogRows(log, record, rows, held),
        log_id=log.id,
        arg=arg,
    )


def _began_at(log: ProtocolSteps, record: HalfRecord, state: BatchState, attempt: int) -> datetime:
    """When an attempt began, as far as it can be believed.

    A clock that was ahead has written times in the future, and later half batches come after those: none would be
    old enough for a check. The time of staging counts then, or an assumed age when it is in the future too.
    """
    now = log.machine.now()
    for said in (state.opened_at.get(attempt, record.sent_at), record.staged_at):
        if said <= now + timedelta(seconds=CLOCK_SKEW_S_MAX):
            return said
    return now - timedelta(seconds=FROM_THE_FUTURE_AGE_S)


def split_by_verdict(
    log: ProtocolSteps, record: HalfRecord, rows: RowSet, batch: HalfBatch, verdicts: pa.Array | LocalTransactionState
) -> dict[LocalTransactionState, RowSet]:
    """The rows of a half batch by the verdict of their transaction."""
    if not isinstance(verdicts, LocalTransactionState) and len(verdicts) == 1:
        verdicts = LocalTransactionState(verdicts[0].as_py())
    if isinstance(verdicts, LocalTransactionState):
        return {v: rows if v is verdicts else NO_ROWS for v in LocalTransactionState}
    if batch.transaction_per == KEY:
        keys = log.half.read(record, rows, ["transaction_key"])["transaction_key"]
        verdicts = verdicts.take(pc.index_in(keys, value_set=batch.transactions["transaction_key"].combine_chunks()))
    return {v: rows.where(pc.equal(verdicts, v.value)) for v in LocalTransactionState}


class _LogRows:
    """The rows of one half batch for a listener."""

    def __init__(self, log: ProtocolSteps, record: HalfRecord, rows: RowSet, held: HalfRows | None) -> None:
        self._log, self._record, self._rows, self._held = log, record, rows, held

    def read(self, columns: Sequence[str]) -> pa.Table:
        if self._held is not None:
            return self._held.table.select(list(columns))
        return self._log.half.read(self._record, self._rows, columns)

    def to_spark(self, spark: SparkSession) -> DataFrame:
        from pyspark.sql import functions as F

        table = self._log.half.table
        files = sorted({self._record.files[n].path for n in self._rows})
        if not isinstance(table, DeltaLogTable):
            return spark.createDataFrame(self.read(HALF_SCHEMA.names))
        frame = read_files(spark, self._log.path, table, table.actions(), files, HALF_SCHEMA)
        frame = frame.where(F.col("half_id") == self._record.half_id)
        if self._rows.count < self._record.rows:
            ranges = [(n, a, b) for n, file_ranges in self._rows.ranges() for a, b in file_ranges]
            wanted = spark.createDataFrame(ranges, spark_schema(WANTED))
            inside = (F.col("file_no") == F.col("wanted_file")) & F.col("row_no").between(F.col("first"), F.col("last"))
            frame = frame.join(F.broadcast(wanted), inside, "left_semi")
        return frame
