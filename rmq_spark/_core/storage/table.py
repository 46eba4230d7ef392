"""One Delta table of a commit log, and the only way to commit to it: compare-and-set at the next version.

No other module imports deltalake.
"""

from __future__ import annotations

from rmq_spark._core.runtime.failpoints import reach

from rmq_spark._core.storage.address_space import require_address_space  # isort: skip  (it looks before the engine is loaded)

import json
import logging
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, PostCommitHookProperties, RemoveAction

from rmq_spark._core.runtime import observer
from rmq_spark._core.runtime.forks import forks
from rmq_spark._core.runtime.pools import submitted
from rmq_spark._core.runtime.runtime import RUNTIME, Runtime
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.clock import StoreClock
from rmq_spark._core.storage.files import (
    THREADS_ROWS_MIN,
    DataFile,
    RowRange,
    filesystem,
    read_range,
    require_path,
    write_table,
)
from rmq_spark._core.storage.foreign_commits import WITHOUT_FEATURES, Changed, Entry, Snapshot, changes, dropping
from rmq_spark._core.storage.location import is_uri
from rmq_spark._core.storage.seal import (
    is_panic,
    reading,
    require_bounds,
    require_count,
    require_entries,
    require_row_groups,
    require_seal,
)
from rmq_spark._core.storage.store_errors import asking, denied, is_denied, plainly, require_resources
from rmq_spark._core.storage.writer_lock import NO_LOCK, WriterLock
from rmq_spark._core.vocabulary.redaction import cause_of, redacted
from rmq_spark.errors import (
    CommitError,
    CorruptLogError,
    ForeignChangeError,
    LogFormatError,
    LostCommitError,
    LostFileError,
    LostStagedFileError,
    NotACommitLogError,
    OptionError,
    TxmqError,
    UnreachableStoreError,
)

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

PARQUET_WITH_CHECKSUMS = pads.ParquetFileFormat(
    default_fragment_scan_options=pads.ParquetFragmentScanOptions(page_checksum_verification=True)
)

COMMIT_TRIES_MAX = 200
"""Lost races before a commit gives up. After each the writer waits for a random time, whose upper limit doubles up to
BACKOFF_S_MAX."""
UNEXPECTED_ERRORS_MAX = 3
LISTS_MAX = 3
"""How often a Delta log is listed when a listed entry is gone before it is read."""
STAGED_UNSEEN_S = 60.0
"""Seconds for which a file counts as present after it was written or looked at. A VACUUM that keeps files of this age
does not remove it. A VACUUM with a shorter retention can remove it between any look and the commit; the look after the
commit finds that."""
LOOKS_AT_ONCE = 16
"""Files that are looked up in an object store at the same time. Each lookup takes a round trip."""
BACKOFF_S_MIN = 0.002
BACKOFF_S_MAX = 0.25
REFRESHED_S_MAX = 10.0
"""Seconds after which delta-rs itself looks for new entries, whatever two looks at the disk say."""
CHECKPOINT_INTERVAL = 25
"""Commits from one checkpoint to the next, and from one clean-up of old entries to the next. At each commit and each
refresh, delta-rs reads every entry since the last checkpoint. A clean-up lists all entries, of which the last minute
may have left thousands."""
OWN = "txmq.own"
"""Name under which each commit notes the version that it makes (Delta's ``txn``). If a table's version is higher,
another writer made it."""
READ_ALL_THE_SAME = frozenset({"messages"})
"""Tables that can still be read after another writer changed them. Nothing is committed to them until the change is
undone. A refresh of any other table raises, so nobody reads or decides by what rmq_spark did not write."""
ROW_GROUP_ROWS = 4_096
"""Rows of a row group of ``op``, which is sorted by version. A reader of the newest rows skips earlier row groups."""

_LOST_RACE = ("Failed to commit transaction: ", "Tried committing existing table version: ")
"""How delta-rs's message begins when another writer took the version."""

BOUNDS: Mapping[str, Mapping[str, pa.DataType]] = {
    "half": {"half_id": pa.string()},
    "op": {"version": pa.int64(), "next_offset": pa.int64(), "low_water": pa.int64(), "prepared_ms": pa.int64()},
    "groups": {"consumer_group": pa.string()},
    "messages": {
        "topic": pa.string(),
        "queue_id": pa.int32(),
        "queue_offset": pa.int64(),
        "commit_timestamp": pa.timestamp("us", "UTC"),
        "op_version": pa.int64(),
    },
}
"""By table, the columns whose minimum and maximum in each file are read from the Delta log."""


@dataclass(frozen=True)
class Change:
    """What one commit does to a table."""

    add: Sequence[DataFile] = ()
    remove: Sequence[str] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)
    """By application, its newest batch id."""
    modification_time_ms: int | None = None
    data_change: bool = True
    removed_earlier_s: float = 0.0
    """The removed files count as removed this many seconds earlier, so upkeep deletes them sooner."""
    version: int | None = None
    """The version that the change was proposed for. The loop sets it."""

    def is_stale(self, version: int) -> bool:
        """Whether the table is no longer at the version before this change's. The committing thread itself has moved
        it, in a call in the midst of the loop (``__del__``, a signal handler), or had to open it anew."""
        return self.version is not None and self.version != version + 1


class Clock(Protocol):
    """:class:`rmq_spark._core.storage.clock.StoreClock`, or its twin."""

    def require_near(self) -> None:
        """Raise ClockError when the writer's clock is too far from the store's."""


class Table(Protocol):
    """A table of a commit log: ``DeltaLogTable``, or its twin in memory in ``rmq_spark.testing``."""

    name: str
    schema: pa.Schema
    folder: str
    fs: Any
    """A ``pyarrow.fs.FileSystem``, or as much of one as the tables need."""
    runtime: Runtime
    """Gives the clock, the locks and the threads to the table and to everything built on it."""
    lock: AbstractContextManager[object]
    """Held while the table moves to another version. If another thread refreshed between ``propose`` and its commit,
    the commit would build on a version that ``propose`` never saw. The tables of a commit log share one lock."""

    clock: Clock
    """Compared with the store's before each write. The tables of a commit log share one."""

    @property
    def id(self) -> str:
        """The table's id, made with the table. A table put in its place has another id."""

    @property
    def version(self) -> int:
        """The version that the last refresh saw."""

    @property
    def history_s(self) -> float:
        """Seconds for which entries of the table's Delta log are kept."""

    def refresh(self) -> int:
        """Move to the newest version and return it. Raise ForeignChangeError when another writer has changed the table,
        unless it is one of :data:`READ_ALL_THE_SAME`."""

    def actions(self) -> pa.Table:
        """Return the live files: ``path, modification_time`` (ms), ``num_records, size_bytes``, and ``min.<column>,
        max.<column>`` of the table's columns in :data:`BOUNDS`."""

    def removed_since(self, age_s: float | None = None) -> set[str]:
        """Return the paths of files that commits removed from the table, as far as its Delta log knows; with ``age_s``
        only those removed within that many seconds, and perhaps some removed up to an hour earlier."""

    def transaction_version(self, app_id: str) -> int | None:
        """Return the newest batch id that a commit noted for this application in ``Change.transactions``."""

    def changed_by_others(self, since: int) -> Changed | None:
        """Return what the commits after version ``since``, all by other writers, changed; None when the table is as it
        was at that version. Raise ForeignChangeError when this cannot be found out any more."""

    def write(
        self,
        rows: pa.Table,
        prefix: str,
        stats_columns: Sequence[str],
        row_group_rows: int = ROW_GROUP_ROWS,
    ) -> DataFile:
        """Write a data file. It belongs to the table once a commit adds it."""

    def missing(self, files: Sequence[DataFile]) -> list[DataFile]:
        """Return the data files that are gone or have another size."""

    def read(
        self, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        """Return rows of some live files."""

    def read_range(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield rows of one half file as :func:`rmq_spark._core.storage.files.read_range` does."""

    def compare_and_set(
        self, propose: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        """Commit what ``propose`` returns at the next version, and ask it again when another writer takes that
        version."""


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

    Parameters
    ----------
    propose : callable
        Takes the next version, after a refresh. Returns what to commit, or None when there is nothing (left) to do.
        When it raises, the loop ends and writes nothing more.
    landed : callable
        Takes a change, after a refresh. Returns True when the change's rows are in the table.
    try_commit : callable
        Returns True when the commit was acknowledged, and False when another writer took the version or nobody knows.
        An exception leaves open whether the commit was made.
    turns : Turns
        Turns of this machine's processes that write to the table.

    Raises
    ------
    ClockError
        When this machine's clock is too far from the store's; nothing was written.
    ForeignChangeError
        When another writer changed the table.
    CommitError
        When the tries are used up.
    LostCommitError
        When a commit was acknowledged but the table does not hold its rows: it went below the newest version.
    LostStagedFileError
        When a file of the change is gone before the commit.
    LostFileError
        When such a file is gone after the commit.
    """
    table.clock.require_near()
    failures = 0
    change: Change | None = None
    staged = _Staged(table)

    def has_landed(change: Change) -> bool:
        staged.require_kept(change)
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
    """What a caller proposes, and for which version. Damage that it reports must still be there in the newest state:
    upkeep may have replaced and deleted the files that it read, while this process was stopped."""
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

    def require_kept(self, change: Change) -> None:
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
        live = set(self._table.actions()["path"].to_pylist()) if files else set[str]()
        return [file for file in files if file.path in live]

    def _gone(self, files: Sequence[DataFile]) -> list[DataFile]:
        """The files that are gone, among those that nobody has looked at for long."""
        now_s = self._table.runtime.monotonic()
        seen_s = {f.path: self._seen_s.get(f.path, f.written_s) for f in files}
        doubtful = [f for f in files if (at := seen_s[f.path]) is None or now_s - at > STAGED_UNSEEN_S]
        gone = self._table.missing(doubtful) if doubtful else []
        self._seen_s.update((file.path, now_s) for file in doubtful if file not in gone)
        return gone


def has_held(table: Table, file: DataFile) -> bool:
    """Return True when a commit has added the file: the table holds it, or held it until it was replaced."""
    return file.path in table.actions()["path"].to_pylist() or file.path in table.removed_since()


def foreign_change(table: Table) -> str | None:
    """Return a sentence when other writers' commits have changed the table: what they did, whose they are, and how to
    undo it. None when the newest commit is ours, or all later ones are undone."""
    with table.lock:
        own, version = table.transaction_version(OWN) or 0, table.version
        if own == version:
            return None
        try:
            changed = table.changed_by_others(own)
        except ForeignChangeError as problem:
            return str(problem)
    if changed is None:
        return None
    consequence = "Nothing is drained, merged or deleted"
    if table.name not in READ_ALL_THE_SAME:
        consequence = "Nobody goes on with it"
    remedy = f"put version {own} back with the package deltalake: DeltaTable('<log>/{table.name}').restore({own}, "
    remedy += "protocol_downgrade_allowed=True)"
    if changed.features:  # delta-rs refuses the RESTORE, too
        remedy = f"take that back {dropping(changed.features)}"
    elif not changed.restorable:
        remedy = f'cut its Delta log back to version {own} (docs/maintenance.md, "When another writer changed a table")'
    return (
        f"table {table.name} is not what rmq_spark left in version {own}: another writer {changed.said}. {consequence} "
        f"until that is undone, so nothing is lost. Keep that writer away, and {remedy}"
    )


def require_own(table: Table) -> None:
    """Raise ForeignChangeError when other writers' commits have changed the table."""
    if sentence := foreign_change(table):
        raise ForeignChangeError(sentence)


def take_out(table: Table, paths: Sequence[str], removed_earlier_s: float = 0.0) -> None:
    """Remove those of the files that are still in the table: another process may remove the same ones.

    The commit says that no data changes. Delta refuses any other removal from an append-only table.
    """

    def live() -> set[str]:
        return set(table.actions()["path"].to_pylist())

    def propose(version: int) -> Change | None:
        remaining = sorted(live().intersection(paths))
        return Change(remove=remaining, data_change=False, removed_earlier_s=removed_earlier_s) if remaining else None

    table.compare_and_set(propose, lambda change: live().isdisjoint(change.remove))


def actions_schema(table: str) -> pa.Schema:
    """Return the schema of :meth:`Table.actions` for a table of this name."""
    numbers = ("modification_time", "num_records", "size_bytes")
    fields = [("path", pa.string()), *((name, pa.int64()) for name in numbers)]
    bounds = BOUNDS.get(table, {}).items()
    return pa.schema(fields + [(f"{side}.{name}", kind) for side in ("min", "max") for name, kind in bounds])


def bounds_of(table: str, stats: str) -> dict[str, Any]:
    """Return the bounds in :meth:`Table.actions` of a file with these statistics (JSON, as in a Delta log)."""
    statistics, types = json.loads(stats), BOUNDS.get(table, {})
    bounds: dict[str, Any] = {}
    for side in ("min", "max"):
        for name, value in statistics[f"{side}Values"].items():
            is_time = name in types and pa.types.is_timestamp(types[name])
            bounds[f"{side}.{name}"] = datetime.fromisoformat(value.replace("Z", "+00:00")) if is_time else value
    return bounds


_engine_process: tuple[int, int] | None = None
"""The process in which delta-rs was used first: its number of :func:`forks`, and its id. The engine's threads do not
survive a fork."""


def _require_store(uri: str, storage_options: dict[str, str] | None) -> None:
    """Raise OptionError when delta-rs has no store for the URI's scheme. It takes such a place for an empty one."""
    try:
        DeltaTable(uri, storage_options=storage_options)
    except TableNotFoundError as problem:
        if "Unknown scheme" in str(problem):
            place, scheme = redacted(uri.rpartition("/")[0]), uri.partition("://")[0]
            raise OptionError(
                f"path {place!r}: there is no store for {scheme}://. A folder, s3://, abfss:// or gs:// is expected"
            ) from None
    except (DeltaError, OSError):
        pass


def require_no_fork() -> None:
    """Raise OptionError in a fork of a process that has used delta-rs: its calls would panic there, or hang."""
    global _engine_process
    if _engine_process is None:
        require_address_space()  # it may have been limited since this module was imported
        _engine_process = (forks(), os.getpid())
    elif _engine_process[0] != forks():
        raise OptionError(
            f"this process is a fork (os.fork) of process {_engine_process[1]}, which had opened a commit log, and "
            "Delta's engine does not survive a fork: open commit logs after it, or start processes by "
            "multiprocessing's 'spawn' or 'forkserver'"
        )


class DeltaLogTable:
    """A Delta table of a commit log, through delta-rs."""

    def __init__(
        self,
        uri: str,
        name: str,
        schema: pa.Schema,
        storage_options: Mapping[str, str] | None,
        runtime: Runtime = RUNTIME,
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.schema = schema
        self._uri = uri
        self._storage_options = dict(storage_options or {})
        self._delta_schema = Schema.from_arrow(schema)
        self.fs: pafs.FileSystem
        self.fs, self.folder = filesystem(uri, storage_options)
        self.lock = runtime.lock()
        self.clock: Clock = StoreClock(self.fs, self.folder, runtime)
        self._turns = WriterLock(Path(self.folder) if isinstance(self.fs, pafs.LocalFileSystem) else None, runtime)
        self._actions: tuple[int, pa.Table] | None = None
        self._changed: tuple[int, int, Changed | None] | None = None  # since a version, until another: what
        self._own_seen = -1  # a version that is known to be free of foreign changes
        self._id: str | None = None
        self._seen = -1  # the newest version that this handle knows of
        self._newest: tuple[int, object] | None = None  # a version, and the stamp of its entry
        self._newest_sum: int | None = None  # the checksum of that entry, on a local disk
        self._refreshed_s = -math.inf  # when delta-rs last looked for new entries
        # half has at least one file for each transaction and opens slowly. So it opens in the background while op is
        # read, and readers of op alone never wait for it.
        self._opening: Future[DeltaTable] | None = self._open_in_background()

    @staticmethod
    def create(
        uri: str,
        name: str,
        schema: pa.Schema,
        storage_options: Mapping[str, str] | None,
        configuration: Mapping[str, str],
    ) -> None:
        """Make the empty table. An existing table is left as it is."""
        require_no_fork()
        settings: dict[str, str | None] = {
            "delta.appendOnly": "true",
            "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
            # Only our commits clean up. Another writer's clean-up could remove our last version, with which the table
            # is compared, and which a RESTORE puts back.
            "delta.enableExpiredLogCleanup": "false",
            **WITHOUT_FEATURES,
            **configuration,
        }
        try:
            DeltaTable.create(
                uri,
                schema=Schema.from_arrow(schema),
                mode="error",
                configuration=settings,
                storage_options=dict(storage_options or {}) or None,
                raise_if_key_not_exists=False,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except BaseException as problem:  # a panic of delta-rs is no Exception
            require_resources(problem, redacted(uri))
            if not isinstance(problem, DeltaError):
                raise
            if not DeltaTable.is_deltatable(uri, dict(storage_options or {}) or None):
                raise NotACommitLogError(f"table {name} cannot be created at {uri}: {problem}") from cause_of(problem)

    @staticmethod
    def exists(uri: str, storage_options: Mapping[str, str] | None) -> bool:
        """Return True when the folder holds a Delta table.

        Raises
        ------
        OptionError
            When delta-rs has no store for the URI's scheme.
        UnreachableStoreError
            When delta-rs panics, as it does for an endpoint that is no URL.
        """
        require_no_fork()
        options = dict(storage_options or {}) or None
        try:
            is_table = bool(DeltaTable.is_deltatable(uri, options))
        except BaseException as problem:
            if not is_panic(problem):
                raise
            require_resources(problem, redacted(uri))
            raise UnreachableStoreError(
                f"{redacted(uri)} cannot be read: delta-rs cannot work with these storage options (an endpoint is a "
                f"URL such as https://host:9000 or http://host): {plainly(str(problem), options)}"
            ) from None
        if not is_table and is_uri(uri):
            _require_store(uri, options)
        return is_table

    @property
    def _table(self) -> DeltaTable:
        return self.wait_until_open()

    def wait_until_open(self) -> DeltaTable:
        """Wait until the table is open, and return it. The first use of the table does the same.

        A table that cannot be opened raises its error here. The next use tries again.
        """
        require_no_fork()
        opening = self._opening
        if opening is None:
            with self.lock:
                opening = self._opening = self._opening or self._open_in_background()
        try:
            return opening.result()
        except BaseException:
            with self.lock:
                if self._opening is opening:
                    self._lose()
            raise

    def _lose(self) -> None:
        """Forget the table and everything read from it. The next use opens it again."""
        self._opening = None
        self._own_seen = -1
        self._actions = self._changed = None

    def _open_in_background(self) -> Future[DeltaTable]:
        return submitted(ThreadPoolExecutor(1, f"txmq-open-{self.name}"), self._open)

    def _open(self) -> DeltaTable:
        require_no_fork()
        try:
            table = self._load()
        except TableNotFoundError as problem:
            text = f"no Delta table {self.name!r} at {self._uri}: is it a commit log?"
            raise NotACommitLogError(text) from cause_of(problem)
        except BaseException as problem:  # a panic of delta-rs is no Exception
            if not isinstance(problem, DeltaError) and not is_panic(problem):
                raise
            require_resources(problem, self._uri)
            text = plainly(str(problem), self._storage_options)
            if self._id is None:
                raise NotACommitLogError(
                    f"the Delta table {self.name!r} at {self._uri} cannot be opened: {text}"
                ) from cause_of(problem)
            self._require_entries(-1, None)
            raise self._unreadable(problem) from cause_of(problem)
        with asking(self._uri, self._storage_options):
            self._require_entries(-1, int(table.version()))
        present = set(pa.schema(table.schema().to_arrow()).names)
        missing = [n for n in self.schema.names if n not in present]
        if missing:
            raise LogFormatError(
                f"table {self.name} has no column {missing[0]!r}: it was changed by hand, or is no log"
            )
        self._require_same(table)
        self._note_newest(int(table.version()), self._entry_stamp(int(table.version())))
        return table

    def _unreadable(self, problem: BaseException) -> CorruptLogError:
        require_resources(problem, self._uri)
        answer = plainly(str(problem), self._storage_options)
        return CorruptLogError(f"the Delta log of table {self.name} cannot be read any more: {answer}")

    def _query(self, question: Callable[[DeltaTable], Answer]) -> Answer:
        """What delta-rs answers about the table. It reads some parts of the Delta log only now, and upkeep may have
        removed them while this process was stopped. So the table is opened anew, and asked again, before damage is
        reported. The caller holds the lock; the table may be at a newer version afterwards."""
        try:
            return question(self._table)
        except BaseException as problem:  # a panic of delta-rs is no Exception
            if not isinstance(problem, DeltaError) and not is_panic(problem):
                raise
            self._lose()
        try:
            return question(self._table)
        except BaseException as problem:
            if not isinstance(problem, DeltaError) and not is_panic(problem):
                raise
            raise self._unreadable(problem) from cause_of(problem)

    def _load(self) -> DeltaTable:
        """Read the Delta log. Upkeep may remove old entries between the listing and the reads, when this process was
        paused in between. Then the log is listed again."""
        for lists in range(LISTS_MAX):
            try:
                with asking(self._uri, self._storage_options):
                    return DeltaTable(self._uri, storage_options=self._storage_options or None)
            except DeltaError as problem:
                is_entry_gone = not isinstance(problem, TableNotFoundError) and "not found" in str(problem).lower()
                if not is_entry_gone or lists == LISTS_MAX - 1:
                    raise
        raise AssertionError

    def _require_same(self, table: DeltaTable) -> None:
        """Raise when the table is not the one that this handle knew: its answers would contradict earlier ones."""
        if self._id is None:
            return
        if str(table.metadata().id) != self._id:
            raise NotACommitLogError(
                f"another table {self.name!r} lies at {self._uri} than before: the commit log was removed and made "
                "anew. Open it again"
            )
        if table.version() < self._seen:
            raise CorruptLogError(
                f"table {self.name} is at version {table.version()}, and this process has seen version {self._seen}: "
                "entries of its Delta log were removed, or an older copy put in its place. Restore it from a copy"
            )
        version, entry = self._newest or (0, None)
        now = self._entry_stamp(version)
        if None not in (entry, now, self._newest_sum) and entry != now and self._checksum(version) != self._newest_sum:
            raise CorruptLogError(
                f"version {version} of table {self.name} is another one than this process has seen: an older copy was "
                "put in its place, and written to since. Restore the newest one"
            )

    def _note_newest(self, version: int, entry: object) -> None:
        self._newest, self._newest_sum = (version, entry), self._checksum(version)

    def _checksum(self, version: int) -> int | None:
        """Return a checksum of an entry of a local Delta log; None on other stores, and for an entry that is gone."""
        if not isinstance(self.fs, pafs.LocalFileSystem):
            return None
        try:
            return zlib.crc32(Path(self.folder, "_delta_log", f"{version:020d}.json").read_bytes())
        except OSError:
            return None

    @property
    def id(self) -> str:
        self._id = self._id or str(self._table.metadata().id)
        return self._id

    @property
    def version(self) -> int:
        return int(self._table.version())

    @property
    def history_s(self) -> float:
        match = re.fullmatch(r"interval (\d+) seconds", self.configuration.get("delta.logRetentionDuration", ""))
        return float(match[1]) if match else 0.0

    @property
    def configuration(self) -> dict[str, str]:
        """The table's properties."""
        return dict(self._table.metadata().configuration)

    def refresh(self) -> int:
        with self.lock:
            version = self._move_to_newest()
            if self.name not in READ_ALL_THE_SAME and self._own_seen != version:
                require_own(self)
                self._own_seen = version
        reach("table seen", table=self.name)
        return version

    def _move_to_newest(self) -> int:
        with self.lock:
            table = self._table
            before = self._seen = int(table.version())
            if self._is_newest(before):
                return before
            self._id = self._id or str(table.metadata().id)
            is_continuous = False
            try:
                with asking(self._uri, self._storage_options):
                    table.update_incremental()
                    self._require_entries(before, int(table.version()))
                    # delta-rs notices neither a lost log nor a recreated one. Where no entry is left it sees no new
                    # entries, and it takes the entries of a recreated log for the next ones.
                    is_continuous = self._goes_on(before, int(table.version()))
            except BaseException as problem:  # a panic of delta-rs is no Exception
                # The entries after ours were cleaned up, so the table must be opened anew from a checkpoint. Or one of
                # them is damaged, which opening reports.
                if not isinstance(problem, (DeltaError, CorruptLogError)) and not is_panic(problem):
                    raise
            finally:
                if not is_continuous:
                    self._lose()
            return self.version

    def _is_newest(self, version: int) -> bool:
        """Return True when no entry follows this version, and its own is still there. Two looks at a local disk are
        much faster than delta-rs. (Clean-up removes the oldest entries first, so no later entry is gone.)"""
        now_s = self.runtime.monotonic()
        if now_s - self._refreshed_s > REFRESHED_S_MAX or not isinstance(self.fs, pafs.LocalFileSystem):
            self._refreshed_s = now_s
            return False
        known = self._newest
        if known is None or known[0] != version or known[1] is None or self._id is None:
            return False
        return self._entry_stamp(version + 1) is None and self._entry_stamp(version) == known[1]

    def _goes_on(self, before: int, version: int) -> bool:
        """Return True when the entry ``before`` is unchanged, or was cleaned up and newer entries follow it."""
        entry = self._entry_stamp(before)
        if entry is None:
            return version > before
        known = self._newest
        if known is not None and known[0] == before and known[1] not in (None, entry):
            return False
        if known is None or known != (version, entry):
            self._note_newest(version, self._entry_stamp(version) if version > before else entry)
        return True

    def _entry_stamp(self, version: int) -> object:
        """Return what tells an entry of the Delta log from another of that version; None when it is not there."""
        path = f"{self.folder}/_delta_log/{version:020d}.json"
        if isinstance(self.fs, pafs.S3FileSystem):  # S3's times are whole seconds: the ETag tells entries apart
            try:
                with self.fs.open_input_stream(path) as stream:  # costs one HEAD request
                    return stream.metadata()
            except FileNotFoundError:
                return None
        info = self.fs.get_file_info(path)
        return (info.mtime_ns, info.size) if info.type == pafs.FileType.File else None

    def _require_entries(self, since: int, until: int | None) -> None:
        """Raise CorruptLogError for entries of the Delta log after ``since``, up to ``until`` or the newest, that a
        power cut left empty. An object store has no half-written ones."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            require_entries(Path(self.folder, "_delta_log"), self.name, since, until)

    def actions(self) -> pa.Table:
        known = self._actions
        if known is not None and known[0] == self.version:  # no reader need wait for a commit under way
            return known[1]
        with self.lock:
            if self._actions is None or self._actions[0] != self.version:
                self._actions = self._read_actions()
            return self._actions[1]

    def _read_actions(self) -> tuple[int, pa.Table]:
        version, live = self._query(lambda t: (int(t.version()), pa.table(t.get_add_actions(flatten=True))))
        schema = actions_schema(self.name)
        # A column that is null in all files has no statistics.
        columns = {
            f.name: pc.cast(live[f.name], f.type) if f.name in live.column_names else pa.nulls(live.num_rows, f.type)
            for f in schema
        }
        actions = pa.table(columns, schema=schema)
        require_bounds(actions, self.name)
        return version, actions

    def removed_since(self, age_s: float | None = None) -> set[str]:
        def removed_before(hours: int) -> set[str]:
            listed = self._query(
                lambda t: t.vacuum(retention_hours=hours, dry_run=True, enforce_retention_duration=False)
            )
            return {unquote(p) for p in listed}

        with self.lock:
            removed = removed_before(0)
            return removed if age_s is None else removed - removed_before(math.ceil(age_s / 3600))

    def transaction_version(self, app_id: str) -> int | None:
        with self.lock:
            return self._query(lambda t: t.transaction_version(app_id))

    def changed_by_others(self, since: int) -> Changed | None:
        with self.lock:
            until = self.version
            if self._changed is None or self._changed[:2] != (since, until):
                self._changed = (since, until, self._read_changed(since, until))
            return self._changed[2]

    def _read_changed(self, since: int, until: int) -> Changed | None:
        try:
            entries = self._entries(since, until)
            with asking(self._uri, self._storage_options):
                before = DeltaTable(self._uri, version=since, storage_options=self._storage_options or None)
            return changes(_snapshot(before), _snapshot(self._table), entries)
        except (DeltaError, FileNotFoundError, ValueError) as problem:
            raise ForeignChangeError(
                f"table {self.name} was changed by another writer after version {since}, and nobody can tell how: its "
                f"Delta log does not reach back so far ({plainly(str(problem), self._storage_options)}). Keep that "
                "writer away, and restore the log from a copy (docs/backup.md)"
            ) from cause_of(problem)

    def _entries(self, since: int, until: int) -> list[Entry]:
        entries: list[Entry] = []
        for version in range(since + 1, until + 1):
            with self.fs.open_input_stream(f"{self.folder}/_delta_log/{version:020d}.json") as stream:
                entries.append(Entry.of(version, stream.readall()))
        return entries

    def write(
        self,
        rows: pa.Table,
        prefix: str,
        stats_columns: Sequence[str],
        row_group_rows: int = ROW_GROUP_ROWS,
    ) -> DataFile:
        began_s = self.runtime.monotonic()
        file = write_table(
            self.fs, self.folder, rows, prefix=prefix, stats_columns=stats_columns, row_group_rows=row_group_rows
        )
        reach("file written", table=self.name)
        return replace(file, written_s=began_s)

    def missing(self, files: Sequence[DataFile]) -> list[DataFile]:
        paths = [f"{self.folder}/{f.path}" for f in files]
        with asking(self._uri, self._storage_options):
            if len(paths) == 1 or isinstance(self.fs, pafs.LocalFileSystem):
                infos = self.fs.get_file_info(paths)
            else:  # pyarrow would look them up one after the other
                with ThreadPoolExecutor(min(LOOKS_AT_ONCE, len(paths)), "txmq-look") as pool:
                    looks = [submitted(pool, self.fs.get_file_info, path) for path in paths]
                    infos = [look.result() for look in looks]
        return [f for f, i in zip(files, infos, strict=True) if (i.type, i.size) != (pafs.FileType.File, f.size_bytes)]

    def read(
        self, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        names = list(columns) if columns is not None else self.schema.names
        if not paths:
            return pa.schema([self.schema.field(n) for n in names]).empty_table()
        reach("files read", table=self.name, paths=paths)
        full_paths = [f"{self.folder}/{require_path(p, self.name)}" for p in paths]
        row_counts = self._row_counts(paths)
        if where is None and self._are_small(row_counts, paths):
            return pa.concat_tables([self._read_small(path, names, row_counts) for path in paths])
        try:
            dataset = pads.dataset(full_paths, schema=self.schema, format=PARQUET_WITH_CHECKSUMS, filesystem=self.fs)
            self._require_files(dataset, row_counts)
            return dataset.to_table(columns=names, filter=where)
        except (OSError, pa.ArrowException, ValueError) as problem:
            require_resources(problem, f"table {self.name}")
            for path, file in zip(paths, full_paths, strict=True):  # find the file that fails
                with reading(path, self.name):
                    file_dataset = pads.dataset(
                        [file], schema=self.schema, format=PARQUET_WITH_CHECKSUMS, filesystem=self.fs
                    )
                    self._require_files(file_dataset, row_counts)
                    file_dataset.to_table(columns=names, filter=where)
            raise

    def read_range(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        return read_range(self.fs, self.folder, wanted, columns, where)

    def _are_small(self, row_counts: Mapping[str, int | None], paths: Sequence[str]) -> bool:
        """Return True for files that are read faster one after the other than by the threads of a dataset."""
        has_no_latency = len(paths) == 1 or isinstance(self.fs, pafs.LocalFileSystem)
        return has_no_latency and all(
            (row_counts.get(path) or THREADS_ROWS_MIN + 1) <= THREADS_ROWS_MIN for path in paths
        )

    def _read_small(self, path: str, names: Sequence[str], row_counts: Mapping[str, int | None]) -> pa.Table:
        fields = [self.schema.field(name) for name in names]
        with reading(path, self.name), self.fs.open_input_file(f"{self.folder}/{path}") as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            self._require_file(path, file.schema_arrow, file.metadata, row_counts)
            table = file.read(names, use_threads=False)
            columns = [
                column if column.type == field_.type else pc.cast(column, field_.type)
                for column, field_ in zip((table[name] for name in names), fields, strict=True)
            ]
        return pa.table(columns, schema=pa.schema(fields))

    def _row_counts(self, paths: Sequence[str]) -> dict[str, int | None]:
        """Row counts of some files, by path, from the Delta log."""
        actions = self.actions()
        named = actions.filter(pc.is_in(actions["path"], value_set=pa.array(paths, pa.string())))
        return dict(zip(named["path"].to_pylist(), named["num_records"].to_pylist(), strict=True))

    def _require_files(self, dataset: pads.Dataset, row_counts: Mapping[str, int | None]) -> None:
        """Raise CorruptLogError for files that differ from their seal or from what the Delta log says of them."""
        for fragment in dataset.get_fragments():
            path = fragment.path.removeprefix(f"{self.folder}/")
            self._require_file(path, fragment.physical_schema, fragment.metadata, row_counts)

    def _require_file(
        self, path: str, schema: pa.Schema, footer: pq.FileMetaData, row_counts: Mapping[str, int | None]
    ) -> None:
        require_seal(schema, path, self.name, self.schema.names)
        require_count(footer.num_rows, row_counts.get(path), path, self.name)
        require_row_groups(footer, path, self.name)

    def compare_and_set(
        self, propose: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        with self.lock:
            return compare_and_set(self, propose, landed, self.try_commit, self._turns)

    def try_commit(self, change: Change) -> bool:
        reach("commit begins", table=self.name, change=change)
        now_ms = self.runtime.time_ms()
        removed_ms = now_ms - int(change.removed_earlier_s * 1000)
        written_ms = change.modification_time_ms or now_ms
        actions: list[AddAction | RemoveAction] = [
            AddAction(f.path, f.size_bytes, {}, written_ms, change.data_change, f.stats) for f in change.add
        ]
        actions += [
            RemoveAction(path=p, data_change=change.data_change, deletion_timestamp=removed_ms) for p in change.remove
        ]
        transactions = [Transaction(app_id, batch_id) for app_id, batch_id in change.transactions.items()]
        version = self.version + 1
        cleans = version % CHECKPOINT_INTERVAL == 0
        table = self._table
        if change.is_stale(int(table.version())):
            return False
        try:
            table.create_write_transaction(
                actions,
                mode="append",
                schema=self._delta_schema,
                commit_properties=CommitProperties(max_commit_retries=0, app_transactions=transactions or None),
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=cleans),
            )
        except DeltaError as problem:
            answer = str(problem)
            if isinstance(problem, CommitFailedError) and answer.startswith(_LOST_RACE):
                logger.debug("commit to %s at version %d: %s", self.name, version, redacted(problem))
                return False
            raise
        self._own_seen = version
        reach("commit done", table=self.name, change=change)
        return True


def _snapshot(table: DeltaTable) -> Snapshot:
    live = pa.table(table.get_add_actions(flatten=True))
    metadata, protocol = table.metadata(), table.protocol()
    return Snapshot(
        # Neither the time of a file's last add nor columns that came later are part of what it holds.
        {
            file.pop("path"): {name: value for name, value in file.items() if value is not None}
            for file in live.drop_columns(["modification_time"]).to_pylist()
        },
        f"{table.schema().to_json()} {metadata.partition_columns}",
        dict(metadata.configuration),
        f"{protocol.min_reader_version} and {protocol.min_writer_version}",
        frozenset({*(protocol.reader_features or ()), *(protocol.writer_features or ())}),
    )


_FIRST_ENTRY = "_delta_log/00000000000000000000.json"
"""The only file of an empty table."""


def claim_table(uri: str, storage_options: Mapping[str, str] | None) -> bool | None:
    """Create an empty table, and return whether this writer created it.

    Returns
    -------
    bool or None
        True when it was created. False when the store refused the put of its first entry, because another writer's
        entry is there. None when delta-rs saw another writer's table first, and skipped the put.
    """
    require_no_fork()
    options = dict(storage_options or {}) or None
    schema = Schema.from_arrow(pa.schema([("version", pa.int64())]))
    try:
        DeltaTable.create(
            uri, schema, storage_options=options, commit_properties=CommitProperties(max_commit_retries=0)
        )
    except CommitFailedError:
        return False
    except BaseException as problem:  # a panic of delta-rs is no Exception
        require_resources(problem, redacted(uri))
        if not isinstance(problem, DeltaError):
            raise
        if DeltaTable.is_deltatable(uri, options):
            return None
        if is_denied(problem):
            raise denied(redacted(uri)) from None
        answer = plainly(str(problem), storage_options)
        raise NotACommitLogError(f"a table cannot be created at {redacted(uri)}: {answer}") from cause_of(problem)
    return True


def remove_table(uri: str, storage_options: Mapping[str, str] | None) -> None:
    """Remove the table that :func:`claim_table` made, if there is one."""
    fs, folder = filesystem(uri, storage_options)
    if isinstance(fs, pafs.LocalFileSystem):
        if Path(folder).is_dir():
            fs.delete_dir(folder)
    else:
        # By its name, since a store with stale lists would not list it. pyarrow would put empty objects in the place
        # of folders.
        DeltaStorageHandler(uri, dict(storage_options or {}) or None).delete_file(_FIRST_ENTRY)
