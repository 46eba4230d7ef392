"""Any sequence of steps, looked at by a handle that took them, one that followed, a cold one, and the whole history."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, CommitLog
from rmq_spark.errors import VerdictConflictError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import Ticking
from tests.support.half_batches import another, count_check, decide_one, merge_op_files, move_half, prepare
from tests.support.inside import BatchState, HalfRecord, RowSet, RowState, Who
from tests.support.limits import set_limits
from tests.support.seeds import how_many
from tests.support.whole_history import op_rows_of, require_whole, states_of

BATCHES_MAX = 12
some = st.integers(0, 2**32)


class CommitLogMachine(RuleBasedStateMachine):
    """Half batches of a plain topic, with delays, and of a FIFO topic; each step is taken by one of two handles."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Ticking(time.time(), step_s=0.002)
        self.log: CommitLog = InMemoryCommitLog(topics={"orders": 2}, runtime=self.clock)
        self.log.create_topic("steps", 1, fifo=True)
        self.log.engine.compaction.is_on = False
        self.follower = another(self.log)
        self.records: list[HalfRecord] = []

    # ------------------------------------------------------------------ steps
    @precondition(lambda self: len(self.records) < BATCHES_MAX)
    @rule(
        rows=st.integers(1, 5),
        partitions=st.integers(1, 2),
        topic=st.sampled_from(("orders", "orders", "steps")),
        delays=st.lists(st.sampled_from((0, 0, 60, 3600)), min_size=5, max_size=5),
        keys=st.text("ab", min_size=5, max_size=5),
        late=st.booleans(),
    )
    def prepare(self, rows: int, partitions: int, topic: str, delays: list[int], keys: str, late: bool) -> None:
        columns: dict[str, Any] = {"body": [f"{len(self.records)}.{i}" for i in range(rows)]}
        if topic == "steps":
            columns["sharding_key"] = list(keys[:rows])
        else:
            now = self.clock.now()
            dues = [now + timedelta(seconds=delay) if delay else None for delay in delays[:rows]]
            columns["deliver_at"] = pa.array(dues, pa.timestamp("us", "UTC"))
        log, partitions = self.follower if late else self.log, min(partitions, rows)
        record = prepare(log, len(self.records), columns, per="message", topic=topic, partitions=partitions)
        self.records.append(record)

    @precondition(lambda self: self.records)
    @rule(at=some, chosen=some, commit=st.booleans(), who=st.sampled_from(tuple(Who)), late=st.booleans())
    def decide(self, at: int, chosen: int, commit: bool, who: Who, late: bool) -> None:
        log, record, state = self._look(at, late)
        for attempt in state.attempts(RowState.PENDING)[:1]:
            rows = _some_of(state.rows_in((RowState.PENDING,), attempt), chosen)
            verdict = {"commit" if commit else "rollback": rows}
            decide_one(log.engine, record, attempt, **verdict, who=who)

    @precondition(lambda self: self.records)
    @rule(at=some, late=st.booleans())
    def contradict(self, at: int, late: bool) -> None:
        log, record, state = self._look(at, late)
        states = (RowState.ROLLED_BACK_BY_CHECK,)
        for attempt in state.attempts(*states)[:1]:
            with pytest.raises(VerdictConflictError):
                decide_one(log.engine, record, attempt, commit=state.rows_in(states, attempt))

    @precondition(lambda self: self.records)
    @rule(at=some, chosen=some, quarantine=st.booleans(), late=st.booleans())
    def check_or_quarantine(self, at: int, chosen: int, quarantine: bool, late: bool) -> None:
        log, record, state = self._look(at, late)
        for attempt in state.attempts(RowState.PENDING)[:1]:
            rows = _some_of(state.rows_in((RowState.PENDING,), attempt), chosen)
            if quarantine:
                log.engine.ledger.quarantine(record, attempt, rows, Who.DISCARD, "15 checks")
            else:
                count_check(log.engine, record, attempt, rows, None)

    @precondition(lambda self: self.records)
    @rule(at=some, late=st.booleans(), what=st.sampled_from(("resume", "next", "same", "lease", "yes", "no")))
    def reopen_or_resolve(self, at: int, late: bool, what: str) -> None:
        log, record, state = self._look(at, late)
        if what == "resume":
            log.resume(record.half_id)
        elif what == "lease":
            log.engine.ledger.lease([record], 60)
        elif what in ("yes", "no"):
            verdict = COMMIT_MESSAGE if what == "yes" else ROLLBACK_MESSAGE
            try:
                log.resolve(record.half_id, verdict, "a person")
            except VerdictConflictError:
                assert not state.count(RowState.PENDING, RowState.QUARANTINED) or state.in_conflict
        else:
            kind = RowState.ROLLED_BACK_BY_CHECK if what == "next" else RowState.ROLLED_BACK_BY_DISCARD
            for attempt in state.attempts(kind)[:1]:
                log.engine.ledger.reopen(record, attempt, (kind,), attempt + (what == "next"), Who.EXECUTE, "replay")

    @rule(seconds=st.sampled_from((30, 3600)), late=st.booleans())
    def time_goes_by(self, seconds: int, late: bool) -> None:
        self.clock.at_s += seconds
        (self.follower if late else self.log).engine.ledger.place_due()

    @rule(late=st.booleans())
    def mark(self, late: bool) -> None:
        (self.follower if late else self.log).engine.ledger.mark()

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
        states = states_of(self.log)
        tails: dict[tuple[str, int], int] = {}
        placed = 0
        for row in op_rows_of(self.log):
            if row["queue_offset"] is not None:
                queue = (row["topic"], row["queue_id"])
                assert row["queue_offset"] == tails.get(queue, 0), "a gap, or an offset used twice"
                tails[queue] = row["next_offset"]
                placed += row["count"]
        assert placed == sum(s.count(RowState.COMMITTED) for s in states.values())
        for who, log in {"who did it": self.log, "follower": self.follower, "cold": another(self.log)}.items():
            require_whole(log, who, states)
            assert log.engine.ledger.view.tails == tails
            for found, wanted in ((log.pending(), RowState.PENDING), (log.quarantined(), RowState.QUARANTINED)):
                rows = found.select(["half_id", "attempt", "messages", "check_times", "lease_until"]).to_pylist()
                assert sorted(map(_text, rows)) == sorted(map(_text, _listed(states, wanted)))

    def _look(self, at: int, late: bool) -> tuple[CommitLog, HalfRecord, BatchState]:
        log = self.follower if late else self.log
        record = self.records[at % len(self.records)]
        if at % 3 == 0:
            record = log.engine.get(record.half_id)
        return log, record, log.engine.state_of(record)


class FewAreNamed(CommitLogMachine):
    """A mark that cannot name all that is open stops before it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        set_limits(self.patch, NAMED_MAX=3)

    def teardown(self) -> None:
        self.patch.undo()


def _listed(states: Mapping[str, BatchState], wanted: RowState) -> list[dict[str, Any]]:
    """What a list of half batches has to say: each attempt of which messages are in this state."""
    return [
        {
            "half_id": half_id,
            "attempt": attempt,
            "messages": RowSet(rows).count,
            "check_times": state.check_times(rows),
            "lease_until": state.lease_until,
        }
        for half_id, state in states.items()
        for attempt in state.attempts(wanted)
        if (rows := state.rows_in((wanted,), attempt))
    ]


def _some_of(rows: Mapping[int, bytes], chosen: int) -> Mapping[int, bytes]:
    """Some of these rows, or all of them."""
    if chosen % 3 == 0:
        return rows
    picked = {n: bytes(b & (chosen >> (i % 31)) & 1 for i, b in enumerate(bits)) for n, bits in rows.items()}
    return {n: bits for n, bits in picked.items() if 1 in bits}


def _text(row: dict[str, Any]) -> str:
    return repr(sorted((k, str(v)) for k, v in row.items()))


TestCommitLogMachine, TestFewAreNamed = CommitLogMachine.TestCase, FewAreNamed.TestCase
for case, quick in ((CommitLogMachine, 4), (FewAreNamed, 2)):
    case.TestCase.settings = settings(
        max_examples=how_many(quick, in_all=25 * quick), stateful_step_count=20, suppress_health_check=list(HealthCheck)
    )
