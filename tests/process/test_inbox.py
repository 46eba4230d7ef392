"""The inbox of drivers that are killed, or that run at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from tests.half_batches import commit, make_log, prepare
from tests.inboxes import count_each, inbox_of, make_database, results

ROOT = Path(__file__).parents[2]


@pytest.mark.postgres
def test_two_drivers_on_postgres(postgres: sa.URL, tmp_path: Path) -> None:
    engine = sa.create_engine(postgres)
    with engine.begin() as connection:
        connection.execute(sa.text("drop table if exists results"))
        connection.execute(sa.text("drop table if exists txmq_inbox"))
        connection.execute(sa.text("create table results (body text)"))
    log = make_log("memory", tmp_path)
    commit(log, prepare(log, 0, 6))
    messages = log.read("orders")
    within, go_on = threading.Event(), threading.Event()

    def slow(connection: sa.Connection, new: pa.Table) -> None:
        count_each(connection, new)
        within.set()
        go_on.wait(30)

    url = postgres.render_as_string(hide_password=False)
    first = inbox_of(url, slow)
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(first.apply(messages)))
    thread.start()
    assert within.wait(30)
    threading.Timer(0.3, go_on.set).start()
    with pytest.raises(txmq.InboxConflictError, match="nothing was written"):
        inbox_of(url).apply(messages)  # waits for the first
    thread.join()
    assert done == [6]
    assert len(results(url)) == 6
    engine.dispose()


KILLED = """
import os, signal, sys
import sqlalchemy as sa
import rmq_spark as txmq
from tests.inboxes import count_each, inbox_of

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
