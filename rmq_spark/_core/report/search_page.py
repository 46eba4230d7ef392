"""The pages of ``txmq serve`` for a search: messages by key or place, the newest of a topic, and nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from rmq_spark._core.consumers.retry import REASON
from rmq_spark._core.report.components import (
    STATES,
    Column,
    commands,
    escape,
    find_address,
    first_of,
    framed,
    half_address,
    link,
    listed,
)
from rmq_spark._core.vocabulary.message import DLQ_PREFIX, RETRY_PREFIX
from rmq_spark._core.vocabulary.text import byte_size

OPEN_STATES = ("pending", "quarantined")
"""States that a check or a person ends."""
BEFORE = "before"
"""The field of an address with the offset before which a list of messages ends."""
LISTED_MAX, LINKS_MAX, SIMILAR_MAX = 50, 20, 10
"""The most messages of a list, the most links to topics or queues, and to keys that contain a word."""

Readers = Mapping[tuple[str, int], Sequence[tuple[str, int]]]
"""By topic and queue, the consumer groups that read it and their next offsets."""


def newest(
    topic: str,
    rows: Sequence[Mapping[str, Any]],
    kept: Mapping[int, tuple[int, int]],
    before: int | None,
    readers: Readers,
) -> str:
    """Return the main part of a page that lists messages of a topic, the newest first.

    Parameters
    ----------
    rows : sequence of mapping
        At most :data:`LISTED_MAX` messages, in this order.
    kept : mapping
        The queues that the list is of, each with its first kept offset and its next one.
    before : int, optional
        The offset before which the list ends; None for the newest messages.
    """
    columns = [
        Column("offset", lambda row: f"{row['queue_offset']}", "number", lambda row: find_address(
            topic, queue=row["queue_id"], offset=row["queue_offset"])),
        Column("committed (UTC)", lambda row: f"{row['commit_timestamp']:%Y-%m-%d %H:%M:%S}", "word"),
        Column("keys", lambda row: row["keys"] or ""),
        Column("tags", lambda row: row["tags"] or ""),
        Column("size", lambda row: byte_size(len(row["body"] or b"")), "number"),
        Column("read by", lambda row: _read_by(row, readers), "text"),
    ]  # fmt: skip
    lowest = {queue: end if before is None else min(before, end) for queue, (_, end) in kept.items()}
    for row in rows:
        lowest[row["queue_id"]] = min(row["queue_offset"], lowest[row["queue_id"]])
    older = {queue: offset for queue, offset in lowest.items() if offset > kept[queue][0]}
    if len(kept) == 1:
        ((queue, (_, end)),) = kept.items()
        name = f"{topic} queue {queue}"
        links = [link(find_address(topic, queue=queue, before=offset), "older") for offset in older.values()]
        if before is not None and before < end:
            after = before + LISTED_MAX
            place = {"queue": queue} if after >= end else {"queue": queue, BEFORE: after}
            links.append(link(find_address(topic, **place), "newer"))
        more = f'<p class="more">{" · ".join(links)}</p>' if links else ""
    else:
        name = f"{topic}, all {len(kept)} queues"
        columns.insert(0, Column("queue", lambda row: f"{row['queue_id']}", "number"))
        links = [link(find_address(topic, queue=q, before=at), f"queue {q}") for q, at in [*older.items()][:LINKS_MAX]]
        rest = "; of another queue: name it above" if len(older) > LINKS_MAX else ""
        more = f'<p class="more">Older: {" · ".join(links)}{rest}</p>' if links else ""
    if not rows:
        nothing = '<p class="nothing">There is no message that readers can see.</p>'
        return f'<div class="grid one">{framed(name, "", nothing + more, wide=True)}</div>'
    hint = f"Visible messages{'' if before is None else f' before offset {before}'}, the newest first."
    return f'<div class="grid one">{framed(name, hint, listed(rows, columns, len(rows)) + more, wide=True)}</div>'


def _read_by(row: Mapping[str, Any], readers: Readers) -> str:
    groups = readers.get((row["topic"], row["queue_id"]), ())
    past = [group for group, end in groups if end > row["queue_offset"]]
    coming = [group for group, end in groups if end <= row["queue_offset"]]
    if past and coming:
        return f"{first_of(past)}; not yet {first_of(coming)}"
    return "" if not groups else "nobody yet" if coming else first_of(past)


def not_found(
    wanted: str, similar: Sequence[str], topics: Sequence[str], topic: str | None = None, queue: int | None = None
) -> str:
    """Return the main part of a page for a search that has found nothing: by a key, or at a place.

    Parameters
    ----------
    wanted : str
        What was looked for.
    similar : sequence of str
        Keys that contain it.
    """
    if topic is not None and queue is not None:
        sentence = "It has expired, it is not there yet, or this key is not its own. "
        there = f"This queue: {link(find_address(topic, queue=queue), f'{topic} queue {queue}')}"
    else:
        keys = ", ".join(link(f"/find?{urlencode({'q': key})}", key) for key in similar)
        sentence = "A key is matched whole. " + (f"Keys that contain it: {keys}. " if keys else "")
        sentence += "Of messages that nobody can see, those are found that have not left the log. "
        links = ", ".join(link(find_address(name), name) for name in topics[:LINKS_MAX])
        more = len(topics) - LINKS_MAX
        there = f"The topics: {links}{f', and {more} more' if more > 0 else ''}" if links else ""
    title = escape(f"Nothing found for {wanted}")
    return f'<section class="card wide"><h2>{title}</h2><p class="hint">{sentence}{there}</p></section>'


def found(rows: Sequence[Mapping[str, Any]], more: str, readers: Readers, bodies: Sequence[str] | None) -> str:
    """Return the main part of a page with the messages that a search has found.

    Parameters
    ----------
    rows : sequence of mapping
        At least one.
    more : str
        The command that shows more; empty when there are no more.
    bodies : sequence of str, optional
        The bodies as text; None when they are hidden.
    """
    cards = []
    for number, row in enumerate(rows):
        offset, at, half = row["queue_offset"], row["commit_timestamp"], escape(half_address(row["half_id"]))
        facts = {
            "topic": row["topic"],
            "place": "none: it is not visible" if offset is None else f"queue {row['queue_id']}, offset {offset}",
            "keys": row["keys"],
            "tags": row["tags"],
            "committed": None if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC",
            "prepared": f"{row['store_timestamp']:%Y-%m-%d %H:%M:%S} UTC" if at is None else None,
            "producer group": row["producer_group"],
            "read by": _readers(row, readers.get((row["topic"], row["queue_id"]), ())),
            "body": f"{len(row['body'] or b''):,} bytes, hidden" if bodies is None else None,
        }
        items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
        body = "" if bodies is None else f"<pre>{_lines(bodies[number])}</pre>"
        advised = ", which says what to do" if row["state"] in OPEN_STATES else ""
        cards.append(
            f'<section class="card wide"><h2 class="id">{escape(row["msg_id"])}</h2><dl class="facts">'
            f"<dt>state</dt><dd>{_state(row)}</dd>{items}"
            f'<dt>half batch</dt><dd><a href="{half}">{escape(row["half_id"])}</a>{advised}</dd></dl>{body}</section>'
        )
    last = f'<p class="more">There are more: {commands(more)}</p>' if more else ""
    return f'<div class="grid one">{"".join(cards)}</div>{last}'


def _state(row: Mapping[str, Any]) -> str:
    state, reason = row["state"].replace("_", " "), row["reason"]
    for prefix, word in ((DLQ_PREFIX, "dead letter of"), (RETRY_PREFIX, "retry of")):
        if row["topic"].startswith(prefix) and state == "committed":
            state, reason = f"{word} {row['topic'].removeprefix(prefix)}", dict(row["properties"] or ()).get(REASON)
    colour = "warning" if row["topic"].startswith(DLQ_PREFIX) else STATES.get(row["state"], "")
    return f'<b class="{colour}">{escape(state)}</b>{escape(f": {reason}" if reason else "")}'


def _readers(row: Mapping[str, Any], groups: Sequence[tuple[str, int]]) -> str:
    offset = row["queue_offset"]
    if offset is None:
        return ""
    if not groups:
        return "no consumer group reads this queue"
    words = [f"{group}: {'past it' if end > offset else f'not yet, {end} is its next offset'}" for group, end in groups]
    return first_of(words, between="; ")


def _lines(text: str) -> str:
    return "\n".join(map(escape, text.split("\n")))
