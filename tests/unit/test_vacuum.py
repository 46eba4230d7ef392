"""vacuum: orphans of crashes go when they are old, and nothing else does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rmq_spark import CommitLog
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import set_clock
from tests.support.half_batches import bodies, check_offsets, commit, header_of, merge_op_files, prepare, stage
from tests.support.inside import LOOK_INTERVAL_S, op_merge
from tests.support.limits import set_limits

pytestmark = pytest.mark.log("delta")

DAY_S = 24 * 3600


def orphan_of(log: CommitLog, batch_id: int) -> str:
    """Staged by an executor whose driver then crashed."""
    (file,) = stage(log, header_of(batch_id))
    return f"half/{file.data.path}"


def age(folder: Path, days: float) -> None:
    """Let every file of the log be so old."""
    then = time.time() - days * DAY_S
    for file in folder.rglob("*.parquet"):
        os.utime(file, (then, then))


def test_old_orphans_go_and_live_and_young_files_stay(log: CommitLog, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    commit(log, prepare(log, 0))
    prepare(log, 1)
    orphan = orphan_of(log, 2)
    age(folder, 8)
    young = orphan_of(log, 3)
    before = sorted(folder.rglob("*.parquet"))
    assert log.vacuum(dry_run=True) == [orphan]
    assert sorted(folder.rglob("*.parquet")) == before
    assert log.vacuum(older_than="9d") == []
    assert log.vacuum() == [orphan]
    assert not (folder / orphan).exists()
    assert (folder / young).exists()
    assert log.vacuum() == []
    assert len(bodies(log)) == 5
    assert log.pending()["half_id"].to_pylist() == ["app:1"]
    commit(log, log.engine.get("app:1"))
    check_offsets(log)


def test_files_that_left_the_table_within_part_of_an_hour_count_as_removed_lately(log: CommitLog) -> None:
    for batch_id in range(3):
        commit(log, prepare(log, batch_id, 1))
    before = set(log.engine.op_table.actions()["path"].to_pylist())
    merge_op_files(log)
    log.engine.op_table.refresh()
    removed = before - set(log.engine.op_table.actions()["path"].to_pylist())
    assert removed
    assert log.engine.op_table.removed_since(1800.0) >= removed
    assert log.engine.op_table.removed_since(90 * 60.0) >= removed


def test_anothers_commits_are_not_orphans(log: CommitLog, tmp_path: Path) -> None:
    other = CommitLog.open(tmp_path / "log")
    other.vacuum(dry_run=True)
    commit(log, prepare(log, 0))
    age(tmp_path / "log", 8)
    assert other.vacuum() == []
    assert len(bodies(other)) == 5


def test_what_is_no_data_file_is_left_alone(log: CommitLog, tmp_path: Path) -> None:
    mine = tmp_path / "log" / "half" / "notes.txt"
    mine.write_text("mine")
    deeper = tmp_path / "log" / "half" / "copies"
    deeper.mkdir()
    (deeper / "x.parquet").write_bytes(b"mine")
    entries = sorted((tmp_path / "log" / "half" / "_delta_log").iterdir())
    os.utime(mine, (0, 0))
    age(tmp_path / "log", 30)
    assert log.vacuum() == []
    assert mine.exists()
    assert (deeper / "x.parquet").exists()
    assert sorted((tmp_path / "log" / "half" / "_delta_log").iterdir()) == entries


@pytest.fixture
def merged(
    log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[CommitLog, list[str]]:
    """A handle from before a merge of old op files, so many days ago, and the files that it knows."""
    set_limits(monkeypatch, OP_FILES_MAX=3)
    log.engine.compaction.is_on = False
    for i in range(4):
        commit(log, prepare(log, i))
    age(tmp_path / "log", 30)
    late = CommitLog.open(tmp_path / "log")
    late.engine.ledger.refresh()
    set_clock(monkeypatch, -getattr(request, "param", 0) * DAY_S)
    assert op_merge.compact_op(CommitLog.open(tmp_path / "log").engine.op_table)
    monkeypatch.undo()
    return late, late.engine.op_table.actions()["path"].to_pylist()


def test_files_that_were_merged_lately_stay_for_those_who_read_them(
    log: CommitLog, merged: tuple[CommitLog, list[str]]
) -> None:
    late, paths = merged
    assert log.vacuum() == []
    assert late.engine.op_table.read(paths).num_rows == 8


@pytest.mark.parametrize("merged", [8], indirect=True)
def test_merged_files_go_in_the_end(log: CommitLog, merged: tuple[CommitLog, list[str]]) -> None:
    assert len(log.vacuum()) == 4
    check_offsets(log)
    assert len(bodies(log)) == 20


def test_the_twin_in_memory_removes_orphans_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    log = InMemoryCommitLog(topics={"orders": 2})
    commit(log, prepare(log, 0))
    orphan = orphan_of(log, 1)
    assert log.vacuum() == []
    clock = set_clock(monkeypatch, 8 * DAY_S)
    assert log.vacuum() == []  # a second look says whether the clock is right
    clock.ahead_s += LOOK_INTERVAL_S + 1
    assert log.vacuum(dry_run=True) == [orphan]
    assert log.vacuum() == [orphan]
    assert log.vacuum() == []
    assert len(bodies(log)) == 5
