"""Members of a group of which each is killed at some line, while their messages fail, are sent back and come again."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pyarrow as pa

import rmq_spark
from rmq_spark import CheckService
from rmq_spark._core.consumers.push import CONCURRENTLY, ORDERLY
from tests.support.consumers import DONE, LATER, Steps, memory_log, push, send
from tests.support.half_batches import let_leave
from tests.support.inside import (
    ORIGIN_MESSAGE_ID,
    RECONSUME_TIME,
    CommitOncePrepared,
    TwoPhase,
    dlq_topic,
    retry_topic,
    stripping,
)
from tests.torture.judge.anomalies import Anomaly, AnomalyKind

GROUP, TOPIC = "points", "orders"
STEPS = 24
ROUNDS_MAX = 120
ALWAYS = 1_000
HERE = Path(rmq_spark.__file__).parent
CONSUMERS = HERE / "_core" / "consumers"
LINES: Mapping[tuple[Path, ...], range] = {
    (CONSUMERS / "own_messages.py",): range(25, 65),  # most takes are prepared and not decided there
    (CONSUMERS / "send_back.py", CONSUMERS / "own_messages.py"): range(1, 80),
    (CONSUMERS,): range(1, 600),
    (HERE,): range(1, 8_000),
}
"""Where a member is killed: in which files, and after how many of their lines."""
assert all(path.exists() for paths in LINES for path in paths)


class Killed(BaseException):
    """The member's process ends at this line."""


class Stuck(BaseException):
    """What failed could not be sent back, although the store answers."""


def play_retries(seed: int) -> list[Anomaly]:
    """No retry and no dead letter is lost or doubled, whoever dies at whatever line, and however takes are cut."""
    with patch.multiple(stripping, STRIPPED_BYTES_MIN=1, STRIPPED_SHARE_MIN=0.1):
        return _Play(random.Random(seed)).play()


@contextmanager
def _killed_at(count: int, files: tuple[Path, ...]) -> Iterator[None]:
    """End what runs at the so manieth line of some files. What it still does on its way out does not count."""
    left = count
    prefixes = tuple(map(str, files))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(prefixes):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except BaseException:
        if left > 0:
            raise
    finally:
        sys.settrace(before)


class _Numbering(Steps):
    """Ids that are the same whenever a seed is played."""

    def __init__(self) -> None:
        super().__init__()
        self._serial = 0

    def unique_id(self) -> str:
        self._serial += 1
        return f"{self._serial:08x}{0:024x}"


class _Play:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.runtime = chance, _Numbering()
        self.queues = chance.choice((1, 1, 2))
        self.log = memory_log(self.runtime, **{TOPIC: self.queues})
        for topic in (retry_topic(GROUP), dlq_topic(GROUP)):
            self.log.engine.create_own_topic(topic)
        self.max = chance.choice((0, 1, 2))
        self.delay = chance.choice((1, None, None))
        # By message: how often it fails; None: nobody knows before.
        self.failures: dict[str, int | None] = {}
        self.done: set[str] = set()
        self.dead_before = 0  # letters of before the last reset
        self.resets = 0
        self.asleep: list[tuple[Any, Any]] = []  # members that others take for dead, with their takes
        self.found: list[Anomaly] = []

    def play(self) -> list[Anomaly]:
        self.send()
        try:
            for _ in range(STEPS):
                step = self.chance.choice(
                    ("member",) * 8 + ("time",) * 4 + ("upkeep",) * 4 + ("send", "send", "sleeper", "wake", "reset")
                )
                getattr(self, step)()
            self.failures = {body: count or 0 for body, count in self.failures.items()}
            while self.asleep:
                self.wake()
            self.finish()
        except Stuck as problem:
            self.say(AnomalyKind.STUCK_HALF, f"what failed is not sent back: {problem}")
        else:
            self.look()
        return self.found

    # ------------------------------------------------------------------ steps
    def send(self) -> None:
        bodies = [f"m{len(self.failures) + n}" for n in range(self.chance.choice((1, 2, 3)))]
        for body in bodies:
            self.failures[body] = self.chance.choice((0, 1, 2, ALWAYS, ALWAYS, None))
        send(self.log, bodies, queue_id=[self.chance.randrange(self.queues) for _ in bodies])

    def fails(self, body: str, times: int) -> bool:
        count = self.failures[body]
        return self.chance.random() < 0.5 if count is None else times < count

    def joins(self, calm: bool = False) -> Any:
        """A new member, with what it can be set up to."""
        mode = ORDERLY if not calm and self.chance.random() < 0.15 else CONCURRENTLY
        good, bad = DONE, LATER

        def listen(messages: pa.Table) -> Any:
            answers = []
            for body, times in zip(*(messages[name].to_pylist() for name in ("body", "reconsume_times")), strict=True):
                failed = self.fails(body.decode(), times)
                if mode == ORDERLY and (answers and answers[-1] is bad):
                    failed = True  # it is not consumed: the queue has stopped before it
                if not failed:
                    self.done.add(body.decode())
                answers.append(bad if failed else good)
            return answers

        rows = self.chance.choice((1, 2, 3, None))
        member = push(self.log, listen, mode=mode, consume_message_batch_max_size=rows, max_reconsume_times=self.max,
                      delay_level=self.delay, suspend_s=0)  # fmt: skip
        member.member.note = _stuck
        member._retries.two_phase = TwoPhase(member.member.engine, CommitOncePrepared())
        member.member.join()
        return member

    def member(self) -> None:
        """A member consumes, writes progress perhaps, and dies or leaves."""
        member = self.joins()
        files = self.chance.choice([*LINES][:2] * 2 + [*LINES])
        with _killed_at(self.chance.choice(LINES[files]), files):
            for _ in range(self.chance.choice((1, 2, 8))):
                member.member.fetch()
                member.work()
            if self.chance.random() < 0.3:
                member.member.leave()
        self.is_gone(member)
        if self.chance.random() < 0.2:
            self.person()
            self.let_leave()

    def sleeper(self) -> None:
        """A member takes messages, and stands still until others have its queues."""
        member = self.joins()
        member.member.fetch()
        with member.member.changed:
            take = member._take()
        if take is not None:
            self.asleep.append((member, take))
        self.is_gone(member)

    def wake(self) -> None:
        if self.asleep:
            member, take = self.asleep.pop(self.chance.randrange(len(self.asleep)))
            member.consume(take)

    def is_gone(self, member: Any) -> None:
        """Its lease is over: its queues are free."""
        self.log.another().engine.groups.hand_over(GROUP, "the lease is over")
        member.member._members.leave()

    def time(self) -> None:
        self.runtime.sleep(self.chance.choice((2, 10, 30)))
        self.log.another().engine.ledger.place_due()

    def upkeep(self) -> None:
        if self.chance.random() < 0.3:
            CheckService(self.log.another(), listeners={}).run_once()
        elif self.chance.random() < 0.8:
            self.person()
        self.let_leave()

    def let_leave(self) -> None:
        """Upkeep, perhaps after the time for which names are remembered: a member that slept for so long has none."""
        forgets = not self.asleep and self.chance.random() < 0.5
        let_leave(self.log, idempotency_s=0 if forgets else 1e9)

    def person(self) -> None:
        """Somebody settles one of those half batches that the dead have left open, before any check does."""
        log = self.log.another()
        opened = [half_id for half_id in log.engine.open_half_ids() if half_id.startswith("back.")]
        for half_id in opened[:1]:
            log.resolve(half_id, rmq_spark.COMMIT_MESSAGE, "it may go out")
            self.runtime.sleep(30)
            log.engine.ledger.place_due()

    def reset(self) -> None:
        """The group begins anew: what it has done and given up counts no more."""
        if self.chance.random() < 0.2 and self.max:
            topics = self.chance.choice(([TOPIC], [TOPIC, retry_topic(GROUP)]))
            rmq_spark.ConsumerGroup(self.log.another(), GROUP).reset("earliest", topics)
            self.done.clear()
            self.dead_before = len(self.sent_back()[1])
            self.resets += 1

    # ------------------------------------------------------------------ the end
    def finish(self) -> None:
        """Members that nobody kills consume until nothing is left."""
        for _ in range(ROUNDS_MAX):
            member = self.joins(calm=True)
            while member.member.fetch() or member.work():
                pass
            member.member.leave()
            self.runtime.sleep(30)
            log = self.log.another()
            CheckService(log, listeners={}).run_once()
            log.engine.ledger.place_due()
            positions, tails = log.engine.groups.next_offsets(GROUP), log.engine.tails()
            read = (TOPIC, retry_topic(GROUP))
            behind = [queue for queue, end in tails.items() if queue[0] in read and positions.get(queue, 0) < end]
            if not (behind or log.engine.ledger.view.waiting or log.engine.open_half_ids()):
                return
        self.say(AnomalyKind.STUCK_HALF, f"the group does not come to an end: {behind}")

    def sent_back(self) -> tuple[list[tuple[str, int]], list[str]]:
        """The retries that have come, each with its count, and the dead letters, by body."""
        log = self.log.another()
        read = log.read(retry_topic(GROUP), columns=["body", "properties"]).to_pylist()
        retries = [(row["body"].decode(), int(dict(row["properties"])[RECONSUME_TIME])) for row in read]
        assert all(dict(row["properties"])[ORIGIN_MESSAGE_ID] for row in read)
        return retries, [body.decode() for body in log.read(dlq_topic(GROUP), columns=["body"])["body"].to_pylist()]

    def look(self) -> None:
        retries, dead = self.sent_back()
        if not self.resets:
            for what, count in [*Counter(retries).items(), *Counter(dead).items()]:
                if count > 1:
                    self.say(AnomalyKind.DUPLICATE, f"{what} was sent back {count} times")
        for body, count in self.failures.items():
            dies = count is not None and count > self.max
            if body not in dead[self.dead_before :] and (dies or body not in self.done):
                self.say(AnomalyKind.LOST_WRITE, f"{body} is neither consumed nor dead")
        self.look_at_letters(len(dead))

    def look_at_letters(self, count: int) -> None:
        """Somebody sends the dead letters again, and once more when months have passed."""
        letters = rmq_spark.DeadLetters(self.log.another(), GROUP)
        sent = letters.resend()
        for _ in range(3):
            let_leave(self.log, idempotency_s=0)
        again = rmq_spark.DeadLetters(self.log.another(), GROUP).resend()
        if (sent, again) != (count, 0):
            kind = AnomalyKind.DUPLICATE if sent + again > count else AnomalyKind.LOST_WRITE
            self.say(kind, f"of {count} dead letters {sent} were sent again, and {again} of them months later")

    def say(self, kind: AnomalyKind, sentence: str) -> None:
        self.found.append(Anomaly(kind, sentence, ()))


def _stuck(problem: BaseException, what: str) -> None:
    raise Stuck(f"{what}: {type(problem).__name__}: {problem}") from problem
