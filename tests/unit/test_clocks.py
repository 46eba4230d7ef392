"""Clocks of writers that are wrong: what they may write, and what becomes of a log in which they have written."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from rmq_spark import ROLLBACK_MESSAGE, UNKNOWN, CheckService, CommitLog, HalfBatch, LocalTransactionState
from rmq_spark._core.log.clock_doubt import LOOKED
from rmq_spark._core.storage import clock as module
from rmq_spark.checks import CheckReport
from rmq_spark.errors import AlreadyPreparedError, ClockError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import Clock, on_a_machine, set_clock
from tests.support.half_batches import (
    another,
    bodies,
    commit,
    decide_one,
    header_of,
    in_half,
    pending,
    prepare,
    prepare_one,
    roll_back,
    send,
    split,
    stage,
)
from tests.support.inside import BELIEVED_S, LOOK_INTERVAL_S, RUNTIME, HalfRecord, Who
from tests.support.listeners import Scripted
from tests.support.meanwhile import at

pytestmark = pytest.mark.log("delta", orders=1)

DAY_S = 86_400.0
DAYS_S = 3 * DAY_S


# ---------------------------------------------------------------- at the door
@pytest.mark.parametrize("ahead_s", [120, DAYS_S, -120, -DAYS_S])
def test_a_writer_whose_clock_is_not_the_stores_is_refused_before_anything_is_written(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    record = prepare(log, 0, 2)
    versions = log.engine.half.table.version, log.engine.op_table.version
    with monkeypatch.context() as patch:
        set_clock(patch, ahead_s, and_the_stores=False)
        wrong = another(log)
        with pytest.raises(ClockError, match="the store's says"):
            prepare(wrong, 1, 2)
        with pytest.raises(ClockError, match="set this machine's clock"):
            commit(wrong, wrong.engine.get(record.half_id))
        with pytest.raises(ClockError):
            wrong.vacuum()
    assert (another(log).engine.half.table.refresh(), another(log).engine.op_table.refresh()) == versions
    commit(log, record)
    assert len(bodies(log)) == 2


def test_a_clock_that_jumps_while_a_process_runs_is_noticed(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(log, 0, 2)
    with monkeypatch.context() as patch:
        set_clock(patch, DAYS_S, and_the_stores=False)
        with pytest.raises(ClockError, match="259200 s less"):
            prepare(log, 1, 2)
    prepare(log, 1, 2)


def test_the_store_is_asked_for_its_time_once_while_the_clock_goes_on(log: CommitLog) -> None:
    probe = Path(log.path, "half", module.PROBE)
    process = another(log)
    prepare(process, 0, 1)
    probe.unlink()
    for batch in (1, 2):
        commit(process, prepare(process, batch, 1))
    assert not probe.exists()
    commit(another(log), log.engine.get("app:0"))
    assert probe.exists()
    os.utime(probe, (0, 0))
    assert log.vacuum() == [], "it is no file of the table"


# ---------------------------------------------------------------- on a disk whose clock went wrong with the machine's
def round_of_checks(log: CommitLog, timeout_s: float = 1.0) -> CheckReport:
    """Nobody knows of any transaction, and what is a minute old is rolled back."""

    def roll_back_old(batch: HalfBatch) -> LocalTransactionState:
        old = RUNTIME.now() - batch.prepared_at >= timedelta(seconds=60)
        return ROLLBACK_MESSAGE if old else UNKNOWN

    listeners = {"group": Scripted(check=roll_back_old)}
    return CheckService(another(log), listeners, transaction_timeout=timeout_s).run_once()


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> InMemoryCommitLog:
    """A log in which a clock that is three days ahead has written; then it was set right."""
    log = InMemoryCommitLog(topics={"orders": 1})
    with monkeypatch.context() as patch:
        set_clock(patch, DAYS_S)
        commit(log, prepare(log, 0, 1))
        prepare(log, 1, 1)
        log.engine.ledger.mark()
    return another(log)


def test_after_a_clock_that_was_days_ahead_half_batches_are_still_asked_about(
    damaged: InMemoryCommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the one that it wrote itself, and those after it, which must come after it by their time of prepare."""
    later = prepare(damaged, 2, 1)
    assert later.prepared_at > datetime.now(timezone.utc) + timedelta(days=2)
    set_clock(monkeypatch, 61)
    report = round_of_checks(damaged)
    assert another(damaged).engine.open_half_ids() == []
    assert report.rolled_back.messages == 2
    assert ["in the future" in text for _, text in report.problems] == [True, True]


def test_after_a_clock_that_was_days_ahead_a_young_half_batch_is_left_alone(damaged: InMemoryCommitLog) -> None:
    young = prepare(damaged, 2, 1)
    round_of_checks(damaged, timeout_s=30)
    assert another(damaged).engine.open_half_ids() == [young.half_id]


def test_after_a_clock_that_was_days_ahead_delayed_messages_still_wait_for_their_time(
    damaged: InMemoryCommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = datetime.now(timezone.utc) + timedelta(hours=1)
    visible = len(bodies(damaged))
    commit(damaged, prepare(damaged, 2, {"body": ["later"], "deliver_at": [due]}))
    assert damaged.engine.ledger.place_due() == []
    assert len(bodies(damaged)) == visible
    set_clock(monkeypatch, 3601)
    assert sum(p.count for p in damaged.engine.ledger.place_due()) == 1


def test_a_lease_that_a_clock_days_ahead_has_left_keeps_no_check_away(
    damaged: InMemoryCommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = prepare(damaged, 2, 1)
    with monkeypatch.context() as patch:
        set_clock(patch, DAYS_S)
        another(damaged).engine.ledger.lease([record], 60)
    set_clock(monkeypatch, 61)
    round_of_checks(damaged)
    assert another(damaged).engine.open_half_ids() == []


def test_after_a_clock_that_was_days_ahead_messages_keep_the_order_of_their_sends(damaged: InMemoryCommitLog) -> None:
    """Their times of prepare and commit go on from the wrong one: only the order counts."""
    records = [prepare(damaged, batch, {"body": [str(batch)]}) for batch in range(2, 6)]
    assert [r.prepared_ms for r in records] == sorted({r.prepared_ms for r in records})
    for record in records:
        commit(damaged, record)
    assert bodies(damaged)[-4:] == ["2", "3", "4", "5"]
    times = damaged.read("orders", columns=["commit_timestamp"])["commit_timestamp"].to_pylist()
    assert times == sorted(times)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system does not count them")
def test_the_seconds_count_in_which_the_machine_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_MONOTONIC stands still then, so a staged file counted as just looked at."""
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    before = RUNTIME.monotonic()
    time.sleep(0.001)
    assert RUNTIME.monotonic() > before


# ---------------------------------------------------------------- the order of keys, by clocks that differ
@pytest.fixture
def fifo() -> InMemoryCommitLog:
    log = InMemoryCommitLog()
    log.create_topic("orders", 1, fifo=True)
    return log


def send_keyed(log: CommitLog, body: str, key: str = "k") -> HalfRecord:
    return prepare(log, 0, {"body": [body], "sharding_key": [key]}, app=body)


@pytest.mark.parametrize("ahead_s", [-30.0, -0.1, 0.1, 30.0])
def test_a_key_s_messages_stand_in_the_order_of_their_sends_whatever_the_clocks_say(
    fifo: InMemoryCommitLog, ahead_s: float
) -> None:
    """The later message's marker has an earlier time than the earlier message's prepare."""
    other = on_a_machine(fifo, ahead_s)
    commit(other, send_keyed(other, "Z", "another"))
    first = send_keyed(fifo, "X")
    commit(other, send_keyed(other, "Y"))
    assert bodies(fifo) == ["Z"]
    commit(fifo, first)
    assert bodies(fifo) == ["Z", "X", "Y"]


@pytest.mark.parametrize(("sender_s", "reopener_s"), [(0.0, 30.0), (30.0, 0.0)])
@pytest.mark.parametrize("reopened_first", [True, False])
def test_a_reopened_transaction_has_its_turn_when_it_is_reopened_whatever_the_clocks_say(
    fifo: InMemoryCommitLog, sender_s: float, reopener_s: float, reopened_first: bool
) -> None:
    sender, reopener = on_a_machine(fifo, sender_s), on_a_machine(fifo, reopener_s)
    reopened = send_keyed(fifo, "X")
    fifo.engine.ledger.quarantine(reopened, 1, pending(fifo, reopened), Who.DISCARD, "nobody knows")
    if reopened_first:
        reopener.resume(reopened.half_id)
    sent = send_keyed(sender, "Y")
    if not reopened_first:
        reopener.resume(reopened.half_id)
    late = [(reopener, reopened), (sender, sent)]
    for log, record in reversed(late) if reopened_first else late:
        commit(log, record)
    assert bodies(fifo) == (["X", "Y"] if reopened_first else ["Y", "X"])


def test_who_lost_a_race_was_sent_after_the_winner(fifo: InMemoryCommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first try was earlier than the winner's prepare, and counted."""
    clock = set_clock(monkeypatch)
    winners: list[HalfRecord] = []

    def overtaken() -> None:
        clock.ahead_s += 1.0
        winners.append(send_keyed(fifo.another(), "B"))

    columns = {"body": ["a1", "a2"], "sharding_key": ["k", "k"]}
    with at("commit begins", overtaken, table="half"):
        lost = prepare(fifo, 0, columns, app="a", per="message")
    assert lost.prepared_ms == another(fifo).engine.get("a:0").prepared_ms
    _, first = split(pending(fifo, lost), 2)
    decide_one(fifo.engine, lost, 1, commit=first)
    assert bodies(fifo) == []
    commit(another(fifo), winners[0])
    commit(fifo, lost)
    assert bodies(fifo) == ["B", "a1", "a2"]


# ---------------------------------------------------------------- what destroys asks more than one clock
EIGHT_DAYS_S = 8 * DAY_S


@pytest.fixture
def clock(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of everybody. Messages of the log expire."""
    log.set_retention("orders", "7d")
    return set_clock(monkeypatch)


BOTH = pytest.mark.log("memory", "delta", orders=1)


@BOTH
def test_one_round_of_upkeep_by_a_clock_that_is_days_ahead_destroys_nothing(log: CommitLog, clock: Clock) -> None:
    commit(log, send(log, "key"))
    roll_back(log, send(log, "refused"))
    log.drain()
    for _ in range(2):  # of a job that lives on, and of one that starts
        for ahead_s in (EIGHT_DAYS_S, 0.0):
            clock.ahead_s = ahead_s
            report = another(log).maintain()
            assert report.files_expired == 0
    assert len(bodies(another(log))) == 5
    assert in_half(log) == {"refused:0"}  # it stays for its audit time
    with pytest.raises(AlreadyPreparedError):  # its outcome is not forgotten
        send(another(log), "key")


@BOTH
def test_what_is_old_goes_after_a_second_look(log: CommitLog, clock: Clock) -> None:
    commit(log, send(log, "key"))
    log.drain()
    clock.ahead_s = EIGHT_DAYS_S
    assert another(log).maintain().files_expired == 0
    clock.ahead_s += LOOK_INTERVAL_S - 10
    assert another(log).maintain().files_expired == 0
    clock.ahead_s += 20
    assert another(log).maintain(dry_run=True).files_expired == 1
    assert another(log).maintain().files_expired == 1


@pytest.mark.log("memory", orders=1)
def test_upkeep_that_goes_on_is_on_time(log: CommitLog, clock: Clock) -> None:
    """Nothing is late when looks follow each other; and they are no more than one each interval."""
    commit(log, send(log, "key"))
    log.drain()
    log.set_retention("orders", "2h")
    expired_s = []
    for ahead_s in range(0, 3 * 3600, 600):
        clock.ahead_s = float(ahead_s)
        if another(log).maintain().files_expired:
            expired_s.append(ahead_s)
    assert [2 * 3600 <= s <= 2 * 3600 + 600 for s in expired_s] == [True]
    looks = another(log).engine.op_table.transaction_version(LOOKED)
    assert looks is not None
    assert 0 <= time.time() + 3 * 3600 - looks <= LOOK_INTERVAL_S + 1200


@BOTH
def test_a_round_of_checks_by_a_clock_that_is_days_ahead_quarantines_nothing(log: CommitLog, clock: Clock) -> None:
    send(log, "open")
    clock.ahead_s = EIGHT_DAYS_S
    report = CheckService(another(log), {"group": Scripted(check=UNKNOWN)}).run_once()
    assert report.quarantined.transactions == 0
    clock.ahead_s = 10.0
    assert another(log).engine.open_half_ids() == ["open:0"]
    clock.ahead_s = 4 * DAY_S
    checker = CheckService(another(log), {"group": Scripted(check=UNKNOWN)})
    assert checker.run_once().quarantined.transactions == 0
    clock.ahead_s += LOOK_INTERVAL_S + 1
    assert checker.run_once().quarantined.transactions == 1


@BOTH
def test_orphans_stay_when_a_clock_is_days_ahead(log: CommitLog, clock: Clock) -> None:
    header = header_of(0)
    files = stage(log, header)
    clock.ahead_s = EIGHT_DAYS_S
    assert another(log).vacuum() == []
    clock.ahead_s = 0.0
    prepare_one(log.engine, header, files)


@BOTH
def test_a_clock_that_was_ahead_at_the_last_look_is_forgotten(log: CommitLog, clock: Clock) -> None:
    """Eight days later its look would be an earlier look of a clock that is right."""
    commit(log, send(log, "key"))
    for ahead_s in (EIGHT_DAYS_S, 10.0, EIGHT_DAYS_S + 2 * LOOK_INTERVAL_S):
        clock.ahead_s = ahead_s
        doubt_s = another(log).engine.clock_doubt_s()
        assert doubt_s == pytest.approx(max(0.0, ahead_s - BELIEVED_S), abs=10)
