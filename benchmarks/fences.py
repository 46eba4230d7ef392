"""Transactions of a PostgreSQL database: alone, and with a fence and a message each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rmq_spark import SqlTransactionListener
from tests.process.postgres import running

CONNECTIONS = 64
ORDERS = sa.Table(
    "bench_orders",
    sa.MetaData(),
    sa.Column("order_id", sa.BigInteger, primary_key=True),
    sa.Column("item", sa.Text, nullable=False),
)


class Orders:
    """A table of orders in a database. Each transaction inserts one."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._ids = count(1)
        ORDERS.create(engine)

    def _insert(self, connection: sa.Connection, _: Any = None) -> None:
        connection.execute(sa.insert(ORDERS), {"order_id": next(self._ids), "item": "tea"})

    def alone(self) -> Callable[[], object]:
        """A transaction that inserts an order."""

        def transact() -> None:
            with self._engine.begin() as connection:
                self._insert(connection)

        return transact

    def listener(self) -> SqlTransactionListener:
        """Inserts an order and the fence's row in one transaction."""
        listener = SqlTransactionListener(self._engine, self._insert)
        listener.create_fence()
        return listener


@contextmanager
def durable(folder: Path) -> Iterator[sa.URL]:
    """A PostgreSQL server of its own that waits for its disk, as one that people use does. Its files lie in an empty
    folder."""
    with running(folder) as url:
        settings = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with settings.connect() as connection:
            # The tests' server does not wait.
            for statement in ("ALTER SYSTEM RESET fsync", "SELECT pg_reload_conf()"):
                connection.exec_driver_sql(statement)
        yield url


@contextmanager
def orders(folder: Path) -> Iterator[Orders]:
    """Orders in such a server."""
    with durable(folder) as url, pooled(url) as engine:
        yield Orders(engine)


@contextmanager
def pooled(url: sa.URL) -> Iterator[sa.Engine]:
    """An engine with a connection for each thread."""
    engine = sa.create_engine(url, pool_size=CONNECTIONS, max_overflow=0)
    try:
        yield engine
    finally:
        engine.dispose()
