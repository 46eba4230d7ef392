"""The input of a producer: a message, a list of messages, or a table of them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.group_commit import Stageable
from rmq_spark._core.vocabulary.message import Message, distinct, to_table
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark.errors import MessageError

SHARED_ROWS_MAX = 100
SHARED_BYTES_MAX = 64 * 1024
"""The most messages and bytes of a send that may share a half file with sends of other threads."""
UTF8_BYTES_MAX = 4
"""The most bytes of a character."""


def require_message(message: object) -> None:
    if not isinstance(message, Message):
        several = "; send_messages_in_transaction takes several" if isinstance(message, list | tuple | pa.Table) else ""
        raise MessageError(f"found {type(message).__name__}: rmq_spark.Message is expected{several}")


def topics_in(given: list[Message] | pa.Table, default: str | None) -> set[str]:
    if isinstance(given, pa.Table):
        names = distinct(given["topic"]) if "topic" in given.column_names else []
    else:
        names = [message.topic for message in given]
    return {name for name in [*names, default] if isinstance(name, str)}


def stage(engine: Engine, writer: HalfWriter, given: list[Message] | pa.Table) -> Sequence[Stageable]:
    """Check and stage the messages. A small send waits to share a file with other threads. A large one is written
    now."""
    if isinstance(given, list) and writer.transaction_key is None and is_small(given):
        return [OneMessage(writer, given[0])]
    table = given if isinstance(given, pa.Table) else to_table(given)
    if table.num_rows > SHARED_ROWS_MAX or table.nbytes > SHARED_BYTES_MAX:
        return engine.stage(writer, table.to_batches())
    return [writer.to_half_rows(table)]


def is_small(given: list[Message]) -> bool:
    """Return True for one message that may share a file."""
    return len(given) == 1 and _size_of(given[0]) <= SHARED_BYTES_MAX


def _size_of(message: Message) -> int:
    try:
        properties = message.properties or {}
        characters = sum(len(name) + len(value) for name, value in properties.items())
        characters += sum(len(str(label)) for label in (message.tags, message.keys, message.sharding_key) if label)
        return len(message.body) + UTF8_BYTES_MAX * characters
    except Exception as problem:  # the message's properties were changed after its construction
        text = f"the message cannot be sent as it is now ({type(problem).__name__}: {problem})"
        raise MessageError(text) from cause_of(problem)
