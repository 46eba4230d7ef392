"""Consumer groups: reports their positions and lag, and moves their positions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.inspect.group_lag import commit_times, queue_lags
from rmq_spark._core.inspect.unsettled import open_messages as open_messages_of
from rmq_spark._core.log.heartbeats import Heartbeat, forget, heartbeats
from rmq_spark._core.log.message_range import out_of_range
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.reads.offsets import EARLIEST, LATEST, LATEST_OFFSET, JsonOffsets, Positions, given_positions
from rmq_spark._core.reads.plan import Planner
from rmq_spark._core.reads.read_options import Subscription
from rmq_spark._core.vocabulary.message import TIMESTAMP, require_group_name, require_topic_name
from rmq_spark._core.vocabulary.options import nearest, require_time
from rmq_spark.errors import GroupNotFoundError, OffsetOutOfRangeError, OptionError

LAG_SCHEMA = pa.schema(
    [
        ("consumer_group", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("next_offset", pa.int64()),
        ("end_offset", pa.int64()),
        ("lag", pa.int64()),
        ("lag_seconds", pa.float64()),
        ("pending", pa.int64()),
        ("waiting", pa.int64()),
        ("updated", TIMESTAMP),
        ("updated_by", pa.string()),
        ("suspended_until", TIMESTAMP),
        ("owner", pa.string()),
        ("generation", pa.int64()),
        ("heartbeat_seconds", pa.float64()),
        ("lease_seconds", pa.float64()),
    ]
)


class ConsumerGroup:
    """One consumer group of a commit log (RocketMQ: ``mqadmin consumerProgress``, ``resetOffsetByTime``).

    A stream with the option ``consumerGroup`` publishes its positions here, and starts at them when it has no
    checkpoint.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    name : str
        Name of the group. The group need not have read anything yet.
    storage_options : mapping, optional
        For a path: passed to delta-rs.
    """

    def __init__(
        self,
        log: CommitLog | Engine | str | os.PathLike[str],
        name: str,
        *,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine_of(log, storage_options)
        self.name = require_group_name(name, "consumerGroup")

    def __repr__(self) -> str:
        return f"ConsumerGroup({self.engine!r}, {self.name!r})"

    # ------------------------------------------------------------------ looking
    def positions(self) -> Positions:
        """Return the next offset of every queue that the group has read from, by (topic, queue_id)."""
        return self.engine.groups.next_offsets(self.name)

    def lag(self) -> pa.Table:
        """Return how far the group is behind, one row for each queue of the topics that it reads.

        Returns
        -------
        pyarrow.Table
            ``consumer_group, topic, queue_id, next_offset, end_offset``; ``lag``, the visible messages that are not
            read; ``lag_seconds`` since the first of them was committed (0 without lag); ``pending`` half messages and
            ``waiting`` messages (committed, but delayed or held for order), neither of which counts as lag;
            ``updated`` and ``updated_by``; ``suspended_until`` of a queue that an orderly listener has suspended; for a
            group of ``PushConsumer`` s, the queue's ``owner`` and ``generation``, ``heartbeat_seconds`` since the
            owner's newest heartbeat, and the owner's ``lease_seconds`` (null without a heartbeat). An owner whose
            heartbeat is older than its lease is dead.

        Raises
        ------
        GroupNotFoundError
            When the group has no progress.
        """
        rows = self._lag_rows()
        open_messages, beats = open_messages_of(self.engine), self.members()
        for row in rows:
            row["pending"], row["waiting"] = open_messages.get((row["topic"], row["queue_id"]), (0, 0))
            row["heartbeat_seconds"], row["lease_seconds"] = beats.get(row["owner"], (None, None))
        return pa.Table.from_pylist(rows, schema=LAG_SCHEMA)

    def _lag_rows(self) -> list[dict[str, Any]]:
        engine = self.engine
        progress, tails = self._progress_rows().to_pylist(), engine.tails()
        firsts, now = engine.firsts(refresh=False), engine.runtime.now()
        return queue_lags(progress, engine.topics(), tails, firsts, now, partial(commit_times, engine))

    def members(self) -> dict[str, Heartbeat]:
        """Return the newest heartbeat of each :class:`PushConsumer` and :class:`PullConsumer` of the group.

        Returns
        -------
        dict of str to Heartbeat
            ``age_s`` and the member's own ``lease_s``, both in seconds, and ``is_alive``. A killed member
            is listed for a few more leases, and is not alive.
        """
        return dict(sorted(heartbeats(self.engine.groups.table, self.name, self.engine.runtime.now()).items()))

    def _progress_rows(self) -> pa.Table:
        rows = self.engine.groups.rows(self.name)
        if rows.num_rows == 0:
            known_groups = groups(self.engine)
            hint = nearest(self.name, known_groups) if known_groups else "no group has read from this commit log yet"
            raise GroupNotFoundError(f"consumer group {self.name!r} has no progress ({hint})")
        return rows

    def _topics_read(self) -> set[str]:
        try:
            return set(self._progress_rows()["topic"].to_pylist())
        except GroupNotFoundError as problem:
            raise GroupNotFoundError(f"{problem}. Name its topics to say where a new group begins") from None

    # ------------------------------------------------------------------ moving
    def reset(
        self, to: str | datetime | JsonOffsets, topics: Iterable[str] | None = None, others_stay: bool = False
    ) -> Positions:
        """Move the group's positions forwards or backwards, and return the new ones.

        A query with a checkpoint continues from its checkpoint. So stop the query, reset the group, and start the query
        with a new ``checkpointLocation``. A :class:`PushConsumer` need not stop: it notices the reset when it next
        writes progress or a heartbeat, and continues from the new position.

        Parameters
        ----------
        to : str, datetime or mapping
            ``"earliest"``, ``"latest"``, a time with a time zone (the first message committed then or later), or the
            offset of every queue: ``{"orders": {"0": 23, "1": 7}}``. -2 stands for the first message that is kept,
            and -1 for the end.
        topics : iterable of str, optional
            When not given: the topics of the offsets in ``to``, else those that the group has read.
        others_stay : bool
            True: a queue that the offsets do not name keeps its position, as with ``kafka-consumer-groups`` and
            ``txmq group reset``. False: it is an error.

        Raises
        ------
        OptionError, OffsetError, OffsetOutOfRangeError, TopicNotFoundError, GroupNotFoundError
        """
        if topics is not None:
            is_list = isinstance(topics, Iterable) and not isinstance(topics, (str, bytes))
            topics = [require_topic_name(name, own=True) for name in (topics if is_list else [topics])]
        target: str | datetime | Positions
        if isinstance(to, datetime):
            target = require_time(to, "to")
        elif isinstance(to, str):
            if to not in (EARLIEST, LATEST):
                raise OptionError(
                    f"{to!r} is neither 'earliest' nor 'latest', nor a datetime, nor offsets", argument="to"
                )
            target = to
        else:
            target = given_positions(to, "to")
        if isinstance(target, dict) and topics is None:
            topic_names: Sequence[str] = sorted({topic for topic, _ in target})
        else:
            topic_names = sorted(set(topics) if topics is not None else self._topics_read())
        if not topic_names:
            raise OptionError("no topic is named: there is nothing to reset")
        subscription = Subscription(tuple(require_topic_name(name, own=True) for name in topic_names))
        planner = Planner(self.engine, subscription)
        if others_stay and isinstance(target, dict):
            positions = self._resolve_named(planner, target)
        else:
            positions = planner.resolve("to", target)
        if isinstance(target, dict):
            firsts = self.engine.firsts(refresh=False)
            for queue, offset in positions.items():
                if offset < firsts.get(queue, 0):
                    raise OffsetOutOfRangeError(out_of_range(*queue, offset, offset + 1, firsts))
        self.engine.groups.set(self.name, positions, f"reset to {to if isinstance(to, (str, datetime)) else 'offsets'}")
        return positions

    @staticmethod
    def _resolve_named(planner: Planner, offsets: Positions) -> Positions:
        """Resolve these offsets, and leave other queues out. A topic without an offset is an error."""
        queues = planner.queues()
        for topic in queues:
            if not any(queue[0] == topic for queue in offsets):
                raise OptionError(
                    f"no offset of topic {topic!r} is given: give one for a queue of it, or leave out the topic"
                )
        all_offsets = copy(offsets)  # it may be a CountedPositions, which names its log
        for topic, count in queues.items():
            for queue_id in range(count):
                all_offsets.setdefault((topic, queue_id), LATEST_OFFSET)
        resolved = planner.resolve("to", all_offsets)
        return {queue: offset for queue, offset in resolved.items() if queue in offsets}

    def clone(self, name: str) -> ConsumerGroup:
        """Give another group the progress of this one (RocketMQ: ``cloneGroupOffset``).

        Raises
        ------
        OptionError
            When the other group has progress of its own.
        GroupNotFoundError
            When this group has no progress.
        """
        target = ConsumerGroup(self.engine, name)
        positions = dict(self.positions())
        self._progress_rows()
        if target.positions():
            raise OptionError(
                f"consumer group {name!r} has progress of its own: delete it first, or choose another name"
            )
        self.engine.groups.set(name, positions, f"cloned from {self.name}")
        return target

    def hand_over(self) -> bool:
        """Let another kind of consumer read for the group: Spark after a :class:`PushConsumer`, or the reverse.

        Stop the group's consumers first. Their progress is kept, and what they report later is refused.

        Returns
        -------
        bool
            False when the group has no progress.
        """
        return self.engine.groups.hand_over(self.name, "handed over")

    def delete(self) -> bool:
        """Delete the group's progress and its members' heartbeats; False when it had no progress."""
        had_progress = self.engine.groups.delete(self.name)
        forget(self.engine.groups.table, self.name)
        return had_progress


def groups(engine: Engine) -> list[str]:
    return sorted(pc.unique(engine.groups.rows()["consumer_group"]).to_pylist())
