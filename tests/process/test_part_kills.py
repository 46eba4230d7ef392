"""Local transactions in parts, of which something is killed again and again: what happens on a cluster, without Spark.

Each task is a process, which starts at once, so more can die in a minute than on a cluster. ``KILLS=n`` says how many
die, and ``SEED=n`` plays the same deaths again, as far as the times of several processes can be played again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.process.postgres import running
from tests.spark.parts_shop import FOLDER, URL
from tests.support.part_kills import Job, Story
from tests.support.seeds import first_seed

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS") or 100)

pytestmark = [pytest.mark.long, pytest.mark.postgres, pytest.mark.timeout(600 + 10 * KILLS)]


class ProcessJob(Job):
    """Micro-batches of a driver without Spark."""

    has_executors = False
    slowness_s = 1.0

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, url)
        self._drivers: list[int] = []

    def start(self) -> subprocess.Popen[bytes]:
        self.drivers += 1
        with (self.folder / f"driver-{time.time_ns()}.out").open("wb") as out:
            driver = subprocess.Popen(
                [sys.executable, "-m", "tests.process.parts_driver", str(self.folder), str(self.drivers)],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._drivers.append(driver.pid)
        return driver

    def output(self) -> str:
        return max(self.folder.glob("driver-*.out")).read_text(errors="replace")

    def executors(self) -> list[int]:
        return []

    def tasks(self) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                mine = folder.name.isdigit() and str(self.folder).encode() in (folder / "cmdline").read_bytes()
                stat = (folder / "stat").read_text().rpartition(")")[2].split() if mine else []
            except OSError:  # it has ended
                continue
            # Executors lead sessions of their own, and tasks are their children.
            if stat and stat[0] != "Z" and int(stat[3]) not in (int(folder.name), *self._drivers):
                found.append(int(folder.name))
        return found


@pytest.fixture
def postgres_folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="txmq-pg-") as folder:
        yield Path(folder)


def test_a_job_in_parts_of_which_something_dies_again_and_again_agrees(
    postgres_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(postgres_folder) as url:
        monkeypatch.setenv(FOLDER, str(tmp_path))
        monkeypatch.setenv(URL, url.render_as_string(hide_password=False))
        job = ProcessJob(tmp_path, url.render_as_string(hide_password=False))
        try:
            Story(job, postgres_folder, first_seed()).play(KILLS)
            job.agree()
        finally:
            job.tell(first_seed())
