"""SqlTransactionListener on a real database: SQLite here.

Tests that have a ``url`` run once more on PostgreSQL, in ``tests/process/test_sql_listener.py``.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import settings
from sqlalchemy.orm import Session

import rmq_spark as txmq
from rmq_spark import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    CheckService,
    CommitLog,
    HalfBatch,
    Rollback,
    SqlTransactionListener,
    create_fence,
)
from rmq_spark._core.listeners.sql import LOCK_TIMEOUT_S_MAX
from rmq_spark.listeners import HalfTransaction
from rmq_spark.testing import InMemoryCommitLog, check_fence
from tests.support.clocks import Ahead
from tests.support.fences import (
    OLD,
    Held,
    check,
    execute,
    fence_rows,
    half_batch,
    insert_all,
    insert_one,
    inserts_and,
    listener,
    make_older,
    make_orders,
    orders,
    run,
    stored,
    verdicts,
)
from tests.support.half_batches import commit, decide_one, let_leave, pending, prepare, roll_back, stage
from tests.support.inside import (
    EXECUTED,
    ROLLED_BACK,
    Database,
    HalfHeader,
    HalfRecord,
    Naming,
    Recorded,
    State,
    TwoPhase,
    Who,
)
from tests.support.limits import Limit
from tests.support.seeds import how_many

COMMIT, ROLLBACK = COMMIT_MESSAGE, ROLLBACK_MESSAGE


@pytest.fixture
def url(tmp_path: Path) -> sa.URL:
    """A database with the empty table ``orders`` and nothing else."""
    return make_orders(sa.make_url(f"sqlite:///{tmp_path / 'orders.db'}"))


@pytest.fixture
def fence(url: sa.URL) -> str:
    return create_fence(url)


def test_the_database_passes_the_conformance_suite_of_fences(url: sa.URL) -> None:
    check_fence(url)


def nothing(connection: sa.Connection, batch: HalfBatch) -> None:
    """A local transaction that leaves the fence's row behind, and nothing else."""


# ---------------------------------------------------------------- execute and check agree
@pytest.mark.parametrize("per", ["batch", "key", "message"])
def test_execute_commits_the_work_and_a_check_says_so(url: sa.URL, fence: str, per: str) -> None:
    batch = half_batch(fence, per=per)
    assert execute(url, batch) == [COMMIT]
    assert stored(url) == {"a": 2, "b": 1, "c": 1}
    assert check(url, half_batch(fence, per=per, age=OLD)) == [COMMIT]


@pytest.mark.parametrize(("per", "count"), [("batch", 1), ("key", 3), ("message", 4)])
def test_a_check_of_an_old_half_batch_fences_a_late_execute(url: sa.URL, fence: str, per: str, count: int) -> None:
    batch = half_batch(fence, per=per, age=OLD)
    assert check(url, batch) == [ROLLBACK]
    with pytest.raises(txmq.FencedError, match=f"has rolled back {count} of its {count} transactions"):
        execute(url, batch)
    assert stored(url) == {}
    assert check(url, batch) == [ROLLBACK]
    assert execute(url, half_batch(fence, per=per, attempt=2)) == [COMMIT], "the next attempt is not fenced"
    assert stored(url) == {"a": 2, "b": 1, "c": 1}


def test_one_fenced_key_keeps_the_whole_attempt_from_running(url: sa.URL, fence: str) -> None:
    check(url, half_batch(fence, per="key", age=OLD, undecided="b"))
    assert fence_rows(url) == {"app-7:1": "tombstone"}
    every = half_batch(fence, per="key")
    with pytest.raises(txmq.FencedError, match=r"1 of its 3 transactions \(the first is 'app-7:1:b'\)"):
        execute(url, every, insert_one, per_transaction=True)
    assert stored(url) == {}
    assert check(url, every) == [ROLLBACK], "the error speaks for all three, so all three are fenced"


def test_a_fenced_key_beside_one_that_ran_before_is_left_to_a_check(url: sa.URL, fence: str) -> None:
    keys = ["a", "b", "c"]
    execute(url, half_batch(fence, keys, per="key", undecided="a"))
    check(url, half_batch(fence, keys, per="key", age=OLD, undecided="b"))
    every = half_batch(fence, keys, per="key")
    with pytest.raises(txmq.LocalTransactionError, match=r"1 of the 3 .* by a check, and 1 ran before"):
        execute(url, every, insert_one, per_transaction=True)
    assert stored(url) == {"a": 1}
    assert check(url, every) == [COMMIT, ROLLBACK, UNKNOWN]


def test_a_young_half_batch_without_a_fence_row_is_unknown_and_not_fenced(url: sa.URL, fence: str) -> None:
    batch = half_batch(fence, per="key", age=timedelta(seconds=50))
    assert check(url, batch) == [UNKNOWN]
    assert batch.reason == "the database has no fence row of it yet, and rollback_after (60 s) is not over"
    assert fence_rows(url) == {}
    assert check(url, batch, rollback_after=40) == [ROLLBACK]


def test_a_query_that_starts_again_does_not_wait_for_its_own_half_batch(url: sa.URL, fence: str) -> None:
    batch = half_batch(fence, per="key", age=timedelta(seconds=1))
    batch.restarted = True
    assert check(url, batch) == [ROLLBACK]
    with pytest.raises(txmq.FencedError):  # the earlier driver was not dead
        execute(url, half_batch(fence, per="key"))
    assert stored(url) == {}


def test_check_answers_each_transaction_for_itself(url: sa.URL, fence: str) -> None:
    keys = ["a", "b", "c"]
    some = half_batch(fence, keys, per="key", undecided="ab")
    execute(url, some, lambda _, batch: batch.verdicts(rollback=["b"]))
    assert check(url, half_batch(fence, keys, per="key")) == [COMMIT, ROLLBACK, UNKNOWN]
    assert check(url, half_batch(fence, keys, per="key", age=OLD)) == [COMMIT, ROLLBACK, ROLLBACK]


@pytest.mark.parametrize("per_transaction", [False, True])
def test_a_refusal_and_its_reason_are_on_record(url: sa.URL, fence: str, per_transaction: bool) -> None:
    why = {"b": "na\u00efve \U0001f643 reason", "c": "x" * 300}

    def work(_: Any, asked: Any) -> Any:
        if not per_transaction:
            return asked.verdicts(rollback=why)
        if (key := asked.transaction_key) in why:
            raise Rollback(why[key])
        return None

    refusing = listener(url, work, per_transaction=per_transaction)
    some = half_batch(fence, ["a", "b", "c", "d"], per="key", undecided="abc")
    executed = refusing.execute_local_transaction(some)
    later = refusing.check_local_transaction(half_batch(fence, ["a", "b", "c", "d"], per="key", age=OLD))
    assert [v.reason for v in executed.each(3)] == [None, why["b"], "x" * 199 + "\u2026"]
    said = [(str(v.state), v.reason, v.refused) for v in later.each(4)]
    assert said[:3] == [(COMMIT, None, False), (ROLLBACK, why["b"], True), (ROLLBACK, "x" * 199 + "\u2026", True)]
    assert (said[3][0], said[3][2]) == (ROLLBACK, False)


def test_thousands_of_keys_are_executed_and_checked(url: sa.URL, fence: str) -> None:
    keys = [f"k{i}" for i in range(5_000)]
    refused = set(keys[::7])
    batch = half_batch(fence, keys, per="key")
    expected = [ROLLBACK if k in refused else COMMIT for k in batch.transactions["transaction_key"].to_pylist()]
    assert execute(url, batch, lambda _, batch: batch.verdicts(rollback=refused)) == expected
    assert check(url, batch) == expected
    assert check(url, half_batch(fence, keys, per="key", age=OLD, attempt=2)) == [ROLLBACK]


def test_strange_keys_are_fenced_like_any_other(url: sa.URL, fence: str) -> None:
    words = ["Ä", "ä", "a", "A", "a ", " a", "é", "e\u0301", "ß", "ss", "😀", "x" * 255]
    signs = ["", " ", "a:b", "'; DROP TABLE orders --", "%s", ":x"]
    batch = half_batch(fence, [*words, *signs], per="key")
    assert execute(url, batch, nothing) == [COMMIT]
    assert check(url, batch) == [COMMIT]


# ---------------------------------------------------------------- what work says
@pytest.mark.parametrize("per", ["batch", "key", "message"])
@pytest.mark.parametrize("way", [ROLLBACK, Rollback("no stock")], ids=["returned", "raised"])
def test_a_rollback_of_the_whole_batch_undoes_the_work_and_is_recorded(
    url: sa.URL, fence: str, per: str, way: Any
) -> None:
    batch = half_batch(fence, per=per)
    assert execute(url, batch, inserts_and(way)) == [ROLLBACK]
    assert stored(url) == {}
    assert set(fence_rows(url).values()) == {"rolled_back"}
    assert check(url, batch) == [ROLLBACK]
    assert execute(url, batch) == [ROLLBACK], "a rollback of execute is final"
    assert stored(url) == {}


@pytest.mark.parametrize("way", [ROLLBACK, Rollback()], ids=["returned", "raised"])
def test_a_savepoint_a_key_rolls_back_that_key_alone(url: sa.URL, fence: str, way: Any) -> None:
    def refuse_b(connection: sa.Connection, transaction: HalfTransaction) -> Any:
        return inserts_and(way if transaction.transaction_key == "b" else None, insert_one)(connection, transaction)

    batch = half_batch(fence, per="key")
    assert execute(url, batch, refuse_b, per_transaction=True) == [COMMIT, ROLLBACK, COMMIT]
    assert stored(url) == {"a": 2, "c": 1}
    assert check(url, batch) == [COMMIT, ROLLBACK, COMMIT]


@pytest.mark.parametrize(("per", "calls"), [("batch", ["abac"]), ("key", ["aa", "b", "c"]), ("message", list("abac"))])
def test_work_per_transaction_gets_its_messages_in_order(url: sa.URL, fence: str, per: str, calls: list[str]) -> None:
    seen: list[tuple[str, str | None, str, list[int]]] = []

    def look(_: sa.Connection, transaction: HalfTransaction) -> None:
        lines = transaction.decode("id string, line long")
        ids = set(transaction.messages(["transaction_id"])["transaction_id"].to_pylist())
        assert ids == {transaction.transaction_id}
        assert lines["line"].to_pylist() == sorted(lines["line"].to_pylist())
        seen.append((transaction.transaction_id, transaction.transaction_key, "".join(lines["id"].to_pylist()), []))

    batch = half_batch(fence, per=per)
    execute(url, batch, look, per_transaction=True)
    assert [s[2] for s in seen] == calls
    assert [s[0] for s in seen] == batch.transactions["transaction_id"].to_pylist()
    assert [s[1] for s in seen] == batch.transactions["transaction_key"].to_pylist()


def test_a_body_that_is_no_json_fails_for_its_own_transaction(url: sa.URL, fence: str) -> None:
    def refuse_bad(connection: sa.Connection, transaction: HalfTransaction) -> None:
        try:
            transaction.decode("id string, line int")
        except txmq.MessageError as problem:
            raise Rollback("bad body") from problem
        insert_one(connection, transaction)

    bodies = [b'{"id": "a"}', b"no json", b'{"id": "a"}', b'{"id": "c"}']
    batch = half_batch(fence, bodies=bodies, per="key")
    assert execute(url, batch, refuse_bad, per_transaction=True) == [COMMIT, ROLLBACK, COMMIT]
    assert stored(url) == {"a": 2, "c": 1}


@pytest.mark.parametrize("per_transaction", [False, True])
@pytest.mark.parametrize("way", ["a bug", "a statement"])
def test_what_fails_in_work_leaves_nothing_of_any_key(url: sa.URL, fence: str, way: str, per_transaction: bool) -> None:
    def fail(connection: sa.Connection, asked: Any) -> None:
        (insert_one if per_transaction else insert_all)(connection, asked)
        if per_transaction and asked.transaction_key != "c":
            return
        if way == "a bug":
            raise ZeroDivisionError("a bug")
        connection.exec_driver_sql("INSERT INTO no_such_table VALUES (1)")

    batch = half_batch(fence, per="key")
    with pytest.raises(ZeroDivisionError if way == "a bug" else sa.exc.DBAPIError):
        execute(url, batch, fail, per_transaction=per_transaction)
    assert stored(url) == fence_rows(url) == {}
    assert execute(url, batch) == [COMMIT]


def test_replay_of_an_executed_attempt_does_not_run_work_twice(url: sa.URL, fence: str) -> None:
    calls = []

    def work(connection: sa.Connection, batch: HalfBatch) -> Any:
        calls.append(batch)
        return batch.verdicts(rollback=["b"])

    batch = half_batch(fence, per="key")
    first = execute(url, batch, work)
    assert execute(url, batch, work) == first == [COMMIT, ROLLBACK, COMMIT]
    assert len(calls) == 1


def test_work_for_some_transactions_that_ran_before(url: sa.URL, fence: str) -> None:
    both = half_batch(fence, ["a", "b"], per="key")
    execute(url, half_batch(fence, ["a", "b"], per="key", undecided="a"))
    with pytest.raises(txmq.LocalTransactionError, match=r"1 of the 2 transactions .* ran before"):
        execute(url, both)
    assert stored(url) == {"a": 1}
    assert execute(url, both, insert_one, per_transaction=True) == [COMMIT]
    assert stored(url) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("result", "per", "message"),
    [
        (UNKNOWN, "batch", "UNKNOWN for 1 of 1"),
        ("UNKNOW", "batch", "UNKNOWN for 1 of 1"),
        ("MAYBE", "batch", "'MAYBE' is not a verdict"),
        ([COMMIT, COMMIT], "batch", "2 verdicts for 1 transaction:"),
        (7, "batch", "returned int"),
        (UNKNOWN, "key", "for transaction 'app-7:1:a'"),
        ([COMMIT], "key", "for transaction 'app-7:1:a'"),
        (7, "key", "for transaction 'app-7:1:a'"),
    ],
)
def test_what_work_may_not_return_leaves_the_batch_pending(
    url: sa.URL, fence: str, result: Any, per: str, message: str
) -> None:
    work = inserts_and(result, insert_one if per == "key" else insert_all)
    with pytest.raises(txmq.VerdictError, match=message):
        execute(url, half_batch(fence, per=per), work, per_transaction=per == "key")
    assert stored(url) == fence_rows(url) == {}


@pytest.mark.parametrize("per_transaction", [False, True])
@pytest.mark.parametrize("what", ["commit", "rollback"])
def test_work_that_ends_the_transaction_is_refused(url: sa.URL, fence: str, what: str, per_transaction: bool) -> None:
    def work(connection: sa.Connection, _: Any) -> None:
        connection.execute(orders.insert(), {"id": "x", "lines": 1})
        getattr(connection, what)()

    with pytest.raises(txmq.ListenerError, match="work must not commit or roll back"):
        execute(url, half_batch(fence), work, per_transaction=per_transaction)
    # Its connection went back to the pool without a transaction, or a lock, left open.
    assert check(url, half_batch(fence, half_id="other", age=OLD), lock_timeout=1) == [ROLLBACK]
    run(url, "DELETE FROM txmq_fence")
    assert stored(url) == fence_rows(url) == {}
    assert execute(url, half_batch(fence)) == [COMMIT]


def test_work_that_hides_the_fence_row_commits_nothing(url: sa.URL, fence: str) -> None:
    """The row stayed "started" while work's rows were committed, and a person had to say what had happened."""

    def work(connection: sa.Connection, _: Any) -> None:
        connection.execute(orders.insert(), {"id": 1, "lines": 1})
        connection.execute(sa.text("CREATE TEMPORARY TABLE txmq_fence AS SELECT * FROM txmq_fence WHERE 1 = 0"))

    with pytest.raises(txmq.FenceError, match="work changed the connection's search_path, role or tables"):
        execute(url, half_batch(fence), work)
    assert stored(url) == fence_rows(url) == {}
    assert execute(url, half_batch(fence)) == [COMMIT]


def test_a_transaction_of_another_log_is_not_taken_for_one_that_ran(url: sa.URL, fence: str) -> None:
    """Two logs with one fence, and a batch write of both: the second one's message became visible, and its work never
    ran."""
    first, second = InMemoryCommitLog(topics={"orders": 1}), InMemoryCommitLog(topics={"orders": 1})

    def send(log: CommitLog, body: bytes) -> None:
        header = HalfHeader("app:0", "app", 0, None, None, fence, "batch", "shop", naming=Naming.GIVEN)
        TwoPhase(log.engine, listener(url, nothing)).send(header, lambda: stage(log, header, {"body": [body]}))

    send(first, b"a")
    with pytest.raises(txmq.LocalTransactionError, match=r"another commit log.*keys of their own"):
        send(second, b"b")
    assert second.read("orders").num_rows == 0
    report = CheckService(second, {"shop": listener(url, nothing, rollback_after=0)}, transaction_timeout=0).run_once()
    assert "for another commit log" in report.problems[0][1]
    assert second.read("orders").num_rows == 0
    send(first, b"a")
    assert first.read("orders").num_rows == 1


def test_a_key_that_two_logs_use_is_a_transaction_in_each(url: sa.URL, fence: str) -> None:
    logs = [InMemoryCommitLog(topics={"orders": 1}) for _ in range(2)]
    written: list[str] = []
    noted = listener(url, lambda connection, batch: written.append(batch.half_id))
    for log in logs:
        with txmq.TransactionMQProducer(log, "shop", noted, check_interval=None) as producer:
            producer.send_message_in_transaction(txmq.Message("orders", b"a"), idempotency_key="order-42")
    assert [log.read("orders").num_rows for log in logs] == [1, 1]
    assert len(written) == len(set(written)) == 2


def test_work_may_use_savepoints_of_its_own(url: sa.URL, fence: str) -> None:
    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        insert_all(connection, batch)
        savepoint = connection.begin_nested()
        connection.execute(orders.insert(), {"id": "x", "lines": 1})
        savepoint.rollback()

    execute(url, half_batch(fence), work)
    assert stored(url) == {"a": 2, "b": 1, "c": 1}


@pytest.mark.parametrize("per_transaction", [False, True])
@pytest.mark.parametrize("way", ["its innermost savepoint", "a session in full control"])
def test_work_that_commits_what_it_can_reach_and_rolls_back_leaves_nothing(
    url: sa.URL, fence: str, way: str, per_transaction: bool
) -> None:
    """The savepoint under work was SQLAlchemy's: work could release it, and the rollback then undid nothing."""

    def work(connection: sa.Connection, _: object) -> None:
        connection.execute(orders.insert(), {"id": "x", "lines": 1})
        if way == "its innermost savepoint":
            reachable = connection.get_nested_transaction()
            if reachable is not None:
                reachable.commit()
        else:
            Session(bind=connection, join_transaction_mode="control_fully").commit()
        raise Rollback

    with contextlib.suppress(txmq.ListenerError):
        execute(url, half_batch(fence), work, per_transaction=per_transaction)
    assert stored(url) == {}


def end(connection: sa.Connection, way: str) -> None:
    """End the database transaction behind SQLAlchemy's back, with an order written before."""
    connection.execute(orders.insert(), {"id": "before", "lines": 1})
    driver: Any = connection.connection.driver_connection
    if way == "COMMIT; BEGIN":
        for statement in ("COMMIT", "BEGIN"):
            driver.cursor().execute(statement)
    elif way == "a script":
        driver.executescript("INSERT INTO orders VALUES ('x', 1);")
    elif way == "ON CONFLICT ROLLBACK":
        driver.execute("CREATE TABLE once (id INTEGER PRIMARY KEY ON CONFLICT ROLLBACK)")
        with contextlib.suppress(sqlite3.IntegrityError):
            driver.execute("INSERT INTO once VALUES (1), (1)")
    elif way.startswith("the driver's "):
        getattr(driver, way.removeprefix("the driver's "))()
    else:
        driver.cursor().execute(way)


ENDINGS = ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "the driver's commit", "the driver's rollback"]
ENDINGS_OF = {
    "sqlite": ["a script", "ON CONFLICT ROLLBACK"],
    "mariadb": ["CREATE TABLE other (id INTEGER)", "START TRANSACTION", "LOCK TABLES orders WRITE"],
}


def endings_of(url: sa.URL) -> list[str]:
    return ENDINGS + ENDINGS_OF.get(url.get_backend_name(), [])


@pytest.mark.turns(3)
@pytest.mark.parametrize("then", ["returns", "returns ROLLBACK", "writes on"])
def test_no_check_answers_for_work_that_ended_its_transaction(url: sa.URL, fence: str, then: str) -> None:
    for number, way in enumerate(endings_of(url)):

        def work(connection: sa.Connection, _: HalfBatch, way: str = way) -> Any:
            end(connection, way)
            if then == "writes on":
                connection.execute(orders.insert(), {"id": "after", "lines": 1})
            return ROLLBACK if then == "returns ROLLBACK" else None

        batch = half_batch(fence, half_id=f"app-{number}", age=OLD)
        with pytest.raises(txmq.TransactionEndedError, match="work ended the database transaction"):
            execute(url, batch, work)
        assert "after" not in stored(url), way
        for ask in (check, execute):
            with pytest.raises(txmq.FenceError, match="in its middle"):
                ask(url, batch)
        run(url, "DELETE FROM orders", "DROP TABLE IF EXISTS once", "DROP TABLE IF EXISTS other")


def test_work_that_ends_its_transaction_and_cannot_be_noted_is_told_all_the_same(
    url: sa.URL, fence: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(connection: sa.Connection, _: HalfBatch) -> None:
        end(connection, "COMMIT")
        run(url, "DROP TABLE txmq_fence")

    with pytest.raises(txmq.TransactionEndedError):
        execute(url, half_batch(fence, age=OLD), work)
    assert "could not note that its work ended the database transaction" in caplog.text


def test_a_work_whose_arguments_nobody_can_tell_is_taken() -> None:
    SqlTransactionListener("sqlite://", max)


def test_a_listener_that_has_no_work_executes_nothing(url: sa.URL, fence: str) -> None:
    with pytest.raises(txmq.ListenerError, match="has no work, so it answers checks"):
        execute(url, half_batch(fence), None)  # type: ignore[arg-type]
    assert fence_rows(url) == {}


def test_a_fence_row_that_says_two_things_of_one_transaction_is_no_answer(url: sa.URL, fence: str) -> None:
    batch = half_batch(fence, ["a", "a"], per="key", age=OLD)
    execute(url, batch)
    said = Recorded([State(EXECUTED), State(ROLLED_BACK)], {0: pa.array([0, 1], pa.int32())}, batch.staged_ms)
    change = sa.text("UPDATE txmq_fence SET state = :state, outcome = :outcome")
    with sa.create_engine(url).begin() as connection:
        connection.execute(change, {"state": said.state, "outcome": said.encoded()})
    with pytest.raises(txmq.FenceError, match="says two things of one transaction"):
        check(url, batch)


def test_no_check_answers_for_work_that_committed_a_part_and_then_failed(url: sa.URL, fence: str) -> None:
    def work(connection: sa.Connection, _: HalfBatch) -> None:
        end(connection, "COMMIT")
        raise ZeroDivisionError("a bug")

    batch = half_batch(fence, age=OLD)
    with pytest.raises(ZeroDivisionError):
        execute(url, batch, work)
    assert stored(url) == {"before": 1}
    with pytest.raises(txmq.FenceError, match="in its middle"):
        check(url, batch)


def test_no_check_answers_for_a_key_whose_work_ended_the_transaction(url: sa.URL, fence: str) -> None:
    def work(connection: sa.Connection, transaction: HalfTransaction) -> None:
        insert_one(connection, transaction)
        if transaction.transaction_key == "b":
            end(connection, "COMMIT")

    batch = half_batch(fence, per="key", age=OLD)
    with pytest.raises(txmq.TransactionEndedError):
        execute(url, batch, work, per_transaction=True)
    assert "c" not in stored(url), "work ran on for another key"
    with pytest.raises(txmq.FenceError, match="in its middle"):
        check(url, batch)


@pytest.mark.parametrize("way", ["raised", "returned"])
def test_a_refusal_after_a_caught_database_error_is_recorded(url: sa.URL, fence: str, way: str) -> None:
    """PostgreSQL lets nothing but a rollback come after an error: the refusal was lost, and the batch stood still."""

    def refuse(connection: sa.Connection, batch: HalfBatch) -> Any:
        insert_all(connection, batch)
        try:
            connection.exec_driver_sql("INSERT INTO no_such_table VALUES (1)")
        except sa.exc.DBAPIError:
            if way == "raised":
                raise Rollback("there is no such table") from None
            return ROLLBACK

    batch = half_batch(fence, age=OLD)
    assert execute(url, batch, refuse) == [ROLLBACK]
    assert stored(url) == {}
    (said,) = listener(url).check_local_transaction(batch).distinct  # type: ignore[union-attr]
    assert (said.refused, said.reason) == (True, "there is no such table" if way == "raised" else None)


def test_a_check_that_waits_for_a_refusal_hears_of_it(url: sa.URL, fence: str) -> None:
    """The claim was given up before the refusal was recorded: the check took its place, and the work ran again."""
    for number in range(how_many(2, 5)):
        batch, refuse = half_batch(fence, half_id=f"app-{number}", age=OLD), Held(Rollback("no stock"))
        with ThreadPoolExecutor(2) as pool:
            executed = pool.submit(execute, url, batch, refuse)
            assert refuse.running.wait(30)
            checked = pool.submit(listener(url, lock_timeout=20).check_local_transaction, batch)
            with contextlib.suppress(FutureTimeoutError):
                checked.result(timeout=0.3)  # now it waits
            refuse.may_end.set()
            assert executed.result() == [ROLLBACK]
            (said,) = checked.result().distinct  # type: ignore[union-attr]
            assert (said.refused, said.reason) == (True, "no stock")


# ---------------------------------------------------------------- the places of a restored log
def dealt(fence: str, keys: str, per: str = "key", **settings: Any) -> HalfBatch:
    return half_batch(fence, list(keys), per=per, staged_ms=1_900_000_000_000, **settings)


@pytest.mark.parametrize("per", ["key", "message"])
def test_what_a_row_says_of_places_is_not_said_of_others(url: sa.URL, fence: str, per: str) -> None:
    """A restored log dealt out the rows of a batch otherwise: what was refused became visible."""

    def refuse_b(_: Any, batch: HalfBatch) -> Any:
        rows = batch.messages(["transaction_id", "transaction_key", "keys"]).to_pylist()
        return batch.verdicts(
            rollback={r["transaction_key"] or r["transaction_id"]: "no b" for r in rows if r["keys"] == "b"}
        )

    first = half_batch(fence, list("abcd"), per=per, age=OLD)
    expected = [COMMIT, ROLLBACK, COMMIT, COMMIT]
    assert execute(url, first, refuse_b) == expected
    for ask in (check, execute):
        with pytest.raises(txmq.FenceError, match=r"with its messages in other places.*log\.resolve"):
            ask(url, dealt(fence, "badc", per))
    if per == "key":  # dealt out as before: it can be said
        assert check(url, dealt(fence, "abcd")) == expected


def test_what_is_true_of_a_whole_batch_is_true_wherever_its_rows_lie(url: sa.URL, fence: str) -> None:
    execute(url, half_batch(fence, list("abcd"), per="key"))
    assert execute(url, dealt(fence, "dcba")) == [COMMIT]
    assert stored(url) == dict.fromkeys("abcd", 1)


# ---------------------------------------------------------------- both sides at once
@pytest.mark.parametrize("first", ["execute", "check"])
@pytest.mark.parametrize("per", ["batch", pytest.param("key", marks=pytest.mark.long)])
def test_a_racing_execute_and_check_never_disagree(url: sa.URL, fence: str, first: str, per: str) -> None:
    rng = random.Random(f"{first} {per}")
    executing, checking = listener(url), listener(url, lock_timeout=2)

    def run_it(batch: HalfBatch, delay_s: float) -> str:
        time.sleep(delay_s)
        try:
            return verdicts(executing.execute_local_transaction(batch))[0]
        except txmq.FencedError:
            return "FENCED"

    def ask(batch: HalfBatch, delay_s: float) -> str:
        time.sleep(delay_s)
        return verdicts(checking.check_local_transaction(batch))[0]

    with ThreadPoolExecutor(2) as pool:
        for round_no in range(settings.default.max_examples // 2):
            key = f"order{round_no}"
            batch = half_batch(fence, [key], per=per, age=OLD, half_id=f"{first}-{round_no}")
            late, early = rng.uniform(0, 0.004), rng.uniform(0, 0.002)
            delays = {"execute": late, "check": late, first: early}
            executed = pool.submit(run_it, batch, delays["execute"])
            checked = pool.submit(ask, batch, delays["check"])
            outcome = executed.result(), checked.result()
            assert outcome in {(COMMIT, COMMIT), ("FENCED", ROLLBACK), (COMMIT, UNKNOWN)}, f"round {round_no}"
            assert (key in stored(url)) is (outcome[0] == COMMIT)
            assert ask(batch, 0) == (COMMIT if outcome[0] == COMMIT else ROLLBACK)


def test_two_executes_of_one_attempt_run_the_work_once(url: sa.URL, fence: str) -> None:
    calls = []

    def work(connection: sa.Connection, batch: HalfBatch) -> None:
        calls.append(batch)
        time.sleep(0.1)
        insert_all(connection, batch)

    batch = half_batch(fence, per="key")
    assert batch.transactions.num_rows == 3
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: execute(url, batch, work), range(2)))
    assert both == [[COMMIT]] * 2
    assert len(calls) == 1
    assert stored(url) == {"a": 2, "b": 1, "c": 1}


def test_a_check_of_a_running_local_transaction_is_unknown_and_quick(url: sa.URL, fence: str) -> None:
    batch, work = half_batch(fence, per="key", age=OLD), Held()
    assert batch.transactions.num_rows == 3
    with ThreadPoolExecutor(1) as pool:
        executed = pool.submit(execute, url, batch, work)
        assert work.running.wait(30)
        started = time.monotonic()
        assert check(url, batch, lock_timeout=0.2) == [UNKNOWN]
        assert "its local transaction is running" in str(batch.reason)
        took_s = time.monotonic() - started
        work.may_end.set()
        assert executed.result() == [COMMIT]
    assert 0.1 < took_s < 3
    assert check(url, batch) == [COMMIT]


def test_a_check_waits_for_a_local_transaction_that_ends_in_time(url: sa.URL, fence: str) -> None:
    batch, work = half_batch(fence, age=OLD), Held()
    assert batch.transactions.num_rows == 1
    with ThreadPoolExecutor(1) as pool:
        executed = pool.submit(execute, url, batch, work)
        assert work.running.wait(30)
        threading.Timer(0.3, work.may_end.set).start()
        assert check(url, batch, lock_timeout=20) == [COMMIT]
        assert executed.result() == [COMMIT]


# ---------------------------------------------------------------- the fence
@pytest.mark.parametrize("why", ["nobody made one", "its id was deleted"])
def test_a_database_without_a_fence_says_to_make_one(url: sa.URL, why: str) -> None:
    if why == "its id was deleted":
        create_fence(url)
        run(url, "DELETE FROM txmq_fence_id")
    for use in (
        lambda: listener(url).store_id,
        lambda: execute(url, half_batch("f")),
        lambda: check(url, half_batch("f", age=OLD)),
    ):
        with pytest.raises(txmq.FenceError, match=r"has no fence 'txmq_fence_id': call create_fence\(\) once"):
            use()
    assert stored(url) == {}


def test_another_fence_answers_nothing_and_writes_nothing(url: sa.URL, fence: str) -> None:
    for use in (execute, check):
        with pytest.raises(txmq.FenceError, match=f"prepared with fence other, but .* has fence {fence}"):
            use(url, half_batch("other", age=OLD))
        with pytest.raises(txmq.FenceError, match="prepared without a fence"):
            use(url, half_batch(None, age=OLD))
    assert stored(url) == fence_rows(url) == {}


def test_create_fence_makes_one_id_however_often_it_is_called(url: sa.URL) -> None:
    listeners = [listener(url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda each: each.create_fence(), listeners))
    assert len(set(made)) == 1
    assert listener(url).store_id == create_fence(url) == made[0]
    assert len(made[0]) == 32


def test_fences_of_other_names_are_other_fences(url: sa.URL, fence: str) -> None:
    other = listener(url, fence_table="shop_fence")
    assert other.create_fence() != fence
    assert verdicts(other.execute_local_transaction(half_batch(other.store_id))) == [COMMIT]
    assert fence_rows(url) == {}


def ran(orders_listener: SqlTransactionListener, log: CommitLog, app: str, batch_id: int = 0) -> HalfRecord:
    """A half batch whose local transaction is in the database, and which nobody has decided yet."""
    record = prepare(log, batch_id, 2, app=app, fence_id=orders_listener.store_id)
    batch = half_batch(orders_listener.store_id, half_id=record.half_id, log_id=log.id)
    orders_listener.execute_local_transaction(batch)
    return record


def test_prune_deletes_rows_past_retention_only(url: sa.URL, fence: str, log: CommitLog) -> None:
    orders_listener = listener(url, nothing)
    commit(log, ran(orders_listener, log, "old"))
    make_older(url, 9)
    commit(log, ran(orders_listener, log, "new"))
    let_leave(log)
    assert orders_listener.prune(10 * 86400, log) == 0
    assert orders_listener.prune(8 * 86400, log) == 1
    assert fence_rows(url) == {"new:0:1": "executed"}


@pytest.mark.log("delta")
def test_prune_keeps_the_rows_of_what_has_not_left_its_log(url: sa.URL, fence: str, log: CommitLog) -> None:
    other = InMemoryCommitLog(topics={"orders": 2})
    orders_listener = listener(url, nothing)

    ran(orders_listener, log, "open")
    hidden = ran(orders_listener, log, "hidden")
    log.engine.ledger.quarantine(hidden, 1, pending(log, hidden), Who.CHECK, "nobody knows")
    torn = ran(orders_listener, log, "torn")
    every = pending(log, torn)
    roll_back(log, torn)
    with pytest.raises(txmq.VerdictConflictError):
        decide_one(log.engine, torn, 1, commit=every, rollback={}, who=Who.EXECUTE)
    commit(log, ran(orders_listener, log, "settled"))
    roll_back(log, ran(orders_listener, log, "refused"))
    commit(other, ran(orders_listener, other, "elsewhere"))
    ran(orders_listener, other, "open elsewhere")
    kept = {"open:0:1", "hidden:0:1", "torn:0:1", "open elsewhere:0:1"}
    for at, app in ((log, "open"), (log, "settled"), (other, "elsewhere")):
        commit(at, ran(orders_listener, at, app, 1))
        kept.add(f"{app}:1:1")  # the last one of its application: a restart replays it
    orders_listener.execute_local_transaction(half_batch(fence, half_id="of no log:0"))
    make_older(url, 9)
    assert orders_listener.prune(8 * 86400, log, other) == 0
    let_leave(log)
    let_leave(other)
    assert orders_listener.prune(8 * 86400, log) == 2  # rows of a log that is not named stay
    assert set(fence_rows(url)) == kept | {"elsewhere:0:1", "of no log:0:1"}
    assert orders_listener.prune(8 * 86400, other) == 1
    assert set(fence_rows(url)) == kept | {"of no log:0:1"}


def test_prune_goes_through_the_rows_a_page_at_a_time(url: sa.URL, fence: str, log: CommitLog, limit: Limit) -> None:
    """2.5 million old rows came into memory at once."""
    limit(PRUNED_AT_ONCE=2)
    orders_listener = listener(url, nothing)
    for number in range(7):
        record = ran(orders_listener, log, f"app{number}")
        if number not in (2, 3):
            commit(log, record)
    make_older(url, 9)
    commit(log, ran(orders_listener, log, "app35"))
    let_leave(log)
    pages = list(orders_listener.pruning_in_turn(8 * 86400, log.engine, 0.0))
    assert (sum(pages), max(pages)) == (5, 2)
    assert len(pages) >= 4
    kept = {row for row in fence_rows(url) if not row.startswith("pruned@")}  # which tells that this log had its turn
    assert kept == {"app2:0:1", "app3:0:1", "app35:0:1"}


def test_a_pruner_whose_clock_is_ahead_of_the_database_deletes_nothing(url: sa.URL, fence: str, log: CommitLog) -> None:
    orders_listener = listener(url, nothing)
    commit(log, ran(orders_listener, log, "new"))
    let_leave(log)
    orders_listener.runtime = Ahead(30 * 86400)
    assert orders_listener.prune(8 * 86400, log) == 0
    assert fence_rows(url) == {"new:0:1": "executed"}


def test_processes_that_prune_in_turn_do_so_once_in_a_while(url: sa.URL, fence: str, log: CommitLog) -> None:
    other = InMemoryCommitLog(topics={"orders": 2})
    first, second = listener(url, nothing), listener(url, nothing)
    commit(log, ran(first, log, "a"))
    let_leave(log)
    make_older(url, 9)
    assert sum(first.pruning_in_turn(8 * 86400, log.engine, 3600)) == 1
    commit(log, ran(first, log, "b"))
    let_leave(log)
    run(url, "UPDATE txmq_fence SET changed_at = '2020-01-01 00:00:00' WHERE state = 'executed'")
    assert list(second.pruning_in_turn(8 * 86400, log.engine, 3600)) == []
    assert list(second.pruning_in_turn(8 * 86400, other.engine, 3600)) == [0]
    make_older(url, 1)
    run(url, "UPDATE txmq_fence SET changed_at = '2020-01-01 00:00:00' WHERE state = 'executed'")
    assert sum(second.pruning_in_turn(8 * 86400, log.engine, 3600)) == 1


@pytest.mark.parametrize("late", [timedelta(days=6), timedelta(days=8)])
def test_a_driver_that_slept_until_its_tombstone_may_go_does_nothing(url: sa.URL, fence: str, late: timedelta) -> None:
    """A check rolled it back, and the row that says so lives for seven days at least."""
    batch = half_batch(fence, age=late)
    if late < timedelta(days=7):
        assert execute(url, batch) == [COMMIT]
        return
    with pytest.raises(txmq.LocalTransactionError, match=r"8 days ago.*nothing was done"):
        execute(url, batch)
    assert stored(url) == {}
    assert fence_rows(url) == {}
    assert check(url, batch) == [ROLLBACK]


def test_a_fence_in_a_copy_of_its_database_does_not_answer(tmp_path: Path) -> None:
    url = make_orders(sa.make_url(f"sqlite:///{tmp_path / 'orders.db'}"))
    fence = create_fence(url)
    copied = url.set(database=str(tmp_path / "staging.db"))
    shutil.copy(tmp_path / "orders.db", tmp_path / "staging.db")
    batch = half_batch(fence, age=OLD)
    for ask in (
        lambda: listener(copied).store_id,
        lambda: create_fence(copied),
        lambda: check(copied, batch),
        lambda: execute(copied, batch),
    ):
        with pytest.raises(txmq.FenceError, match=r"made in another place .* create_fence\(moved=True\)"):
            ask()
    assert fence_rows(copied) == stored(copied) == {}
    assert create_fence(copied, moved=True) == fence
    assert check(copied, batch) == [ROLLBACK]


def test_a_fence_that_could_not_see_its_place_learns_it_when_it_is_made_again(url: sa.URL, fence: str) -> None:
    """Its user had no right to ask the database which one it is."""
    run(url, "DELETE FROM txmq_fence_id WHERE one = 2")
    assert listener(url).store_id == fence
    assert create_fence(url) == fence
    with sa.create_engine(url).connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM txmq_fence_id").scalar_one() == 2


# ---------------------------------------------------------------- engines
def test_a_users_own_engine_is_used_as_it_is(url: sa.URL, fence: str) -> None:
    engine = sa.create_engine(url)
    assert execute(engine, half_batch(fence, per="key"), insert_one, per_transaction=True) == [COMMIT]
    assert check(engine, half_batch(fence, age=OLD, attempt=2)) == [ROLLBACK]
    with engine.connect() as connection:
        if url.drivername == "sqlite":
            assert connection.connection.dbapi_connection.isolation_level == ""
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 5000
        connection.execute(orders.insert(), {"id": "x", "lines": 1})
        connection.rollback()
    assert stored(url) == {"a": 2, "b": 1, "c": 1}


def test_an_engine_that_begins_its_transactions_by_itself_is_taken(tmp_path: Path) -> None:
    """As SQLAlchemy's documentation advises for savepoints in SQLite. Our own BEGIN came second, and was an error."""
    url = make_orders(sa.make_url(f"sqlite:///{tmp_path / 'orders.db'}"))
    engine = sa.create_engine(url)

    @sa.event.listens_for(engine, "connect")
    def _(driver: Any, _: object) -> None:
        driver.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def _(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    fence = create_fence(engine)
    for lock_timeout in (None, 1.0):
        other = sa.create_engine(url, connect_args={"timeout": 0}).connect()
        with Database(engine).transaction(lock_timeout), other, pytest.raises(sa.exc.OperationalError, match="locked"):
            other.exec_driver_sql("BEGIN IMMEDIATE")
    assert execute(engine, half_batch(fence, per="key")) == [COMMIT]
    assert check(engine, half_batch(fence, age=OLD, attempt=2)) == [ROLLBACK]
    assert stored(url) == {"a": 2, "b": 1, "c": 1}


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(sa.exc.OperationalError, match=r"no connection to sqlite:///.*/nowhere/orders\.db"):
        create_fence(f"sqlite:///{tmp_path}/nowhere/orders.db")


def test_a_strictly_isolated_engine_keeps_both_sides_agreed(url: sa.URL, fence: str) -> None:
    engine = sa.create_engine(url, isolation_level="SERIALIZABLE")
    batch = half_batch(fence, per="key")
    assert execute(engine, batch) == [COMMIT]
    assert execute(engine, batch) == [COMMIT]
    old = half_batch(fence, per="key", age=OLD, attempt=2)
    assert check(engine, old) == [ROLLBACK]
    with pytest.raises(txmq.FencedError):
        execute(engine, old)


def test_an_in_memory_sqlite_serves_one_process() -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool, connect_args={"check_same_thread": False})
    orders.create(engine)
    orders_listener = listener(engine)
    batch = half_batch(orders_listener.create_fence())
    assert verdicts(orders_listener.execute_local_transaction(batch)) == [COMMIT]
    assert verdicts(orders_listener.check_local_transaction(batch)) == [COMMIT]


# ---------------------------------------------------------------- what people see
SECRET = "hunter2"
BACKENDS = ("postgresql+psycopg", "mysql+pymysql", "sqlite")
UNTESTED = ("oracle", "mssql+pyodbc", "cockroachdb")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (f"://me:{SECRET}@host", "cannot be parsed"),
        # SQLAlchemy ends the password at its first @, and the rest of it was shown as a part of the host.
        *((f"{name}://me:half@{SECRET}@localhost:1/shop", "must be written as %40") for name in BACKENDS),
        *((f"{name}://me:{SECRET}@host/shop", "use SQLite, PostgreSQL, MariaDB or MySQL") for name in UNTESTED),
        (7, "int is no database"),
        ("sqlite+nosuch://host/x", r"SQLAlchemy knows no database 'sqlite\+nosuch'"),
        ("mysql+cymysql://host/x", r"the driver of 'mysql\+cymysql' is not installed: pip install cymysql"),
    ],
)
def test_what_is_no_database_is_refused_and_no_password_is_shown(address: Any, said: str) -> None:
    with pytest.raises(txmq.ListenerError, match=said) as caught:
        _ = listener(address).store_id
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or SECRET not in str(caught.value.__context__)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (
            {"work": lambda batch: None},
            txmq.ListenerError,
            r"work is .*<lambda>\(batch\): a function work\(connection, ",
        ),
        ({"work": "no function"}, txmq.ListenerError, "a function work"),
        ({"lock_timeout": 0}, txmq.OptionError, "lock_timeout=0"),
        ({"lock_timeout": LOCK_TIMEOUT_S_MAX + 1}, txmq.OptionError, f"at most {LOCK_TIMEOUT_S_MAX:g}"),
        ({"fence_table": 'fence"; DROP TABLE orders --'}, txmq.OptionError, "fence_table"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        listener("sqlite://", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("older_than", "logs", "said"),
    [
        (3600, [InMemoryCommitLog()], "less than 7 days"),
        (8 * 86400, [], "needs the commit logs"),
        (8 * 86400, ["a path"], "prune got str 'a path': open logs are expected"),
        (timedelta(days=8), [InMemoryCommitLog()], r"write older_than=datetime.timedelta\(days=8\).total_seconds\(\)"),
    ],
)
def test_arguments_of_prune_that_make_no_sense_are_refused(older_than: Any, logs: list[Any], said: str) -> None:
    with pytest.raises(txmq.OptionError, match=said):
        listener("sqlite://").prune(older_than, *logs)  # type: ignore[arg-type]
