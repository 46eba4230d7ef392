"""The history of a commit log since a time, for reports: verdicts, checks, and messages that became visible.

``op`` has the recent past. The decisions on a half batch that has left are in its ``archived`` row. Both are read by
columns, and no messages are read: the Delta log of ``messages`` has the numbers of placed messages. Only files that
span two periods are opened, for two columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op import SETTLING, OpKind, Who
from rmq_spark._core.log.op_view import net_settled, of_kind
from rmq_spark._core.log.op_walk import walk_placements
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark.errors import TxmqError

if TYPE_CHECKING:
    from rmq_spark._core.log.batch_state import BatchState
    from rmq_spark._core.log.op import OpRow
    from rmq_spark._core.protocol.engine import Engine

TOLD = (*SETTLING, OpKind.REOPEN, OpKind.CHECK)
"""Kinds of op rows that are events of a half batch."""
CLOCKS_S = 120.0
"""Largest difference in seconds between a file's time and its rows' times, which come from two clocks."""
EVENT_SCHEMA = pa.schema(
    [
        ("half_id", pa.string()),
        ("at", TIMESTAMP),
        ("kind", pa.string()),
        ("decided_by", pa.string()),
        ("messages", pa.int64()),
        ("refused", pa.bool_()),
        ("reason", pa.string()),
        ("standing", pa.int64()),
    ]
)
BATCH_SCHEMA = pa.schema(
    [
        ("half_id", pa.string()),
        ("producer_group", pa.string()),
        ("prepared_at", TIMESTAMP),
        ("messages", pa.int64()),
    ]
)
OPEN_SCHEMA = BATCH_SCHEMA.remove(1)
_READ_SCHEMA = EVENT_SCHEMA.remove(EVENT_SCHEMA.get_field_index("standing"))
_EVENT_COLUMNS = ["half_id", "op_time", "kind", "decided_by", "count", "refused", "reason"]


class History(NamedTuple):
    """The events and half batches in ``op``.

    Attributes
    ----------
    events : pyarrow.Table
        ``half_id, at, kind, decided_by, messages, refused, reason, standing``: verdicts, quarantines, reopenings and
        answered checks. A verdict on messages of several queues may have several rows with the same time. ``standing``
        counts the messages that no later reopen took back. So over verdicts and quarantines it counts each message at
        most once, with its last verdict.
    batches : pyarrow.Table
        ``half_id, producer_group, prepared_at, messages`` of every kept half batch: those in ``half``, whose group is
        null here because their files hold it, and archived ones.
    """

    events: pa.Table
    batches: pa.Table


def history_since(engine: Engine, since: datetime) -> History:
    """Return the events and half batches in ``op`` since a time.

    Parameters
    ----------
    since : datetime
        With a time zone.
    """
    engine.refresh()
    # Read before op, where half batches that leave meanwhile are archived.
    batches = engine.half.contents.all_batches().table
    archived = _archived(engine)
    all_events = pa.concat_tables([_archived_decisions(archived), _events(engine, since, archived["half_id"])])
    in_range = pc.greater_equal(all_events["at"], pa.scalar(since, TIMESTAMP))
    events = _with_standing(engine, all_events.filter(in_range), archived, since)
    return History(events, _all_batches(batches, archived))


def retained_batches(engine: Engine) -> pa.Table:
    """Return every kept half batch, in ``half`` or archived, as in :class:`History`.

    Raises
    ------
    CorruptLogError
        When a file that half batches share cannot be read, so that nobody knows which it has.
    """
    engine.refresh()
    batches = engine.half.contents.all_batches()
    batches.require_all()
    return _all_batches(batches.table, _archived(engine))


def _all_batches(batches: pa.Table, archived: pa.Table) -> pa.Table:
    in_half = pa.table(
        {
            "half_id": batches["half_id"],
            "producer_group": pa.nulls(batches.num_rows, pa.string()),
            "prepared_at": _times(batches["ms"]),
            "messages": batches["rows"],
        },
        schema=BATCH_SCHEMA,
    )
    has_left = pc.is_in(in_half["half_id"], value_set=archived["half_id"].combine_chunks())
    archived_batches = pa.table(
        {
            "half_id": archived["half_id"],
            "producer_group": archived["producer_group"],
            "prepared_at": _times(archived["prepared_ms"]),
            "messages": archived["count"],
        },
        schema=BATCH_SCHEMA,
    )
    return pa.concat_tables([in_half.filter(pc.invert(has_left)), archived_batches])


def _times(ms: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.cast(pc.multiply(pc.cast(ms, pa.int64()), 1000), TIMESTAMP)


def _archived(engine: Engine) -> pa.Table:
    columns = ["kind", "half_id", "count", "producer_group", "prepared_ms", "archived"]
    rows = engine.op_table.read(engine.ledger.archive_paths(), columns)
    return rows.filter(of_kind(rows, OpKind.ARCHIVED))


def _archived_decisions(archived: pa.Table) -> pa.Table:
    """Return the archived decisions on half batches that have left, as events."""
    rows = archived.combine_chunks()
    if rows.num_rows == 0:
        return _READ_SCHEMA.empty_table()
    decisions = pc.struct_field(rows["archived"].chunk(0), "decisions")
    row_numbers = pc.list_parent_indices(decisions)
    flat = pc.list_flatten(decisions)
    return pa.table(
        {
            "half_id": rows["half_id"].chunk(0).take(row_numbers),
            "at": pc.struct_field(flat, "at"),
            "kind": pc.struct_field(flat, "kind"),
            "decided_by": pc.struct_field(flat, "decided_by"),
            "messages": pc.struct_field(flat, "count"),
            "refused": pc.struct_field(flat, "refused"),
            "reason": pc.struct_field(flat, "reason"),
        },
        schema=_READ_SCHEMA,
    )


def _events(engine: Engine, since: datetime, archived: pa.ChunkedArray) -> pa.Table:
    """Return the op rows since a time about half batches that are not archived, as events."""
    actions = engine.op_table.actions()
    recent = pc.greater_equal(actions["modification_time"], int((since.timestamp() - CLOCKS_S) * 1000))
    rows = engine.op_table.read(actions.filter(recent)["path"].to_pylist(), _EVENT_COLUMNS)
    is_event = pc.is_in(rows["kind"], value_set=pa.array([kind.value for kind in TOLD]))
    is_archived = pc.is_in(rows["half_id"], value_set=archived.combine_chunks())
    rows = rows.filter(pc.and_(is_event, pc.invert(is_archived)))
    return pa.table([rows[name] for name in _EVENT_COLUMNS], schema=_READ_SCHEMA)


# ---------------------------------------------------------------- reopened messages
def _with_standing(engine: Engine, events: pa.Table, archived: pa.Table, since: datetime) -> pa.Table:
    """Add the column ``standing``. Only half batches with a reopen are read one by one."""
    reopened = pc.unique(events.filter(of_kind(events, OpKind.REOPEN))["half_id"])
    archived_rows = archived.filter(pc.is_in(archived["half_id"], value_set=reopened)).to_pylist()
    settling_events = {
        row["half_id"]: list(_settling_of_archived(row["archived"]["decisions"])) for row in archived_rows
    }
    for half_id in set(reopened.to_pylist()) - settling_events.keys():
        with suppress(TxmqError):  # it has left meanwhile, or is unreadable, which a check reports: count all of it
            settling_events[half_id] = list(_settling_of_state(engine.state_of(engine.get(half_id))))
    kinds = pa.array([kind.value for kind in SETTLING])
    is_recounted = pc.is_in(events["half_id"], value_set=pa.array(list(settling_events), pa.string()))
    others = events.filter(pc.invert(pc.and_(is_recounted, pc.is_in(events["kind"], value_set=kinds))))
    others = others.append_column(EVENT_SCHEMA.field("standing"), others["messages"])
    rows = [
        {"half_id": half_id, **row}
        for half_id, recounted in settling_events.items()
        for row in recounted
        if row["at"] >= since
    ]
    return pa.concat_tables([others, pa.Table.from_pylist(rows, schema=EVENT_SCHEMA)])


def _settling_of_state(state: BatchState) -> Iterator[dict[str, Any]]:
    """Yield the verdicts and quarantines of a half batch, as events.

    The history is read backwards: a row stands when no later reopen names it.
    """
    reopened = {n: bytearray(file.rows) for n, file in state.files.items()}
    for row in reversed(state.history):
        spans = list(_spans(state, row))
        if row.kind is OpKind.REOPEN:
            for file_no, first, end in spans:
                reopened[file_no][first:end] = b"\x01" * (end - first)
        elif row.kind in SETTLING:
            standing = sum(reopened[file_no].count(0, first, end) for file_no, first, end in spans)
            by = None if row.decided_by is None else row.decided_by.value
            yield {"at": row.op_time, "kind": row.kind.value, "decided_by": by, "messages": row.count,
                   "refused": row.refused, "reason": row.reason, "standing": standing}  # fmt: skip


def _settling_of_archived(decisions: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the same events from the archived decisions on a half batch that has left.

    Decisions have counts of messages, not their rows. So a reopen is assumed to take back the newest decisions that it
    can name.
    """
    standing = [d["count"] for d in decisions]
    for position, reopen in enumerate(decisions):
        rest = reopen["count"] if reopen["kind"] == OpKind.REOPEN.value else 0
        for earlier in reversed(range(position)):
            if rest and _can_take_back(reopen, decisions[earlier]):
                taken = min(rest, standing[earlier])
                standing[earlier] -= taken
                rest -= taken
    for d, count in zip(decisions, standing, strict=True):
        if d["kind"] != OpKind.REOPEN.value:
            yield {"at": d["at"], "kind": d["kind"], "decided_by": d["decided_by"], "messages": d["count"],
                   "refused": d["refused"], "reason": d["reason"], "standing": count}  # fmt: skip


def _can_take_back(reopen: Mapping[str, Any], decision: Mapping[str, Any]) -> bool:
    """Return True when a reopen can name rows of a decision (see :meth:`Ledger.reopen` and :meth:`Ledger.overrule`).

    Under the next attempt it names rows whose transaction never happened. Under the same attempt it names rows with an
    unknown outcome, and for a person any rollback.
    """
    kind, by = decision["kind"], decision["decided_by"]
    if reopen["attempt"] == decision["attempt"] + 1:
        return bool(kind == OpKind.ROLLBACK.value and by == Who.CHECK.value and not decision["refused"])
    if reopen["attempt"] != decision["attempt"]:
        return False
    by_person = reopen["decided_by"] == Who.ADMIN.value
    return bool(
        kind == OpKind.QUARANTINE.value or (kind == OpKind.ROLLBACK.value and (by_person or by == Who.DISCARD.value))
    )


def rolled_back_again(state: BatchState) -> Iterator[tuple[datetime | None, RowSet]]:
    """Yield the time and the rows of each rollback that repeats an earlier one, after a reopen between them."""
    rolled_back = {file_number: bytearray(file.rows) for file_number, file in state.files.items()}
    for row in state.history:
        if row.kind is OpKind.ROLLBACK:
            repeated = {file_number: bytearray(len(bits)) for file_number, bits in rolled_back.items()}
            for file_no, first, end in _spans(state, row):
                repeated[file_no][first:end] = rolled_back[file_no][first:end]
                rolled_back[file_no][first:end] = b"\x01" * (end - first)
            if rows_again := RowSet(repeated):
                yield row.op_time, rows_again


def _spans(state: BatchState, row: OpRow) -> Iterator[tuple[int, int, int]]:
    """Yield the rows that an op row names: file number, first row, and end (excluded)."""
    for file_no, file in state.files.items():
        if row.file_no in (None, file_no):
            for first, last in row.ranges or ((0, file.rows - 1),):
                yield file_no, first, last + 1


# ---------------------------------------------------------------- messages that became visible
ALL_TIME_S = 1 << 34
"""A period that begins in 1970 and has every time of a message in it."""


def placed(engine: Engine, since: datetime, period_s: int) -> pa.Table:
    """Return the numbers of messages that became visible since a time, by topic and period, without expired ones.

    Parameters
    ----------
    since : datetime
        With a time zone.
    period_s : int
        Seconds of a period. Periods begin at multiples of it since 1970.

    Returns
    -------
    pyarrow.Table
        ``topic, at`` (the period's start) ``, messages, last`` (when the newest of them was committed), unordered.
    """
    engine.refresh()
    engine.drained.border()
    counts = _drained_counts(engine, since, period_s)
    for rows, _ in walk_placements(engine.op_table, engine.drained.op_version + 1):
        counts.append(_by_period(rows["topic"], rows["op_time"], rows["op_time"], rows["count"], since, period_s))
    return _sums(pa.concat_tables(counts))


def placed_within(engine: Engine, now: datetime, windows: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Return by topic how many messages became visible in each of these windows, which are in seconds before now.

    Drained messages are counted by the statistics of their files. Only a file in which a window begins is read.
    """
    counts_by_topic: dict[str, dict[str, int]] = {}
    for name, seconds in windows.items():
        for row in placed(engine, now - timedelta(seconds=seconds), ALL_TIME_S).to_pylist():
            counts_by_topic.setdefault(row["topic"], dict.fromkeys(windows, 0))[name] += row["messages"]
    return counts_by_topic


def _drained_counts(engine: Engine, since: datetime, period_s: int) -> list[pa.Table]:
    table = engine.messages_table
    files = table.actions()
    since_us = pa.scalar(since, TIMESTAMP)
    files = files.filter(pc.fill_null(pc.greater_equal(files["max.commit_timestamp"], since_us), True))
    first, last = (files[f"{side}.commit_timestamp"] for side in ("min", "max"))
    topic = files["min.topic"]
    in_one_period = pc.and_(
        pc.equal(topic, files["max.topic"]), pc.equal(_period_start(first, period_s), _period_start(last, period_s))
    )
    in_one_period = pc.and_(
        in_one_period, pc.and_(pc.greater_equal(first, since_us), pc.is_valid(files["num_records"]))
    )
    in_one_period = pc.fill_null(in_one_period, False)
    whole = files.filter(in_one_period)
    times = whole["min.commit_timestamp"], whole["max.commit_timestamp"]
    counts = [_by_period(whole["min.topic"], *times, whole["num_records"], since, period_s)]
    for path in files.filter(pc.invert(in_one_period))["path"].to_pylist():
        rows = table.read([path], ["topic", "commit_timestamp"])
        ones = pa.chunked_array([pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)])
        times = rows["commit_timestamp"], rows["commit_timestamp"]
        counts.append(_by_period(rows["topic"], *times, ones, since, period_s))
    return counts


def _by_period(
    topic: pa.ChunkedArray,
    first: pa.ChunkedArray,
    last: pa.ChunkedArray,
    messages: pa.ChunkedArray,
    since: datetime,
    period_s: int,
) -> pa.Table:
    """Return counts by the period of each row's first message."""
    times = {"at": pc.cast(first, TIMESTAMP), "last": pc.cast(last, TIMESTAMP)}
    rows = pa.table({"topic": topic, **times, "messages": messages})
    rows = rows.filter(pc.greater_equal(rows["at"], pa.scalar(since, TIMESTAMP)))
    return _sums(rows.set_column(1, "at", pc.cast(_period_start(rows["at"], period_s), TIMESTAMP)))


def _sums(rows: pa.Table) -> pa.Table:
    told = [("messages", "sum"), ("last", "max")]
    sums = rows.group_by(["topic", "at"], use_threads=False).aggregate(told)
    return sums.rename_columns(["topic", "at", "messages", "last"])


def _period_start(at: pa.ChunkedArray, period_s: int) -> pa.ChunkedArray:
    """Return the start of each time's period: microseconds since 1970."""
    time_us, period_us = pc.cast(pc.cast(at, TIMESTAMP), pa.int64()), period_s * 1_000_000
    return pc.multiply(pc.divide(time_us, period_us), period_us)


def first_drained(engine: Engine, since: datetime) -> datetime | None:
    """Return the approximate commit time of the first drained message since a time; None when there is none.

    For a file that also holds earlier messages it is ``since``.
    """
    files = engine.messages_table.actions()
    since_us = pa.scalar(since, TIMESTAMP)
    recent = files.filter(pc.greater_equal(files["max.commit_timestamp"], since_us))
    first: datetime | None = pc.min(recent["min.commit_timestamp"]).as_py()
    return None if first is None else max(first, since)


def sizes(engine: Engine) -> pa.Table:
    """Return the size of each topic in the table ``messages``: ``topic, messages, bytes``. Topics without drained
    messages are left out."""
    engine.messages_table.refresh()
    files = engine.messages_table.actions()
    sums = files.group_by("min.topic", use_threads=False).aggregate([("num_records", "sum"), ("size_bytes", "sum")])
    return sums.rename_columns(["topic", "messages", "bytes"])


# ---------------------------------------------------------------- open half batches
def open_now(engine: Engine) -> pa.Table:
    """Return half batches with pending messages, oldest first: ``half_id, prepared_at, messages`` (pending ones).

    Reads no half file, so it is quick when many are open. A file that half batches share and that cannot be read stands
    in their place, by its path.
    """
    with engine.lock:
        half_ids = engine.open_half_ids()
        prepared = engine.ledger.maybe_open()
        settled = net_settled(engine.ledger.view.rows)
        reopened = engine.ledger.view.reopened_rows()
    prepared_ms: list[int | None] = []
    messages: list[int] = []
    for half_id in half_ids:
        batch = prepared.get(half_id)
        prepared_ms.append(None if batch is None else batch.ms)
        messages.append(reopened.get(half_id, 0) if batch is None else batch.rows - settled.get(half_id, 0))
    for file in prepared.unreadable:
        half_ids.append(file.path)
        prepared_ms.append(file.ms)
        messages.append(file.rows or 1)
    columns: Sequence[object] = [
        pa.array(half_ids, pa.string()),
        pc.cast(pc.multiply(pa.array(prepared_ms, pa.int64()), 1000), TIMESTAMP),
        pc.max_element_wise(pa.array(messages, pa.int64()), 1) if messages else pa.array([], pa.int64()),
    ]
    return pa.table(columns, schema=OPEN_SCHEMA)
