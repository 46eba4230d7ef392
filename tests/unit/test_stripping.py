"""Half files that stay for others lose the payload of what is drained; and nobody can tell, but for the space."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_spark import CommitLog, HalfBatch, LocalTransactionState
from rmq_spark.errors import CorruptLogError, StrippedError, VerdictConflictError
from tests.support.half_batches import (
    another,
    bodies,
    check_offsets,
    commit,
    decide_one,
    header_of,
    in_half,
    let_leave,
    move_half,
    pending,
    prepare,
    roll_back,
    send,
    share_half_file,
    split,
    stage,
)
from tests.support.inside import (
    PAYLOAD_COLUMNS,
    CommitOncePrepared,
    Drainer,
    Graces,
    Planner,
    RowState,
    Stripper,
    Subscription,
    TwoPhase,
    Who,
    native,
    read_ranges,
    table_files,
)
from tests.support.limits import Limit
from tests.support.meanwhile import at, seen_at

ROWS = 12


pytestmark = pytest.mark.log("memory", "delta", orders=2, points=1)


@pytest.fixture(autouse=True)
def _small_files_too(limit: Limit) -> None:
    limit(STRIPPED_BYTES_MIN=1)


def one_open(log: CommitLog, batch_id: int = 0, columns: Any = None, **more: Any) -> Any:
    """A half batch of which every sixth message stays pending."""
    record = prepare(log, batch_id, columns or ROWS, per="message", **more)
    kept, _ = split(pending(log, record), 6)
    decide_one(log.engine, record, 1, commit=kept, who=Who.EXECUTE)
    return record


def ready(log: CommitLog) -> None:
    """All that is decided is drained, and below the mark."""
    log.drain()
    another(log).engine.ledger.mark()


def strip(log: CommitLog) -> list[str]:
    """By another process; returns the files."""
    return Stripper(another(log).engine, Graces(0.0)).run()


def delete_replaced(log: CommitLog) -> None:
    for table in (another(log).engine.half.table, another(log).engine.messages_table):
        table_files.delete_replaced(table, 0, dry_run=False)


def stored(log: CommitLog) -> pa.Table:
    """The rows of half, as any reader of Delta sees them."""
    table = another(log).engine.half.table
    table.refresh()
    return table.read(table.actions()["path"].to_pylist()).sort_by([("half_id", "ascending"), ("row_no", "ascending")])


def with_payload(log: CommitLog) -> list[str]:
    return [b.decode() for b in stored(log)["body"].to_pylist() if b is not None]


# ---------------------------------------------------------------- what goes, and what stays
def test_drained_messages_lose_their_payload_and_open_ones_keep_it(log: CommitLog) -> None:
    record = one_open(log)
    before = bodies(log)
    assert let_leave(log).files_stripped == 1
    left = stored(log)
    assert left.num_rows == ROWS
    assert sorted(with_payload(log)) == ["app.0.0", "app.0.6"]
    for name in PAYLOAD_COLUMNS:
        assert left.filter(pc.is_null(left["body"]))[name].null_count == 10
    assert bodies(another(log)) == bodies(log) == before
    assert let_leave(log).files_stripped == 0
    commit(log, record)
    assert len(bodies(another(log))) == ROWS


def test_a_stripped_half_batch_goes_on_as_any_other(log: CommitLog) -> None:
    record = one_open(log)
    whole = another(log).engine.get(record.half_id)
    let_leave(log)
    delete_replaced(log)
    found = another(log).engine.get(record.half_id)
    assert (found.rows, found.prepared_ms, found.staged_ms) == (whole.rows, whole.prepared_ms, whole.staged_ms)
    assert [f.segments for f in found.files.values()] == [f.segments for f in whole.files.values()]
    other = another(log)
    assert other.pending()["messages"].to_pylist() == [2]
    rows = pending(other, found)
    asked = other.engine.half_batch(found, other.engine.state_of(found), 1, rows)
    assert sorted(asked.messages()["body"].to_pylist()) == [b"app.0.0", b"app.0.6"]
    decided = other.engine.state_of(found).rows_in((RowState.COMMITTED,))
    with pytest.raises(VerdictConflictError):
        decide_one(other.engine, found, 1, rollback=decided, who=Who.EXECUTE)
    other.resolve(record.half_id, "COMMIT_MESSAGE", "agreed")
    prepare(other, 1)
    assert len(bodies(log)) == ROWS


def test_the_last_half_batch_of_a_stream_is_stripped_and_a_restart_finds_it_settled(log: CommitLog) -> None:
    commit(log, prepare(log, 1))
    assert let_leave(log).files_stripped == 1
    assert with_payload(log) == []
    record = another(log).engine.find("app", 1)
    assert record is not None
    assert another(log).engine.state_of(record).count(RowState.COMMITTED) == 5


def test_what_was_rolled_back_keeps_its_payload_for_a_look(log: CommitLog) -> None:
    record = prepare(log, 0, ROWS, per="message")
    kept, dropped = split(pending(log, record), 6)
    decide_one(log.engine, record, 1, commit=kept, rollback=dropped, who=Who.EXECUTE)
    prepare(log, 1)
    assert let_leave(log, audit_s=1e6).files_stripped == 1
    assert sorted(with_payload(log))[:2] == ["app.0.0", "app.0.6"]


@pytest.mark.parametrize("what", ["undrained", "within the grace", "mostly open", "in conflict", "above the mark"])
def test_what_may_be_needed_keeps_its_payload(log: CommitLog, what: str) -> None:
    record = prepare(log, 0, ROWS, per="message")
    kept, others = split(pending(log, record), 6 if what != "mostly open" else 2)
    kept = kept if what != "mostly open" else others - split(others, 4)[1]
    decide_one(log.engine, record, 1, commit=kept, who=Who.EXECUTE)
    if what == "in conflict":
        with pytest.raises(VerdictConflictError):
            decide_one(log.engine, record, 1, rollback=kept, who=Who.CHECK)
    if what != "undrained":
        log.drain()
    if what != "above the mark":
        another(log).engine.ledger.mark()
    graces = Graces(3600.0 if what == "within the grace" else 0.0, 0.0)
    assert Stripper(another(log).engine, graces).run() == []
    assert len(with_payload(log)) == ROWS


def test_more_files_than_are_stripped_at_once_wait_for_the_next_time(log: CommitLog, limit: Limit) -> None:
    limit(STRIPPED_AT_ONCE_MAX=2)
    for batch_id in range(3):
        one_open(log, batch_id)
    ready(log)
    assert [len(strip(log)) for _ in range(3)] == [2, 1, 0]


def test_a_small_file_is_left_alone_and_a_dry_run_changes_nothing(log: CommitLog, limit: Limit) -> None:
    one_open(log)
    ready(log)
    assert len(Stripper(another(log).engine, Graces(0.0)).run(dry_run=True)) == 1
    assert let_leave(log, dry_run=True).files_stripped == 1
    limit(STRIPPED_BYTES_MIN=1 << 30)
    assert let_leave(log).files_stripped == 0
    assert len(with_payload(log)) == ROWS


def test_a_file_is_stripped_again_when_most_of_what_was_left_is_drained(log: CommitLog) -> None:
    record = one_open(log)
    let_leave(log)
    first, second = split(pending(log, record), 12)
    decide_one(log.engine, record, 1, commit=first, who=Who.EXECUTE)
    assert let_leave(log).files_stripped == 1
    assert len(with_payload(log)) == 1
    decide_one(log.engine, record, 1, commit=second, who=Who.EXECUTE)
    assert len(set(bodies(another(log)))) == ROWS


def test_delayed_messages_wait_in_a_small_file(log: CommitLog) -> None:
    delays = [None] * 11 + [18]
    columns = {"body": [f"m{i}" for i in range(12)], "delay_level": pa.array(delays, pa.int32())}
    commit(log, prepare(log, 0, columns))
    assert let_leave(log).files_stripped == 1
    assert with_payload(log) == ["m11"]
    assert len(bodies(another(log))) == 11


def test_a_shared_file_keeps_the_payload_of_those_that_are_open(log: CommitLog) -> None:
    records = [send(log, f"key{i}", 2) for i in range(6)]
    share_half_file(log)
    for record in records[:5]:
        commit(log, record)
    let_leave(log)
    assert sorted(with_payload(log)) == ["key5.0", "key5.1"]
    assert len(bodies(another(log))) == 10
    commit(another(log), another(log).engine.get(records[5].half_id))
    let_leave(log)
    assert len(bodies(another(log))) == 12
    assert in_half(log) == set()


# ---------------------------------------------------------------- readers, and others who write
def read(log: CommitLog, ranges: Any, names: Any = ("queue_id", "queue_offset", "body", "keys")) -> list[Any]:
    found = pa.concat_tables(list(read_ranges(ranges, log.engine.read_range, log.engine.find_again, names)))
    order = [("queue_id", "ascending"), ("queue_offset", "ascending")]
    return found.sort_by(order).to_pylist() if "queue_offset" in names else found.to_pylist()


@pytest.mark.parametrize("names", [("queue_id", "queue_offset", "body", "keys"), ("keys",), ("tags", "sharding_key")])
def test_a_plan_from_before_finds_stripped_messages_where_they_are_now(log: CommitLog, names: tuple[str, ...]) -> None:
    columns = {"body": [str(i) for i in range(ROWS)], "keys": ["k"] * ROWS, "tags": ["t"] * ROWS}
    one_open(log, 0, columns)
    plan = Planner(another(log).engine, Subscription(("orders",)))
    ranges = plan.ranges({}, plan.latest())
    expected = read(another(log), ranges, names)
    let_leave(log)
    assert read(another(log), ranges, names) == expected  # the replaced file is still there
    delete_replaced(log)
    assert read(another(log), ranges, names) == expected
    move_half(log)
    assert read(another(log), ranges, names) == expected


def test_a_plan_from_before_reads_on_what_shares_a_file_with_stripped_messages(log: CommitLog) -> None:
    sent = [send(log, key, 2) for key in ("one", "two", "three")]
    share_half_file(log)
    first, second, third = (another(log).engine.get(record.half_id) for record in sent)
    commit(log, first)
    commit(log, third)
    plan = Planner(another(log).engine, Subscription(("orders",)))
    before = plan.latest()
    ranges = plan.ranges({}, before)
    drained = log.drain()
    commit(log, second)
    ranges += plan.ranges(before, plan.latest())
    assert {r.rows.table for r in ranges} == {"half"}
    expected = sorted(m["body"] for m in read(another(log), ranges))
    another(log).engine.ledger.mark()
    assert another(log).engine.drained.border() is not None
    assert strip(log)
    assert stored(log)["body"].null_count == 4
    delete_replaced(log)
    assert sorted(m["body"] for m in read(another(log), ranges)) == expected
    assert drained < log.drain()


def test_a_stripped_row_is_never_taken_for_a_message(log: CommitLog) -> None:
    record = one_open(log)
    let_leave(log)
    found = another(log).engine.get(record.half_id)
    rows = another(log).engine.state_of(found).rows_in((RowState.COMMITTED,))
    for name in PAYLOAD_COLUMNS:
        with pytest.raises(StrippedError, match="in the table messages"):
            another(log).engine.half.read(found, rows, [name])
    assert another(log).engine.half.read(found, rows, ["sharding_key"]).num_rows == 10


def test_a_drainer_that_slept_while_another_one_drained_and_stripped_goes_on(log: CommitLog) -> None:
    """It has planned a step, and the payload is gone when it reads: it said that the store answers with an old list."""
    one_open(log)
    with at("files read", lambda: (let_leave(log), delete_replaced(log)), table="half"):
        drained = Drainer(another(log).engine).run()
    assert drained == log.drain()
    check_offsets(log)


@pytest.mark.log("delta", orders=2)
def test_an_older_copy_of_messages_is_not_drained_to_again(log: CommitLog, tmp_path: Path) -> None:
    one_open(log)
    shutil.copytree(tmp_path / "log/messages", tmp_path / "copy")
    let_leave(log)
    delete_replaced(log)
    shutil.rmtree(tmp_path / "log/messages")
    shutil.copytree(tmp_path / "copy", tmp_path / "log/messages")
    with pytest.raises(CorruptLogError, match="an older copy of messages was put in its place"):
        Drainer(another(log).engine).run()


@pytest.mark.parametrize("query_id", [None, "query"])
def test_a_local_transaction_that_slept_until_its_messages_went_gets_the_outcome(
    log: CommitLog, query_id: str | None
) -> None:
    """Its read raised, and the sender said that they stay pending. A query's last half batch loses only its payload."""

    class Sleeps(CommitOncePrepared):
        def execute_local_transaction(self, batch: HalfBatch) -> LocalTransactionState:
            commit(log, log.engine.get(batch.half_id), who=Who.CHECK)
            let_leave(log)
            delete_replaced(log)
            batch.messages(["body"])
            return super().execute_local_transaction(batch)

    header = replace(header_of(0), query_id=query_id)
    files = stage(log, header, {"body": ["a", "b"]})
    outcome = TwoPhase(another(log).engine, Sleeps()).send(header, lambda: files)
    assert outcome.messages == {RowState.COMMITTED: 2}
    assert len(bodies(log)) == 2


def test_two_who_strip_at_once_leave_one_file(log: CommitLog) -> None:
    one_open(log)
    ready(log)
    found: list[str] = []
    with at("file written", lambda: found.extend(strip(log)), table="half"):
        assert strip(log) == []
    assert len(found) == 1
    assert stored(log).num_rows == ROWS
    assert len(bodies(another(log))) == 10


def test_a_half_batch_of_several_files_keeps_the_rows_of_each(log: CommitLog) -> None:
    record = one_open(log, 0, None, partitions=3)
    let_leave(log)
    assert len(with_payload(log)) == pending(another(log), another(log).engine.get(record.half_id)).count
    roll_back(another(log), another(log).engine.get(record.half_id))
    assert len(bodies(another(log))) + len(with_payload(log)) == ROWS


def test_a_file_that_is_open_keeps_its_payload_when_as_many_rows_of_another_one_are_drained(log: CommitLog) -> None:
    """Placed rows of the whole half batch were compared with the rows of one file (found by the simulation)."""
    record = prepare(log, 0, ROWS, per="message", partitions=2)
    rows = pending(log, record)
    first = min(rows)
    decide_one(log.engine, record, 1, commit=rows & {first: rows[first]}, who=Who.EXECUTE)
    assert let_leave(log).files_stripped == 1
    assert len(with_payload(log)) == ROWS // 2
    commit(another(log), another(log).engine.get(record.half_id))
    assert len(bodies(another(log))) == ROWS


def test_the_tail_for_spark_is_planned_again_when_it_was_stripped_meanwhile(log: CommitLog) -> None:
    """Spark was given the stripped file, and showed null bodies."""
    one_open(log)
    reader = another(log)
    planner = Planner(reader.engine, Subscription(("orders",)))
    start, end = planner.resolve("starting", "earliest"), planner.resolve("ending", "latest")
    _, tail = planner.tail(start, end)
    let_leave(log)
    assert native._paths(reader.engine, tail) is None
    _, tail = planner.tail(start, end)
    assert tail == []


@pytest.mark.log("delta")
@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_a_lost_or_damaged_half_file_does_not_stop_the_upkeep_of_the_others(
    log: CommitLog, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    bad, good = one_open(log, 0), one_open(log, 1)
    ready(log)
    path = tmp_path / "log" / "half" / bad.files[0].path
    path.unlink() if what == "lost" else path.write_bytes(b"PAR1" + b"x" * 100 + b"PAR1")
    assert strip(log) == [good.files[0].path]
    assert "is not stripped of what is drained" in caplog.text


@pytest.mark.parametrize("nth", [1, 2])
def test_a_half_batch_that_another_process_lets_leave_meanwhile_is_passed_over(log: CommitLog, nth: int) -> None:
    record = one_open(log)
    ready(log)

    def leaves(**_: Any) -> None:
        if len(reads) == nth:
            commit(log, another(log).engine.get(record.half_id))
            let_leave(log)

    with seen_at("files read", leaves, table="half") as reads:
        assert strip(log) == []
    assert in_half(log) == set()
    assert len(bodies(another(log))) == ROWS
