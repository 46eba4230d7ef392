"""A report as one page of HTML, which contains scripts and figures and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark import __version__
from rmq_spark._core.inspect.diagnosis import Diagnosis
from rmq_spark._core.inspect.find import transactions_of
from rmq_spark._core.report import charts
from rmq_spark._core.report.charts import Drawn
from rmq_spark._core.report.components import (
    ROWS_MAX,
    STYLE,
    Column,
    asset,
    escape,
    framed,
    listed,
    script,
    sha256,
)
from rmq_spark._core.report.drawing import scripts
from rmq_spark._core.report.live_page import TRANSACTIONS_MAX, half_batch, home
from rmq_spark._core.report.report_figures import Figures, findings_of
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.text import byte_size, duration

if TYPE_CHECKING:
    from rmq_spark._core.inspect.trace import Trace


@dataclass(frozen=True)
class Card:
    """A card of the page: a chart, its explanation, and its numbers as a table, where no other card has them."""

    name: str
    title: str
    hint: str
    drawn: Drawn | None
    nothing: str
    table: str = ""
    wide: bool = False


def page(
    figures: Figures, trace: Trace | None = None, diagnosis: Diagnosis | None = None, advice: Sequence[str] = ()
) -> str:
    """Return the report as HTML: the live page as it was, and charts of what happened until then.

    Parameters
    ----------
    figures : Figures
    trace : Trace, optional
        The transaction whose steps and messages are shown.
    diagnosis : Diagnosis, optional
        As for :func:`findings_of`.
    advice : sequence of str
        What a person can do next about the transaction, a sentence each.
    """
    diagnosis = diagnosis or Diagnosis(figures.now)
    cards = _cards(figures)
    main = home(figures, findings_of(figures, diagnosis), diagnosis.typed, "".join(map(_card, cards)), has_links=False)
    steps = ""
    if trace is not None:
        transactions = transactions_of(figures.now.engine, trace, TRANSACTIONS_MAX)
        steps = half_batch(trace, transactions, advice, figures.span.until, has_links=False)
    chart_specs = {card.name: _spec(card.drawn) for card in cards if card.drawn is not None}
    bundle = script(scripts())
    own_script = script(asset("page.js"))
    allowed = " ".join(f"'sha256-{sha256(script)}'" for script in (bundle, own_script))
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    name = redacted(figures.path)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="rmq_spark {__version__}">
<title>Commit log {escape(name)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header>
<p class="kind">Report of a commit log</p>
<h1>{escape(name)}</h1>
<p class="when">{_when(figures)}</p>
</header>
<main>{main}{steps}</main>
<footer>
<p>A half batch is what one micro-batch, batch write or send stored together; it has one transaction or several. Nobody
sees its messages before they have a verdict. Times are UTC.</p>
<p>Made by rmq_spark {__version__} on {figures.span.until:%Y-%m-%d at %H:%M:%S} UTC. The page needs no network.</p>
</footer>
<script type="application/json" id="charts">{_json(chart_specs)}</script>
<script>{bundle}</script>
<script>{own_script}</script>
</body>
</html>
"""


# ---------------------------------------------------------------- parts
def _when(figures: Figures) -> str:
    span = figures.span
    length = duration((span.until - span.since).total_seconds())
    columns = "" if figures.is_empty else f", a column for each {charts.period(span)}"
    return f"{_time(span.since)} to {_time(span.until)} UTC: {length}{columns}"


def _time(at: datetime) -> str:
    return f"{at.day} {at:%b %Y, %H:%M}"


def _card(card: Card) -> str:
    if card.drawn is None:
        content = f'<p class="nothing">{escape(card.nothing)}</p>'
    else:
        marks = "".join(
            f'<li><svg viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" rx="3" fill="{colour}"/>'
            f"</svg>{escape(word)}</li>"
            for word, colour in card.drawn.legend
        )
        legend = f'<ul class="legend">{marks}</ul>' if len(card.drawn.legend) > 1 else ""
        numbers = (
            '<details><summary>The numbers</summary><div class="scroll" tabindex="0" role="region" '
            f'aria-label="{escape(card.title)}: the numbers">{card.table}</div></details>'
        )
        content = f'{legend}<div class="chart" id="{card.name}"></div>{numbers if card.table else ""}'
    return framed(card.title, card.hint, content, card.wide)


# ---------------------------------------------------------------- cards
def _cards(figures: Figures) -> list[Card]:
    span, topics = figures.span, charts.largest_topics(figures.now.topics.values())
    per = charts.period(span)
    return [
        Card(
            "throughput",
            "Messages that appeared",
            f"Committed messages at the time when readers could see them, by topic, each {per}.",
            charts.throughput(figures.throughput, span) if figures.throughput.num_rows else None,
            "No message appeared in this time.",
            _over_time(figures.throughput, "topic", "messages"),
            wide=True,
        ),
        Card(
            "verdicts",
            "Verdicts",
            f"What became of half messages, each {per}.",
            charts.verdicts(figures.verdicts, span) if figures.verdicts.num_rows else None,
            "No verdict was given in this time.",
            _over_time(figures.verdicts, "verdict", "messages"),
        ),
        Card(
            "checks",
            "Checks",
            f"What listeners answered about half batches that were left open, each {per}.",
            charts.checks(figures.checks, span) if figures.checks.num_rows else None,
            "No check was needed in this time.",
            _over_time(figures.checks, "verdict", "batches"),
        ),
        Card(
            "pending",
            "Pending now, by age",
            "Messages that have no verdict yet. A check should settle them within minutes.",
            charts.pending(figures.now.pending) if figures.now.pending else None,
            "Nothing is pending.",
        ),
        Card(
            "lag",
            "Lag of consumer groups",
            "Messages that a group has not read, and how long the oldest has waited.",
            charts.lag(figures.now.groups) if figures.now.groups else None,
            "No consumer group reads from this commit log.",
        ),
        Card(
            "largest",
            "Largest half batches",
            "Of those that were settled in this time, by messages.",
            charts.largest(figures.largest) if figures.largest.num_rows else None,
            "No half batch was settled in this time.",
            _batches_table(figures.largest),
        ),
        Card(
            "slowest",
            "Slowest half batches",
            "The time from the prepare to the last verdict.",
            charts.slowest(figures.slowest) if figures.slowest.num_rows else None,
            "No half batch was settled in this time.",
            _batches_table(figures.slowest),
        ),
        Card(
            "topics",
            "Topics",
            "What the table messages holds of each topic.",
            charts.topics(topics) if any(topic["bytes"] for topic in topics) else None,
            "Nothing has been copied into the table messages yet: upkeep does that."
            if topics
            else "There is no topic yet.",
            _topics_table(topics),
            wide=True,
        ),
    ]


def _over_time(figures: pa.Table, by: str, value: str) -> str:
    """Return a table of periods, with a column for each word."""
    words = sorted(set(figures[by].to_pylist()))
    values_by_time: dict[datetime, dict[str, int]] = {}
    for row in figures.to_pylist():
        values_by_time.setdefault(row["at"], {})[row[by]] = row[value]
    columns = [Column("from (UTC)", lambda r: f"{r[0]:%Y-%m-%d %H:%M:%S}")]
    columns += [Column(w, lambda r, w=w: f"{r[1].get(w, 0):,}", "number") for w in words]  # type: ignore[misc]
    return listed(list(values_by_time.items()), columns, len(values_by_time))


def _batches_table(batches: pa.Table) -> str:
    columns = [
        Column("half batch", lambda r: r["half_id"], "id"),
        Column("producer group", lambda r: r["producer_group"] or ""),
        Column("messages", lambda r: f"{r['messages']:,}", "number"),
        Column("took", lambda r: duration(r["seconds"]), "number"),
        Column("settled (UTC)", lambda r: f"{r['settled_at']:%Y-%m-%d %H:%M:%S}"),
    ]
    return listed(batches.to_pylist(), columns, batches.num_rows)


def _topics_table(topics: Sequence[Mapping[str, Any]]) -> str:
    columns = [
        Column("topic", lambda r: r["topic"]),
        Column("queues", lambda r: f"{r['queues']}{' (FIFO)' if r['fifo'] else ''}", "number"),
        Column("committed", lambda r: f"{r['committed']:,}", "number"),
        Column("expired", lambda r: f"{r['expired']:,}", "number"),
        Column("in messages", lambda r: f"{r['drained']:,}", "number"),
        Column("size", lambda r: byte_size(r["bytes"]), "number"),
        Column("kept for", lambda r: "ever" if r["retention_s"] is None else duration(r["retention_s"]), "number"),
    ]
    return listed(topics[:ROWS_MAX], columns, len(topics))


# ---------------------------------------------------------------- inlined content
def _spec(drawn: Drawn) -> dict[str, Any]:
    """Return a chart's spec for the page: as wide as its card, in the page's colours, without a title."""
    spec: dict[str, Any] = drawn.chart.to_dict()
    for name in ("config", "$schema", "title"):
        spec.pop(name, None)
    if drawn.legend:  # the page has its own legend, which folds on a phone
        spec["encoding"]["color"]["legend"] = None
    return {**spec, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
