"""Reads and writes offsets in the form of Spark's Kafka source, ``{"orders": {"0": 23, "1": -1}}``.

Options and checkpoints have this form. An offset is that of the next message to read. A queue that a checkpoint does
not name starts at 0, so that a new topic joins a running stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from rmq_spark._core.vocabulary.options import INT64_MAX, nearest, require_time
from rmq_spark.errors import OffsetError, OffsetOutOfRangeError, OptionError

EARLIEST = "earliest"
LATEST = "latest"
EARLIEST_OFFSET = -2
LATEST_OFFSET = -1

Queue = tuple[str, int]
"""A topic and a queue_id."""
Positions = dict[Queue, int]
"""The next offset of every queue."""
Again = dict[Queue, tuple[int, datetime]]
"""Suspended queues that a micro-batch reads again: the offset it begins at, and when the suspension was over."""
JsonOffsets = dict[str, dict[str, int]]
"""Positions in JSON: queue_id and offset by topic."""
AGAIN = "@again"
"""A key in a checkpoint, beside the topics (none has this name): what the micro-batch that ends here read again."""
LOG = "@log"
"""Another key beside the topics: the id of the commit log whose offsets these are."""
BEGIN = "@begin"
"""A third key, in a query's first offset: where its first micro-batch begins. Spark writes the ends alone."""
OWN_KEYS = frozenset({AGAIN, LOG, BEGIN})

OFFSET_MAX = INT64_MAX
EPOCH_MS_MIN = 100_000_000_000
"""Milliseconds, in March 1973. A smaller number is taken for seconds and refused."""


class CountedPositions(dict[Queue, int]):
    """Positions that a person gave, perhaps from the progress report of a stream."""

    log_id: str | None = None
    """The id of the commit log whose offsets these are, if the person gave it."""
    marks: tuple[int, ...] = ()
    """Which of -2 (earliest) and -1 (latest) may be given here in the place of an offset."""


class StreamOffset(NamedTuple):
    """The end of a micro-batch in a checkpoint."""

    positions: Positions
    again: Again
    log_id: str


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_QUEUE_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_EXAMPLE = '{"orders": {"0": 23, "1": 7}}'
_MEANT = {LATEST_OFFSET: LATEST, EARLIEST_OFFSET: EARLIEST}


def to_json(
    positions: Mapping[Queue, int],
    again: Again | None = None,
    log_id: str | None = None,
    begin: Mapping[Queue, int] | None = None,
) -> JsonOffsets:
    """Return positions for JSON, in order of topic and queue: Spark compares texts, so equal ones must look alike."""
    found: JsonOffsets = {}
    for (topic, queue_id), offset in sorted(positions.items()):
        found.setdefault(topic, {})[str(queue_id)] = offset
    if again:
        found[AGAIN] = {
            json.dumps([topic, queue_id, (until - _EPOCH) // timedelta(microseconds=1)]): offset
            for (topic, queue_id), (offset, until) in sorted(again.items())
        }
    if log_id is not None:
        found[LOG] = {log_id: 0}
    if begin is not None:
        found[BEGIN] = {json.dumps([topic, queue_id]): offset for (topic, queue_id), offset in sorted(begin.items())}
    return found


def first_begin(value: object, what: str) -> Positions | None:
    """Where a query's first micro-batch begins, from the offset at which it ends; None from any other offset.

    Raises
    ------
    OffsetError
        When :func:`to_json` did not write it.
    """
    if not isinstance(value, dict) or BEGIN not in value:
        return None
    found: Positions = {}
    try:
        for text, offset in value[BEGIN].items():
            topic, queue_id = json.loads(text)
            found |= from_json({topic: {str(queue_id): offset}}, what)
    except (AttributeError, TypeError, ValueError) as problem:
        raise OffsetError(
            f"{what} has {str(value[BEGIN])[:200]} under {BEGIN!r}, which no stream wrote: {problem}"
        ) from problem
    return found


def from_checkpoint(value: object, what: str = "the checkpoint") -> StreamOffset:
    """Read what :func:`to_json` wrote.

    Raises
    ------
    OffsetError
        When the value has another form.
    """
    if not isinstance(value, dict):
        raise OffsetError(f"{what} is not of the form {_EXAMPLE}: found {str(value)[:200]}")
    again: Again = {}
    try:
        for text, offset in value.get(AGAIN, {}).items():
            topic, queue_id, until_us = json.loads(text)
            found = from_json({topic: {str(queue_id): offset}}, what)
            again |= {queue: (n, _EPOCH + timedelta(microseconds=until_us)) for queue, n in found.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as problem:
        raise OffsetError(
            f"{what} has {str(value[AGAIN])[:200]} under {AGAIN!r}, which no stream wrote: {problem}"
        ) from problem
    topics = {topic: queues for topic, queues in value.items() if topic not in OWN_KEYS}
    return StreamOffset(from_json(topics, what), again, _log_id(value.get(LOG), what))


def _log_id(said: object, what: str) -> str:
    if not isinstance(said, dict) or len(said) != 1:
        raise OffsetError(f"{what} has {str(said)[:200]} under {LOG!r}, which no stream wrote")
    return str(*said)


def from_json(value: object, what: str, marks: tuple[int, ...] = ()) -> Positions:
    """Read positions from a JSON value.

    Parameters
    ----------
    what : str
        Where the value comes from, for the error's text.
    marks : tuple of int
        Which of -2 (earliest) and -1 (latest) are allowed in the place of an offset.

    Raises
    ------
    OffsetError
        When the value does not have the form ``{"topic": {"queue": offset}}``.
    """
    if not isinstance(value, dict) or not all(isinstance(queues, dict) for queues in value.values()):
        raise OffsetError(f"{what} is not of the form {_EXAMPLE}: found {str(value)[:200]}")
    positions: Positions = {}
    for topic, queues in value.items():
        if not isinstance(topic, str) or any("\ud800" <= c <= "\udfff" for c in topic):
            raise OffsetError(f"{what} names the topic {topic!r}, which is no text: a name is expected")
        for queue_id, offset in queues.items():
            if _QUEUE_ID.fullmatch(str(queue_id)) is None:
                raise OffsetError(
                    f'{what} names the queue {queue_id!r} of topic {topic!r}: a number such as "0" is expected'
                )
            if isinstance(offset, bool) or not isinstance(offset, int):
                raise OffsetError(
                    f"{what} has {offset!r} for topic {topic!r}, queue {queue_id}: a whole number is expected"
                )
            if offset > OFFSET_MAX:
                raise OffsetError(f"{what} has {offset} for topic {topic!r}, queue {queue_id}: no offset is that large")
            if offset < 0 and offset not in marks:
                also = "".join(f", or {mark} for {meant}" for mark, meant in _MEANT.items() if mark in marks)
                raise OffsetError(
                    f"{what} has {offset} for topic {topic!r}, queue {queue_id}: at least 0 is expected{also}"
                )
            positions[(topic, int(queue_id))] = offset
    return positions


def parse_offsets(text: str, option: str, keywords: tuple[str, ...], marks: tuple[int, ...]) -> str | Positions:
    """Read the value of ``startingOffsets`` or ``endingOffsets``.

    Parameters
    ----------
    keywords : tuple of str
        Which of ``earliest`` and ``latest`` the option allows here.
    marks : tuple of int
        Which of -2 (earliest) and -1 (latest) it allows in JSON.

    Returns
    -------
    str or dict
        A keyword; or an offset, -2 or -1 by (topic, queue).

    Raises
    ------
    OffsetError
        When the text is neither of these, or is malformed.
    """
    word = text.strip().lower()
    if word in keywords:
        return word
    if word in (EARLIEST, LATEST):
        raise OffsetError(
            f"{option}={word!r} cannot be used here: {' or '.join(map(repr, keywords))} or JSON is expected"
        )
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as problem:
        raise OffsetError(
            f"{option}={text[:200]!r} is neither {' nor '.join(map(repr, keywords))} nor JSON such as {_EXAMPLE}: "
            f"{nearest(word[:40], keywords) if word.isalpha() else problem}"
        ) from problem
    if value is None:
        raise OffsetError(f"{option} is null, as the start of a stream's first batch is: use {keywords[0]!r}")
    return given_positions(value, option, marks)


def given_positions(
    value: object, what: str, marks: tuple[int, ...] = (EARLIEST_OFFSET, LATEST_OFFSET)
) -> CountedPositions:
    """Read positions that a person wrote, or took from the progress report of a stream."""
    own = {t: q for t, q in value.items() if t not in OWN_KEYS} if isinstance(value, dict) else value
    found = CountedPositions(from_json(own, what, marks))
    found.marks = marks
    if isinstance(value, dict) and LOG in value:
        found.log_id = _log_id(value[LOG], what)
    return found


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found


def resolve(
    option: str,
    given: str | Positions,
    queues: Mapping[str, int],
    tails: Mapping[Queue, int],
    firsts: Mapping[Queue, int] | None = None,
    marks: tuple[int, ...] = (),
) -> Positions:
    """Return the offset of each queue for what :func:`parse_offsets` returned.

    Parameters
    ----------
    queues : mapping of str to int
        The topics subscribed to, and the number of queues of each.
    tails : mapping
        The next offset of every queue that has messages.
    firsts : mapping, optional
        The first offset that is kept, of queues of which messages have expired.
    marks : tuple of int
        Which of -2 and -1 could have been given, for the error's text.

    Raises
    ------
    OffsetError
        When JSON names a topic or queue that is not read, or leaves one out.
    OffsetOutOfRangeError
        When it names an offset past the end of a queue.
    """
    ends = {(t, q): tails.get((t, q), 0) for t, n in queues.items() for q in range(n)}
    starts = {queue: (firsts or {}).get(queue, 0) for queue in ends}
    if isinstance(given, str):
        return starts if given == EARLIEST else ends
    for (topic, queue_id), offset in given.items():
        if topic not in queues:
            hint = nearest(topic, queues) if queues else "no topic is subscribed to"
            raise OffsetError(
                f"{option} names topic {topic!r}, which is not subscribed to or not in the commit log ({hint})"
            )
        if queue_id >= queues[topic]:
            raise OffsetError(
                f"{option} names queue {queue_id} of topic {topic!r}, which has the queues 0 to {queues[topic] - 1}"
            )
        if offset > ends[(topic, queue_id)]:
            raise OffsetOutOfRangeError(
                f"{option} has {offset} for topic {topic!r}, queue {queue_id}: past its end, which is "
                f"{ends[(topic, queue_id)]}"
            )
    for topic, queue_id in ends:
        if (topic, queue_id) not in given:
            other = " or ".join(f"{mark} for {meant}" for mark, meant in _MEANT.items() if mark in marks)
            hint = f", with {other} where you have no offset" if other else ""
            raise OffsetError(
                f"{option} leaves out queue {queue_id} of topic {topic!r}: name every queue that is subscribed to{hint}"
            )
    meaning = {queue: {EARLIEST_OFFSET: starts[queue], LATEST_OFFSET: end} for queue, end in ends.items()}
    return {queue: meaning[queue].get(offset, offset) for queue, offset in given.items()}


def parse_timestamp(text: str, option: str) -> datetime:
    """Read a time with a zone, such as ``2025-03-01T08:00:00Z`` or ``…T09:00:00+01:00``, or milliseconds since 1970.

    Raises
    ------
    OptionError
        For anything else. A time without a zone or a number of seconds is refused, because its meaning is a guess.
    """
    value = text.strip()
    example = "write it as 2025-03-01T08:00:00Z, or as milliseconds since 1970"
    if value.isascii() and value.isdigit():
        if int(value) < EPOCH_MS_MIN:
            raise OptionError(
                f"{option}={text!r} is too small for milliseconds since 1970 (are they seconds?): {example}"
            )
        try:
            return require_time(_from_ms(int(value)), option)
        except OptionError:
            raise
        except (OverflowError, ValueError, OSError) as problem:
            raise OptionError(f"{option}={text!r} is not a time: {example}") from problem
    try:
        found = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", value))
    except ValueError as problem:
        raise OptionError(f"{option}={text!r} is not a time: {example}") from problem
    if found.tzinfo is None:
        raise OptionError(f"{option}={text!r} has no time zone: {example}")
    return require_time(found, option)


def _from_ms(milliseconds: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=milliseconds)


# ---------------------------------------------------------------- suspended queues
def due(suspended: Again, now: datetime) -> Again:
    """Return the queues whose suspension is over."""
    return {queue: (offset, until) for queue, (offset, until) in suspended.items() if until <= now}


def seconds_to_wait(suspended: Again, now: datetime) -> float:
    """Return the seconds until the first suspension is over."""
    return max(0.0, (min(until for _, until in suspended.values()) - now).total_seconds())
