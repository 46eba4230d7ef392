"""Reads and writes offsets in the form of Spark's Kafka source, ``{"orders": {"0": 23, "1": -1}}``.

Options and checkpoints have this form. An offset is that of the next message to read. A queue that is missing in a
checkpoint starts at 0, so that a new topic joins a running stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from rmq_spark._core.vocabulary.options import INT64_MAX, nearest, require_time
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.times import EPOCH
from rmq_spark.errors import OffsetError, OffsetOutOfRangeError, OptionError

EARLIEST = "earliest"
LATEST = "latest"
EARLIEST_OFFSET = -2
LATEST_OFFSET = -1

Positions = dict[Queue, int]
"""The next offset of every queue."""
Again = dict[Queue, tuple[int, datetime]]
"""Suspended queues that a micro-batch reads again: the first offset, and the suspension's end."""
JsonOffsets = dict[str, dict[str, int]]
"""Positions in JSON: queue_id and offset by topic."""
AGAIN = "@again"
"""A checkpoint's key, which no topic has: the queues that the micro-batch ending here read again."""
LOG = "@log"
"""A checkpoint's key: the id of the offsets' commit log."""
BEGIN = "@begin"
"""A key in a query's first offset: the start of the first micro-batch. Spark itself stores only ends."""
OWN_KEYS = frozenset({AGAIN, LOG, BEGIN})

OFFSET_MAX = INT64_MAX
EPOCH_MS_MIN = 100_000_000_000
"""A time in March 1973. A smaller number is probably in seconds, so it is refused."""


class CountedPositions(dict[Queue, int]):
    """Positions by a person, perhaps from the progress report of a stream."""

    log_id: str | None = None
    """The id of the offsets' commit log, if the person gave it."""
    marks: tuple[int, ...] = ()
    """The allowed marks in place of an offset: of -2 (earliest) and -1 (latest)."""


class StreamOffset(NamedTuple):
    """The end of a micro-batch in a checkpoint."""

    positions: Positions
    again: Again
    log_id: str


_QUEUE_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_EXAMPLE = '{"orders": {"0": 23, "1": 7}}'
_WORD_OF_MARK = {LATEST_OFFSET: LATEST, EARLIEST_OFFSET: EARLIEST}


def to_json(
    positions: Mapping[Queue, int],
    again: Again | None = None,
    log_id: str | None = None,
    begin: Mapping[Queue, int] | None = None,
) -> JsonOffsets:
    """Return positions for JSON, ordered by topic and queue, because Spark compares offsets as text."""
    json_offsets: JsonOffsets = {}
    for (topic, queue_id), offset in sorted(positions.items()):
        json_offsets.setdefault(topic, {})[str(queue_id)] = offset
    if again:
        json_offsets[AGAIN] = {
            json.dumps([topic, queue_id, (until - EPOCH) // timedelta(microseconds=1)]): offset
            for (topic, queue_id), (offset, until) in sorted(again.items())
        }
    if log_id is not None:
        json_offsets[LOG] = {log_id: 0}
    if begin is not None:
        json_offsets[BEGIN] = {
            json.dumps([topic, queue_id]): offset for (topic, queue_id), offset in sorted(begin.items())
        }
    return json_offsets


def first_begin(value: object, what: str) -> Positions | None:
    """Return the start of a query's first micro-batch, from the offset of its end; None from any other offset.
    OffsetError: :func:`to_json` did not write it."""
    if not isinstance(value, dict) or BEGIN not in value:
        return None
    positions: Positions = {}
    try:
        for text, offset in value[BEGIN].items():
            topic, queue_id = json.loads(text)
            positions |= from_json({topic: {str(queue_id): offset}}, what)
    except (AttributeError, TypeError, ValueError) as problem:
        raise OffsetError(
            f"{what} has {str(value[BEGIN])[:200]} under {BEGIN!r}, which no stream wrote: {problem}"
        ) from problem
    return positions


def from_checkpoint(value: object, what: str = "the checkpoint") -> StreamOffset:
    """Read an offset that :func:`to_json` wrote. OffsetError: the value has another form."""
    if not isinstance(value, dict):
        raise OffsetError(f"{what} is not of the form {_EXAMPLE}: found {str(value)[:200]}")
    again: Again = {}
    try:
        for text, offset in value.get(AGAIN, {}).items():
            topic, queue_id, until_us = json.loads(text)
            positions = from_json({topic: {str(queue_id): offset}}, what)
            again |= {queue: (start, EPOCH + timedelta(microseconds=until_us)) for queue, start in positions.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as problem:
        raise OffsetError(
            f"{what} has {str(value[AGAIN])[:200]} under {AGAIN!r}, which no stream wrote: {problem}"
        ) from problem
    topics = {topic: queues for topic, queues in value.items() if topic not in OWN_KEYS}
    return StreamOffset(from_json(topics, what), again, _log_id(value.get(LOG), what))


def _log_id(value: object, what: str) -> str:
    if not isinstance(value, dict) or len(value) != 1:
        raise OffsetError(f"{what} has {str(value)[:200]} under {LOG!r}, which no stream wrote")
    return str(*value)


def from_json(value: object, what: str, marks: tuple[int, ...] = ()) -> Positions:
    """Read positions from a value of the form ``{"topic": {"queue": offset}}``, or raise OffsetError, which says
    ``what`` the value is. ``marks`` are allowed in place of an offset: of -2 (earliest) and -1 (latest)."""
    if not isinstance(value, dict) or not all(isinstance(queues, dict) for queues in value.values()):
        raise OffsetError(f"{what} is not of the form {_EXAMPLE}: found {str(value)[:200]}")
    positions: Positions = {}
    for topic, queues in value.items():
        if not isinstance(topic, str) or any("\ud800" <= character <= "\udfff" for character in topic):
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
                alternatives = "".join(
                    f", or {mark} for {word}" for mark, word in _WORD_OF_MARK.items() if mark in marks
                )
                raise OffsetError(
                    f"{what} has {offset} for topic {topic!r}, queue {queue_id}: at least 0 is expected{alternatives}"
                )
            positions[(topic, int(queue_id))] = offset
    return positions


def parse_offsets(text: str, option: str, keywords: tuple[str, ...], marks: tuple[int, ...]) -> str | Positions:
    """Read the value of ``startingOffsets`` or ``endingOffsets``: one of ``keywords`` (of ``earliest`` and ``latest``),
    or offsets by (topic, queue) from JSON, in which ``marks`` are allowed (of -2 and -1). OffsetError: it is neither.
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
    """Read positions that a person wrote, or copied from the progress report of a stream."""
    topics = {t: q for t, q in value.items() if t not in OWN_KEYS} if isinstance(value, dict) else value
    positions = CountedPositions(from_json(topics, what, marks))
    positions.marks = marks
    if isinstance(value, dict) and LOG in value:
        positions.log_id = _log_id(value[LOG], what)
    return positions


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return members


def resolve(
    option: str,
    given: str | Positions,
    queues: Mapping[str, int],
    tails: Mapping[Queue, int],
    firsts: Mapping[Queue, int] | None = None,
    marks: tuple[int, ...] = (),
) -> Positions:
    """Return the offset of each queue for a result of :func:`parse_offsets`. ``queues`` are the subscribed topics with
    their numbers of queues, ``tails`` the next offsets, ``firsts`` the first kept ones where messages have expired.
    ``marks`` are those allowed, for the error's text.

    OffsetError: JSON names a topic or queue that is not read, or omits one. OffsetOutOfRangeError: an offset is past
    the end of its queue.
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
            alternatives = " or ".join(f"{mark} for {word}" for mark, word in _WORD_OF_MARK.items() if mark in marks)
            hint = f", with {alternatives} where you have no offset" if alternatives else ""
            raise OffsetError(
                f"{option} leaves out queue {queue_id} of topic {topic!r}: name every queue that is subscribed to{hint}"
            )
    meaning = {queue: {EARLIEST_OFFSET: starts[queue], LATEST_OFFSET: end} for queue, end in ends.items()}
    return {queue: meaning[queue].get(offset, offset) for queue, offset in given.items()}


def parse_timestamp(text: str, option: str) -> datetime:
    """Read a time with a zone, such as ``2025-03-01T08:00:00Z`` or ``…T09:00:00+01:00``, or milliseconds since 1970;
    OptionError for anything else. A time without a zone or a number of seconds is refused, because its meaning is a
    guess."""
    value = text.strip()
    example = "write it as 2025-03-01T08:00:00Z, or as milliseconds since 1970"
    if value.isascii() and value.isdigit():
        try:
            milliseconds = int(value)
            time = _from_ms(milliseconds)
        except (OverflowError, ValueError) as problem:
            raise OptionError(f"{text[:80]!r} is not a time: {example}", argument=option) from problem
        if milliseconds < EPOCH_MS_MIN:
            raise OptionError(
                f"{text!r} is too small for milliseconds since 1970 (are they seconds?): {example}", argument=option
            )
        return require_time(time, option)
    try:
        time = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", value))
    except ValueError as problem:
        raise OptionError(f"{text!r} is not a time: {example}", argument=option) from problem
    if time.tzinfo is None:
        raise OptionError(f"{text!r} has no time zone: {example}", argument=option)
    return require_time(time, option)


def _from_ms(milliseconds: int) -> datetime:
    return EPOCH + timedelta(milliseconds=milliseconds)


# ---------------------------------------------------------------- suspended queues
def no_longer_suspended(suspended: Again, now: datetime) -> Again:
    """Return the queues whose suspension is over."""
    return {queue: (offset, until) for queue, (offset, until) in suspended.items() if until <= now}


def seconds_to_wait(suspended: Again, now: datetime) -> float:
    return max(0.0, (min(until for _, until in suspended.values()) - now).total_seconds())
