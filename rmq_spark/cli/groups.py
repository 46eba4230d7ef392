"""``txmq group``: lists consumer groups and their lag, and moves their positions."""

from __future__ import annotations

from typing import Annotated

import typer

from rmq_spark.cli.output import AsJson, LogPath, Storage, count_of, open_log, plainly, show
from rmq_spark.source.offsets import EARLIEST, LATEST, CountedPositions, parse_offsets, parse_timestamp, to_json

group_app = typer.Typer(no_args_is_help=True, help="Consumer groups of a commit log.")

Group = Annotated[str, typer.Argument(metavar="GROUP")]


@group_app.command("list")
@plainly
def list_groups(path: LogPath, as_json: AsJson = False, storage: Storage = None) -> None:
    """List consumer groups, and how far they are behind."""
    from rmq_spark.consumer.groups import ConsumerGroup, groups

    log = open_log(path, storage)
    rows = []
    for name in groups(log):
        group = ConsumerGroup(log, name)
        lag = group.lag()
        rows.append(
            {
                "consumer_group": name,
                "topics": ", ".join(sorted(set(lag["topic"].to_pylist()))),
                "lag": sum(lag["lag"].to_pylist()),
                "lag_seconds": round(max(lag["lag_seconds"].to_pylist(), default=0.0), 1),
                "members": len(group.members()),
                "updated": max((t for t in lag["updated"].to_pylist() if t is not None), default=None),
            }
        )
    show(rows, as_json, "no consumer group has read from this log: set the option consumerGroup of a stream")


@group_app.command()
@plainly
def lag(path: LogPath, group: Group, as_json: AsJson = False, storage: Storage = None) -> None:
    """Show how far a group is behind, queue by queue; and which member reads each queue."""
    from rmq_spark.consumer.groups import ConsumerGroup

    rows = ConsumerGroup(open_log(path, storage), group).lag().to_pylist()
    for row in rows:
        row["lag_seconds"] = round(row["lag_seconds"], 1)
        if row["heartbeat_seconds"] is not None:
            row["heartbeat_seconds"] = round(row["heartbeat_seconds"], 1)
    left_out = {"consumer_group"}
    if not any(row["owner"] for row in rows):  # Spark reads for it, or nobody
        left_out |= {"owner", "generation", "heartbeat_seconds"}
    shown = rows if as_json else [{k: v for k, v in row.items() if k not in left_out} for row in rows]
    show(shown, as_json, "the group's topics are gone", spare=["updated_by", "updated", "suspended_until"])


@group_app.command()
@plainly
def reset(
    path: LogPath,
    group: Group,
    to: Annotated[
        str,
        typer.Option(
            help='earliest, latest, a time such as 2025-03-01T08:00:00Z, or offsets: {"orders": {"0": 23}} moves '
            "queue 0 alone."
        ),
    ],
    topic: Annotated[
        list[str] | None, typer.Option(help="May be repeated; the topics the group has read when not given.")
    ] = None,
    storage: Storage = None,
) -> None:
    """Move a group's positions. Offsets move the queues that they name, and the others stay where they are.
    A query follows its checkpoint, so start it again with a new one."""
    from rmq_spark.commitlog.group_store import MEMBERS, kind_of
    from rmq_spark.consumer.groups import ConsumerGroup

    found = ConsumerGroup(open_log(path, storage), group)
    text = to.strip()
    if text in (EARLIEST, LATEST):
        positions = found.reset(text, topic)
    elif text.startswith("{"):
        given = parse_offsets(text, "--to", (EARLIEST, LATEST), ())
        assert isinstance(given, CountedPositions)  # JSON
        positions = found.reset(to_json(given, log_id=given.log_id), topic, others_stay=True)
    else:
        positions = found.reset(parse_timestamp(text, "--to"), topic)
    show([{"topic": t, "queue_id": q, "next_offset": n} for (t, q), n in sorted(positions.items())], False, "nothing")
    if kind_of(found.log.groups.places(group).values()) != MEMBERS:
        typer.secho("a query follows its checkpoint: start it again with a new one", dim=True, err=True)


@group_app.command()
@plainly
def clone(
    path: LogPath, group: Group, other: Annotated[str, typer.Argument(metavar="NEW_GROUP")], storage: Storage = None
) -> None:
    """Give a new group the positions of another group."""
    from rmq_spark.consumer.groups import ConsumerGroup

    found = ConsumerGroup(open_log(path, storage), group).clone(other)
    typer.echo(f"{other} stands where {group} stands, in {count_of(len(found.positions()), 'queue')}")


@group_app.command("hand-over")
@plainly
def hand_over(path: LogPath, group: Group, storage: Storage = None) -> None:
    """Let others read for a group: Spark after PushConsumer, or the other way round. Stop the old ones first."""
    from rmq_spark.consumer.groups import ConsumerGroup

    known = ConsumerGroup(open_log(path, storage), group).hand_over()
    typer.echo(f"{group} is free: who reads for it next, has it" if known else f"{group} was not known")


@group_app.command()
@plainly
def delete(path: LogPath, group: Group, storage: Storage = None) -> None:
    """Forget a group's progress."""
    from rmq_spark.consumer.groups import ConsumerGroup

    known = ConsumerGroup(open_log(path, storage), group).delete()
    typer.echo(f"{group} is forgotten" if known else f"{group} was not known")
