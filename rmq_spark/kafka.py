"""The relay to Kafka, which hands over committed messages exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.kafka.relay import KafkaRelay as KafkaRelay
    from rmq_spark._core.kafka.relay_report import RelayReport as RelayReport

__getattr__, __dir__, __all__ = public(__name__)
