"""Figures of a commit log as a whole, for ``txmq stats`` and ``txmq top``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from rmq_spark.cli.groups import group_rows
from rmq_spark.cli.settling import conflict_rows, open_rows

if TYPE_CHECKING:
    from rmq_spark.commitlog.log import CommitLog

WINDOWS = {"last_minute": 60.0, "last_hour": 3600.0, "last_day": 86_400.0}
"""Seconds before now in which messages are counted."""


@dataclass(frozen=True)
class Overview:
    """A look at a commit log.

    Attributes
    ----------
    at : datetime
    ends, firsts : mapping of (topic, queue_id) to int
        The next offset, and the first that is kept.
    pending, quarantined, conflicts : list of dict
        Rows as ``txmq pending`` and so on list them.
    groups : list of dict
        Rows as ``txmq group list`` lists them.
    undrained_messages, undrained_bytes : int
    files : dict of str to int
        Live files of each table.
    bytes : dict of str to int
        The same in bytes.
    dead_letters : dict of str to int
        By consumer group.
    topics : dict of str to int
        Topics and their number of queues.
    """

    at: datetime
    topics: Mapping[str, int]
    ends: Mapping[tuple[str, int], int]
    firsts: Mapping[tuple[str, int], int]
    pending: list[dict[str, Any]]
    quarantined: list[dict[str, Any]]
    conflicts: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    undrained_messages: int
    undrained_bytes: int
    files: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    dead_letters: Mapping[str, int] = field(default_factory=dict)

    @property
    def oldest_pending_s(self) -> float:
        return max((row["age_seconds"] for row in self.pending), default=0.0)

    def committed(self, topic: str) -> int:
        """How many messages were ever committed to a topic."""
        return sum(end for (name, _), end in self.ends.items() if name == topic)

    def kept(self, topic: str) -> int:
        """How many of them have not expired."""
        return self.committed(topic) - sum(first for (name, _), first in self.firsts.items() if name == topic)


def look(log: CommitLog) -> Overview:
    """Look at a commit log."""
    from rmq_spark.commitlog.undrained import Undrained
    from rmq_spark.config import INT64_MAX
    from rmq_spark.message import DLQ_PREFIX

    topics = log.topics()
    ends = dict(log.tails())
    dead = {name.removeprefix(DLQ_PREFIX): sum(end for (topic, _), end in ends.items() if topic == name)
            for name in topics if name.startswith(DLQ_PREFIX)}  # fmt: skip
    firsts = dict(log.firsts(refresh=False))
    waiting = Undrained(log).look(INT64_MAX)
    files, held = {}, {}
    for table in (log.half.table, log.op, log.messages_table):
        table.refresh()
        sizes = table.actions()["size_bytes"].to_pylist()
        files[table.name], held[table.name] = len(sizes), sum(n or 0 for n in sizes)
    return Overview(
        at=log.machine.now(),
        topics=topics,
        ends=ends,
        firsts=firsts,
        pending=open_rows(log, log.pending(), None),
        quarantined=open_rows(log, log.quarantined(), None),
        conflicts=conflict_rows(log),
        groups=group_rows(log),
        undrained_messages=waiting.messages,
        undrained_bytes=waiting.bytes,
        files=files,
        bytes=held,
        dead_letters=dead,
    )


def committed_since(log: CommitLog, now: datetime) -> dict[str, dict[str, int]]:
    """Return by topic how many messages were committed within each of :data:`WINDOWS`."""
    from rmq_spark.commitlog.placements import Placements

    placements = Placements(log, lambda topic: True)
    ends = placements.latest()
    found: dict[str, dict[str, int]] = {topic: dict.fromkeys(WINDOWS, 0) for topic, _ in ends}
    for name, seconds in WINDOWS.items():
        first = placements.first_since(now - timedelta(seconds=seconds))
        for (topic, queue_id), end in ends.items():
            found[topic][name] += end - min(end, first.get((topic, queue_id), end))
    return found
