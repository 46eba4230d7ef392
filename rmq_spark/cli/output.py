"""Rows as a table, as blocks of names and values, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import typer

from rmq_spark.cli.command import AsJson as AsJson
from rmq_spark.cli.command import GroupName as GroupName
from rmq_spark.cli.command import LogPath as LogPath
from rmq_spark.cli.command import Storage as Storage
from rmq_spark.cli.command import TopicName as TopicName
from rmq_spark.cli.command import fail as fail
from rmq_spark.cli.command import hide as hide
from rmq_spark.cli.command import open_log as open_log
from rmq_spark.cli.command import plainly as plainly
from rmq_spark.cli.command import storage_options as storage_options
from rmq_spark.cli.text import as_json as json_of
from rmq_spark.cli.text import one_line as one_line
from rmq_spark.cli.text import short_time as short_time

TEXT_CHARS_MIN = 20
"""Minimum width of a text column that is narrowed to fit a table into the terminal, unless its cells are shorter."""
TEXT_CHARS_NOT_A_TERMINAL = 120

TEXT = frozenset({"tags", "keys", "body", "reason", "history", "topics", "updated_by", "what", "remedy", "places"})
"""Columns whose cells may be folded. Other cells are not, and none is cut, so that ids and names can be copied."""


# ---------------------------------------------------------------- tables
def show(
    rows: Sequence[dict[str, Any]],
    as_json: bool,
    nothing: str,
    spare: Sequence[str] = (),
    table: Sequence[dict[str, Any]] | None = None,
) -> None:
    """Print rows as JSON, an object a line, or as :func:`rendered` text."""
    if as_json:
        for row in rows:
            typer.echo(json_of(row))
    else:
        typer.echo(rendered(rows if table is None else table, nothing, spare), nl=False)


def say(as_json: bool, row: dict[str, Any], text: str) -> None:
    """Print what a command did: as a JSON object on one line, or as a sentence."""
    typer.echo(json_of(row) if as_json else text)


def rendered(rows: Sequence[dict[str, Any]], nothing: str, spare: Sequence[str] = ()) -> str:
    """Return rows as a table; as blocks of ``name value`` lines in a terminal that is too narrow for a table.

    Parameters
    ----------
    nothing : str
        The text when there are no rows.
    spare : sequence of str
        Columns to leave out of a table that is too wide, before blocks replace it.
    """
    if not rows:
        return f"{nothing}\n"
    width = terminal_width()
    names = _worth_showing(rows)
    cells = [{name: _cell(row[name]) for name in names} for row in rows]
    needed = [name for name in names if name not in spare]
    if width is None or _width(cells, names) <= width:
        chosen = names
    elif _width(cells, needed) <= width:
        chosen = needed
    else:
        return _blocks(cells, width)
    numbers = {name for name in chosen if all(type(row[name]) in (int, float, type(None)) for row in rows)}
    text = _table(cells, chosen, numbers, width)
    if len(chosen) < len(names):
        left_out = ", ".join(name for name in names if name not in chosen)
        text += typer.style(f"left out, for want of room: {left_out} (--json has all)", dim=True) + "\n"
    return text


def block(row: dict[str, Any]) -> str:
    """Return one row as lines of a name and a value; empty values are left out."""
    return _blocks([{name: _cell(value) for name, value in row.items()}], terminal_width() or TEXT_CHARS_NOT_A_TERMINAL)


def terminal_width() -> int | None:
    """Return the width of the terminal; None when standard output is not a terminal."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else None


def _worth_showing(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns that are not empty and do not only repeat parts of the half_id."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    if all(str(row.get("half_id")).startswith(f"{row.get('app_id')}:{row.get('batch_id')}") for row in rows):
        names = [name for name in names if name not in ("app_id", "batch_id")]
    return names


def _width(cells: Sequence[dict[str, str]], names: Sequence[str]) -> int:
    """Return the minimum width of a table in which only text columns are folded."""
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
            width_min = _column_width(cells, name, TEXT_CHARS_MIN)
            table.add_column(name, justify=justify, overflow="fold", min_width=width_min)
        else:
            table.add_column(name, justify=justify, no_wrap=True)
    for row in cells:
        table.add_row(*(Text(row[name]) for name in names))
    if width is None:
        widths = [_column_width(cells, name, TEXT_CHARS_NOT_A_TERMINAL) for name in names]
        width = sum(widths) + 2 * len(names)
    return _text_of(table, width)


def _blocks(cells: Sequence[dict[str, str]], width: int) -> str:
    """Return each row as lines of a name and a value, as in psql's expanded mode, with an empty line between rows."""
    from rich.table import Table
    from rich.text import Text

    blocks = []
    for row in cells:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in row.items():
            if value:
                table.add_row(name, Text(value))
        name_width = max(map(len, row)) + 2
        value_width = max((len(value) for name, value in row.items() if name not in TEXT), default=0)
        blocks.append(_text_of(table, max(width, name_width + value_width + 2)))
    return "\n".join(blocks)


def _text_of(table: Any, width: int) -> str:
    """Return a table as text without spaces at the ends of lines. rich does not print it: the pipe may be closed."""
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
