"""The wheel, in an environment that has nothing else of this project: format("txmq") needs no register call."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyspark
import pytest

from tests.support.maven import free_ports

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long  # a wheel, an environment, and two Sparks of its own

PROGRAM = """
import os, sys
from deltalake import DeltaTable
from pyspark.sql import SparkSession
import pyspark.cloudpickle
import sqlalchemy as sa
import rmq_spark as txmq
import mywork

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
if kind == "classic":
    spark = builder.master("local[2]").getOrCreate()
else:
    spark = SparkSession.builder.remote(sys.argv[3]).getOrCreate() if kind == "client" else (
        builder.remote("local[2]").getOrCreate())

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
table = DeltaTable(log.path + "/messages").to_pyarrow_table(columns=["topic"])
print("drained", drained == log.refresh(), table.num_rows)
print("native", txmq.messages(spark, log).count())

spark.addArtifacts("mywork.py", pyfile=True)  # only this program has it
log.create_topic("mine")
mine = options | dict(topic="mine", transactionListener="mywork:listener", transactionPer="message")
rows = spark.range(3).selectExpr("cast(id as string) body")
rows.write.format("txmq").mode("append").options(**mine).save()
query = stream.writeStream.format("txmq").options(**mine, checkpointLocation=folder + "/cp6")
query.trigger(availableNow=True).start().awaitTermination(120)
pyspark.cloudpickle.register_pickle_by_value(mywork)  # foreachBatch's worker on a Connect server does not find it
sink = txmq.TransactionalSink(
    log, producer_group="shop", topic="mine", listener=mywork.listener, transaction_per="message",
    checkpoint_location=folder + "/cp7",
)
query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", folder + "/cp7")
query.trigger(availableNow=True).start().awaitTermination(120)
print("mine", sorted(int(body) for body in log.read("mine")["body"].to_pylist()))

database = "sqlite:///" + folder + "/shop.db"
with sa.create_engine(database).begin() as connection:
    connection.execute(sa.text("create table orders (id integer primary key, check (id <> 101))"))
txmq.create_fence(database)
log.create_topic("paid")
paid = options | {"topic": "paid", "transactionListener": "txmq.table", "table.url": database, "table.name": "orders"}
paid |= {"table.onBadRow": "rollback", "transactionKey": "id"}
orders = stream.selectExpr("to_json(struct(int(body) as id)) body", "body keys", "int(body) id")
query = orders.writeStream.format("txmq").options(**paid, checkpointLocation=folder + "/cp8")
query.trigger(availableNow=True).start().awaitTermination(120)
print("paid", sorted(log.read("paid", columns=["keys"])["keys"].to_pylist()))

def work(connection, batch):
    ids = [int(key) for key in batch.messages(["keys"])["keys"].to_pylist()]
    connection.execute(sa.text("insert into orders values (:id)"), [{"id": 1000 + id} for id in ids])

log.create_topic("parted")
sink = txmq.TransactionalSink(
    log, producer_group="shop", topic="parted", listener=txmq.SqlTransactionListener(database, work),
    transaction_key="id", run_on="executors", checkpoint_location=folder + "/cp9",
)
query = orders.writeStream.foreachBatch(sink).option("checkpointLocation", folder + "/cp9")
query.trigger(availableNow=True).start().awaitTermination(120)
with sa.create_engine(database).begin() as connection:
    rows = connection.scalars(sa.text("select id from orders where id > 1000")).all()
print("parted", len(log.read("parted")) == len(rows) == 5)
if kind != "classic":
    try:
        hidden = txmq.TransactionalSink(log, producer_group="shop", topic="orders", listener=None, app_id="x")
        query = stream.writeStream.foreachBatch(hidden).option("checkpointLocation", folder + "/cp4")
        query.trigger(availableNow=True).start().awaitTermination(120)
    except Exception as problem:
        print("refused", "checkpoint_location=..." in str(problem))
spark.stop()
"""

MYWORK = """
import rmq_spark as txmq

class RefuseOne(txmq.TransactionListener):
    def execute_local_transaction(self, batch):
        bodies = batch.messages(["body"])["body"].to_pylist()
        return [txmq.ROLLBACK_MESSAGE if body[-1:] == b"1" else txmq.COMMIT_MESSAGE for body in bodies]
    def check_local_transaction(self, batch):
        return txmq.UNKNOWN

listener = RefuseOne()
"""
"""A module beside the program, where no worker and no server looks for it."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A new environment with the wheel; Spark itself comes from this environment's packages, to save a download."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    # A path inside a .pth file is added as it is: the editable install of this project in it is not followed.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return python


@pytest.fixture(scope="module")
def client_python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A new environment with the wheel and ``pyspark-client``, which has no JVM."""
    folder = tmp_path_factory.mktemp("client")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    wanted = [f"{wheel}[sql]", f"pyspark-client=={pyspark.__version__}", "pandas>=2.2,<3"]
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return python


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, fresh_python: Path) -> Iterator[str]:
    """A Connect server in a process of its own, and its address."""
    home = Path(pyspark.__file__).parent
    [port] = free_ports(1)
    command = [
        str(home / "bin" / "spark-submit"), "--master", "local[2]",
        "--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.ui.enabled=false",
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal",
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("server")
    environment = outside(fresh_python) | {"SPARK_HOME": str(home)}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        until = time.monotonic() + 120
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            assert process.poll() is None, (folder / "output").read_text()[-3000:]
            assert time.monotonic() < until, (folder / "output").read_text()[-3000:]
            time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def outside(python: Path) -> dict[str, str]:
    """Return an environment in which nothing but the wheel is found."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SPARK_REMOTE")}
    return environment | {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}


def run(python: Path, folder: Path, *arguments: str) -> str:
    """Run the program, and return its output, of which every door's line is checked."""
    client = folder / "client"
    client.mkdir()
    (client / "program.py").write_text(PROGRAM)
    (client / "mywork.py").write_text(MYWORK)
    command = [str(python), "program.py", *arguments]
    done = subprocess.run(command, cwd=client, env=outside(python), capture_output=True, text=True, timeout=280)
    without_jvm = [line for line in done.stderr.splitlines() if not line.strip().startswith("at ")]
    assert done.returncode == 0, "\n".join(without_jvm)[-4000:]
    assert f"read {[*range(10), *sorted([*range(100, 105)] * 2)]}" in done.stdout
    assert "streamed 20" in done.stdout
    assert "booked 21 20" in done.stdout  # one came twice
    assert "drained True 20" in done.stdout
    assert "native 20" in done.stdout
    assert "paid ['100', '102', '103', '104']" in done.stdout
    assert "parted True" in done.stdout
    assert f"mine {[0, 2, *sorted([100, 102, 103, 104] * 2)]}" in done.stdout
    return done.stdout


def test_the_wheel_registers_itself_and_every_door_works(fresh_python: Path, tmp_path: Path) -> None:
    run(fresh_python, tmp_path, "classic", str(tmp_path))


@pytest.mark.connect
def test_every_door_works_over_connect(fresh_python: Path, tmp_path: Path) -> None:
    assert "refused True" in run(fresh_python, tmp_path, "connect", str(tmp_path))


@pytest.mark.connect
def test_every_door_works_for_a_client_without_a_jvm(client_python: Path, server: str, tmp_path: Path) -> None:
    assert not list(client_python.parents[1].rglob("*.jar"))
    assert "refused True" in run(client_python, tmp_path, "client", str(tmp_path), server)
