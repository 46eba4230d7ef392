"""Half batches leave and are forgotten, their keys are used again, and those who sent or checked them wake up."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from rmq_spark.errors import (
    AlreadyPreparedError,
    CorruptLogError,
    HalfBatchLeftError,
    StaleAttemptError,
    VerdictConflictError,
)
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import Ticking
from tests.support.half_batches import another, bodies, decide_one, let_leave, move_half, send
from tests.support.inside import HalfRecord, RowState, Who, half_header
from tests.torture.judge.anomalies import Anomaly, AnomalyKind

TOPIC = "orders"
ROWS_OF = {"a": 1, "b": 2}
"""By key: who sends again sends the same."""
STEPS = 50
FOREVER_S = 1e9


@dataclass
class _Sent:
    """A half batch, and what became of it; None while it is open."""

    record: HalfRecord
    bodies: list[str]
    verdict: str | None = None


def play_sleepers(seed: int) -> list[Anomaly]:
    """The first verdict on a half batch stands, whoever says another one later, and under whatever name."""
    return _Play(random.Random(seed)).play()


class _Play:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.log = chance, InMemoryCommitLog(topics={TOPIC: 1}, runtime=Ticking(time.time(), 0.005))
        self.sent: list[_Sent] = []
        self.found: list[Anomaly] = []

    def play(self) -> list[Anomaly]:
        for _ in range(STEPS):
            step = self.chance.choice(
                ("send", "send", "decide", "decide", "wake", "wake", "leave", "leave", "leave", "move")
            )
            if step == "send":
                self.send(self.chance.choice(list(ROWS_OF)))
            elif step == "leave":
                let_leave(self.log, idempotency_s=self.chance.choice((0, 0, FOREVER_S)))
            elif step == "move":
                if another(self.log).engine.half.table.actions().num_rows:
                    move_half(self.log)
            elif self.sent:
                self.decide(self.chance.choice(self.sent[-2:] if step == "decide" else self.sent))
        self.look()
        return self.found

    def send(self, key: str) -> None:
        rows = ROWS_OF[key]
        with suppress(AlreadyPreparedError):
            half_id = half_header.new_half_id(key, 0)
            record = send(another(self.log), key, rows, names=f"{key}-{len(self.sent)}", half_id=half_id)
            self.sent.append(_Sent(record, [f"{key}-{len(self.sent)}.{i}" for i in range(rows)]))

    def decide(self, sent: _Sent) -> None:
        """Whoever has the record says what it thinks, after a lease perhaps."""
        log, record = another(self.log), sent.record
        verdict = self.chance.choice(("commit", "rollback"))
        if self.chance.random() < 0.5:
            log.engine.ledger.lease([record], 60.0)
        rows = record.fresh_state().rows_in((RowState.PENDING,))
        try:
            decide_one(log.engine, record, 1, **{verdict: rows}, who=self.chance.choice((Who.EXECUTE, Who.CHECK)))
        except (HalfBatchLeftError, StaleAttemptError, VerdictConflictError):
            if sent.verdict is None:
                self.say(AnomalyKind.LOST_WRITE, f"the first verdict on {record.half_id} was refused")
            return
        if sent.verdict not in (None, verdict):
            self.say(AnomalyKind.OUTCOME_CHANGED, f"{record.half_id} has two verdicts")
        sent.verdict = verdict

    def look(self) -> None:
        """Readers see what was committed, once, before and after all is drained."""
        expected = Counter(body for sent in self.sent if sent.verdict == "commit" for body in sent.bodies)
        for drain in (False, True):
            try:
                if drain:
                    self.log.drain()
                found = Counter(bodies(another(self.log)))
            except CorruptLogError as problem:
                self.say(AnomalyKind.LOST_WRITE, str(problem))
                continue
            if lost := expected - found:
                self.say(AnomalyKind.LOST_WRITE, f"nobody sees {sorted(lost)}")
            for body in sorted((found - expected).keys()):
                twice = body in expected
                kind = AnomalyKind.DUPLICATE if twice else AnomalyKind.ABORTED_READ
                self.say(kind, f"{body} is visible{' twice' if twice else ''}")

    def say(self, kind: AnomalyKind, sentence: str) -> None:
        self.found.append(Anomaly(kind, sentence, ()))
