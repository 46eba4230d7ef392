"""What a commit log does, whatever its tables are: one suite for Delta tables and for the twin in memory."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, CommitLog
from rmq_spark._core.log.op import OpenAtMark
from rmq_spark._core.log.topics import TOPICS_FILES_MAX
from rmq_spark.errors import (
    AlreadyPreparedError,
    CommitError,
    CommitLogExistsError,
    HalfBatchNotFoundError,
    MessageError,
    OptionError,
    StagedFilesTooOldError,
    StaleAttemptError,
    TopicExistsError,
    TopicNotFoundError,
    VerdictConflictError,
)
from tests.support.clocks import set_clock
from tests.support.half_batches import (
    APP,
    another,
    bodies,
    check_offsets,
    commit,
    count_check,
    decide_one,
    header_of,
    in_conflict,
    merge_op_files,
    pending,
    placements,
    prepare,
    prepare_one,
    roll_back,
    split,
    stage,
    too_late,
)
from tests.support.inside import Change, HalfRecord, OpKind, RowSet, RowState, Who, op_merge
from tests.support.limits import Limit
from tests.support.meanwhile import at, before_next, seen_at
from tests.support.whole_history import op_rows_of

pytestmark = pytest.mark.log("memory", "delta", orders=2, points=3)


def ids(table: pa.Table) -> list[str]:
    return table["half_id"].to_pylist()


def op_rows(log: CommitLog, kind: OpKind | None = None) -> list[dict[str, object]]:
    return [row for row in op_rows_of(log) if kind is None or row["kind"] == kind]


# ---------------------------------------------------------------- visible or not
def test_a_message_is_visible_iff_an_op_row_placed_it(log: CommitLog) -> None:
    kept, dropped, open_one = (prepare(log, i) for i in range(3))
    assert bodies(log) == []
    assert ids(log.pending()) == ["app:0", "app:1", "app:2"]
    commit(log, kept)
    roll_back(log, dropped)
    assert sorted(bodies(log)) == [f"app.0.{i}" for i in range(5)]
    assert ids(log.pending()) == ["app:2"]
    commit(log, open_one)
    assert sorted(bodies(another(log))) == [f"app.{b}.{i}" for b in (0, 2) for i in range(5)]
    assert log.pending().num_rows == 0


def test_offsets_have_no_gaps_over_batches_files_queues_topics_and_rollbacks(log: CommitLog) -> None:
    sent: dict[str, set[str]] = {"orders": set(), "points": set()}
    for batch in range(6):
        rows = 23
        topics = [("orders", "points")[i % 2] for i in range(rows)]
        columns = {
            "body": [f"{batch}.{i}" for i in range(rows)],
            "topic": topics,
            "sharding_key": pa.array([None if i % 3 else f"k{i % 5}" for i in range(rows)], pa.string()),
        }
        record = prepare(log, batch, columns, topic=None, partitions=3)
        assert len(record.files) == 3
        yes, no = split(pending(log, record), every=2 + batch % 3)
        decide_one(log.engine, record, 1, commit=yes, rollback=no)
        for file_no, bits in yes.items():
            read = log.engine.half.read(record, RowSet({file_no: bits}), ["topic", "body"])
            for topic, body in zip(read["topic"].to_pylist(), read["body"].to_pylist(), strict=True):
                sent[topic].add(body.decode())
    for handle in (log, another(log)):
        for topic, expected in sent.items():
            check_offsets(handle, topic)
            found = bodies(handle, topic)
            assert len(found) == len(set(found))
            assert set(found) == expected


def test_unknown_leaves_no_marker(log: CommitLog) -> None:
    record = prepare(log, 0)
    decide_one(log.engine, record, 1, commit={}, rollback={})
    assert op_rows(log) == []
    assert ids(log.pending()) == ["app:0"]


def test_the_messages_of_a_half_batch_are_shown_by_state_as_its_listener_would_see_them(log: CommitLog) -> None:
    record = prepare(log, 0, per="message")
    some, others = split(pending(log, record), 2)
    decide_one(log.engine, record, 1, commit=some)
    (open_ones,) = log.half_batches("app:0")
    assert (open_ones.rows, open_ones.attempt, open_ones.is_all) == (others, 1, False)
    (committed,) = log.half_batches("app:0", [RowState.COMMITTED])
    assert committed.rows == some
    assert log.half_batches("app:0", states=[RowState.ROLLED_BACK]) == []
    with pytest.raises(HalfBatchNotFoundError):
        log.half_batches("app:1")
    assert sum(log.tails().values()) == some.count


# ---------------------------------------------------------------- once, and by the first
def test_a_decision_may_be_repeated(log: CommitLog) -> None:
    record = prepare(log, 0)
    mask = pending(log, record)
    placed = decide_one(log.engine, record, 1, commit=mask)
    assert sum(p.count for p in placed) == 5
    before = len(op_rows(log))
    assert decide_one(log.engine, record, 1, commit=mask, who=Who.CHECK) == []
    assert decide_one(another(log).engine, record, 1, commit=mask, who=Who.CHECK) == []
    assert len(op_rows(log)) == before
    assert len(bodies(log)) == 5


def test_the_first_marker_wins_and_the_late_one_leaves_a_conflict(log: CommitLog) -> None:
    record = prepare(log, 0)
    mask = pending(log, record)
    other = another(log)
    decide_one(other.engine, record, 1, rollback=mask, who=Who.CHECK, reason="no row")
    with pytest.raises(VerdictConflictError, match=r"COMMIT_MESSAGE.*rollback by check") as caught:
        decide_one(log.engine, record, 1, commit=mask)
    assert caught.value.verdict == "COMMIT_MESSAGE"
    assert bodies(log) == []
    assert log.conflicts() == other.conflicts() == ["app:0"]
    rows = op_rows(log, OpKind.CONFLICT)
    assert [(r["verdict"], r["decided_by"], r["attempt"]) for r in rows] == [("COMMIT_MESSAGE", "execute", 1)]
    too_late(log, record, commit=mask)
    assert len(op_rows(log, OpKind.CONFLICT)) == 1


def test_rows_cannot_be_committed_and_rolled_back_at_once(log: CommitLog) -> None:
    record = prepare(log, 0)
    mask = pending(log, record)
    with pytest.raises(ValueError, match="committed and rolled back"):
        decide_one(log.engine, record, 1, commit=mask, rollback=split(mask, 2)[1])
    assert op_rows(log) == []


def by_key(log: CommitLog, keys: str) -> tuple[HalfRecord, dict[str, dict[int, bytes]]]:
    """A half batch of one message a key, and the rows of each."""
    record = prepare(log, 0, {"body": list(keys), "k": list(keys)}, per="key", key="k")
    ((file_no, file),) = record.files.items()
    there = log.engine.half.read(record, RowSet({file_no: b"\x01" * file.rows}), ["body"])["body"].to_pylist()
    return record, {key: {file_no: bytes(body == key.encode() for body in there)} for key in keys}


def test_a_conflict_is_told_of_after_the_mark_has_passed_it(log: CommitLog) -> None:
    in_conflict(log, prepare(log, 0))
    first = op_rows(log, OpKind.CONFLICT)[0]
    for i in range(1, 9):
        commit(log, prepare(log, i, 1))
        if i % 2 == 0:
            assert log.engine.ledger.mark()
            merge_op_files(log)
        assert log.conflicts() == another(log).conflicts() == ["app:0"]
    assert log.engine.ledger.view.rows.num_rows <= 6, "an open conflict keeps nothing else in memory"
    told = op_rows(log, OpKind.CONFLICT)
    assert {(r["verdict"], r["decided_by"], r["attempt"], r["reason"]) for r in told} == {
        (first["verdict"], first["decided_by"], first["attempt"], first["reason"])
    }
    assert len(told) == 1 + 4, "each mark repeats it once"
    another(log).resolve("app:0", ROLLBACK_MESSAGE, "it was undone")
    commit(log, prepare(log, 9, 1))
    assert log.engine.ledger.mark()
    assert log.conflicts() == another(log).conflicts() == []
    assert not [r for r in op_rows(log, OpKind.CONFLICT)[6:] if r["attempt"] is not None], "a resolved one is repeated"


def test_of_a_conflict_that_came_again_after_it_was_resolved_the_mark_repeats_the_last(log: CommitLog) -> None:
    record = prepare(log, 0)
    mask = pending(log, record)
    in_conflict(log, record)
    log.resolve("app:0", ROLLBACK_MESSAGE, "it was not paid")
    too_late(log, record, Who.CHECK, commit=mask)
    before = len(op_rows(log, OpKind.CONFLICT))
    for batch_id in range(1, 4):
        commit(log, prepare(log, batch_id))
    assert log.engine.ledger.mark()
    assert len(op_rows(log, OpKind.CONFLICT)) == before + 1
    assert another(log).conflicts() == ["app:0"]


def test_a_look_for_conflicts_reads_nothing_that_was_read_before(log: CommitLog) -> None:
    in_conflict(log, prepare(log, 0))
    assert log.conflicts() == ["app:0"]
    with seen_at("files read") as reads:
        assert log.conflicts() == ["app:0"]
    assert reads == []


def test_a_conflict_over_visible_messages_can_only_be_confirmed(log: CommitLog) -> None:
    record = prepare(log, 0)
    commit(log, record)
    too_late(log, record, Who.CHECK, rollback=record.all_rows)
    with pytest.raises(VerdictConflictError, match="readers may have seen"):
        log.resolve("app:0", ROLLBACK_MESSAGE, "take them back")
    assert log.conflicts() == ["app:0"]
    log.resolve("app:0", COMMIT_MESSAGE, "they are right")
    assert log.conflicts() == []
    assert len(bodies(log)) == 5


@pytest.mark.parametrize(("verdict", "visible"), [(COMMIT_MESSAGE, ["a", "c"]), (ROLLBACK_MESSAGE, ["a"])])
def test_resolving_a_conflict_leaves_other_transactions_alone(log: CommitLog, verdict: Any, visible: list[str]) -> None:
    """Also one over hidden messages beside visible ones, which is rolled back."""
    record, rows = by_key(log, "abc")
    decide_one(log.engine, record, 1, commit=rows["a"], rollback=rows["b"])
    in_conflict(log, record, rows=rows["c"])
    log.resolve("app:0", verdict, "a person knows of c")
    assert sorted(bodies(log)) == visible
    assert log.conflicts() == another(log).conflicts() == []
    assert log.engine.state_of(record).count(RowState.COMMITTED, RowState.ROLLED_BACK) == 3, "it is final"
    check_offsets(log)


def test_resume_does_not_end_a_conflict(log: CommitLog) -> None:
    record, rows = by_key(log, "ab")
    log.engine.ledger.quarantine(record, 1, rows["b"], Who.DISCARD, "15 checks")
    in_conflict(log, record, rows=rows["a"])
    assert log.resume("app:0") == 1
    assert log.conflicts() == ["app:0"]


def test_a_persons_verdict_that_comes_too_late_is_refused(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    roll_back(log, prepare(log, 1))
    with pytest.raises(VerdictConflictError, match="visible"):
        log.resolve("app:0", ROLLBACK_MESSAGE, "please")
    with pytest.raises(VerdictConflictError, match="rolled back"):
        log.resolve("app:1", COMMIT_MESSAGE, "please")
    assert log.resolve("app:0", COMMIT_MESSAGE, "it is so") == []


def test_resolve_settles_what_is_pending_or_quarantined(log: CommitLog) -> None:
    first, second = prepare(log, 0), prepare(log, 1)
    log.engine.ledger.quarantine(second, 1, pending(log, second), Who.DISCARD, "72 h")
    log.resolve("app:0", ROLLBACK_MESSAGE, "a person said so")
    log.resolve("app:1", COMMIT_MESSAGE, "a person said so")
    assert sorted(bodies(log)) == [f"app.1.{i}" for i in range(5)]
    assert log.engine.state_of(first).count(RowState.ROLLED_BACK) == 5
    assert log.pending().num_rows == log.quarantined().num_rows == 0


# ---------------------------------------------------------------- attempts
def test_an_attempt_is_reopened_by_one_process_only_and_the_past_one_cannot_be_decided(log: CommitLog) -> None:
    record = prepare(log, 0)
    mask = pending(log, record)
    roll_back(log, record, who=Who.CHECK)
    states = (RowState.ROLLED_BACK_BY_CHECK,)
    assert log.engine.ledger.reopen(record, 1, states, 2, Who.EXECUTE, "replay") == mask
    assert another(log).engine.ledger.reopen(record, 1, states, 2, Who.EXECUTE, "replay") == {}
    with pytest.raises(StaleAttemptError):
        decide_one(log.engine, record, 1, commit=mask)
    with pytest.raises(StaleAttemptError):
        decide_one(another(log).engine, record, 1, rollback=mask, who=Who.CHECK)
    assert log.pending()["attempt"].to_pylist() == [2]
    commit(log, record, attempt=2)
    assert set(log.read("orders")["transaction_id"].to_pylist()) == {"app:0:2"}
    assert log.conflicts() == []


def test_a_rollback_by_execute_is_not_reopened(log: CommitLog) -> None:
    record = prepare(log, 0)
    roll_back(log, record)
    assert log.engine.ledger.reopen(record, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "replay") == {}


def test_a_reopened_batch_is_as_old_as_its_reopening(log: CommitLog) -> None:
    record = prepare(log, 0)
    roll_back(log, record, who=Who.CHECK)
    time.sleep(0.005)
    before = datetime.now(timezone.utc)
    log.engine.ledger.reopen(record, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "replay")
    batch = log.engine.half_batch(record, log.engine.state_of(record), 2, pending(log, record, 2))
    assert batch.prepared_at >= before
    assert batch.attempt == 2


def test_attempts_have_an_end(log: CommitLog) -> None:
    record = prepare(log, 0)
    with pytest.raises(StaleAttemptError, match="something stops every attempt"):
        log.engine.ledger.reopen(record, 250, (RowState.ROLLED_BACK_BY_CHECK,), 251, Who.EXECUTE, "replay")


# ---------------------------------------------------------------- quarantine, checks, lease
def test_checks_are_counted_per_row(log: CommitLog) -> None:
    record = prepare(log, 0, 6, per="message")
    mask = pending(log, record)
    some, others = split(mask, every=3)
    count_check(log.engine, record, 1, mask, None)
    count_check(log.engine, record, 1, some, "asked again")
    for handle in (log, another(log)):
        state = handle.engine.state_of(record)
        assert state.check_times(some) == 2
        assert state.check_times(others) == 1
    decide_one(log.engine, record, 1, commit=some, who=Who.CHECK)
    count_check(log.engine, record, 1, mask, None)
    state = log.engine.state_of(record)
    assert state.check_times(some) == 2  # settled rows are not asked about any more
    assert state.check_times(others) == 2


def test_a_lease_is_seen_by_others_and_the_newest_counts(log: CommitLog) -> None:
    record = prepare(log, 0)
    assert log.engine.state_of(record).lease_until is None
    log.engine.ledger.lease([record], 5)
    until = log.engine.ledger.lease([record], 60)
    seen = another(log).pending()["lease_until"].to_pylist()[0]
    assert abs(seen - until) < timedelta(milliseconds=1)
    assert ids(log.pending()) == ["app:0"]


# ---------------------------------------------------------------- prepare
def test_a_batch_is_prepared_once(log: CommitLog) -> None:
    prepare(log, 3)
    for batch_id in (3, 2):
        with pytest.raises(AlreadyPreparedError, match="batch 3 is in the log"):
            prepare(another(log), batch_id)
    prepare(log, 3, app="other")
    assert log.engine.last_batch_id(APP) == 3
    assert log.engine.last_batch_id("nobody") is None
    assert ids(log.pending()) == ["app:3", "other:3"]


def test_files_of_another_batch_none_or_twice_the_same_are_not_prepared(log: CommitLog) -> None:
    header = header_of(0)
    with pytest.raises(MessageError, match="nothing to prepare"):
        prepare_one(log.engine, header, [])
    with pytest.raises(MessageError, match="app:0"):
        prepare_one(log.engine, header_of(1), stage(log, header))
    with pytest.raises(MessageError, match="staged twice"):
        prepare_one(log.engine, header, stage(log, header) + stage(log, header))
    assert log.engine.last_batch_id(APP) is None


def test_files_that_vacuum_may_remove_are_refused(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    header = header_of(0)
    files = stage(log, header)
    set_clock(monkeypatch, 4 * 24 * 3600)
    with pytest.raises(StagedFilesTooOldError, match="run the batch again"):
        prepare_one(log.engine, header, files)
    assert log.engine.find(APP, 0) is None


def test_prepare_times_rise_even_when_the_clock_goes_back(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [prepare(log, 0).prepared_ms]
    set_clock(monkeypatch, -3600)
    times += [prepare(log, i).prepared_ms for i in (1, 2)]
    times += [prepare(another(log), 0, app="other").prepared_ms]
    assert times == sorted(set(times))
    found = [log.engine.get(i).prepared_ms for i in ("app:0", "app:1", "app:2", "other:0")]
    assert found == times


def test_commit_times_never_run_backwards(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(log, prepare(log, 0))

    set_clock(monkeypatch, -20 * 365 * 24 * 3600)
    commit(log, prepare(log, 1))
    other = another(log)
    commit(other, prepare(other, 2))
    with pytest.raises(OptionError, match="columns is empty"):  # it gave a table of 0 rows
        log.read("orders", columns=[])
    read = log.read("orders", columns=["queue_id", "commit_timestamp"])
    for queue_id in range(2):
        times = read.filter(pc.equal(read["queue_id"], queue_id))["commit_timestamp"].to_pylist()
        assert times == sorted(times)
        assert times[0].year > 2020


# ---------------------------------------------------------------- topics
def test_topics_are_made_once_and_counted(log: CommitLog) -> None:
    log.create_topic("carts")
    log.create_topic("carts", exist_ok=True)
    assert another(log).topics() == {"carts": 4, "orders": 2, "points": 3}
    assert log.engine.require_topic("points") == 3
    with pytest.raises(TopicExistsError, match="4 queues"):
        log.create_topic("carts")
    with pytest.raises(TopicExistsError):
        log.create_topic("carts", queues=5, exist_ok=True)


def test_many_topics_are_made_in_one_commit_or_none_of_them(log: CommitLog) -> None:
    log.topics()
    version = log.engine.topics_table.version
    log.create_topics(["a", "b", "c", "a"], queues=2, fifo=True)
    assert another(log).topics() == {"a": 2, "b": 2, "c": 2, "orders": 2, "points": 3}
    assert log.engine.topics_table.refresh() == version + 1
    assert log.fifo_topics() == {"a", "b", "c"}
    with pytest.raises(TopicExistsError, match="'b'"):
        log.create_topics(["new", "b"], queues=2, fifo=True)
    assert "new" not in another(log).topics()
    log.create_topics(["b", "new"], queues=2, fifo=True, exist_ok=True)
    assert another(log).topics()["new"] == 2


def test_topics_lie_in_few_files_however_many_there_are(log: CommitLog) -> None:
    """Each was a file for ever, which every process read at its start, and everybody who made another one."""
    quiet = another(log)
    quiet.topics()
    for n in range(40):
        log.create_topic(f"topic{n}", queues=1 + n % 3)
    assert log.engine.topics_table.actions().num_rows <= TOPICS_FILES_MAX
    expected = {"orders": 2, "points": 3, **{f"topic{n}": 1 + n % 3 for n in range(40)}}
    assert quiet.topics() == another(log).topics() == expected
    log.set_retention("topic7", "2h")
    kept = {name: s for name, s in another(log).retentions().items() if s is not None}
    assert kept == {"topic7": 7200.0}


def fails_to_merge(change: Change, **_: object) -> None:
    if change.remove:
        raise CommitError("the store does not answer")


def test_a_topic_is_made_although_the_files_cannot_be_merged(log: CommitLog, limit: Limit) -> None:
    limit(TOPICS_FILES_MAX=2)
    with seen_at("commit begins", fails_to_merge) as commits:
        log.create_topic("carts", queues=1)
    assert len(commits) == 2
    assert another(log).topics()["carts"] == 1


def test_a_topic_that_is_known_is_not_looked_for_again(log: CommitLog) -> None:
    other = another(log)
    assert log.engine.topic_store.with_names(["orders"]).queues == {"orders": 2, "points": 3}
    other.create_topic("carts", queues=1, fifo=True)
    with seen_at("table seen") as looks:
        assert log.engine.topic_store.with_names(["orders", "points"]).queues == {"orders": 2, "points": 3}
        assert looks == []
        assert log.engine.topic_store.with_names(["carts"]).queues["carts"] == 1
        assert (log.engine.topic_store.known().fifo, looks) == (frozenset({"carts"}), [{"table": "topics"}])


def test_a_log_is_created_once(tmp_path: Path) -> None:
    CommitLog.create(tmp_path / "log", queues=7)
    with pytest.raises(CommitLogExistsError):
        CommitLog.create(tmp_path / "log")
    again = CommitLog.create(tmp_path / "log", queues=2, exist_ok=True)
    again.create_topic("t")
    assert again.topics() == {"t": 7}


@pytest.mark.parametrize("inside", ["inner", "half/inner"])
def test_a_log_inside_another_log_is_refused(tmp_path: Path, inside: str) -> None:
    CommitLog.create(tmp_path / "log")
    with pytest.raises(CommitLogExistsError, match=f"{inside} lies inside the commit log .*log: choose a place beside"):
        CommitLog.create(tmp_path / "log" / inside)
    assert not (tmp_path / "log" / inside).exists()
    CommitLog.create(tmp_path / "log2" / inside)


# ---------------------------------------------------------------- the mark, and upkeep
def test_the_mark_moves_over_what_is_settled_and_names_what_is_open(log: CommitLog) -> None:
    records = [prepare(log, i) for i in range(3)]
    assert log.engine.ledger.mark()
    assert set(named(log)) == {"app:0", "app:1", "app:2"}
    for record in records[:2]:
        commit(log, record)
    assert log.engine.ledger.mark()
    assert log.engine.ledger.view.low_water == records[2].prepared_ms
    assert {h: b.pending for h, b in named(log).items()} == {"app:2": 5}
    assert not log.engine.ledger.mark()
    commit(log, records[2])
    assert log.engine.ledger.mark()
    assert named(log) == {}
    assert not log.engine.ledger.mark()


def named(log: CommitLog) -> Mapping[str, OpenAtMark]:
    """What is open below the newest mark, as a cold start reads it."""
    other = another(log)
    other.refresh()
    return other.engine.ledger.view.open_at_mark


def test_a_mark_names_as_many_open_batches_as_it_has_room_for(log: CommitLog, limit: Limit) -> None:
    limit(NAMED_MAX=2)
    for batch_id in range(6):
        record = prepare(log, batch_id, app=f"app{batch_id}")
        if batch_id % 2:
            commit(log, record)
    assert log.engine.ledger.mark()
    (mark,) = op_rows(log, OpKind.MARK)
    assert [entry["half_id"] for entry in mark["below"]] == ["app0:0", "app2:2"]  # type: ignore[attr-defined]
    assert another(log).engine.open_half_ids() == ["app0:0", "app2:2", "app4:4"]


def test_a_batch_decided_while_the_mark_moves_is_not_forgotten(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    other = another(log)
    with at("table seen", lambda: commit(other, prepare(other, 1)), table="half"):
        assert log.engine.ledger.mark()
    for handle in (log, other, another(log)):
        record = handle.engine.get("app:1")
        assert handle.engine.state_of(record).count(RowState.COMMITTED) == 5
        assert handle.pending().num_rows == 0


def test_merging_op_files_changes_nothing(log: CommitLog, limit: Limit) -> None:
    limit(OP_FILES_MAX=4)
    log.engine.compaction.is_on = False
    for i in range(5):
        record = prepare(log, i)
        yes, no = split(pending(log, record), every=2)
        decide_one(log.engine, record, 1, commit=yes, rollback=no)
    log.engine.ledger.lease([prepare(log, 5)], 60)
    other = another(log)
    before = (log.read("orders").to_pylist(), log.pending().to_pylist(), op_rows(log))
    files = log.engine.op_table.actions().num_rows
    assert op_merge.compact_op(another(log).engine.op_table)
    for handle in (log, other, another(log)):
        assert (handle.read("orders").to_pylist(), handle.pending().to_pylist(), op_rows(handle)) == before
    assert log.engine.op_table.actions().num_rows < files
    assert not op_merge.compact_op(log.engine.op_table)
    commit(log, prepare(log, 6))
    check_offsets(log)


def test_what_is_kept_in_memory_follows_what_is_open(log: CommitLog) -> None:
    kept = []
    for i in range(30):
        commit(log, prepare(log, i, 2))
        if i % 10 == 9:
            log.engine.ledger.mark()
            kept.append(log.engine.ledger.view.rows.num_rows)
    assert max(kept) <= 2  # the mark itself
    assert len(log.engine.ledger._just_prepared) <= 1


def test_upkeep_starts_by_itself(log: CommitLog, limit: Limit) -> None:
    limit(OP_FILES_MAX=8)
    for i in range(24):
        commit(log, prepare(log, i, 1))
        log.close()
    log.engine.ledger.refresh()
    assert log.engine.op_table.actions().num_rows < 16
    assert log.engine.ledger.view.low_water > 0
    check_offsets(log)


def test_a_failing_upkeep_stops_nothing(log: CommitLog, limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    limit(OP_FILES_MAX=2)
    with seen_at("commit begins", fails_to_merge, table="op"):
        for i in range(4):
            commit(log, prepare(log, i, 1))
        log.close()
    assert "the store does not answer" in caplog.text
    check_offsets(log)


# ---------------------------------------------------------------- one object, many threads
def test_threads_share_a_log(log: CommitLog) -> None:
    def send(app: str) -> None:
        for i in range(6):
            record = prepare(log, i, 3, app=app)
            log.engine.ledger.lease([record], 60)
            commit(log, record)

    def look() -> None:
        for _ in range(8):
            log.pending()
            placed = placements(log)
            assert len(placed) == len(set(placed))
            log.engine.ledger.mark()
            log.vacuum(dry_run=True)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(send, "a"), pool.submit(send, "b"), pool.submit(look)]:
            done.result()
    assert len(bodies(log)) == 36
    for handle in (log, another(log)):
        assert handle.pending().num_rows == 0
        check_offsets(handle)


def test_rows_that_another_thread_let_the_table_see_are_counted_once(log: CommitLog) -> None:
    """The version of a table moves on while its actions are looked at."""
    record = prepare(log, 0)
    other = another(log)
    log.engine.ledger.refresh()
    table = log.engine.ledger.table

    def then_newer() -> None:
        count_check(other.engine, record, 1, pending(other, record), None)
        table.refresh()

    count_check(other.engine, record, 1, pending(other, record), None)
    before_next(table, "actions", then_newer)
    log.engine.ledger.refresh()
    assert log.engine.state_of(record).check_times(pending(log, record)) == 2


# ---------------------------------------------------------------- what is refused, and nothing is written
NO_TOPICS = ["../x", "a/b", "..", "", "o rders", "\uff4frders", "\u043erders", "a\n", "x" * 128, "TBW102", "%DLQ%g"]
Call = Callable[[CommitLog], object]
REFUSED: list[tuple[Call, type[Exception], str]] = [
    *((lambda log, name=name: log.create_topic(name), MessageError, "topic") for name in NO_TOPICS),
    *((lambda log, n=n: log.create_topic("carts", n), OptionError, "1 to 1024") for n in (0, -1, 1025)),
    (lambda log: log.create_topics(["new", "a/b"]), MessageError, "a/b"),
    (lambda log: log.create_topics("new"), OptionError, "one text"),
    (lambda log: log.engine.require_topic("order"), TopicNotFoundError, "orders"),
    (lambda log: log.set_retention("orders", "forever"), OptionError, "None keeps messages for ever"),
    *((lambda log, time=time: log.set_retention("orders", time), OptionError, "retention") for time in ("5s", "7", "")),
    (lambda log: log.set_retention("ordres", "1h"), TopicNotFoundError, "orders"),
    (lambda log: log.resolve("app:0", UNKNOWN, "x"), OptionError, "settles nothing"),
    (lambda log: log.resolve("app:0", COMMIT_MESSAGE, " "), OptionError, "needs a reason"),
    (lambda log: log.resume("app:0", ""), OptionError, "needs a reason"),
    (lambda log: log.resolve("app:0", COMMIT_MESSAGE, "paid \ud800"), MessageError, "cannot be written in UTF-8"),
    (lambda log: log.engine.get("app:1"), HalfBatchNotFoundError, "app:1"),
    (lambda log: log.read("orders", ["body"]), OptionError, r"start=\['body'\] is no mapping"),  # type: ignore[arg-type]
    (lambda log: log.read("orders", start=datetime(2026, 1, 1)), OptionError, "has no time zone"),
    (lambda log: log.maintain(grace="5s"), OptionError, "grace='5s'"),
    (lambda log: log.vacuum(older_than="6d"), OptionError, "under 7d"),
    (lambda log: log.vacuum(older_than="0s"), OptionError, "under 7d"),
    (lambda log: log.vacuum(older_than="7"), OptionError, "not a duration"),
    (lambda log: log.trace(), OptionError, "one of transaction_id, half_id, message_id: none was given"),
    (lambda log: log.trace("a:1:1", half_id="a:1"), OptionError, "transaction_id and half_id was given"),
    (lambda log: log.trace("nonsense"), OptionError, "'nonsense' is not a transaction id"),
    (lambda log: log.trace(message_id="a:1:1"), OptionError, "'a:1:1' is not a message id"),
]


@pytest.mark.log("memory", orders=2, points=3)
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    log: CommitLog, call: Call, error: type[Exception], words: str
) -> None:
    prepare(log, 0)
    before = [table.refresh() for table in log.engine.tables()]
    with pytest.raises(error, match=words):
        call(log)
    assert [table.refresh() for table in log.engine.tables()] == before


@pytest.mark.parametrize("door", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_log_and_who_has_it_open_cannot_be_copied(log: CommitLog, door: Callable[[object], object]) -> None:
    """A copy shared half of its state with the original. Of pickling, Python said that RLock cannot be pickled."""
    with pytest.raises(OptionError, match="can be neither copied nor pickled: pass its path"):
        door(log)
    if door is not copy.copy:
        with pytest.raises(OptionError, match="pass its path"):
            door(txmq.ConsumerGroup(log, "points"))
        with pytest.raises(OptionError, match="pass its path"):
            door(txmq.TransactionMQProducer(log, "shop"))


def test_topics_that_others_changed_long_ago_do_not_stop_a_sender(tmp_path: Path) -> None:
    """The file of topics that the sender had seen, and not read, was deleted by upkeep: it could not send any more."""
    log = CommitLog.create(tmp_path / "log")
    quiet = another(log)
    quiet.create_topic("orders", queues=1)
    another(log).set_retention("orders", "2h")
    live = {Path(uri).name for uri in DeltaTable(f"{log.path}/topics").file_uris()}
    for file in Path(log.path, "topics").glob("*.parquet"):
        if file.name not in live:
            file.unlink()
    assert quiet.engine.topic_store.with_names(["orders"]).queues == {"orders": 1}
    assert quiet.fifo_topics() == frozenset()
