"""The ``groups`` table: how far each consumer group has read.

A file holds all of one group, so that a micro-batch's progress is one small commit that replaces it.

A group is read by Spark (queries claim its queues by a session) or by members (``PushConsumer``, ``PullConsumer``),
where each queue has an owner. A queue's generation rises with each claim and each reset. A member's report counts only
while owner and generation are those of its claim.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.damage import retry_on_newest_state
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import RUNTIME
from rmq_spark._core.storage.table import Change, Table
from rmq_spark._core.vocabulary.message import TIMESTAMP, require_group_name
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import GroupInUseError

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
        ("consumer", pa.string()),
        ("owner", pa.string()),
        ("generation", pa.int64()),
        ("epoch", pa.string()),
    ]
)

SPARK, MEMBERS = "spark", "members"
"""Values of the column ``consumer``: what reads for the group. Null until something has read for it."""

Offsets = Mapping[Queue, int]
"""The next offset of every queue."""


class GroupPosition(NamedTuple):
    """The position of a group in a queue."""

    next_offset: int
    suspended_until: datetime | None = None
    """Set while an orderly consumer has suspended the queue. Then only that consumer moves the queue."""
    session: str | None = None
    """The query run that reads the queue for the group."""
    consumer: str | None = None
    """:data:`SPARK` or :data:`MEMBERS`."""
    owner: str | None = None
    """The member that reads the queue; None for a queue that is free."""
    generation: int = 0
    """Number of claims and resets of the queue."""
    epoch: str | None = None
    """A text that is renewed when the queue's position is set rather than read up to. So messages that fail again after
    a reset are sent again."""


class Claim(NamedTuple):
    """A member's claim of a queue, and where the member reads on."""

    next_offset: int
    generation: int
    epoch: str


class Report(NamedTuple):
    """A member's report on a queue that it owns."""

    next_offset: int
    generation: int
    release: bool = False
    """True frees the queue."""


@dataclass
class Session:
    """One run of a query, which reads some queues for its group alone."""

    by: str = field(default_factory=lambda: f"{socket.gethostname()}@{os.getpid()}")
    """The host and process of the session."""
    id: str = field(default_factory=lambda: RUNTIME.unique_id()[:8])
    claimed: dict[Queue, str] = field(default_factory=dict)
    """The session's name in each queue. It begins with the queue's generation at the session's first claim. So a
    session that claimed the queue earlier has a smaller name, whatever the clocks of the two machines say."""

    def name_at(self, generation: int) -> str:
        """Return the session's name in a queue that it first claims at this generation."""
        return f"{generation:020d} {self.by} {self.id}"


class GroupTable:
    def __init__(self, table: Table) -> None:
        self.table = table

    def tables_to_refresh(self) -> Iterable[Table]:
        return (self.table,)

    @retry_on_newest_state
    def rows(self, group: str | None = None) -> pa.Table:
        """The progress of one group, or of all, sorted by group, topic and queue."""
        self.table.refresh()
        return self._rows(group).sort_by([(c, "ascending") for c in ("consumer_group", "topic", "queue_id")])

    @retry_on_newest_state
    def positions(self, group: str, refresh: bool = True) -> dict[Queue, GroupPosition]:
        """A group's position in every queue that it has read; empty for an unknown group. Without a refresh, as the
        table was last read (:meth:`publish` reads it)."""
        if refresh:
            self.table.refresh()
        return {queue: _position_of(row) for queue, row in _by_queue(self._rows(group)).items()}

    def next_offsets(self, group: str) -> dict[Queue, int]:
        """A group's next offset in every queue that it has read; empty for an unknown group."""
        return {queue: position.next_offset for queue, position in self.positions(group).items()}

    def publish(
        self,
        group: str,
        offsets: Offsets,
        session: Session | None = None,
        answered: Mapping[Queue, datetime] | None = None,
    ) -> bool:
        """Move a group on; a queue never moves backwards (RocketMQ: ``increaseOnly``). Returns False when nothing
        moved.

        ``session`` reads the queues, and claims them. Two sessions that read one queue claim it in turn, and the one
        that started later gets a GroupInUseError. ``answered`` has, by queue, the end of the suspension after which
        this reader has read it again. A queue under a newer suspension stays as it is, but for a reader that stands at
        or before the suspended message, and so reads it again."""
        session = session or Session()
        names: dict[Queue, str] = {}

        def moved(now: dict[Queue, GroupPosition]) -> dict[Queue, GroupPosition]:
            _require_kind(group, now, SPARK)
            after = dict(now)
            names.clear()
            for queue, offset in offsets.items():
                before = now.get(queue, GroupPosition(0))
                name = names[queue] = session.claimed.get(queue) or session.name_at(before.generation + 1)
                if queue in session.claimed and before.session is not None and before.session < name:
                    raise GroupInUseError(
                        f"consumer group {group!r}: queue {queue[1]} of topic {queue[0]!r} is being read by an older "
                        f"query ({before.session.split(' ')[1]}) as well: stop one of them, or give this one a group "
                        "of its own"
                    )
                claim = before._replace(
                    session=name, consumer=SPARK, generation=before.generation + (before.session != name)
                )
                read_from_there = offset <= before.next_offset
                if before.suspended_until in (None, (answered or {}).get(queue)) or read_from_there:
                    after[queue] = claim._replace(next_offset=max(offset, before.next_offset), suspended_until=None)
                else:
                    after[queue] = claim
            return after

        changed = self._change(group, session.by, moved)
        session.claimed |= names
        return changed

    def progress(
        self, group: str, offsets: Offsets, by: str, suspended_until: Mapping[Queue, datetime] | None = None
    ) -> bool:
        """Write the progress of an orderly consumer: move queues on, suspend some, and end the suspension of the
        others."""
        until = suspended_until or {}

        def moved(now: dict[Queue, GroupPosition]) -> dict[Queue, GroupPosition]:
            after = dict(now)
            for queue, offset in offsets.items():
                before = now.get(queue, GroupPosition(0))
                after[queue] = before._replace(
                    next_offset=max(offset, before.next_offset), suspended_until=until.get(queue)
                )
            return after

        reach("progress begins")
        is_new = self._change(group, by, moved)
        reach("progress written")
        return is_new

    # ------------------------------------------------------------------ members
    def claim(
        self,
        group: str,
        member: str,
        wanted: Mapping[Queue, int],
        start: Offsets,
        by: str,
        take_over: bool = False,
    ) -> dict[Queue, Claim]:
        """Claim queues for a member, whose name is unique among all that ever were, and return the claims that it got.
        GroupInUseError: Spark reads the group, and ``take_over`` does not say to take it.

        ``wanted`` has each queue's generation as the member saw it (0: no position). A queue that was claimed or reset
        since is not claimed. ``start`` has first offsets. A queue without a position gets it here, claimed or not. So
        all queues of a group that begins at the end of the log begin at one moment.
        """
        claims: dict[Queue, Claim] = {}

        def moved(now: dict[Queue, GroupPosition]) -> dict[Queue, GroupPosition]:
            if not take_over:
                _require_kind(group, now, MEMBERS)
            spark = kind_of(now.values()) == SPARK
            after = {queue: _freed(position) if spark else position for queue, position in now.items()}
            for queue, offset in start.items():
                after.setdefault(queue, GroupPosition(offset, consumer=MEMBERS, epoch=self._new_epoch()))
            claims.clear()
            for queue, generation in wanted.items():
                before = now.get(queue, GroupPosition(0))
                if before.generation == generation:
                    claimed = after[queue]._replace(
                        suspended_until=None,
                        session=None,
                        consumer=MEMBERS,
                        owner=member,
                        generation=after[queue].generation + 1,
                        epoch=after[queue].epoch or self._new_epoch(),
                    )
                    after[queue] = claimed
                    claims[queue] = Claim(claimed.next_offset, claimed.generation, claimed.epoch or "")
            return after

        self._change(group, by, moved)
        return claims

    def report(self, group: str, member: str, reports: Mapping[Queue, Report], by: str) -> set[Queue]:
        """Write a member's progress, and free the queues that it releases. Returns the queues for which nothing was
        written, because the member no longer owns them: another member has claimed them, or the group was reset or
        deleted."""
        refused: set[Queue] = set()

        def moved(now: dict[Queue, GroupPosition]) -> dict[Queue, GroupPosition]:
            after = dict(now)
            refused.clear()
            for queue, report in reports.items():
                before = now.get(queue)
                if before is None or (before.owner, before.generation) != (member, report.generation):
                    refused.add(queue)
                    continue
                after[queue] = before._replace(
                    next_offset=max(report.next_offset, before.next_offset), owner=None if report.release else member
                )
            return after

        self._change(group, by, moved)
        return refused

    def hand_over(self, group: str, by: str) -> bool:
        """Free all queues of a group, so that either Spark or members may read them next."""
        return self._change(group, by, lambda now: {queue: _freed(position) for queue, position in now.items()})

    # ------------------------------------------------------------------ moving

    def set(self, group: str, offsets: Offsets, by: str) -> bool:
        """Set the next offsets of queues, also backwards; other queues stay."""

        def moved(now: dict[Queue, GroupPosition]) -> dict[Queue, GroupPosition]:
            epoch = self._new_epoch()
            put = {
                q: _freed(now.get(q, GroupPosition(0)))._replace(next_offset=n, epoch=epoch) for q, n in offsets.items()
            }
            positions = {q: put[q]._replace(consumer=now[q].consumer) if q in now else put[q] for q in put}
            return {**now, **positions}

        return self._change(group, by, moved)

    def delete(self, group: str) -> bool:
        """Forget a group; False when it is unknown."""
        return self._change(group, "", lambda now: {})

    def _new_epoch(self) -> str:
        return self.table.runtime.unique_id()[:8]

    def _change(
        self, group: str, by: str, change: Callable[[dict[Queue, GroupPosition]], Mapping[Queue, GroupPosition]]
    ) -> bool:
        require_group_name(group, "consumerGroup")

        def propose(version: int) -> Change | None:
            paths = self._paths(group)
            before = _by_queue(self.table.read(paths))
            now = {queue: _position_of(row) for queue, row in before.items()}
            after = change(now)
            if after == now:
                return None
            updated = self.table.runtime.now()
            rows = [
                before[queue]
                if now.get(queue) == position
                else {
                    "consumer_group": group,
                    "topic": queue[0],
                    "queue_id": queue[1],
                    "updated": updated,
                    "updated_by": by,
                    **position._asdict(),
                }
                for queue, position in sorted(after.items())
            ]
            files = [pa.Table.from_pylist(rows, schema=GROUPS_SCHEMA)] if rows else []
            return Change(add=[self.table.write(f) for f in files], remove=paths)

        def landed(change: Change) -> bool:
            live = set(self._paths(None))
            if not live.isdisjoint(change.remove):
                return False
            if not change.add:
                return not self._rows(group).num_rows
            # Another process may have replaced the file since.
            gone = {f.path for f in change.add} - live
            return not gone or gone <= self.table.removed_since()

        return self.table.compare_and_set(propose, landed) is not None

    def _paths(self, group: str | None) -> list[str]:
        actions = self.table.actions()
        if group is not None:
            actions = actions.filter(pc.equal(actions["min.consumer_group"], group))  # a file has one group
        return [str(p) for p in actions["path"].to_pylist()]

    def _rows(self, group: str | None) -> pa.Table:
        return self.table.read(self._paths(group))


def _by_queue(rows: pa.Table) -> dict[Queue, dict[str, Any]]:
    return {(row["topic"], row["queue_id"]): row for row in rows.to_pylist()}


def _position_of(row: Mapping[str, Any]) -> GroupPosition:
    return GroupPosition(*(row[name] for name in GroupPosition._fields))


def _freed(position: GroupPosition) -> GroupPosition:
    """The position without a reader. Its previous reader finds that its generation is over."""
    return GroupPosition(position.next_offset, generation=position.generation + 1, epoch=position.epoch)


def kind_of(positions: Iterable[GroupPosition]) -> str | None:
    """Return what reads for a group with these positions; None when nothing has yet, or the group was handed over."""
    return next((position.consumer for position in positions if position.consumer is not None), None)


def _require_kind(group: str, now: Mapping[Queue, GroupPosition], kind: str) -> None:
    current = kind_of(now.values())
    if current in (None, kind):
        return
    raise GroupInUseError(
        f"consumer group {group!r} is read by {_CALLED[current]}, and {_CALLED[kind]} cannot share it: give this one a "
        f"group of its own, or stop the others and run: txmq group hand-over LOG {group}"
    )


_CALLED = {SPARK: "Spark", MEMBERS: "PushConsumer or PullConsumer"}
