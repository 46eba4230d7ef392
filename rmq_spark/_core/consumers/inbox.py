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
from rmq_spark._core.database.connection import (
    IN_INNODB,
    Address,
    Database,
    alike,
    begin_savepoint,
    end_savepoint,
    exact_text,
    insert_absent,
    no_commit_within,
    require_exact,
)
from rmq_spark._core.listeners.listener import require_work
from rmq_spark._core.runtime.forks import called_here
from rmq_spark._core.runtime.machine import MACHINE, Machine
from rmq_spark._core.vocabulary.message import require_group_name, require_topic_name
from rmq_spark._core.vocabulary.options import GROUP_CHARS_MAX, TOPIC_CHARS_MAX, named, whole_number
from rmq_spark._core.vocabulary.redaction import cause_of, traceback_of
from rmq_spark.errors import InboxConflictError, ListenerError, OptionError, TransactionEndedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

INBOX_TABLE = "txmq_inbox"
POSITION_COLUMNS = ("topic", "queue_id", "queue_offset")

Work = Callable[[sa.Connection, pa.Table], Any]


class _Position(NamedTuple):
    """Up to where the results of a queue are written.

    Along a queue the times of commit never fall. So an offset below the position with a newer time is another message:
    the log was restored from a copy, and has given the offset again.
    """

    next_offset: int
    committed_us: int | None = None
    """The newest time of commit among the messages below it, in microseconds since 1970; None when nobody knows."""

    def under_way(self) -> _Position:
        """What stands for this position while work runs, or the position for such a one."""
        return self._replace(next_offset=-1 - self.next_offset)


Positions = Mapping[tuple[str, int], _Position]


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
        The consumer group that has these positions.
    work : callable
        ``work(connection, messages)`` gets the open database transaction and a ``pyarrow.Table`` of messages that it
        has not had before, in (topic, queue, offset) order. An exception rolls everything back.
    table : str
        Name of the table of positions. The table ``<table>_log`` keeps the id of the log that they belong to.
    schema : str, optional
        The database schema of both tables.
    log : CommitLog or path, optional
        The log that the messages come from. With it, positions of another log are an error. A log that was made anew
        counts its offsets from 0 again; without ``log`` its messages would be taken for old ones.

    Examples
    --------
    >>> inbox = SqlInbox("sqlite:///points.db", "points", give_points, log=log)  # doctest: +SKIP
    >>> inbox.create()  # doctest: +SKIP
    >>> orders.writeStream.foreachBatch(inbox)  # doctest: +SKIP
    """

    keeps_positions = True
    """Tells a ``PushConsumer`` that messages of a queue must come in order, and by the queue that they came in."""

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
        self.machine: Machine = MACHINE
        self.group = require_group_name(group, "consumerGroup")
        self._work = work
        self._log_id = None if log is None else engine_of(log).id
        self._tried = False  # the table is known to compare names exactly and to undo what is rolled back
        metadata = sa.MetaData(schema=schema)
        self._table = sa.Table(
            table,
            metadata,
            sa.Column("consumer_group", exact_text(GROUP_CHARS_MAX), primary_key=True),
            sa.Column("topic", exact_text(TOPIC_CHARS_MAX + GROUP_CHARS_MAX), primary_key=True),
            sa.Column("queue_id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("next_offset", sa.BigInteger, nullable=False),
            sa.Column("committed_us", sa.BigInteger),
            **IN_INNODB,
        )
        self._log_table = sa.Table(
            f"{table}_log",
            metadata,
            sa.Column("consumer_group", exact_text(GROUP_CHARS_MAX), primary_key=True),
            sa.Column("log_id", sa.String(64), nullable=False),
            **IN_INNODB,
        )

    def __repr__(self) -> str:
        return f"SqlInbox({self.where!r}, {self.group!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The log's id goes with it, and the log itself, which may be open, does not.
        make, given = super().__reduce__()
        make.keywords.pop("log", None)
        return make, given, {"_log_id": self._log_id}

    def create(self) -> None:
        """Make the two tables. Tables that are there already are left as they are."""
        try:
            self._create()
        except sa.exc.DBAPIError:
            # When two processes create a table at once, one of them may fail, even with IF NOT EXISTS.
            self._create()

    def _create(self) -> None:
        with self.transaction() as connection:
            for table in (self._table, self._log_table):
                connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
            self._try_once(connection)

    def require_created(self) -> None:
        """Raise ListenerError when a table is not there. A database that does not answer is taken for a ready one."""
        needed = (self._table,) if self._log_id is None else (self._table, self._log_table)
        for table in needed:
            with suppress(sa.exc.DBAPIError, sa.exc.TimeoutError), self.transaction(write=False) as connection:
                if not sa.inspect(connection).has_table(table.name, schema=table.schema):
                    raise self._missing(table)

    def positions(self) -> dict[tuple[str, int], int]:
        """Return the next offset of every queue for which results were written."""
        with self.transaction(write=False) as connection:
            return {queue: position.next_offset for queue, position in self._positions(connection).items()}

    def set_position(self, topic: str, queue_id: int, next_offset: int) -> None:
        """Say from which offset on results of a queue are to be written: messages below it count as written.

        ``txmq group reset`` moves the group and not its inbox, which takes what comes again for what it has written
        already. A position that was marked, because ``work`` ended its transaction, is set anew, too.

        Parameters
        ----------
        topic : str
        queue_id : int
        next_offset : int
            Of the first message whose result is still to be written.

        Raises
        ------
        InboxConflictError
            When a consumer moved it at the same moment.
        """
        queue = (require_topic_name(topic, own=True), whole_number(queue_id, "queue_id", 0))
        with self.transaction() as connection:
            same = (self._table.c.consumer_group == self.group, self._table.c.topic == queue[0])
            now = sa.select(self._table.c.next_offset).where(*same, self._table.c.queue_id == queue[1])
            before = connection.execute(now).scalar()
            known = {} if before is None else {queue: _Position(int(before))}
            self._move(connection, known, {queue: _Position(whole_number(next_offset, "next_offset", 0))})

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write the results of one micro-batch. ``foreachBatch`` calls this."""
        self.apply(batch.toArrow())

    def apply(self, messages: pa.Table) -> int:
        """Write the results of the messages that are new, and return how many those are.

        Parameters
        ----------
        messages : pyarrow.Table
            Has at least the source's columns ``topic``, ``queue_id`` and ``queue_offset``: a micro-batch, or what
            ``CommitLog.read`` returned. For each queue it must have all messages that the group wants, from its
            position to the last one given. With ``commit_timestamp``, too, the inbox notices a restored log.

        Raises
        ------
        InboxConflictError
            When another process wrote results of the same queues at the same time, the positions belong to another
            log, or the log was restored from a copy and has other messages below a position; nothing was written.
        TransactionEndedError
            When ``work`` ended the database transaction. A part of the results may be committed. Every later call is an
            error until somebody has set the positions right.
        """
        missing = [name for name in POSITION_COLUMNS if name not in messages.column_names]
        if missing:
            raise OptionError(
                f"the messages have no column {missing[0]!r}: select {', '.join(POSITION_COLUMNS)} as well"
            )
        if messages.num_rows == 0:
            return 0
        messages = _each_once(messages.sort_by([(name, "ascending") for name in POSITION_COLUMNS]))
        try:
            with self.transaction() as connection:
                before = self._positions(connection)
                self._require_same_log(connection)
                starts = pc.fill_null(_of_each(messages, {q: p.next_offset for q, p in before.items()}), 0)
                is_new = pc.greater_equal(messages["queue_offset"], starts)
                self._require_written(messages.filter(pc.invert(is_new)), before)
                new = messages.filter(is_new)
                ends = _end_of_each(new)
                if new.num_rows:
                    self._try_once(connection)
                    self._run(connection, before, ends, new)
                return int(new.num_rows)
        except TransactionEndedError as problem:
            self._keep_started(before, ends)
            raise TransactionEndedError(
                f"{problem}. The positions of group {self.group!r} are marked (below 0), and no later call goes on: "
                "look what is there, undo or finish it, and call set_position(topic, queue_id, next_offset)"
            ) from cause_of(problem)

    def _require_written(self, old: pa.Table, before: Positions) -> None:
        """Require that messages below the positions are those whose results were written."""
        newest = _of_each(old, {queue: position.committed_us for queue, position in before.items()})
        others = old.filter(pc.fill_null(pc.greater(_committed_us(old), newest), False))
        if others.num_rows:
            first = others.slice(0, 1).to_pylist()[0]
            topic, queue_id, at = (first[name] for name in POSITION_COLUMNS)
            raise InboxConflictError(
                f"topic {topic!r}, queue {queue_id}: the message at offset {at} was committed at "
                f"{first['commit_timestamp']}, after all whose results group {self.group!r} has written in "
                f"{self.where}, and its position is {before[topic, queue_id].next_offset}: the log was restored from a "
                "copy, and counts on from its older end. Nothing was written. Look which results came from messages "
                f"that the log lost, and call set_position({topic!r}, {queue_id}, {at}) to go on with this message"
            )

    def _run(self, connection: sa.Connection, before: Positions, ends: Positions, new: pa.Table) -> None:
        """Run ``work`` and move the positions.

        The positions are below 0 while ``work`` runs. If it ends the transaction in its middle, they stay so, and no
        later call goes on. ::

            next_offset   23  ──▶  -24  ── work ──▶  31
        """
        under_way = {queue: before.get(queue, _Position(0)).under_way() for queue in ends}
        self._move(connection, before, under_way)
        begin_savepoint(connection)
        with no_commit_within(connection):
            called_here(self._work, connection, new)  # a fork would commit on the connection of this process
            end_savepoint(connection, keep=True)
        self._move(connection, under_way, ends)

    def _keep_started(self, before: Positions, ends: Positions) -> None:
        try:
            with self.transaction() as connection:
                self._move(connection, before, {q: before.get(q, _Position(0)).under_way() for q in ends})
        except InboxConflictError:
            pass  # work committed them, below 0
        except sa.exc.DBAPIError as problem:
            logger.error(
                "%r: could not note that its work ended the database transaction: %s", self, traceback_of(problem)
            )

    def _try_once(self, connection: sa.Connection) -> None:
        if self._tried:
            return
        trial = f"trial-{self.machine.unique_id()}"
        names = [(group, "t") for group in alike(f"{trial}-g")] + [(trial, topic) for topic in alike("t-")]
        rows = [{"consumer_group": g, "topic": t, "queue_id": 0, "next_offset": 0} for g, t in names]
        require_exact(connection, self._table, rows)
        self._tried = True

    def _require_same_log(self, connection: sa.Connection) -> None:
        """Require that the positions belong to the given log. The first caller who gives a log writes its id down."""
        if self._log_id is None:
            return
        columns = self._log_table.c
        with self._saying_what_is_missing(self._log_table):
            insert_absent(connection, self._log_table, [{"consumer_group": self.group, "log_id": self._log_id}])
        query = sa.select(columns.log_id).where(columns.consumer_group == self.group)
        found = connection.execute(query.with_for_update(read=True)).scalar_one()
        if found != self._log_id:
            raise InboxConflictError(
                f"the positions of group {self.group!r} in {self.where} count the offsets of log {found}, and the "
                f"messages come from log {self._log_id}: it was made anew, or it is another one. Nothing was written. "
                "Use another group, or delete the group's rows in "
                f"{self._table.fullname!r} and {self._log_table.fullname!r} to begin anew"
            )

    @contextmanager
    def _saying_what_is_missing(self, table: sa.Table) -> Iterator[None]:
        try:
            yield
        except (sa.exc.OperationalError, sa.exc.ProgrammingError) as problem:
            if sa.inspect(self.engine).has_table(table.name, schema=table.schema):
                raise
            raise self._missing(table) from cause_of(problem)

    def _missing(self, table: sa.Table) -> ListenerError:
        return ListenerError(
            f"{self.where} has no table {table.fullname!r}: call create() once, when the database is set up"
        )

    def _positions(self, connection: sa.Connection) -> dict[tuple[str, int], _Position]:
        columns = self._table.c
        wanted = sa.select(columns.topic, columns.queue_id, columns.next_offset, columns.committed_us)
        with self._saying_what_is_missing(self._table):
            rows = connection.execute(wanted.where(columns.consumer_group == self.group)).all()
        found = {(topic, queue_id): _Position(*position) for topic, queue_id, *position in rows}
        for (topic, queue_id), position in found.items():
            if position.next_offset < 0:
                raise ListenerError(
                    f"work ended the database transaction of group {self.group!r}, topic {topic!r}, queue {queue_id} "
                    f"in its middle: a part of the results from offset {position.under_way().next_offset} on may be "
                    f"in {self.where}. Look there, undo or finish that part, and call set_position({topic!r}, "
                    f"{queue_id}, next_offset) with the first offset to go on with"
                )
        return found

    def _move(self, connection: sa.Connection, before: Positions, after: Positions) -> None:
        """Move every queue's position from ``before`` to ``after``, or raise when another process has moved it.

        The first move is made before ``work``: of two processes at the same queue one waits, and then gets the error.
        """
        columns = self._table.c
        for queue, end in sorted(after.items()):
            mine = {"consumer_group": self.group, "topic": queue[0], "queue_id": queue[1]}
            if queue in before:
                same = sa.and_(*(columns[name] == value for name, value in mine.items()))
                update = self._table.update().where(same, columns.next_offset == before[queue].next_offset)
                moved = connection.execute(update.values(**end._asdict())).rowcount == 1
            else:
                try:
                    connection.execute(self._table.insert().values(**mine, **end._asdict()))
                    moved = True
                except sa.exc.IntegrityError:
                    moved = False
            if not moved:
                raise InboxConflictError(
                    f"another process wrote results of group {self.group!r}, topic {queue[0]!r}, queue {queue[1]} at "
                    "the same time: nothing was written; is a second query of this group running?"
                )


def _each_once(messages: pa.Table) -> pa.Table:
    """Return the sorted messages without duplicates."""
    first, rest = messages.slice(0, messages.num_rows - 1), messages.slice(1)
    same = [pc.equal(rest[name].combine_chunks(), first[name].combine_chunks()) for name in POSITION_COLUMNS]
    again = pc.and_(pc.and_(same[0], same[1]), same[2])
    return messages.filter(pa.concat_arrays([pa.array([True]), pc.invert(again)]))


def _end_of_each(messages: pa.Table) -> dict[tuple[str, int], _Position]:
    """Return the position after the last message of each queue."""
    timed = messages.select(["topic", "queue_id", "queue_offset"]).append_column(
        "committed_us", _committed_us(messages)
    )
    most = timed.group_by(["topic", "queue_id"], use_threads=False)
    ends = most.aggregate([("queue_offset", "max"), ("committed_us", "max")]).to_pylist()
    return {(e["topic"], e["queue_id"]): _Position(e["queue_offset_max"] + 1, e["committed_us_max"]) for e in ends}


def _committed_us(messages: pa.Table) -> pa.Array | pa.ChunkedArray:
    """When each was committed, in microseconds since 1970; null when the messages do not say."""
    if "commit_timestamp" not in messages.column_names:
        return pa.nulls(messages.num_rows, pa.int64())
    return messages["commit_timestamp"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())


def _of_each(messages: pa.Table, values: Mapping[tuple[str, int], int | None]) -> pa.ChunkedArray:
    """Return for each message what its queue has; null for a queue that has nothing."""
    names = pa.array([f"{queue_id} {topic}" for topic, queue_id in values], pa.string())
    mine = pc.binary_join_element_wise(pc.cast(messages["queue_id"], pa.string()), messages["topic"], " ")
    return pa.array(list(values.values()), pa.int64()).take(pc.index_in(mine, value_set=names))
