"""Programs that a test starts, each in a session of its own, so that the test can kill all of it and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from tests.torture.kill.points import ROOT, Fate, is_stopped

DEADLINE_S = 600.0
POLL_S = 0.02


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Come back when the condition holds. An AssertionError names ``what`` when it does not hold in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:g}s in vain: {what}"
        time.sleep(POLL_S)


class Program:
    """A Python program of this folder and all that it starts (Spark's JVM, its Python workers).

    A driver's ``commit()`` runs in a worker whose process group Spark's daemon has changed. So processes are known by
    their session, which only this program and its descendants have.

    Parameters
    ----------
    name : str
        The program's module in this folder.
    root : Path
        Its folder, which is its first argument.
    fate : Fate, optional
        Where it or a process of its own dies or stops.
    """

    _running: ClassVar[list[Program]] = []

    def __init__(self, name: str, root: Path, *arguments: str, fate: Fate | None = None) -> None:
        self.reached = root / "reached"
        self.output = root / f"{name}-{time.time_ns()}.out"
        with self.output.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"tests.crash.{name}", str(root), *arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "PYSPARK_PYTHON": sys.executable,
                    **(fate.environment(self.reached) if fate else {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        Program._running.append(self)

    def pids(self) -> list[int]:
        """What is alive in the program's session."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it ended while we looked
                continue
            if int(session) == self._process.pid and state != "Z":
                found.append(int(folder.name))
        return found

    def signal(self, number: int) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        """Kill all of it with SIGKILL, and come back when nothing is left."""

        def gone() -> bool:
            self.signal(signal.SIGKILL)
            self._process.poll()
            return not self.pids()

        wait_until(gone, f"{self.output.name} is dead")
        self._process.wait()
        if self in Program._running:
            Program._running.remove(self)

    def finish(self) -> str:
        """Wait for the end, and return what it printed. An AssertionError says it when the exit code is not 0."""
        code = self.end()
        text = self.text()
        assert code == 0, f"exit code {code}:\n{text[-6000:]}"
        return text

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        wait_until(lambda: self._process.poll() is not None, f"the end of {self.output.name}:\n{self.text()[-3000:]}")
        code = self._process.returncode
        self.kill()
        return code

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, *names: str) -> None:
        """Come back when a process of the program has stopped at its point, under each of these names."""
        files = [self.reached / name for name in names]

        def have_stopped() -> bool:
            assert self._process.poll() is None, f"it ended before its point:\n{self.text()[-6000:]}"
            return all(file.exists() and is_stopped(int(file.read_text())) for file in files)

        wait_until(have_stopped, f"{names} of {self.output.name} stop at their point")
        for file in files:
            file.unlink()

    @classmethod
    def kill_all(cls) -> None:
        for program in list(cls._running):
            program.kill()


def start_driver(root: Path, *streams: str, fate: Fate | None = None, tries: int = 1) -> Program:
    """A Spark driver that runs streams of a shop to the end of their input, with so many tries of a task."""
    return Program("driver", root, str(tries), *streams, fate=fate)


def kill_driver_at(point: str, batch: int, attempt: int, root: Path, *streams: str) -> None:
    """Start a driver, and kill all of it when each of its streams has come to the point of this micro-batch."""
    driver = start_driver(root, *streams, fate=Fate(point, stops=True, batch=batch, attempt=attempt))
    driver.wait_for(*streams)
    driver.kill()
