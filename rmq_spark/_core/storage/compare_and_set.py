"""Compare-and-set: the loop by which every commit goes to a table, at the next version or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rmq_spark._core.runtime import observer
from rmq_spark._core.storage.data_file import DataFile
from rmq_spark._core.storage.foreign_commits import OWN, READ_ALL_THE_SAME, require_own
from rmq_spark._core.storage.store_errors import plainly, require_resources
from rmq_spark._core.storage.table import Change, Table, live_paths
from rmq_spark._core.storage.writer_lock import NO_LOCK, WriterLock
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark.errors import (
    CommitError,
    CorruptLogError,
    LostCommitError,
    LostFileError,
    LostStagedFileError,
    TxmqError,
)

COMMIT_TRIES_MAX = 200
"""Lost races before a commit gives up. After each the writer waits for a random time, whose upper limit doubles up to
BACKOFF_S_MAX."""
UNEXPECTED_ERRORS_MAX = 3
STAGED_UNSEEN_S = 60.0
"""Seconds for which a file counts as present after it was written or looked at. Only a VACUUM with a shorter retention
removes it before the commit, and the look after the commit finds that."""
BACKOFF_S_MIN = 0.002
BACKOFF_S_MAX = 0.25


def compare_and_set(
    table: Table,
    propose: Callable[[int], Change | None],
    landed: Callable[[Change], bool],
    try_commit: Callable[[Change], bool],
    turns: WriterLock = NO_LOCK,
) -> Change | None:
    """Commit a change at the next version, and return it; None when there is nothing to commit.

    Every commit goes through this loop. Real tables and their twins share it. It looks for its rows after every try,
    because a store may report a failure after a success::

        ┌─▶ refresh ─▶ are the rows of the last try there? ── yes ─▶ return that change
        │                 │ no, or first try
        │              propose(version + 1) ── None ─▶ return None
        │                 │ a change
        │              try_commit ── acknowledged ─▶ refresh, find the rows, return the change
        └── wait ◀────────┘ refused or failed

    ``propose`` takes the next version, after a refresh, and returns what to commit, or None when there is nothing
    (left) to do. When it raises, the loop ends and writes nothing more. ``landed`` takes a change, after a refresh,
    and returns True when the change's rows are in the table. ``try_commit`` returns True when the commit was
    acknowledged, and False when another writer took the version or nobody knows. An exception leaves open whether
    the commit was made. ``turns`` lets this machine's processes that write to the table take turns.

    ====================  ==========================================================================================
    ClockError            this machine's clock is too far from the store's; nothing was written
    ForeignChangeError    another writer changed the table
    CommitError           the tries are used up
    LostCommitError       a commit was acknowledged but the table does not hold its rows: it went below the newest
                          version
    LostStagedFileError   a file of the change is gone before the commit
    LostFileError         such a file is gone after the commit
    ====================  ==========================================================================================
    """
    table.clock.require_near()
    failures = 0
    change: Change | None = None
    staged = _Staged(table)

    def has_landed(change: Change) -> bool:
        staged.require_not_lost(change)
        return landed(change)

    for tries in range(COMMIT_TRIES_MAX):
        with turns.taken():
            table.refresh()
            # Our last try may have landed although it was reported lost.
            if change is not None and has_landed(change):
                return change
            if table.name in READ_ALL_THE_SAME:
                require_own(table)
            change, version = _proposal(table, propose)
            if change is None:
                return None
            staged.require(change)
            own = replace(change, version=version, transactions={**change.transactions, OWN: version})
            try:
                acknowledged = try_commit(own)
            except TxmqError:
                raise
            except Exception as problem:  # it may have landed: look before trying again
                failures += 1
                if failures >= UNEXPECTED_ERRORS_MAX:
                    table.refresh()
                    if has_landed(change):
                        return change
                    require_resources(problem, f"table {table.name}")
                    raise CommitError(
                        f"a commit to table {table.name} failed {failures} times, the last time with "
                        f"{type(problem).__name__}: {plainly(str(problem), None)}"
                    ) from cause_of(problem)
                acknowledged = False
            if acknowledged:
                table.refresh()
                if not has_landed(change):
                    raise LostCommitError(
                        f"a commit to table {table.name} was acknowledged, but version {table.version} does not hold "
                        "its rows: this process slept past the clean-up of the table's log. Restart it"
                    )
                if observer.observers():
                    observer.tell(lambda o: o.committed(table.name))
                return change
        if observer.observers():
            observer.tell(lambda o: o.lost_race(table.name))
        turns.lost()
        table.runtime.sleep(table.runtime.random() * min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** min(tries, 10)))
    table.refresh()
    if change is not None and has_landed(change):
        return change
    raise CommitError(f"a commit to table {table.name} lost {COMMIT_TRIES_MAX} races in a row: too many writers")


def _proposal(table: Table, propose: Callable[[int], Change | None]) -> tuple[Change | None, int]:
    """A caller's proposal, and the version it is for. If ``propose`` finds damage, refresh and ask it once more: upkeep
    may have replaced and deleted the files that it read, while this process was stopped."""
    version = table.version + 1
    try:
        return propose(version), version
    except CorruptLogError:
        if table.refresh() + 1 == version:
            raise
        if table.name in READ_ALL_THE_SAME:
            require_own(table)
    version = table.version + 1
    return propose(version), version


class _Staged:
    """The files that a compare-and-set adds. Nothing names them before the commit, so somebody's VACUUM may remove a
    file that waits for long."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._seen_s: dict[str, float] = {}

    def require(self, change: Change) -> None:
        """Before the commit: raise LostStagedFileError for a file that is gone."""
        lost = self._gone(change.add)
        if lost:
            raise LostStagedFileError(
                f"file {lost[0].path}, staged for table {self._table.name}, is gone or cut: somebody removed it, as a "
                "VACUUM with a short retention does. The commit was not made: run the batch again"
            )

    def require_not_lost(self, change: Change) -> None:
        """After the commit: raise LostFileError for a file that was removed between the last look and the commit. The
        files that the commit replaced may be gone by now, so the added files are the only copy."""
        lost = self._live(self._gone(change.add))
        if lost:  # unless upkeep has replaced and deleted them since
            self._table.refresh()
            lost = self._live(lost)
        if lost:
            raise LostFileError(
                f"file {lost[0].path} was removed while this process slept, and then committed to table "
                f"{self._table.name}: its rows are lost. Keep VACUUM from files younger than the longest such sleep"
            )

    def _live(self, files: Sequence[DataFile]) -> list[DataFile]:
        """The files that the table names."""
        live = set(live_paths(self._table)) if files else set[str]()
        return [file for file in files if file.path in live]

    def _gone(self, files: Sequence[DataFile]) -> list[DataFile]:
        """The files that are gone, among those that nobody has looked at for long."""
        now_s = self._table.runtime.monotonic()
        seen_s = {f.path: self._seen_s.get(f.path, f.written_s) for f in files}
        doubtful = [f for f in files if (at := seen_s[f.path]) is None or now_s - at > STAGED_UNSEEN_S]
        gone = self._table.missing(doubtful) if doubtful else []
        self._seen_s.update((file.path, now_s) for file in doubtful if file not in gone)
        return gone
