"""Writes every op row.

All writes go through :meth:`Ledger.append`, a compare-and-set loop that reads the newest state first. So a row is
decided once, a verdict on a past attempt never counts, and offsets have no gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime, timedelta, timezone

from rmq_spark._core.log.batch_state import COMMITTED_STATES, OPEN_STATES, ROLLED_BACK_STATES, BatchState, RowState
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.half_table import HalfTable
from rmq_spark._core.log.key_order import Open
from rmq_spark._core.log.mark import Marker
from rmq_spark._core.log.op import STATS_COLUMNS, Kind, OpRow, Who, to_table
from rmq_spark._core.log.op_reader import OpReader
from rmq_spark._core.log.op_view import Tails
from rmq_spark._core.log.places import EPOCH, Piece, Placer, in_send_order
from rmq_spark._core.log.topics import TopicTable
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.table import Change, Table
from rmq_spark._core.vocabulary.options import ATTEMPTS_MAX
from rmq_spark._core.vocabulary.remedy import decide_by_hand
from rmq_spark._core.vocabulary.rows import NO_ROWS, Ranges, RowSet, ranges_count, runs
from rmq_spark._core.vocabulary.text import message_count
from rmq_spark._core.vocabulary.value import value
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, ROLLBACK_MESSAGE, LocalTransactionState
from rmq_spark.errors import HalfBatchLeftError, HalfBatchNotFoundError, StaleAttemptError, VerdictConflictError

MARK_TRIES_MAX = 20
"""A mark that loses this many races is left to the next round, because it holds the lock of this handle meanwhile."""


@value
class Placed:
    """Messages of one queue that a decision made visible."""

    topic: str
    queue_id: int
    queue_offset: int
    count: int
    half_id: str = field(default="", compare=False)


@value
class RolledBack:
    """Rows that are rolled back for one reason.

    Attributes
    ----------
    reason : str or None
    refused : bool
        The local transaction ran and refused the rows, so the rollback is final. A rollback by ``execute`` always is.
    ranges : mapping of int to Ranges
        The rows, by file number.
    """

    reason: str | None
    refused: bool
    ranges: Mapping[int, Ranges]


@value
class Decision:
    """Verdicts on rows of one half batch under one attempt.

    Attributes
    ----------
    checks_min : int
        Answered checks that each row must have. A row with fewer was reopened after the check and is checked again.
    rolled_back : sequence of RolledBack
        The rows of ``rollback`` by reason. When it is empty, all have the decision's reason.
    """

    record: HalfRecord
    attempt: int
    commit: RowSet
    rollback: RowSet
    who: Who
    reason: str | None = None
    checks_min: int = 0
    rolled_back: Sequence[RolledBack] = ()


@value
class Decided:
    """The result of a decision: the messages that it made visible, or why it does not count."""

    placed: Sequence[Placed] = ()
    problem: DecisionError | None = None

    def or_raise(self) -> Sequence[Placed]:
        """Return the messages that the decision made visible.

        Raises
        ------
        VerdictConflictError, StaleAttemptError
        """
        if self.problem is not None:
            raise self.problem
        return self.placed


@value
class AnsweredCheck:
    """An answered check that left rows of a half batch pending. The rows are under one attempt."""

    record: HalfRecord
    attempt: int
    rows: RowSet
    reason: str | None


DecisionError = VerdictConflictError | StaleAttemptError
"""Why a decision does not count."""
TOO_LATE = (VerdictConflictError, StaleAttemptError)
"""The same classes, for ``except``: another writer was faster."""


class Ledger(OpReader):
    """Writes the op markers of a commit log, each from the newest state that :class:`OpReader` has read.

    Parameters
    ----------
    has_left : callable
        Whether a half batch has left the table ``half``, as another handle on the log sees it.
    """

    def __init__(self, table: Table, half: HalfTable, topics: TopicTable, has_left: Callable[[str], bool]) -> None:
        super().__init__(table, half)
        self._has_left = has_left
        self._placer = Placer(half, topics)
        self._marker = Marker(self, half)
        self._op_time = EPOCH  # of the op rows under construction

    # ------------------------------------------------------------------ decisions
    def decide(self, decisions: Sequence[Decision]) -> list[Decided]:
        """Make verdicts final, all in one commit: commits with their offsets, rollbacks without. The first marker wins.

        Rows that already have the same verdict stay unchanged, so a decision may be repeated.

        Parameters
        ----------
        decisions : sequence of Decision
            At most one for each half batch.

        Returns
        -------
        list of Decided
            One for each decision. Its problem is a VerdictConflictError when the opposite verdict is final (a
            ``conflict`` row records this), and a StaleAttemptError when rows are under another attempt, are
            quarantined, have too few checks, or left long ago. A decision that fails does not stop the others.

        Raises
        ------
        ValueError
            When two decisions are about one half batch, or rows get both verdicts.

        Any other problem, such as a lost half file, fails all decisions.
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
                    late.append((decision, problem, _against(state, decision, LocalTransactionState(problem.verdict))))
                except StaleAttemptError as problem:
                    problems[decision.record.half_id] = problem
                except HalfBatchLeftError as left:
                    if (outcome := _problem_after_leaving(decision, left)) is not None:
                        problems[decision.record.half_id] = outcome
            return self._with_places(decided, rows) + self._conflict_rows(late)

        placed: dict[str, list[Placed]] = {d.record.half_id: [] for d in decisions}
        for outcome in _placed_messages(self.append(build)):  # also of half batches that waited for these
            if outcome.half_id in placed:
                placed[outcome.half_id].append(outcome)
        return [Decided(placed[d.record.half_id], problems.get(d.record.half_id)) for d in decisions]

    def _decided_rows(self, decision: Decision) -> list[OpRow]:
        """The op rows of a decision; its commits have no offsets yet. Raises a DecisionError when it does not count."""
        record, attempt, who, reason = decision.record, decision.attempt, decision.who, decision.reason
        commit, rollback = decision.commit, decision.rollback
        decides_all = commit.count + rollback.count == record.rows
        if not (decides_all and attempt == 1 and not decision.checks_min and self.has_no_op_rows(record)):
            commit, rollback = _rows_to_decide(decision, self.state_of(record, refresh=False))
        op_rows = self._commit_rows(record, commit, attempt, who, reason) if commit else []
        return op_rows + _rollback_rows(decision, rollback) if rollback else op_rows

    # ------------------------------------------------------------------ places
    def _next_op_time(self, reopens: bool) -> datetime:
        """The time of the next op rows: not before the newest row, and for a reopen after every prepare and reopen so
        far. Only the order of these times counts; the machine's clock says which messages are due."""
        earliest = max(self.runtime.now(), self.followed.last_time)
        if not reopens:
            return earliest
        last_send_ms = max(self._half.newest_ms(), self.reopened_ms)
        return max(earliest, datetime.fromtimestamp((last_send_ms + 1) / 1000, timezone.utc))

    def _commit_rows(self, record: HalfRecord, rows: RowSet, attempt: int, who: Who, reason: str | None) -> list[OpRow]:
        """Commit rows without offsets, one for each due time, half file and queue."""
        return [
            OpRow(
                Kind.COMMIT,
                record.half_id,
                file_no,
                ranges,
                ranges_count(ranges),
                attempt,
                who,
                reason,
                segment.topic,
                segment.queue_id,
                path=file.path,
                file_rows=file.rows,
                transaction_per=record.header.transaction_per,
                producer_group=record.header.producer_group,
                until=due,
            )
            for due, due_rows in self._placer.by_due(record, rows, self.runtime.now())
            for file_no, bits in due_rows.items()
            for file in [record.files[file_no]]
            for segment in file.segments
            if (ranges := runs(bits, segment.first, segment.last + 1))
        ]

    def _with_places(self, records: Sequence[HalfRecord], rows: list[OpRow]) -> list[OpRow]:
        """Add offsets to settling op rows, or place rows for the messages that they commit or set free."""
        if not rows:
            return rows
        if not (self.waiting or any(r.delayed for r in records) or self._placer.keys.fifo_of(*records)):
            return _with_offsets(rows, self.tails)
        now = self.runtime.now()
        batches = [Open(record, self.state_of(record, refresh=False)) for record in records]
        states = {o.record.half_id: o.state for o in batches}
        for row in rows:
            states[row.half_id or ""].fold(replace(row, op_time=self._op_time))
        only_commits = all(row.kind is Kind.COMMIT for row in rows)
        pieces = self._placer.placeable(self._to_place(batches, now, only_commits), now)
        commits = [(r.half_id, r.file_no, r.ranges, r.attempt) for r in rows if r.kind is Kind.COMMIT]
        if [(p.record.half_id, p.file_no, p.ranges, p.attempt) for p in pieces] == commits:  # nothing waits
            return _with_offsets(rows, self.tails)
        return rows + _with_offsets([_place_row(piece) for piece in pieces], self.tails)

    def holding_up(self, record: HalfRecord) -> list[str]:
        """Half batches whose pending messages hold up committed messages of this one, in send order."""
        if None not in self.waiting.get(record.half_id, {}):
            return []
        with self.table.lock:
            own_batch = self.open_batch(record.half_id)
            units = in_send_order(self._to_place([own_batch], EPOCH))
        sent_ids = list(dict.fromkeys(batch.record.half_id for batch, _ in units))
        earlier_ids = sent_ids[: sent_ids.index(record.half_id)]
        return [half_id for half_id in earlier_ids if self.open_batch(half_id).state.count(RowState.PENDING)]

    def _to_place(self, opened: Sequence[Open], now: datetime, only_commits: bool = False) -> list[Open]:
        """``opened``, and the half batches whose messages may be due or may wait for those of ``opened``.

        Parameters
        ----------
        only_commits : bool
            True when nothing of ``opened`` is rolled back. If all that it commits then waits for pending messages, no
            earlier message is set free, and the waiting half batches are not read. So a further message of a key costs
            the same, however many wait already.
        """
        opened_ids = {o.record.half_id for o in opened}
        due_ids = {
            h for h, counts in self.waiting.items() if any(d is not None and d <= now for d in counts)
        } - opened_ids
        due_batches = self._open_if_present(due_ids)
        keyed = [o for o in [*opened, *due_batches] if self._placer.keys.fifo_of(o.record)]
        if not keyed:
            return [*due_batches, *opened]
        prepared = self.prepared()
        pending_ids = {*self.open_of(prepared), *self.reopened(prepared)} - opened_ids - due_ids
        waiting_ids = {h for h, counts in self.waiting.items() if None in counts} - opened_ids - due_ids - pending_ids
        pending_batches, related = self._open_if_present(pending_ids), self._placer.keys.related
        if only_commits and waiting_ids and self._placer.all_wait(keyed, related(keyed, pending_batches)):
            waiting_keyed_ids = {o.record.half_id for o in keyed}
            return [o for o in [*due_batches, *opened] if o.record.half_id not in waiting_keyed_ids]
        return [*due_batches, *related(keyed, [*pending_batches, *self._open_if_present(waiting_ids)]), *opened]

    def _open_if_present(self, half_ids: Collection[str]) -> list[Open]:
        """Open these half batches, except those that have left. ``op`` says so at a version that this handle has not
        read yet, so the commit that is built here is refused and built again."""
        batches: list[Open] = []
        for half_id in sorted(half_ids):
            try:
                batches.append(self.open_batch(half_id))
            except HalfBatchNotFoundError:
                if not self._has_left(half_id):
                    raise
        return batches

    def place_due(self) -> list[Placed]:
        """Place the delayed messages that are due; returns the messages that became visible."""

        def build() -> list[OpRow]:
            now = self.runtime.now()
            if not any(due is not None and due <= now for counts in self.waiting.values() for due in counts):
                return []
            pieces = self._placer.placeable(self._to_place([], now), now)
            return _with_offsets([_place_row(piece) for piece in pieces], self.tails)

        return _placed_messages(self.append(build))

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
            op_rows = _rows_for(Kind.QUARANTINE, record, pending, attempt, who, reason)
            return self._with_places([record], op_rows)

        self.append(build)
        reach("quarantined")

    def record_checks(self, checks: Sequence[AnsweredCheck], pause_s: float = 0.0) -> None:
        """Count answered checks that left rows pending, all in one commit. Skips half batches that had a check counted
        in the last ``pause_s`` seconds, and those that have left; when the only one has left, HalfBatchLeftError is
        raised."""

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
                    op_rows += _rows_for(Kind.CHECK, check.record, pending, check.attempt, Who.CHECK, check.reason)
            return op_rows

        self.append(build)
        reach("check counted")

    def reopen(
        self, record: HalfRecord, attempt: int, states: Sequence[RowState], new_attempt: int, who: Who, reason: str
    ) -> RowSet:
        """Make rows pending again. Returns the rows that this call reopened: only its caller may execute them.

        ``new_attempt`` is the same attempt after quarantine or discard (the outcome is unknown), and the next one after
        a rollback by check (the transaction never happened and never will).
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
            return _rows_for(Kind.REOPEN, record, reopened, new_attempt, who, reason)

        self.append(build, reopens=True)
        reach("reopened")
        return reopened

    def lease(self, records: Sequence[HalfRecord], seconds: float) -> datetime:
        """Keep checkers away from half batches whose local transactions are running. Returns when the lease ends."""
        until = self.runtime.now() + timedelta(seconds=seconds)

        def build() -> list[OpRow]:
            present = [record for record in records if not self.is_gone(record)]
            return [OpRow(Kind.LEASE, record.half_id, decided_by=Who.EXECUTE, until=until) for record in present]

        self.append(build)
        reach("lease written")
        return until

    def commit_executed(self, record: HalfRecord, attempt: int, rows: RowSet, reason: str) -> list[Placed]:
        """Commit rows whose local transaction is known to have committed, under an attempt that a log restored from an
        older copy may not know. Rows that are committed already stay unchanged."""

        def build() -> list[OpRow]:
            state = self.state_of(record, refresh=False)
            chosen = rows & state.rows_in(OPEN_STATES + ROLLED_BACK_STATES)
            closed = chosen - state.rows_in((RowState.PENDING,), attempt)
            op_rows = _rows_for(Kind.REOPEN, record, closed, attempt, Who.ADMIN, reason) if closed else []
            op_rows += self._commit_rows(record, chosen, attempt, Who.ADMIN, reason)
            return self._with_places([record], op_rows)

        return _placed_messages(self.append(build, reopens=True))

    def overrule(self, record: HalfRecord, verdict: LocalTransactionState, reason: str) -> list[Placed]:
        """Apply a person's verdict to rows that are pending, quarantined or in conflict.

        Raises
        ------
        VerdictConflictError
            When readers may have seen the messages to roll back, or when no row is open and the opposite verdict is
            final.
        """

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
                rows += _rows_for(Kind.REOPEN, record, closed, attempt, Who.ADMIN, reason)
                if verdict is COMMIT_MESSAGE:
                    rows += self._commit_rows(record, chosen, attempt, Who.ADMIN, reason)
                else:
                    rows += _rows_for(Kind.ROLLBACK, record, chosen, attempt, Who.ADMIN, reason)
            if conflict:  # a conflict row without an attempt ends it
                end_row = OpRow(Kind.CONFLICT, record.half_id, count=record.rows, decided_by=Who.ADMIN, reason=reason)
                rows.append(replace(end_row, verdict=str(verdict)))
            elif not rows and not state.count(*_states_of(verdict)):
                raise VerdictConflictError(
                    f"{verdict} for half batch {record.half_id!r} comes too late: nothing of it is open, "
                    f"and its messages are {'rolled back' if verdict is COMMIT_MESSAGE else 'visible'}",
                    verdict=str(verdict),
                )
            return self._with_places([record], rows)

        return _placed_messages(self.append(build, reopens=True))

    def _conflict_rows(self, late: Sequence[tuple[Decision, VerdictConflictError, RowSet]]) -> list[OpRow]:
        """Op rows that record verdicts which came too late, each with the rows that have the opposite verdict."""
        op_rows: list[OpRow] = []
        for decision, problem, opposed in late:
            new_rows = opposed - self.state_of(decision.record, refresh=False).conflicting()
            rows = _rows_for(Kind.CONFLICT, decision.record, new_rows, decision.attempt, decision.who, str(problem))
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
            self._follow_anew()
            moves = bool(self.append(build))
        reach("mark moved")
        return moves

    def append(self, build: Callable[[], Sequence[OpRow]], *, reopens: bool = False) -> Sequence[OpRow]:
        """Build op rows from the newest state and commit them at the next version, or start again. Returns the rows
        written. Nothing else writes op rows.

        Parameters
        ----------
        reopens : bool
            Whether there may be ``reopen`` rows. Their messages are sent after everything that is prepared by now.
        """
        commit_id = self.runtime.unique_id()
        rows: Sequence[OpRow] = ()

        def propose(version: int) -> Change | None:
            nonlocal rows
            self._catch_up()
            self._op_time = self._next_op_time(reopens)
            rows = build()
            if not rows:
                return None
            table = to_table(rows, self.table.version + 1, self._op_time, commit_id)
            file = self.table.write(table, "op", STATS_COLUMNS)
            self._written[file.path] = table
            return Change(add=[file])

        def landed(change: Change) -> bool:
            self._catch_up()
            return self._arrived

        with self.table.lock:
            self._awaited, self._arrived = commit_id, False
            try:
                self.table.compare_and_set(propose, landed)
            finally:
                self._awaited = None
                self._written = {}
        return rows


def _with_offsets(rows: list[OpRow], tails: Tails) -> list[OpRow]:
    """Give commit and place rows, in their order, the next offsets of their queues; commits that wait get none."""
    next_offsets = dict(tails)
    for row in rows:
        waits = row.kind is Kind.COMMIT and row.until is not None
        if row.topic is not None and row.queue_id is not None and not waits:
            queue = (row.topic, row.queue_id)
            row.queue_offset = next_offsets.get(queue, 0)
            next_offsets[queue] = row.queue_offset + row.count
    return rows


def _placed_messages(rows: Sequence[OpRow]) -> list[Placed]:
    """The messages that op rows make visible."""
    return [
        Placed(r.topic, r.queue_id, r.queue_offset, r.count, r.half_id or "")
        for r in rows
        if r.topic is not None and r.queue_id is not None and r.queue_offset is not None
    ]


def _place_row(piece: Piece) -> OpRow:
    header, file = piece.record.header, piece.record.files[piece.file_no]
    return OpRow(
        Kind.PLACE,
        header.half_id,
        piece.file_no,
        piece.ranges,
        piece.count,
        piece.attempt,
        topic=piece.topic,
        queue_id=piece.queue_id,
        path=file.path,
        file_rows=file.rows,
        transaction_per=header.transaction_per,
        producer_group=header.producer_group,
        until=piece.due,
    )


def _states_of(verdict: LocalTransactionState) -> tuple[RowState, ...]:
    return COMMITTED_STATES if verdict is COMMIT_MESSAGE else ROLLED_BACK_STATES


def _against(state: BatchState, decision: Decision, verdict: LocalTransactionState) -> RowSet:
    """The rows to which a decision gives this verdict although the opposite one is final."""
    rows, opposite = (
        (decision.commit, ROLLED_BACK_STATES) if verdict is COMMIT_MESSAGE else (decision.rollback, COMMITTED_STATES)
    )
    return rows and rows & state.rows_in(opposite, decision.attempt)


def _rows_to_decide(decision: Decision, state: BatchState) -> tuple[RowSet, RowSet]:
    """The rows that a decision still has to commit and to roll back. Raises a DecisionError when it does not count."""
    attempt = decision.attempt
    for verdict in (COMMIT_MESSAGE, ROLLBACK_MESSAGE):
        if opposed := _against(state, decision, verdict):
            raise _too_late_error(state, opposed, attempt, verdict)
    commit = _undecided(state, decision.commit, attempt, COMMIT_MESSAGE)
    rollback = _undecided(state, decision.rollback, attempt, ROLLBACK_MESSAGE)
    for undecided in (commit, rollback):
        if decision.checks_min and state.checked_at_least(undecided, decision.checks_min) != undecided:
            raise StaleAttemptError(
                f"attempt {attempt} of half batch {state.half_id!r} was reopened since it was checked "
                f"{decision.checks_min} times: it is asked about again"
            )
    return commit, rollback


def _too_late_error(
    state: BatchState, opposed: RowSet, attempt: int, verdict: LocalTransactionState
) -> VerdictConflictError:
    kind = Kind.ROLLBACK if verdict is COMMIT_MESSAGE else Kind.COMMIT
    final_row = next((row for row in state.history if row.kind is kind and (row.attempt or 1) == attempt), OpRow(kind))
    return VerdictConflictError(
        f"{verdict} for {message_count(opposed.count)} of half batch {state.half_id!r}, attempt {attempt}, comes too "
        f"late, since {final_row.kind} by {final_row.decided_by} at {final_row.op_time} is final",
        verdict=str(verdict),
        remedy=decide_by_hand(state.half_id, "find out which is true, then "),
    )


def _problem_after_leaving(decision: Decision, left: HalfBatchLeftError) -> DecisionError | None:
    """Why a decision on a half batch that has left does not count; None when it repeats the known outcome."""
    archived = left.archived
    if archived is None:
        return StaleAttemptError(str(left))
    if decision.attempt != archived.attempt:
        return StaleAttemptError(f"a verdict under attempt {decision.attempt} comes too late: {left}")
    if archived.agrees(decision.commit.count, decision.rollback.count):
        if archived.committed and archived.not_committed:  # the archive does not say which messages had which verdict
            return StaleAttemptError(f"nobody can tell any more whether these verdicts are those that count: {left}")
        return None
    verdict = COMMIT_MESSAGE if decision.commit.count > archived.committed else ROLLBACK_MESSAGE
    return VerdictConflictError(f"{verdict} comes too late: {left}", verdict=str(verdict))


def _undecided(state: BatchState, rows: RowSet, attempt: int, verdict: LocalTransactionState) -> RowSet:
    """The rows that still wait for this verdict. Raises StaleAttemptError when a row can no longer get it."""
    waiting = rows and rows & state.rows_in((RowState.PENDING,), attempt)
    if waiting.count == rows.count:
        return waiting
    decided = rows & state.rows_in(_states_of(verdict), attempt)
    rest = rows.count - waiting.count - decided.count
    if rest:
        raise StaleAttemptError(
            f"{verdict} under attempt {attempt} for {message_count(rest)} of half batch {state.half_id!r} does not "
            f"count: {'it was' if rest == 1 else 'they were'} reopened under another attempt, or quarantined"
        )
    return waiting


def _rollback_rows(decision: Decision, rows: RowSet) -> list[OpRow]:
    """Op rows that roll back ``rows``, each with its reason. ``rows`` are those of the decision that still wait for
    it."""
    rollback_rows: list[OpRow] = []
    for part in decision.rolled_back or [RolledBack(decision.reason, False, dict(rows.ranges()))]:
        refused = True if part.refused or decision.who is Who.EXECUTE else None
        part_ranges = part.ranges
        if rows.count < decision.rollback.count:
            part_ranges = {n: _ranges_within(rows.get(n, b""), ranges) for n, ranges in part_ranges.items()}
        op_rows = _op_rows_of(Kind.ROLLBACK, decision.record, part_ranges, decision.attempt, decision.who, part.reason)
        rollback_rows += [replace(row, refused=refused) for row in op_rows]
    return rollback_rows


def _ranges_within(bits: bytes, ranges: Ranges) -> Ranges:
    return tuple(run for first, last in ranges for run in runs(bits, first, last + 1))


def _rows_for(kind: Kind, record: HalfRecord, rows: RowSet, attempt: int, who: Who, reason: str | None) -> list[OpRow]:
    """As few op rows as possible that name these rows."""
    if rows.count == record.rows:
        return [_op_row(kind, record, None, None, record.rows, attempt, who, reason)]
    return _op_rows_of(kind, record, dict(rows.ranges()), attempt, who, reason)


def _op_rows_of(
    kind: Kind, record: HalfRecord, ranges: Mapping[int, Ranges], attempt: int, who: Who, reason: str | None
) -> list[OpRow]:
    counts = {file_no: ranges_count(file_ranges) for file_no, file_ranges in ranges.items()}
    if sum(counts.values()) == record.rows:
        return [_op_row(kind, record, None, None, record.rows, attempt, who, reason)]
    return [
        _op_row(kind, record, file_no, ranges[file_no], count, attempt, who, reason)
        for file_no, count in counts.items()
        if count
    ]


def _op_row(
    kind: Kind,
    record: HalfRecord,
    file_no: int | None,
    ranges: Ranges | None,
    count: int,
    attempt: int,
    who: Who,
    reason: str | None,
) -> OpRow:
    return OpRow(kind, record.half_id, file_no, ranges, count, attempt, who, reason,
                 producer_group=record.header.producer_group)  # fmt: skip
