"""How far consumer groups have come: their lag by queue, and their dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow.compute as pc

from rmq_spark._core.inspect.history import retained_batches
from rmq_spark._core.log.op_walk import walk_placements
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.own_sends import resend_name
from rmq_spark._core.vocabulary.message import DLQ_PREFIX
from rmq_spark._core.vocabulary.queues import Queue

PROGRESS_COLUMNS = ("updated", "updated_by", "suspended_until", "owner", "generation")
"""Columns of the table ``groups`` that a queue's lag repeats."""
QueueOffset = tuple[Queue, int]
"""One offset of one queue."""


def queue_lags(
    progress: Sequence[Mapping[str, Any]],
    topics: Mapping[str, int],
    tails: Mapping[Queue, int],
    firsts: Mapping[Queue, int],
    now: datetime,
    times_of: Callable[[set[QueueOffset]], Mapping[QueueOffset, datetime]],
) -> list[dict[str, Any]]:
    """Return how far consumer groups are behind, a row for each queue of the topics that they read.

    Parameters
    ----------
    progress : sequence of mapping
        Rows of the table ``groups``.
    topics : mapping of str to int
        The number of queues of each topic.
    tails, firsts : mapping of Queue to int
        The next offset, and the first one that is kept: expired messages are in no group's lag.
    times_of : callable
        Returns when the messages at these offsets were committed, as :func:`commit_times` does.

    Returns
    -------
    list of dict
        ``consumer_group, topic, queue_id, next_offset, end_offset, lag, lag_seconds``, and :data:`PROGRESS_COLUMNS`.
    """
    known = {(row["consumer_group"], (row["topic"], row["queue_id"])): row for row in progress}
    names = sorted({(row["consumer_group"], row["topic"]) for row in progress})
    queues = [(group, (topic, queue_id)) for group, topic in names for queue_id in range(topics.get(topic, 0))]
    reached = {key: int(known[key]["next_offset"]) if key in known else firsts.get(key[1], 0) for key in queues}
    unread = {(group, queue): (queue, max(n, firsts.get(queue, 0))) for (group, queue), n in reached.items()}
    times = times_of({(queue, offset) for queue, offset in unread.values() if offset < tails.get(queue, 0)})
    return [
        {
            "consumer_group": group,
            "topic": queue[0],
            "queue_id": queue[1],
            "next_offset": reached[group, queue],
            "end_offset": tails.get(queue, 0),
            "lag": max(0, tails.get(queue, 0) - first_unread[1]),
            "lag_seconds": max(0.0, (now - times[first_unread]).total_seconds()) if first_unread in times else 0.0,
            **{name: known.get((group, queue), {}).get(name) for name in PROGRESS_COLUMNS},
        }
        for (group, queue), first_unread in unread.items()
    ]


def commit_times(engine: Engine, queue_offsets: Iterable[QueueOffset]) -> dict[QueueOffset, datetime]:
    """Return when the messages at these offsets were committed. The caller must have read ``op``."""
    times: dict[QueueOffset, datetime] = {}
    missing = sorted(queue_offsets)
    while missing:  # several groups may stand at different offsets of one queue
        offsets: dict[Queue, int] = {}
        later = [pair for pair in missing if offsets.setdefault(*pair) != pair[1]]
        times |= {(queue, offsets[queue]): time for queue, time in waiting_since(engine, offsets).items()}
        missing = later
    return times


def waiting_since(engine: Engine, behind: Mapping[Queue, int]) -> dict[Queue, datetime]:
    """Return the commit time of the message at each queue's offset. The caller must have read ``op``."""
    commit_times: dict[Queue, datetime] = {}
    border = engine.drained.border() if behind else {}
    commit_times |= engine.drained.times_of({q: offset for q, offset in behind.items() if offset < border.get(q, 0)})
    unresolved = {queue: offset for queue, offset in behind.items() if queue not in commit_times}
    for rows, _ in walk_placements(engine.op_table, above=min(unresolved.values(), default=0)) if unresolved else ():
        for (topic, queue_id), offset in list(unresolved.items()):
            of_queue = pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["queue_id"], queue_id))
            covers = pc.and_(pc.less_equal(rows["queue_offset"], offset), pc.greater(rows["next_offset"], offset))
            times = rows.filter(pc.and_(of_queue, covers))["op_time"]
            if len(times):
                commit_times[(topic, queue_id)] = times[0].as_py()
                del unresolved[(topic, queue_id)]
        if not unresolved:
            break
    return commit_times


def retained_letters(committed: Mapping[str, int], expired: Mapping[str, int]) -> dict[str, int]:
    """Return by consumer group how many dead letters a log keeps, sent again or not, from numbers by topic."""
    return {
        topic.removeprefix(DLQ_PREFIX): count - expired.get(topic, 0)
        for topic, count in committed.items()
        if topic.startswith(DLQ_PREFIX)
    }


def waiting_letters(engine: Engine, group: str) -> int:
    """Return how many of a group's dead letters have not been sent again. It reads no message."""
    topic, firsts, tails = DLQ_PREFIX + group, engine.firsts(), engine.tails()
    queue_offsets = [range(firsts.get(queue, 0), tail) for queue, tail in tails.items() if queue[0] == topic]
    if not any(queue_offsets):
        return 0
    resent_offsets = resend_times(engine, group)
    return sum(len(offsets) - sum(offset in offsets for offset in resent_offsets) for offsets in queue_offsets)


def resend_times(engine: Engine, group: str) -> dict[int, datetime]:
    """Return the times at which a group's dead letters were sent again, by the letters' offsets."""
    prefix, batches = resend_name(group, ""), retained_batches(engine)
    sent = batches.filter(pc.starts_with(batches["half_id"], prefix)).select(["half_id", "prepared_at"])
    rows = ((row["half_id"].removeprefix(prefix).partition(":")[0], row["prepared_at"]) for row in sent.to_pylist())
    return {int(offset): time for offset, time in rows if offset.isdecimal()}  # a longer group name may begin alike
