"""Seeded bugs: small patches of the protocol, a listener or the store, each with the anomaly that it must show.

A mutant is played with seeds of the simulation, in scenarios in which it has a chance to do harm, until the anomaly
checker names what it must name. The same seeds without the patch must show nothing. Where the bug would live in
something that is not built yet, there is a small copy here, with a good and a bad variant. A seeded bug is an edit of
the product's own code, so this module replaces private functions.
"""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark import COMMIT_MESSAGE, CommitLog, HalfBatch
from rmq_spark._core.checks import round as round_module
from rmq_spark._core.checks.asker import Asker, CheckVerdicts
from rmq_spark._core.consumers import send_back as sending_back
from rmq_spark._core.consumers.progress import ProcessQueue
from rmq_spark._core.listeners import fence as fence_module
from rmq_spark._core.listeners.work import FencedWork
from rmq_spark._core.log import clock_doubt
from rmq_spark._core.log import message_columns as incoming
from rmq_spark._core.log import placer as placing
from rmq_spark._core.log.half_contents import HalfContents
from rmq_spark._core.log.key_order import KeyIndex, OpenBatch
from rmq_spark._core.log.low_water_mark import Marker
from rmq_spark._core.log.new_op_rows import rows_for
from rmq_spark._core.log.op_reader import OpReader
from rmq_spark._core.log.op_view import OpView
from rmq_spark._core.log.placer import Placer
from rmq_spark._core.log.shared_files import SharedFiles
from rmq_spark._core.protocol import assemble_half_batch, own_sends, replay
from rmq_spark._core.protocol import engine as steps
from rmq_spark._core.upkeep import expire as expiring
from rmq_spark._core.upkeep import leave as leaving
from rmq_spark.errors import HalfBatchLeftError
from rmq_spark.listeners import VerdictArray
from tests.support.half_batches import count_check
from tests.support.inside import (
    BY_PART,
    EXECUTED,
    NO_ROWS,
    NOTHING,
    ROLLED_BACK,
    TIMESTAMP,
    Archived,
    BatchState,
    Change,
    Checker,
    Decide,
    Decision,
    DrainBorder,
    Drainer,
    Engine,
    Expirer,
    Fence,
    Graces,
    HalfHeader,
    HalfRecord,
    HalfTable,
    Leaver,
    Ledger,
    Lineage,
    OpKind,
    OpRow,
    PartAnswer,
    PartRunner,
    Planner,
    Pruner,
    Recorded,
    Replays,
    RowRange,
    RowSet,
    RowState,
    SharedFileWriter,
    Staged,
    State,
    Stripper,
    TwoPhase,
    Verdict,
    commit_loop,
    decision_module,
    drain,
    half_header,
    half_writer,
    marking,
    name_of,
    op_merge,
    split_by_verdict,
    stripping,
    two_phase,
)
from tests.support.inside import ledger as ledger_module
from tests.torture.judge.anomalies import Anomaly, AnomalyKind
from tests.torture.simulate import scheduler, simulation, store
from tests.torture.simulate.clock_play import play_clocks
from tests.torture.simulate.executors import Executors
from tests.torture.simulate.fifo_play import play_fifo
from tests.torture.simulate.mark_play import play_marks
from tests.torture.simulate.retry_play import play_retries
from tests.torture.simulate.shop import TOMBSTONE, Broken, Database, FencedListener, VersionedListener
from tests.torture.simulate.simulation import Scenario, Simulation, StreamSource
from tests.torture.simulate.sleeper_play import play_sleepers
from tests.torture.simulate.store import SimulatedTable, Weather
from tests.torture.simulate.upkeep_play import play_upkeep
from tests.torture.simulate.world import SimulatedEngine, SimulatedLog

SEEDS_MAX = 400
"""So many seeds are played before a mutant counts as not caught."""

HUNT_S_MAX = 240.0
"""A mutant that was not caught by then counts as not caught, too. A hunt and its control fit into a test's time."""

SPOILED_STEPS_MAX = 4_000
"""So many steps a play with a bug may take; without one they take up to 1,500. A bug that makes a program try for ever
would cost minutes a seed otherwise."""

COLLECTED_EVERY = 20
"""Seeds after which cyclic garbage is collected: a hunt runs without, and each seed leaves 4 MB of it."""

Patch = Callable[[], AbstractContextManager[Any]]
Play = Callable[[int], list[Anomaly]]
A = AnomalyKind


@dataclass(frozen=True)
class Mutant:
    """A seeded bug.

    Attributes
    ----------
    name : str
    expected : frozenset of AnomalyKind
        One of these must be found.
    bad : callable
        A context in which the bug is there.
    shape : mapping
        What a scenario must have in it for the bug to matter, by the names of :class:`Scenario` (``weather.…``,
        ``temper.…`` for those).
    good : callable
        A context for the control: nothing, or the good variant of a copy.
    """

    name: str
    expected: frozenset[AnomalyKind]
    bad: Patch
    shape: Mapping[str, Any]
    good: Patch = nullcontext

    def play(self, seed: int, spoiled: bool) -> tuple[list[Anomaly], list[str]]:
        """The anomalies of a seed, with the bug or without; and what else went wrong."""
        with ExitStack() as stack:
            stack.enter_context(self.bad() if spoiled else self.good())
            if spoiled:
                stack.enter_context(patch.object(scheduler, "STEPS_MAX", SPOILED_STEPS_MAX))
            result = Simulation(seed, self.scenario(seed)).run()
        return result.anomalies, result.problems

    def scenario(self, seed: int) -> Scenario:
        scenario = Scenario.draw(random.Random(seed), large=True)
        if scenario.listener == "bare":  # it stands little of what a shape may ask for
            scenario.listener = "fenced"
        scenario.parts = 0  # a bug of the simulation's own listener is none of the product's
        for name, value in self.shape.items():
            target, _, attribute = name.rpartition(".")
            setattr(getattr(scenario, target) if target else scenario, attribute, value)
        scenario.weather, scenario.temper = replace(scenario.weather), replace(scenario.temper)
        return scenario.made_possible()


@dataclass(frozen=True)
class Catch:
    """What became of a mutant."""

    mutant: str
    found: str  # the anomaly, or what was seen instead
    seed: int
    tries: int
    caught: bool
    control: str  # empty: the same seeds show nothing without the bug


def hunt(mutant: Mutant | PlayMutant, first_seed: int = 1, seeds_max: int = SEEDS_MAX) -> Catch:
    """Play seeds until the mutant is caught; then the same seeds without it."""
    seen: set[str] = set()
    tries = 0
    end_s = time.monotonic() + HUNT_S_MAX
    for seed in range(first_seed, first_seed + seeds_max):
        if time.monotonic() > end_s:
            break
        if (seed - first_seed) % COLLECTED_EVERY == 0:
            gc.collect()
        anomalies, problems = mutant.play(seed, spoiled=True)
        seen |= {a.kind.value for a in anomalies} | {": ".join(p.split(": ")[:2]) for p in problems}
        kinds = sorted({a.kind for a in anomalies} & mutant.expected, key=lambda k: k.value)
        if kinds:
            control = ""
            for again in range(first_seed, seed + 1):
                if (again - first_seed) % COLLECTED_EVERY == 0:
                    gc.collect()
                anomalies, problems = mutant.play(again, spoiled=False)
                if anomalies or problems:
                    control = f"seed {again}: {[*problems, *(a.kind.value for a in anomalies)][0]}"
                    break
            return Catch(mutant.name, kinds[0].value, seed, seed - first_seed + 1, True, control)
        tries += 1
    return Catch(mutant.name, f"not caught; seen: {', '.join(sorted(seen)) or 'nothing'}", -1, tries, False, "")


# ---------------------------------------------------------------- how mutants are made
MUTANTS: list[Mutant | PlayMutant] = []


def mutant(
    name: str, *expected: AnomalyKind, good: Patch = nullcontext, **shape: Any
) -> Callable[[Callable[[], Iterator[None]]], Patch]:
    """Register a generator that patches, yields and ends. ``weather_…`` and ``temper_…`` go to those parts."""
    names = {n.replace("weather_", "weather.").replace("temper_", "temper."): v for n, v in shape.items()}

    def register(make: Callable[[], Iterator[None]]) -> Patch:
        bad = contextmanager(make)
        MUTANTS.append(Mutant(name, frozenset(expected), bad, names, good))
        return bad

    return register


def replaced(*parts: tuple[Any, str, Any]) -> ExitStack:
    """A context in which these attributes are others."""
    stack = ExitStack()
    for target, name, value in parts:
        stack.enter_context(patch.object(target, name, value))
    return stack


CALM = {"weather": Weather(), "clock_steps": False}
TWO_CHECKERS = {
    **CALM,
    "listener": "bare",
    "pause": 0.0,
    "crash": 0.0,
    "zombies": 0.0,
    "person": False,
    "stranger": False,
    "immunity": False,
    "checkers": 2,
    "rounds": 4,
    "check_timeout_s": 30.0,
    "temper_slow": 0.8,
    "temper_refuses": 0.0,
}
BUSY = {"crash": 0.03, "pause": 0.02, "switch": 0.6}
RESTARTS = {"crash": 0.03, "streams": 1, "senders": 0, "restored": None}


# ---------------------------------------------------------------- files that are written anew
@mutant(
    "a half file that is written anew says a new time of prepare",
    A.CHECKED_AFTER_RESOLUTION, A.OUTCOME_CHANGED, A.DUPLICATE, A.STUCK_HALF, A.INCONSISTENT_OFFSETS,
    upkeep=8, checkers=2, rounds=4, batches=3, streams=2, clock_steps=False, check_timeout_s=0.5,
)  # fmt: skip
def _new_time_of_prepare() -> Iterator[None]:
    move = Simulation.move
    with replaced((Simulation, "move", lambda self: move(self, keeps_time=False))):
        yield


# ---------------------------------------------------------------- prepare
@mutant("no txn check: a batch that is prepared is prepared again", A.DUPLICATE, **RESTARTS, batches=2)
def _no_txn_check() -> Iterator[None]:
    with replaced((SimulatedTable, "transaction_version", lambda self, app_id: None)):
        yield


@mutant(
    "abort deletes landed files", A.LOST_WRITE, **RESTARTS, temper_fails_before=0.3, on_listener_error="fail", upkeep=0
)
def _abort_deletes() -> Iterator[None]:
    def abort(self: StreamSource, log: SimulatedLog, paths: Sequence[str]) -> None:
        for path in paths:
            log.engine.half.table.fs.tables.pop(f"half/{path}", None)

    with replaced((StreamSource, "abort", abort)):
        yield


@mutant("a restored checkpoint is taken for a replay", A.REPLAY_DIVERGENCE, streams=1, restored="offsets")
def _restored_checkpoint() -> Iterator[None]:
    def find(self: Replays, header: Any) -> Any:
        return self._engine.find(header.app_id, header.batch_id)

    with replaced((Replays, "require", find)):
        yield


@mutant("a new checkpoint is taken for a replay", A.REPLAY_DIVERGENCE, streams=1, restored="query")
def _new_checkpoint() -> Iterator[None]:
    with _restored_checkpoint():
        yield


FORKS = {"streams": 1, "senders": 0, "restored": None, "forks": True, "temper_refuses": 0.0}


@mutant("a fork is not noticed", A.DUPLICATE, **FORKS)
def _fork() -> Iterator[None]:
    with replaced((Lineage, "contains", lambda *_: True)):
        yield


@mutant("forks that run at once both prepare", A.DUPLICATE, **FORKS)
def _forks_at_once() -> Iterator[None]:
    with replaced((two_phase, "following", lambda header, *_: header)):
        yield


@mutant("a query that nobody knows is taken for the same one", A.REPLAY_DIVERGENCE, streams=1, restored="hidden")
def _hidden_query() -> Iterator[None]:
    def is_same(prepared: HalfHeader, now: HalfHeader) -> bool:
        return None in (prepared.query_id, now.query_id) or prepared.query_id == now.query_id

    with replaced((replay, "_is_same_query", is_same)):
        yield


# ---------------------------------------------------------------- the compare-and-set
@mutant(
    "check, then rename: a log entry is overwritten", A.OVERWRITTEN_VERSION, A.LOST_WRITE, **BUSY, streams=2, checkers=2
)
def _check_then_rename() -> Iterator[None]:
    def put(self: SimulatedTable, version: int, change: Change) -> bool:
        versions = self.content.versions
        later = [state.change for state in versions[version + 1 :]]
        del versions[version:]
        for following in (change, *later):
            assert following is not None
            versions.append(self.next_state(versions[-1], following))
        self.content.removed.update(dict.fromkeys(change.remove, 0.0))
        return True

    with replaced((SimulatedTable, "put", put)):
        yield


@mutant(
    "decide without compare-and-set: a lost race is committed as it was built",
    A.INCONSISTENT_OFFSETS, A.OVERWRITTEN_VERSION, A.DUPLICATE, A.OUTCOME_CHANGED,
    **BUSY, **CALM, streams=2, queues=1, checkers=2,
)  # fmt: skip
def _no_compare_and_set() -> Iterator[None]:
    def blind(table: Any, propose: Any, landed: Any, try_commit: Any, turns: Any) -> Change | None:
        table.refresh()
        change: Change | None = propose(table.version + 1)
        while change is not None and not try_commit(change):
            table.refresh()
        if change is not None:
            table.refresh()
        return change

    with replaced((store, "compare_and_set", blind)):
        yield


def _acknowledged_is_enough(believes: Callable[[SimulatedTable, Change], bool]) -> Callable[..., Change | None]:
    """The loop, with a read-back that believes too much."""
    loop = store.compare_and_set

    def trusting(table: SimulatedTable, propose: Any, landed: Any, try_commit: Any, turns: Any) -> Change | None:
        return loop(table, propose, lambda change: believes(table, change) or landed(change), try_commit, turns)

    return trusting


CLEANED = {"pause": 0.08, "crash": 0.0, "switch": 0.6, "streams": 2, "upkeep": 12, **CALM}


@mutant(
    "no read-back after a commit below a cleaned-up head", A.LOST_WRITE, A.OVERWRITTEN_VERSION, A.STUCK_HALF, **CLEANED
)
def _no_read_back() -> Iterator[None]:
    def acknowledged(table: SimulatedTable, change: Change) -> bool:
        return table._acknowledged is not None

    with _often_cleaned(), replaced((store, "compare_and_set", _acknowledged_is_enough(acknowledged))):
        yield


@mutant(
    "the read-back looks at the log's history instead of the table's state",
    A.LOST_WRITE, A.OVERWRITTEN_VERSION, A.STUCK_HALF, **CLEANED,
)  # fmt: skip
def _history_instead_of_state() -> Iterator[None]:
    def has_entry(table: SimulatedTable, change: Change) -> bool:
        return any(known is tried for _, known in table.content.below_head for tried in table._tried)

    with _often_cleaned(), replaced((store, "compare_and_set", _acknowledged_is_enough(has_entry))):
        yield


@contextmanager
def _often_cleaned() -> Iterator[None]:
    """Upkeep does nothing but remove entries of the logs, all that it can."""

    def clean(self: Simulation, *_: SimulatedLog) -> None:
        for table in (self.world.half, self.world.op):
            table.clean_up(0)

    works = ("mark", "merge", "move", "vacuum", "step_clock", "clean_up")
    with replaced(*[(Simulation, name, clean) for name in works]):
        yield


@mutant(
    "offsets are assigned before the commit", A.INCONSISTENT_OFFSETS, A.GAP_IN_QUEUE, **BUSY, streams=2, queues=1,
    temper_refuses=0.0,
)  # fmt: skip
def _early_offsets() -> Iterator[None]:
    with_places = Ledger._with_places

    def early(self: Any, opened: Any, rows: Any) -> Any:
        newest = self.view
        key = (*(row.half_id for row in rows[:1]), *{row.attempt for row in rows})
        early = self.__dict__.setdefault("early_tails", {}).setdefault(key, newest.tails)
        self.view = replace(newest, tails=early)
        try:
            return with_places(self, opened, rows)
        finally:
            self.view = newest

    with replaced((Ledger, "_with_places", early)):
        yield


@mutant(
    "a cold start skips what was committed after the mark", A.INCONSISTENT_OFFSETS, A.DUPLICATE, A.OUTCOME_CHANGED,
    streams=2, queues=1, crash=0.03, batches=3, checkers=2,
)  # fmt: skip
def _stale_tails() -> Iterator[None]:
    start = Ledger._start

    def skipping(self: Ledger) -> OpView:
        found = start(self)
        return replace(found, version=self.table.version) if found.tails else found

    with replaced((Ledger, "_start", skipping)):
        yield


# ---------------------------------------------------------------- decisions
def _loose(waiting: Callable[[BatchState, RowSet, int, Any], RowSet]) -> AbstractContextManager[Any]:
    """Decisions that refuse nothing, for these rows."""
    return replaced(
        (ledger_module, "against", lambda *_: NO_ROWS),
        (decision_module, "against", lambda *_: NO_ROWS),
        (decision_module, "_undecided", waiting),
    )


@mutant(
    "a late commit is accepted after a check's rollback",
    A.OUTCOME_CHANGED,
    **TWO_CHECKERS,
)
def _late_commit() -> Iterator[None]:
    def waiting(state: BatchState, rows: RowSet, attempt: int, verdict: Any) -> RowSet:
        return rows - state.rows_in((RowState.COMMITTED,))

    with _no_lease(), _loose(waiting):
        yield


@mutant(
    "what op has spoken of is taken for untouched",
    A.OUTCOME_CHANGED,
    A.DUPLICATE,
    **TWO_CHECKERS,
)
def _touched() -> Iterator[None]:
    note_prepared, ever = OpReader.note_prepared, set[str]()

    def remember(self: OpReader, half_ids: Sequence[str]) -> None:
        ever.update(half_ids)
        note_prepared(self, half_ids)

    def untouched(self: OpReader, record: HalfRecord) -> bool:
        return record.half_id in ever

    with _no_lease(), replaced((OpReader, "note_prepared", remember), (OpReader, "has_no_op_rows", untouched)):
        yield


@mutant("a second COMMIT makes a second copy", A.DUPLICATE, **BUSY, checkers=2, rounds=4, temper_says_unknown=0.5)
def _second_copy() -> Iterator[None]:
    with _loose(lambda state, rows, attempt, verdict: rows):
        yield


@mutant(
    "what is decided is discarded although a marker exists",
    A.OUTCOME_CHANGED,
    checkers=2, rounds=5, checks_max=1, discard="quarantine", temper_check_unknown=0.5, switch=0.6, pause=0.06,
    temper_says_unknown=0.5,
    streams=2,
    batches=2,
    clock_steps=False,
)  # fmt: skip
def _discard_decided() -> Iterator[None]:
    def quarantine(
        self: Ledger, record: Any, attempt: int, rows: Any, who: Any, reason: Any, checks_min: int = 0
    ) -> None:
        rows = RowSet(rows)
        self.append(lambda: rows_for(OpKind.QUARANTINE, record, rows, attempt, who, reason))

    with replaced((Ledger, "quarantine", quarantine)):
        yield


@mutant(
    "a marker is written whatever attempt the rows are under",
    A.MARKER_OF_ANOTHER_ATTEMPT,
    streams=2,
    batches=2,
    crash=0.0,
    pause=0.06,
    switch=0.6,
    checkers=2,
    rounds=4,
    listener="fenced",
    temper_fails_before=0.6,
    temper_check_unknown=0.0,
    temper_check_fails=0.0,
    on_listener_error="fail",
    clock_steps=False,
)
def _attempt_unchecked() -> Iterator[None]:
    against, undecided = decision_module.against, decision_module._undecided
    any_attempt: Any = None

    def against_any(state: BatchState, decision: Decision, verdict: Any) -> RowSet:
        return against(state, replace(decision, attempt=any_attempt), verdict)

    with replaced(
        (ledger_module, "against", against_any),
        (decision_module, "against", against_any),
        (decision_module, "_undecided", lambda state, rows, _, verdict: undecided(state, rows, any_attempt, verdict)),
    ):
        yield


@mutant(
    "a verdict that comes too late leaves no trace", A.CONFLICTING_OUTCOME,
    checkers=2, rounds=4, checks_max=1, discard="rollback", listener="fenced", crash=0.0, temper_check_unknown=0.8,
    temper_slow=0.6, temper_refuses=0.0,
)  # fmt: skip
def _no_conflict_row() -> Iterator[None]:
    with _no_lease(), replaced((Ledger, "_conflict_rows", lambda *_: [])):
        yield


@mutant("a commit is torn: the rows of one file only", A.TORN_TRANSACTION, partitions=2, rows=3, per="batch")
def _torn_commit() -> Iterator[None]:
    decide = Ledger.decide

    def torn(self: Ledger, decisions: Any) -> Any:
        return decide(self, [replace(d, commit=RowSet(dict(list(d.commit.items())[:1]))) for d in decisions])

    with replaced((Ledger, "decide", torn)):
        yield


def _checks_say(refused: bool) -> ExitStack:
    """What checks roll back is all refused, or nothing of it."""
    normalize = two_phase.normalize_verdicts

    def one_kind(result: Any, batch: Any) -> Any:
        found = normalize(result, batch)
        return VerdictArray(tuple(replace(v, refused=refused) for v in found.distinct), found.which)

    return replaced((two_phase, "normalize_verdicts", one_kind), (round_module, "normalize_verdicts", one_kind))


@mutant(
    "a refusal that a check finds is taken for what never happened", A.REFUSED_AGAIN, **RESTARTS, temper_refuses=0.6,
    temper_fails_after=0.5, on_listener_error="fail", listener="fenced", temper_says_unknown=0.0,
)  # fmt: skip
def _refusals_forgotten() -> Iterator[None]:
    with _checks_say(refused=False):
        yield


@mutant(
    "what never happened is taken for refused", A.NEVER_REFUSED, **RESTARTS, temper_fails_before=0.5,
    on_listener_error="fail", listener="fenced",
)  # fmt: skip
def _never_happened_is_final() -> Iterator[None]:
    with _checks_say(refused=True):
        yield


@mutant(
    "UNKNOWN is treated as COMMIT", A.LOCAL_STATE_DISAGREES, temper_fails_before=0.5, on_listener_error="unknown",
    listener="fenced",
)  # fmt: skip
def _unknown_commits() -> Iterator[None]:
    def hasty(log: Any, record: Any, rows: RowSet, batch: Any, verdicts: Any) -> Any:
        split = split_by_verdict(log, record, rows, batch, verdicts)
        return replace(split, commit=rows - split.rollback, unknown=NO_ROWS)

    with replaced((two_phase, "split_by_verdict", hasty), (round_module, "split_by_verdict", hasty)):
        yield


# ---------------------------------------------------------------- replays
@mutant(
    "a replay executes instead of checking", A.LOCAL_STATE_DISAGREES, crash=0.04, listener="bare", temper_refuses=0.0,
    pause=0.0, zombies=0.0, **CALM, checkers=0, stranger=False, person=False,
)  # fmt: skip
def _execute_on_replay() -> Iterator[None]:
    def execute(self: TwoPhase, run: Any, state: Any, attempt: int, mask: Any) -> Any:
        yield from self._run_attempt(run, attempt, mask)
        return False

    with replaced((TwoPhase, "_check", execute)):
        yield


@mutant(
    "the next attempt follows a discard", A.MARKER_OF_ANOTHER_ATTEMPT, A.LOCAL_STATE_DISAGREES,
    **RESTARTS, checkers=2, rounds=4, checks_max=1, discard="rollback", temper_check_unknown=0.8, listener="fenced",
    temper_fails_after=0.3, on_listener_error="fail",
)  # fmt: skip
def _next_attempt_after_discard() -> Iterator[None]:
    states = (RowState.ROLLED_BACK_BY_CHECK, RowState.QUARANTINED, RowState.ROLLED_BACK_BY_DISCARD)
    with replaced((two_phase, "_RERUN_STATES", states)):
        yield


# ---------------------------------------------------------------- fences
ZOMBIES = {"pause": 0.05, "crash": 0.0, "checkers": 2, "rounds": 4, "temper_refuses": 0.0, "temper_slow": 0.5}


@mutant("a check rolls back without a tombstone", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME, listener="fenced",
        **ZOMBIES)  # fmt: skip
def _no_tombstone() -> Iterator[None]:
    def bury(self: FencedListener, absent: Sequence[str], batch: Any) -> dict[str, str]:
        return {**dict.fromkeys(absent, TOMBSTONE), **self.recorded(batch)}

    with replaced((FencedListener, "bury", bury)):
        yield


@mutant("a check trusts a snapshot that is older than the row in its way", A.LOCAL_STATE_DISAGREES,
        A.CONFLICTING_OUTCOME, listener="fenced", **ZOMBIES)  # fmt: skip
def _older_snapshot() -> Iterator[None]:
    bury = FencedListener.bury

    def trusting(self: FencedListener, absent: Sequence[str], batch: Any) -> dict[str, str]:
        bury(self, absent, batch)
        return dict.fromkeys(absent, TOMBSTONE)

    with replaced((FencedListener, "bury", trusting)):
        yield


# Transactions of a half batch are asked about, buried and run again in parts.
PARTS = RESTARTS | {
    "crash": 0.06, "listener": "fenced", "rows": 6, "checkers": 2, "rounds": 4, "zombies": 0.5, "person": False,
    "deletions": 0, "temper_refuses": 0.2, "temper_check_some_unknown": 0.5, "temper_fails_before": 0.3,
    "on_listener_error": "fail",
}  # fmt: skip


@mutant("what a part of an attempt did is taken for all of it", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
        **PARTS, per="message")  # fmt: skip
def _a_part_is_all() -> Iterator[None]:
    with replaced((HalfBatch, "is_all", True)):
        yield


@mutant("the sets of a fence row are off by one row", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
        **PARTS, per="message")  # fmt: skip
def _sets_off_by_one() -> Iterator[None]:
    with_rows = Recorded.with_rows

    def shifted(self: Recorded, rows: RowSet, states: Any, which: pa.Array | None = None) -> Recorded:
        if which is not None and len(which) > 1:
            which = pa.concat_arrays([which[1:], which[:1]])
        return with_rows(self, rows, states, which)

    with replaced((Recorded, "with_rows", shifted)):
        yield


@mutant("a part of an attempt forgets what another part did", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
        A.REFUSED_AGAIN, **PARTS, per="message")  # fmt: skip
def _parts_forget() -> Iterator[None]:
    merged = Database.merged

    def alone(self: Database, states: dict[str, str], batch: Any, row: Any) -> tuple[str, bytes | None]:
        return merged(self, states, batch, None)

    with replaced((Database, "merged", alone)):
        yield


@mutant("a tombstone covers all of an attempt, whatever ran", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
        **PARTS, per="message")  # fmt: skip
def _tombstone_too_large() -> Iterator[None]:
    def merged(self: Database, states: dict[str, str], batch: Any, row: Any) -> tuple[str, bytes | None]:
        return (TOMBSTONE, None) if TOMBSTONE in states.values() else honest(self, states, batch, row)

    honest = Database.merged
    with replaced((Database, "merged", merged)):
        yield


@contextmanager
def _asleep_before_later_attempts() -> Iterator[None]:
    execute = FencedListener.execute

    def late(self: FencedListener, batch: Any, ids: Sequence[str]) -> list[Any]:
        scheduler = self._scheduler
        is_there = (batch.half_id, batch.attempt) in self.database.fence  # a row of other transactions of the attempt
        if is_there and scheduler.pause_rate:
            scheduler.current.process.paused_until = scheduler.now + 300.0
            scheduler.sleep(300.0)
        return execute(self, batch, ids)

    with replaced((FencedListener, "execute", late)):
        yield


@mutant("a tombstone is not added to a row that is there", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
        **PARTS | {"pause": 0.02, "crash": 0.02, "rounds": 12}, per="message",
        good=_asleep_before_later_attempts)  # fmt: skip
def _tombstone_too_small() -> Iterator[None]:
    def bury(self: FencedListener, absent: Sequence[str], batch: Any) -> dict[str, str]:
        if (batch.half_id, batch.attempt) in self.database.fence:
            return {**dict.fromkeys(absent, TOMBSTONE), **self.recorded(batch)}
        return honest(self, absent, batch)

    honest = FencedListener.bury
    with _asleep_before_later_attempts(), replaced((FencedListener, "bury", bury)):
        yield


# The real fence: executors run a half batch's local transactions in parts.
TASKS = RESTARTS | {
    **CALM, "crash": 0.02, "listener": "fenced", "parts": 3, "rows": 6, "batches": 2, "checkers": 1, "rounds": 3,
    "zombies": 0.5, "threads": 1, "person": False, "stranger": False, "deletions": 0, "wrong_clocks": 0.0, "upkeep": 0,
    "readers": 0, "temper_refuses": 0.2, "temper_fails_before": 0.2, "temper_says_unknown": 0.0,
    "on_listener_error": "fail",
}  # fmt: skip


@mutant("a replay runs the parts again that have run", A.LOCAL_STATE_DISAGREES, **TASKS, per="key")
def _part_again() -> Iterator[None]:
    def anew(self: FencedWork, connection: Any, batch: HalfBatch, recorded: Recorded) -> VerdictArray:
        return self.run_all_anew(connection, batch)

    with _execute_on_replay(), replaced((FencedWork, "run_rest", anew)):
        yield


@mutant("a part without a fence row is settled as if it had run", A.LOCAL_STATE_DISAGREES, **TASKS, per="key")
def _part_forgotten() -> Iterator[None]:
    record_of = Fence.record_of

    def as_run(self: Fence, rows: Any, batch: HalfBatch) -> Recorded:
        found = record_of(self, rows, batch)
        absent = batch.rows.where(pc.is_null(found.among(batch.rows)))
        is_begun = fence_module._row_key(batch) in rows
        return found.with_rows(absent, [State(EXECUTED)]) if absent and is_begun else found

    with replaced((Fence, "record_of", as_run)):
        yield


@mutant("the fence row of one part is taken for another's", A.LOCAL_STATE_DISAGREES, **TASKS, per="key")
def _another_parts_row() -> Iterator[None]:
    record_of = Fence.record_of

    def of_another(self: Fence, rows: Any, batch: HalfBatch) -> Recorded:
        row = rows.get(fence_module._row_key(batch))
        if row is None or row.state != BY_PART:
            return record_of(self, rows, batch)
        parts = list(batch.parts().values())
        found = NOTHING
        for part, other in zip(parts, [*parts[1:], parts[0]], strict=True):
            row = rows.get(fence_module._row_key(other))
            if row is not None:
                found = found.with_rows(part.rows, Recorded.read(row.state, row.outcome).states[:1])
        return found

    with replaced((Fence, "record_of", of_another)):
        yield


@mutant("a check says that a part never happened, and leaves no tombstone", A.LOCAL_STATE_DISAGREES,
        A.CONFLICTING_OUTCOME, **TASKS | {"temper_slow": 0.5, "zombies": 0.9}, per="key")  # fmt: skip
def _part_without_tombstone() -> Iterator[None]:
    fill = Fence.fill

    def unless_absent(self: Fence, connection: Any, batch: HalfBatch, state: State) -> Recorded:
        if batch.part is not None and self._newest(connection, batch) is None:
            return Recorded.of(state, batch.rows, is_all=False)
        return fill(self, connection, batch, state)

    with replaced((Fence, "fill", unless_absent)):
        yield


@mutant("a part of a later attempt is taken for refused", A.LOCAL_STATE_DISAGREES, A.NEVER_REFUSED,
        **TASKS | {"zombies": 0.9, "temper_fails_before": 0.5, "temper_refuses": 0.0}, per="key")  # fmt: skip
def _by_part_is_refused() -> Iterator[None]:
    recorded_in = Fence.recorded

    def word_unknown(self: Fence, row: Any, batch: HalfBatch) -> Recorded:
        recorded = recorded_in(self, row, batch)
        is_later = recorded.is_by_part and not batch.is_all
        if not is_later:
            return recorded
        return Recorded([State(ROLLED_BACK)], recorded.files, recorded.staged_ms, batch.layout())

    with replaced((Fence, "recorded", word_unknown)):
        yield


@contextmanager
def _often_on_driver() -> Iterator[None]:
    with replaced((simulation, "ON_DRIVER", 0.5)):
        yield


@mutant("a key whose messages lie in several parts is run in parts", A.STUCK_HALF, A.LOCAL_STATE_DISAGREES,
        **TASKS | {"partitions": 2, "temper_refuses": 0.5, "temper_fails_before": 0.5}, per="key",
        stuck_after_s=50_000.0, good=_often_on_driver)  # fmt: skip
def _torn_key() -> Iterator[None]:
    with _often_on_driver(), replaced((PartRunner, "_are_apart", lambda *_: True)):
        yield


@mutant("the answers of parts are taken in the order in which their tasks end", A.LOCAL_STATE_DISAGREES,
        **TASKS, per="message")  # fmt: skip
def _answers_mixed() -> Iterator[None]:
    def as_they_come(self: Executors, job: Any) -> list[PartAnswer]:
        return [part.answer for part in sorted(job, key=lambda part: part.answered_at)]

    with replaced((Executors, "answers", as_they_come)):
        yield


@mutant("a job that failed is taken for one that committed", A.LOCAL_STATE_DISAGREES,
        **TASKS | {"temper_fails_before": 0.4}, per="key")  # fmt: skip
def _failed_job_counts() -> Iterator[None]:
    def as_answered(self: Executors, job: Any) -> list[PartAnswer]:
        return [part.answer or PartAnswer((Verdict(COMMIT_MESSAGE),), None, part.batch.rows.count) for part in job]

    with replaced((Executors, "failed", as_answered)):
        yield


@mutant("work that commits in its middle is taken for done", A.LOCAL_STATE_DISAGREES, listener="fenced",
        temper_refuses=0.0, **CALM)  # fmt: skip
def _half_of_the_work() -> Iterator[None]:
    commit = Database.commit

    def halved(self: Database, states: dict[str, str], batch: Any, bodies: Any) -> None:
        every = list(bodies)
        commit(self, states, batch, every[: -(-len(every) // 2)])
        if len(every) > 1:
            raise Broken("work failed after a commit of its own")

    with replaced((Database, "commit", halved)):
        yield


@mutant(
    "a fence is looked up in the wrong database", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME, listener="fenced",
    stranger=True, rounds=4, checkers=0, temper_refuses=0.0, temper_says_unknown=0.6,
)  # fmt: skip
def _wrong_database() -> Iterator[None]:
    # The check service compares before the listener does.
    with replaced(
        (round_module, "require_same_store", lambda half_id, prepared_with, found: None),
        (FencedListener, "require_same_fence", lambda self, batch: None),
    ):
        yield


@mutant(
    "a listener of another store answers a check", A.LOCAL_STATE_DISAGREES, listener="bare", stranger=True, rounds=4,
    checkers=0, crash=0.04, **CALM, pause=0.0, zombies=0.0, person=False, check_timeout_s=30.0, temper_refuses=0.0,
)  # fmt: skip
def _another_store_answers() -> Iterator[None]:
    with replaced((round_module, "require_same_store", lambda half_id, prepared_with, found: None)):
        yield


@mutant(
    "a replay does not compare the fences", A.LOCAL_STATE_DISAGREES, **(RESTARTS | {"crash": 0.06}), changed=True,
    listener="fenced", checkers=0, stranger=False, person=False,
)  # fmt: skip
def _any_listener() -> Iterator[None]:
    with replaced((two_phase, "require_same_store", lambda half_id, prepared_with, found: None)):
        yield


PRUNES = {
    "listener": "fenced", "prunes": True, **CALM, "wrong_clocks": 0.0, "person": False, "stranger": False,
    "temper_refuses": 0.0,
}  # fmt: skip


@mutant(
    "fence rows are pruned of half batches that have not left", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
    **PRUNES, upkeep=14, crash=0.04, checkers=2, rounds=4, temper_check_unknown=0.8, checks_max=15,
)  # fmt: skip
def _pruned_fences() -> Iterator[None]:
    with _often_leaving(), replaced((Engine, "still_in_half", lambda self, half_ids: set())):
        yield


@mutant(
    "work begins although its tombstone may be pruned", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
    **PRUNES, upkeep=60, pause=0.05, crash=0.0, zombies=0.9, streams=0, senders=2, threads=1, rivals=False,
    unkeyed=False, batches=2, rows=2, per="batch", fifo=False, checkers=2, rounds=12, readers=0,
    polls=1, planner=False, retention_s=None, temper_check_unknown=0.0, discard="rollback", checks_max=15,
)  # fmt: skip
def _late_work() -> Iterator[None]:
    with _often_leaving(), replaced((FencedListener, "require_not_too_late", lambda self, batch: None)):
        yield


@mutant("a tombstone is written under another txn version", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
        listener="versioned", per="batch", **ZOMBIES)  # fmt: skip
def _other_txn_version() -> Iterator[None]:
    with replaced((VersionedListener, "TOMBSTONE_VERSION", 0)):
        yield


# ---------------------------------------------------------------- checks
@contextmanager
def _no_lease() -> Iterator[None]:
    """Leases are not taken: a slow local transaction is overtaken by checks."""
    with replaced((Ledger, "lease", lambda self, record, seconds: None)):
        yield


@mutant(
    "a lease is ignored", A.LOCAL_STATE_DISAGREES, A.CONFLICTING_OUTCOME,
    listener="bare", **CALM, pause=0.0, zombies=0.0, person=False, stranger=False, check_timeout_s=30.0,
    checkers=2, rounds=4, temper_slow=0.8, temper_refuses=0.0, crash=0.0, checks_max=3,
)  # fmt: skip
def _lease_ignored() -> Iterator[None]:
    fold = BatchState.fold

    def deaf(self: BatchState, row: Mapping[str, object]) -> None:
        fold(self, row)
        self.lease_until = None

    with replaced((BatchState, "fold", deaf)):
        yield


@mutant(
    "a check that nobody answered is counted", A.DISCARDED_WITHOUT_CHECK,
    checkers=2, rounds=4, checks_max=2, temper_check_fails=0.8, temper_says_unknown=0.8, crash=0.0,
)  # fmt: skip
def _unanswered_counts() -> Iterator[None]:
    ask = Checker._ask

    def counting(self: Checker, question: Any, listener: Any, round_: Any) -> None:
        problems = len(round_.report.problems)
        ask(self, question, listener, round_)
        if len(round_.report.problems) > problems:
            count_check(self.engine, question.record, question.attempt, question.rows, "no answer")

    with replaced((Checker, "_ask", counting)):
        yield


@mutant(
    "rounds under immunity eat the check count", A.DISCARDED_WITHOUT_CHECK,
    checkers=2, rounds=4, checks_max=2, temper_says_unknown=0.9, crash=0.0, check_timeout_s=45.0,
)  # fmt: skip
def _immunity_counts() -> Iterator[None]:
    old_enough = Checker._old_enough

    def counting(self: Checker, pending: Any, age_s: float, report: Any) -> Any:
        chosen = old_enough(self, pending, age_s, report)
        young = pending.rows - chosen
        if young:
            count_check(self.engine, pending.record, pending.attempt, young, "young")
        return chosen

    with replaced((Checker, "_old_enough", counting)):
        yield


@mutant(
    "an exception stops the round for everyone", A.STUCK_HALF,
    streams=2, senders=0, batches=1, temper_poison="app0:0", temper_says_unknown=1.0, stuck_after_s=50_000.0,
    clock_steps=False, listener="fenced", checks_max=3, person=False, stranger=False, restored=None,
    on_listener_error="unknown", crash=0.0, zombies=0.0, pause=0.0, checkers=1, weather=Weather(),
)  # fmt: skip
def _one_stops_all() -> Iterator[None]:
    def ask(self: Asker, to_ask: Any, call: Any, here: bool, seconds_left: Any) -> list[CheckVerdicts]:
        try:
            return [CheckVerdicts(*pair) for pair in zip(to_ask, call(to_ask), strict=True)]
        except Exception as problem:
            raise OSError("the round ends here") from problem

    check, do = Checker._check, Checker._do

    def unless_ended(self: Checker, half_id: str, round_: Any) -> None:
        if not getattr(round_, "ended", False):
            check(self, half_id, round_)

    def ends(self: Checker, todo: Any, question: Any, listener: Any, round_: Any) -> None:
        try:
            do(self, todo, question, listener, round_)
        except OSError:
            round_.ended = True
            raise

    with replaced((Asker, "ask", ask), (Checker, "_check", unless_ended), (Checker, "_do", ends)):
        yield


@mutant(
    "what is as old as the immunity to the millisecond is never checked", A.STUCK_HALF,
    tick=0.0, check_timeout_s=3.0, temper_says_unknown=0.9, checkers=1, rounds=3, crash=0.0, pause=0.0,
    on_listener_error="unknown", clock_steps=False, weather=Weather(), upkeep=0, restored=None, zombies=0.0,
)  # fmt: skip
def _border_forgotten() -> Iterator[None]:
    """RocketMQ's round went on past such a message, and never came back to it."""
    passed: set[str] = set()
    old_enough, open_ids = Checker._old_enough, Checker._open_half_ids

    def strict(self: Checker, pending: Any, age_s: float, report: Any) -> Any:
        if age_s == self.rules.transaction_timeout:
            passed.add(pending.record.half_id)
            return NO_ROWS
        return old_enough(self, pending, age_s, report)

    def left(self: Checker) -> list[str]:
        return [half_id for half_id in open_ids(self) if half_id not in passed]

    with replaced((Checker, "_old_enough", strict), (Checker, "_open_half_ids", left)):
        yield


# ---------------------------------------------------------------- marks and compaction
@mutant(
    "the low-water mark goes past a reopened batch", A.STUCK_HALF,
    streams=1, senders=1, checkers=2, rounds=4, checks_max=1, discard="quarantine", temper_says_unknown=1.0,
    temper_check_unknown=0.9, restored=None, on_listener_error="unknown",
)  # fmt: skip
def _mark_past_reopened() -> Iterator[None]:
    with replaced((Ledger, "reopened", lambda self, prepared: [])):
        yield


@mutant(
    "the low-water mark goes past what is open", A.STUCK_HALF, streams=2, temper_says_unknown=0.6, upkeep=5, checkers=2,
    on_listener_error="unknown",
)  # fmt: skip
def _mark_past_open() -> Iterator[None]:
    mark, open_of = Ledger.mark, Ledger.open_of
    marking: set[int] = set()  # ledgers; their lock is held meanwhile

    def hasty(self: Ledger) -> bool:
        marking.add(id(self))
        try:
            return mark(self)
        finally:
            marking.discard(id(self))

    def none(self: Ledger, prepared: Any) -> list[str]:
        return [] if id(self) in marking else open_of(self, prepared)

    with replaced((Ledger, "mark", hasty), (Ledger, "open_of", none)):
        yield


@mutant(
    "a mark is made from half as it was before op was read",
    A.DUPLICATE, A.CHECKED_AFTER_RESOLUTION, A.OUTCOME_CHANGED, A.INCONSISTENT_OFFSETS,
    streams=2, batches=3, upkeep=10, checkers=2, crash=0.0,
)  # fmt: skip
def _mark_of_older_half() -> Iterator[None]:
    follow_anew, prepared_after = OpReader.read_anew, HalfContents.prepared_after

    def follow_later(self: OpReader) -> None:
        self.half.table.refresh()
        self.runtime.sleep(30.0)
        follow_anew(self)

    def as_read(self: HalfContents, low_water_ms: int) -> Any:
        with patch.object(self.table, "refresh"):
            return prepared_after(self, low_water_ms)

    def next_mark(self: Marker) -> Any:
        with replaced((HalfContents, "prepared_after", as_read)):
            return made(self)

    made = Marker.next_mark
    with replaced((OpReader, "read_anew", follow_later), (Marker, "next_mark", next_mark)):
        yield


@mutant(
    "times in the future are believed", A.STUCK_HALF, streams=2, wrong_clocks=0.5, clock_steps=False,
    weather_on_own_disk=True, temper_says_unknown=0.6, on_listener_error="unknown",
)  # fmt: skip
def _future_believed() -> Iterator[None]:
    def believed(self: CommitLog, record: Any, state: BatchState, attempt: int) -> Any:
        return max(record.prepared_at, state.opened_at.get(attempt, record.prepared_at))

    with replaced((assemble_half_batch, "_began_at", believed)):
        yield


@mutant(
    "older markers are not looked for below the mark",
    A.DUPLICATE, A.CHECKED_AFTER_RESOLUTION, A.OUTCOME_CHANGED, A.INCONSISTENT_OFFSETS,
    upkeep=8, checkers=2, rounds=4, batches=3, streams=2, clock_steps=False, check_timeout_s=0.5,
)  # fmt: skip
def _older_markers_forgotten() -> Iterator[None]:
    def none(self: Ledger, half_ids: Any) -> pa.Table:
        return self.view.rows.slice(0, 0)

    with replaced((Ledger, "older", none), (Ledger, "_was_settled", lambda *_: False)):
        yield


@mutant(
    "a mark forgets the conflicts below it", A.STUCK_HALF,
    checkers=2, rounds=4, checks_max=1, discard="rollback", listener="fenced", crash=0.0, temper_check_unknown=0.8,
    temper_slow=0.6, temper_refuses=0.0, upkeep=8,
)  # fmt: skip
def _conflicts_forgotten() -> Iterator[None]:
    with _no_lease(), replaced((Marker, "_open_conflicts", lambda self, since: [])):
        yield


@mutant("the merge of op files loses rows", A.LOST_WRITE, A.DUPLICATE, A.GAP_IN_QUEUE, A.STUCK_HALF, streams=2,
        batches=3, op_files_max=3, upkeep=5)  # fmt: skip
def _merge_loses() -> Iterator[None]:
    def compact(table: Any) -> bool:
        def propose(version: int) -> Change | None:
            small = op_merge._to_merge(table)
            if not small:
                return None
            merged = table.write(table.read(small[1:]).sort_by("version"))
            return Change(add=[merged], remove=small, data_change=False)

        def landed(change: Change) -> bool:
            return set(table.actions()["path"].to_pylist()).isdisjoint(change.remove)

        return table.compare_and_set(propose, landed) is not None

    with replaced((op_merge, "compact_op", compact)):
        yield


DRAINS = {"upkeep": 12, "streams": 2, "batches": 3, "crash": 0.0}


@mutant("a drain does not look whether another one was faster", A.DRAINED_OTHERWISE, **DRAINS)
def _drained_twice() -> Iterator[None]:
    with _often_drained(), replaced((drain, "_is_next", lambda *_: True)):
        yield


@mutant("a drain ends in the middle of a version of op", A.DRAINED_OTHERWISE, **DRAINS)
def _drained_in_part() -> Iterator[None]:
    with _often_drained(), replaced((drain, "_first_versions", lambda rows, end, _: (rows.slice(0, 1), end))):
        yield


@mutant("a drain takes the files of op for whole versions", A.DRAINED_OTHERWISE, **DRAINS)
def _drained_by_files() -> Iterator[None]:
    def op_rows(self: Drainer, position: int, until: int) -> tuple[pa.Table, int]:
        op = self._engine.op_table
        paths = op.actions().sort_by([("min.version", "descending")])["path"].to_pylist()
        rows = op.read(paths[:1])
        wanted = pc.and_(pc.greater(rows["version"], position), pc.less_equal(rows["version"], until))
        return rows.filter(wanted), until

    with _often_drained(), replaced((Drainer, "_op_rows", op_rows)):
        yield


def _often_drained() -> AbstractContextManager[Any]:
    def drained(self: Simulation, log: Any, *_: Any) -> None:
        self.drain(log)

    return replaced((Simulation, "mark", drained), (Simulation, "merge", drained))


# ---------------------------------------------------------------- leaving
LEAVES = {"upkeep": 14, "batches": 4, "crash": 0.03, "clock_steps": False, "person": False}


@mutant("a half batch leaves that is open", A.LEFT_OPEN, **LEAVES | {"pause": 0.1, "switch": 0.6}, streams=2)
def _leaves_open() -> Iterator[None]:
    def below(self: Leaver) -> pa.Table:
        return self._engine.half.contents.all_batches().table

    with _often_leaving(), replaced((Leaver, "_may_leave", lambda *_: True), (Leaver, "_below_the_mark", below)):
        yield


@mutant("a half batch leaves before it is drained", A.LOST_WRITE, A.DRAINED_OTHERWISE, **LEAVES, streams=2)
def _leaves_undrained() -> Iterator[None]:
    def leave(self: Simulation, *_: Any) -> None:
        log = self.world.open_log()
        log.engine.ledger.mark()
        leaver = Leaver(log.engine, Graces(0.0, 0.0, 1e9))
        leaver.archive()
        leaver.remove()
        self.vacuum()

    with replaced((Simulation, "mark", leave), (leaving, "drained_up_to", lambda _: 1 << 40)):
        yield


@mutant(
    "whoever decides does not look whether it has left", A.LEFT_OPEN, A.DUPLICATE, A.OUTCOME_CHANGED,
    **LEAVES | {"pause": 0.08, "switch": 0.6}, streams=1, zombies=0.8, checkers=2,
)  # fmt: skip
def _decides_what_left() -> Iterator[None]:
    with _often_leaving(), replaced((OpReader, "_require_there", lambda *_: None)):
        yield


@mutant(
    "a key is free as soon as its half batch has left", A.DUPLICATE, A.REPLAY_DIVERGENCE, A.LOCAL_STATE_DISAGREES,
    **LEAVES | {"crash": 0.06}, streams=0, senders=2, rivals=True,
)  # fmt: skip
def _key_is_free() -> Iterator[None]:
    nothing = (
        (OpReader, "archived", lambda *_: None),
        (OpReader, "archived_as", lambda *_: None),
        (OpReader, "archived_among", lambda *_: frozenset()),
    )
    with _often_leaving(), replaced(*nothing):
        yield


@mutant(
    "a key is looked up in op as it was last read", A.DUPLICATE, A.REPLAY_DIVERGENCE, A.LEFT_OPEN,
    **LEAVES | {"pause": 0.08}, streams=0, senders=2, rivals=True,
)  # fmt: skip
def _key_as_last_read() -> Iterator[None]:
    def as_last_read(look: Any) -> Any:
        def looked(self: OpReader, *names: Any) -> Any:
            with patch.object(self, "refresh"):
                return look(self, *names)

        return looked

    looks = ((OpReader, name, as_last_read(getattr(OpReader, name))) for name in ("archived_as", "archived_among"))
    with _often_leaving(), replaced(*looks):
        yield


@mutant(
    "op rows are pruned that no mark has passed", A.DUPLICATE, A.INCONSISTENT_OFFSETS, A.GAP_IN_QUEUE, A.LOST_WRITE,
    **LEAVES, streams=2, checkers=2, senders=0,
)  # fmt: skip
def _pruned_above_the_mark() -> Iterator[None]:
    files = Pruner._files

    def all_files(self: Pruner, dead: Any, since: int) -> Any:
        return files(self, dead, self._engine.op_table.version + 1)

    with _often_leaving(), replaced((Pruner, "_files", all_files)):
        yield


@mutant(
    "a reader reads from op what is drained and pruned", A.LOST_WRITE, A.SKIPPED_POLL, A.UNSTABLE_RANGE, **LEAVES,
    streams=2,
)  # fmt: skip
def _reads_below_the_border() -> Iterator[None]:
    def ranges(self: DrainBorder, *_: Any) -> Any:
        return [], []

    with _often_leaving(), replaced((DrainBorder, "ranges", ranges)):
        yield


@mutant(
    "a reader takes the drained part for longer than it is", A.LOST_WRITE, A.SKIPPED_POLL, A.UNSTABLE_RANGE,
    **LEAVES | {"upkeep": 1}, streams=2,
)  # fmt: skip
def _border_too_high() -> Iterator[None]:
    def ends(self: DrainBorder) -> Any:
        return dict(self._engine.tails(refresh=False))

    def ranges(self: DrainBorder, queue: Any, first: int, stop: int) -> Any:
        return real(self, queue, first, stop)[0], []

    real = DrainBorder.ranges
    with _often_leaving(), replaced((DrainBorder, "_ends", ends), (DrainBorder, "ranges", ranges)):
        yield


@mutant(
    "half files are stripped before they are drained",
    A.LOST_WRITE,
    A.DRAINED_OTHERWISE,
    A.STUCK_HALF,
    **LEAVES,
    streams=2,
)
def _stripped_undrained() -> Iterator[None]:
    def strip(self: Simulation, *_: Any) -> None:
        log = self.world.open_log()
        log.engine.ledger.mark()
        Stripper(log.engine, Graces(0.0)).run()
        self.vacuum()

    with replaced((Simulation, "mark", strip), (stripping, "drained_up_to", lambda _: 1 << 40)):
        yield


@mutant(
    "a stripped half file loses what is open, too", A.LOST_WRITE, A.DRAINED_OTHERWISE, A.STUCK_HALF, **LEAVES,
    streams=2, per="message",
)  # fmt: skip
def _stripped_open() -> Iterator[None]:
    drained_rows = Stripper._drained_rows

    def every(self: Stripper, file: Any, placed: Any, left: Any) -> pa.Table | None:
        going = drained_rows(self, file, placed, left)
        some = going is not None and going.column_names == ["row_no"]
        return self._engine.half.table.read([file.path], ["row_no"]) if some else going

    with _often_leaving(), replaced((Stripper, "_drained_rows", every), (stripping, "STRIPPED_SHARE_MIN", 0.01)):
        yield


# ---------------------------------------------------------------- other writers of messages
DELETED = LEAVES | {"upkeep": 20, "deletions": 4, "crash": 0.0, "retention_s": None}


@mutant(
    "another writer's deletion from messages is not noticed", A.DRAINED_OTHERWISE, A.LOST_WRITE, A.GAP_IN_QUEUE,
    A.UNSTABLE_RANGE, **DELETED, streams=2,
)  # fmt: skip
def _deletion_not_noticed() -> Iterator[None]:
    modules = (commit_loop, drain, leaving, expiring)
    with _often_leaving(), replaced(*((module, "require_own", lambda table: None) for module in modules)):
        yield


@mutant(
    "another writer's deletion is looked for before a drain or merge, and not at its commit", A.DRAINED_OTHERWISE,
    A.LOST_WRITE, A.GAP_IN_QUEUE, A.UNSTABLE_RANGE, **DELETED | {"switch": 0.6, "pause": 0.1, "deletions": 12},
    streams=2,
)  # fmt: skip
def _deletion_noticed_too_early() -> Iterator[None]:
    with _often_leaving(), replaced((commit_loop, "READ_ALL_THE_SAME", frozenset())):
        yield


# ---------------------------------------------------------------- expiring
EXPIRES = LEAVES | {"upkeep": 20, "crash": 0.0, "retention_s": 30.0, "wrong_clocks": 0.0}


@mutant("messages expire before their time", A.EXPIRED_EARLY, **EXPIRES, streams=2)
def _expired_early() -> Iterator[None]:
    with _often_leaving(), replaced((expiring, "timedelta", lambda seconds: timedelta(0))):
        yield


@mutant("a file expires with its oldest message", A.EXPIRED_EARLY, **EXPIRES, streams=2)
def _expired_by_oldest() -> Iterator[None]:
    real = Expirer._expired

    def expired(self: Expirer, topic: str, seconds: float) -> list[str]:
        table = self._engine.messages_table
        actions = table.actions()
        oldest = actions.set_column(
            actions.column_names.index("max.commit_timestamp"), "max.commit_timestamp", actions["min.commit_timestamp"]
        )
        with replaced((type(table), "actions", lambda _: oldest)):
            return real(self, topic, seconds)

    with _often_leaving(), replaced((Expirer, "_expired", expired)):
        yield


@mutant(
    "expired files leave before op says so", A.LOST_WRITE, A.DRAINED_OTHERWISE, A.GAP_IN_QUEUE, A.UNSTABLE_RANGE,
    **EXPIRES, streams=2,
)  # fmt: skip
def _expired_untold() -> Iterator[None]:
    with _often_leaving(), replaced((Expirer, "_move_firsts", lambda *_: None)):
        yield


def _often_leaving() -> AbstractContextManager[Any]:
    def leave(self: Simulation, *_: Any) -> None:
        self.leave()

    return replaced((Simulation, "mark", leave), (Simulation, "merge", leave), (Simulation, "move", leave))


def _half_compaction(careful: bool) -> Patch:
    """A copy of a compaction of ``half``: refused half batches are dropped, the rest is merged into one file."""

    def compact(self: Simulation, *_: SimulatedLog) -> None:
        log = self.world.open_log()
        table = log.engine.half.table
        droppable: set[str] = set()
        table.refresh()
        last = {app: log.engine.last_batch_id(app) for app in (s.name for s in self.sources)}
        for half_id in log.engine.half.contents.prepared_after(0):
            app_id, _, batch_id = name_of(half_id).rpartition(":")
            record = log.engine.find(app_id, int(batch_id))
            try:
                state = None if record is None else log.engine.state_of(record)
            except HalfBatchLeftError:
                state = None
            if record is None or state is None:  # another upkeep was faster
                continue
            # A batch may come again until its application has prepared a later one.
            behind = (last.get(record.header.app_id) or 0) > record.header.batch_id
            final = (RowState.ROLLED_BACK,) if careful else (RowState.ROLLED_BACK, RowState.ROLLED_BACK_BY_CHECK)
            if state.count(*final) == state.rows and (behind or not careful):
                droppable.add(half_id)
        old = table.actions()["path"].to_pylist()
        rows = table.read(old)
        kept = rows.filter(pc.invert(pc.is_in(rows["half_id"], value_set=pa.array(sorted(droppable), pa.string()))))
        if not droppable or not kept.num_rows:
            return
        change = Change(add=[table.write(kept)], remove=old, data_change=False)

        def propose(_: int) -> Change | None:
            return change if set(table.actions()["path"].to_pylist()).issuperset(old) else None

        def landed(change: Change) -> bool:
            return change.add[0].path in set(table.actions()["path"].to_pylist())

        table.compare_and_set(propose, landed)

    @contextmanager
    def context() -> Iterator[None]:
        with replaced(*[(Simulation, name, compact) for name in ("mark", "merge", "move", "clean_up")]):
            yield

    return context


MUTANTS.append(
    Mutant(
        "compaction drops rows that can still be reopened",
        frozenset({A.LOST_WRITE, A.STUCK_HALF}),
        _half_compaction(careful=False),
        {"streams": 1, "senders": 0, "upkeep": 10, "checkers": 2, "rounds": 4, "temper.fails_before": 0.6,
         "on_listener_error": "fail", "crash": 0.0, "batches": 3, "listener": "fenced", "restored": None},
        _half_compaction(careful=True),
    )
)  # fmt: skip


# ---------------------------------------------------------------- sends with keys
RIVALS: dict[str, Any] = {
    "streams": 0, "senders": 2, "rivals": True, "unkeyed": False, "threads": 1, "batches": 4, "rows": 1,
    "checkers": 1, "upkeep": 0, "fifo": False, "crash": 0.0, "pause": 0.02, "switch": 0.6, "listener": "fenced",
}  # fmt: skip
"""Programs of which two and two send the same under the same idempotency keys."""


@mutant("a key is not looked for when its half batch is prepared", A.DUPLICATE, **RIVALS)
def _keys_not_looked_for() -> Iterator[None]:
    with replaced((Staged, "is_looked_for", property(lambda _: False))):
        yield


@mutant("a key is looked for before a race, and not after it was lost", A.DUPLICATE, **RIVALS)
def _keys_looked_for_once() -> Iterator[None]:
    prepare, ids_named = HalfTable.prepare, HalfContents.ids_named

    def once(self: HalfTable, *given: Any) -> Any:
        first: list[dict[str, str]] = []

        def seen(names: Collection[str]) -> dict[str, str]:
            first.append(ids_named(self.contents, names))
            return first[0]

        with patch.object(self.contents, "ids_named", seen):
            return prepare(self, *given)

    with replaced((HalfTable, "prepare", once)):
        yield


@mutant(
    "a half file that sends share is taken for the first one's", A.DUPLICATE, A.STUCK_HALF, A.LOST_WRITE,
    **RIVALS | {"senders": 3, "threads": 3, "zombies": 0.5, "rivals": False},
)  # fmt: skip
def _first_one_s() -> Iterator[None]:
    of = SharedFiles.of
    with replaced((SharedFiles, "of", lambda self, path: of(self, path).slice(0, 1))):
        yield


# ---------------------------------------------------------------- threads that share a handle
SHARED = {"threads": 3, "crash": 0.0, "pause": 0.0, "switch": 0.6, "zombies": 0.0, "person": False, "stranger": False}


@mutant(
    "one that drops out stays in the half file that it would have shared", A.DUPLICATE, A.LOST_WRITE, A.STUCK_HALF,
    **SHARED | {"zombies": 0.5}, streams=0, senders=3, rivals=True, rows=2, batches=3, checkers=1, listener="fenced",
)  # fmt: skip
def _stays_in_the_file() -> Iterator[None]:
    prepare, written = HalfTable.prepare, SharedFileWriter.written
    staged: list[Any] = []

    def noted(self: HalfTable, some: Sequence[Any], *arguments: Any) -> Any:
        staged[:] = some
        return prepare(self, some, *arguments)

    def with_all(self: Any, chosen: Sequence[Any]) -> Any:
        files = written(self, list(staged))
        return {batch.header.half_id: files[batch.header.half_id] for batch in chosen}

    with replaced((HalfTable, "prepare", noted), (SharedFileWriter, "written", with_all)):
        yield


@mutant(
    "half is refreshed under another lock than that of its commits", A.DUPLICATE, A.STUCK_HALF,
    **SHARED, streams=1, senders=1, rivals=True, sharded=True, fifo=True, queues=1, checkers=2, rounds=4,
    listener="fenced",
)  # fmt: skip
def _locks_of_their_own() -> Iterator[None]:
    """Each table had a lock of its own, and so had the ledger, which looks at half when it places in a FIFO topic. A
    commit is refused at last when its table has moved since it was proposed; here it is not."""
    make = Engine.__init__

    def init(self: Engine, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.op_table.lock, self.lock = self.runtime.lock(), self.runtime.lock()

    with replaced(
        (Engine, "__init__", init),
        (SimulatedTable, "refresh", SimulatedTable._refresh),
        (SimulatedTable, "compare_and_set", SimulatedTable._compare_and_set),
        (Change, "is_stale", lambda self, version: False),
    ):
        yield


@mutant(
    "topics are refreshed without the lock", A.DUPLICATE, **SHARED, streams=1, senders=1, clerks=4, listener="fenced"
)
def _topics_unlocked() -> Iterator[None]:
    refresh = SimulatedTable.refresh

    def unlocked(self: SimulatedTable) -> int:
        return self._refresh() if self.name == "topics" else refresh(self)

    def topics(self: Engine) -> dict[str, int]:
        self.topics_table.refresh()
        return {name: topic.queues for name, topic in self.topic_store.known().topics.items()}

    with replaced((SimulatedTable, "refresh", unlocked), (Engine, "topics", topics)):
        yield


# ---------------------------------------------------------------- readers
READS = {"readers": 2, "polls": 4, "planner": False, "temper_slow": 0.5, "temper_refuses": 0.5, "batches": 3}


@mutant("a reader shows what is pending", A.HALF_VISIBLE_READ, **READS)
def _pending_shown() -> Iterator[None]:
    with _also_shown(RowState.PENDING):
        yield


@mutant("a reader shows what was rolled back", A.ABORTED_READ, **READS)
def _rolled_back_shown() -> Iterator[None]:
    with _also_shown(RowState.ROLLED_BACK):
        yield


@contextmanager
def _also_shown(wanted: RowState) -> Iterator[None]:
    """Readings end with half rows in this state."""
    read = CommitLog.read

    def eager(self: CommitLog, topic: str, start: Any = None, limit: Any = None, columns: Any = None) -> pa.Table:
        found = read(self, topic, start, limit, columns)
        for half_id in self.engine.half.contents.prepared_after(0):
            record = self.engine.get(half_id)
            mask = self.engine.state_of(record).rows_in((wanted,))
            if not mask:
                continue
            rows = self.engine.half.read(record, mask, ["file_no", "row_no", "sharding_key", "body", "topic"])
            n = rows.num_rows
            shown = {
                "topic": rows["topic"],
                "queue_id": pa.repeat(pa.scalar(0, pa.int32()), n),
                "queue_offset": pa.array(range(1000, 1000 + n), pa.int64()),
                "msg_id": pa.repeat(f"{record.half_id}:0.0", n),
                "transaction_id": pa.repeat(f"{record.half_id}:1", n),
                "sharding_key": rows["sharding_key"],
                "body": rows["body"],
            }
            found = pa.concat_tables([found, pa.table(shown).select(found.column_names).cast(found.schema)])
            break
        return found

    with replaced((CommitLog, "read", eager)):
        yield


@mutant("rows of a shared file are taken by position", A.INCONSISTENT_OFFSETS, A.UNSTABLE_RANGE, A.DUPLICATE,
        A.LOCAL_STATE_DISAGREES, upkeep=4, rows=3, batches=3, streams=2)  # fmt: skip
def _by_position() -> Iterator[None]:
    def by_position(fs: Any, folder: str, wanted: RowRange, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        table = fs.get(f"{folder}/{wanted.path}")
        yield 0, table.select(list(columns)).take([n for a, b in wanted.ranges for n in range(a, b + 1)])

    with replaced((store, "read_range", by_position)):
        yield


@mutant("a plan leaves out the first range", A.SKIPPED_POLL, readers=2, polls=6, planner=True, streams=2, batches=3,
        temper_refuses=0.0)  # fmt: skip
def _plan_skips() -> Iterator[None]:
    ranges = Planner.ranges

    def skipping(self: Planner, start: Any, end: Any) -> Any:
        found = ranges(self, start, end)
        return found[1:] if len(found) > 1 else found

    with replaced((Planner, "ranges", skipping)):
        yield


@mutant("a plan begins again from the first offset", A.NON_MONOTONIC_POLL, readers=2, polls=6, planner=True, streams=2,
        batches=3, temper_refuses=0.0)  # fmt: skip
def _plan_repeats() -> Iterator[None]:
    ranges = Planner.ranges

    def again(self: Planner, start: Any, end: Any) -> Any:
        return ranges(self, dict.fromkeys(start, 0), end)

    with replaced((Planner, "ranges", again), (Planner, "forget", lambda self, start: None)):
        yield


@mutant("a decision commits the rows of a queue in reverse", A.ORDER_BROKEN, sharded=True, rows=3, partitions=1,
        temper_refuses=0.0, per="batch", queues=1)  # fmt: skip
def _reversed_rows() -> Iterator[None]:
    with_places = Ledger._with_places

    def backwards(self: Any, opened: Any, rows: Any) -> Any:
        found = []
        for row in with_places(self, opened, rows):
            numbers = [n for a, b in row.ranges or () for n in range(a, b + 1)]
            if row.queue_offset is None:
                found.append(row)
                continue
            for at, number in enumerate(reversed(numbers)):
                found.append(replace(row, ranges=((number, number),), count=1, queue_offset=row.queue_offset + at))
        return found

    with replaced((Ledger, "_with_places", backwards)):
        yield


@mutant(
    "a send is reported as committed before its marker is in the log",
    A.NON_MONOTONIC_SEND,
    A.LOST_WRITE,
    **CALM,
    streams=1,
    senders=0,
    batches=3,
    rows=1,
    partitions=1,
    queues=1,
    crash=0.0,
    pause=0.0,
    restored=None,
    checkers=0,
    temper_refuses=0.0,
    temper_fails_before=0.0,
    temper_fails_after=0.0,
    temper_says_unknown=0.0,
    person=False,
    stranger=False,
    listener="fenced",
)
def _reported_early() -> Iterator[None]:
    send, run_step = TwoPhase.send, TwoPhase.run_step

    def later(self: TwoPhase, step: Any) -> Any:
        if not isinstance(step, Decide):
            return run_step(self, step)
        log = self.engine
        assert isinstance(log, SimulatedEngine)
        turns = log.world.scheduler

        def work() -> None:
            turns.sleep(log.world.chance.choice((0.0, 5.0, 50.0)))
            run_step(TwoPhase(log.another(), self.listener), step)

        assert turns.current is not None
        turns.spawn(turns.current.process, work)
        return ()

    def at_once(self: TwoPhase, *given: Any, **named: Any) -> Any:
        outcome = send(self, *given, **named)
        outcome.messages = {RowState.COMMITTED: 1}
        return outcome

    with replaced((TwoPhase, "run_step", later), (TwoPhase, "send", at_once)):
        yield


@mutant(
    "any time is let in: what names one that Python cannot hold is stored, and can never be decided",
    A.STUCK_HALF,
    **CALM,
    slips=True,
    fifo=False,
    listener="fenced",
)
def _any_time() -> Iterator[None]:
    def unbounded(table: pa.Table, name: str) -> pa.ChunkedArray:
        return incoming.column_of(table, name, TIMESTAMP)

    with replaced((half_writer, "times_of", unbounded), (incoming, "times_of", unbounded)):
        yield


# ---------------------------------------------------------------- plays of their own
@dataclass(frozen=True)
class PlayMutant:
    """A bug that a small play shows much sooner than the simulation."""

    name: str
    expected: frozenset[AnomalyKind]
    of_seed: Callable[[int], list[Anomaly]]
    bad: Patch

    def play(self, seed: int, spoiled: bool) -> tuple[list[Anomaly], list[str]]:
        with self.bad() if spoiled else nullcontext():
            return self.of_seed(seed), []


def _overtaking() -> AbstractContextManager[None]:
    return replaced((Placer, "_blocked", lambda self, batches: {}))


def _reopened_below_forgotten() -> AbstractContextManager[None]:
    return replaced((OpReader, "reopened", lambda self, prepared: []))


def _versions_forgotten() -> AbstractContextManager[None]:
    return replaced((marking, "_versions_that_count", lambda rows: []))


def _waiting_forgotten() -> AbstractContextManager[None]:
    return replaced((marking, "still_waiting", lambda waiting, rows: {}))


def _reopened_forgotten() -> AbstractContextManager[None]:
    next_mark = Marker.next_mark

    def without(self: Marker) -> list[OpRow]:
        return [replace(row, reopened_ms=0) for row in next_mark(self)]

    return replaced((Marker, "next_mark", without))


def _direct_neighbours() -> AbstractContextManager[None]:
    related = KeyIndex.related

    def one_step(self: KeyIndex, to: Sequence[OpenBatch], batches: Sequence[OpenBatch]) -> list[OpenBatch]:
        return [batch for batch in batches if related(self, to, [batch])]

    return replaced((KeyIndex, "related", one_step))


def _releasing_nobody() -> AbstractContextManager[None]:
    to_place = Ledger._to_place

    def hasty(self: Ledger, opened: Sequence[OpenBatch], now: datetime, only_commits: bool = False) -> list[OpenBatch]:
        return to_place(self, opened, now, True)

    return replaced((Ledger, "_to_place", hasty))


def _stale_neighbours() -> AbstractContextManager[None]:
    catch_up = Ledger.catch_up

    def keeping(self: Ledger) -> int:
        kept = dict(self._open)
        try:
            return catch_up(self)
        finally:
            self._open.update(kept)

    return replaced((Ledger, "catch_up", keeping))


def _marker_s_time() -> AbstractContextManager[None]:
    of_batches = placing.in_send_order

    def said(batches: Iterable[OpenBatch]) -> Iterator[tuple[OpenBatch, Any]]:
        def early(batch: OpenBatch) -> OpenBatch:
            said_ms = [int(row.op_time.timestamp() * 1000) for row in batch.state.history if row.op_time]
            prepared_ms = min([batch.record.prepared_ms, *said_ms[:1]])
            return replace(batch, record=replace(batch.record, prepared_ms=prepared_ms))

        return of_batches([early(batch) for batch in batches])

    return replaced((placing, "in_send_order", said))


def _reopened_by_the_clock() -> AbstractContextManager[None]:
    return replaced((HalfTable, "newest_ms", lambda self: 0), (Ledger, "reopened_ms", 0))


def _first_try() -> AbstractContextManager[None]:
    return replaced((HalfTable, "_times_of", lambda self, paths: {}))


def _woken_by_a_lease() -> AbstractContextManager[None]:
    is_gone = OpReader.is_gone

    def require(self: OpReader, record: HalfRecord, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows and is_gone(self, record):
            raise HalfBatchLeftError("it left long ago")
        for row in rows:
            if row["kind"] == "archived":
                raise Archived.of(row).left_error()

    return replaced((OpReader, "_require_there", require), (OpReader, "is_gone", lambda *_: False))


def _identity_again() -> AbstractContextManager[None]:
    return replaced((half_header, "new_half_id", lambda app_id, batch_id, *_: half_header.batch_name(app_id, batch_id)))


def _renamed(rename: Callable[[ProcessQueue, pa.Table, Sequence[str], bool], Sequence[str]]) -> Patch:
    """Other names for what is sent back: ``rename`` takes the queue, the messages, their names, and whether all die."""

    def bad() -> AbstractContextManager[None]:
        send_back, send_each = sending_back.send_back, sending_back.send_each

        def renamed(
            log: Any, group: str, queue: ProcessQueue, messages: pa.Table, reasons: Any, most: int, *more: Any
        ) -> int:
            dies = most <= min(messages["reconsume_times"].to_pylist())

            def send(log: Any, group: str, names: Sequence[str], again: pa.Table, *two_phase: Any) -> int:
                chosen = {name: at for at, name in enumerate(rename(queue, messages, names, dies))}
                return send_each(log, group, [*chosen], again.take(pa.array(chosen.values(), pa.int64())), *two_phase)

            with replaced((sending_back, "send_each", send)):
                return send_back(log, group, queue, messages, reasons, most, *more)

        return replaced((sending_back, "send_back", renamed))

    return bad


def _of_no_epoch() -> AbstractContextManager[None]:
    stack = ExitStack()
    stack.enter_context(_renamed(lambda queue, messages, names, dies: [name.rpartition(".")[0] for name in names])())
    stack.enter_context(replaced((own_sends.OwnSends, "may_come", lambda self, app_id: True)))
    return stack


def _read_before() -> AbstractContextManager[None]:
    committed = OpReader.committed_among

    def read(self: OpReader, names: Collection[str]) -> frozenset[str]:
        for record in filter(None, map(self.half._find, self.half.contents.ids_named(names).values())):
            self.half.read(record, record.all_rows, ["body"])
        return committed(self, names)

    return replaced((OpReader, "committed_among", read))


def _believed_at_once() -> AbstractContextManager[None]:
    return replaced((clock_doubt, "doubt_s", lambda *_: 0.0), (steps, "doubt_s", lambda *_: 0.0))


def _believed_after_itself() -> AbstractContextManager[None]:
    return replaced((clock_doubt, "LOOK_INTERVAL_S", 0.0))


def _ahead_remembered() -> AbstractContextManager[None]:
    after = clock_doubt._after_look

    def remembered(log: Any, op: Any) -> tuple[int, int]:
        believed, looked = clock_doubt._noted(op)
        if believed is not None and looked is not None and looked > log.runtime.time():
            return believed, looked
        return after(log, op)

    return replaced((clock_doubt, "_after_look", remembered))


_UNDER_A_CLOCK = frozenset({A.EXPIRED_EARLY, A.DUPLICATE, A.DISCARDED_WITHOUT_CHECK})

MUTANTS += [
    PlayMutant("a clock is believed", _UNDER_A_CLOCK, play_upkeep, _believed_at_once),
    PlayMutant("a clock is believed at its second word", _UNDER_A_CLOCK, play_upkeep, _believed_after_itself),
    PlayMutant("a clock that was ahead is remembered", _UNDER_A_CLOCK, play_upkeep, _ahead_remembered),
    PlayMutant(
        "what is sent back is named after the first message of its take", frozenset({A.DUPLICATE, A.LOST_WRITE}),
        play_retries, _renamed(lambda queue, messages, names, dies: [f"{names[0]}.{at}" for at in range(len(names))]),
    ),
    PlayMutant(
        "a retry is known by the message that it is of", frozenset({A.LOST_WRITE}), play_retries,
        _renamed(lambda queue, messages, names, dies: [f"back.{i}" for i in messages["msg_id"].to_pylist()]),
    ),
    PlayMutant(
        "what is sent back is known beyond a reset", frozenset({A.LOST_WRITE}), play_retries, _of_no_epoch,
    ),
    PlayMutant(
        "a dead letter has another name than a retry", frozenset({A.DUPLICATE}), play_retries,
        _renamed(lambda queue, messages, names, dies: [f"dead.{name}" if dies else name for name in names]),
    ),
    PlayMutant(
        "a retry is new again when it has left half", frozenset({A.DUPLICATE}), play_retries,
        lambda: replaced((OpReader, "archived_among", lambda *_: frozenset())),
    ),
    PlayMutant(
        "what rmq_spark sent of a message is forgotten like a user's key", frozenset({A.DUPLICATE}), play_retries,
        lambda: replaced((Pruner, "_not_asked_for", lambda self, half_ids: half_ids)),
    ),
    PlayMutant(
        "what is sent back may be forgotten while its group is before it", frozenset({A.DUPLICATE}), play_retries,
        lambda: replaced((own_sends, "_BACK", re.compile("nobody asks"))),
    ),
    PlayMutant(
        "what was sent back is read again", frozenset({A.STUCK_HALF}), play_retries, _read_before,
    ),
    PlayMutant(
        "a lease makes what has left look open", frozenset({A.DUPLICATE, A.ABORTED_READ, A.OUTCOME_CHANGED}),
        play_sleepers, _woken_by_a_lease,
    ),
    PlayMutant(
        "the next half batch of a name has the identity of the first",
        frozenset({A.ABORTED_READ, A.OUTCOME_CHANGED, A.LOST_WRITE}), play_sleepers, _identity_again,
    ),
    PlayMutant(
        "what was said of a half batch, by another clock, is taken for a bound of its prepare",
        frozenset({A.ORDER_BROKEN}), play_clocks, _marker_s_time,
    ),
    PlayMutant(
        "a reopened transaction has the turn that its machine's clock gives it", frozenset({A.ORDER_BROKEN}),
        play_clocks, _reopened_by_the_clock,
    ),
    PlayMutant(
        "a mark forgets when something was reopened last", frozenset({A.ORDER_BROKEN}), play_clocks, _reopened_forgotten
    ),
    PlayMutant(
        "who lost a race to prepare has the turn of its first try", frozenset({A.ORDER_BROKEN}), play_clocks, _first_try
    ),
    PlayMutant("a held message is placed before its blocker", frozenset({A.ORDER_BROKEN}), play_fifo, _overtaking),
    PlayMutant(
        "a message that waits through another one is not looked for", frozenset({A.STUCK_HALF, A.ORDER_BROKEN}),
        play_fifo, _direct_neighbours,
    ),
    PlayMutant(
        "a rollback does not release what waits for it", frozenset({A.STUCK_HALF, A.LOST_WRITE, A.ORDER_BROKEN}),
        play_fifo, _releasing_nobody,
    ),
    PlayMutant(
        "what waits is looked up as it was once", frozenset({A.STUCK_HALF, A.LOST_WRITE, A.ORDER_BROKEN}),
        play_fifo, _stale_neighbours,
    ),
    PlayMutant(
        "a mark forgets what waits below it", frozenset({A.STUCK_HALF, A.LOST_WRITE}), play_fifo, _waiting_forgotten
    ),
    PlayMutant(
        "a mark forgets what was said of the half batches that it names", frozenset({A.DUPLICATE}), play_marks,
        _versions_forgotten,
    ),
    PlayMutant(
        "what was reopened below the mark is not looked for", frozenset({A.STUCK_HALF}), play_marks,
        _reopened_below_forgotten,
    ),
]  # fmt: skip
