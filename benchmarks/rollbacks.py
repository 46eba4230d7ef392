"""Listeners of the benchmarks: both answer for each message, one rolls back every hundredth."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.transaction_listener import TransactionListener, Verdicts
from rmq_spark._core.vocabulary.rows import arange
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, ROLLBACK_MESSAGE


class _Answers(TransactionListener):
    """Commits all messages but every so manyth one."""

    def __init__(self, every: int) -> None:
        self._every = every

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        numbers = arange(batch.transactions.num_rows).to_numpy()
        refused = pa.array(numbers % self._every == self._every - 1)
        return pc.if_else(refused, str(ROLLBACK_MESSAGE), str(COMMIT_MESSAGE))

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return self.execute_local_transaction(batch)


one_in_a_hundred = _Answers(100)
none = _Answers(1 << 40)
