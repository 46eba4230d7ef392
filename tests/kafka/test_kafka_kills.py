"""Relays that are killed at every step, and brokers that are killed and paused: nothing is lost, doubled or moved."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import confluent_kafka as ck
import pytest

from rmq_spark import CommitLog, KafkaRelay
from rmq_spark.errors import RelayError
from tests.kafka.broker import Broker
from tests.kafka.handing import Handing, committed
from tests.kafka.relaying import AT_START, HANDING_OVER
from tests.support.half_batches import commit, make_log, prepare
from tests.support.inside import AbortedError, Record, Runtime, Transactions
from tests.support.limits import Limit, set_limits
from tests.support.meanwhile import at
from tests.support.seeds import first_seed
from tests.torture.kill.points import ROOT

QUICK = ("delivered",)
"""The point in `make test`; the others are in `make test-all`."""
POINTS = [pytest.param(point, marks=() if point in QUICK else pytest.mark.long) for point in (*AT_START, *HANDING_OVER)]


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    return make_log("delta", tmp_path / "log", orders=2)


def start_process(handing: Handing, log: CommitLog, point: str = "", nth: int = 1) -> subprocess.Popen[str]:
    """A process that hands the log over, and dies at the point."""
    options = {**handing.options, "max_batch_messages": 4}
    told = {"log": log.path, "servers": handing.kafka.servers, "options": options, "point": point, "nth": nth}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kafka.relaying", json.dumps(told)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def require_beginning(handing: Handing, log: CommitLog) -> int:
    """A consumer sees the first messages of each queue, in order; returns how many."""
    seen, expected = handing.seen(), committed(log, "orders")
    assert all(seen[q] == expected[q][: len(seen[q])] for q in expected)
    return sum(map(len, seen.values()))


@pytest.mark.crash
@pytest.mark.parametrize("point", POINTS)
def test_a_relay_killed_at_a_point_loses_and_doubles_nothing(handing: Handing, log: CommitLog, point: str) -> None:
    handed_over = 0 if point in AT_START else 8 if point == "committed" else 4  # of eleven, four in a transaction
    commit(log, prepare(log, 0, 11))
    dead = start_process(handing, log, point, nth=1 if point in AT_START else 2)
    said, _ = dead.communicate(timeout=120)
    assert dead.returncode == -signal.SIGKILL, said
    if point in AT_START:
        assert handing.topic() not in handing.kafka.topics() or require_beginning(handing, log) == 0
    else:
        assert require_beginning(handing, log) == handed_over
    commit(log, prepare(log, 1, 6))
    relay = handing.relay(log)
    assert relay.run_once().messages == 17 - handed_over
    assert handing.require_same(log) == 17
    assert not relay.run_once()


# ---------------------------------------------------------------- brokers
@contextmanager
def running(relay: KafkaRelay) -> Iterator[list[Exception]]:
    """The relay follows its log in a thread; what ends it early is in the list."""
    stop, problems = threading.Event(), []

    def run() -> None:
        try:
            relay.run(stop)
        except Exception as problem:
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield problems
    finally:
        stop.set()
        thread.join()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain: {what}"
        time.sleep(0.05)


def before_commit(act: Callable[[], None]) -> AbstractContextManager[None]:
    """Do something once, when all of a transaction is delivered and nothing of it is committed."""
    return at("relay step", act, step="delivered")


def test_a_transaction_of_which_kafka_has_not_taken_every_record_is_not_committed(handing: Handing) -> None:
    topic = handing.topic()
    handing.kafka.create(topic)
    settings = {"bootstrap.servers": handing.kafka.servers, "transactional.id": handing.relay_name}
    transactions = Transactions(settings, 8.0, Runtime())
    transactions.open()
    records = [Record(topic, 0, None, b"%d" % n) for n in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        refused = ck.KafkaError(ck.KafkaError.INVALID_TIMESTAMP)
        answered = Transactions._answered

        def second_is_refused(self: Transactions, number: int, place: int, error: object, message: object) -> None:
            answered(self, number, place, refused if place == 1 else error, message)

        patch.setattr(Transactions, "_answered", second_is_refused)
        with pytest.raises(AbortedError, match="INVALID_TIMESTAMP") as aborted:
            transactions.transact(records)
        assert (aborted.value.first, aborted.value.suspects) == (1, 1)
    transactions._answered(transactions._number - 1, 0, refused, None)  # late, of the transaction before
    transactions.transact(records)
    transactions.close()
    assert [m.value() for m in handing.kafka.read(topic)[0]] == [b"0", b"1", b"2"]


def test_a_commit_that_timed_out_is_committed_again(
    handing: Handing, log: CommitLog, caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    relay = handing.relay(log)
    relay.run_once()
    commit(log, prepare(log, 0))
    limit(TRY_S=0.2)

    def pause() -> None:
        handing.kafka.pause()
        threading.Thread(target=resume).start()

    def resume() -> None:
        wait_until(lambda: "a commit is tried again" in caplog.text, "it is tried again")
        handing.kafka.resume()

    try:
        with before_commit(pause):
            assert relay.run_once().transactions == 1
    finally:
        handing.kafka.resume()
    assert "_TIMED_OUT" in caplog.text
    assert handing.require_same(log) == 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("begun", r"Kafka failed while a transaction was aborted: .*No broker answered"),
        ("delivered", r"nobody knows whether Kafka committed.*Start the relay again"),
    ],
)
def test_a_transaction_of_which_nobody_knows_ends_the_relay_and_the_next_start_knows(
    handing: Handing, log: CommitLog, monkeypatch: pytest.MonkeyPatch, step: str, said: str
) -> None:
    relay = handing.relay(log)
    relay.run_once()
    commit(log, prepare(log, 0))

    def pause() -> None:
        handing.kafka.pause()
        set_limits(monkeypatch, TRY_S=0.2, SLACK_S=0.5 - handing.options["transaction_timeout"])

    try:
        with at("relay step", pause, step=step), pytest.raises(RelayError, match=said):
            relay.run_once()
    finally:
        handing.kafka.resume()
    monkeypatch.undo()
    handing.relay(log).run_once()
    assert handing.require_same(log) == 5


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.parametrize("when", ["idle", "before commit"])
def test_a_broker_killed_and_started_again_interrupts_a_relay_and_does_not_end_it(
    handing: Handing, log: CommitLog, when: str
) -> None:
    def restart() -> None:
        handing.kafka.kill()
        handing.kafka.start()

    commit(log, prepare(log, 0))
    relay = handing.relay(log, transaction_timeout=60.0)
    relay.run_once()
    with before_commit(restart) if when == "before commit" else nullcontext(), running(relay) as problems:
        if when == "idle":
            restart()
        commit(log, prepare(log, 1))
        wait_until(lambda: bool(problems) or sum(relay.positions.values()) == 10, "the relay hands all over")
    assert problems == []
    assert handing.require_same(log) == 10


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.timeout(1200)
def test_relays_and_brokers_killed_at_any_moment_lose_and_double_nothing(
    kafka: Broker, handing: Handing, log: CommitLog
) -> None:
    chance = random.Random(first_seed())
    for n in range(12):
        commit(log, prepare(log, n, chance.randrange(1, 60)))
        process = start_process(handing, log)
        try:
            process.wait(timeout=chance.uniform(0.8, 2.5))
        except subprocess.TimeoutExpired:
            if chance.random() < 0.25:
                kafka.kill()
            process.kill()
        process.communicate()
        kafka.start_if_dead()
    process = start_process(handing, log)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    handing.require_same(log)
