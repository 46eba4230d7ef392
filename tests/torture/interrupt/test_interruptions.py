"""A log is used on after an exception that arrived at any line: nothing is hidden, doubled, lost or stuck."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from rmq_spark import CommitLog, TransactionMQProducer
from rmq_spark.errors import TxmqError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.inside import Ledger
from tests.support.seeds import first_seed
from tests.torture.interrupt.interruptions import (
    OPERATIONS,
    Content,
    Finding,
    InMemory,
    OnDisk,
    Sender,
    StoppedClock,
    Twin,
    every_line,
    interrupt,
    quiet,
    some_moments,
    stopped_clock,
    uninterrupted,
)
from tests.torture.interrupt.tracing import Interrupted, Tracer

FOLLOWER = "refresh, warm"
"""What every other operation begins with."""
PARTS = 24


class Twins:
    """A content, and what each operation does to it when nobody interrupts it: found once."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.of = cache(lambda name: uninterrupted(content, OPERATIONS[name]))

    def interrupted(self, name: str, how_many: int, chance: random.Random) -> list[str]:
        """What some interruptions of an operation find, and none at all."""
        twin = self.of(name)
        moments = [(0, Interrupted), *some_moments(twin, chance, how_many)]
        return told(interrupt(self.content, twin, moment, kind) for moment, kind in moments)


def told(findings: Iterator[Finding | None]) -> list[str]:
    return [str(finding) for finding in findings if finding is not None]


@pytest.fixture(scope="module")
def clock() -> Iterator[StoppedClock]:
    with quiet(), stopped_clock() as stopped:
        yield stopped


@pytest.fixture(scope="module")
def in_memory(clock: StoppedClock) -> Twins:
    return Twins(InMemory(clock))


@pytest.fixture(scope="module")
def on_disk(clock: StoppedClock, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(OnDisk(clock, tmp_path_factory.mktemp("interrupt")))


# ---------------------------------------------------------------- in short
@pytest.mark.turns(2, among="interruptions")
def test_a_reader_that_is_interrupted_reads_on(in_memory: Twins) -> None:
    assert in_memory.interrupted(FOLLOWER, 5, random.Random(first_seed())) == []


def test_an_operation_that_is_interrupted_is_done_whole_or_not_at_all(in_memory: Twins) -> None:
    chance = random.Random(first_seed())
    for name in chance.sample(list(OPERATIONS), 2):
        assert in_memory.interrupted(name, 4, chance) == []


@pytest.mark.turns(2, among="interruptions")
def test_a_log_on_disk_is_used_on_after_an_interruption(on_disk: Twins) -> None:
    chance = random.Random(first_seed())
    assert on_disk.interrupted(chance.choice(list(OPERATIONS)), 1, chance) == []


def test_rows_that_are_taken_before_their_version_are_caught(in_memory: Twins) -> None:
    """The seeded bug of this level, at every line that it has."""
    with rows_before_version():
        twin = uninterrupted(in_memory.content, OPERATIONS[FOLLOWER])
        moments = [n for n, (_, place) in enumerate(twin.places, 1) if place[0][0].co_name == "two_steps"]
        found = told(interrupt(in_memory.content, twin, moment) for moment in moments)
    assert any("open half batches" in finding for finding in found), found


@contextmanager
def rows_before_version() -> Iterator[None]:
    """A reader that changes in two steps: the new rows first, and then the version up to which they are there."""
    catch_up = Ledger.catch_up

    def two_steps(self: Ledger) -> int:
        before = self.view
        version = catch_up(self)
        after = self.view
        self.view = replace(after, version=before.version)
        self.view = after
        return version

    # Its lines count as lines of the product.
    two_steps.__code__ = two_steps.__code__.replace(co_filename=catch_up.__code__.co_filename)
    with patch.object(Ledger, "catch_up", two_steps):
        yield


# ---------------------------------------------------------------- at length
@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_line_may_be_interrupted(in_memory: Twins, part: int) -> None:
    content = in_memory.content
    twins: dict[str, Twin] = {name: in_memory.of(name) for name in OPERATIONS}
    cases = list(every_line(twins, random.Random(first_seed())))[part::PARTS]
    assert told(interrupt(content, twins[name], moment, kind) for name, moment, kind in cases) == []


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_disk_may_be_interrupted(on_disk: Twins, name: str) -> None:
    assert on_disk.interrupted(name, 5, random.Random(f"{first_seed()} {name}")) == []


# ---------------------------------------------------------------- what was found
def moment_of(twin: Twin, function: str, event: str) -> int:
    """The first moment of this kind in a function."""
    named = [event_found == event and place[0][0].co_name == function for event_found, place in twin.places]
    return named.index(True) + 1


@pytest.mark.turns(3)
@pytest.mark.parametrize(("function", "event"), [("start_thread", "return"), ("__enter__", "return"), ("end", "call")])
def test_a_lease_whose_execution_was_interrupted_is_renewed_no_more(
    in_memory: Twins, function: str, event: str
) -> None:
    twin = in_memory.of("send")
    assert told(iter([interrupt(in_memory.content, twin, moment_of(twin, function, event))])) == []


def test_a_damaged_entry_that_an_interrupted_refresh_passed_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = CommitLog.create(path)
    log.create_topic("orders")
    CommitLog.open(path).create_topic("bills")
    calls = Tracer(noted=True)
    calls.run(log.topics)
    looks = [place[0][0].co_name for _, place in calls.places].index("require_whole") + 1
    CommitLog.open(path).create_topic("payments")
    entry = max((path / "topics" / "_delta_log").glob("*.json"))
    entry.write_bytes(b"")
    assert isinstance(Tracer(looks).run(log.topics), Interrupted)
    with pytest.raises(TxmqError, match=entry.name):
        log.topics()


def test_a_producer_whose_start_was_interrupted_answers_checks_when_it_is_started_again() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "txmq-checks"]

    def producer() -> TransactionMQProducer:
        return TransactionMQProducer(InMemoryCommitLog(), "group", Sender())

    def stopped(started: TransactionMQProducer) -> bool:
        started.shutdown()
        for thread in threads():
            thread.join(60)
        return not threads()

    counted, first = Tracer(), producer()
    counted.run(first.start)
    assert stopped(first)
    for moment in range(1, counted.moments + 1):
        again = producer()
        assert isinstance(Tracer(moment).run(again.start), Interrupted)
        again.start()
        assert threads()
        assert stopped(again)
