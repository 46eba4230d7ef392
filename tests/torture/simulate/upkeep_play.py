"""Upkeep and checks, now and then by a clock that is days ahead for a few rounds; what is young must stay."""

from __future__ import annotations

import random
import time

from rmq_spark import CheckService
from rmq_spark._core.vocabulary.options import FILE_RESERVED_TIME_S
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import another, bodies, commit, send
from tests.support.inside import BELIEVED_S, IDEMPOTENCY_S, LOOK_INTERVAL_S, RowState, Runtime
from tests.torture.judge.anomalies import Anomaly, AnomalyKind

TOPIC = "orders"
DAY_S = 86_400.0
KEPT_S = 7 * DAY_S
STEPS = 6
PASSES_S = (60.0, 600.0, 3600.0, DAY_S / 2, 2 * DAY_S)
AHEAD_S = (3600.0 * 5, DAY_S * 4, DAY_S * 8, DAY_S * 400)


def play_upkeep(seed: int) -> list[Anomaly]:
    """Nothing is expired, quarantined or forgotten before its time by more than what a clock is believed."""
    return _Play(random.Random(seed)).play()


class _Wrong(Runtime):
    """A clock that may be ahead of the true time."""

    def __init__(self) -> None:
        self.true_s, self.ahead_s = time.time(), 0.0

    def time(self) -> float:
        self.true_s += 0.005
        return self.true_s + self.ahead_s

    def monotonic(self) -> float:
        return self.true_s


class _Play:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.runtime = chance, _Wrong()
        self.log = InMemoryCommitLog(topics={TOPIC: 1}, runtime=self.runtime)
        self.log.set_retention(TOPIC, "7d")
        self.sent_s: dict[str, float] = {}  # by key, in true time
        self.open_s: dict[str, float] = {}
        self.found: list[Anomaly] = []

    def play(self) -> list[Anomaly]:
        for number in range(STEPS):
            self.runtime.true_s += self.chance.choice(PASSES_S)
            what = self.chance.choice((self.send, self.leave_open, self.keep_up, self.keep_up_ahead))
            what(f"key{number}")
        self.keep_up_ahead("")
        return self.found

    def send(self, key: str) -> None:
        commit(self.log, send(self.log, key, 1))
        self.log.drain()
        self.sent_s[key] = self.runtime.true_s

    def leave_open(self, key: str) -> None:
        send(self.log, key, 1)
        self.open_s[key] = self.runtime.true_s

    def keep_up(self, key: str) -> None:
        """A round of a check job."""
        CheckService(another(self.log), {}, transaction_check_max=1).run_once()
        another(self.log).maintain()

    def keep_up_ahead(self, key: str) -> None:
        """Some rounds by a clock that is ahead for less than the interval; then it is right again."""
        self.runtime.ahead_s = self.chance.choice(AHEAD_S)
        for _ in range(self.chance.choice((1, 2, 3))):
            self.keep_up(key)
            self.runtime.true_s += LOOK_INTERVAL_S / 4
        self.runtime.ahead_s = 0.0
        self.look()
        self.keep_up(key)

    def look(self) -> None:
        log, now_s = another(self.log), self.runtime.true_s
        visible = set(bodies(log, TOPIC))
        for key, at_s in self.sent_s.items():
            age_s = now_s - at_s
            if age_s < KEPT_S - BELIEVED_S and f"{key}.0" not in visible:
                self.found.append(Anomaly(AnomalyKind.EXPIRED_EARLY, f"{key} is gone after {age_s:.0f} s"))
            if age_s < IDEMPOTENCY_S - BELIEVED_S and log.engine.find(key, 0) is None:  # a retry would be a second send
                self.found.append(Anomaly(AnomalyKind.DUPLICATE, f"{key} is forgotten after {age_s:.0f} s"))
        for key, at_s in self.open_s.items():
            age_s, state = now_s - at_s, log.engine.state_of(log.engine.get(f"{key}:0"))
            if age_s < FILE_RESERVED_TIME_S - BELIEVED_S and state.count(RowState.QUARANTINED):
                sentence = f"{key} is quarantined after {age_s:.0f} s"
                self.found.append(Anomaly(AnomalyKind.DISCARDED_WITHOUT_CHECK, sentence))
