"""Copies a Delta table at one version from one store to another.

Nothing here reads ``_last_checkpoint``, which may be newer than a listing of the Delta log. A copy has none, so every
reader of Delta lists its log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.pools import submitted
from rmq_spark._core.storage.delta_entries import LISTS_MAX
from rmq_spark._core.storage.file_system import filesystem, require_path
from rmq_spark._core.storage.seal import reading
from rmq_spark._core.storage.store_errors import writing
from rmq_spark._core.storage.table import Table
from rmq_spark.errors import CorruptLogError, OptionError

LOG = "_delta_log"
COPIES_AT_ONCE = 8
CHUNK_BYTES = 4 * 1024 * 1024
ROWS_AT_ONCE = 8192

LOG_FILE = re.compile(r"(\d{20})\.(json|checkpoint(\.[\w-]+)*\.parquet)")


class FileGoneError(Exception):
    """A file of the source (``<table>/<file>``) is gone, because its table has moved on. The caller must look at the
    table again."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class Pin:
    """A table at one version: the files of its Delta log that make up this version (a checkpoint, and the entries after
    it), and the live data files with their sizes in bytes."""

    table: Table
    version: int
    log: Mapping[str, bytes]
    files: Mapping[str, int]

    @property
    def name(self) -> str:
        return self.table.name


def pin(table: Table) -> Pin:
    """Return the newest version of a table. No other thread may use the handle meanwhile. OptionError: the table is in
    memory. CorruptLogError: entries of its Delta log are missing."""
    if not isinstance(table.fs, pafs.FileSystem):
        raise OptionError("a commit log in memory has no files that could be copied")
    for _ in range(LISTS_MAX):  # upkeep may remove old entries between a listing and the reads
        version = table.refresh()
        actions = table.actions()
        with suppress(FileNotFoundError):
            log = _log_files(table.fs, f"{table.folder}/{LOG}", version)
            if log is not None:
                paths = [require_path(path, table.name) for path in actions["path"].to_pylist()]
                return Pin(table, version, log, dict(zip(paths, actions["size_bytes"].to_pylist(), strict=True)))
    raise CorruptLogError(
        f"the Delta log of table {table.name} lacks entries up to version {version}: somebody removed files of it"
    )


def _log_files(fs: pafs.FileSystem, folder: str, version: int) -> dict[str, bytes] | None:
    """The files that make up a version, by name; None when the listing lacks some."""
    listed = [LOG_FILE.fullmatch(info.base_name) for info in fs.get_file_info(pafs.FileSelector(folder))]
    numbers = {found[0]: int(found[1]) for found in listed if found and int(found[1]) <= version}
    first = max((n for name, n in numbers.items() if not name.endswith(".json")), default=-1)
    entries = {n for name, n in numbers.items() if name.endswith(".json")}
    if not entries.issuperset({*range(first + 1, version + 1), version}):
        return None
    found = {}
    for name in sorted(name for name, n in numbers.items() if n >= first):
        with fs.open_input_stream(f"{folder}/{name}") as stream:
            found[name] = stream.readall()
    return found


class Folder:
    """A folder on a store, into which files are copied."""

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None) -> None:
        self._fs, self.path = filesystem(uri, storage_options)

    def is_empty(self) -> bool:
        """Return True when the folder holds nothing, or does not exist."""
        return not self._fs.get_file_info(pafs.FileSelector(self.path, allow_not_found=True))

    def sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of the files below one of its folders, by their path in that folder."""
        folder = f"{self.path}/{name}".rstrip("/")
        infos = self._fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True, recursive=True))
        return {i.path.removeprefix(f"{folder}/"): i.size for i in infos if i.type == pafs.FileType.File}

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None when there is no such file."""
        try:
            with self._fs.open_input_stream(f"{self.path}/{name}") as stream:
                return bytes(stream.readall())
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes) -> None:
        """Write a file, and replace one that is there."""
        reach("copy changes", name=name)
        with writing(self.path), self._open_output(name) as stream:
            stream.write(content)

    def delete(self, names: Iterable[str]) -> None:
        """Delete those of the files that are still there."""
        for name in names:
            self._delete(name)

    def _delete(self, name: str) -> None:
        reach("copy changes", name=name)
        with suppress(FileNotFoundError):
            self._fs.delete_file(f"{self.path}/{name}")

    def copy(self, table: Table, files: Mapping[str, int], done: Callable[[int], None]) -> None:
        """Copy data files of a table, and call ``done`` with the size of each. FileGoneError: a file is gone.
        CorruptLogError: a file has another size than the Delta log says, or cannot be read."""
        pool = ThreadPoolExecutor(COPIES_AT_ONCE, "txmq-copy")
        try:
            for copying in [submitted(pool, self._copy, table, path, size) for path, size in files.items()]:
                done(copying.result())
        finally:
            pool.shutdown(cancel_futures=True)

    def _copy(self, table: Table, path: str, size: int) -> int:
        name = f"{table.name}/{path}"
        reach("copy changes", name=name)
        try:
            source = table.fs.open_input_stream(f"{table.folder}/{path}")
        except FileNotFoundError:
            raise FileGoneError(name) from None
        copied = 0
        with source:
            with writing(self.path):
                stream = self._open_output(name)
            with stream:
                while chunk := source.read(CHUNK_BYTES):
                    with writing(self.path):
                        stream.write(chunk)
                    copied += len(chunk)
        if copied != size:
            raise CorruptLogError(f"file {name} has {copied} bytes, and its Delta log says {size}: it was damaged")
        try:
            self._require_readable(name, table.name)
        except CorruptLogError:
            self._delete(name)  # else the next backup would count it as copied
            raise
        return copied

    def _require_readable(self, name: str, table: str) -> None:
        """Read every page of a copied file, which verifies its checksums."""
        with reading(name, table), self._fs.open_input_file(f"{self.path}/{name}") as file:
            for _ in pq.ParquetFile(file, page_checksum_verification=True).iter_batches(batch_size=ROWS_AT_ONCE):
                pass

    def _open_output(self, name: str) -> Any:
        path = f"{self.path}/{name}"
        if isinstance(self._fs, pafs.LocalFileSystem):
            self._fs.create_dir(path.rpartition("/")[0])
        return self._fs.open_output_stream(path)
