"""The ``op`` table: what is decided, what is open, and the next offset of every queue.

Every decision goes through :meth:`Ledger.append`, one compare-and-set loop that looks at the newest state first. So a
row is decided once, a past attempt is never decided, and offsets have no gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.commitlog.follow import Followed, Tails, Waiting, settled_rows
from rmq_spark.commitlog.half_store import HalfRecord, HalfStore, Prepared
from rmq_spark.commitlog.op import NO_OPS, STATS_COLUMNS, BatchState, Kind, OpRow, RowState, Who, to_table
from rmq_spark.commitlog.placing import EPOCH, Open, Piece, Placer
from rmq_spark.commitlog.rows import NO_ROWS, Ranges, RowSet, ranges_count, runs
from rmq_spark.commitlog.topics import TopicStore
from rmq_spark.config import ATTEMPTS_MAX
from rmq_spark.errors import StaleAttemptError, VerdictConflictError
from rmq_spark.storage.table import Change, Table
from rmq_spark.transaction import COMMIT_MESSAGE, ROLLBACK_MESSAGE, LocalTransactionState

HALF_IDS_KEPT = 10_000
TAIL_CHUNKS_MAX = 64

OPEN_STATES = (RowState.PENDING, RowState.QUARANTINED)
COMMITTED_STATES = (RowState.COMMITTED, RowState.DECIDED)
ROLLED_BACK_STATES = (RowState.ROLLED_BACK, RowState.ROLLED_BACK_BY_CHECK, RowState.ROLLED_BACK_BY_DISCARD)


@dataclass(frozen=True)
class Placed:
    """Messages of one queue that a decision made visible."""

    topic: str
    queue_id: int
    queue_offset: int
    count: int
    half_id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Decision:
    """Verdicts on rows of one half batch, which are under one attempt.

    Attributes
    ----------
    checks_min : int
        Answered checks that the rows must have: what was checked too often may have been reopened since, and is then
        asked about again.
    """

    record: HalfRecord
    attempt: int
    commit: RowSet
    rollback: RowSet
    who: Who
    reason: str | None = None
    checks_min: int = 0


@dataclass(frozen=True)
class Decided:
    """What became of a decision: what it made visible, or why it does not count."""

    placed: Sequence[Placed] = ()
    problem: DecisionError | None = None


DecisionError = VerdictConflictError | StaleAttemptError
"""Why a decision does not count."""


class Ledger:
    """The op markers of a commit log, followed commit by commit."""

    def __init__(self, table: Table, half: HalfStore, topics: TopicStore) -> None:
        self.table = table
        self.machine = table.machine
        self._half = half
        self._placer = Placer(half, topics)
        self._followed = Followed()
        self._known_whole: dict[str, None] = {}  # half batches with no op rows before the kept ones, oldest first
        self._op_time = EPOCH  # of the rows that are being built
        self._awaited: str | None = None  # the commit id that is being written
        self._arrived = False  # it was among the rows that were followed

    # ------------------------------------------------------------------ following the table
    def refresh(self) -> int:
        """Read the op rows that are new, and return the version they reach."""
        with self.table.lock:
            self.table.refresh()
            return self._catch_up()

    def _catch_up(self) -> int:
        before, version = self._followed, self.table.version
        if version <= before.version:
            return version
        if before.version < 0:
            before = self._start()
        rows = self._read_between(before.version + 1, version)
        after = before.after(rows, version)
        # An exception (an interrupt, a full memory) may end us at any line: each leaves what is true.
        for half_id in _cut_off(before, rows, after):
            self._known_whole.pop(half_id, None)
        if self._awaited is not None and pc.any(pc.equal(rows["commit_id"], self._awaited)).as_py():
            self._arrived = True
        self._followed = after
        return version

    def _follow_anew(self) -> None:
        """Read what op says from the table, whatever was kept: nobody looks again at what a mark passes."""
        version = self.table.refresh()
        start = self._start()
        self._followed = start.after(self._read_between(start.version + 1, version), version)

    def _start(self) -> Followed:
        """Where a cold start goes on from: the newest mark."""
        actions = self.table.actions()
        marked = pc.max(actions["max.low_water"]).as_py() if actions.num_rows else None
        if marked is None:
            return Followed()
        self._known_whole.clear()  # what was expected before may have been decided, and passed by the mark
        followed, knows_conflicts = Followed.from_mark(
            self.table.read(actions.filter(pc.equal(actions["max.low_water"], marked))["path"].to_pylist())
        )
        if knows_conflicts:
            return followed
        older = self._read_between(0, followed.version)
        older = older.filter(_is(older, Kind.CONFLICT))
        return replace(followed, rows=older, conflicts=Followed().after(older, 0).conflicts)

    def _read_between(self, first: int, last: int) -> pa.Table:
        """The op rows of these versions, in version order."""
        actions = self.table.actions()
        if actions.num_rows == 0:
            return NO_OPS
        new = pc.fill_null(pc.greater_equal(actions["max.version"], first), True)
        # Not filtered by the reader: it passes over what a footer says is outside, and nothing guards that from a
        # flipped bit.
        rows = self.table.read(actions.filter(new)["path"].to_pylist())
        between = pc.and_(pc.greater_equal(rows["version"], first), pc.less_equal(rows["version"], last))
        return rows.filter(between).sort_by("version")

    # ------------------------------------------------------------------ questions
    @property
    def low_water_ms(self) -> int:
        """Prepare time (ms) up to which every half batch is settled, but for those reopened later."""
        return self._followed.low_water

    def ms_before_prepare(self) -> int:
        """After which time a half batch has to be prepared now: nobody looks for what is open below the mark, and what
        was reopened by now was sent before it, whatever the clocks say."""
        self.refresh()
        return max(self.low_water_ms, self.reopened_ms)

    @property
    def reopened_ms(self) -> int:
        """When a transaction was last reopened, of those whose op rows are kept."""
        rows = self._followed.rows
        newest = pc.max(rows.filter(_is(rows, Kind.REOPEN))["op_time"]).as_py()
        return 0 if newest is None else int(newest.timestamp() * 1000)

    def may_hide(self, rewritten_below: str) -> bool:
        """True when other files lie below the mark, rewritten by somebody, than did when it was made: they may hold
        rows from above it, which may be open. Nothing is prepared below the mark, so all that comes there is rewritten.
        """
        return bool(rewritten_below) and rewritten_below != self._followed.rewritten_below

    @property
    def tails(self) -> Tails:
        """The next offset of every queue that has messages."""
        return self._followed.tails

    @property
    def waiting(self) -> Waiting:
        """Committed messages that have no place yet, by half id and the time at which they are due (None: when an
        earlier message of their sharding key is decided)."""
        return self._followed.waiting

    @property
    def conflicts(self) -> frozenset[str]:
        """Half batches with a verdict that came too late and that no person has resolved yet."""
        return self._followed.conflicts

    @property
    def rows_kept(self) -> int:
        """How many op rows are kept in memory."""
        return int(self._followed.rows.num_rows)

    @property
    def half_ids_kept(self) -> int:
        """How many half batches are kept in memory as having all their op rows among the kept ones."""
        return len(self._known_whole)

    def rows_of(self, record: HalfRecord) -> pa.Table:
        """The op rows of one half batch, in version order."""
        half_id = record.half_id
        followed = self._followed
        settled = record.prepared_ms <= followed.low_water and half_id not in followed.waiting
        if settled:  # its markers may be older than the kept ones
            return self._scan([half_id])
        if half_id not in self._known_whole:
            # Somebody's OPTIMIZE gives old rows a new prepare time: look once whether there are older markers.
            if self._older([half_id]).num_rows:
                return self._scan([half_id])
            self._remember_whole([half_id])
        return followed.rows.filter(pc.equal(followed.rows["half_id"], half_id))

    def expect(self, half_ids: Sequence[str]) -> None:
        """Tell of half batches that are about to be prepared: their op markers are all still to come."""
        with self.table.lock:
            self._remember_whole(half_ids)

    def forget(self, half_ids: Sequence[str]) -> None:
        """Take :meth:`expect` back."""
        with self.table.lock:
            for half_id in half_ids:
                self._known_whole.pop(half_id, None)

    def _remember_whole(self, half_ids: Iterable[str]) -> None:
        self._known_whole.update(dict.fromkeys(half_ids))
        while len(self._known_whole) > HALF_IDS_KEPT:
            del self._known_whole[next(iter(self._known_whole))]

    def _scan(self, half_ids: Sequence[str], before: int | None = None) -> pa.Table:
        where = pc.field("half_id").isin(list(half_ids))
        if before is not None:
            where &= pc.field("version") < before
        return self.table.read(self.table.actions()["path"].to_pylist(), None, where).sort_by("version")

    def _older(self, half_ids: Sequence[str]) -> pa.Table:
        """The op rows of half batches before those that are kept in memory."""
        since = self._followed.since
        return self._scan(half_ids, before=since) if since else NO_OPS

    def state_of(self, record: HalfRecord, refresh: bool = True) -> BatchState:
        """What the newest op markers say of one half batch."""
        with self.table.lock:
            if refresh:
                self.refresh()
            state = record.fresh_state()
            for row in self.rows_of(record).to_pylist():
                state.fold(OpRow.of(row))
            return state

    def prepared(self) -> dict[str, Prepared]:
        """Half batches that may be open, by half id: all above the low-water mark, or all when it may hide some."""
        low_water = self.low_water_ms
        above = self._half.prepared_after(low_water)
        return self._half.prepared_after(-1) if self.may_hide(self._half.rewritten_below(low_water)) else above

    def open_half_ids(self) -> list[str]:
        """Half batches that may have pending rows, oldest first."""
        # op before half: every half batch that an op row names is known then. One that is decided in between looks open
        # here, and is looked at closely by whoever asked.
        with self.table.lock:
            self.refresh()
            prepared = self.prepared()
            found = self._open_among(prepared)
        # What was reopened below the mark is older than all above it.
        return sorted(found, key=lambda half_id: prepared[half_id].ms if half_id in prepared else 0)

    def _open_among(self, prepared: Mapping[str, Prepared]) -> list[str]:
        """Those with pending rows, and those below the mark that were reopened and are still open."""
        opened = self._open_of(prepared)
        return opened + [h for h in self._reopened(prepared) if h not in opened and self._is_open(h)]

    def _is_open(self, half_id: str) -> bool:
        try:
            return not self.state_of(self._half.get(half_id), refresh=False).settled
        except Exception:
            return True  # it is looked at again, alone, and reported

    def _open_of(self, prepared: Mapping[str, Prepared]) -> list[str]:
        net = settled_rows(self._followed.rows)
        opened = [half_id for half_id, p in prepared.items() if p.rows > net.get(half_id, 0)]
        doubtful = [half_id for half_id in opened if half_id not in self._known_whole]
        older = settled_rows(self._older(doubtful)) if doubtful else {}
        self._remember_whole(h for h in doubtful if h not in older)
        return [h for h in opened if prepared[h].rows > net.get(h, 0) + older.get(h, 0)]

    def _reopened(self, prepared: Mapping[str, Prepared]) -> list[str]:
        """Half batches that were reopened and of which ``prepared`` may not know all rows."""
        rows = self._followed.rows
        ids = pc.unique(rows.filter(_is(rows, Kind.REOPEN))["half_id"]).to_pylist()
        return [h for h in ids if h not in prepared or prepared[h].rewritten]

    # ------------------------------------------------------------------ decisions
    def decide(
        self,
        record: HalfRecord,
        attempt: int,
        *,
        commit: Mapping[int, bytes] = NO_ROWS,
        rollback: Mapping[int, bytes] = NO_ROWS,
        who: Who,
        reason: str | None = None,
        checks_min: int = 0,
    ) -> list[Placed]:
        """Make verdicts on one half batch final: see :meth:`decide_many`. What would let it drop out is raised."""
        decision = Decision(record, attempt, RowSet(commit), RowSet(rollback), who, reason, checks_min)
        (decided,) = self.decide_many([decision])
        if decided.problem is not None:
            raise decided.problem
        return list(decided.placed)

    def decide_many(self, decisions: Sequence[Decision]) -> list[Decided]:
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
            StaleAttemptError: rows are under another attempt, or quarantined, or have too few checks. A decision that
            drops out does not stop the others.
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
            opened: list[Open] = []
            rows: list[OpRow] = []
            for decision in decisions:
                state = self.state_of(decision.record, refresh=False)
                try:
                    rows += self._decided_rows(decision, state)
                    opened.append(Open(decision.record, state))
                except VerdictConflictError as problem:
                    problems[decision.record.half_id] = problem
                    late.append((decision, problem, _against(state, decision, LocalTransactionState(problem.verdict))))
                except StaleAttemptError as problem:
                    problems[decision.record.half_id] = problem
            return self._with_places(opened, rows)

        placed = _placed(self.append(build))
        if late:
            self._leave_conflicts(late)
        return [
            Decided([p for p in placed if p.half_id == d.record.half_id], problems.get(d.record.half_id))
            for d in decisions
        ]

    def _decided_rows(self, decision: Decision, state: BatchState) -> list[OpRow]:
        """The op rows of a decision, commits without their places; raises when it does not count."""
        record, attempt, who, reason = decision.record, decision.attempt, decision.who, decision.reason
        for verdict in (COMMIT_MESSAGE, ROLLBACK_MESSAGE):
            if against := _against(state, decision, verdict):
                raise _too_late(state, against, attempt, verdict)
        commit = _undecided(state, decision.commit, attempt, COMMIT_MESSAGE)
        rollback = _undecided(state, decision.rollback, attempt, ROLLBACK_MESSAGE)
        for undecided in (commit, rollback):
            if decision.checks_min and state.checked_at_least(undecided, decision.checks_min) != undecided:
                raise StaleAttemptError(
                    f"attempt {attempt} of half batch {record.half_id!r} was reopened since it was checked "
                    f"{decision.checks_min} times: it is asked about again"
                )
        found = self._commit_rows(record, state, commit, attempt, who, reason)
        return found + _rows_for(Kind.ROLLBACK, record, rollback, attempt, who, reason)

    # ------------------------------------------------------------------ places
    def _next_op_time(self, reopens: bool) -> datetime:
        """Not before the newest row's time; when something is reopened, after every prepare and reopen so far. Only the
        order of these times counts: our own clock tells what is due."""
        after = max(self.machine.now(), self._followed.last_time)
        if not reopens:
            return after
        sent_ms = max(self._half.newest_ms(), self.reopened_ms)
        return max(after, datetime.fromtimestamp((sent_ms + 1) / 1000, timezone.utc))

    def _commit_rows(
        self, record: HalfRecord, state: BatchState, chosen: RowSet, attempt: int, who: Who, reason: str | None
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
            for file in [state.files[file_no]]
            for segment in file.segments
            if (ranges := runs(bits, segment.first, segment.last + 1))
        ]

    def _with_places(self, opened: Sequence[Open], rows: list[OpRow]) -> list[OpRow]:
        """Op rows that settle something, with the places of what they commit and of what they release.

        Parameters
        ----------
        opened : sequence of Open
            The half batches that the rows name, with their states before these rows; afterwards the states have them.
        """
        if not rows:
            return rows
        if not (self.waiting or any(o.record.delayed or self._placer.fifo_of(o.record) for o in opened)):
            return _with_offsets(rows, self.tails)
        now = self.machine.now()
        states = {o.record.half_id: o.state for o in opened}
        for row in rows:
            states[row.half_id or ""].fold(replace(row, op_time=self._op_time))
        pieces = self._placer.placeable([*self._others([o.record for o in opened], now), *opened], now)
        commits = [(r.half_id, r.file_no, r.ranges, r.attempt) for r in rows if r.kind is Kind.COMMIT]
        if [(p.record.half_id, p.file_no, p.ranges, p.attempt) for p in pieces] == commits:  # nobody waits: a row each
            return _with_offsets(rows, self.tails)
        return rows + _with_offsets([_place_row(piece) for piece in pieces], self.tails)

    def _others(self, records: Sequence[HalfRecord], now: datetime) -> list[Open]:
        """Other half batches whose messages may be due, or may wait for each other."""
        keyed = {half_id for half_id, counts in self.waiting.items() if None in counts}
        ids = {half_id for half_id, counts in self.waiting.items() if any(d is None or d <= now for d in counts)}
        if keyed or any(self._placer.fifo_of(record) for record in records):
            above = self.prepared()
            ids.update(self._open_of(above))
            ids.update(self._reopened(above))
        ids.difference_update(record.half_id for record in records)
        others = [self._placer.record(half_id) for half_id in sorted(ids)]
        return [Open(r, self.state_of(r, refresh=False)) for r in others]

    def place_due(self) -> list[Placed]:
        """Place the delayed messages whose time has come; returns what became visible."""

        def build() -> list[OpRow]:
            now = self.machine.now()
            if not any(due is not None and due <= now for counts in self.waiting.values() for due in counts):
                return []
            pieces = self._placer.placeable(self._others([], now), now)
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
        self._change(Kind.QUARANTINE, record, attempt, rows, who, reason, checks_min)

    def record_check(self, record: HalfRecord, attempt: int, rows: Mapping[int, bytes], reason: str | None) -> None:
        """Count an answered check that left these rows pending."""
        self._change(Kind.CHECK, record, attempt, rows, Who.CHECK, reason)

    def _change(
        self,
        kind: Kind,
        record: HalfRecord,
        attempt: int,
        rows: Mapping[int, bytes],
        who: Who,
        reason: str | None,
        checks_min: int = 0,
    ) -> None:
        def build() -> list[OpRow]:
            state = self.state_of(record, refresh=False)
            still = state.rows_in((RowState.PENDING,), attempt) & rows
            if checks_min:
                still = state.checked_at_least(still, checks_min)
            op_rows = _rows_for(kind, record, still, attempt, who, reason)
            return self._with_places([Open(record, state)], op_rows) if kind is Kind.QUARANTINE else op_rows

        self.append(build)

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
        return reopened

    def lease(self, records: Sequence[HalfRecord], seconds: float) -> datetime:
        """Keep checkers away from half batches whose local transactions are running; returns until when."""
        until = self.machine.now() + timedelta(seconds=seconds)
        rows = [OpRow(Kind.LEASE, record.half_id, decided_by=Who.EXECUTE, until=until) for record in records]
        self.append(lambda: rows)
        return until

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
                    rows += self._commit_rows(record, state, chosen, attempt, Who.ADMIN, reason)
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
            return self._with_places([Open(record, state)], rows)

        return _placed(self.append(build, reopens=True))

    def _leave_conflicts(self, late: Sequence[tuple[Decision, VerdictConflictError, RowSet]]) -> None:
        """Put verdicts on record that came too late, with the rows that have the opposite one."""

        def build() -> list[OpRow]:
            found: list[OpRow] = []
            for decision, problem, against in late:
                record = decision.record
                new = against - self.state_of(record, refresh=False).conflicting()
                rows = _rows_for(Kind.CONFLICT, record, new, decision.attempt, decision.who, str(problem))
                found += [replace(row, verdict=problem.verdict) for row in rows]
            return found

        self.append(build)

    def mark(self) -> bool:
        """Move the low-water mark as far as it goes; False when it cannot move."""
        moved = False

        def build() -> list[OpRow]:
            nonlocal moved
            moved = False
            # half after op: so it has every half batch that the op rows name.
            before, above = self._followed, self.prepared()
            opened = set(self._open_among(above))
            # Not a file of what is open may fall below: its rows above alone could look settled.
            first_open = min((above[h].first_ms for h in opened if h in above), default=None)
            settled_ms = [p.ms for p in above.values() if first_open is None or p.ms < first_open]
            low_water = max(settled_ms, default=before.low_water)
            rewritten = self._half.rewritten_below(low_water)
            if first_open is not None and first_open <= before.low_water:
                return []
            if low_water < before.low_water or (low_water == before.low_water and not self.may_hide(rewritten)):
                return []
            moved = True
            keep = {h for h, p in above.items() if p.ms > low_water} | opened | set(before.waiting)
            kept = before.rows.filter(pc.is_in(before.rows["half_id"], value_set=pa.array(sorted(keep), pa.string())))
            since = pc.min(kept["version"]).as_py() if kept.num_rows else self.table.version + 1
            conflicts = _open_conflicts(before, since)
            mark = OpRow(
                Kind.MARK,
                count=1 + len(conflicts),
                reason=rewritten or None,
                low_water=low_water,
                since_version=since,
                tails=before.tails,
            )
            return [mark, *conflicts]

        with self.table.lock:
            self._follow_anew()
            self.append(build)
        return moved

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

        def decide(version: int) -> Change | None:
            nonlocal rows
            self._catch_up()
            self._op_time = self._next_op_time(reopens)
            rows = build()
            if not rows:
                return None
            table = to_table(rows, self.table.version + 1, self._op_time, commit_id)
            return Change(add=[self.table.write(table, "op", STATS_COLUMNS)])

        def landed(change: Change) -> bool:
            self._catch_up()
            return self._arrived

        with self.table.lock:
            self._awaited, self._arrived = commit_id, False
            try:
                self.table.compare_and_set(decide, landed)
            finally:
                self._awaited = None
        return rows


def _cut_off(before: Followed, rows: pa.Table, after: Followed) -> list[str]:
    """Half batches with op rows that a new mark let go."""
    if after.since == before.since:
        return []
    ids = [r.filter(pc.less(r["version"], after.since))["half_id"] for r in (before.rows, rows)]
    return [str(h) for part in ids for h in pc.unique(part).to_pylist()]


def _open_conflicts(followed: Followed, since: int) -> list[OpRow]:
    """Conflict rows that a mark repeats, for those before this version will not be read again."""
    rows = followed.rows
    rows = rows.filter(_is(rows, Kind.CONFLICT))
    rows = rows.filter(pc.is_in(rows["half_id"], value_set=pa.array(sorted(followed.conflicts), pa.string())))
    kept: dict[OpRow, bool] = {}  # → whether it stands at that version or later, too
    for read in rows.to_pylist():
        row = replace(OpRow.of(read), op_time=None)
        if row.attempt is None:  # what was in conflict before was resolved
            kept = {other: later for other, later in kept.items() if other.half_id != row.half_id}
        else:
            kept[row] = read["version"] >= since
    return [row for row, later in kept.items() if not later]


def _is(rows: pa.Table, kind: Kind) -> pa.ChunkedArray:
    return pc.equal(rows["kind"], kind.value)


def _with_offsets(rows: Sequence[OpRow], tails: Tails) -> list[OpRow]:
    """Commit and place rows, in their order, with the next offsets of their queues; those that wait get none."""
    next_offsets = dict(tails)
    found: list[OpRow] = []
    for row in rows:
        waits = row.kind is Kind.COMMIT and row.until is not None
        if row.topic is not None and row.queue_id is not None and not waits:
            queue = (row.topic, row.queue_id)
            offset = next_offsets.get(queue, 0)
            next_offsets[queue] = offset + row.count
            row = replace(row, queue_offset=offset)
        found.append(row)
    return found


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
    return rows & state.rows_in(opposite, decision.attempt)


def _too_late(state: BatchState, against: RowSet, attempt: int, verdict: LocalTransactionState) -> VerdictConflictError:
    kind = Kind.ROLLBACK if verdict is COMMIT_MESSAGE else Kind.COMMIT
    first = next((row for row in state.history if row.kind is kind and (row.attempt or 1) == attempt), OpRow(kind))
    return VerdictConflictError(
        f"{verdict} for {against.count} messages of half batch {state.half_id!r}, attempt {attempt}, comes too "
        f"late: {first.kind} by {first.decided_by} at {first.op_time} is final. "
        "Find out which is true, then log.resolve(half_id, verdict, reason=…)",
        verdict=str(verdict),
    )


def _undecided(state: BatchState, rows: RowSet, attempt: int, verdict: LocalTransactionState) -> RowSet:
    """Those rows that still wait for this verdict; raises when any is out of its reach."""
    waiting = rows & state.rows_in((RowState.PENDING,), attempt)
    decided = rows & state.rows_in(_states_of(verdict), attempt)
    rest = rows.count - waiting.count - decided.count
    if rest:
        raise StaleAttemptError(
            f"{verdict} under attempt {attempt} for {rest} messages of half batch {state.half_id!r} does not count: "
            "they were reopened under another attempt, or quarantined"
        )
    return waiting


def _rows_for(kind: Kind, record: HalfRecord, rows: RowSet, attempt: int, who: Who, reason: str | None) -> list[OpRow]:
    """Op rows that name these rows, as few as possible."""
    if rows.count == record.rows:
        return [_row(kind, record, None, None, record.rows, attempt, who, reason)]
    return [
        _row(kind, record, file_no, ranges, ranges_count(ranges), attempt, who, reason)
        for file_no, ranges in rows.ranges()
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
