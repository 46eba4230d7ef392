"""A process that was stopped (SIGSTOP, a suspended machine) for longer than a log keeps what was replaced: it goes on,
and calls no sound log damaged."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from deltalake import DeltaTable

import rmq_spark as txmq
from rmq_spark import CheckService, CommitLog
from rmq_spark.errors import CorruptLogError
from tests.support import seeds
from tests.support.half_batches import another, commit, let_leave, make_log, prepare, send
from tests.support.inside import Planner, Positions, Subscription, op_merge

PRODUCT = str(Path(txmq.__file__).parent)
TABLES = "storage/compare_and_set storage/delta_entries storage/delta_table storage/file_reader storage/table "
TABLES += "log/batch_state log/op"
FILES = tuple(f"_core/{name}.py" for name in TABLES.split())
READING = tuple(f"{PRODUCT}/_core/{room}/" for room in "storage log messages protocol upkeep inspect client".split())


class Stopped:
    """Stops a call before the first line of one function of the tables, and lets time pass for all others."""

    def __init__(self, at: CodeType | None, meanwhile: Callable[[], object]) -> None:
        self.at, self.meanwhile = at, meanwhile
        self.came: dict[CodeType, None] = {}
        self.is_over = at is None

    def __call__(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_filename.startswith(READING):
            self.came[frame.f_code] = None
            if frame.f_code is self.at and not self.is_over:
                self.is_over = True
                passes = threading.Thread(target=self.meanwhile)  # another process
                passes.start()
                passes.join()


def send_all(log: CommitLog, key: str, rows: int) -> None:
    commit(log, send(log, key, rows))


def two_hours_pass(log: CommitLog) -> None:
    """Others send, all that is settled leaves, and what was replaced is deleted, with the old entries of each log."""
    other = another(log)
    for n in range(2):
        send_all(other, f"later{n}", 2)
    let_leave(other)
    op_merge.compact_op(other.engine.op_table)
    other.create_topic("refunds", 1, exist_ok=True)
    other.engine.groups.set("readers", {("orders", 0): 1}, "a test")
    for table in other.engine.tables():
        folder = Path(table.folder)
        delta = DeltaTable(str(folder))
        delta.create_checkpoint()
        table.refresh()
        for path in table.removed_since():
            (folder / path).unlink(missing_ok=True)
        for entry in (folder / "_delta_log").iterdir():
            if entry.name[:20].isdigit() and int(entry.name[:20]) < delta.version():
                entry.unlink()


def plan(log: CommitLog) -> None:
    """What a stream reads with failOnDataLoss=false, which skips what it takes for lost."""
    planner = Planner(log.engine, Subscription(("orders",)), fail_on_data_loss=False)
    end = planner.latest()
    ranges = planner.ranges(Positions({("orders", 0): 0}), end)
    assert sum(r.stop - r.queue_offset for r in ranges) == end["orders", 0] > 0


CALLS: dict[str, Callable[[CommitLog], object]] = {
    "read": lambda log: log.read("orders").num_rows,
    "pending": lambda log: log.pending(),
    "trace": lambda log: log.trace(half_id="open:0"),
    "send": lambda log: send_all(log, "mine", 1),
    "positions": lambda log: log.engine.groups.next_offsets("readers"),
    "topics": lambda log: (log.topics(), log.engine.topic_store.with_names(["nowhere"]).queues),
    "plan": plan,
    "drain": lambda log: log.drain(),
    "check": lambda log: CheckService(log, {}, transaction_timeout=0).run_once(),
}


RARE = ("pending", "trace", "topics", "plan")
"""Of the tables they call what the others call, too."""

ONE_OF = seeds.how_many(quick=20, in_all=1)
"""One of so many moments is tried; the seed says which."""


@pytest.fixture(scope="module")
def aged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with messages on both sides of the border, and an open half batch."""
    path = tmp_path_factory.mktemp("aged") / "log"
    log = make_log("delta", path, orders=1)
    prepare(log, 0, 2, app="open")
    for n in range(3):
        send_all(log, f"early{n}", 2)
    log.drain()
    send_all(log, "late", 2)
    log.engine.groups.set("readers", {("orders", 0): 0}, "a test")
    return path


def opened(aged: Path, to: Path) -> CommitLog:
    shutil.copytree(aged, to)
    log = CommitLog.open(to)
    log.refresh()
    return log


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in RARE else ()) for name in CALLS])
def test_a_process_that_was_stopped_for_hours_calls_no_sound_log_damaged(name: str, aged: Path, tmp_path: Path) -> None:
    """ "The Delta log of table op cannot be read any more", said a process that woke up."""
    call, first = CALLS[name], opened(aged, tmp_path / "first")
    whole = Stopped(None, lambda: None)
    whole(lambda: call(first))
    reached: list[bool] = []
    moments = [code for code in whole.came if code.co_filename.endswith(FILES)]
    for n, code in enumerate(moments[seeds.first_seed() % ONE_OF :: ONE_OF]):
        log = opened(aged, tmp_path / f"{n}")
        stopped = Stopped(code, partial(two_hours_pass, log))
        try:
            stopped(partial(call, log))
        except CorruptLogError as problem:
            raise AssertionError(f"stopped before {code.co_name}") from problem
        reached.append(stopped.is_over)  # some functions are called when seconds have passed, and not each time
        assert another(log).read("orders").num_rows == 12 + (name == "send")
    assert sum(reached) > 0.6 * len(reached) > 0
