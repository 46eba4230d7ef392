"""What a relay reads: committed messages of its queues, a batch at a time, in the order of each queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rmq_spark._core.kafka.positions import Last, Queue
from rmq_spark._core.kafka.records import COLUMNS, Handed, microseconds, pieces, to_records
from rmq_spark._core.log.input import require_known_topic
from rmq_spark._core.log.placements import MessageRange, Placements
from rmq_spark._core.messages.reading import read_ranges

if TYPE_CHECKING:
    from rmq_spark._core.kafka.settings import RelaySettings
    from rmq_spark._core.protocol.engine import Engine

    pass

Gap = tuple[Queue, int, int]
"""Offsets of a queue, from the first (included) to the second (excluded), that the log does not hold."""


class RelaySource:
    """The topics of a commit log that a relay hands over.

    Parameters
    ----------
    log : Engine
    settings : RelaySettings
    """

    def __init__(self, log: Engine, settings: RelaySettings) -> None:
        self._log = log
        self._settings = settings
        self._subscription = settings.subscription
        self._placements = Placements(log, self._subscription.matches)

    def topics(self) -> dict[str, int]:
        """The topics that are handed over, by all shards, and their number of queues.

        Raises
        ------
        TopicNotFoundError
            When a topic is named that is not in the log.
        """
        topics = self._log.topics()
        for name in self._subscription.topics:
            require_known_topic(name, topics)
        return {name: count for name, count in topics.items() if self._subscription.matches(name)}

    def wants(self, topic: str) -> bool:
        """Whether a topic is one that is handed over."""
        return self._subscription.matches(topic)

    def ends(self, refresh: bool = True) -> dict[Queue, int]:
        """The next offset of each queue of this relay that has messages."""
        return self._placements.latest(refresh)

    def firsts(self) -> Mapping[Queue, int]:
        """The first offset that is kept, of queues of which messages have expired."""
        return self._log.firsts(refresh=False)

    def ranges(self, start: Mapping[Queue, int], end: Mapping[Queue, int]) -> tuple[list[MessageRange], list[Gap]]:
        """Where the messages between these offsets lie, by queue and offset; and what the log does not hold."""
        return self._placements.between(start, end)

    def forget(self, start: Mapping[Queue, int]) -> None:
        """Drop what was handed over, so that memory does not grow with it."""
        self._placements.forget(start)

    def batches(self, ranges: list[MessageRange]) -> Iterator[list[Handed]]:
        """Messages in batches of at most ``max_batch_messages`` and ``max_batch_bytes``; a larger message is alone."""
        rows_max, bytes_max = self._settings.max_batch_messages, self._settings.batch_bytes
        batch: list[Handed] = []
        size = 0
        for messages in read_ranges(ranges, self._log.read_range, self._log.find_again, COLUMNS):
            for piece in pieces(messages, rows_max, bytes_max):
                if batch and (len(batch) + piece.num_rows > rows_max or size + piece.nbytes > bytes_max):
                    yield batch
                    batch, size = [], 0
                batch += to_records(piece, self._settings.kafka_topic)
                size += piece.nbytes
        if batch:
            yield batch

    def lasts(self, offsets: Mapping[Queue, int]) -> dict[Queue, Last]:
        """The messages at some offsets; those that the log does not hold are left out."""
        ranges, _ = self.ranges(offsets, {queue: offset + 1 for queue, offset in offsets.items()})
        columns = ("topic", "queue_id", "msg_id", "commit_timestamp")
        found: dict[Queue, Last] = {}
        for messages in read_ranges(ranges, self._log.read_range, self._log.find_again, columns):
            times = microseconds(messages["commit_timestamp"]).to_pylist()
            for row, committed_us in zip(messages.to_pylist(), times, strict=True):
                found[row["topic"], row["queue_id"]] = Last(row["msg_id"], committed_us)
        return found
