"""Single messages that a shop sends, for the tests of group commits and of asynchronous sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rmq_spark import COMMIT_MESSAGE, CommitLog, HalfBatch, Message, TransactionListener, TransactionMQProducer
from tests.support.inside import Engine, read_topic

DEADLINE_S = 8.0


class Shop(TransactionListener):
    """Answers by the first body of the half batch: what a body does not name commits.

    The local transactions of the bodies in ``waits`` begin, and come to their end when the test sets ``go_on``.
    """

    def __init__(self, answers: Mapping[str, Any] | None = None, waits: Collection[str] = ()) -> None:
        self.answers = answers or {}
        self.waits = waits
        self.go_on = threading.Event()
        self.seen: list[str] = []
        self.checked = COMMIT_MESSAGE

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        body = batch.messages(["body"])["body"][0].as_py().decode()
        self.seen.append(body)
        if body in self.waits:
            assert self.go_on.wait(DEADLINE_S)
        answer = self.answers.get(body, COMMIT_MESSAGE)
        return answer() if callable(answer) else answer

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        return self.checked

    def wait_until_seen(self, *bodies: str) -> None:
        wait_for(lambda: sorted(self.seen) == sorted(bodies))


def raising(problem: BaseException) -> Callable[..., Any]:
    """A function of anything: a callback, local work, an answer of :class:`Shop`."""

    def fails(*_: object, **__: object) -> None:
        raise problem

    return fails


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def producer_of(log: CommitLog, listener: TransactionListener | None = None, **settings: Any) -> TransactionMQProducer:
    """The shop's producer, which checks nothing by itself unless ``check_interval`` says so."""
    return TransactionMQProducer(log, "shop", listener or Shop(), **{"check_interval": None, **settings})


def message(name: object, topic: str = "orders", **more: Any) -> Message:
    return Message(topic, str(name).encode(), **more)


def send_async(producer: TransactionMQProducer, *names: object, key: str | None = None) -> list[Any]:
    """A future for each message. With ``key`` they have idempotency keys that begin so."""
    send = producer.send_message_in_transaction_async
    return [send(message(name), idempotency_key=key and f"{key}{name}") for name in names]


def sent_bodies(log: CommitLog | Engine, topic: str = "orders") -> list[str]:
    """What everybody sees, sorted."""
    engine = log if isinstance(log, Engine) else log.engine
    return sorted(body.decode() for body in read_topic(engine.another(), topic)["body"].to_pylist())
