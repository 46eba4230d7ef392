"""Ids as a list shortens them in a narrow terminal: ``send.pay…-000000001:0``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.errors import CorruptLogError, HalfBatchNotFoundError

if TYPE_CHECKING:
    from rmq_spark.log import CommitLog

NAMED = 5
"""The most ids that an error names."""
_WHOLE_HALF_ID = re.compile(r"[^:…]+:\d+(-[0-9a-f]+)?:")


def whole_id(log: CommitLog, name: str) -> str:
    """Return a half id, a transaction id or a message id as it is, or the one whole id that a shortened one stands for.

    Raises
    ------
    HalfBatchNotFoundError
        When the shortened id stands for several ids, or for none.
    """
    begin, mark, end = name.partition("…")
    if not mark or _WHOLE_HALF_ID.match(name):  # the key in a transaction id may have the character
        return name
    found = sorted({match for half_id in _half_ids(log) for match in _matches(half_id, begin, end)})
    if len(found) == 1:
        return found[0]
    if not found:
        raise HalfBatchNotFoundError(
            f"{name!r} was shortened, and no half batch of this commit log has such an id: --wide shows it whole"
        )
    more = f" and {count_of(len(found) - NAMED, 'other')}" if len(found) > NAMED else ""
    raise HalfBatchNotFoundError(
        f"{name!r} was shortened, and it stands for {', '.join(found[:NAMED])}{more}: type one of them whole"
    )


def _half_ids(log: CommitLog) -> set[str]:
    from rmq_spark._core.inspect.history import retained_batches

    known = {*log.engine.open_half_ids(), *log.conflicts(), *log.quarantined()["half_id"].to_pylist()}
    with suppress(CorruptLogError):  # a damaged file hides only ids of its own
        known.update(retained_batches(log.engine)["half_id"].to_pylist())
    return known


def _matches(half_id: str, begin: str, end: str) -> Iterator[str]:
    """Yield the half id, or an id with it in front, when it begins and ends as the shortened id does."""
    if not half_id.startswith(begin):
        return
    for position in (*(m.start() for m in re.finditer(":", end)), len(end)):
        own_end, rest = end[:position], end[position:]
        if half_id.endswith(own_end) and len(begin) + len(own_end) < len(half_id) and (own_end or not end):
            yield half_id + rest
