"""What a person meets in the first hour: the wrong Python, an error within Spark's, a misspelt option."""

from __future__ import annotations

import json
import re
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import errors
from rmq_spark._core.spark.workers import require_importable
from rmq_spark._core.vocabulary.redaction import line_of
from rmq_spark.errors import OptionError, TopicNotFoundError, find_cause
from rmq_spark.testing import InMemoryCommitLog
from tests.support.inside import TxmqDataSource
from tests.support.source_logs import source_schema


# ---------------------------------------------------------------- the workers' Python
def session(python: str, master: str = "local[2]") -> Any:
    return SimpleNamespace(_sc=SimpleNamespace(master=master, pythonExec=python))


def test_this_program_s_python_and_a_cluster_s_are_left_alone() -> None:
    require_importable(session(sys.executable))
    require_importable(session("/not/there/python", "spark://head:7077"))
    require_importable(SimpleNamespace(_sc=None))  # type: ignore[arg-type]  # Spark Connect


def test_another_python_that_has_the_package_will_do(tmp_path: Path) -> None:
    require_importable(session(script(tmp_path, f'exec "{sys.executable}" "$@"')))


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (None, "it is not there"),
        ("echo \"ModuleNotFoundError: No module named 'rmq_spark'\" >&2; exit 1", "No module named 'rmq_spark'"),
        ("exit 3", "it ends with an error"),
        ("#!/not/there/sh", "it does not start: FileNotFoundError"),
    ],
)
def test_a_python_without_the_package_is_told_with_what_to_set(tmp_path: Path, does: str | None, why: str) -> None:
    python = str(tmp_path / "none") if does is None else script(tmp_path, does)
    with pytest.raises(OptionError) as told:
        require_importable(session(python))
    assert why in str(told.value)
    assert f"PYSPARK_PYTHON={sys.executable}" in str(told.value)


def script(folder: Path, does: str) -> str:
    file = folder / "python"
    file.write_text(does if does.startswith("#!") else f"#!/bin/sh\n{does}\n")
    file.chmod(0o755)
    return str(file)


# ---------------------------------------------------------------- errors
SPARK_S_TEXT = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted. SQLSTATE: XXKST
=== Streaming Query ===
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
rmq_spark.errors.MessageError: column 'body' is null in row 3

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "two_phase.py", line 2, in send
rmq_spark.errors.TopicNotFoundError: topic 'ordes' is not in the commit log: did you mean 'orders'?

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
"""


def test_the_cause_is_found_in_what_spark_says() -> None:
    found = find_cause(RuntimeError(SPARK_S_TEXT))
    assert type(found) is TopicNotFoundError
    assert str(found) == "topic 'ordes' is not in the commit log: did you mean 'orders'?"
    assert type(find_cause(SPARK_S_TEXT)) is TopicNotFoundError


def test_a_database_s_words_of_several_lines_are_kept_with_the_advice_behind_them() -> None:
    said = "it raised OperationalError: no such table\n[SQL: insert into ordrs]. Its messages stay pending"
    raised = f"rmq_spark.errors.LocalTransactionError: {said}"
    for text in (f"Traceback\n{raised}\n\n\tat org.apache.spark.X SQLSTATE: 1", f"{raised}\n\tat org.apache"):
        assert str(find_cause(text)) == said


def test_a_database_that_does_not_answer_is_found_in_spark_s_text(tmp_path: Path) -> None:
    listener = txmq.SqlTransactionListener(f"sqlite:///{tmp_path}/nowhere/orders.db", lambda connection, batch: None)
    log = InMemoryCommitLog(topics={"orders": 1})
    with (
        txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer,
        pytest.raises(sa.exc.OperationalError, match="no connection") as away,
    ):
        producer.send_message_in_transaction(txmq.Message("orders", b"x"))
    text = "".join(traceback.format_exception(away.value))
    for problem in (away.value, f"[STREAM_FAILED] Query terminated with exception: {text}\n\tat org.apache.spark.X"):
        said = r"no connection to sqlite:///.*/nowhere/orders\.db: nothing was written\. Start again .*"
        assert re.fullmatch(said, str(find_cause(problem)))
    assert log.pending().num_rows == 0


@pytest.mark.parametrize(
    ("spark_s", "advice"),
    [
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: txmq.", r"txmq\.register\(spark\)"),
        ("[UNSUPPORTED_DATA_SOURCE_SAVE_MODE] The data source 'txmq' cannot be written in", r"mode\('append'\)"),
    ],
)
def test_what_spark_says_before_it_asks_us_has_an_advice_too(spark_s: str, advice: str) -> None:
    with pytest.raises(OptionError, match=advice):
        raise find_cause(RuntimeError(spark_s)) or AssertionError
    assert find_cause(spark_s.replace("txmq", "other")) is None


def test_a_chain_that_bites_its_tail_and_a_text_of_many_lines_come_to_an_end() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert find_cause(one) is None
    assert find_cause("\n" * 900_000 + "x") is None


def test_the_cause_is_found_in_a_chain_of_exceptions() -> None:
    ours = OptionError("what to do")
    spark_s = RuntimeError("Spark's")
    spark_s.__cause__ = ours
    assert find_cause(spark_s) is ours


@pytest.mark.parametrize(
    "other", [None, ValueError("no topic"), "rmq_spark.errors.Any: x", "rmq_spark.errors.redacted: x", ""]
)
def test_what_is_not_ours_has_no_cause(other: Any) -> None:
    assert find_cause(other) is None


def test_every_error_can_be_found_by_its_name() -> None:
    names = [n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.TxmqError)]
    assert len(names) > 30
    for name in names:
        assert type(find_cause(f"rmq_spark.errors.{name}: what and why")).__name__ == name


def charge(order: int) -> None:
    json.loads(f"{{{order}")


def test_an_error_of_the_user_s_code_says_in_which_line() -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        charge(1)
    line = charge.__code__.co_firstlineno + 1
    assert line_of(raised.value) == f" (test_first_hour.py, line {line}, in charge)"
    assert line_of(ValueError("it was never raised")) == ""


def test_no_line_of_the_package_is_told_as_the_user_s_own() -> None:
    with pytest.raises(OptionError) as raised:
        TxmqDataSource({}).writer(source_schema(), overwrite=True)
    assert line_of(raised.value).startswith(" (test_first_hour.py, line ")


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subscibe": "orders"}, "'subscribe'"),
        ({"subscribe": "orders", "startingOffsets": "newest"}, "startingOffsets='newest'"),
        ({"subscribe": "orders", "endingOffsets": "newest"}, "endingOffsets='newest'"),
        ({}, "subscribe"),
    ],
)
def test_options_that_no_read_could_use_are_refused_when_they_are_loaded(options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TxmqDataSource({"path": "log", **options}).schema()


@pytest.mark.parametrize(
    "options", [{"maxOffsetsPerTrigger": "5"}, {"consumerGroup": "points"}, {"endingOffsets": "latest"}, {}]
)
def test_options_of_a_stream_and_of_a_batch_may_be_loaded(options: dict[str, str]) -> None:
    assert TxmqDataSource({"path": "log", "subscribe": "orders", **options}).schema()


@pytest.mark.parametrize(
    ("name", "is_here"),
    [("UNKNOW", "UNKNOWN"), ("DefaultMQPushConsumer", "PushConsumer"), ("DefaultMQProducer", "TransactionMQProducer")],
)
def test_a_name_of_rocketmq_is_told_where_it_is_here(name: str, is_here: str) -> None:
    with pytest.raises(AttributeError, match=f"RocketMQ's {name} is {is_here}"):
        getattr(txmq, name)
    assert not hasattr(txmq, "Nothing")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TransactionMQProducr", ": did you mean 'TransactionMQProducer'?"),
        ("commitlog", ": did you mean 'CommitLog'?"),
        ("LostFilError", ": did you mean 'LostFileError'?"),
        ("Standing", ": it is rmq_spark.report.Standing"),
        ("Xyzzy", ""),
        ("_CommitLogs", ""),
    ],
)
def test_a_mistyped_name_is_told_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(txmq, name)
    assert str(raised.value) == f"module 'rmq_spark' has no attribute {name!r}{meant}"


@pytest.mark.log("memory", orders=1)
def test_a_key_that_a_client_chose_is_to_be_hashed(log: txmq.CommitLog) -> None:
    with (
        txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer,
        pytest.raises(txmq.MessageError, match=r"idempotency_key 'order/42 é' .*take a hash of it"),
    ):
        producer.send(txmq.Message("orders", b"x"), idempotency_key="order/42 é")


@pytest.mark.parametrize(
    ("door", "words"),
    [
        ("writer", r"mode\('overwrite'\) is not possible.*use mode\('append'\)"),
        ("streamWriter", r"outputMode\('complete'\) is not possible.*by foreachBatch\(TransactionalSink\(\.\.\.\)\)"),
    ],
)
def test_a_log_that_only_grows_refuses_to_be_overwritten(door: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        getattr(TxmqDataSource({"path": "log"}), door)(None, overwrite=True)
