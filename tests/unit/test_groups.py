"""Consumer groups: their progress, their lag, and putting them elsewhere."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.consumers.consumer_group import groups
from tests.support import commands
from tests.support.commands import objects
from tests.support.half_batches import another, commit, let_leave, make_log, prepare
from tests.support.inside import GroupPosition, Members, Session

pytestmark = pytest.mark.log("memory", "delta", orders=2, returns=1)


QUEUE = ("orders", 0)


def lag_of(group: txmq.ConsumerGroup, column: str = "lag") -> dict[tuple[str, int], object]:
    rows = group.lag().to_pylist()
    return {(r["topic"], r["queue_id"]): r[column] for r in rows}


def test_progress_is_kept_and_never_runs_backwards(log: CommitLog) -> None:
    one, zombie = Session("one"), Session("a-zombie")
    assert log.engine.groups.publish("points", {("orders", 0): 5, ("orders", 1): 3}, one)
    assert log.engine.groups.publish("points", {("orders", 1): 7}, zombie)
    assert not log.engine.groups.publish("points", {("orders", 1): 1}, zombie)
    group = txmq.ConsumerGroup(another(log), "points")
    assert group.positions() == {("orders", 0): 5, ("orders", 1): 7}
    by = {r["queue_id"]: r["updated_by"] for r in log.engine.groups.rows("points").to_pylist()}
    assert by == {0: "one", 1: "a-zombie"}


def test_a_suspended_queue_stays_until_its_suspension_is_answered(log: CommitLog) -> None:
    store = another(log).engine.groups
    now = datetime.now(timezone.utc)
    store.publish("points", {QUEUE: 10, ("orders", 1): 10})
    store.progress("points", {QUEUE: 12}, "batch 3", {QUEUE: now})
    store.publish("points", {QUEUE: 20, ("orders", 1): 20})
    assert store.next_offsets("points") == {QUEUE: 12, ("orders", 1): 20}
    later = now + timedelta(seconds=1)
    store.progress("points", {QUEUE: 14}, "batch 4", {QUEUE: later})
    store.publish("points", {QUEUE: 20}, answered={QUEUE: now})  # it was suspended anew
    assert store.positions("points")[QUEUE][:2] == GroupPosition(14, later)[:2]
    store.publish("points", {QUEUE: 20}, answered={QUEUE: later})
    assert store.positions("points")[QUEUE][:2] == GroupPosition(20)[:2]


def test_what_is_consumed_or_reset_is_not_suspended_any_more(log: CommitLog) -> None:
    now = datetime.now(timezone.utc)
    for free in (
        lambda: log.engine.groups.progress("points", {QUEUE: 14}, "batch 4"),
        lambda: log.engine.groups.set("points", {QUEUE: 14}, "a person"),
    ):
        log.engine.groups.progress("points", {QUEUE: 12}, "batch 3", {QUEUE: now})
        assert log.engine.groups.positions("points")[QUEUE].suspended_until == now
        free()
        assert log.engine.groups.positions("points")[QUEUE][:2] == (14, None)
        log.engine.groups.delete("points")


def test_of_two_queries_of_a_group_the_second_is_told(log: CommitLog) -> None:
    first, second = Session("z-first", "zzzz"), Session("a-second", "aaaa")  # neither a name nor a clock says it
    one, two = another(log).engine.groups, another(log).engine.groups
    one.publish("points", {QUEUE: 5}, first)
    two.publish("points", {QUEUE: 5}, second)  # perhaps the first has died: it may go on
    one.publish("points", {QUEUE: 6}, first)
    said = r"queue 0 of topic 'orders' is being read by an older query \(z-first\)"
    with pytest.raises(txmq.GroupInUseError, match=said):
        two.publish("points", {QUEUE: 7}, second)
    assert one.publish("points", {QUEUE: 7}, first)
    assert one.publish("points", {("orders", 1): 7}, second), "another queue is free"


def test_one_query_after_the_other_is_no_second(log: CommitLog) -> None:
    for n in range(5):
        session = Session(f"run-{n}")
        for offset in (2 * n, 2 * n + 1, 2 * n + 1):
            log.engine.groups.publish("points", {QUEUE: offset}, session)
            log.engine.groups.progress("points", {QUEUE: offset}, "an orderly consumer")
    log.engine.groups.set("points", {QUEUE: 0}, "a person")
    assert log.engine.groups.publish("points", {QUEUE: 1}, session)


def test_groups_do_not_disturb_each_other(log: CommitLog) -> None:
    handles = [another(log) for _ in range(4)]
    handles[0].engine.groups.publish("g0", {("orders", 0): 0}, Session("warm-up"))  # the table is made once

    def publish(i: int) -> None:
        me = Session()
        for n in range(1, 8):
            handles[i].engine.groups.publish(f"g{i}", {("orders", 0): n}, me)
            handles[i].engine.groups.publish("shared", {("orders", i % 2): n + i})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(publish, range(4)))
    assert groups(log.engine) == ["g0", "g1", "g2", "g3", "shared"]
    assert [log.engine.groups.next_offsets(f"g{i}") for i in range(4)] == [{("orders", 0): 7}] * 4
    assert log.engine.groups.next_offsets("shared") == {("orders", 0): 9, ("orders", 1): 10}
    log.engine.groups.table.refresh()
    assert log.engine.groups.table.actions().num_rows == 5  # a file each


def test_lag_counts_messages_seconds_and_what_is_not_visible_yet(log: CommitLog) -> None:
    commit(log, prepare(log, 0, 4))
    time.sleep(0.2)
    commit(log, prepare(log, 1, 4))
    prepare(log, 2, 3)
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    commit(log, prepare(log, 3, {"body": ["x"], "deliver_at": [later], "queue_id": [1]}))
    group = txmq.ConsumerGroup(log, "points")
    log.engine.groups.publish("points", {("orders", 0): 2, ("orders", 1): 4})
    assert lag_of(group) == {("orders", 0): 2, ("orders", 1): 0}
    assert lag_of(group, "end_offset") == {("orders", 0): 4, ("orders", 1): 4}
    seconds = lag_of(group, "lag_seconds")
    assert 0 < seconds[("orders", 0)] < 5  # type: ignore[operator]
    assert seconds[("orders", 1)] == 0
    assert sum(lag_of(group, "pending").values()) == 3  # type: ignore[arg-type]
    assert lag_of(group, "waiting") == {("orders", 0): 0, ("orders", 1): 1}


def test_a_reset_moves_a_group_both_ways(log: CommitLog) -> None:
    commit(log, prepare(log, 0, 4))
    time.sleep(0.01)
    between = datetime.now(timezone.utc)
    time.sleep(0.01)
    commit(log, prepare(log, 1, 4))
    group = txmq.ConsumerGroup(log, "points")
    assert group.reset("latest", ["orders"]) == {("orders", 0): 4, ("orders", 1): 4}
    assert group.reset("earliest") == {("orders", 0): 0, ("orders", 1): 0}
    assert group.reset(between) == {("orders", 0): 2, ("orders", 1): 2}
    assert group.reset({"orders": {"0": 3, "1": 1}}) == {("orders", 0): 3, ("orders", 1): 1}
    assert group.positions() == {("orders", 0): 3, ("orders", 1): 1}
    group.reset("earliest", ["returns"])
    assert set(group.positions()) == {("orders", 0), ("orders", 1), ("returns", 0)}
    assert lag_of(group) == {("orders", 0): 1, ("orders", 1): 3, ("returns", 0): 0}


def test_a_reset_to_what_has_expired_is_refused(log: CommitLog) -> None:
    commit(log, prepare(log, 0, 4))
    log.engine.topic_store.set_retention("orders", 0.0)
    let_leave(log)
    group = txmq.ConsumerGroup(log, "points")
    said = "offsets 1 to 1 have expired; the queue starts at offset 2 now"
    with pytest.raises(txmq.OffsetOutOfRangeError, match=said):
        group.reset({"orders": {"0": 2, "1": 1}})
    assert group.positions() == {}
    assert group.reset("earliest", ["orders"]) == {("orders", 0): 2, ("orders", 1): 2}


def test_a_reset_of_some_queues_leaves_the_others_where_they_are(log: CommitLog) -> None:
    commit(log, prepare(log, 0, 4))
    group = txmq.ConsumerGroup(log, "points")
    assert group.reset({"orders": {"1": 1}}, others_stay=True) == {("orders", 1): 1}
    assert group.positions() == {("orders", 1): 1}
    group.reset("latest", ["orders"])
    assert group.reset({"orders": {"0": 0}}, others_stay=True) == {("orders", 0): 0}
    assert group.positions() == {("orders", 0): 0, ("orders", 1): 2}
    with pytest.raises(txmq.OffsetError, match="past its end, which is 2"):
        group.reset({"orders": {"0": 3}}, others_stay=True)
    with pytest.raises(txmq.OptionError, match="no offset of topic 'returns' is given"):
        group.reset({"orders": {"0": 0}}, ["orders", "returns"], others_stay=True)


def test_a_clone_stands_where_the_first_stands(log: CommitLog) -> None:
    txmq.ConsumerGroup(log, "points").reset("latest", ["orders"])
    clone = txmq.ConsumerGroup(log, "points").clone("points-2")
    assert clone.positions() == txmq.ConsumerGroup(log, "points").positions()
    with pytest.raises(txmq.OptionError, match="has progress of its own"):
        txmq.ConsumerGroup(log, "points").clone("points-2")
    assert clone.delete()
    assert not clone.delete()
    assert groups(log.engine) == ["points"]


@pytest.mark.parametrize(
    ("work", "error", "sentence"),
    [
        (lambda g: g.lag(), txmq.GroupNotFoundError, "'points' has no progress"),
        (lambda g: g.reset("earliest"), txmq.GroupNotFoundError, "Name its topics to say where a new group begins"),
        (lambda g: g.reset("latest"), txmq.GroupNotFoundError, "no progress"),
        (lambda g: g.clone("other"), txmq.GroupNotFoundError, "no progress"),
        (lambda g: g.reset("newest", ["orders"]), txmq.OptionError, "neither 'earliest' nor 'latest'"),
        (lambda g: g.reset(datetime(2025, 1, 1), ["orders"]), txmq.OptionError, "no time zone"),
        (lambda g: g.reset("latest", []), txmq.OptionError, "no topic is named"),
        (lambda g: g.reset("latest", ["order"]), txmq.TopicNotFoundError, "did you mean 'orders'"),
        (lambda g: g.reset({"orders": {"0": 1, "1": 0}}), txmq.OffsetOutOfRangeError, "past its end"),
        (lambda g: g.reset({"orders": {"0": 0}}), txmq.OffsetError, "leaves out queue 1"),
        (lambda g: g.reset({"orders": 3}), txmq.OffsetError, "not of the form"),
    ],
)
def test_what_cannot_be_done_is_said(log: CommitLog, work: object, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        work(txmq.ConsumerGroup(log, "points"))  # type: ignore[operator]
    assert groups(log.engine) == []


def test_a_name_that_is_no_group_is_refused(log: CommitLog) -> None:
    with pytest.raises(txmq.MessageError, match="consumerGroup"):
        txmq.ConsumerGroup(log, "no group")


def test_progress_survives_another_process_and_vacuum(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log")
    for n in range(30):
        log.engine.groups.publish("points", {("orders", 0): n + 1})
    CommitLog.open(log.path).vacuum()
    assert txmq.ConsumerGroup(log.path, "points").positions() == {("orders", 0): 30}


def test_who_begins_where_a_queue_is_suspended_reads_it_once(log: CommitLog) -> None:
    """A query without an orderly consumer, after one with: it read everything from there twice."""
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    log.engine.groups.progress("points", {QUEUE: 2}, "an orderly consumer", {QUEUE: later})
    session = Session()
    log.engine.groups.publish("points", {QUEUE: 2}, session)
    assert log.engine.groups.positions("points")[QUEUE].suspended_until is None
    log.engine.groups.publish("points", {QUEUE: 5}, session)
    assert log.engine.groups.next_offsets("points") == {QUEUE: 5}


def test_the_command(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log")
    commit(log, prepare(log, 0, 4))

    def run(*arguments: str) -> str:
        return commands.txmq("group", *arguments)[0]

    assert "no consumer group has read" in run("list", log.path)
    run("reset", log.path, "points", "--to", "earliest", "--topic", "orders")
    found = objects("group", "list", log.path)
    assert [(r["consumer_group"], r["topics"], r["lag"]) for r in found] == [("points", "orders", 4)]
    assert [r["lag"] for r in objects("group", "lag", log.path, "points")] == [2, 2]
    run("reset", log.path, "points", "--to", '{"orders": {"1": 1}}')
    assert [r["lag"] for r in objects("group", "lag", log.path, "points")] == [2, 1]
    run("reset", log.path, "points", "--to", "2020-01-01T00:00:00Z")
    assert log.engine.groups.claim("points", "host@1.abc", {("orders", 0): 2}, {}, "host@1")
    (row, _) = objects("group", "lag", log.path, "points")
    assert (row["owner"], row["generation"], row["heartbeat_seconds"]) == ("host@1.abc", 3, None)
    Members(log.engine.groups.table, "points", "host@1.abc", ["orders"], 30, 10).beat()
    (row, _) = objects("group", "lag", log.path, "points")
    assert 0 <= row["heartbeat_seconds"] < 60
    assert "host@1.abc" in run("lag", log.path, "points")
    assert objects("group", "list", log.path)[0]["members"] == 1
    assert "points is free" in run("hand-over", log.path, "points")
    assert "owner" not in run("lag", log.path, "points")
    assert "points-2 stands where points stands" in run("clone", log.path, "points", "points-2")
    Members(log.engine.groups.table, "points-2", "host@2.def", ["orders"], 30, 10).beat()
    assert "points is forgotten" in run("delete", log.path, "points")
    beats = [file.name for file in (Path(log.path) / "groups" / "_members").rglob("*") if file.is_file()]
    assert beats == ["host@2.def"], "the heartbeats of the group are gone with it"
