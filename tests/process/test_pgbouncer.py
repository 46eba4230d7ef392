"""SqlTransactionListener behind PgBouncer in transaction mode: each transaction may have another session."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import HalfBatch
from rmq_spark.testing import InMemoryCommitLog
from tests.process.pgbouncer import NoPgBouncerError, running
from tests.support.half_batches import commit, prepare
from tests.support.inboxes import count_each, inbox_of, results
from tests.support.seeds import how_many
from tests.unit import test_sql_listener as suite
from tests.unit.test_sql_listener import (
    COMMIT,
    OLD,
    ROLLBACK,
    half_batch,
    insert_one,
    listener,
    make_orders,
    run,
    stored,
    verdicts,
)

pytestmark = pytest.mark.postgres

AGAIN = (
    "test_the_database_passes_the_conformance_suite_of_fences",
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


@contextmanager
def pooler_of(postgres: sa.URL) -> Iterator[sa.URL]:
    try:
        with running(postgres) as url:
            yield url
    except NoPgBouncerError as problem:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def pooler(postgres: sa.URL) -> Iterator[sa.URL]:
    with pooler_of(postgres) as url:
        yield url


@pytest.fixture
def url(pooler: sa.URL, postgres: sa.URL) -> sa.URL:
    """A database with the empty tables ``orders`` and ``results``, and nothing else."""
    run(postgres, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public", "CREATE TABLE results (body text)")
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


THREADS, SENDS = 8, how_many(100, in_all=400)


def test_threads_send_through_few_sessions(url: sa.URL, fence: str) -> None:
    log = InMemoryCommitLog()
    log.create_topic("orders")
    at_work = txmq.SqlTransactionListener(url, insert_one, per_transaction=True)
    with txmq.TransactionMQProducer(log, "shop", at_work, check_interval=None) as producer:

        def send(number: int) -> txmq.LocalTransactionState:
            body = f'{{"id": "{number}", "line": 1}}'
            message = txmq.Message("orders", body, keys=str(number))
            return producer.send_message_in_transaction(message).local_transaction_state

        with ThreadPoolExecutor(THREADS) as threads:
            states = list(threads.map(send, range(SENDS)))
    assert set(states) == {COMMIT}
    assert not log.pending()
    assert len(stored(url)) == SENDS == log.read("orders").num_rows


def test_threads_apply_inboxes_through_few_sessions(url: sa.URL) -> None:
    log = InMemoryCommitLog()
    log.create_topic("orders")
    inboxes = [inbox_of(url, group=f"group-{n}") for n in range(THREADS)]
    for number in range(how_many(3, in_all=10)):
        commit(log, prepare(log, number, 2))
        messages = log.read("orders")
        with ThreadPoolExecutor(THREADS) as threads:
            assert list(threads.map(lambda inbox, new=messages: inbox.apply(new), inboxes)) == [2] * THREADS
    assert len(results(url)) == THREADS * log.read("orders").num_rows


def _send(engine: sa.Engine, fence: str) -> Callable[[int], Any]:
    sender = txmq.SqlTransactionListener(engine, lambda *_: None)
    return lambda number: sender.execute_local_transaction(half_batch(fence, half_id=f"app-{number}"))


def _apply(engine: sa.Engine, _: str) -> Callable[[int], Any]:
    log = InMemoryCommitLog()
    log.create_topic("orders")
    inbox = inbox_of(engine, count_each, group=log.engine.id)

    def apply(number: int) -> None:
        commit(log, prepare(log, number, 2))
        inbox.apply(log.read("orders"))

    return apply


@pytest.mark.parametrize("door", [_send, _apply], ids=["listener", "inbox"])
def test_an_engine_that_keeps_statements_is_told_what_to_set(
    postgres: sa.URL, url: sa.URL, fence: str, door: Callable[..., Callable[[int], Any]]
) -> None:
    with pooler_of(postgres) as pooler:  # of its own, for statements stay prepared in its sessions
        engine = sa.create_engine(pooler, connect_args={"prepare_threshold": 0})
        use = door(engine, fence)
        use(0)
        other = sa.create_engine(pooler, poolclass=sa.NullPool, connect_args={"prepare_threshold": None})
        with other.connect() as connection:
            connection.exec_driver_sql("SELECT 1")  # it has the session that was free last, until its transaction ends
            words = r'PgBouncer .* connect_args=\{"prepare_threshold": None\}.*prepared statement'
            with pytest.raises(sa.exc.DBAPIError, match=rf"(?s){words}"):
                use(1)
        engine.dispose()
        told = door(sa.create_engine(pooler, connect_args={"prepare_threshold": None}), fence)
        for number in range(2, 10):
            told(number)
