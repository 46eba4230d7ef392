"""Copies a commit log while programs use it, so that the copy is the log as it was at one moment.

``op`` says what became of every message, so all that one version of ``op`` names must be in the copy. The tables are
looked at in this order, each at its newest version::

    half (first look)   groups   messages   op   half   topics

    groups    has positions in op            → before op
    messages  has what op placed             → before op, or it would be ahead of it
    op        names rows of half             → before half, which only grows meanwhile: a half batch about which op
                                               says nothing yet is pending in the copy, as after a crash
    topics    are named by messages          → last

``half`` does not only grow: upkeep lets half batches leave that are drained. One that left between the look at
``messages`` and the look at ``half`` would be in neither. So all looks are repeated when a file left ``half`` between
its two looks.

A copy that is there is brought up to date::

    data files that it lacks ─▶ one file with all Delta logs ─▶ topics away ─▶ Delta logs ─▶ topics ─▶ old files away

Whoever dies before the second arrow leaves the older copy as it was. Later that one file has all that is needed, and
the next call goes on from there. Without ``topics`` nobody takes what is there for a log.
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

from rmq_spark._core.client.tables import DeltaTables, require_no_log_around
from rmq_spark._core.log.walk import rows_above
from rmq_spark._core.messages.drain import OP_ROWS_MAX
from rmq_spark._core.messages.table import drained_up_to
from rmq_spark._core.storage.copy import LOG, LOG_FILE, FileGoneError, Folder, Pin, pin
from rmq_spark._core.storage.location import is_uri, location
from rmq_spark._core.storage.stores import reaching, require_storage_options
from rmq_spark._core.storage.table import require_own
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.errors import CommitLogExistsError, CorruptLogError, LostFileError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.storage.table import Table

MANIFEST = "txmq_backup.json"
"""In a copy: of which log it is, when it was taken, and the versions of its tables."""
SWITCH = "txmq_backup.zip"
"""In a copy that is being brought up to date: the manifest, and the Delta logs of all tables."""
TABLES = frozenset({"half", "op", "topics", "groups", "messages"})
_DATA_FILE = re.compile(rf"({'|'.join(sorted(TABLES))})/[^/]+\.parquet")
"""Whatever else lies there is somebody else's."""
LOOKS_MAX = 50
"""So often the tables are looked at again because half batches left between two looks."""
PINS_MAX = 10
"""So often a copy begins anew because upkeep deleted files that it was about to copy. Those that it has stay."""

Progress = Callable[[int, int], None]
"""Is told how many bytes are copied, and of how many."""


@dataclass(frozen=True)
class BackupReport:
    """What a backup did.

    Attributes
    ----------
    target : str
        Where the copy is.
    taken_at : datetime
        When the log was as the copy has it (UTC). Whatever was sent later is not in it.
    versions : mapping of str to int
        The tables of the copy and their versions.
    files_copied, bytes_copied : int
        Data files that the target lacked.
    files_kept : int
        Data files that an older copy had already.
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
        copied = f"{count_of(self.files_copied, 'file')} ({self.bytes_copied / 1e6:.1f} MB) copied"
        kept = f", {count_of(self.files_kept, 'file')} there already" if self.files_kept else ""
        deleted = f", {count_of(self.files_deleted, 'old file')} deleted" if self.files_deleted else ""
        return f"{self.target} is the log as it was at {self.taken_at:%Y-%m-%d %H:%M:%S}Z: {copied}{kept}{deleted}"


@dataclass(frozen=True)
class Manifest:
    """What a copy says of itself.

    Attributes
    ----------
    log_id : str
    taken_at : datetime or None
        None, as are the versions, while the first copy is not finished.
    versions : mapping of str to int, or None
    """

    log_id: str
    taken_at: datetime | None = None
    versions: Mapping[str, int] | None = None

    @classmethod
    def of(cls, content: bytes, where: str) -> Manifest:
        """From a file's content.

        Raises
        ------
        CorruptLogError
        """
        try:
            said = json.loads(content)
            at = said["taken_at"]
            return cls(str(said["log_id"]), None if at is None else datetime.fromisoformat(at), said["versions"])
        except (ValueError, KeyError, TypeError):
            raise CorruptLogError(
                f"{where}/{MANIFEST} is damaged, so nobody knows of which log this is a copy: back up to another place"
            ) from None

    def content(self) -> bytes:
        """As a file has it."""
        at = None if self.taken_at is None else self.taken_at.isoformat()
        return json.dumps({"log_id": self.log_id, "taken_at": at, "versions": self.versions}).encode()


def back_up(
    log: Engine,
    target: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> BackupReport:
    """Copy a commit log. See :meth:`CommitLog.backup`."""
    where = location(target)
    options = dict(log.storage_options if storage_options is None else storage_options) if is_uri(where) else {}
    require_storage_options(where, options)
    _require_apart(log.path, where)
    source = log.another_on_the_same_log()
    with reaching(where, options):
        require_no_log_around(where, options)
        copy = _Copy(where, options)
        copy.begin(source.id)
        had = copy.files()
        taken_at, pins = _fetch(source, copy, progress)
        copy.switch(Manifest(source.id, taken_at, {p.name: p.version for p in pins}), pins)
        _verify(where, options, pins)
        deleted = copy.clean(pins)
    every = {f"{p.name}/{path}": size for p in pins for path, size in p.files.items()}
    new = {name: size for name, size in every.items() if had.get(name) != size}
    return BackupReport(
        where,
        taken_at,
        {p.name: p.version for p in pins},
        files_copied=len(new),
        bytes_copied=sum(new.values()),
        files_kept=len(every) - len(new),
        files_deleted=deleted,
    )


def finish(path: str | os.PathLike[str], storage_options: Mapping[str, str] | None) -> None:
    """Finish a copy that a crash left half-way, so that it can be opened. Nothing else is touched."""
    where = location(path)
    require_storage_options(where, storage_options)
    with reaching(where, storage_options):
        _Copy(where, storage_options).finish()


def manifest_of(path: str, storage_options: Mapping[str, str] | None) -> Manifest | None:
    """What a copy says of itself, also after it was put in the place of its log; None for a log that is no copy."""
    with reaching(path, storage_options):
        said = Folder(path, storage_options).read(MANIFEST)
    return None if said is None else Manifest.of(said, path)


def _require_apart(log: str, target: str) -> None:
    """Raise OptionError when one lies in the other, or is the other."""
    one, other = (path if is_uri(path) else os.path.realpath(path) for path in (log, target))
    if one == other:
        raise OptionError(f"{target} is the commit log itself: name another place for its copy")
    for inner, outer in ((other, one), (one, other)):
        if inner.startswith(f"{outer}/"):
            raise OptionError(
                f"{inner} lies inside {outer}: a commit log and its copy lie side by side, best on two disks"
            )


# ---------------------------------------------------------------- one moment
def _fetch(source: Engine, copy: _Copy, progress: Progress | None) -> tuple[datetime, list[Pin]]:
    """Copy the data files that the copy lacks. Returns when the log was so, and its tables."""
    gone = ""
    for _ in range(PINS_MAX):
        taken_at = source.machine.now()
        pins = _pins(source)
        if any(f"{p.name}/{path}" == gone for p in pins for path in p.files):
            raise LostFileError(
                f"file {gone} is not there, and its table names it: the log is damaged, and the copy was left as it was"
            )
        copy.require_older(pins)
        try:
            copy.fetch(pins, progress)
        except FileGoneError as problem:
            gone = problem.name
            continue
        older = manifest_of(source.path, source.storage_options)  # a copy that is copied, as a restore does
        if older is not None and older.taken_at and older.versions == {p.name: p.version for p in pins}:
            taken_at = older.taken_at
        return min(taken_at, _newest(pins)), pins  # this machine's clock may be ahead
    raise CorruptLogError(
        f"upkeep deleted files before they were copied, {PINS_MAX} times, the last one was {gone}: stop upkeep for the "
        "time of a backup"
    )


def _newest(pins: Sequence[Pin]) -> datetime:
    """When somebody has written to a table last, by the writers' clocks."""
    times = [pc.max(p.table.actions()["modification_time"]).as_py() or 0 for p in pins]
    return datetime.fromtimestamp(max(times) / 1000, timezone.utc)


def _pins(log: Engine) -> list[Pin]:
    """The tables as they were at one moment; ``topics`` is the last of them."""
    half = log.half.table
    for _ in range(LOOKS_MAX):
        half.refresh()
        before = _state_of(half)
        groups = [pin(log.groups.table)] if log.has_groups() else []
        messages = pin(log.messages_table)
        require_own(log.messages_table)
        op = pin(log.op)
        lost = _not_in_half(log, op.version)
        pins = [*groups, messages, op, pin(half), pin(log.topics_table)]
        if not _has_left(half, before):
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
    return set(half.actions()["path"].to_pylist()), half.removed_since()


def _has_left(half: Table, before: tuple[set[str], set[str]]) -> bool:
    """Whether files left ``half`` since."""
    (live, removed), (live_before, removed_before) = _state_of(half), before
    return bool(live_before - live or removed - removed_before)


def _not_in_half(log: Engine, until: int) -> list[str]:
    """Half batches of which messages are placed and not drained, and that ``half`` does not have."""
    placed: set[str] = set()
    position = drained_up_to(log.messages_table)
    while position < until:
        rows, position = rows_above(log.op, position, until, OP_ROWS_MAX, ["version", "half_id", "queue_offset"])
        placed.update(rows.filter(pc.is_valid(rows["queue_offset"]))["half_id"].to_pylist())
    return sorted(placed.difference(log.half.counted()["half_id"].to_pylist()))


def _verify(where: str, storage_options: Mapping[str, str], pins: Sequence[Pin]) -> None:
    """Open the copy, and read the newest file of each table.

    Raises
    ------
    CorruptLogError, NotACommitLogError
    """
    from rmq_spark._core.protocol.engine import Engine

    tables = {table.name: table for table in Engine(DeltaTables.open(where, storage_options or None)).tables()}
    for wanted in pins:
        table = tables[wanted.name]
        version, files = table.refresh(), table.actions()
        if version != wanted.version or set(files["path"].to_pylist()) != wanted.files.keys():
            raise CorruptLogError(
                f"table {wanted.name} of the copy {where} is at version {version}, and {wanted.version} was copied, or "
                "it names other files: somebody wrote to the copy. Back up to another place"
            )
        table.read(files.sort_by("modification_time")["path"].to_pylist()[-1:])


# ---------------------------------------------------------------- the copy
class _Copy:
    """A copy of a commit log, in its place.

    Parameters
    ----------
    where : str
    storage_options : mapping, optional
    """

    def __init__(self, where: str, storage_options: Mapping[str, str] | None) -> None:
        self._where = where
        self._folder = Folder(where, storage_options)
        self._versions: Mapping[str, int] = {}

    def begin(self, log_id: str) -> None:
        """Require that this place is empty, or has an older copy of the log, and finish what a crash left half-way.

        Raises
        ------
        CommitLogExistsError
            For another log, a place with something else, and a copy to which somebody has written.
        """
        self.finish()
        said = self._folder.read(MANIFEST)
        if said is None:
            if not self._folder.is_empty():
                raise CommitLogExistsError(
                    f"{self._where} is not empty, and is no copy that a backup made: name an empty place"
                )
            self._folder.put(MANIFEST, Manifest(log_id).content())
            return
        found = Manifest.of(said, self._where)
        if found.log_id != log_id:
            raise CommitLogExistsError(
                f"{self._where} has a copy of another commit log (its id is {found.log_id}, and this one's {log_id}): "
                "name another place"
            )
        self._versions = found.versions or {}
        now = self._newest()
        if now != self._versions:
            raise CommitLogExistsError(
                f"{self._where} was written to since it was copied (a backup left its tables at {self._versions}, and "
                f"they are at {now}): it is in use as a log of its own. Back up to another place"
            )

    def _newest(self) -> dict[str, int]:
        """The tables that are there, and their versions by the names of the entries."""
        found: dict[str, int] = {}
        for name in self._folder.sizes(""):
            table, _, entry = name.partition(f"/{LOG}/")
            if entry.endswith(".json") and entry[:-5].isdigit():
                found[table] = max(int(entry[:-5]), found.get(table, 0))
        return found

    def require_older(self, pins: Sequence[Pin]) -> None:
        """Raise CommitLogExistsError when the copy has what the log does not have."""
        for now in pins:
            version = self._versions.get(now.name)
            if version is None:
                continue
            if version > now.version:
                raise self._is_newer(f"its table {now.name} is at version {version}, and the log's at {now.version}")
            entry = f"{LOG}/{version:020d}.json"
            ours = self._folder.read(f"{now.name}/{entry}")
            if ours != (_entry_of(now, entry) or ours):
                raise self._is_newer(f"version {version} of its table {now.name} is another one than the log's")

    def _is_newer(self, why: str) -> CommitLogExistsError:
        return CommitLogExistsError(
            f"{self._where} has what the log does not have ({why}): the log was set back since this copy was made. The "
            "copy was left as it was; back up to another place"
        )

    def files(self) -> dict[str, int]:
        """The data files, as ``<table>/<file>``, and their sizes."""
        every = self._folder.sizes("")
        return {name: size for name, size in every.items() if _DATA_FILE.fullmatch(name) is not None}

    def fetch(self, pins: Sequence[Pin], progress: Progress | None) -> None:
        """Copy the data files that are not here, or only a part of them.

        Raises
        ------
        FileGoneError
        """
        here = self.files()
        missing = {
            p.name: {path: size for path, size in p.files.items() if here.get(f"{p.name}/{path}") != size} for p in pins
        }
        total = sum(sum(files.values()) for files in missing.values())
        copied = 0

        def done(size: int) -> None:
            nonlocal copied
            copied += size
            if progress is not None:
                progress(copied, total)

        for p in pins:
            self._folder.copy(p.table, missing[p.name], done)

    def switch(self, manifest: Manifest, pins: Sequence[Pin]) -> None:
        """Let the tables be what was copied. Whoever dies within is followed by :meth:`finish`."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as file:
            file.writestr(MANIFEST, manifest.content())
            for p in pins:
                for name, content in p.log.items():
                    file.writestr(f"{p.name}/{LOG}/{name}", content)
        self._folder.put(SWITCH, packed.getvalue())
        self._folder.delete([MANIFEST])  # from here on the switch is finished, whoever does it
        self._apply(packed.getvalue())

    def finish(self) -> None:
        """Go on with a switch that was begun and not finished."""
        packed = self._folder.read(SWITCH)
        if packed is None:
            return
        said = self._folder.read(MANIFEST)
        with suppress(CorruptLogError):  # whoever wrote it died over it
            if said is not None and Manifest.of(said, self._where):  # not begun, or all but this file is done
                self._folder.delete([SWITCH])
                return
        versions = Manifest.of(self._unpacked(packed)[0], self._where).versions or {}
        if all(version <= versions.get(table, -1) for table, version in self._newest().items()):
            self._apply(packed)

    def _unpacked(self, packed: bytes) -> tuple[bytes, dict[str, bytes]]:
        """The manifest, and the files of the Delta logs by name.

        Raises
        ------
        CorruptLogError
            When it cannot be read, or has another file: that one could lie anywhere.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(packed)) as file:
                found = {name: file.read(name) for name in file.namelist()}
            manifest = found.pop(MANIFEST)
        except (zipfile.BadZipFile, KeyError, ValueError, OSError):
            raise CorruptLogError(f"{self._where}/{SWITCH} is damaged: back up to another place") from None
        for name in found:
            table, _, entry = name.partition(f"/{LOG}/")
            if table not in TABLES or LOG_FILE.fullmatch(entry) is None:
                raise CorruptLogError(
                    f"{self._where}/{SWITCH} has {name!r}, which is no file of a Delta log: somebody else wrote it. "
                    "Back up to another place"
                )
        return manifest, found

    def _apply(self, packed: bytes) -> None:
        manifest, logs = self._unpacked(packed)
        there = [name for name in self._folder.sizes("") if f"/{LOG}/" in name]
        # Without topics nobody opens it: from here until topics is there again, the tables are of two moments.
        self._folder.delete(name for name in there if name.startswith("topics/"))
        self._folder.delete(name for name in there if name not in logs)
        for name in sorted(logs, key=lambda name: (name.startswith("topics/"), name)):
            self._folder.put(name, logs[name])
        self._folder.put(MANIFEST, manifest)
        self._folder.delete([SWITCH])

    def clean(self, pins: Sequence[Pin]) -> int:
        """Delete data files that the copy does not need any more; returns how many."""
        needed = {f"{p.name}/{path}" for p in pins for path in p.files}
        old = [name for name in self.files() if name not in needed]
        self._folder.delete(old)
        return len(old)


def _entry_of(now: Pin, entry: str) -> bytes | None:
    """An entry of the log's Delta log; None when it is there no more."""
    try:
        with now.table.fs.open_input_stream(f"{now.table.folder}/{entry}") as stream:
            return bytes(stream.readall())
    except FileNotFoundError:
        return None
