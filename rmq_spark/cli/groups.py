"""``txmq group``: lists consumer groups, their lag and their members, and moves their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.reads.offsets import (
    EARLIEST,
    EARLIEST_OFFSET,
    LATEST,
    LATEST_OFFSET,
    CountedPositions,
    parse_offsets,
    to_json,
)
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.command import App
from rmq_spark.cli.completion import topics_of_option
from rmq_spark.cli.output import AsJson, GroupName, LogPath, Storage, Wide, open_log, plainly, say, show, tell
from rmq_spark.cli.text import short_age
from rmq_spark.cli.times import time_of
from rmq_spark.cli.watch import Watch, listed, watched
from rmq_spark.errors import GroupNotFoundError, OffsetError, OptionError

if TYPE_CHECKING:
    from rmq_spark.consumers import ConsumerGroup

group_app = App(no_args_is_help=True, help="Consumer groups of a commit log.")

Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        help="May be repeated; the topics the group has read when not given.",
        autocompletion=topics_of_option,
    ),
]
FOLLOWS_ITS_CHECKPOINT = "a query follows its checkpoint: start it again with a new one"


def register(app: Any) -> None:
    """Add the commands to the app."""
    app.add_typer(group_app, name="group")


@group_app.command("list")
@plainly
def list_groups(
    path: LogPath, watch: Watch = None, wide: Wide = False, as_json: AsJson = False, storage: Storage = None
) -> None:
    """List consumer groups, and how far they are behind, in messages and in time."""
    from rmq_spark.report import Standing

    log = open_log(path, storage)
    nothing = (
        "no consumer group has read from this log: start a PushConsumer, or set the option consumerGroup of a stream"
    )

    def text() -> str:
        log.refresh()  # raises when the log is gone
        return listed(Standing(log.engine).groups, as_json, nothing, ("updated", "topics"), in_words)

    watched(watch, text)


def in_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for a terminal: durations as ages, which JSON has in seconds."""
    shown: dict[str, Any] = {}
    for name, value in row.items():
        if name == "lag_seconds":
            shown["behind"] = short_age(value)
        elif name == "heartbeat_seconds":
            shown["heartbeat"] = None if value is None else f"{short_age(value)} ago"
        elif name == "lease_seconds":
            shown["lease"] = None if value is None else short_age(value)
        else:
            shown[name] = value
    return shown


@group_app.command()
@plainly
def lag(
    path: LogPath,
    group: GroupName,
    watch: Watch = None,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Show how far a group is behind, queue by queue; and which member reads each queue."""
    from rmq_spark.consumers import ConsumerGroup

    consumer_group = ConsumerGroup(open_log(path, storage), group)
    spare = ("updated", "suspended_until", "generation", "lease", "end_offset", "next_offset", "pending", "waiting",
             "updated_by")  # fmt: skip
    nothing = "the group's topics are gone"
    watched(watch, lambda: listed(_lag_rows(consumer_group, as_json), as_json, nothing, spare, in_words))


def _lag_rows(group: ConsumerGroup, everything: bool) -> list[dict[str, Any]]:
    rows = group.lag().to_pylist()
    for row in rows:
        row["lag_seconds"] = round(row["lag_seconds"], 1)
        if row["heartbeat_seconds"] is not None:
            row["heartbeat_seconds"] = round(row["heartbeat_seconds"], 1)
    left_out = {"consumer_group"}
    if not any(row["owner"] for row in rows):  # Spark's queries read for it, or nothing does
        left_out |= {"owner", "generation", "heartbeat_seconds", "lease_seconds"}
    return rows if everything else [{k: v for k, v in row.items() if k not in left_out} for row in rows]


@group_app.command()
@plainly
def members(
    path: LogPath,
    group: GroupName,
    watch: Watch = None,
    wide: Wide = False,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """List the members of a group: which queues each one owns, under which generation, and the age of its heartbeat.

    A member is alive while its newest heartbeat is younger than its own lease. Others claim the queues of a dead one.
    """
    from rmq_spark.consumers import ConsumerGroup

    consumer_group = ConsumerGroup(open_log(path, storage), group)
    nothing = "the group has no members now: Spark's queries read for it, or nobody does"
    watched(watch, lambda: listed(member_rows(consumer_group), as_json, nothing, (), _member_in_words))


def _member_in_words(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = in_words(row) | {"queues": len(row["queues"])}
    return shown | {"heartbeat": shown["heartbeat"] or "none for long"}


def member_rows(group: ConsumerGroup) -> list[dict[str, Any]]:
    """Return a row for each member that has a heartbeat or owns a queue."""
    queues = group.lag().to_pylist()
    beats = group.members()
    rows = []
    for member in sorted({*beats, *(q["owner"] for q in queues if q["owner"])}):
        own_queues = [q for q in queues if q["owner"] == member]
        beat = beats.get(member)
        rows.append(
            {
                "member": member,
                "queues": [f"{q['topic']} {q['queue_id']}" for q in own_queues],
                "topics": ", ".join(sorted({q["topic"] for q in own_queues})) or None,
                "generation": max((q["generation"] for q in own_queues), default=None),
                "lag": sum(q["lag"] for q in own_queues),
                "heartbeat_seconds": None if beat is None else round(beat.age_s, 1),
                "lease_seconds": None if beat is None else beat.lease_s,
                "alive": beat is not None and beat.is_alive,
            }
        )
    return rows


# ---------------------------------------------------------------- moving
@group_app.command()
@plainly
def reset(
    path: LogPath,
    group: GroupName,
    to: Annotated[
        str,
        typer.Option(
            help="earliest, latest, a time such as 2025-03-01T08:00:00Z, a time ago such as 2h, or offsets: "
            '{"orders": {"0": 23}} moves queue 0 alone.'
        ),
    ],
    topic: Topics = None,
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Move a group's positions, or say with --topic where a new group begins. Offsets move the queues that they name,
    and the others stay where they are. A query follows its checkpoint, so start it again with a new one."""
    from rmq_spark.consumers import ConsumerGroup

    consumer_group = ConsumerGroup(open_log(path, storage), group)
    text = to.strip()
    if text in (EARLIEST, LATEST):
        positions = consumer_group.reset(text, topic)
    elif text.startswith("{"):
        try:
            offsets = parse_offsets(text, "--to", (EARLIEST, LATEST), (EARLIEST_OFFSET, LATEST_OFFSET))
        except OffsetError as problem:  # wrong for every log
            raise OptionError(problem.problem, argument=problem.argument) from None
        assert isinstance(offsets, CountedPositions)  # JSON
        positions = consumer_group.reset(to_json(offsets, log_id=offsets.log_id), topic, others_stay=True)
    else:
        try:
            when = time_of(text, consumer_group.engine.runtime.now(), "--to")
        except OptionError:
            if text[:1].isdigit():  # meant as a time
                raise
            raise OptionError(_not_a_place(to)) from None
        positions = consumer_group.reset(when, topic)
    _show_positions(consumer_group, positions, as_json)


def _not_a_place(to: str) -> str:
    meant = {"first": EARLIEST, "begin": EARLIEST, "beginning": EARLIEST, "start": EARLIEST, "oldest": EARLIEST,
            "last": LATEST, "end": LATEST, "newest": LATEST, "now": LATEST}.get(to.strip().lower())  # fmt: skip
    hint = "" if meant is None else f" (did you mean {meant}?)"
    return (
        f"--to {to!r} is no place{hint}: earliest, latest, a time such as 2025-03-01T08:00:00Z, a time ago such as 2h, "
        'or offsets such as {"orders": {"0": 23}} are expected'
    )


def _show_positions(group: ConsumerGroup, positions: Mapping[Queue, int], as_json: bool) -> None:
    from rmq_spark._core.log.group_table import MEMBERS, kind_of

    rows = [{"topic": t, "queue_id": q, "next_offset": n} for (t, q), n in sorted(positions.items())]
    show(rows, as_json, "nothing")
    if kind_of(group.engine.groups.positions(group.name).values()) != MEMBERS:
        tell(FOLLOWS_ITS_CHECKPOINT, dim=True, err=True)


@group_app.command()
@plainly
def skip(
    path: LogPath, group: GroupName, topic: Topics = None, as_json: AsJson = False, storage: Storage = None
) -> None:
    """Skip all that a group has not read yet: it goes on with what is committed from now on."""
    from rmq_spark.consumers import ConsumerGroup

    consumer_group = ConsumerGroup(open_log(path, storage), group)
    old_positions = consumer_group.positions()
    positions = consumer_group.reset(LATEST, topic)
    skipped = sum(max(0, n - old_positions.get(queue, 0)) for queue, n in positions.items())
    if not as_json:
        tell(f"{count_of(skipped, 'message')} {'is' if skipped == 1 else 'are'} skipped", err=True)
    _show_positions(consumer_group, positions, as_json)


@group_app.command()
@plainly
def clone(
    path: LogPath,
    group: GroupName,
    other: Annotated[str, typer.Argument(metavar="NEW_GROUP")],
    as_json: AsJson = False,
    storage: Storage = None,
) -> None:
    """Give a new group the positions of another group."""
    from rmq_spark.consumers import ConsumerGroup

    count = len(ConsumerGroup(open_log(path, storage), group).clone(other).positions())
    text = f"{other} stands where {group} stands, in {count_of(count, 'queue')}"
    say(as_json, {"consumer_group": other, "queues": count}, text)


@group_app.command("hand-over")
@plainly
def hand_over(path: LogPath, group: GroupName, as_json: AsJson = False, storage: Storage = None) -> None:
    """Let others read for a group: Spark after PushConsumer, or the other way round. Stop the old ones first."""
    from rmq_spark.consumers import ConsumerGroup

    consumer_group = ConsumerGroup(open_log(path, storage), group)
    if not consumer_group.hand_over():
        raise _not_found(consumer_group)
    say(as_json, {"consumer_group": group}, f"{group} is free: the next reader takes it over")


@group_app.command()
@plainly
def delete(path: LogPath, group: GroupName, as_json: AsJson = False, storage: Storage = None) -> None:
    """Forget a group's progress. Members that still read for it notice, and begin anew."""
    from rmq_spark.consumers import ConsumerGroup

    consumer_group = ConsumerGroup(open_log(path, storage), group)
    if not consumer_group.delete():
        raise _not_found(consumer_group)
    say(as_json, {"consumer_group": group}, f"{group} is forgotten")


def _not_found(group: ConsumerGroup) -> GroupNotFoundError:
    from rmq_spark._core.consumers.consumer_group import groups
    from rmq_spark._core.vocabulary.options import nearest

    names = groups(group.engine)
    hint = nearest(group.name, names) if names else "no group has read from this commit log yet"
    return GroupNotFoundError(f"there is no consumer group {group.name!r} ({hint})")
