"""The half batch that a listener decides about, and the verdicts that a listener may return."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.listeners.decode import decode_json
from rmq_spark._core.vocabulary.ids import batch_transaction_id, message_ids, transaction_ids
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark._core.vocabulary.verdicts import (
    BATCH,
    COMMIT_MESSAGE,
    KEY,
    MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    LocalTransactionState,
    Rollback,
    Verdict,
    VerdictArray,
    reason_for_log,
    state_of,
    verdict_of,
)
from rmq_spark.errors import MessageError, VerdictError

if TYPE_CHECKING:
    import sqlalchemy as sa
    from pyspark.sql import DataFrame, SparkSession

    from rmq_spark._core.storage.row_range import RowRange
    from rmq_spark._core.vocabulary.rows import RowSet


class RowReader(Protocol):
    """Reads the undecided rows of a half batch from a commit log or its twin in memory. ``is_all`` tells whether these
    are all rows of the half batch, or of the part of it."""

    @property
    def rows(self) -> RowSet: ...

    @property
    def is_all(self) -> bool: ...

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Return the undecided rows, in send order, with these columns of ``half``."""

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """Return the same rows as a DataFrame, which Spark's executors read."""

    def parts(self) -> Mapping[int, RowReader]:
        """Return the same rows by the partition that staged them."""

    def ranges(self) -> Sequence[RowRange]:
        """Return where the same rows lie, for a reader without the log."""


class HalfBatch:
    """The undecided transactions of one attempt of a half batch, for which a listener gives verdicts.

    Attributes
    ----------
    half_id, app_id : str
    batch_id : int
        The number of the micro-batch, or the one that a batch write or a producer gave.
    attempt : int
        1 at first. A new attempt has new transaction ids.
    producer_group : str
    prepared_at : datetime
        When the half batch was prepared, or reopened for this attempt, in UTC.
    check_times : int
        How many checks of this attempt a listener has answered (with UNKNOWN).
    transaction_per : {"batch", "message", "key"}
    fence_id : str or None
        The fence that the listener had when the half batch was prepared.
    staged_ms : int
        When its half files were written (milliseconds since 1970). A restored log may have a half batch with the same
        id, and its messages in other positions.
    log_id : str
        The id of the commit log. Another log may have a half batch with the same id.
    arg : object
        The argument of ``send_message_in_transaction(message, arg)``; None in checks and streams.
    part : int or None
        With ``run_on="executors"`` the partition whose transactions these are; None: those of all partitions.
    on_listener_error : {"fail", "unknown"}
        What an exception of ``execute_local_transaction`` does: end the query with the half batch pending, or count as
        UNKNOWN.
    restarted : bool
        True in a check by the restarted query that prepared the half batch: the process that ran this attempt is dead
        or replaced. A listener with a fence need not wait for it, because the fence stops its work. A listener without
        one must still not answer ROLLBACK at once: the old process may be at work.
    reason : str or None
        None at first. A listener may set it to a few words: why it answers UNKNOWN in a check, or why it rolls back.
        The check keeps them, or each rollback without a reason of its own, and ``txmq trace`` shows them.
    """

    def __init__(
        self,
        *,
        half_id: str,
        app_id: str,
        batch_id: int,
        attempt: int,
        producer_group: str,
        prepared_at: datetime,
        check_times: int,
        transaction_per: str,
        fence_id: str | None,
        rows: RowReader,
        staged_ms: int,
        log_id: str,
        arg: Any = None,
    ) -> None:
        self.half_id = half_id
        self.app_id = app_id
        self.batch_id = batch_id
        self.attempt = attempt
        self.producer_group = producer_group
        self.prepared_at = prepared_at
        self.check_times = check_times
        self.transaction_per = transaction_per
        self.fence_id = fence_id
        self.log_id = log_id
        self.arg = arg
        self.part: int | None = None
        self.on_listener_error = "fail"
        self.restarted = False
        self.reason: str | None = None
        self.staged_ms = staged_ms
        self._rows = rows
        self._transactions: pa.Table | None = None
        self._owners: pa.Array | None = None

    def __repr__(self) -> str:
        part = "" if self.part is None else f", part={self.part}"
        return f"HalfBatch({self.half_id!r}, attempt={self.attempt}, producer_group={self.producer_group!r}{part})"

    def parts(self) -> dict[int, HalfBatch]:
        """The half batch by the partition that staged its messages, as executors run it."""
        return {part: self._with_rows(rows, part) for part, rows in self._rows.parts().items()}

    def read_by(self, make: Callable[[Sequence[RowRange], bool], RowReader]) -> HalfBatch:
        """A copy that reads its rows without the log: by what ``make`` returns for their places and ``is_all``."""
        return self._with_rows(make(self._rows.ranges(), self._rows.is_all), self.part)

    def _with_rows(self, rows: RowReader, part: int | None) -> HalfBatch:
        copied = copy.copy(self)
        copied._rows, copied.part, copied._transactions, copied._owners = rows, part, None, None
        return copied

    @property
    def transactions(self) -> pa.Table:
        """A row for each undecided transaction: ``transaction_id`` and ``transaction_key`` (strings; the key is null
        when ``transactionKey`` is not set) and ``messages`` (int64, the number of its messages)."""
        if self._transactions is None:
            self._transactions = self._read_transactions()
        return self._transactions

    def _read_transactions(self) -> pa.Table:
        if self.transaction_per == KEY:
            keys = self._rows.read(["transaction_key"])
            counted = keys.group_by("transaction_key", use_threads=False).aggregate([([], "count_all")])
            key = counted["transaction_key"].combine_chunks()
            ids = transaction_ids(self.half_id, self.attempt, KEY, counted)
            count = counted["count_all"].combine_chunks()
        elif self.transaction_per == MESSAGE:
            rows = self._rows.read(["file_no", "row_no"]).combine_chunks()
            ids = transaction_ids(self.half_id, self.attempt, MESSAGE, rows)
            key, count = pa.nulls(rows.num_rows, pa.string()), pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)
        else:
            ids = pa.array([batch_transaction_id(self.half_id, self.attempt)])
            key = pa.nulls(1, pa.string())
            count = pa.array([self._rows.read(["file_no"]).num_rows], pa.int64())
        return pa.table({"transaction_id": ids, "transaction_key": key, "messages": count})

    def messages(self, columns: Iterable[str] | None = None) -> pa.Table:
        """Return the messages of the undecided transactions, in send order.

        Parameters
        ----------
        columns : iterable of str, optional
            Some of ``msg_id, transaction_id, transaction_key, topic, queue_id, tags, keys, sharding_key, properties,
            body, born_timestamp, store_timestamp``; all of them when not given.

        Returns
        -------
        pyarrow.Table
            ``body`` is binary; timestamps are microseconds in UTC.
        """
        names = list(MESSAGE_COLUMNS if columns is None else columns)
        unknown = [name for name in names if name not in MESSAGE_COLUMNS]
        if unknown:
            raise MessageError(f"no column {unknown[0]!r} in a half batch's messages: {', '.join(MESSAGE_COLUMNS)}")
        derived = {"msg_id", "transaction_id"}
        stored = [name for name in names if name not in derived]
        if derived & set(names):
            stored += [name for name in ("file_no", "row_no") if name not in stored]
        if "transaction_id" in names and self.transaction_per == KEY and "transaction_key" not in stored:
            stored.append("transaction_key")
        table = self._rows.read(stored or ["file_no"])
        return pa.table({name: self._derived(name, table) if name in derived else table[name] for name in names})

    def _derived(self, column: str, table: pa.Table) -> pa.Array | pa.ChunkedArray:
        if column == "msg_id":
            return message_ids(pa.scalar(self.half_id), table["file_no"], table["row_no"])
        return transaction_ids(self.half_id, self.attempt, self.transaction_per, table)

    def decode(self, schema: str | pa.Schema, on_error: str = "raise") -> pa.Table:
        """Return the messages' JSON bodies as columns, a row for each message.

        Parameters
        ----------
        schema : str or pyarrow.Schema
            Spark's DDL, such as ``"order_id long, total double"``, or an Arrow schema. A field that a body lacks is
            null. A field that the schema does not name is left out.
        on_error : {"raise", "null"}
            What to do with a body that is not a JSON object with this schema. ``"null"``: all fields of its row are
            null, as for a body without any of the fields. So name a field that each good body has, such as the order's
            id: the rows in which it is null are the bad ones.

        Raises
        ------
        MessageError
            With ``"raise"``, for a bad body. It has the row and the transaction of the first one, and the number of bad
            bodies. Rows are those of :meth:`messages`.
        OptionError
            For any other ``on_error``.
        """
        return decode_json(self.messages(["body"])["body"], schema, on_error, self._name_of)

    def insert(
        self, connection: sa.Connection, table: str, rows: str | pa.Schema | pa.Table, schema: str | None = None
    ) -> int:
        """Insert a row for each message into a table, in the open database transaction: by binary COPY on PostgreSQL
        (with the extra ``postgres``), by an INSERT of many rows elsewhere.

        Parameters
        ----------
        connection : sqlalchemy.Connection
            The connection that ``work`` gets.
        table : str
        rows : str, pyarrow.Schema or pyarrow.Table
            The fields of the JSON bodies, as for :meth:`decode`; or the rows themselves, such as a part of what
            ``decode`` returned. Columns are matched by name; missing ones get the table's defaults.
        schema : str, optional
            The database schema of the table.

        Returns
        -------
        int
            The number of rows.

        Raises
        ------
        ListenerError
            When the table does not exist, or lacks a column.
        MessageError
            For a body that does not fit the fields, or a value that the database cannot keep; it has the row.
        sqlalchemy.exc.DBAPIError
            When the database refuses a row.
        """
        from rmq_spark._core.database.insert import insert

        return insert(connection, table, rows if isinstance(rows, pa.Table) else self.decode(rows), schema)

    def _name_of(self, row: int) -> str:
        return message_name(self.messages(["transaction_key", "transaction_id", "msg_id"]), row)

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """Return the undecided messages as a DataFrame with the columns of ``half``, which the executors read.

        Use it with foreachBatch and the check job, which have a session. ``format("txmq")`` commits without one.
        """
        return self._rows.to_spark(spark)

    @property
    def rows(self) -> RowSet:
        """The positions of the undecided messages in the half batch. A message's position never changes."""
        return self._rows.rows

    @property
    def is_all(self) -> bool:
        """Whether nothing of the half batch is decided yet. A part is never all of it."""
        return self.part is None and self._rows.is_all

    def layout(self) -> str | None:
        """A digest of the key of every row, of a part those of the part. None without transaction keys, or when some
        rows are decided."""
        if not self._rows.is_all or self.transaction_per != KEY:
            return None
        keys = self._rows.read(["transaction_key"])["transaction_key"].combine_chunks()
        sizes = [(file_no, len(bits)) for file_no, bits in self.rows.items()]
        digest = blake2b(json.dumps(sizes).encode(), digest_size=16)
        for column in (pc.cast(pc.binary_length(keys), pa.string()), keys):
            whole = pa.ListArray.from_arrays(pa.array([0, len(column)], pa.int32()), column)
            digest.update(pc.binary_join(whole, " ")[0].as_buffer())
        return digest.hexdigest()

    def by_row(self, of_transactions: pa.Array) -> pa.Array:
        """Spread a value for each row of :attr:`transactions` to its messages, in send order."""
        if self.transaction_per == MESSAGE:
            return of_transactions
        if self.transaction_per == BATCH:
            return pa.repeat(of_transactions[0], self.rows.count)
        return of_transactions.take(self._transaction_positions())

    def by_transaction(self, of_rows: pa.Array) -> pa.Array:
        """Reduce a value for each message, in send order, to one for each row of :attr:`transactions`. It is null where
        the messages of a transaction have different values."""
        if self.transaction_per == MESSAGE:
            return of_rows
        owner = pa.repeat(0, len(of_rows)) if self.transaction_per == BATCH else self._transaction_positions()
        table = pa.table({"owner": owner, "value": of_rows})
        bounds = table.group_by("owner").aggregate([("value", "min"), ("value", "max")]).sort_by("owner")
        first, last = (bounds[name].combine_chunks() for name in ("value_min", "value_max"))
        return pc.if_else(pc.equal(first, last), first, pa.scalar(None, of_rows.type))

    def _transaction_positions(self) -> pa.Array:
        """Return the position of each message's transaction, in send order."""
        if self._owners is None:
            keys = self._rows.read(["transaction_key"])["transaction_key"].combine_chunks()
            self._owners = pc.index_in(keys, value_set=self.transactions["transaction_key"].combine_chunks())
        return self._owners

    def verdicts(
        self,
        *,
        commit: Iterable[object] = (),
        rollback: Iterable[object] | Mapping[Any, object] = (),
        unknown: Iterable[object] = (),
        refused: Iterable[object] | Mapping[Any, object] = (),
        otherwise: LocalTransactionState = COMMIT_MESSAGE,
    ) -> VerdictArray:
        """Return a verdict for each row of :attr:`transactions`, from keys.

        Parameters
        ----------
        commit, unknown : iterables of keys
            Transaction keys with ``transactionKey``, else transaction ids. They are compared as strings.
        rollback : iterable of keys, or mapping of keys to reasons
            ROLLBACK_MESSAGE. Up to 200 characters of a reason (str) are kept with the op marker. In a check it promises
            that these transactions never happened and never will: a replay runs them as the next attempt.
        refused : iterable of keys, or mapping of keys to reasons
            ROLLBACK_MESSAGE for local transactions that *ran and said no*: final, also in a check. Every rollback from
            ``execute_local_transaction`` is final.
        otherwise : LocalTransactionState
            The verdict of every transaction that is not named.

        Raises
        ------
        VerdictError
            When a key is not in this half batch or is named for two verdicts, or a single key is not in a list.
        """
        column = "transaction_key" if self.transaction_per == KEY else "transaction_id"
        distinct = {Verdict(state_of(otherwise)): 0}
        named: dict[str, int] = {}
        for state, keys, final in (
            (COMMIT_MESSAGE, commit, False),
            (ROLLBACK_MESSAGE, rollback, False),
            (ROLLBACK_MESSAGE, refused, True),
            (UNKNOWN, unknown, False),
        ):
            if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
                raise VerdictError(
                    f"{'refused' if final else _ARGUMENTS[state]}={keys!r} is {type(keys).__name__}: a list of keys is "
                    f"expected, such as [{keys!r}]"
                )
            reasons = keys if isinstance(keys, Mapping) else None
            if reasons is not None and state is not ROLLBACK_MESSAGE:
                raise VerdictError(f"{state} was given a mapping: its keys alone are expected, for it has no reasons")
            codes: dict[str | None, int] = {}  # by reason: thousands of keys may have the same
            for key in keys:
                reason = reasons[key] if reasons else None
                if type(reason) is not str:
                    reason = reason_for_log(reason)
                code = codes.get(reason)
                if code is None:
                    verdict = Verdict(state, reason_for_log(reason), final)
                    code = codes[reason] = distinct.setdefault(verdict, len(distinct))
                earlier = named.setdefault(str(key), code)
                if earlier != code:
                    first, second = (list(distinct)[position] for position in (earlier, code))
                    if (first.state, first.refused) != (second.state, second.refused):
                        raise VerdictError(
                            f"{column} {key!r} is named for two verdicts: {_in_words(first)} and {_in_words(second)}"
                        )
        return VerdictArray(tuple(distinct), self._codes_of_keys(column, named))

    def _codes_of_keys(self, column: str, named: Mapping[str, int]) -> pa.Array:
        """Return the code of the key of each row of :attr:`transactions`; 0 for keys that are not named."""
        known, keys = self.transactions[column].combine_chunks(), pa.array(named, pa.string())
        positions = pc.index_in(known, value_set=keys)
        if len(positions) - positions.null_count < len(keys):
            absent = keys.filter(pc.invert(pc.is_in(keys, value_set=known)))[0].as_py()
            raise VerdictError(f"{absent!r} is not a {column} of half batch {self.half_id!r}")
        return pc.fill_null(pa.array(named.values(), pa.int32()).take(positions), 0)


_ARGUMENTS = {COMMIT_MESSAGE: "commit", ROLLBACK_MESSAGE: "rollback", UNKNOWN: "unknown"}


def _in_words(verdict: Verdict) -> str:
    return f"{verdict.state} (refused)" if verdict.refused else str(verdict.state)


def message_name(messages: pa.Table, row: int) -> str:
    """Name a message for an error: by its transaction's key or id, and its own id."""
    key, transaction_id, msg_id = (
        messages[name][row].as_py() for name in ("transaction_key", "transaction_id", "msg_id")
    )
    transaction = f"transaction {transaction_id}" if key is None else f"transaction key {key!r}"
    return f"{transaction}, msg_id {msg_id}"


MESSAGE_COLUMNS = (
    "msg_id transaction_id transaction_key topic queue_id tags keys sharding_key properties body "
    "born_timestamp store_timestamp"
).split()


def normalize_verdicts(result: object, batch: HalfBatch) -> VerdictArray:
    """Convert a listener's result to a verdict for each transaction. Rollbacks without a reason get ``batch.reason``,
    and ``None`` means UNKNOWN, as in RocketMQ. A wrong type or length, or a value that is no verdict, is a
    VerdictError."""
    return _verdicts(result, batch).with_reason(reason_for_log(batch.reason))


def _verdicts(result: object, batch: HalfBatch) -> VerdictArray:
    if result is None or isinstance(result, (str, Rollback)):
        return VerdictArray((_verdict_of(result, batch),))
    if isinstance(result, VerdictArray):
        verdicts = result
    elif isinstance(result, (pa.Array, pa.ChunkedArray)):
        verdicts = _of_array(result, batch)
    elif isinstance(result, Sequence):
        verdicts = VerdictArray.of([_verdict_of(value, batch) for value in result])
    else:
        raise VerdictError(
            f"{_listener_of(batch)} returned {type(result).__name__}: a LocalTransactionState, a Rollback, None, or "
            "one of these per transaction is expected"
        )
    if verdicts.which is None:
        return verdicts
    expected = batch.transactions.num_rows
    if len(verdicts.which) != expected:
        raise VerdictError(
            f"{_listener_of(batch)} returned {count_of(len(verdicts.which), 'verdict')} for "
            f"{count_of(expected, 'transaction')}: return one per row of batch.transactions"
        )
    return VerdictArray(verdicts.distinct) if len(verdicts.distinct) == 1 and expected else verdicts


def _of_array(values: pa.Array | pa.ChunkedArray, batch: HalfBatch) -> VerdictArray:
    flat = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    try:
        coded = pc.fill_null(pc.cast(flat, pa.string()), UNKNOWN.value).dictionary_encode()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
        raise VerdictError(f"{_listener_of(batch)} returned an array of {flat.type}: strings are expected") from problem
    return VerdictArray(tuple(_verdict_of(word, batch) for word in coded.dictionary.to_pylist()), coded.indices)


def _verdict_of(value: object, batch: HalfBatch) -> Verdict:
    try:
        return verdict_of(value)
    except VerdictError as problem:
        raise VerdictError(f"{_listener_of(batch)} returned a wrong answer: {problem}") from None


def _listener_of(batch: HalfBatch) -> str:
    return f"for half batch {batch.half_id!r}, the listener of {batch.producer_group!r}"
