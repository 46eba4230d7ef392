"""The amount of placed messages that are not yet in the table ``messages``. No message is read for it.

``op`` has the placed rows of each half file, and the Delta log of ``half`` has the file's size.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op_walk import rows_above
from rmq_spark._core.messages.messages_table import drained_up_to
from rmq_spark._core.vocabulary.options import INT64_MAX

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

OP_ROWS_MAX = 100_000
"""The most op rows per read, and the most versions of ``op`` with kept sums."""
COLUMNS = ("version", "op_time", "path", "count", "queue_offset")


class Amount(NamedTuple):
    """The amount of placed messages that are not drained.

    Attributes
    ----------
    bytes : int
        Approximate size in half files. Of a file that also has other rows, their share.
    whole : bool
        False when some messages were not counted.
    """

    messages: int = 0
    bytes: int = 0
    whole: bool = True


class Undrained:
    """Follows placed messages that are not drained. Each op row is read once, so a look reads only new rows.

    Parameters
    ----------
    engine : Engine
        A handle for this thread only.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._counted = -1  # up to this version of op all rows are drained or counted
        self._waiting: deque[tuple[int, int, int, datetime]] = deque()  # version, messages, bytes, time; by version

    @property
    def since(self) -> datetime | None:
        """The placement time of the oldest message that the last look counted; None when it counted none."""
        return self._waiting[0][3] if self._waiting else None

    def seconds(self) -> float:
        """The seconds since the placement of the oldest message that the last look counted; 0 without one."""
        since = self.since
        return 0.0 if since is None else max(0.0, (self._engine.runtime.now() - since).total_seconds())

    def look(self, enough: int = INT64_MAX) -> Amount:
        """Return the present amount. Counting stops at ``enough`` bytes."""
        op = self._engine.op_table
        until = op.refresh()
        if until == self._counted and not self._waiting:
            return Amount()
        self._pass_drained()
        amount = self._sum(until)
        while not amount.whole and amount.bytes < enough and len(self._waiting) < OP_ROWS_MAX:
            rows, end = rows_above(op, self._counted, until, OP_ROWS_MAX, COLUMNS)
            self._waiting.extend(self._counts(rows.filter(pc.is_valid(rows["queue_offset"]))))
            self._counted = end
            amount = self._sum(until)
        return amount

    def _sum(self, until: int) -> Amount:
        messages = sum(waiting[1] for waiting in self._waiting)
        size = sum(waiting[2] for waiting in self._waiting)
        return Amount(messages, size, self._counted >= until)

    def _pass_drained(self) -> None:
        table = self._engine.messages_table
        table.refresh()
        position = drained_up_to(table)
        while self._waiting and self._waiting[0][0] <= position:
            self._waiting.popleft()
        self._counted = max(self._counted, position)

    def _counts(self, rows: pa.Table) -> list[tuple[int, int, int, datetime]]:
        """Return by version: the number of messages that op rows place, their approximate bytes, and the time."""
        if rows.num_rows == 0:
            return []
        sized = pa.table({**{name: rows[name] for name in ("version", "count", "op_time")}, "size": self._sizes(rows)})
        aggregates = [("count", "sum"), ("size", "sum"), ("op_time", "min")]
        sums = sized.group_by("version", use_threads=False).aggregate(aggregates).sort_by("version")
        columns = zip(*(sums[column].to_pylist() for column in ("version", *map("_".join, aggregates))), strict=True)
        return [(version, count, int(size), time) for version, count, size, time in columns]

    def _sizes(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return the bytes of the half rows that op rows name. For a file that was stripped since, the mean of all
        others."""
        table = self._engine.half.table
        table.refresh()
        files = table.actions()
        size, count = (pc.cast(files[name], pa.float64()) for name in ("size_bytes", "num_records"))
        row_size = pc.divide(size, pc.max_element_wise(count, 1.0, skip_nulls=False))
        mean = pc.mean(row_size).as_py() or 0.0
        file_numbers = pc.index_in(rows["path"], value_set=files["path"].combine_chunks())
        return pc.multiply(pc.fill_null(row_size.take(file_numbers), mean), pc.cast(rows["count"], pa.float64()))
