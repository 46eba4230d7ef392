"""Runs a message listener over a stream: concurrently, with retries that come later, or orderly, queue by queue."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.consumers.in_order import RESULT, QueueResult, by_queue, consume_queue
from rmq_spark._core.consumers.message_listener import (
    EachMessage,
    Listen,
    answers,
    log_failures,
    require_table_listener,
)
from rmq_spark._core.consumers.own_messages import own_header, own_writers, send_each
from rmq_spark._core.consumers.retry import (
    CONCURRENTLY,
    MAX_RECONSUME_TIMES,
    NEEDED_COLUMNS,
    ORDERLY,
    SUSPEND_S,
    dlq_topic,
    require_retry_options,
    restored,
    retry_topic,
    sent_back,
)
from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared
from rmq_spark._core.log.half import HalfFile
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.identity import Identity, identity_of
from rmq_spark._core.protocol.own_sends import dead_name
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.reads.read_options import ReadOptions
from rmq_spark._core.runtime.travel import require_travels
from rmq_spark._core.spark.stream_options import sources_of
from rmq_spark._core.spark.versions import STREAM_TELLS_START
from rmq_spark._core.spark.workers import require_importable
from rmq_spark._core.vocabulary.message import require_app_id, require_group_name
from rmq_spark._core.vocabulary.options import named, seconds
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import ConsumeError, ListenerError, OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

logger = logging.getLogger(__name__)


@named
def consume(
    stream: DataFrame,
    group: str,
    listener: Listen | EachMessage,
    mode: str = CONCURRENTLY,
    *,
    log: CommitLog | str | os.PathLike[str] | None = None,
    max_reconsume_times: int | None = None,
    delay_level: int | None = None,
    suspend_s: float = SUSPEND_S,
    app_id: str | None = None,
    checkpoint_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataStreamWriter:
    """Let a message listener consume a stream on the executors (RocketMQ: ``DefaultMQPushConsumer``).

    A message is consumed at least once. After a crash, all messages of the interrupted micro-batch come again.

    Parameters
    ----------
    stream : DataFrame
        A ``readStream.format("txmq")`` that keeps the source's columns, with the option ``consumerGroup``, which
        publishes the group's progress and also reads its retries. For ``orderly`` it needs ``ordered=true`` as well.
    group : str
        The consumer group.
    listener : callable or EachMessage
        Gets a ``pyarrow.Table`` of messages (the stream's columns, and ``reconsume_times``). It returns one
        :class:`ConsumeResult` for all of them, a list with one for each, or nothing when all are consumed. With
        :class:`EachMessage` a function takes one message at a time. The listener is pickled and sent to the executors.
    mode : {"concurrently", "orderly"}
        ``concurrently``: a message that fails goes to ``%RETRY%group`` and comes again after 10 s, 30 s, 1 min and so
        on, and at last goes to ``%DLQ%group``. ``orderly``: a failure stops the queue at that message, and the
        listener gets it again a moment later. The other queues go on.
    log : CommitLog or path, optional
        The log for retries and dead letters. By default the log that the stream reads.
    max_reconsume_times : int, optional
        Retries of a message before it is a dead letter. When not given: 16 for ``concurrently`` and no limit for
        ``orderly``, where a message that cannot be consumed holds up its queue.
    delay_level : int, optional
        Delay level of every retry, 1 to 18. When not given, it rises with each retry.
    suspend_s : float
        Seconds for which a queue is suspended.
    app_id : str, optional
        Names the retries that the query sends, together with the query's id.
    checkpoint_location : str, optional
        The query's ``checkpointLocation``, as for :class:`TransactionalSink`; needed over Spark Connect.

    Returns
    -------
    DataStreamWriter
        Set ``checkpointLocation`` and a trigger on it, and ``start()`` it.

    Raises
    ------
    OptionError, ListenerError
        When an argument or the stream cannot be used, before the query starts.
    """
    require_group_name(group, "consumerGroup")
    if mode not in (CONCURRENTLY, ORDERLY):
        raise OptionError(f"mode={mode!r} is neither {CONCURRENTLY!r} nor {ORDERLY!r}")
    if not callable(listener) and not isinstance(listener, EachMessage):
        raise ListenerError(f"consume got {type(listener).__name__}: a function of a pyarrow.Table is expected")
    if not isinstance(listener, EachMessage):
        require_table_listener(listener)
    require_importable(stream.sparkSession)
    missing = [name for name in NEEDED_COLUMNS if name not in stream.columns]
    if missing:
        raise OptionError(
            f"the stream has no column {missing[0]!r}: load it without .schema(...), and keep all columns"
        )
    require_retry_options(max_reconsume_times, delay_level)
    suspend_s = seconds(suspend_s, "suspend_s")
    sources = sources_of(stream)
    engine = _log_of(sources, group, mode, log, storage_options)
    for topic in (retry_topic(group), dlq_topic(group)):
        engine.create_own_topic(topic)
    kind: type[_Orderly | _Concurrently] = _Orderly if mode == ORDERLY else _Concurrently
    consumer = kind(
        engine=engine,
        group=group,
        listener=listener,
        reconsume_max=max_reconsume_times,
        delay_level=delay_level,
        suspend_s=suspend_s,
        app_id=None if app_id is None else require_app_id(app_id),
        checkpoint_location=checkpoint_location,
        alone=len(sources) == 1 and sources[0].path == engine.path,
    )
    return stream.writeStream.foreachBatch(consumer)


def _log_of(
    sources: Sequence[ReadOptions],
    group: str,
    mode: str,
    log: CommitLog | str | os.PathLike[str] | None,
    storage_options: Mapping[str, str] | None,
) -> Engine:
    """Return the log for the retries, or raise OptionError when the stream's options do not fit."""
    group_sources = [source for source in sources if source.consumer_group == group]
    if not group_sources:
        raise OptionError(
            f"the stream is not read for consumer group {group!r}, so what fails would not come again: load it with "
            f".option('consumerGroup', {group!r})"
        )
    if mode == ORDERLY and not all(source.ordered for source in group_sources):
        raise OptionError("mode='orderly' needs a stream that is loaded with .option('ordered', 'true')")
    if log is None:
        if len({source.path for source in group_sources}) > 1:
            raise OptionError("the stream reads several commit logs: pass log=..., the one for retries")
        return engine_of(group_sources[0].path, {**group_sources[0].storage_options, **(storage_options or {})})
    return engine_of(log, storage_options)


@dataclass
class _Consumer:
    engine: Engine
    group: str
    listener: Listen | EachMessage
    reconsume_max: int | None
    delay_level: int | None
    suspend_s: float
    app_id: str | None
    checkpoint_location: str | None
    alone: bool
    """Whether the stream reads this log and no other. Then its messages show the group's positions."""
    tries: dict[Queue, tuple[int, int]] = field(default_factory=dict)
    """In mode ``orderly``: the offset at which each queue stopped last, and how many times in a row."""

    def __getstate__(self) -> dict[str, Any]:
        # Over Spark Connect the function is pickled and sent to the server, which opens the log again.
        require_travels(self.listener, f"the listener of group {self.group!r}")
        return {**self.__dict__, "engine": (self.engine.path, self.engine.storage_options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "engine": engine_of(*state["engine"])})

    def identity(self, batch: DataFrame, batch_id: int) -> Identity:
        advice = "or begin with a new checkpoint: the group goes on where it stands"
        return identity_of(batch, batch_id, self.checkpoint_location, self.engine.storage_options, "consume", advice)

    def query_name(self, identity: Identity) -> str:
        """Return the name under which a query sends retries and dead letters.

        It contains the query's id. After a reset the query has a new checkpoint and another id, so its sends are not
        mistaken for earlier ones.
        """
        return identity.query_id if self.app_id is None else f"{self.app_id}.{identity.query_id}"


# ---------------------------------------------------------------- concurrently
class _Concurrently(_Consumer):
    """Consumes each micro-batch concurrently, and sends the messages that fail as one half batch of retries.

    The half batch is named after the micro-batch. A micro-batch that runs again after a crash looks for that half
    batch. When it is there, all messages were consumed or sent back, and nothing is left to do.
    """

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        identity = self.identity(batch, batch_id)
        header = own_header(
            self.engine, self.group, f"retry.{self.group}.{self.query_name(identity)}", batch_id, identity
        )
        (writer,) = own_writers(self.engine, [header])

        ends: dict[Queue, int] = {}

        def consume() -> list[HalfFile]:
            files: list[HalfFile] = []
            for row in batch.mapInArrow(self._work(writer), "result binary").collect():
                written, seen = pickle.loads(bytes(row["result"]))
                files += written
                for queue, end in seen.items():
                    ends[queue] = max(end, ends.get(queue, 0))
            return sorted(files, key=lambda f: f.file_no)

        outcome = TwoPhase(self.engine, CommitOncePrepared()).send(header, consume, lineage=identity.lineage)
        if not STREAM_TELLS_START and self.alone:  # the source learns of a run's last micro-batch only in the next run
            self.engine.groups.progress(self.group, ends, f"{self.query_name(identity)} batch {batch_id}")
        if outcome.replayed:
            return
        if outcome.record is not None:
            logger.info(
                "group %r: %d messages are sent back", self.group, sum(outcome.messages.values()),
                extra={"consumer_group": self.group, "half_id": outcome.record.half_id, "batch_id": batch_id},
            )  # fmt: skip
        self.engine.ledger.place_due()

    def _work(self, writer: HalfWriter) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        listener, group, delay_level = self.listener, self.group, self.delay_level
        reconsume_max = MAX_RECONSUME_TIMES if self.reconsume_max is None else self.reconsume_max
        half_folder, storage_options = f"{self.engine.path}/half", dict(self.engine.storage_options)

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from rmq_spark._core.spark.staging import stage_partition

            seen: dict[Queue, int] = {}

            def failed() -> Iterator[pa.RecordBatch]:
                for batch in batches:
                    if not STREAM_TELLS_START:
                        seen.update(_ends(pa.table(batch), seen))
                    messages = restored(pa.table(batch))
                    results = list(answers(listener, messages))
                    failures = [row for row, (consumed, _) in enumerate(results) if not consumed]
                    if failures:
                        reasons = [results[row][1] for row in failures]
                        topic, queue_id = (messages[name][failures[0]].as_py() for name in ("topic", "queue_id"))
                        log_failures(group, (topic, queue_id), len(failures), len(results), reasons[0])
                        retries = sent_back(
                            messages.take(pa.array(failures)), reasons, group, reconsume_max, delay_level
                        )
                        yield from retries.to_batches()

            files = stage_partition(writer, half_folder, storage_options, failed())
            yield pa.record_batch({"result": [pickle.dumps((files, seen))]}, schema=RESULT)

        return work


def _ends(messages: pa.Table, known_ends: Mapping[Queue, int]) -> dict[Queue, int]:
    """The next offset of each queue after these messages, and at least the queue's known end."""
    highest = (
        messages.group_by(["topic", "queue_id"], use_threads=False).aggregate([("queue_offset", "max")]).to_pylist()
    )
    ends = {(row["topic"], row["queue_id"]): row["queue_offset_max"] + 1 for row in highest}
    return {queue: max(end, known_ends.get(queue, 0)) for queue, end in ends.items()}


# ---------------------------------------------------------------- orderly
class _Orderly(_Consumer):
    """Consumes each micro-batch in order, in one pass over its queues.

    A queue that stops is suspended at that message. The stream holds the queue back until the suspension is over, and
    then reads it again from that message. The group's positions are written after each pass, so a micro-batch that
    runs again skips consumed messages.
    """

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        query_name = self.query_name(self.identity(batch, batch_id))
        results = self._pass(batch, self.engine.groups.next_offsets(self.group))
        next_offsets = {queue: result.next_offset for queue, result in results.items()}
        suspended_until: dict[Queue, datetime] = {}
        for queue, result in results.items():
            if result.stopped_at is None:
                continue
            is_dead = self._count_stop(query_name, queue, result, result.stopped_at)
            next_offsets[queue] += is_dead
            if next_offsets[queue] < result.seen_to:
                suspended_until[queue] = self.engine.runtime.now() + timedelta(seconds=0 if is_dead else self.suspend_s)
        self.engine.groups.progress(self.group, next_offsets, f"{query_name} batch {batch_id}", suspended_until)

    def _pass(self, frame: DataFrame, positions: Mapping[Queue, int]) -> dict[Queue, QueueResult]:
        results: dict[Queue, QueueResult] = {}
        for row in frame.mapInArrow(self._work(dict(positions)), "result binary").collect():
            for queue, result in pickle.loads(bytes(row["result"])).items():
                if queue in results:
                    raise ConsumeError(
                        f"queue {queue[1]} of topic {queue[0]!r} came in two partitions: read the stream with the "
                        "option ordered=true, and do not repartition it"
                    )
                results[queue] = result
        return results

    def _work(self, positions: Mapping[Queue, int]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        listener, tries = self.listener, dict(self.tries)

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            results: dict[Queue, QueueResult] = {}
            for batch in batches:
                for queue, messages in by_queue(pa.table(batch)):
                    consume_queue(listener, queue, messages, positions.get(queue, 0), results, tries.get(queue))
            yield pa.record_batch({"result": [pickle.dumps(results)]}, schema=RESULT)

        return work

    def _count_stop(self, query_name: str, queue: Queue, result: QueueResult, message: bytes) -> bool:
        """Count a stop of the queue. Send the message to the dead letters and return True after too many stops."""
        offset = result.next_offset
        last_stop, times = self.tries.get(queue, (offset, 0))
        times = times + 1 if last_stop == offset else 1
        self.tries[queue] = (offset, times)
        logger.warning(
            "queue %s stops at offset %d, time %d: %s", queue, offset, times, redacted(result.reason),
            extra={
                "consumer_group": self.group, "topic": queue[0], "queue_id": queue[1], "queue_offset": offset
            },
        )  # fmt: skip
        if self.reconsume_max is None or times <= self.reconsume_max:
            return False
        # The name contains the query and the message. So a pass that runs again does not send the letter twice, but a
        # query after a reset sends it again.
        letter = sent_back(pa.ipc.open_stream(message).read_all(), [result.reason], self.group, 0, None)
        send_each(self.engine, self.group, [dead_name(self.group, query_name, queue, offset)], letter)
        return True
