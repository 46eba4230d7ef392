"""Consumers without Spark on a real S3 server: heartbeats are puts, and a look for messages is a request."""

from __future__ import annotations

from typing import Any

import rmq_spark as txmq
from tests.support.consumers import DONE, go_on, push, seen_by, send


def test_members_share_a_group_on_s3(log: txmq.CommitLog) -> None:
    send(log, "abcd", queue_id=[0, 1] * 2)
    found: list[str] = []
    consumers: list[Any] = [push(log, seen_by(found, DONE)) for _ in range(2)]
    for consumer in consumers:
        assert consumer.member.pull_interval_s == 1.0
        consumer.member.join()
    assert len(txmq.ConsumerGroup(log, "points").members()) == 2
    for consumer in consumers * 2:  # the first one learns of the second, and releases what it has too much
        consumer.member._members.look()
        consumer.member._balance()
        consumer.member.persist()
    shares = [[queue for queue in consumer.queues() if queue[0] == "orders"] for consumer in consumers]
    assert [len(share) for share in shares] == [1, 1]
    for consumer in consumers:
        go_on(consumer)
    assert sorted(found) == list("abcd")
    assert sum(log.engine.groups.positions("points").values()) == 4
    for consumer in consumers:
        consumer.member.leave()
    assert txmq.ConsumerGroup(log, "points").members() == {}
    assert all(place.owner is None for place in log.engine.groups.places("points").values())
