"""Files that were written for a commit, and that somebody's VACUUM removes before it, beside it or after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from rmq_spark import CommitLog
from rmq_spark._core.storage.compare_and_set import STAGED_UNSEEN_S
from rmq_spark.errors import LostFileError, LostStagedFileError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import set_clock
from tests.support.half_batches import (
    another,
    bodies,
    check_offsets,
    commit,
    header_of,
    move_half,
    prepare,
    prepare_one,
    stage,
)
from tests.support.inside import HalfFile, Runtime, op_merge
from tests.support.limits import set_limits
from tests.support.meanwhile import at


def vacuum(table: Any) -> None:
    """Somebody's VACUUM with a retention of 0: every file goes that the newest version does not name."""
    looking = table.another() if hasattr(table, "another") else type(table)(table.uri, table.name, table.schema, None)
    looking.refresh()
    live = set(looking.actions()["path"].to_pylist())
    for info in table.fs.get_file_info(pafs.FileSelector(table.folder)):
        if info.path.endswith(".parquet") and info.path.rpartition("/")[2] not in live:
            table.fs.delete_file(info.path)


@pytest.mark.log("delta", orders=1)
def test_a_merged_file_that_a_race_kept_waiting_and_somebody_removed_is_not_committed(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op rows that it replaces would be in no file."""
    set_limits(monkeypatch, OP_FILES_MAX=3)
    clock = set_clock(monkeypatch)
    log.engine.compaction.is_on = False
    for number in range(4):
        commit(log, prepare(log, number, 1))
    prepare(log, 4, 1)

    def overtaken() -> None:
        commit(log, log.engine.get("app:4"))
        clock.pauses.append(10 * STAGED_UNSEEN_S)
        vacuum(log.engine.op_table)

    gone = pytest.raises(LostStagedFileError, match="staged for table op, is gone or cut")
    with at("commit begins", overtaken, table="op"), gone:
        op_merge.compact_op(another(log).engine.op_table)
    assert len(bodies(another(log))) == 5
    check_offsets(another(log))


# ---------------------------------------------------------------- files that executors staged
def staged(log: CommitLog, files: int) -> list[HalfFile]:
    return [file for n in range(files) for file in stage(log, header_of(0), {"body": [f"{n}"]}, partition=n)]


@pytest.mark.log("memory", "delta", orders=1)
def test_staged_files_that_somebody_removed_are_not_prepared(log: CommitLog) -> None:
    files = staged(log, 3)
    log.engine.half.table.fs.delete_file(f"{log.engine.half.table.folder}/{files[1].data.path}")
    with pytest.raises(LostStagedFileError, match=f"{files[1].data.path}.*run the batch again"):
        prepare_one(log.engine, header_of(0), files)
    assert another(log).engine.find("app", 0) is None
    commit(log, prepare_one(log.engine, header_of(0), staged(log, 3)))
    assert bodies(another(log)) == ["0", "1", "2"]


@pytest.mark.log("delta", orders=1)
def test_a_staged_file_that_was_cut_is_not_prepared(log: CommitLog, tmp_path: Path) -> None:
    (file,) = staged(log, 1)
    path = tmp_path / "log" / "half" / file.data.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LostStagedFileError):
        prepare_one(log.engine, header_of(0), [file])
    assert another(log).engine.find("app", 0) is None


@pytest.mark.log("memory", orders=1)
def test_who_slept_between_its_look_at_staged_files_and_their_commit_hears_that_they_are_gone(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the local transaction runs: its messages could never be read."""
    clock = set_clock(monkeypatch)
    files = staged(log, 2)

    def sleeps() -> None:
        clock.pauses.append(2 * STAGED_UNSEEN_S)
        vacuum(log.engine.half.table)

    lost = pytest.raises(LostFileError, match="was removed while this process slept")
    with at("commit begins", sleeps, table="half"), lost:
        prepare_one(log.engine, header_of(0), files)


class Sleeps(Runtime):
    """A machine that is suspended when it is asked for its clock the next time, after it was told so."""

    def __init__(self) -> None:
        self.slept_s, self.meanwhile = 0.0, list[Callable[[], object]]()

    def monotonic(self) -> float:
        while self.meanwhile:
            self.slept_s += 2 * STAGED_UNSEEN_S
            self.meanwhile.pop()()
        return super().monotonic() + self.slept_s


def test_who_slept_while_its_files_were_moved_is_not_told_that_they_are_lost() -> None:
    """The table that it had read before it looked for them still had their names."""
    runtime = Sleeps()
    log = InMemoryCommitLog(topics={"orders": 1}, runtime=runtime)
    files = staged(log, 2)

    def are_moved() -> None:
        move_half(log)
        vacuum(log.engine.half.table)

    with at("commit done", lambda: runtime.meanwhile.append(are_moved), table="half"):
        record = prepare_one(log.engine, header_of(0), files)
    assert not runtime.meanwhile
    commit(log, record)
    assert bodies(another(log)) == ["0", "1"]
