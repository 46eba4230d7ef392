"""How a benchmark's pairs become a table and ``benchmarks/results/latest.json``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "latest.json"


@dataclass(frozen=True)
class Pairs:
    """Figures of one comparison: a pair a round.

    Attributes
    ----------
    name : str
        The key in the results file.
    what : str
        What is compared, for the table.
    unit : str
    ours, peer : sequences of float
        Of the same length, in the order of the rounds.
    more_is_better : bool
        The ratio is ours / peer in either case; this says how to read it.
    """

    name: str
    what: str
    unit: str
    ours: Sequence[float]
    peer: Sequence[float]
    more_is_better: bool

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.peer, strict=True)]


def publish(title: str, results: Sequence[Pairs], peer: str) -> None:
    """Print the table, and put the medians of the ratios into the results file beside what is there."""
    table = Table(title=title)
    columns = ("comparison", "ours (median)", f"{peer} (median)", "ratio", "min–max", "rounds", "better is")
    for name in columns:
        table.add_column(name, justify="left" if name in ("comparison", "better is") else "right")
    for r in results:
        ratios = r.ratios
        table.add_row(
            r.what,
            f"{median(r.ours):,.1f} {r.unit}",
            f"{median(r.peer):,.1f} {r.unit}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f}–{max(ratios):.2f}",
            str(len(ratios)),
            "more" if r.more_is_better else "less",
        )
    console = Console(width=140)
    console.print(table)
    console.print(f"{os.cpu_count()} processors, Python {platform.python_version()}")
    write_medians({r.name: round(median(r.ratios), 3) for r in results})


def write_medians(medians: Mapping[str, float]) -> None:
    """Merge medians into the flat results file."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**before, **medians}, indent=2, sort_keys=True) + "\n")
