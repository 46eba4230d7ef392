"""What the processes of the race tests do. They are spawned: delta-rs must not be forked."""

from __future__ import annotations

from multiprocessing.synchronize import Barrier, Event
from typing import Any

from rmq_spark.commitlog import maintenance
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import Who
from rmq_spark.errors import AlreadyPreparedError, StaleAttemptError, VerdictConflictError
from tests.half_batches import pending, prepare

MESSAGES = 4


def send(path: str, app: str, batches: int, ready: Barrier, outcomes: Any, roll_back_every: int = 5) -> None:
    """Prepare and decide batches of an own application."""
    log = CommitLog.open(path)
    ready.wait(120)
    for i in range(batches):
        record = prepare(log, i, MESSAGES, app=app)
        commit = pending(log, record)
        rollback: dict[int, bytes] = {}
        if roll_back_every and i % roll_back_every == 1:
            commit, rollback = rollback, commit
        placed = log.decide(record, 1, commit=commit, rollback=rollback, who=Who.EXECUTE)
        outcomes.put((app, i, "rollback" if rollback else "commit", sum(p.count for p in placed)))
    log.close()


def contend(path: str, app: str, batches: int, ready: Barrier, outcomes: Any, commit: bool) -> None:
    """Prepare and decide the same half batches as somebody else, with a verdict of one's own."""
    log = CommitLog.open(path)
    ready.wait(120)
    for i in range(batches):
        try:
            record = prepare(log, i, MESSAGES, app=app)
            outcomes.put((app, i, "prepared", 0))
        except AlreadyPreparedError:
            found = log.find(app, i)
            assert found is not None, (app, i)
            record = found
        mask = {n: b"\x01" * f.rows for n, f in record.files.items()}
        try:
            placed = log.decide(
                record, 1, commit=mask if commit else {}, rollback={} if commit else mask, who=Who.EXECUTE
            )
            outcomes.put((app, i, "commit" if commit else "rollback", sum(p.count for p in placed)))
        except (VerdictConflictError, StaleAttemptError) as problem:
            outcomes.put((app, i, type(problem).__name__, 0))
    log.close()


def merge(path: str, ready: Barrier, stop: Event, outcomes: Any) -> None:
    """Merge op files and move the mark without a pause."""
    maintenance.OP_FILES_MAX = 4
    log = CommitLog.open(path)
    ready.wait(120)
    merged = moved = 0
    while not stop.is_set():
        moved += log.move_mark()
        merged += maintenance.compact_op(log.op)
    outcomes.put(("merge", merged, "moved", moved))
