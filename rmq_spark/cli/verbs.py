"""The verbs of ``txmq`` by name. Each is imported only when it is called, so that it does not wait for the others.

``txmq --help`` lists the sentences here; a test compares them with each verb's own.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rmq_spark.cli.completion import join_words_at_colons

if TYPE_CHECKING:
    from collections.abc import Mapping
LOOK, SETTLE, PARTS, UPKEEP = "Look", "Settle", "Topics and groups", "Make and keep up"
"""Panels of the help."""

VERBS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    LOOK: {
        "read": (
            "messages",
            "Show committed messages, in (queue, offset) order: the first ones, those --from an offset on, or the "
            "--last ones",
        ),
        "query": ("messages", "Find messages by a key, an id, an offset or a time, and look at them"),
        "trace": (
            "trace",
            "Tell the whole story of a transaction as a timeline: prepared, leased, checked, decided (by whom, why), "
            "placed, drained, archived",
        ),
        "stats": (
            "statistics",
            "Count: messages of each topic in the last minute, hour and day; what waits; lag of groups; files and "
            "bytes",
        ),
        "top": (
            "top",
            "A live screen: what waits for a verdict and for how long, lag of groups, messages a second of each topic",
        ),
        "doctor": ("doctor", "Look at this machine and a commit log, and say what is wrong and what to do"),
        "report": (
            "report",
            "Say in one sentence whether all is well, and what to do if not; with --html as a page with charts",
        ),
        "serve": (
            "serve",
            "A live page in a browser: what is wrong and what to do, what waits, lag, one half batch, one message",
        ),
    },
    SETTLE: {
        "pending": (
            "verdicts",
            "List half batches with messages that have no verdict yet: their age, checks, group and size",
        ),
        "quarantined": ("verdicts", "List half batches that checks gave up; see resume and resolve"),
        "conflicts": (
            "verdicts",
            "List half batches with two verdicts that contradict each other; see resolve",
        ),
        "resolve": ("verdicts", "Decide on what is pending, quarantined or in conflict in a half batch"),
        "resume": (
            "verdicts",
            "Take a half batch out of quarantine: the next round of checks asks its listener again, and counts anew",
        ),
        "check": ("commit_log", "Ask listeners what became of transactions that a crash left open, and settle them"),
    },
    UPKEEP: {
        "init": (
            "commit_log",
            "Write a configuration with a comment for every setting: the commit log's path, and the check job's "
            "settings",
        ),
        "create": ("commit_log", "Make a commit log"),
        "maintain": ("commit_log", "Do all the upkeep, so that the log does not grow with its age"),
        "drain": (
            "commit_log",
            "Copy committed messages into the table messages, which every reader of Delta can read",
        ),
        "vacuum": ("commit_log", "Remove files that no table names: what crashes and compaction left behind"),
        "backup": (
            "backup",
            "Copy a commit log as it is at one moment, while programs use it; or a copy back to where the log was",
        ),
        "reconcile": (
            "reconcile",
            "After a restore: compare a commit log with the database of its local transactions and with checkpoints "
            "of streams, and say for each attempt that the database has executed since the backup what is to be done",
        ),
        "relay": (
            "relay",
            "Hand committed messages over to Kafka, each of them once and in the order of its queue",
        ),
        "exporter": (
            "exporter",
            "Show a commit log's figures to Prometheus: pending, quarantined, lag, dead letters, files",
        ),
    },
    PARTS: {
        "topics": ("topics", "The same as topic list"),
        "topic": ("topics", "Topics of a commit log."),
        "group": ("groups", "Consumer groups of a commit log."),
        "dlq": ("dead_letters", "Dead letters: messages that a consumer group gave up."),
    },
}
"""Module and first sentence of each verb, by panel of the help."""


class Verb(TyperCommand):
    """A verb as the help lists it. Its module is imported when it is called."""

    def __init__(self, name: str, module: str, **listed: Any) -> None:
        super().__init__(name, **listed)
        self._module = module

    @functools.cached_property
    def real(self) -> Any:
        """The command itself, with its arguments and options."""
        from rmq_spark.cli.command import App

        app = App()
        app.callback()(lambda: None)  # without a callback, typer makes no group of a single command
        import_module(f"rmq_spark.cli.{self._module}").register(app)
        return typer.main.get_group(app).commands[str(self.name)]

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return self.real.make_context(*args, **kwargs)


class Verbs(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        settings["commands"] = {
            name: Verb(name, module, short_help=sentence, rich_help_panel=panel)
            for panel, verbs in VERBS.items()
            for name, (module, sentence) in verbs.items()
        }
        super().__init__(**settings)

    def main(self, *args: Any, **settings: Any) -> Any:
        if os.environ.get("_TXMQ_COMPLETE") == "complete_bash":
            join_words_at_colons()
        try:
            return super().main(*args, **settings)
        except SystemExit as end:
            if end.code == 1 and "--help" in (settings.get("args") or sys.argv):  # the reader has closed the pipe
                raise SystemExit(0) from None
            raise


def whole(app: typer.Typer) -> Any:
    """Return the command with every verb imported, to show all arguments and options."""
    group: Any = typer.main.get_command(app)
    group.commands = {name: verb.real for name, verb in group.commands.items()}
    return group
