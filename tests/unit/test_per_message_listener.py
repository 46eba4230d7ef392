"""PerMessageListener(threads=n): what runs at once, what keeps its order, and what an exception does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, CheckService, MessageExt, PerMessageListener
from rmq_spark.checks import CheckReport
from tests.support.sends import producer_of, raising

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
    with producer_of(log, listener, on_listener_error=on_listener_error) as producer:
        return producer.send_messages_in_transaction(rows, topic="orders", transaction_per="message")


def check(log: Any, listener: PerMessageListener) -> CheckReport:
    return CheckService(log, {"shop": listener}, transaction_timeout=0).run_once()


def numbered(count: int, keys: list[str] | None = None) -> pa.Table:
    bodies = pa.array([b"%d" % n for n in range(count)])
    return pa.table({"body": bodies, "sharding_key": keys} if keys else {"body": bodies})


def visible(log: Any) -> list[bytes]:
    return sorted(log.read("orders")["body"].to_pylist())


AWAY = TimeoutError("the partner is away")


def away_at(body: bytes) -> Callable[[MessageExt], Any]:
    """Commits all messages but one."""

    def answer(msg: MessageExt) -> Any:
        if msg.body == body:
            raise AWAY
        return COMMIT_MESSAGE

    return answer


def test_as_many_messages_run_at_once_as_there_are_threads_and_checks_too(log: Any) -> None:
    four = threading.Barrier(4, timeout=WAIT_S)  # breaks unless four calls are inside at once

    def meet(msg: MessageExt) -> Any:
        four.wait()
        return COMMIT_MESSAGE

    send(log, PerMessageListener(Partner(meet), threads=4), numbered(8))
    assert len(visible(log)) == 8
    listener = PerMessageListener(Partner(lambda msg: None, meet), threads=4)
    send(log, listener, numbered(4))
    assert check(log, listener).committed.messages == 4


@pytest.mark.parametrize("threads", [1, 3])
def test_each_message_gets_its_own_verdict(log: Any, threads: int) -> None:
    def decide(msg: MessageExt) -> Any:
        if int(msg.body) % 4 == 1:
            raise txmq.Rollback(f"{msg.body.decode()} is odd")
        return (COMMIT_MESSAGE, None, ROLLBACK_MESSAGE, None)[int(msg.body) % 4]

    send(log, PerMessageListener(Partner(decide), threads=threads), numbered(100))
    assert [int(body) % 4 for body in visible(log)] == [0] * 25
    assert log.pending()["messages"].to_pylist() == [25]


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
            raise AWAY
        begun.set()
        failed.wait(WAIT_S)
        return COMMIT_MESSAGE

    partner = Partner(fail_beside_another)
    with pytest.raises(txmq.LocalTransactionError, match="TimeoutError: the partner is away"):
        send(log, PerMessageListener(partner, threads=2), numbered(1_000))
    assert len(partner.begun) < 1_000
    assert visible(log) == []
    assert log.pending()["messages"].to_pylist() == [1_000]
    # those that ran were waited for
    assert not [t for t in threading.enumerate() if t.name.startswith("txmq-listener")]


@pytest.mark.parametrize("threads", [1, 4])
def test_with_unknown_an_exception_is_unknown_for_its_message_alone(log: Any, threads: int, caplog: Any) -> None:
    partner = Partner(away_at(b"3"))
    listener = PerMessageListener(partner, threads=threads)
    send(log, listener, numbered(6), on_listener_error="unknown")
    assert visible(log) == [b"0", b"1", b"2", b"4", b"5"]
    assert "raised for 1 of 6 messages" in caplog.text
    check(log, listener)
    assert partner.checked == [b"3"]


def test_with_unknown_and_all_raising_the_whole_half_batch_is_unknown(log: Any, caplog: Any) -> None:
    with caplog.at_level("WARNING"):
        send(log, PerMessageListener(Partner(raising(AWAY)), threads=2), numbered(3), on_listener_error="unknown")
    assert str(AWAY) in caplog.text
    assert log.pending()["messages"].to_pylist() == [3]


def test_a_check_that_raises_for_one_message_decides_the_others(log: Any) -> None:
    listener = PerMessageListener(Partner(lambda msg: None, away_at(b"1")), threads=2)
    sent = send(log, listener, numbered(3))
    report = check(log, listener)
    assert (report.committed.messages, report.unknown.messages) == (2, 1)
    assert "TimeoutError: the partner is away" in str(log.trace(half_id=sent.half_id))


def test_a_check_that_raises_for_all_messages_counts_for_none(log: Any) -> None:
    listener = PerMessageListener(Partner(lambda msg: None, raising(AWAY)), threads=2)
    send(log, listener, numbered(3))
    assert not check(log, listener).ok
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
