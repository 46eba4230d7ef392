"""Sends from what Python may call between any two lines of ours: ``__del__`` while the collector runs, a weakref's
callback, a signal handler."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark.errors import OptionError
from tests.support import seeds
from tests.support.limits import set_limits
from tests.support.listeners import Scripted
from tests.support.sends import message, producer_of

pytestmark = pytest.mark.log("memory", orders=1)

DEADLINE_S = 20.0
ONE_OF = 1 if seeds.ALL else 12
"""Of so many moments one is tried; the seed says which."""
PRODUCT = str(Path(txmq.__file__).parent)
SENDING = (
    "_core/protocol/group_commit.py", "_core/producer/async_send.py", "_core/producer/future.py",
    "_core/producer/producer.py", "_core/producer/send_threads.py", "_core/producer/admission.py",
    "_core/protocol/leases.py", "_core/runtime/pools.py",
    "_core/runtime/runtime.py", "_core/runtime/forks.py",
)  # fmt: skip
"""What a send goes through, and what has its locks."""

LOCKING = (
    "_core/protocol/group_commit.py",
    "_core/producer/future.py",
    "_core/producer/admission.py",
    "_core/runtime/pools.py",
)
AGAIN = ("_next_group", "_take_group", "_gets_more", "_work_off")
"""What comes to another end the second time: then nothing is left to do."""
TIMES = 4

Line = tuple[CodeType, int]


class Interrupts:
    """Calls a function before one line of the product, when a thread comes there the n-th time."""

    def __init__(self, at: Line | None, times: int, call: Callable[[], object], files: Sequence[str]) -> None:
        self.at, self.times, self.call = at, times, call
        self.files = tuple(f"{PRODUCT}/{file}" for file in files)
        self.lines: Counter[Line] = Counter()
        self.came = False

    def __enter__(self) -> Interrupts:
        self._before = (sys.gettrace(), threading.gettrace())
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before[0])
        threading.settrace(self._before[1])

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._inside if frame.f_code.co_filename in self.files else None

    def _inside(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = (frame.f_code, frame.f_lineno)
            self.lines[line] += 1
            if line == self.at and self.lines[line] >= self.times and not self.came:
                self.came = True
                self.call()  # Python traces nothing in here
        return self._inside


def sends(producer: txmq.TransactionMQProducer, way: str, body: str) -> Any:
    if way == "plainly":
        return producer.send_async(message(body))
    key = body.replace(" ", "-") if way == "with a key" else None
    return producer.send_message_in_transaction_async(message(body), idempotency_key=key)


def interrupted(
    log: CommitLog,
    way: str,
    at: Line | None = None,
    times: int = 1,
    waits: bool = False,
    files: Sequence[str] = SENDING,
) -> Interrupts:
    """One send, with another one before a line of it; both are sent, and the producer closes.

    Parameters
    ----------
    waits : bool
        The other one waits, or is refused since it would wait for ever.
    """
    within: list[Any] = []
    producer = producer_of(log, Scripted(check=txmq.UNKNOWN), max_in_flight=1, listener_threads=1).start()
    went_well = threading.Event()
    before = log.engine.tails().get(("orders", 0), 0)

    def send_within() -> None:
        with suppress(OptionError):  # or the producer is closed by then. What __del__ raises, Python ignores
            body = f"within {before}"
            within.append(producer.send(message(body)) if waits else sends(producer, way, body))

    def work() -> None:
        with Interrupts(at, times, send_within, files) as found:
            sent = sends(producer, way, f"first {before}")
            sent.add_done_callback(lambda _: None)
            sent.result(DEADLINE_S)
        interrupts.append(found)
        for other in within if not waits else ():
            other.result(DEADLINE_S)
        producer.shutdown()
        went_well.set()

    interrupts: list[Interrupts] = []
    sender = threading.Thread(target=work, daemon=True)
    sender.start()
    sender.join(2 * DEADLINE_S)
    assert went_well.is_set(), None if at is None else f"{at[0].co_filename}:{at[1]} {at[0].co_name}"
    assert log.engine.tails()["orders", 0] == before + 1 + len(within)
    return interrupts[0]


@pytest.fixture(autouse=True)
def _closes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long each of the producers takes to close."""
    set_limits(monkeypatch, POOLS_LINGER_S=0.001, LEASES_LINGER_S=0.001, GATHER_S_MAX=0.002)


def test_a_send_before_any_line_of_another_one_is_sent(log: CommitLog) -> None:
    """Where the queue of commits had just found nothing left, it waited for the next send, and at exit for ever. Where
    the other one had taken the last room, or the lock of its future, both waited for ever."""
    known: set[Line] = set()
    for way in ("plainly", "in a transaction", "with a key"):
        lines = dict(interrupted(log, way).lines)  # a thread may end later, and its lines come then
        new = {line: min(n, TIMES if line[0].co_name in AGAIN else 1) for line, n in lines.items() if line not in known}
        known |= new.keys()
        moments = [(line, n + 1) for line, times in new.items() for n in range(times)]
        tried = moments[seeds.first_seed() % ONE_OF :: ONE_OF]
        reached = sum(interrupted(log, way, line, n).came for line, n in tried)
        assert reached > 0.6 * len(tried) > 0, way
        assert len(moments) > 40


def test_a_send_that_waits_before_any_line_that_may_have_a_lock_is_sent_or_refused(log: CommitLog) -> None:
    """The end of the other send needed that lock, so both waited for ever."""
    way = "in a transaction"
    lines = list(interrupted(log, way, files=LOCKING).lines)
    tried = lines[seeds.first_seed() % ONE_OF :: ONE_OF]
    reached = sum(interrupted(log, way, line, waits=True, files=LOCKING).came for line in tried)
    assert reached > 0.6 * len(tried) > 0
    assert len(lines) > 80
