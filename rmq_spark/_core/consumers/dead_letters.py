"""Dead letters: lists the messages that a consumer group gave up, and sends them again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.consumers.groups import groups
from rmq_spark._core.consumers.retry import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    OWN_PROPERTIES,
    REASON,
    RECONSUME_TIME,
    dlq_topic,
    retry_topic,
)
from rmq_spark._core.consumers.send import send_each
from rmq_spark._core.inspect.history import kept_batches
from rmq_spark._core.messages.reading import read_topic
from rmq_spark._core.messages.table import SOURCE_SCHEMA
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
        self.log = engine_of(log, storage_options)
        self.group = require_group_name(group, "consumerGroup")

    def list(self, limit: int | None = None) -> pa.Table:
        """Return the dead letters, oldest first; GroupNotFoundError for a group that has read nothing here.

        Returns
        -------
        pyarrow.Table
            ``queue_offset`` (identifies the letter), ``topic`` and ``msg_id`` of the original message, ``tags, keys,
            sharding_key, properties, body, born_timestamp``, ``reconsume_times``, ``reason``, ``died`` (when the group
            gave it up) and ``resent`` (when somebody sent it again).
        """
        read = self._read(limit)
        maps = [dict(m or ()) for m in read["properties"].to_pylist()]
        own = [{k: m.get(k) for k in OWN_PROPERTIES} for m in maps]
        kept = [[(k, v) for k, v in m.items() if k not in OWN_PROPERTIES] or None for m in maps]
        columns = {
            "queue_offset": read["queue_offset"],
            "topic": pa.array([m[DLQ_ORIGIN_TOPIC] for m in own], pa.string()),
            "msg_id": pa.array([m[DLQ_ORIGIN_MESSAGE_ID] for m in own], pa.string()),
            **{name: read[name] for name in ("tags", "keys", "sharding_key")},
            "properties": pa.array(kept, PROPERTIES),
            "body": read["body"],
            "born_timestamp": read["born_timestamp"],
            "reconsume_times": pa.array([int(m[RECONSUME_TIME] or 0) for m in own], pa.int32()),
            "reason": pa.array([m[REASON] for m in own], pa.string()),
            "died": read["commit_timestamp"],
            "resent": pa.array(self._resent(read["queue_offset"].to_pylist()), TIMESTAMP),
        }
        return pa.table(columns)

    def waiting(self) -> int:
        """Return how many letters are kept that nobody has sent again. It reads none."""
        topic, firsts, tails = DLQ_PREFIX + self.group, self.log.firsts(), self.log.tails()
        kept = [range(firsts.get(queue, 0), tail) for queue, tail in tails.items() if queue[0] == topic]
        if not any(kept):
            return 0
        sent = self._sent_again()
        return sum(len(offsets) - sum(offset in offsets for offset in sent) for offsets in kept)

    def _resent(self, offsets: Sequence[int]) -> Sequence[datetime | None]:
        """When each letter was sent again."""
        at = self._sent_again() if offsets else {}
        return [at.get(offset) for offset in offsets]

    def _sent_again(self) -> dict[int, datetime]:
        """The letters that were sent again, by their offsets, and when."""
        prefix, batches = resend_name(self.group, ""), kept_batches(self.log)
        mine = batches.filter(pc.starts_with(batches["half_id"], prefix)).select(["half_id", "prepared_at"])
        rows = ((row["half_id"].removeprefix(prefix).partition(":")[0], row["prepared_at"]) for row in mine.to_pylist())
        return {int(offset): at for offset, at in rows if offset.isdecimal()}  # another group's name may go on

    def resend(self, offsets: Iterable[int] | None = None) -> int:
        """Send dead letters to the group again. No other group gets them, and their count of retries begins anew.

        Parameters
        ----------
        offsets : iterable of int, optional
            ``queue_offset`` of each letter; all letters when not given. A letter is sent again only once, however often
            this is called, and however long ago that was: the log knows it for as long as the letter is there.

        Returns
        -------
        int
            How many letters this call sent.

        Raises
        ------
        OffsetError
            When there is no letter at an offset; nothing is sent.
        """
        read = self._read(None)
        there = read["queue_offset"].to_pylist()
        if not (offsets is None or isinstance(offsets, Iterable)):
            raise OffsetError(f"offsets={offsets!r} is no list: each letter's queue_offset is expected, as in [0, 2]")
        wanted = there if offsets is None else sorted({whole_number(o, "offset", 0) for o in offsets})
        unknown = [o for o in wanted if o not in set(there)]
        if unknown:
            known = f"it has those from {there[0]} to {there[-1]}" if there else "it has none"
            raise OffsetError(f"group {self.group!r} has no dead letter {unknown[0]}: {known}")
        letters = read.filter(pc.is_in(read["queue_offset"], value_set=pa.array(wanted, pa.int64())))
        names = [resend_name(self.group, offset) for offset in wanted]
        return send_each(self.log, self.group, names, _alive(letters, self.group))

    def _read(self, limit: int | None) -> pa.Table:
        topics = self.log.topics()
        if dlq_topic(self.group) not in topics:
            self._require_group(topics)
            return SOURCE_SCHEMA.empty_table()
        return read_topic(self.log, dlq_topic(self.group), limit=limit)

    def _require_group(self, topics: Iterable[str]) -> None:
        own = (RETRY_PREFIX, DLQ_PREFIX)
        known = {*groups(self.log), *(t.removeprefix(p) for t in topics for p in own if t.startswith(p))}
        if self.group not in known:
            hint = nearest(self.group, known) if known else "no group has read from this commit log yet"
            raise GroupNotFoundError(f"consumer group {self.group!r} is not known in this commit log ({hint})")


def _alive(letters: pa.Table, group: str) -> pa.Table:
    """Dead letters as they are sent again."""
    dropped = (DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID, REASON)
    properties = [{**dict(found or ()), RECONSUME_TIME: "0"} for found in letters["properties"].to_pylist()]
    kept = [[(k, v) for k, v in found.items() if k not in dropped] for found in properties]
    again = letters.select(["tags", "keys", "sharding_key", "body", "born_timestamp"])
    again = again.append_column("topic", pa.array([retry_topic(group)] * letters.num_rows, pa.string()))
    return again.append_column("properties", pa.array(kept, PROPERTIES))
