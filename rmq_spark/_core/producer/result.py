"""The result of a send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rmq_spark._core.log.batch_state import COMMITTED_STATES, ROLLED_BACK_STATES
from rmq_spark._core.log.half_header import HalfHeader
from rmq_spark._core.protocol.outcome import Outcome
from rmq_spark._core.vocabulary.ids import batch_transaction_id
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.verdicts import LocalTransactionState


class SendStatus(str, Enum):
    """RocketMQ's ``SendStatus``: a send that does not raise is in the log."""

    SEND_OK = "SEND_OK"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class TransactionSendResult:
    """The result of a send (RocketMQ: ``TransactionSendResult``).

    Attributes
    ----------
    send_status : SendStatus
    half_id : str
    transaction_id : str
        The id of the half batch's only transaction; with ``transaction_key``, the common beginning of all its ids.
    local_transaction_state : LocalTransactionState
        COMMIT_MESSAGE or ROLLBACK_MESSAGE when all messages share it, else UNKNOWN.
    queue_offsets : mapping of (topic, queue_id) to (first, last)
        Offsets of the messages that this send made visible; empty when there are none.
    messages : int
    replayed : bool
        True when ``idempotency_key`` had been sent before.
    """

    send_status: SendStatus
    half_id: str
    transaction_id: str
    local_transaction_state: LocalTransactionState
    queue_offsets: Mapping[Queue, tuple[int, int]]
    messages: int
    replayed: bool

    @property
    def queue_id(self) -> int | None:
        """The queue of a single visible message."""
        return next(iter(self.queue_offsets))[1] if len(self.queue_offsets) == 1 else None

    @property
    def queue_offset(self) -> int | None:
        """The offset of a single visible message, or the first of several in one queue."""
        return next(iter(self.queue_offsets.values()))[0] if len(self.queue_offsets) == 1 else None


def result_of(header: HalfHeader, outcome: Outcome, rows: int) -> TransactionSendResult:
    states = set(outcome.messages)
    verdict = LocalTransactionState.UNKNOWN
    if states and states <= set(COMMITTED_STATES):
        verdict = LocalTransactionState.COMMIT_MESSAGE
    elif states and states <= set(ROLLED_BACK_STATES):
        verdict = LocalTransactionState.ROLLBACK_MESSAGE
    offsets: dict[Queue, tuple[int, int]] = {}
    for placed in outcome.placed:
        first, _ = offsets.get((placed.topic, placed.queue_id), (placed.queue_offset, 0))
        offsets[(placed.topic, placed.queue_id)] = (first, placed.queue_offset + placed.count - 1)
    half_id = (outcome.record or header).half_id  # a repeated send has the id that is in the log
    return TransactionSendResult(
        send_status=SendStatus.SEND_OK,
        half_id=half_id,
        transaction_id=batch_transaction_id(half_id, outcome.attempt),
        local_transaction_state=verdict,
        queue_offsets=offsets,
        messages=rows,
        replayed=outcome.replayed,
    )
