"""Entries of a Delta log, read without delta-rs: whether they are whole, and still those that a handle has seen."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import pyarrow.fs as pafs

from rmq_spark._core.storage.foreign_commits import Entry
from rmq_spark._core.storage.seal import require_entries
from rmq_spark.errors import CorruptLogError

LISTS_MAX = 3
"""How often a Delta log is listed when a listed entry is gone before it is read."""
REFRESHED_S_MAX = 10.0
"""Seconds after which delta-rs itself looks for new entries, whatever two looks at the disk say."""


class DeltaEntries:
    """The entries of a table's Delta log, and the newest one that a handle on the table knows."""

    def __init__(self, fs: pafs.FileSystem, folder: str, name: str) -> None:
        self.fs = fs
        self.folder = folder
        self.name = name
        self._newest: tuple[int, object] | None = None  # a version, and the stamp of its entry
        self._newest_sum: int | None = None  # the checksum of that entry, on a local disk
        self._refreshed_s = -math.inf  # when delta-rs last looked for new entries

    def note_newest(self, version: int, entry: object) -> None:
        self._newest, self._newest_sum = (version, entry), self._checksum(version)

    def is_newest(self, version: int, now_s: float) -> bool:
        """Return True when no entry follows this version, and its own is still there. Two looks at a local disk are
        much faster than delta-rs. (Clean-up removes the oldest entries first, so no later entry is gone.) On an
        object store delta-rs always reads."""
        if now_s - self._refreshed_s > REFRESHED_S_MAX or not isinstance(self.fs, pafs.LocalFileSystem):
            self._refreshed_s = now_s
            return False
        known = self._newest
        if known is None or known[0] != version or known[1] is None:
            return False
        return self.stamp(version + 1) is None and self.stamp(version) == known[1]

    def goes_on(self, before: int, version: int) -> bool:
        """Return True when the entry ``before`` is unchanged, or was cleaned up and newer entries follow it."""
        entry = self.stamp(before)
        if entry is None:
            return version > before
        known = self._newest
        if known is not None and known[0] == before and known[1] not in (None, entry):
            return False
        if known is None or known != (version, entry):
            self.note_newest(version, self.stamp(version) if version > before else entry)
        return True

    def require_newest(self) -> None:
        """Raise CorruptLogError when another entry lies in the place of the newest known one."""
        version, entry = self._newest or (0, None)
        now = self.stamp(version)
        if None not in (entry, now, self._newest_sum) and entry != now and self._checksum(version) != self._newest_sum:
            raise CorruptLogError(
                f"version {version} of table {self.name} is another one than this process has seen: an older copy was "
                "put in its place, and written to since. Restore the newest one"
            )

    def stamp(self, version: int) -> object:
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

    def _checksum(self, version: int) -> int | None:
        """Return a checksum of an entry of a local Delta log; None on other stores, and for an entry that is gone."""
        if not isinstance(self.fs, pafs.LocalFileSystem):
            return None
        try:
            return zlib.crc32(Path(self.folder, "_delta_log", f"{version:020d}.json").read_bytes())
        except OSError:
            return None

    def require_whole(self, since: int, until: int | None) -> None:
        """Raise CorruptLogError for entries of the Delta log after ``since``, up to ``until`` or the newest, that a
        power cut left empty. An object store has no half-written ones."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            require_entries(Path(self.folder, "_delta_log"), self.name, since, until)

    def between(self, since: int, until: int) -> list[Entry]:
        entries: list[Entry] = []
        for version in range(since + 1, until + 1):
            with self.fs.open_input_stream(f"{self.folder}/_delta_log/{version:020d}.json") as stream:
                entries.append(Entry.of(version, stream.readall()))
        return entries
