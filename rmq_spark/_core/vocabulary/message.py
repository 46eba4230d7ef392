"""A message, its columns, and the rules for names, sizes and properties."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from rmq_spark._core.vocabulary.options import (
    APP_ID_CHARS_MAX,
    BODY_BYTES_MAX,
    DELAY_LEVELS_S,
    GROUP_CHARS_MAX,
    PROPERTIES_BYTES_MAX,
    QUEUES_MAX,
    TOPIC_CHARS_MAX,
    require_time,
)
from rmq_spark.errors import MessageError

KEY_SEPARATOR = " "
CHECK_IMMUNITY_PROPERTY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
"""RocketMQ's property: seconds for which the message's transaction is not checked."""

TIMESTAMP = pa.timestamp("us", "UTC")
PROPERTIES = pa.map_(pa.string(), pa.string())

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")

# Topics that RocketMQ keeps for itself (TopicValidator). Their names would mislead everyone who knows RocketMQ.
SYSTEM_TOPICS = frozenset(
    """TBW102 SCHEDULE_TOPIC_XXXX BenchmarkTest RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRACE_TOPIC
    RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC SELF_TEST_TOPIC OFFSET_MOVED_EVENT
    CHECKPOINT_TOPIC""".split()
)
RETRY_PREFIX, DLQ_PREFIX = "%RETRY%", "%DLQ%"
SYSTEM_PREFIXES = ("rmq_sys_", RETRY_PREFIX, DLQ_PREFIX)

# Property names that RocketMQ reserves (MessageConst). The user may set CHECK_IMMUNITY_TIME_IN_SECONDS.
RESERVED_PROPERTIES = frozenset(
    """KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID
    ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MSG_REGION TRACE_ON UNIQ_KEY
    EXTEND_UNIQ_INFO MAX_RECONSUME_TIMES CONSUME_START_TIME POP_CK POP_CK_OFFSET 1ST_POP_TIME
    TRAN_PREPARED_QUEUE_OFFSET DUP_INFO INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME
    PUSH_REPLY_TIME CLUSTER MSG_TYPE INNER_MULTI_QUEUE_OFFSET INNER_MULTI_DISPATCH INNER_NUM INNER_BASE
    TIMER_DELAY_MS TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES
    TIMER_OUT_MS TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP DLQ_ORIGIN_TOPIC
    DLQ_ORIGIN_MESSAGE_ID __CRC32# __transactionId__ __SHARDINGKEY TRANSACTION_CHECK_TIMES""".split()
)
RESERVED_PROPERTY_PREFIX = "__RMQ."

INPUT_COLUMNS: Mapping[str, str] = {
    "body": "binary or string",
    "topic": "string",
    "tags": "string",
    "sharding_key": "string",
    "keys": "string or array<string>",
    "queue_id": "int",
    "properties": "map<string,string>",
    "born_timestamp": "timestamp_ltz",
    "deliver_at": "timestamp_ltz",
    "delay_level": "int",
}
"""Columns that a DataFrame or an Arrow table of messages may have, with their Spark types."""


def _require_name(value: object, what: str, chars_max: int) -> str:
    if not isinstance(value, str) or not value:
        raise MessageError(f"{what}={value!r} is not a name: a string that is not empty is expected")
    if len(value) > chars_max:
        raise MessageError(f"{what} {value[:40]!r}… has {len(value)} characters: at most {chars_max} are allowed")
    if _NAME.fullmatch(value) is None:
        remedy = "give several as a list" if "," in value else "rename it"
        if what == "idempotency_key":
            remedy = "take a hash of it, such as hashlib.sha256(key.encode()).hexdigest()"
        raise MessageError(f"{what} {value!r} has characters outside a-z, A-Z, 0-9 and % | _ -: {remedy}")
    return value


def distinct(topics: pa.ChunkedArray) -> list[object]:
    """Return the distinct values of a column of topics. A column that holds no text is refused later, with an
    explanation."""
    try:
        return list(topics.unique().to_pylist())
    except pa.ArrowNotImplementedError:  # a column of lists or maps
        return list(topics.to_pylist())


def require_topic_name(name: object, own: bool = False) -> str:
    """Return a topic's name, or raise MessageError when it breaks RocketMQ's rules (``TopicValidator.validateTopic``).
    ``own`` allows the topics of retries and dead letters. Users may read them, but not create them or send to them."""
    topic = _require_name(name, "topic", TOPIC_CHARS_MAX)
    if own and topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        return topic
    if topic in SYSTEM_TOPICS or topic.lower().startswith("rmq_sys_") or topic.startswith(SYSTEM_PREFIXES):
        raise MessageError(f"topic {topic!r} is one of RocketMQ's own: choose another name")
    return topic


def require_group_name(name: object, what: str = "producer group") -> str:
    """Return the group's name, or raise MessageError when it breaks RocketMQ's rules (``Validators.checkGroup``)."""
    return _require_name(name, what, GROUP_CHARS_MAX)


def require_app_id(name: object, what: str = "appId") -> str:
    """Return the application id, which may have the characters of a group name and at most 127 of them."""
    return _require_name(name, what, APP_ID_CHARS_MAX)


def require_properties(properties: Mapping[str, str] | None) -> None:
    """Raise MessageError for a reserved or empty name, a value that is no string, or more than 32 KiB in all."""
    if properties is None:
        return
    if not isinstance(properties, Mapping):
        raise MessageError(f"properties are {type(properties).__name__}: a mapping of strings to strings is expected")
    size = 0
    for name, value in properties.items():
        if not isinstance(name, str) or not name or not isinstance(value, str):
            raise MessageError(f"property {name!r}={value!r}: names and values must be strings, names not empty")
        if name in RESERVED_PROPERTIES or name.startswith(RESERVED_PROPERTY_PREFIX):
            raise MessageError(f"property {name!r} is reserved by RocketMQ: rename it")
        if name == CHECK_IMMUNITY_PROPERTY and not _is_seconds(value):
            raise MessageError(f"property {name}={value!r} is not a number of seconds of 0 or more")
        size += len(utf8(name, "a property's name")) + len(utf8(value, f"property {name!r}"))
    if size > PROPERTIES_BYTES_MAX:
        raise MessageError(f"properties hold {size} bytes: at most {PROPERTIES_BYTES_MAX} are allowed")


def utf8(text: str, what: str) -> bytes:
    """Return the text in UTF-8, or raise MessageError when UTF-8 cannot write it (a lone surrogate)."""
    try:
        return text.encode()
    except UnicodeEncodeError as problem:
        raise MessageError(f"{what} {text[:40]!r} cannot be written in UTF-8: {problem}") from problem


def _require_text(value: object, what: str) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise MessageError(f"{what} is {type(value).__name__}: a string is expected")
    utf8(value, what)


def _require_keys(keys: object) -> None:
    if keys is None or isinstance(keys, str):
        _require_text(keys, "keys")
        return
    if not isinstance(keys, Sequence) or isinstance(keys, (bytes, bytearray, memoryview)):
        raise MessageError(f"keys are {type(keys).__name__}: a string or a sequence of strings is expected")
    for key in keys:
        if key is None:
            raise MessageError("None is among the keys: leave it out")
        _require_text(key, "a key among the keys")
        if not key or KEY_SEPARATOR in key:
            raise MessageError(f"key {key[:80]!r} among the keys cannot be found again: {KEY_RULE}")


TAG_RULE = (
    "a tag is not empty, is not '*', has no '|' and neither begins nor ends with a blank, or no consumer could "
    "subscribe to it; a message without a tag has null"
)
KEY_RULE = "blanks separate keys, so one of several is not empty and has none in it; replace them, by '_' for instance"


def is_tag(text: str) -> bool:
    """Return True for a tag to which a consumer can subscribe (RocketMQ: ``FilterAPI.buildSubscriptionData``, which
    splits a subscription at bars and drops the blanks around the tags)."""
    return text not in ("", "*") and "|" not in text and text == text.strip()


def _require_tag(tag: object) -> None:
    _require_text(tag, "tags")
    if isinstance(tag, str) and not is_tag(tag):
        raise MessageError(f"tags {tag[:80]!r} is no tag: {TAG_RULE}")


def _is_seconds(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12


@dataclass(frozen=True)
class Message:
    """One message to send (RocketMQ: ``org.apache.rocketmq.common.message.Message``).

    Parameters
    ----------
    topic : str
        A topic of the commit log.
    body : bytes or str
        At most 4 MiB. A string is stored as UTF-8.
    tags : str, optional
        One tag, by which consumers filter: not empty, not ``*``, without a bar, and without blanks at its ends.
    keys : str or sequence of str, optional
        Business keys. Several keys are stored as one string with spaces between, as in RocketMQ, so none of a sequence
        has a space in it.
    sharding_key : str, optional
        Messages of one sharding key share a queue.
    properties : mapping of str to str, optional
        At most 32 KiB in all. RocketMQ's reserved names are refused.
    queue_id : int, optional
        Selects the queue (RocketMQ: ``MessageQueueSelector``).
    born_timestamp : datetime, optional
        Has a time zone; the time of sending when not given.
    deliver_at : datetime, optional
        Has a time zone. A committed message does not appear before this time, which may be at most three days ahead
        (RocketMQ: ``setDeliverTimeMs``).
    delay_level : int, optional
        1 to 18. The message appears 1s 5s 10s 30s 1m 2m … 10m 20m 30m 1h 2h after it was sent (RocketMQ:
        ``setDelayTimeLevel``).
    """

    topic: str
    body: bytes | str
    tags: str | None = None
    keys: str | Sequence[str] | None = None
    sharding_key: str | None = None
    properties: Mapping[str, str] | None = None
    queue_id: int | None = None
    born_timestamp: datetime | None = None
    deliver_at: datetime | None = None
    delay_level: int | None = None

    def __post_init__(self) -> None:
        require_topic_name(self.topic)
        if not isinstance(self.body, (bytes, bytearray, memoryview, str)):
            raise MessageError(f"body is {type(self.body).__name__}: bytes or a string is expected")
        size = len(utf8(self.body, "body")) if isinstance(self.body, str) else memoryview(self.body).nbytes
        if size > BODY_BYTES_MAX:
            raise MessageError(f"body has {size} bytes: at most {BODY_BYTES_MAX} (4 MiB) are allowed")
        _require_tag(self.tags)
        _require_keys(self.keys)
        _require_text(self.sharding_key, "sharding_key")
        require_properties(self.properties)
        queue_id = self.queue_id
        if queue_id is not None and (type(queue_id) is not int or not 0 <= queue_id < QUEUES_MAX):
            raise MessageError(f"queue_id={queue_id!r} is not a queue: a whole number from 0 on is expected")
        for name in ("born_timestamp", "deliver_at"):
            time = getattr(self, name)
            if time is not None:
                require_time(time, name, MessageError)
        level = self.delay_level
        if level is not None and (type(level) is not int or not 1 <= level <= len(DELAY_LEVELS_S)):
            raise MessageError(f"delay_level={level!r} is not a delay level: 1 to {len(DELAY_LEVELS_S)} are there")

    @property
    def keys_text(self) -> str | None:
        """The keys as one string, as RocketMQ stores them."""
        return self.keys if self.keys is None or isinstance(self.keys, str) else KEY_SEPARATOR.join(self.keys)


@dataclass(frozen=True)
class MessageExt(Message):
    """A stored message, for a listener that takes one at a time (RocketMQ: ``MessageExt``)."""

    msg_id: str = ""
    transaction_id: str = ""
    transaction_key: str | None = None
    producer_group: str = ""
    store_timestamp: datetime | None = None
    check_times: int = 0
    queue_offset: int | None = None
    reconsume_times: int = 0


def message_list(messages: object) -> list[Message]:
    """Return messages as a new list, because an iterable may be consumed once and a list may change later."""
    if isinstance(messages, (Message, str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise MessageError(
            f"found {type(messages).__name__}: a list of rmq_spark.Message or a pyarrow.Table is expected"
        )
    result = list(messages)
    for message in result:
        if not isinstance(message, Message):
            raise MessageError(f"found {type(message).__name__} in the list of messages: rmq_spark.Message is expected")
    return result


def to_table(messages: Sequence[Message]) -> pa.Table:
    """Return messages as an Arrow table with a row for each and the columns of :data:`INPUT_COLUMNS`."""

    def content(body: bytes | str) -> bytes:
        return body.encode() if isinstance(body, str) else bytes(body)

    return pa.table(
        {
            "body": pa.array([content(m.body) for m in messages], pa.binary()),
            "topic": pa.array([m.topic for m in messages], pa.string()),
            "tags": pa.array([m.tags for m in messages], pa.string()),
            "keys": pa.array([m.keys_text for m in messages], pa.string()),
            "sharding_key": pa.array([m.sharding_key for m in messages], pa.string()),
            "queue_id": pa.array([m.queue_id for m in messages], pa.int32()),
            "properties": pa.array(
                [list(m.properties.items()) if m.properties else None for m in messages], PROPERTIES
            ),
            "born_timestamp": pa.array([m.born_timestamp for m in messages], TIMESTAMP),
            "deliver_at": pa.array([m.deliver_at for m in messages], TIMESTAMP),
            "delay_level": pa.array([m.delay_level for m in messages], pa.int32()),
        }
    )
