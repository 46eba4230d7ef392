"""Spark drivers killed with SIGKILL at every point of the protocol: the next run and a check make all agree.

One driver runs four streams: transactions per batch, message and key through format("txmq"), and per key through
foreachBatch. All of them stop at the point in their second of three micro-batches; then the whole driver is killed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from dying import POINTS
from processes import Program
from shop import STREAMS, accepted, assert_agreement, check, open_shop, orders, visible

BATCH = "1"


def drive(root: Path, die_at: str | None = None, attempt: int = 1) -> Program:
    point = {} if die_at is None else {"DIE_AT": die_at, "DIE_BATCH": BATCH, "DIE_ATTEMPT": str(attempt)}
    return Program("driver.py", root, *STREAMS, DIE_ROOT=str(root), **point)


def die(root: Path, point: str, attempt: int = 1) -> None:
    driver = drive(root, point, attempt)
    driver.wait_for(*STREAMS)
    driver.kill()


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_killed_at_a_point_loses_and_doubles_nothing(tmp_path: Path, point: str) -> None:
    open_shop(tmp_path)
    die(tmp_path, point)
    for name, per in STREAMS.items():  # the point was the right one
        first, both = accepted(per, [0]), accepted(per, [0, 1])
        assert orders(tmp_path, name) == (first if point in ("staged", "prepared", "executing") else both)
        assert visible(tmp_path, name) == (both if point in ("decided", "before Spark's commit") else first)
    drive(tmp_path).finish()
    for name in STREAMS:
        check(tmp_path, name)
        assert_agreement(tmp_path, name)


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop whose driver died after prepare, and whose half batches a check then rolled back."""
    root = tmp_path_factory.mktemp("rolled-back") / "shop"
    open_shop(root)
    die(root, "prepared")
    for name in STREAMS:
        assert check(root, name).rolled_back.messages == 30
    return root


@pytest.mark.parametrize("point", ["prepared", "executed", "decided"])
def test_a_driver_killed_within_a_reopened_attempt_loses_and_doubles_nothing(
    rolled_back: Path, point: str, tmp_path: Path
) -> None:
    # Under the path that it was made at, which the source's checkpoint knows.
    kept = tmp_path / "kept"
    shutil.copytree(rolled_back, kept)
    try:
        die(rolled_back, point, attempt=2)
        for name, per in STREAMS.items():
            assert orders(rolled_back, name) == accepted(per, [0] if point == "prepared" else [0, 1])
        drive(rolled_back).finish()
        for name in STREAMS:
            check(rolled_back, name)
            assert_agreement(rolled_back, name)
    finally:
        shutil.rmtree(rolled_back)
        shutil.move(kept, rolled_back)
