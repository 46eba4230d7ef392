"""The charts of a report, drawn by Altair from its figures. A chart has a few hundred rows at most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.inspect.limits import LAG_S_MAX, PENDING_S_CRITICAL, PENDING_S_MAX
from rmq_spark._core.report.drawing import altair
from rmq_spark._core.report.over_time import (
    ANSWERS,
    BY_CHECK,
    BY_POLICY,
    COMMITTED,
    DEAD_LETTERS,
    OTHERS,
    RETRIES,
    ROLLED_BACK,
    UNKNOWN,
    VERDICTS,
)
from rmq_spark._core.report.span import Span
from rmq_spark._core.vocabulary.text import amount, byte_size, count_of, duration, plural

if TYPE_CHECKING:
    from rmq_spark._core.report.drawing import Chart

GREEN, ORANGE, BROWN, OLIVE, RED, GREY = "#0f9b78", "#dd7411", "#905f40", "#8f7a00", "#d8324a", "#868d98"
"""The colours of states, on all charts."""
BLUE, MAGENTA, CYAN, VIOLET = "#3d84c6", "#c24bb5", "#1497b8", "#8541e9"
"""The colours of topics; the first one is also that of what has neither state nor topic. All colours have a contrast of
at least 3 to 1 on white and dark pages."""
TOPIC_COLOURS = (BLUE, MAGENTA, CYAN, VIOLET)
WORD_COLOURS: Mapping[str, str] = {
    COMMITTED: GREEN,
    ROLLED_BACK: ORANGE,
    BY_CHECK: BROWN,
    BY_POLICY: RED,
    UNKNOWN: GREY,
    RETRIES: OLIVE,
    OTHERS: GREY,
    DEAD_LETTERS: RED,
}
AGES = (
    (10.0, "under 10 s", GREY),
    (60.0, "under 1 min", GREY),
    (PENDING_S_MAX, "under 10 min", GREY),
    (PENDING_S_CRITICAL, "under 1 h", ORANGE),
    (86400.0, "under 1 day", RED),
    (math.inf, "1 day or more", RED),
)
"""Pending messages by age: less seconds than these, in words, and the colour."""
BARS_MAX = 12
"""The most bars of one chart: consumer groups, topics."""
TICKS = 5
EXACT_MAX = 10_000
"""Smaller numbers on an axis are written out."""
NAME_CHARS_MAX = 18
HEIGHT = 220
BAR_HEIGHT, TWO_LINES_HEIGHT = 26, 36
WIDTH = 520
"""The width of a chart in a notebook. On the page a chart is as wide as its card."""


@dataclass(frozen=True)
class Drawn:
    """A chart, and the meaning of its colours."""

    chart: Chart
    legend: Sequence[tuple[str, str]] = ()


# ---------------------------------------------------------------- over time
def throughput(figures: pa.Table, span: Span) -> Drawn:
    """Draw the messages that became visible, by topic."""
    sums = figures.group_by("topic", use_threads=False).aggregate([("messages", "sum")])
    largest = sums.sort_by([("messages_sum", "descending"), ("topic", "ascending")])["topic"].to_pylist()
    user_topics = [topic for topic in largest if topic not in WORD_COLOURS]
    legend = [
        *zip(user_topics, TOPIC_COLOURS, strict=False),
        *((word, colour) for word, colour in WORD_COLOURS.items() if word in largest),
    ]
    description = f"Messages that appeared, by topic and {period(span)}"
    return _columns(figures, "topic", "messages", legend, span, "message", description)


def verdicts(figures: pa.Table, span: Span) -> Drawn:
    """Draw the messages that got a verdict."""
    legend = _legend(figures, VERDICTS)
    description = f"Messages that got a verdict, by verdict and {period(span)}"
    return _columns(figures, "verdict", "messages", legend, span, "message", description)


def checks(figures: pa.Table, span: Span) -> Drawn:
    """Draw the half batches that checks asked about, by answer."""
    legend = _legend(figures, ANSWERS)
    description = f"Half batches that a check asked about, by answer and {period(span)}"
    return _columns(figures, "verdict", "batches", legend, span, "half batch", description)


def period(span: Span) -> str:
    """Return the period of one column: ``hour``, ``10 minutes``."""
    length_s, unit = next((length_s, unit) for length_s, unit in _UNITS if span.period_s % length_s == 0)
    count = span.period_s // length_s
    return unit if count == 1 else f"{count} {unit}s"


_UNITS = ((7 * 86400, "week"), (86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def _legend(figures: pa.Table, words: Sequence[str]) -> list[tuple[str, str]]:
    present = set(pc.unique(figures["verdict"]).to_pylist())
    return [(word, WORD_COLOURS[word]) for word in words if word in present]


def _columns(
    figures: pa.Table,
    by: str,
    value: str,
    legend: Sequence[tuple[str, str]],
    span: Span,
    noun: str,
    description: str,
) -> Drawn:
    alt = altair()
    unit = plural(noun)
    names = [name for name, _ in legend]
    rows = []
    heights: dict[datetime, int] = {}
    rank = {name: at for at, name in enumerate(names)}
    for row in sorted(figures.to_pylist(), key=lambda row: rank[row[by]]):
        at, low = row["at"], heights.get(row["at"], 0)
        heights[at] = low + row[value]
        end = at + timedelta(seconds=span.period_s)
        rows.append(
            {
                "at": _ms(at),
                "end": _ms(end),
                "what": row[by],
                "low": low,
                "high": heights[at],
                "when": f"{at:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S}",
                "amount": count_of(row[value], noun),
                "said": f"{row[by]}, {at:%Y-%m-%d %H:%M:%S}: {count_of(row[value], noun)}",
            }
        )
    # Columns without height extend the axis over the whole span, even where nothing happened.
    ends = (_ms(span.period_start(span.since)), _ms(span.until))
    rows += [{"at": at, "end": at, "what": name, "low": 0, "high": 0} for at in ends for name in names[:1]]
    highest = max(heights.values(), default=0)
    chart = (
        alt.Chart(alt.Data(values=rows), title=description, description=description, width=WIDTH, height=HEIGHT)
        .mark_rect(xOffset=0.5, x2Offset=-0.5)
        .encode(
            x=alt.X("at:T", title=None, scale=alt.Scale(type="utc", nice=False), axis=_time_axis(alt)),
            x2="end:T",
            y=alt.Y(
                "low:Q",
                title=unit,
                axis=alt.Axis(
                    format=",d" if highest < EXACT_MAX else "~s",
                    labelExpr="datum.value ? datum.label : '0'",
                    **_whole_ticks(highest),
                ),
            ),
            y2="high:Q",
            color=alt.Color(
                "what:N",
                scale=alt.Scale(domain=names, range=[colour for _, colour in legend]),
                legend=alt.Legend(title=None, orient="top"),
            ),
            description="said:N",
            tooltip=[
                alt.Tooltip("what:N", title=by),
                alt.Tooltip("amount:N", title=unit),
                alt.Tooltip("when:N", title="when (UTC)"),
            ],
        )
    )
    return Drawn(chart, legend)


def _whole_ticks(most: int) -> dict[str, Any]:
    """Return whole numbers for an axis. Vega puts halves on a short axis, and rounds them to equal labels."""
    return {"values": list(range(most + 1))} if most < TICKS else {"tickCount": TICKS}


def _time_axis(alt: Any) -> Any:
    return alt.Axis(grid=False, labelOverlap=True, labelSeparation=10, tickCount=6, labelExpr=_TIME_LABEL)


_TIME_LABEL = (
    "utcseconds(datum.value) ? utcFormat(datum.value, '%H:%M:%S') : "
    "utchours(datum.value) || utcminutes(datum.value) ? utcFormat(datum.value, '%H:%M') : "
    "utcFormat(datum.value, '%e %b')"
)


def _ms(at: datetime) -> int:
    """Return a time for Vega. Scales get no explicit domain of times, which Vega cannot read where eval is
    forbidden."""
    return int(at.timestamp() * 1000)


# ---------------------------------------------------------------- now
def pending(batches: Iterable[Mapping[str, Any]]) -> Drawn:
    """Draw the messages of pending half batches by age."""
    messages, count = Counter[str](), Counter[str]()
    for batch in batches:
        age = next(name for limit_s, name, _ in AGES if batch["age_seconds"] < limit_s)
        messages[age] += batch["messages"] or 1
        count[age] += 1
    rows = [
        {
            "name": age,
            "value": messages[age],
            "label": count_of(messages[age], "message") if messages[age] else "0",
            "colour": colour,
            "more": count_of(count[age], "half batch"),
        }
        for _, age, colour in AGES
    ]
    return _bars(rows, "Pending messages by age", "age", "half batches", [age for _, age, _ in AGES])


def lag(groups: Iterable[Mapping[str, Any]]) -> Drawn:
    """Draw the lag of consumer groups, the furthest behind first."""
    rows = []
    for group in sorted(groups, key=lambda group: (-group["lag"], group["consumer_group"]))[:BARS_MAX]:
        age = duration(group["lag_seconds"])
        rows.append(
            {
                "name": group["consumer_group"],
                "value": group["lag"],
                "label": f"{amount(group['lag'])}, {age}" if group["lag"] else "up to date",
                "colour": ORANGE if group["lag_seconds"] > LAG_S_MAX else BLUE,
                "more": f"{count_of(group['lag'], 'message')}; the oldest was committed {age} ago",
            }
        )
    return _bars(rows, "Messages that consumer groups have not read", "consumer group", "behind")


def largest(figures: pa.Table) -> Drawn:
    """Draw the half batches with the most messages."""
    rows = [_batch_row(row, row["messages"], amount(row["messages"])) for row in figures.to_pylist()]
    return _bars(rows, "Half batches with the most messages", "half batch", "what", labels=_TWO_LINES)


def slowest(figures: pa.Table) -> Drawn:
    """Draw the half batches that waited longest for their last verdict."""
    rows = [_batch_row(row, row["seconds"], duration(row["seconds"])) for row in figures.to_pylist()]
    return _bars(
        rows, "Half batches that waited longest for their last verdict", "half batch", "what", labels=_TWO_LINES
    )


def largest_topics(topics: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return topics, the largest first."""
    return sorted(topics, key=lambda topic: (-topic["bytes"], -topic["committed"], topic["topic"]))


def topics(figures: Iterable[Mapping[str, Any]]) -> Drawn:
    """Draw the sizes of topics in the table messages."""
    rows = [
        {
            "name": row["topic"],
            "value": row["bytes"],
            "label": byte_size(row["bytes"]),
            "colour": BLUE,
            "more": f"{count_of(row['drained'], 'message')}, {byte_size(row['bytes'])}",
        }
        for row in largest_topics(figures)[:BARS_MAX]
    ]
    return _bars(rows, "Bytes of topics in the table messages", "topic", "holds")


def _batch_row(row: Mapping[str, Any], value: float, label: str) -> dict[str, Any]:
    group = row["producer_group"] or "unknown group"
    if len(group) > NAME_CHARS_MAX:
        group = f"{group[: NAME_CHARS_MAX - 1]}…"
    return {
        "name": f"{group}\n{row['settled_at']:%d %b %H:%M:%S}\n{row['half_id']}",
        "id": row["half_id"],
        "value": value,
        "label": label,
        "colour": BLUE,
        "more": f"{count_of(row['messages'], 'message')} of {row['producer_group'] or 'an unknown group'}, settled "
        f"after {duration(row['seconds'])}, on {row['settled_at']:%Y-%m-%d %H:%M:%S} UTC",
    }


def _bars(
    rows: Sequence[dict[str, Any]],
    description: str,
    what: str,
    more: str,
    order: Sequence[str] | None = None,
    labels: str | None = None,
) -> Drawn:
    """Draw horizontal bars, each with its name before it and its value after it. ``labels`` makes the names of bars
    that have an ``id``, too."""
    alt = altair()
    rows = [{"id": row["name"], **row} for row in rows]
    rows = [{**row, "said": f"{row['id']}: {row['label']}"} for row in rows]
    longest = max((row["value"] for row in rows), default=0)
    names = list(order or [row["name"] for row in rows])
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y(
            "name:N",
            title=None,
            sort=names,
            axis=alt.Axis(domain=False, ticks=False, labelPadding=8, labelExpr=labels or _SHORT_LABEL),
        ),
        # Leaves room for the value after the longest bar.
        x=alt.X("value:Q", axis=None, scale=alt.Scale(domain=[0, longest * 1.75 if longest else 1], nice=False)),
        description="said:N",
        tooltip=[
            alt.Tooltip("id:N", title=what),
            alt.Tooltip("more:N", title=more),
        ],
    )
    bars = base.mark_bar(cornerRadiusEnd=3, height={"band": 0.62}).encode(
        color=alt.Color("colour:N", scale=None, legend=None)
    )
    values = base.mark_text(align="left", dx=6, baseline="middle").encode(text="label:N")
    height = max(1, len(rows)) * (BAR_HEIGHT if labels is None else TWO_LINES_HEIGHT)
    chart = alt.layer(bars, values).properties(title=description, description=description, width=WIDTH, height=height)
    return Drawn(chart)


_SHORT_LABEL = (
    f"length(datum.label) > {NAME_CHARS_MAX} ? slice(datum.label, 0, {NAME_CHARS_MAX // 2 - 1}) + '…' + "
    f"slice(datum.label, -{NAME_CHARS_MAX // 2}) : datum.label"
)
"""Cuts out the middle."""
_TWO_LINES = "slice(split(datum.label, '\\n'), 0, 2)"
"""The producer group, and the time of the last verdict. The half id makes the name unique, and is not shown."""
