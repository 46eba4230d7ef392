"""Consuming queues in order, as executors do it: it needs pyarrow, and no open commit log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from rmq_spark.consumer.listener import EachMessage, Listen, answers
from rmq_spark.consumer.retry import restored
from rmq_spark.errors import ConsumeError

RESULT = pa.schema([("result", pa.binary())])
"""What a task brings back."""

Queue = tuple[str, int]


@dataclass
class QueueResult:
    """What one pass made of a queue: the next offset, and the message that stopped it, as an Arrow stream."""

    next_offset: int
    seen_to: int
    stopped_at: bytes | None = None
    reason: str | None = None


def consume_queue(
    listener: Listen | EachMessage, queue: Queue, messages: pa.Table, position: int, found: dict[Queue, QueueResult]
) -> None:
    """Let the listener have the messages of a queue, from a position to the first that it does not consume."""
    known = found.get(queue)
    offsets = messages["queue_offset"].to_pylist()
    if known is not None and known.stopped_at is not None:
        known.seen_to = max(known.seen_to, offsets[-1] + 1)
        return
    if offsets != sorted(offsets) or (known is not None and offsets[0] < known.seen_to):
        raise ConsumeError(
            f"queue {queue[1]} of topic {queue[0]!r} came out of order: read the stream with the option ordered=true"
        )
    skip = sum(offset < position for offset in offsets)
    found[queue] = QueueResult(max(position, offsets[-1] + 1), offsets[-1] + 1)
    todo = restored(messages.slice(skip))
    if not todo.num_rows:
        return
    for at, (consumed, reason) in enumerate(answers(listener, todo, orderly=True)):
        if not consumed:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, todo.schema) as stream:
                stream.write_table(todo.slice(at, 1))
            found[queue] = QueueResult(offsets[skip + at], offsets[-1] + 1, sink.getvalue().to_pybytes(), reason)
            return


def by_queue(messages: pa.Table) -> Iterator[tuple[Queue, pa.Table]]:
    """Runs of rows of one queue."""
    queues = list(zip(messages["topic"].to_pylist(), messages["queue_id"].to_pylist(), strict=True))
    start = 0
    for at in range(1, len(queues) + 1):
        if at == len(queues) or queues[at] != queues[start]:
            yield queues[start], messages.slice(start, at - start)
            start = at
