"""For Spark sessions: the data source, and messages as a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.spark.datasource import TxmqDataSource as TxmqDataSource
    from rmq_spark._core.spark.datasource import register as register
    from rmq_spark._core.spark.native import messages as messages

__getattr__, __dir__, __all__ = public(__name__)
