"""Assembles the half batch that a listener sees. Its rows are read when the listener asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.batch_state import BatchState
from rmq_spark._core.log.half import HALF_SCHEMA, HalfRows
from rmq_spark._core.log.half_record import HalfRecord, StoredFile
from rmq_spark._core.log.half_table import ranges_of
from rmq_spark._core.log.half_writer import partition_of
from rmq_spark._core.storage.delta_table import DeltaLogTable
from rmq_spark._core.storage.row_range import RowRange
from rmq_spark._core.storage.spark_parquet import read_files, spark_schema
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX, FROM_THE_FUTURE_AGE_S
from rmq_spark._core.vocabulary.rows import RowSet, booleans_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rmq_spark._core.protocol.engine import Engine

WANTED = pa.schema([("wanted_file", pa.int64()), ("first", pa.int64()), ("last", pa.int64())])
"""Schema of the runs of rows that Spark picks from half files."""


def half_batch_of(
    engine: Engine,
    record: HalfRecord,
    state: BatchState,
    attempt: int,
    rows: RowSet,
    arg: Any = None,
    in_memory: HalfRows | pa.Table | None = None,
) -> HalfBatch:
    """The half batch as a listener sees it: these rows, all under one attempt. ``in_memory``: all rows of the half
    batch in send order, or some of their columns, if the caller has them."""
    return HalfBatch(
        half_id=record.half_id,
        app_id=record.header.app_id,
        batch_id=record.header.batch_id,
        attempt=attempt,
        producer_group=record.header.producer_group,
        prepared_at=_began_at(engine, record, state, attempt),
        check_times=state.check_times(rows),
        transaction_per=record.header.transaction_per,
        fence_id=record.header.fence_id,
        staged_ms=record.staged_ms,
        rows=_LogRows(engine, record, rows, in_memory),
        log_id=engine.id,
        arg=arg,
    )


def _began_at(engine: Engine, record: HalfRecord, state: BatchState, attempt: int) -> datetime:
    """When an attempt began.

    After a fast clock wrote a future time, all later prepares get times after it, and no check would find them old
    enough. Then the time of staging counts; or, when that is in the future as well, an assumed age.
    """
    now = engine.runtime.now()
    for began_at in (state.opened_at.get(attempt, record.prepared_at), record.staged_at):
        if began_at <= now + timedelta(seconds=CLOCK_SKEW_S_MAX):
            return began_at
    return now - timedelta(seconds=FROM_THE_FUTURE_AGE_S)


class _LogRows:
    def __init__(self, engine: Engine, record: HalfRecord, rows: RowSet, in_memory: HalfRows | pa.Table | None) -> None:
        self._engine, self._record, self.rows, self._in_memory = engine, record, rows, in_memory

    @property
    def is_all(self) -> bool:
        return self.rows.count == self._record.rows

    def parts(self) -> dict[int, _LogRows]:
        files: dict[int, dict[int, StoredFile]] = {}
        for file_no, file in self._record.files.items():
            files.setdefault(partition_of(file_no), {})[file_no] = file
        return {
            part: _LogRows(self._engine, replace(self._record, files=files_of_part), rows, None)
            for part, files_of_part in files.items()
            if (rows := RowSet({n: self.rows[n] for n in files_of_part if n in self.rows}))
        }

    def ranges(self) -> list[RowRange]:
        return ranges_of(self._record, self.rows)

    def read(self, columns: Sequence[str]) -> pa.Table:
        table = self._in_memory.table if isinstance(self._in_memory, HalfRows) else self._in_memory
        if table is not None and set(columns).issubset(table.column_names):
            chosen_columns = table.select(list(columns))
            if self.is_all:
                return chosen_columns
            chosen = [self.rows.get(n) or bytes(file.rows) for n, file in self._record.files.items()]
            return chosen_columns.filter(booleans_of(b"".join(chosen)))
        return self._engine.half.read(self._record, self.rows, columns)

    def to_spark(self, spark: SparkSession) -> DataFrame:
        from pyspark.sql import functions as F

        table = self._engine.half.table
        files = sorted({self._record.files[n].path for n in self.rows})
        if not isinstance(table, DeltaLogTable):
            return spark.createDataFrame(self.read(HALF_SCHEMA.names))
        frame = read_files(spark, self._engine.path, table, table.actions(), files, HALF_SCHEMA)
        frame = frame.where(F.col("half_id") == self._record.half_id)
        if not self.is_all:
            ranges = [(n, a, b) for n, file_ranges in self.rows.ranges() for a, b in file_ranges]
            wanted = spark.createDataFrame(ranges, spark_schema(WANTED))
            inside = (F.col("file_no") == F.col("wanted_file")) & F.col("row_no").between(F.col("first"), F.col("last"))
            frame = frame.join(F.broadcast(wanted), inside, "left_semi")
        return frame
