"""Work that a program does beside its main work, such as drains and upkeep: in threads, until it ends."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

AT_EXIT_S_MAX = 10.0
"""How long the end waits for what is under way. Then it is left: a crash may interrupt it anywhere, too."""


@contextmanager
def running(stop_event: threading.Event, workers: Mapping[str, Callable[[threading.Event], object]]) -> Iterator[None]:
    """Run workers in threads until the block ends, and then wait for them a little: Python crashes when it ends while
    a thread is within delta-rs.

    Parameters
    ----------
    stop_event : threading.Event
        Given to each worker; set when the block ends.
    workers : mapping of str to callable
        By the names of their threads.
    """
    threads = [
        threading.Thread(target=worker, args=(stop_event,), name=name, daemon=True) for name, worker in workers.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop_event.set()
        for thread in threads:
            thread.join(AT_EXIT_S_MAX)


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Within the block SIGTERM and SIGINT set the event, so that what is under way comes to its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        logger.info("stopping after %s", signal.Signals(number).name)
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
