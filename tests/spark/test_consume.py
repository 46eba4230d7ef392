"""Message listeners on executors: retries in time, dead letters, and queues in order."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support.half_batches import prepare
from tests.support.inside import FAILURE, SUCCESS, retry_topic
from tests.support.meanwhile import at
from tests.support.sends import raising
from tests.support.source_logs import decide
from tests.support.spark_environment import FROM_4_2

GROUP = "points"


@pytest.fixture
def log(log_path: str) -> CommitLog:
    made = CommitLog.create(log_path)
    made.create_topic("orders", queues=2)
    return made


def send(log: CommitLog, batch_id: int, bodies: list[str], **columns: Any) -> None:
    decide(log, prepare(log, batch_id, {"body": bodies, "keys": [f"k-{b}" for b in bodies], **columns}))


def stream(spark: SparkSession, log: CommitLog, **options: str) -> DataFrame:
    frame = spark.readStream.format("txmq").option("path", log.path).option("subscribe", "orders")
    return frame.option("consumerGroup", GROUP).option("startingOffsets", "earliest").options(**options).load()


class Diary:
    """What a listener on the executors did, in a file that all of them append to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, message: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**message, "at": time.time()}) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def bodies(self) -> list[str]:
        return [e["body"] for e in self.entries()]


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    return Diary(tmp_path / "diary.jsonl")


def fails(diary: Diary, times: dict[str, int], bad: Any, good: Any) -> Callable[[pa.Table], list[Any]]:
    """A listener to which some bodies are not welcome for the first few times."""

    def listen(messages: pa.Table) -> list[Any]:
        found = []
        for row in messages.select(["body", "queue_id", "topic", "msg_id", "reconsume_times"]).to_pylist():
            body = row["body"].decode()
            before = diary.bodies().count(body)
            diary.note({**row, "body": body})
            found.append(bad if before < times.get(body, 0) else good)
        return found

    return listen


@pytest.fixture
def running() -> Iterator[Callable[[Any, Path], StreamingQuery]]:
    queries: list[StreamingQuery] = []

    def start(writer: Any, checkpoint: Path) -> StreamingQuery:
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(processingTime="200 milliseconds").start()
        queries.append(query)
        return query

    yield start
    for query in queries:
        query.stop()


def run(writer: Any, checkpoint: Path) -> None:
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def wait_until(what: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


# ---------------------------------------------------------------- concurrently
@pytest.mark.long
def test_what_fails_comes_again_later_and_the_rest_does_not_wait(
    spark: SparkSession, log: CommitLog, diary: Diary, tmp_path: Path, running: Any
) -> None:
    send(log, 0, ["a", "b", "c"])
    listener = fails(diary, {"b": 2}, FAILURE, SUCCESS)
    query = running(txmq.consume(stream(spark, log), GROUP, listener, log=log, delay_level=1), tmp_path / "cp")
    wait_until(lambda: "c" in diary.bodies())
    send(log, 1, ["d"])
    wait_until(lambda: diary.bodies().count("b") == 3 and "d" in diary.bodies())
    wait_until(lambda: sum(txmq.ConsumerGroup(log, GROUP).lag()["lag"].to_pylist()) == 0)
    assert query.exception() is None
    entries = diary.entries()
    tries = [e for e in entries if e["body"] == "b"]
    assert [e["reconsume_times"] for e in tries] == [0, 1, 2]
    assert {e["topic"] for e in entries} == {"orders"}  # as it came first
    assert len({e["msg_id"] for e in tries}) == 1
    assert all(later["at"] - earlier["at"] >= 1 for earlier, later in pairwise(tries))
    assert sorted(diary.bodies()) == ["a", "b", "b", "b", "c", "d"]
    assert log.read(retry_topic(GROUP)).num_rows == 2


@pytest.mark.turns(3, among="consume: failures")
def test_a_poisoned_message_dies_and_can_be_sent_again(
    spark: SparkSession, log: CommitLog, diary: Diary, tmp_path: Path, running: Any
) -> None:
    send(log, 0, ["good", "poison"], properties=pa.array([None, [("region", "eu")]], pa.map_(pa.string(), pa.string())))

    def one(message: txmq.MessageExt) -> txmq.ConsumeResult | None:
        body = bytes(message.body).decode()
        diary.note({"body": body, "properties": dict(message.properties or {}), "times": message.reconsume_times})
        if body == "poison" and diary.bodies().count(body) == 1:
            raise ValueError("I cannot read this")
        return SUCCESS

    running(
        txmq.consume(stream(spark, log), GROUP, txmq.EachMessage(one), log=log, max_reconsume_times=0), tmp_path / "cp"
    )
    letters = txmq.DeadLetters(log, GROUP)
    wait_until(lambda: letters.list().num_rows == 1)
    (letter,) = letters.list().to_pylist()
    assert (letter["body"], letter["topic"], letter["reconsume_times"]) == (b"poison", "orders", 0)
    assert letter["reason"] == "ValueError: I cannot read this"
    assert letter["properties"] == [("region", "eu")]
    assert letter["msg_id"] == log.read("orders").filter(pa.compute.field("body") == b"poison")["msg_id"][0].as_py()
    assert letters.resend() == 1
    assert letters.resend() == 0
    wait_until(lambda: diary.bodies().count("poison") == 2)
    last = [e for e in diary.entries() if e["body"] == "poison"][-1]
    assert (last["times"], last["properties"]) == (0, {"region": "eu"})
    with pytest.raises(txmq.OffsetError, match="no dead letter 7"):
        letters.resend([7])


@pytest.mark.turns(2)
@pytest.mark.parametrize("crash", ["before the commit", "after the commit"])
def test_a_batch_that_runs_again_sends_back_once(
    spark: SparkSession, log: CommitLog, diary: Diary, tmp_path: Path, crash: str
) -> None:
    """The retries are in the log, and Spark has not committed the micro-batch."""
    send(log, 0, ["a", "b", "c", "d"])
    listener = fails(diary, {"a": 1, "c": 1}, FAILURE, SUCCESS)
    with at("prepared" if crash == "before the commit" else "sent", raising(RuntimeError("power cut"))):
        writer = txmq.consume(stream(spark, log), GROUP, listener, log=log, delay_level=1)
        with pytest.raises(StreamingQueryException, match="power cut"):
            writer.option("checkpointLocation", str(tmp_path / "cp")).trigger(
                availableNow=True
            ).start().awaitTermination()
    assert sorted(diary.bodies()) == ["a", "b", "c", "d"]
    writer = txmq.consume(stream(spark, log), GROUP, listener, log=log, delay_level=1)
    run(writer, tmp_path / "cp")
    wait_until(lambda: bool(log.engine.ledger.place_due()) or log.read(retry_topic(GROUP)).num_rows == 2)
    run(writer, tmp_path / "cp")
    assert sorted(diary.bodies()) == ["a", "a", "b", "c", "c", "d"]  # the others were not consumed again
    assert log.read(retry_topic(GROUP)).num_rows == 2


# ---------------------------------------------------------------- orderly
@pytest.mark.turns(3, among="consume: failures")
@FROM_4_2
def test_a_suspended_queue_keeps_its_order_while_others_go_on(
    spark: SparkSession, log: CommitLog, diary: Diary, tmp_path: Path
) -> None:
    send(log, 0, [f"{q}-{i}" for i in range(20) for q in (0, 1)], queue_id=[0, 1] * 20)
    listener = fails(diary, {"0-5": 2, "0-9": 1}, FAILURE, SUCCESS)
    writer = txmq.consume(
        stream(spark, log, ordered="true"), GROUP, txmq.EachMessage(_one_by_one(listener)), "orderly", log=log,
        suspend_s=0.2,
    )  # fmt: skip
    run(writer, tmp_path / "cp")
    seen = defaultdict(list)
    for entry in diary.entries():
        seen[entry["queue_id"]].append(int(entry["body"].split("-")[1]))
    assert seen[1] == list(range(20))
    assert seen[0] == [*range(6), 5, *range(5, 10), *range(9, 20)]
    entries = diary.entries()
    ends = {q: max(e["at"] for e in entries if e["queue_id"] == q) for q in (0, 1)}
    assert ends[1] < ends[0]
    positions = txmq.ConsumerGroup(log, GROUP).positions()
    assert {q: n for q, n in positions.items() if q[0] == "orders"} == {("orders", 0): 20, ("orders", 1): 20}


@pytest.mark.long
def test_a_suspended_queue_does_not_keep_later_micro_batches_waiting(
    spark: SparkSession, log: CommitLog, diary: Diary, tmp_path: Path, running: Any
) -> None:
    stuck = tmp_path / "stuck"
    stuck.touch()

    def book(message: txmq.MessageExt) -> txmq.ConsumeResult:
        body = bytes(message.body).decode()
        diary.note({"body": body})
        return FAILURE if body == "0-1" and stuck.exists() else SUCCESS

    def of(queue_id: int) -> list[str]:
        return [body for body in diary.bodies() if body.startswith(f"{queue_id}-")]

    def start() -> StreamingQuery:
        frame = stream(spark, log, ordered="true")
        return running(txmq.consume(frame, GROUP, txmq.EachMessage(book), "orderly", suspend_s=0.3), tmp_path / "cp")  # type: ignore[no-any-return]

    send(log, 0, [f"{q}-{i}" for i in range(3) for q in (0, 1)], queue_id=[0, 1] * 3)
    query = start()
    for batch in range(1, 4):
        send(log, batch, [f"{q}-{i}" for i in range(batch * 3, batch * 3 + 3) for q in (0, 1)], queue_id=[0, 1] * 3)
        wait_until(lambda done=batch * 3 + 3: of(1) == [f"1-{i}" for i in range(done)])
        if batch == 2:
            wait_until(lambda: txmq.ConsumerGroup(log, GROUP).positions()[("orders", 1)] == 9)
            query.stop()
            query = start()
    assert of(0)[:2] == ["0-0", "0-1"]
    assert set(of(0)[1:]) == {"0-1"}
    lag = {
        row["queue_id"]: row["lag"]
        for row in txmq.ConsumerGroup(log, GROUP).lag().to_pylist()
        if row["topic"] == "orders"
    }
    assert lag[0] == 11
    stuck.unlink()
    wait_until(lambda: of(0)[-1] == "0-11")
    freed = of(0)[of(0).index("0-2") :]
    assert freed == [f"0-{i}" for i in range(2, 12)]
    assert of(1) == [f"1-{i}" for i in range(12)]


@pytest.mark.long
def test_a_second_query_of_a_group_is_told(
    spark: SparkSession, log: CommitLog, diary: Diary, tmp_path: Path, running: Any
) -> None:
    listener = fails(diary, {}, FAILURE, SUCCESS)
    send(log, 0, ["first"])
    first = running(txmq.consume(stream(spark, log), GROUP, listener, log=log), tmp_path / "one")
    wait_until(lambda: "first" in diary.bodies())
    second = running(txmq.consume(stream(spark, log), GROUP, listener, log=log), tmp_path / "two")
    n = 1
    while second.isActive:
        send(log, n, ["a", "b"], queue_id=[0, 1])
        n += 1
        time.sleep(0.5)
        assert n < 200
    assert "is being read by an older query" in str(second.exception())
    send(log, n, ["last"])
    wait_until(lambda: "last" in diary.bodies())
    assert first.isActive


@pytest.mark.turns(3, among="consume: failures")
@FROM_4_2
def test_a_message_that_holds_its_queue_up_dies_when_told_to(
    spark: SparkSession, log: CommitLog, diary: Diary, tmp_path: Path
) -> None:
    send(log, 0, ["a", "poison", "b"], queue_id=[0, 0, 0])
    listener = fails(diary, {"poison": 99}, FAILURE, SUCCESS)
    writer = txmq.consume(
        stream(spark, log, ordered="true"), GROUP, txmq.EachMessage(_one_by_one(listener)), "orderly", log=log,
        suspend_s=0.05, max_reconsume_times=2,
    )  # fmt: skip
    run(writer, tmp_path / "cp")
    assert diary.bodies() == ["a", "poison", "poison", "poison", "b"]
    assert [e["reconsume_times"] for e in diary.entries()] == [0, 0, 1, 2, 0]
    (letter,) = txmq.DeadLetters(log, GROUP).list().to_pylist()
    assert (letter["body"], letter["reconsume_times"]) == (b"poison", 2)


@pytest.mark.long
@FROM_4_2
def test_an_orderly_batch_that_runs_again_goes_on_where_it_stopped(
    spark: SparkSession, log: CommitLog, diary: Diary, tmp_path: Path
) -> None:
    send(log, 0, [str(i) for i in range(6)], queue_id=[0] * 6)
    listener = fails(diary, {"3": 99}, FAILURE, SUCCESS)

    def start(listen: Any) -> StreamingQuery:
        writer = txmq.consume(
            stream(spark, log, ordered="true"), GROUP, txmq.EachMessage(_one_by_one(listen)), "orderly", log=log,
            suspend_s=0.05,
        )  # fmt: skip
        return writer.option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True).start()

    query = start(listener)
    wait_until(lambda: diary.bodies().count("3") >= 2)
    query.stop()  # perhaps within a micro-batch
    before = diary.bodies()
    start(fails(diary, {}, FAILURE, SUCCESS)).awaitTermination()
    assert diary.bodies()[len(before) :] in (["3", "4", "5"], ["3", "3", "4", "5"])
    assert before[:3] == ["0", "1", "2"]


def _one_by_one(listen: Callable[[pa.Table], list[Any]]) -> Callable[[txmq.MessageExt], Any]:
    def one(message: txmq.MessageExt) -> Any:
        names = ("queue_id", "topic", "msg_id", "reconsume_times")
        row = {"body": bytes(message.body), **{name: getattr(message, name) for name in names}}
        return listen(pa.Table.from_pylist([row]))[0]

    return one


# ---------------------------------------------------------------- what cannot be
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"mode": "broadly"}, txmq.OptionError, "neither 'concurrently' nor 'orderly'"),
        ({"listener": "shop:listener"}, txmq.ListenerError, "a function of a pyarrow.Table is expected"),
        ({"group": "no group"}, txmq.MessageError, "consumerGroup"),
        ({"max_reconsume_times": -1}, txmq.OptionError, "max_reconsume_times=-1"),
        ({"delay_level": 19}, txmq.OptionError, "1 to 18"),
        ({"suspend_s": float("nan")}, txmq.OptionError, "suspend_s"),
        ({"app_id": "a.b"}, txmq.MessageError, "appId"),
    ],
)
def test_arguments_are_checked_before_the_query_starts(
    spark: SparkSession, log: CommitLog, change: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    given = {"group": GROUP, "listener": len, "log": log, **change}
    with pytest.raises(error, match=sentence):
        txmq.consume(stream(spark, log), **given)


@pytest.mark.parametrize(
    ("options", "mode", "sentence"),
    [
        ({"consumerGroup": "others"}, "concurrently", "not read for consumer group 'points'"),
        ({}, "orderly", "'ordered', 'true'"),
    ],
)
def test_a_stream_that_would_lose_what_fails_is_refused(
    spark: SparkSession, log: CommitLog, options: dict[str, str], mode: str, sentence: str
) -> None:
    with pytest.raises(txmq.OptionError, match=sentence):
        txmq.consume(stream(spark, log, **options), GROUP, len, mode)  # type: ignore[arg-type]


def test_a_stream_of_several_logs_is_refused_until_it_says_where_its_retries_go(
    spark: SparkSession, log: CommitLog, tmp_path: Path
) -> None:
    other = CommitLog.create(tmp_path / "other")
    other.create_topic("orders")
    both = stream(spark, log).union(stream(spark, other))
    with pytest.raises(txmq.OptionError, match="reads several commit logs: pass log="):
        txmq.consume(both, GROUP, len)  # type: ignore[arg-type]
    txmq.consume(both, GROUP, len, log=other)  # type: ignore[arg-type]


@pytest.mark.turns(3, among="consume: failures")
def test_an_orderly_stream_that_was_repartitioned_stops_and_keeps_its_place(
    spark: SparkSession, log: CommitLog, tmp_path: Path
) -> None:
    send(log, 0, list("abcdefgh"), queue_id=[0] * 8)
    frame = stream(spark, log, ordered="true").repartition(2, "queue_offset")
    with pytest.raises(StreamingQueryException, match="queue 0 of topic 'orders' came in two partitions"):
        run(txmq.consume(frame, GROUP, lambda messages: SUCCESS, "orderly"), tmp_path / "cp")
    assert txmq.ConsumerGroup(log, GROUP).positions().get(("orders", 0), 0) == 0


def test_a_stream_without_its_columns_is_refused(spark: SparkSession, log: CommitLog) -> None:
    with pytest.raises(txmq.OptionError, match="no column 'msg_id'"):
        txmq.consume(stream(spark, log).drop("msg_id"), GROUP, len, log=log)  # type: ignore[arg-type]


@pytest.mark.turns(3)
@pytest.mark.parametrize("answer", [True, [SUCCESS], "SUCCESS"])
def test_an_answer_that_is_none_is_a_failure_of_the_messages_and_ends_no_query(
    spark: SparkSession, log: CommitLog, tmp_path: Path, answer: Any
) -> None:
    send(log, 0, ["a", "b"], queue_id=[0, 0])
    writer = txmq.consume(stream(spark, log), GROUP, lambda messages: answer, log=log, max_reconsume_times=0)
    run(writer, tmp_path / "cp")
    assert txmq.ConsumerGroup(log, GROUP).positions()["orders", 0] == 2
    dead = txmq.DeadLetters(log, GROUP).list()
    assert [reason.startswith("the listener returned") for reason in dead["reason"].to_pylist()] == [True, True]
