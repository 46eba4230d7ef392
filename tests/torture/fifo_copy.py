"""A small placer for FIFO topics, after DESIGN.md, until the product has its own; with the bug that it must not have.

While an earlier message of a key is undecided, a later committed one of that key is decided, but not placed, and with
it the rest of its transaction; whoever settles the blocker places it in the same commit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.torture.anomalies import Anomaly, Rules, find_anomalies
from tests.torture.history import FINAL, Event, History, Kind, Phase

TOPIC = "fifo"


@dataclass
class _Sent:
    """A message, and its place when it has one."""

    half_id: str
    row: int
    key: str
    sequence: int
    verdict: str | None = None
    offset: int | None = None

    @property
    def payload(self) -> str:
        return f"{self.half_id}.{self.row}"


@dataclass
class Placer:
    """One queue of a FIFO topic."""

    holds: bool
    history: History
    messages: list[_Sent] = field(default_factory=list)
    version: int = 0
    tail: int = 0

    def send(self, half_id: str, keys: list[str]) -> None:
        for row, key in enumerate(keys):
            sequence = sum(m.key == key for m in self.messages)
            message = _Sent(half_id, row, key, sequence)
            self.messages.append(message)
            self.history.note(Kind.SEND, Phase.BEGIN, "producer", half_id=half_id, payload=message.payload, key=key,
                              sequence=sequence, topic=TOPIC)  # fmt: skip
            self.history.note(Kind.HALF_ROW, half_id=half_id, address=f"0.{row}", payload=message.payload,
                              topic=TOPIC, transaction_id=f"{half_id}:1")  # fmt: skip

    def decide(self, half_id: str, verdict: str) -> None:
        """Settle a half batch, and place what waited for it."""
        self.version += 1
        for message in self.messages:
            if message.half_id == half_id:
                message.verdict = verdict
                if verdict == "rollback" or not self._free(message.half_id):
                    self._mark(verdict, message)
        for message in self.messages:  # in send order
            if message.verdict == "commit" and message.offset is None and self._free(message.half_id):
                message.offset, self.tail = self.tail, self.tail + 1
                self._mark("commit" if message.half_id == half_id else "place", message)

    def _free(self, half_id: str) -> bool:
        """True when nothing that was sent before with a key of this half batch waits."""
        if not self.holds:
            return True
        mine = [m for m in self.messages if m.half_id == half_id]
        return not any(
            m.key == own.key and m.sequence < own.sequence and m.half_id != half_id and self._waits(m)
            for own in mine
            for m in self.messages
        )

    def _waits(self, message: _Sent) -> bool:
        held = message.verdict == "commit" and message.offset is None and not self._free(message.half_id)
        return message.verdict is None or held

    def _mark(self, op: str, message: _Sent) -> None:
        place = {} if message.offset is None else {"queue_offset": message.offset, "queue_id": 0, "topic": TOPIC}
        self.history.note(Kind.MARKER, op=op, who="check", half_id=message.half_id, address=f"0.{message.row}",
                          attempt=1, version=self.version, operation=f"commit {self.version}", **place)  # fmt: skip


def play_fifo(seed: int, holds: bool) -> list[Anomaly]:
    """Half batches of some keys, decided in any order; what a reader sees at the end is in the order they were sent."""
    chance = random.Random(seed)
    placer = Placer(holds, History())
    half_ids = [f"app:{i}" for i in range(chance.choice((2, 3, 4)))]
    for half_id in half_ids:
        placer.send(half_id, [chance.choice("xyz") for _ in range(chance.choice((1, 2, 3)))])
    for half_id in chance.sample(half_ids, len(half_ids)):
        placer.decide(half_id, chance.choice(("commit", "commit", "rollback")))
    placer.history.note(Kind.END)
    for message in placer.messages:
        if message.offset is not None:
            placer.history.append(
                Event(Kind.READ, Phase.OK, "final", half_id=message.half_id, transaction_id=f"{message.half_id}:1",
                      payload=message.payload, topic=TOPIC, queue_id=0, queue_offset=message.offset, operation=FINAL)
            )  # fmt: skip
    return find_anomalies(placer.history, Rules(fifo=frozenset({TOPIC})))
