"""The ``txmq`` command: look into a commit log, settle what waits for a person, run checks.

Exit codes: 0 for success; 1 when something failed (one line says what), or when a person said no; 2 for wrong usage, or
for a configuration that cannot be used; ``relay`` has two more. A reader that closes the pipe early, as ``head`` does,
has what it wanted: 0.

The modules of this package import what is heavy (pyarrow, deltalake, rich's tables) inside the commands: ``--help``
answers at once.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark import __version__
from rmq_spark.cli.dead_letters import dlq_app
from rmq_spark.cli.exporting import exporter
from rmq_spark.cli.groups import group_app
from rmq_spark.cli.output import (
    AsJson,
    LogPath,
    Storage,
    count_of,
    one_line,
    open_log,
    plain,
    plainly,
    short,
    short_time,
    show,
    storage_options,
)
from rmq_spark.cli.relaying import HELP as RELAY_HELP
from rmq_spark.cli.relaying import relay
from rmq_spark.config import QUEUES_DEFAULT, byte_count, parse_duration
from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rmq_spark.check.draining import Draining
    from rmq_spark.commitlog.log import CommitLog

READ_LIMIT = 20
FOREVER = "forever"
VERDICTS = ("COMMIT", "ROLLBACK")


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="RocketMQ's transactional messages in Delta tables: look into a commit log, settle what waits, run checks.",
)
topic_app = typer.Typer(no_args_is_help=True, help="Topics of a commit log.")
app.add_typer(topic_app, name="topic")
app.add_typer(group_app, name="group")
app.add_typer(dlq_app, name="dlq")
app.command(help=RELAY_HELP)(plainly(relay))
app.command()(plainly(exporter))

HalfId = Annotated[str, typer.Argument(metavar="HALF_ID", help="As listed by pending, quarantined and conflicts.")]


# ---------------------------------------------------------------- commit logs and topics
@app.command()
@plainly
def create(
    path: LogPath,
    queues: Annotated[int, typer.Option(help="Queues of a topic that is made without a number.")] = QUEUES_DEFAULT,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Leave a commit log that is there as it is.")] = False,
    storage: Storage = None,
) -> None:
    """Make a commit log."""
    from rmq_spark.commitlog.log import CommitLog

    log = CommitLog.create(path, queues=queues, exist_ok=exist_ok, storage_options=storage_options(storage))
    typer.echo(f"{log.path} is a commit log")


@app.command()
@plainly
def drain(path: LogPath, storage: Storage = None) -> None:
    """Copy committed messages into the table messages, which every reader of Delta can read."""
    version = open_log(path, storage).drain()
    typer.echo(f"the table messages has every message that is committed (version {version} of op)")


@app.command()
@plainly
def maintain(
    path: LogPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    every: Annotated[
        str | None, typer.Option(help='Do it again and again, such as every "60s", until stopped.')
    ] = None,
    drain_every: Annotated[
        str | None,
        typer.Option(help='With --every: drain when messages wait so long, "30s"; "0s": in its rounds only.'),
    ] = None,
    drain_bytes: Annotated[
        str | None, typer.Option(help='With --every: drain when so many bytes of messages wait, "256m".')
    ] = None,
    grace: Annotated[str | None, typer.Option(help='How long what is settled stays for readers: "10m".')] = None,
    audit: Annotated[str | None, typer.Option(help='How long rolled back messages stay: "7d".')] = None,
    idempotency: Annotated[str | None, typer.Option(help='How long idempotency keys are remembered: "7d".')] = None,
    storage: Storage = None,
) -> None:
    """Do all the upkeep, so that the log does not grow with its age. Safe beside everything else."""
    from rmq_spark.check.maintainer import Maintainer
    from rmq_spark.check.threads import running
    from rmq_spark.commitlog.leaving import Graces

    log = open_log(path, storage)
    graces = Graces.of(grace, audit, idempotency)
    interval = None if every is None else parse_duration(every, "every")
    if interval == 0:
        raise typer.BadParameter(f"--every {every} is no time: write --every 60s, for instance")
    if dry_run and interval is not None:
        raise typer.BadParameter("--dry-run does nothing that --every could do again")
    if interval is None:
        for name, given in (("--drain-every", drain_every), ("--drain-bytes", drain_bytes)):
            if given is not None:
                raise typer.BadParameter(f"{name} is about drains between two rounds: write --every 60s, for instance")
        typer.echo(str(log.keep_up(graces, dry_run)))
        return
    draining = _draining(log, drain_every, drain_bytes)
    rounds = Maintainer(log, interval, graces, None if draining is None else draining.turn)
    typer.echo(str(log.keep_up(graces)))
    stop = threading.Event()
    with running(stop, {} if draining is None else {"txmq-drains": draining.run}):
        rounds.run(stop, lambda report: typer.echo(str(report)))


def _draining(log: CommitLog, every: str | None, size: str | None) -> Draining | None:
    from rmq_spark.check.draining import Draining
    from rmq_spark.config import DRAIN_BYTES, DRAIN_EVERY_S

    every_s = DRAIN_EVERY_S if every is None else parse_duration(every, "drain_every")
    if every_s > 0:
        return Draining(log, every_s, DRAIN_BYTES if size is None else byte_count(size, "drain_bytes"))
    if size is not None:
        raise typer.BadParameter("--drain-every 0s and --drain-bytes contradict each other: with 0s none is due")
    return None


@app.command()
@plainly
def upgrade(path: LogPath, storage: Storage = None) -> None:
    """Give a commit log of an older version what this one needs. Stop all programs that use it first."""
    from rmq_spark.commitlog.log import CommitLog

    added = CommitLog.upgrade(path, storage_options(storage))
    typer.echo("\n".join(f"added: {what}" for what in added) or "it needs nothing")


@topic_app.command("create")
@plainly
def create_topic(
    path: LogPath,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    queues: Annotated[int | None, typer.Option(help="The log's own number when not given.")] = None,
    fifo: Annotated[bool, typer.Option("--fifo", help="Messages of one sharding key keep their order.")] = False,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Leave a topic that is there as it is.")] = False,
    retention: Annotated[
        str | None, typer.Option(help='How long messages are kept, "7d": for ever by default.')
    ] = None,
    storage: Storage = None,
) -> None:
    """Make a topic."""
    log = open_log(path, storage)
    log.create_topic(name, queues=queues, fifo=fifo, exist_ok=exist_ok, retention=retention)
    typer.echo(f"topic {name} has {count_of(log.topics()[name], 'queue')}")


@topic_app.command("set")
@plainly
def set_topic(
    path: LogPath,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    retention: Annotated[str, typer.Option(help=f'How long messages are kept, such as "7d", or "{FOREVER}".')],
    storage: Storage = None,
) -> None:
    """Change how long messages of a topic are kept."""
    open_log(path, storage).set_retention(name, None if retention == FOREVER else retention)
    typer.echo(f"messages of topic {name} are kept {'for ever' if retention == FOREVER else f'for {retention}'}")


@app.command()
@plainly
def topics(path: LogPath, as_json: AsJson = False, storage: Storage = None) -> None:
    """List topics, their queues, how many messages were committed to each, and how many of those have expired."""
    log = open_log(path, storage)
    found, retentions, fifo = log.topics(), log.retentions(), log.fifo_topics()
    committed, expired = _by_topic(log.tails()), _by_topic(log.firsts())
    rows = [
        {
            "topic": name,
            "queues": queues,
            "fifo": name in fifo,
            "retention_s": retentions[name],
            "committed": committed[name],
            "expired": expired[name],
        }
        for name, queues in found.items()
    ]
    show(rows, as_json, "no topics: make one with txmq topic create")


def _by_topic(offsets: Mapping[tuple[str, int], int]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for (topic, _), offset in offsets.items():
        sums[topic] += offset
    return sums


# ---------------------------------------------------------------- what is open
@app.command()
@plainly
def pending(path: LogPath, as_json: AsJson = False, storage: Storage = None) -> None:
    """List half batches with messages that have no verdict yet."""
    show(open_log(path, storage).pending().to_pylist(), as_json, "nothing is pending", spare=["lease_until"])


@app.command()
@plainly
def quarantined(path: LogPath, as_json: AsJson = False, storage: Storage = None) -> None:
    """List half batches that checks gave up; see resume and resolve."""
    show(open_log(path, storage).quarantined().to_pylist(), as_json, "nothing is quarantined", spare=["lease_until"])


@app.command()
@plainly
def conflicts(path: LogPath, as_json: AsJson = False, storage: Storage = None) -> None:
    """List half batches with two verdicts that contradict each other; see resolve."""
    log = open_log(path, storage)
    rows = []
    for half_id in log.conflicts():
        record = log.get(half_id)
        rows.append(
            {
                "half_id": half_id,
                "producer_group": record.header.producer_group,
                "messages": record.rows,
                "prepared_at": record.prepared_at,
                "history": [
                    f"{row.kind} by {row.decided_by} (attempt {row.attempt or 1}, {short_time(row.op_time)})"
                    for row in log.state_of(record).history
                    if row.op_time is not None
                ],
            }
        )
    show(rows, as_json, "there are no conflicts")


@app.command()
@plainly
def resolve(
    path: LogPath,
    half_id: HalfId,
    verdict: Annotated[str, typer.Argument(metavar="COMMIT|ROLLBACK")],
    reason: Annotated[str, typer.Option(help="Kept with the op marker, for those who ask later.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Needed where there is no terminal.")] = False,
    storage: Storage = None,
) -> None:
    """Decide on what is pending, quarantined or in conflict in a half batch. Shows it, and asks before it acts."""
    from rmq_spark.cli.resolving import Resolving

    wanted = verdict.upper().removesuffix("_MESSAGE")
    if wanted not in VERDICTS:
        raise typer.BadParameter(f"{verdict!r} is neither COMMIT nor ROLLBACK", param_hint="COMMIT|ROLLBACK")
    if not reason.strip():
        raise typer.BadParameter("it is empty: a reason is kept with the op marker", param_hint="--reason")
    resolving = Resolving(open_log(path, storage), half_id, wanted)
    if resolving.acts and not yes:
        if not sys.stdin.isatty():
            typer.echo(resolving.description(), err=True)
            typer.echo(f"there is no terminal to ask on: pass --yes to {wanted} it unasked", err=True)
            raise typer.Exit(2)
        typer.echo(resolving.description(), err=True)
        if not typer.confirm(resolving.question(), err=True):
            typer.echo("nothing was changed", err=True)
            raise typer.Exit(1)
    typer.echo(one_line(f"{half_id}: {resolving.run(reason)}"))


@app.command()
@plainly
def resume(
    path: LogPath,
    half_id: HalfId,
    reason: Annotated[str, typer.Option(help="Kept with the op marker.")] = "resumed",
    storage: Storage = None,
) -> None:
    """Take a half batch out of quarantine, so that checks go on."""
    count = open_log(path, storage).resume(half_id, reason)
    typer.echo(one_line(f"{half_id}: {count_of(count, 'message')} {'is' if count == 1 else 'are'} pending again"))


# ---------------------------------------------------------------- reading
@app.command()
@plainly
def read(
    path: LogPath,
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
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
    tags: Annotated[str | None, typer.Option(help='Only messages with one of these tags: "a||b".')] = None,
    selector: Annotated[
        str | None, typer.Option(help='Only messages for which this SQL92 condition is TRUE: "a > 5".')
    ] = None,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Show committed messages, in (queue, offset) order: the first ones, those --from an offset on, or the --last ones.
    --json prints a line for each; a body that is not UTF-8 is in body_base64."""
    from rmq_spark.cli.reading import Choice

    _refuse_contradictions(limit, last, start or [], queue, tags, selector)
    log = open_log(path, storage)
    choice = Choice(log, topic, queue, tags, selector)
    if last is not None:
        table = choice.newest(last)
    else:
        queues = range(log.require_topic(topic)) if queue is None else [queue]
        table = choice.first(_start(start or [], queues), limit or READ_LIMIT)
    if as_json:
        for row in table.to_pylist():
            typer.echo(json.dumps(_json_message(row)))
        return
    shown = table.select(["queue_id", "queue_offset", "tags", "keys", "body", "commit_timestamp"]).to_pylist()
    rows = [{**row, "body": short(row["body"])} for row in shown]
    show(rows, False, f"topic {topic} has no messages here", spare=["commit_timestamp"])
    if last is None and limit is None and len(rows) == READ_LIMIT:
        typer.secho(f"stopped at {READ_LIMIT}: --limit N shows more, --last N the newest", dim=True, err=True)


def _refuse_contradictions(
    limit: int | None, last: int | None, start: Sequence[str], queue: int | None, tags: str | None, selector: str | None
) -> None:
    for name, given in (("--from", start), ("--limit", limit)):
        if last is not None and given:
            raise typer.BadParameter(f"--last and {name} contradict each other: --last N counts from the end")
    if tags is not None and selector is not None:
        raise typer.BadParameter(
            "--tags and --selector contradict each other: give one of them (a selector can say TAGS = 'a')"
        )
    for text in start:
        if queue is not None and "=" in text and text.partition("=")[0] != str(queue):
            raise typer.BadParameter(f"--from {text} and --queue {queue} contradict each other: they name two queues")


def _start(given: Sequence[str], queues: Sequence[int]) -> dict[int, int]:
    start: dict[int, int] = {}
    for text in given:
        queue, _, offset = text.rpartition("=")
        if not offset.isdecimal() or not (queue == "" or queue.isdecimal()):
            raise typer.BadParameter(f"{text!r} is neither OFFSET nor QUEUE=OFFSET", param_hint="--from")
        wanted = [int(queue)] if queue else queues
        start.update(dict.fromkeys(wanted, int(offset)))
    return start


def _json_message(row: dict[str, Any]) -> dict[str, Any]:
    body: bytes = row.pop("body")
    try:
        content = {"body": body.decode()}
    except UnicodeDecodeError:
        content = {"body_base64": base64.b64encode(body).decode()}
    properties = None if row["properties"] is None else dict(row["properties"])
    return {**{k: plain(v) for k, v in row.items()}, "properties": properties, **content}


# ---------------------------------------------------------------- work
@app.command()
@plainly
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; it must not be there.")] = Path(
        "txmq.toml"
    ),
) -> None:
    """Write an example of the check job's configuration, with a comment for every setting."""
    from rmq_spark.check.example import example_configuration

    if not str(file).isprintable():
        raise OptionError(f"{str(file)!r} has characters that cannot be printed: name another file")
    try:
        with file.open("x", encoding="utf-8") as there:
            there.write(example_configuration().replace("conf/txmq.toml", str(file)))
    except FileExistsError:
        raise OptionError(f"{file} is there already, and is left as it is: name another file") from None
    except FileNotFoundError:
        raise OptionError(f"{file} cannot be written: the folder {file.parent} does not exist") from None
    except (OSError, ValueError) as problem:
        raise OptionError(f"{str(file)!r} cannot be written: {problem}") from None
    typer.echo(f"{file} is written: set path and [listeners] in it, then run txmq check --config {file} --once")


@app.command()
@plainly
def check(
    config: Annotated[Path, typer.Option("--config", "-c", envvar="TXMQ_CONFIG", help="The job's TOML file.")] = Path(
        "txmq.toml"
    ),
    once: Annotated[bool, typer.Option("--once", help="One round, for cron; exit code 1 on problems.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each round.")] = False,
) -> None:
    """Ask listeners what became of transactions that a crash left open, and settle them."""
    from rmq_spark.check.job import run_job

    raise typer.Exit(run_job(config, once, as_json))


@app.command()
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
    if as_json:
        typer.echo(json.dumps({"dry_run": dry_run, "files": files}))
        return
    for file in files:
        typer.echo(file)
    were = "would be" if dry_run else "was" if len(files) == 1 else "were"
    typer.echo(f"{count_of(len(files), 'file')} {were} removed")


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
