"""Publishes a stream's progress for its consumer group, and finds the suspended queues that it must read again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rmq_spark._core.log.group_table import GroupPosition, Session
from rmq_spark._core.vocabulary.redaction import traceback_of
from rmq_spark.errors import GroupInUseError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.reads.offsets import Again, Positions
    from rmq_spark._core.vocabulary.queues import Queue

logger = logging.getLogger(__name__)


class GroupProgress:
    def __init__(self, engine: Engine, group: str) -> None:
        self._engine = engine
        self._group = group
        self._session = Session()
        self._positions: dict[Queue, GroupPosition] = {}
        self._published: tuple[Positions, Again] | None = None

    def publish(self, positions: Positions, again: Again) -> None:
        """Publish that Spark has processed all messages below these positions, and has read these queues again. When
        another query, which started earlier, reads the same queues for the group, that is a GroupInUseError; suspended
        queues that cannot be read are a StorageError."""
        if (positions, again) == self._published:
            return
        try:
            answered = {queue: until for queue, (_, until) in again.items()}
            self._engine.groups.publish(self._group, positions, self._session, answered)
            self._positions = self._engine.groups.positions(self._group, refresh=False)
            self._published = (positions, again)
        except GroupInUseError:
            raise
        except Exception as problem:  # the query goes on by its checkpoint, and the next micro-batch publishes again
            logger.warning("progress of consumer group %r was not published: %s", self._group, traceback_of(problem))
            # Suspended queues are recorded only in the group. A stream that missed one would skip messages.
            self._positions = self._engine.groups.positions(self._group)

    def suspended(self, positions: Positions) -> Again:
        """Return the suspended queues where the group is behind these positions: the stream reads them again."""
        return {
            queue: (position.next_offset, position.suspended_until)
            for queue, position in self._positions.items()
            if position.suspended_until is not None and position.next_offset < positions.get(queue, 0)
        }

    def place_due(self) -> None:
        """Place the delayed messages that are due: a group's retries must arrive even if nobody else writes."""
        try:
            self._engine.ledger.place_due()
        except Exception as problem:  # a round of checks, or the next trigger, places them
            logger.warning("delayed messages were not placed: %s", traceback_of(problem))
