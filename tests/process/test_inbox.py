"""The inbox of drivers that are killed, or that run at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from tests.support.half_batches import commit, make_log, prepare
from tests.support.inboxes import count_each, inbox_of, make_database, results

ROOT = Path(__file__).parents[2]


SERVERS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("postgres", "mariadb")]


def empty(server: sa.URL) -> sa.Engine:
    """A server's database with the empty table ``results`` and no inbox."""
    engine = sa.create_engine(server)
    with engine.begin() as connection:
        for table in ("results", "txmq_inbox", "txmq_inbox_log"):
            connection.execute(sa.text(f"drop table if exists {table}"))
        connection.execute(sa.text("create table results (body text)"))
    return engine


@pytest.mark.parametrize("server", SERVERS)
def test_two_drivers_on_a_server(request: pytest.FixtureRequest, server: str, tmp_path: Path) -> None:
    server_url: sa.URL = request.getfixturevalue(server)
    engine = empty(server_url)
    log = make_log("memory", tmp_path)
    commit(log, prepare(log, 0, 6))
    messages = log.read("orders")
    within, go_on = threading.Event(), threading.Event()

    def slow(connection: sa.Connection, new: pa.Table) -> None:
        count_each(connection, new)
        within.set()
        go_on.wait(30)

    url = server_url.render_as_string(hide_password=False)
    first = inbox_of(url, slow)
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(first.apply(messages)))
    thread.start()
    assert within.wait(30)
    second_engine = sa.create_engine(server_url)
    second = inbox_of(second_engine)

    @sa.event.listens_for(second_engine, "before_cursor_execute")
    def look(_: Any, __: Any, statement: str, *others: Any) -> None:
        if statement.startswith("INSERT INTO txmq_inbox"):  # it has read where the queue stood
            threading.Timer(0.3, go_on.set).start()

    try:
        with pytest.raises(txmq.InboxConflictError, match="nothing was written"):
            second.apply(messages)  # waits for the first
    finally:
        go_on.set()
        thread.join()
        second_engine.dispose()
    assert done == [6]
    assert len(results(url)) == 6
    engine.dispose()


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("way", ["COMMIT", "COMMIT; BEGIN", "CREATE TABLE other (id INTEGER)"])
def test_an_inbox_whose_work_ended_its_transaction_on_a_server(
    request: pytest.FixtureRequest, server: str, way: str, tmp_path: Path
) -> None:
    server_url: sa.URL = request.getfixturevalue(server)
    engine = empty(server_url)
    log = make_log("memory", tmp_path, orders=1)
    commit(log, prepare(log, 0, 4))

    def work(connection: sa.Connection, messages: pa.Table) -> None:
        count_each(connection, messages.slice(0, 2))
        for statement in way.split("; "):
            connection.connection.driver_connection.cursor().execute(statement)  # type: ignore[union-attr]

    url = server_url.render_as_string(hide_password=False)
    if way.startswith("CREATE") and server == "postgres":  # PostgreSQL undoes DDL like anything else
        assert inbox_of(url, work).apply(log.read("orders")) == 4
    else:
        with pytest.raises(txmq.TransactionEndedError, match="marked"):
            inbox_of(url, work).apply(log.read("orders"))
        assert len(results(url)) == 2
        with pytest.raises(txmq.ListenerError, match="from offset 0 on may be in"):
            inbox_of(url).apply(log.read("orders"))
    with engine.begin() as connection:
        connection.execute(sa.text("drop table if exists other"))
    engine.dispose()


KILLED = """
import os, signal, sys
import sqlalchemy as sa
import rmq_spark as txmq
from tests.support.inboxes import count_each, inbox_of

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


@pytest.mark.turns(2)
@pytest.mark.parametrize("where", ["within", "after"])
def test_a_kill_between_results_and_position_changes_nothing(tmp_path: Path, where: str) -> None:
    url = make_database(tmp_path)
    log = make_log("delta", tmp_path / "log")
    commit(log, prepare(log, 0, 5))
    inbox_of(url)
    command = [sys.executable, "-c", KILLED, url, log.path, where]
    died = subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert died.returncode == -signal.SIGKILL
    assert inbox_of(url).apply(log.read("orders")) == (5 if where == "within" else 0)
    assert len(results(url)) == 5
