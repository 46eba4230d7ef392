"""Finds messages by a key, an offset, a time, or an id."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.inspect.assemble_trace import COUNTED, chosen_rows, trace
from rmq_spark._core.inspect.standing import Standing
from rmq_spark._core.inspect.trace import Trace, TracePlace
from rmq_spark._core.log.batch_state import BatchState, RowState
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.message_columns import require_known_topic
from rmq_spark._core.messages.message_reader import read_ranges
from rmq_spark._core.messages.messages_table import SOURCE_SCHEMA
from rmq_spark._core.messages.placements import Placements
from rmq_spark._core.selector.tree import And, Condition, Filter, In, Or, Property, Search
from rmq_spark._core.storage.table import Table, live_paths
from rmq_spark._core.vocabulary.ids import message_ids, transaction_ids
from rmq_spark._core.vocabulary.message import SYSTEM_PREFIXES
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark.errors import CorruptLogError, HalfBatchNotFoundError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

FOUND_SCHEMA = pa.schema([*SOURCE_SCHEMA, ("half_id", pa.string()), ("state", pa.string()), ("reason", pa.string())])
"""The source's columns, the half batch, the state (``committed``, or another word of :data:`COUNTED`), and the reason
why a message is not visible."""
NEWEST = 1000
"""Newest visible messages in which keys are looked for that are similar to one without a message."""
HALF_COLUMNS = ("tags", "keys", "sharding_key", "properties", "body", "born_timestamp", "store_timestamp")
NOT_COMMITTED = [state for state in RowState if state is not RowState.COMMITTED]


@dataclass(frozen=True)
class Wanted:
    """Criteria of a search for visible messages. A criterion of None matches all.

    Attributes
    ----------
    topic : str
        None: all topics; those of retries and dead letters only when a key is wanted.
    key : str
        One of the message's keys.
    queue_id, offset : int
        An offset needs a queue.
    since, until : datetime
        The commit's time: ``since`` included, ``until`` excluded.
    """

    topic: str | None = None
    key: str | None = None
    tags: tuple[str, ...] | None = None
    queue_id: int | None = None
    offset: int | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def where(self) -> Condition | None:
        """The condition on tags and keys."""
        conditions: list[Condition] = []
        if self.key is not None:
            keys = Property("KEYS")
            conditions.append(
                Or(
                    (
                        In(keys, (self.key,)),
                        Search("STARTSWITH", keys, f"{self.key} "),
                        Search("ENDSWITH", keys, f" {self.key}"),
                        Search("CONTAINS", keys, f" {self.key} "),
                    )
                )
            )
        if self.tags is not None:
            conditions.append(In(Property("TAGS"), self.tags))
        return conditions[0] if len(conditions) == 1 else And(tuple(conditions)) if conditions else None


def find(engine: Engine, wanted: Wanted, limit: int) -> pa.Table:
    """Return up to ``limit`` visible messages in the order of topics, queues and offsets: :data:`FOUND_SCHEMA`.

    Of messages that do not match, only the small columns are read.

    Raises
    ------
    TopicNotFoundError
    OptionError
        When the topic has no such queue.
    """
    topics = {name: topic.queues for name, topic in engine.topic_store.all().items()}
    if wanted.topic is not None:
        require_known_topic(wanted.topic, topics)
        names = {wanted.topic}
        if wanted.queue_id is not None and wanted.queue_id >= topics[wanted.topic]:
            raise OptionError(
                f"topic {wanted.topic!r} has no queue {wanted.queue_id}: it has the queues 0 to "
                f"{topics[wanted.topic] - 1}"
            )
    else:
        names = {name for name in topics if wanted.key is not None or not name.startswith(SYSTEM_PREFIXES)}
    placements = Placements(engine, names.__contains__)
    ends = placements.latest()
    start = {queue: engine.firsts(refresh=False).get(queue, 0) for queue in ends}
    if wanted.since is not None:
        first_offsets = placements.first_since(wanted.since)
        start = {queue: max(first, first_offsets.get(queue, ends[queue])) for queue, first in start.items()}
    if wanted.until is not None:
        first_offsets = placements.first_since(wanted.until)
        ends = {queue: min(end, first_offsets.get(queue, end)) for queue, end in ends.items()}
    if wanted.queue_id is not None:
        ends = {queue: end for queue, end in ends.items() if queue[1] == wanted.queue_id}
    if wanted.offset is not None:
        offset = wanted.offset
        ends = {q: offset + 1 if start[q] <= offset < end else start[q] for q, end in ends.items()}
        start = {queue: offset for queue, end in ends.items() if end == offset + 1}
        ends = {queue: ends[queue] for queue in start}
    condition = wanted.where
    where = None if condition is None else Filter(condition, engine.runtime.time_ms())
    if where is None:  # then no queue contributes more than the limit
        ends = {queue: min(end, start.get(queue, 0) + limit) for queue, end in ends.items()}
    tables, remaining = [], limit
    ranges, _ = placements.between(start, ends)
    for messages in read_ranges(ranges, engine.read_range, engine.find_again, SOURCE_SCHEMA.names, where):
        tables.append(messages.slice(0, remaining))
        remaining -= tables[-1].num_rows
        if remaining <= 0:
            break
    return _committed(pa.concat_tables(tables) if tables else SOURCE_SCHEMA.empty_table())


def find_everywhere(engine: Engine, wanted: Wanted, limit: int) -> pa.Table:
    """Return up to ``limit`` messages, visible ones first. A key also finds messages that are not visible, unless a
    place or a time is wanted, which they do not have."""
    visible = find(engine, wanted, limit)
    placed_only = (wanted.queue_id, wanted.offset, wanted.since, wanted.until) != (None, None, None, None)
    if wanted.key is None or placed_only:
        return visible
    return pa.concat_tables([visible, find_not_visible(engine, wanted, max(0, limit - visible.num_rows))])


def find_not_visible(engine: Engine, wanted: Wanted, limit: int) -> pa.Table:
    """Return up to ``limit`` messages that are not visible, such as pending or rolled back ones, while ``half`` has
    them.

    They have no offset and no commit time, so ``wanted`` may have only a key, tags or a topic. The keys of all half
    messages are read.
    """
    condition = wanted.where
    where = None if condition is None else Filter(condition, engine.runtime.time_ms())
    half = engine.half.table
    half.refresh()
    columns = ["half_id", "file_no", "row_no", "topic", "tags", "keys"]
    rows = _rows_of_readable(half, live_paths(half), columns)
    if wanted.topic is not None:
        rows = rows.filter(pc.equal(rows["topic"], wanted.topic))
    if where is not None and rows.num_rows:
        rows = rows.filter(where.keeps(rows))
    chosen: dict[str, dict[int, list[int]]] = {}
    for half_id, file_no, row_no in zip(*(rows[name].to_pylist() for name in columns[:3]), strict=True):
        chosen.setdefault(half_id, {}).setdefault(file_no, []).append(row_no)
    tables: list[pa.Table] = []
    for half_id, numbers in chosen.items():
        if limit <= 0:
            break
        with suppress(HalfBatchNotFoundError):  # the half batch has left meanwhile
            record = engine.half.get(half_id)
            tables.append(_not_visible(engine, record, _rows_of(record, numbers), limit))
            limit -= tables[-1].num_rows
    return pa.concat_tables(tables) if tables else FOUND_SCHEMA.empty_table()


def similar_keys(engine: Engine, word: str, topic: str | None, most: int) -> list[str]:
    """Return up to ``most`` keys that contain a word, of messages in ``half`` and of the newest visible ones."""
    half = engine.half.table
    half.refresh()
    rows = _rows_of_readable(half, live_paths(half), ["topic", "keys"])
    tables = [rows if topic is None else rows.filter(pc.equal(rows["topic"], topic))]
    placements = Placements(engine, {topic}.__contains__ if topic is not None else lambda _: True)
    ends = placements.latest()
    firsts, each = engine.firsts(refresh=False), NEWEST // max(1, len(ends))
    start = {queue: max(firsts.get(queue, 0), end - each) for queue, end in ends.items()}
    ranges, _ = placements.between(start, ends)
    tables += read_ranges(ranges, engine.read_range, engine.find_again, ["keys"])
    texts = (text for rows in tables for text in pc.unique(rows["keys"].combine_chunks()).to_pylist() if text)
    found = dict.fromkeys(key for text in texts for key in text.split(" ") if word.lower() in key.lower())
    return sorted(found, key=len)[:most]


def _rows_of_readable(half: Table, paths: Sequence[str], columns: Sequence[str]) -> pa.Table:
    """Return rows of half files. A lost or damaged file is logged, and hides no message of another one."""
    try:
        return half.read(paths, columns)
    except CorruptLogError as problem:
        if len(paths) == 1:
            logger.warning("its messages are not searched: %s", redacted(problem))
            return half.read([], columns)
    middle = len(paths) // 2
    return pa.concat_tables([_rows_of_readable(half, some, columns) for some in (paths[:middle], paths[middle:])])


def _rows_of(record: HalfRecord, numbers: Mapping[int, Sequence[int]]) -> RowSet:
    """Return rows of a half batch by file number and row number."""
    bits_by_file = {file_no: bytearray(record.files[file_no].rows) for file_no in numbers}
    for file_no, bits in bits_by_file.items():
        for row_no in numbers[file_no]:
            bits[row_no] = 1
    return RowSet(bits_by_file)


def find_by_id(
    engine: Engine,
    limit: int,
    *,
    transaction_id: str | None = None,
    half_id: str | None = None,
    message_id: str | None = None,
) -> pa.Table:
    """Return up to ``limit`` messages of a transaction or half batch, or one message: :data:`FOUND_SCHEMA`.

    Messages that are not visible are included while ``half`` has them.

    Raises
    ------
    OptionError, HalfBatchNotFoundError
    """
    traced = trace(engine, transaction_id, half_id, message_id)
    tables = list(_messages_at(engine, traced, limit))
    remaining = limit - sum(rows.num_rows for rows in tables)
    if traced.where == "half" and remaining > 0:
        with suppress(HalfBatchNotFoundError):  # the half batch has left meanwhile
            record = engine.half.get(traced.half_id)
            tables.append(_not_visible(engine, record, chosen_rows(engine, traced, record), remaining))
    return pa.concat_tables(tables).slice(0, limit) if tables else FOUND_SCHEMA.empty_table()


def transactions_of(engine: Engine, traced: Trace, limit: int) -> list[dict[str, Any]]:
    """Return the transactions of up to ``limit`` messages of a traced half batch, those that are not visible first:
    ``transaction_id, state, reason, messages, keys``, of which the keys are a list."""
    tables = _messages_of(engine, traced, limit)
    found: dict[tuple[str, str, str | None], dict[str, Any]] = {}
    for row in (row for rows in tables for row in rows.drop_columns("body").to_pylist()):
        named = {name: row[name] for name in ("transaction_id", "state", "reason")}
        transaction = found.setdefault(tuple(named.values()), {**named, "messages": 0, "keys": {}})
        transaction["messages"] += 1
        transaction["keys"].update(dict.fromkeys((row["keys"] or "").split()))
    return [{**transaction, "keys": list(transaction["keys"])} for transaction in found.values()]


def keys_of(engine: Engine, traced: Trace, limit: int) -> list[str]:
    """Return the keys of up to ``limit`` messages of a trace, those that are not visible first, each once."""
    keys = (text for rows in _messages_of(engine, traced, limit) for text in rows["keys"].to_pylist())
    return list(dict.fromkeys(text for text in keys if text))


def _messages_of(engine: Engine, traced: Trace, limit: int) -> list[pa.Table]:
    """Return up to ``limit`` messages of a trace, those that are not visible first."""
    tables: list[pa.Table] = []
    if traced.where == "half":
        with suppress(HalfBatchNotFoundError):  # the half batch has left meanwhile
            record = engine.half.get(traced.half_id)
            tables.append(_not_visible(engine, record, chosen_rows(engine, traced, record), limit))
    return [*tables, *_messages_at(engine, traced, limit - sum(rows.num_rows for rows in tables))]


def _messages_at(engine: Engine, traced: Trace, limit: int) -> Iterator[pa.Table]:
    """Yield the messages at the places of a trace."""
    places = sorted({place for event in traced.events for place in event.places})
    placements = Placements(engine, {place.topic for place in places}.__contains__)
    placements.latest()
    firsts = engine.firsts(refresh=False)
    for place in _limited(places, limit):
        queue = (place.topic, place.queue_id)
        first = max(place.first_offset, firsts.get(queue, 0))
        ranges, _ = placements.between({queue: first}, {queue: place.last_offset + 1})
        for messages in read_ranges(ranges, engine.read_range, engine.find_again, SOURCE_SCHEMA.names):
            yield _committed(messages)


def _limited(places: Sequence[TracePlace], limit: int) -> Iterator[TracePlace]:
    """Yield places with at most ``limit`` messages."""
    for place in places:
        if limit <= 0:
            return
        yield place._replace(last_offset=min(place.last_offset, place.first_offset + limit - 1))
        limit -= place.last_offset - place.first_offset + 1


def _committed(messages: pa.Table) -> pa.Table:
    count = messages.num_rows
    half_ids = pc.replace_substring_regex(messages["msg_id"], r":[^:]*$", "")
    states = pa.repeat(pa.scalar("committed"), count)
    result = messages.append_column("half_id", half_ids).append_column("state", states)
    return result.append_column("reason", pa.nulls(count, pa.string()))


def _reason_of(state: BatchState, answer: str | None, file_no: int, row_no: int) -> str | None:
    """Return why a row is not visible. ``answer`` is what the last check said."""
    if state.files[file_no].conflict[row_no]:
        return "in conflict: the opposite verdict came too late, and nobody has resolved it"
    if state.files[file_no].state[row_no] == RowState.PENDING and answer is not None:
        return answer
    if state.files[file_no].state[row_no] != RowState.WAITING:
        return state.reason_of(file_no, row_no)
    due = [at for first, end, at in state.files[file_no].due if first <= row_no < end]
    return f"due {due[-1]:%Y-%m-%d %H:%M:%S} UTC" if due else "an earlier message of its sharding key is not settled"


def _not_visible(engine: Engine, record: HalfRecord, chosen: RowSet, limit: int) -> pa.Table:
    """Return those of the chosen rows of a half batch that are not visible, read from ``half``."""
    state = engine.state_of(record)
    rows = (state.rows_in(NOT_COMMITTED) & chosen).first(limit)
    columns = [*HALF_COLUMNS, "file_no", "row_no", "transaction_key", "topic", "queue_id"]
    half_rows = engine.half.read(record, rows, columns)
    count = half_rows.num_rows
    row_states = state.files
    addresses = list(zip(half_rows["file_no"].to_pylist(), half_rows["row_no"].to_pylist(), strict=True))
    words = [COUNTED[RowState(row_states[file_no].state[row_no])] for file_no, row_no in addresses]
    answers = Standing(engine).last_answers([record.half_id]) if state.count(RowState.PENDING) else {}
    _, answer = answers.get(record.half_id, (None, None))
    attempts = pa.array([row_states[file_no].attempt[row_no] for file_no, row_no in addresses], pa.int32())
    columns_by_name = {
        **{name: half_rows[name] for name in (*HALF_COLUMNS, "topic", "queue_id")},
        "queue_offset": pa.nulls(count, pa.int64()),
        "msg_id": message_ids(pa.scalar(record.half_id), half_rows["file_no"], half_rows["row_no"]),
        "transaction_id": transaction_ids(record.half_id, attempts, record.header.transaction_per, half_rows),
        "producer_group": pa.repeat(pa.scalar(record.header.producer_group), count),
        "commit_timestamp": pa.nulls(count, SOURCE_SCHEMA.field("commit_timestamp").type),
        "half_id": pa.repeat(pa.scalar(record.half_id), count),
        "state": pa.array(words, pa.string()),
        "reason": pa.array([_reason_of(state, answer, *address) for address in addresses], pa.string()),
    }
    return pa.table({name: columns_by_name[name] for name in FOUND_SCHEMA.names}).cast(FOUND_SCHEMA)
