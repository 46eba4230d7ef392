"""Sends back the messages that a member's listener did not consume.

Each is a half batch of its own, named after the place of the failed message: group, topic, queue and offset, and the
queue's epoch, which a reset changes::

    orders, queue 0, offset 5 fails      back.points.orders.0.5.<epoch>            a retry
    that retry comes, and fails          back.points.%RETRY%points.0.17.<epoch>    the next retry
    that one fails, and was the last     back.points.%RETRY%points.0.23.<epoch>    a dead letter

After a crash the messages come again, perhaps at another member and in other takes, and some may not fail again. Names
depend on none of that: each message that was sent back is found, and only the rest is sent. A retry has a place of its
own in its topic, so the place identifies the message and the retry. The outcome is no part of the name
either: a member with other settings does not make a dead letter of a message that already has a retry.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from rmq_spark._core.consumers.progress import ProcessQueue
from rmq_spark._core.consumers.retry import sent_back, tried
from rmq_spark._core.consumers.send import send_each
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.own_sends import back_name
from rmq_spark._core.protocol.send import TwoPhase


def send_back(
    log: Engine,
    group: str,
    queue: ProcessQueue,
    messages: pa.Table,
    reasons: Sequence[str | None],
    reconsume_max: int,
    delay_level: int | None,
    two_phase: TwoPhase,
    tries: int = 0,
) -> int:
    """Send messages of one queue to the group's retries or dead letters, and return how many were not there yet.

    Parameters
    ----------
    messages : pyarrow.Table
        As :func:`~rmq_spark._core.consumers.retry.restored` returns them, in offset order.
    tries : int
        How often the first message was tried again in its place.
    """
    rows = sent_back(tried(messages, tries), reasons, group, reconsume_max, delay_level)
    names = [back_name(group, queue.queue, offset, queue.epoch) for offset in messages["queue_offset"].to_pylist()]
    return send_each(log, group, names, rows, two_phase)
