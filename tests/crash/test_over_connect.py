"""Listeners and an inbox that Spark Connect has pickled, on PostgreSQL, and a Connect server that is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from tests.crash.over_connect import APP, GROUP, REFUSED_OF, URL
from tests.crash.processes import Program
from tests.process.postgres import running
from tests.torture.kill.points import Fate

pytestmark = [pytest.mark.long, pytest.mark.connect, pytest.mark.postgres]

BATCHES, ROWS = 4, 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.URL]:
    with TemporaryDirectory(prefix="txmq-pg-") as folder, running(Path(folder)) as url:
        yield url


@pytest.fixture
def root(server: sa.URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a commit log, orders to come, and the URL of an empty database with its tables."""
    name = f"of_{os.urandom(4).hex()}"
    with sa.create_engine(server, isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    url = server.set(database=name)
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE taken (n bigint, attempt bigint)")
        connection.exec_driver_sql(f"CREATE TABLE kept (n bigint PRIMARY KEY CHECK (mod(n, {REFUSED_OF}) <> 0))")
        connection.exec_driver_sql("CREATE TABLE counted (body text)")
    (tmp_path / "url").write_text(url.render_as_string(hide_password=False))
    monkeypatch.setenv(URL, (tmp_path / "url").read_text())
    txmq.CommitLog.create(tmp_path / "log").create_topic("orders", queues=2)
    (tmp_path / "in").mkdir()
    for batch in range(BATCHES):
        file = tmp_path / "in" / f"{batch}.json"
        file.write_text("\n".join(json.dumps({"n": n}) for n in range(batch * ROWS, (batch + 1) * ROWS)))
        os.utime(file, (1_700_000_000 + batch,) * 2)  # Spark takes the oldest first
    return tmp_path


def kill_server_at(point: str, batch: int, root: Path, door: str, name: str) -> None:
    """Start a notebook with its server, and kill both when a micro-batch has come to a point."""
    program = Program("over_connect", root, door, fate=Fate(point, stops=True, batch=batch))
    program.wait_for(name)
    program.kill()


def rows(root: Path, query: str) -> list[tuple[object, ...]]:
    with sa.create_engine((root / "url").read_text()).connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(query)]


def bodies(root: Path) -> list[str]:
    log = txmq.CommitLog.open(root / "log")
    assert log.pending().num_rows == 0
    return sorted(body.decode() for body in log.read("orders")["body"].to_pylist())


@pytest.mark.parametrize("door", ["sink", "executors"])
def test_a_listener_of_a_notebook_makes_rows_and_messages_agree_when_the_server_is_killed(
    root: Path, door: str
) -> None:
    txmq.create_fence((root / "url").read_text())
    kill_server_at("prepared", 1, root, door, APP)  # nothing is in the database yet
    assert rows(root, "SELECT count(*) FROM taken") == [(ROWS - 2,)]
    kill_server_at("executed", 2, root, door, APP)  # the rows are there, and nothing says that they are
    assert txmq.CommitLog.open(root / "log").pending()["messages"].to_pylist() == [ROWS]
    Program("over_connect", root, door).finish()
    taken = [n for n in range(BATCHES * ROWS) if n % REFUSED_OF]
    assert rows(root, "SELECT n FROM taken ORDER BY n") == [(n,) for n in taken]
    assert bodies(root) == sorted(json.dumps({"n": n}, separators=(",", ":")) for n in taken)
    # The batch that was prepared ran as its next attempt, the one that was executed did not run again.
    again = rows(root, "SELECT DISTINCT n / 10, attempt FROM taken ORDER BY 1")
    assert again == [(0, 1), (1, 2), (2, 1), (3, 1)]


def test_a_table_listener_of_a_notebook_makes_rows_and_messages_agree_when_the_server_is_killed(root: Path) -> None:
    txmq.create_fence((root / "url").read_text())
    kill_server_at("prepared", 1, root, "table", APP)  # nothing is in the database yet
    assert rows(root, "SELECT count(*) FROM kept") == [(ROWS - 2,)]
    kill_server_at("executed", 2, root, "table", APP)  # the rows are there, and nothing says that they are
    assert txmq.CommitLog.open(root / "log").pending()["messages"].to_pylist() == [ROWS]
    Program("over_connect", root, "table").finish()
    kept = [n for n in range(BATCHES * ROWS) if n % REFUSED_OF]  # the table refuses the others
    assert rows(root, "SELECT n FROM kept ORDER BY n") == [(n,) for n in kept]
    assert bodies(root) == sorted(json.dumps({"n": n}, separators=(",", ":")) for n in kept)
    # The batch that was prepared ran as its next attempt, the one that was executed did not run again.
    fence = rows(root, "SELECT batch_id, attempt, state FROM txmq_fence ORDER BY batch_id, attempt")
    assert fence == [(0, 1, "mixed"), (1, 1, "tombstone"), (1, 2, "mixed"), (2, 1, "mixed"), (3, 1, "mixed")]


def test_an_inbox_of_a_notebook_counts_each_message_once_when_the_server_is_killed(root: Path) -> None:
    txmq.SqlInbox((root / "url").read_text(), GROUP, lambda connection, messages: None).create()
    log = txmq.CommitLog.open(root / "log")
    with txmq.TransactionMQProducer(log, "shop") as producer:
        producer.send([txmq.Message("orders", str(n).encode()) for n in range(BATCHES * ROWS)])
    kill_server_at("inbox committed", 1, root, "inbox", GROUP)
    assert rows(root, "SELECT count(*) FROM counted") == [(2 * ROWS,)]
    Program("over_connect", root, "inbox").finish()
    counted = sorted(str(body) for (body,) in rows(root, "SELECT body FROM counted"))
    assert counted == bodies(root) == sorted(str(n) for n in range(BATCHES * ROWS))
