"""The ``txmq`` command: look into a commit log, settle what waits for a person, run checks.

Exit codes: 0 for success; 1 when something failed (one line says what), or when a person declined; 2 for wrong usage,
or for a configuration that cannot be used. ``relay`` and ``doctor`` have more (docs/command.md). A pipe that its reader
closes early, as ``head`` does, counts as success: 0.

A verb's module is imported when the verb is called, and imports heavy packages (pyarrow, deltalake, rich's tables)
inside its functions, so that ``--help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rmq_spark import __version__
from rmq_spark.cli.verbs import Verbs

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="RocketMQ's transactional messages in Delta tables: look into a commit log, settle what waits, run checks. "
    "The commit log's PATH may be left out where TXMQ_PATH or txmq.toml names it.",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"rmq-spark {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass
