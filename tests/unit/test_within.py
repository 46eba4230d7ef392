"""Sends in the midst of a commit, from what Python calls there: a signal handler, ``__del__``, a log handler."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.runtime import observer
from rmq_spark.errors import OptionError
from tests.support.meanwhile import at
from tests.support.sends import message, producer_of, sent_bodies

pytestmark = pytest.mark.log("delta", orders=1)


@pytest.fixture
def producer(log: CommitLog) -> Iterator[txmq.TransactionMQProducer]:
    with producer_of(log) as found:
        yield found


class Within:
    """Sends in the midst of what calls it: waiting, which is refused, and without waiting."""

    def __init__(self, producer: txmq.TransactionMQProducer) -> None:
        self.producer = producer
        self.refusals = 0
        self.sent: list[Any] = []

    def require_sent(self) -> None:
        """Require that it has sent, after the first message, and was refused once."""
        assert self.sent[0].result(60).send_status
        assert self.refusals == 1
        assert sent_bodies(self.producer.engine) == ["first", "later"]

    def __call__(self) -> None:
        if not self.sent:
            self.sent.append(self.producer.send_async(message("later")))
            with pytest.raises(OptionError, match="it would wait for itself for ever"):
                self.producer.send(message("never"))
            self.refusals += 1


def test_a_send_of_who_holds_the_lock_of_its_commit(log: CommitLog, producer: txmq.TransactionMQProducer) -> None:
    """As from ``__del__`` while Python collects garbage within ``log.read``: it waited for ever."""
    within = Within(producer)
    with log.engine.lock:
        within()
    producer.send(message("first"))
    within.require_sent()


def test_a_send_of_a_log_handler_in_the_thread_that_commits(producer: txmq.TransactionMQProducer) -> None:
    within = Within(producer)
    logger = logging.getLogger("rmq_spark._core.protocol.group_commit")

    class Ships(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            within()

    logger.addHandler(handler := Ships())
    try:
        with at("staged", lambda: logger.warning("a commit is made")):
            producer.send(message("first"))
    finally:
        logger.removeHandler(handler)
    within.require_sent()


def test_a_signal_that_comes_while_the_thread_of_a_commit_starts(
    producer: txmq.TransactionMQProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    within, start = Within(producer), threading.Thread.start

    def and_a_signal_comes(thread: threading.Thread) -> None:
        if thread.name == "txmq-prepare":
            signal.raise_signal(signal.SIGUSR1)
        start(thread)

    before = signal.signal(signal.SIGUSR1, lambda *_: within())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", and_a_signal_comes)
            producer.send(message("first"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    within.require_sent()


def test_a_producer_that_lingers_closes_at_once(log: CommitLog) -> None:
    """It let its sends wait for the whole hour, and the end of Python with them."""
    with producer_of(log, linger=3600) as producer:
        sent = producer.send_async(message("a"))
    assert sent.result(60).send_status
    assert sent_bodies(log) == ["a"]


def test_no_lock_of_the_package_stops_its_own_thread() -> None:
    """Python may call ``__del__`` or a signal handler in the midst of any call, and that may call us again."""
    package = Path(txmq.__file__).parent
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\bthreading\.(Lock|Semaphore|Condition\(threading\.Lock)\b|\ballocate_lock\b", line)
    ]
    assert found == ["_core/runtime/pools.py: self._taken = threading.Lock()"], "nobody waits for that one"


def test_a_consumer_of_figures_may_end_in_the_midst_of_another_one_that_begins() -> None:
    """It waited for itself for ever."""
    ended = threading.Event()

    def ends() -> None:
        with observer._lock:
            observer.remove(observer.Observer())
        ended.set()

    threading.Thread(target=ends, daemon=True).start()
    assert ended.wait(8)
