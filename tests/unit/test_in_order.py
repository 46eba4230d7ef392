"""Queues in order, as a task consumes them: batch by batch, from a position on, up to what the listener refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import EachMessage
from rmq_spark._core.consumers.in_order import QueueResult, by_queue, consume_queue
from rmq_spark._core.vocabulary.queues import Queue
from tests.support.consumers import memory_log, send
from tests.support.inside import FAILURE, SUCCESS

QUEUE = ("orders", 0)


LOG = memory_log(orders=2)
send(LOG, [str(n) for n in range(40)], queue_id=[0] * 20 + [1] * 20)
MESSAGES = LOG.read("orders")


def messages(offsets: Sequence[int], queue_id: int = 0) -> pa.Table:
    return MESSAGES.take([20 * queue_id + offset for offset in offsets])


def consume(
    batches: Sequence[Sequence[int]], position: int = 0, refuses: Callable[[int], bool] = lambda offset: False
) -> tuple[list[int], QueueResult]:
    seen: list[int] = []

    def one(message: txmq.MessageExt) -> Any:
        assert message.queue_offset is not None
        seen.append(message.queue_offset)
        return FAILURE if refuses(message.queue_offset) else SUCCESS

    found: dict[Queue, QueueResult] = {}
    for offsets in batches:
        for queue, table in by_queue(messages(offsets)):
            consume_queue(EachMessage(one), queue, table, position, found)
    return seen, found[QUEUE]


@pytest.mark.parametrize("position", [0, 3, 10, 12, 20])
def test_what_was_consumed_before_is_skipped(position: int) -> None:
    seen, result = consume([range(10), range(10, 20)], position)
    assert seen == list(range(position, 20))
    assert (result.next_offset, result.stopped_at) == (20, None)


def test_nothing_behind_a_refused_message_is_given_out() -> None:
    seen, result = consume([range(10), range(10, 20)], refuses=lambda offset: offset == 4)
    assert seen == [0, 1, 2, 3, 4]
    assert result.next_offset == 4
    assert result.stopped_at is not None
    assert pa.ipc.open_stream(result.stopped_at).read_all()["body"].to_pylist() == [b"4"]


@pytest.mark.parametrize("batches", [[[1, 0]], [[5, 6], [5, 7]]])
def test_a_queue_out_of_order_is_refused(batches: list[list[int]]) -> None:
    with pytest.raises(txmq.ConsumeError, match="ordered=true"):
        consume(batches)


def test_a_vectorised_listener_stops_at_the_first_refusal() -> None:
    found: dict[Queue, QueueResult] = {}
    statuses = [SUCCESS, FAILURE, SUCCESS]
    consume_queue(lambda table: statuses, QUEUE, messages([7, 8, 9]), 0, found)
    assert found[QUEUE].next_offset == 8


def test_a_message_that_stopped_its_queue_before_tells_how_often() -> None:
    times: list[int] = []
    consume_queue(
        lambda table: times.extend(table["reconsume_times"].to_pylist()), QUEUE, messages([7, 8]), 0, {}, (7, 2)
    )
    assert times == [2, 0]


def test_queues_of_one_batch_are_told_apart() -> None:
    table = pa.concat_tables([messages([0, 1], 0), messages([4], 1)])
    assert [(queue, t.num_rows) for queue, t in by_queue(table)] == [(("orders", 0), 2), (("orders", 1), 1)]
