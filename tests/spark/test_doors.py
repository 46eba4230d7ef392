"""The same listener object at all four doors, as docs/listeners.md says."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rmq_spark.errors import ListenerError
from tests.spark.doors_program import (
    KINDS,
    MODULE,
    by_attribute,
    by_function,
    by_producer,
    expected,
    make,
    visible,
)

ROOT = Path(__file__).parents[2]
WITHOUT_SPARK = [kind for kind in KINDS if kind != "delta"]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    make(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


@pytest.mark.parametrize("kind", WITHOUT_SPARK)
def test_a_producer(shop: Any, tmp_path: Path, kind: str) -> None:
    by_producer(tmp_path, getattr(shop, kind), kind)
    assert visible(tmp_path, kind) == expected(kind)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS)
def test_foreach_batch(spark: SparkSession, shop: Any, tmp_path: Path, kind: str) -> None:
    by_function(spark, tmp_path, getattr(shop, kind), kind)
    assert visible(tmp_path, kind) == expected(kind)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", WITHOUT_SPARK)
def test_module_and_attribute(spark: SparkSession, shop: Any, tmp_path: Path, kind: str) -> None:
    name = f"{MODULE}_{kind}"  # of its own: a worker that lives on has imported the other kinds' module
    (tmp_path / f"{name}.py").write_text((tmp_path / f"{MODULE}.py").read_text())
    spark.sparkContext.addPyFile(str(tmp_path / f"{name}.py"))
    by_attribute(spark, tmp_path, kind, name)
    assert visible(tmp_path, kind) == expected(kind)


def test_a_listener_that_needs_spark_is_refused_by_the_other_two(
    spark: SparkSession, shop: Any, tmp_path: Path
) -> None:
    with pytest.raises(ListenerError, match="has no Spark session"):
        by_producer(tmp_path, shop.delta, "delta")
    spark.sparkContext.addPyFile(str(tmp_path / f"{MODULE}.py"))
    with pytest.raises(Exception, match=r"foreachBatch\(rmq_spark.TransactionalSink"):
        by_attribute(spark, tmp_path, "delta")
    assert visible(tmp_path, "delta") == []


@pytest.mark.long
@pytest.mark.connect
@pytest.mark.timeout(900)
def test_foreach_batch_over_spark_connect(tmp_path: Path) -> None:
    """Without the Delta listener: the part of Delta that a Connect server needs is not on Maven Central."""
    make(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}  # the server's workers, too
    command = [sys.executable, "-m", "tests.spark.doors_program", str(tmp_path), *WITHOUT_SPARK]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {kind: expected(kind) for kind in WITHOUT_SPARK}
