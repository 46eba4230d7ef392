"""A relay hands committed messages over to Kafka once and in order, and refuses what would break that."""

from __future__ import annotations

import shutil
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import confluent_kafka as ck
import pyarrow as pa
import pytest

from rmq_spark import CommitLog, KafkaRelay
from rmq_spark.errors import (
    LostFileError,
    OptionError,
    PoisonMessageError,
    RelayError,
    RelayFencedError,
    RelayRefusedError,
    TopicNotFoundError,
)
from rmq_spark.testing import InMemoryCommitLog
from tests.kafka.broker import QUIET, Resuming
from tests.kafka.handing import Handing, committed
from tests.support.half_batches import (
    commit,
    decide_one,
    half_file,
    let_leave,
    make_log,
    pending,
    prepare,
    roll_back,
    send,
    split,
)
from tests.support.inside import PROPERTIES, TIMESTAMP, Change, Runtime, UndeliveredError, Who
from tests.support.limits import Limit, limited
from tests.support.meanwhile import at, before_next

NOW = datetime.now(timezone.utc)


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    return make_log("memory", tmp_path, orders=2)


def full(n: int) -> pa.Table:
    """Messages with everything that a message can have, and messages with as little as possible."""
    return pa.table(
        {
            "body": pa.array([f"{n}".encode(), b"", b"\x00\xff"]),
            "tags": pa.array(["paid", None, "ä"]),
            "keys": pa.array(["a b", "only keys", None]),
            "sharding_key": pa.array(["s", None, None]),
            "properties": pa.array([[("region", "eu"), ("empty", "")], None, [("txmq", "x")]], PROPERTIES),
            "born_timestamp": pa.array([NOW - timedelta(days=9000), NOW, NOW + timedelta(minutes=5)], TIMESTAMP),
        }
    )


# ---------------------------------------------------------------- what a consumer sees
def test_a_consumer_sees_what_the_log_committed_once_and_in_order(handing: Handing, log: CommitLog) -> None:
    log.create_topic("points", 3)
    for n in range(3):
        commit(log, prepare(log, n, full(n)))
        commit(log, prepare(log, n, full(n), app="points", topic="points"))
    mixed = send(log, "mixed", 9, per="message")
    kept, dropped = split(pending(log, mixed), 3)
    decide_one(log.engine, mixed, 1, commit=kept, rollback=dropped, who=Who.EXECUTE)
    roll_back(log, send(log, "rolled back"))
    send(log, "open")
    relay = handing.relay(log, max_batch_messages=4)
    report = relay.run_once()
    assert report.messages == handing.require_same(log, "orders", "points") == 24
    assert report.by_topic == {"orders": 15, "points": 9}
    assert report.transactions >= 6
    assert str(report).startswith("24 messages handed over (orders 15, points 9), in ")
    assert not relay.run_once()
    log.drain()
    commit(log, prepare(log, 7, 5))  # what is drained and what is not are read from two tables
    assert relay.run_once().messages == 5
    relay.close()
    commit(log, prepare(log, 8, 5))
    again = handing.relay(log)
    assert again.run_once().messages == 5
    assert again.positions == dict(log.engine.tails())
    assert handing.require_same(log, "orders", "points") == 34


def test_a_stream_of_commits_is_followed_until_it_is_told_to_stop(handing: Handing, log: CommitLog) -> None:
    relay, stop, seen = handing.relay(log), threading.Event(), threading.Semaphore(0)
    counts: list[int] = []

    def show(report: object) -> None:
        counts.append(relay.report.messages)
        seen.release()

    thread = threading.Thread(target=relay.run, args=(stop, show))
    thread.start()
    try:
        for n in range(3):
            commit(log, prepare(log, n, 4))
            assert seen.acquire(timeout=60)
    finally:
        stop.set()
        thread.join()
    assert sum(counts) == 12
    assert handing.require_same(log) == 12


def test_a_relay_of_a_log_without_topics_waits_for_the_first(handing: Handing, tmp_path: Path) -> None:
    log = InMemoryCommitLog()
    relay = handing.relay(log)
    assert not relay.run_once()
    log.create_topic("orders", 1)
    commit(log, prepare(log, 0))
    assert relay.run_once().messages == handing.require_same(log) == 5


@pytest.mark.long
def test_a_topic_that_is_made_later_is_handed_over_from_its_first_message(handing: Handing, log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    relay = handing.relay(log, start="latest")
    assert not relay.run_once()
    log.create_topic("late", 1)
    commit(log, prepare(log, 1, topic="late"))
    assert relay.run_once().by_topic == {"late": 5}
    relay.close()
    commit(log, prepare(log, 2, 3))  # after its first start "latest" means what it meant then
    assert handing.relay(log, start="latest").run_once().by_topic == {"orders": 3}
    assert handing.seen() == {
        q: [m for m in ms if "app:2:" in m["msg_id"]] for q, ms in committed(log, "orders").items()
    }
    assert handing.require_same(log, "late") == 5


@pytest.mark.long
def test_shards_share_the_queues_and_agree_on_their_number(handing: Handing, log: CommitLog) -> None:
    log.create_topic("points", 3)
    commit(log, prepare(log, 0, 10))
    commit(log, prepare(log, 1, 10, topic="points"))
    shards = [handing.relay(log, shards=2, shard=n) for n in range(2)]
    reports = [shard.run_once() for shard in shards]
    assert [report.messages > 0 for report in reports] == [True, True]
    assert handing.require_same(log, "orders", "points") == 20
    assert not set(shards[0].positions) & set(shards[1].positions)
    with pytest.raises(RelayRefusedError, match=r"has 2 shards, and this process was told 1.*reshard=True"):
        handing.relay(log).run_once()
    commit(log, prepare(log, 2, 10))
    assert shards[0].run_once().messages + shards[1].run_once().messages == 10, "a refused start fences nobody"
    alone = handing.relay(log, reshard=True)
    assert not alone.run_once()
    commit(log, prepare(log, 3, 10))
    assert alone.run_once().messages == 10
    with pytest.raises(RelayFencedError, match="another process runs relay"):
        shards[0].run_once()
    with pytest.raises(RelayError, match="start it again"):
        shards[1].run_once()
    with pytest.raises(RelayRefusedError, match="has 1 shards, and this process was told 2"):
        shards[1].run_once()
    assert handing.require_same(log, "orders", "points") == 40


# ---------------------------------------------------------------- fencing
def test_a_second_relay_fences_the_first(handing: Handing, log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    first, second = handing.relay(log), handing.relay(log)
    first.run_once()
    second.run_once()
    commit(log, prepare(log, 1))
    with pytest.raises(RelayFencedError, match="Do not start it again"):
        first.run_once()
    assert second.run_once().messages == 5
    assert handing.require_same(log) == 10


@pytest.mark.long
def test_a_transaction_that_took_too_long_is_told_from_a_fence(handing: Handing, log: CommitLog, limit: Limit) -> None:
    """Kafka's client says "fenced" in both cases."""
    relay = handing.relay(log, transaction_timeout=1.0)
    relay.run_once()
    commit(log, prepare(log, 0))
    limit(LOOK_AGAIN_S=0.05)
    too_long = pytest.raises(RelayError, match=r"took more than the transaction timeout, 1 s.*start it again")
    with at("relay step", lambda: wait_for_an_abort(handing), step="delivered"), too_long as problem:
        relay.run_once()
    assert type(problem.value) is RelayError
    assert relay.run_once().messages == 5
    assert handing.require_same(log) == 5


def wait_for_an_abort(handing: Handing) -> None:
    """Come back when no transaction is open on the positions topic."""
    partition = ck.TopicPartition(handing.positions_topic, 0)
    found = {}
    for isolation in ("read_committed", "read_uncommitted"):
        found[isolation] = ck.Consumer(
            {"bootstrap.servers": handing.kafka.servers, "group.id": "tests", "isolation.level": isolation},
            logger=QUIET,
        )
    try:
        while len({c.get_watermark_offsets(partition, timeout=30)[1] for c in found.values()}) > 1:
            threading.Event().wait(0.05)
    finally:
        for consumer in found.values():
            consumer.close()


@pytest.mark.turns(2, among="Kafka: what is refused")
def test_a_position_behind_another_process_s_open_transaction_is_not_missed(handing: Handing, log: CommitLog) -> None:
    """A read_committed consumer is told that the topic ends where that transaction begins."""
    relay = handing.relay(log)
    relay.run_once()
    hung = ck.Producer(
        {"bootstrap.servers": handing.kafka.servers, "transactional.id": "hung", "transaction.timeout.ms": 1000},
        logger=QUIET,
    )
    hung.init_transactions(30)
    hung.begin_transaction()
    hung.produce(handing.positions_topic, b"{}", b'{"relay":"another"}', 0)
    assert hung.flush(30) == 0
    commit(log, prepare(log, 0))
    relay.run_once()
    relay.close()
    again = handing.relay(log)
    assert not again.run_once()
    assert handing.require_same(log) == 5


@pytest.mark.turns(3, among="Kafka: what fails")
def test_a_transaction_that_stays_open_before_the_claim_is_not_waited_for_for_ever(
    handing: Handing, log: CommitLog, limit: Limit
) -> None:
    handing.kafka.create(handing.positions_topic, cleanup_policy="compact")
    hung = ck.Producer({"bootstrap.servers": handing.kafka.servers, "transactional.id": "open"}, logger=QUIET)
    hung.init_transactions(30)
    hung.begin_transaction()
    hung.produce(handing.positions_topic, b"{}", b'{"relay":"another"}', 0)
    assert hung.flush(30) == 0
    limit(READ_SLACK_S=-29.5)
    with pytest.raises(RelayError, match="a transaction of another process is open before it"):
        handing.relay(log, transaction_timeout=60.0).run_once()
    hung.abort_transaction(30)
    limit(READ_SLACK_S=5.0)
    other = handing.relay(log, relay=handing.kafka.name("relay"))
    assert not other.run_once(), "the claim that failed is open no more"


# ---------------------------------------------------------------- another log, or another copy of it
@pytest.mark.turns(2, among="Kafka: what is refused")
def test_a_log_that_was_made_anew_is_refused(handing: Handing, log: CommitLog, tmp_path: Path) -> None:
    commit(log, prepare(log, 0))
    handing.relay(log).run_once()
    anew = make_log("memory", tmp_path, orders=2)
    commit(anew, prepare(anew, 0))
    with pytest.raises(RelayRefusedError, match=f"has handed over commit log {log.id}.*a relay of another name"):
        handing.relay(anew).run_once()
    assert handing.require_same(log) == 5


@pytest.mark.turns(2, among="Kafka: what is refused")
def test_an_older_copy_of_the_log_is_refused_also_when_it_has_grown_since(handing: Handing, tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, prepare(log, 0))
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    commit(log, prepare(log, 1))
    relay = handing.relay(log)
    relay.run_once()
    seen = handing.ids()
    shutil.rmtree(tmp_path / "log")
    shutil.move(tmp_path / "copy", tmp_path / "log")
    older = CommitLog.open(tmp_path / "log")
    with pytest.raises(RelayRefusedError, match=r"up to offset 9 were handed over, and the log ends at 5"):
        handing.relay(older).run_once()
    commit(older, prepare(older, 0, 7, app="other"))
    said = r"message app:1\S*:0.4, committed at .* was handed over from offset 9.*has other:0\S*:0.4, committed at"
    with pytest.raises(RelayRefusedError, match=said):
        handing.relay(older).run_once()
    assert handing.ids() == seen


# ---------------------------------------------------------------- what has expired
@pytest.mark.turns(2, among="Kafka: what is refused")
def test_what_expired_before_stops_the_relay_unless_it_is_to_skip_it(handing: Handing, log: CommitLog) -> None:
    commit(log, send(log, "first", 4))
    handing.relay(log).run_once()
    commit(log, send(log, "expires", 6))
    log.drain()
    log.engine.topic_store.set_retention("orders", 0.0)
    assert let_leave(log).files_expired > 0
    log.set_retention("orders", None)
    commit(log, send(log, "after", 4))
    with pytest.raises(RelayRefusedError, match=r"queue 0: offsets 2 to 4 have expired.*on_expired='skip'"):
        handing.relay(log).run_once()
    relay = handing.relay(log, on_expired="skip")
    report = relay.run_once()
    assert (report.messages, report.skipped) == (4, 6)
    assert "6 expired messages skipped" in str(report)
    assert [m["offset"] for m in handing.seen()[0]] == [0, 1, 5, 6]
    gaps = {(k["queue"], k["gap"], v["next_offset"]) for k, v in handing.positions() if "gap" in k}
    assert gaps == {(0, 2, 5), (1, 2, 5)}
    relay.close()
    assert not handing.relay(log).run_once(), "the gap is behind it for good"


@pytest.mark.turns(2, among="Kafka: what is refused")
def test_what_expires_while_it_is_read_is_skipped_and_what_is_lost_is_not(handing: Handing, tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    relay = handing.relay(log, on_expired="skip")
    relay.run_once()
    commit(log, prepare(log, 0, 2))
    log.drain()

    def expire() -> None:
        log.engine.topic_store.set_retention("orders", 0.0)
        let_leave(log)
        log.set_retention("orders", None)
        for file in (tmp_path / "log" / "messages").glob("*.parquet"):
            file.unlink()

    before_next(relay._source, "batches", expire)
    assert relay.run_once().skipped == 2
    commit(log, record := prepare(log, 1, 2))
    half_file(log, record).rename(tmp_path / "lost")
    with pytest.raises(LostFileError, match=half_file(log, record).name):
        relay.run_once()
    (tmp_path / "lost").rename(half_file(log, record))
    assert relay.run_once().messages == 2


@pytest.mark.turns(2, among="Kafka: what is refused")
def test_messages_that_the_log_has_lost_are_not_skipped(handing: Handing, log: CommitLog) -> None:
    commit(log, send(log, "lost", 2))
    log.drain()
    commit(log, send(log, "after", 2))
    table = log.another().engine.messages_table
    lost = Change(remove=table.actions()["path"].to_pylist())
    table.compare_and_set(lambda _: lost, lambda _: True)
    with pytest.raises(RelayRefusedError, match="queue 0: offsets 0 to 0 are not in the commit log: restore it"):
        handing.relay(log, on_expired="skip").run_once()
    assert not any(handing.ids().values())


def test_a_new_relay_begins_at_the_first_message_that_is_kept(handing: Handing, log: CommitLog) -> None:
    commit(log, send(log, "expires", 6))
    log.drain()
    log.engine.topic_store.set_retention("orders", 0.0)
    let_leave(log)
    commit(log, send(log, "after", 2))
    assert handing.relay(log).run_once().messages == 2
    assert handing.require_same(log) == 2


# ---------------------------------------------------------------- what Kafka refuses
def poisoned(log: CommitLog, kind: str) -> list[str]:
    """Commit 40 messages of one queue, of which two are poison; returns the ids of those two."""
    bodies, times = [b"%d" % n for n in range(40)], [NOW] * 40
    for n in (17, 30):
        if kind == "large":
            bodies[n] = bytes(2_000_000)
        else:
            times[n] = NOW + timedelta(days=2)
    record = prepare(log, 0, pa.table({"body": pa.array(bodies), "born_timestamp": pa.array(times, TIMESTAMP)}))
    commit(log, record)
    rows = log.read("orders", columns=["msg_id", "body", "born_timestamp"]).to_pylist()
    return [r["msg_id"] for r in rows if len(r["body"]) > 100 or r["born_timestamp"] > NOW + timedelta(days=1)]


@pytest.mark.turns(3, among="Kafka: what fails")
@pytest.mark.parametrize("kind", ["large", pytest.param("late", marks=pytest.mark.long)])
def test_a_message_that_kafka_refuses_ends_the_relay_or_is_parked(handing: Handing, tmp_path: Path, kind: str) -> None:
    log = make_log("memory", tmp_path, orders=1)
    poison = poisoned(log, kind)
    expected = [m["msg_id"] for m in committed(log, "orders")[0]]
    words = "MSG_SIZE_TOO_LARGE" if kind == "large" else "INVALID_TIMESTAMP"
    with pytest.raises(PoisonMessageError, match=rf"refuses message {poison[0]} .*{words}.*on_poison='park'"):
        handing.relay(log).run_once()
    assert handing.ids()[0] == expected[:17], "all before it is handed over"
    report = handing.relay(log, on_poison="park").run_once()
    assert (report.messages, report.parked) == (21, 2)
    assert handing.ids()[0] == [i for i in expected if i not in poison]
    parked = handing.parked()
    headers = [{name: value.decode() for name, value in message.headers()} for message in parked]
    assert [h["txmq.msg_id"] for h in headers] == poison
    assert [h["txmq.parked.queue_id"] for h in headers] == ["0", "0"]
    assert all(words in h["txmq.parked.reason"] for h in headers)
    assert [m.value() for m in parked] == ([None, None] if kind == "large" else [b"17", b"30"])


@pytest.mark.turns(2, among="Kafka: what is refused")
def test_what_the_parking_topic_refuses_too_ends_the_relay(handing: Handing, tmp_path: Path) -> None:
    log = make_log("memory", tmp_path, orders=1)
    handing.kafka.create(handing.parking_topic, max_message_bytes=100)
    poisoned(log, "large")
    with pytest.raises(PoisonMessageError, match=r"and it cannot be parked in '.*-parked': .*MSG_SIZE_TOO_LARGE"):
        handing.relay(log, on_poison="park", kafka={"message.max.bytes": 1_000_000}).run_once()
    assert len(handing.ids()[0]) == 17


def test_a_relay_that_is_told_to_stop_ends_after_its_transaction(handing: Handing, tmp_path: Path) -> None:
    log = make_log("memory", tmp_path, orders=1)
    relay, stop = handing.relay(log, max_batch_messages=20), threading.Event()
    relay.run_once()
    poisoned(log, "large")
    with at("relay step", stop.set, step="committed"):
        assert relay.run_once(stop).messages == 17, "before the first that Kafka refuses"
    assert relay.positions == {("orders", 0): 17}


@pytest.mark.turns(2, among="Kafka: what is refused")
@pytest.mark.parametrize("first", [False, True])
def test_a_position_that_kafka_refuses_is_no_poison_message(handing: Handing, log: CommitLog, first: bool) -> None:
    handing.kafka.create(handing.positions_topic, cleanup_policy="compact", max_message_bytes=100 if first else 400)
    relay = handing.relay(log, topic_pattern="long.*", on_poison="park")
    if not first:
        assert not relay.run_once(), "a claim is short enough"
    log.create_topic("long" * 25, 1)
    commit(log, prepare(log, 0, app="a" * 150, topic="long" * 25))
    said = "the relay's claim in '.*-positions' was aborted" if first else "Kafka refuses a position in '.*-positions'"
    with pytest.raises(RelayRefusedError, match=f"{said}: .*MSG_SIZE_TOO_LARGE"):
        relay.run_once()
    assert handing.parked() == []


def test_more_messages_than_kafka_s_client_can_hold_are_handed_over(handing: Handing, log: CommitLog) -> None:
    commit(log, prepare(log, 0, 50))
    assert handing.relay(log, kafka={"queue.buffering.max.messages": 5}).run_once().messages == 50
    assert handing.require_same(log) == 50


def test_messages_as_large_as_the_topic_of_kafka_takes_are_handed_over(handing: Handing, tmp_path: Path) -> None:
    log = make_log("memory", tmp_path, orders=1)
    handing.kafka.create(handing.topic(), 1, max_message_bytes=5_000_000)
    commit(log, prepare(log, 0, pa.table({"body": pa.array([bytes(4 * 1024 * 1024)] * 3)})))
    assert handing.relay(log).run_once().messages == 3
    assert handing.require_same(log) == 3


# ---------------------------------------------------------------- topics of Kafka
def test_topics_of_kafka_must_be_there_and_have_a_partition_for_each_queue(handing: Handing, log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    with pytest.raises(RelayRefusedError, match=r"has no topic '.*orders': create it.*orders: 2.*create_topics=True"):
        handing.relay(log, create_topics=False).run_once()
    handing.kafka.create(handing.topic(), 1)
    with pytest.raises(RelayRefusedError, match="has 1 partitions, and the log's topic has 2 queues"):
        handing.relay(log).run_once()
    with pytest.raises(TopicNotFoundError, match="orders"):
        handing.relay(log, topics=["ordes"]).run_once()


@pytest.mark.turns(3, among="Kafka: what fails")
def test_a_topic_of_kafka_that_is_deleted_is_made_anew_at_the_next_start(handing: Handing, log: CommitLog) -> None:
    """A relay that went on in the same process knew that the topic was there."""
    relay = handing.relay(log, retry_timeout=0.0, kafka={"message.timeout.ms": 2000})
    commit(log, prepare(log, 0))
    relay.run_once()
    commit(log, prepare(log, 1))
    handing.kafka.delete(handing.topic())
    with pytest.raises(RelayError) as ended:
        relay.run_once()
    assert type(ended.value) is RelayError
    assert relay.run_once().messages == 5
    assert sum(map(len, handing.ids().values())) == 5


@pytest.mark.turns(3, among="Kafka: what fails")
def test_topics_that_others_create_and_a_broker_does_not_know_yet_are_waited_for(handing: Handing) -> None:
    """A start failed where a broker did not know yet what the controller had created."""
    kafka, runtime, positions = handing.kafka, Runtime(), handing.positions_topic
    log = InMemoryCommitLog(topics={"orders": 2}, runtime=runtime)
    commit(log, prepare(log, 0))
    relay = handing.relay(log)
    before_next(relay._brokers._admin, "create_topics", lambda: kafka.create(positions, cleanup_policy="compact"))
    before_next(relay._brokers, "batch_bytes", lambda: kafka.delete(handing.topic()))
    before_next(runtime, "sleep", lambda: kafka.create(handing.topic(), 2))
    assert relay.run_once().messages == handing.require_same(log) == 5


def test_a_topic_that_kafka_does_not_create_is_named(handing: Handing, log: CommitLog) -> None:
    with pytest.raises(RelayError, match=r"topic '.*-positions' was created, .*INVALID_REPLICATION_FACTOR"):
        handing.relay(log, replication_factor=2).run_once()


def test_times_that_kafka_replaces_are_warned_of(
    handing: Handing, log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    handing.kafka.create(handing.topic(), 2, message_timestamp_type="LogAppendTime")
    handing.relay(log, kafka={"batch.size": 100_000}).run_once()
    assert f"topic '{handing.topic()}' of Kafka has times of its own" in caplog.text


def test_a_positions_topic_that_forgets_is_refused(handing: Handing, log: CommitLog) -> None:
    handing.kafka.create(handing.positions_topic, 1, cleanup_policy="delete")
    with pytest.raises(RelayRefusedError, match=r"has cleanup\.policy=delete"):
        handing.relay(log).run_once()


@pytest.mark.turns(3, among="Kafka: what fails")
def test_a_broker_that_answers_late_is_asked_again(
    handing: Handing, limit: Limit, request: pytest.FixtureRequest
) -> None:
    kafka, stop = handing.kafka, threading.Event()
    request.addfinalizer(kafka.resume)
    limit(ASK_S=0.2, TRY_S=0.2)
    log = InMemoryCommitLog(runtime=Resuming(kafka))
    relay = handing.relay(log)
    before_next(relay._brokers, "batch_bytes", kafka.pause)  # the next call opens the transactions
    kafka.pause()
    assert not relay.run_once()
    log.create_topic("orders", 1)
    commit(log, prepare(log, 0))

    def fall_silent() -> None:
        kafka.pause()
        stop.set()
        raise UndeliveredError("Kafka does not answer")

    with at("relay step", fall_silent, step="delivered"):
        assert relay.run_once(stop).aborted == 1
    impatient = handing.relay(log, retry_timeout=0.0)
    assert impatient.run_once().messages == 5
    commit(log, prepare(log, 1))
    said = pytest.raises(RelayError, match="Kafka has aborted each transaction for 0 s: Kafka does not answer")
    with at("relay step", fall_silent, step="delivered"), said as ended:
        impatient.run_once()
    assert type(ended.value) is RelayError
    assert impatient.run_once().messages == 5
    assert handing.require_same(log) == 10


@pytest.mark.turns(3, among="Kafka: what fails")
def test_a_broker_that_falls_silent_is_an_error_that_a_restart_may_cure(
    handing: Handing, log: CommitLog, limit: Limit, request: pytest.FixtureRequest
) -> None:
    """It was a TimeoutError, which nobody handled."""
    request.addfinalizer(handing.kafka.resume)
    relay = handing.relay(log)
    before_next(relay._brokers, "batch_bytes", lambda: (handing.kafka.pause(), limit(ANSWER_S=0.3, ASK_S=0.2)))
    with pytest.raises(RelayError, match=r"the settings of topic '.*orders' were read: .*TIMED_OUT.*No broker"):
        relay.run_once()


@pytest.mark.turns(3, among="Kafka: what fails")
def test_a_broker_that_is_away_is_an_error_that_a_restart_may_cure(handing: Handing, log: CommitLog) -> None:
    relay = KafkaRelay(log, "127.0.0.1:1", **handing.options)
    listed = pytest.raises(RelayError, match="Kafka failed while its topics were listed")
    with limited(ANSWER_S=0.2, ASK_S=0.2), listed:
        relay.run_once()


def test_settings_that_kafka_s_client_does_not_know_are_refused(handing: Handing, log: CommitLog) -> None:
    with pytest.raises(OptionError, match="refuses its settings"):
        handing.relay(log, kafka={"no.such.setting": "1"})
