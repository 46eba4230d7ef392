"""The check service in tests: on a clock that is set, not waited for, and what its rounds made of a half batch."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Any

from rmq_spark import COMMIT_MESSAGE, CheckService, CommitLog, TransactionListener
from rmq_spark.checks import CheckReport
from tests.support.half_batches import pending
from tests.support.inside import HalfRecord, RowState
from tests.support.listeners import Scripted

DEADLINE_S = 20.0
"""What takes longer hangs."""


class Clock:
    """A time that stands still until it is set."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def set(self, record: HalfRecord, age_s: float) -> Clock:
        self.now = record.prepared_at + timedelta(seconds=age_s)
        return self

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def later(seconds: float = 60.0) -> Clock:
    """A clock that is so much ahead: everything that was prepared is old."""
    return Clock(datetime.now(timezone.utc) + timedelta(seconds=seconds))


def service(log: CommitLog, listener: TransactionListener, clock: Clock | None = None, **settings: Any) -> CheckService:
    """A service that asks this listener about what ``half_batches.prepare`` wrote, and finds it old."""
    return CheckService(log, {"group": listener}, clock=clock or later(), **settings)


def check(log: CommitLog, answer: Any, clock: Clock | None = None, **settings: Any) -> CheckReport:
    """One round, in which the listener has this answer to each question: see :class:`Scripted`."""
    return service(log, Scripted(check=answer), clock, **settings).run_once()


def states(log: CommitLog, record: HalfRecord) -> dict[RowState, int]:
    """How many of its rows are in which state."""
    state = log.engine.state_of(record)
    return {s: n for s in RowState if (n := state.count(s))}


def check_times(log: CommitLog, record: HalfRecord) -> int:
    """How often the pending rows were checked."""
    return log.engine.state_of(record).check_times(pending(log, record))


class Hangs:
    """An answer that does not come before it may."""

    def __init__(self, answer: Any = COMMIT_MESSAGE) -> None:
        self.answer, self.asked, self.may_come = answer, threading.Event(), threading.Event()

    def __call__(self, *_: object) -> Any:
        self.asked.set()
        self.may_come.wait(DEADLINE_S)
        return self.answer

    def let_come(self) -> None:
        """Let the answer come, and wait until the service has it: when the threads in which it asks have ended."""
        self.may_come.set()
        for thread in threading.enumerate():
            if thread.name == "txmq-check":
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
