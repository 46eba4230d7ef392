"""Turns messages into the rows of half files, and enforces every rule about a message. It runs on executors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark._core.log.half import HALF_SCHEMA, HalfFile, HalfRows, Segment
from rmq_spark._core.log.half_header import HEADER_COLUMNS, HalfHeader
from rmq_spark._core.log.message_columns import (
    body_of,
    column_of,
    deliver_at_of,
    first_of,
    keys_of,
    properties_of,
    require_known_topic,
    require_message_columns,
    require_utf8,
    tags_of,
    times_of,
)
from rmq_spark._core.runtime.runtime import RUNTIME, Runtime
from rmq_spark._core.storage.data_file import DataFile, repeated
from rmq_spark._core.vocabulary.immutable import immutable
from rmq_spark._core.vocabulary.message import PROPERTIES, TIMESTAMP, require_topic_name
from rmq_spark._core.vocabulary.options import LABEL_BYTES_MAX, TRANSACTION_KEY_CHARS_MAX
from rmq_spark._core.vocabulary.rows import arange
from rmq_spark._core.vocabulary.text import message_count
from rmq_spark.errors import MessageError

HALF_FILE_BYTES_MAX = 256 * 1024 * 1024
"""An executor ends a half file when its messages reach this size, so a partition may have any size."""
BATCH_BYTES_MAX = 4 * HALF_FILE_BYTES_MAX
"""A larger Arrow batch is cut, since Arrow counts to 2 GB in a column of text or bytes. Spark makes larger batches with
``spark.sql.execution.arrow.useLargeVarTypes``."""
FILES_PER_PARTITION_MAX = 1000


@immutable
class HalfWriter:
    """Turns a partition's Arrow batches into staged half files; pickled to executors. ``topics`` has the number of
    queues of every topic of the log, and ``fifo`` the FIFO topics among them. Equal values of the column
    ``transaction_key`` form one transaction. ``own``: rmq_spark itself sends these messages again, so they may have
    RocketMQ's reserved properties. ``write_file`` replaces :func:`~rmq_spark._core.storage.data_file.write_table`."""

    header: HalfHeader
    topics: Mapping[str, int]
    default_topic: str | None
    transaction_key: str | None
    fifo: frozenset[str] = frozenset()
    own: bool = False
    runtime: Runtime = RUNTIME
    write_file: Callable[..., DataFile] | None = None

    def write(
        self, fs: pafs.FileSystem, folder: str, partition: int, batches: Iterable[pa.RecordBatch]
    ) -> list[HalfFile]:
        """Write a partition. Nothing is visible until a driver commits the files. The first message that breaks a rule
        raises MessageError or TopicNotFoundError. Files written so far are then orphans, which vacuum removes."""
        files: list[HalfFile] = []
        waiting: list[pa.RecordBatch] = []
        size = 0
        for batch in chain.from_iterable(map(_small, batches)):
            if batch.num_rows:
                waiting.append(batch)
                size += batch.nbytes
            if size >= HALF_FILE_BYTES_MAX:
                files.append(self._write_file(fs, folder, partition, len(files), waiting))
                waiting, size = [], 0
        if waiting:
            files.append(self._write_file(fs, folder, partition, len(files), waiting))
        return files

    # ------------------------------------------------------------------ input columns
    def normalize(self, table: pa.Table) -> pa.Table:
        """Convert input columns to the message columns of ``half``. It enforces every rule about a single message."""
        require_message_columns(table.column_names, self.default_topic, self.transaction_key)
        require_utf8(table)
        queue_id = column_of(table, "queue_id", pa.int32())
        sharding_key = self._label(column_of(table, "sharding_key", pa.string()), "sharding_key")
        topic = self._topic(table)
        deliver_at = deliver_at_of(table, self.now())
        self._require_keys_of_fifo(topic, sharding_key, deliver_at)
        return pa.table(
            {
                "transaction_key": self._transaction_key(table),
                "topic": topic,
                "queue_id": self._queue_id(topic, queue_id, sharding_key),
                "tags": self._label(column_of(table, "tags", pa.string()) if self.own else tags_of(table), "tags"),
                "keys": self._label(keys_of(table), "keys"),
                "sharding_key": sharding_key,
                "properties": column_of(table, "properties", PROPERTIES) if self.own else properties_of(table),
                "body": body_of(table),
                "born_timestamp": pc.fill_null(times_of(table, "born_timestamp"), self.now()),
                "deliver_at": deliver_at,
            }
        )

    def _topic(self, table: pa.Table) -> pa.ChunkedArray:
        topic = column_of(table, "topic", pa.string())
        if self.default_topic is not None:
            require_topic_name(self.default_topic, own=True)
            topic = pc.fill_null(topic, self.default_topic)
        for name in pc.unique(topic).to_pylist():
            if name is None:
                where = first_of(table, pc.is_null(topic))
                raise MessageError(
                    f"a message has no topic ({where}): set the option 'topic', or fill the column 'topic'"
                )
            if name not in self.topics:
                require_topic_name(name)
                require_known_topic(name, self.topics)
        return topic

    def _label(self, texts: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
        longest = pc.max(pc.binary_length(texts)).as_py() or 0
        if longest > LABEL_BYTES_MAX and not self.own:  # messages sent again were accepted once
            raise MessageError(f"{name} of a message has {longest} bytes: at most {LABEL_BYTES_MAX} are allowed")
        return texts

    def _require_keys_of_fifo(
        self, topic: pa.ChunkedArray, sharding_key: pa.ChunkedArray, deliver_at: pa.ChunkedArray
    ) -> None:
        if not self.fifo:
            return
        in_order = pc.is_in(topic, value_set=pa.array(sorted(self.fifo), pa.string()))
        for wrong, problem in (
            (pc.is_null(sharding_key), "has no sharding_key: messages of one keep their order, so each needs one"),
            (pc.is_valid(deliver_at), "has a deliver_at or a delay_level: it would leave the order; use another topic"),
        ):
            wrong = pc.and_(in_order, wrong)
            if pc.any(wrong).as_py():
                at = pc.index(wrong, True).as_py()
                raise MessageError(f"a message of the FIFO topic {topic[at].as_py()!r} {problem}")

    def _transaction_key(self, table: pa.Table) -> pa.ChunkedArray:
        if self.transaction_key is None:
            return column_of(table, "", pa.string())
        column = table[self.transaction_key]
        try:
            key = pc.cast(column, pa.string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
            raise MessageError(
                f"column {self.transaction_key!r} has type {column.type}, which has no text: it cannot be the "
                f"transactionKey ({problem})"
            ) from problem
        if key.null_count:
            raise MessageError(
                f"{self.transaction_key!r}, the transactionKey, is null in {message_count(key.null_count)} "
                f"({first_of(table, pc.is_null(key))}): fill it, or filter such rows out"
            )
        longest = pc.max(pc.utf8_length(key)).as_py() or 0
        if longest > TRANSACTION_KEY_CHARS_MAX:
            raise MessageError(
                f"a transactionKey ({self.transaction_key!r}) has {longest} characters: "
                f"at most {TRANSACTION_KEY_CHARS_MAX} are allowed"
            )
        if pc.any(pc.match_substring(key, "\x00")).as_py():
            raise MessageError(
                f"a transactionKey ({self.transaction_key!r}) has a NUL character in it, which most databases cannot "
                "keep in a fence row: remove it"
            )
        return key

    def _queue_id(self, topic: pa.ChunkedArray, queue_id: pa.ChunkedArray, sharding_key: pa.ChunkedArray) -> pa.Array:
        """The queue of each message that chooses one (by ``queue_id`` or ``sharding_key``); null for the others."""
        if queue_id.null_count == len(queue_id) and sharding_key.null_count == len(sharding_key):
            return queue_id
        names = pa.array(list(self.topics), pa.string())
        queues = pa.array(list(self.topics.values()), pa.int32()).take(pc.index_in(topic, value_set=names))
        wrong = pc.or_(pc.less(queue_id, 0), pc.greater_equal(queue_id, queues))
        if pc.any(wrong).as_py():
            at = pc.index(pc.fill_null(wrong, False), True).as_py()
            raise MessageError(
                f"queue_id {queue_id[at].as_py()} is not a queue of topic {topic[at].as_py()!r}, "
                f"which has the queues 0 to {queues[at].as_py() - 1}"
            )
        encoded = sharding_key.combine_chunks().dictionary_encode()
        hashes = pa.array([zlib.crc32(k.encode()) for k in encoded.dictionary.to_pylist()], pa.int64())
        shard = hashes.take(encoded.indices)
        queues64 = pc.cast(queues, pa.int64())
        shard_queue = pc.subtract(shard, pc.multiply(pc.divide(shard, queues64), queues64))
        return pc.coalesce(queue_id, pc.cast(shard_queue, pa.int32()))

    # ------------------------------------------------------------------ one file
    def _write_file(
        self, fs: pafs.FileSystem, folder: str, partition: int, number: int, batches: list[pa.RecordBatch]
    ) -> HalfFile:
        if number >= FILES_PER_PARTITION_MAX:
            raise MessageError(
                f"partition {partition} holds more than {FILES_PER_PARTITION_MAX} files of "
                f"{HALF_FILE_BYTES_MAX} bytes: repartition the batch"
            )
        return self.to_half_rows(pa.Table.from_batches(batches), partition * FILES_PER_PARTITION_MAX + number).write(
            fs, folder
        )

    def to_half_rows(self, table: pa.Table, file_no: int = 0) -> HalfRows:
        """Messages as the rows of a future half file. The first message that breaks a rule raises its error."""
        arranged, segments = self.in_order(self.normalize(table), file_no)
        staged_at = arranged["store_timestamp"][0].value / 1_000_000
        delayed = arranged["deliver_at"].null_count < arranged.num_rows
        return HalfRows(self, arranged, file_no, segments, staged_at, delayed)

    def in_order(self, messages: pa.Table, file_no: int) -> tuple[pa.Table, tuple[Segment, ...]]:
        """Rows of ``half`` in (topic, queue, arrival) order, and the segment of each queue."""
        by_topic = [(t, _rows_where(messages, "topic", t)) for t in sorted(pc.unique(messages["topic"]).to_pylist())]
        tables: list[pa.Table] = []
        segments: list[Segment] = []
        first = 0
        for topic, topic_rows in by_topic:
            for queue_id, rows in self._by_queue(topic, topic_rows, file_no):
                segments.append(Segment(topic, queue_id, first, first + rows.num_rows - 1))
                tables.append(rows)
                first += rows.num_rows
        rows_in_order = pa.concat_tables(tables)
        count = rows_in_order.num_rows
        types = {name: HALF_SCHEMA.field(name).type for name in HEADER_COLUMNS}
        constants = {name: repeated(getattr(self.header, name), type_, count) for name, type_ in types.items()}
        queue = pa.concat_arrays([pa.repeat(pa.scalar(s.queue_id, pa.int32()), s.last - s.first + 1) for s in segments])
        columns = {
            **constants,
            "file_no": pa.repeat(pa.scalar(file_no, pa.int64()), count),
            "row_no": arange(count),
            **{c: rows_in_order[c] for c in rows_in_order.column_names},
            "queue_id": queue,
            "store_timestamp": pa.repeat(self.now(), count),
        }
        fields = [f.with_type(constants[f.name].type) if f.name in constants else f for f in HALF_SCHEMA]
        return pa.table({f.name: columns[f.name] for f in fields}, schema=pa.schema(fields)), tuple(segments)

    def first_queue(self, topic: str, file_no: int) -> int:
        """The queue with which a topic's messages that choose no queue begin."""
        number = file_no % FILES_PER_PARTITION_MAX
        start = zlib.crc32(self.header.app_id.encode()) + self.header.batch_id + partition_of(file_no) + number
        return start % self.topics[topic]

    def now(self) -> pa.Scalar:
        """The current time, in the type of ``store_timestamp``."""
        return pa.scalar(int(self.runtime.time() * 1_000_000), TIMESTAMP)

    def _by_queue(self, topic: str, topic_rows: pa.Table, file_no: int) -> list[tuple[int, pa.Table]]:
        """The topic's rows, queue by queue. Rows that choose no queue are dealt out in even slices."""
        chosen = pc.is_valid(topic_rows["queue_id"])
        if pc.all(chosen).as_py():
            unassigned, assigned = topic_rows.slice(0, 0), topic_rows
        elif not pc.any(chosen).as_py():
            unassigned, assigned = topic_rows, topic_rows.slice(0, 0)
        else:
            topic_rows = topic_rows.append_column(_ARRIVAL, arange(topic_rows.num_rows))
            unassigned, assigned = topic_rows.filter(pc.invert(chosen)), topic_rows.filter(chosen)
        queues = self.topics[topic]
        slices = min(queues, unassigned.num_rows)
        # Each application, batch and file begins at another queue: else small batches, small partitions and single
        # sends would all go to the first one. A task that runs again begins at the same queue.
        start = self.first_queue(topic, file_no)
        pieces: dict[int, list[pa.Table]] = {}
        for i in range(slices):
            first, end = unassigned.num_rows * i // slices, unassigned.num_rows * (i + 1) // slices
            pieces.setdefault((start + i) % queues, []).append(unassigned.slice(first, end - first))
        if assigned.num_rows:
            for queue_id in pc.unique(assigned["queue_id"]).to_pylist():
                pieces.setdefault(queue_id, []).append(_rows_where(assigned, "queue_id", queue_id))
        queues_in_order = [(q, pa.concat_tables(pieces[q])) for q in sorted(pieces)]
        if _ARRIVAL in topic_rows.column_names:
            queues_in_order = [(q, rows.sort_by(_ARRIVAL).drop_columns([_ARRIVAL])) for q, rows in queues_in_order]
        return queues_in_order


def _small(batch: pa.RecordBatch, bytes_max: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield a batch, or its pieces if the batch is too large. A piece is a copy, because a slice keeps the batch's
    offsets."""
    if batch.num_rows < 2 or batch.nbytes <= (bytes_max or BATCH_BYTES_MAX):
        yield batch if bytes_max is None else batch.take(arange(batch.num_rows))
        return
    half = batch.num_rows // 2
    for piece in batch.slice(0, half), batch.slice(half):
        yield from _small(piece, HALF_FILE_BYTES_MAX)


def partition_of(file_no: int) -> int:
    """The partition that wrote a half file."""
    return file_no // FILES_PER_PARTITION_MAX


_ARRIVAL = "arrival"  # a temporary column; no column of messages has this name


def _rows_where(table: pa.Table, column: str, value: object) -> pa.Table:
    mask = pc.equal(table[column], value)
    return table if pc.all(mask).as_py() else table.filter(mask)
