"""The record of a prepared half batch: its header, when it was prepared, and where its rows lie. It has no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

import pyarrow as pa

from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.batch_state import BatchState, FileState
from rmq_spark._core.log.half import HalfFile, Segment
from rmq_spark._core.log.half_header import HEADER_COLUMNS, HalfHeader
from rmq_spark._core.vocabulary.immutable import immutable
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark.errors import CorruptLogError


@immutable
class StoredFile:
    """A half file of a prepared batch: where its rows lie now, and how they are laid out."""

    path: str
    rows: int
    segments: tuple[Segment, ...]
    delayed: bool = False
    """True when some of its messages are due later."""


@immutable
class HalfRecord:
    """A prepared half batch, without its messages."""

    header: HalfHeader
    prepared_ms: int
    files: Mapping[int, StoredFile]
    staged_ms: int
    """When its newest row was staged, by the clock of the machine that staged it."""
    left: Archived | None = None
    """Its archive once it has left the table. It has no files then."""

    @property
    def half_id(self) -> str:
        return self.header.half_id

    @property
    def prepared_at(self) -> datetime:
        return datetime.fromtimestamp(self.prepared_ms / 1000, timezone.utc)

    @property
    def staged_at(self) -> datetime:
        return datetime.fromtimestamp(self.staged_ms / 1000, timezone.utc)

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files.values())

    @property
    def topics(self) -> frozenset[str]:
        return frozenset(segment.topic for file in self.files.values() for segment in file.segments)

    @property
    def delayed(self) -> bool:
        return any(f.delayed for f in self.files.values())

    @classmethod
    def of_archived(cls, archived: Archived) -> HalfRecord:
        header = HalfHeader(**{name: getattr(archived, name) for name in HEADER_COLUMNS})
        return cls(header, archived.prepared_ms, {}, archived.prepared_ms, archived)

    @property
    def all_rows(self) -> RowSet:
        return RowSet({n: b"\x01" * f.rows for n, f in self.files.items()})

    def fresh_state(self) -> BatchState:
        """The state before any op marker: every row pending under attempt 1."""
        files = {n: FileState(f.path, f.rows, f.segments) for n, f in self.files.items()}
        return BatchState(self.half_id, files)


def record_of(header: HalfHeader, files: Sequence[HalfFile], tried_ms: int, landed_ms: Mapping[str, int]) -> HalfRecord:
    """The record of a prepared half batch. Its prepare time is read from its files in the table. If upkeep has removed
    them all, ``tried_ms`` is used."""
    stored = {f.file_no: StoredFile(f.data.path, f.rows, f.segments, f.delayed) for f in files}
    staged_ms = int(max(f.staged_at for f in files) * 1000)
    prepared_ms = max((landed_ms[f.data.path] for f in files if f.data.path in landed_ms), default=tried_ms)
    return HalfRecord(header, prepared_ms, dict(sorted(stored.items())), staged_ms)


def stored_files_of(path: str, rows: pa.Table) -> list[tuple[int, StoredFile]]:
    """The half files, by number, of which a file of the table has these rows of one half batch."""
    for name in ("file_no", "row_no", "topic", "queue_id", "store_timestamp"):
        if rows[name].null_count:
            raise CorruptLogError(f"{path} has a row without {name}: table half was changed by hand")
    runs_of_queues = rows.group_by(["file_no", "topic", "queue_id"], use_threads=False).aggregate(
        [("row_no", "min"), ("row_no", "max"), ("row_no", "count"), ("deliver_at", "count")]
    )
    runs: dict[int, list[Segment]] = {}
    delayed: set[int] = set()
    for r in runs_of_queues.sort_by("row_no_min").to_pylist():
        if r["row_no_max"] - r["row_no_min"] + 1 != r["row_no_count"]:
            raise CorruptLogError(
                f"{path} lacks rows of file {r['file_no']}, queue {r['queue_id']} of topic {r['topic']!r}: "
                f"found {r['row_no_count']} between {r['row_no_min']} and {r['row_no_max']}"
            )
        runs.setdefault(r["file_no"], []).append(Segment(r["topic"], r["queue_id"], r["row_no_min"], r["row_no_max"]))
        if r["deliver_at_count"]:
            delayed.add(r["file_no"])
    return [
        (file_no, StoredFile(path, sum(s.last - s.first + 1 for s in segments), tuple(segments), file_no in delayed))
        for file_no, segments in runs.items()
    ]
