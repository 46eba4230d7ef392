"""Which seeds a test run plays, and how many.

Seeds are counted from the commit: each commit plays others, so a run searches where no run has searched before, and the
same commit plays the same ones again. ``SEED=n`` counts from ``n`` instead, to play again what a run reported.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

WITHOUT_A_COMMIT = 1
"""The first seed outside a git checkout, for example of a source archive."""
SEED_MAX = 2**60
TIER = os.environ.get("TXMQ_TESTS") or "quick"
ALL = TIER == "all"
"""Whether this is ``make test-all``, the run with the long counts. The tier ``every`` is ``make test`` with every case
of those that take turns: for other Sparks and other packages."""


def how_many(quick: int, in_all: int) -> int:
    """The count for this run: of ``make test``, or of ``make test-all``."""
    return in_all if ALL else quick


def has_its_turn(number: int, of: int) -> bool:
    """Whether ``make test`` runs this one of many alike cases: one of ``of``, and another one at the next commit."""
    return TIER != "quick" or number % of == first_seed() % of


def first_seed() -> int:
    """``SEED``, or the short hash of the commit read as a number."""
    if given := os.environ.get("SEED"):
        if not given.isdecimal() or int(given) > SEED_MAX:
            raise ValueError(f"SEED={given} is no seed: a whole number from 0 to {SEED_MAX} is expected")
        return int(given)
    commit = short_commit()
    return int(commit, 16) if commit else WITHOUT_A_COMMIT


def short_commit() -> str | None:
    """Seven hexadecimal digits of the commit that is checked out."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()[:7]


def check_environment() -> None:
    """Raise ValueError when the environment asks for a tier or a seed that does not exist."""
    if TIER not in ("quick", "every", "all"):
        raise ValueError(f"TXMQ_TESTS={TIER} is no tier of tests: 'quick', 'every' or 'all' is expected")
    first_seed()


def say() -> str:
    """A line for the top of a run: where its seeds begin, and how to play them again."""
    if os.environ.get("SEED"):
        return f"seeds: from {first_seed()} (SEED)"
    commit = short_commit()
    whence = f"commit {commit}" if commit else "no commit"
    return f"seeds: from {first_seed()} ({whence}; SEED={first_seed()} to replay)"
