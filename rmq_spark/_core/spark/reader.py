"""``spark.read.format("txmq")`` and ``spark.readStream.format("txmq")``.

The driver plans (``plan``), executors read half files with pyarrow and hand whole Arrow batches to Spark.
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

from rmq_spark._core.log.placements import MessageRange, out_of_range
from rmq_spark._core.messages.reading import by_file, read_ranges, require_source_columns, rows_of
from rmq_spark._core.messages.table import SOURCE_SCHEMA
from rmq_spark._core.reads.offsets import (
    Again,
    JsonOffsets,
    Positions,
    due,
    first_begin,
    from_checkpoint,
    seconds_to_wait,
    to_json,
)
from rmq_spark._core.reads.option_names import SOURCE_OPTIONS
from rmq_spark._core.reads.options import ReadOptions, read_options
from rmq_spark._core.reads.plan import Planner, admit, split
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

__all__ = ["SOURCE_OPTIONS", "TxmqPartition", "TxmqReader", "TxmqStreamReader"]

logger = logging.getLogger(__name__)

BATCH_ROWS_MIN = 8_192
"""Smaller pieces (of small half batches) are put together before they go to Spark."""
BATCH_BYTES_MAX = 32 * 1024 * 1024
"""An Arrow batch is cut when it holds more: Spark copies batches whole."""
SUSPENDED_WAIT_S_MAX = 60.0
"""``availableNow`` waits so long for a suspended queue. Spark waits meanwhile, and cannot stop the query."""


@dataclass(frozen=True)
class TxmqPartition(InputPartition):
    """What one task reads, and what a selector's ``now`` is: a task that is tried again must find the same."""

    ranges: tuple[MessageRange, ...]
    now_ms: int = 0


class _Reader:
    """What both readers share: the options, the schema, and reading a partition. Pickled to executors."""

    streaming: bool

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options: ReadOptions = read_options(options, self.streaming)
        self.schema = arrow_schema(schema)
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An open commit log stays where it is: Delta's engine must not reach a process that was forked.
        return {**self.__dict__, "_planner": None, "_group_progress": None}

    @property
    def planner(self) -> Planner:
        """Opened when it is first needed."""
        if self._planner is None:
            planner = Planner(_open(self.options), self.options.subscription, self.options.fail_on_data_loss)
            planner.queues()  # a topic that is not in the log is an error at once
            self._planner = planner
        return self._planner

    def _plan(self, start: Positions, end: Positions) -> list[TxmqPartition]:
        ranges = self.planner.ranges(start, end)
        options = self.options
        parts = split(ranges, options.ordered, options.partitions_min, options.partition_records_max)
        now_ms = self.planner.log.machine.time_ms()
        return [TxmqPartition(tuple(part), now_ms) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of a partition as Arrow batches; runs on an executor.

        Raises
        ------
        OffsetOutOfRangeError
            When the rows are not in the log any more, unless ``failOnDataLoss=false``.
        """
        if not isinstance(partition, TxmqPartition):  # Spark's stand-in when there is nothing to read
            return iter(())
        return to_batches(_messages(self.options, self.schema, partition.ranges, partition.now_ms))


class TxmqReader(_Reader, DataSourceReader):
    """Reads committed messages up to where the log stands now, or to ``endingOffsets``.

    Parameters
    ----------
    options : mapping of str to str
        See :data:`SOURCE_OPTIONS`.
    schema : StructType
        All columns of the source, or some of them (``.schema("keys string, body binary")``).

    Raises
    ------
    OptionError, OffsetError
    """

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
    """Reads committed messages as they come; offsets are ``{"topic": {"queue": next offset}}``.

    Parameters
    ----------
    options, schema
        As for :class:`TxmqReader`.
    """

    streaming = True

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        if self.options.offsets_per_trigger_max is not None and not STREAM_TELLS_START:
            logger.warning("maxOffsetsPerTrigger has no effect before Spark 4.2: a micro-batch takes all there is")
        self._stop_at: Positions | None = None
        self._initial: JsonOffsets | None = None
        self._planned: JsonOffsets | None = None
        self._told = False
        self._group_progress: GroupProgress | None = None

    def initialOffset(self) -> JsonOffsets:
        """Where a new query starts; one that has a checkpoint starts there.

        A new one takes its group's positions. Queues that the group has not read, or all of them without a group,
        start at ``startingOffsets`` (default ``latest``) or ``startingTimestamp``.
        """
        if self._initial is None:  # "latest" is one moment, however often Spark asks
            self._initial = self._where_it_starts()
        return self._initial

    def _where_it_starts(self) -> JsonOffsets:
        starting = self.options.starting
        name = "startingOffsets" if isinstance(starting, (str, dict)) else "startingTimestamp"
        positions = self.planner.resolve(name, starting)
        if self.options.consumer_group is not None:
            known = self.planner.log.groups.positions(self.options.consumer_group)
            mine = {queue: offset for queue, offset in known.items() if queue in positions}
            what = f"consumer group {self.options.consumer_group!r}"
            positions |= self.planner.require_start(mine, self.planner.latest(), what)
        return to_json(positions, log_id=self.planner.log.id)

    def _known(self, offset: JsonOffsets, what: str = "the checkpoint") -> tuple[Positions, Again]:
        """What an offset says. One of another commit log says nothing of this one, which is read from its start then.

        Raises
        ------
        OffsetOutOfRangeError
            When it is one of another commit log, unless ``failOnDataLoss=false``.
        """
        positions, again, log_id = from_checkpoint(offset, what)
        if log_id == self.planner.log.id:
            return positions, again
        made_anew = (
            f"{what} counts in commit log {log_id!r}, and {redacted(self.options.path)} is commit log "
            f"{self.planner.log.id}: it was made anew, or is another one"
        )
        if self.options.fail_on_data_loss:
            raise OffsetOutOfRangeError(
                f"{made_anew}. To read it from its start, begin with a new checkpoint and startingOffsets=earliest, or "
                "go on with failOnDataLoss=false"
            )
        if not self._told:
            logger.warning("%s. It is read from its start, because failOnDataLoss=false", made_anew)
        self._told = True
        return {}, {}

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self.options.offsets_per_trigger_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """Take what is committed now as the end of the query."""
        self._stop_at = self.planner.latest()

    def latestOffset(self, start: JsonOffsets | None = None, limit: ReadLimit | None = None) -> JsonOffsets:
        """The end of the next micro-batch; ``start`` itself when nothing new is there.

        Before 4.2 Spark gives neither ``start`` nor ``limit``. Then the query stands at the end of what was planned
        last: Spark plans that again, or plans nothing from there to there, when a query starts again. Nothing was
        planned in a new query.

        A queue that an orderly consumer has suspended stays where it is, while the others go on. When its moment is
        over, the next micro-batch reads it again from the message that was not consumed.
        """
        if start is None or limit is None:
            start, limit = self._planned or self.initialOffset(), ReadAllAvailable()
        latest = self._latest()
        before, answered = self._known(start)
        begin = self.planner.require_start(before, latest)
        suspended = self._suspended(begin, answered)
        self.planner.forget({**begin, **{queue: offset for queue, (offset, _) in suspended.items()}})
        end = admit(begin, {**latest, **{queue: begin[queue] for queue in suspended}}, _rows_max(limit))
        again = self._read_again(suspended, or_end=self._stop_at is not None and end == begin)
        if end == before and not again:
            return start
        return to_json(end, again, self.planner.log.id, begin if start == self._initial else None)

    def _latest(self) -> Positions:
        """Where the log ends, or where it stood when ``availableNow`` began."""
        group = self._progress()
        if group is not None:
            group.place_due()
        latest = self.planner.latest()
        return latest if self._stop_at is None else self._stop_at

    def _suspended(self, begin: Positions, answered: Again) -> Again:
        """Publish what Spark has done; returns the queues that an orderly consumer has suspended."""
        group = self._progress()
        if group is None:
            return {}
        group.publish(begin, answered)
        return group.suspended(begin)

    def _read_again(self, suspended: Again, or_end: bool) -> Again:
        """The queues whose suspension is over. ``or_end``: without one the query ends, so one that is over soon is
        waited for; a later one is left to the next run."""
        machine = self.planner.log.machine
        again = due(suspended, machine.now())
        if again or not suspended or not or_end:
            return again
        wait_s = seconds_to_wait(suspended, machine.now())
        if wait_s > SUSPENDED_WAIT_S_MAX:
            logger.warning("the query ends while queues are suspended for %.0f s more: %s", wait_s, sorted(suspended))
            return {}
        machine.sleep(wait_s)
        return due(suspended, machine.now())

    def reportLatestOffset(self) -> JsonOffsets | None:
        """How far the log reached when it was last looked at, for the progress report."""
        if self._planner is None:
            return None
        return to_json(self._planner.latest(refresh=False), log_id=self._planner.log.id)

    def partitions(self, start: JsonOffsets, end: JsonOffsets) -> Sequence[InputPartition]:
        self._planned = end
        begin, _ = self._known(start, "the start offset")
        # Spark keeps no start of the first micro-batch. When that runs again, `start` is what "latest" means by then.
        first = first_begin(end, "the end offset") if start == self._initial != end else None
        begin = begin if first is None else first
        finish, again = self._known(end, "the end offset")
        return self._plan({**begin, **{queue: offset for queue, (offset, _) in again.items()}}, finish)

    def commit(self, end: JsonOffsets) -> None:
        """Spark has done everything below ``end``. It says so when it plans the next micro-batch. So it never does for
        the last one, but then calls :meth:`latestOffset`."""
        if self._planner is None:
            return
        positions, answered = self._known(end, "the committed offset")
        group = self._progress()
        if group is None:
            self.planner.forget(positions)
        else:
            group.publish(positions, answered)

    def _progress(self) -> GroupProgress | None:
        if self._group_progress is None and self.options.consumer_group is not None:
            from rmq_spark._core.spark.group_progress import GroupProgress

            self._group_progress = GroupProgress(self.planner.log, self.options.consumer_group)
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
    """The Arrow schema that Spark expects for a schema of the source's columns.

    Raises
    ------
    OptionError
        For a column or a type that the source does not have; the nearest right one is named.
    """
    if not len(schema.fields):
        columns = ", ".join(SOURCE_SCHEMA.names)
        raise OptionError(f"the schema has no columns: leave .schema(...) out, or take some of {columns}")
    require_source_columns(schema.names)
    ours = spark_schema(SOURCE_SCHEMA)
    for field in schema.fields:
        wanted, found = ours[field.name].dataType, field.dataType
        if found != wanted and not (field.name == "body" and found == StringType()):
            also = " (or string, for bodies in UTF-8)" if field.name == "body" else ""
            raise OptionError(f"column {field.name!r} is asked for as {_ddl(found)}: its type is {_ddl(wanted)}{also}")
    if len(set(schema.names)) < len(schema.names):
        raise OptionError(f"the schema names a column twice: {', '.join(schema.names)}")
    return arrow_schema_in_utc(schema)


def _ddl(kind: DataType) -> str:
    """A type's name in DDL that means the same in every session: ``timestamp`` is what ``spark.sql.timestampType``
    says."""
    return "timestamp_ltz" if isinstance(kind, TimestampType) else kind.simpleString()


# ---------------------------------------------------------------- on executors
def _messages(
    options: ReadOptions, schema: pa.Schema, ranges: Sequence[MessageRange], now_ms: int
) -> Iterator[pa.Table]:
    """The messages of some ranges that tags or a selector want, a row group and queue at a time."""
    files = LogFiles(options.path, options.storage_options)
    where = None if options.selector is None else options.selector.at(now_ms)
    for together in by_file(ranges):
        rows = rows_of(together)
        try:
            for messages in read_ranges(together, files.read, files.find_again, schema.names, where):
                yield _as_asked(messages, schema)
        except (FileNotFoundError, HalfBatchNotFoundError) as problem:
            for placed in together:
                what = out_of_range(placed.topic, placed.queue_id, placed.queue_offset, placed.stop)
                lost = f"half batch {rows.half_id!r} has lost its file {rows.file_no}"
                what += f": {lost if rows.half_id else f'file {rows.path} of table messages is gone'}"
                if options.fail_on_data_loss:
                    raise OffsetOutOfRangeError(f"{what}. failOnDataLoss=false skips them, for good") from problem
                logger.warning("skipped, because failOnDataLoss=false: %s", what)


def _as_asked(messages: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns and types that Spark expects; only the type of ``body`` can differ."""
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
    """Tables as Arrow batches of a good size for Spark: small tables put together, large ones cut."""
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
