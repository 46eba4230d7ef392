"""Bugs that the simulation found, each as the shortest story that shows it."""

from __future__ import annotations

from itertools import count

import pytest

from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import Who
from rmq_spark.errors import AlreadyPreparedError, LostFileError, UnreachableStoreError
from rmq_spark.machine import Machine
from rmq_spark.storage.table import Change
from rmq_spark.testing import InMemoryCommitLog, MemoryTable
from tests.half_batches import (
    another,
    bodies,
    check_offsets,
    commit,
    let_leave,
    move_half,
    pending,
    prepare,
    send,
    share_half_file,
)


def test_a_batch_whose_prepare_landed_unseen_is_not_committed_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try lands, the store says that it did not, and an old listing hides it; so there is a second try, with
    a later time. The log keeps the first one's. A mark between the two times must not hide what is decided."""
    log = InMemoryCommitLog(topics={"orders": 1})
    table = log.half.table
    try_commit, refresh = MemoryTable.try_commit, MemoryTable.refresh
    hidden = [False]

    def unlucky(self: MemoryTable, change: Change) -> bool:
        landed = try_commit(self, change)
        hidden[0] = landed and self is table
        return landed and self is not table

    def stale(self: MemoryTable) -> int:
        if self is table and hidden[0]:
            hidden[0] = False
            return self.version
        return refresh(self)

    monkeypatch.setattr(MemoryTable, "try_commit", unlucky)
    monkeypatch.setattr(MemoryTable, "refresh", stale)
    seconds = count(1_800_000_000)
    monkeypatch.setattr(Machine, "time", lambda _: float(next(seconds)))

    record = prepare(log, 0, 3)
    mask = pending(log, record)
    checker = another(log)
    commit(checker, checker.get(record.half_id), who=Who.CHECK)
    assert checker.move_mark()

    assert log.decide(record, 1, commit=mask, rollback={}, who=Who.EXECUTE) == []
    assert len(bodies(log)) == 3
    check_offsets(log)


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> CommitLog:
    """A handle that listed op before a half batch was sent, committed and let go. Three more listings are as old."""
    log = InMemoryCommitLog(topics={"orders": 1})
    found = another(log)
    found.refresh()
    commit(log, send(log, "key"))
    assert let_leave(log).files_left == 1
    refresh, listings = MemoryTable.refresh, count()

    def listed(self: MemoryTable) -> int:
        return self.version if self is found.op and next(listings) < 3 else refresh(self)

    monkeypatch.setattr(MemoryTable, "refresh", listed)
    return found


def test_an_old_listing_of_op_does_not_let_what_has_left_be_sent_again(behind: CommitLog) -> None:
    """half was listed as it is, without the half batch that had left. That op says so was not seen yet."""
    with pytest.raises(AlreadyPreparedError):
        send(behind, "key")
    assert len(bodies(behind)) == 5


def test_an_old_listing_of_op_lets_nothing_be_prepared_below_the_mark(
    behind: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """half is empty again, and the clock is behind: op alone says how far the mark is. Below it nobody looks for
    an open half batch."""
    monkeypatch.setattr(Machine, "time", lambda _: 1_000_000_000.0)
    send(behind, "another")
    assert another(behind).open_half_ids() == ["another:0"]


def test_a_store_that_shows_old_versions_only_is_told(behind: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    version, refresh = behind.op.version, MemoryTable.refresh
    monkeypatch.setattr(Machine, "sleep", lambda *_: None)
    monkeypatch.setattr(MemoryTable, "refresh", lambda self: version if self is behind.op else refresh(self))
    with pytest.raises(UnreachableStoreError, match=r"names version \d+ of table op, and the store shows version 0"):
        send(behind, "another")


@pytest.mark.parametrize("shared", [False, True])
def test_a_mark_made_from_an_old_listing_of_half_hides_no_marker(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who moves the mark has seen an op row about a batch, but not yet the batch: nothing of it may be forgotten.
    By its statistics a file that others share could have the batch."""
    log = InMemoryCommitLog(topics={"orders": 1})
    upkeep = another(log)
    for app in ("aaa", "zzz"):
        commit(log, prepare(log, 0, 2, app=app))
    if shared:
        share_half_file(log)
    upkeep.half.table.refresh()
    record = prepare(log, 0, 3)
    mask = pending(log, record)
    checker = another(log)
    commit(checker, checker.get(record.half_id), who=Who.CHECK)

    with monkeypatch.context() as patch:
        refresh = MemoryTable.refresh
        behind = upkeep.half.table
        patch.setattr(MemoryTable, "refresh", lambda self: self.version if self is behind else refresh(self))
        assert not upkeep.move_mark(), "a cold start would take the second batch for pending, and place it again"

    assert upkeep.move_mark()
    assert another(log).open_half_ids() == []
    assert log.decide(record, 1, commit=mask, rollback={}, who=Who.EXECUTE) == []
    assert len(bodies(log)) == 7
    check_offsets(log)


def test_a_reader_whose_list_of_half_is_older_than_a_moved_batch_is_told_to_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 207604894: the rows had moved, and the list of half that the store showed was older
    than their prepare. The reader said that there is no such half batch, as if somebody had mistyped its id."""
    log = InMemoryCommitLog(topics={"orders": 1})
    reader = another(log)
    commit(log, prepare(log, 0, 2))
    (path,) = another(log).half.table.actions()["path"].to_pylist()
    move_half(log)
    log.half.table.fs.delete_file(f"half/{path}")

    with monkeypatch.context() as patch:
        refresh = MemoryTable.refresh
        behind = reader.half.table
        patch.setattr(MemoryTable, "refresh", lambda self: self.version if self is behind else refresh(self))
        with pytest.raises(LostFileError, match="read again"):
            reader.read("orders")
    assert reader.read("orders").num_rows == 2
