"""Listeners of local transactions, their verdicts, and their half batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.listeners.decode import decode_json as decode_json
    from rmq_spark._core.listeners.delta import DeltaTransactionListener as DeltaTransactionListener
    from rmq_spark._core.listeners.fence import create_fence as create_fence
    from rmq_spark._core.listeners.half_batch import HalfBatch as HalfBatch
    from rmq_spark._core.listeners.half_transaction import HalfTransaction as HalfTransaction
    from rmq_spark._core.listeners.per_message import PerMessageListener as PerMessageListener
    from rmq_spark._core.listeners.sql import SqlTransactionListener as SqlTransactionListener
    from rmq_spark._core.listeners.table_listener import TableListener as TableListener
    from rmq_spark._core.listeners.transaction_listener import ExecutedAttempt as ExecutedAttempt
    from rmq_spark._core.listeners.transaction_listener import TransactionListener as TransactionListener
    from rmq_spark._core.listeners.transaction_listener import Verdicts as Verdicts
    from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE as COMMIT_MESSAGE
    from rmq_spark._core.vocabulary.verdicts import ROLLBACK_MESSAGE as ROLLBACK_MESSAGE
    from rmq_spark._core.vocabulary.verdicts import UNKNOWN as UNKNOWN
    from rmq_spark._core.vocabulary.verdicts import LocalTransactionState as LocalTransactionState
    from rmq_spark._core.vocabulary.verdicts import Rollback as Rollback
    from rmq_spark._core.vocabulary.verdicts import Verdict as Verdict
    from rmq_spark._core.vocabulary.verdicts import VerdictArray as VerdictArray

__getattr__, __dir__, __all__ = public(__name__)
