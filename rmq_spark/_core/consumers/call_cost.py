"""Measures the calls of a message listener, to choose how many messages a thread takes at a time."""

from __future__ import annotations

from typing import Any

from rmq_spark._core.consumers.message_listener import EachMessage, Listen
from rmq_spark._core.consumers.progress import ProcessQueue
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.message import MessageExt

EACH_ROWS_MAX = 2_048
TAKE_S = 0.005
"""Seconds of work that a thread aims to take at a time for a listener of single messages, estimated from earlier
calls. Every take has a cost, and other threads cannot help with its messages."""
TAKE_S_MAX = 0.05
"""Seconds after which a thread gives back the rest of its take, so that other threads may take it."""
QUICK_S = 50e-6
"""Seconds per message below which only one thread at a time calls a listener of single messages. Such a listener does
not wait, so Python runs one call at a time anyway, and more threads slow it down."""


class CallCost:
    """The cost of a listener's calls, as of its recent ones. ``batch_rows``: messages of one call of a listener that
    does not take single messages."""

    def __init__(self, is_each: bool, batch_rows: int) -> None:
        self._is_each, self._batch_rows = is_each, batch_rows
        self.each_s: float | None = None
        """Recent seconds per message of the listener's calls."""

    def is_quick(self) -> bool:
        return self._is_each and self.each_s is not None and self.each_s < QUICK_S

    def rows_to_take(self, queue: ProcessQueue) -> int:
        if queue.tries and not self._is_each:
            return 1  # the last call failed as a whole: find the message that fails
        if not self._is_each:
            return self._batch_rows
        if self.each_s is None:
            return 1
        return max(1, min(EACH_ROWS_MAX, int(TAKE_S / max(self.each_s, 1e-9))))

    def note(self, listener: Listen | EachMessage, took_s: float, answered: int) -> None:
        each_s = (listener.took_s if isinstance(listener, Timed) else took_s) / answered
        self.each_s = each_s if self.each_s is None else 0.8 * self.each_s + 0.2 * each_s


class Timed(EachMessage):
    """Measures the calls of a listener of single messages. The work around them does not count: with many threads it
    waits for Python's lock, which would make the quickest listener look slow."""

    def __init__(self, listener: EachMessage, runtime: Runtime) -> None:
        super().__init__(self._call)
        self._called = listener.function
        self._monotonic = runtime.monotonic
        self.took_s = 0.0

    def _call(self, message: MessageExt) -> Any:
        began_s = self._monotonic()
        try:
            return self._called(message)
        finally:
            self.took_s += self._monotonic() - began_s
