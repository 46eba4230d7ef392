"""A rollback says why, and whether the local transaction refused or never happened: whichever way it takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from rmq_spark import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    CommitLog,
    HalfBatch,
    Message,
    PerMessageListener,
    Rollback,
    SqlTransactionListener,
    TransactionMQProducer,
)
from rmq_spark._core.inspect.find import find_by_id
from rmq_spark._core.vocabulary.verdicts import reason_for_log
from rmq_spark.errors import StorageError, VerdictError
from tests.support.half_batches import another, bodies, commit, decide_one, let_leave, pending, prepare, split
from tests.support.inside import BATCH, KEY, MESSAGE, HalfRecord, OpKind, RolledBack, RowState, Verdict, Who
from tests.support.listeners import Scripted
from tests.support.meanwhile import dies_at
from tests.support.sends import raising
from tests.support.sink_batches import KEYS, check, header, prepared, send, visible

pytestmark = pytest.mark.log("memory", "delta")


def told(log: CommitLog, record: HalfRecord) -> dict[str | None, tuple[int, str, bool | None]]:
    """By reason: how many messages an op row rolled back, by whom, and whether they were refused."""
    found: dict[str | None, tuple[int, str, bool | None]] = {}
    for row in another(log).engine.state_of(record).history:
        if row.kind is OpKind.ROLLBACK:
            before, *_ = found.get(row.reason, (0,))
            found[row.reason] = (before + row.count, str(row.decided_by), row.refused)
    return found


def let_all_leave(log: CommitLog) -> None:
    commit(log, prepare(log, 1))  # the last batch of an application stays
    let_leave(log)


# ---------------------------------------------------------------- what was refused is final
class Shop:
    """A database whose work rejects orders, and writes them down as rejected."""

    def __init__(self, folder: Path) -> None:
        self.engine = sa.create_engine(f"sqlite:///{folder}/shop.db")
        self.ran = 0
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE rejected (id TEXT PRIMARY KEY)")
        self.listener = SqlTransactionListener(self.engine, self.work)
        self.listener.create_fence()

    def work(self, connection: sa.Connection, batch: HalfBatch) -> Any:
        self.ran += 1
        rejected = {"b": "out of stock", "c": "no such customer"}
        for key in rejected:
            connection.exec_driver_sql("INSERT INTO rejected VALUES (?)", (key,))
        return batch.verdicts(rollback=rejected)


def test_what_work_rejected_is_not_decided_again_after_a_crash_before_the_op_marker(
    log: CommitLog, tmp_path: Path
) -> None:
    shop = Shop(tmp_path)
    head = header(KEY, fence_id=shop.listener.store_id)
    with dies_at("executed"):
        send(log, shop.listener, head)
    outcome = send(another(log), shop.listener, head)
    assert shop.ran == 1
    assert outcome.attempt == 1
    assert outcome.messages == {
        RowState.COMMITTED: len(KEYS) - KEYS.count("b") - KEYS.count("c"),
        RowState.ROLLED_BACK: KEYS.count("b") + KEYS.count("c"),
    }
    record = log.engine.get("app:0")
    assert told(log, record) == {
        "out of stock": (KEYS.count("b"), "check", True),
        "no such customer": (KEYS.count("c"), "check", True),
    }


def test_a_batch_of_which_all_is_rejected_keeps_what_its_work_wrote_down(log: CommitLog, tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.listener = SqlTransactionListener(
        shop.engine, lambda c, b: (shop.work(c, b), b.verdicts(rollback=dict.fromkeys(KEYS, "closed")))[1]
    )
    send(log, shop.listener, header(KEY, fence_id=shop.listener.store_id))
    with shop.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM rejected").scalar_one() == 2
    assert visible(log) == []


REFUSALS: dict[str, tuple[str, Any]] = {
    "returned": (BATCH, lambda batch: Rollback("no credit", refused=True)),
    "raised": (BATCH, Rollback("no credit", refused=True)),
    "in a list": (MESSAGE, lambda batch: [Rollback("no credit", refused=True)] * batch.transactions.num_rows),
    "by key": (KEY, lambda batch: batch.verdicts(refused=dict.fromkeys(KEYS, "no credit"))),
}


@pytest.mark.parametrize("how", REFUSALS)
@pytest.mark.parametrize("who_asks", ["a check service", "a replay"])
def test_a_check_that_knows_of_a_refusal_ends_the_transaction(log: CommitLog, how: str, who_asks: str) -> None:
    per, answer = REFUSALS[how]
    record = prepared(log, per)
    listener = Scripted(AssertionError("it must not run again"), answer)
    if who_asks == "a check service":
        check(log, listener)
    outcome = send(another(log), listener, header(per))
    assert listener.executed == []
    assert outcome.messages == {RowState.ROLLED_BACK: len(KEYS)}
    assert told(log, record) == {"no credit": (len(KEYS), "check", True)}


def test_a_check_that_says_never_happened_lets_a_replay_run_it(log: CommitLog) -> None:
    record = prepared(log)
    listener = Scripted(check=Rollback("no row of it"))
    outcome = send(another(log), listener, header())
    assert [batch.attempt for batch in listener.executed] == [2]
    assert outcome.messages == {RowState.COMMITTED: len(KEYS)}
    assert told(log, record) == {"no row of it": (len(KEYS), "check", None)}


def test_some_are_refused_and_others_never_happened(log: CommitLog) -> None:
    prepared(log, KEY)
    listener = Scripted(check=lambda batch: batch.verdicts(refused={"a": "no"}, otherwise=ROLLBACK_MESSAGE))
    outcome = send(another(log), listener, header(KEY))
    refused = KEYS.count("a")
    assert outcome.messages == {RowState.ROLLED_BACK: refused, RowState.COMMITTED: len(KEYS) - refused}


def test_a_key_cannot_be_refused_and_have_never_happened(log: CommitLog) -> None:
    def both(batch: HalfBatch) -> Any:
        with pytest.raises(VerdictError, match=r"'a' is named for two verdicts: ROLLBACK_MESSAGE and .* \(refused\)"):
            batch.verdicts(rollback=["a"], refused=["a"])
        with pytest.raises(VerdictError, match="COMMIT_MESSAGE was given a mapping"):
            batch.verdicts(commit={"a": "why"})
        for name in ("commit", "rollback", "refused", "unknown"):  # the keys of "ab" were taken for "a" and "b"
            for one in ("ab", b"ab", 7, None):
                with pytest.raises(VerdictError, match=rf"{name}={one!r} is {type(one).__name__}: a list of keys"):
                    batch.verdicts(**{name: one})
        return UNKNOWN

    send(log, listener := Scripted(both), header(KEY))
    assert listener.executed


# ---------------------------------------------------------------- the reason, whichever way
def per_key(batch: HalfBatch) -> Any:
    return batch.verdicts(rollback={"a": "why a", "b": "why b"})


def test_each_transaction_of_a_half_batch_keeps_its_own_reason(log: CommitLog) -> None:
    send(log, Scripted(per_key), header(KEY))
    record = log.engine.get("app:0")
    assert told(log, record) == {
        "why a": (KEYS.count("a"), "execute", True),
        "why b": (KEYS.count("b"), "execute", True),
    }
    trace = log.trace("app:0:1:a")
    assert [(e.reason, e.refused) for e in trace.events if e.kind == "rolled_back"] == [("why a", True)]
    assert "why a" in str(trace)
    found = find_by_id(log.engine, 10, half_id="app:0")
    assert set(zip(found["state"].to_pylist(), found["reason"].to_pylist(), strict=True)) == {
        ("committed", None),
        ("rolled_back", "why a"),
        ("rolled_back", "why b"),
    }


class Refuses:
    """A listener with RocketMQ's signature."""

    def execute_local_transaction(self, msg: Any, arg: Any) -> Any:
        if msg.body == b"raise":
            raise Rollback("raised")
        return Rollback("returned") if msg.body == b"return" else COMMIT_MESSAGE

    def check_local_transaction(self, msg: Any) -> Any:
        return Rollback("as recorded", refused=True)


@pytest.mark.parametrize("way", ["blocking", "together", "asynchronous"])
def test_sends_of_a_producer_keep_the_reason(log: CommitLog, way: str) -> None:
    texts = ["raise", "return", "fine"]
    messages = [Message("orders", text) for text in texts]
    with TransactionMQProducer(log, "shop", PerMessageListener(Refuses()), check_interval=None) as producer:
        if way == "blocking":
            results = [producer.send_message_in_transaction(message) for message in messages]
        elif way == "asynchronous":
            results = [f.result(30) for f in [producer.send_message_in_transaction_async(m) for m in messages]]
        else:
            with ThreadPoolExecutor(3) as pool:
                results = list(pool.map(producer.send_message_in_transaction, messages))
    reasons = [
        next((e.reason for e in another(log).trace(half_id=r.half_id).events if e.kind == "rolled_back"), None)
        for r in results
    ]
    assert reasons == ["raised", "returned", None]


def test_a_checked_message_is_refused_for_the_recorded_reason(log: CommitLog) -> None:
    record = prepared(log, MESSAGE)
    check(log, PerMessageListener(Refuses()))
    assert told(log, record) == {"as recorded": (len(KEYS), "check", True)}


def test_the_batch_s_reason_is_that_of_rollbacks_without_one(log: CommitLog) -> None:
    def answer(batch: HalfBatch) -> Any:
        batch.reason = "the day is closed"
        return batch.verdicts(rollback=["a"], refused={"b": "no stock"})

    send(log, Scripted(answer), header(KEY))
    assert set(told(log, log.engine.get("app:0"))) == {"the day is closed", "no stock"}


def test_reasons_outlive_the_half_batch_and_its_op_rows(log: CommitLog) -> None:
    send(log, Scripted(per_key), header(KEY))
    let_all_leave(log)
    trace = another(log).trace(half_id="app:0")
    assert trace.where == "left"
    assert {(e.reason, e.refused, e.messages) for e in trace.events if e.kind == "rolled_back"} == {
        ("why a", True, KEYS.count("a")),
        ("why b", True, KEYS.count("b")),
    }
    assert trace.outcome["rolled_back"] == KEYS.count("a") + KEYS.count("b")


def test_more_reasons_than_are_archived_hide_no_other_decision(log: CommitLog) -> None:
    keys = [f"k{i}" for i in range(300)]
    record = prepare(log, 0, {"body": keys, "k": keys}, per="key", key="k")
    why = {key: f"reason {key}" for key in keys[::2]}
    check(log, Scripted(check=lambda batch: batch.verdicts(refused=why)), "group")
    let_all_leave(log)
    events = another(log).trace(half_id=record.half_id).events
    assert sum(e.messages for e in events if e.kind == "committed") == 150
    rolled_back = [e for e in events if e.kind == "rolled_back"]
    assert sum(e.messages for e in rolled_back) == 150
    assert rolled_back[-1].reason == "other reasons, which are not kept"
    assert {e.reason for e in rolled_back[:-1]} < set(why.values())


def test_a_refusal_by_a_check_is_archived_as_final(log: CommitLog) -> None:
    record = prepared(log)
    rows = pending(log, record)
    parts = [RolledBack("no", True, dict(rows.ranges()))]
    decide_one(log.engine, record, 1, rollback=rows, who=Who.CHECK, rolled_back=parts)
    let_all_leave(log)
    kept = another(log).engine.archived("app:0")
    assert kept is not None
    assert kept.final
    listener = Scripted(AssertionError("it must not run again"))
    assert send(another(log), listener, header()).messages == {RowState.ROLLED_BACK: len(KEYS)}


# ---------------------------------------------------------------- decisions and their parts
def test_what_was_rolled_back_before_keeps_its_first_reason(log: CommitLog) -> None:
    record = prepare(log, 0, 6)
    rows = pending(log, record)
    rest, chosen = split(rows, 2)
    decide_one(log.engine, record, 1, rollback=chosen, who=Who.EXECUTE, reason="first")
    parts = [RolledBack("second", False, dict(rows.ranges()))]
    decide_one(log.engine, record, 1, rollback=rows, who=Who.EXECUTE, rolled_back=parts)
    assert told(log, record) == {"first": (chosen.count, "execute", True), "second": (rest.count, "execute", True)}
    state = log.engine.state_of(record)
    assert [state.reason_of(0, n) for n in range(6)] == [("first", "second")[n % 2] for n in range(6)]


def test_thousands_of_reasons_are_told_apart(log: CommitLog) -> None:
    keys = [f"k{i % 1500}" for i in range(3000)]
    prepare(log, 0, {"body": keys, "k": keys}, per="key", key="k", partitions=2)
    why = {f"k{i}": f"reason {i}" for i in range(0, 1500, 3)}
    check(log, Scripted(check=lambda batch: batch.verdicts(refused=why)), "group")
    found = find_by_id(log.engine, 5000, half_id="app:0").to_pylist()
    said = {row["body"].decode(): row["reason"] for row in found}
    assert said == {f"k{i}": f"reason {i}" if i % 3 == 0 else None for i in range(1500)}
    assert len(bodies(log)) == 2000


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (None, None),
        ("  ", None),
        ("two\nlines\x00", "two lines\N{REPLACEMENT CHARACTER}"),
        ("half of a pair \ud83d", "half of a pair \N{REPLACEMENT CHARACTER}"),
        ("password=hunter22222", "password=***"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 199 + "…"),
        (4711, "4711"),
        (StorageError("the disk"), "the disk"),
    ],
)
def test_a_reason_is_kept_as_text_that_harms_nobody(said: object, kept: str | None) -> None:
    assert reason_for_log(said) == kept
    assert pa.array([kept]).to_pylist() == [kept]


def test_a_lone_surrogate_in_a_reason_fails_no_commit(log: CommitLog, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    listener = SqlTransactionListener(engine, raising(Rollback("bad \ud83d\x00 text")))
    listener.create_fence()
    send(log, listener, header(fence_id=listener.store_id))
    record = log.engine.get("app:0")
    (reason,) = told(log, record)
    assert reason == "bad \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} text"
    batch = log.engine.half_batch(record, record.fresh_state(), 1, record.all_rows)
    assert listener.check_local_transaction(batch).each(1) == [Verdict(ROLLBACK_MESSAGE, reason, True)]
