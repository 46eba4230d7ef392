"""A name comes back: an idempotency key after its time, a batch in a log that was made anew. An identity does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark._core.log.half_header import names_of
from rmq_spark._core.vocabulary.ids import parse_message_id, parse_transaction_id
from rmq_spark.errors import HalfBatchNotFoundError
from rmq_spark.producer import TransactionSendResult
from tests.support.half_batches import forget, let_leave, stage
from tests.support.inside import HalfHeader, TwoPhase, batch_name, half_id_of, name_of, new_half_id

pytestmark = pytest.mark.log("memory", "delta", orders=1)

metadata = sa.MetaData()
rows = sa.Table("orders", metadata, sa.Column("number", sa.Integer), sa.Column("said", sa.String(20)))


class Shop:
    """A database with a fence, and sends under an idempotency key whose work writes a row, or refuses to."""

    def __init__(self, log: txmq.CommitLog, url: str) -> None:
        self.log = log
        self.engine = sa.create_engine(url)
        metadata.create_all(self.engine)
        self.refuses = False
        self.listener = txmq.SqlTransactionListener(self.engine, self.work, rollback_after=0)
        self.listener.create_fence()

    def work(self, connection: sa.Connection, batch: txmq.HalfBatch) -> None:
        if self.refuses:
            raise txmq.Rollback("no stock", refused=True)
        connection.execute(rows.insert(), {"number": 7, "said": "paid"})

    def send(self) -> TransactionSendResult:
        with txmq.TransactionMQProducer(self.log, "shop", self.listener, check_interval=None) as producer:
            return producer.send_message_in_transaction(txmq.Message("orders", b"7"), idempotency_key="order-7")

    @property
    def count(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(rows)).scalar_one())


@pytest.fixture
def shop(log: txmq.CommitLog, tmp_path: Path) -> Shop:
    return Shop(log, f"sqlite:///{tmp_path / 'shop.db'}")


def test_a_key_that_comes_again_after_its_time_is_a_local_transaction_of_its_own(shop: Shop) -> None:
    """And an id that somebody noted never means the next bearer of its name."""
    first = shop.send()
    assert (shop.send().replayed, shop.count) == (True, 1)
    forget(shop.log)
    again = shop.send()
    assert (again.replayed, again.local_transaction_state) == (False, txmq.COMMIT_MESSAGE)
    assert shop.count == 2, "the message is visible, and its row is not there"
    with pytest.raises(HalfBatchNotFoundError):
        shop.log.engine.get(first.half_id)
    ids = shop.log.read("orders").select(["msg_id", "transaction_id"]).to_pydict()
    assert len(set(ids["msg_id"])) == len(set(ids["transaction_id"])) == 2
    assert parse_message_id(ids["msg_id"][1])[0] == parse_transaction_id(ids["transaction_id"][1])[0] == again.half_id


@pytest.mark.parametrize("refuses", [(True, False), (False, True)])
def test_a_key_can_be_decided_otherwise_after_its_time(shop: Shop, refuses: tuple[bool, bool]) -> None:
    for shop.refuses in refuses:
        state = txmq.ROLLBACK_MESSAGE if shop.refuses else txmq.COMMIT_MESSAGE
        assert shop.send().local_transaction_state == state
        forget(shop.log)
    assert shop.count == shop.log.read("orders").num_rows == 1


def test_who_gives_the_name_alone_is_told_the_id(shop: Shop) -> None:
    sent = shop.send()
    with pytest.raises(HalfBatchNotFoundError, match=f"the one of this name is '{sent.half_id}' now"):
        shop.log.engine.get("send.shop.order-7:0")


def test_a_batch_of_a_stream_is_the_same_in_a_restored_log_unless_its_input_is_another(tmp_path: Path) -> None:
    """The fence of the database still answers for it, so its rows are not written twice."""
    written: list[str] = []
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    listener = txmq.SqlTransactionListener(engine, lambda connection, batch: written.append(batch.half_id))
    listener.create_fence()
    log = txmq.CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=1)
    log.close()
    shutil.copytree(tmp_path / "log", tmp_path / "backup")

    def run(offsets: str) -> None:
        log = txmq.CommitLog.open(tmp_path / "log")
        two_phase = TwoPhase(log.engine, listener)
        half_id = half_id_of("app", 0, "query", offsets)
        header = HalfHeader(half_id, "app", 0, "query", offsets, listener.store_id, "batch", "shop")
        two_phase.send(header, lambda: stage(log, header, {"body": ["7"]}))
        assert log.read("orders").num_rows == 1
        log.close()
        shutil.rmtree(tmp_path / "log")
        shutil.copytree(tmp_path / "backup", tmp_path / "log")

    run("offsets")
    run("offsets")
    assert len(written) == 1
    run("others")
    assert len(set(written)) == 2


@pytest.mark.parametrize("app_id", ["app", "app-1", "send.shop.a-b", "3f2a-9c41", "a~b.c_d"])
def test_a_half_id_says_its_name(app_id: str) -> None:
    name, half_id = batch_name(app_id, 10), new_half_id(app_id, 10)
    assert half_id.startswith(f"{name}-")
    assert name_of(half_id) == name_of(name) == name
    assert names_of(pa.chunked_array([[half_id, name]])).to_pylist() == [name, name]


def test_a_batch_is_found_by_its_name_beside_others_that_begin_alike(log: txmq.CommitLog) -> None:
    with txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer:
        keys = ["1", "1-a", "10", "2", "11"]
        sent = {key: producer.send(txmq.Message("orders", key.encode()), idempotency_key=key).half_id for key in keys}
    for key, half_id in sent.items():
        found = log.engine.find(f"send.shop.{key}", 0)
        assert found is not None
        assert found.half_id == half_id
    assert log.engine.find("send.shop.", 0) is None
    assert log.engine.find("send.shop.1", 1) is None
    let_leave(log)
    assert {log.engine.find(f"send.shop.{key}", 0).half_id for key in keys} == set(sent.values())  # type: ignore[union-attr]
