"""``txmq topic``: topics, their queues, and how long their messages are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.command import FAILED, App, fail, path_to_type
from rmq_spark.cli.output import AsJson, LogPath, Storage, TopicName, Wide, open_log, plainly, say, show
from rmq_spark.cli.text import short_age, size
from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark.log import CommitLog

FOREVER = "forever"

topic_app = App(no_args_is_help=True, help="Topics of a commit log.")

NewTopic = Annotated[str, typer.Argument(metavar="NAME")]


def register(app: Any) -> None:
    """Add the commands to the app."""
    app.add_typer(topic_app, name="topic")
    app.command("topics", help="The same as topic list.")(list_topics)


@topic_app.command("create")
@plainly
def create_topic(
    path: LogPath,
    name: NewTopic,
    queues: Annotated[int | None, typer.Option(help="The log's own number when not given.")] = None,
    fifo: Annotated[bool, typer.Option("--fifo", help="Messages of one sharding key keep their order.")] = False,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Leave a topic that is there as it is.")] = False,
    retention: Annotated[
        str | None, typer.Option(help='How long messages are kept, "7d": for ever by default.')
    ] = None,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Make a topic."""
    log = open_log(path, storage)
    log.create_topic(name, queues=queues, fifo=fifo, exist_ok=exist_ok, retention=retention)
    count = log.topics()[name]
    say(as_json, {"topic": name, "queues": count}, f"topic {name} has {count_of(count, 'queue')}")


@topic_app.command("set")
@plainly
def set_topic(
    path: LogPath,
    name: TopicName,
    retention: Annotated[str, typer.Option(help=f'How long messages are kept, such as "7d", or "{FOREVER}".')],
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Change how long messages of a topic are kept."""
    log = open_log(path, storage)
    log.set_retention(name, None if retention == FOREVER else retention)
    words = "for ever" if retention == FOREVER else f"for {retention}"
    retention_s = log.retentions()[name]
    expiring_count = 0 if retention_s is None else expiring(log.engine, name, retention_s)
    if expiring_count:
        words += f": {count_of(expiring_count, 'message')} older than that will go at the next upkeep"
    row = {"topic": name, "retention_s": retention_s, "expiring": expiring_count}
    say(as_json, row, f"messages of topic {name} are kept {words}")


@topic_app.command("list")
@plainly
def list_topics(path: LogPath, wide: Wide = False, as_json: AsJson = False, storage: Storage = None) -> None:
    """List topics: how many messages were committed to each, how many of those have expired, what they take, and how
    many wait for their time or for an earlier message."""
    from rmq_spark.report import Standing

    log = open_log(path, storage)
    waiting = waiting_messages(log)
    rows = [
        {**{n: v for n, v in row.items() if n != "drained"}, "waiting": waiting[row["topic"]]}
        for row in Standing(log.engine).topics.values()
    ]
    left_out = ("retention_s", "waiting") if not waiting else ("retention_s",)
    table = [
        {
            **{k: v for k, v in row.items() if k not in left_out},
            "retention": FOREVER if row["retention_s"] is None else short_age(row["retention_s"]),
            "bytes": size(row["bytes"]),
        }
        for row in rows
    ]
    show(rows, as_json, no_topics(), spare=["expired"], table=table)


def waiting_messages(log: CommitLog) -> Counter[str]:
    """Return by topic how many messages are committed and wait for their time or for an earlier message."""
    log.refresh()
    counts = Counter[str]()
    if log.engine.ledger.view.waiting:  # else no half batch is read
        for (topic, _), (_, waiting) in log.open_messages().items():
            counts[topic] += waiting
    return +counts


def no_topics() -> str:
    return f"no topics: make one with txmq topic create {path_to_type()}NAME"


@topic_app.command("status")
@plainly
def topic_status(
    path: LogPath, name: TopicName, wide: Wide = False, as_json: AsJson = False, storage: Storage = None
) -> None:
    """Show the queues of a topic: the first offset that is kept, the next one, what is pending, and the last commit.

    bytes is what the messages take in the table messages: the share of each queue, by its number of messages.
    """
    log = open_log(path, storage)
    rows = queue_rows(log, name)
    table = [{**{k: v for k, v in row.items() if k != "topic"}, "bytes": size(row["bytes"])} for row in rows]
    show(rows, as_json, "", spare=["first_offset", "bytes"], table=table)


@topic_app.command("delete")
@plainly
def delete_topic(path: LogPath, name: TopicName, storage: Storage = None) -> None:
    """Is refused: a topic is for good. Says how to be rid of its messages."""
    log = open_log(path, storage)
    log.engine.require_topic(name)
    topic = f"{path_to_type()}{name}"
    message = (
        f"topic {name!r} is not deleted, and no topic can be: programs that know it go on writing to it, and its "
        "offsets must never be used again. To be rid of its messages: stop its senders, "
        f"txmq topic set {topic} --retention 1h, and let txmq maintain run until txmq topic status {topic} shows none"
    )
    fail(OptionError(message), FAILED)


def expiring(engine: Engine, topic: str, retention_s: float) -> int:
    """Return how many messages of a topic the next upkeep removes with this retention: those of files with no younger
    message."""
    import pyarrow as pa
    import pyarrow.compute as pc

    engine.drained.border()
    actions = engine.messages_table.actions()
    limit = engine.runtime.now() - timedelta(seconds=retention_s)
    newest = actions["max.commit_timestamp"]
    expires = pc.and_(pc.equal(actions["min.topic"], topic), pc.less(newest, pa.scalar(limit, newest.type)))
    return int(pc.sum(actions.filter(expires)["num_records"]).as_py() or 0)


def queue_rows(log: CommitLog, name: str) -> list[dict[str, Any]]:
    from rmq_spark.report import Standing

    queues = log.engine.require_topic(name)
    tails, firsts, open_counts = log.engine.tails(), log.engine.firsts(), log.open_messages()
    commit_times = last_commits(log, {(name, q): tails.get((name, q), 0) for q in range(queues)})
    border = log.engine.drained.border()
    drained = {q: max(0, border.get((name, q), 0) - firsts.get((name, q), 0)) for q in range(queues)}
    drained_total, topic_bytes = sum(drained.values()), Standing(log.engine).topics[name]["bytes"]
    rows = []
    for queue_id in range(queues):
        queue = (name, queue_id)
        first, end = firsts.get(queue, 0), tails.get(queue, 0)
        pending, waiting = open_counts.get(queue, (0, 0))
        rows.append(
            {
                "topic": name,
                "queue_id": queue_id,
                "first_offset": first,
                "next_offset": end,
                "messages": end - first,
                "pending": pending,
                "waiting": waiting,
                "bytes": topic_bytes * drained[queue_id] // drained_total if drained_total else 0,
                "last_commit": commit_times.get(queue),
            }
        )
    return rows


def last_commits(log: CommitLog, ends: Mapping[Queue, int]) -> dict[Queue, datetime]:
    """Return the commit time of the last message before each of these offsets, unless that message is gone."""
    from rmq_spark._core.inspect.group_lag import waiting_since

    return waiting_since(log.engine, {queue: end - 1 for queue, end in ends.items() if end > 0})
