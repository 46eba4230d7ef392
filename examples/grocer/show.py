"""Prints the demo: its phases, a progress bar over the baskets on a terminal, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.grocer.kill import Point
from examples.grocer.proof import Proof
from examples.grocer.settings import TOPICS

LINE_EVERY = 0.25
"""Without a terminal, a line after each such part of the baskets replaces the bar."""

WHERE = {
    Point.COMMITTED.value: "after the database's commit, before the op marker",
    Point.WORKING.value: "within the local transaction, before the database's commit",
}


@dataclass
class Bar:
    """Moves the progress bar, or prints a line now and then when there is no terminal."""

    show: Show
    progress: Progress
    task: Any
    total: int
    told: float = 0.0

    def at(self, baskets: int) -> None:
        self.progress.update(self.task, completed=baskets)
        if not self.show.console.is_terminal and baskets / self.total >= self.told + LINE_EVERY:
            self.told = baskets / self.total // LINE_EVERY * LINE_EVERY
            self.show.note(f"{baskets:,} of {self.total:,} baskets")


class Show:
    """Prints one run of the demo. Its clock starts when the object is made."""

    def __init__(self, console: Console | None = None) -> None:
        # Without a terminal the width is not known: with 120 a sentence stays on its line.
        self.console = console or Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = 120
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def phase(self, what: str) -> None:
        self.console.print(f"[dim]{self.seconds:6.1f} s[/dim]  [bold]{what}[/bold]")

    def note(self, what: str) -> None:
        self.console.print(f"          {what}", markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, total: int) -> Iterator[Bar]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("baskets"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            yield Bar(self, progress, progress.add_task("stream", total=total), total)

    def kill(self, kill: dict[str, Any]) -> None:
        names = kill["processes"]
        counted = ", ".join(f"{names.count(n)} {n}" for n in sorted(set(names)))
        self.note(f"SIGKILL in micro-batch {kill['batch_id']}, {WHERE[kill['point']]}")
        self.note(f"hit {len(names)} processes ({counted}); none survived")

    def pending(self, when: str, rows: Sequence[dict[str, Any]]) -> None:
        if not rows:
            self.note(f"pending {when}: nothing")
        for row in rows:
            where = f"micro-batch {row['batch_id']}, attempt {row['attempt']}"
            self.note(f"pending {when}: {row['messages']:,} messages of {where}")

    def result(self, proof: Proof, kills: int, lines: int, stream_s: float) -> None:
        """Print the table at the end."""
        table = Table(title="a grocer's year, told to three topics", title_justify="left")
        for heading in ("", "found"):
            table.add_column(heading, justify="left" if not heading else "right")
        total = sum(proof.messages.values())
        for name, figure in (
            ("lines of the data set", f"{lines:,}"),
            ("baskets, a transaction each", f"{proof.baskets:,}"),
            ("refused (a zero quantity)", f"{proof.refused:,}"),
            ("orders", f"{proof.orders:,}"),
            *((f"messages in {topic}", f"{proof.messages.get(topic, 0):,}") for topic in TOPICS),
            ("told more than once", f"{sum(proof.duplicates.values()):,}"),
            ("missing", f"{sum(proof.missing.values()):,}"),
            ("told of refused or unknown", f"{sum(proof.unwanted.values()):,}"),
            ("local transactions, effective", f"{proof.runs_effective:,}"),
            ("started again, without effect", f"{proof.runs_started - proof.runs_effective:,}"),
            ("kills of the driver", f"{kills}"),
            ("seconds, all", f"{self.seconds:,.1f}"),
            ("seconds, the stream with restarts", f"{stream_s:,.1f}"),
            ("messages a second, with restarts", f"{total / max(stream_s, 0.001):,.0f}"),
        ):
            table.add_row(name, figure)
        self.console.print(table)

    def verdict(self, proof: Proof) -> None:
        """Print what was proven, or what disagrees."""
        if proof.holds:
            self.console.print(
                f"[green]Proven:[/green] each of the {proof.orders:,} orders is in the database once and told "
                f"once in each of {', '.join(TOPICS)}, with the same contents; the {proof.refused:,} refused "
                "baskets left nothing; every local transaction took effect once; all offsets are contiguous.",
                soft_wrap=True,
            )
            return
        self.console.print(f"[red]{len(proof.disagreements)} disagreements:[/red]")
        for sentence in proof.disagreements:
            self.console.print(f"  {sentence}", markup=False, soft_wrap=True)
