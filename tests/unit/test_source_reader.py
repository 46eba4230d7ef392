"""The readers without a JVM: what a task reads, also when somebody rewrote or removed the files."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles, ReadMaxRows

from rmq_spark import CommitLog
from rmq_spark._core.spark.reader import to_batches
from rmq_spark.errors import (
    GroupInUseError,
    MessageError,
    NotACommitLogError,
    OffsetError,
    OffsetOutOfRangeError,
    OptionError,
    TopicNotFoundError,
    UnreachableStoreError,
)
from tests.support.clocks import set_clock
from tests.support.half_batches import commit, move_half, prepare
from tests.support.inside import PROPERTIES, SOURCE_SCHEMA, Planner, TxmqReader, TxmqStreamReader
from tests.support.limits import Limit
from tests.support.meanwhile import at, seen_at
from tests.support.sends import raising
from tests.support.source_logs import decide, send, source_schema

IN_ORDER = [("topic", "ascending"), ("queue_id", "ascending"), ("queue_offset", "ascending")]


pytestmark = pytest.mark.log("delta", orders=3)


def read(log: CommitLog, ddl: str | None = None, **options: str) -> pa.Table:
    """A batch read, with every pickling that Spark does."""
    reader = TxmqReader({"path": log.path, "subscribe": "orders", **options}, source_schema(ddl))
    partitions = pickle.loads(pickle.dumps(reader.partitions()))
    return run(reader, partitions)


def run(reader: Any, partitions: Any) -> pa.Table:
    pickled = pickle.dumps(reader)
    assert Planner.__name__.encode() not in pickled, "an open commit log goes to the executors"
    worker = pickle.loads(pickled)
    batches = [batch for partition in partitions for batch in worker.read(partition)]
    found = pa.Table.from_batches(batches, reader.schema)
    return found.sort_by(IN_ORDER) if "queue_offset" in found.column_names else found


def test_the_source_reads_what_the_log_reads(log: CommitLog) -> None:
    send(log, 0, 10, partitions=2)
    table = pa.table({"body": [b"\xff", b"", b"x" * 9], "order": [1, 1, 2], "properties": pa.array(
        [[("a", "1")], None, []], pa.map_(pa.string(), pa.string()))})  # fmt: skip
    decide(log, prepare(log, 1, table, per="key", key="order"))
    decide(log, prepare(log, 2, {"body": [f"{i}" for i in range(30)]}, per="message"), roll_back_every=4)
    prepare(log, 3, {"body": ["pending"]})
    expected = log.read("orders")
    assert expected.schema == SOURCE_SCHEMA
    assert read(log).equals(expected)
    assert read(log, ordered="true").equals(expected)
    assert read(log, maxRecordsPerPartition="4").equals(expected)
    assert read(log, minPartitions="50").equals(expected)


def test_an_empty_topic_reads_as_nothing(log: CommitLog) -> None:
    assert read(log).num_rows == 0
    assert list(TxmqReader({"path": log.path, "subscribe": "orders"}, source_schema()).read(None)) == []  # type: ignore[arg-type]


def test_columns_are_projected_and_bodies_may_be_text(log: CommitLog) -> None:
    send(log, 0, 4)
    found = read(log, "keys string, body string, commit_timestamp timestamp")
    assert found.schema.types == [pa.string(), pa.string(), pa.timestamp("us", "UTC")]
    assert sorted(found["body"].to_pylist()) == ["0.0", "0.1", "0.2", "0.3"]


@pytest.mark.parametrize(
    ("ddl", "words"),
    [
        ("key string", r"column 'key' is not a column of the source .*did you mean 'keys'"),
        ("queue_id bigint", "column 'queue_id' is asked for as bigint: its type is int"),
        ("born_timestamp timestamp_ntz", "asked for as timestamp_ntz: its type is timestamp_ltz"),
        ("body timestamp", r"its type is binary \(or string, for bodies in UTF-8\)"),
        ("keys string, keys string", "names a column twice"),
        ("", "the schema has no columns: leave .schema"),
    ],
)
def test_columns_that_the_source_does_not_have_are_refused(ddl: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        TxmqReader({"path": "x", "subscribe": "orders"}, source_schema(ddl))


def test_tags_are_filtered_before_rows_go_to_spark(log: CommitLog) -> None:
    send(log, 0, 9)
    assert set(read(log, tags="a || b")["tags"].to_pylist()) == {"a", "b"}
    assert read(log, "body binary", tags="a").num_rows == 3
    assert read(log, tags="*").num_rows == 9
    assert read(log, tags="c").num_rows == 0


# ---------------------------------------------------------------- selectors
def send_priced(log: CommitLog, batch_id: int, prices: list[str | None], partitions: int = 1) -> None:
    """Messages whose body is their number, with the properties region and price (None: no properties at all)."""
    n = len(prices)
    properties = [None if p is None else [("region", ("eu", "us")[i % 2]), ("price", p)] for i, p in enumerate(prices)]
    columns = {
        "body": [f"{batch_id}.{i}" for i in range(n)],
        "tags": [("even", "odd")[i % 2] for i in range(n)],
        "properties": pa.array(properties, PROPERTIES),
    }
    decide(log, prepare(log, batch_id, columns, partitions=partitions))


def bodies(table: pa.Table) -> set[str]:
    return {b if isinstance(b, str) else b.decode() for b in table["body"].to_pylist()}


def test_a_selector_needs_no_column_of_the_projection(log: CommitLog) -> None:
    send_priced(log, 0, ["1", "9", None, "12", "x", "7"], partitions=2)
    selector = "price > 5 AND region IN ('us')"
    assert bodies(read(log, "body string", selector=selector)) == {"0.1", "0.3", "0.5"}
    assert read(log, "msg_id string", selector=selector).num_rows == 3
    assert bodies(read(log, "body string", selector="TAGS = 'odd' AND price < 10")) == {"0.1", "0.5"}
    assert bodies(read(log, "body string, tags string", selector="price IS NULL")) == {"0.2"}
    assert read(log, "msg_id string", selector="TRUE").num_rows == 6
    assert read(log, selector="FALSE").num_rows == 0


def test_what_is_left_out_changes_no_row_that_stays(log: CommitLog) -> None:
    for batch_id in range(4):
        send_priced(log, batch_id, [str(i) for i in range(20)], partitions=2)
    whole = log.read("orders")
    kept = pc.is_in(whole["tags"], pa.array(["odd"]))
    expected = whole.filter(kept)
    for options in ({"tags": "odd"}, {"selector": "TAGS = 'odd'"}, {"selector": "region = 'us'"}):
        assert read(log, **options).equals(expected)
        assert read(log, maxRecordsPerPartition="3", **options).equals(expected)
        assert log.read("orders", **options).equals(expected)
    move_half(log)
    DeltaTable(f"{log.path}/half").vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert read(log, selector="region = 'us'").equals(expected)
    assert log.read("orders", selector="region = 'us'").equals(expected)


def test_a_limit_counts_the_messages_that_a_selector_keeps(log: CommitLog) -> None:
    for batch_id in range(3):
        send_priced(log, batch_id, [str(i) for i in range(9)])
    every = log.read("orders", selector="price > 5")
    assert every.num_rows == 9
    for limit in (0, 1, 4, 9, 20):
        assert log.read("orders", selector="price > 5", limit=limit).equals(every.slice(0, limit))
    later = pc.or_(pc.greater(every["queue_id"], 0), pc.greater_equal(every["queue_offset"], 3))
    assert log.read("orders", start={0: 3}, selector="price > 5").equals(every.filter(later))


def test_bodies_of_row_groups_without_a_wanted_message_are_not_read(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_priced(log, 0, ["1"] * 6 + ["9"] * 6 + [None] * 6, partitions=3)
    read_columns: list[list[str]] = []
    real = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda file, g, columns, **more: read_columns.append(columns) or real(file, g, columns=columns, **more),
    )
    assert read(log, "body string, tags string, properties map<string,string>", selector="price = 9").num_rows == 6
    assert read_columns == [["properties"], ["properties"], ["body", "tags"], ["properties"]]


def test_now_is_the_time_of_planning_also_for_a_task_that_is_tried_again(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_priced(log, 0, ["1000", "1000000000"])
    clock = set_clock(monkeypatch, 2.0 - time.time())  # soon after 1970 began
    reader = TxmqReader({"path": log.path, "subscribe": "orders", "selector": "price < now"}, source_schema())
    planned = reader.partitions()
    clock.ahead_s = 0.0
    assert [bodies(run(reader, planned)) for _ in range(2)] == [{"0.0"}, {"0.0"}]
    assert bodies(run(reader, reader.partitions())) == {"0.0", "0.1"}


def test_the_offsets_of_a_stream_do_not_depend_on_its_selector(log: CommitLog) -> None:
    send_priced(log, 0, [str(i) for i in range(20)])
    plain = Query(log, startingOffsets="earliest", maxOffsetsPerTrigger="6")
    filtered = Query(log, startingOffsets="earliest", maxOffsetsPerTrigger="6", selector="price = 19")
    found = 0
    while plain.batch(ReadMaxRows(6)).num_rows:
        found += filtered.batch(ReadMaxRows(6)).num_rows
        assert filtered.at == plain.at
    assert found == 1
    assert sum(plain.at["orders"].values()) == 20


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        (lambda log: read(log, "body string"), MessageError, "ask for 'body binary'"),
        (lambda log: read(log, tags="a", selector="b = 1"), OptionError, "'tags' and 'selector' contradict each other"),
        (lambda log: read(log, selector="a >"), OptionError, r"selector, line 1, column 4: found the end"),
        (lambda log: read(log, subscribe="order"), TopicNotFoundError, "did you mean 'orders'"),
        (lambda log: log.read("orders", tags="a", selector="b = 1"), OptionError, "tags and selector contradict each"),
        (lambda log: log.read("orders", tags=""), OptionError, "nor of the form"),
        (lambda log: log.read("orders", selector=5), OptionError, "selector is int"),
    ],
)
def test_what_cannot_be_read_is_refused(log: CommitLog, asked: Any, error: type[Exception], said: str) -> None:
    decide(log, prepare(log, 0, {"body": [b"\xff\xfe"]}))
    with pytest.raises(error, match=said):
        asked(log)


def test_starting_and_ending_offsets_cut_the_queues(log: CommitLog) -> None:
    send(log, 0, 30)
    start = '{"orders": {"0": 2, "1": -2, "2": 10}}'
    found = read(log, startingOffsets=start, endingOffsets='{"orders": {"0": 5, "1": 1, "2": -1}}')
    assert found.select(["queue_id", "queue_offset"]).to_pylist() == [
        *({"queue_id": 0, "queue_offset": o} for o in (2, 3, 4)),
        {"queue_id": 1, "queue_offset": 0},
    ]
    with pytest.raises(OffsetError, match=r"startingOffsets has 2 .* after the 1 of endingOffsets"):
        read(log, startingOffsets=start, endingOffsets='{"orders": {"0": 1, "1": 1, "2": -1}}')


def test_a_read_between_times_of_commit_ends_before_the_second(log: CommitLog) -> None:
    for batch_id in range(3):
        send(log, batch_id, 6)
    times = sorted(set(log.read("orders")["commit_timestamp"].to_pylist()))
    found = read(log, startingTimestamp=times[1].isoformat(), endingTimestamp=times[2].isoformat())
    assert set(found["commit_timestamp"].to_pylist()) == {times[1]}
    assert found.num_rows == 6


# ---------------------------------------------------------------- half files that are gone
def test_the_driver_never_lists_half(log: CommitLog) -> None:
    send(log, 0, 5)
    for entry in Path(log.path, "half/_delta_log").glob("*.json"):
        entry.write_text("{")
    reader = TxmqReader({"path": log.path, "subscribe": "orders"}, source_schema())
    assert len(reader.partitions()) == 1
    with pytest.raises(NotACommitLogError):
        reader.planner.engine.half.table.actions()


def test_a_lost_file_is_an_error_or_a_warning(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    lost, kept = send(log, 0, 6), send(log, 1, 6)
    assert lost.half_id != kept.half_id
    (Path(log.path) / "half" / next(iter(lost.files.values())).path).unlink()
    with pytest.raises(OffsetOutOfRangeError, match=r"topic 'orders', queue 0: offsets 0 to 1 .* has lost its file 0"):
        read(log)
    found = read(log, failOnDataLoss="false")
    assert {b.decode()[0] for b in found["body"].to_pylist()} == {"1"}
    assert "half batch 'app:0' has lost its file 0" in caplog.text


# ---------------------------------------------------------------- streams
def stream(log: CommitLog, **options: str) -> TxmqStreamReader:
    return TxmqStreamReader({"path": log.path, "subscribe": "orders", **options}, source_schema())


class Query:
    """A streaming query, micro-batch by micro-batch, as Spark runs it."""

    def __init__(self, log: CommitLog, available_now: bool = False, **options: str) -> None:
        self.reader = stream(log, **options)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        self.at = self.reader.initialOffset()

    def end(self, limit: Any = None) -> Any:
        """Where the next micro-batch ends."""
        return self.reader.latestOffset(self.at, limit or ReadAllAvailable())

    def batch(self, limit: Any = None) -> pa.Table:
        """Run the next micro-batch; its messages."""
        start, self.at = self.at, self.end(limit)
        return run(self.reader, self.reader.partitions(start, self.at))


OF_A_GROUP = {"startingOffsets": "earliest", "consumerGroup": "points"}


def test_a_stream_starts_at_the_end_and_takes_what_comes(log: CommitLog) -> None:
    send(log, 0, 6)
    reader = stream(log)
    assert reader.reportLatestOffset() is None
    start = reader.initialOffset()
    assert start == {"orders": {"0": 2, "1": 2, "2": 2}, "@log": {log.id: 0}}
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    send(log, 1, 6)
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert end.pop("@begin") == {'["orders", 0]': 2, '["orders", 1]': 2, '["orders", 2]': 2}
    assert reader.reportLatestOffset() == end
    assert run(reader, reader.partitions(start, end)).num_rows == 6
    reader.commit(end)
    reader.stop()


def test_a_first_micro_batch_that_failed_begins_again_where_it_began(log: CommitLog) -> None:
    """Spark keeps no start of it, and asks a new reader where a query starts, which was "latest" by then."""
    send(log, 0, 6)
    query = Query(log)
    start = query.at
    send(log, 1, 6)
    messages = query.batch()
    assert messages.num_rows == 6
    send(log, 2, 3)

    restarted = Query(log)
    assert restarted.at != start
    assert run(restarted.reader, restarted.reader.partitions(restarted.at, query.at)).equals(messages)
    restarted.at = query.at
    assert restarted.batch().num_rows == 3
    assert restarted.end() == restarted.at


def test_where_a_first_micro_batch_began_counts_for_no_other(log: CommitLog) -> None:
    """Spark 4.0 can be set to ask a restarted source for its end before it tells where the query stands."""
    send(log, 0, 6)
    reader = stream(log, startingOffsets="earliest")
    first = reader.latestOffset()
    send(log, 1, 3)
    restarted = stream(log, startingOffsets="earliest")
    second = restarted.latestOffset()
    assert run(restarted, restarted.partitions(first, second)).num_rows == 3


def test_a_first_micro_batch_that_began_without_a_topic_begins_there_again(log: CommitLog) -> None:
    options = {"path": log.path, "subscribePattern": "later.*"}
    reader = TxmqStreamReader(options, source_schema())
    start = reader.initialOffset()
    log.create_topic("later", queues=1)
    commit(log, prepare(log, 7, {"body": ["a", "b"], "topic": ["later"] * 2}))
    end = reader.latestOffset(start, ReadAllAvailable())
    again = TxmqStreamReader(options, source_schema())
    assert run(again, again.partitions(again.initialOffset(), end)).num_rows == 2


def test_a_spark_that_tells_no_start_is_at_the_end_of_what_it_planned(log: CommitLog) -> None:
    """As Spark 4.0 and 4.1 call a source: no argument, and an empty plan when a query starts again."""
    send(log, 0, 6)
    reader = stream(log, consumerGroup="points", startingOffsets="earliest")
    first = reader.latestOffset()
    assert run(reader, reader.partitions(reader.initialOffset(), first)).num_rows == 6
    assert reader.latestOffset() == first
    assert sum(log.engine.groups.next_offsets("points").values()) == 6
    send(log, 1, 3)
    second = reader.latestOffset()
    assert second != first
    reader.stop()

    restarted = stream(log, consumerGroup="points", startingOffsets="earliest")
    assert restarted.partitions(first, first) == []  # how Spark says where the query stands
    assert restarted.latestOffset()["orders"] == second["orders"]
    assert sum(log.engine.groups.next_offsets("points").values()) == 6
    assert run(restarted, restarted.partitions(first, second)).num_rows == 3
    assert restarted.latestOffset() == second
    assert sum(log.engine.groups.next_offsets("points").values()) == 9


def test_a_limit_cuts_a_stream_into_triggers_and_another_one_is_refused(log: CommitLog) -> None:
    send(log, 0, 25)
    query = Query(log, startingOffsets="earliest", maxOffsetsPerTrigger="7")
    limit = query.reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(7)
    assert [query.batch(limit).num_rows for _ in range(5)] == [7, 7, 7, 4, 0]
    with pytest.raises(OptionError, match="ReadMaxFiles"):
        query.batch(ReadMaxFiles(1))


class OlderQuery:
    """A run of a query on Spark 4.0 or 4.1, which tells the source neither its place nor the limit."""

    def __init__(self, log: CommitLog, at: Any = None, **options: str) -> None:
        self.reader = stream(log, startingOffsets="earliest", **options)
        self.at = at
        if at is not None:
            assert self.reader.partitions(at, at) == []  # how Spark says where the query stands

    def batch(self) -> int:
        """Run the next micro-batch; the number of its messages."""
        start, self.at = self.at, self.reader.latestOffset()
        start = start or self.reader.initialOffset()
        return run(self.reader, self.reader.partitions(start, self.at)).num_rows

    def batches(self, count: int) -> list[int]:
        return [self.batch() for _ in range(count)]


SEVEN = {"maxOffsetsPerTrigger": "7"}
SEVEN_AT_FIRST = {**SEVEN, "limitFirstBatch": "true"}


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({}, [25, 20, 0]), (SEVEN, [25, 7, 7, 6, 0]), (SEVEN_AT_FIRST, [7, 7, 7, 7, 7, 7, 3, 0])],
    ids=["no limit", "limit", "limit of the first"],
)
def test_an_older_spark_is_limited_from_the_second_batch_or_from_the_first(
    log: CommitLog, options: dict[str, str], sizes: list[int]
) -> None:
    send(log, 0, 25)
    query = OlderQuery(log, **options)
    first = query.batch()
    send(log, 1, 20)
    assert [first, *query.batches(len(sizes) - 1)] == sizes


def test_an_older_spark_has_no_batch_above_the_limit_after_a_restart(log: CommitLog) -> None:
    send(log, 0, 25)
    query = OlderQuery(log, **SEVEN_AT_FIRST)
    assert query.batches(2) == [7, 7]
    assert OlderQuery(log, query.at, **SEVEN_AT_FIRST).batches(3) == [7, 4, 0]
    assert OlderQuery(log, query.at, **SEVEN).batches(2) == [11, 0]  # all there is, for the run may be availableNow's
    start, end = query.at, query.reader.latestOffset()
    again = OlderQuery(log, end, **SEVEN)  # it died within this micro-batch, which comes first
    assert run(again.reader, again.reader.partitions(start, end)).num_rows == 7
    send(log, 1, 8)
    assert again.batches(3) == [7, 5, 0]  # a run of availableNow would have ended


def test_an_older_spark_goes_on_when_it_does_not_plan_a_batch(log: CommitLog) -> None:
    """Spark's optimizer leaves the source out where no row can be kept: WHERE false."""
    send(log, 0, 20)
    reader = stream(log, startingOffsets="earliest", **SEVEN_AT_FIRST)
    ends = [sum(reader.latestOffset()["orders"].values()) for _ in range(4)]
    assert ends == [7, 14, 20, 20]


def test_an_older_spark_advances_every_queue(log: CommitLog) -> None:
    log.create_topic("deep", queues=4)
    record = prepare(log, 0, {"body": [str(n) for n in range(100)], "queue_id": [0] * 97 + [1, 2, 3]}, topic="deep")
    commit(log, record)
    reader = stream(log, subscribe="deep", startingOffsets="earliest", **SEVEN_AT_FIRST)
    assert reader.latestOffset()["deep"] == {"0": 4, "1": 1, "2": 1, "3": 1}


def test_the_younger_of_two_queries_of_a_group_stops(log: CommitLog) -> None:
    older, younger = Query(log, **OF_A_GROUP), Query(log, **OF_A_GROUP)
    for batch_id, query in enumerate((older, younger, older)):
        send(log, batch_id, 6)
        query.batch()
    with pytest.raises(GroupInUseError, match="is being read by an older query"):
        younger.batch()
    older.batch()


def test_a_stream_goes_on_although_delayed_messages_cannot_be_placed(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(log, **OF_A_GROUP)
    send(log, 0, 6)
    with at("files read", raising(UnreachableStoreError("a timeout")), table="op"):
        assert query.batch().num_rows == 6
    assert "delayed messages were not placed: " in caplog.text


def test_available_now_ends_where_the_log_stood(log: CommitLog) -> None:
    send(log, 0, 6)
    query = Query(log, available_now=True, startingOffsets="earliest")
    send(log, 1, 6)
    assert query.batch().num_rows == 6
    assert query.end() == query.at


def test_a_group_s_progress_report_says_where_a_batch_read_begins(log: CommitLog) -> None:
    log.engine.create_own_topic("%RETRY%points")
    send(log, 0, 6)
    reported = Query(log, **OF_A_GROUP).end()
    send(log, 1, 3)
    assert reported["%RETRY%points"] == {"0": 0}
    assert read(log, startingOffsets=json.dumps(reported)).num_rows == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"orders": 3},
        *({"@log": log_id} for log_id in (None, 3, {}, {"one": 0, "another": 0})),
        *({"@again": 3}, {"@again": {"orders": 1}}, {"@again": {'["orders", 0]': 1}}),
        *({"@again": {'["orders", 0, 1e99]': 1}}, {"@again": {'["o", 0, 1]': -1}}),
    ],
)
def test_an_offset_that_no_stream_wrote_is_an_error(log: CommitLog, wrong: dict[str, object]) -> None:
    with pytest.raises(OffsetError, match="the checkpoint"):
        stream(log).latestOffset({"orders": {"0": 0}, **wrong}, ReadAllAvailable())  # type: ignore[dict-item]


def test_a_log_made_anew_does_not_go_on_at_the_offsets_of_the_old_one(log: CommitLog) -> None:
    """The new log has more messages than the old one: the stream passed over its first ones."""
    send(log, 0, 3)
    query = Query(log, **OF_A_GROUP)
    old = query.end()
    query.reader.stop()
    old_id = log.id
    shutil.rmtree(log.path)
    anew = CommitLog.create(log.path)
    anew.create_topic("orders", queues=3)
    send(anew, 0, 9)

    with pytest.raises(OffsetOutOfRangeError, match=f"the checkpoint counts in commit log '{old_id}'") as told:
        stream(log, consumerGroup="points").latestOffset(old, ReadAllAvailable())
    assert re.search(f"is commit log {anew.id}.*new checkpoint", str(told.value))

    with pytest.raises(OffsetOutOfRangeError, match=f"startingOffsets counts in commit log '{old_id}'.*'earliest'"):
        read(anew, startingOffsets=json.dumps(old))

    lenient = stream(log, consumerGroup="points", failOnDataLoss="false")
    new = lenient.latestOffset(old, ReadAllAvailable())
    assert run(lenient, lenient.partitions(old, new)).num_rows == 9, "the new log is read from its start"
    lenient.commit(new)
    assert anew.engine.groups.next_offsets("points") == {("orders", q): 3 for q in range(3)}


# ---------------------------------------------------------------- suspended queues
def offsets_of(messages: pa.Table) -> dict[int, list[int]]:
    """The offsets of messages, by queue."""
    found: dict[int, list[int]] = {}
    for row in messages.to_pylist():
        found.setdefault(row["queue_id"], []).append(row["queue_offset"])
    return found


def suspend(log: CommitLog, offset: int, until: datetime) -> None:
    """Suspend queue 1 at an offset, as an orderly consumer of the group does."""
    log.engine.groups.progress("points", {("orders", 1): offset}, "an orderly consumer", {("orders", 1): until})


def test_a_suspended_queue_is_kept_back_while_the_others_go_on_and_then_read_again(log: CommitLog) -> None:
    send(log, 0, 12)
    query = Query(log, **OF_A_GROUP, ordered="true")
    assert query.batch().num_rows == 12
    until = datetime.now(timezone.utc) + timedelta(days=1)
    suspend(log, 2, until)
    assert query.end() == query.at
    send(log, 1, 6)
    assert offsets_of(query.batch()) == {0: [4, 5], 2: [4, 5]}
    assert log.engine.groups.next_offsets("points") == {("orders", 0): 4, ("orders", 1): 2, ("orders", 2): 4}

    over = datetime.now(timezone.utc)
    suspend(log, 3, over)
    second = query.at
    query.reader.commit(second)
    assert offsets_of(query.batch()) == {1: [3]}
    anew = stream(log)
    assert offsets_of(run(anew, anew.partitions(second, query.at))) == {1: [3]}, "a batch that runs again is the same"
    query.at = json.loads(json.dumps(query.at))

    # Suspended anew at the same message: that is another end, so Spark makes another micro-batch of it.
    later = over + timedelta(microseconds=1)
    suspend(log, 3, later)
    query.reader.commit(query.at)
    assert offsets_of(query.batch()) == {1: [3]}

    log.engine.groups.progress("points", {("orders", 1): 4}, "an orderly consumer")
    query.reader.commit(query.at)
    assert offsets_of(query.batch()) == {1: [4, 5]}
    assert query.end() == query.at
    assert set(log.engine.groups.next_offsets("points").values()) == {6}


def test_a_suspended_queue_is_kept_back_although_progress_cannot_be_published(log: CommitLog) -> None:
    """The stream went on past the suspended messages, and the group with it."""
    send(log, 0, 12)
    query = Query(log, **OF_A_GROUP, ordered="true")
    query.batch()
    until = datetime.now(timezone.utc) + timedelta(days=1)
    suspend(log, 2, until)
    send(log, 1, 6)
    fails = raising(UnreachableStoreError("a timeout"))
    with seen_at("commit begins", fails, table="groups"):
        assert offsets_of(query.batch()) == {0: [4, 5], 2: [4, 5]}
    with seen_at("files read", fails, table="groups"), pytest.raises(UnreachableStoreError):
        query.batch()


def test_a_queue_that_nobody_suspends_again_goes_on(log: CommitLog) -> None:
    """The consumer that suspended it is gone, and another kind of query reads for the group."""
    send(log, 0, 6)
    query = Query(log, **OF_A_GROUP)
    query.batch()
    suspend(log, 1, datetime.now(timezone.utc))
    assert offsets_of(query.batch()) == {1: [1]}
    assert query.end() == query.at
    assert log.engine.groups.positions("points")[("orders", 1)][:2] == (2, None)


def test_available_now_waits_for_a_suspended_queue(log: CommitLog) -> None:
    send(log, 0, 6)
    query = Query(log, available_now=True, **OF_A_GROUP)
    query.batch()
    soon = datetime.now(timezone.utc) + timedelta(seconds=0.3)
    suspend(log, 1, soon)
    assert offsets_of(query.batch()) == {1: [1]}
    assert datetime.now(timezone.utc) >= soon


def test_available_now_does_not_wait_for_hours(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    send(log, 0, 6)
    query = Query(log, available_now=True, **OF_A_GROUP)
    query.batch()
    suspend(log, 1, datetime.now(timezone.utc) + timedelta(hours=1))
    assert query.end() == query.at
    assert "the query ends while queues are suspended for 3600 s more: [('orders', 1)]" in caplog.text


# ---------------------------------------------------------------- batches
def test_small_tables_go_together_and_large_ones_are_cut(limit: Limit) -> None:
    limit(BATCH_ROWS_MIN=10, BATCH_BYTES_MAX=1600)
    tables = [pa.table({"n": pa.array(range(n), pa.int64())}) for n in (3, 0, 3, 5, 400, 2)]
    batches = list(to_batches(iter(tables)))
    assert [b.num_rows for b in batches] == [11, 200, 200, 2]
