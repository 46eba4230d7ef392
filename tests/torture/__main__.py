"""``make torture``: every level of the proof for a long time, and a report.

``python -m tests.torture [level …]`` runs all levels, or those that are named. Environment: MINUTES in all (120), SEED
(the commit's, see :mod:`tests.support.seeds`). A level ends when its count is reached or its share of the time is used
up; what it found is printed with its seed, and everything goes into ``artifacts/torture.json``. The exit code is 1 when
anything was found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support import seeds
from tests.torture.damage import corruption
from tests.torture.hostile import cases
from tests.torture.interrupt import interruptions
from tests.torture.judge import selftest
from tests.torture.kill import disks, drivers, kills
from tests.torture.race import races
from tests.torture.simulate import model, simulation
from tests.torture.soak import soak

Level = Callable[[float, int], dict[str, Any]]

LEVELS: dict[str, tuple[Level, float, str]] = {
    "selftest": (selftest.run, 0.05, "seeded bugs that the anomaly checker must catch"),
    "model": (model.run, 0.08, "every state of the protocol's model"),
    "simulation": (simulation.run, 0.22, "seeds of the protocol on a store that misbehaves"),
    "kills": (kills.run, 0.12, "producers, checkers, upkeep and readers killed at named points"),
    "drivers": (drivers.run, 0.20, "Spark drivers and their workers killed"),
    "disks": (disks.run_preloaded, 0.04, "full, broken and slow disks"),
    "races": (partial(races.run_on, "local", commits=10_000), 0.08, "processes that race for one local log"),
    "races on S3": (partial(races.run_on, "s3", commits=10_000), 0.06, "the same on an S3 server"),
    "corruption": (corruption.run, 0.05, "damaged files"),
    "hostile": (cases.run, 0.05, "odd input at every door"),
    "soak": (soak.run, 0.05, "everything at work for long: memory and files stay flat"),
    "interruptions": (interruptions.run, 0.05, "operations interrupted at any line"),
}
"""What to run, its share of the time, and what it is."""
REPORT = Path("artifacts/torture.json")
SAID_ELSEWHERE = ("what", "seconds", "duration_s", "seed", "first seed")
"""Of what a level returns: in the table's title and its other columns."""


def main(names: list[str]) -> int:
    unknown = [n for n in names if n not in LEVELS]
    if unknown:
        print(f"there is no level {unknown[0]!r}: there are {', '.join(LEVELS)}")
        return 2
    seconds = float(os.environ.get("MINUTES", "120")) * 60
    try:
        seed = seeds.first_seed()
    except ValueError as problem:
        print(problem)
        return 2
    chosen = {n: level for n, level in LEVELS.items() if not names or n in names}
    shares = sum(share for _, share, _ in chosen.values())
    console = Console(width=140)
    console.print(seeds.say())
    report: dict[str, Any] = {"seed": seed}
    for name, (run, share, what) in chosen.items():
        console.rule(f"{name}: {what}")
        began = time.monotonic()
        found = run(seconds * share / shares, seed)
        report[name] = {**found, "duration_s": round(time.monotonic() - began)}
        _write(report)
    table = Table(title=f"torture, seed {seed}")
    for column in ("level", "what happened", "seconds", "found"):
        table.add_column(column, overflow="fold")
    failures = 0
    for name in chosen:
        counts = {k: v for k, v in report[name].items() if k not in ("failures", *SAID_ELSEWHERE)}
        problems = report[name]["failures"]
        failures += len(problems)
        said = ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in counts.items())
        table.add_row(name, said, str(report[name]["duration_s"]), str(len(problems)))
        for problem in problems[:10]:
            console.print(f"[red]{name}[/red]:", problem, markup=True)
    console.print(table)
    console.print(f"{REPORT} has it all")
    return 1 if failures else 0


def _write(report: dict[str, Any]) -> None:
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
