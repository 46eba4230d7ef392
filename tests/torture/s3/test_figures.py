"""The figures of a commit log on a real S3 server, which an exporter only reads."""

from __future__ import annotations

import prometheus_client
import pytest

import rmq_spark as txmq
from tests.support.half_batches import commit, prepare
from tests.torture.s3.server import S3Server


@pytest.mark.turns(3, among="on S3")
def test_an_exporter_reads_a_log_on_s3(log: txmq.CommitLog, s3: S3Server) -> None:
    commit(log, prepare(log, 0))
    prepare(log, 1, 3, group="shop")
    options = s3.storage_options()
    registry = prometheus_client.CollectorRegistry()
    registry.register(txmq.metrics.LogCollector(log.path, storage_options=options, cache_seconds=0))
    labels = {"cluster": "DefaultCluster", "node_id": log.path}
    assert registry.get_sample_value("txmq_up", labels) == 1
    assert registry.get_sample_value("rocketmq_commit_messages_total", {**labels, "topic": "orders"}) == 5
    assert registry.get_sample_value("rocketmq_half_messages", {**labels, "topic": "orders"}) == 3
    commit(log, log.engine.get("app:1"))
    log.drain()
    log.engine.groups.set("points", {("orders", 0): 0}, "test")
    text = prometheus_client.generate_latest(registry).decode()
    assert registry.get_sample_value("txmq_undrained_messages", labels) == 0
    assert 'rocketmq_consumer_lag_messages{cluster="DefaultCluster",consumer_group="points"' in text
    assert not [value for name, value in options.items() if "KEY" in name and len(value) >= 8 and value in text]
