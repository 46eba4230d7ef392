"""Requires of a DataFrame the columns and types of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rmq_spark._core.log.message_columns import require_known_topic, require_message_columns
from rmq_spark._core.vocabulary.message import INPUT_COLUMNS
from rmq_spark.errors import MessageError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

    from rmq_spark._core.protocol.engine import Engine


KEY_TYPES = "a string, an integer or a date"
NO_TEXTS = ("queue_id", "born_timestamp", "deliver_at", "delay_level")
"""Columns whose values are never text."""


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
            fits, expected = isinstance(f.dataType, (T.StringType, T.IntegralType, T.DateType)), KEY_TYPES
        else:
            fits, expected = isinstance(f.dataType, allowed[f.name]) and _holds_text(f.dataType), INPUT_COLUMNS[f.name]
        if not fits:
            column = f"transactionKey {f.name!r}" if f.name == transaction_key else f"column {f.name!r}"
            type_name = f.dataType.simpleString()
            raise MessageError(f"{column} has type {type_name}: {expected} is expected; {_remedy(f.name, f.dataType)}")


def _holds_text(kind: DataType) -> bool:
    """Return False for an array of anything but strings, or a map from or to anything else."""
    from pyspark.sql import types as T

    if isinstance(kind, T.ArrayType):
        return isinstance(kind.elementType, T.StringType)
    return not isinstance(kind, T.MapType) or all(isinstance(k, T.StringType) for k in (kind.keyType, kind.valueType))


def _remedy(name: str, kind: DataType) -> str:
    """Return the expression that gives a column the right type."""
    from pyspark.sql import types as T

    if name == "properties":
        if isinstance(kind, T.MapType):
            return f"cast({name} as map<string,string>)"
        text = name if isinstance(kind, T.StringType) else f"to_json({name})"
        return f"from_json({text}, 'map<string,string>')"
    if name == "keys" and isinstance(kind, T.ArrayType) and isinstance(kind.elementType, T.AtomicType):
        return f"cast({name} as array<string>)"
    if name not in NO_TEXTS and isinstance(kind, (T.StructType, T.ArrayType, T.MapType, T.VariantType)):
        return f"make JSON of it with to_json({name}): a cast would make text such as {{1, x}}, which nobody can parse"
    return "cast it"


def topics_for(engine: Engine, columns: Sequence[str], topic: str | None) -> Mapping[str, int]:
    """Return the possible topics of rows with these columns, with their numbers of queues."""
    topics = engine.topics() if topic is None or "topic" in columns else engine.topic_store.with_names([topic]).queues
    if topic is not None:
        require_known_topic(topic, topics)
    return topics
