"""The sink for ``foreachBatch``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.protocol.outcome import Outcome as Outcome
    from rmq_spark._core.spark.foreach_batch import TransactionalSink as TransactionalSink

__getattr__, __dir__, __all__ = public(__name__)
