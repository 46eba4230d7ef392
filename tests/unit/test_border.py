"""Readers cross the border between the table messages and op, and nobody can tell on which side a message lies."""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_spark import CommitLog
from rmq_spark.errors import CorruptLogError, OffsetOutOfRangeError
from tests.support.half_batches import another, commit, decide_one, let_leave, pending, prepare, roll_back, send
from tests.support.half_batches import split as split_rows
from tests.support.inside import Change, Planner, Subscription, partition_ranges, read_ranges, table_files
from tests.support.limits import Limit, limited
from tests.support.meanwhile import seen_at

pytestmark = pytest.mark.log("memory", "delta", orders=2, points=1)


def planner(log: CommitLog, *topics: str, **more: Any) -> Planner:
    return Planner(another(log).engine, Subscription(topics), **more)


def fill(log: CommitLog, first: int, count: int) -> None:
    """Half batches of all kinds."""
    for i in range(first, first + count):
        record = send(log, f"key{i}", 7, per="message")
        kept, dropped = split_rows(pending(log, record), 3)
        decide_one(log.engine, record, 1, commit=kept, rollback=dropped)
        commit(log, prepare(log, i, {"body": [f"p{i}.{j}" for j in range(3)], "tags": ["a", "b", "a"]}, topic="points"))
        roll_back(log, send(log, f"none{i}"))


def test_a_read_from_a_time_gives_what_was_committed_then_or_later(log: CommitLog) -> None:
    began = datetime.now(timezone.utc)
    commit(log, prepare(log, 1, 6))
    log.drain()
    time.sleep(0.01)
    since = datetime.now(timezone.utc)
    for i in (2, 3):
        commit(log, prepare(log, i, 6))
        late = log.read("orders").filter(pc.greater_equal(log.read("orders")["commit_timestamp"], since))
        assert late.num_rows == (i - 1) * 6
        assert log.read("orders", start=since).equals(late)
        log.drain()
        assert another(log).read("orders", start=since).equals(late)
    assert log.read("orders", start=since, limit=7).num_rows == 7
    assert log.read("orders", start=began).num_rows == 18
    assert log.read("orders", start=datetime.now(timezone.utc)).num_rows == 0
    assert log.read("points", start=since).num_rows == 0


STATES: dict[str, Callable[[CommitLog], object]] = {
    "drained": lambda log: log.drain(),
    "left": let_leave,
    "left, and deleted at once": lambda log: (let_leave(log), delete_now(log)),
}


def delete_now(log: CommitLog) -> None:
    """Delete every file that is in no table any more."""
    for table in (another(log).engine.half.table, another(log).engine.op_table, another(log).engine.messages_table):
        table_files.delete_replaced(table, 0, dry_run=False)


def everything(log: CommitLog) -> dict[str, list[dict[str, object]]]:
    return {topic: log.read(topic).to_pylist() for topic in log.topics()}


@pytest.mark.turns(2)
@pytest.mark.parametrize("state", STATES)
def test_a_message_is_the_same_on_both_sides(log: CommitLog, state: str) -> None:
    reader = another(log)
    expected: dict[str, list[dict[str, object]]] = {}
    for step in range(2):
        fill(log, 2 * step, 2)
        expected = everything(another(log)) if step == 0 else expected
        before = everything(another(log))
        STATES[state](log)
        assert everything(another(log)) == before
        assert everything(reader) == before
    fill(log, 10, 2)  # a tail
    whole = everything(another(log))
    assert [m["msg_id"] for m in whole["orders"][:1]] == [m["msg_id"] for m in expected["orders"][:1]]
    for topic, messages in whole.items():
        for queue_id in range(log.topics()[topic]):
            of_queue = [m["queue_offset"] for m in messages if m["queue_id"] == queue_id]
            assert of_queue == list(range(len(of_queue)))


def test_parts_are_read_over_the_border(log: CommitLog) -> None:
    fill(log, 0, 3)
    let_leave(log)
    delete_now(log)
    fill(log, 3, 2)
    whole = another(log).read("orders").to_pylist()
    for start in ({0: 3}, {0: 5, 1: 9}, {1: 9}):
        for limit in (None, 1, 8):
            expected = [m for m in whole if m["queue_offset"] >= start.get(m["queue_id"], 0)][:limit]
            assert another(log).read("orders", start, limit).to_pylist() == expected
    tagged = another(log).read("points", tags="a").to_pylist()
    assert [m["tags"] for m in tagged] == ["a"] * len(tagged)
    assert len(tagged) == 10
    assert another(log).read("points", selector="TAGS = 'b'").num_rows == 5


def test_a_plan_is_good_after_its_files_are_gone(log: CommitLog) -> None:
    fill(log, 0, 2)
    plans = planner(log, "orders")
    of_op = plans.ranges({}, plans.latest())
    expected = another(log).read("orders").to_pylist()
    let_leave(log)
    delete_now(log)
    of_messages = plans.ranges({}, plans.latest())
    assert {r.rows.table for r in of_op} == {"half"}
    assert {r.rows.table for r in of_messages} == {"messages"}
    fill(log, 2, 1)
    log.drain()
    with limited(MESSAGES_FILES_MAX=2):
        assert table_files.compact_messages(another(log).engine.messages_table) > 0
    delete_now(log)
    for ranges in (of_op, of_messages, pickle.loads(pickle.dumps(of_messages))):
        fresh = another(log)
        assert read(fresh, ranges) == list(expected)


def read(log: CommitLog, ranges: list) -> list[dict[str, object]]:  # type: ignore[type-arg]
    names = [f.name for f in log.read("orders", limit=0).schema]
    found = pa.concat_tables(list(read_ranges(ranges, log.engine.read_range, log.engine.find_again, names)))
    return found.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")]).to_pylist()


def test_a_file_of_messages_that_is_lost_is_told(log: CommitLog) -> None:
    fill(log, 0, 2)
    let_leave(log)
    delete_now(log)
    table = another(log).engine.messages_table
    plans = planner(log, "orders")
    ranges = plans.ranges({}, plans.latest())
    for path in {r.rows.path for r in ranges}:
        table.fs.delete_file(f"{table.folder}/{path}")
    with pytest.raises(FileNotFoundError):  # LostFileError on a store
        read(another(log), ranges)


def test_partitions_share_drained_files(log: CommitLog) -> None:
    fill(log, 0, 4)
    let_leave(log)
    fill(log, 4, 1)
    plans = planner(log, "orders", "points")
    ranges = plans.ranges({}, plans.latest())
    total = sum(r.count for r in ranges)
    for parts in (
        partition_ranges(ranges),
        partition_ranges(ranges, ordered=True),
        partition_ranges(ranges, False, 5),
        partition_ranges(ranges, False, None, 3),
    ):
        assert sum(r.count for part in parts for r in part) == total
        offsets = {(r.topic, r.queue_id, r.queue_offset + i) for part in parts for r in part for i in range(r.count)}
        assert len(offsets) == total
    for part in partition_ranges(ranges, ordered=True):
        assert len({(r.topic, r.queue_id) for r in part}) == 1
        assert [r.queue_offset for r in part] == sorted(r.queue_offset for r in part)


def test_a_stream_goes_on_over_the_border(log: CommitLog) -> None:
    plans = planner(log, "orders")
    fresh = another(log)
    position: dict[tuple[str, int], int] = {}
    seen: list[dict[str, object]] = []
    for step in range(6):
        fill(log, step, 1)
        if step % 2:
            let_leave(log)
            delete_now(log)
        end = plans.latest()
        seen += read(fresh, plans.ranges(position, end)) if end != position else []
        plans.forget(end)
        position = end
    assert sorted(map(str, seen)) == sorted(map(str, another(log).read("orders").to_pylist()))


def test_the_first_message_since_a_time_is_found_on_both_sides(log: CommitLog) -> None:
    moments = []
    for i in range(4):
        moments.append(datetime.now(timezone.utc))
        time.sleep(0.003)
        commit(log, send(log, f"key{i}", 4))
        time.sleep(0.003)
    expected = [planner(log, "orders").resolve("startingTimestamp", m) for m in moments]
    assert expected[1] == {("orders", 0): 2, ("orders", 1): 2}
    for change in (log.drain, lambda: let_leave(log), lambda: commit(log, send(log, "more", 4))):
        change()
        plans = planner(log, "orders")
        assert [plans.resolve("startingTimestamp", m) for m in moments] == expected
        assert plans.resolve("startingTimestamp", moments[0] + timedelta(days=1)) == plans.latest()


def test_what_has_expired_is_out_of_range(log: CommitLog) -> None:
    fill(log, 0, 2)
    log.drain()
    log.engine.topic_store.set_retention("orders", 0.0)
    let_leave(log)
    log.engine.topic_store.set_retention("orders", None)
    fill(log, 2, 1)
    firsts = another(log).engine.firsts()
    plans = planner(log, "orders")
    start = {("orders", 0): 0, ("orders", 1): 0}
    with pytest.raises(OffsetOutOfRangeError, match=r"offsets 0 to"):
        plans.ranges(start, plans.latest())
    skipping = planner(log, "orders", fail_on_data_loss=False)
    for begin in (start, {}):  # a queue without a position starts at its first offset
        found = skipping.ranges(begin, plans.latest())
        assert {(r.topic, r.queue_id): r.queue_offset for r in found} == firsts
    earliest = plans.resolve("startingOffsets", "earliest")
    assert earliest == firsts
    assert len(read(another(log), plans.ranges(earliest, plans.latest()))) == 4
    assert another(log).read("orders").num_rows == 4
    with pytest.raises(OffsetOutOfRangeError, match=f"have expired; the queue starts at offset {firsts['orders', 0]}"):
        another(log).read("orders", start={0: 0})


def test_what_leaves_after_a_read_was_planned_is_no_loss(log: CommitLog) -> None:
    fill(log, 0, 2)
    before = everything(log)
    reader = another(log)
    plans = Planner(reader.engine, Subscription(("points",)))
    ranges = plans.ranges({}, plans.latest())
    let_leave(log)
    delete_now(log)
    found = read_ranges(ranges, reader.engine.read_range, reader.engine.find_again, ["body"])
    assert pa.concat_tables(found)["body"].to_pylist() == [m["body"] for m in before["points"]]
    assert plans.resolve("starting", datetime(2020, 1, 1, tzinfo=timezone.utc))["points", 0] == 0


@pytest.mark.log("delta", orders=2, points=1)
def test_an_older_copy_of_messages_is_told(log: CommitLog, tmp_path: Path) -> None:
    fill(log, 0, 2)
    shutil.copytree(f"{log.path}/messages", tmp_path / "copy")
    let_leave(log)
    shutil.rmtree(f"{log.path}/messages")
    shutil.move(tmp_path / "copy", f"{log.path}/messages")
    with pytest.raises(CorruptLogError, match="an older copy of messages was put in its place"):
        another(log).read("points")


def test_places_of_drained_messages_that_memory_has_no_room_for_are_read_again(log: CommitLog, limit: Limit) -> None:
    limit(RUNS_CACHED_MAX=1)
    for batch_id in range(3):
        commit(log, prepare(log, batch_id, 6))
        log.drain()
    plans = planner(log, "orders")
    first = plans.ranges({}, plans.latest())
    with seen_at("files read", table="messages") as reads:
        assert plans.ranges({}, plans.latest()) == first
    assert len(reads) == 2 * 3  # for each queue


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("doubled", CorruptLogError, "offset 3 of queue 0 .* is drained twice"),
        ("lost", OffsetOutOfRangeError, "3 to 5"),
    ],
)
def test_drained_messages_that_are_there_twice_or_no_more_are_told(
    log: CommitLog, change: str, error: type[Exception], said: str
) -> None:
    for batch_id in range(3):
        commit(log, prepare(log, batch_id, 6))
        log.drain()
    table = another(log).engine.messages_table
    table.refresh()
    _, path, _ = table.actions().sort_by("min.op_version")["path"].to_pylist()
    made = Change(add=[table.write(table.read([path]))]) if change == "doubled" else Change(remove=[path])
    assert table.compare_and_set(lambda _: made, lambda _: True) is not None
    plans = planner(log, "orders")
    with pytest.raises(error, match=said):
        plans.ranges({}, plans.latest())
    with pytest.raises(CorruptLogError, match=r"table messages has (24|12) rows, and op placed 18"):
        another(log).drain()


def test_a_task_reads_the_files_of_the_table_in_the_order_of_op(log: CommitLog) -> None:
    """They were read by their names, which are random: a Spark task gave offset 13 before offset 0."""
    for batch_id in range(8):
        commit(log, prepare(log, batch_id, 6))
        log.drain()
    plans = planner(log, "orders")
    ranges = plans.ranges({}, plans.latest())
    assert len({r.rows.path for r in ranges}) > 4
    (part,) = partition_ranges(ranges)
    for queue in {r.queue_id for r in ranges}:
        offsets = [r.queue_offset for r in part if r.queue_id == queue]
        assert offsets == sorted(offsets)
