"""A commit log in memory, for tests of listeners and of programs that send messages: no folder, no Spark.

It runs the same code as a commit log on Delta tables; only the tables are another kind.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rmq_spark.commitlog.files import DataFile, write_table
from rmq_spark.commitlog.half import HALF_SCHEMA
from rmq_spark.commitlog.log import TOPICS_SCHEMA, CommitLog
from rmq_spark.commitlog.op import OP_SCHEMA
from rmq_spark.commitlog.table import Change, compare_and_set
from rmq_spark.config import QUEUES_DEFAULT

__all__ = ["InMemoryCommitLog", "MemoryTable"]


class _Files:
    """Just enough of a pyarrow file system for Parquet files in memory."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def open_output_stream(self, path: str) -> _Writing:
        return _Writing(self, path)

    def open_input_file(self, path: str) -> pa.BufferReader:
        if path not in self.content:
            raise FileNotFoundError(path)
        return pa.BufferReader(self.content[path])


class _Writing(io.BytesIO):
    def __init__(self, files: _Files, path: str) -> None:
        super().__init__()
        self._files, self._path = files, path

    def __exit__(self, *details: Any) -> None:
        self._files.content[self._path] = self.getvalue()
        super().__exit__(*details)


class _Versions:
    """The history that all handles of one table share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.states: list[tuple[dict[str, dict[str, Any]], dict[str, int]]] = [({}, {})]


class MemoryTable:
    """A :class:`rmq_spark.commitlog.table.Table` in memory. Handles made with :meth:`another` share the content."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name, self.schema, self.folder = name, schema, name
        self.fs: Any = _Files()
        self._versions = _Versions()
        self._version = 0

    def another(self) -> MemoryTable:
        """Another handle, as another process would have."""
        twin = MemoryTable(self.name, self.schema)
        twin.fs, twin._versions = self.fs, self._versions
        return twin

    @property
    def version(self) -> int:
        return self._version

    def refresh(self) -> int:
        with self._versions.lock:
            self._version = len(self._versions.states) - 1
        return self._version

    def _state(self) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
        return self._versions.states[self._version]

    def actions(self) -> pa.Table:
        flat = [f for f in self.schema if not pa.types.is_nested(f.type)]
        fields = [("path", pa.string()), ("modification_time", pa.int64()), ("num_records", pa.int64())]
        fields += [(f"{bound}.{f.name}", f.type) for bound in ("min", "max") for f in flat]
        return pa.Table.from_pylist(list(self._state()[0].values()), schema=pa.schema(fields))

    def transaction_version(self, app_id: str) -> int | None:
        return self._state()[1].get(app_id)

    def write(self, rows: pa.Table, prefix: str, stats_columns: Sequence[str]) -> DataFile:
        return write_table(self.fs, self.folder, rows, prefix=prefix, stats_columns=stats_columns)

    def read(
        self, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        names = list(columns) if columns is not None else self.schema.names
        schema = pa.schema([self.schema.field(n) for n in names])
        parts = [pq.read_table(self.fs.open_input_file(f"{self.folder}/{p}"), filters=where) for p in paths]
        return pa.concat_tables([p.select(names).cast(schema) for p in parts]) if parts else schema.empty_table()

    def compare_and_set(
        self, decide: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        return compare_and_set(self, decide, landed, self._try_commit)

    def _try_commit(self, change: Change) -> bool:
        import json
        import time

        with self._versions.lock:
            if self._version != len(self._versions.states) - 1:
                return False
            files, transactions = self._state()
            files = {p: a for p, a in files.items() if p not in set(change.remove)}
            for f in change.add:
                stats = json.loads(f.stats)
                files[f.path] = {
                    "path": f.path,
                    "modification_time": change.modification_time_ms or time.time_ns() // 1_000_000,
                    "num_records": f.rows,
                    **{f"min.{k}": v for k, v in stats["minValues"].items()},
                    **{f"max.{k}": v for k, v in stats["maxValues"].items()},
                }
            transactions = {**transactions, **({change.transaction[0]: change.transaction[1]} if change.transaction else {})}
            self._versions.states.append((files, transactions))
        return True


class InMemoryCommitLog(CommitLog):
    """A commit log in memory, with everything but Spark.

    Parameters
    ----------
    queues : int
        Queues of a topic that is created without a number of its own.
    topics : mapping of str to int, optional
        Topics to create at once.

    Examples
    --------
    >>> log = InMemoryCommitLog(topics={"orders": 2})
    >>> log.topics()
    {'orders': 2}
    """

    def __init__(self, queues: int = QUEUES_DEFAULT, topics: Mapping[str, int] | None = None) -> None:
        tables = (
            MemoryTable("half", HALF_SCHEMA),
            MemoryTable("op", OP_SCHEMA),
            MemoryTable("topics", TOPICS_SCHEMA),
        )
        self._tables = tables
        super().__init__("memory:", *tables, default_queues=queues)
        for name, count in (topics or {}).items():
            self.create_topic(name, count)

    def another(self) -> CommitLog:
        """Another handle on the same content, as another process would have."""
        twin = InMemoryCommitLog.__new__(InMemoryCommitLog)
        twin._tables = tuple(t.another() for t in self._tables)  # type: ignore[assignment]
        CommitLog.__init__(twin, self.path, *twin._tables, default_queues=self._default_queues)
        return twin

    def _reopened_handle(self) -> CommitLog:
        return self.another()

    def _in_background(self, work: Callable[[], None]) -> None:
        work()
