"""Child processes of the demo. Each is the leader of a session, which ends as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from examples.grocer.kill import Kill, end_session, session_members
from examples.grocer.settings import Folder

ROOT = Path(__file__).parents[2]
"""The folder in which Python finds ``examples``, also in Spark's workers."""
POLL_S = 0.1
OUTPUT_LINES_SHOWN = 25


class ChildFailed(Exception):
    """A child process ended in a way that the story does not plan."""


class Child:
    """A Python module that runs in a process of its own. All processes that it starts are in its session.

    As a context manager it leaves no process behind, whatever happens.
    """

    def __init__(self, folder: Folder, module: str, *arguments: str, kill: Kill | None = None) -> None:
        self.module, self.output = module, folder.output(module)
        # This shell may have settings for another commit log, which the demo's check job must not get.
        env = {k: v for k, v in os.environ.items() if not k.startswith("TXMQ_")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
        env["PYSPARK_PYTHON"] = env["PYSPARK_DRIVER_PYTHON"] = sys.executable
        env["DEMO_DIR"], env["DEMO_KILL"] = str(folder.root), str(kill or "")
        env["TMPDIR"] = str(folder.temporary)
        folder.temporary.mkdir(exist_ok=True)
        with self.output.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.session = self.process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *details: object) -> None:
        end_session(self.session)
        self.process.wait()

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Call ``meanwhile`` until the process ends, and return its exit code, which is negative for a signal."""
        while self.process.poll() is None:
            meanwhile()
            time.sleep(POLL_S)
        meanwhile()
        return self.process.returncode

    def survivors(self, patience_s: float = 5.0) -> list[int]:
        """Return the session's processes that still live, after some seconds for the system to remove them."""
        deadline = time.monotonic() + patience_s
        while (left := session_members(self.session)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def require_success(self, code: int) -> None:
        """Raise ChildFailed, with the end of the process's output, when its exit code is not 0."""
        if code != 0:
            lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = "\n".join(lines[-OUTPUT_LINES_SHOWN:])
            raise ChildFailed(
                f"python -m {self.module} ended with exit code {code}; the end of {self.output}:\n{shown}"
            )
