"""``txmq doctor``: checks this machine and a commit log, and says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.inspect.finding import worst
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.command import BAD_USAGE, fail, path_to_type, sentence_of
from rmq_spark.cli.output import AsJson, LogPath, Storage, Wide, hanging, open_log, plainly
from rmq_spark.cli.text import as_json as json_of
from rmq_spark.cli.text import one_line
from rmq_spark.errors import ConfigError
from rmq_spark.report import Finding, Level

if TYPE_CHECKING:
    from rmq_spark.cli.configuration import Configured
    from rmq_spark.report import Diagnosis, Standing

WARNINGS, CRITICAL = 5, 6
COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.CRITICAL: "red"}
HELP = f"""Look at this machine and a commit log, and say what is wrong and what to do.

It writes to the store only to try it (and removes that). Exit codes, for monitoring: 0 when all is well;
{WARNINGS} when there are warnings; {CRITICAL} when something is critical.
"""


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command(help=HELP)(doctor)


@plainly
def doctor(
    path: LogPath,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show warnings and what is critical alone.")] = False,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    order = list(Level)
    findings = sorted(_look(path, storage), key=lambda finding: -order.index(finding.level))
    for finding in findings:
        if not quiet or finding.level in (Level.WARNING, Level.CRITICAL):
            typer.echo(json_of(finding.to_dict()) if as_json else _told(finding))
    level = worst(findings)
    if not as_json:
        counts = [sum(f.level is bad_level for f in findings) for bad_level in (Level.CRITICAL, Level.WARNING)]
        if not quiet or any(counts):
            typer.echo(f"{counts[0]} critical, {count_of(counts[1], 'warning')}")
    raise typer.Exit({Level.CRITICAL: CRITICAL, Level.WARNING: WARNINGS}.get(level, 0))


def _look(path: str, storage: list[str] | None) -> Iterator[Finding]:
    from rmq_spark._core.client.delta_tables import FORMAT
    from rmq_spark.cli.configuration import configured
    from rmq_spark.cli.doctor_machine import look_at_machine
    from rmq_spark.cli.doctor_store import look_at_store
    from rmq_spark.report import Diagnosis, Standing

    yield from look_at_machine()
    try:
        configuration = configured()
    except ConfigError as problem:
        fail(problem, BAD_USAGE)
    answered_groups, interval_s, findings = settings_of(configuration)
    yield from findings
    try:
        log = open_log(path, storage)
    except Exception as problem:
        yield Finding("log", Level.CRITICAL, sentence_of(problem))
        return
    yield Finding(
        "log", Level.OK, f"{one_line(log.path)} is a commit log of format {FORMAT}, which this version writes"
    )
    yield from look_at_store(log)
    standing = Standing(log.engine)
    yield from Diagnosis(standing, path_to_type(), interval_s, answered_groups, sentence_of).findings()


def judge() -> Callable[[Standing], Diagnosis]:
    """Return what judges a log by the configuration that the command finds."""
    from rmq_spark.cli.configuration import configured
    from rmq_spark.report import Diagnosis

    groups, interval_s, _ = settings_of(configured())
    return partial(Diagnosis, typed=path_to_type(), check_interval_s=interval_s, answered=groups, said=sentence_of)


def settings_of(configuration: Configured) -> tuple[list[str] | None, float, list[Finding]]:
    """Return the producer groups with a listener here or elsewhere (None without a configuration), the seconds between
    checks, and findings about the configuration."""
    from rmq_spark._core.checks.job_settings import NEEDED, JobSettings
    from rmq_spark._core.vocabulary.options import TRANSACTION_CHECK_INTERVAL_S
    from rmq_spark.cli.configuration import FILE

    if configuration.file is None and not os.environ.keys() >= {*NEEDED}:
        what = "there is no txmq.toml here, and TXMQ_CONFIG names none: the checker's interval is taken as 60 s"
        return None, TRANSACTION_CHECK_INTERVAL_S, [Finding("configuration", Level.NOTE, what, "txmq init")]
    where = configuration.file or "the environment"
    try:
        settings = JobSettings.load(configuration.file or FILE)
    except ConfigError as problem:
        what = sentence_of(problem)
        return None, TRANSACTION_CHECK_INTERVAL_S, [Finding("configuration", Level.WARNING, what, f"edit {where}")]
    interval_s = settings.check.transaction_check_interval
    refused = settings.look()
    remedy = f"mend that, or edit {where}: until then txmq check ends with code {BAD_USAGE}"
    findings = [Finding("configuration", Level.WARNING, f"{where}: {what}", remedy) for what in refused]
    if not refused:
        what = f"{where}: {count_of(len(settings.listeners), 'listener')} (looked for, not run), checks every "
        findings.append(Finding("configuration", Level.OK, f"{what}{interval_s:g} s"))
    return [*settings.listeners, *settings.elsewhere], interval_s, findings


def _told(finding: Finding) -> str:
    level = f"{finding.level.value:<10}"
    text = hanging(f"{level}{finding.check:<15}", one_line(finding.what), 25)
    if not os.environ.get("NO_COLOR"):
        text = typer.style(level, fg=COLOURS[finding.level]) + text[len(level) :]
    if finding.remedy is not None:
        text += "\n" + hanging("", f"→ {one_line(finding.remedy)}", 25)
    return text
