"""One Delta table of a commit log, and the only way to commit to it: compare-and-set at the next version.

This module alone imports deltalake.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction

from rmq_spark.commitlog.files import DataFile, RowRange, check_path, filesystem, read_range, write_table
from rmq_spark.commitlog.seal import (
    ENTRY_SEAL,
    added,
    check_bounds,
    check_count,
    check_entries,
    check_groups,
    check_seal,
    entry_seal,
    is_panic,
    reading,
    removed,
    transaction,
)
from rmq_spark.errors import (
    CommitError,
    CorruptLogError,
    LogFormatError,
    LostCommitError,
    NotACommitLogError,
    TxmqError,
)
from rmq_spark.machine import MACHINE, Machine
from rmq_spark.redaction import cause_of, redacted

logger = logging.getLogger(__name__)

CHECKED_PARQUET = pads.ParquetFileFormat(
    default_fragment_scan_options=pads.ParquetFragmentScanOptions(page_checksum_verification=True)
)

COMMIT_TRIES_MAX = 200
"""Lost races before a commit gives up; each waits a little longer, up to BACKOFF_S_MAX."""
UNEXPECTED_ERRORS_MAX = 3
BACKOFF_S_MIN = 0.002
BACKOFF_S_MAX = 0.25
CHECKPOINT_INTERVAL = 100
ROW_GROUP_ROWS = 4_096
"""Of op, sorted by version: whoever wants the newest rows skips the row groups before them."""

BOUNDS = {
    "half_id": pa.string(),
    "version": pa.int64(),
    "next_offset": pa.int64(),
    "low_water": pa.int64(),
    "consumer_group": pa.string(),
}
"""Columns whose bounds in a file are looked at."""


@dataclass(frozen=True)
class Change:
    """What one commit does to a table."""

    add: Sequence[DataFile] = ()
    remove: Sequence[str] = ()
    transaction: tuple[str, int] | None = None
    modification_time_ms: int | None = None
    data_change: bool = True


class Table(Protocol):
    """A table of the commit log. ``DeltaLogTable`` is the real one, ``rmq_spark.testing`` has its twin."""

    name: str
    schema: pa.Schema
    folder: str
    fs: Any
    """A ``pyarrow.fs.FileSystem``, or as much of one as the tables need."""
    machine: Machine
    """Whose clock, locks and threads serve the table and all that stands on it."""
    lock: AbstractContextManager[object]
    """Whoever moves the handle holds it. Between ``decide`` and its commit no other thread may refresh, or the commit
    stands on a version that its decision never saw. The tables of a commit log share one."""

    @property
    def version(self) -> int:
        """The version that the last refresh saw."""

    def refresh(self) -> int:
        """Move to the newest version and return it."""

    def actions(self) -> pa.Table:
        """The live files: ``path, modification_time`` (ms), ``num_records``, and ``min.<column>, max.<column>`` of
        those columns of :data:`BOUNDS` that the table has."""

    def removed_since(self, age_s: float | None = None) -> set[str]:
        """Paths of files that a commit took out of the table (less than ``age_s`` ago), as far as its log knows."""

    def transaction_version(self, app_id: str) -> int | None:
        """The newest batch id that a commit with ``Change.transaction`` named for this application."""

    def write(self, rows: pa.Table, prefix: str, stats_columns: Sequence[str]) -> DataFile:
        """Write a data file; it belongs to the table once a commit adds it."""

    def read(
        self, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        """Rows of some live files."""

    def read_range(self, wanted: RowRange, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Rows of one half file by their address, with the position of the first of each part."""

    def compare_and_set(
        self, decide: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        """Refresh, decide, commit exactly at the next version; or refresh and decide again."""


def compare_and_set(
    table: Table,
    decide: Callable[[int], Change | None],
    landed: Callable[[Change], bool],
    try_commit: Callable[[Change], bool],
) -> Change | None:
    """The loop of every commit. Real tables and their twins share it.

    Parameters
    ----------
    decide : callable
        Given the next version, with the table refreshed: what to commit, or None when there is nothing (left) to do.
        Raising ends the loop with nothing written.
    landed : callable
        With the table refreshed: True when the rows of this change are in the table's state.
    try_commit : callable
        True when the commit was acknowledged; False when another writer had the version, or nobody knows.
        An exception is a failure of unknown outcome.

    Raises
    ------
    CommitError
        When the tries are used up.
    LostCommitError
        When a commit was acknowledged but the state does not have it: it went below the log's head.
    """
    failures = 0
    change: Change | None = None
    for tries in range(COMMIT_TRIES_MAX):
        table.refresh()
        # An earlier try of ours may have landed although it was reported lost.
        if change is not None and landed(change):
            return change
        change = decide(table.version + 1)
        if change is None:
            return None
        try:
            acknowledged = try_commit(change)
        except TxmqError:
            raise
        except Exception as problem:  # of unknown outcome: look before trying again
            failures += 1
            if failures >= UNEXPECTED_ERRORS_MAX:
                table.refresh()
                if landed(change):
                    return change
                raise CommitError(
                    f"a commit to table {table.name} failed {failures} times, the last time with "
                    f"{type(problem).__name__}: {problem}"
                ) from cause_of(problem)
            acknowledged = False
        if acknowledged:
            table.refresh()
            if not landed(change):
                raise LostCommitError(
                    f"a commit to table {table.name} was acknowledged, but version {table.version} does not hold its "
                    "rows: this process slept past the clean-up of the table's log. Restart it"
                )
            return change
        table.machine.sleep(table.machine.random() * min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** min(tries, 10)))
    table.refresh()
    if change is not None and landed(change):
        return change
    raise CommitError(f"a commit to table {table.name} lost {COMMIT_TRIES_MAX} races in a row: too many writers")


def actions_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of :meth:`Table.actions` for a table with this schema."""
    fields = [("path", pa.string()), ("modification_time", pa.int64()), ("num_records", pa.int64())]
    bounds = [(name, kind) for name, kind in BOUNDS.items() if name in schema.names]
    return pa.schema(fields + [(f"{side}.{name}", kind) for side in ("min", "max") for name, kind in bounds])


class DeltaLogTable:
    """A Delta table of a commit log, through delta-rs."""

    def __init__(
        self,
        uri: str,
        name: str,
        schema: pa.Schema,
        storage_options: Mapping[str, str] | None,
        machine: Machine = MACHINE,
    ) -> None:
        self.machine = machine
        self.name = name
        self.schema = schema
        self._uri = uri
        self._storage_options = dict(storage_options or {})
        self._delta_schema = Schema.from_arrow(schema)
        self.fs: pafs.FileSystem
        self.fs, self.folder = filesystem(uri, storage_options)
        self.lock = machine.lock()
        self._actions: tuple[int, pa.Table] | None = None
        # half has a file or more a transaction: it opens while op is read, and for readers of op not at all.
        self._opening = self._open_in_background()

    @staticmethod
    def create(
        uri: str,
        name: str,
        schema: pa.Schema,
        storage_options: Mapping[str, str] | None,
        configuration: Mapping[str, str],
    ) -> None:
        """Make the empty table; one that is there already is left as it is."""
        settings: dict[str, str | None] = {
            "delta.appendOnly": "true",
            "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
            "delta.enableExpiredLogCleanup": "true",
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
                commit_properties=CommitProperties(
                    max_commit_retries=0, custom_metadata={ENTRY_SEAL: entry_seal(0, ())}
                ),
            )
        except DeltaError as problem:
            if not DeltaTable.is_deltatable(uri, dict(storage_options or {}) or None):
                raise NotACommitLogError(f"table {name} cannot be created at {uri}: {problem}") from cause_of(problem)

    @staticmethod
    def exists(uri: str, storage_options: Mapping[str, str] | None) -> bool:
        """True when the folder holds a Delta table."""
        return bool(DeltaTable.is_deltatable(uri, dict(storage_options or {}) or None))

    @property
    def _table(self) -> DeltaTable:
        return self.wait_until_open()

    def wait_until_open(self) -> DeltaTable:
        """The table opens in the background; here, or at its first use, one hears that it cannot be opened."""
        return self._opening.result()

    def _open_in_background(self) -> Future[DeltaTable]:
        return ThreadPoolExecutor(1, f"txmq-open-{self.name}").submit(self._open)

    def _open(self) -> DeltaTable:
        try:
            table = DeltaTable(self._uri, storage_options=self._storage_options or None)
        except TableNotFoundError as problem:
            said = f"no Delta table {self.name!r} at {self._uri}: is it a commit log?"
            raise NotACommitLogError(said) from cause_of(problem)
        except BaseException as problem:  # a panic of delta-rs is no Exception
            if not isinstance(problem, DeltaError) and not is_panic(problem):
                raise
            raise NotACommitLogError(
                f"the Delta table {self.name!r} at {self._uri} cannot be opened: {problem}"
            ) from cause_of(problem)
        self._check_entries(table, -1)
        have = set(pa.schema(table.schema().to_arrow()).names)
        missing = [n for n in self.schema.names if n not in have]
        if missing:
            raise LogFormatError(
                f"table {self.name} has no column {missing[0]!r}: it was changed by hand, or is no log"
            )
        return table

    @property
    def version(self) -> int:
        return int(self._table.version())

    @property
    def configuration(self) -> dict[str, str]:
        """The table's properties."""
        return dict(self._table.metadata().configuration)

    def refresh(self) -> int:
        with self.lock:
            before = self.version
            try:
                self._table.update_incremental()
                self._check_entries(self._table, before)
            except BaseException as problem:  # a panic of delta-rs is no Exception
                if not isinstance(problem, (DeltaError, CorruptLogError)) and not is_panic(problem):
                    raise
                # The entries after ours are cleaned up, and only a checkpoint knows the way from here; or one of them
                # is damaged, and opening says so, now and at every later use.
                self._opening = self._open_in_background()
                self._actions = None
            return self.version

    def _check_entries(self, table: DeltaTable, since: int) -> None:
        """Raise CorruptLogError for damaged entries of the Delta log after version ``since``.

        On a local disk only: an object store checks its objects itself, and has no half-written ones.
        """
        if isinstance(self.fs, pafs.LocalFileSystem):
            check_entries(Path(self.folder, "_delta_log"), self.name, since, int(table.version()))

    def actions(self) -> pa.Table:
        with self.lock:
            version = self.version
            if self._actions is None or self._actions[0] != version:
                self._actions = (version, self._read_actions())
            return self._actions[1]

    def _read_actions(self) -> pa.Table:
        live = pa.table(self._table.get_add_actions(flatten=True))
        schema = actions_schema(self.schema)
        # A column without a single value in any file has no statistics at all.
        columns = {
            f.name: pc.cast(live[f.name], f.type) if f.name in live.column_names else pa.nulls(live.num_rows, f.type)
            for f in schema
        }
        actions = pa.table(columns, schema=schema)
        check_bounds(actions, self.name)
        return actions

    def removed_since(self, age_s: float | None = None) -> set[str]:
        def removed_before(hours: int) -> set[str]:
            listed = self._table.vacuum(retention_hours=hours, dry_run=True, enforce_retention_duration=False)
            return {unquote(p) for p in listed}

        with self.lock:
            removed = removed_before(0)
            return removed if age_s is None else removed - removed_before(int(age_s // 3600))

    def transaction_version(self, app_id: str) -> int | None:
        with self.lock:
            return self._table.transaction_version(app_id)

    def write(self, rows: pa.Table, prefix: str, stats_columns: Sequence[str]) -> DataFile:
        return write_table(
            self.fs, self.folder, rows, prefix=prefix, stats_columns=stats_columns, row_group_rows=ROW_GROUP_ROWS
        )

    def read(
        self, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        names = list(columns) if columns is not None else self.schema.names
        if not paths:
            return pa.schema([self.schema.field(n) for n in names]).empty_table()
        full = [f"{self.folder}/{check_path(p, self.name)}" for p in paths]
        try:
            dataset = pads.dataset(full, schema=self.schema, format=CHECKED_PARQUET, filesystem=self.fs)
            self._check_files(dataset, paths)
            return dataset.to_table(columns=names, filter=where)
        except (OSError, pa.ArrowException, ValueError):
            for path, file in zip(paths, full, strict=True):  # which of them is it?
                with reading(path, self.name):
                    one = pads.dataset([file], schema=self.schema, format=CHECKED_PARQUET, filesystem=self.fs)
                    self._check_files(one, [path])
                    one.to_table(columns=names, filter=where)
            raise

    def read_range(self, wanted: RowRange, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        return read_range(self.fs, self.folder, wanted, columns)

    def _check_files(self, dataset: pads.Dataset, paths: Sequence[str]) -> None:
        """Raise CorruptLogError for files that are not what the table's log means."""
        actions = self.actions()
        named = actions.filter(pc.is_in(actions["path"], value_set=pa.array(paths, pa.string())))
        rows = dict(zip(named["path"].to_pylist(), named["num_records"].to_pylist(), strict=True))
        for fragment in dataset.get_fragments():
            path = fragment.path.removeprefix(f"{self.folder}/")
            check_seal(fragment.physical_schema, path, self.name, self.schema.names)
            check_count(fragment.metadata.num_rows, rows.get(path), path, self.name)
            check_groups(fragment.metadata, path, self.name)

    def compare_and_set(
        self, decide: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        with self.lock:
            return compare_and_set(self, decide, landed, self.try_commit)

    def try_commit(self, change: Change) -> bool:
        now_ms = self.machine.time_ms()
        written_ms = change.modification_time_ms or now_ms
        actions: list[AddAction | RemoveAction] = [
            AddAction(f.path, f.size_bytes, {}, written_ms, change.data_change, f.stats) for f in change.add
        ]
        actions += [
            RemoveAction(path=p, data_change=change.data_change, deletion_timestamp=now_ms) for p in change.remove
        ]
        transactions = [Transaction(*change.transaction)] if change.transaction else None
        said = [added(f.path, f.size_bytes, written_ms, f.stats) for f in change.add]
        said += [removed(p) for p in change.remove]
        said += [transaction(*change.transaction)] if change.transaction else []
        seal = {ENTRY_SEAL: entry_seal(self.version + 1, said)}
        try:
            self._table.create_write_transaction(
                actions,
                mode="append",
                schema=self._delta_schema,
                commit_properties=CommitProperties(
                    max_commit_retries=0, app_transactions=transactions, custom_metadata=seal
                ),
            )
        except CommitFailedError as problem:
            logger.debug("commit to %s at version %d: %s", self.name, self.version + 1, redacted(problem))
            return False
        return True


def claim_table(uri: str, storage_options: Mapping[str, str] | None) -> bool | None:
    """Create an empty table: True when it was created, False when the put of its first entry was refused because
    another writer's was there, None when that was seen before it came to the put."""
    options = dict(storage_options or {}) or None
    schema = Schema.from_arrow(pa.schema([("version", pa.int64())]))
    try:
        DeltaTable.create(
            uri, schema, storage_options=options, commit_properties=CommitProperties(max_commit_retries=0)
        )
    except CommitFailedError:
        return False
    except DeltaError as problem:
        if DeltaTable.is_deltatable(uri, options):
            return None
        raise NotACommitLogError(f"a table cannot be created at {uri}: {problem}") from cause_of(problem)
    return True


def remove_table(uri: str, storage_options: Mapping[str, str] | None) -> None:
    """Remove what :func:`claim_table` made, if anything."""
    fs, folder = filesystem(uri, storage_options)
    if isinstance(fs, pafs.LocalFileSystem):
        if Path(folder).is_dir():
            fs.delete_dir(folder)
    else:  # pyarrow would put empty objects in the place of folders
        DeltaStorageHandler(uri, dict(storage_options or {}) or None).delete_dir("_delta_log")
