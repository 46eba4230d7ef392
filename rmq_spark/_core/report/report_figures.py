"""The figures of a report, aggregated with Arrow. Their size does not depend on the number of transactions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.inspect.diagnosis import Diagnosis
from rmq_spark._core.inspect.finding import Finding, Level
from rmq_spark._core.inspect.history import History, first_drained, history_since, placed
from rmq_spark._core.inspect.standing import Standing
from rmq_spark._core.log.op import OpKind
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.report import over_time
from rmq_spark._core.report.span import SINCE, Span
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.errors import HalfBatchNotFoundError

LISTED_MAX = 10
"""The most rows of a list: of the largest, slowest or oldest half batches."""
FINDINGS_MAX = 12
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
LATELY = pa.schema(
    [
        ("half_id", pa.string()),
        ("producer_group", pa.string()),
        ("at", TIMESTAMP),
        ("age_seconds", pa.float64()),
        ("decided_by", pa.string()),
        ("messages", pa.int64()),
        ("reasons", pa.int64()),
        ("reason", pa.string()),
    ]
)


class Lately(NamedTuple):
    """Half batches that got a verdict: their number, and the newest: ``half_id, producer_group, at, age_seconds,
    decided_by, messages, reasons`` (how many different ones) and ``reason`` (one of them)."""

    total: int
    newest: pa.Table


@dataclass(frozen=True)
class Figures:
    """The figures of a report.

    Attributes
    ----------
    path : str
        The commit log.
    span : Span
        The report's time.
    throughput : pyarrow.Table
        ``at, topic, messages``: messages that became visible, by period and topic.
    verdicts : pyarrow.Table
        ``at, verdict, messages, batches``: by period and verdict, messages and half batches.
    checks : pyarrow.Table
        The same columns for the results of checks.
    now : Standing
        How the log stands at the end of the span.
    pending, quarantined, conflicts : list of dict
        The first half batches of each of these lists of ``now``, with the ``reason`` that was last given; quarantined
        ones also with the last ``answer`` of a check, which is None when it is no longer known.
    committed_lately, rolled_back_lately : Lately
        Half batches that got this verdict in the span.
    appeared : pyarrow.Table
        ``topic, messages, last``: messages that became visible in the span, and when the newest was committed.
    largest, slowest : pyarrow.Table
        Half batches that were settled in the span: ``half_id, producer_group, prepared_at, settled_at, messages`` and
        ``seconds`` from the prepare to the last verdict.
    settled : int
        Half batches that got a verdict in the span.
    dead_letters : int
        Messages that became dead letters in the span.
    """

    path: str
    span: Span
    throughput: pa.Table
    verdicts: pa.Table
    checks: pa.Table
    now: Standing
    pending: list[dict[str, Any]]
    quarantined: list[dict[str, Any]]
    conflicts: list[dict[str, Any]]
    committed_lately: Lately
    rolled_back_lately: Lately
    appeared: pa.Table
    largest: pa.Table
    slowest: pa.Table
    settled: int
    dead_letters: int

    @property
    def committed(self) -> int:
        """Messages that became visible in the span, without retries and dead letters, which are copies."""
        copies = pc.is_in(self.throughput["topic"], value_set=pa.array([over_time.RETRIES, over_time.DEAD_LETTERS]))
        return _sum(self.throughput.filter(pc.invert(copies))["messages"])

    @property
    def rolled_back(self) -> int:
        """Messages that were rolled back in the span."""
        rollbacks = pa.array([over_time.ROLLED_BACK, over_time.BY_CHECK])
        return _sum(self.verdicts.filter(pc.is_in(self.verdicts["verdict"], value_set=rollbacks))["messages"])

    @property
    def pending_messages(self) -> int:
        """Pending messages."""
        return sum(row["messages"] or 1 for row in self.now.pending)

    @property
    def is_empty(self) -> bool:
        """True when nothing is pending and nothing happened in the span."""
        return not (self.throughput.num_rows or self.verdicts.num_rows or self.checks.num_rows or self.pending_messages)


def figures_of(log: CommitLog | Engine | str | os.PathLike[str], since: str = SINCE) -> Figures:
    """Return the figures of a commit log.

    Parameters
    ----------
    log : CommitLog or path
        Read through a separate handle, so that users of this one need not wait.
    since : str
        How far back: ``"7d"``, ``"12h"``.

    Raises
    ------
    OptionError
        When ``since`` is no duration, or is not positive.
    """
    engine = engine_of(log).another()
    history, span = look_back(engine, Span.of(engine, since))
    settled = _settled(history)
    placed_counts = placed(engine, span.since, span.period_s)
    visible = over_time.by_large_topics(placed_counts)
    now = Standing(engine).read()
    waiting = (now.pending, now.quarantined, now.conflicts)
    pending, quarantined, conflicts = now.with_reasons(*(rows[:LISTED_MAX] for rows in waiting))
    answers = now.last_answers([row["half_id"] for row in quarantined])
    return Figures(
        path=engine.path,
        span=span,
        throughput=visible,
        verdicts=over_time.verdicts(history, span),
        checks=over_time.checks(history, span),
        now=now,
        pending=pending,
        quarantined=[{**row, "answer": answers.get(row["half_id"], (None, None))[1]} for row in quarantined],
        conflicts=conflicts,
        committed_lately=_lately(engine, history, OpKind.COMMIT, span),
        rolled_back_lately=_lately(engine, history, OpKind.ROLLBACK, span),
        appeared=_by_topic(placed_counts),
        largest=listed(engine, settled, "messages"),
        slowest=listed(engine, settled, "seconds"),
        settled=settled.num_rows,
        dead_letters=_sum(visible.filter(pc.equal(visible["topic"], over_time.DEAD_LETTERS))["messages"]),
    )


def findings_of(figures: Figures, diagnosis: Diagnosis | None = None) -> list[Finding]:
    """Return the findings, the most urgent first. The first is the headline; there is at least one.

    Parameters
    ----------
    figures : Figures
    diagnosis : Diagnosis, optional
        Of ``figures.now``, when it is not the default one.
    """
    diagnosis = diagnosis or Diagnosis(figures.now)
    return diagnosis.problems(FINDINGS_MAX) or [_all_is_well(figures, diagnosis)]


def _all_is_well(figures: Figures, diagnosis: Diagnosis) -> Finding:
    if not figures.now.topics:
        remedy = f"Make one: {diagnosis.command('topic create', 'NAME')}"
        return Finding("log", Level.OK, "This commit log is new: it has no topic yet.", remedy)
    if figures.is_empty:
        return Finding("log", Level.OK, "Nothing was sent in this time, and nothing is pending.")
    count = figures.pending_messages
    are = f"{'is' if count == 1 else 'are'} pending, none for long"
    pending = f"{count_of(count, 'message')} {are}" if count else "nothing is pending"
    appeared = count_of(figures.committed, "message")
    what = f"All is well: {appeared} appeared, {pending}, and nothing waits for a person."
    return Finding("log", Level.OK, what)


def look_back(engine: Engine, span: Span) -> tuple[History, Span]:
    """Return the history in a span, and the span from the first event in it."""
    history = history_since(engine, span.since)
    engine.messages_table.refresh()
    firsts = (pc.min(history.events["at"]).as_py(), first_drained(engine, span.since))
    return history, span.around(min((first for first in firsts if first is not None), default=None))


def settled_in(engine: Engine, span: Span) -> pa.Table:
    """Return half batches that got a verdict in a span: ``half_id, producer_group, prepared_at, settled_at, messages,
    seconds``. The group is null for a half batch that is still in ``half``."""
    return _settled(history_since(engine, span.since))


def _settled(history: History) -> pa.Table:
    kinds = pa.array([OpKind.COMMIT.value, OpKind.ROLLBACK.value])
    decided = pc.and_(pc.is_in(history.events["kind"], value_set=kinds), pc.greater(history.events["standing"], 0))
    decisions = history.events.filter(decided)
    last = decisions.group_by("half_id", use_threads=False).aggregate([("at", "max")])
    settled = last.join(history.batches, "half_id", join_type="inner", use_threads=False)
    return pa.table(
        {
            "half_id": settled["half_id"],
            "producer_group": settled["producer_group"],
            "prepared_at": settled["prepared_at"],
            "settled_at": settled["at_max"],
            "messages": settled["messages"],
            "seconds": _seconds(settled["prepared_at"], settled["at_max"]),
        }
    )


def _seconds(begin: pa.ChunkedArray, end: pa.ChunkedArray | pa.Scalar) -> pa.ChunkedArray:
    """Return the seconds between times, at least 0: the times may come from two clocks."""
    us = pc.subtract(pc.cast(end, pa.int64()), pc.cast(begin, pa.int64()))
    seconds = pc.divide(pc.cast(us, pa.float64()), 1e6)
    return pc.if_else(pc.less(seconds, 0.0), 0.0, seconds)


def listed(engine: Engine, settled: pa.Table, by: str) -> pa.Table:
    """Return the settled half batches with the largest values of the column ``by``, with their producer groups."""
    order = [(by, "descending"), ("settled_at", "descending"), ("half_id", "ascending")]
    top = settled.take(pc.select_k_unstable(settled, LISTED_MAX, order)) if settled.num_rows else settled
    rows = top.select(["half_id", "producer_group"]).to_pylist()
    groups = [row["producer_group"] or _group(engine, row["half_id"]) for row in rows]
    top = top.set_column(top.column_names.index("producer_group"), "producer_group", pa.array(groups, pa.string()))
    return top.select(LISTED.names).cast(LISTED)


def _lately(engine: Engine, history: History, kind: OpKind, span: Span) -> Lately:
    events = history.events
    events = events.filter(pc.and_(pc.equal(events["kind"], kind.value), pc.greater(events["standing"], 0)))
    told = [("at", "max"), ("standing", "sum"), ("decided_by", "max"), ("reason", "count_distinct"), ("reason", "max")]
    batches = events.group_by("half_id", use_threads=False).aggregate(told)
    order = [("at_max", "descending"), ("half_id", "ascending")]
    newest = batches.take(pc.select_k_unstable(batches, LISTED_MAX, order)) if batches.num_rows else batches
    groups = history.batches.filter(pc.is_in(history.batches["half_id"], value_set=newest["half_id"].combine_chunks()))
    group_of = dict(zip(groups["half_id"].to_pylist(), groups["producer_group"].to_pylist(), strict=True))
    half_ids = newest["half_id"].to_pylist()
    columns: dict[str, object] = {
        "half_id": newest["half_id"],
        "producer_group": pa.array([group_of.get(name) or _group(engine, name) for name in half_ids], pa.string()),
        "at": newest["at_max"],
        "age_seconds": _seconds(newest["at_max"], pa.scalar(span.until, TIMESTAMP)),
        "decided_by": newest["decided_by_max"],
        "messages": newest["standing_sum"],
        "reasons": newest["reason_count_distinct"],
        "reason": newest["reason_max"],
    }
    return Lately(batches.num_rows, pa.table(columns, schema=LATELY))


def _by_topic(placed_counts: pa.Table) -> pa.Table:
    """Return counts of messages that became visible, the largest first: ``topic, messages, last``."""
    sums = placed_counts.group_by("topic", use_threads=False).aggregate([("messages", "sum"), ("last", "max")])
    return sums.rename_columns(["topic", "messages", "last"]).sort_by(
        [("messages", "descending"), ("topic", "ascending")]
    )


def _group(engine: Engine, half_id: str) -> str | None:
    """Return the producer group of a half batch in ``half``; None when it has left since it was counted."""
    try:
        return engine.get(half_id).header.producer_group
    except HalfBatchNotFoundError:
        return None


def _sum(numbers: pa.ChunkedArray) -> int:
    return int(pc.sum(numbers).as_py() or 0)
