"""The verdicts that the states in a fence row stand for, and the states that record verdicts.

What a check answers, by the committed state of a transaction:

===============  ======================================  ===========================================================
state            written by                              a check answers
===============  ======================================  ===========================================================
nothing          nobody                                  UNKNOWN; after ``rollback_after`` it writes a tombstone
``executed``     execute, when work's rows commit        COMMIT
``rolled_back``  execute, when work rolled back          ROLLBACK, refused: it is final, with work's reason
``tombstone``    a check, or execute after that check    ROLLBACK: it never happened, and a replay runs it again
``started``      execute, before work                    nothing (FenceError): work ended the database transaction
``by_part``      execute, before executors run it        what the rows of its parts say
===============  ======================================  ===========================================================
"""

from __future__ import annotations

import pyarrow.compute as pc

from rmq_spark._core.listeners.fence_row import EXECUTED, ROLLED_BACK, STARTED, TOMBSTONE, Recorded, State
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, UNKNOWN, Verdict, VerdictArray, rollback
from rmq_spark.errors import FenceError

COMMIT_VERDICT = Verdict(COMMIT_MESSAGE)
UNKNOWN_VERDICT = Verdict(UNKNOWN)
_TOMBSTONE_VERDICT = rollback("it never happened: a check found no fence row of it, and put a tombstone there")


def _verdict(state: State, batch: HalfBatch) -> Verdict:
    """Return the verdict that a check gives for a state, or raise FenceError when work ended the database transaction
    in its middle."""
    if state.word == STARTED:
        raise FenceError(
            f"work ended the database transaction of half batch {batch.half_id!r}, attempt {batch.attempt}, in its "
            "middle, so a part of what it wrote may be in the database: no check can answer. Look there, undo or "
            "finish that part, and settle the half batch with log.resolve"
        )
    if state.word == TOMBSTONE:
        return _TOMBSTONE_VERDICT
    return COMMIT_VERDICT if state.word == EXECUTED else rollback(state.reason, refused=True)


def recorded_as(verdict: Verdict) -> State:
    return State(EXECUTED) if verdict.state is COMMIT_MESSAGE else State(ROLLED_BACK, verdict.reason)


def verdicts_of(batch: HalfBatch, recorded: Recorded, ended: Verdict | None = None) -> VerdictArray:
    """Return the recorded verdict of each transaction; UNKNOWN where nothing is recorded. ``ended``: the verdict of
    those whose part work ended in its middle, while others can be answered; else that is a FenceError, as are two
    states of one transaction."""
    codes = recorded.among(batch.rows)
    used = pc.unique(codes)
    states = [None if code is None else recorded.states[code] for code in used.to_pylist()]
    others = any(state is None or state.word != STARTED for state in states)
    distinct = []
    for state in states:
        if state is not None and state.word == STARTED and others and ended is not None:
            distinct.append(ended)
        else:
            distinct.append(UNKNOWN_VERDICT if state is None else _verdict(state, batch))
    if len(distinct) == 1:
        return VerdictArray((distinct[0],))
    which = batch.by_transaction(pc.index_in(codes, value_set=used))
    if which.null_count:
        raise FenceError(
            f"the fence row of half batch {batch.half_id!r}, attempt {batch.attempt}, says two things of one "
            "transaction: the database is damaged, or the row was changed by hand"
        )
    return VerdictArray(tuple(distinct), which)
