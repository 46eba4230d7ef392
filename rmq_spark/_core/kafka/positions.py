"""The positions topic: each queue's position, each shard's process, and skipped messages.

Keys and values are JSON objects. The topic is compacted, so the newest record of each key stays. Only partition 0 is
used, because a key would move to another partition if their number changed.

=====================================  =================================================================
key                                    value
=====================================  =================================================================
relay, log                             shards, topic_template: equal in all processes of the relay
relay, log, shard                      run, host, pid, at: the process that runs the shard (a claim)
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
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import RelayRefusedError

PARTITION = 0


class LastMessage(NamedTuple):
    """Identifies a message in one history of the log.

    The id alone does not: a half batch that was pending in a copy keeps its identity when it is committed again,
    perhaps behind other messages. But its commit time differs.
    """

    msg_id: str
    committed_us: int

    def __str__(self) -> str:
        return f"{self.msg_id}, committed at {datetime.fromtimestamp(self.committed_us / 1e6, timezone.utc)}"


@dataclass(frozen=True, slots=True)
class Position:
    """The position up to which a queue is handed over. ``last`` is the message before ``next_offset``; None when
    messages expired or none was sent."""

    next_offset: int
    last: LastMessage | None = None


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """The settings that all processes of a relay must share."""

    shards: int
    topic_template: str


@dataclass
class StoredPositions:
    """One relay's records in the positions topic.

    ``agreed`` has the shared settings by log id: one entry, or none before the first start, for a relay belongs to one
    log. ``positions`` are by log id and queue. ``runs`` has, by log id and shard, the newest run that claimed the
    shard, and the claim's offset in the positions topic.
    """

    relay: str
    agreed: dict[str, SharedSettings] = field(default_factory=dict)
    positions: dict[tuple[str, Queue], Position] = field(default_factory=dict)
    runs: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    def add(self, key: bytes | None, value: bytes | None, offset: int) -> None:
        """Add a record of the topic. Records of other relays are ignored. One that a foreign program wrote is a
        RelayRefusedError."""
        try:
            key_fields: dict[str, Any] = json.loads(key or b"")
            if key_fields["relay"] != self.relay:
                return
            fields: dict[str, Any] = json.loads(value or b"")
            log = str(key_fields["log"])
            if "gap" in key_fields:
                return
            if "topic" in key_fields:
                last = (
                    None if fields["msg_id"] is None else LastMessage(str(fields["msg_id"]), int(fields["committed"]))
                )
                position = Position(int(fields["next_offset"]), last)
                self.positions[log, (str(key_fields["topic"]), int(key_fields["queue"]))] = position
            elif "shard" in key_fields:
                self.runs[log, int(key_fields["shard"])] = (str(fields["run"]), offset)
            else:
                self.agreed[log] = SharedSettings(int(fields["shards"]), str(fields["topic_template"]))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise RelayRefusedError(
                f"the record at offset {offset} of the positions topic was not written by a relay ({problem!r}): give "
                "relays a topic of their own, in which nobody else writes"
            ) from None

    def of_log(self, log_id: str) -> dict[Queue, Position]:
        return {queue: position for (log, queue), position in self.positions.items() if log == log_id}


class PositionRecords:
    def __init__(self, topic: str, relay: str, log_id: str) -> None:
        self._topic = topic
        self._common_key = {"relay": relay, "log": log_id}

    def agreed(self, shards: int, topic_template: str) -> Record:
        return self._record({}, {"shards": shards, "topic_template": topic_template})

    def claim(self, shard: int, run: str, who: Mapping[str, Any]) -> Record:
        return self._record({"shard": shard}, {"run": run, **who})

    def position(self, queue: Queue, position: Position) -> Record:
        msg_id, committed_us = position.last or (None, None)
        value = {"next_offset": position.next_offset, "msg_id": msg_id, "committed": committed_us}
        return self._record({"topic": queue[0], "queue": queue[1]}, value)

    def gap(self, queue: Queue, first: int, stop: int, at: str) -> Record:
        return self._record({"topic": queue[0], "queue": queue[1], "gap": first}, {"next_offset": stop, "at": at})

    def _record(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> Record:
        return Record(self._topic, PARTITION, _json({**self._common_key, **key}), _json(value))


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
