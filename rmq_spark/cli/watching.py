"""``--watch``: shows the same again and again, until it is stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Annotated

import typer

from rmq_spark._core.vocabulary.options import parse_duration
from rmq_spark.cli.command import nobody_reads

Watch = Annotated[
    str | None,
    typer.Option("--watch", metavar="EVERY", help='Show it again every so often, such as "2s", until stopped.'),
]
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def watched(every: str | None, text: Callable[[], str]) -> None:
    """Print a text; with an interval again and again. A terminal shows the newest one alone."""
    interval = None if every is None else interval_of(every)
    with nullcontext() if interval is None else suppress(KeyboardInterrupt):
        while True:
            found = text()
            typer.echo(f"{CLEAR}{found}" if interval is not None and sys.stdout.isatty() else found, nl=False)
            sys.stdout.flush()
            if interval is None or not wait(interval):
                return


def interval_of(every: str, option: str = "watch") -> float:
    """Return the seconds of an interval, which is above 0."""
    seconds = parse_duration(every, option)
    if seconds == 0:
        raise typer.BadParameter(f"{every} is no time: write 2s, for instance", param_hint=f"--{option}")
    return seconds


def wait(seconds: float) -> bool:
    """Wait; False when a person has stopped it, or when nobody reads what is printed any more."""
    try:
        return not nobody_reads(seconds)
    except KeyboardInterrupt:
        return False
