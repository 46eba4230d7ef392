"""Figures of a commit log as a whole, for ``txmq stats`` and ``txmq top``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.cli.groups import group_rows
from rmq_spark.cli.settling import conflict_rows, open_rows

if TYPE_CHECKING:
    from rmq_spark._core.client.commit_log import CommitLog
    from rmq_spark._core.protocol.engine import Engine

    pass

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
    from rmq_spark._core.inspect.undrained import Undrained
    from rmq_spark._core.vocabulary.message import DLQ_PREFIX
    from rmq_spark._core.vocabulary.options import INT64_MAX

    engine = log.engine
    topics = log.topics()
    ends = dict(engine.tails())
    dead = {name.removeprefix(DLQ_PREFIX): sum(end for (topic, _), end in ends.items() if topic == name)
            for name in topics if name.startswith(DLQ_PREFIX)}  # fmt: skip
    firsts = dict(engine.firsts(refresh=False))
    waiting = Undrained(engine).look(INT64_MAX)
    files, held = {}, {}
    for table in (engine.half.table, engine.op, engine.messages_table):
        table.refresh()
        sizes = table.actions()["size_bytes"].to_pylist()
        files[table.name], held[table.name] = len(sizes), sum(n or 0 for n in sizes)
    return Overview(
        at=engine.runtime.now(),
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


def committed_since(log: Engine, now: datetime) -> dict[str, dict[str, int]]:
    """Return by topic how many messages were committed within each of :data:`WINDOWS`.

    Of drained messages the statistics of their files tell, and only a file in which a window begins is read.
    """
    found: dict[str, dict[str, int]] = {}
    log.drained.border()
    longest = now - timedelta(seconds=max(WINDOWS.values()))
    for name, topic, count in _drained_within(log, now):
        found.setdefault(topic, dict.fromkeys(WINDOWS, 0))[name] += count
    for rows, _ in log.placements(log.drained.position + 1):
        late = rows.filter(pc.greater_equal(rows["op_time"], pa.scalar(longest, rows["op_time"].type)))
        for row in late.select(["topic", "count", "op_time"]).to_pylist():
            counts = found.setdefault(row["topic"], dict.fromkeys(WINDOWS, 0))
            for name, seconds in WINDOWS.items():
                counts[name] += row["count"] if row["op_time"] >= now - timedelta(seconds=seconds) else 0
    return found


def expiring(log: Engine, topic: str, retention_s: float) -> int:
    """Return how many messages of a topic go at the next upkeep with this retention: those of whole files that are
    older."""
    log.drained.border()
    actions = log.messages_table.actions()
    before = log.runtime.now() - timedelta(seconds=retention_s)
    last = actions["max.commit_timestamp"]
    goes = pc.and_(pc.equal(actions["min.topic"], topic), pc.less(last, pa.scalar(before, last.type)))
    return int(pc.sum(actions.filter(goes)["num_records"]).as_py() or 0)


def _drained_within(log: Engine, now: datetime) -> Iterator[tuple[str, str, int]]:
    """Yield names of windows, topics, and how many messages of a file were committed then."""
    table = log.messages_table
    columns = ["path", "num_records", "min.topic", "min.commit_timestamp", "max.commit_timestamp"]
    for file in table.actions().select(columns).to_pylist() if table.actions().num_rows else ():
        first, last = file["min.commit_timestamp"], file["max.commit_timestamp"]
        times: pa.ChunkedArray | None = None
        for name, seconds in WINDOWS.items():
            since = now - timedelta(seconds=seconds)
            if last is not None and last < since:
                continue
            if first is not None and first >= since:
                yield name, file["min.topic"], file["num_records"]
                continue
            if times is None:
                times = table.read([file["path"]], ["commit_timestamp"])["commit_timestamp"]
            count = pc.sum(pc.greater_equal(times, pa.scalar(since, times.type))).as_py() or 0
            yield name, file["min.topic"], count
