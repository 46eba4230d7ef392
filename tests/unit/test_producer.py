"""TransactionMQProducer and PerMessageListener: what a send returns, retries, and its own checks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, MessageExt, PerMessageListener
from rmq_spark.producer import TransactionSendResult
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import Starts
from tests.support.consumers import wait_until
from tests.support.half_batches import header_of, let_leave, prepare
from tests.support.inside import CommitOncePrepared, HalfWriter
from tests.support.limits import Limit
from tests.support.listeners import Scripted
from tests.support.meanwhile import at, no_thread_starts

pytestmark = pytest.mark.log("memory", orders=1, bills=1)

COMMIT, ROLLBACK = COMMIT_MESSAGE, ROLLBACK_MESSAGE
DEADLINE_S = 20.0


def producer(log: Any, listener: Any, group: str = "shop", **more: Any) -> txmq.TransactionMQProducer:
    return txmq.TransactionMQProducer(log, group, listener, **{"check_interval": None, **more})


def args_of(listener: Scripted) -> list[Any]:
    """With which arguments local transactions were executed."""
    return [batch.arg for batch in listener.executed]


def send(
    log: Any, listener: Any, arg: Any = None, key: str | None = None, group: str = "shop", **options: Any
) -> TransactionSendResult:
    """Send :data:`ORDER` by a producer of its own."""
    with producer(log, listener, group, **options) as opened:
        return opened.send_message_in_transaction(ORDER, arg, idempotency_key=key)


def visible(log: Any, topic: str = "orders") -> list[bytes]:
    return log.another().read(topic)["body"].to_pylist()


ORDER = txmq.Message("orders", b"one", tags="create", keys=["42", "43"], properties={"a": "b"})


# ---------------------------------------------------------------- results
def test_a_committed_message_is_visible_at_the_queue_and_offset_that_the_result_names(log: Any) -> None:
    listener = Scripted(COMMIT)
    with producer(log, listener) as open_producer:
        first = open_producer.send_message_in_transaction(ORDER, arg=42)
        second = open_producer.send_message_in_transaction(ORDER)
    assert str(first.send_status) == "SEND_OK"
    assert first.local_transaction_state is COMMIT
    assert first.transaction_id == f"{first.half_id}:1"
    assert (first.queue_id, first.queue_offset, second.queue_offset) == (0, 0, 1)
    assert first.half_id != second.half_id
    assert first.messages == 1
    assert not first.replayed
    assert args_of(listener) == [42, None]
    row = log.read("orders").to_pylist()[0]
    assert (row["body"], row["tags"], row["keys"]) == (b"one", "create", "42 43")
    assert row["transaction_id"] == first.transaction_id
    assert row["producer_group"] == "shop"


@pytest.mark.parametrize(
    ("answer", "state"), [(ROLLBACK, ROLLBACK), (UNKNOWN, UNKNOWN), (None, UNKNOWN), (ValueError("no stock"), UNKNOWN)]
)
def test_a_message_that_is_not_committed_has_no_offset_and_is_not_visible(
    log: Any, answer: Any, state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And who forgot to return something is told."""
    result = send(log, Scripted(answer))
    said = [m for m in caplog.messages if "returned None" in m]
    assert len(said) == (answer is None)
    assert all(m.endswith("A local transaction that is done returns COMMIT_MESSAGE") for m in said)
    assert result.local_transaction_state is state
    assert result.queue_offsets == {}
    assert result.queue_id is None
    assert result.queue_offset is None
    assert visible(log) == []
    assert log.pending().num_rows == (state is UNKNOWN)


def test_several_messages_are_one_transaction(log: Any) -> None:
    messages = iter([ORDER, txmq.Message("bills", "two"), txmq.Message("orders", "three")])
    with producer(log, Scripted(COMMIT)) as open_producer:
        result = open_producer.send_messages_in_transaction(messages)
    assert result.queue_offsets == {("orders", 0): (0, 1), ("bills", 0): (0, 0)}
    assert result.queue_id is None
    assert result.messages == 3
    assert visible(log) == [b"one", b"three"]
    assert visible(log, "bills") == [b"two"]


def test_a_table_has_a_transaction_per_key_or_per_message(log: Any) -> None:
    table = pa.table({"body": ["1", "2", "3"], "order_id": [7, 8, 7]})
    with producer(log, Scripted(lambda batch: batch.verdicts(rollback=[8]))) as open_producer:
        result = open_producer.send_messages_in_transaction(table, topic="orders", transaction_key="order_id")
    assert result.local_transaction_state is UNKNOWN  # not one verdict for all
    assert visible(log) == [b"1", b"3"]
    with producer(log, Scripted([[ROLLBACK, COMMIT, ROLLBACK]])) as open_producer:
        open_producer.send_messages_in_transaction(table.select(["body"]), topic="orders", transaction_per="message")
    assert visible(log) == [b"1", b"3", b"2"]


# ---------------------------------------------------------------- retries
def test_a_retry_with_the_same_idempotency_key_sends_nothing_twice(log: Any) -> None:
    listener = Scripted(COMMIT)
    with producer(log, listener) as open_producer:
        first = open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
        again = open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
        other = open_producer.send_message_in_transaction(ORDER, idempotency_key="order-43")
    assert again.replayed
    assert again.half_id == first.half_id
    assert again.transaction_id == first.transaction_id
    assert again.local_transaction_state is COMMIT
    assert other.half_id != first.half_id
    assert len(args_of(listener)) == 2
    assert visible(log) == [b"one", b"one"]


def test_a_retry_that_nobody_can_answer_is_told_in_the_words_of_a_producer(
    log: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told to start its query again, and to raise replayCheckTimeout."""
    with producer(log, Scripted(UNKNOWN, UNKNOWN), replay_check_timeout=0.1) as open_producer:
        open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
        with pytest.raises(txmq.UnresolvedTransactionError, match=r"an earlier send.*under the same idempotency key"):
            open_producer.send_message_in_transaction(ORDER, idempotency_key="order-42")
    (told,) = [m for m in caplog.messages if "Asking again" in m]
    assert "for up to 0.1 s (replay_check_timeout)" in told


def test_an_asynchronous_retry_asks_the_listener_and_tells_what_ends_the_wait(
    log: Any, caplog: pytest.LogCaptureFixture
) -> None:
    listener: Any = Scripted(UNKNOWN, [UNKNOWN, COMMIT])
    listener.rollback_after_s = 7.0
    with producer(log, listener) as open_producer:
        sent = [open_producer.send_message_in_transaction_async(ORDER, idempotency_key="42") for _ in range(2)]
        assert sorted(s.result(DEADLINE_S).replayed for s in sent) == [False, True]
    assert visible(log) == [b"one"]
    assert "once the batch is 7 s old (rollback_after)" in caplog.text


def of_store(store_id: str, execute: Any = COMMIT) -> Scripted:
    """A listener whose local transactions are in this store."""
    listener = Scripted(execute)
    listener.store_id = store_id
    return listener


def test_two_that_send_the_same_key_at_once_send_it_once(log: Any) -> None:
    """Both look, neither finds it, and one is faster to prepare."""
    with at("staged", lambda: send(log.another(), Scripted(COMMIT), key="order-42")):
        result = send(log, Scripted(UNKNOWN, COMMIT), key="order-42")
    assert result.replayed
    assert result.local_transaction_state is COMMIT
    assert visible(log) == [b"one"]


def test_an_idempotency_key_belongs_to_its_producer_group(log: Any) -> None:
    for group, key in (("shop", "42"), ("shop-a", "42"), ("billing", "42"), ("shop", "a-42")):
        assert not send(log, Scripted(COMMIT), key=key, group=group).replayed
    assert visible(log) == [b"one"] * 4


def test_a_retry_of_what_a_check_rolled_back_runs_once_more_with_its_argument(log: Any) -> None:
    listener = Scripted([UNKNOWN, COMMIT], ROLLBACK)
    send(log, listener, "first", "42")
    result = send(log.another(), listener, "second", "42")
    assert args_of(listener) == ["first", "second"]
    assert result.transaction_id.endswith(":2")
    assert result.local_transaction_state is COMMIT
    assert visible(log) == [b"one"]


# ---------------------------------------------------------------- no more threads
@pytest.mark.parametrize("key", [None, "42"])
def test_a_send_is_made_once_where_no_thread_can_be_had(log: Any, key: str | None) -> None:
    listener = Scripted(COMMIT)
    with producer(log, listener) as open_producer:
        with no_thread_starts():
            now = open_producer.send_message_in_transaction(ORDER, "now", idempotency_key=key)
            later = open_producer.send_message_in_transaction_async(
                txmq.Message("orders", b"two"), "later", idempotency_key=key and "43"
            ).result(DEADLINE_S)
        assert [now.local_transaction_state, later.local_transaction_state] == [COMMIT, COMMIT]
        open_producer.send_message_in_transaction_async(ORDER, "with a thread").result(DEADLINE_S)
    assert args_of(listener) == ["now", "later", "with a thread"]
    assert visible(log) == [b"one", b"two", b"one"]


@pytest.mark.log("delta", orders=1)
def test_a_send_waits_for_no_thread_that_would_merge_small_files(
    log: Any, limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    limit(OP_FILES_MAX=1)
    caplog.set_level("INFO", "rmq_spark")
    with no_thread_starts(), producer(log, Scripted(COMMIT)) as open_producer:
        for _ in range(3):
            assert open_producer.send_message_in_transaction(ORDER).local_transaction_state is COMMIT
    assert "upkeep waits for a later commit: thread txmq-maintenance cannot be started" in caplog.text
    assert visible(log) == [b"one"] * 3


# ---------------------------------------------------------------- its own checks
def test_an_open_producer_answers_its_own_checks_and_leaves_those_of_others_alone(log: Any) -> None:
    send(log, Scripted(None), group="another")
    with producer(log, Scripted(None, COMMIT), check_interval=0.02, transaction_timeout=0.0) as open_producer:
        result = open_producer.send_message_in_transaction(ORDER)
        assert result.local_transaction_state in (UNKNOWN, COMMIT)  # on a busy machine the check may be quicker
        wait_until(lambda: visible(log))
    assert visible(log) == [b"one"]
    assert log.pending()["producer_group"].to_pylist() == ["another"]
    assert not [t for t in threading.enumerate() if t.name == "txmq-checks"]


def test_two_threads_that_open_a_producer_start_its_checks_once() -> None:
    runtime = Starts(takes_s=0.2)  # so that the other thread begins to open it, too
    log = InMemoryCommitLog(topics={"orders": 1}, runtime=runtime)
    closed = producer(log, Scripted(None, COMMIT), check_interval=60.0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: closed.start(), range(2)))
    closed.shutdown()
    assert runtime.names.count("txmq-checks") == 1


def test_a_producer_can_be_opened_again(log: Any) -> None:
    one = producer(log, Scripted(COMMIT), check_interval=60.0)
    for _ in range(2):
        with one:
            one.start()  # twice does no harm
            one.send_message_in_transaction(ORDER)
    assert visible(log) == [b"one", b"one"]


# ---------------------------------------------------------------- bad input
def test_a_closed_producer_sends_nothing(log: Any) -> None:
    closed = producer(log, Scripted())
    for _ in range(2):
        with pytest.raises(txmq.OptionError, match="not open"):
            closed.send_message_in_transaction(ORDER)
        for key in (None, "42"):
            with pytest.raises(txmq.OptionError, match="not open"):
                closed.send_message_in_transaction_async(ORDER, idempotency_key=key)
        with closed:
            pass


NO_ROWS = pa.table({"body": pa.array([], pa.string())})
KEYED = pa.table({"body": ["1"], "k": ["a"]})


@pytest.mark.parametrize(
    ("messages", "options", "error", "said"),
    [
        *((nothing, {}, txmq.MessageError, "no messages") for nothing in ([], (), NO_ROWS, iter([]))),
        *((wrong, {}, txmq.MessageError, "Message") for wrong in (b"one", "one", {"body": "one"}, None, 7, ORDER)),
        (KEYED, {"transaction_per": "key"}, txmq.OptionError, "contradict"),
        (KEYED, {"transaction_per": "message", "transaction_key": "k"}, txmq.OptionError, "contradict"),
        (KEYED, {"transaction_per": "row"}, txmq.OptionError, "contradict"),
    ],
)
def test_several_messages_that_cannot_be_sent_are_refused_and_nothing_is_prepared(
    log: Any, messages: Any, options: dict[str, str], error: type[Exception], said: str
) -> None:
    listener = Scripted()
    with producer(log, listener) as open_producer, pytest.raises(error, match=said):
        open_producer.send_messages_in_transaction(messages, topic="orders", **options)
    assert (listener.executed, log.pending().num_rows) == ([], 0)


@pytest.mark.parametrize(
    ("message", "key", "error", "said"),
    [
        *(
            (it, None, txmq.MessageError, "Message is expected")
            for it in (b"one", "one", {"body": "one"}, None, [ORDER])
        ),
        (txmq.Message("order", b"one"), None, txmq.TopicNotFoundError, "orders"),
        *((ORDER, key, txmq.MessageError, "idempotency_key") for key in ("", "a b", "a:b", "a.b", "x" * 128)),
    ],
)
def test_a_message_that_cannot_be_sent_is_refused_and_nothing_is_prepared(
    log: Any, message: Any, key: str | None, error: type[Exception], said: str
) -> None:
    listener = Scripted()
    with producer(log, listener) as open_producer, pytest.raises(error, match=said):
        open_producer.send_message_in_transaction(message, idempotency_key=key)
    assert (listener.executed, log.pending().num_rows) == ([], 0)


class NeedsSpark(Scripted):
    requires_spark = True


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Scripted, "Scripted is a class; pass an instance of it"),
        *((wrong, "is not a TransactionListener") for wrong in (object(), "shop.orders:listener", "", False)),
        (NeedsSpark(), "Spark"),
    ],
)
def test_what_is_no_listener_here_is_refused(log: Any, wrong: Any, said: str) -> None:
    with pytest.raises(txmq.ListenerError, match=said):
        producer(log, wrong)


def test_a_producer_without_a_listener_sends_what_has_no_local_transaction(log: Any) -> None:
    with producer(log, None) as plain:
        assert plain.send(ORDER).queue_offset == 0
        assert plain.send_async(ORDER).result(DEADLINE_S).queue_offset == 1
        assert plain.send(ORDER, idempotency_key="once").queue_offset == 2
        assert plain.send(ORDER, idempotency_key="once").replayed
        assert plain.send_async([ORDER, ORDER]).result(DEADLINE_S).messages == 2
        for send in (
            plain.send_message_in_transaction,
            plain.send_message_in_transaction_async,
            lambda message: plain.send_messages_in_transaction([message]),
        ):
            with pytest.raises(txmq.ListenerError, match=r"producer 'shop' has no listener.*send\(\)"):
                send(ORDER)
        with pytest.raises(txmq.ListenerError, match="this producer has no listener"), plain.transaction(object()):
            pass
    assert visible(log) == [b"one"] * 5


def test_a_producer_without_a_listener_settles_what_plain_sends_left_and_no_transaction(log: Any) -> None:
    send(log, Scripted(None))
    prepare(log, 0, {"body": ["one"]}, fence_id=CommitOncePrepared.store_id, group="shop")
    with producer(log, None, check_interval=0.02, transaction_timeout=0.0):
        wait_until(lambda: visible(log))
    assert visible(log) == [b"one"]
    assert log.pending().num_rows == 1


# ---------------------------------------------------------------- RocketMQ's own signature
class Classic:
    """A listener as RocketMQ has it."""

    def __init__(self) -> None:
        self.seen: list[tuple[MessageExt, Any]] = []

    def execute_local_transaction(self, msg: MessageExt, arg: Any) -> Any:
        self.seen.append((msg, arg))
        return COMMIT

    def check_local_transaction(self, msg: MessageExt) -> Any:
        return COMMIT


def test_a_per_message_listener_sees_a_message_and_the_argument(log: Any) -> None:
    classic = Classic()
    result = send(log, PerMessageListener(classic), {"order": 42})
    (msg, arg), *_ = classic.seen
    assert arg == {"order": 42}
    assert (msg.topic, msg.body, msg.tags, msg.keys) == ("orders", b"one", "create", "42 43")
    assert msg.properties == {"a": "b"}
    assert msg.transaction_id == result.transaction_id
    assert (msg.producer_group, msg.check_times) == ("shop", 0)
    assert result.local_transaction_state is COMMIT


def test_a_per_message_listener_refuses_transactions_of_several_messages(log: Any) -> None:
    with (
        producer(log, PerMessageListener(Classic()), on_listener_error="fail") as open_producer,
        pytest.raises(txmq.LocalTransactionError, match="transactionPer=message"),
    ):
        open_producer.send_messages_in_transaction([ORDER, ORDER])


def test_a_per_message_listener_needs_both_methods() -> None:
    with pytest.raises(txmq.ListenerError, match="check_local_transaction"):
        PerMessageListener(type("Half", (), {"execute_local_transaction": lambda self, msg, arg: COMMIT})())


# ---------------------------------------------------------------- queues
def test_single_sends_do_not_all_go_to_the_first_queue() -> None:
    log = InMemoryCommitLog(topics={"orders": 8})
    with producer(log, Scripted(COMMIT)) as open_producer:
        queues = [open_producer.send_message_in_transaction(ORDER).queue_id for _ in range(32)]
    assert len(set(queues)) > 4  # drawn from random ids: all eight nearly always
    assert max(queues.count(q) for q in range(8)) <= 16


def test_a_send_that_is_staged_again_writes_the_same_queue() -> None:
    found = set()
    for _ in range(3):
        log = InMemoryCommitLog(topics={"orders": 8})
        found.add(send(log, Scripted(COMMIT), key="order-42").queue_id)
    assert len(found) == 1


def test_the_batches_of_a_stream_begin_at_the_queues_in_turn() -> None:
    writers = [HalfWriter(header_of(n), {"orders": 8}, "orders", None) for n in range(8)]
    table = pa.table({"body": ["one message"]})
    queues = [segment.queue_id for w in writers for segment in w.in_order(w.normalize(table), 0)[1]]
    assert sorted(queues) == list(range(8))


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize("has_left", [False, True])
def test_a_key_of_another_store_is_no_retry_whatever_became_of_it(log: Any, verdict: Any, has_left: bool) -> None:
    send(log, of_store("till of north", verdict), key="7")
    if has_left:
        let_leave(log)
    with pytest.raises(txmq.FenceError, match="store_id 'till of north'"):
        send(log, of_store("till of south"), key="7")
    assert visible(log) == ([b"one"] if verdict is COMMIT else [])
