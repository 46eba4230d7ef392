"""Many messages of many keys through a FIFO topic into an inbox.

``fifo_flood <folder> send <number>``, ``… check``, ``… consume``: each goes on where an earlier run was killed.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

import rmq_spark as txmq

TOPIC, GROUP = "flood", "flood"
SENDERS, QUEUES, KEYS = 2, 8, 1_000
ROWS, KEYS_A_BATCH = 1_000, 50
MESSAGES = 100_000
BATCHES = MESSAGES // ROWS // SENDERS
"""Of each sender."""


class Forgetful(txmq.SqlTransactionListener):
    """Its work is done, and of some keys it says UNKNOWN: a check settles them, while later messages are sent."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        verdicts = super().execute_local_transaction(batch)
        return [txmq.UNKNOWN if random.random() < 0.1 else txmq.LocalTransactionState(v.as_py()) for v in verdicts]


def note_batch(connection: sa.Connection, batch: txmq.HalfBatch) -> None:
    keys = batch.transactions["transaction_key"].to_pylist()
    connection.execute(
        sa.text("insert into done (what) values (:what)"), [{"what": f"{batch.half_id} {k}"} for k in keys]
    )


def listener(root: Path) -> txmq.SqlTransactionListener:
    return Forgetful(f"sqlite:///{root}/shop.db", note_batch, rollback_after=0.5)


def note_results(connection: sa.Connection, messages: pa.Table) -> None:
    pairs = [body.decode().split(":") for body in messages["body"].to_pylist()]
    rows = [{"key": key, "number": int(number)} for key, number in pairs]
    connection.execute(sa.text("insert into results (key, number) values (:key, :number)"), rows)


def inbox(root: Path) -> txmq.SqlInbox:
    return txmq.SqlInbox(f"sqlite:///{root}/results.db", GROUP, note_results)


def make(root: Path) -> None:
    txmq.CommitLog.create(root / "log").create_topic(TOPIC, queues=QUEUES, fifo=True)
    with sa.create_engine(f"sqlite:///{root}/shop.db").begin() as connection:
        connection.execute(sa.text("create table done (what text primary key)"))
    with sa.create_engine(f"sqlite:///{root}/results.db").begin() as connection:
        connection.execute(sa.text("create table results (id integer primary key autoincrement, key text, number int)"))
    listener(root).create_fence()
    inbox(root).create()


def batches(sender: int) -> list[pa.Table]:
    """What a sender sends, the same in every run: the messages of a key are numbered, and are one sender's."""
    chance = random.Random(sender)
    count: Counter[int] = Counter()
    found = []
    for _ in range(BATCHES):
        keys = chance.sample(range(sender, KEYS, SENDERS), KEYS_A_BATCH)
        chosen = [chance.choice(keys) for _ in range(ROWS)]
        bodies = []
        for key in chosen:
            bodies.append(f"{key}:{count[key]}")
            count[key] += 1
        names = [str(key) for key in chosen]
        found.append(pa.table({"body": bodies, "sharding_key": names, "owner": names}))
    return found


def send(root: Path, sender: int) -> None:
    with txmq.TransactionMQProducer(root / "log", GROUP, listener(root), check_interval=None) as producer:
        for number, table in enumerate(batches(sender)):
            producer.send_messages_in_transaction(
                table, topic=TOPIC, transaction_key="owner", idempotency_key=f"{sender}-{number}"
            )
    print("all is sent")


def check(root: Path) -> None:
    service = txmq.CheckService(
        root / "log", {GROUP: listener(root)}, transaction_timeout=1, transaction_check_interval=1
    )
    service.run(threading.Event())


def consume(root: Path) -> None:
    log, mine = txmq.CommitLog.open(root / "log"), inbox(root)
    while True:
        start = {queue_id: offset for (_, queue_id), offset in mine.positions().items()}
        if not mine.apply(log.read(TOPIC, start=start, columns=["topic", "queue_id", "queue_offset", "body"])):
            time.sleep(0.2)


if __name__ == "__main__":
    folder, role = Path(sys.argv[1]), sys.argv[2]
    if role == "send":
        send(folder, int(sys.argv[3]))
    else:
        {"check": check, "consume": consume}[role](folder)
