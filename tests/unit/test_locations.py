"""One folder for a commit log, however its path is written; or a refusal that says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import rmq_spark as txmq
from rmq_spark import ConsumerGroup
from rmq_spark.errors import NotACommitLogError, OptionError, UnreachableStoreError
from tests.support.half_batches import commit, orphan_of, prepare
from tests.support.inside import filesystem, location, op_merge, read_options
from tests.support.limits import Limit

TABLES = {"half", "op", "topics", "groups", "messages"}


def whole_cycle(path: Any, folder: Path, limit: Limit) -> None:
    """Everything that a log does, with its parts opened anew; all of its files end in the folder."""
    limit(OP_FILES_MAX=3)
    log = txmq.CommitLog.create(path)
    log.create_topic("orders", 2)
    for batch in range(3):
        commit(log, prepare(log, batch, 4))
        txmq.CommitLog.open(path).read("orders")
    log.close()
    op_merge.compact_op(log.engine.op_table)
    log.engine.op_table.refresh()
    assert log.engine.op_table.removed_since()
    assert not log.engine.op_table.removed_since() & set(log.engine.op_table.actions()["path"].to_pylist())
    log.drain()
    ConsumerGroup(log, "points").reset("latest", ["orders"])
    orphan = orphan_of(log)
    assert txmq.CommitLog.open(path).vacuum() == [f"half/{orphan.name}"]
    again = txmq.CommitLog.open(path)
    assert again.path == log.path
    assert again.read("orders").num_rows == 12
    assert sum(ConsumerGroup(again, "points").positions().values()) == 12
    staged, of_executor = filesystem(f"{read_options({'path': str(path), 'subscribe': 'orders'}, False).path}/half")
    assert {os.path.basename(f.path) for f in staged.get_file_info([f"{of_executor}/_delta_log"])} == {"_delta_log"}
    assert {p.name for p in folder.iterdir()} == TABLES
    files = [path.relative_to(folder) for path in folder.rglob("*.parquet")]
    assert {path.parts[0] for path in files if "_delta_log" not in path.parts} == TABLES


NAMES = ["a b", "100%", "a%zz", "名前"]
NAMES_IN_ALL = ["a#b", "a+b", "a&b=c,d;e", "it's", "a~b", "a:b", ".hidden", "é"]


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in NAMES_IN_ALL)])
def test_a_folder_of_any_name_holds_the_whole_log(name: str, tmp_path: Path, limit: Limit) -> None:
    whole_cycle(str(tmp_path / name / "log"), tmp_path / name / "log", limit)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["slash", "relative", "dots", "symlink", "Path", "file uri", "hadoop uri", "localhost"]
)
def test_every_kind_of_path_leads_to_one_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: Limit
) -> None:
    folder = tmp_path / "a b" / "log"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    paths = {
        "slash": f"{folder}//",
        "relative": "a b/log",
        "dots": "./x/../a b/log",
        "symlink": str(tmp_path / "link" / "log"),
        "Path": folder,
        "file uri": folder.as_uri(),
        "hadoop uri": folder.as_uri().replace("file://", "file:"),
        "localhost": folder.as_uri().replace("file://", "file://localhost"),
    }
    whole_cycle(paths[kind], folder, limit)
    assert {p.name for p in tmp_path.iterdir()} == {"a b", "link"}


@pytest.mark.parametrize("inside", ["", "/log"])
def test_a_loop_of_symbolic_links_is_refused_in_one_sentence(inside: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("other")
    (tmp_path / "other").symlink_to("loop")
    for make in (txmq.CommitLog.open, txmq.CommitLog.create):
        with pytest.raises(OptionError, match=r"loop.* leads nowhere: a symbolic link on it leads back to itself"):
            make(f"{tmp_path}/loop{inside}")
    (tmp_path / "dangling").symlink_to("nobody")
    with pytest.raises(NotACommitLogError):
        txmq.CommitLog.open(tmp_path / "dangling")


@pytest.mark.parametrize("inside", ["", "/log"])
def test_a_path_that_is_a_file_is_refused_in_one_sentence(inside: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("path = 'shop/log'")
    for make in (txmq.CommitLog.open, txmq.CommitLog.create):
        with pytest.raises(NotACommitLogError, match="this is a file, or leads through one"):
            make(f"{tmp_path}/log{inside}")


def test_a_file_uri_is_decoded_and_a_plain_path_is_not() -> None:
    assert location("file:///a%20b/c/") == location("file:/a%20b/c") == "/a b/c"
    assert location("FILE:///a%20b") == location("File:/a%20b") == "/a b"
    assert location("S3://bucket/Prefix:/A") == "s3://bucket/Prefix:/A"
    assert location("/data/Run:/Log") == "/data/Run:/Log"
    assert location("/100%/a b") == "/100%/a b"
    assert location("s3://bucket/a%20b/") == "s3://bucket/a%20b"
    container = "abfss://container@account.dfs.core.windows.net/log"  # which is no credential
    assert location(container) == container


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a%20b", "'%20' in it"),
        ("a%2Fb", "'%2F' in it"),
        ("file:///a%2520b", "'%20' in it"),
        ("s3://bucket/a%2520b", "'%20' in it"),
        *(
            (path, "do not read alike")
            for path in (*r"a\b a[b] a* a?b shop/{env}/log a|b a^b".split(), "a\x00b", "a\nb")
        ),
        ("\ud800", "UTF-8"),
        *((path, "expanduser") for path in ("~/log", "~")),
        *((path, "/dbfs/log") for path in ("dbfs:/log", "dbfs:///log", "dbfs://log")),
        ("file:log", r"'\./file:log' if a folder"),
        ("s3:log", r"'\./s3:log' if a folder"),
        ("s3://", "names no bucket: s3://<bucket>"),
        ("s3:///log", "names no bucket"),
        ("s3:/bucket/log", "write s3://bucket/log"),
        ("s3://[bucket/log", "is not a URI"),
        ("file://elsewhere/log", "machine 'elsewhere'"),
        ("file:///log?x=1", "query part"),
        ("s3://bucket/log?x=1", "query part"),
        ("s3://bucket/log#x", "query part"),
        ("s3://key:secret@bucket/log", "credentials"),
        ("abfss://c:secret@account.dfs.core.windows.net/log", "credentials"),
        (" s3://key:secret@bucket/log", "remove the blank"),
        ("user:secret@host:/log", "user:password@"),
        ("foo://bar/log", r"path 'foo://bar/log': there is no store for foo://\. A folder, s3://"),
        *((path, "the root folder of this machine") for path in ("file://", "/", "//")),
        *((path, "empty") for path in ("", " ")),
        (None, "NoneType"),
        (5, "int"),
        (b"log", "bytes: a string"),
    ],
)
def test_a_path_that_not_all_read_alike_is_refused_and_nothing_is_made(
    path: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs took a place of an unknown scheme for an empty one, and the advice was to make a log there."""
    monkeypatch.chdir(tmp_path)
    for door in (txmq.CommitLog.create, txmq.CommitLog.open):
        with pytest.raises(OptionError, match=words) as refused:
            door(path)
        assert "secret" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_the_file_system_refuses_is_told_in_plain_words(tmp_path: Path) -> None:
    with pytest.raises(NotACommitLogError, match=r"a table cannot be created at .*: File name too long") as refused:
        txmq.CommitLog.create(tmp_path / ("x" * 256))
    assert "kind:" not in str(refused.value)


def test_a_relative_path_in_a_folder_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(OptionError, match=r"path 'log' is relative, .* is gone: give an absolute path"):
        txmq.CommitLog.create("log")


def test_an_endpoint_that_is_no_url_is_refused_in_one_sentence() -> None:
    """delta-rs panics, which is no Exception."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "eu"}
    with pytest.raises(UnreachableStoreError, match="an endpoint is a URL such as https://host:9000"):
        txmq.CommitLog.open("s3://bucket/log", {**keys, "AWS_ENDPOINT_URL": "garbage"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["k"], "storage_options is list: a mapping of names to texts is expected"),
        ({"timeout": 5}, "storage_options has 'timeout' with a value of the type int: names and values are texts"),
    ],
)
def test_storage_options_that_are_none_are_refused(tmp_path: Path, options: Any, words: str) -> None:
    doors: list[Any] = [txmq.CommitLog.create, txmq.CommitLog.open]
    doors += [lambda path, **given: txmq.TransactionMQProducer(path, "shop", **given)]
    doors += [lambda path, **given: txmq.PushConsumer(path, "points", print, "orders", **given)]
    doors += [lambda path, **given: txmq.PullConsumer(path, "points", "orders", **given)]
    doors += [lambda path, **given: txmq.ConsumerGroup(path, "points", **given)]
    doors += [lambda path, **given: txmq.DeadLetters(path, "points", **given)]
    for door in doors:
        with pytest.raises(OptionError, match=words):
            door(tmp_path / "log", storage_options=options)
