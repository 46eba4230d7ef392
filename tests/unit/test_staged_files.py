"""Files that were written for a commit, and that somebody's VACUUM removes before it, beside it or after it."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from rmq_spark.commitlog import maintenance
from rmq_spark.commitlog.half import HalfFile, HalfWriter
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.errors import LostFileError, LostStagedFileError
from rmq_spark.storage.table import STAGED_UNSEEN_S
from tests.clocks import Clock, set_clock
from tests.half_batches import another, bodies, check_offsets, commit, header_of, make_log, move_half, prepare

STEPS = ("refresh", "actions", "read", "write", "missing", "put_back", "try_commit")


def vacuum(table: Any) -> None:
    """Somebody's VACUUM with a retention of 0: every file goes that the newest version does not name."""
    looking = table.another() if hasattr(table, "another") else type(table)(table._uri, table.name, table.schema, None)
    looking.refresh()
    live = set(looking.actions()["path"].to_pylist())
    for info in table.fs.get_file_info(pafs.FileSelector(table.folder)):
        if info.path.endswith(".parquet") and info.path.rpartition("/")[2] not in live:
            table.fs.delete_file(info.path)


class Sleeper:
    """Lets a handle stop before some of its steps, while somebody's VACUUM runs; steps are numbered from 0."""

    def __init__(self, table: Any, stops: Container[int], clock: Clock, pause_s: float) -> None:
        self.table, self.stops, self.clock, self.pause_s = table, stops, clock, pause_s
        self.steps = 0
        self.asleep = False
        for name in STEPS:
            if hasattr(table, name):
                setattr(table, name, self._stopping(getattr(table, name)))

    def _stopping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            number, self.steps = self.steps, self.steps + 1
            if number in self.stops and not self.asleep:
                self.asleep = True
                self.clock.pauses.append(self.pause_s)
                vacuum(self.table)
                self.asleep = False
            return step(*arguments)

        return wrapped


def merges(log: CommitLog) -> None:
    maintenance.compact_op(log.op)


def decides(log: CommitLog) -> None:
    commit(log, log.get("app:4"))


def makes_a_topic(log: CommitLog) -> None:
    log.create_topic("bills", 1)


def moves_a_group(log: CommitLog) -> None:
    log.groups.set("late", {("orders", 0): 3}, "a test")


TABLES: dict[Callable[[CommitLog], None], Callable[[CommitLog], Any]] = {
    merges: lambda log: log.op,
    decides: lambda log: log.op,
    makes_a_topic: lambda log: log.topics_table,
    moves_a_group: lambda log: log.groups.table,
}


def open_log(kind: str, folder: Path) -> CommitLog:
    log = make_log(kind, folder, orders=1)
    log.upkeep = False
    for number in range(4):
        commit(log, prepare(log, number, 1))
    prepare(log, 4, 1)
    log.groups.set("late", {("orders", 0): 1}, "a test")
    return log


def is_as_it_should_be(log: CommitLog, work: Callable[[CommitLog], None]) -> bool:
    """What another process finds after the work, which nobody interrupted for good."""
    fresh = another(log)
    check_offsets(fresh)
    return {
        merges: lambda: bodies(fresh) == [f"app.{i}.0" for i in range(4)] and fresh.op.actions().num_rows == 1,
        decides: lambda: bodies(fresh) == [f"app.{i}.0" for i in range(5)],
        makes_a_topic: lambda: fresh.topics() == {"bills": 1, "orders": 1},
        moves_a_group: lambda: fresh.groups.positions("late") == {("orders", 0): 3},
    }[work]()


@pytest.mark.parametrize("pause_s", [0.0, 10 * STAGED_UNSEEN_S], ids=["a moment", "a long sleep"])
@pytest.mark.parametrize("work", TABLES, ids=lambda work: work.__name__)
def test_a_vacuum_beside_any_step_of_a_commit_loses_nothing(
    work: Callable[[CommitLog], None], pause_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merged file that was removed before its commit was a total loss: op's rows were in no other file."""
    monkeypatch.setattr(maintenance, "OP_FILES_MAX", 3)
    clock = set_clock(monkeypatch)
    made = open_log("memory", tmp_path)

    def work_with_stops(stops: Container[int]) -> int:
        log = made.copy()  # type: ignore[attr-defined]
        sleeper = Sleeper(TABLES[work](log), stops, clock, pause_s)
        work(log)
        assert is_as_it_should_be(log, work), f"a VACUUM before {stops}"
        return sleeper.steps

    steps = work_with_stops(())
    assert steps > 5
    for number in range(steps):
        work_with_stops((number,))
    work_with_stops(range(100 * steps))


@pytest.mark.parametrize("work", TABLES, ids=lambda work: work.__name__)
def test_a_vacuum_beside_every_step_of_a_commit_on_disk_loses_nothing(
    work: Callable[[CommitLog], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "OP_FILES_MAX", 3)
    clock = set_clock(monkeypatch)
    log = open_log("delta", tmp_path / "log")
    Sleeper(TABLES[work](log), range(1000), clock, 0.0)
    work(log)
    assert is_as_it_should_be(log, work)


def test_a_merged_file_that_a_race_kept_waiting_is_put_back_before_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merging wins against appends by keeping its file; by the time it wins, the file may be an old orphan."""
    monkeypatch.setattr(maintenance, "OP_FILES_MAX", 3)
    clock = set_clock(monkeypatch)
    log = open_log("delta", tmp_path / "log")
    upkeep = another(log)
    real = upkeep.op.try_commit  # type: ignore[attr-defined]
    seen = []

    def overtaken(change: Any) -> bool:
        seen.append(not upkeep.op.missing(change.add))
        if len(seen) == 1:
            commit(log, log.get("app:4"))
            clock.pauses.append(10 * STAGED_UNSEEN_S)
            vacuum(log.op)
        return bool(real(change))

    upkeep.op.try_commit = overtaken  # type: ignore[attr-defined]
    assert maintenance.compact_op(upkeep.op)
    assert seen == [True, True]
    assert len(bodies(another(log))) == 5


# ---------------------------------------------------------------- files that executors staged
def stage(log: CommitLog, files: int) -> list[HalfFile]:
    writer = HalfWriter(header_of(0), log.topics(), "orders", None)
    return [f for n in range(files) for f in log.stage(writer, pa.table({"body": [f"{n}"]}).to_batches(), n)]


@pytest.mark.parametrize("kind", ["memory", "delta"])
def test_staged_files_that_somebody_removed_are_not_prepared(kind: str, tmp_path: Path) -> None:
    log = make_log(kind, tmp_path / "log", orders=1)
    files = stage(log, 3)
    log.half.table.fs.delete_file(f"{log.half.table.folder}/{files[1].data.path}")
    with pytest.raises(LostStagedFileError, match=f"{files[1].data.path}.*run the batch again"):
        log.prepare(header_of(0), files)
    assert another(log).find("app", 0) is None
    commit(log, log.prepare(header_of(0), stage(log, 3)))
    assert bodies(another(log)) == ["0", "1", "2"]


def test_a_staged_file_that_was_cut_is_not_prepared(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    (file,) = stage(log, 1)
    path = tmp_path / "log" / "half" / file.data.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LostStagedFileError):
        log.prepare(header_of(0), [file])
    assert another(log).find("app", 0) is None


def test_who_slept_between_its_look_at_staged_files_and_their_commit_hears_that_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the local transaction runs: its messages could never be read."""
    clock = set_clock(monkeypatch)
    log = make_log("memory", tmp_path, orders=1)
    files = stage(log, 2)
    table: Any = log.half.table
    real = table.try_commit

    def sleeps(change: Any) -> bool:
        clock.pauses.append(2 * STAGED_UNSEEN_S)
        vacuum(table)
        return bool(real(change))

    table.try_commit = sleeps
    with pytest.raises(LostFileError, match="was removed while this process slept"):
        log.prepare(header_of(0), files)


def test_who_slept_while_its_files_were_moved_is_not_told_that_they_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table that it had read before it looked for them still had their names."""
    clock = set_clock(monkeypatch)
    log = make_log("memory", tmp_path, orders=1)
    files = stage(log, 2)
    table: Any = log.half.table
    real, read_again = table.try_commit, table.refresh
    seen: list[int] = []

    def sleeps(change: Any) -> bool:
        done = bool(real(change))
        seen.append(read_again())
        clock.pauses.append(2 * STAGED_UNSEEN_S)
        move_half(another(log))
        vacuum(table)
        return done

    table.try_commit = sleeps
    table.refresh = lambda: seen.pop() if seen else read_again()
    commit(log, log.prepare(header_of(0), files))
    assert bodies(another(log)) == ["0", "1"]
