"""The figures of a commit log, read from its tables. It writes nothing, and needs no Prometheus.

A :class:`LogWatch` follows the log. It reads each op row once, and each open half batch again only after ``op`` decided
something of it. So a look costs what is new, and not what the log holds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.consumers.groups import waiting_since
from rmq_spark._core.inspect.history import rolled_back_again
from rmq_spark._core.inspect.undrained import Undrained
from rmq_spark._core.log.op import Kind, RowState, Who, ranges_of
from rmq_spark._core.log.walk import rows_above
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.vocabulary.message import DLQ_PREFIX
from rmq_spark.errors import HalfBatchNotFoundError, TxmqError

Queue = tuple[str, int]

LOOKS_MAX = 500
"""Half batches that one look reads. The next look reads others; what was read stays known."""
OP_ROWS_MAX = 200_000
"""Op rows that one look reads."""
UNDRAINED_BYTES = 1 << 50
LAG_LOOKS_MAX = 500
"""Queues for which one look finds out when their next message was committed."""
COLUMNS = ("version", "op_time", "kind", "half_id", "file_no", "ranges", "count", "decided_by")
CHECKED_BY = (Who.CHECK.value, Who.DISCARD.value)
DECIDING = (Kind.COMMIT, Kind.ROLLBACK, Kind.QUARANTINE, Kind.REOPEN)


class Open(NamedTuple):
    """What is open of the half batches of one producer group."""

    half_batches: int
    oldest_s: float


class Lag(NamedTuple):
    """How far a consumer group is behind in a topic: messages, and seconds since the oldest of them was committed."""

    messages: int
    seconds: float


class TableFigures(NamedTuple):
    """A table: its live files, their bytes, and its version."""

    files: int
    bytes: int
    version: int


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
        By topic, messages that became visible since the log was made, and those of them that have expired.
    half_messages : mapping of str to int
        Pending messages by topic.
    pending : mapping of str to Open
        By producer group.
    not_looked_at : int
        Pending half batches of which nothing else is known yet.
    quarantined : mapping of str to int
        Messages by producer group.
    conflicts : int
        Half batches.
    delayed, ordered : int
        Committed messages that wait for their time, or for an earlier one of their sharding key.
    rolled_back : mapping of str to int
        Messages by topic, since the watch began; the topic is ``""`` where it is not known any more.
    decided : mapping of (str, str) to int
        Messages by kind of decision and by whom, since the watch began.
    last_check : datetime or None
        When a check last left an answer in ``op``.
    undrained_messages, undrained_bytes, publish_lag_s
        What is visible and not in the table ``messages``, and for how long the oldest of it has been so.
    lags : mapping of (str, str) to Lag
        By consumer group and topic.
    tables : mapping of str to TableFigures
    """

    at: datetime
    topics: Mapping[str, bool] = field(default_factory=dict)
    placed: Mapping[str, int] = field(default_factory=dict)
    expired: Mapping[str, int] = field(default_factory=dict)
    half_messages: Mapping[str, int] = field(default_factory=dict)
    pending: Mapping[str, Open] = field(default_factory=dict)
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
        """How far a group is behind, over all its topics."""
        mine = [lag for (group, _), lag in self.lags.items() if group == consumer_group]
        return Lag(sum(lag.messages for lag in mine), max((lag.seconds for lag in mine), default=0.0))

    def dead_letters(self) -> dict[str, int]:
        """By consumer group, the letters in its dead letter topic since the log was made."""
        return {t.removeprefix(DLQ_PREFIX): self.placed.get(t, 0) for t in self.topics if t.startswith(DLQ_PREFIX)}


class _HalfBatch(NamedTuple):
    """What is known of a half batch until ``op`` decides something new of it."""

    producer_group: str
    prepared_at: datetime
    pending: Mapping[str, int]
    quarantined: int


class _OpenFigures(NamedTuple):
    """The part of the figures that says what is open."""

    half_messages: Mapping[str, int]
    pending: Mapping[str, Open]
    not_looked_at: int
    quarantined: Mapping[str, int]


@dataclass
class _Seen:
    """What one handle on the log has seen. It is made anew with the handle."""

    log: Engine
    position: int
    undrained: Undrained
    half_batches: dict[str, _HalfBatch] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    """Those of them of which ``op`` has decided something since they were read."""
    maybe_quarantined: set[str] = field(default_factory=set)
    reopened: set[str] = field(default_factory=set)
    """Those that were reopened, and may be rolled back again."""
    times: dict[tuple[Queue, int], datetime] = field(default_factory=dict)


class LogWatch:
    """Reads the figures of a commit log, again and again. One thread at a time may use it.

    Parameters
    ----------
    log_or_path : CommitLog or path
        It is read through handles of its own, so no sender and no reader waits for it.
    storage_options : mapping, optional
        For a path: passed to delta-rs.
    """

    def __init__(
        self, log_or_path: CommitLog | Engine | str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
    ) -> None:
        opened = engine_of(log_or_path, storage_options)
        self.path, self.machine = opened.path, opened.machine
        self._log = opened
        self._seen: _Seen | None = None
        self._log_id, self._position = opened.id, opened.refresh()
        self._rolled_back: Counter[str] = Counter()
        self._decided: Counter[tuple[str, str]] = Counter()
        self._last_check: datetime | None = None

    def look(self) -> LogFigures:
        """Read what is new, and return the figures.

        After an exception the next look opens the log again, and goes on counting where this one stood.
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
        seen, log = self._seen, self._seen.log
        log.refresh()
        self._follow(seen)
        topics, fifo = log.topics(), log.topic_store.seen().fifo
        tails, firsts, waiting = log.tails(refresh=False), log.firsts(refresh=False), log.ledger.waiting
        now = log.machine.now()
        what = self._open_figures(seen, now)
        amount = seen.undrained.look(UNDRAINED_BYTES)
        since = seen.undrained.since
        tables = {table.name: table for table in log.tables()}
        for table in tables.values():
            table.refresh()
        delayed = sum(n for counts in waiting.values() for due, n in counts.items() if due is not None)
        return LogFigures(
            at=now,
            topics={name: name in fifo for name in topics},
            placed=_by_topic(tails),
            expired=_by_topic(firsts),
            conflicts=len(log.ledger.conflicts),
            delayed=delayed,
            ordered=sum(n for counts in waiting.values() for n in counts.values()) - delayed,
            rolled_back=dict(self._rolled_back),
            decided=dict(self._decided),
            last_check=self._last_check,
            undrained_messages=amount.messages,
            undrained_bytes=amount.bytes,
            publish_lag_s=0.0 if since is None else max(0.0, (now - since).total_seconds()),
            lags=self._lags(seen, tails, firsts, topics, now) if "groups" in tables else {},
            tables={
                name: TableFigures(
                    table.actions().num_rows, pc.sum(table.actions()["size_bytes"]).as_py() or 0, table.version
                )
                for name, table in tables.items()
            },
            half_messages=what.half_messages,
            pending=what.pending,
            not_looked_at=what.not_looked_at,
            quarantined=what.quarantined,
        )

    # ------------------------------------------------------------------ following op
    def _open(self) -> _Seen:
        log = self._log.another()
        head = log.refresh()
        if self._log_id != log.id or self._position > head:  # another log lies there now: all of it is new
            self._log_id, self._position, self._last_check = log.id, -1, None
        seen = _Seen(log, self._position, Undrained(self._log.another()))
        # What was said before: a quarantine may be old, and so may a reopen and the last answer of a check.
        where = (pc.field("kind").isin([Kind.QUARANTINE.value, Kind.REOPEN.value, Kind.CHECK.value])) | (
            pc.field("decided_by").isin(list(CHECKED_BY))
        )
        with log.lock:
            paths = log.op.actions()["path"].to_pylist()
            rows = log.op.read(paths, ["kind", "half_id", "op_time", "decided_by"], where)
        self._note(seen, rows)
        return seen

    def _note(self, seen: _Seen, rows: pa.Table) -> None:
        """Remember what op rows say of quarantines, reopens and checks."""
        quarantined = rows.filter(pc.equal(rows["kind"], Kind.QUARANTINE.value))
        seen.maybe_quarantined.update(pc.unique(quarantined["half_id"]).to_pylist())
        seen.reopened.update(pc.unique(rows.filter(pc.equal(rows["kind"], Kind.REOPEN.value))["half_id"]).to_pylist())
        by_check = pc.fill_null(pc.is_in(rows["decided_by"], value_set=pa.array(CHECKED_BY)), False)
        answered = rows.filter(pc.or_(by_check, pc.equal(rows["kind"], Kind.CHECK.value)))
        newest = pc.max(answered["op_time"]).as_py()
        if newest is not None and (self._last_check is None or newest > self._last_check):
            self._last_check = newest

    def _follow(self, seen: _Seen) -> None:
        """Read the op rows that are new."""
        with seen.log.lock:
            head = seen.log.version
            if head <= seen.position:
                return
            rows, end = rows_above(seen.log.op, seen.position, head, OP_ROWS_MAX, COLUMNS)
        self._note(seen, rows)
        deciding = rows.filter(pc.is_in(rows["kind"], value_set=pa.array([k.value for k in DECIDING])))
        seen.changed.update(pc.unique(deciding["half_id"]).to_pylist())
        sums = deciding.group_by(["kind", "decided_by"], use_threads=False).aggregate([("count", "sum")])
        decided = Counter({(r["kind"], r["decided_by"] or ""): int(r["count_sum"]) for r in sums.to_pylist()})
        rolled_back = self._topics_of(seen.log, rows.filter(pc.equal(rows["kind"], Kind.ROLLBACK.value)))
        rolled_back -= _topics_again(seen, rows)
        if end == head:  # what is settled by now needs another reopen first
            seen.reopened.intersection_update(seen.log.open_half_ids())
        # Both move together: what is read twice after an exception would be counted twice.
        seen.position = self._position = end
        self._decided += decided
        self._rolled_back += rolled_back

    @staticmethod
    def _topics_of(log: Engine, rows: pa.Table) -> Counter[str]:
        """By topic, how many messages op rows name that do not say their topic."""
        found: Counter[str] = Counter()
        records = {}
        for half_id in pc.unique(rows["half_id"]).to_pylist()[:LOOKS_MAX]:
            with suppress(TxmqError):  # it has left
                records[half_id] = log.get(half_id)
        for row in rows.select(["half_id", "file_no", "ranges", "count"]).to_pylist():
            record, left = records.get(row["half_id"]), int(row["count"])
            files = () if record is None else record.files.items()
            for file_no, file in files:
                if row["file_no"] not in (None, file_no):
                    continue
                ranges = ranges_of(row["ranges"]) or ((0, file.rows - 1),)
                for segment in file.segments:
                    count = sum(max(0, min(b, segment.last) - max(a, segment.first) + 1) for a, b in ranges)
                    found[segment.topic] += count
                    left -= count
            found[""] += left
        return +found

    # ------------------------------------------------------------------ what is open
    def _open_figures(self, seen: _Seen, now: datetime) -> _OpenFigures:
        open_ids = seen.log.open_half_ids()
        wanted = dict.fromkeys([*open_ids, *seen.maybe_quarantined])
        seen.half_batches = {half_id: known for half_id, known in seen.half_batches.items() if half_id in wanted}
        seen.changed.intersection_update(seen.half_batches)
        new = [half_id for half_id in wanted if half_id not in seen.half_batches]
        for half_id in [*new, *(h for h in wanted if h in seen.changed)][:LOOKS_MAX]:
            seen.changed.discard(half_id)
            with suppress(TxmqError):  # it cannot be read: a check reports that
                found = _half_batch(seen.log, half_id)
                if found is not None:
                    seen.half_batches[half_id] = found
                else:
                    seen.half_batches.pop(half_id, None)
                    seen.maybe_quarantined.discard(half_id)
        seen.maybe_quarantined = {
            h for h in seen.maybe_quarantined if h not in seen.half_batches or seen.half_batches[h].quarantined
        }
        known = [seen.half_batches[half_id] for half_id in open_ids if half_id in seen.half_batches]
        pending = [batch for batch in known if batch.pending]
        groups: dict[str, list[datetime]] = {}
        for batch in pending:
            groups.setdefault(batch.producer_group, []).append(batch.prepared_at)
        quarantined: Counter[str] = Counter()
        for batch in seen.half_batches.values():
            quarantined[batch.producer_group] += batch.quarantined
        half_messages: Counter[str] = Counter()
        for batch in pending:
            half_messages.update(batch.pending)
        ages = {group: max(0.0, (now - min(times)).total_seconds()) for group, times in groups.items()}
        return _OpenFigures(
            half_messages=dict(half_messages),
            pending={group: Open(len(times), ages[group]) for group, times in groups.items()},
            not_looked_at=len(open_ids) - len(known),
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
        rows = seen.log.groups.rows().select(["consumer_group", "topic", "queue_id", "next_offset"]).to_pylist()
        known = {(r["consumer_group"], r["topic"], r["queue_id"]): int(r["next_offset"]) for r in rows}
        at = {  # what expired is in nobody's lag
            (group, (topic, queue_id)): max(known.get((group, topic, queue_id), 0), firsts.get((topic, queue_id), 0))
            for group, topic in dict.fromkeys((r["consumer_group"], r["topic"]) for r in rows)
            for queue_id in range(topics.get(topic, 0))
        }
        behind = {(queue, offset) for (_, queue), offset in at.items() if offset < tails.get(queue, 0)}
        self._find_times(seen, behind)
        found: dict[tuple[str, str], Lag] = {}
        for (group, queue), offset in at.items():
            since = seen.times.get((queue, offset)) if (queue, offset) in behind else None
            seconds = 0.0 if since is None else max(0.0, (now - since).total_seconds())
            before = found.get((group, queue[0]), Lag(0, 0.0))
            messages = max(0, tails.get(queue, 0) - offset)
            found[(group, queue[0])] = Lag(before.messages + messages, max(before.seconds, seconds))
        return found

    @staticmethod
    def _find_times(seen: _Seen, behind: Iterable[tuple[Queue, int]]) -> None:
        """Find out when the messages at some offsets were committed. That never changes."""
        seen.times = {place: seen.times[place] for place in behind if place in seen.times}
        new = sorted(place for place in behind if place not in seen.times)[:LAG_LOOKS_MAX]
        while new:  # groups may stand at several offsets of one queue
            round_, later = {}, []
            for queue, offset in new:
                if queue in round_:
                    later.append((queue, offset))
                else:
                    round_[queue] = offset
            for queue, time in waiting_since(seen.log, round_).items():
                seen.times[(queue, round_[queue])] = time
            new = later


def _topics_again(seen: _Seen, rows: pa.Table) -> Counter[str]:
    """By topic, how many messages these op rows roll back that were rolled back before: a counter that counted them
    twice would say more than there are."""
    rolled_back = rows.filter(pc.equal(rows["kind"], Kind.ROLLBACK.value))
    again = rolled_back.filter(pc.is_in(rolled_back["half_id"], value_set=pa.array(list(seen.reopened), pa.string())))
    found: Counter[str] = Counter()
    for half_id in pc.unique(again["half_id"]).to_pylist()[:LOOKS_MAX]:
        with suppress(TxmqError):  # it has left
            record = seen.log.get(half_id)
            times = set(again.filter(pc.equal(again["half_id"], half_id))["op_time"].to_pylist())
            for at, named in rolled_back_again(seen.log.state_of(record, refresh=False)):
                for file_no, bits in named.items() if at in times else ():
                    for segment in record.files[file_no].segments:
                        found[segment.topic] += bits.count(1, segment.first, segment.last + 1)
    return +found


def _half_batch(log: Engine, half_id: str) -> _HalfBatch | None:
    """What is open of a half batch; None for one that has left."""
    try:
        record = log.get(half_id)
        state = log.state_of(record, refresh=False)
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


def _by_topic(offsets: Mapping[Queue, int]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for (topic, _), offset in offsets.items():
        sums[topic] += offset
    return dict(sums)
