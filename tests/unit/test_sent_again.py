"""What rmq_spark itself has sent of a message is known for as long as anybody may send it: also after months."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.consumers.own_messages import send_each
from tests.support.consumers import LATER, go_on, joined, queue_of
from tests.support.half_batches import bodies, in_half, let_leave
from tests.support.inside import LOOK_INTERVAL_S, RECONSUME_TIME, dlq_topic, retry_topic, sent_back

MONTHS_S = 90 * 86_400.0
GROUP = "points"


@pytest.fixture
def log() -> CommitLog:
    return queue_of("abc")


def member(log: CommitLog, reconsume_max: int) -> Any:
    """A consumer of which all messages fail."""
    return joined(log, lambda messages: LATER, GROUP, max_reconsume_times=reconsume_max)


def sends_back_and_dies(log: CommitLog) -> None:
    """A member that sends messages back, and has not written its progress yet."""
    dies = member(log, 5)
    dies.member.fetch()
    assert dies.work()


def months_pass(log: CommitLog) -> None:
    """Everything leaves that may, and is forgotten."""
    for _ in range(3):
        log.engine.runtime.sleep(MONTHS_S)
        log.another().engine.clock_doubt_s()  # a later round believes the clock
        log.engine.runtime.sleep(LOOK_INTERVAL_S + 5)
        log.another().engine.ledger.place_due()
        let_leave(log, idempotency_s=0)
    assert in_half(log) == set()


def kept(log: CommitLog) -> int:
    """Of how many half batches the outcome is kept."""
    return len(log.another().engine.ledger.archived_rows()["half_id"].to_pylist())


def test_a_letter_is_sent_again_once_for_as_long_as_it_is_there(log: CommitLog) -> None:
    """Two weeks later it was sent a second time, and was listed as never sent."""
    go_on(member(log, 0))
    letters = txmq.DeadLetters(log, GROUP)
    assert letters.resend([0, 2]) == 2
    when = letters.list()["resent"].to_pylist()
    for _ in range(2):
        months_pass(log)
        letters = txmq.DeadLetters(log.another(), GROUP)
        assert letters.list()["resent"].to_pylist() == when
        assert letters.waiting() == 1
        assert letters.resend([0, 2]) == 0
    assert letters.resend() == 1
    assert sorted(bodies(log, retry_topic(GROUP))) == ["a", "b", "c"]


def test_what_is_kept_of_a_resent_letter_goes_with_the_letter(log: CommitLog) -> None:
    go_on(member(log, 0))
    assert txmq.DeadLetters(log, GROUP).resend() == 3
    months_pass(log)
    assert kept(log) == 3
    log.engine.topic_store.set_retention(dlq_topic(GROUP), 3600.0)
    months_pass(log)
    assert log.another().read(dlq_topic(GROUP)).num_rows == 0
    assert kept(log) == 0


def test_what_a_group_sent_back_is_known_until_it_has_read_on(log: CommitLog) -> None:
    """A group whose last member died before it had written its progress, and that nobody ran for a week."""
    sends_back_and_dies(log)
    log.another().engine.groups.hand_over(GROUP, "its lease is over")
    months_pass(log)
    go_on(member(log, 5))
    months_pass(log)
    retries = log.read(retry_topic(GROUP)).to_pylist()
    found = [(row["body"], dict(row["properties"])[RECONSUME_TIME]) for row in retries]
    assert sorted(found) == [(body, times) for body in (b"a", b"b", b"c") for times in ("1", "2")]
    assert kept(log) == 0, "the group has read on, and will not ask again"


@pytest.mark.parametrize("by", ["a reset", "a deletion"])
def test_what_a_group_sent_back_is_let_go_when_it_begins_anew(log: CommitLog, by: str) -> None:
    sends_back_and_dies(log)
    group = txmq.ConsumerGroup(log, GROUP)
    if by == "a reset":
        group.reset("earliest")
    else:
        group.delete()
    months_pass(log)
    assert kept(log) == 0


def test_the_letter_of_an_orderly_query_is_known_until_its_group_has_read_on(log: CommitLog) -> None:
    """It is sent before the micro-batch's progress is written, which may run again whenever the query is started."""
    log.engine.create_own_topic(dlq_topic(GROUP))
    message = log.read("orders", limit=1)
    message = message.append_column("reconsume_times", pa.array([0], pa.int32()))
    letter = sent_back(message, ["it failed"], GROUP, 0, None)
    name = f"dead.{GROUP}.a-query.orders.0.0"
    for count in (1, 0, 0):
        assert send_each(log.engine, GROUP, [name], letter) == count
        months_pass(log)
    log.engine.groups.progress(GROUP, {("orders", 0): 1}, "an orderly query")
    months_pass(log)
    assert kept(log) == 0


def test_a_key_of_a_user_counts_for_its_time_and_no_longer(log: CommitLog) -> None:
    producer = txmq.TransactionMQProducer(log, "back", check_interval=None)
    with producer:
        for _ in range(2):
            producer.send(txmq.Message("orders", b"x"), idempotency_key="resend-1")
            months_pass(log)
    assert bodies(log).count("x") == 2
    assert kept(log) == 0
