"""The local side of a simulation: a database with a fence, and listeners that behave like the shipped ones.

:class:`FencedListener` does what ``SqlTransactionListener`` does, :class:`VersionedListener` what
``DeltaTransactionListener`` does with Delta's idempotent writes, :class:`BareListener` has no fence. ``sql_shop.py``
has the real ``SqlTransactionListener``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    HalfBatch,
    LocalTransactionState,
    Rollback,
    TransactionListener,
)
from rmq_spark.errors import FencedError, FenceError, LocalTransactionError
from tests.support.inside import (
    EXECUTED,
    NOTHING,
    ROLLED_BACK,
    TOMBSTONE,
    CommitOncePrepared,
    Recorded,
    State,
    Verdicts,
    name_of,
    verdict_of,
)
from tests.torture.judge.history import History, Kind, Phase, payload_hash
from tests.torture.simulate.scheduler import Scheduler, SimulatedLock

REFUSED = Rollback("its work said no", refused=True)
Answer = LocalTransactionState | Rollback
VERDICTS: dict[str, Answer] = {EXECUTED: COMMIT_MESSAGE, ROLLED_BACK: REFUSED, TOMBSTONE: ROLLBACK_MESSAGE}
LOCK_TIMEOUT_S = 5.0
FENCES_S = 60.0
"""A local transaction that begins later does not run. Fence rows live for twice as long, as the check job has it."""


class Broken(Exception):
    """The user's work, or the connection to the database, failed."""


@dataclass
class Temper:
    """How a listener behaves; each a chance per call."""

    fails_before: float = 0.0
    fails_after: float = 0.0  # the connection breaks at the commit: it happened
    refuses: float = 0.3  # per transaction
    says_unknown: float = 0.0  # although it happened, or did not
    slow: float = 0.0  # the work takes slow_s
    slow_s: float = 45.0
    check_fails: float = 0.0
    check_unknown: float = 0.0
    check_some_unknown: float = 0.0  # per transaction, although it is known: the rest is decided alone
    poison: str | None = None  # the half batch of this name: its work says UNKNOWN, and no check of it is ever answered

    def calm(self) -> None:
        keeps = ("refuses", "slow_s", "poison")
        for name in (each.name for each in fields(self) if each.name not in keeps):
            setattr(self, name, 0.0)


class Database:
    """Rows of local transactions, and the fence's. It survives every process; a dead one's locks are released."""

    def __init__(self, scheduler: Scheduler, history: History, fence_id: str) -> None:
        self.fence_id = fence_id
        self.fence: dict[tuple[str, int], tuple[str, bytes | None]] = {}  # by half id and attempt, as columns
        self.words: dict[str, str] = {}  # what became of each transaction
        self.written: dict[str, float] = {}  # when the rows of a half batch were written first
        self._history = history
        self._scheduler = scheduler
        self._locks: dict[str, SimulatedLock] = {}

    def lock(self, half_id: str) -> SimulatedLock:
        """One for all rows of a half batch: who claims a row waits for whoever claimed it and has not committed."""
        return self._locks.setdefault(half_id, SimulatedLock(self._scheduler))

    def recorded(self, batch: HalfBatch) -> dict[str, str]:
        """What the fence says of the transactions of a half batch."""
        row = self.fence.get((batch.half_id, batch.attempt))
        if row is None:
            return {}
        said = Recorded.read(*row)
        places = batch.by_transaction(pc.fill_null(said.among(batch.rows), len(said.states)))
        ids: list[str] = batch.transactions["transaction_id"].to_pylist()
        words = [*(state.word for state in said.states), None]
        found = {i: words[place] for i, place in zip(ids, places.to_pylist(), strict=True)}
        return {i: word for i, word in found.items() if word is not None}

    def said(self, batch: HalfBatch) -> list[str | None]:
        """What became of each transaction of a half batch."""
        return [self.words.get(i) for i in batch.transactions["transaction_id"].to_pylist()]

    def commit(self, states: dict[str, str], batch: HalfBatch, bodies: Iterable[tuple[str, bytes]]) -> None:
        """A database transaction: the fence row, and a row for each body, at one moment."""
        key = batch.half_id, batch.attempt
        self.fence[key] = self.merged(states, batch, self.fence.get(key))
        self.write(states, batch, bodies)

    def write(self, states: dict[str, str], batch: HalfBatch, bodies: Iterable[tuple[str, bytes]]) -> None:
        """A database transaction without a fence."""
        self.words |= states
        for refused in (i for i, state in states.items() if state == ROLLED_BACK):
            self._history.note(Kind.REFUSED, half_id=batch.half_id, transaction_id=refused, attempt=batch.attempt)
        self.written.setdefault(batch.half_id, self._scheduler.now)
        for transaction_id, body in bodies:
            self._history.note(
                Kind.LOCAL, half_id=batch.half_id, transaction_id=transaction_id, attempt=batch.attempt,
                payload=payload_hash(body),
            )  # fmt: skip

    def merged(
        self, states: dict[str, str], batch: HalfBatch, row: tuple[str, bytes | None] | None
    ) -> tuple[str, bytes | None]:
        """The row of an attempt, with the states of some of its transactions."""
        distinct = list(dict.fromkeys(states.values()))
        if row is None and len(distinct) == 1 and len(states) == batch.transactions.num_rows:
            made = Recorded.of(State(distinct[0]), batch.rows, batch.is_all)
            return made.state, made.encoded()
        ids = batch.transactions["transaction_id"].to_pylist()
        which = batch.by_row(pa.array([distinct.index(states[i]) if i in states else None for i in ids], pa.int32()))
        said = pc.is_valid(which)
        before = NOTHING if row is None else Recorded.read(*row)
        made = before.with_rows(batch.rows.where(said), [State(word) for word in distinct], which.filter(said))
        return made.state, made.encoded()

    def prune(self, still_in_half: Callable[[Collection[str]], set[str]]) -> int:
        """Delete old rows of half batches that have left, as ``SqlTransactionListener.prune`` does."""
        before = self._scheduler.now - 2 * FENCES_S
        old = {half_id for half_id, at in self.written.items() if at <= before}
        gone = old - still_in_half(old) if old else set()
        for half_id in gone:  # another one may prune at the same time
            self.written.pop(half_id, None)
        for key in [key for key in self.fence if key[0] in gone]:
            self.fence.pop(key, None)
        return len(gone)


@dataclass
class DeltaTwin:
    """A Delta table with idempotent writes: a write whose ``txnVersion`` is there already is skipped in silence."""

    id: str = "delta-table"
    versions: dict[str, int] = field(default_factory=dict)
    marks: dict[str, list[str]] = field(default_factory=dict)  # userMetadata of the commits that are in the log

    def write(self, app_id: str, version: int, mark: str) -> bool:
        if self.versions.get(app_id, -1) >= version:
            return False
        self.versions[app_id] = version
        self.marks.setdefault(app_id, []).append(mark)
        return True


class Listener(TransactionListener):
    """What all listeners of the simulation share: they note what they are asked and what they say."""

    def __init__(self, database: Database, scheduler: Scheduler, history: History, temper: Temper) -> None:
        self.database = database
        self.temper = temper
        self._scheduler, self._history = scheduler, history
        self.seen_version = 0  # of op: whoever asks has certainly seen it
        self.rollback_after_s = 20.0

    # ------------------------------------------------------------------ the door
    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        ids: list[str] = batch.transactions["transaction_id"].to_pylist()
        self._note(Kind.EXECUTE, Phase.BEGIN, batch, ids)
        if self._happens(self.temper.fails_before):
            raise Broken("the work failed before it did anything")
        self._scheduler.step()
        verdicts: Sequence[Answer] = self.execute(batch, ids)
        self._note(Kind.EXECUTE, Phase.OK, batch, ids, verdicts)
        self._scheduler.step()
        if self._happens(self.temper.fails_after):
            raise Broken("the connection broke at the commit")
        unknown = 1.0 if name_of(batch.half_id) == self.temper.poison else self.temper.says_unknown
        return self._answer([UNKNOWN if self._happens(unknown) else v for v in verdicts])

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        ids: list[str] = batch.transactions["transaction_id"].to_pylist()
        self._note(Kind.CHECK, Phase.BEGIN, batch, ids)
        self._scheduler.step()
        if self._happens(self.temper.check_fails) or name_of(batch.half_id) == self.temper.poison:
            self._note(Kind.CHECK, Phase.FAIL, batch, ids)
            raise Broken("the database does not answer")
        try:
            verdicts: Sequence[Answer] = self.check(batch, ids)
        except FenceError:
            self._note(Kind.CHECK, Phase.FAIL, batch, ids)
            raise
        if self._happens(self.temper.check_unknown):
            verdicts = [UNKNOWN] * len(ids)
        if rate := self.temper.check_some_unknown:
            verdicts = [UNKNOWN if self._happens(rate) else v for v in verdicts]
        self._note(Kind.CHECK, Phase.OK, batch, ids, verdicts)
        self._scheduler.step()
        return self._answer(verdicts)

    def execute(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        raise NotImplementedError

    def check(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        raise NotImplementedError

    # ------------------------------------------------------------------ parts of the listeners
    def is_old(self, batch: HalfBatch) -> bool:
        return batch.restarted or self._scheduler.machine_s() - batch.prepared_at.timestamp() >= self.rollback_after_s

    def work(self, ids: Sequence[str]) -> dict[str, str]:
        """The user's own work; it takes its time and may refuse a transaction."""
        if self._happens(self.temper.slow):
            self._scheduler.sleep(self.temper.slow_s)
        self._scheduler.step()
        return {i: ROLLED_BACK if self._happens(self.temper.refuses) else EXECUTED for i in ids}

    def _happens(self, rate: float) -> bool:
        return self._scheduler.chance.random() < rate

    def _answer(self, verdicts: Sequence[Answer]) -> Verdicts:
        if len(set(verdicts)) == 1 and self._happens(0.5):
            return verdicts[0]
        if REFUSED in verdicts:
            return list(verdicts)
        return pa.array([verdict_of(v).state.value for v in verdicts], pa.string())

    def _note(
        self,
        kind: Kind,
        phase: Phase,
        batch: HalfBatch,
        ids: Sequence[str],
        verdicts: Sequence[Answer] = (),
    ) -> None:
        current = self._scheduler.current
        version = self.seen_version if kind is Kind.CHECK else None
        for at, transaction_id in enumerate(ids):
            self._history.note(
                kind, phase, current.name if current else "main", half_id=batch.half_id,
                attempt=batch.attempt, transaction_id=transaction_id, version=version,
                verdict=verdict_of(verdicts[at]).state.value if verdicts else None,
            )  # fmt: skip


class FencedListener(Listener):
    """A fence row an attempt, in one database transaction with the work; whoever inserts it first wins."""

    prunes = False  # old fence rows are pruned

    @property
    def store_id(self) -> str:  # type: ignore[override]
        return self.database.fence_id

    def execute(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        database = self.database
        self.require_same_fence(batch)
        bodies = batch.messages(["transaction_id", "body"]).to_pylist()
        with database.lock(batch.half_id):
            recorded = self.recorded(batch)
            if TOMBSTONE in recorded.values():
                if set(recorded.values()) != {TOMBSTONE}:
                    raise LocalTransactionError("some of the transactions ran, and some were rolled back by a check")
                database.commit(dict.fromkeys(ids, TOMBSTONE), batch, ())
                raise FencedError(f"a check was faster than attempt {batch.attempt} of {batch.half_id}")
            if recorded:
                if len(recorded) < len(ids):
                    raise LocalTransactionError("some of the transactions ran before")
                return [VERDICTS[recorded[i]] for i in ids]
            self.require_not_too_late(batch)
            states = self.work(ids)
            done = [(r["transaction_id"], r["body"]) for r in bodies if states[r["transaction_id"]] == EXECUTED]
            database.commit(states, batch, done)
        return [VERDICTS[states[i]] for i in ids]

    def check(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        self.require_same_fence(batch)
        recorded = self.recorded(batch)
        absent = [i for i in ids if i not in recorded]
        if absent and self.is_old(batch):
            lock = self.database.lock(batch.half_id)
            if not lock.acquire(LOCK_TIMEOUT_S):
                return [UNKNOWN] * len(ids)
            try:
                recorded |= self.bury(absent, batch)
            finally:
                lock.release()
        return [VERDICTS[recorded[i]] if i in recorded else UNKNOWN for i in ids]

    def bury(self, absent: Sequence[str], batch: HalfBatch) -> dict[str, str]:
        """Tombstones for those that still have no row."""
        faster = self.recorded(batch)
        if late := {i: TOMBSTONE for i in absent if i not in faster}:
            self.database.commit(late, batch, ())
        return self.recorded(batch)

    def recorded(self, batch: HalfBatch) -> dict[str, str]:
        return self.database.recorded(batch)

    def require_not_too_late(self, batch: HalfBatch) -> None:
        if self.prunes and self._scheduler.machine_s() - batch.prepared_at.timestamp() >= FENCES_S:
            raise LocalTransactionError("a check's tombstone may be pruned by now")

    def require_same_fence(self, batch: HalfBatch) -> None:
        if batch.fence_id != self.database.fence_id:
            raise FenceError(f"{batch.half_id} was prepared with another fence than that of this database")


class VersionedListener(Listener):
    """A Delta commit a half batch; execute and tombstone write under the same transaction version."""

    TOMBSTONE_VERSION = 1

    def __init__(
        self, database: Database, scheduler: Scheduler, history: History, temper: Temper, table: DeltaTwin
    ) -> None:
        super().__init__(database, scheduler, history, temper)
        self.table = table

    @property
    def store_id(self) -> str:  # type: ignore[override]
        return self.table.id

    def execute(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        self.require_same_table(batch)
        [transaction_id] = ids
        bodies = batch.messages(["transaction_id", "body"]).to_pylist()
        state = self.work(ids)[transaction_id]
        if self.table.write(transaction_id, 1, state):
            done = [(r["transaction_id"], r["body"]) for r in bodies] if state == EXECUTED else []
            self.database.write({transaction_id: state}, batch, done)
        self._scheduler.step()
        # Delta says nothing when it skips: look whose commit it was.
        found = self.table.marks[transaction_id][0]
        if found == TOMBSTONE:
            raise FencedError(f"a check was faster than attempt {batch.attempt} of {batch.half_id}")
        return [VERDICTS[found]]

    def check(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        self.require_same_table(batch)
        [transaction_id] = ids
        if transaction_id not in self.table.marks:
            if not self.is_old(batch):
                return [UNKNOWN]
            self._scheduler.step()
            self.table.write(transaction_id, self.TOMBSTONE_VERSION, TOMBSTONE)
        return [VERDICTS[self.table.marks[transaction_id][0]]]

    def require_same_table(self, batch: HalfBatch) -> None:
        if batch.fence_id != self.table.id:
            raise FenceError(f"{batch.half_id} was prepared with another table than this one")


class BareListener(Listener):
    """No fence: a check looks whether it happened. Safe against crashes, and as long as leases keep checks away. Beside
    a checker that looks into another database, its own one needs a name."""

    def execute(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        bodies = batch.messages(["transaction_id", "body"]).to_pylist()
        states = self.work(ids)
        done = [(r["transaction_id"], r["body"]) for r in bodies if states[r["transaction_id"]] == EXECUTED]
        self.database.write(states, batch, done)
        return [VERDICTS[states[i]] for i in ids]

    def check(self, batch: HalfBatch, ids: Sequence[str]) -> list[Answer]:
        words = self.database.words
        return [VERDICTS[words[i]] if i in words else ROLLBACK_MESSAGE for i in ids]


class NoListener(CommitOncePrepared):
    """``transactionListener=none``: plain sending."""

    seen_version = 0
