"""Half files that several half batches share, because their threads sent at the same moment.

The Delta log has the lowest and the highest half id of such a file. The half batches in it, and how many rows each has,
are known from the file alone. A file never changes, so it is read once. While a file is lost or damaged, nobody knows
which half batches it has. These wait, and the half batches of other files continue.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.errors import CorruptLogError

logger = logging.getLogger(__name__)

IDS_CACHED_MAX = 500_000
"""Half ids kept in memory, at about 80 bytes each. The ids of the least recently used files are dropped first."""


class UnreadableFile(NamedTuple):
    """A shared file that is lost or damaged. Its half batches were prepared at ``ms``, and have ``rows`` rows by the
    Delta log."""

    path: str
    ms: int
    rows: int | None
    problem: CorruptLogError


class SharedFiles:
    """The contents of shared files: ``half_id`` and ``rows`` of each half batch. ``read`` returns the column
    ``half_id`` of all rows of some half files, and ``is_live`` whether the newest version of ``half`` names a file."""

    def __init__(self, read: Callable[[list[str]], pa.ChunkedArray], is_live: Callable[[str], bool]) -> None:
        self._read = read
        self._is_live = is_live
        self._problems: dict[str, CorruptLogError] = {}  # those of the files that could not be read last time
        self._cached: OrderedDict[str, pa.Table] = OrderedDict()
        self._ids = 0

    def of(self, path: str) -> pa.Table:
        """The half batches in one file. CorruptLogError: the file is damaged, or has a row without half_id."""
        batches = self._cached.get(path)
        if batches is None:
            ids = self._read([path])
            if ids.null_count:
                raise CorruptLogError(f"{path} has a row without half_id: table half was changed by hand")
            batches = rows_by_batch(ids)
            self.remember(path, batches)
        else:
            self._cached.move_to_end(path)
        return batches

    def readable(self, paths: Iterable[str]) -> Iterator[tuple[str, pa.Table]]:
        """Yield the paths of those files that can be read, with their half batches. A file that cannot be read is
        logged once, and :meth:`problems` tells why. CorruptLogError: a file is gone because another process has taken
        it out of the table, so read again."""
        for path in paths:
            try:
                batches = self.of(path)
            except CorruptLogError as problem:
                if not self._is_live(path):
                    raise
                if path not in self._problems:
                    logger.error("half batches that share a file cannot be read: %s", problem)
                self._problems[path] = problem
            else:
                self._problems.pop(path, None)
                yield path, batches

    def problems(self, paths: Iterable[str]) -> dict[str, CorruptLogError]:
        """Why files could not be read when :meth:`readable` last tried, by path, without the readable files."""
        return {path: self._problems[path] for path in paths if path in self._problems}

    def is_small(self, path: str, rows_max: int) -> bool:
        """Whether a shared file that was read before has at most ``rows_max`` rows."""
        batches = self._cached.get(path)
        return batches is not None and 0 < (pc.sum(batches["rows"]).as_py() or 0) <= rows_max

    def remember(self, path: str, found: pa.Table) -> None:
        self._cached[path] = found
        self._ids += found.num_rows
        while self._ids > IDS_CACHED_MAX and len(self._cached) > 1:
            self._ids -= self._cached.popitem(last=False)[1].num_rows


def rows_by_batch(ids: pa.Array | pa.ChunkedArray) -> pa.Table:
    """How many rows each half batch has: ``half_id, rows``."""
    column = pa.table({"half_id": ids})
    sums = column.group_by("half_id", use_threads=False).aggregate([([], "count_all")])
    return pa.table({"half_id": sums["half_id"], "rows": sums["count_all"]}).combine_chunks()
