"""Sends the messages back that a member's listener did not consume.

What fails in one take is one half batch. It is named after its first message: group, topic, queue, offset, and how
often the message has come; and after the queue's epoch, which a reset makes anew. After a crash the messages come
again, to whoever has the queue then. What fails again finds the half batch of the first time. But other messages of the
take may fail by then. So its content is looked at, and what is not in it is sent under the next name::

    first time       fails: 5, 9       retry.points.orders.0.5.0.<epoch>  has 5, 9
    after a crash    fails: 5, 9, 12   is there, has 5 and 9
                                       retry.points.orders.0.12.0.<epoch> has 12

So none is lost. One comes twice only when, after a crash, a message before it fails for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from rmq_spark.commitlog.half import half_id_of
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.consumer.progress import ProcessQueue
from rmq_spark.consumer.retry import ORIGIN_MESSAGE_ID, sent_back, tried
from rmq_spark.consumer.sending import send_once
from rmq_spark.errors import HalfBatchLeftError, HalfBatchNotFoundError
from rmq_spark.sink.two_phase import TwoPhase


def send_back(
    log: CommitLog,
    group: str,
    queue: ProcessQueue,
    messages: pa.Table,
    reasons: Sequence[str | None],
    reconsume_max: int,
    delay_level: int | None,
    two_phase: TwoPhase,
    kind: str = "retry",
    tries: int = 0,
) -> int:
    """Send messages of one queue to the group's retries or dead letters, and return how many were not there yet.

    Parameters
    ----------
    messages : pyarrow.Table
        As :func:`~rmq_spark.consumer.retry.restored` returns them, in offset order.
    kind : str
        What the half batches' names begin with.
    tries : int
        How often the first message was tried again in its place. The names do not have it: another member counts anew.
    """
    again = sent_back(tried(messages, tries), reasons, group, reconsume_max, delay_level)
    sent = 0
    while messages.num_rows:
        topic, queue_id = queue.queue
        first = messages.slice(0, 1).select(["queue_offset", "reconsume_times"]).to_pylist()[0]
        name = f"{kind}.{group}.{topic}.{queue_id}.{first['queue_offset']}.{first['reconsume_times']}.{queue.epoch}"
        if send_once(log, group, name, again, two_phase):
            return sent + int(again.num_rows)
        known = _sent_as(log, name)
        # The one after which it is named is there, whatever can be read of it.
        left = [at for at, msg_id in enumerate(messages["msg_id"].to_pylist()) if at and msg_id not in known]
        messages, again = messages.take(pa.array(left, pa.int64())), again.take(pa.array(left, pa.int64()))
    return sent


def _sent_as(log: CommitLog, name: str) -> set[str]:
    """Return the ids of the messages that a half batch sent again. None can be read any more of one that has left: then
    they come twice, and are not lost."""
    try:
        record = log.get(half_id_of(name, 0))
        rows = record.all_rows
        properties = log.half.read(record, rows, ["properties"])["properties"].to_pylist()
    except (HalfBatchLeftError, HalfBatchNotFoundError):
        return set()
    return {value for found in properties for key, value in found or () if key == ORIGIN_MESSAGE_ID}
