"""The sharding keys of open messages: which half batches wait for each other, and which are unrelated."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.batch_state import BatchState, RowState
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.half_table import HalfTable
from rmq_spark._core.log.topics import TopicTable
from rmq_spark._core.vocabulary.rows import arange, bytes_array
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY

KEYED_ROWS_MAX = 1_000_000
"""Rows of half batches whose keys are kept in memory, at about 75 bytes each."""
NO_KEYS = pa.array([], pa.string())
NO_KEYED_ROWS = pa.table({"key": NO_KEYS})
"""The rows of a half batch that sends to no FIFO topic."""


@dataclass(frozen=True)
class OpenBatch:
    """A half batch with rows that are pending, or committed and not placed."""

    record: HalfRecord
    state: BatchState


@dataclass
class _Keyed:
    """The keys of a half batch: the keys of all its rows, and of the rows that were open at the last query."""

    rows: pa.Table
    of: OpenBatch | None = None
    open_rows: pa.Table | None = None
    open_keys: pa.Array = field(default_factory=lambda: NO_KEYS)


class KeyIndex:
    """Sharding keys of half batches that send to FIFO topics. The key of a row never changes, so it is read once."""

    def __init__(self, half: HalfTable, topics: TopicTable) -> None:
        self._half = half
        self._topics = topics
        self._keyed: OrderedDict[str, _Keyed] = OrderedDict()
        self._cached_rows = 0  # number of their rows, plus one for each half batch

    def fifo_of(self, *records: HalfRecord) -> frozenset[str]:
        """The FIFO topics to which these half batches send."""
        names = frozenset[str]().union(*(record.topics for record in records))
        return self._topics.with_names(names).fifo & names

    def related(self, to: Sequence[OpenBatch], batches: Sequence[OpenBatch]) -> list[OpenBatch]:
        """The half batches of ``batches`` that share a key with one of ``to``, directly or through each other. All keys
        of ``to`` count, but only the keys of open rows of ``batches``."""
        if not to or not batches:
            return []
        new_keys = _distinct(self._keyed_of(batch.record).rows["key"] for batch in to)
        keys = [self._open(batch).open_keys for batch in batches]
        ends = list(accumulate(len(k) for k in keys))
        all_keys = pa.concat_arrays(keys)
        related: set[int] = set()
        while len(new_keys):
            hits = pc.indices_nonzero(pc.is_in(all_keys, value_set=new_keys)).to_pylist()
            added = {bisect_right(ends, at) for at in hits} - related
            related |= added
            new_keys = _distinct(keys[i] for i in added)
        return [batches[i] for i in sorted(related)]

    def open_rows(self, batch: OpenBatch) -> pa.Table:
        """Rows that are pending, or committed and not placed: ``half_id, file_no, row_no``; ``at``, the row's number in
        the half batch; ``key`` (null outside FIFO topics), ``transaction`` and ``pending``."""
        rows = self._open(batch).open_rows
        assert rows is not None
        return rows

    def _open(self, batch: OpenBatch) -> _Keyed:
        keyed = self._keyed_of(batch.record)
        if keyed.of is not batch:
            open_rows = _open_rows(keyed.rows, batch) if keyed.rows.num_rows else keyed.rows
            keyed = _Keyed(keyed.rows, batch, open_rows, _distinct([open_rows["key"]]))
            self._keyed[batch.record.half_id] = keyed
        return keyed

    def _keyed_of(self, record: HalfRecord) -> _Keyed:
        keyed = self._keyed.get(record.half_id)
        if keyed is None:
            keyed = self._keyed[record.half_id] = _Keyed(self._rows(record))
            self._cached_rows += 1 + keyed.rows.num_rows
            while self._cached_rows > KEYED_ROWS_MAX and len(self._keyed) > 1:
                self._cached_rows -= 1 + self._keyed.popitem(last=False)[1].rows.num_rows
        return keyed

    def _rows(self, record: HalfRecord) -> pa.Table:
        fifo_topics = self.fifo_of(record)
        if not fifo_topics:
            return NO_KEYED_ROWS
        all_rows = record.all_rows
        columns = ["file_no", "row_no", "topic", "queue_id", "sharding_key", "transaction_key"]
        rows = self._half.read(record, all_rows, columns)
        fifo = pc.is_in(rows["topic"], value_set=pa.array(sorted(fifo_topics), pa.string()))
        key = pc.binary_join_element_wise(
            rows["topic"], pc.cast(rows["queue_id"], pa.string()), rows["sharding_key"], " "
        )
        count, per = rows.num_rows, record.header.transaction_per
        if per == BATCH:
            transaction: pa.Array = pa.repeat(pa.scalar(""), count)
        elif per == KEY:
            transaction = rows["transaction_key"]
        else:
            numbers = [pc.cast(rows[name], pa.string()) for name in ("file_no", "row_no")]
            transaction = pc.binary_join_element_wise(*numbers, ".")
        return pa.table(
            {
                "half_id": pa.repeat(pa.scalar(record.half_id), count),
                "file_no": rows["file_no"],
                "row_no": rows["row_no"],
                "at": arange(count),
                "key": pc.if_else(fifo, key, pa.scalar(None, pa.string())),
                "transaction": transaction,
            }
        )


def _open_rows(rows: pa.Table, batch: OpenBatch) -> pa.Table:
    files = batch.state.files.values()
    state = pa.concat_arrays([bytes_array(f.state) for f in files])
    attempt = pc.cast(pa.concat_arrays([bytes_array(f.attempt) for f in files]), pa.string())
    transaction = pc.binary_join_element_wise(batch.record.half_id, attempt, rows["transaction"], ":")
    rows = rows.set_column(rows.column_names.index("transaction"), "transaction", transaction)
    rows = rows.append_column("pending", pc.equal(state, int(RowState.PENDING)))
    return rows.filter(pc.or_(rows["pending"], pc.equal(state, int(RowState.WAITING))))


def _distinct(keys: Iterable[pa.Array | pa.ChunkedArray]) -> pa.Array:
    chunks = [c for k in keys for c in (k.chunks if isinstance(k, pa.ChunkedArray) else [k])]
    return pc.unique(pa.concat_arrays([NO_KEYS, *chunks]).drop_null())
