"""Databases with a fence for tests of listeners: a table of orders, and half batches without a log behind them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from rmq_spark import HalfBatch, SqlTransactionListener
from rmq_spark._core.database.exact_keys import exact_text
from rmq_spark.listeners import HalfTransaction, VerdictArray
from tests.support.inside import PROPERTIES, TIMESTAMP, RowSet

OLD = timedelta(hours=1)
YOUNG = timedelta(seconds=1)

metadata = sa.MetaData()
orders = sa.Table("orders", metadata, sa.Column("id", sa.String(50)), sa.Column("lines", sa.Integer))


# ---------------------------------------------------------------- the databases
def run(url: sa.URL | str, *statements: str) -> None:
    """Statements outside of any transaction, on a connection of their own."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def make_orders(url: sa.URL) -> sa.URL:
    """Make the empty table ``orders``, and return the URL."""
    engine = sa.create_engine(url)
    metadata.create_all(engine)
    engine.dispose()
    return url


def stored(url: sa.URL) -> dict[str, int]:
    """What the user's table holds; every order at most once."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = connection.execute(sa.select(orders)).all()
    engine.dispose()
    assert len({row.id for row in rows}) == len(rows), "an order was written twice"
    return {row.id: row.lines for row in rows}


def fence_rows(url: sa.URL | str) -> dict[str, str]:
    """The states of the attempts that the fence knows."""
    engine = sa.create_engine(url)
    query = sa.text("SELECT half_id, attempt, state FROM txmq_fence")
    with engine.connect() as connection:
        rows = connection.execute(query.columns(half_id=exact_text(700), attempt=sa.Integer, state=sa.String)).all()
    engine.dispose()
    return {f"{row.half_id}:{row.attempt}": row.state for row in rows}


def make_older(url: sa.URL | str, days: float, half_ids: str = "%") -> None:
    """Let the rows of these half batches, as LIKE says them, have changed so many days ago."""
    past = datetime.now(timezone.utc).replace(tzinfo=None) - timedelta(days=days)
    change = sa.text("UPDATE txmq_fence SET changed_at = :past WHERE half_id LIKE :half_ids")
    bound = change.bindparams(sa.bindparam("past", past, sa.DateTime), half_ids=half_ids)
    with sa.create_engine(url).begin() as connection:
        connection.execute(bound)


# ---------------------------------------------------------------- half batches
class Rows:
    """Some rows of a half batch of one half file, in an Arrow table."""

    def __init__(self, table: pa.Table, of: int) -> None:
        self.table = table
        places = set(table["row_no"].to_pylist())
        self.rows = RowSet({0: bytes(n in places for n in range(of))})
        self.is_all = table.num_rows == of

    def read(self, columns: Sequence[str]) -> pa.Table:
        return self.table.select(list(columns))

    def to_spark(self, spark: Any) -> Any:
        return spark.createDataFrame(self.table)


def half_batch(
    fence_id: str | None,
    keys: Sequence[str] = ("a", "b", "a", "c"),
    *,
    bodies: Sequence[bytes] | None = None,
    per: str = "batch",
    age: timedelta = YOUNG,
    half_id: str = "app-7",
    attempt: int = 1,
    log_id: str = "a-log",
    undecided: str | None = None,
    staged_ms: int = 1_800_000_000_000,
) -> HalfBatch:
    """Messages with these keys; ``undecided`` names the keys of which nothing is decided yet."""
    n = len(keys)
    table = pa.table(
        {
            "file_no": pa.array([0] * n, pa.int32()),
            "row_no": pa.array(range(n), pa.int64()),
            "transaction_key": pa.array(keys if per == "key" else [None] * n, pa.string()),
            "topic": pa.array(["orders"] * n),
            "queue_id": pa.array([0] * n, pa.int32()),
            "tags": pa.nulls(n, pa.string()),
            "keys": pa.array(list(keys)),
            "sharding_key": pa.nulls(n, pa.string()),
            "properties": pa.nulls(n, PROPERTIES),
            "body": bodies or [json.dumps({"id": k, "line": i}).encode() for i, k in enumerate(keys)],
            "born_timestamp": pa.nulls(n, TIMESTAMP),
            "store_timestamp": pa.nulls(n, TIMESTAMP),
        }
    )
    return HalfBatch(
        half_id=half_id,
        app_id="app",
        batch_id=7,
        attempt=attempt,
        producer_group="order-service",
        prepared_at=datetime.now(timezone.utc) - age,
        check_times=0,
        transaction_per=per,
        fence_id=fence_id,
        rows=Rows(table if undecided is None else table.filter(pc.is_in(table["keys"], pa.array(undecided))), n),
        log_id=log_id,
        staged_ms=staged_ms,
    )


# ---------------------------------------------------------------- local transactions
def insert_all(connection: sa.Connection, batch: HalfBatch) -> None:
    counted = batch.decode("id string, line long").group_by("id").aggregate([("line", "count")])
    rows = [{"id": row["id"], "lines": row["line_count"]} for row in counted.to_pylist()]
    connection.execute(orders.insert(), rows)


def insert_one(connection: sa.Connection, transaction: HalfTransaction) -> None:
    lines = transaction.decode("id string, line long")
    connection.execute(orders.insert(), {"id": lines["id"][0].as_py(), "lines": lines.num_rows})


def inserts_and(ends: Any, insert: Callable[..., None] = insert_all) -> Callable[..., Any]:
    """Work that inserts, and then returns this or raises it."""

    def work(connection: sa.Connection, asked: Any) -> Any:
        insert(connection, asked)
        if isinstance(ends, Exception):
            raise ends
        return ends

    return work


class Held:
    """Work that has inserted and is still running, until it may end: then it returns this, or raises it."""

    def __init__(self, ends: Any = None) -> None:
        self.ends, self.running, self.may_end = ends, threading.Event(), threading.Event()

    def __call__(self, connection: sa.Connection, batch: HalfBatch) -> Any:
        insert_all(connection, batch)
        self.running.set()
        assert self.may_end.wait(30)
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends


def listener(url: sa.URL | sa.Engine, work: Callable[..., Any] = insert_all, **settings: Any) -> SqlTransactionListener:
    return SqlTransactionListener(url, work, **settings)


def execute(
    url: sa.URL | sa.Engine, batch: HalfBatch, work: Callable[..., Any] = insert_all, **settings: Any
) -> list[str]:
    """The verdicts of a new listener's local transaction: one a transaction, or one when all have the same."""
    return verdicts(listener(url, work, **settings).execute_local_transaction(batch))


def check(url: sa.URL | sa.Engine, batch: HalfBatch, **settings: Any) -> list[str]:
    """The verdicts of a new listener that is asked what became of a half batch."""
    return verdicts(listener(url, **settings).check_local_transaction(batch))


def verdicts(result: Any) -> list[str]:
    """The verdict of each transaction; one when all have the same."""
    if not isinstance(result, VerdictArray):
        return [str(result)]
    found = [str(v.state) for v in result.each(1 if result.which is None else len(result.which))]
    return found[:1] if len(set(found)) == 1 else found
