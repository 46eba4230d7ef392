"""Commits of which nobody knows how they ended, and tables that others change meanwhile: nothing is lost, doubled or
decided twice. Races of processes are in ``tests/torture/race``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_spark import CommitLog
from rmq_spark.errors import AlreadyPreparedError, CommitError, LostCommitError, TopicExistsError
from rmq_spark.testing import MemoryTable
from tests.support import failpoints
from tests.support.half_batches import (
    another,
    bodies,
    check_offsets,
    commit,
    count_check,
    decide_one,
    header_of,
    move_half,
    pending,
    prepare,
    prepare_one,
    rows_of,
    stage,
)
from tests.support.inside import Change, DeltaLogTable, Naming, OpKind, OpRow, RowState, Who
from tests.support.inside import op_table as to_table
from tests.support.limits import Limit
from tests.support.meanwhile import at, unhooked

pytestmark = pytest.mark.log("memory", "delta")
DELTA, MEMORY = pytest.mark.log("delta"), pytest.mark.log("memory")


# ---------------------------------------------------------------- threads that share a handle
def look_meanwhile(
    table: str, elsewhere: Callable[[], object], look: Callable[[], object], here: bool = False
) -> AbstractContextManager[None]:
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

    return at("commit begins", act, table=table)


LOOKS_S = 0.3
"""So long the other thread has to look; it has to wait until the commit is done."""


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(
    "look",
    [
        lambda log: log.engine.half.get("other:0"),
        lambda log: log.engine.open_half_ids(),
        lambda log: log.engine.find("other", 0),
        lambda log: log.read("orders"),
        lambda log: commit(log, log.engine.get("other:0")),
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
    with (
        look_meanwhile("half", lambda: prepare_one(theirs.engine, header, files[theirs]), lambda: look(log), here),
        pytest.raises(AlreadyPreparedError),
    ):
        prepare_one(mine.engine, header, files[mine])
    assert another(log).engine.get(header.half_id).rows == 1


@pytest.mark.parametrize("here", [False, True])
def test_a_thread_that_looks_for_topics_lets_no_topic_be_made_twice(log: CommitLog, here: bool) -> None:
    other = another(log)
    with (
        look_meanwhile(
            "topics",
            lambda: other.create_topic("bills", 2),
            lambda: log.engine.topic_store.with_names(["no such topic"]),
            here,
        ),
        pytest.raises(TopicExistsError),
    ):
        log.create_topic("bills", 3)
    assert another(log).topics() == {"bills": 2, "orders": 2}


# ---------------------------------------------------------------- failures of unknown outcome
@contextmanager
def going_wrong(log: CommitLog, name: str, plans: Sequence[tuple[bool, str]]) -> Iterator[None]:
    """Lets commits to a table go wrong in turn: each plan says whether the commit lands, and what the caller hears. A
    store that puts an entry twice finds its own at the second time, and says that another writer was faster."""
    left = list(plans)

    def hook(point: str, table: str = "", change: Change | None = None, **_: object) -> None:
        if not left or table != name:
            return
        lands, heard = left[0]
        if heard == "no" and point == "commit begins":
            left.pop(0)
            with unhooked():
                (other,) = (t for t in another(log).engine.tables() if t.name == name)
                if lands:
                    assert other.try_commit(change)  # type: ignore[attr-defined]
                else:
                    assert other.compare_and_set(lambda n: Change(transactions={"other": n}), lambda _: True)
        elif heard == "raises" and point == ("commit done" if lands else "commit begins"):
            left.pop(0)
            raise ConnectionError("time-out")

    with failpoints.hooked(hook):
        yield
    assert not left


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
    with going_wrong(log, "half", plans):
        records = [prepare(log, i) for i in range(2)]
    with going_wrong(log, "op", plans):
        placed = decide_one(log.engine, records[0], 1, commit=pending(log, records[0]))
    assert sum(p.count for p in placed) == 5
    with going_wrong(log, "op", plans):
        count_check(log.engine, records[1], 1, pending(log, records[1]), None)
    assert log.engine.state_of(records[1]).check_times(pending(log, records[1])) == 1
    log.engine.ledger.quarantine(records[1], 1, pending(log, records[1]), Who.DISCARD, "x")
    with going_wrong(log, "op", plans):
        reopened = log.engine.ledger.reopen(records[1], 1, (RowState.QUARANTINED,), 1, Who.EXECUTE, "y")
    assert sum(m.count(1) for m in reopened.values()) == 5
    commit(log, records[1])
    with going_wrong(log, "topics", plans):
        log.create_topic("points")
    for handle in (log, another(log)):
        assert sorted(bodies(handle)) == sorted(f"app.{i}.{j}" for i in range(2) for j in range(5))
        assert handle.engine.half.table.actions().num_rows == 2
        assert handle.topics() == {"orders": 2, "points": 4}
        check_offsets(handle)


@DELTA
def test_another_writer_may_win_the_version_of_an_ambiguous_commit(log: CommitLog) -> None:
    other = another(log)
    first, second = prepare(log, 0), prepare(log, 1)

    def overtaken() -> None:
        commit(other, second)
        raise ConnectionError("time-out")

    with at("commit begins", overtaken, table="op"):
        commit(log, first)
    check_offsets(log)
    assert len(bodies(log)) == 10


@DELTA
def test_a_lost_acknowledgement_of_prepare_is_not_taken_for_another_writers(log: CommitLog) -> None:
    other = another(log)
    with at("commit begins", lambda: prepare(other, 0, 3), table="half"), pytest.raises(AlreadyPreparedError):
        prepare(log, 0)
    assert log.engine.get("app:0").rows == 3


@MEMORY
def test_a_commit_that_never_succeeds_says_so(log: CommitLog, limit: Limit) -> None:
    limit(COMMIT_TRIES_MAX=5, BACKOFF_S_MAX=0.001)
    told = pytest.raises(CommitError, match=r"half failed 3 times.*ConnectionError: time-out")
    with going_wrong(log, "half", [(False, "raises")] * 3), told:
        prepare(log, 0)
    with going_wrong(log, "half", [(False, "no")] * 5), pytest.raises(CommitError, match="too many writers"):
        prepare(log, 0)
    with going_wrong(log, "half", [*[(False, "no")] * 4, (True, "no")]):
        assert prepare(log, 1).rows == 5
    assert log.engine.last_batch_id("app") == 1


@MEMORY
def test_a_commit_is_known_again_after_any_number_of_others(log: CommitLog) -> None:
    record = prepare(log, 0)
    other = another(log)

    def others_commit() -> None:
        other.engine.op_table.refresh()
        version = other.engine.op_table.version + 1
        leases = [to_table([OpRow(OpKind.LEASE, "app:0")], version, record.prepared_at, f"c{i}") for i in range(1100)]
        file = other.engine.op_table.write(pa.concat_tables(leases))
        assert other.engine.op_table.compare_and_set(lambda _: Change(add=[file]), lambda _: True)

    with at("commit done", others_commit, table="op"):
        assert sum(p.count for p in commit(log, record)) == 5


@DELTA
def test_a_batch_that_is_moved_right_after_its_commit_is_not_lost(log: CommitLog) -> None:
    prepare(log, 0)
    with at("commit done", lambda: move_half(log), table="half"):
        commit(log, prepare(log, 1))
    assert sorted(bodies(log)) == [f"app.1.{i}" for i in range(5)]


# ---------------------------------------------------------------- a file that upkeep wrote anew
def test_what_a_checker_knew_before_the_mark_moved_does_not_mislead_it(log: CommitLog) -> None:
    sink = another(log)
    record = prepare(sink, 0)
    assert log.pending()["half_id"].to_pylist() == ["app:0"]
    commit(sink, record)
    assert log.engine.ledger.mark()
    time.sleep(0.01)
    move_half(log)
    assert log.pending().num_rows == 0
    assert commit(log, log.engine.get("app:0"), who=Who.CHECK) == []
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
    file = table.write(pa.table({"version": [number]}, schema=ONE))
    table.compare_and_set(lambda _: Change(add=[file]), lambda c: file.path in table.actions()["path"].to_pylist())


def numbers(table: DeltaLogTable) -> list[int]:
    return sorted(rows_of(table)["version"].to_pylist())


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
    with at("commit begins", lambda: slept.append(clean_up(tmp_path / "n", busy, 1))):
        put(sleeper, 1000)
    assert numbers(busy) == numbers(opened()) == [*range(slept[0]), 1000]


def test_a_commit_below_the_head_of_the_log_is_never_taken_for_a_success(opened: Opened, tmp_path: Path) -> None:
    sleeper, busy = opened(), opened()
    put(sleeper, 0)

    def sleeps_within() -> None:
        """The process stops between delta-rs's last look and the write of the entry, which then succeeds."""
        entry = tmp_path / "n" / "_delta_log" / f"{sleeper.version + 1:020d}.json"
        written = entry.read_bytes()
        entry.unlink()
        clean_up(tmp_path / "n", busy, 1)
        assert not entry.exists()
        entry.write_bytes(written)

    with at("commit done", sleeps_within), pytest.raises(LostCommitError, match=r"slept past .* Restart it"):
        put(sleeper, 1000)
    assert 1000 not in numbers(opened())
    assert 1000 not in numbers(busy)


# ---------------------------------------------------------------- the twin
def test_a_table_in_memory_refuses_a_stale_commit() -> None:
    table = MemoryTable("numbers", ONE)
    stale = table.another()
    file = table.write(pa.table({"version": [1]}, schema=ONE))
    assert table.try_commit(Change(add=[file]))
    assert not stale.try_commit(Change(add=[file]))
