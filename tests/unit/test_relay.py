"""What a relay is told, what its records hold, and what its positions topic says: without a broker."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.kafka.positions import LastMessage, Position, PositionRecords, SharedSettings, StoredPositions
from rmq_spark._core.kafka.records import COLUMNS, parked_record, split_by_size, to_records
from rmq_spark._core.kafka.relay import _positions_after
from rmq_spark._core.kafka.source import RelaySource
from rmq_spark.cli.relay import _exit_code, kafka_settings
from rmq_spark.kafka import RelayReport
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import commit, let_leave, make_log, prepare
from tests.support.inside import SOURCE_SCHEMA, Record, ReportedErrors, Start, redacted
from tests.support.limits import Limit


def settings(**given: Any) -> Any:
    return txmq.KafkaRelay(InMemoryCommitLog(), **{"bootstrap_servers": "broker:9092", **given}).settings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bootstrap_servers": " "}, r"bootstrap_servers is missing: name Kafka's brokers"),
        ({"topics": ["a"], "topic_pattern": "b"}, r"topics and topic_pattern contradict each other"),
        ({"topics": "orders"}, r"topics='orders' is no list of names"),
        ({"topics": []}, r"is no list of names"),
        ({"topics": ["a b"]}, r"topic.* 'a b'"),
        ({"topic_pattern": "("}, r"is no regular expression"),
        ({"topic_template": "{topic}{topic}"}, r"must have \{topic\} in it once"),
        ({"topic_template": "a b {topic}"}, r"'a b t' cannot be a topic of Kafka"),
        (
            {"positions_topic": "kept", "parking_topic": "kept"},
            r"'kept' is the topic of positions and of what is parked",
        ),
        ({"shards": 2, "shard": 2}, r"shard=2 is out of range: a whole number from 0 to 1"),
        ({"start": "newest"}, r"start='newest' cannot be used: known are earliest, latest"),
        ({"on_poison": "parc"}, r"did you mean 'park'\?"),
        ({"on_expired": None}, r"on_expired=None cannot be used"),
        ({"max_batch_messages": 0}, r"max_batch_messages=0 is out of range"),
        ({"max_batch_bytes": "many"}, r"max_batch_bytes='many' is not a number of bytes"),
        ({"transaction_timeout": 0}, r"transaction_timeout=0 cannot be used"),
        ({"replication_factor": 0}, r"replication_factor=0 is out of range"),
        ({"kafka": {1: "x"}}, r"have names such as 'security.protocol': found 1"),
        ({"kafka": {"transactional.id": "mine"}}, r"it follows from the log, the relay and the shard"),
        ({"kafka": {"isolation.level": "read_uncommitted"}}, r"would not be handed over exactly once"),
    ],
)
def test_settings_that_cannot_be_used_say_why(given: dict[str, Any], said: str) -> None:
    with pytest.raises((txmq.OptionError, txmq.MessageError), match=said):
        settings(**given)


def test_secrets_among_kafka_s_settings_are_never_shown() -> None:
    made = settings(kafka={"sasl.password": "hush-hush-hush", "ssl.key.pem": "-----BEGIN-----"})
    assert "hush" not in repr(made)
    assert redacted("error: hush-hush-hush -----BEGIN-----") == "error: *** ***"


def test_a_relay_without_topics_takes_those_that_users_made() -> None:
    everything = settings().subscription
    assert [t for t in ("orders", "%RETRY%points", "%DLQ%points", "o") if everything.matches(t)] == ["orders", "o"]
    assert settings(topics=["%DLQ%points"]).subscription.matches("%DLQ%points")
    assert settings(topic_pattern="o.*").subscription.matches("orders")


def test_each_queue_has_one_shard_and_the_queues_of_a_topic_are_dealt_out_evenly() -> None:
    shards = [settings(shards=3, shard=n) for n in range(3)]
    for topic in ("orders", "points", "ä"):
        counts = [sum(shard.is_mine(topic, queue) for queue in range(6)) for shard in shards]
        assert counts == [2, 2, 2]
        assert all(sum(shard.is_mine(topic, queue) for shard in shards) == 1 for queue in range(6))


def test_settings_of_the_environment_are_named_as_kafka_names_them_and_arguments_win() -> None:
    environment = {"TXMQ_KAFKA__SASL_PASSWORD": "x=y", "TXMQ_KAFKA__LINGER_MS": "1", "TXMQ_PATH": "log"}
    assert kafka_settings(["linger.ms=7"], environment) == {"sasl.password": "x=y", "linger.ms": "7"}


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (txmq.RelayError(), 1),
        (txmq.NotACommitLogError(), 2),
        (txmq.OptionError(), 2),
        (txmq.RelayFencedError(), 3),
        (txmq.RelayRefusedError(), 4),
        (txmq.PoisonMessageError(), 4),
    ],
)
def test_an_exit_code_tells_whether_to_start_again(problem: txmq.TxmqError, code: int) -> None:
    assert _exit_code(problem) == code


# ---------------------------------------------------------------- records
def messages(*rows: dict[str, Any]) -> pa.Table:
    schema = pa.schema([SOURCE_SCHEMA.field(name) for name in COLUMNS])
    return pa.Table.from_pylist([{"topic": "orders", "queue_id": 0, "queue_offset": 0, **row} for row in rows], schema)


def test_a_record_has_the_sharding_key_or_else_the_keys_or_none() -> None:
    found = to_records(messages({"sharding_key": "", "keys": "k"}, {"keys": "k"}, {}), str)
    assert [m.record.key for m in found] == [b"", b"k", None]


def test_a_nul_in_the_name_of_a_property_does_not_cut_it() -> None:
    """Kafka's client ended the name there: three properties became three headers of one name."""
    properties = {"ABC\0DEF": "one", "ABC\0GHI": "two", "ABC": "three"}
    (found,) = to_records(messages({"properties": properties}), str)
    assert [h for h in found.record.headers if h[0].startswith("ABC")] == [
        (r"ABC\0DEF", b"one"), (r"ABC\0GHI", b"two"), ("ABC", b"three"),
    ]  # fmt: skip


def test_a_header_of_the_relay_stands_behind_a_property_of_that_name() -> None:
    properties = [("txmq.msg_id", "forged"), ("region", "eu")]
    (found,) = to_records(messages({"msg_id": "a:0:0.0", "properties": properties}), str)
    assert found.record.headers[:3] == (("txmq.msg_id", b"forged"), ("region", b"eu"), ("txmq.msg_id", b"a:0:0.0"))
    assert dict(found.record.headers)["txmq.msg_id"] == b"a:0:0.0"


def test_times_are_cut_to_milliseconds() -> None:
    times = [1_999, 86_400_000_000_000 - 1]
    found = to_records(messages(*({"born_timestamp": t} for t in times)), str)
    assert [m.record.timestamp_ms for m in found] == [1, 86_399_999_999]


def test_a_parked_message_keeps_what_it_was_and_says_why_it_is_there() -> None:
    row = {"msg_id": "a:0:0.0", "body": b"1234", "queue_id": 3, "born_timestamp": 5_000}
    (message,) = to_records(messages(row), lambda topic: f"shop.{topic}")
    assert message.record.topic == "shop.orders"
    kept = parked_record(message, "parked", "too late", with_body=True)
    note = parked_record(message, "parked", "too large", with_body=False)
    assert (kept.topic, kept.partition, kept.key, kept.value) == ("parked", 0, b"a:0:0.0", b"1234")
    assert kept.timestamp_ms is None
    assert (note.value, dict(note.headers)["txmq.parked.body_bytes"]) == (None, b"4")
    assert dict(note.headers)["txmq.parked.reason"] == b"too large"


def test_pieces_are_small_enough_and_lose_nothing() -> None:
    table = pa.table({"n": list(range(100)), "body": pa.array([b"x" * (5_000 if n == 50 else 10) for n in range(100)])})
    found = list(split_by_size(table, 30, 1_000))
    assert all(p.num_rows == 1 or (p.num_rows <= 30 and p.nbytes <= 1_000) for p in found)
    assert pa.concat_tables(found).equals(table)
    assert list(split_by_size(table.slice(0, 0), 30, 1_000)) == []


def test_a_line_of_kafka_s_client_is_shown_once_and_not_remembered_for_ever(
    caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    limit(LINES_MAX=2)
    reported = ReportedErrors()
    for text in ("a after 1ms", "a after 2ms", "b", "c", "a after 3ms"):
        reported.log(logging.WARNING, "%s: %s", "FAIL", text)
    assert caplog.messages == [f"FAIL: {text}" for text in ("a after 1ms", "b", "c", "a after 3ms")]


# ---------------------------------------------------------------- positions
def test_positions_are_read_as_they_were_written_and_those_of_other_relays_are_left_out() -> None:
    stored = StoredPositions("mine")
    for relay in ("mine", "other"):
        makes = PositionRecords("positions", relay, "log")
        written = [makes.agreed(2, "{topic}"), makes.claim(1, f"run of {relay}", {"host": "h"})]
        written += [makes.position(("ö", 3), Position(n, LastMessage(f"{relay}{n}", n))) for n in (7, 8)]
        written += [makes.gap(("ö", 3), 1, 4, "now")]
        for offset, record in enumerate(written):
            stored.add(record.key, record.value, offset)
    assert stored.agreed == {"log": SharedSettings(2, "{topic}")}
    assert stored.of_log("log") == {("ö", 3): Position(8, LastMessage("mine8", 8))}
    assert stored.of_log("another") == {}
    assert stored.runs == {("log", 1): ("run of mine", 1)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"{}"),
        (b"no JSON", b"{}"),
        (b"[]", b"{}"),
        (b'{"relay": "mine", "log": "l"}', None),
        (b'{"relay": "mine", "log": "l", "topic": "t", "queue": "x"}', b'{"next_offset": 1, "msg_id": null}'),
    ],
)
def test_what_no_relay_wrote_is_refused(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(txmq.RelayRefusedError, match=r"record at offset 5 .* was not written by a relay"):
        StoredPositions("mine").add(key, value, 5)


def test_a_report_is_said_in_words() -> None:
    assert not RelayReport()
    report = RelayReport(messages=1, parked=1, skipped=2, transactions=1, seconds=0.26, by_topic={"orders": 1})
    assert str(report) == (
        "1 message handed over (orders 1), 1 message parked, 2 expired messages skipped, in 1 transaction and 0.3 s"
    )
    assert report.to_dict()["by_topic"] == {"orders": 1}


# ---------------------------------------------------------------- is it the same log?
class Restored:
    """A log on a disk, of which a copy is taken, and which is set back to it; and what a relay has handed over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = make_log("delta", folder / "log", orders=1)
        self.settings = settings()
        self.records = PositionRecords("positions", "kafka", self.log.id)
        self.stored = StoredPositions("kafka")
        self.keep(self.records.agreed(1, "{topic}"))

    def keep(self, record: Record) -> None:
        self.stored.add(record.key, record.value, 0)

    def send(self, *keys: str) -> None:
        with txmq.TransactionMQProducer(self.log, "shop", check_interval=None) as producer:
            for key in keys:
                producer.send(txmq.Message("orders", key.encode()), idempotency_key=key)

    def copy(self) -> None:
        shutil.copytree(self.folder / "log", self.folder / "copy")

    def set_back(self) -> None:
        shutil.rmtree(self.folder / "log")
        shutil.copytree(self.folder / "copy", self.folder / "log")
        self.log = CommitLog.open(self.folder / "log")

    def hand_over(self) -> list[bytes | None]:
        """Hand over what a relay would that starts now, and keep its positions."""
        log = self.log.another()
        source = RelaySource(log.engine, self.settings)
        self.require_fit()
        ends = source.placements.latest()
        start = {queue: p.next_offset for queue, p in self.stored.of_log(log.id).items()}
        ranges, missing = source.placements.between({queue: start.get(queue, 0) for queue in ends}, ends)
        assert not missing
        handed = [message for batch in source.batches(ranges) for message in batch]
        for queue, position in _positions_after(handed).items():
            self.keep(self.records.position(queue, position))
        return [message.record.value for message in handed]

    def require_fit(self) -> None:
        engine = self.log.another().engine
        brokers: Any = None
        Start(engine, self.settings, RelaySource(engine, self.settings), brokers, "a-run")._require_fit(self.stored)


@pytest.fixture
def restored(tmp_path: Path) -> Restored:
    return Restored(tmp_path)


def test_a_log_that_was_set_back_and_sent_the_same_keys_again_is_refused(restored: Restored) -> None:
    """The last message stood at its offset again: x was never handed over, and b twice."""
    restored.send("a")
    restored.copy()
    restored.send("b", "c")
    assert restored.hand_over() == [b"a", b"b", b"c"]
    restored.set_back()
    restored.send("x", "c", "b")
    with pytest.raises(txmq.RelayRefusedError, match="set back to an older copy, and written to since"):
        restored.hand_over()


def test_a_log_that_was_set_back_and_placed_what_was_pending_in_the_copy_is_refused(restored: Restored) -> None:
    """A half batch that is pending in the copy keeps its identity, and its message its id."""
    restored.send("a")
    prepare(restored.log, 0, 1, app="late")
    restored.copy()

    def settle() -> None:
        commit(restored.log, restored.log.engine.get(restored.log.engine.open_half_ids()[0]))

    restored.send("b")
    settle()
    assert restored.hand_over() == [b"a", b"b", b"late.0.0"]
    restored.set_back()
    restored.send("x")
    settle()
    with pytest.raises(txmq.RelayRefusedError, match="set back to an older copy, and written to since"):
        restored.hand_over()


def test_a_position_below_which_all_had_expired_is_of_no_log_that_still_has_it(restored: Restored) -> None:
    """It has no message to compare, so what was sent after the restore was taken for handed over."""
    restored.send("a")
    restored.copy()
    restored.send("b")
    restored.log.engine.topic_store.set_retention("orders", 0.0)
    let_leave(restored.log)
    restored.keep(restored.records.position(("orders", 0), Position(2)))
    assert restored.hand_over() == []
    restored.set_back()
    restored.send("x", "y")
    with pytest.raises(txmq.RelayRefusedError, match="below offset 2 had expired, and now the log has them"):
        restored.hand_over()


def test_a_relay_keeps_its_topics_of_kafka(restored: Restored) -> None:
    """With others, its positions would tell what was handed over elsewhere."""
    restored.settings = settings(topic_template="other.{topic}")
    with pytest.raises(txmq.RelayRefusedError, match=r"writes to topics '\{topic\}', and .* told 'other\.\{topic\}'"):
        restored.require_fit()


def test_a_log_goes_on_fitting_while_its_messages_are_drained_and_leave(restored: Restored) -> None:
    restored.send("a", "b")
    assert restored.hand_over() == [b"a", b"b"]
    restored.log.drain()
    assert restored.hand_over() == []
    let_leave(restored.log)
    let_leave(restored.log)
    restored.send("c")
    assert restored.hand_over() == [b"c"]
    restored.log.engine.topic_store.set_retention("orders", 0.0)
    let_leave(restored.log)
    restored.require_fit()
