"""What a stream does for its consumer group: it publishes progress, and reads again the queues that were suspended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rmq_spark.commitlog.group_store import Place, Session
from rmq_spark.errors import GroupInUseError
from rmq_spark.redaction import traceback_of
from rmq_spark.source.offsets import Again, Positions, Queue

if TYPE_CHECKING:
    from rmq_spark.commitlog.log import CommitLog

logger = logging.getLogger(__name__)


class GroupProgress:
    """The progress of one run of a query."""

    def __init__(self, log: CommitLog, group: str) -> None:
        self._log = log
        self._group = group
        self._session = Session()
        self._places: dict[Queue, Place] = {}
        self._published: tuple[Positions, Again] | None = None

    def publish(self, positions: Positions, again: Again) -> None:
        """Say that Spark has done everything below these positions, and has read these queues again.

        Raises
        ------
        GroupInUseError
            When another query, which started earlier, reads the same queues for the group.
        StorageError
            When nobody can say which queues are suspended.
        """
        if (positions, again) == self._published:
            return
        try:
            answered = {queue: until for queue, (_, until) in again.items()}
            self._log.groups.publish(self._group, positions, self._session, answered)
            self._places = self._log.groups.places(self._group, refresh=False)
            self._published = (positions, again)
        except GroupInUseError:
            raise
        except Exception as problem:  # the checkpoint is what counts; the next micro-batch publishes more
            logger.warning("progress of consumer group %r was not published: %s", self._group, traceback_of(problem))
            # But where a queue is suspended, the group is what counts: who does not know it would pass over messages.
            self._places = self._log.groups.places(self._group)

    def suspended(self, positions: Positions) -> Again:
        """The queues whose group stands below these positions: its orderly consumer has suspended them."""
        return {
            queue: (place.next_offset, place.suspended_until)
            for queue, place in self._places.items()
            if place.suspended_until is not None and place.next_offset < positions.get(queue, 0)
        }

    def place_due(self) -> None:
        """A group's retries come in time although nobody else writes to the log."""
        try:
            self._log.place_due()
        except Exception as problem:  # a round of checks, or the next trigger, places them
            logger.warning("delayed messages were not placed: %s", traceback_of(problem))
