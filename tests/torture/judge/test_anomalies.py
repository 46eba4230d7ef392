"""The anomaly checker finds each kind of anomaly in a history made by hand, and nothing in good ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.torture.judge.anomalies import AnomalyKind, Rules, find_anomalies, kinds_of
from tests.torture.judge.history import FINAL, Event, History, Kind, Phase, payload_hash

COMMIT, ROLLBACK, UNKNOWN = "COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOWN"
BEGIN, OK = Phase.BEGIN, Phase.OK
TOPIC = "orders"
RETENTION_S = 60
RULES = Rules(retention_s=RETENTION_S)

Change = Callable[[list[Event]], list[Event]]


def good() -> list[Event]:
    """Two batches of one app: the first of two messages commits at once; the second is rolled back by a check, reopened
    and commits under attempt 2. A third is refused by its local transaction. A consumer and two readings saw it all."""
    events = [
        *sent("app:0", "a", "b"),
        Event(Kind.PREPARE, OK, "driver", half_id="app:0", version=1, table="half"),
        *executed("app:0:1", COMMIT, "a", "b"),
        decided("app:0:1", COMMIT),
        *told("app:0", COMMIT, "a", "b"),
        Event(Kind.POLL, OK, "consumer", payload="a", version=1, transaction_id="app:0:1", **at(0)),
        Event(Kind.POLLED, OK, "consumer", topic=TOPIC, queue_id=0, queue_offset=0, next_offset=1),
        *sent("app:1", "c"),
        Event(Kind.CHECK, BEGIN, "checker", transaction_id="app:1:1", half_id="app:1", version=1),
        Event(Kind.CHECK, OK, "checker", transaction_id="app:1:1", half_id="app:1", verdict=ROLLBACK),
        decided("app:1:1", ROLLBACK, "checker"),
        *executed("app:1:2", COMMIT, "c"),
        decided("app:1:2", COMMIT),
        *told("app:1", COMMIT, "c"),
        *read("first", "reader", "a", "b", "c"),
        *sent("app:2", "d"),
        *executed("app:2:1", ROLLBACK),
        decided("app:2:1", ROLLBACK),
        *told("app:2", ROLLBACK, "d"),
        Event(Kind.POLL, OK, "consumer", payload="b", version=4, transaction_id="app:0:1", **at(1)),
        Event(Kind.POLLED, OK, "consumer", topic=TOPIC, queue_id=0, queue_offset=1, next_offset=2),
        Event(Kind.END, OK, time=100.0),
        *read(FINAL, "final", "a", "b", "c"),
        *drained("early", 3, "a", "b"),
        *drained("late", 5, "a", "b", "c"),
    ]
    # What the tables hold.
    events += [
        half_row("app:0", 0, "a"),
        half_row("app:0", 1, "b"),
        half_row("app:1", 0, "c"),
        half_row("app:2", 0, "d"),
    ]
    events += [
        marker("commit", "app:0", 0, version=1, queue_offset=0),
        marker("commit", "app:0", 1, version=1, queue_offset=1),
        marker("rollback", "app:1", 0, version=2, who="check"),
        marker("reopen", "app:1", 0, version=3, attempt=2),
        marker("commit", "app:1", 0, version=4, attempt=2, queue_offset=2),
        marker("rollback", "app:2", 0, version=5),
    ]
    events += [Event(Kind.VERSION, OK, "driver", table="op", version=1, payload="commit 1")]
    events += [Event(Kind.LISTED, table="op", version=v, payload=f"commit {v}") for v in range(6)]
    return events


def at(offset: int, queue_id: int = 0) -> dict[str, Any]:
    return {"topic": TOPIC, "queue_id": queue_id, "queue_offset": offset}


def sent(half_id: str, *payloads: str) -> list[Event]:
    """Handed to the driver, all with the same key."""
    return [
        Event(
            Kind.SEND, BEGIN, "driver", half_id=half_id, payload=p, key="k", sequence="abcdef".index(p),
            topic=TOPIC, transaction_id=f"{half_id}:1", operation=half_id,
        )
        for p in payloads
    ]  # fmt: skip


def told(half_id: str, verdict: str, *payloads: str) -> list[Event]:
    return [Event(Kind.SEND, OK, "driver", half_id=half_id, payload=p, verdict=verdict) for p in payloads]


def executed(transaction_id: str, verdict: str, *payloads: str) -> list[Event]:
    half_id = transaction_id[:5]
    begin = Event(Kind.EXECUTE, BEGIN, "driver", transaction_id=transaction_id, half_id=half_id)
    local = [Event(Kind.LOCAL, transaction_id=transaction_id, half_id=half_id, payload=p) for p in payloads]
    return [begin, *local, replace(begin, phase=OK, verdict=verdict)]


def decided(transaction_id: str, verdict: str, process: str = "driver") -> Event:
    return Event(Kind.DECIDE, OK, process, transaction_id=transaction_id, half_id=transaction_id[:5], verdict=verdict)


def read(operation: str, process: str, *payloads: str) -> list[Event]:
    ids = {"a": "app:0:1", "b": "app:0:1", "c": "app:1:2", "d": "app:2:1"}
    return [
        Event(Kind.READ, OK, process, operation=operation, payload=p, version=5, transaction_id=ids[p],
              half_id=ids[p][:5], **at(i))
        for i, p in enumerate(payloads)
    ]  # fmt: skip


def drained(operation: str, position: int, *payloads: str) -> list[Event]:
    """A reading of the table messages, which goes up to a version of op."""
    rows = {"a": ("app:0", 0, 1, 1), "b": ("app:0", 1, 1, 1), "c": ("app:1", 0, 2, 4), "d": ("app:2", 0, 1, 5)}
    begin = Event(Kind.DRAINED, BEGIN, "drainer", operation=operation, version=position)
    return [begin] + [
        Event(Kind.DRAINED, OK, "drainer", operation=operation, payload=p, half_id=half_id, address=f"0.{row}",
              attempt=attempt, version=version, **at(i))
        for i, p in enumerate(payloads)
        for half_id, row, attempt, version in [rows[p]]
    ]  # fmt: skip


def half_row(half_id: str, row: int, payload: str) -> Event:
    return Event(Kind.HALF_ROW, half_id=half_id, address=f"0.{row}", payload=payload, topic=TOPIC, queue_id=0,
                 transaction_id=f"{half_id}:1", time=1.0)  # fmt: skip


def marker(op: str, half_id: str, row: int, version: int, attempt: int = 1, who: str = "execute", **more: Any) -> Event:
    if more.get("queue_offset") is not None:
        more = {"topic": TOPIC, "queue_id": 0, **more}
    return Event(Kind.MARKER, op=op, half_id=half_id, address=f"0.{row}", version=version, attempt=attempt, who=who,
                 operation=f"commit {version}", **more)  # fmt: skip


# ---------------------------------------------------------------- ways to spoil it
def without(**values: Any) -> Change:
    return lambda events: [e for e in events if not _has(e, values)]


def with_(*new: Event) -> Change:
    return lambda events: [*events, *new]


def before_end(*new: Event) -> Change:
    def put(events: list[Event]) -> list[Event]:
        end = next(i for i, e in enumerate(events) if e.kind is Kind.END)
        return [*events[:end], *new, *events[end:]]

    return put


def changed(where: dict[str, Any], **values: Any) -> Change:
    return lambda events: [replace(e, **values) if _has(e, where) else e for e in events]


def all_of(*changes: Change) -> Change:
    def apply(events: list[Event]) -> list[Event]:
        for change in changes:
            events = change(events)
        return events

    return apply


def _has(event: Event, values: dict[str, Any]) -> bool:
    return all(getattr(event, name) == value for name, value in values.items())


K = AnomalyKind
SPOILED: dict[str, tuple[AnomalyKind, Change]] = {
    "a committed message is not read": (K.LOST_WRITE, without(kind=Kind.READ, operation=FINAL, payload="c")),
    "nothing is read": (K.LOST_WRITE, without(kind=Kind.READ)),
    "a prepared half batch is gone": (K.LOST_WRITE, with_(Event(Kind.PREPARE, OK, "driver", half_id="app:7"))),
    "a placed row is gone": (K.LOST_WRITE, with_(marker("commit", "app:6", 0, version=6, queue_offset=3))),
    "a message is read twice": (
        K.DUPLICATE,
        with_(Event(Kind.READ, OK, "final", operation=FINAL, payload="a", transaction_id="app:0:1", **at(3))),
    ),
    "a half batch is stored twice": (K.DUPLICATE, with_(half_row("app:0", 0, "a"))),
    "a row is placed twice": (K.DUPLICATE, with_(marker("commit", "app:0", 0, version=6, queue_offset=3))),
    "what was refused runs again": (
        K.REFUSED_AGAIN,
        with_(
            Event(Kind.REFUSED, half_id="app:2", transaction_id="app:2:1"),
            Event(Kind.LOCAL, half_id="app:2", transaction_id="app:2:2", payload="d"),
        ),
    ),
    "a check rolls back for good what nobody refused": (
        K.NEVER_REFUSED,
        with_(half_row("app:6", 0, "z"), marker("rollback", "app:6", 0, 6, who="check", refused=True)),
    ),
    "a rolled-back message is read": (K.ABORTED_READ, with_(*read("odd", "reader", "a", "b", "c", "d"))),
    "a refused transaction is polled": (
        K.ABORTED_READ,
        before_end(Event(Kind.POLL, OK, "other", payload="x", transaction_id="app:2:1", **at(9))),
    ),
    "a message is read before its marker": (
        K.HALF_VISIBLE_READ,
        before_end(Event(Kind.POLL, OK, "other", payload="c", transaction_id="app:1:2", version=3, **at(2))),
    ),
    "a pending message is read": (K.HALF_VISIBLE_READ, without(kind=Kind.MARKER, half_id="app:1")),
    "a message is read that nobody sent": (
        K.HALF_VISIBLE_READ,
        before_end(Event(Kind.POLL, OK, "other", payload="?", **at(0))),
    ),
    "half of a transaction is read": (K.TORN_TRANSACTION, with_(*read("odd", "late", "a"))),
    "half of a transaction is committed": (
        K.TORN_TRANSACTION,
        without(kind=Kind.MARKER, half_id="app:0", address="0.1"),
    ),
    "two processes were told opposite verdicts": (
        K.CONFLICTING_OUTCOME,
        before_end(decided("app:0:1", ROLLBACK, "checker")),
    ),
    "two that know contradict each other": (
        K.CONFLICTING_OUTCOME,
        with_(replace(marker("conflict", "app:0", 0, 6), verdict=ROLLBACK)),
    ),
    "a refused verdict leaves no trace": (
        K.CONFLICTING_OUTCOME,
        before_end(replace(decided("app:2:1", COMMIT), phase=Phase.FAIL, attempt=1)),
    ),
    "a rollback follows a commit": (K.OUTCOME_CHANGED, with_(marker("rollback", "app:0", 0, version=6))),
    "a late commit follows a check's rollback": (
        K.OUTCOME_CHANGED,
        with_(marker("commit", "app:2", 0, version=6, queue_offset=3)),
    ),
    "a committed row is reopened": (K.OUTCOME_CHANGED, with_(marker("reopen", "app:0", 0, version=6))),
    "a quarantined row is committed": (
        K.OUTCOME_CHANGED,
        with_(half_row("app:3", 0, "e"), marker("quarantine", "app:3", 0, 6), marker("commit", "app:3", 0, 7)),
    ),
    "a late marker counts for the next attempt": (
        K.MARKER_OF_ANOTHER_ATTEMPT,
        changed({"kind": Kind.MARKER, "half_id": "app:1", "op": "commit"}, attempt=1),
    ),
    "a discarded row gets the next attempt": (
        K.MARKER_OF_ANOTHER_ATTEMPT,
        changed({"kind": Kind.MARKER, "half_id": "app:1", "op": "rollback"}, who="discard"),
    ),
    "a message is visible under another attempt than happened": (
        K.MARKER_OF_ANOTHER_ATTEMPT,
        changed({"kind": Kind.LOCAL, "payload": "c"}, transaction_id="app:1:1"),
    ),
    "two messages have one offset": (
        K.INCONSISTENT_OFFSETS,
        before_end(Event(Kind.POLL, OK, "other", payload="b", transaction_id="app:0:1", **at(0))),
    ),
    "an acknowledged offset is another one": (
        K.INCONSISTENT_OFFSETS,
        before_end(Event(Kind.SEND, OK, "driver", half_id="app:0", payload="a", **at(1))),
    ),
    "an offset is left out": (
        K.GAP_IN_QUEUE,
        changed({"payload": "c", "queue_offset": 2}, queue_offset=3),
    ),
    "markers leave an offset out": (
        K.GAP_IN_QUEUE,
        changed({"kind": Kind.MARKER, "half_id": "app:1", "op": "commit"}, queue_offset=5),
    ),
    "a consumer skips a message": (
        K.SKIPPED_POLL,
        before_end(Event(Kind.POLL, OK, "consumer", payload="c", transaction_id="app:1:2", **at(3))),
    ),
    "a consumer moves on without a message": (
        K.SKIPPED_POLL,
        before_end(Event(Kind.POLLED, OK, "consumer", topic=TOPIC, queue_id=0, queue_offset=2, next_offset=3)),
    ),
    "a consumer goes back": (
        K.NON_MONOTONIC_POLL,
        before_end(Event(Kind.POLL, OK, "consumer", payload="a", transaction_id="app:0:1", **at(0))),
    ),
    "a later send stands before an acknowledged one": (
        K.NON_MONOTONIC_SEND,
        all_of(
            changed({"kind": Kind.MARKER, "half_id": "app:1", "op": "commit"}, queue_offset=0),
            changed({"kind": Kind.MARKER, "half_id": "app:0", "address": "0.0"}, queue_offset=2),
        ),
    ),
    "a process is given falling offsets": (
        K.NON_MONOTONIC_SEND,
        with_(Event(Kind.SEND, OK, "p", payload="y", **at(8)), Event(Kind.SEND, OK, "p", payload="z", **at(7))),
    ),
    "a batch's messages stand in another order": (
        K.ORDER_BROKEN,
        all_of(
            changed({"kind": Kind.MARKER, "half_id": "app:0", "address": "0.0"}, queue_offset=1),
            changed({"kind": Kind.MARKER, "half_id": "app:0", "address": "0.1"}, queue_offset=0),
        ),
    ),
    "a settled transaction is checked": (
        K.CHECKED_AFTER_RESOLUTION,
        before_end(Event(Kind.CHECK, BEGIN, "checker", transaction_id="app:0:1", half_id="app:0", version=1)),
    ),
    "a process checks what it was told is final": (
        K.CHECKED_AFTER_RESOLUTION,
        before_end(Event(Kind.CHECK, BEGIN, "checker", transaction_id="app:1:1", half_id="app:1")),
    ),
    "a transaction is discarded after no check": (
        K.DISCARDED_WITHOUT_CHECK,
        changed({"kind": Kind.MARKER, "half_id": "app:2"}, who="discard"),
    ),
    "checks are counted that nobody answered": (
        K.DISCARDED_WITHOUT_CHECK,
        with_(
            half_row("app:3", 0, "e"), *[marker("check", "app:3", 0, 6 + i, who="check") for i in range(15)],
            marker("quarantine", "app:3", 0, 21, who="discard", reason="15 checks"),
        ),
    ),
    "a half batch is never settled": (K.STUCK_HALF, with_(half_row("app:3", 0, "e"))),
    "the same offset is another message later": (
        K.UNSTABLE_RANGE,
        changed({"kind": Kind.READ, "operation": FINAL, "payload": "b"}, transaction_id="app:9:1"),
    ),
    "a later reading of a process holds less": (
        K.UNSTABLE_RANGE,
        before_end(*read("second", "reader", "a", "b")),
    ),
    "a polled message is gone": (
        K.UNSTABLE_RANGE,
        before_end(Event(Kind.POLL, OK, "other", payload="f", **at(7))),
    ),
    "other input is taken for a replay": (
        K.REPLAY_DIVERGENCE,
        before_end(*told("app:0", COMMIT, "f")),
    ),
    "a replay is told another outcome": (K.REPLAY_DIVERGENCE, before_end(*told("app:0", ROLLBACK, "a"))),
    "a half row has two contents": (K.REPLAY_DIVERGENCE, with_(half_row("app:0", 0, "f"))),
    "a table's log has a hole": (K.MISSING_VERSION, without(kind=Kind.LISTED, version=3)),
    "an acknowledged version is gone": (
        K.MISSING_VERSION,
        with_(Event(Kind.VERSION, OK, "driver", table="op", version=9, payload="commit 9")),
    ),
    "an acknowledged version is another commit": (
        K.OVERWRITTEN_VERSION,
        changed({"kind": Kind.LISTED, "version": 1}, payload="commit 1b"),
    ),
    "two commits of op rows have one version": (
        K.OVERWRITTEN_VERSION,
        changed({"kind": Kind.MARKER, "version": 5}, version=4),
    ),
    "the table messages lacks a message": (
        K.DRAINED_OTHERWISE,
        with_(*drained("later", 4, "a", "b")),
    ),
    "the table messages has a message that was rolled back": (
        K.DRAINED_OTHERWISE,
        with_(*drained("later", 5, "a", "b", "c", "d")),
    ),
    "the table messages has a message before its version": (
        K.DRAINED_OTHERWISE,
        with_(*drained("later", 3, "a", "b", "c")),
    ),
    "the table messages has a message twice": (
        K.DRAINED_OTHERWISE,
        with_(*drained("later", 4, "a", "b", "c"), drained("later", 4, "a")[1]),
    ),
    "the last drain leaves something out": (
        K.DRAINED_OTHERWISE,
        with_(*drained(FINAL, 3, "a", "b")),
    ),
    "a half batch leaves that is open": (
        K.LEFT_OPEN,
        with_(Event(Kind.MARKER, op="archived", half_id="app:1", version=3)),
    ),
    "something is said of a half batch that left": (
        K.LEFT_OPEN,
        with_(
            Event(Kind.MARKER, op="archived", half_id="app:0", version=4, operation="commit 4"),
            marker("check", "app:0", 0, 5),
        ),
    ),
    "a message expires while it is young": (
        K.EXPIRED_EARLY,
        with_(Event(Kind.EXPIRED, OK, payload="a", sequence=RETENTION_S - 1, **at(0))),
    ),
    "a local transaction happened without its message": (
        K.LOCAL_STATE_DISAGREES,
        with_(Event(Kind.LOCAL, transaction_id="app:2:1", half_id="app:2", payload="d")),
    ),
    "a message is visible without its local transaction": (
        K.LOCAL_STATE_DISAGREES,
        without(kind=Kind.LOCAL, payload="c"),
    ),
    "a local transaction happened twice": (
        K.LOCAL_STATE_DISAGREES,
        with_(Event(Kind.LOCAL, transaction_id="app:0:1", half_id="app:0", payload="a")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_history_shows_its_anomaly(name: str) -> None:
    kind, spoil = SPOILED[name]
    assert kind in kinds_of(find_anomalies(spoil(good()), RULES))


def test_every_kind_of_anomaly_has_a_spoiled_history() -> None:
    assert {kind for kind, _ in SPOILED.values()} == set(AnomalyKind)


def test_a_good_history_shows_nothing() -> None:
    assert find_anomalies(good(), RULES) == []
    expired = Event(Kind.EXPIRED, OK, payload="a", sequence=RETENTION_S, **at(0))
    assert find_anomalies([*good(), expired], RULES) == []


def test_any_part_of_a_good_run_that_is_noted_shows_nothing() -> None:
    tables_only = [e for e in good() if e.kind in (Kind.HALF_ROW, Kind.MARKER, Kind.LISTED)]
    workload_only = [e for e in good() if e.kind not in (Kind.HALF_ROW, Kind.MARKER, Kind.LISTED)]
    assert find_anomalies(tables_only) == []
    assert find_anomalies(workload_only) == []
    assert find_anomalies([]) == []


def test_a_message_that_is_decided_later_may_stand_later_unless_the_topic_is_fifo() -> None:
    """``e`` was sent before ``f``, left UNKNOWN, and committed by a check after it."""
    events = [
        *good(), *sent("app:3", "e"), *sent("app:4", "f"), half_row("app:3", 0, "e"), half_row("app:4", 0, "f"),
        marker("commit", "app:4", 0, 6, queue_offset=3), marker("commit", "app:3", 0, 7, queue_offset=4),
    ]  # fmt: skip
    events += [
        Event(Kind.READ, OK, "final", operation=FINAL, payload=p, half_id=h, transaction_id=f"{h}:1", **at(o))
        for p, h, o in (("f", "app:4", 3), ("e", "app:3", 4))
    ]
    assert find_anomalies(events) == []
    assert kinds_of(find_anomalies(events, Rules(fifo=frozenset({TOPIC})))) == {AnomalyKind.ORDER_BROKEN}


def test_a_discard_after_enough_answers_shows_nothing() -> None:
    answers = [
        Event(Kind.CHECK, phase, "checker", half_id="app:3", transaction_id="app:3:1", verdict=UNKNOWN, version=5)
        for _ in range(2)
        for phase in (BEGIN, OK)
    ]
    events = [*good(), half_row("app:3", 0, "e"), *answers]
    events += [marker("check", "app:3", 0, 6 + i, who="check") for i in range(2)]
    events += [marker("quarantine", "app:3", 0, 8, who="discard", reason="2 checks were answered with UNKNOWN")]
    assert find_anomalies(events, Rules(checks_max=2)) == []
    assert kinds_of(find_anomalies(events, Rules(checks_max=3))) == {AnomalyKind.DISCARDED_WITHOUT_CHECK}


def test_an_open_half_batch_is_stuck_only_after_its_time() -> None:
    events = [*good(), half_row("app:3", 0, "e")]  # prepared at 1, and the run ended at 100
    assert find_anomalies(events, Rules(stuck_after_s=99)) == []
    assert kinds_of(find_anomalies(events, Rules(stuck_after_s=98))) == {AnomalyKind.STUCK_HALF}


def test_a_half_batch_that_was_open_for_too_long_was_stuck_unless_its_age_ended_it() -> None:
    opened = [*good(), half_row("app:3", 0, "e")]  # prepared at 1
    late = replace(marker("rollback", "app:3", 0, 6), time=60.0)
    expired = replace(marker("quarantine", "app:3", 0, 6, who="discard", reason="open for 72.0 h"), time=60.0)
    assert find_anomalies([*opened, late], Rules(stuck_after_s=60)) == []
    assert kinds_of(find_anomalies([*opened, late], Rules(stuck_after_s=58))) == {AnomalyKind.STUCK_HALF}
    asked = Event(Kind.CHECK, Phase.FAIL, "checker", half_id="app:3", transaction_id="app:3:1")
    assert find_anomalies([*opened, asked, expired], Rules(stuck_after_s=58)) == []
    assert kinds_of(find_anomalies([*opened, expired], Rules(stuck_after_s=58))) == {AnomalyKind.STUCK_HALF}


def test_what_was_refused_for_good_may_be_removed_and_what_a_check_refused_may_not() -> None:
    prepared = Event(Kind.PREPARE, OK, "driver", half_id="app:4")
    refused = Event(Kind.EXECUTE, OK, "driver", half_id="app:4", transaction_id="app:4:1", verdict=ROLLBACK)
    by_person = Event(Kind.RESOLVE, OK, "person", half_id="app:4", verdict=ROLLBACK)
    assert find_anomalies([*good(), prepared, refused]) == []
    assert find_anomalies([*good(), prepared, by_person]) == []
    by_check = replace(decided("app:4:1", ROLLBACK), who="check")
    assert kinds_of(find_anomalies([*good(), prepared, by_check])) == {AnomalyKind.LOST_WRITE}


def test_a_person_may_commit_what_was_in_conflict() -> None:
    events = [
        *good(), half_row("app:3", 0, "e"), marker("rollback", "app:3", 0, 6, who="admin"),
        marker("conflict", "app:3", 0, 7), marker("reopen", "app:3", 0, 8, who="admin"),
        marker("commit", "app:3", 0, 8, who="admin", queue_offset=3),
        replace(marker("conflict", "app:3", 0, 8, who="admin"), attempt=None),
        Event(Kind.READ, OK, "final", operation=FINAL, payload="e", half_id="app:3", transaction_id="app:3:1", **at(3)),
    ]  # fmt: skip
    assert find_anomalies(events) == []


def test_a_policys_rollback_that_was_reopened_and_committed_by_a_check_is_no_contradiction() -> None:
    """Found by a seed of the simulation: a policy guesses; a check knows, and may say the opposite."""
    asked = [
        Event(Kind.CHECK, phase, "checker", half_id="app:3", transaction_id="app:3:1", verdict=UNKNOWN, version=5)
        for phase in (BEGIN, OK)
    ]
    by_policy = replace(decided("app:3:1", ROLLBACK, "checker"), who="discard")
    events = [
        *good(), half_row("app:3", 0, "e"), Event(Kind.LOCAL, transaction_id="app:3:1", half_id="app:3", payload="e"),
        *asked, marker("check", "app:3", 0, 6, who="check"),
        marker("rollback", "app:3", 0, 7, who="discard"), by_policy, marker("reopen", "app:3", 0, 8, who="admin"),
        marker("commit", "app:3", 0, 9, who="check", queue_offset=3), decided("app:3:1", COMMIT, "checker"),
        Event(Kind.READ, OK, "final", operation=FINAL, payload="e", half_id="app:3", transaction_id="app:3:1", **at(3)),
    ]  # fmt: skip
    rules = Rules(checks_max=1)
    assert find_anomalies(events, rules) == []
    by_one_who_knows = [replace(e, who="execute") if e.who == "discard" else e for e in events]
    assert AnomalyKind.CONFLICTING_OUTCOME in kinds_of(find_anomalies(by_one_who_knows, rules))


# ---------------------------------------------------------------- histories in files
def test_a_history_in_a_file_is_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    history.extend(good())
    history.close()
    assert History.load(path).events == good()
    assert find_anomalies(History.load(path)) == []


def test_several_writers_share_a_file_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    histories = [History(path) for _ in range(4)]

    def write(history: History, name: str) -> None:
        for i in range(200):
            history.note(Kind.SEND, BEGIN, name, sequence=i, payload=payload_hash(os.urandom(8)))

    threads = [threading.Thread(target=write, args=(h, f"p{i}")) for i, h in enumerate(histories)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = History.load(path).events
    assert len(events) == 800
    for name in ("p0", "p1", "p2", "p3"):
        assert [e.sequence for e in events if e.process == name] == list(range(200))


def test_files_of_several_processes_are_loaded_in_the_order_of_their_times(tmp_path: Path) -> None:
    for name, times in (("one", (1.0, 3.0)), ("two", (2.0, 4.0))):
        history = History(tmp_path / name)
        history.extend(Event(Kind.POLL, OK, name, t) for t in times)
        history.close()
    loaded = History.load(tmp_path / "one", tmp_path / "two")
    assert [e.time for e in loaded] == [1.0, 2.0, 3.0, 4.0]
