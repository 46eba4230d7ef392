"""Commits of which nobody knows how they ended, and tables that others change meanwhile: nothing is lost, doubled or
decided twice. Races of processes are in ``tests/torture/race``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark import CommitLog
from rmq_spark.errors import AlreadyPreparedError, CommitError, LostCommitError, TopicExistsError
from rmq_spark.testing import MemoryTable
from tests.support.half_batches import (
    another,
    bodies,
    check_offsets,
    commit,
    header_of,
    move_half,
    pending,
    prepare,
    stage,
)
from tests.support.inside import OP_STATS_COLUMNS as STATS_COLUMNS
from tests.support.inside import (
    Change,
    DeltaLogTable,
    Kind,
    Naming,
    OpRow,
    RowState,
    Who,
)
from tests.support.inside import op_table as to_table
from tests.support.limits import set_limits
from tests.support.meanwhile import after_next, before_next

pytestmark = pytest.mark.log("memory", "delta")
DELTA, MEMORY = pytest.mark.log("delta"), pytest.mark.log("memory")


# ---------------------------------------------------------------- threads that share a handle
def look_meanwhile(table: Any, elsewhere: Callable[[], object], look: Callable[[], object], here: bool = False) -> None:
    """Before the next commit of a table: another process commits, and then another thread of this one looks, or this
    very thread, in ``__del__``."""

    def act() -> None:
        elsewhere()
        if here:
            look()
            return
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(LOOKS_S)

    before_next(table, "try_commit", act)


LOOKS_S = 0.3
"""So long the other thread has to look; it has to wait until the commit is done."""


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(
    "look",
    [
        lambda log: log.half.get("other:0"),
        lambda log: log.open_half_ids(),
        lambda log: log.find("other", 0),
        lambda log: log.read("orders"),
        lambda log: commit(log, log.get("other:0")),
    ],
    ids=["get", "open half batches", "find", "read", "decide"],
)
def test_a_thread_that_looks_between_a_decision_and_its_commit_lets_nothing_be_prepared_twice(
    log: CommitLog, look: Callable[[CommitLog], object], here: bool
) -> None:
    """Two processes send under one idempotency key. The look moved the shared handle to a version that the decision of
    the slower one had not seen, and its commit was accepted there."""
    prepare(log, 0, 2, app="other")
    header = replace(header_of(0), naming=Naming.KEY)
    files = {handle: stage(handle, header) for handle in (log, another(log))}
    mine, theirs = files
    look_meanwhile(log.half.table, lambda: theirs.prepare(header, files[theirs]), lambda: look(log), here)
    with pytest.raises(AlreadyPreparedError):
        mine.prepare(header, files[mine])
    assert another(log).get(header.half_id).rows == 1


@pytest.mark.parametrize("here", [False, True])
def test_a_thread_that_looks_for_topics_lets_no_topic_be_made_twice(log: CommitLog, here: bool) -> None:
    look_meanwhile(
        log.topics_table,
        lambda: another(log).create_topic("bills", 2),
        lambda: log.topics_with(["no such topic"]),
        here,
    )
    with pytest.raises(TopicExistsError):
        log.create_topic("bills", 3)
    assert another(log).topics() == {"bills": 2, "orders": 2}


# ---------------------------------------------------------------- failures of unknown outcome
class Faulty:
    """Lets commits of a table go wrong in turn: each plan says whether the commit lands, and what the caller hears."""

    def __init__(self, table: Any, plans: Sequence[tuple[bool, str]]) -> None:
        self.table, self.plans, self.real = table, list(plans), table.try_commit
        table.try_commit = self

    def __call__(self, change: Change) -> bool:
        if not self.plans:
            return bool(self.real(change))
        lands, heard = self.plans.pop(0)
        acknowledged = bool(self.real(change)) if lands else False
        if heard == "raises":
            raise ConnectionError("time-out")
        return acknowledged if heard == "truth" else heard == "yes"


PLANS = [
    [(True, "raises")],
    [(True, "no")],
    [(False, "raises")],
    [(False, "no")],
    [(False, "raises"), (True, "raises")],
    [(False, "no"), (False, "raises"), (True, "no")],
    [(False, "raises"), (False, "raises"), (True, "raises")],
]


@pytest.mark.parametrize("plans", PLANS, ids=lambda p: "+".join(f"{'lands' if a else 'lost'},{b}" for a, b in p))
def test_an_ambiguous_failure_never_makes_two_copies(log: CommitLog, plans: Sequence[tuple[bool, str]]) -> None:
    Faulty(log.half.table, plans)
    records = [prepare(log, i) for i in range(2)]
    Faulty(log.op, plans)
    placed = log.decide(records[0], 1, commit=pending(log, records[0]), rollback={}, who=Who.EXECUTE)
    assert sum(p.count for p in placed) == 5
    Faulty(log.op, plans)
    log.record_check(records[1], 1, pending(log, records[1]), None)
    assert log.state_of(records[1]).check_times(pending(log, records[1])) == 1
    log.quarantine(records[1], 1, pending(log, records[1]), Who.DISCARD, "x")
    Faulty(log.op, plans)
    reopened = log.reopen(records[1], 1, (RowState.QUARANTINED,), 1, Who.EXECUTE, "y")
    assert sum(m.count(1) for m in reopened.values()) == 5
    commit(log, records[1])
    Faulty(log.topics_table, plans)
    log.create_topic("points")
    for handle in (log, another(log)):
        assert sorted(bodies(handle)) == sorted(f"app.{i}.{j}" for i in range(2) for j in range(5))
        assert handle.half.table.actions().num_rows == 2
        assert handle.topics() == {"orders": 2, "points": 4}
        check_offsets(handle)


@DELTA
def test_another_writer_may_win_the_version_of_an_ambiguous_commit(log: CommitLog) -> None:
    other = another(log)
    first, second = prepare(log, 0), prepare(log, 1)

    def overtaken() -> None:
        commit(other, second)
        raise ConnectionError("time-out")

    before_next(log.op, "try_commit", overtaken)
    commit(log, first)
    check_offsets(log)
    assert len(bodies(log)) == 10


@DELTA
def test_a_lost_acknowledgement_of_prepare_is_not_taken_for_another_writers(log: CommitLog) -> None:
    other = another(log)
    before_next(log.half.table, "try_commit", lambda: prepare(other, 0, 3))
    with pytest.raises(AlreadyPreparedError):
        prepare(log, 0)
    assert log.get("app:0").rows == 3


@MEMORY
def test_a_commit_that_never_succeeds_says_so(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, COMMIT_TRIES_MAX=5, BACKOFF_S_MAX=0.001)
    faulty = Faulty(log.half.table, [(False, "raises")] * 9)
    with pytest.raises(CommitError, match=r"half failed 3 times.*ConnectionError: time-out"):
        prepare(log, 0)
    faulty.plans = [(False, "no")] * 9
    with pytest.raises(CommitError, match="too many writers"):
        prepare(log, 0)
    faulty.plans = [*[(False, "no")] * 4, (True, "no")]
    assert prepare(log, 1).rows == 5
    assert log.last_batch_id("app") == 1


@MEMORY
def test_an_acknowledged_commit_that_is_not_in_the_state_is_an_error(log: CommitLog) -> None:
    record = prepare(log, 0)
    Faulty(log.op, [(False, "yes")])
    with pytest.raises(LostCommitError, match="Restart it"):
        commit(log, record)
    Faulty(log.half.table, [(False, "yes")])
    with pytest.raises(LostCommitError):
        prepare(log, 1)
    assert log.pending()["half_id"].to_pylist() == ["app:0"]


@MEMORY
def test_a_commit_is_known_again_after_any_number_of_others(log: CommitLog) -> None:
    record = prepare(log, 0)
    other = another(log)

    def others_commit() -> None:
        other.op.refresh()
        version = other.op.version + 1
        leases = [to_table([OpRow(Kind.LEASE, "app:0")], version, record.prepared_at, f"c{i}") for i in range(1100)]
        file = other.op.write(pa.concat_tables(leases), "op", STATS_COLUMNS)
        assert other.op.compare_and_set(lambda _: Change(add=[file]), lambda _: True)

    after_next(log.op, "try_commit", others_commit)
    assert sum(p.count for p in commit(log, record)) == 5


@DELTA
def test_a_batch_that_is_moved_right_after_its_commit_is_not_lost(log: CommitLog) -> None:
    prepare(log, 0)
    after_next(log.half.table, "try_commit", lambda: move_half(log))
    commit(log, prepare(log, 1))
    assert sorted(bodies(log)) == [f"app.1.{i}" for i in range(5)]


# ---------------------------------------------------------------- a file that upkeep wrote anew
def test_what_a_checker_knew_before_the_mark_moved_does_not_mislead_it(log: CommitLog) -> None:
    sink = another(log)
    record = prepare(sink, 0)
    assert log.pending()["half_id"].to_pylist() == ["app:0"]
    commit(sink, record)
    assert log.move_mark()
    time.sleep(0.01)
    move_half(log)
    assert log.pending().num_rows == 0
    assert commit(log, log.get("app:0"), who=Who.CHECK) == []
    check_offsets(log)


# ---------------------------------------------------------------- a writer whose log was cleaned away
ONE = pa.schema([("version", pa.int64())])
Opened = Callable[[], DeltaLogTable]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """Makes handles of a Delta table whose log is checkpointed and cleaned up after every few commits."""
    settings = {"delta.logRetentionDuration": "interval 1 seconds", "delta.checkpointInterval": "4"}
    DeltaLogTable.create(str(tmp_path / "n"), "numbers", ONE, None, settings)
    return lambda: DeltaLogTable(str(tmp_path / "n"), "numbers", ONE, None)


def put(table: DeltaLogTable, number: int) -> None:
    file = table.write(pa.table({"version": [number]}, schema=ONE), "n", ("version",))
    table.compare_and_set(lambda _: Change(add=[file]), lambda c: file.path in table.actions()["path"].to_pylist())


def numbers(table: DeltaLogTable) -> list[int]:
    table.refresh()
    return sorted(table.read(table.actions()["path"].to_pylist())["version"].to_pylist())


def clean_up(folder: Path, handle: DeltaLogTable, start: int) -> int:
    """Commit until the entries that were there at the start are gone; the next number."""
    entries = folder / "_delta_log"
    first = min(int(e.stem) for e in entries.glob("*.json"))
    deadline = time.monotonic() + 60
    while (entries / f"{first + 5:020d}.json").exists() or start < 8:
        assert time.monotonic() < deadline
        put(handle, start)
        start += 1
        for entry in entries.iterdir():  # old enough to be cleaned up, without a wait
            os.utime(entry, (0, 0))
    return start


def test_a_writer_that_slept_past_the_clean_up_goes_on_from_the_checkpoint(opened: Opened, tmp_path: Path) -> None:
    sleeper, busy = opened(), opened()
    put(sleeper, 0)
    count = clean_up(tmp_path / "n", busy, 1)
    put(sleeper, count)
    expected = list(range(count + 1))
    assert numbers(sleeper) == numbers(busy) == numbers(opened()) == expected


def test_a_writer_that_slept_between_its_look_and_its_commit_is_refused(opened: Opened, tmp_path: Path) -> None:
    sleeper, busy = opened(), opened()
    put(sleeper, 0)
    slept: list[int] = []
    before_next(sleeper, "try_commit", lambda: slept.append(clean_up(tmp_path / "n", busy, 1)))
    put(sleeper, 1000)
    assert numbers(busy) == numbers(opened()) == [*range(slept[0]), 1000]


def test_a_commit_below_the_head_of_the_log_is_never_taken_for_a_success(opened: Opened, tmp_path: Path) -> None:
    sleeper, busy = opened(), opened()
    put(sleeper, 0)

    def sleeps_within(change: Change) -> bool:
        """The process stops between delta-rs's last look and the write of the entry, which then succeeds."""
        version = sleeper.version + 1
        clean_up(tmp_path / "n", busy, 1)
        entry = tmp_path / "n" / "_delta_log" / f"{version:020d}.json"
        assert not entry.exists()
        (file,) = change.add
        add = {"path": file.path, "size": file.size_bytes, "partitionValues": {}, "modificationTime": 1}
        entry.write_text(json.dumps({"add": {**add, "dataChange": True, "stats": file.stats}}))
        return True

    sleeper.try_commit = sleeps_within  # type: ignore[method-assign]
    with pytest.raises(LostCommitError, match="slept past the clean-up"):
        put(sleeper, 1000)
    assert 1000 not in numbers(opened())
    assert 1000 not in numbers(busy)


# ---------------------------------------------------------------- the twin
def test_a_table_in_memory_refuses_a_stale_commit() -> None:
    table = MemoryTable("numbers", ONE)
    stale = table.another()
    file = table.write(pa.table({"version": [1]}, schema=ONE), "n", ("version",))
    assert table.try_commit(Change(add=[file]))
    assert not stale.try_commit(Change(add=[file]))
