"""Several half batches in one commit: prepared, decided and leased together, each with its own outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import pytest

from rmq_spark import CommitLog
from rmq_spark._core.protocol.leases import LeaseKeeper
from rmq_spark.errors import (
    AlreadyPreparedError,
    MessageError,
    StagedFilesTooOldError,
    StaleAttemptError,
    VerdictConflictError,
)
from tests.support.half_batches import (
    another,
    bodies,
    check_offsets,
    commit,
    header_of,
    pending,
    prepare,
    roll_back,
    stage,
)
from tests.support.inside import NO_ROWS, Change, Decision, HalfRecord, Naming, RowState, Staged, Who
from tests.support.meanwhile import at, seen_at
from tests.support.sends import wait_for
from tests.support.whole_history import op_rows_of

pytestmark = pytest.mark.log("memory", "delta")

DEADLINE_S = 30.0


def staged(log: CommitLog, name: str, batch_id: int = 0, numbered: bool = False, topic: str = "orders") -> Staged:
    """A half batch of an application of its own, of which the files are written."""
    header = replace(header_of(batch_id, name), naming=Naming.COUNTED if numbered else Naming.KEY)
    columns = {"body": [f"{name}.{i}" for i in range(3)], "sharding_key": ["k"] * 3}
    return Staged(header, stage(log, header, columns, topic))


def prepared(log: CommitLog, *batches: Staged) -> list[HalfRecord]:
    records = log.engine.prepare(batches)
    assert all(isinstance(record, HalfRecord) for record in records)
    return records  # type: ignore[return-value]


def yes(log: CommitLog, record: HalfRecord) -> Decision:
    return Decision(record, 1, pending(log, record), NO_ROWS, Who.EXECUTE)


def no(log: CommitLog, record: HalfRecord) -> Decision:
    return Decision(record, 1, NO_ROWS, pending(log, record), Who.EXECUTE)


# ---------------------------------------------------------------- prepare
def test_half_batches_are_prepared_in_one_commit_and_found_like_others(log: CommitLog) -> None:
    version = log.engine.half.table.version
    records = prepared(log, *(staged(log, name) for name in "abc"))
    assert log.engine.half.table.version == version + 1
    found = [another(log).engine.get(f"{name}:0") for name in "abc"]
    assert [(r.header, r.files, r.prepared_ms) for r in found] == [(r.header, r.files, r.prepared_ms) for r in records]
    assert log.engine.open_half_ids() == another(log).engine.open_half_ids()
    assert set(log.engine.open_half_ids()) == {"a:0", "b:0", "c:0"}


def test_a_numbered_half_batch_is_known_as_the_last_one_of_its_application(log: CommitLog) -> None:
    prepared(log, staged(log, "a", numbered=True), staged(log, "b"), staged(log, "c", numbered=True))
    assert [another(log).engine.last_batch_id(app) for app in "abc"] == [0, None, 0]


def test_what_cannot_be_prepared_drops_out_and_the_others_are_prepared(log: CommitLog) -> None:
    log.engine.prepare([staged(log, "taken")])
    old = staged(log, "old")
    old = Staged(old.header, [replace(f, staged_at=f.staged_at - 4 * 86_400) for f in old.files])
    outcomes = log.engine.prepare([staged(log, "a"), staged(log, "taken"), old, staged(log, "b")])
    assert [type(o) for o in outcomes] == [HalfRecord, AlreadyPreparedError, StagedFilesTooOldError, HalfRecord]
    assert set(log.engine.open_half_ids()) == {"taken:0", "a:0", "b:0"}
    # Nobody may think that all op rows of "taken" are still to come.
    for record in map(another(log).engine.get, ("taken:0", "a:0", "b:0")):
        commit(log, record)
    assert len(bodies(log)) == 9
    check_offsets(log)


def test_none_are_prepared_when_none_are_given(log: CommitLog) -> None:
    """The failpoint before the prepare looked at the first of them."""
    assert log.engine.prepare([]) == []


def test_when_nothing_can_be_prepared_nothing_is_committed(log: CommitLog) -> None:
    prepared(log, staged(log, "a"))
    version = log.engine.half.table.version
    (refused,) = log.engine.prepare([staged(log, "a")])
    assert isinstance(refused, AlreadyPreparedError)
    assert another(log).engine.half.table.refresh() == version


REFUSED: dict[str, tuple[Callable[[CommitLog], list[Staged]], type[Exception], str]] = {
    "files of another half batch": (
        lambda log: [staged(log, "a"), Staged(staged(log, "b").header, staged(log, "a").files)],
        MessageError, "was staged for 'b:0'",
    ),
    "a key twice": (
        lambda log: [staged(log, name) for name in "aba"],
        ValueError, "'a:0' is to be prepared twice in one commit",
    ),
    "a number and a key of one name": (
        lambda log: [staged(log, "a", numbered=True), staged(log, "b"), staged(log, "a")],
        ValueError, "'a:0' is to be prepared twice in one commit",
    ),
    "two numbers of an application": (
        lambda log: [staged(log, "a", batch_id, numbered=True) for batch_id in (2, 1)],
        ValueError, "a numbered half batch of app 'a' is to be prepared twice",
    ),
}  # fmt: skip


@pytest.mark.log("memory")
@pytest.mark.parametrize(("batches", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_half_batches_that_cannot_be_in_one_commit_are_refused_before_any_is_prepared(
    log: CommitLog, batches: Callable[[CommitLog], list[Staged]], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        log.engine.prepare(batches(log))
    assert log.engine.open_half_ids() == []
    assert log.engine.last_batch_id("a") is None


# ---------------------------------------------------------------- decide
def test_decisions_share_a_commit_and_each_has_its_places(log: CommitLog) -> None:
    records = prepared(log, *(staged(log, name) for name in "abc"))
    version = log.refresh()
    decided = log.engine.decide([yes(log, records[0]), no(log, records[1]), yes(log, records[2])])
    assert log.refresh() == version + 1
    assert [sum(p.count for p in d.placed) for d in decided] == [3, 0, 3]
    assert [d.problem for d in decided] == [None, None, None]
    assert sorted(bodies(another(log))) == [f"{name}.{i}" for name in "ac" for i in range(3)]
    check_offsets(log)


def test_a_decision_that_does_not_count_drops_out_with_its_own_error(log: CommitLog) -> None:
    good, late, stale, last = prepared(log, *(staged(log, name) for name in ("good", "late", "stale", "last")))
    decisions = [yes(log, record) for record in (good, late, stale, last)]
    other = another(log)
    roll_back(other, late, who=Who.CHECK)
    other.engine.ledger.quarantine(stale, 1, pending(other, stale), Who.ADMIN, "somebody wants to look")
    version = log.refresh()
    decided = log.engine.decide(decisions)
    assert log.refresh() == version + 1, "what comes too late is on record in the same commit"
    assert [type(d.problem) for d in decided] == [type(None), VerdictConflictError, StaleAttemptError, type(None)]
    assert [sum(p.count for p in d.placed) for d in decided] == [3, 0, 0, 3]
    assert log.conflicts() == another(log).conflicts() == ["late:0"]
    assert sorted(bodies(log)) == [f"{name}.{i}" for name in ("good", "last") for i in range(3)]
    # Said again, each has the outcome that it had.
    again = log.engine.decide(decisions)
    assert [type(d.problem) for d in again] == [type(d.problem) for d in decided]
    assert len(bodies(log)) == 6


def test_two_decisions_about_one_half_batch_are_refused(log: CommitLog) -> None:
    (record,) = prepared(log, staged(log, "a"))
    with pytest.raises(ValueError, match="two decisions about one half batch"):
        log.engine.decide([yes(log, record), no(log, record)])


def test_decisions_of_one_commit_keep_the_order_of_a_key(log: CommitLog) -> None:
    log.create_topic("steps", queues=2, fifo=True)
    records = [prepared(log, staged(log, name, topic="steps"))[0] for name in "abcd"]
    log.engine.decide([yes(log, records[3]), yes(log, records[1])])
    assert bodies(log, "steps") == [], "a is open, and sent before"
    decided = log.engine.decide([no(log, records[2]), yes(log, records[0])])
    assert bodies(log, "steps") == [f"{name}.{i}" for name in "abd" for i in range(3)]
    assert sum(p.count for d in decided for p in d.placed) == 3, "a decision tells of its own messages only"
    check_offsets(log, "steps")


def test_threads_that_decide_many_and_others_that_decide_one_lose_and_double_nothing(log: CommitLog) -> None:
    def many(name: str) -> None:
        for i in range(4):
            records = prepared(log, *(staged(log, f"{name}{i}-{j}") for j in range(3)))
            assert [d.problem for d in log.engine.decide([yes(log, r) for r in records])] == [None] * 3

    def one(name: str) -> None:
        for i in range(6):
            commit(log, prepare(log, i, 3, app=name))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(many, "x"), pool.submit(many, "y"), pool.submit(one, "z")]:
            done.result()
    assert len(set(bodies(log))) == len(bodies(log)) == (4 * 3 * 2 + 6) * 3
    check_offsets(log)


# ---------------------------------------------------------------- leases
def lease_rows(log: CommitLog) -> list[tuple[int, str]]:
    return [(r["version"], r["half_id"]) for r in op_rows_of(log) if r["kind"] == "lease"]


def until_leased(log: CommitLog, records: Sequence[HalfRecord]) -> None:
    wait_for(lambda: {h for _, h in lease_rows(log)} >= {r.half_id for r in records})


def until_no_thread_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name == "txmq-lease":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_thousands_of_short_transactions_lease_in_one_thread(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = prepared(log, staged(log, "a"))
    keeper = LeaseKeeper(log.engine, 60.0)
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name) or start(thread))

    def run_many() -> None:
        for _ in range(500):
            with keeper.lease(record):
                pass

    with ThreadPoolExecutor(4) as pool:
        wait([pool.submit(run_many) for _ in range(4)], DEADLINE_S)
    until_no_thread_is_left()
    assert 1 <= started.count("txmq-lease") <= 20  # more on a machine that stops all of them for a while
    with keeper.lease(record):
        assert sum(t.name == "txmq-lease" for t in threading.enumerate()) == 1
    until_no_thread_is_left()


def test_one_thread_leases_all_that_run_in_one_commit(log: CommitLog) -> None:
    records = prepared(log, *(staged(log, name) for name in "abc"))
    keeper = LeaseKeeper(log.engine, 3.0)
    leases = [keeper.lease(record) for record in records]
    for lease in leases:
        lease.__enter__()
    assert sum(t.name == "txmq-lease" for t in threading.enumerate()) == 1
    until_leased(log, records)
    for lease in leases:
        lease.__exit__(None, None, None)
    until_no_thread_is_left()
    by_version: dict[int, list[str]] = {}
    for version, half_id in lease_rows(log):
        by_version.setdefault(version, []).append(half_id)
    assert next(iter(by_version.values())) == ["a:0", "b:0", "c:0"]
    assert log.engine.state_of(records[0]).lease_until is not None


def test_a_keeper_starts_again_after_it_had_nothing_to_do(log: CommitLog) -> None:
    first, second = prepared(log, staged(log, "a"), staged(log, "b"))
    keeper = LeaseKeeper(log.engine, 0.3)
    with keeper.lease(first):
        until_leased(log, [first])
    written = len(lease_rows(log))
    time.sleep(0.3)
    assert len(lease_rows(log)) == written, "renewed after its end"
    with keeper.lease(second):
        until_leased(log, [second])
    until_no_thread_is_left()


def test_a_lease_goes_on_when_another_one_ends(log: CommitLog) -> None:
    short, long = prepared(log, staged(log, "a"), staged(log, "b"))
    keeper = LeaseKeeper(log.engine, 0.3)
    with keeper.lease(long):
        with keeper.lease(short):
            until_leased(log, [short, long])
        ended_at = another(log).refresh()

        def later() -> set[str]:
            return {half_id for version, half_id in lease_rows(log) if version > ended_at + 1}

        wait_for(lambda: bool(later()))
        assert later() == {"b:0"}


def test_a_thread_that_cannot_start_leaves_no_lease_that_nobody_renews(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (record,) = prepared(log, staged(log, "a"))
    keeper = LeaseKeeper(log.engine, 0.3)
    lease = keeper.lease(record)

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with lease:
            # A check may ask early: the fence keeps it safe.
            assert "no leases: thread txmq-lease cannot be started" in caplog.text
    with keeper.lease(record):
        until_leased(log, [record])
    assert log.engine.state_of(record).count(RowState.PENDING) == 3


def test_a_panic_while_leases_are_written_does_not_end_those_of_other_transactions(log: CommitLog) -> None:
    first, second = prepared(log, staged(log, "a"), staged(log, "b"))
    keeper = LeaseKeeper(log.engine, 0.3)
    panicked = threading.Event()

    def panic() -> None:
        panicked.set()
        raise BaseException("a panic of delta-rs")

    with at("commit begins", panic, table="op"), keeper.lease(first):
        assert panicked.wait(DEADLINE_S)
        with keeper.lease(second):
            until_leased(log, [first, second])


def test_a_lease_that_is_being_written_is_not_written_after_its_end(log: CommitLog) -> None:
    first, second = prepared(log, staged(log, "a"), staged(log, "b"))
    keeper = LeaseKeeper(log.engine, 0.3)
    writing, ended = threading.Event(), threading.Event()

    def slowly(change: Change, **_: Any) -> None:
        if change.add[0].rows == 2 and not writing.is_set():
            writing.set()
            ended.wait(0.3)

    with seen_at("commit begins", slowly, table="op"), keeper.lease(first):
        with keeper.lease(second):
            assert writing.wait(DEADLINE_S)
        ended.set()
        version = another(log).refresh()
        until_leased(log, [first])
        time.sleep(0.3)
    assert not [half_id for at, half_id in lease_rows(log) if at > version and half_id == "b:0"]
