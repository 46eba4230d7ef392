"""The start of a relay to Kafka: it becomes the only process of its shard, and reads its queues' positions.

:mod:`rmq_spark._core.kafka` explains the steps and their order.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from rmq_spark._core.kafka.brokers import Brokers
from rmq_spark._core.kafka.kafka_client import ck
from rmq_spark._core.kafka.positions import Position, PositionRecords, StoredPositions
from rmq_spark._core.kafka.relay_settings import LATEST, PARK, RelaySettings
from rmq_spark._core.kafka.source import RelaySource
from rmq_spark._core.kafka.transactions import FAILURES, AbortedError, Transactions
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.remedy import Remedy
from rmq_spark.errors import RelayError, RelayRefusedError

logger = logging.getLogger(__name__)


class Start:
    """A start of one shard. ``run`` is the unique id of this run."""

    def __init__(
        self, engine: Engine, settings: RelaySettings, source: RelaySource, brokers: Brokers, run: str
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._source = source
        self._brokers = brokers
        self._run = run
        self._records = PositionRecords(settings.positions_topic, settings.relay, engine.id)

    def run(self) -> tuple[Transactions, dict[Queue, Position]]:
        """Return the shard's producer, and the positions of its queues. When another process starts the same shard,
        that is a FencedByKafkaError."""
        settings = self._settings
        topics = self._source.topics()
        self._brokers.require_own_topics(parking=settings.on_poison == PARK)
        self._brokers.require_topics(topics)
        self._require_fit(self._brokers.stored(committed=True))  # a process that cannot run must fence nobody
        transactions = self._opened(settings.shard, self._brokers.batch_bytes(topics))
        try:
            stored = self._claim(transactions, topics) or self._claim(transactions, topics)
            assert stored is not None, "the number of shards was changed, and is another one again"
            self._require_fit(stored)
        except BaseException:
            transactions.close()
            raise
        known = stored.of_log(self._engine.id)
        own_queues = [
            (topic, queue_id)
            for topic, count in topics.items()
            for queue_id in range(count)
            if settings.is_mine(topic, queue_id)
        ]
        logger.info(
            "relay %r, shard %d of %d: %d queues", settings.relay, settings.shard, settings.shards, len(own_queues)
        )
        return transactions, {queue: known.get(queue, Position(0)) for queue in own_queues}

    def _opened(self, shard: int, batch_bytes: int | None) -> Transactions:
        settings = self._settings.producer(self._engine.id, batch_bytes, shard)
        transactions = Transactions(settings, self._settings.transaction_timeout, self._engine.runtime)
        transactions.open()
        return transactions

    # ------------------------------------------------------------------ the claim
    def _claim(self, transactions: Transactions, topics: Mapping[str, int]) -> StoredPositions | None:
        """Claim the shard, and return all positions that were committed before the claim.

        Returns None when this changed the number of shards: then the shard must be claimed again. A relay that belongs
        to another log, or whose processes have different settings, is a RelayRefusedError.
        """
        settings = self._settings
        who = {"host": socket.gethostname(), "pid": os.getpid(), "at": self._engine.runtime.now().isoformat()}
        try:
            transactions.begin()
            transactions.send([self._records.claim(settings.shard, self._run, who)])
            transactions.deliver()
            stored = self._brokers.stored(end=transactions.first_offset)
            agrees = self._agrees(stored)
            if agrees and self._engine.id not in stored.agreed:
                stored.positions = {
                    (self._engine.id, queue): position for queue, position in self._beginnings(topics).items()
                }
                transactions.send(
                    [
                        self._records.position(queue, position)
                        for queue, position in stored.of_log(self._engine.id).items()
                    ]
                )
            if not agrees:
                self._fence_others(max(stored.agreed[self._engine.id].shards, settings.shards))
            if not agrees or self._engine.id not in stored.agreed:
                transactions.send([self._records.agreed(settings.shards, settings.topic_template)])
            transactions.deliver()
            transactions.commit()
            return stored if agrees else None
        except FAILURES as problem:
            ended = transactions.ended(problem)
            if isinstance(ended, AbortedError):
                raise (RelayRefusedError if ended.stays or ended.suspects else RelayError)(
                    f"the relay's claim in {settings.positions_topic!r} was aborted: {ended.reason}"
                ) from None
            raise ended from None
        except Exception:
            with suppress(ck.KafkaException):  # the next start ends an open transaction
                transactions.abort()
            raise

    def _agrees(self, stored: StoredPositions) -> bool:
        """Return True when the number of shards is the agreed one, or at the relay's first start."""
        settings, log_id = self._settings, self._engine.id
        if stored.agreed and log_id not in stored.agreed:
            raise RelayRefusedError(
                f"relay {settings.relay!r} has handed over commit log {next(iter(stored.agreed))}, and "
                f"{redacted(self._engine.path)!r} is commit log {log_id}: it was made anew, or is another one. To hand "
                "this one over, too, give it a relay of another name"
            )
        agreed = stored.agreed.get(log_id)
        if agreed is None:
            return True
        if agreed.topic_template != settings.topic_template:
            raise RelayRefusedError(
                f"relay {settings.relay!r} writes to topics {agreed.topic_template!r}, and this process was told "
                f"{settings.topic_template!r}: give it a relay of another name, which starts anew"
            )
        if agreed.shards != settings.shards and not settings.reshard:
            raise RelayRefusedError(
                f"relay {settings.relay!r} has {agreed.shards} shards, and this process was told {settings.shards}",
                remedy=Remedy(
                    "to change the number, start one process with reshard=True, and then the others",
                    "to change the number, start one process with --reshard, and then the others",
                ),
            )
        return agreed.shards == settings.shards

    def _fence_others(self, shards: int) -> None:
        """Fence the other shards.

        The uncommitted claim is in the positions topic already. So a process that starts now waits for it, and then
        sees the new number of shards.
        """
        for shard in range(shards):
            if shard != self._settings.shard:
                self._opened(shard, None).close()

    def _beginnings(self, topics: Mapping[str, int]) -> dict[Queue, Position]:
        """Return the start of the queues of all shards, for the relay's first start."""
        ends, firsts = self._source.placements.latest(), self._engine.firsts(refresh=False)
        queues = [(topic, queue_id) for topic, count in sorted(topics.items()) for queue_id in range(count)]
        if self._settings.start != LATEST:
            return {queue: Position(firsts.get(queue, 0)) for queue in queues}
        last = {queue: ends[queue] - 1 for queue in queues if ends.get(queue, 0) > firsts.get(queue, 0)}
        lasts = self._source.lasts(last)
        return {queue: Position(ends.get(queue, 0), lasts.get(queue)) for queue in queues}

    # ------------------------------------------------------------------ the same log
    def _require_fit(self, stored: StoredPositions) -> None:
        """Require that the log holds the last messages that this shard handed over."""
        self._agrees(stored)
        own_positions = {
            queue: p
            for queue, p in stored.of_log(self._engine.id).items()
            if self._settings.is_mine(*queue) and self._source.subscription.matches(queue[0])
        }
        ends, firsts = self._source.placements.latest(), self._engine.firsts(refresh=False)
        require_not_behind(ends, own_positions)
        unexpired = {queue: p for queue, p in own_positions.items() if p.next_offset > firsts.get(queue, 0)}
        lasts = self._source.lasts({q: p.next_offset - 1 for q, p in unexpired.items() if p.last is not None})
        for queue, p in unexpired.items():
            if p.last is None:
                seen = f"all messages below offset {p.next_offset} had expired, and now the log has them"
            elif p.last != lasts.get(queue):
                seen = (
                    f"message {p.last}, was handed over from offset {p.next_offset - 1}, and now the log has "
                    f"{lasts.get(queue)} there"
                )
            else:
                continue
            raise RelayRefusedError(
                f"topic {queue[0]!r}, queue {queue[1]}: {seen}. It was set back to an older copy, and written to "
                "since. Restore the newest one; or hand this log over with a relay of another name"
            )


def require_not_behind(ends: Mapping[Queue, int], positions: Mapping[Queue, Position]) -> None:
    """Require that the log's queues reach at least these positions."""
    for (topic, queue_id), position in positions.items():
        end = ends.get((topic, queue_id), 0)
        if end < position.next_offset:
            raise RelayRefusedError(
                f"topic {topic!r}, queue {queue_id}: messages up to offset {position.next_offset - 1} were handed "
                f"over, and the log ends at {end}. It was set back to an older copy. Restore the newest one"
            )
