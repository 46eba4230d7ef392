"""SqlTransactionListener behind PgBouncer in transaction mode: each transaction may have another session."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import HalfBatch
from tests.process.pgbouncer import NoPgBouncerError, running
from tests.unit import test_sql_listener as suite
from tests.unit.test_sql_listener import COMMIT, OLD, ROLLBACK, half_batch, listener, make_orders, run, stored, verdicts

pytestmark = pytest.mark.postgres

AGAIN = (
    "test_execute_commits_the_work_and_a_check_says_so",
    "test_a_check_of_an_old_half_batch_fences_a_late_execute",
    "test_a_refusal_and_its_reason_are_on_record",
    "test_a_rollback_of_the_whole_batch_undoes_the_work_and_is_recorded",
    "test_no_check_answers_for_work_that_ended_its_transaction",
    "test_two_executes_of_one_attempt_run_the_work_once",
    "test_a_check_waits_for_a_local_transaction_that_ends_in_time",
    "test_prune_deletes_rows_past_retention_only",
)
"""Tests of SQLite that run once more: each way through the fence."""

fence = suite.fence
globals().update({name: getattr(suite, name) for name in AGAIN})
assert all("url" in inspect.signature(getattr(suite, name)).parameters for name in AGAIN)


@pytest.fixture(scope="module")
def pooler(postgres: sa.URL) -> Iterator[sa.URL]:
    try:
        with running(postgres) as url:
            yield url
    except NoPgBouncerError as problem:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(problem))


@pytest.fixture
def url(pooler: sa.URL, postgres: sa.URL) -> sa.URL:
    """A database with the empty table ``orders`` and nothing else."""
    run(postgres, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    make_orders(postgres)
    return pooler


def test_a_session_is_given_on_as_it_was(url: sa.URL, fence: str) -> None:
    """A check sets a lock time-out, which must not be the next one's; and no statement stays prepared."""
    checked = listener(url, lock_timeout=3)
    for number in range(20):
        assert verdicts(checked.check_local_transaction(half_batch(fence, half_id=f"old-{number}", age=OLD))) == [
            ROLLBACK
        ]
        done = half_batch(fence, [str(number)], half_id=f"new-{number}")
        assert verdicts(checked.execute_local_transaction(done)) == [COMMIT]
    assert len(stored(url)) == 20
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        for _ in range(10):
            assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "0"
            assert connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements").scalar_one() == 0
            connection.rollback()


def test_rows_go_by_copy_as_well(url: sa.URL, fence: str) -> None:
    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        batch.insert(connection, "orders", batch.decode("id string, line int").rename_columns(["id", "lines"]))

    batch = half_batch(fence, ["a", "b", "c"], per="key")
    assert verdicts(txmq.SqlTransactionListener(url, work).execute_local_transaction(batch)) == [COMMIT]
    assert stored(url) == {"a": 0, "b": 1, "c": 2}
