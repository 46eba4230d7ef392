"""What happened in a commit log since a time: verdicts, checks and messages that appeared. Reports are made of it.

``op`` tells of the recent past. Of a half batch that has left, its ``archived`` row has the decisions. Both are read a
column at a time, and no message is read: the number of messages that were placed stands in the Delta log of
``messages``, but for files in which two periods meet, of which two columns are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op import SETTLING, Kind, Who
from rmq_spark._core.log.op_view import of_kind, settled_rows
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark.errors import TxmqError

if TYPE_CHECKING:
    from rmq_spark._core.log.op import BatchState, OpRow
    from rmq_spark._core.protocol.engine import Engine

TOLD = (*SETTLING, Kind.REOPEN, Kind.CHECK)
"""Kinds of op rows that are events of a half batch."""
CLOCKS_S = 120.0
"""By so much the time of a file may differ from the times of its rows: two clocks."""
EVENT_SCHEMA = pa.schema(
    [
        ("half_id", pa.string()),
        ("at", TIMESTAMP),
        ("kind", pa.string()),
        ("decided_by", pa.string()),
        ("messages", pa.int64()),
        ("refused", pa.bool_()),
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
_OF_EVENT = ["half_id", "op_time", "kind", "decided_by", "count", "refused"]


class Told(NamedTuple):
    """What ``op`` tells of half batches.

    Attributes
    ----------
    events : pyarrow.Table
        ``half_id, at, kind, decided_by, messages, refused, standing``: verdicts, quarantines, reopenings and answered
        checks. A verdict on messages of several queues may have several rows with one time. ``standing`` counts those
        of the messages that no later reopen took back. So over verdicts and quarantines it counts each message once at
        most, with the last word on it.
    batches : pyarrow.Table
        ``half_id, producer_group, prepared_at, messages`` of every half batch that is kept: those in ``half``, of which
        the group is null here (it stands in their files), and archived ones.
    """

    events: pa.Table
    batches: pa.Table


def told(log: Engine, since: datetime) -> Told:
    """What ``op`` tells of half batches since a time.

    Parameters
    ----------
    log : Engine
    since : datetime
        With a time zone.
    """
    log.refresh()
    counted = log.half.counted()  # before op: what leaves half meanwhile is archived there
    archived = _archived(log)
    happened = pa.concat_tables([_decisions(archived), _events(log, since, archived["half_id"])])
    late = pc.greater_equal(happened["at"], pa.scalar(since, TIMESTAMP))
    events = _with_standing(log, happened.filter(late), archived, since)
    return Told(events, _batches(counted, archived))


def kept_batches(log: Engine) -> pa.Table:
    """Every half batch that is kept, as :class:`Told` has them: those in ``half``, and archived ones."""
    log.refresh()
    counted = log.half.counted()
    return _batches(counted, _archived(log))


def _batches(counted: pa.Table, archived: pa.Table) -> pa.Table:
    in_half = pa.table(
        {
            "half_id": counted["half_id"],
            "producer_group": pa.nulls(counted.num_rows, pa.string()),
            "prepared_at": _times(counted["ms"]),
            "messages": counted["rows"],
        },
        schema=BATCH_SCHEMA,
    )
    gone = pc.is_in(in_half["half_id"], value_set=archived["half_id"].combine_chunks())
    left = pa.table(
        {
            "half_id": archived["half_id"],
            "producer_group": archived["producer_group"],
            "prepared_at": _times(archived["prepared_ms"]),
            "messages": archived["count"],
        },
        schema=BATCH_SCHEMA,
    )
    return pa.concat_tables([in_half.filter(pc.invert(gone)), left])


def _times(ms: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.cast(pc.multiply(pc.cast(ms, pa.int64()), 1000), TIMESTAMP)


def _archived(log: Engine) -> pa.Table:
    columns = ["kind", "half_id", "count", "producer_group", "prepared_ms", "archived"]
    rows = log.op.read(log.ledger.archive_paths(), columns)
    return rows.filter(of_kind(rows, Kind.ARCHIVED))


def _decisions(archived: pa.Table) -> pa.Table:
    """The decisions that are kept of half batches that have left, as events."""
    rows = archived.combine_chunks()
    if rows.num_rows == 0:
        return _READ_SCHEMA.empty_table()
    decisions = pc.struct_field(rows["archived"].chunk(0), "decisions")
    of_row = pc.list_parent_indices(decisions)
    each = pc.list_flatten(decisions)
    return pa.table(
        {
            "half_id": rows["half_id"].chunk(0).take(of_row),
            "at": pc.struct_field(each, "at"),
            "kind": pc.struct_field(each, "kind"),
            "decided_by": pc.struct_field(each, "decided_by"),
            "messages": pc.struct_field(each, "count"),
            "refused": pc.struct_field(each, "refused"),
        },
        schema=_READ_SCHEMA,
    )


def _events(log: Engine, since: datetime, archived: pa.ChunkedArray) -> pa.Table:
    """The op rows since a time that tell of half batches which are not archived."""
    actions = log.op.actions()
    late = pc.greater_equal(actions["modification_time"], int((since.timestamp() - CLOCKS_S) * 1000))
    rows = log.op.read(actions.filter(late)["path"].to_pylist(), _OF_EVENT)
    told = pc.is_in(rows["kind"], value_set=pa.array([kind.value for kind in TOLD]))
    gone = pc.is_in(rows["half_id"], value_set=archived.combine_chunks())
    rows = rows.filter(pc.and_(told, pc.invert(gone)))
    return pa.table([rows[name] for name in _OF_EVENT], schema=_READ_SCHEMA)


# ---------------------------------------------------------------- what a reopen took back
def _with_standing(log: Engine, events: pa.Table, archived: pa.Table, since: datetime) -> pa.Table:
    """Events with the column ``standing``. Only half batches with a reopen are looked at one by one."""
    reopened = pc.unique(events.filter(of_kind(events, Kind.REOPEN))["half_id"])
    left = archived.filter(pc.is_in(archived["half_id"], value_set=reopened)).to_pylist()
    anew = {row["half_id"]: list(_settling_of_archived(row["archived"]["decisions"])) for row in left}
    for half_id in set(reopened.to_pylist()) - anew.keys():
        with suppress(TxmqError):  # it has left meanwhile, or cannot be read, which a check reports: all of it counts
            anew[half_id] = list(_settling_of_state(log.state_of(log.get(half_id))))
    kinds = pa.array([kind.value for kind in SETTLING])
    mine = pc.is_in(events["half_id"], value_set=pa.array(list(anew), pa.string()))
    others = events.filter(pc.invert(pc.and_(mine, pc.is_in(events["kind"], value_set=kinds))))
    others = others.append_column(EVENT_SCHEMA.field("standing"), others["messages"])
    rows = [{"half_id": half_id, **row} for half_id, found in anew.items() for row in found if row["at"] >= since]
    return pa.concat_tables([others, pa.Table.from_pylist(rows, schema=EVENT_SCHEMA)])


def _settling_of_state(state: BatchState) -> Iterator[dict[str, Any]]:
    """The verdicts and quarantines of a half batch, as events. The history is read backwards: a row stands that no
    later reopen names."""
    reopened = {n: bytearray(file.rows) for n, file in state.files.items()}
    for row in reversed(state.history):
        spans = list(_spans(state, row))
        if row.kind is Kind.REOPEN:
            for file_no, first, end in spans:
                reopened[file_no][first:end] = b"\x01" * (end - first)
        elif row.kind in SETTLING:
            standing = sum(reopened[file_no].count(0, first, end) for file_no, first, end in spans)
            by = None if row.decided_by is None else row.decided_by.value
            yield {"at": row.op_time, "kind": row.kind.value, "decided_by": by, "messages": row.count,
                   "refused": row.refused, "standing": standing}  # fmt: skip


def _settling_of_archived(decisions: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same of the decisions that are kept of a half batch that has left. They say how many messages and not which.
    A reopen takes back the newest that it can have named."""
    standing = [d["count"] for d in decisions]
    for at, reopen in enumerate(decisions):
        rest = reopen["count"] if reopen["kind"] == Kind.REOPEN.value else 0
        for before in reversed(range(at)):
            if rest and _takes_back(reopen, decisions[before]):
                less = min(rest, standing[before])
                standing[before] -= less
                rest -= less
    for d, count in zip(decisions, standing, strict=True):
        if d["kind"] != Kind.REOPEN.value:
            yield {"at": d["at"], "kind": d["kind"], "decided_by": d["decided_by"], "messages": d["count"],
                   "refused": d["refused"], "standing": count}  # fmt: skip


def _takes_back(reopen: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether a reopen can name rows of a decision: under the next attempt what never happened, else of the same
    attempt what nobody knew, and by a person any rollback (see :meth:`Ledger.reopen` and :meth:`Ledger.overrule`)."""
    kind, by = before["kind"], before["decided_by"]
    if reopen["attempt"] == before["attempt"] + 1:
        return bool(kind == Kind.ROLLBACK.value and by == Who.CHECK.value and not before["refused"])
    if reopen["attempt"] != before["attempt"]:
        return False
    by_person = reopen["decided_by"] == Who.ADMIN.value
    return bool(
        kind == Kind.QUARANTINE.value or (kind == Kind.ROLLBACK.value and (by_person or by == Who.DISCARD.value))
    )


def rolled_back_again(state: BatchState) -> Iterator[tuple[datetime | None, RowSet]]:
    """When rows of a half batch were rolled back that had been rolled back before, and which: a reopen came between."""
    seen = {n: bytearray(file.rows) for n, file in state.files.items()}
    for row in state.history:
        if row.kind is Kind.ROLLBACK:
            named = {n: bytearray(len(bits)) for n, bits in seen.items()}
            for file_no, first, end in _spans(state, row):
                named[file_no][first:end] = seen[file_no][first:end]
                seen[file_no][first:end] = b"\x01" * (end - first)
            if again := RowSet(named):
                yield row.op_time, again


def _spans(state: BatchState, row: OpRow) -> Iterator[tuple[int, int, int]]:
    """The rows that an op row names: file number, first and end."""
    for file_no, file in state.files.items():
        if row.file_no in (None, file_no):
            for first, last in row.ranges or ((0, file.rows - 1),):
                yield file_no, first, last + 1


# ---------------------------------------------------------------- messages that appeared
def placed(log: Engine, since: datetime, period_s: int) -> pa.Table:
    """How many messages appeared since a time, by topic and period. Those that have expired are not counted.

    Parameters
    ----------
    log : Engine
    since : datetime
        With a time zone.
    period_s : int
        Seconds of a period. Periods begin at multiples of it since 1970.

    Returns
    -------
    pyarrow.Table
        ``topic, at`` (when the period begins) ``, messages``, in no order.
    """
    log.refresh()
    log.drained.border()
    parts = _drained(log, since, period_s)
    for rows, _ in log.placements(log.drained.position + 1):
        parts.append(_by_period(rows["topic"], rows["op_time"], rows["count"], since, period_s))
    sums = pa.concat_tables(parts).group_by(["topic", "at"], use_threads=False).aggregate([("messages", "sum")])
    return sums.rename_columns(["topic", "at", "messages"])


def _drained(log: Engine, since: datetime, period_s: int) -> list[pa.Table]:
    table = log.messages_table
    files = table.actions()
    first, last = (files[f"{side}.commit_timestamp"] for side in ("min", "max"))
    topic = files["min.topic"]
    since_us = pa.scalar(since, TIMESTAMP)
    files = files.filter(pc.fill_null(pc.greater_equal(last, since_us), True))
    first, last = (files[f"{side}.commit_timestamp"] for side in ("min", "max"))
    topic = files["min.topic"]
    in_one = pc.and_(pc.equal(topic, files["max.topic"]), pc.equal(_period(first, period_s), _period(last, period_s)))
    in_one = pc.and_(in_one, pc.and_(pc.greater_equal(first, since_us), pc.is_valid(files["num_records"])))
    in_one = pc.fill_null(in_one, False)
    whole = files.filter(in_one)
    parts = [_by_period(whole["min.topic"], whole["min.commit_timestamp"], whole["num_records"], since, period_s)]
    for path in files.filter(pc.invert(in_one))["path"].to_pylist():
        rows = table.read([path], ["topic", "commit_timestamp"])
        one = pa.chunked_array([pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)])
        parts.append(_by_period(rows["topic"], rows["commit_timestamp"], one, since, period_s))
    return parts


def _by_period(
    topic: pa.ChunkedArray, at: pa.ChunkedArray, messages: pa.ChunkedArray, since: datetime, period_s: int
) -> pa.Table:
    rows = pa.table({"topic": topic, "at": pc.cast(at, TIMESTAMP), "messages": messages})
    rows = rows.filter(pc.greater_equal(rows["at"], pa.scalar(since, TIMESTAMP)))
    rows = rows.set_column(1, "at", pc.cast(_period(rows["at"], period_s), TIMESTAMP))
    sums = rows.group_by(["topic", "at"], use_threads=False).aggregate([("messages", "sum")])
    return sums.rename_columns(["topic", "at", "messages"])


def _period(at: pa.ChunkedArray, period_s: int) -> pa.ChunkedArray:
    """When the period begins that has a time: microseconds since 1970."""
    us, step = pc.cast(pc.cast(at, TIMESTAMP), pa.int64()), period_s * 1_000_000
    return pc.multiply(pc.divide(us, step), step)


def first_drained(log: Engine, since: datetime) -> datetime | None:
    """When the first message was committed that is drained and not older than a time, about: a file that has messages
    of before says that time itself. None when there is none."""
    files = log.messages_table.actions()
    since_us = pa.scalar(since, TIMESTAMP)
    late = files.filter(pc.greater_equal(files["max.commit_timestamp"], since_us))
    first: datetime | None = pc.min(late["min.commit_timestamp"]).as_py()
    return None if first is None else max(first, since)


def sizes(log: Engine) -> pa.Table:
    """What the table ``messages`` holds of each topic: ``topic, messages, bytes``. A topic without drained messages is
    not there."""
    log.messages_table.refresh()
    files = log.messages_table.actions()
    sums = files.group_by("min.topic", use_threads=False).aggregate([("num_records", "sum"), ("size_bytes", "sum")])
    return sums.rename_columns(["topic", "messages", "bytes"])


# ---------------------------------------------------------------- what is open
def open_now(log: Engine) -> pa.Table:
    """Half batches with pending messages, oldest first: ``half_id, prepared_at, messages`` (pending ones). No half file
    is read for it, so it is quick when many are open."""
    with log.lock:
        half_ids = log.open_half_ids()
        prepared = log.ledger.prepared()
        net = settled_rows(log.ledger.followed.rows)
        reopened = log.ledger.followed.reopened_rows()
    ms: list[int | None] = []
    messages: list[int] = []
    for half_id in half_ids:
        batch = prepared.get(half_id)
        ms.append(None if batch is None else batch.ms)
        messages.append(reopened.get(half_id, 0) if batch is None else batch.rows - net.get(half_id, 0))
    columns: Sequence[object] = [
        pa.array(half_ids, pa.string()),
        pc.cast(pc.multiply(pa.array(ms, pa.int64()), 1000), TIMESTAMP),
        pc.max_element_wise(pa.array(messages, pa.int64()), 1) if messages else pa.array([], pa.int64()),
    ]
    return pa.table(columns, schema=OPEN_SCHEMA)
