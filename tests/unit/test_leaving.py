"""Half batches that are settled and drained leave, and nobody can tell, but by the room they gave back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark import CommitLog, HalfBatch, LocalTransactionState, TransactionMQProducer
from rmq_spark._core.log.op import pruned_up_to
from rmq_spark.errors import (
    CorruptLogError,
    HalfBatchLeftError,
    HalfBatchNotFoundError,
    StaleAttemptError,
    VerdictConflictError,
)
from tests.support.half_batches import (
    another,
    bodies,
    commit,
    count_check,
    decide_one,
    header_of,
    in_half,
    let_leave,
    op_kinds,
    pending,
    prepare,
    quarantine,
    roll_back,
    send,
    share_half_file,
    split,
    too_late,
)
from tests.support.inside import (
    Change,
    CommitOncePrepared,
    Graces,
    HalfRecord,
    Leaver,
    OpKind,
    OpRow,
    Placed,
    RowState,
    UnknownCheck,
    Who,
    new_half_id,
)
from tests.support.limits import Limit
from tests.support.listeners import Scripted
from tests.support.meanwhile import at
from tests.torture.hostile.logs import edit_row

pytestmark = pytest.mark.log("memory", "delta", orders=2, points=1)

FOREVER = 1e9


def test_what_is_committed_and_drained_leaves_and_its_op_rows_are_pruned(log: CommitLog) -> None:
    sent = [send(log, f"key{i}") for i in range(5)]
    for record in sent[:4]:
        commit(log, record)
    report = let_leave(log)
    assert (report.archived, report.files_left) == (4, 4)
    assert in_half(log) == {"key4:0"}
    assert op_kinds(log, "key0:0") == ["archived"]
    kept = another(log).engine.archived("key0:0")
    assert kept is not None
    assert (kept.rows, kept.committed, kept.app_id, kept.batch_id, kept.attempt) == (5, 5, "key0", 0, 1)
    assert [(d.kind, d.decided_by, d.count) for d in kept.decisions] == [("commit", "execute", 5)]
    assert kept.transaction_per == "batch"
    assert kept.producer_group == "group"
    assert let_leave(log).archived == 0
    assert another(log).engine.open_half_ids() == ["key4:0"]
    commit(log, sent[4])
    assert len(another(log).engine.tails()) == 2
    assert sum(another(log).engine.tails().values()) == 25


def test_a_log_whose_op_lost_its_newest_mark_after_rows_went_is_not_read(log: CommitLog) -> None:
    for i in range(4):
        commit(log, send(log, f"key{i}"))
    let_leave(log)
    edit_row(log.engine.op_table, "mark", None, None)
    with pytest.raises(CorruptLogError, match="table op has lost its newest mark"):
        another(log).read("orders")


def test_op_files_that_are_large_together_are_pruned_one_after_the_other(log: CommitLog, limit: Limit) -> None:
    limit(PRUNED_BYTES_MAX=1)
    for i in range(4):
        commit(log, send(log, f"key{i}"))
    let_leave(log)
    assert [op_kinds(log, f"key{i}:0") for i in range(4)] == [["archived"]] * 4
    assert sum(another(log).engine.tails().values()) == 20


def test_a_half_batch_whose_op_rows_contradict_it_stays_and_the_others_leave(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = send(log, "bad"), send(log, "good")
    quarantine(log, bad)
    log.resolve(bad.half_id, LocalTransactionState.ROLLBACK_MESSAGE, "no")
    commit(log, good)
    log.engine.ledger.mark()
    edit_row(log.engine.op_table, "quarantine", "file_no", 7)
    assert let_leave(log).archived == 1
    assert in_half(log) == {"bad:0"}
    assert "settled half batch 'bad:0' does not leave" in caplog.text


def test_a_dry_run_says_so_and_changes_nothing(log: CommitLog) -> None:
    assert "nothing else to do" in str(log.maintain(dry_run=True))
    for i in range(3):
        commit(log, send(log, f"key{i}"))
    log.drain()
    log.engine.ledger.mark()
    versions = (log.engine.half.table.refresh(), log.refresh())
    report = let_leave(log, dry_run=True)
    assert (report.dry_run, report.archived) == (True, 3)
    assert "3 half batches would be archived" in str(report)
    assert versions == (log.engine.half.table.refresh(), log.refresh())


def test_what_is_not_drained_not_settled_or_too_young_stays(log: CommitLog) -> None:
    commit(log, send(log, "young"))
    assert let_leave(log, reader_s=60).archived == 0
    send(log, "open")
    quarantined = send(log, "quarantined")
    log.engine.ledger.quarantine(quarantined, 1, pending(log, quarantined), Who.CHECK, "gave up")
    roll_back(log, send(log, "audited"))
    in_conflict = send(log, "conflict")
    commit(log, in_conflict)
    too_late(log, in_conflict, Who.CHECK, rollback=in_conflict.all_rows)
    assert let_leave(log, audit_s=60).archived == 1
    assert in_half(log) == {"open:0", "quarantined:0", "audited:0", "conflict:0"}
    log.resolve("conflict:0", LocalTransactionState.COMMIT_MESSAGE, "it was right")
    log.resolve("quarantined:0", LocalTransactionState.ROLLBACK_MESSAGE, "it never was")
    assert let_leave(log).archived == 3
    assert in_half(log) == {"open:0"}


def test_the_last_batch_of_a_stream_stays_for_a_restart(log: CommitLog) -> None:
    for batch_id in range(3):
        commit(log, prepare(log, batch_id))
    let_leave(log)
    assert in_half(log) == {"app:2"}
    record = another(log).engine.find("app", 0)
    assert record is not None
    assert record.left is not None
    assert record.header == header_of(0)


def test_what_became_of_each_message_is_kept(log: CommitLog) -> None:
    record = send(log, "parts", 9, per="message")
    committed, rest = split(pending(log, record), 3)
    by_check, by_hand = split(rest, 6)
    decide_one(log.engine, record, 1, commit=committed)
    decide_one(log.engine, record, 1, rollback=by_hand, reason="no")
    decide_one(log.engine, record, 1, rollback=by_check, who=Who.CHECK)
    again = send(log, "again")
    roll_back(log, again, who=Who.CHECK)
    log.engine.ledger.reopen(again, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "once more")
    roll_back(log, again, 2)
    let_leave(log)
    kept = another(log).engine.archived("parts:0")
    assert kept is not None
    assert (kept.committed, kept.rolled_back, kept.rolled_back_by_check) == (6, by_hand.count, by_check.count)
    assert not kept.final
    assert "no" in [d.reason for d in kept.decisions]
    kept = another(log).engine.archived("again:0")
    assert kept is not None
    assert (kept.attempt, kept.rolled_back, kept.rolled_back_by_check, kept.final) == (2, 5, 0, True)


@pytest.mark.parametrize("idempotency_s", [FOREVER, 0])
def test_a_writer_that_slept_places_nothing_twice(log: CommitLog, idempotency_s: float) -> None:
    sleeper = another(log)
    record = send(sleeper, "key")
    rows = record.all_rows
    commit(log, log.engine.get("key:0"))
    send(log, "later")
    for _ in range(2):
        let_leave(log, idempotency_s=idempotency_s)
    assert op_kinds(log, "key:0") == (["archived"] if idempotency_s else [])
    tails = another(log).engine.tails()
    if idempotency_s:
        assert decide_one(sleeper.engine, record, 1, commit=rows) == []  # it is so already
        with pytest.raises(VerdictConflictError, match=r"too late.*has left"):
            decide_one(sleeper.engine, record, 1, rollback=rows)
    else:
        is_forgotten(sleeper, record)
    for change in (
        lambda: sleeper.engine.ledger.reopen(record, 1, (RowState.PENDING,), 2, Who.EXECUTE, "no"),
        lambda: sleeper.engine.ledger.quarantine(record, 1, rows, Who.CHECK, "no"),
        lambda: count_check(sleeper.engine, record, 1, rows, "no"),
        lambda: sleeper.engine.ledger.overrule(record, LocalTransactionState.COMMIT_MESSAGE, "no"),
        lambda: sleeper.engine.state_of(record),
    ):
        with pytest.raises(HalfBatchLeftError):
            change()
    assert another(log).engine.tails() == tails
    assert another(log).engine.open_half_ids() == ["later:0"]


def is_forgotten(sleeper: CommitLog, record: HalfRecord) -> None:
    """A verdict that comes this late is refused."""
    with pytest.raises(StaleAttemptError, match="long ago"):
        decide_one(sleeper.engine, record, 1, commit=record.all_rows)


def forget(log: CommitLog) -> None:
    """Let all that is settled leave, and let nothing tell of it any more."""
    for i in range(3):
        commit(log, send(log, f"newer{i}"))
        let_leave(log, idempotency_s=0)


def test_a_check_of_what_has_left_does_not_hinder_the_count_of_others(log: CommitLog) -> None:
    gone, open_one = send(log, "gone"), send(log, "open")
    checks = [UnknownCheck(record, 1, pending(log, record), None) for record in (gone, open_one)]
    roll_back(log, gone, who=Who.CHECK)
    let_leave(log)
    log.engine.ledger.record_checks(checks)
    assert log.pending()["check_times"].to_pylist() == [1]
    with pytest.raises(HalfBatchLeftError):
        log.engine.ledger.record_checks(checks[:1])


def test_a_lease_does_not_wake_what_has_left(log: CommitLog) -> None:
    sleeper = another(log)
    record = send(sleeper, "key")
    roll_back(log, log.engine.get("key:0"), who=Who.CHECK)
    let_leave(log)
    version = log.refresh()
    sleeper.engine.ledger.lease([record], 60.0)
    assert log.refresh() == version, "a lease of what has left is not written"
    forget(log)
    sleeper.engine.ledger.lease([record], 60.0)
    by_an_older_program = OpRow(OpKind.LEASE, "key:0", until=log.engine.runtime.now())
    log.engine.ledger.append(lambda: [by_an_older_program])
    is_forgotten(sleeper, record)
    assert sum(another(log).engine.tails().values()) == 15
    assert log.drain() == log.refresh()


@pytest.mark.parametrize("size", [5, 3])
def test_a_key_that_is_used_again_is_another_half_batch(log: CommitLog, size: int) -> None:
    sleeper = another(log)
    record = send(sleeper, "key", 5)
    roll_back(log, log.engine.get("key:0"), who=Who.CHECK)
    forget(log)
    again = send(log, "key", size, half_id=new_half_id("key", 0))
    for _ in range(2):
        is_forgotten(sleeper, record)
        sleeper.engine.ledger.lease([record], 60.0)
        assert log.engine.state_of(again).lease_until is None
        log.engine.ledger.mark()  # names it as open
    roll_back(log, again)
    is_forgotten(sleeper, record)
    assert sum(another(log).engine.tails().values()) == 15


def test_verdicts_on_some_messages_cannot_come_again_when_they_have_left(log: CommitLog) -> None:
    record = send(log, "key", 6, per="message")
    kept, dropped = split(pending(log, record), 2)
    decide_one(log.engine, record, 1, commit=kept, rollback=dropped)
    again = send(log, "again", 6)
    roll_back(log, again, who=Who.CHECK)
    log.engine.ledger.reopen(again, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "once more")
    commit(log, again, 2)
    let_leave(log)
    assert in_half(log) == set()
    for verdicts in ({"commit": dropped}, {"commit": dropped, "rollback": kept}, {"commit": kept}):
        with pytest.raises(StaleAttemptError, match="nobody can tell"):
            decide_one(log.engine, record, 1, **verdicts)
    rows = again.all_rows
    for attempt in (1, 7):
        with pytest.raises(StaleAttemptError, match=f"under attempt {attempt} comes too late"):
            decide_one(log.engine, again, attempt, commit=rows)
    assert decide_one(log.engine, again, 2, commit=rows) == []


@pytest.mark.log("delta", orders=1)
def test_what_comes_back_from_an_older_copy_of_half_is_not_placed_again(log: CommitLog, tmp_path: Path) -> None:
    commit(log, send(log, "key", 2))
    send(log, "open", 1)
    shutil.copytree(tmp_path / "log" / "half", tmp_path / "copy")
    let_leave(log)
    forget(log)
    shutil.rmtree(tmp_path / "log" / "half")
    shutil.copytree(tmp_path / "copy", tmp_path / "log" / "half")
    fresh = CommitLog.open(tmp_path / "log")
    record = fresh.engine.get("key:0")
    with pytest.raises(HalfBatchLeftError, match="set back to an older copy"):
        fresh.engine.state_of(record)
    rows = record.all_rows
    with pytest.raises(StaleAttemptError):
        decide_one(fresh.engine, record, 1, commit=rows)
    assert fresh.engine.open_half_ids() == ["open:0"]
    commit(fresh, fresh.engine.get("open:0"))


def test_the_audit_time_is_no_shorter_than_the_grace(log: CommitLog) -> None:
    record = send(log, "key", 4, per="message")
    kept, dropped = split(pending(log, record), 2)
    decide_one(log.engine, record, 1, commit=kept, rollback=dropped)
    roll_back(log, send(log, "none"))
    commit(log, send(log, "later"))
    assert let_leave(log, reader_s=3600.0, audit_s=0.0).archived == 0


def test_a_follower_that_slept_goes_on_from_the_mark(log: CommitLog) -> None:
    sleeper = another(log)
    sleeper.refresh()
    for i in range(4):
        commit(log, send(log, f"key{i}"))
    open_one = send(log, "open")
    sleepers = [sleeper, another(log)]
    sleepers[1].refresh()
    let_leave(log)
    assert pruned_up_to(another(log).engine.op_table) >= 0
    for one in sleepers:
        assert one.engine.tails() == another(log).engine.tails()
        assert one.engine.open_half_ids() == ["open:0"]
    commit(sleeper, open_one)
    assert sum(sleepers[1].engine.tails().values()) == 25


def test_who_asks_for_a_half_batch_that_left_is_told(log: CommitLog) -> None:
    commit(log, send(log, "key"))
    let_leave(log)
    with pytest.raises(HalfBatchLeftError, match="of its 5 messages 5 committed"):
        another(log).engine.get("key:0")
    with pytest.raises(HalfBatchNotFoundError):
        another(log).engine.get("other:0")
    with pytest.raises(HalfBatchLeftError):
        log.resolve("key:0", LocalTransactionState.ROLLBACK_MESSAGE, "why not")


@pytest.mark.parametrize(("column", "value"), [("archived", None), ("count", 4)])
def test_an_archived_row_that_was_changed_by_hand_is_no_answer(log: CommitLog, column: str, value: Any) -> None:
    commit(log, send(log, "key"))
    let_leave(log)
    edit_row(log.engine.op_table, "archived", column, value)
    with pytest.raises(CorruptLogError, match="archived row of half batch 'key:0' that does not say what became of it"):
        another(log).engine.get("key:0")


@pytest.mark.parametrize("look", [CommitLog.pending, CommitLog.open_messages], ids=["pending", "open messages"])
def test_who_sleeps_between_two_looks_does_not_miss_what_has_left_meanwhile(
    log: CommitLog, look: Callable[[CommitLog], object]
) -> None:
    """``log.pending()`` raised HalfBatchNotFoundError for a half batch that others had settled and let leave."""
    record = prepare(log, 0)

    def others() -> None:
        roll_back(another(log), record)
        let_leave(log)

    with at("open batches listed", others):
        look(log)
    assert in_half(log) == set()


def test_a_shared_file_leaves_when_all_in_it_may(log: CommitLog) -> None:
    for i in range(3):
        commit(log, send(log, f"key{i}"))
    record = send(log, "open")
    share_half_file(log)
    log.engine.ledger.mark()
    report = let_leave(log)
    assert (report.archived, report.files_left) == (3, 0)
    commit(log, log.engine.get(record.half_id))
    assert let_leave(log).files_left == 1
    assert in_half(log) == set()


@pytest.fixture
def leaver(log: CommitLog) -> Leaver:
    """Of another process, with graces that are over at once."""
    return Leaver(another(log).engine, Graces(0, 0, FOREVER))


def test_a_crash_between_archive_and_removal_is_made_good(log: CommitLog, leaver: Leaver) -> None:
    commit(log, send(log, "key"))
    log.drain()
    log.engine.ledger.mark()
    assert leaver.archive() == 1  # and its process dies
    assert in_half(log) == {"key:0"}
    assert op_kinds(log, "key:0") == ["commit", "commit", "archived"]
    with pytest.raises(HalfBatchLeftError):
        another(log).engine.state_of(another(log).engine.half.get("key:0"))
    assert bodies(log)
    report = let_leave(log)
    assert (report.archived, report.files_left) == (0, 1)


def test_what_is_said_while_somebody_lets_it_leave_wins(log: CommitLog, leaver: Leaver) -> None:
    record = send(log, "key")
    roll_back(log, record, who=Who.CHECK)
    log.drain()
    log.engine.ledger.mark()
    states = (RowState.ROLLED_BACK_BY_CHECK,)
    replay = partial(log.engine.ledger.reopen, record, 1, states, 2, Who.EXECUTE, "a replay")
    with at("files read", replay, table="half"):
        assert leaver.archive() == 0
    leaver.remove()
    assert in_half(log) == {"key:0"}
    commit(log, record, 2)
    assert len(bodies(log)) == 5


@pytest.mark.log("delta", orders=1)
def test_messages_that_were_set_back_are_noticed(log: CommitLog, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "log/messages", tmp_path / "copy")
    commit(log, send(log, "key"))
    let_leave(log)
    shutil.rmtree(tmp_path / "log/messages")
    shutil.copytree(tmp_path / "copy", tmp_path / "log/messages")
    commit(log, send(log, "more"))
    with pytest.raises(CorruptLogError, match="pruned"):
        another(log).drain()


def test_files_that_left_are_deleted_after_a_time(log: CommitLog, limit: Limit) -> None:
    commit(log, send(log, "key"))
    report = let_leave(log)
    assert report.files_left == 1
    assert report.files_deleted == ()
    limit(REPLACED_FILES_S=0)
    (deleted,) = [f for f in let_leave(log).files_deleted if f.startswith("half/")]
    assert deleted.startswith("half/half-")
    assert not [f for f in let_leave(log).files_deleted if f.startswith("half/")]


# ---------------------------------------------------------------- who sends again
@pytest.fixture
def producer(log: CommitLog) -> Iterator[TransactionMQProducer]:
    with TransactionMQProducer(log, "group", CommitOncePrepared(), check_interval=None) as producer:
        yield producer


def test_a_retry_under_a_key_gets_the_outcome_that_is_kept(log: CommitLog, producer: TransactionMQProducer) -> None:
    table = pa.table({"body": ["a", "b"]})
    first = producer.send_messages_in_transaction(table, topic="orders", idempotency_key="key")
    let_leave(log)
    again = producer.send_messages_in_transaction(table, topic="orders", idempotency_key="key")
    assert again.replayed
    assert again.local_transaction_state is LocalTransactionState.COMMIT_MESSAGE
    assert again.transaction_id == first.transaction_id
    assert sum(another(log).engine.tails().values()) == 2


def test_a_retry_of_a_check_s_rollback_that_has_left_is_told_so(
    log: CommitLog, producer: TransactionMQProducer
) -> None:
    roll_back(log, send(log, "send.group.key"), who=Who.CHECK)
    let_leave(log)
    with pytest.raises(HalfBatchLeftError, match="send its messages as new ones"):
        producer.send_messages_in_transaction(pa.table({"body": ["a"]}), topic="orders", idempotency_key="key")


def commit_beside(log: CommitLog, act: Callable[[HalfRecord], object]) -> list[Placed]:
    """Commit a message of a FIFO topic. Its sender has listed two that were sent before, the second one with the same
    sharding key, and does not know them yet: it reads the first one, and something happens to the second one."""
    log.create_topic("ordered", 1, fifo=True)
    others = [prepare(log, n, {"body": [f"{n}"], "sharding_key": [k]}, topic="ordered") for n, k in enumerate("ak")]
    sender = another(log)
    mine = prepare(sender, 2, {"body": ["2"], "sharding_key": ["k"]}, topic="ordered")
    with at("files read", lambda: act(others[1]), table="half", paths=[others[0].files[0].path]):
        return commit(sender, mine)


def test_a_decision_made_from_an_old_list_goes_on_when_what_it_lists_has_left(log: CommitLog) -> None:
    """It raised HalfBatchNotFoundError for another half batch, which was settled and had left."""

    def leaves(record: HalfRecord) -> None:
        commit(another(log), record)
        let_leave(log)
        assert record.half_id not in in_half(log)

    placed = commit_beside(log, leaves)
    assert [(p.topic, p.queue_offset) for p in placed] == [("ordered", 1)]
    assert bodies(log, "ordered") == ["1", "2"]


def test_a_decision_beside_a_half_batch_that_is_lost_is_refused(log: CommitLog) -> None:
    def is_lost(record: HalfRecord) -> None:
        change = Change(remove=[record.files[0].path], data_change=False)
        assert another(log).engine.half.table.compare_and_set(lambda _: change, lambda _: True) is not None

    with pytest.raises(HalfBatchNotFoundError, match=header_of(1).half_id):
        commit_beside(log, is_lost)
    assert bodies(log, "ordered") == []


@pytest.mark.parametrize(
    ("answer", "idempotency_s", "outcome"),
    [
        (LocalTransactionState.COMMIT_MESSAGE, FOREVER, nullcontext()),
        (LocalTransactionState.UNKNOWN, FOREVER, nullcontext()),
        (LocalTransactionState.COMMIT_MESSAGE, 0, pytest.raises(StaleAttemptError, match="nothing is kept of its")),
        (LocalTransactionState.UNKNOWN, 0, pytest.raises(HalfBatchLeftError, match="nothing is kept of its")),
    ],
)
def test_a_sender_that_slept_through_it_all_gets_the_outcome_that_is_kept(
    log: CommitLog, answer: LocalTransactionState, idempotency_s: float, outcome: Any
) -> None:
    def slept(batch: HalfBatch) -> LocalTransactionState:
        commit(log, log.engine.get(batch.half_id))
        send(log, "later")
        for _ in range(2):
            let_leave(log, idempotency_s=idempotency_s)
        return answer

    with TransactionMQProducer(another(log), "group", Scripted(slept), check_interval=None) as producer, outcome:
        table = pa.table({"body": ["a"]})
        result = producer.send_messages_in_transaction(table, topic="orders", idempotency_key="key")
        assert result.local_transaction_state is LocalTransactionState.COMMIT_MESSAGE
    assert sum(another(log).engine.tails().values()) == 1
