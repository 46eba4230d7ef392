"""The relay to Kafka: hands committed messages over, exactly once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.kafka.brokers import Brokers
from rmq_spark._core.kafka.kafka_client import ck
from rmq_spark._core.kafka.positions import LastMessage, Position, PositionRecords
from rmq_spark._core.kafka.records import OutgoingMessage, Record, parked_record
from rmq_spark._core.kafka.relay_report import RelayReport
from rmq_spark._core.kafka.relay_settings import (
    BATCH_BYTES,
    BATCH_MESSAGES,
    EARLIEST,
    PARK,
    PARKING_TOPIC,
    POLL_INTERVAL_S,
    POSITIONS_TOPIC,
    REFUSE,
    RELAY,
    RETRY_TIMEOUT_S,
    SKIP,
    STOP,
    TOPIC,
    TRANSACTION_TIMEOUT_S,
    RelaySettings,
)
from rmq_spark._core.kafka.source import Gap, RelaySource
from rmq_spark._core.kafka.start import Start, require_not_behind
from rmq_spark._core.kafka.transactions import AbortedError, FencedByKafkaError, Transactions
from rmq_spark._core.reads.plan import admit
from rmq_spark._core.vocabulary.options import Duration, named, seconds
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.remedy import Remedy
from rmq_spark.errors import (
    LostFileError,
    OptionError,
    PoisonMessageError,
    RelayError,
    RelayFencedError,
    RelayRefusedError,
)

logger = logging.getLogger(__name__)

PLAN_MESSAGES = 65_536
"""Messages that are planned together: the size of a row group, which is decoded as a whole."""
BACKOFF_S, BACKOFF_S_MAX = 0.1, 5.0
LOOKS, LOOK_AGAIN_S = 3, 1.0
"""Number of looks of a fenced relay for the other process's claim, which may still be on its way, and the seconds
between them."""


class _StoppedError(Exception):
    """The relay was stopped while Kafka aborted its transactions."""


class KafkaRelay:
    """Hands the committed messages of a commit log over to Kafka: each of them once, in the order of its queue.

    A consumer of Kafka must read with ``isolation.level=read_committed``. Queue n of a topic is partition n of Kafka's
    topic. ``_core/kafka/records.py`` lists a record's fields. ``_core/kafka/__init__.py`` explains exactly-once.

    Parameters
    ----------
    log : CommitLog or path
        The commit log to read, or its path.
    bootstrap_servers : str
        Kafka's brokers, ``"broker1:9092,broker2:9092"``.
    relay : str
        The relay's name. Its positions are kept under this name and the log's id, so it always belongs to one log.
    topics : sequence of str, optional
        Topics of the log. Without this and ``topic_pattern``: all that users made, including later ones.
    topic_pattern : str, optional
        A regular expression for whole names.
    topic_template : str
        The name of Kafka's topic: ``"shop.{topic}"``.
    shards, shard : int
        Several processes share the queues: each is one shard, from 0 to ``shards`` - 1. All pass the same ``shards``.
    reshard : bool
        Change the number of shards. This fences all old shards.
    start : {"earliest", "latest"}
        Where the relay begins when it is started for the first time. Topics that are made or chosen later begin at
        their first message.
    on_poison : {"refuse", "park"}
        ``refuse``: a message that Kafka refuses ends the relay, after all messages before it. ``park``: it goes to
        ``parking_topic`` in the same transaction, without its body when that is too large.
    parking_topic : str
    on_expired : {"stop", "skip"}
        ``stop``: messages that expired before they were handed over end the relay. ``skip``: they are skipped, and
        recorded in the positions topic.
    positions_topic : str
        Created, compacted, when it is missing.
    create_topics : bool
        Create missing topics in Kafka, with as many partitions as the log's topic has queues.
    replication_factor : int, optional
        For topics that the relay creates. By default the broker's.
    max_batch_messages, max_batch_bytes : int
        Limits of one Kafka transaction; bytes also as ``"16m"``.
    transaction_timeout : float or str
        Seconds after which Kafka aborts the transaction of a dead process (``transaction.timeout.ms``).
    retry_timeout : float or str
        Seconds for which aborted transactions are retried.
    poll_interval : float or str
        Seconds between two looks at the log when nothing is new.
    kafka : mapping, optional
        More settings of Kafka's client, by its own names: ``{"security.protocol": "SASL_SSL", …}``.
    storage_options : mapping, optional
        For the log.

    Raises
    ------
    OptionError
        When a value is invalid, or confluent-kafka is not installed.

    Examples
    --------
    >>> with KafkaRelay("shop/log", "localhost:9092", topics=["orders"]) as relay:    # doctest: +SKIP
    ...     print(relay.run_once())
    """

    @named
    def __init__(
        self,
        log: CommitLog | str | os.PathLike[str],
        bootstrap_servers: str,
        *,
        relay: str = RELAY,
        topics: Sequence[str] | None = None,
        topic_pattern: str | None = None,
        topic_template: str = TOPIC,
        shards: int = 1,
        shard: int = 0,
        reshard: bool = False,
        start: str = EARLIEST,
        on_poison: str = REFUSE,
        parking_topic: str = PARKING_TOPIC,
        on_expired: str = STOP,
        positions_topic: str = POSITIONS_TOPIC,
        create_topics: bool = False,
        replication_factor: int | None = None,
        max_batch_messages: int = BATCH_MESSAGES,
        max_batch_bytes: int | str = BATCH_BYTES,
        transaction_timeout: Duration = TRANSACTION_TIMEOUT_S,
        retry_timeout: Duration = RETRY_TIMEOUT_S,
        poll_interval: Duration = POLL_INTERVAL_S,
        kafka: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = RelaySettings(
            bootstrap_servers,
            relay=relay,
            topics=topics,
            topic_pattern=topic_pattern,
            topic_template=topic_template,
            shards=shards,
            shard=shard,
            reshard=reshard,
            start=start,
            on_poison=on_poison,
            parking_topic=parking_topic,
            on_expired=on_expired,
            positions_topic=positions_topic,
            create_topics=create_topics,
            replication_factor=replication_factor,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            transaction_timeout=seconds(transaction_timeout, "transaction_timeout", 1.0, maximum=86_400.0),
            retry_timeout=seconds(retry_timeout, "retry_timeout"),
            poll_interval=seconds(poll_interval, "poll_interval", above=True),
            kafka=_mapping(kafka),
        )
        self.engine = engine_of(log, storage_options)
        self._runtime = self.engine.runtime
        self._run = self._runtime.unique_id()
        self._source = RelaySource(self.engine, self.settings)
        self._brokers = Brokers(self.settings, self._runtime)
        self._records = PositionRecords(self.settings.positions_topic, self.settings.relay, self.engine.id)
        self._transactions: Transactions | None = None
        self._positions: dict[Queue, Position] = {}
        self._topics: set[str] = set()
        self._limit = self.settings.max_batch_messages
        self._stop = threading.Event()
        self.report = RelayReport()

    def __repr__(self) -> str:
        return f"KafkaRelay({self.engine!r}, {self.settings.relay!r}, shard {self.settings.shard})"

    def __enter__(self) -> KafkaRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect from Kafka. The next start ends an open transaction."""
        if self._transactions is not None:
            self._transactions.close()
        self._transactions = None

    @property
    def positions(self) -> dict[Queue, int]:
        """The next offset of each queue of this shard, by (topic, queue_id), since the relay was started."""
        return {queue: position.next_offset for queue, position in self._positions.items()}

    # ------------------------------------------------------------------ running
    def run_once(self, stop_event: threading.Event | None = None) -> RelayReport:
        """Hand over all messages that are committed now.

        Parameters
        ----------
        stop_event : threading.Event, optional
            Ends the call after the current transaction.

        Raises
        ------
        RelayFencedError
            Another process runs this relay and shard: do not start this one again.
        RelayRefusedError, PoisonMessageError
            A person must decide.
        RelayError
            Something failed. Starting the relay again is safe.
        """
        self._stop = stop_event or threading.Event()
        return self._sweep()

    def run(self, stop_event: threading.Event, on_report: Callable[[RelayReport], None] | None = None) -> None:
        """Hand over committed messages until the event is set, and then finish the current transaction.

        Parameters
        ----------
        stop_event : threading.Event
        on_report : callable, optional
            Gets each report that is not empty.

        Raises
        ------
        RelayError
            And its subclasses, as :meth:`run_once`.
        """
        self._stop = stop_event
        while not stop_event.is_set():
            report = self._sweep()
            if report and on_report is not None:
                on_report(report)
            if not report:
                if self._transactions is not None:
                    self._transactions.listen()
                stop_event.wait(self.settings.poll_interval)

    def _sweep(self) -> RelayReport:
        began = self._runtime.monotonic()
        self.report = RelayReport()
        try:
            if self._transactions is None:
                start = Start(self.engine, self.settings, self._source, self._brokers, self._run)
                self._transactions, self._positions = start.run()
                self._topics = {topic for topic, _ in self._positions}
            goal = self._goal()
            with suppress(_StoppedError):
                while self._pass(goal) and not self._stop.is_set():
                    pass
        except FencedByKafkaError as problem:
            self.close()
            raise self._why_fenced(problem) from None
        except Exception:
            self.close()
            raise
        self.report.seconds = self._runtime.monotonic() - began
        return self.report

    # ------------------------------------------------------------------ handing over
    def _goal(self) -> dict[Queue, int]:
        """Return the present ends of this shard's queues. New topics begin at their first message."""
        ends = self._source.placements.latest()
        new = {topic for topic, _ in ends} - self._topics
        if new:
            topics = self._source.topics()
            self._brokers.require_topics(topics)
            self._topics |= topics.keys()
            for topic in sorted(new & topics.keys()):
                own_queues = [
                    (topic, queue_id) for queue_id in range(topics[topic]) if self.settings.is_mine(topic, queue_id)
                ]
                self._positions |= {queue: Position(0) for queue in own_queues}
        require_not_behind(ends, self._positions)
        return {queue: ends.get(queue, 0) for queue in self._positions}

    def _pass(self, goal: dict[Queue, int]) -> bool:
        """Hand over some messages of each queue. Return False when the goal is reached."""
        start = self.positions
        if all(offset >= goal[queue] for queue, offset in start.items()):
            return False
        end = admit(start, goal, PLAN_MESSAGES)
        ranges, missing = self._source.placements.between(start, end)
        if missing:
            self._skip(missing)
            return True
        try:
            for batch in self._source.batches(ranges):
                self._hand_over(batch)
                if self._stop.is_set():
                    break
        except LostFileError:
            self._source.placements.latest()
            if not any(first > self._positions[q].next_offset for q, first in self._firsts().items()):
                raise  # the file is lost, and has not expired meanwhile
        self._source.placements.forget(self.positions)
        return True

    def _firsts(self) -> dict[Queue, int]:
        return {queue: first for queue, first in self.engine.firsts(refresh=False).items() if queue in self._positions}

    def _skip(self, missing: Sequence[Gap]) -> None:
        """Move past expired messages, and record their offsets."""
        firsts, at = self._firsts(), self._runtime.now().isoformat()
        records: list[Record] = []
        moved: dict[Queue, Position] = {}
        skipped = 0
        for queue, first, stop in missing:
            where = f"topic {queue[0]!r}, queue {queue[1]}: offsets {first} to {stop - 1}"
            if stop > firsts.get(queue, 0):
                raise RelayRefusedError(f"{where} are not in the commit log: restore it from a copy")
            if self.settings.on_expired != SKIP:
                skip = "goes on behind them, and keeps in the positions topic which they were"
                raise RelayRefusedError(
                    f"{where} have expired before they were handed over",
                    remedy=Remedy(f"on_expired='skip' {skip}", f"--on-expired skip {skip}"),
                )
            stop = firsts[queue]
            moved[queue] = Position(stop)
            records += [self._records.gap(queue, first, stop, at), self._records.position(queue, moved[queue])]
            skipped += stop - first
            logger.warning("%s have expired before they were handed over: skipped", where)
        self._commit_with_retries(records)
        self._positions |= moved
        self.report.skipped += skipped

    def _hand_over(self, batch: list[OutgoingMessage]) -> None:
        """Hand over a batch in one transaction, or in several while Kafka refuses one of its messages."""
        while batch:
            part = batch[: self._limit]
            moved = _positions_after(part)
            try:
                self._commit_with_retries(
                    [message.record for message in part],
                    [self._records.position(queue, position) for queue, position in moved.items()],
                )
            except AbortedError as refused:
                if refused.first >= len(part):
                    raise RelayRefusedError(
                        f"Kafka refuses a position in {self.settings.positions_topic!r}: {refused.reason}"
                    ) from None
                if len(part) > 1:
                    # Messages before the first suspect are good. Of the rest, half are tried.
                    self._limit = refused.first or max(1, min(refused.suspects, len(part)) // 2)
                    continue
                self._park_or_raise(part[0], refused)
            else:
                self.report.messages += len(part)
                self.report.bytes += sum(len(message.record.value or b"") for message in part)
                for message in part:
                    self.report.by_topic[message.topic] = self.report.by_topic.get(message.topic, 0) + 1
            self._positions |= moved
            self._limit = min(self.settings.max_batch_messages, 2 * self._limit)
            batch = batch[len(part) :]
            if self._stop.is_set():
                return

    def _park_or_raise(self, message: OutgoingMessage, refused: AbortedError) -> None:
        """Park the one message that Kafka refuses, or raise PoisonMessageError."""
        description = f"Kafka refuses {message.where} with {len(message.record.value or b'')} bytes: {refused.reason}"
        if self.settings.on_poison != PARK:
            let_it = (
                f"let Kafka's topic {message.record.topic!r} take it (max.message.bytes, "
                "message.timestamp.before.max.ms, message.timestamp.after.max.ms), or go on with"
            )
            raise PoisonMessageError(
                description, remedy=Remedy(f"{let_it} on_poison='park'", f"{let_it} --on-poison park")
            )
        record = parked_record(
            message,
            self.settings.parking_topic,
            refused.reason,
            with_body=refused.code != ck.KafkaError.MSG_SIZE_TOO_LARGE,
        )
        moved = _positions_after([message])
        try:
            self._commit_with_retries([record], [self._records.position(queue, p) for queue, p in moved.items()])
        except AbortedError as second:
            raise PoisonMessageError(
                f"{description}; and it cannot be parked in {self.settings.parking_topic!r}: {second.reason}"
            ) from None
        logger.warning("%s: parked in %r", description, self.settings.parking_topic)
        self.report.parked += 1

    def _commit_with_retries(self, *shares: Sequence[Record]) -> None:
        """Send records in one transaction, and repeat it while Kafka aborts it without refusing a message. When Kafka
        refuses one, that is an AbortedError, and nothing was handed over."""
        assert self._transactions is not None
        deadline = self._runtime.monotonic() + self.settings.retry_timeout
        pause_s = BACKOFF_S
        while True:
            try:
                self._transactions.transact(*shares)
                self.report.transactions += 1
                return
            except AbortedError as aborted:
                self.report.aborted += 1
                if aborted.suspects:
                    raise
                if self._runtime.monotonic() > deadline:
                    raise (RelayRefusedError if aborted.stays else RelayError)(
                        f"Kafka has aborted each transaction for {self.settings.retry_timeout:g} s: {aborted.reason}"
                    ) from None
                logger.warning("a transaction was aborted, and is done again: %s", aborted.reason)
            if self._stop.wait(pause_s):
                raise _StoppedError
            pause_s = min(BACKOFF_S_MAX, 2 * pause_s)

    # ------------------------------------------------------------------ the end
    def _why_fenced(self, problem: FencedByKafkaError) -> RelayError:
        """Return RelayFencedError when another process took over, or RelayError when a transaction timed out.

        Kafka reports both alike, but the relay may start again only after a timeout.
        """
        settings = self.settings
        for look in range(LOOKS):
            if look:
                self._runtime.sleep(LOOK_AGAIN_S)
            run, _ = self._brokers.stored().runs.get((self.engine.id, settings.shard), (self._run, -1))
            if run != self._run:
                return RelayFencedError(
                    f"another process runs relay {settings.relay!r}, shard {settings.shard}, now (run {run}): this one "
                    "ends. Do not start it again"
                )
        return RelayError(
            f"Kafka has ended the transaction of relay {settings.relay!r}, which took more than the "
            f"transaction timeout, {settings.transaction_timeout:g} s ({problem}): start it again"
        )


def _mapping(kafka: object) -> dict[str, Any]:
    if kafka is not None and not isinstance(kafka, Mapping):
        raise OptionError(
            f"kafka= is {type(kafka).__name__}: a mapping of settings is expected, such as "
            "{'security.protocol': 'SASL_SSL'}"
        )
    return dict(kafka or {})


def _positions_after(batch: Sequence[OutgoingMessage]) -> dict[Queue, Position]:
    """Return the queues' positions after these messages, which are in the order of each queue."""
    return {(m.topic, m.queue_id): Position(m.queue_offset + 1, LastMessage(m.msg_id, m.committed_us)) for m in batch}
