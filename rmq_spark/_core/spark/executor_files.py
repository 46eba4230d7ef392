"""The files of a commit log as an executor reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark._core.storage.file_system import filesystem
from rmq_spark._core.storage.half_file_reader import RelocatingReader
from rmq_spark._core.storage.row_range import RowRange, read_range
from rmq_spark._core.vocabulary.redaction import remember

if TYPE_CHECKING:
    from rmq_spark._core.log.message_range import MessageRange
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.selector.tree import Filter


class LogFiles:
    """The files of ``half`` and ``messages`` as an executor reads them. Only a lost file makes it open the commit
    log."""

    def __init__(self, path: str, storage_options: Mapping[str, str]) -> None:
        self._path = path
        self._storage_options = storage_options
        remember(storage_options)
        self._engine: Engine | None = None
        self._half = RelocatingReader(self._read, lambda *address: self._opened().half.locate(*address))
        self._folders: dict[str, tuple[Any, str]] = {}

    def read(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Read rows of a file of either table, as ``row_range.read_range`` does."""
        return (self._half.read if wanted.half_id else self._read)(wanted, columns, where)

    def find_again(self, lost: MessageRange) -> list[MessageRange]:
        """Return the present place of messages whose file is gone."""
        return self._opened().find_again(lost)

    def folder(self, table: str) -> tuple[Any, str]:
        """Return the file system of a table's folder, and the folder's path on it."""
        if table not in self._folders:
            self._folders[table] = filesystem(f"{self._path}/{table}", self._storage_options)
        return self._folders[table]

    def _read(
        self, row_range: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        return read_range(*self.folder(row_range.table), row_range, columns, where)

    def _opened(self) -> Engine:
        if self._engine is None:
            from rmq_spark._core.client.commit_log import engine_of

            self._engine = engine_of(self._path, self._storage_options or None)
        return self._engine
