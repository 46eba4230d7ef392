"""What the tasks of a drain by executors get, and what they write; without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_spark.commitlog import drain as local
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.message_files import placed_ranges
from rmq_spark.source import drain_task, plan
from rmq_spark.storage.files import DataFile
from rmq_spark.storage.table import Table
from tests.half_batches import another, fill_with_pieces, make_log


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    made = make_log("delta", tmp_path / "a log", orders=2, points=1)
    fill_with_pieces(made)
    return made


def test_tasks_are_of_one_topic_and_of_a_good_size(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = another(log)
    rows, _ = local.Drainer(handle)._next_placed(-1, handle.refresh())
    sizes = handle.half.sizes(rows["path"])

    def tasks(messages: int, size: int) -> list[drain_task.Task]:
        for module in (plan, drain_task):
            monkeypatch.setattr(module, "BLOCK_ROWS", messages)
        monkeypatch.setattr(drain_task, "TASK_BYTES_MAX", size)
        found = list(drain_task.tasks_of(placed_ranges(rows), sizes))
        assert sum(task.messages for task in found) == pc.sum(rows["count"]).as_py()
        ranges = [r for task in found for r in task.ranges]
        assert len({(r.topic, r.queue_id, r.queue_offset) for r in ranges}) == len(ranges)
        return found

    (whole,) = tasks(1_000, 1 << 30)
    of_files = {path: sum(r.count for r in whole.ranges if r.rows.path == path) for path in sizes}
    assert abs(whole.size - sum(sizes[p][0] * n / sizes[p][1] for p, n in of_files.items())) <= rows.num_rows
    assert whole.sizes == {path: size for path, (size, _) in sizes.items()}
    by_messages = tasks(10, 1 << 30)
    assert all(len({r.topic for r in task.ranges}) == 1 for task in by_messages if task.is_full)
    assert 4 < len(by_messages) <= 1 + whole.messages // 10
    assert len(tasks(1_000, whole.size // 5)) > 3


def test_a_task_that_runs_twice_leaves_only_orphans(log: CommitLog) -> None:
    handle = another(log)

    class Doubled(local.LocalWriter):
        def write(self, table: Table, rows: pa.Table) -> Sequence[DataFile]:
            tasks = [task.packed() for task in drain_task.tasks_of(placed_ranges(rows), {})]
            work = pickle.loads(pickle.dumps(drain_task.TaskWork(log.path, {}, tasks)))
            numbers = pa.record_batch([pa.array(range(len(tasks)))], names=["id"])
            list(work(iter([numbers])))  # what Spark threw away
            made = pa.Table.from_batches(list(work(iter([numbers]))))
            return [DataFile(**file) for file in made.to_pylist()]

    local.Drainer(handle, Doubled(handle)).run()
    table = another(log).messages_table
    table.refresh()
    assert sum(table.actions()["num_records"].to_pylist()) == sum(log.tails().values())
    assert len(list(Path(log.path, "messages").glob("*.parquet"))) == 2 * table.actions().num_rows
