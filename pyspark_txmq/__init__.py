"""Registers ``format("txmq")``: Spark imports every module named ``pyspark_*`` and takes its ``DefaultSource``.

It does so for each look-up of any Python data source and catches no errors, so this stays light and never raises.
"""

from rmq_spark.datasource import TxmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
