"""The state of ``op`` up to a version, as a reader knows it.

:class:`OpView` is a value. A reader builds the next value aside and takes it in one step. An exception meanwhile (an
interrupt in a notebook, a full memory) leaves the last value, which is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op import NO_OPS, SETTLING, OpenAtMark, OpKind
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.times import EPOCH
from rmq_spark.errors import CorruptLogError

CHUNKS_MAX = 64
_MARK_COLUMNS = ("low_water", "since_version", "tails", "below", "reopened_ms")
"""Columns that every mark fills."""

Tails = Mapping[Queue, int]
"""The next offset of every queue that has messages, by topic and queue."""
Waiting = Mapping[str, Mapping[datetime | None, int]]
"""How many committed messages have no place yet, by half id and due time (None: they wait for an earlier message of
their sharding key)."""


@dataclass(frozen=True)
class OpView:
    """The state after the op rows up to a version."""

    version: int = -1
    rows: pa.Table = field(default_factory=lambda: NO_OPS)
    since: int = 0
    """``rows`` has all op rows from this version on."""
    tails: Tails = field(default_factory=dict)
    waiting: Waiting = field(default_factory=dict)
    last_time: datetime = EPOCH
    low_water: int = 0
    """Prepare time (ms) up to which all is settled, but what is in ``open_at_mark`` and what was reopened later."""
    conflicts: frozenset[str] = frozenset()
    """Half batches with a verdict that came too late, which no person has resolved yet."""
    open_at_mark: Mapping[str, OpenAtMark] = field(default_factory=dict)
    """Half batches that were open when the newest mark passed them, by half id."""
    reopened_ms: int = 0
    """When a transaction was last reopened."""
    marked_at: int = -1
    """The version of the newest mark; -1 before the first one."""
    firsts: Tails = field(default_factory=dict)
    """The first offset that is kept, of queues with expired messages."""

    @classmethod
    def from_mark(cls, rows: pa.Table) -> OpView:
        """The state from which to go on after the newest of these mark rows: just before the first version that is
        still needed."""
        marks = rows.filter(of_kind(rows, OpKind.MARK)).sort_by("version")
        if marks.num_rows == 0:
            raise CorruptLogError("table op has lost its newest mark: restore the table from a copy")
        mark = _newest_mark(marks)
        since = int(mark["since_version"])
        tails = {(t["topic"], t["queue_id"]): t["next_offset"] for t in mark["tails"]}
        open_at_mark = _open_at_mark(mark)
        waiting = {half_id: b.waiting for half_id, b in open_at_mark.items() if b.waiting}
        return cls(
            version=since - 1, since=since, tails=tails, waiting=waiting, open_at_mark=open_at_mark,
            reopened_ms=mark["reopened_ms"], firsts=_firsts(mark),
        )  # fmt: skip

    def after(self, rows: pa.Table, version: int) -> OpView:
        """The state after the op rows up to ``version``. ``rows`` are the new ones, in version order. CorruptLogError:
        they contradict each other or the state before."""
        if rows.num_rows == 0:
            return replace(self, version=version)
        in_memory = pa.concat_tables([self.rows, rows])
        since, low_water = self.since, self.low_water
        open_at_mark, marked_at = self.open_at_mark, self.marked_at
        marks = rows.filter(of_kind(rows, OpKind.MARK))
        if marks.num_rows:
            newest = _newest_mark(marks)
            low_water = newest["low_water"]
            since, marked_at = max(since, newest["since_version"]), newest["version"]
            open_at_mark = _open_at_mark(newest)
            in_memory = in_memory.filter(pc.greater_equal(in_memory["version"], since))
        if in_memory["version"].num_chunks > CHUNKS_MAX:
            in_memory = in_memory.combine_chunks()
        tails = _tails_after(self.tails, rows.filter(pc.is_valid(rows["next_offset"])))
        return OpView(
            version,
            in_memory,
            since,
            tails,
            still_waiting(self.waiting, rows),
            max(self.last_time, pc.max(rows["op_time"]).as_py()),
            low_water,
            _conflicts_after(self.conflicts, rows),
            open_at_mark,
            max(self.reopened_ms, _last_reopened_ms(rows)),
            marked_at,
            _firsts_after(self.firsts, rows, tails),
        )

    def is_behind_mark(self, rows: pa.Table) -> bool:
        """True when a mark among these new op rows makes some rows unnecessary: those may have been pruned before they
        were read."""
        newest = pc.max(rows.filter(of_kind(rows, OpKind.MARK))["since_version"]).as_py()
        return newest is not None and newest > self.version + 1

    def reopened_rows(self, before: int | None = None) -> dict[str, int]:
        """By half id: number of rows that were reopened since the newest mark, minus those settled since; negative when
        more were settled. ``before``: only versions below this one."""
        since_mark = pc.greater(self.rows["version"], self.marked_at)
        if before is not None:
            since_mark = pc.and_(since_mark, pc.less(self.rows["version"], before))
        return {half_id: -net for half_id, net in net_settled(self.rows.filter(since_mark)).items()}


def of_kind(rows: pa.Table, kind: OpKind) -> pa.ChunkedArray:
    return pc.equal(rows["kind"], kind.value)


def net_settled(rows: pa.Table) -> dict[str, int]:
    """By half id: number of rows that op markers settled, minus rows that were reopened."""
    counts = net_settled_table(rows)
    return dict(zip(counts["half_id"].to_pylist(), counts["rows"].to_pylist(), strict=True))


def net_settled_table(rows: pa.Table) -> pa.Table:
    """``half_id, rows``: number of rows that op markers settled, minus rows that were reopened."""
    settling = pc.is_in(rows["kind"], value_set=pa.array([k.value for k in SETTLING]))
    reopening = of_kind(rows, OpKind.REOPEN)
    sign = pc.subtract(pc.cast(settling, pa.int64()), pc.cast(reopening, pa.int64()))
    signed = pa.table({"half_id": rows["half_id"], "n": pc.multiply(sign, rows["count"])})
    signed = signed.filter(pc.is_valid(signed["half_id"]))
    sums = signed.group_by("half_id", use_threads=False).aggregate([("n", "sum")])
    return pa.table({"half_id": sums["half_id"], "rows": sums["n_sum"]})


def _tails_after(tails: Tails, placed: pa.Table) -> Tails:
    """The tails after new placements. Gaps or overlaps mean that op rows are lost or doubled."""
    moved = dict(tails)
    sums = [("queue_offset", "min"), ("next_offset", "max"), ("count", "sum")]
    for row in placed.group_by(["topic", "queue_id"], use_threads=False).aggregate(sums).to_pylist():
        queue = (row["topic"], row["queue_id"])
        tail, count, end = tails.get(queue, 0), row["count_sum"], row["next_offset_max"]
        if row["queue_offset_min"] < tail:  # a cold start reads some rows that the mark includes
            of_queue = pc.and_(pc.equal(placed["topic"], queue[0]), pc.equal(placed["queue_id"], queue[1]))
            new = pc.and_(of_queue, pc.greater_equal(placed["queue_offset"], tail))
            count, end = pc.sum(placed.filter(new)["count"]).as_py() or 0, max(end, tail)
        if tail + count != end:
            raise CorruptLogError(
                f"table op places {count} messages at offsets {tail} to {end - 1} of queue {queue[1]} of topic "
                f"{queue[0]!r}: op rows are lost or doubled; restore the table from a copy"
            )
        moved[queue] = end
    return moved


def still_waiting(waiting: Waiting, rows: pa.Table) -> Waiting:
    """The messages that wait for a place after these op rows; ``waiting`` has those that waited before."""
    placing = of_kind(rows, OpKind.PLACE)
    committing = pc.and_(of_kind(rows, OpKind.COMMIT), pc.is_null(rows["queue_offset"]))
    changes = rows.filter(pc.or_(placing, committing)).select(["kind", "half_id", "count", "until"]).to_pylist()
    if not changes:
        return waiting
    changed = {half_id: Counter(waiting.get(half_id, {})) for half_id in {r["half_id"] for r in changes}}
    for r in changes:
        counts = changed[r["half_id"]]
        counts[r["until"]] += r["count"] if r["kind"] == OpKind.COMMIT.value else -r["count"]
        if counts[r["until"]] <= 0:
            del counts[r["until"]]
    return {half_id: counts for half_id, counts in {**waiting, **changed}.items() if counts}


def _conflicts_after(conflicts: frozenset[str], rows: pa.Table) -> frozenset[str]:
    changes = rows.filter(of_kind(rows, OpKind.CONFLICT)).select(["half_id", "attempt"]).to_pylist()
    still_open = set(conflicts)
    for row in changes:
        if row["attempt"] is None:  # a person has resolved it
            still_open.discard(row["half_id"])
        else:
            still_open.add(row["half_id"])
    return frozenset(still_open) if changes else conflicts


def _last_reopened_ms(rows: pa.Table) -> int:
    newest = pc.max(rows.filter(of_kind(rows, OpKind.REOPEN))["op_time"]).as_py()
    return 0 if newest is None else int(newest.timestamp() * 1000)


def _firsts_after(firsts: Tails, rows: pa.Table, tails: Tails) -> Tails:
    """The first offsets that are kept, after these op rows. CorruptLogError: they expire what never existed."""
    expired = rows.filter(of_kind(rows, OpKind.EXPIRE)).select(["firsts"]).to_pylist()
    new_firsts = dict(firsts)
    for row in expired:
        for queue, first in _firsts(row).items():
            new_firsts[queue] = max(first, new_firsts.get(queue, 0))
            if first > tails.get(queue, 0):
                raise CorruptLogError(
                    f"table op lets queue {queue[1]} of topic {queue[0]!r} begin at offset {first}, and it ends at "
                    f"{tails.get(queue, 0)}: it was changed by hand"
                )
    return new_firsts if expired else firsts


def _firsts(row: Mapping[str, Any]) -> dict[Queue, int]:
    entries = row["firsts"] or ()
    if any(None in first.values() or first["first_offset"] < 0 for first in entries):
        raise CorruptLogError(
            f"table op has a row with first offsets that cannot be: {entries[:3]}; it was changed by hand"
        )
    return {(f["topic"], f["queue_id"]): f["first_offset"] for f in entries}


def _open_at_mark(mark: Mapping[str, Any]) -> dict[str, OpenAtMark]:
    """The open half batches that a mark names. CorruptLogError: the mark has an impossible entry."""
    return {entry["half_id"]: _entry_of(entry, mark) for entry in mark["below"]}


def _entry_of(entry: Mapping[str, Any], mark: Mapping[str, Any]) -> OpenAtMark:
    try:
        versions = tuple(int(v) for v in entry["versions"])
        waiting = {w["until"]: int(w["count"]) for w in entry["waiting"]}
        batch = OpenAtMark(int(entry["ms"]), int(entry["pending"]), versions, waiting)
        is_whole = bool(entry["half_id"]) and batch.pending >= 0 and min(waiting.values(), default=1) > 0
        is_whole = is_whole and list(versions) == sorted({v for v in versions if 0 <= v < mark["since_version"]})
    except TypeError:
        is_whole = False
    if not is_whole:
        raise CorruptLogError(
            f"table op has a mark at version {mark['version']} that names half batch {entry['half_id']!r} without "
            "saying what is open: it was changed by hand"
        )
    return batch


def _newest_mark(marks: pa.Table) -> dict[str, Any]:
    """The last of these mark rows, in version order. Raises CorruptLogError when it lacks what every mark has."""
    newest: dict[str, Any] = marks.slice(marks.num_rows - 1).to_pylist()[0]
    lacks = [name for name in _MARK_COLUMNS if newest[name] is None]
    if lacks or any(None in tail.values() for tail in newest["tails"]):
        raise CorruptLogError(
            f"table op has a mark at version {newest['version']} without {lacks[0] if lacks else 'whole tails'}: it "
            "was changed by hand"
        )
    return newest
