"""Fetches messages of several queues at once, within a limit of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.consumers.in_order import by_queue
from rmq_spark._core.log.message_range import out_of_range
from rmq_spark._core.messages.message_reader import read_ranges
from rmq_spark._core.messages.messages_table import SOURCE_SCHEMA
from rmq_spark._core.messages.placements import Placements
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.selector.tree import Selector
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import OffsetOutOfRangeError

logger = logging.getLogger(__name__)

FETCH_BYTES = 32 * 1024 * 1024
"""Bytes of messages that one fetch aims at, estimated from the messages fetched before."""
FIRST_ROWS = 1_000
"""Rows of the first fetch, when no message size is known."""


class Fetched(NamedTuple):
    """Messages of a queue in offset order, and the offset at which the next fetch begins."""

    messages: pa.Table
    fetched_to: int


class Fetcher:
    """Reads queues forward, for one consumer. Only one thread at a time may use it. ``wants`` tells whether the
    consumer reads a topic."""

    def __init__(self, engine: Engine, wants: Callable[[str], bool], selector: Selector | None) -> None:
        self._engine = engine
        self._selector = selector
        self._placements = Placements(engine, wants)
        self.row_bytes = 0.0
        """Mean bytes of a message in memory in the last fetch; 0 before the first."""

    def fetch(self, starts: Mapping[Queue, tuple[int, int]]) -> dict[Queue, Fetched]:
        """Fetch new messages of these queues; empty when there are none. ``starts`` has, by queue, the first offset to
        fetch, and the number of messages that there is room for. Missing messages that have not expired are an
        OffsetOutOfRangeError."""
        reach("fetch begins", starts=starts)
        tails = self._engine.tails()
        behind = {q: (start, room) for q, (start, room) in starts.items() if start < tails.get(q, 0) and room > 0}
        if not behind:
            return {}
        rows_each = max(1, self._rows_max() // len(behind))
        ends = {queue: min(tails[queue], start + min(room, rows_each)) for queue, (start, room) in behind.items()}
        # Queues of other members start at their tails, so none of their placements are looked up or kept.
        all_starts = {**tails, **{queue: start for queue, (start, _) in starts.items()}}
        self._placements.forget(all_starts)
        ranges, missing = self._placements.between(all_starts, ends)
        self._skip_expired(missing)
        ranges.sort(key=lambda r: r.file)  # stable, so a file with several queues is read once
        row_filter = None if self._selector is None else self._selector.at(self._engine.runtime.time_ms())
        tables_of: dict[Queue, list[pa.Table]] = {queue: [] for queue in ends}
        rows = size = 0
        for table in read_ranges(
            ranges, self._engine.read_range, self._engine.find_again, SOURCE_SCHEMA.names, row_filter
        ):
            for queue, rows_of_queue in by_queue(table):
                tables_of[queue].append(rows_of_queue)
            rows, size = rows + table.num_rows, size + table.nbytes
        if rows:
            self.row_bytes = max(1.0, size / rows)
        return {queue: Fetched(_sorted_by_offset(tables), ends[queue]) for queue, tables in tables_of.items()}

    def _rows_max(self) -> int:
        return max(1, int(FETCH_BYTES / self.row_bytes)) if self.row_bytes else FIRST_ROWS

    def _skip_expired(self, missing: list[tuple[Queue, int, int]]) -> None:
        if not missing:
            return
        firsts = self._engine.firsts()
        for queue, start, end in missing:
            if end > firsts.get(queue, 0):
                raise OffsetOutOfRangeError(out_of_range(*queue, start, end, firsts))
            logger.warning("%s. The consumer goes on there", out_of_range(*queue, start, end, firsts))


def _sorted_by_offset(tables: list[pa.Table]) -> pa.Table:
    """Return the messages of one queue by offset. Ranges are read file by file."""
    if not tables:
        return SOURCE_SCHEMA.empty_table()
    messages = pa.concat_tables(tables)
    offsets = messages["queue_offset"].combine_chunks()
    ascending = pc.all(pc.greater(offsets[1:], offsets[:-1])).as_py() is not False
    return messages if ascending else messages.sort_by("queue_offset")
