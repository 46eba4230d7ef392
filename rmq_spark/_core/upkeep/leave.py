"""Takes half batches that are settled and drained out of the table ``half``.

::

    settled ─▶ drained ─▶ a grace ─▶ archived in op ─▶ its files leave half ─▶ another grace ─▶ its op rows are pruned
                                     from here on nobody                                       (``prune``)
                                     decides on it again

The ``archived`` row is written by compare-and-set, so ``op`` gets no row of a half batch between the look at it and
this row. A process may die anywhere: the next one goes on with half batches that are archived and still in ``half``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.archive import DECISIONS_MAX, Archived, ArchivedDecision
from rmq_spark._core.log.batch_state import RowState, rolled_back_as
from rmq_spark._core.log.half_header import HEADER_COLUMNS
from rmq_spark._core.log.op import DECIDING, OpKind, OpRow
from rmq_spark._core.log.op_view import net_settled, of_kind
from rmq_spark._core.log.read_op import read_op
from rmq_spark._core.messages.messages_table import drained_up_to
from rmq_spark._core.storage.foreign_commits import require_own
from rmq_spark._core.storage.table import live_paths, take_out
from rmq_spark._core.vocabulary.options import (
    AUDIT_S,
    GRACE_S,
    GRACE_S_MIN,
    IDEMPOTENCY_S,
    Duration,
    seconds,
)
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import CorruptLogError, HalfBatchLeftError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

BATCHES_PER_ROUND = 10_000
"""Half batches that are examined together."""
HEADER_ROWS_MAX = 1_000_000
"""Half rows whose headers are read together."""
MORE_REASONS = "other reasons, which are not kept"
FILES_REMOVED_MAX = 10_000
"""Half files that leave in one commit."""
ARCHIVE_COLUMNS = (
    "version", "op_time", "kind", "half_id", "count", "attempt", "decided_by", "reason", "refused", "queue_offset",
)  # fmt: skip
NEEDS_FULL_STATE = (OpKind.QUARANTINE, OpKind.REOPEN)
"""After an op row of these kinds, counts alone do not tell what became of a half batch that was rolled back."""


@dataclass(frozen=True)
class Graces:
    """How long settled half batches stay.

    Attributes
    ----------
    reader_s : float
        Seconds from a half batch's last op row until it leaves, and from then until its op rows are pruned.
    audit_s : float
        Seconds for which rolled-back messages stay, so that a person can still look at them and overrule.
    idempotency_s : float
        Seconds for which a half batch's outcome is kept after it left.
    """

    reader_s: float = GRACE_S
    audit_s: float = AUDIT_S
    idempotency_s: float = IDEMPOTENCY_S

    @classmethod
    def of(cls, grace: Duration | None, audit: Duration | None, idempotency: Duration | None) -> Graces:
        """Graces from durations such as ``"7d"``; None stands for the default.

        Raises
        ------
        OptionError
            For a text that is no duration, or a grace under a minute.
        """
        texts = {
            "reader_s": ("grace", grace),
            "audit_s": ("audit", audit),
            "idempotency_s": ("idempotency", idempotency),
        }
        graces = cls(**{field: seconds(text, name) for field, (name, text) in texts.items() if text is not None})
        if graces.reader_s < GRACE_S_MIN:
            raise OptionError(
                f"{grace!r} is under {GRACE_S_MIN:g} seconds: readers and producers at work may need what leaves",
                argument="grace",
            )
        return graces

    def and_later(self, seconds: float) -> Graces:
        """These graces, each longer by ``seconds``."""
        return Graces(self.reader_s + seconds, self.audit_s + seconds, self.idempotency_s + seconds)


@dataclass(frozen=True)
class _Batch:
    """A half batch that may leave: the sums of its op rows."""

    rows: int
    placed: int
    net_settled: int
    needs_full_state: bool  # counts alone do not tell what became of it
    last_placed: int  # the last version that placed some of it
    last_version: int
    last_time: datetime


class Leaver:
    def __init__(self, engine: Engine, graces: Graces) -> None:
        self._engine = engine
        self._graces = graces
        self._newest: dict[str, int] = {}  # by application: lower batch ids are not its last half batch

    def archive(self, dry_run: bool = False) -> int:
        """Archive the half batches that may leave; return how many. With ``dry_run`` only count them."""
        engine = self._engine
        with engine.lock:
            version = engine.ledger.refresh()
            engine.messages_table.refresh()
            if not dry_run:
                require_own(engine.messages_table)
            drained = drained_up_to(engine.messages_table)
            live = self._below_the_mark()
        return sum(
            self._archive(live.slice(first, BATCHES_PER_ROUND), version, drained, dry_run)
            for first in range(0, live.num_rows, BATCHES_PER_ROUND)
        )

    def _below_the_mark(self) -> pa.Table:
        """Half batches whose files all lie at or below the mark, except those that are open or needed: ``half_id, rows,
        ms``, the oldest first."""
        engine = self._engine
        low_water = engine.ledger.view.low_water
        batches = engine.half.contents.all_batches().table
        needed = {*engine.ledger.view.open_at_mark, *engine.ledger.view.waiting, *engine.ledger.view.conflicts}
        below = batches.filter(pc.less_equal(batches["ms"], low_water)).sort_by("ms")
        return below.filter(pc.invert(pc.is_in(below["half_id"], value_set=pa.array(sorted(needed), pa.string()))))

    def _is_newest(self, header: Mapping[str, Any]) -> bool:
        """True for the last half batch of a stream, which a restart replays."""
        app_id, batch_id = header["app_id"], header["batch_id"]
        if batch_id == 0 and header["query_id"] is None:  # a producer's send: its app id has one half batch
            return False
        if app_id not in self._newest or batch_id > self._newest[app_id]:
            self._newest[app_id] = self._engine.half.table.transaction_version(app_id) or 0
        return bool(batch_id >= self._newest[app_id])

    def _archive(self, live: pa.Table, version: int, drained: int, dry_run: bool) -> int:
        ids = live["half_id"].to_pylist()
        rows = self._op_rows(ids)
        archived_ids = set(rows.filter(of_kind(rows, OpKind.ARCHIVED))["half_id"].to_pylist())
        row_counts = dict(zip(ids, live["rows"].to_pylist(), strict=True))
        leaving = {
            half_id: batch
            for half_id, batch in _batches(rows, row_counts).items()
            if half_id not in archived_ids and batch.last_placed <= drained and self._may_leave(batch)
        }
        prepared_ms = dict(zip(ids, live["ms"].to_pylist(), strict=True))
        records = list(self._archived(rows, leaving, prepared_ms))
        return len(records) if dry_run or not records else len(self._append(records, version))

    def _op_rows(self, half_ids: Sequence[str]) -> pa.Table:
        op = self._engine.op_table
        where = pc.field("half_id").isin(list(half_ids))
        return read_op(op, live_paths(op), ARCHIVE_COLUMNS, where).sort_by("version")

    def _may_leave(self, batch: _Batch) -> bool:
        """Whether all messages are settled, and the grace is over."""
        is_settled = batch.placed == batch.rows or batch.net_settled == batch.rows
        audit_s = 0.0 if batch.placed == batch.rows else self._graces.audit_s
        grace_s = max(self._graces.reader_s, audit_s)
        return is_settled and batch.last_time <= self._engine.runtime.now() - timedelta(seconds=grace_s)

    # ------------------------------------------------------------------ archived records
    def _archived(
        self, rows: pa.Table, leaving: Mapping[str, _Batch], prepared_ms: Mapping[str, int]
    ) -> Iterator[Archived]:
        decided = rows.filter(pc.is_in(rows["kind"], value_set=pa.array(sorted(DECIDING))))
        by_batch: dict[str, list[dict[str, Any]]] = {half_id: [] for half_id in leaving}
        for row in decided.to_pylist():
            if row["half_id"] in by_batch:
                by_batch[row["half_id"]].append(row)
        for header in self._headers(leaving):
            if self._is_newest(header):
                continue
            half_id = header["half_id"]
            batch, decisions = leaving[half_id], by_batch[half_id]
            counts_tell = batch.placed == batch.rows or not batch.needs_full_state
            counts = _counts(batch, decisions) if counts_tell else self._counts(half_id)
            if counts is not None:
                attempt = max((d["attempt"] or 1 for d in decisions), default=1)
                yield Archived(
                    **{**header, **counts},
                    attempt=attempt,
                    prepared_ms=prepared_ms[half_id],
                    last_version=batch.last_version,
                    decisions=list(_summed(decisions)),
                )

    def _headers(self, leaving: Collection[str]) -> Iterator[dict[str, Any]]:
        paths = self._engine.half.contents.paths_of(leaving)
        while paths:
            chunk: list[str] = []
            size = 0
            while paths and (not chunk or size + paths[-1][1] <= HEADER_ROWS_MAX):
                path, rows = paths.pop()
                chunk.append(path)
                size += rows
            stored = self._stored_headers(chunk)
            aggregates = [(name, "first") for name in HEADER_COLUMNS if name != "half_id"]
            headers = stored.group_by("half_id", use_threads=False).aggregate(aggregates)
            headers = headers.rename_columns([name.removesuffix("_first") for name in headers.column_names])
            yield from (header for header in headers.to_pylist() if header["half_id"] in leaving)

    def _stored_headers(self, paths: Sequence[str]) -> pa.Table:
        """The headers in some files. A lost or damaged file is left out: its half batches stay in ``half``."""
        try:
            return self._engine.half.table.read(paths, HEADER_COLUMNS)
        except CorruptLogError as problem:
            if len(paths) > 1:
                return pa.concat_tables([self._stored_headers([path]) for path in paths])
            logger.warning("a settled half batch does not leave: %s", redacted(problem))
            return self._engine.half.table.read([], HEADER_COLUMNS)

    def _counts(self, half_id: str) -> dict[str, int] | None:
        """Count a half batch's messages by outcome, from its whole state; None when it is not settled for good."""
        try:
            state = self._engine.state_of(self._engine.get(half_id), refresh=False)
        except HalfBatchLeftError:
            return None
        except CorruptLogError as problem:
            logger.warning("settled half batch %r does not leave: %s", half_id, redacted(problem))
            return None
        if state.in_conflict or state.count(RowState.PENDING, RowState.QUARANTINED, RowState.WAITING):
            return None
        return {
            "committed": state.count(RowState.COMMITTED),
            "rolled_back": state.count(RowState.ROLLED_BACK),
            "rolled_back_by_check": state.count(RowState.ROLLED_BACK_BY_CHECK),
            "rolled_back_by_discard": state.count(RowState.ROLLED_BACK_BY_DISCARD),
        }

    # ------------------------------------------------------------------ the commits
    def _append(self, records: Sequence[Archived], version: int) -> Sequence[OpRow]:
        """Write ``archived`` rows for those half batches of which ``op`` has said nothing since a version."""
        ledger = self._engine.ledger

        def build() -> list[OpRow]:
            rows = ledger.view.rows
            if ledger.view.since > version + 1:  # a mark has dropped newer rows: try again next time
                return []
            changed_ids = set(rows.filter(pc.greater(rows["version"], version))["half_id"].to_pylist())
            return [_archived_row(record) for record in records if record.half_id not in changed_ids]

        return ledger.append(build)

    def remove(self, dry_run: bool = False) -> list[str]:
        """Take files of archived half batches out of ``half``; return their paths."""
        engine = self._engine
        with engine.lock:
            engine.ledger.refresh()
            archived = engine.ledger.archived_rows()["half_id"]
            engine.half.table.refresh()
            paths = engine.half.contents.files_of_only(archived.combine_chunks())
        if not dry_run:
            for first in range(0, len(paths), FILES_REMOVED_MAX):
                self._remove(paths[first : first + FILES_REMOVED_MAX])
        return paths

    def _remove(self, paths: Sequence[str]) -> None:
        take_out(self._engine.half.table, paths)


def _batches(rows: pa.Table, row_counts: Mapping[str, int]) -> dict[str, _Batch]:
    is_placed = pc.is_valid(rows["queue_offset"])
    needs_state = pc.is_in(rows["kind"], value_set=pa.array([k.value for k in NEEDS_FULL_STATE]))
    columns = {
        "half_id": rows["half_id"],
        "placed": pc.if_else(is_placed, rows["count"], 0),
        "placed_at": pc.if_else(is_placed, rows["version"], -1),
        "special": needs_state,
        "version": rows["version"],
        "op_time": rows["op_time"],
    }
    aggregates = [("placed", "sum"), ("special", "any"), ("placed_at", "max"), ("version", "max"), ("op_time", "max")]
    sums = pa.table(columns).group_by("half_id", use_threads=False).aggregate(aggregates)
    net = net_settled(rows)
    batches: dict[str, _Batch] = {}
    for row in sums.to_pylist():
        half_id = row["half_id"]
        batches[half_id] = _Batch(
            row_counts[half_id], row["placed_sum"], net.get(half_id, 0), row["special_any"], row["placed_at_max"],
            row["version_max"], row["op_time_max"],
        )  # fmt: skip
    return batches


def _counts(batch: _Batch, decisions: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count by outcome the messages of a half batch that was never reopened or quarantined, or is all committed."""
    if batch.placed == batch.rows:
        return {"committed": batch.rows}
    counts = {"committed": batch.placed}
    for row in decisions:
        if row["kind"] == OpKind.ROLLBACK.value:
            name = rolled_back_as(row["decided_by"], row["refused"]).name.lower()
            counts[name] = counts.get(name, 0) + row["count"]
    return counts


def _summed(decisions: Sequence[Mapping[str, Any]]) -> Iterator[ArchivedDecision]:
    """Decisions, summed up over the rows of a commit that differ only in their file and queue."""
    counts: Counter[ArchivedDecision] = Counter()
    for row in decisions:
        decision = ArchivedDecision(
            at=row["op_time"],
            kind=row["kind"],
            attempt=row["attempt"] or 1,
            decided_by=row["decided_by"],
            reason=row["reason"],
            count=0,
            refused=row["refused"],
        )
        counts[decision] += row["count"]
    if len(counts) > DECISIONS_MAX:  # of rollbacks that differ only in their reasons, the first reasons stay
        counts = _with_fewer_reasons(counts)
    for decision, count in counts.items():
        yield replace(decision, count=count)


def _with_fewer_reasons(counts: Counter[ArchivedDecision]) -> Counter[ArchivedDecision]:
    spare = len(counts) - DECISIONS_MAX
    fewer: Counter[ArchivedDecision] = Counter()
    for decision, count in reversed(counts.items()):
        if decision.kind == OpKind.ROLLBACK.value and spare >= 0:  # one more: the sum is a decision of its own
            decision, spare = replace(decision, reason=MORE_REASONS), spare - 1
        fewer[decision] += count
    return Counter(dict(reversed(fewer.items())))


def _archived_row(record: Archived) -> OpRow:
    return OpRow(
        OpKind.ARCHIVED,
        record.half_id,
        count=record.rows,
        attempt=record.attempt,
        transaction_per=record.transaction_per,
        producer_group=record.producer_group,
        prepared_ms=record.prepared_ms,
        archived=record,
    )
