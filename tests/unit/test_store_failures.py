"""A store that fails in the middle of a send: what raises says whether a check may bring the messages after all."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support.half_batches import bodies
from tests.support.meanwhile import at, seen_at
from tests.support.sends import raising

pytestmark = pytest.mark.log("delta", orders=1)

FULL = OSError(errno.ENOSPC, "No space left on device")
DENIED = PermissionError(errno.EACCES, "Permission denied")
MESSAGE = txmq.Message("orders", b"once")


class Shop:
    """A log, a database, and a producer that sends the message once."""

    def __init__(self, log: CommitLog, engine: sa.Engine) -> None:
        self.log, self.engine = log, engine
        self.listener = txmq.SqlTransactionListener(engine, lambda connection, batch: None)
        self.listener.create_fence()
        self.producer = txmq.TransactionMQProducer(log, "shop", self.listener, check_interval=None).start()

    def send_with_a_session(self) -> None:
        with self.engine.connect() as session, self.producer.transaction(session) as transaction:
            session.execute(sa.text("insert into orders values ('once')"))
            transaction.send(MESSAGE)

    def bodies(self) -> list[str]:
        return bodies(self.log.another())

    def check(self) -> None:
        txmq.CheckService(self.log.another(), {"shop": self.listener}, transaction_timeout=0).run_once()


@pytest.fixture
def shop(log: CommitLog, tmp_path: Path) -> Iterator[Shop]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with engine.begin() as connection:
        connection.execute(sa.text("create table orders (body text)"))
    made = Shop(log, engine)
    yield made
    made.producer.shutdown()
    engine.dispose()


@contextmanager
def fails(table: str, problem: OSError) -> Iterator[None]:
    """The store takes no more files of a table."""

    def full(path: str) -> None:
        if Path(path).name.startswith(f"{table}-"):
            raise problem

    with seen_at("file begins", full):
        yield


DOORS: dict[str, Callable[[Shop], object]] = {
    "send": lambda shop: shop.producer.send(MESSAGE),
    "a key": lambda shop: shop.producer.send(MESSAGE, idempotency_key="k"),
    "asynchronously": lambda shop: shop.producer.send_async(MESSAGE).result(60),
    "in transaction": lambda shop: shop.producer.send_message_in_transaction(MESSAGE),
    "in transaction, asynchronously": lambda s: s.producer.send_message_in_transaction_async(MESSAGE).result(60),
    "with a session": Shop.send_with_a_session,
}


@pytest.mark.parametrize(("door", "problem"), [*((door, FULL) for door in DOORS), ("send", DENIED)])
def test_a_send_whose_verdict_cannot_be_written_says_that_it_is_open(shop: Shop, door: str, problem: OSError) -> None:
    """It raised that the disk is full and no more. Its program made room and sent it again: a check brought the first
    one, too."""
    words = r"half batch 'send\.shop\..*' is prepared, and could not be settled .*log/op cannot be written to"
    with fails("op", problem), pytest.raises(txmq.UnresolvedTransactionError, match=words) as raised:
        DOORS[door](shop)
    assert "It stays pending until a check settles it" in str(raised.value)
    assert "do not send them anew, except under the same idempotency key" in str(raised.value)
    has_listener = "transaction" in door or "session" in door
    assert ("What the local transaction did stands" in str(raised.value)) == has_listener
    assert shop.bodies() == []
    if door == "a key":
        assert shop.producer.send(MESSAGE, idempotency_key="k").replayed
    else:
        shop.check()
    assert shop.bodies() == ["once"]


@pytest.mark.parametrize("door", ["send", "asynchronously", "in transaction", "with a session"])
@pytest.mark.parametrize(
    "problem", [txmq.ClockError("an hour late"), txmq.CorruptLogError("odd"), txmq.NotACommitLogError("gone")]
)
def test_every_problem_of_the_log_after_the_prepare_says_so(shop: Shop, door: str, problem: Exception) -> None:
    unresolved = pytest.raises(txmq.UnresolvedTransactionError, match="is prepared, and could not be settled")
    with seen_at("commit begins", raising(problem), table="op"), unresolved as raised:
        DOORS[door](shop)
    assert type(raised.value.__cause__) is type(problem)


@pytest.mark.parametrize("door", DOORS)
def test_a_send_that_was_not_prepared_says_only_what_failed(shop: Shop, door: str) -> None:
    words = r"log/half cannot be written to, its store fails: .*No space left"
    with fails("half", FULL), pytest.raises(txmq.StorageError, match=words):
        DOORS[door](shop)
    assert shop.log.another().pending().num_rows == 0
    DOORS[door](shop)
    assert shop.bodies() == ["once"]


@pytest.mark.parametrize("door", ["send", "asynchronously"])
def test_a_prepare_that_fails_after_its_commit_says_that_it_may_be_open(shop: Shop, door: str) -> None:
    words = r"may be prepared \(CommitError: .*It stays pending until"
    fails = raising(txmq.CommitError("the table cannot be read back"))
    with at("commit done", fails, table="half"), pytest.raises(txmq.UnresolvedTransactionError, match=words):
        DOORS[door](shop)
    shop.check()
    assert shop.bodies() == ["once"]
