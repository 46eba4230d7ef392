"""The tasks of a drain by executors: what each gets, and what it does there.

Spark's workers import this module, so it loads neither Delta's engine nor Spark.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs

from rmq_spark.commitlog.message_files import FILE_BYTES_MAX, message_files
from rmq_spark.commitlog.messages import NAME
from rmq_spark.source.files import LogFiles
from rmq_spark.source.plan import BLOCK_ROWS, by_block
from rmq_spark.storage.files import DataFile, write_table

if TYPE_CHECKING:
    from rmq_spark.commitlog.placements import PlacedRange

TASK_BYTES_MAX = 64 * 1024 * 1024
"""A task gets half rows of about this size, or :data:`BLOCK_ROWS`, whichever comes first: one file of ``messages``."""
TASK_FILE_BYTES_MAX = FILE_BYTES_MAX * 4 // 3
"""More than a file of a local drain, so that a task whose messages are a little longer does not end with a small one. A
task takes some 400 MB."""
FILES_DDL = "path string, size_bytes bigint, rows bigint, stats string"
"""A row for each file, with what a commit needs of it."""
FILES_SCHEMA = pa.schema(
    [("path", pa.string()), ("size_bytes", pa.int64()), ("rows", pa.int64()), ("stats", pa.string())]
)


@dataclass
class Task:
    """What one task writes.

    Attributes
    ----------
    ranges : list of PlacedRange
        Of one topic; of several when each has little.
    sizes : dict of str to int
        Bytes of their half files, as far as the Delta log says.
    messages, size : int
        How many there are, and about how many bytes their rows take in ``half``.
    """

    ranges: list[PlacedRange] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    size: int = 0

    def add(self, placed: PlacedRange, size: tuple[int, int] | None) -> None:
        """Add a range whose half file has so many bytes and rows; None when nobody knows."""
        self.ranges.append(placed)
        self.messages += placed.count
        if size is not None:
            self.sizes[placed.rows.path] = size[0]
            self.size += size[0] * placed.count // size[1]

    def add_all(self, other: Task) -> None:
        """Add what another task has."""
        self.ranges += other.ranges
        self.sizes.update(other.sizes)
        self.messages += other.messages
        self.size += other.size

    def packed(self) -> bytes:
        """The task for a worker. Runs of rows are alike, so they shrink: the tasks of a step go to every executor."""
        return zlib.compress(pickle.dumps(self), 1)

    @staticmethod
    def unpacked(packed: bytes) -> Task:
        """What :meth:`packed` packed."""
        task: Task = pickle.loads(zlib.decompress(packed))
        return task

    @property
    def is_full(self) -> bool:
        return self.messages >= BLOCK_ROWS or self.size >= TASK_BYTES_MAX


def tasks_of(ranges: Iterable[PlacedRange], sizes: Mapping[str, tuple[int, int]]) -> Iterator[Task]:
    """Share ranges out: to each task those of one topic that follow each other, so that its files hold all messages
    between two offsets of each queue. What is left of the topics shares tasks.

    A half file with several topics is read for each of them: reading takes a fraction of what writing does.

    Parameters
    ----------
    ranges : iterable of PlacedRange
        In the order of ``op``, those of a half file after each other.
    sizes : mapping of str to (int, int)
        Bytes and rows of half files.
    """
    begun: dict[str, Task] = {}
    for _, placed in by_block(ranges):
        task = begun.setdefault(placed.topic, Task())
        task.add(placed, sizes.get(placed.rows.path))
        if task.is_full:
            yield begun.pop(placed.topic)
    together = Task()
    for task in begun.values():
        together.add_all(task)
        if together.is_full:
            yield together
            together = Task()
    if together.ranges:
        yield together


# ---------------------------------------------------------------- on executors
class TaskWork:
    """Writes the files of tasks, which their numbers name. Pickled to executors, with what opens the store.

    Parameters
    ----------
    path : str
        The commit log.
    storage_options : mapping of str to str
    tasks : sequence of bytes
        Packed each for itself, so that a worker unpacks its own alone.
    """

    def __init__(self, path: str, storage_options: Mapping[str, str], tasks: Sequence[bytes]) -> None:
        self._path = path
        self._storage_options = storage_options
        self._tasks = tasks

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for file in self.write(Task.unpacked(self._tasks[number])):  # a batch each, which Spark does not cut
                    row = [[getattr(file, name)] for name in FILES_SCHEMA.names]
                    yield pa.record_batch(row, schema=FILES_SCHEMA)

    def write(self, task: Task) -> list[DataFile]:
        """Write the files of one task."""
        files = LogFiles(self._path, self._storage_options)
        folder = _Folder(*files.folder(NAME))
        sizes = None if isinstance(folder.fs, pafs.LocalFileSystem) else task.sizes
        return list(message_files(task.ranges, files.read, folder, sizes, TASK_FILE_BYTES_MAX))


@dataclass(frozen=True)
class _Folder:
    """The folder of ``messages``."""

    fs: Any
    path: str

    def write(
        self,
        rows: pa.Table,
        prefix: str,
        stats_columns: Sequence[str],
        row_group_rows: int | None = None,
        keep_content: bool = False,
    ) -> DataFile:
        return write_table(
            self.fs, self.path, rows, prefix=prefix, stats_columns=stats_columns, row_group_rows=row_group_rows,
            keep_content=keep_content,
        )  # fmt: skip
