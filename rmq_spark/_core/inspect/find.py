"""Finds messages by what a person knows of them: a key, an offset, a time, or an id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.inspect.story import COUNTED, chosen_rows, trace
from rmq_spark._core.inspect.trace import Trace, TracePlace
from rmq_spark._core.log.half_table import HalfRecord
from rmq_spark._core.log.input import require_known_topic
from rmq_spark._core.log.op import RowState
from rmq_spark._core.log.placements import Placements
from rmq_spark._core.messages.reading import read_ranges
from rmq_spark._core.messages.table import SOURCE_SCHEMA
from rmq_spark._core.selector.tree import And, Condition, Filter, In, Or, Property, Search
from rmq_spark._core.vocabulary.ids import message_ids, transaction_ids
from rmq_spark._core.vocabulary.message import SYSTEM_PREFIXES
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark.errors import HalfBatchNotFoundError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

FOUND_SCHEMA = pa.schema([*SOURCE_SCHEMA, ("half_id", pa.string()), ("state", pa.string()), ("reason", pa.string())])
"""The source's columns, and what became of the message: ``committed``, or another word of :data:`COUNTED`; and why, of
one that is not visible."""
HELD = ("tags", "keys", "sharding_key", "properties", "body", "born_timestamp", "store_timestamp")
NOT_COMMITTED = [state for state in RowState if state is not RowState.COMMITTED]


@dataclass(frozen=True)
class Wanted:
    """Which visible messages are looked for; what is None does not matter.

    Attributes
    ----------
    topic : str
        None: all topics but those of retries and dead letters.
    key : str
        One of the message's keys.
    tags : tuple of str
    queue_id, offset : int
        An offset needs a queue.
    since, until : datetime
        Of the commit: ``since`` included, ``until`` excluded.
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
        parts: list[Condition] = []
        if self.key is not None:
            keys = Property("KEYS")
            parts.append(
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
            parts.append(In(Property("TAGS"), self.tags))
        return parts[0] if len(parts) == 1 else And(tuple(parts)) if parts else None


def find(log: Engine, wanted: Wanted, limit: int) -> pa.Table:
    """Visible messages, at most so many, in the order of topics, queues and offsets: :data:`FOUND_SCHEMA`.

    Only the small columns are read of messages that are not wanted.

    Raises
    ------
    TopicNotFoundError
    OptionError
        When the topic has no such queue.
    """
    topics = {name: topic.queues for name, topic in log.topic_store.all().items()}
    if wanted.topic is not None:
        require_known_topic(wanted.topic, topics)
        names = {wanted.topic}
        if wanted.queue_id is not None and wanted.queue_id >= topics[wanted.topic]:
            raise OptionError(
                f"topic {wanted.topic!r} has no queue {wanted.queue_id}: it has the queues 0 to "
                f"{topics[wanted.topic] - 1}"
            )
    else:
        names = {name for name in topics if not name.startswith(SYSTEM_PREFIXES)}
    placements = Placements(log, names.__contains__)
    ends = placements.latest()
    start = {queue: log.firsts(refresh=False).get(queue, 0) for queue in ends}
    if wanted.since is not None:
        late = placements.first_since(wanted.since)
        start = {queue: max(first, late.get(queue, ends[queue])) for queue, first in start.items()}
    if wanted.until is not None:
        late = placements.first_since(wanted.until)
        ends = {queue: min(end, late.get(queue, end)) for queue, end in ends.items()}
    if wanted.queue_id is not None:
        ends = {queue: end for queue, end in ends.items() if queue[1] == wanted.queue_id}
    if wanted.offset is not None:
        at = wanted.offset
        ends = {q: at + 1 if start[q] <= at < end else start[q] for q, end in ends.items()}
        start = {queue: at for queue, end in ends.items() if end == at + 1}
        ends = {queue: ends[queue] for queue in start}
    condition = wanted.where
    where = None if condition is None else Filter(condition, log.machine.time_ms())
    if where is None:  # no queue has more of them than the limit
        ends = {queue: min(end, start.get(queue, 0) + limit) for queue, end in ends.items()}
    parts, left = [], limit
    ranges, _ = placements.between(start, ends)
    for messages in read_ranges(ranges, log.read_range, log.find_again, SOURCE_SCHEMA.names, where):
        parts.append(messages.slice(0, left))
        left -= parts[-1].num_rows
        if left <= 0:
            break
    return _committed(pa.concat_tables(parts) if parts else SOURCE_SCHEMA.empty_table())


def find_not_visible(log: Engine, wanted: Wanted, limit: int) -> pa.Table:
    """The same for messages that are not committed, while ``half`` has them: pending, rolled back and others that
    nobody sees. They have no offset and no time of a commit, so ``wanted`` names a key, tags or a topic alone.

    The keys of all half messages are read.
    """
    condition = wanted.where
    where = None if condition is None else Filter(condition, log.machine.time_ms())
    half = log.half.table
    half.refresh()
    columns = ["half_id", "file_no", "row_no", "topic", "tags", "keys"]
    rows = half.read(half.actions()["path"].to_pylist(), columns)
    topics = pc.unique(rows["topic"]).to_pylist()
    names = [wanted.topic] if wanted.topic else [t for t in topics if not t.startswith(SYSTEM_PREFIXES)]
    rows = rows.filter(pc.is_in(rows["topic"], value_set=pa.array(names, pa.string())))
    if where is not None and rows.num_rows:
        rows = rows.filter(where.keeps(rows))
    chosen: dict[str, dict[int, list[int]]] = {}
    for half_id, file_no, row_no in zip(*(rows[name].to_pylist() for name in columns[:3]), strict=True):
        chosen.setdefault(half_id, {}).setdefault(file_no, []).append(row_no)
    parts: list[pa.Table] = []
    for half_id, numbers in chosen.items():
        if limit <= 0:
            break
        with suppress(HalfBatchNotFoundError):  # it has left meanwhile
            record = log.half.get(half_id)
            parts.append(_held(log, record, _rows_of(record, numbers), limit))
            limit -= parts[-1].num_rows
    return pa.concat_tables(parts) if parts else FOUND_SCHEMA.empty_table()


def _rows_of(record: HalfRecord, numbers: Mapping[int, Sequence[int]]) -> RowSet:
    """Rows of a half batch by file number and row number."""
    found = {file_no: bytearray(record.files[file_no].rows) for file_no in numbers}
    for file_no, bits in found.items():
        for row_no in numbers[file_no]:
            bits[row_no] = 1
    return RowSet(found)


def find_by_id(
    log: Engine,
    limit: int,
    *,
    transaction_id: str | None = None,
    half_id: str | None = None,
    message_id: str | None = None,
) -> pa.Table:
    """The messages of a transaction, of a half batch, or one message: also those that are not visible, while ``half``
    has them. At most so many: :data:`FOUND_SCHEMA`.

    Raises
    ------
    OptionError, HalfBatchNotFoundError
    """
    found = trace(log, transaction_id, half_id, message_id)
    parts = list(_at(log, found, limit))
    left = limit - sum(part.num_rows for part in parts)
    if found.where == "half" and left > 0:
        with suppress(HalfBatchNotFoundError):  # it has left meanwhile
            record = log.half.get(found.half_id)
            parts.append(_held(log, record, chosen_rows(log, found, record), left))
    return pa.concat_tables(parts).slice(0, limit) if parts else FOUND_SCHEMA.empty_table()


def _at(log: Engine, found: Trace, limit: int) -> Iterator[pa.Table]:
    """The messages at the places of a trace."""
    places = sorted({place for event in found.events for place in event.places})
    placements = Placements(log, {place.topic for place in places}.__contains__)
    placements.latest()
    firsts = log.firsts(refresh=False)
    for place in _few(places, limit):
        queue = (place.topic, place.queue_id)
        first = max(place.first_offset, firsts.get(queue, 0))
        ranges, _ = placements.between({queue: first}, {queue: place.last_offset + 1})
        for messages in read_ranges(ranges, log.read_range, log.find_again, SOURCE_SCHEMA.names):
            yield _committed(messages)


def _few(places: Sequence[TracePlace], limit: int) -> Iterator[TracePlace]:
    """Places with so many messages at most."""
    for place in places:
        if limit <= 0:
            return
        yield place._replace(last_offset=min(place.last_offset, place.first_offset + limit - 1))
        limit -= place.last_offset - place.first_offset + 1


def _committed(messages: pa.Table) -> pa.Table:
    n = messages.num_rows
    half_ids = pc.replace_substring_regex(messages["msg_id"], r":[^:]*$", "")
    states = pa.repeat(pa.scalar("committed"), n)
    found = messages.append_column("half_id", half_ids).append_column("state", states)
    return found.append_column("reason", pa.nulls(n, pa.string()))


def _held(log: Engine, record: HalfRecord, chosen: RowSet, limit: int) -> pa.Table:
    """Those of some rows of a half batch that are not visible, as ``half`` has them."""
    state = log.state_of(record)
    rows = (state.rows_in(NOT_COMMITTED) & chosen).first(limit)
    columns = [*HELD, "file_no", "row_no", "transaction_key", "topic", "queue_id"]
    held = log.half.read(record, rows, columns)
    n = held.num_rows
    marks = state.files
    addresses = list(zip(held["file_no"].to_pylist(), held["row_no"].to_pylist(), strict=True))
    words = [COUNTED[RowState(marks[file_no].state[row_no])] for file_no, row_no in addresses]
    attempts = pa.array([marks[file_no].attempt[row_no] for file_no, row_no in addresses], pa.int32())
    made = {
        **{name: held[name] for name in (*HELD, "topic", "queue_id")},
        "queue_offset": pa.nulls(n, pa.int64()),
        "msg_id": message_ids(pa.scalar(record.half_id), held["file_no"], held["row_no"]),
        "transaction_id": transaction_ids(record.half_id, attempts, record.header.transaction_per, held),
        "producer_group": pa.repeat(pa.scalar(record.header.producer_group), n),
        "commit_timestamp": pa.nulls(n, SOURCE_SCHEMA.field("commit_timestamp").type),
        "half_id": pa.repeat(pa.scalar(record.half_id), n),
        "state": pa.array(words, pa.string()),
        "reason": pa.array([state.reason_of(*address) for address in addresses], pa.string()),
    }
    return pa.table({name: made[name] for name in FOUND_SCHEMA.names}).cast(FOUND_SCHEMA)
