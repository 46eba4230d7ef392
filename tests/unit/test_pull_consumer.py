"""PullConsumer: messages for a script that asks for them."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support import seeds
from tests.support.consumers import LEASE_S, ByHand, Steps, memory_log, pass_time, queue_of, send, wait_until
from tests.support.inside import Change
from tests.support.meanwhile import at, seen_at
from tests.support.seeds import how_many
from tests.support.sends import raising

pytestmark = pytest.mark.log("memory", orders=2)
also_on_delta = pytest.mark.log("memory", "delta", orders=2)
"""What a consumer reads from the tables, and what it writes there."""

QUEUE = ("orders", 0)


def bodies(messages: list[txmq.MessageExt]) -> list[str]:
    return [bytes(message.body).decode() for message in messages]  # type: ignore[arg-type]


def pull(log: CommitLog, **options: Any) -> txmq.PullConsumer:
    return txmq.PullConsumer(log, "report", "orders", **options)


def read_to_the_end(log: CommitLog) -> list[str]:
    return bodies(list(pull(log, stop_at_end=True)))


def position(log: CommitLog) -> int:
    """Where the group is in the queue 0."""
    return log.engine.groups.next_offsets("report")[QUEUE]


def assert_nobody_has_a_queue(log: CommitLog) -> None:
    assert all(position.owner is None for position in log.engine.groups.positions("report").values())


@also_on_delta
def test_a_script_reads_to_the_end_and_the_next_one_goes_on(log: CommitLog) -> None:
    send(log, "abcd")
    assert sorted(read_to_the_end(log)) == list("abcd")
    send(log, "ef")
    assert sorted(read_to_the_end(log)) == list("ef")
    assert read_to_the_end(log) == []
    assert_nobody_has_a_queue(log)


def test_a_script_begins_at_a_time() -> None:
    log = queue_of("a")
    log.engine.runtime.sleep(1)
    send(log, "b")
    moment = log.read("orders")["commit_timestamp"][1].as_py()
    assert bodies(list(pull(log, consume_timestamp=moment, stop_at_end=True))) == ["b"]


def test_a_script_whose_group_spark_reads_by_now_is_told() -> None:
    log = memory_log(ByHand(), orders=1)
    with pull(log.another()) as consumer:
        txmq.ConsumerGroup(log, "report").hand_over()
        log.engine.groups.publish("report", {QUEUE: 0})
        pass_time([consumer], LEASE_S)
        with pytest.raises(txmq.GroupInUseError, match="is read by Spark"):
            consumer.poll(0)


def test_a_script_reads_the_delayed_messages_that_are_due(caplog: pytest.LogCaptureFixture) -> None:
    """It ended before them, and so did all later ones, until something else worked on the log."""
    log = memory_log()
    send(log, "ab", delay_level=pa.array([1, 3], pa.int32()))
    log.engine.runtime.sleep(5)
    with seen_at("commit begins", raising(txmq.StorageError("no answer")), table="op"):
        assert read_to_the_end(log) == []
    assert "delayed messages were not placed: no answer" in caplog.text
    assert read_to_the_end(log) == ["a"]


@also_on_delta
def test_tables_come_a_queue_at_a_time(log: CommitLog) -> None:
    send(log, "abcdef", queue_id=[0, 1] * 3)
    tables = list(pull(log, tables=True, stop_at_end=True, pull_batch_size=2))
    assert all(isinstance(table, pa.Table) for table in tables)
    assert sorted(table.num_rows for table in tables) == [1, 1, 2, 2]
    assert all(len(set(table["queue_id"].to_pylist())) == 1 for table in tables)


@also_on_delta
def test_the_message_over_which_a_script_dies_comes_again(log: CommitLog) -> None:
    send(log, "abcd", queue_id=[0] * 4)

    def dies() -> None:
        for message in pull(log, stop_at_end=True):
            if message.body == b"c":
                raise ValueError("c")

    with pytest.raises(ValueError, match="c"):
        dies()
    assert position(log) == 2
    assert read_to_the_end(log) == ["c", "d"]


@pytest.mark.parametrize("beside", ["zip", "nested", "a thread"])
def test_a_second_iteration_beside_the_first_is_refused_and_nothing_is_lost(log: CommitLog, beside: str) -> None:
    """Each counted as consumed what the other was given: of 60 messages 20 were given to nobody; a nested loop hung."""
    send(log, "abcdefgh", queue_id=[0, 1] * 4)
    consumer = pull(log, stop_at_end=True)
    seen: list[bytes] = []

    def both() -> None:
        if beside == "zip":
            seen.extend(message.body for pair in zip(consumer, consumer, strict=True) for message in pair)
        for message in consumer:
            seen.append(message.body)
            if beside == "nested":
                list(consumer)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(list, consumer).result(timeout=30)

    with pytest.raises(txmq.errors.ConsumeError, match="iterated over already"):
        both()
    consumer.shutdown()
    assert sorted({*(body.decode() for body in seen), *read_to_the_end(log)}) == list("abcdefgh")


@pytest.mark.parametrize("stop_at_end", [False, True])
@pytest.mark.parametrize("where", ["the body", "another thread", "a signal handler"])
def test_a_loop_ends_when_its_consumer_is_shut_down(log: CommitLog, where: str, stop_at_end: bool) -> None:
    """It gave nothing more, and never ended."""
    send(log, "abcd", queue_id=[0] * 4)
    consumer = pull(log, stop_at_end=stop_at_end)
    seen: list[txmq.MessageExt] = []

    def is_shut_down(**_: Any) -> None:
        if seen and where == "a signal handler":
            with consumer.member.changed:  # as a signal handler may come while the lock is held
                consumer.shutdown()
        if seen and where == "another thread":
            threading.Thread(target=consumer.shutdown).start()

    with seen_at("fetch begins", is_shut_down):
        for message in consumer:
            seen.append(message)
            if where == "the body" and len(seen) == 2:
                consumer.shutdown()
    assert bodies(seen) == (["a", "b"] if where == "the body" else list("abcd"))
    assert position(log) == (1 if where == "the body" else 4)
    assert_nobody_has_a_queue(log)
    with pytest.raises(txmq.errors.ConsumeError, match="was shut down: make a new one"):
        consumer.poll()


@also_on_delta
def test_a_shutdown_in_the_midst_of_a_call_of_the_log_is_left_to_the_loop(log: CommitLog) -> None:
    """As by a signal handler while the loop's body reads the log: it waited for a thread that waited for that lock."""
    send(log, "abcd", queue_id=[0] * 4)
    consumer = pull(log)
    seen = []
    for message in consumer:
        seen.append(message)
        with consumer.member.engine.lock:
            consumer.shutdown()
            assert consumer.member_threads.is_running
    assert bodies(seen) == ["a"]
    assert not consumer.member_threads.is_running
    assert_nobody_has_a_queue(log)


def test_a_poll_that_waits_ends_when_its_consumer_is_shut_down(log: CommitLog) -> None:
    consumer = pull(log).start()
    threading.Timer(0.05, consumer.shutdown).start()
    assert consumer.poll(timeout=300) is None


def test_a_poll_beside_another_threads_is_refused(log: CommitLog) -> None:
    """What one thread still worked on counted as consumed when the other asked."""
    with pull(log) as consumer, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.poll, 60)
        wait_until(lambda: consumer._within is not None)
        for ask in (consumer.poll, consumer.commit, lambda: list(consumer)):
            with pytest.raises(txmq.errors.ConsumeError, match="another thread is asking this consumer just now"):
                ask()
        send(log, "a", queue_id=[0])
        assert bodies(waiting.result(60)) == ["a"]


@also_on_delta
def test_a_consumer_that_is_dropped_leaves_its_group(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    """A cell of a notebook that ran again got nothing: the first one had the queues as long as the kernel lived."""
    send(log, "abcdef", queue_id=[0] * 6)

    def first() -> list[str]:
        consumer = pull(log.another(), pull_batch_size=2)
        return bodies(consumer.poll()) + bodies(consumer.poll())

    assert first() == ["a", "b", "c", "d"]
    assert read_to_the_end(log) == ["c", "d", "e", "f"]
    assert "a consumer was dropped without shutdown()" in caplog.text


class Interrupted(Steps):
    """A machine on which Ctrl-C comes when its clock is read, and then no more."""

    comes = staticmethod(lambda: False)

    def monotonic(self) -> float:
        if self.comes():
            del self.comes
            interrupt()
        return super().monotonic()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("has_queues", [False, True])
def test_an_interrupt_while_a_consumer_joins_leaves_nothing_behind(has_queues: bool) -> None:
    log = memory_log(runtime := Interrupted())
    consumer = pull(log)
    if has_queues:
        runtime.comes = lambda: bool(consumer.member.queues)
        with pytest.raises(KeyboardInterrupt), consumer:
            raise AssertionError
    else:
        with at("commit begins", interrupt, table="groups"), pytest.raises(KeyboardInterrupt), consumer:
            raise AssertionError
    assert_nobody_has_a_queue(log)
    assert txmq.ConsumerGroup(log, "report").members() == {}


class Interrupts:
    """Ctrl-C comes before the n-th line that a call of :meth:`poll` comes to in other functions of these modules."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __enter__(self) -> Interrupts:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        of_module = frame.f_code.co_filename.endswith(("/progress.py", "/pull.py", "/message_listener.py"))
        return self._inside if of_module and frame.f_code.co_name != "poll" and self.left > 0 else None

    def _inside(self, frame: FrameType, event: str, _: object) -> Any:
        self.left -= event == "line"
        if not self.left:
            self.left = -1
            raise KeyboardInterrupt
        return self._inside


def test_an_interrupt_before_any_line_counts_no_message_that_the_script_has_not_seen() -> None:
    """The progress of a script that went on, or left its group, had passed what was lost in that moment."""
    one_of = how_many(20, in_all=1)
    for line in count(1 + seeds.first_seed() % one_of, one_of):
        log = memory_log(ByHand(), orders=1)
        send(log, "abcd")
        seen: list[str] = []
        with pull(log, pull_batch_size=2) as consumer, Interrupts(line) as ctrl_c:
            for _ in range(5):
                with suppress(KeyboardInterrupt):
                    seen += bodies(consumer.poll(0) or [])
        assert seen[: position(log)] == list("abcd"[: position(log)]), line
        if ctrl_c.left > 0:
            break
    assert line > 300


@also_on_delta
def test_what_is_not_committed_comes_again(log: CommitLog) -> None:
    send(log, "abcd", queue_id=[0] * 4)
    with pull(log, auto_commit=False, pull_batch_size=2) as consumer:
        assert bodies(consumer.poll()) == ["a", "b"]
        consumer.commit()
        assert position(log) == 2
        assert bodies(consumer.poll()) == ["c", "d"]
        assert consumer.poll(0) is None
    assert position(log) == 2
    with pull(log, pull_batch_size=1) as consumer:
        assert bodies(consumer.poll()) == ["c"]
        assert bodies(consumer.poll()) == ["d"]
        consumer.commit()
    assert position(log) == 4


def test_a_commit_between_messages_counts_those_that_were_given_out_alone(log: CommitLog) -> None:
    send(log, "abcd", queue_id=[0] * 4)
    consumer = pull(log, auto_commit=False, stop_at_end=True)
    for message in consumer:
        consumer.commit()
        if message.body == b"b":
            break
    assert position(log) == 2
    seen = []
    with pull(log, auto_commit=False, stop_at_end=True) as consumer:
        for message in consumer:
            seen.append(message)
            consumer.commit()
    assert bodies(seen) == ["c", "d"]
    assert position(log) == 4


@also_on_delta
def test_a_commit_of_messages_whose_queue_is_lost_is_an_error_and_the_next_one_is_none(log: CommitLog) -> None:
    send(log, "abcd", queue_id=[0] * 4)
    with pull(log, auto_commit=False, pull_batch_size=2) as script:
        assert bodies(script.poll() or []) == ["a", "b"]
        txmq.ConsumerGroup(log, "report").reset("earliest")
        with pytest.raises(txmq.ConsumeError, match=r"queue 0 of topic 'orders': claimed .* 'report', or .* reset"):
            script.commit()
        assert bodies(script.poll() or []) == ["a", "b"]
        script.commit()
    assert position(log) == 2


def test_a_commit_after_the_end_of_an_iteration_is_an_error(log: CommitLog) -> None:
    send(log, "abcd")
    consumer = pull(log, auto_commit=False, stop_at_end=True)
    assert len(list(consumer)) == 4
    with pytest.raises(txmq.ConsumeError, match=r"was shut down.*comes again.*within the loop"):
        consumer.commit()
    assert sum(log.engine.groups.next_offsets("report").values()) == 0


@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_script_that_iterates_lets_a_queue_go_before_it_has_seen_all_that_it_fetched(auto_commit: bool) -> None:
    log = memory_log(ByHand())
    send(log, "abcdefgh", queue_id=[0, 1] * 4)
    first = pull(log.another(), stop_at_end=True, auto_commit=auto_commit)
    messages = iter(first)
    seen = [next(messages)]
    second = pull(log.another()).start()
    pass_time([first, second], LEASE_S)
    seen.append(next(messages))
    first.commit()
    pass_time([first, second], LEASE_S)
    others = second.poll(0)
    second.commit()
    seen += [next(messages), next(messages), next(messages)]
    first.commit()
    assert sorted(bodies(seen + others)) == list("abcdefgh")
    first.shutdown()
    second.shutdown()


def test_a_script_whose_lease_is_over_gets_no_more_of_what_it_fetched() -> None:
    log = memory_log(ByHand(), orders=1)
    send(log, "abcd")
    first = pull(log.another(), stop_at_end=True)
    messages = iter(first)
    assert next(messages).body == b"a"
    with pull(log.another()) as second:
        pass_time([second], 2 * LEASE_S)  # the first one sleeps
        assert bodies(second.poll(0)) == list("abcd")
        second.commit()
        first.member.keep()
    assert list(messages) == []


def test_a_commit_beside_the_members_progress_finds_no_released_queue_lost(caplog: pytest.LogCaptureFixture) -> None:
    log = queue_of("ab")
    consumer = pull(log, auto_commit=False)
    consumer.member.join()
    consumer.member.fetch()
    with consumer.member.changed:
        consumer._take()
        consumer._unseen = None
        for queue in consumer.member.queues.values():
            queue.releasing = True
    beside = threading.Thread(target=consumer.member.persist)
    with at("commit done", lambda: (beside.start(), beside.join(0.2)), table="groups"):
        consumer.commit()
    beside.join()
    assert position(log) == 2
    assert "was claimed by another member" not in caplog.text


def test_a_script_is_told_of_messages_that_are_in_no_table_any_more() -> None:
    log = queue_of("a")
    log.drain()
    send(log, "b")
    table = log.another().engine.messages_table
    lost = Change(remove=table.actions()["path"].to_pylist())
    table.compare_and_set(lambda _: lost, lambda _: True)
    with pytest.raises(txmq.OffsetOutOfRangeError, match="queue 0: offsets 0 to 0 are not in the commit log"):
        read_to_the_end(log.another())
    assert log.engine.groups.next_offsets("report").get(QUEUE, 0) == 0


def test_it_waits_for_what_another_member_of_the_group_has() -> None:
    """To the end comes the group, and not only one of its members."""
    log = memory_log()
    send(log, "abcdef")
    pull(log.another(), heartbeat_interval=10, lease=LEASE_S).member.join()  # and it dies
    lives = pull(log.another(), stop_at_end=True, heartbeat_interval=10, lease=LEASE_S)
    lives._ends = dict(log.engine.tails())
    lives.member.join()
    assert lives._next_before(log.engine.runtime.monotonic()) is None
    assert not lives._is_at_end()
    pass_time([lives], LEASE_S + 15)
    found = []
    while not lives._is_at_end():
        take = lives._next_before(log.engine.runtime.monotonic())
        assert take is not None
        found += take.messages["body"].to_pylist()
    assert sorted(found) == [letter.encode() for letter in "abcdef"]
