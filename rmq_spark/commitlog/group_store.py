"""The ``groups`` table: how far each consumer group has read.

A file holds all of one group, so that a micro-batch's progress is one small commit that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.commitlog.table import Change, Table
from rmq_spark.message import TIMESTAMP, check_group

GROUPS_SCHEMA = pa.schema(
    [
        ("consumer_group", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("next_offset", pa.int64()),
        ("updated", TIMESTAMP),
        ("updated_by", pa.string()),
        ("commit_id", pa.string()),
    ]
)

Positions = Mapping[tuple[str, int], int]
"""The next offset of every queue."""


class GroupStore:
    """The ``groups`` table of a commit log."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def rows(self, group: str | None = None) -> pa.Table:
        """The progress of one group, or of all, by group, topic and queue."""
        self.table.refresh()
        return self._rows(group).sort_by([(c, "ascending") for c in ("consumer_group", "topic", "queue_id")])

    def positions(self, group: str) -> dict[tuple[str, int], int]:
        """A group's next offset of every queue that it has read; empty for a group that is not known."""
        rows = self.rows(group)
        queues = zip(rows["topic"].to_pylist(), rows["queue_id"].to_pylist(), strict=True)
        return dict(zip(queues, rows["next_offset"].to_pylist(), strict=True))

    def publish(self, group: str, positions: Positions, by: str) -> bool:
        """Move a group on; a queue never moves backwards (RocketMQ: ``increaseOnly``). False when nothing moved."""
        return self._change(group, by, lambda now: {**now, **{q: max(n, now.get(q, 0)) for q, n in positions.items()}})

    def set(self, group: str, positions: Positions, by: str) -> bool:
        """Put queues of a group where they are told to be, also backwards; the others stay."""
        return self._change(group, by, lambda now: {**now, **positions})

    def delete(self, group: str) -> bool:
        """Forget a group; False when it is not known."""
        return self._change(group, "", lambda now: {})

    def _change(
        self, group: str, by: str, change: Callable[[dict[tuple[str, int], int]], Mapping[tuple[str, int], int]]
    ) -> bool:
        check_group(group, "consumerGroup")
        commit_id = uuid4().hex

        def decide(version: int) -> Change | None:
            known = self._rows(group).to_pylist()
            before = {(r["topic"], r["queue_id"]): r for r in known}
            now = {queue: r["next_offset"] for queue, r in before.items()}
            after = change(now)
            if after == now:
                return None
            time = datetime.now(timezone.utc)
            rows = [
                before[queue]
                if now.get(queue) == offset
                else dict(zip(GROUPS_SCHEMA.names, (group, *queue, offset, time, by, ""), strict=True))
                for queue, offset in sorted(after.items())
            ]
            table = pa.Table.from_pylist([{**r, "commit_id": commit_id} for r in rows], schema=GROUPS_SCHEMA)
            added = [self.table.write(table, "groups", ("consumer_group",))] if rows else []
            return Change(add=added, remove=self._paths(group))

        def landed(change: Change) -> bool:
            rows = self._rows(group)
            return pc.any(pc.equal(rows["commit_id"], commit_id)).as_py() or (not change.add and not rows.num_rows)

        return self.table.compare_and_set(decide, landed) is not None

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
