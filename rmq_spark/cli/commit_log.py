"""``txmq init``, ``create``, ``check``, ``maintain``, ``drain``, ``vacuum``: a commit log as a whole."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.vocabulary.options import DRAIN_EVERY_S, QUEUES_DEFAULT, parse_duration
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.output import AsJson, LogPath, Storage, open_log, plainly, say, storage_options, tell, wrapped
from rmq_spark.cli.text import as_json as json_of
from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rmq_spark.log import MaintenanceReport


def register(app: Any) -> None:
    """Add the commands to the app."""
    for command in (init, create, check, maintain, drain, vacuum):
        app.command()(command)


@plainly
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; it must not be there.")] = Path(
        "txmq.toml"
    ),
) -> None:
    """Write a configuration with a comment for every setting: the commit log's path, and the check job's settings.
    The commit log itself is made by txmq create."""
    if not str(file).isprintable():
        raise OptionError(f"{str(file)!r} has characters that cannot be printed: name another file")
    try:
        with file.open("x", encoding="utf-8") as output:
            output.write(_example_for(str(file)))
    except FileExistsError:
        raise OptionError(f"{file} is there already, and is left as it is: name another file") from None
    except FileNotFoundError:
        raise OptionError(f"{file} cannot be written: the folder {file.parent} does not exist") from None
    except OSError as problem:
        raise OptionError(f"{str(file)!r} cannot be written: {problem}") from None
    next_command = f"txmq check --config {file} --once"
    tell(f"{file} is written: set path, listener_modules and [listeners] in it, then run {next_command}")


def _example_for(file: str) -> str:
    from rmq_spark._core.checks.example import example_configuration

    text = example_configuration().replace("conf/txmq.toml", file)
    path = os.environ.get("TXMQ_PATH")
    return text if path is None else text.replace('path = "shop/log"', f"path = {json.dumps(path)}", 1)


@plainly
def create(
    path: LogPath,
    queues: Annotated[int, typer.Option(help="Queues of a topic that is made without a number.")] = QUEUES_DEFAULT,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Leave a commit log that is there as it is.")] = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Make a commit log."""
    from rmq_spark.log import CommitLog

    log = CommitLog.create(path, queues=queues, exist_ok=exist_ok, storage_options=storage_options(storage))
    say(as_json, {"path": log.path, "id": log.id}, f"{log.path} is a commit log")


@plainly
def drain(path: LogPath, as_json: AsJson = False, storage: Storage = None) -> None:
    """Copy committed messages into the table messages, which every reader of Delta can read."""
    version = open_log(path, storage).drain()
    text = f"the table messages has every message that is committed (version {version} of op)"
    say(as_json, {"op_version": version}, text)


@plainly
def maintain(
    path: LogPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    every: Annotated[
        str | None, typer.Option(help='Do it again and again, such as every "60s", until stopped.')
    ] = None,
    drain_every: Annotated[
        str | None, typer.Option(help='With --every: how often to drain, such as "30s"; "0s": in its rounds only.')
    ] = None,
    grace: Annotated[str | None, typer.Option(help='How long what is settled stays for readers: "10m".')] = None,
    audit: Annotated[str | None, typer.Option(help='How long rolled back messages stay: "7d".')] = None,
    idempotency: Annotated[str | None, typer.Option(help='How long idempotency keys are remembered: "7d".')] = None,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Do all the upkeep, so that the log does not grow with its age. Safe beside everything else."""
    from rmq_spark._core.runtime.threads import running, stopped_by_signals
    from rmq_spark._core.upkeep.schedule import maintain as keep_up
    from rmq_spark.checks import Draining, Maintainer
    from rmq_spark.log import Graces

    log = open_log(path, storage)
    graces = Graces.of(grace, audit, idempotency)
    show = _report_printer(as_json)
    interval = None if every is None else parse_duration(every, "every")
    if interval == 0:
        raise typer.BadParameter(f"--every {every} is no time: write --every 60s, for instance")
    if dry_run and interval is not None:
        raise typer.BadParameter("--dry-run does nothing that --every could do again")
    if interval is None:
        if drain_every is not None:
            raise typer.BadParameter(
                "--drain-every is about drains between two rounds: write --every 60s, for instance"
            )
        show(keep_up(log.engine, graces, dry_run))
        return
    drain_every_s = DRAIN_EVERY_S if drain_every is None else parse_duration(drain_every, "drain_every")
    draining = Draining(log, drain_every_s) if drain_every_s else None
    maintainer = Maintainer(log, interval, graces, None if draining is None else draining.turn)
    show(keep_up(log.engine, graces))
    stop = threading.Event()
    workers = {} if draining is None else {"txmq-drains": draining.run}
    with stopped_by_signals(stop), running(stop, workers):
        maintainer.run(stop, show)


def _report_printer(as_json: bool) -> Callable[[MaintenanceReport], None]:
    return lambda report: typer.echo(json_of(asdict(report)) if as_json else wrapped(str(report)))


@plainly
def check(
    log_path: Annotated[
        str | None,
        typer.Argument(metavar="[PATH]", help="The commit log, in the place of the file's.", show_default=False),
    ] = None,
    config: Annotated[Path, typer.Option("--config", "-c", envvar="TXMQ_CONFIG", help="The job's TOML file.")] = Path(
        "txmq.toml"
    ),
    once: Annotated[bool, typer.Option("--once", help="One round, for cron; exit code 1 on problems.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each round.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while all is well.")] = False,
) -> None:
    """Ask listeners what became of transactions that a crash left open, and settle them."""
    from rmq_spark.cli.check_job import run_job

    if log_path is not None:
        os.environ["TXMQ_PATH"] = log_path
    raise typer.Exit(run_job(config, once, as_json, quiet))


@plainly
def vacuum(
    path: LogPath,
    older_than: Annotated[str | None, typer.Option(help="At least 7d, which is the default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files.")] = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Remove files that no table names: what crashes and compaction left behind."""
    files = open_log(path, storage).vacuum(older_than, dry_run)
    were = "would be" if dry_run else "was" if len(files) == 1 else "were"
    text = "\n".join([*files, f"{count_of(len(files), 'file')} {were} removed"])
    say(as_json, {"dry_run": dry_run, "files": files}, text)
