"""Asynchronous sends: in how many threads, what a future tells, callbacks, cancelling, closing, and coroutines."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait
from concurrent.futures import TimeoutError as FuturesTimeoutError
from contextvars import ContextVar
from typing import Any

import pytest

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, CheckService, CommitLog, HalfBatch
from rmq_spark import TransactionMQProducer as Producer
from rmq_spark._core.producer.admission import ListenerSlots, SendSlots
from rmq_spark._core.producer.future import SendFuture
from rmq_spark.errors import FencedError, ListenerError, LocalTransactionError, OptionError
from tests.support.half_batches import another
from tests.support.inside import CommitOncePrepared
from tests.support.meanwhile import at
from tests.support.sends import DEADLINE_S, Shop, message, producer_of, raising, send_async, sent_bodies, wait_for

BOTH = pytest.mark.log("memory", "delta", orders=2)
"""For the others a log in memory is enough: they are about the producer."""


@BOTH
def test_asynchronous_sends_share_commits_and_come_to_their_end_when_the_producer_is_closed(log: CommitLog) -> None:
    before = log.refresh()
    with producer_of(log, listener_threads=8) as producer:
        sent = send_async(producer, *range(30))
        sent += [producer.send_async(message(i)) for i in range(30, 40)]
    assert sent_bodies(log) == sorted(str(i) for i in range(40))
    assert {send.result(0).local_transaction_state for send in sent} == {COMMIT_MESSAGE}
    assert log.refresh() - before < 40
    with pytest.raises(OptionError, match="not open"):
        producer.send_async(message("late"))


# ---------------------------------------------------------------- slots
def test_no_more_asynchronous_sends_are_in_flight_than_allowed(log: CommitLog) -> None:
    accepted: list[Any] = []
    shop = Shop(waits="0123")
    with producer_of(log, shop, max_in_flight=3) as producer:
        sender = threading.Thread(target=lambda: [accepted.extend(send_async(producer, i)) for i in range(4)])
        sender.start()
        wait_for(lambda: len(accepted) == 3)
        time.sleep(0.1)
        assert len(accepted) == 3
        shop.go_on.set()
        sender.join(DEADLINE_S)
    assert len(sent_bodies(log)) == 4


def test_a_send_whose_local_transaction_would_have_to_wait_is_not_prepared(log: CommitLog) -> None:
    shop = Shop(waits="01234")
    with producer_of(log, shop, listener_threads=2) as producer:
        sent = send_async(producer, *range(5))
        wait_for(lambda: len(shop.seen) == 2)
        plain = producer.send_async(message("plain"))  # it needs no listener, so it waits for none
        assert plain.result(DEADLINE_S).local_transaction_state is COMMIT_MESSAGE
        assert log.pending().num_rows == 2
        shop.go_on.set()
        assert [s.result(DEADLINE_S).local_transaction_state for s in sent] == [COMMIT_MESSAGE] * 5
    assert len(sent_bodies(log)) == 6


def test_more_are_prepared_while_local_transactions_are_short_and_fewer_when_they_are_long() -> None:
    slots = ListenerSlots(threads=2, transaction_timeout_s=6.0)
    assert slots.prepared_max == 2
    with slots.running():
        pass
    assert slots.prepared_max > 1_000
    slots._mean_s = 10.0
    assert slots.prepared_max == 2


@pytest.mark.parametrize("key", [None, "k"])
def test_a_local_transaction_that_raises_leaves_its_turn_to_the_next(log: CommitLog, key: str | None) -> None:
    shop = Shop(dict.fromkeys("01", raising(RuntimeError("no"))))
    with producer_of(log, shop, listener_threads=1, on_listener_error="fail") as producer:
        sent = send_async(producer, *range(3), key=key)
        nowhere = message("", "nowhere")  # never prepared
        sent += [producer.send_message_in_transaction_async(nowhere, idempotency_key=key)]
        assert [type(s.exception(DEADLINE_S)).__name__ for s in sent] == [
            "LocalTransactionError", "LocalTransactionError", "NoneType", "TopicNotFoundError",
        ]  # fmt: skip
        assert not producer._send_threads.listener_slots._admitted


def test_a_send_whose_listener_is_not_ready_is_not_prepared_and_keeps_no_room(log: CommitLog) -> None:
    class NotReady(Shop):
        def require_ready(self) -> None:
            raise ListenerError("its database has no fence")

    with producer_of(log, NotReady(), max_in_flight=1) as producer:
        for sent in send_async(producer, 0, 1):
            assert isinstance(sent.exception(DEADLINE_S), ListenerError)
    assert log.pending().num_rows == 0


def test_a_second_send_of_a_key_waits_for_the_first_and_checks_nothing(log: CommitLog) -> None:
    shop = Shop(waits="0")
    shop.checked = UNKNOWN  # a check would wait for replay_check_timeout
    with producer_of(log, shop, replay_check_timeout=0) as producer:
        sent = send_async(producer, 0, 0, 0, key="k")
        shop.wait_until_seen("0")
        shop.go_on.set()
        results = [s.result(DEADLINE_S) for s in sent]
    assert sorted(r.replayed for r in results) == [False, True, True]
    assert sent_bodies(log) == ["0"]
    assert producer._sender.key_locks._known == {}


def test_those_who_wait_for_a_key_take_no_room_of_others(log: CommitLog) -> None:
    shop = Shop(waits=["slow"])
    with producer_of(log, shop, listener_threads=2) as producer:
        slow = send_async(producer, *["slow"] * 5, key="k")
        shop.wait_until_seen("slow")
        (quick,) = send_async(producer, "quick")
        assert quick.result(DEADLINE_S).local_transaction_state is COMMIT_MESSAGE
        shop.go_on.set()
        assert [s.result(DEADLINE_S).replayed for s in slow].count(False) == 1


def test_hundreds_of_asynchronous_sends_have_few_threads(log: CommitLog) -> None:
    before, most = threading.active_count(), 0

    class Counts(Shop):
        def execute_local_transaction(self, batch: HalfBatch) -> Any:
            nonlocal most
            most = max(most, threading.active_count() - before)
            return COMMIT_MESSAGE

    with producer_of(log, Counts(), max_in_flight=500, listener_threads=4) as producer:
        sent = send_async(producer, *range(500))
        for send in sent:
            send.add_done_callback(lambda _: None)
    assert {send.result(0).local_transaction_state for send in sent} == {COMMIT_MESSAGE}
    assert most < 50  # listeners, the two that commit, the leases', and as many for callbacks as a busy machine makes


@BOTH
def test_a_listener_that_sends_more_does_not_wait_for_its_own_room(log: CommitLog) -> None:
    audits: list[Any] = []

    class Audits(Shop):
        def execute_local_transaction(self, batch: HalfBatch) -> Any:
            audits.append(producer.send_async(message(100)))
            return super().execute_local_transaction(batch)

    with producer_of(log, Audits(), max_in_flight=1, listener_threads=1) as producer:
        (sent,) = send_async(producer, 0)
        sent.add_done_callback(lambda _: audits.append(producer.send_async(message(101))))
        sent.result(DEADLINE_S)
        wait_for(lambda: len(audits) == 2)
        for audit in list(audits):
            audit.result(DEADLINE_S)
    assert sent_bodies(log) == ["0", "100", "101"]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_send_that_is_interrupted_in_any_call_keeps_no_room(log: CommitLog, key: str | None) -> None:
    """It stayed among those under way, and each shutdown waited 30 seconds for it. Python looks for an interrupt when a
    function begins."""
    interrupted = 0
    modules = "producer send_threads admission async_send future".split()
    files = tuple(f"_core/producer/{module}.py" for module in modules)
    with producer_of(log, max_in_flight=3) as producer:
        for at in range(1, 500):
            calls = 0

            def trace(frame: Any, event: str, _: object) -> None:
                nonlocal calls
                if frame.f_code.co_filename.endswith(files):
                    calls += 1
                    if calls == at:  # noqa: B023
                        raise KeyboardInterrupt

            before = sys.gettrace()
            try:
                sys.settrace(trace)
                producer.send_message_in_transaction_async(message(at), idempotency_key=key and f"{key}{at}")
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
            finally:
                sys.settrace(before)
        assert interrupted > 8
        wait_for(lambda: not producer._open_sends._inside and not producer._send_threads.send_slots._inside)
        assert not producer._send_threads.listener_slots._admitted
    assert log.pending().num_rows == 0


@pytest.mark.parametrize("settle", ["check", "resolve"])
def test_a_plain_send_that_others_have_settled_waits_for_no_local_transaction(log: CommitLog, settle: str) -> None:
    other = another(log)

    def settled_meanwhile() -> None:
        """The sender sleeps between its prepare and its look at what op says."""
        for half_id in other.engine.open_half_ids():
            if other.engine.get(half_id).header.fence_id == CommitOncePrepared.store_id:
                if settle == "check":
                    CheckService(other, {}, transaction_timeout=0).run_once()
                else:
                    other.resolve(half_id, COMMIT_MESSAGE, "seen to")

    shop = Shop(waits="01")
    with producer_of(log, shop, listener_threads=2) as producer:
        blocked = send_async(producer, 0, 1)
        shop.wait_until_seen("0", "1")
        with at("commit done", settled_meanwhile, table="half"):
            assert producer.send_async(message("plain")).result(DEADLINE_S).messages == 1
        shop.go_on.set()
        assert [b.result(DEADLINE_S).messages for b in blocked] == [1, 1]
    assert sent_bodies(log) == ["0", "1", "plain"]


def test_a_check_that_is_faster_than_an_asynchronous_send_lets_it_go_on_under_the_next_attempt(log: CommitLog) -> None:
    class Slow(Shop):
        def execute_local_transaction(self, batch: HalfBatch) -> Any:
            tenants.append(tenant.get(None))
            if batch.attempt == 1:
                self.checked = ROLLBACK_MESSAGE
                CheckService(another(log), {"shop": self}, transaction_timeout=0.0).run_once()
                raise FencedError("a check was here")
            return super().execute_local_transaction(batch)

    tenant: ContextVar[str] = ContextVar("tenant")
    tenants: list[str | None] = []
    with producer_of(log, Slow()) as producer:
        for i in range(3):  # what the caller has set is seen by the listener
            tenant.set(f"tenant {i}")
            result = send_async(producer, i)[0].result(DEADLINE_S)
            assert (result.local_transaction_state, result.transaction_id[-1]) == (COMMIT_MESSAGE, "2")
    assert tenants == [f"tenant {i}" for i in range(3) for _ in range(2)]
    assert sent_bodies(log) == ["0", "1", "2"]


# ---------------------------------------------------------------- futures and callbacks
def test_a_send_can_be_waited_for_in_every_way_by_several_threads(log: CommitLog) -> None:
    shop = Shop(waits="0")
    with producer_of(log, shop) as producer, ThreadPoolExecutor(6) as pool:
        slow, fast = send_async(producer, 0, 1)
        assert wait([slow, fast], DEADLINE_S, FIRST_COMPLETED).done == {fast}
        for ask in (slow.result, slow.exception, lambda seconds: list(as_completed([slow], seconds))):
            with pytest.raises(FuturesTimeoutError):
                ask(0.01)
        ways = [
            *(pool.submit(slow.result, DEADLINE_S) for _ in range(3)),
            pool.submit(lambda: next(as_completed([slow], DEADLINE_S)).result()),
            pool.submit(lambda: wait([slow], DEADLINE_S).done.pop().result()),
            pool.submit(asyncio.run, asyncio.wait_for(asyncio_form(slow), DEADLINE_S)),
        ]
        assert not wait(ways, 0.05).done
        shop.go_on.set()
        assert {way.result(DEADLINE_S).queue_offset for way in ways} == {slow.result().queue_offset}
        assert slow.exception() is None


async def asyncio_form(sent: Any) -> Any:
    return await asyncio.wrap_future(sent)


def test_a_callback_that_hangs_holds_up_no_result_and_no_other_callback(log: CommitLog) -> None:
    go_on, called = threading.Event(), []
    with producer_of(log) as producer:
        sent = send_async(producer, *range(20))
        for n, send in enumerate(sent):
            send.add_done_callback(lambda _, n=n: called.append(n) if n % 4 else go_on.wait(DEADLINE_S))
        assert {send.result(DEADLINE_S).messages for send in sent} == {1}
        wait_for(lambda: len(called) == 15)
        go_on.set()


def test_a_callback_that_comes_late_is_called_at_once_and_each_is_called_once(log: CommitLog) -> None:
    called: list[int] = []
    with producer_of(log) as producer:
        for n in range(40):
            sent = producer.send_async(message(n))
            if n % 2:
                sent.result(DEADLINE_S)
            sent.add_done_callback(lambda _, n=n: called.append(n))
            sent.add_done_callback(lambda _, n=n: called.append(n))
        wait_for(lambda: len(called) == 80)
    assert sorted(called) == sorted([*range(40), *range(40)])


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("answer", [COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN])
def test_callbacks_may_all_wait_for_other_sends(log: CommitLog, answer: Any, key: str | None) -> None:
    """They took the threads that those sends needed."""
    heard: list[Any] = []
    more = dict.fromkeys(["more-0", "more-1"], answer)
    with producer_of(log, Shop(more), max_in_flight=2, replay_check_timeout=0) as producer:

        def send_more(n: int) -> None:
            (sent,) = send_async(producer, f"more-{n}", key=key)
            heard.append(sent.result(DEADLINE_S).local_transaction_state)

        for n in range(2):
            send_async(producer, n)[0].add_done_callback(lambda _, n=n: send_more(n))
        wait_for(lambda: len(heard) == 2)
    assert heard == [answer, answer]


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("raised", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_takes_no_thread_from_other_sends(
    log: CommitLog, raised: type[BaseException], key: str | None
) -> None:
    """One of a send with a key ended a thread of the pool, and as many of them as there were threads stopped all."""
    called: list[int] = []
    with producer_of(log, max_in_flight=2) as producer:
        for n in range(6):
            (sent,) = send_async(producer, n, key=key)
            sent.add_done_callback(raising(raised()))
            sent.add_done_callback(lambda _, n=n: called.append(n))
            assert sent.result(DEADLINE_S).messages == 1
        wait_for(lambda: len(called) == 6)


@BOTH
def test_a_callback_may_close_the_producer(log: CommitLog) -> None:
    closed = threading.Event()

    def close(_: object) -> None:
        producer.shutdown()
        closed.set()

    producer = producer_of(log, check_interval=60).start()
    threads = list(producer._threads)
    producer.send_async(message(0)).add_done_callback(close)
    assert closed.wait(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)


# ---------------------------------------------------------------- cancelling, and closing
def test_a_send_that_is_cancelled_before_it_began_leaves_nothing_and_its_room_to_others(log: CommitLog) -> None:
    told: list[str] = []
    shop = Shop(waits="0")
    with producer_of(log, shop, max_in_flight=2, listener_threads=1) as producer:
        first, waits = send_async(producer, 0, 1)
        waits.add_done_callback(lambda _: told.append("waits"))
        shop.wait_until_seen("0")
        assert waits.cancel()
        assert waits.cancel()
        assert told == ["waits"]
        assert not first.cancel(), "it has begun"
        (third,) = send_async(producer, 2)
        shop.go_on.set()
        assert [s.result(DEADLINE_S).messages for s in (first, third)] == [1, 1]
    assert sent_bodies(log) == ["0", "2"]


def test_thousands_that_are_cancelled_at_once_hold_up_nobody(log: CommitLog) -> None:
    """Each let the next one begin, which was cancelled, too: a RecursionError, and the producer stood still."""
    shop = Shop(waits=["slow"])
    with producer_of(log, shop, max_in_flight=3000, listener_threads=1) as producer:
        (slow,) = send_async(producer, "slow")
        shop.wait_until_seen("slow")
        others = send_async(producer, *range(1500))
        assert all(other.cancel() for other in others)
        assert not wait(others, DEADLINE_S).not_done
        (last,) = send_async(producer, "last")
        shop.go_on.set()
        assert [s.result(DEADLINE_S).messages for s in (slow, last)] == [1, 1]
    assert sent_bodies(log) == ["last", "slow"]


def test_a_send_that_several_threads_cancel_gives_up_its_room_once() -> None:
    left: list[object] = []
    with ThreadPoolExecutor(3) as pool:
        for _ in range(200):
            sent, barrier = SendFuture(SendSlots(1, left.append)), threading.Barrier(3)

            def cancel(sent: SendFuture = sent, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                sent.cancel()

            wait([pool.submit(cancel) for _ in range(3)], DEADLINE_S)
    assert len(left) == 200


def test_a_producer_is_closed_in_time_although_a_local_transaction_hangs(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    """What has not begun is cancelled, and what has begun comes to its end, callbacks included."""
    shop, called = Shop(waits="0"), threading.Event()
    with producer_of(log, shop, listener_threads=1, await_termination=0.2) as producer:
        hangs, *others = send_async(producer, *range(4))
        shop.wait_until_seen("0")
    assert "closed with 4 under way" in caplog.text
    assert "local transaction of tests.support.sends.Shop" in caplog.text
    assert [other.cancelled() for other in others] == [True] * 3
    assert log.pending().num_rows == 1
    with pytest.raises(OptionError, match="not open"):
        producer.send(message(1))
    hangs.add_done_callback(lambda _: called.set())
    shop.go_on.set()
    assert hangs.result(DEADLINE_S).local_transaction_state is COMMIT_MESSAGE
    assert called.wait(DEADLINE_S), "although the producer has no threads for callbacks any more"
    assert sent_bodies(log) == ["0"]


def test_who_waits_for_sends_that_a_shutdown_cancels_hears_of_it(log: CommitLog) -> None:
    shop = Shop(waits="0")
    with producer_of(log, shop, listener_threads=1, max_in_flight=3, await_termination=0.1) as producer:
        (first,) = send_async(producer, 0, key="k")
        shop.wait_until_seen("0")
        (flies,) = send_async(producer, 1)
        in_pool: list[Any] = []

        async def send_more() -> None:  # beyond max_in_flight: some have no thread yet
            for i in range(5):
                in_pool.append(producer.send_message_in_transaction_async(message(2 + i), idempotency_key="k0"))

        asyncio.run(send_more())
    cancelled = [sent for sent in [flies, *in_pool] if sent.cancelled()]
    assert flies in cancelled
    assert len(cancelled) >= 3
    assert not wait(cancelled, DEADLINE_S).not_done
    shop.go_on.set()
    first.result(DEADLINE_S)


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("way", [RuntimeError, SystemExit, KeyboardInterrupt, "blocks"])
def test_a_cancelled_send_s_callback_keeps_no_producer_from_closing(log: CommitLog, way: Any, key: str | None) -> None:
    """It was called in the thread that closed: the others were never cancelled, and shutdown never ended."""
    called: list[Any] = []
    shop = Shop(waits="0")
    callback: Callable[..., Any] = (lambda _: shop.go_on.wait(DEADLINE_S)) if way == "blocks" else raising(way())
    producer = producer_of(log, shop, listener_threads=1, await_termination=0.1, check_interval=60).start()
    threads = list(producer._threads)
    sent = send_async(producer, *range(5), key=key)
    for send in sent:
        send.add_done_callback(callback)
        send.add_done_callback(called.append)
    shop.wait_until_seen("0")
    producer.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    if key is None:  # the others have a thread, in which they wait for their turn
        assert all(send.cancelled() for send in sent[1:])
        if way != "blocks":
            wait_for(lambda: len(called) == 4)
    shop.go_on.set()
    assert not wait(sent, DEADLINE_S).not_done
    wait_for(lambda: len(called) == 5)


def test_a_send_that_comes_while_the_producer_is_closed_is_cancelled_too() -> None:
    """It waited for ever behind those that were left."""
    slots = ListenerSlots(threads=1, transaction_timeout_s=6.0)
    begun, given_up = [], []
    slots.admit("first", lambda: not begun.append("first"))
    slots.close()
    slots.admit("late", lambda: not begun.append("late"), lambda: given_up.append("late"))
    slots.leave("first")
    assert (begun, given_up) == (["first"], ["late"])


def test_a_producer_that_is_opened_again_is_not_held_up_by_what_hung_before(log: CommitLog) -> None:
    shop = Shop(waits=["hangs"])
    producer = producer_of(log, shop, max_in_flight=1, listener_threads=1, await_termination=0.1).start()
    (hangs,) = send_async(producer, "hangs", key="k")
    shop.wait_until_seen("hangs")
    producer.shutdown()
    with producer:
        assert send_async(producer, "next")[0].result(DEADLINE_S).messages == 1
        shop.go_on.set()
        hangs.result(DEADLINE_S)
    assert sent_bodies(log) == ["hangs", "next"]


# ---------------------------------------------------------------- coroutines
class Awaits(Shop):
    """A local transaction that only the caller's event loop can bring to its end."""

    async def execute_local_transaction(self, batch: HalfBatch) -> Any:
        await asyncio.sleep(0)
        return super().execute_local_transaction(batch)


def test_a_coroutine_awaits_the_future_itself(log: CommitLog) -> None:
    """Who is cancelled ends its waiting, and not the send, also when that has not begun."""
    shop = Shop(waits=["slow"])

    async def gives_up(producer: Producer) -> list[Any]:
        sent = send_async(producer, "slow", "slow", "slow")
        for one in sent:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(one, 0.05)
        shop.go_on.set()
        return [await one for one in sent]

    with producer_of(log, shop, listener_threads=1) as producer:
        assert [r.local_transaction_state for r in asyncio.run(gives_up(producer))] == [COMMIT_MESSAGE] * 3
    assert len(sent_bodies(log)) == 3


def test_what_a_send_raises_after_its_waiting_was_cancelled_is_not_told_by_asyncio(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop({"fails": raising(ValueError("no"))}, waits=["fails"])

    async def gives_up(producer: Producer) -> None:
        (sent,) = send_async(producer, "fails")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sent, 0.05)
        shop.go_on.set()
        with pytest.raises(LocalTransactionError, match="no"):
            await sent

    with producer_of(log, shop, on_listener_error="fail") as producer:
        asyncio.run(gives_up(producer))
    gc.collect()
    assert "never retrieved" not in caplog.text


async def gather(producer: Producer, count: int) -> list[Any]:
    sent = send_async(producer, *range(count))
    return await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, sent)), DEADLINE_S)


def test_a_local_transaction_that_is_a_coroutine_runs_in_the_loop_of_its_caller(log: CommitLog) -> None:
    shop = Awaits({"1": ROLLBACK_MESSAGE, "2": raising(RuntimeError("no"))})
    with producer_of(log, shop) as producer:
        states = [r.local_transaction_state for r in asyncio.run(gather(producer, 5))]
        assert states == [COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, COMMIT_MESSAGE, COMMIT_MESSAGE]
        before = log.engine.half.table.version
        with pytest.raises(ListenerError, match="no event loop is running here"):
            producer.send_message_in_transaction_async(message(9))
        with pytest.raises(ListenerError, match="can wait for it; make it a plain"):
            producer.send_message_in_transaction(message(9))
        assert producer.send(message(10)).messages == 1  # it asks no listener
        assert log.engine.half.table.version == before + 1, "what was refused is not prepared"


def test_an_event_loop_is_not_stopped_by_more_sends_than_may_be_in_flight(log: CommitLog) -> None:
    """The accepted send needed the loop that the next one had stopped."""
    with producer_of(log, Awaits(), max_in_flight=1) as producer:
        asyncio.run(gather(producer, 3))
    assert len(sent_bodies(log)) == 3


@pytest.mark.turns(2)
@BOTH
@pytest.mark.parametrize("closes", [True, False])
def test_a_local_transaction_whose_event_loop_has_ended_is_told_and_holds_up_nobody(
    log: CommitLog, caplog: pytest.LogCaptureFixture, closes: bool
) -> None:
    began = threading.Event()

    class WaitsForEver(Shop):
        async def execute_local_transaction(self, batch: HalfBatch) -> Any:
            began.set()
            await asyncio.Event().wait()

    async def send() -> Any:
        (sent,) = send_async(producer, 0)
        while not began.is_set():
            await asyncio.sleep(0.01)
        return sent

    producer = producer_of(log, WaitsForEver(), await_termination=DEADLINE_S if closes else 0.1).start()
    loop = asyncio.new_event_loop()
    sent = loop.run_until_complete(send())
    if closes:
        loop.close()
    else:  # a library that goes on with its loop later
        producer.shutdown()
    assert sent.result(DEADLINE_S).local_transaction_state is UNKNOWN
    producer.shutdown()
    if not closes:  # what waited is cancelled there
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    assert caplog.text.count("the event loop ended while the local transaction ran in it") == 1
    assert sent_bodies(log) == []
    assert len(log.engine.open_half_ids()) == 1


def test_a_check_that_is_a_coroutine_is_refused(log: CommitLog) -> None:
    class Waits(Shop):
        async def check_local_transaction(self, batch: HalfBatch) -> Any:
            return COMMIT_MESSAGE

    with pytest.raises(ListenerError, match="a check has no event loop"):
        producer_of(log, Waits())
