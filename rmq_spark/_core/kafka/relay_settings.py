"""The settings of a relay to Kafka, and the settings of its Kafka clients."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmq_spark._core.reads.read_options import Subscription
from rmq_spark._core.vocabulary.message import require_group_name, require_topic_name
from rmq_spark._core.vocabulary.options import byte_count, nearest, whole_number
from rmq_spark._core.vocabulary.redaction import remember
from rmq_spark.errors import OptionError

RELAY = "kafka"
POSITIONS_TOPIC = "txmq-positions"
PARKING_TOPIC = "txmq-parked"
TOPIC = "{topic}"
BATCH_MESSAGES = 10_000
BATCH_MESSAGES_MAX = 100_000
"""The default queue size of Kafka's client."""
BATCH_BYTES = 16 * 1024 * 1024
TRANSACTION_TIMEOUT_S = 60.0
RETRY_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 1.0
SHARDS_MAX = 1024
MESSAGE_BYTES_MAX = 6 * 1024 * 1024
"""The client's limit: the largest body, labels and properties. The broker has a limit of its own."""

EARLIEST, LATEST = "earliest", "latest"
REFUSE, PARK = "refuse", "park"
STOP, SKIP = "stop", "skip"

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_RESERVED: Mapping[str, str] = {
    "bootstrap.servers": "the relay has an argument of its own for the brokers",
    "transactional.id": "it follows from the log, the relay and the shard",
    "transaction.timeout.ms": "give it in seconds, as transaction_timeout",
    **dict.fromkeys(
        "enable.idempotence acks enable.auto.commit enable.auto.offset.store isolation.level enable.partition.eof "
        "group.id auto.offset.reset delivery.report.only.error on_delivery".split(),
        "without the relay's own value, messages would not be handed over exactly once",
    ),
}
"""Settings of Kafka's client that only the relay sets, with the reason or the parameter to use."""
_SECRET = re.compile(r"password|secret|token|jaas|\.pem$|\.key$|username", re.IGNORECASE)


@dataclass(frozen=True)
class RelaySettings:
    """The settings of a relay to Kafka; see :class:`~rmq_spark.KafkaRelay`. An invalid value, or two that contradict
    each other, are an OptionError."""

    bootstrap_servers: str
    relay: str
    topics: Sequence[str] | None
    topic_pattern: str | None
    topic_template: str
    shards: int
    shard: int
    reshard: bool
    start: str
    on_poison: str
    parking_topic: str
    on_expired: str
    positions_topic: str
    create_topics: bool
    replication_factor: int | None
    max_batch_messages: int
    max_batch_bytes: int | str
    transaction_timeout: float
    retry_timeout: float
    poll_interval: float
    kafka: Mapping[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.bootstrap_servers, str) or not self.bootstrap_servers.strip():
            raise OptionError("bootstrap_servers is missing: name Kafka's brokers, such as 'broker1:9092,broker2:9092'")
        require_group_name(self.relay, "relay")
        self._check_topics()
        whole_number(self.shards, "shards", 1, SHARDS_MAX)
        whole_number(self.shard, "shard", 0, self.shards - 1)
        _require_one_of(self.start, "start", (EARLIEST, LATEST))
        _require_one_of(self.on_poison, "on_poison", (REFUSE, PARK))
        _require_one_of(self.on_expired, "on_expired", (STOP, SKIP))
        if self.replication_factor is not None:
            whole_number(self.replication_factor, "replication_factor", 1, 32_767)
        whole_number(self.max_batch_messages, "max_batch_messages", 1, BATCH_MESSAGES_MAX)
        byte_count(self.max_batch_bytes, "max_batch_bytes")
        for name, value in self.kafka.items():
            if name in _RESERVED:
                raise OptionError(f"Kafka's setting {name!r} cannot be given here: {_RESERVED[name]}")
            if not isinstance(name, str) or not name:
                raise OptionError(f"Kafka's settings have names such as 'security.protocol': found {name!r}")
            if is_secret(name):
                remember({"secret": value})

    def _check_topics(self) -> None:
        if self.topics is not None and self.topic_pattern is not None:
            raise OptionError("topics and topic_pattern contradict each other: give one of them")
        if self.topics is not None:
            if isinstance(self.topics, (str, bytes)) or not self.topics:
                raise OptionError(
                    f"{self.topics!r} is no list of names: give at least one, or None for all", argument="topics"
                )
            for name in self.topics:
                require_topic_name(name, own=True)
        if self.topic_pattern is not None:
            try:
                re.compile(self.topic_pattern)
            except (re.error, TypeError) as problem:
                raise OptionError(
                    f"{self.topic_pattern!r} is no regular expression: {problem}", argument="topic_pattern"
                ) from None
        template = self.topic_template
        if not isinstance(template, str) or template.count(TOPIC) != 1:
            raise OptionError(
                f"{template!r} must have {TOPIC} in it once, as in 'shop.{TOPIC}': two topics of the log in one of "
                "Kafka would mix their queues",
                argument="topic_template",
            )
        for name in (self.positions_topic, self.parking_topic, self.kafka_topic("t")):
            require_kafka_topic(name)
        if self.positions_topic == self.parking_topic:
            raise OptionError(f"{self.positions_topic!r} is the topic of positions and of what is parked: name two")

    # ------------------------------------------------------------------ derived values
    @property
    def subscription(self) -> Subscription:
        """The topics to hand over. By default all that users made, without those of retries and dead letters."""
        if self.topics is not None:
            return Subscription(tuple(self.topics))
        return Subscription(pattern=r"[^%].*" if self.topic_pattern is None else self.topic_pattern)

    def kafka_topic(self, topic: str) -> str:
        return self.topic_template.replace(TOPIC, topic)

    def is_mine(self, topic: str, queue_id: int) -> bool:
        """Return True when this shard hands the queue over. A topic's queues are spread evenly."""
        return (zlib.crc32(topic.encode()) + queue_id) % self.shards == self.shard

    @property
    def batch_bytes(self) -> int:
        return byte_count(self.max_batch_bytes, "max_batch_bytes")

    def transactional_id(self, log_id: str, shard: int | None = None) -> str:
        """Return the id under which Kafka lets one process at a time write."""
        return f"txmq.{log_id}.{self.relay}.{self.shard if shard is None else shard}"

    # ------------------------------------------------------------------ Kafka's client
    def client(self) -> dict[str, Any]:
        return {
            "client.id": f"txmq-{self.relay}-{self.shard}",
            **self.kafka,
            "bootstrap.servers": self.bootstrap_servers,
        }

    def producer(self, log_id: str, batch_bytes: int | None, shard: int | None = None) -> dict[str, Any]:
        """Return the settings of a shard's producer. ``batch_bytes`` is the request size that Kafka's topics accept."""
        limits = {} if batch_bytes is None else {"batch.size": batch_bytes}
        return {
            "message.max.bytes": MESSAGE_BYTES_MAX,
            "linger.ms": 5,
            **limits,
            **self.client(),
            "transactional.id": self.transactional_id(log_id, shard),
            "transaction.timeout.ms": int(self.transaction_timeout * 1000),
        }

    def consumer(self, isolation: str) -> dict[str, Any]:
        """Return the settings of a consumer of positions. It joins no group, but the client requires a group's name."""
        return {
            "fetch.wait.max.ms": 50,  # only a fetch that has waited reports the end of the topic
            **self.client(),
            "group.id": f"txmq.{self.relay}",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }


def is_secret(name: str) -> bool:
    """Return True when the value of a client setting must not be shown."""
    return _SECRET.search(name) is not None


def require_kafka_topic(name: str) -> str:
    if not isinstance(name, str) or _TOPIC_NAME.fullmatch(name) is None or name in (".", ".."):
        raise OptionError(
            f"{name!r} cannot be a topic of Kafka: up to 249 of the letters a to z and A to Z, digits, '.', '_' and "
            "'-' are allowed. Leave the topic out with topics or topic_pattern"
        )
    return name


def _require_one_of(value: object, name: str, known: Sequence[str]) -> None:
    if value not in known:
        raise OptionError(f"{value!r} cannot be used: {nearest(value, known)}", argument=name)
