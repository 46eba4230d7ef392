"""The order database, and the listener whose local transaction writes orders to it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from examples.grocer.baskets import ITEM, lines_of, with_zero_quantity
from examples.grocer.kill import Point, die_here
from examples.grocer.settings import Folder, Settings
from rmq_spark import HalfBatch, SqlTransactionListener
from rmq_spark.listeners import Verdicts

ROLLBACK_AFTER_S = 2.0
"""A local transaction takes a fraction of a second here, and with the default of 60 s the check would have to wait."""

BODY = pa.schema(
    [
        ("order_id", pa.int64()),
        ("household_id", pa.int64()),
        ("spent_cents", pa.int64()),
        ("items", pa.list_(ITEM)),
    ]
)
"""What the local transaction reads from the three messages. Each message has a part of it."""

METADATA = sa.MetaData()
# Orders have no unique key on purpose: an order that is written twice must be there twice, so that the proof finds it.
ORDERS = sa.Table(
    "orders",
    METADATA,
    sa.Column("order_id", sa.BigInteger, nullable=False),
    sa.Column("household_id", sa.BigInteger, nullable=False),
    sa.Column("total_cents", sa.BigInteger, nullable=False),
)
ORDER_LINES = sa.Table(
    "order_lines",
    METADATA,
    sa.Column("order_id", sa.BigInteger, nullable=False),
    sa.Column("product_id", sa.BigInteger, nullable=False),
    sa.Column("quantity", sa.BigInteger, nullable=False),
)
RUNS = sa.Table(
    "local_transactions",
    METADATA,
    sa.Column("half_id", sa.String(512), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("baskets", sa.Integer, nullable=False),
    sa.Column("refused", sa.Integer, nullable=False),
)
"""A row for each run of the local transaction that took effect, written in the same database transaction."""


def place_orders(connection: sa.Connection, batch: HalfBatch) -> Verdicts:
    """Write the orders of a half batch, and refuse baskets with a zero quantity. This is the local transaction."""
    orders, lines, refused = orders_of(batch)
    note_start(Settings().folder, batch, len(refused))
    batch.insert(connection, ORDERS.name, orders)
    batch.insert(connection, ORDER_LINES.name, lines)
    baskets = batch.transactions.num_rows
    run = {"half_id": batch.half_id, "attempt": batch.attempt, "baskets": baskets, "refused": len(refused)}
    connection.execute(RUNS.insert(), run)
    die_here(Point.WORKING, batch)
    return batch.verdicts(rollback=refused.to_pylist())


def orders_of(batch: HalfBatch) -> tuple[pa.Table, pa.Table, pa.Array]:
    """Return the accepted orders, their lines, and the ids of refused orders, from the messages of a half batch."""
    bodies = batch.decode(BODY)
    shipped = bodies.filter(pc.is_valid(bodies["items"]))
    refused = with_zero_quantity(shipped, "order_id")
    paid = bodies.filter(pc.is_valid(bodies["spent_cents"]))
    paid = paid.filter(pc.invert(pc.is_in(paid["order_id"], refused)))
    shipped = shipped.filter(pc.invert(pc.is_in(shipped["order_id"], refused)))
    orders = pa.table(
        {
            "order_id": paid["order_id"],
            "household_id": paid["household_id"],
            "total_cents": paid["spent_cents"],
        }
    )
    return orders, lines_of(shipped, "order_id"), refused


def note_start(folder: Folder, batch: HalfBatch, refused: int) -> None:
    """Write a line for a started run into the journal. It is no table, because the database may undo the run."""
    line = {"half_id": batch.half_id, "batch_id": batch.batch_id, "attempt": batch.attempt}
    with folder.journal.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({**line, "baskets": batch.transactions.num_rows, "refused": refused}) + "\n")


class OrderListener(SqlTransactionListener):
    """A :class:`SqlTransactionListener` that can be told to die right after the database's commit."""

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        verdicts = super().execute_local_transaction(batch)
        die_here(Point.COMMITTED, batch)
        return verdicts


@cache
def listener() -> OrderListener:
    """Return this process's listener. The option ``transactionListener=examples.grocer.orders:listener`` names it."""
    return OrderListener(Settings().folder.database_url, place_orders, rollback_after=ROLLBACK_AFTER_S)


def create_database(folder: Folder) -> str:
    """Make the tables and the fence, and return the fence's id."""
    engine = sa.create_engine(folder.database_url)
    METADATA.create_all(engine)
    engine.dispose()
    return OrderListener(folder.database_url, place_orders).create_fence()


def read_table(folder: Folder, query: str) -> pa.Table:
    """Return the rows of a query on the order database as an Arrow table."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(f"file:{folder.database}?mode=ro", uri=True)) as database:
        cursor = database.execute(query)
        names = [d[0] for d in cursor.description]
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    columns = [pa.array([row[i] for row in rows], pa.int64() if not rows else None) for i in range(len(names))]
    return pa.table(columns, names=names)
