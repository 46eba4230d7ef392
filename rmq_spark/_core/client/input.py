"""What the caller of a producer gives: a message, some, or a table of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from rmq_spark._core.log.half import HalfWriter
from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.group_commit import Stageable
from rmq_spark._core.vocabulary.message import Message, distinct, to_table
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark.errors import MessageError

SHARED_ROWS_MAX = 100
SHARED_BYTES_MAX = 64 * 1024
"""A send of no more messages and bytes than these may share a half file with sends of other threads."""
UTF8_BYTES_MAX = 4
"""Of a character."""


def require_message(message: object) -> None:
    """Refuse what is no message."""
    if not isinstance(message, Message):
        several = "; send_messages_in_transaction takes several" if isinstance(message, list | tuple | pa.Table) else ""
        raise MessageError(f"found {type(message).__name__}: rmq_spark.Message is expected{several}")


def topics_in(given: list[Message] | pa.Table, default: str | None) -> set[str]:
    """The topics that messages name, and the one of those that name none."""
    if isinstance(given, pa.Table):
        named = distinct(given["topic"]) if "topic" in given.column_names else []
    else:
        named = [message.topic for message in given]
    return {name for name in [*named, default] if isinstance(name, str)}


def message_list(messages: object) -> list[Message]:
    """A list of messages, made from one that may be consumed once or filled anew."""
    if isinstance(messages, (Message, str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise MessageError(
            f"found {type(messages).__name__}: a list of rmq_spark.Message or a pyarrow.Table is expected"
        )
    found = list(messages)
    for message in found:
        if not isinstance(message, Message):
            raise MessageError(f"found {type(message).__name__} in the list of messages: rmq_spark.Message is expected")
    return found


def stage(log: Engine, writer: HalfWriter, given: list[Message] | pa.Table) -> Sequence[Stageable]:
    """Check the messages. Few of them wait for those of other threads, to share a file; many are written now."""
    if isinstance(given, list) and writer.transaction_key is None and is_small(given):
        return [OneMessage(writer, given[0])]
    table = given if isinstance(given, pa.Table) else to_table(given)
    if table.num_rows > SHARED_ROWS_MAX or table.nbytes > SHARED_BYTES_MAX:
        return log.stage(writer, table.to_batches())
    return [writer.rows_of(table)]


def is_small(given: list[Message]) -> bool:
    """Whether it is one message, which may share a file as it is."""
    return len(given) == 1 and _size_of(given[0]) <= SHARED_BYTES_MAX


def _size_of(message: Message) -> int:
    """The bytes that a message has at most."""
    try:
        properties = message.properties or {}
        characters = sum(len(name) + len(value) for name, value in properties.items())
        characters += sum(len(str(label)) for label in (message.tags, message.keys, message.sharding_key) if label)
        return len(message.body) + UTF8_BYTES_MAX * characters
    except Exception as problem:  # its properties were changed after it was made
        said = f"the message cannot be sent as it is now ({type(problem).__name__}: {problem})"
        raise MessageError(said) from cause_of(problem)
