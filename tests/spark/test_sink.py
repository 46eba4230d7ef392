"""The sink's three doors on Spark: writeStream, write, foreachBatch; and what bad input gets."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import rmq_spark as txmq
from rmq_spark.testing import InMemoryCommitLog

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def _listeners_on_the_path(spark: SparkSession) -> None:
    # Python workers (the one that runs commit() too) do not see the driver's sys.path: files go with the session.
    spark.sparkContext.addPyFile(str(HERE / "listeners_for_sink.py"))


@pytest.fixture
def log(log_path: str) -> txmq.CommitLog:
    made = txmq.CommitLog.create(log_path)
    made.create_topic("orders", queues=4)
    made.create_topic("bills", queues=1)
    made.create_topic("steps", queues=4, fifo=True)
    return made


def send(frame: DataFrame, log: txmq.CommitLog, checkpoint: Path, **options: str) -> None:
    """Run the stream until its input is used up."""
    defaults = {
        "path": log.path,
        "topic": "orders",
        "producerGroup": "shop",
        "transactionListener": "none",
        "checkpointLocation": str(checkpoint),
    }
    writer = frame.writeStream.format("txmq").options(**{**defaults, **options}).trigger(availableNow=True)
    query = writer.start()
    query.awaitTermination(120)
    assert not query.isActive


def bodies(log: txmq.CommitLog, topic: str = "orders") -> list[int]:
    return sorted(int(b) for b in log.read(topic, columns=["body"])["body"].to_pylist())


def test_a_stream_without_a_listener_sends_every_row_once(log, numbers, tmp_path):
    send(numbers(3).drop("k"), log, tmp_path / "cp")
    assert bodies(log) == list(range(30))
    assert log.pending().num_rows == 0
    send(numbers(2).drop("k"), log, tmp_path / "cp")
    assert bodies(log) == list(range(50))
    for queue in range(4):
        offsets = log.read("orders", columns=["queue_id", "queue_offset"])
        mine = [r["queue_offset"] for r in offsets.to_pylist() if r["queue_id"] == queue]
        assert mine == list(range(len(mine)))


@pytest.mark.turns(2, among="sink: streams")
def test_keys_share_a_fate_within_a_micro_batch(log, numbers, tmp_path):
    send(
        numbers(2), log, tmp_path / "cp",
        transactionListener="listeners_for_sink:refuse_key_one", transactionKey="k",
    )  # fmt: skip
    assert bodies(log) == [n for n in range(20) if n % 3 != 1]
    ids = set(log.read("orders", columns=["transaction_id"])["transaction_id"].to_pylist())
    assert {i.rsplit(":", 1)[1] for i in ids} == {"0", "2"}
    assert log.pending().num_rows == 0


@pytest.mark.turns(4, among="sink: doors")
def test_a_per_message_listener_with_rocketmqs_signature(log, numbers, tmp_path):
    send(
        numbers(1).drop("k"), log, tmp_path / "cp",
        transactionListener="listeners_for_sink:odd_bodies", transactionPer="message",
    )  # fmt: skip
    assert bodies(log) == [1, 3, 5, 7, 9]


@pytest.mark.turns(2, among="sink: streams")
def test_unknown_stays_hidden_and_pending(log, numbers, tmp_path):
    send(numbers(2).drop("k"), log, tmp_path / "cp", transactionListener="listeners_for_sink:AlwaysUnknown")
    assert bodies(log) == []
    pending = log.pending()
    assert pending["messages"].to_pylist() == [10, 10]
    assert pending["producer_group"].to_pylist() == ["shop", "shop"]
    app_id = json.loads((tmp_path / "cp" / "metadata").read_text())["id"]
    assert set(pending["app_id"].to_pylist()) == {app_id}

    half = Path(log.path) / "half"
    before = set(half.glob("*.parquet"))
    with pytest.raises(Exception, match="PendingLimitError: producer group 'shop' has 2 half batches"):
        send(
            numbers(3).drop("k"), log, tmp_path / "cp",
            transactionListener="listeners_for_sink:AlwaysUnknown", maxPendingBatches="2",
        )  # fmt: skip
    assert set(half.glob("*.parquet")) == before


def test_a_failing_listener_ends_the_query_and_a_restart_checks_before_it_goes_on(log, numbers, tmp_path):
    switch = tmp_path / "down"
    switch.touch()
    frame = numbers(2).drop("k").selectExpr("body", f"'{switch}' as tags")
    with pytest.raises(Exception, match="the database is down"):
        send(frame, log, tmp_path / "cp", transactionListener="listeners_for_sink:Fails")
    assert log.pending()["messages"].to_pylist() == [10]
    switch.unlink()
    send(frame, log, tmp_path / "cp", transactionListener="listeners_for_sink:Fails")
    assert bodies(log) == list(range(20))


@pytest.mark.turns(2, among="sink: streams")
def test_the_checkpoint_of_another_commit_log_is_refused(log, numbers, tmp_path):
    """It went on there: what it sent was missing in the first log for ever, and nobody said a word."""
    other = txmq.CommitLog.create(tmp_path / "other log")
    other.create_topic("orders")
    send(numbers(1).drop("k"), log, tmp_path / "cp")
    with pytest.raises(Exception, match=rf"(?s)CheckpointMismatchError.*went into commit log {log.id}.*is commit log"):
        send(numbers(1).drop("k"), other, tmp_path / "cp")
    assert bodies(other) == []
    (tmp_path / "cp" / "txmq.log_id").unlink()
    send(numbers(1).drop("k"), other, tmp_path / "cp")
    assert (bodies(log), bodies(other)) == (list(range(10)), list(range(10, 30)))


# ---------------------------------------------------------------- batch writes
def write(frame: DataFrame, log: txmq.CommitLog, mode: str = "append", **options: str) -> None:
    defaults = {"path": log.path, "topic": "orders", "producerGroup": "shop", "transactionListener": "none"}
    given = {k: v for k, v in {**defaults, **options}.items() if v != ""}
    frame.write.format("txmq").mode(mode).options(**given).save()


def test_a_batch_write_takes_every_column(spark, log):
    frame = spark.sql(
        """select 'x' body, 'bills' topic, 'paid' tags, array('a', 'b') keys, 'c1' sharding_key, 0 queue_id,
        map('region', 'eu') properties, timestamp'2026-01-01 10:00:00' born_timestamp"""
    )
    write(frame, log)
    (row,) = log.read("bills").to_pylist()
    assert (row["body"], row["tags"], row["keys"], row["sharding_key"]) == (b"x", "paid", "a b", "c1")
    assert dict(row["properties"]) == {"region": "eu"}
    assert row["born_timestamp"].isoformat() == "2026-01-01T10:00:00+00:00"
    assert row["producer_group"] == "shop"


def test_every_column_of_messages_has_a_spark_type(spark):
    from pyspark.sql.types import StructType

    from tests.support.inside import INPUT_COLUMNS, require_message_types

    ddl = ", ".join(f"{name} {kind.split(' or ')[0]}" for name, kind in INPUT_COLUMNS.items())
    require_message_types(StructType.fromDDL(ddl), None, None)


@pytest.mark.turns(4, among="sink: doors")
def test_delayed_messages_wait_for_their_time(spark, log):
    sql = """select 'now' body, cast(null as timestamp) deliver_at, cast(null as int) delay_level
             union all select 'at', current_timestamp() + interval 1 second, null
             union all select 'level', null, 1
             union all select 'far', current_timestamp() + interval 2 days, null"""
    began = datetime.now(timezone.utc)
    write(spark.sql(sql), log, topic="bills")
    deadline = time.monotonic() + 60
    while log.read("bills").num_rows < 3:
        assert time.monotonic() < deadline
        log.engine.ledger.place_due()
        time.sleep(0.1)
    seen = {r["body"]: r for r in log.read("bills").to_pylist()}
    assert set(seen) == {b"now", b"at", b"level"}
    assert seen[b"at"]["commit_timestamp"] >= began + timedelta(seconds=1)
    assert seen[b"level"]["commit_timestamp"] >= seen[b"level"]["store_timestamp"] + timedelta(seconds=1)
    assert log.open_messages()[("bills", 0)] == (0, 1)


@pytest.mark.turns(2, among="sink: streams")
def test_a_fifo_topic_keeps_the_order_of_its_keys(log, numbers, tmp_path):
    frame = numbers(4).selectExpr("body", "cast(k as string) sharding_key", "k owner")
    send(
        frame, log, tmp_path / "cp", topic="steps", transactionKey="owner",
        transactionListener="listeners_for_sink:refuse_key_one",
    )  # fmt: skip
    rows = log.read("steps", columns=["sharding_key", "queue_id", "body"]).to_pylist()
    by_key = {key: [int(r["body"]) for r in rows if r["sharding_key"] == key] for key in ("0", "2")}
    assert by_key == {key: [n for n in range(40) if n % 3 == int(key)] for key in ("0", "2")}


def test_a_batch_write_with_app_id_and_batch_id_may_be_retried(spark, log):
    frame = spark.range(5).selectExpr("cast(id as string) body")
    for _ in range(2):
        write(frame, log, appId="nightly", batchId="7")
    write(frame, log, appId="nightly", batchId="8")
    assert bodies(log) == sorted([*range(5), *range(5)])
    with pytest.raises(Exception, match="CheckpointMismatchError"):
        write(frame, log, appId="nightly", batchId="3")


def test_two_batch_writes_without_app_id_are_two(spark, log):
    frame = spark.range(5).selectExpr("cast(id as string) body")
    write(frame, log)
    write(frame, log)
    assert len(bodies(log)) == 10


def test_an_empty_write_leaves_nothing(spark, log):
    write(spark.range(0).selectExpr("cast(id as string) body"), log)
    assert bodies(log) == []
    assert log.pending().num_rows == 0


ONE = "select 'x' as body"
BAD: dict[str, tuple[str, dict[str, str], str]] = {
    "no path": (ONE, {"path": ""}, "'path' is missing"),
    "no producer group": (ONE, {"producerGroup": ""}, "'producerGroup' is missing"),
    "no listener": (ONE, {"transactionListener": ""}, "'transactionListener' is missing"),
    "unknown option": (ONE, {"producerGrup": "x"}, "did you mean 'producerGroup'"),
    "unknown topic": (ONE, {"topic": "order"}, "did you mean 'orders'"),
    "group with a slash": (ONE, {"producerGroup": "../x"}, "outside"),
    "long group": (ONE, {"producerGroup": "g" * 256}, "at most 255"),
    "app id without batch id": (ONE, {"appId": "a"}, "needs both appId and batchId"),
    "negative batch id": (ONE, {"appId": "a", "batchId": "-1"}, "at least 0"),
    "bare duration": (ONE, {"replayCheckTimeout": "60"}, "not a duration"),
    "unknown error policy": (ONE, {"onListenerError": "ignore"}, "not one of fail, unknown"),
    "key and per message": (ONE, {"transactionKey": "k", "transactionPer": "message"}, "contradict"),
    "no such key column": (ONE, {"transactionKey": "k"}, "not a column"),
    "malformed listener": (ONE, {"transactionListener": "os.system"}, "module:attribute"),
    "listener not importable": (ONE, {"transactionListener": "no_such_module:x"}, "cannot be imported"),
    "not a listener": (ONE, {"transactionListener": "listeners_for_sink:not_a_listener"}, "not a TransactionListener"),
    "listener needs spark": (ONE, {"transactionListener": "listeners_for_sink:NeedsSpark"}, "TransactionalSink"),
    "no body": ("select 1 as keys", {}, "column 'body'"),
    "extra column": ("select 'x' as body, 1 as tag", {}, "did you mean 'tags'"),
    "wrong type": ("select 'x' as body, 1 as tags", {}, "string is expected"),
    "struct body": ("select named_struct('a', 1, 'b', 'x') as body", {}, "make JSON of it with to_json(body)"),
    "variant body": ("select parse_json('1') as body", {}, "make JSON of it with to_json(body)"),
    "keys are numbers": ("select 'x' as body, array(1) as keys", {}, "cast(keys as array<string>)"),
    "properties are numbers": (
        "select 'x' as body, map('p', 1) as properties", {}, "cast(properties as map<string,string>)",
    ),
    "tag with a bar": ("select 'x' as body, 'a|b' as tags", {}, "tags 'a|b' is no tag, in 1 message"),
    "null body": ("select cast(null as string) as body", {}, "the body is null in"),
    "null key": ("select 'x' as body, cast(null as int) as k", {"transactionKey": "k"}, "transactionKey, is null in"),
    "body too large": ("select repeat('x', 4194305) as body", {}, "4194305 bytes"),
    "reserved property": ("select 'x' as body, map('TAGS', 'y') as properties", {}, "reserved"),
    "properties too large": ("select 'x' as body, map('p', repeat('y', 32768)) as properties", {}, "32769 bytes"),
    "queue out of range": ("select 'x' as body, 4 as queue_id", {}, "queues 0 to 3"),
    "no such delay level": ("select 'x' as body, 19 as delay_level", {}, "1 to 18"),
    "too far ahead": ("select 'x' as body, current_timestamp() + interval 4 days as deliver_at", {}, "at most 72 h"),
    "no time": ("select 'x' as body, 'soon' as deliver_at", {}, "timestamp_ltz is expected"),
    "fifo without a key": (ONE, {"topic": "steps"}, "has no sharding_key"),
    "fifo with a delay": (
        "select 'x' as body, 'k' as sharding_key, 1 as delay_level", {"topic": "steps"}, "would leave the order",
    ),
    "traversal in a topic": ("select 'x' as body, '../up' as topic", {}, "outside"),
    "wrong number of verdicts": (ONE, {"transactionListener": "listeners_for_sink:wrong_length"}, "3 verdicts for 1"),
}  # fmt: skip


@pytest.mark.turns(13)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_named_error_and_nothing_is_visible(spark, log, case):
    sql, options, expected = BAD[case]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark wraps ours; the text is compared below
        write(spark.sql(sql), log, **options)
    assert expected in str(caught.value)
    assert log.read("orders").num_rows == 0


def staged(log: txmq.CommitLog) -> list[str]:
    return [file.name for file in Path(log.path, "half").glob("*.parquet")]


@pytest.mark.turns(4)
@pytest.mark.parametrize("body", ["named_struct('a', id)", "array(id)", "map('a', id)", "parse_json('[1]')"])
def test_what_an_error_advises_for_a_nested_body_can_be_sent_and_decoded(spark, log, body):
    frame = spark.range(2).selectExpr(f"{body} as body")
    with pytest.raises(Exception, match=r"make JSON of it with to_json\(body\)"):
        write(frame, log)
    write(frame.selectExpr("to_json(body) as body"), log)
    assert all(json.loads(body) for body in log.read("orders", columns=["body"])["body"].to_pylist())


def test_spark_refuses_partitions_and_buckets_of_a_batch_write_before_anything_is_staged(spark, log):
    frame = spark.sql("select 'x' as body, 'k' as tags")
    options = {"path": log.path, "topic": "orders", "producerGroup": "shop", "transactionListener": "none"}
    writer = lambda: frame.write.format("txmq").mode("append").options(**options)  # noqa: E731
    for refused, words in (
        (lambda: writer().partitionBy("tags").save(), "partitioning"),
        (lambda: writer().clusterBy("tags").save(), "clustering"),
        (lambda: writer().bucketBy(2, "tags").save(), "bucketBy"),
        (lambda: writer().sortBy("tags").save(), "sortBy"),
    ):
        with pytest.raises(Exception, match=words):
            refused()
    assert staged(log) == []


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topc": "orders"}, "unknown option 'topc' for format.*did you mean 'topic'"),
        ({"maxPendingBatches": "many"}, "maxPendingBatches='many' is not a whole number"),
        ({"replayCheckTimeout": "60"}, "is not a duration"),
        ({"transactionPer": "mesage"}, "is not one of batch, message, key"),
        ({"appId": "a", "batchId": "1"}, "batchId is for batch writes"),
    ],
)
def test_an_option_of_a_stream_that_is_mistyped_stops_it_before_anything_is_staged(
    log, numbers, tmp_path, options, words
):
    with pytest.raises(Exception, match=words):
        send(numbers(1).drop("k"), log, tmp_path / "cp", **options)
    assert staged(log) == []
    send(numbers(1).drop("k"), log, tmp_path / "cp")
    assert bodies(log) == list(range(20)), "with the right options the query goes on from its checkpoint"


def test_overwrite_is_refused(spark, log):
    with pytest.raises(Exception, match="append"):
        write(spark.sql(ONE), log, mode="overwrite")


def test_a_path_that_is_no_commit_log_is_refused(spark, log, tmp_path):
    with pytest.raises(Exception, match="is not a commit log"):
        write(spark.sql(ONE), log, path=str(tmp_path))


@pytest.mark.turns(4, among="sink: doors")
def test_a_checkpoint_from_a_spark_setting_is_told_to_become_an_option(spark, log, numbers, tmp_path):
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "by_setting"))
    try:
        writer = numbers(1).drop("k").writeStream.format("txmq")
        query = writer.options(path=log.path, topic="orders", producerGroup="g", transactionListener="none").start()
        with pytest.raises(Exception, match=r"set \.option\('checkpointLocation'"):
            query.awaitTermination(60)
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert log.read("orders").num_rows == 0


# ---------------------------------------------------------------- foreachBatch
@pytest.mark.turns(4, among="sink: doors")
def test_each_result_of_a_whole_aggregation_is_sent(log, numbers, tmp_path):
    """``outputMode("complete")``, which ``format("txmq")`` refuses."""
    sink = txmq.TransactionalSink(log, producer_group="shop", listener=None, topic="orders")
    counts = numbers(2).groupBy("k").count().selectExpr("string(count) body")
    query = counts.writeStream.outputMode("complete").foreachBatch(sink)
    query = query.option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True).start()
    query.awaitTermination()
    assert bodies(log) == [3, 3, 4, 6, 7, 7]


class Orders(txmq.TransactionListener):
    """Keeps what it was told, in the driver's own process."""

    def __init__(self) -> None:
        self.executed: list[Any] = []
        self.frames: list[int] = []

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        self.executed += batch.messages(["body"])["body"].to_pylist()
        self.frames.append(batch.to_spark(SparkSession.getActiveSession()).count())
        return batch.verdicts(rollback=["1"])

    def check_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        return None


def test_foreach_batch_sends_with_a_listener_object_that_has_a_session(log, numbers, tmp_path):
    listener = Orders()
    sink = txmq.TransactionalSink(
        log, producer_group="shop", listener=listener, topic="orders", transaction_key="k",
        checkpoint_location=str(tmp_path / "cp"),
    )  # fmt: skip
    for batches in (2, 1):
        writer = numbers(batches).writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "cp"))
        writer.trigger(availableNow=True).start().awaitTermination(120)
    assert bodies(log) == [n for n in range(30) if n % 3 != 1]
    assert sorted(map(int, listener.executed)) == list(range(30))
    assert listener.frames == [10, 10, 10]


def test_two_sinks_of_one_foreach_batch_that_share_an_app_id_lose_nothing_silently(log, numbers, tmp_path):
    """The second one was taken for a replay of the first, and its messages were dropped."""
    first, second = (
        txmq.TransactionalSink(log, producer_group=group, listener=None, topic="orders") for group in ("shop", "audit")
    )

    def both(batch, batch_id):
        first(batch, batch_id)
        second(batch, batch_id)

    query = numbers(1).select("body").writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "cp"))
    with pytest.raises(Exception, match="app_id of its own"):
        query.trigger(availableNow=True).start().awaitTermination(120)


@pytest.mark.parametrize("in_memory", [False, True])
def test_foreach_batch_to_spark_shows_only_the_undecided(spark, log, in_memory):
    """A half batch of which a part is decided: the listener's DataFrame holds the rest."""
    log = InMemoryCommitLog(topics={"orders": 4}) if in_memory else log
    seen: list[list[str]] = []

    class OneByOne(txmq.TransactionListener):
        def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
            return batch.verdicts(unknown=["b"])

        def check_local_transaction(self, batch: txmq.HalfBatch) -> Any:
            seen.append([bytes(r.body).decode() for r in batch.to_spark(spark).select("body").collect()])
            return txmq.COMMIT_MESSAGE

    listener = OneByOne()
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        table = pa.table({"body": ["1", "2", "3"], "k": ["a", "b", "a"]})
        producer.send_messages_in_transaction(table, topic="orders", transaction_key="k")
    assert bodies(log) == [1, 3]
    txmq.CheckService(log, {"shop": listener}, transaction_timeout=0).run_once()
    assert seen == [["2"]]
    assert bodies(log) == [1, 2, 3]
