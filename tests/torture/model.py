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
from typing import NamedTuple, TypeVar

ATTEMPTS_MAX = 3
EXECUTED, REFUSED, TOMBSTONE = "executed", "refused", "tombstone"
COMMIT, ROLLBACK = "commit", "rollback"

# Of a half batch.
NONE, PENDING, COMMITTED, ROLLED_BACK, BY_CHECK, CONFLICT = (
    "none", "pending", "committed", "rolled back", "rolled back by a check", "conflict"
)  # fmt: skip
# Where a process is: what it does next.
START, RUN, DECIDE, FENCED, REOPEN, ASK, ANSWERED, DONE = (
    "start", "run", "decide", "fenced", "reopen", "ask", "answered", "done"
)  # fmt: skip


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
        _, batch, placed = _decided(batch, attempt, COMMITTED if worker.verdict == COMMIT else BY_CHECK, rules)
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
    yield "", batch, worker._replace(at=ANSWERED, verdict=COMMIT if found == EXECUTED else ROLLBACK), False


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
        to = COMMITTED if worker.verdict == COMMIT else BY_CHECK
        _, batch, placed = _decided(batch, worker.attempt, to, rules)
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
    wrong : str or None
        The first thing that was wrong; ``trace`` is the way there.
    """

    states: int = 0
    steps: int = 0
    ends: int = 0
    wrong: str | None = None
    trace: list[Step] = field(default_factory=list)
    seconds: float = 0.0


def canonical(state: State) -> State:
    """Producers of one batch are all alike, and so are checkers and consumers."""
    batches, queue, producers, checkers, consumers, crashes = state
    ordered = tuple(sorted(producers, key=lambda p: (p.batch, p)))
    return State(batches, queue, ordered, tuple(sorted(checkers)), tuple(sorted(consumers)), crashes)


def search(start: State, rules: Rules = Rules()) -> Found:
    """Visit every state that can be reached, nearest first, or stop at the first that is wrong."""
    began = time.monotonic()
    found = Found()
    start = canonical(start)
    seen: set[State] = {start}
    parents: dict[State, tuple[State, Step]] = {}
    layer = [start]
    while layer and found.wrong is None:
        following: list[State] = []
        for state in layer:
            is_end = True
            for step, after in steps(state, rules):
                found.steps += 1
                is_end &= step.what == "crash"
                after = canonical(after)
                if after in seen:
                    continue
                seen.add(after)
                if rules != Rules():
                    parents[after] = (state, step)
                following.append(after)
                found.wrong = found.wrong or wrong_with(after)
                if found.wrong:
                    found.trace = _trace(parents, after)
                    break
            if is_end:
                found.ends += 1
                if is_unsettled(state):
                    found.wrong = "everything has ended, and a message is still open"
            if found.wrong:
                break
        layer = following
    found.states, found.seconds = len(seen), time.monotonic() - began
    return found


def _trace(parents: dict[State, tuple[State, Step]], state: State) -> list[Step]:
    way: list[Step] = []
    while state in parents:
        state, step = parents[state]
        way.append(step)
    return way[::-1]


SMALL = beginning((0, 0), 2, 2, 1)
"""Seconds instead of minutes."""


def run(seconds: float, seed: int) -> dict[str, int | str | list[str]]:
    """The whole search, and one for each rule turned off. There is nothing to choose, so the seed changes nothing."""
    found = search(beginning())
    failures = [found.wrong] if found.wrong else []
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
        "rules caught": caught,
        "failures": failures,
    }


if __name__ == "__main__":
    result = search(beginning(crashes=int(sys.argv[1]) if len(sys.argv) > 1 else 2))
    print(f"{result.states:,} states, {result.steps:,} steps, {result.ends:,} ends, {result.seconds:.0f} s")
    for line in [result.wrong or "nothing is wrong", *result.trace]:
        print("  ", line)
