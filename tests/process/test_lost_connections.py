"""A database that is lost at the wrong moment, behind a proxy: the send stays pending, and the check says what became
of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import HalfBatch
from rmq_spark.testing import InMemoryCommitLog
from tests.process.cutting_proxy import NEVER_ANSWERED, NEVER_ARRIVES, CuttingProxy, running
from tests.process.postgres import crash
from tests.process.postgres import running as postgres_running
from tests.support.fences import insert_all, make_orders, run, stored

BODY = '{"id": "a", "line": 1}'


@pytest.fixture(
    params=[pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("mariadb", marks=pytest.mark.mariadb)]
)
def server(request: pytest.FixtureRequest) -> sa.URL:
    """A server's database with the empty table ``orders``."""
    url: sa.URL = request.getfixturevalue(request.param)
    if request.param == "postgres":
        run(url, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    else:
        run(url, "DROP DATABASE shop", "CREATE DATABASE shop CHARACTER SET utf8mb4")
    return make_orders(url)


@pytest.fixture
def behind(server: sa.URL) -> Iterator[tuple[CuttingProxy, sa.URL]]:
    with running(server) as proxied:
        yield proxied


class Shop:
    """A log, and a listener on a database."""

    def __init__(self, url: sa.URL) -> None:
        self.log = InMemoryCommitLog(topics={"orders": 1})
        txmq.create_fence(url)
        self.meanwhile = lambda: None
        self.listener = txmq.SqlTransactionListener(url, self._work, rollback_after=0)

    def _work(self, connection: sa.Connection, batch: HalfBatch) -> None:
        insert_all(connection, batch)
        self.meanwhile()

    def send(self) -> txmq.LocalTransactionState:
        with txmq.TransactionMQProducer(self.log, "shop", self.listener, check_interval=None) as producer:
            return producer.send_message_in_transaction(txmq.Message("orders", BODY)).local_transaction_state

    def check(self) -> None:
        txmq.CheckService(self.log, {"shop": self.listener}, transaction_timeout=0).run_once()

    def visible(self) -> int:
        assert not self.log.pending()
        return self.log.read("orders").num_rows


@pytest.mark.parametrize(("fate", "count"), [(NEVER_ARRIVES, 0), (NEVER_ANSWERED, 1)])
def test_a_connection_that_ends_at_the_commit_leaves_the_answer_to_the_check(
    server: sa.URL, behind: tuple[CuttingProxy, sa.URL], fate: str, count: int
) -> None:
    proxy, url = behind
    shop = Shop(url)
    shop.meanwhile = lambda: setattr(proxy, "at_commit", fate)
    assert shop.send() == txmq.UNKNOWN
    assert len(shop.log.pending()) == 1
    shop.check()
    assert shop.visible() == len(stored(server)) == count


def test_connections_that_a_proxy_closed_are_replaced(server: sa.URL, behind: tuple[CuttingProxy, sa.URL]) -> None:
    """At once, when nobody tests the pool's connection, since that was used a moment ago."""
    proxy, url = behind
    inserted: list[int] = []
    listener = txmq.SqlTransactionListener(url, lambda *_: inserted.append(1))
    log = InMemoryCommitLog(topics={"orders": 1})
    listener.create_fence()
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        for _ in range(3):
            producer.send_message_in_transaction(txmq.Message("orders", BODY))
            proxy.cut()
    assert len(inserted) == log.read("orders").num_rows == 3


@pytest.mark.postgres
def test_a_failover_between_work_and_commit_leaves_the_answer_to_the_check() -> None:
    with TemporaryDirectory(prefix="txmq-pg-") as folder, postgres_running(Path(folder)) as url:
        shop = Shop(make_orders(url))
        shop.meanwhile = lambda: crash(Path(folder))
        assert shop.send() == txmq.UNKNOWN
        assert len(shop.log.pending()) == 1
        shop.meanwhile = lambda: None
        shop.check()
        assert shop.visible() == len(stored(url)) == 0
        assert shop.send() == txmq.COMMIT_MESSAGE
        assert shop.visible() == len(stored(url)) == 1
