"""A report as one page of HTML, which contains scripts and figures and loads nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark import __version__
from rmq_spark._core.report import charts
from rmq_spark._core.report.charts import Drawn
from rmq_spark._core.report.components import (
    ROWS_MAX,
    Column,
    asset,
    escape,
    framed,
    headline,
    script,
    sha256,
    table,
    tiles,
)
from rmq_spark._core.report.drawing import scripts
from rmq_spark._core.report.headline import findings_of
from rmq_spark._core.report.report_figures import Figures
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.text import byte_size, count_of, duration

if TYPE_CHECKING:
    from rmq_spark._core.inspect.trace import Trace


@dataclass(frozen=True)
class Card:
    """A card of the page: a chart, its explanation, and its numbers as a table."""

    name: str
    title: str
    hint: str
    drawn: Drawn | None
    nothing: str
    table: str
    wide: bool = False


def page(figures: Figures, trace: Trace | None = None) -> str:
    """Return the report as HTML.

    Parameters
    ----------
    figures : Figures
    trace : Trace, optional
        The transaction of the timeline.
    """
    cards = _cards(figures, trace)
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
<style>{asset("page.css")}</style>
</head>
<body>
<header>
<p class="kind">Report of a commit log</p>
<h1>{escape(name)}</h1>
<p class="when">{_when(figures)}</p>
</header>
{headline(findings_of(figures))}
{tiles(figures)}
<main class="grid">
{"".join(map(_card, cards))}</main>
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
        content = (
            f'{legend}<div class="chart" id="{card.name}"></div>'
            '<details><summary>The numbers</summary><div class="scroll" tabindex="0" role="region" '
            f'aria-label="{escape(card.title)}: the numbers">{card.table}</div></details>'
        )
    return framed(card.title, card.hint, content, card.wide)


# ---------------------------------------------------------------- cards
def _cards(figures: Figures, trace: Trace | None) -> list[Card]:
    span = figures.span
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
            charts.pending(figures.ages) if figures.pending_messages else None,
            "Nothing is pending.",
            _pending_table(figures.pending),
        ),
        Card(
            "lag",
            "Consumer groups",
            "Messages that a group has not read, and how long the oldest has waited.",
            charts.lag(figures.lag) if figures.lag.num_rows else None,
            "No consumer group reads from this commit log.",
            _lag_table(figures.lag),
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
            charts.topics(figures.topics) if any(figures.topics["bytes"].to_pylist()) else None,
            "Nothing has been copied into the table messages yet: upkeep does that."
            if figures.topics.num_rows
            else "There is no topic yet.",
            _topics_table(figures.topics),
            wide=trace is None,
        ),
        *([] if trace is None else [_timeline(trace)]),
    ]


def _timeline(trace: Trace) -> Card:
    name = trace.transaction_id or trace.message_id or trace.half_id
    outcome = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in trace.outcome.items() if count)
    columns = [
        Column("when (UTC)", lambda event: f"{event['at']:%Y-%m-%d %H:%M:%S.%f}"[:-3]),
        Column("what", lambda event: event["kind"]),
        Column("messages", lambda event: f"{event['messages']:,}", "number"),
        Column("attempt", lambda event: str(event["attempt"] or ""), "number"),
        Column("by", lambda event: event["decided_by"] or ""),
        Column("why", lambda event: event["reason"] or "", "text"),
    ]
    events = [
        {
            **{field: getattr(event, field) for field in ("at", "messages", "attempt", "decided_by", "reason")},
            "kind": str(event.kind),
        }
        for event in trace.events[:ROWS_MAX]
    ]
    group = trace.producer_group or "an unknown group"
    summary = f"{count_of(trace.messages, 'message')} of {group}: {outcome or 'not known'}."
    return Card(
        "timeline",
        f"Timeline of {name}",
        " ".join([summary, *(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in trace.unknown)]),
        charts.timeline(trace) if trace.events else None,
        "Nothing is known of its events any more.",
        table(events, columns),
    )


def _over_time(figures: pa.Table, by: str, value: str) -> str:
    """Return a table of periods, with a column for each word."""
    words = sorted(set(figures[by].to_pylist()))
    values_by_time: dict[datetime, dict[str, int]] = {}
    for row in figures.to_pylist():
        values_by_time.setdefault(row["at"], {})[row[by]] = row[value]
    columns = [Column("from (UTC)", lambda r: f"{r[0]:%Y-%m-%d %H:%M:%S}")]
    columns += [Column(w, lambda r, w=w: f"{r[1].get(w, 0):,}", "number") for w in words]  # type: ignore[misc]
    return table(values_by_time.items(), columns)


def _pending_table(pending: pa.Table) -> str:
    return table(
        pending.to_pylist(),
        [
            Column("half batch", lambda r: r["half_id"], "id"),
            Column("producer group", lambda r: r["producer_group"]),
            Column("messages", lambda r: f"{r['messages']:,}", "number"),
            Column("age", lambda r: duration(r["seconds"]), "number"),
            Column("checks", lambda r: f"{r['check_times']}", "number"),
            Column("", lambda r: "its local transaction runs" if r["leased"] else ""),
        ],
    )


def _lag_table(lag: pa.Table) -> str:
    return table(
        lag.slice(0, ROWS_MAX).to_pylist(),
        [
            Column("consumer group", lambda r: r["group"]),
            Column("behind", lambda r: f"{r['messages']:,}", "number"),
            Column("for", lambda r: duration(r["seconds"]), "number"),
            Column("topics", lambda r: r["topics"], "text"),
        ],
    )


def _batches_table(batches: pa.Table) -> str:
    return table(
        batches.to_pylist(),
        [
            Column("half batch", lambda r: r["half_id"], "id"),
            Column("producer group", lambda r: r["producer_group"] or ""),
            Column("messages", lambda r: f"{r['messages']:,}", "number"),
            Column("took", lambda r: duration(r["seconds"]), "number"),
            Column("settled (UTC)", lambda r: f"{r['settled_at']:%Y-%m-%d %H:%M:%S}"),
        ],
    )


def _topics_table(topics: pa.Table) -> str:
    return table(
        topics.slice(0, ROWS_MAX).to_pylist(),
        [
            Column("topic", lambda r: r["topic"]),
            Column("queues", lambda r: f"{r['queues']}{' (FIFO)' if r['fifo'] else ''}", "number"),
            Column("committed", lambda r: f"{r['committed']:,}", "number"),
            Column("expired", lambda r: f"{r['expired']:,}", "number"),
            Column("in messages", lambda r: f"{r['drained']:,}", "number"),
            Column("size", lambda r: byte_size(r["bytes"]), "number"),
            Column("kept for", lambda r: "ever" if r["retention_s"] is None else duration(r["retention_s"]), "number"),
        ],
    )


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
