"""How many pieces of work a second threads do, or a producer that is asked without waiting; and how long each takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Counted:
    """So many a second, and how long each took."""

    per_s: float
    median_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: float, each: Sequence[float]) -> Counted:
        """From the seconds that all of them took together, and each took by itself."""
        return cls(len(each) / seconds, median(each) * 1000, sorted(each)[int(len(each) * 0.99)] * 1000)


def timed(work: Callable[[], object], threads: int, seconds: float) -> Counted:
    """Each thread does one piece of work after the other.

    Raises
    ------
    Exception
        What the work raised first.
    """
    each: list[float] = []
    failed: list[BaseException] = []
    began = time.perf_counter()

    def run() -> None:
        try:
            while (start := time.perf_counter()) < began + seconds:
                work()
                each.append(time.perf_counter() - start)
        except Exception as problem:
            failed.append(problem)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]
    return Counted.of(time.perf_counter() - began, each)


def in_flight(send: Callable[[], Future[Any]], at_once: int, seconds: float) -> Counted:
    """One thread sends without waiting. ``send`` itself must wait while so many are under way.

    Counted is what ended within the seconds after the first ``at_once`` had ended. The time of one is from the call.

    Raises
    ------
    Exception
        What a send raised first.
    """
    ended: list[tuple[float, float]] = []  # when, and how long it took
    failed: list[BaseException] = []
    all_ended = threading.Semaphore(0)

    def send_one() -> None:
        start = time.perf_counter()

        def note(future: Future[Any]) -> None:
            problem = future.exception()
            if problem is not None:
                failed.append(problem)
            now = time.perf_counter()
            ended.append((now, now - start))
            all_ended.release()

        send().add_done_callback(note)

    sent = 0
    while len(ended) < at_once and not failed:
        send_one()
        sent += 1
    began = time.perf_counter()
    while time.perf_counter() < began + seconds and not failed:
        send_one()
        sent += 1
    for _ in range(sent):
        all_ended.acquire()
    if failed:
        raise failed[0]
    return Counted.of(seconds, [took for when, took in ended if began <= when < began + seconds])
