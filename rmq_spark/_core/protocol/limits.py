"""How much a producer group may leave pending. Nothing limits it unless asked to.

A half batch stays pending while its listener answers UNKNOWN, or when its program died; a checker settles it. When no
checker runs, half batches pile up until the disk is full. A limit ends the sending before that, with an error that says
so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from rmq_spark._core.vocabulary.options import byte_count, whole_number
from rmq_spark.errors import PendingLimitError, TxmqError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

WARNED_AT = 0.8
"""At this part of a limit a warning is logged."""


@dataclass(frozen=True)
class PendingLimits:
    """How much of one producer group may be pending before a new half batch is refused; None for no limit.

    Attributes
    ----------
    batches : int or None
        Half batches.
    size : int or None
        Bytes of their files.
    """

    batches: int | None = None
    size: int | None = None

    @classmethod
    def of(cls, batches: int | None, size: int | str | None) -> PendingLimits:
        """Limits from the arguments ``max_pending_batches`` and ``max_pending_bytes``.

        Raises
        ------
        OptionError
            When one is not a whole number of 1 or more (bytes also as ``"500m"`` or ``"10g"``).
        """
        return cls(
            None if batches is None else whole_number(batches, "max_pending_batches", 1),
            None if size is None else byte_count(size, "max_pending_bytes"),
        )


NO_LIMITS = PendingLimits()


class _Pending(NamedTuple):
    """A half batch with pending messages."""

    half_id: str
    producer_group: str
    size: int
    prepared_at: datetime


class PendingGuard:
    """Refuses new half batches of a producer group of which too much is pending.

    Threads and programs that send at the same moment may go above the limit together, by one half batch each.

    Parameters
    ----------
    log : Engine
    limits : PendingLimits
    """

    def __init__(self, log: Engine, limits: PendingLimits) -> None:
        self._log = log
        self.limits = limits
        self._seen: dict[str, _Pending] = {}  # of all groups; replaced, never changed
        self._warned = False

    def require_room(self, producer_group: str) -> None:
        """Return when a new half batch of this group may be prepared. Warn when little room is left.

        Raises
        ------
        PendingLimitError
            When one more would be above a limit.
        """
        if self.limits == NO_LIMITS:
            return
        mine = [found for found in self._pending() if found.producer_group == producer_group]
        size = sum(found.size for found in mine)
        named = (
            (self.limits.batches, len(mine), "maxPendingBatches"),
            (self.limits.size, size, "maxPendingBytes"),
        )
        full = [f"{name}={limit}" for limit, found, name in named if limit is not None and found >= limit]
        count = "1 half batch" if len(mine) == 1 else f"{len(mine)} half batches"
        what = f"producer group {producer_group!r} has {count} ({size} bytes) pending"
        if full:
            oldest = min(mine, key=lambda found: found.prepared_at)
            raise PendingLimitError(
                f"{what}, and {' and '.join(full)}: nothing was sent. The oldest is {oldest.half_id!r}, since "
                f"{oldest.prepared_at:%Y-%m-%d %H:%M:%S} UTC. Does a check job run for this group, and does its "
                f"listener know the answer? 'txmq pending {self._log.path}' lists what is pending, and 'txmq resolve' "
                "settles it by hand"
            )
        near = [f"{name}={limit}" for limit, found, name in named if limit is not None and found >= WARNED_AT * limit]
        if near and not self._warned:
            logger.warning("%s; at %s sending fails. Does a check job run?", what, " and at ".join(near))
        self._warned = bool(near)

    def _pending(self) -> list[_Pending]:
        """What is pending of all groups. Each half batch is read once, when it is seen for the first time."""
        seen = self._seen
        self._seen = {
            half_id: found
            for half_id in self._log.open_half_ids()
            for found in ([seen[half_id]] if half_id in seen else self._look_at(half_id))
        }
        return list(self._seen.values())

    def _look_at(self, half_id: str) -> Iterator[_Pending]:
        with suppress(TxmqError):  # it has left meanwhile, or cannot be read: that is for a checker to tell
            record = self._log.get(half_id)
            size = self._log.half.bytes_of(record)
            yield _Pending(half_id, record.header.producer_group, size, record.prepared_at)
