"""Work that a program does beside its main work, such as drains and upkeep: in threads, until it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

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
