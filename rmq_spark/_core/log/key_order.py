"""The sharding keys of open messages: which half batches wait for each other, and which have nothing to do with it."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.half_table import HalfRecord, HalfStore
from rmq_spark._core.log.op import BatchState, RowState
from rmq_spark._core.log.topics import TopicStore
from rmq_spark._core.storage.files import arange
from rmq_spark._core.vocabulary.rows import bytes_array
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY

KEYED_ROWS_MAX = 1_000_000
"""Rows of half batches whose keys are kept in memory, at about 75 bytes each."""
NO_KEYS = pa.array([], pa.string())
NO_KEYED_ROWS = pa.table({"key": NO_KEYS})
"""Of a half batch that sends to no FIFO topic."""


@dataclass(frozen=True)
class Open:
    """A half batch with rows that are pending, or committed and not placed."""

    record: HalfRecord
    state: BatchState


@dataclass
class _Keyed:
    """The keys of a half batch: of all its rows, and of those that were open when they were last asked for."""

    rows: pa.Table
    of: Open | None = None
    open_rows: pa.Table | None = None
    open_keys: pa.Array = field(default_factory=lambda: NO_KEYS)


class KeyIndex:
    """Sharding keys of half batches that send to FIFO topics. What a row's key is never changes, so it is read once.

    Parameters
    ----------
    half : HalfStore
    topics : TopicStore
    """

    def __init__(self, half: HalfStore, topics: TopicStore) -> None:
        self._half = half
        self._topics = topics
        self._keyed: OrderedDict[str, _Keyed] = OrderedDict()
        self._kept = 0  # their rows, and one more for each

    def fifo_of(self, *records: HalfRecord) -> frozenset[str]:
        """The FIFO topics to which half batches send."""
        names = frozenset[str]().union(*(record.topics for record in records))
        return self._topics.with_names(names).fifo & names

    def related(self, to: Sequence[Open], batches: Sequence[Open]) -> list[Open]:
        """Those half batches that share a key with some others: directly, or through another one that does.

        Parameters
        ----------
        to : sequence of Open
            All their keys count, whatever the state of the rows.
        batches : sequence of Open
            The keys of their open rows count.
        """
        if not to or not batches:
            return []
        wanted = _distinct(self._of(batch.record).rows["key"] for batch in to)
        keys = [self._open(batch).open_keys for batch in batches]
        ends = list(accumulate(len(k) for k in keys))
        every = pa.concat_arrays(keys)
        found: set[int] = set()
        while len(wanted):
            hits = pc.indices_nonzero(pc.is_in(every, value_set=wanted)).to_pylist()
            new = {bisect_right(ends, at) for at in hits} - found
            found |= new
            wanted = _distinct(keys[i] for i in new)
        return [batches[i] for i in sorted(found)]

    def open_rows(self, batch: Open) -> pa.Table:
        """Rows that are pending, or committed and not placed.

        Returns
        -------
        pyarrow.Table
            ``half_id, file_no, row_no``; ``at``, the row's number in the half batch; ``key`` (null outside FIFO
            topics), ``transaction`` and ``pending``.
        """
        found = self._open(batch).open_rows
        assert found is not None
        return found

    def _open(self, batch: Open) -> _Keyed:
        known = self._of(batch.record)
        if known.of is not batch:
            open_rows = _open_rows(known.rows, batch) if known.rows.num_rows else known.rows
            known = _Keyed(known.rows, batch, open_rows, _distinct([open_rows["key"]]))
            self._keyed[batch.record.half_id] = known
        return known

    def _of(self, record: HalfRecord) -> _Keyed:
        known = self._keyed.get(record.half_id)
        if known is None:
            known = self._keyed[record.half_id] = _Keyed(self._rows(record))
            self._kept += 1 + known.rows.num_rows
            while self._kept > KEYED_ROWS_MAX and len(self._keyed) > 1:
                self._kept -= 1 + self._keyed.popitem(last=False)[1].rows.num_rows
        return known

    def _rows(self, record: HalfRecord) -> pa.Table:
        in_order = self.fifo_of(record)
        if not in_order:
            return NO_KEYED_ROWS
        every = record.all_rows
        columns = ["file_no", "row_no", "topic", "queue_id", "sharding_key", "transaction_key"]
        rows = self._half.read(record, every, columns)
        fifo = pc.is_in(rows["topic"], value_set=pa.array(sorted(in_order), pa.string()))
        key = pc.binary_join_element_wise(
            rows["topic"], pc.cast(rows["queue_id"], pa.string()), rows["sharding_key"], " "
        )
        n, per = rows.num_rows, record.header.transaction_per
        if per == BATCH:
            transaction: pa.Array = pa.repeat(pa.scalar(""), n)
        elif per == KEY:
            transaction = rows["transaction_key"]
        else:
            numbers = [pc.cast(rows[name], pa.string()) for name in ("file_no", "row_no")]
            transaction = pc.binary_join_element_wise(*numbers, ".")
        return pa.table(
            {
                "half_id": pa.repeat(pa.scalar(record.half_id), n),
                "file_no": rows["file_no"],
                "row_no": rows["row_no"],
                "at": arange(n),
                "key": pc.if_else(fifo, key, pa.scalar(None, pa.string())),
                "transaction": transaction,
            }
        )


def _open_rows(rows: pa.Table, batch: Open) -> pa.Table:
    files = batch.state.files.values()
    state = pa.concat_arrays([bytes_array(f.state) for f in files])
    attempt = pc.cast(pa.concat_arrays([bytes_array(f.attempt) for f in files]), pa.string())
    transaction = pc.binary_join_element_wise(batch.record.half_id, attempt, rows["transaction"], ":")
    rows = rows.set_column(rows.column_names.index("transaction"), "transaction", transaction)
    rows = rows.append_column("pending", pc.equal(state, int(RowState.PENDING)))
    return rows.filter(pc.or_(rows["pending"], pc.equal(state, int(RowState.DECIDED))))


def _distinct(keys: Iterable[pa.Array | pa.ChunkedArray]) -> pa.Array:
    """The keys that are there, once each."""
    chunks = [c for k in keys for c in (k.chunks if isinstance(k, pa.ChunkedArray) else [k])]
    return pc.unique(pa.concat_arrays([NO_KEYS, *chunks]).drop_null())
