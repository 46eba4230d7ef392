"""Fetches messages of several queues at once, from wherever they lie, and no more than memory should hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.placements import Placements, out_of_range
from rmq_spark._core.messages.reading import read_ranges
from rmq_spark._core.messages.table import SOURCE_SCHEMA
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.selector.tree import Selector
from rmq_spark.errors import OffsetOutOfRangeError

logger = logging.getLogger(__name__)

FETCH_BYTES = 32 * 1024 * 1024
"""About so many bytes of messages are fetched at once, judged by those that were fetched before."""
FIRST_ROWS = 1_000
"""Rows of the first fetch: nothing is known of their size."""

Queue = tuple[str, int]


class Fetched(NamedTuple):
    """What was fetched of a queue: messages in offset order, and the offset up to which there are no others."""

    messages: pa.Table
    fetched_to: int


class Fetcher:
    """Reads on in queues, for one consumer. It must be used by one thread at a time.

    Parameters
    ----------
    log : Engine
    wants : callable
        Whether the consumer wants a topic.
    selector : Selector, optional
        Keeps the messages that are wanted.
    """

    def __init__(self, log: Engine, wants: Callable[[str], bool], selector: Selector | None) -> None:
        self._log = log
        self._selector = selector
        self._placements = Placements(log, wants)
        self.row_bytes = 0.0
        """Bytes of a message in memory, of those fetched last; 0 before any was."""

    def fetch(self, starts: Mapping[Queue, tuple[int, int]]) -> dict[Queue, Fetched]:
        """Fetch from where each queue stands; empty when nothing new is there.

        Parameters
        ----------
        starts : mapping
            By queue, the first offset, and how many messages there is room for.

        Raises
        ------
        OffsetOutOfRangeError
            When the log lacks messages that have not expired.
        """
        reach("fetch begins", starts=starts)
        tails = self._log.tails()
        behind = {q: (start, room) for q, (start, room) in starts.items() if start < tails.get(q, 0) and room > 0}
        if not behind:
            return {}
        each = max(1, self._rows_max() // len(behind))
        end = {queue: min(tails[queue], start + min(room, each)) for queue, (start, room) in behind.items()}
        # What others read is not looked for, and not kept.
        starting = {**tails, **{queue: start for queue, (start, _) in starts.items()}}
        self._placements.forget(starting)
        ranges, missing = self._placements.between(starting, end)
        self._skip_expired(missing)
        ranges.sort(key=lambda r: r.file)  # stable: a file is read once, whichever queues it has
        where = None if self._selector is None else self._selector.at(self._log.machine.time_ms())
        parts: dict[Queue, list[pa.Table]] = {queue: [] for queue in end}
        rows = size = 0
        for table in read_ranges(ranges, self._log.read_range, self._log.find_again, SOURCE_SCHEMA.names, where):
            for queue, part in _by_queue(table):
                parts[queue].append(part)
            rows, size = rows + table.num_rows, size + table.nbytes
        if rows:
            self.row_bytes = max(1.0, size / rows)
        return {queue: Fetched(_in_order(found), end[queue]) for queue, found in parts.items()}

    def _rows_max(self) -> int:
        return max(1, int(FETCH_BYTES / self.row_bytes)) if self.row_bytes else FIRST_ROWS

    def _skip_expired(self, missing: list[tuple[Queue, int, int]]) -> None:
        if not missing:
            return
        firsts = self._log.firsts()
        for queue, start, end in missing:
            if end > firsts.get(queue, 0):
                raise OffsetOutOfRangeError(out_of_range(*queue, start, end, firsts))
            logger.warning("%s. The consumer goes on there", out_of_range(*queue, start, end, firsts))


def _by_queue(messages: pa.Table) -> Iterator[tuple[Queue, pa.Table]]:
    """The messages of each queue: small ranges of several come in one table."""
    queues = messages.group_by(["topic", "queue_id"], use_threads=False).aggregate([])
    for topic, queue_id in zip(queues["topic"].to_pylist(), queues["queue_id"].to_pylist(), strict=True):
        if queues.num_rows == 1:
            yield (topic, queue_id), messages
        else:
            mine = pc.and_(pc.equal(messages["topic"], topic), pc.equal(messages["queue_id"], queue_id))
            yield (topic, queue_id), messages.filter(mine)


def _in_order(parts: list[pa.Table]) -> pa.Table:
    """The messages of one queue by offset. Ranges were read file by file."""
    if not parts:
        return SOURCE_SCHEMA.empty_table()
    messages = pa.concat_tables(parts)
    offsets = messages["queue_offset"].combine_chunks()
    ascending = pc.all(pc.greater(offsets[1:], offsets[:-1])).as_py() is not False
    return messages if ascending else messages.sort_by("queue_offset")
