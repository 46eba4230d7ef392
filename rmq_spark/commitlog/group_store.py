"""The ``groups`` table: how far each consumer group has read.

A file holds all of one group, so that a micro-batch's progress is one small commit that replaces it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.errors import GroupInUseError
from rmq_spark.message import TIMESTAMP, require_group_name
from rmq_spark.storage.table import Change, Table

GROUPS_SCHEMA = pa.schema(
    [
        ("consumer_group", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("next_offset", pa.int64()),
        ("updated", TIMESTAMP),
        ("updated_by", pa.string()),
        ("suspended_until", TIMESTAMP),
        ("session", pa.string()),
    ]
)

Queue = tuple[str, int]
"""A topic and a queue_id."""
Positions = Mapping[Queue, int]
"""The next offset of every queue."""


class Place(NamedTuple):
    """Where a group stands in a queue."""

    next_offset: int
    suspended_until: datetime | None = None
    """Set while an orderly consumer has suspended the queue: then only that consumer moves it."""
    session: str | None = None
    """The run of a query that reads the queue for the group."""


@dataclass
class Session:
    """One run of a query, which reads some queues for its group alone."""

    name: str = field(default_factory=lambda: f"{time.time_ns():020d} {socket.gethostname()}@{os.getpid()}")
    """A session that started earlier has a smaller name."""
    claimed: set[Queue] = field(default_factory=set)

    @property
    def by(self) -> str:
        """Who it is."""
        return self.name.partition(" ")[2]


class GroupStore:
    """The ``groups`` table of a commit log."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def rows(self, group: str | None = None) -> pa.Table:
        """The progress of one group, or of all, by group, topic and queue."""
        self.table.refresh()
        return self._rows(group).sort_by([(c, "ascending") for c in ("consumer_group", "topic", "queue_id")])

    def places(self, group: str, refresh: bool = True) -> dict[Queue, Place]:
        """A group's place in every queue that it has read; empty for an unknown group. Without a refresh, as the table
        was last seen (:meth:`publish` looks at it)."""
        if refresh:
            self.table.refresh()
        return {queue: _place(row) for queue, row in _by_queue(self._rows(group)).items()}

    def positions(self, group: str) -> dict[Queue, int]:
        """A group's next offset of every queue that it has read; empty for a group that is not known."""
        return {queue: place.next_offset for queue, place in self.places(group).items()}

    def publish(
        self,
        group: str,
        positions: Positions,
        session: Session | None = None,
        answered: Mapping[Queue, datetime] | None = None,
    ) -> bool:
        """Move a group on; a queue never moves backwards (RocketMQ: ``increaseOnly``). False when nothing moved.

        Parameters
        ----------
        session : Session, optional
            The session that reads the queues, and claims them. Two sessions that read one queue claim it in turn,
            and the one started later fails.
        answered : mapping, optional
            By queue, the end of the suspension after which it was read again. A queue with another one stays, unless
            its position is not past the place of that: then it is read again, too.

        Raises
        ------
        GroupInUseError
            When a session that started earlier reads one of the queues as well.
        """
        session = session or Session()

        def moved(now: dict[Queue, Place]) -> dict[Queue, Place]:
            after = dict(now)
            for queue, offset in positions.items():
                before = now.get(queue, Place(0))
                if queue in session.claimed and before.session is not None and before.session < session.name:
                    raise GroupInUseError(
                        f"consumer group {group!r}: queue {queue[1]} of topic {queue[0]!r} is being read by an older "
                        f"query ({Session(before.session).by}) as well: stop one of them, or give this one a group of "
                        "its own"
                    )
                read_from_there = offset <= before.next_offset
                if before.suspended_until in (None, (answered or {}).get(queue)) or read_from_there:
                    after[queue] = Place(max(offset, before.next_offset), None, session.name)
                else:
                    after[queue] = before._replace(session=session.name)
            return after

        changed = self._change(group, session.by, moved)
        session.claimed |= set(positions)
        return changed

    def progress(
        self, group: str, positions: Positions, by: str, suspended_until: Mapping[Queue, datetime] | None = None
    ) -> bool:
        """What an orderly consumer did: it moves queues on, suspends some, and ends the suspension of the others."""
        until = suspended_until or {}

        def moved(now: dict[Queue, Place]) -> dict[Queue, Place]:
            after = dict(now)
            for queue, offset in positions.items():
                before = now.get(queue, Place(0))
                after[queue] = Place(max(offset, before.next_offset), until.get(queue), before.session)
            return after

        return self._change(group, by, moved)

    def set(self, group: str, positions: Positions, by: str) -> bool:
        """Put queues of a group where they are told to be, also backwards; the others stay."""
        return self._change(group, by, lambda now: {**now, **{q: Place(n) for q, n in positions.items()}})

    def delete(self, group: str) -> bool:
        """Forget a group; False when it is not known."""
        return self._change(group, "", lambda now: {})

    def _change(self, group: str, by: str, change: Callable[[dict[Queue, Place]], Mapping[Queue, Place]]) -> bool:
        require_group_name(group, "consumerGroup")

        def propose(version: int) -> Change | None:
            paths = self._paths(group)
            there = self.table.read(paths)
            mine = pc.equal(there["consumer_group"], group)
            before = _by_queue(there.filter(mine))
            now = {queue: _place(row) for queue, row in before.items()}
            after = change(now)
            if after == now:
                return None
            updated = self.table.machine.now()
            rows = [
                before[queue]
                if now.get(queue) == place
                else {
                    "consumer_group": group,
                    "topic": queue[0],
                    "queue_id": queue[1],
                    "updated": updated,
                    "updated_by": by,
                    **place._asdict(),
                }
                for queue, place in sorted(after.items())
            ]
            # Somebody's OPTIMIZE may have put the rows of other groups into the same file.
            others = there.filter(pc.invert(mine))
            files = [others.filter(pc.equal(others["consumer_group"], g)) for g in pc.unique(others["consumer_group"])]
            if rows:
                files.append(pa.Table.from_pylist(rows, schema=GROUPS_SCHEMA))
            return Change(add=[self.table.write(f, "groups", ("consumer_group",)) for f in files], remove=paths)

        def landed(change: Change) -> bool:
            live = set(self._paths(None))
            if not live.isdisjoint(change.remove):
                return False
            if not change.add:
                return not self._rows(group).num_rows
            # Somebody may have replaced the file since.
            gone = {f.path for f in change.add} - live
            return not gone or gone <= self.table.removed_since()

        return self.table.compare_and_set(propose, landed) is not None

    def _paths(self, group: str | None) -> list[str]:
        actions = self.table.actions()
        if group is not None:
            low, high = actions["min.consumer_group"], actions["max.consumer_group"]
            actions = actions.filter(
                pc.fill_null(pc.and_(pc.less_equal(low, group), pc.greater_equal(high, group)), True)
            )
        return [str(p) for p in actions["path"].to_pylist()]

    def _rows(self, group: str | None) -> pa.Table:
        where = None if group is None else pc.field("consumer_group") == group
        return self.table.read(self._paths(group), None, where)


def _by_queue(rows: pa.Table) -> dict[Queue, dict[str, Any]]:
    return {(row["topic"], row["queue_id"]): row for row in rows.to_pylist()}


def _place(row: Mapping[str, Any]) -> Place:
    return Place(row["next_offset"], row["suspended_until"], row["session"])
