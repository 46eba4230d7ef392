"""Messages that are sent with what a session of SQLAlchemy holds: both become final, or neither does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, CheckService, CommitLog
from rmq_spark.errors import FenceError, ListenerError, LocalTransactionError, OptionError
from tests.support.half_batches import make_log

DATABASES = ["sqlite", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("postgres", "mariadb"))]
INSERT = sa.text("insert into bought values (:n)")


@pytest.fixture(params=DATABASES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    url = f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.getfixturevalue(request.param)
    made = sa.create_engine(url)
    with made.begin() as connection:
        for table in ("bought", "txmq_fence", "txmq_fence_id"):
            connection.execute(sa.text(f"drop table if exists {table}"))
        connection.execute(sa.text("create table bought (n integer primary key)"))
    yield made
    made.dispose()


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    return make_log("memory", tmp_path, orders=1)


@pytest.fixture
def listener(engine: sa.Engine) -> txmq.SqlTransactionListener:
    found = txmq.SqlTransactionListener(engine, rollback_after=0)
    found.create_fence()
    return found


@pytest.fixture
def producer(log: CommitLog, listener: txmq.SqlTransactionListener) -> Iterator[txmq.TransactionMQProducer]:
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as opened:
        yield opened


def order(n: int) -> txmq.Message:
    return txmq.Message("orders", str(n).encode())


def bought(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(sa.text("select n from bought order by n")).scalars())


def sent(log: CommitLog) -> list[int]:
    return sorted(int(body) for body in log.another().read("orders")["body"].to_pylist())


def buy(
    producer: txmq.TransactionMQProducer, session: Session | sa.Connection, n: int | None, fails: bool = False
) -> txmq.producer.TransactionSendResult | None:
    """Insert a row, if any, and send a message, in one transaction."""
    with session, producer.transaction(session) as transaction:
        if n is not None:
            session.execute(INSERT, {"n": n})
        transaction.send(order(n or 0))
        if fails:
            raise ZeroDivisionError
    return transaction.result


def check(log: CommitLog, listener: txmq.SqlTransactionListener) -> Any:
    return CheckService(log.another(), {"shop": listener}, transaction_timeout=0).run_once()


def test_rows_and_messages_become_final_together(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer
) -> None:
    with Session(engine) as session, producer.transaction(session) as transaction:
        session.execute(INSERT, {"n": 1})
        transaction.send(order(1))
        transaction.send([order(2), order(3)])
        assert sent(log) == []
    assert bought(engine) == [1]
    assert sent(log) == [1, 2, 3]
    assert transaction.result is not None
    assert transaction.result.local_transaction_state is COMMIT_MESSAGE
    with engine.connect() as connection, producer.transaction(connection) as transaction:
        connection.execute(INSERT, {"n": 4})
        transaction.send(order(4))
    assert (bought(engine), sent(log)) == ([1, 4], [1, 2, 3, 4])


def test_an_error_in_the_statement_leaves_nothing(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer
) -> None:
    with pytest.raises(ZeroDivisionError):
        buy(producer, Session(engine), 1, fails=True)
    assert (bought(engine), sent(log), log.another().pending().num_rows) == ([], [], 0)


def test_rows_without_messages_are_committed(engine: sa.Engine, producer: txmq.TransactionMQProducer) -> None:
    with Session(engine) as session, producer.transaction(session) as transaction:
        session.execute(INSERT, {"n": 1})
    assert bought(engine) == [1]
    assert transaction.result is None


def test_messages_without_rows_are_sent(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer
) -> None:
    with Session(engine) as session, producer.transaction(session) as transaction:
        transaction.send(order(1))
    assert sent(log) == [1]


@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_of_which_nobody_knows_is_settled_by_a_check(
    engine: sa.Engine,
    log: CommitLog,
    producer: txmq.TransactionMQProducer,
    listener: txmq.SqlTransactionListener,
    landed: bool,
) -> None:
    class Broken(Session):
        def commit(self) -> None:
            if landed:
                super().commit()
            raise ConnectionError("the connection broke at the commit")

    with pytest.raises(LocalTransactionError, match="broke at the commit"):
        buy(producer, Broken(engine), 1)
    assert log.another().pending()["messages"].to_pylist() == [1]
    check(log, listener)
    assert bought(engine) == sent(log) == ([1] if landed else [])
    assert log.another().pending().num_rows == 0


def test_a_check_that_was_faster_undoes_the_session_which_is_not_run_again(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer, listener: txmq.SqlTransactionListener
) -> None:
    class Slow(Session):
        def connection(self, *arguments: Any, **named: Any) -> sa.Connection:
            if log.another().pending().num_rows:
                self.rollback()  # SQLite has one writer at a time
                assert check(log, listener).rolled_back.messages == 1
            return super().connection(*arguments, **named)

    with pytest.raises(LocalTransactionError, match="Send it again, with its rows"):
        buy(producer, Slow(engine), None)
    assert (bought(engine), sent(log), log.another().pending().num_rows) == ([], [], 0)


def test_a_session_of_another_database_is_refused(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer, tmp_path: Path
) -> None:
    other = sa.create_engine(f"sqlite:///{tmp_path}/other.db")
    with other.begin() as connection:
        connection.execute(sa.text("create table bought (n integer primary key)"))
    with pytest.raises(FenceError, match="has no fence like that"):
        buy(producer, Session(other), 1)
    txmq.create_fence(other)
    with pytest.raises(FenceError, match="it is another database"):
        buy(producer, Session(other), 1)
    assert (bought(other), log.another().pending().num_rows) == ([], 0)
    other.dispose()


def test_what_cannot_be_enlisted_is_refused(engine: sa.Engine, log: CommitLog, producer: Any) -> None:
    with pytest.raises(ListenerError, match="found str"), producer.transaction("session"):
        pass
    at_once = engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(ListenerError, match="AUTOCOMMIT"):
        buy(producer, at_once.connect(), 1)
    assert bought(engine) == []

    class Bare(txmq.TransactionListener):
        def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any: ...

        def check_local_transaction(self, batch: txmq.HalfBatch) -> Any: ...

    bare = txmq.TransactionMQProducer(log, "bare", Bare(), check_interval=None)
    with bare, pytest.raises(ListenerError, match="needs a SqlTransactionListener"):
        buy(bare, Session(engine), 1)


class Other(DeclarativeBase):
    pass


class Line(Other):
    __tablename__ = "lines"
    n: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize("ends", ["commit", "rollback", "close"])
def test_a_session_that_was_ended_within_sends_nothing(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer, ends: str
) -> None:
    def buy_and_end() -> None:
        with Session(engine) as session, producer.transaction(session) as transaction:
            session.execute(INSERT, {"n": 1})
            transaction.send(order(1))
            getattr(session, ends)()

    with pytest.raises(ListenerError, match="within transaction"):
        buy_and_end()
    assert (bought(engine), sent(log), log.another().pending().num_rows) == ([], [], 0)


def test_a_message_after_the_end_of_the_statement_is_an_error(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer
) -> None:
    """It was taken without a word, and sent never."""
    with Session(engine) as session, producer.transaction(session) as transaction:
        session.execute(INSERT, {"n": 1})
    with pytest.raises(OptionError, match="has ended, so these messages were not sent"):
        transaction.send(order(1))
    assert (bought(engine), sent(log)) == ([1], [])


def test_a_fence_that_nobody_made_is_said_to_be_missing(engine: sa.Engine, log: CommitLog) -> None:
    """The session's database was said to be another one."""
    listener = txmq.SqlTransactionListener(engine, lambda *_: None)
    with (
        txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer,
        pytest.raises(FenceError, match=r"call create_fence\(\) once"),
    ):
        buy(producer, Session(engine), 1)
    assert (bought(engine), sent(log)) == ([], [])


def test_a_session_whose_connection_somebody_else_commits_is_refused(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer
) -> None:
    with engine.connect() as connection:
        connection.begin()
        with pytest.raises(ListenerError, match="somebody else commits"):
            buy(producer, Session(connection), 1)
        connection.rollback()
    assert (bought(engine), sent(log)) == ([], [])


@pytest.mark.parametrize("mode", ["create_savepoint", "control_fully"])
@pytest.mark.parametrize("nested", [False, True])
def test_messages_are_not_visible_when_the_session_commits_a_savepoint(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer, mode: Any, nested: bool
) -> None:
    """Whoever has the outer transaction undid the row, and the message was there."""
    with engine.connect() as connection:
        outer = connection.begin()
        if nested:
            connection.begin_nested()
        if mode == "create_savepoint" or nested:
            with pytest.raises(ListenerError, match="is a savepoint"):
                buy(producer, Session(connection, join_transaction_mode=mode), 1)
            outer.rollback()
        else:  # this session commits the whole
            buy(producer, Session(connection, join_transaction_mode=mode), 1)
    assert bought(engine) == sent(log) == ([1] if mode == "control_fully" and not nested else [])


def test_a_database_transaction_that_was_lost_within_sends_nothing(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer
) -> None:
    """The rows of a statement that had ended it were gone, and the message was sent."""

    def buy_after_a_rollback() -> None:
        with Session(engine) as session, producer.transaction(session) as transaction:
            session.execute(INSERT, {"n": 1})
            session.connection().connection.dbapi_connection.rollback()  # type: ignore[union-attr]
            transaction.send(order(1))

    with pytest.raises(ListenerError, match="ended within transaction"):
        buy_after_a_rollback()
    assert (bought(engine), sent(log), log.another().pending().num_rows) == ([], [], 0)


def test_a_hook_that_rolls_back_at_the_commit_leaves_the_messages_to_a_check(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer, listener: txmq.SqlTransactionListener
) -> None:
    session = Session(engine)

    @sa.event.listens_for(session, "before_commit")
    def undo(session: Session) -> None:
        session.connection().connection.dbapi_connection.rollback()  # type: ignore[union-attr]

    with pytest.raises(LocalTransactionError, match="not there for others"):
        buy(producer, session, 1)
    assert (bought(engine), sent(log), log.another().pending().num_rows) == ([], [], 1)
    check(log, listener)
    assert (sent(log), log.another().pending().num_rows) == ([], 0)


def test_a_driver_that_commits_each_statement_is_given_a_transaction(log: CommitLog, tmp_path: Path) -> None:
    """isolation_level=None of sqlite3: an exception left the row, and sent nothing."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/each.db", connect_args={"isolation_level": None})
    with engine.begin() as connection:
        connection.execute(sa.text("create table bought (n integer primary key)"))
    listener = txmq.SqlTransactionListener(engine, lambda *_: None)
    listener.create_fence()
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        with pytest.raises(ZeroDivisionError):
            buy(producer, Session(engine), 1, fails=True)
        assert (bought(engine), sent(log)) == ([], [])
        buy(producer, Session(engine), 2)
    assert bought(engine) == sent(log) == [2]
    engine.dispose()


def test_a_session_of_two_databases_is_refused(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer, tmp_path: Path
) -> None:
    other = sa.create_engine(f"sqlite:///{tmp_path}/other.db")
    Other.metadata.create_all(other)

    def buy_in_both() -> None:
        with Session(engine, binds={Line: other}) as session, producer.transaction(session) as transaction:
            session.execute(INSERT, {"n": 1}, bind_arguments={"bind": engine})
            session.add(Line(n=1))
            transaction.send(order(1))

    with pytest.raises(ListenerError, match="several databases"):
        buy_in_both()
    assert (bought(engine), sent(log), log.another().pending().num_rows) == ([], [], 0)
    other.dispose()


def test_a_session_is_enlisted_once_at_a_time(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer
) -> None:
    session = Session(engine)
    with producer.transaction(session) as transaction:
        transaction.send(order(1))
        with pytest.raises(ListenerError, match="one at a time"), producer.transaction(session):
            pass
    buy(producer, session, 2)
    assert (bought(engine), sent(log)) == ([2], [1, 2])


def bound_with_full_control(connection: sa.Connection) -> Session:
    return Session(connection, join_transaction_mode="control_fully")


@pytest.mark.parametrize("outer", [Session, sa.Engine.connect])
@pytest.mark.parametrize("inner", [lambda connection: connection, bound_with_full_control, Session])
def test_a_connection_has_one_transaction_of_a_producer_whichever_object_it_is_reached_by(
    engine: sa.Engine, log: CommitLog, producer: txmq.TransactionMQProducer, outer: Any, inner: Any
) -> None:
    """The inner one committed the outer's rows, whose messages were lost."""
    refused: list[str] = []

    def help_out(session: Session | sa.Connection) -> None:
        reached = inner(session.connection() if isinstance(session, Session) else session)
        try:
            with producer.transaction(reached) as transaction:
                session.execute(INSERT, {"n": 2})
                transaction.send(order(2))
        except ListenerError as problem:
            refused.append(str(problem))

    with outer(engine) as session, producer.transaction(session) as transaction:
        session.execute(INSERT, {"n": 1})
        transaction.send(order(1))
        help_out(session)
    assert len(refused) == 1
    assert "in another transaction() of a producer" in refused[0]
    assert (bought(engine), sent(log), log.another().pending().num_rows) == ([1], [1], 0)


def test_a_pool_that_gives_everybody_one_connection_gives_it_to_one_transaction(log: CommitLog) -> None:
    """As tests in memory have it. Whoever gives the connection back undoes what it holds, so nothing may be sent."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    with engine.begin() as connection:
        connection.execute(sa.text("create table bought (n integer primary key)"))
    listener = txmq.SqlTransactionListener(engine, lambda connection, batch: connection.execute(INSERT, {"n": 3}))
    listener.create_fence()

    def buy_with_help(producer: txmq.TransactionMQProducer, help_out: Any) -> None:
        with Session(engine) as session, producer.transaction(session) as transaction:
            session.execute(INSERT, {"n": 2})
            transaction.send(order(2))
            with pytest.raises((ListenerError, LocalTransactionError), match="one at a time"):
                help_out()

    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None, on_listener_error="fail") as producer:
        buy(producer, Session(engine), 1)
        for help_out in (
            lambda: buy(producer, engine.connect(), 3),
            lambda: producer.send_message_in_transaction(order(3)),
        ):
            with pytest.raises(ListenerError, match="ended within transaction"):
                buy_with_help(producer, help_out)
    assert (bought(engine), sent(log)) == ([1], [1])


def test_the_only_connection_of_a_pool_is_refused_at_once(engine: sa.Engine, log: CommitLog) -> None:
    """Nobody could look whether it has committed: that waited for the pool's time-out, with the rows committed."""
    only = sa.create_engine(engine.url, pool_size=1, max_overflow=0)
    listener = txmq.SqlTransactionListener(only)
    listener.create_fence()
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        with pytest.raises(ListenerError, match="the engine's pool has one connection, and this is it"):
            buy(producer, only.connect(), 1)
        assert (bought(only), sent(log)) == ([], [])
        buy(producer, Session(only), 2)  # its commit gives the connection back
        assert (bought(only), sent(log)) == ([2], [2])
        with engine.connect() as of_another_pool:
            buy(producer, of_another_pool, 3)
    only.dispose()
    assert (bought(engine), sent(log)) == ([2, 3], [2, 3])


def test_work_is_not_given_to_a_transaction_of_a_producer(engine: sa.Engine, log: CommitLog) -> None:
    """Its messages were prepared before anybody refused its commit."""
    producer: txmq.TransactionMQProducer

    def work(connection: sa.Connection, batch: txmq.HalfBatch) -> None:
        connection.execute(INSERT, {"n": 1})
        with pytest.raises(ListenerError, match="one at a time"), producer.transaction(connection) as transaction:
            transaction.send(order(2))

    listener = txmq.SqlTransactionListener(engine, work)
    listener.create_fence()
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        producer.send_message_in_transaction(order(1))
        assert (bought(engine), sent(log), log.another().pending().num_rows) == ([1], [1], 0)


def test_threads_on_sqlite_with_the_recipe_for_its_transactions_wait_for_each_other(
    log: CommitLog, tmp_path: Path
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/recipe.db", connect_args={"timeout": 30})

    @sa.event.listens_for(engine, "connect")
    def connected(driver: Any, _: Any) -> None:
        driver.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def begins(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    with engine.begin() as connection:
        connection.execute(sa.text("create table bought (n integer primary key)"))
    listener = txmq.SqlTransactionListener(engine, lambda *_: None)
    listener.create_fence()
    with (
        txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer,
        ThreadPoolExecutor(3) as pool,
    ):
        list(pool.map(lambda n: buy(producer, engine.connect() if n % 2 else Session(engine), n), range(1, 13)))
    assert bought(engine) == sent(log) == list(range(1, 13))
    engine.dispose()


def test_plain_messages_need_no_listener_s_answer(log: CommitLog, producer: txmq.TransactionMQProducer) -> None:
    first = producer.send([order(1), order(2)])
    assert first.local_transaction_state is COMMIT_MESSAGE
    assert producer.send(order(3), idempotency_key="three").queue_offset == 2
    assert producer.send(order(3), idempotency_key="three").replayed
    assert sent(log) == [1, 2, 3]


def test_a_listener_without_work_is_refused_by_sends_that_would_run_it(
    log: CommitLog, producer: txmq.TransactionMQProducer, listener: txmq.SqlTransactionListener, engine: sa.Engine
) -> None:
    words = r"SqlTransactionListener\('.*'\) has no work, so it answers checks"
    with pytest.raises(ListenerError, match=f"producer 'shop': {words}"):
        producer.send_message_in_transaction(order(1))
    with pytest.raises(ListenerError, match=words):
        producer.send_message_in_transaction_async(order(1))
    with pytest.raises(ListenerError, match=f"TransactionalSink: {words}"):
        txmq.TransactionalSink(log, producer_group="shop", listener=listener)
    assert producer.send(order(2)).local_transaction_state is COMMIT_MESSAGE
    with Session(engine) as session:
        buy(producer, session, 3)
    assert sent(log) == [2, 3]
