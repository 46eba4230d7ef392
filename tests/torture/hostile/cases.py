"""Hostile input at every public door: it is accepted and stored as it is, or refused in words; nothing else.

A case is one generated input. It is named by the run's seed, its door and its number, and replayed from them.
"""

from __future__ import annotations

import itertools
import logging
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from tests.torture.hostile import doors, logs
from tests.torture.hostile.doors import Door

DOORS: Mapping[str, tuple[Door, int]] = {**doors.DOORS, **logs.DOORS}
CASE_SECONDS_MAX = 60
FAILURES_KEPT = 50


@dataclass(frozen=True)
class Failure:
    """A case for which the property does not hold."""

    seed: int
    door: str
    number: int
    problem: str

    def __str__(self) -> str:
        return f"play({self.seed}, {self.door!r}, {self.number}): {self.problem}"


def play(seed: int, door: str, number: int) -> bool:
    """One case, which raises when the property does not hold; True when the input was accepted."""
    with _watched():
        return DOORS[door][0](random.Random(f"{seed}/{door}/{number}"))


def cases(weights: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Doors in turn, by their weights, for ever: (door, number of the case)."""
    for round_ in itertools.count():
        for door, weight in weights.items():
            for i in range(weight):
                yield door, round_ * weight + i


def try_case(seed: int, door: str, number: int, counts: Counter[str]) -> Failure | None:
    """Play a case and count it."""
    counts[f"{door}: cases"] += 1
    try:
        counts[f"{door}: accepted"] += play(seed, door, number)
    except BaseException as problem:  # SystemExit and a panic of Rust count as well
        if isinstance(problem, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(problem.__traceback__)[-1]
        text = f"{type(problem).__name__}: {str(problem)[:400]} ({where.filename}:{where.lineno})"
        return Failure(seed, door, number, text)
    return None


@contextmanager
def _watched() -> Iterator[None]:
    """A case that hangs is a violation, at least where Python can still be reached."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise doors.Violation(f"no answer in {CASE_SECONDS_MAX} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(CASE_SECONDS_MAX)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(seconds: float, seed: int) -> dict[str, int | str | list[str]]:
    """Cases until the time is over."""
    logging.getLogger("rmq_spark").setLevel(logging.CRITICAL)
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    for number, (door, case) in enumerate(cases({door: weight for door, (_, weight) in DOORS.items()})):
        if time.monotonic() >= until or len(failures) >= FAILURES_KEPT:
            break
        failure = try_case(seed, door, case, counts)
        if failure is not None:
            failures.append(failure)
        if number and number % 20_000 == 0:
            print(f"hostile input: {number} cases, {len(failures)} failures", flush=True)
    total = sum(n for name, n in counts.items() if name.endswith(": cases"))
    return {"cases": total, **counts, "seed": seed, "failures": [str(f) for f in failures]}
