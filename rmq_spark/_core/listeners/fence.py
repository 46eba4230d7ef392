"""A fence: a table in the user's database, beside those of ``work``, with one row for each attempt of a half batch.

Its primary key is ``half_id, attempt, part``, so either execute or a check inserts the row. ``part`` is -1 in the row
of an attempt. When executors run the attempt, that row says so, and each part has a row of its own. ``fence_row.py``
says what a row records, ``fence_verdicts.py`` what that means, and ``sql.py`` what execute and a check do with it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import groupby
from typing import Any, TypeAlias

import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

# Imported first: its error says what to install when SQLAlchemy is missing.
from rmq_spark._core.database.connection import PLACE_CHARS_MAX, Address, Database, place_of
from rmq_spark._core.database.error_codes import is_lock_problem
from rmq_spark._core.database.exact_keys import INNODB_TABLE, exact_text, insert_absent, require_exact, similar_names
from rmq_spark._core.listeners.fence_row import (
    BY_PART,
    EXECUTED,
    MIXED,
    NOTHING,
    STARTED,
    TOMBSTONE,
    Recorded,
    State,
    merged,
    restaged_error,
)
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.transaction_listener import ExecutedAttempt
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import RUNTIME
from rmq_spark._core.vocabulary.options import FENCE_RETENTION_S_MIN
from rmq_spark._core.vocabulary.rows import NO_ROWS
from rmq_spark._core.vocabulary.times import utc
from rmq_spark.errors import FenceError, ListenerError, LocalTransactionError, OptionError

FENCE_TABLE = "txmq_fence"
PRUNED_AT_ONCE = 10_000
"""Rows that ``prune`` reads in one database transaction, and that ``executed_since`` fetches at once."""
WHOLE = -1
"""The part of a row that is not of a part."""
PRUNED = "pruned"
"""State of a row that belongs to no half batch, and keeps the time when a log's rows were last pruned."""

_IDS_PER_SELECT = 500
# Rows of the table <fence_table>_id.
_THE_ID = 1
_THE_PLACE = 2


Rows: TypeAlias = Mapping[tuple[str, int, int], "sa.Row[Any]"]
"""Fence rows by half id, attempt and part."""


class Fence(Database):
    """The fence's tables in one database, and transactions on them. It reads and writes rows and gives no verdicts."""

    def __init__(self, url_or_engine: Address, name: str, schema: str | None) -> None:
        if not isinstance(name, str) or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,55}", name) is None:
            raise OptionError(f"fence_table={name!r} is not a plain table name of at most 56 letters, digits and _")
        super().__init__(url_or_engine)
        self.runtime = RUNTIME
        metadata = sa.MetaData(schema=schema)
        self._rows = sa.Table(
            name,
            metadata,
            sa.Column("half_id", exact_text(700), primary_key=True),
            sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("log_id", sa.String(64)),
            # With batch_id the name in the log, by which a restored log is compared with the fence.
            sa.Column("app_id", exact_text(700)),
            sa.Column("batch_id", sa.BigInteger),
            sa.Column("state", sa.String(16), nullable=False),
            # Recorded.encoded(): the states of single rows, where the column state does not tell them.
            sa.Column("outcome", sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")),
            sa.Column("changed_at", sa.DateTime, nullable=False),  # UTC, by the writer's clock
            **INNODB_TABLE,
        )
        self._id = sa.Table(
            f"{name}_id",
            metadata,
            sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("fence_id", sa.String(PLACE_CHARS_MAX), nullable=False),
            sa.Column("created_at", sa.DateTime, nullable=False),
            **INNODB_TABLE,
        )
        # Each statement is built once, so that SQLAlchemy finds its compiled form quickly.
        columns = self._rows.c
        row_columns = (columns.half_id, columns.attempt, columns.part, columns.log_id, columns.state, columns.outcome)
        of_row = sa.and_(
            columns.half_id == sa.bindparam("of"),
            columns.attempt == sa.bindparam("at"),
            columns.part == sa.bindparam("in_part"),
        )
        self._read_ids = sa.select(self._id.c.one, self._id.c.fence_id)
        self._read_many = sa.select(*row_columns).where(columns.half_id.in_(sa.bindparam("ids", expanding=True)))
        self._read_one = sa.select(*row_columns).where(of_row)
        # A shared lock: in MariaDB a transaction that the key refused has one already, and two upgrades would deadlock.
        self._hold_one = self._read_one.with_for_update(read=True)
        self._update = (
            self._rows.update()
            .where(of_row)
            .values(state=sa.bindparam("word"), outcome=sa.bindparam("sets"), changed_at=sa.bindparam("now"))
        )
        # One statement inserts the row and requires that the fence's id is that of the prepare.
        self._values = (
            sa.select(*(sa.bindparam(f"new_{c.name}", type_=c.type) for c in columns))
            .where(self._id.c.one == _THE_ID)
            .where(self._id.c.fence_id == sa.bindparam("fence"))
        )
        self._insert_plain = self._rows.insert().from_select(columns.keys(), self._values)
        self._inserts: dict[str, Any] = {}
        self._is_known = False  # whether this is known to be the database where the fence was made
        self._tried = False  # whether the table is known to compare ids exactly and to undo rolled back rows

    # ------------------------------------------------------------------ the id
    def create(self, moved: bool) -> str:
        try:
            return self._create(moved)
        except sa.exc.DBAPIError:
            # When two processes create a table at once, one of them may fail, even with IF NOT EXISTS.
            return self._create(moved)

    def _create(self, moved: bool) -> str:
        with self.transaction() as connection:
            for table in (self._rows, self._id):
                connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
            now = self._now()
            place = place_of(connection)
            rows = [{"one": _THE_ID, "fence_id": secrets.token_hex(16), "created_at": now}]
            if place is not None:
                rows.append({"one": _THE_PLACE, "fence_id": place, "created_at": now})
            insert_absent(connection, self._id, rows)
            if moved and place is not None:
                update_place = self._id.update().where(self._id.c.one == _THE_PLACE)
                connection.execute(update_place.values(fence_id=place, created_at=now))
            self._try_once(connection)
            return self.read_id(connection)

    def _try_once(self, connection: sa.Connection) -> None:
        if self._tried:
            return
        now = self._now()
        row = {"attempt": 0, "part": WHOLE, "state": STARTED, "changed_at": now}
        rows = [{"half_id": i, **row} for i in similar_names(f"trial:{secrets.token_hex(8)}:")]
        try:
            require_exact(connection, self._rows, rows)
        except ListenerError as problem:
            raise FenceError(f"{self.where}: {problem}") from problem
        self._tried = True

    def read_id(self, connection: sa.Connection, anywhere: bool = False) -> str:
        """Return the fence's id, or raise FenceError when there is none. It must be the transaction's first statement.

        ``anywhere`` allows a connection of another database than this fence's.
        """
        try:
            rows = connection.execute(self._read_ids).all()
        except sa.exc.DBAPIError as problem:
            if anywhere or is_lock_problem(problem) or self._exists():
                raise
            rows = []
        values = {row.one: row.fence_id for row in rows}
        fence_id = values.get(_THE_ID)
        if fence_id is None:
            raise FenceError(
                f"{self.where} has no fence {self._id.fullname!r}: call create_fence() once, when the "
                "database is set up. If it has one, that is in another schema (name it), this is another database, or "
                "its tables were dropped"
            )
        if anywhere or not self._is_known:
            self._require_same_place(connection, values.get(_THE_PLACE))
            self._is_known = self._is_known or not anywhere
        return str(fence_id)

    def _require_same_place(self, connection: sa.Connection, made_in: str | None) -> None:
        if made_in is None:
            return
        place = place_of(connection)
        if place is not None and place != made_in:
            raise FenceError(
                f"the fence of {self.where} was made in another place ({made_in}; this is {place}). Either this is a "
                "copy, which must not speak for that database: drop its tables "
                f"{self._rows.fullname!r} and {self._id.fullname!r}, and make a fence of its own. Or it is that "
                "database itself, which was moved or restored: call create_fence(moved=True) once"
            )

    def _exists(self) -> bool:
        with self.connect() as connection:
            return sa.inspect(connection).has_table(self._id.name, schema=self._id.schema)

    # ------------------------------------------------------------------ the rows
    def claim(self, connection: sa.Connection, batch: HalfBatch, state: State) -> Recorded | None:
        """Insert the attempt's row, with this state for the batch's undecided transactions, and return None. If the row
        exists, lock it until the database transaction ends, and return what it records.

        It waits for another database transaction that has inserted or locked the row.
        """
        if not self._is_known:
            self.require_id_of(batch, self.read_id(connection))
        self._try_once(connection)
        if self._insert(connection, batch, Recorded.of(state, batch.rows, batch.is_all)):
            reach("tombstone written" if state.word == TOMBSTONE else "fence row written")
            return None
        self.require_id_of(batch, self.read_id(connection))
        row = self._newest(connection, batch)
        if row is None:
            raise FenceError(
                f"{self.where} refuses a second fence row for {_name_of(batch)}, "
                "and does not show the first: it answers from an older snapshot, or takes another id for the same. "
                "Nothing can be said; nothing was done"
            )
        return self.recorded(row, batch)

    def _insert(self, connection: sa.Connection, batch: HalfBatch, recorded: Recorded) -> bool:
        recorded = recorded.of_batch(batch)
        row = {
            "half_id": batch.half_id,
            "attempt": batch.attempt,
            "part": _part_of(batch),
            "log_id": batch.log_id,
            "app_id": batch.app_id,
            "batch_id": batch.batch_id,
            "state": recorded.state,
            "outcome": recorded.encoded(),
            "changed_at": self._now(),
        }
        values = {"fence": batch.fence_id, **{f"new_{name}": value for name, value in row.items()}}
        if connection.dialect.name in ("postgresql", "sqlite"):
            return connection.execute(self._insert_absent(connection.dialect.name), values).one_or_none() is not None
        try:
            return connection.execute(self._insert_plain, values).rowcount == 1
        except sa.exc.IntegrityError:
            return False  # MariaDB undoes the statement alone; the database transaction goes on

    def _insert_absent(self, dialect: str) -> Any:
        if dialect not in self._inserts:
            make = postgresql.insert if dialect == "postgresql" else sqlite.insert
            insert = make(self._rows).from_select(self._rows.c.keys(), self._values)
            self._inserts[dialect] = insert.on_conflict_do_nothing().returning(self._rows.c.attempt)
        return self._inserts[dialect]

    def _newest(self, connection: sa.Connection, batch: HalfBatch) -> Any:
        """Return the attempt's newest row, locked until the database transaction ends.

        At REPEATABLE READ a SELECT without a lock answers from the transaction's snapshot, which may be older.
        """
        query = self._read_one if connection.dialect.name == "sqlite" else self._hold_one
        return connection.execute(query, _key_of(batch)).one_or_none()

    def read(self, connection: sa.Connection, batches: Sequence[HalfBatch]) -> Rows:
        """Return the committed rows of half batches, or raise FenceError when one was prepared with another fence."""
        fence_id = self.read_id(connection)
        for batch in batches:
            self.require_id_of(batch, fence_id)
        ids = list(dict.fromkeys(batch.half_id for batch in batches))
        rows: list[sa.Row[Any]] = []
        for start in range(0, len(ids), _IDS_PER_SELECT):
            rows += connection.execute(self._read_many, {"ids": ids[start : start + _IDS_PER_SELECT]})
        return {(row.half_id, row.attempt, row.part): row for row in rows}

    def record_of(self, rows: Rows, batch: HalfBatch) -> Recorded:
        """Return the record of a half batch from its rows. The rows of its parts are put together."""
        row = rows.get(_row_key(batch))
        recorded = NOTHING if row is None else self.recorded(row, batch)
        if not recorded.is_by_part:
            return recorded
        if not recorded.is_staged_as(batch):
            own_rows = [row for key, row in rows.items() if key[:2] == _row_key(batch)[:2] and row.part != WHOLE]
            executed = merged([NOTHING, *(Recorded.read(row.state, row.outcome) for row in own_rows)]).rows_in(EXECUTED)
            if not (recorded.rows_in(BY_PART) or NO_ROWS) - (executed or NO_ROWS):
                return Recorded([State(EXECUTED)])  # all of it, wherever its messages lie now
            if not recorded.has_files_of(batch):
                raise restaged_error(batch)
        parts = batch.parts().values()
        return merged(NOTHING if (row := rows.get(_row_key(p))) is None else self.recorded(row, p) for p in parts)

    def recorded(self, row: sa.Row[Any], batch: HalfBatch) -> Recorded:
        """Return what a row records of a half batch, or raise FenceError when the row is of another log, has positions
        in other half files, or is damaged."""
        if row.log_id != batch.log_id:
            raise FenceError(
                f"half batch {batch.half_id!r} is in the fence of {self.where} already, for another commit log (its id "
                f"is {row.log_id}; this one's is {batch.log_id}). Logs that share a fence need appIds and idempotency "
                "keys of their own, or a fence_table each; a log that was made anew is another one"
            )
        try:
            recorded = Recorded.read(row.state, row.outcome)
        except FenceError as problem:
            raise FenceError(f"the fence row of {_name_of(batch)}: {problem}") from problem
        recorded.require_of(batch)
        return recorded

    def write(self, connection: sa.Connection, batch: HalfBatch, recorded: Recorded) -> None:
        """Update the attempt's row, which this database transaction has claimed. When the row is gone, no check would
        find what was done: that is a FenceError."""
        recorded = recorded.of_batch(batch)
        values = {"word": recorded.state, "sets": recorded.encoded(), "now": self._now()}
        changed = connection.execute(self._update, {**_key_of(batch), **values}).rowcount
        if changed != 1:
            raise FenceError(
                f"the fence row of {_name_of(batch)} is not in "
                f"{self._rows.fullname!r} of {self.where} any more, where this database transaction had written it: "
                "work changed the connection's search_path, role or tables. Nothing was committed. Let work undo such "
                "settings, or name the fence's schema (schema=)"
            )

    def fill(self, connection: sa.Connection, batch: HalfBatch, state: State) -> Recorded:
        """Record a state for all transactions that have none, and return the states of all."""
        recorded = self.claim(connection, batch, state)
        if recorded is None:
            return Recorded.of(state, batch.rows, batch.is_all)
        if recorded.is_by_part:
            if not recorded.is_staged_as(batch):
                known = self.record_of(self.read(connection, [batch]), batch)
                if known.files is None:
                    return known
            return merged([self.fill(connection, part, state) for part in batch.parts().values()])
        absent = batch.rows.where(pc.is_null(recorded.among(batch.rows)))
        if absent:
            recorded = recorded.with_rows(absent, [state])
            self.write(connection, batch, recorded)
        return recorded

    def _now(self) -> datetime:
        return self.runtime.now().replace(tzinfo=None)

    def require_id_of(self, batch: HalfBatch, found: str) -> None:
        """Raise FenceError when a half batch was not prepared with this fence."""
        if batch.fence_id is None:
            raise FenceError(
                f"half batch {batch.half_id!r} was prepared without a fence, so this fence ({found}) cannot "
                "speak for it: use the listener that it was prepared with, or settle it with log.resolve"
            )
        if batch.fence_id != found:
            raise FenceError(
                f"half batch {batch.half_id!r} was prepared with fence {batch.fence_id}, but "
                f"{self.where} has fence {found}: another database (or the fence was made anew). "
                "Point the listener to the right one"
            )

    def require_not_too_late(self, batch: HalfBatch) -> None:
        """Raise LocalTransactionError for an attempt so old that the row of a check may have been pruned."""
        age = self.runtime.now() - utc(batch.prepared_at)
        if age >= timedelta(seconds=FENCE_RETENTION_S_MIN):
            raise LocalTransactionError(
                f"attempt {batch.attempt} of half batch {batch.half_id!r} began {age.days} days ago, and fence rows "
                f"live for {FENCE_RETENTION_S_MIN / 86_400:g}: this process slept, and nothing was done. Start it again"
            )

    def executed_since(self, log_id: str, since: datetime) -> Iterator[ExecutedAttempt]:
        """Yield the attempts of a log that were executed since a time, also those that ended in their middle."""
        columns = self._rows.c
        condition = sa.and_(
            columns.state.in_((EXECUTED, STARTED, MIXED)),
            columns.changed_at >= utc(since).astimezone(timezone.utc).replace(tzinfo=None),
            columns.log_id == log_id,
        )
        query = sa.select(self._rows).where(condition).order_by(columns.half_id, columns.attempt)
        with self.transaction(write=False) as connection:
            self.read_id(connection)
            rows = connection.execute(query.execution_options(yield_per=PRUNED_AT_ONCE))
            for _, of_attempt in groupby(rows, key=lambda row: (row.half_id, row.attempt)):
                parts = list(of_attempt)
                recorded = merged([Recorded.read(part.state, part.outcome) for part in parts])
                is_whole = all(state.word != STARTED for state in recorded.states)
                executed = recorded.rows_in(EXECUTED if is_whole else STARTED)
                if executed is None or executed:
                    row, at = parts[0], utc(max(part.changed_at for part in parts))
                    yield ExecutedAttempt(row.half_id, row.app_id, row.batch_id, row.attempt, at, is_whole, executed)

    # ------------------------------------------------------------------ pruning
    def prune(self, older_than_s: float, logs: Mapping[str, Callable[[Collection[str]], set[str]]]) -> Iterator[int]:
        """Go through all rows in the order of their ids, and yield the number of deleted rows of each page.

        ``logs`` has, by a log's id, a function that returns which half batches are still in the log. It is called after
        the rows were read, because a half batch is in its log before it has a row. Each database transaction is short,
        so that others do not wait long for its locks.
        """
        with self.transaction(write=False) as connection:
            self.read_id(connection)
            before = min(self.runtime.now(), _time_of(connection)) - timedelta(seconds=older_than_s)
        columns = self._rows.c
        key, is_old = columns.half_id, columns.changed_at < before.replace(tzinfo=None)
        of_log = sa.and_(columns.log_id == sa.bindparam("log"), key.in_(sa.bindparam("ids", expanding=True)))
        delete = self._rows.delete().where(of_log, is_old)
        last: str | None = ""
        while last is not None:
            after, page_end = key > last, sa.select(key).order_by(key).offset(PRUNED_AT_ONCE - 1).limit(1)
            with self.transaction(write=False) as connection:
                last = connection.execute(page_end.where(after)).scalar()
                page = after if last is None else sa.and_(after, key <= last)
                rows = connection.execute(sa.select(key, columns.log_id).where(page, is_old).distinct()).all()
            deleted = 0
            for log_id, still_has in logs.items():
                half_ids = [row.half_id for row in rows if row.log_id == log_id]
                kept = still_has(half_ids) if half_ids else set()
                gone = [half_id for half_id in half_ids if half_id not in kept]
                for start in range(0, len(gone), _IDS_PER_SELECT):
                    with self.transaction() as connection:
                        result = connection.execute(
                            delete, {"log": log_id, "ids": gone[start : start + _IDS_PER_SELECT]}
                        )
                        deleted += result.rowcount
            yield deleted

    def take_turn(self, log_id: str, every_s: float) -> bool:
        """Take the turn to prune a log's rows, unless another process took it in the last ``every_s`` seconds. Return
        whether it was taken.

        A row of the fence keeps the time, under an id that no half batch has.
        """
        now = self._now()
        columns, turn_id = self._rows.c, f"{PRUNED}@{log_id}"
        row = {"half_id": turn_id, "attempt": 0, "part": WHOLE, "state": PRUNED, "changed_at": now}
        ago = now - timedelta(seconds=every_s)
        is_recent = columns.changed_at.between(ago, now + timedelta(seconds=every_s))
        take = self._rows.update().where(columns.half_id == turn_id, ~is_recent).values(changed_at=now)
        with self.transaction() as connection:
            present = insert_absent(connection, self._rows, [row])
            return not present or connection.execute(take).rowcount == 1


def create_fence(
    url_or_engine: Address, *, fence_table: str = FENCE_TABLE, schema: str | None = None, moved: bool = False
) -> str:
    """Make a database's fence from a script: its tables and a random id, unless they exist.

    ``moved=True`` binds the fence to this database: it was moved, upgraded or restored, and is not a copy beside
    another one.

    Returns
    -------
    str
        The fence's id.
    """
    return Fence(url_or_engine, fence_table, schema).create(moved)


def _time_of(connection: sa.Connection) -> datetime:
    queries = {"sqlite": "SELECT strftime('%s', 'now')", "postgresql": "SELECT extract(epoch FROM now())"}
    epoch_s = connection.exec_driver_sql(queries.get(connection.dialect.name, "SELECT unix_timestamp()")).scalar_one()
    return datetime.fromtimestamp(float(epoch_s), timezone.utc)


def _part_of(batch: HalfBatch) -> int:
    return WHOLE if batch.part is None else batch.part


def _key_of(batch: HalfBatch) -> dict[str, object]:
    return {"of": batch.half_id, "at": batch.attempt, "in_part": _part_of(batch)}


def _row_key(batch: HalfBatch) -> tuple[str, int, int]:
    return batch.half_id, batch.attempt, _part_of(batch)


def _name_of(batch: HalfBatch) -> str:
    part = "" if batch.part is None else f", part {batch.part}"
    return f"half batch {batch.half_id!r}, attempt {batch.attempt}{part}"
