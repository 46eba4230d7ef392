"""A consumer inbox: results and position in one database transaction, so that each message counts once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from rmq_spark.config import GROUP_CHARS_MAX, TOPIC_CHARS_MAX
from rmq_spark.errors import InboxConflictError, ListenerError, OptionError
from rmq_spark.listeners.database import Database, no_commit_within
from rmq_spark.message import check_group
from rmq_spark.redaction import cause_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

INBOX_TABLE = "txmq_inbox"
POSITION_COLUMNS = ("topic", "queue_id", "queue_offset")

Work = Callable[[sa.Connection, pa.Table], Any]


class SqlInbox(Database):
    """A function for ``writeStream.foreachBatch`` that writes the results of messages into a database, each once.

    The position of every queue stands in the same database, and moves in the transaction that writes the results. So
    neither a crash, nor a micro-batch that runs again, nor a second driver can lose or double a result. The messages
    of a micro-batch come to the driver: bound it with ``maxOffsetsPerTrigger``.

    Parameters
    ----------
    url_or_engine : str, sqlalchemy.URL or sqlalchemy.Engine
    group : str
        The consumer group whose positions these are.
    work : callable
        ``work(connection, messages)``: gets the open database transaction and a ``pyarrow.Table`` of messages that it
        has not had before, in (topic, queue, offset) order. What it raises rolls everything back.
    table : str
        Of the positions.
    schema : str, optional
        The database schema of the table.

    Examples
    --------
    >>> inbox = SqlInbox("sqlite:///points.db", "points", give_points)  # doctest: +SKIP
    >>> inbox.create()  # doctest: +SKIP
    >>> orders.writeStream.foreachBatch(inbox)  # doctest: +SKIP
    """

    def __init__(
        self,
        url_or_engine: str | sa.URL | sa.Engine,
        group: str,
        work: Work,
        *,
        table: str = INBOX_TABLE,
        schema: str | None = None,
    ) -> None:
        if not callable(work):
            raise ListenerError(f"work is {type(work).__name__}: a function work(connection, messages) is expected")
        if not isinstance(table, str) or not table.isidentifier() or not table.isascii():
            raise OptionError(f"table={table!r} is not a plain table name of letters, digits and _")
        super().__init__(url_or_engine)
        self.group = check_group(group, "consumerGroup")
        self._work = work
        self._table = sa.Table(
            table,
            sa.MetaData(schema=schema),
            sa.Column("consumer_group", sa.String(GROUP_CHARS_MAX), primary_key=True),
            sa.Column("topic", sa.String(TOPIC_CHARS_MAX + GROUP_CHARS_MAX), primary_key=True),
            sa.Column("queue_id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("next_offset", sa.BigInteger, nullable=False),
        )

    def __repr__(self) -> str:
        return f"SqlInbox({self.where!r}, {self.group!r})"

    def create(self) -> None:
        """Make the table of positions; one that is there is left as it is."""
        with self.transaction() as connection:
            connection.execute(sa.schema.CreateTable(self._table, if_not_exists=True))

    def positions(self) -> dict[tuple[str, int], int]:
        """The next offset of every queue of which results were written."""
        with self.transaction(write=False) as connection:
            return self._positions(connection)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write the results of one micro-batch (what ``foreachBatch`` calls)."""
        self.apply(batch.toArrow())

    def apply(self, messages: pa.Table) -> int:
        """Write the results of those messages that are new, and say how many they were.

        Parameters
        ----------
        messages : pyarrow.Table
            With the source's columns ``topic``, ``queue_id`` and ``queue_offset`` at least: a micro-batch, or what
            ``CommitLog.read`` returned. Of every queue, all that the group wants up to the last one given.

        Raises
        ------
        InboxConflictError
            When another process wrote results of the same queues at the same time; nothing was written.
        """
        missing = [name for name in POSITION_COLUMNS if name not in messages.column_names]
        if missing:
            raise OptionError(
                f"the messages have no column {missing[0]!r}: select {', '.join(POSITION_COLUMNS)} as well"
            )
        if messages.num_rows == 0:
            return 0
        messages = messages.sort_by([(name, "ascending") for name in POSITION_COLUMNS])
        with self.transaction() as connection:
            before = self._positions(connection)
            new = messages.filter(pc.greater_equal(messages["queue_offset"], _position_of_each(messages, before)))
            if new.num_rows:
                self._move(connection, before, new)
                with no_commit_within(connection):
                    self._work(connection, new)
            return int(new.num_rows)

    def _positions(self, connection: sa.Connection) -> dict[tuple[str, int], int]:
        columns = self._table.c
        wanted = sa.select(columns.topic, columns.queue_id, columns.next_offset)
        try:
            rows = connection.execute(wanted.where(columns.consumer_group == self.group)).all()
        except (sa.exc.OperationalError, sa.exc.ProgrammingError) as problem:
            if sa.inspect(self.engine).has_table(self._table.name, schema=self._table.schema):
                raise
            raise ListenerError(
                f"{self.where} has no table {self._table.fullname!r}: call create() once, when the database is set up"
            ) from cause_of(problem)
        return {(topic, queue_id): next_offset for topic, queue_id, next_offset in rows}

    def _move(self, connection: sa.Connection, before: Mapping[tuple[str, int], int], new: pa.Table) -> None:
        """Compare-and-set every queue's position, before the work: so the work of one process waits for the other's."""
        columns = self._table.c
        ends = new.group_by(["topic", "queue_id"], use_threads=False).aggregate([("queue_offset", "max")])
        for row in ends.sort_by([("topic", "ascending"), ("queue_id", "ascending")]).to_pylist():
            queue, end = (row["topic"], row["queue_id"]), row["queue_offset_max"] + 1
            mine = {"consumer_group": self.group, "topic": queue[0], "queue_id": queue[1]}
            if queue in before:
                same = sa.and_(*(columns[name] == value for name, value in mine.items()))
                update = self._table.update().where(same, columns.next_offset == before[queue])
                moved = connection.execute(update.values(next_offset=end)).rowcount == 1
            else:
                try:
                    connection.execute(self._table.insert().values(**mine, next_offset=end))
                    moved = True
                except sa.exc.IntegrityError:
                    moved = False
            if not moved:
                raise InboxConflictError(
                    f"another process wrote results of group {self.group!r}, topic {queue[0]!r}, queue {queue[1]} at "
                    "the same time: nothing was written; is a second query of this group running?"
                )


def _position_of_each(messages: pa.Table, positions: Mapping[tuple[str, int], int]) -> pa.ChunkedArray:
    names = pa.array([f"{queue_id} {topic}" for topic, queue_id in positions], pa.string())
    mine = pc.binary_join_element_wise(pc.cast(messages["queue_id"], pa.string()), messages["topic"], " ")
    found = pa.array(list(positions.values()), pa.int64()).take(pc.index_in(mine, value_set=names))
    return pc.fill_null(found, 0)
