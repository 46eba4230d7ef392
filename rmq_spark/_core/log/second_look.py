"""What destroys takes more than one clock's word, and more than one look at it.

On a local disk the machine's clock is the store's, too, so nobody can tell at once that it is wrong. One round of
upkeep by a clock that was days ahead would destroy for good what is seconds old. So looks at the clock are noted in
``op``, one every :data:`LOOK_INTERVAL_S` at most. A clock is believed as far as :data:`BELIEVED_S` after the look
before the last one::

    noted              the clock says     what happened                     believed up to
    10:00, 10:20       10:40              the next look                     10:40
    10:20, 10:40       Thursday, 11:00    it is eight days ahead            11:30
    10:40, Thursday    Thursday, 11:01    the same round goes on            11:30
    10:40, Thursday    11:02              it is right again                 11:02, and Thursday is forgotten

A clock that is wrong for longer than the interval is believed. Before the first look of a log there is the time at
which somebody has sent last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc

from rmq_spark._core.storage.table import Change, Table

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

LOOK_INTERVAL_S = 1_200.0
"""Seconds from one noted look to the next."""
BELIEVED_S = 3_000.0
"""Seconds after a look up to which a later clock is believed: more than two intervals, and less than the shortest
retention."""
LOOKED = "txmq.looked"
BELIEVED = "txmq.believed"
"""Names under which ``op`` keeps, in seconds since the epoch, the last look and the one before it (Delta's ``txn``)."""


def doubt_s(log: Engine, note: bool = True) -> float:
    """Return the seconds by which this machine's clock may be ahead: what is destroyed must be so much older.

    Parameters
    ----------
    log : Engine
    note : bool
        Whether this look is noted. One that is not leads to no later one.

    Returns
    -------
    float
        0 while looks follow each other. After a time without upkeep it is that time, until the second look.
    """
    op = log.op
    with log.lock:
        op.refresh()
        believed, looked = _after_look(log, op)
        if note and (believed, looked) != _noted(op):
            _note(log, op)
    return max(0.0, log.machine.time() - believed - BELIEVED_S)


def _noted(op: Table) -> tuple[int | None, int | None]:
    return op.transaction_version(BELIEVED), op.transaction_version(LOOKED)


def _after_look(log: Engine, op: Table) -> tuple[int, int]:
    """What is to be noted now: the look that is believed, and the last one."""
    now = int(log.machine.time())
    believed, looked = _noted(op)
    if believed is None or looked is None:
        return min(now, _newest_s(log)), now
    if looked > now:  # that clock was ahead, or this one is behind
        return min(believed, now), now
    if now - looked >= LOOK_INTERVAL_S:
        return looked, now
    return believed, looked


def _newest_s(log: Engine) -> int:
    """When somebody has sent last, or made a topic: upkeep and checks, whose clock is in doubt, do neither."""
    log.topics_table.refresh()
    made_ms = pc.max(log.topics_table.actions()["modification_time"]).as_py() or 0
    return int(max(made_ms, log.half.newest_ms()) // 1000)


def _note(log: Engine, op: Table) -> None:
    last: list[tuple[int, int]] = []

    def propose(version: int) -> Change | None:
        last[:] = [_after_look(log, op)]
        if last[0] == _noted(op):  # another process was faster
            return None
        return Change(transactions=dict(zip((BELIEVED, LOOKED), last[0], strict=True)))

    op.compare_and_set(propose, lambda change: _noted(op) == last[0])
