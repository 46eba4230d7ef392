"""Half messages: their table, the rules that every row keeps, and the files that executors write."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark.commitlog.files import DataFile, arange, rows_of_half_file, write_table
from rmq_spark.config import (
    BODY_BYTES_MAX,
    DELAY_LEVELS_S,
    DELIVER_DELAY_S_MAX,
    LABEL_BYTES_MAX,
    OUT_OF_TIME,
    PROPERTIES_BYTES_MAX,
    TIME_MAX,
    TIME_MIN,
    TRANSACTION_KEY_CHARS_MAX,
    nearest,
)
from rmq_spark.errors import MessageError, TopicNotFoundError
from rmq_spark.machine import MACHINE, Machine
from rmq_spark.message import (
    CHECK_IMMUNITY_PROPERTY,
    DLQ_PREFIX,
    INPUT_COLUMNS,
    KEY_SEPARATOR,
    PROPERTIES,
    RESERVED_PROPERTIES,
    RESERVED_PROPERTY_PREFIX,
    RETRY_PREFIX,
    TIMESTAMP,
    check_topic,
)

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
column slows down a long log: with 5,000 files a commit took 26 ms with seven columns, 15 ms with one."""
FOOTER_COLUMNS = ("app_id", "batch_id", "file_no", "row_no", "topic", "queue_id")
PLAIN_COLUMNS = ("row_no", "keys", "transaction_key", "sharding_key", "body", "born_timestamp")

FILE_BYTES_MAX = 256 * 1024 * 1024
"""An executor ends a half file when the messages in it reach this, so that a partition of any size fits."""
FILES_PER_PARTITION_MAX = 1000


@dataclass(frozen=True)
class HalfHeader:
    """What all rows of a half batch have in common (the first columns of ``half``)."""

    half_id: str
    app_id: str
    batch_id: int
    query_id: str | None
    input_hash: str | None
    fence_id: str | None
    transaction_per: str
    producer_group: str
    numbered: bool = field(default=True, compare=False)
    """True when the application counts its batches (a stream). False when ``app_id`` names one half batch only (a
    producer's send): it is not remembered as a Delta transaction, of which the table would keep every one for ever."""
    made_up: bool = field(default=False, compare=False)
    """True when ``app_id`` was made up for this half batch: it cannot have been prepared before."""
    named: bool = field(default=False, compare=False)
    """True when ``app_id`` and ``batch_id`` alone tell a retry: they are the user's own (a batch write), or hold the
    query's id (what a consumer sends again). Else the batches are counted anew from every checkpoint, and need it."""


@dataclass(frozen=True)
class Segment:
    """A run of rows of one queue within a half file (``first`` and ``last`` row_no, both included)."""

    topic: str
    queue_id: int
    first: int
    last: int


@dataclass(frozen=True)
class HalfFile:
    """A staged file: written by an executor, not yet in the log."""

    data: DataFile
    file_no: int
    segments: tuple[Segment, ...]
    staged_at: float
    half_id: str
    delayed: bool = False
    """True when some messages have a time before which they must not appear."""


def half_id_of(app_id: str, batch_id: int) -> str:
    """The name of a half batch. ``app_id`` has no colon (its rules say so), so two batches never share one."""
    return f"{app_id}:{batch_id}"


@dataclass(frozen=True)
class HalfWriter:
    """Turns a partition's Arrow batches into staged half files; pickled to executors.

    Parameters
    ----------
    header : HalfHeader
    topics : mapping of str to int
        Queues of every topic of the commit log.
    default_topic : str or None
        For messages without a ``topic`` column.
    transaction_key : str or None
        The column whose equal values make one transaction.
    fifo : frozenset of str
        Those of the topics that are FIFO topics.
    own : bool
        True for messages that rmq_spark itself sends again: they may have RocketMQ's reserved properties.
    machine : Machine
        Whose clock says when messages are stored.
    write_file : callable, optional
        In the place of :func:`~rmq_spark.commitlog.files.write_table`.
    """

    header: HalfHeader
    topics: Mapping[str, int]
    default_topic: str | None
    transaction_key: str | None
    fifo: frozenset[str] = frozenset()
    own: bool = False
    file_bytes_max: int = field(default=FILE_BYTES_MAX)
    machine: Machine = MACHINE
    write_file: Callable[..., DataFile] | None = None

    def write(
        self, fs: pafs.FileSystem, folder: str, partition: int, batches: Iterable[pa.RecordBatch]
    ) -> list[HalfFile]:
        """Write a partition; nothing is visible until a driver commits the files.

        Raises
        ------
        MessageError, TopicNotFoundError
            For the first message that breaks a rule; the files written so far stay orphans for vacuum.
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
        """Input columns as the message columns of ``half``; every rule about a single message is checked here."""
        check_columns(table.column_names, self.default_topic, self.transaction_key)
        _check_utf8(table)
        queue_id = _column(table, "queue_id", pa.int32())
        sharding_key = self._label(_column(table, "sharding_key", pa.string()), "sharding_key")
        topic = self._topic(table)
        deliver_at = _deliver_at(table, self._now())
        self._check_fifo(topic, sharding_key, deliver_at)
        return pa.table(
            {
                "transaction_key": self._transaction_key(table),
                "topic": topic,
                "queue_id": self._queue_id(topic, queue_id, sharding_key),
                "tags": self._label(_column(table, "tags", pa.string()), "tags"),
                "keys": self._label(_keys(table), "keys"),
                "sharding_key": sharding_key,
                "properties": _column(table, "properties", PROPERTIES) if self.own else _properties(table),
                "body": _body(table),
                "born_timestamp": pc.fill_null(_times(table, "born_timestamp"), self._now()),
                "deliver_at": deliver_at,
            }
        )

    def _topic(self, table: pa.Table) -> pa.ChunkedArray:
        topic = _column(table, "topic", pa.string())
        if self.default_topic is not None:
            check_topic(self.default_topic, own=True)
            topic = pc.fill_null(topic, self.default_topic)
        for name in pc.unique(topic).to_pylist():
            if name is None:
                raise MessageError("a message has no topic: set the option 'topic', or fill the column 'topic'")
            if name not in self.topics:
                check_topic(name)
                check_known(name, self.topics)
        return topic

    def _label(self, texts: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
        longest = pc.max(pc.binary_length(texts)).as_py() or 0
        if longest > LABEL_BYTES_MAX and not self.own:  # what is sent again was accepted once
            raise MessageError(f"{name} of a message has {longest} bytes: at most {LABEL_BYTES_MAX} are allowed")
        return texts

    def _check_fifo(self, topic: pa.ChunkedArray, sharding_key: pa.ChunkedArray, deliver_at: pa.ChunkedArray) -> None:
        if not self.fifo:
            return
        in_order = pc.is_in(topic, value_set=pa.array(sorted(self.fifo), pa.string()))
        for wrong, what in (
            (pc.is_null(sharding_key), "has no sharding_key: messages of one keep their order, so each needs one"),
            (pc.is_valid(deliver_at), "has a deliver_at or a delay_level: it would leave the order; use another topic"),
        ):
            wrong = pc.and_(in_order, wrong)
            if pc.any(wrong).as_py():
                at = pc.index(wrong, True).as_py()
                raise MessageError(f"a message of the FIFO topic {topic[at].as_py()!r} {what}")

    def _transaction_key(self, table: pa.Table) -> pa.ChunkedArray:
        if self.transaction_key is None:
            return _column(table, "", pa.string())
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
                f"{key.null_count} messages have a null {self.transaction_key!r}, which is the transactionKey: fill it"
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
        """The queue of messages that choose one (queue_id, sharding_key); null for the others."""
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
        file_no = partition * FILES_PER_PARTITION_MAX + part
        table, segments = self.arrange(self.normalize(pa.Table.from_batches(batches)), file_no)
        staged_at = self.machine.time()
        data = (self.write_file or write_table)(
            fs,
            folder,
            table,
            prefix="half",
            stats_columns=STATS_COLUMNS,
            footer_columns=FOOTER_COLUMNS,
            plain_columns=PLAIN_COLUMNS,
            constant_columns=HEADER_COLUMNS if len({s.topic for s in segments}) > 1 else [*HEADER_COLUMNS, "topic"],
            holds=rows_of_half_file(self.header.half_id, file_no),
        )
        delayed = table["deliver_at"].null_count < table.num_rows
        return HalfFile(data, file_no, segments, staged_at, self.header.half_id, delayed)

    def arrange(self, messages: pa.Table, file_no: int) -> tuple[pa.Table, tuple[Segment, ...]]:
        """Rows of ``half`` in (topic, queue, arrival) order, and where each queue's rows stand."""
        by_topic = [(t, _of(messages, "topic", t)) for t in sorted(pc.unique(messages["topic"]).to_pylist())]
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
        constants = {name: _constant(getattr(self.header, name), name, count) for name in HEADER_COLUMNS}
        queue = pa.concat_arrays([pa.repeat(pa.scalar(s.queue_id, pa.int32()), s.last - s.first + 1) for s in segments])
        columns = {
            **constants,
            "file_no": pa.repeat(pa.scalar(file_no, pa.int64()), count),
            "row_no": arange(count),
            **{c: rows_in_order[c] for c in rows_in_order.column_names},
            "queue_id": queue,
            "store_timestamp": pa.repeat(self._now(), count),
        }
        return pa.table({f.name: columns[f.name] for f in HALF_SCHEMA}, schema=HALF_SCHEMA), tuple(segments)

    def _now(self) -> pa.Scalar:
        return pa.scalar(int(self.machine.time() * 1_000_000), TIMESTAMP)

    def _by_queue(self, topic: str, part: pa.Table, file_no: int) -> list[tuple[int, pa.Table]]:
        """The topic's rows a queue at a time. Rows that choose no queue are dealt out in even slices."""
        chosen = pc.is_valid(part["queue_id"])
        if pc.all(chosen).as_py():
            free, bound = part.slice(0, 0), part
        elif not pc.any(chosen).as_py():
            free, bound = part, part.slice(0, 0)
        else:
            part = part.append_column(_ARRIVAL, arange(part.num_rows))
            free, bound = part.filter(pc.invert(chosen)), part.filter(chosen)
        queues = self.topics[topic]
        slices = min(queues, free.num_rows)
        # Each application, batch and file begins at another queue, so that small batches, small partitions and single
        # sends spread as well. A task that runs again begins at the same one.
        partition, number = divmod(file_no, FILES_PER_PARTITION_MAX)
        start = (zlib.crc32(self.header.app_id.encode()) + self.header.batch_id + partition + number) % queues
        pieces: dict[int, list[pa.Table]] = {}
        for i in range(slices):
            a, b = free.num_rows * i // slices, free.num_rows * (i + 1) // slices
            pieces.setdefault((start + i) % queues, []).append(free.slice(a, b - a))
        if bound.num_rows:
            for queue_id in pc.unique(bound["queue_id"]).to_pylist():
                pieces.setdefault(queue_id, []).append(_of(bound, "queue_id", queue_id))
        queues_in_order = [(q, pa.concat_tables(pieces[q])) for q in sorted(pieces)]
        if _ARRIVAL in part.column_names:
            queues_in_order = [(q, rows.sort_by(_ARRIVAL).drop_columns([_ARRIVAL])) for q, rows in queues_in_order]
        return queues_in_order


_ARRIVAL = "arrival"  # a column of the moment: no column of a message has this name


def _of(table: pa.Table, column: str, value: object) -> pa.Table:
    mask = pc.equal(table[column], value)
    return table if pc.all(mask).as_py() else table.filter(mask)


def _constant(value: object, name: str, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, HALF_SCHEMA.field(name).type), rows)


def check_known(name: str, topics: Mapping[str, int]) -> None:
    """Raise TopicNotFoundError, which names the nearest topic, unless the commit log has this one."""
    if not isinstance(name, str) or name not in topics:
        known = nearest(name, topics) if topics else "the commit log has none yet"
        if isinstance(name, str) and name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            remedy = "txmq.consume makes it when it first runs for a consumer group of this name"
        else:
            remedy = f"make it with log.create_topic({name!r})"
        raise TopicNotFoundError(f"topic {name!r} is not in the commit log ({known}); {remedy}")


def check_columns(names: Sequence[str], default_topic: str | None, transaction_key: str | None) -> None:
    """Raise MessageError unless the columns are those of messages (and the transaction key).

    Called with a DataFrame's columns before anything is written, and with every Arrow batch.
    """
    for name in names:
        if names.count(name) > 1:
            raise MessageError(f"column {name!r} is there twice: drop or rename one of them")
    if "body" not in names:
        raise MessageError(
            f"column 'body' (binary or string) is missing: found {', '.join(names) or 'no columns'}; "
            "make it with, for instance, to_json(struct('*')).alias('body')"
        )
    for name in names:
        if name not in INPUT_COLUMNS and name != transaction_key:
            known = [*INPUT_COLUMNS, *([transaction_key] if transaction_key else [])]
            raise MessageError(
                f"column {name!r} is not a column of messages ({nearest(name, known)}); drop or rename it"
            )
    if transaction_key is not None and transaction_key not in names:
        raise MessageError(f"transactionKey={transaction_key!r} is not a column: found {', '.join(names)}")
    if default_topic is None and "topic" not in names:
        raise MessageError("there is neither an option 'topic' nor a column 'topic': set one of them")


def _column(table: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, kind)])
    column = table[name]
    if column.type == kind:
        return column
    expected = f"column {name!r} has type {column.type}: {INPUT_COLUMNS.get(name, kind)} is expected"
    if not _is_like(column.type, kind):
        raise MessageError(expected)
    try:
        return pc.cast(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
        raise MessageError(f"{expected} ({problem})") from problem


def _times(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of times that every consumer can hold; their own unit is looked at, before a cast could overflow."""
    column = table[name] if name in table.column_names else None
    if column is not None and pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    if column is None or not pa.types.is_timestamp(column.type):
        return _column(table, name, TIMESTAMP)
    unit = column.type.unit
    least, most = (_as_unit(time, unit) for time in (TIME_MIN, TIME_MAX))
    numbers = pc.cast(column, pa.int64())
    wrong = pc.or_(pc.less(numbers, least), pc.greater(numbers, most))
    if pc.any(wrong).as_py():
        at = pc.index(pc.fill_null(wrong, False), True).as_py()
        raise MessageError(f"{name} of row {at} ({numbers[at].as_py()} {unit} since 1970) is {OUT_OF_TIME}")
    return _column(table, name, TIMESTAMP)


def _as_unit(time: datetime, unit: str) -> int:
    nanoseconds = (time - TIME_MIN) // timedelta(microseconds=1) * 1000
    return nanoseconds // {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]


def _check_utf8(table: pa.Table) -> None:
    """Raise MessageError for text that is no UTF-8 (Spark makes such from bytes): no consumer could decode it."""
    for name in table.column_names:
        if name != "body":  # which is bytes
            try:
                table[name].validate(full=True)
            except pa.ArrowInvalid as problem:
                raise MessageError(f"column {name!r} holds what Arrow cannot read: {problem}") from problem


def _is_like(found: pa.DataType, kind: pa.DataType) -> bool:
    """True when values of one type mean the same as the other. A cast alone would also turn 1.0 or "1" into a queue."""
    if pa.types.is_dictionary(found):
        return _is_like(found.value_type, kind)
    if pa.types.is_null(found):
        return True
    if pa.types.is_string(kind):
        return _is_text(found)
    if pa.types.is_binary(kind):
        return _is_text(found) or "binary" in str(found)
    if pa.types.is_integer(kind):
        return bool(pa.types.is_integer(found))
    if pa.types.is_map(kind):
        return bool(pa.types.is_map(found)) and _is_text(found.key_type) and _is_text(found.item_type)
    return bool(found.id == kind.id)


def _is_text(found: pa.DataType) -> bool:
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found) or str(found) == "string_view")


def _body(table: pa.Table) -> pa.ChunkedArray:
    body = _column(table, "body", pa.binary())
    if body.null_count:
        raise MessageError(f"{body.null_count} messages have a null body: filter them out, or send an empty string")
    longest = pc.max(pc.binary_length(body)).as_py() or 0
    if longest > BODY_BYTES_MAX:
        raise MessageError(f"a body has {longest} bytes: at most {BODY_BYTES_MAX} (4 MiB) are allowed")
    return body


def _deliver_at(table: pa.Table, now: pa.Scalar) -> pa.ChunkedArray:
    """When each message is to appear; null for at once. A delay level counts from ``now``."""
    deliver_at = _times(table, "deliver_at")
    level = _column(table, "delay_level", pa.int32())
    if deliver_at.null_count == level.null_count == table.num_rows:
        return deliver_at
    wrong = pc.or_(pc.less(level, 1), pc.greater(level, len(DELAY_LEVELS_S)))
    if pc.any(wrong).as_py():
        at = pc.index(pc.fill_null(wrong, False), True).as_py()
        raise MessageError(
            f"delay_level {level[at].as_py()} is not a delay level: 1 to {len(DELAY_LEVELS_S)} are there"
        )
    if pc.any(pc.and_(pc.is_valid(deliver_at), pc.is_valid(level))).as_py():
        raise MessageError("a message has a deliver_at and a delay_level: set one of them")
    delays = pa.array([s * 1_000_000 for s in DELAY_LEVELS_S], pa.duration("us")).take(pc.subtract(level, 1))
    times = pc.coalesce(deliver_at, pc.add(now, delays))
    latest, hours = pc.max(times).as_py(), DELIVER_DELAY_S_MAX / 3600
    if latest - now.as_py() > timedelta(hours=hours):
        raise MessageError(f"a message has the deliver_at {latest}: at most {hours:.0f} h ahead are allowed")
    return times


def _keys(table: pa.Table) -> pa.ChunkedArray:
    kind = table["keys"].type if "keys" in table.column_names else None
    if kind is not None and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        if not _is_like(kind.value_type, pa.string()):
            raise MessageError(f"column 'keys' has type {kind}: {INPUT_COLUMNS['keys']} is expected")
        if pc.list_flatten(table["keys"]).null_count:
            raise MessageError("an array of keys has a null in it: leave it out, with array_compact(keys) for instance")
        return pc.binary_join(pc.cast(table["keys"], pa.list_(pa.string())), KEY_SEPARATOR)
    return _column(table, "keys", pa.string())


def _properties(table: pa.Table) -> pa.ChunkedArray:
    column = _column(table, "properties", PROPERTIES)
    if column.null_count == len(column):
        return column
    # Flattening the list view keeps offsets and slices right, which the raw keys of a sliced map do not.
    maps = column.combine_chunks()
    entries = maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    flat = entries.flatten()
    keys, values = pc.struct_field(flat, "key"), pc.struct_field(flat, "value")
    if values.null_count or pc.any(pc.equal(pc.utf8_length(keys), 0)).as_py():
        raise MessageError("a property has an empty name or a null value: names and values must be strings")
    for name in pc.unique(keys).to_pylist():
        if name in RESERVED_PROPERTIES or name.startswith(RESERVED_PROPERTY_PREFIX):
            raise MessageError(f"property {name!r} is reserved by RocketMQ: rename it")
    immunity = values.filter(pc.equal(keys, CHECK_IMMUNITY_PROPERTY))
    if len(immunity) and not pc.all(pc.match_substring_regex(immunity, r"^\d{1,11}$")).as_py():
        raise MessageError(f"property {CHECK_IMMUNITY_PROPERTY} is not a number of seconds of 0 or more")
    sizes = pc.add(pc.binary_length(pc.cast(keys, pa.binary())), pc.binary_length(pc.cast(values, pa.binary())))
    if (pc.max(pc.list_value_length(entries)).as_py() or 0) * (pc.max(sizes).as_py() or 0) > PROPERTIES_BYTES_MAX:
        parents = pc.list_parent_indices(entries)
        sums = pa.table({"row": parents, "size": sizes}).group_by("row").aggregate([("size", "sum")])
        largest = pc.max(sums["size_sum"]).as_py()
        if largest > PROPERTIES_BYTES_MAX:
            raise MessageError(f"properties hold {largest} bytes: at most {PROPERTIES_BYTES_MAX} are allowed")
    return column
