"""PerMessageListener(threads=n): what runs at once, what keeps its order, and what an exception does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, CheckService, MessageExt, PerMessageListener

WAIT_S = 20.0


class Partner:
    """Answers each message by a function; ``check`` by another one."""

    def __init__(self, execute: Callable[[MessageExt], Any], check: Callable[[MessageExt], Any] | None = None) -> None:
        self._execute, self._check = execute, check or (lambda msg: ROLLBACK_MESSAGE)
        self.begun: list[bytes] = []
        self.checked: list[bytes] = []

    def execute_local_transaction(self, msg: MessageExt, arg: Any) -> Any:
        self.begun.append(msg.body)
        return self._execute(msg)

    def check_local_transaction(self, msg: MessageExt) -> Any:
        self.checked.append(msg.body)
        return self._check(msg)


def send(log: Any, listener: PerMessageListener, rows: pa.Table, on_listener_error: str = "fail") -> Any:
    with txmq.TransactionMQProducer(
        log, "shop", listener, check_interval=None, on_listener_error=on_listener_error
    ) as producer:
        return producer.send_messages_in_transaction(rows, topic="orders", transaction_per="message")


def numbered(count: int, keys: list[str] | None = None) -> pa.Table:
    bodies = pa.array([b"%d" % n for n in range(count)])
    return pa.table({"body": bodies, "sharding_key": keys} if keys else {"body": bodies})


def visible(log: Any) -> list[bytes]:
    return sorted(log.read("orders")["body"].to_pylist())


def test_as_many_messages_run_at_once_as_there_are_threads(log: Any) -> None:
    four = threading.Barrier(4, timeout=WAIT_S)  # breaks unless four calls are inside at once

    def meet(msg: MessageExt) -> Any:
        four.wait()
        return COMMIT_MESSAGE

    send(log, PerMessageListener(Partner(meet), threads=4), numbered(8))
    assert len(visible(log)) == 8


def test_checks_run_at_once_too(log: Any) -> None:
    four = threading.Barrier(4, timeout=WAIT_S)

    def meet(msg: MessageExt) -> Any:
        four.wait()
        return COMMIT_MESSAGE

    listener = PerMessageListener(Partner(lambda msg: None, meet), threads=4)
    send(log, listener, numbered(4))
    assert CheckService(log, {"shop": listener}, transaction_timeout=0).run_once().committed.messages == 4


def test_each_message_gets_its_own_verdict(log: Any) -> None:
    def even(msg: MessageExt) -> Any:
        if int(msg.body) % 2:
            raise txmq.Rollback(f"{msg.body.decode()} is odd")
        return COMMIT_MESSAGE

    send(log, PerMessageListener(Partner(even), threads=3), numbered(100))
    assert [int(body) % 2 for body in visible(log)] == [0] * 50
    assert not log.pending().num_rows


def test_messages_of_one_sharding_key_run_one_after_the_other_in_send_order(log: Any) -> None:
    running: dict[str | None, bytes] = {}
    overlaps: list[tuple[bytes, bytes]] = []
    both_keys = threading.Barrier(2, timeout=WAIT_S)

    def watch(msg: MessageExt) -> Any:
        if (other := running.get(msg.sharding_key)) is not None:
            overlaps.append((other, msg.body))
        running[msg.sharding_key] = msg.body
        both_keys.wait()  # the two keys do run at once
        del running[msg.sharding_key]
        return COMMIT_MESSAGE

    partner = Partner(watch)
    send(log, PerMessageListener(partner, threads=8), numbered(20, ["a", "b"] * 10))
    assert overlaps == []
    order = [int(body) for body in partner.begun]
    assert [n for n in order if n % 2 == 0] == list(range(0, 20, 2))
    assert [n for n in order if n % 2] == list(range(1, 20, 2))


def test_after_an_exception_nothing_begins_and_all_stays_pending(log: Any) -> None:
    begun, failed = threading.Event(), threading.Event()

    def fail_beside_another(msg: MessageExt) -> Any:
        if msg.body == partner.begun[0]:
            begun.wait(WAIT_S)
            failed.set()
            raise TimeoutError("the partner is away")
        begun.set()
        failed.wait(WAIT_S)
        return COMMIT_MESSAGE

    partner = Partner(fail_beside_another)
    with pytest.raises(txmq.LocalTransactionError, match="TimeoutError: the partner is away"):
        send(log, PerMessageListener(partner, threads=2), numbered(1_000))
    assert len(partner.begun) < 1_000
    assert visible(log) == []
    assert log.pending()["messages"].to_pylist() == [1_000]
    assert not [
        t for t in threading.enumerate() if t.name.startswith("txmq-listener")
    ]  # those that ran were waited for


@pytest.mark.parametrize("threads", [1, 4])
def test_with_unknown_an_exception_is_unknown_for_its_message_alone(log: Any, threads: int, caplog: Any) -> None:
    def fail_at_three(msg: MessageExt) -> Any:
        if msg.body == b"3":
            raise TimeoutError("the partner is away")
        return COMMIT_MESSAGE

    partner = Partner(fail_at_three)
    listener = PerMessageListener(partner, threads=threads)
    send(log, listener, numbered(6), on_listener_error="unknown")
    assert visible(log) == [b"0", b"1", b"2", b"4", b"5"]
    assert "raised for 1 of 6 messages" in caplog.text
    CheckService(log, {"shop": listener}, transaction_timeout=0).run_once()
    assert partner.checked == [b"3"]


def test_with_unknown_and_all_raising_the_whole_half_batch_is_unknown(log: Any, caplog: Any) -> None:
    def fail(msg: MessageExt) -> Any:
        raise TimeoutError("no answer for " + msg.body.decode())

    with caplog.at_level("WARNING"):
        send(log, PerMessageListener(Partner(fail), threads=2), numbered(3), on_listener_error="unknown")
    assert "no answer for" in caplog.text
    assert log.pending()["messages"].to_pylist() == [3]


def test_a_check_that_raises_for_one_message_decides_the_others(log: Any) -> None:
    def answer(msg: MessageExt) -> Any:
        if msg.body == b"1":
            raise TimeoutError("the partner is away")
        return COMMIT_MESSAGE

    listener = PerMessageListener(Partner(lambda msg: None, answer), threads=2)
    sent = send(log, listener, numbered(3))
    report = CheckService(log, {"shop": listener}, transaction_timeout=0).run_once()
    assert (report.committed.messages, report.unknown.messages) == (2, 1)
    assert "TimeoutError: the partner is away" in str(log.trace(half_id=sent.half_id))


def test_a_check_that_raises_for_all_messages_counts_for_none(log: Any) -> None:
    def fail(msg: MessageExt) -> Any:
        raise TimeoutError("the partner is away")

    listener = PerMessageListener(Partner(lambda msg: None, fail), threads=2)
    send(log, listener, numbered(3))
    report = CheckService(log, {"shop": listener}, transaction_timeout=0).run_once()
    assert not report.ok
    assert log.pending()["check_times"].to_pylist() == [0]


def test_an_interrupt_waits_for_what_runs_and_begins_nothing_more(log: Any) -> None:
    """The interrupt comes out of a call here; from a signal it comes out of the wait for one."""
    ended: list[bytes] = []
    interrupted = threading.Event()

    def interrupt(msg: MessageExt) -> Any:
        if msg.body == partner.begun[0]:
            interrupted.set()
            raise KeyboardInterrupt
        interrupted.wait(WAIT_S)
        ended.append(msg.body)
        return COMMIT_MESSAGE

    partner = Partner(interrupt)
    with pytest.raises(KeyboardInterrupt):
        send(log, PerMessageListener(partner, threads=2), numbered(5_000))
    assert len(partner.begun) < 5_000
    assert len(ended) == len(partner.begun) - 1
    assert log.pending()["messages"].to_pylist() == [5_000]


@pytest.mark.parametrize("threads", [0, 1_001, True, "4", 2.0])
def test_a_number_of_threads_that_is_none_is_refused(threads: Any) -> None:
    with pytest.raises(txmq.OptionError, match="threads"):
        PerMessageListener(Partner(lambda msg: None), threads=threads)
