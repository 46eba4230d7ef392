"""The figures of a commit log, read from its tables. This module writes nothing, and needs no Prometheus.

A :class:`LogWatch` follows the log. It reads each op row once, and an open half batch again only after a new decision
on it. So the cost of a look depends on new rows, not on the log's size. Totals follow from offsets.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.inspect.group_lag import QueueOffset, commit_times, queue_lags, retained_letters
from rmq_spark._core.inspect.history import rolled_back_again
from rmq_spark._core.inspect.standing import TableFigures, by_topic, table_figures
from rmq_spark._core.inspect.undrained import Undrained
from rmq_spark._core.log.batch_state import RowState
from rmq_spark._core.log.op import DECIDING, OpKind, Who, ranges_of
from rmq_spark._core.log.op_walk import rows_above
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.table import live_paths
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import HalfBatchNotFoundError, TxmqError

LOOKS_MAX = 500
"""The most half batches that one look reads. The next look reads others, and earlier ones stay known."""
OP_ROWS_MAX = 200_000
"""The most op rows that one look reads."""
UNDRAINED_BYTES = 1 << 50
LAG_LOOKS_MAX = 500
"""The most queues for which one look reads the commit time of the next message."""
COLUMNS = ("version", "op_time", "kind", "half_id", "file_no", "ranges", "count", "decided_by")
CHECKED_BY = (Who.CHECK.value, Who.DISCARD.value)


class OpenBatches(NamedTuple):
    """The open half batches of one producer group: their number, and the oldest one's age."""

    half_batches: int
    oldest_s: float


class Lag(NamedTuple):
    """A consumer group's lag in a topic: messages, and seconds since the oldest of them was committed."""

    messages: int
    seconds: float


@dataclass(frozen=True)
class LogFigures:
    """The figures of a commit log at one moment.

    Attributes
    ----------
    at : datetime
        By this machine's clock.
    topics : mapping of str to bool
        Topics, and which of them are FIFO topics.
    placed, expired : mapping of str to int
        By topic, messages that became visible since the log was made, and expired ones of them.
    half_messages : mapping of str to int
        Pending messages by topic.
    pending : mapping of str to OpenBatches
        By producer group.
    not_looked_at : int
        Pending half batches that were not read yet.
    quarantined : mapping of str to int
        Messages by producer group.
    conflicts : int
        Half batches in conflict.
    delayed, ordered : int
        Committed messages that wait for their time, or for an earlier one of their sharding key.
    rolled_back : mapping of str to int
        Messages by topic, since the watch began. The topic is ``""`` where it is no longer known.
    decided : mapping of (str, str) to int
        Messages by kind of decision and by decider, since the watch began.
    last_check : datetime or None
        The time of the last check's answer in ``op``.
    undrained_messages, undrained_bytes, publish_lag_s
        Visible messages that are not in the table ``messages``, and the age of the oldest of them.
    lags : mapping of (str, str) to Lag
        By consumer group and topic.
    tables : mapping of str to TableFigures
    """

    at: datetime
    topics: Mapping[str, bool] = field(default_factory=dict)
    placed: Mapping[str, int] = field(default_factory=dict)
    expired: Mapping[str, int] = field(default_factory=dict)
    half_messages: Mapping[str, int] = field(default_factory=dict)
    pending: Mapping[str, OpenBatches] = field(default_factory=dict)
    not_looked_at: int = 0
    quarantined: Mapping[str, int] = field(default_factory=dict)
    conflicts: int = 0
    delayed: int = 0
    ordered: int = 0
    rolled_back: Mapping[str, int] = field(default_factory=dict)
    decided: Mapping[tuple[str, str], int] = field(default_factory=dict)
    last_check: datetime | None = None
    undrained_messages: int = 0
    undrained_bytes: int = 0
    publish_lag_s: float = 0.0
    lags: Mapping[tuple[str, str], Lag] = field(default_factory=dict)
    tables: Mapping[str, TableFigures] = field(default_factory=dict)

    @property
    def oldest_pending_s(self) -> float:
        """Seconds since the oldest pending half batch was prepared; 0 when none is pending."""
        return max((group.oldest_s for group in self.pending.values()), default=0.0)

    def lag_of(self, consumer_group: str) -> Lag:
        """Return a group's lag over all its topics."""
        group_lags = [lag for (group, _), lag in self.lags.items() if group == consumer_group]
        return Lag(sum(lag.messages for lag in group_lags), max((lag.seconds for lag in group_lags), default=0.0))

    def dead_letters(self) -> dict[str, int]:
        """Return by consumer group the letters in its dead letter topic since the log was made."""
        return retained_letters({topic: self.placed.get(topic, 0) for topic in self.topics}, {})


class _HalfBatch(NamedTuple):
    """A half batch's figures, valid until the next decision on it in ``op``."""

    producer_group: str
    prepared_at: datetime
    pending: Mapping[str, int]
    quarantined: int


class _OpenFigures(NamedTuple):
    """The part of the figures about open half batches."""

    half_messages: Mapping[str, int]
    pending: Mapping[str, OpenBatches]
    not_looked_at: int
    quarantined: Mapping[str, int]


@dataclass
class _Seen:
    """The state of one handle on the log. A new handle starts with a new state."""

    engine: Engine
    position: int
    undrained: Undrained
    half_batches: dict[str, _HalfBatch] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    """Half batches in ``half_batches`` with decisions in ``op`` since they were read."""
    maybe_quarantined: set[str] = field(default_factory=set)
    reopened: set[str] = field(default_factory=set)
    """Half batches that were reopened, and may be rolled back again."""
    times: dict[QueueOffset, datetime] = field(default_factory=dict)


class LogWatch:
    """Reads the figures of a commit log repeatedly. One thread at a time may use it.

    Parameters
    ----------
    log : CommitLog or path
        The watch reads it through its own handles, so no sender and no reader waits for it.
    storage_options : mapping, optional
        For a path: passed to delta-rs.
    """

    def __init__(
        self, log: CommitLog | Engine | str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
    ) -> None:
        engine = engine_of(log, storage_options)
        self.path, self.runtime = engine.path, engine.runtime
        self._engine = engine
        self._seen: _Seen | None = None
        self._log_id, self._position = engine.id, engine.refresh()
        self._rolled_back: Counter[str] = Counter()
        self._decided: Counter[tuple[str, str]] = Counter()
        self._last_check: datetime | None = None

    def look(self) -> LogFigures:
        """Read new rows, and return the figures.

        After an exception the next look opens the log again, and continues this one's counts.
        """
        try:
            reach("look begins")
            return self._look()
        except BaseException:
            self._seen = None
            raise

    def _look(self) -> LogFigures:
        if self._seen is None:
            self._seen = self._open()
        seen, engine = self._seen, self._seen.engine
        engine.refresh()
        self._follow(seen)
        topics, fifo = engine.topics(), engine.topic_store.known().fifo
        tails, firsts, waiting = engine.tails(refresh=False), engine.firsts(refresh=False), engine.ledger.view.waiting
        now = engine.runtime.now()
        open_figures = self._open_figures(seen, now)
        amount = seen.undrained.look(UNDRAINED_BYTES)
        tables = table_figures(engine)
        delayed = sum(count for counts in waiting.values() for due, count in counts.items() if due is not None)
        return LogFigures(
            at=now,
            topics={name: name in fifo for name in topics},
            placed=by_topic(tails),
            expired=by_topic(firsts),
            conflicts=len(engine.ledger.view.conflicts),
            delayed=delayed,
            ordered=sum(count for counts in waiting.values() for count in counts.values()) - delayed,
            rolled_back=dict(self._rolled_back),
            decided=dict(self._decided),
            last_check=self._last_check,
            undrained_messages=amount.messages,
            undrained_bytes=amount.bytes,
            publish_lag_s=seen.undrained.seconds(),
            lags=self._lags(seen, tails, firsts, topics, now) if "groups" in tables else {},
            tables=tables,
            half_messages=open_figures.half_messages,
            pending=open_figures.pending,
            not_looked_at=open_figures.not_looked_at,
            quarantined=open_figures.quarantined,
        )

    # ------------------------------------------------------------------ following op
    def _open(self) -> _Seen:
        engine = self._engine.another()
        head = engine.refresh()
        if self._log_id != engine.id or self._position > head:  # another log replaced this one: all its rows are new
            self._log_id, self._position, self._last_check = engine.id, -1, None
        seen = _Seen(engine, self._position, Undrained(self._engine.another()))
        # Read earlier rows too: quarantines, reopens and the last answer of a check may be old.
        where = (pc.field("kind").isin([OpKind.QUARANTINE.value, OpKind.REOPEN.value, OpKind.CHECK.value])) | (
            pc.field("decided_by").isin(list(CHECKED_BY))
        )
        with engine.lock:
            paths = live_paths(engine.op_table)
            rows = engine.op_table.read(paths, ["kind", "half_id", "op_time", "decided_by"], where)
        self._note(seen, rows)
        return seen

    def _note(self, seen: _Seen, rows: pa.Table) -> None:
        """Record the quarantines, reopens and checks among op rows."""
        quarantined = rows.filter(pc.equal(rows["kind"], OpKind.QUARANTINE.value))
        seen.maybe_quarantined.update(pc.unique(quarantined["half_id"]).to_pylist())
        seen.reopened.update(pc.unique(rows.filter(pc.equal(rows["kind"], OpKind.REOPEN.value))["half_id"]).to_pylist())
        by_check = pc.fill_null(pc.is_in(rows["decided_by"], value_set=pa.array(CHECKED_BY)), False)
        answered = rows.filter(pc.or_(by_check, pc.equal(rows["kind"], OpKind.CHECK.value)))
        newest = pc.max(answered["op_time"]).as_py()
        if newest is not None and (self._last_check is None or newest > self._last_check):
            self._last_check = newest

    def _follow(self, seen: _Seen) -> None:
        """Read the new op rows."""
        with seen.engine.lock:
            head = seen.engine.op_table.version
            if head <= seen.position:
                return
            rows, end = rows_above(seen.engine.op_table, seen.position, head, OP_ROWS_MAX, COLUMNS)
        self._note(seen, rows)
        deciding = rows.filter(pc.is_in(rows["kind"], value_set=pa.array(sorted(DECIDING))))
        left = rows.filter(pc.equal(rows["kind"], OpKind.ARCHIVED.value))  # upkeep may have pruned what decided it
        for changed in (deciding, left):
            seen.changed.update(pc.unique(changed["half_id"]).to_pylist())
        sums = deciding.group_by(["kind", "decided_by"], use_threads=False).aggregate([("count", "sum")])
        decided = Counter({(r["kind"], r["decided_by"] or ""): int(r["count_sum"]) for r in sums.to_pylist()})
        rolled_back = self._countby_topic(seen.engine, rows.filter(pc.equal(rows["kind"], OpKind.ROLLBACK.value)))
        rolled_back -= _count_repeated(seen, rows)
        if end == head:  # a half batch that is settled now needs another reopen first
            seen.reopened.intersection_update(seen.engine.open_half_ids())
        # Position and counts advance together: rows that are read twice after an exception would be counted twice.
        seen.position = self._position = end
        self._decided += decided
        self._rolled_back += rolled_back

    @staticmethod
    def _countby_topic(engine: Engine, rows: pa.Table) -> Counter[str]:
        """Return by topic the number of messages that op rows without a topic name."""
        counts: Counter[str] = Counter()
        records = {}
        for half_id in pc.unique(rows["half_id"]).to_pylist()[:LOOKS_MAX]:
            with suppress(TxmqError):  # the half batch has left
                records[half_id] = engine.get(half_id)
        for row in rows.select(["half_id", "file_no", "ranges", "count"]).to_pylist():
            record, uncounted = records.get(row["half_id"]), int(row["count"])
            files = () if record is None else record.files.items()
            for file_no, file in files:
                if row["file_no"] not in (None, file_no):
                    continue
                ranges = ranges_of(row["ranges"]) or ((0, file.rows - 1),)
                for segment in file.segments:
                    count = sum(max(0, min(b, segment.last) - max(a, segment.first) + 1) for a, b in ranges)
                    counts[segment.topic] += count
                    uncounted -= count
            counts[""] += uncounted
        return +counts

    # ------------------------------------------------------------------ open half batches
    def _open_figures(self, seen: _Seen, now: datetime) -> _OpenFigures:
        open_ids = seen.engine.open_half_ids()
        half_ids = dict.fromkeys([*open_ids, *seen.maybe_quarantined])
        seen.half_batches = {
            half_id: known_batches for half_id, known_batches in seen.half_batches.items() if half_id in half_ids
        }
        seen.changed.intersection_update(seen.half_batches)
        unread = [half_id for half_id in half_ids if half_id not in seen.half_batches]
        for half_id in [*unread, *(h for h in half_ids if h in seen.changed)][:LOOKS_MAX]:
            seen.changed.discard(half_id)
            with suppress(TxmqError):  # a check reports an unreadable half batch
                half_batch = _half_batch(seen.engine, half_id)
                if half_batch is not None:
                    seen.half_batches[half_id] = half_batch
                else:
                    seen.half_batches.pop(half_id, None)
                    seen.maybe_quarantined.discard(half_id)
        seen.maybe_quarantined = {
            h for h in seen.maybe_quarantined if h not in seen.half_batches or seen.half_batches[h].quarantined
        }
        known_batches = [seen.half_batches[half_id] for half_id in open_ids if half_id in seen.half_batches]
        pending = [batch for batch in known_batches if batch.pending]
        groups: dict[str, list[datetime]] = {}
        for batch in pending:
            groups.setdefault(batch.producer_group, []).append(batch.prepared_at)
        for file in seen.engine.ledger.unreadable:  # nobody knows whose half batches it has
            groups.setdefault("", []).append(datetime.fromtimestamp(file.ms / 1000, timezone.utc))
        quarantined: Counter[str] = Counter()
        for batch in seen.half_batches.values():
            quarantined[batch.producer_group] += batch.quarantined
        half_messages: Counter[str] = Counter()
        for batch in pending:
            half_messages.update(batch.pending)
        ages = {group: max(0.0, (now - min(times)).total_seconds()) for group, times in groups.items()}
        return _OpenFigures(
            half_messages=dict(half_messages),
            pending={group: OpenBatches(len(times), ages[group]) for group, times in groups.items()},
            not_looked_at=len(open_ids) - len(known_batches),
            quarantined=dict(+quarantined),
        )

    # ------------------------------------------------------------------ consumer groups
    def _lags(
        self,
        seen: _Seen,
        tails: Mapping[Queue, int],
        firsts: Mapping[Queue, int],
        topics: Mapping[str, int],
        now: datetime,
    ) -> dict[tuple[str, str], Lag]:
        lags: dict[tuple[str, str], Lag] = {}
        rows = seen.engine.groups.rows().select(["consumer_group", "topic", "queue_id", "next_offset"]).to_pylist()
        for row in queue_lags(rows, topics, tails, firsts, now, partial(_known_times, seen)):
            key = (row["consumer_group"], row["topic"])
            lag = lags.get(key, Lag(0, 0.0))
            lags[key] = Lag(lag.messages + row["lag"], max(lag.seconds, row["lag_seconds"]))
        return lags


def _known_times(seen: _Seen, behind: set[QueueOffset]) -> Mapping[QueueOffset, datetime]:
    """Return the commit times of the messages at these offsets. They never change, so each is read once."""
    seen.times = {offset: seen.times[offset] for offset in behind if offset in seen.times}
    seen.times |= commit_times(seen.engine, sorted(behind - seen.times.keys())[:LAG_LOOKS_MAX])
    return seen.times


def _count_repeated(seen: _Seen, rows: pa.Table) -> Counter[str]:
    """Return by topic the number of messages that these op rows roll back once more, which a counter must not count
    twice."""
    rolled_back = rows.filter(pc.equal(rows["kind"], OpKind.ROLLBACK.value))
    of_reopened = rolled_back.filter(
        pc.is_in(rolled_back["half_id"], value_set=pa.array(list(seen.reopened), pa.string()))
    )
    counts: Counter[str] = Counter()
    for half_id in pc.unique(of_reopened["half_id"]).to_pylist()[:LOOKS_MAX]:
        with suppress(TxmqError):  # the half batch has left
            record = seen.engine.get(half_id)
            times = set(of_reopened.filter(pc.equal(of_reopened["half_id"], half_id))["op_time"].to_pylist())
            for rolled_back_at, repeated in rolled_back_again(seen.engine.state_of(record, refresh=False)):
                for file_no, bits in repeated.items() if rolled_back_at in times else ():
                    for segment in record.files[file_no].segments:
                        counts[segment.topic] += bits.count(1, segment.first, segment.last + 1)
    return +counts


def _half_batch(engine: Engine, half_id: str) -> _HalfBatch | None:
    """Return a half batch's figures; None when it has left."""
    try:
        record = engine.get(half_id)
        state = engine.state_of(record, refresh=False)
    except HalfBatchNotFoundError:
        return None
    pending: Counter[str] = Counter()
    quarantined = 0
    for file_no, file in record.files.items():
        for segment in file.segments:
            states = state.files[file_no].state[segment.first : segment.last + 1]
            pending[segment.topic] += states.count(RowState.PENDING)
            quarantined += states.count(RowState.QUARANTINED)
    return _HalfBatch(record.header.producer_group, record.prepared_at, dict(+pending), quarantined)
