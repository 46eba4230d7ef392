"""A half batch that cannot be read holds up as little as possible: all others go on, and an operator sees it."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from rmq_spark import CheckService, CommitLog, ConsumerGroup
from rmq_spark.cli.doctor import CRITICAL
from rmq_spark.errors import LostFileError
from tests.support.clocks import set_clock
from tests.support.commands import objects, txmq
from tests.support.half_batches import another, bodies, commit, prepare, roll_back
from tests.support.inside import HalfRecord

pytestmark = pytest.mark.log("delta", orders=2, plain=1)


def half_file(log: CommitLog, record: HalfRecord) -> Path:
    (file,) = record.files.values()
    return Path(log.path, "half", file.path)


def lose(log: CommitLog, record: HalfRecord) -> Path:
    """Somebody moves the half file away: to where it is returned."""
    path = half_file(log, record)
    return path.rename(Path(log.path).parent / path.name)


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


@pytest.fixture
def delayed(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> list[HalfRecord]:
    """Two half batches whose messages are due, of which the first has lost its file."""
    records = [prepare(log, n, {"body": [f"late {n}"], "deliver_at": [in_seconds(5)]}, topic="plain") for n in (0, 1)]
    for record in records:
        commit(log, record)
    lose(log, records[0])
    set_clock(monkeypatch, 60)
    return records


def test_a_lost_file_of_a_due_message_stops_no_decision_and_no_other_due_message(
    log: CommitLog, delayed: list[HalfRecord]
) -> None:
    """Every decision of the log failed with LostFileError, whatever it was about, and nothing due was placed."""
    log = another(log)
    commit(log, prepare(log, 2, {"body": ["x"]}, topic="plain"))
    roll_back(log, prepare(log, 3, {"body": ["y"]}, topic="orders"))
    assert bodies(log, "plain") == ["x", "late 1"]
    assert set(log.engine.ledger.waiting) == {delayed[0].half_id}


def test_a_check_reports_due_messages_that_cannot_be_placed(log: CommitLog, delayed: list[HalfRecord]) -> None:
    report = CheckService(log, {}).run_once()
    assert report.placed == 1
    ((half_id, problem),) = report.problems
    assert half_id == delayed[0].half_id
    assert "due, and cannot be placed: LostFileError" in problem


def test_due_messages_are_placed_when_their_file_is_back(log: CommitLog, delayed: list[HalfRecord]) -> None:
    log.engine.ledger.place_due()
    assert bodies(log, "plain") == ["late 1"]
    path = half_file(log, delayed[0])
    (Path(log.path).parent / path.name).rename(path)
    log.engine.ledger.place_due()
    assert bodies(log, "plain") == ["late 1", "late 0"]
    assert CheckService(log, {}).run_once().problems == []


def test_a_check_forgets_due_messages_that_another_process_has_placed(
    log: CommitLog, delayed: list[HalfRecord]
) -> None:
    """Its rounds reported them for ever."""
    service = CheckService(log, {})
    assert len(service.run_once().problems) == 1
    path = half_file(log, delayed[0])
    (Path(log.path).parent / path.name).rename(path)
    another(log).engine.ledger.place_due()
    assert service.run_once().problems == []


def test_what_is_pending_is_listed_beside_what_cannot_be_read(log: CommitLog) -> None:
    """log.pending() raised, and named nothing."""
    lost, sound = prepare(log, 0, 3), prepare(log, 1, 2)
    lose(log, lost)
    log = another(log)
    rows = {row["half_id"]: row for row in log.pending().to_pylist()}
    assert rows[sound.half_id]["messages"] == 2
    unreadable = rows[lost.half_id]
    assert (unreadable["app_id"], unreadable["batch_id"], unreadable["messages"]) == ("app", 0, 3)
    assert unreadable["producer_group"] is None
    assert unreadable["prepared_at"] == lost.prepared_at
    assert [row["half_id"] for row in objects("pending", log.path)] == [lost.half_id, sound.half_id]
    assert "1 pending half batch cannot be read" in txmq("doctor", log.path, code=CRITICAL)[0]


def test_the_lag_of_a_group_is_told_beside_what_cannot_be_read(log: CommitLog) -> None:
    """Lag, the list of groups, stats and top failed for every group."""
    commit(log, prepare(log, 0, {"body": ["x"]}, topic="plain"))
    lost, sound = prepare(log, 1, 3), prepare(log, 2, 2)
    lose(log, lost)
    log = another(log)
    assert sum(pending for pending, _ in log.open_messages().values()) == sound.rows
    group = ConsumerGroup(log, "points")
    group.reset("earliest", ["plain"])
    assert group.lag()["lag"].to_pylist() == [1]


def test_upkeep_does_what_it_can_when_a_drain_finds_a_lost_file(log: CommitLog) -> None:
    """It ended at the drain: nothing was merged, stripped, pruned or deleted ever after."""
    record = prepare(log, 0, 2)
    commit(log, record)
    lose(log, record)
    orphan = Path(log.path, "half", "half-of-a-crash.parquet")
    orphan.write_bytes(b"")
    os.utime(orphan, (0, 0))
    with pytest.raises(LostFileError):
        another(log).maintain()
    assert not orphan.exists()
