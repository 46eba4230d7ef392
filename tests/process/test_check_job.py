"""The check job as a process on a real log."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark.cli.check_job import app
from rmq_spark.errors import CommitError, VerdictConflictError
from tests.support import half_batches
from tests.support.check_jobs import make_folder, write
from tests.support.half_batches import decide_one
from tests.support.inside import NO_LISTENER_FENCE, NO_ROWS, Who
from tests.support.meanwhile import at
from tests.support.sends import raising

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def prepare(log: CommitLog, batch_id: int, group: str = "order-service", fence_id: str | None = None) -> None:
    half_batches.prepare(log, batch_id, 2, group=group, fence_id=fence_id)


def start(folder: Path, *arguments: str, script: bool = False, **environment: str) -> subprocess.Popen[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TXMQ_")}
    job = [str(ROOT / "rmq_spark/checks/job.py")] if script else ["-m", "rmq_spark.checks.job"]
    return subprocess.Popen(
        [sys.executable, *job, "--config", "txmq.toml", *arguments],
        cwd=folder,
        env={**own, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_alone(folder: Path, *arguments: str, script: bool = False, **environment: str) -> tuple[int, str, str]:
    process = start(folder, *arguments, script=script, **environment)
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run the job in this process, as one of its own would: with its settings, its folder and its log."""
    own, logs = logging.getLogger("rmq_spark"), logging.getLogger()
    level = own.level
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TXMQ_")]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(logs, "handlers", [])
        patch.delitem(sys.modules, "shop_orders", raising=False)
        result = CliRunner().invoke(app, ["--config", "txmq.toml", *arguments])
        own.setLevel(level)
    return result.exit_code, result.stdout, result.stderr


def test_once_settles_what_is_due_and_exits_with_zero(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    prepare(log, 2)
    prepare(log, 3, group="nobody", fence_id=NO_LISTENER_FENCE)
    code, out, err = run_alone(folder, "--once", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["committed"] == {"transactions": 2, "messages": 4}
    assert report["unknown"]["messages"] == 2
    assert report["pending"] == 1
    assert "listeners: order-service (shop_orders:listener)" in err
    assert log.read("orders").num_rows == 4


@pytest.mark.long
def test_a_quiet_round_speaks_only_of_what_somebody_should_see(folder: Path) -> None:
    """Cron mails all that is printed: the line in the page on scripts mailed each minute."""
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    assert run(folder, "--once", "--quiet") == (0, "", "")
    assert log.read("orders").num_rows == 2
    prepare(log, 2)  # its listener does not know
    rounds = [run(folder, "--once", "--quiet", TXMQ_CHECK__TRANSACTION_CHECK_MAX="1") for _ in range(3)]
    assert [code for code, _, _ in rounds] == [0, 1, 0]
    said = [out for _, out, _ in rounds]
    assert said[0] == said[2] == ""
    assert "1 transaction (2 messages) quarantined" in said[1]
    prepare(log, 3, group="billing")
    code, _, err = run(folder, "--once", "--quiet")
    assert code == 1
    assert "nobody answers for billing" in err
    assert run(folder, "--once", "--quiet", TXMQ_ELSEWHERE='["billing"]') == (0, "", "")


def test_a_group_that_nobody_answers_for_is_a_problem_and_one_that_another_job_has_is_none(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 0, group="billing")
    code, out, err = run(folder, "--once")
    assert code == 1, err
    assert "groups without a listener: billing; 1 half batch is pending" in out
    assert "producer group 'billing' has no listener here: 1 half batch stays pending" in err
    assert 'write elsewhere = ["billing"] when another check job has one' in err
    code, _, err = run(folder, "--once", TXMQ_ELSEWHERE='["billing"]')
    assert code == 0, err
    assert log.pending().num_rows == 1


def test_the_line_of_a_round_says_what_the_listener_answered(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 2)
    _, out, _ = run(folder, "--once")
    assert out.rstrip().endswith("1 half batch is pending; app:2: UNKNOWN from Orders"), out


def test_a_conflict_is_told_in_the_words_of_the_command(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    record = log.engine.get("app:0")
    rows = half_batches.pending(log, record)
    decide_one(log.engine, record, 1, commit=NO_ROWS, rollback=rows, who=Who.CHECK)
    with pytest.raises(VerdictConflictError):
        decide_one(log.engine, record, 1, commit=rows, rollback=NO_ROWS, who=Who.EXECUTE)
    code, out, _ = run(folder, "--once")
    assert code == 1
    assert f"txmq resolve {folder / 'log'} app:0 COMMIT --reason" in out


@pytest.mark.turns(3, among="the check job as a process")
def test_once_exits_with_one_when_a_half_batch_had_a_problem(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    prepare(log, 1)
    code, out, err = run_alone(folder, "--once", script=True)
    assert code == 1, err
    assert len(out.splitlines()) == 1
    assert "1 transaction (2 messages) committed" in out
    assert "problem with app:1: its listener did not answer: RuntimeError: the bank is �[31mclosed" in out
    assert log.read("orders").num_rows == 2


def test_once_exits_with_one_when_a_listener_s_database_is_down_and_nothing_is_pending(folder: Path) -> None:
    """An operator learned it from a round with exit code 0 only when messages were stuck."""
    pytest.importorskip("psycopg")
    (folder / "shop").mkdir()
    txmq.create_fence(f"sqlite:///{folder}/shop/orders.db")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens there
        server = f"127.0.0.1:{held.getsockname()[1]}/till"
        (folder / "shop_orders.py").write_text(
            "from rmq_spark import SqlTransactionListener, TableListener\n"
            f"orders = TableListener('sqlite:///{folder}/shop/orders.db', 'orders')\n"
            f"till = SqlTransactionListener('postgresql+psycopg://till:s3cr3t-passw0rd@{server}')\n"
        )
        write(folder, listener="shop_orders:orders")
        assert run(folder, "--once", "--quiet") == (0, "", "")
        (folder / "shop").rename(folder / "away")
        code, out, err = run(folder, "--once", "--quiet", "--json", TXMQ_LISTENERS='{"till": "shop_orders:till"}')
    assert code == 1, err
    report = json.loads(out)
    assert report["pending"] == 0
    said = sorted(one["problem"] for one in report["problems"])
    assert len(said) == 2
    assert (
        f"group 'order-service' can be answered: TableListener('sqlite:///{folder}/shop/orders.db', 'orders')"
        in said[0]
    )
    assert f"group 'till' can be answered: SqlTransactionListener('postgresql+psycopg://***@{server}')" in said[1]
    assert "s3cr3t-passw0rd" not in out + err


def test_a_configuration_that_cannot_be_used_exits_with_two_and_one_line(folder: Path) -> None:
    write(folder, "transactionTimeout = 6")
    code, out, err = run(folder, "--once")
    assert code == 2
    assert out == ""
    assert err.startswith("ConfigError: check.transactionTimeout='6' is not a duration")
    assert len(err.splitlines()) == 1


def test_a_path_that_is_no_log_exits_with_one_and_one_line(folder: Path) -> None:
    code, _, err = run(folder, "--once", TXMQ_PATH=str(folder))
    assert code == 1
    assert err.startswith("NotACommitLogError: ")
    assert len(err.splitlines()) == 1
    code, _, err = run(folder, "--once", TXMQ_PATH=str(folder), TXMQ_LOG_FORMAT="json")
    assert (code, json.loads(err)["message"].partition(": ")[0]) == (1, "NotACommitLogError")


def test_a_store_that_does_not_answer_exits_with_one_and_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeltaTable, "is_deltatable", raising(OSError("no answer")))
    assert run(folder, "--once") == (1, "", "OSError: no answer\n")


def test_upkeep_that_fails_is_told_and_exits_with_one(folder: Path) -> None:
    prepare(CommitLog.open(folder / "log"), 0)
    with at("upkeep begins", raising(CommitError("the store is full"))):
        code, out, err = run(folder, "--once")
    assert (code, "1 transaction (2 messages) committed" in out) == (1, True)
    assert re.search("upkeep of .* failed: .*the store is full", err)


@pytest.mark.turns(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_loop_ends_cleanly_on_a_signal(folder: Path, number: signal.Signals) -> None:
    write(folder, 'transactionTimeout = "0s"\ntransactionCheckInterval = "100ms"')
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    process = start(folder, "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["committed"]["messages"] == 2
    prepare(log, 3)
    deadline = time.monotonic() + DEADLINE_S
    while json.loads(process.stdout.readline())["committed"]["messages"] == 0:
        assert time.monotonic() < deadline
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert f"stopping after {number.name}" in err
    assert "Traceback" not in err


UPKEEP_OFF = '[maintenance]\ninterval = "0s"\n'


@pytest.mark.turns(3, among="the check job as a process")
def test_messages_are_drained_while_upkeep_is_off(folder: Path) -> None:
    write(folder, more=f'{UPKEEP_OFF}[drain]\nevery = "50ms"')
    log = CommitLog.open(folder / "log")
    process = start(folder)
    for batch_id in range(2):
        half_batches.commit(log, half_batches.prepare(log, batch_id))
        deadline = time.monotonic() + DEADLINE_S
        while log.engine.messages_table.refresh() == batch_id:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.turns(3, among="the check job as a process")
def test_spark_that_is_not_installed_is_a_configuration_error(folder: Path) -> None:
    write(folder, listener="shop_orders:Sparky")
    (folder / "pyspark.py").write_text("raise ModuleNotFoundError(\"No module named 'pyspark'\", name='pyspark')")
    code, _, err = run_alone(folder, "--once", PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert code == 2
    assert "the listener of 'order-service' needs Spark: install rmq_spark with its extra spark" in err


SPARKY = """
from pyspark.sql import SparkSession
from rmq_spark import COMMIT_MESSAGE, TransactionListener

class Sparky(TransactionListener):
    requires_spark = True

    def execute_local_transaction(self, batch):
        raise AssertionError

    def check_local_transaction(self, batch):
        batch.to_spark(SparkSession.getActiveSession()).write.format("delta").save("checked")
        return COMMIT_MESSAGE
"""


@pytest.mark.long
@pytest.mark.spark
def test_a_listener_that_needs_spark_gets_a_session_with_delta(folder: Path) -> None:
    (folder / "shop_orders.py").write_text(SPARKY)
    write(folder, listener="shop_orders:Sparky")
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    code, out, err = run_alone(folder, "--once")
    assert (code, "1 transaction (2 messages) committed" in out) == (0, True), err
    assert DeltaTable(folder / "checked").to_pyarrow_table().num_rows == log.read("orders").num_rows == 2


def test_a_missing_extra_is_named(folder: Path) -> None:
    (folder / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    code, _, err = run_alone(folder, "--once", PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert code == 1
    assert err.strip() == "the check job needs typer: install rmq_spark with its extra job"


def test_the_log_can_be_lines_of_json(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 1)
    code, _, err = run(folder, "--once", "--json", TXMQ_LOG_FORMAT="json")
    assert code == 1
    lines = [json.loads(text) for text in err.splitlines()]
    closed = next(line for line in lines if "closed" in line["message"])
    assert (closed["half_id"], closed["producer_group"], closed["level"]) == ("app:1", "order-service", "WARNING")


def test_a_single_round_leaves_its_metrics_in_a_file(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    write(folder, more='[metrics]\nport = 1\ntextfile = "txmq.prom"\n')  # with --once nothing is served
    code, _, err = run(folder, "--once")
    assert (code, "Traceback" in err) == (0, False)
    text = (folder / "txmq.prom").read_text()
    assert 'txmq_check_rounds_total{checker="job"' in text
    assert f'rocketmq_commit_messages_total{{cluster="DefaultCluster",node_id="{log.path}",topic="orders"}} 2.0' in text
    assert f'txmq_undrained_messages{{cluster="DefaultCluster",node_id="{log.path}"}} 0.0' in text, "it has drained"
    (folder / "log").rename(folder / "away")
    code, _, err = run(folder, "--once")
    assert (code, "Traceback" in err) == (1, False)
    up = f'txmq_up{{cluster="DefaultCluster",node_id="{log.path}"}} 0.0'
    assert (folder / "txmq.prom").read_text().splitlines()[-1] == up
    write(folder, more='[metrics]\ntextfile = "nowhere/txmq.prom"\n')
    code, _, err = run(folder, "--once")
    assert (code, "the metrics were not written: nowhere/txmq.prom cannot be written" in err) == (1, True)


def test_a_port_that_is_taken_is_a_configuration_that_cannot_be_used(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = run(folder, TXMQ_METRICS__PORT=str(taken.getsockname()[1]))
    assert (code, "Choose another port" in err) == (2, True)
