"""A program that hands a commit log over to Kafka, and dies at a named point: ``relaying <JSON>``.

A point is a step of the protocol, and a process dies there by SIGKILL. ``nth`` counts the times it comes there.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from typing import Any

from rmq_spark import KafkaRelay
from tests.support.inside import Brokers, Start, Transactions

AT_START = ("initialized", "claimed", "claim committed")
HANDING_OVER = ("begun", "produced", "positions sent", "delivered", "committed")


class Fate:
    """Where this process dies."""

    def __init__(self, point: str, nth: int) -> None:
        self.point, self.left, self.started, self.sends = point, nth, False, 0

    def reach(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def step(self, at_start: str, later: str) -> None:
        self.reach(later if self.started else at_start)

    def sent(self) -> None:
        self.sends += 1
        self.step("", "produced" if self.sends % 2 else "positions sent")

    def begun(self) -> None:
        self.started, self.sends = True, 0


def arm(fate: Fate) -> None:
    after(Transactions, "open", lambda: fate.reach("initialized"))
    after(Brokers, "stored", lambda: None, before=lambda **options: fate.reach("claimed" if "end" in options else ""))
    after(Start, "run", fate.begun)
    after(Transactions, "begin", lambda: fate.step("", "begun"))
    after(Transactions, "send", fate.sent)
    after(Transactions, "deliver", lambda: fate.step("", "delivered"))
    after(Transactions, "commit", lambda: fate.step("claim committed", "committed"))


def after(owner: Any, name: str, done: Any, before: Any = lambda **options: None) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        before(**options)
        result = inner(*arguments, **options)
        done()
        return result

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    if told["point"]:
        arm(Fate(told["point"], told["nth"]))
    with KafkaRelay(told["log"], told["servers"], **told["options"]) as relay:
        print(relay.run_once())
