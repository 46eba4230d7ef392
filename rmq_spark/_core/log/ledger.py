"""Writes every new op row. Merging and pruning only rewrite old ones.

All writes go through :meth:`Ledger.append`, a compare-and-set loop that reads the newest state first. So a row is
decided once, a verdict on a past attempt never counts, and offsets have no gaps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from rmq_spark._core.log.batch_index import BatchIndex
from rmq_spark._core.log.batch_state import COMMITTED_STATES, OPEN_STATES, ROLLED_BACK_STATES, RowState
from rmq_spark._core.log.decision import (
    Decided,
    Decision,
    DecisionError,
    Placed,
    UnknownCheck,
    against,
    problem_after_leaving,
    rows_to_decide,
    states_of,
)
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.half_table import HalfTable
from rmq_spark._core.log.key_order import OpenBatch
from rmq_spark._core.log.low_water_mark import Marker
from rmq_spark._core.log.new_op_rows import (
    commit_rows,
    lease_row,
    place_row,
    placed_messages,
    resolution_row,
    rollback_rows,
    rows_for,
    with_offsets,
)
from rmq_spark._core.log.op import OpKind, OpRow, Who, to_table
from rmq_spark._core.log.op_reader import OpReader
from rmq_spark._core.log.placer import Placer, in_send_order, last_sent_ms
from rmq_spark._core.log.topics import TopicTable
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.table import Change, Table
from rmq_spark._core.vocabulary.options import ATTEMPTS_MAX
from rmq_spark._core.vocabulary.rows import NO_ROWS, RowSet
from rmq_spark._core.vocabulary.times import EPOCH
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, ROLLBACK_MESSAGE, LocalTransactionState
from rmq_spark.errors import (
    CorruptLogError,
    HalfBatchLeftError,
    HalfBatchNotFoundError,
    LostFileError,
    StaleAttemptError,
    TxmqError,
    UnreadableFileError,
    VerdictConflictError,
)

logger = logging.getLogger(__name__)

TRY_AGAIN_S = 10.0
"""If a half batch with due messages cannot be read, decisions do not try it again for this many seconds. Each try costs
milliseconds."""
MARK_TRIES_MAX = 20
"""A mark that has lost this many races is left to the next round, because each try keeps the lock of this handle."""


class Ledger(OpReader):
    """Writes the op markers of a commit log, each from the newest state that :class:`OpReader` has read. ``has_left``
    tells whether a half batch has left the table ``half``, as another handle on the log sees it."""

    def __init__(self, table: Table, half: HalfTable, topics: TopicTable, has_left: Callable[[str], bool]) -> None:
        super().__init__(table, half)
        self._has_left = has_left
        self._placer = Placer(half, topics)
        self._marker = Marker(self, half)
        self._op_time = EPOCH  # of the op rows under construction
        self.unplaceable: Mapping[str, TxmqError] = {}
        """The half batches with due messages that could not be read at the last try, and why."""
        self._tried_s = -TRY_AGAIN_S  # the monotonic time of the last look at all of them

    # ------------------------------------------------------------------ decisions
    def decide(self, decisions: Sequence[Decision]) -> list[Decided]:
        """Make verdicts final in one commit: commits get offsets, rollbacks do not. The first marker wins. Rows that
        already have the same verdict stay unchanged, so a decision may be repeated.

        A half batch has at most one decision. A decision that fails does not stop the others: its problem is a
        VerdictConflictError when the opposite verdict is final (a ``conflict`` row records this), and a
        StaleAttemptError when its rows are under another attempt, are quarantined, have too few checks, or left long
        ago. Any other problem, such as a lost half file, fails all decisions.
        """
        for d in decisions:
            if d.commit & d.rollback:
                raise ValueError(f"rows of half batch {d.record.half_id!r} are to be committed and rolled back at once")
        if len({d.record.half_id for d in decisions}) < len(decisions):
            raise ValueError("two decisions about one half batch: the second one needs a commit of its own")
        problems: dict[str, DecisionError] = {}
        late: list[tuple[Decision, VerdictConflictError, RowSet]] = []

        def build() -> list[OpRow]:
            problems.clear()
            late.clear()
            decided: list[HalfRecord] = []
            rows: list[OpRow] = []
            for decision in decisions:
                try:
                    rows += self._decided_rows(decision)
                    decided.append(decision.record)
                except VerdictConflictError as problem:
                    problems[decision.record.half_id] = problem
                    state = self.state_of(decision.record, refresh=False)
                    late.append((decision, problem, against(state, decision, LocalTransactionState(problem.verdict))))
                except StaleAttemptError as problem:
                    problems[decision.record.half_id] = problem
                except HalfBatchLeftError as left:
                    if (outcome := problem_after_leaving(decision, left)) is not None:
                        problems[decision.record.half_id] = outcome
            return self._with_places(decided, rows) + self._conflict_rows(late)

        placed: dict[str, list[Placed]] = {d.record.half_id: [] for d in decisions}
        for outcome in placed_messages(self.append(build)):  # also of half batches that waited for these
            if outcome.half_id in placed:
                placed[outcome.half_id].append(outcome)
        return [Decided(placed[d.record.half_id], problems.get(d.record.half_id)) for d in decisions]

    def _decided_rows(self, decision: Decision) -> list[OpRow]:
        """The op rows of a decision; its commits have no offsets yet. Raises a DecisionError when it does not count."""
        record, attempt, who, reason = decision.record, decision.attempt, decision.who, decision.reason
        commit, rollback = decision.commit, decision.rollback
        decides_all = commit.count + rollback.count == record.rows
        if not (decides_all and attempt == 1 and not decision.checks_min and self.has_no_op_rows(record)):
            commit, rollback = rows_to_decide(decision, self.state_of(record, refresh=False))
        op_rows = self._commit_rows(record, commit, attempt, who, reason) if commit else []
        return op_rows + rollback_rows(decision, rollback) if rollback else op_rows

    # ------------------------------------------------------------------ places
    def _next_op_time(self, reopens: bool) -> datetime:
        """The time of the next op rows: not before the newest row, and for a reopen after every prepare and reopen so
        far. Only the order of op times counts; the machine's clock says which messages are due."""
        earliest = max(self.runtime.now(), self.view.last_time)
        if not reopens:
            return earliest
        last_send_ms = max(self.half.newest_ms(), self.reopened_ms)
        return max(earliest, datetime.fromtimestamp((last_send_ms + 1) / 1000, timezone.utc))

    def _commit_rows(self, record: HalfRecord, rows: RowSet, attempt: int, who: Who, reason: str | None) -> list[OpRow]:
        by_due = self._placer.by_due(record, rows, self.runtime.now())
        return commit_rows(record, by_due, attempt, who, reason)

    def _with_places(self, records: Sequence[HalfRecord], rows: list[OpRow]) -> list[OpRow]:
        """Add offsets to settling op rows. Or add place rows for the messages that these rows commit or free."""
        if not rows:
            return rows
        if not (self.view.waiting or any(r.delayed for r in records) or self._placer.keys.fifo_of(*records)):
            return with_offsets(rows, self.view.tails)
        now = self.runtime.now()
        batches = [OpenBatch(record, self.state_of(record, refresh=False)) for record in records]
        states = {o.record.half_id: o.state for o in batches}
        for row in rows:
            states[row.half_id or ""].fold(replace(row, op_time=self._op_time))
        only_commits = all(row.kind is OpKind.COMMIT for row in rows)
        pieces = self._placer.placeable(self._to_place(batches, now, only_commits), now)
        commits = [(r.half_id, r.file_no, r.ranges, r.attempt) for r in rows if r.kind is OpKind.COMMIT]
        if [(p.record.half_id, p.file_no, p.ranges, p.attempt) for p in pieces] == commits:  # nothing waits
            return with_offsets(rows, self.view.tails)
        return rows + with_offsets([place_row(piece) for piece in pieces], self.view.tails)

    def blocked_by(self, record: HalfRecord) -> list[str]:
        """Half batches whose pending messages block committed messages of this one, in send order."""
        if None not in self.view.waiting.get(record.half_id, {}):
            return []
        with self.table.lock:
            own_batch = self.open_batch(record.half_id)
            units = in_send_order(self._with_related([own_batch], (), (), only_commits=False))
        sent_ids = list(dict.fromkeys(batch.record.half_id for batch, _ in units))
        earlier_ids = sent_ids[: sent_ids.index(record.half_id)]
        return [half_id for half_id in earlier_ids if self.open_batch(half_id).state.count(RowState.PENDING)]

    def _to_place(
        self, opened: Sequence[OpenBatch], now: datetime, only_commits: bool = False, try_all: bool = False
    ) -> list[OpenBatch]:
        """``opened``, and the half batches whose messages may be due, or may wait for messages of ``opened``.

        ``only_commits``: ``opened`` rolls nothing back, so it frees nobody else. When all of it must wait, nothing can
        be placed, and the waiting half batches are not read; otherwise each message of a key would read all before it.
        ``try_all`` also tries the half batches that could not be read within the last :data:`TRY_AGAIN_S`.
        """
        opened_ids = {o.record.half_id for o in opened}
        due_ids = {
            h for h, counts in self.view.waiting.items() if any(d is not None and d <= now for d in counts)
        } - opened_ids
        if self.runtime.monotonic() - self._tried_s < TRY_AGAIN_S and not try_all:
            problems = {half_id: self.unplaceable[half_id] for half_id in self.unplaceable.keys() & due_ids}
        else:
            problems, self._tried_s = {}, self.runtime.monotonic()
        due_batches = self._open_due(due_ids - problems.keys(), problems)
        due_keyed = [o for o in due_batches if self._placer.keys.fifo_of(o.record)]
        try:
            batches = self._with_related(opened, due_batches, due_keyed, only_commits)
        except CorruptLogError as problem:
            if self._placer.keys.fifo_of(*(o.record for o in opened)):
                raise
            # Nobody knows what was sent before the due messages of FIFO topics.
            problems |= {o.record.half_id: problem for o in due_keyed}
            batches = [*(o for o in due_batches if o not in due_keyed), *opened]
        for half_id in problems.keys() - self.unplaceable.keys():
            logger.error("the due messages of half batch %r cannot be placed: %s", half_id, problems[half_id])
        self.unplaceable = problems
        return batches

    def _with_related(
        self,
        opened: Sequence[OpenBatch],
        due_batches: Sequence[OpenBatch],
        due_keyed: Sequence[OpenBatch],
        only_commits: bool,
    ) -> list[OpenBatch]:
        """``opened``, ``due_batches``, and the half batches that share a sharding key of a FIFO topic with one of
        these.

        CorruptLogError: a pending half batch cannot be read, and messages sent after it are to be placed, so nobody
        knows whether they share a key; or a waiting half batch cannot be read.
        """
        keyed = [*(o for o in opened if self._placer.keys.fifo_of(o.record)), *due_keyed]
        if not keyed:
            return [*due_batches, *opened]
        opened_ids, due_ids = ({o.record.half_id for o in batches} for batches in (opened, due_batches))
        prepared = self.maybe_open()
        pending_ids = {*self.open_of(prepared), *self.reopened(prepared)} - opened_ids - due_ids
        waiting_ids = (
            {h for h, counts in self.view.waiting.items() if None in counts} - opened_ids - due_ids - pending_ids
        )
        pending_batches, unreadable = self._open_pending(pending_ids, prepared)
        related = self._placer.keys.related
        if only_commits and waiting_ids and self._placer.all_wait(keyed, related(keyed, pending_batches)):
            waiting_keyed_ids = {o.record.half_id for o in keyed}
            return [o for o in [*due_batches, *opened] if o.record.half_id not in waiting_keyed_ids]
        others = related(keyed, [*pending_batches, *self._open_if_present(waiting_ids)])
        if unreadable:
            to_place = [batch for batch in [*keyed, *others] if batch.state.count(RowState.WAITING)]
            last_ms = max(map(last_sent_ms, to_place), default=-1)
            for sent_ms, problem in unreadable:
                if sent_ms <= last_ms:
                    raise problem
        return [*due_batches, *others, *opened]

    def _open_pending(
        self, half_ids: Collection[str], prepared: BatchIndex
    ) -> tuple[list[OpenBatch], list[tuple[int, CorruptLogError]]]:
        """Open pending half batches. For each one that cannot be read, return when it was sent (ms, at the earliest),
        and why."""
        batches: list[OpenBatch] = []
        unreadable = [(file.ms, file.problem) for file in prepared.unreadable]
        for half_id in sorted(half_ids):
            try:
                batches += self._open_if_present([half_id])
            except (LostFileError, UnreadableFileError) as problem:
                is_sent_once = half_id in prepared and half_id not in self.view.waiting
                unreadable.append((prepared[half_id].ms if is_sent_once else 0, problem))
        return batches, unreadable

    def _open_if_present(self, half_ids: Collection[str]) -> list[OpenBatch]:
        """Open these half batches. Those that have left are skipped: ``op`` tells of them in a version that we have not
        read, so the commit that is built here will lose its race and be built again."""
        batches: list[OpenBatch] = []
        for half_id in sorted(half_ids):
            try:
                batches.append(self.open_batch(half_id))
            except HalfBatchNotFoundError:
                if not self._has_left(half_id):
                    raise
        return batches

    def _open_due(self, half_ids: Collection[str], problems: dict[str, TxmqError]) -> list[OpenBatch]:
        """Open the half batches that have due messages. One that cannot be read waits on and delays no decision;
        ``problems`` gets its error."""
        batches: list[OpenBatch] = []
        for half_id in sorted(half_ids):
            try:
                for batch in self._open_if_present([half_id]):
                    self._placer.keys.open_rows(batch)  # reads its keys, if it has some and they are not in memory
                    batches.append(batch)
            except (CorruptLogError, HalfBatchNotFoundError) as problem:
                problems[half_id] = problem
        return batches

    def place_due(self) -> list[Placed]:
        """Place the delayed messages that are due; returns the messages that became visible."""

        def build() -> list[OpRow]:
            now = self.runtime.now()
            if not any(due is not None and due <= now for counts in self.view.waiting.values() for due in counts):
                self.unplaceable = {}
                return []
            pieces = self._placer.placeable(self._to_place([], now, try_all=True), now)
            return with_offsets([place_row(piece) for piece in pieces], self.view.tails)

        return placed_messages(self.append(build))

    # ------------------------------------------------------------------ what stays open
    def quarantine(
        self,
        record: HalfRecord,
        attempt: int,
        rows: Mapping[int, bytes],
        who: Who,
        reason: str,
        checks_min: int = 0,
    ) -> None:
        """Hide pending rows with at least ``checks_min`` answered checks, until they are resumed or resolved."""

        def build() -> list[OpRow]:
            state = self.state_of(record, refresh=False)
            pending = state.rows_in((RowState.PENDING,), attempt) & rows
            if checks_min:
                pending = state.checked_at_least(pending, checks_min)
            op_rows = rows_for(OpKind.QUARANTINE, record, pending, attempt, who, reason)
            return self._with_places([record], op_rows)

        self.append(build)
        reach("quarantined")

    def record_checks(self, checks: Sequence[UnknownCheck], pause_s: float = 0.0) -> None:
        """Count checks that were answered with UNKNOWN, all in one commit. A half batch is skipped when it had a check
        counted in the last ``pause_s`` seconds, or has left. HalfBatchLeftError: the only half batch has left."""

        def build() -> list[OpRow]:
            now = self.runtime.now()
            op_rows: list[OpRow] = []
            for check in checks:
                try:
                    state = self.state_of(check.record, refresh=False)
                except HalfBatchLeftError:
                    if len(checks) == 1:
                        raise
                    continue
                if not state.checked_lately(now, pause_s):
                    pending = state.rows_in((RowState.PENDING,), check.attempt) & check.rows
                    op_rows += rows_for(OpKind.CHECK, check.record, pending, check.attempt, Who.CHECK, check.reason)
            return op_rows

        self.append(build)
        reach("check counted")

    def reopen(
        self, record: HalfRecord, attempt: int, states: Sequence[RowState], new_attempt: int, who: Who, reason: str
    ) -> RowSet:
        """Make rows pending again. Returns the rows that this call reopened: only its caller may execute them.

        ``new_attempt`` is the same attempt after quarantine or discard (the outcome is unknown), and the next one after
        a rollback by check (under the old one it can no longer happen).
        """
        if new_attempt > ATTEMPTS_MAX:
            raise StaleAttemptError(
                f"half batch {record.half_id!r} was rolled back by checks {attempt} times: "
                "something stops every attempt"
            )
        reopened = NO_ROWS

        def build() -> list[OpRow]:
            nonlocal reopened
            reopened = self.state_of(record, refresh=False).rows_in(states, attempt)
            return rows_for(OpKind.REOPEN, record, reopened, new_attempt, who, reason)

        self.append(build, reopens=True)
        reach("reopened")
        return reopened

    def lease(self, records: Sequence[HalfRecord], seconds: float) -> datetime:
        """Keep checkers away from half batches whose local transactions are running. Returns when the lease ends."""
        until = self.runtime.now() + timedelta(seconds=seconds)

        def build() -> list[OpRow]:
            present = [record for record in records if not self.is_gone(record)]
            return [lease_row(record, until) for record in present]

        self.append(build)
        reach("lease written")
        return until

    def commit_executed(self, record: HalfRecord, attempt: int, rows: RowSet, reason: str) -> list[Placed]:
        """Commit rows whose local transaction is known to have committed. A log restored from an older copy may not
        know their attempt. Rows that are committed already stay unchanged."""

        def build() -> list[OpRow]:
            state = self.state_of(record, refresh=False)
            chosen = rows & state.rows_in(OPEN_STATES + ROLLED_BACK_STATES)
            closed = chosen - state.rows_in((RowState.PENDING,), attempt)
            op_rows = rows_for(OpKind.REOPEN, record, closed, attempt, Who.ADMIN, reason) if closed else []
            op_rows += self._commit_rows(record, chosen, attempt, Who.ADMIN, reason)
            return self._with_places([record], op_rows)

        return placed_messages(self.append(build, reopens=True))

    def overrule(self, record: HalfRecord, verdict: LocalTransactionState, reason: str) -> list[Placed]:
        """Apply a person's verdict to rows that are pending, quarantined or in conflict. VerdictConflictError: readers
        may have seen the messages to roll back, or no row is open and the opposite verdict is final."""

        def build() -> list[OpRow]:
            state = self.state_of(record, refresh=False)
            conflict = state.conflicting()
            if verdict is ROLLBACK_MESSAGE and conflict & state.rows_in(COMMITTED_STATES):
                raise VerdictConflictError(
                    f"half batch {record.half_id!r} has visible messages, which readers may have seen: only "
                    "COMMIT_MESSAGE can be confirmed; send messages that undo them if you must",
                    verdict=str(verdict),
                )
            rows: list[OpRow] = []
            for attempt in state.attempts(*OPEN_STATES, *ROLLED_BACK_STATES):
                final = state.rows_in(ROLLED_BACK_STATES, attempt) - conflict
                chosen = state.rows_in(OPEN_STATES + ROLLED_BACK_STATES, attempt) - final
                closed = chosen - state.rows_in((RowState.PENDING,), attempt)
                rows += rows_for(OpKind.REOPEN, record, closed, attempt, Who.ADMIN, reason)
                if verdict is COMMIT_MESSAGE:
                    rows += self._commit_rows(record, chosen, attempt, Who.ADMIN, reason)
                else:
                    rows += rows_for(OpKind.ROLLBACK, record, chosen, attempt, Who.ADMIN, reason)
            if conflict:  # a conflict row without an attempt ends it
                rows.append(resolution_row(record, verdict, reason))
            elif not rows and not state.count(*states_of(verdict)):
                raise VerdictConflictError(
                    f"{verdict} for half batch {record.half_id!r} comes too late: nothing of it is open, "
                    f"and its messages are {'rolled back' if verdict is COMMIT_MESSAGE else 'visible'}",
                    verdict=str(verdict),
                )
            return self._with_places([record], rows)

        return placed_messages(self.append(build, reopens=True))

    def _conflict_rows(self, late: Sequence[tuple[Decision, VerdictConflictError, RowSet]]) -> list[OpRow]:
        """Op rows that record verdicts which came too late, each with the rows that have the opposite verdict."""
        op_rows: list[OpRow] = []
        for decision, problem, opposed in late:
            new_rows = opposed - self.state_of(decision.record, refresh=False).conflicting()
            rows = rows_for(OpKind.CONFLICT, decision.record, new_rows, decision.attempt, decision.who, str(problem))
            op_rows += [replace(row, verdict=problem.verdict) for row in rows]
        return op_rows

    def mark(self) -> bool:
        """Move the low-water mark as far as possible. Returns False when nothing changed, or when other writers won
        every race; the next mark then catches up."""
        tries = 0

        def build() -> Sequence[OpRow]:
            nonlocal tries
            tries += 1
            return self._marker.next_mark() if tries <= MARK_TRIES_MAX else []

        with self.table.lock:
            self.read_anew()
            moves = bool(self.append(build))
        reach("mark moved")
        return moves

    def append(self, build: Callable[[], Sequence[OpRow]], *, reopens: bool = False) -> Sequence[OpRow]:
        """Build op rows from the newest state and commit them at the next version, or start again. Returns the rows
        written. ``reopens``: stamp them later than every prepare, because a reopened message counts as sent
        now."""
        commit_id = self.runtime.unique_id()
        rows: Sequence[OpRow] = ()

        def propose(version: int) -> Change | None:
            nonlocal rows
            self.catch_up()
            self._op_time = self._next_op_time(reopens)
            rows = build()
            if not rows:
                return None
            table = to_table(rows, self.table.version + 1, self._op_time, commit_id)
            file = self.table.write(table)
            awaited.written[file.path] = table
            return Change(add=[file])

        def landed(change: Change) -> bool:
            self.catch_up()
            return awaited.arrived

        with self.table.lock, self.awaiting(commit_id) as awaited:
            self.table.compare_and_set(propose, landed)
        return rows
