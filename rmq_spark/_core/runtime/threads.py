"""Runs background work of a program, such as drains and upkeep, in threads."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

AT_EXIT_S_MAX = 10.0
"""Most seconds to wait for a thread at the end. Then it is left running: it must stand a crash anywhere, too."""


@contextmanager
def running(stop_event: threading.Event, workers: Mapping[str, Callable[[threading.Event], object]]) -> Iterator[None]:
    """Run workers, by the names of their threads, until the block ends, and then wait briefly for them, because Python
    crashes when it exits while a thread is within delta-rs. Each worker gets the event, which is set when the block
    ends."""
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
    """Within the block SIGTERM and SIGINT set the event, so that work under way can finish."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        logger.info("stopping after %s", signal.Signals(number).name)
        stop.set()

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
