"""Dead letters: lists the messages that a consumer group gave up on, and sends them again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.consumers.consumer_group import groups
from rmq_spark._core.consumers.own_messages import send_each
from rmq_spark._core.consumers.retry import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    OWN_PROPERTIES,
    REASON,
    RECONSUME_TIME,
    dlq_topic,
    retry_topic,
)
from rmq_spark._core.inspect.group_lag import resend_times, waiting_letters
from rmq_spark._core.messages.message_reader import read_topic
from rmq_spark._core.messages.messages_table import SOURCE_SCHEMA
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.own_sends import resend_name
from rmq_spark._core.vocabulary.message import DLQ_PREFIX, PROPERTIES, RETRY_PREFIX, TIMESTAMP, require_group_name
from rmq_spark._core.vocabulary.options import nearest, whole_number
from rmq_spark.errors import GroupNotFoundError, OffsetError


class DeadLetters:
    """The messages in ``%DLQ%group``, as RocketMQ's dashboard lists and resends them.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    group : str
        The consumer group.
    storage_options : mapping, optional
        For a path: passed to delta-rs.
    """

    def __init__(
        self,
        log: CommitLog | Engine | str | os.PathLike[str],
        group: str,
        *,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine_of(log, storage_options)
        self.group = require_group_name(group, "consumerGroup")

    def list(self, limit: int | None = None) -> pa.Table:
        """Return the dead letters, oldest first.

        Returns
        -------
        pyarrow.Table
            ``queue_offset`` (identifies the letter), ``topic`` and ``msg_id`` of the original message, ``tags, keys,
            sharding_key, properties, body, born_timestamp``, ``reconsume_times``, ``reason``, ``died`` (when it
            became a dead letter) and ``resent`` (when it was sent again).

        Raises
        ------
        GroupNotFoundError
            When the log does not know the group.
        """
        letters = self._read(limit)
        properties = [dict(m or ()) for m in letters["properties"].to_pylist()]
        own_properties = [{k: m.get(k) for k in OWN_PROPERTIES} for m in properties]
        user_properties = [[(k, v) for k, v in m.items() if k not in OWN_PROPERTIES] or None for m in properties]
        columns = {
            "queue_offset": letters["queue_offset"],
            "topic": pa.array([m[DLQ_ORIGIN_TOPIC] for m in own_properties], pa.string()),
            "msg_id": pa.array([m[DLQ_ORIGIN_MESSAGE_ID] for m in own_properties], pa.string()),
            **{name: letters[name] for name in ("tags", "keys", "sharding_key")},
            "properties": pa.array(user_properties, PROPERTIES),
            "body": letters["body"],
            "born_timestamp": letters["born_timestamp"],
            "reconsume_times": pa.array([int(m[RECONSUME_TIME] or 0) for m in own_properties], pa.int32()),
            "reason": pa.array([m[REASON] for m in own_properties], pa.string()),
            "died": letters["commit_timestamp"],
            "resent": pa.array(self._resend_times_at(letters["queue_offset"].to_pylist()), TIMESTAMP),
        }
        return pa.table(columns)

    def waiting(self) -> int:
        """Return how many dead letters have not been sent again. It reads no message."""
        return waiting_letters(self.engine, self.group)

    def _resend_times_at(self, offsets: Sequence[int]) -> Sequence[datetime | None]:
        times = resend_times(self.engine, self.group) if offsets else {}
        return [times.get(offset) for offset in offsets]

    def resend(self, offsets: Iterable[int] | None = None) -> int:
        """Send dead letters to this group again, and to no other group. Their retries are counted from 0 again.

        Parameters
        ----------
        offsets : iterable of int, optional
            ``queue_offset`` of each letter; all letters when not given. A letter is sent again at most once, for as
            long as the log keeps it.

        Returns
        -------
        int
            Number of letters that this call sent.

        Raises
        ------
        OffsetError
            When an offset has no letter; nothing is sent.
        """
        table = self._read(None)
        kept = table["queue_offset"].to_pylist()
        if not (offsets is None or isinstance(offsets, Iterable)):
            raise OffsetError(f"offsets={offsets!r} is no list: each letter's queue_offset is expected, as in [0, 2]")
        chosen = kept if offsets is None else sorted({whole_number(o, "offset", 0) for o in offsets})
        unknown = [o for o in chosen if o not in set(kept)]
        if unknown:
            kept_range = f"it has those from {kept[0]} to {kept[-1]}" if kept else "it has none"
            raise OffsetError(f"group {self.group!r} has no dead letter {unknown[0]}: {kept_range}")
        letters = table.filter(pc.is_in(table["queue_offset"], value_set=pa.array(chosen, pa.int64())))
        names = [resend_name(self.group, offset) for offset in chosen]
        return send_each(self.engine, self.group, names, _messages_to_resend(letters, self.group))

    def _read(self, limit: int | None) -> pa.Table:
        topics = self.engine.topics()
        if dlq_topic(self.group) not in topics:
            self._require_group(topics)
            return SOURCE_SCHEMA.empty_table()
        return read_topic(self.engine, dlq_topic(self.group), limit=limit)

    def _require_group(self, topics: Iterable[str]) -> None:
        own_prefixes = (RETRY_PREFIX, DLQ_PREFIX)
        known = {*groups(self.engine), *(t.removeprefix(p) for t in topics for p in own_prefixes if t.startswith(p))}
        if self.group not in known:
            hint = nearest(self.group, known) if known else "no group has read from this commit log yet"
            raise GroupNotFoundError(f"consumer group {self.group!r} is not known in this commit log ({hint})")


def _messages_to_resend(letters: pa.Table, group: str) -> pa.Table:
    dropped_names = (DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID, REASON)
    with_count = [{**dict(row or ()), RECONSUME_TIME: "0"} for row in letters["properties"].to_pylist()]
    properties = [[(k, v) for k, v in row.items() if k not in dropped_names] for row in with_count]
    messages = letters.select(["tags", "keys", "sharding_key", "body", "born_timestamp"])
    messages = messages.append_column("topic", pa.array([retry_topic(group)] * letters.num_rows, pa.string()))
    return messages.append_column("properties", pa.array(properties, PROPERTIES))
