"""Merges the small files of ``op`` in the background, when decisions have left many of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rmq_spark._core.log import op_merge
from rmq_spark._core.runtime.log_records import failure
from rmq_spark._core.vocabulary.redaction import redacted

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)


class Compaction:
    """Compacts ``op`` and moves the low-water mark in a background thread, with table handles of its own."""

    def __init__(self, engine: Engine, in_background: Callable[[Callable[[], None]], threading.Thread | None]) -> None:
        self._engine = engine
        self._in_background = in_background
        self.is_on = True
        """Whether decisions start a run. Upkeep by hand ignores it."""
        self._thread: threading.Thread | None = None

    def after_commit(self) -> None:
        """Start a run, if ``op`` has many small files and no run is under way."""
        if (
            self.is_on
            and op_merge.is_due(self._engine.op_table)
            and (self._thread is None or not self._thread.is_alive())
        ):
            try:
                self._thread = self._in_background(self.run)
            except RuntimeError as problem:  # no thread can be started; the next commit tries again
                logger.info("upkeep waits for a later commit: %s", problem)

    def wait(self) -> None:
        """Wait for the run that is under way."""
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Compact, then move the mark. A failure is logged and does not stop a sink; a later commit tries again."""
        try:
            engine = self._engine.another()
            # In this order the mark reads few files of op, and a cold start reads only the mark's small file and
            # those after it.
            op_merge.compact_op(engine.op_table)
            engine.ledger.mark()
        except Exception as problem:
            logger.warning("upkeep of %s failed: %s", redacted(self._engine.path), failure(problem))
