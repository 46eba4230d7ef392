"""Log records: their fields, and as lines of JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import rmq_spark as txmq
from rmq_spark import CommitLog, HalfBatch
from rmq_spark.cli.stderr_log import json_handler
from rmq_spark.json_logs import FIELDS, JsonFormatter
from tests.support.consumers import DONE, go_on, push, queue_of
from tests.support.half_batches import prepare
from tests.support.listeners import Scripted


def line(message: str = "it is so", *arguments: object, error: BaseException | None = None, **extra: Any) -> Any:
    """A record as the formatter writes it, read again."""
    told = logging.getLogger("rmq_spark.test").makeRecord(
        "rmq_spark.test", logging.WARNING, __file__, 7, message, arguments,
        None if error is None else (type(error), error, error.__traceback__), extra=extra,
    )  # fmt: skip
    text = JsonFormatter().format(told)
    assert len(text.splitlines()) == 1
    return json.loads(text)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: vars(record)[name] for name in FIELDS if name in vars(record)}


pytestmark = pytest.mark.log("memory", orders=1)


# ---------------------------------------------------------------- lines of JSON
def test_a_record_is_a_line_with_its_fields() -> None:
    found = line("%s of %d\nlines", "two", 2, half_id="app:7", batch_id=7, none=None)
    at = datetime.fromisoformat(found.pop("time"))
    assert abs((datetime.now(timezone.utc) - at).total_seconds()) < 60
    named = {"half_id": "app:7", "batch_id": 7}
    assert found == {"level": "WARNING", "logger": "rmq_spark.test", "message": "two of 2\nlines", **named}


def test_any_value_can_be_written() -> None:
    at = datetime(2026, 1, 2, tzinfo=timezone.utc)
    found = line(at=at, many={"a": (1, float("nan"))}, half=0.5, flag=True, thing=ValueError("é"), bytes=b"\x00")
    assert {name: found[name] for name in ("at", "many", "half", "flag", "thing", "bytes")} == {
        "at": "2026-01-02T00:00:00+00:00",
        "many": {"a": [1, "nan"]},
        "half": 0.5,
        "flag": True,
        "thing": "é",
        "bytes": "b'\\x00'",
    }


def test_a_field_never_takes_the_place_of_the_record_s_own() -> None:
    assert line(level="DEBUG", time="never")["level"] == "WARNING"


def test_secrets_are_in_no_part_of_a_line() -> None:
    secret = "postgresql://shop:s3cr3t-pass@db/orders"
    try:
        raise ValueError(secret)
    except ValueError as problem:
        found = line("no answer of %s", secret, error=problem, url=secret, urls=[secret], by={"url": secret})
    assert "ValueError" in found["exception"]
    assert "s3cr3t" not in json.dumps(found)
    assert found["url"] == "postgresql://***@db/orders"


def test_a_line_names_the_span_in_which_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "trace_id" not in line()
    with TracerProvider().get_tracer("test").start_as_current_span("work") as span:
        found = line()
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        assert "trace_id" not in line(), "as in a program without OpenTelemetry"
    assert found["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)
    assert found["span_id"] == trace.format_span_id(span.get_span_context().span_id)


def test_the_environment_asks_for_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TXMQ_LOG_FORMAT", raising=False)
    assert json_handler() is None
    monkeypatch.setenv("TXMQ_LOG_FORMAT", "JSON")
    handler = json_handler()
    assert handler is not None
    assert isinstance(handler.formatter, JsonFormatter)


# ---------------------------------------------------------------- the fields of our records
def fails() -> Scripted:
    """A listener that says what the send's argument says, and fails without one."""
    problem = RuntimeError("the bank is closed")

    def as_told(batch: HalfBatch) -> Any:
        if batch.arg is None:
            raise problem
        return batch.arg

    return Scripted(as_told, problem)


def test_what_is_said_of_a_half_batch_names_it(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "rmq_spark"), txmq.TransactionMQProducer(log, "shop", fails()) as producer:
        result = producer.send_message_in_transaction(txmq.Message("orders", b"a"))
        done = producer.send_message_in_transaction(txmq.Message("orders", b"a"), txmq.COMMIT_MESSAGE)
    failed = next(r for r in caplog.records if "the bank is closed" in r.getMessage())
    assert fields(failed) == {
        "half_id": result.half_id,
        "app_id": result.half_id.removesuffix(":0"),
        "batch_id": 0,
        "transaction_id": result.transaction_id,
        "attempt": 1,
        "producer_group": "shop",
    }
    decided = next(r for r in caplog.records if "1 messages are committed, 0 rolled back, by execute" in r.getMessage())
    assert fields(decided)["transaction_id"] == done.transaction_id


def test_what_a_check_says_of_a_half_batch_names_it(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    prepare(log, 3, 1, group="shop")
    prepare(log, 4, 1, group="nobody")
    service = txmq.CheckService(log, {"shop": fails()}, transaction_timeout=0, file_reserved_time=3600)
    with caplog.at_level("INFO", "rmq_spark"):
        service.run_once()
        later = log.engine.runtime.now().replace(year=log.engine.runtime.now().year + 1)
        service = txmq.CheckService(log, {"shop": fails()}, file_reserved_time=3600, clock=lambda: later)
        service.run_once()
    (unanswered,) = [r for r in caplog.records if "did not answer" in r.getMessage()]
    assert fields(unanswered)["half_id"] == "app:3"
    (missing,) = [r for r in caplog.records if "has no listener here" in r.getMessage()]
    assert fields(missing) == {"producer_group": "nobody"}
    hidden = [r for r in caplog.records if "is quarantined" in r.getMessage()]
    assert [(r.half_id, r.batch_id) for r in hidden] == [("app:3", 3), ("app:4", 4)]  # type: ignore[attr-defined]


def test_what_a_consumer_says_names_its_group_and_queue(caplog: pytest.LogCaptureFixture) -> None:
    log = queue_of("ab")
    consumer = push(log, lambda _: DONE)
    with caplog.at_level("INFO", "rmq_spark"):
        consumer.member.join()
        consumer.member.engine.groups.set("points", {("orders", 0): 0}, "reset")
        go_on(consumer)
    claimed = next(r for r in caplog.records if "claimed" in r.getMessage())
    assert fields(claimed) == {"consumer_group": "points", "member": consumer.member.name}
    lost = next(r for r in caplog.records if "or reset" in r.getMessage())
    assert fields(lost).items() >= {"topic": "orders", "queue_id": 0, "queue_offset": 0}.items()


def test_no_field_is_one_that_python_s_records_have() -> None:
    assert not set(FIELDS) & set(vars(logging.makeLogRecord({})))
