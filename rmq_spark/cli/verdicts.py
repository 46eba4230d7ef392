"""``txmq pending``, ``quarantined``, ``conflicts``, ``resolve`` and ``resume``: what waits for a verdict."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.command import FAILED, fail, path_to_type
from rmq_spark.cli.completion import of_argument
from rmq_spark.cli.output import (
    AsJson,
    LogPath,
    Storage,
    Wide,
    one_line,
    open_log,
    plainly,
    say,
    tell,
    terminal_width,
)
from rmq_spark.cli.shortened import whole_id
from rmq_spark.cli.text import short_age, size
from rmq_spark.cli.watch import Watch, listed, watched
from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    import pyarrow as pa

    from rmq_spark.log import CommitLog

VERDICTS = ("COMMIT", "ROLLBACK")
EVERYTHING = "all"
SPARE = ("last_check", "lease_until", "prepared_at", "attempt", "size", "check_times", "messages")

HalfId = Annotated[
    str,
    typer.Argument(
        metavar="HALF_ID", help="As listed by pending, quarantined and conflicts.", autocompletion=of_argument
    ),
]
Group = Annotated[str | None, typer.Option("--group", help="Only those of this producer group.")]


def register(app: Any) -> None:
    """Add the commands to the app."""
    for command in (pending, quarantined, conflicts, resolve, resume):
        app.command()(command)


@plainly
def pending(
    path: LogPath,
    group: Group = None,
    watch: Watch = None,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """List half batches with messages that have no verdict yet: their age, checks, group and size."""
    log = open_log(path, storage)
    watched(watch, lambda: _open_listed(log, log.pending(), group, as_json, "pending"))


@plainly
def quarantined(
    path: LogPath,
    group: Group = None,
    watch: Watch = None,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """List half batches that checks gave up; see resume and resolve."""
    log = open_log(path, storage)
    from rmq_spark.report import Standing

    def text() -> str:
        table = log.quarantined()
        half_ids = table["half_id"].to_pylist()
        answers = Standing(log.engine).last_answers(list(dict.fromkeys(half_ids)))
        last_checks = [answers[half_id][1] if half_id in answers else None for half_id in half_ids]
        return _open_listed(log, table.append_column("last_check", [last_checks]), group, as_json, "quarantined")

    watched(watch, text)


@plainly
def conflicts(
    path: LogPath,
    group: Group = None,
    watch: Watch = None,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """List half batches with two verdicts that contradict each other; see resolve."""
    log = open_log(path, storage)
    from rmq_spark.report import Standing

    def text() -> str:
        rows = [row for row in Standing(log.engine).conflicts if group in (None, row["producer_group"])]
        left_out = ("lease_until", "leased")
        rows = [{name: value for name, value in row.items() if name not in left_out} for row in rows]
        return listed(rows, as_json, "there are no conflicts", SPARE, _in_words)

    watched(watch, text)


def _open_listed(log: CommitLog, table: pa.Table, group: str | None, as_json: bool, what: str) -> str:
    from rmq_spark._core.inspect.standing import age_s

    groups = sorted(set(table["producer_group"].drop_null().to_pylist()))
    of_group = "" if group is None else f" of group {group!r}"
    hint = f" ({what} are half batches of {', '.join(map(repr, groups))})" if of_group and groups else ""
    now = log.engine.runtime.now()
    rows = table.to_pylist()
    shown = [
        {**row, "age_seconds": age_s(row["prepared_at"], now)} for row in rows if group in (None, row["producer_group"])
    ]
    return listed(shown, as_json, f"nothing{of_group} is {what}{hint}", SPARE, _in_words)


def _in_words(row: dict[str, Any]) -> dict[str, Any]:
    last_columns = ("age_seconds", "bytes", "prepared_at", "lease_until", "history", "last_check")
    return {
        **{k: v for k, v in row.items() if k not in last_columns},
        "age": short_age(row["age_seconds"]),
        "size": size(row["bytes"]),
        **{k: row[k] for k in last_columns[2:] if k in row},
    }


@plainly
def resolve(
    path: LogPath,
    half_id: HalfId,
    verdict: Annotated[str, typer.Argument(metavar="COMMIT|ROLLBACK", autocompletion=of_argument)],
    reason: Annotated[str, typer.Option(help="Kept with the op marker, for those who ask later.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Needed where there is no terminal.")] = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Decide on what is pending, quarantined or in conflict in a half batch. Shows it and its first messages, and asks
    before it acts."""
    from rmq_spark.cli.resolution import Resolving

    decision = verdict.upper().removesuffix("_MESSAGE")
    if decision not in VERDICTS:
        raise typer.BadParameter(f"{verdict!r} is neither COMMIT nor ROLLBACK", param_hint="COMMIT|ROLLBACK")
    _require_words(reason)
    log = open_log(path, storage)
    half_id = whole_id(log, half_id)
    resolving = Resolving(log, half_id, decision)
    if resolving.acts and not yes:
        width = terminal_width(err=True)
        typer.echo(f"{resolving.description(width)}\n{resolving.messages(width)}", err=True)
        if not sys.stdin.isatty():
            tell(f"there is no terminal to ask on: pass --yes to {decision} it unasked", err=True)
            raise typer.Exit(2)
        if not typer.confirm(resolving.question(), err=True):
            tell("nothing was changed", err=True)
            raise typer.Exit(1)
    outcome = resolving.run(reason)
    say(as_json, {"half_id": half_id, "verdict": decision, "what": outcome}, one_line(f"{half_id}: {outcome}"))


def _require_words(reason: str) -> None:
    """Refuse a reason that is empty, or the placeholder of a printed command."""
    if not reason.strip(" .…"):
        what = "empty" if not reason.strip() else f"{reason.strip()}, which stands for your words"
        raise typer.BadParameter(f"it is {what}: a reason is kept with the op marker", param_hint="--reason")


@plainly
def resume(
    path: LogPath,
    half_id: Annotated[
        str,
        typer.Argument(
            metavar="HALF_ID|all", help="As listed by quarantined; or all of them.", autocompletion=of_argument
        ),
    ],
    reason: Annotated[str, typer.Option(help="Kept with the op marker.")] = "resumed",
    group: Annotated[str | None, typer.Option("--group", help="With all: those of this producer group.")] = None,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Take a half batch out of quarantine: the next round of checks asks its listener again, and counts anew."""
    from rmq_spark._core.inspect.diagnosis import check_once

    _require_words(reason)
    log = open_log(path, storage)
    typed = path_to_type()
    if half_id != EVERYTHING:
        if group is not None:
            raise typer.BadParameter("it goes with all: write txmq resume all --group …", param_hint="--group")
        half_ids = [whole_id(log, half_id)]
    else:
        rows = log.quarantined().to_pylist()
        half_ids = list(dict.fromkeys(r["half_id"] for r in rows if group in (None, r["producer_group"])))
        if not half_ids:
            say(False, {}, "nothing is quarantined") if not as_json else None
    for item in half_ids:
        count = log.resume(item, reason)
        if not count and half_id != EVERYTHING:
            fail(OptionError(f"nothing of {item} is quarantined: txmq trace {typed}{item} tells how it stands"), FAILED)
        text = f"{item}: {count_of(count, 'message')} {'is' if count == 1 else 'are'} pending again"
        say(as_json, {"half_id": item, "messages": count}, one_line(text))
    if half_ids and not as_json:
        tell(f"ask its listener now, where the check job's txmq.toml is: {check_once(typed)}", dim=True, err=True)
