"""A Python data source that does nothing: what Spark's way to Python and back costs before any sink or source works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

BATCH_ROWS = 65_536


class Nothing(DataSource):
    """``format("nothing")``: a sink that throws everything away, and a source that says one batch again and again.

    Options of the source: ``file`` (Arrow, uncompressed, in the schema asked for), ``rows`` in all, ``partitions``.
    """

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        return _Writer()

    def reader(self, schema: StructType) -> Any:
        return _Reader(self.options["file"], int(self.options["rows"]), int(self.options["partitions"]))


class _Writer(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass


class _Reader(DataSourceReader):
    def __init__(self, file: str, rows: int, partitions: int) -> None:
        self.file, self.rows, self.parts = file, rows, partitions

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(i) for i in range(self.parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = feather.read_table(self.file, memory_map=True).combine_chunks().to_batches()[0]
        left = self.rows // self.parts
        while left > 0:
            yield batch.slice(0, min(left, BATCH_ROWS))
            left -= BATCH_ROWS
