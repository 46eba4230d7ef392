"""The check job: its TOML file, and the environment over it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rmq_spark import CommitLog, SqlTransactionListener
from rmq_spark._core.checks.setting_names import NAMES
from rmq_spark.errors import ConfigError
from tests.support.check_jobs import make_folder, write
from tests.support.fences import fence_rows, make_older
from tests.support.half_batches import commit, let_leave, prepare
from tests.support.inside import CommitOncePrepared, JobSettings

SECRET = "s3cr3t-value"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TXMQ_"):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


# ---------------------------------------------------------------- the file
def test_the_example_has_every_setting_at_its_default() -> None:
    file = Path(__file__).parents[2] / "conf/txmq.toml"
    found = JobSettings.load(file)
    for section in ("check", "maintenance", "drain", "metrics"):
        assert getattr(found, section) == getattr(JobSettings(path="x"), section)
    text = file.read_text()
    assert all(f"\n{name} = " in text for names in NAMES.values() for name in names)
    assert found.load_listeners() == {}


def test_durations_have_units(tmp_path: Path) -> None:
    check = 'transactionTimeout="500ms"\ntransactionCheckInterval="5m"\nfileReservedTime="7d"\nroundTimeout="2s"'
    found = JobSettings.load(write(tmp_path, check)).check
    assert (found.transaction_timeout, found.transaction_check_interval) == (0.5, 300.0)
    assert (found.file_reserved_time, found.round_timeout) == (7 * 86400.0, 2.0)


def refusal_of(file: Path) -> str:
    with pytest.raises(ConfigError) as problem:
        JobSettings.load(file)
    return str(problem.value)


@pytest.mark.parametrize(
    ("section", "setting", "words"),
    [
        ("check", "transactionTimeout = 6", "check.transactionTimeout='6' is not a duration: write a number and a u"),
        ("check", 'transactionTimeout = "6"', "check.transactionTimeout='6' is not a duration"),
        ("check", "transactionTimeout = true", "is not a duration"),
        ("check", 'roundTimeout = "0s"', "check.roundTimeout: '0s' is not above 0"),
        ("check", 'transactionTimout = "6s"', "'transactionTimout' in [check]: did you mean 'transactionTimeout'?"),
        ("check", 'transaction_timeout = "6s"', "did you mean 'transactionTimeout'?"),
        ("check", "transactionCheckMax = 0", "check.transactionCheckMax: "),
        ("check", "transactionCheckMax = 1000", "check.transactionCheckMax: "),
        ("check", 'transactionCheckMax = "many"', "check.transactionCheckMax: "),
        ("check", "discardPolicy = 1", "check.discardPolicy: "),
        ("check", "x = ", "is not TOML"),
        ("drain", "every = 30", "drain.every='30' is not a duration: write a number and a unit"),
        ("drain", 'evry = "30s"', "unknown setting 'evry' in [drain]: did you mean 'every'?"),
        ("maintenance", 'fences = "6d"', "'6d' is less than 7d: fence rows must outlive the half batches"),
        ("maintenance", "fences = 14", "maintenance.fences='14' is not a duration"),
        ("maintenance", 'fences = "never"', "maintenance.fences='never' is not a duration"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(tmp_path: Path, section: str, setting: str, words: str) -> None:
    given = {"check": setting} if section == "check" else {"more": f"[{section}]\n{setting}"}
    assert words in refusal_of(write(tmp_path, **given))


@pytest.mark.parametrize("fences", ["14d", "7d", "0s"])
def test_a_round_prunes_old_fence_rows_unless_that_is_switched_off(folder: Path, fences: str) -> None:
    log, url = CommitLog.open(folder / "log"), f"sqlite:///{folder / 'shop.db'}"
    shop = SqlTransactionListener(url, lambda *_: None)
    shop.create_fence()
    ages = {"old": 15, "young": 8}
    for name in ages:
        record = prepare(log, 0, 1, app=name, fence_id=shop.store_id)
        shop.execute_local_transaction(log.engine.half_batch(record, log.engine.state_of(record), 1, record.all_rows))
        commit(log, record)
    let_leave(log)
    for name, days in ages.items():
        make_older(url, days, f"{name}:%")
    settings = JobSettings.load(write(folder, more=f'[maintenance]\nfences = "{fences}"'))
    rounds = settings.maintainer(log.engine, None, [shop, CommitOncePrepared()])
    assert rounds is not None
    rounds.run_once()
    left = {row.partition(":")[0] for row, state in fence_rows(url).items() if state == "executed"}
    assert left == {"14d": {"young"}, "7d": set(), "0s": {"old", "young"}}[fences]


def test_drains_have_their_own_rhythm_and_can_be_switched_off(folder: Path) -> None:
    log = CommitLog.open(folder / "log")
    found = JobSettings.load(write(folder, more='[drain]\nevery = "2s"'))
    beside = found.draining(log)
    assert beside is not None
    assert beside.every == 2.0
    rounds = found.maintainer(log, beside)
    assert rounds is not None
    assert rounds.turn is beside.turn
    assert JobSettings.load(write(folder, more='[drain]\nevery = "0s"')).draining(log) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[chek]\ntransactionTimeout = "6s"\npath = "x"', "unknown setting 'chek': did you mean 'check'?"),
        ("[check]", "path is missing: set it in"),
        ('path = "für"', "txmq.toml cannot be read: 'utf-8' codec"),
        ('path = ""', "path: "),
        ('path = "x"\ncheck = 5', "check: "),
        ('path = "x"\nlisteners = ["shop:x"]', "listeners: "),
        (f'path = "x"\n[storage]\nAWS_SECRET_ACCESS_KEY = ["{SECRET}"]', "storage.AWS_SECRET_ACCESS_KEY: "),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_tells_no_secret(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "txmq.toml").write_text(text, encoding="latin-1")
    said = refusal_of(tmp_path / "txmq.toml")
    assert words in said
    assert SECRET not in said


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

    assert repr(policy("rollback")) == "NamedPolicy('rollback')"
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
    monkeypatch.setenv("TXMQ_DRAIN__EVERY", "5s")
    monkeypatch.setenv("TXMQ_LISTENER_MODULES", '["shop", "bank"]')
    monkeypatch.setenv("TXMQ_STORAGE__AWS_SECRET_ACCESS_KEY", SECRET)
    found = JobSettings.load(file)
    assert found.path == "elsewhere"
    assert found.check.transaction_timeout == 9.0
    assert found.drain.every == 5.0
    assert found.listener_modules == ["shop", "bank"]
    assert found.storage_options() == {"AWS_REGION": "eu", "AWS_SECRET_ACCESS_KEY": SECRET}
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TXMQ_LISTENERS", "{not json", "the environment's TXMQ_LISTENERS is not JSON, such as"),
        ("TXMQ_CHECK__TRANSACTION_TIMEOUT", "9", "check.transactionTimeout='9' is not a duration"),
        ("TXMQ_CHECK__TRANSACTION_TIMOUT", "9s", "did you mean 'transaction_timeout'?"),
        ("TXMQ_DRAIN__EVRY", "9s", "did you mean 'every'?"),
        ("TXMQ_MAINTENANCE__GRAZE", "9m", "did you mean 'grace'?"),
        ("TXMQ_DRAIN__EVERY", "9x", "drain.every='9x' is not a duration"),
    ],
)
def test_an_environment_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    assert words in refusal_of(write(tmp_path))


def test_a_variable_that_nobody_reads_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TXMQ_PATHS", "elsewhere")
    monkeypatch.setenv("TXMQ_STORAGE_AWS_REGION", "eu")
    monkeypatch.setenv("TXMQ_STORAGE__AWS_REGION", "eu")
    monkeypatch.setenv("TXMQ_CONFIG", "txmq.toml")
    monkeypatch.setenv("TXMQ_KAFKA__LINGER_MS", "5")
    JobSettings.load(write(tmp_path))
    assert [record.getMessage() for record in caplog.records] == [
        "the environment's TXMQ_PATHS is no setting, and nobody reads it (did you mean 'TXMQ_PATH'?)",
        "the environment's TXMQ_STORAGE_AWS_REGION is no setting, and nobody reads it (did you mean 'TXMQ_STORAGE'?)",
    ]


def test_an_environment_with_log_and_listeners_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXMQ_PATH", "log")
    missing = "TXMQ_LISTENERS and TXMQ_LISTENER_MODULES"
    with pytest.raises(ConfigError, match=rf"txmq\.toml does not exist: .* or set {missing}$"):
        JobSettings.load("txmq.toml")
    monkeypatch.setenv("TXMQ_LISTENERS", '{"order-service": "shop_orders:listener"}')
    assert JobSettings.load("txmq.toml").listeners == {"order-service": "shop_orders:listener"}
    assert "other.toml does not exist" in refusal_of(Path("other.toml"))
