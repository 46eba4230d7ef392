"""Sends the messages that rmq_spark itself makes: retries, dead letters, and dead letters that somebody resends.

Each is a half batch of its own, with a name that says what it was made of. So whoever makes it again finds it, in
whatever holds it by then, and needs not read it::

    in half, pending    nobody has decided it: it is committed now
    in half             it is there, also when its payload was stripped
    archived            it was there, and has left half
    nowhere             it is new
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from rmq_spark._core.listeners.listener import CommitOncePrepared
from rmq_spark._core.log.half import HalfHeader, HalfRows, HalfWriter, Naming, name_of
from rmq_spark._core.log.half_table import HalfRecord, Staged
from rmq_spark._core.log.op import RowState, Who
from rmq_spark._core.log.op_table import Decision
from rmq_spark._core.log.single_messages import rows_of_each
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.group_commit import AT_ONCE_MAX
from rmq_spark._core.protocol.identity import Identity
from rmq_spark._core.protocol.observe import tell_not_sent, tell_sent
from rmq_spark._core.protocol.outcome import Outcome
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.runtime import observer
from rmq_spark._core.vocabulary.rows import NO_ROWS
from rmq_spark._core.vocabulary.verdicts import BATCH


def own_header(log: Engine, group: str, app_id: str, batch_id: int = 0, identity: Identity | None = None) -> HalfHeader:
    """Return the header of a half batch that is committed once it is prepared, by whoever sees it first.

    A dot in ``app_id`` keeps it apart from half batches that people send, whose app ids have none. With the identity of
    a micro-batch, ``app_id`` has to name its query, and ``batch_id`` counts the half batches of that query.
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
        machine=log.machine,
    )


def own_writers(log: Engine, headers: Sequence[HalfHeader]) -> list[HalfWriter]:
    """Return writers for messages that may have RocketMQ's reserved properties."""
    topics = log.topics()
    return [log.with_machine(HalfWriter(header, topics, None, None, own=True)) for header in headers]


def send_each(
    log: Engine, group: str, names: Sequence[str], messages: pa.Table, two_phase: TwoPhase | None = None
) -> int:
    """Send each message as the half batch of its name, all in one commit to each table, and return how many of them
    were new.

    Parameters
    ----------
    names : sequence of str
        One for each message. No two are equal.
    messages : pyarrow.Table
        As a :class:`~rmq_spark._core.log.half.HalfWriter` takes them.
    two_phase : TwoPhase, optional
        Of the sender; one without shared commits when not given.
    """
    two_phase = two_phase or TwoPhase(log, CommitOncePrepared())
    writers = own_writers(log, [own_header(log, group, name) for name in names])
    new = 0
    for at in range(0, len(writers), AT_ONCE_MAX):
        some = writers[at : at + AT_ONCE_MAX]
        try:
            new += _send(group, rows_of_each(messages.slice(at, AT_ONCE_MAX), some, some[0]), two_phase)
        except Exception as problem:
            tell_not_sent(log, group, problem)
            raise
    return new


def _send(group: str, rows: Sequence[HalfRows], two_phase: TwoPhase) -> int:
    """Prepare and commit half batches, and return how many of them were new."""
    log, commits = two_phase.log, two_phase.commits
    began_s = log.machine.monotonic()
    prepared = commits.prepare([Staged(one.writer.header, [one]) for one in rows])
    new = {found.header.name: found for found in prepared if isinstance(found, HalfRecord)}
    left = {one.writer.header.name: one for one in rows}
    if known := left.keys() - new:
        there = log.ledger.committed_among(known)
        left = {name: one for name, one in left.items() if name not in there}
    opened = [*new.values(), *_open_among(log, left.keys() - new)]
    decisions = [Decision(record, 1, record.all_rows, NO_ROWS, Who.EXECUTE) for record in opened]
    decided = commits.decide(decisions) if decisions else ()
    for record, found in zip(opened, decided, strict=True):
        if found.problem is None:
            del left[record.header.name]
            if record.header.name in new and observer.observers():
                tell_sent(log, group, Outcome(record, messages={RowState.COMMITTED: record.rows}), began_s)
    for one in left.values():  # somebody has quarantined it, or rolled it back
        two_phase.send(one.writer.header, lambda one=one: [one])  # type: ignore[misc]
    return len(new)


def _open_among(log: Engine, names: Collection[str]) -> list[HalfRecord]:
    """Those half batches of some names that somebody has prepared, and nobody has decided."""
    opened = {name_of(half_id) for half_id in log.open_half_ids()}.intersection(names) if names else ()
    found = [log.find(name.rpartition(":")[0], 0) for name in opened]
    return [record for record in found if record is not None and record.left is None]
