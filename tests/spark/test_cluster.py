"""A real cluster: Spark's standalone master, two workers, PostgreSQL, ``spark-submit``, and an executor that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyspark
import pytest
import sqlalchemy as sa

from rmq_spark import CommitLog, SqlTransactionListener
from tests.process.postgres import running as postgres_running

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
DEADLINE_S = 300.0
FILES, ROWS = 12, 50
REFUSED = 7
"""Of every so many orders one is refused."""

SHOP = """
import os
import time
import sqlalchemy as sa
import rmq_spark as txmq

URL = {url!r}

def work(connection, batch):
    numbers = [int(body) for body in batch.messages(["body"])["body"].to_pylist()]
    good = [n for n in numbers if n % {refused}]
    connection.execute(sa.text("insert into orders values (:n)"), [{{"n": n}} for n in good])
    return batch.verdicts(rollback=[n for n in numbers if n not in good])

def listener():
    return txmq.SqlTransactionListener(URL, work)
"""

pytestmark = [pytest.mark.long, pytest.mark.postgres, pytest.mark.timeout(900)]


class Cluster:
    """A master and its workers, as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        master = self._start("Master", "--port", "0", "--webui-port", "0")
        self.url = self._read(master, "Starting Spark master at ").split()[0]
        for _ in range(2):
            self._start("Worker", "--cores", "1", "--memory", "1g", "--webui-port", "0",
                        "--work-dir", str(folder / "work"), self.url)  # fmt: skip
        wait_until(lambda: master.read_text(errors="replace").count("Registering worker") == 2, "two workers")

    def _start(self, kind: str, *arguments: str) -> Path:
        output = self.folder / f"{kind}-{len(self._processes)}.log"
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind.lower()}.{kind}"]
        environment = {**os.environ, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1"}
        with output.open("wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [*command, "--host", "127.0.0.1", *arguments],
                    env=environment,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )
        return output

    @staticmethod
    def _read(output: Path, before: str) -> str:
        wait_until(lambda: before in output.read_text(errors="replace"), f"{before!r} in {output}")
        return output.read_text(errors="replace").partition(before)[2]

    def submit(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Run ``spark-submit`` of a program on this cluster."""
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url]
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.executor.memory": "512m",
            "spark.cores.max": "2",
            "spark.sql.shuffle.partitions": "2",
            "spark.default.parallelism": "2",
        }
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        with (self.folder / f"submit-{time.time_ns()}.log").open("wb") as out:
            done = subprocess.Popen(
                [*command, *arguments],
                env={**os.environ, **python, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1"},
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._processes.append(done)
        return done

    def executors(self) -> list[int]:
        """The processes of this cluster's executors."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                mine = folder.name.isdigit() and Path(os.readlink(folder / "cwd")).is_relative_to(self.folder / "work")
                if mine and b"CoarseGrainedExecutorBackend" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return sorted(found)

    def stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in self.executors():
            os.kill(pid, signal.SIGKILL)

    def said(self) -> str:
        """The end of what each process printed, for a test that fails."""
        logs = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("work/*/*/stderr"))
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S:g}s in vain: {what}"
        time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


@pytest.fixture
def database() -> Iterator[str]:
    with TemporaryDirectory(prefix="txmq-pg-") as folder, postgres_running(Path(folder)) as url:
        yield url.render_as_string(hide_password=False)


def test_orders_go_through_a_cluster_of_which_an_executor_dies(cluster: Cluster, database: str, tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=2)
    (tmp_path / "consumed").mkdir()
    (tmp_path / "in").mkdir()
    for at in range(FILES):
        rows = [json.dumps({"n": n}) for n in range(at * ROWS, (at + 1) * ROWS)]
        (tmp_path / "in" / f"{at:03}.json").write_text("\n".join(rows))
    shop = tmp_path / "cluster_shop.py"
    shop.write_text(SHOP.format(url=database, refused=REFUSED))
    engine = sa.create_engine(database)
    with engine.begin() as connection:
        connection.execute(sa.text("create table orders (n integer primary key)"))
    SqlTransactionListener(engine, lambda connection, batch: None).create_fence()

    driver = cluster.submit("--py-files", str(shop), str(ROOT / "tests/spark/cluster_program.py"), str(tmp_path))
    wait_until(lambda: driver.poll() is not None or sum(log.engine.tails().values()) >= ROWS, "the first micro-batch")
    first, *_ = cluster.executors() or [0]
    assert driver.poll() is None, cluster.said()
    assert first, "no executor is there"
    os.kill(first, signal.SIGKILL)
    assert driver.wait(DEADLINE_S) == 0, cluster.said()

    expected = [n for n in range(FILES * ROWS) if n % REFUSED]
    with engine.connect() as connection:
        assert list(connection.execute(sa.text("select n from orders order by n")).scalars()) == expected
    assert sorted(int(body) for body in log.read("orders")["body"].to_pylist()) == expected
    assert sorted(int(file.name) for file in (tmp_path / "consumed").iterdir()) == expected
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == {"read": expected, "native": len(expected), "drained": len(expected)}
    assert first not in cluster.executors()
    engine.dispose()

    config = tmp_path / "txmq.toml"
    config.write_text(
        f'path = "{tmp_path}/log"\nlistener_modules = ["cluster_shop"]\n[listeners]\nshop = "cluster_shop:listener"\n'
    )
    job = cluster.submit("--py-files", str(shop), str(job_file()), "--config", str(config), "--once")
    assert job.wait(DEADLINE_S) == 0, cluster.said()


def job_file() -> Path:
    import rmq_spark.checks.job

    return Path(rmq_spark.checks.job.__file__)
