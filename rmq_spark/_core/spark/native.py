"""Committed messages as a DataFrame that Spark reads by itself.

What is drained comes from the Parquet files of the table ``messages``. The tail comes from half files, which Spark
joins with what ``op`` says of their rows::

    messages   ████████████████████████ border            files, by Spark's own reader
    half                                ░░█░██░██ tail    files ⋈ (half_id, file_no, block of rows) ⋈ placements

Python plans, and reads no message.
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
from rmq_spark._core.log.input import require_known_topic
from rmq_spark._core.log.placements import PlacedRange, out_of_range
from rmq_spark._core.messages.table import MESSAGES_SCHEMA, SOURCE_SCHEMA, require_drained
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.reads.offsets import EARLIEST, LATEST, Positions, given_positions
from rmq_spark._core.reads.options import Subscription
from rmq_spark._core.reads.plan import Planner
from rmq_spark._core.selector import SUB_ALL, parse_selector, parse_tags
from rmq_spark._core.storage.spark_parquet import PATHS_MAX, read_files, spark_schema
from rmq_spark._core.vocabulary.message import DLQ_PREFIX, RETRY_PREFIX
from rmq_spark._core.vocabulary.options import named, nearest, require_time
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY
from rmq_spark.errors import CorruptLogError, LostFileError, OffsetOutOfRangeError, OptionError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from rmq_spark._core.selector.tree import Filter

BLOCK_BITS = (16, 13, 10)
"""Rows of a half file are joined a block at a time: of 65,536 rows, or of fewer where many ranges lie
close together."""
RANGES_OF_BLOCK_MAX = 16
"""At most so many ranges share a block, unless it is one of the smallest."""
HALF_PATHS_MAX = PATHS_MAX
DRAINED_PATHS_MAX = 256
"""More paths than Spark lists without a job: to ask of each row in which large file it is costs more than such a job
when they are few."""
SCANS_MAX = 4
"""Files for more scans than this are read by one: of so many tasks the last ones do not matter."""
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
"""The columns of ``half`` that are read of the tail."""
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
_MADE = {
    "queue_offset": "first_offset + row_no - `first`",
    "msg_id": f"concat(half_id, ':', {_ADDRESS})",
    "transaction_id": f"""
        CASE transaction_per
            WHEN '{BATCH}' THEN concat({_ATTEMPT})
            WHEN '{KEY}' THEN concat({_ATTEMPT}, ':', transaction_key)
            ELSE concat({_ATTEMPT}, ':', {_ADDRESS})
        END""",
}
TAIL_COLUMNS = [f"{_MADE[name]} AS {name}" if name in _MADE else name for name in SOURCE_SCHEMA.names]
"""The columns of a joined half row, in SQL: each function of a Column would be a call into the JVM."""

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
    """Committed messages, at the speed of Spark's own Parquet reader. The DataFrame is what was visible when this was
    called. Use it within the hour: upkeep deletes files that it has replaced some time ago.

    Parameters
    ----------
    spark : SparkSession
    log : CommitLog or path
    topics : str or sequence of str, optional
        All but those of retries and dead letters when not given.
    tags : str, optional
        ``"TagA || TagB"``: only messages with one of these tags (RocketMQ: ``MessageSelector.byTag``).
    selector : str, optional
        Only messages for which this SQL92 condition is TRUE (RocketMQ: ``MessageSelector.bySql``). It is evaluated in
        Python, as by ``format("txmq")``; a condition of Spark's own is faster. Needs lark.
    starting, ending : str, datetime or mapping
        ``"earliest"``, ``"latest"``, a time with a time zone (each queue's first message that was committed then or
        later), or offsets: ``{"orders": {0: 23, 1: -2}}`` (-2: earliest, -1: latest). The end is not
        included.
    as_of : datetime or int, optional
        What was visible at that time (with a time zone), or at that version of the table ``op``. Expired messages
        do not come back.
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
        When the table ``messages`` has other rows than ``op`` placed: somebody else wrote to it. When a file on a disk
        of this machine has another size than the log says.
    """
    if not hasattr(spark, "createDataFrame"):
        raise OptionError(
            f"txmq.messages takes a SparkSession, and then a commit log or its path: found {spark!r} first"
        )
    opened = engine_of(log, storage_options)
    if tags is not None and selector is not None:
        raise OptionError("tags and selector contradict each other: give one of them (a selector can say TAGS = 'a')")
    limit = _limit(opened, as_of)
    wanted = None if selector is None else parse_selector(selector).at(opened.machine.time_ms())
    named = parse_tags(SUB_ALL if tags is None else tags)
    planner = Planner(opened, Subscription(_names(opened, topics)))
    start = planner.resolve("starting", _given(starting, "starting", EARLIEST))
    end = planner.resolve("ending", _given(ending, "ending", LATEST))
    named_offsets = isinstance(starting, Mapping) or isinstance(ending, Mapping)
    firsts = opened.firsts(refresh=False) if named_offsets else {}
    for queue, offset in start.items():
        if (lowest := min(offset, end[queue])) < (first := firsts.get(queue, 0)):
            raise OffsetOutOfRangeError(out_of_range(*queue, lowest, first, firsts))
        if offset > end[queue]:
            raise OffsetOutOfRangeError(
                f"starting is at {offset} of topic {queue[0]!r}, queue {queue[1]}, which is after the {end[queue]} of "
                "ending"
            )
    if odd := opened.drained.odd_rows():
        raise CorruptLogError(odd)
    while True:
        with opened.lock:  # another thread may see a newer list of files
            border, tail = planner.tail(start, end)
            files = opened.messages_table.actions()
        placed = [r for r in tail if _is_within(r, limit)]
        paths = _paths(opened, placed)
        if paths is not None:
            break
    ends = {queue: min(offset, border.get(queue, 0)) for queue, offset in end.items()}
    drained = _drained(spark, opened, files, start, ends, border, limit)
    parts = [part for part in (drained, _tail(spark, opened, placed, paths) if placed else None) if part is not None]
    found = reduce(lambda one, other: one.unionByName(other), parts) if parts else _nothing(spark)
    if named is not None:
        found = found.where(found["tags"].isin(*named))
    return found if wanted is None else found.mapInArrow(_Kept(wanted), found.schema)


def _nothing(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([], spark_schema(SOURCE_SCHEMA))


# ---------------------------------------------------------------- what is asked for
def _names(log: Engine, topics: str | Sequence[str] | None) -> tuple[str, ...]:
    known = log.topics()
    if topics is None:
        return tuple(name for name in known if not name.startswith((RETRY_PREFIX, DLQ_PREFIX)))
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    for name in names:
        require_known_topic(name, known)
    return names


def _given(value: Where, name: str, word: str) -> str | datetime | Positions:
    if isinstance(value, datetime):
        return require_time(value, name)
    if isinstance(value, str):
        if value not in (EARLIEST, LATEST):
            hint = nearest(value, (EARLIEST, LATEST))
            meant = f" ({hint})" if hint.startswith("did") else ""
            raise OptionError(
                f"{name}={value!r} is neither 'earliest' nor 'latest', nor a datetime, nor offsets{meant}"
            )
        return value
    if not isinstance(value, Mapping) or not all(isinstance(queues, Mapping) for queues in value.values()):
        raise OptionError(f"{name}={value!r} is no mapping of offsets, such as {{'orders': {{0: 23, 1: 7}}}}")
    offsets = {topic: {str(q): n for q, n in queues.items()} for topic, queues in value.items()}
    return given_positions(offsets, name)


def _limit(log: Engine, as_of: datetime | int | None) -> datetime | int | None:
    if as_of is None or isinstance(as_of, datetime):
        return None if as_of is None else require_time(as_of, "as_of")
    head = log.refresh()
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
    log: Engine,
    files: pa.Table,
    start: Positions,
    end: Positions,
    border: Mapping[tuple[str, int], int],
    limit: datetime | int | None,
) -> DataFrame | None:
    from pyspark.sql import functions as F

    spans = {queue: (start.get(queue, 0), stop) for queue, stop in end.items() if start.get(queue, 0) < stop}
    paths = _files(files, spans)
    if not paths:
        return None
    scans = _scans(spark, files, paths)
    shares = [
        read_files(spark, log.path, log.messages_table, files, paths[at::scans], DRAINED, DRAINED_PATHS_MAX)
        for at in range(scans)
    ]
    found = reduce(lambda one, other: one.union(other), shares)
    cut = {topic for topic, q in end if start[topic, q] > 0 or end[topic, q] < border.get((topic, q), 0)}
    if cut or not _of_one_topic(files, paths):
        found = found.where(_within(spans, cut))
    if isinstance(limit, datetime):
        found = found.where(F.col("commit_timestamp") <= F.lit(limit))
    elif limit is not None:
        found = found.where(F.col("op_version") <= limit)
    return found.drop("op_version")


def _files(actions: pa.Table, spans: Mapping[tuple[str, int], tuple[int, int]]) -> list[str]:
    """The files that may hold some of these offsets, by the statistics in the Delta log."""
    topics = pa.array(sorted({topic for topic, _ in spans}), pa.string())
    of_topic = pc.or_(pc.not_equal(actions["min.topic"], actions["max.topic"]), pc.is_in(actions["min.topic"], topics))
    low = min((first for first, _ in spans.values()), default=0)
    high = max((stop for _, stop in spans.values()), default=0)
    overlaps = pc.and_(pc.greater_equal(actions["max.queue_offset"], low), pc.less(actions["min.queue_offset"], high))
    return [str(path) for path in actions.filter(pc.fill_null(pc.and_(of_topic, overlaps), True))["path"].to_pylist()]


def _scans(spark: SparkSession, actions: pa.Table, paths: Sequence[str]) -> int:
    """How many scans are to share the files, so that no core idles for the last task.

    Spark makes three tasks of 300 MB, and two cores take as long for three as for four. When a scan has no more tasks
    than there are cores, Spark makes them equally large. So each scan gets a task for each core.
    """
    context = getattr(spark, "_sc", None)  # none in Spark Connect
    if context is None or len(paths) > DRAINED_PATHS_MAX:
        return 1
    conf, cores = spark._jsparkSession.sessionState().conf(), context.defaultParallelism
    mine = actions.filter(pc.is_in(actions["path"], value_set=pa.array(paths, pa.string())))
    size = pc.sum(mine["size_bytes"]).as_py() + len(paths) * conf.filesOpenCostInBytes()
    scans = ceil(size / conf.filesMaxPartitionBytes() / cores)
    return min(scans, len(paths)) if scans <= SCANS_MAX else 1


def _of_one_topic(actions: pa.Table, paths: Sequence[str]) -> bool:
    """True when each of these files has messages of one topic alone, which is then a wanted one."""
    mine = actions.filter(pc.is_in(actions["path"], value_set=pa.array(paths, pa.string())))
    return pc.all(pc.fill_null(pc.equal(mine["min.topic"], mine["max.topic"]), False)).as_py() is True


def _within(spans: Mapping[tuple[str, int], tuple[int, int]], cut: Collection[str]) -> Column:
    """The condition of these offsets. Of topics that are not ``cut`` it is their name. Queues with the same offsets
    share a part of it, and the parts are joined in halves: Spark does not stand a long chain."""
    from pyspark.sql import functions as F

    queues: dict[tuple[str, int, int], list[int]] = {}
    for (topic, queue_id), (first, stop) in sorted(spans.items()):
        if topic in cut:
            queues.setdefault((topic, first, stop), []).append(queue_id)
    offset = F.col("queue_offset")
    parts = [
        (F.col("topic") == topic) & F.col("queue_id").isin(*ids) & (offset >= first) & (offset < stop)
        for (topic, first, stop), ids in queues.items()
    ]
    if whole := sorted({topic for topic, _ in spans}.difference(cut)):
        parts.append(F.col("topic").isin(*whole))
    while len(parts) > 1:
        parts = [reduce(or_, parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0]


# ---------------------------------------------------------------- the tail
def _tail(spark: SparkSession, log: Engine, ranges: Sequence[PlacedRange], paths: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    table = log.half.table
    half = read_files(spark, log.path, table, table.actions(), paths, TAIL, HALF_PATHS_MAX)
    bits = _block_bits(ranges)
    half = half.withColumn("block", F.shiftright("row_no", bits))
    places = spark.createDataFrame(pa.Table.from_pylist(list(_places(ranges, bits)), schema=PLACES))
    joined = half.join(F.broadcast(places), ["half_id", "file_no", "block"])
    return joined.where("row_no BETWEEN `first` AND `last`").selectExpr(*TAIL_COLUMNS)


def _paths(log: Engine, ranges: Sequence[PlacedRange]) -> list[str] | None:
    """Where the rows lie now; None when some of them have been drained and stripped since they were planned. A half
    file that has left since was drained since: it stays on disk for a while."""
    of_path: dict[str, list[PlacedRange]] = {}
    for placed in ranges:
        of_path.setdefault(placed.rows.path, []).append(placed)
    log.half.table.refresh()
    gone = of_path.keys() - set(log.half.table.actions()["path"].to_pylist())
    found = set(of_path.keys() - gone)
    for path in gone:
        for placed in of_path[path]:
            if log.half.has_payload(placed.rows) is False:
                why = f"half batch {placed.rows.half_id!r} has no payload any more in half"
                log.messages_table.refresh()
                require_drained(log.messages_table, placed.op_version, why)
                return None
        try:
            found.update(log.locate(r.rows.half_id, r.rows.file_no) for r in of_path[path])
        except LostFileError:
            found.add(path)
    return sorted(found)


def _block_bits(ranges: Sequence[PlacedRange]) -> int:
    """How large blocks may be so that few ranges share one."""
    for bits in BLOCK_BITS[:-1]:
        shared = Counter(
            (placed.rows.half_id, placed.rows.file_no, block)
            for placed in ranges
            for first, last in placed.rows.ranges
            for block in range(first >> bits, (last >> bits) + 1)
        )
        if max(shared.values()) <= RANGES_OF_BLOCK_MAX:
            return bits
    return BLOCK_BITS[-1]


def _places(ranges: Sequence[PlacedRange], bits: int) -> Iterator[dict[str, Any]]:
    """A row for each run of rows within a block: which offsets they have, and what all of them have in common."""
    for placed in ranges:
        offset = placed.queue_offset
        shared = {name: getattr(placed, name) for name in PLACES.names[6:]}
        for first, last in placed.rows.ranges:
            for block in range(first >> bits, (last >> bits) + 1):
                a, b = max(first, block << bits), min(last, ((block + 1) << bits) - 1)
                yield {
                    "half_id": placed.rows.half_id,
                    "file_no": placed.rows.file_no,
                    "block": block,
                    "first": a,
                    "last": b,
                    "first_offset": offset + a - first,
                    **shared,
                }
            offset += last - first + 1


class _Kept:
    """Keeps the rows that a filter wants, of Arrow batches."""

    def __init__(self, wanted: Filter) -> None:
        self._wanted = wanted

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from rmq_spark._core.spark.versions import batch_rows_max

        for batch in batches:
            kept = pc.fill_null(self._wanted.keeps(pa.table(batch)), False)
            yield from pa.table(batch).filter(kept).to_batches(max_chunksize=batch_rows_max())
