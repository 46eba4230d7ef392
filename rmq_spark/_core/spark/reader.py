"""``spark.read.format("txmq")`` and ``spark.readStream.format("txmq")``.

The driver plans (``reads/plan.py``). Executors read half files with pyarrow, and pass whole Arrow batches to Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import DataType, StringType, StructType, TimestampType

from rmq_spark._core.log.message_range import MessageRange, out_of_range
from rmq_spark._core.messages.message_reader import by_file, read_ranges, require_source_columns, row_range_of
from rmq_spark._core.messages.messages_table import SOURCE_SCHEMA
from rmq_spark._core.reads.offsets import (
    Again,
    JsonOffsets,
    Positions,
    first_begin,
    from_checkpoint,
    no_longer_suspended,
    seconds_to_wait,
    to_json,
)
from rmq_spark._core.reads.plan import Planner, admit, partition_ranges
from rmq_spark._core.reads.read_options import ReadOptions, read_options
from rmq_spark._core.spark.executor_files import LogFiles
from rmq_spark._core.spark.versions import (
    STREAM_TELLS_START,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    arrow_schema_in_utc,
    batch_rows_max,
)
from rmq_spark._core.storage.spark_parquet import spark_schema
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import HalfBatchNotFoundError, MessageError, OffsetError, OffsetOutOfRangeError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.spark.group_progress import GroupProgress

logger = logging.getLogger(__name__)

BATCH_ROWS_MIN = 8_192
"""Smaller tables, from small half batches, are joined before they go to Spark."""
BATCH_BYTES_MAX = 32 * 1024 * 1024
"""Larger Arrow batches are cut, because Spark copies a batch as a whole."""
SUSPENDED_WAIT_S_MAX = 60.0
"""Longest wait of ``availableNow`` for a suspended queue. Spark cannot stop the query meanwhile."""


@dataclass(frozen=True)
class TxmqPartition(InputPartition):
    """The ranges that one task reads, and the selector's ``now``, so that a retried task finds the same rows."""

    ranges: tuple[MessageRange, ...]
    now_ms: int = 0


class _Reader:
    """The common part of both readers: options, schema, and reading a partition. Pickled to executors."""

    streaming: bool

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options: ReadOptions = read_options(options, self.streaming)
        self.schema = arrow_schema(schema)
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An open commit log is not pickled: Delta's engine must not reach a forked process.
        return {**self.__dict__, "_planner": None, "_group_progress": None}

    @property
    def planner(self) -> Planner:
        """Return the planner. Its first use opens the log."""
        if self._planner is None:
            planner = Planner(_open(self.options), self.options.subscription, self.options.fail_on_data_loss)
            planner.queues()  # a topic that is not in the log is an error at once
            self._planner = planner
        return self._planner

    def _plan(self, start: Positions, end: Positions) -> list[TxmqPartition]:
        ranges = self.planner.ranges(start, end)
        options = self.options
        partitions = partition_ranges(ranges, options.ordered, options.partitions_min, options.partition_records_max)
        now_ms = self.planner.engine.runtime.time_ms()
        return [TxmqPartition(tuple(ranges_of_partition), now_ms) for ranges_of_partition in partitions]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of a partition as Arrow batches, on an executor. Rows that the log no longer has are an
        OffsetOutOfRangeError, or left out with ``failOnDataLoss=false``."""
        if not isinstance(partition, TxmqPartition):  # Spark's stand-in when there is nothing to read
            return iter(())
        return to_batches(_messages(self.options, self.schema, partition.ranges, partition.now_ms))


class TxmqReader(_Reader, DataSourceReader):
    """Reads committed messages up to the log's present end, or to ``endingOffsets``. The schema has all columns of the
    source, or some of them (``.schema("keys string, body binary")``)."""

    streaming = False

    def partitions(self) -> Sequence[InputPartition]:
        planner, options = self.planner, self.options
        starting = "startingTimestamp" if not isinstance(options.starting, (str, dict)) else "startingOffsets"
        start = planner.resolve(starting, options.starting)
        end = planner.resolve("endingOffsets", options.ending)
        if isinstance(options.starting, dict) and isinstance(options.ending, dict):
            for queue, offset in start.items():
                if offset > end[queue]:
                    raise OffsetError(
                        f"startingOffsets has {offset} for topic {queue[0]!r}, queue {queue[1]}, which is after the "
                        f"{end[queue]} of endingOffsets"
                    )
        return self._plan(start, end)


class TxmqStreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads committed messages as they come; offsets are ``{"topic": {"queue": next offset}}``."""

    streaming = True

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        limited = self.options.offsets_per_trigger_max is not None
        if limited and not (STREAM_TELLS_START or self.options.limit_first_batch):
            logger.warning(
                "before Spark 4.2 maxOffsetsPerTrigger does not limit the first micro-batch of a run, since that is "
                "the only one with trigger(availableNow=True): with another trigger set limitFirstBatch=true"
            )
        self._had_batch = False
        self._stop_at: Positions | None = None
        self._initial: JsonOffsets | None = None
        self._planned: JsonOffsets | None = None
        self._warned = False
        self._group_progress: GroupProgress | None = None

    def initialOffset(self) -> JsonOffsets:
        """Return the start of a new query. A query with a checkpoint starts there.

        A new query starts at its group's positions. Queues that the group has not read, and all queues without a
        group, start at ``startingOffsets`` (default ``latest``) or ``startingTimestamp``.
        """
        if self._initial is None:  # "latest" stays one moment, however often Spark calls this
            self._initial = self._start_positions()
        return self._initial

    def _start_positions(self) -> JsonOffsets:
        starting = self.options.starting
        name = "startingOffsets" if isinstance(starting, (str, dict)) else "startingTimestamp"
        positions = self.planner.resolve(name, starting)
        if self.options.consumer_group is not None:
            group_positions = self.planner.engine.groups.next_offsets(self.options.consumer_group)
            of_queues = {queue: offset for queue, offset in group_positions.items() if queue in positions}
            what = f"consumer group {self.options.consumer_group!r}"
            positions |= self.planner.require_start(of_queues, self.planner.latest(), what)
        return to_json(positions, log_id=self.planner.engine.id)

    def _from_this_log(self, offset: JsonOffsets, what: str = "the checkpoint") -> tuple[Positions, Again]:
        """Parse an offset. An offset of another commit log means nothing here: it is an OffsetOutOfRangeError, or with
        ``failOnDataLoss=false`` the start of this log."""
        positions, again, log_id = from_checkpoint(offset, what)
        if log_id == self.planner.engine.id:
            return positions, again
        made_anew = (
            f"{what} counts in commit log {log_id!r}, and {redacted(self.options.path)} is commit log "
            f"{self.planner.engine.id}: it was made anew, or is another one"
        )
        if self.options.fail_on_data_loss:
            raise OffsetOutOfRangeError(
                f"{made_anew}. To read it from its start, begin with a new checkpoint and startingOffsets=earliest, or "
                "go on with failOnDataLoss=false"
            )
        if not self._warned:
            logger.warning("%s. It is read from its start, because failOnDataLoss=false", made_anew)
        self._warned = True
        return {}, {}

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self.options.offsets_per_trigger_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query at the log's present end."""
        self._stop_at = self.planner.latest()

    def latestOffset(self, start: JsonOffsets | None = None, limit: ReadLimit | None = None) -> JsonOffsets:
        """Return the end of the next micro-batch, or ``start`` itself when nothing is new.

        Before 4.2 Spark passes neither ``start`` nor ``limit``, so we remember the end that we returned, or that Spark
        planned after a restart (its last micro-batch again, or an empty one at its end). The trigger is unknown, too.
        ``availableNow`` runs one micro-batch, so the first one of a run is unlimited; ``limitFirstBatch`` limits it.

        A queue that an orderly consumer has suspended stands still, while the others advance. After the suspension, the
        next micro-batch reads it again from the message that was not consumed.
        """
        if start is not None and limit is not None:
            return self._end(start, limit)
        is_limited = self._had_batch or self.options.limit_first_batch
        limit = self.getDefaultReadLimit() if is_limited else ReadAllAvailable()
        self._planned = self._end(self._planned or self.initialOffset(), limit)
        self._had_batch = True
        return self._planned

    def _end(self, start: JsonOffsets, limit: ReadLimit) -> JsonOffsets:
        latest = self._latest()
        stored, answered = self._from_this_log(start)
        begin = self.planner.require_start(stored, latest)
        suspended = self._suspended(begin, answered)
        self.planner.forget({**begin, **{queue: offset for queue, (offset, _) in suspended.items()}})
        end = admit(begin, {**latest, **{queue: begin[queue] for queue in suspended}}, _rows_max(limit))
        again = self._read_again(suspended, or_end=self._stop_at is not None and end == begin)
        if end == stored and not again:
            return start
        return to_json(end, again, self.planner.engine.id, begin if start == self._initial else None)

    def _latest(self) -> Positions:
        """Return the log's end: the present one, or that at the beginning of ``availableNow``."""
        group = self._progress()
        if group is not None:
            group.place_due()
        latest = self.planner.latest()
        return latest if self._stop_at is None else self._stop_at

    def _suspended(self, begin: Positions, answered: Again) -> Again:
        """Publish Spark's progress, and return the queues that an orderly consumer has suspended."""
        group = self._progress()
        if group is None:
            return {}
        group.publish(begin, answered)
        return group.suspended(begin)

    def _read_again(self, suspended: Again, or_end: bool) -> Again:
        """Return the queues whose suspension is over.

        With ``or_end`` the query ends when there is none. So this waits for a suspension that is over soon, and leaves
        a longer one to the next run.
        """
        runtime = self.planner.engine.runtime
        again = no_longer_suspended(suspended, runtime.now())
        if again or not suspended or not or_end:
            return again
        wait_s = seconds_to_wait(suspended, runtime.now())
        if wait_s > SUSPENDED_WAIT_S_MAX:
            logger.warning("the query ends while queues are suspended for %.0f s more: %s", wait_s, sorted(suspended))
            return {}
        runtime.sleep(wait_s)
        return no_longer_suspended(suspended, runtime.now())

    def reportLatestOffset(self) -> JsonOffsets | None:
        """Return the log's end as last seen, for the progress report."""
        if self._planner is None:
            return None
        return to_json(self._planner.latest(refresh=False), log_id=self._planner.engine.id)

    def partitions(self, start: JsonOffsets, end: JsonOffsets) -> Sequence[InputPartition]:
        self._planned = end
        self._had_batch |= start != end
        begin, _ = self._from_this_log(start, "the start offset")
        # Spark stores no start of the first micro-batch. When it runs again, `start` is the present "latest".
        first = first_begin(end, "the end offset") if start == self._initial != end else None
        begin = begin if first is None else first
        finish, again = self._from_this_log(end, "the end offset")
        return self._plan({**begin, **{queue: offset for queue, (offset, _) in again.items()}}, finish)

    def commit(self, end: JsonOffsets) -> None:
        """Publish that Spark has processed everything below ``end``.

        Spark calls this when it plans the next micro-batch. So after the last one it calls only :meth:`latestOffset`.
        """
        positions, answered = self._from_this_log(end, "the committed offset")
        group = self._progress()
        if group is None:
            self.planner.forget(positions)
        else:
            group.publish(positions, answered)

    def _progress(self) -> GroupProgress | None:
        if self._group_progress is None and self.options.consumer_group is not None:
            from rmq_spark._core.spark.group_progress import GroupProgress

            self._group_progress = GroupProgress(self.planner.engine, self.options.consumer_group)
        return self._group_progress

    def stop(self) -> None:
        self._planner = self._group_progress = None


def _rows_max(limit: ReadLimit) -> int | None:
    if isinstance(limit, ReadMaxRows):
        return limit.max_rows
    if isinstance(limit, ReadAllAvailable):
        return None
    raise OptionError(f"the read limit {type(limit).__name__} is not one that this source gives out")


def _open(options: ReadOptions) -> Engine:
    from rmq_spark._core.client.commit_log import engine_of

    return engine_of(options.path, options.storage_options or None)


# ---------------------------------------------------------------- the schema
def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects for a schema of the source's columns. A column or a type that the
    source does not have is an OptionError, which names the nearest right one."""
    if not len(schema.fields):
        columns = ", ".join(SOURCE_SCHEMA.names)
        raise OptionError(f"the schema has no columns: leave .schema(...) out, or take some of {columns}")
    require_source_columns(schema.names)
    source_schema = spark_schema(SOURCE_SCHEMA)
    for field in schema.fields:
        source_type, asked_type = source_schema[field.name].dataType, field.dataType
        if asked_type != source_type and not (field.name == "body" and asked_type == StringType()):
            hint = " (or string, for bodies in UTF-8)" if field.name == "body" else ""
            raise OptionError(
                f"column {field.name!r} is asked for as {_ddl(asked_type)}: its type is {_ddl(source_type)}{hint}"
            )
    if len(set(schema.names)) < len(schema.names):
        raise OptionError(f"the schema names a column twice: {', '.join(schema.names)}")
    return arrow_schema_in_utc(schema)


def _ddl(kind: DataType) -> str:
    """Return a type's DDL name that means the same in every session: ``timestamp`` depends on
    ``spark.sql.timestampType``."""
    return "timestamp_ltz" if isinstance(kind, TimestampType) else kind.simpleString()


# ---------------------------------------------------------------- on executors
def _messages(
    options: ReadOptions, schema: pa.Schema, ranges: Sequence[MessageRange], now_ms: int
) -> Iterator[pa.Table]:
    """Yield the messages of the ranges that match tags or selector, by row group and queue."""
    files = LogFiles(options.path, options.storage_options)
    condition = None if options.selector is None else options.selector.at(now_ms)
    for file_ranges in by_file(ranges):
        rows = row_range_of(file_ranges)
        try:
            for messages in read_ranges(file_ranges, files.read, files.find_again, schema.names, condition):
                yield _as_asked(messages, schema)
        except (FileNotFoundError, HalfBatchNotFoundError) as problem:
            for placed in file_ranges:
                reason = out_of_range(placed.topic, placed.queue_id, placed.queue_offset, placed.stop)
                lost_file = f"half batch {rows.half_id!r} has lost its file {rows.file_no}"
                reason += f": {lost_file if rows.half_id else f'file {rows.path} of table messages is gone'}"
                if options.fail_on_data_loss:
                    raise OffsetOutOfRangeError(f"{reason}. failOnDataLoss=false skips them, for good") from problem
                logger.warning("skipped, because failOnDataLoss=false: %s", reason)


def _as_asked(messages: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns with the types that Spark expects. Only the type of ``body`` can differ."""
    columns: list[pa.ChunkedArray] = []
    for field in schema:
        column = messages[field.name]
        if column.type != field.type:
            try:
                column = pc.cast(column, field.type)
            except pa.ArrowInvalid as problem:
                raise MessageError(
                    f"a body is not UTF-8, so it cannot be read as a string ({problem}): ask for 'body binary'"
                ) from problem
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def to_batches(tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    """Yield tables as Arrow batches of a good size for Spark: small tables joined, large ones cut."""
    waiting: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        if table.num_rows == 0:
            continue
        waiting.append(table)
        rows, size = rows + table.num_rows, size + table.nbytes
        if rows >= BATCH_ROWS_MIN or size >= BATCH_BYTES_MAX:
            yield from _cut(waiting, rows, size)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield from _cut(waiting, rows, size)


def _cut(tables: Sequence[pa.Table], rows: int, size: int) -> Iterator[pa.RecordBatch]:
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()
    rows_max = max(1, rows * BATCH_BYTES_MAX // max(size, 1))
    yield from table.to_batches(max_chunksize=min(rows, rows_max, batch_rows_max()))
