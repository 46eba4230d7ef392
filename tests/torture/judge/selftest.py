"""``make checker-selftest`` (``python -m tests.torture.judge.selftest``): is every seeded bug caught?

Prints a table of the mutants and ``caught N of N``; exit code 1 when one got away, or when the same seeds show anything
without the bug. A number as argument is the first seed; words pick the mutants whose name has them.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pyarrow as pa

from tests.torture.judge.anomalies import AnomalyKind
from tests.torture.judge.mutants import MUTANTS, SEEDS_MAX, Catch, hunt

PROCESSES = 2

ONE_OF_A_FAMILY = {
    "lost and doubled messages": "no txn check: a batch that is prepared is prepared again",
    "visibility": "a commit is torn: the rows of one file only",
    "outcome of a transaction": "a late commit is accepted after a check's rollback",
    "attempts and replays": "a new checkpoint is taken for a replay",
    "offsets": "the merge of op files loses rows",
    "polling": "a plan leaves out the first range",
    "order": "a decision commits the rows of a queue in reverse",
    "checks": "a check that nobody answered is counted",
    "Delta versions": "check, then rename: a log entry is overwritten",
    "refusals": "a refusal that a check finds is taken for what never happened",
    "the table messages": "a drain ends in the middle of a version of op",
    "leaving": "a half batch leaves that is open",
    "expiring": "messages expire before their time",
    "local state": "a replay executes instead of checking",
}
"""The mutant that every test run hunts for a family of anomalies: the quickest one that is caught as a kind of it."""


def catch(
    number: int, first_seed: int = 1, seeds_max: int = SEEDS_MAX, among: frozenset[AnomalyKind] | None = None
) -> Catch:
    """Hunt one mutant in this process, without the noise of what it breaks; ``among`` all kinds that are expected of it
    when not given."""
    logging.disable(logging.CRITICAL)
    threads = pa.cpu_count()
    pa.set_cpu_count(1)  # tables of a few rows: a pool of threads only costs
    gc.disable()
    try:
        mutant = MUTANTS[number]
        wanted = mutant.expected if among is None else mutant.expected & among
        return hunt(replace(mutant, expected=wanted), first_seed, seeds_max)
    finally:
        pa.set_cpu_count(threads)
        gc.enable()
        gc.collect()
        logging.disable(logging.NOTSET)


def catch_all(numbers: Sequence[int], first_seed: int = 1, seeds_max: int = SEEDS_MAX) -> Iterator[Catch]:
    """Hunt mutants in spawned processes, in the order of the list."""
    with get_context("spawn").Pool(PROCESSES) as pool:
        waiting = [pool.apply_async(catch, (number, first_seed, seeds_max)) for number in numbers]
        for result in waiting:
            yield result.get()


def run(seconds: float, seed: int) -> dict[str, int | str | list[Any]]:
    """Hunt every mutant once, beginning with this seed; it is done when all are, whatever the time."""
    started = time.monotonic()
    catches = list(catch_all(range(len(MUTANTS)), seed))
    return {
        "what": "self-test of the anomaly checker",
        "mutants": len(catches),
        "caught": sum(c.caught for c in catches),
        "seeds tried": sum(c.tries for c in catches),
        "first seed": seed,
        "seconds": round(time.monotonic() - started),
        "failures": [line(c) for c in catches if not c.caught or c.control],
    }


def line(found: Catch) -> str:
    """A row of the table."""
    what = f"the control failed: {found.control}" if found.control else found.found
    return f"{found.mutant:78} {what:42} {found.seed:>8} {found.tries:>6}"


def main(arguments: Sequence[str]) -> int:
    first_seed = next((int(a) for a in arguments if a.isdigit()), 1)
    words = [a.lower() for a in arguments if not a.isdigit()]
    numbers = [i for i, m in enumerate(MUTANTS) if all(w in m.name.lower() for w in words)]
    if not numbers:
        print(f"no seeded bug has {' and '.join(map(repr, words))} in its name. There are:")
        print(*(m.name for m in MUTANTS), sep="\n")
        return 2
    print(f"{'mutant':78} {'caught as':42} {'seed':>8} {'tries':>6}")
    catches = []
    for found in catch_all(numbers, first_seed):
        catches.append(found)
        print(line(found), flush=True)
    caught = sum(c.caught for c in catches)
    sound = all(not c.control for c in catches)
    print(f"caught {caught} of {len(catches)}" + ("" if sound else "; a control failed"))
    return 0 if caught == len(catches) and sound else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
