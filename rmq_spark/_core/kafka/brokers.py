"""What a relay asks Kafka beside its transactions: topics, and what stands in the positions topic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rmq_spark._core.kafka.client import Heard, admin, ck, error_of, problem_of, with_settings
from rmq_spark._core.kafka.positions import PARTITION, Stored
from rmq_spark._core.kafka.settings import RelaySettings, require_kafka_topic
from rmq_spark._core.kafka.transactions import PAUSE_S, SLACK_S
from rmq_spark._core.runtime.machine import Machine
from rmq_spark.errors import RelayError, RelayRefusedError

logger = logging.getLogger(__name__)

ANSWER_S, TRY_S = 30.0, 5.0
POLL_S = 0.5
RECORD_BYTES = 1_000_000
"""What Kafka's client puts into one request by default."""
_PASSING = frozenset(
    {
        ck.KafkaError._TRANSPORT,
        ck.KafkaError._ALL_BROKERS_DOWN,
        getattr(ck.KafkaError, "_DESTROY_BROKER", ck.KafkaError._TRANSPORT),  # older clients say the latter
        ck.KafkaError._TIMED_OUT,
        ck.KafkaError._UNKNOWN_PARTITION,
        ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
        ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)
"""Errors that pass: a broker is away, or has not heard of a new topic yet. So does a missing right on the group. The
client must be given one, and the relay does not use it."""
POSITIONS_CONFIG: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.bytes": str(16 * 1024 * 1024),
}
"""Of a positions topic that the relay makes: it is read at each start, so it is kept small."""


class Brokers:
    """Topics of Kafka, for one relay.

    Parameters
    ----------
    settings : RelaySettings
    """

    def __init__(self, settings: RelaySettings, machine: Machine) -> None:
        self._settings = settings
        self._machine = machine
        self._heard = Heard()
        self._admin = with_settings(admin.AdminClient, settings.client(), self._heard)
        self._enough: set[str] = set()

    # ------------------------------------------------------------------ topics
    def require_topics(self, topics: Mapping[str, int]) -> None:
        """Require a topic of Kafka with enough partitions for each of these topics of the log.

        Parameters
        ----------
        topics : mapping of str to int
            Topics of the log, and their number of queues.

        Raises
        ------
        OptionError
            When Kafka takes no topic of this name.
        RelayRefusedError
            When a topic is missing, and the relay is not to create topics; or has too few partitions.
        """
        new = {require_kafka_topic(self._settings.kafka_topic(t)): n for t, n in topics.items()}
        new = {name: queues for name, queues in new.items() if name not in self._enough}
        if not new:
            return
        there = self._partitions()
        missing = {name: queues for name, queues in new.items() if name not in there}
        if missing and not self._settings.create_topics:
            raise RelayRefusedError(
                f"Kafka has no topic {_listed(missing)}: create it with as many partitions as the log's topic has "
                f"queues ({_counts(missing)}), or let the relay do that with create_topics=True. If it is there, "
                "Kafka does not show it to this user, who needs Describe on it"
            )
        for name, queues in new.items():
            if there.get(name, queues) < queues:
                raise RelayRefusedError(
                    f"topic {name!r} of Kafka has {there[name]} partitions, and the log's topic has {queues} queues: "
                    "each queue has a partition of its own, so add partitions"
                )
        self._create(missing, {})
        self._enough.update(new)

    def require_own_topics(self, parking: bool) -> None:
        """Require the positions topic, and the parking topic where it is needed; make them when they are missing.

        Raises
        ------
        RelayRefusedError
            When records of the positions topic would not stay.
        """
        name = self._settings.positions_topic
        there = self._partitions()
        if name not in there:
            self._create({name: 1}, POSITIONS_CONFIG)
        else:
            policy = self._configs([name], _POLICY_UNSEEN).get(name, {}).get("cleanup.policy", "compact")
            if policy != "compact":
                raise RelayRefusedError(
                    f"topic {name!r} of Kafka has cleanup.policy={policy}, so positions would be deleted, and messages "
                    "handed over again: set it to compact"
                )
        if parking and self._settings.parking_topic not in there:
            self._create({self._settings.parking_topic: 1}, {})

    def batch_bytes(self, topics: Iterable[str]) -> int | None:
        """How much all of these topics of the log take in one request; None where Kafka does not tell."""
        if "batch.size" in self._settings.kafka:
            return None
        configs = self._configs([self._settings.kafka_topic(t) for t in topics], _SIZE_UNSEEN)
        for name, config in configs.items():
            if config.get("message.timestamp.type") == "LogAppendTime":
                logger.warning("topic %r of Kafka has times of its own (message.timestamp.type=LogAppendTime)", name)
        limits = [int(c["max.message.bytes"]) for c in configs.values() if c.get("max.message.bytes")]
        return min([RECORD_BYTES, *limits]) if limits else None

    def _partitions(self) -> dict[str, int]:
        try:
            found = self._answer(lambda: self._admin.list_topics(timeout=TRY_S)).topics
        except ck.KafkaException as problem:
            doing = f"its topics were listed ({self._settings.bootstrap_servers})"
            raise problem_of(problem, doing, self._heard) from None
        return {name: len(topic.partitions) for name, topic in found.items() if topic.error is None}

    def _answer(self, ask: Callable[[], Any]) -> Any:
        """Ask until a broker answers, for some time, unless one refuses the connection."""
        deadline = self._machine.monotonic() + ANSWER_S
        while True:
            try:
                found = ask()
                self._heard.error = None  # another broker takes us
                return found
            except ck.KafkaException as problem:
                self._admin.poll(0)  # then the client says why
                passes = _passes(error_of(problem)) and not self._heard.refuses
                if not passes or self._machine.monotonic() > deadline:
                    raise
            self._machine.sleep(PAUSE_S)

    def _configs(self, names: list[str], unseen: str) -> dict[str, dict[str, str]]:
        """The settings of topics; without those that Kafka does not show to this user."""
        found: dict[str, dict[str, str]] = {}
        if not names:
            return found
        resources = [admin.ConfigResource(admin.ResourceType.TOPIC, name) for name in names]
        for resource, answer in self._admin.describe_configs(resources, request_timeout=ANSWER_S).items():
            try:
                found[resource.name] = {key: entry.value for key, entry in answer.result(ANSWER_S).items()}
            except ck.KafkaException as problem:
                if error_of(problem).code() != ck.KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise problem_of(problem, f"the settings of topic {resource.name!r} were read") from None
                logger.warning(
                    "Kafka does not show the settings of topic %r to this user, so %s. Grant DescribeConfigs on it",
                    resource.name, unseen,
                )  # fmt: skip
        return found

    def _create(self, topics: Mapping[str, int], config: Mapping[str, str]) -> None:
        factor = self._settings.replication_factor or -1  # -1: the broker's own
        new = [admin.NewTopic(name, count, factor, config=dict(config)) for name, count in topics.items()]
        if not new:
            return
        for name, answer in self._admin.create_topics(new, request_timeout=ANSWER_S).items():
            try:
                answer.result(ANSWER_S)
                logger.info("topic %r of Kafka was created", name)
            except ck.KafkaException as problem:
                if error_of(problem).code() != ck.KafkaError.TOPIC_ALREADY_EXISTS:  # another shard was faster
                    doing = f"topic {name!r} was created, which is not there, or not shown to this user"
                    raise problem_of(problem, doing) from None

    # ------------------------------------------------------------------ positions
    def stored(self, end: int | None = None, committed: bool = False) -> Stored:
        """What the positions topic says of this relay.

        Parameters
        ----------
        end : int, optional
            Only what was committed before this offset of the topic: transactions that stand before it are waited for.
            When not given, all that stands there now, also what is not committed yet or was aborted.
        committed : bool
            Without an end: what is known to be committed now, and waits for nothing. Some of it may be missing.

        Raises
        ------
        RelayError
            When transactions before the end do not end in time.
        """
        stored = Stored(self._settings.relay)
        topic = self._settings.positions_topic
        isolation = "read_uncommitted" if end is None and not committed else "read_committed"
        consumer = with_settings(ck.Consumer, self._settings.consumer(isolation), self._heard)
        deadline = self._machine.monotonic() + self._settings.transaction_timeout + 2 * SLACK_S
        try:
            # Asked first also where it is not needed: it finds the broker, which an assignment looks for each 0.5 s.
            partition = ck.TopicPartition(topic, PARTITION)
            last = self._answer(lambda: consumer.get_watermark_offsets(partition, timeout=TRY_S))[1]
            end = last if end is None else end
            consumer.assign([ck.TopicPartition(topic, PARTITION, ck.OFFSET_BEGINNING)])
            while not self._read(consumer, stored, end):
                if self._machine.monotonic() > deadline:
                    raise RelayError(
                        f"the positions topic {topic!r} cannot be read up to offset {end}: a transaction of another "
                        "process is open before it"
                    )
            return stored
        except ck.KafkaException as problem:
            raise problem_of(problem, f"the positions topic {topic!r} was read", self._heard) from None
        finally:
            consumer.close()

    def _read(self, consumer: Any, stored: Stored, end: int) -> bool:
        """Take in the next record; True when all before the end are."""
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
        if _passes(error):
            return False
        raise ck.KafkaException(error)


def _passes(error: Any) -> bool:
    """Whether to ask again, or go on reading."""
    return bool(error.retriable() or error.code() in _PASSING)


_POLICY_UNSEEN = "nobody sees whether positions stay there (cleanup.policy=compact)"
_SIZE_UNSEEN = "requests are not fitted to what it takes (max.message.bytes), and where that is small it is slow"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _counts(topics: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(topics.items()))
