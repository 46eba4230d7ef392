"""The protocol of the sink: stage, prepare, execute, decide; and what a replay does with a batch that was prepared before.

It speaks to a ``CommitLog`` and a listener, and knows neither Spark nor Delta. The steps are methods of
:class:`TwoPhase`; a process may die before, in and after each of them, and the next run of the same batch goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.commitlog.half import HalfFile, HalfHeader
from rmq_spark.commitlog.half_store import HalfRecord
from rmq_spark.commitlog.ledger import Mask, Placed
from rmq_spark.commitlog.log import CommitLog, masks_for
from rmq_spark.commitlog.op import BatchState, RowState, Who
from rmq_spark.config import LEASE_S, REPLAY_CHECK_TIMEOUT_S
from rmq_spark.errors import (
    AlreadyPreparedError,
    CheckpointMismatchError,
    FencedError,
    LocalTransactionError,
    OptionError,
    StaleAttemptError,
    UnresolvedTransactionError,
    VerdictConflictError,
)
from rmq_spark.listener import TransactionListener
from rmq_spark.transaction import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, HalfBatch, normalize_verdicts

logger = logging.getLogger(__name__)

ON_LISTENER_ERROR = ("fail", "unknown")
REPLAY_BACKOFF_S_MIN = 0.2
REPLAY_BACKOFF_S_MAX = 5.0


@dataclass
class Outcome:
    """What became of a half batch in this run.

    Attributes
    ----------
    record : HalfRecord or None
        None for an empty batch, which leaves nothing in the log.
    replayed : bool
        True when the batch had been prepared before this run.
    attempt : int
        The newest attempt.
    messages : dict of RowState to int
        Messages in each state at the end.
    placed : list of Placed
        What this run made visible.
    error : Exception or None
        The listener's exception, with ``onListenerError=unknown``.
    """

    record: HalfRecord | None = None
    replayed: bool = False
    attempt: int = 1
    messages: dict[RowState, int] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    error: Exception | None = None


class TwoPhase:
    """Runs half batches of one producer group through the protocol.

    Parameters
    ----------
    log : CommitLog
    listener : TransactionListener
    on_listener_error : {"fail", "unknown"}
        What an exception of ``execute_local_transaction`` does: end the query with the half batch pending (default), or
        count as UNKNOWN as RocketMQ has it.
    replay_check_timeout_s : float
        How long a replay asks the listener again while it answers UNKNOWN.
    lease_s : float
        How long a lease lasts; while ``execute_local_transaction`` runs it is renewed at a third of this.
    """

    def __init__(
        self,
        log: CommitLog,
        listener: TransactionListener,
        *,
        on_listener_error: str = "fail",
        replay_check_timeout_s: float = REPLAY_CHECK_TIMEOUT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        if on_listener_error not in ON_LISTENER_ERROR:
            raise OptionError(f"onListenerError={on_listener_error!r} is not one of {', '.join(ON_LISTENER_ERROR)}")
        self.log = log
        self.listener = listener
        self.on_listener_error = on_listener_error
        self.replay_check_timeout_s = replay_check_timeout_s
        self.lease_s = lease_s

    # ------------------------------------------------------------------ the whole protocol
    def send(self, header: HalfHeader, files: Sequence[HalfFile], arg: Any = None) -> Outcome:
        """Bring a staged half batch to its verdicts, or take up a batch that was prepared before.

        Raises
        ------
        CheckpointMismatchError
            When the batch id was used by another query or with other input.
        LocalTransactionError
            When the listener raised (``on_listener_error="fail"``).
        VerdictConflictError
            When two verdicts contradict each other: a person must resolve the half batch.
        UnresolvedTransactionError
            When a replay's checks stay UNKNOWN.
        """
        replayed = self.find_replayed(header)
        if replayed is None and not files:
            return Outcome()
        record = replayed or self.prepare(header, files)
        if record is None:  # another driver of the same application was faster
            replayed = record = self._require_replayed(header)
        outcome = Outcome(record, replayed is not None)
        mine: set[int] = set()  # attempts that nobody but this run has executed
        if replayed is None:
            mine.add(1)
            self.execute(record, 1, outcome, arg)
        self._settle(record, mine, outcome)
        return outcome

    def find_replayed(self, header: HalfHeader) -> HalfRecord | None:
        """The half batch when this very batch was prepared before; None for a new one; else raises."""
        if not header.numbered:
            return self.log.find(header.app_id, header.batch_id)
        last = self.log.last_batch_id(header.app_id)
        if last is None or header.batch_id > last:
            return None
        return self._require_replayed(header)

    def _require_replayed(self, header: HalfHeader) -> HalfRecord:
        record = self.log.find(header.app_id, header.batch_id)
        if record is None:
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} is not above the last one in the log, and is not in it: "
                "the checkpoint is a new or an older one. " + _REMEDY
            )
        if record.header.query_id != header.query_id:
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} was prepared by query {record.header.query_id}, and now "
                f"comes from query {header.query_id}: the checkpoint is a new one. " + _REMEDY
            )
        if record.header.input_hash != header.input_hash:
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} was prepared from other offsets than the checkpoint names "
                "now: the checkpoint was restored from an older copy, or changed by hand. " + _REMEDY
            )
        return record

    def prepare(self, header: HalfHeader, files: Sequence[HalfFile]) -> HalfRecord | None:
        """Commit the staged files. None when somebody prepared this batch in the meantime."""
        try:
            return self.log.prepare(header, files)
        except AlreadyPreparedError:
            return None

    # ------------------------------------------------------------------ execute and decide
    def execute(self, record: HalfRecord, attempt: int, outcome: Outcome, arg: Any = None) -> None:
        """Run the local transaction of an attempt that nobody has run, and make its verdicts final."""
        state = self.log.state_of(record)
        mask = state.rows_in((RowState.PENDING,), attempt)
        if not mask:  # a check was faster than we are
            return
        batch = self.log.half_batch(record, state, attempt, mask, arg)
        with self._leased(record):
            verdicts, who = self._ask_execute(batch, outcome)
        try:
            self.decide(record, batch, mask, verdicts, who, outcome)
        except StaleAttemptError:
            # Rolled back by a check and reopened while we ran. A fenced attempt did nothing, so the next one may go on.
            if who is not Who.CHECK:
                raise
            logger.info("attempt %d of half batch %r is over", attempt, record.half_id)

    def _ask_execute(self, batch: HalfBatch, outcome: Outcome) -> tuple[Any, Who]:
        try:
            return normalize_verdicts(self.listener.execute_local_transaction(batch), batch), Who.EXECUTE
        except FencedError:
            # A check's tombstone was there first: the rollback is the check's, so the next attempt may run.
            return ROLLBACK_MESSAGE, Who.CHECK
        except Exception as problem:
            if self.on_listener_error == "unknown":
                logger.warning("local transaction of %r failed: it stays UNKNOWN", batch, exc_info=True)
                outcome.error = problem
                return UNKNOWN, Who.EXECUTE
            raise LocalTransactionError(
                f"the local transaction of half batch {batch.half_id!r} (attempt {batch.attempt}) raised "
                f"{type(problem).__name__}: {problem}. Its messages stay pending; a check or a restart settles them"
            ) from problem

    def decide(
        self, record: HalfRecord, batch: HalfBatch, mask: Mask, verdicts: Any, who: Who, outcome: Outcome
    ) -> bool:
        """Write op markers for COMMIT and ROLLBACK; UNKNOWN gets none. True when any transaction is UNKNOWN."""
        masks = masks_for(self.log, record, mask, batch, verdicts)
        commit, rollback = masks[COMMIT_MESSAGE], masks[ROLLBACK_MESSAGE]
        if commit or rollback:
            outcome.placed += self.log.decide(record, batch.attempt, commit=commit, rollback=rollback, who=who)
        return bool(masks[UNKNOWN])

    # ------------------------------------------------------------------ what is left to do
    def _settle(self, record: HalfRecord, mine: set[int], outcome: Outcome) -> None:
        """Go on until every row is decided, or waits for a check of an UNKNOWN that this run itself got."""
        deadline = time.monotonic() + self.replay_check_timeout_s
        pause_s = REPLAY_BACKOFF_S_MIN
        while True:
            state = self.log.state_of(record)
            self._refuse_conflict(record, state)
            if self._reopen_rolled_back(record, state, mine, outcome):
                continue
            if self._reopen_unknown(record, state):
                continue
            to_check = [a for a in state.attempts(RowState.PENDING) if a not in mine]
            if not to_check:
                break
            if all(self._check(record, state, attempt, outcome) for attempt in to_check):
                if time.monotonic() >= deadline:
                    raise UnresolvedTransactionError(self._unresolved(record, outcome))
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, REPLAY_BACKOFF_S_MAX)
        outcome.attempt = max(max(f.attempt) for f in state.files.values())
        outcome.messages = {s: n for s in RowState if (n := state.count(s))}

    def _refuse_conflict(self, record: HalfRecord, state: BatchState) -> None:
        if state.in_conflict:
            raise VerdictConflictError(
                f"half batch {record.half_id!r} has two verdicts that contradict each other: find out which is true, then "
                "log.resolve(half_id, verdict, reason=…) and start the query again"
            )

    def _reopen_rolled_back(self, record: HalfRecord, state: BatchState, mine: set[int], outcome: Outcome) -> bool:
        """What a check rolled back never happened and never will: run it under the next attempt."""
        for attempt in state.attempts(RowState.ROLLED_BACK_BY_CHECK):
            reopened = self.log.ledger.reopen(
                record, attempt, (RowState.ROLLED_BACK_BY_CHECK,), attempt + 1, Who.EXECUTE, "rolled back by a check"
            )
            if reopened:
                mine.add(attempt + 1)
                self.execute(record, attempt + 1, outcome)
            return True
        return False

    def _reopen_unknown(self, record: HalfRecord, state: BatchState) -> bool:
        """Nobody knows what became of what was quarantined or discarded: ask again, under the same attempt."""
        unknown = (RowState.QUARANTINED, RowState.ROLLED_BACK_BY_DISCARD)
        for attempt in state.attempts(*unknown):
            self.log.ledger.reopen(record, attempt, unknown, attempt, Who.EXECUTE, "asked again by a replay")
            return True
        return False

    def _check(self, record: HalfRecord, state: BatchState, attempt: int, outcome: Outcome) -> bool:
        """Ask what became of an attempt that somebody else may have run. True when part of it stays UNKNOWN."""
        mask = state.rows_in((RowState.PENDING,), attempt)
        batch = self.log.half_batch(record, state, attempt, mask)
        try:
            verdicts = normalize_verdicts(self.listener.check_local_transaction(batch), batch)
        except Exception as problem:  # not an answer; the next one may be
            logger.warning("check of %r failed", batch, exc_info=True)
            outcome.error = problem
            return True
        return self.decide(record, batch, mask, verdicts, Who.CHECK, outcome)

    def _unresolved(self, record: HalfRecord, outcome: Outcome) -> str:
        why = f"the last check raised {type(outcome.error).__name__}: {outcome.error}" if outcome.error else "UNKNOWN"
        return (
            f"half batch {record.half_id!r} was prepared by an earlier run, and its listener could not say within "
            f"{self.replay_check_timeout_s:g}s what became of it ({why}). Nothing is lost: start the query again later, "
            "raise replayCheckTimeout, or log.resolve(half_id, verdict, reason=…)"
        )

    def _leased(self, record: HalfRecord) -> AbstractContextManager[None]:
        return _Lease(self.log, record, self.lease_s)


_REMEDY = (
    "Go on with the checkpoint that this appId last used; or, if the input is meant to be sent again, set a new appId"
)


class _Lease(AbstractContextManager[None]):
    """Keeps checkers away while a local transaction runs for long; costs nothing when it is short."""

    def __init__(self, log: CommitLog, record: HalfRecord, lease_s: float) -> None:
        self._log, self._record, self._lease_s = log, record, lease_s
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._renew, name="txmq-lease", daemon=True)
        self._thread.start()

    def __exit__(self, *details: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _renew(self) -> None:
        while not self._done.wait(self._lease_s / 3):
            try:
                self._log.ledger.lease(self._record, self._lease_s)
            except Exception:  # without a lease a check may ask early; the fence keeps that safe
                logger.warning("lease of half batch %r not renewed", self._record.half_id, exc_info=True)
