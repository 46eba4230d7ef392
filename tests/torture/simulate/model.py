"""The protocol as a small machine of its own, and a search of everything that can happen to it.

A state is a tuple; a step is what no other process can come between: one commit to ``half`` or ``op``, one database
transaction, or a look. Every process may wait before any step for as long as it likes, so a zombie is nothing special;
a crash forgets what a process knows. :func:`search` visits every state that can be reached. ``test_model.py`` holds the
real commit log to the same machine, step by step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

ATTEMPTS_MAX = 3
EXECUTED, REFUSED, TOMBSTONE = "executed", "refused", "tombstone"
COMMIT, ROLLBACK, REFUSE = "commit", "rollback", "refuse"
"""What a worker was told. A ROLLBACK of a check: it never happened and never will. REFUSE: it ran and said no."""

# Of a half batch.
NONE, PENDING, COMMITTED, ROLLED_BACK, BY_CHECK, CONFLICT = (
    "none", "pending", "committed", "rolled back", "rolled back by a check", "conflict"
)  # fmt: skip
# Where a process is: what it does next.
START, RUN, DECIDE, FENCED, REOPEN, ASK, ANSWERED, DONE = (
    "start", "run", "decide", "fenced", "reopen", "ask", "answered", "done"
)  # fmt: skip


_BY_CHECK = {COMMIT: COMMITTED, ROLLBACK: BY_CHECK, REFUSE: ROLLED_BACK}
"""What a check's answer makes of a half batch."""


class Batch(NamedTuple):
    """A half batch of one message."""

    state: str = NONE
    attempt: int = 1
    fence: tuple[str | None, ...] = (None,) * ATTEMPTS_MAX
    """The fence row of each attempt."""
    effects: tuple[int, ...] = (0,) * ATTEMPTS_MAX
    """How often the local transaction happened under each attempt."""


class Worker(NamedTuple):
    """A producer or a checker: what it does next, and what it has been told."""

    at: str = START
    batch: int = 0
    attempt: int = 0
    verdict: str = ""
    executed: tuple[int, ...] = ()
    """Attempts that this producer ran itself."""


class State(NamedTuple):
    batches: tuple[Batch, ...]
    queue: tuple[int, ...]
    """Batches by queue offset."""
    producers: tuple[Worker, ...]
    checkers: tuple[Worker, ...]
    consumers: tuple[int, ...]
    """Their next offsets."""
    crashes: int
    """How many may yet happen."""


class Step(NamedTuple):
    """Who did what, and which way it went where there was a choice."""

    role: str
    who: int
    what: str
    choice: str = ""


@dataclass(frozen=True)
class Rules:
    """The protocol. Each of them turned off is a bug, which the search must find."""

    tombstones: bool = True
    """A check that finds no fence row puts one there before it says ROLLBACK."""
    fence_with_work: bool = True
    """The fence row is written in the same database transaction as the work."""
    attempts_count: bool = True
    """A verdict decides rows of its own attempt alone."""
    commits_once: bool = True
    """A second COMMIT places nothing."""
    refusals_told: bool = True
    """A check that finds a refusal says so; else it says that nothing happened."""
    never_happened_told: bool = True
    """A check that finds nothing says so; else it says that the local transaction was refused."""


# ---------------------------------------------------------------- what can happen
Outcome = tuple[str, Batch, Worker, bool]
"""A choice, the batch and the worker afterwards, and whether the batch was placed in the queue."""


def beginning(producers: tuple[int, ...] = (0, 0, 0), checkers: int = 2, consumers: int = 2, crashes: int = 2) -> State:
    """Nothing has happened. ``producers`` says which batch each of them sends: those of one batch are a driver, the one
    that replaces it while it sleeps, and so on."""
    return State(
        batches=tuple(Batch() for _ in range(max(producers) + 1)),
        queue=(),
        producers=tuple(Worker(batch=b) for b in producers),
        checkers=tuple(Worker() for _ in range(checkers)),
        consumers=(0,) * consumers,
        crashes=crashes,
    )


def steps(state: State, rules: Rules) -> Iterator[tuple[Step, State]]:
    """Everything that can happen next."""
    for i, worker in enumerate(state.producers):
        for choice, batch, now, placed in _producing(state.batches[worker.batch], worker, rules):
            after = _after(state, worker.batch, batch, placed)
            yield Step("producer", i, worker.at, choice), after._replace(producers=_with(after.producers, i, now))
        if state.crashes and worker.at not in (START, DONE):
            crashed = _with(state.producers, i, Worker(batch=worker.batch))
            yield Step("producer", i, "crash"), state._replace(producers=crashed, crashes=state.crashes - 1)
    for i, worker in enumerate(state.checkers):
        numbers = range(len(state.batches)) if worker.at == START else [worker.batch]
        for number in numbers:
            for choice, batch, now, placed in _checking(state.batches[number], worker, number, rules):
                after = _after(state, number, batch, placed)
                yield Step("checker", i, worker.at, choice), after._replace(checkers=_with(after.checkers, i, now))
        if state.crashes and worker.at != START:
            crashed = _with(state.checkers, i, Worker())
            yield Step("checker", i, "crash"), state._replace(checkers=crashed, crashes=state.crashes - 1)
    for i, offset in enumerate(state.consumers):
        if offset < len(state.queue):
            yield Step("consumer", i, "poll"), state._replace(consumers=_with(state.consumers, i, offset + 1))


@cache
def _producing(batch: Batch, worker: Worker, rules: Rules) -> tuple[Outcome, ...]:
    return tuple(_produce(batch, worker, rules))


@cache
def _checking(batch: Batch, worker: Worker, number: int, rules: Rules) -> tuple[Outcome, ...]:
    return tuple(_check(batch, worker, number, rules))


Item = TypeVar("Item")


def _with(items: tuple[Item, ...], at: int, item: Item) -> tuple[Item, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _after(state: State, number: int, batch: Batch, placed: bool) -> State:
    queue = (*state.queue, number) if placed else state.queue
    return state._replace(batches=_with(state.batches, number, batch), queue=queue)


def _produce(batch: Batch, worker: Worker, rules: Rules) -> Iterator[Outcome]:
    """One run of a batch, as ``TwoPhase.send`` does it.

    Where the real one looks once more before it acts, this one does not: it must be right without.
    """
    at, attempt = worker.at, worker.attempt
    if at == START:  # prepare, or find it prepared
        if batch.state == NONE:
            yield "", batch._replace(state=PENDING), worker._replace(at=RUN, attempt=1), False
        else:
            yield "", batch, _settling(batch, worker), False
    elif at == RUN:
        yield from _run(batch, worker, rules)
    elif at == DECIDE:
        to = ROLLED_BACK if worker.verdict == ROLLBACK else COMMITTED
        is_stale, batch, placed = _decided(batch, attempt, to, rules)
        # A verdict that comes too late ends the query; it starts again and knows nothing.
        yield "", batch, Worker(batch=worker.batch) if is_stale else _settling(batch, worker), placed
    elif at in (FENCED, ANSWERED):
        _, batch, placed = _decided(batch, attempt, _BY_CHECK[worker.verdict], rules)
        yield "", batch, _settling(batch, worker), placed
    elif at == REOPEN:
        if batch.state == BY_CHECK and batch.attempt == attempt:
            following = attempt + 1
            reopened = batch._replace(state=PENDING, attempt=following)
            yield "", reopened, worker._replace(at=RUN, attempt=following), False
        else:
            yield "", batch, _settling(batch, worker), False
    elif at == ASK:
        yield from _ask(batch, worker, rules)


def _settling(batch: Batch, worker: Worker) -> Worker:
    """What a run does next about a batch that it looks at now."""
    if batch.state == BY_CHECK and batch.attempt < ATTEMPTS_MAX:
        return worker._replace(at=REOPEN, attempt=batch.attempt, verdict="")
    if batch.state == PENDING and batch.attempt not in worker.executed:
        return worker._replace(at=ASK, attempt=batch.attempt, verdict="")
    return Worker(at=DONE, batch=worker.batch)


def _run(batch: Batch, worker: Worker, rules: Rules) -> Iterator[Outcome]:
    """The local transaction and its fence row, at one moment."""
    at = worker.attempt - 1
    found = batch.fence[at]
    if found == TOMBSTONE:
        yield "", batch, worker._replace(at=FENCED, verdict=ROLLBACK), False
        return
    ran = worker._replace(at=DECIDE, executed=tuple(sorted({*worker.executed, worker.attempt})))
    if found in (EXECUTED, REFUSED):  # by another run of this attempt
        yield "", batch, ran._replace(verdict=COMMIT if found == EXECUTED else ROLLBACK), False
        return
    done = batch._replace(effects=_with(batch.effects, at, batch.effects[at] + 1))
    if rules.fence_with_work:
        done = done._replace(fence=_with(batch.fence, at, EXECUTED))
    yield EXECUTED, done, ran._replace(verdict=COMMIT), False
    yield REFUSED, batch._replace(fence=_with(batch.fence, at, REFUSED)), ran._replace(verdict=ROLLBACK), False


def _ask(batch: Batch, worker: Worker, rules: Rules) -> Iterator[Outcome]:
    """A check of a batch that is old enough; while it is young the answer is UNKNOWN, which changes nothing."""
    at = worker.attempt - 1
    found = batch.fence[at]
    if found is None and rules.tombstones:
        batch = batch._replace(fence=_with(batch.fence, at, TOMBSTONE))
    verdict = COMMIT if found == EXECUTED else ROLLBACK
    if (found == REFUSED and rules.refusals_told) or (found is None and not rules.never_happened_told):
        verdict = REFUSE
    yield "", batch, worker._replace(at=ANSWERED, verdict=verdict), False


def _decided(batch: Batch, attempt: int, to: str, rules: Rules) -> tuple[bool, Batch, bool]:
    """A verdict's commit to ``op``: the first marker of an attempt wins. Is it stale, the batch, was it placed?"""
    if batch.attempt != attempt and rules.attempts_count:
        return True, batch, False
    if batch.state == PENDING:
        return False, batch._replace(state=to), to == COMMITTED
    if (batch.state == COMMITTED) == (to == COMMITTED):
        return False, batch, to == COMMITTED and not rules.commits_once
    return False, batch._replace(state=CONFLICT), False


def _check(batch: Batch, worker: Worker, number: int, rules: Rules) -> Iterator[Outcome]:
    """A round of checks, a batch at a time."""
    if worker.at == START and batch.state == PENDING:
        yield str(number), batch, Worker(ASK, number, batch.attempt), False
    elif worker.at == ASK:
        yield from _ask(batch, worker, rules)
    elif worker.at == ANSWERED:
        _, batch, placed = _decided(batch, worker.attempt, _BY_CHECK[worker.verdict], rules)
        yield "", batch, Worker(), placed


# ---------------------------------------------------------------- what must hold
def wrong_with(state: State) -> str | None:
    """What no state may be."""
    if len(set(state.queue)) < len(state.queue):
        return "a message is in the queue twice"
    for number, batch in enumerate(state.batches):
        placed = number in state.queue
        if batch.state == CONFLICT:
            return f"batch {number} has two verdicts"
        if sum(batch.effects) > 1:
            return f"the local transaction of batch {number} happened twice"
        if placed != (batch.state == COMMITTED):
            return f"batch {number} is {batch.state}, and {'visible' if placed else 'not visible'}"
        if placed and not batch.effects[batch.attempt - 1]:
            return f"batch {number} is visible under attempt {batch.attempt}, which did not happen"
        refused = batch.fence.index(REFUSED) if REFUSED in batch.fence else ATTEMPTS_MAX
        if any(found in (EXECUTED, REFUSED) for found in batch.fence[refused + 1 :]):
            return f"the local transaction of batch {number} was refused and ran again"
        if batch.state == ROLLED_BACK and REFUSED not in batch.fence:
            return f"batch {number} is rolled back for good, and nobody refused it"
        if batch.state in (ROLLED_BACK, BY_CHECK) and any(batch.effects):
            return f"batch {number} is {batch.state}, and its local transaction happened"
    return None


def is_unsettled(state: State) -> bool:
    """At an end of everything: does anything wait for nobody?"""
    return any(b.state == PENDING for b in state.batches) or any(o < len(state.queue) for o in state.consumers)


# ---------------------------------------------------------------- the search
@dataclass
class Found:
    """What a search saw.

    Attributes
    ----------
    states, steps, ends : int
        States, steps between them, and states in which nothing can happen any more.
    layers : int
        The longest way to a state, in steps; that to the first one counts as one.
    finished : bool
        False when it was stopped before it had seen every state.
    wrong : str or None
        The first thing that was wrong; ``trace`` is the way there.
    """

    states: int = 0
    steps: int = 0
    ends: int = 0
    layers: int = 0
    finished: bool = True
    wrong: str | None = None
    trace: list[Step] = field(default_factory=list)
    seconds: float = 0.0


def search(start: State, rules: Rules = Rules(), seconds_max: float = float("inf")) -> Found:
    """Visit every state that can be reached, nearest first, or stop at the first that is wrong."""
    return _Search(start, rules).run(seconds_max)


class _Search:
    """A search whose states are numbers of 64 bits, and whose layers are sorted arrays of them.

    A process reads what is shared, the batches and the queue, and what it knows itself, and never another process. So
    what it can do next is looked up in a table by these two. The table is filled by :func:`steps`, which is asked about
    a state in which the process is alone. What is shared and what a process knows are numbered as they are met, and a
    state is these numbers side by side: nothing is hashed, so no two states are taken for one.

    Producers of one batch are all alike, and so are checkers and consumers: their numbers are kept in order.
    """

    def __init__(self, start: State, rules: Rules) -> None:
        self.rules = rules
        self.shared = _Numbers((start.batches, start.queue))
        self.known = _Numbers()
        processes = [(_ROLES[0], worker) for worker in sorted(start.producers, key=lambda p: p.batch)]
        processes += [(_ROLES[1], worker) for worker in start.checkers]
        processes += [(_ROLES[2], offset) for offset in start.consumers]
        self.processes = len(processes)
        kinds = [(role, known.batch if role == "producer" else 0) for role, known in processes]
        self.alike = [slice(kinds.index(k), kinds.index(k) + kinds.count(k)) for k in dict.fromkeys(kinds)]
        self.first = [0, start.crashes, *(self.known.of(process) for process in processes)]
        self.shared_bits = min(_SHARED_BITS_MAX, 64 - _CRASH_BITS - _KNOWN_BITS * self.processes)
        self.widths = np.array([self.shared_bits, _CRASH_BITS, *[_KNOWN_BITS] * self.processes], np.uint64)
        self.shifts = np.concatenate([[0], np.cumsum(self.widths)[:-1]]).astype(np.uint64)
        # By what is shared, what a process knows, and a choice: what is shared then, what it knows then, 1 for a crash.
        self.table = np.zeros((0, 0, 0, 3), np.int32)
        self.choices = np.zeros((0, 0), np.int32)  # -1: not asked yet

    def run(self, seconds_max: float) -> Found:
        began = time.monotonic()
        found = Found()
        layers = [self._pack(np.array([self.first], np.int32))]
        seen = layers[0]
        while len(layers[-1]) and found.wrong is None and found.finished:
            parts = []
            for at in range(0, len(layers[-1]), _CHUNK):
                parts.append(self._after(layers[-1][at : at + _CHUNK], found))
                found.finished = time.monotonic() - began < seconds_max
                if not found.finished:
                    break
            following = np.unique(np.concatenate(parts))
            following = following[~_in_sorted(following, seen)]
            seen = np.concatenate([seen, following])
            seen.sort(kind="stable")  # two sorted runs are merged
            layers.append(following)
            self._judge(layers, found)
        found.layers, found.states, found.seconds = len(layers) - 1, len(seen), time.monotonic() - began
        return found

    # ------------------------------------------------------------------ states as numbers
    def _pack(self, rows: np.ndarray) -> np.ndarray:
        """The states of some rows of numbers, sorted, each once."""
        for alike in self.alike:
            columns = slice(2 + alike.start, 2 + alike.stop)
            rows[:, columns] = np.sort(rows[:, columns], axis=1)
        return np.unique((rows.astype(np.uint64) << self.shifts).sum(axis=1, dtype=np.uint64))

    def _unpack(self, states: np.ndarray) -> np.ndarray:
        masks = (np.uint64(1) << self.widths) - np.uint64(1)
        return ((states[:, None] >> self.shifts) & masks).astype(np.int32)

    def _state(self, row: np.ndarray) -> State:
        batches, queue = self.shared[row[0]]
        of: dict[str, list[Any]] = {role: [] for role in _ROLES}
        for number in row[2:]:
            role, known = self.known[number]
            of[role].append(known)
        return State(batches, queue, *(tuple(of[role]) for role in _ROLES), int(row[1]))

    # ------------------------------------------------------------------ what can happen
    def _after(self, states: np.ndarray, found: Found) -> np.ndarray:
        """All states after these; counts steps and ends, and looks whether the ends are good ones."""
        rows = self._unpack(states)
        self._learn(rows)
        is_end = np.ones(len(rows), bool)
        parts = []
        for process in range(self.processes):
            counts = self.choices[rows[:, 0], rows[:, 2 + process]]
            for choice in range(int(counts.max())):
                moving = np.flatnonzero(counts > choice)
                after = self.table[rows[moving, 0], rows[moving, 2 + process], choice]
                allowed = rows[moving, 1] >= after[:, 2]
                moving, after = moving[allowed], after[allowed]
                is_end[moving[after[:, 2] == 0]] = False
                found.steps += len(moving)
                moved = rows[moving]
                moved[:, 0], moved[:, 2 + process] = after[:, 0], after[:, 1]
                moved[:, 1] -= after[:, 2]
                parts.append(self._pack(moved))
        found.ends += int(is_end.sum())
        if found.wrong is None and any(is_unsettled(self._state(row)) for row in rows[is_end]):
            found.wrong = "everything has ended, and a message is still open"
        return np.unique(np.concatenate(parts))

    def _learn(self, rows: np.ndarray) -> None:
        """Fill the table where these states look."""
        pairs = np.unique(rows[:, [0]].astype(np.int64) << 32 | rows[:, 2:])
        for shared, known in ((int(p >> 32), int(p & 0xFFFFFFFF)) for p in pairs):
            if shared < len(self.choices) and known < self.choices.shape[1] and self.choices[shared, known] >= 0:
                continue
            outcomes = [self._number(after) for _, after in self._alone(shared, known)]
            self._make_room()
            self.choices[shared, known] = len(outcomes)
            self.table[shared, known, : len(outcomes)] = np.array(outcomes, np.int32).reshape(-1, 3)

    def _alone(self, shared: int, known: int) -> Iterator[tuple[Step, State]]:
        batches, queue = self.shared[shared]
        role, what = self.known[known]
        alone = [(what,) if role == r else () for r in _ROLES]
        return steps(State(batches, queue, *alone, crashes=1), self.rules)

    def _number(self, after: State) -> tuple[int, int, int]:
        [(role, known)] = [(r, k) for r, part in zip(_ROLES, after[2:5], strict=True) for k in part]
        return self.shared.of((after.batches, after.queue)), self.known.of((role, known)), 1 - after.crashes

    def _make_room(self) -> None:
        assert len(self.shared) <= 1 << max(self.shared_bits, 0), "a number has too few bits"
        assert len(self.known) <= 1 << _KNOWN_BITS, "a number has too few bits"
        old = self.choices
        if len(self.shared) > old.shape[0] or len(self.known) > old.shape[1]:
            size = (2 * len(self.shared), 2 * len(self.known))
            self.choices, table = np.full(size, -1, np.int32), np.zeros((*size, _CHOICES_MAX, 3), np.int32)
            self.choices[: old.shape[0], : old.shape[1]] = old
            table[: old.shape[0], : old.shape[1], : self.table.shape[2]] = self.table
            self.table = table

    # ------------------------------------------------------------------ what must hold
    def _judge(self, layers: list[np.ndarray], found: Found) -> None:
        """Whether anything is wrong in the last layer; it depends on what is shared alone."""
        shared = (layers[-1] & np.uint64((1 << self.shared_bits) - 1)).astype(np.int64)
        for number in np.unique(shared):
            batches, queue = self.shared[number]
            wrong = wrong_with(State(batches, queue, (), (), (), 0))
            if wrong:
                found.wrong = wrong
                found.trace = self._way_to(layers, int(layers[-1][np.argmax(shared == number)]))
                return

    def _way_to(self, layers: list[np.ndarray], state: int) -> list[Step]:
        """Steps from the first state to one of the last layer; each layer is asked which of its states leads on."""
        way: list[Step] = []
        for layer in layers[-2::-1]:
            step, state = next(
                (step, int(before))
                for before in layer
                for step, after in steps(self._state(self._unpack(np.array([before]))[0]), self.rules)
                if self._number_of(after) == state
            )
            way.append(step)
        return way[::-1]

    def _number_of(self, state: State) -> int:
        processes = [(role, known) for role, part in zip(_ROLES, state[2:5], strict=True) for known in part]
        numbers = [self.shared.of((state.batches, state.queue)), state.crashes, *map(self.known.of, processes)]
        return int(self._pack(np.array([numbers], np.int32))[0])


_ROLES = ("producer", "checker", "consumer")
_CRASH_BITS, _KNOWN_BITS, _SHARED_BITS_MAX = 2, 7, 20
_CHOICES_MAX = 8
_CHUNK = 500_000
"""States that are followed at once."""


class _Numbers(list[Any]):
    """Things by their numbers, in the order in which they were met."""

    def __init__(self, *things: Any) -> None:
        super().__init__(things)
        self._number = {thing: number for number, thing in enumerate(things)}

    def of(self, thing: Any) -> int:
        if thing not in self._number:
            self._number[thing] = len(self)
            self.append(thing)
        return self._number[thing]


def _in_sorted(wanted: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Which of these are among sorted others."""
    at = np.minimum(np.searchsorted(among, wanted), len(among) - 1)
    return among[at] == wanted


SMALL = beginning((0, 0), 2, 2, 1)
"""Enough to find what is wrong without a rule."""
LARGER = {
    "four producers of one batch": beginning((0, 0, 0, 0)),
    "two batches": beginning((0, 0, 1), checkers=2, consumers=1, crashes=1),
}
"""For a long run, when there is time."""


def run(seconds: float, seed: int) -> dict[str, int | str | list[str]]:
    """Whole searches, and one for each rule turned off. There is nothing to choose, so the seed changes nothing."""
    end = time.monotonic() + seconds
    found = search(beginning())
    failures = [found.wrong] if found.wrong else []
    larger = {}
    for name, bound in LARGER.items():
        more = search(bound, seconds_max=end - time.monotonic())
        larger[name] = f"{more.states:,} states" + ("" if more.finished else f" in {more.layers} steps, stopped")
        print(f"model, {name}: {larger[name]}, {more.wrong or 'nothing is wrong'}", flush=True)
        failures += [f"{name}: {more.wrong}"] if more.wrong else []
    caught = 0
    for rule in fields(Rules):
        broken = search(SMALL, Rules(**{rule.name: False}))
        caught += broken.wrong is not None
        if broken.wrong is None:
            failures.append(f"without {rule.name} nothing is found to be wrong")
        print(f"model without {rule.name}: {broken.wrong}, after {broken.states:,} states", flush=True)
    return {
        "states": found.states,
        "steps": found.steps,
        "ends": found.ends,
        **larger,
        "rules caught": caught,
        "failures": failures,
    }


if __name__ == "__main__":
    result = search(beginning(crashes=int(sys.argv[1]) if len(sys.argv) > 1 else 2))
    print(f"{result.states:,} states, {result.steps:,} steps, {result.ends:,} ends, {result.seconds:.0f} s")
    for line in [result.wrong or "nothing is wrong", *result.trace]:
        print("  ", line)
