"""Executor workers killed while they write half files: nothing is in the log yet, and orphans harm nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.processes import start_driver
from tests.crash.shop import assert_agreement, log_of, open_shop
from tests.torture.kill.points import WORKER, Fate

pytestmark = pytest.mark.long


@pytest.mark.parametrize("point", WORKER)
def test_a_worker_killed_while_it_writes_is_tried_again_by_spark_and_leaves_only_orphans(
    tmp_path: Path, point: str
) -> None:
    open_shop(tmp_path, ["key"])
    driver = start_driver(tmp_path, "key", fate=Fate(point), tries=3)
    driver.finish()
    assert (driver.reached / point).exists()
    assert_agreement(tmp_path, "key")
    table = log_of(tmp_path, "key").engine.half.table
    live = set(table.actions()["path"].to_pylist())
    assert len({f.name for f in (tmp_path / "key" / "log" / "half").glob("*.parquet")} - live) == 1


def test_a_worker_killed_with_no_try_left_fails_the_query_and_the_next_run_sends_all(tmp_path: Path) -> None:
    open_shop(tmp_path, ["key"])
    assert start_driver(tmp_path, "key", fate=Fate("half file torn")).end() != 0
    start_driver(tmp_path, "key").finish()
    assert_agreement(tmp_path, "key")
