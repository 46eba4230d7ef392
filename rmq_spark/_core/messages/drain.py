"""Copies the messages that ``op`` placed into the table ``messages``, in the order of ``op``.

::

    op        ──1──2──3──4──5──6──7──8──▶          a drain: op rows 5 to 8
    half      the messages of 5 to 8 ──────┐
    messages  1 2 3 4 │ position 4         └──▶ large files, a topic each ──▶ one commit: the files, and position 8

Any number of drainers may run at once, and each may die anywhere: the position stands in the table, and a commit goes
through only from the position that its drainer started from. A loser deletes its files, or leaves them to a vacuum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark._core.log.damage import retry_on_newest_state
from rmq_spark._core.log.op import NO_OPS, PRUNED_PLACED, pruned_up_to
from rmq_spark._core.log.op_walk import PLACEMENT_COLUMNS, rows_above
from rmq_spark._core.messages.message_files import message_files, placed_ranges
from rmq_spark._core.messages.messages_table import drained_up_to, require_drained, transactions_of
from rmq_spark._core.storage.data_file import DataFile
from rmq_spark._core.storage.foreign_commits import require_own
from rmq_spark._core.storage.table import Change, Table, was_added
from rmq_spark.errors import CorruptLogError, LostFileError, StrippedError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

OP_ROWS_MAX = 100_000
"""Op rows that one step reads at most."""
STEP_MESSAGES_MAX = 4_000_000
"""The most messages of one commit; a single version of ``op`` may have more."""
VERSIONS_SKIPPED_MAX = 1_000
"""A commit moves the position past this many versions of ``op`` that place nothing. Fewer are left to a later step."""
COLUMNS = [*PLACEMENT_COLUMNS, "commit_id"]
"""Columns of ``op`` that a drain reads."""


class Drainer:
    """Drains one commit log, within some 300 MB of memory. No other thread may use its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self) -> int:
        """Drain everything placed by now, step by step; return the version of ``op`` that is reached.
        ForeignChangeError: another writer changed the table. CorruptLogError: the table contradicts ``op``, as when one
        of the two is an older copy."""
        self._engine.messages_table.refresh()
        require_own(self._engine.messages_table)
        if odd := self._engine.drained.odd_rows():
            raise CorruptLogError(odd)
        until = self._engine.refresh()
        while True:
            table = self._engine.messages_table
            pruned = pruned_up_to(
                self._engine.op_table, PRUNED_PLACED
            )  # read before messages, which then has all that was pruned
            table.refresh()
            position = drained_up_to(table)
            if position > until and position > (until := self._engine.refresh()):
                raise CorruptLogError(
                    f"table messages has what op placed up to version {position}, and op is at version {until}: table "
                    "op was set back to an older copy. Restore the newest one"
                )
            require_drained(table, pruned, "op was pruned")
            if position >= until or not self._step(table, position, until):
                return max(position, until)

    def _step(self, table: Table, position: int, until: int) -> bool:
        """Copy what the next versions of ``op`` placed, in one commit. Return False when they placed nothing."""
        rows, end = self._next_placed(position, until)
        if rows.num_rows == 0 and end - position < VERSIONS_SKIPPED_MAX:
            return False
        try:
            files = self._write(table, rows)
        except LostFileError as problem:
            table.refresh()
            if not _is_next(table, position):  # another drainer was faster, and upkeep removed the half files
                return True
            if not isinstance(problem, StrippedError):
                raise
            raise CorruptLogError(
                f"{problem}, and table messages does not have these rows: an older copy of messages was put in its "
                "place. Restore the newest one"
            ) from problem
        _require_all(files, rows)
        tried = False

        def propose(version: int) -> Change | None:
            nonlocal tried
            if not _is_next(table, position):  # another drainer was faster
                return None
            tried = True
            return Change(add=files, transactions=transactions_of(end, rows))

        def landed(change: Change) -> bool:
            # Another drainer may have come as far, so look for one of our files. A commit adds all of them or none.
            return drained_up_to(table) >= end and all(was_added(table, file) for file in change.add[:1])

        if table.compare_and_set(propose, landed) is None and not tried:
            _delete(table, files)
        return True

    def _write(self, table: Table, rows: pa.Table) -> Sequence[DataFile]:
        """Write the messages that op rows place as files of ``messages``, each of one topic, by queue and offset. No
        commit names them yet."""
        half = self._engine.half
        # Threads gain nothing on a local disk, where Python's part of a read takes longer than the disk's.
        is_remote = isinstance(table.fs, pafs.FileSystem) and not isinstance(table.fs, pafs.LocalFileSystem)
        sizes = half.sizes(rows["path"]) if is_remote else None
        return list(message_files(placed_ranges(rows), half.read_range, table, sizes))

    # ------------------------------------------------------------------ the next op rows
    def _next_placed(self, position: int, until: int) -> tuple[pa.Table, int]:
        """Op rows of the first versions above the position that place messages, and the last of these versions; no rows
        and ``until`` when no version does."""
        while position < until:
            rows, end = self._op_rows(position, until)
            rows = rows.filter(pc.is_valid(rows["queue_offset"]))
            if rows.num_rows:
                return _first_versions(rows, end, STEP_MESSAGES_MAX)
            position = end
        return NO_OPS, until

    def _op_rows(self, position: int, until: int) -> tuple[pa.Table, int]:
        """All op rows above a version, as far as they fit into memory, and the version up to which they go."""
        return rows_above(self._engine.op_table, position, until, OP_ROWS_MAX, COLUMNS)


def _is_next(table: Table, position: int) -> bool:
    """Whether a drain from this position may be committed now."""
    return drained_up_to(table) == position


def _require_all(files: Sequence[DataFile], rows: pa.Table) -> None:
    """Raise CorruptLogError when the files have more or fewer messages than op rows place."""
    written, placed = sum(file.rows for file in files), pc.sum(rows["count"]).as_py() or 0
    if written != placed:
        raise CorruptLogError(
            f"{written} messages were written, and op placed {placed} from version {pc.min(rows['version']).as_py()} "
            "on: nothing was drained. Drain again; if it stays so, table half is not what op says"
        )


def _delete(table: Table, files: Sequence[DataFile]) -> None:
    """Delete files that no commit has ever named."""
    for file in files:
        with suppress(OSError):  # a vacuum deletes it later
            table.fs.delete_file(f"{table.folder}/{file.path}")


def _first_versions(rows: pa.Table, end: int, messages_max: int) -> tuple[pa.Table, int]:
    """Rows of as many versions as have at most ``messages_max`` messages, but of at least one; and the last of these
    versions."""
    sums = rows.group_by("version", use_threads=False).aggregate([("count", "sum")]).sort_by("version")
    totals = list(accumulate(sums["count_sum"].to_pylist()))
    fitting = max(1, bisect_right(totals, messages_max))
    if fitting == len(totals):
        return rows, end
    last: int = sums["version"][fitting - 1].as_py()
    return rows.filter(pc.less_equal(rows["version"], last)), last


@retry_on_newest_state
def drain(engine: Engine) -> int:
    """Copy what is placed and not yet drained. See :meth:`CommitLog.drain`."""
    return Drainer(engine.new_handle()).run()
