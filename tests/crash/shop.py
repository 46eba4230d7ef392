"""A shop whose orders must agree with its messages: the listeners of the crash tests, and the proof of agreement.

A folder holds one stream each of :data:`STREAMS`, with its commit log, checkpoint and database.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CheckService, SqlTransactionListener
from rmq_spark.checks import CheckReport
from tests.torture.kill import points

FOLDER = "RMQ_SPARK_TEST_SHOP"
"""The environment variable by which a Spark driver tells its workers the shop's folder."""
GROUP = "shop"
ROWS = 30
FILES = 2
"""Files, and so partitions, of a micro-batch of ROWS messages."""
BATCHES = 3
REFUSED_BATCH = 5
REFUSED_KEY = "3"

STREAMS = {"batch": "batch", "message": "message", "key": "key", "foreach": "key"}
"""What a transaction of each stream is. ``foreach`` goes through foreachBatch(TransactionalSink)."""


def is_refused(n: int, per: str) -> bool:
    """What the shop does not accept: a whole micro-batch, or a message in five, or a key in four."""
    return {"batch": n // ROWS == REFUSED_BATCH, "message": n % 5 == 0, "key": str(n % 4) == REFUSED_KEY}[per]


def accepted(per: str, batches: Sequence[int] = range(BATCHES)) -> Counter[str]:
    return Counter(str(n) for b in batches for n in range(b * ROWS, (b + 1) * ROWS) if not is_refused(n, per))


# ---------------------------------------------------------------- the folder of a test
def open_shop(root: Path, streams: Sequence[str] = tuple(STREAMS), batches: int = BATCHES) -> None:
    """Input for some micro-batches; for each stream a commit log, and a database with a fence."""
    (root / "in").mkdir(parents=True)
    add_input(root, batches)
    for name in streams:
        (root / name).mkdir()
        txmq.CommitLog.create(root / name / "log").create_topic("orders", queues=2)
        with sqlite3.connect(root / name / "orders.db") as database:
            database.execute("CREATE TABLE orders (id TEXT, attempt INTEGER)")
        listener(root, name).create_fence()


def add_input(root: Path, batches: int) -> None:
    first, rows = len(list((root / "in").iterdir())), ROWS // FILES
    for i in range(first, first + batches * FILES):
        file = root / "in" / f"{i:03}.txt"
        file.write_text("\n".join(str(n) for n in range(i * rows, (i + 1) * rows)))
        os.utime(file, (1_700_000_000 + i, 1_700_000_000 + i))


def batches_in(root: Path) -> range:
    """The micro-batches that the input makes."""
    return range(len(list((root / "in").iterdir())) // FILES)


# ---------------------------------------------------------------- the local transaction
def listener(root: Path, name: str, rollback_after: float = 0.5) -> SqlTransactionListener:
    per = STREAMS[name]

    def take_orders(connection: sa.Connection, batch: txmq.HalfBatch) -> object:
        rows = batch.messages(["transaction_id", "transaction_key", "body"]).to_pylist()
        numbers = [int(r["body"]) for r in rows]
        refused = [is_refused(n, per) for n in numbers]
        taken = [{"id": str(n), "attempt": batch.attempt} for n, no in zip(numbers, refused, strict=True) if not no]
        if taken:
            connection.execute(sa.text("INSERT INTO orders VALUES (:id, :attempt)"), taken)
        points.reach("executing", batch)
        if per == "batch":
            return txmq.ROLLBACK_MESSAGE if all(refused) else txmq.COMMIT_MESSAGE
        name = "transaction_key" if per == "key" else "transaction_id"
        return batch.verdicts(rollback={r[name] for r, no in zip(rows, refused, strict=True) if no})

    # SQLite's file is named in full: a worker's working folder is another one.
    return SqlTransactionListener(
        f"sqlite:///{(root / name / 'orders.db').resolve()}", take_orders, rollback_after=rollback_after
    )


def _of_the_driver(name: str) -> Callable[[], SqlTransactionListener]:
    return lambda: listener(Path(os.environ[FOLDER]), name)


# What transactionListener names; the process that runs commit() imports this module.
batch, message, key = (_of_the_driver(name) for name in ("batch", "message", "key"))


# ---------------------------------------------------------------- afterwards
def log_of(root: Path, name: str) -> txmq.CommitLog:
    return txmq.CommitLog.open(root / name / "log")


def check(root: Path, name: str, rollback_after: float = 0.0) -> CheckReport:
    """A round of checks by a process that is alive: of everything that is open, whatever its age."""
    listeners = {GROUP: listener(root, name, rollback_after)}
    return CheckService(root / name / "log", listeners, transaction_timeout=0.0).run_once()


def orders(root: Path, name: str) -> Counter[str]:
    with sqlite3.connect(root / name / "orders.db") as database:
        return Counter(row[0] for row in database.execute("SELECT id FROM orders"))


def visible(root: Path, name: str) -> Counter[str]:
    """What a reader sees; the offsets of each queue have no gaps."""
    rows = log_of(root, name).read("orders", columns=["body", "queue_id", "queue_offset"]).to_pylist()
    for queue in {r["queue_id"] for r in rows}:
        offsets = [r["queue_offset"] for r in rows if r["queue_id"] == queue]
        assert offsets == list(range(len(offsets))), f"queue {queue} has gaps"
    return Counter(r["body"].decode() for r in rows)


def assert_agreement(root: Path, name: str, wanted: Counter[str] | None = None) -> None:
    """Every accepted order once in the database and once visible, no other, and nothing open."""
    taken, seen = orders(root, name), visible(root, name)
    assert taken == seen, f"{name}: only in the database {taken - seen}, only visible {seen - taken}"
    assert taken == (accepted(STREAMS[name], batches_in(root)) if wanted is None else wanted)
    log = log_of(root, name)
    assert log.pending().num_rows == 0
    assert log.conflicts() == []
