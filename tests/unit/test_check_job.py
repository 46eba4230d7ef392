"""The check job: its TOML file and environment, and real processes on real logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_spark.check.policy import NamedPolicy
from rmq_spark.check.settings import CHECK_NAMES, JobSettings
from rmq_spark.commitlog.half import HalfHeader, HalfWriter, half_id_of
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.errors import ConfigError
from rmq_spark.listener import NO_LISTENER_FENCE

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t-value"
DEADLINE_S = 60.0

LISTENERS = """
from rmq_spark import COMMIT_MESSAGE, UNKNOWN, TransactionListener
from rmq_spark.check.policy import TransactionCheckListener

class Orders(TransactionListener):
    def execute_local_transaction(self, batch):
        raise AssertionError

    def check_local_transaction(self, batch):
        if batch.batch_id == 1:
            raise RuntimeError("the bank is closed")
        return UNKNOWN if batch.batch_id == 2 else COMMIT_MESSAGE

class Mail(TransactionCheckListener):
    def resolve_discarded(self, batch, reason):
        return COMMIT_MESSAGE

def listener():
    return Orders()

class Sparky(Orders):
    requires_spark = True
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TXMQ_"):
            monkeypatch.delenv(name)


def prepare(log: CommitLog, batch_id: int, group: str = "order-service", fence_id: str | None = None) -> None:
    header = HalfHeader(half_id_of("app", batch_id), "app", batch_id, None, None, fence_id, "batch", group)
    writer = HalfWriter(header, log.topics(), "orders", None)
    log.prepare(header, log.stage(writer, pa.table({"body": [f"{batch_id}.0", f"{batch_id}.1"]}).to_batches()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a log, a listener's module and a configuration."""
    log = CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=1)
    (tmp_path / "shop_orders.py").write_text(LISTENERS)
    write(tmp_path)
    return tmp_path


def write(folder: Path, check: str = 'transactionTimeout = "0s"', more: str = "", listener: str | None = None) -> Path:
    file = folder / "txmq.toml"
    file.write_text(
        f'path = "{folder / "log"}"\nlistener_modules = ["shop_orders"]\n'
        f'[listeners]\n"order-service" = "{listener or "shop_orders:listener"}"\n[check]\n{check}\n{more}'
    )
    return file


def start(folder: Path, *arguments: str, script: bool = False, **environment: str) -> subprocess.Popen[str]:
    job = [str(ROOT / "rmq_spark/check/job.py")] if script else ["-m", "rmq_spark.check.job"]
    return subprocess.Popen(
        [sys.executable, *job, "--config", "txmq.toml", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str, script: bool = False, **environment: str) -> tuple[int, str, str]:
    process = start(folder, *arguments, script=script, **environment)
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


# ---------------------------------------------------------------- the file
def test_the_example_has_every_setting_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "conf/txmq.toml"
    assert JobSettings.load(file).check == JobSettings(path="x").check
    text = file.read_text()
    assert all(f"\n{name} = " in text for name in CHECK_NAMES)
    assert JobSettings.load(file).load_listeners() == {}


def test_durations_have_units(tmp_path: Path) -> None:
    check = (
        'transactionTimeout = "500ms"\ntransactionCheckInterval = "5m"\nfileReservedTime = "7d"\nroundTimeout = "2s"'
    )
    found = JobSettings.load(write(tmp_path, check)).check
    assert (found.transaction_timeout, found.transaction_check_interval) == (0.5, 300.0)
    assert (found.file_reserved_time, found.round_timeout) == (7 * 86400.0, 2.0)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("transactionTimeout = 6", "check.transactionTimeout='6' is not a duration: write a number and a unit"),
        ('transactionTimeout = "6"', "check.transactionTimeout='6' is not a duration"),
        ("transactionTimeout = true", "is not a duration"),
        ('roundTimeout = "0s"', "check.roundTimeout: '0s' is not above 0"),
        (
            'transactionTimout = "6s"',
            "unknown setting 'transactionTimout' in [check]: did you mean 'transactionTimeout'?",
        ),
        ('transaction_timeout = "6s"', "did you mean 'transactionTimeout'?"),
        ("transactionCheckMax = 0", "check.transactionCheckMax: "),
        ("transactionCheckMax = 1000", "check.transactionCheckMax: "),
        ('transactionCheckMax = "many"', "check.transactionCheckMax: "),
        ("discardPolicy = 1", "check.discardPolicy: "),
        ("x = ", "is not TOML"),
    ],
)
def test_a_check_setting_that_cannot_be_used_is_named(tmp_path: Path, check: str, words: str) -> None:
    with pytest.raises(ConfigError) as problem:
        JobSettings.load(write(tmp_path, check))
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[chek]\ntransactionTimeout = "6s"\npath = "x"', "unknown setting 'chek': did you mean 'check'?"),
        ("[check]", "path is missing: set it in"),
        ('path = ""', "path: "),
        ('path = "x"\ncheck = 5', "check: "),
        ('path = "x"\nlisteners = ["shop:x"]', "listeners: "),
        (f'path = "x"\n[storage]\nAWS_SECRET_ACCESS_KEY = ["{SECRET}"]', "storage.AWS_SECRET_ACCESS_KEY: "),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_tells_no_secret(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "txmq.toml").write_text(text)
    with pytest.raises(ConfigError) as problem:
        JobSettings.load(tmp_path / "txmq.toml")
    assert words in str(problem.value)
    assert SECRET not in str(problem.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        JobSettings.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("listener", "words"),
    [
        ("os:getcwd", "outside the allowed modules (shop_orders)"),
        ("shop_orders_evil:x", "outside the allowed modules"),
        ("shop_orders", "is not 'module:attribute'"),
        ("shop_orders:nothing", "has no 'nothing'"),
        ("shop_orders.sub:x", "cannot be imported"),
    ],
)
def test_a_listener_that_cannot_be_loaded_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, listener: str, words: str
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ConfigError) as problem:
        JobSettings.load(write(folder, listener=listener)).load_listeners()
    assert "[listeners] 'order-service'" in str(problem.value)
    assert words in str(problem.value)


def test_the_discard_policy_is_a_name_or_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))

    def policy(name: str) -> object:
        return JobSettings.load(write(folder, f'discardPolicy = "{name}"')).load_policy()

    assert isinstance(policy("rollback"), NamedPolicy)
    assert type(policy("shop_orders:Mail")).__name__ == "Mail"
    with pytest.raises(ConfigError, match=r"discardPolicy: .*did you mean 'rollback'"):
        policy("rolback")
    with pytest.raises(ConfigError, match="outside the allowed modules"):
        policy("os:getcwd")
    with pytest.raises(ConfigError, match="or a TransactionCheckListener, not Orders"):
        policy("shop_orders:listener")


# ---------------------------------------------------------------- the environment
def test_the_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, more=f'[storage]\nAWS_REGION = "eu"\nAWS_SECRET_ACCESS_KEY = "old-{SECRET}"')
    monkeypatch.setenv("TXMQ_PATH", "elsewhere")
    monkeypatch.setenv("TXMQ_CHECK__TRANSACTION_TIMEOUT", "9s")
    monkeypatch.setenv("TXMQ_LISTENER_MODULES", '["shop", "bank"]')
    monkeypatch.setenv("TXMQ_STORAGE__AWS_SECRET_ACCESS_KEY", SECRET)
    found = JobSettings.load(file)
    assert found.path == "elsewhere"
    assert found.check.transaction_timeout == 9.0
    assert found.listener_modules == ["shop", "bank"]
    assert found.storage_options() == {"AWS_REGION": "eu", "AWS_SECRET_ACCESS_KEY": SECRET}
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TXMQ_LISTENERS", "{not json", "is not JSON"),
        ("TXMQ_CHECK__TRANSACTION_TIMEOUT", "9", "check.transactionTimeout='9' is not a duration"),
        ("TXMQ_CHECK__TRANSACTION_TIMOUT", "9s", "did you mean 'transaction_timeout'?"),
    ],
)
def test_an_environment_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as problem:
        JobSettings.load(write(tmp_path))
    assert words in str(problem.value)


# ---------------------------------------------------------------- processes
def test_once_settles_what_is_due_and_exits_with_zero(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    prepare(log, 2)
    prepare(log, 3, group="nobody", fence_id=NO_LISTENER_FENCE)
    code, out, err = run(folder, "--once", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["committed"] == {"transactions": 2, "messages": 4}
    assert report["unknown"]["messages"] == 2
    assert report["pending"] == 1
    assert "listeners: order-service (shop_orders:listener)" in err
    assert log.read("orders").num_rows == 4


def test_once_exits_with_one_when_a_half_batch_had_a_problem(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    prepare(log, 0)
    prepare(log, 1)
    code, out, err = run(folder, "--once", script=True)
    assert code == 1, err
    assert len(out.splitlines()) == 1
    assert "1 transaction (2 messages) committed" in out
    assert "problem with app:1: its listener did not answer: RuntimeError: the bank is closed" in out
    assert log.read("orders").num_rows == 2


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


def test_spark_that_is_not_installed_is_a_configuration_error(folder: Path) -> None:
    write(folder, listener="shop_orders:Sparky")
    (folder / "pyspark.py").write_text("raise ModuleNotFoundError(\"No module named 'pyspark'\", name='pyspark')")
    code, _, err = run(folder, "--once", PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert code == 2
    assert "the listener of 'order-service' needs Spark: pip install 'rmq-spark[spark]'" in err


def test_a_missing_extra_is_named(folder: Path) -> None:
    (folder / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    code, _, err = run(folder, "--once", PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert code == 1
    assert err.strip() == "the check job needs typer: pip install 'rmq-spark[job]'"
