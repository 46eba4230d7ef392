"""The schema of half messages, and the half files that executors write."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark._core.log.input import (
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
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import RUNTIME, Runtime
from rmq_spark._core.storage.data_file import DataFile, repeated, write_table
from rmq_spark._core.storage.seal import rows_of_half_file
from rmq_spark._core.vocabulary.message import PROPERTIES, TIMESTAMP, require_topic_name
from rmq_spark._core.vocabulary.options import LABEL_BYTES_MAX, TRANSACTION_KEY_CHARS_MAX
from rmq_spark._core.vocabulary.rows import arange
from rmq_spark._core.vocabulary.text import message_count
from rmq_spark._core.vocabulary.value import value
from rmq_spark.errors import MessageError

HEADER_COLUMNS = [
    "half_id",
    "app_id",
    "batch_id",
    "query_id",
    "input_hash",
    "fence_id",
    "transaction_per",
    "producer_group",
]
HALF_SCHEMA = pa.schema(
    [
        ("half_id", pa.string()),
        ("app_id", pa.string()),
        ("batch_id", pa.int64()),
        ("query_id", pa.string()),
        ("input_hash", pa.string()),
        ("fence_id", pa.string()),
        ("transaction_per", pa.string()),
        ("producer_group", pa.string()),
        ("file_no", pa.int64()),
        ("row_no", pa.int64()),
        ("transaction_key", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("sharding_key", pa.string()),
        ("properties", PROPERTIES),
        ("body", pa.binary()),
        ("born_timestamp", TIMESTAMP),
        ("store_timestamp", TIMESTAMP),
        ("deliver_at", TIMESTAMP),
    ]
)
STATS_COLUMNS = ("half_id",)
"""Statistics of files in the Delta log. delta-rs goes through those of all live files at every commit, so each further
column slows down a long log."""
FOOTER_COLUMNS = ("app_id", "batch_id", "file_no", "row_no", "topic", "queue_id")
PLAIN_COLUMNS = ("row_no", "keys", "transaction_key", "sharding_key", "body", "born_timestamp")
CLOSE_COLUMNS = ("row_no", "born_timestamp")

COMPRESSION = "lz4"
"""Of half files, which stay for minutes and which only rmq_spark and Spark read: it costs less processor time than
zstd. (Trino cannot read it; the table ``messages`` is for every engine.)"""
PAGE_BYTES = 131_072
"""Small pages stay in the processor's cache while they are written."""
SAVED_MIN = 0.2
"""Bodies are compressed when a sample shrinks by at least this share. Bodies that are compressed or random already
would cost processor time for nothing."""
SAMPLES = 3
SAMPLE_ROWS = 64
SAMPLE_BYTES = 1024
"""A sample is the beginnings of the bodies of some rows."""
FILE_BYTES_MAX = 256 * 1024 * 1024
"""An executor ends a half file when its messages reach this size, so a partition may have any size."""
FILES_PER_PARTITION_MAX = 1000
OWN_CHARS = 12
"""Hexadecimal digits at the end of a half id that distinguish half batches of one name."""


FIRST = -1
"""The value of ``follows`` for an application's first half batch."""


class Naming(Enum):
    """How a half batch got its name (``app_id`` and ``batch_id``), and so how a retry is recognised."""

    COUNTED = "counted"
    """The application numbers its batches: a stream. Each checkpoint counts from 0, so ``query_id`` must match, too.
    The newest number is kept as a Delta transaction."""
    GIVEN = "given"
    """As COUNTED, but a user gave both (a batch write): the name alone identifies a retry."""
    KEY = "key"
    """``app_id`` is an idempotency key and names this half batch only. It is no Delta transaction, because the table
    would keep each one for ever."""
    MADE_UP = "made up"
    """``app_id`` was generated for this half batch, so it cannot have been prepared before."""


@value
class HalfHeader:
    """What all rows of a half batch have in common (the first columns of ``half``)."""

    half_id: str
    """The identity, which no other half batch ever has: see :func:`half_id_of` and :func:`new_half_id`. Op markers,
    fences and message ids carry it."""
    app_id: str
    batch_id: int
    query_id: str | None
    input_hash: str | None
    fence_id: str | None
    transaction_per: str
    producer_group: str
    naming: Naming = field(default=Naming.COUNTED, compare=False)
    follows: int | None = field(default=None, compare=False)
    """The batch that must be the application's last one before, or :data:`FIRST`; None: any."""

    @classmethod
    def of(
        cls,
        naming: Naming,
        app_id: str,
        batch_id: int,
        *,
        query_id: str | None = None,
        input_hash: str | None = None,
        fence_id: str | None,
        transaction_per: str,
        producer_group: str,
        runtime: Runtime = RUNTIME,
    ) -> HalfHeader:
        """The header of a half batch, with its identity."""
        if naming is Naming.KEY:
            half_id = new_half_id(app_id, batch_id, runtime)
        else:
            half_id = half_id_of(app_id, batch_id, query_id, input_hash)
        return cls(
            half_id, app_id, batch_id, query_id, input_hash, fence_id, transaction_per, producer_group, naming=naming
        )

    @property
    def name(self) -> str:
        """The name by which a replay finds it."""
        return batch_name(self.app_id, self.batch_id)

    @property
    def numbered(self) -> bool:
        """Whether ``batch_id`` is one of the numbers that the application gives its batches."""
        return self.naming is Naming.COUNTED or self.naming is Naming.GIVEN


@value
class Segment:
    """A run of rows of one queue within a half file (``first`` and ``last`` row_no, both included)."""

    topic: str
    queue_id: int
    first: int
    last: int


@value
class HalfFile:
    """A staged file: written by an executor, not yet in the log."""

    data: DataFile
    file_no: int
    segments: tuple[Segment, ...]
    staged_at: float
    half_id: str
    delayed: bool = False
    """True when some messages are due later."""

    @property
    def rows(self) -> int:
        """Its rows of this half batch. A shared file has rows of others, too."""
        return sum(segment.last - segment.first + 1 for segment in self.segments)


@value
class HalfRows:
    """The checked and ordered messages of a future half file. Several small ones may share a file.

    Attributes
    ----------
    writer : HalfWriter
    source : pyarrow.Table
        These rows, from row ``at`` on, and maybe those of other half batches.
    """

    writer: HalfWriter
    source: pa.Table
    file_no: int
    segments: tuple[Segment, ...]
    staged_at: float
    delayed: bool
    at: int = 0

    @property
    def half_id(self) -> str:
        return self.writer.header.half_id

    @property
    def count(self) -> int:
        return self.segments[-1].last + 1

    @property
    def table(self) -> pa.Table:
        """These rows alone."""
        return self.source.slice(self.at, self.count)

    def in_file(self, data: DataFile) -> HalfFile:
        """The half file, once the rows are written to ``data``."""
        return HalfFile(data, self.file_no, self.segments, self.staged_at, self.half_id, self.delayed)

    def write(self, fs: pafs.FileSystem, folder: str) -> HalfFile:
        """Write the rows to a file of their own."""
        table = self.table
        one_topic = len({segment.topic for segment in self.segments}) == 1
        data = (self.writer.write_file or write_table)(
            fs,
            folder,
            table,
            prefix="half",
            stats_columns=STATS_COLUMNS,
            footer_columns=FOOTER_COLUMNS,
            plain_columns=PLAIN_COLUMNS,
            constant_columns=[*HEADER_COLUMNS, "topic"] if one_topic else HEADER_COLUMNS,
            holds=rows_of_half_file(self.half_id, self.file_no),
            compression=COMPRESSION,
            raw_columns=() if _is_worth_compressing(table["body"]) else ("body",),
            close_columns=CLOSE_COLUMNS,
            page_bytes=PAGE_BYTES,
        )
        reach("half file written", path=f"{folder}/{data.path}", size_bytes=data.size_bytes)
        return self.in_file(data)


def together(several: Sequence[HalfRows]) -> pa.Table:
    """The rows of several half files, one after the other, without a copy when they lie so in one table already."""
    source, first = several[0].source, several[0].at
    end = first
    for rows in several:
        if rows.source is not source or rows.at != end:
            return pa.concat_tables([part.table for part in several]).combine_chunks()
        end += rows.count
    return source.slice(first, end - first)


def batch_name(app_id: str, batch_id: int) -> str:
    """The name by which a replay finds a half batch. ``app_id`` has no colon, so two batches never share a name. A name
    can come back: an idempotency key after it expired, or a batch in a restored log."""
    return f"{app_id}:{batch_id}"


def half_id_of(app_id: str, batch_id: int, query_id: str | None = None, input_hash: str | None = None) -> str:
    """The identity of a half batch without an idempotency key: its name, and a digest of its query and its input as far
    as they are known.

    The same batch has the same identity in each run, also in a restored log: its fence still answers for it. A batch of
    the same number with other input has another identity.
    """
    name = batch_name(app_id, batch_id)
    if query_id is None and input_hash is None:  # the user wants a retry to be known by its name alone
        return name
    return f"{name}-{hashlib.sha256(f'{query_id} {input_hash}'.encode()).hexdigest()[:OWN_CHARS]}"


def new_half_id(app_id: str, batch_id: int, runtime: Runtime = RUNTIME) -> str:
    """An identity for a half batch whose name may come back (an idempotency key): its name, and digits that no other
    half batch of this name has."""
    return f"{batch_name(app_id, batch_id)}-{runtime.unique_id()[:OWN_CHARS]}"


def names_of(half_ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """The names of half batches. A half id without digits of its own is the name."""
    return pc.replace_substring_regex(half_ids, "-[^:]*$", "")


def after_name(name: str) -> str:
    """A text that sorts after all half ids of a name and before those of greater names."""
    return f"{name}."


def name_of(half_id: str) -> str:
    """The name of one half batch; see :func:`names_of`."""
    head, _, number = half_id.rpartition(":")
    return f"{head}:{number.partition('-')[0]}"


@value
class HalfWriter:
    """Turns a partition's Arrow batches into staged half files; pickled to executors.

    Parameters
    ----------
    header : HalfHeader
    topics : mapping of str to int
        Number of queues of every topic of the commit log.
    default_topic : str or None
        For messages without a topic.
    transaction_key : str or None
        The column whose equal values form one transaction.
    fifo : frozenset of str
        The FIFO topics among ``topics``.
    own : bool
        True for messages that rmq_spark itself sends again: they may have RocketMQ's reserved properties.
    runtime : Runtime
        Its clock gives ``store_timestamp``.
    write_file : callable, optional
        Replaces :func:`~rmq_spark._core.storage.data_file.write_table`.
    """

    header: HalfHeader
    topics: Mapping[str, int]
    default_topic: str | None
    transaction_key: str | None
    fifo: frozenset[str] = frozenset()
    own: bool = False
    file_bytes_max: int = field(default=FILE_BYTES_MAX)
    runtime: Runtime = RUNTIME
    write_file: Callable[..., DataFile] | None = None

    def write(
        self, fs: pafs.FileSystem, folder: str, partition: int, batches: Iterable[pa.RecordBatch]
    ) -> list[HalfFile]:
        """Write a partition. Nothing is visible until a driver commits the files.

        Raises
        ------
        MessageError, TopicNotFoundError
            For the first message that breaks a rule. Files written so far are orphans, which vacuum removes.
        """
        files: list[HalfFile] = []
        waiting: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            if batch.num_rows:
                waiting.append(batch)
                size += batch.nbytes
            if size >= self.file_bytes_max:
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
        self, fs: pafs.FileSystem, folder: str, partition: int, part: int, batches: list[pa.RecordBatch]
    ) -> HalfFile:
        if part >= FILES_PER_PARTITION_MAX:
            raise MessageError(
                f"partition {partition} holds more than {FILES_PER_PARTITION_MAX} files of "
                f"{self.file_bytes_max} bytes: repartition the batch"
            )
        return self.rows_of(pa.Table.from_batches(batches), partition * FILES_PER_PARTITION_MAX + part).write(
            fs, folder
        )

    def rows_of(self, table: pa.Table, file_no: int = 0) -> HalfRows:
        """Messages as the rows of a half file that is not written yet.

        Raises
        ------
        MessageError, TopicNotFoundError
            For the first message that breaks a rule.
        """
        arranged, segments = self.arrange(self.normalize(table), file_no)
        staged_at = arranged["store_timestamp"][0].value / 1_000_000
        delayed = arranged["deliver_at"].null_count < arranged.num_rows
        return HalfRows(self, arranged, file_no, segments, staged_at, delayed)

    def arrange(self, messages: pa.Table, file_no: int) -> tuple[pa.Table, tuple[Segment, ...]]:
        """Rows of ``half`` in (topic, queue, arrival) order, and the segment of each queue."""
        by_topic = [(t, _rows_where(messages, "topic", t)) for t in sorted(pc.unique(messages["topic"]).to_pylist())]
        parts: list[pa.Table] = []
        segments: list[Segment] = []
        first = 0
        for topic, part in by_topic:
            for queue_id, rows in self._by_queue(topic, part, file_no):
                segments.append(Segment(topic, queue_id, first, first + rows.num_rows - 1))
                parts.append(rows)
                first += rows.num_rows
        rows_in_order = pa.concat_tables(parts)
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
        """The first queue for messages of a topic that choose none."""
        partition, number = divmod(file_no, FILES_PER_PARTITION_MAX)
        start = zlib.crc32(self.header.app_id.encode()) + self.header.batch_id + partition + number
        return start % self.topics[topic]

    def now(self) -> pa.Scalar:
        """The current time, in the type of ``store_timestamp``."""
        return pa.scalar(int(self.runtime.time() * 1_000_000), TIMESTAMP)

    def _by_queue(self, topic: str, part: pa.Table, file_no: int) -> list[tuple[int, pa.Table]]:
        """The topic's rows, queue by queue. Rows that choose no queue are dealt out in even slices."""
        chosen = pc.is_valid(part["queue_id"])
        if pc.all(chosen).as_py():
            unassigned, assigned = part.slice(0, 0), part
        elif not pc.any(chosen).as_py():
            unassigned, assigned = part, part.slice(0, 0)
        else:
            part = part.append_column(_ARRIVAL, arange(part.num_rows))
            unassigned, assigned = part.filter(pc.invert(chosen)), part.filter(chosen)
        queues = self.topics[topic]
        slices = min(queues, unassigned.num_rows)
        # Each application, batch and file begins at another queue, so that small batches, small partitions and single
        # sends spread, too. A task that runs again begins at the same queue.
        start = self.first_queue(topic, file_no)
        pieces: dict[int, list[pa.Table]] = {}
        for i in range(slices):
            first, end = unassigned.num_rows * i // slices, unassigned.num_rows * (i + 1) // slices
            pieces.setdefault((start + i) % queues, []).append(unassigned.slice(first, end - first))
        if assigned.num_rows:
            for queue_id in pc.unique(assigned["queue_id"]).to_pylist():
                pieces.setdefault(queue_id, []).append(_rows_where(assigned, "queue_id", queue_id))
        queues_in_order = [(q, pa.concat_tables(pieces[q])) for q in sorted(pieces)]
        if _ARRIVAL in part.column_names:
            queues_in_order = [(q, rows.sort_by(_ARRIVAL).drop_columns([_ARRIVAL])) for q, rows in queues_in_order]
        return queues_in_order


_ARRIVAL = "arrival"  # a temporary column; no column of messages has this name


def _rows_where(table: pa.Table, column: str, value: object) -> pa.Table:
    mask = pc.equal(table[column], value)
    return table if pc.all(mask).as_py() else table.filter(mask)


def _is_worth_compressing(body: pa.ChunkedArray) -> bool:
    rows = len(body)
    if rows <= SAMPLES * SAMPLE_ROWS:
        return True  # too few to cost time
    parts = [body.slice(rows * i // SAMPLES, SAMPLE_ROWS) for i in range(SAMPLES)]
    sample = b"".join(text for part in parts for text in pc.binary_slice(part, 0, SAMPLE_BYTES).to_pylist())
    return len(pa.compress(sample, COMPRESSION, asbytes=True)) <= (1 - SAVED_MIN) * len(sample)
