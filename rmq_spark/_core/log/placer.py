"""Decides which committed messages get their offset now, and which wait.

A message waits until it is due (``deliver_at``). In a FIFO topic it also waits while an earlier message of its sharding
key is undecided. A transaction waits as a whole for its keys, so no reader sees a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.batch_state import BatchState, FileState, RowState, ones_at
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.half_table import HalfTable
from rmq_spark._core.log.key_order import KeyIndex, OpenBatch
from rmq_spark._core.log.topics import TopicTable
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.rows import (
    NO_ROWS,
    Ranges,
    RowSet,
    arange,
    booleans_of,
    both,
    bytes_array,
    ranges_count,
    runs,
)
from rmq_spark._core.vocabulary.times import EPOCH


@dataclass(frozen=True)
class Piece:
    """Rows of one half file that follow each other in a queue. Delayed messages were to appear at ``due``."""

    record: HalfRecord
    file_no: int
    ranges: Ranges
    topic: str
    queue_id: int
    attempt: int
    due: datetime | None

    @property
    def count(self) -> int:
        return ranges_count(self.ranges)


class Placer:
    """Reads what decides the place of half messages: their sharding keys and delivery times."""

    def __init__(self, half: HalfTable, topics: TopicTable) -> None:
        self._half = half
        self.keys = KeyIndex(half, topics)

    def by_due(self, record: HalfRecord, rows: RowSet, now: datetime) -> list[tuple[datetime | None, RowSet]]:
        """Rows by the second in which they are due; under None the rows that need not wait.

        Like RocketMQ's timer (``timerPrecisionMs``) it counts in seconds, so that a half batch needs few op rows.
        """
        if not record.delayed:
            return [(None, rows)]
        times = self._half.deliver_times(record, rows)
        dues = pc.ceil_temporal(times, unit="second")
        dues = pc.if_else(pc.greater(dues, pa.scalar(now, TIMESTAMP)), dues, pa.scalar(None, TIMESTAMP))
        rows_by_due: list[tuple[datetime | None, RowSet]] = []
        for due in sorted(pc.unique(dues).to_pylist(), key=lambda due: due or EPOCH):
            chosen = pc.is_null(dues) if due is None else pc.fill_null(pc.equal(dues, pa.scalar(due, TIMESTAMP)), False)
            rows_by_due.append((due, rows.where(chosen)))
        return rows_by_due

    # ------------------------------------------------------------------ what may be placed
    def placeable(self, batches: Sequence[OpenBatch], now: datetime) -> list[Piece]:
        """Committed rows that need not wait any longer: delayed ones by due time, all others in send order."""
        blocked = self._blocked(batches)
        pieces: list[Piece] = []
        for batch, sent in in_send_order(batches):
            decided = batch.state.rows_in((RowState.WAITING,))
            free = (decided & sent) - blocked.get(batch.record.half_id, NO_ROWS)
            for file_no, bits in free.items():
                pieces += _pieces(batch, file_no, bits, now)
        return sorted(pieces, key=lambda piece: piece.due or EPOCH)

    def all_wait(self, batches: Sequence[OpenBatch], others: Sequence[OpenBatch]) -> bool:
        """Whether messages of ``others`` alone block every row of ``batches`` that is committed and not placed."""
        blocked = self._blocked([*batches, *others])
        return not any(b.state.rows_in((RowState.WAITING,)) - blocked.get(b.record.half_id, NO_ROWS) for b in batches)

    def _blocked(self, batches: Sequence[OpenBatch]) -> dict[str, RowSet]:
        """Committed rows that wait for a message sent before them, by half id.

        A transaction is placed together with all that it waits for, or after them; so two that wait for nobody but each
        other are placed together.
        """
        units = enumerate(in_send_order(b for b in batches if self.keys.fifo_of(b.record)))
        open_rows = [_ranked(self.keys.open_rows(batch), batch, sent, rank) for rank, (batch, sent) in units]
        if not any(rows["pending"].num_chunks and pc.any(rows["pending"]).as_py() for rows in open_rows):
            return {}
        rows = pa.concat_tables(open_rows).sort_by(
            [("rank", "ascending"), ("file_no", "ascending"), ("row_no", "ascending")]
        )
        rows = rows.append_column("sent", arange(rows.num_rows))
        waiting = rows["pending"]
        while True:
            with_key = pc.and_(waiting, pc.is_valid(rows["key"]))
            first = rows.filter(with_key).group_by("key", use_threads=False).aggregate([("sent", "min")])
            first_sent = first["sent_min"].take(pc.index_in(rows["key"], value_set=first["key"].combine_chunks()))
            has_earlier = pc.fill_null(pc.less(first_sent, rows["sent"]), False)
            stopped = pc.unique(rows.filter(pc.and_(has_earlier, pc.invert(waiting)))["transaction"])
            if not len(stopped):
                break
            waiting = pc.or_(waiting, pc.is_in(rows["transaction"], value_set=stopped))
        stopped_rows = rows.filter(pc.and_(waiting, pc.invert(rows["pending"])))
        blocked: dict[str, dict[int, bytearray]] = {}
        files = {b.record.half_id: b.state.files for b in batches}
        columns = stopped_rows.select(["half_id", "file_no", "row_no"]).to_pydict()
        for half_id, file_no, row_no in zip(*columns.values(), strict=True):
            bits = blocked.setdefault(half_id, {}).setdefault(file_no, bytearray(files[half_id][file_no].rows))
            bits[row_no] = 1
        return {half_id: RowSet(bits) for half_id, bits in blocked.items()}


def _ranked(open_rows: pa.Table, batch: OpenBatch, sent: RowSet, rank: int) -> pa.Table:
    """The open rows of a half batch that were sent together, with their rank in send order."""
    if sent.count < batch.record.rows:
        bits = b"".join(sent.get(n) or bytes(file.rows) for n, file in batch.state.files.items())
        open_rows = open_rows.filter(booleans_of(bits).take(open_rows["at"]))
    return open_rows.append_column("rank", pa.repeat(pa.scalar(rank, pa.int64()), open_rows.num_rows))


# ---------------------------------------------------------------- send order
def in_send_order(batches: Iterable[OpenBatch]) -> Iterator[tuple[OpenBatch, RowSet]]:
    """Half batches in send order, each with its rows that were sent together.

    Half batches are sorted by prepare time, and those of one commit by name. A reopened transaction counts as sent when
    it is reopened.
    """
    units: list[tuple[tuple[int, str, int, int], OpenBatch, RowSet]] = []
    for batch in batches:
        header, prepared_ms = batch.record.header, batch.record.prepared_ms
        for at_ms, rows in _sent_together(batch.state, prepared_ms):
            units.append(((at_ms, header.app_id, header.batch_id, at_ms != prepared_ms), batch, rows))
    for _, batch, rows in sorted(units, key=lambda unit: unit[0]):
        yield batch, rows


def last_sent_ms(batch: OpenBatch) -> int:
    """When the last rows of a half batch were sent (ms)."""
    return max(at_ms for at_ms, _ in _sent_together(batch.state, batch.record.prepared_ms))


def _sent_together(state: BatchState, prepared_ms: int) -> Iterator[tuple[int, RowSet]]:
    times: dict[int, dict[int, bytearray]] = {}
    never_reopened = {n: bytearray(b"\x01") * file.rows for n, file in state.files.items()}
    for n, file in state.files.items():
        for start, end, when in file.reopened:  # the last reopen counts
            for masks in times.values():
                if n in masks:
                    masks[n][start:end] = bytes(end - start)
            at_ms = int(when.timestamp() * 1000)
            bits = times.setdefault(at_ms, {}).setdefault(n, bytearray(file.rows))
            bits[start:end] = b"\x01" * (end - start)
            never_reopened[n][start:end] = bytes(end - start)
    yield prepared_ms, RowSet(never_reopened)
    for at_ms, masks in sorted(times.items()):
        yield at_ms, RowSet(masks)


# ---------------------------------------------------------------- pieces
def _pieces(batch: OpenBatch, file_no: int, bits: bytes, now: datetime) -> Iterator[Piece]:
    file = batch.state.files[file_no]
    attempts = sorted(set(pc.unique(bytes_array(file.attempt).filter(booleans_of(bits))).to_pylist()))
    for due, due_bits in _split_due_rows(file, bits, now):
        for attempt in attempts:
            attempt_bits = due_bits if len(attempts) == 1 else both(due_bits, file.attempt.translate(ones_at(attempt)))
            for segment in file.segments:
                if ranges := runs(attempt_bits, segment.first, segment.last + 1):
                    yield Piece(batch.record, file_no, ranges, segment.topic, segment.queue_id, attempt, due)


def _split_due_rows(file: FileState, bits: bytes, now: datetime) -> Iterator[tuple[datetime | None, bytes]]:
    """Rows that need not wait, by due time; under None the rows without a due time."""
    free = bytearray(bits)
    dues: dict[datetime, bytearray] = {}
    for start, end, due in file.due:
        free[start:end] = bytes(end - start)
        if due <= now:
            dues.setdefault(due, bytearray(file.rows))[start:end] = bits[start:end]
    yield None, bytes(free)
    for due, chosen in sorted(dues.items()):
        yield due, bytes(chosen)
