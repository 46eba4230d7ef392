"""SqlTransactionListener on PostgreSQL: every test that SQLite passes, and what only PostgreSQL can do."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rmq_spark.errors import FenceError, ListenerError
from rmq_spark.transaction import HalfBatch
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


# ---------------------------------------------------------------- trips to the server
def traced(url: sa.URL, path: Path, **settings: Any) -> sa.Engine:
    """An engine whose connections write down what they send."""
    engine = sa.create_engine(url, **settings)

    @sa.event.listens_for(engine, "connect")
    def trace(driver: Any, record: Any) -> None:
        file = record.info["trace"] = path.open("a")  # it stays open for as long as the connection
        driver.pgconn.trace(file.fileno())

    return engine


def test_a_local_transaction_takes_two_trips_more_than_its_work(url: sa.URL, fence: str, tmp_path: Path) -> None:
    engine = traced(url, tmp_path / "trace")
    orders_listener = listener(engine, lambda connection, batch: connection.exec_driver_sql("SELECT 1") and None)
    orders_listener.execute_local_transaction(half_batch(fence, half_id="app-1"))
    before = (tmp_path / "trace").read_text()
    assert verdicts(orders_listener.execute_local_transaction(half_batch(fence, half_id="app-2"))) == [COMMIT]
    engine.dispose()
    sent = (tmp_path / "trace").read_text()[len(before) :]
    assert [line.split("\t")[3].split()[0] for line in sent.splitlines() if "\tF\t" in line] == [
        "Query", "Query", "Query", "Terminate",
    ]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"isolation_level": "REPEATABLE READ"}, {"isolation_level": "SERIALIZABLE"}])
def test_a_local_transaction_begins_as_the_engine_says(url: sa.URL, fence: str, settings: dict[str, Any]) -> None:
    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        found.append(connection.exec_driver_sql("SHOW transaction_isolation").scalar_one())

    found: list[str] = []
    for number in range(2):
        engine = sa.create_engine(url, **settings)
        listener(engine, work).execute_local_transaction(half_batch(fence, half_id=f"app-{number}"))
    assert found == [settings.get("isolation_level", "READ COMMITTED").lower()] * 2


@pytest.mark.parametrize("option", ["", "-c standard_conforming_strings=off", "-c client_encoding=latin1"])
def test_names_of_any_text_are_kept(url: sa.URL, fence: str, option: str) -> None:
    orders_listener = listener(sa.create_engine(url, connect_args={"options": option}), insert_all)
    half_id = "it's; \\' DROP TABLE orders; -- %s %(a)s é"
    assert verdicts(orders_listener.execute_local_transaction(half_batch(fence, half_id=half_id))) == [COMMIT]
    assert verdicts(listener(url).check_local_transaction(half_batch(fence, half_id=half_id, age=OLD))) == [COMMIT]


def test_what_a_commit_refuses_leaves_the_batch_pending(url: sa.URL, fence: str) -> None:
    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        connection.exec_driver_sql("INSERT INTO lines VALUES (7)")

    run(
        url,
        "CREATE TABLE numbers (no int PRIMARY KEY)",
        "CREATE TABLE lines (no int REFERENCES numbers DEFERRABLE INITIALLY DEFERRED)",
    )
    orders_listener = listener(url, work)
    with pytest.raises(sa.exc.IntegrityError, match="lines_no_fkey"):
        orders_listener.execute_local_transaction(half_batch(fence))
    assert fence_rows(url) == {}
    run(url, "INSERT INTO numbers VALUES (7)")
    assert verdicts(orders_listener.execute_local_transaction(half_batch(fence))) == [COMMIT]


def test_a_fence_goes_where_the_engine_puts_tables(url: sa.URL) -> None:
    run(url, "CREATE SCHEMA fences")
    engine = sa.create_engine(url).execution_options(schema_translate_map={None: "fences"})
    orders_listener = listener(engine, lambda connection, batch: None)
    batch = half_batch(orders_listener.create_fence())
    assert verdicts(orders_listener.execute_local_transaction(batch)) == [COMMIT]
    with sa.create_engine(url).connect() as connection:
        assert connection.exec_driver_sql("SELECT state FROM fences.txmq_fence").scalars().all() == ["executed"]
