"""Runs all the upkeep of a commit log, in the order in which one step makes the next one possible."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmq_spark._core.log import op_merge
from rmq_spark._core.log.damage import retry_on_newest_state
from rmq_spark._core.messages.drain import Drainer
from rmq_spark._core.messages.messages_table import drained_up_to
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.foreign_commits import foreign_change
from rmq_spark._core.upkeep import table_files
from rmq_spark._core.upkeep.expire import Expirer
from rmq_spark._core.upkeep.leave import Graces, Leaver
from rmq_spark._core.upkeep.prune import Pruner
from rmq_spark._core.upkeep.strip import Stripper
from rmq_spark._core.vocabulary.options import ORPHAN_AGE_S
from rmq_spark.errors import CorruptLogError, LostFileError, UnreadableFileError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine


@dataclass(frozen=True)
class MaintenanceReport:
    """The result of upkeep, or of a dry run.

    Attributes
    ----------
    dry_run : bool
        True when nothing was changed. Then no step counts what only an earlier one would make possible.
    drained_up_to : int
        The version of ``op`` up to which the table ``messages`` has all messages.
    messages_drained : int
        Committed messages that were copied into the table ``messages``.
    archived : int
        Half batches that were settled and drained, and need not be kept whole any more.
    files_left : int
        Their files, which left the table ``half``.
    files_stripped : int
        Files of ``half`` that stay for others, and whose drained messages lost their payload.
    rows_pruned : int
        Op rows of half batches that left earlier.
    files_expired : int
        Files of ``messages`` whose messages were all older than their topic's retention.
    files_merged : int
        Small files of ``op`` and ``messages`` that were merged into larger ones.
    files_deleted : tuple of str
        ``<table>/<file>`` of files that left a table some time ago, and of files that no table ever named.
    foreign : str or None
        In a dry run: what another writer did to the table ``messages``. A run that changes something raises it.
    """

    dry_run: bool
    drained_up_to: int
    messages_drained: int
    archived: int
    files_left: int
    files_stripped: int
    rows_pruned: int
    files_expired: int
    files_merged: int
    files_deleted: tuple[str, ...]
    foreign: str | None = None

    def __str__(self) -> str:
        would = "would be " if self.dry_run else ""
        done = (
            (self.messages_drained, "message", "messages", "drained"),
            (self.archived, "half batch", "half batches", "archived"),
            (self.files_left, "half file", "half files", "taken out of the table half"),
            (self.files_stripped, "half file", "half files", "stripped of what is drained"),
            (self.rows_pruned, "op row", "op rows", "pruned"),
            (self.files_expired, "file of messages", "files of messages", "expired"),
            (self.files_merged, "small file", "small files", "merged"),
            (len(self.files_deleted), "file", "files", "deleted"),
        )
        lines = [
            f"{count} {singular if count == 1 else plural} {would}{action}"
            for count, singular, plural, action in done
            if count
        ]
        drained = "nothing is drained yet"
        if self.drained_up_to >= 0:
            drained = f"drained up to version {self.drained_up_to} of op"
        careful = [] if self.foreign is None else [f"careful: {self.foreign}"]
        return "\n".join([drained, *(lines or ["nothing else to do"]), *careful])


def maintain(
    engine: Engine,
    graces: Graces,
    dry_run: bool = False,
    orphans: bool = True,
    turn: AbstractContextManager[object] | None = None,
) -> MaintenanceReport:
    """Bring a commit log into order, by another engine on the same log. See :meth:`CommitLog.maintain`. ``orphans``:
    also look for files that no table ever named, by listing the tables' folders. ``turn`` is entered while messages are
    in memory.

    LostFileError, UnreadableFileError: a file is lost or damaged. All work that does not need it was done.
    """
    report, problem = _round(engine, graces, dry_run, orphans, nullcontext() if turn is None else turn)
    if problem is not None:
        raise problem
    return report


@retry_on_newest_state
def _round(
    engine: Engine, graces: Graces, dry_run: bool, orphans: bool, turn: AbstractContextManager[object]
) -> tuple[MaintenanceReport, CorruptLogError | None]:
    """Do what is due; return also the problem of the first file that kept something from being done."""
    engine = engine.new_handle()
    tables = engine.tables()
    reach("upkeep begins")
    doubt_s = engine.clock_doubt_s(note=not dry_run)  # before a commit notes a time of this clock
    graces = graces.and_later(doubt_s)
    foreign = None  # a drain raises it
    problems: list[CorruptLogError] = []
    if dry_run:
        engine.messages_table.refresh()
        foreign = foreign_change(engine.messages_table) or engine.drained.odd_rows()
    engine.refresh()
    before = sum(engine.drained.border().values())
    if dry_run:
        drained, after = drained_up_to(engine.messages_table), sum(engine.tails().values())
    else:
        try:
            with turn:
                drained = _drain(engine)
        except (LostFileError, UnreadableFileError) as problem:
            problems.append(problem)
            engine.messages_table.refresh()
            drained = drained_up_to(engine.messages_table)
        after = sum(engine.drained.border().values())
        engine.ledger.mark()
    leaver = Leaver(engine, graces)
    archived = leaver.archive(dry_run)
    left = leaver.remove(dry_run)
    stripped = Stripper(engine, graces).run(dry_run)
    pruned = Pruner(engine, graces).run(dry_run)
    expired = Expirer(engine, doubt_s).run(dry_run)
    merged = 0
    if not dry_run:
        merged = op_merge.compact_op(engine.op_table)
        with turn:
            retentions = {
                name: t.retention_s for name, t in engine.topic_store.all().items() if t.retention_s is not None
            }
            try:
                merged += _merge(engine, retentions)
            except (LostFileError, UnreadableFileError) as problem:
                problems.append(problem)
    with engine.lock:
        deleted = [
            path
            for table in tables
            for path in table_files.delete_replaced(table, table_files.removed_files_s(table) + doubt_s, dry_run)
        ]
        deleted += table_files.vacuum(tables, ORPHAN_AGE_S + doubt_s, dry_run) if orphans else []
    report = MaintenanceReport(
        dry_run,
        drained,
        max(0, after - before),
        archived,
        len(left),
        len(stripped),
        pruned,
        len(expired),
        merged,
        tuple(sorted({*deleted})),
        foreign,
    )
    return report, next(iter(problems), None)


@retry_on_newest_state
def _drain(engine: Engine) -> int:
    return Drainer(engine).run()


@retry_on_newest_state
def _merge(engine: Engine, retentions: Mapping[str, float]) -> int:
    return table_files.compact_messages(engine.messages_table, retentions)
