"""Sends the messages that rmq_spark itself makes: retries, dead letters, and dead letters that somebody resends."""

from __future__ import annotations

import pyarrow as pa

from rmq_spark.commitlog.half import HalfHeader, HalfWriter, half_id_of
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.listener import CommitOncePrepared
from rmq_spark.sink.identity import Identity
from rmq_spark.sink.two_phase import TwoPhase
from rmq_spark.transaction import BATCH


def own_header(group: str, app_id: str, batch_id: int = 0, identity: Identity | None = None) -> HalfHeader:
    """Return the header of a half batch that is committed once it is prepared, by whoever sees it first.

    A dot in ``app_id`` keeps it apart from half batches that people send, whose app ids have none. With the identity of
    a micro-batch, ``app_id`` has to name its query, and ``batch_id`` counts the half batches of that query.
    """
    return HalfHeader(
        half_id=half_id_of(app_id, batch_id),
        app_id=app_id,
        batch_id=batch_id,
        query_id=None if identity is None else identity.query_id,
        input_hash=None if identity is None else identity.input_hash,
        fence_id=CommitOncePrepared.store_id,
        transaction_per=BATCH,
        producer_group=group,
        numbered=identity is not None,
        named=identity is not None,
    )


def own_writer(log: CommitLog, header: HalfHeader) -> HalfWriter:
    """Return a writer for messages that may have RocketMQ's reserved properties."""
    return HalfWriter(header, log.topics(), None, None, own=True)


def send_once(log: CommitLog, group: str, app_id: str, messages: pa.Table, two_phase: TwoPhase | None = None) -> bool:
    """Send messages as the half batch of ``app_id``, and return False when it was sent before."""
    header = own_header(group, app_id)
    two_phase = two_phase or TwoPhase(log, CommitOncePrepared())
    outcome = two_phase.send(header, lambda: log.stage(own_writer(log, header), messages.to_batches()))
    return not outcome.replayed
