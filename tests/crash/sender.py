"""A program without Spark that sends one half batch of a shop: ``sender <folder> <stream>``."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa

import rmq_spark as txmq
from tests.crash import shop


def send(root: Path, name: str) -> txmq.producer.TransactionSendResult:
    """Send the first micro-batch's messages under one idempotency key: a retry goes on where the last try ended."""
    per = shop.STREAMS[name]
    numbers = range(shop.ROWS)
    columns: dict[str, list[str]] = {"body": [str(n) for n in numbers]}
    if per == "key":
        columns["k"] = [str(n % 4) for n in numbers]
    producer = txmq.TransactionMQProducer(
        root / name / "log", shop.GROUP, shop.listener(root, name), on_listener_error="fail", check_interval=None
    )
    with producer:
        return producer.send_messages_in_transaction(
            pa.table(columns),
            topic="orders",
            transaction_key="k" if per == "key" else None,
            transaction_per=None if per == "key" else per,
            idempotency_key="one",
        )


if __name__ == "__main__":
    print(send(Path(sys.argv[1]), sys.argv[2]).local_transaction_state)
