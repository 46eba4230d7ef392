"""After a restore: compares a commit log with the database of its local transactions, and with streams' checkpoints.

The log was set back to a backup, and the database was not. The fence has the attempts that the database executed
since. Each is looked up in the log by its half batch's name::

    the fence: attempt a of half batch h is executed
    │
    ├─ the log does not know its name
    │    ├─ a stream runs this batch again ───────────────────▶ REPLAYED   its messages come from there
    │    ├─ a checkpoint would make another batch of it ──────▶ PERSON     the checkpoint is too old
    │    └─ nobody sends it again ────────────────────────────▶ LOST       from rows, where the listener can make them
    ├─ the log knows the name, of another half batch ─────────▶ PERSON     it was sent, and executed, twice
    └─ the log knows it
         ├─ committed, or pending under attempt a ────────────▶ SETTLED    a check does the rest
         ├─ pending under another attempt, rolled back by a
         │  check or the discard policy, or quarantined ──────▶ LOST       its messages are in half: committed as a
         └─ refused, or rolled back by a person ──────────────▶ PERSON

    the log: half batch h is committed, and the fence has not executed it ──▶ UNKNOWN_TO_THE_DATABASE

Without ``apply`` nothing is changed. With it, messages get the name of their own half batch, so a second run finds
them settled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.client.backup import manifest_of
from rmq_spark._core.client.checkpoint import Stream
from rmq_spark._core.client.reconcile_report import Comparison, FindingKind, ReconcileReport
from rmq_spark._core.inspect.history import retained_batches
from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared, ExecutedAttempt, TransactionListener
from rmq_spark._core.log.batch_state import RowState
from rmq_spark._core.log.half_header import HalfHeader, Naming
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.log.op import OpKind, Who
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.storage.table import live_paths
from rmq_spark._core.vocabulary.message import message_list, to_table
from rmq_spark._core.vocabulary.options import FENCE_RETENTION_S, FENCE_RETENTION_S_MIN, IDEMPOTENCY_S
from rmq_spark._core.vocabulary.redaction import sentence_of
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark._core.vocabulary.verdicts import BATCH
from rmq_spark.errors import HalfBatchLeftError, ListenerError, MessageError, OptionError, TxmqError

if TYPE_CHECKING:
    from rmq_spark._core.log.half_record import HalfRecord
    from rmq_spark._core.protocol.engine import Engine

GROUP = "txmq-reconcile"
"""The producer group of half batches whose messages were recreated from rows."""
MARGIN_S = 3600.0
"""The fence is read from this many seconds before the backup, because its times come from other clocks."""
REASON = "reconciled after a restore: the database has executed it"
COMMITTED = (RowState.COMMITTED, RowState.WAITING)
REFUSED = (RowState.ROLLED_BACK,)
FENCES_LOOKED_AT = 100
"""Number of newest half batches whose fences are compared with the listener's."""
SINGLE_SEND_MARK = "."
"""Occurs in the app id of every producer's send, and in no stream's."""


class _Finding(NamedTuple):
    standing: FindingKind
    what: str
    done: str | None = None


@dataclass
class Reconciler:
    """Compares one commit log, to which no program sends and for which no checks run, with a listener's database.

    The listener has a fence that can be read: :class:`~rmq_spark.SqlTransactionListener`. ``streams`` are the
    checkpoints of the queries that send to the log. ``since`` is the time of the backup (UTC), by default from the
    manifest of a copy by ``txmq backup``; when nobody knows it, that is an OptionError.
    """

    engine: Engine
    listener: TransactionListener
    streams: Sequence[Stream] = ()
    since: datetime | None = None
    _by_app: dict[str, Stream] = field(init=False, default_factory=dict)
    _in_messages: frozenset[str] = field(init=False, default=frozenset())
    """Half batches that the database has executed and that have messages in the table ``messages``."""

    def __post_init__(self) -> None:
        if not callable(getattr(self.listener, "executed_since", None)):
            raise ListenerError(
                f"{self.listener!r} cannot tell what it has executed: a SqlTransactionListener is expected. Look into "
                "the store of another one, and settle with log.resolve"
            )
        if self.since is None:
            manifest = manifest_of(self.engine.path, self.engine.storage_options)
            if manifest is None or manifest.log_id != self.engine.id or manifest.taken_at is None:
                raise OptionError(
                    "nobody knows from when this log is, since txmq backup did not make it: say when the copy was "
                    "taken, as --since 2026-11-27T01:00:00Z"
                )
            self.since = manifest.taken_at
        self._by_app = {stream.app_id: stream for stream in self.streams}

    def run(self, apply: bool = False) -> ReconcileReport:
        """Compare log and database. With ``apply``, also make recoverable messages visible."""
        since = self.since
        assert since is not None  # __post_init__ has set it
        self.engine.refresh()
        executed: list[ExecutedAttempt] = list(
            self.listener.executed_since(self.engine.id, since - timedelta(seconds=MARGIN_S))  # type: ignore[attr-defined]
        )
        self._in_messages = self._among_messages({attempt.half_id for attempt in executed})
        streams = tuple(self._stream_sentence(stream, executed) for stream in self.streams)
        findings: list[Comparison] = []
        settled = 0
        executed.sort(key=lambda a: (a.app_id, a.batch_id, a.half_id, a.attempt))  # in the order of sending
        for _, attempts in groupby(executed, key=lambda attempt: attempt.half_id):
            for finding in self._compare(list(attempts), apply):
                if finding.standing is FindingKind.SETTLED:
                    settled += 1
                else:
                    findings.append(finding)
        findings += self._unknown_to_the_database({attempt.half_id for attempt in executed}, since)
        return ReconcileReport(
            self.engine.path,
            self.engine.id,
            since,
            datetime.now(timezone.utc),
            apply,
            len(executed),
            settled,
            tuple(findings),
            streams,
            tuple(self._blind_spots(since)),
        )

    def _among_messages(self, half_ids: Collection[str]) -> frozenset[str]:
        table = self.engine.messages_table
        with self.engine.lock:
            table.refresh()
            paths = live_paths(table)
            rows = table.read(paths, ["half_id"], pc.field("half_id").isin(sorted(half_ids)))
        return frozenset(pc.unique(rows["half_id"]).to_pylist())

    def _is_forgotten(self, executed_at: datetime) -> bool:
        """Return True when the log may have forgotten a batch executed then, and its messages may have expired."""
        return self.engine.runtime.now() - executed_at > timedelta(seconds=IDEMPOTENCY_S)

    # ------------------------------------------------------------------ executed by the database
    def _compare(self, attempts: Sequence[ExecutedAttempt], apply: bool) -> list[Comparison]:
        """Return the findings of one half batch. A damaged half batch does not prevent those of others."""
        first = attempts[0]
        try:
            record = self.engine.find(first.app_id, first.batch_id)
            if record is None:
                findings = [self._unknown(attempts, apply)] * len(attempts)
            elif record.header.producer_group == GROUP:
                findings = [_Finding(FindingKind.SETTLED, "its messages were made again")] * len(attempts)
            elif record.half_id != first.half_id:
                what = f"the log has half batch {record.half_id!r} of the same app and number: it was sent again since"
                what += ", and executed twice. Look whether its rows are there twice"
                findings = [_Finding(FindingKind.PERSON, what)] * len(attempts)
            else:
                findings = [self._known(record, attempt, apply) for attempt in attempts]
        except TxmqError as problem:
            findings = [_Finding(FindingKind.PERSON, f"it cannot be looked at: {sentence_of(problem)}")] * len(attempts)
        return [
            Comparison(
                finding.standing, a.half_id, a.app_id, a.batch_id, a.attempt, None if a.rows is None else a.rows.count,
                a.executed_at, finding.what, finding.done,
            )
            for a, finding in zip(attempts, findings, strict=True)
        ]  # fmt: skip

    def _known(self, record: HalfRecord, attempt: ExecutedAttempt, apply: bool) -> _Finding:
        if not attempt.is_whole:
            return _Finding(FindingKind.PERSON, _ENDED)
        if record.left is not None:
            by_person = any(
                decision.kind == OpKind.ROLLBACK.value and decision.decided_by == Who.ADMIN.value
                for decision in record.left.decisions
            )
            if record.left.final and not by_person:  # messages that are not committed were refused
                return _Finding(FindingKind.SETTLED, "it is committed")
            return _Finding(
                FindingKind.PERSON,
                "the log has rolled some of its messages back, and they have left it: look which, and send them again",
            )
        state = self.engine.state_of(record)
        rows = record.all_rows if attempt.rows is None else record.all_rows & attempt.rows
        missing = rows - state.rows_in(COMMITTED) - state.rows_in((RowState.PENDING,), attempt.attempt)
        if not missing:
            return _Finding(FindingKind.SETTLED, "it is committed, or a check commits it")
        if missing & state.rows_in(REFUSED):
            what = "the log says that it was refused, or a person has rolled it back, and the database has executed it"
            return _Finding(FindingKind.PERSON, f"{what}: look, and send its messages again if they are missing")
        count = count_of(missing.count, "message")
        done = None
        if apply:
            self.engine.ledger.commit_executed(record, attempt.attempt, missing, REASON)
            done = f"{count} became visible"
        what = f"{count} did not become visible; the log has them, and can make them visible"
        return _Finding(FindingKind.LOST, what, done)

    def _unknown(self, attempts: Sequence[ExecutedAttempt], apply: bool) -> _Finding:
        """Return the finding of a half batch whose name the log does not know."""
        first = attempts[0]
        if first.half_id in self._in_messages:  # settled so long ago that only its messages are kept
            return _Finding(FindingKind.SETTLED, "its messages are visible")
        if any(self._is_forgotten(a.executed_at) for a in attempts):
            return _Finding(FindingKind.PERSON, _FORGOTTEN)
        stream = self._by_app.get(first.app_id)
        if stream is not None and first.batch_id >= stream.next_batch:
            if first.batch_id == stream.next_batch and stream.planned:
                what = f"stream {stream.app_id} runs batch {first.batch_id} again when it starts, with the same input"
                return _Finding(FindingKind.REPLAYED, what)
            what = f"the checkpoint {stream.place} is older than the database: it would make another batch "
            what += f"{first.batch_id} of what was executed. Put the newest checkpoint there"
            return _Finding(FindingKind.PERSON, what)
        if not all(a.is_whole for a in attempts):
            return _Finding(FindingKind.PERSON, _ENDED)
        lost = "its messages are lost, and its rows are in the database"
        if stream is None and SINGLE_SEND_MARK not in first.app_id:
            # Recreated now, the messages would block a stream that runs the batch again.
            advice = "a stream sent them: name its checkpoint (--checkpoint); or a batch write: run it again"
            return _Finding(FindingKind.LOST, f"{lost}; {advice}")
        try:
            messages = self._messages(attempts)
        except Exception as problem:  # raised by the user's function
            return _Finding(FindingKind.LOST, f"{lost}; making them again failed: {sentence_of(problem)}")
        if messages is None:
            return _Finding(FindingKind.LOST, f"{lost}: send them again, without a local transaction")
        count = count_of(messages.num_rows, "message")
        lost += f"; the listener makes {count} again from its rows"
        if not apply:
            return _Finding(FindingKind.LOST, lost)
        try:
            self._send(first, stream, messages)
        except TxmqError as problem:
            return _Finding(FindingKind.LOST, f"{lost}; sending them failed: {sentence_of(problem)}")
        return _Finding(FindingKind.LOST, lost, f"{count} became visible")

    def _messages(self, attempts: Sequence[ExecutedAttempt]) -> pa.Table | None:
        """Recreate the messages of a half batch, for all its attempts; None when the listener cannot make them all."""
        tables: list[pa.Table] = []
        for attempt in attempts:
            messages = self.listener.messages_again(attempt)  # type: ignore[attr-defined]
            if messages is None:
                return None
            tables.append(messages if isinstance(messages, pa.Table) else to_table(message_list(messages)))
            if not tables[-1].num_rows:
                raise MessageError(f"no messages were made for attempt {attempt.attempt}")
        return pa.concat_tables(tables, promote_options="default")

    def _send(self, attempt: ExecutedAttempt, stream: Stream | None, messages: pa.Table) -> None:
        """Send messages under the name of their half batch, where a retry and a stream's next batch find them."""
        header = HalfHeader(
            half_id=attempt.half_id,
            app_id=attempt.app_id,
            batch_id=attempt.batch_id,
            query_id=None if stream is None else stream.query_id,
            input_hash=None if stream is None else stream.input_hashes.get(attempt.batch_id),
            fence_id=CommitOncePrepared.store_id,
            transaction_per=BATCH,
            producer_group=GROUP,
            naming=Naming.KEY if stream is None else Naming.COUNTED,
        )
        engine = self.engine
        writer = engine.with_runtime(HalfWriter(header, engine.topics(), None, None, engine.topic_store.known().fifo))
        TwoPhase(engine, CommitOncePrepared()).send(header, lambda: engine.stage(writer, messages.to_batches()))

    # ------------------------------------------------------------------ committed in the log
    def _unknown_to_the_database(self, executed: Collection[str], since: datetime) -> Iterator[Comparison]:
        batches = retained_batches(self.engine)
        since_scalar = pa.scalar(since, batches.schema.field("prepared_at").type)
        batches = batches.filter(pc.greater_equal(batches["prepared_at"], since_scalar)).sort_by("prepared_at")
        for row in batches.select(["half_id", "prepared_at"]).to_pylist():
            if row["half_id"] in executed:
                continue
            try:
                app_id, batch_id, fence_id, by_listener = self._committed(row["half_id"])
            except TxmqError as problem:
                what = f"it cannot be looked at: {sentence_of(problem)}"
                yield Comparison(FindingKind.PERSON, row["half_id"], None, None, None, None, row["prepared_at"], what)
                continue
            if fence_id is not None and fence_id == self.listener.store_id and by_listener:
                yield Comparison(
                    FindingKind.UNKNOWN_TO_THE_DATABASE, row["half_id"], app_id, batch_id, None, None,
                    row["prepared_at"],
                    "its messages are visible, and the database has not executed it: the database is older than the "
                    "log. Restore a newer one, or send messages that undo them",
                )  # fmt: skip

    def _committed(self, half_id: str) -> tuple[str | None, int | None, str | None, bool]:
        """Return a half batch's app id, batch id and fence id, and whether its listener committed messages of it."""
        try:
            record = self.engine.get(half_id)
        except HalfBatchLeftError as left:
            archived = left.archived
            if archived is None:
                return None, None, None, False
            by_listener = _committed_by_listener(
                (decision.kind, decision.decided_by) for decision in archived.decisions
            )
            return archived.app_id, archived.batch_id, archived.fence_id, by_listener
        header = record.header
        history = self.engine.state_of(record, refresh=False).history
        by_listener = _committed_by_listener((row.kind, row.decided_by) for row in history)
        return header.app_id, header.batch_id, header.fence_id, by_listener

    # ------------------------------------------------------------------ blind spots
    def _blind_spots(self, since: datetime) -> Iterator[str]:
        age = self.engine.runtime.now() - since
        if age > timedelta(seconds=FENCE_RETENTION_S_MIN):
            yield (
                f"the copy is {age.days} days old, and upkeep deletes rows of the fence that are older than fences "
                f"({FENCE_RETENTION_S / 86_400:g}d by default): what they told is not seen"
            )
        batches = retained_batches(self.engine).sort_by([("prepared_at", "descending")])
        newest = batches["half_id"].to_pylist()[:FENCES_LOOKED_AT]
        fences: set[str | None] = set()
        for half_id in newest:
            with suppress(TxmqError):  # a damaged half batch is reported elsewhere
                fences.add(self._committed(half_id)[2])
        fences -= {None, CommitOncePrepared.store_id}
        if fences and self.listener.store_id not in fences:
            yield (
                f"none of the newest {len(newest)} half batches of the log was prepared with this listener's fence "
                f"({self.listener.store_id}), but with {', '.join(sorted(map(str, fences)))}: it may be another "
                "database"
            )

    # ------------------------------------------------------------------ checkpoints
    def _stream_sentence(self, stream: Stream, executed: Sequence[ExecutedAttempt]) -> str:
        batch_ids = [a.batch_id for a in executed if a.app_id == stream.app_id]
        last = self.engine.last_batch_id(stream.app_id)
        in_log = "no batch" if last is None else f"batches up to {last}"
        in_database = f", the database has executed batches up to {max(batch_ids)} since" if batch_ids else ""
        when = "again" if stream.planned else "next"
        return (
            f"stream {stream.app_id} ({stream.place}) runs batch {stream.next_batch} {when}; the log has {in_log} of "
            f"it{in_database}"
        )


_FORGOTTEN = (
    "it was executed so long ago that the log may have settled and forgotten it: look whether its messages are there, "
    "and send them again if not"
)
_ENDED = (
    "its local transaction ended the database's in its middle, so a part may be there: look, undo or finish it, and "
    "send its messages if it is done"
)


def _committed_by_listener(decisions: Iterable[tuple[object, object]]) -> bool:
    """Return True when a commit among the decisions was a listener's answer, not a person's or a policy's."""
    answers = (Who.EXECUTE.value, Who.CHECK.value)
    return any(str(kind) == OpKind.COMMIT.value and str(decided_by) in answers for kind, decided_by in decisions)
