"""The data source ``txmq``, through which Spark uses the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


class TxmqDataSource(DataSource):
    """``format("txmq")`` of ``read``, ``readStream``, ``write`` and ``writeStream``.

    Spark looks it up and pickles it for every query. So it is light, and leaves the work to ``rmq_spark.source`` and
    ``rmq_spark.sink``.
    """

    @classmethod
    def name(cls) -> str:
        return "txmq"

    def schema(self) -> str:
        from rmq_spark.source.reader import SOURCE_DDL

        return SOURCE_DDL

    def reader(self, schema: StructType) -> Any:
        from rmq_spark.source.reader import TxmqReader

        return TxmqReader(dict(self.options), schema)

    def streamReader(self, schema: StructType) -> Any:
        from rmq_spark.source.reader import TxmqStreamReader

        return TxmqStreamReader(dict(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        if overwrite:
            raise OptionError("mode('overwrite') is not possible: a commit log only grows; use mode('append')")
        from rmq_spark.config import Options
        from rmq_spark.sink.settings import SINK_OPTIONS
        from rmq_spark.sink.writers import TxmqWriter

        return TxmqWriter(Options(dict(self.options), SINK_OPTIONS), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        if overwrite:
            raise OptionError(
                "outputMode('complete') is not possible: a commit log only grows; use outputMode('append')"
            )
        from rmq_spark.config import Options
        from rmq_spark.sink.settings import SINK_OPTIONS
        from rmq_spark.sink.writers import TxmqStreamWriter

        return TxmqStreamWriter(Options(dict(self.options), SINK_OPTIONS), schema)


def register(spark: SparkSession) -> None:
    """Make ``format("txmq")`` known to a session.

    This is needed only when the package was installed after Spark looked for data sources (a notebook's
    ``%pip install``). Otherwise Spark finds it by itself.
    """
    spark.dataSource.register(TxmqDataSource)
