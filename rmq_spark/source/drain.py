"""A drain by Spark's executors, for a backlog: they read the half files and write those of ``messages``.

::

    driver      op rows of a step ─▶ tasks, a topic each ─────────────▶ one commit: all files, and the position
    executors                          └▶ half files ─▶ files of messages ─┘

The driver commits as any drainer does, so it may run beside others. A task that fails, or runs twice, leaves files that
no table names; a vacuum removes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.message_files import placed_ranges
from rmq_spark.errors import OptionError, find_cause
from rmq_spark.redaction import cause_of
from rmq_spark.source.drain_task import FILES_DDL, TaskWork, tasks_of
from rmq_spark.storage.files import DataFile
from rmq_spark.workers import require_importable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rmq_spark.commitlog.steps import ProtocolSteps
    from rmq_spark.storage.table import Table

logger = logging.getLogger(__name__)

STEP_MESSAGES_MAX = 16_000_000
"""So many messages go into one commit: some sixty tasks. A drainer that is faster makes a step be done anew, so a step
must not take much longer than one of a local drain, which has a quarter of the messages."""


def drain(
    spark: SparkSession, log: CommitLog | str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
) -> int:
    """Copy messages that are placed and not yet in the table ``messages`` into it, through Spark's executors. For a
    backlog: less than a gigabyte or so, :meth:`CommitLog.drain` copies faster. Any number of either may run at once.

    Parameters
    ----------
    spark : SparkSession
        Its executors need the package, and must see the commit log at its path.
    log : CommitLog or path
    storage_options : mapping, optional
        For a path: passed to delta-rs.

    Returns
    -------
    int
        The version of ``op`` up to which the table now has all messages.

    Raises
    ------
    LostFileError, CorruptLogError
        When messages cannot be read; those of earlier steps are drained.
    OptionError
        When executors cannot read the commit log, or have no rmq_spark.
    """
    opened = CommitLog.of(log, storage_options)
    if not isinstance(opened.half.table.fs, pafs.FileSystem):
        raise OptionError(f"{opened!r} lies in the memory of this process, where no executor sees it: log.drain()")
    require_importable(spark)
    return opened.drain_by(lambda handle: ExecutorWriter(spark, handle))


class ExecutorWriter:
    """Writes the files of a step on Spark's executors: a :class:`rmq_spark.commitlog.drain.Writer`.

    Parameters
    ----------
    spark : SparkSession
    log : ProtocolSteps
        A handle that no other thread uses.
    """

    def __init__(self, spark: SparkSession, log: ProtocolSteps) -> None:
        self._spark = spark
        self._log = log

    @property
    def messages_max(self) -> int:
        return STEP_MESSAGES_MAX

    def write(self, table: Table, rows: pa.Table) -> Sequence[DataFile]:
        if rows.num_rows == 0:
            return []
        sizes = self._log.half.sizes(rows["path"])
        tasks = [task.packed() for task in tasks_of(placed_ranges(rows), sizes)]
        work = TaskWork(self._log.path, self._log.storage_options, tasks)
        try:
            # A partition a task. The tasks come with the function, not as rows: a plan shows rows.
            written = self._spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(work, FILES_DDL).collect()
        except Exception as problem:
            found = find_cause(problem)
            if found is None:
                raise
            raise found from cause_of(problem)
        logger.info(
            "executors wrote %d messages in %d files, up to version %d of op",
            pc.sum(rows["count"]).as_py(), len(written), pc.max(rows["version"]).as_py(),
        )  # fmt: skip
        return [DataFile(row["path"], row["size_bytes"], row["rows"], row["stats"]) for row in written]
