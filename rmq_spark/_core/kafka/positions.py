"""The positions topic: how far each queue is handed over, who runs each shard, and what was skipped.

Keys and values are JSON objects. The topic is compacted, so the newest record of each key stays. Only partition 0 is
used: a key would move if the number of partitions changed.

=====================================  =================================================================
key                                    value
=====================================  =================================================================
relay, log                             shards, topic_template: what the relay's processes must agree on
relay, log, shard                      run, host, pid, at: who runs the shard (a claim)
relay, log, topic, queue               next_offset; msg_id and committed (microseconds since 1970) of the last
                                       message, both null when there is none
relay, log, topic, queue, gap          next_offset, at: offsets from ``gap`` up to it had expired
=====================================  =================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from rmq_spark._core.kafka.records import Record
from rmq_spark.errors import RelayRefusedError

PARTITION = 0

Queue = tuple[str, int]
"""A topic and a queue_id."""


class Last(NamedTuple):
    """A message as its queue has it, now and in no other history of the log.

    Its id alone does not say that: a half batch that was pending in a copy has the same identity when it is committed
    again, perhaps behind other messages. Its time of commit is then another.
    """

    msg_id: str
    committed_us: int

    def __str__(self) -> str:
        return f"{self.msg_id}, committed at {datetime.fromtimestamp(self.committed_us / 1e6, timezone.utc)}"


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where a queue is handed over.

    Attributes
    ----------
    next_offset : int
    last : Last or None
        The message before it; None when the queue has none below, because they have expired or none was sent.
    """

    next_offset: int
    last: Last | None = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all processes of a relay must have in common."""

    shards: int
    topic_template: str


@dataclass
class Stored:
    """What the positions topic says of one relay.

    Attributes
    ----------
    agreed : dict
        By log id. A relay belongs to one log, so there is one, or none before its first start.
    positions : dict
        Of its queues, by log id and queue.
    runs : dict
        The newest run that claimed a shard, and at which offset of the positions topic, by log id and shard.
    """

    relay: str
    agreed: dict[str, Agreed] = field(default_factory=dict)
    positions: dict[tuple[str, Queue], Position] = field(default_factory=dict)
    runs: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    def add(self, key: bytes | None, value: bytes | None, offset: int) -> None:
        """Take in a record of the topic. Those of other relays are left out.

        Raises
        ------
        RelayRefusedError
            When no relay wrote it.
        """
        try:
            name: dict[str, Any] = json.loads(key or b"")
            if name["relay"] != self.relay:
                return
            said: dict[str, Any] = json.loads(value or b"")
            log = str(name["log"])
            if "gap" in name:
                return
            if "topic" in name:
                last = None if said["msg_id"] is None else Last(str(said["msg_id"]), int(said["committed"]))
                position = Position(int(said["next_offset"]), last)
                self.positions[log, (str(name["topic"]), int(name["queue"]))] = position
            elif "shard" in name:
                self.runs[log, int(name["shard"])] = (str(said["run"]), offset)
            else:
                self.agreed[log] = Agreed(int(said["shards"]), str(said["topic_template"]))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise RelayRefusedError(
                f"the record at offset {offset} of the positions topic was not written by a relay ({problem!r}): give "
                "relays a topic of their own, in which nobody else writes"
            ) from None

    def of_log(self, log_id: str) -> dict[Queue, Position]:
        """The positions in a log, by queue."""
        return {queue: position for (log, queue), position in self.positions.items() if log == log_id}


class PositionRecords:
    """Makes the records of one relay and log.

    Parameters
    ----------
    topic : str
        The positions topic.
    """

    def __init__(self, topic: str, relay: str, log_id: str) -> None:
        self._topic = topic
        self._of = {"relay": relay, "log": log_id}

    def agreed(self, shards: int, topic_template: str) -> Record:
        return self._record({}, {"shards": shards, "topic_template": topic_template})

    def claim(self, shard: int, run: str, who: Mapping[str, Any]) -> Record:
        return self._record({"shard": shard}, {"run": run, **who})

    def position(self, queue: Queue, position: Position) -> Record:
        msg_id, committed_us = position.last or (None, None)
        said = {"next_offset": position.next_offset, "msg_id": msg_id, "committed": committed_us}
        return self._record({"topic": queue[0], "queue": queue[1]}, said)

    def gap(self, queue: Queue, first: int, stop: int, at: str) -> Record:
        return self._record({"topic": queue[0], "queue": queue[1], "gap": first}, {"next_offset": stop, "at": at})

    def _record(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> Record:
        return Record(self._topic, PARTITION, _json({**self._of, **key}), _json(value))


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
