"""Consumer groups: tells how far they have read and how far they are behind, and moves their positions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.consumers.heartbeats import Heartbeat, forget, heartbeats
from rmq_spark._core.inspect.overview import open_messages as open_messages_of
from rmq_spark._core.log.placements import out_of_range
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.reads.offsets import (
    EARLIEST,
    LATEST,
    LATEST_OFFSET,
    JsonOffsets,
    Positions,
    Queue,
    given_positions,
)
from rmq_spark._core.reads.options import Subscription
from rmq_spark._core.reads.plan import Planner
from rmq_spark._core.vocabulary.message import TIMESTAMP, require_group_name, require_topic_name
from rmq_spark._core.vocabulary.options import nearest, require_time
from rmq_spark.errors import GroupNotFoundError, OffsetOutOfRangeError, OptionError

BEHIND_SCHEMA = pa.schema(
    [
        ("consumer_group", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("next_offset", pa.int64()),
        ("end_offset", pa.int64()),
        ("lag", pa.int64()),
        ("lag_seconds", pa.float64()),
    ]
)
LAG_SCHEMA = pa.schema(
    [
        *BEHIND_SCHEMA,
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
_OF_PROGRESS = ("updated", "updated_by", "suspended_until", "owner", "generation")


class ConsumerGroup:
    """One consumer group of a commit log (RocketMQ: ``mqadmin consumerProgress``, ``resetOffsetByTime``).

    A stream with the option ``consumerGroup`` publishes its positions here. Without a checkpoint it starts at them.

    Parameters
    ----------
    log : CommitLog or path
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
        self.log = engine_of(log, storage_options)
        self.name = require_group_name(name, "consumerGroup")

    def __repr__(self) -> str:
        return f"ConsumerGroup({self.log!r}, {self.name!r})"

    # ------------------------------------------------------------------ looking
    def positions(self) -> Positions:
        """Return the next offset of every queue that the group has read from, by (topic, queue_id)."""
        return self.log.groups.positions(self.name)

    def lag(self) -> pa.Table:
        """Return how far the group is behind, with a row for each queue of the topics that it reads.

        Returns
        -------
        pyarrow.Table
            ``consumer_group, topic, queue_id, next_offset, end_offset``; ``lag``, the messages that are visible and not
            read; ``lag_seconds`` since the first of them was committed (0 when there is none); ``pending`` half
            messages and ``waiting`` messages (committed, but delayed or held for order), neither of which is in the
            lag; ``updated`` and ``updated_by``; ``suspended_until`` of a queue that an orderly listener has suspended;
            of a group of ``PushConsumer`` s the ``owner`` of the queue, its ``generation``, and ``heartbeat_seconds``
            since the owner's newest heartbeat and its ``lease_seconds`` (null: it has no heartbeat). An owner with more
            seconds than its lease is dead.

        Raises
        ------
        GroupNotFoundError
            When the group has no progress.
        """
        known = {(r["topic"], r["queue_id"]): r for r in self._rows().to_pylist()}
        open_messages = open_messages_of(self.log)
        beats = self.members()
        found = self._behind(known)
        for row in found:
            queue = (row["topic"], row["queue_id"])
            row["pending"], row["waiting"] = open_messages.get(queue, (0, 0))
            row.update({name: known[queue][name] if queue in known else None for name in _OF_PROGRESS})
            row["heartbeat_seconds"], row["lease_seconds"] = beats.get(row["owner"], (None, None))
        return pa.Table.from_pylist(found, schema=LAG_SCHEMA)

    def behind(self) -> pa.Table:
        """Return how far the group is behind, as :meth:`lag` does, and nothing else. It reads no half batch, so it is
        quick also when many are pending.

        Returns
        -------
        pyarrow.Table
            ``consumer_group, topic, queue_id, next_offset, end_offset, lag, lag_seconds``.

        Raises
        ------
        GroupNotFoundError
            When the group has no progress.
        """
        known = {(r["topic"], r["queue_id"]): r for r in self._rows().to_pylist()}
        return pa.Table.from_pylist(self._behind(known), schema=BEHIND_SCHEMA)

    def _behind(self, known: Mapping[Queue, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """For each queue of the topics of a group with this progress, how far it is behind."""
        queues_of = self.log.topics()
        names = sorted({topic for topic, _ in known})
        tails = self.log.tails()
        queues = [(t, q) for t in names for q in range(queues_of.get(t, 0))]
        firsts = self.log.firsts()
        start = {queue: known[queue]["next_offset"] if queue in known else firsts.get(queue, 0) for queue in queues}
        left = {queue: max(offset, firsts.get(queue, 0)) for queue, offset in start.items()}  # what expired is not
        since = waiting_since(self.log, {q: n for q, n in left.items() if n < tails.get(q, 0)})
        now = self.log.machine.now()
        return [
            {
                "consumer_group": self.name,
                "topic": queue[0],
                "queue_id": queue[1],
                "next_offset": start[queue],
                "end_offset": tails.get(queue, 0),
                "lag": max(0, tails.get(queue, 0) - left[queue]),
                "lag_seconds": max(0.0, (now - since[queue]).total_seconds()) if queue in since else 0.0,
            }
            for queue in queues
        ]

    def members(self) -> dict[str, Heartbeat]:
        """Return the members of the group and each one's newest heartbeat: those of a :class:`PushConsumer` or a
        :class:`PullConsumer`.

        Returns
        -------
        dict of str to Heartbeat
            ``age_s`` and the member's own ``lease_s``, both in seconds, and ``is_alive``. A member that was killed
            stays here for a few leases, and is not alive.
        """
        beats = heartbeats(self.log.groups.table, self.name, self.log.machine.now())
        return dict(sorted(beats.items()))

    def _rows(self) -> pa.Table:
        rows = self.log.groups.rows(self.name)
        if rows.num_rows == 0:
            names = pc.unique(self.log.groups.rows()["consumer_group"]).to_pylist()
            hint = nearest(self.name, names) if names else "no group has read from this commit log yet"
            raise GroupNotFoundError(f"consumer group {self.name!r} has no progress ({hint})")
        return rows

    def _topics_read(self) -> set[str]:
        try:
            return set(self._rows()["topic"].to_pylist())
        except GroupNotFoundError as problem:
            raise GroupNotFoundError(f"{problem}. Name its topics to say where a new group begins") from None

    # ------------------------------------------------------------------ moving
    def reset(
        self, to: str | datetime | JsonOffsets, topics: Iterable[str] | None = None, others_stay: bool = False
    ) -> Positions:
        """Move the group's positions forwards or backwards, and return those that were moved to.

        A query that has a checkpoint goes on where the checkpoint says. So stop the query, reset the group, and start
        the query with a new ``checkpointLocation``. A :class:`PushConsumer` need not stop: it notices at its next
        progress or heartbeat, and goes on at the new position.

        Parameters
        ----------
        to : str, datetime or mapping
            ``"earliest"``, ``"latest"``, a time with a time zone (the first message committed then or later), or the
            offset of every queue: ``{"orders": {"0": 23, "1": 7}}``. -2 stands for the first message that is kept,
            and -1 for the end.
        topics : iterable of str, optional
            When not given: the topics of the offsets in ``to``, else those that the group has read.
        others_stay : bool
            True: a queue that the offsets do not name stays where it is, as with ``kafka-consumer-groups`` and
            ``txmq group reset``. False: it is an error.

        Raises
        ------
        OptionError, OffsetError, OffsetOutOfRangeError, TopicNotFoundError, GroupNotFoundError
        """
        if topics is not None:
            listed = isinstance(topics, Iterable) and not isinstance(topics, (str, bytes))
            topics = (
                [require_topic_name(name, own=True) for name in topics]
                if listed
                else [require_topic_name(topics, own=True)]
            )
        given: str | datetime | Positions
        if isinstance(to, datetime):
            given = require_time(to, "to")
        elif isinstance(to, str):
            if to not in (EARLIEST, LATEST):
                raise OptionError(f"to={to!r} is neither 'earliest' nor 'latest', nor a datetime, nor offsets")
            given = to
        else:
            given = given_positions(to, "to")
        if isinstance(given, dict) and topics is None:
            names: Sequence[str] = sorted({topic for topic, _ in given})
        else:
            names = sorted(set(topics) if topics is not None else self._topics_read())
        if not names:
            raise OptionError("no topic is named: there is nothing to reset")
        subscription = Subscription(tuple(require_topic_name(name, own=True) for name in names))
        planner = Planner(self.log, subscription)
        if others_stay and isinstance(given, dict):
            positions = self._only_named(planner, given)
        else:
            positions = planner.resolve("to", given)
        if isinstance(given, dict):
            firsts = self.log.firsts(refresh=False)
            for queue, offset in positions.items():
                if offset < firsts.get(queue, 0):
                    raise OffsetOutOfRangeError(f"{out_of_range(*queue, offset, offset + 1, firsts)}")
        self.log.groups.set(self.name, positions, f"reset to {to if isinstance(to, (str, datetime)) else 'offsets'}")
        return positions

    @staticmethod
    def _only_named(planner: Planner, given: Positions) -> Positions:
        """Return these offsets, after a look at whether the log has them. A topic without any is an error."""
        queues = planner.queues()
        for topic in queues:
            if not any(queue[0] == topic for queue in given):
                raise OptionError(f"to names no queue of topic {topic!r}: give offsets of it, or leave out the topic")
        every = copy(given)  # a CountedPositions says of which log
        for topic, count in queues.items():
            for queue_id in range(count):
                every.setdefault((topic, queue_id), LATEST_OFFSET)
        resolved = planner.resolve("to", every)
        return {queue: offset for queue, offset in resolved.items() if queue in given}

    def clone(self, name: str) -> ConsumerGroup:
        """Give another group the progress of this one (RocketMQ: ``cloneGroupOffset``).

        Raises
        ------
        OptionError
            When the other group has progress of its own.
        GroupNotFoundError
            When this group has no progress.
        """
        other = ConsumerGroup(self.log, name)
        positions = dict(self.positions())
        self._rows()
        if other.positions():
            raise OptionError(
                f"consumer group {name!r} has progress of its own: delete it first, or choose another name"
            )
        self.log.groups.set(name, positions, f"cloned from {self.name}")
        return other

    def hand_over(self) -> bool:
        """Let others read for the group: Spark after a :class:`PushConsumer`, or the other way round.

        Stop those that read for it until now. Their progress stays, and what they still report is refused.

        Returns
        -------
        bool
            False when the group has no progress.
        """
        return self.log.groups.hand_over(self.name, "handed over")

    def delete(self) -> bool:
        """Forget the group: its progress, and its members' heartbeats. Returns False when it had no progress."""
        known = self.log.groups.delete(self.name)
        forget(self.log.groups.table, self.name)
        return known


def waiting_since(log: Engine, behind: Mapping[Queue, int]) -> dict[Queue, datetime]:
    """Return when the message at each of these offsets was committed. ``op`` must have been read before."""
    found: dict[Queue, datetime] = {}
    border = log.drained.border() if behind else {}
    found |= log.drained.times_of({q: offset for q, offset in behind.items() if offset < border.get(q, 0)})
    left = {queue: offset for queue, offset in behind.items() if queue not in found}
    for rows, _ in log.placements(above=min(left.values(), default=0)) if left else ():
        for (topic, queue_id), offset in list(left.items()):
            of_queue = pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["queue_id"], queue_id))
            holds = pc.and_(pc.less_equal(rows["queue_offset"], offset), pc.greater(rows["next_offset"], offset))
            times = rows.filter(pc.and_(of_queue, holds))["op_time"]
            if len(times):
                found[(topic, queue_id)] = times[0].as_py()
                del left[(topic, queue_id)]
        if not left:
            break
    return found


def groups(log: Engine) -> list[str]:
    """Return the consumer groups that have progress in a commit log."""
    return sorted(pc.unique(log.groups.rows()["consumer_group"]).to_pylist())
