"""SqlTransactionListener on PostgreSQL: every test that SQLite passes, and what only PostgreSQL can do."""

from __future__ import annotations

import inspect

import pytest
import sqlalchemy as sa

from rmq_spark import HalfBatch
from rmq_spark.errors import FenceError, ListenerError
from tests.unit import test_sql_listener as suite
from tests.unit.test_sql_listener import (
    COMMIT,
    OLD,
    ROLLBACK,
    fence_rows,
    half_batch,
    insert_all,
    listener,
    make_orders,
    run,
    stored,
    verdicts,
)

pytestmark = pytest.mark.postgres

# pytest collects these as tests of this module, so they get its ``url``.
fence = suite.fence
globals().update(
    {n: f for n, f in vars(suite).items() if n.startswith("test_") and "url" in inspect.signature(f).parameters}
)


@pytest.fixture
def url(postgres: sa.URL) -> sa.URL:
    """A database with the empty table ``orders`` and nothing else."""
    run(postgres, "DROP SCHEMA IF EXISTS fences CASCADE", "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    return make_orders(postgres)


def test_a_fence_may_live_in_a_schema_of_its_own(url: sa.URL) -> None:
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA fences")
    orders_listener = listener(url, schema="fences")
    with pytest.raises(FenceError, match=r"'fences\.txmq_fence_id'"):
        _ = orders_listener.store_id
    batch = half_batch(orders_listener.create_fence(), age=OLD)
    assert verdicts(orders_listener.check_local_transaction(batch)) == [ROLLBACK]


def test_an_engine_in_autocommit_is_refused(url: sa.URL, fence: str) -> None:
    with pytest.raises(ListenerError, match="AUTOCOMMIT"):
        listener(sa.create_engine(url, isolation_level="AUTOCOMMIT")).execute_local_transaction(half_batch(fence))
    assert stored(url) == {}


@pytest.mark.parametrize("when", ["in work", "between batches"])
def test_a_lost_connection_leaves_the_batch_pending_and_is_replaced(url: sa.URL, fence: str, when: str) -> None:
    pids: list[int] = []

    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        insert_all(connection, batch)
        pids.append(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
        if when == "in work" and len(pids) == 1:
            run(url, f"SELECT pg_terminate_backend({pids[0]})")

    orders_listener = listener(url, work)
    if when == "in work":
        with pytest.raises(sa.exc.OperationalError):
            orders_listener.execute_local_transaction(half_batch(fence))
        assert stored(url) == fence_rows(url) == {}
    else:
        orders_listener.execute_local_transaction(half_batch(fence, ["z"]))
        run(url, f"SELECT pg_terminate_backend({pids[0]})")
    assert verdicts(orders_listener.execute_local_transaction(half_batch(fence, half_id="app-8"))) == [COMMIT]
    assert len(set(pids)) == 2


def test_a_fence_in_a_copy_of_its_database_does_not_answer(url: sa.URL, fence: str) -> None:
    # A template must have no other sessions; the server's own pool is not in use here.
    run(url.set(database="template1"), "DROP DATABASE IF EXISTS staging")
    closing = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{url.database}'"
    run(url.set(database="template1"), closing, f"CREATE DATABASE staging TEMPLATE {url.database}")
    with pytest.raises(FenceError, match="made in another place"):
        listener(url.set(database="staging")).check_local_transaction(half_batch(fence, age=OLD))
    assert listener(url).store_id == fence
