"""Any sequence of steps, looked at by a handle that took them, one that followed, a cold one, and the whole history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, CommitLog
from rmq_spark.errors import VerdictConflictError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import another, merge_op_files, move_half, prepare
from tests.support.inside import BatchState, HalfRecord, OpRow, RowState, Who

BATCHES_MAX = 12
some = st.integers(0, 2**32)


class CommitLogMachine(RuleBasedStateMachine):
    """Batches of single-message transactions; each step is taken by one of two handles."""

    def __init__(self) -> None:
        super().__init__()
        self.log: CommitLog = InMemoryCommitLog(topics={"orders": 2})
        self.follower = another(self.log)
        self.records: list[HalfRecord] = []

    # ------------------------------------------------------------------ steps
    @precondition(lambda self: len(self.records) < BATCHES_MAX)
    @rule(rows=st.integers(1, 5), partitions=st.integers(1, 2), late=st.booleans())
    def prepare(self, rows: int, partitions: int, late: bool) -> None:
        log = self.follower if late else self.log
        self.records.append(prepare(log, len(self.records), rows, per="message", partitions=min(partitions, rows)))

    @precondition(lambda self: self.records)
    @rule(at=some, chosen=some, commit=st.booleans(), who=st.sampled_from(tuple(Who)), late=st.booleans())
    def decide(self, at: int, chosen: int, commit: bool, who: Who, late: bool) -> None:
        log, record, state = self._look(at, late)
        for attempt in state.attempts(RowState.PENDING)[:1]:
            mask = _some_of(state.rows_in((RowState.PENDING,), attempt), chosen)
            log.decide(record, attempt, commit=mask if commit else {}, rollback={} if commit else mask, who=who)

    @precondition(lambda self: self.records)
    @rule(at=some, late=st.booleans())
    def contradict(self, at: int, late: bool) -> None:
        log, record, state = self._look(at, late)
        states = (RowState.ROLLED_BACK_BY_CHECK,)
        for attempt in state.attempts(*states)[:1]:
            with pytest.raises(VerdictConflictError):
                log.decide(record, attempt, commit=state.rows_in(states, attempt), rollback={}, who=Who.EXECUTE)

    @precondition(lambda self: self.records)
    @rule(at=some, chosen=some, quarantine=st.booleans(), late=st.booleans())
    def check_or_quarantine(self, at: int, chosen: int, quarantine: bool, late: bool) -> None:
        log, record, state = self._look(at, late)
        for attempt in state.attempts(RowState.PENDING)[:1]:
            mask = _some_of(state.rows_in((RowState.PENDING,), attempt), chosen)
            if quarantine:
                log.quarantine(record, attempt, mask, Who.DISCARD, "15 checks")
            else:
                log.record_check(record, attempt, mask, None)

    @precondition(lambda self: self.records)
    @rule(at=some, late=st.booleans(), what=st.sampled_from(("resume", "next", "same", "lease", "yes", "no")))
    def reopen_or_resolve(self, at: int, late: bool, what: str) -> None:
        log, record, state = self._look(at, late)
        if what == "resume":
            log.resume(record.half_id)
        elif what == "lease":
            log.lease(record, 60)
        elif what in ("yes", "no"):
            verdict = COMMIT_MESSAGE if what == "yes" else ROLLBACK_MESSAGE
            try:
                log.resolve(record.half_id, verdict, "a person")
            except VerdictConflictError:
                assert not state.count(RowState.PENDING, RowState.QUARANTINED) or state.in_conflict
        else:
            kind = RowState.ROLLED_BACK_BY_CHECK if what == "next" else RowState.ROLLED_BACK_BY_DISCARD
            for attempt in state.attempts(kind)[:1]:
                log.reopen(record, attempt, (kind,), attempt + (what == "next"), Who.EXECUTE, "replay")

    @rule(late=st.booleans())
    def mark(self, late: bool) -> None:
        (self.follower if late else self.log).move_mark()

    @rule()
    def merge_op_files(self) -> None:
        merge_op_files(self.log)

    @precondition(lambda self: self.records)
    @rule()
    def move_half(self) -> None:
        move_half(self.log)

    # ------------------------------------------------------------------ what all must see
    @invariant()
    def every_handle_sees_the_whole_history(self) -> None:
        op = another(self.log).op
        op.refresh()
        rows = op.read(op.actions()["path"].to_pylist()).sort_by("version").to_pylist()
        states = {r.half_id: r.fresh_state() for r in self.records}
        tails: dict[tuple[str, int], int] = {}
        placed = 0
        for row in rows:
            if row["half_id"] is not None:
                states[row["half_id"]].fold(OpRow.of(row))
            if row["queue_offset"] is not None:
                queue = (row["topic"], row["queue_id"])
                assert row["queue_offset"] == tails.get(queue, 0), "a gap, or an offset used twice"
                tails[queue] = row["next_offset"]
                placed += row["count"]
        assert placed == sum(s.count(RowState.COMMITTED) for s in states.values())
        assert len({r["version"] for r in rows}) <= op.version
        for log in (self.log, self.follower, another(self.log)):
            found = log.pending().select(["half_id", "attempt", "messages", "check_times", "lease_until"])
            assert sorted(map(_text, found.to_pylist())) == sorted(map(_text, self._expected(states, RowState.PENDING)))
            found = log.quarantined().select(["half_id", "attempt", "messages", "check_times", "lease_until"])
            expected = self._expected(states, RowState.QUARANTINED)
            assert sorted(map(_text, found.to_pylist())) == sorted(map(_text, expected))
            assert set(log.conflicts()) == {h for h, s in states.items() if s.in_conflict}
            assert log.ledger.tails == tails
            for record in self.records:
                for version in (record, log.get(record.half_id)):
                    state = log.state_of(version)
                    for file_no, file in states[record.half_id].files.items():
                        same = state.files[file_no]
                        assert (same.state, same.attempt) == (file.state, file.attempt)

    def _expected(self, states: dict[str, BatchState], wanted: RowState) -> list[dict[str, Any]]:
        rows = []
        for half_id, state in states.items():
            for attempt in state.attempts(wanted):
                mask = state.rows_in((wanted,), attempt)
                count = sum(m.count(1) for m in mask.values())
                rows.append(
                    {
                        "half_id": half_id,
                        "attempt": attempt,
                        "messages": count,
                        "check_times": state.check_times(mask),
                        "lease_until": state.lease_until,
                    }
                )
        return rows

    def _look(self, at: int, late: bool) -> tuple[CommitLog, HalfRecord, BatchState]:
        log = self.follower if late else self.log
        record = self.records[at % len(self.records)]
        if at % 3 == 0:
            record = log.get(record.half_id)
        return log, record, log.state_of(record)


def _some_of(mask: dict[int, bytes], chosen: int) -> dict[int, bytes]:
    """Some rows of a mask, or all of them."""
    if chosen % 3 == 0:
        return mask
    picked = {n: bytes(b & (chosen >> (i % 31)) & 1 for i, b in enumerate(bits)) for n, bits in mask.items()}
    return {n: bits for n, bits in picked.items() if 1 in bits}


def _text(row: dict[str, Any]) -> str:
    return repr(sorted((k, str(v)) for k, v in row.items()))


CommitLogMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 5, stateful_step_count=15, suppress_health_check=list(HealthCheck)
)
TestCommitLogMachine = CommitLogMachine.TestCase
