"""Arranges many half batches of one message together, because Arrow calls for each half batch would take
milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from rmq_spark._core.log.half import HALF_SCHEMA, HalfRows, Segment
from rmq_spark._core.log.half_header import HEADER_COLUMNS, HalfHeader
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.vocabulary.message import Message, to_table
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark.errors import MessageError, TxmqError


@dataclass(eq=False, slots=True)
class OneMessage:
    """A half batch of one message that is not yet checked. After the check, ``rows`` is the arranged message."""

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
        return (self,)


def make_rows(ones: Sequence[OneMessage]) -> dict[str, TxmqError]:
    """Check messages, and set their rows. Returns the errors of messages that break a rule, by half id."""
    if len(ones) > 1:
        with suppress(Exception):  # one message is wrong: find out which below
            _make_rows_together(ones)
            return {}
    problems: dict[str, TxmqError] = {}
    for single in ones:
        try:
            single.rows = single.writer.to_half_rows(to_table([single.message]))
        except TxmqError as problem:
            problems[single.half_id] = problem
        except Exception as problem:  # a list or mapping in it was changed after it was made
            error = MessageError(f"the message cannot be sent as it is now ({type(problem).__name__}: {problem})")
            error.__cause__ = cause_of(problem)
            problems[single.half_id] = error
    return problems


def _make_rows_together(ones: Sequence[OneMessage]) -> None:
    """Do for all messages at once what ``HalfWriter.in_order`` does for one half batch."""
    topics = {name: queues for single in ones for name, queues in single.writer.topics.items()}
    fifo = frozenset[str]().union(*(single.writer.fifo for single in ones))
    checks = replace(ones[0].writer, topics=topics, fifo=fifo)
    arranged = rows_of_each(to_table([single.message for single in ones]), [single.writer for single in ones], checks)
    for single, rows in zip(ones, arranged, strict=True):
        single.rows = rows


def rows_of_each(table: pa.Table, writers: Sequence[HalfWriter], checks: HalfWriter) -> list[HalfRows]:
    """Each message as the rows of its own half batch, by its writer. ``checks`` checks all messages, and raises the
    error of the first message that breaks a rule."""
    messages = checks.normalize(table)
    places = list(zip(messages["topic"].to_pylist(), messages["queue_id"].to_pylist(), strict=True))
    queues = [
        writer.first_queue(topic, 0) if queue is None else queue
        for writer, (topic, queue) in zip(writers, places, strict=True)
    ]
    headers = [writer.header for writer in writers]
    values = {
        name: pa.array([getattr(h, name) for h in headers], HALF_SCHEMA.field(name).type) for name in HEADER_COLUMNS
    }
    zeros = pa.repeat(pa.scalar(0, pa.int64()), len(writers))
    values |= {"file_no": zeros, "row_no": zeros, "queue_id": pa.array(queues, pa.int32())}
    now = checks.now()
    values["store_timestamp"] = pa.repeat(now, len(writers))
    columns = {f.name: values[f.name] if f.name in values else messages[f.name] for f in HALF_SCHEMA}
    rows = pa.table(columns, schema=HALF_SCHEMA)
    staged_at = now.value / 1_000_000
    delayed = messages["deliver_at"].is_valid().to_pylist()
    return [
        HalfRows(writer, rows, 0, (Segment(topic, queue, 0, 0),), staged_at, delayed[i], i)
        for i, (writer, (topic, _), queue) in enumerate(zip(writers, places, queues, strict=True))
    ]
