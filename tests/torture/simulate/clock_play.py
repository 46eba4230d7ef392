"""Machines whose clocks differ send to a FIFO topic, race to prepare, and resume what was given up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa

from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import on_a_machine
from tests.support.half_batches import another, decide_one, pending, prepare_one, split
from tests.support.inside import Change, HalfHeader, HalfRecord, HalfWriter, Who, batch_name
from tests.torture.judge.anomalies import Anomaly, Rules, find_anomalies
from tests.torture.judge.history import FINAL, History, Kind, Phase, payload_hash
from tests.torture.judge.observation import READ_COLUMNS, note_messages, note_tables

TOPIC = "fifo"
AHEAD_S = (-30.0, -0.1, 0.0, 0.1, 30.0)
"""All of them within the bound that a commit log allows."""


def play_clocks(seed: int) -> list[Anomaly]:
    """What a reader sees at the end is in the order in which it was prepared or resumed, whatever the clocks say."""
    return _Play(random.Random(seed)).play()


class _Play:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.history, self.log = chance, History(), InMemoryCommitLog()
        self.log.create_topic(TOPIC, 1, fifo=True)
        self.sent: dict[str, int] = {}  # messages of a key
        self.given_up: list[tuple[HalfRecord, str]] = []
        self.open: list[HalfRecord] = []

    def play(self) -> list[Anomaly]:
        for number in range(self.chance.choice((2, 3, 4, 5))):
            self.send(f"app{number}", (lambda n=number: self.send(f"other{n}")) if self.chance.random() < 0.3 else None)
            if self.given_up and self.chance.random() < 0.5:
                self.resume()
                if self.chance.random() < 0.5:
                    self.runtime().engine.ledger.mark()
        while self.given_up:
            self.resume()
        for record in self.chance.sample(self.open, len(self.open)):
            log = self.runtime()
            some, others = split(pending(log, record), self.chance.choice((1, 2)))
            for rows in (some, others) if record.header.transaction_per == "message" else (pending(log, record),):
                decide_one(log.engine, record, 1, commit=rows, rollback={}, who=Who.EXECUTE)
        log = another(self.log)
        half, op = (
            table.read(table.actions()["path"].to_pylist()) for table in (log.engine.half.table, log.engine.op_table)
        )
        note_tables(self.history, half, op)
        self.history.note(Kind.END)
        note_messages(self.history, Kind.READ, "final", FINAL, self.log.read(TOPIC, columns=READ_COLUMNS))
        return find_anomalies(self.history, Rules(fifo=frozenset({TOPIC}), numbered_when_reopened=True))

    def runtime(self) -> InMemoryCommitLog:
        return on_a_machine(self.log, self.chance.choice(AHEAD_S))

    def send(self, app: str, faster: Callable[[], None] | None = None) -> None:
        """Prepare one or two messages of a key; ``faster`` comes before the first try of the prepare."""
        log = self.runtime()
        per = self.chance.choice(("batch", "message"))
        key = self.chance.choice("xy")
        header = HalfHeader(batch_name(app, 0), app, 0, None, None, None, per, "group")
        writer = HalfWriter(header, log.topics(), TOPIC, None, log.fifo_topics())
        bodies = [f"{header.half_id}.{row}" for row in range(self.chance.choice((1, 2)))]
        files = log.engine.stage(writer, pa.table({"body": bodies, "sharding_key": [key] * len(bodies)}).to_batches())
        table = log.engine.half.table
        commit, others = table.try_commit, [faster] if faster else []  # type: ignore[attr-defined]

        def slowly(change: Change) -> bool:
            if others:
                others.pop()()
            return bool(commit(change))

        table.try_commit = slowly  # type: ignore[attr-defined]
        record = prepare_one(log.engine, header, files)
        if self.chance.random() < 0.3:
            log.engine.ledger.quarantine(record, 1, pending(log, record), Who.ADMIN, "nobody knows")
            self.given_up.append((record, key))
        else:
            self.note(record, key)

    def resume(self) -> None:
        """Make something pending again: from now on it counts as sent."""
        record, key = self.given_up.pop(self.chance.randrange(len(self.given_up)))
        self.runtime().resume(record.half_id)
        self.note(record, key)

    def note(self, record: HalfRecord, key: str) -> None:
        self.open.append(record)
        for row in range(record.rows):
            self.history.note(
                Kind.SEND, Phase.BEGIN, "producer", half_id=record.half_id, key=key, topic=TOPIC,
                payload=payload_hash(f"{record.half_id}.{row}".encode()), sequence=self.sent.get(key, 0),
            )  # fmt: skip
            self.sent[key] = self.sent.get(key, 0) + 1
