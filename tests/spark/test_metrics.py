"""Metrics, traces and logs where Spark runs the query."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pyspark.sql import SparkSession

import rmq_spark as txmq
from tests.support.half_batches import prepare
from tests.support.inside import CommitOncePrepared, ProcessMetrics

SPAN = "b7ad6b7169203331"


@pytest.fixture
def log(log_path: str) -> txmq.CommitLog:
    made = txmq.CommitLog.create(log_path)
    made.create_topic("orders", queues=2)
    made.create_topic("bills", queues=1)
    return made


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda *_: provider)
    yield exporter
    provider.shutdown()


@pytest.mark.turns(3, among="Spark: metrics and tables")
def test_a_query_s_progress_brings_the_log_s_figures(
    spark: SparkSession, log: txmq.CommitLog, numbers: Any, tmp_path: Path
) -> None:
    prepare(log, 0, 3, group="nobody")
    told: list[dict[str, Any]] = []
    came = threading.Event()

    def note(figures: Any) -> None:
        told.append(dict(figures))
        came.set()

    listener = txmq.metrics.QueryListener(log, every=0, on_figures=note)
    spark.streams.addListener(listener)
    try:
        sink = txmq.TransactionalSink(log, topic="orders", producer_group="shop", listener=None)
        query = (
            numbers(1).drop("k").writeStream.foreachBatch(sink).queryName("shop")
            .option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination(120)
        assert came.wait(60)
    finally:
        spark.streams.removeListener(listener)
    assert told[0]["query_id"] == query.id
    assert (told[0]["query_name"], told[0]["batch_id"], told[0]["input_rows"]) == ("shop", 0, 10)
    assert (told[0]["half_messages"], told[0]["pending_half_batches"], told[0]["undrained_messages"]) == (3, 1, 10)


@pytest.mark.turns(3, among="Spark: metrics and tables")
def test_a_sink_in_foreach_batch_is_counted_and_a_context_goes_through_a_query(
    spark: SparkSession, log: txmq.CommitLog, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    context = {"traceparent": f"00-0af7651916cd43dd8448eb211c80319c-{SPAN}-01"}
    with txmq.TransactionMQProducer(log, "shop", CommitOncePrepared(), check_interval=None) as producer:
        producer.send([txmq.Message("orders", b"a", properties=context), txmq.Message("orders", b"b")])
    spans.clear()
    registry = prometheus_client.CollectorRegistry()
    metrics = ProcessMetrics(registry)
    try:
        sink = txmq.TransactionalSink(log, topic="bills", producer_group="bills", listener=None)
        stream = spark.readStream.format("txmq").option("path", log.path).option("subscribe", "orders")
        query = (
            stream.option("startingOffsets", "earliest").load().select("body", "properties").writeStream
            .foreachBatch(sink).option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination(120)
        own = {"cluster": "DefaultCluster", "node_id": log.path, "producer_group": "bills", "topic": "bills"}
        assert registry.get_sample_value("txmq_sent_messages_total", own) == 2
    finally:
        metrics.close()
    carried = [dict(p or ()) for p in log.read("bills", columns=["properties"])["properties"].to_pylist()]
    assert sorted("traceparent" in p for p in carried) == [True, True], "the producer gave the other one its own"
    assert context in carried
    sent = [span for span in spans.get_finished_spans() if span.name == "send bills"]
    assert len(sent) == 1
    assert [span.name for span in spans.get_finished_spans() if span.parent == sent[0].context] == ["commit bills"]
