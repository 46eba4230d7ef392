"""A consumer of a group that several processes share: ``push_flood <folder> <mode> <number>``.

``orderly``: into an inbox, so that each message counts once and in the order of its key. ``concurrently``: into a file
for each process; some messages fail when they come first, and come again as retries.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

import rmq_spark as txmq

TOPIC, GROUP = "flood", "flood"
QUEUES, KEYS = 8, 100
FAILS_EVERY = 40
TIMES: dict[str, Any] = {"heartbeat_interval": 0.3, "lease": 1.5, "persist_consumer_offset_interval": 0.1}


def note_results(connection: sa.Connection, messages: pa.Table) -> None:
    pairs = [body.decode().split(":") for body in messages["body"].to_pylist()]
    rows = [{"key": key, "number": int(number)} for key, number in pairs]
    connection.execute(sa.text("insert into results (key, number) values (:key, :number)"), rows)


def inbox(root: Path) -> txmq.SqlInbox:
    return txmq.SqlInbox(f"sqlite:///{root}/results.db", GROUP, note_results, log=txmq.CommitLog.open(root / "log"))


def make(root: Path) -> txmq.CommitLog:
    log = txmq.CommitLog.create(root / "log")
    log.create_topic(TOPIC, queues=QUEUES, fifo=True)
    with sa.create_engine(f"sqlite:///{root}/results.db").begin() as connection:
        connection.execute(sa.text("create table results (id integer primary key autoincrement, key text, number int)"))
    inbox(root).create()
    return log


def table(first: int, rows: int) -> pa.Table:
    """Messages of the keys in turn, numbered within each key."""
    keys = [str(n % KEYS) for n in range(first, first + rows)]
    bodies = [f"{n % KEYS}:{n // KEYS}" for n in range(first, first + rows)]
    return pa.table({"body": bodies, "sharding_key": keys})


def concurrently(root: Path, number: str) -> txmq.PushConsumer:
    found = (root / f"found-{number}").open("a")

    def listen(messages: pa.Table) -> Sequence[txmq.ConsumeResult]:
        statuses = []
        for body, times in zip(messages["body"].to_pylist(), messages["reconsume_times"].to_pylist(), strict=True):
            fails = times == 0 and int(body.decode().split(":")[1]) % FAILS_EVERY == 0
            if not fails:
                found.write(f"{body.decode()}\n")
            status = txmq.ConsumeResult
            statuses.append(status.FAILURE if fails else status.SUCCESS)
        found.flush()
        return statuses

    return txmq.PushConsumer(
        root / "log", GROUP, listen, TOPIC, consume_from_where="CONSUME_FROM_FIRST_OFFSET",
        consume_message_batch_max_size=50, consume_thread_max=4, delay_level=1, **TIMES,
    )  # fmt: skip


def orderly(root: Path) -> txmq.PushConsumer:
    return txmq.PushConsumer(
        root / "log", GROUP, inbox(root), TOPIC, mode="orderly", consume_from_where="CONSUME_FROM_FIRST_OFFSET",
        consume_message_batch_max_size=100, consume_thread_max=4, suspend_s=0.1, **TIMES,
    )  # fmt: skip


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    (orderly(folder) if mode == "orderly" else concurrently(folder, sys.argv[3])).run()
    print("it came to its end")
