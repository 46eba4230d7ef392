"""``txmq top``: a live screen of a commit log's figures, printed once when there is no terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.cli.groups import in_words
from rmq_spark.cli.output import AsJson, LogPath, Storage, open_log, plainly, rendered
from rmq_spark.cli.text import as_json as json_of
from rmq_spark.cli.text import one_line, short_age, short_time, size
from rmq_spark.cli.watch import interval_of, wait

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rmq_spark.cli.overview import Overview

ROWS = 12
"""Rows that each list shows at most."""


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(top)


@plainly
def top(
    path: LogPath,
    every: Annotated[str, typer.Option(metavar="EVERY", help="How often it looks.")] = "2s",
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """A live screen: messages a second of each topic and group, lag, what is pending and for how long. Ctrl-C ends it.
    Where there is no terminal it looks twice, so that there are rates, and prints once."""
    from rich.console import Console

    from rmq_spark.cli.overview import look

    interval = interval_of(every, "every")
    log = open_log(path, storage)
    before = look(log)
    title = f"txmq top   {redacted(log.path)}"
    if as_json or not sys.stdout.isatty() or Console().is_dumb_terminal:
        if wait(interval):
            now = look(log)
            typer.echo(json_of(figures(now, before)) if as_json else text(title, now, before), nl=as_json)
        return
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(screen(title, before, before), screen=True, auto_refresh=False) as live:
        while wait(interval):
            now = look(log)
            live.update(screen(title, now, before), refresh=True)
            before = now


def figures(now: Overview, before: Overview) -> dict[str, Any]:
    """Return the figures of the screen for JSON."""
    return {
        "at": now.at,
        "pending": len(now.pending),
        "oldest_pending_seconds": now.oldest_pending_s,
        "quarantined": len(now.quarantined),
        "conflicts": len(now.conflicts),
        "undrained_messages": now.undrained_messages,
        "undrained_bytes": now.undrained_bytes,
        "topics": topic_rows(now, before),
        "groups": consumer_rows(now, before),
    }


def _seconds(now: Overview, before: Overview) -> float:
    return max((now.at - before.at).total_seconds(), 1e-3)


def topic_rows(now: Overview, before: Overview) -> list[dict[str, Any]]:
    """Return topics, the busiest first, with messages a second since the last look."""
    seconds = _seconds(now, before)
    rows = [
        {
            "topic": topic,
            "in_per_second": round((now.committed(topic) - before.committed(topic)) / seconds, 1),
            "committed": now.committed(topic),
            "kept": now.kept(topic),
        }
        for topic in sorted(now.topics)
    ]
    return sorted(rows, key=lambda row: (-row["in_per_second"], -row["committed"]))


def consumer_rows(now: Overview, before: Overview) -> list[dict[str, Any]]:
    """Return consumer groups, those furthest behind first, with messages a second since the last look."""
    seconds = _seconds(now, before)
    lags = {row["consumer_group"]: row["lag"] for row in before.groups}
    rows = []
    for group in now.groups:
        name, topics = group["consumer_group"], group["topics"].split(", ")
        committed = sum(now.committed(topic) - before.committed(topic) for topic in topics)
        consumed = max(0, lags.get(name, group["lag"]) + committed - group["lag"])
        rows.append(
            {
                "consumer_group": name,
                "out_per_second": round(consumed / seconds, 1),
                "lag": group["lag"],
                "lag_seconds": group["lag_seconds"],
                "members": group["members"],
                "dead_letters": now.dead_letters.get(name, 0),
            }
        )
    return sorted(rows, key=lambda row: (-row["lag"], row["consumer_group"]))


def headline(now: Overview) -> list[tuple[str, str]]:
    """Return the figures of the first lines, each with a style, which is empty when all is well."""
    oldest = now.oldest_pending_s
    pending = f"{len(now.pending):,} pending" + (f", the oldest for {short_age(oldest)}" if now.pending else "")
    return [
        (pending, "yellow" if oldest > 60 else ""),
        (f"{len(now.quarantined):,} quarantined", "yellow" if now.quarantined else ""),
        (f"{len(now.conflicts):,} in conflict", "bold red" if now.conflicts else ""),
        (f"{now.undrained_messages:,} not drained ({size(now.undrained_bytes)})", ""),
        (f"{sum(now.files.values()):,} live files", ""),
    ]


def open_half_batches(now: Overview) -> list[dict[str, Any]]:
    """Return half batches that wait for a verdict; those that need a person come first."""
    rows = []
    for state, batches in (("conflict", now.conflicts), ("quarantined", now.quarantined), ("pending", now.pending)):
        for row in sorted(batches, key=lambda batch: -batch["age_seconds"]):
            rows.append(
                {
                    "half_id": row["half_id"],
                    "state": state,
                    "group": row["producer_group"],
                    "messages": row["messages"],
                    "checks": row["check_times"],
                    "age": short_age(row["age_seconds"]),
                }
            )
    return rows


def text(title: str, now: Overview, before: Overview) -> str:
    """Return the screen as plain text."""
    parts = [f"{title}   {short_time(now.at)}\n" + "; ".join(words for words, _ in headline(now)) + "\n"]
    parts.append(rendered(topic_rows(now, before)[:ROWS], "no topics"))
    if groups := consumer_rows(now, before)[:ROWS]:
        parts.append(rendered([in_words(group) for group in groups], ""))
    if waiting := open_half_batches(now)[:ROWS]:
        parts.append(rendered(waiting, ""))
    return "\n".join(parts)


def screen(title: str, now: Overview, before: Overview) -> RenderableType:
    """Return the live screen."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    head = Text("   ").join(Text(words, style=style) for words, style in headline(now))
    panels: list[RenderableType] = [Text(f"{one_line(title)}   {short_time(now.at)}", style="bold"), head]
    for name, rows in (
        ("topics", topic_rows(now, before)),
        ("consumer groups", [in_words(row) for row in consumer_rows(now, before)]),
        ("waiting for a verdict", open_half_batches(now)),
    ):
        if rows:
            panels.append(Panel(_grid(rows[:ROWS]), title=name, title_align="left", border_style="dim"))
    panels.append(Text("Ctrl-C ends", style="dim"))
    return Group(*panels)


def _grid(rows: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, expand=True, pad_edge=False, header_style="bold")
    for name in rows[0]:
        number = all(isinstance(row[name], (int, float)) for row in rows)
        grid.add_column(name, justify="right" if number or name == "behind" else "left", no_wrap=True)
    for row in rows:
        cells = [f"{v:,}" if isinstance(v, (int, float)) else one_line(str(v)) for v in row.values()]
        style = {"conflict": "bold red", "quarantined": "yellow"}.get(str(row.get("state")), "")
        grid.add_row(*(Text(cell, style=style) for cell in cells))
    return grid
