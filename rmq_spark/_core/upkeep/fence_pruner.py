"""Prunes the fence rows that listeners keep in their databases of half batches that have left the log."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator

from rmq_spark._core.listeners.transaction_listener import TransactionListener
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.log_records import failure
from rmq_spark._core.vocabulary.options import FENCE_RETENTION_S, FENCE_RETENTION_S_MIN, seconds

logger = logging.getLogger(__name__)

EVERY_S = 24 * 3600.0
"""Seconds between two passes over all rows of a fence."""
TURN_S = EVERY_S / 2
"""A process skips a fence on which another one has begun a pass within this many seconds."""


class FencePruner:
    """Prunes the fences of listeners once a day, a page at a time: rows of this log that are older than ``older_than``
    seconds. Listeners without a method ``pruning_in_turn`` keep nothing that could be pruned."""

    def __init__(
        self, engine: Engine, listeners: Iterable[TransactionListener], older_than: float = FENCE_RETENTION_S
    ) -> None:
        self._engine = engine
        self._listeners = [listener for listener in listeners if hasattr(listener, "pruning_in_turn")]
        self._older_than = seconds(older_than, "fences", FENCE_RETENTION_S_MIN)
        self._begun_s = -math.inf
        self._left: list[tuple[TransactionListener, Iterator[int]]] = []  # fences that today's pass has not finished

    def run(self, seconds_max: float, is_over: Callable[[], bool] = lambda: False) -> int:
        """Go on for about ``seconds_max``. Returns the number of deleted rows. A failed fence waits for a day."""
        runtime = self._engine.runtime
        began_s = runtime.monotonic()
        if not self._left and self._listeners and began_s - self._begun_s >= EVERY_S:
            self._begun_s, engine = began_s, self._engine.new_handle()
            self._left = [(owner, owner.pruning_in_turn(self._older_than, engine, TURN_S)) for owner in self._listeners]
        deleted = 0
        while self._left and runtime.monotonic() - began_s < seconds_max and not is_over():
            listener, pages = self._left[0]
            try:
                deleted += next(pages)
            except StopIteration:
                self._left.pop(0)
            except Exception as problem:
                self._left.pop(0)
                logger.warning(
                    "fence rows of %r were not pruned: %s. (Where its user lacks the right to delete them, grant it; "
                    "fences = \"0s\" in [maintenance] switches this off.)", listener, failure(problem),
                )  # fmt: skip
        if deleted:
            logger.info("%d fence rows were pruned", deleted)
        return deleted
