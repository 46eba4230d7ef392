"""Makes the op rows that are to be written: as few as possible to name the rows of a half batch, and their offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from rmq_spark._core.log.decision import Decision, Placed, RolledBack
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.op import OpKind, OpRow, Who
from rmq_spark._core.log.op_view import Tails
from rmq_spark._core.log.placer import Piece
from rmq_spark._core.vocabulary.rows import Ranges, RowSet, ranges_count, runs
from rmq_spark._core.vocabulary.verdicts import LocalTransactionState


def with_offsets(rows: list[OpRow], tails: Tails) -> list[OpRow]:
    """Give commit and place rows, in their order, the next offsets of their queues. A commit that waits gets no
    offset."""
    next_offsets = dict(tails)
    for row in rows:
        waits = row.kind is OpKind.COMMIT and row.until is not None
        if row.topic is not None and row.queue_id is not None and not waits:
            queue = (row.topic, row.queue_id)
            row.queue_offset = next_offsets.get(queue, 0)
            next_offsets[queue] = row.queue_offset + row.count
    return rows


def placed_messages(rows: Sequence[OpRow]) -> list[Placed]:
    """The messages that op rows make visible."""
    return [
        Placed(r.topic, r.queue_id, r.queue_offset, r.count, r.half_id or "")
        for r in rows
        if r.topic is not None and r.queue_id is not None and r.queue_offset is not None
    ]


def commit_rows(
    record: HalfRecord,
    by_due: Iterable[tuple[datetime | None, RowSet]],
    attempt: int,
    who: Who,
    reason: str | None,
) -> list[OpRow]:
    """Op rows without offsets that commit rows, one for each due time, half file and queue."""
    return [
        OpRow(
            OpKind.COMMIT,
            record.half_id,
            file_no,
            ranges,
            ranges_count(ranges),
            attempt,
            who,
            reason,
            segment.topic,
            segment.queue_id,
            path=file.path,
            file_rows=file.rows,
            transaction_per=record.header.transaction_per,
            producer_group=record.header.producer_group,
            until=due,
        )
        for due, due_rows in by_due
        for file_no, bits in due_rows.items()
        for file in [record.files[file_no]]
        for segment in file.segments
        if (ranges := runs(bits, segment.first, segment.last + 1))
    ]


def place_row(piece: Piece) -> OpRow:
    header, file = piece.record.header, piece.record.files[piece.file_no]
    return OpRow(
        OpKind.PLACE,
        header.half_id,
        piece.file_no,
        piece.ranges,
        piece.count,
        piece.attempt,
        topic=piece.topic,
        queue_id=piece.queue_id,
        path=file.path,
        file_rows=file.rows,
        transaction_per=header.transaction_per,
        producer_group=header.producer_group,
        until=piece.due,
    )


def rollback_rows(decision: Decision, rows: RowSet) -> list[OpRow]:
    """Op rows that roll back ``rows``, each with its reason. ``rows`` are the rows of the decision that are
    undecided."""
    rollback_rows: list[OpRow] = []
    for part in decision.rolled_back or [RolledBack(decision.reason, False, dict(rows.ranges()))]:
        refused = True if part.refused or decision.who is Who.EXECUTE else None
        part_ranges = part.ranges
        if rows.count < decision.rollback.count:
            part_ranges = {n: _ranges_within(rows.get(n, b""), ranges) for n, ranges in part_ranges.items()}
        op_rows = _rows_naming(
            OpKind.ROLLBACK, decision.record, part_ranges, decision.attempt, decision.who, part.reason
        )
        rollback_rows += [replace(row, refused=refused) for row in op_rows]
    return rollback_rows


def lease_row(record: HalfRecord, until: datetime) -> OpRow:
    """The op row that keeps checkers away from a half batch until a time."""
    return OpRow(OpKind.LEASE, record.half_id, decided_by=Who.EXECUTE, until=until)


def resolution_row(record: HalfRecord, verdict: LocalTransactionState, reason: str) -> OpRow:
    """The op row by which a person ends a conflict: it has no attempt."""
    row = OpRow(OpKind.CONFLICT, record.half_id, count=record.rows, decided_by=Who.ADMIN, reason=reason)
    return replace(row, verdict=str(verdict))


def _ranges_within(bits: bytes, ranges: Ranges) -> Ranges:
    return tuple(run for first, last in ranges for run in runs(bits, first, last + 1))


def rows_for(kind: OpKind, record: HalfRecord, rows: RowSet, attempt: int, who: Who, reason: str | None) -> list[OpRow]:
    """As few op rows as possible that name these rows."""
    return _rows_naming(kind, record, dict(rows.ranges()), attempt, who, reason)


def _rows_naming(
    kind: OpKind, record: HalfRecord, ranges: Mapping[int, Ranges], attempt: int, who: Who, reason: str | None
) -> list[OpRow]:
    counts = {file_no: ranges_count(file_ranges) for file_no, file_ranges in ranges.items()}
    named: list[tuple[int | None, Ranges | None, int]] = [(n, ranges[n], count) for n, count in counts.items() if count]
    if sum(counts.values()) == record.rows:
        named = [(None, None, record.rows)]
    group = record.header.producer_group
    return [
        OpRow(kind, record.half_id, file_no, file_ranges, count, attempt, who, reason, producer_group=group)
        for file_no, file_ranges, count in named
    ]
