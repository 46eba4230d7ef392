"""Rows as a table, a row as lines of names and values, sentences with hanging indents, and JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import typer

from rmq_spark.cli.command import AsJson as AsJson
from rmq_spark.cli.command import GroupName as GroupName
from rmq_spark.cli.command import LogPath as LogPath
from rmq_spark.cli.command import Storage as Storage
from rmq_spark.cli.command import TopicName as TopicName
from rmq_spark.cli.command import Wide as Wide
from rmq_spark.cli.command import fail as fail
from rmq_spark.cli.command import hide as hide
from rmq_spark.cli.command import is_wide as is_wide
from rmq_spark.cli.command import open_log as open_log
from rmq_spark.cli.command import plainly as plainly
from rmq_spark.cli.command import storage_options as storage_options
from rmq_spark.cli.text import as_json as json_of
from rmq_spark.cli.text import one_line as one_line
from rmq_spark.cli.text import short_time as short_time

CELL_CHARS_MIN = 20
"""Cells are not shortened below this width while a column can be left out instead."""
HANGING_CHARS_MIN = 12
"""The minimum width of a column whose cells go on in further lines."""
LEFT = 2
"""The indent at which a command or an id begins that is too long for its text's indent."""
TEXT = frozenset({"tags", "keys", "body", "reason", "history", "last_check", "topics", "updated_by", "what"})
"""Columns whose cells lose their end when they are shortened. Others, such as ids and names, lose their middle."""
WHOLE = frozenset({"age", "state", "behind", "event"})
"""Columns that are neither shortened nor left out."""
MESSAGES = frozenset("committed expired kept lag last_day last_hour last_minute pending waiting".split())
"""Columns that count messages, and whose names do not say so."""
_UNBROKEN = re.compile(r"""(?:→ )?\(?txmq(?: (?:"[^"]*"|'[^']*'|[^\s,;()"']+))+\S*|\S+""")
"""A command of txmq, or a word."""


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
    if as_json:
        typer.echo(json_of(row))
    else:
        tell(text)


def tell(text: str, err: bool = False, fg: str | None = None, dim: bool | None = None) -> None:
    """Print sentences, to standard error if wanted. Without a colour where ``NO_COLOR`` is set."""
    fg = None if os.environ.get("NO_COLOR") else fg
    typer.secho(wrapped(text, err), err=err, dim=dim, fg=fg, reset=bool(dim or fg))


def wrapped(text: str, err: bool = False) -> str:
    """Return text with lines broken between words, where they are wider than the terminal."""
    from rich.cells import cell_len

    width = terminal_width(err)
    if width is None:
        return text
    lines = (line if cell_len(line) <= width else hanging("", line, 0, False, width) for line in text.split("\n"))
    return "\n".join(lines)


def rendered(rows: Sequence[dict[str, Any]], nothing: str, spare: Sequence[str] = (), hangs: str | None = None) -> str:
    """Return rows as a table with a line for each row.

    In a terminal that is too narrow for the table, cells are shortened first, then columns are left out. ``--wide`` has
    all.

    Parameters
    ----------
    nothing : str
        The text when there are no rows.
    spare : sequence of str
        Columns to leave out before others, in this order.
    hangs : str, optional
        The last column, when its cells are not shortened: they go on in further lines.
    """
    if not rows:
        return f"{wrapped(nothing)}\n"
    width = terminal_width()
    (header, *lines), cut = fitted(rows, width, spare, hangs)
    notes = [f"{cut} (--wide shows all)"] if cut else []
    if width is not None and (counts := [name for name in rows[0] if name in MESSAGES & {*header.split()}]):
        notes.append(f"in messages: {', '.join(counts)}")
    lines += [typer.style(line, dim=True) for line in wrapped("\n".join(notes)).splitlines()]
    if width is not None:
        header = typer.style(header, bold=True)
    return "".join(f"{line}\n" for line in (header, *lines))


def fitted(
    rows: Sequence[dict[str, Any]], width: int | None, spare: Sequence[str] = (), hangs: str | None = None
) -> tuple[list[str], str]:
    """Return the lines of a table, its header first, and what was shortened and left out to fit it into the width."""
    from rich.cells import cell_len

    names = _worth_showing(rows)
    cells = [{name: _cell(name, row[name]) for name in names} for row in rows]
    whole = {name: max(cell_len(name), *(cell_len(row[name]) for row in cells)) for name in names}
    widths = whole if width is None else _widths(cells, whole, width, spare, hangs)
    hangs = hangs if width is not None and hangs in widths else None
    widths = {name: w for name, w in widths.items() if name != hangs}
    numbers = {name for name in widths if all(type(row[name]) in (int, float, type(None)) for row in rows)}
    lines = []
    for row in ({name: name for name in names}, *cells):
        shown = {n: shortened(row[n], w, 1.0 if n in TEXT else 0.4) for n, w in widths.items()}
        padding = {n: " " * (w - cell_len(shown[n])) for n, w in widths.items()}
        texts = (padding[n] + shown[n] if n in numbers else shown[n] + padding[n] for n in widths)
        line = "  ".join(texts)
        if hangs is not None:
            line = hanging(f"{line}  ", row[hangs], len(line) + 2, False, width)
        lines.append(line.rstrip())
    cut = {
        "shortened": [name for name, w in widths.items() if w < whole[name]],
        "left out": [name for name in names if name not in (*widths, hangs)],
    }
    return lines, "; ".join(f"{what}: {', '.join(of)}" for what, of in cut.items() if of)


def _widths(
    cells: Sequence[dict[str, str]], whole: dict[str, int], width: int, spare: Sequence[str], hangs: str | None
) -> dict[str, int]:
    """Return the columns that fit into the width, and how wide each one is."""
    if hangs in whole:
        whole = {**whole, hangs: min(whole[hangs], HANGING_CHARS_MIN)}
    least = {name: _least(cells, name, chars) for name, chars in whole.items()}
    first, *others = whole
    order = [name for name in spare if name in whole and name != first]
    order += [name for name in reversed(others) if name not in order and name not in WHOLE]

    def fits(*names: str) -> bool:
        return sum(least[name] for name in names) + 2 * (len(names) - 1) <= width

    chosen, gone = list(whole), list[str]()
    while order and not fits(*chosen):
        gone.append(order.pop(0))
        chosen.remove(gone[-1])
    for name in reversed(gone):  # a narrow one may fit in the place of a wide one
        chosen += [name] if fits(*chosen, name) else []
    least = {name: least[name] for name in whole if name in chosen}
    room = width - 2 * (len(least) - 1)
    least[first] = min(least[first], max(1, room - sum(least.values()) + least[first]))
    widths = least
    for limit in range(CELL_CHARS_MIN, max(whole.values()) + 1):
        wider = {name: max(chars, min(whole[name], limit)) for name, chars in least.items()}
        if sum(wider.values()) > room:
            break
        widths = wider
    return widths


def _least(cells: Sequence[dict[str, str]], name: str, whole: int) -> int:
    """Return the minimum width of a column: ids and names that differ must still differ when they are shortened."""
    least = whole if name in WHOLE else min(whole, max(len(name), CELL_CHARS_MIN))
    if name not in TEXT:
        values = {row[name] for row in cells}
        while least < whole and len({shortened(value, least) for value in values}) < len(values):
            least += 4
    return min(least, whole)


def shortened(text: str, width: int, head: float = 0.4) -> str:
    """Return a text in at most so many cells of a terminal. ``head`` is the share of its beginning that stays; an id
    differs from others at its end."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    begin = _beginning(text, round((width - 1) * head))
    end = _beginning(text[::-1], width - 1 - cell_len(begin))[::-1]
    return f"{begin}…{end}"


def _beginning(text: str, width: int) -> str:
    from rich.cells import cell_len

    while cell_len(text) > width:
        text = text[: -max(1, (cell_len(text) - width) // 2)]
    return text


def hanging(label: str, text: str, indent: int, shortens: bool = True, width: int | None = None) -> str:
    """Return a label and a text that begins at this indent, and goes on there in each further line.

    Lines are broken between words alone, and never within a command. A command that is too long for a line begins
    at the indent :data:`LEFT`, whole. So does another word, such as an id, unless the function shortens it. Without a
    label, all of the text begins where its long command does.
    """
    from rich.cells import cell_len

    width = width or terminal_width()
    if width is None:
        return f"{label:<{indent}}{text}"
    words = _UNBROKEN.findall(text)
    if not label and any("txmq " in word and indent + cell_len(word) > width for word in words):
        indent = min(indent, LEFT)
    lines, is_empty = [f"{label:<{indent}}"], True
    for word in words:
        if shortens and "txmq " not in word:
            word = shortened(word, width - indent)
        if not is_empty and cell_len(lines[-1]) + 1 + cell_len(word) > width:
            lines.append(" " * indent)
            is_empty = True
        if is_empty and indent + cell_len(word) > width:
            if lines[-1].strip():
                lines.append("")
            lines[-1] = " " * min(indent, LEFT)
        lines[-1] += word if is_empty else f" {word}"
        is_empty = False
    return "\n".join(line.rstrip() for line in lines)


def block(row: dict[str, Any]) -> str:
    """Return one row as lines of a name and a value; empty values are left out."""
    indent = max(map(len, row)) + 2
    lines = []
    for name, value in row.items():
        label = name
        for part in value if isinstance(value, list) else [value]:
            if text := _cell(name, part):
                lines.append(hanging(label, text, indent, shortens=False))
                label = ""
    return "".join(f"{line}\n" for line in lines)


def terminal_width(err: bool = False) -> int | None:
    """Return the width of the terminal; None when standard output, or error, is not a terminal, and with ``--wide``."""
    from rich.console import Console

    console = Console(stderr=err)
    return console.width if console.is_terminal and not is_wide() else None


def _worth_showing(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns that are not empty and do not only repeat parts of the half_id."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    if all(str(row.get("half_id")).startswith(f"{row.get('app_id')}:{row.get('batch_id')}") for row in rows):
        names = [name for name in names if name not in ("app_id", "batch_id")]
    return names


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return short_time(value)
    if isinstance(value, list):
        return "; ".join(one_line(str(v)) for v in value)
    if type(value) in (int, float) and not name.endswith(("offset", "_id")):
        return f"{value:,}"
    return one_line(str(value))
