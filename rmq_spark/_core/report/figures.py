"""The figures of a report, summed up with Arrow: their size does not follow the number of transactions."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.inspect import overview
from rmq_spark._core.inspect.history import Told, first_drained, open_now, told
from rmq_spark._core.log.op import Kind
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.report import over_time, standing
from rmq_spark._core.report.span import SINCE, Span
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark.errors import HalfBatchNotFoundError

LISTED_MAX = 10
"""Rows of a list: the largest, the slowest, the oldest."""
LISTED = pa.schema(
    [
        ("half_id", pa.string()),
        ("producer_group", pa.string()),
        ("prepared_at", TIMESTAMP),
        ("settled_at", TIMESTAMP),
        ("messages", pa.int64()),
        ("seconds", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Figures:
    """What a report shows.

    Attributes
    ----------
    path : str
        The commit log.
    span : Span
        The time that it is about.
    throughput : pyarrow.Table
        ``at, topic, messages``: messages that appeared, by period and topic.
    verdicts : pyarrow.Table
        ``at, verdict, messages, batches``: by period and verdict, messages and half batches.
    checks : pyarrow.Table
        The same of what checks made of half batches.
    ages : pyarrow.Table
        ``age, messages, batches``: what is pending.
    pending : pyarrow.Table
        The oldest pending half batches: ``half_id, producer_group, prepared_at, messages, seconds, check_times,
        leased``.
    lag : pyarrow.Table
        ``group, messages, seconds, topics``, the furthest behind first.
    largest, slowest : pyarrow.Table
        Half batches that were settled in the time: ``half_id, producer_group, prepared_at, settled_at, messages`` and
        ``seconds`` from the prepare to the last verdict.
    topics : pyarrow.Table
        ``topic, queues, fifo, retention_s, committed, expired, drained, bytes``, the largest first.
    settled : int
        Half batches that got a verdict in the time.
    quarantined, conflicts : tuple of str
        Half batches that wait for a person.
    dead_letters : int
        Messages that became dead letters in the time.
    dead_letters_waiting : int
        Dead letters that are kept, and that nobody has sent again.
    undrained_s : float
        For so many seconds the oldest committed message has not been in the table messages.
    """

    path: str
    span: Span
    throughput: pa.Table
    verdicts: pa.Table
    checks: pa.Table
    ages: pa.Table
    pending: pa.Table
    lag: pa.Table
    largest: pa.Table
    slowest: pa.Table
    topics: pa.Table
    settled: int
    quarantined: tuple[str, ...]
    conflicts: tuple[str, ...]
    dead_letters: int
    dead_letters_waiting: int
    undrained_s: float

    @property
    def committed(self) -> int:
        """Messages that appeared in the time, without retries and dead letters, which are copies."""
        copies = pc.is_in(self.throughput["topic"], value_set=pa.array([over_time.RETRIES, over_time.DEAD_LETTERS]))
        return _sum(self.throughput.filter(pc.invert(copies))["messages"])

    @property
    def rolled_back(self) -> int:
        """Messages that were rolled back in the time, by whomever."""
        wanted = pa.array([over_time.ROLLED_BACK, over_time.BY_CHECK])
        return _sum(self.verdicts.filter(pc.is_in(self.verdicts["verdict"], value_set=wanted))["messages"])

    @property
    def pending_messages(self) -> int:
        """Messages that are pending now."""
        return _sum(self.ages["messages"])

    @property
    def is_empty(self) -> bool:
        """True when nothing was ever sent, or all of it long before the time."""
        return not (self.throughput.num_rows or self.verdicts.num_rows or self.checks.num_rows or self.pending_messages)


def figures_of(log: CommitLog | Engine | str | os.PathLike[str], since: str = SINCE) -> Figures:
    """The figures of a commit log.

    Parameters
    ----------
    log : CommitLog or path
        It is read by a handle of its own, so that those who use this one need not wait.
    since : str
        How far back: ``"7d"``, ``"12h"``.

    Raises
    ------
    OptionError
        When ``since`` is no duration, or no time at all.
    """
    log = engine_of(log).another()
    happened, span = look_back(log, Span.of(log, since))
    settled = _settled(happened)
    open_batches = open_now(log)
    appeared = over_time.throughput(log, span)
    dead = pc.equal(appeared["topic"], over_time.DEAD_LETTERS)
    return Figures(
        path=log.path,
        span=span,
        throughput=appeared,
        verdicts=over_time.verdicts(happened, span),
        checks=over_time.checks(happened, span),
        ages=standing.ages(open_batches, span.until),
        pending=standing.pending(log, open_batches.slice(0, LISTED_MAX), span.until),
        lag=standing.lag(log),
        largest=listed(log, settled, "messages"),
        slowest=listed(log, settled, "seconds"),
        topics=standing.topics(log),
        settled=settled.num_rows,
        quarantined=tuple(dict.fromkeys(overview.quarantined(log)["half_id"].to_pylist())),
        conflicts=tuple(overview.conflicts(log)),
        dead_letters=_sum(appeared.filter(dead)["messages"]),
        dead_letters_waiting=standing.dead_letters_waiting(log),
        undrained_s=standing.undrained_s(log, span.until),
    )


def look_back(log: Engine, span: Span) -> tuple[Told, Span]:
    """What ``op`` tells of a time, and that time from the first thing on that happened in it."""
    happened = told(log, span.since)
    log.messages_table.refresh()
    firsts = (pc.min(happened.events["at"]).as_py(), first_drained(log, span.since))
    return happened, span.around(min((first for first in firsts if first is not None), default=None))


def settled_in(log: Engine, span: Span) -> pa.Table:
    """Half batches that got a verdict in a time: ``half_id, producer_group, prepared_at, settled_at, messages,
    seconds``. The group of one that is still in ``half`` is null."""
    return _settled(told(log, span.since))


def _settled(happened: Told) -> pa.Table:
    kinds = pa.array([Kind.COMMIT.value, Kind.ROLLBACK.value])
    decided = pc.and_(pc.is_in(happened.events["kind"], value_set=kinds), pc.greater(happened.events["standing"], 0))
    decisions = happened.events.filter(decided)
    last = decisions.group_by("half_id", use_threads=False).aggregate([("at", "max")])
    found = last.join(happened.batches, "half_id", join_type="inner", use_threads=False)
    us = pc.subtract(pc.cast(found["at_max"], pa.int64()), pc.cast(found["prepared_at"], pa.int64()))
    seconds = pc.divide(pc.cast(us, pa.float64()), 1e6)
    return pa.table(
        {
            "half_id": found["half_id"],
            "producer_group": found["producer_group"],
            "prepared_at": found["prepared_at"],
            "settled_at": found["at_max"],
            "messages": found["messages"],
            "seconds": pc.if_else(pc.less(seconds, 0.0), 0.0, seconds),  # by two clocks
        }
    )


def listed(log: Engine, settled: pa.Table, by: str) -> pa.Table:
    """Those with the most of something, with their producer group."""
    order = [(by, "descending"), ("settled_at", "descending"), ("half_id", "ascending")]
    top = settled.take(pc.select_k_unstable(settled, LISTED_MAX, order)) if settled.num_rows else settled
    known = top.select(["half_id", "producer_group"]).to_pylist()
    groups = [one["producer_group"] or _group(log, one["half_id"]) for one in known]
    top = top.set_column(top.column_names.index("producer_group"), "producer_group", pa.array(groups, pa.string()))
    return top.select(LISTED.names).cast(LISTED)


def _group(log: Engine, half_id: str) -> str | None:
    """The producer group of a half batch in ``half``; None when it has left since it was counted."""
    try:
        return log.get(half_id).header.producer_group
    except HalfBatchNotFoundError:
        return None


def _sum(numbers: pa.ChunkedArray) -> int:
    return int(pc.sum(numbers).as_py() or 0)
