"""A consumer inbox writes results and positions in one database transaction, so that each message counts once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.consumers.message_listener import FAILURE
from rmq_spark._core.database.connection import Address, Database
from rmq_spark._core.database.exact_keys import INNODB_TABLE, exact_text, insert_absent, require_exact, similar_names
from rmq_spark._core.database.guard import begin_savepoint, end_savepoint, no_commit_within
from rmq_spark._core.listeners.transaction_listener import require_work
from rmq_spark._core.runtime.forks import called_here
from rmq_spark._core.runtime.runtime import RUNTIME, Runtime
from rmq_spark._core.runtime.travel import require_travels
from rmq_spark._core.vocabulary.message import require_group_name, require_topic_name
from rmq_spark._core.vocabulary.options import GROUP_CHARS_MAX, TOPIC_CHARS_MAX, named, whole_number
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.redaction import cause_of, traceback_of
from rmq_spark.errors import InboxConflictError, ListenerError, OptionError, TransactionEndedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

INBOX_TABLE = "txmq_inbox"
POSITION_COLUMNS = ("topic", "queue_id", "queue_offset")

Work = Callable[[sa.Connection, pa.Table], Any]


class _Position(NamedTuple):
    """The position of a queue: results are written for all messages below it.

    Commit times never fall along a queue. So a message below the position with a newer commit time is another message:
    the log was restored from a copy, and has given the offset again.
    """

    next_offset: int
    committed_us: int | None = None
    """The newest commit time of the messages below it, in microseconds since 1970; None when unknown."""

    def under_way(self) -> _Position:
        """Return the negative mark of this position, which is stored while ``work`` runs, or the position of a mark."""
        return self._replace(next_offset=-1 - self.next_offset)


InboxPositions = Mapping[tuple[str, int], _Position]


class SqlInbox(Database):
    """A function for ``writeStream.foreachBatch`` that writes the result of each message into a database once.

    The same database keeps the group's position in each queue. The transaction that writes the results also moves the
    positions. So neither a crash, nor a micro-batch that runs again, nor a second driver can lose or double a result.
    All messages of a micro-batch come to the driver: limit them with ``maxOffsetsPerTrigger``.

    Parameters
    ----------
    url_or_engine : str, sqlalchemy.URL, callable or sqlalchemy.Engine
        The database, as for :class:`~rmq_spark.SqlTransactionListener`. Over Spark Connect, which pickles the inbox:
        a URL, ``"env:NAME"``, or a function that returns the URL.
    group : str
        The consumer group.
    work : callable
        ``work(connection, messages)`` gets the open database transaction and a ``pyarrow.Table`` of messages that it
        has not had before, in (topic, queue, offset) order. An exception rolls everything back.
        To return ``ConsumeResult.FAILURE`` is an error, because it would undo nothing.
    table : str
        Name of the table of positions. The table ``<table>_log`` keeps the id of the log that they belong to.
    schema : str, optional
        The database schema of both tables.
    log : CommitLog or path, optional
        The log of the messages. With it, positions of another log are an error. A log that was made anew counts its
        offsets from 0 again; without ``log``, its messages would count as old ones.

    Examples
    --------
    >>> inbox = SqlInbox("sqlite:///points.db", "points", give_points, log=log)  # doctest: +SKIP
    >>> inbox.create()  # doctest: +SKIP
    >>> orders.writeStream.foreachBatch(inbox)  # doctest: +SKIP
    """

    keeps_positions = True
    """Tells a ``PushConsumer`` to give the messages of a queue in order, each with the queue that it was read from."""

    @named
    def __init__(
        self,
        url_or_engine: Address,
        group: str,
        work: Work,
        *,
        table: str = INBOX_TABLE,
        schema: str | None = None,
        log: CommitLog | str | os.PathLike[str] | None = None,
    ) -> None:
        require_work(work, "work(connection, messages)")
        if not isinstance(table, str) or not table.isidentifier() or not table.isascii():
            raise OptionError(f"table={table!r} is not a plain table name of letters, digits and _")
        super().__init__(url_or_engine)
        self.runtime: Runtime = RUNTIME
        self.group = require_group_name(group, "consumerGroup")
        self._work = work
        self._log_id = None if log is None else engine_of(log).id
        self._tried = False  # the table was tested: it compares names exactly, and undoes a rollback
        metadata = sa.MetaData(schema=schema)
        self._table = sa.Table(
            table,
            metadata,
            sa.Column("consumer_group", exact_text(GROUP_CHARS_MAX), primary_key=True),
            sa.Column("topic", exact_text(TOPIC_CHARS_MAX + GROUP_CHARS_MAX), primary_key=True),
            sa.Column("queue_id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("next_offset", sa.BigInteger, nullable=False),
            sa.Column("committed_us", sa.BigInteger),
            **INNODB_TABLE,
        )
        self._log_table = sa.Table(
            f"{table}_log",
            metadata,
            sa.Column("consumer_group", exact_text(GROUP_CHARS_MAX), primary_key=True),
            sa.Column("log_id", sa.String(64), nullable=False),
            **INNODB_TABLE,
        )

    def __repr__(self) -> str:
        return f"SqlInbox({self.where!r}, {self.group!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The pickle has the log's id, and not the log itself, which may be open.
        require_travels(self._work, f"work of {self!r}")
        make, arguments = super().__reduce__()
        make.keywords.pop("log", None)
        return make, arguments, {"_log_id": self._log_id}

    def create(self) -> None:
        """Create the two tables, unless they exist."""
        try:
            self._create()
        except sa.exc.DBAPIError:
            # When two processes create a table at once, one of them may fail, even with IF NOT EXISTS.
            self._create()

    def _create(self) -> None:
        with self.transaction() as connection:
            for table in (self._table, self._log_table):
                connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
            self._test_table_once(connection)

    def require_created(self) -> None:
        """Raise ListenerError when a table is missing. A database that does not answer counts as ready."""
        tables = (self._table,) if self._log_id is None else (self._table, self._log_table)
        for table in tables:
            with suppress(sa.exc.DBAPIError, sa.exc.TimeoutError), self.transaction(write=False) as connection:
                if not sa.inspect(connection).has_table(table.name, schema=table.schema):
                    raise self._missing_table_error(table)

    def positions(self) -> dict[Queue, int]:
        """Return the next offset of every queue for which results were written."""
        with self.transaction(write=False) as connection:
            return {queue: position.next_offset for queue, position in self._positions(connection).items()}

    def set_position(self, topic: str, queue_id: int, next_offset: int) -> None:
        """Set the offset from which results of a queue are to be written. Messages below it count as written.

        ``txmq group reset`` moves the group but not its inbox, which skips the messages that come again as written.
        This also replaces a position that was marked because ``work`` ended its transaction.

        Parameters
        ----------
        topic : str
        queue_id : int
        next_offset : int
            Offset of the first message whose result is still to be written.

        Raises
        ------
        InboxConflictError
            When a consumer moved the position at the same moment.
        """
        queue = (require_topic_name(topic, own=True), whole_number(queue_id, "queue_id", 0))
        with self.transaction() as connection:
            of_topic = (self._table.c.consumer_group == self.group, self._table.c.topic == queue[0])
            query = sa.select(self._table.c.next_offset).where(*of_topic, self._table.c.queue_id == queue[1])
            old_offset = connection.execute(query).scalar()
            before = {} if old_offset is None else {queue: _Position(int(old_offset))}
            self._move(connection, before, {queue: _Position(whole_number(next_offset, "next_offset", 0))})

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write the results of one micro-batch. ``foreachBatch`` calls this."""
        self.apply(batch.toArrow())

    def apply(self, messages: pa.Table) -> int:
        """Write the results of new messages, and return the number of these messages.

        Parameters
        ----------
        messages : pyarrow.Table
            A micro-batch, or a result of ``CommitLog.read``, with at least the source's columns ``topic``, ``queue_id``
            and ``queue_offset``. For each queue it must have all of the group's messages from the position on to the
            last one given. With the column ``commit_timestamp``, the inbox notices a restored log.

        Raises
        ------
        InboxConflictError
            When another process wrote results of the same queues at the same time, the positions belong to another
            log, or the log was restored from a copy and has other messages below a position. Nothing was written.
        TransactionEndedError
            When ``work`` ended the database transaction. Some of the results may be committed. Every later call is an
            error until the positions are set with :meth:`set_position`. When the positions could not be marked, the
            error says so, and a later call would write the results again.
        """
        missing = [name for name in POSITION_COLUMNS if name not in messages.column_names]
        if missing:
            raise OptionError(
                f"the messages have no column {missing[0]!r}: select {', '.join(POSITION_COLUMNS)} as well"
            )
        if messages.num_rows == 0:
            return 0
        messages = _without_duplicates(messages.sort_by([(name, "ascending") for name in POSITION_COLUMNS]))
        try:
            with self.transaction() as connection:
                before = self._positions(connection)
                self._require_same_log(connection)
                starts = pc.fill_null(_values_of_queues(messages, {q: p.next_offset for q, p in before.items()}), 0)
                is_new = pc.greater_equal(messages["queue_offset"], starts)
                self._require_written(messages.filter(pc.invert(is_new)), before)
                new = messages.filter(is_new)
                ends = _end_positions(new)
                if new.num_rows:
                    self._test_table_once(connection)
                    self._run_work(connection, before, ends, new)
                return int(new.num_rows)
        except TransactionEndedError as problem:
            whose = f"The positions of group {self.group!r}"
            if self._mark_positions(before, ends):
                then = f"{whose} are marked (below 0), and no later call goes on"
            else:
                then = f"{whose} could not be marked, so a later call would write the results again: stop the consumer"
            raise TransactionEndedError(
                f"{problem}. {then}: look what is there, undo or finish it, and call "
                "set_position(topic, queue_id, next_offset)"
            ) from cause_of(problem)

    def _require_written(self, old: pa.Table, before: InboxPositions) -> None:
        """Require that the messages below the positions are those whose results were written."""
        newest_us = _values_of_queues(old, {queue: position.committed_us for queue, position in before.items()})
        unknown = old.filter(pc.fill_null(pc.greater(_committed_us(old), newest_us), False))
        if unknown.num_rows:
            first = unknown.slice(0, 1).to_pylist()[0]
            topic, queue_id, offset = (first[name] for name in POSITION_COLUMNS)
            raise InboxConflictError(
                f"topic {topic!r}, queue {queue_id}: the message at offset {offset} was committed at "
                f"{first['commit_timestamp']}, after all whose results group {self.group!r} has written in "
                f"{self.where}, and its position is {before[topic, queue_id].next_offset}: the log was restored from a "
                "copy, and counts on from its older end. Nothing was written. Look which results came from messages "
                f"that the log lost, and call set_position({topic!r}, {queue_id}, {offset}) to go on with this message"
            )

    def _run_work(self, connection: sa.Connection, before: InboxPositions, ends: InboxPositions, new: pa.Table) -> None:
        """Run ``work``, and move the positions.

        The positions are negative while ``work`` runs. If ``work`` ends the transaction, they stay negative, and every
        later call is refused. ::

            next_offset   23  ──▶  -24  ── work ──▶  31
        """
        under_way = {queue: before.get(queue, _Position(0)).under_way() for queue in ends}
        self._move(connection, before, under_way)
        begin_savepoint(connection)
        with no_commit_within(connection):
            answer = called_here(self._work, connection, new)  # a forked process would commit on this connection
            if FAILURE in (answer if isinstance(answer, list) else [answer]):
                raise ListenerError(f"work of {self!r} returned FAILURE, which undoes nothing: raise an exception")
            end_savepoint(connection, keep=True)
        self._move(connection, under_way, ends)

    def _mark_positions(self, before: InboxPositions, ends: InboxPositions) -> bool:
        """Mark the positions so that no later call goes on; False when the database did not take it."""
        try:
            with self.transaction() as connection:
                self._move(connection, before, {q: before.get(q, _Position(0)).under_way() for q in ends})
        except InboxConflictError:
            pass  # work committed the negative positions
        except sa.exc.DBAPIError as problem:
            logger.error(
                "%r: could not note that its work ended the database transaction: %s", self, traceback_of(problem)
            )
            return False
        return True

    def _test_table_once(self, connection: sa.Connection) -> None:
        if self._tried:
            return
        trial = f"trial-{self.runtime.unique_id()}"
        names = [(group, "t") for group in similar_names(f"{trial}-g")]
        names += [(trial, topic) for topic in similar_names("t-")]
        rows = [{"consumer_group": g, "topic": t, "queue_id": 0, "next_offset": 0} for g, t in names]
        require_exact(connection, self._table, rows)
        self._tried = True

    def _require_same_log(self, connection: sa.Connection) -> None:
        """Require that the positions belong to the inbox's log. The first inbox that has a log stores the log's id."""
        if self._log_id is None:
            return
        columns = self._log_table.c
        with self._naming_missing_table(self._log_table):
            insert_absent(connection, self._log_table, [{"consumer_group": self.group, "log_id": self._log_id}])
        query = sa.select(columns.log_id).where(columns.consumer_group == self.group)
        stored_id = connection.execute(query.with_for_update(read=True)).scalar_one()
        if stored_id != self._log_id:
            raise InboxConflictError(
                f"the positions of group {self.group!r} in {self.where} count the offsets of log {stored_id}, and the "
                f"messages come from log {self._log_id}: it was made anew, or it is another one. Nothing was written. "
                "Use another group, or delete the group's rows in "
                f"{self._table.fullname!r} and {self._log_table.fullname!r} to begin anew"
            )

    @contextmanager
    def _naming_missing_table(self, table: sa.Table) -> Iterator[None]:
        try:
            yield
        except (sa.exc.OperationalError, sa.exc.ProgrammingError) as problem:
            if sa.inspect(self.engine).has_table(table.name, schema=table.schema):
                raise
            raise self._missing_table_error(table) from cause_of(problem)

    def _missing_table_error(self, table: sa.Table) -> ListenerError:
        return ListenerError(
            f"{self.where} has no table {table.fullname!r}: call create() once, when the database is set up"
        )

    def _positions(self, connection: sa.Connection) -> dict[tuple[str, int], _Position]:
        columns = self._table.c
        query = sa.select(columns.topic, columns.queue_id, columns.next_offset, columns.committed_us)
        with self._naming_missing_table(self._table):
            rows = connection.execute(query.where(columns.consumer_group == self.group)).all()
        positions = {(topic, queue_id): _Position(*position) for topic, queue_id, *position in rows}
        for (topic, queue_id), position in positions.items():
            if position.next_offset < 0:
                raise ListenerError(
                    f"work ended the database transaction of group {self.group!r}, topic {topic!r}, queue {queue_id} "
                    f"in its middle: a part of the results from offset {position.under_way().next_offset} on may be "
                    f"in {self.where}. Look there, undo or finish that part, and call set_position({topic!r}, "
                    f"{queue_id}, next_offset) with the first offset to go on with"
                )
        return positions

    def _move(self, connection: sa.Connection, before: InboxPositions, after: InboxPositions) -> None:
        """Move every queue's position from ``before`` to ``after``, or raise when another process has moved it.

        The first move precedes ``work``: of two processes at the same queue, one waits here, and then gets the error.
        """
        columns = self._table.c
        for queue, end in sorted(after.items()):
            key = {"consumer_group": self.group, "topic": queue[0], "queue_id": queue[1]}
            if queue in before:
                has_key = sa.and_(*(columns[name] == value for name, value in key.items()))
                update = self._table.update().where(has_key, columns.next_offset == before[queue].next_offset)
                moved = connection.execute(update.values(**end._asdict())).rowcount == 1
            else:
                try:
                    connection.execute(self._table.insert().values(**key, **end._asdict()))
                    moved = True
                except sa.exc.IntegrityError:
                    moved = False
            if not moved:
                raise InboxConflictError(
                    f"another process wrote results of group {self.group!r}, topic {queue[0]!r}, queue {queue[1]} at "
                    "the same time: nothing was written; is a second query of this group running?"
                )


def _without_duplicates(messages: pa.Table) -> pa.Table:
    previous, following = messages.slice(0, messages.num_rows - 1), messages.slice(1)
    same = [pc.equal(following[name].combine_chunks(), previous[name].combine_chunks()) for name in POSITION_COLUMNS]
    is_repeated = pc.and_(pc.and_(same[0], same[1]), same[2])
    return messages.filter(pa.concat_arrays([pa.array([True]), pc.invert(is_repeated)]))


def _end_positions(messages: pa.Table) -> dict[tuple[str, int], _Position]:
    timed = messages.select(["topic", "queue_id", "queue_offset"]).append_column(
        "committed_us", _committed_us(messages)
    )
    by_queue = timed.group_by(["topic", "queue_id"], use_threads=False)
    ends = by_queue.aggregate([("queue_offset", "max"), ("committed_us", "max")]).to_pylist()
    return {(e["topic"], e["queue_id"]): _Position(e["queue_offset_max"] + 1, e["committed_us_max"]) for e in ends}


def _committed_us(messages: pa.Table) -> pa.Array | pa.ChunkedArray:
    """Return each message's commit time in microseconds since 1970; null without ``commit_timestamp``."""
    if "commit_timestamp" not in messages.column_names:
        return pa.nulls(messages.num_rows, pa.int64())
    return messages["commit_timestamp"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())


def _values_of_queues(messages: pa.Table, values: Mapping[Queue, int | None]) -> pa.ChunkedArray:
    """Return for each message the value of its queue; null for a queue without a value."""
    known_queues = pa.array([f"{queue_id} {topic}" for topic, queue_id in values], pa.string())
    queues = pc.binary_join_element_wise(pc.cast(messages["queue_id"], pa.string()), messages["topic"], " ")
    return pa.array(list(values.values()), pa.int64()).take(pc.index_in(queues, value_set=known_queues))
