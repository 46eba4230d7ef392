"""TransactionMQProducer and PerMessageListener: what a send returns, retries, and its own checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, HalfBatch, MessageExt, PerMessageListener
from rmq_spark.errors import (
    FenceError,
    ListenerError,
    LocalTransactionError,
    MessageError,
    OptionError,
    TopicNotFoundError,
    UnresolvedTransactionError,
)
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import header_of, let_leave
from tests.support.inside import CommitOncePrepared, HalfWriter
from tests.support.inside import message_table as to_table

COMMIT, ROLLBACK = COMMIT_MESSAGE, ROLLBACK_MESSAGE
DEADLINE_S = 20.0


class Told(txmq.TransactionListener):
    """Answers as it is told; an answer may be a function of the half batch."""

    def __init__(self, execute: Any = COMMIT, check: Any = UNKNOWN, store_id: str | None = None) -> None:
        if store_id is not None:
            self.store_id = store_id
        self.answers = {"execute": execute, "check": check}
        self.args: list[Any] = []
        self.checked = threading.Event()

    def _answer(self, door: str, batch: HalfBatch) -> Any:
        answer = self.answers[door]
        return answer(batch) if callable(answer) else answer

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        self.args.append(batch.arg)
        return self._answer("execute", batch)

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        self.checked.set()
        return self._answer("check", batch)


@pytest.fixture
def log() -> InMemoryCommitLog:
    return InMemoryCommitLog(topics={"orders": 1, "bills": 1})


def producer(log: Any, listener: Any, group: str = "shop", **more: Any) -> txmq.TransactionMQProducer:
    return txmq.TransactionMQProducer(log, group, listener, **{"check_interval": None, **more})


def raising(problem: Exception) -> Callable[[HalfBatch], Any]:
    def answer(batch: HalfBatch) -> Any:
        raise problem

    return answer


def visible(log: Any, topic: str = "orders") -> list[bytes]:
    return log.another().read(topic)["body"].to_pylist()


ORDER = txmq.Message("orders", b"one", tags="create", keys=["42", "43"], properties={"a": "b"})


# ---------------------------------------------------------------- results
def test_a_committed_message_is_visible_at_the_queue_and_offset_that_the_result_names(log: Any) -> None:
    listener = Told(COMMIT)
    with producer(log, listener) as open_producer:
        first = open_producer.send_message_in_transaction(ORDER, arg=42)
        second = open_producer.send_message_in_transaction(ORDER)
    assert str(first.send_status) == "SEND_OK"
    assert first.local_transaction_state is COMMIT
    assert first.transaction_id == f"{first.half_id}:1"
    assert (first.queue_id, first.queue_offset, second.queue_offset) == (0, 0, 1)
    assert first.messages == 1
    assert not first.replayed
    assert listener.args == [42, None]
    row = log.read("orders").to_pylist()[0]
    assert (row["body"], row["tags"], row["keys"]) == (b"one", "create", "42 43")
    assert row["transaction_id"] == first.transaction_id
    assert row["producer_group"] == "shop"


@pytest.mark.parametrize(("answer", "state"), [(ROLLBACK, ROLLBACK), (UNKNOWN, UNKNOWN), (None, UNKNOWN)])
def test_a_message_that_is_not_committed_has_no_offset_and_is_not_visible(log: Any, answer: Any, state: Any) -> None:
    with producer(log, Told(answer)) as open_producer:
        result = open_producer.send_message_in_transaction(ORDER)
    assert result.local_transaction_state is state
    assert result.queue_offsets == {}
    assert result.queue_id is None
    assert result.queue_offset is None
    assert visible(log) == []
    assert log.pending().num_rows == (state is UNKNOWN)


def test_a_listener_that_raises_counts_as_unknown_as_in_rocketmq(log: Any) -> None:
    with producer(log, Told(raising(ValueError("no stock")))) as open_producer:
        assert open_producer.send_message_in_transaction(ORDER).local_transaction_state is UNKNOWN
    assert log.pending().num_rows == 1


def test_a_listener_that_forgot_to_return_is_told(log: Any, caplog: pytest.LogCaptureFixture) -> None:
    with producer(log, Told(lambda batch: None)) as open_producer:
        assert open_producer.send_message_in_transaction(ORDER).local_transaction_state is UNKNOWN
    (said,) = [m for m in caplog.messages if "returned None" in m]
    assert said.endswith("A local transaction that is done returns COMMIT_MESSAGE")


def test_a_listener_that_raises_fails_the_send_when_asked_for(log: Any) -> None:
    with (
        producer(log, Told(raising(ValueError("no stock"))), on_listener_error="fail") as open_producer,
        pytest.raises(LocalTransactionError, match="no stock"),
    ):
        open_producer.send_message_in_transaction(ORDER)
    assert log.pending().num_rows == 1


def test_several_messages_are_one_transaction(log: Any) -> None:
    messages = [ORDER, txmq.Message("bills", "two"), txmq.Message("orders", "three")]
    with producer(log, Told(COMMIT)) as open_producer:
        result = open_producer.send_messages_in_transaction(messages)
    assert result.queue_offsets == {("orders", 0): (0, 1), ("bills", 0): (0, 0)}
    assert result.queue_id is None
    assert result.messages == 3
    assert visible(log) == [b"one", b"three"]
    assert visible(log, "bills") == [b"two"]


def test_a_table_has_a_transaction_per_key_or_per_message(log: Any) -> None:
    table = pa.table({"body": ["1", "2", "3"], "order_id": [7, 8, 7]})
    with producer(log, Told(lambda batch: batch.verdicts(rollback=[8]))) as open_producer:
        result = open_producer.send_messages_in_transaction(table, topic="orders", transaction_key="order_id")
    assert result.local_transaction_state is UNKNOWN  # not one verdict for all
    assert visible(log) == [b"1", b"3"]
    with producer(log, Told([ROLLBACK, COMMIT, ROLLBACK])) as open_producer:
        open_producer.send_messages_in_transaction(table.select(["body"]), topic="orders", transaction_per="message")
    assert visible(log) == [b"1", b"3", b"2"]


# ---------------------------------------------------------------- retries
def test_a_retry_with_the_same_idempotency_key_sends_nothing_twice(log: Any) -> None:
    listener = Told(COMMIT)
    with producer(log, listener) as open_producer:
        first = open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
        again = open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
        other = open_producer.send_message_in_transaction(ORDER, idempotency_key="order-43")
    assert again.replayed
    assert again.half_id == first.half_id
    assert again.transaction_id == first.transaction_id
    assert again.local_transaction_state is COMMIT
    assert other.half_id != first.half_id
    assert len(listener.args) == 2
    assert visible(log) == [b"one", b"one"]


def test_a_retry_that_nobody_can_answer_is_told_in_the_words_of_a_producer(
    log: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told to start its query again, and to raise replayCheckTimeout."""
    with producer(log, Told(UNKNOWN, UNKNOWN), replay_check_timeout=0.1) as open_producer:
        open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
        with pytest.raises(UnresolvedTransactionError, match=r"an earlier send.*under the same idempotency key"):
            open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
    (told,) = [m for m in caplog.messages if "Asking again" in m]
    assert "for up to 0.1 s (replay_check_timeout)" in told


class OtherDatabase(Told):
    store_id = "other-db"


@pytest.mark.parametrize("other", [CommitOncePrepared(), OtherDatabase(COMMIT, COMMIT)])
def test_a_retry_with_a_listener_of_another_store_commits_nothing(log: Any, other: Any) -> None:
    with producer(log, Told(UNKNOWN)) as open_producer:
        open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
    with (
        producer(log.another(), other) as open_producer,
        pytest.raises(FenceError, match=r"send\.shop\.order-42:0.*log\.resolve"),
    ):
        open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
    assert visible(log) == []
    assert log.another().pending().num_rows == 1


def test_two_that_send_the_same_key_at_once_send_it_once(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look, neither finds it, and one is faster to prepare."""
    with producer(log, Told(COMMIT)) as faster, producer(log.another(), Told(UNKNOWN, COMMIT)) as slower:
        prepare_many = slower.log.prepare_many

        def late(staged: Any) -> Any:
            faster.send_message_in_transaction(ORDER, idempotency_key="order-42")
            return prepare_many(staged)

        monkeypatch.setattr(slower.log, "prepare_many", late)
        result = slower.send_message_in_transaction(ORDER, idempotency_key="order-42")
    assert result.replayed
    assert result.local_transaction_state is COMMIT
    assert visible(log) == [b"one"]


def test_sends_without_an_idempotency_key_are_all_different(log: Any) -> None:
    with producer(log, Told(COMMIT)) as open_producer:
        results = [open_producer.send_message_in_transaction(ORDER) for _ in range(3)]
    assert len({r.half_id for r in results}) == 3


def test_an_idempotency_key_belongs_to_its_producer_group(log: Any) -> None:
    for group in ("shop", "shop-a", "billing"):
        with producer(log, Told(COMMIT), group) as open_producer:
            assert not open_producer.send_message_in_transaction(ORDER, idempotency_key="42").replayed
    with producer(log, Told(COMMIT), "shop") as open_producer:
        assert not open_producer.send_message_in_transaction(ORDER, idempotency_key="a-42").replayed
    assert visible(log) == [b"one"] * 4


def test_a_retry_of_what_a_check_rolled_back_runs_once_more_with_its_argument(log: Any) -> None:
    listener = Told(UNKNOWN, ROLLBACK)
    with producer(log, listener) as open_producer:
        open_producer.send_message_in_transaction(ORDER, "first", idempotency_key="42")
    listener.answers["execute"] = COMMIT
    with producer(log.another(), listener) as open_producer:
        result = open_producer.send_message_in_transaction(ORDER, "second", idempotency_key="42")
    assert listener.args == ["first", "second"]
    assert result.transaction_id.endswith(":2")
    assert result.local_transaction_state is COMMIT
    assert visible(log) == [b"one"]


# ---------------------------------------------------------------- no more threads
@pytest.mark.parametrize("key", [None, "42"])
def test_a_send_is_made_once_where_no_thread_can_be_had(
    log: Any, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    listener = Told(COMMIT)
    with producer(log, listener) as open_producer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            now = open_producer.send_message_in_transaction(ORDER, "now", idempotency_key=key)
            later = open_producer.send_message_in_transaction_async(
                txmq.Message("orders", b"two"), "later", idempotency_key=key and "43"
            ).result(DEADLINE_S)
        assert [now.local_transaction_state, later.local_transaction_state] == [COMMIT, COMMIT]
        open_producer.send_message_in_transaction_async(ORDER, "with a thread").result(DEADLINE_S)
    assert listener.args == ["now", "later", "with a thread"]
    assert visible(log) == [b"one", b"two", b"one"]


# ---------------------------------------------------------------- its own checks
def test_an_open_producer_answers_its_own_checks_and_leaves_those_of_others_alone(log: Any) -> None:
    with producer(log, Told(None), "another") as stranger:
        stranger.send_message_in_transaction(ORDER)
    decided = threading.Event()
    listener = Told(None, COMMIT)
    decide_many = log.decide_many

    def watched(decisions: Any) -> Any:
        made = decide_many(decisions)
        decided.set()
        return made

    log.decide_many = watched
    with producer(log, listener, check_interval=0.02, transaction_timeout=0.0) as open_producer:
        result = open_producer.send_message_in_transaction(ORDER)
        assert result.local_transaction_state in (UNKNOWN, COMMIT)  # on a busy machine the check may be quicker
        assert decided.wait(DEADLINE_S)
    assert visible(log) == [b"one"]
    assert log.pending()["producer_group"].to_pylist() == ["another"]
    assert not [t for t in threading.enumerate() if t.name == "txmq-checks"]


def test_two_threads_that_open_a_producer_start_its_checks_once(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forget = txmq.TransactionMQProducer._forget_others

    def slowly(opened: txmq.TransactionMQProducer) -> None:
        time.sleep(0.2)  # so that the other thread begins to open it, too
        forget(opened)

    closed = producer(log, Told(None, COMMIT), check_interval=60.0)
    monkeypatch.setattr(txmq.TransactionMQProducer, "_forget_others", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: closed.start(), range(2)))
    assert len([t for t in threading.enumerate() if t.name == "txmq-checks"]) == 1
    closed.shutdown()


def test_a_producer_can_be_opened_again(log: Any) -> None:
    one = producer(log, Told(COMMIT), check_interval=60.0)
    for _ in range(2):
        with one:
            one.start()  # twice does no harm
            one.send_message_in_transaction(ORDER)
    assert visible(log) == [b"one", b"one"]


# ---------------------------------------------------------------- bad input
def test_a_closed_producer_sends_nothing(log: Any) -> None:
    closed = producer(log, Told())
    with pytest.raises(OptionError, match="not open"):
        closed.send_message_in_transaction(ORDER)
    with closed:
        pass
    with pytest.raises(OptionError, match="not open"):
        closed.send_message_in_transaction(ORDER)


@pytest.mark.parametrize("nothing", [[], (), pa.table({"body": pa.array([], pa.string())}), iter([])])
def test_a_send_of_nothing_is_refused(log: Any, nothing: Any) -> None:
    with producer(log, Told()) as open_producer, pytest.raises(MessageError, match="no messages"):
        open_producer.send_messages_in_transaction(nothing, topic="orders")
    assert log.pending().num_rows == 0


@pytest.mark.parametrize("wrong", [b"one", "one", {"body": "one"}, None, 7, ORDER])
def test_what_is_no_list_of_messages_is_refused_by_its_type(log: Any, wrong: Any) -> None:
    with producer(log, Told()) as open_producer, pytest.raises(MessageError, match="Message"):
        open_producer.send_messages_in_transaction(wrong)


@pytest.mark.parametrize("wrong", [b"one", "one", {"body": "one"}, None, [ORDER]])
def test_what_is_no_message_is_refused_by_its_type(log: Any, wrong: Any) -> None:
    with producer(log, Told()) as open_producer, pytest.raises(MessageError, match="Message is expected"):
        open_producer.send_message_in_transaction(wrong)


def test_messages_from_an_iterator_are_all_sent(log: Any) -> None:
    with producer(log, Told()) as open_producer:
        assert open_producer.send_messages_in_transaction(iter([ORDER, ORDER])).messages == 2
    assert visible(log) == [b"one", b"one"]


def test_an_unknown_topic_is_refused_and_nothing_is_prepared(log: Any) -> None:
    listener = Told()
    with producer(log, listener) as open_producer, pytest.raises(TopicNotFoundError, match="orders"):
        open_producer.send_message_in_transaction(txmq.Message("order", b"one"))
    assert not listener.args
    assert log.pending().num_rows == 0


def test_contradictory_transactions_are_refused(log: Any) -> None:
    table = pa.table({"body": ["1"], "k": ["a"]})
    with producer(log, Told()) as open_producer:
        for per, key in (("key", None), ("message", "k"), ("row", None)):
            with pytest.raises(OptionError, match="contradict"):
                open_producer.send_messages_in_transaction(
                    table, topic="orders", transaction_per=per, transaction_key=key
                )


@pytest.mark.parametrize("key", ["", "a b", "a:b", "a.b", "x" * 128])
def test_an_idempotency_key_has_the_characters_of_a_group_name(log: Any, key: str) -> None:
    with producer(log, Told()) as open_producer, pytest.raises(MessageError, match="idempotency_key"):
        open_producer.send_message_in_transaction(ORDER, idempotency_key=key)


@pytest.mark.parametrize("wrong", [Told, object(), "shop.orders:listener", "", False])
def test_what_is_no_listener_is_refused(log: Any, wrong: Any) -> None:
    with pytest.raises(ListenerError):
        producer(log, wrong)


def test_a_producer_without_a_listener_sends_what_has_no_local_transaction(log: Any) -> None:
    with producer(log, None) as plain:
        assert plain.send(ORDER).queue_offset == 0
        assert plain.send_async(ORDER).result(DEADLINE_S).queue_offset == 1
        assert plain.send(ORDER, idempotency_key="once").queue_offset == 2
        assert plain.send(ORDER, idempotency_key="once").replayed
        for send in (
            plain.send_message_in_transaction,
            plain.send_message_in_transaction_async,
            lambda message: plain.send_messages_in_transaction([message]),
        ):
            with pytest.raises(ListenerError, match=r"producer 'shop' has no listener.*send\(\)"):
                send(ORDER)
        with pytest.raises(ListenerError, match="this producer has no listener"), plain.transaction(object()):
            pass
    assert visible(log) == [b"one"] * 3


def test_a_producer_without_a_listener_settles_what_plain_sends_left_and_no_transaction(log: Any) -> None:
    with producer(log, Told(None)) as first:
        first.send_message_in_transaction(ORDER)
    writer = HalfWriter(header_of(0, fence_id=CommitOncePrepared.store_id, group="shop"), log.topics(), None, None)
    log.prepare(writer.header, [writer.rows_of(to_table([ORDER]))])
    with producer(log, None, check_interval=0.02, transaction_timeout=0.0):
        end_s = time.monotonic() + DEADLINE_S
        while not visible(log) and time.monotonic() < end_s:
            time.sleep(0.02)
    assert visible(log) == [b"one"]
    assert log.pending().num_rows == 1


def test_a_listener_that_needs_spark_is_refused(log: Any) -> None:
    listener = Told()
    listener.requires_spark = True
    with pytest.raises(ListenerError, match="Spark"):
        producer(log, listener)


# ---------------------------------------------------------------- RocketMQ's own signature
class Classic:
    """A listener as RocketMQ has it."""

    def __init__(self) -> None:
        self.seen: list[tuple[MessageExt, Any]] = []

    def execute_local_transaction(self, msg: MessageExt, arg: Any) -> Any:
        self.seen.append((msg, arg))
        return None if msg.body == b"later" else COMMIT if msg.body == b"one" else ROLLBACK

    def check_local_transaction(self, msg: MessageExt) -> Any:
        return COMMIT


def test_a_per_message_listener_sees_a_message_and_the_argument(log: Any) -> None:
    classic = Classic()
    with producer(log, PerMessageListener(classic)) as open_producer:
        result = open_producer.send_message_in_transaction(ORDER, arg={"order": 42})
    (msg, arg), *_ = classic.seen
    assert arg == {"order": 42}
    assert (msg.topic, msg.body, msg.tags, msg.keys) == ("orders", b"one", "create", "42 43")
    assert msg.properties == {"a": "b"}
    assert msg.transaction_id == result.transaction_id
    assert (msg.producer_group, msg.check_times) == ("shop", 0)
    assert result.local_transaction_state is COMMIT


def test_a_per_message_listener_decides_each_message_of_a_send_per_message(log: Any) -> None:
    table = pa.table({"body": ["one", "two", "later"]})
    with producer(log, PerMessageListener(Classic())) as open_producer:
        open_producer.send_messages_in_transaction(table, topic="orders", transaction_per="message")
    assert visible(log) == [b"one"]
    assert log.pending()["messages"].to_pylist() == [1]


def test_a_per_message_listener_refuses_transactions_of_several_messages(log: Any) -> None:
    with (
        producer(log, PerMessageListener(Classic()), on_listener_error="fail") as open_producer,
        pytest.raises(LocalTransactionError, match="transactionPer=message"),
    ):
        open_producer.send_messages_in_transaction([ORDER, ORDER])


def test_a_per_message_listener_needs_both_methods() -> None:
    with pytest.raises(ListenerError, match="check_local_transaction"):
        PerMessageListener(type("Half", (), {"execute_local_transaction": lambda self, msg, arg: COMMIT})())


# ---------------------------------------------------------------- queues
def test_single_sends_do_not_all_go_to_the_first_queue() -> None:
    log = InMemoryCommitLog(topics={"orders": 8})
    with producer(log, Told(COMMIT)) as open_producer:
        queues = [open_producer.send_message_in_transaction(ORDER).queue_id for _ in range(64)]
    assert len(set(queues)) > 4  # drawn from random ids: all eight nearly always
    assert max(queues.count(q) for q in range(8)) <= 32


def test_a_send_that_is_staged_again_writes_the_same_queue() -> None:
    found = set()
    for _ in range(3):
        log = InMemoryCommitLog(topics={"orders": 8})
        with producer(log, Told(COMMIT)) as open_producer:
            found.add(open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42").queue_id)
    assert len(found) == 1


def test_the_batches_of_a_stream_begin_at_the_queues_in_turn() -> None:
    writers = [HalfWriter(header_of(n), {"orders": 8}, "orders", None) for n in range(8)]
    table = pa.table({"body": ["one message"]})
    queues = [segment.queue_id for w in writers for segment in w.arrange(w.normalize(table), 0)[1]]
    assert sorted(queues) == list(range(8))


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize("has_left", [False, True])
def test_a_key_of_another_store_is_no_retry_whatever_became_of_the_first_send(
    log: Any, verdict: Any, has_left: bool
) -> None:
    north, south = Told(verdict, store_id="till of north"), Told(COMMIT, store_id="till of south")
    with producer(log, north) as first:
        first.send_message_in_transaction(ORDER, idempotency_key="7")
    if has_left:
        let_leave(log)
    with producer(log, south) as second, pytest.raises(FenceError, match="store_id 'till of north'"):
        second.send_message_in_transaction(ORDER, idempotency_key="7")
    assert visible(log) == ([b"one"] if verdict is COMMIT else [])
