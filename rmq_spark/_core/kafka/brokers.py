"""A relay's requests to Kafka outside its transactions: topics, and the content of the positions topic."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rmq_spark._core.kafka.kafka_client import ReportedErrors, admin, ck, error_of, problem_of, with_settings
from rmq_spark._core.kafka.positions import PARTITION, StoredPositions
from rmq_spark._core.kafka.relay_settings import RelaySettings, require_kafka_topic
from rmq_spark._core.kafka.transactions import PAUSE_S, SLACK_S
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.remedy import Remedy
from rmq_spark.errors import RelayError, RelayRefusedError

logger = logging.getLogger(__name__)

ANSWER_S, TRY_S = 30.0, 5.0
POLL_S = 0.5
RECORD_BYTES = 1_000_000
"""The default request size of Kafka's client."""
_TEMPORARY = frozenset(
    {
        ck.KafkaError._TRANSPORT,
        ck.KafkaError._ALL_BROKERS_DOWN,
        getattr(ck.KafkaError, "_DESTROY_BROKER", ck.KafkaError._TRANSPORT),  # older clients report the latter
        ck.KafkaError._TIMED_OUT,
        ck.KafkaError._UNKNOWN_PARTITION,
        ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
        ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)
"""Temporary errors: a broker is away, or does not know a new topic yet. A missing right on the group counts too,
because the client requires a group and the relay does not use it."""
POSITIONS_CONFIG: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.bytes": str(16 * 1024 * 1024),
}
"""Settings of a new positions topic. Each start reads the topic, so it is kept small."""


class Brokers:
    def __init__(self, settings: RelaySettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._reported = ReportedErrors()
        self._admin = with_settings(admin.AdminClient, settings.client(), self._reported)

    # ------------------------------------------------------------------ topics
    def require_topics(self, topics: Mapping[str, int]) -> None:
        """Require a topic of Kafka with enough partitions for each of these topics of the log, given with their numbers
        of queues.

        When Kafka accepts no topic of this name, that is an OptionError. A RelayRefusedError says that a topic is
        missing and the relay may not create topics, or that it has too few partitions.
        """
        required = {require_kafka_topic(self._settings.kafka_topic(topic)): n for topic, n in topics.items()}
        counts = self._partitions()
        missing = {name: queues for name, queues in required.items() if name not in counts}
        if missing and not self._settings.create_topics:
            create = (
                f"create it with as many partitions as the log's topic has queues ({_counts(missing)}), or let the "
                "relay do that with"
            )
            hidden = "If it is there, Kafka does not show it to this user, who needs Describe on it"
            raise RelayRefusedError(
                f"Kafka has no topic {_listed(missing)}",
                remedy=Remedy(f"{create} create_topics=True. {hidden}", f"{create} --create-topics. {hidden}"),
            )
        for name, queues in required.items():
            if counts.get(name, queues) < queues:
                raise RelayRefusedError(
                    f"topic {name!r} of Kafka has {counts[name]} partitions, and the log's topic has {queues} queues: "
                    "each queue has a partition of its own, so add partitions"
                )
        self._create(missing, {})

    def require_own_topics(self, parking: bool) -> None:
        """Require the positions topic, and the parking topic if needed. Missing ones are created. A positions topic
        that would lose records is a RelayRefusedError."""
        name = self._settings.positions_topic
        existing = self._partitions()
        if name not in existing:
            self._create({name: 1}, POSITIONS_CONFIG)
        else:
            policy = self._configs([name], _POLICY_UNSEEN).get(name, {}).get("cleanup.policy", "compact")
            if policy != "compact":
                raise RelayRefusedError(
                    f"topic {name!r} of Kafka has cleanup.policy={policy}, so positions would be deleted, and messages "
                    "handed over again: set it to compact"
                )
        if parking and self._settings.parking_topic not in existing:
            self._create({self._settings.parking_topic: 1}, {})

    def batch_bytes(self, topics: Iterable[str]) -> int | None:
        """Return the request size that all of these topics of the log accept; None where Kafka does not show it."""
        configs = self._configs([self._settings.kafka_topic(topic) for topic in topics], _SIZE_UNSEEN)
        for name, config in configs.items():
            if config.get("message.timestamp.type") == "LogAppendTime":
                logger.warning("topic %r of Kafka has times of its own (message.timestamp.type=LogAppendTime)", name)
        limits = [int(c["max.message.bytes"]) for c in configs.values() if c.get("max.message.bytes")]
        return min([RECORD_BYTES, *limits]) if limits else None

    def _partitions(self) -> dict[str, int]:
        try:
            topics = self._answer(lambda: self._admin.list_topics(timeout=TRY_S)).topics
        except ck.KafkaException as problem:
            doing = f"its topics were listed ({self._settings.bootstrap_servers})"
            raise problem_of(problem, doing, self._reported) from None
        return {name: len(topic.partitions) for name, topic in topics.items() if topic.error is None}

    def _answer(self, request: Callable[[], Any]) -> Any:
        """Repeat a request until a broker answers, refuses the connection, or ``ANSWER_S`` are over."""
        deadline = self._runtime.monotonic() + ANSWER_S
        while True:
            try:
                answer = request()
                self._reported.error = None  # another broker accepts the connection
                return answer
            except ck.KafkaException as problem:
                self._admin.poll(0)  # lets the client report the reason
                temporary = _is_temporary(error_of(problem)) and not self._reported.refuses
                if not temporary or self._runtime.monotonic() > deadline:
                    raise
            self._runtime.sleep(PAUSE_S)

    def _configs(self, names: Iterable[str], unseen: str) -> dict[str, dict[str, str]]:
        """Return the settings of the topics whose settings Kafka shows to this user."""
        configs: dict[str, dict[str, str]] = {}
        for name in names:
            try:
                entries = self._answer(functools.partial(self._described, name))
                configs[name] = {key: entry.value for key, entry in entries.items()}
            except ck.KafkaException as problem:
                if error_of(problem).code() != ck.KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    doing = f"the settings of topic {name!r} were read"
                    raise problem_of(problem, doing, self._reported) from None
                logger.warning(
                    "Kafka does not show the settings of topic %r to this user, so %s. Grant DescribeConfigs on it",
                    name, unseen,
                )  # fmt: skip
        return configs

    def _described(self, topic: str) -> Mapping[str, Any]:
        resource = admin.ConfigResource(admin.ResourceType.TOPIC, topic)
        answers: Mapping[Any, Any] = self._admin.describe_configs([resource], request_timeout=TRY_S)
        described: Mapping[str, Any] = answers[resource].result()
        return described

    def _create(self, topics: Mapping[str, int], config: Mapping[str, str]) -> None:
        factor = self._settings.replication_factor or -1  # -1: the broker's default
        new = [admin.NewTopic(name, count, factor, config=dict(config)) for name, count in topics.items()]
        if not new:
            return
        for name, answer in self._admin.create_topics(new, request_timeout=ANSWER_S).items():
            try:
                answer.result()
                logger.info("topic %r of Kafka was created", name)
            except ck.KafkaException as problem:
                if error_of(problem).code() != ck.KafkaError.TOPIC_ALREADY_EXISTS:  # another shard was faster
                    doing = f"topic {name!r} was created, which is not there, or not shown to this user"
                    raise problem_of(problem, doing) from None

    # ------------------------------------------------------------------ positions
    def stored(self, end: int | None = None, committed: bool = False) -> StoredPositions:
        """Read this relay's records from the positions topic.

        With ``end``, only committed records before this offset of the topic: it waits for open transactions before it,
        and raises RelayError when these do not end in time. Without, all present records, even those of open and
        aborted transactions; or, if ``committed``, those that are known as committed now, without waiting. Then some
        may be missing.
        """
        stored = StoredPositions(self._settings.relay)
        topic = self._settings.positions_topic
        isolation = "read_uncommitted" if end is None and not committed else "read_committed"
        consumer = with_settings(ck.Consumer, self._settings.consumer(isolation), self._reported)
        deadline = self._runtime.monotonic() + self._settings.transaction_timeout + 2 * SLACK_S
        try:
            # Always asked first, because this finds the broker. An assignment looks for it only every 0.5 s.
            partition = ck.TopicPartition(topic, PARTITION)
            last = self._answer(lambda: consumer.get_watermark_offsets(partition, timeout=TRY_S))[1]
            end = last if end is None else end
            consumer.assign([ck.TopicPartition(topic, PARTITION, ck.OFFSET_BEGINNING)])
            while not self._read(consumer, stored, end):
                if self._runtime.monotonic() > deadline:
                    raise RelayError(
                        f"the positions topic {topic!r} cannot be read up to offset {end}: a transaction of another "
                        "process is open before it"
                    )
            return stored
        except ck.KafkaException as problem:
            raise problem_of(problem, f"the positions topic {topic!r} was read", self._reported) from None
        finally:
            consumer.close()

    def _read(self, consumer: Any, stored: StoredPositions, end: int) -> bool:
        """Add the next record. Return True when all records before the end are added."""
        message = consumer.poll(POLL_S)
        if message is None:
            return False
        error = message.error()
        if error is None:
            if message.offset() < end:
                stored.add(message.key(), message.value(), message.offset())
            return bool(message.offset() >= end - 1)
        if error.code() == ck.KafkaError._PARTITION_EOF:
            return bool(message.offset() >= end)
        if _is_temporary(error):
            return False
        raise ck.KafkaException(error)


def _is_temporary(error: Any) -> bool:
    return bool(error.retriable() or error.code() in _TEMPORARY)


_POLICY_UNSEEN = "nobody sees whether positions stay there (cleanup.policy=compact)"
_SIZE_UNSEEN = "requests are not fitted to what it takes (max.message.bytes), and where that is small it is slow"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _counts(topics: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(topics.items()))
