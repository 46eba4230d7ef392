"""repair: a half batch that was prepared twice is one again, and nothing that was visible changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark.commitlog.half import HalfHeader, HalfWriter
from rmq_spark.commitlog.half_store import HalfRecord, HalfStore
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import RowState, Who
from rmq_spark.commitlog.prepared import PreparedBatches
from rmq_spark.errors import CorruptLogError
from rmq_spark.storage.table import Change
from rmq_spark.transaction import COMMIT_MESSAGE
from tests.half_batches import another, bodies, check_offsets, header_of, make_log, rewrite_half

TWICE = replace(header_of(7, app="send.group.key"), numbered=False)


@pytest.fixture(params=["memory", "delta"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> CommitLog:
    """A log with a FIFO topic, and two batches before the damage: a committed one and an open one."""
    made = make_log(request.param, tmp_path / "log", plain=1)
    made.create_topic("orders", 1, fifo=True)
    decide(made, send(made, header_of(0), ["a", "b"]))
    send(made, header_of(1), ["c"])
    return made


def send(log: CommitLog, header: HalfHeader, bodies: list[str], parts: int = 1, key: str = "k") -> HalfRecord:
    writer = HalfWriter(header, log.topics(), "orders", None, log.fifo_topics())
    files = []
    for part in range(parts):
        mine = bodies[part::parts]
        batch = pa.table({"body": mine, "sharding_key": [key] * len(mine)})
        files += log.stage(writer, batch.to_batches(), part)
    return log.prepare(header, files)


def decide(log: CommitLog, record: HalfRecord) -> None:
    mask = log.state_of(record).rows_in((RowState.PENDING,))
    log.decide(record, 1, commit=mask, rollback={}, who=Who.EXECUTE)


def prepare_twice(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch, second: Callable[[CommitLog], HalfRecord] | None = None
) -> tuple[HalfRecord, HalfRecord]:
    """As two processes could, before one lock owned the tables of a log: neither looks whether the other one has."""
    with monkeypatch.context() as patch:
        patch.setattr(HalfStore, "ids_named", lambda self, names: {})
        first = send(log, TWICE, ["x", "y", "z"], parts=2)
        return first, (second or (lambda other: send(other, TWICE, ["x", "y", "z"], parts=2)))(another(log))


def paths_of(record: HalfRecord) -> set[str]:
    return {file.path for file in record.files.values()}


def live(log: CommitLog) -> set[str]:
    log.half.table.refresh()
    return set(log.half.table.actions()["path"].to_pylist())


def visible(log: CommitLog) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = another(log).read("orders").to_pylist()
    return found


def check_goes_on(log: CommitLog, *, expected: list[str]) -> None:
    """Decisions of other batches, and of the repaired one, are made as if nothing had been."""
    decide(log, log.get("app:1"))
    log.resolve(TWICE.half_id, COMMIT_MESSAGE, "after the repair")
    decide(log, send(log, header_of(2), ["d"]))
    for handle in (log, another(log)):
        assert bodies(handle) == expected
        assert handle.open_half_ids() == []
        check_offsets(handle)
    assert log.repair() == replace(log.repair(), found=())


# ---------------------------------------------------------------- what a repair does
def test_a_half_batch_that_was_prepared_twice_stops_every_decision_on_its_topic_until_it_is_repaired(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prepare_twice(log, monkeypatch)
    before = visible(log)
    open_one = another(log).get("app:1")
    for look in (
        lambda: decide(log, open_one),
        lambda: log.get(TWICE.half_id),
        lambda: log.resolve(TWICE.half_id, COMMIT_MESSAGE, "it happened"),
        lambda: log.pending(),
    ):
        with pytest.raises(CorruptLogError, match="lies in"):
            look()

    report = log.repair(dry_run=False)
    (found,) = report.found
    assert (found.half_id, found.done) == (TWICE.half_id, True)
    assert set(found.kept) == paths_of(first)
    assert set(found.removed) == paths_of(second)
    assert live(log).isdisjoint(paths_of(second))
    assert visible(log) == before
    check_goes_on(log, expected=["a", "b", "c", *"xzy", "d"])


def test_a_dry_run_says_the_same_and_changes_nothing(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_twice(log, monkeypatch)
    before = live(log)
    report = log.repair()
    assert report.dry_run
    assert report.left == report.found
    assert live(log) == before
    assert "first prepared is kept" in str(report)
    assert log.repair(dry_run=False).found == (replace(report.found[0], done=True),)


def test_the_copy_that_op_names_is_kept_also_when_it_was_prepared_later(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prepare_twice(log, monkeypatch, lambda other: send(other, TWICE, ["1", "2", "3", "4"]))
    with monkeypatch.context() as patch:  # as long as it was the only one that a process knew of
        patch.setattr(HalfStore, "prepared_after", lambda self, low_water_ms: PreparedBatches.of({}))
        decide(log, second)
    before = visible(log)
    assert [m["body"] for m in before] == [b"a", b"b", b"1", b"2", b"3", b"4"]
    (found,) = log.repair(dry_run=False).found
    assert set(found.kept) == paths_of(second)
    assert live(log).isdisjoint(paths_of(first))
    assert visible(log) == before
    check_goes_on(log, expected=["a", "b", *"1234", "c", "d"])


def test_copies_that_differ_and_are_not_committed_leave_the_first(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = prepare_twice(log, monkeypatch, lambda other: send(other, TWICE, ["1", "2", "3", "4"]))
    (found,) = log.repair(dry_run=False).found
    assert set(found.kept) == paths_of(first)
    check_goes_on(log, expected=["a", "b", "c", *"xzy", "d"])


def test_copies_that_differ_and_are_both_committed_in_part_are_left_to_a_person(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prepare_twice(log, monkeypatch, lambda other: send(other, TWICE, ["1", "2", "3"], parts=2))
    with monkeypatch.context() as patch:
        patch.setattr(HalfStore, "prepared_after", lambda self, low_water_ms: PreparedBatches.of({}))
        for record, file_no in ((first, 0), (second, 1000)):
            mask = {file_no: log.state_of(record).rows_in((RowState.PENDING,))[file_no]}
            log.decide(record, 1, commit=mask, rollback={}, who=Who.EXECUTE)
    before = live(log)
    (found,) = log.repair(dry_run=False).left
    assert "op names 2 of them" in found.why
    assert live(log) == before


# ---------------------------------------------------------------- what somebody rewrote
def test_a_file_that_somebodys_optimize_merged_is_written_anew_without_the_second_copy(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_twice(log, monkeypatch)
    rewrite_half(log)
    (merged,) = live(log)
    before = visible(log)
    (found,) = log.repair(dry_run=False).found
    assert found.done
    assert found.rewritten == found.removed == (merged,)
    (path,) = live(log)
    assert log.half.table.read([path]).num_rows == 6
    assert visible(log) == before
    check_goes_on(log, expected=["a", "b", "c", *"xzy", "d"])


def test_a_repair_hides_no_half_batch_that_somebodys_optimize_has_put_below_the_mark(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that the repair wrote anew kept its time below the mark, and had a name of ours: so nobody looked in."""
    assert log.move_mark()
    prepare_twice(log, monkeypatch)
    rewrite_half(log, at_ms=1)
    before = set(another(log).open_half_ids())
    log.repair(dry_run=False)
    assert set(another(log).open_half_ids()) == before


def test_copies_that_differ_in_one_file_are_left_to_a_person(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_twice(log, monkeypatch, lambda other: send(other, TWICE, ["1", "2", "3"], parts=2))
    rewrite_half(log)
    before = live(log)
    (found,) = log.repair(dry_run=False).left
    assert "somebody's rewrite has mixed them" in found.why
    assert live(log) == before


def test_a_half_batch_whose_rows_were_spread_over_files_is_not_taken_for_a_double_one(log: CommitLog) -> None:
    table = another(log).half.table
    table.refresh()
    path = next(a["path"] for a in table.actions().to_pylist() if a["min.half_id"] == "app:0")
    rows = table.read([path])
    change = Change(add=[table.write(rows.slice(i, 1), "part", ("half_id",)) for i in range(2)], remove=[path],
                    data_change=False)  # fmt: skip
    assert table.compare_and_set(lambda _: change, lambda _: True) is not None
    assert log.repair(dry_run=False).found == ()
    assert len(live(log)) == 3
