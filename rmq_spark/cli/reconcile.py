"""``txmq reconcile``: after a restore, the differences between the database and the log."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark.cli.output import AsJson, LogPath, Storage, one_line, open_log, plainly, tell
from rmq_spark.cli.text import as_json as json_of
from rmq_spark.cli.times import time_of

if TYPE_CHECKING:
    from rmq_spark._core.client.reconcile_report import ReconcileReport
    from rmq_spark.log import CommitLog

LEFT = 1
"""Exit code when something is left to be done, by --apply or by a person."""


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(reconcile)


@plainly
def reconcile(
    path: LogPath,
    listener: Annotated[
        str, typer.Option(metavar="MODULE:ATTRIBUTE", help="The SqlTransactionListener that answers the checks.")
    ],
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[APPID=]PLACE",
            help="The checkpoint of a stream that sends to the log, with its appId if it has one; may be repeated.",
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="When the log was as it is now; a copy that txmq backup made says it itself.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Make visible what can be made visible.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the report is kept; beside the log by default.")
    ] = None,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """After a restore: compare a commit log with the database of its local transactions and with checkpoints of
    streams, and say for each attempt that the database has executed since the backup what is to be done. It changes
    nothing without --apply. Let nobody send, and no checks run, before."""
    from rmq_spark._core.client.checkpoint import Stream
    from rmq_spark._core.client.reconcile import Reconciler
    from rmq_spark._core.listeners.transaction_listener import load_listener, see_working_folder

    backup_time = None if since is None else time_of(since, datetime.now(timezone.utc), "since")
    see_working_folder()
    log = open_log(path, storage)
    streams = [Stream.read(checkpoint_text, log.storage_options) for checkpoint_text in checkpoint or ()]
    result = Reconciler(log.engine, load_listener(listener), streams, backup_time).run(apply)
    report_path = _save(result, log, report)
    if as_json:
        typer.echo(json_of({**result.to_dict(), "report": report_path}))
    else:
        tell("\n".join(one_line(line) for line in str(result).splitlines()))
        tell(f"the report is kept at {report_path}", dim=True, err=True)
    if result.left:
        raise typer.Exit(LEFT)


def _save(report: ReconcileReport, log: CommitLog, file: Path | None) -> str:
    from rmq_spark._core.storage.copy import Folder

    if file is not None:
        file.write_bytes(report.content())
        return str(file)
    folder, _, name = log.path.rpartition("/")
    now = datetime.now(timezone.utc)
    name = f"{name}-reconcile-{now:%Y%m%dT%H%M%S.%f}Z.json"
    Folder(folder, log.storage_options).put(name, report.content())
    return f"{folder}/{name}"
