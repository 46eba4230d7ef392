"""The ``txmq`` command: look into a commit log, settle what waits for a person, run checks.

Exit codes: 0 for success; 1 when something failed (one line says what), or when a person said no; 2 for wrong usage, or
for a configuration that cannot be used. ``relay`` and ``doctor`` have more (docs/command.md). A reader that closes the
pipe early, as ``head`` does, has what it wanted: 0.

The modules of this package import what is heavy (pyarrow, deltalake, rich's tables) inside the commands: ``--help``
answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rmq_spark import __version__
from rmq_spark.cli import doctor, logs, messages, settling, statistics, top, tracing
from rmq_spark.cli.command import LOOK, PARTS, UPKEEP, App
from rmq_spark.cli.dead_letters import dlq_app
from rmq_spark.cli.exporting import exporter
from rmq_spark.cli.groups import group_app
from rmq_spark.cli.output import plainly
from rmq_spark.cli.relaying import HELP as RELAY_HELP
from rmq_spark.cli.relaying import relay
from rmq_spark.cli.reporting import report
from rmq_spark.cli.topics import list_topics, topic_app

app = App(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="RocketMQ's transactional messages in Delta tables: look into a commit log, settle what waits, run checks. "
    "The commit log's PATH may be left out where TXMQ_PATH or txmq.toml names it.",
)
for module in (messages, tracing, statistics, top, doctor, settling, logs):
    module.register(app)
for name, part in (("topic", topic_app), ("group", group_app), ("dlq", dlq_app)):
    app.add_typer(part, name=name, rich_help_panel=PARTS)
app.command("topics", help="The same as topic list.", rich_help_panel=PARTS)(list_topics)
app.command(help=RELAY_HELP, rich_help_panel=UPKEEP)(plainly(relay))
app.command(rich_help_panel=LOOK)(plainly(report))
app.command(rich_help_panel=UPKEEP)(plainly(exporter))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rmq-spark {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass
