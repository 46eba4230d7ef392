"""Op markers: the schema of their table, their kinds, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark._core.log.archive import ARCHIVED, Archived
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.rows import Ranges

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table

RANGES = pa.list_(pa.struct([("first", pa.int64()), ("last", pa.int64())]))
TAILS = pa.list_(pa.struct([("topic", pa.string()), ("queue_id", pa.int32()), ("next_offset", pa.int64())]))
FIRSTS = pa.list_(pa.struct([("topic", pa.string()), ("queue_id", pa.int32()), ("first_offset", pa.int64())]))
WAITING = pa.list_(pa.struct([("until", TIMESTAMP), ("count", pa.int64())]))
BELOW = pa.list_(
    pa.struct(
        [
            ("half_id", pa.string()),
            ("ms", pa.int64()),
            ("pending", pa.int64()),
            ("versions", pa.list_(pa.int64())),
            ("waiting", WAITING),
        ]
    )
)
OP_SCHEMA = pa.schema(
    [
        ("version", pa.int64()),
        ("op_time", TIMESTAMP),
        ("commit_id", pa.string()),
        ("kind", pa.string()),
        ("half_id", pa.string()),
        ("file_no", pa.int64()),
        ("ranges", RANGES),
        ("count", pa.int64()),
        ("attempt", pa.int32()),
        ("decided_by", pa.string()),
        ("refused", pa.bool_()),
        ("reason", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("next_offset", pa.int64()),
        ("path", pa.string()),
        ("file_rows", pa.int64()),
        ("transaction_per", pa.string()),
        ("producer_group", pa.string()),
        ("until", TIMESTAMP),
        ("verdict", pa.string()),
        ("low_water", pa.int64()),
        ("since_version", pa.int64()),
        ("tails", TAILS),
        ("firsts", FIRSTS),
        ("reopened_ms", pa.int64()),
        ("below", BELOW),
        ("prepared_ms", pa.int64()),
        ("archived", ARCHIVED),
    ]
)
"""``client/columns.py`` says what the columns mean."""
NO_OPS = OP_SCHEMA.empty_table()


PRUNED = "txmq.pruned"
"""The name under which the table keeps the last version whose rows were pruned (Delta's ``txn``)."""
PRUNED_PLACED = "txmq.pruned.placed"
"""The same for rows that placed messages."""


class OpKind(str, Enum):
    COMMIT = "commit"
    PLACE = "place"
    ROLLBACK = "rollback"
    QUARANTINE = "quarantine"
    CHECK = "check"
    REOPEN = "reopen"
    LEASE = "lease"
    CONFLICT = "conflict"
    MARK = "mark"
    ARCHIVED = "archived"
    EXPIRE = "expire"

    def __str__(self) -> str:
        return self.value


class Who(str, Enum):
    """The part of the system that made a decision."""

    EXECUTE = "execute"
    CHECK = "check"
    DISCARD = "discard"
    ADMIN = "admin"

    def __str__(self) -> str:
        return self.value


KINDS = frozenset(k.value for k in OpKind)
SETTLING = (OpKind.COMMIT, OpKind.ROLLBACK, OpKind.QUARANTINE)
"""Kinds after which a row is no longer pending; ``reopen`` makes it pending again."""
DECIDING = frozenset(kind.value for kind in (*SETTLING, OpKind.REOPEN))
"""Values of the kinds that change the state of rows."""


@dataclass(frozen=True)
class OpenAtMark:
    """A half batch that was open when a mark passed it. The mark names the half batch, so that nothing else waits for
    it.

    The half batch was prepared at ``ms``. Two fields count op rows before the mark's ``since_version`` alone:
    ``pending`` is the number of rows then pending, ``versions`` are those that a reader must still read for it.
    ``waiting`` has its committed messages without a place, by due time (None: they wait for their sharding key).
    """

    ms: int
    pending: int
    versions: tuple[int, ...]
    waiting: Mapping[datetime | None, int]


@dataclass(slots=True, unsafe_hash=True)
class OpRow:
    """A row of ``op``, without its version and commit id. See :data:`OP_SCHEMA`.

    The row gets its offset last, and does not change afterwards.
    """

    kind: OpKind
    half_id: str | None = None
    file_no: int | None = None
    ranges: Ranges | None = None
    count: int = 0
    attempt: int | None = None
    decided_by: Who | None = None
    reason: str | None = None
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    path: str | None = None
    file_rows: int | None = None
    transaction_per: str | None = None
    producer_group: str | None = None
    until: datetime | None = None
    verdict: str | None = None
    low_water: int | None = None
    since_version: int | None = None
    tails: Mapping[Queue, int] | None = None
    firsts: Mapping[Queue, int] | None = None
    reopened_ms: int | None = None
    below: Mapping[str, OpenAtMark] | None = None
    prepared_ms: int | None = None
    archived: Archived | None = None
    refused: bool | None = None
    op_time: datetime | None = None
    """None until the row is written. The rows of a commit share one time."""

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> OpRow:
        """Make a row of one half batch from a row that ``read_op`` returned."""
        who = read["decided_by"]
        return cls(
            kind=OpKind(read["kind"]),
            ranges=ranges_of(read["ranges"]),
            decided_by=None if who is None else Who(who),
            **{name: read[name] for name in _AS_READ},
        )


_AS_READ = (
    "half_id", "file_no", "count", "attempt", "reason", "topic", "queue_id", "queue_offset", "producer_group", "until",
    "verdict", "refused", "op_time",
)  # fmt: skip
"""Columns that a row of one half batch keeps as they are read."""


def pruned_up_to(op: Table, what: str = PRUNED) -> int:
    """The last version of ``op`` whose rows were pruned; -1 when no rows were. A reader behind this version continues
    from the newest mark, which is later."""
    version = op.transaction_version(what)
    return -1 if version is None else version


def to_table(rows: Sequence[OpRow], version: int, op_time: datetime, commit_id: str) -> pa.Table:
    """The rows of one commit, with the columns of the table."""
    count = len(rows)
    columns = {
        "version": pa.repeat(pa.scalar(version, pa.int64()), count),
        "op_time": pa.repeat(pa.scalar(op_time, TIMESTAMP), count),
        "commit_id": pa.repeat(pa.scalar(commit_id, pa.string()), count),
        "ranges": _ranges_array([r.ranges for r in rows]),
        "next_offset": pa.array(
            [None if r.queue_offset is None else r.queue_offset + r.count for r in rows], pa.int64()
        ),
    }
    return pa.table([columns[f.name] if f.name in columns else _column(f, rows) for f in OP_SCHEMA], schema=OP_SCHEMA)


def _column(field: pa.Field, rows: Sequence[OpRow]) -> pa.Array:
    """The values of a column. Most columns belong to one kind of row, and are null in the others."""
    values = [*map(attrgetter(field.name), rows)]
    if values.count(None) == len(values):
        return pa.nulls(len(values), field.type)
    as_stored = _AS_STORED.get(field.name)
    if as_stored is not None:
        values = [None if v is None else as_stored(v) for v in values]
    return pa.array(values, field.type)


def _offsets_value(name: str, offsets: Mapping[Queue, int]) -> list[dict[str, object]]:
    return [{"topic": t, "queue_id": q, name: n} for (t, q), n in sorted(offsets.items())]


def _below_value(below: Mapping[str, OpenAtMark]) -> list[dict[str, object]]:
    return [
        {
            "half_id": half_id,
            "ms": b.ms,
            "pending": b.pending,
            "versions": list(b.versions),
            "waiting": [{"until": until, "count": count} for until, count in b.waiting.items()],
        }
        for half_id, b in sorted(below.items())
    ]


_AS_STORED: Mapping[str, Callable[[Any], object]] = {
    "kind": str,
    "decided_by": str,
    "tails": partial(_offsets_value, "next_offset"),
    "firsts": partial(_offsets_value, "first_offset"),
    "below": _below_value,
    "archived": Archived.struct,
}


def _ranges_array(values: Sequence[Ranges | None]) -> pa.Array:
    # Built from flat lists: a marker of every other row has a range for each row.
    offsets: list[int | None] = []
    first: list[int] = []
    last: list[int] = []
    for ranges in values:
        offsets.append(None if ranges is None else len(first))
        for first_row, last_row in ranges or ():
            first.append(first_row)
            last.append(last_row)
    offsets.append(len(first))
    structs = pa.StructArray.from_arrays(
        [pa.array(first, pa.int64()), pa.array(last, pa.int64())], fields=list(RANGES.value_type)
    )
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), structs, type=RANGES)


def ranges_of(value: object) -> Ranges | None:
    """Convert ranges from the form in which a table returns them."""
    return None if value is None else tuple((r["first"], r["last"]) for r in value)  # type: ignore[attr-defined]
