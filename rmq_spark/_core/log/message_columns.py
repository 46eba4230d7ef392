"""The rules for a table of messages, and its columns in the types of ``half``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.vocabulary.message import (
    CHECK_IMMUNITY_PROPERTY,
    DLQ_PREFIX,
    INPUT_COLUMNS,
    KEY_RULE,
    KEY_SEPARATOR,
    PROPERTIES,
    RESERVED_PROPERTIES,
    RESERVED_PROPERTY_PREFIX,
    RETRY_PREFIX,
    TAG_RULE,
    TIMESTAMP,
)
from rmq_spark._core.vocabulary.options import (
    BODY_BYTES_MAX,
    DELAY_LEVELS_S,
    DELIVER_DELAY_S_MAX,
    OUT_OF_TIME,
    PROPERTIES_BYTES_MAX,
    TIME_MAX,
    TIME_MIN,
    nearest,
)
from rmq_spark._core.vocabulary.remedy import LOG, Remedy
from rmq_spark._core.vocabulary.rows import arange
from rmq_spark._core.vocabulary.text import message_count
from rmq_spark.errors import MessageError, TopicNotFoundError


def require_known_topic(name: object, topics: Mapping[str, int]) -> None:
    """Raise TopicNotFoundError, which names the nearest topic, when the commit log lacks this topic."""
    if not isinstance(name, str) or name not in topics:
        hint = nearest(str(name), topics) if topics else "the commit log has none yet"
        missing = f"topic {name!r} is not in the commit log ({hint})"
        if not isinstance(name, str):
            raise TopicNotFoundError(f"{missing}; the name of one topic is expected")
        if name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            raise TopicNotFoundError(
                f"{missing}; txmq.consume makes it when it first runs for a consumer group of this name"
            )
        create = f"make it with txmq topic create {LOG} {shlex.quote(name)}"
        raise TopicNotFoundError(missing, remedy=Remedy(f"make it with log.create_topic({name!r})", create))


def require_message_columns(names: Sequence[str], default_topic: str | None, transaction_key: str | None) -> None:
    """Raise MessageError unless the columns are those of messages (and the transaction key).

    It is called with a DataFrame's columns before anything is written, and with every Arrow batch.
    """
    for name in names:
        if names.count(name) > 1:
            raise MessageError(f"column {name!r} is there twice: drop or rename one of them")
    if "body" not in names:
        raise MessageError(
            f"column 'body' (binary or string) is missing: found {', '.join(names) or 'no columns'}; "
            "make it with, for instance, to_json(struct('*')).alias('body')"
        )
    if transaction_key is not None and transaction_key not in names:
        raise MessageError(f"transactionKey={transaction_key!r} is not a column: {nearest(transaction_key, names)}")
    for name in names:
        if name not in INPUT_COLUMNS and name != transaction_key:
            columns = [*INPUT_COLUMNS, *([transaction_key] if transaction_key else [])]
            raise MessageError(
                f"column {name!r} is not a column of messages ({nearest(name, columns)}); drop or rename it"
            )
    if default_topic is None and "topic" not in names:
        raise MessageError("there is neither an option 'topic' nor a column 'topic': set one of them")


def column_of(table: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """A column as this type, if its values can have it; nulls when the column is missing."""
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, kind)])
    column = table[name]
    if column.type == kind:
        return column
    expected = f"column {name!r} has type {column.type}: {INPUT_COLUMNS.get(name, kind)} is expected"
    if pa.types.is_nested(column.type) and (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        raise MessageError(f"{expected}; make JSON of each value, with json.dumps for instance")
    if not _is_like(column.type, kind):
        raise MessageError(expected)
    try:
        return pc.cast(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
        raise MessageError(f"{expected} ({problem})") from problem


def times_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of times that every consumer can represent. The times are checked in their own unit, before a cast could
    overflow."""
    column = table[name] if name in table.column_names else None
    if column is not None and pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    if column is None or not pa.types.is_timestamp(column.type):
        return column_of(table, name, TIMESTAMP)
    if column.type.tz is None and column.null_count < len(column):
        raise MessageError(
            f"column {name!r} has times without a time zone ({column.type}), so their hour is a guess: give them one "
            "with pyarrow.compute.assume_timezone, or in Spark with the type TIMESTAMP"
        )
    unit = column.type.unit
    least, most = (_as_unit(time, unit) for time in (TIME_MIN, TIME_MAX))
    numbers = pc.cast(column, pa.int64())
    wrong = pc.or_(pc.less(numbers, least), pc.greater(numbers, most))
    if pc.any(wrong).as_py():
        at = pc.index(pc.fill_null(wrong, False), True).as_py()
        raise MessageError(f"{name} of row {at} ({numbers[at].as_py()} {unit} since 1970) is {OUT_OF_TIME}")
    return column_of(table, name, TIMESTAMP)


def _as_unit(time: datetime, unit: str) -> int:
    nanoseconds = (time - TIME_MIN) // timedelta(microseconds=1) * 1000
    return nanoseconds // {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]


def require_utf8(table: pa.Table) -> None:
    """Raise MessageError for text that is not UTF-8 (Spark makes such text from bytes): no consumer could decode it."""
    for name in table.column_names:
        if name != "body":  # which is bytes
            try:
                table[name].validate(full=True)
            except pa.ArrowInvalid as problem:
                raise MessageError(f"column {name!r} holds what Arrow cannot read: {problem}") from problem


def _is_like(dtype: pa.DataType, kind: pa.DataType) -> bool:
    """True when values of one type mean the same in the other. A cast alone would also turn 1.0 or "1" into a queue."""
    if pa.types.is_dictionary(dtype):
        return _is_like(dtype.value_type, kind)
    if pa.types.is_null(dtype):
        return True
    if pa.types.is_string(kind):
        return _is_text(dtype)
    if pa.types.is_binary(kind):
        return _is_text(dtype) or "binary" in str(dtype)
    if pa.types.is_integer(kind):
        return bool(pa.types.is_integer(dtype))
    if pa.types.is_map(kind):
        return bool(pa.types.is_map(dtype)) and _is_text(dtype.key_type) and _is_text(dtype.item_type)
    return bool(dtype.id == kind.id)


def _is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or str(dtype) == "string_view")


def first_of(table: pa.Table, wrong: pa.ChunkedArray) -> str:
    """Describe the first row for which ``wrong`` is true. A body stays out of errors and logs."""
    at = pc.index(wrong, True).as_py()
    names = ("topic", "keys", "tags", "sharding_key", "queue_id")
    values = {name: table[name][at].as_py() for name in names if name in table.column_names}
    text = ", ".join(f"{name} {str(value)[:80]!r}" for name, value in values.items() if value is not None)
    return f"the first is row {at} of its Arrow batch{text and f', with {text}'}"


def body_of(table: pa.Table) -> pa.ChunkedArray:
    """The bodies. No body may be null or longer than 4 MiB."""
    body = column_of(table, "body", pa.binary())
    if body.null_count:
        raise MessageError(
            f"the body is null in {message_count(body.null_count)} ({first_of(table, pc.is_null(body))}): filter such "
            "rows out, or send an empty string"
        )
    longest = pc.max(pc.binary_length(body)).as_py() or 0
    if longest > BODY_BYTES_MAX:
        raise MessageError(f"a body has {longest} bytes: at most {BODY_BYTES_MAX} (4 MiB) are allowed")
    return body


def deliver_at_of(table: pa.Table, now: pa.Scalar) -> pa.ChunkedArray:
    """When each message is due; null for at once. A delay level counts from ``now``."""
    deliver_at = times_of(table, "deliver_at")
    level = column_of(table, "delay_level", pa.int32())
    if deliver_at.null_count == level.null_count == table.num_rows:
        return deliver_at
    wrong = pc.or_(pc.less(level, 1), pc.greater(level, len(DELAY_LEVELS_S)))
    if pc.any(wrong).as_py():
        at = pc.index(pc.fill_null(wrong, False), True).as_py()
        raise MessageError(
            f"delay_level {level[at].as_py()} is not a delay level: 1 to {len(DELAY_LEVELS_S)} are there"
        )
    if pc.any(pc.and_(pc.is_valid(deliver_at), pc.is_valid(level))).as_py():
        raise MessageError("a message has a deliver_at and a delay_level: set one of them")
    delays = pa.array([s * 1_000_000 for s in DELAY_LEVELS_S], pa.duration("us")).take(pc.subtract(level, 1))
    times = pc.coalesce(deliver_at, pc.add(now, delays))
    latest, hours = pc.max(times).as_py(), DELIVER_DELAY_S_MAX / 3600
    if latest - now.as_py() > timedelta(hours=hours):
        raise MessageError(f"a message has the deliver_at {latest}: at most {hours:.0f} h ahead are allowed")
    return times


def tags_of(table: pa.Table) -> pa.ChunkedArray:
    """The tags. A consumer can subscribe to each of them (``is_tag`` for a whole column)."""
    tags = column_of(table, "tags", pa.string())
    if tags.null_count == len(tags) or pc.all(pc.ascii_is_alnum(tags)).as_py():
        return tags
    wrong = pc.or_(pc.match_substring(tags, "|"), pc.not_equal(tags, pc.utf8_trim_whitespace(tags)))
    wrong = pc.or_(wrong, pc.is_in(tags, value_set=pa.array(["", "*"])))
    if pc.any(wrong).as_py():
        tag = tags[pc.index(wrong, True).as_py()].as_py()
        raise MessageError(
            f"tags {tag[:80]!r} is no tag, in {message_count(pc.sum(wrong).as_py())} ({first_of(table, wrong)}): "
            f"{TAG_RULE}"
        )
    return tags


def keys_of(table: pa.Table) -> pa.ChunkedArray:
    """The keys; an array of keys becomes one text."""
    kind = table["keys"].type if "keys" in table.column_names else None
    if kind is not None and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        if not _is_like(kind.value_type, pa.string()):
            raise MessageError(f"column 'keys' has type {kind}: {INPUT_COLUMNS['keys']} is expected")
        if pc.list_flatten(table["keys"]).null_count:
            raise MessageError("an array of keys has a null in it: leave it out, with array_compact(keys) for instance")
        _require_whole_keys(table)
        return pc.binary_join(pc.cast(table["keys"], pa.list_(pa.string())), KEY_SEPARATOR)
    return column_of(table, "keys", pa.string())


def _require_whole_keys(table: pa.Table) -> None:
    """Raise MessageError when a key of an array would become two keys in the joined text, or no key."""
    keys = table["keys"].combine_chunks()
    flat = pc.cast(pc.list_flatten(keys), pa.string())
    wrong = pc.or_(pc.match_substring(flat, KEY_SEPARATOR), pc.equal(flat, ""))
    if pc.any(wrong).as_py():
        at = pc.index(wrong, True).as_py()
        rows = pc.equal(arange(table.num_rows), pc.list_parent_indices(keys)[at])
        raise MessageError(
            f"key {flat[at].as_py()[:80]!r} in an array of keys cannot be found again: {KEY_RULE} "
            f"({first_of(table, rows)})"
        )


def properties_of(table: pa.Table) -> pa.ChunkedArray:
    """The properties. No property may have a name that RocketMQ reserves."""
    column = column_of(table, "properties", PROPERTIES)
    if column.null_count == len(column):
        return column
    # Flattening a list respects its slice. The raw keys of a sliced map are those of the whole map.
    maps = column.combine_chunks()
    entries = maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    flat = entries.flatten()
    keys, values = pc.struct_field(flat, "key"), pc.struct_field(flat, "value")
    if values.null_count or pc.any(pc.equal(pc.utf8_length(keys), 0)).as_py():
        raise MessageError("a property has an empty name or a null value: names and values must be strings")
    for name in pc.unique(keys).to_pylist():
        if name in RESERVED_PROPERTIES or name.startswith(RESERVED_PROPERTY_PREFIX):
            raise MessageError(f"property {name!r} is reserved by RocketMQ: rename it")
    immunity = values.filter(pc.equal(keys, CHECK_IMMUNITY_PROPERTY))
    if len(immunity) and not pc.all(pc.match_substring_regex(immunity, r"^\d{1,11}$")).as_py():
        raise MessageError(f"property {CHECK_IMMUNITY_PROPERTY} is not a number of seconds of 0 or more")
    sizes = pc.add(pc.binary_length(pc.cast(keys, pa.binary())), pc.binary_length(pc.cast(values, pa.binary())))
    if (pc.max(pc.list_value_length(entries)).as_py() or 0) * (pc.max(sizes).as_py() or 0) > PROPERTIES_BYTES_MAX:
        parents = pc.list_parent_indices(entries)
        sums = pa.table({"row": parents, "size": sizes}).group_by("row").aggregate([("size", "sum")])
        largest = pc.max(sums["size_sum"]).as_py()
        if largest > PROPERTIES_BYTES_MAX:
            raise MessageError(f"properties hold {largest} bytes: at most {PROPERTIES_BYTES_MAX} are allowed")
    return column
