"""Secrets planted wherever a user may put one: no error, traceback, repr or log shows them."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CheckService, CommitLog
from rmq_spark._core.storage.seal import reading
from rmq_spark._core.vocabulary import redaction
from rmq_spark._core.vocabulary.redaction import HIDDEN
from rmq_spark.errors import LostFileError, OptionError, TxmqError, UnreadableFileError
from tests.support import commands
from tests.support.half_batches import make_log
from tests.support.inside import (
    HALF_SCHEMA,
    TEXT_CHARS_MAX,
    DeltaLogTable,
    JobSettings,
    filesystem,
    load_listener,
    read_options,
    redacted,
)
from tests.support.listeners import Scripted
from tests.support.seeds import how_many

SECRET = "pl4nted-s3cret/value"
SIGNATURE = "sv=1&sig=" + SECRET
OPTIONS = {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "eu-central-1"}
URL = f"postgresql+psycopg://shop:{SECRET.replace('/', '%2F')}@127.0.0.1:1/orders?password={SECRET}"
ODD = "q7/uote8\" \\+é'"
PLANTED = (SECRET, SECRET.replace("/", "%2F"))


def told_by(problem: BaseException) -> str:
    """All that a person may see of an error."""
    return "".join(traceback.format_exception(problem)) + repr(problem) + str(problem)


def leaks(text: str) -> list[str]:
    return [line for line in text.splitlines() if any(secret in line for secret in PLANTED)]


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.DEBUG, "rmq_spark")
    yield caplog
    assert not leaks(caplog.text)


def raises_with_the_url(*_: Any) -> Any:
    raise ConnectionError(f"no answer from {URL}, asked with {SECRET}")


LISTENER = Scripted(raises_with_the_url, raises_with_the_url)
make_listener = raises_with_the_url


def listener_with(url: str) -> txmq.SqlTransactionListener:
    return txmq.SqlTransactionListener(url, print)


FAILING: dict[str, Callable[[Path], Any]] = {
    "a log at a signed URI": lambda _: CommitLog.open(f"abfss://c@account.dfs.core.windows.net/log?{SIGNATURE}"),
    "a log made at a signed URI": lambda _: CommitLog.create(f"az://container/log?{SIGNATURE}"),
    "a log with a password": lambda _: CommitLog.open(f"https://shop:{SECRET}@host/log"),
    "a log with keys in its bucket": lambda _: CommitLog.create(f"s3://AKIA0123456789ABCDEF:{SECRET}@bucket/log"),
    "a reader's path": lambda _: read_options({"path": f"gs://b/log?{SIGNATURE}", "subscribe": "orders"}, True),
    "an unknown file system": lambda _: filesystem(f"what://shop:{SECRET}@host/log?{SIGNATURE}"),
    "a table that is none": lambda _: DeltaLogTable(
        f"what://h/t?{SIGNATURE}", "half", HALF_SCHEMA, OPTIONS
    ).wait_until_open(),
    "no log in a folder of that name": lambda p: CommitLog.open(p / SIGNATURE),
    "a local path": lambda p: CommitLog.open(f"{p}/log?{SIGNATURE}"),
    "a setting": lambda p: CommitLog.create(p, storage_options={**OPTIONS, "aws_conditional_put": "disabled"}),
    "an option's value": lambda _: read_options({"path": "x", "subscribe": "a", "minPartitions": SECRET}, True),
    "a fence": lambda _: listener_with(URL).create_fence(),
    "a fence's id": lambda _: listener_with(URL).store_id,
    "an inbox": lambda _: txmq.SqlInbox(URL, "points", print).positions(),
    "a URL that is none": lambda _: listener_with(f"postgresql//shop:{SECRET}@host"),
    "a listener that cannot be made": lambda _: load_listener("tests.unit.test_redaction:make_listener"),
}


@pytest.mark.parametrize("what", FAILING)
def test_no_error_shows_a_secret(
    what: str, tmp_path: Path, everything_logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", SECRET)
    with pytest.raises((TxmqError, OSError, sa.exc.DBAPIError)) as found:
        FAILING[what](tmp_path)
    seen: BaseException | None = found.value
    while seen is not None:
        assert not leaks(told_by(seen)), what
        seen = seen.__cause__


def test_what_a_store_quotes_is_hidden_in_the_error_of_a_file(tmp_path: Path) -> None:
    make_log("delta", tmp_path / "log")
    CommitLog.open(tmp_path / "log", OPTIONS)  # from here on the process knows the secret
    for problem, kind in (
        (OSError(f"403: key {SECRET} of s3://b/x?{SIGNATURE}"), UnreadableFileError),
        (FileNotFoundError(f"s3://b/x?{SIGNATURE}"), LostFileError),
    ):
        with pytest.raises(kind) as found, reading("half-1.parquet", "half"):
            raise problem
        assert not leaks(told_by(found.value))
        assert HIDDEN in str(found.value)


@pytest.mark.parametrize(
    "shown",
    [
        quote(ODD), quote(ODD, safe=""), quote_plus(ODD), json.dumps(ODD), repr(ODD),
        f"postgresql://shop:{ODD}@host/orders", f"password='{ODD}'", f"{{'password': {ODD!r}}}",
        "sig: q7/uote8", "Authorization: Bearer q7/uote8", "mysql://shop:q7/uote8 and more@host/orders",
    ],
)  # fmt: skip
def test_a_secret_is_hidden_however_it_is_written(shown: str) -> None:
    redaction.remember({"my_bucket_key": ODD, "aws_endpoint_url": "http://127.0.0.1:4566/shop"})
    said = redacted(f"the store at http://127.0.0.1:4566/shop said {shown} to me@host")
    assert "uote8" not in said
    assert said.startswith("the store at http://127.0.0.1:4566/shop said ")


def test_an_error_without_secrets_keeps_its_cause() -> None:
    with pytest.raises(UnreadableFileError) as found, reading("half-1.parquet", "half"):
        raise OSError("disk failure")
    assert isinstance(found.value.__cause__, OSError)


def test_no_repr_shows_a_secret(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log")
    log.engine.path, log.engine.storage_options = f"s3://b/log?{SIGNATURE}", OPTIONS
    shown = [log, txmq.ConsumerGroup(log, "points"), listener_with(URL), txmq.SqlInbox(URL, "points", print)]
    shown += [read_options({"path": "x", "subscribe": "a", "storage.AWS_SECRET_ACCESS_KEY": SECRET}, True)]
    shown += [JobSettings(path="x", storage=OPTIONS)]
    assert not leaks("\n".join(map(repr, shown)))


def test_no_log_of_a_listener_that_fails_shows_its_url(everything_logged: pytest.LogCaptureFixture) -> None:
    redaction.remember(OPTIONS)  # what nobody has told the process, it cannot hide
    log = txmq.testing.InMemoryCommitLog(topics={"orders": 1})
    with txmq.TransactionMQProducer(log, "group", LISTENER, check_interval=None) as producer:
        producer.send_message_in_transaction(txmq.Message("orders", b""))
    report = CheckService(log, {"group": LISTENER}, transaction_timeout=0).run_once()
    assert report.problems
    assert not leaks(repr(report) + str(report) + str(report.to_dict()))
    assert "ConnectionError" in everything_logged.text


def test_no_line_of_the_command_shows_a_secret(
    tmp_path: Path, everything_logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXMQ_STORAGE__AWS_SECRET_ACCESS_KEY", SECRET)
    config = tmp_path / "txmq.toml"
    for code, path in (
        (2, f"az://container/log?{SIGNATURE}"),
        (2, f"s3://key:{SECRET}@bucket/log"),
        (2, f"what://shop:{SECRET}@host/log"),
        (2, f"{tmp_path}/log?{SIGNATURE}"),
        (1, f"{tmp_path}/{SIGNATURE}"),
    ):
        config.write_text(f'path = "{path}"\n[storage]\nAWS_SECRET_ACCESS_KEY = "{SECRET}"\n')
        for ends_with, *arguments in (
            (code, "topics", path),
            (code, "create" if code == 2 else "pending", path),
            (1, "check", "--config", config, "--once"),
        ):
            out, err = commands.txmq(*arguments, code=ends_with)
            assert err.strip()
            assert not leaks(out + err)


# ---------------------------------------------------------------- the function itself
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at abfss://c@a.net/log?sv=1&sig=x now", "at abfss://c@a.net/log?*** now"),
        ("'s3://key:a/b@bucket/log'", "'s3://***@bucket/log'"),
        ("postgresql+psycopg://u:p@host/db?password=p", "postgresql+psycopg://***@host/db?***"),
        ("http://u:p?y@host:9", "http://***@***"),
        ("https://host:80/p?from=a@b", "https://host:80/p?***"),
        ("clone https://t0ken@host/a.git now", "clone https://***@host/a.git now"),
        ("git+https://t0ken@host:80/p", "git+https://***@host:80/p"),
        ("https://host/users/a@b", "https://host/users/a@b"),
        ("'jdbc:oracle:thin:shop/s3cret@//db:1521/orders'", "'jdbc:oracle:thin:***@//db:1521/orders'"),
        ('jdbc:oracle:oci:shop/"s3/cr@t"@db', "jdbc:oracle:oci:***@db"),
        ("jdbc:oracle:thin:@db:1521/orders", "jdbc:oracle:thin:@db:1521/orders"),
        ("PGPASSWORD=p db_password=p", "PGPASSWORD=*** db_password=***"),
        ("password: p", "password: ***"),
        ("Authorization: Token p", "Authorization: ***"),
        ("api_key=p&token=p", "api_key=***&token=***"),
        ("sharding_key=p, idempotency_key='p'", "sharding_key=p, idempotency_key='p'"),
        ("AWS_SECRET_ACCESS_KEY=abc, and on", "AWS_SECRET_ACCESS_KEY=***, and on"),
        ("<AWSAccessKeyId>AKIA0123456789ABCDEF</AWSAccessKeyId>", "<AWSAccessKeyId>***</AWSAccessKeyId>"),
        ("/tmp/log?sig=x", "/tmp/log?sig=***"),
        ("is 5 > 3? yes: ask a@b", "is 5 > 3? yes: ask a@b"),
        ("AccountKey=c2Vj/cmV0==;EndpointSuffix=x", "AccountKey=***;EndpointSuffix=x"),
        ("SharedAccessKey=p&x-api-key: p, apikey: p", "SharedAccessKey=***&x-api-key: ***, apikey: ***"),
        ("passwd: p token: p secret: p", "passwd: *** token: *** secret: ***"),
        ("fs.azure.account.key.shop.dfs=p", "fs.azure.account.key.shop.dfs=***"),
        ("Set-Cookie: session=p; Path=/", "Set-Cookie: ***; Path=/"),
        ("sent Basic dXNlcjpw and Bearer 0123456789abcdef", "sent Basic *** and Bearer ***"),
        ("Basic authentication failed for the bearer of it", "Basic authentication failed for the bearer of it"),
        ("got eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxw.", "got ***."),
        ("AKIA0123456789ABCDEF " + "s3cr/t+890" * 4 + " now", "*** now"),
        ("dapi" + "0123456789abcdef" * 2, "***"),
        ("ghp_" + "0123456789" * 4, "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- found", "*** found"),
        ("the primary_key: a, and sort_key=b", "the primary_key: a, and sort_key=b"),
    ],
)
def test_a_secret_is_hidden_and_the_rest_is_kept(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.turns(4)
@pytest.mark.parametrize("text", ["a://", "a:", "://@:", "x", "aws_", "password=", "file://x?", "a_aws_key",
                                  "http://", "jdbc:oracle:x:", "jdbc:oracle:x:/", "eyJ", "eyJaaaaaaaaaaa.", "Basic a",
                                  "api_", "-----BEGIN PRIVATE KEY-----", "fs.azure.account.key."])  # fmt: skip
def test_a_long_text_is_looked_through_in_one_pass(text: str) -> None:
    long = text * (how_many(2**18, in_all=2**20) // len(text))
    assert redacted(long)  # with the square of the length it would take minutes
    assert len(str(OptionError(long))) <= TEXT_CHARS_MAX + 50
