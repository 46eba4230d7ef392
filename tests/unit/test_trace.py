"""A trace tells what became of a transaction, and says what it cannot tell any more."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, CommitLog
from rmq_spark.errors import HalfBatchNotFoundError, VerdictConflictError
from tests.support.half_batches import (
    another,
    commit,
    count_check,
    decide_one,
    forget,
    let_leave,
    pending,
    prepare,
    roll_back,
    send,
    split,
)
from tests.support.inside import Graces, Leaver, RowState, Trace, Who

pytestmark = pytest.mark.log("memory", "delta", orders=2)


def kinds(trace: Trace) -> list[str]:
    return [str(event.kind) for event in trace.events]


def by_key(log: CommitLog) -> None:
    """A half batch of the keys a (three messages), b and c: a is committed, b rolled back, c rolled back by a check."""
    columns = {"body": ["1", "2", "3", "4", "5"], "key": list("abaca"), "queue_id": pa.array([0] * 5, pa.int32())}
    record = prepare(log, 1, columns, per="key", key="key")
    rows = pending(log, record)
    (file_no,) = rows
    a, b, c = (rows & {file_no: bytes(x == key for x in "abaca")} for key in "abc")
    log.engine.ledger.lease([record], 30)
    decide_one(log.engine, record, 1, commit=a, rollback=b, who=Who.EXECUTE, reason="2 has no total")
    count_check(log.engine, record, 1, c, "the database was away")
    decide_one(log.engine, record, 1, rollback=c, who=Who.CHECK)
    prepare(log, 2, 1)  # so that it is not the last one of its application


def test_a_half_batch_tells_everything_while_it_is_in_half(log: CommitLog) -> None:
    by_key(log)
    found = another(log).trace(half_id="app:1")
    assert kinds(found) == ["prepared", "leased", "committed", "rolled_back", "checked", "rolled_back"]
    assert [(e.messages, e.decided_by, e.reason) for e in found.events[2:]] == [
        (3, "execute", "2 has no total"),
        (1, "execute", "2 has no total"),
        (1, "check", "the database was away"),
        (1, "check", None),
    ]
    assert found.events[2].places == (("orders", 0, 0, 2),)
    assert (found.where, found.messages, found.producer_group, found.topics) == ("half", 5, "group", ("orders",))
    assert found.outcome == {"committed": 3, "rolled_back": 1, "rolled_back_by_check": 1}
    assert found.lease_until is not None
    log.drain()
    drained = another(log).trace(half_id="app:1")
    assert (kinds(drained)[-1], drained.events[-1].messages) == ("drained", 3)
    assert json.loads(json.dumps(drained.to_dict()))["events"][2]["places"][0]["last_offset"] == 2
    assert "rolled_back by execute, 1 message: 2 has no total" in str(drained)


def test_a_transaction_and_a_message_tell_only_their_own_story(log: CommitLog) -> None:
    by_key(log)
    assert set(log.read("orders")["transaction_id"].to_pylist()) == {"app:1:1:a"}
    a, b = log.trace("app:1:1:a"), log.trace("app:1:1:b")
    assert (a.messages, a.outcome, kinds(a)) == (3, {"committed": 3}, ["prepared", "leased", "committed"])
    assert (b.messages, b.outcome, kinds(b)) == (1, {"rolled_back": 1}, ["prepared", "leased", "rolled_back"])
    third = log.trace(message_id="app:1:0.4")
    assert third.events[-1].places == (("orders", 0, 2, 2),)
    for transaction_id, words in (
        ("app:1:1:z", "no transaction 'app:1:1:z'"),
        ("app:1:1:caf\udce9", "has no transaction 'app:1:1:caf"),
        ("app:1:1", "are named app:1:<attempt>:<key>"),
        ("app:1:2:a", "names attempt 2, and the newest one of these messages is 1"),
    ):
        with pytest.raises(HalfBatchNotFoundError, match=words):
            log.trace(transaction_id)
    with pytest.raises(HalfBatchNotFoundError, match=r"no message 'app:1:0\.5'"):
        log.trace(message_id="app:1:0.5")


def test_a_transaction_of_one_message_tells_its_attempts(log: CommitLog) -> None:
    record = prepare(log, 1, 6, per="message")
    some, others = split(pending(log, record), 2)
    decide_one(log.engine, record, 1, rollback=some, who=Who.CHECK, reason="never happened")
    log.engine.ledger.reopen(record, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "executed again")
    log.engine.ledger.quarantine(record, 1, others, Who.DISCARD, "asked 15 times")
    commit(log, record, 2)
    again = log.trace("app:1:2:0.1")
    assert kinds(again) == ["prepared", "rolled_back", "reopened", "committed"]
    assert [e.attempt for e in again.events] == [None, 1, 2, 2]
    assert again.attempt == 2
    hidden = log.trace("app:1:1:0.0")
    assert (kinds(hidden), hidden.outcome) == (["prepared", "quarantined"], {"quarantined": 1})
    assert log.trace("app:1:1:0.1") == again.__class__(**{**vars(again), "transaction_id": "app:1:1:0.1"})


def test_a_conflict_and_the_person_who_resolved_it_are_told(log: CommitLog) -> None:
    record = prepare(log, 1)
    roll_back(log, record)
    with pytest.raises(VerdictConflictError):
        decide_one(log.engine, record, 1, commit=record.fresh_state().rows_in((RowState.PENDING,)), who=Who.CHECK)
    found = log.trace("app:1:1")
    assert found.in_conflict
    assert (kinds(found)[-1], found.events[-1].verdict) == ("conflict", str(COMMIT_MESSAGE))
    for other in (2, 3):  # each mark repeats an open conflict, which was told as one more late verdict
        commit(log, prepare(log, other))
        log.engine.ledger.mark()
    assert log.trace("app:1:1").events == found.events
    log.resolve("app:1", ROLLBACK_MESSAGE, "the shop says no")
    found = log.trace("app:1:1")
    assert not found.in_conflict
    last = found.events[-1]
    assert (str(last.kind), last.decided_by, last.reason) == ("conflict_resolved", "admin", "the shop says no")


def test_what_left_and_was_pruned_tells_its_decisions_and_places(log: CommitLog) -> None:
    by_key(log)
    let_leave(log)
    found = another(log).trace(half_id="app:1")
    assert found.where == "left"
    assert found.outcome == {"committed": 3, "rolled_back": 1, "rolled_back_by_check": 1}
    assert kinds(found)[0] == "prepared"
    assert {"committed", "placed", "rolled_back", "drained", "archived"} <= set(kinds(found))
    assert [e.places for e in found.events if e.places] == [(("orders", 0, 0, 2),)]
    assert [e.reason for e in found.events if str(e.kind) == "committed"] == ["2 has no total"]
    assert found.unknown == (
        "checks and leases are forgotten: upkeep pruned what op said of it, but for the decisions",
    )
    a = another(log).trace("app:1:1:a")
    assert (a.messages, a.outcome) == (3, {"committed": 3})
    assert "which had 5 messages" in a.unknown[1]
    b = another(log).trace("app:1:1:b")
    assert (b.messages, b.outcome) == (0, {})
    assert "it was rolled back, or has expired, or there never was such a one" in b.unknown[2]
    assert another(log).trace(message_id="app:1:0.2").events[0].messages == 1


def test_what_is_about_to_leave_or_is_not_pruned_yet_tells_everything(log: CommitLog) -> None:
    by_key(log)
    record = prepare(log, 0, 3, app="each", per="message")
    rows = pending(log, record)
    decide_one(log.engine, record, 1, rollback=rows, who=Who.CHECK, reason="never happened")
    prepare(log, 1, 1, app="each")
    log.drain()
    log.engine.ledger.mark()
    leaver = Leaver(another(log).engine, Graces(0, 0, 1e9))
    assert leaver.archive() == 2
    found = another(log).trace("app:1:1:b")
    assert (found.where, found.outcome, found.messages) == ("leaving", {"rolled_back": 1}, 1)
    assert kinds(found) == ["prepared", "leased", "rolled_back", "archived"]
    assert another(log).trace("each:0:1:0.1").outcome == {"rolled_back_by_check": 1}
    leaver.remove()
    left = another(log).trace("each:0:1:0.1")
    assert (left.where, left.outcome) == ("left", {"rolled_back_by_check": 1})
    assert kinds(left)[1:] == ["rolled_back", "archived"]
    assert another(log).trace("app:1:1:a").messages == 3
    assert another(log).trace(half_id="app:1").unknown == ()


def test_what_is_forgotten_tells_where_its_messages_stand(log: CommitLog) -> None:
    commit(log, send(log, "key"))
    roll_back(log, send(log, "gone"))
    for batch_id in range(2):
        roll_back(log, prepare(log, batch_id))
    forget(log)
    found = another(log).trace("key:0:1")
    assert (found.where, found.messages, kinds(found)) == ("forgotten", 5, ["placed", "drained"])
    assert "is forgotten" in found.unknown[0]
    with pytest.raises(HalfBatchNotFoundError, match="no half batch 'gone:0' in this commit log"):
        another(log).trace(half_id="gone:0")
    with pytest.raises(HalfBatchNotFoundError, match="prepared batches up to 1, so it was settled"):
        another(log).trace(half_id="app:0")


@pytest.mark.log("memory")
@pytest.mark.parametrize("half_id", ["app:\ud800", "\ud800:1", "app:\u0661", "", ":", "\0:1"])
def test_what_no_half_batch_can_be_called_is_not_found(log: CommitLog, half_id: str) -> None:
    """A lone surrogate raised UnicodeEncodeError."""
    for ask in (lambda: log.trace(half_id=half_id), lambda: log.engine.get(half_id), lambda: log.resume(half_id)):
        with pytest.raises(HalfBatchNotFoundError, match="no half batch"):
            ask()


def test_a_message_that_waits_says_for_whom(log: CommitLog) -> None:
    """It said that it waits for an earlier message, and not for which."""
    log.create_topic("ordered", 1, fifo=True)
    first, other, second, third = (
        prepare(log, i, {"body": ["x"], "sharding_key": [key]}, topic="ordered")
        for i, key in enumerate(("k", "other", "k", "k"))
    )
    for record in (second, third):
        commit(log, record)
    handle = another(log)
    assert handle.trace(half_id=second.half_id).waits_for == (first.half_id,)
    assert handle.trace(half_id=third.half_id).waits_for == (first.half_id,)
    assert handle.trace(half_id=first.half_id).waits_for == ()
    commit(log, first)
    assert another(log).trace(half_id=third.half_id).waits_for == ()
    assert other.half_id in log.engine.open_half_ids()
