"""One of several programs of a machine that send orders to a log all the time: ``neighbours <folder> <number>``.

What it was told goes into a file of its own, and its log says who commits for it.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import rmq_spark as txmq
from rmq_spark.commitlog import sharing
from tests.crash import shop

STREAM = "message"
THREADS = 4
ORDERS_MAX = 1_000_000
"""Of a program."""


def send_all(root: Path, number: int) -> None:
    """Send an order a transaction, in some threads, until somebody ends the program."""
    orders = shop.listener(root, STREAM, rollback_after=60.0)
    numbers = count(number * ORDERS_MAX)
    with (
        (root / f"told-{number}").open("a", buffering=1) as told,
        txmq.TransactionMQProducer(root / STREAM / "log", shop.GROUP, orders, check_interval=None) as producer,
        ThreadPoolExecutor(THREADS) as pool,
    ):

        def send(_: int) -> None:
            while True:
                order = next(numbers)
                message = txmq.Message("orders", str(order).encode())
                verdict = producer.send_message_in_transaction(message).local_transaction_state
                told.write(f"{order} {verdict}\n")

        list(pool.map(send, range(THREADS)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sharing.ANSWER_S_MAX = 1.0  # a test has less time than a service
    send_all(Path(sys.argv[1]), int(sys.argv[2]))
