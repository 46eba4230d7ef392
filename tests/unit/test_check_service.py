"""The check service, rule by rule, on both kinds of commit log: no Spark, and a clock that is set, not waited for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import rmq_spark as txmq
from rmq_spark import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    CheckService,
    CommitLog,
    HalfBatch,
    LocalTransactionState,
    MessageExt,
    PerMessageListener,
    TransactionalSink,
    TransactionMQProducer,
)
from rmq_spark._core.checks.asker import HUNG_CALLS_MAX
from rmq_spark._core.checks.policy import DiscardPolicy
from rmq_spark.checks import CheckReport, TransactionCheckListener
from rmq_spark.errors import FenceError, ListenerError, OptionError, StorageError, VerdictConflictError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.checks import DEADLINE_S, Clock, Hangs, check, check_times, later, service, states
from tests.support.clocks import wait_until
from tests.support.consumers import Steps, memory_log
from tests.support.half_batches import (
    another,
    bodies,
    commit,
    decide_one,
    let_leave,
    pending,
    prepare,
    roll_back,
    split,
)
from tests.support.inside import (
    CHECK_IMMUNITY_PROPERTY,
    NO_LISTENER_FENCE,
    PROPERTIES,
    CommitOncePrepared,
    HalfRecord,
    OpKind,
    OpRow,
    RowState,
    Who,
    pending_table,
)
from tests.support.listeners import Scripted
from tests.support.meanwhile import at, seen_at
from tests.support.sends import raising

# What depends on how a log keeps op rows and half files runs on Delta in every run, the rest in the long ones.
pytestmark = pytest.mark.log("memory", pytest.param("delta", marks=pytest.mark.long))
ON_BOTH = pytest.mark.log("memory", "delta")
ON_DELTA = pytest.mark.log("delta")

COMMIT, ROLLBACK = COMMIT_MESSAGE, ROLLBACK_MESSAGE
HOUR = 3600.0


def keyed(log: CommitLog, keys: str, immunity_s: list[int | None] | None = None, per: str = "key") -> HalfRecord:
    """A half batch with a message for each of these letters, which are the keys. The bodies are "0", "1", …"""
    columns: dict[str, Any] = {"body": [str(i) for i in range(len(keys))]}
    if per == "key":
        columns["order_id"] = list(keys)
    if immunity_s is not None:
        values = [None if s is None else [(CHECK_IMMUNITY_PROPERTY, str(s)), ("other", "1")] for s in immunity_s]
        columns["properties"] = pa.array(values, PROPERTIES)
    return prepare(log, 0, columns, per=per, key="order_id" if per == "key" else None)


def keys_of(batch: HalfBatch) -> list[str]:
    return sorted(batch.transactions["transaction_key"].to_pylist())


def reopen(log: CommitLog, record: HalfRecord, attempt: int = 2) -> None:
    """As a replay does with what a check, or (with the same attempt) a discard policy rolled back."""
    before = RowState.ROLLED_BACK_BY_DISCARD if attempt == 1 else RowState.ROLLED_BACK_BY_CHECK
    log.engine.ledger.reopen(record, 1, (before,), attempt, Who.EXECUTE, "replay")


# ---------------------------------------------------------------- answers
@ON_BOTH
@pytest.mark.parametrize(
    ("verdict", "outcome", "state"),
    [
        (COMMIT, "committed", RowState.COMMITTED),
        (ROLLBACK, "rolled_back", RowState.ROLLED_BACK_BY_CHECK),  # which a replay may reopen
    ],
)
def test_a_verdict_settles_a_half_batch(log: CommitLog, verdict: str, outcome: str, state: RowState) -> None:
    record = prepare(log, 0, 4)
    listener = Scripted(check=verdict)
    report = service(log, listener).run_once()
    visible = ["app.0.0", "app.0.1", "app.0.2", "app.0.3"]
    assert sorted(bodies(log)) == (visible if verdict == COMMIT else [])
    assert states(log, record) == {state: 4}
    assert (report.checked.transactions, report.checked.messages) == (1, 4)
    found = getattr(report, outcome)
    assert (found.transactions, found.messages) == (1, 4)
    assert report.ok
    assert report.pending == 0
    assert log.engine.state_of(record).history[0].decided_by is Who.CHECK
    assert listener.executed == [], "a check executes nothing"


@ON_BOTH
@pytest.mark.parametrize("answer", [UNKNOWN, None, "UNKNOW", [None]])
def test_unknown_leaves_it_pending_and_counts_whichever_checker_asks(log: CommitLog, answer: Any) -> None:
    record = prepare(log, 0, 4)
    listener = Scripted(check=[answer])
    for times in range(3):
        report = service(another(log), listener).run_once()
        assert listener.checked[-1].check_times == times
        assert check_times(log, record) == times + 1
    assert report.unknown.transactions == 1
    assert report.pending == 1
    assert states(log, record) == {RowState.PENDING: 4}


@ON_BOTH
def test_partial_verdicts_settle_some_keys_and_count_for_the_others_only(log: CommitLog) -> None:
    record = keyed(log, "abacb")
    listener = Scripted(check=[lambda b: b.verdicts(commit=["a"], rollback=["b"], otherwise=UNKNOWN), COMMIT])
    checker = service(log, listener)
    report = checker.run_once()
    assert sorted(bodies(log)) == ["0", "2"]
    assert states(log, record) == {RowState.COMMITTED: 2, RowState.ROLLED_BACK_BY_CHECK: 2, RowState.PENDING: 1}
    assert [report.checked.transactions, report.committed.transactions] == [3, 1]
    assert [report.rolled_back.messages, report.unknown.messages] == [2, 1]
    counted = log.engine.ledger.op_rows_of(record).filter(pc.field("kind") == "check")
    assert counted["count"].to_pylist() == [1]
    checker.run_once()
    assert keys_of(listener.checked[-1]) == ["c"]
    assert listener.checked[-1].check_times == 1
    assert sorted(bodies(log)) == ["0", "2", "3"]


def test_messages_that_are_transactions_of_their_own_get_their_own_verdicts(log: CommitLog) -> None:
    prepare(log, 0, 3, per="message")
    report = check(log, [[COMMIT, None, ROLLBACK]])
    assert len(bodies(log)) == 1
    assert [report.committed.transactions, report.unknown.transactions, report.rolled_back.transactions] == [1, 1, 1]


@ON_BOTH
def test_each_attempt_is_asked_about_by_itself(log: CommitLog) -> None:
    record = keyed(log, "ab")
    check(log, lambda batch: batch.verdicts(rollback=["a"], otherwise=UNKNOWN))
    reopen(log, record)
    listener = Scripted(check=COMMIT)
    assert service(log, listener).run_once().problems == []
    assert [(b.attempt, keys_of(b)) for b in listener.checked] == [(1, ["b"]), (2, ["a"])]
    assert sorted(bodies(log)) == ["0", "1"]


# ---------------------------------------------------------------- too young, leased, immune
@pytest.mark.parametrize(("age_s", "asked"), [(5.999, 0), (6.0, 1), (-30.0, 0), (-600.0, 0)])
def test_a_half_batch_is_asked_about_from_transaction_timeout_on(log: CommitLog, age_s: float, asked: int) -> None:
    record = prepare(log, 0)
    listener = Scripted(check=UNKNOWN)
    report = service(log, listener, later().set(record, age_s)).run_once()
    assert len(listener.checked) == asked
    assert report.skipped["young"] == 1 - asked
    assert check_times(log, record) == asked
    if age_s > -60:
        assert report.ok
    else:
        ((half_id, sentence),) = report.problems
        assert half_id == record.half_id
        assert "the clock of this machine" in sentence


@ON_BOTH
def test_age_counts_from_the_reopen(log: CommitLog) -> None:
    record = prepare(log, 0, 4)
    check(log, ROLLBACK)
    reopen(log, record)
    listener = Scripted(check=COMMIT)
    clock = Clock(log.engine.state_of(record).opened_at[2] + timedelta(seconds=5.9))
    checker = service(log, listener, clock)
    assert checker.run_once().skipped["young"] == 1
    clock.forward(0.1)
    assert checker.run_once().committed.messages == 4
    assert listener.checked[0].attempt == 2


@ON_BOTH
def test_a_leased_half_batch_is_left_alone_until_the_lease_ends(log: CommitLog) -> None:
    until = log.engine.ledger.lease([prepare(log, 0, 4)], 100)
    listener = Scripted(check=COMMIT)
    clock = Clock(until - timedelta(seconds=0.001))
    checker = service(log, listener, clock)
    assert checker.run_once().skipped["leased"] == 1
    assert listener.checked == []
    clock.now = until
    assert checker.run_once().committed.messages == 4


@pytest.mark.parametrize(
    ("immunity_s", "age_s", "asked"),
    [
        ([2, None], 1.999, 0),  # it may be shorter than the timeout
        ([2, None], 2.0, 1),
        ([10, 30, None, 0], 29.999, 0),  # the largest among a transaction's messages counts
        ([10, 30, None, 0], 30.0, 1),
    ],
)
def test_a_half_batch_is_asked_about_when_its_immunity_ends(
    log: CommitLog, immunity_s: list[int | None], age_s: float, asked: int
) -> None:
    record = keyed(log, "a" * len(immunity_s), immunity_s, per="batch")
    report = check(log, UNKNOWN, later().set(record, age_s))
    assert report.checked.transactions == asked
    assert report.skipped["young" if age_s < 6 else "immune"] == 1 - asked
    assert check_times(log, record) == asked


@ON_BOTH
def test_keys_under_immunity_are_left_out_of_what_the_listener_sees(log: CommitLog) -> None:
    record = keyed(log, "abacbd", [None, 50, 30, None, 10, 3])  # a: 30, b: 50, c: the timeout of 6, d: 3
    listener = Scripted(check=[*[UNKNOWN] * 4, lambda batch: batch.verdicts(commit=list("abcd"))])
    clock = later()
    checker = service(log, listener, clock)
    for age_s, keys in ((3.0, ["d"]), (6.0, ["c", "d"]), (30.0, ["a", "c", "d"]), (50.0, ["a", "b", "c", "d"])):
        clock.set(record, age_s)
        report = checker.run_once()
        seen = listener.checked[-1]
        assert keys_of(seen) == keys
        assert report.skipped["immune"] == (0 if len(keys) == 4 else 1)
        assert set(seen.messages(["transaction_key"])["transaction_key"].to_pylist()) == set(keys)
    state, mine = log.engine.state_of(record), pending(log, record)
    keys_of_rows = log.engine.half_batch(record, state, 1, mine).messages(["transaction_key"])["transaction_key"]
    for key, times in {"d": 4, "c": 3, "a": 2, "b": 1}.items():
        assert state.check_times(mine.where(pc.equal(keys_of_rows, key))) == times
    checker.run_once()
    assert len(bodies(log)) == 6


def test_messages_under_immunity_are_left_out_too(log: CommitLog) -> None:
    record = keyed(log, "abc", [None, 100, 1], per="message")
    listener = Scripted(check=COMMIT)
    service(log, listener, later().set(record, 5)).run_once()
    assert listener.checked[0].transactions.num_rows == 1
    assert len(bodies(log)) == 1


# ---------------------------------------------------------------- no answer
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (RuntimeError("the bank is closed"), "RuntimeError: the bank is closed"),
        (FenceError("another database"), "FenceError: another database"),
        ("MAYBE", "is not a verdict"),
        ([COMMIT, COMMIT], "returned 2 verdicts for 1 transaction:"),
        (42, "returned int"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_no_answer_of_a_listener_counts_nothing_and_the_round_goes_on(log: CommitLog, answer: Any, words: str) -> None:
    first, second = prepare(log, 0, 4), prepare(log, 1, 4)
    listener = Scripted(check=[answer, COMMIT, answer])
    checker = service(log, listener, transaction_check_max=1, discard_policy="rollback")
    report = checker.run_once()
    assert states(log, second) == {RowState.COMMITTED: 4}
    assert states(log, first) == {RowState.PENDING: 4}
    assert check_times(log, first) == 0
    assert [half_id for half_id, _ in report.problems] == [first.half_id]
    assert words in report.problems[0][1]
    assert words in str(report)
    for _ in range(3):
        checker.run_once()
    assert states(log, first) == {RowState.PENDING: 4}, "failed checks never lead to discarding"


def test_a_group_without_a_listener_is_warned_about_once_and_loses_nothing(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    records = [prepare(log, i, group="billing", app="bills") for i in range(3)]
    prepare(log, 0, 4)
    checker = service(log, Scripted(), transaction_check_max=1)
    for _ in range(3):
        caplog.clear()
        report = checker.run_once()
        warnings = [r.message for r in caplog.records if "no listener" in r.message]
        assert warnings == ["producer group 'billing' has no listener here: 3 half batches stay pending"]
    assert report.skipped["no_listener"] == 3
    assert report.without_listener == {"billing": 3}
    assert report.ok
    assert report.pending == 3
    assert [check_times(log, r) for r in records] == [0, 0, 0]
    assert len(bodies(log)) == 4


def test_a_producers_own_checks_say_nothing_of_other_groups(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    prepare(log, 0, group="billing", app="bills")
    mine = prepare(log, 0, 4)
    checker = service(log, Scripted(), only_groups=True)
    for _ in range(2):
        report = checker.run_once()
        assert report.without_listener == {}
        assert report.pending == 0
        assert not any("no listener" in r.message for r in caplog.records)
    assert states(log, mine) == {RowState.COMMITTED: 4}
    assert log.pending()["producer_group"].to_pylist() == ["billing"]


def own_checks(runtime: Steps, answer: Any = UNKNOWN) -> list[CheckService]:
    """Those of four processes of a service that has left a half batch open."""
    log = memory_log(runtime, orders=1)
    prepare(log, 0)
    runtime.sleep(10)
    settings = {"only_groups": True, "transaction_check_interval": 60}
    return [CheckService(log.another(), {"group": Scripted(check=answer)}, **settings) for _ in range(4)]


def test_the_processes_of_a_service_use_up_their_checks_as_one() -> None:
    """Four of them had asked 15 times in 13 s where one would have asked 4 times, and their half batch was given up.
    So did a restart of 16, at once."""
    runtime = Steps()
    services = own_checks(runtime)
    for minute in range(1, 4):
        reports = [service.run_once() for service in services]
        assert [r.checked.transactions for r in reports] == [1, 0, 0, 0]
        assert [r.skipped.get("checked", 0) for r in reports] == [0, 1, 1, 1]
        assert pending_table(services[0].engine.another())["check_times"].to_pylist() == [minute]
        runtime.sleep(15)
        assert not any(service.run_once().checked for service in services)
        runtime.sleep(45)


def test_two_processes_that_ask_at_the_same_moment_count_one_check() -> None:
    asked: list[HalfBatch] = []

    def meanwhile(batch: HalfBatch) -> Any:
        asked.append(batch)
        if len(asked) == 1:
            assert second.run_once().checked.transactions == 1
        return UNKNOWN

    first, second, *_ = own_checks(Steps(), meanwhile)
    first.run_once()
    assert len(asked) == 2
    assert pending_table(first.engine.another())["check_times"].to_pylist() == [1]


def test_a_check_that_was_counted_by_a_clock_far_ahead_stops_no_other() -> None:
    runtime = Steps()
    services = own_checks(runtime)
    runtime.wall_s += 7200
    services[0].run_once()
    runtime.wall_s -= 7200
    assert services[1].run_once().checked.transactions == 1


def test_why_a_listener_does_not_answer_is_a_warning_once(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    """Of a producer's own checks nobody reads the report: its message stayed pending without a word."""
    prepare(log, 0)
    checker = service(log, Scripted(check=OSError("away")), only_groups=True)
    for _ in range(3):
        checker.run_once()
    told = [r.levelname for r in caplog.records if "did not answer" in r.message]
    assert told.count("WARNING") == 1


def test_plain_sending_is_settled_by_any_checker(log: CommitLog) -> None:
    assert CommitOncePrepared().store_id == NO_LISTENER_FENCE
    record = prepare(log, 0, 4, group="nobody", fence_id=NO_LISTENER_FENCE)
    clock = later().set(record, 5.9)
    checker = CheckService(log, {}, clock=clock)
    assert checker.run_once().skipped["young"] == 1
    clock.set(record, 100 * HOUR)  # never quarantined: the answer is known
    assert checker.run_once().committed.messages == 4
    assert len(bodies(log)) == 4


# ---------------------------------------------------------------- the store behind a listener
class Bearing(Scripted):
    """A listener whose store has a name."""

    def __init__(self, store_id: Any) -> None:
        super().__init__()
        self.store_id = store_id


class Plain(CommitOncePrepared):
    """``transactionListener=none``."""

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        raise AssertionError("it was asked")


STORES = [("shop-db", None), ("shop-db", "other-db"), ("shop-db", "none"), (None, "shop-db"), (None, "none")]


@pytest.mark.parametrize(("before", "now"), STORES)
def test_a_listener_of_another_store_is_not_asked(log: CommitLog, before: str | None, now: str | None) -> None:
    record = prepare(log, 0, 4, fence_id=before)
    other = Plain() if now == NO_LISTENER_FENCE else Bearing(now)
    ((half_id, sentence),) = service(log, other).run_once().problems
    assert isinstance(other, Plain) or not other.checked
    assert states(log, record) == {RowState.PENDING: 4}
    assert check_times(log, record) == 0
    assert half_id == record.half_id
    assert all(said in sentence for said in ("FenceError", before, now) if said)
    assert service(log, Bearing(before)).run_once().ok
    assert states(log, record) == {RowState.COMMITTED: 4}


def test_a_store_that_did_not_run_it_never_says_that_it_did_not_happen(log: CommitLog) -> None:
    """Two services share a group. One died after its database's commit; the other one's database knows nothing."""

    class Store:
        def __init__(self, name: str) -> None:
            self.store_id, self.rows = name, set[str]()

        def execute_local_transaction(self, msg: MessageExt, arg: Any) -> LocalTransactionState:
            self.rows.add(msg.msg_id)
            raise SystemExit("the process dies")

        def check_local_transaction(self, msg: MessageExt) -> LocalTransactionState:
            return COMMIT if msg.msg_id in self.rows else ROLLBACK

    a, b = Store("database a"), Store("database b")
    one = pa.table({"body": [b"order"], "topic": ["orders"]})
    with suppress(SystemExit), TransactionMQProducer(log, "group", PerMessageListener(a), check_interval=None) as sends:
        sends.send_messages_in_transaction(one)
    for times in range(3):
        checker = service(another(log), PerMessageListener(b), later(60.0 + times), transaction_check_max=1)
        ((_, sentence),) = checker.run_once().problems
        assert "'database a'" in sentence
        assert "'database b'" in sentence
    assert log.pending()["check_times"].to_pylist() == [0]
    service(another(log), PerMessageListener(a)).run_once()
    assert bodies(log) == ["order"]


STORE_IDS = ["", " ", " a", "a\n", "a\x00", "\ud800", "none", "x" * 201, 7, b"a"]


@pytest.mark.parametrize("store_id", STORE_IDS)
def test_a_store_s_name_that_cannot_be_kept_is_refused_at_the_door(store_id: Any) -> None:
    log, listener = memory_log(), Bearing(store_id)
    for given in (listener, PerMessageListener(listener)):
        for door in (
            partial(CheckService, log, {"shop": given}),
            partial(TransactionMQProducer, log, "shop", given),
            partial(TransactionalSink, log, producer_group="shop", listener=given),
        ):
            with pytest.raises(ListenerError, match=r"store_id=.* is not the name of a store: a text of 1 to 200 "):
                door()


@pytest.mark.parametrize("store_id", STORE_IDS)
def test_a_store_s_name_that_shows_late_is_refused_before_anything_is_sent_or_asked(store_id: Any) -> None:
    class Late(Scripted):
        @property
        def store_id(self) -> Any:
            return store_id

    log, late = InMemoryCommitLog(topics={"orders": 2}), Late()
    with (
        TransactionMQProducer(log, "shop", late, check_interval=None) as sends,
        pytest.raises(ListenerError, match=r"Late\.store_id=.* is not the name of a store"),
    ):
        sends.send_messages_in_transaction(pa.table({"body": [b"order"], "topic": ["orders"]}))
    assert log.pending().num_rows == 0
    prepare(log, 0)
    ((_, sentence),) = service(log, late).run_once().problems
    assert "is not the name of a store" in sentence
    assert not late.checked


@ON_BOTH
def test_a_check_keeps_the_listener_s_reason_for_unknown_without_secrets(log: CommitLog) -> None:
    record = prepare(log, 0)

    def waits(batch: HalfBatch) -> LocalTransactionState:
        assert batch.reason is None
        batch.reason = reasons.pop(0)
        return UNKNOWN

    reasons = [None, "the bank at https://shop:s3cret@bank/ is closed", "x" * 300]
    checker = service(log, Scripted(check=waits))
    for _ in range(3):
        checker.run_once()
    kept = [event.reason for event in another(log).trace(half_id=record.half_id).events if event.kind == "checked"]
    assert kept == [
        "UNKNOWN from Scripted",
        "UNKNOWN from Scripted: the bank at https://***@bank/ is closed",
        f"UNKNOWN from Scripted: {'x' * 199}…",
    ]


# ---------------------------------------------------------------- giving up
@ON_BOTH
def test_past_transaction_check_max_it_is_quarantined_without_being_asked_again(log: CommitLog) -> None:
    record = prepare(log, 0, 4)
    listener = Scripted(check=UNKNOWN)
    checker = service(log, listener, transaction_check_max=3)
    for _ in range(3):
        checker.run_once()
    assert states(log, record) == {RowState.PENDING: 4}
    report = checker.run_once()
    assert len(listener.checked) == 3
    assert states(log, record) == {RowState.QUARANTINED: 4}
    assert report.quarantined.messages == 4
    assert "nothing was checked; 1 transaction (4 messages) quarantined" in str(report)
    assert report.pending == 0
    assert log.quarantined()["half_id"].to_pylist() == [record.half_id]
    last = log.engine.state_of(record).history[-1]
    assert last.decided_by is Who.DISCARD
    assert last.reason == "3 checks were answered with UNKNOWN; transactionCheckMax is 3"
    checker.run_once()
    assert len(listener.checked) == 3


def given_up(
    log: CommitLog, policy: Any = "quarantine", after: Any = COMMIT, clock: Clock | None = None
) -> tuple[CheckService, Scripted]:
    """A service that has asked once, hears UNKNOWN, and leaves the rest to the policy; ``after`` is its next answer."""
    listener = Scripted(check=[UNKNOWN, after])
    checker = service(log, listener, clock, transaction_check_max=1, discard_policy=policy)
    checker.run_once()
    return checker, listener


@ON_BOTH
@pytest.mark.parametrize("policy", ["quarantine", "rollback"])
def test_what_was_given_up_is_asked_about_anew_under_the_same_attempt_when_it_is_brought_back(
    log: CommitLog, policy: str
) -> None:
    record = prepare(log, 0, 4)
    clock = later()
    checker, listener = given_up(log, policy, clock=clock)
    report = checker.run_once()
    if policy == "quarantine":
        assert states(log, record) == {RowState.QUARANTINED: 4}
        assert log.resume(record.half_id) == 4
    else:
        assert report.discarded.transactions == 1
        assert states(log, record) == {RowState.ROLLED_BACK_BY_DISCARD: 4}
        reopen(log, record, 1)
    clock.now = log.engine.state_of(record).opened_at[1] + timedelta(seconds=5.9)
    assert checker.run_once().skipped["young"] == 1
    clock.forward(0.1)
    report = checker.run_once()
    assert (listener.checked[-1].attempt, listener.checked[-1].check_times) == (1, 0)
    assert report.committed.messages == 4
    assert len(bodies(log)) == 4


@ON_BOTH
def test_only_the_keys_that_were_checked_too_often_are_discarded(log: CommitLog) -> None:
    record = keyed(log, "ab", [None, 20])
    listener = Scripted(check=UNKNOWN)
    clock = later().set(record, 10)
    checker = service(log, listener, clock, transaction_check_max=2, discard_policy=DiscardPolicy.COMMIT)
    checker.run_once()
    checker.run_once()
    clock.set(record, 20)
    report = checker.run_once()
    assert (report.discarded.transactions, report.unknown.transactions) == (1, 1)
    assert bodies(log) == ["0"]
    assert [event.decided_by for event in log.engine.state_of(record).history][-1] is Who.DISCARD
    assert keys_of(listener.checked[-1]) == ["b"]


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (COMMIT, RowState.COMMITTED),
        (ROLLBACK, RowState.ROLLED_BACK_BY_DISCARD),
        (None, RowState.QUARANTINED),
        (UNKNOWN, RowState.QUARANTINED),
        ("UNKNOW", RowState.QUARANTINED),  # as RocketMQ spells it, and as a listener may
    ],
)
def test_a_users_own_policy_decides(log: CommitLog, answer: LocalTransactionState | None, state: RowState) -> None:
    told: list[tuple[HalfBatch, str]] = []

    class Mail(TransactionCheckListener):
        def resolve_discarded(self, batch: HalfBatch, reason: str) -> LocalTransactionState | None:
            told.append((batch, reason))
            return answer

    record = prepare(log, 0, 4)
    checker, _ = given_up(log, Mail())
    assert told == []
    checker.run_once()
    assert told[0][0].half_id == record.half_id
    assert "1 check was answered" in told[0][1]
    assert states(log, record) == {state: 4}


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK, None])
def test_what_a_replay_reopened_while_the_policy_decided_is_asked_about_again(
    log: CommitLog, answer: LocalTransactionState | None
) -> None:
    """Simulated seed 2579: the policy's old guess ended a batch of which nobody had been asked since its reopening."""
    record = prepare(log, 0, 4)

    class Slow(TransactionCheckListener):
        def resolve_discarded(self, batch: HalfBatch, reason: str) -> LocalTransactionState | None:
            other, mine = another(log), record.fresh_state().rows_in((RowState.PENDING,))
            decide_one(other.engine, record, 1, rollback=mine, who=Who.DISCARD, reason=reason)
            reopen(other, record, 1)
            return answer

    checker, _ = given_up(log, Slow())
    report = checker.run_once()
    assert states(log, record) == {RowState.PENDING: 4}
    assert report.discarded.messages == 0
    assert check_times(log, record) == 0


def test_a_policy_that_raises_or_answers_nonsense_leaves_it_pending(log: CommitLog) -> None:
    class Bad(TransactionCheckListener):
        def resolve_discarded(self, batch: HalfBatch, reason: str) -> LocalTransactionState | None:
            if batch.batch_id == 0:
                raise OSError("no mail server")
            return "MAYBE"  # type: ignore[return-value]

    records = [prepare(log, i, 4) for i in range(2)]
    checker, _ = given_up(log, Bad(), after=UNKNOWN)
    report = checker.run_once()
    assert [states(log, r) for r in records] == [{RowState.PENDING: 4}] * 2
    assert "OSError: no mail server" in report.problems[0][1]
    assert "MAYBE" in report.problems[1][1]


@pytest.mark.parametrize("policy", ["quarantine", "rollback", "commit"])
@pytest.mark.parametrize("listeners", [{"group": Scripted()}, {}])
def test_older_than_file_reserved_time_is_quarantined_whatever_the_policy(
    log: CommitLog, policy: str, listeners: dict[str, Scripted]
) -> None:
    record = keyed(log, "ab", [10**9, None], per="batch")
    clock = later().set(record, 72 * HOUR - 0.001)
    checker = CheckService(log, listeners, discard_policy=policy, clock=clock)
    checker.run_once()
    assert states(log, record) == {RowState.PENDING: 2}  # under immunity
    clock.set(record, 72 * HOUR)
    report = checker.run_once()
    assert states(log, record) == {RowState.QUARANTINED: 2}
    assert report.quarantined.messages == 2
    reason = str(log.engine.state_of(record).history[-1].reason)
    assert reason.startswith("open for 72.0 h, which is not less than fileRes")


def test_expired_and_checked_too_often_is_left_to_the_policy(log: CommitLog) -> None:
    record = prepare(log, 0, 4)
    clock = later()
    checker, _ = given_up(log, "Rollback", clock=clock)  # names are taken in any case
    clock.set(record, 100 * HOUR)
    checker.run_once()
    assert states(log, record) == {RowState.ROLLED_BACK_BY_DISCARD: 4}


# ---------------------------------------------------------------- someone else was faster
def after(meanwhile: Callable[[], object]) -> Callable[[HalfBatch], LocalTransactionState]:
    """The answer COMMIT, before which something else happens."""

    def answer(batch: HalfBatch) -> LocalTransactionState:
        meanwhile()
        return COMMIT

    return answer


@ON_BOTH
def test_a_verdict_that_comes_too_late_is_reported_and_the_round_goes_on(log: CommitLog) -> None:
    first, second = prepare(log, 0, 4), prepare(log, 1, 4)
    checker = service(log, Scripted(check=[after(lambda: roll_back(log, first)), COMMIT]))
    report = checker.run_once()
    assert [h for h, _ in report.problems] == [first.half_id]
    assert "comes too late" in report.problems[0][1]
    assert states(log, second) == {RowState.COMMITTED: 4}
    assert states(log, first) == {RowState.ROLLED_BACK: 4}
    report = checker.run_once()
    assert [h for h, _ in report.problems] == [first.half_id], "a conflict is shown until a person resolves it"
    assert "log.resolve" in report.problems[0][1]
    log.resolve(first.half_id, ROLLBACK, "looked it up")
    assert checker.run_once().ok


def test_the_same_verdict_from_someone_else_is_no_problem(log: CommitLog) -> None:
    record = prepare(log, 0, 4)
    assert check(log, after(lambda: commit(log, record))).ok
    assert len(bodies(log)) == 4


@pytest.mark.parametrize("point", ["open batches listed", "commit begins"])
def test_what_someone_else_settled_and_let_leave_is_no_problem(log: CommitLog, point: str) -> None:
    record, other = prepare(log, 0, 4), another(log)

    def settled() -> None:
        commit(other, record)
        let_leave(other)

    with at(point, settled):
        report = check(log, COMMIT)
    assert report.ok, report
    assert report.pending == 0
    assert len(bodies(log)) == 4


def test_an_attempt_that_is_over_is_reported(log: CommitLog) -> None:
    record = prepare(log, 0)

    def replayed() -> None:
        roll_back(log, record, who=Who.CHECK)
        reopen(log, record)

    assert "under attempt 1" in check(log, after(replayed)).problems[0][1]
    assert bodies(log) == []


@ON_BOTH
def test_pending_rows_of_a_half_batch_in_conflict_wait_for_a_person(log: CommitLog) -> None:
    record = keyed(log, "ab")
    one, _ = split(pending(log, record), 2)
    decide_one(log.engine, record, 1, rollback=one)
    with pytest.raises(VerdictConflictError):
        decide_one(log.engine, record, 1, commit=one)
    listener = Scripted(check=COMMIT)
    checker = service(log, listener)
    for _ in range(2):
        assert [h for h, _ in checker.run_once().problems] == [record.half_id]
    assert listener.checked == []
    assert log.conflicts() == [record.half_id]


# ---------------------------------------------------------------- bad half batches
@ON_DELTA
def test_a_half_batch_that_cannot_be_read_does_not_stop_the_round(log: CommitLog) -> None:
    bad, good = prepare(log, 0, 4), prepare(log, 1, 4)
    path = Path(log.path) / "half" / bad.files[0].path
    content = path.read_bytes()
    path.unlink()
    checker = service(log.path, Scripted(check=COMMIT))  # type: ignore[arg-type]  # which opens it
    report = checker.run_once()
    assert states(log, good) == {RowState.COMMITTED: 4}
    assert [h for h, _ in report.problems] == [bad.half_id]
    assert "it cannot be checked: LostFileError" in report.problems[0][1]
    assert report.pending == 1
    path.write_bytes(content[:-50])
    assert not checker.run_once().ok
    path.write_bytes(content)
    assert checker.run_once().committed.messages == 4


@ON_BOTH
def test_op_rows_changed_by_hand_stop_only_their_half_batch(log: CommitLog) -> None:
    bad, good = prepare(log, 0, 4), prepare(log, 1, 4)
    log.engine.ledger.append(lambda: [OpRow(OpKind.CHECK, bad.half_id, 7, None, 1, 1, Who.CHECK)])
    report = check(log, COMMIT)
    assert states(log, good) == {RowState.COMMITTED: 4}
    assert [h for h, _ in report.problems] == [bad.half_id]
    assert "CorruptLogError" in report.problems[0][1]


@ON_DELTA
def test_a_bad_half_batch_below_the_mark_hides_nothing(log: CommitLog) -> None:
    bad = prepare(log, 0)
    check(log, ROLLBACK)
    assert log.engine.ledger.view.low_water >= bad.prepared_ms
    reopen(log, bad)
    (Path(log.path) / "half" / bad.files[0].path).unlink()
    good = prepare(log, 1, 4)
    report = check(another(log), COMMIT)
    assert states(log, good) == {RowState.COMMITTED: 4}
    assert bad.half_id in [h for h, _ in report.problems]


# ---------------------------------------------------------------- the time limit
@ON_BOTH
def test_what_a_round_finds_out_shares_commits(log: CommitLog) -> None:
    """Each half batch had a commit of its own: of thousands that a crash left, a round settled a few hundred."""
    records = [prepare(log, i, 4) for i in range(40)]
    before = log.refresh()
    report = check(log, [COMMIT, ROLLBACK] * 20)
    assert (report.committed.transactions, report.rolled_back.transactions, report.pending) == (20, 20, 0)
    assert log.refresh() - before < 10  # of which one is the mark
    assert all(states(log, r) == {RowState.COMMITTED: 4} for r in records[::2])
    assert all(states(log, r) == {RowState.ROLLED_BACK_BY_CHECK: 4} for r in records[1::2])


def test_decisions_whose_shared_commit_fails_are_made_one_by_one(log: CommitLog) -> None:
    records = [prepare(log, i, 4) for i in range(3)]
    with at("commit begins", raising(StorageError("no answer")), table="op"):
        assert check(log, COMMIT).ok
    assert all(states(log, record) == {RowState.COMMITTED: 4} for record in records)


def test_a_round_whose_end_fails_reports_what_it_has_done(log: CommitLog) -> None:
    prepare(log, 0, 4)
    with seen_at("mark moved", raising(StorageError("no answer"))):
        report = check(log, COMMIT)
    assert report.committed.messages == 4
    assert report.problems == [(None, "the end of the round failed with StorageError: no answer")]


def test_a_listener_that_hangs_holds_up_nothing_that_was_decided(log: CommitLog) -> None:
    records = [prepare(log, i) for i in range(4)]
    last = after(lambda: wait_until(lambda: another(log).engine.open_half_ids() == [records[3].half_id]))
    assert check(log, [COMMIT, COMMIT, COMMIT, last]).pending == 0


@ON_DELTA
def test_a_decision_that_cannot_be_made_stops_no_other(log: CommitLog) -> None:
    """A file is lost after the listener was asked about it."""
    records = [prepare(log, i) for i in range(5)]
    lost = Path(log.path) / "half" / records[2].files[0].path
    report = check(log, [COMMIT, COMMIT, after(lost.unlink), COMMIT])
    assert [(half_id, "LostFileError" in said) for half_id, said in report.problems] == [(records[2].half_id, True)]
    assert report.pending == 1


@ON_BOTH
def test_a_hung_listener_ends_the_round_in_time_and_the_next_begins_with_the_rest(log: CommitLog) -> None:
    hung, second, third = (prepare(log, i, 4) for i in range(3))
    answer = Hangs()
    listener = Scripted(check=[answer, COMMIT])
    checker = service(log, listener, round_timeout=0.2)
    started = time.monotonic()
    report = checker.run_once()
    assert time.monotonic() - started < DEADLINE_S / 2
    assert report.skipped["left_over"] == 2
    assert "has not answered" in report.problems[0][1]
    checker._checker.rules = replace(checker._checker.rules, round_timeout=DEADLINE_S)
    report = checker.run_once()
    assert listener.asked == [hung.half_id, second.half_id, third.half_id]
    assert states(log, third) == {RowState.COMMITTED: 4}
    assert states(log, hung) == {RowState.PENDING: 4}
    assert [h for h, _ in report.problems] == [hung.half_id]
    answer.let_come()
    report = checker.run_once()
    assert report.committed.messages == 4, "an answer that came late is used, and nobody is asked twice"
    assert len(listener.asked) == 3
    assert report.ok


def test_a_slow_half_batch_at_the_front_starves_nobody(log: CommitLog) -> None:
    records = [prepare(log, i) for i in range(4)]
    slow = Scripted(check=lambda batch: time.sleep(0.15) if batch.half_id == records[0].half_id else UNKNOWN)
    checker = service(log, slow, round_timeout=0.1)
    for _ in range(6):
        checker.run_once()
    assert min(check_times(log, r) for r in records[1:]) >= 1


def test_too_many_hung_calls_stop_the_asking(log: CommitLog) -> None:
    for number in range(HUNG_CALLS_MAX + 1):
        prepare(log, number)
    answer = Hangs()
    listener = Scripted(check=answer)
    checker = service(log, listener, round_timeout=0.05)
    for _ in range(HUNG_CALLS_MAX + 1):
        report = checker.run_once()
    assert len(listener.checked) == HUNG_CALLS_MAX
    assert any("restart the checker" in sentence for _, sentence in report.problems)
    answer.let_come()


def test_without_a_time_limit_listeners_are_called_from_the_callers_thread(log: CommitLog) -> None:
    prepare(log, 0)
    threads: list[threading.Thread] = []
    check(log, lambda batch: threads.append(threading.current_thread()), round_timeout=None)
    assert threads == [threading.current_thread()]


# ---------------------------------------------------------------- the loop and the mark
@ON_DELTA
def test_run_goes_on_until_it_is_told_to_stop_also_after_a_round_that_fails_as_a_whole(log: CommitLog) -> None:
    prepare(log, 0, 4)
    stop = threading.Event()
    reports: list[CheckReport] = []
    here, away = Path(log.path), Path(f"{log.path}-away")

    def seen(report: CheckReport) -> None:
        reports.append(report)
        if away.exists():
            away.rename(here)
        if len(reports) == 4:
            stop.set()

    here.rename(away)
    checker = service(log, Scripted(), transaction_check_interval=0.01)
    thread = threading.Thread(target=checker.run, args=(stop, seen))
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    ((half_id, sentence),) = reports[0].problems
    assert half_id is None
    assert sentence.startswith("the round failed with ")
    assert [r.committed.messages for r in reports] == [0, 4, 0, 0]


def test_stopping_does_not_wait_for_a_hung_listener(log: CommitLog) -> None:
    prepare(log, 0)
    stop, answer = threading.Event(), Hangs()
    thread = threading.Thread(target=service(log, Scripted(check=answer)).run, args=(stop,))
    thread.start()
    assert answer.asked.wait(DEADLINE_S)
    stop.set()
    thread.join(DEADLINE_S / 2)
    assert not thread.is_alive()
    answer.let_come()


@ON_BOTH
def test_a_round_moves_the_low_water_mark_over_what_is_open_and_names_it(log: CommitLog) -> None:
    _, second, third = (prepare(log, i) for i in range(3))
    check(log, [COMMIT, UNKNOWN, COMMIT])
    assert log.engine.ledger.view.low_water >= third.prepared_ms
    assert set(log.engine.ledger.view.open_at_mark) == {second.half_id}
    check(another(log), COMMIT)
    log.engine.ledger.refresh()
    assert not log.engine.ledger.view.open_at_mark


# ---------------------------------------------------------------- reports, settings, imports
def test_a_report_reads_as_a_paragraph_and_as_json(log: CommitLog) -> None:
    prepare(log, 0, 4)
    prepare(log, 1, group="billing", app="b")
    failing = prepare(log, 2)
    report = check(log, [COMMIT, ValueError("no")])
    text = str(report)
    assert "\n" not in text
    assert "1 transaction (4 messages) committed" in text
    assert "1 of a group without a listener here" in text
    assert "2 half batches are pending" in text
    assert f"problem with {failing.half_id}: its listener did not answer: ValueError: no" in text
    found = json.loads(json.dumps(report.to_dict()))
    assert found["committed"] == {"transactions": 1, "messages": 4}
    assert found["skipped"]["no_listener"] == 1
    assert found["problems"][0]["half_id"] == failing.half_id
    assert str(CheckService(memory_log(), {}).run_once()) == "nothing was checked; 0 half batches are pending"


class OfRocketMQ(Scripted):
    """With RocketMQ's arguments. Every send was UNKNOWN, and only a log said why."""

    def execute_local_transaction(self, message: Any, arg: Any) -> Any:  # type: ignore[override]
        return COMMIT


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"transaction_timeout": -1}, OptionError, "transaction_timeout=-1"),
        ({"transaction_check_interval": 0}, OptionError, "transaction_check_interval=0"),
        ({"transaction_check_max": 0}, OptionError, "transaction_check_max=0"),
        ({"transaction_check_max": 251}, OptionError, "transaction_check_max=251"),
        ({"file_reserved_time": float("nan")}, OptionError, "file_reserved_time=nan"),
        ({"round_timeout": 0}, OptionError, "round_timeout=0"),
        ({"discard_policy": "drop"}, OptionError, "discard"),
        ({"discard_policy": TransactionCheckListener}, OptionError, "discard"),
        ({"discard_policy": None}, OptionError, "discard"),
        ({"discard_policy": "quarantin"}, OptionError, "did you mean 'quarantine'"),
        ({"listeners": [Scripted()]}, OptionError, "listeners is list"),
        ({"listeners": {"shop": object()}}, ListenerError, "object"),
        ({"listeners": {"shop": Scripted}}, ListenerError, "Scripted"),
        ({"listeners": {"shop": OfRocketMQ()}}, ListenerError, "OfRocketMQ"),
        ({"listeners": {"sh op": Scripted()}}, txmq.MessageError, "sh op"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        CheckService(memory_log(), **{"listeners": {}, **settings})
