"""Named places of the protocol at which a process dies or stops, when it was told to.

Nothing in rmq_spark knows about them: :func:`arm` wraps its functions in this process. A process that dies here dies by
SIGKILL, with no ``finally`` and no flush, as with a power switch for the process alone.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rmq_spark.commitlog import half as half_module
from rmq_spark.commitlog.ledger import Ledger
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import Who
from rmq_spark.commitlog.table import DeltaLogTable
from rmq_spark.listeners.sql import EXECUTED, SqlTransactionListener, _Fence
from rmq_spark.sink.two_phase import TwoPhase

PRODUCER = (
    "half file torn",
    "half file written",
    "staged",
    "half commit begins",
    "half commit done",
    "prepared",
    "fence rows written",
    "working",
    "database commits",
    "executed",
    "op file written",
    "op commit begins",
    "op commit done",
    "decided",
    "lease written",
    "reopened",
    "replay asks",
)
CHECKER = (
    "open batches listed",
    "asked",
    "tombstones written",
    "tombstones commit",
    "answered",
    "op file written",
    "op commit begins",
    "op commit done",
    "check counted",
    "quarantined",
    "mark moved",
)
UPKEEP = ("merge commit begins", "merge commit done", "mark moved", "half rewritten", "checkpoint made", "vacuumed")
READER = ("planned", "reading", "read", "offsets written", "offsets stored")
BY_ROLE = {"producer": PRODUCER, "checker": CHECKER, "upkeep": UPKEEP, "reader": READER}


@dataclass(frozen=True)
class Arm:
    """What to do, and where.

    Attributes
    ----------
    point : str
    nth : int
        The how-manieth time it is reached, from 1.
    stop : bool
        SIGSTOP instead of SIGKILL: a zombie, which whoever watches wakes or kills.
    folder : str
        Takes a file named after the process, which says that it was here.
    """

    point: str
    nth: int
    stop: bool
    folder: str


_armed: Arm | None = None
_times = 0


def reach(point: str) -> None:
    """Die or stop here, when this is the place."""
    if _is_here(point):
        _end()


def _is_here(point: str) -> bool:
    global _times
    if _armed is None or point != _armed.point:
        return False
    _times += 1
    return _times == _armed.nth


def _end() -> None:
    assert _armed is not None
    Path(_armed.folder, str(os.getpid())).write_text(_armed.point)
    os.kill(os.getpid(), signal.SIGSTOP if _armed.stop else signal.SIGKILL)


def arm(what: Arm) -> None:
    """Wrap the functions of this process."""
    global _armed
    _armed = what
    _wrap_half_files()
    _around(CommitLog, "prepare", "staged", "prepared")
    _around(CommitLog, "open_half_ids", after="open batches listed")
    _around(DeltaLogTable, "write", after=lambda table, *_, **__: f"{table.name} file written")
    _around(
        DeltaLogTable,
        "try_commit",
        lambda table, change: f"{'merge' if change.remove else table.name} commit begins",
        lambda table, change: f"{'merge' if change.remove else table.name} commit done",
    )
    _around(
        _Fence,
        "claim",
        after=lambda fence, connection, ids, state, batch: (
            "fence rows written" if state == EXECUTED else "tombstones written"
        ),
    )
    _around(SqlTransactionListener, "_bury", after="tombstones commit")
    _around(SqlTransactionListener, "check_local_transaction", "asked", "answered")
    _around(TwoPhase, "decide", _if_executed("executed"), _if_executed("decided"))
    _around(TwoPhase, "_check", "replay asks")
    _around(Ledger, "lease", after="lease written")
    _around(Ledger, "reopen", after="reopened")
    _around(Ledger, "record_check", after="check counted")
    _around(Ledger, "quarantine", after="quarantined")
    _around(Ledger, "mark", after="mark moved")
    sa.event.listen(sa.Engine, "commit", lambda connection: reach("database commits"))


def _if_executed(point: str) -> Callable[..., str]:
    return lambda two_phase, run, batch, mask, verdicts, who: point if who is Who.EXECUTE else ""


def _wrap_half_files() -> None:
    write = half_module.write_table

    def dying_write(fs: Any, folder: str, *arguments: Any, **options: Any) -> Any:
        file = write(fs, folder, *arguments, **options)
        if _is_here("half file torn"):  # only the dead leave such a file: who wakes up has written it to its end
            if _armed is not None and not _armed.stop:
                os.truncate(f"{folder}/{file.path}", file.size_bytes // 2)
            _end()
        reach("half file written")
        return file

    half_module.write_table = dying_write


Point = str | Callable[..., str]


def _around(owner: Any, name: str, before: Point = "", after: Point = "") -> None:
    """A point before and after a method; a function gets its arguments and says which point it is."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        reach(before if isinstance(before, str) else before(*arguments, **options))
        result = inner(*arguments, **options)
        reach(after if isinstance(after, str) else after(*arguments, **options))
        return result

    setattr(owner, name, wrapped)
