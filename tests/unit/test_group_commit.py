"""Threads that send at the same moment share commits and half files; and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, CheckService, CommitLog, Message
from rmq_spark.errors import (
    CommitError,
    LocalTransactionError,
    LostFileError,
    MessageError,
    OptionError,
    VerdictConflictError,
)
from tests.support.clocks import set_clock
from tests.support.half_batches import let_leave, paths_of, rows_of
from tests.support.inside import RUNTIME, Runtime, group_commit
from tests.support.meanwhile import seen_at, unhooked
from tests.support.sends import DEADLINE_S, Shop, message, producer_of, raising, wait_for
from tests.support.sends import sent_bodies as bodies

pytestmark = pytest.mark.log("memory", "delta", orders=2, bills=1)
IN_MEMORY = pytest.mark.log("memory", orders=2)

MANY = 12


PREPARE, DECIDE = "txmq-prepare", "txmq-decide"


def ask(queue: Any, request: object, about: str) -> Any:
    """Ask a queue for one answer, or raise the problem."""
    (answer,) = queue.ask({about: request})
    if isinstance(answer, BaseException):
        raise answer
    return answer


@contextmanager
def together(count: int, decides: int = 0) -> Iterator[dict[str, list[int]]]:
    """The first send waits in its commit until so many have come; the others share the next one. The same of the first
    verdict, when ``decides`` is set. Yields the sizes of the commits by queue."""
    wanted = {PREPARE: count, DECIDE: decides}
    come = dict.fromkeys(wanted, 0)
    sizes: dict[str, list[int]] = {queue: [] for queue in wanted}

    def comes(queue: str) -> None:
        come[queue] += 1

    def begins(queue: str, about: Sequence[str]) -> None:
        sizes[queue].append(len(about))
        if len(sizes[queue]) == 1:
            wait_for(lambda: come[queue] >= wanted[queue])

    with seen_at("commit awaited", comes), seen_at("shared commit begins", begins):
        yield sizes


def call_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results or errors of calls at the same time, in their order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        made = [pool.submit(call) for call in calls]
        return [call.exception() or call.result() for call in made]


def send_all(
    log: CommitLog,
    listener: Any,
    messages: Sequence[Message],
    keys: Sequence[str | None] = (),
    decides: int = 0,
    **more: Any,
) -> tuple[list[Any], dict[str, list[int]]]:
    """Results or errors, in the order of the messages, which are prepared in two commits."""
    with producer_of(log, listener, **more) as producer, together(len(messages), decides) as sizes:
        send = producer.send_message_in_transaction
        keyed = zip(messages, keys or [None] * len(messages), strict=True)
        return call_all([lambda m=m, key=key: send(m, idempotency_key=key) for m, key in keyed]), sizes


def files(log: CommitLog) -> int:
    """How many files the table half has."""
    return len(paths_of(log.another().engine.half.table))


# ---------------------------------------------------------------- together
def test_sends_of_many_threads_share_commits_and_files_and_each_gets_its_own_answer(log: CommitLog) -> None:
    shop = Shop()
    before = log.engine.half.table.refresh(), log.refresh()
    results, sizes = send_all(log, shop, [message(i) for i in range(MANY)], decides=MANY)
    assert sorted(shop.seen) == sorted(str(i) for i in range(MANY)), "each listener gets its own messages"
    prepares, decides = sizes.values()
    assert sum(prepares) == sum(decides) == MANY
    assert (log.engine.half.table.refresh() - before[0], log.refresh() - before[1]) == (len(prepares), len(decides))
    assert len(prepares) <= 2
    assert len(decides) <= 2
    assert files(log) == len(prepares)
    stands = {(m["queue_id"], m["queue_offset"]): m["body"] for m in log.another().read("orders").to_pylist()}
    for i, result in enumerate(results):
        assert result.local_transaction_state is COMMIT_MESSAGE
        assert not result.replayed
        assert stands.pop((result.queue_id, result.queue_offset)) == str(i).encode()
    assert stands == {}


def test_verdicts_and_errors_are_those_of_each_send(log: CommitLog) -> None:
    shop = Shop({"1": ROLLBACK_MESSAGE, "2": UNKNOWN, "3": raising(RuntimeError("no money"))})
    results, _ = send_all(log, shop, [message(i) for i in range(6)], on_listener_error="fail")
    assert [r.local_transaction_state for r in (*results[:3], *results[4:])] == [
        COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, COMMIT_MESSAGE, COMMIT_MESSAGE,
    ]  # fmt: skip
    assert isinstance(results[3], LocalTransactionError)
    assert bodies(log) == ["0", "4", "5"]
    assert log.another().pending()["messages"].to_pylist() == [1, 1]


def test_a_check_of_another_process_finds_what_lies_in_a_shared_file(log: CommitLog) -> None:
    send_all(log, Shop(dict.fromkeys("12", UNKNOWN)), [message(i) for i in range(5)])
    other = log.another()
    assert [other.engine.get(h).rows for h in other.engine.open_half_ids()] == [1, 1]
    report = CheckService(other, {"shop": Shop()}, transaction_timeout=0).run_once()
    assert report.committed.messages == 2
    assert not report.problems
    assert bodies(log) == ["0", "1", "2", "3", "4"]


def test_topics_delays_and_properties_lie_in_one_file_too(log: CommitLog) -> None:
    some = [message(i, "bills", keys=["k"], tags="t", properties={"a": "b"}) for i in range(3)]
    send_all(log, Shop(), [*some, message("later", delay_level=18), *(message(i) for i in range(3))])
    assert bodies(log) == ["0", "1", "2"]
    found = log.another().read("bills", columns=["body", "tags", "keys", "properties"]).to_pylist()
    assert sorted(m.pop("body") for m in found) == [b"0", b"1", b"2"]
    assert found == [{"tags": "t", "keys": "k", "properties": [("a", "b")]}] * 3
    assert [delayed for _, delayed in log.open_messages().values() if delayed] == [1]


def test_sends_with_keys_have_a_file_of_their_own_and_are_found_again(log: CommitLog) -> None:
    keys = [None, "a", None, "b", "c", None]
    results, _ = send_all(log, Shop(), [message(i) for i in range(6)], keys)
    again, _ = send_all(log.another(), Shop(), [message(i) for i in (1, 3, 4)], ["a", "b", "c"])
    assert [r.replayed for r in again] == [True] * 3
    assert [r.half_id for r in again] == [results[i].half_id for i in (1, 3, 4)]
    assert bodies(log) == [str(i) for i in range(6)]


def test_transactions_by_key_and_whole_ones_are_read_from_one_file(log: CommitLog) -> None:
    """The columns to be read were those of the first range: without the key, reading failed for everybody."""
    with producer_of(log) as producer, together(6):
        table = pa.table({"k": ["a", "b"], "body": ["by key", "by key"]})

        def send(n: int) -> Any:
            if n % 2:
                return producer.send_messages_in_transaction(table, topic="bills", transaction_key="k")
            return producer.send_message_in_transaction(message(n, "bills"))

        call_all([lambda n=n: send(n) for n in range(6)])
    found = log.another().read("bills").to_pylist()
    assert len(found) == len({m["transaction_id"] for m in found}) == 9
    assert sorted({m["transaction_id"].rpartition(":")[2] for m in found if m["body"] == b"by key"}) == ["a", "b"]


def test_a_list_that_its_caller_fills_anew_is_sent_as_it_was(log: CommitLog) -> None:
    with producer_of(log, listener_threads=1) as producer:
        buffer: list[Message] = []
        for i in range(4):
            buffer[:] = [message(i)]
            producer.send_async(buffer)
        buffer.clear()
    assert bodies(log) == ["0", "1", "2", "3"]


def test_what_breaks_a_rule_troubles_no_other_send(log: CommitLog) -> None:
    log.create_topic("steps", 1, fifo=True)
    some = [
        message("good"), message("x", "unknown"), message("x", queue_id=7), message("x", "steps"),
        message("x", queue_id=9), message("step", "steps", sharding_key="k"), message("last", queue_id=1),
    ]  # fmt: skip
    results, _ = send_all(log, Shop(), some)
    kinds = [type(r).__name__ for r in results]
    good = "TransactionSendResult"
    assert kinds == [good, "TopicNotFoundError", "MessageError", "MessageError", "MessageError", good, good]
    assert bodies(log) == ["good", "last"]
    assert results[6].queue_id == 1
    assert bodies(log, "steps") == ["step"]
    assert log.another().pending().num_rows == 0


def test_a_message_alone_and_one_among_others_lie_in_the_half_file_alike(log: CommitLog) -> None:
    def given(n: int) -> Message:
        return message(n, "bills", tags="t", keys=["a", "b"], sharding_key="s", properties={"p": "1"}, delay_level=1)

    send_all(log, Shop(), [given(i) for i in range(4)])
    with producer_of(log) as producer:
        producer.send_message_in_transaction(given(4))
    rows = rows_of(log.engine.half.table).to_pylist()
    own = {"half_id", "app_id", "body", "born_timestamp", "store_timestamp", "deliver_at"}
    alike = {str({k: v for k, v in row.items() if k not in own}) for row in rows}
    assert len(rows) == 5
    assert len(alike) == 1


def test_one_that_drops_out_leaves_no_row_in_the_file_of_the_others(log: CommitLog) -> None:
    """Two producers send one key. Their files were written before either knew: the later one's must be written anew."""
    with producer_of(log.another()) as faster, producer_of(log) as producer, together(4) as sizes:

        def theirs(**_: object) -> None:
            if len(sizes[PREPARE]) == 2:
                with unhooked():
                    faster.send_message_in_transaction(message("theirs"), idempotency_key="b")

        with seen_at("commit begins", theirs, table="half"), ThreadPoolExecutor(4) as pool:
            keys = ["first", "a", "b", "c"]
            sends = []
            for key in keys:
                sends.append(pool.submit(producer.send_message_in_transaction, message(key), idempotency_key=key))
                wait_for(lambda: sizes[PREPARE])  # it is the first one that waits for the others
            found = [send.result() for send in sends]
    assert sizes[PREPARE] == [1, 3]
    assert [r.replayed for r in found] == [k == "b" for k in keys]
    assert bodies(log) == ["a", "c", "first", "theirs"]
    assert log.another().pending().num_rows == 0
    rows = rows_of(log.engine.half.table)["half_id"].to_pylist()
    assert len(rows) == len(set(rows)) == 4


def test_two_verdicts_that_contradict_each_other_trouble_no_other_send(log: CommitLog) -> None:
    def overruled() -> Any:
        other = log.another()
        records, half = map(other.engine.get, other.engine.open_half_ids()), other.engine.half
        (mine,) = [r for r in records if half.read(r, r.all_rows, ["body"])["body"].to_pylist() == [b"1"]]
        other.resolve(mine.half_id, ROLLBACK_MESSAGE, "a person was faster")
        return COMMIT_MESSAGE

    results, _ = send_all(log, Shop({"1": overruled}), [message(i) for i in range(4)])
    assert isinstance(results[1], VerdictConflictError)
    assert [r.local_transaction_state for r in (results[0], *results[2:])] == [COMMIT_MESSAGE] * 3
    assert bodies(log) == ["0", "2", "3"]


def test_a_single_message_keeps_its_transaction_key_among_others(log: CommitLog) -> None:
    """All were arranged with the key column of the first one: the listener saw no key, and messages had no id."""
    with producer_of(log) as producer, together(6):

        def send(n: int) -> Any:
            if n % 2:
                return producer.send_messages_in_transaction([message(n, keys=f"k{n}")], transaction_key="keys")
            return producer.send_message_in_transaction(message(n, keys="other"))

        call_all([lambda n=n: send(n) for n in range(6)])
    found = {m["body"]: m["transaction_id"] for m in log.another().read("orders").to_pylist()}
    assert all(found[b"%d" % n].endswith(f":1:k{n}") for n in (1, 3, 5))
    assert all(found[b"%d" % n].endswith(":1") for n in (0, 2, 4))


def test_a_message_that_was_changed_after_it_was_made_troubles_no_other_send(log: CommitLog) -> None:
    keys: list[Any] = ["k"]
    bad = message("bad", keys=keys)
    keys.append(7)
    results, _ = send_all(log, Shop(), [message("one"), bad, message("two"), message("three")])
    assert [type(r).__name__ for r in results].count("TransactionSendResult") == 3
    assert isinstance(results[1], MessageError)
    properties: dict[str, Any] = {"a": "b"}
    bad = message("bad", properties=properties)
    properties["a"] = None
    with producer_of(log) as producer, pytest.raises(MessageError, match="cannot be sent as it is now"):
        producer.send_message_in_transaction_async(bad)
    assert bodies(log) == ["one", "three", "two"]


# ---------------------------------------------------------------- what goes wrong
def test_a_queue_whose_thread_ends_answers_those_who_wait_and_begins_again() -> None:
    class Full(Runtime):
        """The memory is full when its first time is asked for."""

        full = True

        def monotonic(self) -> float:
            if self.full:
                self.full = False
                raise MemoryError
            return super().monotonic()

    queue = group_commit.CommitQueue[int, int](Full(), "queue", lambda some: some)
    with pytest.raises(MemoryError):
        ask(queue, 1, "one")
    assert ask(queue, 2, "two") == 2


def test_a_problem_of_the_store_is_told_to_all_who_waited(log: CommitLog) -> None:
    with producer_of(log) as producer:
        broken = raising(CommitError("the store does not answer"))
        with together(4), seen_at("shared commit begins", broken, queue=PREPARE):
            results = call_all([lambda i=i: producer.send_message_in_transaction(message(i)) for i in range(4)])
        told = [result for result in results if isinstance(result, Exception)]
        assert {str(p) for p in told} == {"the store does not answer"}
        assert len({id(p) for p in told}) == len(told) > 1  # each thread raises one of its own
        assert producer.send_message_in_transaction(message("next")).queue_offsets


def test_a_problem_that_cannot_be_copied_is_told_to_all_who_waited(log: CommitLog) -> None:
    class Bare(CommitError):
        def __init__(self, store: str, why: str) -> None:
            super().__init__(f"{store} {why}")

    gone = seen_at("shared commit begins", raising(Bare("the store", "is gone")), queue=PREPARE)
    with producer_of(log) as producer, together(4), gone:
        results = call_all([lambda i=i: producer.send_message_in_transaction(message(i)) for i in range(4)])
    assert {str(r) for r in results} == {"the store is gone"}


@IN_MEMORY
def test_a_lost_file_of_one_does_not_stop_the_others(log: CommitLog) -> None:
    lost: list[str] = []

    def loses_one(about: Sequence[str], **_: object) -> None:
        lost[:] = lost or about[:1]
        if lost[0] in about:
            raise LostFileError("its file is lost")

    told = seen_at("shared commit begins", loses_one, queue=DECIDE)
    with producer_of(log) as producer, together(4, decides=4), told:
        results = call_all([lambda i=i: producer.send_message_in_transaction(message(i)) for i in range(4)])
    assert [type(r.__cause__) for r in results if isinstance(r, Exception)] == [LostFileError]
    assert len(bodies(log)) == 3


def test_an_interrupted_caller_ends_its_waiting_and_not_the_commit() -> None:
    within, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def commit(requests: Sequence[int]) -> Sequence[int]:
        within.set()
        assert go_on.wait(DEADLINE_S)
        done.extend(requests)
        return requests

    class Interrupted(BaseException):
        pass

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert within.wait(DEADLINE_S)
            raise Interrupted

    class OneInterrupt(Runtime):
        def event(self) -> threading.Event:
            return super().event() if within.is_set() else Event()

    queue = group_commit.CommitQueue[int, int](OneInterrupt(), "queue", commit)
    with pytest.raises(Interrupted):
        ask(queue, 1, "one")
    later = threading.Thread(target=lambda: ask(queue, 2, "two"))
    later.start()
    go_on.set()
    later.join(DEADLINE_S)
    assert done == [1, 2]


def test_no_thread_is_left_when_nobody_sends(log: CommitLog) -> None:
    send_all(log, Shop(), [message(i) for i in range(4)])
    wait_for(lambda: not [t for t in threading.enumerate() if t.name in ("txmq-prepare", "txmq-decide")])


@IN_MEMORY
def test_one_half_batch_is_asked_for_once_in_a_commit(log: CommitLog) -> None:
    groups: list[list[int]] = []
    queue: Any = group_commit.CommitQueue(log.engine.runtime, "queue", lambda some: groups.append(list(some)) or some)
    with queue._lock:  # it cannot begin
        threads = [threading.Thread(target=ask, args=(queue, n, name)) for n, name in enumerate("aabac")]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(n for some in groups for n in some) == [0, 1, 2, 3, 4]
    names = [["aabac"[n] for n in some] for some in groups]
    assert all(len(some) == len(set(some)) for some in names)


def test_a_send_that_lingers_shares_its_commit_with_those_that_come(log: CommitLog) -> None:
    before = log.refresh()
    with producer_of(log, linger=DEADLINE_S, max_batch_messages=3) as producer:
        sent = []
        for i in range(3):
            sent.append(producer.send_async(message(i)))
            time.sleep(0.02)
        for send in sent:
            send.result(DEADLINE_S)
    assert log.engine.half.table.version == log.another().engine.half.table.version == 1
    assert log.refresh() - before <= 3


@pytest.mark.parametrize("ago_s", [0.0, 30.0])
def test_a_lone_send_after_a_standstill_does_not_wait_as_long(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch, ago_s: float
) -> None:
    """It waited three times as long as the last commit had taken, for others that never came."""
    clock = set_clock(monkeypatch)
    with producer_of(log) as producer:
        with together(3), seen_at("commit begins", lambda **_: clock.sleep(RUNTIME, 60.0)):
            call_all([lambda i=i: producer.send(message(i)) for i in range(3)])
        clock.sleep(RUNTIME, ago_s)
        before_s = RUNTIME.monotonic()
        producer.send(message("last"))
        assert RUNTIME.monotonic() - before_s < 5.0


def test_a_forked_process_is_refused(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    with producer_of(log) as producer:
        monkeypatch.setattr(producer, "_pid", -1)
        with pytest.raises(OptionError, match="Make a producer in each worker, after the fork"):
            producer.send_message_in_transaction(message("x"))
        producer.shutdown()
        with pytest.raises(OptionError, match="after the fork"):
            producer.start()
        monkeypatch.undo()


# ---------------------------------------------------------------- upkeep
def test_what_lies_in_shared_files_is_drained_as_it_was_placed(log: CommitLog) -> None:
    send_all(log, Shop({"3": ROLLBACK_MESSAGE}), [message(i, "bills") for i in range(MANY)])
    columns = ["queue_id", "queue_offset", "body", "msg_id", "transaction_id"]
    before = log.another().read("bills", columns=columns).to_pylist()
    log.drain()
    let_leave(log)
    after = log.another().read("bills", columns=columns).to_pylist()
    assert after == before
    assert len(after) == MANY - 1


def test_a_half_batch_that_is_not_in_a_shared_file_is_not_taken_for_one_that_is(log: CommitLog) -> None:
    results, _ = send_all(log, Shop(), [message(i) for i in range(5)])
    ids = sorted(r.half_id for r in results)
    between = ids[2].replace(":0", "!:0")
    assert ids[2] < ids[2].replace(":0", ":0!")
    assert ids[1] < between < ids[-1]
    other = log.another()
    assert other.engine.half._find(between) is None


def test_each_half_batch_of_a_shared_file_is_counted(log: CommitLog) -> None:
    send_all(log, Shop(), [message(i) for i in range(5)])
    other = log.another()
    assert sorted(other.engine.half.contents.all_batches().table["rows"].to_pylist()) == [1] * 5
    assert [p.rows for p in other.engine.half.contents.prepared_after(0).values()] == [1] * 5
