"""Listeners that are asked about many half batches with one question: each half batch is treated as if alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    CheckService,
    CommitLog,
    HalfBatch,
    Rollback,
    SqlTransactionListener,
    TransactionListener,
    create_fence,
)
from rmq_spark._core.protocol.engine import SMALL_ROWS_MAX
from rmq_spark.errors import FenceError
from tests.support.checks import DEADLINE_S, Hangs, check_times, service, states
from tests.support.half_batches import another, decide_one, merge_op_files, pending, prepare, share_half_file, too_late
from tests.support.inside import STARTED, CommitOncePrepared, HalfRecord, RowState, State

# What depends on how a log keeps op rows and half files runs on Delta in every run, the rest in the long ones.
pytestmark = pytest.mark.log("memory", pytest.param("delta", marks=pytest.mark.long))
ON_BOTH = pytest.mark.log("memory", "delta")

MANY = 12


@dataclass
class Many(TransactionListener):
    """Answers by half id; an exception is raised when it is asked alone. It remembers how it was asked."""

    answers: dict[str, Any] = field(default_factory=dict)
    together: list[list[HalfBatch]] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    at_once: Any = None
    store_id: str | None = None

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        raise AssertionError("a check executes nothing")

    def _answer(self, batch: HalfBatch) -> Any:
        found = self.answers.get(batch.half_id, COMMIT_MESSAGE)
        return found(batch) if callable(found) else found

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        self.alone.append(batch.half_id)
        if isinstance(found := self._answer(batch), Exception):
            raise found
        return found

    def check_local_transactions(self, batches: Sequence[HalfBatch]) -> Any:
        self.together.append(list(batches))
        if isinstance(self.at_once, Exception):
            raise self.at_once
        return self.at_once or [self._answer(batch) for batch in batches]


def sends(log: CommitLog, count: int = MANY, **more: Any) -> list[HalfRecord]:
    return [prepare(log, 0, 2, app=f"app{n}", **more) for n in range(count)]


@ON_BOTH
def test_one_question_and_one_commit_settle_all_and_each_has_its_own_verdict(log: CommitLog) -> None:
    records = sends(log)
    refused, never, unknown = (r.half_id for r in records[:3])
    listener = Many({refused: Rollback("no money", refused=True), never: ROLLBACK_MESSAGE, unknown: None})
    log.refresh()
    version = log.version
    report = service(log, listener).run_once()
    assert ([len(batches) for batches in listener.together], listener.alone) == ([MANY], [])
    assert log.refresh() <= version + 3  # the decisions, the counted check, the mark
    assert report.ok
    assert (report.checked.transactions, report.checked.messages) == (MANY, 2 * MANY)
    assert (report.committed.transactions, report.rolled_back.transactions, report.unknown.transactions) == (9, 2, 1)
    assert [states(log, r) for r in records[:3]] == [
        {RowState.ROLLED_BACK: 2}, {RowState.ROLLED_BACK_BY_CHECK: 2}, {RowState.PENDING: 2},
    ]  # fmt: skip
    assert all(states(log, r) == {RowState.COMMITTED: 2} for r in records[3:])
    assert [check_times(log, r) for r in records[2:4]] == [1, 0]


@pytest.mark.parametrize("answer", [RuntimeError("the bank is closed"), "MAYBE", [COMMIT_MESSAGE] * 2, 42])
def test_one_without_an_answer_is_asked_alone_and_reported_and_stops_no_other(log: CommitLog, answer: Any) -> None:
    records = sends(log)
    bad = records[4]
    listener = Many({bad.half_id: answer})
    report = service(log, listener).run_once()
    assert listener.alone == [bad.half_id]
    assert [half_id for half_id, _ in report.problems] == [bad.half_id]
    assert (states(log, bad), check_times(log, bad)) == ({RowState.PENDING: 2}, 0)
    assert all(states(log, r) == {RowState.COMMITTED: 2} for r in records if r is not bad)
    assert report.committed.transactions == MANY - 1


@pytest.mark.parametrize("together", [OSError("too many at once"), [ROLLBACK_MESSAGE]])
def test_a_question_that_fails_or_has_too_few_answers_is_asked_one_by_one(log: CommitLog, together: Any) -> None:
    records = sends(log)
    bad = records[0].half_id
    listener = Many({bad: FenceError("not mine")}, at_once=together)
    report = service(log, listener).run_once()
    assert (len(listener.together), listener.alone) == (1, [r.half_id for r in records])
    assert [half_id for half_id, _ in report.problems] == [bad]
    assert report.committed.transactions == report.checked.transactions == MANY - 1


@ON_BOTH
def test_those_that_are_leased_in_conflict_or_settled_are_left_alone(log: CommitLog) -> None:
    leased, settled, conflict, due = sends(log, 4)
    log.engine.ledger.lease([leased], 30.0)
    decide_one(log.engine, settled, 1, commit=pending(log, settled))
    halves = {0: b"\x01\x00"}
    decide_one(log.engine, conflict, 1, commit=halves)
    too_late(log, conflict, rollback=halves)
    listener = Many()
    report = CheckService(log, {"group": listener}, transaction_timeout=0.0).run_once()
    assert [[batch.half_id for batch in batches] for batches in listener.together] == [[due.half_id]]
    assert report.skipped["leased"] == 1
    assert [half_id for half_id, _ in report.problems] == [conflict.half_id]
    assert listener.alone == []


@ON_BOTH
def test_answers_of_unknown_add_up_whatever_the_mark_has_passed_and_end_in_quarantine(log: CommitLog) -> None:
    records = sends(log, 4)
    listener = Many(dict.fromkeys([r.half_id for r in records], UNKNOWN))
    for times in range(1, 4):
        assert service(another(log), listener, transaction_check_max=3).run_once().unknown.transactions == 4
        assert [check_times(log, r) for r in records] == [times] * 4
        if times == 2:
            merge_op_files(log)
    assert listener.together[-1][0].check_times == 2
    report = service(log, listener, transaction_check_max=3).run_once()
    assert (len(listener.together), report.quarantined.transactions) == (3, 4)
    assert [states(log, r) for r in records] == [{RowState.QUARANTINED: 2}] * 4


@ON_BOTH
def test_the_listener_sees_those_keys_alone_that_are_due(log: CommitLog) -> None:
    columns = {"body": list("1234"), "owner": ["a", "b", "a", "c"]}
    record = prepare(log, 0, columns, per="key", key="owner")
    whole = prepare(log, 0, 4, per="message", app="other", partitions=2)
    decide_one(log.engine, record, 1, commit={0: b"\x01\x00\x01\x00"})
    listener = Many()
    listener.answers[record.half_id] = lambda batch: batch.verdicts(commit=["b"], rollback=["c"])
    assert service(another(log), listener).run_once().ok
    by_id = {batch.half_id: batch for batch in listener.together[0]}
    mine = by_id[record.half_id]
    assert sorted(mine.transactions["transaction_key"].to_pylist()) == ["b", "c"]
    keys, bodies = mine.messages(["transaction_key"])["transaction_key"], mine.messages(["body", "msg_id"])["body"]
    assert dict(zip(keys.to_pylist(), bodies.to_pylist(), strict=True)) == {"b": b"2", "c": b"4"}
    assert by_id[whole.half_id].transactions.num_rows == 4
    assert states(log, record) == {RowState.COMMITTED: 3, RowState.ROLLED_BACK_BY_CHECK: 1}
    assert states(log, whole) == {RowState.COMMITTED: 4}


@pytest.mark.log("delta")
def test_half_batches_in_a_shared_file_and_large_ones_are_asked_about(log: CommitLog) -> None:
    large = [prepare(log, 0, SMALL_ROWS_MAX + 1, app="large", partitions=3)]
    records = [*sends(log, 3), *large]
    share_half_file(log)
    large.append(prepare(log, 0, SMALL_ROWS_MAX + 1, app="larger", partitions=2))
    records += [prepare(log, 0, 2, app="last"), large[-1]]
    listener = Many()
    assert service(log, listener).run_once().committed.transactions == len(records)
    assert sorted(listener.alone) == sorted(r.half_id for r in large)
    assert all(states(log, r) == {RowState.COMMITTED: r.rows} for r in records)


@pytest.mark.log("delta")
def test_a_damaged_half_batch_hides_no_other(log: CommitLog) -> None:
    records = sends(log, 4)
    Path(log.path, "half", records[1].files[0].path).write_bytes(b"damaged")
    listener = Many()
    report = service(another(log), listener).run_once()
    assert [half_id for half_id, _ in report.problems] == [records[1].half_id]
    assert report.committed.transactions == 3


def test_a_hung_question_ends_the_round_and_its_answers_are_used_later(log: CommitLog) -> None:
    records = sends(log, 3)
    answer = Hangs()
    listener = Many({records[0].half_id: answer})
    checker = service(log, listener, round_timeout=0.2)
    report = checker.run_once()
    assert [half_id for half_id, _ in report.problems] == [r.half_id for r in records]
    assert "has not answered" in report.problems[0][1]
    new = prepare(log, 0, 2, app="new")
    checker._checker.rules = replace(checker._checker.rules, round_timeout=DEADLINE_S)
    assert checker.run_once().committed.transactions == 1  # the new one
    answer.let_come()
    assert checker.run_once().committed.transactions == 3
    asked = [[batch.half_id for batch in batches] for batches in listener.together]
    assert asked == [[r.half_id for r in records], [new.half_id]]
    assert listener.alone == []


def test_a_half_batch_of_another_store_is_not_asked_about_together(log: CommitLog) -> None:
    here, there = prepare(log, 0, 2, app="a", fence_id="bank"), prepare(log, 0, 2, app="b", fence_id="shop")
    listener = Many(store_id="bank")
    report = service(log, listener).run_once()
    assert [[b.half_id for b in batches] for batches in listener.together] == [[here.half_id]]
    assert [half_id for half_id, _ in report.problems] == [there.half_id]
    assert "was prepared with store_id 'shop'" in report.problems[0][1]
    assert listener.alone == []


def test_who_overrides_how_one_is_answered_is_asked_one_by_one(log: CommitLog, tmp_path: Path) -> None:
    """The fence could answer for all of them at once, and would roll them back."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"

    class Quiet(SqlTransactionListener):
        def check_local_transaction(self, batch: HalfBatch) -> Any:
            return UNKNOWN

    changed = SqlTransactionListener(url, rollback_after=0.0)
    changed.check_local_transaction = lambda batch: UNKNOWN  # type: ignore[method-assign]
    sends(log, 3, fence_id=create_fence(url))
    for listener in (Quiet(url, rollback_after=0.0), changed):
        assert service(log, listener).run_once().unknown.transactions == 3
    assert service(log, SqlTransactionListener(url, rollback_after=0.0)).run_once().rolled_back.transactions == 3
    assert list(CommitOncePrepared().check_local_transactions([])) == []


# ---------------------------------------------------------------- a fence
@ON_BOTH
def test_a_fence_answers_for_all_in_two_database_transactions(tmp_path: Path, log: CommitLog) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    fence_id = create_fence(engine)

    def work(connection: sa.Connection, batch: HalfBatch) -> Any:
        if batch.app_id == "app1":
            raise Rollback("sold out")

    listener = SqlTransactionListener(engine, work, rollback_after=0.0)
    records = sends(log, fence_id=fence_id)
    for r in records[:2]:
        listener.execute_local_transaction(log.engine.half_batch(r, r.fresh_state(), 1, r.all_rows))
    young = prepare(log, 0, 2, app="young", fence_id=fence_id)
    _ = listener.store_id  # looked up once
    begun: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def note(_: Any, __: Any, statement: str, *others: Any) -> None:
        begun.extend([statement] if statement.startswith("BEGIN") else [])

    report = service(log, listener).run_once()
    assert begun == ["BEGIN", "BEGIN IMMEDIATE", "BEGIN"], "the rows, all tombstones, and the look at a round's end"
    assert report.ok
    assert states(log, records[0]) == {RowState.COMMITTED: 2}
    assert states(log, records[1]) == {RowState.ROLLED_BACK: 2}
    assert log.engine.state_of(records[1]).history[-1].reason == "sold out"
    assert all(states(log, r) == {RowState.ROLLED_BACK_BY_CHECK: 2} for r in [*records[2:], young])
    with pytest.raises(txmq.FencedError):
        listener.execute_local_transaction(log.engine.half_batch(young, young.fresh_state(), 1, young.all_rows))


def test_a_fence_says_unknown_of_the_young_and_nothing_of_one_whose_work_ended_its_transaction(
    tmp_path: Path, log: CommitLog
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    fence_id = create_fence(url)
    listener = SqlTransactionListener(url, lambda connection, batch: None, rollback_after=3600.0)
    records = sends(log, 5, fence_id=fence_id)
    batches = [log.engine.half_batch(r, r.fresh_state(), 1, r.all_rows) for r in records]
    listener.execute_local_transaction(batches[0])
    with listener._fence.transaction() as connection:
        listener._fence.claim(connection, batches[1], State(STARTED))
    report = CheckService(log, {"group": listener}, transaction_timeout=0.0).run_once()
    assert [half_id for half_id, _ in report.problems] == [records[1].half_id]
    assert "ended the database transaction" in report.problems[0][1]
    assert (report.committed.transactions, report.unknown.transactions) == (1, 3)
    assert [check_times(log, r) for r in records[1:]] == [0, 1, 1, 1]
    state = log.engine.state_of(records[2])
    assert state.checked_at is not None
