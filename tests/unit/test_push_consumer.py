"""PushConsumer, step by step on a clock of its own, and in its threads."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.vocabulary.options import DELAY_LEVELS_S
from tests.support.consumers import (
    DONE,
    LATER,
    Steps,
    consume_all,
    go_on,
    joined,
    memory_log,
    pass_time,
    push,
    queue_of,
    seen_by,
    send,
    wait_until,
)
from tests.support.half_batches import bodies, in_half, let_leave, make_log
from tests.support.inboxes import inbox_of, make_database, results
from tests.support.inside import Runtime, Who, push_module, restored, sent_back
from tests.support.limits import Limit
from tests.support.meanwhile import at, dies_at, no_thread_starts, seen_at
from tests.support.seeds import how_many
from tests.support.sends import raising

pytestmark = pytest.mark.log("memory", orders=2)
also_on_delta = pytest.mark.log("memory", "delta", orders=2)
"""What a consumer reads from the tables, and what it writes there."""

QUEUE = ("orders", 0)


def fails_on(bad: Collection[str], found: list[str] | None = None) -> txmq.EachMessage:
    """A listener that does not consume messages with one of these letters."""

    def listen(message: txmq.MessageExt) -> Any:
        body = bytes(message.body).decode()  # type: ignore[arg-type]
        if found is not None:
            found.append(body)
        return LATER if body in bad else DONE

    return txmq.EachMessage(listen)


def dies(consumer: Any) -> None:
    """As if its lease were over: its queues are free, and nobody counts with it."""
    consumer.member._members.leave()
    consumer.member.engine.groups.hand_over(consumer.member.group, "the lease is over")


# ---------------------------------------------------------------- forms of a listener
def takes_one(message: txmq.MessageExt) -> Any:
    return DONE


def takes_a_list(messages: list[txmq.MessageExt]) -> Any:
    return DONE


async def waits(messages: Any) -> Any:
    return DONE


IS_A_COROUTINE = "got the coroutine function waits: a plain function is expected"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: push(memory_log(), "print"), r"got str: a function of a pyarrow\.Table"),
        (lambda: push(memory_log(), takes_one), r"takes_one takes txmq\.MessageExt: .* txmq\.EachMessage\(takes_one\)"),
        (lambda: push(memory_log(), takes_a_list), r"of a list of messages: txmq\.EachBatch\(takes_a_list\)"),
        (lambda: push(memory_log(), waits), IS_A_COROUTINE),
        (lambda: txmq.EachMessage("print"), "EachMessage got str: a function of one message"),
        (lambda: txmq.consumers.EachBatch("print"), "EachBatch got str: a function of a list of messages"),
        (lambda: txmq.EachMessage(waits), IS_A_COROUTINE),
        (lambda: txmq.consumers.EachBatch(waits), IS_A_COROUTINE),
    ],
)
def test_what_is_no_listener_is_refused_at_once(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(txmq.ListenerError, match=said):
        make()


def test_a_table_taken_for_a_message_ends_the_consumer_and_makes_no_dead_letters(log: CommitLog) -> None:
    """A health check of a service is told: the program goes on, and consumes nothing."""
    send(log, "abc")
    consumer = push(log, lambda message: message.body)
    assert not consumer.is_running
    consumer.start()
    assert consumer.member.stopping.wait(60)
    assert not consumer.is_running
    assert isinstance(consumer.problem, txmq.ListenerError)
    words = r"asked a pyarrow\.Table for \.body: .* txmq\.EachMessage\(function\)"
    with pytest.raises(txmq.ListenerError, match=words):
        consumer.shutdown()
    assert consumer.problem is None
    assert bodies(log, "%RETRY%points") == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda log: txmq.PushConsumer(log, "g", takes_one, "orders", consume_thread_mx=1),
         r"PushConsumer\(\) has no argument 'consume_thread_mx': did you mean 'consume_thread_max'\?"),
        (lambda log: txmq.PullConsumer(log, "g", "orders", stop_at_the_end=True),
         r"PullConsumer\(\) has no argument 'stop_at_the_end': did you mean 'stop_at_end'\?"),
        (lambda log: txmq.TransactionMQProducer.transaction(None, None, idempotency_key="a"),
         r"transaction\(\) has no argument 'idempotency_key': known are session"),
        (lambda log: txmq.CommitLog.create("log", topic="orders"), r"create\(\) has no argument 'topic': known are"),
        (lambda log: log.create_topic("bills", queue=3), r"create_topic\(\) has no argument 'queue': .* 'queues'"),
        (lambda log: log.read("orders", tag="paid"), r"read\(\) has no argument 'tag': did you mean 'tags'"),
        (lambda log: txmq.CheckService(log, listener={}), r"CheckService\(\) .* did you mean 'listeners'"),
        (lambda log: txmq.TransactionMQProducer(log, "g", listner=None),
         r"TransactionMQProducer\(\) has no argument 'listner': did you mean 'listener'"),
        (lambda log: txmq.SqlTransactionListener("sqlite://", takes_one, fence="orders"),
         r"SqlTransactionListener\(\) .* did you mean 'fence_table'"),
    ],
)  # fmt: skip
def test_a_misspelt_argument_names_the_nearest_one(call: Any, words: str) -> None:
    with pytest.raises(txmq.OptionError, match=words):
        call(memory_log())


@also_on_delta
@pytest.mark.parametrize("form", ["table", "list", "one"])
def test_a_listener_gets_every_message_once_whatever_its_form(log: CommitLog, form: str) -> None:
    send(log, "abcdef", tags=list("xyxyxy"), properties=pa.array([[("n", "1")]] * 6, pa.map_(pa.string(), pa.string())))
    found: list[Any] = []

    def table(messages: pa.Table) -> Any:
        found.extend(messages.select(["queue_id", "queue_offset", "tags", "reconsume_times"]).to_pylist())
        return DONE

    def one(message: txmq.MessageExt) -> Any:
        assert isinstance(message, txmq.MessageExt)
        assert message.topic == "orders"
        assert message.properties == {"n": "1"}
        names = ("queue_id", "queue_offset", "tags", "reconsume_times")
        found.append({name: getattr(message, name) for name in names})
        return DONE

    def several(messages: list[txmq.MessageExt]) -> Any:
        assert len(messages) == 1, "RocketMQ's consumeMessageBatchMaxSize"
        return [one(message) for message in messages]

    listener = {"table": table, "list": txmq.consumers.EachBatch(several), "one": txmq.EachMessage(one)}[form]
    consumer = consume_all(log, listener)
    assert sorted((m["queue_id"], m["queue_offset"]) for m in found) == [(q, n) for q in (0, 1) for n in (0, 1, 2)]
    assert {m["reconsume_times"] for m in found} == {0}
    assert sorted(m["tags"] for m in found) == list("xxxyyy")
    assert log.engine.groups.next_offsets("points")[QUEUE] == 3
    assert not consumer.work()


@also_on_delta
def test_messages_for_a_listener_are_what_the_log_has(log: CommitLog) -> None:
    send(log, ["a", "b"], keys=["k", None], sharding_key=["s", "s"])
    read = log.read("orders")
    found: list[txmq.MessageExt] = []
    consume_all(log, txmq.EachMessage(lambda m: (found.append(m), DONE)[1]))
    assert len(found) == 2
    for message, row in zip(found, read.to_pylist(), strict=True):
        same = {name: getattr(message, name) for name in row if name not in ("properties", "commit_timestamp")}
        assert same == {name: row[name] for name in same}
        built = txmq.MessageExt(**{name: getattr(message, name) for name in txmq.MessageExt.__dataclass_fields__})
        assert built == message, "every field is there, as the class itself makes them"


@also_on_delta
def test_only_messages_that_are_wanted_come_and_the_others_count_as_done(log: CommitLog) -> None:
    send(log, "abcdefg", tags=list("xyxyxyy"), queue_id=[0] * 6 + [1])
    for options in ({"tags": "x"}, {"selector": "TAGS = 'x'"}):
        found: list[str] = []
        consumer = consume_all(log, seen_by(found), group=next(iter(options)), **options)
        assert found == ["a", "c", "e"]
        offsets = log.engine.groups.next_offsets(consumer.member.group)
        assert (offsets[QUEUE], offsets["orders", 1]) == (6, 1)


@also_on_delta
def test_a_group_begins_where_it_is_told(log: CommitLog) -> None:
    send(log, "ab", queue_id=[0, 0])
    moment = log.read("orders")["commit_timestamp"][0].as_py() + timedelta(microseconds=1)
    send(log, "cd", queue_id=[0, 0])
    found: dict[str, list[str]] = {"FIRST_OFFSET": [], "LAST_OFFSET": [], "TIMESTAMP": []}
    consumers = []
    for name, seen in found.items():
        more = {"consume_timestamp": moment} if name == "TIMESTAMP" else {}
        where = f"CONSUME_FROM_{name}"
        consumers.append(joined(log, seen_by(seen), group=name, consume_from_where=where, **more))
    send(log, "e", queue_id=[0])
    for consumer in consumers:
        go_on(consumer)
    assert found == {"FIRST_OFFSET": list("abcde"), "LAST_OFFSET": ["e"], "TIMESTAMP": list("cde")}


@also_on_delta
def test_drained_messages_and_the_tail_come_in_order(log: CommitLog) -> None:
    for n in range(3):
        send(log, [f"{n}.{i}" for i in range(4)], queue_id=[0, 1] * 2)
    log.drain()
    send(log, ["3.0", "3.1"], queue_id=[0, 1])
    found: list[tuple[int, int]] = []

    def listen(messages: pa.Table) -> Any:
        found.extend(zip(messages["queue_id"].to_pylist(), messages["queue_offset"].to_pylist(), strict=True))
        return DONE

    consume_all(log, listen, mode="orderly")
    for queue_id in (0, 1):
        assert [offset for q, offset in found if q == queue_id] == list(range(7))


# ---------------------------------------------------------------- progress
def fetched(log: CommitLog, listener: Any, **options: Any) -> Any:
    """A consumer that has joined its group and fetched, and has consumed nothing yet."""
    consumer = joined(log, listener, **options)
    consumer.member.fetch()
    return consumer


def take(consumer: Any) -> Any:
    """What a thread takes next."""
    with consumer.member.changed:
        return consumer._take()


def test_progress_is_the_lowest_unfinished_offset() -> None:
    log = queue_of("abcdef")
    consumer = fetched(log, seen_by([]), consume_message_batch_max_size=2)
    takes = [take(consumer) for _ in range(3)]
    progress = []
    for taken in (takes[1], takes[0], takes[2]):
        consumer.consume(taken)
        consumer.member.persist()
        progress.append(log.engine.groups.next_offsets("points")[QUEUE])
    assert progress == [0, 4, 6]


def test_progress_stays_below_takes_that_came_back_in_their_order() -> None:
    log = queue_of("abcdef")
    found: list[str] = []
    consumer = fetched(log, seen_by(found), consume_message_batch_max_size=2)
    takes = [take(consumer) for _ in range(3)]
    for taken in takes:
        consumer._give_back(taken, 0)
    consumer.member.persist()
    assert log.engine.groups.next_offsets("points")[QUEUE] == 0
    go_on(consumer)
    assert found == list("abcdef")


def test_what_several_threads_gave_back_is_not_lost_by_a_shutdown() -> None:
    log = queue_of("abcdef")
    consumer = fetched(log, seen_by([]), consume_message_batch_max_size=2)
    takes = [take(consumer) for _ in range(3)]
    for taken in takes:
        consumer._give_back(taken, 1)
    consumer.member.leave()
    assert log.engine.groups.next_offsets("points")[QUEUE] == 1


def test_progress_is_written_at_most_once_a_second_and_not_at_all_when_nothing_moved() -> None:
    log = memory_log(orders=1)
    consumer = joined(log, seen_by([]))
    before = log.engine.groups.table.refresh()
    for letter in "abcdef":
        send(log, [letter])
        consumer.member.fetch()
        consumer.work()
        consumer.member.keep()
        log.engine.runtime.sleep(0.25)
    assert log.engine.groups.table.refresh() - before == 2
    pass_time([consumer], 20)
    assert log.engine.groups.table.refresh() - before == 3


def test_on_an_object_store_the_members_of_all_groups_take_turns_with_their_progress() -> None:
    log = memory_log(orders=1)
    for n in range(19):
        joined(log, seen_by([]), group=f"group-{n}")
    consumer = push(log, seen_by([]))
    consumer.member._is_remote = True
    consumer.member.join()
    written = []
    for n in range(12):
        send(log, [str(n)])
        consumer.member.fetch()
        consumer.work()
        before = log.engine.groups.table.refresh()
        consumer.member.keep()
        written.append(log.engine.groups.table.refresh() - before)
        log.engine.runtime.sleep(1.0)
    assert written == [1, 0, 0, 0] * 3, "20 members, 0.2 s each"


def test_no_more_than_max_span_is_under_way_behind_a_message_that_does_not_end() -> None:
    log = queue_of([str(n) for n in range(50)])
    consumer = fetched(log, fails_on(""), max_span=10)
    stuck = take(consumer)  # the first of a kind: one message
    assert stuck.messages.num_rows == 1
    while consumer.member.fetch() or consumer.work():
        pass
    assert consumer.member.queues[QUEUE].fetched_to == 10
    consumer.member.persist()
    assert log.engine.groups.next_offsets("points").get(QUEUE, 0) == 0
    consumer.consume(stuck)
    go_on(consumer)
    assert log.engine.groups.next_offsets("points")[QUEUE] == 50


@pytest.mark.parametrize("mode", ["concurrently", "orderly"])
def test_a_listener_of_single_messages_that_becomes_slow_gives_back_what_it_has_taken(mode: str) -> None:
    log = queue_of([str(n) for n in range(5000)])
    slow = False

    def listen(message: txmq.MessageExt) -> Any:
        log.engine.runtime.since_s += 0.02 if slow else 1e-6
        return DONE

    consumer = fetched(log, txmq.EachMessage(listen), mode=mode)
    while consumer.work() and consumer._cost.each_s > 1e-5:
        pass
    slow = True
    before = consumer.member.queues[QUEUE].lowest
    consumer.work()
    assert consumer.member.queues[QUEUE].lowest == before + 3, "for 50 ms, and not for all of its take"


class Waits(Steps):
    """A machine on which a thread waits for Python's lock, which others want too, when it has read the clock."""

    waits_s = 0.0

    def monotonic(self) -> float:
        now_s, self.waits_s, self.since_s = self.since_s, 0.0, self.since_s + self.waits_s
        return now_s


def test_a_quick_listener_that_20_threads_call_is_not_taken_for_a_slow_one() -> None:
    log = memory_log(runtime := Waits(), orders=1)
    send(log, [str(n) for n in range(50)])

    def listen(message: txmq.MessageExt) -> Any:
        runtime.waits_s = 0.1  # when the end of this call is noted
        return DONE

    consumer = fetched(log, txmq.EachMessage(listen))
    assert consumer.work()
    taken = take(consumer)
    assert taken is not None
    assert taken.messages.num_rows == 49, "all of them, and not one after the other"


def test_one_thread_calls_a_quick_listener_unless_its_call_hangs() -> None:
    log = queue_of([str(n) for n in range(50)])
    consumer = fetched(log, fails_on(""))
    assert consumer.work()
    consumer._cost.each_s = 1e-2
    assert take(consumer) is not None
    assert take(consumer) is not None, "a slow one is called by several"
    consumer._cost.each_s = 1e-6
    assert take(consumer) is None
    with consumer.member.changed:
        assert consumer._until_next() == push_module.HANGS_S
    log.engine.runtime.sleep(2 * push_module.HANGS_S)
    beside = take(consumer)
    assert beside is not None, "two calls hang"
    assert take(consumer) is None
    send(log, ["more"])
    consumer.member.fetch()
    consumer.consume(beside)
    consumer._cost.each_s = 1e-6
    assert take(consumer) is not None, "it does not wait for those that hang"


@also_on_delta
def test_what_has_expired_is_left_out_and_said(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    send(log, "abcd")
    found: list[str] = []
    consumer = joined(log, seen_by(found))
    log.drain()
    log.engine.topic_store.set_retention("orders", 0.0)
    let_leave(log)
    log.set_retention("orders", None)
    send(log, "ef")
    with caplog.at_level(logging.WARNING):
        go_on(consumer)
    assert sorted(found) == ["e", "f"]
    assert "offsets 0 to 1 have expired; the queue starts at offset 2 now. The consumer goes on there" in caplog.text


def test_what_waits_in_memory_is_fetched_no_further(limit: Limit) -> None:
    limit(FETCH_BYTES=1)
    log = queue_of("a")
    consumer = fetched(log, seen_by([]))
    send(log, "b")
    assert not consumer.member.fetch()
    assert consumer.work()
    assert consumer.member.fetch()


# ---------------------------------------------------------------- retries
@pytest.mark.parametrize("mode", ["concurrently", "orderly"])
def test_a_listener_that_raises_is_told_at_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    def listen(message: txmq.MessageExt) -> Any:
        raise RuntimeError("postgresql://shop:hush@db is down")

    log = memory_log()
    send(log, "ab")
    consumer = joined(log, txmq.EachMessage(listen), mode=mode)
    with caplog.at_level(logging.WARNING):
        go_on(consumer)
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("message listener of group 'points'")]
    assert told
    assert "The first: RuntimeError: postgresql://" in told[0]
    assert "hush" not in caplog.text
    then = {"orderly": "The queue waits 1 s and goes on there", "concurrently": "becomes dead letters"}
    assert then[mode] in told[0]


def test_retries_and_dead_letters_are_those_of_the_spark_consumer() -> None:
    log = memory_log()
    properties = pa.array([[("n", "1")], None, None], pa.map_(pa.string(), pa.string()))
    send(log, "abc", tags=["x", "y", "z"], keys=["k1", "k2", "k3"], properties=properties)
    read = log.read("orders")
    found: list[str] = []
    consumer = consume_all(log, fails_on("b", found), max_reconsume_times=2)
    pass_time([consumer], DELAY_LEVELS_S[2] + 1)
    retry = log.another().read("%RETRY%points")
    b = read.filter(pc.equal(read["body"], b"b"))
    assert retry["born_timestamp"].to_pylist() == b["born_timestamp"].to_pylist()
    expected = sent_back(restored(b), ["the listener returned FAILURE"], "points", 2, None).drop_columns(
        ["delay_level"]
    )
    assert retry.select(expected.column_names).to_pylist() == expected.to_pylist()
    go_on(consumer)
    pass_time([consumer], DELAY_LEVELS_S[3] + 1)
    go_on(consumer)
    assert [found.count(letter) for letter in "abc"] == [1, 3, 1]
    letters = txmq.DeadLetters(log, "points")
    (letter,) = letters.list().to_pylist()
    assert (letter["topic"], letter["body"], letter["reconsume_times"]) == ("orders", b"b", 2)
    assert letter["msg_id"] == b["msg_id"][0].as_py()
    assert letters.waiting() == 1
    assert letters.resend() == 1
    assert (letters.waiting(), txmq.DeadLetters(log, "others").waiting()) == (0, 0)
    go_on(consumer)
    assert found.count("b") == 4, "a letter that somebody resends comes to this group again"


def fails_and_dies(log: CommitLog, rows: int | None = None, bad: str = "abcdef", **options: Any) -> None:
    """A member whose listener does not consume some messages. It ends before it has written progress."""

    def listen(messages: pa.Table) -> Any:
        return [LATER if body.decode() in bad else DONE for body in messages["body"].to_pylist()]

    consumer = fetched(log, listen, consume_message_batch_max_size=rows, **options)
    try:
        while consumer.work():
            pass
    finally:
        dies(consumer)


@also_on_delta
def test_what_failed_before_a_crash_is_not_sent_back_twice_and_what_fails_after_it_is_sent(log: CommitLog) -> None:
    send(log, "abcdef", queue_id=[0] * 6)
    for bad, dead in (("bd", "bd"), ("bdf", "bdf"), ("f", "bdf"), ("bd", "bdf")):
        fails_and_dies(log, bad=bad, max_reconsume_times=0)
        assert sorted(bodies(log, "%DLQ%points")) == sorted(dead)
    txmq.ConsumerGroup(log, "points").reset("earliest", ["orders"])
    fails_and_dies(log, bad="b", max_reconsume_times=0)
    assert sorted(bodies(log, "%DLQ%points")) == sorted("bdfb"), "after a reset it is consumed again, and fails again"


def retries(log: CommitLog) -> list[tuple[str, int]]:
    """The retries that have come: of which message, and the how-manieth."""
    read = log.another().read("%RETRY%points", columns=["body", "properties"]).to_pylist()
    return [(row["body"].decode(), int(dict(row["properties"])["RECONSUME_TIME"])) for row in read]


def retries_come(log: CommitLog, after_s: float) -> None:
    log.engine.runtime.sleep(after_s)
    log.another().engine.ledger.place_due()


def test_two_retries_of_one_message_that_fail_in_one_take_are_both_sent_on() -> None:
    log = queue_of("a")
    for _ in range(3):  # each member begins anew: it gets the retries of those before it in one take
        fails_and_dies(log, delay_level=1)
        retries_come(log, 2)
    assert retries(log) == [("a", 1), ("a", 2), ("a", 3)]


@pytest.mark.parametrize(("before", "after"), [(None, 1), (1, None), (2, 3), (3, 2)])
def test_what_was_sent_back_is_there_however_the_next_member_cuts_its_takes(
    log: CommitLog, before: int | None, after: int | None
) -> None:
    send(log, "abcd", queue_id=[0] * 4)
    fails_and_dies(log, before, bad="acd", max_reconsume_times=0)
    fails_and_dies(log, after, max_reconsume_times=0)
    assert sorted(bodies(log, "%DLQ%points")) == list("abcd")


def test_what_was_sent_back_is_there_whatever_the_next_member_makes_of_a_failure() -> None:
    log = queue_of("ab")
    fails_and_dies(log, bad="a", delay_level=1)
    fails_and_dies(log, max_reconsume_times=0)
    consumer = joined(log, fails_on("ab"), mode="orderly", max_reconsume_times=0)
    for _ in range(3):
        go_on(consumer)
        log.engine.runtime.sleep(1.1)
    retries_come(log, 2)
    assert (retries(log), bodies(log, "%DLQ%points")) == ([("a", 1)], ["b"])


def test_what_was_sent_back_is_there_when_upkeep_has_stripped_it(limit: Limit) -> None:
    limit(STRIPPED_BYTES_MIN=1)
    log = memory_log(orders=1)

    consumer = joined(log, fails_on("ab"))
    send(log, "b")
    go_on(consumer)
    pass_time([consumer], DELAY_LEVELS_S[2])
    go_on(consumer)
    pass_time([consumer], DELAY_LEVELS_S[3] - DELAY_LEVELS_S[2])
    send(log, "a")
    go_on(consumer)
    pass_time([consumer], DELAY_LEVELS_S[2])
    dies(consumer)
    fails_and_dies(log)  # of the two, a comes again before b: so the file stays for b, without what a has in it
    retries_come(log, DELAY_LEVELS_S[3])
    log.drain()
    assert let_leave(log).files_stripped == 1
    fails_and_dies(log)
    retries_come(log, DELAY_LEVELS_S[4])
    assert Counter(retries(log)) == Counter([(letter, times) for letter in "ab" for times in (1, 2, 3)])


def test_a_retry_that_fails_again_after_a_reset_of_the_retries_is_sent_on_again() -> None:
    log = queue_of("a")
    for _ in range(2):
        consumer = consume_all(log, fails_on("a"), delay_level=1, max_reconsume_times=2)
        retries_come(log, 2)
        consumer.member.leave()
    assert retries(log) == [("a", 1), ("a", 2)]
    txmq.ConsumerGroup(log, "points").reset("earliest", ["%RETRY%points"])
    fails_and_dies(log, max_reconsume_times=2, delay_level=1)
    retries_come(log, 2)
    assert retries(log) == [("a", 1), ("a", 2), ("a", 2)]
    assert bodies(log, "%DLQ%points") == ["a"]


MANY = how_many(100, in_all=1_000)


@pytest.mark.turns(3)
@pytest.mark.parametrize("state", ["new", "prepared", "there", "left"])
def test_many_messages_are_sent_back_in_a_commit_or_two_of_each_table(state: str) -> None:
    log = queue_of([str(n) for n in range(MANY)])

    def fail(**options: Any) -> None:
        fails_and_dies(log, bad="".join(map(str, range(MANY))), max_reconsume_times=0, **options)

    if state == "prepared":
        with dies_at("commit begins", table="op"):
            fail()
    elif state != "new":
        fail()
    if state == "left":
        log.drain()
        let_leave(log)
        assert in_half(log) == set()
    before = versions(log)
    fail()
    assert all(after <= version + 2 for version, after in zip(before, versions(log), strict=True))
    assert Counter(bodies(log, "%DLQ%points")) == Counter(map(str, range(MANY)))
    before = versions(log)
    assert txmq.DeadLetters(log.another(), "points").resend() == MANY
    assert all(after <= version + 2 for version, after in zip(before, versions(log), strict=True))
    assert txmq.DeadLetters(log.another(), "points").resend() == 0


def versions(log: CommitLog) -> tuple[int, int]:
    own = log.another()
    return own.engine.half.table.refresh(), own.engine.op_table.refresh()


def test_a_message_that_cannot_be_sent_back_stays_unfinished(log: CommitLog, limit: Limit) -> None:
    send(log, "ab", queue_id=[0, 0])
    consumer = joined(log, fails_on("b"))
    limit(SEND_AGAIN_S=0)

    def down(**_: Any) -> None:
        consumer.member.stopping.set()
        raise txmq.StorageError("the store is down")

    with seen_at("commit begins", down, table="half"):
        consumer.member.fetch()
        assert consumer.work()
        assert consumer.work()
    consumer.member.leave()
    assert log.engine.groups.next_offsets("points")[QUEUE] == 1


def test_a_message_whose_queue_is_lost_is_not_sent_back_by_its_member(limit: Limit) -> None:
    log = queue_of("ab")
    consumer = fetched(log, fails_on("ab"))
    limit(SEND_AGAIN_S=0)

    def lost() -> None:
        txmq.ConsumerGroup(log, "points").reset("earliest", ["orders"])
        pass_time([consumer], 12)
        raise txmq.StorageError("the store is down")

    with at("commit begins", lost, table="half"):
        assert consumer.work()
    assert bodies(log, "%RETRY%points") == []
    go_on(consumer)
    assert len(in_half(log)) == 3, "the messages, and a retry of each"


def test_a_letter_that_was_given_up_while_its_member_was_dead_is_sent_and_one_that_a_person_refused_is_not() -> None:
    log = queue_of("abc")
    with dies_at("commit begins", table="op"):
        fails_and_dies(log, max_reconsume_times=0)
    refused, given_up, _ = log.pending()["half_id"].to_pylist()
    log.resolve(refused, txmq.ROLLBACK_MESSAGE, "nobody needs it")
    record = log.engine.get(given_up)
    log.engine.ledger.quarantine(record, 1, record.all_rows, Who.DISCARD, "it was never answered")
    fails_and_dies(log, max_reconsume_times=0)
    assert len(bodies(log, "%DLQ%points")) == 2
    assert log.pending().num_rows == log.quarantined().num_rows == 0


# ---------------------------------------------------------------- orderly
def test_an_orderly_queue_stops_at_a_message_and_the_others_go_on() -> None:
    log = memory_log()
    send(log, "abcdef", queue_id=[0, 1] * 3)
    found: list[str] = []
    bad = ["c"]
    consumer = consume_all(log, fails_on(bad, found), mode="orderly")
    assert sorted(found) == ["a", "b", "c", "d", "f"]
    assert log.engine.groups.next_offsets("points") == {QUEUE: 1, ("orders", 1): 3, ("%RETRY%points", 0): 0}
    log.engine.runtime.sleep(0.5)
    assert not consumer.work()
    log.engine.runtime.sleep(0.6)
    go_on(consumer)
    assert found.count("c") == 2
    assert "e" not in found
    bad.clear()
    log.engine.runtime.sleep(1.1)
    go_on(consumer)
    assert [body for body in found if body in "ace"] == ["a", "c", "c", "c", "e"]
    assert log.engine.groups.next_offsets("points")[QUEUE] == 3


def test_one_call_at_a_time_for_an_orderly_queue() -> None:
    log = memory_log()
    send(log, "abcdef", queue_id=[0, 1] * 3)
    consumer = fetched(log, seen_by([]), mode="orderly", consume_message_batch_max_size=1)
    takes = [take(consumer) for _ in range(3)]
    assert {taken.queue.queue for taken in takes[:2]} == {("orders", 0), ("orders", 1)}
    assert takes[2] is None
    consumer.consume(takes[0])
    assert take(consumer).queue is takes[0].queue


def test_an_orderly_message_that_never_works_is_a_dead_letter_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    log = queue_of("abcd")
    found: list[list[str]] = []
    times: list[list[int]] = []

    def listen(messages: pa.Table) -> Any:
        found.append([body.decode() for body in messages["body"].to_pylist()])
        times.append(messages["reconsume_times"].to_pylist())
        if "b" in found[-1]:
            raise ValueError("not b")
        return DONE

    consumer = joined(log, listen, mode="orderly", max_reconsume_times=2)
    caplog.set_level(logging.WARNING)
    for _ in range(6):
        go_on(consumer)
        log.engine.runtime.sleep(1.1)
    # A call that failed as a whole is tried again with single messages, so that the right one dies.
    assert found == [["a", "b", "c", "d"], ["a"], ["b", "c", "d"], ["b"], ["b"], ["c", "d"]]
    assert times == [[0, 0, 0, 0], [1], [0, 0, 0], [1], [2], [0, 0]]
    (letter,) = txmq.DeadLetters(log, "points").list().to_pylist()
    assert (letter["body"], letter["reconsume_times"]) == (b"b", 2)
    told = [text.partition("points': ")[2].partition(" of topic")[0] for text in caplog.messages if "failed" in text]
    assert told == ["4 of 4 messages", "3 of 3 messages", "1 of 1 messages", "1 of 1 messages"]
    assert log.engine.groups.next_offsets("points")[QUEUE] == 4


def test_an_inbox_takes_every_message_once_whoever_has_the_queue(tmp_path: Path) -> None:
    log = memory_log(orders=2)
    url = make_database(tmp_path)
    send(log, "abcdef")
    late = fetched(log, inbox_of(url), mode="orderly", consume_message_batch_max_size=2)
    assert late.work()
    dies(late)
    consume_all(log, inbox_of(url), mode="orderly")
    assert results(url) == list("abcdef")
    # One that woke up late has the messages still: the inbox knows them.
    late.member._members.renew(late.member.runtime.monotonic())
    assert late.work()
    assert results(url) == list("abcdef")
    assert txmq.DeadLetters(log, "points").list().num_rows == 0


# ---------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "parallel"}, "mode='parallel' is neither 'concurrently' nor 'orderly'"),
        ({"consume_from_where": "latest"}, "is not one of CONSUME_FROM_LAST_OFFSET, "),
        ({"max_span": 0}, "max_span=0 is out of range"),
        ({"consume_thread_max": 0}, "consume_thread_max=0"),
        ({"delay_level": 19}, "from 1 to 18"),
        ({"topics": ()}, "the name of a topic is expected"),
        ({"topics": "ordes"}, "did you mean 'orders'"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(txmq.TxmqError, match=said):
        push(memory_log(), seen_by([]), **options)


# ---------------------------------------------------------------- threads
@also_on_delta
def test_it_consumes_in_threads_until_it_is_shut_down(log: CommitLog) -> None:
    found: list[str] = []
    with push(log, fails_on("", found)) as consumer:
        for n in range(4):
            send(log, [f"{n}.{i}" for i in range(10)])
        wait_until(lambda: len(found) == 40)
    assert len(set(found)) == 40
    assert sum(log.engine.groups.next_offsets("points").values()) == 40
    assert all(position.owner is None for position in log.engine.groups.positions("points").values())
    assert txmq.ConsumerGroup(log, "points").members() == {}
    assert not [t for t in threading.enumerate() if t.name.startswith(("txmq-consume", "txmq-fetch", "txmq-member"))]
    with pytest.raises(txmq.ConsumeError, match="was shut down: make a new one"):
        consumer.start()


class Holds:
    """A listener whose calls last until the test lets them end."""

    def __init__(self) -> None:
        self.calls = threading.Semaphore(0)
        self.may_end = threading.Event()

    def __call__(self, messages: Any) -> Any:
        self.calls.release()
        assert self.may_end.wait(60)
        return DONE


def test_a_program_that_fails_leaves_its_group(log: CommitLog) -> None:
    with pytest.raises(ZeroDivisionError), push(log, seen_by([])):
        raise ZeroDivisionError
    assert txmq.ConsumerGroup(log, "points").members() == {}


def test_a_consumer_for_which_no_thread_starts_leaves_its_group(log: CommitLog) -> None:
    consumer = push(log, seen_by([]))
    with no_thread_starts(), pytest.raises(RuntimeError, match="can't start new thread"):
        consumer.start()
    assert txmq.ConsumerGroup(log, "points").members() == {}


def test_a_shutdown_waits_for_a_running_call_and_starts_no_other(log: CommitLog) -> None:
    send(log, "abcd", queue_id=[0] * 4)
    listener = Holds()
    consumer = push(log, listener, consume_message_batch_max_size=1, consume_thread_max=1).start()
    assert listener.calls.acquire(timeout=60)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(consumer.shutdown)
        assert consumer.member.stopping.wait(60)
        listener.may_end.set()
    assert not listener.calls.acquire(blocking=False), "no other call"
    assert log.engine.groups.next_offsets("points")[QUEUE] == 1


def test_two_threads_that_start_and_end_a_consumer_make_one_member_and_both_wait_for_its_end(log: CommitLog) -> None:
    def members() -> int:
        return sum(thread.name == "txmq-member" for thread in threading.enumerate())

    listener, before = Holds(), members()
    send(log, "a", queue_id=[0])
    consumer = push(log, listener)
    with ThreadPoolExecutor(2) as pool:
        # It takes so long to join that the other thread begins to start it, too.
        with at("commit begins", lambda: time.sleep(0.2), table="groups"):
            list(pool.map(lambda _: consumer.start(), range(2)))
        assert members() == before + 1
        assert listener.calls.acquire(timeout=60)
        ends = [pool.submit(consumer.shutdown) for _ in range(2)]
        assert not wait(ends, 0.3).done
        listener.may_end.set()
        assert not wait(ends, 60).not_done
    assert log.engine.groups.next_offsets("points")[QUEUE] == 1


def test_a_shutdown_within_a_call_is_refused_at_once_and_does_not_wait_for_itself(log: CommitLog) -> None:
    send(log, "a", queue_id=[0])
    said: list[str] = []

    def listen(message: txmq.MessageExt) -> Any:
        try:
            consumer.shutdown()
        except txmq.ConsumeError as problem:
            said.append(str(problem))
        return DONE

    with push(log, txmq.EachMessage(listen)) as consumer:
        wait_until(lambda: said)
    assert "call stop() there" in said[0]
    assert log.engine.groups.next_offsets("points")[QUEUE] == 1


def test_a_call_that_does_not_end_keeps_its_queue_until_the_lease_is_over(log: CommitLog) -> None:
    send(log, "a", queue_id=[0])
    listener = Holds()
    consumer = push(log, listener, await_termination=0).start()
    assert listener.calls.acquire(timeout=60)
    consumer.shutdown()
    positions = log.engine.groups.positions("points")
    assert positions[QUEUE].owner == consumer.member.name
    assert positions[QUEUE].next_offset == 0
    assert positions[("orders", 1)].owner is None
    listener.may_end.set()


class Unsaid(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class OddEqual:
    """As an array of numpy or a table of pandas: it is equal to each thing of many."""

    def __eq__(self, other: object) -> Any:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("mode", ["concurrently", "orderly"])
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (lambda: 7, "the listener returned something of the type int: "),
        (lambda: True, "the listener returned something of the type bool: "),
        (lambda: pa.table({"a": [1, 2]}), "the listener returned something of the type Table: "),
        (lambda: OddEqual(), "the listener returned something of the type OddEqual: "),
        (lambda: sys.exit(1), "SystemExit: 1"),
        (raising(asyncio.CancelledError()), "CancelledError: "),
        (raising(GeneratorExit()), "GeneratorExit: "),
        (raising(type("PanicException", (BaseException,), {})("of Rust")), "PanicException: of Rust"),
        (raising(Unsaid()), "Unsaid: (its text cannot be had: KeyError)"),
        (raising(ValueError("half of a pair: \ud800")), r"ValueError: half of a pair: \ud800"),
    ],
)
def test_a_message_that_breaks_the_listener_ends_no_consumer(mode: str, does: Callable[[], Any], reason: str) -> None:
    """It ended one member of the group after the other, each successor too, and nothing after it was consumed. A reason
    that is no text was tried for ever."""
    log = queue_of("apb")
    seen: list[str] = []

    def listen(message: txmq.MessageExt) -> Any:
        seen.append(bytes(message.body).decode())  # type: ignore[arg-type]
        return does() if message.body == b"p" else DONE

    consume_all(log, txmq.EachMessage(listen), mode=mode, max_reconsume_times=0)
    assert seen == ["a", "p", "b"]
    (dead,) = txmq.DeadLetters(log, "points").list().to_pylist()
    assert dead["body"] == b"p"
    assert dead["reason"].startswith(reason)


@pytest.mark.parametrize("mode", ["concurrently", "orderly"])
@pytest.mark.parametrize("wrap", [txmq.EachMessage, txmq.consumers.EachBatch, lambda function: function])
def test_a_listener_that_returns_nothing_has_consumed(mode: str, wrap: Callable[[Any], Any]) -> None:
    """A forgotten ``return`` filled the dead letters."""
    log = queue_of("abc")
    consume_all(log, wrap(lambda messages: None), mode=mode, max_reconsume_times=0)
    assert txmq.DeadLetters(log, "points").list().num_rows == 0
    assert log.engine.groups.next_offsets("points")[QUEUE] == 3


def test_nothing_for_one_message_of_a_list_has_consumed_that_message() -> None:
    log = queue_of("abc")
    consume_all(log, lambda messages: [None, LATER, DONE], max_reconsume_times=0)
    assert [row["body"] for row in txmq.DeadLetters(log, "points").list().to_pylist()] == [b"b"]


@also_on_delta
@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        (raising(ValueError("no such customer")), "ValueError: no such customer"),
        (lambda messages: [DONE] * 7, "the listener returned 7 results for 3 messages: return one for each"),
    ],
)
def test_a_call_that_fails_sends_all_of_its_messages_back_with_the_reason(
    log: CommitLog, listen: Any, reason: str
) -> None:
    send(log, "abc", queue_id=[0] * 3)
    consume_all(log, listen, max_reconsume_times=0)
    assert txmq.DeadLetters(log, "points").list()["reason"].to_pylist() == [reason] * 3
    assert log.engine.groups.next_offsets("points")[QUEUE] == 3


def with_a_hole(folder: Path) -> tuple[CommitLog, Path, Path]:
    """A log of which somebody has deleted the file of the table messages that queue 0 of orders lies in: the log, where
    the file was, and where it is now."""
    log = make_log("delta", folder / "log", orders=2, bills=1)
    send(log, "ab", queue_id=[0, 0])
    log.drain()
    send(log, "c", queue_id=[1])
    send(log, "d", topic="bills")
    log.drain()
    log.engine.messages_table.refresh()
    of_queue_0 = (pc.field("max.topic") == "orders") & (pc.field("max.queue_id") == 0)
    (path,) = log.engine.messages_table.actions().filter(of_queue_0)["path"].to_pylist()
    lost = Path(log.path) / "messages" / path
    return log, lost, lost.rename(folder / "kept")


def test_a_hole_in_messages_is_told_while_its_queue_is_tried_again_and_the_others_go_on(tmp_path: Path) -> None:
    log, lost, kept = with_a_hole(tmp_path)
    found: list[str] = []
    with push(log, seen_by(found), topics=["orders", "bills"]) as consumer:
        wait_until(lambda: consumer.problem)
        assert isinstance(consumer.problem, txmq.errors.LostFileError)
        assert lost.name in str(consumer.problem)
        assert consumer.is_running
        wait_until(lambda: sorted(found) == ["c", "d"])
        kept.rename(lost)
        wait_until(lambda: len(found) == 4)
        assert consumer.problem is None
    assert Counter(found) == Counter("abcd")
    assert log.engine.groups.next_offsets("points")[QUEUE] == 2


def test_what_holds_up_a_queue_is_not_raised_at_the_end_of_the_consumer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, _, _ = with_a_hole(tmp_path)
    consumer = push(log, seen_by([]), topics=["orders", "bills"]).start()
    wait_until(lambda: consumer.problem)
    consumer.shutdown()
    assert consumer.problem is None
    assert not consumer.is_running
    assert "queue 0 of topic 'orders' is held up, and tried again in 1 s: file " in caplog.text


def test_a_store_that_fails_is_told_until_it_answers() -> None:
    log = memory_log(Runtime(), orders=1)
    found: list[str] = []
    consumer = push(log, seen_by(found))
    with seen_at("fetch begins", raising(txmq.errors.UnreachableStoreError("no answer"))):
        consumer.start()
        send(log, "a")
        wait_until(lambda: consumer.problem)
        assert "no answer" in str(consumer.problem)
        assert consumer.is_running
    wait_until(lambda: found == ["a"])
    send(log, "b")  # is fetched when all is known of the fetch before
    wait_until(lambda: found == ["a", "b"])
    assert consumer.problem is None
    consumer.shutdown()


def test_a_queue_that_is_held_up_is_tried_again_later_each_time() -> None:
    log = memory_log()
    send(log, "ab", queue_id=[0, 1])
    consumer = joined(log, seen_by([]))
    tried: list[float] = []

    def lacks_a_queue(starts: Any) -> None:
        if starts[QUEUE][1]:
            tried.append(log.engine.runtime.since_s)
            raise txmq.errors.OffsetOutOfRangeError("a hole")

    with seen_at("fetch begins", lacks_a_queue):
        assert consumer.member.fetch_past_damage()
        assert consumer.work()
        for _ in range(200):
            consumer.member.fetch_past_damage()
            log.engine.runtime.sleep(0.5)
    assert [later - sooner for sooner, later in pairwise(sorted(set(tried)))] == [1, 2, 4, 8, 16, 30, 30]


def test_a_script_is_told_of_a_hole_at_once(tmp_path: Path) -> None:
    log, _, _ = with_a_hole(tmp_path)
    with pytest.raises(txmq.errors.LostFileError):
        list(txmq.PullConsumer(log, "report", topics=["orders", "bills"], stop_at_end=True))


def test_the_end_of_the_process_waits_once_for_all_calls_that_hang(limit: Limit) -> None:
    limit(AT_EXIT_S_MAX=0.3)
    log = memory_log(Runtime(), orders=1)
    send(log, "abcdefgh")
    listener = Holds()
    consumer = push(log, txmq.EachMessage(listener), consume_thread_max=8).start()
    try:
        assert all(listener.calls.acquire(timeout=30) for _ in range(8))
        began_s = time.monotonic()
        consumer.member_threads._at_exit()
        assert time.monotonic() - began_s < 1.5  # and not 0.3 s for each of eight
    finally:
        listener.may_end.set()
        consumer.shutdown()


def test_run_ends_at_sigterm(log: CommitLog) -> None:
    def listen(messages: pa.Table) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return DONE

    send(log, "a", queue_id=[0])
    before = signal.getsignal(signal.SIGTERM)
    push(log, listen).run()
    assert signal.getsignal(signal.SIGTERM) is before
    assert log.engine.groups.next_offsets("points")[QUEUE] == 1


def test_a_fork_is_refused_and_leaves_the_group_alone(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    with push(log, seen_by([])) as consumer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with pytest.raises(txmq.ConsumeError, match="this is a fork of it: make one in each process"):
                consumer.start()
            consumer.member_threads.stop(0)
        assert len(txmq.ConsumerGroup(log, "points").members()) == 1
