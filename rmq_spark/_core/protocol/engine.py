"""The steps of the protocol on the tables of a commit log. Sinks, checkers and readers call them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.batch_state import BatchState
from rmq_spark._core.log.clock_doubt import doubt_s
from rmq_spark._core.log.damage import retry_on_newest_state
from rmq_spark._core.log.decision import Decided, Decision
from rmq_spark._core.log.group_table import GroupTable
from rmq_spark._core.log.half import HalfFile, HalfRows
from rmq_spark._core.log.half_header import HalfHeader
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.half_table import HalfTable
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.log.ledger import Ledger
from rmq_spark._core.log.log_tables import LogTables
from rmq_spark._core.log.message_columns import require_known_topic
from rmq_spark._core.log.message_range import MessageRange, PlacedRange, out_of_range
from rmq_spark._core.log.op_view import Tails
from rmq_spark._core.log.staged_batches import PrepareError, Staged
from rmq_spark._core.log.topics import TopicTable
from rmq_spark._core.messages.border import DrainBorder
from rmq_spark._core.messages.messages_table import require_drained
from rmq_spark._core.protocol.assemble_half_batch import half_batch_of
from rmq_spark._core.protocol.compaction import Compaction
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.row_range import RowRange
from rmq_spark._core.storage.table import Table
from rmq_spark._core.vocabulary.message import require_topic_name
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark.errors import (
    HalfBatchNotFoundError,
    LostFileError,
    NotACommitLogError,
    OptionError,
    TxmqError,
)

SMALL_ROWS_MAX = 1_000
"""Half batches with at most this many rows are read together."""


class Engine:
    """The tables of one commit log behind one lock, with every step that changes or reads them.

    A :class:`~rmq_spark.CommitLog` owns one, and is the interface for users.
    """

    def __init__(self, tables: LogTables) -> None:
        self._tables = tables
        self.path = tables.path
        self.storage_options = tables.storage_options
        self.lock = tables.half.lock
        for table in (tables.op, tables.topics):
            self._with_our_lock(table)
        self.half = HalfTable(tables.half)
        self.op_table = tables.op
        self.topics_table = tables.topics
        self.topic_store = TopicTable(tables.topics, tables.default_queues)
        self.ledger = Ledger(self.op_table, self.half, self.topic_store, self._has_left_elsewhere)
        self.runtime = tables.half.runtime
        self.drained = DrainBorder(self)
        self.compaction = Compaction(self, tables.in_background)
        self._last_headers: dict[str, HalfHeader] = {}  # by app id, its last numbered half batch
        self._groups: GroupTable | None = None
        self._messages: Table | None = None

    def tables_to_refresh(self) -> Iterable[Table]:
        """The tables that this engine reads, without ``groups``."""
        return (self.half.table, self.op_table, self.topics_table, self.messages_table)

    def __repr__(self) -> str:
        return f"CommitLog({redacted(self.path)!r})"

    def __getstate__(self) -> object:
        raise OptionError(
            f"{self!r} has locks and connections, so it can be neither copied nor pickled: pass its path, and open it "
            "in the process or thread that uses it"
        )

    @property
    def id(self) -> str:
        """The log's id, made with the log. A log made anew in its place has another id, and counts from 0."""
        return self.topics_table.id

    def another(self) -> Engine:
        """A new engine of this log, which has read nothing yet, as in another process."""
        return Engine(self._tables.another())

    def new_handle(self) -> Engine:
        """:meth:`another`, or NotACommitLogError when another log was made in this one's place."""
        engine = self.another()
        if engine.id != self.id:
            raise NotACommitLogError(
                f"the commit log at {redacted(self.path)!r} was made anew since this handle was opened: open it again"
            )
        return engine

    # ------------------------------------------------------------------ its tables
    def _with_our_lock(self, table: Table) -> Table:
        """Give a table the lock and clock that the tables of a log share."""
        table.lock, table.clock = self.lock, self._tables.half.clock
        return table

    @property
    def messages_table(self) -> Table:
        """The table ``messages``: the placed messages, for any reader of Delta tables."""
        with self.lock:
            if self._messages is None:
                self._messages = self._with_our_lock(self._tables.messages())
            return self._messages

    @property
    def groups(self) -> GroupTable:
        """The progress of consumer groups. The first use makes its table."""
        with self.lock:
            if self._groups is None:
                self._groups = GroupTable(self._with_our_lock(self._tables.groups()))
            return self._groups

    def has_groups(self) -> bool:
        """Whether any consumer group has ever read. It makes no table."""
        return self._groups is not None or self._tables.has_groups()

    def tables(self) -> list[Table]:
        """The tables that exist, as they were last read. ``groups`` exists from its first use on."""
        tables = [self.half.table, self.op_table, self.topics_table, self.messages_table]
        return [*tables, self.groups.table] if self._tables.has_groups() else tables

    # ------------------------------------------------------------------ topics
    def create_own_topic(self, name: str) -> None:
        """Create a topic of retries or dead letters, with one queue as in RocketMQ, unless it exists."""
        require_topic_name(name, own=True)
        self.topic_store.create([name], 1, fifo=False, exist_ok=True)

    def topics(self) -> dict[str, int]:
        return {name: topic.queues for name, topic in self.topic_store.all().items()}

    def require_topic(self, name: str) -> int:
        """The number of queues of a topic. TopicNotFoundError names the nearest topic that exists."""
        topics = self.topics()
        require_known_topic(name, topics)
        return topics[name]

    def clock_doubt_s(self, note: bool = True) -> float:
        """Seconds by which this machine's clock may be ahead: see :func:`~rmq_spark._core.log.clock_doubt.doubt_s`."""
        return doubt_s(self, note)

    # ------------------------------------------------------------------ a half batch, from its files to its verdicts
    def stage(self, writer: HalfWriter, batches: Sequence[pa.RecordBatch], partition: int = 0) -> list[HalfFile]:
        """Write messages as half files in this process. Executors do the same with ``HalfWriter`` alone."""
        return self.with_runtime(writer).write(self.half.table.fs, self.half.table.folder, partition, batches)

    def with_runtime(self, writer: HalfWriter) -> HalfWriter:
        return writer if writer.runtime is self.runtime else replace(writer, runtime=self.runtime)

    @retry_on_newest_state
    def last_batch_id(self, app_id: str, refresh: bool = True) -> int | None:
        """The newest batch id that this application prepared; without ``refresh``, as of the last read."""
        with self.lock:
            if refresh:
                self.half.table.refresh()
            return self.half.table.transaction_version(app_id)

    def is_replay(self, header: HalfHeader) -> bool:
        """Whether the log has this numbered batch, or a later one of its application."""
        last = self.last_batch_id(header.app_id) if header.numbered else None
        return last is not None and header.batch_id <= last

    def header_of(self, app_id: str, batch_id: int) -> HalfHeader | None:
        """The header of a half batch. The last one that this handle prepared of an application is not read again."""
        prepared = self._last_headers.get(app_id)
        if prepared is not None and prepared.batch_id == batch_id:
            return prepared
        record = self.find(app_id, batch_id)
        return None if record is None else record.header

    @retry_on_newest_state
    def find(self, app_id: str, batch_id: int) -> HalfRecord | None:
        """The half batch of an application and batch id. Once it has left, the record has only its archive."""
        with self.lock:
            record = self.half.find(app_id, batch_id)
            # Read op after half: a half batch is archived in op before it leaves half.
            archived = self.ledger.archived_as(app_id, batch_id) if record is None else None
            return record if archived is None else HalfRecord.of_archived(archived)

    @retry_on_newest_state
    def get(self, half_id: str) -> HalfRecord:
        """The half batch of this id. HalfBatchNotFoundError: there is none. HalfBatchLeftError: it has left."""
        with self.lock:
            try:
                return self.half.get(half_id)
            except HalfBatchNotFoundError:
                archived = self.archived(half_id) if isinstance(half_id, str) and half_id.isascii() else None
                if archived is None:
                    raise
                raise archived.left_error() from None

    @retry_on_newest_state
    def archived(self, half_id: str) -> Archived | None:
        """The archive of a half batch that was settled and has left ``half``; None for any other."""
        return self.ledger.archived(half_id)

    def _has_left_elsewhere(self, half_id: str) -> bool:
        """Whether a half batch has left. A new handle reads ``op``, so that this handle stays at the version that it
        has read."""
        return self.another().archived(half_id) is not None

    def prepare(self, staged: Sequence[Staged]) -> list[HalfRecord | PrepareError]:
        """Commit the staged files of several half batches at once: see :meth:`HalfTable.prepare`. Then refresh
        ``op``."""
        if staged:
            reach("staged", header=staged[0].header)
        half_ids = [batch.header.half_id for batch in staged]
        with self.lock:
            self.ledger.note_prepared(half_ids)
            try:
                results = self.half.prepare(staged, self.ledger.ms_before_prepare, self.ledger.archived_among)
            except BaseException:
                self.ledger.drop_prepared(half_ids)
                raise
            are_prepared = [isinstance(result, HalfRecord) for result in results]
            self.ledger.drop_prepared(
                [half_id for half_id, is_prepared in zip(half_ids, are_prepared, strict=True) if not is_prepared]
            )
            for batch, is_prepared in zip(staged, are_prepared, strict=True):
                if is_prepared and batch.header.numbered:
                    self._last_headers[batch.header.app_id] = batch.header
        self.refresh()
        return results

    def still_in_half(self, half_ids: Collection[str]) -> set[str]:
        """Those of the ids whose half batches the table ``half`` still has. No check asks about one that it lacks: that
        one is settled and has left, or was never prepared."""
        with self.lock:
            batches = self.half.contents.all_batches()
            # A file that cannot be read may have any of them.
            return set(half_ids) if batches.unreadable else set(half_ids).intersection(batches)

    @retry_on_newest_state
    def half_batch(
        self,
        record: HalfRecord,
        state: BatchState,
        attempt: int,
        rows: RowSet,
        arg: Any = None,
        in_memory: HalfRows | pa.Table | None = None,
    ) -> HalfBatch:
        """The half batch as a listener sees it: these rows, all under one attempt. ``in_memory``: all rows of the half
        batch, or some of their columns, if the caller has them."""
        return half_batch_of(self, record, state, attempt, rows, arg, in_memory)

    @retry_on_newest_state
    def state_of(self, record: HalfRecord, refresh: bool = True) -> BatchState:
        """The state of a half batch by its newest op markers; without ``refresh``, by those read last."""
        return self.ledger.state_of(record, refresh)

    @retry_on_newest_state
    def small_batches(self, half_ids: Collection[str]) -> list[tuple[HalfRecord, BatchState, pa.Table]]:
        """The small half batches among these, read together, with their newest states and all their rows (the columns
        ``SMALL_COLUMNS``). A half batch that cannot be read, or has left, is missing."""
        batches: list[tuple[HalfRecord, BatchState, pa.Table]] = []
        with self.lock:
            small = self.half.find_small(half_ids, SMALL_ROWS_MAX)
            self.ledger.refresh()
            self.ledger.read_older(record for record, _ in small.values())
            for record, rows in small.values():
                with suppress(TxmqError):  # the checker looks at it alone, and reports it
                    batches.append((record, self.ledger.state_of(record, refresh=False), rows))
        return batches

    def decide(self, decisions: Sequence[Decision]) -> list[Decided]:
        """Make verdicts on half batches final, all in one commit: see :meth:`Ledger.decide`."""
        decided = self.ledger.decide(decisions)
        self.compaction.after_commit()
        return decided

    # ------------------------------------------------------------------ what is open
    @retry_on_newest_state
    def open_half_ids(self) -> list[str]:
        """The ids of half batches that may have pending rows, oldest first. No half batch is read, so one that cannot
        be read hides no other."""
        half_ids = self.ledger.open_half_ids()
        reach("open batches listed")
        return half_ids

    # ------------------------------------------------------------------ following the log
    def refresh(self) -> int:
        """Read the new rows of ``op``, and return its version."""
        return self.ledger.refresh()

    @retry_on_newest_state
    def tails(self, refresh: bool = True) -> Tails:
        """The next offset of every queue that has messages, by (topic, queue_id)."""
        with self.lock:
            if refresh:
                self.ledger.refresh()
            return self.ledger.view.tails

    @retry_on_newest_state
    def firsts(self, refresh: bool = True) -> Tails:
        """The first offset that is kept, by (topic, queue_id), of queues with expired messages."""
        with self.lock:
            if refresh:
                self.ledger.refresh()
            return self.ledger.view.firsts

    def read_range(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Rows of a file of ``half`` or ``messages``, as ``row_range.read_range`` yields them."""
        if wanted.table == self.messages_table.name:
            return self.messages_table.read_range(wanted, columns, where)
        return self.half.read_range(wanted, columns, where)

    def find_again(self, lost: MessageRange) -> list[MessageRange]:
        """Where messages lie now, if their file was removed after a read was planned. LostFileError: nowhere."""
        self.refresh()
        if isinstance(lost, PlacedRange):
            has_left = self.archived(lost.rows.half_id) is not None
            has_payload = None if has_left else self.half.has_payload(lost.rows)
            if has_payload:  # its file also has half batches without payload
                return [lost]
            if has_left or has_payload is False:
                reason = "left half" if has_left else "has no payload any more in half"
                self.messages_table.refresh()
                require_drained(self.messages_table, lost.op_version, f"half batch {lost.rows.half_id!r} {reason}")
        self.drained.border()
        ranges, missing = self.drained.ranges((lost.topic, lost.queue_id), lost.queue_offset, lost.stop)
        if missing:
            raise LostFileError(
                f"{out_of_range(lost.topic, lost.queue_id, *missing[0])}: file {lost.rows.path} of table "
                f"{lost.rows.table} is gone"
            )
        return ranges
