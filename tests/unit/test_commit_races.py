"""Many writers, and failures of which nobody knows how they ended: nothing is lost, doubled or decided twice."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark.commitlog import table as table_module
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import STATS_COLUMNS, Kind, OpRow, RowState, Who, to_table
from rmq_spark.commitlog.table import Change, DeltaLogTable, compare_and_set
from rmq_spark.errors import CommitError, LostCommitError
from rmq_spark.testing import MemoryTable
from tests import racers
from tests.half_batches import another, bodies, check_offsets, commit, make_log, pending, prepare

SPAWN = multiprocessing.get_context("spawn")
PROCESS_S_MAX = 200.0


def race(*works: tuple[Callable[..., None], tuple[Any, ...]], until: int | None = None) -> list[Any]:
    """Run works in processes of their own, all at once; what they put into the queue of outcomes.

    Each gets a barrier and the queue behind its own arguments. Works after the first ``until`` get an event besides,
    which is set when the first ones have ended.
    """
    until = len(works) if until is None else until
    ready, stop, outcomes = SPAWN.Barrier(len(works)), SPAWN.Event(), SPAWN.Queue()
    processes = []
    for i, (target, (path, *more)) in enumerate(works):
        arguments = (path, *more[:2], ready, outcomes, *more[2:]) if i < until else (path, ready, stop, outcomes)
        processes.append(SPAWN.Process(target=target, args=arguments))
    for process in processes:
        process.start()
    found: list[Any] = []
    deadline = time.monotonic() + PROCESS_S_MAX
    try:
        while time.monotonic() < deadline and any(p.is_alive() for p in processes):
            found += _drain(outcomes)
            if not any(p.is_alive() for p in processes[:until]):
                stop.set()
        found += _drain(outcomes)
        assert [p.exitcode for p in processes] == [0] * len(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return found


def _drain(outcomes: Any) -> list[Any]:
    found = []
    while True:
        try:
            found.append(outcomes.get(timeout=0.1))
        except Empty:
            return found


def check_log_entries(folder: Path) -> None:
    """Every version of every table is there once, and no file was added twice."""
    for name in ("half", "op", "topics"):
        entries = sorted((folder / name / "_delta_log").glob("*.json"))
        versions = [int(e.stem) for e in entries]
        assert versions == list(range(versions[0], versions[0] + len(versions)))
        added = [
            json.loads(line)["add"]["path"]
            for entry in entries
            for line in entry.read_text().splitlines()
            if "add" in json.loads(line)
        ]
        assert len(added) == len(set(added))


# ---------------------------------------------------------------- processes
def test_four_processes_lose_and_double_nothing(tmp_path: Path) -> None:
    batches = 40
    folder = tmp_path / "log"
    log = CommitLog.create(folder, log_retention="1h")
    log.create_topic("orders", 2)
    log.create_topic("points", 1)
    path = str(folder)
    outcomes = race(
        (racers.send, (path, "a", batches)),
        (racers.send, (path, "b", batches)),
        (racers.contend, (path, "same", batches, True)),
        (racers.contend, (path, "same", batches, False)),
    )
    check_log_entries(folder)
    seen = Counter(bodies(log))
    assert set(seen.values()) == {1}
    expected = {f"{app}.{i}.{j}" for app in "ab" for i in range(batches) if i % 5 != 1 for j in range(racers.MESSAGES)}
    assert {b for b in seen if not b.startswith("same")} == expected

    by_batch: dict[int, list[str]] = {}
    for app, i, what, _ in outcomes:
        if app == "same":
            by_batch.setdefault(i, []).append(what)
    assert sorted(by_batch) == list(range(batches))
    conflicts = []
    for i, what in by_batch.items():
        assert what.count("prepared") == 1
        verdicts = sorted(set(what) - {"prepared"})
        visible = sum(f"same.{i}.{j}" in seen for j in range(racers.MESSAGES))
        assert "VerdictConflictError" in verdicts
        assert verdicts in (["VerdictConflictError", "commit"], ["VerdictConflictError", "rollback"])
        assert visible == (racers.MESSAGES if "commit" in verdicts else 0)
        conflicts.append(f"same:{i}")
    assert sorted(log.conflicts()) == sorted(conflicts)
    for handle in (log, another(log)):
        check_offsets(handle)
        assert handle.pending().num_rows == 0


def test_merging_and_marking_race_with_deciders(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log")
    batches = 25
    path = str(tmp_path / "log")
    outcomes = race(
        (racers.send, (path, "a", batches)),
        (racers.send, (path, "b", batches)),
        (racers.merge, (path,)),
        until=2,
    )
    ((_, merged, _, moved),) = [o for o in outcomes if o[0] == "merge"]
    assert merged > 0
    assert moved > 0
    expected = {f"{app}.{i}.{j}" for app in "ab" for i in range(batches) if i % 5 != 1 for j in range(racers.MESSAGES)}
    for handle in (log, another(log)):
        assert Counter(bodies(handle)) == Counter(expected)
        assert handle.pending().num_rows == 0
        check_offsets(handle)


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


@pytest.mark.parametrize("kind", ["memory", "delta"])
@pytest.mark.parametrize("plans", PLANS, ids=lambda p: "+".join(f"{'lands' if a else 'lost'},{b}" for a, b in p))
def test_an_ambiguous_failure_never_makes_two_copies(
    tmp_path: Path, kind: str, plans: Sequence[tuple[bool, str]]
) -> None:
    log = make_log(kind, tmp_path / "log")
    Faulty(log.half.table, plans)
    records = [prepare(log, i) for i in range(2)]
    Faulty(log.op, plans)
    placed = log.decide(records[0], 1, commit=pending(log, records[0]), rollback={}, who=Who.EXECUTE)
    assert sum(p.count for p in placed) == 5
    Faulty(log.op, plans)
    log.ledger.record_check(records[1], 1, pending(log, records[1]), None)
    assert log.state_of(records[1]).check_times(pending(log, records[1])) == 1
    log.ledger.quarantine(records[1], 1, pending(log, records[1]), Who.DISCARD, "x")
    Faulty(log.op, plans)
    reopened = log.ledger.reopen(records[1], 1, (RowState.QUARANTINED,), 1, Who.EXECUTE, "y")
    assert sum(m.count(1) for m in reopened.values()) == 5
    commit(log, records[1])
    Faulty(log.topics_table, plans)
    log.create_topic("points")
    for handle in (log, another(log)):
        assert sorted(bodies(handle)) == sorted(f"app.{i}.{j}" for i in range(2) for j in range(5))
        assert handle.half.table.actions().num_rows == 2
        assert handle.topics() == {"orders": 2, "points": 4}
        check_offsets(handle)


def test_another_writer_may_win_the_version_of_an_ambiguous_commit(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log")
    other = another(log)
    first, second = prepare(log, 0), prepare(log, 1)
    real = log.op.try_commit  # type: ignore[attr-defined]
    calls = []

    def overtaken(change: Change) -> bool:
        calls.append(change)
        if len(calls) == 1:
            commit(other, second)
            raise ConnectionError("time-out")
        return bool(real(change))

    log.op.try_commit = overtaken  # type: ignore[attr-defined]
    commit(log, first)
    assert len(calls) == 2
    check_offsets(log)
    assert len(bodies(log)) == 10


def test_a_lost_acknowledgement_of_prepare_is_not_taken_for_another_writers(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log")
    other = another(log)
    real = log.half.table.try_commit  # type: ignore[attr-defined]

    def overtaken(change: Change) -> bool:
        if other.find("app", 0) is None:
            prepare(other, 0, 3)
        return bool(real(change))

    log.half.table.try_commit = overtaken  # type: ignore[attr-defined]
    from rmq_spark.errors import AlreadyPreparedError

    with pytest.raises(AlreadyPreparedError):
        prepare(log, 0)
    assert log.get("app:0").rows == 3


def test_a_commit_that_never_succeeds_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "COMMIT_TRIES_MAX", 5)
    monkeypatch.setattr(table_module, "BACKOFF_S_MAX", 0.001)
    log = make_log("memory", tmp_path)
    faulty = Faulty(log.half.table, [(False, "raises")] * 9)
    with pytest.raises(CommitError, match=r"half failed 3 times.*ConnectionError: time-out"):
        prepare(log, 0)
    faulty.plans = [(False, "no")] * 9
    with pytest.raises(CommitError, match="too many writers"):
        prepare(log, 0)
    faulty.plans = [*[(False, "no")] * 4, (True, "no")]
    assert prepare(log, 1).rows == 5
    assert log.last_batch_id("app") == 1


def test_an_acknowledged_commit_that_is_not_in_the_state_is_an_error(tmp_path: Path) -> None:
    log = make_log("memory", tmp_path)
    record = prepare(log, 0)
    Faulty(log.op, [(False, "yes")])
    with pytest.raises(LostCommitError, match="Restart it"):
        commit(log, record)
    Faulty(log.half.table, [(False, "yes")])
    with pytest.raises(LostCommitError):
        prepare(log, 1)
    assert log.pending()["half_id"].to_pylist() == ["app:0"]


def test_a_commit_is_known_again_after_any_number_of_others(tmp_path: Path) -> None:
    log = make_log("memory", tmp_path)
    record = prepare(log, 0)
    other = another(log)
    real = log.op.try_commit  # type: ignore[attr-defined]

    def slept(change: Change) -> bool:
        done = bool(real(change))
        other.op.refresh()
        version = other.op.version + 1
        leases = [to_table([OpRow(Kind.LEASE, "app:0")], version, record.prepared_at, f"c{i}") for i in range(1100)]
        file = other.op.write(pa.concat_tables(leases), "op", STATS_COLUMNS)
        assert other.op.compare_and_set(lambda _: Change(add=[file]), lambda _: True)
        return done

    log.op.try_commit = slept  # type: ignore[attr-defined]
    assert sum(p.count for p in log.decide(record, 1, commit=pending(log, record), rollback={}, who=Who.EXECUTE)) == 5


def test_a_batch_that_is_rewritten_right_after_its_commit_is_not_lost(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log")
    prepare(log, 0)
    table = log.half.table
    real = table.try_commit  # type: ignore[attr-defined]

    def then_rewritten(change: Change) -> bool:
        done = bool(real(change))
        rewrite(another(log).half.table)
        return done

    table.try_commit = then_rewritten  # type: ignore[attr-defined]
    record = prepare(log, 1)
    table.try_commit = real  # type: ignore[attr-defined]
    commit(log, record)
    assert sorted(bodies(log)) == [f"app.1.{i}" for i in range(5)]


# ---------------------------------------------------------------- a file that somebody else rewrote
def rewrite(table: Any) -> None:
    """What OPTIMIZE does: all rows in one new file, the old files removed."""
    table.refresh()
    old = table.actions()["path"].to_pylist()
    rows = table.read(old).sort_by([("body", "descending")])
    merged = table.write(rows, "part", ("half_id",))
    change = Change(add=[merged], remove=old, data_change=False)
    assert compare_and_set(
        table, lambda _: change, lambda c: c.add[0].path in table.actions()["path"].to_pylist(), table.try_commit
    )


@pytest.mark.parametrize("kind", ["memory", "delta"])
def test_a_rewritten_half_table_changes_no_decision(tmp_path: Path, kind: str) -> None:
    log = make_log(kind, tmp_path / "log")
    settled = [prepare(log, i) for i in range(3)]
    commit(log, settled[0])
    commit(log, settled[1])
    assert log.move_mark()
    before = log.read("orders").to_pylist()
    time.sleep(0.01)
    rewrite(another(log).half.table)
    for handle in (log, another(log)):
        assert handle.pending()["half_id"].to_pylist() == ["app:2"]
        assert handle.read("orders").to_pylist() == before
        found = handle.get("app:0")
        assert handle.state_of(found).count(RowState.COMMITTED) == 5
        assert commit(handle, found) == []
    assert log.move_mark() in (True, False)
    commit(another(log), another(log).get("app:2"))
    assert log.move_mark()
    for handle in (log, another(log)):
        assert handle.pending().num_rows == 0
        check_offsets(handle)


@pytest.mark.parametrize("kind", ["memory", "delta"])
def test_what_a_checker_knew_before_the_mark_moved_does_not_mislead_it(tmp_path: Path, kind: str) -> None:
    checker = make_log(kind, tmp_path / "log")
    sink = another(checker)
    record = prepare(sink, 0)
    assert checker.pending()["half_id"].to_pylist() == ["app:0"]
    commit(sink, record)
    assert checker.move_mark()
    time.sleep(0.01)
    rewrite(another(checker).half.table)
    assert checker.pending().num_rows == 0
    assert commit(checker, checker.get("app:0"), who=Who.CHECK) == []
    check_offsets(checker)


# ---------------------------------------------------------------- a writer whose log was cleaned away
ONE = pa.schema([("version", pa.int64())])


def number_table(folder: Path) -> Callable[[], DeltaLogTable]:
    """Makes handles of a Delta table whose log is checkpointed and cleaned up after every few commits."""
    settings = {"delta.logRetentionDuration": "interval 1 seconds", "delta.checkpointInterval": "4"}
    DeltaLogTable.create(str(folder), "numbers", ONE, None, settings)
    return lambda: DeltaLogTable(str(folder), "numbers", ONE, None)


def put(table: DeltaLogTable, number: int) -> None:
    file = table.write(pa.table({"version": [number]}, schema=ONE), "n", ("version",))
    table.compare_and_set(lambda _: Change(add=[file]), lambda c: file.path in table.actions()["path"].to_pylist())


def numbers(table: DeltaLogTable) -> list[int]:
    table.refresh()
    return sorted(table.read(table.actions()["path"].to_pylist())["version"].to_pylist())


def clean_up(folder: Path, handle: DeltaLogTable, start: int) -> int:
    """Commit until the entries that were there at the start are gone; the next number."""
    first = min(int(e.stem) for e in (folder / "_delta_log").glob("*.json"))
    deadline = time.monotonic() + 60
    while (folder / "_delta_log" / f"{first + 5:020d}.json").exists() or start < 8:
        assert time.monotonic() < deadline
        put(handle, start)
        start += 1
        time.sleep(0.15)
    return start


def test_a_writer_that_slept_past_the_clean_up_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    opened = number_table(tmp_path / "n")
    sleeper, busy = opened(), opened()
    put(sleeper, 0)
    count = clean_up(tmp_path / "n", busy, 1)
    put(sleeper, count)
    expected = list(range(count + 1))
    assert numbers(sleeper) == numbers(busy) == numbers(opened()) == expected


def test_a_writer_that_slept_between_its_look_and_its_commit_is_refused(tmp_path: Path) -> None:
    opened = number_table(tmp_path / "n")
    sleeper, busy = opened(), opened()
    put(sleeper, 0)
    real, slept = sleeper.try_commit, []

    def sleeps(change: Change) -> bool:
        if not slept:
            slept.append(clean_up(tmp_path / "n", busy, 1))
        return real(change)

    sleeper.try_commit = sleeps  # type: ignore[method-assign]
    put(sleeper, 1000)
    assert numbers(busy) == numbers(opened()) == [*range(slept[0]), 1000]


def test_a_commit_below_the_head_of_the_log_is_never_taken_for_a_success(tmp_path: Path) -> None:
    opened = number_table(tmp_path / "n")
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
