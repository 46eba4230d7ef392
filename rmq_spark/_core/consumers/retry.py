"""Turns messages that were not consumed into retries (topic ``%RETRY%group``), and at last into dead letters.

With the defaults, a message that fails each time takes these steps::

    reconsume_times   0          1          2          ...   15         16
    fails, goes to    %RETRY%    %RETRY%    %RETRY%          %RETRY%    %DLQ%
    comes again in    10 s       30 s       1 min            2 h        never, unless it is resent
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.vocabulary.message import DLQ_PREFIX, PROPERTIES, RETRY_PREFIX
from rmq_spark._core.vocabulary.options import DELAY_LEVELS_S, whole_number

MAX_RECONSUME_TIMES = 16
"""Retries of a message before it is a dead letter (RocketMQ: ``maxReconsumeTimes``)."""
CONCURRENTLY, ORDERLY = "concurrently", "orderly"
"""The modes of a consumer."""
SUSPEND_S = 1.0
"""Seconds for which a queue is suspended (RocketMQ: ``suspendCurrentQueueTimeMillis``)."""
RECONSUME_TIMES_MAX = 2**31 - 1
"""The count of a message's retries is an int32, as in RocketMQ."""
FIRST_DELAY_LEVEL = 3
"""Delay level of the first retry (10 s). Each further retry is one level higher."""

# Properties with RocketMQ's names (MessageConst). Only REASON is ours.
RETRY_TOPIC, ORIGIN_MESSAGE_ID, RECONSUME_TIME = "RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "RECONSUME_TIME"
DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID"
REASON = "__RMQ.SPARK.REASON"
OWN_PROPERTIES = frozenset(
    (RETRY_TOPIC, ORIGIN_MESSAGE_ID, RECONSUME_TIME, DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID, REASON)
)

NEEDED_COLUMNS = ("topic", "queue_id", "queue_offset", "msg_id", "tags", "keys", "sharding_key", "properties", "body")
"""Columns of the source without which a message cannot be consumed and sent again."""


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    return DLQ_PREFIX + group


def restored(messages: pa.Table) -> pa.Table:
    """Return messages with the column ``reconsume_times``. Retries get back their original topic, id and properties."""
    is_retry = pc.fill_null(pc.starts_with(messages["topic"], RETRY_PREFIX), False)
    if not pc.any(is_retry).as_py():
        return with_zero_retries(messages)
    columns = {name: messages[name].to_pylist() for name in ("topic", "msg_id", "properties")}
    times: list[int] = []
    for row, row_is_retry in enumerate(is_retry.to_pylist()):
        properties = dict(columns["properties"][row] or ())
        times.append(int(properties.get(RECONSUME_TIME, 0)) if row_is_retry else 0)
        if row_is_retry:
            columns["topic"][row] = properties.get(RETRY_TOPIC, columns["topic"][row])
            columns["msg_id"][row] = properties.get(ORIGIN_MESSAGE_ID, columns["msg_id"][row])
            kept = [(k, v) for k, v in properties.items() if k not in OWN_PROPERTIES]
            columns["properties"][row] = kept or None
    for name, values in columns.items():
        column_type = PROPERTIES if name == "properties" else pa.string()
        messages = messages.set_column(messages.column_names.index(name), name, pa.array(values, column_type))
    return messages.append_column("reconsume_times", pa.array(times, pa.int32()))


def with_zero_retries(messages: pa.Table) -> pa.Table:
    return messages.append_column("reconsume_times", pa.repeat(pa.scalar(0, pa.int32()), messages.num_rows))


def tried(messages: pa.Table, times: int) -> pa.Table:
    """Add to the first message's ``reconsume_times`` its tries in its place, as in mode ``orderly``."""
    if not times:
        return messages
    name = "reconsume_times"
    counts = messages[name].to_pylist()
    counts[0] += times
    return messages.set_column(messages.column_names.index(name), name, pa.array(counts, pa.int32()))


def require_retry_options(max_reconsume_times: int | None, delay_level: int | None) -> None:
    """Raise OptionError for values that are out of range."""
    if max_reconsume_times is not None:
        whole_number(max_reconsume_times, "max_reconsume_times", 0, RECONSUME_TIMES_MAX)
    if delay_level is not None:
        whole_number(delay_level, "delay_level", 1, len(DELAY_LEVELS_S))


def sent_back(
    messages: pa.Table, reasons: Sequence[str | None], group: str, reconsume_max: int, delay_level: int | None
) -> pa.Table:
    """Turn messages that were not consumed, as :func:`restored` returns them, into retries with a delay, or into dead
    letters after too many retries. Without ``delay_level`` the delay rises with each retry. RocketMQ calls this
    ``sendMessageBack``."""
    columns = ["tags", "keys", "sharding_key", "body"]
    columns += [name for name in ("born_timestamp",) if name in messages.column_names]
    rows: list[dict[str, Any]] = []
    for row, reason in zip(messages.to_pylist(), reasons, strict=True):
        times = row["reconsume_times"]
        is_dead = times >= reconsume_max
        properties = {k: v for k, v in (row["properties"] or ()) if k not in OWN_PROPERTIES}
        origin = {DLQ_ORIGIN_TOPIC: row["topic"], DLQ_ORIGIN_MESSAGE_ID: row["msg_id"]} if is_dead else {}
        retry_properties = {RETRY_TOPIC: row["topic"], ORIGIN_MESSAGE_ID: row["msg_id"]}
        retry_properties |= {RECONSUME_TIME: str(times if is_dead else times + 1), REASON: reason or ""}
        level = delay_level or min(FIRST_DELAY_LEVEL + times, len(DELAY_LEVELS_S))
        rows.append(
            {
                **{name: row[name] for name in columns},
                "topic": dlq_topic(group) if is_dead else retry_topic(group),
                "properties": list({**properties, **retry_properties, **origin}.items()),
                "delay_level": None if is_dead else level,
            }
        )
    schema = pa.schema(
        [
            *((name, messages.schema.field(name).type) for name in columns),
            ("topic", pa.string()),
            ("properties", PROPERTIES),
            ("delay_level", pa.int32()),
        ]
    )
    return pa.Table.from_pylist(rows, schema=schema)
