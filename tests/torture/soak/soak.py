"""The soak: everything at work for long, undisturbed. Memory and files stay flat, and every reader is content.

``python -m tests.torture.soak.soak MINUTES``. The programs are in :mod:`tests.torture.soak.programs`. Twice a minute
the memory of each process and the files of each table are looked at. In the end the last third of the time is held
against the third before: nothing may have grown that has no reason to.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

import rmq_spark as txmq
from tests.torture.soak.programs import ORDERS, PROGRAMS, TICKS, Seen, Soak, is_committed

LOOK_S = 30.0
SETTLE_S = 300.0
WARM_UP_S = 420.0
"""Until the graces are over and the first messages have expired: before that, things grow as they should."""
GROWN = 1.25
SLACK = {"memory": 40.0, "live": 50.0, "log": 100.0}
"""MB, and files, by which something may grow beside :data:`GROWN`: a busy machine sends more, and less."""
GROWING = ("memory of table", "live files of messages", "files of", "log entries of messages")
"""Shown, and not judged: what grows with the messages that are kept, files on the disk, of which a replaced one stays
for up to two hours, and the Delta log of ``messages``, which is kept for days."""
FILES_OF_MESSAGES_MAX = 100


@dataclass
class Report:
    """What was seen of each thing, in the order of the looks."""

    series: dict[str, list[float]] = field(default_factory=dict)
    looked_s: list[float] = field(default_factory=list)
    said: dict[str, Mapping[str, int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def thirds(self) -> Iterator[tuple[str, float, float, float]]:
        """By name, the medians of the three thirds of the time after the warm-up."""
        warm = sum(at < WARM_UP_S for at in self.looked_s) if self.looked_s[-1] > 2 * WARM_UP_S else 0
        for name, values in sorted(self.series.items()):
            kept = values[warm:]
            n = len(kept) // 3
            if n:
                yield name, median(kept[:n]), median(kept[n : 2 * n]), median(kept[2 * n :])


class Supervisor:
    """One run in one folder."""

    def __init__(self, root: Path) -> None:
        self.soak = Soak(root)
        self.report = Report()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, seconds: float) -> Report:
        soak = self.soak
        soak.open()
        for role in PROGRAMS:
            self._start(role)
        began = time.monotonic()
        try:
            while time.monotonic() < began + seconds and self._all_alive():
                time.sleep(min(LOOK_S, seconds / 12))
                self._look(time.monotonic() - began)
            if not self.report.failures:
                self._end()
        finally:
            soak.stop.touch()
            soak.over.touch()
            for process in self._processes.values():
                process.kill()
                process.wait()
        self.report.said = {role: soak.said(role) for role in PROGRAMS}
        if not self.report.failures:
            self._judge()
        return self.report

    def _start(self, role: str) -> None:
        with (self.soak.root / f"{role}.out").open("wb") as out:
            self._processes[role] = subprocess.Popen(
                [sys.executable, "-m", "tests.torture.soak.programs", role, str(self.soak.root)],
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _all_alive(self) -> bool:
        for role, process in self._processes.items():
            if process.poll() is not None:
                self._failed(role, process)
        return not self.report.failures

    def _failed(self, role: str, process: subprocess.Popen[bytes]) -> None:
        said = (self.soak.root / f"{role}.out").read_text(errors="replace")
        self.report.failures.append(f"{role} ended with {process.returncode}:\n{said[-3000:]}")

    def _look(self, at_s: float) -> None:
        found = dict(self._memory())
        for table in ("half", "op", "messages"):
            found.update(_files(f"{self.soak.log}/{table}", table))
        self.report.looked_s.append(at_s)
        for name, value in found.items():
            self.report.series.setdefault(name, []).append(value)
        print(f"soak, {at_s / 60:.1f} min:", ", ".join(f"{k} {v:.0f}" for k, v in found.items()), flush=True)

    def _memory(self) -> Iterator[tuple[str, float]]:
        parents = _parents()
        for role, process in self._processes.items():
            yield f"memory of {role}", _memory_mb(process.pid)
            if role == "driver":
                workers = [pid for pid in parents if _is_below(pid, process.pid, parents) and _is_python(pid)]
                yield "memory of the driver's workers", sum(map(_memory_mb, workers))

    def _end(self) -> None:
        """Stop the writers, wait until all is settled and drained, and let the readers come to their end."""
        soak = self.soak
        soak.stop.touch()
        self._processes["sender"].wait(SETTLE_S)
        time.sleep(10.0)  # the stream's last micro-batch
        log = txmq.CommitLog.open(soak.log)
        end = time.monotonic() + SETTLE_S
        while log.pending().num_rows and time.monotonic() < end:
            time.sleep(1.0)
        log.drain()
        time.sleep(5.0)
        soak.over.touch()
        for role, process in self._processes.items():
            try:
                process.wait(SETTLE_S)
            except subprocess.TimeoutExpired:
                self.report.failures.append(f"{role} did not end")
            if process.returncode:
                self._failed(role, process)

    def _judge(self) -> None:
        """The log and the database must agree, and nothing may have grown."""
        report, soak = self.report, self.soak
        log = txmq.CommitLog.open(soak.log)
        sent = soak.said("sender")["sent"]
        expected = set(filter(is_committed, range(sent)))
        with sqlite3.connect(soak.database) as database:
            taken = [number for (number,) in database.execute("SELECT number FROM orders")]
        if sorted(taken) != sorted(expected):
            report.failures.append(f"the database has {len(taken)} orders, {len(expected)} of {sent} are expected")
        seen = Seen(ORDERS)
        seen.add(log.read(ORDERS, columns=["queue_id", "queue_offset", "body"]))
        if missing := seen.missing(expected):
            report.failures.append(f"{len(missing)} of {len(expected)} orders are not in the log")
        if log.pending().num_rows or log.conflicts():
            report.failures.append(f"{log.pending().num_rows} pending, conflicts {log.conflicts()}")
        for name, _, middle, last in report.thirds() if report.looked_s[-1] > 2 * WARM_UP_S else ():
            if not name.startswith(GROWING) and last > GROWN * middle + SLACK[name.split()[0]]:
                report.failures.append(f"{name} grew from {middle:.0f} to {last:.0f}")
        if max(report.series["live files of messages"]) > FILES_OF_MESSAGES_MAX:
            report.failures.append(f"messages had more than {FILES_OF_MESSAGES_MAX} live files")


def _files(folder: str, table: str) -> Iterator[tuple[str, float]]:
    try:
        live = len(DeltaTable(folder).file_uris())
    except DeltaError:  # before the first drain
        live = 0
    listed = list(Path(folder).glob("**/*"))
    yield f"live files of {table}", live
    yield f"files of {table}", sum(file.suffix == ".parquet" and "_delta_log" not in file.parts for file in listed)
    yield f"log entries of {table}", sum("_delta_log" in file.parts for file in listed)


def _memory_mb(pid: int) -> float:
    """The memory of a process that it shares with no other one counts whole, the rest in part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _parents() -> dict[int, int]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    return found


def _is_below(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return False


def run(seconds: float, seed: int) -> dict[str, Any]:
    """One soak of so many seconds; nothing in it is left to chance, so the seed is only told."""
    root = Path(tempfile.mkdtemp(prefix="txmq_soak_"))
    report = Supervisor(root / "soak").run(seconds)
    for name, first, middle, last in report.thirds():
        print(f"{name:32} {first:8.0f} {middle:8.0f} {last:8.0f}")
    if not report.failures:
        shutil.rmtree(root)
    said = report.said
    return {
        "minutes": round(seconds / 60),
        "orders sent": said["sender"].get("sent", 0),
        "ticks read": said["reader"].get(TICKS, 0),
        "rounds of upkeep": said["job"].get("upkeep", 0),
        "looks at the table": said["table"].get("looks", 0),
        "failures": [f"folder {root}: {failure}" for failure in report.failures],
    }


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name_, value in run(float(sys.argv[1]) * 60, 0).items():
        print(name_, value if not isinstance(value, list) else "\n".join(value))
