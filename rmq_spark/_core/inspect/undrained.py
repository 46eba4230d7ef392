"""How much is placed and not in the table ``messages`` yet. No message is read for it.

``op`` says which rows of which half file are placed, and the Delta log of ``half`` how large the file is.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.walk import rows_above
from rmq_spark._core.messages.table import drained_up_to

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

OP_ROWS_MAX = 100_000
"""Op rows that are read at once, and versions of ``op`` of which the sums are kept."""
COLUMNS = ("version", "op_time", "path", "count", "queue_offset")


class Amount(NamedTuple):
    """So much is placed and not drained.

    Attributes
    ----------
    messages : int
    bytes : int
        Of the half files that have them, about: of a file with other rows too, their share.
    whole : bool
        False when there is more that was not counted.
    """

    messages: int = 0
    bytes: int = 0
    whole: bool = True


class Undrained:
    """Follows what is placed and not drained. Each op row is read once, so a look costs what is new.

    Parameters
    ----------
    log : Engine
        A handle that no other thread uses.
    """

    def __init__(self, log: Engine) -> None:
        self._log = log
        self._counted = -1  # the version of op up to which all is drained or counted
        self._waiting: deque[tuple[int, int, int, datetime]] = deque()  # version, messages, bytes, time; by version

    @property
    def since(self) -> datetime | None:
        """When the oldest of what the last look counted was placed; None when it found nothing."""
        return self._waiting[0][3] if self._waiting else None

    def look(self, enough: int) -> Amount:
        """What is there now. With ``enough`` bytes it stops counting."""
        op = self._log.op
        until = op.refresh()
        if until == self._counted and not self._waiting:
            return Amount()
        self._pass_drained()
        found = self._sum(until)
        while not found.whole and found.bytes < enough and len(self._waiting) < OP_ROWS_MAX:
            rows, end = rows_above(op, self._counted, until, OP_ROWS_MAX, COLUMNS)
            self._waiting.extend(self._counts(rows.filter(pc.is_valid(rows["queue_offset"]))))
            self._counted = end
            found = self._sum(until)
        return found

    def _sum(self, until: int) -> Amount:
        messages = sum(waiting[1] for waiting in self._waiting)
        size = sum(waiting[2] for waiting in self._waiting)
        return Amount(messages, size, self._counted >= until)

    def _pass_drained(self) -> None:
        table = self._log.messages_table
        table.refresh()
        position = drained_up_to(table)
        while self._waiting and self._waiting[0][0] <= position:
            self._waiting.popleft()
        self._counted = max(self._counted, position)

    def _counts(self, rows: pa.Table) -> list[tuple[int, int, int, datetime]]:
        """By version, how many messages op rows place, about how many bytes, and when."""
        if rows.num_rows == 0:
            return []
        sized = pa.table({**{n: rows[n] for n in ("version", "count", "op_time")}, "size": self._sizes(rows)})
        wanted = [("count", "sum"), ("size", "sum"), ("op_time", "min")]
        sums = sized.group_by("version", use_threads=False).aggregate(wanted).sort_by("version")
        found = zip(*(sums[name].to_pylist() for name in ("version", *map("_".join, wanted))), strict=True)
        return [(version, count, int(size), time) for version, count, size, time in found]

    def _sizes(self, rows: pa.Table) -> pa.ChunkedArray:
        """The bytes of the half rows that op rows name. Of a file that was stripped since, the mean of all others."""
        table = self._log.half.table
        table.refresh()
        files = table.actions()
        size, count = (pc.cast(files[name], pa.float64()) for name in ("size_bytes", "num_records"))
        each = pc.divide(size, pc.max_element_wise(count, 1.0, skip_nulls=False))
        mean = pc.mean(each).as_py() or 0.0
        at = pc.index_in(rows["path"], value_set=files["path"].combine_chunks())
        return pc.multiply(pc.fill_null(each.take(at), mean), pc.cast(rows["count"], pa.float64()))
