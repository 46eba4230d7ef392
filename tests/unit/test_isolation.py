"""A half batch that cannot be read holds up as little as possible: all others go on, and an operator sees it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark import ROLLBACK_MESSAGE, CheckService, CommitLog, ConsumerGroup, PullConsumer
from rmq_spark.checks import CheckReport
from rmq_spark.cli.doctor import CRITICAL
from rmq_spark.errors import LostFileError, UnreadableFileError
from rmq_spark.metrics import LogWatch
from tests.support.clocks import set_clock
from tests.support.commands import objects, txmq
from tests.support.half_batches import (
    another,
    bodies,
    commit,
    half_file,
    header_of,
    in_half,
    let_leave,
    orphan_of,
    prepare,
    quarantine,
    roll_back,
)
from tests.support.inside import (
    NO_ROWS,
    TIMESTAMP,
    Decision,
    HalfRecord,
    HalfWriter,
    Staged,
    Who,
    open_now,
    retained_batches,
)
from tests.support.limits import Limit
from tests.support.listeners import Scripted
from tests.support.meanwhile import seen_at
from tests.support.sends import message, producer_of, wait_for
from tests.support.whole_history import op_rows_of

pytestmark = pytest.mark.log("delta", orders=2, plain=1)


def lose(log: CommitLog, record: HalfRecord) -> Path:
    """Somebody moves the half file away: to where it is returned."""
    path = half_file(log, record)
    return path.rename(Path(log.path).parent / path.name)


def put_back(log: CommitLog, record: HalfRecord) -> None:
    path = half_file(log, record)
    (Path(log.path).parent / path.name).rename(path)


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


@pytest.fixture
def delayed(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> list[HalfRecord]:
    """Two half batches whose messages are due, of which the first has lost its file."""
    records = [prepare(log, n, {"body": [f"late {n}"], "deliver_at": [in_seconds(5)]}, topic="plain") for n in (0, 1)]
    for record in records:
        commit(log, record)
    lose(log, records[0])
    set_clock(monkeypatch, 60)
    return records


def test_a_lost_file_of_a_due_message_stops_no_decision_and_no_other_due_message(
    log: CommitLog, delayed: list[HalfRecord]
) -> None:
    """Every decision of the log failed with LostFileError, whatever it was about, and nothing due was placed."""
    log = another(log)
    commit(log, prepare(log, 2, {"body": ["x"]}, topic="plain"))
    roll_back(log, prepare(log, 3, {"body": ["y"]}, topic="orders"))
    assert bodies(log, "plain") == ["x", "late 1"]
    assert set(log.engine.ledger.view.waiting) == {delayed[0].half_id}


def test_a_check_reports_due_messages_that_cannot_be_placed(log: CommitLog, delayed: list[HalfRecord]) -> None:
    report = CheckService(log, {}).run_once()
    assert report.placed == 1
    ((half_id, problem),) = report.problems
    assert half_id == delayed[0].half_id
    assert "due, and cannot be placed: LostFileError" in problem


def test_due_messages_are_placed_when_their_file_is_back(log: CommitLog, delayed: list[HalfRecord]) -> None:
    log.engine.ledger.place_due()
    assert bodies(log, "plain") == ["late 1"]
    put_back(log, delayed[0])
    log.engine.ledger.place_due()
    assert bodies(log, "plain") == ["late 1", "late 0"]
    assert CheckService(log, {}).run_once().problems == []


def test_a_check_forgets_due_messages_that_another_process_placed(log: CommitLog, delayed: list[HalfRecord]) -> None:
    """Its rounds reported them for ever."""
    service = CheckService(log, {})
    assert len(service.run_once().problems) == 1
    put_back(log, delayed[0])
    another(log).engine.ledger.place_due()
    assert service.run_once().problems == []


def test_what_is_pending_is_listed_beside_what_cannot_be_read(log: CommitLog) -> None:
    """log.pending() raised, and named nothing."""
    lost, sound = prepare(log, 0, 3), prepare(log, 1, 2)
    lose(log, lost)
    log = another(log)
    rows = {row["half_id"]: row for row in log.pending().to_pylist()}
    assert rows[sound.half_id]["messages"] == 2
    unreadable = rows[lost.half_id]
    assert (unreadable["app_id"], unreadable["batch_id"], unreadable["messages"]) == ("app", 0, 3)
    assert unreadable["producer_group"] is None
    assert unreadable["prepared_at"] == lost.prepared_at
    assert [row["half_id"] for row in objects("pending", log.path)] == [lost.half_id, sound.half_id]
    assert "1 pending half batch cannot be read" in txmq("doctor", log.path, code=CRITICAL)[0]


def test_the_lag_of_a_group_is_told_beside_what_cannot_be_read(log: CommitLog) -> None:
    """Lag, the list of groups, stats and top failed for every group."""
    commit(log, prepare(log, 0, {"body": ["x"]}, topic="plain"))
    lost, sound = prepare(log, 1, 3), prepare(log, 2, 2)
    lose(log, lost)
    log = another(log)
    assert sum(pending for pending, _ in log.open_messages().values()) == sound.rows
    group = ConsumerGroup(log, "points")
    group.reset("earliest", ["plain"])
    assert group.lag()["lag"].to_pylist() == [1]


def test_a_pull_consumer_reads_the_other_queues_first(log: CommitLog) -> None:
    """It stopped at the one that it could not read."""
    lost, sound = (prepare(log, n, {"body": [f"{n}"], "queue_id": [n]}, topic="orders") for n in (0, 1))
    for record in (lost, sound):
        commit(log, record)
    lose(log, lost)
    with PullConsumer(log, "points", "orders") as consumer:
        assert [message.body for message in consumer.poll()] == [b"1"]
        with pytest.raises(LostFileError, match=half_file(log, lost).name):
            consumer.poll()
        put_back(log, lost)
        again: list[Any] = []

        def has_polled() -> bool:
            with suppress(LostFileError):
                again.extend(consumer.poll() or ())
            return bool(again)

        wait_for(has_polled)
        assert [message.body for message in again] == [b"0"]


def test_upkeep_does_what_it_can_when_a_drain_finds_a_lost_file(log: CommitLog) -> None:
    """It ended at the drain: nothing was merged, stripped, pruned or deleted ever after."""
    record = prepare(log, 0, 2)
    commit(log, record)
    lose(log, record)
    orphan = orphan_of(log)
    with pytest.raises(LostFileError), seen_at("upkeep begins") as rounds:
        another(log).maintain()
    assert not orphan.exists()
    assert len(rounds) == 1


def test_upkeep_does_what_it_can_when_it_finds_a_lost_file_of_messages(log: CommitLog, limit: Limit) -> None:
    """It ended at the merge, and deleted nothing ever after."""
    limit(MESSAGES_FILES_MAX=1)
    for n in range(3):
        commit(log, prepare(log, n, {"body": [f"{n}"]}, topic="plain"))
        log.drain()
    file, *_ = Path(log.path, "messages").glob("*.parquet")
    file.rename(Path(log.path).parent / file.name)
    orphan = orphan_of(log)
    with pytest.raises(LostFileError, match=file.name):
        another(log).maintain()
    assert not orphan.exists()
    (Path(log.path).parent / file.name).rename(file)
    another(log).maintain()
    assert bodies(log, "plain") == ["0", "1", "2"]


# ---------------------------------------------------------------- a file that small sends share
def prepare_together(
    log: CommitLog, *bodies: str, topic: str = "plain", apps: Sequence[str] = (), **columns: list[str]
) -> list[HalfRecord]:
    """Half batches of one message each, in one file."""
    staged = []
    for n, body in enumerate(bodies):
        header = header_of(0, apps[n] if apps else f"small{n}")
        writer = HalfWriter(header, log.topics(), topic, None, log.fifo_topics())
        table = pa.table({"body": [body], **{name: [values[n]] for name, values in columns.items()}})
        staged.append(Staged(header, [writer.to_half_rows(table)]))
    records = [record for record in log.engine.prepare(staged) if isinstance(record, HalfRecord)]
    assert len({half_file(log, record) for record in records}) == 1
    return records


def checked(log: CommitLog) -> CheckReport:
    return CheckService(log, {"group": Scripted()}, transaction_timeout=0).run_once()


def test_a_lost_file_that_small_sends_share_stops_nothing_else(log: CommitLog) -> None:
    """Checks, pending, upkeep, stats and limits failed for all that the log has."""
    small = prepare_together(log, "a", "b", "c")
    own = prepare(log, 0, {"body": ["own"]}, topic="plain")
    lose(log, small[0])
    log = another(log)
    unknown, known = log.pending().to_pylist()
    assert (unknown["half_id"], unknown["messages"], unknown["prepared_at"]) == (None, 3, small[0].prepared_at)
    assert known["half_id"] == own.half_id
    assert [row["half_id"] for row in objects("pending", log.path)] == [None, own.half_id]
    assert sum(pending for pending, _ in log.open_messages().values()) == 1
    report = checked(log)
    assert report.committed.messages == 1
    ((half_id, problem),) = report.problems
    assert half_id is None
    assert "half batches with 3 messages cannot be checked" in problem
    assert half_file(log, small[0]).name in problem
    assert "docs/backup.md#put-one-file-back" in problem
    log.maintain()
    assert "1 file that half batches share cannot be read" in txmq("doctor", log.path, code=CRITICAL)[0]
    commit(log, prepare(log, 1, {"body": ["more"]}, topic="plain"))
    put_back(log, small[0])
    assert checked(another(log)).committed.messages == 3
    assert bodies(log, "plain") == ["own", "more", "a", "b", "c"]


def test_a_half_batch_in_a_lost_shared_file_is_not_called_unknown(log: CommitLog) -> None:
    small = prepare_together(log, "a", "b")
    lose(log, small[0])
    with pytest.raises(LostFileError, match=half_file(log, small[0]).name):
        another(log).trace(half_id=small[1].half_id)
    with pytest.raises(LostFileError):
        another(log).resolve(small[1].half_id, ROLLBACK_MESSAGE, "lost")


def test_no_mark_passes_a_shared_file_that_cannot_be_read(log: CommitLog) -> None:
    """Its half batches would count as settled for ever, or their verdicts would be forgotten."""
    small = prepare_together(log, "a", "b", "c")
    commit(log, small[0])
    lose(log, small[0])
    log = another(log)
    for n in range(3):
        commit(log, prepare(log, n, {"body": [f"own {n}"]}, topic="plain"))
        log.engine.ledger.mark()
    put_back(log, small[0])
    log = another(log)
    assert set(log.pending()["half_id"].to_pylist()) == {record.half_id for record in small[1:]}
    checked(log)
    log.engine.ledger.mark()
    assert another(log).pending().num_rows == 0
    assert sorted(bodies(log, "plain")) == ["a", "b", "c", "own 0", "own 1", "own 2"]


def test_op_keeps_the_rows_of_half_batches_in_a_shared_file_that_cannot_be_read(log: CommitLog) -> None:
    """They seemed to have left half, so nobody would need them any more."""

    def op_rows() -> int:
        return [row["half_id"] for row in op_rows_of(log)].count(small[0].half_id)

    small = prepare_together(log, "a", "b")
    commit(log, small[0])
    let_leave(log)
    let_leave(log)
    assert op_rows() == 2
    lose(log, small[0])
    let_leave(log, idempotency_s=0)
    assert op_rows() == 2
    put_back(log, small[0])
    assert checked(another(log)).committed.messages == 1
    assert bodies(log, "plain") == ["a", "b"]


def test_only_fifo_topics_wait_for_a_shared_file_that_cannot_be_read(log: CommitLog) -> None:
    """Nobody knows whether the lost messages come before those of the same key."""
    log.create_topic("fifo", 1, fifo=True)
    small = prepare_together(log, "first", "second", topic="fifo", sharding_key=["k", "k"])
    lose(log, small[0])
    log = another(log)
    later = prepare(log, 0, {"body": ["third"], "sharding_key": ["k"]}, topic="fifo")
    commit(log, prepare(log, 1, {"body": ["x"]}, topic="plain"))
    with pytest.raises(LostFileError):
        commit(log, later)
    assert bodies(log, "plain") == ["x"]
    put_back(log, small[0])
    commit(log, later)
    checked(log)
    assert bodies(log, "fifo") == ["first", "second", "third"]


@pytest.mark.parametrize("is_shared", [False, True], ids=["a file of its own", "a shared file"])
def test_what_was_sent_before_a_lost_file_does_not_wait_for_it(log: CommitLog, is_shared: bool) -> None:
    """Nothing of any FIFO topic could be decided."""
    log.create_topic("fifo", 1, fifo=True)
    first = prepare(log, 0, {"body": ["first"], "sharding_key": ["k"]}, topic="fifo")
    if is_shared:
        lost, _ = prepare_together(log, "second", "third", topic="fifo", sharding_key=["k", "k"])
    else:
        lost = prepare(log, 1, {"body": ["second", "third"], "sharding_key": ["k", "k"]}, topic="fifo")
    last = prepare(log, 2, {"body": ["last"], "sharding_key": ["k"]}, topic="fifo")
    lose(log, lost)
    log = another(log)
    commit(log, first)
    assert bodies(log, "fifo") == ["first"]
    with pytest.raises(LostFileError):
        commit(log, last)
    put_back(log, lost)
    commit(log, last)
    checked(log)
    assert bodies(log, "fifo") == ["first", "second", "third", "last"]


BOTH = pa.schema([*((c, pa.string()) for c in ("topic", "body", "sharding_key")), ("deliver_at", TIMESTAMP)])


def test_due_messages_of_fifo_topics_behind_a_lost_file_stop_no_other_decision(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decision of the log failed, for it might have placed them."""
    log.create_topic("fifo", 1, fifo=True)
    both = {"topic": ["fifo", "plain"], "body": ["second", "late"], "sharding_key": ["k", None]}
    both["deliver_at"] = [None, in_seconds(5)]  # type: ignore[list-item]
    lost = prepare(log, 0, {"body": ["first"], "sharding_key": ["k"]}, topic="fifo")
    due = prepare(log, 1, pa.table(both, schema=BOTH), topic=None)
    commit(log, due)
    commit(log, prepare(log, 2, {"body": ["late, too"], "deliver_at": [in_seconds(5)]}, topic="plain"))
    lose(log, lost)
    set_clock(monkeypatch, 60)
    log = another(log)
    commit(log, prepare(log, 3, {"body": ["x"]}, topic="plain"))
    assert bodies(log, "plain") == ["x", "late, too"]
    assert set(log.engine.ledger.unplaceable) == {due.half_id}
    put_back(log, lost)
    commit(log, lost)
    assert bodies(log, "plain") == ["x", "late, too", "late"]
    assert bodies(log, "fifo") == ["first", "second"]


@pytest.mark.turns(2)
@pytest.mark.parametrize("is_plain", [True, False], ids=["committed", "rolled back after a quarantine"])
def test_a_settled_half_batch_whose_file_is_lost_keeps_no_other_from_leaving(log: CommitLog, is_plain: bool) -> None:
    """No half batch left any more, and half and op grew for ever."""
    lost, sound = (prepare(log, 0, {"body": [f"{n}"]}, app=f"app{n}", topic="plain") for n in (0, 1))
    last = [prepare(log, 1, {"body": ["last"]}, app=f"app{n}", topic="plain") for n in (0, 1)]
    for record in (sound, *last):
        commit(log, record)
    if is_plain:
        commit(log, lost)
    else:
        quarantine(log, lost)
        log.resolve(lost.half_id, ROLLBACK_MESSAGE, "it never happened")
    log.drain()
    lose(log, lost)
    let_leave(log)
    let_leave(log)
    assert in_half(log) == {lost.half_id, *(record.half_id for record in last)}
    put_back(log, lost)
    let_leave(log)
    let_leave(log)
    assert in_half(log) == {record.half_id for record in last}


# ---------------------------------------------------------------- no false all-clear
def test_a_quarantined_half_batch_that_cannot_be_read_is_listed(log: CommitLog) -> None:
    """Nothing was quarantined, by all that was said."""
    lost = prepare(log, 0, {"body": ["x"]}, topic="plain")
    quarantine(log, lost)
    lose(log, lost)
    (row,) = another(log).quarantined().to_pylist()
    assert (row["half_id"], row["producer_group"]) == (lost.half_id, None)
    assert "1 half batch quarantined" in txmq("doctor", log.path, code=CRITICAL)[0]


def test_the_figures_and_the_report_count_a_file_that_cannot_be_read(log: CommitLog) -> None:
    """An alarm on the oldest pending message went quiet, and the report said that nothing is pending."""
    small = prepare_together(log, "a", "b")
    lose(log, small[0])
    (found,) = LogWatch(log.path).look().pending.values()
    assert found.half_batches == 1
    assert found.oldest_s >= 0
    assert half_file(log, small[0]).name in open_now(another(log).engine)["half_id"].to_pylist()
    assert checked(another(log)).pending == 1


def test_a_comparison_with_the_database_needs_every_half_batch(log: CommitLog) -> None:
    """txmq reconcile said that nothing is left to be done, and had not looked at those in the lost file."""
    small = prepare_together(log, "a", "b")
    lose(log, small[0])
    with pytest.raises(LostFileError, match=half_file(log, small[0]).name):
        retained_batches(another(log).engine)


def test_a_search_by_key_finds_what_lies_beside_a_file_that_cannot_be_read(log: CommitLog) -> None:
    lost, sound = (prepare(log, n, {"body": [f"{n}"], "keys": ["k"]}, topic="plain") for n in (0, 1))
    lose(log, lost)
    assert [found["half_id"] for found in objects("query", log.path, "--key", "k")] == [sound.half_id]


def test_a_backup_names_the_file_that_cannot_be_read(log: CommitLog, tmp_path: Path) -> None:
    """It said of a sound half batch that its messages are nowhere."""
    small = prepare_together(log, "a", "b")
    for record in small:
        commit(log, record)
    lose(log, small[0])
    with pytest.raises(LostFileError, match=half_file(log, small[0]).name):
        another(log).backup(tmp_path / "copy")


def test_a_key_that_is_found_may_be_sent_again_beside_a_file_that_cannot_be_read(log: CommitLog) -> None:
    """The retry was refused, as if nobody knew what became of the first send."""
    with producer_of(log) as producer:
        sent = [producer.send_message_in_transaction(message(n), idempotency_key=f"{n}") for n in range(3)]
    small = prepare_together(log, "a", "b", apps=["send.shop.0", "send.shop.9"])
    lose(log, small[0])
    with producer_of(another(log)) as producer:
        again = producer.send_message_in_transaction(message(1), idempotency_key="1")
        assert (again.replayed, again.half_id) == (True, sent[1].half_id)
        with pytest.raises(LostFileError):
            producer.send_message_in_transaction(message(4), idempotency_key="4")


def test_upkeep_goes_on_when_a_half_file_has_the_bytes_of_another_one(log: CommitLog) -> None:
    """It ended at the drain, as if the whole log were damaged."""
    records = [prepare(log, n, {"body": [f"{n}"]}, topic="plain") for n in (0, 1)]
    for record in records:
        commit(log, record)
    first, second = (half_file(log, record) for record in records)
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    orphan = orphan_of(log)
    with pytest.raises(UnreadableFileError, match=second.name):
        another(log).maintain()
    assert not orphan.exists()
    second.write_bytes(content)
    another(log).maintain()
    assert bodies(log, "plain") == ["0", "1"]


def test_who_looks_what_holds_a_message_up_forgets_no_due_message(log: CommitLog, delayed: list[HalfRecord]) -> None:
    log.create_topic("fifo", 1, fifo=True)
    first, second = (prepare(log, n, {"body": [f"{n}"], "sharding_key": ["k"]}, topic="fifo") for n in (4, 5))
    engine = another(log).engine
    engine.decide([Decision(second, 1, second.all_rows, NO_ROWS, Who.EXECUTE)])
    assert set(engine.ledger.unplaceable) == {delayed[0].half_id}
    assert engine.ledger.blocked_by(second) == [first.half_id]
    assert set(engine.ledger.unplaceable) == {delayed[0].half_id}


def test_decisions_look_seldom_for_due_messages_that_cannot_be_read(
    log: CommitLog, delayed: list[HalfRecord], limit: Limit
) -> None:
    """Each decision looked for each of them: seconds, when there were hundreds."""
    log = another(log)
    commit(log, prepare(log, 6, {"body": ["x"]}, topic="plain"))
    put_back(log, delayed[0])
    commit(log, prepare(log, 7, {"body": ["y"]}, topic="plain"))
    assert set(log.engine.ledger.unplaceable) == {delayed[0].half_id}
    limit(TRY_AGAIN_S=0)
    commit(log, prepare(log, 8, {"body": ["z"]}, topic="plain"))
    assert sorted(bodies(log, "plain")) == ["late 0", "late 1", "x", "y", "z"]
