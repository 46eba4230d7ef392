"""Common parts of all ``txmq`` commands: arguments, opening a log, errors on one line, rows as a table or JSON."""

from __future__ import annotations

import functools
import json
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer

from rmq_spark.errors import TxmqError
from rmq_spark.redaction import redacted

if TYPE_CHECKING:
    from rmq_spark.commitlog.log import CommitLog

BODY_CHARS_SHOWN = 80
TEXT_CHARS_MIN = 20
"""A column of text is made no narrower than this, or than its longest cell, to fit a table into the terminal."""
TEXT_CHARS_NOT_A_TERMINAL = 120
STORAGE_ENV = "TXMQ_STORAGE__"

TEXT = frozenset({"tags", "keys", "body", "reason", "history", "topics", "updated_by"})
"""Columns whose cells may be folded. No other cell is, and none is cut: ids and names are there to be copied."""

P = ParamSpec("P")

_secrets: list[str] = []


def plainly(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command show an error on one line, without secrets. ``TXMQ_DEBUG=1`` shows the traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as problem:
            if isinstance(problem, BrokenPipeError) and _nobody_reads():
                raise typer.Exit(0) from None
            fail(problem, 1)

    return run


def fail(problem: Exception, code: int) -> NoReturn:
    """End with an exit code, and the problem on one line. ``TXMQ_DEBUG=1`` shows the traceback instead."""
    if os.environ.get("TXMQ_DEBUG"):
        raise problem
    typer.secho(_sentence(problem), fg=None if os.environ.get("NO_COLOR") else "red", err=True)
    raise typer.Exit(code) from None


def _sentence(problem: Exception) -> str:
    said = redacted(problem if isinstance(problem, TxmqError) else f"{type(problem).__name__}: {problem}")
    for secret in _secrets:
        said = said.replace(secret, "***")
    return one_line(_replaced(as_commands(said), _ARGUMENTS))


def _nobody_reads() -> bool:
    """Return True when standard output is a pipe that its reader has closed, and drop what is left to be written."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False  # the pipe that broke is another one
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
    return True


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


# ---------------------------------------------------------------- storage
def open_log(path: str, storage: Sequence[str] | None) -> CommitLog:
    from rmq_spark.commitlog.log import CommitLog

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


def hide(values: Iterable[str]) -> None:
    """Never show these values in an error."""
    _secrets.extend(v for v in values if len(v) > 3)


# ---------------------------------------------------------------- words
_CALLS: Sequence[tuple[str, str]] = (
    (r"CommitLog\.create\('([^']*)'\)", r"txmq create \1"),
    (r"log\.create_topic\('([^']*)'\)", r"txmq topic create PATH \1"),
    (r"log\.set_retention\b", "txmq topic set"),
    (r"log\.resolve\((?:half_id|'[^']*'), verdict, reason=…\)", "txmq resolve PATH HALF_ID COMMIT|ROLLBACK --reason …"),
    (r"log\.resume\([^)]*\)", "txmq resume PATH HALF_ID"),
    (r"log\.(pending|quarantined|conflicts)\(\)", r"txmq \1"),
    (r" \(log\.firsts\(\)\)", ""),
)
"""Python calls that errors advise, as patterns, and the commands that do the same."""
_ARGUMENTS: Sequence[tuple[str, str]] = (
    (r"pass os\.path\.expanduser\(path\)", "leave the quotes away"),
    (r"open it, or pass exist_ok=True", "use it as it is, or pass --exist-ok"),
    (r"exist_ok=True", "--exist-ok"),
    (r"None keeps messages for ever", "'forever' keeps messages for ever"),
    (r"\bstart names\b", "--from names"),
    (r"^to (?=has|names)", "--to "),
    (r"\bolder_than=", "--older-than "),
    (r"\bdrain_(every|bytes)=", r"--drain-\1 "),
    (r"create_topics=True", "--create-topics"),
    (r"reshard=True", "--reshard"),
    (r"on_poison='park'", "--on-poison park"),
    (r"on_expired='skip'", "--on-expired skip"),
    (r"\b(topic|transaction|retry|poll|on)_(template|pattern|timeout|interval|poison|expired)=", r"--\1-\2 "),
    (r"\bgive it as bootstrap_servers\b", "give it as --bootstrap-servers"),
    (r"\bmax_batch_(messages|bytes)=", r"--max-batch-\1 "),
    (r"\b(queues|retention|grace|audit|idempotency|every|tags|selector|shards|shard|start)=", r"--\1 "),
)
"""The same of arguments and options."""


def as_commands(sentence: str) -> str:
    """Return an error's sentence with commands where it advises Python calls."""
    return _replaced(sentence, _CALLS)


def _replaced(sentence: str, words: Sequence[tuple[str, str]]) -> str:
    for pattern, instead in words:
        sentence = re.sub(pattern, instead, sentence)
    return sentence


# ---------------------------------------------------------------- tables
def show(rows: Sequence[dict[str, Any]], as_json: bool, nothing: str, spare: Sequence[str] = ()) -> None:
    """Print rows as JSON; or as a table, in a terminal that is too narrow for one as blocks of ``name value``.

    Parameters
    ----------
    nothing : str
        What to say when there are no rows.
    spare : sequence of str
        Columns that a table can do without. They are left out before blocks are printed.
    """
    if as_json:
        typer.echo(json.dumps([{k: plain(v) for k, v in row.items()} for row in rows]))
        return
    if not rows:
        typer.echo(nothing)
        return
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal else None
    names = _worth_showing(rows)
    cells = [{name: _cell(row[name]) for name in names} for row in rows]
    fewer = [name for name in names if name not in spare]
    if width is None or _width(cells, names) <= width:
        chosen = names
    elif _width(cells, fewer) <= width:
        chosen = fewer
    else:
        typer.echo(_blocks(cells, width), nl=False)
        return
    numbers = {name for name in chosen if all(type(row[name]) in (int, float, type(None)) for row in rows)}
    typer.echo(_table(cells, chosen, numbers, width), nl=False)
    if len(chosen) < len(names):
        left_out = ", ".join(name for name in names if name not in chosen)
        typer.secho(f"left out, for want of room: {left_out} (--json has all)", dim=True)


def _worth_showing(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns without those that are empty, or that only repeat the parts of the half_id."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    if all(row.get("half_id") == f"{row.get('app_id')}:{row.get('batch_id')}" for row in rows):
        names = [name for name in names if name not in ("app_id", "batch_id")]
    return names


def _width(cells: Sequence[dict[str, str]], names: Sequence[str]) -> int:
    """Return the least width of a table in which nothing but text is folded."""
    return sum(_column_width(cells, name, TEXT_CHARS_MIN) for name in names) + 2 * (len(names) - 1)


def _column_width(cells: Sequence[dict[str, str]], name: str, text_chars: int) -> int:
    from rich.cells import cell_len

    longest = max(cell_len(line) for row in cells for line in row[name].split("\n"))
    return max(cell_len(name), min(longest, text_chars) if name in TEXT else longest)


def _table(cells: Sequence[dict[str, str]], names: Sequence[str], numbers: set[str], width: int | None) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        justify: Any = "right" if name in numbers else "left"
        if name in TEXT:
            least = _column_width(cells, name, TEXT_CHARS_MIN)
            table.add_column(name, justify=justify, overflow="fold", min_width=least)
        else:
            table.add_column(name, justify=justify, no_wrap=True)
    for row in cells:
        table.add_row(*(Text(row[name]) for name in names))
    if width is None:
        longest = [_column_width(cells, name, TEXT_CHARS_NOT_A_TERMINAL) for name in names]
        width = sum(longest) + 2 * len(names)
    return _rendered(table, width)


def _blocks(cells: Sequence[dict[str, str]], width: int) -> str:
    """Return each row as lines of a name and a value, as psql's expanded mode has them, with a line between rows."""
    from rich.table import Table
    from rich.text import Text

    blocks = []
    for row in cells:
        block = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        block.add_column(style="bold", no_wrap=True)
        block.add_column(overflow="fold")
        for name, value in row.items():
            if value:
                block.add_row(name, Text(value))
        head = max(map(len, row)) + 2
        whole = max((len(value) for name, value in row.items() if name not in TEXT), default=0)
        blocks.append(_rendered(block, max(width, head + whole + 2)))
    return "\n".join(blocks)


def _rendered(table: Any, width: int) -> str:
    """Return what rich makes of it, without blanks at the ends of lines. rich must not meet a closed pipe itself."""
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as captured:
        console.print(table, soft_wrap=False, crop=False)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return short_time(value)
    if isinstance(value, list):
        return "\n".join(one_line(str(v)) for v in value)
    return one_line(str(value))


def short_time(value: datetime) -> str:
    return f"{value:%Y-%m-%d %H:%M:%S}Z"


def plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else value


def one_line(text: str) -> str:
    """Return the text without line ends and control characters: what others sent must not control the terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


def short(body: bytes) -> str:
    text = body[: BODY_CHARS_SHOWN * 4].decode(errors="replace")
    return text if len(text) <= BODY_CHARS_SHOWN else text[: BODY_CHARS_SHOWN - 1] + "…"


def count_of(number: int, noun: str) -> str:
    """Return ``1 message``, ``2 messages``: the noun's plural ends in s, or in es after ch."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"
