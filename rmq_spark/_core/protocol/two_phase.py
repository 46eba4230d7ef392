"""The protocol of a sink, in four steps, and what a new run does with a half batch that an earlier one prepared.

====  ========  ====================================================================  ======================
 1    stage     half files are written; nothing names them yet                        ``staged``
 2    prepare   one commit to ``half``: the half batch exists, and nobody sees it     ``prepared``
 3    execute   the local transaction runs                                            ``executing``, ``executed``
 4    decide    op markers make the verdicts final, and committed messages visible    ``decided``
 R    replay    nothing is executed twice: what may have run is checked               ``replay asks``
====  ========  ====================================================================  ======================

A process may die before, in and after each step; the tests kill it at the points named on the right. The next run of
the same batch goes on. This module speaks to a ``Engine`` and a listener, and knows neither Spark nor Delta.
"""

from __future__ import annotations

import copy
import json
import logging
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from rmq_spark._core.listeners.half_batch import HalfBatch, normalize_verdicts
from rmq_spark._core.listeners.listener import (
    NO_LISTENER_FENCE,
    CommitOncePrepared,
    TransactionListener,
    is_coroutine,
    require_same_fence,
)
from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.half import FIRST, HalfHeader, HalfRows, Naming
from rmq_spark._core.log.half_table import HalfRecord
from rmq_spark._core.log.op import BatchState, RowState, Who
from rmq_spark._core.log.op_table import Placed
from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.group_commit import Alone, Commits, Stageable
from rmq_spark._core.protocol.half_batch import split_by_verdict
from rmq_spark._core.protocol.identity import LAST_BATCH_FILE, Lineage
from rmq_spark._core.protocol.leases import LeaseKeeper
from rmq_spark._core.protocol.limits import NO_LIMITS, PendingGuard, PendingLimits
from rmq_spark._core.protocol.observe import told
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.spans import settling
from rmq_spark._core.vocabulary.options import LEASE_S, LEASE_S_MAX, REPLAY_CHECK_TIMEOUT_S, seconds
from rmq_spark._core.vocabulary.redaction import cause_of, line_of, sentence_of, text_of, traceback_of
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, UNKNOWN, Verdict, VerdictArray, returned, rollback
from rmq_spark.errors import (
    AlreadyPreparedError,
    CheckpointMismatchError,
    ClockError,
    CommitError,
    CorruptLogError,
    FencedError,
    HalfBatchLeftError,
    ListenerError,
    LocalTransactionError,
    LogFormatError,
    LostFileError,
    NotACommitLogError,
    OptionError,
    StaleAttemptError,
    StorageError,
    UnresolvedTransactionError,
    VerdictConflictError,
)
from rmq_spark.logs import of_batch, of_header

logger = logging.getLogger(__name__)

ON_LISTENER_ERROR = ("fail", "unknown")
FINAL_STATES = (RowState.COMMITTED, RowState.DECIDED, RowState.ROLLED_BACK)
OF_THE_LOG = (
    StorageError, CommitError, ClockError, CorruptLogError, NotACommitLogError, LogFormatError, OSError, MemoryError,
)  # fmt: skip
"""Problems of the log and its store. After the prepare they leave a half batch pending, and say nothing of it."""
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
    error : BaseException or None
        The listener's exception, with ``onListenerError=unknown``.
    """

    record: HalfRecord | None = None
    replayed: bool = False
    attempt: int = 1
    messages: dict[RowState, int] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    error: BaseException | None = None


@dataclass
class Run:
    """One run of one half batch.

    Attributes
    ----------
    fence_id : str or None
        That of the listener, as it is now.
    executed : list of (attempt, rows)
        What this run executed itself: only its prepare and its own reopens entitle it to. All else it checks.
    held : HalfRows or None
        All rows of a half batch that this run has prepared: they need not be read from their file.
    numbered : bool
        As in the header that the sender has. One that is read from the log does not say it.
    """

    record: HalfRecord
    fence_id: str | None
    arg: Any
    outcome: Outcome
    executed: list[tuple[int, RowSet]] = field(default_factory=list)
    held: HalfRows | None = None
    numbered: bool = True

    def keep(self, attempt: int, placed: Sequence[Placed]) -> None:
        """Add to the outcome what a decision made visible."""
        self.outcome.placed += placed
        visible = sum(p.count for p in placed if p.half_id == self.record.half_id)
        if visible == self.record.rows and not self.outcome.replayed:  # all of it: there is nothing to settle
            self.outcome.attempt, self.outcome.messages = attempt, {RowState.COMMITTED: visible}

    def end_with(self, state: BatchState) -> None:
        """Say in the outcome what became of it."""
        self.outcome.attempt = max(max(f.attempt) for f in state.files.values())
        self.outcome.messages = {s: n for s in RowState if (n := state.count(s))}


_COMMIT_ALL = VerdictArray((Verdict(COMMIT_MESSAGE),))

Answered: TypeAlias = tuple[HalfBatch, RowSet, VerdictArray]
"""What a listener was asked about, its rows, and its verdicts."""


class TwoPhase:
    """Runs half batches of one producer group through the protocol.

    Parameters
    ----------
    log : Engine
    listener : TransactionListener
    on_listener_error : {"fail", "unknown"}
        What an exception of ``execute_local_transaction`` does: end the query with the half batch pending (default), or
        count as UNKNOWN as RocketMQ has it.
    replay_check_timeout_s : float
        How long a replay asks the listener again while it answers UNKNOWN.
    lease_s : float
        How long a lease lasts; while ``execute_local_transaction`` runs it is renewed at a third of this.
    pending_limits : PendingLimits
        A new half batch is refused while more than this of its producer group is pending. A replay never is.
    commits : Commits, optional
        How half batches are prepared and decided: each alone when not given.
    """

    def __init__(
        self,
        log: Engine,
        listener: TransactionListener,
        *,
        on_listener_error: str = "fail",
        replay_check_timeout_s: float = REPLAY_CHECK_TIMEOUT_S,
        lease_s: float = LEASE_S,
        pending_limits: PendingLimits = NO_LIMITS,
        commits: Commits | None = None,
    ) -> None:
        if on_listener_error not in ON_LISTENER_ERROR:
            raise OptionError(f"onListenerError={on_listener_error!r} is not one of {', '.join(ON_LISTENER_ERROR)}")
        if not 0 < lease_s <= LEASE_S_MAX:
            raise OptionError(f"lease_s={lease_s!r} is out of range: seconds up to {LEASE_S_MAX:g} are expected")
        self.log = log
        self.listener = listener
        self.on_listener_error = on_listener_error
        self.replay_check_timeout_s = seconds(replay_check_timeout_s, "replay_check_timeout")
        self.pending = PendingGuard(log, pending_limits)
        self.commits = Alone(log) if commits is None else commits
        self.leases = LeaseKeeper(log, seconds(lease_s, "lease_s", above=True))

    def with_listener(self, listener: TransactionListener, on_listener_error: str = "fail") -> TwoPhase:
        """The same for another listener: with the same commits, leases and limits."""
        twin = copy.copy(self)
        twin.listener, twin.on_listener_error = listener, on_listener_error
        return twin

    # ------------------------------------------------------------------ all of it
    def send(
        self,
        header: HalfHeader,
        stage: Callable[[], Sequence[Stageable]],
        arg: Any = None,
        lineage: Lineage | None = None,
    ) -> Outcome:
        """Bring a half batch to its verdicts. A batch that was prepared before goes on where it stands.

        Parameters
        ----------
        header : HalfHeader
            With the fence of this listener.
        stage : callable
            Writes the half files, or hands over those that executors wrote, or rows to be written. It is called for a
            new batch only.
        arg : object, optional
            Handed to ``execute_local_transaction`` as ``batch.arg``.
        lineage : Lineage, optional
            Of the micro-batch's checkpoint, where that can be read.

        Raises
        ------
        CheckpointMismatchError
            When the batch id was used by another query or with other input, or nobody can say that it was not; or when
            the log has a last batch that the checkpoint does not know.
        FenceError
            When the half batch was prepared with another fence than the header's, and is still open.
        LocalTransactionError
            When the listener raised (``on_listener_error="fail"``).
        VerdictConflictError
            When two verdicts contradict each other: a person must resolve the half batch.
        UnresolvedTransactionError
            When a replay's checks stay UNKNOWN, or the store failed after the prepare.
        PendingLimitError
            When too much of the producer group is pending; nothing is written then.
        ListenerError
            When the local transaction is a coroutine.
        HalfBatchLeftError
            When a check has rolled the half batch back so long ago that its messages have left the log.
        """
        if is_coroutine(self.listener):
            raise ListenerError(
                f"{type(self.listener).__name__}.execute_local_transaction is a coroutine function. Only "
                "TransactionMQProducer.send_message_in_transaction_async can wait for it; make it a plain function"
            )
        reach("send begins", header=header)
        outcome = told(self.log, header.producer_group, lambda: self._bring(header, stage, arg, lineage))
        reach("sent", header=header)
        return outcome

    def _bring(
        self, header: HalfHeader, stage: Callable[[], Sequence[Stageable]], arg: Any, lineage: Lineage | None
    ) -> Outcome:
        """The steps of :meth:`send`."""
        replayed = record = self.find_replayed(header)
        files: Sequence[Stageable] = ()
        while record is None:
            last = self._require_no_fork(header, lineage)
            if not files:
                self.pending.require_room(header.producer_group)
                files = stage()
                if not files:
                    if lineage is not None and last is not None and last.input_hash is not None:
                        lineage.keep(last.batch_id, last.input_hash)
                    return Outcome()
            record = self.prepare(_following(header, last, lineage), files)
            if record is None:  # another driver of the same application was faster
                replayed = record = self.find_replayed(header) if header.numbered else self._require_replayed(header)
        if not header.numbered and NO_LISTENER_FENCE not in (record.header.fence_id, header.fence_id):
            # Two stores that use one key mean two sends, whatever became of the first.
            require_same_fence(record.half_id, record.header.fence_id, header.fence_id)
        if record.left is not None:
            return _outcome_of_left(record, record.left)
        run = Run(record, header.fence_id, arg, Outcome(record, replayed is not None), numbered=header.numbered)
        if replayed is None:
            run.held = held_by(files)
        return self.bring_on(run, lambda: None if replayed else self.execute(run, 1, record.all_rows))

    def bring_on(self, run: Run, begin: Callable[[], object] = lambda: None) -> Outcome:
        """Begin, and settle what is then not settled."""
        record = run.record
        try:
            begin()
            if not run.outcome.messages:
                self._settle(run)
        except HalfBatchLeftError as left:  # we slept, and others settled it meanwhile
            if left.archived is None:
                raise
            return _outcome_of_left(record, left.archived)
        except OF_THE_LOG as problem:
            raise left_open(run, problem) from cause_of(problem)
        return run.outcome

    def find_replayed(self, header: HalfHeader) -> HalfRecord | None:
        """The half batch when this very batch was prepared before; None for a new one; else raises."""
        if header.naming is Naming.KEY:
            return self.log.find(header.app_id, header.batch_id)
        return self._require_replayed(header) if self.log.is_replay(header) else None

    def _require_no_fork(self, header: HalfHeader, lineage: Lineage | None) -> HalfHeader | None:
        """Return the header of the application's last batch, which a new one of a query follows; None for the first.

        A micro-batch that sends nothing leaves no trace in the log, so its number is free. A copy of the checkpoint may
        have sent under it what this query has yet to send. Then the log's last batch is one that the checkpoint lacks.
        """
        if header.query_id is None or not header.numbered:
            return None
        batch_id = self.log.last_batch_id(header.app_id, refresh=False)
        if batch_id is None:
            return None
        last = self.log.header_of(header.app_id, batch_id)
        if last is None:
            raise CheckpointMismatchError(
                f"batch {batch_id} of app {header.app_id!r}, the last one in the log, is not there any more: nobody "
                f"can say whether batch {header.batch_id} follows it. " + _REMEDY
            )
        if not _is_same_query(last, header):
            raise CheckpointMismatchError(_of_another_query(last, header))
        if lineage is not None and last.input_hash is not None and not lineage.holds(batch_id, last.input_hash):
            content = json.dumps({"batch_id": batch_id, "input_hash": last.input_hash})
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} does not follow batch {batch_id}, the last one in "
                f"the log: the checkpoint's file offsets/{batch_id} is missing or holds something else. So another "
                "checkpoint, a copy of this one or a newer one, has sent that batch, and this one may send its "
                f"messages again. {_REMEDY}; or, when nobody else has sent and the file was cleaned or the log "
                f"restored (docs/guarantees.md), write {content} into the checkpoint's file {LAST_BATCH_FILE}"
            )
        return last

    def _require_replayed(self, header: HalfHeader) -> HalfRecord:
        record = self.log.find(header.app_id, header.batch_id)
        if record is None:
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} is not above the last one in the log, and is "
                "not in it: the checkpoint is a new or an older one. " + _REMEDY
            )
        if not _is_same_query(record.header, header):
            raise CheckpointMismatchError(_of_another_query(record.header, header))
        # One is unknown where a foreachBatch sink could not read the checkpoint.
        hashes = (record.header.input_hash, header.input_hash)
        if None not in hashes and hashes[0] != hashes[1]:
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} was prepared when the checkpoint's file "
                f"offsets/{header.batch_id} held something else: the checkpoint was restored from an older copy, or "
                "changed by hand. " + _REMEDY
            )
        return record

    # ------------------------------------------------------------------ 2 prepare
    def prepare(self, header: HalfHeader, files: Sequence[Stageable]) -> HalfRecord | None:
        """Commit the staged files. None when somebody prepared this batch in the meantime."""
        try:
            return self.commits.prepare(header, files)
        except AlreadyPreparedError:
            return None
        except Exception as problem:
            self.require_not_prepared(header, problem)
            raise

    def require_not_prepared(self, header: HalfHeader, problem: BaseException) -> None:
        """Look what there is after a prepare that failed. Its commit may have been made.

        Raises
        ------
        UnresolvedTransactionError
            When it was made, or nobody can say: a check brings the half batch to its end.
        """
        if not isinstance(problem, OF_THE_LOG):
            return
        with suppress(Exception):
            if self.log.find(header.app_id, header.batch_id) is None:
                return
        raise UnresolvedTransactionError(
            f"half batch {header.half_id!r} may be prepared ({sentence_of(problem)}). {_stays_open(header.numbered)}"
        ) from cause_of(problem)

    # ------------------------------------------------------------------ 3 execute
    def execute(self, run: Run, attempt: int, rows: RowSet) -> None:
        """Run the local transaction of rows that nobody but this run may execute, and make its verdicts final."""
        answered = self.ask(run, attempt, rows)
        if answered is not None:
            self.decide(run, *answered, Who.EXECUTE)

    def ask(self, run: Run, attempt: int, rows: RowSet) -> Answered | None:
        """Run the local transaction of rows that nobody but this run may execute; None when a check was faster."""
        header = run.record.header
        reach("prepared", header=header, attempt=attempt)
        listener = self._listener_of(run)
        state = self.log.state_of(run.record, refresh=False)  # it was read after the prepare, or the reopen
        rows &= state.rows_in((RowState.PENDING,), attempt)
        if not rows:  # a check was faster than we are
            return None
        held = run.held if rows.count == run.record.rows else None
        batch = self.log.half_batch(run.record, state, attempt, rows, run.arg, held)
        if type(listener) is CommitOncePrepared:  # it is over at once, and any check would answer the same
            run.executed.append((attempt, rows))
            reach("executed", header=header, attempt=attempt)
            return batch, rows, _COMMIT_ALL
        lease = self.leases.lease(run.record)
        try:
            with lease:
                verdicts = self._ask_execute(listener, run, batch)
        except FencedError:
            self._end_fenced(run, batch, rows)
            return None
        finally:
            lease.end()  # `with` does not, when an interrupt comes while it enters or leaves
        if verdicts is None:
            return None
        run.executed.append((attempt, rows))
        reach("executed", header=header, attempt=attempt)
        return batch, rows, verdicts

    def _listener_of(self, run: Run) -> TransactionListener:
        """Who may be asked about a half batch; FenceError when this listener cannot speak for it."""
        prepared_with = run.record.header.fence_id
        if prepared_with == NO_LISTENER_FENCE != run.fence_id:  # it was sent without a local transaction
            return CommitOncePrepared()
        require_same_fence(run.record.half_id, prepared_with, run.fence_id)
        return self.listener

    def _ask_execute(self, listener: TransactionListener, run: Run, batch: HalfBatch) -> VerdictArray | None:
        """What the local transaction says; None when others settled the half batch while it slept."""
        try:
            answer = returned(listener.execute_local_transaction, batch)
            if answer is None:
                said = (
                    "the listener returned None for %r: that is UNKNOWN, and checks will ask what became of it. A "
                    "local transaction that is done returns COMMIT_MESSAGE"
                )
                logger.warning(said, batch, extra=of_batch(batch))
            return normalize_verdicts(answer, batch)
        except FencedError:
            raise
        except (Exception, CancelledError) as problem:
            if isinstance(problem, LostFileError) and not self._is_pending(run, batch):
                return None
            if self.on_listener_error == "unknown":
                said = traceback_of(problem)
                logger.warning(
                    "local transaction of %r failed: it stays UNKNOWN: %s", batch, said, extra=of_batch(batch)
                )
                run.outcome.error = problem
                return VerdictArray((Verdict(UNKNOWN),))
            raise LocalTransactionError(
                f"the local transaction of half batch {batch.half_id!r} (attempt {batch.attempt}) raised "
                f"{type(problem).__name__}: {text_of(problem)}{line_of(problem)}. Its messages stay pending; a check "
                "or a restart settles them"
            ) from cause_of(problem)

    def _is_pending(self, run: Run, batch: HalfBatch) -> bool:
        """Whether any message of the batch is pending; HalfBatchLeftError when the half batch has left."""
        return bool(self.log.state_of(run.record).rows_in((RowState.PENDING,), batch.attempt) & batch.rows)

    def _end_fenced(self, run: Run, batch: HalfBatch, rows: RowSet) -> None:
        """A check's tombstone was there first, so the attempt did nothing: the rollback is the check's, and the next
        attempt may run."""
        logger.info(
            "attempt %d of half batch %r is over: a check was faster", batch.attempt, batch.half_id,
            extra=of_batch(batch),
        )  # fmt: skip
        # When its rows were reopened or quarantined meanwhile, settling goes on from there.
        with suppress(StaleAttemptError):
            self.decide(run, batch, rows, VerdictArray((rollback("a check's tombstone came first"),)), Who.CHECK)

    # ------------------------------------------------------------------ 4 decide
    def decide(self, run: Run, batch: HalfBatch, rows: RowSet, verdicts: VerdictArray, who: Who) -> bool:
        """Write op markers for COMMIT and ROLLBACK; UNKNOWN gets none. True when any transaction is UNKNOWN."""
        split = split_by_verdict(self.log, run.record, rows, batch, verdicts)
        if split.decides:
            commit, rollback = split.commit.count, split.rollback.count
            with settling(self.log.path, batch, str(who), commit, rollback, run.record.topics):
                placed = self.commits.decide(split.decision(run.record, batch.attempt, who))
            said = "%r: %d messages are committed, %d rolled back, by %s"
            logger.debug(said, batch, commit, rollback, who, extra=of_batch(batch))
            run.keep(batch.attempt, placed)
        if who is Who.EXECUTE:
            reach("decided", header=run.record.header, attempt=batch.attempt)
        return bool(split.unknown)

    # ------------------------------------------------------------------ R replay
    def _settle(self, run: Run) -> None:
        """Go on until every row is decided, or waits for the check of an UNKNOWN that this run itself got."""
        deadline = self.log.machine.monotonic() + self.replay_check_timeout_s
        pause_s, told = REPLAY_BACKOFF_S_MIN, False
        # What this run has just decided was read back with its commit: most batches need no second look.
        state = self.log.state_of(run.record, refresh=run.outcome.replayed)
        while state.in_conflict or state.count(*FINAL_STATES) < state.rows:
            state = self.log.state_of(run.record)
            self._refuse_conflict(run, state)
            self._listener_of(run)  # before anything is reopened
            if self._reopen_rolled_back(run, state) or self._reopen_unknown(run, state):
                continue
            to_check = self._not_executed_here(run, state)
            if not to_check:
                break
            answers = [self._check(run, state, attempt, rows) for attempt, rows in to_check]
            if all(unknown for unknown in answers):
                if self.log.machine.monotonic() >= deadline:
                    raise UnresolvedTransactionError(self._unresolved(run))
                if not told:
                    told = True
                    waiting = self._waiting(run, sum(rows.count for _, rows in to_check))
                    logger.warning("%s", waiting, extra=of_header(run.record.header))
                self.log.machine.sleep(pause_s)
                pause_s = min(pause_s * 2, REPLAY_BACKOFF_S_MAX)
        run.end_with(state)

    def is_settled(self, run: Run) -> bool:
        """Whether nothing is left to be done, by what was read last. Then the outcome says what became of it."""
        state = self.log.state_of(run.record, refresh=False)
        if state.in_conflict or state.count(*FINAL_STATES) < state.rows:
            return False
        run.end_with(state)
        return True

    def _refuse_conflict(self, run: Run, state: BatchState) -> None:
        if state.in_conflict:
            raise VerdictConflictError(
                f"half batch {run.record.half_id!r} has two verdicts that contradict each other: find out which "
                "is true, then log.resolve(half_id, verdict, reason=…) and start the query again"
            )

    def _reopen_rolled_back(self, run: Run, state: BatchState) -> bool:
        """What a check rolled back without a refusal never happened and never will: run it as the next attempt."""
        by_check = (RowState.ROLLED_BACK_BY_CHECK,)
        for attempt in state.attempts(*by_check):
            rows = self.log.reopen(run.record, attempt, by_check, attempt + 1, Who.EXECUTE, "rolled back by a check")
            self.execute(run, attempt + 1, rows)
            return True
        return False

    def _reopen_unknown(self, run: Run, state: BatchState) -> bool:
        """Nobody knows what became of what was quarantined or discarded: ask again, under the same attempt."""
        unknown = (RowState.QUARANTINED, RowState.ROLLED_BACK_BY_DISCARD)
        for attempt in state.attempts(*unknown):
            self.log.reopen(run.record, attempt, unknown, attempt, Who.EXECUTE, "asked again by a replay")
            return True
        return False

    def _not_executed_here(self, run: Run, state: BatchState) -> list[tuple[int, RowSet]]:
        """Pending rows that another run prepared or reopened: it may have executed them, or may do so yet."""
        found: list[tuple[int, RowSet]] = []
        for attempt in state.attempts(RowState.PENDING):
            rows = state.rows_in((RowState.PENDING,), attempt)
            for executed_attempt, executed in run.executed:
                if executed_attempt == attempt:
                    rows -= executed
            if rows:
                found.append((attempt, rows))
        return found

    def _check(self, run: Run, state: BatchState, attempt: int, rows: RowSet) -> bool:
        """Ask what became of rows that somebody else may have executed. True when part of them stays UNKNOWN."""
        reach("replay asks")
        listener = self._listener_of(run)
        batch = self.log.half_batch(run.record, state, attempt, rows)
        batch.restarted = run.record.header.query_id is not None  # a query runs once at a time; a send may be repeated
        try:
            verdicts = normalize_verdicts(returned(listener.check_local_transaction, batch), batch)
        except Exception as problem:  # not an answer; the next one may be
            logger.warning("check of %r failed: %s", batch, traceback_of(problem), extra=of_batch(batch))
            run.outcome.error = problem
            return True
        try:
            return self.decide(run, batch, rows, verdicts, Who.CHECK)
        except StaleAttemptError:  # somebody reopened or quarantined the rows while we asked: look again
            return False

    def _waiting(self, run: Run, messages: int) -> str:
        age_s = max(0.0, (self.log.machine.now() - run.record.prepared_at).total_seconds())
        after_s = getattr(self.listener, "rollback_after_s", None)
        ends = "An answer of the listener ends the wait"
        if after_s is not None:
            ends += f"; it rolls back what did not happen once the batch is {after_s:g} s old (rollback_after)"
        earlier, limit = ("run", "replayCheckTimeout") if run.numbered else ("send", "replay_check_timeout")
        return (
            f"half batch {run.record.half_id!r} was prepared {age_s:.0f} s ago by an earlier {earlier}, and its "
            f"listener does not know yet what became of {count_of(messages, 'message')}. Asking again for up to "
            f"{self.replay_check_timeout_s:g} s ({limit}). {ends}; so does txmq resolve"
        )

    def _unresolved(self, run: Run) -> str:
        error = run.outcome.error
        why = f"the last check raised {type(error).__name__}: {text_of(error)}" if error else "UNKNOWN"
        earlier, again = "send", "send it again later, under the same idempotency key"
        if run.numbered:
            earlier, again = "run", "start the query again later, raise replayCheckTimeout"
        return (
            f"half batch {run.record.half_id!r} was prepared by an earlier {earlier}, and its listener could not say "
            f"within {self.replay_check_timeout_s:g} s what became of it ({why}). Nothing is lost: {again}, let a "
            f"check settle it, or log.resolve({run.record.half_id!r}, verdict, reason=…)"
        )


def left_open(run: Run, problem: BaseException) -> UnresolvedTransactionError:
    """What to raise when a problem with the log leaves a half batch pending."""
    header = run.record.header
    did = "What the local transaction did stands. " if run.executed and header.fence_id != NO_LISTENER_FENCE else ""
    return UnresolvedTransactionError(
        f"half batch {run.record.half_id!r} is prepared, and could not be settled ({sentence_of(problem)}). "
        f"{did}{_stays_open(run.numbered)}"
    )


def _stays_open(numbered: bool) -> str:
    """What becomes of it."""
    if numbered:
        return "It stays pending: start the query again, or let a CheckService settle it"
    return (
        "It stays pending until a check settles it, and then its messages may become visible: do not send them anew, "
        "except under the same idempotency key"
    )


def held_by(files: Sequence[Stageable]) -> HalfRows | None:
    """All rows of what was staged, when they are in memory."""
    one = files[0] if len(files) == 1 else None
    rows = one.rows if isinstance(one, OneMessage) else one
    return rows if isinstance(rows, HalfRows) else None


def _outcome_of_left(record: HalfRecord, kept: Archived) -> Outcome:
    """What became of a half batch that has left: nothing of it can be run again."""
    if not kept.final:
        raise HalfBatchLeftError(
            f"{kept.left_error()}. A check has rolled it back, and a retry would run it again: send its messages as "
            "new ones, under another batch id or idempotency key",
            kept,
        )
    counts = {RowState.COMMITTED: kept.committed, RowState.ROLLED_BACK: kept.rolled_back}
    return Outcome(record, True, kept.attempt, {state: n for state, n in counts.items() if n})


def _is_same_query(prepared: HalfHeader, now: HalfHeader) -> bool:
    """Without a query id, equal numbers may be of two checkpoints. A half batch that a user named, or gave an
    idempotency key, is known by that."""
    is_known = now.query_id is not None or now.naming is not Naming.COUNTED
    return is_known and prepared.query_id == now.query_id


def _following(header: HalfHeader, last: HalfHeader | None, lineage: Lineage | None) -> HalfHeader:
    """The header of a new half batch that is prepared only after the one that its checkpoint was found to hold."""
    if lineage is None:
        return header
    return replace(header, follows=FIRST if last is None else last.batch_id)


def _of_another_query(prepared: HalfHeader, now: HalfHeader) -> str:
    return (
        f"batch {prepared.batch_id} of app {now.app_id!r} was prepared by {_query(prepared)}, and now "
        f"{'comes' if prepared.batch_id == now.batch_id else f'batch {now.batch_id} comes'} from {_query(now)}: the "
        "checkpoint is a new one, or another's. " + _REMEDY
    )


def _query(header: HalfHeader) -> str:
    if header.query_id is not None:
        return f"query {header.query_id}"
    return "a batch write" if header.naming is Naming.GIVEN else "a query that is not known, or a batch write"


_REMEDY = (
    "Go on with the checkpoint that this app last used; or, if the input is meant to be sent again, set a new appId"
)
