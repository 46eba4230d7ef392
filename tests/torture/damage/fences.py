"""Damaged fences: the SQLite file that a SqlTransactionListener asks, damaged in every way.

SQLite has no checksums of its own, so changed bits can be a wrong answer; how often is counted. All other damage is no
answer, or the right one.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import sqlalchemy as sa

from rmq_spark import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    HalfBatch,
    Rollback,
    SqlTransactionListener,
    create_fence,
)
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import pending, prepare
from tests.torture.damage.ways import DAMAGES

BATCHES = 8
CHANGES_VALUES = ("flip_a_bit", "flip_some_bits", "zero_a_block")
"""Damage that SQLite cannot tell from a value that somebody wrote."""


def work(connection: sa.Connection, batch: HalfBatch) -> None:
    """The even half batches run; the odd ones are rolled back."""
    if batch.batch_id % 2:
        raise Rollback


def build(folder: Path) -> list[HalfBatch]:
    """A fence that knows of half batches: the even ones ran, the odd ones were rolled back."""
    file = folder / "fence.db"
    url = sa.make_url(f"sqlite:///{file}")
    fence_id = create_fence(url)
    listener = SqlTransactionListener(url, work)
    log = InMemoryCommitLog(topics={"orders": 1})
    batches: list[HalfBatch] = []
    for batch_id in range(BATCHES):
        record = prepare(log, batch_id, 2)
        batch = log.engine.half_batch(record, log.engine.state_of(record), 1, pending(log, record))
        batch.fence_id = fence_id
        listener.execute_local_transaction(batch)
        batches.append(batch)
    return batches


def try_damage(folder: Path, batches: list[HalfBatch], seed: int) -> Counter[str]:
    """Damage a copy of the fence, and ask about every half batch: what kinds of answers came."""
    rng = random.Random(seed)
    damage = sorted(DAMAGES)[seed % len(DAMAGES)]
    copy = folder / f"fence-{seed}.db"
    shutil.copy(folder / "fence.db", copy)
    counts: Counter[str] = Counter()
    DAMAGES[damage](copy, [], rng)
    listener = SqlTransactionListener(sa.make_url(f"sqlite:///{copy}"), work, lock_timeout=0.1)
    for batch in batches:
        right = ROLLBACK_MESSAGE if batch.batch_id % 2 else COMMIT_MESSAGE
        try:
            (said,) = listener.check_local_transaction(batch).each(1)  # type: ignore[union-attr]
        except Exception:  # no answer: the check reports it, and nothing is decided
            counts["no answer"] += 1
            continue
        answer = said.state
        outcome = "right" if answer is right else "unknown" if answer is UNKNOWN else f"wrong {answer}"
        counts[outcome] += 1
    for file in folder.glob(f"{copy.name}*"):
        file.unlink()
    return counts


def run(seconds: float, seed: int) -> dict[str, int | str | list[str]]:
    """Damage the fence until the time is over. Wrong answers are counted; one to damage that changes no value fails."""
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = build(folder)
        at = seed
        while time.monotonic() < until:
            found = try_damage(folder, batches, at)
            counts += found
            counts["cases"] += 1
            damage = sorted(DAMAGES)[at % len(DAMAGES)]
            if damage not in CHANGES_VALUES and any(k.startswith("wrong") for k in found):
                failures.append(f"seed {at}: {damage}: {dict(found)}")
            at += 1
    return {**counts, "seed": seed, "failures": failures}
