"""Kills a driver with SIGKILL: the JVM, the Python driver, the Python workers and the process that calls for it.

``format("txmq")`` runs ``commit()``, and with it the listener, in a Python worker of the JVM. That worker is in another
process group than the driver, but in the same *session*, which the demo made for its child. So the kill ends the whole
session.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from examples.grocer.settings import Settings
from rmq_spark import HalfBatch


class Point(str, Enum):
    """The point in the local transaction at which the driver dies."""

    WORKING = "working"
    """Rows are written, but the database has not committed them: it undoes them."""
    COMMITTED = "committed"
    """The database has committed, but the op marker is not written."""


@dataclass(frozen=True)
class Kill:
    """One kill, at a point of one micro-batch."""

    point: Point
    batch_id: int

    def __str__(self) -> str:
        return f"{self.point.value}@{self.batch_id}"

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Read a kill from ``DEMO_KILL``, such as ``committed@16``."""
        match = re.fullmatch(r"(working|committed)@(\d+)", text)
        if match is None:
            raise ValueError(f"DEMO_KILL={text!r} is not of the form committed@16")
        return cls(Point(match[1]), int(match[2]))


def die_here(point: Point, batch: HalfBatch) -> None:
    """Kill the driver when this is the planned point and batch. The listener calls this at each point."""
    settings = Settings()
    if settings.kill is None or str(Kill(point, batch.batch_id)) != settings.kill:
        return
    # The leader of the demo's session is the driver, which wrote down its id. A stream started by hand has another.
    session = int(settings.folder.driver.read_text(encoding="utf-8"))
    if os.getsid(0) != session:
        raise RuntimeError("DEMO_KILL is set, but this process is not of the demo's own session: nothing was killed")
    victims = [pid for pid in session_members(session) if pid != os.getpid()]
    note = {
        "point": point.value,
        "batch_id": batch.batch_id,
        "half_id": batch.half_id,
        "attempt": batch.attempt,
        "transactions": batch.transactions.num_rows,
        "processes": [process_name(pid) for pid in [*victims, os.getpid()]],
        "at": time.time(),
    }
    with settings.folder.kills.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(note) + "\n")
    end_session(session)


def end_session(session: int) -> None:
    """Send SIGKILL to every process of a session until none is left, and last to the caller if it is one of them."""
    me = os.getpid()
    for _ in range(100):  # a process may fork while the list is read
        others = [pid for pid in session_members(session) if pid != me]
        if not others:
            break
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    if os.getsid(0) == session:
        os.kill(me, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Return the living processes of a session. Zombies, which only wait for their parent, are not among them."""
    return [pid for pid, state in _processes() if not state.startswith("Z") and _session_of(pid) == session]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # the process is gone, or we may not ask about it
        return None


def _processes() -> list[tuple[int, str]]:
    """Return the ids and states of all processes."""
    if not os.path.isdir("/proc/self"):
        listed = subprocess.run(["ps", "-A", "-o", "pid=,state="], capture_output=True, text=True, check=True).stdout
        return [(int(pid), state) for pid, state in (line.split()[:2] for line in listed.splitlines())]
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:
                found.append((int(name), stream.read().rpartition(")")[2].split()[0]))
        except (OSError, IndexError):
            continue
    return found


def process_name(pid: int) -> str:
    """Return a process's name, for people."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError:
        return "process"
