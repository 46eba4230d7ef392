"""Runs the parts of a half batch as tasks of a Spark job."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.transaction_listener import TransactionListener
from rmq_spark._core.log.half import HALF_SCHEMA
from rmq_spark._core.protocol.parts import PartAnswer, run_part
from rmq_spark._core.spark.executor_files import LogFiles
from rmq_spark._core.vocabulary.redaction import cause_of, line_of, one_line, redacted, text_of
from rmq_spark._core.vocabulary.rows import RowSet, bits_in
from rmq_spark.errors import ListenerError, LocalTransactionError, TxmqError, find_cause

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.storage.row_range import RowRange


class PartRows:
    """The undecided rows of a part, as an executor reads them. It is pickled.

    Parameters
    ----------
    path : str
        The commit log.
    is_all : bool
        Whether these are all rows of the part.
    """

    def __init__(self, path: str, storage_options: Mapping[str, str], ranges: Sequence[RowRange], is_all: bool) -> None:
        self._path, self._storage_options, self._ranges, self.is_all = path, storage_options, ranges, is_all

    @property
    def rows(self) -> RowSet:
        return RowSet({wanted.file_no: bits_in(wanted.ranges, wanted.file_rows) for wanted in self._ranges})

    def read(self, columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([HALF_SCHEMA.field(name) for name in columns])
        files = LogFiles(self._path, self._storage_options)
        tables = [table for wanted in self._ranges for _, table in files.read(wanted, columns)]
        return pa.concat_tables([table.cast(schema) for table in tables])

    def to_spark(self, spark: SparkSession) -> DataFrame:
        raise ListenerError("an executor has no Spark session: use batch.messages() or batch.decode()")

    def parts(self) -> Mapping[int, PartRows]:
        raise ListenerError("a part of a half batch has no parts")

    def ranges(self) -> Sequence[RowRange]:
        return self._ranges


class SparkTasks:
    """Runs each part in a task of a job.

    Attributes
    ----------
    spark : SparkSession
        The session of the micro-batch.
    """

    spark: SparkSession

    def __init__(self, engine: Engine) -> None:
        self._read_by = partial(PartRows, engine.path, dict(engine.storage_options))

    def __call__(self, listener: TransactionListener, parts: Sequence[HalfBatch]) -> list[PartAnswer]:
        """Run the job, and return an answer for each part. Spark runs a task that fails again, as often as
        ``spark.task.maxFailures`` says."""
        sent = [part.read_by(self._read_by) for part in parts]

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    try:
                        answer = pickle.dumps(run_part(listener, sent[number]))
                    except Exception as problem:
                        raise _in_one_line(sent[number], problem) from cause_of(problem)
                    yield pa.record_batch({"number": pa.array([number], pa.int64()), "answer": pa.array([answer])})

        tasks = self.spark.range(0, len(sent), 1, len(sent))
        try:
            rows = tasks.mapInArrow(work, "number long, answer binary").collect()
        except Exception as problem:  # Spark's text has hundreds of lines
            cause = find_cause(problem)
            if cause is None:
                raise
            raise cause from cause_of(problem)
        answers = {row["number"]: pickle.loads(bytes(row["answer"])) for row in rows}
        return [answers[number] for number in range(len(sent))]


def _in_one_line(part: HalfBatch, problem: Exception) -> TxmqError:
    """The error of a task, as :func:`~rmq_spark.errors.find_cause` finds it in Spark's text."""
    text = f"{one_line(redacted(text_of(problem)))}{line_of(problem)}"
    if isinstance(problem, TxmqError):
        return type(problem)(f"part {part.part}: {text}")
    return LocalTransactionError(f"part {part.part}: {type(problem).__name__}: {text}")
