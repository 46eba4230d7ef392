"""Consumers without Spark, for tests: on a clock that only the test moves, and step by step, without threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark.testing import InMemoryCommitLog
from tests.support.inside import CommitOncePrepared, Runtime

LATER = txmq.ConsumeResult.FAILURE
DONE = txmq.ConsumeResult.SUCCESS

INTERVAL_S, LEASE_S = 10.0, 30.0


class Steps(Runtime):
    """A machine whose clocks stand still until somebody sleeps, or the test moves them."""

    def __init__(self) -> None:
        self.wall_s = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
        self.since_s = 1_000.0

    def time(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.since_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds
        self.since_s += seconds

    def random(self) -> float:
        return 0.5

    def now(self) -> datetime:
        return datetime.fromtimestamp(0, timezone.utc) + timedelta(seconds=self.wall_s)


class ByHand(Steps):
    """A machine on which no thread keeps a member alive: the test does what is due, see :func:`pass_time`."""

    def start_thread(self, work: Callable[[], object], name: str, daemon: bool = False) -> threading.Thread:
        return super().start_thread((lambda: None) if name == "txmq-member" else work, name, daemon)


class OwnClock(Steps):
    """Another machine: its clocks have nothing to do with the first one's, and the test moves them for itself."""


def memory_log(runtime: Runtime | None = None, **topics: int) -> InMemoryCommitLog:
    return InMemoryCommitLog(topics=topics or {"orders": 2}, runtime=runtime or Steps())


def on_own_clock(log: InMemoryCommitLog, runtime: Runtime) -> InMemoryCommitLog:
    """A handle of another machine."""
    twin = log.another()
    for part in (*twin._tables.all, twin.engine.ledger, twin.engine):
        part.runtime = runtime  # and its store's clock stays the store's
    return twin


def send(log: CommitLog, bodies: Iterable[str], topic: str = "orders", **columns: Any) -> None:
    """Commit messages, as one half batch."""
    producer = txmq.TransactionMQProducer(log, "shop", CommitOncePrepared(), check_interval=None)
    with producer:
        producer.send(pa.table({"body": list(bodies), **columns}), topic=topic)


def queue_of(bodies: Iterable[str]) -> InMemoryCommitLog:
    """A log with these messages in the one queue of ``orders``."""
    log = memory_log(orders=1)
    send(log, bodies)
    return log


def push(log: CommitLog, listener: Any, group: str = "points", topics: str = "orders", **options: Any) -> Any:
    """A consumer on a handle of its own, which is not started: see :func:`go_on`."""
    options.setdefault("consume_from_where", "CONSUME_FROM_FIRST_OFFSET")
    options.setdefault("heartbeat_interval", INTERVAL_S)
    options.setdefault("lease", LEASE_S)
    return txmq.PushConsumer(log.another(), group, listener, topics, **options)


def joined(log: CommitLog, listener: Any, *arguments: str, **options: Any) -> Any:
    """A consumer as of :func:`push` that has joined its group, and has fetched nothing yet."""
    consumer = push(log, listener, *arguments, **options)
    consumer.member.join()
    return consumer


def consume_all(log: CommitLog, listener: Any, *arguments: str, **options: Any) -> Any:
    """A consumer as of :func:`push` that has joined its group, and has consumed all that there is."""
    consumer = joined(log, listener, *arguments, **options)
    go_on(consumer)
    return consumer


def go_on(consumer: Any) -> None:
    """Fetch and consume until nothing is left, and write progress."""
    while consumer.member.fetch() or consumer.work():
        while consumer.work():
            pass
    consumer.member.persist()


def pass_time(consumers: Sequence[Any], seconds: float) -> None:
    """Let time pass on the clock of the consumers, in steps after which each of them does what is due."""
    runtime = consumers[0].member.runtime
    end_s = runtime.since_s + seconds
    while runtime.since_s < end_s:
        runtime.sleep(1.0)
        for consumer in consumers:
            consumer.member.keep()


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for what a thread of a consumer does."""
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.01)


def seen_by(found: list[str], status: Any = DONE) -> Callable[[pa.Table], Any]:
    """A listener that notes the bodies."""

    def listen(messages: pa.Table) -> Any:
        found.extend(body.decode() for body in messages["body"].to_pylist())
        return status

    return listen
