"""FIFO topics and delayed messages: what waits, what it waits for, and where it stands in the end."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import settings

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import set_clock
from tests.support.half_batches import (
    another,
    bodies,
    commit,
    decide_one,
    merge_op_files,
    open_batches,
    pending,
    prepare,
    roll_back,
)
from tests.support.inside import HalfRecord, RowSet, RowState, Who
from tests.support.sends import message, producer_of

COMMIT, ROLLBACK = txmq.LocalTransactionState.COMMIT_MESSAGE, txmq.LocalTransactionState.ROLLBACK_MESSAGE
SEEDS = settings.default.max_examples // 5


pytestmark = pytest.mark.log("memory", "delta", plain=1)


@pytest.fixture
def log(log: CommitLog) -> CommitLog:
    """With a FIFO topic of one queue."""
    log.create_topic("orders", 1, fifo=True)
    return log


def send(log: CommitLog, batch_id: int, *keys: str) -> HalfRecord:
    return prepare(log, batch_id, {"body": [f"app.{batch_id}.{i}" for i in range(len(keys))], "sharding_key": keys})


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


# ---------------------------------------------------------------- FIFO topics


def test_other_keys_go_on(log: CommitLog) -> None:
    first, second = send(log, 0, "a"), send(log, 1, "b")
    commit(log, second)
    assert bodies(log) == ["app.1.0"]
    commit(log, first)
    assert bodies(log) == ["app.1.0", "app.0.0"]


def test_a_message_waits_for_an_earlier_one_of_its_key_and_the_rest_of_its_transaction_too(log: CommitLog) -> None:
    first, second = send(log, 0, "a"), send(log, 1, "b", "a")
    third = send(log, 2, "b")
    assert commit(log, second) == []
    assert log.engine.state_of(second).count(RowState.WAITING) == 2
    commit(log, third)  # waits for the b of the second
    assert bodies(log) == []
    commit(log, first)
    assert bodies(log) == ["app.0.0", "app.1.0", "app.1.1", "app.2.0"]


def test_messages_to_other_topics_wait_with_their_transaction(log: CommitLog) -> None:
    first = send(log, 0, "a")
    columns = {"body": ["f", "p"], "sharding_key": ["a", "a"], "topic": ["orders", "plain"]}
    both = prepare(log, 1, columns, topic=None)
    commit(log, both)
    assert bodies(log, "plain") == []
    roll_back(log, first)
    assert (bodies(log), bodies(log, "plain")) == (["f"], ["p"])


@pytest.mark.parametrize("settle", ["roll_back", "quarantine", "resolve"])
def test_whoever_settles_the_blocker_releases(log: CommitLog, settle: str) -> None:
    first, second = send(log, 0, "a"), send(log, 1, "a")
    commit(log, second)
    if settle == "roll_back":
        roll_back(log, first, who=Who.CHECK)
    elif settle == "quarantine":
        log.engine.ledger.quarantine(first, 1, pending(log, first), Who.DISCARD, "too old")
    else:
        log.resolve(first.half_id, ROLLBACK, "a person said so")
    assert bodies(log) == ["app.1.0"]


def test_a_message_that_is_reopened_again_is_sent_when_it_is_reopened_last(log: CommitLog) -> None:
    first = send(log, 0, "a")
    for attempt in (1, 2):
        roll_back(log, first, attempt, who=Who.CHECK)
        second = send(log, attempt, "a")
        time.sleep(0.005)  # prepare times and reopen times are in ms
        log.engine.ledger.reopen(first, attempt, (RowState.ROLLED_BACK_BY_CHECK,), attempt + 1, Who.EXECUTE, "again")
        time.sleep(0.005)
        commit(log, second)
    assert bodies(log) == ["app.1.0", "app.2.0"]
    commit(log, first, 3)
    assert bodies(log) == ["app.1.0", "app.2.0", "app.0.0"]


def test_a_reopened_message_is_sent_when_it_is_reopened(log: CommitLog) -> None:
    first, second = send(log, 0, "a"), send(log, 1, "a")
    roll_back(log, first, who=Who.CHECK)
    log.engine.ledger.reopen(first, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "again")
    commit(log, second)
    assert bodies(log) == ["app.1.0"]  # it was sent before the other was reopened
    time.sleep(0.005)
    third = send(log, 2, "a")
    commit(log, third)
    assert bodies(log) == ["app.1.0"]
    commit(log, first, attempt=2)
    assert bodies(log) == ["app.1.0", "app.0.0", "app.2.0"]


def test_transactions_that_wait_for_each_other_alone_go_together(log: CommitLog) -> None:
    columns = {"body": list("1234"), "sharding_key": list("abab"), "txn": list("xyyx")}
    record = prepare(log, 0, columns, per="key", key="txn")
    decide_one(log.engine, record, 1, commit={0: b"\x01\x00\x00\x01"}, who=Who.EXECUTE)
    assert bodies(log) == []
    decide_one(log.engine, record, 1, commit={0: b"\x00\x01\x01\x00"}, who=Who.CHECK)
    assert bodies(log) == ["1", "2", "3", "4"]


def test_a_topic_stays_what_it_is(log: CommitLog) -> None:
    log.create_topic("orders", 1, fifo=True, exist_ok=True)
    with pytest.raises(txmq.TopicExistsError, match="a FIFO topic"):
        log.create_topic("orders", 1, exist_ok=True)
    assert log.fifo_topics() == {"orders"}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_order_holds_whatever_happens(seed: int) -> None:
    log = InMemoryCommitLog(topics={"plain": 1})
    log.create_topic("orders", 2, fifo=True)
    _Play(random.Random(seed), log).run()


class _Play:
    """Half batches of some keys, settled in any order and in parts; the invariants hold after every step."""

    def __init__(self, chance: random.Random, log: CommitLog) -> None:
        self.chance, self.log = chance, log
        self.sent = 0
        self.rank: dict[str, int] = {}  # body → when it was sent
        self.key: dict[str, str] = {}
        self.transaction: dict[str, str] = {}
        self.pending: set[str] = set()
        self.batches: dict[str, int] = defaultdict(int)

    def run(self) -> None:
        steps = [self.prepare, self.prepare, self.settle, self.settle, self.settle, self.reopen, self.keep_up]
        for _ in range(self.chance.randint(6, 14)):
            self.chance.choice(steps)()
            self.check()
        while self.pending:
            self.settle(whole=True)
            self.check()
        assert not self.log.engine.ledger.view.waiting, "all is decided, and something waits"

    def prepare(self) -> None:
        chance = self.chance
        app, per = chance.choice("pq"), chance.choice(("batch", "message", "key"))
        batch_id = self.batches[app]
        self.batches[app] += 1
        count = chance.randint(1, 5)
        names = [f"{app}{batch_id}.{i}" for i in range(count)]
        keys = [chance.choice("abc") for _ in names]
        owners = [chance.choice("xy") for _ in names]
        topics = ["orders" if chance.random() < 0.8 else "plain" for _ in names]
        columns = {"body": names, "sharding_key": keys, "topic": topics}
        if per == "key":
            columns["owner"] = owners
        time.sleep(0.002)  # prepare times and reopen times are in ms
        prepare(self.log, batch_id, columns, app=app, per=per, key="owner" if per == "key" else None, topic=None,
                partitions=chance.choice((1, 2)))  # fmt: skip
        for name, key, owner, topic in zip(names, keys, owners, topics, strict=True):
            self.rank[name] = self.sent = self.sent + 1
            self.key[name] = f"{topic} {key}"
            fate = {"batch": "", "message": name, "key": owner}[per]
            self.transaction[name] = f"{app}{batch_id} {fate}"
        self.pending.update(names)

    def names(self, record: HalfRecord, rows: Mapping[int, bytes]) -> list[str]:
        return [b.decode() for b in self.log.engine.half.read(record, RowSet(rows), ["body"])["body"].to_pylist()]

    def settle(self, whole: bool = False) -> None:
        found = open_batches(self.log)
        if not found:
            return
        record, state = self.chance.choice(found)
        attempt = self.chance.choice(state.attempts(RowState.PENDING))
        mask = state.rows_in((RowState.PENDING,), attempt)
        fates = {self.transaction[n] for n in self.names(record, mask)}
        chosen = fates if whole else {f for f in fates if self.chance.random() < 0.7}
        picked: dict[int, bytes] = {}
        for n, bits in mask.items():
            names = iter(self.names(record, {n: bits}))
            picked[n] = bytes(1 if b and self.transaction[next(names)] in chosen else 0 for b in bits)
        picked = {n: bits for n, bits in picked.items() if b"\x01" in bits}
        if not picked:
            return
        what = self.chance.choice(("commit", "commit", "commit", "rollback", "check", "quarantine"))
        self.log = self.chance.choice((self.log, another(self.log)))
        if what == "commit":
            decide_one(self.log.engine, record, attempt, commit=picked, rollback={}, who=Who.EXECUTE)
        elif what == "quarantine":
            self.log.engine.ledger.quarantine(record, attempt, picked, Who.DISCARD, "why not")
        else:
            who = Who.CHECK if what == "check" else Who.EXECUTE
            decide_one(self.log.engine, record, attempt, commit={}, rollback=picked, who=who)
        self.pending -= set(self.names(record, picked))

    def reopen(self) -> None:
        half_ids = [f"{app}:{i}" for app, count in self.batches.items() for i in range(count)]
        for half_id in self.chance.sample(half_ids, len(half_ids)):
            record = self.log.engine.get(half_id)
            state = self.log.engine.state_of(record)
            for wanted, step in ((RowState.ROLLED_BACK_BY_CHECK, 1), (RowState.QUARANTINED, 0)):
                for attempt in state.attempts(wanted):
                    time.sleep(0.002)
                    rows = self.log.engine.ledger.reopen(
                        record, attempt, (wanted,), attempt + step, Who.EXECUTE, "again"
                    )
                    time.sleep(0.002)
                    for name in self.names(record, rows):
                        self.rank[name] = self.sent = self.sent + 1
                        self.pending.add(name)
                    return

    def keep_up(self) -> None:
        self.chance.choice((lambda: merge_op_files(self.log), self.log.engine.ledger.mark))()

    def check(self) -> None:
        rows = self.log.read("orders", columns=["body", "queue_id", "queue_offset"]).to_pylist()
        rows += self.log.read("plain", columns=["body", "queue_id", "queue_offset"]).to_pylist()
        placed = [r["body"].decode() for r in rows]
        assert len(set(placed)) == len(placed)
        assert not self.pending.intersection(placed)
        last: dict[str, int] = {}
        for name in (n for n in placed if self.key[n].startswith("orders")):
            key = self.key[name]
            assert last.get(key, 0) < self.rank[name], f"{name} of {key} stands after a later one"
            last[key] = self.rank[name]
            waits = [n for n in self.pending if self.key[n] == key and self.rank[n] < self.rank[name]]
            assert not waits, f"{name} is visible, and {waits} was sent before it and is open"
        visible = {self.transaction[n] for n in placed}
        decided = self.decided()
        hidden = {self.transaction[n] for n in decided.difference(placed)}
        assert not visible & hidden, "a part of a transaction is visible"

    def decided(self) -> set[str]:
        found: set[str] = set()
        for app, count in self.batches.items():
            for i in range(count):
                record = self.log.engine.get(f"{app}:{i}")
                mask = self.log.engine.state_of(record).rows_in((RowState.WAITING, RowState.COMMITTED))
                found.update(self.names(record, mask))
        return found


# ---------------------------------------------------------------- delayed messages
def test_a_delayed_message_appears_at_its_time_and_not_before(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"body": ["now", "later"], "deliver_at": pa.array([None, in_seconds(1)], pa.timestamp("us", "UTC"))}
    commit(log, prepare(log, 0, columns, topic="plain"))
    assert bodies(log, "plain") == ["now"]
    assert log.engine.ledger.place_due() == []
    set_clock(monkeypatch, 2.05)
    assert bodies(log, "plain") == ["now"]  # nobody has placed it
    assert [p.count for p in log.engine.ledger.place_due()] == [1]
    assert bodies(log, "plain") == ["now", "later"]
    assert log.engine.ledger.place_due() == []
    assert not log.engine.ledger.view.waiting


def test_the_next_commit_places_what_is_due_by_its_time(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"body": list("cab"), "deliver_at": [in_seconds(30), in_seconds(10), in_seconds(20)]}
    commit(log, prepare(log, 0, columns, topic="plain"))
    set_clock(monkeypatch, 25)
    commit(log, prepare(log, 1, {"body": ["x"]}, topic="plain"))
    assert bodies(log, "plain") == ["x", "a", "b"]
    set_clock(monkeypatch, 60)
    log = another(log)
    log.engine.ledger.place_due()
    assert bodies(log, "plain") == ["x", "a", "b", "c"]


@pytest.mark.parametrize("settle", [commit, roll_back])
def test_a_pending_delayed_message_appears_when_it_is_committed_late_and_never_when_rolled_back(
    log: CommitLog, settle: Callable[[CommitLog, HalfRecord], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = prepare(log, 0, {"body": ["x"], "delay_level": [1]}, topic="plain")
    set_clock(monkeypatch, 60)
    assert log.engine.ledger.place_due() == []
    settle(log, record)
    assert log.engine.ledger.place_due() == []
    assert bodies(log, "plain") == (["x"] if settle is commit else [])


def test_a_time_gone_by_delays_nothing(log: CommitLog) -> None:
    commit(log, prepare(log, 0, {"body": ["x"], "deliver_at": [in_seconds(-5)]}, topic="plain"))
    assert bodies(log, "plain") == ["x"]


@pytest.mark.log("memory", plain=1)
@pytest.mark.parametrize(
    ("topic", "columns", "sentence"),
    [
        ("orders", {}, "has no sharding_key"),
        ("orders", {"sharding_key": pa.array([None], pa.string())}, "has no sharding_key"),
        ("orders", {"sharding_key": ["a"], "delay_level": [1]}, "it would leave the order"),
        ("plain", {"delay_level": [0]}, "delay_level 0 is not a delay level: 1 to 18"),
        ("plain", {"delay_level": [19]}, "delay_level 19"),
        ("plain", {"delay_level": [1], "deliver_at": [in_seconds(1)]}, "set one of them"),
        ("plain", {"deliver_at": [in_seconds(4 * 86400)]}, "at most 72 h ahead"),
        ("plain", {"deliver_at": ["tomorrow"]}, "deliver_at"),
    ],
)
def test_what_a_topic_cannot_place_is_refused(
    log: CommitLog, topic: str, columns: dict[str, object], sentence: str
) -> None:
    with pytest.raises(txmq.MessageError, match=sentence):
        prepare(log, 0, {"body": ["x"], **columns}, topic=topic)


def test_a_producer_sends_delayed_messages(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    with producer_of(log) as producer:
        sent = producer.send_message_in_transaction(message("x", "plain", delay_level=3))
    assert sent.local_transaction_state is COMMIT
    assert sent.queue_offsets == {}
    assert bodies(log, "plain") == []
    set_clock(monkeypatch, 11.5)
    report = txmq.CheckService(log, {}).run_once()
    assert report.placed == 1
    assert "1 delayed message became visible" in str(report)
    assert bodies(log, "plain") == ["x"]
