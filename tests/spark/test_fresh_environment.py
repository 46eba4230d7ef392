"""The wheel, in an environment that has nothing else of this project: format("txmq") needs no register call."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long  # a wheel, an environment, and two Sparks of its own

PROGRAM = """
import os, sys
from pyspark.sql import SparkSession
import rmq_spark as txmq

def count_listener():
    class Listener(txmq.TransactionListener):
        def execute_local_transaction(self, batch):
            return txmq.COMMIT_MESSAGE
        def check_local_transaction(self, batch):
            return txmq.UNKNOWN
    return Listener()

kind, folder = sys.argv[1:3]
assert "/site-packages/" in txmq.__file__, txmq.__file__
log = txmq.CommitLog.create(folder + "/log")
log.create_topic("orders")
builder = SparkSession.builder.config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
spark = builder.remote("local[2]").getOrCreate() if kind == "connect" else builder.master("local[2]").getOrCreate()

options = dict(path=log.path, topic="orders", producerGroup="shop", transactionListener="none")
spark.range(10).selectExpr("cast(id as string) body").write.format("txmq").mode("append").options(**options).save()

spark.range(5).selectExpr("cast(100 + id as string) body").write.parquet(folder + "/in")
stream = spark.readStream.schema("body string").parquet(folder + "/in")
query = stream.writeStream.format("txmq").options(**options, checkpointLocation=folder + "/cp1")
query.trigger(availableNow=True).start().awaitTermination(120)

sink = txmq.TransactionalSink(
    log, producer_group="shop", topic="orders", listener=count_listener(), checkpoint_location=folder + "/cp2"
)
query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", folder + "/cp2")
query.trigger(availableNow=True).start().awaitTermination(120)

rows = spark.read.format("txmq").option("path", log.path).option("subscribe", "orders").load()
print("read", sorted(int(bytes(r.body)) for r in rows.select("body").collect()))

table = spark.readStream.format("txmq").option("path", log.path).option("subscribe", "orders")
query = table.option("startingOffsets", "earliest").load().selectExpr("cast(body as string) body")
query = query.writeStream.format("parquet").option("checkpointLocation", folder + "/cp3")
query = query.option("path", folder + "/out")
query.trigger(availableNow=True).start().awaitTermination(120)
print("streamed", spark.read.parquet(folder + "/out").count())

def book(message):
    seen = os.path.exists(folder + "/seen")
    with open(folder + "/booked", "a") as file:
        print(bytes(message.body).decode(), file=file)
    if bytes(message.body) == b"3" and not seen:
        open(folder + "/seen", "w").close()
        return txmq.ConsumeResult.FAILURE
    return txmq.ConsumeResult.SUCCESS

books = table.option("startingOffsets", "earliest").option("consumerGroup", "books").option("ordered", "true").load()
where = folder + "/cp5"
query = txmq.consume(books, "books", txmq.EachMessage(book), "orderly", suspend_s=0.1, checkpoint_location=where)
for _ in range(1 if spark.version >= "4.2" else 2):  # before, a suspended queue goes on in the next run
    query.option("checkpointLocation", where).trigger(availableNow=True).start().awaitTermination(120)
print("booked", len(open(folder + "/booked").readlines()), sum(txmq.ConsumerGroup(log, "books").positions().values()))
drained = log.drain()
log.messages_table.refresh()
print("drained", drained == log.refresh(), sum(log.messages_table.actions()["num_records"].to_pylist()))
if kind == "connect":
    try:
        hidden = txmq.TransactionalSink(log, producer_group="shop", topic="orders", listener=None, app_id="x")
        query = stream.writeStream.foreachBatch(hidden).option("checkpointLocation", folder + "/cp4")
        query.trigger(availableNow=True).start().awaitTermination(120)
    except Exception as problem:
        print("refused", "checkpoint_location=..." in str(problem))
spark.stop()
"""


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; Spark itself comes from this environment's packages, to save a download."""
    folder = tmp_path_factory.mktemp("fresh")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    # A path inside a .pth file is added as it is: the editable install of this project in it is not followed.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return python


@pytest.mark.parametrize("kind", ["classic", pytest.param("connect", marks=pytest.mark.connect)])
def test_the_wheel_registers_itself_and_every_door_works(fresh_python: Path, tmp_path: Path, kind: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SPARK_REMOTE")}
    environment |= {"PYSPARK_PYTHON": str(fresh_python), "PYSPARK_DRIVER_PYTHON": str(fresh_python)}
    done = subprocess.run(
        [str(fresh_python), str(program), kind, str(tmp_path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"read {[*range(10), *sorted([*range(100, 105)] * 2)]}" in done.stdout
    assert "streamed 20" in done.stdout
    assert "booked 21 20" in done.stdout  # one came twice
    assert "drained True 20" in done.stdout
    if kind == "connect":
        assert "refused True" in done.stdout
