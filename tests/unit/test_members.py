"""Members of a consumer group: heartbeats, shares, claims, and what is refused of those that lost a queue."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.consumers.shares import share
from rmq_spark._core.log.group_table import MEMBERS, SPARK, Report
from tests.support.consumers import (
    DONE,
    LEASE_S,
    OwnClock,
    Steps,
    consume_all,
    go_on,
    joined,
    memory_log,
    on_own_clock,
    pass_time,
    push,
    seen_by,
    send,
)
from tests.support.inside import Members
from tests.support.meanwhile import seen_at
from tests.support.sends import raising

pytestmark = pytest.mark.log("memory", "delta", orders=2)

QUEUE, OTHER = ("orders", 0), ("orders", 1)


# ---------------------------------------------------------------- the table
def test_of_two_that_claim_what_they_saw_free_one_gets_it(log: CommitLog) -> None:
    one, two = log.another().engine.groups, log.another().engine.groups
    assert one.claim("points", "a", {QUEUE: 0}, {QUEUE: 3}, "a")[QUEUE][:2] == (3, 1)
    assert two.claim("points", "b", {QUEUE: 0}, {QUEUE: 0}, "b") == {}
    assert log.engine.groups.positions("points")[QUEUE].owner == "a"


def test_a_zombies_progress_is_refused(log: CommitLog) -> None:
    store = log.engine.groups
    store.claim("points", "a", {QUEUE: 0, OTHER: 0}, {QUEUE: 0, OTHER: 0}, "a")
    store.claim("points", "b", {QUEUE: 1}, {}, "b")
    assert store.report("points", "a", {QUEUE: Report(9, 1), OTHER: Report(9, 1)}, "a") == {QUEUE}
    assert store.next_offsets("points") == {QUEUE: 0, OTHER: 9}
    # Not with the generation of another one's claim either, nor of a claim of its own that is over.
    assert store.report("points", "a", {QUEUE: Report(9, 2)}, "a") == {QUEUE}
    store.claim("points", "a", {QUEUE: 2}, {}, "a")
    assert store.report("points", "a", {QUEUE: Report(9, 1)}, "a") == {QUEUE}
    assert store.report("points", "a", {QUEUE: Report(5, 3, release=True)}, "a") == set()
    assert store.positions("points")[QUEUE][:1] == (5,)
    assert store.positions("points")[QUEUE].owner is None


def test_a_reset_raises_the_generation_and_the_owner_is_refused(log: CommitLog) -> None:
    store = log.engine.groups
    store.claim("points", "a", {QUEUE: 0}, {QUEUE: 0}, "a")
    epoch = store.positions("points")[QUEUE].epoch
    store.set("points", {QUEUE: 0}, "a person")
    position = store.positions("points")[QUEUE]
    assert (position.generation, position.owner, position.consumer) == (2, None, MEMBERS)
    assert position.epoch != epoch
    assert store.report("points", "a", {QUEUE: Report(7, 1)}, "a") == {QUEUE}
    store.delete("points")
    assert store.report("points", "a", {QUEUE: Report(7, 1)}, "a") == {QUEUE}
    assert store.next_offsets("points") == {}


def test_a_group_is_sparks_or_its_members(log: CommitLog) -> None:
    store = log.engine.groups
    store.publish("streamed", {QUEUE: 5})
    assert store.positions("streamed")[QUEUE].consumer == SPARK
    with pytest.raises(txmq.GroupInUseError, match=r"is read by Spark, and PushConsumer .* hand-over LOG streamed"):
        store.claim("streamed", "a", {QUEUE: 1}, {}, "a")
    store.claim("pushed", "a", {QUEUE: 0}, {QUEUE: 2}, "a")
    with pytest.raises(txmq.GroupInUseError, match="is read by PushConsumer or PullConsumer, and Spark"):
        store.publish("pushed", {QUEUE: 3})
    # Handed over, either may come, and goes on where the other one stood.
    assert txmq.ConsumerGroup(log, "pushed").hand_over()
    assert store.publish("pushed", {QUEUE: 3})
    assert store.report("pushed", "a", {QUEUE: Report(9, 1)}, "a") == {QUEUE}
    got = store.claim("streamed", "a", {QUEUE: 1}, {}, "a", take_over=True)
    assert got[QUEUE].next_offset == 5
    with pytest.raises(txmq.GroupInUseError):
        store.publish("streamed", {QUEUE: 6})


# ---------------------------------------------------------------- shares
@given(st.integers(1, 64), st.integers(1, 12), st.sampled_from(["orders", "a", "%RETRY%points"]))
def test_shares_add_up_and_differ_by_one_at_most(queues: int, members: int, topic: str) -> None:
    names = [f"m{n:02}" for n in range(members)]
    shares = [share(topic, queues, names, name) for name in names]
    assert sum(shares) == queues
    assert max(shares) - min(shares) <= 1
    assert share(topic, queues, names, "a stranger") == 0


def test_topics_of_one_queue_go_to_different_members() -> None:
    topics = [f"topic-{n}" for n in range(60)]
    having = Counter(name for topic in topics for name in "abc" if share(topic, 1, ["a", "b", "c"], name))
    assert sum(having.values()) == 60
    assert min(having.values()) > 10


# ---------------------------------------------------------------- heartbeats
def members_of(log: Any, name: str) -> Members:
    return Members(log.engine.groups.table, "points", name, ["orders"], LEASE_S, 10.0)


def beat_and_look(*members: Members) -> None:
    for member in members:
        member.renew(member.beat())
        member.look()


def write_heartbeat(log: Any, name: str, told: str) -> None:
    table = log.engine.groups.table
    with table.fs.open_output_stream(f"{table.folder}/_members/points/{name}") as stream:
        stream.write(told.encode())


@pytest.fixture
def runtime(log: CommitLog) -> Steps:
    """The clock of the members of ``log``."""
    log.engine.groups.table.runtime = Steps()
    return log.engine.groups.table.runtime


def test_a_member_is_dead_when_its_counter_has_not_moved_for_the_lease(log: CommitLog, runtime: Steps) -> None:
    a, b = members_of(log, "a"), members_of(log, "b")
    beat_and_look(a, b)
    a.look()
    assert a.live("orders") == b.live("orders") == ["a", "b"]
    assert a.live("returns") == []
    runtime.sleep(LEASE_S - 1)
    a.renew(a.beat())
    for member in (a, b):
        member.look()
    runtime.sleep(2)
    assert a.live("orders") == ["a"]
    assert a.is_dead("b")
    assert not b.is_dead("a")
    assert not b.may_start()
    b.renew(b.beat())
    a.look()
    assert not a.is_dead("b")
    b.leave()
    a.look()
    assert a.live("orders") == ["a"]
    assert not a.is_dead("b"), "who has left has released its queues, or has the lease"
    assert not a.is_dead("never seen")
    runtime.sleep(LEASE_S + 1)
    assert a.is_dead("b")
    assert a.is_dead("never seen")


def test_a_member_with_another_lease_is_judged_by_its_own(log: CommitLog, runtime: Steps) -> None:
    """One with a lease of 2 s took the queues of those with 30 s again and again, and messages came twice."""
    patient, hasty = members_of(log, "a"), Members(log.engine.groups.table, "points", "b", ["orders"], 2.0, 0.5)
    beat_and_look(patient, hasty, patient)
    runtime.sleep(3)
    assert not hasty.is_dead("a")
    assert hasty.live("orders") == ["a", "b"]
    assert patient.is_dead("b")
    runtime.sleep(LEASE_S)
    assert hasty.is_dead("a")


@pytest.mark.parametrize("lease", ["-1", "0", "NaN", "Infinity", "1e300", "null", '"long"'])
def test_a_lease_that_cannot_be_is_not_believed(log: CommitLog, runtime: Steps, lease: str) -> None:
    a = members_of(log, "a")
    a.renew(a.beat())
    write_heartbeat(log, "b", f'{{"counter": 1, "topics": ["orders"], "lease": {lease}}}')
    a.look()
    assert not a.is_dead("b")
    runtime.sleep(LEASE_S + 1)
    assert a.is_dead("b")


def test_no_wall_clock_is_looked_at() -> None:
    """The observer's is set back and ahead by years, and the other's is another one altogether."""
    here, there = Steps(), OwnClock()
    there.wall_s -= 1e9
    there.since_s = 5.0
    log = memory_log(here)
    a, b = members_of(log, "a"), members_of(on_own_clock(log, there), "b")
    for jump_s in (0.0, 3e8, -6e8):
        here.wall_s += jump_s
        beat_and_look(b, a)
        here.sleep(LEASE_S - 1)
        there.sleep(LEASE_S - 1)
        assert not a.is_dead("b")
        assert not b.is_dead("a")
    here.sleep(2)
    assert a.is_dead("b")
    assert not b.is_dead("a"), "its own clock says otherwise"


def test_the_heartbeat_of_a_dead_member_is_removed_in_the_end() -> None:
    log = memory_log()
    a, b = members_of(log, "a"), members_of(log, "b")
    beat_and_look(b, a)
    assert list(txmq.ConsumerGroup(log, "points").members()) == ["a", "b"]
    for _ in range(4):
        log.engine.runtime.sleep(LEASE_S)
        a.renew(a.beat())
        a.look()
    assert list(txmq.ConsumerGroup(log, "points").members()) == ["a"]
    b.leave()  # when it wakes up


def test_a_member_that_comes_long_after_another_was_killed_takes_all_queues_at_once() -> None:
    log = memory_log()
    killed = joined(log, seen_by([]))
    log.engine.runtime.sleep(2 * LEASE_S)
    assert list(txmq.ConsumerGroup(log, "points").members()) == [killed.member.name]
    log.engine.runtime.sleep(2 * LEASE_S)
    assert txmq.ConsumerGroup(log, "points").members() == {}
    late = joined(log.another(), seen_by([]))
    assert queues_of([late]) == [2]


# ---------------------------------------------------------------- together
def queues_of(consumers: list[Any]) -> list[int]:
    """How many queues of ``orders`` each has."""
    return [sum(topic == "orders" for topic, _ in consumer.queues()) for consumer in consumers]


def all_of(consumers: list[Any]) -> list[tuple[str, int]]:
    return sorted(queue for consumer in consumers for queue in consumer.queues())


def test_members_share_the_queues_without_a_leader_as_they_come_and_go() -> None:
    log = memory_log(orders=8)
    every = sorted([*(("orders", n) for n in range(8)), ("%RETRY%points", 0)])
    consumers = [joined(log, seen_by([]))]
    assert queues_of(consumers) == [8]
    consumers += [joined(log, seen_by([])) for _ in range(2)]
    pass_time(consumers, 25)
    assert sorted(queues_of(consumers)) == [2, 3, 3]
    assert all_of(consumers) == every
    kept = [{q for q in consumer.queues() if q[0] == "orders"} for consumer in consumers]
    consumers.append(joined(log, seen_by([])))
    pass_time(consumers, 25)
    assert queues_of(consumers) == [2, 2, 2, 2]
    now = [{q for q in consumer.queues() if q[0] == "orders"} for consumer in consumers[:3]]
    assert all(after <= before for after, before in zip(now, kept, strict=True)), "no more change hands than must"
    consumers.pop(1).member.leave()
    pass_time(consumers, 25)
    assert sorted(queues_of(consumers)) == [2, 3, 3]
    assert all_of(consumers) == every
    dead = consumers.pop(0)
    pass_time(consumers, LEASE_S + 25)
    assert queues_of(consumers) == [4, 4]
    assert all_of(consumers) == every
    assert not dead.member.may_start()


def test_what_a_dead_member_left_comes_at_another_one_and_its_own_late_report_is_refused() -> None:
    log = memory_log()
    send(log, "abcdef")
    first, then = [], []
    paused = consume_all(log, seen_by(first))
    send(log, "ghij")
    paused.member.fetch()
    with paused.member.changed:
        take = paused._take()
    other = joined(log, seen_by(then))
    pass_time([other], LEASE_S + 15)
    go_on(other)
    assert sorted(then) == list("ghij")
    # The first one wakes up within its call, and ends it. It starts no other one before it has looked.
    paused.consume(take)
    assert not paused.work()
    before = log.engine.groups.next_offsets("points")
    paused.member.persist()
    assert log.engine.groups.next_offsets("points") == before
    assert take.queue.queue not in paused.queues()
    pass_time([paused, other], 25)
    assert queues_of([paused, other]) == [1, 1]
    send(log, "kl")
    for consumer in (paused, other):
        go_on(consumer)
    assert Counter(first + then)["k"] == Counter(first + then)["l"] == 1


def test_a_member_that_slept_looks_before_it_goes_on() -> None:
    log = memory_log()
    send(log, "abcd")
    mine: list[str] = []
    sleeper = joined(log, seen_by(mine))
    sleeper.member.fetch()
    log.engine.runtime.sleep(LEASE_S - 10 - 1)
    assert sleeper.member.may_start()
    log.engine.runtime.sleep(2)
    assert not sleeper.work(), "its heartbeat is older than the lease less a margin"
    other = joined(log, seen_by([]))
    pass_time([other], LEASE_S + 5)
    sleeper.member.keep()  # it puts a heartbeat, and finds that the queues have gone
    assert not sleeper.work()
    assert mine == []


def test_a_member_whose_store_does_not_answer_tries_again_and_leaves_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = memory_log(orders=1)
    send(log, "a")
    consumer = joined(log, seen_by([]))
    consumer.member.fetch()
    assert consumer.work()
    down = raising(txmq.StorageError("no answer"))
    with seen_at("commit begins", down, table="groups"):
        pass_time([consumer], 5)
    assert "progress was not written: no answer" in caplog.text
    pass_time([consumer], 5)
    assert log.engine.groups.next_offsets("points")[QUEUE] == 1
    with seen_at("commit begins", down, table="groups"):
        consumer.member.leave()
    assert "leaving failed: no answer" in caplog.text


def test_a_reset_reaches_a_consumer_that_has_nothing_to_report() -> None:
    log = memory_log()
    send(log, "abcd")
    found: list[str] = []
    consumer = consume_all(log, seen_by(found))
    txmq.ConsumerGroup(log, "points").reset("earliest", ["orders"])
    pass_time([consumer], 12)
    go_on(consumer)
    assert sorted(found) == sorted("abcd" * 2)


def test_a_group_that_begins_at_the_end_begins_at_one_moment_in_all_queues() -> None:
    """A queue that nobody can claim yet must not lose what comes until somebody does."""
    log = memory_log(orders=4)
    ghost = members_of(log, "aaa")
    ghost.topics = frozenset(["orders", "%RETRY%points"])
    ghost.renew(ghost.beat())
    found: list[str] = []
    consumer = joined(log, seen_by(found), consume_from_where="CONSUME_FROM_LAST_OFFSET")
    assert queues_of([consumer]) == [2]
    send(log, "abcdefgh", queue_id=list(range(4)) * 2)
    pass_time([consumer], LEASE_S + 15)
    go_on(consumer)
    assert sorted(found) == list("abcdefgh")


def test_members_that_read_other_topics_have_no_share_of_a_queue() -> None:
    log = memory_log(orders=2, returns=2)
    one, two = joined(log, seen_by([]), topics="orders"), joined(log, seen_by([]), topics="returns")
    pass_time([one, two], 25)
    assert {t for t, _ in one.queues()} - {"%RETRY%points"} == {"orders"}
    assert queues_of([one, two]) == [2, 0]
    assert sum(topic == "%RETRY%points" for topic, _ in all_of([one, two])) == 1


def test_members_that_subscribe_otherwise_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log = memory_log(orders=2)
    consumers = [joined(log, seen_by([]), tags=tags) for tags in ("paid || late", "late||paid", "paid", "*")]
    txmq.PullConsumer(log.another(), "points", "orders", "late || paid").member.join()
    pass_time(consumers, 45)
    names = [consumer.member.name for consumer in consumers]
    first = [r.getMessage() for r in caplog.records if r.member == names[0] and "this member reads" in r.getMessage()]
    assert len(first) == 2, "one of another order of tags, and one without retries, choose the same"
    assert "this member reads 'orders' (of them 'late || paid'), and" in first[0]
    assert f"and member '{names[2]}' reads 'orders' (of them 'paid'). Members share" in first[0]
    assert f"and member '{names[3]}' reads 'orders'. Members share the queues" in first[1]


def test_a_selector_with_two_bars_in_it_is_told_as_it_was_written(caplog: pytest.LogCaptureFixture) -> None:
    """It was taken apart at the bars, as tags are."""
    log = memory_log(orders=2)
    for selector in ("region = 'eu || asia'", "region = 'us'"):
        joined(log, seen_by([]), selector=selector)
    assert "reads 'orders' (of them \"region = 'eu || asia'\")" in caplog.text


def test_a_heartbeat_that_was_read_while_it_was_written_is_compared_with_none(caplog: pytest.LogCaptureFixture) -> None:
    log = memory_log(orders=2)
    one, cut = push(log, seen_by([]), tags="paid"), members_of(log, "cut")
    cut.beat()
    write_heartbeat(log, "cut", '{"counter"')
    one.member.join()
    assert not [r for r in caplog.records if "this member reads" in r.getMessage()]


def test_a_group_that_spark_reads_is_refused_unless_taken_over(log: CommitLog) -> None:
    log.engine.groups.publish("points", {QUEUE: 0})
    with pytest.raises(txmq.GroupInUseError, match="is read by Spark"):
        push(log, seen_by([])).member.join()
    consumer = joined(log, seen_by([], DONE), take_over=True)
    assert set(consumer.queues()) == {QUEUE, OTHER, ("%RETRY%points", 0)}
    consumer.member.leave()
