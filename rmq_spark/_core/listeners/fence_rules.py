"""What a fence needs from a database, as rules that are tried on it, each with half batches of its own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rmq_spark._core.database.exact_keys import INNODB_TABLE
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.sql import SqlTransactionListener
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, Rollback, Verdict, verdict_of
from rmq_spark.errors import FencedError, FenceError, TransactionEndedError

WAIT_S = 30.0
AT_ONCE = 0.0
"""Seconds of ``rollback_after`` with which a check treats each half batch as old."""

Work = Callable[[sa.Connection, Any], Any]


class Trial:
    """A database in which rules are tried: tables of its own, which go at the end, and half batches. ``stage(fence_id,
    keys)`` prepares a half batch with a transaction for each key."""

    def __init__(self, engine: sa.Engine, stage: Callable[[str, Sequence[str]], HalfBatch]) -> None:
        self.engine, self._stage = engine, stage
        name = f"txmq_trial_{secrets.token_hex(6)}"
        self._fence_table = f"{name}_fence"
        metadata = sa.MetaData()
        self.rows = sa.Table(name, metadata, sa.Column("id", sa.String(50), primary_key=True), **INNODB_TABLE)
        fence_tables = [sa.Table(table, metadata) for table in (self._fence_table, f"{self._fence_table}_id")]
        self._tables = [self.rows, *fence_tables]

    def __enter__(self) -> Trial:
        self.rows.create(self.engine)
        try:
            self._fence_id = self.listener(self.insert).create_fence()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for table in self._tables:
            table.drop(self.engine, checkfirst=True)

    def batch(self, *keys: str) -> HalfBatch:
        return self._stage(self._fence_id, keys)

    def listener(self, work: Work, **settings: Any) -> SqlTransactionListener:
        return SqlTransactionListener(self.engine, work, fence_table=self._fence_table, **settings)

    def insert(self, connection: sa.Connection, batch: HalfBatch) -> None:
        """A local transaction: a row for each transaction."""
        connection.execute(self.rows.insert(), [{"id": key} for key in _keys(batch)])

    def execute(self, batch: HalfBatch, work: Work | None = None) -> list[Verdict]:
        return _verdicts(batch, self.listener(work or self.insert).execute_local_transaction(batch))

    def check(self, batch: HalfBatch, **settings: Any) -> list[Verdict]:
        return _verdicts(batch, self.listener(self.insert, **settings).check_local_transaction(batch))

    def require(self, batch: HalfBatch, rows: Sequence[str] | None = None) -> None:
        """Require that the user's table has these of the batch's rows, by default all."""
        query = sa.select(self.rows.c.id).where(self.rows.c.id.in_(_keys(batch)))
        with self.engine.connect() as connection:
            found = sorted(connection.execute(query).scalars())
        _require_equal("rows in the table", found, sorted(_keys(batch) if rows is None else rows))


@dataclass(frozen=True)
class Rule:
    """A sentence, and the function that raises an exception where it does not hold."""

    sentence: str
    hold: Callable[[Trial], None]


RULES: list[Rule] = []


def _rule(sentence: str) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    def add(hold: Callable[[Trial], None]) -> Callable[[Trial], None]:
        RULES.append(Rule(sentence, hold))
        return hold

    return add


@_rule("A check finds the local transaction that was committed.")
def _commits(trial: Trial) -> None:
    batch = trial.batch("commit-a", "commit-b")
    _require_equal("execute", _states(trial.execute(batch)), [COMMIT_MESSAGE] * 2)
    _require_equal("check", _states(trial.check(batch, rollback_after=AT_ONCE)), [COMMIT_MESSAGE] * 2)
    trial.require(batch)


@_rule("A local transaction that comes after a check's ROLLBACK does not run.")
def _buries(trial: Trial) -> None:
    batch = trial.batch("late")
    _require_equal("an early check", _states(trial.check(batch)), [UNKNOWN])
    _require_equal("check", _states(trial.check(batch, rollback_after=AT_ONCE)), [ROLLBACK_MESSAGE])
    _require_raises(FencedError, lambda: trial.execute(batch))
    trial.require(batch, rows=[])


@_rule("What work refuses is undone, and the refusal is recorded with its reason.")
def _refuses(trial: Trial) -> None:
    batch = trial.batch("refused")

    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        trial.insert(connection, batch)
        raise Rollback("no stock")

    trial.execute(batch, work)
    (verdict,) = trial.check(batch)
    _require_equal("check", (verdict.state, verdict.reason), (ROLLBACK_MESSAGE, "no stock"))
    trial.require(batch, rows=[])


@_rule("A verdict is recorded for each transaction.")
def _divides(trial: Trial) -> None:
    batch = trial.batch("good", "bad")
    expected = [ROLLBACK_MESSAGE if key == "bad" else COMMIT_MESSAGE for key in _keys(batch)]
    _require_equal("execute", _states(trial.execute(batch, lambda _, b: b.verdicts(rollback=["bad"]))), expected)
    _require_equal("check", _states(trial.check(batch)), expected)


@_rule("A local transaction that fails leaves nothing behind.")
def _fails(trial: Trial) -> None:
    batch = trial.batch("failed")

    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        trial.insert(connection, batch)
        raise ZeroDivisionError

    _require_raises(ZeroDivisionError, lambda: trial.execute(batch, work))
    trial.require(batch, rows=[])
    _require_equal("check", _states(trial.check(batch)), [UNKNOWN])


@_rule("A check of a running local transaction answers UNKNOWN, and then what it did.")
def _runs(trial: Trial) -> None:
    batch, is_running, may_end = trial.batch("running"), threading.Event(), threading.Event()

    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        trial.insert(connection, batch)
        is_running.set()
        may_end.wait(WAIT_S)

    with ThreadPoolExecutor(1) as thread:
        executed = thread.submit(trial.execute, batch, work)
        try:
            if not is_running.wait(WAIT_S):
                raise AssertionError(f"work was not called within {WAIT_S:g} s")
            during = _states(trial.check(batch, rollback_after=AT_ONCE, lock_timeout=0.2))
        finally:
            may_end.set()
        executed.result()
    _require_equal("check while it ran", during, [UNKNOWN])
    _require_equal("check", _states(trial.check(batch, rollback_after=AT_ONCE)), [COMMIT_MESSAGE])
    trial.require(batch)


@_rule("Of two local transactions for one attempt one runs, and both get its verdict.")
def _runs_once(trial: Trial) -> None:
    batch, runs, together = trial.batch("twice"), [], threading.Barrier(2)

    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        runs.append(batch)
        trial.insert(connection, batch)

    def execute() -> list[Verdict]:
        together.wait(WAIT_S)
        return trial.execute(batch, work)

    with ThreadPoolExecutor(2) as threads:
        verdicts = [execution.result() for execution in [threads.submit(execute) for _ in range(2)]]
    _require_equal("the two executes", [_states(each) for each in verdicts], [[COMMIT_MESSAGE]] * 2)
    _require_equal("calls of work", len(runs), 1)
    trial.require(batch)


@_rule("Work that ends its database transaction is noticed, and no check answers for it.")
def _ends(trial: Trial) -> None:
    batch = trial.batch("ended")

    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        trial.insert(connection, batch)
        connection.exec_driver_sql("COMMIT")

    _require_raises(TransactionEndedError, lambda: trial.execute(batch, work))
    _require_raises(FenceError, lambda: trial.check(batch, rollback_after=AT_ONCE))


def _keys(batch: HalfBatch) -> list[str]:
    return list(batch.transactions["transaction_key"].to_pylist())


def _verdicts(batch: HalfBatch, verdicts: Any) -> list[Verdict]:
    count = batch.transactions.num_rows
    return [verdict_of(verdicts)] * count if isinstance(verdicts, str) else list(verdicts.each(count))


def _states(verdicts: Sequence[Verdict]) -> list[object]:
    return [verdict.state for verdict in verdicts]


def _require_equal(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{what}: found {found}, expected {expected}")


def _require_raises(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        found = call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} is expected: found {found}")
