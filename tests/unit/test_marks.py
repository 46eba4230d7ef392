"""What a cold start makes of a mark: the same as of the whole history, at a cost that follows what is open."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings

from rmq_spark import CommitLog
from rmq_spark.errors import CorruptLogError
from rmq_spark.storage.table import COMMIT_TRIES_MAX
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import Clock, set_clock
from tests.support.half_batches import another, bodies, commit, merge_op_files, pending, prepare, roll_back
from tests.support.inside import BatchState, Change, HalfRecord, OpRow, RowState, Who, ledger, marking
from tests.support.limits import set_limits

PLAYS = settings.default.max_examples // 10
DAYS_S = 3 * 86_400.0


pytestmark = pytest.mark.log("memory", "delta", orders=1)


@pytest.fixture
def log(log: CommitLog) -> CommitLog:
    """With a FIFO topic, and without upkeep."""
    log.create_topic("steps", 1, fifo=True)
    log.upkeep = False
    return log


# ---------------------------------------------------------------- the whole history, beside
def states_of(log: CommitLog) -> dict[str, BatchState]:
    """What all op rows together say, found without a follower."""
    tables = another(log)
    tables.half.table.refresh()
    tables.op.refresh()
    states = {half_id: tables.half.get(half_id).fresh_state() for half_id in tables.half.prepared_after(-1)}
    rows = tables.op.read(tables.op.actions()["path"].to_pylist()).sort_by("version")
    for row in rows.to_pylist():
        if row["half_id"] is not None:
            states[row["half_id"]].fold(OpRow.of(row))
    return states


def words(state: BatchState) -> object:
    rows = {n: (bytes(f.state), bytes(f.attempt), bytes(f.checks), f.due, f.reopened) for n, f in state.files.items()}
    return rows, state.in_conflict, state.lease_until, [str(row.kind) for row in state.history]


def require_whole(log: CommitLog, who: str) -> None:
    """A handle says what the whole history says."""
    states = states_of(log)
    log.refresh()
    assert set(log.open_half_ids()) == {h for h, s in states.items() if not s.settled}, who
    waiting = {h: s.count(RowState.DECIDED) for h, s in states.items() if s.count(RowState.DECIDED)}
    assert {h: sum(counts.values()) for h, counts in log.ledger.waiting.items()} == waiting, who
    assert set(log.conflicts()) == {h for h, s in states.items() if s.in_conflict}, who
    for half_id, state in states.items():
        assert words(log.state_of(log.get(half_id))) == words(state), f"{who}: {half_id}"


class Play:
    """Half batches of a plain topic and a FIFO topic, settled in any order, with marks and merges between."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.chance = random.Random(seed)
        self.clock = clock
        self.log = InMemoryCommitLog(topics={"orders": 1})
        self.log.create_topic("steps", 1, fifo=True)
        self.log.upkeep = False
        self.records: list[HalfRecord] = []

    def run(self) -> None:
        warm = another(self.log)
        for step in range(30):
            do = self.chance.choice(
                (self.send, self.send, self.settle, self.settle, self.settle, self.check, self.lease, self.time_goes_by)
            )
            do()
            if self.chance.random() < 0.4:
                another(self.log).move_mark()
                if self.chance.random() < 0.3:
                    merge_op_files(self.log)
                require_whole(another(self.log), f"a cold start after step {step}")
                require_whole(warm, f"a warm handle after step {step}")

    def send(self) -> None:
        n = self.chance.choice((1, 2, 4))
        body = [f"{len(self.records)}.{i}" for i in range(n)]
        if self.chance.random() < 0.4:
            columns: dict[str, object] = {"body": body, "sharding_key": [self.chance.choice("ab") for _ in body]}
            topic = "steps"
        else:
            soon = datetime.now(timezone.utc) + timedelta(seconds=self.clock.ahead_s)
            dues = [soon + timedelta(seconds=s) if s else None for s in self.chance.choices((0, 0, 60, 3600), k=n)]
            columns, topic = {"body": body, "deliver_at": pa.array(dues, pa.timestamp("us", "UTC"))}, "orders"
        per = self.chance.choice(("batch", "message"))
        partitions = self.chance.choice((1, 2))
        self.records.append(prepare(self.log, len(self.records), columns, per=per, topic=topic, partitions=partitions))

    def settle(self) -> None:
        if not self.records:
            return
        record = self.chance.choice(self.records)
        state = self.log.state_of(record)
        who = self.chance.choice((Who.EXECUTE, Who.CHECK))
        for attempt in state.attempts(RowState.PENDING):
            rows = state.rows_in((RowState.PENDING,), attempt)
            some = rows & {n: bytes(self.chance.random() < 0.7 for _ in bits) for n, bits in rows.items()}
            some = rows if record.header.transaction_per == "batch" else some
            end = self.chance.random()
            if end < 0.6:
                self.log.decide(record, attempt, commit=some, who=who)
            elif end < 0.8:
                self.log.decide(record, attempt, rollback=some, who=who)
            else:
                self.log.quarantine(record, attempt, some, Who.DISCARD, "who knows")
            return
        if RowState.QUARANTINED in [s for s in RowState if state.count(s)]:
            self.log.resume(record.half_id)
            return
        for attempt in state.attempts(RowState.ROLLED_BACK_BY_CHECK):
            self.log.reopen(record, attempt, (RowState.ROLLED_BACK_BY_CHECK,), attempt + 1, Who.EXECUTE, "again")

    def check(self) -> None:
        for half_id in self.log.open_half_ids()[:2]:
            record = self.log.get(half_id)
            for attempt in self.log.state_of(record).attempts(RowState.PENDING):
                self.log.record_check(record, attempt, pending(self.log, record, attempt), None)

    def lease(self) -> None:
        for half_id in self.log.open_half_ids()[:1]:
            self.log.lease(self.log.get(half_id), 60)

    def time_goes_by(self) -> None:
        self.clock.ahead_s += self.chance.choice((30.0, 3600.0))
        self.log.place_due()


@pytest.mark.parametrize("seed", range(PLAYS))
def test_a_cold_start_from_any_mark_says_what_the_whole_history_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Play(seed, set_clock(monkeypatch)).run()


@pytest.mark.parametrize("seed", range(PLAYS, PLAYS + PLAYS // 2))
def test_a_mark_that_cannot_name_all_that_is_open_stops_before_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, NAMED_MAX=6)
    Play(seed, set_clock(monkeypatch)).run()


# ---------------------------------------------------------------- what stays open pins nothing
def stays_pending(log: CommitLog) -> Callable[[], object]:
    record = prepare(log, 0, app="open")
    return lambda: commit(log, record)


def stays_delayed(log: CommitLog) -> Callable[[], object]:
    due = datetime.now(timezone.utc) + timedelta(seconds=DAYS_S)
    commit(log, prepare(log, 0, {"body": ["later"], "deliver_at": [due]}, app="open"))
    return lambda: log.place_due()


def stays_waiting(log: CommitLog) -> Callable[[], object]:
    first = prepare(log, 0, {"body": ["first"], "sharding_key": ["a"]}, app="open", topic="steps")
    for i in range(1, 9):
        commit(log, prepare(log, i, {"body": [f"{i}"], "sharding_key": ["a"]}, app="open", topic="steps"))
    return lambda: commit(log, first)


@pytest.mark.parametrize("stays_open", [stays_pending, stays_delayed, stays_waiting])
def test_what_stays_open_keeps_no_later_op_row_in_memory(
    log: CommitLog, stays_open: Callable[[CommitLog], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    end_it = stays_open(log)
    clock = set_clock(monkeypatch)
    for i in range(5):
        commit(log, prepare(log, i, 1))
        assert log.move_mark()
        cold = another(log)
        cold.refresh()
        assert cold.ledger.rows_kept == log.ledger.rows_kept == 1, "the mark itself"
        require_whole(cold, f"after mark {i}")
    clock.ahead_s += DAYS_S + 60
    end_it()
    assert not another(log).open_half_ids()
    cold = another(log)
    cold.refresh()
    assert not cold.ledger.waiting
    later = prepare(log, 99, 1)
    commit(log, later)
    assert log.move_mark()
    assert not named(log)


def named(log: CommitLog) -> set[str]:
    """What is open below the newest mark, as a cold start reads it."""
    cold = another(log)
    cold.refresh()
    return set(cold.ledger.followed.below)


def test_a_mark_is_made_when_many_op_rows_can_be_let_go(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, ROWS_LET_GO_MIN=8)
    record = prepare(log, 0)
    assert log.move_mark()
    for _ in range(marking.ROWS_LET_GO_MIN - 1):
        log.record_check(record, 1, pending(log, record), None)
    assert log.move_mark()
    assert another(log).pending()["check_times"].to_pylist() == [marking.ROWS_LET_GO_MIN - 1]
    assert not log.move_mark()


def test_of_many_leases_a_mark_names_the_newest(log: CommitLog) -> None:
    record = prepare(log, 0)
    for _ in range(9):
        until = log.lease(record, 60)
    assert log.move_mark()
    cold = another(log)
    assert cold.state_of(record).lease_until == until
    assert len(cold.ledger.followed.below[record.half_id].versions) == 1


def test_a_prepare_is_later_than_what_was_reopened_before_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark lets the reopen row go. By a clock that is behind, a later message would be sent before it."""
    log = InMemoryCommitLog(topics={"orders": 1})
    log.create_topic("steps", 1, fifo=True)
    first = prepare(log, 0, {"body": ["first"], "sharding_key": ["a"]}, topic="steps")
    clock = set_clock(monkeypatch, ahead_s=30.0)
    roll_back(log, first, who=Who.CHECK)
    log.reopen(first, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "again")
    assert log.move_mark()
    clock.ahead_s = 0.0
    fresh = another(log)
    second = prepare(fresh, 0, {"body": ["second"], "sharding_key": ["a"]}, app="other", topic="steps")
    commit(fresh, second)
    assert bodies(log, "steps") == []
    commit(log, first, attempt=2)
    assert bodies(log, "steps") == ["first", "second"]


@pytest.mark.parametrize("lacks", ["below", "reopened_ms", "low_water", "since_version", "tails"])
def test_a_mark_that_lacks_a_part_is_refused(log: CommitLog, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """Without ``below`` it does not name what is open: a reopened half batch would be hidden."""
    record = prepare(log, 0)
    roll_back(log, record, who=Who.CHECK)
    log.reopen(record, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "again")
    next_mark = marking.Marker.next_mark
    without: dict[str, Any] = {lacks: None}
    monkeypatch.setattr(marking.Marker, "next_mark", lambda m: [replace(row, **without) for row in next_mark(m)])
    for look in (log.move_mark, another(log).open_half_ids):
        with pytest.raises(CorruptLogError, match=f"without {lacks}"):
            look()


def test_a_mark_that_does_not_say_what_is_open_is_refused(log: CommitLog) -> None:
    prepare(log, 0)
    assert log.move_mark()
    rows = log.ledger.followed.rows.to_pylist()
    (mark,) = [r for r in rows if r["kind"] == "mark"]
    mark["below"][0]["pending"] = None
    mark["version"] += 1
    log.op.refresh()
    table = pa.Table.from_pylist([mark], schema=log.op.schema)
    with pytest.raises(CorruptLogError, match="without saying what is open"):
        log.ledger.followed.after(table, mark["version"])


# ---------------------------------------------------------------- a mark among busy writers
def overtake(log: CommitLog, times: int) -> list[int]:
    """Let another writer prepare and commit before each of so many op commits of this handle. Returns, and goes on to
    fill, how many op files each try read."""
    table, other = log.op, another(log)
    real_commit, real_read, reads = table.try_commit, table.read, [0]  # type: ignore[attr-defined]

    def try_commit(change: Change) -> bool:
        if len(reads) <= times:
            commit(other, prepare(other, 1_000 + 2 * len(reads)))
            prepare(other, 1_001 + 2 * len(reads))
        reads.append(0)
        return bool(real_commit(change))

    def read(paths: Sequence[str], *arguments: Any) -> pa.Table:
        reads[-1] += len(paths)
        return real_read(paths, *arguments)

    table.try_commit, table.read = try_commit, read  # type: ignore[attr-defined, method-assign]
    return reads


def test_a_mark_that_lost_a_race_reads_the_history_no_second_time(log: CommitLog) -> None:
    history = 30
    for number in range(history):
        commit(log, prepare(log, number))
    log.move_mark()
    for number in range(history, 2 * history):
        commit(log, prepare(log, number))
    reads = overtake(log, times=3)
    assert log.move_mark()
    after_the_first = reads[1:-1]
    assert len(after_the_first) == 3
    assert max(after_the_first) < history / 3


def test_a_mark_that_loses_every_race_is_left_to_the_next_time(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, MARK_TRIES_MAX=5)
    commit(log, prepare(log, 0))
    reads = overtake(log, times=COMMIT_TRIES_MAX)
    assert not log.move_mark()
    assert len(reads) <= ledger.MARK_TRIES_MAX + 1
    require_whole(another(log), "after all")
