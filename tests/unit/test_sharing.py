"""Producers of several processes share commits: one makes those of the others. Here each has a handle of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import rmq_spark as txmq
from rmq_spark.check.service import CheckService
from rmq_spark.commitlog import carried, sharing
from rmq_spark.commitlog.half import HalfRows
from rmq_spark.commitlog.half_store import Staged
from rmq_spark.commitlog.ledger import Decision
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import Who
from rmq_spark.commitlog.rows import RowSet
from rmq_spark.errors import CommitError, LocalTransactionError, TopicNotFoundError
from rmq_spark.machine import MACHINE
from rmq_spark.meeting import Meeting, NoAnswerError
from rmq_spark.transaction import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, HalfBatch
from tests.half_batches import make_log

MANY = 20
LARGE = 200_000


class Shop(txmq.TransactionListener):
    """Answers by the body; what it does not name commits. It remembers what it executed and what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.executed: list[str] = []
        self.asked: list[str] = []

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        body = batch.messages(["body"])["body"][0].as_py().decode()
        self.executed.append(body)
        answer = self.answers.get(body, COMMIT_MESSAGE)
        return answer() if callable(answer) else answer

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        body = batch.messages(["body"])["body"][0].as_py().decode()
        self.asked.append(body)
        return COMMIT_MESSAGE if body in self.executed else ROLLBACK_MESSAGE


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they meet in a test."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir="/tmp"))


class Pair:
    """A producer that commits for another one.

    Attributes
    ----------
    commits : list of (str, int)
        Who made a commit, ``first`` or ``second``, and for how many half batches: of prepares and of decisions.
    """

    def __init__(self, log: CommitLog, first_more: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> None:
        self.shops = {name: Shop(**more.pop(name, {})) for name in ("first", "second")}
        self.logs = {name: log.another() for name in self.shops}
        settings = {"first": {**more, **first_more}, "second": more}
        self.first, self.second = (
            txmq.TransactionMQProducer(self.logs[name], "shop", shop, check_interval=None, **settings[name]).start()
            for name, shop in self.shops.items()
        )
        self.prepares: list[tuple[str, int]] = []
        self.decisions: list[tuple[str, int]] = []
        for name, handle in self.logs.items():
            self._watch(name, handle, "prepare_many", self.prepares)
            self._watch(name, handle, "prepare", self.prepares)
            self._watch(name, handle, "decide_many", self.decisions)
            self._watch(name, handle, "decide", self.decisions)
        for producer in (self.first, self.second):
            lose_a_race(producer)
            producer.send(message("begins"))
        self.prepares.clear()
        self.decisions.clear()

    def _watch(self, name: str, handle: Any, step: str, noted: list[tuple[str, int]]) -> None:
        made = getattr(handle, step)

        def noting(one: Any, *given: Any, **more: Any) -> Any:
            noted.append((name, len(one) if isinstance(one, list) else 1))
            return made(one, *given, **more)

        setattr(handle, step, noting)

    def close(self) -> None:
        for producer in (self.second, self.first):
            producer.shutdown()


def lose_a_race(producer: txmq.TransactionMQProducer) -> None:
    producer.log.op._turns.lost()  # type: ignore[attr-defined]


def meeting_of(producer: txmq.TransactionMQProducer) -> Meeting:
    found = producer._commits._meeting
    assert found is not None
    return found


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    return make_log("delta", tmp_path / "log", orders=2, bills=1)


@pytest.fixture
def pair(log: CommitLog) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**more: Any) -> Pair:
        made.append(Pair(log, **more))
        assert meeting_of(made[-1].second).follows
        assert not meeting_of(made[-1].first).follows
        return made[-1]

    yield make
    for one in made:
        one.close()


def message(body: str, topic: str = "orders", **more: Any) -> txmq.Message:
    return txmq.Message(topic, body.encode(), **more)


def bodies(log: CommitLog, topic: str = "orders") -> list[str]:
    found = log.another().read(topic)["body"].to_pylist()
    return sorted(body.decode() for body in found if body != b"begins")


def names(count: int) -> list[str]:
    return sorted(str(i) for i in range(count))


# ---------------------------------------------------------------- what is shared
def test_one_process_makes_the_commits_of_another_with_its_own(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()

    def send(i: int) -> Any:
        producer = both.second if i % 2 else both.first
        return producer.send_message_in_transaction(message(str(i)))

    with ThreadPoolExecutor(MANY) as pool:
        results = list(pool.map(send, range(MANY)))
    assert {name for name, _ in both.prepares + both.decisions} == {"first"}
    assert sum(n for _, n in both.prepares) == sum(n for _, n in both.decisions) == MANY
    stands = {(m["queue_id"], m["queue_offset"]): m["body"] for m in log.another().read("orders").to_pylist()}
    for i, result in enumerate(results):
        assert result.local_transaction_state is COMMIT_MESSAGE
        assert not result.replayed
        assert stands[result.queue_id, result.queue_offset] == str(i).encode()
    assert bodies(log) == names(MANY)
    assert {int(body) % 2 for body in both.shops["second"].executed} == {1}
    assert {int(body) % 2 for body in both.shops["first"].executed} == {0}


def test_verdicts_are_those_of_the_listener_of_who_sends(log: CommitLog, pair: Callable[..., Pair]) -> None:
    def fails() -> None:
        raise RuntimeError("no money")

    both = pair(second={"no": ROLLBACK_MESSAGE, "who knows": UNKNOWN, "fails": fails}, on_listener_error="fail")
    send = both.second.send_message_in_transaction
    found = [send(message(body)).local_transaction_state for body in ("yes", "no", "who knows")]
    assert found == [COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN]
    with pytest.raises(LocalTransactionError, match="no money"):
        send(message("fails"))
    assert bodies(log) == ["yes"]
    assert log.another().pending()["messages"].to_pylist() == [1, 1]
    assert {name for name, _ in both.prepares} == {"first"}


def test_asynchronous_sends_are_shared_too(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()
    sent = [both.second.send_message_in_transaction_async(message(str(i))) for i in range(MANY)]
    assert {one.result().local_transaction_state for one in sent} == {COMMIT_MESSAGE}
    assert bodies(log) == names(MANY)
    assert {name for name, _ in both.prepares + both.decisions} == {"first"}


def test_a_process_with_much_to_commit_does_it_itself(
    log: CommitLog, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with 2,048 sends in flight each sent less together than one: it had the work of both."""
    both = pair()
    monkeypatch.setattr(sharing, "SHARED_MAX", 3)
    with both.logs["second"].op.lock:  # all but the first come meanwhile
        sent = [both.second.send_message_in_transaction_async(message(str(i))) for i in range(MANY)]
    assert {one.result().local_transaction_state for one in sent} == {COMMIT_MESSAGE}
    assert bodies(log) == names(MANY)
    groups = both.prepares + both.decisions
    assert all(size < sharing.SHARED_MAX for name, size in groups if name == "first")
    assert max(size for name, size in groups if name == "second") >= sharing.SHARED_MAX


def test_a_retry_with_its_key_sends_nothing_twice(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()
    sends = [(both.second, "a"), (both.second, "a"), (both.first, "a"), (both.first, "b"), (both.second, "b")]
    found = [p.send_message_in_transaction(message(key), idempotency_key=key).replayed for p, key in sends]
    assert found == [False, True, True, False, True]
    assert bodies(log) == ["a", "b"]


def test_fifo_topics_properties_and_delays_arrive_as_they_were_sent(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()
    log.another().create_topic("lines", queues=1, fifo=True)  # the one that commits has never heard of it
    for i in range(3):
        both.second.send(message(str(i), "lines", sharding_key="k", keys=["x", "y"], tags="t", properties={"a": "b"}))
    found = log.another().read("lines", columns=["body", "sharding_key", "keys", "tags", "properties"]).to_pylist()
    assert [m.pop("body") for m in found] == [b"0", b"1", b"2"]
    assert found == [{"sharding_key": "k", "keys": "x y", "tags": "t", "properties": [("a", "b")]}] * 3
    later = both.second.send(message("later", delay_level=18))
    assert later.queue_offsets == {}
    assert bodies(log) == []
    assert {name for name, _ in both.prepares} == {"first"}


def test_several_messages_of_one_send_are_one_transaction(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()
    result = both.second.send([message(str(i), topic) for i in range(4) for topic in ("orders", "bills")])
    assert result.messages == 8
    assert (bodies(log), bodies(log, "bills")) == (names(4), names(4))
    assert both.prepares == [("first", 1)]


def test_what_is_large_is_committed_by_who_sends_it(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()
    both.second.send([message(str(i) + "x" * LARGE) for i in range(4)])
    assert both.prepares == [("second", 1)]
    assert len(bodies(log)) == 4


def test_a_message_that_breaks_a_rule_is_refused_where_it_is_sent(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()
    with pytest.raises(TopicNotFoundError):
        both.second.send(message("wrong", "nowhere"))
    both.second.send(message("right"))
    assert bodies(log) == ["right"]


def test_a_process_that_loses_no_race_meets_nobody(log: CommitLog) -> None:
    with txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer:
        producer.send(message("alone"))
        assert producer._commits._meeting is None


def test_each_producer_has_files_of_its_own_in_which_its_ids_follow_each_other(
    log: CommitLog, pair: Callable[..., Pair]
) -> None:
    """A file with ids of two producers would have bounds between which many others lie."""
    both = pair()
    with ThreadPoolExecutor(MANY) as pool:
        list(pool.map(lambda i: (both.first, both.second)[i % 2].send(message(str(i))), range(MANY)))
    half = log.another().half.table
    half.refresh()
    for low, high in zip(*(half.actions()[f"{end}.half_id"].to_pylist() for end in ("min", "max")), strict=True):
        assert low.rpartition("-")[0] == high.rpartition("-")[0]


# ---------------------------------------------------------------- no answer
class Line:
    """Spoils what the second producer hears."""

    def __init__(self, producer: txmq.TransactionMQProducer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._meeting = meeting_of(producer)
        self._ask = self._meeting.ask
        self.first: Callable[[], Any] = lambda: None
        self.lost: set[bytes] = set()
        monkeypatch.setattr(self._meeting, "ask", self._spoilt)

    def _spoilt(self, request: bytes, until_s: float) -> bytes | None:
        first, self.first = self.first, lambda: None
        first()
        answer = self._ask(request, until_s)
        if request[:1] in self.lost:
            raise NoAnswerError(has_ended=True)
        return answer


def test_a_prepare_whose_answer_is_lost_is_found_and_not_made_twice(
    log: CommitLog, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair()
    Line(both.second, monkeypatch).lost = {sharing.PREPARES}
    result = both.second.send_message_in_transaction(message("once"))
    assert both.prepares == [("first", 1), ("second", 1)]
    assert result.local_transaction_state is COMMIT_MESSAGE
    assert not result.replayed
    assert both.shops["second"].executed == ["once"]
    assert both.shops["second"].asked == []
    assert bodies(log) == ["once"]
    assert log.another().get(result.half_id).rows == 1


def test_a_decision_whose_answer_is_lost_is_repeated_and_stands_once(
    log: CommitLog, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair(second={"no": ROLLBACK_MESSAGE})
    Line(both.second, monkeypatch).lost = {sharing.DECISIONS}
    found = [both.second.send_message_in_transaction(message(b)) for b in ("once", "no")]
    assert [result.local_transaction_state for result in found] == [COMMIT_MESSAGE, ROLLBACK_MESSAGE]
    stands = {(m["queue_id"], m["queue_offset"]): m["body"] for m in log.another().read("orders").to_pylist()}
    assert stands[found[0].queue_id, found[0].queue_offset] == b"once"  # it had no place
    assert found[1].queue_offsets == {}
    assert both.decisions == [("first", 1), ("second", 1)] * 2
    assert bodies(log) == ["once"]
    assert log.another().pending().num_rows == 0


def test_a_send_with_a_key_whose_answer_is_lost_is_no_repeated_one(
    log: CommitLog, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one: its listener was asked what became of it, and did not know."""
    both = pair()
    line = Line(both.second, monkeypatch)
    line.lost = {sharing.PREPARES}
    result = both.second.send_message_in_transaction(message("once"), idempotency_key="k")
    assert (result.replayed, result.local_transaction_state) == (False, COMMIT_MESSAGE)
    assert (both.shops["second"].executed, both.shops["second"].asked) == (["once"], [])
    # Of another process's send of the same key it hears what became of that.
    line.first = lambda: both.first.send_message_in_transaction(message("twice"), idempotency_key="l")
    result = both.second.send_message_in_transaction(message("twice"), idempotency_key="l")
    assert result.replayed
    assert both.shops["second"].executed == ["once"]
    assert bodies(log) == ["once", "twice"]


def test_who_waits_in_vain_prepares_after_the_deadline_and_the_other_one_does_not(
    log: CommitLog, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "ANSWER_S_MAX", 0.3)
    both = pair()
    stands_still, go_on = threading.Event(), threading.Event()
    commit = both.first._commits._prepares._commit

    def late(requests: Any) -> Any:
        stands_still.set()
        go_on.wait(30.0)
        return commit(requests)

    monkeypatch.setattr(both.first._commits._prepares, "_commit", late)
    before_s = MACHINE.monotonic()
    result = both.second.send_message_in_transaction(message("once"))
    assert MACHINE.monotonic() - before_s >= 0.3
    assert stands_still.is_set()
    go_on.set()
    both.first.send(message("afterwards"))  # the one that stood still has gone on
    assert ("first", 1) in both.prepares
    assert both.shops["second"].executed == ["once"]
    assert log.another().get(result.half_id).rows == 1  # a file twice would be an error
    assert bodies(log) == ["afterwards", "once"]
    assert not meeting_of(both.second).follows


def test_who_is_answered_slowly_commits_by_itself_for_a_while(
    log: CommitLog, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process computes, and its threads for commits get no turn."""
    monkeypatch.setattr(sharing, "SLOW_S_MIN", 0.0)
    both = pair()
    commit = both.first._commits._prepares._commit

    def slow(requests: Any) -> Any:
        time.sleep(9 * both.second._commits._own_s)
        return commit(requests)

    both.second._commits._own_s = 0.05
    monkeypatch.setattr(both.first._commits._prepares, "_commit", slow)
    for i in range(5):
        both.second.send(message(str(i)))
    assert [name for name, _ in both.prepares] == ["first"] * 3 + ["second"] * 2
    assert not meeting_of(both.second).follows
    assert bodies(log) == names(5)


def test_a_commit_that_fails_there_is_made_by_who_sends(
    log: CommitLog, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair()

    def fails(*_: Any) -> Any:
        raise CommitError("the disk is full")

    monkeypatch.setattr(both.first._commits._prepares, "_commit", fails)
    monkeypatch.setattr(both.first._commits._decides, "_commit", fails)
    assert both.second.send_message_in_transaction(message("once")).local_transaction_state is COMMIT_MESSAGE
    assert both.prepares == [("second", 1)]
    assert both.decisions == [("second", 1)]
    assert bodies(log) == ["once"]


def test_a_check_that_was_faster_is_noticed(
    log: CommitLog, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that commits says what op says of the half batch afterwards: this handle does not look."""
    both = pair()
    prepare_many = both.logs["first"].prepare_many

    def checked(staged: Any) -> Any:
        prepared = prepare_many(staged)
        report = CheckService(log.another(), {"shop": Shop()}, transaction_timeout=0).run_once()
        assert report.rolled_back.messages == 1
        return prepared

    monkeypatch.setattr(both.logs["first"], "prepare_many", checked)
    result = both.second.send_message_in_transaction(message("once"))
    assert result.local_transaction_state is COMMIT_MESSAGE
    assert result.transaction_id.endswith(":2")  # the first attempt was over before it began
    assert both.shops["second"].executed == ["once"]
    assert bodies(log) == ["once"]


def test_when_the_one_that_commits_is_closed_the_others_go_on(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()
    both.first.shutdown()
    for i in range(3):
        assert both.second.send_message_in_transaction(message(str(i))).local_transaction_state is COMMIT_MESSAGE
    assert {name for name, _ in both.prepares} == {"second"}
    assert bodies(log) == names(3)
    both.first.start()
    both.first.send(message("3"))
    assert bodies(log) == names(4)


def test_a_producer_that_is_closed_serves_nobody_again(log: CommitLog, pair: Callable[..., Pair]) -> None:
    """A send that outlived the end of its producer let it."""
    both = pair()
    both.first.shutdown()
    lose_a_race(both.first)
    both.first._send_now(both.first._plainly, [message("late")], None, None, None, "batch", None)
    assert meeting_of(both.first)._server is None
    assert bodies(log) == ["late"]


def test_a_copy_of_a_log_is_another_log(tmp_path: Path, log: CommitLog) -> None:
    """It has the same id. Messages that were sent to one of them came into the other one."""
    shutil.copytree(log.path, tmp_path / "copy")
    (tmp_path / "link").symlink_to(log.path)
    logs = [log, CommitLog.open(tmp_path / "copy"), CommitLog.open(tmp_path / "link")]
    producers = [txmq.TransactionMQProducer(each, "shop", check_interval=None).start() for each in logs]
    try:
        for producer in producers:
            lose_a_race(producer)
            producer.send(message("begins"))
        assert [meeting_of(producer).follows for producer in producers] == [False, False, True]
        producers[1].send(message("into the copy"))
    finally:
        for producer in producers:
            producer.shutdown()
    assert bodies(logs[1]) == ["into the copy"]
    assert bodies(log) == []


FORKS = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[2]
import rmq_spark as txmq
producer = txmq.TransactionMQProducer(sys.argv[1], "shop", check_interval=None).start()
producer.log.op._turns.lost()
producer.send(txmq.Message("orders", b"begins"))
child = os.fork()
if child:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, os.path.exists(producer._commits._meeting._server._socket_path))
    producer.shutdown()
sys.exit(0)
"""


def test_a_forked_child_that_ends_leaves_its_parent_serving(log: CommitLog) -> None:
    """Its end closed what its parent has: nobody else could share commits, as long as that lived."""
    command = [sys.executable, "-c", FORKS, log.path, tempfile.gettempdir()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0 True\n", "")


def test_who_lingers_holds_up_no_other_process(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair(first_more={"linger": 1.5})
    before_s = MACHINE.monotonic()
    both.second.send(message("quick"))
    assert MACHINE.monotonic() - before_s < 1.4
    assert both.prepares == [("first", 1)]


@pytest.mark.parametrize("ago_s", [0.0, 30.0])
def test_a_lone_send_after_a_standstill_does_not_wait_as_long(log: CommitLog, ago_s: float) -> None:
    """It waited three times as long as the last commit had taken, for others that never came."""
    with txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer:
        producer.send(message("first"))
        for lane in (producer._commits._prepares, producer._commits._decides):
            lane._sizes.append(16)
            lane._commit_s, lane._ended_s = 60.0, MACHINE.monotonic() - ago_s
        before_s = MACHINE.monotonic()
        producer.send(message("second"))
        assert MACHINE.monotonic() - before_s < 5.0


# ---------------------------------------------------------------- what is carried
def test_what_is_carried_arrives_as_it_left(log: CommitLog, pair: Callable[..., Pair]) -> None:
    both = pair()
    seen: list[Staged] = []
    prepared: list[Any] = []
    prepare = both.logs["first"].prepare

    def noting(header: Any, files: Any) -> Any:
        seen.append(Staged(header, files))
        prepared.append(prepare(header, files))
        return prepared[-1]

    both.logs["first"].prepare = noting  # type: ignore[method-assign]
    both.first.send([message("a"), message("b", "bills"), message("c", delay_level=1)], idempotency_key="k")
    both.first.send(message("d"))
    again = carried.unpack_prepares(carried.pack_prepares(seen, 7.5), log.with_machine)
    assert [b.header for b in again] == [b.header for b in seen]
    assert [(b.header.made_up, b.header.numbered, b.header.named) for b in again] == [
        (False, False, False),
        (True, False, False),
    ]
    assert [b.until_s for b in again] == [7.5, 7.5]
    for one, other in zip(again, seen, strict=True):
        for came, left in zip(one.files, other.files, strict=True):
            assert isinstance(came, HalfRows)
            assert isinstance(left, HalfRows)
            assert came.table.equals(left.table.cast(came.table.schema))
            assert (came.file_no, came.segments, came.staged_at, came.delayed) == (
                left.file_no, left.segments, left.staged_at, left.delayed,
            )  # fmt: skip
    answers = [carried.Answer(prepared[0], False), None, carried.Answer(prepared[1], True)]
    told = carried.unpack_prepared(carried.pack_prepared(answers), [seen[0], seen[0], seen[1]])
    assert told == answers
    decisions = [Decision(p, 2, p.all_rows, RowSet(), Who.EXECUTE) for p in prepared]
    assert carried.unpack_decisions(carried.pack_decisions(decisions)) == decisions


@pytest.mark.parametrize("data", [b"", b"\0\0\0\2[]", b"\0\0\0\x09[1.0, []]not arrow", b"\xff" * 100])
def test_what_nobody_packed_is_refused(data: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011
        carried.unpack_prepares(data, lambda writer: writer)
