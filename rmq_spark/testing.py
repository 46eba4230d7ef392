"""A commit log in memory, for tests of listeners and of programs that send messages. It needs no folder and no Spark.

It runs the same code as a commit log on Delta tables. Only its tables are in memory.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rmq_spark._core.client.commit_log import CommitLog
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.transaction_listener import TransactionListener, Verdicts
from rmq_spark._core.log.group_table import GROUPS_SCHEMA
from rmq_spark._core.log.half import HALF_SCHEMA
from rmq_spark._core.log.log_tables import LogTables
from rmq_spark._core.log.op import OP_SCHEMA
from rmq_spark._core.log.topics import TOPICS_SCHEMA
from rmq_spark._core.messages.messages_table import MESSAGES_SCHEMA
from rmq_spark._core.producer.producer import TransactionMQProducer
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import RUNTIME, Runtime
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.compare_and_set import compare_and_set
from rmq_spark._core.storage.data_file import DataFile
from rmq_spark._core.storage.foreign_commits import Changed
from rmq_spark._core.storage.row_range import RowRange, read_range
from rmq_spark._core.storage.table import Change, Clock, actions_schema, bounds_of, write_file
from rmq_spark._core.vocabulary.options import QUEUES_DEFAULT
from rmq_spark._core.vocabulary.redaction import sentence_of
from rmq_spark._core.vocabulary.verdicts import UNKNOWN
from rmq_spark.errors import FenceError

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["InMemoryCommitLog", "MemoryTable", "Runtime", "check_fence"]


class _Files:
    """The part of a pyarrow file system that Parquet files in memory need."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.content: dict[str, bytes] = {}
        self.written: dict[str, datetime] = {}
        self._tables: dict[str, pa.Table] = {}  # files never change, so each is decoded once

    def table(self, path: str) -> pa.Table:
        if path not in self._tables:
            self._tables[path] = pq.read_table(self.open_input_file(path))
        return self._tables[path]

    def copy(self) -> _Files:
        twin = _Files(self.runtime)
        twin.content, twin.written, twin._tables = dict(self.content), dict(self.written), dict(self._tables)
        return twin

    def open_output_stream(self, path: str) -> _Writing:
        return _Writing(self, path)

    def open_input_file(self, path: str) -> pa.BufferReader:
        if path not in self.content:
            raise FileNotFoundError(path)
        return pa.BufferReader(self.content[path])

    def get_file_info(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return [
            pafs.FileInfo(path, pafs.FileType.File, size=len(content), mtime=self.written[path])
            for path, content in self.content.items()
            if path.startswith(f"{selector.base_dir}/")
        ]

    def delete_file(self, path: str) -> None:
        if self.content.pop(path, None) is None:
            raise FileNotFoundError(path)
        self._tables.pop(path, None)


class _Writing(io.BytesIO):
    def __init__(self, files: _Files, path: str) -> None:
        super().__init__()
        self._files, self._path = files, path

    def __exit__(self, *details: Any) -> None:
        self._files.written[self._path] = self._files.runtime.now()
        self._files.content[self._path] = self.getvalue()
        super().__exit__(*details)


@dataclass(frozen=True)
class _State:
    version: int
    files: Mapping[str, dict[str, Any]]
    transactions: Mapping[str, int]


class _Versions:
    """The newest state of a table, shared by all its handles. A commit replaces the state and never changes it."""

    def __init__(self, table_id: str) -> None:
        self.id = table_id
        self.lock = threading.RLock()
        self.head = _State(0, {}, {})
        self.removed: dict[str, float] = {}


class _SameClock:
    """The clock of a store in memory: the machine's own."""

    def require_near(self) -> None:
        pass


class MemoryTable:
    """A :class:`rmq_spark._core.storage.table.Table` in memory. Handles from :meth:`another` share its content."""

    def __init__(
        self, name: str, schema: pa.Schema, runtime: Runtime = RUNTIME, versions: _Versions | None = None
    ) -> None:
        self.name, self.schema, self.uri, self.folder = name, schema, f"memory:{name}", name
        self.history_s = 0.0  # older versions cannot be read
        self.runtime = runtime
        self.lock = runtime.lock()
        self.fs: Any = _Files(runtime)
        self.clock: Clock = _SameClock()
        self._versions = versions or _Versions(runtime.unique_id())
        self._state = self._versions.head
        self._actions: tuple[int, pa.Table] | None = None

    def another(self) -> MemoryTable:
        """Return another handle on this table, as another process would have it."""
        twin = MemoryTable(self.name, self.schema, self.runtime, self._versions)
        twin.fs = self.fs
        return twin

    def copy(self) -> MemoryTable:
        """Return another table with the same content."""
        twin = MemoryTable(self.name, self.schema, self.runtime, _Versions(self.id))
        twin.fs = self.fs.copy()
        twin._versions.head, twin._versions.removed = self._versions.head, dict(self._versions.removed)
        twin.refresh()
        return twin

    @property
    def id(self) -> str:
        return self._versions.id

    @property
    def version(self) -> int:
        return self._state.version

    def refresh(self) -> int:
        with self.lock:
            self._state = self._versions.head
            version = self._state.version
        reach("table seen", table=self.name)
        return version

    def actions(self) -> pa.Table:
        state, cached = self._state, self._actions
        if cached is None or cached[0] != state.version:
            rows = pa.Table.from_pylist(list(state.files.values()), schema=actions_schema(self.name))
            self._actions = cached = (state.version, rows)
        return cached[1]

    def removed_since(self, age_s: float | None = None) -> set[str]:
        now = self.runtime.time()
        return {path for path, removed_s in self._versions.removed.items() if age_s is None or now - removed_s < age_s}

    def transaction_version(self, app_id: str) -> int | None:
        return self._state.transactions.get(app_id)

    def changed_by_others(self, since: int) -> Changed | None:
        return None  # no foreign program can reach the table

    def write(self, rows: pa.Table) -> DataFile:
        return write_file(self, rows)

    def missing(self, files: Sequence[DataFile]) -> list[DataFile]:
        content = self.fs.content
        return [file for file in files if len(content.get(f"{self.folder}/{file.path}", b"")) != file.size_bytes]

    def read(
        self, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        names = list(columns) if columns is not None else self.schema.names
        schema = pa.schema([self.schema.field(n) for n in names])
        if paths:
            reach("files read", table=self.name, paths=paths)
        tables = [self.fs.table(f"{self.folder}/{p}") for p in paths]
        if where is not None:
            tables = [p.filter(where) for p in tables]
        return pa.concat_tables([p.select(names).cast(schema) for p in tables]) if tables else schema.empty_table()

    def read_range(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        return read_range(self.fs, self.folder, wanted, columns, where)

    def compare_and_set(
        self, propose: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        with self.lock:
            return compare_and_set(self, propose, landed, self.try_commit)

    def try_commit(self, change: Change) -> bool:
        reach("commit begins", table=self.name, change=change)
        with self._versions.lock:
            if self._state is not self._versions.head or change.is_stale(self._state.version):
                return False
            removed = set(change.remove)
            files = {path: action for path, action in self._state.files.items() if path not in removed}
            for added in change.add:
                files[added.path] = {
                    "path": added.path,
                    "modification_time": change.modification_time_ms or self.runtime.time_ms(),
                    "num_records": added.rows,
                    "size_bytes": added.size_bytes,
                    **bounds_of(self.name, added.stats),
                }
            transactions = {**self._state.transactions, **change.transactions}
            removed_s = self.runtime.time() - change.removed_earlier_s
            self._versions.removed.update(dict.fromkeys(change.remove, removed_s))
            self._versions.head = _State(self._state.version + 1, files, transactions)
        reach("commit done", table=self.name, change=change)
        return True


class _MemoryTables(LogTables):
    """The tables of a commit log in memory."""

    def __init__(self, default_queues: int, tables: Sequence[MemoryTable]) -> None:
        self.all = tuple(tables)
        half, op, topics = self.all[:3]
        super().__init__("memory:", half, op, topics, default_queues)

    def messages(self) -> MemoryTable:
        return self.all[4]

    def has_groups(self) -> bool:
        return True

    def groups(self) -> MemoryTable:
        return self.all[3]

    def another(self) -> _MemoryTables:
        return _MemoryTables(self.default_queues, [table.another() for table in self.all])

    def copy(self) -> _MemoryTables:
        return _MemoryTables(self.default_queues, [table.copy() for table in self.all])

    def in_background(self, work: Callable[[], None]) -> None:
        work()


class InMemoryCommitLog(CommitLog):
    """A commit log in memory, with everything but Spark.

    Parameters
    ----------
    queues : int
        Default number of queues of a topic.
    topics : mapping of str to int, optional
        Topics to create at once.
    runtime : Runtime, optional
        Gives the log its clock, locks and threads.

    Examples
    --------
    >>> log = InMemoryCommitLog(topics={"orders": 2})
    >>> log.topics()
    {'orders': 2}
    """

    def __init__(
        self, queues: int = QUEUES_DEFAULT, topics: Mapping[str, int] | None = None, runtime: Runtime = RUNTIME
    ) -> None:
        schemas = {
            "half": HALF_SCHEMA,
            "op": OP_SCHEMA,
            "topics": TOPICS_SCHEMA,
            "groups": GROUPS_SCHEMA,
            "messages": MESSAGES_SCHEMA,
        }
        self._keep(_MemoryTables(queues, [MemoryTable(name, schema, runtime) for name, schema in schemas.items()]))
        for name, count in (topics or {}).items():
            self.create_topic(name, count)

    def _keep(self, tables: _MemoryTables) -> None:
        self._tables = tables
        super().__init__(tables)

    def another(self) -> InMemoryCommitLog:
        """Return another handle on the same content, as another process would have it."""
        return self._on(self._tables.another())

    def copy(self) -> InMemoryCommitLog:
        """Return another log with the same content. A change to one log does not change the other."""
        return self._on(self._tables.copy())

    @staticmethod
    def _on(tables: _MemoryTables) -> InMemoryCommitLog:
        twin = InMemoryCommitLog.__new__(InMemoryCommitLog)
        twin._keep(tables)
        return twin


def check_fence(url_or_engine: str | sa.URL | sa.Engine) -> list[str]:
    """Try on a database what a fence needs of it: the suite that this package runs on its own databases.

    A :class:`~rmq_spark.SqlTransactionListener` refuses other databases than SQLite, PostgreSQL, MariaDB and MySQL. The
    suite tries any, so that you can see what yours lacks. It makes tables whose names begin with ``txmq_trial_``, uses
    two connections at once, takes some seconds, and drops the tables at the end.

    Parameters
    ----------
    url_or_engine : str, sqlalchemy.URL or sqlalchemy.Engine
        A database with a user that may create and drop tables. An engine is used as it is, with its isolation level.

    Returns
    -------
    list of str
        The rules that hold, a sentence each.

    Raises
    ------
    FenceError
        Some rule does not hold. The error has each of these rules, and what was found.
    """
    from rmq_spark._core.database.connection import Database
    from rmq_spark._core.database.sql_engine import on_trial
    from rmq_spark._core.listeners.fence_rules import RULES, Trial

    problems: list[str] = []
    with on_trial(url_or_engine) as engine:
        where = Database(engine).where
        try:
            with Trial(engine, _stage) as trial:
                for rule in RULES:
                    try:
                        rule.hold(trial)
                    except Exception as problem:
                        problems.append(f"{rule.sentence} ({sentence_of(problem)})")
        except Exception as problem:
            problems.append(f"The tables of a fence can be made and dropped. ({sentence_of(problem)})")
    if problems:
        lines = "".join(f"\n- {problem}" for problem in problems)
        raise FenceError(
            f"{where} cannot have a fence, because {len(problems)} of {len(RULES) + 1} rules do not hold:{lines}"
        )
    return [rule.sentence for rule in RULES]


class _Stager(TransactionListener):
    """Keeps the half batch of a send, and leaves it pending."""

    def __init__(self, store_id: str) -> None:
        self.store_id = store_id
        self.batch: HalfBatch | None = None

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        self.batch = batch
        return UNKNOWN

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return UNKNOWN


def _stage(fence_id: str, keys: Sequence[str]) -> HalfBatch:
    """Prepare a half batch with a transaction for each key, in a log of its own."""
    stager = _Stager(fence_id)
    messages = pa.table({"body": keys, "order": keys})
    log = InMemoryCommitLog(topics={"trial": 1})
    with TransactionMQProducer(log, "trial", stager, check_interval=None) as producer:
        producer.send_messages_in_transaction(messages, topic="trial", transaction_key="order")
    assert stager.batch is not None
    return stager.batch
