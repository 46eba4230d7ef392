"""The commit log, as programs hold it: a folder with Delta tables such as ``half``, ``op`` and ``topics``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime

import pyarrow as pa

from rmq_spark._core.client.backup import BackupReport, back_up
from rmq_spark._core.client.delta_tables import (
    LOG_RETENTION,
    DeltaTables,
    create_tables,
    require_no_log_around,
    require_no_rest,
)
from rmq_spark._core.inspect import assemble_trace, unsettled
from rmq_spark._core.inspect.trace import Trace
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.batch_state import RowState
from rmq_spark._core.log.decision import Placed
from rmq_spark._core.log.log_tables import LogTables
from rmq_spark._core.log.op import Who
from rmq_spark._core.messages.drain import drain
from rmq_spark._core.messages.message_reader import read_topic
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.delta_table import DeltaLogTable
from rmq_spark._core.storage.location import location
from rmq_spark._core.storage.stores import folders_removed, reaching, require_put_if_absent, require_storage_options
from rmq_spark._core.upkeep import schedule as upkeep
from rmq_spark._core.upkeep import table_files
from rmq_spark._core.upkeep.leave import Graces
from rmq_spark._core.upkeep.schedule import MaintenanceReport
from rmq_spark._core.vocabulary.message import require_topic_name, utf8
from rmq_spark._core.vocabulary.options import (
    ORPHAN_AGE_S,
    QUEUES_DEFAULT,
    QUEUES_MAX,
    RETENTION_S_MIN,
    Duration,
    flag,
    named,
    seconds,
    whole_number,
)
from rmq_spark._core.vocabulary.redaction import remember
from rmq_spark._core.vocabulary.remedy import Remedy
from rmq_spark._core.vocabulary.verdicts import LocalTransactionState
from rmq_spark.errors import CommitLogExistsError, OptionError


class CommitLog:
    """A commit log. Make one with :meth:`create`, open one with :meth:`open`.

    An object serves one process and all its threads. A fork (os.fork) of the process can neither use nor open a log.
    """

    def __init__(self, tables: LogTables) -> None:
        if not isinstance(tables, LogTables):
            raise TypeError("CommitLog.open(path) opens a commit log, and CommitLog.create(path) makes one")
        self.engine = Engine(tables)
        """The protocol on this log's tables. Internal to the package: it may change with any version."""

    @property
    def path(self) -> str:
        """The folder or URI, as delta-rs, pyarrow and Spark spell it."""
        return self.engine.path

    @property
    def id(self) -> str:
        """The log's id. A log that is created anew at the same path has another id, and counts from 0 again."""
        return self.engine.id

    @property
    def storage_options(self) -> dict[str, str]:
        """The storage options with which the log was opened. They may hold secrets."""
        return self.engine.storage_options

    def __repr__(self) -> str:
        return repr(self.engine)

    def __getstate__(self) -> object:
        return self.engine.__getstate__()

    # ------------------------------------------------------------------ creating and opening
    @classmethod
    @named
    def create(
        cls,
        path: str | os.PathLike[str],
        queues: int = QUEUES_DEFAULT,
        exist_ok: bool = False,
        storage_options: Mapping[str, str] | None = None,
        log_retention: Duration = LOG_RETENTION,
    ) -> CommitLog:
        """Create a commit log and open it.

        Parameters
        ----------
        path : str or os.PathLike
            A local folder or an object-store URI.
        queues : int
            Default number of queues of a topic.
        exist_ok : bool
            Open an existing log, instead of raising.
        storage_options : mapping, optional
            Passed to delta-rs: credentials, endpoint, region.
        log_retention : float or str
            How long entries of the Delta logs stay, such as ``"1m"`` (default). Those of ``messages``, and the files
            that it replaced, stay for at least 7 days. A foreign Delta *stream* reader that lags more needs longer.

        Raises
        ------
        CommitLogExistsError
            When a log exists there and ``exist_ok`` is false, or when the path lies inside a log.
        CorruptLogError
            When an existing log has lost its table ``topics``.
        StorageError
            When the store cannot be reached, or would let two writers overwrite each other's commits.
        """
        where = location(path)
        whole_number(queues, "queues", 1, QUEUES_MAX, " of queues")
        retention_s = int(seconds(log_retention, "log_retention"))
        require_storage_options(where, storage_options)
        remember(storage_options)
        with reaching(where, storage_options), folders_removed(where):
            if DeltaLogTable.exists(f"{where}/topics", storage_options):
                if exist_ok:
                    return cls.open(where, storage_options)
                raise CommitLogExistsError(
                    f"{where} is a commit log already",
                    remedy=Remedy("open it, or pass exist_ok=True", "use it as it is, or pass --exist-ok"),
                )
            reach("log made")
            require_no_log_around(where, storage_options)
            require_no_rest(where, storage_options)
            require_put_if_absent(where, storage_options)
            create_tables(where, queues, storage_options, retention_s)
        return cls.open(where, storage_options)

    @classmethod
    @named
    def open(cls, path: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> CommitLog:
        """Open a commit log. ``half`` opens in the background, so its errors show at its first use.

        Raises
        ------
        NotACommitLogError
            When the path holds no commit log.
        LogFormatError
            When the log has another format than this version of rmq_spark reads and writes.
        StorageError
            When the store cannot be reached.
        """
        where = location(path)
        require_storage_options(where, storage_options)
        remember(storage_options)
        return cls(DeltaTables.open(where, storage_options))

    # ------------------------------------------------------------------ topics
    @named
    def create_topic(
        self,
        name: str,
        queues: int | None = None,
        fifo: bool = False,
        exist_ok: bool = False,
        retention: Duration | None = None,
    ) -> None:
        """Add a topic. For arguments and errors see :meth:`create_topics`."""
        self.create_topics([name], queues, fifo, exist_ok, retention)

    @named
    def create_topics(
        self,
        names: Collection[str],
        queues: int | None = None,
        fifo: bool = False,
        exist_ok: bool = False,
        retention: Duration | None = None,
    ) -> None:
        """Add topics of one kind in one commit: all of them or none.

        Parameters
        ----------
        names : collection of str
        queues : int, optional
            1 to 1024; by default the commit log's default. The number never changes.
        fifo : bool
            A FIFO topic: messages of one sharding key become visible in the order in which they were sent, even when
            a check settles an earlier one. Every message needs a sharding key, and none may be delayed.
        exist_ok : bool
            Leave an existing topic as it is. One with another retention is refused.
        retention : float or str, optional
            How long messages are kept after their commit, such as ``"7d"``: at least an hour, by default for ever.
            Upkeep (:meth:`maintain`) lets older ones expire. See :meth:`set_retention`.

        Raises
        ------
        MessageError
            When a name breaks RocketMQ's rules.
        TopicExistsError
            When a topic exists already, unless ``exist_ok`` and it is of the same kind.
        OptionError
            When the retention is no duration, or too short, or ``names`` is one text.
        """
        if isinstance(names, str):
            raise OptionError(f"names={names!r} is one text: a list of topic names is expected, such as [{names!r}]")
        topic_names = list(names)
        for name in topic_names:
            require_topic_name(name)
        self.engine.topic_store.create(
            topic_names, queues, flag(fifo, "fifo"), flag(exist_ok, "exist_ok"), _retention_s(retention)
        )

    @named
    def set_retention(self, name: str, retention: Duration | None) -> None:
        """Set how long a topic's messages are kept after their commit (RocketMQ: ``fileReservedTime``).

        Parameters
        ----------
        name : str
        retention : float, str or None
            Such as ``"7d"``, at least an hour; None keeps them for ever.

        Raises
        ------
        TopicNotFoundError, OptionError
        """
        retention_s = _retention_s(retention)
        self.engine.require_topic(name)
        self.engine.topic_store.set_retention(name, retention_s)

    def retentions(self) -> dict[str, float | None]:
        """Topics and the seconds for which their messages are kept (None: for ever)."""
        return {name: topic.retention_s for name, topic in self.engine.topic_store.all().items()}

    def topics(self) -> dict[str, int]:
        """Topics and their number of queues."""
        return self.engine.topics()

    def fifo_topics(self) -> frozenset[str]:
        """The FIFO topics."""
        return frozenset(name for name, topic in self.engine.topic_store.all().items() if topic.fifo)

    def firsts(self) -> dict[tuple[str, int], int]:
        """By (topic, queue_id): the first offset that is kept, where messages have expired."""
        return dict(self.engine.firsts())

    def tails(self) -> dict[tuple[str, int], int]:
        """By (topic, queue_id): the offset that the next committed message gets."""
        return dict(self.engine.tails())

    def refresh(self) -> int:
        """Read new rows of ``op``, and return its version."""
        return self.engine.refresh()

    @property
    def version(self) -> int:
        """The version of ``op`` that was read last."""
        return self.engine.op_table.version

    # ------------------------------------------------------------------ unsettled half batches
    def pending(self) -> pa.Table:
        """Half batches with pending messages, a row per attempt, oldest first.

        Returns
        -------
        pyarrow.Table
            ``half_id, app_id, batch_id, producer_group, attempt, messages`` (pending ones), ``check_times``,
            ``prepared_at`` and ``lease_until`` (UTC), and ``bytes`` of the half batch's files (its share of shared
            ones). A half batch whose files are lost or damaged has no ``producer_group``; what only they tell is null.
            The first rows, with a null ``half_id``, are lost or damaged files that several half batches share.
        """
        return unsettled.pending(self.engine)

    def open_messages(self) -> dict[tuple[str, int], tuple[int, int]]:
        """By (topic, queue_id): the number of pending messages, and of committed ones that wait for their time or for
        an earlier message of their sharding key."""
        return unsettled.open_messages(self.engine)

    def quarantined(self) -> pa.Table:
        """Half batches with quarantined messages, with the columns and the order of :meth:`pending`."""
        return unsettled.quarantined(self.engine)

    def conflicts(self) -> list[str]:
        """Half batches with a verdict that came too late and that no person has resolved."""
        return unsettled.conflicts(self.engine)

    @named
    def half_batches(
        self, half_id: str, states: Sequence[RowState] = (RowState.PENDING, RowState.QUARANTINED)
    ) -> list[HalfBatch]:
        """The messages of a half batch that are in some states, as its listener would see them. Nothing is written, and
        no check is counted.

        Parameters
        ----------
        half_id : str
        states : sequence of RowState
            What is open, when not given.

        Returns
        -------
        list of HalfBatch
            One for each attempt that has messages in these states.

        Raises
        ------
        HalfBatchNotFoundError
            When the log has no such half batch.
        HalfBatchLeftError
            When it is settled and has left; the error says what is kept of it.
        """
        record = self.engine.get(half_id)
        state = self.engine.state_of(record)
        return [
            self.engine.half_batch(record, state, attempt, state.rows_in(states, attempt))
            for attempt in state.attempts(*states)
        ]

    @named
    def resolve(self, half_id: str, verdict: LocalTransactionState, reason: str) -> list[Placed]:
        """Settle a half batch's pending, quarantined and conflicting messages by a person's verdict.

        Parameters
        ----------
        half_id : str
        verdict : LocalTransactionState
            COMMIT_MESSAGE or ROLLBACK_MESSAGE.
        reason : str
            Kept with the op marker.

        Raises
        ------
        VerdictConflictError
            When visible messages would have to be taken back.
        """
        if verdict not in (LocalTransactionState.COMMIT_MESSAGE, LocalTransactionState.ROLLBACK_MESSAGE):
            raise OptionError(f"resolve needs COMMIT_MESSAGE or ROLLBACK_MESSAGE: {verdict!r} settles nothing")
        verdict = LocalTransactionState(verdict)
        _require_reason(reason)
        return self.engine.ledger.overrule(self.engine.get(half_id), verdict, reason)

    @named
    def resume(self, half_id: str, reason: str = "resumed") -> int:
        """Make quarantined messages pending again, so that checks go on, and return their number."""
        _require_reason(reason)
        record = self.engine.get(half_id)
        states = (RowState.QUARANTINED,)
        return sum(
            self.engine.ledger.reopen(record, attempt, states, attempt, Who.ADMIN, reason).count
            for attempt in self.engine.state_of(record).attempts(*states)
        )

    def trace(
        self, transaction_id: str | None = None, *, half_id: str | None = None, message_id: str | None = None
    ) -> Trace:
        """Trace a transaction, a half batch or a message: prepared, checked, decided (by whom and why), placed,
        drained, archived (RocketMQ: ``queryMsgTraceById``).

        Parameters
        ----------
        transaction_id, half_id, message_id : str
            One of them. A column of the source, or of :meth:`pending`, has it.

        Returns
        -------
        Trace
            ``print`` it. Upkeep removes old rows; ``unknown`` says what is no longer known.

        Raises
        ------
        OptionError
            When not exactly one id is given, or it is invalid.
        HalfBatchNotFoundError
            When the log does not have it, or nothing is left of it.
        """
        return assemble_trace.trace(self.engine, transaction_id, half_id, message_id)

    # ------------------------------------------------------------------ reading
    @named
    def read(
        self,
        topic: str,
        start: Mapping[int, int] | datetime | None = None,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
        tags: str | None = None,
        selector: str | None = None,
    ) -> pa.Table:
        """Read committed messages of a topic, without Spark.

        Parameters
        ----------
        topic : str
        start : mapping of int to int or datetime, optional
            First offset of each queue (by default the first kept one). Or a time with a time zone: each queue's first
            message that was committed then or later.
        limit : int, optional
            The most messages, from the lowest queues first. A filter is applied before the limit.
        columns : sequence of str, optional
            Some of the source's columns; by default all of them.
        tags : str, optional
            ``"TagA || TagB"``: only messages with one of these tags (RocketMQ: ``MessageSelector.byTag``).
        selector : str, optional
            Only messages for which this SQL92 condition is TRUE (RocketMQ: ``MessageSelector.bySql``). Needs lark.

        Returns
        -------
        pyarrow.Table
            In (queue_id, queue_offset) order.

        Raises
        ------
        TopicNotFoundError, OptionError
        """
        return read_topic(self.engine, topic, start, limit, columns, tags, selector)

    # ------------------------------------------------------------------ upkeep
    @named
    def vacuum(self, older_than: Duration | None = None, dry_run: bool = False) -> list[str]:
        """Delete files that no table names (orphans of crashes, leftovers of compaction), and return their paths.

        Parameters
        ----------
        older_than : float or str, optional
            At least ``"7d"`` (default), because younger files may belong to a batch that is being prepared.
        dry_run : bool
            Only list the files.
        """
        age_s = ORPHAN_AGE_S if older_than is None else seconds(older_than, "older_than")
        if age_s < ORPHAN_AGE_S:
            raise OptionError(
                f"{older_than!r} is under {ORPHAN_AGE_S / 86400:.0f}d: files that young may be in use",
                argument="older_than",
            )
        with self.engine.lock:
            doubt_s = self.engine.clock_doubt_s(note=not dry_run)
            return table_files.vacuum(self.engine.tables(), age_s + doubt_s, dry_run)

    @named
    def maintain(
        self,
        dry_run: bool = False,
        grace: Duration | None = None,
        audit: Duration | None = None,
        idempotency: Duration | None = None,
    ) -> MaintenanceReport:
        """Do all upkeep, so that the log does not grow with its age: drain, let settled half batches leave, prune their
        op rows, merge small files, delete files that no table names.

        It is safe beside sinks, checkers, readers and other maintainers. After a crash the next call finishes the work.

        Parameters
        ----------
        dry_run : bool
            Only report the present work, without the steps that follow a drain, such as archiving the drained messages.
        grace : float or str, optional
            How long a half batch stays after its last op row, and its op rows after it has left: active readers and
            producers may need them. ``"10m"`` (default) or another duration of a minute or more.
        audit : float or str, optional
            How long rolled back messages stay, ``"7d"`` by default. Meanwhile a person can inspect them, and a late
            verdict can be resolved.
        idempotency : float or str, optional
            How long the outcome of a half batch is kept after it left, ``"7d"`` by default. Meanwhile a retry under its
            idempotency key, or of an old batch id, gets that outcome. Afterwards the key can be used again.

        Returns
        -------
        MaintenanceReport
            ``print`` it.

        Raises
        ------
        OptionError
            For an invalid duration, or a grace under a minute.
        """
        return upkeep.maintain(self.engine, Graces.of(grace, audit, idempotency), dry_run)

    def drain(self) -> int:
        """Copy placed messages into the table ``messages``, so that every Delta reader sees them. Any number of
        processes may drain at once.

        Returns
        -------
        int
            The version of ``op`` up to which the table now has all messages.

        Raises
        ------
        LostFileError, CorruptLogError
            When messages cannot be read. Earlier messages are drained.
        """
        return drain(self.engine)

    @named
    def backup(
        self,
        target: str | os.PathLike[str],
        storage_options: Mapping[str, str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> BackupReport:
        """Copy the log's state at one moment to another place, while programs send, read and do upkeep.

        The copy can be opened as a commit log with the same id. An older copy is updated: only missing files are
        copied, and it stays intact until they are there.

        Parameters
        ----------
        target : str or os.PathLike
            A local folder or an object-store URI: empty, or an older copy by a backup.
        storage_options : mapping, optional
            For the target's store; by default those of the log.
        progress : callable, optional
            ``progress(copied, total)`` is called with bytes after each file.

        Returns
        -------
        BackupReport
            ``print`` it.

        Raises
        ------
        OptionError
            When the target is the log, lies inside it, or around it.
        CommitLogExistsError
            When the target holds anything but an older copy of this log, or lies inside another log.
        CorruptLogError, ForeignChangeError
            When the log is damaged, or a foreign writer has changed it. An older copy then stays unchanged.
        StorageError
            When a store cannot be reached.
        """
        return back_up(self.engine, target, storage_options, progress)

    def another(self) -> CommitLog:
        """Open another, fresh handle on this log."""
        return type(self).open(self.path, self.storage_options)

    def close(self) -> None:
        """Wait for running upkeep."""
        self.engine.compaction.wait()


def _retention_s(retention: Duration | None) -> float | None:
    if retention is None:
        return None
    try:
        retention_s = seconds(retention, "retention")
    except OptionError as problem:
        forever = "keeps messages for ever"
        raise OptionError(
            problem.problem, argument="retention", remedy=Remedy(f"None {forever}", f"'forever' {forever}")
        ) from None
    if retention_s < RETENTION_S_MIN:
        raise OptionError(
            f"{retention!r} is under {RETENTION_S_MIN / 3600:g}h: readers need time", argument="retention"
        )
    return retention_s


def _require_reason(reason: object) -> None:
    if not isinstance(reason, str) or not reason.strip():
        raise OptionError("a person's decision needs a reason: it is kept with the op marker", argument="reason")
    utf8(reason, "reason")


def engine_of(
    log: CommitLog | Engine | str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
) -> Engine:
    """Return the engine of an open commit log or of the one at a path, opened as :meth:`CommitLog.open` does; an engine
    is returned as it is."""
    if isinstance(log, Engine):
        return log
    return (log if isinstance(log, CommitLog) else CommitLog.open(log, storage_options)).engine
