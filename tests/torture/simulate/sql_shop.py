"""The real ``SqlTransactionListener`` in a simulation, on SQLite.

Its fence is the product's. Two things are the simulation's: a database transaction that writes waits for its turn in
simulated time, and what ``work`` did is noted at the moment of the commit. SQLite has one writer at a time, so no two
database transactions overlap; whoever waits, dies or comes late does so between them, or while others wait.
"""

from __future__ import annotations

import atexit
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, HalfBatch, SqlTransactionListener
from tests.support.inside import (
    BY_PART,
    EXECUTED,
    FENCE_TABLE,
    KEY,
    ROLLED_BACK,
    Fence,
    Recorded,
    Runtime,
    Verdict,
    Verdicts,
    normalize_verdicts,
)
from tests.torture.judge.history import History
from tests.torture.simulate.scheduler import Scheduler, SimulatedLock
from tests.torture.simulate.shop import LOCK_TIMEOUT_S, REFUSED, Answer, Database, Listener, Temper


class SqlDatabase(Database):
    """A SQLite file with the product's fence in it.

    Attributes
    ----------
    sql_fence : SteppedFence
    """

    def __init__(self, scheduler: Scheduler, history: History, fence_id: str, runtime: Runtime) -> None:
        super().__init__(scheduler, history, fence_id)
        self.sql_fence = fence_called(fence_id)
        self.sql_fence.begin_anew(self, SimulatedLock(scheduler), runtime)

    def said(self, batch: HalfBatch) -> list[str | None]:
        """What the fence's rows say of each transaction of a half batch, without the product's way to choose rows."""
        codes: list[str | None] = [None] * batch.rows.count
        for row in self.sql_fence.rows_of(batch):
            recorded = Recorded.read(row.state, row.outcome)
            if row.state == BY_PART:
                continue
            for place, code in enumerate(recorded.among(batch.rows).to_pylist()):
                if code is not None:
                    codes[place] = recorded.states[code].word
        words = [*dict.fromkeys(word for word in codes if word is not None), None]
        places = batch.by_transaction(pc.index_in(_strings(codes), value_set=_strings(words)))
        return [None if place is None else words[place] for place in places.to_pylist()]


def _strings(words: Sequence[str | None]) -> pa.Array:
    return pa.array(words, pa.string())


class SteppedFence(Fence):
    """The product's fence. Who writes waits for its turn, and a commit is noted.

    Attributes
    ----------
    uncommitted : list
        For each ``work`` of the open database transaction the arguments of :meth:`Database.write`.
    """

    _database: SqlDatabase
    _turn: SimulatedLock

    def begin_anew(self, database: SqlDatabase, turn: SimulatedLock, runtime: Runtime) -> None:
        """Forget all rows, for another run."""
        self._database, self._turn, self.runtime = database, turn, runtime
        self.uncommitted: list[tuple[dict[str, str], HalfBatch, list[tuple[str, bytes]]]] = []
        with self.engine.begin() as connection:
            connection.execute(self._rows.delete())
            connection.execute(self._id.update().where(self._id.c.one == 1).values(fence_id=database.fence_id))

    def rows_of(self, batch: HalfBatch) -> list[Any]:
        """All rows of an attempt."""
        columns = self._rows.c
        with self.engine.connect() as connection:
            rows = connection.execute(
                self._rows.select().where(columns.half_id == batch.half_id, columns.attempt == batch.attempt)
            )
            return list(rows.all())

    @contextmanager
    def transaction(self, lock_timeout: float | None = None, *, write: bool = True) -> Iterator[sa.Connection]:
        if not write:
            with super().transaction(lock_timeout, write=False) as connection:
                yield connection
            return
        if not self._turn.acquire(lock_timeout):
            raise sa.exc.OperationalError("BEGIN IMMEDIATE", {}, sqlite3.OperationalError("database is locked"))
        try:
            self.uncommitted = []
            with super().transaction(lock_timeout) as connection:
                yield connection
            for states, batch, bodies in self.uncommitted:
                self._database.write(states, batch, bodies)
        finally:
            self._turn.release()


_fences: dict[str, SteppedFence] = {}
"""Each simulation of this process begins them anew: to make one takes longer than a small run."""


def fence_called(fence_id: str) -> SteppedFence:
    """The fence of this process with an id, in a file of its own."""
    if fence_id not in _fences:
        folder = tempfile.TemporaryDirectory(prefix="simulated-fence-")
        atexit.register(folder.cleanup)
        engine = sa.create_engine(f"sqlite:///{Path(folder.name) / 'fence.db'}")
        sa.event.listen(engine, "connect", _hurry)
        fence = SteppedFence(engine, FENCE_TABLE, None)
        fence._turn = SimulatedLock(Scheduler(None))  # type: ignore[arg-type]
        fence.uncommitted = []
        fence.create(moved=False)
        _fences[fence_id] = fence
    return _fences[fence_id]


def _hurry(connection: sqlite3.Connection, _: object) -> None:
    """A power failure is not part of the simulation."""
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = MEMORY")


class SqlListener(Listener):
    """Asks the product's ``SqlTransactionListener``."""

    database: SqlDatabase

    def __init__(self, database: SqlDatabase, scheduler: Scheduler, history: History, temper: Temper) -> None:
        super().__init__(database, scheduler, history, temper)
        self._sql = SqlTransactionListener(
            database.sql_fence.engine, self._do, rollback_after=self.rollback_after_s, lock_timeout=LOCK_TIMEOUT_S
        )
        self._sql._fence = self._sql._work._fence = database.sql_fence

    @property
    def store_id(self) -> str:  # type: ignore[override]
        return self.database.fence_id

    def begin_parts(self, batch: HalfBatch) -> bool:
        self._scheduler.step()
        begun = self._sql.begin_parts(batch)
        self._scheduler.step()
        return begun

    def execute(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        verdicts = self._each(self._sql.execute_local_transaction(batch), batch, ids)
        return [COMMIT_MESSAGE if verdict.state is COMMIT_MESSAGE else REFUSED for verdict in verdicts]

    def check(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        verdicts = self._each(self._sql.check_local_transaction(batch), batch, ids)
        return [REFUSED if verdict.refused else verdict.state for verdict in verdicts]

    def _do(self, connection: sa.Connection, batch: HalfBatch) -> Verdicts:
        """The user's work."""
        ids: list[str] = batch.transactions["transaction_id"].to_pylist()
        names = batch.transactions["transaction_key" if batch.transaction_per == KEY else "transaction_id"].to_pylist()
        bodies = batch.messages(["transaction_id", "body"]).to_pylist()
        states = self.work(ids)
        done = [(r["transaction_id"], r["body"]) for r in bodies if states[r["transaction_id"]] == EXECUTED]
        self.database.sql_fence.uncommitted.append((states, batch, done))
        if not done:
            return ROLLBACK_MESSAGE
        return batch.verdicts(rollback=[name for name, i in zip(names, ids, strict=True) if states[i] == ROLLED_BACK])

    @staticmethod
    def _each(answer: Verdicts, batch: HalfBatch, ids: Sequence[str]) -> list[Verdict]:
        return normalize_verdicts(answer, batch).each(len(ids))
