"""Our Parquet files as Spark reads them, whatever its session says.

A session's settings decide which files Spark leaves out in silence, what a column's type is, and what an instant means.
They are the user's, for the user's own files. So each of our reads says by itself what it relies on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark._core.storage.location import spark_path
from rmq_spark.errors import CorruptLogError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from rmq_spark._core.storage.table import Table

READ_OPTIONS = {
    # A file that is damaged or gone is an error. Spark would leave it out.
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    # Spark compares no page with its checksum unless it is told to. A flipped bit would be a changed message.
    "parquet.page.verify-checksum.enabled": "true",
    # Our files have instants of the calendar of today, and one schema.
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
    "mergeSchema": "false",
}
"""An option of a read comes before the session's setting (``FileSourceOptions`` and ``ParquetOptions`` in Spark)."""
PATHS_MAX = 32
"""The most paths that Spark lists without a job (``spark.sql.sources.parallelPartitionDiscovery.threshold``)."""


def spark_schema(schema: pa.Schema) -> StructType:
    """The Spark schema of our columns. DDL would leave it to the session what ``timestamp`` and ``string`` are."""
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
    """Rows of some files of a log's table.

    Of many files, Spark would list each in a task of its own: 600 took two seconds. So it lists the folder instead, and
    keeps what is in these.

    Parameters
    ----------
    spark : SparkSession
    root : str
        The commit log.
    table : Table
    files : pyarrow.Table
        What the Delta log says of the files (``table.actions()``).
    names : sequence of str
        Their paths in the table's folder.
    schema : pyarrow.Schema
        The wanted columns.
    paths_max : int
        With more files the folder is listed.

    Raises
    ------
    CorruptLogError
        When a file on a disk of this machine has not the size that the Delta log says.
    """
    require_sizes(table, files, names)
    reader = spark.read.schema(spark_schema(schema)).options(**READ_OPTIONS)
    folder = spark_path(root, table.name)
    if len(names) > paths_max and all(re.fullmatch(r"[\w.-]+", name) for name in names):
        found = reader.parquet(folder)
        there = {file.rpartition("/")[2] for file in found.inputFiles()}
        if there == set(names):
            return found
        if there.issuperset(names) and _tells_file_names(spark):  # without one of them, Spark must say so
            of_these = ", ".join(f"'{name}'" for name in names)
            return found.where(f"_metadata.file_name IN ({of_these})")
    return reader.parquet(*[f"{folder}/{name}" for name in names])


def _tells_file_names(spark: SparkSession) -> bool:
    """Whether Spark's reader of Parquet has the column ``_metadata``: the one of its V2 API has not."""
    v1 = spark.conf.get("spark.sql.sources.useV1SourceList", "parquet") or ""
    return "parquet" in v1.lower().replace(" ", "").split(",")


def require_sizes(table: Table, files: pa.Table, names: Sequence[str]) -> None:
    """Raise CorruptLogError for a file that has not the size that the Delta log says: Spark takes one of no bytes, as a
    power cut leaves them, for one without rows.

    Object stores have a file whole or not at all, and a look costs a request there, so only local disks are looked at
    (2 µs a file). Of a file that is gone, Spark itself says so.
    """
    if not isinstance(table.fs, pafs.LocalFileSystem):
        return
    mine = files.filter(pc.is_in(files["path"], value_set=pa.array(names, pa.string())))
    paths, sizes = mine["path"].to_pylist(), mine["size_bytes"].to_pylist()
    for path, size, found in zip(
        paths, sizes, table.fs.get_file_info([f"{table.folder}/{path}" for path in paths]), strict=True
    ):
        if found.type == pafs.FileType.File and size is not None and found.size != size:
            raise CorruptLogError(
                f"file {path} of table {table.name} has {found.size} bytes, its Delta log says {size}: restore it from "
                "a copy, and write nothing to this commit log before"
            )
