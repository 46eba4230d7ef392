"""The table of a listener without code: reads a row for it from each body, and inserts the rows that fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from rmq_spark._core.database.error_codes import is_refused_value, misses_a_parent, updates_a_row_twice
from rmq_spark._core.database.insert import Conflict, can_insert_each, insert, insert_each, unstorable
from rmq_spark._core.listeners.decode import read_bodies
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.json_fields import JSON, convert, fields_of, read_as
from rmq_spark._core.vocabulary.options import nearest
from rmq_spark._core.vocabulary.redaction import one_line, text_of
from rmq_spark.errors import MessageError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.table_listener import TableListener

EACH_MAX = 4_000
"""Transactions up to which PostgreSQL inserts them one by one after a refusal, instead of by halves."""
RUNS_MAX, HALVINGS_MAX = 500, 200
"""The most statements that insert rows in their order, and the most parts that are halved. Each may make a temporary
table, whose locks PostgreSQL keeps until the commit."""
KEYS_AT_ONCE = 5_000
"""Key values that one SELECT looks for."""
NAME_CHARS_MAX = 60
"""Characters of an unknown field's name that a reason shows. The whole reason is cut where it is kept."""


class Refused:
    """The transactions, or the messages, whose rows do not fit, and why."""

    def __init__(self, listener: TableListener, batch: HalfBatch, units: pa.Array) -> None:
        self._listener, self._batch, self._units = listener, batch, units
        self.reasons: dict[int, str] = {}

    def add(self, unit: int, reason: str, problem: BaseException | None = None) -> None:
        """Refuse a transaction, or raise MessageError when that fails the half batch."""
        if self._listener.needs_single_transactions:
            self.reasons.setdefault(unit, reason)
            return
        row = pc.index(self._units, unit).as_py()
        raise MessageError(
            f"the message of row {row} ({self._batch._name_of(row)}) does not fit table {self._listener.table!r}: "
            f"{reason}. Nothing was inserted. on_bad_row='rollback' rolls back such transactions alone"
        ) from problem

    def others(self, rows: pa.Table, units: pa.Array) -> tuple[pa.Table, pa.Array]:
        if not self.reasons:
            return rows, units
        keep = pc.invert(pc.is_in(units, value_set=pa.array(list(self.reasons), units.type)))
        return rows.filter(keep), units.filter(keep)


@dataclass(frozen=True)
class Target:
    """The table, and what is read from a body for it."""

    table: sa.Table
    schema: str | None
    types: dict[str, pa.DataType | str]
    is_postgres: bool
    never_null: tuple[str, ...]
    defaults: tuple[str, ...]
    """Columns that an insert leaves out where a row has null."""
    lookup: tuple[str, ...]
    """A unique key, by which existing rows can be found."""
    conflict: Conflict | None
    refuses_unknown_fields: bool
    """Whether a row does not fit whose body has a field that the table has no column for."""

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides whether a row fits: equal unless somebody has altered the table."""
        columns = [(column.name, repr(column.type)) for column in self.table.columns]
        return self.types, self.never_null, self.defaults, self.lookup, columns

    @property
    def taken_reason(self) -> str:
        """Why a row is refused whose key is in the table."""
        return f"a row with this {', '.join(self.lookup)} is there already"

    # ------------------------------------------------------------------ reading
    def read(self, bodies: pa.ChunkedArray) -> tuple[pa.Table, dict[int, str]]:
        """Return a row for each body, and why rows do not fit, by row."""
        plain = {name: read_as(kind) for name, kind in self.types.items() if kind != JSON}
        # The reader needs a field. No body has this one.
        fields = pa.schema(list(plain.items()) or [("\x00", pa.null())])
        decoded, bad = read_bodies(bodies, fields)
        if self.refuses_unknown_fields:  # a misspelt field says more than the null that it leaves
            self._note_unknown_fields(bodies, bad)
        columns = {name: decoded[name] for name in plain}
        if len(plain) < len(self.types):
            columns |= self._read_json(bodies, bad)
        converted = {name: convert(columns[name], kind) for name, kind in self.types.items()}
        rows = pa.table({name: column for name, (column, _) in converted.items()})
        for name, (_, misfits) in converted.items():
            if misfits is not None:
                _note(bad, misfits, f"column {name!r} is a {self.types[name]}, and the field is none")
        null_masks = [pc.is_null(column) for column in rows.columns]
        all_null = null_masks[0]
        for is_null in null_masks[1:]:
            all_null = pc.and_(all_null, is_null)
        _note(bad, all_null, f"the body has none of the fields {', '.join(rows.column_names)}")
        for name, is_null in zip(rows.column_names, null_masks, strict=True):
            if name in self.never_null:
                _note(bad, is_null, f"column {name!r} cannot be null, and the field is null or missing")
        for name, flaw, misfits in unstorable(rows):
            if self.is_postgres or kinds.is_timestamp(rows[name].type):
                _note(bad, misfits, f"column {name!r} has {flaw}, which the database cannot keep")
        return rows, bad

    def _note_unknown_fields(self, bodies: pa.ChunkedArray, bad: dict[int, str]) -> None:
        known = set(self.table.columns.keys())
        reasons: dict[str, str] = {}  # by field: many bodies have the same one
        for row, body in enumerate(bodies.to_pylist()):
            if row in bad:
                continue
            try:
                name = next((name for name in json.loads(body) if name not in known), None)
            except (ValueError, RecursionError) as problem:
                bad[row] = f"it is not JSON: {problem}"
                continue
            if name is not None:
                if name not in reasons:
                    shown = name if len(name) <= NAME_CHARS_MAX else f"{name[:NAME_CHARS_MAX]}…"
                    # In brackets: text after a colon behind 'token' would be hidden as a secret.
                    reasons[name] = f"the table has no column {shown!r} ({nearest(name, known)})"
                bad[row] = reasons[name]

    def _read_json(self, bodies: pa.ChunkedArray, bad: dict[int, str]) -> dict[str, pa.ChunkedArray]:
        """Return the fields of JSON columns, as they are written in the bodies."""
        names = [name for name, kind in self.types.items() if kind == JSON]
        texts: dict[str, list[str | None]] = {name: [None] * len(bodies) for name in names}
        for row, body in enumerate(bodies.to_pylist()):
            if row in bad:
                continue
            try:
                for name, text in fields_of(body.decode() if isinstance(body, bytes) else body):
                    if name in texts:
                        texts[name][row] = text
            except (ValueError, IndexError, RecursionError) as problem:
                bad[row] = f"it is not JSON: {problem}"
        return {name: pa.chunked_array([pa.array(column, pa.string())]) for name, column in texts.items()}

    # ------------------------------------------------------------------ inserting
    def insert(self, connection: sa.Connection, rows: pa.Table, units: pa.Array, refused: Refused) -> None:
        """Insert the rows, and add the transactions whose rows the database refuses to ``refused``."""
        problem = self._try(connection, rows)
        if problem is not None and self.conflict is None and self._refuse_taken_keys(connection, rows, units, refused):
            rows, units = refused.others(rows, units)
            problem = self._try(connection, rows)
        if problem is None:
            return
        if self.conflict is None:
            self._insert_parts(connection, rows, units, problem, refused)
            return
        # Parts change the order of rows, which decides among rows with one key. So parts only find the refused rows.
        trial = connection.begin_nested()
        try:
            self._insert_parts(connection, rows, units, problem, refused)
        finally:
            trial.rollback()
        problem = self._try(connection, refused.others(rows, units)[0])
        if problem is not None:
            raise problem

    def _insert_parts(
        self,
        connection: sa.Connection,
        rows: pa.Table,
        units: pa.Array,
        problem: sa.exc.StatementError | None,
        refused: Refused,
    ) -> None:
        """Insert rows part by part, after the database has refused some of them."""
        remaining: list[tuple[pa.Table, pa.Array, sa.exc.StatementError | None]] = [(rows, units, problem)]
        while remaining:
            part, part_units, problem = remaining.pop()
            if problem is None:
                problem = self._try(connection, part)
            if problem is None:
                continue
            distinct = pc.unique(part_units)
            if len(distinct) == 1:
                refused.add(distinct[0].as_py(), _reason(problem), problem)
                continue
            if len(distinct) <= EACH_MAX and self._insert_each(connection, part, part_units, refused):
                continue
            first = pc.is_in(part_units, value_set=distinct[: len(distinct) // 2])
            second = pc.invert(first)
            for half in (second, first):  # the first half is inserted first
                remaining.append((part.filter(half), part_units.filter(half), None))

    def _try(self, connection: sa.Connection, rows: pa.Table) -> sa.exc.StatementError | None:
        """Insert rows in a savepoint, or return the error with which the database refuses one of them."""
        if not rows.num_rows:
            return None
        parts = self._parts(rows)
        problem = self._try_parts(connection, parts)
        if problem is None or len(parts) == 1 or not misses_a_parent(problem):
            return problem
        # The parent may be an earlier row of another part.
        runs = list(islice(self._in_order(rows), RUNS_MAX + 1))
        return self._try_parts(connection, runs) if len(runs) <= RUNS_MAX else problem

    def _try_parts(self, connection: sa.Connection, parts: Sequence[pa.Table]) -> sa.exc.StatementError | None:
        savepoint, halvings = connection.begin_nested(), iter(range(HALVINGS_MAX))
        try:
            for part in parts:
                self._insert_part(connection, part, halvings)
        except sa.exc.StatementError as problem:
            if not is_refused_value(problem):
                raise
            savepoint.rollback()
            return problem
        savepoint.commit()
        return None

    def _insert_part(self, connection: sa.Connection, part: pa.Table, halvings: Iterator[int]) -> None:
        """Insert rows that take the defaults of the same columns. PostgreSQL refuses to update a row twice in one
        statement, so rows whose keys are one in another spelling go by two."""
        if not (self.is_postgres and self.conflict and self.conflict.update and part.num_rows > 1):
            insert(connection, self.table.name, part, self.schema, self.conflict, self.table)
            return
        savepoint = connection.begin_nested()
        try:
            insert(connection, self.table.name, part, self.schema, self.conflict, self.table)
        except sa.exc.StatementError as problem:
            savepoint.rollback()
            if not updates_a_row_twice(problem) or next(halvings, None) is None:
                raise
            half = part.num_rows // 2
            self._insert_part(connection, part.slice(0, half), halvings)
            self._insert_part(connection, part.slice(half), halvings)
        else:
            savepoint.commit()

    def _insert_each(self, connection: sa.Connection, rows: pa.Table, units: pa.Array, refused: Refused) -> bool:
        """Insert transaction by transaction within the database if it can do so. Return whether it did."""
        parts = self._parts(rows)
        is_plain = len(parts) == 1 and parts[0].num_rows == rows.num_rows  # no rows of one key were merged
        if not is_plain or not can_insert_each(connection, rows):
            return False
        reasons = insert_each(connection, self.table.name, parts[0], units, self.schema, self.conflict)
        for unit, reason in reasons.items():
            refused.add(unit, one_line(reason))
        return True

    def _parts(self, rows: pa.Table) -> list[pa.Table]:
        """Split rows into parts that take the defaults of the same columns."""
        if self.conflict is not None and self.conflict.update:
            rows = _last_of_each(rows, self.conflict.key, self.conflict.keeps)
        return self._by_defaults(rows)

    def _by_defaults(self, rows: pa.Table) -> list[pa.Table]:
        parts = [rows]
        for name in self.defaults:
            parts = [part for whole in parts for part in _by_null(whole, name)]
        return parts  # each part has a column: each row has a value

    def _in_order(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Yield runs of rows that take the defaults of the same columns, in the order of the rows."""
        nulls = list(zip(*(pc.is_null(rows[name]).to_pylist() for name in self.defaults), strict=True))
        start = 0
        for _, run in groupby(nulls):
            end = start + sum(1 for _ in run)
            yield from self._by_defaults(rows.slice(start, end - start))
            start = end

    def _refuse_taken_keys(self, connection: sa.Connection, rows: pa.Table, units: pa.Array, refused: Refused) -> bool:
        """Refuse the transactions with a key that is in the table. Return whether there are any."""
        if not self.lookup or not set(self.lookup) <= set(rows.column_names):
            return False
        keys = list(zip(*(rows[name].to_pylist() for name in self.lookup), strict=True))
        columns = [self.table.columns[name] for name in self.lookup]
        existing: set[tuple[Any, ...]] = set()
        savepoint = connection.begin_nested()
        try:
            for condition in self._key_conditions(columns, keys):
                existing.update(tuple(row) for row in connection.execute(sa.select(*columns).where(condition)))
        except sa.exc.StatementError as problem:  # a value that the key's type refuses, such as a uuid
            if not is_refused_value(problem):
                raise
            savepoint.rollback()
            return False
        savepoint.commit()
        taken = [position for position, key in enumerate(keys) if key in existing] if existing else []
        for position in taken:
            refused.add(units[position].as_py(), self.taken_reason)
        return bool(taken)

    def _key_conditions(
        self, columns: Sequence[sa.Column[Any]], keys: Sequence[Any]
    ) -> Iterator[sa.ColumnElement[bool]]:
        """Yield conditions that each select the rows of a part of the keys."""
        if self.is_postgres and len(columns) == 1:  # an array is one parameter
            array = sa.literal([key for (key,) in keys], postgresql.ARRAY(columns[0].type))
            yield columns[0] == sa.func.any(array)
            return
        for start in range(0, len(keys), KEYS_AT_ONCE):
            part = keys[start : start + KEYS_AT_ONCE]
            yield sa.tuple_(*columns).in_(part) if len(columns) > 1 else columns[0].in_([key for (key,) in part])


def _note(bad: dict[int, str], misfits: pa.ChunkedArray, reason: str) -> None:
    for row in pc.indices_nonzero(misfits).to_pylist():
        bad.setdefault(row, reason)


def _last_of_each(rows: pa.Table, key: Sequence[str], keeps: bool) -> pa.Table:
    """Return the last row of each key; with ``keeps``, in each column its last value that is not null."""
    numbers = pa.array(range(rows.num_rows), pa.int64())
    others = [name for name in rows.column_names if name not in key]
    number_columns = {f"\0{n}": pc.if_else(pc.is_valid(rows[n]), numbers, None) if keeps else numbers for n in others}
    grouped = pa.table({**{name: rows[name] for name in key}, **number_columns}).group_by(list(key), use_threads=False)
    last = grouped.aggregate([(name, "max") for name in number_columns])
    if last.num_rows == rows.num_rows:
        return rows
    return pa.table({n: last[n] if n in key else rows[n].take(last[f"\0{n}_max"]) for n in rows.column_names})


def _by_null(rows: pa.Table, name: str) -> list[pa.Table]:
    """Return the rows that have a value in a column, and the other rows without the column."""
    nulls = rows[name].null_count
    if not nulls:
        return [rows]
    if nulls == rows.num_rows:
        return [rows.drop_columns([name])]
    has_value = pc.is_valid(rows[name])
    return [rows.filter(has_value), rows.filter(pc.invert(has_value)).drop_columns([name])]


def _reason(problem: sa.exc.StatementError) -> str:
    """Return the database's error text, without the second line, in which PostgreSQL adds values of the row."""
    cause: Any = problem.orig
    if isinstance(cause, BaseException) and len(cause.args) == 2 and isinstance(cause.args[0], int):
        return one_line(str(cause.args[1]))  # MariaDB and MySQL: the text after the number
    lines = text_of(cause).splitlines() if isinstance(cause, BaseException) else []
    return one_line(lines[0]) if lines else type(problem).__name__
