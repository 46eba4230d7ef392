"""Bugs that the simulation found, each as the shortest story that shows it."""

from __future__ import annotations

from itertools import count

import pytest

from rmq_spark.check.service import CheckService
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import RowState, Who
from rmq_spark.errors import AlreadyPreparedError, LostFileError, UnreachableStoreError
from rmq_spark.listener import TransactionListener, Verdicts
from rmq_spark.machine import Machine
from rmq_spark.storage.table import Change
from rmq_spark.testing import InMemoryCommitLog, MemoryTable
from rmq_spark.transaction import UNKNOWN, HalfBatch
from tests.clocks import let_upkeep_believe, set_clock
from tests.half_batches import another, bodies, check_offsets, commit, let_leave, pending, prepare, rewrite_half, send


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


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_mark_made_from_an_old_listing_of_half_hides_no_marker(
    rewritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who moves the mark has seen an op row about a batch, but not yet the batch: nothing of it may be forgotten.
    Somebody may have rewritten half into one file, in which by its statistics the batch could lie."""
    log = InMemoryCommitLog(topics={"orders": 1})
    upkeep = another(log)
    for app in ("aaa", "zzz"):
        commit(log, prepare(log, 0, 2, app=app))
    if rewritten:
        rewrite_half(log)
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


def test_a_batch_prepared_after_a_rewrite_by_a_clock_that_is_behind_does_not_lie_below_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mark has seen a time that the rewritten file has no more; below it nobody looks for what is open."""
    log = InMemoryCommitLog(topics={"orders": 1})
    commit(log, prepare(log, 0, 2))
    assert log.move_mark()
    rewrite_by_a_clock_that_is_behind(log)
    monkeypatch.setattr(Machine, "time", lambda _: 1_700_000_000.0)

    record = prepare(another(log), 1, 2)
    assert another(log).open_half_ids() == [record.half_id]


def test_a_batch_that_was_open_when_a_clock_that_is_behind_rewrote_it_is_still_checked() -> None:
    """Seed 5124: the rewritten file's time lies below the mark, where nobody looked for what is open. The mark says how
    many rows there were, and now there are more."""
    log = InMemoryCommitLog(topics={"orders": 1})
    commit(log, prepare(log, 0, 2))
    assert log.move_mark()
    record = prepare(log, 1, 2)
    assert another(log).open_half_ids() == [record.half_id]
    rewrite_by_a_clock_that_is_behind(log)
    assert another(log).open_half_ids() == [record.half_id]
    assert another(log).move_mark()
    assert another(log).open_half_ids() == [record.half_id]
    commit(log, another(log).get(record.half_id))
    commit(log, prepare(log, 2, 2))
    assert another(log).move_mark()
    assert another(log).open_half_ids() == []


def test_two_rewrites_that_swap_settled_rows_for_open_ones_hide_nothing() -> None:
    """One OPTIMIZE lifts settled rows above the mark, another one, by a clock that is behind, sinks as many open rows
    below it. The mark counted the rows below: they were as many as before, and nobody looked at them."""
    log = InMemoryCommitLog(topics={"orders": 1})
    commit(log, prepare(log, 0, 2))
    assert log.move_mark()
    record = prepare(log, 1, 2)
    (settled,) = files_of(log, "app:0")
    (still_open,) = files_of(log, "app:1")
    rewrite(log, [settled], at_ms=log.machine.time_ms() + 1000)
    rewrite(log, [still_open], at_ms=1)

    assert another(log).open_half_ids() == [record.half_id]
    assert another(log).move_mark()
    assert another(log).open_half_ids() == [record.half_id]
    commit(log, another(log).get(record.half_id))
    assert another(log).open_half_ids() == []
    assert another(log).move_mark()


def test_a_half_batch_of_which_a_rewrite_lifted_one_file_is_still_found_when_it_is_reopened() -> None:
    """Two files, rolled back by a check, and the mark is above them. An OPTIMIZE lifts one of them. When its rows are
    reopened, the rows above the mark are no more than those that stay rolled back."""
    log = InMemoryCommitLog(topics={"orders": 1})
    record = prepare(log, 0, 4, per="message", partitions=2)
    mask = pending(log, record)
    log.decide(record, 1, commit={}, rollback=mask, who=Who.CHECK)
    commit(log, prepare(log, 1, 2))
    assert log.move_mark()
    (first, _) = files_of(log, record.half_id)
    rewrite(log, [first], at_ms=log.machine.time_ms() + 1000)
    record = another(log).get(record.half_id)
    states = (RowState.ROLLED_BACK_BY_CHECK,)
    log.reopen(record, 1, states, 2, Who.EXECUTE, "again")
    log.decide(record, 2, commit={0: mask[0]}, rollback={}, who=Who.EXECUTE)

    assert another(log).open_half_ids() == [record.half_id]
    assert log.open_half_ids() == [record.half_id]


def test_a_half_batch_of_which_a_rewrite_lifted_the_settled_file_is_not_forgotten_by_the_mark() -> None:
    """One file is settled and rewritten, so the batch is a late one by its newest file. Its other file is open and lies
    where it was: a mark between the two leaves more settled rows than rows above it."""
    log = InMemoryCommitLog(topics={"orders": 1})
    record = prepare(log, 0, 4, per="message", partitions=2)
    log.decide(record, 1, commit={0: pending(log, record)[0]}, rollback={}, who=Who.EXECUTE)
    commit(log, prepare(log, 1, 2))
    (first, _) = files_of(log, record.half_id)
    rewrite(log, [first], at_ms=log.machine.time_ms() + 1000)

    assert another(log).move_mark()
    assert another(log).open_half_ids() == [record.half_id]
    commit(log, prepare(log, 2, 2))
    assert another(log).move_mark()
    assert another(log).open_half_ids() == [record.half_id]


def test_a_reader_whose_list_of_half_is_older_than_a_rewritten_batch_is_told_to_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 207604894: an OPTIMIZE and a VACUUM moved the rows, and the list of half that the store showed was older
    than their prepare. The reader said that there is no such half batch, as if somebody had mistyped its id."""
    log = InMemoryCommitLog(topics={"orders": 1})
    reader = another(log)
    commit(log, prepare(log, 0, 2))
    (path,) = another(log).half.table.actions()["path"].to_pylist()
    rewrite_by_a_clock_that_is_behind(log)
    log.half.table.fs.delete_file(f"half/{path}")

    with monkeypatch.context() as patch:
        refresh = MemoryTable.refresh
        behind = reader.half.table
        patch.setattr(MemoryTable, "refresh", lambda self: self.version if self is behind else refresh(self))
        with pytest.raises(LostFileError, match="read again"):
            reader.read("orders")
    assert reader.read("orders").num_rows == 2


def test_a_half_batch_that_is_rewritten_every_night_is_given_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its age counted from the rewrite, so it was never old enough for the quarantine."""
    log = InMemoryCommitLog(topics={"orders": 1})
    record = prepare(log, 0, 2)
    clock = set_clock(monkeypatch)
    for _ in range(3):
        clock.ahead_s += 80_000
        rewrite(log, files_of(log, record.half_id), at_ms=log.machine.time_ms())
        assert CheckService(another(log), {"group": Silent()}).run_once().quarantined.messages == 0
    clock.ahead_s += 30_000
    let_upkeep_believe(clock, log)
    assert CheckService(another(log), {"group": Silent()}).run_once().quarantined.messages == 2


def test_a_rewrite_of_one_half_file_leaves_its_messages_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ZORDER does. The rewritten half batch counted as sent then, and the later one did not wait for it."""
    log = InMemoryCommitLog()
    log.create_topic("orders", 1, fifo=True)
    clock = set_clock(monkeypatch)
    records = []
    for body in ("first", "second"):
        records.append(prepare(log, 0, {"body": [body], "sharding_key": ["k"]}, app=body))
        clock.ahead_s += 1.0
    rewrite(log, files_of(log, records[0].half_id), at_ms=log.machine.time_ms())
    commit(another(log), another(log).get(records[1].half_id))
    assert bodies(log) == []
    commit(another(log), another(log).get(records[0].half_id))
    assert bodies(log) == ["first", "second"]


class Silent(TransactionListener):
    """Does not know."""

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return UNKNOWN

    check_local_transaction = execute_local_transaction


def rewrite_by_a_clock_that_is_behind(log: InMemoryCommitLog) -> None:
    """Somebody's OPTIMIZE of ``half``."""
    table = another(log).half.table
    table.refresh()
    rewrite(log, table.actions()["path"].to_pylist(), at_ms=1)


def rewrite(log: InMemoryCommitLog, paths: list[str], at_ms: int) -> None:
    """Somebody's OPTIMIZE of some files of ``half``, at a time by that machine's clock."""
    table = another(log).half.table
    table.refresh()
    rows = table.write(table.read(paths), "part", ("half_id",))
    change = Change(add=[rows], remove=paths, modification_time_ms=at_ms)
    table.compare_and_set(lambda _: change, lambda _: True)


def files_of(log: InMemoryCommitLog, half_id: str) -> list[str]:
    record = another(log).get(half_id)
    return [file.path for _, file in sorted(record.files.items())]
