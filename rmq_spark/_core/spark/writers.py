"""The writers of ``format("txmq")``. Executors stage half files, and ``commit()`` runs the rest of the protocol.

The driver makes a writer for each micro-batch. Spark pickles it for the executors and for the process that runs
``commit()``. So a writer holds settings, and never an open log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from rmq_spark._core.listeners.transaction_listener import TransactionListener
from rmq_spark._core.log.half import HalfFile
from rmq_spark._core.log.half_header import HalfHeader, Naming
from rmq_spark._core.protocol.identity import Lineage, known_query_id, lineage_of, read_checkpoint, require_same_log
from rmq_spark._core.protocol.limits import PendingGuard
from rmq_spark._core.runtime.log_records import of_header
from rmq_spark._core.runtime.spans import sending_batch
from rmq_spark._core.spark.frame import require_message_types
from rmq_spark._core.spark.sink_options import SinkSettings
from rmq_spark._core.spark.socket import acknowledge_at_once
from rmq_spark._core.spark.staging import stage_partition
from rmq_spark._core.spark.versions import DataSourceStreamArrowWriter
from rmq_spark._core.vocabulary.message import require_app_id
from rmq_spark._core.vocabulary.options import Options, parse_int
from rmq_spark.errors import CheckpointMismatchError, NotACommitLogError, OptionError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

BATCH_ID_PROPERTY = "streaming.sql.batchId"


@dataclass
class StagedPartition(WriterCommitMessage):
    """The half files of one partition, which an executor returns to the driver."""

    header: HalfHeader
    files: list[HalfFile]


class _Writer:
    def __init__(self, options: Options, schema: StructType) -> None:
        self.settings = SinkSettings.of(options)
        require_message_types(schema, self.settings.topic, self.settings.transaction_key)
        try:
            self._plan(options, schema)
        except NotACommitLogError:  # the log may have been recreated since this process opened it: open it again
            self._plan(options, schema)

    def _plan(self, options: Options, schema: StructType) -> None:
        with cached_log(self.settings) as engine:
            listener = self.settings.listener()
            self.header = self._header(options, listener)
            self._require_same_log(options, engine)
            self.replayed = engine.is_replay(self.header)  # then executors skip its messages
            if not self.replayed:  # checked here, before executors write
                PendingGuard(engine, self.settings.pending_limits).require_room(self.header.producer_group)
            self.half_folder = f"{engine.path}/half"
            self.half_writer = self.settings.half_writer(engine, self.header, schema.names)

    def _header(self, options: Options, listener: TransactionListener) -> HalfHeader:
        raise NotImplementedError

    def _require_same_log(self, options: Options, engine: Engine) -> None:
        pass

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedPartition:
        """Write the partition's half files on an executor. No commit names them yet."""
        self._require_same_batch(TaskContext.get())
        acknowledge_at_once()
        if self.replayed:
            for _ in iterator:  # Spark requires that its input is read
                pass
            return StagedPartition(self.header, [])
        files = stage_partition(self.half_writer, self.half_folder, self.settings.storage_options, iterator)
        return StagedPartition(self.header, files)

    def _require_same_batch(self, context: Any) -> None:
        pass

    def _commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Prepare, execute and decide, in a process of the driver."""
        files: list[HalfFile] = []
        for message in messages:
            if not isinstance(message, StagedPartition) or message.header != self.header:
                raise OptionError(
                    f"a task staged files for another half batch than {self.header.half_id!r}: run the batch again"
                )
            files += message.files
        with cached_log(self.settings) as engine:
            two_phase = self.settings.two_phase(engine, self.settings.listener())
            with sending_batch(engine.path, self.header.half_id, self.settings.topic):
                two_phase.send(self.header, lambda: self._staged(files), lineage=self._lineage())

    def _lineage(self) -> Lineage | None:
        """Return the checkpoint's record of earlier batches; None without a checkpoint."""
        return None

    def _staged(self, files: list[HalfFile]) -> list[HalfFile]:
        if self.replayed:
            raise NotACommitLogError(
                f"half batch {self.header.half_id!r} was in the commit log when this run began, and is no more: "
                "the log was made anew. Run the batch again"
            )
        return sorted(files, key=lambda f: f.file_no)

    def _abort(self) -> None:
        # abort() deletes nothing, because it also runs, in another process, after commit() raised, and a commit that
        # timed out may still land. vacuum removes old orphans.
        logger.info(
            "half batch %r was aborted; what it staged stays until vacuum", self.header.half_id,
            extra=of_header(self.header),
        )  # fmt: skip


class TxmqWriter(_Writer, DataSourceArrowWriter):
    """The writer of ``df.write.format("txmq")``."""

    def _header(self, options: Options, listener: TransactionListener) -> HalfHeader:
        app_id, batch_id = options.get("appId"), options.get("batchId")
        if (app_id is None) != (batch_id is None):
            raise OptionError(
                "a batch write needs both appId and batchId, or neither: together they name it, so that a retry "
                f"is known as one (found appId={app_id!r}, batchId={batch_id!r})"
            )
        if app_id is None or batch_id is None:
            return self.settings.header(Naming.MADE_UP, f"write-{uuid4().hex}", 0, listener)
        return self.settings.header(Naming.GIVEN, require_app_id(app_id), parse_int(batch_id, "batchId", 0), listener)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort()


class TxmqStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The writer of a micro-batch of ``df.writeStream.format("txmq")``."""

    def _header(self, options: Options, listener: TransactionListener) -> HalfHeader:
        if "batchId" in options:
            raise OptionError("batchId is for batch writes: a stream's micro-batches have ids of their own")
        location, name = options.get("checkpointLocation"), options.get("appId")
        checkpoint = read_checkpoint(location, options.storage_options)
        advice = None if name else "or, when it has sent nothing yet, set .option('appId', ...)"
        self.checkpoint_location = location or ""  # read_checkpoint has required it
        query_id = known_query_id(self.checkpoint_location, options.storage_options, checkpoint, advice)
        app_id = require_app_id(name or query_id)
        batch_id, input_hash = checkpoint.batch_id, checkpoint.input_hash
        return self.settings.header(Naming.COUNTED, app_id, batch_id, listener, query_id, input_hash)

    def _require_same_log(self, options: Options, engine: Engine) -> None:
        require_same_log(options.get("checkpointLocation") or "", options.storage_options, engine.id, engine.path)

    def _lineage(self) -> Lineage:
        return lineage_of(self.checkpoint_location, self.settings.storage_options)

    def _require_same_batch(self, context: Any) -> None:
        running_id = context.getLocalProperty(BATCH_ID_PROPERTY) if context is not None else None
        if running_id is not None and int(running_id) != self.header.batch_id:
            raise self._two_queries(f"runs batch {running_id}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        if batchId != self.header.batch_id:
            raise self._two_queries(f"commits batch {batchId}")
        self._commit(messages)

    def _two_queries(self, doing: str) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            f"Spark {doing}, but the newest one in the checkpoint is {self.header.batch_id}: two queries use the same "
            "checkpointLocation"
        )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._abort()


@contextmanager
def cached_log(settings: SinkSettings) -> Iterator[Engine]:
    """Provide an open commit log, and keep it open: Spark reuses the process for the next micro-batches.

    An exception drops all cached logs. So a recreated log fails once, and its next use opens it again.
    """
    try:
        yield _open(settings.path, tuple(sorted(settings.storage_options.items())))
    except Exception:
        _open.cache_clear()
        raise


@lru_cache(maxsize=8)
def _open(path: str, storage_options: tuple[tuple[str, str], ...]) -> Engine:
    from rmq_spark._core.client.commit_log import engine_of

    return engine_of(path, dict(storage_options))
