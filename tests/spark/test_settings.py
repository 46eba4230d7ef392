"""Every door under every setting of the table: exact rows and instants, whatever the session says."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.settings_table import DOORS, REFUSED_BY_SPARK, ROWS, Played, sessions

QUICK = (
    "timestamp is NTZ",
    "timestamp is NTZ, the old way",
    "binary is string",
    "Arrow batches of one row",
    "large Arrow types",
    "files are read by V2",
)
"""Rows that went wrong before, or come near; `make test-all` plays the others."""
STREAMS = ("sink", "foreachBatch", "consume")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(tmp_path_factory.mktemp("settings"))


def _mark(row: str, door: str) -> list[pytest.MarkDecorator]:
    quick = row in QUICK and (door not in STREAMS or row == "timestamp is NTZ")
    return [] if quick else [pytest.mark.long]


@pytest.mark.turns(9)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("row", "door"),
    [pytest.param(row, door, id=f"{row}-{door}", marks=_mark(row, door)) for row in ROWS for door in DOORS],
)
def test_a_door_gives_exact_rows_whatever_the_session_says(
    spark: SparkSession, played: Played, tmp_path: Path, row: str, door: str
) -> None:
    log = played.copy(tmp_path / "log")
    with sessions(spark, ROWS[row]) as session:
        if row in REFUSED_BY_SPARK and door in REFUSED_BY_SPARK[row][0]:
            with pytest.raises(Exception, match=REFUSED_BY_SPARK[row][1]):
                DOORS[door](session, played, log, tmp_path)
        else:
            DOORS[door](session, played, log, tmp_path)
