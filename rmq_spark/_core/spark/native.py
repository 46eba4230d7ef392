"""Committed messages as a DataFrame that Spark reads by itself.

Drained messages come from the Parquet files of the table ``messages``. The tail comes from half files, which Spark
joins with the placements in ``op``::

    messages   ████████████████████████ border            files, by Spark's own reader
    half                                ░░█░██░██ tail    files ⋈ (half_id, file_no, block of rows) ⋈ placements

Python plans, and reads no messages.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import reduce
from math import ceil
from operator import or_
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.log.half import HALF_SCHEMA
from rmq_spark._core.log.message_columns import require_known_topic
from rmq_spark._core.log.message_range import PlacedRange, out_of_range
from rmq_spark._core.messages.messages_table import MESSAGES_SCHEMA, SOURCE_SCHEMA, require_drained
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.reads.offsets import EARLIEST, LATEST, Positions, given_positions
from rmq_spark._core.reads.plan import Planner
from rmq_spark._core.reads.read_options import Subscription
from rmq_spark._core.selector import SUB_ALL, parse_selector, parse_tags
from rmq_spark._core.storage.spark_parquet import PATHS_MAX, read_files, spark_schema
from rmq_spark._core.storage.table import live_paths
from rmq_spark._core.vocabulary.message import DLQ_PREFIX, RETRY_PREFIX
from rmq_spark._core.vocabulary.options import named, nearest, require_time
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY
from rmq_spark.errors import CorruptLogError, LostFileError, OffsetOutOfRangeError, OptionError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from rmq_spark._core.selector.tree import Filter

BLOCK_BITS = (16, 13, 10)
"""Rows of a half file are joined by blocks: of 65,536 rows, or fewer where many ranges lie close together."""
RANGES_OF_BLOCK_MAX = 16
"""The most ranges that share a block; a block of the smallest size may have more."""
HALF_PATHS_MAX = PATHS_MAX
DRAINED_PATHS_MAX = 256
"""More paths than Spark lists without a job. For few large files, such a job costs less than a test of each row's
file."""
SCANS_MAX = 4
"""Files for more scans than this share one scan: among that many tasks the last ones do not matter."""
DRAINED = pa.schema([*SOURCE_SCHEMA, MESSAGES_SCHEMA.field("op_version")])
TAIL = pa.schema(
    [
        HALF_SCHEMA.field(name)
        for name in (
            "half_id file_no row_no transaction_key topic queue_id tags keys sharding_key properties body "
            "born_timestamp store_timestamp"
        ).split()
    ]
)
"""The columns of ``half`` that the tail needs."""
PLACES = pa.schema(
    [
        ("half_id", pa.string()),
        ("file_no", pa.int64()),
        ("block", pa.int64()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("first_offset", pa.int64()),
        ("attempt", pa.int32()),
        ("transaction_per", pa.string()),
        ("producer_group", pa.string()),
        ("commit_timestamp", pa.timestamp("us", "UTC")),
    ]
)

_ADDRESS = "CAST(file_no AS STRING), '.', CAST(row_no AS STRING)"
_ATTEMPT = "half_id, ':', CAST(attempt AS STRING)"
_COMPUTED = {
    "queue_offset": "first_offset + row_no - `first`",
    "msg_id": f"concat(half_id, ':', {_ADDRESS})",
    "transaction_id": f"""
        CASE transaction_per
            WHEN '{BATCH}' THEN concat({_ATTEMPT})
            WHEN '{KEY}' THEN concat({_ATTEMPT}, ':', transaction_key)
            ELSE concat({_ATTEMPT}, ':', {_ADDRESS})
        END""",
}
TAIL_COLUMNS = [f"{_COMPUTED[name]} AS {name}" if name in _COMPUTED else name for name in SOURCE_SCHEMA.names]
"""The columns of a joined half row, in SQL, because each function of a Column would call into the JVM."""

Where = str | datetime | Mapping[str, Mapping[Any, int]]


@named
def messages(
    spark: SparkSession,
    log: CommitLog | Engine | str | os.PathLike[str],
    topics: str | Sequence[str] | None = None,
    tags: str | None = None,
    selector: str | None = None,
    starting: Where = EARLIEST,
    ending: Where = LATEST,
    as_of: datetime | int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return committed messages as a DataFrame, read by Spark's own Parquet reader.

    It holds the messages that were visible at the call. Use it within the hour: upkeep deletes files that it replaced
    some time ago.

    Parameters
    ----------
    spark : SparkSession
    log : CommitLog or path
        The commit log, or its path.
    topics : str or sequence of str, optional
        By default all topics but those of retries and dead letters.
    tags : str, optional
        ``"TagA || TagB"``: only messages with one of these tags (RocketMQ: ``MessageSelector.byTag``).
    selector : str, optional
        Only messages for which this SQL92 condition is TRUE (RocketMQ: ``MessageSelector.bySql``). Python evaluates
        it, as in ``format("txmq")``, so Spark's ``where`` is faster. Needs lark.
    starting, ending : str, datetime or mapping
        ``"earliest"``, ``"latest"``, a time with a time zone (each queue's first message that was committed then or
        later), or offsets: ``{"orders": {0: 23, 1: -2}}`` (-2: earliest, -1: latest). The end is excluded.
    as_of : datetime or int, optional
        Only messages that were visible at this time (with a time zone), or at this version of the table ``op``. Expired
        messages do not come back.
    storage_options : mapping, optional
        For a path: passed to delta-rs.

    Returns
    -------
    pyspark.sql.DataFrame
        With the columns of ``spark.read.format("txmq")``. Filters on ``topic``, ``queue_id``, ``queue_offset`` and
        ``commit_timestamp`` skip row groups of the files.

    Raises
    ------
    TopicNotFoundError, OffsetError, OffsetOutOfRangeError, OptionError
    CorruptLogError
        When the table ``messages`` has other rows than ``op`` placed, because a foreign program wrote to it. When a
        file on a local disk has another size than the log says.
    """
    if not hasattr(spark, "createDataFrame"):
        raise OptionError(
            f"txmq.messages takes a SparkSession, and then a commit log or its path: found {spark!r} first"
        )
    engine = engine_of(log, storage_options)
    if tags is not None and selector is not None:
        raise OptionError("tags and selector contradict each other: give one of them (a selector can say TAGS = 'a')")
    limit = _limit(engine, as_of)
    condition = None if selector is None else parse_selector(selector).at(engine.runtime.time_ms())
    tag_names = parse_tags(SUB_ALL if tags is None else tags)
    planner = Planner(engine, Subscription(_topic_names(engine, topics)))
    start = planner.resolve("starting", _parse_where(starting, "starting"))
    end = planner.resolve("ending", _parse_where(ending, "ending"))
    named_offsets = isinstance(starting, Mapping) or isinstance(ending, Mapping)
    firsts = engine.firsts(refresh=False) if named_offsets else {}
    for queue, offset in start.items():
        if (lowest := min(offset, end[queue])) < (first := firsts.get(queue, 0)):
            raise OffsetOutOfRangeError(out_of_range(*queue, lowest, first, firsts))
        if offset > end[queue]:
            raise OffsetOutOfRangeError(
                f"starting is at {offset} of topic {queue[0]!r}, queue {queue[1]}, which is after the {end[queue]} of "
                "ending"
            )
    if odd_rows := engine.drained.odd_rows():
        raise CorruptLogError(odd_rows)
    while True:
        with engine.lock:  # another thread may see a newer list of files
            border, tail = planner.tail(start, end)
            files = engine.messages_table.actions()
        tail_ranges = [r for r in tail if _is_within(r, limit)]
        paths = _paths(engine, tail_ranges)
        if paths is not None:
            break
    ends = {queue: min(offset, border.get(queue, 0)) for queue, offset in end.items()}
    drained = _drained(spark, engine, files, start, ends, border, limit)
    frame = _tail(spark, engine, tail_ranges, paths) if tail_ranges else None
    if drained is not None:
        frame = drained if frame is None else drained.unionByName(frame)
    if frame is None:
        frame = spark.createDataFrame([], spark_schema(SOURCE_SCHEMA))
    if tag_names is not None:
        frame = frame.where(frame["tags"].isin(*tag_names))
    return frame if condition is None else frame.mapInArrow(_RowFilter(condition), frame.schema)


# ---------------------------------------------------------------- the arguments
def _topic_names(engine: Engine, topics: str | Sequence[str] | None) -> tuple[str, ...]:
    known = engine.topics()
    if topics is None:
        return tuple(name for name in known if not name.startswith((RETRY_PREFIX, DLQ_PREFIX)))
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    for name in names:
        require_known_topic(name, known)
    return names


def _parse_where(value: Where, name: str) -> str | datetime | Positions:
    if isinstance(value, datetime):
        return require_time(value, name)
    if isinstance(value, str):
        if value not in (EARLIEST, LATEST):
            hint = nearest(value, (EARLIEST, LATEST))
            suggestion = f" ({hint})" if hint.startswith("did") else ""
            raise OptionError(
                f"{name}={value!r} is neither 'earliest' nor 'latest', nor a datetime, nor offsets{suggestion}"
            )
        return value
    if not isinstance(value, Mapping) or not all(isinstance(queues, Mapping) for queues in value.values()):
        raise OptionError(f"{name}={value!r} is no mapping of offsets, such as {{'orders': {{0: 23, 1: 7}}}}")
    offsets = {topic: {str(q): n for q, n in queues.items()} for topic, queues in value.items()}
    return given_positions(offsets, name)


def _limit(engine: Engine, as_of: datetime | int | None) -> datetime | int | None:
    if as_of is None or isinstance(as_of, datetime):
        return None if as_of is None else require_time(as_of, "as_of")
    head = engine.refresh()
    if isinstance(as_of, bool) or not isinstance(as_of, int) or not 0 <= as_of <= head:
        raise OptionError(
            f"as_of={as_of!r} is neither a datetime with a time zone nor a version of the table op (0 to {head})"
        )
    return as_of


def _is_within(placed: PlacedRange, limit: datetime | int | None) -> bool:
    if limit is None:
        return True
    return placed.commit_timestamp <= limit if isinstance(limit, datetime) else placed.op_version <= limit


# ---------------------------------------------------------------- the drained part
def _drained(
    spark: SparkSession,
    engine: Engine,
    files: pa.Table,
    start: Positions,
    end: Positions,
    border: Mapping[Queue, int],
    limit: datetime | int | None,
) -> DataFrame | None:
    from pyspark.sql import functions as F

    spans = {queue: (start.get(queue, 0), stop) for queue, stop in end.items() if start.get(queue, 0) < stop}
    paths = _overlapping_files(files, spans)
    if not paths:
        return None
    scans = _scan_count(spark, files, paths)
    shares = [
        read_files(spark, engine.path, engine.messages_table, files, paths[number::scans], DRAINED, DRAINED_PATHS_MAX)
        for number in range(scans)
    ]
    frame = reduce(lambda left, right: left.union(right), shares)
    cut = {topic for topic, q in end if start[topic, q] > 0 or end[topic, q] < border.get((topic, q), 0)}
    if cut or not _of_one_topic(files, paths):
        frame = frame.where(_within(spans, cut))
    if isinstance(limit, datetime):
        frame = frame.where(F.col("commit_timestamp") <= F.lit(limit))
    elif limit is not None:
        frame = frame.where(F.col("op_version") <= limit)
    return frame.drop("op_version")


def _overlapping_files(actions: pa.Table, spans: Mapping[Queue, tuple[int, int]]) -> list[str]:
    """Return the files that may hold some of these offsets, by the statistics in the Delta log."""
    topics = pa.array(sorted({topic for topic, _ in spans}), pa.string())
    of_topic = pc.or_(pc.not_equal(actions["min.topic"], actions["max.topic"]), pc.is_in(actions["min.topic"], topics))
    low = min((first for first, _ in spans.values()), default=0)
    high = max((stop for _, stop in spans.values()), default=0)
    overlaps = pc.and_(pc.greater_equal(actions["max.queue_offset"], low), pc.less(actions["min.queue_offset"], high))
    return [str(path) for path in actions.filter(pc.fill_null(pc.and_(of_topic, overlaps), True))["path"].to_pylist()]


def _scan_count(spark: SparkSession, actions: pa.Table, paths: Sequence[str]) -> int:
    """Return the number of scans for the files, so that no core idles during the last task.

    Spark cuts 300 MB into three tasks, and two cores need as long for three as for four. When a scan has no more tasks
    than cores, Spark makes them equally large. So each scan gets one task a core.
    """
    context = getattr(spark, "_sc", None)  # none in Spark Connect
    if context is None or len(paths) > DRAINED_PATHS_MAX:
        return 1
    conf, cores = spark._jsparkSession.sessionState().conf(), context.defaultParallelism
    scanned = actions.filter(pc.is_in(actions["path"], value_set=pa.array(paths, pa.string())))
    size = pc.sum(scanned["size_bytes"]).as_py() + len(paths) * conf.filesOpenCostInBytes()
    scans = ceil(size / conf.filesMaxPartitionBytes() / cores)
    return min(scans, len(paths)) if scans <= SCANS_MAX else 1


def _of_one_topic(actions: pa.Table, paths: Sequence[str]) -> bool:
    """Return True when each of these files holds one topic only. Then that topic was asked for."""
    scanned = actions.filter(pc.is_in(actions["path"], value_set=pa.array(paths, pa.string())))
    return pc.all(pc.fill_null(pc.equal(scanned["min.topic"], scanned["max.topic"]), False)).as_py() is True


def _within(spans: Mapping[Queue, tuple[int, int]], cut: Collection[str]) -> Column:
    """Return the condition for these offsets.

    Topics that are not ``cut`` are matched by name alone. Queues with the same offsets share a term. The terms are
    joined as a balanced tree, because Spark cannot process a long chain.
    """
    from pyspark.sql import functions as F

    queues: dict[tuple[str, int, int], list[int]] = {}
    for (topic, queue_id), (first, stop) in sorted(spans.items()):
        if topic in cut:
            queues.setdefault((topic, first, stop), []).append(queue_id)
    offset = F.col("queue_offset")
    conditions = [
        (F.col("topic") == topic) & F.col("queue_id").isin(*ids) & (offset >= first) & (offset < stop)
        for (topic, first, stop), ids in queues.items()
    ]
    if whole := sorted({topic for topic, _ in spans}.difference(cut)):
        conditions.append(F.col("topic").isin(*whole))
    while len(conditions) > 1:
        conditions = [reduce(or_, conditions[i : i + 2]) for i in range(0, len(conditions), 2)]
    return conditions[0]


# ---------------------------------------------------------------- the tail
def _tail(spark: SparkSession, engine: Engine, ranges: Sequence[PlacedRange], paths: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    table = engine.half.table
    half = read_files(spark, engine.path, table, table.actions(), paths, TAIL, HALF_PATHS_MAX)
    bits = _block_bits(ranges)
    half = half.withColumn("block", F.shiftright("row_no", bits))
    places = spark.createDataFrame(pa.Table.from_pylist(list(_block_rows(ranges, bits)), schema=PLACES))
    joined = half.join(F.broadcast(places), ["half_id", "file_no", "block"])
    return joined.where("row_no BETWEEN `first` AND `last`").selectExpr(*TAIL_COLUMNS)


def _paths(engine: Engine, ranges: Sequence[PlacedRange]) -> list[str] | None:
    """Return the present paths of the rows, or None when some were drained and stripped since they were planned.

    A half file that left the table since was also drained since, and stays on disk for a while.
    """
    by_path: dict[str, list[PlacedRange]] = {}
    for placed in ranges:
        by_path.setdefault(placed.rows.path, []).append(placed)
    engine.half.table.refresh()
    gone = by_path.keys() - set(live_paths(engine.half.table))
    current = set(by_path.keys() - gone)
    for path in gone:
        for placed in by_path[path]:
            if engine.half.has_payload(placed.rows) is False:
                reason = f"half batch {placed.rows.half_id!r} has no payload any more in half"
                engine.messages_table.refresh()
                require_drained(engine.messages_table, placed.op_version, reason)
                return None
        try:
            current.update(engine.half.locate(r.rows.half_id, r.rows.file_no) for r in by_path[path])
        except LostFileError:
            current.add(path)
    return sorted(current)


def _block_bits(ranges: Sequence[PlacedRange]) -> int:
    """Return the bits of the largest block size at which few ranges share a block."""
    for bits in BLOCK_BITS[:-1]:
        ranges_by_block = Counter(
            (placed.rows.half_id, placed.rows.file_no, block)
            for placed in ranges
            for first, last in placed.rows.ranges
            for block in range(first >> bits, (last >> bits) + 1)
        )
        if max(ranges_by_block.values()) <= RANGES_OF_BLOCK_MAX:
            return bits
    return BLOCK_BITS[-1]


def _block_rows(ranges: Sequence[PlacedRange], bits: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of half rows within a block: their offsets and their shared columns."""
    for placed in ranges:
        offset = placed.queue_offset
        common = {name: getattr(placed, name) for name in PLACES.names[6:]}
        for first, last in placed.rows.ranges:
            for block in range(first >> bits, (last >> bits) + 1):
                first_row, last_row = max(first, block << bits), min(last, ((block + 1) << bits) - 1)
                yield {
                    "half_id": placed.rows.half_id,
                    "file_no": placed.rows.file_no,
                    "block": block,
                    "first": first_row,
                    "last": last_row,
                    "first_offset": offset + first_row - first,
                    **common,
                }
            offset += last - first + 1


class _RowFilter:
    def __init__(self, condition: Filter) -> None:
        self._condition = condition

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from rmq_spark._core.spark.versions import batch_rows_max

        for batch in batches:
            kept = pc.fill_null(self._condition.keeps(pa.table(batch)), False)
            yield from pa.table(batch).filter(kept).to_batches(max_chunksize=batch_rows_max())
