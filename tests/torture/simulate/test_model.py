"""The protocol's model: every state of a small bound, and the real commit log held to it step by step."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rmq_spark import COMMIT_MESSAGE, UNKNOWN, CommitLog, HalfBatch
from rmq_spark._core.listeners import sql
from rmq_spark.errors import AlreadyPreparedError, FencedError, StaleAttemptError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import another, bodies, check_offsets, decide_one, merge_op_files, move_half, prepare
from tests.support.inside import HalfRecord, RolledBack, RowSet, RowState, Runtime, Who
from tests.support.seeds import how_many
from tests.torture.simulate import model, parts_model
from tests.torture.simulate.model import Rules, State, Step, beginning, search, steps

DAY = timedelta(days=1)
ROWS = 2
REAL = {
    model.PENDING: RowState.PENDING,
    model.COMMITTED: RowState.COMMITTED,
    model.ROLLED_BACK: RowState.ROLLED_BACK,
    model.BY_CHECK: RowState.ROLLED_BACK_BY_CHECK,
}


def test_nothing_is_wrong_in_any_state_of_two_producers_two_checkers_two_consumers_and_one_crash() -> None:
    found = search(model.SMALL)
    assert found.wrong is None, found.trace
    assert (found.finished, found.states, found.steps) == (True, 16_658, 75_202)
    assert found.ends > 0


@pytest.mark.long
def test_nothing_is_wrong_in_any_state_of_three_producers_two_checkers_two_consumers_and_two_crashes() -> None:
    found = search(beginning())
    assert found.wrong is None, found.trace
    assert (found.finished, found.states, found.steps) == (True, 173_749, 1_189_773)
    assert found.ends > 0


@pytest.mark.parametrize(("producers", "crashes"), [((0, 0), 1), ((0, 1), 0)])
def test_a_search_visits_what_one_step_after_the_other_visits(producers: tuple[int, ...], crashes: int) -> None:
    start = beginning(producers, checkers=1, consumers=1, crashes=crashes)
    seen, left = {canonical(start)}, [start]
    taken = 0
    while left:
        for _, after in steps(left.pop(), Rules()):
            taken += 1
            if canonical(after) not in seen:
                seen.add(canonical(after))
                left.append(canonical(after))
    found = search(start)
    assert (found.states, found.steps) == (len(seen), taken)


def canonical(state: State) -> State:
    """The processes of a kind in one order: they are all alike."""
    producers = tuple(sorted(state.producers, key=lambda p: (p.batch, p)))
    return state._replace(
        producers=producers, checkers=tuple(sorted(state.checkers)), consumers=tuple(sorted(state.consumers))
    )


@pytest.mark.parametrize("name", [rule.name for rule in fields(Rules)])
def test_the_search_finds_what_is_wrong_without_a_rule(name: str) -> None:
    found = search(model.SMALL, Rules(**{name: False}))
    assert found.wrong is not None
    assert found.trace


# ---------------------------------------------------------------- parts
def test_nothing_is_wrong_in_any_state_of_a_driver_whose_tasks_run_the_parts_and_a_checker() -> None:
    found = parts_model.search(parts_model.SMALL)
    assert found.wrong is None, found.trace
    assert (found.states, found.steps) == (19_101, 67_767)
    assert found.ends > 0


@pytest.mark.long
def test_nothing_is_wrong_in_any_state_of_two_drivers_whose_tasks_run_the_parts_and_a_checker() -> None:
    found = parts_model.search(parts_model.State())
    assert found.wrong is None, found.trace
    assert (found.states, found.steps) == (251_823, 1_231_752)
    assert found.ends > 0


@pytest.mark.parametrize("name", [rule.name for rule in fields(parts_model.Rules)])
def test_the_search_finds_what_is_wrong_without_a_rule_of_parts(name: str) -> None:
    found = parts_model.search(parts_model.SMALL, parts_model.Rules(**{name: False}))
    assert found.wrong is not None
    assert found.trace


# ---------------------------------------------------------------- the real log beside the model
class _Clock(Runtime):
    """The clocks of all machines; they step together."""

    def __init__(self) -> None:
        self.offset = timedelta()

    def time(self) -> float:
        return super().time() + self.offset.total_seconds()


class ProtocolMachine(RuleBasedStateMachine):
    """Each step of the model is taken by the real log and the real SQL listener too, and both must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = _Clock()
        self.state = beginning((0, 0, 1), crashes=4)
        log = InMemoryCommitLog(topics={"orders": 1}, runtime=self.clock)
        self.log: CommitLog = log
        processes = [("producer", 0), ("producer", 1), ("producer", 2), ("checker", 0), ("checker", 1)]
        self.handles = {process: another(log) for process in processes}
        self.records: dict[int, HalfRecord] = {}
        self.refuse = False
        engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
        self.listener = sql.SqlTransactionListener(engine, self._work, rollback_after=0.0)
        self.listener.runtime = self.clock
        self.listener.create_fence()

    def _work(self, connection: sa.Connection, batch: HalfBatch) -> Any:
        return "ROLLBACK_MESSAGE" if self.refuse else "COMMIT_MESSAGE"

    # ------------------------------------------------------------------ steps of the model
    @precondition(lambda self: any(steps(self.state, Rules())))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        following = list(steps(self.state, Rules()))
        step, after = following[data.draw(st.integers(0, len(following) - 1), label="which")]
        data.draw(st.just(str(step)), label="step")
        if self._take(step):
            self.state = after

    def _take(self, step: Step) -> bool:
        """Do it for real; False when the listener would not say anything because a clock stepped back."""
        if step.role == "consumer":
            offset = self.state.consumers[step.who]
            read = self.log.read("orders", {0: offset * ROWS}, limit=ROWS, columns=["body"])["body"].to_pylist()
            assert read == [body.encode() for body in self._bodies(self.state.queue[offset])]
            return True
        key = (step.role, step.who)
        if step.what == "crash":
            self.handles[key] = another(self.log)
            return True
        log = self.handles[key]
        worker = (self.state.producers if step.role == "producer" else self.state.checkers)[step.who]
        if step.role == "checker" and step.what == model.START:
            opened = log.engine.open_half_ids()
            pending = {n for n, b in enumerate(self.state.batches) if b.state == model.PENDING}
            assert set(opened) == {self.records[n].half_id for n in pending}
            # Oldest first.
            times = [log.engine.get(half_id).prepared_ms for half_id in opened]
            assert times == sorted(times)
            return True
        if step.what == model.START:
            self._prepare(log, worker.batch)
            return True
        record, attempt = log.engine.get(self.records[worker.batch].half_id), worker.attempt
        if step.what in (model.RUN, model.ASK):
            return self._ask_listener(log, record, worker, step)
        if step.what == model.REOPEN:
            by_check = (RowState.ROLLED_BACK_BY_CHECK,)
            reopened = log.engine.ledger.reopen(
                record, attempt, by_check, attempt + 1, Who.EXECUTE, "rolled back by a check"
            )
            batch = self.state.batches[worker.batch]
            assert bool(reopened) == (batch.state == model.BY_CHECK and batch.attempt == attempt)
            return True
        self._decide(log, record, worker, Who.EXECUTE if step.what == model.DECIDE else Who.CHECK)
        return True

    def _prepare(self, log: CommitLog, number: int) -> None:
        try:
            columns = {"body": self._bodies(number)}
            record = prepare(log, 0, columns, app=f"app{number}", fence_id=self.listener.store_id)
        except AlreadyPreparedError:
            assert self.state.batches[number].state != model.NONE
            return
        assert self.state.batches[number].state == model.NONE
        self.records[number] = record

    def _ask_listener(self, log: CommitLog, record: HalfRecord, worker: model.Worker, step: Step) -> bool:
        batch = log.engine.half_batch(record, log.engine.state_of(record), worker.attempt, self._all(record))
        fence = self.state.batches[worker.batch].fence[worker.attempt - 1]
        if step.what == model.RUN:
            self.refuse = step.choice == model.REFUSED
            try:
                said = self.listener.execute_local_transaction(batch)
            except FencedError:
                assert fence == model.TOMBSTONE
                return True
        else:
            said = self.listener.check_local_transaction(batch)
        [verdict] = said.each(1)
        if verdict.state is UNKNOWN:
            assert fence is None
            assert self.clock.now() < batch.prepared_at
            return False
        found = step.choice or model.TOMBSTONE if fence is None else fence
        assert (verdict.state is COMMIT_MESSAGE) == (found == model.EXECUTED)
        assert step.what == model.RUN or verdict.refused == (found == model.REFUSED)
        return True

    def _decide(self, log: CommitLog, record: HalfRecord, worker: model.Worker, who: Who) -> None:
        rows = self._all(record)
        commit = worker.verdict == model.COMMIT
        refused = [RolledBack("no", worker.verdict == model.REFUSE, dict(rows.ranges()))]
        try:
            if commit:
                decide_one(log.engine, record, worker.attempt, commit=rows, who=who)
            else:
                decide_one(log.engine, record, worker.attempt, rollback=rows, who=who, rolled_back=refused)
        except StaleAttemptError:
            assert self.state.batches[worker.batch].attempt != worker.attempt

    # ------------------------------------------------------------------ what nobody may notice
    @rule(days=st.sampled_from((-1, 1)))
    def step_the_clocks(self, days: int) -> None:
        self.clock.offset += days * DAY

    @rule()
    def move_mark(self) -> None:
        another(self.log).engine.ledger.mark()

    @rule()
    def merge_op_files(self) -> None:
        merge_op_files(self.log)

    @precondition(lambda self: self.records)
    @rule()
    def move_half(self) -> None:
        move_half(self.log)

    # ------------------------------------------------------------------ both must agree
    @invariant()
    def the_log_is_as_the_model_says(self) -> None:
        seen = another(self.log)
        for number, record in self.records.items():
            batch, state = self.state.batches[number], seen.engine.state_of(record)
            assert state.rows_in((REAL[batch.state],), batch.attempt) == self._all(record)
        assert bodies(seen) == [body for number in self.state.queue for body in self._bodies(number)]
        check_offsets(seen)

    @staticmethod
    def _all(record: HalfRecord) -> RowSet:
        return RowSet({n: b"\x01" * f.rows for n, f in record.files.items()})

    @staticmethod
    def _bodies(number: int) -> list[str]:
        return [f"{number}.{n}" for n in range(ROWS)]


ProtocolMachine.TestCase.settings = settings(
    max_examples=how_many(quick=5, in_all=100),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestProtocolMachine = ProtocolMachine.TestCase
