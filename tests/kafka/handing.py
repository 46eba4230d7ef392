"""Relays of one test, and what came of them: what the log committed beside what a consumer of Kafka sees."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import confluent_kafka as ck

from rmq_spark import CommitLog, KafkaRelay
from tests.kafka.broker import Broker

TIMEOUT_S = 8.0


class Handing:
    """Names of this test's own for what is in Kafka, and relays that use them."""

    def __init__(self, kafka: Broker) -> None:
        self.kafka = kafka
        self.relay_name = kafka.name("relay")
        self.options: dict[str, Any] = {
            "relay": self.relay_name,
            "topic_template": f"{self.relay_name}.{{topic}}",
            "positions_topic": f"{self.relay_name}-positions",
            "parking_topic": f"{self.relay_name}-parked",
            "create_topics": True,
            "transaction_timeout": TIMEOUT_S,
            "poll_interval": 0.02,
        }
        self._relays: list[KafkaRelay] = []

    def close(self) -> None:
        for relay in self._relays:
            relay.close()

    def relay(self, log: CommitLog, **options: Any) -> KafkaRelay:
        """A relay that is not started yet, with a handle of its own on the log."""
        made = KafkaRelay(log.another(), self.kafka.servers, **{**self.options, **options})
        self._relays.append(made)
        return made

    def topic(self, topic: str = "orders") -> str:
        """Kafka's topic for one of the log."""
        return f"{self.relay_name}.{topic}"

    @property
    def positions_topic(self) -> str:
        return f"{self.relay_name}-positions"

    @property
    def parking_topic(self) -> str:
        return f"{self.relay_name}-parked"

    # ------------------------------------------------------------------ what came of them
    def seen(self, topic: str = "orders") -> dict[int, list[dict[str, Any]]]:
        """What a read_committed consumer sees of a topic, by partition, in order."""
        return {p: [_seen(m) for m in messages] for p, messages in self.kafka.read(self.topic(topic)).items()}

    def ids(self, topic: str = "orders") -> dict[int, list[str]]:
        """The ids of what it sees."""
        return {p: [m["msg_id"] for m in messages] for p, messages in self.seen(topic).items()}

    def parked(self) -> list[ck.Message]:
        return self.kafka.read(self.parking_topic)[0]

    def positions(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The records of the positions topic that were committed: keys and values."""
        return [(json.loads(m.key()), json.loads(m.value())) for m in self.kafka.read(self.positions_topic)[0]]

    def require_same(self, log: CommitLog, *topics: str) -> int:
        """A consumer sees what the log committed, once, in order, and nothing else; returns how many messages."""
        total = 0
        for topic in topics or ("orders",):
            expected = committed(log, topic)
            assert self.seen(topic) == expected
            total += sum(map(len, expected.values()))
        return total


def committed(log: CommitLog, topic: str) -> dict[int, list[dict[str, Any]]]:
    """What the log has, as a consumer of Kafka must see it."""
    found: dict[int, list[dict[str, Any]]] = {q: [] for q in range(log.topics()[topic])}
    for row in log.another().read(topic).to_pylist():
        properties = row["properties"] or []
        found[row["queue_id"]].append(
            {
                "msg_id": row["msg_id"],
                "offset": row["queue_offset"],
                "key": row["sharding_key"] if row["sharding_key"] is not None else row["keys"],
                "body": row["body"],
                "tags": row["tags"],
                "keys": row["keys"],
                "properties": dict(properties),
                "transaction_id": row["transaction_id"],
                "born_ms": _ms(row["born_timestamp"]),
            }
        )
    return found


def _ms(time: datetime) -> int:
    return int(time.timestamp() * 1_000_000) // 1_000


def _seen(message: ck.Message) -> dict[str, Any]:
    headers = dict(message.headers() or [])
    ours = {name.removeprefix("txmq."): value.decode() for name, value in headers.items() if name.startswith("txmq.")}
    kind, time_ms = message.timestamp()
    assert kind == ck.TIMESTAMP_CREATE_TIME
    return {
        "msg_id": ours["msg_id"],
        "offset": int(ours["queue_offset"]),
        "key": None if message.key() is None else message.key().decode(),
        "body": message.value(),
        "tags": ours.get("tags"),
        "keys": ours.get("keys"),
        "properties": {n: v.decode() for n, v in headers.items() if not n.startswith("txmq.")},
        "transaction_id": ours["transaction_id"],
        "born_ms": time_ms,
    }
