"""One Spark session with Delta for all tests of this folder, and a stream to send from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from tests.process.postgres import running as postgres_running
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Delta replays a table's log with 50 tasks by default: seconds a table on two cores.
    "spark.databricks.delta.snapshotPartitions": "2",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook is called with the items of the whole run, not of this folder alone.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("rmq_spark tests")
    builder = builder.config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    session = configure_spark_with_delta_pip(builder).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def numbers(spark: SparkSession, tmp_path: Path) -> Callable[[int], DataFrame]:
    """A file stream of one JSON file a micro-batch, with ``body`` (a number) and ``k`` (its rest by three); each call
    adds files with ten rows."""
    source = tmp_path / "in"
    source.mkdir()

    def stream(batches: int) -> DataFrame:
        first = len(list(source.iterdir()))
        for b in range(first, first + batches):
            rows = [json.dumps({"n": b * 10 + i}) for i in range(10)]
            file = source / f"{b:05}.json"
            file.write_text("\n".join(rows))
            os.utime(file, (1_700_000_000 + b, 1_700_000_000 + b))  # Spark takes the oldest first
        frame = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).json(str(source))
        return frame.selectExpr("cast(n as string) body", "n % 3 as k")

    return stream


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


@pytest.fixture
def postgres_folder() -> Iterator[Path]:
    """Where the server of ``database`` has its files."""
    with TemporaryDirectory(prefix="txmq-pg-") as folder:
        yield Path(folder)


@pytest.fixture
def database(postgres_folder: Path) -> Iterator[str]:
    with postgres_running(postgres_folder) as url:
        yield url.render_as_string(hide_password=False)
