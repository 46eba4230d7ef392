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

from rmq_spark._core.consumers.member import GroupMember
from rmq_spark._core.consumers.own_messages import send_each
from rmq_spark._core.consumers.progress import ProcessQueue
from rmq_spark._core.consumers.retry import MAX_RECONSUME_TIMES, sent_back, tried
from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.group_commit import GroupCommit
from rmq_spark._core.protocol.own_sends import back_name
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.runtime.spans import acknowledging

SEND_AGAIN_S = 1.0


class RetrySender:
    """Sends back what the listener of a member did not consume, and tries again while the store fails.
    ``reconsume_max`` and ``delay_level`` are the consumer's ``max_reconsume_times`` and ``delay_level``."""

    def __init__(self, member: GroupMember, reconsume_max: int | None, delay_level: int | None) -> None:
        self._member = member
        self._reconsume_max, self._delay_level = reconsume_max, delay_level
        self.two_phase = TwoPhase(member.engine, CommitOncePrepared(), commits=GroupCommit(member.engine))

    def is_out_of_retries(self, tries: int) -> bool:
        return self._reconsume_max is not None and tries > self._reconsume_max

    def send(
        self, queue: ProcessQueue, messages: pa.Table, reasons: list[str | None], kind: str, tries: int = 0
    ) -> bool:
        """Send failed messages to the retries or the dead letters; False when they were not sent, and come again."""
        member = self._member
        retries_max = MAX_RECONSUME_TIMES if self._reconsume_max is None else self._reconsume_max
        while not queue.lost:
            try:
                log, topic, rows = member.engine.path, queue.queue[0], messages.num_rows
                ends = min(messages["reconsume_times"].to_pylist()) >= retries_max
                with acknowledging(log, "dead" if ends else kind, [topic], rows, lambda: messages, group=member.group):
                    send_back(
                        member.engine, member.group, queue, messages, reasons, retries_max if kind == "retry" else 0,
                        self._delay_level, self.two_phase, tries,
                    )  # fmt: skip
                return True
            except Exception as problem:  # the store may answer next time
                member.note(problem, "messages were not sent back")
            if member.stopping.wait(SEND_AGAIN_S):
                return False
        return False


def send_back(
    engine: Engine,
    group: str,
    queue: ProcessQueue,
    messages: pa.Table,
    reasons: Sequence[str | None],
    reconsume_max: int,
    delay_level: int | None,
    two_phase: TwoPhase,
    tries: int = 0,
) -> int:
    """Send messages of one queue, as ``retry.restored`` returns them, to the group's retries or dead letters, and
    return how many were not there yet. ``tries``: how often the first message was tried again in its place."""
    rows = sent_back(tried(messages, tries), reasons, group, reconsume_max, delay_level)
    names = [back_name(group, queue.queue, offset, queue.epoch) for offset in messages["queue_offset"].to_pylist()]
    return send_each(engine, group, names, rows, two_phase)
