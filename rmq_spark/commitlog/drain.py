"""Copies what ``op`` placed into the ``messages`` table, in the order of ``op``.

::

    op        ──1──2──3──4──5──6──7──8──▶          a drain: op rows 5 to 8
    half      the messages of 5 to 8 ──────┐
    messages  1 2 3 4 │ position 4         └──▶ large files, a topic each ──▶ one commit: the files, and position 8

Any number of drainers may run at once, and one may die anywhere: the position stands in the table, and a commit goes
through only from the position that the drainer started from. What a loser wrote is left to a vacuum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.commitlog.messages import (
    MESSAGES_SCHEMA,
    drained_up_to,
    transactions_of,
    wait_until_drained,
    write_messages,
)
from rmq_spark.commitlog.op import NO_OPS, PRUNED_PLACED, pruned_up_to
from rmq_spark.commitlog.placements import placed_range
from rmq_spark.commitlog.reading import STORED_COLUMNS, by_file, messages_of, rows_of
from rmq_spark.errors import CorruptLogError, StrippedError
from rmq_spark.storage.files import DataFile
from rmq_spark.storage.table import Change, Table, has_held

if TYPE_CHECKING:
    from rmq_spark.commitlog.steps import ProtocolSteps

OP_ROWS_MAX = 100_000
"""Op rows that are looked at in one step."""
STEP_MESSAGES_MAX = 4_000_000
"""So many messages go into one commit, unless one version of ``op`` alone has more."""
FILE_BYTES_MAX = 96 * 1024 * 1024
"""Messages that are collected before a file is written: its size in memory. On disk it is a fraction of this."""
VERSIONS_SKIPPED_MAX = 1_000
"""So many versions of ``op`` may place nothing before a commit says that they are done."""


@dataclass
class _Collected:
    """Messages of one topic that are not in a file yet."""

    parts: list[tuple[int, int, pa.Table]] = field(default_factory=list)
    """With the queue and the offset of the first one."""
    size: int = 0

    def add(self, messages: pa.Table) -> None:
        """Add messages of one queue that follow each other."""
        self.parts.append((messages["queue_id"][0].as_py(), messages["queue_offset"][0].as_py(), messages))
        self.size += messages.nbytes

    def take(self) -> pa.Table:
        """All of them by queue and offset."""
        parts = [messages for _, _, messages in sorted(self.parts, key=lambda part: part[:2])]
        self.parts, self.size = [], 0
        return pa.concat_tables(parts)


class Drainer:
    """Drains one commit log.

    Parameters
    ----------
    log : ProtocolSteps
        A handle that no other thread uses.
    """

    def __init__(self, log: ProtocolSteps) -> None:
        self._log = log

    def run(self) -> int:
        """Drain all that is placed by now, step by step; returns the version of ``op`` that is reached.

        Raises
        ------
        CorruptLogError
            When the table is not what ``op`` says: somebody else wrote to it, or one of the two is an older copy.
        """
        if odd := self._log.drained.odd_rows():
            raise CorruptLogError(odd)
        until = self._log.refresh()
        while True:
            table = self._log.messages_table
            table.refresh()
            position = drained_up_to(table)
            if position > until:
                until = self._log.refresh()
                if position > until:
                    raise CorruptLogError(
                        f"table messages has what op placed up to version {position}, and op is at version {until}: "
                        "the store answers with an older list (drain again), or op was set back (restore it from a "
                        "copy)"
                    )
            if position < pruned_up_to(self._log.op, PRUNED_PLACED):
                wait_until_drained(table, pruned_up_to(self._log.op, PRUNED_PLACED), "op was pruned")
                continue
            if position >= until or not self._step(table, position, until):
                return max(position, until)

    def _step(self, table: Table, position: int, until: int) -> bool:
        """Copy what the next versions of ``op`` placed, in one commit. False when they placed nothing."""
        rows, end = self._next_placed(position, until)
        if rows.num_rows == 0 and end - position < VERSIONS_SKIPPED_MAX:
            return False
        files = list(self._write(table, rows))

        def propose(version: int) -> Change | None:
            if not _is_next(table, position):  # another drainer was faster
                return None
            return Change(add=files, transactions=transactions_of(end, rows))

        def landed(change: Change) -> bool:
            # Another drainer may have come so far: our files count too. A commit adds all, so one tells of the others.
            return drained_up_to(table) >= end and all(has_held(table, file) for file in change.add[:1])

        table.compare_and_set(propose, landed)
        return True

    # ------------------------------------------------------------------ what is next
    def _next_placed(self, position: int, until: int) -> tuple[pa.Table, int]:
        """Op rows that place messages, of the first versions above the position that have some, and the last of these
        versions; none and ``until`` when there are none."""
        while position < until:
            rows, end = self._op_rows(position, until)
            rows = rows.filter(pc.is_valid(rows["queue_offset"]))
            if rows.num_rows:
                return _first_versions(rows, end)
            position = end
        return NO_OPS, until

    def _op_rows(self, position: int, until: int) -> tuple[pa.Table, int]:
        """All op rows above a version and up to another one, which is returned too: few enough for the memory."""
        actions = self._log.op.actions()
        actions = actions.filter(pc.fill_null(pc.greater(actions["max.version"], position), True))
        # Files without statistics may hold any version, so they come first.
        firsts = pc.fill_null(actions["min.version"], -1)
        actions = actions.set_column(actions.column_names.index("min.version"), "min.version", firsts)
        actions = actions.sort_by("min.version")
        size = 0
        files = actions.select(["min.version", "num_records"]).to_pylist()
        for number, file in enumerate(files):
            first = file["min.version"]
            size += file["num_records"] or 0
            # A version may be spread over files that were merged. It is whole below the first one of those left out.
            if number > 0 and size > OP_ROWS_MAX and first > position + 1:
                return self._between(actions.slice(0, number), position, min(until, first - 1))
        return self._between(actions, position, until)

    def _between(self, actions: pa.Table, position: int, end: int) -> tuple[pa.Table, int]:
        rows = self._log.op.read(actions["path"].to_pylist())
        wanted = pc.and_(pc.greater(rows["version"], position), pc.less_equal(rows["version"], end))
        return rows.filter(wanted), end

    # ------------------------------------------------------------------ from half rows to files
    def _write(self, table: Table, rows: pa.Table) -> Iterator[DataFile]:
        """The messages that these op rows place, as files that nothing names yet."""
        collected: dict[str, _Collected] = {}
        for messages in self._messages(rows):
            collected.setdefault(messages["topic"][0].as_py(), _Collected()).add(messages)
            if sum(c.size for c in collected.values()) >= FILE_BYTES_MAX:
                largest = max(collected.values(), key=lambda c: c.size)
                yield write_messages(table, largest.take())
        for left in collected.values():
            if left.parts:
                yield write_messages(table, left.take())

    def _messages(self, rows: pa.Table) -> Iterator[pa.Table]:
        """The messages that these op rows place: in each table those of one queue, which follow each other."""
        ranges = [placed_range(row) for row in rows.to_pylist()]
        ranges.sort(key=lambda r: (r.op_version, r.rows.path, r.rows.half_id, r.rows.file_no, r.rows.ranges[0]))
        for together in by_file(ranges):
            read = self._log.half.read_range(rows_of(together), STORED_COLUMNS)
            try:
                yield from messages_of(together, read, MESSAGES_SCHEMA.names)
            except StrippedError as problem:
                raise CorruptLogError(
                    f"{problem}, and this list of them does not say so: the store answers with an older list (drain "
                    "again)"
                ) from problem


def _is_next(table: Table, position: int) -> bool:
    """Whether a drain from this position may be committed now."""
    return drained_up_to(table) == position


def _first_versions(rows: pa.Table, end: int) -> tuple[pa.Table, int]:
    """As many versions as have no more messages than a step takes, but at least one; and the last of them."""
    sums = rows.group_by("version", use_threads=False).aggregate([("count", "sum")]).sort_by("version")
    totals = list(accumulate(sums["count_sum"].to_pylist()))
    fitting = max(1, bisect_right(totals, STEP_MESSAGES_MAX))
    if fitting == len(totals):
        return rows, end
    last: int = sums["version"][fitting - 1].as_py()
    return rows.filter(pc.less_equal(rows["version"], last)), last
