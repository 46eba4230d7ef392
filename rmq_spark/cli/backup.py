"""``txmq backup``: a copy of a commit log, taken while programs use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rmq_spark.cli.output import AsJson, LogPath, Storage, hide, open_log, plainly, say, storage_options

TARGET_STORAGE_ENV = "TXMQ_TARGET_STORAGE__"


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(backup)


@plainly
def backup(
    path: LogPath,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="An empty folder or object-store URI, or an older copy.")
    ],
    target_storage: Annotated[
        list[str] | None,
        typer.Option(
            "--target-storage",
            metavar="KEY=VALUE",
            help="An option for the target's store, when it is another one; may be repeated. Set secrets as "
            f"{TARGET_STORAGE_ENV}AWS_SECRET_ACCESS_KEY and so on in the environment.",
        ),
    ] = None,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Copy a commit log as it is at one moment, while programs use it; or a copy back to where the log was. An older
    copy at the target is brought up to date."""
    from rmq_spark._core.client.backup import finish

    target_options = storage_options(target_storage, TARGET_STORAGE_ENV, "--target-storage")
    finish(path, storage_options(storage))
    log = open_log(path, storage)
    hide((target_options or {}).values())
    with _progress_bar() as progress:
        report = log.backup(target, target_options, progress)
    say(as_json, asdict(report), str(report))


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("copied"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("copied", total=None)
        yield lambda copied, total: bar.update(task, completed=copied, total=total)
