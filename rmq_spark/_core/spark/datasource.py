"""The data source ``txmq``, through which Spark uses the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pyspark.sql.datasource import DataSource

from rmq_spark._core.spark.workers import require_importable
from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

SPARK_OPTIONS = frozenset({"queryname"})
"""Options that Spark adds to those of a stream's sink: the query's name, which every flow of a declarative pipeline
has."""


class TxmqDataSource(DataSource):
    """``format("txmq")`` of ``read``, ``readStream``, ``write`` and ``writeStream``.

    Spark pickles it for every query, so it is light: ``reader.py`` and ``writers.py`` do the work.
    """

    @classmethod
    def name(cls) -> str:
        return "txmq"

    def schema(self) -> StructType:
        from rmq_spark._core.messages.messages_table import SOURCE_SCHEMA
        from rmq_spark._core.storage.spark_parquet import spark_schema

        _require_read_options(dict(self.options))
        return spark_schema(SOURCE_SCHEMA)

    def reader(self, schema: StructType) -> Any:
        from rmq_spark._core.spark.reader import TxmqReader

        return TxmqReader(dict(self.options), schema)

    def streamReader(self, schema: StructType) -> Any:
        from rmq_spark._core.spark.reader import TxmqStreamReader

        return TxmqStreamReader(dict(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        if overwrite:
            raise OptionError("mode('overwrite') is not possible: a commit log only grows; use mode('append')")
        from rmq_spark._core.spark.sink_options import SINK_OPTIONS
        from rmq_spark._core.spark.writers import TxmqWriter
        from rmq_spark._core.vocabulary.options import Options

        return TxmqWriter(Options(dict(self.options), SINK_OPTIONS), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        if overwrite:
            raise OptionError(
                "outputMode('complete') is not possible with format('txmq'): a commit log only grows. Use "
                "outputMode('append'), or send each micro-batch's whole result by foreachBatch(TransactionalSink(...))"
            )
        from rmq_spark._core.spark.sink_options import SINK_OPTIONS
        from rmq_spark._core.spark.writers import TxmqStreamWriter
        from rmq_spark._core.vocabulary.options import Options

        options = {name: value for name, value in self.options.items() if name.lower() not in SPARK_OPTIONS}
        return TxmqStreamWriter(Options(options, SINK_OPTIONS), schema)


def _require_read_options(options: Mapping[str, str]) -> None:
    """Refuse options that neither a batch nor a stream can use: Spark does not tell here which of them loads."""
    from rmq_spark._core.reads.read_options import read_options
    from rmq_spark.errors import TxmqError

    problems: list[TxmqError] = []
    for streaming in (True, False):
        try:
            read_options(options, streaming)
        except TxmqError as problem:
            problems.append(problem)
    if len(problems) == 2:
        for_batches = any(name.lower().startswith("ending") for name in options)
        raise problems[for_batches]


_registered: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> None:
    """Make ``format("txmq")`` known to a session, and require that its workers can use it.

    Spark finds the format by itself when the package was installed before Spark looked for data sources. A notebook's
    ``%pip install`` comes later. A second call does nothing.

    Raises
    ------
    OptionError
        When the workers of a local session run a Python without the package. The error says what to set.
    """
    if spark in _registered:
        return
    require_importable(spark)
    if not _is_found(spark):
        spark.dataSource.register(TxmqDataSource)
    _registered.add(spark)


def _is_found(spark: SparkSession) -> bool:
    """Return True when Spark has found the format by itself: registering it again warns, and fails in 4.0."""
    session: Any = spark
    try:
        return bool(session._jsparkSession.sessionState().dataSourceManager().dataSourceExists(TxmqDataSource.name()))
    except Exception:  # Spark Connect has no JVM here, and these are internals of Spark
        return False
