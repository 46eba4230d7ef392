"""``txmq trace``: the story of a transaction, a half batch or a message."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.command import path_to_type
from rmq_spark.cli.completion import of_argument
from rmq_spark.cli.output import (
    AsJson,
    LogPath,
    Storage,
    Wide,
    block,
    hanging,
    one_line,
    open_log,
    plainly,
    rendered,
    terminal_width,
)
from rmq_spark.cli.shortened import whole_id
from rmq_spark.cli.text import escaped, short_age, short_time
from rmq_spark.errors import OptionError, TxmqError

if TYPE_CHECKING:
    from rmq_spark.log import CommitLog, Trace, TraceEvent

_MESSAGE_ID = re.compile(r"[^:]+:\d+(-[0-9a-f]+)?:\d+\.\d+")
_HALF_ID = re.compile(r"[^:]+:\d+(-[0-9a-f]+)?")
_TRANSACTION_ID = re.compile(r"[^:]+:\d+(-[0-9a-f]+)?:.+", re.DOTALL)
PLACES_SHOWN = 4
WHERE = {
    "half": "in half, with its messages",
    "leaving": "settled, and about to leave half",
    "left": "settled; it has left half",
    "forgotten": "settled long ago, and forgotten",
}
OUTCOMES = {
    "waiting": "committed, waiting for their time or for an earlier message",
    "rolled_back": "rolled back",
    "rolled_back_by_check": "rolled back by a check: never happened",
    "rolled_back_by_discard": "rolled back by the discard policy",
}
OUTCOMES_IN_CONFLICT = {"rolled_back_by_check": "rolled back by a check"}
"""A check found no trace of the local transaction, and a later verdict says that it happened."""


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(trace)


@plainly
def trace(
    path: LogPath,
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A transaction id, a half id, or a message id, as query shows them.",
            autocompletion=of_argument,
        ),
    ],
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Tell the whole story of a transaction as a timeline: prepared, leased, checked, decided (by whom, why), placed,
    drained, archived. It says what upkeep has taken. --json prints one object, with its events."""
    log = open_log(path, storage)
    story = log.trace(**argument_of(whole_id(log, name)))
    if as_json:
        typer.echo(json.dumps(story.to_dict()))
    else:
        typer.echo(_text_of(story, shown_keys(log, story), advice(story)), nl=False)


def argument_of(name: str) -> dict[str, str]:
    """Return an id as the argument of :meth:`CommitLog.trace`: by its form a half id, a message id or a transaction id.

    Raises
    ------
    OptionError
        When the name is not an id, such as a key.
    """
    if _HALF_ID.fullmatch(name):
        return {"half_id": name}
    if _MESSAGE_ID.fullmatch(name):
        return {"message_id": name}
    if _TRANSACTION_ID.fullmatch(name):
        return {"transaction_id": name}
    raise OptionError(
        f"{name!r} is not an id: a transaction id, a half id or a message id is expected, as txmq query shows them "
        "(txmq query --key finds messages by a key)"
    )


def shown_keys(log: CommitLog, story: Trace) -> str | None:
    """Return the keys of the first messages, sorted; None when they have none, or when they cannot be read."""
    from rmq_spark._core.inspect.find import keys_of

    try:
        keys = keys_of(log.engine, story, PLACES_SHOWN)
    except TxmqError:  # the story itself can be told
        return None
    more = story.messages - PLACES_SHOWN
    query = f"txmq query {path_to_type()}--half-id {shlex.quote(one_line(story.half_id or ''))}"
    more_words = f" and those of {count_of(more, 'more message')}: {query}" if more > 0 else ""
    return f"{', '.join(map(escaped, sorted(keys)))}{more_words}" if keys else None


def _text_of(story: Trace, keys: str | None, advice: Iterable[str]) -> str:
    from rmq_spark._core.listeners.transaction_listener import NO_LISTENER_FENCE

    words = {**OUTCOMES, **(OUTCOMES_IN_CONFLICT if story.in_conflict else {})}
    outcome = ", ".join(f"{n:,} {words.get(what, what)}" for what, n in story.outcome.items())
    head = {
        ("message" if story.message_id else "transaction" if story.transaction_id else "half batch"): (
            story.message_id or story.transaction_id or story.half_id
        ),
        "producer_group": story.producer_group,
        "store": None if story.fence_id == NO_LISTENER_FENCE else story.fence_id,
        "messages": f"{story.messages:,}{': ' if outcome else ''}{outcome}",
        "topics": ", ".join(story.topics) or None,
        "keys": keys,
        "where": WHERE[story.where],
        "conflict": "yes: a verdict came too late, and nobody has resolved it" if story.in_conflict else None,
        "lease_until": story.lease_until,
        "waits_for": ", ".join(_first_of(story.waits_for)) or None,
    }
    start = story.events[0].at
    form = "%Y-%m-%d %H:%M:%S"
    if terminal_width() is not None and len({event.at.date() for event in story.events}) == 1:
        head["date"] = f"{start:%Y-%m-%d}, in UTC"
        form = "%H:%M:%S"
    rows = [
        {
            "time": f"{event.at:{form}}.{event.at.microsecond // 1000:03}Z",
            "after": f"+{short_age(max(0.0, (event.at - start).total_seconds()))}" if event.at > start else None,
            "event": event.word if times == 1 else f"{times:,} × {event.word}",
            "by": event.decided_by,
            "attempt": event.attempt if any((e.attempt or 1) > 1 for e in story.events) else None,
            "messages": event.messages if any(e.messages != story.messages for e in story.events) else None,
            "what": _event_text(event) + (f", from {event.at:{form}}Z to {last:{form}}Z" if times > 1 else ""),
        }
        for event, times, last in _folded(story.events)
    ]
    text = f"{block(head)}\n{rendered(rows, '', ['attempt', 'messages', 'after', 'by'], 'what')}"
    for sentence in story.unknown:
        text += hanging("", f"not known: {one_line(sentence)}", 2).lstrip() + "\n"
    lines = [hanging("", one_line(line), 2).lstrip() for line in advice]
    return text + "".join(f"{line}\n" for line in (["", *lines] if lines else ()))


def _folded(events: Iterable[TraceEvent]) -> Iterator[tuple[TraceEvent, int, datetime]]:
    """Yield events, each with how often it stands there and when last: equal checks in a row are one."""
    for (kind, *_), equal in groupby(events, lambda e: (e.kind, e.messages, e.attempt, e.decided_by, e.reason)):
        first, *others = equal
        if kind == "checked":
            yield first, 1 + len(others), [first, *others][-1].at
        else:
            yield from ((event, 1, event.at) for event in (first, *others))


def _first_of(items: Sequence[str]) -> list[str]:
    """Return the first items, and how many more there are."""
    more = len(items) - PLACES_SHOWN
    return [*items[:PLACES_SHOWN], *([f"and {more} more (--json has all)"] if more > 0 else [])]


def _event_text(event: TraceEvent) -> str:
    if event.kind == "conflict" and event.verdict:
        return f"{event.verdict} came too late"
    places = [f"{p.topic} queue {p.queue_id}, {_offsets(p.first_offset, p.last_offset)}" for p in event.places]
    details = _first_of(places)
    reason = event.reason or ""
    if event.verdict and not reason.startswith(event.verdict):
        details.append(event.verdict)
    if event.until is not None:
        details.append(f"{'due' if event.kind == 'committed' else 'until'} {short_time(event.until)}")
    if reason:
        details.append(one_line(reason))
    return "; ".join(details)


def _offsets(first: int, last: int) -> str:
    return f"offset {first}" if first == last else f"offsets {first}-{last}"


def advice(story: Trace) -> Iterator[str]:
    """Yield what a person can do next: nothing when nothing is to be done."""
    from rmq_spark._core.inspect.diagnosis import check_once
    from rmq_spark._core.inspect.trace import late_verdicts
    from rmq_spark.listeners import ROLLBACK_MESSAGE

    path, half_id = path_to_type(), shlex.quote(one_line(story.half_id or ""))
    commit, rollback = (f"txmq resolve {path}{half_id} {verdict} --reason '…'" for verdict in ("COMMIT", "ROLLBACK"))
    by_hand = (
        f"or decide yourself, when its local transaction happened: {commit}",
        f"or, when it did not happen: {rollback}",
    )
    if story.in_conflict:
        late = late_verdicts(story)
        only_rollbacks = {event.verdict for event in late} == {str(ROLLBACK_MESSAGE)}
        if only_rollbacks:  # readers may have seen the messages: only COMMIT is possible
            yield f"confirm what readers have seen: {commit}"
        else:
            count = sum(event.messages for event in late)
            seen = f"readers will see {count_of(count, 'message')}, for good"
            yield f"when its local transaction happened: {commit} ({seen})"
            yield f"when it did not happen: {rollback} (nobody will see {'it' if count == 1 else 'them'})"
    elif story.outcome.get("quarantined"):
        yield f"ask its listener again: txmq resume {path}{half_id}"
        yield from by_hand
    elif story.outcome.get("pending") and story.lease_until is None:
        if not any(event.kind == "checked" for event in story.events):
            yield "no check has left an answer yet: when one failed, the checker's log says why"
        yield f"ask the listener of {story.producer_group}, where the check job's txmq.toml is: {check_once(path)}"
        yield from by_hand
    elif story.waits_for:
        yield f"see what holds it up: txmq trace {path}{shlex.quote(story.waits_for[0])}"
