"""Copies a commit log while programs use it. The copy is the log's state at one moment.

``op`` has the outcome of every message, so the copy must contain all that one version of ``op`` names. The tables are
read in this order, each at its newest version::

    half (first look)   groups   messages   op   half   topics

    groups    has positions in op            → before op
    messages  has rows that op placed        → before op, or it would be ahead of op
    op        names rows of half             → before half, which only grows meanwhile: a half batch without op rows
                                               is pending in the copy, as after a crash
    topics    are named by messages          → last

But ``half`` also shrinks, because upkeep lets drained half batches leave. A half batch that left between the looks at
``messages`` and ``half`` would be in neither. So all looks are repeated when a file left ``half`` between its two
looks.

An existing copy is updated in these steps::

    missing data files ─▶ one file with all Delta logs ─▶ delete topics ─▶ Delta logs ─▶ topics ─▶ delete old files

A crash before the second arrow leaves the older copy as it was. After it, that one file has all that is needed, and
the next call continues. Without ``topics`` no program opens the half-updated copy as a log.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from rmq_spark._core.client.delta_tables import DeltaTables, require_no_log_around
from rmq_spark._core.log.op_walk import rows_above
from rmq_spark._core.messages.drain import OP_ROWS_MAX
from rmq_spark._core.messages.messages_table import drained_up_to
from rmq_spark._core.storage.copy import LOG, LOG_FILE, FileGoneError, Folder, Pin, pin
from rmq_spark._core.storage.foreign_commits import require_own
from rmq_spark._core.storage.location import is_uri, location
from rmq_spark._core.storage.stores import reaching, require_storage_options
from rmq_spark._core.storage.table import live_paths
from rmq_spark._core.vocabulary.text import byte_size, count_of
from rmq_spark.errors import CommitLogExistsError, CorruptLogError, LostFileError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.storage.table import Table

MANIFEST = "txmq_backup.json"
"""The file in a copy with its log's id, its time, and its tables' versions."""
SWITCH = "txmq_backup.zip"
"""The file in a copy during an update, with the manifest and the Delta logs of all tables."""
TABLES = frozenset({"half", "op", "topics", "groups", "messages"})
_DATA_FILE = re.compile(rf"({'|'.join(sorted(TABLES))})/[^/]+\.parquet")
"""Matches data files. Other files there are foreign."""
LOOKS_MAX = 50
"""The most rounds of looks at the tables, repeated because half batches left in between."""
PINS_MAX = 10
"""The most restarts of a copy, because upkeep deleted files before they were copied. Copied files stay."""

Progress = Callable[[int, int], None]
"""Called with the number of copied bytes, and the total."""


@dataclass(frozen=True)
class BackupReport:
    """The result of a backup.

    Attributes
    ----------
    target : str
        The copy's place.
    taken_at : datetime
        The moment of the copied state (UTC). Later sends are not in the copy.
    versions : mapping of str to int
        The tables of the copy and their versions.
    files_copied, bytes_copied : int
        Data files that the target lacked.
    files_kept : int
        Data files that an older copy already had.
    files_deleted : int
        Files that only the older copy needed.
    """

    target: str
    taken_at: datetime
    versions: Mapping[str, int] = field(default_factory=dict)
    files_copied: int = 0
    bytes_copied: int = 0
    files_kept: int = 0
    files_deleted: int = 0

    def __str__(self) -> str:
        copied = f"{count_of(self.files_copied, 'file')} ({byte_size(self.bytes_copied)}) copied"
        kept = f", {count_of(self.files_kept, 'file')} there already" if self.files_kept else ""
        deleted = f", {count_of(self.files_deleted, 'old file')} deleted" if self.files_deleted else ""
        return f"{self.target} is the log as it was at {self.taken_at:%Y-%m-%d %H:%M:%S}Z: {copied}{kept}{deleted}"


@dataclass(frozen=True)
class Manifest:
    """The content of a copy's manifest. While the first copy is unfinished, it has neither a time nor versions."""

    log_id: str
    taken_at: datetime | None = None
    versions: Mapping[str, int] | None = None

    @classmethod
    def of(cls, content: bytes, where: str) -> Manifest:
        """Parse a manifest's content, or raise CorruptLogError."""
        try:
            fields = json.loads(content)
            taken_at = fields["taken_at"]
            return cls(
                str(fields["log_id"]),
                None if taken_at is None else datetime.fromisoformat(taken_at),
                fields["versions"],
            )
        except (ValueError, KeyError, TypeError):
            raise CorruptLogError(
                f"{where}/{MANIFEST} is damaged, so nobody knows of which log this is a copy: back up to another place"
            ) from None

    def content(self) -> bytes:
        taken_at = None if self.taken_at is None else self.taken_at.isoformat()
        return json.dumps({"log_id": self.log_id, "taken_at": taken_at, "versions": self.versions}).encode()


def back_up(
    engine: Engine,
    target: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> BackupReport:
    where = location(target)
    options = dict(engine.storage_options if storage_options is None else storage_options) if is_uri(where) else {}
    require_storage_options(where, options)
    _require_apart(engine.path, where)
    source = engine.new_handle()
    with reaching(where, options):
        require_no_log_around(where, options)
        copy = _Copy(where, options)
        copy.begin(source.id)
        files_before = copy.files()
        taken_at, pins = _fetch(source, copy, progress)
        copy.switch(Manifest(source.id, taken_at, {p.name: p.version for p in pins}), pins)
        _verify(where, options, pins)
        deleted = copy.clean(pins)
    all_files = {f"{p.name}/{path}": size for p in pins for path, size in p.files.items()}
    new_files = {name: size for name, size in all_files.items() if files_before.get(name) != size}
    return BackupReport(
        where,
        taken_at,
        {p.name: p.version for p in pins},
        files_copied=len(new_files),
        bytes_copied=sum(new_files.values()),
        files_kept=len(all_files) - len(new_files),
        files_deleted=deleted,
    )


def finish(path: str | os.PathLike[str], storage_options: Mapping[str, str] | None) -> None:
    """Finish a half-finished copy, so that it can be opened. This changes nothing else."""
    where = location(path)
    require_storage_options(where, storage_options)
    with reaching(where, storage_options):
        _Copy(where, storage_options).finish()


def manifest_of(path: str, storage_options: Mapping[str, str] | None) -> Manifest | None:
    """Return a copy's manifest, even after the copy replaced its log; None for a log that is no copy."""
    with reaching(path, storage_options):
        content = Folder(path, storage_options).read(MANIFEST)
    return None if content is None else Manifest.of(content, path)


def _require_apart(log: str, target: str) -> None:
    """Raise OptionError when the log and the target are the same, or one lies in the other."""
    log_path, target_path = (path if is_uri(path) else os.path.realpath(path) for path in (log, target))
    if log_path == target_path:
        raise OptionError(f"{target} is the commit log itself: name another place for its copy")
    for inner, outer in ((target_path, log_path), (log_path, target_path)):
        if inner.startswith(f"{outer}/"):
            raise OptionError(
                f"{inner} lies inside {outer}: a commit log and its copy lie side by side, best on two disks"
            )


# ---------------------------------------------------------------- the state at one moment
def _fetch(source: Engine, copy: _Copy, progress: Progress | None) -> tuple[datetime, list[Pin]]:
    """Copy the missing data files. Return the moment of the copied state, and the tables."""
    lost = ""
    for _ in range(PINS_MAX):
        taken_at = source.runtime.now()
        pins = _pins(source)
        if any(f"{p.name}/{path}" == lost for p in pins for path in p.files):
            raise LostFileError(
                f"file {lost} is not there, and its table names it: the log is damaged, and the copy was left as it was"
            )
        copy.require_older(pins)
        try:
            copy.fetch(pins, progress)
        except FileGoneError as problem:
            lost = problem.name
            continue
        older = manifest_of(source.path, source.storage_options)  # set when the source is a copy, as in a restore
        if older is not None and older.taken_at and older.versions == {p.name: p.version for p in pins}:
            taken_at = older.taken_at
        return min(taken_at, _newest(pins)), pins  # this machine's clock may be ahead of the writers' clocks
    raise CorruptLogError(
        f"upkeep deleted files before they were copied, {PINS_MAX} times, the last one was {lost}: stop upkeep for the "
        "time of a backup"
    )


def _newest(pins: Sequence[Pin]) -> datetime:
    """Return the time of the last write to a table, by the writers' clocks."""
    times = [pc.max(p.table.actions()["modification_time"]).as_py() or 0 for p in pins]
    return datetime.fromtimestamp(max(times) / 1000, timezone.utc)


def _pins(engine: Engine) -> list[Pin]:
    """Return the tables' state at one moment, with ``topics`` last."""
    half = engine.half.table
    for _ in range(LOOKS_MAX):
        half.refresh()
        first_look = _state_of(half)
        groups = [pin(engine.groups.table)] if engine.has_groups() else []
        messages = pin(engine.messages_table)
        require_own(engine.messages_table)
        op = pin(engine.op_table)
        lost = _not_in_half(engine, op.version)
        pins = [*groups, messages, op, pin(half), pin(engine.topics_table)]
        if not _has_left(half, first_look):
            if lost:
                raise CorruptLogError(
                    f"op places messages of half batch {lost[0]!r}, and neither half nor messages has them: the log is "
                    "damaged (txmq doctor), and the copy was left as it was"
                )
            return pins
    raise CorruptLogError(
        f"half batches left the table half in {LOOKS_MAX} looks at the tables: stop upkeep for the time of a backup"
    )


def _state_of(half: Table) -> tuple[set[str], set[str]]:
    return set(live_paths(half)), half.removed_since()


def _has_left(half: Table, first_look: tuple[set[str], set[str]]) -> bool:
    """Return True when files have left ``half`` since the first look."""
    (live, removed), (first_live, first_removed) = _state_of(half), first_look
    return bool(first_live - live or removed - first_removed)


def _not_in_half(engine: Engine, until: int) -> list[str]:
    """Return half batches that have placed messages which are not drained, and that ``half`` lacks."""
    placed: set[str] = set()
    position = drained_up_to(engine.messages_table)
    while position < until:
        rows, position = rows_above(
            engine.op_table, position, until, OP_ROWS_MAX, ["version", "half_id", "queue_offset"]
        )
        placed.update(rows.filter(pc.is_valid(rows["queue_offset"]))["half_id"].to_pylist())
    batches = engine.half.contents.all_batches()
    batches.require_all()
    return sorted(placed.difference(batches))


def _verify(where: str, storage_options: Mapping[str, str], pins: Sequence[Pin]) -> None:
    """Open the copy, and read the newest file of each table."""
    from rmq_spark._core.protocol.engine import Engine

    tables = {table.name: table for table in Engine(DeltaTables.open(where, storage_options or None)).tables()}
    for copied in pins:
        table = tables[copied.name]
        version, files = table.refresh(), table.actions()
        if version != copied.version or set(files["path"].to_pylist()) != copied.files.keys():
            raise CorruptLogError(
                f"table {copied.name} of the copy {where} is at version {version}, and {copied.version} was copied, or "
                "it names other files: somebody wrote to the copy. Back up to another place"
            )
        table.read(files.sort_by("modification_time")["path"].to_pylist()[-1:])


# ---------------------------------------------------------------- the copy
class _Copy:
    def __init__(self, where: str, storage_options: Mapping[str, str] | None) -> None:
        self._where = where
        self._folder = Folder(where, storage_options)
        self._versions: Mapping[str, int] = {}

    def begin(self, log_id: str) -> None:
        """Finish an interrupted update, and require an empty place or an older copy of the log: another log, foreign
        content, and a copy to which a program has written are a CommitLogExistsError."""
        self.finish()
        content = self._folder.read(MANIFEST)
        if content is None:
            if not self._folder.is_empty():
                raise CommitLogExistsError(
                    f"{self._where} is not empty, and is no copy that a backup made: name an empty place"
                )
            self._folder.put(MANIFEST, Manifest(log_id).content())
            return
        older = Manifest.of(content, self._where)
        if older.log_id != log_id:
            raise CommitLogExistsError(
                f"{self._where} has a copy of another commit log (its id is {older.log_id}, and this one's {log_id}): "
                "name another place"
            )
        self._versions = older.versions or {}
        versions = self._newest()
        if versions != self._versions:
            raise CommitLogExistsError(
                f"{self._where} was written to since it was copied (a backup left its tables at {self._versions}, and "
                f"they are at {versions}): it is in use as a log of its own. Back up to another place"
            )

    def _newest(self) -> dict[str, int]:
        """Return the present tables, and their versions by the names of their log entries."""
        versions: dict[str, int] = {}
        for name in self._folder.sizes(""):
            table, _, entry = name.partition(f"/{LOG}/")
            if entry.endswith(".json") and entry[:-5].isdigit():
                versions[table] = max(int(entry[:-5]), versions.get(table, 0))
        return versions

    def require_older(self, pins: Sequence[Pin]) -> None:
        """Raise CommitLogExistsError when the copy has versions that the log does not have."""
        for log_pin in pins:
            version = self._versions.get(log_pin.name)
            if version is None:
                continue
            if version > log_pin.version:
                raise self._is_newer(
                    f"its table {log_pin.name} is at version {version}, and the log's at {log_pin.version}"
                )
            entry = f"{LOG}/{version:020d}.json"
            copied_entry = self._folder.read(f"{log_pin.name}/{entry}")
            if copied_entry != (_entry_of(log_pin, entry) or copied_entry):
                raise self._is_newer(f"version {version} of its table {log_pin.name} is another one than the log's")

    def _is_newer(self, why: str) -> CommitLogExistsError:
        return CommitLogExistsError(
            f"{self._where} has what the log does not have ({why}): the log was set back since this copy was made. The "
            "copy was left as it was; back up to another place"
        )

    def files(self) -> dict[str, int]:
        """Return the data files, as ``<table>/<file>``, and their sizes."""
        sizes = self._folder.sizes("")
        return {name: size for name, size in sizes.items() if _DATA_FILE.fullmatch(name) is not None}

    def fetch(self, pins: Sequence[Pin], progress: Progress | None) -> None:
        """Copy the data files that are missing here or incomplete, or raise FileGoneError."""
        existing = self.files()
        missing = {
            p.name: {path: size for path, size in p.files.items() if existing.get(f"{p.name}/{path}") != size}
            for p in pins
        }
        total = sum(sum(files.values()) for files in missing.values())
        copied = 0

        def add_copied(size: int) -> None:
            nonlocal copied
            copied += size
            if progress is not None:
                progress(copied, total)

        for p in pins:
            self._folder.copy(p.table, missing[p.name], add_copied)

    def switch(self, manifest: Manifest, pins: Sequence[Pin]) -> None:
        """Switch the tables to the copied state. After a crash within, :meth:`finish` completes it."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as file:
            file.writestr(MANIFEST, manifest.content())
            for p in pins:
                for name, content in p.log.items():
                    file.writestr(f"{p.name}/{LOG}/{name}", content)
        self._folder.put(SWITCH, packed.getvalue())
        self._folder.delete([MANIFEST])  # from here on a crash leads to finish()
        self._apply(packed.getvalue())

    def finish(self) -> None:
        packed = self._folder.read(SWITCH)
        if packed is None:
            return
        content = self._folder.read(MANIFEST)
        with suppress(CorruptLogError):  # a crash may have cut the manifest's write
            if content is not None and Manifest.of(content, self._where):  # not begun, or done except for this file
                self._folder.delete([SWITCH])
                return
        versions = Manifest.of(self._unpacked(packed)[0], self._where).versions or {}
        if all(version <= versions.get(table, -1) for table, version in self._newest().items()):
            self._apply(packed)

    def _unpacked(self, packed: bytes) -> tuple[bytes, dict[str, bytes]]:
        """Return the manifest, and the Delta logs' files by name. A file that is unreadable, or has any other file,
        whose name could be any path, is a CorruptLogError."""
        try:
            with zipfile.ZipFile(io.BytesIO(packed)) as file:
                log_files = {name: file.read(name) for name in file.namelist()}
            manifest = log_files.pop(MANIFEST)
        except (zipfile.BadZipFile, KeyError, ValueError, OSError):
            raise CorruptLogError(f"{self._where}/{SWITCH} is damaged: back up to another place") from None
        for name in log_files:
            table, _, entry = name.partition(f"/{LOG}/")
            if table not in TABLES or LOG_FILE.fullmatch(entry) is None:
                raise CorruptLogError(
                    f"{self._where}/{SWITCH} has {name!r}, which is no file of a Delta log: somebody else wrote it. "
                    "Back up to another place"
                )
        return manifest, log_files

    def _apply(self, packed: bytes) -> None:
        manifest, logs = self._unpacked(packed)
        existing = [name for name in self._folder.sizes("") if f"/{LOG}/" in name]
        # Without topics no program opens the copy. Until topics is back, the tables have states of two moments.
        self._folder.delete(name for name in existing if name.startswith("topics/"))
        self._folder.delete(name for name in existing if name not in logs)
        for name in sorted(logs, key=lambda name: (name.startswith("topics/"), name)):
            self._folder.put(name, logs[name])
        self._folder.put(MANIFEST, manifest)
        self._folder.delete([SWITCH])

    def clean(self, pins: Sequence[Pin]) -> int:
        """Delete data files that the copy no longer needs, and return their number."""
        needed = {f"{p.name}/{path}" for p in pins for path in p.files}
        old = [name for name in self.files() if name not in needed]
        self._folder.delete(old)
        return len(old)


def _entry_of(log_pin: Pin, entry: str) -> bytes | None:
    """Return an entry of the log's Delta log; None when it no longer exists."""
    try:
        with log_pin.table.fs.open_input_stream(f"{log_pin.table.folder}/{entry}") as stream:
            return bytes(stream.readall())
    except FileNotFoundError:
        return None
