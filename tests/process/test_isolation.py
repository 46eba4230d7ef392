"""Execute and a check of one half batch at every isolation level, each with a snapshot older than the other's row."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rmq_spark import HalfBatch, create_fence
from rmq_spark.errors import FenceError, TxmqError
from tests.support.inside import EXECUTED, STARTED, Fence, Recorded, State, is_lock_problem
from tests.unit import test_sql_listener as suite
from tests.unit.test_sql_listener import (
    COMMIT,
    OLD,
    ROLLBACK,
    UNKNOWN,
    half_batch,
    insert_all,
    listener,
    make_orders,
    run,
    stored,
    verdicts,
)

LONG = pytest.mark.long
LEVELS = [
    pytest.param("sqlite", "SERIALIZABLE", id="sqlite"),
    pytest.param("postgres", "READ COMMITTED", marks=pytest.mark.postgres, id="postgres-default"),
    pytest.param("postgres", "REPEATABLE READ", marks=[pytest.mark.postgres, LONG], id="postgres-repeatable"),
    pytest.param("postgres", "SERIALIZABLE", marks=[pytest.mark.postgres, LONG], id="postgres-serializable"),
    pytest.param("mariadb", "READ COMMITTED", marks=[pytest.mark.mariadb, LONG], id="mariadb-committed"),
    pytest.param("mariadb", "REPEATABLE READ", marks=pytest.mark.mariadb, id="mariadb-default"),
    pytest.param("mariadb", "SERIALIZABLE", marks=[pytest.mark.mariadb, LONG], id="mariadb-serializable"),
]


@pytest.fixture
def url(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> sa.URL:
    """A database with a fence and the empty table ``orders``."""
    if name == "sqlite":
        found = sa.make_url(f"sqlite:///{tmp_path / 'orders.db'}")
    else:
        found = request.getfixturevalue(name)
        run(found, *(f"DROP TABLE IF EXISTS {table}" for table in ("orders", "txmq_fence", "txmq_fence_id")))
    create_fence(make_orders(found))
    return found


def engine_that(url: sa.URL, level: str, meanwhile: Callable[[], None]) -> sa.Engine:
    """An engine during whose first look at the fence's id something else happens: its snapshot is older."""
    engine = sa.create_engine(url, isolation_level=level, poolclass=sa.NullPool)
    looks = iter(range(100))

    @sa.event.listens_for(engine, "after_cursor_execute")
    def look(_: Any, __: Any, statement: str, *others: Any) -> None:
        if statement.startswith("SELECT") and "txmq_fence_id" in statement and next(looks) == 0:
            meanwhile()

    return engine


def outcome_of(ask: Callable[[], Any]) -> str:
    try:
        return verdicts(ask())[0]
    except (TxmqError, sa.exc.DBAPIError) as problem:
        return type(problem).__name__


def check_agreement(url: sa.URL, fence: str, level: str, executed: str, checked: str) -> None:
    """Whatever either side was told, it agrees with what is in the database, and with every later answer."""
    batch = half_batch(fence, ["a"], age=OLD)
    happened = "a" in stored(url)
    if executed == COMMIT or checked in (COMMIT, ROLLBACK):
        assert happened is (COMMIT in (executed, checked)), (executed, checked)
    assert not (executed == COMMIT and checked == ROLLBACK)
    plain = sa.create_engine(url, isolation_level=level, poolclass=sa.NullPool)
    assert verdicts(listener(plain).check_local_transaction(batch)) == [COMMIT if happened else ROLLBACK]


@pytest.mark.parametrize(("name", "level"), LEVELS[1:])  # in SQLite the check holds the only write lock by then
def test_a_check_that_began_before_the_local_transaction_committed(url: sa.URL, level: str) -> None:
    batch = half_batch(fence_of(url), ["a"], age=OLD)
    executed: list[str] = []

    def meanwhile() -> None:
        executed.append(outcome_of(lambda: listener(url, lock_timeout=1).execute_local_transaction(batch)))

    checking = listener(engine_that(url, level, meanwhile), lock_timeout=1)
    checked = outcome_of(lambda: checking.check_local_transaction(batch))
    assert executed == [COMMIT]
    assert checked != ROLLBACK
    check_agreement(url, fence_of(url), level, executed[0], checked)


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_a_local_transaction_that_began_before_a_check_rolled_it_back(url: sa.URL, level: str) -> None:
    batch = half_batch(fence_of(url), ["a"], age=OLD)
    checked: list[str] = []

    def meanwhile() -> None:
        checked.append(outcome_of(lambda: listener(url, lock_timeout=1).check_local_transaction(batch)))

    late = listener(engine_that(url, level, meanwhile), insert_all)
    executed = outcome_of(lambda: late.execute_local_transaction(batch))
    if url.get_backend_name() == "sqlite":
        assert (executed, checked) == (COMMIT, [UNKNOWN])  # the driver holds the only write lock
    else:
        assert checked == [ROLLBACK]
        assert executed == "FencedError"  # also where its snapshot did not show the row: it began anew
    check_agreement(url, fence_of(url), level, executed, checked[0])


def fence_of(url: sa.URL) -> str:
    return listener(url).store_id


# ---------------------------------------------------------------- what a database must not be
MARIADB = pytest.mark.parametrize("name", [pytest.param("mariadb", marks=pytest.mark.mariadb)])


@MARIADB
def test_read_uncommitted_is_refused(url: sa.URL) -> None:
    engine = sa.create_engine(url, isolation_level="READ UNCOMMITTED")
    with pytest.raises(TxmqError, match="set to READ UNCOMMITTED"):
        _ = listener(engine).store_id


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        pytest.param(
            "mariadb",
            "ALTER TABLE txmq_fence MODIFY half_id VARCHAR(700) COLLATE utf8mb4_general_ci",
            "collation is wrong",
            marks=pytest.mark.mariadb,
        ),
        pytest.param(
            "mariadb",
            "ALTER TABLE txmq_fence MODIFY half_id VARCHAR(700) COLLATE utf8mb4_bin",
            "in a space at the end",
            marks=pytest.mark.mariadb,
        ),
        pytest.param(
            "mariadb",
            "ALTER TABLE txmq_fence ENGINE=Aria TRANSACTIONAL=0, MODIFY half_id VARBINARY(900)",
            "without transactions",
            marks=pytest.mark.mariadb,
        ),
        pytest.param(
            "postgres",
            "CREATE UNIQUE INDEX ON txmq_fence (lower(half_id))",
            "collation is wrong",
            marks=pytest.mark.postgres,
        ),
        pytest.param("sqlite", "", "collation is wrong"),
    ],
)
def test_a_fence_whose_table_cannot_be_one_is_refused(url: sa.URL, name: str, change: str, sentence: str) -> None:
    if name == "sqlite":
        with sa.create_engine(url).connect() as connection:
            made = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = 'txmq_fence'").scalar_one()
        run(url, "DROP TABLE txmq_fence", made.replace("VARCHAR(700)", "VARCHAR(700) COLLATE NOCASE"))
    else:
        run(url, change)
    fence = fence_of(url)
    for ask in (
        lambda: listener(url).execute_local_transaction(half_batch(fence)),
        lambda: listener(url).check_local_transaction(half_batch(fence, age=OLD)),
        lambda: create_fence(url),
    ):
        with pytest.raises(TxmqError, match=sentence):
            ask()
    assert stored(url) == {}
    with sa.create_engine(url).connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM txmq_fence").scalar_one() == 0


@MARIADB
def test_a_check_sets_the_lock_time_outs_back(url: sa.URL) -> None:
    engine = sa.create_engine(url, pool_size=1, max_overflow=0)
    names = "SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout"
    with engine.connect() as connection:
        before = connection.exec_driver_sql(names).one()
    assert verdicts(listener(engine, lock_timeout=1).check_local_transaction(half_batch(fence_of(url), age=OLD))) == [
        ROLLBACK
    ]
    with engine.connect() as connection:
        assert connection.exec_driver_sql(names).one() == before


@MARIADB
def test_a_table_that_somebody_alters_keeps_a_check_waiting_no_longer_than_a_row(url: sa.URL) -> None:
    fence = fence_of(url)
    with sa.create_engine(url).connect() as other:
        other.exec_driver_sql("LOCK TABLES txmq_fence WRITE")
        checked = listener(url, lock_timeout=1).check_local_transaction(half_batch(fence, age=OLD))
        other.exec_driver_sql("UNLOCK TABLES")
    assert verdicts(checked) == [UNKNOWN]


@MARIADB
def test_a_deadlock_is_a_lock_problem(url: sa.URL) -> None:
    run(url, "ALTER TABLE orders ADD PRIMARY KEY (id)", "INSERT INTO orders VALUES ('p', 1), ('q', 1)")
    engine = sa.create_engine(url)
    problems: list[sa.exc.DBAPIError] = []

    def touch(connection: sa.Connection, order: str) -> None:
        try:
            connection.exec_driver_sql(f"SELECT * FROM orders WHERE id = '{order}' FOR UPDATE").all()
        except sa.exc.DBAPIError as problem:
            problems.append(problem)
            connection.rollback()

    with engine.connect() as one, engine.connect() as two, ThreadPoolExecutor(1) as pool:
        touch(one, "p")
        touch(two, "q")
        waiting = pool.submit(touch, one, "q")
        touch(two, "p")
        waiting.result()
    assert [problem.orig.args[0] for problem in problems] == [1213]
    assert is_lock_problem(problems[0])


# ---------------------------------------------------------------- seeded bugs
@MARIADB
def test_these_tests_notice_a_listener_that_trusts_its_snapshot(url: sa.URL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener as it was: it read a taken row from the snapshot, and took one that it did not see for its own."""

    def newest(fence: Fence, connection: sa.Connection, batch: HalfBatch) -> Any:
        return connection.execute(
            fence._read_one, {"of": batch.half_id, "at": batch.attempt, "in_part": -1}
        ).one_or_none()

    def claim(fence: Fence, connection: sa.Connection, batch: HalfBatch, state: State) -> Recorded | None:
        try:
            return honest(fence, connection, batch, state)
        except FenceError:  # it does not show the first
            return None

    honest = Fence.claim
    monkeypatch.setattr(Fence, "_newest", newest)
    monkeypatch.setattr(Fence, "claim", claim)
    with pytest.raises(AssertionError):
        test_a_local_transaction_that_began_before_a_check_rolled_it_back(url, "REPEATABLE READ")


def test_these_tests_notice_fence_rows_that_say_executed_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener as it was: rows said 'executed' before work began, whoever committed them."""
    url = make_orders(sa.make_url(f"sqlite:///{tmp_path / 'orders.db'}"))
    claim = Fence.claim

    def early(fence: Fence, connection: sa.Connection, batch: HalfBatch, state: State) -> Recorded | None:
        return claim(fence, connection, batch, State(EXECUTED) if state.word == STARTED else state)

    monkeypatch.setattr(Fence, "claim", early)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        suite.test_no_check_answers_for_work_that_ended_its_transaction(url, create_fence(url), "returns")
