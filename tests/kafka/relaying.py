"""A program that hands a commit log over to Kafka, and dies at a named point: ``relaying <JSON>``.

A point is a step of the protocol, and a process dies there by SIGKILL. ``nth`` counts the times it comes there.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from rmq_spark import KafkaRelay
from rmq_spark._core.runtime.failpoints import set_hook

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

    def __call__(self, point: str, step: str = "", **known: object) -> None:
        """The relay comes to a failpoint."""
        if point != "relay step":
            return
        if not self.started:
            self.reach({"opened": "initialized", "delivered": "claimed", "committed": "claim committed"}.get(step, ""))
            self.started = step == "committed"
            return
        if step == "sent":
            self.sends += 1
            step = "produced" if self.sends % 2 else "positions sent"
        self.reach(step)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    if told["point"]:
        set_hook(Fate(told["point"], told["nth"]))
    with KafkaRelay(told["log"], told["servers"], **told["options"]) as relay:
        print(relay.run_once())
