"""Is it the same batch? Every cell of the table: each door, started again with a checkpoint and an appId."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import rmq_spark as txmq
from tests.spark.identity_table import (
    APP_IDS,
    CHECKPOINTS,
    FORKED,
    NEW,
    NO_SUCH,
    OVER_CONNECT,
    RESTORED,
    ROWS,
    SAME,
    TABLE,
    UNKNOWN,
    UNNAMED,
    Cell,
    Play,
    expected,
)

ROOT = Path(__file__).parents[2]
DOORS = ("stream", "foreachBatch", "consume")
QUICK = {
    *(Cell(door, checkpoint, "none") for door in ("stream", "foreachBatch") for checkpoint in (RESTORED, SAME)),
    Cell("stream", NEW, "same"),
    Cell("consume", NEW, "same"),
    *(Cell(door, FORKED, "none") for door in ("stream", "foreachBatch")),
    *(Cell(door, checkpoint, "none") for door in DOORS for checkpoint in (UNNAMED, UNKNOWN)),
    Cell("producer", SAME, "same"),
}
"""What went wrong before, and what a user meets first; `make test-all` plays the others."""


PLAYED = [c for c in TABLE if TABLE[c] != NO_SUCH and c.door not in OVER_CONNECT]


@pytest.fixture(scope="module")
def player(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Play:
    return Play(spark, tmp_path_factory.mktemp("identity"))


def test_the_table_has_every_cell() -> None:
    assert set(TABLE) == {Cell(door, c, a) for door in ROWS for c in CHECKPOINTS for a in APP_IDS}
    assert set(PLAYED) >= QUICK


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    "cell", [pytest.param(c, id="-".join(c), marks=[] if c in QUICK else [pytest.mark.long]) for c in PLAYED]
)
def test_a_door_that_is_started_again_does_as_the_table_says(player: Play, cell: Cell) -> None:
    outcome = TABLE[cell]
    assert player.play(cell) == (outcome, expected(cell, outcome))


@pytest.mark.long
@pytest.mark.connect
def test_over_spark_connect_the_doors_do_as_the_table_says(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "SPARK_REMOTE"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.identity_table", str(tmp_path), *OVER_CONNECT],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line.removeprefix("cell ")) for line in done.stdout.splitlines() if line.startswith("cell ")]
    found = {Cell(*line[:3]): (line[3], line[4]) for line in lines}
    assert found == {c: (TABLE[c], expected(c, TABLE[c])) for c in TABLE if c.door in OVER_CONNECT}


def test_the_checkpoint_location_of_another_query_is_refused(
    spark: SparkSession, log_path: str, tmp_path: Path
) -> None:
    """It would lend the sink another query's identity."""
    log = txmq.CommitLog.create(log_path)
    log.create_topic("orders")
    for name in ("one", "two"):
        (tmp_path / f"in-{name}").mkdir()
        (tmp_path / f"in-{name}" / "0.json").write_text('{"body": "0"}')

    def start(name: str, location: str) -> None:
        sink = txmq.TransactionalSink(
            log, producer_group="g", listener=None, topic="orders", checkpoint_location=str(tmp_path / location)
        )
        stream = spark.readStream.schema("body string").json(str(tmp_path / f"in-{name}"))
        writer = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / name))
        writer.trigger(availableNow=True).start().awaitTermination(60)

    start("one", "one")
    with pytest.raises(Exception, match=r"(?s)OptionError.*that of query .*checkpointLocation of its own query"):
        start("two", "one")
    assert log.read("orders").num_rows == 1
