"""``txmq report``: one page that shows how a commit log fares."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.text import byte_size
from rmq_spark.cli.command import name_path
from rmq_spark.cli.output import AsJson, LogPath, Storage, hanging, one_line, open_log, plainly, short_time
from rmq_spark.errors import HalfBatchNotFoundError

if TYPE_CHECKING:
    from rmq_spark.log import CommitLog, Trace
    from rmq_spark.report import Figures, Finding


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(report)


@plainly
def report(
    path: LogPath,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one page with charts, which fetches nothing.")
    ] = None,
    since: Annotated[str, typer.Option(help='How far back: "7d", "12h".')] = "7d",
    transaction: Annotated[
        str | None,
        typer.Option(
            "--transaction",
            metavar="ID",
            help="Of which the page has a timeline: a transaction, half batch or message. By default one that waits "
            "for a person, else the slowest.",
        ),
    ] = None,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Say in one sentence whether all is well, and what to do if not; with --html as a page with charts."""
    if html is not None and html.is_dir():
        raise typer.BadParameter(f"{str(html)!r} is a folder: name a file in it", param_hint="--html")
    if html is not None and not html.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(html.parent)!r}: make it first", param_hint="--html")
    if transaction is not None and html is None:
        raise typer.BadParameter("it is shown on a page: write --html FILE, too", param_hint="--transaction")
    from rmq_spark.cli.doctor import judge
    from rmq_spark.cli.trace import advice, argument_of
    from rmq_spark.report import figures_of, findings_of

    log = open_log(path, storage)
    if html is not None:
        name_path(redacted(log.path))
    chosen = None if transaction is None else log.trace(**argument_of(transaction))
    figures = figures_of(log, since)
    diagnosis = judge()(figures.now)
    if html is not None:
        from rmq_spark.report import page

        shown = chosen or _most_urgent(log, figures)
        lines = [] if shown is None else list(advice(shown))
        html.write_text(page(figures, shown, diagnosis, lines), encoding="utf-8")
    findings = findings_of(figures, diagnosis)
    if as_json:
        typer.echo(json.dumps(_summary(figures, findings)))
        return
    for finding in findings:
        typer.echo(hanging("", one_line(finding.what), 2).lstrip())
        if finding.remedy is not None:
            typer.echo(hanging("", f"→ {one_line(finding.remedy)}", 2))
    if html is not None:
        typer.secho(f"{html} has the charts ({byte_size(html.stat().st_size)})", dim=True, err=True)


def _most_urgent(log: CommitLog, figures: Figures) -> Trace | None:
    """Return the trace of a half batch in conflict, else of a quarantined one, else of the one that waited longest for
    its last verdict. None when there is none, or when upkeep has removed all of them."""
    waiting = [row["half_id"] for row in (*figures.conflicts, *figures.quarantined)]
    for half_id in [*waiting, *figures.slowest["half_id"].to_pylist()]:
        with suppress(HalfBatchNotFoundError):
            return log.trace(half_id=half_id)
    return None


def _summary(figures: Figures, findings: list[Finding]) -> dict[str, Any]:
    """Return a report for programs."""
    now = figures.now
    return {
        "since": short_time(figures.span.since).replace(" ", "T"),
        "until": short_time(figures.span.until).replace(" ", "T"),
        "level": findings[0].level.value,
        "findings": [f.to_dict() for f in findings],
        "messages_appeared": figures.committed,
        "messages_rolled_back": figures.rolled_back,
        "half_batches_settled": figures.settled,
        "messages_pending": figures.pending_messages,
        "oldest_pending_s": now.oldest_pending_s,
        "quarantined": list(dict.fromkeys(row["half_id"] for row in now.quarantined)),
        "conflicts": [row["half_id"] for row in now.conflicts],
        "dead_letters": figures.dead_letters,
        "undrained_s": now.undrained.seconds,
        "groups": [{name: row[name] for name in ("consumer_group", "lag", "lag_seconds")} for row in now.groups],
    }
