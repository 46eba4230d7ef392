"""Requires of a DataFrame the columns and types of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rmq_spark.commitlog.incoming import require_known_topic, require_message_columns
from rmq_spark.errors import MessageError
from rmq_spark.message import INPUT_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from rmq_spark.commitlog.log import CommitLog


def require_message_types(schema: StructType, topic: str | None, transaction_key: str | None) -> None:
    """Raise MessageError when a DataFrame does not have the columns and types of messages."""
    from pyspark.sql import types as T

    require_message_columns(schema.names, topic, transaction_key)
    allowed: dict[str, tuple[type, ...]] = {
        "body": (T.BinaryType, T.StringType),
        "topic": (T.StringType,),
        "tags": (T.StringType,),
        "sharding_key": (T.StringType,),
        "keys": (T.StringType, T.ArrayType),
        "queue_id": (T.IntegerType, T.ShortType, T.ByteType, T.LongType),
        "properties": (T.MapType,),
        "born_timestamp": (T.TimestampType,),
        "deliver_at": (T.TimestampType,),
        "delay_level": (T.IntegerType, T.ShortType, T.ByteType, T.LongType),
    }
    for f in schema.fields:
        if f.name == transaction_key and f.name not in allowed:
            if isinstance(f.dataType, (T.StringType, T.IntegralType, T.DateType)):
                continue
            raise MessageError(
                f"transactionKey {f.name!r} has type {f.dataType.simpleString()}: a string, an integer or a date is "
                "expected; cast it"
            )
        if not isinstance(f.dataType, allowed[f.name]):
            raise MessageError(
                f"column {f.name!r} has type {f.dataType.simpleString()}: {INPUT_COLUMNS[f.name]} is expected; cast it"
            )


def topics_for(log: CommitLog, columns: Sequence[str], topic: str | None) -> Mapping[str, int]:
    """Return the topics to which rows with these columns can go, with their number of queues.

    It raises TopicNotFoundError when the log does not have ``topic``.
    """
    topics = log.topics() if topic is None or "topic" in columns else log.topics_with([topic])
    if topic is not None:
        require_known_topic(topic, topics)
    return topics
