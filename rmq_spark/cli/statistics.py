"""``txmq stats``: how much there is, and how much came lately."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.groups import in_words
from rmq_spark.cli.output import AsJson, LogPath, Storage, Wide, open_log, plainly, rendered, wrapped
from rmq_spark.cli.text import as_json as json_of
from rmq_spark.cli.text import short_age, size
from rmq_spark.cli.topics import no_topics, waiting_messages

if TYPE_CHECKING:
    from rmq_spark.report import Standing

WINDOWS = {"last_minute": 60.0, "last_hour": 3600.0, "last_day": 86_400.0}
"""Windows in which messages are counted, in seconds before now."""


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(stats)


@plainly
def stats(path: LogPath, wide: Wide = False, as_json: AsJson = False, storage: Storage = None) -> None:
    """Count: messages of each topic in the last minute, hour and day; what waits; lag of groups; files and bytes.

    --json prints an object for each topic, group and table, and one for transactions; kind says which it is.
    """
    from rmq_spark.report import Standing

    log = open_log(path, storage)
    rows = list(stat_rows(Standing(log.engine), waiting_messages(log)))
    if as_json:
        for row in rows:
            typer.echo(json_of(row))
        return
    typer.echo("\n".join(_tables(rows)), nl=False)


def stat_rows(now: Standing, waiting: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the objects that ``--json`` prints. ``waiting``: committed messages of each topic that are not visible."""
    from rmq_spark._core.inspect.history import placed_within

    recent_counts = placed_within(now.engine, now.at, WINDOWS)
    for name, topic in sorted(now.topics.items()):
        counts = recent_counts.get(name, dict.fromkeys(WINDOWS, 0))
        yield {"kind": "topic", "topic": name, "queues": topic["queues"], **counts, "committed": topic["committed"],
               "kept": topic["committed"] - topic["expired"], "waiting": waiting.get(name, 0)}  # fmt: skip
    for group in now.groups:
        letters = now.dead_letters.get(group["consumer_group"])
        yield {"kind": "group", **group, "dead_letters": 0 if letters is None else letters.kept}
    for table, figures in now.tables.items():
        yield {"kind": "table", "table": table, "files": figures.files, "bytes": figures.bytes}
    yield {"kind": "transactions", **unsettled(now)}


def unsettled(now: Standing) -> dict[str, Any]:
    """Return the numbers of what waits."""
    return {
        "pending": now.pending_batches,
        "oldest_pending_seconds": now.oldest_pending_s,
        "quarantined": len(now.quarantined),
        "conflicts": len(now.conflicts),
        "undrained_messages": now.undrained.messages,
        "undrained_bytes": now.undrained.bytes,
    }


def _tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    def rows_of(kind: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "kind"} for row in rows if row["kind"] == kind]

    topics = rows_of("topic")
    if not any(topic["waiting"] for topic in topics):
        topics = [{k: v for k, v in topic.items() if k != "waiting"} for topic in topics]
    yield rendered(topics, no_topics(), ["kept", "queues"])
    if groups := rows_of("group"):
        yield rendered([in_words(group) for group in groups], "", ["updated", "topics"])
    yield rendered([{**row, "bytes": size(row["bytes"])} for row in rows_of("table")], "")
    (totals,) = rows_of("transactions")
    oldest = f", the oldest for {short_age(totals['oldest_pending_seconds'])}" if totals["pending"] else ""
    yield wrapped(
        f"half batches: {totals['pending']:,} pending{oldest}; {totals['quarantined']:,} quarantined; "
        f"{totals['conflicts']:,} in conflict\n"
        f"not drained yet: {count_of(totals['undrained_messages'], 'message')}, {size(totals['undrained_bytes'])}\n"
    )
