"""The end of a driver by SIGKILL: JVM, Python driver, Python workers and the process that asks for it.

``format("txmq")`` runs ``commit()``, and with it the listener, in a Python worker of the JVM. That worker is in
another process group than the driver, but in the same *session*, which the demo made for its child. So a kill ends
the session.
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

from rmq_spark.demo.settings import Settings
from rmq_spark.transaction import HalfBatch


class Point(str, Enum):
    """Where in the local transaction the driver dies."""

    WORKING = "working"
    """Rows are written, the database has not committed: it undoes them."""
    COMMITTED = "committed"
    """The database has committed; the op marker is not written."""


@dataclass(frozen=True)
class Kill:
    """One death: at a point of one micro-batch."""

    point: Point
    batch_id: int

    def __str__(self) -> str:
        return f"{self.point.value}@{self.batch_id}"

    @classmethod
    def parse(cls, text: str) -> Kill:
        """A kill from ``DEMO_KILL``, such as ``committed@16``."""
        match = re.fullmatch(r"(working|committed)@(\d+)", text)
        if match is None:
            raise ValueError(f"DEMO_KILL={text!r} is not of the form committed@16")
        return cls(Point(match[1]), int(match[2]))


def die_here(point: Point, batch: HalfBatch) -> None:
    """Called by the listener at each point: ends the driver when this is the point and the batch to die at."""
    settings = Settings()
    if settings.kill is None or str(Kill(point, batch.batch_id)) != settings.kill:
        return
    # The head of the demo's session is the driver, which left its id; a stream started by hand has another session.
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
    """SIGKILL every process of a session until none is left; the caller last, when it is one of them."""
    me = os.getpid()
    for _ in range(100):  # a process may be forked while the list is read
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
    """Living processes of a session (zombies, which wait for their parent only, are not counted)."""
    return [pid for pid, state in _processes() if not state.startswith("Z") and _session_of(pid) == session]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # gone, or not ours to ask about
        return None


def _processes() -> list[tuple[int, str]]:
    """Process ids and states."""
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
    """What a process is, for people."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError:
        return "process"
