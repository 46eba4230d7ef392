"""Stages the messages of a partition, in a Python worker of Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import pyarrow as pa
from pyspark import TaskContext

from rmq_spark._core.log.half import HalfFile
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.storage.file_system import filesystem

MAPPED_BYTES_MAX = 32 * 1024 * 1024
"""The largest block from which glibc adapts (``DEFAULT_MMAP_THRESHOLD_MAX``), with glibc's own few bytes."""


def stage_partition(
    writer: HalfWriter, half_folder: str, storage_options: Mapping[str, str], batches: Iterable[pa.RecordBatch]
) -> list[HalfFile]:
    """Write the half files of this task's partition. No commit names them yet."""
    keep_freed_memory()
    context = TaskContext.get()
    fs, folder = filesystem(half_folder, storage_options)
    return writer.write(fs, folder, context.partitionId() if context is not None else 0, batches)


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of freed memory.

    A worker holds the rows of a partition until it writes them. Then glibc returns the memory to the kernel, and
    faults it in again, page by page, for the next micro-batch. glibc keeps twice the size of the largest freed block
    that had a mapping of its own. So this function makes and frees one. Nothing is written to it, so it takes no
    memory. With other C libraries this has no effect.
    """
    bytes(MAPPED_BYTES_MAX - 65_536)
