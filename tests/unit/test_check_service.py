"""The check service, rule by rule, on both kinds of commit log: no Spark, and a clock that is set, not waited for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
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
    CheckReport,
    CheckService,
    CommitLog,
    HalfBatch,
    LocalTransactionState,
    MessageExt,
    PerMessageListener,
    TransactionalSink,
    TransactionCheckListener,
    TransactionListener,
    TransactionMQProducer,
)
from rmq_spark.check import asking
from rmq_spark.check.policy import DiscardPolicy, require_policy
from rmq_spark.check.report import CHECKED
from rmq_spark.errors import FenceError, ListenerError, LostFileError, OptionError, VerdictConflictError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.consumers import Steps
from tests.support.half_batches import pending, split
from tests.support.inside import (
    BATCH,
    CHECK_IMMUNITY_PROPERTY,
    KEY,
    MESSAGE,
    NO_LISTENER_FENCE,
    PROPERTIES,
    CommitOncePrepared,
    HalfHeader,
    HalfRecord,
    HalfWriter,
    PreparedBatches,
    RowState,
    Who,
    batch_name,
    split_by_verdict,
)

COMMIT, ROLLBACK = COMMIT_MESSAGE, ROLLBACK_MESSAGE
AFTER = {COMMIT: RowState.COMMITTED, ROLLBACK: RowState.ROLLED_BACK_BY_CHECK}
DEADLINE_S = 20.0
HOUR = 3600.0


# ---------------------------------------------------------------- logs, half batches, clocks, listeners
@pytest.fixture(params=["memory", "delta"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> CommitLog:
    if request.param == "memory":
        return InMemoryCommitLog(topics={"orders": 2})
    made = CommitLog.create(tmp_path / "log")
    made.create_topic("orders", queues=2)
    return made


@pytest.fixture
def delta_log(tmp_path: Path) -> CommitLog:
    made = CommitLog.create(tmp_path / "log")
    made.create_topic("orders", queues=2)
    return made


def another(log: CommitLog) -> CommitLog:
    """A handle of its own, as a process that starts anew has."""
    return log.another() if isinstance(log, InMemoryCommitLog) else CommitLog.open(log.path)


def prepare(
    log: CommitLog,
    batch_id: int = 0,
    per: str = BATCH,
    *,
    keys: list[str] | None = None,
    rows: int = 4,
    group: str = "shop",
    fence_id: str | None = None,
    app_id: str = "app",
    immunity_s: list[int | None] | None = None,
) -> HalfRecord:
    """A half batch as a driver leaves it that dies before the op marker."""
    header = HalfHeader(batch_name(app_id, batch_id), app_id, batch_id, None, None, fence_id, per, group)
    rows = len(keys or immunity_s or range(rows))
    columns: dict[str, Any] = {"body": [f"{batch_id}.{i}" for i in range(rows)]}
    if keys is not None:
        columns["order_id"] = keys
    if immunity_s is not None:
        values = [None if s is None else [(CHECK_IMMUNITY_PROPERTY, str(s)), ("other", "1")] for s in immunity_s]
        columns["properties"] = pa.array(values, PROPERTIES)
    writer = HalfWriter(header, log.topics(), "orders", "order_id" if keys is not None else None)
    return log.prepare(header, log.stage(writer, pa.table(columns).to_batches()))


class Clock:
    """A time that stands still until it is set."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def set(self, record: HalfRecord, age_s: float) -> Clock:
        self.now = record.prepared_at + timedelta(seconds=age_s)
        return self

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def later(seconds: float = 60.0) -> Clock:
    """A clock that is so much ahead: everything that was prepared is old."""
    return Clock(datetime.now(timezone.utc) + timedelta(seconds=seconds))


@dataclass
class Says(TransactionListener):
    """Answers checks with what it was given, and remembers what it was asked about."""

    answer: Any = UNKNOWN
    asked: list[HalfBatch] = field(default_factory=list)

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        raise AssertionError("a check executes nothing")

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        self.asked.append(batch)
        answer = self.answer(batch) if callable(self.answer) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer


def bodies(log: CommitLog) -> list[str]:
    return sorted(b.decode() for b in log.read("orders", columns=["body"])["body"].to_pylist())


def states(log: CommitLog, record: HalfRecord) -> dict[RowState, int]:
    state = log.state_of(record)
    return {s: n for s in RowState if (n := state.count(s))}


def checks(log: CommitLog, record: HalfRecord) -> int:
    state = log.state_of(record)
    return state.check_times(state.rows_in((RowState.PENDING,)))


# ---------------------------------------------------------------- answers
def test_commit_makes_a_half_batch_visible(log: CommitLog) -> None:
    record = prepare(log)
    listener = Says(COMMIT)
    report = CheckService(log, {"shop": listener}, clock=later()).run_once()
    assert bodies(log) == ["0.0", "0.1", "0.2", "0.3"]
    assert states(log, record) == {RowState.COMMITTED: 4}
    assert (report.checked.transactions, report.checked.messages) == (1, 4)
    assert (report.committed.transactions, report.committed.messages) == (1, 4)
    assert report.ok
    assert report.pending == 0
    assert log.state_of(record).history[0].decided_by is Who.CHECK


def test_rollback_is_one_by_check_so_that_a_replay_may_reopen_it(log: CommitLog) -> None:
    record = prepare(log)
    report = CheckService(log, {"shop": Says(ROLLBACK)}, clock=later()).run_once()
    assert states(log, record) == {RowState.ROLLED_BACK_BY_CHECK: 4}
    assert report.rolled_back.messages == 4
    assert bodies(log) == []


@pytest.mark.parametrize("answer", [UNKNOWN, None, "UNKNOW", [None]])
def test_unknown_leaves_it_pending_and_counts(log: CommitLog, answer: Any) -> None:
    record = prepare(log)
    listener = Says(answer)
    service = CheckService(log, {"shop": listener}, clock=later())
    for times in range(3):
        report = service.run_once()
        assert listener.asked[-1].check_times == times
        assert checks(log, record) == times + 1
    assert report.unknown.transactions == 1
    assert report.pending == 1
    assert states(log, record) == {RowState.PENDING: 4}


def test_counts_outlive_the_checker(log: CommitLog) -> None:
    record = prepare(log)
    for _ in range(2):
        CheckService(another(log), {"shop": Says(UNKNOWN)}, clock=later()).run_once()
    assert checks(log, record) == 2


def test_partial_verdicts_settle_some_keys_and_count_for_the_others_only(log: CommitLog) -> None:
    record = prepare(log, per=KEY, keys=["a", "b", "a", "c", "b"])
    listener = Says(lambda batch: batch.verdicts(commit=["a"], rollback=["b"], otherwise=UNKNOWN))
    service = CheckService(log, {"shop": listener}, clock=later())
    report = service.run_once()
    assert bodies(log) == ["0.0", "0.2"]
    assert states(log, record) == {RowState.COMMITTED: 2, RowState.ROLLED_BACK_BY_CHECK: 2, RowState.PENDING: 1}
    assert [report.checked.transactions, report.committed.transactions] == [3, 1]
    assert [report.rolled_back.messages, report.unknown.messages] == [2, 1]
    counted = log.ledger.rows_of(record).filter(pc.field("kind") == "check")
    assert counted["count"].to_pylist() == [1]
    listener.answer = COMMIT
    service.run_once()
    assert listener.asked[-1].transactions["transaction_key"].to_pylist() == ["c"]
    assert listener.asked[-1].check_times == 1
    assert bodies(log) == ["0.0", "0.2", "0.3"]


def test_messages_that_are_transactions_of_their_own_get_their_own_verdicts(log: CommitLog) -> None:
    prepare(log, per=MESSAGE, rows=3)
    listener = Says([COMMIT, None, ROLLBACK])
    report = CheckService(log, {"shop": listener}, clock=later()).run_once()
    assert len(bodies(log)) == 1
    assert [report.committed.transactions, report.unknown.transactions, report.rolled_back.transactions] == [1, 1, 1]


def test_each_attempt_is_asked_about_by_itself(log: CommitLog) -> None:
    record = prepare(log, per=KEY, keys=["a", "b"])
    service = CheckService(log, {"shop": Says(lambda b: b.verdicts(rollback=["a"], otherwise=UNKNOWN))}, clock=later())
    service.run_once()
    log.reopen(record, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "replay")
    listener = Says(COMMIT)
    CheckService(log, {"shop": listener}, clock=later()).run_once()
    assert [b.attempt for b in listener.asked] == [1, 2]
    assert [b.transactions["transaction_key"].to_pylist() for b in listener.asked] == [["b"], ["a"]]
    assert bodies(log) == ["0.0", "0.1"]


# ---------------------------------------------------------------- too young, leased, immune
@pytest.mark.parametrize(("age_s", "asked"), [(5.999, 0), (6.0, 1), (6.001, 1), (-30.0, 0)])
def test_a_half_batch_is_asked_about_from_transaction_timeout_on(log: CommitLog, age_s: float, asked: int) -> None:
    record = prepare(log)
    listener = Says(UNKNOWN)
    report = CheckService(log, {"shop": listener}, clock=later().set(record, age_s)).run_once()
    assert len(listener.asked) == asked
    assert report.skipped["young"] == 1 - asked
    assert checks(log, record) == asked
    assert report.ok


def test_age_counts_from_the_reopen(log: CommitLog) -> None:
    record = prepare(log)
    CheckService(log, {"shop": Says(ROLLBACK)}, clock=later()).run_once()
    log.reopen(record, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "replay")
    opened_at = log.state_of(record).opened_at[2]
    listener = Says(COMMIT)
    clock = Clock(opened_at + timedelta(seconds=5.9))
    service = CheckService(log, {"shop": listener}, clock=clock)
    assert service.run_once().skipped["young"] == 1
    clock.forward(0.1)
    assert service.run_once().committed.messages == 4
    assert listener.asked[0].attempt == 2


def test_a_prepare_time_in_the_future_is_reported(log: CommitLog) -> None:
    record = prepare(log)
    report = CheckService(log, {"shop": Says(COMMIT)}, clock=later().set(record, -600)).run_once()
    assert report.skipped["young"] == 1
    assert report.problems[0][0] == record.half_id
    assert "the clock of this machine" in report.problems[0][1]


def test_a_leased_half_batch_is_left_alone_until_the_lease_ends(log: CommitLog) -> None:
    record = prepare(log)
    until = log.lease(record, 100)
    listener = Says(COMMIT)
    clock = Clock(until - timedelta(seconds=0.001))
    service = CheckService(log, {"shop": listener}, clock=clock)
    report = service.run_once()
    assert report.skipped["leased"] == 1
    assert listener.asked == []
    clock.now = until
    assert service.run_once().committed.messages == 4


@pytest.mark.parametrize(("age_s", "asked"), [(1.999, 0), (2.0, 1), (100.0, 1)])
def test_immunity_may_be_shorter_than_the_timeout(log: CommitLog, age_s: float, asked: int) -> None:
    record = prepare(log, immunity_s=[2, None])
    listener = Says(UNKNOWN)
    CheckService(log, {"shop": listener}, clock=later().set(record, age_s)).run_once()
    assert len(listener.asked) == asked
    assert checks(log, record) == asked


def test_the_largest_immunity_among_a_transactions_messages_counts(log: CommitLog) -> None:
    record = prepare(log, immunity_s=[10, 30, None, 0])
    listener = Says(UNKNOWN)
    clock = later().set(record, 29.999)
    service = CheckService(log, {"shop": listener}, clock=clock)
    report = service.run_once()
    assert listener.asked == []
    assert report.skipped["immune"] == 1
    assert checks(log, record) == 0
    clock.set(record, 30.0)
    service.run_once()
    assert checks(log, record) == 1


def test_keys_under_immunity_are_left_out_of_what_the_listener_sees(log: CommitLog) -> None:
    record = prepare(
        log, per=KEY, keys=["a", "b", "a", "c", "b", "d"], immunity_s=[None, 50, 30, None, 10, 3]
    )  # a: 30, b: 50, c: the timeout of 6, d: 3
    listener = Says(UNKNOWN)
    clock = later()
    service = CheckService(log, {"shop": listener}, clock=clock)
    for age_s, keys in ((3.0, ["d"]), (6.0, ["c", "d"]), (30.0, ["a", "c", "d"]), (50.0, ["a", "b", "c", "d"])):
        clock.set(record, age_s)
        report = service.run_once()
        assert sorted(listener.asked[-1].transactions["transaction_key"].to_pylist()) == keys
        assert report.skipped["immune"] == (0 if len(keys) == 4 else 1)
        assert set(listener.asked[-1].messages(["transaction_key"])["transaction_key"].to_pylist()) == set(keys)
    counted = {k: 4 - i for i, k in enumerate(["d", "c", "a", "b"])}
    listener.answer = lambda batch: batch.verdicts(commit=list(counted), otherwise=UNKNOWN)
    state = log.state_of(record)
    pending = state.rows_in((RowState.PENDING,))
    keys_of_rows = log.half_batch(record, state, 1, pending).messages(["transaction_key"])["transaction_key"]
    for key, times in counted.items():
        assert state.check_times(pending.where(pc.equal(keys_of_rows, key))) == times
    service.run_once()
    assert len(bodies(log)) == 6


def test_messages_under_immunity_are_left_out_too(log: CommitLog) -> None:
    record = prepare(log, per=MESSAGE, immunity_s=[None, 100, 1])
    listener = Says(COMMIT)
    CheckService(log, {"shop": listener}, clock=later().set(record, 5)).run_once()
    assert listener.asked[0].transactions.num_rows == 1
    assert len(bodies(log)) == 1


# ---------------------------------------------------------------- no answer
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (RuntimeError("the bank is closed"), "RuntimeError: the bank is closed"),
        (FenceError("another database"), "FenceError: another database"),
        ("MAYBE", "is not a verdict"),
        ([COMMIT, COMMIT], "returned 2 verdicts for 1 transactions"),
        (42, "returned int"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_listener_that_gives_no_answer_counts_nothing_and_the_round_goes_on(
    log: CommitLog, answer: Any, words: str
) -> None:
    first, second = prepare(log, 0), prepare(log, 1)
    listener = Says(lambda batch: answer if batch.half_id == first.half_id else COMMIT)
    report = CheckService(log, {"shop": listener}, clock=later()).run_once()
    assert states(log, second) == {RowState.COMMITTED: 4}
    assert states(log, first) == {RowState.PENDING: 4}
    assert checks(log, first) == 0
    assert [half_id for half_id, _ in report.problems] == [first.half_id]
    assert words in report.problems[0][1]
    assert words in str(report)


def test_a_group_without_a_listener_is_warned_about_once_and_loses_nothing(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    records = [prepare(log, i, group="billing", app_id="bills") for i in range(3)]
    prepare(log, 0)
    service = CheckService(log, {"shop": Says(COMMIT)}, transaction_check_max=1, clock=later())
    for _ in range(3):
        caplog.clear()
        report = service.run_once()
        warnings = [r.message for r in caplog.records if "no listener" in r.message]
        assert warnings == ["producer group 'billing' has no listener here: 3 half batches stay pending"]
    assert report.skipped["no_listener"] == 3
    assert report.without_listener == {"billing": 3}
    assert report.ok
    assert report.pending == 3
    assert [checks(log, r) for r in records] == [0, 0, 0]
    assert len(bodies(log)) == 4


def test_a_producers_own_checks_say_nothing_of_other_groups(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    prepare(log, 0, group="billing", app_id="bills")
    mine = prepare(log, 0)
    service = CheckService(log, {"shop": Says(COMMIT)}, only_groups=True, clock=later())
    for _ in range(2):
        report = service.run_once()
        assert report.without_listener == {}
        assert report.pending == 0
        assert not any("no listener" in r.message for r in caplog.records)
    assert states(log, mine) == {RowState.COMMITTED: 4}
    assert log.pending()["producer_group"].to_pylist() == ["billing"]


def own_checks(machine: Steps, records: int = 1) -> list[CheckService]:
    """Those of four processes of a service that has left half batches open."""
    log = InMemoryCommitLog(topics={"orders": 1}, machine=machine)
    for i in range(records):
        prepare(log, i)
    machine.sleep(10)
    handles = [log.another() for _ in range(4)]
    return [CheckService(h, {"shop": Says(UNKNOWN)}, only_groups=True, transaction_check_interval=60) for h in handles]


def test_the_processes_of_a_service_use_up_their_checks_as_one() -> None:
    """Four of them had asked 15 times in 13 s where one would have asked 4 times, and their half batch was given up.
    So did a restart of 16, at once."""
    machine = Steps()
    services = own_checks(machine)
    for minute in range(1, 4):
        reports = [service.run_once() for service in services]
        assert [r.checked.transactions for r in reports] == [1, 0, 0, 0]
        assert [r.skipped.get(CHECKED, 0) for r in reports] == [0, 1, 1, 1]
        assert services[0].log.another().pending()["check_times"].to_pylist() == [minute]
        machine.sleep(15)
        assert not any(service.run_once().checked for service in services)
        machine.sleep(45)


def test_two_processes_that_ask_at_the_same_moment_count_one_check() -> None:
    first, second, *_ = own_checks(Steps())
    asks = first.listeners["shop"]

    def meanwhile(batch: HalfBatch) -> Any:
        assert second.run_once().checked.transactions == 1
        return UNKNOWN

    asks.answer = meanwhile  # type: ignore[attr-defined]
    first.run_once()
    assert first.log.another().pending()["check_times"].to_pylist() == [1]


def test_a_check_that_was_counted_by_a_clock_far_ahead_stops_no_other() -> None:
    machine = Steps()
    services = own_checks(machine)
    machine.wall_s += 7200
    services[0].run_once()
    machine.wall_s -= 7200
    assert services[1].run_once().checked.transactions == 1


def test_what_keeps_a_listener_from_answering_is_a_warning_once(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a producer's own checks nobody reads the report: its message stayed pending without a word."""
    prepare(log)
    service = CheckService(log, {"shop": Says(OSError("away"))}, only_groups=True, clock=later())
    for _ in range(3):
        service.run_once()
    told = [r.levelname for r in caplog.records if "did not answer" in r.message]
    assert told.count("WARNING") == 1


def test_plain_sending_is_settled_by_any_checker(log: CommitLog) -> None:
    assert CommitOncePrepared().store_id == NO_LISTENER_FENCE
    record = prepare(log, group="nobody", fence_id=NO_LISTENER_FENCE)
    clock = later().set(record, 5.9)
    service = CheckService(log, {}, clock=clock)
    assert service.run_once().skipped["young"] == 1
    clock.set(record, 100 * HOUR)  # never quarantined: the answer is known
    assert service.run_once().committed.messages == 4
    assert len(bodies(log)) == 4


class Bearing(Says):
    """Says, with a store that has a name."""

    def __init__(self, store_id: str | None, answer: Any) -> None:
        super().__init__(answer)
        self.store_id = store_id


class Plain(CommitOncePrepared):
    """``transactionListener=none``."""

    def __init__(self) -> None:
        self.asked: list[HalfBatch] = []

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        self.asked.append(batch)
        return COMMIT


STORES = [("shop-db", None), ("shop-db", "other-db"), ("shop-db", "none"), (None, "shop-db"), (None, "none")]


@pytest.mark.parametrize("answer", [COMMIT, UNKNOWN])
@pytest.mark.parametrize(("before", "now"), STORES)
def test_a_listener_of_another_store_is_not_believed(
    log: CommitLog, before: str | None, now: str | None, answer: Any
) -> None:
    record = prepare(log, fence_id=before)
    other = Plain() if now == NO_LISTENER_FENCE else Bearing(now, answer)
    report = CheckService(log, {"shop": other}, clock=later()).run_once()
    assert not other.asked
    assert states(log, record) == {RowState.PENDING: 4}
    assert checks(log, record) == 0
    ((half_id, sentence),) = report.problems
    assert half_id == record.half_id
    assert all(said in sentence for said in ("FenceError", before, now) if said)
    assert CheckService(log, {"shop": Bearing(before, COMMIT)}, clock=later()).run_once().ok
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
    with suppress(SystemExit), TransactionMQProducer(log, "shop", PerMessageListener(a), check_interval=None) as sends:
        sends.send_messages_in_transaction(one)
    for times in range(3):
        service = CheckService(
            another(log), {"shop": PerMessageListener(b)}, transaction_check_max=1, clock=later(60.0 + times)
        )
        ((_, sentence),) = service.run_once().problems
        assert "'database a'" in sentence
        assert "'database b'" in sentence
    assert log.pending()["check_times"].to_pylist() == [0]
    CheckService(another(log), {"shop": PerMessageListener(a)}, clock=later()).run_once()
    assert bodies(log) == ["order"]


STORE_IDS = ["", " ", " a", "a\n", "a\x00", "\ud800", "none", "x" * 201, 7, b"a"]


@pytest.mark.parametrize("store_id", STORE_IDS)
def test_a_store_s_name_that_cannot_be_kept_is_refused_at_the_door(store_id: Any) -> None:
    log, listener = InMemoryCommitLog(topics={"orders": 2}), Bearing(store_id, COMMIT)
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
    class Late(Says):
        @property
        def store_id(self) -> Any:
            return store_id

    log = InMemoryCommitLog(topics={"orders": 2})
    with (
        TransactionMQProducer(log, "shop", Late(COMMIT), check_interval=None) as sends,
        pytest.raises(ListenerError, match=r"Late\.store_id=.* is not the name of a store"),
    ):
        sends.send_messages_in_transaction(pa.table({"body": [b"order"], "topic": ["orders"]}))
    assert log.pending().num_rows == 0
    prepare(log)
    late = Late(COMMIT)
    ((_, sentence),) = CheckService(log, {"shop": late}, clock=later()).run_once().problems
    assert "is not the name of a store" in sentence
    assert not late.asked


def test_a_check_keeps_the_listener_s_reason_for_unknown_without_secrets(log: CommitLog) -> None:
    record = prepare(log)

    def waits(batch: HalfBatch) -> LocalTransactionState:
        assert batch.reason is None
        batch.reason = reasons.pop(0)
        return UNKNOWN

    reasons = [None, "the bank at https://shop:s3cret@bank/ is closed", "x" * 300]
    service = CheckService(log, {"shop": Says(waits)}, clock=later())
    for _ in range(3):
        service.run_once()
    kept = [event.reason for event in another(log).trace(half_id=record.half_id).events if event.kind == "checked"]
    assert kept == [
        "UNKNOWN from Says",
        "UNKNOWN from Says: the bank at https://***@bank/ is closed",
        f"UNKNOWN from Says: {'x' * 199}…",
    ]


# ---------------------------------------------------------------- giving up
def test_past_transaction_check_max_it_is_quarantined_without_being_asked_again(log: CommitLog) -> None:
    record = prepare(log)
    listener = Says(UNKNOWN)
    service = CheckService(log, {"shop": listener}, transaction_check_max=3, clock=later())
    for _ in range(3):
        service.run_once()
    assert states(log, record) == {RowState.PENDING: 4}
    report = service.run_once()
    assert len(listener.asked) == 3
    assert states(log, record) == {RowState.QUARANTINED: 4}
    assert report.quarantined.messages == 4
    assert report.pending == 0
    assert log.quarantined()["half_id"].to_pylist() == [record.half_id]
    last = log.state_of(record).history[-1]
    assert last.decided_by is Who.DISCARD
    assert last.reason == "3 checks were answered with UNKNOWN; transactionCheckMax is 3"
    service.run_once()
    assert len(listener.asked) == 3


def test_failed_checks_never_lead_to_discarding(log: CommitLog) -> None:
    record = prepare(log)
    service = CheckService(
        log, {"shop": Says(RuntimeError("down"))}, transaction_check_max=1, discard_policy="rollback", clock=later()
    )
    for _ in range(5):
        service.run_once()
    assert states(log, record) == {RowState.PENDING: 4}


def test_quarantine_then_resume_then_commit(log: CommitLog) -> None:
    record = prepare(log)
    listener = Says(UNKNOWN)
    clock = later()
    service = CheckService(log, {"shop": listener}, transaction_check_max=1, clock=clock)
    service.run_once()
    service.run_once()
    assert states(log, record) == {RowState.QUARANTINED: 4}
    assert log.resume(record.half_id) == 4
    clock.now = log.state_of(record).opened_at[1] + timedelta(seconds=6)
    listener.answer = COMMIT
    report = service.run_once()
    assert listener.asked[-1].check_times == 0
    assert report.committed.messages == 4
    assert len(bodies(log)) == 4


def test_discard_by_rollback_can_be_reopened_by_a_late_replay_under_the_same_attempt(log: CommitLog) -> None:
    record = prepare(log)
    listener = Says(UNKNOWN)
    service = CheckService(log, {"shop": listener}, transaction_check_max=1, discard_policy="rollback", clock=later())
    service.run_once()
    report = service.run_once()
    assert report.discarded.transactions == 1
    assert states(log, record) == {RowState.ROLLED_BACK_BY_DISCARD: 4}
    log.reopen(record, 1, (RowState.ROLLED_BACK_BY_DISCARD,), 1, Who.EXECUTE, "replay")
    listener.answer = COMMIT
    service.run_once()
    assert listener.asked[-1].attempt == 1
    assert len(bodies(log)) == 4


def test_discard_by_commit(log: CommitLog) -> None:
    record = prepare(log)
    service = CheckService(
        log, {"shop": Says(UNKNOWN)}, transaction_check_max=1, discard_policy="commit", clock=later()
    )
    service.run_once()
    report = service.run_once()
    assert report.discarded.messages == 4
    assert len(bodies(log)) == 4
    assert log.state_of(record).history[-1].decided_by is Who.DISCARD


def test_only_the_keys_that_were_checked_too_often_are_discarded(log: CommitLog) -> None:
    record = prepare(log, per=KEY, keys=["a", "b"], immunity_s=[None, 20])
    listener = Says(UNKNOWN)
    clock = later().set(record, 10)
    service = CheckService(log, {"shop": listener}, transaction_check_max=2, discard_policy="commit", clock=clock)
    service.run_once()
    service.run_once()
    clock.set(record, 20)
    report = service.run_once()
    assert (report.discarded.transactions, report.unknown.transactions) == (1, 1)
    assert bodies(log) == ["0.0"]
    assert listener.asked[-1].transactions["transaction_key"].to_pylist() == ["b"]


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (COMMIT, RowState.COMMITTED),
        (ROLLBACK, RowState.ROLLED_BACK_BY_DISCARD),
        (None, RowState.QUARANTINED),
        (UNKNOWN, RowState.QUARANTINED),
    ],
)
def test_a_users_own_policy_decides(log: CommitLog, answer: LocalTransactionState | None, state: RowState) -> None:
    told: list[tuple[HalfBatch, str]] = []

    class Mail(TransactionCheckListener):
        def resolve_discarded(self, batch: HalfBatch, reason: str) -> LocalTransactionState | None:
            told.append((batch, reason))
            return answer

    record = prepare(log)
    service = CheckService(log, {"shop": Says(UNKNOWN)}, transaction_check_max=1, discard_policy=Mail(), clock=later())
    service.run_once()
    assert told == []
    service.run_once()
    assert told[0][0].half_id == record.half_id
    assert "1 check was answered" in told[0][1]
    assert states(log, record) == {state: 4}


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK, None])
def test_what_a_replay_reopened_while_the_policy_decided_is_asked_about_again(
    log: CommitLog, answer: LocalTransactionState | None
) -> None:
    """Simulated seed 2579: the policy's old guess ended a batch of which nobody had been asked since its reopening."""
    record = prepare(log)

    class Slow(TransactionCheckListener):
        def resolve_discarded(self, batch: HalfBatch, reason: str) -> LocalTransactionState | None:
            other, mine = another(log), record.fresh_state().rows_in((RowState.PENDING,))
            other.decide(record, 1, commit={}, rollback=mine, who=Who.DISCARD, reason=reason)
            other.reopen(record, 1, (RowState.ROLLED_BACK_BY_DISCARD,), 1, Who.EXECUTE, "replay")
            return answer

    service = CheckService(log, {"shop": Says(UNKNOWN)}, transaction_check_max=1, discard_policy=Slow(), clock=later())
    service.run_once()
    report = service.run_once()
    assert states(log, record) == {RowState.PENDING: 4}
    assert report.discarded.messages == 0
    assert checks(log, record) == 0


def test_a_policy_that_raises_or_answers_nonsense_leaves_it_pending(log: CommitLog) -> None:
    class Bad(TransactionCheckListener):
        def resolve_discarded(self, batch: HalfBatch, reason: str) -> LocalTransactionState | None:
            if batch.batch_id == 0:
                raise OSError("no mail server")
            return "MAYBE"  # type: ignore[return-value]

    records = [prepare(log, i) for i in range(2)]
    service = CheckService(log, {"shop": Says(UNKNOWN)}, transaction_check_max=1, discard_policy=Bad(), clock=later())
    service.run_once()
    report = service.run_once()
    assert [states(log, r) for r in records] == [{RowState.PENDING: 4}] * 2
    assert "OSError: no mail server" in report.problems[0][1]
    assert "MAYBE" in report.problems[1][1]


@pytest.mark.parametrize("policy", ["quarantine", "rollback", "commit"])
@pytest.mark.parametrize("listeners", [{"shop": Says(COMMIT)}, {}])
def test_older_than_file_reserved_time_is_quarantined_whatever_the_policy(
    log: CommitLog, policy: str, listeners: Mapping[str, Says]
) -> None:
    record = prepare(log, immunity_s=[10**9, None])
    clock = later().set(record, 72 * HOUR - 0.001)
    service = CheckService(log, listeners, discard_policy=policy, clock=clock)
    service.run_once()
    assert states(log, record) == {RowState.PENDING: 2}  # under immunity
    clock.set(record, 72 * HOUR)
    report = service.run_once()
    assert states(log, record) == {RowState.QUARANTINED: 2}
    assert report.quarantined.messages == 2
    assert str(log.state_of(record).history[-1].reason).startswith("open for 72.0 h, which is not less than fileRes")


def test_expired_and_checked_too_often_is_left_to_the_policy(log: CommitLog) -> None:
    record = prepare(log)
    clock = later()
    service = CheckService(
        log, {"shop": Says(UNKNOWN)}, transaction_check_max=1, discard_policy="rollback", clock=clock
    )
    service.run_once()
    clock.set(record, 100 * HOUR)
    service.run_once()
    assert states(log, record) == {RowState.ROLLED_BACK_BY_DISCARD: 4}


# ---------------------------------------------------------------- someone else was faster
def test_a_verdict_that_comes_too_late_is_reported_and_the_round_goes_on(log: CommitLog) -> None:
    first, second = prepare(log, 0), prepare(log, 1)

    def answer(batch: HalfBatch) -> LocalTransactionState:
        if batch.half_id == first.half_id:  # meanwhile the sink decides
            log.decide(first, 1, commit={}, rollback=log.state_of(first).rows_in((RowState.PENDING,)), who=Who.EXECUTE)
        return COMMIT

    service = CheckService(log, {"shop": Says(answer)}, clock=later())
    report = service.run_once()
    assert [h for h, _ in report.problems] == [first.half_id]
    assert "comes too late" in report.problems[0][1]
    assert states(log, second) == {RowState.COMMITTED: 4}
    assert states(log, first) == {RowState.ROLLED_BACK: 4}
    report = service.run_once()
    assert [h for h, _ in report.problems] == [first.half_id], "a conflict is shown until a person resolves it"
    assert "log.resolve(" in report.problems[0][1]
    log.resolve(first.half_id, ROLLBACK, "looked it up")
    assert service.run_once().ok


def test_the_same_verdict_from_someone_else_is_no_problem(log: CommitLog) -> None:
    record = prepare(log)

    def answer(batch: HalfBatch) -> LocalTransactionState:
        log.decide(record, 1, commit=log.state_of(record).rows_in((RowState.PENDING,)), rollback={}, who=Who.EXECUTE)
        return COMMIT

    report = CheckService(log, {"shop": Says(answer)}, clock=later()).run_once()
    assert report.ok
    assert len(bodies(log)) == 4


def test_an_attempt_that_is_over_is_reported(log: CommitLog) -> None:
    record = prepare(log)

    def answer(batch: HalfBatch) -> LocalTransactionState:
        rows = log.state_of(record).rows_in((RowState.PENDING,))
        log.decide(record, 1, commit={}, rollback=rows, who=Who.CHECK)
        log.reopen(record, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "replay")
        return COMMIT

    report = CheckService(log, {"shop": Says(answer)}, clock=later()).run_once()
    assert "under attempt 1" in report.problems[0][1]
    assert bodies(log) == []


def test_pending_rows_of_a_half_batch_in_conflict_wait_for_a_person(log: CommitLog) -> None:
    record = prepare(log, per=KEY, keys=["a", "b"])
    state = log.state_of(record)
    pending = state.rows_in((RowState.PENDING,))
    batch = log.half_batch(record, state, 1, pending)
    masks = split_by_verdict(log, record, pending, batch, batch.verdicts(rollback=["a"], otherwise=UNKNOWN))
    log.decide(record, 1, commit={}, rollback=masks.rollback, who=Who.EXECUTE)
    with pytest.raises(VerdictConflictError):
        log.decide(record, 1, commit=masks.rollback, rollback={}, who=Who.EXECUTE)
    listener = Says(COMMIT)
    service = CheckService(log, {"shop": listener}, clock=later())
    for _ in range(2):
        report = service.run_once()
        assert [h for h, _ in report.problems] == [record.half_id]
    assert listener.asked == []
    assert log.conflicts() == [record.half_id]


# ---------------------------------------------------------------- bad half batches
def test_a_half_batch_that_cannot_be_read_does_not_stop_the_round(delta_log: CommitLog) -> None:
    bad, good = prepare(delta_log, 0), prepare(delta_log, 1)
    path = Path(delta_log.path) / "half" / bad.files[0].path
    content = path.read_bytes()
    path.unlink()
    service = CheckService(delta_log, {"shop": Says(COMMIT)}, clock=later())
    report = service.run_once()
    assert states(delta_log, good) == {RowState.COMMITTED: 4}
    assert [h for h, _ in report.problems] == [bad.half_id]
    assert "it cannot be checked: LostFileError" in report.problems[0][1]
    assert report.pending == 1
    path.write_bytes(content[:-50])
    assert not service.run_once().ok
    path.write_bytes(content)
    assert service.run_once().committed.messages == 4


def test_op_rows_changed_by_hand_stop_only_their_half_batch(log: CommitLog) -> None:
    from tests.support.inside import Kind, OpRow

    bad, good = prepare(log, 0), prepare(log, 1)
    log.ledger.append(lambda: [OpRow(Kind.CHECK, bad.half_id, 7, None, 1, 1, Who.CHECK)])
    report = CheckService(log, {"shop": Says(COMMIT)}, clock=later()).run_once()
    assert states(log, good) == {RowState.COMMITTED: 4}
    assert [h for h, _ in report.problems] == [bad.half_id]
    assert "CorruptLogError" in report.problems[0][1]


def test_a_bad_half_batch_below_the_mark_hides_nothing(delta_log: CommitLog) -> None:
    bad = prepare(delta_log, 0)
    service = CheckService(delta_log, {"shop": Says(ROLLBACK)}, clock=later())
    service.run_once()
    assert delta_log.ledger.low_water_ms >= bad.prepared_ms
    delta_log.reopen(bad, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "replay")
    (Path(delta_log.path) / "half" / bad.files[0].path).unlink()
    good = prepare(delta_log, 1)
    report = CheckService(another(delta_log), {"shop": Says(COMMIT)}, clock=later()).run_once()
    assert states(delta_log, good) == {RowState.COMMITTED: 4}
    assert bad.half_id in [h for h, _ in report.problems]


# ---------------------------------------------------------------- the time limit
def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_what_a_round_finds_out_shares_commits(log: CommitLog) -> None:
    """Each half batch had a commit of its own: of thousands that a crash left, a round settled a few hundred."""
    records = [prepare(log, i) for i in range(40)]
    before = log.refresh()
    verdicts = {r.half_id: (COMMIT, ROLLBACK)[i % 2] for i, r in enumerate(records)}
    report = CheckService(log, {"shop": Says(lambda batch: verdicts[batch.half_id])}, clock=later()).run_once()
    assert (report.committed.transactions, report.rolled_back.transactions, report.pending) == (20, 20, 0)
    assert log.refresh() - before < 10  # of which one is the mark
    assert all(states(log, r) == {AFTER[verdicts[r.half_id]]: 4} for r in records)


def test_a_listener_that_hangs_holds_up_nothing_that_was_decided(log: CommitLog) -> None:
    records = [prepare(log, i) for i in range(4)]

    def answer(batch: HalfBatch) -> Any:
        if batch.half_id == records[3].half_id:
            wait_for(lambda: another(log).open_half_ids() == [records[3].half_id])
        return COMMIT

    assert CheckService(log, {"shop": Says(answer)}, clock=later()).run_once().pending == 0


def test_a_decision_that_cannot_be_made_stops_no_other(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [prepare(log, i) for i in range(5)]
    decide_many = log.decide_many

    def fails_for_one(decisions: Any) -> Any:
        if any(d.record.half_id == records[2].half_id for d in decisions):
            raise LostFileError("its file is gone")
        return decide_many(decisions)

    monkeypatch.setattr(log, "decide_many", fails_for_one)
    report = CheckService(log, {"shop": Says(COMMIT)}, clock=later()).run_once()
    assert [(half_id, "its file is gone" in said) for half_id, said in report.problems] == [(records[2].half_id, True)]
    assert report.pending == 1


def test_two_attempts_of_a_half_batch_are_decided_one_after_the_other(log: CommitLog) -> None:
    record = prepare(log, per=MESSAGE)
    half, _ = split(pending(log, record), 2)
    log.decide(record, 1, rollback=half, who=Who.CHECK)
    log.reopen(record, 1, [RowState.ROLLED_BACK_BY_CHECK], 2, Who.EXECUTE, "again")
    listener = Says(COMMIT)
    assert CheckService(log, {"shop": listener}, clock=later()).run_once().problems == []
    assert [batch.attempt for batch in listener.asked] == [1, 2]
    assert states(log, record) == {RowState.COMMITTED: 4}


def test_a_hung_listener_ends_the_round_in_time_and_the_next_begins_with_the_rest(log: CommitLog) -> None:
    hung, second, third = (prepare(log, i) for i in range(3))
    release = threading.Event()
    order: list[str] = []
    threads: list[threading.Thread] = []

    def answer(batch: HalfBatch) -> LocalTransactionState:
        order.append(batch.half_id)
        threads.append(threading.current_thread())
        if batch.half_id == hung.half_id:
            release.wait(DEADLINE_S)
        return COMMIT

    service = CheckService(log, {"shop": Says(answer)}, round_timeout=0.2, clock=later())
    started = time.monotonic()
    report = service.run_once()
    assert time.monotonic() - started < DEADLINE_S / 2
    assert report.skipped["left_over"] == 2
    assert "has not answered" in report.problems[0][1]
    service.round_timeout = DEADLINE_S
    report = service.run_once()
    assert order == [hung.half_id, second.half_id, third.half_id]
    assert states(log, third) == {RowState.COMMITTED: 4}
    assert states(log, hung) == {RowState.PENDING: 4}
    assert [h for h, _ in report.problems] == [hung.half_id]
    release.set()
    for thread in threads:  # an answer is there when its thread has ended
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    report = service.run_once()
    assert report.committed.messages == 4, "an answer that came late is used, and nobody is asked twice"
    assert len(order) == 3
    assert report.ok


def test_a_slow_half_batch_at_the_front_starves_nobody(log: CommitLog) -> None:
    records = [prepare(log, i) for i in range(4)]
    listener = Says(lambda batch: time.sleep(0.15) if batch.half_id == records[0].half_id else UNKNOWN)
    service = CheckService(log, {"shop": listener}, round_timeout=0.1, clock=later())
    for _ in range(6):
        service.run_once()
    assert min(checks(log, r) for r in records[1:]) >= 1


def test_too_many_hung_calls_stop_the_asking(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "HUNG_CALLS_MAX", 1)
    prepare(log, 0)
    prepare(log, 1)
    release = threading.Event()
    listener = Says(lambda batch: release.wait(DEADLINE_S) and None)
    service = CheckService(log, {"shop": listener}, round_timeout=0.05, clock=later())
    service.run_once()
    report = service.run_once()
    assert len(listener.asked) == 1
    assert any("restart the checker" in sentence for _, sentence in report.problems)
    release.set()


def test_without_a_time_limit_listeners_are_called_from_the_callers_thread(log: CommitLog) -> None:
    prepare(log)
    threads: list[threading.Thread] = []
    listener = Says(lambda batch: threads.append(threading.current_thread()))
    CheckService(log, {"shop": listener}, round_timeout=None, clock=later()).run_once()
    assert threads == [threading.current_thread()]


# ---------------------------------------------------------------- the loop and the mark
def test_run_goes_on_until_it_is_told_to_stop(log: CommitLog) -> None:
    prepare(log)
    stop = threading.Event()
    reports: list[CheckReport] = []

    def seen(report: CheckReport) -> None:
        reports.append(report)
        if len(reports) == 3:
            stop.set()

    service = CheckService(log, {"shop": Says(COMMIT)}, transaction_check_interval=0.01, clock=later())
    thread = threading.Thread(target=service.run, args=(stop, seen))
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert [r.committed.messages for r in reports] == [4, 0, 0]


def test_stopping_does_not_wait_for_a_hung_listener(log: CommitLog) -> None:
    prepare(log)
    stop, asked, release = threading.Event(), threading.Event(), threading.Event()

    def answer(batch: HalfBatch) -> None:
        asked.set()
        release.wait(DEADLINE_S)

    service = CheckService(log, {"shop": Says(answer)}, clock=later())
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    assert asked.wait(DEADLINE_S)
    stop.set()
    thread.join(DEADLINE_S / 2)
    assert not thread.is_alive()
    release.set()


def test_a_round_that_fails_as_a_whole_is_reported_and_tried_again(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(log)
    stop = threading.Event()
    reports: list[CheckReport] = []
    prepared_after = log.half.prepared_after

    def seen(report: CheckReport) -> None:
        reports.append(report)
        monkeypatch.setattr(log.half, "prepared_after", prepared_after)
        if len(reports) == 2:
            stop.set()

    def broken(low_water_ms: int) -> PreparedBatches:
        raise OSError("the storage is away")

    monkeypatch.setattr(log.half, "prepared_after", broken)
    CheckService(log, {"shop": Says(COMMIT)}, transaction_check_interval=0.01, clock=later()).run(stop, seen)
    assert reports[0].problems == [(None, "the round failed with OSError: the storage is away")]
    assert reports[1].committed.messages == 4


def test_a_round_moves_the_low_water_mark_over_what_is_open_and_names_it(log: CommitLog) -> None:
    _, second, third = (prepare(log, i) for i in range(3))
    listener = Says(lambda batch: UNKNOWN if batch.half_id == second.half_id else COMMIT)
    CheckService(log, {"shop": listener}, clock=later()).run_once()
    assert log.ledger.low_water_ms >= third.prepared_ms
    assert set(log.ledger.followed.below) == {second.half_id}
    listener.answer = COMMIT
    CheckService(another(log), {"shop": listener}, clock=later()).run_once()
    log.ledger.refresh()
    assert not log.ledger.followed.below


# ---------------------------------------------------------------- reports, settings, imports
def test_a_report_reads_as_a_paragraph_and_as_json(log: CommitLog) -> None:
    prepare(log, 0)
    prepare(log, 1, group="billing", app_id="b")
    failing = prepare(log, 2)
    listener = Says(lambda batch: ValueError("no") if batch.half_id == failing.half_id else COMMIT)
    report = CheckService(log, {"shop": listener}, clock=later()).run_once()
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
    assert str(CheckService(InMemoryCommitLog(), {}).run_once()) == "nothing was checked; 0 half batches are pending"


class OfRocketMQ(Says):
    """With RocketMQ's arguments. Every send was UNKNOWN, and only a log said why."""

    def execute_local_transaction(self, message: Any, arg: Any) -> Any:  # type: ignore[override]
        return COMMIT


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"transaction_timeout": -1}, OptionError),
        ({"transaction_timeout": "6s"}, OptionError),
        ({"transaction_check_interval": 0}, OptionError),
        ({"transaction_check_max": 0}, OptionError),
        ({"transaction_check_max": 251}, OptionError),
        ({"transaction_check_max": 1.5}, OptionError),
        ({"file_reserved_time": float("nan")}, OptionError),
        ({"round_timeout": 0}, OptionError),
        ({"discard_policy": "drop"}, OptionError),
        ({"discard_policy": TransactionCheckListener}, OptionError),
        ({"discard_policy": None}, OptionError),
        ({"listeners": [Says()]}, OptionError),
        ({"listeners": {"shop": object()}}, ListenerError),
        ({"listeners": {"shop": Says}}, ListenerError),
        ({"listeners": {"shop": OfRocketMQ()}}, ListenerError),
        ({"listeners": {"sh op": Says()}}, txmq.errors.MessageError),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        CheckService(InMemoryCommitLog(), **{"listeners": {}, **settings})


def test_policies_have_names_and_the_nearest_is_offered() -> None:
    assert repr(require_policy("Rollback")) == "NamedPolicy('rollback')"
    assert repr(require_policy(DiscardPolicy.COMMIT)) == "NamedPolicy('commit')"
    with pytest.raises(OptionError, match="did you mean 'quarantine'"):
        require_policy("quarantin")


def test_a_path_opens_the_log(delta_log: CommitLog) -> None:
    prepare(delta_log)
    assert CheckService(delta_log.path, {"shop": Says(COMMIT)}, clock=later()).run_once().committed.messages == 4
