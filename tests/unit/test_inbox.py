"""The inbox: results and position in one database transaction."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support.half_batches import commit, make_log, prepare
from tests.support.inboxes import count_each, inbox_of, make_database, results

FAILURE = txmq.ConsumeResult.FAILURE


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_database(tmp_path)


def test_messages_count_once_however_often_they_come(url: str, log: CommitLog) -> None:
    inbox = inbox_of(url)
    commit(log, prepare(log, 0, 4))
    assert inbox.apply(log.read("orders")) == 4
    assert inbox.apply(log.read("orders")) == 0
    commit(log, prepare(log, 1, 3))
    assert inbox_of(url).apply(log.read("orders")) == 3
    assert results(url) == sorted(b.decode() for b in log.read("orders")["body"].to_pylist())
    assert inbox.positions() == {(t, q): n for (t, q), n in log.engine.ledger.view.tails.items()}


def test_a_message_that_stands_twice_in_one_table_counts_once(url: str, log: CommitLog) -> None:
    """As in a union of two streams that overlap."""
    commit(log, prepare(log, 0, 5))
    messages = log.read("orders")
    assert inbox_of(url).apply(pa.concat_tables([messages.slice(0, 3), messages])) == 5
    assert results(url) == sorted(b.decode() for b in messages["body"].to_pylist())


def test_work_that_fails_writes_nothing_and_moves_nothing(url: str, log: CommitLog) -> None:
    commit(log, prepare(log, 0, 4))

    def fail(connection: sa.Connection, messages: pa.Table) -> None:
        count_each(connection, messages)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        inbox_of(url, fail).apply(log.read("orders"))
    assert results(url) == []
    assert inbox_of(url).positions() == {}
    assert inbox_of(url).apply(log.read("orders")) == 4


def test_consumers_that_race_write_each_result_once(url: str, log: CommitLog) -> None:
    commit(log, prepare(log, 0, 20))
    messages = log.read("orders")
    inbox_of(url)

    def race(_: int) -> object:
        try:
            return inbox_of(url).apply(messages)
        except txmq.InboxConflictError as problem:
            return problem

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(race, range(6))).count(20) == 1
    assert len(results(url)) == 20


@pytest.mark.parametrize(
    ("work", "error", "sentence"),
    [
        (lambda u, m: txmq.SqlInbox(u, "g", "work"), txmq.ListenerError, "a function work"),
        (lambda u, m: txmq.SqlInbox(u, "g g", count_each), txmq.MessageError, "consumerGroup"),
        (lambda u, m: txmq.SqlInbox(u, "g", count_each, table="a;b"), txmq.OptionError, "not a plain table name"),
        (lambda u, m: txmq.SqlInbox("no url", "g", count_each), txmq.ListenerError, "cannot be parsed"),
        (lambda u, m: txmq.SqlInbox(u, "g", count_each).apply(m), txmq.ListenerError, "call create"),
        (lambda u, m: inbox_of(u).apply(m.drop_columns(["topic"])), txmq.OptionError, "no column 'topic'"),
        (lambda u, m: inbox_of(u, lambda c, _: c.commit()).apply(m), txmq.ListenerError, "must not commit"),
        (lambda u, m: inbox_of(u, lambda c, _: FAILURE).apply(m), txmq.ListenerError, "raise an exception"),
        (lambda u, m: inbox_of(u, lambda c, _: [None, FAILURE]).apply(m), txmq.ListenerError, "raise an exception"),
    ],
)
def test_what_cannot_be_is_said(url: str, log: CommitLog, work: Any, error: type[Exception], sentence: str) -> None:
    commit(log, prepare(log, 0, 2))
    with pytest.raises(error, match=sentence):
        work(url, log.read("orders"))
    assert results(url) == []


# ---------------------------------------------------------------- another log
@pytest.mark.parametrize("kind", ["memory", "delta"])
def test_a_log_that_was_made_anew_is_noticed(tmp_path: Path, url: str, kind: str) -> None:
    first, anew = (make_log(kind, tmp_path / name, orders=1) for name in ("first", "anew"))
    commit(first, prepare(first, 0, 5))
    commit(anew, prepare(anew, 0, 3))
    inbox = inbox_of(url, log=first)
    assert inbox.apply(first.read("orders")) == 5
    again = inbox_of(url, log=first.path if kind == "delta" else first.another())
    assert again.apply(first.read("orders")) == 0
    with pytest.raises(txmq.InboxConflictError, match="made anew"):
        inbox_of(url, log=anew).apply(anew.read("orders"))
    assert len(results(url)) == 5
    assert inbox_of(url, group="other", log=anew).apply(anew.read("orders")) == 3


def test_an_inbox_does_not_take_messages_of_a_restored_log_for_old_ones(url: str, tmp_path: Path) -> None:
    """It wrote no result of what was sent after the restore, and said nothing, until it had its position again."""
    log = make_log("delta", tmp_path / "log", orders=2)
    commit(log, prepare(log, 0, 8))
    log.backup(tmp_path / "copy")
    commit(log, prepare(log, 1, 8))
    inbox = inbox_of(url)
    assert inbox.apply(log.read("orders")) == 16
    shutil.rmtree(log.path)
    CommitLog.open(tmp_path / "copy").backup(log.path)
    restored = CommitLog.open(log.path)
    assert inbox.apply(restored.read("orders")) == 0  # what the copy has was written
    before = restored.engine.tails()
    commit(restored, prepare(restored, 2, 4))
    messages = restored.read("orders")
    moved = [queue for queue, end in restored.engine.tails().items() if end > before.get(queue, 0)]
    for topic, queue_id in sorted(moved):
        with pytest.raises(txmq.errors.InboxConflictError, match="restored from a copy") as problem:
            inbox.apply(messages)
        assert f"set_position('{topic}', {queue_id}, {before[topic, queue_id]}) to go on" in str(problem.value)
        assert len(results(url)) == 16
        inbox.set_position(topic, queue_id, before[topic, queue_id])
    assert inbox.apply(messages) == 4
    assert len(results(url)) == 20


def test_an_inbox_that_is_given_no_times_of_commit_knows_none(url: str, log: CommitLog) -> None:
    """A program that drops the column in one run, and keeps it in the next, is not told of a restored log."""
    inbox = inbox_of(url)
    for number, keeps in enumerate((True, False, True)):
        commit(log, prepare(log, number, 4))
        messages = log.read("orders")
        assert inbox.apply(messages if keeps else messages.drop_columns(["commit_timestamp"])) == 4
        assert inbox.apply(messages) == 0


# ---------------------------------------------------------------- work that ends the transaction
@pytest.mark.parametrize("way", ["COMMIT", "ROLLBACK"])
def test_an_inbox_whose_work_ended_its_transaction_does_not_go_on(url: str, log: CommitLog, way: str) -> None:
    commit(log, prepare(log, 0, 4))

    def work(connection: sa.Connection, messages: pa.Table) -> None:
        count_each(connection, messages.slice(0, 2))
        connection.connection.driver_connection.execute(way)  # type: ignore[union-attr]
        count_each(connection, messages.slice(2))

    with pytest.raises(txmq.TransactionEndedError, match=r"marked.*set_position"):
        inbox_of(url, work).apply(log.read("orders"))
    written = 2 if way == "COMMIT" else 0
    with pytest.raises(txmq.ListenerError, match="from offset 0 on may be in"):
        inbox_of(url).apply(log.read("orders"))
    assert len(results(url)) == written
    with pytest.raises(txmq.ListenerError, match=r"call set_position\('orders', \d, next_offset\)"):
        inbox_of(url).positions()
    for queue_id in set(log.read("orders")["queue_id"].to_pylist()):
        inbox_of(url).set_position("orders", queue_id, 0)
    assert inbox_of(url).apply(log.read("orders")) == 4
    assert len(results(url)) == written + 4


def test_an_inbox_that_cannot_note_that_its_work_ended_its_transaction_says_so(
    url: str, log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    commit(log, prepare(log, 0, 4))

    def work(connection: sa.Connection, messages: pa.Table) -> None:
        driver: Any = connection.connection.driver_connection
        driver.execute("ROLLBACK")
        driver.execute("DROP TABLE txmq_inbox")

    with pytest.raises(txmq.TransactionEndedError, match="could not be marked, so a later call would write"):
        inbox_of(url, work).apply(log.read("orders"))
    assert "could not note that its work ended the database transaction: " in caplog.text


def test_a_position_can_be_set_to_write_results_anew(url: str, log: CommitLog) -> None:
    """A reset of the group came to nothing: the inbox took each message for one that it had written."""
    commit(log, prepare(log, 0, 4))
    messages = log.read("orders")
    inbox = inbox_of(url)
    assert (inbox.apply(messages.slice(0, 0)), inbox.apply(messages), inbox.apply(messages)) == (0, 4, 0)
    for topic, queue_id in inbox.positions():
        inbox.set_position(topic, queue_id, 0)
    inbox.set_position("bills", 7, 3)
    assert inbox.apply(messages) == 4
    assert inbox.positions()["bills", 7] == 3
    assert txmq.SqlInbox(url, "other", count_each).positions() == {}
    with pytest.raises(txmq.OptionError, match="next_offset=-1"):
        inbox.set_position("orders", 0, -1)


def test_an_inbox_whose_table_takes_topics_for_equal_is_refused(url: str, log: CommitLog) -> None:
    commit(log, prepare(log, 0, 4))
    inbox_of(url)
    with sa.create_engine(url).begin() as connection:
        query = "select sql from sqlite_master where name = 'txmq_inbox'"
        made = connection.execute(sa.text(query)).scalar_one()
        connection.execute(sa.text("drop table txmq_inbox"))
        connection.execute(sa.text(made.replace("VARCHAR(382)", "VARCHAR(382) COLLATE NOCASE")))
        assert "NOCASE" in connection.execute(sa.text(query)).scalar_one()
    with pytest.raises(txmq.ListenerError, match="collation is wrong"):
        txmq.SqlInbox(url, "points", count_each).apply(log.read("orders"))
    assert results(url) == []


def test_processes_that_make_an_inbox_at_once_do_not_disturb_each_other(url: str) -> None:
    """On PostgreSQL 9 of 12 ended with an IntegrityError of a system table, IF NOT EXISTS or not."""
    engine, tries = sa.create_engine(url), []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def races(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.strip().startswith("CREATE TABLE"):
            tries.append(None)
            if len(tries) == 1:
                raise sa.exc.IntegrityError(statement, None, Exception("pg_type_typname_nsp_index"))

    inbox = txmq.SqlInbox(engine, "points", count_each)
    inbox.create()
    assert len(tries) > 1
    assert inbox.positions() == {}


def test_a_consumer_whose_inbox_has_no_tables_does_not_start(log: CommitLog, tmp_path: Path, url: str) -> None:
    """It did, and each message failed again and again."""
    inbox = txmq.SqlInbox(url, "points", count_each)
    consumer = txmq.PushConsumer(log, "points", inbox, "orders", mode="orderly")
    with pytest.raises(txmq.ListenerError, match="has no table 'txmq_inbox': call create"):
        consumer.start()
    assert not consumer.is_running
    inbox.create()
    with consumer:
        assert consumer.is_running
    gone = txmq.SqlInbox(f"sqlite:///{tmp_path}/gone/results.db", "points", count_each)
    with txmq.PushConsumer(log.another(), "points", gone, "orders", mode="orderly") as waiting:
        assert waiting.is_running, "a database that does not answer may do so later"
