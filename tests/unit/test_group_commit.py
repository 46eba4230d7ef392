"""Threads that send at the same moment share commits and half files; and nothing else."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait
from concurrent.futures import TimeoutError as FuturesTimeoutError
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, CheckService, CommitLog, HalfBatch
from rmq_spark.errors import (
    CommitError,
    FencedError,
    ListenerError,
    LocalTransactionError,
    LostFileError,
    MessageError,
    OptionError,
    VerdictConflictError,
)
from rmq_spark.sink.futures import SendFuture
from rmq_spark.sink.turns import InFlight, Turns
from tests.support.half_batches import another, let_leave, make_log
from tests.support.inside import MACHINE, CommitOncePrepared, group_commit

pytestmark = pytest.mark.log("memory", "delta", orders=2, bills=1)

DEADLINE_S = 8.0
MANY = 12


class Shop(txmq.TransactionListener):
    """Answers by the first body of the half batch: what a body does not name commits."""

    def __init__(self, answers: dict[bytes, Any] | None = None) -> None:
        self.answers = answers or {}
        self.seen: list[bytes] = []
        self.checked = COMMIT_MESSAGE

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        body = batch.messages(["body"])["body"][0].as_py()
        self.seen.append(body)
        answer = self.answers.get(body, COMMIT_MESSAGE)
        return answer() if callable(answer) else answer

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        return self.checked


def message(name: object, topic: str = "orders", **more: Any) -> txmq.Message:
    return txmq.Message(topic, str(name).encode(), **more)


class Together:
    """The first send of a producer waits in its commit until so many others are there, which share the next one; the
    same of the first verdict, when ``decides`` is set."""

    def __init__(self, producer: txmq.TransactionMQProducer, count: int, decides: int = 0) -> None:
        commits: Any = producer.two_phase.commits
        lanes = ((commits._prepares, count), (commits._decides, decides))
        self.sizes: dict[str, list[int]] = {lane._name: [] for lane, _ in lanes}
        for lane, gathered in lanes:
            lane._commit = self._gate(lane, lane._commit, gathered)

    def _gate(self, lane: Any, commit: Callable[[Sequence[Any]], Any], count: int) -> Callable[[Sequence[Any]], Any]:
        def gated(requests: Sequence[Any]) -> Any:
            first = not self.sizes[lane._name]
            self.sizes[lane._name].append(len(requests))
            if first:
                wait_for(lambda: len(lane._waiting) >= count - len(requests))
            return commit(requests)

        return gated


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def send_all(
    log: CommitLog,
    listener: Any,
    messages: Sequence[txmq.Message],
    keys: Sequence[str | None] = (),
    decides: int = 0,
    **more: Any,
) -> tuple[list[Any], Together]:
    """Results or errors, in the order of the messages, which are prepared in two commits."""
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None, **more) as producer:
        together = Together(producer, len(messages), decides)

        def send(one: txmq.Message, key: str | None) -> Any:
            try:
                return producer.send_message_in_transaction(one, idempotency_key=key)
            except Exception as problem:
                return problem

        with ThreadPoolExecutor(len(messages)) as pool:
            return list(pool.map(send, messages, keys or [None] * len(messages))), together


def files(log: CommitLog) -> int:
    """How many files the table half has."""
    other = log.another()
    other.half.table.refresh()
    return int(other.half.table.actions().num_rows)


def bodies(log: CommitLog, topic: str = "orders") -> list[bytes]:
    return sorted(log.another().read(topic)["body"].to_pylist())


# ---------------------------------------------------------------- together
def test_sends_of_many_threads_share_commits_and_files_and_each_gets_its_own_answer(log: CommitLog) -> None:
    before = log.half.table.refresh(), log.refresh()
    results, together = send_all(log, Shop(), [message(i) for i in range(MANY)], decides=MANY)
    prepares, decides = together.sizes.values()
    assert sum(prepares) == sum(decides) == MANY
    assert (log.half.table.refresh() - before[0], log.refresh() - before[1]) == (len(prepares), len(decides))
    assert len(prepares) <= 2
    assert len(decides) <= 2
    assert files(log) == len(prepares)
    stands = {(m["queue_id"], m["queue_offset"]): m["body"] for m in log.another().read("orders").to_pylist()}
    for i, result in enumerate(results):
        assert result.local_transaction_state is COMMIT_MESSAGE
        assert not result.replayed
        assert stands.pop((result.queue_id, result.queue_offset)) == str(i).encode()
    assert stands == {}


def test_a_listener_gets_the_messages_of_its_own_half_batch(log: CommitLog) -> None:
    shop = Shop()
    send_all(log, shop, [message(i) for i in range(MANY)])
    assert sorted(shop.seen) == sorted(str(i).encode() for i in range(MANY))


def test_verdicts_and_errors_are_those_of_each_send(log: CommitLog) -> None:
    def fails() -> None:
        raise RuntimeError("no money")

    shop = Shop({b"1": ROLLBACK_MESSAGE, b"2": UNKNOWN, b"3": fails})
    results, _ = send_all(log, shop, [message(i) for i in range(6)], on_listener_error="fail")
    assert [r.local_transaction_state for r in (*results[:3], *results[4:])] == [
        COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, COMMIT_MESSAGE, COMMIT_MESSAGE,
    ]  # fmt: skip
    assert isinstance(results[3], LocalTransactionError)
    assert bodies(log) == [b"0", b"4", b"5"]
    assert log.another().pending()["messages"].to_pylist() == [1, 1]


def test_a_check_of_another_process_finds_what_lies_in_a_shared_file(log: CommitLog) -> None:
    send_all(log, Shop(dict.fromkeys([b"1", b"2"], UNKNOWN)), [message(i) for i in range(5)])
    other = log.another()
    assert [other.get(h).rows for h in other.open_half_ids()] == [1, 1]
    report = CheckService(other, {"shop": Shop()}, transaction_timeout=0).run_once()
    assert report.committed.messages == 2
    assert not report.problems
    assert bodies(log) == [b"0", b"1", b"2", b"3", b"4"]


def test_topics_delays_and_properties_lie_in_one_file_too(log: CommitLog) -> None:
    some = [message(i, "bills", keys=["k"], tags="t", properties={"a": "b"}) for i in range(3)]
    send_all(log, Shop(), [*some, message("later", delay_level=18), *(message(i) for i in range(3))])
    assert bodies(log) == [b"0", b"1", b"2"]
    found = log.another().read("bills", columns=["body", "tags", "keys", "properties"]).to_pylist()
    assert sorted(m.pop("body") for m in found) == [b"0", b"1", b"2"]
    assert found == [{"tags": "t", "keys": "k", "properties": [("a", "b")]}] * 3
    assert [delayed for _, delayed in log.open_messages().values() if delayed] == [1]


def test_sends_with_keys_have_a_file_of_their_own_and_are_found_again(log: CommitLog) -> None:
    keys = [None, "a", None, "b", "c", None]
    results, _ = send_all(log, Shop(), [message(i) for i in range(6)], keys)
    again, _ = send_all(log.another(), Shop(), [message(i) for i in (1, 3, 4)], ["a", "b", "c"])
    assert [r.replayed for r in again] == [True] * 3
    assert [r.half_id for r in again] == [results[i].half_id for i in (1, 3, 4)]
    assert bodies(log) == [str(i).encode() for i in range(6)]


def test_transactions_by_key_and_whole_ones_are_read_from_one_file(log: CommitLog) -> None:
    """The columns to be read were those of the first range: without the key, reading failed for everybody."""
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        Together(producer, 6)
        table = pa.table({"k": ["a", "b"], "body": ["by key", "by key"]})

        def send(n: int) -> Any:
            if n % 2:
                return producer.send_messages_in_transaction(table, topic="bills", transaction_key="k")
            return producer.send_message_in_transaction(message(n, "bills"))

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(send, range(6)))
    found = log.another().read("bills").to_pylist()
    assert len(found) == len({m["transaction_id"] for m in found}) == 9
    assert sorted({m["transaction_id"].rpartition(":")[2] for m in found if m["body"] == b"by key"}) == ["a", "b"]


def test_a_list_that_its_caller_fills_anew_is_sent_as_it_was(log: CommitLog) -> None:
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None, listener_threads=1) as producer:
        buffer: list[txmq.Message] = []
        for i in range(4):
            buffer[:] = [message(i)]
            producer.send_async(buffer)
        buffer.clear()
    assert bodies(log) == [b"0", b"1", b"2", b"3"]


def test_what_breaks_a_rule_troubles_no_other_send(log: CommitLog) -> None:
    log.create_topic("steps", 1, fifo=True)
    some = [
        message("good"), message("x", "unknown"), message("x", queue_id=7), message("x", "steps"),
        message("x", queue_id=9), message("step", "steps", sharding_key="k"), message("last", queue_id=1),
    ]  # fmt: skip
    results, _ = send_all(log, Shop(), some)
    kinds = [type(r).__name__ for r in results]
    good = "TransactionSendResult"
    assert kinds == [good, "TopicNotFoundError", "MessageError", "MessageError", "MessageError", good, good]
    assert bodies(log) == [b"good", b"last"]
    assert results[6].queue_id == 1
    assert bodies(log, "steps") == [b"step"]
    assert log.another().pending().num_rows == 0


def test_a_message_alone_and_one_among_others_lie_in_the_half_file_alike(log: CommitLog) -> None:
    def given(n: int) -> txmq.Message:
        return message(n, "bills", tags="t", keys=["a", "b"], sharding_key="s", properties={"p": "1"}, delay_level=1)

    send_all(log, Shop(), [given(i) for i in range(4)])
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        producer.send_message_in_transaction(given(4))
    table = log.half.table
    rows = table.read(table.actions()["path"].to_pylist()).to_pylist()
    own = {"half_id", "app_id", "body", "born_timestamp", "store_timestamp", "deliver_at"}
    alike = {str({k: v for k, v in row.items() if k not in own}) for row in rows}
    assert len(rows) == 5
    assert len(alike) == 1


def test_one_that_drops_out_leaves_no_row_in_the_file_of_the_others(log: CommitLog) -> None:
    """Two producers send one key. Their files were written before either knew: the later one's must be written anew."""
    with txmq.TransactionMQProducer(log.another(), "shop", Shop(), check_interval=None) as faster:
        shop, found = Shop(), []
        with txmq.TransactionMQProducer(log, "shop", shop, check_interval=None) as producer:
            together = Together(producer, 4)
            prepare_many = log.prepare_many

            def late(staged: Any) -> Any:
                faster.send_message_in_transaction(message("theirs"), idempotency_key="b")
                return prepare_many(staged)

            log.prepare_many = late  # type: ignore[method-assign]
            with ThreadPoolExecutor(4) as pool:
                keys = ["first", "a", "b", "c"]
                sends = []
                for key in keys:
                    sends.append(pool.submit(producer.send_message_in_transaction, message(key), idempotency_key=key))
                    wait_for(lambda: together.sizes["txmq-prepare"])  # it is the first one that waits for the others
                found = [send.result() for send in sends]
    assert sum(together.sizes["txmq-prepare"]) == 4
    assert [r.replayed for r in found] == [k == "b" for k in keys]
    assert bodies(log) == [b"a", b"c", b"first", b"theirs"]
    assert log.another().pending().num_rows == 0
    rows = log.half.table.read(log.half.table.actions()["path"].to_pylist(), ["half_id"])["half_id"].to_pylist()
    assert len(rows) == len(set(rows)) == 4


def test_two_verdicts_that_contradict_each_other_trouble_no_other_send(log: CommitLog) -> None:
    def overruled() -> Any:
        other = log.another()
        (half_id,) = [r["half_id"] for r in other.pending().to_pylist() if b"1" in _bodies_of(other, r["half_id"])]
        other.resolve(half_id, ROLLBACK_MESSAGE, "a person was faster")
        return COMMIT_MESSAGE

    results, _ = send_all(log, Shop({b"1": overruled}), [message(i) for i in range(4)])
    assert isinstance(results[1], VerdictConflictError)
    assert [r.local_transaction_state for r in (results[0], *results[2:])] == [COMMIT_MESSAGE] * 3
    assert bodies(log) == [b"0", b"2", b"3"]


def _bodies_of(log: CommitLog, half_id: str) -> list[bytes]:
    record = log.get(half_id)
    rows = log.half.read(record, log.state_of(record).rows_in([0], 1), ["body"])  # type: ignore[list-item]
    found: list[bytes] = rows["body"].to_pylist()
    return found


def test_a_single_message_keeps_its_transaction_key_among_others(log: CommitLog) -> None:
    """All were arranged with the key column of the first one: the listener saw no key, and messages had no id."""
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        Together(producer, 6)

        def send(n: int) -> Any:
            if n % 2:
                return producer.send_messages_in_transaction([message(n, keys=f"k{n}")], transaction_key="keys")
            return producer.send_message_in_transaction(message(n, keys="other"))

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(send, range(6)))
    found = {m["body"]: m["transaction_id"] for m in log.another().read("orders").to_pylist()}
    assert all(found[b"%d" % n].endswith(f":1:k{n}") for n in (1, 3, 5))
    assert all(found[b"%d" % n].endswith(":1") for n in (0, 2, 4))


def test_a_message_that_was_changed_after_it_was_made_troubles_no_other_send(log: CommitLog) -> None:
    keys: list[Any] = ["k"]
    bad = message("bad", keys=keys)
    keys.append(7)
    results, _ = send_all(log, Shop(), [message("one"), bad, message("two"), message("three")])
    assert [type(r).__name__ for r in results].count("TransactionSendResult") == 3
    assert isinstance(results[1], MessageError)
    assert bodies(log) == [b"one", b"three", b"two"]


# ---------------------------------------------------------------- what goes wrong
def test_a_lane_whose_thread_ends_answers_those_who_wait_and_begins_again() -> None:
    log = make_log("memory", Path(), orders=2)
    lane: Any = group_commit.Lane(log.machine, "lane", lambda some: some)
    gather = lane._gather

    def no_memory() -> None:
        lane._gather = gather
        raise MemoryError

    lane._gather = no_memory
    with pytest.raises(MemoryError):
        lane.ask(1, "one")
    assert lane.ask(2, "two") == 2


def test_a_problem_of_the_store_is_told_to_all_who_waited(log: CommitLog) -> None:
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        Together(producer, 4)
        prepare_many = log.prepare_many

        def broken(staged: Any) -> Any:
            raise CommitError("the store does not answer")

        log.prepare_many = broken  # type: ignore[method-assign]
        with ThreadPoolExecutor(4) as pool:
            sends = [pool.submit(producer.send_message_in_transaction, message(i)) for i in range(4)]
            problems = [send.exception() for send in sends]
        told = [p for p in problems if p is not None]
        assert {str(p) for p in told} == {"the store does not answer"}
        assert len({id(p) for p in told}) == len(told) > 1  # each thread raises one of its own
        log.prepare_many = prepare_many  # type: ignore[method-assign]
        assert producer.send_message_in_transaction(message("next")).queue_offsets


def test_a_lost_file_of_one_does_not_stop_the_others() -> None:
    log = make_log("memory", Path(), orders=2)
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        Together(producer, 4, decides=4)
        decide_many = log.decide_many
        lost: list[str] = []

        def many(decisions: Any) -> Any:
            lost[:] = lost or [decisions[0].record.half_id]
            if any(d.record.half_id in lost for d in decisions):
                raise LostFileError("its file is lost")
            return decide_many(decisions)

        log.decide_many = many  # type: ignore[method-assign]
        with ThreadPoolExecutor(4) as pool:
            sends = [pool.submit(producer.send_message_in_transaction, message(i)) for i in range(4)]
            problems = [send.exception() for send in sends]
        log.decide_many = decide_many  # type: ignore[method-assign]
    assert [type(p.__cause__) for p in problems if p is not None] == [LostFileError]
    assert len(bodies(log)) == 3


def test_an_interrupted_caller_ends_its_waiting_and_not_the_commit() -> None:
    log = make_log("memory", Path(), orders=2)
    lane: group_commit.Lane[int, int]
    within, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def commit(requests: Sequence[int]) -> Sequence[int]:
        within.set()
        assert go_on.wait(DEADLINE_S)
        done.extend(requests)
        return requests

    lane = group_commit.Lane(log.machine, "lane", commit)

    class Interrupted(BaseException):
        pass

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert within.wait(DEADLINE_S)
            raise Interrupted

    class OneInterrupt:
        event = staticmethod(Event)

        def __getattr__(self, name: str) -> Any:
            return getattr(log.machine, name)

    lane._machine = OneInterrupt()  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        lane.ask(1, "one")
    lane._machine = log.machine
    later = threading.Thread(target=lambda: lane.ask(2, "two"))
    later.start()
    go_on.set()
    later.join(DEADLINE_S)
    assert done == [1, 2]


def test_no_thread_is_left_when_nobody_sends(log: CommitLog) -> None:
    send_all(log, Shop(), [message(i) for i in range(4)])
    wait_for(lambda: not [t for t in threading.enumerate() if t.name in ("txmq-prepare", "txmq-decide")])


def test_one_half_batch_is_asked_for_once_in_a_commit() -> None:
    log = make_log("memory", Path(), orders=2)
    groups: list[list[int]] = []
    lane: Any = group_commit.Lane(log.machine, "lane", lambda some: groups.append(list(some)) or some)
    with lane._lock:  # it cannot begin
        threads = [threading.Thread(target=lane.ask, args=(n, name)) for n, name in enumerate("aabac")]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(n for some in groups for n in some) == [0, 1, 2, 3, 4]
    names = [["aabac"[n] for n in some] for some in groups]
    assert all(len(some) == len(set(some)) for some in names)


def test_asynchronous_sends_share_commits_and_come_to_their_end_when_the_producer_is_closed(log: CommitLog) -> None:
    before = log.refresh()
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None, listener_threads=8) as producer:
        sent = [producer.send_message_in_transaction_async(message(i)) for i in range(30)]
        sent += [producer.send_async(message(i)) for i in range(30, 40)]
    assert bodies(log) == sorted(str(i).encode() for i in range(40))
    assert {send.result(0).local_transaction_state for send in sent} == {COMMIT_MESSAGE}
    assert log.refresh() - before < 40
    with pytest.raises(OptionError, match="not open"):
        producer.send_async(message("late"))


def test_no_more_asynchronous_sends_are_in_flight_than_allowed() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on, accepted = threading.Event(), []
    shop = Shop({str(i).encode(): lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE for i in range(4)})
    with txmq.TransactionMQProducer(log, "shop", shop, check_interval=None, max_in_flight=3) as producer:

        def send() -> None:
            for i in range(4):
                accepted.append(producer.send_message_in_transaction_async(message(i)))

        sender = threading.Thread(target=send)
        sender.start()
        wait_for(lambda: len(accepted) == 3)
        time.sleep(0.1)
        assert len(accepted) == 3
        go_on.set()
        sender.join(DEADLINE_S)
    assert len(bodies(log)) == 4


def test_a_send_whose_local_transaction_would_have_to_wait_is_not_prepared() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({str(i).encode(): lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE for i in range(5)})
    with txmq.TransactionMQProducer(log, "shop", shop, check_interval=None, listener_threads=2) as producer:
        sent = [producer.send_message_in_transaction_async(message(i)) for i in range(5)]
        wait_for(lambda: len(shop.seen) == 2)
        plain = producer.send_async(message("plain"))  # it needs no listener, so it waits for none
        assert plain.result(DEADLINE_S).local_transaction_state is COMMIT_MESSAGE
        assert log.pending().num_rows == 2
        go_on.set()
        assert [s.result(DEADLINE_S).local_transaction_state for s in sent] == [COMMIT_MESSAGE] * 5
    assert len(bodies(log)) == 6


def test_more_are_prepared_while_local_transactions_are_short_and_fewer_when_they_are_long() -> None:
    turns = Turns(threads=2, transaction_timeout_s=6.0)
    assert turns.room == 2
    with turns.running():
        pass
    assert turns.room > 1_000
    turns._mean_s = 10.0
    assert turns.room == 2


def test_a_local_transaction_that_raises_leaves_its_turn_to_the_next() -> None:
    log = make_log("memory", Path(), orders=2)

    def refuses() -> None:
        raise RuntimeError("no")

    shop = Shop({b"0": refuses, b"1": refuses})
    settings: dict[str, Any] = {"check_interval": None, "listener_threads": 1, "on_listener_error": "fail"}
    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:
        sent = [producer.send_message_in_transaction_async(message(i)) for i in range(3)]
        sent += [producer.send_message_in_transaction_async(txmq.Message("nowhere", b""))]  # never prepared
        assert [type(s.exception(DEADLINE_S)).__name__ for s in sent] == [
            "LocalTransactionError", "LocalTransactionError", "NoneType", "TopicNotFoundError",
        ]  # fmt: skip
        assert not producer._turns._admitted


def test_a_producer_is_closed_in_time_although_a_local_transaction_hangs(caplog: pytest.LogCaptureFixture) -> None:
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({b"0": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    settings: dict[str, Any] = {"check_interval": None, "listener_threads": 1, "await_termination": 0.2}
    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:
        hangs = producer.send_message_in_transaction_async(message(0))
        wait_for(lambda: shop.seen == [b"0"])
    assert "closed with 1 under way" in caplog.text
    assert log.pending().num_rows == 1
    with pytest.raises(OptionError, match="not open"):
        producer.send(message(1))
    go_on.set()
    assert hangs.result(DEADLINE_S).local_transaction_state is COMMIT_MESSAGE


def test_a_second_send_of_a_key_waits_for_the_first_and_checks_nothing() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({b"0": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    shop.checked = UNKNOWN  # a check would wait for replay_check_timeout
    settings: dict[str, Any] = {"check_interval": None, "replay_check_timeout": 0}
    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:
        sent = [producer.send_message_in_transaction_async(message(0), idempotency_key="k") for _ in range(3)]
        wait_for(lambda: shop.seen == [b"0"])
        go_on.set()
        results = [s.result(DEADLINE_S) for s in sent]
    assert sorted(r.replayed for r in results) == [False, True, True]
    assert bodies(log) == [b"0"]
    assert producer._keys._known == {}


def test_a_send_that_lingers_shares_its_commit_with_those_that_come(log: CommitLog) -> None:
    before = log.refresh()
    settings: dict[str, Any] = {"check_interval": None, "linger": DEADLINE_S, "max_batch_messages": 3}
    with txmq.TransactionMQProducer(log, "shop", Shop(), **settings) as producer:
        sent = []
        for i in range(3):
            sent.append(producer.send_async(message(i)))
            time.sleep(0.02)
        for send in sent:
            send.result(DEADLINE_S)
    assert log.half.table.version == log.another().half.table.version == 1
    assert log.refresh() - before <= 3


@pytest.mark.parametrize("ago_s", [0.0, 30.0])
def test_a_lone_send_after_a_standstill_does_not_wait_as_long(log: CommitLog, ago_s: float) -> None:
    """It waited three times as long as the last commit had taken, for others that never came."""
    with txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer:
        producer.send(message("first"))
        for lane in (producer._commits._prepares, producer._commits._decides):
            lane._sizes.append(16)
            lane._commit_s, lane._ended_s = 60.0, MACHINE.monotonic() - ago_s
        before_s = MACHINE.monotonic()
        producer.send(message("second"))
        assert MACHINE.monotonic() - before_s < 5.0


def test_hundreds_of_asynchronous_sends_have_few_threads() -> None:
    log = make_log("memory", Path(), orders=2)
    before, most = threading.active_count(), 0

    class Counts(Shop):
        def execute_local_transaction(self, batch: HalfBatch) -> Any:
            nonlocal most
            most = max(most, threading.active_count() - before)
            return COMMIT_MESSAGE

    settings: dict[str, Any] = {"check_interval": None, "max_in_flight": 500, "listener_threads": 4}
    with txmq.TransactionMQProducer(log, "shop", Counts(), **settings) as producer:
        sent = [producer.send_message_in_transaction_async(message(i)) for i in range(500)]
        for send in sent:
            send.add_done_callback(lambda _: None)
    assert {send.result(0).local_transaction_state for send in sent} == {COMMIT_MESSAGE}
    assert most < 50  # listeners, the two that commit, the leases', and as many for callbacks as a busy machine makes


def test_a_callback_that_hangs_holds_up_no_result_and_no_other_callback() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on, called = threading.Event(), []
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        sent = [producer.send_message_in_transaction_async(message(i)) for i in range(20)]
        for n, send in enumerate(sent):
            send.add_done_callback(lambda _, n=n: called.append(n) if n % 4 else go_on.wait(DEADLINE_S))
        assert {send.result(DEADLINE_S).messages for send in sent} == {1}
        wait_for(lambda: len(called) == 15)
        go_on.set()


def test_a_callback_that_comes_late_is_called_at_once_and_each_is_called_once() -> None:
    log = make_log("memory", Path(), orders=2)
    called: list[int] = []
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        for n in range(40):
            sent = producer.send_async(message(n))
            if n % 2:
                sent.result(DEADLINE_S)
            sent.add_done_callback(lambda _, n=n: called.append(n))
            sent.add_done_callback(lambda _, n=n: called.append(n))
        wait_for(lambda: len(called) == 80)
    assert sorted(called) == sorted([*range(40), *range(40)])


def test_a_send_can_be_waited_for_in_every_way_by_several_threads() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({b"0": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    with (
        txmq.TransactionMQProducer(log, "shop", shop, check_interval=None) as producer,
        ThreadPoolExecutor(6) as pool,
    ):
        slow, fast = (producer.send_message_in_transaction_async(message(i)) for i in range(2))
        assert wait([slow, fast], DEADLINE_S, FIRST_COMPLETED).done == {fast}
        for ask in (slow.result, slow.exception):
            with pytest.raises(FuturesTimeoutError):
                ask(0.01)
        with pytest.raises(FuturesTimeoutError):
            list(as_completed([slow], 0.01))
        ways = [
            *(pool.submit(slow.result, DEADLINE_S) for _ in range(3)),
            pool.submit(lambda: next(as_completed([slow], DEADLINE_S)).result()),
            pool.submit(lambda: wait([slow], DEADLINE_S).done.pop().result()),
            pool.submit(asyncio.run, asyncio.wait_for(asyncio_form(slow), DEADLINE_S)),
        ]
        assert not wait(ways, 0.05).done
        go_on.set()
        assert {way.result(DEADLINE_S).queue_offset for way in ways} == {slow.result().queue_offset}
        assert slow.exception() is None


async def asyncio_form(sent: Any) -> Any:
    return await asyncio.wrap_future(sent)


def test_a_send_that_is_cancelled_before_it_began_leaves_nothing_and_its_room_to_others() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on, told = threading.Event(), []
    shop = Shop({b"0": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    settings: dict[str, Any] = {"check_interval": None, "max_in_flight": 2, "listener_threads": 1}
    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:
        first, waits = (producer.send_message_in_transaction_async(message(i)) for i in range(2))
        waits.add_done_callback(lambda _: told.append("waits"))
        wait_for(lambda: shop.seen == [b"0"])
        assert waits.cancel()
        assert waits.cancel()
        assert told == ["waits"]
        assert not first.cancel(), "it has begun"
        third = producer.send_message_in_transaction_async(message(2))
        go_on.set()
        assert [s.result(DEADLINE_S).messages for s in (first, third)] == [1, 1]
    assert sorted(bodies(log)) == [b"0", b"2"]


def test_thousands_that_are_cancelled_at_once_hold_up_nobody() -> None:
    """Each let the next one begin, which was cancelled, too: a RecursionError, and the producer stood still."""
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({b"slow": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    settings: dict[str, Any] = {"check_interval": None, "max_in_flight": 3000, "listener_threads": 1}
    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:
        slow = producer.send_message_in_transaction_async(message("slow"))
        wait_for(lambda: shop.seen == [b"slow"])
        others = [producer.send_message_in_transaction_async(message(i)) for i in range(1500)]
        assert all(other.cancel() for other in others)
        assert not wait(others, DEADLINE_S).not_done
        last = producer.send_message_in_transaction_async(message("last"))
        go_on.set()
        assert [s.result(DEADLINE_S).messages for s in (slow, last)] == [1, 1]
    assert sorted(bodies(log)) == [b"last", b"slow"]


def test_a_send_that_several_threads_cancel_gives_up_its_room_once() -> None:
    left: list[object] = []
    for _ in range(200):
        sent = SendFuture(InFlight(1, left.append))
        barrier = threading.Barrier(3)

        def cancel(sent: SendFuture = sent, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            sent.cancel()

        threads = [threading.Thread(target=cancel) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert len(left) == 200


def test_who_waits_for_sends_that_a_shutdown_cancels_hears_of_it() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({b"0": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    settings: dict[str, Any] = {"listener_threads": 1, "max_in_flight": 3, "await_termination": 0.1}
    with txmq.TransactionMQProducer(log, "shop", shop, check_interval=None, **settings) as producer:
        first = producer.send_message_in_transaction_async(message(0), idempotency_key="k")
        wait_for(lambda: shop.seen == [b"0"])
        flies = producer.send_message_in_transaction_async(message(1))
        in_pool: list[Any] = []

        async def send_more() -> None:  # beyond max_in_flight: some have no thread yet
            for i in range(5):
                in_pool.append(producer.send_message_in_transaction_async(message(2 + i), idempotency_key="k"))

        asyncio.run(send_more())
    cancelled = [sent for sent in [flies, *in_pool] if sent.cancelled()]
    assert flies in cancelled
    assert len(cancelled) >= 3
    assert not wait(cancelled, DEADLINE_S).not_done
    go_on.set()
    first.result(DEADLINE_S)


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("answer", [COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN])
def test_callbacks_may_all_wait_for_other_sends(answer: Any, key: str | None) -> None:
    """They took the threads that those sends needed."""
    log = make_log("memory", Path(), orders=2)
    shop, heard = Shop({b"more": answer}), []
    settings: dict[str, Any] = {"check_interval": None, "max_in_flight": 2, "replay_check_timeout": 0}
    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:

        def send_more(n: int) -> None:
            more = producer.send_message_in_transaction_async(message("more"), idempotency_key=key and f"{key}{n}")
            heard.append(more.result(DEADLINE_S).local_transaction_state)

        for n in range(2):
            producer.send_message_in_transaction_async(message(n)).add_done_callback(lambda _, n=n: send_more(n))
        wait_for(lambda: len(heard) == 2)
    assert heard == [answer, answer]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_send_that_is_interrupted_in_any_call_keeps_no_room(key: str | None) -> None:
    """It stayed among those under way, and each shutdown waited 30 seconds for it. Python looks for an interrupt when a
    function begins."""
    log = make_log("memory", Path(), orders=2)
    interrupted = 0
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None, max_in_flight=3) as producer:
        for at in range(1, 500):
            calls = 0

            def trace(frame: Any, event: str, _: object) -> None:
                nonlocal calls
                if frame.f_code.co_filename.endswith(
                    ("sink/producer.py", "sink/turns.py", "sink/flights.py", "sink/futures.py")
                ):
                    calls += 1
                    if calls == at:  # noqa: B023
                        raise KeyboardInterrupt

            before = sys.gettrace()
            try:
                sys.settrace(trace)
                producer.send_message_in_transaction_async(message(at), idempotency_key=key and f"{key}{at}")
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
            finally:
                sys.settrace(before)
        assert interrupted > 8
        wait_for(lambda: not producer._under_way._inside and not producer._in_flight._inside)
        assert not producer._turns._admitted
    assert log.pending().num_rows == 0


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("raised", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_takes_no_thread_from_other_sends(raised: type[BaseException], key: str | None) -> None:
    """One of a send with a key ended a thread of the pool, and as many of them as there were threads stopped all."""
    log = make_log("memory", Path(), orders=2)
    called: list[int] = []

    def fails(_: object) -> None:
        raise raised

    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None, max_in_flight=2) as producer:
        for n in range(6):
            sent = producer.send_message_in_transaction_async(message(n), idempotency_key=key and f"{key}{n}")
            sent.add_done_callback(fails)
            sent.add_done_callback(lambda _, n=n: called.append(n))
            assert sent.result(DEADLINE_S).messages == 1
        wait_for(lambda: len(called) == 6)


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit])
def test_a_callback_that_raises_keeps_nobody_from_hearing_of_the_end(raised: type[BaseException]) -> None:
    log = make_log("memory", Path(), orders=2)
    go_on, called = threading.Event(), []
    shop = Shop({b"0": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    settings: dict[str, Any] = {"check_interval": None, "listener_threads": 1, "await_termination": 0.1}

    def fails(_: object) -> None:
        raise raised

    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:
        sent = [producer.send_message_in_transaction_async(message(i)) for i in range(5)]
        for n, send in enumerate(sent):
            send.add_done_callback(fails)
            send.add_done_callback(lambda _, n=n: called.append(n))
        wait_for(lambda: shop.seen == [b"0"])
    assert all(send.cancelled() for send in sent[1:])
    wait_for(lambda: sorted(called) == [1, 2, 3, 4])
    go_on.set()
    wait_for(lambda: 0 in called)


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("way", ["raises", "blocks"])
def test_a_callback_of_a_cancelled_send_does_not_keep_a_producer_from_closing(way: str, key: str | None) -> None:
    """It was called in the thread that closed: the others were never cancelled, and shutdown never ended."""
    log = make_log("memory", Path(), orders=2)
    go_on, called = threading.Event(), []

    def callback(_: object) -> None:
        if way == "raises":
            raise KeyboardInterrupt
        go_on.wait(DEADLINE_S)

    shop = Shop({b"0": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    settings: dict[str, Any] = {"listener_threads": 1, "await_termination": 0.1}
    producer = txmq.TransactionMQProducer(log, "shop", shop, **settings).start()
    threads = list(producer._threads)
    sent = [
        producer.send_message_in_transaction_async(message(i), idempotency_key=key and f"{key}{i}") for i in range(5)
    ]
    for send in sent[1:]:
        send.add_done_callback(callback)
        send.add_done_callback(called.append)
    wait_for(lambda: shop.seen == [b"0"])
    producer.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    if key is None:  # the others have a thread, in which they wait for their turn
        assert all(send.cancelled() for send in sent[1:])
    go_on.set()
    assert not wait(sent, DEADLINE_S).not_done
    wait_for(lambda: len(called) == 4)


@pytest.mark.parametrize("settle", ["check", "resolve"])
def test_a_plain_send_that_others_have_settled_waits_for_no_local_transaction(
    settle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log("memory", Path(), orders=2)
    other, go_on, refresh = another(log), threading.Event(), log.refresh

    def settled_meanwhile() -> int:
        """The sender sleeps between its prepare and its look at what op says."""
        for half_id in other.open_half_ids():
            if other.get(half_id).header.fence_id == CommitOncePrepared.store_id:
                if settle == "check":
                    CheckService(other, {}, transaction_timeout=0).run_once()
                else:
                    other.resolve(half_id, COMMIT_MESSAGE, "seen to")
        return refresh()

    shop = Shop({b"%d" % i: lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE for i in range(2)})
    settings: dict[str, Any] = {"check_interval": None, "listener_threads": 2}
    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:
        blocked = [producer.send_message_in_transaction_async(message(i)) for i in range(2)]
        wait_for(lambda: len(shop.seen) == 2)
        monkeypatch.setattr(log, "refresh", settled_meanwhile)
        assert producer.send_async(message("plain")).result(DEADLINE_S).messages == 1
        monkeypatch.setattr(log, "refresh", refresh)
        go_on.set()
        assert [b.result(DEADLINE_S).messages for b in blocked] == [1, 1]
    assert sorted(bodies(log)) == [b"0", b"1", b"plain"]


def test_a_send_that_comes_while_the_producer_is_closed_is_cancelled_too() -> None:
    """It waited for ever behind those that were left."""
    turns = Turns(threads=1, transaction_timeout_s=6.0)
    begun, given_up = [], []
    turns.admit("first", lambda: not begun.append("first"))
    turns.close()
    turns.admit("late", lambda: not begun.append("late"), lambda: given_up.append("late"))
    turns.leave("first")
    assert (begun, given_up) == (["first"], ["late"])


def test_sends_that_have_not_begun_when_the_producer_is_closed_are_cancelled() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({b"0": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    settings: dict[str, Any] = {"check_interval": None, "listener_threads": 1, "await_termination": 0.1}
    with txmq.TransactionMQProducer(log, "shop", shop, **settings) as producer:
        first, *others = (producer.send_message_in_transaction_async(message(i)) for i in range(4))
        wait_for(lambda: shop.seen == [b"0"])
    assert [other.cancelled() for other in others] == [True] * 3
    called = threading.Event()
    first.add_done_callback(lambda _: called.set())
    go_on.set()
    assert first.result(DEADLINE_S).messages == 1
    assert called.wait(DEADLINE_S), "although the producer has no threads for callbacks any more"
    assert bodies(log) == [b"0"]


def test_a_check_that_is_faster_than_an_asynchronous_send_lets_it_go_on_under_the_next_attempt() -> None:
    log = make_log("memory", Path(), orders=2)

    class Slow(Shop):
        def execute_local_transaction(self, batch: HalfBatch) -> Any:
            if batch.attempt == 1:
                self.checked = ROLLBACK_MESSAGE
                CheckService(another(log), {"shop": self}, transaction_timeout=0.0).run_once()
                raise FencedError("a check was here")
            tenants.append(tenant.get(None))
            return super().execute_local_transaction(batch)

    tenant: ContextVar[str] = ContextVar("tenant")
    tenants: list[str | None] = []
    with txmq.TransactionMQProducer(log, "shop", Slow(), check_interval=None) as producer:
        tenant.set("of the caller")
        result = producer.send_message_in_transaction_async(message(0)).result(DEADLINE_S)
    assert (result.local_transaction_state, result.transaction_id[-1]) == (COMMIT_MESSAGE, "2")
    assert tenants == ["of the caller"]
    assert bodies(log) == [b"0"]


def test_what_the_caller_has_set_is_seen_by_the_listener_of_an_asynchronous_send() -> None:
    log = make_log("memory", Path(), orders=2)
    tenant: ContextVar[str] = ContextVar("tenant")
    shop = Shop()
    shop.answers = {str(i).encode(): lambda: seen.append(tenant.get()) or COMMIT_MESSAGE for i in range(3)}
    seen: list[str] = []
    with txmq.TransactionMQProducer(log, "shop", shop, check_interval=None) as producer:
        for i in range(3):
            tenant.set(f"tenant {i}")
            producer.send_message_in_transaction_async(message(i))
    assert sorted(seen) == ["tenant 0", "tenant 1", "tenant 2"]


def test_a_coroutine_can_wait_for_a_send() -> None:
    log = make_log("memory", Path(), orders=2)

    async def handle(producer: txmq.TransactionMQProducer, n: int) -> txmq.TransactionSendResult:
        return await asyncio.wrap_future(producer.send_message_in_transaction_async(message(n)))

    async def serve(producer: txmq.TransactionMQProducer) -> Sequence[txmq.TransactionSendResult]:
        return await asyncio.gather(*(handle(producer, n) for n in range(10)))

    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        assert len({r.half_id for r in asyncio.run(serve(producer))}) == 10
    assert len(bodies(log)) == 10


class Awaits(Shop):
    """A local transaction that only the caller's event loop can bring to its end."""

    async def execute_local_transaction(self, batch: HalfBatch) -> Any:
        await asyncio.sleep(0)
        return super().execute_local_transaction(batch)


def test_a_coroutine_awaits_the_future_itself() -> None:
    """Who is cancelled ends its waiting, and not the send, also when that has not begun."""
    log = make_log("memory", Path(), orders=2)
    may_end = threading.Event()

    def slow() -> Any:
        return COMMIT_MESSAGE if may_end.wait(DEADLINE_S) else UNKNOWN

    async def gives_up(producer: txmq.TransactionMQProducer) -> list[Any]:
        sent = [producer.send_message_in_transaction_async(message("slow")) for _ in range(3)]
        for one in sent:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(one, 0.05)
        may_end.set()
        return [await one for one in sent]

    with txmq.TransactionMQProducer(
        log, "shop", Shop({b"slow": slow}), check_interval=None, listener_threads=1
    ) as producer:
        assert [r.local_transaction_state for r in asyncio.run(gives_up(producer))] == [COMMIT_MESSAGE] * 3
    assert log.read("orders").num_rows == 3


def test_what_a_send_raises_after_its_waiting_was_cancelled_is_not_told_by_asyncio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = make_log("memory", Path(), orders=2)
    may_end = threading.Event()

    def fails() -> Any:
        may_end.wait(DEADLINE_S)
        raise ValueError("no")

    async def gives_up(producer: txmq.TransactionMQProducer) -> None:
        sent = producer.send_message_in_transaction_async(message("fails"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sent, 0.05)
        may_end.set()
        with pytest.raises(LocalTransactionError, match="no"):
            await sent

    settings: dict[str, Any] = {"check_interval": None, "on_listener_error": "fail"}
    with txmq.TransactionMQProducer(log, "shop", Shop({b"fails": fails}), **settings) as producer:
        asyncio.run(gives_up(producer))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_local_transaction_that_is_a_coroutine_runs_in_the_loop_of_its_caller() -> None:
    log = make_log("memory", Path(), orders=2)

    async def serve(producer: txmq.TransactionMQProducer) -> list[txmq.TransactionSendResult]:
        sent = [producer.send_message_in_transaction_async(message(n)) for n in range(5)]
        return await asyncio.gather(*map(asyncio.wrap_future, sent))

    def refuses() -> None:
        raise RuntimeError("no")

    shop = Awaits({b"1": ROLLBACK_MESSAGE, b"2": refuses})
    with txmq.TransactionMQProducer(log, "shop", shop, check_interval=None) as producer:
        states = [r.local_transaction_state for r in asyncio.run(serve(producer))]
        assert states == [COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, COMMIT_MESSAGE, COMMIT_MESSAGE]
        before = log.half.table.version
        with pytest.raises(ListenerError, match="no event loop is running here"):
            producer.send_message_in_transaction_async(message(9))
        with pytest.raises(ListenerError, match="can wait for it; make it a plain"):
            producer.send_message_in_transaction(message(9))
        assert producer.send(message(10)).messages == 1  # it asks no listener
        assert log.half.table.version == before + 1, "what was refused is not prepared"


def test_a_local_transaction_whose_event_loop_has_ended_is_told_and_holds_up_nobody(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    began = threading.Event()

    class WaitsForEver(Shop):
        async def execute_local_transaction(self, batch: HalfBatch) -> Any:
            began.set()
            await asyncio.Event().wait()

    async def send(producer: txmq.TransactionMQProducer) -> Any:
        sent = producer.send_message_in_transaction_async(message(0))
        while not began.is_set():
            await asyncio.sleep(0.01)
        return sent

    for closes in (True, False):
        began.clear()
        producer = txmq.TransactionMQProducer(
            log, "shop", WaitsForEver(), check_interval=None, await_termination=DEADLINE_S if closes else 0.1
        ).start()
        loop = asyncio.new_event_loop()
        sent = loop.run_until_complete(send(producer))
        if closes:
            loop.close()
        else:  # a library that goes on with its loop later
            producer.shutdown()
        assert sent.result(DEADLINE_S).local_transaction_state is txmq.UNKNOWN
        producer.shutdown()
        if not closes:  # what waited is cancelled there
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
    assert caplog.text.count("the event loop ended while the local transaction ran in it") == 2
    assert bodies(log) == []
    assert len(log.open_half_ids()) == 2


def test_a_listener_that_sends_more_does_not_wait_for_its_own_room(log: CommitLog) -> None:
    audits: list[Any] = []

    class Audits(Shop):
        def execute_local_transaction(self, batch: HalfBatch) -> Any:
            audits.append(producer.send_async(message(100)))
            return super().execute_local_transaction(batch)

    settings: dict[str, Any] = {"check_interval": None, "max_in_flight": 1, "listener_threads": 1}
    with txmq.TransactionMQProducer(log, "shop", Audits(), **settings) as producer:
        sent = producer.send_message_in_transaction_async(message(0))
        sent.add_done_callback(lambda _: audits.append(producer.send_async(message(101))))
        sent.result(DEADLINE_S)
        wait_for(lambda: len(audits) == 2)
        for audit in list(audits):
            audit.result(DEADLINE_S)
    assert sorted(bodies(log)) == [b"0", b"100", b"101"]


def test_a_callback_may_close_the_producer(log: CommitLog) -> None:
    closed = threading.Event()

    def close(_: object) -> None:
        producer.shutdown()
        closed.set()

    producer = txmq.TransactionMQProducer(log, "shop", Shop()).start()
    threads = list(producer._threads)
    producer.send_async(message(0)).add_done_callback(close)
    assert closed.wait(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)


def test_an_event_loop_is_not_stopped_by_more_sends_than_may_be_in_flight() -> None:
    """The accepted send needed the loop that the next one had stopped."""
    log = make_log("memory", Path(), orders=2)

    async def serve(producer: txmq.TransactionMQProducer) -> None:
        sent = [producer.send_message_in_transaction_async(message(n)) for n in range(3)]
        await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, sent)), DEADLINE_S)

    with txmq.TransactionMQProducer(log, "shop", Awaits(), check_interval=None, max_in_flight=1) as producer:
        asyncio.run(serve(producer))
    assert len(bodies(log)) == 3


def test_those_who_wait_for_a_key_take_no_room_of_others() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({b"slow": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    with txmq.TransactionMQProducer(log, "shop", shop, check_interval=None, listener_threads=2) as producer:
        send = producer.send_message_in_transaction_async
        slow = [send(message("slow"), idempotency_key="k") for _ in range(5)]
        wait_for(lambda: shop.seen == [b"slow"])
        assert send(message("quick")).result(DEADLINE_S).local_transaction_state is COMMIT_MESSAGE
        go_on.set()
        assert [s.result(DEADLINE_S).replayed for s in slow].count(False) == 1


def test_a_producer_that_is_opened_again_is_not_held_up_by_what_hung_before() -> None:
    log = make_log("memory", Path(), orders=2)
    go_on = threading.Event()
    shop = Shop({b"hangs": lambda: go_on.wait(DEADLINE_S) and COMMIT_MESSAGE})
    settings: dict[str, Any] = {"max_in_flight": 1, "listener_threads": 1, "await_termination": 0.1}
    producer = txmq.TransactionMQProducer(log, "shop", shop, check_interval=None, **settings).start()
    hangs = producer.send_message_in_transaction_async(message("hangs"), idempotency_key="k")
    wait_for(lambda: shop.seen == [b"hangs"])
    producer.shutdown()
    with producer:
        assert producer.send_message_in_transaction_async(message("next")).result(DEADLINE_S).messages == 1
        go_on.set()
        hangs.result(DEADLINE_S)
    assert bodies(log) == [b"hangs", b"next"]


def test_a_check_that_is_a_coroutine_is_refused() -> None:
    class Waits(Shop):
        async def check_local_transaction(self, batch: HalfBatch) -> Any:
            return COMMIT_MESSAGE

    with pytest.raises(ListenerError, match="a check has no event loop"):
        txmq.TransactionMQProducer(make_log("memory", Path(), orders=2), "shop", Waits())


def test_a_forked_process_is_refused(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        monkeypatch.setattr("rmq_spark.forks._forks", -1)
        with pytest.raises(OptionError, match="Make a producer in each worker, after the fork"):
            producer.send_message_in_transaction(message("x"))
        producer.shutdown()
        with pytest.raises(OptionError, match="after the fork"):
            producer.start()
        monkeypatch.undo()


# ---------------------------------------------------------------- upkeep
def test_a_shared_file_leaves_when_all_in_it_are_settled(log: CommitLog) -> None:
    send_all(log, Shop({b"3": UNKNOWN}), [message(i) for i in range(5)])
    log.drain()
    let_leave(log)
    assert files(log) == 1  # the pending one keeps its file, with those that lie in it
    (half_id,) = log.open_half_ids()
    assert log.get(half_id).rows == 1
    CheckService(log.another(), {"shop": Shop()}, transaction_timeout=0).run_once()
    log.drain()
    let_leave(log)
    assert files(log) == 0
    assert bodies(log) == [b"0", b"1", b"2", b"3", b"4"]


def test_what_lies_in_shared_files_is_drained_as_it_was_placed(log: CommitLog) -> None:
    send_all(log, Shop({b"3": ROLLBACK_MESSAGE}), [message(i, "bills") for i in range(MANY)])
    columns = ["queue_id", "queue_offset", "body", "msg_id", "transaction_id"]
    before = log.another().read("bills", columns=columns).to_pylist()
    log.drain()
    let_leave(log)
    after = log.another().read("bills", columns=columns).to_pylist()
    assert after == before
    assert len(after) == MANY - 1


def test_a_half_batch_that_is_not_in_a_shared_file_is_not_taken_for_one_that_is(log: CommitLog) -> None:
    results, _ = send_all(log, Shop(), [message(i) for i in range(5)])
    ids = sorted(r.half_id for r in results)
    between = ids[2].replace(":0", "!:0")
    assert ids[2] < ids[2].replace(":0", ":0!")
    assert ids[1] < between < ids[-1]
    other = log.another()
    assert other.half._find(between) is None


def test_each_half_batch_of_a_shared_file_is_counted(log: CommitLog) -> None:
    send_all(log, Shop(), [message(i) for i in range(5)])
    other = log.another()
    assert sorted(other.half.counted()["rows"].to_pylist()) == [1] * 5
    assert [p.rows for p in other.half.prepared_after(0).values()] == [1] * 5
