"""What a mark costs and keeps, and what stays open beside it. That a cold start makes of any mark what the whole
history says is played in ``test_commit_log_machine``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark import CommitLog
from rmq_spark._core.storage.compare_and_set import COMMIT_TRIES_MAX
from rmq_spark.errors import CorruptLogError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import set_clock
from tests.support.half_batches import another, bodies, commit, count_check, pending, prepare, roll_back
from tests.support.inside import OpKind, OpRow, RowState, Who, ledger, marking
from tests.support.limits import Limit
from tests.support.meanwhile import seen_at, unhooked
from tests.support.whole_history import require_whole

DAYS_S = 3 * 86_400.0

pytestmark = pytest.mark.log("memory", "delta", orders=1)


@pytest.fixture
def log(log: CommitLog) -> CommitLog:
    """With a FIFO topic, and without upkeep."""
    log.create_topic("steps", 1, fifo=True)
    log.engine.compaction.is_on = False
    return log


# ---------------------------------------------------------------- what stays open pins nothing
def stays_pending(log: CommitLog) -> Callable[[], object]:
    record = prepare(log, 0, app="open")
    return lambda: commit(log, record)


def stays_delayed(log: CommitLog) -> Callable[[], object]:
    due = datetime.now(timezone.utc) + timedelta(seconds=DAYS_S)
    commit(log, prepare(log, 0, {"body": ["later"], "deliver_at": [due]}, app="open"))
    return lambda: log.engine.ledger.place_due()


def stays_waiting(log: CommitLog) -> Callable[[], object]:
    first = prepare(log, 0, {"body": ["first"], "sharding_key": ["a"]}, app="open", topic="steps")
    for i in range(1, 9):
        commit(log, prepare(log, i, {"body": [f"{i}"], "sharding_key": ["a"]}, app="open", topic="steps"))
    return lambda: commit(log, first)


@pytest.mark.turns(3)
@pytest.mark.parametrize("stays_open", [stays_pending, stays_delayed, stays_waiting])
def test_what_stays_open_keeps_no_later_op_row_in_memory(
    log: CommitLog, stays_open: Callable[[CommitLog], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    end_it = stays_open(log)
    clock = set_clock(monkeypatch)
    for i in range(5):
        commit(log, prepare(log, i, 1))
        assert log.engine.ledger.mark()
        cold = another(log)
        cold.refresh()
        assert cold.engine.ledger.view.rows.num_rows == log.engine.ledger.view.rows.num_rows == 1, "the mark itself"
        require_whole(cold, f"after mark {i}")
    clock.ahead_s += DAYS_S + 60
    end_it()
    assert not another(log).engine.open_half_ids()
    cold = another(log)
    cold.refresh()
    assert not cold.engine.ledger.view.waiting
    later = prepare(log, 99, 1)
    commit(log, later)
    assert log.engine.ledger.mark()
    cold.refresh()
    assert not cold.engine.ledger.view.open_at_mark


def test_a_mark_is_made_when_many_op_rows_can_be_let_go(log: CommitLog, limit: Limit) -> None:
    limit(ROWS_LET_GO_MIN=8)
    record = prepare(log, 0)
    assert log.engine.ledger.mark()
    for _ in range(marking.ROWS_LET_GO_MIN - 1):
        count_check(log.engine, record, 1, pending(log, record), None)
    assert log.engine.ledger.mark()
    assert another(log).pending()["check_times"].to_pylist() == [marking.ROWS_LET_GO_MIN - 1]
    assert not log.engine.ledger.mark()


def test_of_many_leases_a_mark_names_the_newest(log: CommitLog) -> None:
    record = prepare(log, 0)
    for _ in range(9):
        until = log.engine.ledger.lease([record], 60)
    assert log.engine.ledger.mark()
    cold = another(log)
    assert cold.engine.state_of(record).lease_until == until
    assert len(cold.engine.ledger.view.open_at_mark[record.half_id].versions) == 1


def test_a_prepare_is_later_than_what_was_reopened_before_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark lets the reopen row go. By a clock that is behind, a later message would be sent before it."""
    log = InMemoryCommitLog(topics={"orders": 1})
    log.create_topic("steps", 1, fifo=True)
    first = prepare(log, 0, {"body": ["first"], "sharding_key": ["a"]}, topic="steps")
    clock = set_clock(monkeypatch, ahead_s=30.0)
    roll_back(log, first, who=Who.CHECK)
    log.engine.ledger.reopen(first, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "again")
    assert log.engine.ledger.mark()
    clock.ahead_s = 0.0
    fresh = another(log)
    second = prepare(fresh, 0, {"body": ["second"], "sharding_key": ["a"]}, app="other", topic="steps")
    commit(fresh, second)
    assert bodies(log, "steps") == []
    commit(log, first, attempt=2)
    assert bodies(log, "steps") == ["first", "second"]


@pytest.mark.parametrize("lacks", ["below", "reopened_ms", "low_water", "since_version", "tails"])
def test_a_mark_that_lacks_a_part_is_refused(log: CommitLog, lacks: str) -> None:
    """Without ``below`` it does not name what is open: a reopened half batch would be hidden."""
    record = prepare(log, 0)
    roll_back(log, record, who=Who.CHECK)
    log.engine.ledger.reopen(record, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "again")
    numbers = dict.fromkeys(("low_water", "since_version", "reopened_ms"), 1)
    parts: dict[str, Any] = {"tails": {}, "below": {}, **numbers, lacks: None}
    with pytest.raises(CorruptLogError, match=f"without {lacks}"):
        log.engine.ledger.append(lambda: [OpRow(OpKind.MARK, **parts)])
    with pytest.raises(CorruptLogError, match=f"without {lacks}"):
        another(log).engine.open_half_ids()


def test_a_mark_that_does_not_say_what_is_open_is_refused(log: CommitLog) -> None:
    prepare(log, 0)
    assert log.engine.ledger.mark()
    rows = log.engine.ledger.view.rows.to_pylist()
    (mark,) = [r for r in rows if r["kind"] == "mark"]
    mark["below"][0]["pending"] = None
    mark["version"] += 1
    log.engine.op_table.refresh()
    table = pa.Table.from_pylist([mark], schema=log.engine.op_table.schema)
    with pytest.raises(CorruptLogError, match="without saying what is open"):
        log.engine.ledger.view.after(table, mark["version"])


# ---------------------------------------------------------------- a mark among busy writers
@contextmanager
def overtaken(log: CommitLog, times: int) -> Iterator[list[int]]:
    """Let another writer prepare and commit before each of so many op commits of this handle. How many op files each
    try read."""
    other, reads = another(log), [0]
    log.engine.compaction.is_on = other.engine.compaction.is_on = False  # it reads files, too

    def commits(**_: Any) -> None:
        if len(reads) <= times:
            with unhooked():
                commit(other, prepare(other, 1_000 + 2 * len(reads)))
                prepare(other, 1_001 + 2 * len(reads))
        reads.append(0)

    def read(paths: Sequence[str], **_: Any) -> None:
        reads[-1] += len(paths)

    with seen_at("commit begins", commits, table="op"), seen_at("files read", read, table="op"):
        yield reads


def test_a_mark_that_lost_a_race_reads_the_history_no_second_time(log: CommitLog) -> None:
    history = 30
    for number in range(history):
        commit(log, prepare(log, number))
    log.engine.ledger.mark()
    for number in range(history, 2 * history):
        commit(log, prepare(log, number))
    with overtaken(log, times=3) as reads:
        assert log.engine.ledger.mark()
    after_the_first = reads[1:-1]
    assert len(after_the_first) == 3
    assert max(after_the_first) < history / 3


def test_a_mark_that_loses_every_race_is_left_to_the_next_time(log: CommitLog, limit: Limit) -> None:
    limit(MARK_TRIES_MAX=5)
    commit(log, prepare(log, 0))
    with overtaken(log, times=COMMIT_TRIES_MAX) as reads:
        assert not log.engine.ledger.mark()
    assert len(reads) <= ledger.MARK_TRIES_MAX + 1
    require_whole(another(log), "after all")
