"""What is said and refused about an object store before anybody asks it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

import rmq_spark as txmq
from rmq_spark._core.storage import seal
from rmq_spark._core.storage import store_errors as answers
from rmq_spark.errors import CorruptLogError, NotACommitLogError, OptionError, StorageError, UnreadableFileError
from tests.support.inside import Table, stores


@pytest.mark.parametrize("error", [OSError, NotACommitLogError])
def test_what_a_store_answers_is_one_line_without_the_values_of_secret_options(error: type[Exception]) -> None:
    options = {"AWS_SESSION_TOKEN": "a-token", "AWS_ACCESS_KEY_ID": "a-key", "AWS_REGION": "eu-central-1"}
    answer = "\x1b[31m↳\x1b[0m 403\n  ↳ ExpiredToken a-token of a-key in eu-central-1"
    expected = StorageError if error is OSError else NotACommitLogError
    with pytest.raises(expected) as caught, stores.reaching("s3://shop/log", options):
        raise error(answer)
    assert str(caught.value).endswith("403: ExpiredToken *** of *** in eu-central-1")
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_S3_ALLOW_UNSAFE_RENAME", "true"),
        ("aws_s3_allow_unsafe_rename", "1"),
        ("MOUNT_ALLOW_UNSAFE_RENAME", "True"),
        ("AWS_S3_LOCKING_PROVIDER", "dynamodb"),
        ("AWS_CONDITIONAL_PUT", "disabled"),
        ("conditional_put", "dynamo:table"),
    ],
)
def test_settings_that_let_commits_overwrite_each_other_are_refused(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in (txmq.CommitLog.create, txmq.CommitLog.open):
        with pytest.raises(OptionError, match=f"(?i){name}={value}.*leave it out"):
            attempt("s3://shop/log", storage_options={name: value})
    if name.isupper():
        monkeypatch.setenv(name, value)
        with pytest.raises(OptionError, match=name):
            txmq.CommitLog.create(tmp_path / "log")


def test_a_setting_that_says_no_is_not_refused(tmp_path: Path) -> None:
    options = {"AWS_S3_ALLOW_UNSAFE_RENAME": "false", "AWS_CONDITIONAL_PUT": "etag"}
    assert txmq.CommitLog.create(tmp_path / "log", storage_options=options).topics() == {}


@pytest.mark.parametrize(
    "denied",
    [
        PermissionError(13, "Permission denied"),
        OSError("When reading information for key 'half/x': AWS Error ACCESS_DENIED during HeadObject operation"),
    ],
)
def test_a_file_without_permission_is_not_called_damaged(denied: OSError) -> None:
    with pytest.raises(UnreadableFileError) as of_file, seal.reading("half-1.parquet", "half"):
        raise denied
    with pytest.raises(StorageError) as of_table, answers.asking("log/op", None):
        raise denied
    with pytest.raises(StorageError) as of_log, stores.reaching("log", None):
        raise denied
    for caught in (of_file, of_table, of_log):
        assert "(permission denied)" in str(caught.value)
        assert not any(word in str(caught.value) for word in ("damaged", "restore", "fails"))
    with pytest.raises(UnreadableFileError, match="or it is damaged"), seal.reading("half-1.parquet", "half"):
        raise OSError("Parquet file size is 403 bytes, smaller than the minimum")


@pytest.mark.parametrize(
    ("method", "ask"),
    [
        ("transaction_version", lambda table: table.transaction_version("an application")),
        ("vacuum", lambda table: table.removed_since()),
        ("get_add_actions", lambda table: table.actions()),
    ],
)
def test_a_damaged_part_of_the_delta_log_that_is_read_late_is_named(
    method: str, ask: Callable[[Table], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs leaves columns of a checkpoint out until it needs them. Its own error named neither log nor table."""

    def fail(*given: object, **named: object) -> object:
        raise DeltaError("Kernel error: Parquet error: insufficient definition levels")

    table = txmq.CommitLog.create(tmp_path / "log").engine.op_table
    monkeypatch.setattr(DeltaTable, method, fail)
    with pytest.raises(CorruptLogError, match="the Delta log of table op cannot be read any more: Kernel error"):
        ask(table)


@pytest.mark.parametrize("code", [1, 95])
def test_a_file_system_without_hard_links_is_refused_and_nothing_is_left_behind(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs left the log's folder behind, and a raw error of three lines."""

    def create(uri: str, *_: object, **__: object) -> None:
        (Path(uri) / "_delta_log").mkdir(parents=True, exist_ok=True)
        raise OSError(
            f"Generic LocalFileSystem error\n  ↳ Unable to rename file\n   ↳ {os.strerror(code)} (os error {code})"
        )

    monkeypatch.setattr(stores.DeltaTable, "create", create)
    with pytest.raises(StorageError, match="without hard links") as caught:
        txmq.CommitLog.create(tmp_path / "shop" / "log")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
