"""The border between the table ``messages`` and ``op``, and where drained messages lie.

::

    queue     0 ─────────────────────── border ──────────── tail
              in the table messages     │ placed by op, in half
              (first offset kept)

Drained messages are read from ``messages``: their op rows may be pruned, and their half files gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.message_range import MessageRange, note_first_offsets
from rmq_spark._core.log.op import PRUNED_PLACED, pruned_up_to
from rmq_spark._core.log.op_walk import walk_placements
from rmq_spark._core.messages.messages_table import (
    LAST_COMMIT,
    LAST_PLACED,
    NAME,
    commit_number,
    drained_up_to,
    require_drained,
)
from rmq_spark._core.storage.foreign_commits import foreign_change
from rmq_spark._core.storage.row_range import RowRange
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import CorruptLogError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine


HOW_TO_MEND = "Restore the log from a copy"
RUNS_CACHED_MAX = 100_000
"""The most runs of offsets in files of ``messages`` that are kept in memory."""


class _Run(NamedTuple):
    """Rows of a file whose offsets in a queue follow each other."""

    queue: Queue
    first_row: int
    first_offset: int
    length: int
    file_rows: int


@dataclass(frozen=True)
class _Border:
    """How far a log is drained at a version of ``messages``: up to which version of ``op``, and each queue's end."""

    op_version: int = -1
    ends: Mapping[Queue, int] = field(default_factory=dict)


class DrainBorder:
    """The table ``messages`` as one handle of a log has read it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_answer = (-1, -1)  # a version of the table, and its position then
        self._border = _Border()
        self._runs: OrderedDict[str, tuple[_Run, ...]] = OrderedDict()

    @property
    def op_version(self) -> int:
        """The version of ``op`` up to which the table had all messages at the last call of :meth:`border`."""
        return self._last_answer[1]

    def border(self) -> Mapping[Queue, int]:
        """By queue, the offset of its first message that is not drained yet; 0 for a queue that is missing. Read ``op``
        first: then all that was pruned from it is in the table that is read here. CorruptLogError: ``op`` has not
        placed what was drained, so one of the two tables is an older copy."""
        engine = self._engine
        with engine.lock:
            table = engine.messages_table
            version = table.refresh()
            if version != self._last_answer[0]:
                position = drained_up_to(table)
                if position >= 0:
                    self._require_same_op(position)
                self._last_answer = (version, position)
            if self.op_version < 0:
                return {}
            if self._border.op_version != self.op_version:
                self._border = _Border(self.op_version, self._ends())
            return self._border.ends

    def whole_border(self) -> Mapping[Queue, int]:
        """Return :meth:`border`, or raise CorruptLogError when ``op`` was pruned of messages that ``messages`` lacks.
        This check costs a call of delta-rs."""
        with self._engine.lock:
            border = self.border()
            require_drained(
                self._engine.messages_table, pruned_up_to(self._engine.op_table, PRUNED_PLACED), "op was pruned"
            )
            return border

    def _require_same_op(self, position: int) -> None:
        engine, table = self._engine, self._engine.messages_table
        op = engine.op_table
        if op.version < position and engine.refresh() < position:
            raise CorruptLogError(
                f"table messages has what op placed up to version {position}, and op is at version {op.version}: "
                "table op was set back to an older copy. Restore the newest one"
            )
        placed, commit = (table.transaction_version(name) for name in (LAST_PLACED, LAST_COMMIT))
        if placed is None or placed <= pruned_up_to(op, PRUNED_PLACED):
            return
        if commit not in {commit_number(commit_id) for commit_id in engine.ledger.commit_ids_at(placed)}:
            raise CorruptLogError(
                f"table messages has what version {placed} of op placed, and op has something else there: table op was "
                "set back to an older copy, and written to since. Restore the newest one"
            )

    def odd_rows(self) -> str | None:
        """A sentence when the table has more or fewer rows than ``op`` placed: somebody else wrote to it, or deleted
        some."""
        engine = self._engine
        with engine.lock:
            engine.refresh()
            border = self.whole_border()
            counts = engine.messages_table.actions()["num_records"]
            firsts = engine.firsts()  # read after the files: op moves the first offsets before files expire
        rows, most = pc.sum(counts).as_py() or 0, sum(border.values())
        least = most - sum(min(first, border.get(queue, 0)) for queue, first in firsts.items())
        if counts.null_count or least <= rows <= most:
            return None
        placed = f"{most}" if least == most else f"{most}, of which {least} have not expired"
        return (
            f"table messages has {rows} rows, and op placed {placed}, up to version {self.op_version}: somebody "
            f"{'wrote to' if rows > most else 'deleted from'} it. "
            f"{foreign_change(engine.messages_table) or HOW_TO_MEND}"
        )

    def _ends(self) -> dict[Queue, int]:
        """By queue, the offset of its first placement above :attr:`op_version`; its end when there is none."""
        ends = dict(self._engine.tails(refresh=False))
        for rows, _ in walk_placements(self._engine.op_table, self.op_version + 1):
            note_first_offsets(ends, rows)
        return ends

    # ------------------------------------------------------------------ where they lie
    def ranges(self, queue: Queue, first: int, stop: int) -> tuple[list[MessageRange], list[tuple[int, int]]]:
        """The rows of ``messages`` with a queue's offsets from ``first`` (included) to ``stop`` (excluded), in order;
        and the offsets (first, end) that it lacks, or that have expired. CorruptLogError: an offset is there twice."""
        ranges: list[MessageRange] = []
        missing: list[tuple[int, int]] = []
        next_offset = max(first, min(stop, self._engine.ledger.view.firsts.get(queue, 0)))
        if first < next_offset:
            missing.append((first, next_offset))
        if next_offset >= stop:
            return ranges, missing
        with self._engine.lock:
            runs = [
                (run.first_offset, path, run, since) for path, run, since in self._overlapping(queue, next_offset, stop)
            ]
        for offset, path, run, since in sorted(runs):
            if offset < next_offset and ranges:
                raise CorruptLogError(f"offset {offset} of queue {queue[1]} of topic {queue[0]!r} is drained twice")
            if offset > next_offset:
                missing.append((next_offset, offset))
                next_offset = offset
            end = min(stop, offset + run.length)
            skip = run.first_row + next_offset - offset
            rows = RowRange(path, "", 0, run.file_rows, ((skip, skip + end - next_offset - 1),), NAME)
            ranges.append(MessageRange(rows, *queue, next_offset, since=since))
            next_offset = end
        if next_offset < stop:
            missing.append((next_offset, stop))
        return ranges, missing

    def _overlapping(self, queue: Queue, first: int, stop: int) -> Iterator[tuple[str, _Run, int]]:
        """Runs that hold some of these offsets, each with its file and the file's first version of ``op``."""
        actions = self._engine.messages_table.actions()
        may_hold = pc.and_(
            _may_lie_between(actions, "topic", queue[0], queue[0]),
            pc.and_(
                _may_lie_between(actions, "queue_id", queue[1], queue[1]),
                _may_lie_between(actions, "queue_offset", first, stop - 1),
            ),
        )
        for file in actions.filter(may_hold).select(["path", "min.op_version"]).to_pylist():
            for run in self._runs_of(file["path"]):
                if run.queue == queue and run.first_offset < stop and run.first_offset + run.length > first:
                    yield file["path"], run, file["min.op_version"] or 0

    def _runs_of(self, path: str) -> tuple[_Run, ...]:
        if path not in self._runs:
            self._runs[path] = tuple(
                _runs(self._engine.messages_table.read([path], ["topic", "queue_id", "queue_offset"]))
            )
            kept = sum(len(runs) for runs in self._runs.values())
            while kept > RUNS_CACHED_MAX and len(self._runs) > 1:
                kept -= len(self._runs.popitem(last=False)[1])
        self._runs.move_to_end(path)
        return self._runs[path]

    # ------------------------------------------------------------------ by time
    def first_since(self, time: datetime) -> dict[Queue, int]:
        """By queue, its first drained offset that was committed at this time or later; queues without one are left
        out."""
        with self._engine.lock:
            actions = self._engine.messages_table.actions()
            since = pa.scalar(time, actions.schema.field("max.commit_timestamp").type)
            late = actions.filter(pc.fill_null(pc.greater_equal(actions["max.commit_timestamp"], since), True))
            offsets: dict[Queue, int] = {}
            for path in late["path"].to_pylist():
                rows = self._engine.messages_table.read(
                    [path], ["topic", "queue_id", "queue_offset", "commit_timestamp"]
                )
                note_first_offsets(offsets, rows.filter(pc.greater_equal(rows["commit_timestamp"], since)))
            return offsets

    def times_of(self, offsets: Mapping[Queue, int]) -> dict[Queue, datetime]:
        """By queue, the commit time of the message at a drained offset; missing messages are left out."""
        times: dict[Queue, datetime] = {}
        for queue, offset in offsets.items():
            ranges, _ = self.ranges(queue, offset, offset + 1)
            for part in ranges:
                for _, rows in self._engine.messages_table.read_range(part.rows, ["commit_timestamp"]):
                    times[queue] = rows["commit_timestamp"][0].as_py()
        return times


def _may_lie_between(actions: pa.Table, name: str, first: object, last: object) -> pa.ChunkedArray:
    """Which files may hold a value of a column from ``first`` to ``last``, both included."""
    inside = pc.and_(pc.less_equal(actions[f"min.{name}"], last), pc.greater_equal(actions[f"max.{name}"], first))
    return pc.fill_null(inside, True)


def _runs(rows: pa.Table) -> Iterator[_Run]:
    """The runs of offsets in a file, in the file's order."""
    count = rows.num_rows
    if count == 0:
        return
    rows = rows.combine_chunks()
    topic, queue_id, offset = (rows[name].chunk(0) for name in ("topic", "queue_id", "queue_offset"))
    continues = pc.and_(pc.equal(topic[1:], topic[:-1]), pc.equal(queue_id[1:], queue_id[:-1]))
    continues = pc.and_(continues, pc.equal(pc.subtract(offset[1:], offset[:-1]), 1))
    starts = [0, *(i + 1 for i in pc.indices_nonzero(pc.invert(continues)).to_pylist())]
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        queue = (topic[start].as_py(), queue_id[start].as_py())
        yield _Run(queue, start, offset[start].as_py(), end - start, count)
