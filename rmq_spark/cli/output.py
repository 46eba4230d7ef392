"""Common parts of all ``txmq`` commands: arguments, opening a log, errors on one line, rows as a table or JSON."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmq_spark.commitlog.log import CommitLog
from rmq_spark.errors import TxmqError
from rmq_spark.redaction import redacted

BODY_CHARS_SHOWN = 80
WIDTH_NOT_A_TERMINAL = 240
STORAGE_ENV = "TXMQ_STORAGE__"

P = ParamSpec("P")

_secrets: list[str] = []


def plainly(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command show an error on one line, without secrets. ``TXMQ_DEBUG=1`` shows the traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as problem:
            if os.environ.get("TXMQ_DEBUG"):
                raise
            sentence = redacted(problem if isinstance(problem, TxmqError) else f"{type(problem).__name__}: {problem}")
            for secret in _secrets:
                sentence = sentence.replace(secret, "***")
            Console(stderr=True, soft_wrap=True).print(Text(one_line(sentence), style="red"))
            raise typer.Exit(1) from None

    return run


LogPath = Annotated[str, typer.Argument(metavar="PATH", help="The commit log: a folder or an object-store URI.")]
Storage = Annotated[
    list[str] | None,
    typer.Option(
        "--storage",
        metavar="KEY=VALUE",
        help="An option for delta-rs; may be repeated. Other users of the machine can see arguments: set secrets as "
        f"{STORAGE_ENV}AWS_SECRET_ACCESS_KEY and so on in the environment.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


# ---------------------------------------------------------------- storage and output
def open_log(path: str, storage: Sequence[str] | None) -> CommitLog:
    return CommitLog.open(path, storage_options(storage))


def storage_options(given: Sequence[str] | None) -> dict[str, str] | None:
    options = {k[len(STORAGE_ENV) :]: v for k, v in os.environ.items() if k.startswith(STORAGE_ENV)}
    for text in given or ():
        key, found, value = text.partition("=")
        if not found or not key:
            raise typer.BadParameter("KEY=VALUE is expected (what was given is not shown)", param_hint="--storage")
        options[key] = value
    _secrets[:] = [v for v in options.values() if len(v) > 3]
    return options or None


def show(rows: Sequence[dict[str, Any]], as_json: bool, nothing: str) -> None:
    if as_json:
        typer.echo(json.dumps([{k: plain(v) for k, v in row.items()} for row in rows]))
        return
    if not rows:
        typer.echo(nothing)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_NOT_A_TERMINAL)
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}Z"
    if isinstance(value, list):
        return "\n".join(one_line(str(v)) for v in value)
    return one_line(str(value))


def plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else value


def one_line(text: str) -> str:
    """Return the text without line ends and control characters: what others sent must not control the terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


def short(body: bytes) -> str:
    text = body[: BODY_CHARS_SHOWN * 4].decode(errors="replace")
    return text if len(text) <= BODY_CHARS_SHOWN else text[: BODY_CHARS_SHOWN - 1] + "…"
