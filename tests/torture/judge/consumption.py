"""The anomaly checker of consumers: what their groups, listeners, retries, dead letters and results show.

Held against the messages of the log, whose own history ``anomalies.py`` judges. Each function returns sentences, one an
anomaly, and nothing when all is right; none is tolerated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow.compute as pc

from rmq_spark import CommitLog
from tests.support.inside import ORIGIN_MESSAGE_ID, RECONSUME_TIME, dlq_topic, retry_topic


@dataclass(frozen=True)
class Message:
    """A visible message of the topic that is consumed."""

    msg_id: str
    queue: int
    offset: int
    body: str


@dataclass(frozen=True)
class Delivery:
    """A message as a listener got it; ``times`` it had been consumed before."""

    msg_id: str
    queue: int
    offset: int
    times: int = 0


@dataclass(frozen=True)
class SentBack:
    """A message of ``%RETRY%group``: which one, for the how-manieth time, and when it was due and came."""

    msg_id: str
    times: int
    due: datetime
    came: datetime


def messages_of(log: CommitLog, topic: str) -> list[Message]:
    rows = log.read(topic, columns=["msg_id", "queue_id", "queue_offset", "body"]).to_pylist()
    return [Message(r["msg_id"], r["queue_id"], r["queue_offset"], r["body"].decode()) for r in rows]


def retries_of(log: CommitLog, group: str) -> list[SentBack]:
    """Those that have come; their times are read from the half table itself."""
    topic = retry_topic(group)
    files = log.engine.half.table.actions()["path"].to_pylist()
    half = log.engine.half.table.read(files, ["properties", "deliver_at"], pc.field("topic") == topic).to_pylist()
    due = {_origin(row): row["deliver_at"] for row in half}
    came = log.read(topic, columns=["properties", "commit_timestamp"]).to_pylist()
    return [SentBack(*_origin(row), due[_origin(row)], row["commit_timestamp"]) for row in came]


def dead_of(log: CommitLog, group: str) -> list[str]:
    """The messages that are dead, by their first ids."""
    return [_origin(row)[0] for row in log.read(dlq_topic(group), columns=["properties"]).to_pylist()]


def _origin(row: Mapping[str, Any]) -> tuple[str, int]:
    properties = dict(row["properties"])
    return properties[ORIGIN_MESSAGE_ID], int(properties[RECONSUME_TIME])


# ---------------------------------------------------------------- anomalies
def of_deliveries(messages: Sequence[Message], deliveries: Sequence[Delivery], whole: bool = True) -> list[str]:
    """Lost and made-up messages of a listener; ``whole``: it has come to the end."""
    known = {m.msg_id for m in messages}
    got = {d.msg_id for d in deliveries}
    lost = [f"never delivered: {m}" for m in messages if m.msg_id not in got] if whole else []
    return lost + [f"delivered, and in no topic: {d}" for d in deliveries if d.msg_id not in known]


def of_order(deliveries: Iterable[Delivery]) -> list[str]:
    """Of one queue after the other: a message before one that stands before it. Coming again is allowed."""
    found: list[str] = []
    following: dict[int, int] = defaultdict(int)
    for d in deliveries:
        if d.offset > following[d.queue]:
            found.append(f"out of order: {d} came when {following[d.queue]} was next")
        following[d.queue] = max(following[d.queue], d.offset + 1)
    return found


def of_progress(positions: Mapping[int, int], done: Iterable[tuple[int, int]]) -> list[str]:
    """A position (by queue) beyond a message that is not among what was done, which is (queue, offset)."""
    known = set(done)
    return [
        f"progress ahead: queue {queue} stands at {position}, and {offset} is not done"
        for queue, position in positions.items()
        for offset in range(position)
        if (queue, offset) not in known
    ]


def of_retries(
    messages: Sequence[Message],
    deliveries: Sequence[Delivery],
    retries: Sequence[SentBack],
    dead: Sequence[str],
    failures: Callable[[Message], int],
    times_max: int,
) -> list[str]:
    """Lost, doubled, early and causeless retries and dead letters.

    Parameters
    ----------
    failures : callable
        How often the listener fails with a message.
    times_max : int
        So often a message is consumed again before it dies.
    """
    found: list[str] = []
    for (msg_id, times), n in Counter((r.msg_id, r.times) for r in retries).items():
        if n > 1:
            found.append(f"retry {times} of {msg_id} is there {n} times")
    found += [f"retry before its time: {r}" for r in retries if r.came < r.due]
    found += [f"dead {n} times: {msg_id}" for msg_id, n in Counter(dead).items() if n > 1]
    there = {(r.msg_id, r.times) for r in retries}
    again = {(d.msg_id, d.times) for d in deliveries}
    for m in messages:
        wanted = set(range(1, min(failures(m), times_max) + 1))
        sent = {times for msg_id, times in there if msg_id == m.msg_id}
        found += [f"retry {times} is lost: {m}" for times in sorted(wanted - sent)]
        found += [f"retry {times} without a failure: {m}" for times in sorted(sent - wanted)]
        found += [f"retry {times} was not delivered: {m}" for times in sorted(sent) if (m.msg_id, times) not in again]
        dies = failures(m) > times_max
        if dies != (m.msg_id in dead):
            found.append(f"{'not dead' if dies else 'dead without a cause'}: {m}")
    return found


def of_results(messages: Sequence[Message], results: Sequence[str], key_of: Callable[[str], str] | None) -> list[str]:
    """Lost, doubled and made-up results (bodies), and those of one key in another order than the messages."""
    wanted, got = Counter(m.body for m in messages), Counter(results)
    found = [f"result lost: {body}" for body in (wanted - got).elements()]
    found += [f"result doubled or made up: {body}" for body in (got - wanted).elements()]
    if key_of is not None:
        of_key: dict[str, list[str]] = defaultdict(list)
        for m in sorted(messages, key=lambda m: (m.queue, m.offset)):
            of_key[key_of(m.body)].append(m.body)
        for key, bodies in of_key.items():
            came = [body for body in results if key_of(body) == key]
            if came != bodies and Counter(came) == Counter(bodies):
                found.append(f"results of key {key} in another order")
    return found
