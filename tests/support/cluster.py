"""Spark's standalone master and two workers, as processes of this machine, and ``spark-submit`` on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pyspark

from tests.support import jvm

SPARK_HOME = Path(pyspark.__file__).parent
DEADLINE_S = 300.0
HOSTS = ("127.0.0.1", "127.0.0.2")
"""Of the workers: Spark runs a task twice at once on two hosts only."""
NO_SETTINGS: Mapping[str, str] = {}


class Cluster:
    """A master and its workers, as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        master = self._start("Master", HOSTS[0], "--port", "0", "--webui-port", "0")
        self.url = self._read(master, "Starting Spark master at ").split()[0]
        for host in HOSTS:
            self._start("Worker", host, "--cores", "1", "--memory", "1g", "--webui-port", "0",
                        "--work-dir", str(folder / "work"), self.url)  # fmt: skip
        wait_until(lambda: master.read_text(errors="replace").count("Registering worker") == 2, "two workers")

    def _start(self, kind: str, host: str, *arguments: str) -> Path:
        output = self.folder / f"{kind}-{len(self._processes)}.log"
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind.lower()}.{kind}"]
        environment = {**os.environ, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": host}
        with output.open("wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [*command, "--host", host, *arguments],
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

    def submit(self, *arguments: str, settings: Mapping[str, str] = NO_SETTINGS) -> subprocess.Popen[bytes]:
        """Run ``spark-submit`` of a program on this cluster, with these settings besides its own."""
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url]
        all_settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": jvm.OPTIONS,
            "spark.cores.max": "2",
            "spark.sql.shuffle.partitions": "2",
            "spark.default.parallelism": "2",
            **settings,
        }
        for name, value in all_settings.items():
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
        return self._in_work(b"CoarseGrainedExecutorBackend")

    def python_workers(self) -> list[int]:
        """The Python processes of this cluster's executors: daemons, and the workers that they fork."""
        return self._in_work(b"pyspark.worker")

    def _in_work(self, word: bytes) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                mine = folder.name.isdigit() and Path(os.readlink(folder / "cwd")).is_relative_to(self.folder / "work")
                if mine and word in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return sorted(found)

    def stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in self.executors() + self.python_workers():
            with suppress(ProcessLookupError):
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
