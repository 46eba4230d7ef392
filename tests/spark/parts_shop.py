"""A shop whose driver and tasks die on a cluster: where, and how, a test says with files (:func:`doom`).

Spark brings this module to each process as a file of its own. A test imports it as a module of this folder.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark._core.runtime import failpoints

FOLDER = "RMQ_SPARK_TEST_SHOP"
"""The environment variable that tells processes of the cluster the shop's folder."""
URL = "RMQ_SPARK_TEST_URL"
"""The environment variable that tells them the database's URL."""
GROUP = "shop"
REFUSED = 7
"""Of every so many orders one is refused."""

TASK_POINTS = ("before the claim", "fence row written", "in work", "database commits", "after the commit")
"""A task comes to these points, in this order."""
DRIVER_POINTS = ("staged", "prepared", "parts begun", "executed", "decided", "sent")
"""A driver comes to these points, in this order."""

_is_armed = False


# ---------------------------------------------------------------- to die
def doom(folder: Path, point: str, kind: str, seconds: float = 0.0) -> Path:
    """Let the first process that comes to a point from now on die there, and return the file that says so until then.
    ``kind`` is one of :data:`DEATHS`."""
    draft, file = folder / "doomed" / f".{point}", folder / "doomed" / point
    draft.write_text(json.dumps({"point": point, "kind": kind, "seconds": seconds}))
    return draft.replace(file)


def dead(folder: Path) -> list[tuple[str, str]]:
    """The kind and the point of each death, or pause, that a process has met."""
    met = [json.loads(file.read_text()) for file in sorted((folder / "met").iterdir())]
    return [(death["kind"], death["point"]) for death in met]


def reach(point: str, connection: sa.Connection | None = None) -> None:
    """The process is at this point: it dies here when a file says so, and no other process has met that file."""
    if not _is_armed:
        return
    folder = Path(os.environ[FOLDER])
    met = folder / "met" / f"{time.time_ns()}-{os.getpid()}"
    try:
        (folder / "doomed" / point).rename(met)
    except FileNotFoundError:
        return
    death = json.loads(met.read_text())
    DEATHS[death["kind"]](connection, death["seconds"])


def _worker(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _executor(*_: Any) -> None:
    _kill_executor()
    _worker()


def _executor_alone(_: Any, seconds: float) -> None:
    """The executor dies, and nobody tells its task, which goes on."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill_executor()
    time.sleep(seconds)


def _kill_executor() -> None:
    """A worker is a child of Spark's daemon, which is a child of the executor."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


def _backend(connection: sa.Connection, _: float) -> None:
    """The database ends the session of this database transaction, which hears of it at its next statement."""
    pid = connection.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
    other = sa.create_engine(os.environ[URL], poolclass=sa.NullPool)
    with other.connect() as of_other:
        of_other.execute(sa.text("select pg_terminate_backend(:pid, 5000)"), {"pid": pid})


def _driver(*_: Any) -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)  # spark-submit's JVM too


def _slow(_: Any, seconds: float) -> None:
    time.sleep(seconds)


DEATHS: Mapping[str, Callable[..., None]] = {
    "worker": _worker,
    "executor": _executor,
    "executor alone": _executor_alone,
    "backend": _backend,
    "driver": _driver,
    "slow": _slow,
}
"""Who dies, by the name of the kind. ``slow`` is a pause."""


def arm(is_task: bool) -> None:
    """Let this process come to the points of a task, or of a driver."""
    global _is_armed
    if _is_armed:
        return
    _is_armed = True

    def hook(point: str, **_: Any) -> None:
        if point in (TASK_POINTS if is_task else DRIVER_POINTS):
            reach(point)

    failpoints.set_hook(hook)
    if is_task:
        sa.event.listen(sa.Engine, "commit", lambda connection: reach("database commits", connection))


# ---------------------------------------------------------------- the local transaction
class Listener(txmq.SqlTransactionListener):
    """It comes to the points around a part's database transaction, and notes in a journal when it runs a part."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        if batch.part is None:  # this is the driver
            return super().execute_local_transaction(batch)
        arm(is_task=True)
        task = uuid.uuid4().hex
        note(batch, task, "begins")
        reach("before the claim")
        verdicts = super().execute_local_transaction(batch)
        reach("after the commit")
        note(batch, task, "ends")
        return verdicts

    def begin_parts(self, batch: txmq.HalfBatch) -> bool:
        is_begun = super().begin_parts(batch)
        reach("parts begun")
        return is_begun


def note(batch: txmq.HalfBatch, task: str, what: str) -> None:
    line = json.dumps([batch.half_id, batch.attempt, batch.part, task, what, time.time()])
    with (Path(os.environ[FOLDER]) / "journal").open("a") as journal:
        journal.write(line + "\n")


def take_orders(connection: sa.Connection, batch: txmq.HalfBatch) -> Any:
    numbers = [int(key) for key in batch.transactions["transaction_key"].to_pylist()]
    good = [{"n": n, "attempt": batch.attempt, "part": batch.part} for n in numbers if n % REFUSED]
    connection.execute(sa.text("insert into orders values (:n, :attempt, :part)"), good)
    reach("in work", connection)
    return batch.verdicts(rollback=[n for n in numbers if n % REFUSED == 0])


def listener() -> Listener:
    return Listener(f"env:{URL}", take_orders)
