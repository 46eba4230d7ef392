"""What differs between Spark 4.0, 4.1 and 4.2, in one place. The rest of the package asks no version.

========================  ==========================  =========================  ======================
what                      4.0                         4.1                        4.2
========================  ==========================  =========================  ======================
a stream's Arrow writer   a batch writer's class      its own class              its own class
``latestOffset()``        gets nothing                gets nothing               gets start and limit
Arrow schema's time zone  always UTC                  always UTC                 a parameter
Arrow batches from Python as they come                as they come               cut, with rows doubled
========================  ==========================  =========================  ======================

4.2.0 cuts an Arrow batch that has more rows than ``spark.sql.execution.arrow.maxRecordsPerOutputBatch`` (unset by
default), and each piece but the first has all rows of the pieces before it. So ours are never longer.

Before 4.2 a source is not told where its query stands, nor how much a trigger may take.
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
"""Whether Spark tells a streaming source where its query stands, and how much the next micro-batch may take."""

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

    STREAM_TELLS_START = True
except ImportError:  # before 4.2, which makes none of these and asks for none

    class ReadLimit:  # type: ignore[no-redef]
        """How much a micro-batch may take."""

    @dataclass
    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """All there is."""

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """At most so many rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A source that takes what is there when ``availableNow`` begins."""

    STREAM_TELLS_START = False

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # 4.0 hands Arrow batches to instances of DataSourceArrowWriter, also in a stream
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter

    class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):  # type: ignore[no-redef, misc]
        """A stream's writer that gets Arrow batches."""


_TIME_ZONE: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}


def arrow_schema_in_utc(schema: StructType) -> pa.Schema:
    """The Arrow schema of a Spark schema, with times in UTC."""
    return to_arrow_schema(schema, **_TIME_ZONE)


def batch_rows_max() -> int:
    """The most rows that an Arrow batch may have which a task hands to Spark, as the query's session says."""
    from pyspark import TaskContext

    context = TaskContext.get()
    said = None if context is None else context.getLocalProperty("spark.sql.execution.arrow.maxRecordsPerOutputBatch")
    return int(said) if said is not None and int(said) > 0 else sys.maxsize
