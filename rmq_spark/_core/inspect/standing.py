"""How a commit log stands now: the figures of the diagnosis, the live page, the report, and ``txmq``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NamedTuple

import pyarrow.compute as pc

from rmq_spark._core.inspect import unsettled
from rmq_spark._core.inspect.group_lag import commit_times, queue_lags, retained_letters, waiting_letters
from rmq_spark._core.inspect.history import open_now, sizes
from rmq_spark._core.inspect.undrained import Undrained
from rmq_spark._core.log.batch_state import is_leased
from rmq_spark._core.log.heartbeats import Heartbeat, heartbeats
from rmq_spark._core.log.op import OpKind, OpRow, Who
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.verdicts import ROLLBACK_MESSAGE
from rmq_spark.errors import CorruptLogError, HalfBatchLeftError

LOOKED_AT_MAX = 100
"""The most pending half batches, the oldest ones, that a look reads. Of others it knows age and number of messages."""

Row = Mapping[str, Any]


class TableFigures(NamedTuple):
    """A table: its live files, their bytes, and its version."""

    files: int
    bytes: int
    version: int


class NotDrained(NamedTuple):
    """Visible messages that are not in the table ``messages``, and seconds since the oldest one was placed."""

    messages: int
    bytes: int
    seconds: float


class Letters(NamedTuple):
    """Dead letters of a consumer group: those that the log keeps, and those of them that were not sent again."""

    kept: int
    waiting: int


class Standing:
    """The figures of a commit log at one moment. Each is read when it is first asked for, so one that cannot be read
    hides no other.

    Parameters
    ----------
    engine : Engine
        A handle for this thread only.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.at = engine, engine.runtime.now()

    def read(self) -> Standing:
        """Read all figures. One that cannot be read raises."""
        for name, figure in vars(Standing).items():
            if isinstance(figure, cached_property):
                getattr(self, name)
        return self

    # ------------------------------------------------------------------ topics and tables
    @cached_property
    def topics(self) -> dict[str, dict[str, Any]]:
        """By name: ``topic, queues, fifo, retention_s, committed, expired``, and how many messages the table
        ``messages`` has (``drained``), and their ``bytes``."""
        topics, drained = self.engine.topic_store.all(), {row["topic"]: row for row in sizes(self.engine).to_pylist()}
        committed, expired = by_topic(self.engine.tails()), by_topic(self.engine.firsts(refresh=False))
        return {
            name: {
                "topic": name,
                "queues": topic.queues,
                "fifo": topic.fifo,
                "retention_s": topic.retention_s,
                "committed": committed.get(name, 0),
                "expired": expired.get(name, 0),
                "drained": drained[name]["messages"] if name in drained else 0,
                "bytes": drained[name]["bytes"] if name in drained else 0,
            }
            for name, topic in topics.items()
        }

    @cached_property
    def tables(self) -> dict[str, TableFigures]:
        """The tables that there are."""
        return table_figures(self.engine)

    @cached_property
    def undrained(self) -> NotDrained:
        """Visible messages that are not in the table ``messages``."""
        undrained = Undrained(self.engine)
        amount = undrained.look()
        return NotDrained(amount.messages, amount.bytes, undrained.seconds())

    # ------------------------------------------------------------------ half batches
    @cached_property
    def pending(self) -> list[dict[str, Any]]:
        """Pending half batches, the oldest first: the columns of :meth:`CommitLog.pending`, ``age_seconds`` and
        ``leased``. After :data:`LOOKED_AT_MAX` of them the others have id, age and messages alone, and ``leased`` is
        None."""
        rows = self._aged(unsettled.pending(self.engine, LOOKED_AT_MAX).to_pylist())
        known = {row["half_id"] for row in rows}
        unread = {file.path for file in self.engine.ledger.unreadable}  # a row has no id of theirs
        others = [
            row for row in open_now(self.engine).to_pylist()[LOOKED_AT_MAX:] if row["half_id"] not in known | unread
        ]
        names = [*unsettled.PENDING_SCHEMA.names, "leased"]
        return rows + [
            {**dict.fromkeys(names), **row, "age_seconds": age_s(row["prepared_at"], self.at)} for row in others
        ]

    @cached_property
    def quarantined(self) -> list[dict[str, Any]]:
        """The same columns of half batches that checks gave up."""
        return self._aged(unsettled.quarantined(self.engine).to_pylist())

    @cached_property
    def conflicts(self) -> list[dict[str, Any]]:
        """Half batches with two verdicts, and their ``history``: see :func:`conflict_rows`."""
        return self._aged(conflict_rows(self.engine))

    @property
    def pending_batches(self) -> int:
        """The number of pending half batches, each of which may have several rows in ``pending``."""
        return len({row["half_id"] or id(row) for row in self.pending})

    @property
    def oldest_pending_s(self) -> float:
        """Seconds since the oldest pending half batch was prepared; 0 when none is pending."""
        return max((row["age_seconds"] for row in self.pending), default=0.0)

    def _aged(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [
            {**row, "age_seconds": age_s(row["prepared_at"], self.at), "leased": is_leased(row["lease_until"], self.at)}
            for row in rows
        ]

    @cached_property
    def delayed(self) -> dict[datetime, int]:
        """Committed messages that wait for their time, by that time."""
        self.engine.refresh()
        due = Counter[datetime]()
        for counts in self.engine.ledger.view.waiting.values():
            due.update({at: count for at, count in counts.items() if at is not None})
        return dict(due)

    # ------------------------------------------------------------------ consumer groups
    @cached_property
    def queues(self) -> list[dict[str, Any]]:
        """How far each group is behind in each queue: see :func:`queue_lags`."""
        engine = self.engine
        progress = engine.groups.rows().to_pylist() if engine.has_groups() else []  # a look makes no table
        topics, tails, firsts = engine.topics(), engine.tails(), engine.firsts(refresh=False)
        return queue_lags(progress, topics, tails, firsts, self.at, partial(commit_times, engine))

    @cached_property
    def members(self) -> dict[str, dict[str, Heartbeat]]:
        """The newest heartbeats of each group's members."""
        names = dict.fromkeys(row["consumer_group"] for row in self.queues)
        return {name: heartbeats(self.engine.groups.table, name, self.at) for name in names}

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """A row for each group: ``consumer_group, topics, lag, lag_seconds, members`` (those that are alive)
        ``, updated``."""
        return [
            {
                "consumer_group": name,
                "topics": ", ".join(sorted({row["topic"] for row in rows})),
                "lag": sum(row["lag"] for row in rows),
                "lag_seconds": round(max(row["lag_seconds"] for row in rows), 1),
                "members": sum(beat.is_alive for beat in beats.values()),
                "updated": max((row["updated"] for row in rows if row["updated"] is not None), default=None),
            }
            for name, beats in self.members.items()
            if (rows := [row for row in self.queues if row["consumer_group"] == name])
        ]

    @cached_property
    def dead_letters(self) -> dict[str, Letters]:
        """By consumer group, without groups that have none."""
        committed, expired = by_topic(self.engine.tails()), by_topic(self.engine.firsts(refresh=False))
        kept = {group: count for group, count in sorted(retained_letters(committed, expired).items()) if count}
        return {group: Letters(count, waiting_letters(self.engine, group)) for group, count in kept.items()}

    # ------------------------------------------------------------------ words of op
    def last_check(self, half_ids: Sequence[str]) -> datetime | None:
        """Return when a check last said a word on one of these half batches."""
        op_rows = self.engine.ledger.scan(half_ids)
        by_check = op_rows.filter(pc.equal(op_rows["decided_by"], Who.CHECK.value))
        newest: datetime | None = pc.max(by_check["op_time"]).as_py()
        return newest

    def last_answers(self, half_ids: Sequence[str]) -> dict[str, tuple[datetime, str]]:
        """Return when a listener last answered a check of these half batches with UNKNOWN, and with what reason."""
        if not half_ids:
            return {}
        op_rows = self.engine.ledger.scan(half_ids)
        checks = op_rows.filter(pc.and_(pc.equal(op_rows["kind"], OpKind.CHECK.value), pc.is_valid(op_rows["reason"])))
        rows = checks.select(["half_id", "op_time", "reason"]).sort_by("op_time").to_pylist()
        return {row["half_id"]: (row["op_time"], row["reason"]) for row in rows}

    def with_reasons(self, *lists: Sequence[Row]) -> list[list[dict[str, Any]]]:
        """Return lists of half batches with the ``reason`` that ``op`` last gave; of one in conflict, both verdicts."""
        said: dict[str, list[OpRow]] = {row["half_id"]: [] for rows in lists for row in rows if row["half_id"]}
        for fields in self.engine.ledger.scan(list(said)).to_pylist() if said else ():
            said[fields["half_id"]].append(OpRow.of(fields))
        return [[{**row, "reason": _reason(said.get(row["half_id"], ()), row)} for row in rows] for rows in lists]


def _reason(op_rows: Sequence[OpRow], row: Row) -> str | None:
    if row["producer_group"] is None and row["leased"] is not None:
        return "it cannot be read: txmq doctor says more"
    last = next((row for row in reversed(op_rows) if row.kind is OpKind.CONFLICT), None)
    if last is None or last.attempt is None:  # without an attempt, a person has resolved it
        return next((row.reason for row in reversed(op_rows) if row.reason), None)
    counts, late = (OpKind.COMMIT, "ROLLBACK") if last.verdict == str(ROLLBACK_MESSAGE) else (OpKind.ROLLBACK, "COMMIT")
    first = next((row for row in op_rows if row.kind is counts), OpRow(counts))
    why = f" ({first.reason})" if first.reason else ""
    return f"{counts.value.upper()} by {first.decided_by}{why}; too late: {late} by {last.decided_by}"


def conflict_rows(engine: Engine) -> list[dict[str, Any]]:
    """Return a row for each half batch in conflict: ``half_id, producer_group, messages`` (those with two verdicts)
    ``, check_times, prepared_at, lease_until, history`` (its decisions, a sentence each) ``, bytes``."""
    rows: list[dict[str, Any]] = []
    for half_id, record in unsettled.present(engine, unsettled.conflicts(engine)):
        if isinstance(record, CorruptLogError):
            unknown = ("producer_group", "messages", "check_times", "prepared_at", "lease_until", "bytes")
            history = [f"it cannot be read: {record}"]
            rows.append({"half_id": half_id, **dict.fromkeys(unknown), "history": history})
            continue
        try:
            state = engine.state_of(record)
        except HalfBatchLeftError:  # a person has settled it meanwhile
            continue
        rows.append(
            {
                "half_id": half_id,
                "producer_group": record.header.producer_group,
                "messages": state.conflicting().count,
                "check_times": state.check_times(state.conflicting()),
                "prepared_at": record.prepared_at,
                "lease_until": None,
                "history": [
                    f"{op_row.kind} by {op_row.decided_by} (attempt {op_row.attempt or 1}, "
                    f"{op_row.op_time:%Y-%m-%d %H:%M:%S}Z)"
                    for op_row in state.history
                    if op_row.op_time is not None
                ],
                "bytes": engine.half.bytes_of(record),
            }
        )
    return rows


def age_s(time: datetime | None, now: datetime) -> float:
    """Return the seconds since a time, at least 0."""
    return 0.0 if time is None else round(max(0.0, (now - time).total_seconds()), 1)


def by_topic(offsets: Mapping[Queue, int]) -> dict[str, int]:
    """Return the sums of the offsets of each topic's queues."""
    sums = Counter[str]()
    for (topic, _), offset in offsets.items():
        sums[topic] += offset
    return dict(sums)


def table_figures(engine: Engine) -> dict[str, TableFigures]:
    """Return the figures of the tables that there are, read anew."""
    tables = {table.name: table for table in engine.tables()}
    for table in tables.values():
        table.refresh()
    return {
        name: TableFigures(files.num_rows, pc.sum(files["size_bytes"]).as_py() or 0, tables[name].version)
        for name, files in ((name, table.actions()) for name, table in tables.items())
    }
