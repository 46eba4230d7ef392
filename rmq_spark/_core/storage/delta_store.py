"""Object stores through delta-rs, as a file system of pyarrow: data files take the URL and the options of commits.

Executors use this module too, where pyarrow has no store of its own that takes the same options. It needs far less
address space than the engine, which makes commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

from rmq_spark._core.storage.delta_fork import require_no_fork
from rmq_spark._core.storage.seal import is_panic
from rmq_spark._core.storage.store_errors import plainly, require_resources
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import TxmqError, UnreachableStoreError

WHOLE_BYTES_MAX = 1 << 20
"""A file of at most this size is read whole, with one request. Parquet's reader would make one for the footer and one
for each column."""

SMALL_BYTES_MAX = 4 << 20
"""A file of at most this size is put at its end, so a crash before leaves nothing in the store."""
SMALL_TRIES_MAX = 10
"""Puts of one small file. On Azure, of two puts of one name at once one is refused: its blocks are gone."""


def delta_store(uri: str, storage_options: Mapping[str, str] | None) -> tuple[pafs.FileSystem, str]:
    """Return the store below a URI as a file system, and the URI's folder on it. UnreachableStoreError: delta-rs cannot
    work with the URI or the options."""
    require_no_fork()
    url = urlsplit(uri)
    folder = unquote(f"{url.netloc.rpartition('@')[0] or url.netloc}{url.path}").rstrip("/")
    options = dict(storage_options or {})
    try:
        handler = _Handler(uri, folder, options)
    except BaseException as problem:  # a panic of delta-rs is no Exception
        if isinstance(problem, TxmqError) or not (isinstance(problem, Exception) or is_panic(problem)):
            raise
        require_resources(problem, redacted(uri))
        raise UnreachableStoreError(
            f"{redacted(uri)} cannot be used with these storage options: {plainly(str(problem), options)}"
        ) from None
    return pafs.PyFileSystem(handler), folder


class _Handler(DeltaStorageHandler):
    """The store below a folder. Paths begin with the folder, as those of pyarrow's own file systems do.

    delta-rs keeps Python's lock while it opens or deletes a file, or lists a folder.
    """

    def __init__(self, uri: str, folder: str, options: dict[str, str]) -> None:
        super().__init__(uri, options or None)
        self._folder = folder
        self._options = options

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Refuse a fork, and make a failure an OSError of one line without secrets."""
        require_no_fork()
        try:
            yield
        except FileNotFoundError as problem:
            raise FileNotFoundError(plainly(str(problem), self._options)) from None
        except OSError as problem:
            raise OSError(plainly(str(problem), self._options)) from None

    def _below(self, path: str) -> str:
        """The path as delta-rs spells it: relative to the folder."""
        if path != self._folder and not path.startswith(f"{self._folder}/"):
            raise ValueError(f"path {path!r} is not below {self._folder!r}")
        return path[len(self._folder) :].strip("/")

    def _shown(self, info: pafs.FileInfo) -> pafs.FileInfo:
        times = {} if info.mtime_ns is None else {"mtime_ns": info.mtime_ns}
        sizes = {} if info.size is None else {"size": info.size}
        return pafs.FileInfo(f"{self._folder}/{info.path}".rstrip("/"), info.type, **times, **sizes)

    def normalize_path(self, path: str) -> str:
        return path.rstrip("/")

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        with self.asked():
            return [self._shown(info) for info in super().get_file_info([self._below(path) for path in paths])]

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        base = self._below(selector.base_dir)
        with self.asked():
            found = self._handler.get_file_info_selector(base, selector.allow_not_found, selector.recursive)
        if not found and not selector.allow_not_found:
            raise FileNotFoundError(f"there is nothing below {selector.base_dir}")
        return [self._shown(info) for info in found]

    def delete_file(self, path: str) -> None:
        with self.asked():
            super().delete_file(self._below(path))

    def open_input_file(self, path: str) -> pa.NativeFile:
        with self.asked():
            file = self._handler.open_input_file(self._below(path))
            if file.size() <= WHOLE_BYTES_MAX:
                return pa.BufferReader(file.read(file.size()))
        return pa.PythonFile(_Reading(self, file), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Mapping[str, str] | None = None) -> pa.NativeFile:
        return pa.PythonFile(_Writing(self, path), mode="w")

    def begin(self, path: str) -> Any:
        """Begin to put a file, in parts."""
        return self._handler.open_output_stream(self._below(path), None)


class _Reading:
    """A large file, of which each read is a request."""

    def __init__(self, store: _Handler, file: Any) -> None:
        self._store, self._file = store, file

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def read(self, size: int | None = None) -> bytes:
        with self._store.asked():
            return bytes(self._file.read(size))

    def close(self) -> None:
        self._file.close()


class _Writing:
    """A new file, which the store has when it is closed. A small one is put at its end, a large one in parts."""

    def __init__(self, store: _Handler, path: str) -> None:
        self._store, self._path = store, path
        self._small = bytearray()
        self._upload: Any = None
        self._size = 0
        self.closed = False

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")  # pyarrow passes a buffer, and delta-rs takes bytes alone
        self._size += len(content)
        if self._upload is None and self._size <= SMALL_BYTES_MAX:
            self._small += content
            return len(content)
        with self._store.asked():
            if self._upload is None:
                self._upload = self._store.begin(self._path)
                self._upload.write(bytes(self._small))
                self._small.clear()
            self._upload.write(content.tobytes())
        return len(content)

    def flush(self) -> None:
        """Do nothing: a part of any size would be too small for some stores."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with self._store.asked():
            if self._upload is not None:
                self._upload.close()
                return
            for tries in range(SMALL_TRIES_MAX):
                file = self._store.begin(self._path)
                try:
                    file.write(bytes(self._small))
                    file.close()
                    return
                except OSError as problem:
                    if "InvalidBlockList" not in str(problem) or tries == SMALL_TRIES_MAX - 1:
                        raise
