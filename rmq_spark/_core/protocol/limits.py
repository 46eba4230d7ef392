"""Limits how much a producer group may leave pending. By default there is no limit.

A half batch stays pending while its listener answers UNKNOWN, or when its program died; a checker settles it. When no
checker runs, half batches pile up until the disk is full. With a limit, sending fails before that, and the error says
why.
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
"""Fraction of a limit at which a warning is logged."""


@dataclass(frozen=True)
class PendingLimits:
    """How many half batches of one producer group, and how many bytes of their files, may be pending before a new one
    is refused; None for no limit."""

    batches: int | None = None
    size: int | None = None

    @classmethod
    def of(cls, batches: int | None, size: int | str | None) -> PendingLimits:
        """Limits from the arguments ``max_pending_batches`` and ``max_pending_bytes``. OptionError: one is not a whole
        number of 1 or more (bytes also as ``"500m"`` or ``"10g"``)."""
        return cls(
            None if batches is None else whole_number(batches, "max_pending_batches", 1),
            None if size is None else byte_count(size, "max_pending_bytes"),
        )


NO_LIMITS = PendingLimits()


class _Pending(NamedTuple):
    half_id: str
    producer_group: str
    size: int
    prepared_at: datetime


class PendingGuard:
    """Refuses new half batches of a producer group that has too much pending.

    N senders at one moment may exceed the limit by N half batches, because each looks before it prepares.
    """

    def __init__(self, engine: Engine, limits: PendingLimits) -> None:
        self._engine = engine
        self.limits = limits
        self._seen: dict[str, _Pending] = {}  # of all groups; replaced, never changed
        self._warned = False

    def require_room(self, producer_group: str) -> None:
        """Raise PendingLimitError when a new half batch of this group would exceed a limit. Warn when little room is
        left."""
        if self.limits == NO_LIMITS:
            return
        own_batches = [pending for pending in self._pending() if pending.producer_group == producer_group]
        size = sum(pending.size for pending in own_batches)
        usage = (
            (self.limits.batches, len(own_batches), "maxPendingBatches"),
            (self.limits.size, size, "maxPendingBytes"),
        )
        reached = [f"{name}={limit}" for limit, pending, name in usage if limit is not None and pending >= limit]
        count = "1 half batch" if len(own_batches) == 1 else f"{len(own_batches)} half batches"
        sentence = f"producer group {producer_group!r} has {count} ({size} bytes) pending"
        if reached:
            oldest = min(own_batches, key=lambda pending: pending.prepared_at)
            raise PendingLimitError(
                f"{sentence}, and {' and '.join(reached)}: nothing was sent. The oldest is {oldest.half_id!r}, since "
                f"{oldest.prepared_at:%Y-%m-%d %H:%M:%S} UTC. Does a check job run for this group, and does its "
                f"listener know the answer? 'txmq pending {self._engine.path}' lists what is pending, and 'txmq "
                "resolve' settles it by hand"
            )
        near = [
            f"{name}={limit}" for limit, pending, name in usage if limit is not None and pending >= WARNED_AT * limit
        ]
        if near and not self._warned:
            logger.warning("%s; at %s sending fails. Does a check job run?", sentence, " and at ".join(near))
        self._warned = bool(near)

    def _pending(self) -> list[_Pending]:
        """The pending half batches of all groups. A half batch is read once, when it first appears."""
        seen = self._seen
        self._seen = {
            half_id: pending
            for half_id in self._engine.open_half_ids()
            for pending in ([seen[half_id]] if half_id in seen else self._look_at(half_id))
        }
        return list(self._seen.values())

    def _look_at(self, half_id: str) -> Iterator[_Pending]:
        with suppress(TxmqError):  # it has left meanwhile, or cannot be read, which a checker reports
            record = self._engine.get(half_id)
            size = self._engine.half.bytes_of(record)
            yield _Pending(half_id, record.header.producer_group, size, record.prepared_at)
