"""What all op rows of a log say together, found without an OpReader: every handle must say the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rmq_spark import CommitLog
from tests.support.half_batches import another, rows_of
from tests.support.inside import BatchState, OpRow, RowState


def op_rows_of(log: CommitLog) -> list[dict[str, Any]]:
    return rows_of(another(log).engine.op_table).sort_by("version").to_pylist()


def states_of(log: CommitLog) -> dict[str, BatchState]:
    """The state of each half batch."""
    half = another(log).engine.half
    half.table.refresh()
    states = {half_id: half.get(half_id).fresh_state() for half_id in half.contents.prepared_after(-1)}
    for row in op_rows_of(log):
        if row["half_id"] is not None:
            states[row["half_id"]].fold(OpRow.of(row))
    return states


def _words(state: BatchState) -> object:
    rows = {n: (bytes(f.state), bytes(f.attempt), bytes(f.checks), f.due, f.reopened) for n, f in state.files.items()}
    return rows, state.in_conflict, state.lease_until, [str(row.kind) for row in state.history]


def require_whole(log: CommitLog, who: str, states: Mapping[str, BatchState] | None = None) -> None:
    """A handle says what the whole history says, which is read when it is not given."""
    states = states_of(log) if states is None else states
    log.refresh()
    assert set(log.engine.open_half_ids()) == {h for h, s in states.items() if not s.is_settled}, who
    waiting = {h: s.count(RowState.WAITING) for h, s in states.items() if s.count(RowState.WAITING)}
    assert {h: sum(counts.values()) for h, counts in log.engine.ledger.view.waiting.items()} == waiting, who
    assert set(log.conflicts()) == {h for h, s in states.items() if s.in_conflict}, who
    for half_id, state in states.items():
        assert _words(log.engine.state_of(log.engine.get(half_id))) == _words(state), f"{who}: {half_id}"
