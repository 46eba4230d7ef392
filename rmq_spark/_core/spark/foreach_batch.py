"""The sink for ``foreachBatch``. Its listener is an object of the user's own program, and can use a Spark session."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.listeners.transaction_listener import (
    CommitOncePrepared,
    TransactionListener,
    require_executing,
    require_listener,
    require_parts,
    require_transactions_for,
)
from rmq_spark._core.log.half import HalfFile
from rmq_spark._core.log.half_header import HalfHeader, Naming
from rmq_spark._core.protocol.identity import Identity, identity_of, run_of
from rmq_spark._core.protocol.limits import PendingLimits
from rmq_spark._core.protocol.outcome import Outcome
from rmq_spark._core.protocol.parts import PartRunner
from rmq_spark._core.runtime.spans import sending_batch
from rmq_spark._core.runtime.travel import require_travels
from rmq_spark._core.spark.frame import require_message_types
from rmq_spark._core.spark.part_tasks import SparkTasks
from rmq_spark._core.spark.send_settings import SendSettings
from rmq_spark._core.spark.workers import require_importable
from rmq_spark._core.vocabulary.message import require_app_id, require_group_name
from rmq_spark._core.vocabulary.options import REPLAY_CHECK_TIMEOUT_S, Duration, named, seconds, whole_number
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY, require_transaction_per
from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


DRIVER, EXECUTORS = "driver", "executors"
PARTITIONS_MAX = 100_000

_sent: dict[tuple[str, str], tuple[str | None, int]] = {}
"""The query run and the batch that this process sent last, by commit log and appId."""


class TransactionalSink:
    """A function for ``writeStream.foreachBatch`` that sends each micro-batch through the protocol.

    Parameters
    ----------
    log : CommitLog or str
        The commit log to send to, or its path.
    producer_group : str
        Names the listeners that can answer for each other's transactions; a check asks one of them.
    listener : TransactionListener or None
        Runs local transactions and answers checks. With None messages commit once they are prepared.
    topic : str, optional
        The topic of messages without a ``topic`` column.
    transaction_key : str, optional
        A column. Messages with equal values in it make one transaction.
    transaction_per : {"batch", "message"}, optional
        What makes a transaction without a ``transaction_key``: the whole batch by default.
    app_id : str, optional
        By default the query's id. Without it, call the sink from the query's first batch on: a sink that joins later
        cannot know under which id earlier batches were sent.
    checkpoint_location : str, optional
        The query's ``checkpointLocation``, as a path that Python can read where Spark runs. Needed over Spark Connect,
        which hides the query's id, and where Spark does not show the checkpoint's path.
    run_on : {"driver", "executors"}
        Where local transactions run. ``"executors"``: each partition of the micro-batch is a part, whose transactions
        run in a task of a Spark job, in a database transaction and with a fence row of their own; the driver decides
        all parts in one commit. The listener is pickled. It needs a fence, or must be
        :attr:`~TransactionListener.idempotent`.
    partitions : int, optional
        With ``run_on="executors"``, the number of parts. By default with a ``transaction_key`` the session's default
        parallelism (over Spark Connect, what Spark makes of ``repartition``), else the partitions that the micro-batch
        has.
    on_listener_error : {"fail", "unknown"}
        What an exception of the listener does: the query fails, or the verdict is UNKNOWN.
    replay_check_timeout : str or float
        ``"60s"``, or seconds.
    max_pending_batches : int, optional
        Refuse a new batch, with PendingLimitError, while this many of the group's half batches are pending.
    max_pending_bytes : int or str, optional
        The same limit for the bytes of their files: ``"500m"``, ``"10g"``.
    storage_options : mapping, optional
        For a path: passed to delta-rs.

    Examples
    --------
    >>> sink = TransactionalSink(log, producer_group="shop", listener=listener, topic="orders")  # doctest: +SKIP
    >>> orders.writeStream.foreachBatch(sink)  # doctest: +SKIP
    """

    @named
    def __init__(
        self,
        log: CommitLog | str | os.PathLike[str],
        *,
        producer_group: str,
        listener: TransactionListener | None,
        topic: str | None = None,
        transaction_key: str | None = None,
        transaction_per: str | None = None,
        app_id: str | None = None,
        checkpoint_location: str | None = None,
        run_on: str = DRIVER,
        partitions: int | None = None,
        on_listener_error: str = "fail",
        replay_check_timeout: Duration = REPLAY_CHECK_TIMEOUT_S,
        max_pending_batches: int | None = None,
        max_pending_bytes: int | str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine_of(log, storage_options)
        self.listener: TransactionListener = CommitOncePrepared()
        if listener is not None:
            self.listener = require_executing(require_listener(listener, "TransactionalSink"), "TransactionalSink")
        if topic is not None:
            self.engine.require_topic(topic)
        transaction_per = transaction_per or (KEY if transaction_key else BATCH)
        require_transaction_per(transaction_per, transaction_key, ("transaction_per", "transaction_key"))
        require_transactions_for(self.listener, transaction_per, "TransactionalSink")
        self.settings = SendSettings(
            topic=topic,
            producer_group=require_group_name(producer_group),
            transaction_per=transaction_per,
            transaction_key=transaction_key,
            on_listener_error=on_listener_error,
            replay_check_timeout_s=seconds(replay_check_timeout, "replay_check_timeout"),
            pending_limits=PendingLimits.of(max_pending_batches, max_pending_bytes),
        )
        self.app_id = None if app_id is None else require_app_id(app_id)
        self.checkpoint_location = checkpoint_location
        self.run_on = run_on
        self.partitions = None if partitions is None else whole_number(partitions, "partitions", 1, PARTITIONS_MAX)
        self._require_where_to_run()
        self._start()

    def _require_where_to_run(self) -> None:
        if self.run_on not in (DRIVER, EXECUTORS):
            raise OptionError(f"run_on={self.run_on!r} is neither {DRIVER!r} nor {EXECUTORS!r}")
        if self.run_on == DRIVER:
            if self.partitions is not None:
                raise OptionError(f"partitions are those of run_on={EXECUTORS!r}: set it, or leave partitions out")
            return
        if self.settings.transaction_per == BATCH:
            raise OptionError(
                f"run_on={EXECUTORS!r} runs the transactions of each partition apart, and here a whole micro-batch is "
                "one: set transaction_key, or transaction_per='message'"
            )
        require_parts(self.listener, "TransactionalSink")
        key: tuple[str, ...] = getattr(self.listener, "update_key", ())
        if key and self.settings.transaction_key not in key:
            raise OptionError(
                f"run_on={EXECUTORS!r} inserts parts side by side, and with on_conflict='update' the last row of a key "
                f"counts: set transaction_key to a column of the key ({', '.join(key)}), or leave run_on out"
            )
        if self.settings.topic in self.engine.topic_store.known().fifo and self._repartitions:
            raise _in_order_error(self.settings.topic)
        require_travels(self.listener, f"TransactionalSink: {self.listener!r}")

    @property
    def _repartitions(self) -> bool:
        """Whether parts are other partitions than those of the micro-batch."""
        return self.settings.transaction_key is not None or self.partitions is not None

    def _start(self) -> None:
        """Make what is not pickled."""
        self._tasks = SparkTasks(self.engine) if self.run_on == EXECUTORS else None
        self._parts = None if self._tasks is None else PartRunner(self._tasks)
        run: dict[str, Any] = {} if self._parts is None else {"run": self._parts}
        limits = self.settings.pending_limits
        self._two_phase = self.settings.two_phase(self.engine, self.listener, pending_limits=limits, **run)
        self.last_outcome: Outcome | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Over Spark Connect the function is pickled and sent to the server, which opens the log again.
        require_travels(self.listener, f"TransactionalSink: {self.listener!r}")
        state = {
            k: v
            for k, v in self.__dict__.items()
            if k not in ("engine", "_tasks", "_parts", "_two_phase", "last_outcome")
        }
        return {**state, "_reopen": (self.engine.path, self.engine.storage_options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        path, storage_options = state.pop("_reopen")
        self.__dict__.update(state)
        self.engine = engine_of(path, storage_options)
        self._start()

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Send one micro-batch. ``foreachBatch`` calls this."""
        require_importable(batch_df.sparkSession)
        require_message_types(batch_df.schema, self.settings.topic, self.settings.transaction_key)
        if self._tasks is not None:
            self._tasks.spark = batch_df.sparkSession
        identity = self._identity(batch_df, batch_id)
        header = self._header(identity, batch_id)
        sending = (run_of(batch_df), batch_id)
        if sending[0] is not None and _sent.get((self.engine.path, header.app_id)) == sending:
            raise OptionError(
                f"batch {batch_id} of app {header.app_id!r} was sent in this run already: give each sink of one "
                "foreachBatch function an app_id of its own, or the second would be taken for a replay of the first"
            )
        with sending_batch(self.engine.path, header.half_id, self.settings.topic):
            self.last_outcome = self._two_phase.send(
                header, lambda: self._stage(batch_df, header), lineage=identity.lineage
            )
        if identity.lineage is not None and identity.input_hash is not None and self.last_outcome.record is not None:
            # A function may skip its sink for batches without messages, and Spark may clean up offsets meanwhile.
            identity.lineage.record(batch_id, identity.input_hash)
        _sent[self.engine.path, header.app_id] = sending

    def _identity(self, batch_df: DataFrame, batch_id: int) -> Identity:
        advice = None if self.app_id else "or, when it has sent nothing yet, give TransactionalSink app_id=..."
        return identity_of(
            batch_df, batch_id, self.checkpoint_location, self.engine.storage_options, "TransactionalSink", advice
        )

    def _header(self, identity: Identity, batch_id: int) -> HalfHeader:
        app_id = self.app_id or require_app_id(identity.query_id)
        return self.settings.header(
            Naming.COUNTED, app_id, batch_id, self.listener, identity.query_id, identity.input_hash
        )

    def _stage(self, batch_df: DataFrame, header: HalfHeader) -> list[HalfFile]:
        """Write the half files on the executors, and return them for the commit."""
        half_folder = f"{self.engine.path}/half"
        storage_options = dict(self.engine.storage_options)
        writer = self.settings.half_writer(self.engine, header, batch_df.columns)
        is_spread = False
        if self._parts is not None:
            batch_df = self._in_parts(batch_df)
            self._parts.staged_here = header.half_id
            is_spread = self._repartitions

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from rmq_spark._core.spark.staging import stage_partition

            files = stage_partition(writer, half_folder, storage_options, batches)
            if is_spread:
                _refuse_fifo(files, writer.fifo)
            yield pa.record_batch({"files": [pickle.dumps(files)]})

        staged: list[HalfFile] = []
        for row in batch_df.mapInArrow(write, "files binary").collect():
            staged += pickle.loads(bytes(row["files"]))
        return sorted(staged, key=lambda f: f.file_no)

    def _in_parts(self, batch_df: DataFrame) -> DataFrame:
        """The micro-batch with all messages of a transaction in one partition, in the order that they had."""
        if self.settings.transaction_key is None:
            return batch_df if self.partitions is None else batch_df.repartition(self.partitions)
        from pyspark.sql import functions as F

        context = getattr(batch_df.sparkSession, "_sc", None)
        count = self.partitions or (None if context is None else context.defaultParallelism)
        arrival = max(batch_df.columns, key=len) + "_arrival"  # no column has this name
        numbered = batch_df.withColumn(arrival, F.monotonically_increasing_id())
        key = F.col(f"`{self.settings.transaction_key.replace('`', '``')}`")
        spread = numbered.repartition(key) if count is None else numbered.repartition(count, key)
        return spread.sortWithinPartitions(f"`{arrival.replace('`', '``')}`").drop(arrival)


def _refuse_fifo(files: Sequence[HalfFile], fifo: Collection[str]) -> None:
    in_order = sorted({segment.topic for file in files for segment in file.segments}.intersection(fifo))
    if in_order:
        raise _in_order_error(in_order[0])


def _in_order_error(topic: str) -> OptionError:
    return OptionError(
        f"run_on={EXECUTORS!r} deals messages out anew, and the FIFO topic {topic!r} keeps the order of sharding keys: "
        "leave run_on out, or use transaction_per='message' without partitions"
    )
