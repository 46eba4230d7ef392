"""Merges small files of ``messages`` into larger ones, and deletes files that no table names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

import pyarrow.compute as pc
import pyarrow.fs as pafs

from rmq_spark._core.messages.messages_table import history_s
from rmq_spark._core.storage.foreign_commits import foreign_change
from rmq_spark._core.storage.merge import compact
from rmq_spark._core.storage.table import Change, Table, live_paths
from rmq_spark._core.vocabulary.redaction import redacted

logger = logging.getLogger(__name__)

REPLACED_FILES_S = 3600.0
"""Seconds after which files that left a table are deleted, plus up to an hour: a reader's plan may name them. Replaced
files of ``messages`` stay as long as its Delta log names them."""
MESSAGES_FILES_MAX = 8
"""A topic's small files are merged when there are this many."""
MESSAGES_FILE_BYTES = 16 * 1024 * 1024
"""A file of ``messages`` of this size is left alone."""
GROWN = 2
"""A file this many times as large as all later ones together is not merged with them. Without this rule, each merge
would rewrite a topic's large file for a few small ones."""
MESSAGES_MERGED_BYTES_MAX = 24 * 1024 * 1024
MERGED_ROWS_MAX = 400_000
"""Messages that are merged at once: they are in memory meanwhile."""


def compact_messages(table: Table, retentions: Mapping[str, float] | None = None) -> int:
    """Merge small files of ``messages`` into larger ones, each of one topic; return how many were merged. Each message
    keeps its offset and everything else, so readers see the same before and after. Messages of a topic in
    ``retentions`` expire after these seconds, and the files that were merged stay no longer."""
    expires_s = retentions or {}

    def merge(paths: list[str]) -> Change:
        rows = table.read(paths).sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")])
        earlier_s = removed_earlier_s(table, expires_s.get(rows["topic"][0].as_py()))
        return Change(add=[table.write(rows)], remove=paths, data_change=False, removed_earlier_s=earlier_s)

    merged = 0
    while done := compact(table, _messages_to_merge, merge):
        merged += done
    return merged


def _messages_to_merge(table: Table) -> list[str]:
    """Small files of one topic, the oldest first, as many as fit into memory; none while they are few."""
    table.refresh()
    actions = table.actions()
    one_topic = pc.fill_null(pc.equal(actions["min.topic"], actions["max.topic"]), False)
    is_small = pc.and_(
        pc.less(actions["size_bytes"], MESSAGES_FILE_BYTES), pc.less(actions["num_records"], MERGED_ROWS_MAX // 2)
    )
    files = actions.filter(pc.and_(one_topic, is_small)).sort_by(
        [("min.op_version", "ascending"), ("path", "ascending")]
    )
    for topic in pc.unique(files["min.topic"]).to_pylist():
        of_topic = files.filter(pc.equal(files["min.topic"], topic))
        of_topic = of_topic.slice(_grown_count(of_topic["size_bytes"].to_pylist()))
        fits = pc.and_(
            pc.less_equal(pc.cumulative_sum(of_topic["size_bytes"]), MESSAGES_MERGED_BYTES_MAX),
            pc.less_equal(pc.cumulative_sum(of_topic["num_records"]), MERGED_ROWS_MAX),
        )
        paths = of_topic["path"].filter(fits).to_pylist()
        if of_topic.num_rows >= MESSAGES_FILES_MAX and len(paths) > 1:
            return [str(path) for path in paths]
    return []


def _grown_count(sizes: Sequence[int]) -> int:
    """How many of the oldest files are left alone, because each is more than twice as large as all after it. So each
    rewrite of a message makes a file larger by half at least, and only such files are left over."""
    rest = sum(sizes)
    for count, size in enumerate(sizes):
        rest -= size
        if size <= GROWN * rest:
            return count
    return len(sizes)


def removed_files_s(table: Table) -> float:
    """Seconds for which files that left a table are kept."""
    return max(REPLACED_FILES_S, history_s(table))


def removed_earlier_s(table: Table, useful_s: float | None) -> float:
    """Seconds by which to date back a removal, so that its files are deleted ``useful_s`` from now, when nobody wants
    their content any more. None: 0, so they stay as long as others."""
    return 0.0 if useful_s is None else max(0.0, removed_files_s(table) - max(REPLACED_FILES_S, useful_s))


def delete_replaced(table: Table, age_s: float, dry_run: bool) -> list[str]:
    """Delete files that left a table more than ``age_s`` seconds ago; return ``<table>/<file>`` of each."""
    table.clock.require_near()
    table.refresh()
    gone = table.removed_since() - table.removed_since(age_s) - set(live_paths(table))
    if not gone or _is_left_alone(table):
        return []
    infos = table.fs.get_file_info(pafs.FileSelector(table.folder))
    names = [name for info in infos if (name := info.path.rsplit("/", 1)[-1]) in gone]
    for name in names if not dry_run else ():
        _delete(table, name)
    return [f"{table.name}/{name}" for name in names]


def _is_left_alone(table: Table) -> bool:
    """True for a table that another writer changed: undoing the change may need any of its files."""
    change = foreign_change(table)
    if change:
        logger.warning("no file of table %s is deleted: %s", table.name, redacted(change))
    return change is not None


def _delete(table: Table, name: str) -> None:
    with suppress(FileNotFoundError):  # another process does the same
        table.fs.delete_file(f"{table.folder}/{name}")


def vacuum(tables: Sequence[Table], age_s: float, dry_run: bool) -> list[str]:
    """Remove Parquet files older than ``age_s`` that no live state names; return ``<table>/<file>`` of each."""
    removed: list[str] = []
    for table in tables:
        table.clock.require_near()  # for a clock that is ahead, everything would be old
        table.refresh()
        if _is_left_alone(table):
            continue
        # A file that was replaced lately may itself be old, and a reader's plan may still name it.
        kept = set(live_paths(table)) | table.removed_since(max(age_s, history_s(table)))
        for info in table.fs.get_file_info(pafs.FileSelector(table.folder)):
            is_old = info.mtime is not None and table.runtime.time() - info.mtime.timestamp() > age_s
            if info.type != pafs.FileType.File or not info.base_name.endswith(".parquet"):
                continue
            if is_old and info.base_name not in kept:
                removed.append(f"{table.name}/{info.base_name}")
                if not dry_run:
                    _delete(table, info.base_name)
    return sorted(removed)
