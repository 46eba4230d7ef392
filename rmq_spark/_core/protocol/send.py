"""The protocol: a send in four steps, and the replay of a half batch that an earlier run prepared.

====  ========  ====================================================================  ======================
 1    stage     half files are written; nothing names them yet                        ``staged``
 2    prepare   one commit to ``half``: the half batch exists, and nobody sees it     ``prepared``
 3    execute   the local transaction runs                                            ``executing``, ``executed``
 4    decide    op markers make the verdicts final, and committed messages visible    ``decided``
 R    replay    nothing is executed twice: what may have run is checked               ``replay asks``
====  ========  ====================================================================  ======================

A process may die before, in and after each step: the tests kill it at the points on the right. The next run of the
batch continues it. :meth:`TwoPhase.steps` is the one description of all this. It yields each step to a driver, which
runs it: :meth:`TwoPhase.send` in the caller's thread, an asynchronous send in threads that many sends share. This
module speaks to an Engine and a listener, and knows neither Spark nor Delta.
"""

from __future__ import annotations

import copy
import logging
from asyncio import CancelledError
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias, TypeVar, cast

from rmq_spark._core.listeners.half_batch import HalfBatch, normalize_verdicts
from rmq_spark._core.listeners.transaction_listener import (
    NO_LISTENER_FENCE,
    CommitOncePrepared,
    TransactionListener,
    Verdicts,
    has_local_transaction,
    is_coroutine,
    require_same_store,
)
from rmq_spark._core.log.batch_state import BatchState, RowState
from rmq_spark._core.log.half import HalfFile, HalfRows
from rmq_spark._core.log.half_header import HalfHeader
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.op import Who
from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.group_commit import GroupCommit, Stageable
from rmq_spark._core.protocol.identity import Lineage
from rmq_spark._core.protocol.leases import LeaseKeeper
from rmq_spark._core.protocol.limits import NO_LIMITS, PendingGuard, PendingLimits
from rmq_spark._core.protocol.observe import tell_not_sent, tell_sent
from rmq_spark._core.protocol.outcome import LOG_ERRORS, Outcome, Run, left_open, outcome_of_left
from rmq_spark._core.protocol.replay import Replays, following
from rmq_spark._core.protocol.split import Split, split_by_verdict
from rmq_spark._core.protocol.steps import Decide, Execute, Executed, MayBlock, Prepare, Sleep, Step, Steps, run_all
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.log_records import of_batch, of_header
from rmq_spark._core.runtime.spans import settling
from rmq_spark._core.vocabulary.options import LEASE_S, ON_LISTENER_ERROR, REPLAY_CHECK_TIMEOUT_S, seconds
from rmq_spark._core.vocabulary.redaction import cause_of, line_of, text_of, traceback_of
from rmq_spark._core.vocabulary.remedy import decide_by_hand
from rmq_spark._core.vocabulary.rows import NO_ROWS, RowSet
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark._core.vocabulary.verdicts import (
    COMMIT_MESSAGE,
    UNKNOWN,
    Verdict,
    VerdictArray,
    call_for_verdicts,
    reason_for_log,
    rollback,
)
from rmq_spark.errors import (
    AlreadyPreparedError,
    FencedError,
    HalfBatchLeftError,
    ListenerError,
    LocalTransactionError,
    LostFileError,
    OptionError,
    StaleAttemptError,
    UnresolvedTransactionError,
    VerdictConflictError,
)

logger = logging.getLogger(__name__)

FINAL_STATES = (RowState.COMMITTED, RowState.WAITING, RowState.ROLLED_BACK)
_RERUN_STATES = (RowState.ROLLED_BACK_BY_CHECK,)
"""A check rolled these rows back without a refusal: under this attempt their transaction can no longer happen. A replay
runs it under the next one."""
_ASK_AGAIN_STATES = (RowState.QUARANTINED, RowState.ROLLED_BACK_BY_DISCARD)
"""Nobody knows the outcome of these rows. A replay asks about them again, under the same attempt."""
T = TypeVar("T")
StepsTo: TypeAlias = Generator[Step, Any, T]
"""A part of the steps, and its result."""
REPLAY_BACKOFF_S_MIN = 0.2
REPLAY_BACKOFF_S_MAX = 5.0


def execute_here(listener: TransactionListener, batch: HalfBatch) -> Verdicts:
    return listener.execute_local_transaction(batch)


_COMMIT_ALL = VerdictArray((Verdict(COMMIT_MESSAGE),))


class TwoPhase:
    """Runs half batches of one producer group through the protocol.

    If ``execute_local_transaction`` raises, the query ends with the half batch pending, or the verdict is UNKNOWN, as
    in RocketMQ (``on_listener_error``: "fail" or "unknown"). A replay asks the listener again for
    ``replay_check_timeout_s`` while it answers UNKNOWN. When ``pending_limits`` are reached, a new half batch is
    refused; a replay is sent all the same. ``commits`` prepares and decides half batches (by default each alone).
    ``run`` runs a local transaction (by default in this thread).
    """

    def __init__(
        self,
        engine: Engine,
        listener: TransactionListener,
        *,
        on_listener_error: str = "fail",
        replay_check_timeout_s: float = REPLAY_CHECK_TIMEOUT_S,
        pending_limits: PendingLimits = NO_LIMITS,
        commits: GroupCommit | None = None,
        run: Callable[[TransactionListener, HalfBatch], Verdicts] = execute_here,
    ) -> None:
        if on_listener_error not in ON_LISTENER_ERROR:
            raise OptionError(f"onListenerError={on_listener_error!r} is not one of {', '.join(ON_LISTENER_ERROR)}")
        self.engine = engine
        self.listener = listener
        self.on_listener_error = on_listener_error
        self.replay_check_timeout_s = seconds(replay_check_timeout_s, "replay_check_timeout")
        self.pending = PendingGuard(engine, pending_limits)
        self._replays = Replays(engine)
        self.commits: Engine | GroupCommit = engine if commits is None else commits
        self._run_by = run
        self.leases = LeaseKeeper(engine, LEASE_S)

    def with_listener(self, listener: TransactionListener, on_listener_error: str) -> TwoPhase:
        """A copy for another listener, with the same commits, leases and limits."""
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
        """Bring a half batch to its verdicts. A batch that was prepared before continues from its present state.

        The header has the fence of this listener. ``stage`` returns half files, or rows to be written; it is called for
        a new batch only. The listener gets ``arg`` as ``batch.arg``. ``lineage`` belongs to the micro-batch's
        checkpoint, if it can be read.

        ==========================  ===================================================================================
        CheckpointMismatchError     another query or other input used the batch id, or this cannot be ruled out; or the
                                    checkpoint does not know the log's last batch
        FenceError                  the half batch was prepared with another fence, and is still open
        LocalTransactionError       the listener raised (``on_listener_error="fail"``)
        VerdictConflictError        two verdicts contradict each other: a person must resolve the half batch
        UnresolvedTransactionError  a replay's checks stay UNKNOWN, or the store failed after the prepare
        PendingLimitError           too much of the producer group is pending; nothing is written then
        ListenerError               the local transaction is a coroutine
        HalfBatchLeftError          a check has rolled the half batch back, and its messages have left the log since
        ==========================  ===================================================================================
        """
        if is_coroutine(self.listener):
            raise ListenerError(
                f"{type(self.listener).__name__}.execute_local_transaction is a coroutine function. Only "
                "TransactionMQProducer.send_message_in_transaction_async can wait for it; make it a plain function"
            )
        reach("send begins", header=header)
        began_s = self.engine.runtime.monotonic()
        try:
            outcome = run_all(self.steps(header, stage, arg, lineage), self.run_step)
        except Exception as problem:
            tell_not_sent(self.engine, header.producer_group, problem)
            raise
        tell_sent(self.engine, header.producer_group, outcome, began_s)
        reach("sent", header=header)
        return outcome

    def run_step(self, step: Step) -> Any:
        """Run one step in this thread, and return its answer."""
        match step:
            case Prepare():
                (result,) = self.commits.prepare([step])
                if isinstance(result, HalfRecord):
                    return result
                raise result
            case Execute():
                return self.execute(step.run, step.attempt, step.rows)
            case Decide():
                record, split = step.run.record, step.split
                counts = split.commit.count, split.rollback.count
                with settling(self.engine.path, record.half_id, step.attempt, str(step.who), *counts, record.topics):
                    (decided,) = self.commits.decide([step.decision])
                    return decided.or_raise()
            case MayBlock():
                return None
            case Sleep():
                self.engine.runtime.sleep(step.seconds)
                return None

    def steps(
        self,
        header: HalfHeader,
        stage: Callable[[], Sequence[Stageable]],
        arg: Any = None,
        lineage: Lineage | None = None,
    ) -> Steps:
        """Yield every step of a send, in order. See :meth:`send` for the parameters and the errors."""
        # 1 stage
        record = self._replays.find(header)
        is_replay = record is not None
        files: Sequence[Stageable] = ()
        while record is None:
            last = self._replays.predecessor_of(header, lineage)
            if not files:
                self.pending.require_room(header.producer_group)
                files = stage()
                if not files:
                    if lineage is not None and last is not None and last.input_hash is not None:
                        lineage.record(last.batch_id, last.input_hash)
                    return Outcome()
            # 2 prepare
            try:
                # A GroupCommit turns messages into rows first.
                record = yield Prepare(following(header, last, lineage), cast("Sequence[HalfFile | HalfRows]", files))
            except AlreadyPreparedError:  # another run of the same batch was faster
                # A half batch without a number is found by its name alone, so it is there.
                record = self._replays.find(header) if header.numbered else self._replays.require(header)
                is_replay = record is not None
            except LOG_ERRORS as problem:  # its commit may have been made
                yield MayBlock()
                self._replays.require_not_prepared(header, problem)
                raise
        if not header.numbered and NO_LISTENER_FENCE not in (record.header.fence_id, header.fence_id):
            # The same idempotency key with another database is another send: refuse it.
            require_same_store(record.half_id, record.header.fence_id, header.fence_id)
        if record.left is not None:
            return outcome_of_left(record, record.left)
        run = Run(record, header.fence_id, arg, Outcome(record, is_replay), numbered=header.numbered)
        try:
            if not is_replay:
                run.in_memory = rows_in_memory(files)
                yield from self._run_attempt(run, 1, record.all_rows)  # 3 execute, 4 decide
            if not run.outcome.messages and (is_replay or not self._is_settled(run)):
                yield MayBlock()
                yield from self._settle(run)  # R
        except HalfBatchLeftError as left:  # this run slept, and others settled the half batch meanwhile
            if left.archived is None:
                raise
            return outcome_of_left(record, left.archived)
        except LOG_ERRORS as problem:
            raise left_open(run, problem) from cause_of(problem)
        return run.outcome

    def _run_attempt(self, run: Run, attempt: int, rows: RowSet) -> StepsTo[None]:
        """Execute rows that only this run may execute, and make the verdicts final."""
        record = run.record
        reach("prepared", header=record.header, attempt=attempt)
        if not has_local_transaction(self._listener_of(run)) and self.engine.ledger.has_no_op_rows(record):
            _note_executed(run, attempt, rows)
            yield from self._decide(run, attempt, Split(rows, NO_ROWS, NO_ROWS), Who.EXECUTE)
            return
        executed: Executed | None = yield Execute(run, attempt, rows)
        if executed is None:
            return
        split = split_by_verdict(self.engine, record, executed.rows, executed.batch, executed.verdicts)
        # When a check was faster, others may have reopened or quarantined the rows: settling continues from there.
        with suppress(StaleAttemptError) if executed.who is Who.CHECK else nullcontext():
            yield from self._decide(run, attempt, split, executed.who)

    def _decide(self, run: Run, attempt: int, split: Split, who: Who) -> StepsTo[bool]:
        """Write op markers for COMMIT and ROLLBACK. Returns whether any transaction stays UNKNOWN, without a marker."""
        if split.decides:
            placed = yield Decide(run, attempt, split, who)
            if logger.isEnabledFor(logging.DEBUG):
                text = "half batch %r, attempt %d: %d messages are committed, %d rolled back, by %s"
                counts = split.commit.count, split.rollback.count
                extra = of_header(run.record.header, attempt)
                logger.debug(text, run.record.half_id, attempt, *counts, who, extra=extra)
            run.add_placed(attempt, placed)
        if who is Who.EXECUTE:
            reach("decided", header=run.record.header, attempt=attempt)
        return bool(split.unknown)

    # ------------------------------------------------------------------ 3 execute
    def execute(self, run: Run, attempt: int, rows: RowSet) -> Executed | None:
        """Run the local transaction; None when a check was faster."""
        listener = self._listener_of(run)
        state = self.engine.state_of(run.record, refresh=False)  # it was read after the prepare or the reopen
        rows &= state.rows_in((RowState.PENDING,), attempt)
        if not rows:
            return None
        in_memory = run.in_memory if rows.count == run.record.rows else None
        batch = self.engine.half_batch(run.record, state, attempt, rows, run.arg, in_memory)
        batch.on_listener_error = self.on_listener_error
        if not has_local_transaction(listener):  # it takes no time, and any check would answer the same
            verdicts: VerdictArray | None = _COMMIT_ALL
        else:
            lease = self.leases.lease(run.record)
            try:
                with lease:
                    verdicts = self._ask_execute(listener, run, batch)
            except FencedError:  # a check's tombstone was there first, so the attempt did nothing
                text = "attempt %d of half batch %r is over: a check was faster"
                logger.info(text, batch.attempt, batch.half_id, extra=of_batch(batch))
                rolled_back = VerdictArray((rollback("a check's tombstone came first"),))
                return Executed(batch, rows, rolled_back, Who.CHECK)
            finally:
                lease.end()  # `with` does not, when an interrupt comes while it enters or leaves
        if verdicts is None:
            return None
        _note_executed(run, attempt, rows)
        return Executed(batch, rows, verdicts, Who.EXECUTE)

    def _listener_of(self, run: Run) -> TransactionListener:
        """The listener to ask about a half batch; FenceError when this one cannot answer for it."""
        prepared_with = run.record.header.fence_id
        if prepared_with == NO_LISTENER_FENCE != run.store_id:  # it was sent without a local transaction
            return CommitOncePrepared()
        require_same_store(run.record.half_id, prepared_with, run.store_id)
        return self.listener

    def _ask_execute(self, listener: TransactionListener, run: Run, batch: HalfBatch) -> VerdictArray | None:
        """The verdicts of the local transaction; None when others settled the half batch while this run slept."""
        try:
            answer = call_for_verdicts(self._run_by, listener, batch)
            if answer is None:
                text = (
                    "the listener returned None for %r: that is UNKNOWN, and checks will ask what became of it. A "
                    "local transaction that is done returns COMMIT_MESSAGE"
                )
                logger.warning(text, batch, extra=of_batch(batch))
            return normalize_verdicts(answer, batch)
        except FencedError:
            raise
        except (Exception, CancelledError) as problem:
            if isinstance(problem, LostFileError) and not self._is_pending(run, batch):
                return None
            if self.on_listener_error == "unknown":
                text = traceback_of(problem)
                logger.warning(
                    "local transaction of %r failed: it stays UNKNOWN: %s", batch, text, extra=of_batch(batch)
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
        return bool(self.engine.state_of(run.record).rows_in((RowState.PENDING,), batch.attempt) & batch.rows)

    # ------------------------------------------------------------------ R replay
    def _settle(self, run: Run) -> StepsTo[None]:
        """Check and execute until each row is decided, or waits for a check because this run got UNKNOWN for it."""
        deadline = self.engine.runtime.monotonic() + self.replay_check_timeout_s
        pause_s, warned = REPLAY_BACKOFF_S_MIN, False
        # This run's own decision was read back with its commit, so most batches need no second look.
        state = self.engine.state_of(run.record, refresh=run.outcome.replayed)
        while state.in_conflict or state.count(*FINAL_STATES) < state.rows:
            state = self.engine.state_of(run.record)
            self._refuse_conflict(run, state)
            self._listener_of(run)  # before anything is reopened
            if attempts := state.attempts(*_RERUN_STATES):
                attempt = next(iter(attempts)) + 1
                rows = self._reopen(run, attempt - 1, _RERUN_STATES, attempt, "rolled back by a check")
                yield from self._run_attempt(run, attempt, rows)
                continue
            if attempts := state.attempts(*_ASK_AGAIN_STATES):
                attempt = next(iter(attempts))
                self._reopen(run, attempt, _ASK_AGAIN_STATES, attempt, "asked again by a replay")
                continue
            to_check = self._not_executed_here(run, state)
            if not to_check:
                break
            are_unknown = []
            for attempt, rows in to_check:
                are_unknown.append((yield from self._check(run, state, attempt, rows)))
            if all(are_unknown):
                if self.engine.runtime.monotonic() >= deadline:
                    raise UnresolvedTransactionError(self._unresolved(run))
                if not warned:
                    warned = True
                    sentence = self._waiting(run, sum(rows.count for _, rows in to_check))
                    logger.warning("%s", sentence, extra=of_header(run.record.header))
                yield Sleep(pause_s)
                pause_s = min(pause_s * 2, REPLAY_BACKOFF_S_MAX)
        run.end_with(state)

    def _is_settled(self, run: Run) -> bool:
        """Whether nothing was left to do at the last read. If so, set the outcome."""
        state = self.engine.state_of(run.record, refresh=False)
        if state.in_conflict or state.count(*FINAL_STATES) < state.rows:
            return False
        run.end_with(state)
        return True

    def _refuse_conflict(self, run: Run, state: BatchState) -> None:
        if state.in_conflict:
            raise VerdictConflictError(
                f"half batch {run.record.half_id!r} has two verdicts that contradict each other",
                remedy=decide_by_hand(run.record.half_id, "find out which is true, and start the query again after "),
            )

    def _reopen(self, run: Run, attempt: int, states: tuple[RowState, ...], as_attempt: int, reason: str) -> RowSet:
        return self.engine.ledger.reopen(run.record, attempt, states, as_attempt, Who.EXECUTE, reason)

    def _not_executed_here(self, run: Run, state: BatchState) -> list[tuple[int, RowSet]]:
        """Pending rows that another run prepared or reopened: that run may have executed them, or may still do so."""
        not_executed: list[tuple[int, RowSet]] = []
        for attempt in state.attempts(RowState.PENDING):
            rows = state.rows_in((RowState.PENDING,), attempt)
            for executed_attempt, executed in run.executed:
                if executed_attempt == attempt:
                    rows -= executed
            if rows:
                not_executed.append((attempt, rows))
        return not_executed

    def _check(self, run: Run, state: BatchState, attempt: int, rows: RowSet) -> StepsTo[bool]:
        """Ask about rows that another run may have executed. Returns whether some of them stay UNKNOWN."""
        reach("replay asks")
        listener = self._listener_of(run)
        batch = self.engine.half_batch(run.record, state, attempt, rows)
        batch.restarted = run.record.header.query_id is not None  # a query has one run at a time; sends may overlap
        try:
            verdicts = normalize_verdicts(call_for_verdicts(listener.check_local_transaction, batch), batch)
        except Exception as problem:  # no answer; the next check may get one
            logger.warning("check of %r failed: %s", batch, traceback_of(problem), extra=of_batch(batch))
            run.outcome.error = problem
            return True
        run.unknown_because = reason_for_log(batch.reason)
        split = split_by_verdict(self.engine, run.record, rows, batch, verdicts)
        try:
            return (yield from self._decide(run, attempt, split, Who.CHECK))
        except StaleAttemptError:  # another process reopened or quarantined the rows meanwhile: look again
            return False

    def _waiting(self, run: Run, messages: int) -> str:
        age_s = max(0.0, (self.engine.runtime.now() - run.record.prepared_at).total_seconds())
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
        unknown = f"UNKNOWN{f': {run.unknown_because}' if run.unknown_because else ''}"
        why = f"the last check raised {type(error).__name__}: {text_of(error)}" if error else unknown
        earlier, again = "send", "send it again later, under the same idempotency key"
        if run.numbered:
            earlier, again = "run", "start the query again later, raise replayCheckTimeout"
        return (
            f"half batch {run.record.half_id!r} was prepared by an earlier {earlier}, and its listener could not say "
            f"within {self.replay_check_timeout_s:g} s what became of it ({why}). Nothing is lost: {again}, let a "
            f"check settle it, or log.resolve({run.record.half_id!r}, verdict, reason=…)"
        )


def rows_in_memory(files: Sequence[Stageable]) -> HalfRows | None:
    """All rows of the staged half batch, if they are in memory."""
    file = files[0] if len(files) == 1 else None
    rows = file.rows if isinstance(file, OneMessage) else file
    return rows if isinstance(rows, HalfRows) else None


def _note_executed(run: Run, attempt: int, rows: RowSet) -> None:
    run.executed.append((attempt, rows))
    reach("executed", header=run.record.header, attempt=attempt)
