"""Upkeep: small op files merged into larger ones, and files removed that no table names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark._core.messages.table import history_s, write_messages
from rmq_spark._core.storage.merge import compact
from rmq_spark._core.storage.table import Change, Table, foreign_change
from rmq_spark._core.vocabulary.redaction import redacted

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

REPLACED_FILES_S = 3600.0
"""Files that left a table are deleted after so many seconds, and up to an hour more: a reader's plan may name them.
Those of ``messages`` that others replaced stay as long as its Delta log names them."""
MESSAGES_FILES_MAX = 8
"""So many small files of a topic are merged into one."""
MESSAGES_FILE_BYTES = 16 * 1024 * 1024
"""A file of ``messages`` of this size is left alone."""
GROWN = 2
"""A file that is so many times as large as all later ones together is not merged with them. Without this rule, a topic
of 28 KB each 30 s wrote each byte 37 times, and with it six times."""
MESSAGES_MERGED_BYTES_MAX = 24 * 1024 * 1024
MERGED_ROWS_MAX = 400_000
"""So many messages are merged at once: they are in memory meanwhile."""


def compact_messages(table: Table, retentions: Mapping[str, float] | None = None) -> int:
    """Merge small files of ``messages`` into larger ones, a topic each; returns how many were merged.

    Each message keeps its offset and all the rest, so readers see the same before and after.

    Parameters
    ----------
    table : Table
    retentions : mapping of str to float, optional
        By topic, the seconds after which its messages expire. The files that were merged stay no longer.
    """
    expires_s = retentions or {}

    def merge(small: list[str]) -> Change:
        rows = table.read(small).sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")])
        earlier_s = removed_earlier_s(table, expires_s.get(rows["topic"][0].as_py()))
        return Change(add=[write_messages(table, rows)], remove=small, data_change=False, removed_earlier_s=earlier_s)

    merged = 0
    while done := compact(table, _messages_to_merge, merge):
        merged += done
    return merged


def _messages_to_merge(table: Table) -> list[str]:
    """Small files of one topic, the oldest first: no more of them than fit into memory, and none while they are few."""
    table.refresh()
    actions = table.actions()
    one_topic = pc.fill_null(pc.equal(actions["min.topic"], actions["max.topic"]), False)
    small = pc.and_(
        pc.less(actions["size_bytes"], MESSAGES_FILE_BYTES), pc.less(actions["num_records"], MERGED_ROWS_MAX // 2)
    )
    files = actions.filter(pc.and_(one_topic, small)).sort_by([("min.op_version", "ascending"), ("path", "ascending")])
    for topic in pc.unique(files["min.topic"]).to_pylist():
        of_topic = files.filter(pc.equal(files["min.topic"], topic))
        of_topic = of_topic.slice(_grown(of_topic["size_bytes"].to_pylist()))
        fit = pc.and_(
            pc.less_equal(pc.cumulative_sum(of_topic["size_bytes"]), MESSAGES_MERGED_BYTES_MAX),
            pc.less_equal(pc.cumulative_sum(of_topic["num_records"]), MERGED_ROWS_MAX),
        )
        together = of_topic["path"].filter(fit).to_pylist()
        if of_topic.num_rows >= MESSAGES_FILES_MAX and len(together) > 1:
            return [str(path) for path in together]
    return []


def _grown(sizes: Sequence[int]) -> int:
    """How many of the oldest files are left alone, as each is more than twice as large as all after it. So a message is
    rewritten each time into a file that is half as large again at least, and no more files than that are left over."""
    left = sum(sizes)
    for count, size in enumerate(sizes):
        left -= size
        if size <= GROWN * left:
            return count
    return len(sizes)


def kept_s(table: Table) -> float:
    """Seconds for which files that left a table stay."""
    return max(REPLACED_FILES_S, history_s(table))


def removed_earlier_s(table: Table, useful_s: float | None) -> float:
    """How much earlier than now files of a table must have left it, so that they stay for so many seconds only: after
    those nobody wants what is in them. None: for as long as others do."""
    return 0.0 if useful_s is None else max(0.0, kept_s(table) - max(REPLACED_FILES_S, useful_s))


def delete_replaced(tables: Sequence[Table], age_s: float, dry_run: bool) -> list[str]:
    """Delete files that left a table more than ``age_s`` seconds ago; returns ``<table>/<file>``."""
    deleted: list[str] = []
    for table in tables:
        table.clock.require_near()
        table.refresh()
        gone = table.removed_since() - table.removed_since(age_s) - set(table.actions()["path"].to_pylist())
        if not gone or _is_left_alone(table):
            continue
        for info in table.fs.get_file_info(pafs.FileSelector(table.folder)):
            name = info.path.rsplit("/", 1)[-1]
            if name in gone:
                deleted.append(f"{table.name}/{name}")
                if not dry_run:
                    _delete(table, name)
    return deleted


def _is_left_alone(table: Table) -> bool:
    """True for a table that another writer changed: undoing that may need any of its files."""
    said = foreign_change(table)
    if said:
        logger.warning("no file of table %s is deleted: %s", table.name, redacted(said))
    return said is not None


def _delete(table: Table, name: str) -> None:
    with suppress(FileNotFoundError):  # another process does the same
        table.fs.delete_file(f"{table.folder}/{name}")


def vacuum(tables: Sequence[Table], age_s: float, dry_run: bool) -> list[str]:
    """Remove Parquet files older than ``age_s`` that no live state names; returns ``<table>/<file>``."""
    removed: list[str] = []
    for table in tables:
        table.clock.require_near()  # by a clock that is ahead, everything would be old
        table.refresh()
        if _is_left_alone(table):
            continue
        # A file that was rewritten lately may be old itself, and a reader's plan may still name it.
        kept = set(table.actions()["path"].to_pylist()) | table.removed_since(max(age_s, history_s(table)))
        for info in table.fs.get_file_info(pafs.FileSelector(table.folder)):
            old = info.mtime is not None and table.machine.time() - info.mtime.timestamp() > age_s
            if info.type != pafs.FileType.File or not info.base_name.endswith(".parquet"):
                continue
            if old and info.base_name not in kept:
                removed.append(f"{table.name}/{info.base_name}")
                if not dry_run:
                    _delete(table, info.base_name)
    return sorted(removed)
