"""The session is not ours. A table of its settings, and the doors that must do the same under each of them.

A row is one setting of the session, at a value that changes what SQL, a type, a Parquet file or a checkpoint means to
Spark. Each door is played in a session of its own with that setting, against a small log with a drained part, a tail,
and half batches that are undecided.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, CommitLog
from tests.support.half_batches import commit, decide_one, pending, prepare, roll_back, split
from tests.support.inside import (
    FAILURE,
    HALF_SCHEMA,
    PROPERTIES,
    SOURCE_SCHEMA,
    SUCCESS,
    TIMESTAMP,
    Who,
    dlq_topic,
    half_batch_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RULES = "org.apache.spark.sql.catalyst.optimizer."

ROWS: dict[str, Mapping[str, str]] = {
    "as it comes": {},
    # ---- which files, and which of their rows
    "corrupt files are ignored": {"spark.sql.files.ignoreCorruptFiles": "true"},
    "missing files are ignored": {"spark.sql.files.ignoreMissingFiles": "true"},
    "tiny partitions": {"spark.sql.files.maxPartitionBytes": "4096", "spark.sql.files.openCostInBytes": "0"},
    "one partition": {"spark.sql.files.maxPartitionNum": "1", "spark.sql.files.minPartitionNum": "1"},
    "files are read by V2": {"spark.sql.sources.useV1SourceList": ""},
    "another default source": {"spark.sql.sources.default": "csv"},
    "every folder is listed by a job": {"spark.sql.sources.parallelPartitionDiscovery.threshold": "0"},
    "pages are not verified": {"parquet.page.verify-checksum.enabled": "false"},
    # ---- what a Parquet column is
    "binary is string": {"spark.sql.parquet.binaryAsString": "true"},
    "times are inferred as NTZ": {"spark.sql.parquet.inferTimestampNTZ.enabled": "true"},
    "schemas are merged": {"spark.sql.parquet.mergeSchema": "true"},
    "summary files": {"spark.sql.parquet.respectSummaryFiles": "true"},
    "INT96 is no time": {"spark.sql.parquet.int96AsTimestamp": "false"},
    "INT96 is converted": {"spark.sql.parquet.int96TimestampConversion": "true"},
    "old calendar": {
        "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
        "spark.sql.parquet.int96RebaseModeInRead": "LEGACY",
        "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
        "spark.sql.parquet.int96RebaseModeInWrite": "LEGACY",
    },
    "old calendar is an error": {
        "spark.sql.parquet.datetimeRebaseModeInRead": "EXCEPTION",
        "spark.sql.parquet.int96RebaseModeInRead": "EXCEPTION",
        "spark.sql.parquet.datetimeRebaseModeInWrite": "EXCEPTION",
        "spark.sql.parquet.int96RebaseModeInWrite": "EXCEPTION",
    },
    "field ids": {"spark.sql.parquet.fieldId.read.enabled": "true"},
    "written the old way": {
        "spark.sql.parquet.writeLegacyFormat": "true",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS",
    },
    "nanoseconds are numbers": {"spark.sql.legacy.parquet.nanosAsLong": "true"},
    "null structs": {"spark.sql.legacy.parquet.returnNullStructIfAllFieldsMissing": "true"},
    "unknown types": {"spark.sql.parquet.reader.respectUnknownTypeAnnotation.enabled": "true"},
    "no vectors": {"spark.sql.parquet.enableVectorizedReader": "false"},
    "no vectors, filtered by record": {
        "spark.sql.parquet.enableVectorizedReader": "false", "spark.sql.parquet.recordLevelFilter.enabled": "true",
    },
    "no nested vectors": {"spark.sql.parquet.enableNestedColumnVectorizedReader": "false"},
    "vectors of three": {"spark.sql.parquet.columnarReaderBatchSize": "3"},
    "vectors off the heap": {"spark.sql.columnVector.offheap.enabled": "true"},
    "no filters in files": {"spark.sql.parquet.filterPushdown": "false"},
    "aggregates in files": {"spark.sql.parquet.aggregatePushdown": "true"},
    # ---- what a type, a name or a text of SQL is
    "timestamp is NTZ": {"spark.sql.timestampType": "TIMESTAMP_NTZ", "spark.sql.session.timeZone": "Asia/Kolkata"},
    "timestamp is NTZ in UTC": {"spark.sql.timestampType": "TIMESTAMP_NTZ", "spark.sql.session.timeZone": "UTC"},
    "timestamp is NTZ, the old way": {
        "spark.sql.timestampType": "TIMESTAMP_NTZ", "spark.sql.session.timeZone": "America/St_Johns",
        "spark.sql.ansi.enabled": "false", "spark.sql.legacy.timeParserPolicy": "LEGACY",
    },
    "a zone with summer time": {"spark.sql.session.timeZone": "Europe/Berlin"},
    "a zone far in the east": {"spark.sql.session.timeZone": "Pacific/Kiritimati"},
    "a zone of an odd offset": {"spark.sql.session.timeZone": "-03:30"},
    "no ANSI": {"spark.sql.ansi.enabled": "false"},
    "ANSI with reserved words": {"spark.sql.ansi.enabled": "true", "spark.sql.ansi.enforceReservedKeywords": "true"},
    "quotes make names": {"spark.sql.ansi.enabled": "true", "spark.sql.ansi.doubleQuotedIdentifiers": "true"},
    "names have case": {"spark.sql.caseSensitive": "true"},
    "text has no case": {"spark.sql.session.collation.default": "UTF8_LCASE"},
    "quoted names are patterns": {"spark.sql.parser.quotedRegexColumnNames": "true"},
    "literals are not unescaped": {"spark.sql.parser.escapedStringLiterals": "true"},
    "no variables": {"spark.sql.variable.substitute": "false"},
    "chars are strings": {"spark.sql.legacy.charVarcharAsString": "true", "spark.sql.readSideCharPadding": "false"},
    "a loose store assignment": {"spark.sql.storeAssignmentPolicy": "LEGACY"},
    "a strict store assignment": {"spark.sql.storeAssignmentPolicy": "STRICT"},
    "the last key of a map": {"spark.sql.mapKeyDedupPolicy": "LAST_WIN"},
    "old times, sizes and precedence": {
        "spark.sql.legacy.timeParserPolicy": "LEGACY", "spark.sql.legacy.sizeOfNull": "true",
        "spark.sql.legacy.setopsPrecedence.enabled": "true", "spark.sql.ansi.enabled": "false",
        "spark.sql.legacy.castComplexTypesToString.enabled": "true",
        "spark.sql.legacy.interval.enabled": "true", "spark.sql.legacy.typeCoercion.datetimeToString.enabled": "true",
        "spark.sql.legacy.duplicateBetweenInput": "true", "spark.sql.legacy.pathOptionBehavior.enabled": "true",
    },
    "another corrupt record": {"spark.sql.columnNameOfCorruptRecord": "body"},
    "concat makes strings": {"spark.sql.function.concatBinaryAsString": "true"},
    # ---- how it is carried out
    "no generated code": {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"},
    "fewer rules": {
        "spark.sql.optimizer.excludedRules": ",".join(
            _RULES + rule for rule in ("ColumnPruning", "PushDownPredicates", "ConstantFolding", "CollapseProject")
        )
    },
    "no hints": {"spark.sql.optimizer.disableHints": "true", "spark.sql.autoBroadcastJoinThreshold": "-1"},
    "no adaption": {"spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "1"},
    "no cross joins": {"spark.sql.crossJoin.enabled": "false"},
    "Arrow batches of one row": {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1", "spark.sql.execution.arrow.maxRecordsPerOutputBatch": "1",
    },
    "Arrow batches of few bytes": {
        "spark.sql.execution.arrow.maxBytesPerBatch": "64", "spark.sql.execution.arrow.maxBytesPerOutputBatch": "64",
        "spark.sql.execution.arrow.localRelationThreshold": "1",
    },
    "Arrow batches without an end": {"spark.sql.execution.arrow.maxRecordsPerBatch": "0"},
    "large Arrow types": {"spark.sql.execution.arrow.useLargeVarTypes": "true"},
    "compressed Arrow": {"spark.sql.execution.arrow.compression.codec": "zstd"},
    "no Arrow for PySpark": {
        "spark.sql.execution.arrow.pyspark.enabled": "false",
        "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
    },
    "validated Arrow": {"spark.sql.execution.arrow.pyspark.validateSchema.enabled": "true"},
    "bytes are bytearrays": {"spark.sql.execution.pyspark.binaryAsBytes": "false"},
    "filters in Python sources": {"spark.sql.python.filterPushdown.enabled": "true"},
    # ---- checkpoints
    "one batch is kept": {"spark.sql.streaming.minBatchesToRetain": "1"},
    "no batches without data": {"spark.sql.streaming.noDataMicroBatches.enabled": "false"},
    "offsets of version 2": {"spark.sql.streaming.offsetLog.formatVersion": "2"},
    "no checksums of checkpoints": {"spark.sql.streaming.checkpoint.fileChecksum.enabled": "false"},
    "no looks at checkpoints": {
        "spark.sql.streaming.checkpoint.verifyMetadataExists.enabled": "false",
        "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
    },
}  # fmt: skip
"""By name: the settings of a row."""

REFUSED_BY_SPARK: dict[str, tuple[tuple[str, ...], str]] = {
    "Arrow batches without an end": (
        ("messages", "read", "write", "sink", "foreachBatch", "consume"),
        "'max_chunksize' should be strictly positive|maximum arrow batch size should be greater than 0",
    ),
}
"""Doors that PySpark itself does not open under a row, and its words: no row is lost."""

TIMES = pa.array(
    [
        datetime(1970, 1, 1, tzinfo=timezone.utc),
        datetime(2024, 3, 31, 1, 30, tzinfo=timezone.utc),  # no such wall clock in Berlin read as UTC
        datetime(2024, 10, 27, 0, 30, 0, 123456, tzinfo=timezone.utc),  # twice in Berlin
        datetime(2200, 2, 28, 23, 59, 59, 999999, tzinfo=timezone.utc),
    ],
    TIMESTAMP,
)
GROUP = "points"
BAD = b"bad"


class Played:
    """A small log, and what every door must say of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        log = CommitLog.create(folder / "log")
        for topic in ("orders", "Orders"):
            log.create_topic(topic, 2)
        for number in range(2):  # the first is drained, the second is the tail
            if number:
                log.drain()
                self.between = (log.refresh(), datetime.now(timezone.utc))
            for app in ("app", "App"):
                record = prepare(log, number, _columns(number, app), app=app, per="key", key="k", topic=None)
                kept, dropped = split(pending(log, record), 5)
                decide_one(log.engine, record, 1, commit=kept, rollback=dropped, who=Who.EXECUTE)
            roll_back(log, prepare(log, number, 3, app="rolled-back"))
            commit(log, prepare(log, number, _columns(number, "whole"), app="whole", topic=None, key="k", per="key"))
        self.open = prepare(log, 0, _columns(2, "open"), app="open", per="key", key="k", topic=None)
        decide_one(log.engine, self.open, 1, commit=split(pending(log, self.open), 4)[1], who=Who.EXECUTE)
        self.messages = read_all(log)
        self.before = [m for m in self.messages if m["commit_timestamp"] <= _us(self.between[1])]
        self.since = [m for m in self.messages if m["commit_timestamp"] >= _us(self.between[1])]
        assert 0 < len(self.before) < len(self.messages) == len(self.before) + len(self.since)
        self.undecided = plain(log.engine.half.read(self.open, pending(log, self.open), HALF_SCHEMA.names))
        assert 0 < len(self.undecided) < self.open.rows

    def copy(self, folder: Path) -> CommitLog:
        shutil.copytree(self.folder / "log", folder)
        return CommitLog.open(folder)


def _columns(number: int, app: str) -> pa.Table:
    count = 16
    return pa.table(
        {
            "body": pa.array([(BAD, f"{app}{number}.{i}".encode(), b"", b"\xff\x00")[i % 4] for i in range(count)]),
            "k": pa.array([("x", "X", "x ", "\u00e4", "A\u0308", "z%", "'\"", "null")[i % 8] for i in range(count)]),
            "topic": pa.array([("orders", "Orders")[i % 2] for i in range(count)]),
            "tags": pa.array([("paid", "Paid", None)[i % 3] for i in range(count)]),
            "keys": pa.array([("k1 k2", None, "${x}", "\\n")[i % 4] for i in range(count)]),
            "sharding_key": pa.array([("s", None)[i % 2] for i in range(count)]),
            "properties": pa.array(
                [([("n", "1"), ("N", "2")], None, [("m", ""), ("u", "\u00fc")], [])[i % 4] for i in range(count)],
                PROPERTIES,
            ),
            "born_timestamp": TIMES.take(pa.array([i % 4 for i in range(count)])),
        }
    )


@contextmanager
def sessions(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """Give a session with these settings, beside the others of the process."""
    own = spark.newSession()
    for name, value in settings.items():
        own.conf.set(name, value)
    txmq.register(own)
    yield own


# ---------------------------------------------------------------- rows, whoever read them
def plain(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with instants in microseconds and properties in order, sorted."""
    columns = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_timestamp(column.type):
            assert column.type.tz is not None, f"{name} is {column.type}: it has no zone, so it is no instant"
            column = pc.cast(pc.cast(column, TIMESTAMP), pa.int64())
        values = column.to_pylist()
        if pa.types.is_map(column.type):
            values = [None if value is None else sorted(value) for value in values]
        columns[name] = values
    return by_content(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def by_content(rows: Any) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: repr(sorted(row.items())))


def _us(moment: datetime) -> int:
    return int(pa.scalar(moment, TIMESTAMP).value)


def read_all(log: CommitLog) -> list[dict[str, Any]]:
    return by_content(
        row for topic in ("orders", "Orders") for row in plain(log.read(topic, columns=SOURCE_SCHEMA.names))
    )


def read(frame: DataFrame, schema: pa.Schema = SOURCE_SCHEMA) -> list[dict[str, Any]]:
    """The rows of a DataFrame, which must have exactly our types."""
    from pyspark.sql.pandas.types import from_arrow_schema

    assert frame.schema == from_arrow_schema(schema), frame.schema.simpleString()
    return plain(frame.toArrow())


def _of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[dict[str, Any]]:
    return by_content({name: row[name] for name in columns} for row in rows)


SENT = ["body", "topic", "tags", "keys", "sharding_key", "properties", "born_timestamp"]


# ---------------------------------------------------------------- the doors
Door = Callable[["SparkSession", Played, CommitLog, Path], None]


def messages(spark: SparkSession, played: Played, log: CommitLog, folder: Path) -> None:
    assert read(txmq.messages(spark, log)) == played.messages
    version, time = played.between
    assert read(txmq.messages(spark, log, as_of=version)) == played.before
    assert read(txmq.messages(spark, log, as_of=time)) == played.before
    assert read(txmq.messages(spark, log, starting=time)) == played.since
    of_one = txmq.messages(spark, log, "orders", ending=time)
    assert read(of_one) == [m for m in played.before if m["topic"] == "orders"]
    assert read(txmq.messages(spark, log, tags="paid")) == [m for m in played.messages if m["tags"] == "paid"]
    selected = [m for m in played.messages if ("n", "1") in (m["properties"] or ())]
    assert read(txmq.messages(spark, log, selector="n = 1 AND N = 2")) == selected


def read_batch(spark: SparkSession, played: Played, log: CommitLog, folder: Path) -> None:
    source = spark.read.format("txmq").option("path", log.path).option("subscribe", "orders,Orders")
    assert read(source.load()) == played.messages
    time = played.between[1].isoformat()
    assert read(source.option("endingTimestamp", time).load()) == played.before
    assert read(_source(spark.read, log, played).load()) == played.since


def _source(reader: Any, log: CommitLog, played: Played) -> Any:
    options = {"path": log.path, "subscribe": "orders,Orders", "startingTimestamp": played.between[1].isoformat()}
    return reader.format("txmq").options(**options)


def checked(spark: SparkSession, played: Played, log: CommitLog, folder: Path) -> None:
    for rows, expected in (
        (pending(log, played.open), played.undecided),
        (played.open.all_rows, plain(log.engine.half.read(played.open, played.open.all_rows, HALF_SCHEMA.names))),
    ):
        batch = half_batch_of(log.engine, played.open, log.engine.state_of(played.open), 1, rows)
        assert read(batch.to_spark(spark), HALF_SCHEMA) == expected


def write_batch(spark: SparkSession, played: Played, log: CommitLog, folder: Path) -> None:
    into = _empty_log(folder / "written")
    frame = spark.createDataFrame(_columns(0, "new"))
    options = {"path": into.path, "producerGroup": "g", "transactionListener": "none", "transactionKey": "k"}
    frame.write.format("txmq").mode("append").options(**options).save()
    assert _of(read_all(into), SENT) == plain(_columns(0, "new").select(SENT))
    into.drain()
    assert _of(read_all(into), SENT) == plain(_columns(0, "new").select(SENT))


def sink(spark: SparkSession, played: Played, log: CommitLog, folder: Path) -> None:
    """From the source's stream to the sink's."""
    into = _empty_log(folder / "sunk")
    options = {"path": into.path, "producerGroup": "g", "transactionListener": "none"}
    stream = _source(spark.readStream, log, played).load().select(*SENT)
    _run(stream.writeStream.format("txmq").options(**options), folder / "sink")
    assert _of(read_all(into), SENT) == _of(played.since, SENT)


def for_each_batch(spark: SparkSession, played: Played, log: CommitLog, folder: Path) -> None:
    into, listener = _empty_log(folder / "each"), Listener()
    function = txmq.TransactionalSink(into, producer_group="g", listener=listener)
    stream = _source(spark.readStream, log, played).load().select(*SENT)
    _run(stream.writeStream.foreachBatch(function), folder / "foreachBatch")
    assert _of(read_all(into), SENT) == _of(listener.seen, SENT) == _of(played.since, SENT)


def consume(spark: SparkSession, played: Played, log: CommitLog, folder: Path) -> None:
    diary = folder / "diary"
    diary.mkdir()

    def listen(messages: pa.Table) -> list[Any]:
        with pa.OSFile(str(diary / uuid4().hex), "wb") as file, pa.ipc.new_file(file, messages.schema) as writer:
            writer.write_table(messages)
        return [FAILURE if body == BAD else SUCCESS for body in messages["body"].to_pylist()]

    group = _source(spark.readStream, log, played).option("consumerGroup", GROUP).load()
    _run(txmq.consume(group, GROUP, listen, max_reconsume_times=0), folder / "consume")
    seen = [row for file in diary.iterdir() for row in plain(pa.ipc.open_file(file.read_bytes()).read_all())]
    assert _of(seen, SOURCE_SCHEMA.names) == played.since
    letters = log.read(dlq_topic(GROUP), columns=["body"])["body"].to_pylist()
    assert letters == [BAD] * len([m for m in played.since if m["body"] == BAD])


def _run(writer: Any, checkpoint: Path) -> None:
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination(120)
    assert not query.isActive


class Listener(txmq.TransactionListener):
    """Commits, and keeps what Spark showed it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        from pyspark.sql import SparkSession

        spark = SparkSession.getActiveSession()
        assert spark is not None
        self.seen += read(batch.to_spark(spark), HALF_SCHEMA)
        return COMMIT_MESSAGE

    def check_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        return txmq.UNKNOWN


def _empty_log(folder: Path) -> CommitLog:
    log = CommitLog.create(folder)
    for topic in ("orders", "Orders"):
        log.create_topic(topic, 2)
    return log


DOORS: dict[str, Door] = {
    "messages": messages,
    "read": read_batch,
    "to_spark": checked,
    "write": write_batch,
    "sink": sink,
    "foreachBatch": for_each_batch,
    "consume": consume,
}
