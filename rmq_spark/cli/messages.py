"""``txmq read`` and ``txmq query``: messages in order, or by key, id, offset or time."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark.cli.bodies import BYTES_SHOWN, BodyBytes, BodyForm, Form, short_hex, shown
from rmq_spark.cli.command import FAILED, path_to_type
from rmq_spark.cli.completion import topics_of_option
from rmq_spark.cli.output import AsJson, LogPath, Storage, TopicName, Wide, block, open_log, plainly, show, tell
from rmq_spark.cli.shortened import whole_id
from rmq_spark.cli.text import escaped, json_message, one_line, short, short_text, short_time
from rmq_spark.cli.times import time_of
from rmq_spark.cli.watch import interval_of, wait
from rmq_spark.errors import OptionError, TxmqError

if TYPE_CHECKING:
    import pyarrow as pa

    from rmq_spark.log import CommitLog

READ_LIMIT = 20
SIMILAR_SHOWN = 3
DECIDING = ("committed", "rolled_back", "quarantined")
FOLLOWED_EVERY = "1s"
SHOWN_COLUMNS = ["queue_id", "queue_offset", "tags", "keys", "body", "commit_timestamp"]


def register(app: Any) -> None:
    """Add the commands to the app."""
    for command in (read, query):
        app.command()(command)


Tags = Annotated[str | None, typer.Option(help='Only messages with one of these tags: "a||b".')]


# ---------------------------------------------------------------- read
@plainly
def read(
    path: LogPath,
    topic: TopicName,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"At most so many messages; {READ_LIMIT} by default.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="The newest so many messages, by the time of their commit.")
    ] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="[QUEUE=]OFFSET", help="The first offset, of every queue or of one; repeatable."
        ),
    ] = None,
    queue: Annotated[int | None, typer.Option(min=0, help="Only this queue.")] = None,
    tags: Tags = None,
    selector: Annotated[
        str | None, typer.Option(help='Only messages for which this SQL92 condition is TRUE: "a > 5".')
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is committed from now on, until stopped.")
    ] = False,
    every: Annotated[
        str, typer.Option(metavar="EVERY", help="With --follow: how often it looks for new messages.")
    ] = FOLLOWED_EVERY,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Show committed messages, in (queue, offset) order: the first ones, those --from an offset on, or the --last ones.
    --json prints a line for each; a body that is not UTF-8 is in body_base64."""
    from rmq_spark.cli.message_choice import Choice

    _refuse_contradictions(limit, last, start or [], queue, tags, selector)
    if follow and limit is not None:
        raise typer.BadParameter("--follow and --limit contradict each other: it goes on until it is stopped")
    interval = interval_of(every, "every")
    log = open_log(path, storage)
    choice = Choice(log, topic, queue, tags, selector)
    if follow:
        queues = range(log.engine.require_topic(topic)) if queue is None else [queue]
        _follow(choice, last, _start_offsets(start or [], queues) if start else None, interval, as_json)
        return
    if last is not None:
        table = choice.newest(last)
    else:
        queues = range(log.engine.require_topic(topic)) if queue is None else [queue]
        table = choice.first(_start_offsets(start or [], queues), limit or READ_LIMIT)
    if as_json:
        _print_json(table)
        return
    rows = [{**row, "body": short(row["body"])} for row in table.select(SHOWN_COLUMNS).to_pylist()]
    show(rows, False, "" if rows else _no_messages(log, topic), spare=["commit_timestamp"])
    if last is None and limit is None and len(rows) == READ_LIMIT:
        tell(f"stopped at {READ_LIMIT}: --limit N shows more, --last N the newest", dim=True, err=True)


def _no_messages(log: CommitLog, topic: str) -> str:
    """Say that a topic shows no messages, and how many of its messages are not visible yet."""
    hidden = [counts for (name, _), counts in log.open_messages().items() if name == topic]
    pending, waiting = (sum(counts) for counts in zip(*hidden, strict=True)) if hidden else (0, 0)
    reasons = [f"{pending:,} pending (txmq pending)"] if pending else []
    reasons += [f"{waiting:,} waiting for their time or their turn"] if waiting else []
    return f"topic {topic} has no messages here{': ' if reasons else ''}{', '.join(reasons)}"


def _follow(choice: Any, last: int | None, start: dict[int, int] | None, interval: float, as_json: bool) -> None:
    """Print messages from ``start`` on, or the last ones; then new messages until stopped."""
    ends = choice.ends()
    if start is not None:
        ends = {**{queue: end for queue, end in ends.items() if queue not in start}, **start}
    elif last is not None:
        _print_lines(choice.newest_before(last, ends), as_json)
    with suppress(KeyboardInterrupt):
        while True:
            messages, ends = choice.since(ends)
            _print_lines(messages, as_json)
            if not wait(interval):
                return


def _print_lines(table: pa.Table, as_json: bool) -> None:
    if as_json:
        _print_json(table)
    else:
        for row in table.select(SHOWN_COLUMNS).to_pylist():
            head = f"{short_time(row['commit_timestamp'])}  {row['queue_id']}={row['queue_offset']}"
            labels = "  ".join(one_line(row[name]) for name in ("tags", "keys") if row[name])
            typer.echo(f"{head}  {labels}{'  ' if labels else ''}{one_line(short(row['body']))}")
    sys.stdout.flush()


def _print_json(table: pa.Table) -> None:
    for row in table.to_pylist():
        typer.echo(json.dumps(json_message(row)))


def _refuse_contradictions(
    limit: int | None, last: int | None, start: Sequence[str], queue: int | None, tags: str | None, selector: str | None
) -> None:
    for name, value in (("--from", start), ("--limit", limit)):
        if last is not None and value:
            raise typer.BadParameter(f"--last and {name} contradict each other: --last N counts from the end")
    if tags is not None and selector is not None:
        raise typer.BadParameter(
            "--tags and --selector contradict each other: give one of them (a selector can say TAGS = 'a')"
        )
    for text in start:
        if queue is not None and "=" in text and text.partition("=")[0] != str(queue):
            raise typer.BadParameter(f"--from {text} and --queue {queue} contradict each other: they name two queues")


def _start_offsets(options: Sequence[str], queues: Sequence[int]) -> dict[int, int]:
    start: dict[int, int] = {}
    for option in options:
        queue, _, offset = option.rpartition("=")
        if not offset.isdecimal() or not (queue == "" or queue.isdecimal()):
            raise typer.BadParameter(f"{option!r} is neither OFFSET nor QUEUE=OFFSET", param_hint="--from")
        chosen = [int(queue)] if queue else queues
        start.update(dict.fromkeys(chosen, int(offset)))
    return start


# ---------------------------------------------------------------- query
@plainly
def query(
    path: LogPath,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Messages with this key, visible or not.")] = None,
    message_id: Annotated[
        str | None, typer.Option("--message-id", "-i", metavar="MSG_ID", help="One message, visible or not.")
    ] = None,
    transaction_id: Annotated[
        str | None, typer.Option("--transaction-id", "-t", help="The messages of a transaction, visible or not.")
    ] = None,
    half_id: Annotated[
        str | None, typer.Option("--half-id", help="The messages of a half batch, visible or not.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", help="Only this topic.", autocompletion=topics_of_option)
    ] = None,
    queue: Annotated[int | None, typer.Option(min=0, help="Only this queue of the topic.")] = None,
    offset: Annotated[int | None, typer.Option(min=0, help="With --queue: the message there.")] = None,
    tags: Tags = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help='Committed then or later: "2025-03-01T08:00:00Z", or "2h" for two hours ago.'
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Committed before then.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many messages.")] = READ_LIMIT,
    body: Form = BodyForm.AUTO,
    body_bytes: BodyBytes = BYTES_SHOWN,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Find messages by a key, an id, an offset or a time, and look at them. One message is shown whole, several as a
    table. By a key or an id those are found, too, that are not committed: pending, quarantined or rolled back ones.
    The latter until they leave the log."""
    from rmq_spark._core.inspect.find import Wanted, find_by_id, find_everywhere
    from rmq_spark._core.selector import parse_tags

    ids = {"message_id": message_id, "transaction_id": transaction_id, "half_id": half_id}
    given_ids = {name: value for name, value in ids.items() if value is not None}
    filters = {"--key": key, "--topic": topic, "--queue": queue, "--offset": offset, "--tags": tags, "--since": since,
               "--until": until}  # fmt: skip
    given_filters = [name for name, value in filters.items() if value is not None]
    _refuse_contradicting_query(list(given_ids), given_filters, topic, queue, offset)
    log = open_log(path, storage)
    if given_ids:
        whole_ids = {name: whole_id(log, value) for name, value in given_ids.items()}
        table = find_by_id(log.engine, limit + 1, **whole_ids)
    else:
        now = log.engine.runtime.now()
        first = None if since is None else time_of(since, now, "since")
        end = None if until is None else time_of(until, now, "until")
        if first is not None and end is not None and first >= end:
            raise OptionError(f"--since {since!r} is not before --until {until!r}: no message can be between them")
        conditions = Wanted(topic, key, None if tags is None else parse_tags(tags), queue, offset, first, end)
        table = find_everywhere(log.engine, conditions, limit + 1)
    has_more = table.num_rows > limit
    rows = table.slice(0, limit).to_pylist()
    if as_json:
        _print_json(table.slice(0, limit))
    elif len(rows) == 1:
        typer.echo(_message_text({**rows[0], "decided": _decided(log, rows[0])}, body, body_bytes), nl=False)
    else:
        columns = "topic queue_id queue_offset state reason msg_id tags keys body commit_timestamp".split()
        all_visible = all(row["state"] == "committed" for row in rows)
        if all_visible and not given_ids:
            columns.remove("state")
        if not any(row["reason"] for row in rows):
            columns.remove("reason")
        _show_several(rows, columns, body)
        if key is not None and not rows:
            _say_similar(log, key, topic)
    if has_more:
        tell(f"stopped at {limit}: --limit N shows more", dim=True, err=True)
    if not rows:
        raise typer.Exit(FAILED)


def _say_similar(log: CommitLog, key: str, topic: str | None) -> None:
    """Say that keys are matched whole, and which ones contain the word."""
    from rmq_spark._core.inspect.find import similar_keys

    found = ", ".join(escaped(short_text(other)) for other in similar_keys(log.engine, key, topic, SIMILAR_SHOWN))
    if not found and not similar_keys(log.engine, "", topic, 1):
        tell("no new message here has keys: a sink takes them from the column keys", dim=True, err=True)
        return
    names = f": {found} contain{'' if ',' in found else 's'} it" if found else ""
    tell(f"keys are matched whole{names}", dim=True, err=True)


def _decided(log: CommitLog, row: dict[str, Any]) -> str | None:
    """Return when and by whom a message that is not visible was decided; None of one that was not, or has left."""
    if row["state"] == "committed":  # it has its commit's time
        return None
    try:
        events = log.trace(message_id=row["msg_id"]).events
    except TxmqError:
        return None
    last = next((event for event in reversed(events) if event.kind in DECIDING), None)
    return None if last is None else f"{short_time(last.at)} by {last.decided_by}"


def _show_several(rows: Sequence[dict[str, Any]], columns: Sequence[str], form: BodyForm) -> None:
    table = [{**{c: row[c] for c in columns}, "body": _cell(row["body"], form)} for row in rows]
    show(table, False, "no such message", spare=["commit_timestamp", "tags", "msg_id"])


def _cell(body: bytes | None, form: BodyForm) -> str | None:
    if body is None or form is BodyForm.NONE:
        return None
    if form is BodyForm.HEX:
        return short_hex(body)
    return short(body)


def _message_text(row: dict[str, Any], form: BodyForm, body_bytes: int) -> str:
    """Return a message as lines of names and values, and its body below them."""
    content = row["body"]
    properties = dict(row["properties"] or ())
    fields = {
        **{k: v for k, v in row.items() if k not in ("body", "properties")},
        "properties": [f"{escaped(k)}={escaped(v)}" for k, v in properties.items()] or None,
        "body_bytes": None if content is None else len(content),
    }
    for name in ("tags", "keys", "sharding_key"):
        fields[name] = None if fields[name] is None else escaped(fields[name])
    text = f"{block(fields)}→ txmq trace {path_to_type()}{shlex.quote(one_line(row['msg_id']))}\n"
    lines = shown(content, form, body_bytes)
    return f"{text}\n{lines}\n" if lines else text


def _refuse_contradicting_query(
    ids: Sequence[str], filters: Sequence[str], topic: str | None, queue: int | None, offset: int | None
) -> None:
    options = [f"--{name.replace('_', '-')}" for name in ids]
    if len(options) > 1 or (options and filters):
        raise typer.BadParameter(f"{' and '.join([*options, *filters])} contradict each other: an id alone says which")
    if not options and not filters:
        raise typer.BadParameter(
            "say which messages: --key, --message-id, --transaction-id, --half-id, --topic, --since or --until; "
            "txmq read shows a topic from its beginning"
        )
    if queue is not None and topic is None:
        raise typer.BadParameter("it needs --topic: which topic's queue?", param_hint="--queue")
    if offset is not None and queue is None:
        raise typer.BadParameter("it needs --queue: which queue's offset?", param_hint="--offset")
