"""Stops this process at a point of the protocol, when the environment says so; whoever started it may then kill it.

``DIE_AT=<point>`` of batch ``DIE_BATCH`` under attempt ``DIE_ATTEMPT``. The listeners' module imports this one in the
process that runs the protocol, so nothing in rmq_spark knows about it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from rmq_spark.commitlog import half as half_module
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import Who
from rmq_spark.sink.two_phase import TwoPhase
from rmq_spark.transaction import HalfBatch

WORKER_POINTS = ("half file torn", "half file written")
"""In an executor's worker, which knows no batch: the first one that comes here dies by itself."""
POINTS = ("staged", "prepared", "executing", "executed", "decided", "before Spark's commit")

_POINT = os.environ.get("DIE_AT")
_BATCH = int(os.environ.get("DIE_BATCH", "0"))
_ATTEMPT = int(os.environ.get("DIE_ATTEMPT", "1"))


def reach(point: str, app_id: str, batch_id: int, attempt: int) -> None:
    """Stop here for good when this is the point: the file that says so is the last thing this process does."""
    if (point, batch_id, attempt) != (_POINT, _BATCH, _ATTEMPT):
        return
    folder = Path(os.environ["DIE_ROOT"]) / "reached"
    folder.mkdir(exist_ok=True)
    (folder / app_id).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def reach_in(point: str, batch: HalfBatch) -> None:
    reach(point, batch.app_id, batch.batch_id, batch.attempt)


def _arm_worker() -> None:
    write = half_module.write_table

    def dying_write(fs: Any, folder: str, *arguments: Any, **options: Any) -> Any:
        file = write(fs, folder, *arguments, **options)
        reached = Path(os.environ["DIE_ROOT"]) / "reached"
        reached.mkdir(exist_ok=True)
        try:
            (reached / "worker").touch(exist_ok=False)
        except FileExistsError:
            return file
        if _POINT == "half file torn":
            os.truncate(f"{folder}/{file.path}", file.size_bytes // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    half_module.write_table = dying_write


def _arm() -> None:
    prepare, execute, decide, send = CommitLog.prepare, TwoPhase.execute, TwoPhase.decide, TwoPhase.send

    def dying_prepare(self: CommitLog, header: Any, files: Any) -> Any:
        reach("staged", header.app_id, header.batch_id, 1)
        return prepare(self, header, files)

    def dying_execute(self: TwoPhase, run: Any, attempt: int, rows: Any) -> None:
        reach("prepared", run.record.header.app_id, run.record.header.batch_id, attempt)
        execute(self, run, attempt, rows)

    def dying_decide(self: TwoPhase, run: Any, batch: HalfBatch, mask: Any, verdicts: Any, who: Who) -> bool:
        if who is Who.EXECUTE:
            reach_in("executed", batch)
        unknown = decide(self, run, batch, mask, verdicts, who)
        if who is Who.EXECUTE:
            reach_in("decided", batch)
        return unknown

    def dying_send(self: TwoPhase, header: Any, files: Any, arg: Any = None) -> Any:
        outcome = send(self, header, files, arg)
        reach("before Spark's commit", header.app_id, header.batch_id, outcome.attempt)
        return outcome

    CommitLog.prepare = dying_prepare
    TwoPhase.execute = dying_execute
    TwoPhase.decide = dying_decide
    TwoPhase.send = dying_send


if _POINT in WORKER_POINTS:
    _arm_worker()
elif _POINT is not None:
    _arm()
