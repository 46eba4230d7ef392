"""Local transactions on the executors of a cluster, of which something is killed again and again.

Executors, their Python workers, drivers, sessions of PostgreSQL and the whole server die, each at a point of the
protocol or at a random time. A check job runs meanwhile. A seed says who dies when: ``SEED=n`` plays the same deaths
again, as far as the times of several processes can be played again. ``KILLS=n`` says how many there are in all
(``KILLS=200 make test-all TESTS=tests/spark/test_cluster_parts.py``).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.spark.parts_shop import FOLDER, URL, doom
from tests.support.cluster import DEADLINE_S, Cluster, wait_until
from tests.support.part_kills import Job, Story
from tests.support.seeds import first_seed

HERE = Path(__file__).parent
KILLS = int(os.environ.get("KILLS") or 24)
"""The deaths of both stories together."""
SHORT_LIFE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.25",
    "spark.speculation.minTaskRuntime": "200ms",
}
pytestmark = [pytest.mark.long, pytest.mark.postgres, pytest.mark.timeout(1200 + 30 * KILLS)]


class ClusterJob(Job):
    """A stream of orders on a cluster."""

    def __init__(self, folder: Path, cluster: Cluster, url: str, speculation: bool) -> None:
        super().__init__(folder, url)
        self.cluster = cluster
        self.speculation = SPECULATION if speculation else {"spark.speculation": "false"}

    def start(self) -> subprocess.Popen[bytes]:
        self.drivers += 1
        settings = {
            "spark.driver.extraJavaOptions": SHORT_LIFE,
            "spark.executor.extraJavaOptions": SHORT_LIFE,
            f"spark.executorEnv.{FOLDER}": str(self.folder),
            f"spark.executorEnv.{URL}": self.url,
            "spark.executorEnv.PYTHONPATH": str(HERE.parents[1]),
            "spark.python.daemon.module": "tests.spark.parts_daemon",
            "spark.task.maxFailures": "4",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.sql.codegen.wholeStage": "false",
            **self.speculation,
        }
        program = str(HERE / "parts_program.py")
        return self.cluster.submit(
            "--py-files", str(HERE / "parts_shop.py"), program, str(self.folder), settings=settings
        )

    def output(self) -> str:
        return max(self.cluster.folder.glob("submit-*.log")).read_text(errors="replace")

    def tasks(self) -> list[int]:
        return self.cluster.python_workers()

    def executors(self) -> list[int]:
        return self.cluster.executors()


@pytest.mark.parametrize("speculation", [False, True], ids=["no speculation", "speculation"])
def test_a_job_of_which_something_dies_again_and_again_agrees(
    cluster: Cluster,
    database: str,
    postgres_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speculation: bool,
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(URL, database)
    job, seed = ClusterJob(tmp_path, cluster, database, speculation), first_seed() + speculation
    try:
        Story(job, postgres_folder, seed).play(KILLS // 2)
        job.agree()
    finally:
        job.tell(seed)


def test_a_part_that_two_tasks_run_at_once_is_taken_once(
    cluster: Cluster, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(URL, database)
    job = ClusterJob(tmp_path, cluster, database, speculation=True)
    driver = job.start()
    # The first micro-batch is slow by itself.
    for at, point in enumerate(("in work", "before the claim", "after the commit") * 2):
        wait_until(lambda at=at: job.begun() > at or driver.poll() is not None, "the next micro-batch")
        slow = doom(tmp_path, point, "slow", 15.0)
        wait_until(lambda file=slow: not file.exists() or driver.poll() is not None, "a task is slow")
    assert driver.wait(DEADLINE_S) == 0, cluster.said()
    job.agree()
    assert job.twice() > 0
