"""Half batches of one message each, arranged together: what Arrow does once for all would cost each of them
milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from rmq_spark._core.log.half import HALF_SCHEMA, HEADER_COLUMNS, HalfHeader, HalfRows, HalfWriter, Segment
from rmq_spark._core.vocabulary.message import Message, to_table
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark.errors import MessageError, TxmqError


@dataclass(eq=False, slots=True)
class OneMessage:
    """A half batch of one message that has not been checked and arranged yet.

    Attributes
    ----------
    writer : HalfWriter
    message : Message
    rows : HalfRows or None
        What becomes of it.
    """

    writer: HalfWriter
    message: Message
    rows: HalfRows | None = None

    @property
    def header(self) -> HalfHeader:
        return self.writer.header

    @property
    def half_id(self) -> str:
        return self.writer.header.half_id

    @property
    def files(self) -> tuple[OneMessage]:
        """What is to be prepared."""
        return (self,)


def arrange(ones: Sequence[OneMessage]) -> dict[str, TxmqError]:
    """Check messages, and set their rows. Returns what is wrong with those that break a rule, by half id."""
    if len(ones) > 1:
        with suppress(Exception):  # of one of them: find which
            _arrange_together(ones)
            return {}
    problems: dict[str, TxmqError] = {}
    for one in ones:
        try:
            one.rows = one.writer.rows_of(to_table([one.message]))
        except TxmqError as problem:
            problems[one.half_id] = problem
        except Exception as problem:  # a list or mapping of it was changed after it was made
            told = MessageError(f"the message cannot be sent as it is now ({type(problem).__name__}: {problem})")
            told.__cause__ = cause_of(problem)
            problems[one.half_id] = told
    return problems


def _arrange_together(ones: Sequence[OneMessage]) -> None:
    """As ``HalfWriter.arrange`` does for one."""
    topics = {name: queues for one in ones for name, queues in one.writer.topics.items()}
    fifo = frozenset[str]().union(*(one.writer.fifo for one in ones))
    checks = replace(ones[0].writer, topics=topics, fifo=fifo)
    found = rows_of_each(to_table([one.message for one in ones]), [one.writer for one in ones], checks)
    for one, rows in zip(ones, found, strict=True):
        one.rows = rows


def rows_of_each(table: pa.Table, writers: Sequence[HalfWriter], checks: HalfWriter) -> list[HalfRows]:
    """Each message as the rows of a half batch of its own, by its writer. One writer checks them all.

    Raises
    ------
    MessageError, TopicNotFoundError
        For the first message that breaks a rule.
    """
    messages = checks.normalize(table)
    places = list(zip(messages["topic"].to_pylist(), messages["queue_id"].to_pylist(), strict=True))
    queues = [
        writer.first_queue(topic, 0) if queue is None else queue
        for writer, (topic, queue) in zip(writers, places, strict=True)
    ]
    headers = [writer.header for writer in writers]
    made = {
        name: pa.array([getattr(h, name) for h in headers], HALF_SCHEMA.field(name).type) for name in HEADER_COLUMNS
    }
    zeros = pa.repeat(pa.scalar(0, pa.int64()), len(writers))
    made |= {"file_no": zeros, "row_no": zeros, "queue_id": pa.array(queues, pa.int32())}
    now = checks.now()
    made["store_timestamp"] = pa.repeat(now, len(writers))
    columns = {f.name: made[f.name] if f.name in made else messages[f.name] for f in HALF_SCHEMA}
    rows = pa.table(columns, schema=HALF_SCHEMA)
    staged_at = now.value / 1_000_000
    waits = messages["deliver_at"].is_valid().to_pylist()
    return [
        HalfRows(writer, rows, 0, (Segment(topic, queue, 0, 0),), staged_at, waits[i], i)
        for i, (writer, (topic, _), queue) in enumerate(zip(writers, places, queues, strict=True))
    ]
