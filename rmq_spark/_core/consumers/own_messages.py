"""Sends the messages that rmq_spark itself makes: retries, dead letters, and dead letters that are resent.

Each is a half batch of its own, named after the message that it was made of. So a repeated send finds it by its name,
and does not read it::

    in half, pending    it was not decided: it is committed now
    in half             it was sent, even when its payload was stripped
    archived            it was sent, and has left half
    nowhere             it is new
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared
from rmq_spark._core.log.batch_state import RowState
from rmq_spark._core.log.decision import Decision
from rmq_spark._core.log.half import HalfRows
from rmq_spark._core.log.half_header import HalfHeader, Naming, name_of
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.log.op import Who
from rmq_spark._core.log.single_messages import rows_of_each
from rmq_spark._core.log.staged_batches import Staged
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.group_commit import AT_ONCE_MAX
from rmq_spark._core.protocol.identity import Identity
from rmq_spark._core.protocol.observe import tell_not_sent, tell_sent
from rmq_spark._core.protocol.outcome import Outcome
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.runtime import observer
from rmq_spark._core.vocabulary.rows import NO_ROWS
from rmq_spark._core.vocabulary.verdicts import BATCH


def own_header(
    engine: Engine, group: str, app_id: str, batch_id: int = 0, identity: Identity | None = None
) -> HalfHeader:
    """Return the header of a half batch that any process may commit once it is prepared.

    A dot in ``app_id`` keeps it apart from half batches that users send, whose app ids have none. With the identity of
    a micro-batch, ``app_id`` must name its query, and ``batch_id`` counts the half batches of that query.
    """
    return HalfHeader.of(
        Naming.KEY if identity is None else Naming.COUNTED,
        app_id,
        batch_id,
        query_id=None if identity is None else identity.query_id,
        input_hash=None if identity is None else identity.input_hash,
        fence_id=CommitOncePrepared.store_id,
        transaction_per=BATCH,
        producer_group=group,
        runtime=engine.runtime,
    )


def own_writers(engine: Engine, headers: Sequence[HalfHeader]) -> list[HalfWriter]:
    """Return writers for messages that may have RocketMQ's reserved properties."""
    topics = engine.topics()
    return [engine.with_runtime(HalfWriter(header, topics, None, None, own=True)) for header in headers]


def send_each(
    engine: Engine, group: str, names: Sequence[str], messages: pa.Table, two_phase: TwoPhase | None = None
) -> int:
    """Send each message, as a HalfWriter takes them, as the half batch of its name, up to :data:`AT_ONCE_MAX` in one
    commit to each table, and return how many were new. All names differ. Without ``two_phase`` no commits are
    shared."""
    two_phase = two_phase or TwoPhase(engine, CommitOncePrepared())
    writers = own_writers(engine, [own_header(engine, group, name) for name in names])
    new = 0
    for at in range(0, len(writers), AT_ONCE_MAX):
        chunk = writers[at : at + AT_ONCE_MAX]
        try:
            new += _send(group, rows_of_each(messages.slice(at, AT_ONCE_MAX), chunk, chunk[0]), two_phase)
        except Exception as problem:
            tell_not_sent(engine, group, problem)
            raise
    return new


def _send(group: str, rows: Sequence[HalfRows], two_phase: TwoPhase) -> int:
    """Prepare and commit half batches, and return how many of them were new."""
    engine, commits = two_phase.engine, two_phase.commits
    began_s = engine.runtime.monotonic()
    prepared = commits.prepare([Staged(message.writer.header, [message]) for message in rows])
    new = {answer.header.name: answer for answer in prepared if isinstance(answer, HalfRecord)}
    remaining = {message.writer.header.name: message for message in rows}
    if known := remaining.keys() - new:
        committed = engine.ledger.committed_among(known)
        remaining = {name: message for name, message in remaining.items() if name not in committed}
    opened = [*new.values(), *_open_records(engine, remaining.keys() - new)]
    decisions = [Decision(record, 1, record.all_rows, NO_ROWS, Who.EXECUTE) for record in opened]
    decided = commits.decide(decisions) if decisions else ()
    for record, answer in zip(opened, decided, strict=True):
        if answer.problem is None:
            del remaining[record.header.name]
            if record.header.name in new and observer.observers():
                tell_sent(engine, group, Outcome(record, messages={RowState.COMMITTED: record.rows}), began_s)
    for message in remaining.values():  # quarantined, or rolled back
        two_phase.send(message.writer.header, lambda message=message: [message])  # type: ignore[misc]
    return len(new)


def _open_records(engine: Engine, names: Collection[str]) -> list[HalfRecord]:
    """Return those half batches of these names that are prepared and not decided."""
    open_names = {name_of(half_id) for half_id in engine.open_half_ids()}.intersection(names) if names else ()
    records = [engine.find(name.rpartition(":")[0], 0) for name in open_names]
    return [record for record in records if record is not None and record.left is None]
