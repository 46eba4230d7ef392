"""From messages of a commit log to records of Kafka.

======================  ==============================================================================================
record                  message
======================  ==============================================================================================
topic                   ``topic_template`` with the topic's name
partition               ``queue_id``
key                     ``sharding_key``, or else ``keys``, or else none
value                   ``body``
timestamp               ``born_timestamp`` (Kafka's CreateTime), in milliseconds
headers                 each property under its own name, and then, when not null, ``txmq.msg_id``,
                        ``txmq.transaction_id``, ``txmq.tags``, ``txmq.keys``, ``txmq.sharding_key``,
                        ``txmq.producer_group``, ``txmq.queue_offset`` and ``txmq.commit_timestamp`` (milliseconds)
======================  ==============================================================================================

Texts are UTF-8, and numbers are decimal digits. A NUL in a property's name becomes ``\\0``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

HEADER_PREFIX = "txmq."
HEADER_COLUMNS = (
    "msg_id",
    "transaction_id",
    "tags",
    "keys",
    "sharding_key",
    "producer_group",
    "queue_offset",
    "commit_timestamp",
)
"""Columns of the source that become headers after the properties, in this order."""
COLUMNS = (*HEADER_COLUMNS, "topic", "queue_id", "properties", "body", "born_timestamp")
"""Columns of the source that a relay reads."""

PARKED_REASON = "txmq.parked.reason"
PARKED_TOPIC = "txmq.parked.topic"
PARKED_QUEUE = "txmq.parked.queue_id"
PARKED_TIME = "txmq.parked.born_timestamp"
PARKED_BYTES = "txmq.parked.body_bytes"
"""Additional headers of a parked record."""

Headers = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A record to send. Without ``timestamp_ms`` Kafka's client sets the time of sending."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message to hand over: its place in the log, and its record."""

    topic: str
    queue_id: int
    queue_offset: int
    msg_id: str
    committed_us: int
    record: Record

    @property
    def where(self) -> str:
        return f"message {self.msg_id} (topic {self.topic!r}, queue {self.queue_id}, offset {self.queue_offset})"


def to_records(messages: pa.Table, kafka_topic: Callable[[str], str]) -> list[OutgoingMessage]:
    """Return messages, which have the columns :data:`COLUMNS`, as records in the same order. ``kafka_topic`` returns
    Kafka's topic for a topic of the log."""
    topics = {topic: kafka_topic(topic) for topic in pc.unique(messages["topic"]).to_pylist()}
    key = pc.coalesce(messages["sharding_key"], messages["keys"])
    names = [HEADER_PREFIX + name for name in HEADER_COLUMNS]
    header_values = zip(*(_text(messages[name]).to_pylist() for name in HEADER_COLUMNS), strict=True)
    rows = zip(
        *(messages[name].to_pylist() for name in ("topic", "queue_id", "queue_offset", "msg_id", "body", "properties")),
        microseconds(messages["commit_timestamp"]).to_pylist(),
        _text(key).to_pylist(),
        _milliseconds(messages["born_timestamp"]).to_pylist(),
        header_values,
        strict=True,
    )
    handed: list[OutgoingMessage] = []
    for topic, queue_id, offset, msg_id, body, properties, committed_us, key_bytes, born_ms, values in rows:
        headers = [(_header_of(name), value.encode()) for name, value in properties or () if value is not None]
        headers += [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
        record = Record(topics[topic], queue_id, key_bytes, body, tuple(headers), born_ms)
        handed.append(OutgoingMessage(topic, queue_id, offset, msg_id, committed_us, record))
    return handed


def _header_of(name: str) -> str:
    """Return the header name of a property. Kafka's client would cut the name at a NUL."""
    return name.replace("\0", r"\0")


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column as UTF-8 text: numbers as digits, times as milliseconds."""
    plain = _milliseconds(column) if pa.types.is_timestamp(column.type) else column
    return plain.cast(pa.string()).cast(pa.binary())


def microseconds(times: pa.ChunkedArray) -> pa.ChunkedArray:
    return times.cast(pa.timestamp("us", "UTC")).cast(pa.int64())


def _milliseconds(times: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return times as whole milliseconds since 1970."""
    return pc.floor_temporal(times, unit="millisecond").cast(pa.timestamp("ms", "UTC")).cast(pa.int64())


def parked_record(message: OutgoingMessage, parking_topic: str, reason: str, with_body: bool) -> Record:
    """Return the parking topic's record for a message that Kafka refused.

    Its time is the time of sending, because Kafka may refuse the message's own. Without its body it is a note, and the
    message remains in the log.
    """
    refused = message.record
    notes = {
        PARKED_REASON: reason,
        PARKED_TOPIC: message.topic,
        PARKED_QUEUE: message.queue_id,
        PARKED_TIME: refused.timestamp_ms,
        PARKED_BYTES: len(refused.value or b""),
    }
    headers = (*refused.headers, *((name, str(value).encode()) for name, value in notes.items()))
    return replace(
        refused,
        topic=parking_topic,
        partition=0,
        key=message.msg_id.encode() if refused.key is None else refused.key,
        value=refused.value if with_body else None,
        headers=headers,
        timestamp_ms=None,
    )


def split_by_size(messages: pa.Table, rows_max: int, bytes_max: int) -> Iterator[pa.Table]:
    """Cut a table into parts of at most ``rows_max`` rows and ``bytes_max`` bytes. A larger single row is a part."""
    rows = messages.num_rows
    if rows == 0:
        return
    if rows == 1 or (rows <= rows_max and messages.nbytes <= bytes_max):
        yield messages
        return
    half = rows_max if rows > rows_max else rows // 2
    yield from split_by_size(messages.slice(0, half), rows_max, bytes_max)
    yield from split_by_size(messages.slice(half), rows_max, bytes_max)
