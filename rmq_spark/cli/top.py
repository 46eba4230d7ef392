"""``txmq top``: a live screen of a commit log's figures, printed once when there is no terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.inspect.limits import PENDING_S_MAX, UNDRAINED_S_MAX
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.text import byte_size, count_of
from rmq_spark.cli.groups import in_words
from rmq_spark.cli.output import (
    CELL_CHARS_MIN,
    AsJson,
    LogPath,
    Storage,
    Wide,
    fitted,
    hanging,
    open_log,
    plainly,
    shortened,
    terminal_width,
)
from rmq_spark.cli.statistics import unsettled
from rmq_spark.cli.text import as_json as json_of
from rmq_spark.cli.text import one_line, short_age, short_time
from rmq_spark.cli.watch import interval_of, keyboard, wait

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rmq_spark.report import Finding, Standing

ROWS_MAX = 1_000
"""Rows of a list that keys move through; the filter finds others."""
FEW = 3
"""Lines of a list while a person looks at another one."""
PAGE = 10
STYLES = {"conflict": "bold red", "quarantined": "red", "critical": "bold red", "warning": "yellow"}
"""By the state of a half batch, and by the worst level of a finding."""
KEYS = "↑ ↓ PgUp PgDn move · Tab next list · / filter · w whole ids · q ends"
KEYS_WIDE = "↑ ↓ ← → PgUp PgDn move · Tab next list · / filter · w short ids · q ends"
SIDEWAYS = 20
"""Characters by which an arrow moves lists that are wider than the screen."""
FILTERED = ", until Esc · q ends"
FINDING_SHARE = 3
"""The finding has at most this part of the screen's height."""
LISTS = ("half batches", "consumer groups", "topics")


@dataclass
class View:
    """The part of the screen's lists that a person looks at: one list of :data:`LISTS`, once a key has chosen it, from
    its row ``first`` on; and in all lists the rows that have the word in a cell. Wide lists are seen from their
    character ``left`` on."""

    chosen: int | None = None
    first: int = 0
    left: int = 0
    word: str = ""
    is_typing: bool = False
    is_wide: bool = False

    def press(self, key: str) -> bool:
        """Do what a key says; return False when it ends the screen."""
        moves = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1, "\x1b[5~": -PAGE,
                 "\x1b[6~": PAGE}  # fmt: skip
        sideways = {"\x1b[C": SIDEWAYS, "\x1bOC": SIDEWAYS, "\x1b[D": -SIDEWAYS, "\x1bOD": -SIDEWAYS}
        if key == "\x1b":
            self.word, self.is_typing, self.chosen, self.first = "", False, None, 0
        elif self.is_typing:
            if key in "\r\n":
                self.is_typing = False
            elif key in "\x7f\b":
                self.word = self.word[:-1]
            elif key.isprintable():
                self.word += key
        elif key in moves:
            self.chosen = self.chosen or 0
            self.first = max(0, self.first + moves[key])
        elif key == "\t":
            self.chosen, self.first = 0 if self.chosen is None else (self.chosen + 1) % len(LISTS), 0
        elif key == "/":
            self.is_typing = True
        elif key in sideways:
            self.left = max(0, self.left + sideways[key])
        elif key == "w":
            self.is_wide, self.left = not self.is_wide, 0
        return key != "q" or self.is_typing


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(top)


@plainly
def top(
    path: LogPath,
    every: Annotated[str, typer.Option(metavar="EVERY", help="How often it looks.")] = "2s",
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """A live screen: what waits for a verdict and for how long, lag of groups, messages a second of each topic.
    Where there is no terminal it looks twice, so that there are rates, and prints once."""
    from rich.console import Console

    from rmq_spark.report import Standing

    interval = interval_of(every, "every")
    if as_json or not sys.stdout.isatty() or Console().is_dumb_terminal:
        log = open_log(path, storage)
        before = Standing(log.engine).read()
        if wait(interval):
            now = Standing(log.engine).read()
            shown = lines(redacted(log.path), now, before, View(), terminal_width())
            text = "".join(f"{line}\n" for line, _ in shown)
            typer.echo(json_of(figures(now, before)) if as_json else text, nl=as_json)
        return
    from rich.live import Live
    from rich.text import Text

    for number in (signal.SIGTERM, signal.SIGHUP):  # end as with Ctrl-C: the terminal gets its own screen back
        signal.signal(number, signal.default_int_handler)
    with keyboard() as pressed, suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        live.update(Text(one_line(f"reading {redacted(path)} …")), refresh=True)  # a large log takes seconds
        log = open_log(path, storage)
        before = now = Standing(log.engine).read()
        view, next_look, name = View(is_wide=wide), time.monotonic() + interval, redacted(log.path)
        while True:
            live.update(screen(name, now, before, view, *live.console.size), refresh=True)
            keys = pressed(next_look - time.monotonic())
            if keys is None or not all(map(view.press, keys)):
                return
            if time.monotonic() >= next_look:
                before, now = now, Standing(log.engine).read()
                next_look = time.monotonic() + interval


def figures(now: Standing, before: Standing) -> dict[str, Any]:
    """Return the figures of the screen for JSON."""
    return {"at": now.at, **unsettled(now), "topics": topic_rows(now, before), "groups": consumer_rows(now, before)}


def _seconds(now: Standing, before: Standing) -> float:
    return max((now.at - before.at).total_seconds(), 1e-3)


def topic_rows(now: Standing, before: Standing) -> list[dict[str, Any]]:
    """Return topics, the busiest first, with messages a second since the last look."""
    seconds = _seconds(now, before)
    rows = [
        {
            "topic": name,
            "messages_per_s": round((topic["committed"] - _committed(before, name)) / seconds, 1),
            "committed": topic["committed"],
            "kept": topic["committed"] - topic["expired"],
        }
        for name, topic in sorted(now.topics.items())
    ]
    return sorted(rows, key=lambda row: (-row["messages_per_s"], -row["committed"]))


def _committed(seen: Standing, topic: str) -> int:
    return int(seen.topics[topic]["committed"]) if topic in seen.topics else 0


def consumer_rows(now: Standing, before: Standing) -> list[dict[str, Any]]:
    """Return consumer groups, those furthest behind first, with messages a second since the last look."""
    seconds = _seconds(now, before)
    lags = {row["consumer_group"]: row["lag"] for row in before.groups}
    rows = []
    for group in now.groups:
        name, topics = group["consumer_group"], group["topics"].split(", ")
        committed = sum(_committed(now, topic) - _committed(before, topic) for topic in topics)
        consumed = max(0, lags.get(name, group["lag"]) + committed - group["lag"])
        rows.append(
            {
                "consumer_group": name,
                "messages_per_s": round(consumed / seconds, 1),
                "lag": group["lag"],
                "lag_seconds": group["lag_seconds"],
                "members": group["members"],
                "dead_letters": now.dead_letters[name].kept if name in now.dead_letters else 0,
            }
        )
    return sorted(rows, key=lambda row: (-row["lag"], row["consumer_group"]))


def headline(now: Standing) -> str:
    """Return what waits, the worst first, and how many findings there are besides the worst one."""
    problems, doctor = _problems(now)
    waiting = [
        (f"{len(now.conflicts):,} in conflict", now.conflicts),
        (f"{len(now.quarantined):,} quarantined", now.quarantined),
        (f"{now.pending_batches:,} pending, the oldest for {short_age(now.oldest_pending_s)}", now.pending),
        (
            f"{now.undrained.messages:,} not drained ({byte_size(now.undrained.bytes)})",
            now.undrained.seconds > UNDRAINED_S_MAX,
        ),
    ]
    more = f"{count_of(len(problems) - 1, 'more finding')}: {doctor}" if len(problems) > 1 else ""
    clauses = ["; ".join(text for text, is_said in waiting if is_said), more if problems else "all is well"]
    return " · ".join(clause for clause in clauses if clause)


@lru_cache(maxsize=1)  # of a look, not of each key
def _problems(now: Standing) -> tuple[list[Finding], str]:
    """Return what doctor finds, the worst first, without findings about single files; and the command for all."""
    from rmq_spark.report import Diagnosis

    diagnosis = Diagnosis(now)
    return diagnosis.problems(sys.maxsize, tables=False), diagnosis.command("doctor")


def _marked(now: Standing) -> set[str]:
    """Return half batches that are pending for too long, and consumer groups of findings."""
    late = {row["half_id"] for row in now.pending if row["age_seconds"] > PENDING_S_MAX and not row["leased"]}
    found = (problem for problem in _problems(now)[0] if problem.check in ("groups", "dead letters"))
    return late | {problem.what.partition(":")[0] for problem in found}


def open_half_batches(now: Standing) -> list[dict[str, Any]]:
    """Return half batches that wait for a verdict; those that need a person come first."""
    return [
        {
            "state": state,
            "age": short_age(row["age_seconds"]),
            "half_id": row["half_id"],
            "group": row["producer_group"],
            "messages": row["messages"],
            "checks": row["check_times"],
        }
        for state, batches in (("conflict", now.conflicts), ("quarantined", now.quarantined), ("pending", now.pending))
        for row in sorted(batches, key=lambda batch: -batch["age_seconds"])
    ]


def lines(
    name: str, now: Standing, before: Standing, view: View, width: int | None, height: int | None = None
) -> list[tuple[str, str]]:
    """Return the lines of the screen, each with its style: what waits first, then groups, then topics.

    No line is wider than the width: a wide view shows a part of each line. The lists share what room the height leaves,
    and say how many more rows they have; without a height they have up to :data:`ROWS_MAX`.
    """
    at = short_time(now.at)
    if width is not None:
        name = shortened(one_line(name), max(CELL_CHARS_MIN, width - len(f"txmq top      {at}")))
    problem, marked = next(iter(_problems(now)[0]), None), _marked(now)
    style = "green" if problem is None else STYLES.get(problem.level, "")
    shown = [(_part(f"txmq top   {name}   {at}", 0, width), "bold")]
    said = hanging("", headline(now), 0, width=width).splitlines()
    shown += [(clause, style) for line in said for clause in _folded(line, width)]
    if problem is not None:
        text = hanging("", one_line(f"{problem.check}: {problem.what}"), 2, width=width).lstrip()
        command = one_line(problem.remedy or "").partition(" (")[0].partition(";")[0]  # txmq doctor has all of it
        remedy = hanging("", f"→ {command}", 2, width=width) if command else ""
        told = [clause for line in (text, remedy) for row in line.splitlines() for clause in _folded(row, width)]
        most = len(told) if height is None else max(2, height // FINDING_SHARE)
        shown += [(line, style) for line in told[:most]]
    groups = [in_words(row) for row in consumer_rows(now, before)]
    lists = [
        [row for row in rows if not view.word or view.word.lower() in " ".join(map(str, row.values())).lower()]
        for rows in (open_half_batches(now), groups, topic_rows(now, before))
    ]
    tables = [fitted(rows[:ROWS_MAX], None if view.is_wide else width)[0] if rows else [] for rows in lists]
    widest = max((len(line) for table in tables for line in table), default=0)
    view.left = min(view.left, max(0, widest - (width or widest)))
    tables = [[_part(line, view.left, width) for line in table] for table in tables]
    counts = list(map(len, lists))
    if height is not None:
        counts = _shares(counts, height - len(shown) - 1 - 2 * sum(map(bool, lists)), view.chosen)
    for number, (rows, table, count) in enumerate(zip(lists, tables, counts, strict=True)):
        if not rows:
            continue
        header, *texts = table
        kept = min(len(texts), max(1, count - 1)) if count < len(rows) else len(texts)
        first = 0
        if number == view.chosen:
            first = view.first = min(view.first, len(texts) - kept)
        shown += [("", ""), (header, "bold reverse" if number == view.chosen else "bold")]
        shown += [(texts[n], _style_of(rows[n], marked)) for n in range(first, first + kept)]
        if len(rows) > kept:
            above = f"{first:,} above, " if first else ""
            shown.append((f"{above}{len(rows) - first - kept:,} more {LISTS[number]}", "dim"))
    return shown


def _style_of(row: Mapping[str, Any], marked: set[str]) -> str:
    is_marked = (row.get("half_id") or row.get("consumer_group")) in marked
    return STYLES.get(str(row.get("state"))) or ("yellow" if is_marked else "")


def _part(line: str, left: int, width: int | None) -> str:
    """Return the part of a line that the screen shows, from a character on."""
    return line if width is None else shortened(line[left:], width, 1.0)


def _folded(line: str, width: int | None) -> list[str]:
    """Return a line as the lines that fit into the width: a command may be longer."""
    from rich.cells import chop_cells

    return [line] if width is None else chop_cells(line, width)


def _shares(counts: list[int], room: int, chosen: int | None) -> list[int]:
    """Return how many lines each list has: an equal share, or few beside a chosen list; then what others leave."""
    share = room // max(1, sum(map(bool, counts))) if chosen is None else FEW
    shares = [min(count, max(1, share)) for count in counts]
    for number in sorted(range(len(counts)), key=lambda number: number != chosen):
        shares[number] += max(0, min(counts[number] - shares[number], room - sum(shares)))
    return shares


def screen(name: str, now: Standing, before: Standing, view: View, width: int, height: int) -> RenderableType:
    """Return the live screen."""
    from rich.text import Text

    shown = lines(name, now, before, view, width, height)
    keys = (
        f"filter: {view.word}▏ Enter keeps it, Esc ends it" if view.is_typing else KEYS_WIDE if view.is_wide else KEYS
    )
    if view.word and not view.is_typing:
        keys = f"only rows with {shortened(repr(view.word), max(4, width - len(FILTERED) - 15))}{FILTERED}"
    shown = [*shown[: height - 1], (shortened(keys, width, 1.0), "dim")]
    return Text("\n", no_wrap=True).join(Text(line, style=style, no_wrap=True) for line, style in shown)
