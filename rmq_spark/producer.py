"""The producer without Spark, and the result of a send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.producer.future import SendFuture as SendFuture
    from rmq_spark._core.producer.producer import TransactionMQProducer as TransactionMQProducer
    from rmq_spark._core.producer.result import TransactionSendResult as TransactionSendResult
    from rmq_spark._core.producer.session_transaction import SessionTransaction as SessionTransaction

__getattr__, __dir__, __all__ = public(__name__)
