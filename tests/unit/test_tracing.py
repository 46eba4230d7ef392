"""Spans and trace context by OpenTelemetry, seen by the SDK's exporter in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.runtime.spans import LINKS_MAX, sending_batch, tracing
from rmq_spark.producer import TransactionSendResult
from tests.support.consumers import DONE, LATER, consume_all, go_on, joined, memory_log
from tests.support.half_batches import header_of, stage
from tests.support.inside import TwoPhase
from tests.support.listeners import Scripted

pytestmark = pytest.mark.log("memory", "delta", orders=1)

NAME, TYPE = "messaging.operation.name", "messaging.operation.type"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda *_: provider)
    yield exporter
    provider.shutdown()


def says(batch: txmq.HalfBatch) -> Any:
    with trace.get_tracer("shop").start_as_current_span("insert"):
        return batch.arg


def send(log: CommitLog, messages: Any, arg: Any = txmq.COMMIT_MESSAGE, **options: Any) -> TransactionSendResult:
    with txmq.TransactionMQProducer(log, "shop", Scripted(says), check_interval=None) as producer:
        return producer.send_messages_in_transaction(messages, arg, **options)


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def one(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    found = named(spans, name)
    assert len(found) == 1, [span.name for span in spans.get_finished_spans()]
    return found[0]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def properties(log: CommitLog) -> list[dict[str, str]]:
    return [dict(p or ()) for p in log.another().read("orders", columns=["properties"])["properties"].to_pylist()]


def id_in(properties: dict[str, str]) -> int:
    return int(properties["traceparent"].split("-")[2], 16)


# ---------------------------------------------------------------- the producer
def test_a_single_message_carries_the_context_of_its_send(log: CommitLog, spans: InMemorySpanExporter) -> None:
    message = txmq.Message("orders", b"body", tags="paid", keys=["1", "2"], sharding_key="k", properties={"a": "b"})
    with trace.get_tracer("shop").start_as_current_span("request") as request:
        result = send(log, [message])
    sent, settled, inserted = one(spans, "send orders"), one(spans, "commit orders"), one(spans, "insert")
    assert sent.kind == SpanKind.PRODUCER
    assert attributes(sent) == {
        "messaging.system": "rocketmq",
        "messaging.rocketmq.namespace": log.path,
        TYPE: "send",
        NAME: "send",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": log.another().read("orders")["msg_id"][0].as_py(),
        "messaging.message.body.size": 4,
        "messaging.rocketmq.message.tag": "paid",
        "messaging.rocketmq.message.keys": ("1", "2"),
        "messaging.rocketmq.message.group": "k",
        "messaging.rocketmq.message.type": "transaction",
        "txmq.producer_group": "shop",
        "txmq.half_id": result.half_id,
        "txmq.verdict": "COMMIT_MESSAGE",
    }
    assert (settled.kind, attributes(settled)[TYPE], attributes(settled)[NAME]) == (SpanKind.CLIENT, "settle", "commit")
    assert attributes(settled)["txmq.decided_by"] == "execute"
    for child in (settled, inserted):
        assert child.parent is not None
        assert child.parent.span_id == sent.context.span_id
    assert sent.parent is not None
    assert sent.parent.span_id == request.get_span_context().span_id
    (kept,) = properties(log)
    assert (kept["a"], id_in(kept)) == ("b", sent.context.span_id)


def test_an_asynchronous_send_is_in_the_trace_of_its_caller(spans: InMemorySpanExporter) -> None:
    log = memory_log(orders=1)
    producer = txmq.TransactionMQProducer(log, "shop", Scripted(says), check_interval=None)
    with producer, trace.get_tracer("shop").start_as_current_span("request") as request:
        producer.send_message_in_transaction_async(txmq.Message("orders", b"body"), txmq.COMMIT_MESSAGE).result(8)
    trace_id = request.get_span_context().trace_id
    assert {span.context.trace_id for span in spans.get_finished_spans() if span.context} == {trace_id}
    assert named(spans, "insert")


def test_several_messages_have_a_span_each_and_the_send_has_links(log: CommitLog, spans: InMemorySpanExporter) -> None:
    send(log, [txmq.Message("orders", b"a"), txmq.Message("orders", b"b", properties={"traceparent": PARENT})])
    created, sent = one(spans, "create orders"), one(spans, "send orders")
    assert (created.kind, sent.kind) == (SpanKind.PRODUCER, SpanKind.CLIENT)
    assert attributes(created)[TYPE] == "create"
    assert attributes(sent)["messaging.batch.message_count"] == 2
    assert linked(sent) == [created.context.span_id, 0xB7AD6B7169203331]
    assert [id_in(p) for p in properties(log)] == [created.context.span_id, 0xB7AD6B7169203331]


def test_many_messages_and_tables_carry_the_context_of_their_send(log: CommitLog, spans: InMemorySpanExporter) -> None:
    many = [txmq.Message("orders", b"x") for _ in range(LINKS_MAX + 1)]
    send(log, many)
    send(log, pa.table({"body": ["a", "b"]}), topic="orders")
    first, second = named(spans, "send orders")
    assert not named(spans, "create orders")
    assert first.kind == SpanKind.PRODUCER
    found = [id_in(p) for p in properties(log)]
    assert found == [first.context.span_id] * len(many) + [second.context.span_id] * 2


def test_a_table_s_own_properties_are_left_alone(log: CommitLog, spans: InMemorySpanExporter) -> None:
    own = pa.array([[("traceparent", PARENT)], None], pa.map_(pa.string(), pa.string()))
    send(log, pa.table({"body": ["a", "b"], "properties": own}), topic="orders")
    assert properties(log) == [{"traceparent": PARENT}, {}]


def test_a_message_without_room_for_a_context_is_sent_without(log: CommitLog, spans: InMemorySpanExporter) -> None:
    send(log, [txmq.Message("orders", b"a", properties={"a": "x" * (32 * 1024 - 1)})])
    assert list(properties(log)[0]) == ["a"]


def test_the_kind_of_a_message_is_rocketmq_s(spans: InMemorySpanExporter) -> None:
    log = memory_log(orders=1)
    log.create_topic("steps", 1, fifo=True)
    at = datetime.fromtimestamp(log.engine.runtime.time() + 60, timezone.utc)
    with txmq.TransactionMQProducer(log, "shop", Scripted(says), check_interval=None) as producer:
        producer.send(txmq.Message("orders", b"a"))
        producer.send(txmq.Message("steps", b"a", sharding_key="k"))
        producer.send(txmq.Message("orders", b"a", deliver_at=at))
        producer.send(txmq.Message("orders", b"a", delay_level=3))
    found = [attributes(span) for span in spans.get_finished_spans() if span.name.startswith("send ")]
    assert [a["messaging.rocketmq.message.type"] for a in found] == ["normal", "fifo", "delay", "delay"]
    assert found[2]["messaging.rocketmq.message.delivery_timestamp"] == int(at.timestamp() * 1_000)
    assert found[3]["messaging.rocketmq.message.delay_time_level"] == 3


def test_a_send_that_fails_says_why_without_secrets(log: CommitLog, spans: InMemorySpanExporter) -> None:
    fails = Scripted(ValueError("postgresql://shop:s3cr3t-pass@db/orders"))
    strict = txmq.TransactionMQProducer(log, "shop", fails, on_listener_error="fail", check_interval=None)
    with strict, pytest.raises(txmq.LocalTransactionError):
        strict.send_message_in_transaction(txmq.Message("orders", b"a"))
    sent = one(spans, "send orders")
    assert sent.status.status_code == StatusCode.ERROR
    assert "ValueError" in (sent.status.description or "")
    assert attributes(sent)["error.type"] == "LocalTransactionError"
    assert "s3cr3t" not in sent.to_json()
    assert not sent.events, "a recorded exception would have its whole text"


def test_a_rollback_and_an_unknown_are_told_apart(log: CommitLog, spans: InMemorySpanExporter) -> None:
    send(log, [txmq.Message("orders", b"a")], txmq.ROLLBACK_MESSAGE)
    send(log, [txmq.Message("orders", b"a")], txmq.UNKNOWN)
    assert [attributes(s)["txmq.verdict"] for s in named(spans, "send orders")] == ["ROLLBACK_MESSAGE", "UNKNOWN"]
    assert len(named(spans, "rollback orders")) == 1
    assert not named(spans, "commit orders")


def test_a_check_s_verdict_links_to_the_messages(log: CommitLog, spans: InMemorySpanExporter) -> None:
    send(log, [txmq.Message("orders", b"a")], txmq.UNKNOWN)
    txmq.CheckService(log, {"shop": Scripted(says)}, transaction_timeout=0).run_once()
    settled = one(spans, "commit orders")
    assert attributes(settled)["txmq.decided_by"] == "check"
    assert linked(settled) == [one(spans, "send orders").context.span_id]


# ---------------------------------------------------------------- the consumer
def test_a_message_is_processed_in_the_trace_that_sent_it(log: CommitLog, spans: InMemorySpanExporter) -> None:
    send(log, [txmq.Message("orders", b"a", tags="paid")])
    sent = one(spans, "send orders").context
    inside: list[int] = []

    def listen(message: txmq.MessageExt) -> Any:
        inside.append(trace.get_current_span().get_span_context().span_id)
        return DONE

    consumer = consume_all(log, txmq.EachMessage(listen))
    received, processed, settled = (one(spans, f"{what} orders") for what in ("receive", "process", "ack"))
    assert (received.kind, processed.kind, settled.kind) == (SpanKind.CLIENT, SpanKind.CONSUMER, SpanKind.CLIENT)
    assert linked(received) == [sent.span_id]
    assert attributes(received)["messaging.batch.message_count"] == 1
    assert processed.parent is not None
    assert (processed.parent.span_id, processed.context.trace_id) == (sent.span_id, sent.trace_id)
    assert inside == [processed.context.span_id]
    consumer.shutdown()
    assert [span.name for span in spans.get_finished_spans() if span.name.startswith("ack")] == ["ack orders"]
    told = {
        "messaging.system": "rocketmq",
        TYPE: "process",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.consumer.group.name": "points",
        "messaging.message.id": log.another().read("orders")["msg_id"][0].as_py(),
        "messaging.rocketmq.message.tag": "paid",
    }
    assert attributes(processed).items() >= told.items()
    assert attributes(settled)[TYPE] == "settle"
    assert attributes(settled)["messaging.batch.message_count"] == 1


def test_a_table_is_processed_in_one_span_with_links(log: CommitLog, spans: InMemorySpanExporter) -> None:
    send(log, [txmq.Message("orders", b"a"), txmq.Message("orders", b"b")])
    created = {span.context.span_id for span in named(spans, "create orders")}
    consume_all(log, lambda _: DONE)
    processed = one(spans, "process orders")
    assert processed.parent is None
    assert set(linked(processed)) == created
    assert len(created) == 2
    assert attributes(processed)["messaging.batch.message_count"] == 2
    assert processed.status.status_code == StatusCode.UNSET


def test_a_failed_message_says_so_and_its_retry_is_in_the_same_trace(spans: InMemorySpanExporter) -> None:
    log = memory_log(orders=1)
    send(log, [txmq.Message("orders", b"a")])
    sent = one(spans, "send orders").context
    tries: list[int] = []

    def listen(message: txmq.MessageExt) -> Any:
        tries.append(message.reconsume_times)
        if len(tries) == 1:
            raise ValueError("AWS_SECRET_ACCESS_KEY=abcdefghijkl")
        return LATER if len(tries) == 2 else DONE

    consumer = joined(log, txmq.EachMessage(listen))
    for _ in range(3):
        go_on(consumer)
        log.engine.runtime.sleep(60)
        consumer.member.keep()
    first, second, third = named(spans, "process orders")
    assert tries == [0, 1, 2]
    assert {span.context.trace_id for span in (first, second, third)} == {sent.trace_id}
    assert (attributes(first)["error.type"], attributes(second)["error.type"]) == ("ValueError", "FAILURE")
    assert "abcdefghijkl" not in first.to_json()
    assert third.status.status_code == StatusCode.UNSET
    assert linked(named(spans, "retry orders")[0]) == [sent.span_id]


def test_a_message_of_a_table_without_a_try_left_is_dead_and_not_sent_back(spans: InMemorySpanExporter) -> None:
    log = memory_log(orders=1)
    send(log, [txmq.Message("orders", b"a")])
    consume_all(log, lambda _: [LATER], max_reconsume_times=0)
    assert attributes(one(spans, "process orders"))["error.type"] == "FAILURE"
    assert len(named(spans, "dead orders")) == 1
    assert named(spans, "retry orders") == []


# ---------------------------------------------------------------- sinks, and programs that do not trace
def test_a_sink_s_micro_batch_is_one_span(spans: InMemorySpanExporter) -> None:
    log = memory_log(orders=1)
    two_phase, header = TwoPhase(log.engine, Scripted(says)), header_of(7)
    with sending_batch(log.path, header.half_id, "orders"):
        two_phase.send(header, lambda: stage(log, header, {"body": ["a", "b"]}), txmq.COMMIT_MESSAGE)
    sent, settled = one(spans, "send orders"), one(spans, "commit orders")
    assert settled.parent is not None
    assert settled.parent.span_id == sent.context.span_id
    assert attributes(sent)["txmq.half_id"] == attributes(settled)["txmq.half_id"] == "app:7"
    assert properties(log) == [{}, {}], "nothing is done for a row"


def test_without_a_tracer_provider_nothing_is_traced_and_nothing_added(log: CommitLog) -> None:
    assert tracing() is None
    send(log, [txmq.Message("orders", b"a")])
    assert properties(log) == [{}]


def test_a_program_without_opentelemetry_does_not_load_it() -> None:
    program = (
        "import sys\n"
        "import rmq_spark as txmq\n"
        "from rmq_spark.testing import InMemoryCommitLog\n"
        "from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared\n"
        "log = InMemoryCommitLog(topics={'orders': 1})\n"
        "with txmq.TransactionMQProducer(log, 'shop', CommitOncePrepared(), check_interval=None) as producer:\n"
        "    producer.send(txmq.Message('orders', b'a'))\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert log.read('orders')['properties'].to_pylist() == [None]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
