"""Values at the edges: one that no consumer could hold is refused at the door, and nothing of its batch is staged."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import CheckService, CommitLog, ConsumerGroup
from rmq_spark._core.vocabulary.options import INT64_MAX, LABEL_BYTES_MAX, TIME_MAX
from rmq_spark.errors import MessageError, OffsetError, OptionError, TxmqError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import commit, header_of, prepare
from tests.support.inboxes import inbox_of, make_database
from tests.support.inside import (
    TEXT_CHARS_MAX,
    TIME_MIN,
    CommitOncePrepared,
    HalfWriter,
    Planner,
    Subscription,
    json_message,
    parse_duration,
    parse_int,
    parse_timestamp,
    restored,
)

UTC = timezone.utc
MS_OF_2025 = 1_740_816_000_000
OUT_OF_TIME: list[tuple[str, int]] = [
    ("s", MS_OF_2025),
    ("s", MS_OF_2025 * 1000),
    ("ms", MS_OF_2025 * 1000),
    ("us", MS_OF_2025 * 1_000_000),
    ("us", -(2**63)),
    ("us", 2**63 - 1),
    ("us", -1),
    ("ns", -1),
    ("s", -62_135_596_800),  # the year 1
    ("s", 253_402_300_799),  # the end of the year 9999
]


def numbers_as_times(unit: str, *numbers: int) -> pa.Array:
    return pa.array(numbers, pa.int64()).cast(pa.timestamp(unit, "UTC"))


def normalize(columns: dict[str, Any] | pa.Table, key: str | None = None) -> pa.Table:
    """What a sink makes of messages before it stages them."""
    header = header_of(0, per="key" if key else "batch")
    return HalfWriter(header, {"orders": 1}, "orders", key).normalize(pa.table(columns))


# ---------------------------------------------------------------- times of messages
@pytest.mark.parametrize(("unit", "number"), OUT_OF_TIME)
@pytest.mark.parametrize("column", ["born_timestamp", "deliver_at"])
def test_a_time_that_no_consumer_can_hold_is_refused_before_anything_is_staged(
    log: CommitLog, column: str, unit: str, number: int
) -> None:
    with txmq.TransactionMQProducer(log, "shop", CommitOncePrepared(), check_interval=None) as producer:
        table = pa.table({"body": ["a", "b"], column: numbers_as_times(unit, 1, number)})
        with pytest.raises(MessageError, match=rf"{column} of row 1 .*1970-01-01 to 2261-12-31.*milliseconds"):
            producer.send_messages_in_transaction(table, topic="orders")
    assert log.engine.half.table.fs.content.keys() == log.engine.op_table.fs.content.keys() == set()
    assert log.pending().num_rows == 0


@pytest.mark.parametrize(
    "time",
    [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
        datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-14))),
        datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime.fromtimestamp(MS_OF_2025 / 10, UTC),
    ],
)
def test_a_message_with_such_a_time_cannot_be_made(time: datetime) -> None:
    for name in ("born_timestamp", "deliver_at"):
        with pytest.raises(MessageError, match=f"{name}=.* is out of range"):
            txmq.Message("orders", b"", **{name: time})


@pytest.mark.parametrize("time", [TIME_MIN, TIME_MAX])
def test_the_first_and_the_last_time_come_out_of_every_consumer(log: CommitLog, time: datetime, tmp_path: Path) -> None:
    columns = pa.table({"body": [b"x"], "born_timestamp": pa.array([time], pa.timestamp("us", "UTC"))})
    commit(log, prepare(log, 0, columns))
    read = log.read("orders")
    assert read["born_timestamp"].to_pylist() == [time]
    assert read["born_timestamp"].cast(pa.timestamp("ns", "UTC")).cast(pa.int64())[0].as_py() % 1000 == 0
    assert restored(read)["born_timestamp"].to_pylist() == [time]
    (row,) = read.to_pylist()
    assert json.loads(json.dumps(json_message(row)))["born_timestamp"]
    assert inbox_of(make_database(tmp_path)).apply(read) == 1


def test_a_row_of_a_slice_and_of_a_dictionary_is_looked_at_too() -> None:
    times = numbers_as_times("s", 1, 2, MS_OF_2025)
    for column in (times.dictionary_encode(), pa.chunked_array([times.slice(1, 1), times.slice(2)])):
        with pytest.raises(MessageError, match=f"row {len(column) - 1}"):
            normalize({"body": ["x"] * len(column), "born_timestamp": column})


# ---------------------------------------------------------------- text of messages
def not_utf8(count: int = 1) -> pa.Array:
    """What Spark makes of ``cast(bytes as string)``."""
    offsets = pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in range(count + 1)))
    return pa.StringArray.from_buffers(count, offsets, pa.py_buffer(b"\xff" * count))


@pytest.mark.parametrize("column", ["topic", "tags", "keys", "sharding_key", "k", "properties"])
def test_text_that_is_no_utf8_is_refused(column: str) -> None:
    text = not_utf8()
    if column == "properties":
        text = pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["p"]), text)
    with pytest.raises(MessageError, match=f"column '{column}' holds what Arrow cannot read"):
        normalize({"body": pa.array(["x"]), "k": pa.array(["k"]), column: text}, key="k")


def test_a_string_body_that_is_no_utf8_is_bytes() -> None:
    assert normalize({"body": not_utf8()})["body"].to_pylist() == [b"\xff"]


@pytest.mark.parametrize("column", ["tags", "keys", "sharding_key"])
def test_a_label_that_rocketmq_could_not_keep_is_refused(column: str) -> None:
    longest = "é" * (LABEL_BYTES_MAX // 2)
    assert normalize({"body": ["x"], column: [longest]})[column].to_pylist() == [longest]
    with pytest.raises(MessageError, match=f"{column} of a message has {LABEL_BYTES_MAX + 1} bytes"):
        normalize({"body": ["x"], column: [f"{longest}x"]})


def test_a_transaction_key_with_a_nul_is_refused_for_postgresql_cannot_fence_it() -> None:
    with pytest.raises(MessageError, match=r"transactionKey .* NUL"):
        normalize({"body": ["x"], "k": ["a\x00b"]}, key="k")


# ---------------------------------------------------------------- options and arguments
NO_SECONDS: tuple[Any, ...] = (
    None, math.nan, math.inf, -math.inf, -1, 1e300, 2**63, 10**400, "", "6", b"6", True, timedelta(seconds=6), [],
)  # fmt: skip
NO_NUMBERS: tuple[Any, ...] = (
    math.nan, math.inf, -1, 1.0, 2**63, -(2**63), 10**400, "1", "", " ", "\x00", "\ud800", "x" * 2**20, True, [], b"1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "refused"),
    [("transaction_timeout", NO_SECONDS), ("check_interval", (0, *NO_SECONDS[1:]))],  # None: no checks
)
def test_a_producer_hears_at_once_of_seconds_that_its_checks_cannot_use(
    log: CommitLog, name: str, refused: tuple[Any, ...]
) -> None:
    for value in refused:
        with pytest.raises(OptionError, match=name):
            txmq.TransactionMQProducer(log, "shop", CommitOncePrepared(), **{name: value})


@pytest.mark.parametrize("value", NO_SECONDS, ids=lambda v: type(v).__name__)
def test_a_listener_refuses_seconds_that_cannot_be_counted(log: CommitLog, value: Any) -> None:
    for name in ("rollback_after", "lock_timeout"):
        with pytest.raises(OptionError, match=name):
            txmq.SqlTransactionListener("sqlite://", print, **{name: value})
    listener = txmq.SqlTransactionListener("sqlite://", print)
    with pytest.raises(OptionError, match="older_than"):
        listener.prune(value)
    with pytest.raises((OptionError, TxmqError), match="replay_check_timeout"):
        txmq.TransactionalSink(log, producer_group="shop", listener=None, replay_check_timeout=value)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda v: type(v).__name__)
def test_a_number_of_messages_queues_or_checks_is_whole_and_fits(log: CommitLog, value: Any, tmp_path: Path) -> None:
    log.engine.create_own_topic("%DLQ%group")
    commit(log, prepare(log, 0, 3))
    for call in (
        lambda: log.read("orders", limit=value),
        lambda: log.read("orders", start={0: value}),
        lambda: log.create_topic("new", value),
        lambda: txmq.CommitLog.create(tmp_path, queues=value),
        lambda: CheckService(log, {}, transaction_check_max=value),
        lambda: txmq.DeadLetters(log, "group").resend([value]),
    ):
        with pytest.raises((OptionError, OffsetError)) as found:
            call()
        assert len(str(found.value)) < TEXT_CHARS_MAX + 100, "a megabyte is no error message"
    assert set(log.topics()) == {"orders", "%DLQ%group"}
    if not isinstance(value, list):
        with pytest.raises((OptionError, OffsetError)):
            log.read("orders", start={value: 0})


@pytest.mark.parametrize("text", [str(2**63), "9" * 5000, "-1", "0", "", " ", "\x00", "٣x", "nan", "inf", "1e3"])
def test_a_number_of_an_option_fits_into_64_bits(text: str) -> None:
    with pytest.raises(OptionError, match="minPartitions") as found:
        parse_int(text, "minPartitions")
    assert len(str(found.value)) < 400
    assert parse_int(str(INT64_MAX), "batchId", 0) == INT64_MAX


@pytest.mark.parametrize(
    "value",
    [None, 6, 6.0, 10**5000, b"6s", "6" * 5000, "infs", "nans", "-6s", "\ud800s"],
    ids=lambda v: type(v).__name__,
)
def test_a_duration_is_text_with_a_unit(value: Any) -> None:
    with pytest.raises(OptionError, match=r"older_than=.* is not a duration"):
        parse_duration(value, "older_than")
    with pytest.raises(OptionError, match="older_than"):
        InMemoryCommitLog().vacuum(value if value is not None else "x")


@pytest.mark.parametrize(
    "text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", str(MS_OF_2025 * 1000), "1969-12-31T00:00:00Z"]
)
def test_a_timestamp_option_names_a_time_that_messages_can_have(text: str) -> None:
    with pytest.raises(OptionError, match="startingTimestamp"):
        parse_timestamp(text, "startingTimestamp")


@pytest.mark.log("memory", orders=1)
def test_a_group_is_reset_to_times_that_messages_can_have(log: CommitLog) -> None:
    commit(log, prepare(log, 0, 3))
    group = ConsumerGroup(log, "points")
    for time in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), datetime(2025, 3, 1)):
        with pytest.raises(OptionError, match="to="):
            group.reset(time, ["orders"])
    assert group.reset(TIME_MIN, ["orders"]) == {("orders", 0): 0}
    assert group.reset(TIME_MAX, ["orders"]) == {("orders", 0): 3}
    assert Planner(log.engine, Subscription(("orders",))).resolve("startingTimestamp", TIME_MAX) == {("orders", 0): 3}


@pytest.mark.parametrize("value", ["no", 1, 0, None])
def test_what_is_neither_true_nor_false_is_refused(log: CommitLog, value: Any) -> None:
    """A "no" counted as True: with take_over it would have taken a group from Spark."""
    for name in ("tables", "stop_at_end", "auto_commit", "take_over"):
        with pytest.raises(OptionError, match=f"{name}=.* is neither True nor False"):
            txmq.PullConsumer(log, "points", "orders", **{name: value})
    with pytest.raises(OptionError, match=r"take_over=.* is neither True nor False"):
        txmq.PushConsumer(log, "points", print, "orders", take_over=value)
    for name in ("fifo", "exist_ok"):
        with pytest.raises(OptionError, match=f"{name}=.* is neither True nor False"):
            log.create_topic("returns", **{name: value})
    with pytest.raises(OptionError, match=r"per_transaction=.* is neither True nor False"):
        txmq.SqlTransactionListener("sqlite://", print, per_transaction=value)


def test_a_duration_is_seconds_or_a_text_with_a_unit_at_every_door() -> None:
    log = InMemoryCommitLog()
    log.create_topic("orders", retention=7_200)
    assert CheckService(log, {}, transaction_check_interval="2m").transaction_check_interval == 120
    producer = txmq.TransactionMQProducer(log, "shop", check_interval="90s", linger="5ms")
    assert producer.check_interval == 90
    assert txmq.SqlTransactionListener("sqlite://", rollback_after="10m").rollback_after_s == 600
    assert log.retentions()["orders"] == 7_200
    assert log.vacuum(8 * 86_400) == []
    for wrong in ("90", "soon", "-5s", True, timedelta(seconds=5)):
        with pytest.raises(OptionError, match="transaction_timeout"):
            CheckService(log, {}, transaction_timeout=wrong)  # type: ignore[arg-type]
