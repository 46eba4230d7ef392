"""What only a real S3 server can show, beside what is the same on all stores (``tests/torture/stores``); and a store
without put-if-absent is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark.errors import LostStagedFileError, NotACommitLogError, StorageError
from tests.support.half_batches import another, bodies, commit, header_of, prepare, prepare_one
from tests.support.inside import PROBE, HalfWriter, filesystem
from tests.support.limits import Limit
from tests.torture.s3.proxy import proxy
from tests.torture.s3.server import S3Server

pytestmark = pytest.mark.long


class Told(txmq.TransactionListener):
    """Says what it is told: at once, and when it is asked."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> object:
        return batch.arg

    def check_local_transaction(self, batch: txmq.HalfBatch) -> object:
        return txmq.COMMIT_MESSAGE


# ---------------------------------------------------------------- the commit log
def test_upkeep_and_vacuum_work_on_s3(log: txmq.CommitLog, s3: S3Server, limit: Limit) -> None:
    limit(OP_FILES_MAX=4)
    for i in range(6):
        commit(log, prepare(log, i))
    log.close()
    before = bodies(log)
    assert len(another(log).engine.op_table.actions()) < 6
    orphan = f"{log.engine.half.table.folder}/half-orphan.parquet"
    with log.engine.half.table.fs.open_output_stream(orphan) as stream:
        stream.write(b"left behind by a crash")
    week_ago = (s3.folder / orphan).stat().st_mtime - 8 * 86_400
    os.utime(s3.folder / orphan, (week_ago, week_ago))
    assert log.vacuum(dry_run=True) == ["half/half-orphan.parquet"]
    assert log.vacuum() == ["half/half-orphan.parquet"]
    assert not (s3.folder / orphan).exists()
    assert bodies(another(log)) == before


# ---------------------------------------------------------------- checker, command line
LISTENER = """
import rmq_spark as txmq

class Listener(txmq.TransactionListener):
    def execute_local_transaction(self, batch):
        return txmq.UNKNOWN
    def check_local_transaction(self, batch):
        return txmq.COMMIT_MESSAGE
"""


def test_the_check_job_takes_its_storage_from_file_and_environment(
    log: txmq.CommitLog, s3: S3Server, uri: str, tmp_path: Path
) -> None:
    with txmq.TransactionMQProducer(log, "shop", Told(), check_interval=None) as producer:
        producer.send_message_in_transaction(txmq.Message("orders", b"order 0"), txmq.UNKNOWN)
    options = s3.storage_options()
    secret = options.pop("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "answers.py").write_text(LISTENER)
    config = tmp_path / "txmq.toml"
    lines = [f'path = "{uri}"', 'listener_modules = ["answers"]', '[listeners]\nshop = "answers:Listener"']
    lines += ['[check]\ntransactionTimeout = "0s"', "[storage]", *(f'{k} = "{v}"' for k, v in options.items())]
    config.write_text("\n".join(lines))
    environment = {**os.environ, "TXMQ_STORAGE__AWS_SECRET_ACCESS_KEY": secret, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "rmq_spark.checks.job", "--config", str(config), "--once"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert bodies(log) == ["order 0"]
    assert secret not in done.stdout + done.stderr


def txmq_command(s3: S3Server, *arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    options = {f"TXMQ_STORAGE__{k}": v for k, v in {**s3.storage_options(), **changed}.items()}
    command = [sys.executable, "-m", "rmq_spark.cli", *arguments]
    return subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True, check=False)


def test_the_command_line_works_on_s3(s3: S3Server, uri: str) -> None:
    assert txmq_command(s3, "create", uri).returncode == 0
    assert txmq_command(s3, "topic", "create", uri, "orders").returncode == 0
    log = txmq.CommitLog.open(uri, s3.storage_options())
    with txmq.TransactionMQProducer(log, "shop", Told(), check_interval=None) as producer:
        producer.send_message_in_transaction(txmq.Message("orders", b"order 0"), txmq.COMMIT_MESSAGE)
        waits = producer.send_message_in_transaction(txmq.Message("orders", b"order 1"), txmq.UNKNOWN)
    assert waits.half_id in txmq_command(s3, "pending", uri).stdout
    done = txmq_command(s3, "resolve", uri, waits.half_id, "COMMIT", "--reason", "paid", "--yes")
    assert "1 message became visible" in done.stdout, done.stderr
    read = txmq_command(s3, "read", uri, "orders", "--json").stdout.splitlines()
    assert sorted(json.loads(line)["body"] for line in read) == ["order 0", "order 1"]
    assert txmq_command(s3, "vacuum", uri).stdout.strip() == "0 files were removed"


# ---------------------------------------------------------------- secrets
def test_no_secret_is_in_what_a_failure_says(s3: S3Server, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    wrong = {"AWS_SECRET_ACCESS_KEY": "a-secret-that-is-wrong"}
    options = {**s3.storage_options(), **wrong}
    hidden = [*wrong.values(), s3.secret_key, s3.access_key]
    caplog.set_level("DEBUG")
    said: list[str] = []
    for attempt in (txmq.CommitLog.create, txmq.CommitLog.open):
        with pytest.raises(StorageError, match="SignatureDoesNotMatch") as caught:
            attempt(uri, storage_options=options)
        error: BaseException | None = caught.value
        while error is not None:
            said += [str(error), repr(error)]
            error = error.__cause__
    for arguments in (["create", uri], ["pending", uri], ["read", uri, "orders"]):
        done = txmq_command(s3, *arguments, **wrong)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        said += [done.stdout, done.stderr]
    said.append(caplog.text)
    assert not [word for word in hidden for text in said if word in text]


def test_a_store_that_went_away_under_an_open_log_is_a_storage_error_without_secrets(
    s3: S3Server, log: txmq.CommitLog, uri: str
) -> None:
    with proxy(s3.endpoint) as between:
        options = {**s3.storage_options(between.endpoint), "max_retries": "0"}
        through = txmq.CommitLog.open(uri, options)
        assert through.topics() == {"orders": 2}
    for ask in (through.topics, through.pending, lambda: through.read("orders"), through.topics):
        with pytest.raises(StorageError, match="its store fails") as caught:
            ask()
        assert not [word for word in (s3.secret_key, s3.access_key) if word in str(caught.value)]
        assert "\n" not in str(caught.value)


def test_a_log_whose_objects_are_deleted_is_no_log_any_more(s3: S3Server, log: txmq.CommitLog, uri: str) -> None:
    assert log.topics() == {"orders": 2}
    shutil.rmtree(s3.folder / uri.removeprefix("s3://"))
    for _ in range(2):
        with pytest.raises(NotACommitLogError):
            log.topics()


def test_a_log_that_was_made_anew_on_s3_and_is_as_long_is_not_taken_for_the_old_one(
    s3: S3Server, log: txmq.CommitLog, uri: str
) -> None:
    commit(log, prepare(log, 0))
    shutil.rmtree(s3.folder / uri.removeprefix("s3://"))
    anew = txmq.CommitLog.create(uri, storage_options=s3.storage_options())
    anew.create_topic("orders", 2)
    for batch in range(3):
        commit(anew, prepare(anew, batch))
    for ask in (lambda: log.read("orders"), lambda: commit(log, prepare(log, 1))):
        with pytest.raises(NotACommitLogError, match="made anew"):
            ask()
    assert len(bodies(another(anew))) == 15


def test_a_half_file_that_was_deleted_is_not_prepared_on_s3(s3: S3Server, log: txmq.CommitLog, uri: str) -> None:
    writer = HalfWriter(header_of(0), log.topics(), "orders", None)
    files = [f for n in range(20) for f in log.engine.stage(writer, pa.table({"body": [f"{n}"]}).to_batches(), n)]
    (s3.folder / uri.removeprefix("s3://") / "half" / files[13].data.path).unlink()
    with pytest.raises(LostStagedFileError, match=files[13].data.path):
        prepare_one(log.engine, header_of(0), files)
    assert another(log).engine.find("app", 0) is None


def test_what_holds_storage_options_does_not_show_them(s3: S3Server, log: txmq.CommitLog) -> None:
    from tests.support.inside import read_options

    given = {f"storage.{k}": v for k, v in s3.storage_options().items()}
    options = read_options({"path": log.path, "subscribe": "orders", **given}, streaming=False)
    assert options.storage_options == s3.storage_options()
    for thing in (options, log, s3):
        assert s3.secret_key not in repr(thing)


# ---------------------------------------------------------------- stores that cannot hold a log
@pytest.fixture
def overwriting(s3: S3Server) -> Iterator[dict[str, str]]:
    """Storage options of a store that takes every put."""
    with proxy(s3.endpoint, overwriting=s3.folder) as between:
        yield s3.storage_options(between.endpoint)


def test_a_store_without_put_if_absent_is_refused_and_nothing_is_left_behind(
    s3: S3Server, uri: str, overwriting: dict[str, str]
) -> None:
    for _ in range(5):
        with pytest.raises(StorageError, match=r"without put-if-absent: [23] of 3 writers.*conditional puts"):
            txmq.CommitLog.create(uri, storage_options=overwriting)
    assert s3.objects("s3://shop" + uri.removeprefix("s3://shop").rsplit("/", 1)[0]) == []
    made = txmq.CommitLog.create(uri, storage_options=s3.storage_options())
    assert made.topics() == {}


def test_a_store_that_answers_with_old_lists_is_refused_and_nothing_is_left_behind(s3: S3Server, uri: str) -> None:
    with (
        proxy(s3.endpoint, old_lists=True) as between,
        pytest.raises(StorageError, match="a store that answers with old lists"),
    ):
        txmq.CommitLog.create(uri, storage_options=s3.storage_options(between.endpoint))
    assert s3.objects(uri) == []


def test_a_proxy_that_takes_nothing_out_changes_nothing(s3: S3Server, uri: str) -> None:
    with proxy(s3.endpoint) as between:
        log = txmq.CommitLog.create(uri, storage_options=s3.storage_options(between.endpoint))
        log.create_topic("orders", 1)
        commit(log, prepare(log, 0))
        asked = between.taken()
    assert len(bodies(another(txmq.CommitLog.open(uri, s3.storage_options())))) == 5
    assert asked["put if absent", "half"] == asked["put if absent", "op"] == 2
    assert not [o for o in s3.objects(uri) if PROBE in o]


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_the_probe_for_put_if_absent_leaves_nothing_behind(s3: S3Server, uri: str, tmp_path: Path, kind: str) -> None:
    where = uri if kind == "s3" else str(tmp_path / "log")
    txmq.CommitLog.create(where, storage_options=s3.storage_options() if kind == "s3" else None)
    found = s3.objects(uri) if kind == "s3" else [str(p.relative_to(where)) for p in Path(where).rglob("*")]
    first = "_delta_log/00000000000000000000.json"
    assert {f for f in found if f.endswith(".json")} == {f"{t}/{first}" for t in ("half", "messages", "op", "topics")}
    assert not [f for f in found if PROBE in f]


@pytest.mark.parametrize("said", ["options", "short options", "environment"])
def test_pyarrow_and_delta_rs_are_told_the_same(
    s3: S3Server, uri: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, str] | None = s3.storage_options()
    if said == "short options":
        options = {k.removeprefix("AWS_").lower(): v for k, v in s3.storage_options().items()}
    elif said == "environment":
        options = None
        for name, value in s3.storage_options().items():
            monkeypatch.setenv(name, value)
    log = txmq.CommitLog.create(f"{uri}/{said}", storage_options=options)
    log.create_topic("orders", 1)
    commit(log, prepare(log, 0))
    assert len(bodies(another(log))) == 5


def test_a_checkpoint_on_s3_is_read_with_the_storage_options(s3: S3Server, log: txmq.CommitLog, uri: str) -> None:
    from tests.support.inside import Identity, identity_of

    options = s3.storage_options()
    fs, folder = filesystem(f"{uri}/checkpoint", options)
    for name, content in (("metadata", b'{"id": "q"}'), ("offsets/0", b"v1 more")):
        with fs.open_output_stream(f"{folder}/{name}") as stream:
            stream.write(content)
    hidden: Any = SimpleNamespace(sparkSession=None)  # as over Spark Connect
    expected = Identity("q", hashlib.sha256(b"v1 more").hexdigest()[:32])
    for query in ("q", "made anew"):  # whatever Spark's own file says later
        with fs.open_output_stream(f"{folder}/metadata") as stream:
            stream.write(b'{"id": "%s"}' % query.encode())
        found = identity_of(hidden, 0, f"{uri}/checkpoint", log.storage_options, "TransactionalSink", "or else")
        assert found == expected
