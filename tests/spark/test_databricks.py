"""What the Databricks bundle runs with Spark, on this machine: its stream, and its declarative pipeline."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pyspark
import pytest
import sqlalchemy as sa
import yaml

from rmq_spark import CommitLog, create_fence

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCES = Path(__file__).parents[2] / "conf" / "databricks" / "src"

VIEW = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()


@dp.temporary_view
def orders_in():
    return spark.readStream.schema("order_id long").json({source!r})
"""
"""What the pipeline reads from, in the place of a table of Unity Catalog."""

WITH_A_LISTENER = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
options = dict(path={log!r}, topic="paid", producerGroup="shop", transactionKey="order_id")
table = {{"table.url": {url!r}, "table.name": "orders", "table.onBadRow": "rollback"}}
dp.create_sink("paid", "txmq", {{**options, **table, "transactionListener": "txmq.table"}})


@dp.append_flow(target="paid", name="pay")
def pay():
    rows = spark.readStream.table("orders_in")
    return rows.selectExpr("to_json(struct(*)) as body", "string(order_id) as keys", "order_id")
"""
"""A second sink of the pipeline, each of whose orders is a local transaction of a database."""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SOURCES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keys_of(log: CommitLog, topic: str) -> list[int]:
    """Return the keys of all messages of a topic, as numbers."""
    return sorted(int(key) for key in log.read(topic, columns=["keys"])["keys"].to_pylist())


@pytest.mark.long
def test_the_stream_sends_each_row_of_its_table_once(spark: SparkSession, tmp_path: Path, log_path: str) -> None:
    orders = load("orders")
    source = str(tmp_path / "source")
    arguments = ["--source", source, "--log", log_path, "--checkpoint", str(tmp_path / "checkpoint")]
    for first in (0, 5):
        rows = spark.range(first, first + 5).withColumnRenamed("id", "order_id")
        rows.coalesce(1).write.format("delta").mode("append").save(source)
        orders.main(arguments)
    assert keys_of(CommitLog.open(log_path), "orders") == list(range(10))


@pytest.mark.long
@pytest.mark.connect
def test_the_declarative_pipeline_sends_each_row_once_also_with_a_listener(tmp_path: Path, log_path: str) -> None:
    program = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    if not program.exists():
        pytest.skip("declarative pipelines came with Spark 4.1")
    log = CommitLog.create(log_path)
    log.create_topic("orders", queues=2)
    log.create_topic("paid", queues=2)
    url = f"sqlite:///{tmp_path}/shop.db"
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("create table orders (order_id integer primary key, check (order_id <> 3))"))
    create_fence(url)
    source = tmp_path / "source"
    source.mkdir()
    (source / "orders.json").write_text("\n".join(json.dumps({"order_id": n}) for n in range(10)))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "view.py").write_text(VIEW.format(source=str(source)))
    (sources / "paid.py").write_text(WITH_A_LISTENER.format(log=log_path, url=url))
    shutil.copy(SOURCES / "pipeline.py", sources)
    specification = {
        "name": "orders",
        "storage": (tmp_path / "storage").as_uri(),
        "libraries": [{"glob": {"include": "sources/**"}}],
        "configuration": {"txmq.source": "orders_in", "txmq.log": log_path},
    }
    (tmp_path / "spark-pipeline.yml").write_text(yaml.safe_dump(specification))
    done = subprocess.run(
        [str(program), "run", "--spec", str(tmp_path / "spark-pipeline.yml")],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_TESTING": "1",  # a port of its own for the server that it starts
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert keys_of(log, "orders") == list(range(10))
    assert keys_of(log, "paid") == [n for n in range(10) if n != 3], "the table refuses order 3"
    with sa.create_engine(url).begin() as connection:
        assert connection.scalars(sa.text("select order_id from orders order by 1")).all() == keys_of(log, "paid")
