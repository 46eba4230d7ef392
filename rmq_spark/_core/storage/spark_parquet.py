"""Reads our Parquet files in Spark, whatever its session says.

A session's settings decide which files Spark silently leaves out, what a column's type is, and what an instant means.
They are the user's, for the user's own files. So each of our reads sets the options that it relies on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark._core.storage.location import spark_path
from rmq_spark._core.storage.seal import RESTORE
from rmq_spark.errors import CorruptLogError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from rmq_spark._core.storage.table import Table

READ_OPTIONS = {
    # A damaged or missing file is an error. Spark would leave it out.
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    # Spark verifies the checksums of pages only on demand. A flipped bit would change a message.
    "parquet.page.verify-checksum.enabled": "true",
    # Our files have instants of today's calendar, and one schema.
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
    "mergeSchema": "false",
}
"""An option of a read overrides the session's setting (``FileSourceOptions`` and ``ParquetOptions`` in Spark)."""
PATHS_MAX = 32
"""The most paths that Spark lists without a job (``spark.sql.sources.parallelPartitionDiscovery.threshold``)."""


def spark_schema(schema: pa.Schema) -> StructType:
    """The Spark schema of our columns. In DDL, the session would decide what ``timestamp`` and ``string`` are."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def read_files(
    spark: SparkSession,
    root: str,
    table: Table,
    files: pa.Table,
    names: Sequence[str],
    schema: pa.Schema,
    paths_max: int = PATHS_MAX,
) -> DataFrame:
    """Rows of files of a log's table, in the columns of ``schema``. ``files`` are what the Delta log says of them
    (``table.actions()``), ``names`` their paths. CorruptLogError: one on a local disk has another size than the Delta
    log says.

    Spark would list each of many files in a task of its own. So with more than ``paths_max`` it lists the folder
    instead, and keeps the rows of these files.
    """
    require_sizes(table, files, names)
    reader = spark.read.schema(spark_schema(schema)).options(**READ_OPTIONS)
    folder = spark_path(root, table.name)
    if len(names) > paths_max and all(re.fullmatch(r"[\w.-]+", name) for name in names):
        frame = reader.parquet(folder)
        listed = {file.rpartition("/")[2] for file in frame.inputFiles()}
        if listed == set(names):
            return frame
        if listed.issuperset(names) and _has_file_names(spark):  # else Spark must report the missing file
            quoted = ", ".join(f"'{name}'" for name in names)
            return frame.where(f"_metadata.file_name IN ({quoted})")
    return reader.parquet(*[f"{folder}/{name}" for name in names])


def _has_file_names(spark: SparkSession) -> bool:
    """Whether Spark's reader of Parquet has the column ``_metadata``: that of its V2 API has not."""
    v1 = spark.conf.get("spark.sql.sources.useV1SourceList", "parquet") or ""
    return "parquet" in v1.lower().replace(" ", "").split(",")


def require_sizes(table: Table, files: pa.Table, names: Sequence[str]) -> None:
    """Raise CorruptLogError for a file whose size differs from the Delta log's. Spark takes an empty file, as a power
    cut leaves it, for one without rows.

    Object stores have a file whole or not at all, and a look costs a request there, so only local disks are checked.
    Spark itself reports a missing file.
    """
    if not isinstance(table.fs, pafs.LocalFileSystem):
        return
    wanted = files.filter(pc.is_in(files["path"], value_set=pa.array(names, pa.string())))
    paths, sizes = wanted["path"].to_pylist(), wanted["size_bytes"].to_pylist()
    for path, size, info in zip(
        paths, sizes, table.fs.get_file_info([f"{table.folder}/{path}" for path in paths]), strict=True
    ):
        if info.type == pafs.FileType.File and size is not None and info.size != size:
            raise CorruptLogError(
                f"file {path} of table {table.name} has {info.size} bytes, its Delta log says {size}: {RESTORE}"
            )
