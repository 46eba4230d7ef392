"""A program without Spark that sends orders asynchronously, and kills itself: ``flying <folder> <step> <times>``."""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import rmq_spark as txmq
from tests.crash import shop
from tests.support.inside import AsyncSend

STREAM = "message"
STEPS = ("begin", "_prepared", "_execute", "_go_on", "_decided")
"""Of a flight. The program ends before one of them."""


def send_all(root: Path) -> None:
    """Send an order a transaction, all of them under way at once."""
    orders = shop.listener(root, STREAM)
    with txmq.TransactionMQProducer(root / STREAM / "log", shop.GROUP, orders, check_interval=None) as producer:
        for n in range(shop.ROWS):
            producer.send_message_in_transaction_async(txmq.Message("orders", str(n).encode()))


def end_before(step: str, times: int) -> None:
    """Kill this program when it is about to make a step for the ``times``-th time."""
    made, calls = getattr(AsyncSend, step), count(1)

    def counted(*arguments: Any) -> Any:
        if next(calls) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(*arguments)

    setattr(AsyncSend, step, counted)


if __name__ == "__main__":
    end_before(sys.argv[2], int(sys.argv[3]))
    send_all(Path(sys.argv[1]))
