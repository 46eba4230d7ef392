"""Sends the steps of some orders to a FIFO topic, and goes on where an earlier run was killed.

``fifo_sender <folder> <number> <senders> <orders>`` sends its orders, step after step, and often does not say what
became of one. ``fifo_sender <folder> check``: rounds of checks until it is ended.
"""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import rmq_spark as txmq

STEPS = ("create", "pay", "finish")
TOPIC, GROUP = "steps", "order-service"


def note_step(connection: sa.Connection, batch: txmq.HalfBatch) -> None:
    for body in batch.messages(["body"])["body"].to_pylist():
        connection.execute(sa.text("insert into steps (step) values (:step)"), {"step": body.decode()})


class Forgetful(txmq.SqlTransactionListener):
    """Its work is done, and it answers UNKNOWN: a check settles the message, while later steps are sent."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        verdicts = super().execute_local_transaction(batch)
        return txmq.UNKNOWN if random.random() < 0.4 else verdicts


def listener(root: Path) -> txmq.SqlTransactionListener:
    return Forgetful(f"sqlite:///{root}/shop.db", note_step, rollback_after=0.5)


def make(root: Path) -> None:
    txmq.CommitLog.create(root / "log").create_topic(TOPIC, queues=4, fifo=True)
    with sa.create_engine(f"sqlite:///{root}/shop.db").begin() as connection:
        connection.execute(sa.text("create table steps (step text primary key)"))
    listener(root).create_fence()


def send(root: Path, number: int, senders: int, orders: int) -> None:
    with txmq.TransactionMQProducer(root / "log", GROUP, listener(root), check_interval=None) as producer:
        for order in range(number, orders, senders):
            for step in STEPS:
                body = f"{order}-{step}"
                producer.send_message_in_transaction(
                    txmq.Message(TOPIC, body, sharding_key=f"order-{order}"), idempotency_key=body
                )


def check(root: Path) -> None:
    service = txmq.CheckService(
        root / "log", {GROUP: listener(root)}, transaction_timeout=0.3, transaction_check_interval=0.3
    )
    service.run(threading.Event())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2] == "check":
        check(folder)
    else:
        send(folder, *map(int, sys.argv[2:5]))
        print("all is sent")
