"""Figures of a commit log as a whole, for ``txmq stats`` and ``txmq top``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op_walk import walk_placements
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.cli.groups import group_rows
from rmq_spark.cli.verdicts import conflict_rows, open_rows

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark.log import CommitLog

WINDOWS = {"last_minute": 60.0, "last_hour": 3600.0, "last_day": 86_400.0}
"""Windows in which messages are counted, in seconds before now."""


@dataclass(frozen=True)
class Overview:
    """Figures of a commit log at one moment.

    Attributes
    ----------
    at : datetime
    ends, firsts : mapping of (topic, queue_id) to int
        The next offset, and the first kept offset.
    pending, quarantined, conflicts : list of dict
        Rows of ``txmq pending``, ``quarantined`` and ``conflicts``.
    groups : list of dict
        Rows of ``txmq group list``.
    undrained_messages, undrained_bytes : int
    files : dict of str to int
        Live files of each table.
    bytes : dict of str to int
        Their bytes.
    dead_letters : dict of str to int
        By consumer group, those that the log keeps.
    topics : dict of str to int
        Topics and their number of queues.
    """

    at: datetime
    topics: Mapping[str, int]
    ends: Mapping[Queue, int]
    firsts: Mapping[Queue, int]
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
        """Return how many messages were ever committed to a topic."""
        return sum(end for (name, _), end in self.ends.items() if name == topic)

    def kept(self, topic: str) -> int:
        """Return how many messages of a topic were committed and have not expired."""
        return self.committed(topic) - sum(first for (name, _), first in self.firsts.items() if name == topic)


def look(log: CommitLog) -> Overview:
    """Collect the figures of a commit log."""
    from rmq_spark._core.consumers.dead_letters import kept_letters
    from rmq_spark._core.inspect.undrained import Undrained

    engine = log.engine
    topics = log.topics()
    ends = dict(engine.tails())
    firsts = dict(engine.firsts(refresh=False))
    undrained = Undrained(engine).look()
    files, table_bytes = {}, {}
    for table in (engine.half.table, engine.op_table, engine.messages_table):
        table.refresh()
        sizes = table.actions()["size_bytes"].to_pylist()
        files[table.name], table_bytes[table.name] = len(sizes), sum(n or 0 for n in sizes)
    return Overview(
        at=engine.runtime.now(),
        topics=topics,
        ends=ends,
        firsts=firsts,
        pending=open_rows(log, log.pending(), None),
        quarantined=open_rows(log, log.quarantined(), None),
        conflicts=conflict_rows(log),
        groups=group_rows(log),
        undrained_messages=undrained.messages,
        undrained_bytes=undrained.bytes,
        files=files,
        bytes=table_bytes,
        dead_letters=kept_letters(engine),
    )


def committed_since(engine: Engine, now: datetime) -> dict[str, dict[str, int]]:
    """Return by topic how many messages were committed within each of :data:`WINDOWS`.

    Drained messages are counted by the statistics of their files. Only a file in which a window begins is read.
    """
    counts_by_topic: dict[str, dict[str, int]] = {}
    engine.drained.border()
    earliest = now - timedelta(seconds=max(WINDOWS.values()))
    for name, topic, count in _drained_within(engine, now):
        counts_by_topic.setdefault(topic, dict.fromkeys(WINDOWS, 0))[name] += count
    for rows, _ in walk_placements(engine.op_table, engine.drained.position + 1):
        recent = rows.filter(pc.greater_equal(rows["op_time"], pa.scalar(earliest, rows["op_time"].type)))
        for row in recent.select(["topic", "count", "op_time"]).to_pylist():
            counts = counts_by_topic.setdefault(row["topic"], dict.fromkeys(WINDOWS, 0))
            for name, seconds in WINDOWS.items():
                counts[name] += row["count"] if row["op_time"] >= now - timedelta(seconds=seconds) else 0
    return counts_by_topic


def expiring(engine: Engine, topic: str, retention_s: float) -> int:
    """Return how many messages of a topic the next upkeep removes with this retention: those of files with no younger
    message."""
    engine.drained.border()
    actions = engine.messages_table.actions()
    limit = engine.runtime.now() - timedelta(seconds=retention_s)
    newest = actions["max.commit_timestamp"]
    expires = pc.and_(pc.equal(actions["min.topic"], topic), pc.less(newest, pa.scalar(limit, newest.type)))
    return int(pc.sum(actions.filter(expires)["num_records"]).as_py() or 0)


def _drained_within(engine: Engine, now: datetime) -> Iterator[tuple[str, str, int]]:
    """Yield for each file and window the window's name, the topic, and how many messages were committed in it."""
    table = engine.messages_table
    columns = ["path", "num_records", "min.topic", "min.commit_timestamp", "max.commit_timestamp"]
    for file in table.actions().select(columns).to_pylist() if table.actions().num_rows else ():
        oldest, newest = file["min.commit_timestamp"], file["max.commit_timestamp"]
        times: pa.ChunkedArray | None = None
        for name, seconds in WINDOWS.items():
            since = now - timedelta(seconds=seconds)
            if newest is not None and newest < since:
                continue
            if oldest is not None and oldest >= since:
                yield name, file["min.topic"], file["num_records"]
                continue
            if times is None:
                times = table.read([file["path"]], ["commit_timestamp"])["commit_timestamp"]
            count = pc.sum(pc.greater_equal(times, pa.scalar(since, times.type))).as_py() or 0
            yield name, file["min.topic"], count
