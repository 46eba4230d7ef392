"""Committed messages by Spark's own reader: the same as from the source, wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark.errors import OffsetOutOfRangeError
from tests.spark.settings_table import sessions
from tests.support.half_batches import (
    another,
    commit,
    decide_one,
    let_leave,
    move_half,
    pending,
    prepare,
    roll_back,
    send,
    split,
)
from tests.support.inside import PROPERTIES, Who, half_batch_of, spark_parquet, table_files
from tests.support.limits import Limit
from tests.support.meanwhile import at
from tests.support.source_logs import decide

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEY = ("topic", "queue_id", "queue_offset")


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    made = CommitLog.create(tmp_path / "a log")
    made.create_topic("orders", 2)
    made.create_topic("points", 1)
    return made


def fill(log: CommitLog, number: int) -> None:
    record = send(log, f"parts{number}", 9, per="message")
    kept, dropped = split(pending(log, record), 3)
    decide_one(log.engine, record, 1, commit=kept, rollback=dropped, who=Who.EXECUTE)
    properties = [[("n", "1")], None, [("n", "5"), ("m", "")], []]
    columns = {
        "body": pa.array([b"a", b"b", b"", b"\xff"]),
        "k": pa.array(["x:1", "ä%", "x:1", "z"]),
        "tags": pa.array(["paid", None, "late", "paid"]),
        "properties": pa.array(properties, PROPERTIES),
    }
    commit(log, prepare(log, number, pa.table(columns), app="keyed", per="key", key="k", topic="points", partitions=2))
    roll_back(log, send(log, f"none{number}"))
    commit(log, prepare(log, number, 5))


def rows(frame: DataFrame) -> list[tuple[object, ...]]:
    return [tuple(row) for row in frame.orderBy(*KEY).collect()]


def of_source(spark: SparkSession, log: CommitLog, **options: str) -> DataFrame:
    txmq.register(spark)
    return spark.read.format("txmq").options(path=log.path, subscribe="orders,points", **options).load()


@pytest.mark.turns(5, among="messages: files")
def test_offsets_that_have_expired_are_out_of_range(spark: SparkSession, log: CommitLog) -> None:
    commit(log, send(log, "old", 4))
    log.engine.topic_store.set_retention("orders", 0.0)
    let_leave(log)
    log.set_retention("orders", None)
    commit(log, send(log, "new", 4))
    first = {"orders": {q: n for (_, q), n in log.engine.firsts().items()}}
    assert txmq.messages(spark, log, "orders").count() == 4
    assert txmq.messages(spark, log, "orders", starting=first).count() == 4
    for given in ({"starting": {"orders": {0: 0, 1: 0}}}, {"ending": {"orders": {0: 1, 1: 1}}}):
        with pytest.raises(OffsetOutOfRangeError, match="have expired; the queue starts at offset 2 now"):
            txmq.messages(spark, log, "orders", **given)


@pytest.mark.timeout(300)
def test_messages_are_those_of_the_source(spark: SparkSession, log: CommitLog) -> None:
    fill(log, 0)
    tail = txmq.messages(spark, log)
    assert tail.schema == of_source(spark, log).schema
    assert rows(tail) == rows(of_source(spark, log))
    log.drain()
    fill(log, 1)
    let_leave(log)
    fill(log, 2)
    move_half(log)
    whole = rows(of_source(spark, log))
    assert rows(txmq.messages(spark, log.path)) == whole

    assert rows(txmq.messages(spark, log, "points", tags="paid || late")) == [
        row for row in whole if row[0] == "points" and row[5] in ("paid", "late")
    ]
    by_selector = txmq.messages(spark, log, selector="n > 3")
    assert rows(by_selector) == [row for row in whole if (row[8] or {}).get("n") == "5"]
    start, end = {"orders": {0: 2, 1: 12}}, {"orders": {0: 13, 1: 14}}
    part = rows(txmq.messages(spark, log, "orders", starting=start, ending=end))
    spans = [(start["orders"][q], end["orders"][q]) for q in (0, 1)]
    assert part == [r for r in whole if r[0] == "orders" and spans[r[1]][0] <= r[2] < spans[r[1]][1]]
    assert txmq.messages(spark, log, starting="latest").count() == 0
    first_queue = txmq.messages(
        spark, log, "orders", starting={"orders": {0: -2, 1: -1}}, ending={"orders": {0: -1, 1: -1}}
    )
    assert rows(first_queue) == [r for r in whole if r[:2] == ("orders", 0)]


@pytest.mark.turns(5, among="messages: files")
def test_a_read_begins_at_a_time_or_in_one_of_its_topics(spark: SparkSession, log: CommitLog) -> None:
    for number in range(2):
        fill(log, number)
        log.drain()
    whole = rows(of_source(spark, log))
    within = txmq.messages(spark, log, starting={"orders": {0: 3, 1: -1}, "points": {0: -2}})
    assert rows(within) == [row for row in whole if row[0] == "points" or (row[1] == 0 and row[2] >= 3)]
    times = sorted(set(log.read("points")["commit_timestamp"].to_pylist()))
    since = txmq.messages(spark, log, "points", starting=times[1])
    assert rows(since) == [row for row in whole if row[0] == "points" and row[2] >= 4]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_was_visible_once_is_a_filter(spark: SparkSession, log: CommitLog) -> None:
    moments: list[tuple[int, datetime, list[tuple[object, ...]]]] = []
    for number in range(3):
        fill(log, number)
        now = datetime.now(timezone.utc)
        moments.append((log.refresh(), now, rows(txmq.messages(spark, log))))
        if number == 0:
            let_leave(log)
    for version, time, then in moments:
        assert rows(txmq.messages(spark, log, as_of=version)) == then
        assert rows(txmq.messages(spark, log, as_of=time)) == then
    assert rows(txmq.messages(spark, log, as_of=datetime.now(timezone.utc) + timedelta(days=1))) == moments[-1][2]
    with pytest.raises(txmq.errors.OptionError, match="takes a SparkSession, and then a commit log"):
        txmq.messages(log, "orders")
    with pytest.raises(txmq.errors.OptionError, match="as_of=9999"):
        txmq.messages(spark, log, as_of=9999)
    with pytest.raises(txmq.errors.OptionError, match="no time zone"):
        txmq.messages(spark, log, as_of=datetime(2020, 1, 1))


def test_what_another_writer_doubled_is_no_answer(spark: SparkSession, log: CommitLog) -> None:
    fill(log, 0)
    log.drain()
    table = DeltaTable(f"{log.path}/messages")
    write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append")
    with pytest.raises(txmq.errors.CorruptLogError, match="somebody wrote to it"):
        txmq.messages(spark, log)


@pytest.mark.turns(5, among="messages: files")
def test_of_many_files_the_folder_is_listed_and_a_lost_one_is_missed(
    spark: SparkSession, log: CommitLog, limit: Limit
) -> None:
    for number in range(3):
        fill(log, number)
        log.drain()
    move_half(log)
    fill(log, 3)
    whole = rows(of_source(spark, log))
    limit(HALF_PATHS_MAX=1, DRAINED_PATHS_MAX=1)
    assert rows(txmq.messages(spark, log)) == whole
    limit(MESSAGES_FILES_MAX=2)
    assert table_files.compact_messages(another(log).engine.messages_table) > 0
    assert rows(txmq.messages(spark, log)) == whole, "files that were replaced lie in the folder, too"
    record = log.engine.get("app:3")
    Path(log.path, "half", record.files[0].path).unlink()
    with pytest.raises(Exception, match="PATH_NOT_FOUND"):
        rows(txmq.messages(spark, log))


@pytest.mark.turns(5, among="messages: files")
def test_no_core_idles_for_the_last_of_a_few_tasks(spark: SparkSession, log: CommitLog) -> None:
    for number in range(6):
        commit(log, send(log, f"drained{number}", 4))
        log.drain()

    def tasks(file_mb: int) -> int:
        spark.conf.set("spark.sql.files.openCostInBytes", f"{file_mb}m")
        read = txmq.messages(spark, log, "orders")
        assert read.count() == 24
        return int(read.rdd.getNumPartitions())

    try:
        assert tasks(4) == 2, "of 24 MB: one for each core"
        assert tasks(56) == 4, "of 336 MB: two for each core, and not three in all"
        assert tasks(128) == 6, "of 768 MB: three for each core"
    finally:
        spark.conf.unset("spark.sql.files.openCostInBytes")


@pytest.mark.turns(5, among="messages: files")
@pytest.mark.timeout(300)
def test_a_filter_is_pushed_into_the_files(spark: SparkSession, log: CommitLog, limit: Limit) -> None:
    for number in range(3):
        fill(log, number)
        log.drain()
    frame = txmq.messages(spark, log, "orders")
    assert len(frame.inputFiles()) == 3  # not those of the other topic
    spark.conf.set("spark.sql.maxMetadataStringLength", 10_000)
    plan = frame.where("queue_id = 1 and queue_offset >= 5")._jdf.queryExecution().executedPlan().toString()
    spark.conf.unset("spark.sql.maxMetadataStringLength")
    assert "GreaterThanOrEqual(queue_offset,5)" in plan
    assert "BatchEvalPython" not in plan
    limit(MESSAGES_FILES_MAX=2)
    assert table_files.compact_messages(another(log).engine.messages_table) > 0
    assert len(txmq.messages(spark, log, "orders").inputFiles()) == 1
    assert frame.count() == txmq.messages(spark, log, "orders").count()  # planned before, its files are still there


def test_wrong_words_are_refused(spark: SparkSession, log: CommitLog) -> None:
    fill(log, 0)
    for wrong, error, words in (
        ({"topics": "order"}, txmq.errors.TopicNotFoundError, "orders"),
        ({"tags": "a", "selector": "b = 1"}, txmq.errors.OptionError, "contradict"),
        ({"starting": "earlist"}, txmq.errors.OptionError, r"nor offsets \(did you mean .earliest.\?\)"),
        ({"starting": {"orders": 3}}, txmq.errors.OptionError, "no mapping"),
        ({"starting": {"orders": {0: 99, 1: 0}}, "topics": "orders"}, txmq.errors.OffsetOutOfRangeError, "99"),
        (
            {"starting": "latest", "ending": "earliest", "topics": "points"},
            txmq.errors.OffsetOutOfRangeError,
            r"starting is at 4 of topic 'points', queue 0, which is after the 0 of ending",
        ),
        ({"starting": datetime(2020, 1, 1)}, txmq.errors.OptionError, "no time zone"),
    ):
        with pytest.raises(error, match=words):
            txmq.messages(spark, log, **wrong)  # type: ignore[arg-type]


@pytest.mark.turns(5, among="messages: files")
@pytest.mark.parametrize("upkeep", [CommitLog.drain, let_leave], ids=["drained", "left"])
def test_what_is_drained_while_a_read_is_planned_is_read_once(
    spark: SparkSession, log: CommitLog, upkeep: Callable[[CommitLog], object]
) -> None:
    fill(log, 0)
    log.drain()
    fill(log, 1)
    whole = rows(of_source(spark, log))
    reader = another(log)
    reader.refresh()
    reader.engine.drained.border()  # where the tail begins is known, and then the tail is looked for
    with at("files read", lambda: upkeep(another(log)), table="op"):
        found = txmq.messages(spark, reader)
    assert rows(found) == whole


@pytest.mark.turns(5, among="messages: files")
def test_a_half_file_with_many_gaps_is_read_without_what_was_rolled_back(spark: SparkSession, log: CommitLog) -> None:
    decide(log, prepare(log, 0, 40, per="message"), roll_back_every=2)
    assert rows(txmq.messages(spark, log)) == rows(of_source(spark, log))


# ---------------------------------------------------------------- a session that ignores what is damaged or gone
IGNORES = {"spark.sql.files.ignoreCorruptFiles": "true", "spark.sql.files.ignoreMissingFiles": "true"}
"""As jobs set it that read old lakes."""


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 8] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "gone": Path.unlink,
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),  # a power cut leaves this
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("moment", ["before", "planned"])
@pytest.mark.parametrize("table", ["messages", pytest.param("half", marks=pytest.mark.long), "check"])
def test_a_file_that_is_damaged_or_gone_is_never_ignored(
    spark: SparkSession, log: CommitLog, table: str, damage: str, moment: str
) -> None:
    """0 of 2,000 messages came, and no error; a check was handed an empty batch, and its COMMIT was taken."""
    records = []
    for number in range(5):
        records.append(prepare(log, number, pa.table({"body": pa.array([os.urandom(3000)])}), topic="orders"))
        if number < 4:
            commit(log, records[number])
            if table == "messages":
                log.drain()
    if table == "messages":
        file = min(Path(log.path, table).glob("*.parquet"))
    else:
        file = Path(log.path, "half", records[4 if table == "check" else 1].files[0].path)
    checked = half_batch_of(log.engine, records[4], log.engine.state_of(records[4]), 1, records[4].all_rows)

    def read(session: SparkSession) -> DataFrame:
        return checked.to_spark(session) if table == "check" else txmq.messages(session, log, "orders")

    with sessions(spark, IGNORES) as session:
        assert read(session).count() == (1 if table == "check" else 4)
        frame = read(session) if moment == "planned" else None
        DAMAGES[damage](file)
        with pytest.raises(Exception, match=r"PATH_NOT_FOUND|FAILED_READ_FILE|CorruptLogError|its Delta log says"):
            (read(session) if frame is None else frame).collect()


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("option", "damage"),
    [("ignoreCorruptFiles", "flipped"), ("ignoreCorruptFiles", "cut"), ("ignoreMissingFiles", "gone")],
)
def test_without_our_options_spark_would_lose_rows(
    spark: SparkSession, log: CommitLog, monkeypatch: pytest.MonkeyPatch, option: str, damage: str
) -> None:
    """The test above is not blind: a read that leaves it to the session loses a message, and says nothing."""
    for number in range(4):
        commit(log, prepare(log, number, pa.table({"body": pa.array([os.urandom(3000)])}), topic="orders"))
        log.drain()
    monkeypatch.delitem(spark_parquet.READ_OPTIONS, option)
    with sessions(spark, IGNORES) as session:
        frame = txmq.messages(session, log, "orders")
        DAMAGES[damage](sorted(Path(log.path, "messages").glob("*.parquet"))[0])
        assert len(frame.collect()) == 3
