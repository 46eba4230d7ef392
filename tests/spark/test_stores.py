"""Sink and source on an S3 server and on emulators of other stores; Spark itself knows nothing of them."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame

import rmq_spark as txmq
from tests.spark.test_readme import ROOT, run_examples
from tests.support.inside import CommitOncePrepared
from tests.support.meanwhile import seen_at

pytestmark = pytest.mark.long
SECRET = "a-secret-that-is-wrong"


@pytest.fixture(params=["s3", "azure", "google"])
def store(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def log(store: Any, request: pytest.FixtureRequest) -> txmq.CommitLog:
    uri = f"{store.bucket('spark')}/{request.node.name.split('[')[0]}/log"
    made = txmq.CommitLog.create(uri, storage_options=store.storage_options())
    made.create_topic("orders", 2)
    return made


@pytest.fixture
def storage(store: Any) -> dict[str, str]:
    return {f"storage.{k}": v for k, v in store.storage_options().items()}


def bodies(log: txmq.CommitLog) -> list[int]:
    return sorted(int(b) for b in log.read("orders", columns=["body"])["body"].to_pylist())


def test_streams_write_and_read_a_log_on_a_store(spark, log, storage, numbers, tmp_path):
    def send(batches: int) -> None:
        writer = numbers(batches).drop("k").writeStream.format("txmq").option("path", log.path)
        writer = writer.options(**storage, topic="orders", producerGroup="shop", transactionListener="none")
        writer = writer.option("checkpointLocation", str(tmp_path / "sent")).trigger(availableNow=True)
        writer.start().awaitTermination(120)

    received: list[int] = []

    def receive() -> None:
        def take(frame: DataFrame, _: int) -> None:
            received.extend(int(r.body) for r in frame.selectExpr("string(body) body").collect())

        reader = spark.readStream.format("txmq").option("path", log.path).options(**storage)
        frame = reader.options(subscribe="orders", startingOffsets="earliest").load()
        query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "received"))
        query.trigger(availableNow=True).start().awaitTermination(120)

    send(2)
    receive()
    assert sorted(received) == bodies(log) == list(range(20))
    send(1)
    receive()
    assert sorted(received) == bodies(log) == list(range(30))
    assert log.pending().num_rows == 0


def test_a_batch_write_and_a_batch_read_work_on_a_store(spark, log, storage):
    frame = spark.range(50).selectExpr("cast(id as string) body", "id % 2 as k")
    write = frame.write.format("txmq").mode("append").option("path", log.path).options(**storage)
    write.options(topic="orders", producerGroup="shop", transactionListener="none", transactionKey="k").save()
    read = spark.read.format("txmq").option("path", log.path).options(subscribe="orders", **storage).load()
    rows = read.selectExpr("int(string(body)) n", "transaction_id", "queue_id", "queue_offset").collect()
    assert sorted(r.n for r in rows) == list(range(50))
    assert len({r.transaction_id for r in rows}) == 2
    assert len({(r.queue_id, r.queue_offset) for r in rows}) == 50


def test_a_log_on_a_store_is_drained(log):
    with txmq.TransactionMQProducer(log, "shop", CommitOncePrepared(), check_interval=None) as producer:
        for n in range(20):  # a small half file each, which are read ahead
            producer.send_message_in_transaction(txmq.Message("orders", str(n)))
    assert log.drain() == log.refresh()
    with seen_at("files read", table="half") as reads:
        assert bodies(log) == list(range(20))
    assert not reads, "they are read from messages"


class Approve(txmq.TransactionListener):
    """Commits a batch once it has read it, with pyarrow."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> object:
        return txmq.COMMIT_MESSAGE if batch.messages(["body"]).num_rows == 10 else txmq.ROLLBACK_MESSAGE

    def check_local_transaction(self, batch: txmq.HalfBatch) -> object:
        return txmq.UNKNOWN


def test_foreach_batch_sends_to_a_log_on_a_store(store, log, numbers, tmp_path):
    sink = txmq.TransactionalSink(
        log.path, topic="orders", producer_group="shop", listener=Approve(), storage_options=store.storage_options()
    )
    writer = numbers(2).drop("k").writeStream.foreachBatch(sink)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination(120)
    assert bodies(log) == list(range(20))
    assert log.pending().num_rows == 0


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_neither_plans_nor_failures_show_the_secret(spark, store, log, storage, capfd):
    wrong = {**storage, "storage.AWS_SECRET_ACCESS_KEY": SECRET}
    said: list[str] = []
    for options in (storage, wrong):
        reader = spark.read.format("txmq").option("path", log.path).options(subscribe="orders", **options)
        try:
            frame = reader.load()
            frame.explain(True)
            frame.count()
        except Exception as problem:
            said += [str(problem), repr(problem)]
    assert any("SignatureDoesNotMatch" in text for text in said)
    write = spark.range(1).selectExpr("'x' body").write.format("txmq").mode("append").option("path", log.path)
    write = write.options(topic="orders", producerGroup="shop", transactionListener="none", **wrong)
    with pytest.raises(Exception, match="SignatureDoesNotMatch") as caught:
        write.save()
    said += [str(caught.value)]
    out, err = capfd.readouterr()
    said += [out, err]
    assert "== Physical Plan ==" in out
    assert not [word for word in (store.secret_key, SECRET) for text in said if word in text]


def test_the_how_to_for_object_stores_runs_from_top_to_bottom(s3, tmp_path):
    s3.bucket("my-bucket")
    run_examples(ROOT / "docs" / "object-stores.md", tmp_path, s3.storage_options())
