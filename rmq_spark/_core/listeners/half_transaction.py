"""The transactions of a half batch, each with its messages: what ``work`` gets with ``per_transaction=True``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.listeners.decode import decode_json
from rmq_spark._core.listeners.half_batch import HalfBatch, message_name
from rmq_spark.errors import MessageError


@dataclass(frozen=True)
class HalfTransaction:
    """One transaction of a half batch. ``work`` gets it with ``per_transaction=True``.

    Attributes
    ----------
    transaction_id : str
    transaction_key : str or None
        The value of ``transactionKey``; None without one.
    batch : HalfBatch
        The half batch that the transaction is part of.
    """

    transaction_id: str
    transaction_key: str | None
    batch: HalfBatch
    _all: _GroupedMessages = field(repr=False)
    _start: int = field(repr=False)
    _length: int = field(repr=False)

    def messages(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return its messages in send order, with the columns of :meth:`HalfBatch.messages`."""
        table = self._all.table if columns is None else self._all.table.select(list(columns))
        return table.slice(self._start, self._length)

    def decode(self, schema: str | pa.Schema, on_error: str = "raise") -> pa.Table:
        """Return its messages' JSON bodies as columns; see :meth:`HalfBatch.decode`. An error counts only the
        bodies of this transaction."""
        return self._all.decode(schema, on_error, self._start, self._length)


class _GroupedMessages:
    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._decoded: dict[tuple[str | pa.Schema, str], pa.Table | None] = {}

    def decode(self, schema: str | pa.Schema, on_error: str, start: int, length: int) -> pa.Table:
        # Decode once for all transactions: starting a JSON reader for each small one would take most of the time.
        if (schema, on_error) not in self._decoded:
            try:
                self._decoded[schema, on_error] = decode_json(self.table["body"], schema, on_error)
            except MessageError:
                self._decoded[schema, on_error] = None
        decoded = self._decoded[schema, on_error]
        if decoded is None:
            # A bad body must fail its own transaction alone.
            own_messages = self.table.slice(start, length)
            return decode_json(own_messages["body"], schema, on_error, partial(message_name, own_messages))
        return decoded.slice(start, length)


def transactions_of(batch: HalfBatch) -> Iterator[HalfTransaction]:
    """Yield the transactions of a half batch in the order of ``batch.transactions``, each with its messages."""
    transactions, messages = batch.transactions, batch.messages()
    owner = pc.index_in(messages["transaction_id"], value_set=transactions["transaction_id"].combine_chunks())
    # The sort is stable, so messages of one transaction stay in send order.
    grouped = _GroupedMessages(messages.take(pc.sort_indices(owner)).combine_chunks())
    start = 0
    for row in transactions.to_pylist():
        length = row["messages"]
        yield HalfTransaction(row["transaction_id"], row["transaction_key"], batch, grouped, start, length)
        start += length
