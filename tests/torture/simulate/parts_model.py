"""The protocol of a half batch in parts, as a small machine of its own, and a search of everything that can happen.

A half batch has two parts, each one transaction. A driver prepares it, says in the fence that its attempt runs by
parts, starts a task for each part, waits for their answers and decides them in one commit. A task is a process of its
own: it may run twice, two at once, or after its driver has died. ``model.py`` has the rest: sends, queues, consumers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.torture.simulate.model import (
    BY_CHECK,
    COMMIT,
    COMMITTED,
    CONFLICT,
    EXECUTED,
    NONE,
    PENDING,
    REFUSE,
    REFUSED,
    ROLLBACK,
    ROLLED_BACK,
    TOMBSTONE,
    _with,
)

PARTS, ATTEMPTS_MAX = 2, 2
BY_PART = "by part"
"""The word of an attempt in the fence: it runs by parts. A tombstone may stand in its place."""
# Where a driver is: what it does next.
START, BEGIN, WAIT, DECIDE, SETTLE, ANSWERED, DONE = "start", "begin", "wait", "decide", "settle", "answered", "done"
OF_FENCE = {EXECUTED: COMMIT, REFUSED: REFUSE, TOMBSTONE: ROLLBACK}
"""What a fence row tells a task or a check."""
STATE_OF = {COMMIT: COMMITTED, REFUSE: ROLLED_BACK, ROLLBACK: BY_CHECK}


class Part(NamedTuple):
    """The messages of a part: their state in ``op``, and by attempt their fence row and how often their work was
    done."""

    state: str = NONE
    attempt: int = 1
    fence: tuple[str | None, ...] = (None,) * ATTEMPTS_MAX
    effects: tuple[int, ...] = (0,) * ATTEMPTS_MAX


class Driver(NamedTuple):
    """A run of the query, or a checker: what it does next, with which attempt, and the verdicts by part."""

    at: str = START
    attempt: int = 0
    verdicts: tuple[str | None, ...] = (None,) * PARTS
    ran: tuple[int, ...] = ()
    """Attempts that this driver ran, about which it does not ask."""


class Task(NamedTuple):
    attempt: int
    part: int


class State(NamedTuple):
    parts: tuple[Part, ...] = (Part(),) * PARTS
    words: tuple[str | None, ...] = (None,) * ATTEMPTS_MAX
    drivers: tuple[Driver, ...] = (Driver(), Driver())
    checkers: tuple[Driver, ...] = (Driver(),)
    tasks: tuple[Task, ...] = ()
    """Tasks that have not run."""
    crashes: int = 1
    again: int = 1
    """How many tasks Spark may yet start again."""


@dataclass(frozen=True)
class Rules:
    """What the protocol does for parts. Each rule turned off is a bug, which the search must find."""

    own_fence: bool = True
    """A task looks at the fence row of its own part."""
    says_first: bool = True
    """The fence has the word of an attempt by parts before its first task begins."""
    buries_parts: bool = True
    """A check puts a tombstone for each part without a row."""
    some_are_no_refusal: bool = True
    """A driver of whose parts a check has buried some decides nothing."""
    each_by_itself: bool = True
    """A check, and a replay, answer for each part by its own row."""
    attempts_count: bool = True
    """A verdict decides rows of its own attempt alone."""
    answers_of_this_attempt: bool = True
    """A driver takes answers of the attempt that it runs."""


SMALL = State(drivers=(Driver(),))
"""One driver, which starts again when it dies, and one checker."""
ALL_RULES = Rules()


# ---------------------------------------------------------------- what can happen
def steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Everything that can happen next, each with its name."""
    for i, driver in enumerate(state.drivers):
        for name, after, now in _drive(state, driver, rules):
            yield f"driver {i}: {name}", after._replace(drivers=_with(after.drivers, i, now))
        if state.crashes and driver.at not in (START, DONE):
            dead = state._replace(drivers=_with(state.drivers, i, Driver()), crashes=state.crashes - 1)
            yield f"driver {i} dies", dead
    for i, checker in enumerate(state.checkers):
        for name, after, now in _check(state, checker, rules):
            yield f"checker {i}: {name}", after._replace(checkers=_with(after.checkers, i, now))
    for at, task in enumerate(state.tasks):
        left = state._replace(tasks=(*state.tasks[:at], *state.tasks[at + 1 :]))
        yield from _run(left, task, rules)
        if state.again:  # Spark starts the task once more; or it is lost, and another one takes its place
            twice = tuple(sorted((*state.tasks, task)))
            yield f"{task} is started again", state._replace(tasks=twice, again=state.again - 1)


def _drive(state: State, driver: Driver, rules: Rules) -> Iterator[tuple[str, State, Driver]]:
    at, attempt = driver.at, driver.attempt
    if at == START:
        if state.parts[0].state == NONE:
            prepared = state._replace(parts=tuple(part._replace(state=PENDING) for part in state.parts))
            yield "prepares", prepared, Driver(BEGIN, 1)
        else:
            yield "finds it prepared", state, Driver(SETTLE)
    elif at == BEGIN:
        yield from _begin(state, driver, rules)
    elif at == WAIT:
        mine = _of_attempt(state, attempt)
        if all(driver.verdicts[n] for n in mine):
            yield "has all answers", state, driver._replace(at=DECIDE)
        elif not any(task.attempt == attempt for task in state.tasks):
            yield "has lost its tasks", state, Driver()  # the job fails, and the query ends and starts again
    elif at == DECIDE:
        verdicts = set(driver.verdicts) - {None}
        if ROLLBACK in verdicts and len(verdicts) > 1:
            if rules.some_are_no_refusal:
                yield "ends: a check has buried some parts", state, Driver()
                return
            driver = driver._replace(verdicts=tuple(v and REFUSE for v in driver.verdicts))
        yield "decides", _decided(state, driver, rules), driver._replace(at=SETTLE, verdicts=(None,) * PARTS)
    elif at == SETTLE:
        yield from _settle(state, driver, rules)
    elif at == ANSWERED:
        yield "decides by the fence", _decided(state, driver, rules), Driver(SETTLE, ran=driver.ran)


def _begin(state: State, driver: Driver, rules: Rules) -> Iterator[tuple[str, State, Driver]]:
    """Write the word of the attempt, and start its tasks."""
    attempt, at = driver.attempt, driver.attempt - 1
    mine = _of_attempt(state, attempt)
    if state.words[at] == TOMBSTONE:
        verdicts = tuple(ROLLBACK if n in mine else None for n in range(PARTS))
        yield "finds a tombstone", state, driver._replace(at=ANSWERED, verdicts=verdicts)
        return
    if rules.says_first:
        state = state._replace(words=_with(state.words, at, BY_PART))
    tasks = tuple(sorted((*state.tasks, *(Task(attempt, n) for n in mine))))
    kept = driver.verdicts if not rules.answers_of_this_attempt else (None,) * PARTS
    ran = tuple(sorted({*driver.ran, attempt}))
    yield "starts tasks", state._replace(tasks=tasks), driver._replace(at=WAIT, verdicts=kept, ran=ran)


def _run(state: State, task: Task, rules: Rules) -> Iterator[tuple[str, State]]:
    """A task claims the fence row of its part, and does its work, in one database transaction."""
    at, part = task.attempt - 1, state.parts[task.part]
    row = state.parts[task.part if rules.own_fence else 0].fence[at]
    outcomes = [EXECUTED, REFUSED] if row is None else [row]
    for outcome in outcomes:
        now = part
        if row is None:
            done = part.effects[at] + (outcome == EXECUTED)
            now = part._replace(fence=_with(part.fence, at, outcome), effects=_with(part.effects, at, done))
        after = state._replace(parts=_with(state.parts, task.part, now))
        yield f"{task} ends: {outcome}", _told(after, task, OF_FENCE[outcome], rules)


def _told(state: State, task: Task, verdict: str, rules: Rules) -> State:
    """Drivers that wait for this part have its first answer now."""
    drivers = tuple(
        driver._replace(verdicts=_with(driver.verdicts, task.part, verdict))
        if driver.at == WAIT and driver.verdicts[task.part] is None
        and (driver.attempt == task.attempt or not rules.answers_of_this_attempt)
        else driver
        for driver in state.drivers
    )  # fmt: skip
    return state._replace(drivers=drivers)


def _settle(state: State, driver: Driver, rules: Rules) -> Iterator[tuple[str, State, Driver]]:
    """A replay, attempt by attempt: what never happened runs again, and the fence answers for the rest."""
    for attempt in range(1, ATTEMPTS_MAX + 1):
        by_check = [n for n, part in enumerate(state.parts) if part.attempt == attempt and part.state == BY_CHECK]
        if by_check and attempt < ATTEMPTS_MAX:
            parts = state.parts
            for n in by_check:
                parts = _with(parts, n, parts[n]._replace(state=PENDING, attempt=attempt + 1))
            yield "reopens", state._replace(parts=parts), driver._replace(at=BEGIN, attempt=attempt + 1)
            return
        if _of_attempt(state, attempt) and attempt not in driver.ran:
            after, verdicts = _asked(state, attempt, rules)
            yield "asks the fence", after, driver._replace(at=ANSWERED, attempt=attempt, verdicts=verdicts)
            return
    yield "is done", state, Driver(DONE)


def _check(state: State, checker: Driver, rules: Rules) -> Iterator[tuple[str, State, Driver]]:
    if checker.at == START:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            if _of_attempt(state, attempt):
                after, verdicts = _asked(state, attempt, rules)
                yield f"asks about attempt {attempt}", after, Driver(ANSWERED, attempt, verdicts)
    else:
        yield "decides", _decided(state, checker, rules), Driver()


def _asked(state: State, attempt: int, rules: Rules) -> tuple[State, tuple[str | None, ...]]:
    """What the fence says of the pending parts of an attempt. What has no row is buried."""
    at, mine = attempt - 1, _of_attempt(state, attempt)
    if state.words[at] != BY_PART and not any(state.parts[n].fence[at] for n in range(PARTS)):
        state = state._replace(words=_with(state.words, at, TOMBSTONE))
        return state, tuple(ROLLBACK if n in mine else None for n in range(PARTS))
    parts, verdicts = state.parts, [None] * PARTS
    rows = [parts[n].fence[at] for n in range(PARTS)]
    for n in mine:
        row = rows[n]
        if row is None and rules.buries_parts:
            parts = _with(parts, n, parts[n]._replace(fence=_with(parts[n].fence, at, TOMBSTONE)))
        if not rules.each_by_itself and EXECUTED in rows:
            row = EXECUTED
        verdicts[n] = OF_FENCE[row or TOMBSTONE]  # type: ignore[call-overload]
    return state._replace(parts=parts), tuple(verdicts)


def _decided(state: State, driver: Driver, rules: Rules) -> State:
    """One commit to ``op`` with the verdicts of an attempt: the first marker of a part's attempt wins."""
    parts = state.parts
    for n, verdict in enumerate(driver.verdicts):
        part = parts[n]
        if verdict is None or (part.attempt != driver.attempt and rules.attempts_count):
            continue
        to = STATE_OF[verdict]
        if part.state == PENDING:
            parts = _with(parts, n, part._replace(state=to))
        elif (part.state == COMMITTED) != (to == COMMITTED):
            parts = _with(parts, n, part._replace(state=CONFLICT))
    return state._replace(parts=parts)


def _of_attempt(state: State, attempt: int) -> list[int]:
    """The pending parts of an attempt."""
    return [n for n, part in enumerate(state.parts) if part.state == PENDING and part.attempt == attempt]


# ---------------------------------------------------------------- what must hold
def wrong_with(state: State) -> str | None:
    """What no state may be."""
    for n, part in enumerate(state.parts):
        if part.state == CONFLICT:
            return f"part {n} has two verdicts"
        if sum(part.effects) > 1:
            return f"the work of part {n} was done twice"
        if part.state == COMMITTED and not part.effects[part.attempt - 1]:
            return f"part {n} is visible under attempt {part.attempt}, which did not happen"
        if part.state in (ROLLED_BACK, BY_CHECK) and any(part.effects):
            return f"part {n} is {part.state}, and its work was done"
        if part.state == ROLLED_BACK and REFUSED not in part.fence:
            return f"part {n} is rolled back for good, and nobody refused it"
        refused = part.fence.index(REFUSED) if REFUSED in part.fence else ATTEMPTS_MAX
        if any(row in (EXECUTED, REFUSED) for row in part.fence[refused + 1 :]):
            return f"part {n} was refused and ran again"
    return None


# ---------------------------------------------------------------- the search
@dataclass
class Found:
    """What a search saw: states, steps between them, ends, and the first wrong thing with the way there."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    wrong: str | None = None
    trace: list[str] = field(default_factory=list)


def search(start: State, rules: Rules = ALL_RULES) -> Found:
    """Visit every state that can be reached, nearest first, or stop at the first that is wrong."""
    found, before = Found(), {start: ("", start)}
    layer = [start]
    while layer and found.wrong is None:
        following = []
        for state in layer:
            is_end = True
            for name, after in steps(state, rules):
                is_end = False
                found.steps += 1
                after = after._replace(drivers=tuple(sorted(after.drivers, key=repr)))
                if after not in before:
                    before[after] = (name, state)
                    following.append(after)
            found.ends += is_end
            found.wrong = wrong_with(state)
            if found.wrong is None and is_end and any(part.state == PENDING for part in state.parts):
                found.wrong = "everything has ended, and a part is still pending"
            if found.wrong is not None:
                while state != start:
                    name, state = before[state]
                    found.trace.insert(0, name)
                break
        layer = following
    found.states = len(before)
    return found
