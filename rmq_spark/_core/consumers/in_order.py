"""Consumes queues in order. This module runs on executors: it needs pyarrow, and no open commit log.

One pass over a queue whose group stands at position 7, with a listener that does not consume the message at offset 8::

    offset      5       6       7          8       9
                skipped skipped consumed   stops   not tried

    result      next_offset=8  stopped_at=<message 8>  seen_to=10

The consumer writes 8 as the group's new position, and the next pass begins there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.consumers.message_listener import EachMessage, Listen, answers
from rmq_spark._core.consumers.retry import restored, tried
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import ConsumeError

RESULT = pa.schema([("result", pa.binary())])
"""Schema of the one row that a task returns: its pickled results."""


@dataclass
class QueueResult:
    """The result of one pass over a queue: the first offset that was not consumed, the offset after the last message
    that the pass received, and the message that was not consumed, as an Arrow stream, with the reason."""

    next_offset: int
    seen_to: int
    stopped_at: bytes | None = None
    reason: str | None = None


def consume_queue(
    listener: Listen | EachMessage,
    queue: Queue,
    messages: pa.Table,
    position: int,
    found: dict[Queue, QueueResult],
    stopped: tuple[int, int] | None = None,
) -> None:
    """Give the messages of a queue to the listener, from ``position`` on to the first one that it does not consume.

    ``stopped`` is the offset that stopped the queue before, and how often it did. The result is put into ``found``. A
    queue that has stopped in this pass gets no more messages.
    """
    earlier = found.get(queue)
    offsets = messages["queue_offset"].to_pylist()
    if earlier is not None and earlier.stopped_at is not None:
        earlier.seen_to = max(earlier.seen_to, offsets[-1] + 1)
        return
    if offsets != sorted(offsets) or (earlier is not None and offsets[0] < earlier.seen_to):
        raise ConsumeError(
            f"queue {queue[1]} of topic {queue[0]!r} came out of order: read the stream with the option ordered=true"
        )
    skip = sum(offset < position for offset in offsets)
    found[queue] = QueueResult(max(position, offsets[-1] + 1), offsets[-1] + 1)
    unread = restored(messages.slice(skip))
    if not unread.num_rows:
        return
    if stopped is not None and stopped[0] == offsets[skip]:
        unread = tried(unread, stopped[1])
    for row, (consumed, reason) in enumerate(answers(listener, unread)):
        if not consumed:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, unread.schema) as stream:
                stream.write_table(unread.slice(row, 1))
            found[queue] = QueueResult(offsets[skip + row], offsets[-1] + 1, sink.getvalue().to_pybytes(), reason)
            return


def by_queue(messages: pa.Table) -> Iterator[tuple[Queue, pa.Table]]:
    """Yield the messages of each queue, in the order that they have."""
    queues = messages.group_by(["topic", "queue_id"], use_threads=False).aggregate([])
    for topic, queue_id in zip(queues["topic"].to_pylist(), queues["queue_id"].to_pylist(), strict=True):
        if queues.num_rows == 1:
            yield (topic, queue_id), messages
        else:
            of_queue = pc.and_(pc.equal(messages["topic"], topic), pc.equal(messages["queue_id"], queue_id))
            yield (topic, queue_id), messages.filter(of_queue)
