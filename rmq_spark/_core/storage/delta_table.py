"""A Delta table of a commit log, through delta-rs.

Beside this module only ``stores`` and ``delta_store`` import deltalake.
"""

from __future__ import annotations

from rmq_spark._core.runtime.failpoints import reach

from rmq_spark._core.storage.delta_process import require_no_fork  # isort: skip  (it looks before the engine is loaded)

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, PostCommitHookProperties, RemoveAction

from rmq_spark._core.runtime.pools import submitted
from rmq_spark._core.runtime.runtime import RUNTIME, Runtime
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.clock import StoreClock
from rmq_spark._core.storage.compare_and_set import compare_and_set
from rmq_spark._core.storage.data_file import DataFile
from rmq_spark._core.storage.delta_entries import LISTS_MAX, DeltaEntries
from rmq_spark._core.storage.file_reader import FileReader
from rmq_spark._core.storage.file_system import filesystem
from rmq_spark._core.storage.foreign_commits import (
    READ_ALL_THE_SAME,
    WITHOUT_FEATURES,
    Changed,
    changes,
    require_own,
    snapshot_of,
)
from rmq_spark._core.storage.location import is_uri
from rmq_spark._core.storage.row_range import RowRange, read_range
from rmq_spark._core.storage.seal import is_panic, require_bounds
from rmq_spark._core.storage.store_errors import asking, plainly, require_resources
from rmq_spark._core.storage.table import Change, Clock, actions_schema, write_file
from rmq_spark._core.storage.writer_lock import WriterLock
from rmq_spark._core.vocabulary.redaction import cause_of, redacted
from rmq_spark.errors import (
    CorruptLogError,
    ForeignChangeError,
    LogFormatError,
    NotACommitLogError,
    OptionError,
    UnreachableStoreError,
)

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LOOKS_AT_ONCE = 16
"""Files that are looked up in an object store at the same time. Each lookup takes a round trip."""
CHECKPOINT_INTERVAL = 25
"""Commits from one checkpoint to the next, and from one clean-up of old entries to the next. At each commit and each
refresh, delta-rs reads every entry since the last checkpoint. A clean-up lists all entries, of which the last minute
may have left thousands."""

_LOST_RACE = ("Failed to commit transaction: ", "Tried committing existing table version: ")
"""How delta-rs's message begins when another writer took the version."""


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


class DeltaLogTable:
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
        self.uri = uri
        self._storage_options = dict(storage_options or {})
        self._delta_schema = Schema.from_arrow(schema)
        self.fs: pafs.FileSystem
        self.fs, self.folder = filesystem(uri, storage_options)
        self._files = FileReader(self.fs, self.folder, name, schema)
        self._entries = DeltaEntries(self.fs, self.folder, name)
        self.lock = runtime.lock()
        self.clock: Clock = StoreClock(self.fs, self.folder, runtime)
        self._turns = WriterLock(Path(self.folder) if isinstance(self.fs, pafs.LocalFileSystem) else None, runtime)
        self._actions: tuple[int, pa.Table] | None = None
        self._changed: tuple[int, int, Changed | None] | None = None  # since a version, until another: what
        self._own_seen = -1  # a version that is known to be free of foreign changes
        self._id: str | None = None
        self._seen = -1  # the newest version that this handle knows of
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
    ) -> bool:
        """Make the empty table, and return True. An existing table is left as it is."""
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
            return False
        return True

    @staticmethod
    def exists(uri: str, storage_options: Mapping[str, str] | None) -> bool:
        """Return True when the folder holds a Delta table. OptionError: delta-rs has no store for the URI's scheme.
        UnreachableStoreError: it cannot work with the options, such as an endpoint that is no URL."""
        require_no_fork()
        options = dict(storage_options or {}) or None
        try:
            is_table = bool(DeltaTable.is_deltatable(uri, options))
        except BaseException as problem:
            if not is_panic(problem) and not isinstance(problem, DeltaError):
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
            text = f"no Delta table {self.name!r} at {self.uri}: is it a commit log?"
            raise NotACommitLogError(text) from cause_of(problem)
        except BaseException as problem:  # a panic of delta-rs is no Exception
            if not isinstance(problem, DeltaError) and not is_panic(problem):
                raise
            require_resources(problem, self.uri)
            text = plainly(str(problem), self._storage_options)
            if self._id is None:
                raise NotACommitLogError(
                    f"the Delta table {self.name!r} at {self.uri} cannot be opened: {text}"
                ) from cause_of(problem)
            self._entries.require_whole(-1, None)
            raise self._unreadable(problem) from cause_of(problem)
        with asking(self.uri, self._storage_options):
            self._entries.require_whole(-1, int(table.version()))
        present = set(pa.schema(table.schema().to_arrow()).names)
        missing = [n for n in self.schema.names if n not in present]
        if missing:
            raise LogFormatError(
                f"table {self.name} has no column {missing[0]!r}: it was changed by hand, or is no log"
            )
        self._require_same(table)
        self._entries.note_newest(int(table.version()), self._entries.stamp(int(table.version())))
        return table

    def _unreadable(self, problem: BaseException) -> CorruptLogError:
        require_resources(problem, self.uri)
        answer = plainly(str(problem), self._storage_options)
        return CorruptLogError(f"the Delta log of table {self.name} cannot be read any more: {answer}")

    def _query(self, question: Callable[[DeltaTable], Answer]) -> Answer:
        """Ask delta-rs about the table. It reads some parts of the Delta log only now, and upkeep may have
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
                with asking(self.uri, self._storage_options):
                    return DeltaTable(self.uri, storage_options=self._storage_options or None)
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
                f"another table {self.name!r} lies at {self.uri} than before: the commit log was removed and made "
                "anew. Open it again"
            )
        if table.version() < self._seen:
            raise CorruptLogError(
                f"table {self.name} is at version {table.version()}, and this process has seen version {self._seen}: "
                "entries of its Delta log were removed, or an older copy put in its place. Restore it from a copy"
            )
        self._entries.require_newest()

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
            if self._entries.is_newest(before, self.runtime.monotonic()) and self._id is not None:
                return before
            self._id = self._id or str(table.metadata().id)
            is_continuous = False
            try:
                with asking(self.uri, self._storage_options):
                    table.update_incremental()
                    self._entries.require_whole(before, int(table.version()))
                    # delta-rs notices neither a lost log nor a recreated one. Where no entry is left it sees no new
                    # entries, and it takes the entries of a recreated log for the next ones.
                    is_continuous = self._entries.goes_on(before, int(table.version()))
            except BaseException as problem:  # a panic of delta-rs is no Exception
                # The entries after ours were cleaned up, so the table must be opened anew from a checkpoint. Or one of
                # them is damaged, which opening reports.
                if not isinstance(problem, (DeltaError, CorruptLogError)) and not is_panic(problem):
                    raise
            finally:
                if not is_continuous:
                    self._lose()
            return self.version

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
            entries = self._entries.between(since, until)
            with asking(self.uri, self._storage_options):
                before = DeltaTable(self.uri, version=since, storage_options=self._storage_options or None)
            return changes(snapshot_of(before), snapshot_of(self._table), entries)
        except (DeltaError, FileNotFoundError, ValueError) as problem:
            raise ForeignChangeError(
                f"table {self.name} was changed by another writer after version {since}, and nobody can tell how: its "
                f"Delta log does not reach back so far ({plainly(str(problem), self._storage_options)}). Keep that "
                "writer away, and restore the log from a copy (docs/backup.md)"
            ) from cause_of(problem)

    def write(self, rows: pa.Table) -> DataFile:
        return write_file(self, rows)

    def missing(self, files: Sequence[DataFile]) -> list[DataFile]:
        paths = [f"{self.folder}/{f.path}" for f in files]
        with asking(self.uri, self._storage_options):
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
        return self._files.read(paths, self._row_counts, columns, where)

    def read_range(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        return read_range(self.fs, self.folder, wanted, columns, where)

    def _row_counts(self, paths: Sequence[str]) -> dict[str, int | None]:
        actions = self.actions()
        named = actions.filter(pc.is_in(actions["path"], value_set=pa.array(paths, pa.string())))
        return dict(zip(named["path"].to_pylist(), named["num_records"].to_pylist(), strict=True))

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
