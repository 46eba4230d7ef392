"""``--watch``: repeats a command's output until stopped."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Annotated, Any

import typer

from rmq_spark._core.vocabulary.options import parse_duration
from rmq_spark.cli.command import nobody_reads
from rmq_spark.cli.output import rendered
from rmq_spark.cli.text import as_json as json_of

Watch = Annotated[
    str | None,
    typer.Option("--watch", metavar="EVERY", help='Show it again every so often, such as "2s", until stopped.'),
]
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def watched(every: str | None, text: Callable[[], str]) -> None:
    """Print a text once, or repeatedly at an interval. A terminal shows only the newest text."""
    interval = None if every is None else interval_of(every)
    with nullcontext() if interval is None else suppress(KeyboardInterrupt):
        while True:
            output = text()
            typer.echo(f"{CLEAR}{output}" if interval is not None and sys.stdout.isatty() else output, nl=False)
            sys.stdout.flush()
            if interval is None or not wait(interval):
                return


def listed(
    rows: Sequence[dict[str, Any]],
    as_json: bool,
    nothing: str,
    spare: Sequence[str],
    in_words: Callable[[dict[str, Any]], dict[str, Any]],
) -> str:
    """Return rows as JSON, an object a line, or in words as a table."""
    if as_json:
        return "".join(f"{json_of(row)}\n" for row in rows)
    return rendered([in_words(row) for row in rows], nothing, spare)


def interval_of(every: str, option: str = "watch") -> float:
    """Return an interval in seconds. It is above 0."""
    seconds = parse_duration(every, option)
    if seconds == 0:
        raise typer.BadParameter(f"{every} is no time: write 2s, for instance", param_hint=f"--{option}")
    return seconds


def wait(seconds: float) -> bool:
    """Wait; return False on Ctrl-C, or when the reader of standard output has closed the pipe."""
    try:
        return not nobody_reads(seconds)
    except KeyboardInterrupt:
        return False


@contextmanager
def keyboard() -> Iterator[Callable[[float], list[str] | None]]:
    """Give a function that waits at most so many seconds for keys, and returns them; None when it is time to end.

    A key is a character, or the sequence of a special key such as ``\\x1b[A``. The terminal shows none of them.
    """
    if not sys.stdin.isatty():
        yield lambda seconds: [] if wait(seconds) else None
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> list[str] | None:
        if not select.select([terminal], [], [], max(0.0, seconds))[0]:
            return None if nobody_reads() else []
        text = os.read(terminal, 1024).decode(errors="ignore")
        return re.findall(r"\x1b[\[O]\d*[A-Z~]|.", text, re.DOTALL) if text else None

    tty.setcbreak(terminal)
    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
