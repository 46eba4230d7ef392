"""A drain by Spark's executors: the same table as by a local drain, whatever fails on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import rmq_spark as txmq
from rmq_spark.check.job import _by_executors
from rmq_spark.commitlog import drain as local
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.messages import drained_up_to
from rmq_spark.errors import CommitError, CorruptLogError, OptionError
from rmq_spark.source import drain as by_executors
from rmq_spark.source import drain_task, plan
from rmq_spark.storage.files import DataFile
from rmq_spark.storage.table import Change, Table
from rmq_spark.testing import InMemoryCommitLog
from tests.half_batches import another, commit, fill_with_pieces, move_half, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
KEY = ("topic", "queue_id", "queue_offset")


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    made = CommitLog.create(tmp_path / "a log")
    made.create_topic("orders", 2)
    made.create_topic("points", 1)
    return made


def files_of(log: CommitLog) -> list[pa.Table]:
    """The files of messages, each as it lies there."""
    table = another(log).messages_table
    table.refresh()
    return [table.read([path]) for path in table.actions()["path"].to_pylist()]


def drained(log: CommitLog) -> pa.Table:
    return pa.concat_tables(files_of(log)).sort_by([(name, "ascending") for name in KEY])


def copy_of(log: CommitLog, folder: Path) -> CommitLog:
    """The same commit log elsewhere."""
    shutil.copytree(log.path, folder)
    return CommitLog.open(folder)


def small_tasks(monkeypatch: pytest.MonkeyPatch, messages: int = 50) -> None:
    for module in (plan, drain_task):
        monkeypatch.setattr(module, "BLOCK_ROWS", messages)


def test_executors_drain_what_a_local_drain_does(
    spark: SparkSession, log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tasks(monkeypatch)
    for number in range(2):
        fill_with_pieces(log, number)
        if number == 0:
            move_half(log)
    mine = copy_of(log, tmp_path / "other")
    assert mine.drain() == txmq.drain(spark, log) == log.refresh()
    assert drained(log).equals(drained(mine))
    files = files_of(log)
    assert len(files) > 3
    for file in files:
        assert file.equals(file.sort_by([(name, "ascending") for name in KEY]))
        assert len(pc.unique(file["topic"])) == 1
    table = another(log).messages_table
    table.refresh()
    bounds = table.actions().select(["min.topic", "max.topic", "min.op_version", "max.commit_timestamp"])
    assert all(column.null_count == 0 for column in bounds.columns)
    fill_with_pieces(log, 2)
    assert txmq.drain(spark, log.path) == log.refresh()  # it goes on where it ended
    assert txmq.drain(spark, log.path) == log.refresh()  # and does nothing when there is nothing to do
    mine = copy_of(log, tmp_path / "third")
    for topic in log.topics():
        read = mine.read(topic)
        assert drained(log).filter(pc.field("topic") == topic).select(read.column_names).equals(read)


# ---------------------------------------------------------------- what fails on the way
class Overtaken(by_executors.ExecutorWriter):
    """While its executors write, a local drainer is faster by some versions."""

    def write(self, table: Table, rows: pa.Table) -> Sequence[DataFile]:
        files = super().write(table, rows)
        rival = another(CommitLog.open(self._log.path))
        if drained_up_to(table) < 2:
            local.Drainer(rival)._step(rival.messages_table, drained_up_to(table), 2)
        return files


def test_drains_at_once_copy_each_message_once(
    spark: SparkSession, log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_with_pieces(log, 0)
    mine = copy_of(log, tmp_path / "other")
    mine.drain()
    third = copy_of(log, tmp_path / "third")
    assert log.drain_by(lambda handle: Overtaken(spark, handle)) == log.refresh()
    monkeypatch.setattr(by_executors, "STEP_MESSAGES_MAX", 30)
    with ThreadPoolExecutor(3) as pool:
        works = [lambda: txmq.drain(spark, third.path), lambda: txmq.drain(spark, third.path), third.drain]
        assert {done.result() for done in [pool.submit(work) for work in works]} == {third.refresh()}
    assert drained(log).equals(drained(mine))
    assert drained(third).equals(drained(mine))


def test_a_drain_goes_on_after_a_commit_that_failed(
    spark: SparkSession, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_with_pieces(log, 0)
    monkeypatch.setattr(by_executors, "STEP_MESSAGES_MAX", 20)
    try_commit = type(log.messages_table).try_commit
    commits: list[int] = []

    def breaks(self: Table, change: Change) -> bool:
        commits.append(len(change.add))
        if self.name == "messages" and len(commits) > 1:
            raise OSError("the store does not answer")
        return try_commit(self, change)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(type(log.messages_table), "try_commit", breaks)
        with pytest.raises(CommitError, match="the store does not answer"):
            txmq.drain(spark, log)
    part = drained(log)
    assert 0 < part.num_rows < sum(log.tails().values())
    assert txmq.drain(spark, log) == log.refresh()
    assert drained(log).num_rows == sum(log.tails().values())
    for topic in log.topics():
        offsets = drained(log).filter(pc.field("topic") == topic).select(["queue_id", "queue_offset"])
        assert offsets.equals(log.read(topic).select(["queue_id", "queue_offset"]))


def test_a_half_file_that_cannot_be_read_is_named_and_stops_the_drain(spark: SparkSession, log: CommitLog) -> None:
    commit(log, send(log, "whole", 5))
    txmq.drain(spark, log)
    broken = send(log, "broken", 5)
    commit(log, broken)
    commit(log, send(log, "later", 5))
    file = Path(log.path, "half", broken.files[0].path)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptLogError, match=file.name):
        txmq.drain(spark, log)
    assert drained(log).num_rows == 5
    file.write_bytes(content)
    txmq.drain(spark, log)
    assert drained(log).num_rows == 15


def test_a_log_in_memory_is_refused(spark: SparkSession) -> None:
    with pytest.raises(OptionError, match=r"in the memory of this process, where no executor sees it: log\.drain\(\)"):
        txmq.drain(spark, InMemoryCommitLog(topics={"orders": 1}))


def test_a_plan_shows_no_storage_option(spark: SparkSession, log: CommitLog) -> None:
    work = drain_task.TaskWork(log.path, {"AWS_SECRET_ACCESS_KEY": "a-secret-value"}, [b""])
    frame = spark.range(0, 1, 1, 1).mapInArrow(work, drain_task.FILES_DDL)
    plan_text = frame._jdf.queryExecution().toString()
    assert "MapInArrow" in plan_text
    assert "a-secret-value" not in plan_text


def test_the_check_job_drains_a_backlog_by_the_executors_of_its_session(spark: SparkSession, log: CommitLog) -> None:
    drains = _by_executors("true", {})
    assert drains is not None
    commit(log, send(log, "some", 5))
    with ThreadPoolExecutor(1) as pool:  # as the job does
        assert pool.submit(drains, log).result() == log.refresh()
    assert drained(log).num_rows == 5


RETRIED = """
import sys
from pyspark import TaskContext
from pyspark.sql import SparkSession
import rmq_spark as txmq
from rmq_spark.source import drain, drain_task

class FailsAtFirst(drain_task.TaskWork):
    def write(self, task):
        files = super().write(task)
        if TaskContext.get().attemptNumber() == 0:
            raise OSError("the executor was lost")
        return files

drain.TaskWork = FailsAtFirst
builder = SparkSession.builder.master("local[2, 3]").config("spark.ui.enabled", "false")
for name in ("spark.driver.host", "spark.driver.bindAddress"):
    builder = builder.config(name, "127.0.0.1")
txmq.drain(builder.getOrCreate(), sys.argv[1])
"""
"""In a program of its own: a session that tries a task again is made so."""


@pytest.mark.long
def test_a_task_that_is_tried_again_leaves_only_orphans(log: CommitLog, tmp_path: Path) -> None:
    fill_with_pieces(log, 0)
    mine = copy_of(log, tmp_path / "other")
    mine.drain()
    program = tmp_path / "retried.py"
    program.write_text(RETRIED)
    done = subprocess.run(
        [sys.executable, str(program), log.path],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert drained(log).equals(drained(mine))
    assert len(list(Path(log.path, "messages").glob("*.parquet"))) == 2 * len(files_of(log))
