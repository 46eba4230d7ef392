"""Registers ``format("txmq")``: Spark imports every module named ``pyspark_*`` and takes its ``DefaultSource``.

Spark does so at each look-up of any Python data source and catches no errors. So this module is light and never raises.
"""

from rmq_spark._core.spark.datasource import TxmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
