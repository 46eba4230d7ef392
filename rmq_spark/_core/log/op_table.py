"""Every op row is written here.

Each goes through :meth:`Ledger.append`, one compare-and-set loop that looks at the newest state first. So a row is
decided once, no verdict counts for a past attempt, and offsets have no gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime, timedelta, timezone

from rmq_spark._core.log.half_table import HalfRecord, HalfStore
from rmq_spark._core.log.key_order import Open
from rmq_spark._core.log.mark import Marker
from rmq_spark._core.log.op import STATS_COLUMNS, BatchState, Kind, OpRow, RowState, Who, to_table
from rmq_spark._core.log.op_reader import Follower
from rmq_spark._core.log.op_view import Tails
from rmq_spark._core.log.places import EPOCH, Piece, Placer, in_send_order
from rmq_spark._core.log.topics import TopicStore
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.table import Change, Table
from rmq_spark._core.vocabulary.options import ATTEMPTS_MAX
from rmq_spark._core.vocabulary.rows import NO_ROWS, Ranges, RowSet, ranges_count, runs
from rmq_spark._core.vocabulary.text import message_count
from rmq_spark._core.vocabulary.value import value
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, ROLLBACK_MESSAGE, LocalTransactionState
from rmq_spark.errors import HalfBatchLeftError, HalfBatchNotFoundError, StaleAttemptError, VerdictConflictError

MARK_TRIES_MAX = 20
"""A mark that loses so many races is left to the next time: others wait for this handle's lock meanwhile."""
OPEN_STATES = (RowState.PENDING, RowState.QUARANTINED)
COMMITTED_STATES = (RowState.COMMITTED, RowState.DECIDED)
ROLLED_BACK_STATES = (RowState.ROLLED_BACK, RowState.ROLLED_BACK_BY_CHECK, RowState.ROLLED_BACK_BY_DISCARD)


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
        The local transaction ran and said no, so it is final. What ``execute`` rolls back always is.
    ranges : mapping of int to Ranges
        The rows, by file number.
    """

    reason: str | None
    refused: bool
    ranges: Mapping[int, Ranges]


@value
class Decision:
    """Verdicts on rows of one half batch, which are under one attempt.

    Attributes
    ----------
    checks_min : int
        Answered checks that the rows must have: what was checked too often may have been reopened since, and is then
        asked about again.
    rolled_back : sequence of RolledBack
        The rows of ``rollback``, by their reasons. Empty: all have the decision's reason.
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
    """What became of a decision: what it made visible, or why it does not count."""

    placed: Sequence[Placed] = ()
    problem: DecisionError | None = None

    def or_raise(self) -> Sequence[Placed]:
        """What it made visible.

        Raises
        ------
        VerdictConflictError, StaleAttemptError
        """
        if self.problem is not None:
            raise self.problem
        return self.placed


@value
class AnsweredCheck:
    """A listener's answer that left rows of a half batch pending, which are under one attempt."""

    record: HalfRecord
    attempt: int
    rows: RowSet
    reason: str | None


DecisionError = VerdictConflictError | StaleAttemptError
"""Why a decision does not count."""
TOO_LATE = (VerdictConflictError, StaleAttemptError)
"""The same, to catch: somebody else was faster."""


class Ledger(Follower):
    """Writes the op markers of a commit log, each from what :class:`Follower` says at that moment.

    Parameters
    ----------
    has_left : callable
        Whether a half batch has left the table ``half``, as another handle on the log sees it.
    """

    def __init__(self, table: Table, half: HalfStore, topics: TopicStore, has_left: Callable[[str], bool]) -> None:
        super().__init__(table, half)
        self._has_left = has_left
        self._placer = Placer(half, topics)
        self._marker = Marker(self, half)
        self._op_time = EPOCH  # of the rows that are being built

    # ------------------------------------------------------------------ decisions
    def decide(self, decisions: Sequence[Decision]) -> list[Decided]:
        """Make verdicts final, all in one commit: commits with their offsets, rollbacks without. The first marker wins.

        Rows that have the same verdict already are left alone, so a decision may be repeated.

        Parameters
        ----------
        decisions : sequence of Decision
            Each about another half batch.

        Returns
        -------
        list of Decided
            For each decision. VerdictConflictError: the opposite verdict is final; a ``conflict`` row is left behind.
            StaleAttemptError: rows are under another attempt, or quarantined, or have too few checks, or left long ago.
            A decision that drops out does not stop the others.

        Raises
        ------
        ValueError
            When two decisions are about one half batch, or rows get both verdicts.

        Any other problem, such as a half file that is lost, is raised for all of them.
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
                    if (found := _after_leaving(decision, left)) is not None:
                        problems[decision.record.half_id] = found
            return self._with_places(decided, rows) + self._conflict_rows(late)

        placed: dict[str, list[Placed]] = {d.record.half_id: [] for d in decisions}
        for found in _placed(self.append(build)):  # of other half batches, too, which waited for these
            if found.half_id in placed:
                placed[found.half_id].append(found)
        return [Decided(placed[d.record.half_id], problems.get(d.record.half_id)) for d in decisions]

    def _decided_rows(self, decision: Decision) -> list[OpRow]:
        """The op rows of a decision, commits without their places; raises when it does not count."""
        record, attempt, who, reason = decision.record, decision.attempt, decision.who, decision.reason
        commit, rollback = decision.commit, decision.rollback
        decides_all = commit.count + rollback.count == record.rows
        if not (decides_all and attempt == 1 and not decision.checks_min and self.is_untouched(record)):
            commit, rollback = _that_count(decision, self.state_of(record, refresh=False))
        found = self._commit_rows(record, commit, attempt, who, reason) if commit else []
        return found + _rollback_rows(decision, rollback) if rollback else found

    # ------------------------------------------------------------------ places
    def _next_op_time(self, reopens: bool) -> datetime:
        """Not before the newest row's time; when something is reopened, after every prepare and reopen so far. Only the
        order of these times counts: our own clock tells what is due."""
        after = max(self.machine.now(), self.followed.last_time)
        if not reopens:
            return after
        prepared_ms = max(self._half.newest_ms(), self.reopened_ms)
        return max(after, datetime.fromtimestamp((prepared_ms + 1) / 1000, timezone.utc))

    def _commit_rows(
        self, record: HalfRecord, chosen: RowSet, attempt: int, who: Who, reason: str | None
    ) -> list[OpRow]:
        """Commit rows, a queue each, without their places."""
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
            for due, due_then in self._placer.by_due(record, chosen, self.machine.now())
            for file_no, bits in due_then.items()
            for file in [record.files[file_no]]
            for segment in file.segments
            if (ranges := runs(bits, segment.first, segment.last + 1))
        ]

    def _with_places(self, records: Sequence[HalfRecord], rows: list[OpRow]) -> list[OpRow]:
        """Settling op rows of half batches, with places for messages that they commit or that need not wait any
        more."""
        if not rows:
            return rows
        if not (self.waiting or any(r.delayed for r in records) or self._placer.keys.fifo_of(*records)):
            return _with_offsets(rows, self.tails)
        now = self.machine.now()
        opened = [Open(record, self.state_of(record, refresh=False)) for record in records]
        states = {o.record.half_id: o.state for o in opened}
        for row in rows:
            states[row.half_id or ""].fold(replace(row, op_time=self._op_time))
        only_commits = all(row.kind is Kind.COMMIT for row in rows)
        pieces = self._placer.placeable(self._to_place(opened, now, only_commits), now)
        commits = [(r.half_id, r.file_no, r.ranges, r.attempt) for r in rows if r.kind is Kind.COMMIT]
        if [(p.record.half_id, p.file_no, p.ranges, p.attempt) for p in pieces] == commits:  # nobody waits: a row each
            return _with_offsets(rows, self.tails)
        return rows + _with_offsets([_place_row(piece) for piece in pieces], self.tails)

    def holding_up(self, record: HalfRecord) -> list[str]:
        """Half batches with pending messages for which committed ones of this half batch wait, in the order in which
        they were sent."""
        if None not in self.waiting.get(record.half_id, {}):
            return []
        with self.table.lock:
            mine = self.open_batch(record.half_id)
            units = in_send_order(self._to_place([mine], EPOCH))
        sent = list(dict.fromkeys(batch.record.half_id for batch, _ in units))
        before = sent[: sent.index(record.half_id)]
        return [h for h in before if self.open_batch(h).state.count(RowState.PENDING)]

    def _to_place(self, opened: Sequence[Open], now: datetime, only_commits: bool = False) -> list[Open]:
        """These half batches, and others whose messages may be due, or may wait for those of ``opened``.

        Parameters
        ----------
        only_commits : bool
            Nothing of ``opened`` is rolled back now. When all that it commits has to wait for pending messages, then
            nothing that waited before waits for less, and it is not looked at: a key with thousands of messages that
            wait costs each further one no more than the first.
        """
        mine = {o.record.half_id for o in opened}
        due_ids = {h for h, counts in self.waiting.items() if any(d is not None and d <= now for d in counts)} - mine
        due = self._those_there(due_ids)
        keyed = [o for o in [*opened, *due] if self._placer.keys.fifo_of(o.record)]
        if not keyed:
            return [*due, *opened]
        prepared = self.prepared()
        pending_ids = {*self.open_of(prepared), *self.reopened(prepared)} - mine - due_ids
        waiting_ids = {h for h, counts in self.waiting.items() if None in counts} - mine - due_ids - pending_ids
        pending, related = self._those_there(pending_ids), self._placer.keys.related
        if only_commits and waiting_ids and self._placer.all_wait(keyed, related(keyed, pending)):
            stay = {o.record.half_id for o in keyed}
            return [o for o in [*due, *opened] if o.record.half_id not in stay]
        return [*due, *related(keyed, [*pending, *self._those_there(waiting_ids)]), *opened]

    def _those_there(self, half_ids: Collection[str]) -> list[Open]:
        """These half batches, without those that have left. ``op`` tells of that at a version that this handle has not
        read yet. So the commit that is built here is refused, and built anew."""
        found: list[Open] = []
        for half_id in sorted(half_ids):
            try:
                found.append(self.open_batch(half_id))
            except HalfBatchNotFoundError:
                if not self._has_left(half_id):
                    raise
        return found

    def place_due(self) -> list[Placed]:
        """Place the delayed messages whose time has come; returns what became visible."""

        def build() -> list[OpRow]:
            now = self.machine.now()
            if not any(due is not None and due <= now for counts in self.waiting.values() for due in counts):
                return []
            pieces = self._placer.placeable(self._to_place([], now), now)
            return _with_offsets([_place_row(piece) for piece in pieces], self.tails)

        return _placed(self.append(build))

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
        """Hide pending rows until somebody resumes or resolves them; those that have so many answered checks."""

        def build() -> list[OpRow]:
            state = self.state_of(record, refresh=False)
            still = state.rows_in((RowState.PENDING,), attempt) & rows
            if checks_min:
                still = state.checked_at_least(still, checks_min)
            op_rows = _rows_for(Kind.QUARANTINE, record, still, attempt, who, reason)
            return self._with_places([record], op_rows)

        self.append(build)
        reach("quarantined")

    def record_checks(self, checks: Sequence[AnsweredCheck], pause_s: float = 0.0) -> None:
        """Count answered checks that left rows pending, all in one commit. Of a half batch of which one was counted in
        the last seconds none is, and none of one that has left."""

        def build() -> list[OpRow]:
            now = self.machine.now()
            found: list[OpRow] = []
            for check in checks:
                try:
                    state = self.state_of(check.record, refresh=False)
                except HalfBatchLeftError:
                    if len(checks) == 1:
                        raise
                    continue
                if not state.checked_lately(now, pause_s):
                    still = state.rows_in((RowState.PENDING,), check.attempt) & check.rows
                    found += _rows_for(Kind.CHECK, check.record, still, check.attempt, Who.CHECK, check.reason)
            return found

        self.append(build)
        reach("check counted")

    def reopen(
        self, record: HalfRecord, attempt: int, states: Sequence[RowState], new_attempt: int, who: Who, reason: str
    ) -> RowSet:
        """Make rows pending again; returns those that this call reopened: nobody else has, and may execute them.

        The same attempt after quarantine or discard (nobody knows what happened), the next one after a rollback by
        check (it never happened and never will).
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
        """Keep checkers away from half batches whose local transactions are running; returns until when."""
        until = self.machine.now() + timedelta(seconds=seconds)

        def build() -> list[OpRow]:
            here = [record for record in records if not self.is_gone(record)]
            return [OpRow(Kind.LEASE, record.half_id, decided_by=Who.EXECUTE, until=until) for record in here]

        self.append(build)
        reach("lease written")
        return until

    def commit_executed(self, record: HalfRecord, attempt: int, rows: RowSet, reason: str) -> list[Placed]:
        """Commit rows whose local transaction a store has, under an attempt of which the log may know nothing (it was
        restored from an older copy). Rows that are committed already stay as they are."""

        def build() -> list[OpRow]:
            state = self.state_of(record, refresh=False)
            chosen = rows & state.rows_in(OPEN_STATES + ROLLED_BACK_STATES)
            closed = chosen - state.rows_in((RowState.PENDING,), attempt)
            op_rows = _rows_for(Kind.REOPEN, record, closed, attempt, Who.ADMIN, reason) if closed else []
            op_rows += self._commit_rows(record, chosen, attempt, Who.ADMIN, reason)
            return self._with_places([record], op_rows)

        return _placed(self.append(build, reopens=True))

    def overrule(self, record: HalfRecord, verdict: LocalTransactionState, reason: str) -> list[Placed]:
        """A person's verdict, for rows that are pending, quarantined or in conflict.

        Raises
        ------
        VerdictConflictError
            When messages are to be rolled back that readers may have seen.
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
            if conflict:  # ends here: without an attempt the row says so
                end = OpRow(Kind.CONFLICT, record.half_id, count=record.rows, decided_by=Who.ADMIN, reason=reason)
                rows.append(replace(end, verdict=str(verdict)))
            elif not rows and not state.count(*_states_of(verdict)):
                raise VerdictConflictError(
                    f"{verdict} for half batch {record.half_id!r} comes too late: nothing of it is open, "
                    f"and its messages are {'rolled back' if verdict is COMMIT_MESSAGE else 'visible'}",
                    verdict=str(verdict),
                )
            return self._with_places([record], rows)

        return _placed(self.append(build, reopens=True))

    def _conflict_rows(self, late: Sequence[tuple[Decision, VerdictConflictError, RowSet]]) -> list[OpRow]:
        """Op rows that put verdicts on record that came too late, with the rows that have the opposite one."""
        found: list[OpRow] = []
        for decision, problem, against in late:
            new = against - self.state_of(decision.record, refresh=False).conflicting()
            rows = _rows_for(Kind.CONFLICT, decision.record, new, decision.attempt, decision.who, str(problem))
            found += [replace(row, verdict=problem.verdict) for row in rows]
        return found

    def mark(self) -> bool:
        """Move the low-water mark as far as it goes; False when there is nothing new to say, or when other writers were
        faster each time: the next mark says it all."""
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
        """The one way to write op rows: build them from the newest state and commit at the next version, or again.
        Returns those that were written.

        Parameters
        ----------
        reopens : bool
            Whether there may be ``reopen`` rows among them: what they name is sent after all that is prepared by now.
        """
        commit_id = self.machine.unique_id()
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
    """Give commit and place rows, in their order, the next offsets of their queues; those that wait get none."""
    next_offsets = dict(tails)
    for row in rows:
        waits = row.kind is Kind.COMMIT and row.until is not None
        if row.topic is not None and row.queue_id is not None and not waits:
            queue = (row.topic, row.queue_id)
            row.queue_offset = next_offsets.get(queue, 0)
            next_offsets[queue] = row.queue_offset + row.count
    return rows


def _placed(rows: Sequence[OpRow]) -> list[Placed]:
    """What some op rows make visible."""
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
    """The rows that a decision gives this verdict, and for which the opposite one is final."""
    rows, opposite = (
        (decision.commit, ROLLED_BACK_STATES) if verdict is COMMIT_MESSAGE else (decision.rollback, COMMITTED_STATES)
    )
    return rows and rows & state.rows_in(opposite, decision.attempt)


def _that_count(decision: Decision, state: BatchState) -> tuple[RowSet, RowSet]:
    """The rows that a decision commits and rolls back, without those that it has decided before; raises when it does
    not count."""
    attempt = decision.attempt
    for verdict in (COMMIT_MESSAGE, ROLLBACK_MESSAGE):
        if against := _against(state, decision, verdict):
            raise _too_late(state, against, attempt, verdict)
    commit = _undecided(state, decision.commit, attempt, COMMIT_MESSAGE)
    rollback = _undecided(state, decision.rollback, attempt, ROLLBACK_MESSAGE)
    for undecided in (commit, rollback):
        if decision.checks_min and state.checked_at_least(undecided, decision.checks_min) != undecided:
            raise StaleAttemptError(
                f"attempt {attempt} of half batch {state.half_id!r} was reopened since it was checked "
                f"{decision.checks_min} times: it is asked about again"
            )
    return commit, rollback


def _too_late(state: BatchState, against: RowSet, attempt: int, verdict: LocalTransactionState) -> VerdictConflictError:
    kind = Kind.ROLLBACK if verdict is COMMIT_MESSAGE else Kind.COMMIT
    first = next((row for row in state.history if row.kind is kind and (row.attempt or 1) == attempt), OpRow(kind))
    return VerdictConflictError(
        f"{verdict} for {message_count(against.count)} of half batch {state.half_id!r}, attempt {attempt}, comes too "
        f"late: {first.kind} by {first.decided_by} at {first.op_time} is final. "
        "Find out which is true, then log.resolve(half_id, verdict, reason=…)",
        verdict=str(verdict),
    )


def _after_leaving(decision: Decision, left: HalfBatchLeftError) -> DecisionError | None:
    """What a decision means on a half batch that has left: nothing when it comes again, else it is too late."""
    kept = left.archived
    if kept is None:
        return StaleAttemptError(str(left))
    if decision.attempt != kept.attempt:
        return StaleAttemptError(f"a verdict under attempt {decision.attempt} comes too late: {left}")
    if kept.agrees(decision.commit.count, decision.rollback.count):
        if kept.committed and kept.not_committed:  # it is not kept which messages had which verdict
            return StaleAttemptError(f"nobody can tell any more whether these verdicts are those that count: {left}")
        return None
    verdict = COMMIT_MESSAGE if decision.commit.count > kept.committed else ROLLBACK_MESSAGE
    return VerdictConflictError(f"{verdict} comes too late: {left}", verdict=str(verdict))


def _undecided(state: BatchState, rows: RowSet, attempt: int, verdict: LocalTransactionState) -> RowSet:
    """Those rows that still wait for this verdict; raises when any is out of its reach."""
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
    """Op rows that roll back those of a decision's rows which still wait for it, each with its reason."""
    found: list[OpRow] = []
    for part in decision.rolled_back or [RolledBack(decision.reason, False, dict(rows.ranges()))]:
        refused = True if part.refused or decision.who is Who.EXECUTE else None
        mine = part.ranges
        if rows.count < decision.rollback.count:
            mine = {n: _within(rows.get(n, b""), ranges) for n, ranges in mine.items()}
        op_rows = _rows_of(Kind.ROLLBACK, decision.record, mine, decision.attempt, decision.who, part.reason)
        found += [replace(row, refused=refused) for row in op_rows]
    return found


def _within(bits: bytes, ranges: Ranges) -> Ranges:
    return tuple(run for first, last in ranges for run in runs(bits, first, last + 1))


def _rows_for(kind: Kind, record: HalfRecord, rows: RowSet, attempt: int, who: Who, reason: str | None) -> list[OpRow]:
    """Op rows that name these rows, as few as possible."""
    if rows.count == record.rows:
        return [_row(kind, record, None, None, record.rows, attempt, who, reason)]
    return _rows_of(kind, record, dict(rows.ranges()), attempt, who, reason)


def _rows_of(
    kind: Kind, record: HalfRecord, ranges: Mapping[int, Ranges], attempt: int, who: Who, reason: str | None
) -> list[OpRow]:
    counts = {file_no: ranges_count(of_file) for file_no, of_file in ranges.items()}
    if sum(counts.values()) == record.rows:
        return [_row(kind, record, None, None, record.rows, attempt, who, reason)]
    return [
        _row(kind, record, file_no, ranges[file_no], count, attempt, who, reason)
        for file_no, count in counts.items()
        if count
    ]


def _row(
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
