"""Says how far a clock may be wrong: deleting needs more than one reading of one clock.

On a local disk the machine's clock is the store's, too, so a wrong clock cannot be noticed at once. One round of upkeep
by a clock that is days ahead would delete messages that are seconds old. So readings of the clock, called looks, are
noted in ``op``, one every :data:`LOOK_INTERVAL_S` at most. A clock is believed up to :data:`BELIEVED_S` after the
second-newest look::

    noted              the clock says     what happened                     believed up to
    10:00, 10:20       10:40              the next look                     10:40
    10:20, 10:40       Thursday, 11:00    it is eight days ahead            11:30
    10:40, Thursday    Thursday, 11:01    the same round goes on            11:30
    10:40, Thursday    11:02              it is right again                 11:02, and Thursday is forgotten

A clock that is wrong for longer than the interval is believed. Before the first look, the last send counts as a look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc

from rmq_spark._core.storage.table import Change, Table

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

LOOK_INTERVAL_S = 1_200.0
"""Seconds between noted looks."""
BELIEVED_S = 3_000.0
"""Seconds after a look up to which a later clock is believed: more than two intervals, and less than the shortest
retention."""
LOOKED = "txmq.looked"
BELIEVED = "txmq.believed"
"""Names under which ``op`` keeps the last look and the one before it, in seconds since the epoch (Delta's ``txn``)."""


def doubt_s(engine: Engine, note: bool = True) -> float:
    """Return the seconds by which this machine's clock may be ahead. Only what is older by this doubt may be deleted.
    The doubt is 0 while looks follow each other, and after a time without upkeep that time, until the second look. A
    look that is not noted does not help later looks."""
    op = engine.op_table
    with engine.lock:
        op.refresh()
        believed, looked = _after_look(engine, op)
        if note and (believed, looked) != _noted(op):
            _note(engine, op)
    return max(0.0, engine.runtime.time() - believed - BELIEVED_S)


def _noted(op: Table) -> tuple[int | None, int | None]:
    return op.transaction_version(BELIEVED), op.transaction_version(LOOKED)


def _after_look(engine: Engine, op: Table) -> tuple[int, int]:
    """The looks to note now: the believed one, and the last one."""
    now = int(engine.runtime.time())
    believed, looked = _noted(op)
    if believed is None or looked is None:
        return min(now, _newest_s(engine)), now
    if looked > now:  # that clock was ahead, or this one is behind
        return min(believed, now), now
    if now - looked >= LOOK_INTERVAL_S:
        return looked, now
    return believed, looked


def _newest_s(engine: Engine) -> int:
    """The time of the last send or new topic. Upkeep and checks, whose clock is in doubt, make neither."""
    engine.topics_table.refresh()
    made_ms = pc.max(engine.topics_table.actions()["modification_time"]).as_py() or 0
    return int(max(made_ms, engine.half.newest_ms()) // 1000)


def _note(engine: Engine, op: Table) -> None:
    newest: list[tuple[int, int]] = []

    def propose(version: int) -> Change | None:
        newest[:] = [_after_look(engine, op)]
        if newest[0] == _noted(op):  # another process was faster
            return None
        return Change(transactions=dict(zip((BELIEVED, LOOKED), newest[0], strict=True)))

    op.compare_and_set(propose, lambda change: _noted(op) == newest[0])
