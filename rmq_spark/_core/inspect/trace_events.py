"""The events of a trace, by the rows that record them: op rows, an archived half batch, and visible messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.inspect.trace import TraceEvent, TraceKind, TracePlace
from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.op import OpKind, OpRow

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

_TRACE_KINDS = {
    OpKind.COMMIT.value: TraceKind.COMMITTED,
    OpKind.PLACE.value: TraceKind.PLACED,
    OpKind.ROLLBACK.value: TraceKind.ROLLED_BACK,
    OpKind.QUARANTINE.value: TraceKind.QUARANTINED,
    OpKind.CHECK.value: TraceKind.CHECKED,
    OpKind.REOPEN.value: TraceKind.REOPENED,
    OpKind.LEASE.value: TraceKind.LEASED,
    OpKind.CONFLICT.value: TraceKind.CONFLICT,
    OpKind.ARCHIVED.value: TraceKind.ARCHIVED,
}

Chosen = Mapping[int, bytes]
"""By half file, a byte for each row: 1 for a traced row."""


def op_events(rows: pa.Table, chosen: Chosen | None, all_rows: int | None) -> Iterator[TraceEvent]:
    """Yield the events of the chosen messages. Equal op rows of one commit make one event."""
    merged: dict[TraceEvent, tuple[int, list[TracePlace]]] = {}  # by the event without messages and places
    conflicts: set[OpRow] = set()  # a mark repeats open conflicts
    for fields in rows.to_pylist():
        row = OpRow.of(fields)
        count, places = _named_messages(row, chosen, all_rows)
        if chosen is not None and not count and row.kind not in (OpKind.LEASE, OpKind.ARCHIVED):
            continue
        kind = _TRACE_KINDS[row.kind]
        if row.kind is OpKind.CONFLICT:
            timeless = replace(row, op_time=None)
            if row.attempt is None:
                kind = TraceKind.RESOLVED
                conflicts.clear()
            elif timeless in conflicts:
                continue
            conflicts.add(timeless)
        event = TraceEvent(
            at=fields["op_time"],
            kind=kind,
            messages=0,
            attempt=row.attempt,
            decided_by=None if row.decided_by is None else str(row.decided_by),
            reason=row.reason,
            until=row.until,
            verdict=row.verdict,
            op_version=fields["version"],
            refused=row.refused,
        )
        earlier_count, earlier_places = merged.get(event, (0, []))
        merged[event] = (earlier_count + count, [*earlier_places, *places])
    for event, (count, places) in merged.items():
        yield replace(event, messages=count, places=_merged(places))


def _named_messages(row: OpRow, chosen: Chosen | None, all_rows: int | None) -> tuple[int, list[TracePlace]]:
    """Return how many of the chosen messages an op row names, and their places."""
    queue = None if row.topic is None or row.queue_id is None else (row.topic, row.queue_id)
    first_offset = None if queue is None else row.queue_offset
    if chosen is None:
        count = row.count or (all_rows or 0 if row.kind in (OpKind.LEASE, OpKind.ARCHIVED) else 0)
        places = (
            []
            if first_offset is None or queue is None
            else [TracePlace(*queue, first_offset, first_offset + row.count - 1)]
        )
        return count, places
    files = chosen.items() if row.file_no is None else [(row.file_no, chosen.get(row.file_no, b""))]
    count, chosen_places = 0, []
    for _, bits in files:
        passed = 0
        for first, last in row.ranges or ((0, len(bits) - 1),):
            for start in _set_positions(bits, first, last):
                count += 1
                if first_offset is not None and queue is not None:
                    offset = first_offset + passed + start - first
                    chosen_places.append(TracePlace(*queue, offset, offset))
            passed += last - first + 1
    return count, chosen_places


def _set_positions(bits: bytes, first: int, last: int) -> Iterator[int]:
    """Yield the positions from ``first`` to ``last`` (included) whose byte is 1."""
    position = bits.find(1, first, last + 1)
    while position >= 0:
        yield position
        position = bits.find(1, position + 1, last + 1)


def _merged(places: Sequence[TracePlace]) -> tuple[TracePlace, ...]:
    """Return places by queue and offset. Adjacent places are merged."""
    merged: list[TracePlace] = []
    for place in sorted(places):
        last = merged[-1] if merged else None
        if last is not None and last[:2] == place[:2] and last.last_offset + 1 == place.first_offset:
            merged[-1] = last._replace(last_offset=place.last_offset)
        else:
            merged.append(place)
    return tuple(merged)


def archived_events(archived: Archived | None) -> Iterator[TraceEvent]:
    for decision in () if archived is None else archived.decisions:
        kept = asdict(decision)
        yield TraceEvent(kind=_TRACE_KINDS[kept.pop("kind")], messages=kept.pop("count"), **kept)


def placed_events(visible: pa.Table) -> Iterator[TraceEvent]:
    """Yield the placements that the messages themselves record."""
    by_commit: dict[tuple[int, datetime, int], list[TracePlace]] = {}
    names = ["op_version", "commit_timestamp", "attempt", "topic", "queue_id", "queue_offset"]
    for version, at, attempt, topic, queue_id, offset in zip(
        *(visible[name].to_pylist() for name in names), strict=True
    ):
        by_commit.setdefault((version, at, attempt), []).append(TracePlace(topic, queue_id, offset, offset))
    for (version, at, attempt), places in by_commit.items():
        yield TraceEvent(at, TraceKind.PLACED, len(places), attempt, places=_merged(places), op_version=version)


def drained_event(engine: Engine, events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the event of draining, unless none of the placed messages is in the table ``messages``."""
    position = engine.drained.op_version
    count = 0
    paths: set[str] = set()
    with engine.lock:
        for event in events:
            if event.op_version is None or event.op_version > position:
                continue
            for place in event.places:
                ranges, _ = engine.drained.ranges(place[:2], place.first_offset, place.last_offset + 1)
                count += sum(drained.count for drained in ranges)
                paths.update(drained.rows.path for drained in ranges)
        actions = engine.messages_table.actions()
    holding_files = actions.filter(pc.is_in(actions["path"], value_set=pa.array(sorted(paths), pa.string())))
    newest_ms = pc.max(holding_files["modification_time"]).as_py()
    if newest_ms is not None:
        yield TraceEvent(datetime.fromtimestamp(newest_ms / 1000, timezone.utc), TraceKind.DRAINED, count)


def by_time(events: Iterable[TraceEvent]) -> tuple[TraceEvent, ...]:
    """Return events by time, the preparation first, because another clock may have written its time."""
    return tuple(sorted(events, key=lambda e: (e.kind is not TraceKind.PREPARED, e.at)))
