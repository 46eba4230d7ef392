"""The how-to for Kafka, run from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kafka.broker import Broker
from tests.spark.test_readme import run_examples
from tests.torture.kill.points import ROOT


@pytest.mark.turns(3, among="Kafka: what fails")
def test_the_how_to_for_kafka_runs_from_top_to_bottom(kafka: Broker, tmp_path: Path) -> None:
    printed = run_examples(ROOT / "docs" / "kafka.md", tmp_path, {"KAFKA_SERVERS": kafka.servers})
    assert "2 messages handed over (orders 2), in 1 transaction and" in printed
    assert 'key=7 tags=paid region=eu body={"total": 10}' in printed
    assert "orders, queue 0: 1" in printed
    assert "1 message handed over (orders 1), in 1 transaction and" in printed
