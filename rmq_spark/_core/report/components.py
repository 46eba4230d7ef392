"""The parts that the report and the live page are made of: findings, figures, tables, scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import repeat
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from rmq_spark._core.inspect.finding import Finding, Level
from rmq_spark._core.report.report_figures import Figures
from rmq_spark._core.vocabulary.text import amount, duration, rate

ROWS_MAX = 60
"""The most rows of a table on the page."""
OPEN_MAX = 5
"""The most rows of a list that is shown open, of those that say only what went well."""
NAMES_MAX = 6
"""The most names in a row."""
EXACT_MAX = 1_000_000
"""Smaller numbers of a tile are written out."""
STATES = {
    "committed": "ok",
    "rolled_back": "warning",
    "rolled_back_by_check": "warning",
    "rolled_back_by_discard": "critical",
    "quarantined": "critical",
}
"""The colours of states; others have none."""
_SIGNS = {
    Level.OK: '<path d="M5 12.5l4.5 4.5L19 7.5"/>',
    Level.NOTE: '<path d="M12 11v6.5"/><path d="M12 7v.3"/>',
    Level.WARNING: '<path d="M12 6v7"/><path d="M12 17.2v.3"/>',
    Level.CRITICAL: '<path d="M12 6v7"/><path d="M12 17.2v.3"/>',
}
_LEVELS = {
    Level.OK: "all is well",
    Level.NOTE: "nothing is urgent",
    Level.WARNING: "watch this",
    Level.CRITICAL: "do something",
}


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, and the functions that format its cell of a row, and the cell's address."""

    head: str
    cell: Callable[[Any], str]
    kind: str = ""
    link: Callable[[Any], str | None] = lambda row: None


def escape(text: str) -> str:
    """Escape text for HTML. Foreign text may contain characters that are invalid or reverse the line's direction."""
    return html.escape("".join(character if character.isprintable() else "\ufffd" for character in text))


def headline(findings: Sequence[Finding], pages: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the findings. Words that have pages become links to them."""
    first, *others = findings
    further_items = "".join(
        f'<li class="{finding.level}"><b>{linked(finding.what, pages)}</b>'
        f'<p class="do">{commands(finding.remedy or "")}</p></li>'
        for finding in others
    )
    ring = '<circle cx="12" cy="12" r="10.5"/>'
    return f"""<section class="headline {first.level}" aria-label="{_LEVELS[first.level]}">
<svg class="sign" viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2.2" stroke-linecap="round"
 stroke-linejoin="round" aria-hidden="true">{ring}{_SIGNS[first.level]}</svg>
<div><p class="says">{linked(first.what, pages)}</p>
{f'<p class="do">{commands(first.remedy)}</p>' if first.remedy else ""}
{f'<ul class="also">{further_items}</ul>' if further_items else ""}</div>
</section>"""


def link(address: str, text: str) -> str:
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def linked(text: str, pages: Mapping[str, str]) -> str:
    """Return text as HTML, with a link for each word that has a page."""
    return "".join(
        link(pages[word], word) if word in pages else escape(word) for word in re.split(r"([\s,;()]+)", text)
    )


def commands(text: str) -> str:
    """Return text as HTML, with its commands in monospace. A command ends before a comma, a semicolon or a parenthesis,
    or with the sentence."""
    pieces, end = [], 0
    for match in _COMMAND.finditer(text):
        command = match[0].rstrip(" .")
        pieces += [escape(text[end : match.start()]), f"<code>{_OPTION.sub(_UNBROKEN, escape(command))}</code>"]
        end = match.start() + len(command)
    return "".join([*pieces, escape(text[end:])])


_OPTION, _UNBROKEN = re.compile(r"(?<= )--[a-z-]+"), r'<span class="option">\g<0></span>'
_COMMAND = re.compile(r"""txmq(?:(?<!\.) (?:'[^']*'|"'"|[^\s,;()'"])+)+""")


def tiles(figures: Figures) -> str:
    settled = figures.committed + figures.rolled_back
    share = f"{100 * figures.rolled_back / settled:.1f} % of all" if settled else ""
    now = figures.now
    to_settle = len(now.quarantined) + len(now.conflicts)
    slowest = max(now.groups, key=lambda group: float(group["lag_seconds"]), default=None)
    length_s = (figures.span.until - figures.span.since).total_seconds()
    span, delayed = duration(figures.span.asked_s), sum(now.delayed.values())
    waits = [f"oldest: {duration(now.oldest_pending_s)}"] if figures.pending_messages else []
    waits += [f"{delayed:,} delayed"] if delayed else []
    tiles = [
        (f"Messages appeared in {span}", number(figures.committed), rate(figures.committed, length_s)),
        (f"Half batches settled in {span}", number(figures.settled), rate(figures.settled, length_s)),
        (f"Messages rolled back in {span}", number(figures.rolled_back), share),
        ("Messages pending now", number(figures.pending_messages), "; ".join(waits) or "nothing waits"),
        (
            "For a person to settle",
            str(to_settle),
            f"{len(now.quarantined)} quarantined, {len(now.conflicts)} in conflict" if to_settle else "nothing",
        ),
        (
            "Furthest behind",
            number(slowest["lag"]) if slowest else "–",
            f"{slowest['consumer_group']}, for {duration(slowest['lag_seconds'])}"
            if slowest and slowest["lag"]
            else ("every group is up to date" if slowest else "no consumer group"),
        ),
    ]
    items = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<div class="more">{escape(note)}</div></dd></div>'
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def number(count: int) -> str:
    return f"{count:,}" if count < EXACT_MAX else amount(count)


def number_or_dash(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def listed(rows: Sequence[Any], columns: Sequence[Column], total: int, command: str = "") -> str:
    """Return a table that folds on a phone, and how many more rows there are."""
    more = total - len(rows)
    lists = f": {commands(command.strip())} lists all" if command else ""
    last = f'<p class="more">{more:,} more{lists}</p>' if more > 0 else ""
    return f'<div class="rows">{table(rows, columns)}</div>{last}'


def folded(name: str, rows: Sequence[Any], content: str, summary: str) -> str:
    """Return the content of a card, which has to be opened when its list is long."""
    if len(rows) <= OPEN_MAX:
        return content
    return f'<details class="list" id="{name}"><summary>{escape(summary)}</summary>{content}</details>'


def table(rows: Iterable[Any], columns: Sequence[Column]) -> str:
    kinds = [f' class="{c.kind}"' if c.kind else "" for c in columns]
    head = "".join(f'<th scope="col"{kind}>{escape(c.head)}</th>' for c, kind in zip(columns, kinds, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, columns, kinds, repeat(row)))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(column: Column, kind: str, row: Any) -> str:
    text, address = column.cell(row), column.link(row)
    content = escape(text) if address is None else link(address, text)
    return f'<td{kind} data-head="{escape(column.head)}">{content}</td>'


def framed(title: str, hint: str, content: str, wide: bool = False) -> str:
    """Return a card with this content."""
    return f"""<section class="card{" wide" if wide else ""}">
<h2>{escape(title)}</h2>
<p class="hint">{commands(hint)}</p>
{content}
</section>
"""


def asset(name: str) -> str:
    return files("rmq_spark._core.report").joinpath(name).read_text(encoding="utf-8")


STYLE = asset("page.css")


def script(text: str) -> str:
    """Escape a script for use between tags."""
    return "\n" + text.replace("</script", "<\\/script").replace("<!--", "<\\!--") + "\n"


def sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def half_address(half_id: str) -> str:
    return f"/half?{urlencode({'id': half_id})}"


def find_address(topic: str, **more: int) -> str:
    return f"/find?{urlencode({'topic': topic, **more})}"


def first_of(names: Sequence[str], most: int = NAMES_MAX, between: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return between.join([*names[:most], *([f"{more:,} more"] if more > 0 else [])])
