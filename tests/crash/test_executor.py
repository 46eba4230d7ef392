"""Executor workers killed while they write half files: nothing is in the log yet, and orphans harm nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from dying import WORKER_POINTS
from processes import Program
from shop import assert_agreement, log_of, open_shop


def drive(root: Path, **environment: str) -> Program:
    return Program("driver.py", root, "key", DIE_ROOT=str(root), **environment)


@pytest.mark.parametrize("point", WORKER_POINTS)
def test_a_worker_killed_while_it_writes_is_tried_again_by_spark_and_leaves_only_orphans(
    tmp_path: Path, point: str
) -> None:
    open_shop(tmp_path, ["key"])
    drive(tmp_path, DIE_AT=point, TASK_TRIES="3").finish()
    assert (tmp_path / "reached" / "worker").exists()
    assert_agreement(tmp_path, "key")
    table = log_of(tmp_path, "key").half.table
    live = set(table.actions()["path"].to_pylist())
    assert len({f.name for f in (tmp_path / "key" / "log" / "half").glob("*.parquet")} - live) == 1


def test_a_worker_killed_with_no_try_left_fails_the_query_and_the_next_run_sends_all(tmp_path: Path) -> None:
    open_shop(tmp_path, ["key"])
    driver = drive(tmp_path, DIE_AT="half file torn")
    assert driver.end() != 0
    drive(tmp_path).finish()
    assert_agreement(tmp_path, "key")
