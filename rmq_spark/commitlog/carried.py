"""Prepares and decisions as bytes, for another process of this machine that commits them, and its answers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa

from rmq_spark.commitlog.half import HALF_SCHEMA, HalfHeader, HalfRows, HalfWriter, Segment, together
from rmq_spark.commitlog.half_store import HalfRecord, Staged, StoredFile
from rmq_spark.commitlog.ledger import Decision, Placed, RolledBack
from rmq_spark.commitlog.op import Who
from rmq_spark.commitlog.rows import Ranges, RowSet

_LENGTH = struct.Struct("!I")
_header = attrgetter(*(f.name for f in fields(HalfHeader)))
_segment = attrgetter(*(f.name for f in fields(Segment)))
_placed = attrgetter(*(f.name for f in fields(Placed)))


class Answer(NamedTuple):
    """What another process says of a half batch that it has prepared.

    Attributes
    ----------
    record : HalfRecord
    untouched : bool
        Whether ``op`` said nothing of it after the prepare.
    """

    record: HalfRecord
    untouched: bool


# ---------------------------------------------------------------- prepares
def pack_prepares(staged: Sequence[Staged], until_s: float) -> bytes:
    """Half batches whose rows are in memory, to be prepared before a time of the machine's monotonic clock."""
    rows = [file for batch in staged for file in batch.files if isinstance(file, HalfRows)]
    table = together(rows).cast(HALF_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, HALF_SCHEMA) as stream:
        stream.write_table(table.combine_chunks())
    said = [
        [_header(batch.header), [[r.file_no, _segments(r.segments), r.staged_at, r.delayed] for r in batch.files]]
        for batch in staged
    ]
    head = json.dumps([until_s, said]).encode()
    return b"".join((_LENGTH.pack(len(head)), head, sink.getvalue()))


def unpack_prepares(data: bytes, own: Callable[[HalfWriter], HalfWriter]) -> list[Staged]:
    """What :func:`pack_prepares` packed, with writers that ``own`` makes those of this process."""
    (length,) = _LENGTH.unpack_from(data)
    body = _LENGTH.size + length
    until_s, said = json.loads(data[_LENGTH.size : body])
    with pa.ipc.open_stream(data[body:]) as stream:
        table = stream.read_all()
    if table.schema != HALF_SCHEMA:
        raise ValueError("rows of another schema came")
    found: list[Staged] = []
    at = 0
    for header, files in said:
        writer = own(HalfWriter(HalfHeader(*header), {}, None, None))
        rows: list[HalfRows] = []
        for file_no, segments, staged_at, delayed in files:
            rows.append(HalfRows(writer, table, file_no, _of_segments(segments), staged_at, delayed, at))
            at += rows[-1].count
        found.append(Staged(writer.header, rows, until_s))
    if at != table.num_rows:
        raise ValueError(f"{table.num_rows} rows came for half batches of {at}")
    return found


def pack_prepared(answers: Sequence[Answer | None]) -> bytes:
    """What became of each half batch; None: it has to be prepared by who asked."""
    return json.dumps([a and [_record_values(a.record), a.untouched] for a in answers]).encode()


def unpack_prepared(data: bytes, staged: Sequence[Staged]) -> list[Answer | None]:
    """What :func:`pack_prepared` packed, for these half batches."""
    return [
        None if answer is None else Answer(_record(batch.header, answer[0]), answer[1])
        for batch, answer in zip(staged, json.loads(data), strict=True)
    ]


# ---------------------------------------------------------------- decisions
def pack_decisions(decisions: Sequence[Decision]) -> bytes:
    """Decisions on half batches."""
    return json.dumps(
        [
            [
                _header(d.record.header),
                _record_values(d.record),
                d.attempt,
                _bits(d.commit),
                _bits(d.rollback),
                str(d.who),
                [[part.reason, part.refused, [*part.ranges.items()]] for part in d.rolled_back],
            ]
            for d in decisions
        ]
    ).encode()


def unpack_decisions(data: bytes) -> list[Decision]:
    """What :func:`pack_decisions` packed."""
    return [
        Decision(
            _record(HalfHeader(*header), record),
            attempt,
            _of_bits(commit),
            _of_bits(rollback),
            Who(who),
            rolled_back=tuple(RolledBack(why, refused, _of_ranges(ranges)) for why, refused, ranges in rolled_back),
        )
        for header, record, attempt, commit, rollback, who, rolled_back in json.loads(data)
    ]


def pack_decided(answers: Sequence[Sequence[Placed] | None]) -> bytes:
    """What each decision made visible; None: it has to be made by who asked."""
    return json.dumps([None if placed is None else [*map(_placed, placed)] for placed in answers]).encode()


def unpack_decided(data: bytes) -> list[list[Placed] | None]:
    """What :func:`pack_decided` packed."""
    return [None if placed is None else [Placed(*values) for values in placed] for placed in json.loads(data)]


# ---------------------------------------------------------------- their parts
def _segments(segments: Sequence[Segment]) -> list[Any]:
    return [*map(_segment, segments)]


def _of_segments(said: Sequence[Sequence[Any]]) -> tuple[Segment, ...]:
    return tuple(Segment(*values) for values in said)


def _record_values(record: HalfRecord) -> list[Any]:
    files = [[n, f.path, f.rows, _segments(f.segments), f.delayed] for n, f in record.files.items()]
    return [record.prepared_ms, record.staged_ms, files]


def _record(header: HalfHeader, said: Sequence[Any]) -> HalfRecord:
    prepared_ms, staged_ms, files = said
    stored = {n: StoredFile(path, rows, _of_segments(segments), delayed) for n, path, rows, segments, delayed in files}
    return HalfRecord(header, prepared_ms, stored, staged_ms)


def _bits(rows: Mapping[int, bytes]) -> list[tuple[int, str]]:
    return [(file_no, bits.hex()) for file_no, bits in rows.items()]


def _of_ranges(said: Sequence[tuple[int, Sequence[Sequence[int]]]]) -> dict[int, Ranges]:
    return {file_no: tuple((first, last) for first, last in ranges) for file_no, ranges in said}


def _of_bits(said: Sequence[tuple[int, str]]) -> RowSet:
    return RowSet({file_no: bytes.fromhex(bits) for file_no, bits in said})
