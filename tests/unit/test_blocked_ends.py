"""The end of a producer and of a consumer, while a function of the user blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support.listeners import Scripted
from tests.support.meanwhile import seen_at
from tests.support.sends import DEADLINE_S, message, producer_of, wait_for


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Lets what blocks go on, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def require_end(closes: Callable[[], object]) -> None:
    """Require that a call comes to its end."""
    closing = threading.Thread(target=closes, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()


def test_a_callback_that_blocks_is_waited_for_as_long_as_for_a_send_and_then_named(
    log: CommitLog, go_on: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """shutdown() waited for it for ever."""
    called: list[object] = []

    def mail_the_customer(sent: object) -> None:
        called.append(sent)
        go_on.wait()

    producer = producer_of(log, await_termination=0.1).start()
    sent = producer.send_async(message(0))
    sent.add_done_callback(mail_the_customer)
    assert sent.result(DEADLINE_S).messages == 1
    wait_for(lambda: bool(called))
    require_end(producer.shutdown)
    assert "mail_the_customer" in caplog.text
    assert "test_blocked_ends.py" in caplog.text
    assert "await_termination=0.1 s" in caplog.text


def test_a_callback_that_ends_in_time_is_not_spoken_of(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    called: list[object] = []

    def takes_a_while(sent: object) -> None:
        time.sleep(0.01)
        called.append(sent)

    with producer_of(log) as producer:
        for n in range(5):
            producer.send_async(message(n)).add_done_callback(takes_a_while)
    assert len(called) == 5
    assert caplog.messages == []


def test_a_check_that_blocks_does_not_keep_a_producer_from_closing(log: CommitLog, go_on: threading.Event) -> None:
    blocked = threading.Event()

    def block(batch: txmq.HalfBatch) -> Any:
        blocked.set()
        go_on.wait()
        return txmq.COMMIT_MESSAGE

    shop = Scripted(txmq.UNKNOWN, block)
    producer = producer_of(log, shop, check_interval=0.01, transaction_timeout=0, await_termination=0.1).start()
    producer.send_message_in_transaction(message(0))
    assert blocked.wait(DEADLINE_S)
    require_end(producer.shutdown)


def test_upkeep_that_blocks_is_named_and_does_not_go_on_when_the_producer_is_opened_again(
    log: CommitLog, go_on: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """shutdown() waited for it for ever, too. Then its thread saw the event of the producer that was opened again."""
    rounds: list[threading.Thread] = []

    def blocks() -> None:
        rounds.append(threading.current_thread())
        go_on.wait()

    with seen_at("upkeep begins", blocks):
        producer = producer_of(log, maintenance_interval=0.01, await_termination=0.1).start()
        wait_for(lambda: bool(rounds))
        require_end(producer.shutdown)
        assert "txmq-maintainer" in caplog.text
        with producer:
            wait_for(lambda: len(rounds) > 1)
            go_on.set()
            rounds[0].join(DEADLINE_S)
            assert not rounds[0].is_alive()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_listener_that_blocks_is_named_when_its_consumer_is_closed(
    log: CommitLog, go_on: threading.Event, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    """When somebody else had got the queue meanwhile, shutdown() waited for the listener for ever."""
    with producer_of(log) as producer:
        producer.send(message(0))
    blocked = threading.Event()

    def count_the_stock(messages: object) -> Any:
        blocked.set()
        go_on.wait()
        return txmq.ConsumeResult.SUCCESS

    settings: dict[str, Any] = {"consume_from_where": "CONSUME_FROM_FIRST_OFFSET", "await_termination": 0.1}
    consumer = txmq.PushConsumer(log, "stock", count_the_stock, "orders", **settings).start()
    assert blocked.wait(DEADLINE_S)
    if is_lost:
        with consumer.member.changed:
            consumer.member._lose(list(consumer.member.queues.values()))
        caplog.clear()
    require_end(consumer.shutdown)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("count_the_stock" in one for one in told), told
