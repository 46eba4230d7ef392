"""The differences between Spark 4.0, 4.1 and 4.2. The rest of the package tests no version.

========================  ==========================  =========================  ======================
subject                   4.0                         4.1                        4.2
========================  ==========================  =========================  ======================
a stream's Arrow writer   a batch writer's class      its own class              its own class
``latestOffset()``        gets nothing                gets nothing               gets start and limit
Arrow schema's time zone  always UTC                  always UTC                 a parameter
Arrow batches from Python as they come                as they come               cut, with rows doubled
========================  ==========================  =========================  ======================

4.2.0 cuts an Arrow batch that has more rows than ``spark.sql.execution.arrow.maxRecordsPerOutputBatch`` (unset by
default), and each piece but the first repeats all rows of the pieces before it. So this package never exceeds it.

Before 4.2 a source does not learn its query's position, nor the trigger's limit.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.pandas.types import to_arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = [
    "STREAM_TELLS_START",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema_in_utc",
    "batch_rows_max",
]

STREAM_TELLS_START: bool
"""Whether Spark tells a streaming source its query's position and the next micro-batch's limit."""

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

    STREAM_TELLS_START = True
except ImportError:  # Spark before 4.2 has none of these

    class ReadLimit:  # type: ignore[no-redef]
        """The most that a micro-batch may take."""

    @dataclass
    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """No limit."""

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """At most ``max_rows`` rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A source that ends at the state at which ``availableNow`` began."""

    STREAM_TELLS_START = False

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # 4.0 passes Arrow batches to instances of DataSourceArrowWriter, also in a stream
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter

    class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):  # type: ignore[no-redef, misc]
        """A stream's writer that gets Arrow batches."""


_TIME_ZONE: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}


def arrow_schema_in_utc(schema: StructType) -> pa.Schema:
    return to_arrow_schema(schema, **_TIME_ZONE)


def batch_rows_max() -> int:
    """Return the most rows of an Arrow batch that a task passes to Spark, by the query's session."""
    from pyspark import TaskContext

    context = TaskContext.get()
    setting = (
        None if context is None else context.getLocalProperty("spark.sql.execution.arrow.maxRecordsPerOutputBatch")
    )
    return int(setting) if setting is not None and int(setting) > 0 else sys.maxsize
