"""Half files that several half batches share: those of threads that send at the same moment.

The Delta log has the lowest and the highest half id of such a file. The half batches in it, and how many rows each has,
are known from the file alone. A file never changes, so it is read once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.errors import CorruptLogError

IDS_KEPT_MAX = 500_000
"""Half ids kept in memory, at about 80 bytes each. Those of the least recently used files are dropped first."""


class SharedFiles:
    """The contents of shared files: ``half_id`` and ``rows`` of each half batch.

    Parameters
    ----------
    read : callable
        Takes the paths of half files, and returns the column ``half_id`` of all their rows.
    """

    def __init__(self, read: Callable[[list[str]], pa.ChunkedArray]) -> None:
        self._read = read
        self._kept: OrderedDict[str, pa.Table] = OrderedDict()
        self._ids = 0

    def of(self, path: str) -> pa.Table:
        """The half batches in one file.

        Raises
        ------
        CorruptLogError
            When the file is damaged, or has a row without half_id.
        """
        batches = self._kept.get(path)
        if batches is None:
            ids = self._read([path])
            if ids.null_count:
                raise CorruptLogError(f"{path} has a row without half_id: table half was changed by hand")
            batches = counted(ids)
            self.keep(path, batches)
        else:
            self._kept.move_to_end(path)
        return batches

    def is_small(self, path: str, rows_max: int) -> bool:
        """Whether a shared file that was read before has at most ``rows_max`` rows."""
        batches = self._kept.get(path)
        return batches is not None and 0 < (pc.sum(batches["rows"]).as_py() or 0) <= rows_max

    def has(self, path: str, half_id: str) -> bool:
        """Whether a half batch has rows in a file."""
        return bool(pc.index(self.of(path)["half_id"], half_id).as_py() >= 0)

    def has_any(self, path: str, half_ids: pa.Array) -> bool:
        """Whether one of several half batches has rows in a file."""
        return bool(pc.any(pc.is_in(self.of(path)["half_id"], value_set=half_ids)).as_py())

    def keep(self, path: str, found: pa.Table) -> None:
        """Keep the contents of a file."""
        self._kept[path] = found
        self._ids += found.num_rows
        while self._ids > IDS_KEPT_MAX and len(self._kept) > 1:
            self._ids -= self._kept.popitem(last=False)[1].num_rows


def counted(ids: pa.Array | pa.ChunkedArray) -> pa.Table:
    """How many rows each half batch has: ``half_id, rows``."""
    column = pa.table({"half_id": ids})
    sums = column.group_by("half_id", use_threads=False).aggregate([([], "count_all")])
    return pa.table({"half_id": sums["half_id"], "rows": sums["count_all"]}).combine_chunks()
