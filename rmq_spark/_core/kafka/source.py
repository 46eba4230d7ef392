"""A relay's input: committed messages of its queues in batches, in the order of each queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rmq_spark._core.kafka.positions import LastMessage
from rmq_spark._core.kafka.records import COLUMNS, OutgoingMessage, microseconds, split_by_size, to_records
from rmq_spark._core.log.message_range import MessageRange
from rmq_spark._core.messages.message_reader import read_ranges
from rmq_spark._core.messages.placements import Placements
from rmq_spark._core.vocabulary.queues import Queue

if TYPE_CHECKING:
    from rmq_spark._core.kafka.relay_settings import RelaySettings
    from rmq_spark._core.protocol.engine import Engine

Gap = tuple[Queue, int, int]
"""A queue, and the first (included) and last (excluded) offset of a range that the log does not hold."""


class RelaySource:
    def __init__(self, engine: Engine, settings: RelaySettings) -> None:
        self._engine = engine
        self._settings = settings
        self.subscription = settings.subscription
        self.placements = Placements(engine, self.subscription.matches)

    def topics(self) -> dict[str, int]:
        """Return the topics that all shards hand over, with their numbers of queues. One that the settings name and the
        log does not have is a TopicNotFoundError."""
        return self.subscription.topics_among(self._engine.topics())

    def batches(self, ranges: list[MessageRange]) -> Iterator[list[OutgoingMessage]]:
        """Yield batches of at most ``max_batch_messages`` and ``max_batch_bytes``. A larger message is a batch."""
        rows_max, bytes_max = self._settings.max_batch_messages, self._settings.batch_bytes
        batch: list[OutgoingMessage] = []
        size = 0
        for messages in read_ranges(ranges, self._engine.read_range, self._engine.find_again, COLUMNS):
            for piece in split_by_size(messages, rows_max, bytes_max):
                if batch and (len(batch) + piece.num_rows > rows_max or size + piece.nbytes > bytes_max):
                    yield batch
                    batch, size = [], 0
                batch += to_records(piece, self._settings.kafka_topic)
                size += piece.nbytes
        if batch:
            yield batch

    def lasts(self, offsets: Mapping[Queue, int]) -> dict[Queue, LastMessage]:
        """Return the messages at these offsets, as far as the log holds them."""
        ranges, _ = self.placements.between(offsets, {queue: offset + 1 for queue, offset in offsets.items()})
        columns = ("topic", "queue_id", "msg_id", "commit_timestamp")
        lasts_by_queue: dict[Queue, LastMessage] = {}
        for messages in read_ranges(ranges, self._engine.read_range, self._engine.find_again, columns):
            times = microseconds(messages["commit_timestamp"]).to_pylist()
            for row, committed_us in zip(messages.to_pylist(), times, strict=True):
                lasts_by_queue[row["topic"], row["queue_id"]] = LastMessage(row["msg_id"], committed_us)
        return lasts_by_queue
