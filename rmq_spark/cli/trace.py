"""``txmq trace``: the story of a transaction, a half batch or a message."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark.cli.command import path_to_type
from rmq_spark.cli.completion import of_argument
from rmq_spark.cli.output import AsJson, LogPath, Storage, block, one_line, open_log, plainly, rendered
from rmq_spark.cli.text import short_age, short_time
from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rmq_spark.log import Trace, TraceEvent

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
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Tell the whole story of a transaction: prepared, leased, checked, decided (by whom and why), placed, drained,
    archived. It says what upkeep has taken. --json prints one object, with its events."""
    log = open_log(path, storage)
    story = log.trace(**argument_of(name))
    typer.echo(json.dumps(story.to_dict()) if as_json else _text_of(story, advice(story)), nl=as_json)


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


def _text_of(story: Trace, advice: str | None) -> str:
    from rmq_spark._core.listeners.transaction_listener import NO_LISTENER_FENCE

    outcome = ", ".join(f"{n:,} {OUTCOMES.get(what, what)}" for what, n in story.outcome.items())
    head = {
        ("message" if story.message_id else "transaction" if story.transaction_id else "half batch"): (
            story.message_id or story.transaction_id or story.half_id
        ),
        "producer_group": story.producer_group,
        "store": None if story.fence_id == NO_LISTENER_FENCE else story.fence_id,
        "messages": f"{story.messages:,}{': ' if outcome else ''}{outcome}",
        "topics": ", ".join(story.topics) or None,
        "where": WHERE[story.where],
        "conflict": "yes: a verdict came too late, and nobody has resolved it" if story.in_conflict else None,
        "lease_until": story.lease_until,
        "waits_for": ", ".join(_first_of(story.waits_for)) or None,
    }
    text = block(head)
    previous: datetime | None = None
    rows = []
    for event in story.events:
        after = None if previous is None else max(0.0, (event.at - previous).total_seconds())
        previous = event.at
        rows.append(
            {
                "time": f"{event.at:%Y-%m-%d %H:%M:%S}.{event.at.microsecond // 1000:03}Z",
                "after": None if after is None else f"+{short_age(after)}",
                "event": event.word,
                "by": event.decided_by,
                "attempt": event.attempt,
                "messages": event.messages,
                "what": _event_text(story, event),
            }
        )
    text += f"\n{rendered(rows, '')}"
    for sentence in story.unknown:
        text += f"not known: {one_line(sentence)}\n"
    return text + (f"\n{advice}\n" if advice else "")


def _first_of(items: Sequence[str]) -> list[str]:
    """Return the first items, and how many more there are."""
    more = len(items) - PLACES_SHOWN
    return [*items[:PLACES_SHOWN], *([f"and {more} more (--json has all)"] if more > 0 else [])]


def _event_text(story: Trace, event: TraceEvent) -> str:
    if event.kind == "conflict" and event.verdict:
        return f"{event.verdict} came too late"
    places = [f"{p.topic} queue {p.queue_id}, {_offsets(p.first_offset, p.last_offset)}" for p in event.places]
    parts = _first_of(places)
    if event.kind == "prepared":
        parts.append(f"batch {story.batch_id} of {story.app_id}")
    reason = event.reason or ""
    if event.verdict and not reason.startswith(event.verdict):
        parts.append(event.verdict)
    if event.until is not None:
        parts.append(f"{'due' if event.kind == 'committed' else 'until'} {short_time(event.until)}")
    if reason:
        parts.append(one_line(reason))
    return "; ".join(parts)


def _offsets(first: int, last: int) -> str:
    return f"offset {first}" if first == last else f"offsets {first}-{last}"


def advice(story: Trace) -> str | None:
    """Return what a person can do next; None when nothing is to be done."""
    from rmq_spark.listeners import ROLLBACK_MESSAGE

    path = path_to_type()
    if story.in_conflict:
        late = {event.verdict for event in story.events if event.kind == "conflict"}
        if late == {str(ROLLBACK_MESSAGE)}:  # readers may have seen the messages: only COMMIT is possible
            return f"confirm what readers have seen: txmq resolve {path}{shlex.quote(story.half_id)} COMMIT --reason …"
        return f"settle it: txmq resolve {path}{shlex.quote(story.half_id)} COMMIT|ROLLBACK --reason …"
    if story.outcome.get("quarantined"):
        return (
            f"ask its listener again: txmq resume {path}{shlex.quote(story.half_id)}; or decide yourself: "
            f"txmq resolve {path}{shlex.quote(story.half_id)} COMMIT|ROLLBACK --reason …"
        )
    if story.outcome.get("pending") and story.lease_until is None:
        was_checked = any(event.kind == "checked" for event in story.events)
        hint = "" if was_checked else "no check has left an answer yet: when one failed, the checker's log says why\n"
        return (
            f"{hint}a check asks the listener of {story.producer_group}: txmq check {path}--once; or decide yourself: "
            f"txmq resolve {path}{shlex.quote(story.half_id)} COMMIT|ROLLBACK --reason …"
        )
    if story.waits_for:
        return f"see what holds it up: txmq trace {path}{shlex.quote(story.waits_for[0])}"
    return None
