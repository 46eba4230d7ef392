"""A half batch as a waterfall: prepare, execute, checks, verdicts, placed; and apart from these, the work of upkeep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rmq_spark._core.inspect.trace import Trace, TraceEvent, TraceKind
from rmq_spark._core.listeners.transaction_listener import NO_LISTENER_FENCE
from rmq_spark._core.report.charts import GREEN, GREY, OLIVE, ORANGE, RED
from rmq_spark._core.report.components import escape
from rmq_spark._core.vocabulary.text import count_of, duration

_VERDICTS = (TraceKind.COMMITTED, TraceKind.ROLLED_BACK, TraceKind.CONFLICT)
_PHASES = {TraceKind.PREPARED: "prepare", TraceKind.CHECKED: "check", TraceKind.PLACED: "placed"}
EVENT_COLOURS: Mapping[str, str] = {
    "committed": GREEN,
    "placed": GREEN,
    "conflict_resolved": GREEN,
    "rolled_back": ORANGE,
    "reopened": OLIVE,
    "quarantined": RED,
    "conflict": RED,
}
"""The colours of events. Others are grey: no message has a state by them."""
BY_UPKEEP = (TraceKind.DRAINED, TraceKind.ARCHIVED)
"""They may come days later. On one axis with them, all before would be a dot."""
EVENTS_MAX = 40
"""The most events in a waterfall. Of more, the first and the last ones are drawn."""
PLACES_MAX = 4


@dataclass(frozen=True)
class Step:
    """A line of the waterfall, from one time to another, both in seconds since the prepare. Without a begin it has no
    bar: nobody knows when it ended. A line of several equal checks has the ends of the earlier ones, too."""

    phase: str
    begin_s: float | None
    end_s: float
    colour: str
    what: str
    earlier_s: tuple[float, ...] = ()


def steps_of(trace: Trace, now: datetime) -> list[Step]:
    """Return the steps of a half batch in order, without those of upkeep."""
    events = [event for event in trace.events if event.kind not in (*BY_UPKEEP, TraceKind.LEASED)]
    start = events[0].at
    steps, previous_s = [], 0.0
    for event in events:
        at_s = max(previous_s, (event.at - start).total_seconds())  # the times come from several clocks
        phase = _PHASES.get(event.kind, "verdict")
        steps.append(Step(phase, previous_s, at_s, EVENT_COLOURS.get(event.kind.value, GREY), _what(event)))
        if event.kind is TraceKind.PREPARED and trace.fence_id != NO_LISTENER_FENCE:
            steps.append(_execute(trace, events, start, now))
        if event.kind is TraceKind.COMMITTED and event.places:
            steps.append(Step("placed", at_s, at_s, EVENT_COLOURS["placed"], _places(event)))
        previous_s = at_s
    return _folded(steps)


def _folded(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with neighbouring checks of one answer on one line."""
    lines: list[Step] = []
    for step in steps:
        last = lines[-1] if lines else None
        if last is not None and step.phase == "check" and (step.phase, step.what) == (last.phase, last.what):
            lines[-1] = replace(last, end_s=step.end_s, earlier_s=(*last.earlier_s, last.end_s))
        else:
            lines.append(step)
    return [replace(line, what=_many(line)) if line.earlier_s else line for line in lines]


def _many(line: Step) -> str:
    span = f"from {duration(line.earlier_s[0])} to {duration(line.end_s)}"
    return f"{len(line.earlier_s) + 1:,} × {line.what}, {span}"


def _execute(trace: Trace, events: Sequence[TraceEvent], start: datetime, now: datetime) -> Step:
    verdict = next((e for e in events if e.decided_by == "execute" and e.kind in _VERDICTS), None)
    colour = GREY
    if verdict is not None:
        return Step("execute", 0.0, (verdict.at - start).total_seconds(), colour, "until its verdict")
    if trace.lease_until is not None:
        what = f"its local transaction runs; the lease ends at {trace.lease_until:%H:%M:%S} UTC"
        return Step("execute", 0.0, (now - start).total_seconds(), colour, what)
    return Step("execute", None, 0.0, colour, "no verdict came from its local transaction")


def _what(event: TraceEvent) -> str:
    by = f" by {event.decided_by}" if event.decided_by else ""
    word = "UNKNOWN" if event.kind is TraceKind.CHECKED else event.word.replace("_", " ")
    if event.kind is TraceKind.CONFLICT:
        word = f"{event.verdict}, too late,"
    elif event.kind is TraceKind.RESOLVED:
        word = f"conflict resolved: {event.verdict or 'the first verdict'} counts"
    attempt = f", attempt {event.attempt}" if event.attempt and event.attempt > 1 else ""
    reason = f": {reason_of(event)}" if reason_of(event) else ""
    places = f" ({_places(event)})" if event.kind is TraceKind.PLACED and event.places else ""
    return f"{word}{by}, {count_of(event.messages, 'message')}{attempt}{places}{reason}"


def reason_of(event: TraceEvent) -> str:
    """Return an event's reason, unless it says only in other words that a verdict came too late."""
    reason = event.reason or ""
    return "" if event.verdict and reason.startswith(event.verdict) else reason


def _places(event: TraceEvent) -> str:
    named = [
        f"{place.topic} queue {place.queue_id}, offset{'s' * (place.first_offset < place.last_offset)} "
        f"{place.first_offset}{f' to {place.last_offset}' if place.first_offset < place.last_offset else ''}"
        for place in event.places[:PLACES_MAX]
    ]
    more = len(event.places) - PLACES_MAX
    return "; ".join([*named, *([f"{more:,} more ranges"] if more > 0 else [])])


def waterfall(trace: Trace, now: datetime) -> str:
    """Return the waterfall as HTML: a line for each step, with its bar and its end, counted from the prepare."""
    steps = steps_of(trace, now)
    shown = steps if len(steps) <= EVENTS_MAX else [*steps[: EVENTS_MAX // 2], *steps[-EVENTS_MAX // 2 :]]
    length_s = max(step.end_s for step in steps) or 1.0
    lines = [_line(step, length_s) for step in shown]
    if more := len(steps) - len(shown):
        lines.insert(EVENTS_MAX // 2, f'<li class="more">{count_of(more, "step")} between</li>')
    later = "".join(f"<li>{escape(sentence)}</li>" for sentence in _later(trace))
    return (
        f'<ol class="steps">{"".join(lines)}</ol>'
        f'<p class="axis"><span>prepare</span><span>{escape(duration(length_s))} later</span></p>'
        + (f'<ul class="later">{later}</ul>' if later else "")
    )


def _line(step: Step, length_s: float) -> str:
    begin, end = (100 * (0.0 if at is None else at) / length_s for at in (step.begin_s, step.end_s))
    marks = [*step.earlier_s[-EVENTS_MAX:], step.end_s]
    bar = ""
    if step.begin_s is not None:
        bar = f'<rect x="{begin:.2f}%" y="6" width="{end - begin:.2f}%" height="4" fill="{step.colour}" opacity=".45"/>'
        bar += "".join(
            f'<rect x="{100 * at / length_s:.2f}%" y="2" width="4" height="12" transform="translate(-2)" '
            f'fill="{step.colour}"/>'
            for at in marks
        )
    after = "–" if step.begin_s is None else duration(step.end_s)
    return (
        f'<li><span class="phase">{step.phase}</span><svg height="16" aria-hidden="true">{bar}</svg>'
        f'<span class="after">{after}</span><span class="what">{escape(step.what)}</span></li>'
    )


def _later(trace: Trace) -> Iterator[str]:
    start = trace.events[0].at
    for event in trace.events:
        if event.kind in BY_UPKEEP:
            after = duration(max(0.0, (event.at - start).total_seconds()))
            messages = count_of(event.messages, "message")
            if event.kind is TraceKind.DRAINED:
                yield f"drained: {messages} in the table messages, at the latest {after} after the prepare"
            else:
                yield f"archived {after} after the prepare, when all was settled"
