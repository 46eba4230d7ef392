"""What ``op`` says up to a version, followed commit by commit.

:class:`Followed` is a value. Whoever follows ``op`` makes the next value aside and takes it in one step. An exception
on the way (an interrupt in a notebook, a full memory) leaves the last one, which is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op import NO_OPS, SETTLING, Kind, OpenBelow
from rmq_spark.errors import CorruptLogError

CHUNKS_MAX = 64
_OF_EACH_MARK = ("low_water", "since_version", "tails", "below", "reopened_ms")
"""Columns that every mark fills."""
EPOCH = datetime.fromtimestamp(0, timezone.utc)

Tails = Mapping[tuple[str, int], int]
"""The next offset of every queue that has messages, by topic and queue."""
Waiting = Mapping[str, Mapping[datetime | None, int]]
"""How many committed messages have no place yet, by half id and due time (None: an earlier message of their sharding
key is not decided yet)."""


@dataclass(frozen=True)
class Followed:
    """What the op rows up to a version say.

    Attributes
    ----------
    version : int
        The last one that was followed.
    since : int
        ``rows`` holds all op rows from this version on.
    marked_at : int
        The version of the newest mark; -1 before the first one.
    low_water : int
        Prepare time (ms) up to which every half batch is settled, but for those ``below`` and those reopened later.
    below : mapping of str to OpenBelow
        Half batches that were open when the newest mark passed them, by half id.
    reopened_ms : int
        When a transaction was last reopened.
    conflicts : frozenset of str
        Half batches in conflict that no person has resolved yet.
    firsts : mapping of (topic, queue_id) to int
        The first offset that is kept, of queues of which messages have expired.
    """

    version: int = -1
    rows: pa.Table = field(default_factory=lambda: NO_OPS)
    since: int = 0
    tails: Tails = field(default_factory=dict)
    waiting: Waiting = field(default_factory=dict)
    last_time: datetime = EPOCH
    low_water: int = 0
    conflicts: frozenset[str] = frozenset()
    below: Mapping[str, OpenBelow] = field(default_factory=dict)
    reopened_ms: int = 0
    marked_at: int = -1
    firsts: Tails = field(default_factory=dict)

    @classmethod
    def from_mark(cls, rows: pa.Table) -> Followed:
        """Where to go on from the newest of some mark rows: just before the first version that is still needed."""
        marks = rows.filter(of_kind(rows, Kind.MARK)).sort_by("version")
        if marks.num_rows == 0:
            raise CorruptLogError("table op has lost its newest mark: restore the table from a copy")
        mark = _newest_mark(marks)
        since = int(mark["since_version"])
        tails = {(t["topic"], t["queue_id"]): t["next_offset"] for t in mark["tails"]}
        below = _below(mark)
        waiting = {half_id: b.waiting for half_id, b in below.items() if b.waiting}
        return cls(
            version=since - 1, since=since, tails=tails, waiting=waiting, below=below, firsts=_firsts(mark),
            reopened_ms=mark["reopened_ms"],
        )  # fmt: skip

    def after(self, rows: pa.Table, version: int) -> Followed:
        """What the op rows up to ``version`` say. ``rows`` are the new ones, in version order.

        Raises
        ------
        CorruptLogError
            When the rows contradict each other, or what was there before.
        """
        if rows.num_rows == 0:
            return replace(self, version=version)
        kept = pa.concat_tables([self.rows, rows])
        since, low_water = self.since, self.low_water
        below, marked_at = self.below, self.marked_at
        marks = rows.filter(of_kind(rows, Kind.MARK))
        if marks.num_rows:
            newest = _newest_mark(marks)
            low_water = newest["low_water"]
            since, below, marked_at = max(since, newest["since_version"]), _below(newest), newest["version"]
            kept = kept.filter(pc.greater_equal(kept["version"], since))
        if kept["version"].num_chunks > CHUNKS_MAX:
            kept = kept.combine_chunks()
        tails = _moved(self.tails, rows.filter(pc.is_valid(rows["next_offset"])))
        return Followed(
            version,
            kept,
            since,
            tails,
            still_waiting(self.waiting, rows),
            max(self.last_time, pc.max(rows["op_time"]).as_py()),
            low_water,
            _still_in_conflict(self.conflicts, rows),
            below,
            max(self.reopened_ms, _last_reopened_ms(rows)),
            marked_at,
            _expired(self.firsts, rows, tails),
        )

    def is_behind_mark(self, rows: pa.Table) -> bool:
        """True when a mark among these new op rows lets go some of them: they may have been pruned before they were
        read."""
        newest = pc.max(rows.filter(of_kind(rows, Kind.MARK))["since_version"]).as_py()
        return newest is not None and newest > self.version + 1

    def reopened_rows(self, before: int | None = None) -> dict[str, int]:
        """By half id: rows that were reopened since the newest mark, less those that were settled (negative numbers are
        possible). ``before`` leaves out the versions from there on."""
        since_mark = pc.greater(self.rows["version"], self.marked_at)
        if before is not None:
            since_mark = pc.and_(since_mark, pc.less(self.rows["version"], before))
        return {half_id: -net for half_id, net in settled_rows(self.rows.filter(since_mark)).items()}


def of_kind(rows: pa.Table, kind: Kind) -> pa.ChunkedArray:
    """Which op rows are of a kind."""
    return pc.equal(rows["kind"], kind.value)


def settled_rows(rows: pa.Table) -> dict[str, int]:
    """By half id: rows that op markers settled, less those that were reopened."""
    found = settled(rows)
    return dict(zip(found["half_id"].to_pylist(), found["rows"].to_pylist(), strict=True))


def settled(rows: pa.Table) -> pa.Table:
    """``half_id, rows``: how many rows op markers settled, less those that were reopened."""
    settling = pc.is_in(rows["kind"], value_set=pa.array([k.value for k in SETTLING]))
    reopening = of_kind(rows, Kind.REOPEN)
    sign = pc.subtract(pc.cast(settling, pa.int64()), pc.cast(reopening, pa.int64()))
    signed = pa.table({"half_id": rows["half_id"], "n": pc.multiply(sign, rows["count"])})
    signed = signed.filter(pc.is_valid(signed["half_id"]))
    sums = signed.group_by("half_id", use_threads=False).aggregate([("n", "sum")])
    return pa.table({"half_id": sums["half_id"], "rows": sums["n_sum"]})


def _moved(tails: Tails, placed: pa.Table) -> Tails:
    """The tails after new placements: gaps or overlaps mean that op rows are lost or doubled."""
    moved = dict(tails)
    sums = [("queue_offset", "min"), ("next_offset", "max"), ("count", "sum")]
    for r in placed.group_by(["topic", "queue_id"], use_threads=False).aggregate(sums).to_pylist():
        queue = (r["topic"], r["queue_id"])
        known, count, end = tails.get(queue, 0), r["count_sum"], r["next_offset_max"]
        if r["queue_offset_min"] < known:  # a cold start reads some rows that the mark knows of
            mine = pc.and_(pc.equal(placed["topic"], queue[0]), pc.equal(placed["queue_id"], queue[1]))
            new = pc.and_(mine, pc.greater_equal(placed["queue_offset"], known))
            count, end = pc.sum(placed.filter(new)["count"]).as_py() or 0, max(end, known)
        if known + count != end:
            raise CorruptLogError(
                f"table op places {count} messages at offsets {known} to {end - 1} of queue {queue[1]} of topic "
                f"{queue[0]!r}: op rows are lost or doubled; restore the table from a copy"
            )
        moved[queue] = end
    return moved


def still_waiting(waiting: Waiting, rows: pa.Table) -> Waiting:
    """What waits for a place after these op rows, when this waited before them."""
    placing = of_kind(rows, Kind.PLACE)
    committing = pc.and_(of_kind(rows, Kind.COMMIT), pc.is_null(rows["queue_offset"]))
    changes = rows.filter(pc.or_(placing, committing)).select(["kind", "half_id", "count", "until"]).to_pylist()
    if not changes:
        return waiting
    changed = {half_id: Counter(waiting.get(half_id, {})) for half_id in {r["half_id"] for r in changes}}
    for r in changes:
        counts = changed[r["half_id"]]
        counts[r["until"]] += r["count"] if r["kind"] == Kind.COMMIT.value else -r["count"]
        if counts[r["until"]] <= 0:
            del counts[r["until"]]
    return {half_id: counts for half_id, counts in {**waiting, **changed}.items() if counts}


def _still_in_conflict(conflicts: frozenset[str], rows: pa.Table) -> frozenset[str]:
    changes = rows.filter(of_kind(rows, Kind.CONFLICT)).select(["half_id", "attempt"]).to_pylist()
    found = set(conflicts)
    for row in changes:
        if row["attempt"] is None:  # a person has resolved it
            found.discard(row["half_id"])
        else:
            found.add(row["half_id"])
    return frozenset(found) if changes else conflicts


def _last_reopened_ms(rows: pa.Table) -> int:
    newest = pc.max(rows.filter(of_kind(rows, Kind.REOPEN))["op_time"]).as_py()
    return 0 if newest is None else int(newest.timestamp() * 1000)


def _expired(firsts: Tails, rows: pa.Table, tails: Tails) -> Tails:
    """The first offsets that are kept, after these op rows.

    Raises
    ------
    CorruptLogError
        When messages are to have expired that never were.
    """
    expired = rows.filter(of_kind(rows, Kind.EXPIRE)).select(["firsts"]).to_pylist()
    found = dict(firsts)
    for row in expired:
        for queue, first in _firsts(row).items():
            found[queue] = max(first, found.get(queue, 0))
            if first > tails.get(queue, 0):
                raise CorruptLogError(
                    f"table op lets queue {queue[1]} of topic {queue[0]!r} begin at offset {first}, and it ends at "
                    f"{tails.get(queue, 0)}: it was changed by hand"
                )
    return found if expired else firsts


def _firsts(row: Mapping[str, Any]) -> dict[tuple[str, int], int]:
    said = row["firsts"] or ()
    if any(None in first.values() or first["first_offset"] < 0 for first in said):
        raise CorruptLogError(
            f"table op has a row with first offsets that cannot be: {said[:3]}; it was changed by hand"
        )
    return {(f["topic"], f["queue_id"]): f["first_offset"] for f in said}


def _below(mark: Mapping[str, Any]) -> dict[str, OpenBelow]:
    """The open half batches that a mark names.

    Raises
    ------
    CorruptLogError
        When it says of one what cannot be.
    """
    return {said["half_id"]: _open_below(said, mark) for said in mark["below"]}


def _open_below(said: Mapping[str, Any], mark: Mapping[str, Any]) -> OpenBelow:
    try:
        versions = tuple(int(v) for v in said["versions"])
        waiting = {w["until"]: int(w["count"]) for w in said["waiting"]}
        found = OpenBelow(int(said["ms"]), int(said["pending"]), versions, waiting)
        whole = bool(said["half_id"]) and found.pending >= 0 and min(waiting.values(), default=1) > 0
        whole = whole and list(versions) == sorted({v for v in versions if 0 <= v < mark["since_version"]})
    except TypeError:
        whole = False
    if not whole:
        raise CorruptLogError(
            f"table op has a mark at version {mark['version']} that names half batch {said['half_id']!r} without "
            "saying what is open: it was changed by hand"
        )
    return found


def _newest_mark(marks: pa.Table) -> dict[str, Any]:
    """The last of some mark rows, in version order; CorruptLogError when it says nothing that can be used."""
    newest: dict[str, Any] = marks.slice(marks.num_rows - 1).to_pylist()[0]
    lacks = [name for name in _OF_EACH_MARK if newest[name] is None]
    if lacks or any(None in tail.values() for tail in newest["tails"]):
        raise CorruptLogError(
            f"table op has a mark at version {newest['version']} without {lacks[0] if lacks else 'whole tails'}: it "
            "was changed by hand"
        )
    return newest
