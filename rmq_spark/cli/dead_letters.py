"""``txmq dlq``: dead letters of a consumer group."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.command import App
from rmq_spark.cli.output import AsJson, GroupName, LogPath, Storage, Wide, open_log, plainly, say, show
from rmq_spark.cli.text import json_message, short
from rmq_spark.errors import OptionError

LIMIT = 100

dlq_app = App(no_args_is_help=True, help="Dead letters: messages that a consumer group gave up.")


def register(app: Any) -> None:
    """Add the commands to the app."""
    app.add_typer(dlq_app, name="dlq")


@dlq_app.command("list")
@plainly
def list_letters(
    path: LogPath,
    group: GroupName,
    limit: Annotated[int, typer.Option(help="At most so many, the oldest first.")] = LIMIT,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """List dead letters, why they were given up, and when they were sent again."""
    from rmq_spark.consumers import DeadLetters

    letters = DeadLetters(open_log(path, storage), group).list(limit).to_pylist()
    columns = ("queue_offset", "topic", "msg_id", "keys", "reconsume_times", "reason", "died", "resent")
    table = [{**{name: row[name] for name in columns}, "body": short(row["body"])} for row in letters]
    rows = [json_message(row) for row in letters] if as_json else table
    show(rows, as_json, "there are no dead letters", spare=["resent", "died", "reconsume_times"], table=table)


@dlq_app.command()
@plainly
def resend(
    path: LogPath,
    group: GroupName,
    offset: Annotated[list[int] | None, typer.Option(help="A letter's queue_offset; may be repeated.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that were not sent again yet.")] = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Send dead letters to their group again; their retries are counted anew. A letter is sent again only once."""
    from rmq_spark.consumers import DeadLetters

    if everything == bool(offset):
        raise OptionError("say which letters: --offset N (may be repeated), or --all")
    sent = DeadLetters(open_log(path, storage), group).resend(None if everything else offset)
    text = f"{count_of(sent, 'dead letter')} sent again to {group}"
    say(as_json, {"consumer_group": group, "sent": sent}, text)
