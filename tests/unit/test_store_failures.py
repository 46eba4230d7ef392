"""A store that fails in the middle of a send: what raises says whether a check may bring the messages after all."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark.errors import (
    ClockError,
    CommitError,
    CorruptLogError,
    NotACommitLogError,
    StorageError,
    UnresolvedTransactionError,
)
from tests.support.inside import CommitOncePrepared, files

pytestmark = pytest.mark.log("delta", orders=1)

FULL = OSError(errno.ENOSPC, "No space left on device")
DENIED = PermissionError(errno.EACCES, "Permission denied")
MESSAGE = txmq.Message("orders", b"once")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    found = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with found.begin() as connection:
        connection.execute(sa.text("create table orders (body text)"))
    yield found
    found.dispose()


def fails(monkeypatch: pytest.MonkeyPatch, table: str, problem: OSError) -> None:
    """The store takes no more files of a table."""
    seal = files.seal

    def broken(schema: pa.Schema, path: str, holds: str) -> Any:
        if path.startswith(f"{table}-"):
            raise problem
        return seal(schema, path, holds)

    monkeypatch.setattr(files, "seal", broken)


def bodies(log: CommitLog) -> list[bytes]:
    return list(log.another().read("orders")["body"].to_pylist())


def in_session(producer: txmq.TransactionMQProducer, engine: sa.Engine) -> None:
    with engine.connect() as session, producer.transaction(session) as transaction:
        session.execute(sa.text("insert into orders values ('once')"))
        transaction.send(MESSAGE)


DOORS: dict[str, Callable[[txmq.TransactionMQProducer, sa.Engine], object]] = {
    "send": lambda producer, engine: producer.send(MESSAGE),
    "a key": lambda producer, engine: producer.send(MESSAGE, idempotency_key="k"),
    "asynchronously": lambda producer, engine: producer.send_async(MESSAGE).result(60),
    "in transaction": lambda producer, engine: producer.send_message_in_transaction(MESSAGE),
    "in transaction, asynchronously": lambda p, engine: p.send_message_in_transaction_async(MESSAGE).result(60),
    "with a session": in_session,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("problem", [FULL, DENIED], ids=["full", "denied"])
def test_a_send_whose_verdict_cannot_be_written_says_that_it_is_open(
    log: CommitLog, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, door: str, problem: OSError
) -> None:
    """It raised that the disk is full and no more. Its program made room and sent it again: a check brought the first
    one, too."""
    listener = txmq.SqlTransactionListener(engine, lambda connection, batch: None)
    listener.create_fence()
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        fails(monkeypatch, "op", problem)
        words = r"half batch 'send\.shop\..*' is prepared, and could not be settled .*log/op cannot be written to"
        with pytest.raises(UnresolvedTransactionError, match=words) as raised:
            DOORS[door](producer, engine)
        assert "It stays pending until a check settles it" in str(raised.value)
        assert "do not send them anew, except under the same idempotency key" in str(raised.value)
        has_listener = "transaction" in door or "session" in door
        assert ("What the local transaction did stands" in str(raised.value)) == has_listener
        monkeypatch.undo()
        assert bodies(log) == []
        if door == "a key":
            assert producer.send(MESSAGE, idempotency_key="k").replayed
        else:
            txmq.CheckService(log.another(), {"shop": listener}, transaction_timeout=0).run_once()
    assert bodies(log) == [b"once"]


@pytest.mark.parametrize("door", ["send", "asynchronously", "in transaction", "with a session"])
@pytest.mark.parametrize("problem", [ClockError("an hour late"), CorruptLogError("odd"), NotACommitLogError("gone")])
def test_every_problem_of_the_log_after_the_prepare_says_so(
    log: CommitLog, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, door: str, problem: Exception
) -> None:
    listener = txmq.SqlTransactionListener(engine, lambda connection, batch: None)
    listener.create_fence()
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        monkeypatch.setattr(log.op, "try_commit", lambda *given: _raise(problem))
        monkeypatch.setattr(log.op, "write", lambda *given, **more: _raise(problem))
        with pytest.raises(UnresolvedTransactionError, match="is prepared, and could not be settled") as raised:
            DOORS[door](producer, engine)
        assert type(raised.value.__cause__) is type(problem)
        monkeypatch.undo()


@pytest.mark.parametrize("door", DOORS)
def test_a_send_that_was_not_prepared_says_only_what_failed(
    log: CommitLog, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    listener = txmq.SqlTransactionListener(engine, lambda connection, batch: None)
    listener.create_fence()
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        fails(monkeypatch, "half", FULL)
        words = r"log/half cannot be written to, its store fails: .*No space left"
        with pytest.raises(StorageError, match=words):
            DOORS[door](producer, engine)
        monkeypatch.undo()
        assert log.another().pending().num_rows == 0
        DOORS[door](producer, engine)
    assert bodies(log) == [b"once"]


@pytest.mark.parametrize("door", ["send", "asynchronously"])
def test_a_prepare_that_fails_after_its_commit_says_that_it_may_be_open(
    log: CommitLog, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    with txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer:
        prepare_many = log.prepare_many

        def then_fails(*given: Any, **more: Any) -> Any:
            prepare_many(*given, **more)
            raise CommitError("the table cannot be read back")

        monkeypatch.setattr(log, "prepare_many", then_fails)
        words = r"may be prepared \(CommitError: .*It stays pending until"
        with pytest.raises(UnresolvedTransactionError, match=words):
            DOORS[door](producer, engine)
        monkeypatch.undo()
    txmq.CheckService(log.another(), {"shop": CommitOncePrepared()}, transaction_timeout=0).run_once()
    assert bodies(log) == [b"once"]


def _raise(problem: BaseException) -> Any:
    raise problem
