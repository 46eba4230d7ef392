"""A listener and an inbox go to another process as what they were made from, and connect there."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyspark import cloudpickle

import rmq_spark as txmq
from rmq_spark.errors import InboxConflictError, ListenerError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import commit, make_log, prepare
from tests.support.inboxes import count_each, make_database, results
from tests.support.inside import Concurrently, Database, Orderly

pytestmark = pytest.mark.log("delta", orders=2)

SECRET = "hunter2-hunter2"
VARIABLE = "TXMQ_TEST_DATABASE"
WITH_PASSWORD = f"postgresql+psycopg://me:{SECRET}@db.example/shop?application_name={SECRET}"


def keep(connection: sa.Connection, batch: txmq.HalfBatch) -> None:
    bodies = [body.decode() for body in batch.messages(["body"])["body"].to_pylist()]
    connection.execute(sa.text("insert into kept values (:body)"), [{"body": body} for body in bodies])


def keep_or_refuse(connection: sa.Connection, transaction: txmq.listeners.HalfTransaction) -> Any:
    if transaction.transaction_key == "b":
        return txmq.ROLLBACK_MESSAGE
    connection.execute(sa.text("insert into kept values (:body)"), {"body": transaction.transaction_key})
    return None


def url_with_password() -> str:
    return WITH_PASSWORD


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/kept.db"
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("create table kept (body text)")
    return url


def send_with(listener: txmq.SqlTransactionListener, url: str) -> tuple[list[str], list[str]]:
    """What is in the table, and which messages are visible, when two keys were sent with a listener."""
    log = InMemoryCommitLog(topics={"orders": 1})
    messages = pa.table({"body": ["a", "b"], "k": ["a", "b"]})
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        producer.send_messages_in_transaction(messages, topic="orders", transaction_key="k")
    with sa.create_engine(url).connect() as connection:
        kept = sorted(connection.exec_driver_sql("select body from kept").scalars())
    return kept, sorted(body.decode() for body in log.read("orders")["body"].to_pylist())


@pytest.mark.parametrize("door", [pickle.dumps, cloudpickle.dumps])
def test_a_listener_arrives_with_its_work_and_its_settings(url: str, door: Callable[[object], bytes]) -> None:
    listener = txmq.SqlTransactionListener(
        url, keep_or_refuse, per_transaction=True, rollback_after=7, fence_table="my_fence"
    )
    fence_id = listener.create_fence()
    arrived = pickle.loads(door(listener))
    assert repr(arrived) == repr(listener)
    assert (arrived.rollback_after_s, arrived.store_id) == (7.0, fence_id)
    assert send_with(arrived, url) == (["a"], ["a"])


def test_a_listener_that_only_answers_checks_arrives_as_one(url: str) -> None:
    arrived = pickle.loads(pickle.dumps(txmq.SqlTransactionListener(url)))
    assert arrived.only_checks
    with pytest.raises(ListenerError, match="answers checks and has no local transaction to run"):
        send_with(arrived, url)


def test_a_function_and_work_of_a_notebook_go_along(url: str) -> None:
    """Plain pickle cannot take them; Spark Connect's can."""
    listener = txmq.SqlTransactionListener(lambda: url, lambda connection, batch: keep(connection, batch))
    listener.create_fence()
    assert send_with(pickle.loads(cloudpickle.dumps(listener)), url) == (["a", "b"], ["a", "b"])


@pytest.mark.parametrize("where", ["env", "file"])
def test_the_process_that_uses_it_looks_up_the_url(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also the fence's id, which this process has read in another database."""

    def say(found: str) -> None:
        monkeypatch.setenv(VARIABLE, found)
        (tmp_path / "url").write_text(f"{found}\n")

    address = f"env:{VARIABLE}" if where == "env" else f"file:{tmp_path}/url"
    say(f"{url}-of-another-machine")
    listener = txmq.SqlTransactionListener(address, keep)
    elsewhere = listener.create_fence()
    sent = pickle.dumps(listener)
    say(url)
    here = txmq.create_fence(address)
    arrived = pickle.loads(sent)
    assert arrived.store_id == here != elsewhere
    assert send_with(arrived, url) == (["a", "b"], ["a", "b"])


@pytest.mark.parametrize("address", [f"env:{VARIABLE}", url_with_password])
def test_a_password_that_is_looked_up_does_not_travel_and_is_not_shown(
    address: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, WITH_PASSWORD)
    for made in (txmq.SqlTransactionListener(address, keep), txmq.SqlInbox(address, "points", count_each)):
        database = made if isinstance(made, Database) else made._fence
        _ = database.engine  # it has looked the URL up
        assert "me:***@db.example/shop" in repr(made)
        assert SECRET not in repr(made)
        assert SECRET.encode() not in pickle.dumps(made)
        unused = repr(pickle.loads(pickle.dumps(made)))
        assert "env:TXMQ_TEST_DATABASE" in unused or "url_with_password()" in unused


@pytest.mark.parametrize("door", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_stays_in_its_process(door: Callable[[object], object]) -> None:
    engine = sa.create_engine(WITH_PASSWORD)
    said = (
        r"the engine of postgresql\+psycopg://\*\*\*@db.example/shop cannot go to another process, because it holds "
        r"connections: in its place give the database's URL, 'env:NAME', or a function that returns the URL$"
    )
    inbox = txmq.SqlInbox(url_or_engine=engine, group="points", work=count_each)
    with pytest.raises(ListenerError, match=said):
        door(inbox)
    listener = txmq.SqlTransactionListener(engine, keep)
    if door is not copy.copy:  # a copy in this process shares the engine
        with pytest.raises(ListenerError, match=said):
            door(listener)


def test_an_inbox_arrives_with_its_work_and_its_settings(log: txmq.CommitLog, tmp_path: Path) -> None:
    url = make_database(tmp_path)
    inbox = txmq.SqlInbox(f"env:{VARIABLE}", "points", count_each, table="my_inbox", log=log)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, url)
        inbox.create()
        commit(log, prepare(log, 0, 4))
        arrived = pickle.loads(pickle.dumps(inbox))
        assert (arrived.apply(log.read("orders")), inbox.apply(log.read("orders"))) == (4, 0)
        assert arrived.positions() == inbox.positions() != {}
        assert len(results(url)) == 4
        other = make_log("delta", tmp_path / "other", orders=2)
        stranger = pickle.loads(pickle.dumps(txmq.SqlInbox(url, "points", count_each, table="my_inbox", log=other)))
        with pytest.raises(InboxConflictError, match=f"{log.id}, and the messages come from log {other.id}"):
            stranger.apply(log.read("orders"))


def sink(log: txmq.CommitLog) -> Any:
    listener = txmq.SqlTransactionListener("sqlite://", keep)
    return txmq.TransactionalSink(log, producer_group="shop", listener=listener, topic="orders", transaction_key="k")


def consumer(log: txmq.CommitLog, kind: Any = Concurrently, listener: Any = keep) -> Any:
    return kind(txmq.CommitLog.open(log.path).engine, "points", listener, None, None, 1.0, None, None, True)


@pytest.mark.parametrize(
    ("make", "kept"), [(sink, "settings"), (consumer, "group"), (partial(consumer, kind=Orderly), "group")]
)
@pytest.mark.parametrize("door", [pickle.dumps, cloudpickle.dumps])
def test_what_gets_micro_batches_arrives_with_its_settings_and_opens_the_log_again(
    log: txmq.CommitLog, make: Callable[[Any], Any], kept: str, door: Callable[[object], bytes]
) -> None:
    """Spark Connect sends the function of ``foreachBatch`` to its server."""
    made = make(log)
    arrived = pickle.loads(door(made))
    assert arrived.engine.id == log.id
    assert arrived.engine is not made.engine
    assert getattr(arrived, kept) == getattr(made, kept)


def refuse() -> str:
    raise PermissionError(f"no secret for {WITH_PASSWORD}")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (f"env:{VARIABLE}", f"the environment variable {VARIABLE}, .*, is not set in this process: set it where"),
        ("env:", "'env:' is not followed by the name of an environment variable"),
        (f"env:{WITH_PASSWORD}", "'env:' is not followed by the name of an environment variable"),
        ("file:/not/there", "file /not/there, which has the database's URL, cannot be read: No such file"),
        ("file:/dev/null", "file /dev/null is empty: the database's URL is expected in it"),
        (lambda name: name, r"<lambda>\(\) cannot give the database's URL: a function without arguments"),
        (refuse, r"refuse\(\), which gives the database's URL, raised PermissionError: no secret for"),
        (lambda: None, r"<lambda>\(\) returned NoneType: the database's URL is expected"),
        (lambda: f"postgresql://me:p@{SECRET}@db.example", "has an @ in its password"),
        (lambda: "oracle://host/shop", "use SQLite, PostgreSQL, MariaDB or MySQL"),
    ],
)
def test_what_gives_no_url_is_named(address: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ListenerError, match=said) as caught:
        txmq.SqlTransactionListener(address, keep).create_fence()
    assert SECRET not in str(caught.value)
    assert SECRET not in str(caught.value.__cause__ or "")


LOCK = threading.Lock()


class Partner(txmq.TransactionListener):
    def __init__(self, held: Any = None) -> None:
        self.held = held

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        return txmq.COMMIT_MESSAGE

    def check_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        return txmq.COMMIT_MESSAGE


class Each:
    """RocketMQ's own signature."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def execute_local_transaction(self, msg: txmq.MessageExt, arg: Any) -> Any:
        return txmq.Rollback("no") if msg.keys == "b" else txmq.COMMIT_MESSAGE

    def check_local_transaction(self, msg: txmq.MessageExt) -> Any:
        return txmq.UNKNOWN


def of_a_notebook(held: Any) -> Any:
    def hold(*_: Any) -> None:
        held.begin()

    return lambda *_: hold()


A_LOCK = "a _thread.lock, which stays in its process: make it where it is used, inside the function$"


@pytest.mark.parametrize(
    ("listener", "said"),
    [
        (lambda: Partner(LOCK), rf"TransactionalSink: .*Partner uses 'held', {A_LOCK}"),
        (lambda: txmq.PerMessageListener(Each(LOCK)), rf"TransactionalSink: .*Each uses 'held', {A_LOCK}"),
        (
            lambda: txmq.SqlTransactionListener("sqlite://", Each(LOCK).execute_local_transaction),
            rf"Each uses 'held', {A_LOCK}",
        ),
        (
            lambda: txmq.SqlTransactionListener("sqlite://", of_a_notebook(sa.create_engine("sqlite://"))),
            r"hold \(test_travelling.py:\d+\) uses 'held', a sqlalchemy.engine.base.Engine, which stays in its process",
        ),
        (
            lambda: txmq.SqlTransactionListener(sa.create_engine(WITH_PASSWORD), keep),
            r"the engine of postgresql\+psycopg://\*\*\*@db.example/shop cannot go to another process",
        ),
    ],
    ids=["own", "per message", "method", "closure", "engine"],
)
def test_what_stays_is_named_before_a_query_starts(log: txmq.CommitLog, listener: Callable[[], Any], said: str) -> None:
    sink = txmq.TransactionalSink(
        log, producer_group="shop", listener=listener(), topic="orders", transaction_per="message"
    )
    with pytest.raises(Exception, match=said) as caught:
        cloudpickle.dumps(lambda frame, batch_id: sink(frame, batch_id))
    assert "Could not" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_what_stays_of_an_inbox_or_a_consumer_is_named(log: txmq.CommitLog) -> None:
    with pytest.raises(ListenerError, match=rf"work of SqlInbox.* uses 'held', {A_LOCK}"):
        cloudpickle.dumps(txmq.SqlInbox("sqlite://", "points", of_a_notebook(LOCK)))
    with pytest.raises(ListenerError, match=rf"the listener of group 'points' .* uses 'held', {A_LOCK}"):
        cloudpickle.dumps(consumer(log, listener=of_a_notebook(LOCK)))
    with pytest.raises(ListenerError, match=r"the listener of group 'points' .* process: TypeError: cannot pickle"):
        cloudpickle.dumps(consumer(log, listener=partial(of_a_notebook(None), LOCK)))


def test_what_a_per_message_listener_holds_arrives(url: str) -> None:
    arrived = pickle.loads(cloudpickle.dumps(txmq.PerMessageListener(Each("a partner"), threads=3, idempotent=True)))
    assert arrived.idempotent
    log = InMemoryCommitLog(topics={"orders": 1})
    messages = pa.table({"body": ["a", "b"], "keys": ["a", "b"]})
    with txmq.TransactionMQProducer(log, "shop", arrived, check_interval=None) as producer:
        producer.send_messages_in_transaction(messages, topic="orders", transaction_per="message")
    assert log.read("orders", columns=["body"])["body"].to_pylist() == [b"a"]


def test_a_delta_listener_arrives_without_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        """It cannot be pickled, as a classic session."""

        def __init__(self) -> None:
            self.held = LOCK

    listener = txmq.DeltaTransactionListener("/tables/gold", keep, spark=Session(), rollback_after=7)  # type: ignore[arg-type]
    arrived = pickle.loads(cloudpickle.dumps(listener))
    assert repr(arrived) == repr(listener)
    assert arrived.rollback_after_s == 7
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    with pytest.raises(ListenerError, match="finds no active Spark session here"):
        _ = arrived.store_id
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)  # Spark is not installed there
    with pytest.raises(ListenerError, match="install rmq_spark with its extra spark"):
        _ = arrived.store_id
