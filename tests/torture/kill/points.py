"""The named points of the protocol at which a test lets a process die or stop.

This module says who is told to end there, and how. A process is told by :func:`arm`, or by its environment
(:meth:`Fate.environment`), which Spark hands on to its workers. The points stand in the product's code
(``rmq_spark._core.runtime.failpoints``), and some programs call :func:`reach` in their own.

A process dies by SIGKILL, with no ``finally`` and no flush, as with a power switch for the process alone. Or it stops
by SIGSTOP: its watcher wakes it later, or kills it together with all that belongs to it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from rmq_spark import HalfBatch
from rmq_spark._core.log.op import PRUNED
from rmq_spark._core.runtime import failpoints
from tests.support.inside import (
    Change,
    HalfHeader,
)

WORKER = ("half file torn", "half file written")
"""An executor's worker comes here. It knows no batch."""
SINK = ("staged", "prepared", "executing", "executed", "decided", "sent")
"""Every micro-batch that is new comes here, in this order. A fate may name the micro-batch and the attempt."""
PRODUCER = (
    *WORKER,
    *SINK,
    "send begins",
    "half commit begins",
    "half commit done",
    "fence row written",
    "database commits",
    "op file written",
    "op commit begins",
    "op commit done",
    "lease written",
    "reopened",
    "replay asks",
)
CHECKER = (
    "open batches listed",
    "asked",
    "tombstone written",
    "tombstones commit",
    "answered",
    "op file written",
    "op commit begins",
    "op commit done",
    "check counted",
    "quarantined",
    "mark moved",
)
UPKEEP = (
    "messages file written",
    "messages commit begins",
    "messages commit done",
    "op file written",
    "op commit begins",
    "op commit done",
    "leaving begins",
    "leaving done",
    "stripping begins",
    "stripping done",
    "expiring begins",
    "expiring done",
    "pruning begins",
    "pruning done",
    "merge commit begins",
    "merge commit done",
    "mark moved",
    "checkpoint made",
    "vacuumed",
)
READER = ("planned", "reading", "read", "offsets written", "offsets stored")
CONSUMER = ("send begins", "sent", "progress begins", "progress written", "inbox committed", "table committed")
"""A consumer sends back what failed; then it moves its group's progress, or the result and the progress are one."""
BY_ROLE = {"producer": PRODUCER, "checker": CHECKER, "upkeep": UPKEEP, "reader": READER, "consumer": CONSUMER}

TOLD = "RMQ_SPARK_TEST_FATE"
"""The environment variable that tells a process its fate."""
ROOT = Path(__file__).parents[3]
AT_START = Path(__file__).with_name("at_start")
"""On the path of processes that are told by their environment: Python imports its ``sitecustomize`` at their start."""


@dataclass(frozen=True)
class Fate:
    """Where a process ends, and how.

    Attributes
    ----------
    point : str
    stops : bool
        The process stops by SIGSTOP; otherwise it dies by SIGKILL.
    nth : int
        The process ends when it comes to its point for the nth time, from 1.
    batch, attempt : int or None
        The process ends only in this micro-batch, and only under this attempt. Points that know no batch don't count. A
        point that knows no attempt takes any.
    name : str
        The file that says "reached" has this name. Of all processes that share a name the first one ends, the others go
        on. Without a name it is the batch's ``app_id``, so that every stream has its own end; or else the point.
    """

    point: str
    stops: bool = False
    nth: int = 1
    batch: int | None = None
    attempt: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        points = {point for points in BY_ROLE.values() for point in points}
        if self.point not in points or self.nth < 1:
            raise ValueError(f"a process never comes to the point {self.point!r} for the {self.nth}th time: {points}")

    def environment(self, folder: Path) -> dict[str, str]:
        """What tells this fate to a program and its descendants; the files that say "reached" go to the folder."""
        path = os.pathsep.join([str(AT_START), str(ROOT)])
        return {TOLD: json.dumps({"folder": str(folder), **asdict(self)}), "PYTHONPATH": path}


class Batch(NamedTuple):
    """The micro-batch of a point that has no half batch at hand. ``attempt`` is None where it is not known."""

    app_id: str
    batch_id: int
    attempt: int | None = None


Of = HalfBatch | Batch | None

_fate: Fate | None = None
_folder = Path()
_times = 0


# ---------------------------------------------------------------- to be at a point
def reach(point: str, of: Of = None) -> None:
    """The process is at this point, with this batch: it ends here when its fate says so."""
    if _is_here(point, of):
        _end(of)


def _is_here(point: str, of: Of) -> bool:
    global _times
    if _fate is None or point != _fate.point or not _is_of(_fate, of):
        return False
    _times += 1
    return _times == _fate.nth


def _is_of(fate: Fate, of: Of) -> bool:
    if of is None:
        return fate.batch is None and fate.attempt is None
    return fate.batch in (None, of.batch_id) and (of.attempt is None or fate.attempt in (None, of.attempt))


def _end(of: Of = None, last_act: Callable[[], None] = lambda: None) -> None:
    """Say "reached", and end. The file is there at once with all that it says, and is made by one process only."""
    assert _fate is not None
    name = _fate.name or (of.app_id if of is not None else _fate.point)
    _folder.mkdir(exist_ok=True)
    draft = _folder / f".{os.getpid()}"
    draft.write_text(str(os.getpid()))
    try:
        os.link(draft, _folder / name)
    except FileExistsError:
        return
    finally:
        draft.unlink()
    last_act()
    # To this thread: a signal to the process may wait for another thread, and this one would go on past its point.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if _fate.stops else signal.SIGKILL)


# ---------------------------------------------------------------- to be told
def arm(fate: Fate, folder: Path) -> None:
    """Tell this process its fate. The files that say "reached" go to the folder."""
    global _fate, _folder
    _fate, _folder = fate, folder
    failpoints.set_hook(_at)
    sa.event.listen(sa.Engine, "commit", lambda connection: reach("database commits"))


def _at(point: str, header: HalfHeader | None = None, attempt: int | None = None, **known: Any) -> None:
    """The product comes to a failpoint."""
    if point == "half file written" and _is_here("half file torn", None):
        _end(last_act=lambda: _tear(**known))
    name = name_of(point, **known)
    reach(name, None if header is None else Batch(header.app_id, header.batch_id, attempt))


def name_of(point: str, table: str = "", change: Change | None = None, **_: object) -> str:
    """A point of any table, by what the table is, and what the commit is for."""
    if change is None:
        return f"{table} {point}" if table else point
    step = point.removeprefix("commit ")
    if PRUNED in change.transactions:
        return f"pruning {step}"
    if change.remove and not change.add:
        return f"{'expiring' if table == 'messages' else 'leaving'} {step}"
    if change.remove and table == "half":
        return f"stripping {step}"
    return f"{'merge' if change.remove else table} commit {step}"


def _tear(path: str, size_bytes: int) -> None:
    """Only the dead leave such a file: a process that wakes up writes it to its end."""
    if _fate is not None and not _fate.stops:
        os.truncate(path, size_bytes // 2)


def arm_as_told() -> None:
    """Tell this process the fate of its environment, if there is one."""
    told = json.loads(os.environ.get(TOLD, "{}"))
    if told:
        folder = Path(told.pop("folder"))
        arm(Fate(**told), folder)


# ---------------------------------------------------------------- to watch
def is_stopped(pid: int | None) -> bool:
    """Whether the process is there and has stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
