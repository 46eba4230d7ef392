"""A Spark driver with four consumers of one commit log: ``consuming <folder>``. It runs until it is killed.

``points`` consumes concurrently: some messages fail once, some always. ``books`` consumes in order: some messages
suspend their queue when they come first. ``inbox`` writes into a database, ``table`` into a Delta table.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import DataFrame

import rmq_spark as txmq
from tests.crash.processes import wait_until
from tests.crash.session import start_session
from tests.torture.kill.points import reach

TOPIC, QUEUES = "orders", 4
ONCE, ALWAYS, SUSPENDS = 7, 23, 11
"""Every so manieth message fails once, fails always, suspends its queue once."""

SLOW_WORKER = "Python worker failed to connect back"


def number_of(body: str) -> int:
    return int(body.split(":")[1])


def note(root: Path, who: str, message: txmq.MessageExt) -> None:
    """One line a message, in a file that every worker appends to."""
    line = {"msg_id": message.msg_id, "queue": message.queue_id, "offset": message.queue_offset}
    line["times"] = message.reconsume_times
    with (root / f"{who}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def failures(number: int) -> int:
    """How often a message is not consumed by ``points``."""
    return 99 if number % ALWAYS == 0 else int(number % ONCE == 0)


def gives_points(root: Path) -> Callable[[txmq.MessageExt], txmq.ConsumeResult]:
    def listen(message: txmq.MessageExt) -> txmq.ConsumeResult:
        note(root, "points", message)
        fails = message.reconsume_times < failures(number_of(message.body.decode()))
        return getattr(txmq.ConsumeResult, "FAILURE" if fails else "SUCCESS")

    return listen


def books(root: Path) -> Callable[[txmq.MessageExt], txmq.ConsumeResult]:
    def listen(message: txmq.MessageExt) -> txmq.ConsumeResult:
        note(root, "books", message)
        number = number_of(message.body.decode())
        file = root / "suspended" / str(number)
        if number % SUSPENDS == 0 and not file.exists():
            file.touch()
            return txmq.ConsumeResult.FAILURE
        return txmq.ConsumeResult.SUCCESS

    return listen


def write_results(connection: sa.Connection, messages: pa.Table) -> None:
    rows = [{"body": body.decode()} for body in messages["body"].to_pylist()]
    connection.execute(sa.text("insert into results (body) values (:body)"), rows)


def inbox(root: Path) -> txmq.SqlInbox:
    return txmq.SqlInbox(f"sqlite:///{root}/results.db", "inbox", write_results)


def make(root: Path) -> txmq.CommitLog:
    log = txmq.CommitLog.create(root / "log")
    log.create_topic(TOPIC, queues=QUEUES, fifo=True)
    (root / "suspended").mkdir()
    with sa.create_engine(f"sqlite:///{root}/results.db").begin() as connection:
        connection.execute(sa.text("create table results (id integer primary key autoincrement, body text)"))
    inbox(root).create()
    return log


def main(root: Path) -> None:
    spark = start_session("local[2]", delta=True)

    def stream(group: str) -> DataFrame:
        frame = spark.readStream.format("txmq").option("path", str(root / "log")).option("subscribe", TOPIC)
        frame = frame.option("consumerGroup", group).option("startingOffsets", "earliest").option("ordered", "true")
        return frame.load()

    def into_inbox(batch: DataFrame, batch_id: int) -> None:
        inbox(root)(batch, batch_id)
        reach("inbox committed")

    def into_table(batch: DataFrame, batch_id: int) -> None:
        writer = batch.selectExpr("cast(body as string) body").write.format("delta").mode("append")
        writer.option("txnAppId", "table").option("txnVersion", batch_id).save(str(root / "table"))
        reach("table committed")

    points = txmq.EachMessage(gives_points(root))
    writers = {
        "points": txmq.consume(stream("points"), "points", points, max_reconsume_times=1, delay_level=1),
        "books": txmq.consume(stream("books"), "books", txmq.EachMessage(books(root)), "orderly", suspend_s=0.1),
        "inbox": stream("inbox").writeStream.foreachBatch(into_inbox),
        "table": stream("table").writeStream.foreachBatch(into_table),
    }
    queries = {}
    for name, writer in writers.items():
        writer.option("checkpointLocation", str(root / f"{name}.checkpoint"))
        queries[name] = writer.start()
        # One after the other: Spark gives a Python worker ten seconds to start, and each query starts some.
        wait_until(lambda query=queries[name]: query.lastProgress is not None or not query.isActive, f"{name} begins")
    while True:
        time.sleep(0.5)
        for name, query in queries.items():
            if not query.isActive:
                problem = query.exception()
                if SLOW_WORKER not in str(problem):
                    raise SystemExit(f"{name}: {problem}")
                queries[name] = writers[name].start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
