"""How much is placed and not drained: counted from op and from half's Delta log, each op row once."""

from __future__ import annotations

import pytest

from rmq_spark import CommitLog
from rmq_spark._core.inspect.undrained import Amount, Undrained
from tests.support.half_batches import (
    another,
    commit,
    decide_one,
    merge_op_files,
    pending,
    prepare,
    roll_back,
    share_half_file,
    split,
)
from tests.support.inside import Who, drain
from tests.support.limits import set_limits
from tests.support.meanwhile import seen_at

pytestmark = pytest.mark.log("memory", "delta", orders=2, points=1)

ENOUGH = 1 << 40


def half_bytes(log: CommitLog) -> int:
    table = another(log).engine.half.table
    table.refresh()
    return sum(table.actions()["size_bytes"].to_pylist())


def test_what_is_placed_and_not_drained_is_counted_without_reading_it(log: CommitLog) -> None:
    watch = Undrained(another(log).engine)

    def look() -> Amount:
        with seen_at("files read", table="half") as reads:
            found = watch.look(ENOUGH)
        assert not reads
        return found

    assert look() == Amount()
    record = prepare(log, 0, 40, per="message", partitions=2)
    assert look() == Amount(), "it is pending"
    some, _ = split(pending(log, record), every=2)
    decide_one(log.engine, record, 1, commit=some, who=Who.EXECUTE)
    messages, size, whole = look()
    assert (messages, whole) == (20, True)
    assert abs(size - half_bytes(log) / 2) < 2, "the share of the rows"
    roll_back(log, record)
    assert look() == (20, size, True)
    other = prepare(log, 1, 8, topic="points")
    commit(log, other)
    assert look() == (28, size + log.engine.half.bytes_of(other), True)
    log.drain()
    assert look() == Amount()


def test_each_op_row_is_read_once_and_a_look_that_finds_nothing_new_reads_nothing(log: CommitLog) -> None:
    log.engine.compaction.is_on = False
    for i in range(4):
        commit(log, prepare(log, i))
    watch = Undrained(another(log).engine)
    with seen_at("files read", table="op") as first:
        assert watch.look(ENOUGH).messages == 20
        assert watch.look(ENOUGH).messages == 20
    commit(log, prepare(log, 4))
    with seen_at("files read", table="op") as second:
        assert watch.look(ENOUGH).messages == 25
    assert [len(read["paths"]) for read in first + second] == [4, 1]
    merge_op_files(log)
    assert watch.look(ENOUGH).messages == 25


def test_it_stops_counting_when_it_is_enough(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.engine.compaction.is_on = False
    set_limits(monkeypatch, UNDRAINED_OP_ROWS_MAX=5)
    sizes = []
    for i in range(6):
        record = prepare(log, i)
        commit(log, record)
        sizes.append(log.engine.half.bytes_of(record))
    watch = Undrained(another(log).engine)
    messages, size, whole = watch.look(1)
    assert not whole
    assert 0 < messages < 30
    assert size == sum(sizes[: messages // 5])
    assert watch.look(ENOUGH).messages > messages, "it goes on"
    log.drain()
    assert watch.look(ENOUGH) == Amount()


def test_a_drain_of_some_versions_leaves_the_others(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(3):
        commit(log, prepare(log, i))
    watch = Undrained(another(log).engine)
    whole = watch.look(ENOUGH)
    set_limits(monkeypatch, STEP_MESSAGES_MAX=5)
    mine = another(log)
    assert drain.Drainer(mine.engine)._step(mine.engine.messages_table, -1, mine.refresh())
    rest = watch.look(ENOUGH)
    assert rest.messages == 10
    assert rest.bytes < whole.bytes
    assert Undrained(another(log).engine).look(ENOUGH) == rest, "so does one that begins now"


def test_of_files_that_half_batches_share_the_mean_counts(log: CommitLog) -> None:
    for i in range(4):
        commit(log, prepare(log, i, 10))
    share_half_file(log)
    messages, size, _ = Undrained(another(log).engine).look(ENOUGH)
    assert messages == 40
    assert abs(size - half_bytes(log)) <= 4
