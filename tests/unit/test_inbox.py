"""The inbox: results and position in one database transaction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark.commitlog.log import CommitLog
from tests.half_batches import commit, make_log, prepare

ROOT = Path(__file__).parents[2]


def count_each(connection: sa.Connection, messages: pa.Table) -> None:
    for body in messages["body"].to_pylist():
        connection.execute(sa.text("insert into results (body) values (:body)"), {"body": body.decode()})


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path / 'results.db'}"
    with sa.create_engine(found).begin() as connection:
        connection.execute(sa.text("create table results (body text)"))
    return found


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    return make_log("memory", tmp_path, orders=2)


def results(url: str) -> list[str]:
    with sa.create_engine(url).connect() as connection:
        return sorted(connection.execute(sa.text("select body from results")).scalars())


def inbox_of(url: str, work: Callable[..., Any] = count_each, group: str = "points") -> txmq.SqlInbox:
    made = txmq.SqlInbox(url, group, work)
    made.create()
    return made


def test_messages_count_once_however_often_they_come(url: str, log: CommitLog) -> None:
    inbox = inbox_of(url)
    commit(log, prepare(log, 0, 4))
    assert inbox.apply(log.read("orders")) == 4
    assert inbox.apply(log.read("orders")) == 0
    commit(log, prepare(log, 1, 3))
    assert inbox_of(url).apply(log.read("orders")) == 3
    assert results(url) == sorted(b.decode() for b in log.read("orders")["body"].to_pylist())
    assert inbox.positions() == {(t, q): n for (t, q), n in log.ledger.tails.items()}


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


def test_groups_have_positions_of_their_own(url: str, log: CommitLog) -> None:
    commit(log, prepare(log, 0, 4))
    assert [inbox_of(url, group=g).apply(log.read("orders")) for g in ("a", "b", "a")] == [4, 4, 0]


def test_processes_that_race_write_each_result_once(tmp_path: Path, url: str) -> None:
    log = make_log("memory", tmp_path, orders=2)
    commit(log, prepare(log, 0, 20))
    messages = log.read("orders")
    inbox_of(url)
    outcomes: list[object] = []

    def race() -> None:
        try:
            outcomes.append(inbox_of(url).apply(messages))
        except txmq.InboxConflictError as problem:
            outcomes.append(problem)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(20) == 1
    assert len(results(url)) == 20


@pytest.mark.postgres
def test_two_drivers_on_postgres(postgres: sa.URL, log: CommitLog) -> None:
    engine = sa.create_engine(postgres)
    with engine.begin() as connection:
        connection.execute(sa.text("drop table if exists results"))
        connection.execute(sa.text("drop table if exists txmq_inbox"))
        connection.execute(sa.text("create table results (body text)"))
    commit(log, prepare(log, 0, 6))
    messages = log.read("orders")
    within, go_on = threading.Event(), threading.Event()

    def slow(connection: sa.Connection, new: pa.Table) -> None:
        count_each(connection, new)
        within.set()
        go_on.wait(30)

    first = inbox_of(str(postgres.render_as_string(hide_password=False)), slow)
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(first.apply(messages)))
    thread.start()
    assert within.wait(30)
    threading.Timer(0.3, go_on.set).start()
    with pytest.raises(txmq.InboxConflictError, match="nothing was written"):
        inbox_of(postgres.render_as_string(hide_password=False)).apply(messages)  # waits for the first
    thread.join()
    assert done == [6]
    with engine.connect() as connection:
        assert connection.execute(sa.text("select count(*) from results")).scalar_one() == 6
    engine.dispose()


KILLED = """
import os, signal, sys
import sqlalchemy as sa
import rmq_spark as txmq
from tests.unit.test_inbox import count_each, inbox_of

url, path, where = sys.argv[1:]
log = txmq.CommitLog.open(path)

def work(connection, messages):
    count_each(connection, messages)
    if where == "within":
        os.kill(os.getpid(), signal.SIGKILL)

inbox_of(url, work).apply(log.read("orders"))
if where == "after":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("where", ["within", "after"])
def test_a_kill_between_results_and_position_changes_nothing(tmp_path: Path, url: str, where: str) -> None:
    log = make_log("delta", tmp_path / "log")
    commit(log, prepare(log, 0, 5))
    inbox_of(url)
    command = [sys.executable, "-c", KILLED, url, log.path, where]
    died = subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert died.returncode == -signal.SIGKILL
    assert inbox_of(url).apply(log.read("orders")) == (5 if where == "within" else 0)
    assert len(results(url)) == 5


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
    ],
)
def test_what_cannot_be_is_said(url: str, log: CommitLog, work: Any, error: type[Exception], sentence: str) -> None:
    commit(log, prepare(log, 0, 2))
    with pytest.raises(error, match=sentence):
        work(url, log.read("orders"))
    assert results(url) == []
