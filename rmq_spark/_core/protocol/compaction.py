"""Compacts ``op`` in the background, when decisions have left it many small files."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from rmq_spark._core.log import op_merge
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.logs import failure

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)


class Compaction:
    """Compacts ``op`` and moves the low-water mark, off the critical path: in a thread, with tables of its own.

    Parameters
    ----------
    log : Engine
    """

    def __init__(self, log: Engine) -> None:
        self._log = log
        self._thread: threading.Thread | None = None

    def after_commit(self) -> None:
        """Begin, when ``op`` has many small files and nothing is under way."""
        if self._log.upkeep and op_merge.is_due(self._log.op) and (self._thread is None or not self._thread.is_alive()):
            try:
                self._thread = self._log.in_background(self.run)
            except RuntimeError as problem:  # no thread to be had; the next commit tries again
                logger.info("upkeep waits for a later commit: %s", problem)

    def wait(self) -> None:
        """Wait for what is under way."""
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Do both now. A failure is logged: upkeep is tried again later, and must not stop a sink."""
        try:
            log = self._log.another()
            # Merged first, op has few files when the mark reads it. And a cold start then reads the mark's own small
            # file, and what came after it.
            op_merge.compact_op(log.op)
            log.move_mark()
        except Exception as problem:
            logger.warning("upkeep of %s failed: %s", redacted(self._log.path), failure(problem))
