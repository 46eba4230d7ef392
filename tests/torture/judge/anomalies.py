"""What must never be in a history, after Jepsen's Kafka workload and RocketMQ's own promises.

:func:`find_anomalies` looks for every kind of :class:`AnomalyKind` and tolerates none. It needs not all of a history: a
kind that has nothing to go by finds nothing. So each level of the tests notes what it can know.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tests.support.inside import name_of
from tests.torture.judge.history import FINAL, Event, Kind, Phase

COMMIT = "COMMIT_MESSAGE"
ROLLBACK = "ROLLBACK_MESSAGE"
UNKNOWN = "UNKNOWN"

EXPIRED = "open for "
"""How the reason of a quarantine begins that has to do with age, not with checks."""


class AnomalyKind(str, Enum):
    """What can be wrong; the words say what was seen."""

    LOST_WRITE = "lost write"
    DUPLICATE = "duplicate"
    ABORTED_READ = "aborted read"
    HALF_VISIBLE_READ = "half-visible read"
    TORN_TRANSACTION = "torn transaction"
    CONFLICTING_OUTCOME = "conflicting outcome"
    OUTCOME_CHANGED = "outcome changed after the first marker"
    MARKER_OF_ANOTHER_ATTEMPT = "marker applied to another attempt"
    INCONSISTENT_OFFSETS = "inconsistent offsets"
    GAP_IN_QUEUE = "gap in a queue"
    SKIPPED_POLL = "skipped poll"
    NON_MONOTONIC_POLL = "non-monotonic poll"
    NON_MONOTONIC_SEND = "non-monotonic send"
    ORDER_BROKEN = "order broken within a key"
    CHECKED_AFTER_RESOLUTION = "checked again after resolution"
    DISCARDED_WITHOUT_CHECK = "discarded without ever being checked"
    STUCK_HALF = "stuck half"
    UNSTABLE_RANGE = "unstable range"
    REPLAY_DIVERGENCE = "replay divergence"
    MISSING_VERSION = "missing Delta version"
    OVERWRITTEN_VERSION = "overwritten Delta version"
    LOCAL_STATE_DISAGREES = "local state and messages disagree"
    REFUSED_AGAIN = "a refused transaction ran again"
    NEVER_REFUSED = "what never happened is rolled back for good"
    DRAINED_OTHERWISE = "the table messages is no prefix of op"
    LEFT_OPEN = "a half batch left before its end"
    EXPIRED_EARLY = "a message expired before its time"


_K = AnomalyKind
FAMILIES: dict[str, frozenset[AnomalyKind]] = {
    "lost and doubled messages": frozenset({_K.LOST_WRITE, _K.DUPLICATE}),
    "visibility": frozenset({_K.ABORTED_READ, _K.HALF_VISIBLE_READ, _K.TORN_TRANSACTION}),
    "outcome of a transaction": frozenset({_K.CONFLICTING_OUTCOME, _K.OUTCOME_CHANGED}),
    "attempts and replays": frozenset({_K.MARKER_OF_ANOTHER_ATTEMPT, _K.REPLAY_DIVERGENCE}),
    "offsets": frozenset({_K.INCONSISTENT_OFFSETS, _K.GAP_IN_QUEUE}),
    "polling": frozenset({_K.SKIPPED_POLL, _K.NON_MONOTONIC_POLL, _K.UNSTABLE_RANGE}),
    "order": frozenset({_K.NON_MONOTONIC_SEND, _K.ORDER_BROKEN}),
    "checks": frozenset({_K.CHECKED_AFTER_RESOLUTION, _K.DISCARDED_WITHOUT_CHECK, _K.STUCK_HALF}),
    "Delta versions": frozenset({_K.MISSING_VERSION, _K.OVERWRITTEN_VERSION}),
    "local state": frozenset({_K.LOCAL_STATE_DISAGREES}),
    "refusals": frozenset({_K.REFUSED_AGAIN, _K.NEVER_REFUSED}),
    "the table messages": frozenset({_K.DRAINED_OTHERWISE}),
    "leaving": frozenset({_K.LEFT_OPEN}),
    "expiring": frozenset({_K.EXPIRED_EARLY}),
}
"""Each kind in one family: kinds of a family break the same promise."""


@dataclass(frozen=True)
class Anomaly:
    """One thing that is wrong, and the events that show it."""

    kind: AnomalyKind
    sentence: str
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind.value}: {self.sentence}", *map(str, self.events)])


@dataclass(frozen=True)
class Rules:
    """What the run was set to.

    Attributes
    ----------
    checks_max : int
        Answered checks before a transaction may be discarded (``transactionCheckMax``).
    stuck_after_s : float or None
        Checks × interval + slack: a half batch that is open for longer at the end is stuck. None: nothing may be open.
    conflicts_resolved : bool
        A person resolved every conflict that was told of before the end.
    fifo : frozenset of str
        Topics whose keys keep their order whenever their messages are decided.
    numbered_when_reopened : bool
        The number of a message that was reopened says when that was; else it may stand behind later ones.
    retention_s : float or None
        How old a message must be to expire; None: nobody looks.
    """

    checks_max: int = 15
    stuck_after_s: float | None = None
    conflicts_resolved: bool = False
    fifo: frozenset[str] = frozenset()
    numbered_when_reopened: bool = False
    retention_s: float | None = None


def find_anomalies(history: Iterable[Event], rules: Rules | None = None) -> list[Anomaly]:
    """Everything that is wrong in a history."""
    run = _Run(history, rules or Rules())
    return [anomaly for look in _LOOKS for anomaly in look(run)]


def kinds_of(anomalies: Iterable[Anomaly]) -> set[AnomalyKind]:
    return {a.kind for a in anomalies}


# ---------------------------------------------------------------- a history, ordered for the questions below
PENDING, COMMITTED, ROLLED_BACK, BY_CHECK, BY_DISCARD, QUARANTINED = range(6)
_ROLLED_BACK = (ROLLED_BACK, BY_CHECK, BY_DISCARD)
Queue = tuple[str, int]


@dataclass
class _Row:
    """A half row, and what the markers make of it one after the other."""

    event: Event
    markers: list[Event] = field(default_factory=list)
    states: list[tuple[int, int, int]] = field(default_factory=list)  # version, state, attempt after each marker
    state: int = PENDING
    attempt: int = 1
    opened: float = 0.0
    in_conflict: bool = False
    placed: list[Event] = field(default_factory=list)
    committed: Event | None = None
    decided_by: str | None = None

    def at(self, version: int) -> tuple[int, int]:
        """State and attempt as of a version of ``op``."""
        found = bisect_right(self.states, (version, 99, 1 << 30))
        return self.states[found - 1][1:] if found else (PENDING, 1)

    @property
    def transaction(self) -> tuple[str, str]:
        """The transaction it is part of, whatever the attempt."""
        return _without_attempt(self.event)


class _Run:
    def __init__(self, history: Iterable[Event], rules: Rules) -> None:
        self.rules = rules
        self.of: dict[Kind, list[Event]] = {kind: [] for kind in Kind}
        self.position: dict[int, int] = {}  # of an event in the history, by its id()
        for position, event in enumerate(history):
            self.of[event.kind].append(event)
            self.position[id(event)] = position
        self.ended = bool(self.of[Kind.END])
        self.rows: dict[tuple[str | None, str | None], _Row] = {}
        self.by_payload: dict[str, _Row] = {}
        for event in self.of[Kind.HALF_ROW]:
            row = self.rows.setdefault((event.half_id, event.address), _Row(event, opened=event.time))
            self.by_payload.setdefault(event.payload or "", row)
        self.faults: list[Anomaly] = []  # what following the markers brought to light
        for marker in sorted(self.of[Kind.MARKER], key=lambda e: e.version or 0):
            row = self.rows.get((marker.half_id, marker.address))
            if row is not None:
                self._follow(row, marker)
        self.final = [e for e in self.of[Kind.READ] if (e.operation or "").startswith(FINAL)]
        self.visible = Counter(e.payload for e in self.final)
        self.by_operation: dict[tuple[str, str | None], list[Event]] = defaultdict(list)
        for event in self.of[Kind.READ]:
            self.by_operation[event.process, event.operation].append(event)

    def _follow(self, row: _Row, marker: Event) -> None:
        """Apply a marker as a reader must, and note what no marker may do."""

        def fault(kind: AnomalyKind, sentence: str) -> None:
            self.faults.append(Anomaly(kind, sentence, (*row.markers, marker)))

        op, attempt = marker.op, marker.attempt or 1
        if op in ("commit", "place", "rollback", "quarantine", "check") and attempt != row.attempt:
            fault(
                AnomalyKind.MARKER_OF_ANOTHER_ATTEMPT,
                f"{op} names attempt {attempt} of a row that is under attempt {row.attempt}",
            )
        if op == "conflict":
            row.in_conflict = marker.attempt is not None
        elif op == "reopen":
            self._reopen(row, marker, attempt, fault)
        elif op in ("commit", "rollback"):
            now = COMMITTED if op == "commit" else _rolled_back_by(marker.who, marker.refused)
            if row.state == COMMITTED and now == COMMITTED:
                fault(AnomalyKind.DUPLICATE, "a row was committed twice")
            elif row.state == QUARANTINED or (row.state != PENDING and (row.state == COMMITTED) != (now == COMMITTED)):
                fault(AnomalyKind.OUTCOME_CHANGED, f"{op} by {marker.who} for a row that was {_WORDS[row.state]}")
            row.state, row.decided_by = now, marker.who
            row.committed = marker if now == COMMITTED and row.committed is None else row.committed
        elif op == "quarantine":
            if row.state != PENDING:
                fault(AnomalyKind.OUTCOME_CHANGED, f"quarantine for a row that was {_WORDS[row.state]}")
            row.state, row.decided_by = QUARANTINED, marker.who
        elif op == "place" and row.state != COMMITTED:
            fault(AnomalyKind.HALF_VISIBLE_READ, f"a row was placed that is {_WORDS[row.state]}")
        if marker.queue_offset is not None:
            if row.placed:
                fault(AnomalyKind.DUPLICATE, "a row was placed twice")
            row.placed.append(marker)
        row.markers.append(marker)
        row.states.append((marker.version or 0, row.state, row.attempt))

    def _reopen(self, row: _Row, marker: Event, attempt: int, fault: Callable[[AnomalyKind, str], None]) -> None:
        expected = row.attempt + 1 if row.state == BY_CHECK and marker.who != "admin" else row.attempt
        if row.state == COMMITTED or (row.state == ROLLED_BACK and marker.who != "admin"):
            fault(AnomalyKind.OUTCOME_CHANGED, f"a row was reopened that was {_WORDS[row.state]}")
        elif attempt != expected:
            fault(
                AnomalyKind.MARKER_OF_ANOTHER_ATTEMPT,
                f"a row that was {_WORDS[row.state]} under attempt {row.attempt} was reopened under attempt {attempt}",
            )
        row.state, row.attempt, row.opened, row.decided_by = PENDING, attempt, marker.time, None

    def queue_order(self) -> dict[Queue, list[tuple[int, Event]]]:
        """By queue, what stands at which offset, as markers have it; without markers, as the last reading has it."""
        queues: dict[Queue, list[tuple[int, Event]]] = defaultdict(list)
        placed = [(row.event, m) for row in self.rows.values() for m in row.placed]
        for event, where in placed or [(e, e) for e in self.final]:
            queues[where.topic or "", where.queue_id or 0].append((where.queue_offset or 0, event))
        return {queue: sorted(found, key=lambda f: f[0]) for queue, found in sorted(queues.items())}


_WORDS = (
    "pending", "committed", "rolled back", "rolled back by a check", "rolled back by the discard policy", "quarantined"
)  # fmt: skip


def _rolled_back_by(who: str | None, refused: bool | None) -> int:
    return ROLLED_BACK if refused else {"check": BY_CHECK, "discard": BY_DISCARD}.get(who or "", ROLLED_BACK)


def _without_attempt(event: Event) -> tuple[str, str]:
    """Half id and the part of the transaction id behind the attempt."""
    half_id = event.half_id or ""
    behind = (event.transaction_id or "")[len(half_id) + 1 :]
    return half_id, behind.partition(":")[2]


def _attempt_of(event: Event) -> int | None:
    """The attempt in an event's transaction id, or beside it."""
    if event.attempt is not None:
        return event.attempt
    if event.transaction_id is None or event.half_id is None:
        return None
    number = event.transaction_id[len(event.half_id) + 1 :].partition(":")[0]
    return int(number) if number.isdigit() else None


def _told(run: _Run, kind: Kind, verdict: str | None = None) -> list[Event]:
    return [e for e in run.of[kind] if e.phase is Phase.OK and (verdict is None or e.verdict == verdict)]


GUESSES = ("discard", "admin")
"""Who decides without knowing what became of the local transaction; it may be decided anew when somebody knows."""


def _known_verdicts(run: _Run, verdict: str | None = None) -> list[Event]:
    """Decisions that were said to be final by those who know."""
    return [e for e in _told(run, Kind.DECIDE, verdict) if e.who not in GUESSES]


# ---------------------------------------------------------------- one look a kind
def _lost_writes(run: _Run) -> Iterator[Anomaly]:
    """A message that somebody was told is committed, or that a marker placed, is not there at the end."""
    if run.of[Kind.HALF_ROW]:
        stored = {e.half_id for e in run.of[Kind.HALF_ROW]}
        # What was refused for good may be removed.
        stored |= {e.half_id for kind in (Kind.EXECUTE, Kind.RESOLVE) for e in _told(run, kind, ROLLBACK)}
        for event in _told(run, Kind.PREPARE):
            if event.half_id not in stored:
                yield Anomaly(AnomalyKind.LOST_WRITE, f"half batch {event.half_id} was prepared and is gone", (event,))
        for event in run.of[Kind.MARKER]:
            if event.queue_offset is not None and (event.half_id, event.address) not in run.rows:
                yield Anomaly(AnomalyKind.LOST_WRITE, f"the row of offset {event.queue_offset} is gone", (event,))
    if not run.ended:
        return
    by_transaction: dict[str, list[str]] = defaultdict(list)
    for row in run.rows.values():
        by_transaction["/".join(row.transaction)].append(row.event.payload or "")
    promised = {e.payload: e for e in _told(run, Kind.SEND, COMMIT)}
    for event in _told(run, Kind.DECIDE, COMMIT):
        for payload in by_transaction["/".join(_without_attempt(event))]:
            promised.setdefault(payload, event)
    for row in run.rows.values():
        for marker in row.placed:
            promised.setdefault(row.event.payload, marker)
    for payload, event in promised.items():
        if payload is not None and not run.visible[payload]:
            yield Anomaly(AnomalyKind.LOST_WRITE, f"message {payload} was committed and is not there", (event,))
    if any(row.state == PENDING for row in run.rows.values()):
        return
    for row in run.rows.values():
        if row.state == COMMITTED and not row.placed:
            sentence = f"message {row.event.payload} was committed and has no place, though nothing is open"
            yield Anomaly(AnomalyKind.LOST_WRITE, sentence, (row.event, *row.markers))


def _duplicates(run: _Run) -> Iterator[Anomaly]:
    """A message is in a queue twice, or in two queues; or its half row, or a topic, is there twice."""
    made: dict[str | None, Event] = {}
    for event in run.of[Kind.TOPIC]:
        if made.setdefault(event.topic, event) is not event:
            yield Anomaly(AnomalyKind.DUPLICATE, f"topic {event.topic} is there twice", (made[event.topic], event))
    stored: dict[tuple[str | None, str | None], Event] = {}
    for event in run.of[Kind.HALF_ROW]:
        first = stored.setdefault((event.half_id, event.address), event)
        if first is not event and first.payload == event.payload:
            yield Anomaly(AnomalyKind.DUPLICATE, f"half row {event.address} is there twice", (first, event))
    for events in run.by_operation.values():
        seen: dict[str | None, Event] = {}
        for event in events:
            first = seen.setdefault(event.payload, event)
            if _place(first) != _place(event):
                yield Anomaly(AnomalyKind.DUPLICATE, f"message {event.payload} is there twice", (first, event))


def _aborted_reads(run: _Run) -> Iterator[Anomaly]:
    """Somebody saw a message that was rolled back, or under an attempt that was."""
    refusals = _told(run, Kind.EXECUTE, ROLLBACK) + _known_verdicts(run, ROLLBACK)
    refused = {e.transaction_id: e for e in refusals}
    for event in run.of[Kind.READ] + run.of[Kind.POLL]:
        row = run.by_payload.get(event.payload or "")
        if row is not None and row.state in _ROLLED_BACK and not row.placed:
            yield Anomaly(AnomalyKind.ABORTED_READ, "a rolled-back message was seen", (event, *row.markers))
        elif event.transaction_id in refused:
            why = refused[event.transaction_id]
            # A person may overrule it, which an admin's marker says.
            if row is None or row.decided_by not in GUESSES:
                yield Anomaly(AnomalyKind.ABORTED_READ, "a message of a refused transaction was seen", (event, why))


def _half_visible_reads(run: _Run) -> Iterator[Anomaly]:
    """Somebody saw a message before a marker had placed it."""
    if not run.rows:
        return
    for event in run.of[Kind.READ] + run.of[Kind.POLL]:
        row = run.by_payload.get(event.payload or "")
        if row is None:
            yield Anomaly(AnomalyKind.HALF_VISIBLE_READ, "a message was seen that no half row holds", (event,))
        elif not row.placed:
            if row.state not in _ROLLED_BACK:
                yield Anomaly(
                    AnomalyKind.HALF_VISIBLE_READ, f"a message was seen that is {_WORDS[row.state]}", (event,)
                )
        elif event.version is not None and event.version < (row.placed[0].version or 0):
            yield Anomaly(
                AnomalyKind.HALF_VISIBLE_READ,
                f"a message was seen at version {event.version} of op, before it was placed",
                (event, row.placed[0]),
            )


def _torn_transactions(run: _Run) -> Iterator[Anomaly]:
    """A part of a transaction was committed, or seen, without the rest."""
    members: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for row in run.rows.values():
        members[row.transaction].append(row.event)
    if not members:
        for event in {e.payload: e for e in run.of[Kind.SEND] if e.transaction_id is not None}.values():
            members[_without_attempt(event)].append(event)
    whole = {e.payload: transaction for transaction, events in members.items() for e in events}
    for events in run.by_operation.values():
        topics = {e.topic for e in events}
        seen: dict[tuple[str, str], set[str | None]] = defaultdict(set)
        for event in events:
            if event.payload in whole:
                seen[whole[event.payload]].add(event.payload)
        for transaction, part in seen.items():
            missing = [e for e in members[transaction] if e.topic in topics and e.payload not in part]
            if missing:
                sentence = f"{len(part)} messages of transaction {transaction} were seen and {len(missing)} were not"
                yield Anomaly(AnomalyKind.TORN_TRANSACTION, sentence, (*events[:1], *missing))
    by_transaction: dict[tuple[str, str], list[_Row]] = defaultdict(list)
    for row in run.rows.values():
        by_transaction[row.transaction].append(row)
    for transaction, rows in by_transaction.items():
        versions = {r.committed.version if r.committed else None for r in rows}
        if len(versions) > 1:
            shown = tuple(r.committed or r.event for r in rows)
            yield Anomaly(
                AnomalyKind.TORN_TRANSACTION, f"transaction {transaction} was committed in parts: {versions}", shown
            )


def _conflicting_outcomes(run: _Run) -> Iterator[Anomaly]:
    """Two processes were told opposite things about one attempt, or a contradiction went unnoticed.

    Who knows what became of a local transaction never contradicts another who knows; so a ``conflict`` row after a
    decision of theirs is an anomaly too.
    """
    told: dict[str | None, dict[str | None, Event]] = defaultdict(dict)
    for event in _known_verdicts(run):
        if event.verdict in (COMMIT, ROLLBACK):
            told[event.transaction_id].setdefault(event.verdict, event)
    for transaction_id, verdicts in told.items():
        if len(verdicts) > 1:
            sentence = f"both verdicts were said to be final for {transaction_id}"
            yield Anomaly(AnomalyKind.CONFLICTING_OUTCOME, sentence, tuple(verdicts.values()))
    recorded: set[tuple[str | None, int | None]] = set()
    for row in run.rows.values():
        decided: Event | None = None
        for marker in row.markers:
            if marker.op in ("commit", "rollback"):
                decided = marker
            elif marker.op == "reopen":
                decided = None
            elif marker.op == "conflict" and marker.attempt is not None:
                recorded.add((marker.half_id, marker.attempt))
                if decided is not None and decided.who not in GUESSES and marker.who not in GUESSES:
                    sentence = f"{marker.verdict} contradicts what {decided.who} knew"
                    yield Anomaly(AnomalyKind.CONFLICTING_OUTCOME, sentence, (decided, marker))
    left = {marker.half_id for marker in run.of[Kind.MARKER] if marker.op == "archived"}  # nothing is said of them
    for event in run.of[Kind.DECIDE]:
        if event.half_id in left:
            continue
        if event.phase is Phase.FAIL and run.rows and (event.half_id, event.attempt) not in recorded:
            sentence = f"{event.verdict} was refused for {event.transaction_id}, and no conflict row says so"
            yield Anomaly(AnomalyKind.CONFLICTING_OUTCOME, sentence, (event,))


def _faulty_markers(run: _Run) -> Iterator[Anomaly]:
    """An outcome that changed, a row placed twice, a marker for another attempt: what following the markers showed."""
    yield from run.faults


def _other_attempts(run: _Run) -> Iterator[Anomaly]:
    """A message is visible under another attempt than the one whose local transaction happened."""
    happened: dict[str | None, set[int | None]] = defaultdict(set)
    for event in run.of[Kind.LOCAL]:
        happened[event.payload].add(_attempt_of(event))
    for event in run.final:
        row = run.by_payload.get(event.payload or "")
        if row is not None and row.decided_by in GUESSES:
            continue
        attempt = _attempt_of(event)
        if attempt is not None and happened[event.payload] and attempt not in happened[event.payload]:
            local = [e for e in run.of[Kind.LOCAL] if e.payload == event.payload]
            yield Anomaly(
                AnomalyKind.MARKER_OF_ANOTHER_ATTEMPT,
                f"message {event.payload} is visible under attempt {attempt}, which did not happen",
                (event, *local),
            )


def _inconsistent_offsets(run: _Run) -> Iterator[Anomaly]:
    """An offset stands for two messages, or a message has two offsets, to whoever was told."""
    at: dict[tuple[object, ...], Event] = {}
    of: dict[str, Event] = {}
    placed = [(row.event.payload, m) for row in run.rows.values() for m in row.placed]
    seen = [(e.payload, e) for kind in (Kind.READ, Kind.POLL, Kind.SEND) for e in run.of[kind]]
    payload_at: dict[tuple[object, ...], str | None] = {}
    for payload, event in placed + seen:
        if event.queue_offset is None or payload is None:
            continue
        place = _place(event)
        first = at.setdefault(place, event)
        if payload_at.setdefault(place, payload) != payload:
            yield Anomaly(AnomalyKind.INCONSISTENT_OFFSETS, f"two messages stand at {place}", (first, event))
        where = of.setdefault(payload, event)
        if _place(where) != place:
            yield Anomaly(AnomalyKind.INCONSISTENT_OFFSETS, f"message {payload} has two places", (where, event))


def _gaps(run: _Run) -> Iterator[Anomaly]:
    """A queue does not count 0, 1, 2, …"""
    readings = [_offsets(events) for events in run.by_operation.values()]
    for row_queues in (*readings, _offsets([m for row in run.rows.values() for m in row.placed])):
        for queue, events in row_queues.items():
            offsets = sorted({e.queue_offset for e in events if e.queue_offset is not None})
            if offsets != list(range(len(offsets))):
                missing = sorted(set(range(offsets[-1] + 1)) - set(offsets))
                yield Anomaly(AnomalyKind.GAP_IN_QUEUE, f"queue {queue} has no message at {missing[:5]}", events[-1:])


def _offsets(events: Iterable[Event]) -> dict[Queue, tuple[Event, ...]]:
    queues: dict[Queue, list[Event]] = defaultdict(list)
    for event in events:
        queues[event.topic or "", event.queue_id or 0].append(event)
    return {queue: tuple(found) for queue, found in queues.items()}


def _polls(run: _Run) -> Iterator[Anomaly]:
    """A consumer went back in a queue, or left messages out."""
    position: dict[tuple[str, str | None, int | None], Event] = {}
    got: dict[tuple[str, str | None, str | None, int | None], list[Event]] = defaultdict(list)
    for event in run.of[Kind.POLL]:
        got[event.process, event.operation, event.topic, event.queue_id].append(event)
        consumer = (event.process, event.topic, event.queue_id)
        yield from _moved(position.get(consumer), event, 1)
        position[consumer] = event
    position.clear()
    for event in run.of[Kind.POLLED]:
        consumer = (event.process, event.topic, event.queue_id)
        yield from _moved(position.get(consumer), event, None)
        position[consumer] = event
        found = {e.queue_offset for e in got[event.process, event.operation, event.topic, event.queue_id]}
        missing = sorted(set(range(event.queue_offset or 0, event.next_offset or 0)) - found)
        if missing:
            yield Anomaly(AnomalyKind.SKIPPED_POLL, f"a consumer moved on without the offsets {missing[:5]}", (event,))


def _moved(before: Event | None, event: Event, length: int | None) -> Iterator[Anomaly]:
    if before is None or event.queue_offset is None or before.queue_offset is None:
        return
    expected = before.queue_offset + length if length is not None else before.next_offset or 0
    if event.queue_offset > expected:
        sentence = f"a consumer went from offset {expected} on to {event.queue_offset}"
        yield Anomaly(AnomalyKind.SKIPPED_POLL, sentence, (before, event))
    elif event.queue_offset < expected:
        sentence = f"a consumer that was at offset {expected} went back to {event.queue_offset}"
        yield Anomaly(AnomalyKind.NON_MONOTONIC_POLL, sentence, (before, event))


def _was_held(run: _Run, event: Event) -> bool:
    """It was committed, and placed later, behind what was sent meanwhile under other keys."""
    row = run.by_payload.get(event.payload or "")
    return row is not None and bool(row.placed) and row.placed[0].op == "place"


def _non_monotonic_sends(run: _Run) -> Iterator[Anomaly]:
    """A message that was sent after another was known to be committed stands before it in their queue."""
    begun: dict[str | None, int] = {}
    known: dict[str | None, int] = {}
    for event in run.of[Kind.SEND]:
        if event.phase is Phase.BEGIN:
            begun.setdefault(event.payload, run.position[id(event)])
        elif event.phase is Phase.OK and event.verdict == COMMIT and not _was_held(run, event):
            known.setdefault(event.payload, run.position[id(event)])
    for (topic, queue_id), events in run.queue_order().items():
        # From the end: the earliest moment at which any message behind this one was known to be committed.
        earliest: tuple[int, Event] | None = None
        for _, event in reversed(events):
            start = begun.get(event.payload)
            if earliest is not None and start is not None and earliest[0] < start:
                sentence = f"a message sent later stands before one that was known, in queue {queue_id} of {topic}"
                yield Anomaly(AnomalyKind.NON_MONOTONIC_SEND, sentence, (event, earliest[1]))
            end = known.get(event.payload)
            if end is not None and (earliest is None or end < earliest[0]):
                earliest = (end, event)
    acked: dict[tuple[str, str | None, int | None], Event] = {}
    for event in run.of[Kind.SEND]:
        if event.phase is not Phase.OK or event.queue_offset is None:
            continue
        before = acked.get((event.process, event.topic, event.queue_id))
        # The messages of one operation may be noted in any order.
        if before is not None and before.operation == event.operation is not None:
            continue
        if before is not None and (before.queue_offset or 0) >= event.queue_offset:
            sentence = f"a process was given offset {before.queue_offset} and then {event.queue_offset}"
            yield Anomaly(AnomalyKind.NON_MONOTONIC_SEND, sentence, (before, event))
        acked[event.process, event.topic, event.queue_id] = event


def _broken_orders(run: _Run) -> Iterator[Anomaly]:
    """Messages of one key stand in another order than they were sent in.

    Without FIFO a message that was decided later may stand later, whatever its number.
    """
    sent = {e.payload: e for e in run.of[Kind.SEND] if e.key is not None and e.sequence is not None}
    last: dict[tuple[str, str | None], Event] = {}
    queue_of: dict[tuple[str, str | None], tuple[int, Event]] = {}
    for (topic, queue_id), events in run.queue_order().items():
        for _, event in events:
            send = sent.get(event.payload) or event
            if send.key is None or send.sequence is None:
                continue
            key = (topic, send.key)
            other, first = queue_of.setdefault(key, (queue_id, send))
            if other != queue_id:
                sentence = f"key {send.key} is in the queues {other} and {queue_id} of {topic}"
                yield Anomaly(AnomalyKind.ORDER_BROKEN, sentence, (first, send))
                continue
            before = last.get(key)
            if before is None or (before.sequence or 0) < send.sequence:
                last[key] = send
            elif not (_sent_again(run, send) if topic in run.rules.fifo else _decided_later(run, send, before)):
                sentence = f"number {send.sequence} of key {send.key} stands behind number {before.sequence}"
                yield Anomaly(AnomalyKind.ORDER_BROKEN, sentence, (before, send))


def _sent_again(run: _Run, event: Event) -> bool:
    """A message that was given up and reopened is sent when it is reopened, behind what was sent meanwhile."""
    row = run.by_payload.get(event.payload or "")
    if run.rules.numbered_when_reopened:
        return False
    return row is not None and any(marker.op in ("reopen", "quarantine") for marker in row.markers)


def _decided_later(run: _Run, event: Event, before: Event) -> bool:
    one, other = run.by_payload.get(event.payload or ""), run.by_payload.get(before.payload or "")
    if one is None or other is None or not one.placed or not other.placed:
        return False
    return (one.placed[0].version or 0) > (other.placed[0].version or 0)


def _checks_after_resolution(run: _Run) -> Iterator[Anomaly]:
    """A listener was asked about a transaction of which the checker had seen that it is settled."""
    by_transaction: dict[tuple[str, str], _Row] = {}
    for row in run.rows.values():
        by_transaction.setdefault(row.transaction, row)
    final: dict[tuple[str, str | None], Event] = {}
    for event in run.of[Kind.DECIDE]:
        if event.phase is Phase.OK and event.verdict in (COMMIT, ROLLBACK):
            final.setdefault((event.process, event.transaction_id), event)
    for event in run.of[Kind.CHECK]:
        if event.phase is not Phase.BEGIN:
            continue
        row = by_transaction.get(_without_attempt(event))
        if event.version is not None and row is not None:
            asked = _attempt_of(event) or 1
            state, attempt = row.at(event.version)
            again = any(
                m.op == "reopen" and m.attempt == asked and (m.version or 0) > event.version for m in row.markers
            )
            if attempt > asked or (attempt == asked and state != PENDING and not again):
                sentence = f"version {event.version} of op said that it was {_WORDS[state]} (attempt {attempt})"
                yield Anomaly(AnomalyKind.CHECKED_AFTER_RESOLUTION, sentence, (event, *row.markers))
            continue
        known = final.get((event.process, event.transaction_id))
        if known is not None and run.position[id(known)] < run.position[id(event)]:
            sentence = "the process had been told that its verdict is final"
            yield Anomaly(AnomalyKind.CHECKED_AFTER_RESOLUTION, sentence, (known, event))


def _discards_without_checks(run: _Run) -> Iterator[Anomaly]:
    """A transaction was given up before enough checks had been answered."""
    answered = Counter(
        (_without_attempt(e), _attempt_of(e))
        for e in run.of[Kind.CHECK]
        if e.phase is Phase.OK and e.verdict == UNKNOWN
    )
    told = bool(run.of[Kind.CHECK])
    for row in run.rows.values():
        counted, needed, attempt = 0, 0, 1
        for marker in row.markers:
            if marker.op == "reopen":
                counted = 0
                if marker.attempt != attempt:
                    needed, attempt = 0, marker.attempt or 1
            counted += marker.op == "check"
            expired = marker.op == "quarantine" and (marker.reason or "").startswith(EXPIRED)
            # A conflict row says that a discard did not count; marks repeat it.
            if marker.who != "discard" or marker.op == "conflict" or expired:
                continue
            needed += run.rules.checks_max
            answers = answered[row.transaction, attempt]
            if counted < run.rules.checks_max or (told and answers < needed):
                sentence = (
                    f"{marker.op} by the discard policy after {counted} counted checks ({answers} answers were noted); "
                    f"{run.rules.checks_max} are needed"
                )
                yield Anomaly(AnomalyKind.DISCARDED_WITHOUT_CHECK, sentence, (row.event, *row.markers))


def _stuck_halves(run: _Run) -> Iterator[Anomaly]:
    """A half batch is still open, or was open for longer, than it takes to check it often enough to give it up.

    One that its age has ended, because whoever was asked did not answer, is no anomaly.
    """
    if not run.ended:
        return
    end, limit = run.of[Kind.END][-1], run.rules.stuck_after_s
    stuck: dict[str | None, tuple[str, _Row]] = {}
    asked = {e.half_id for e in run.of[Kind.CHECK]}
    for row in run.rows.values():
        if row.state == PENDING and (limit is None or end.time - row.opened > limit):
            stuck.setdefault(row.event.half_id, ("is still open", row))
        if row.in_conflict and run.rules.conflicts_resolved:
            stuck.setdefault(row.event.half_id, ("is still in conflict, and nobody was told", row))
        if limit is None:
            continue
        opened: float | None = row.event.time
        for marker in row.markers:
            if marker.op == "reopen":
                opened = marker.time
            elif marker.op in ("commit", "rollback", "quarantine"):
                expired = marker.op == "quarantine" and (marker.reason or "").startswith(EXPIRED)
                expired &= marker.half_id in asked or not asked
                if opened is not None and marker.time - opened > limit and not expired:
                    stuck.setdefault(row.event.half_id, (f"was open for {marker.time - opened:.0f} s", row))
                opened = None
    for half_id, (what, row) in stuck.items():
        yield Anomaly(AnomalyKind.STUCK_HALF, f"half batch {half_id} {what}", (row.event, *row.markers))


def _unstable_ranges(run: _Run) -> Iterator[Anomaly]:
    """The same offsets, read again, were not there or were other messages."""
    first: dict[tuple[object, ...], Event] = {}
    for event in run.of[Kind.READ] + run.of[Kind.POLL]:
        known = first.setdefault(_place(event), event)
        if (known.payload, known.key, known.transaction_id) != (event.payload, event.key, event.transaction_id):
            yield Anomaly(AnomalyKind.UNSTABLE_RANGE, f"{_place(event)} was another message before", (known, event))
    # A process never sees less than it saw; and at the end everything is there that anybody ever saw.
    ends: dict[tuple[str, Queue], tuple[int, Event]] = {}
    for (process, operation), events in run.by_operation.items():
        final = (operation or "").startswith(FINAL)
        found = {queue: max(e.queue_offset or 0 for e in part) for queue, part in _offsets(events).items()}
        topics = {e.topic for e in events}
        for (who, queue), (offset, seen) in ends.items():
            again = (who == process and queue[0] in topics) or final
            if again and found.get(queue, -1) < offset:
                yield Anomaly(AnomalyKind.UNSTABLE_RANGE, f"{queue} had offset {offset} before", (seen, *events[:1]))
        for queue, offset in found.items():
            ends[process, queue] = max(ends.get((process, queue), (-1, events[0])), (offset, events[0]), key=_first)
    if run.ended:
        last = {_place(e) for e in run.final}
        for event in run.of[Kind.POLL]:
            if _place(event) not in last:
                yield Anomaly(AnomalyKind.UNSTABLE_RANGE, f"{_place(event)} is not there any more", (event,))


def _first(pair: tuple[int, Event]) -> int:
    return pair[0]


def _replay_divergences(run: _Run) -> Iterator[Anomaly]:
    """A batch that came again was taken for another one, or came to another end."""
    for event in run.of[Kind.HALF_ROW]:
        stored = run.rows[event.half_id, event.address].event
        if (stored.payload, stored.topic, stored.transaction_id) != (event.payload, event.topic, event.transaction_id):
            yield Anomaly(AnomalyKind.REPLAY_DIVERGENCE, "a half row is there with two contents", (stored, event))
    # Who sends does not know the id under which the batch was prepared, if an earlier run did that. It knows the name.
    stored_names = {name_of(e.half_id or "") for e in run.of[Kind.HALF_ROW]}
    told: dict[str | None, Event] = {}
    for event in _told(run, Kind.SEND):
        row = run.by_payload.get(event.payload or "")
        name = name_of(event.half_id or "")
        if name in stored_names and (row is None or name_of(row.event.half_id or "") != name):
            sentence = f"half batch {event.half_id} does not hold message {event.payload}, which was sent with it"
            yield Anomaly(AnomalyKind.REPLAY_DIVERGENCE, sentence, (event,))
        if event.verdict not in (COMMIT, ROLLBACK) or (row is not None and row.decided_by in GUESSES):
            continue
        before = told.setdefault(event.payload, event)
        if before.verdict != event.verdict:
            yield Anomaly(AnomalyKind.REPLAY_DIVERGENCE, "a replay was told another outcome", (before, event))


def _versions(run: _Run) -> Iterator[Anomaly]:
    """The log of a table has a hole, lacks a commit that was acknowledged, or has another one in its place."""
    listed: dict[str | None, dict[int, Event]] = defaultdict(dict)
    known: dict[tuple[str | None, int | None], Event] = {}
    for event in run.of[Kind.LISTED] + _told(run, Kind.VERSION):
        first = known.setdefault((event.table, event.version), event)
        if first.payload != event.payload:
            sentence = f"version {event.version} of {event.table} is two commits"
            yield Anomaly(AnomalyKind.OVERWRITTEN_VERSION, sentence, (first, event))
        if event.kind is Kind.LISTED:
            listed[event.table][event.version or 0] = event
    for table, versions in listed.items():
        missing = sorted(set(range(min(versions), max(versions) + 1)) - set(versions))
        if missing:
            yield Anomaly(AnomalyKind.MISSING_VERSION, f"{table} has no version {missing[:5]}")
        for event in _told(run, Kind.VERSION):
            if event.table == table and event.version not in versions and (event.version or 0) >= min(versions):
                yield Anomaly(AnomalyKind.MISSING_VERSION, f"version {event.version} of {table} is gone", (event,))
    commits: dict[int | None, Event] = {}
    for event in run.of[Kind.MARKER]:
        first = commits.setdefault(event.version, event)
        if first.operation != event.operation:
            sentence = f"op rows of two commits say that they are version {event.version}"
            yield Anomaly(AnomalyKind.OVERWRITTEN_VERSION, sentence, (first, event))


def _local_disagreements(run: _Run) -> Iterator[Anomaly]:
    """A local transaction happened without its messages, or twice; or messages are visible and it did not happen.

    What a discard policy or a person decided is left out: they decide without knowing.
    """
    happened: dict[str | None, list[Event]] = defaultdict(list)
    for event in run.of[Kind.LOCAL]:
        happened[event.payload].append(event)
    for payload, events in happened.items():
        if len(events) > 1:
            sentence = f"the local transaction of message {payload} happened {len(events)} times"
            yield Anomaly(AnomalyKind.LOCAL_STATE_DISAGREES, sentence, tuple(events))
    if not run.ended:
        return
    local_kinds = (Kind.EXECUTE, Kind.LOCAL, Kind.CHECK)
    with_local = {e.half_id for kind in local_kinds for e in run.of[kind]}
    for payload, row in run.by_payload.items():
        undecided = row.state in (PENDING, QUARANTINED) or row.in_conflict
        if row.event.half_id not in with_local or undecided or row.decided_by in GUESSES:
            continue
        if happened[payload] and not run.visible[payload]:
            sentence = f"the local transaction of message {payload} happened, and the message is not there"
            yield Anomaly(AnomalyKind.LOCAL_STATE_DISAGREES, sentence, (*happened[payload], *row.markers))
        elif run.visible[payload] and not happened[payload]:
            sentence = f"message {payload} is visible, and its local transaction did not happen"
            yield Anomaly(AnomalyKind.LOCAL_STATE_DISAGREES, sentence, (row.event, *row.markers))


def _refusals(run: _Run) -> Iterator[Anomaly]:
    """A local transaction that said no ran again under another attempt; or a check rolled back for good what nobody
    refused."""
    refused: dict[tuple[str, str], Event] = {}
    for event in run.of[Kind.REFUSED]:
        refused.setdefault(_without_attempt(event), event)
    for kind in (Kind.REFUSED, Kind.LOCAL):
        for event in run.of[kind]:
            first = refused.get(_without_attempt(event))
            if first is not None and (_attempt_of(event) or 1) > (_attempt_of(first) or 1):
                sentence = f"{first.transaction_id} was refused, and ran again under attempt {_attempt_of(event)}"
                yield Anomaly(AnomalyKind.REFUSED_AGAIN, sentence, (first, event))
    if not (refused or run.of[Kind.LOCAL]):  # nobody noted what databases hold
        return
    for row in run.rows.values():
        for marker in row.markers:
            if marker.op == "rollback" and marker.who == "check" and marker.refused and row.transaction not in refused:
                sentence = f"a check rolled {row.event.transaction_id} back for good, and nobody refused it"
                yield Anomaly(AnomalyKind.NEVER_REFUSED, sentence, (row.event, marker))


def _place(event: Event) -> tuple[str | None, int | None, int | None]:
    return event.topic, event.queue_id, event.queue_offset


def _drained_otherwise(run: _Run) -> Iterator[Anomaly]:
    """A reading of the table ``messages`` is not exactly what ``op`` placed up to the version that the table names; or
    something is missing there at the end."""
    if not run.rows:  # nobody noted what op says
        return
    readings: dict[tuple[str, str | None], tuple[Event, Counter[_Drained]]] = {}
    for event in run.of[Kind.DRAINED]:
        reading = (event.process, event.operation)
        if event.phase is Phase.BEGIN:
            readings[reading] = (event, Counter())
        else:
            readings[reading][1][_drained(event, event)] += 1
    placed = [_drained(row.event, marker) for row in run.rows.values() for marker in row.placed]
    last = max((p.version for p in placed), default=-1)
    for (_, operation), (begin, found) in readings.items():
        position = begin.version if begin.version is not None else -1
        if (operation or "").startswith(FINAL) and position < last:
            sentence = f"the last drain ended at version {position} of op, and version {last} placed messages"
            yield Anomaly(AnomalyKind.DRAINED_OTHERWISE, sentence, (begin,))
        expected = Counter(p for p in placed if p.version <= position)
        for what, odd in (("lacks", expected - found), ("should not have", found - expected)):
            if odd:
                sentence = (
                    f"drained up to version {position}, the table {what} {next(iter(odd))} and {len(odd) - 1} more"
                )
                yield Anomaly(AnomalyKind.DRAINED_OTHERWISE, sentence, (begin,))


def _left_open(run: _Run) -> Iterator[Anomaly]:
    """A half batch was archived with rows that are pending, quarantined, in conflict or without a place; or something
    was said of it afterwards."""
    archived: dict[str | None, Event] = {}
    for marker in run.of[Kind.MARKER]:
        if marker.op == "archived":
            archived.setdefault(marker.half_id, marker)
    for row in run.rows.values():
        left = archived.get(row.event.half_id)
        if left is None:
            continue
        version = left.version or 0
        state, _ = row.at(version)
        is_placed = any((p.version or 0) <= version for p in row.placed)
        if state in (PENDING, QUARANTINED) or (state == COMMITTED and not is_placed) or row.in_conflict:
            sentence = f"{left.half_id} was archived at version {version} with a row that was {_WORDS[state]}"
            yield Anomaly(AnomalyKind.LEFT_OPEN, sentence, (*row.markers, left))
        for marker in row.markers:
            if (marker.version or 0) > version:
                sentence = f"{marker.op} for {left.half_id}, which was archived before"
                yield Anomaly(AnomalyKind.LEFT_OPEN, sentence, (left, marker))


def _expired_early(run: _Run) -> Iterator[Anomaly]:
    """A message was let go that was younger than what the topic keeps."""
    if run.rules.retention_s is None:
        return
    for event in run.of[Kind.EXPIRED]:
        if (event.sequence or 0) < run.rules.retention_s:
            sentence = f"{_place(event)} expired after {event.sequence} s, and {run.rules.retention_s:g} s are kept"
            yield Anomaly(AnomalyKind.EXPIRED_EARLY, sentence, (event,))


class _Drained(NamedTuple):
    """A message and where it was placed."""

    half_id: str | None
    address: str | None
    payload: str | None
    topic: str | None
    queue_id: int | None
    queue_offset: int | None
    attempt: int
    version: int


def _drained(row: Event, marker: Event) -> _Drained:
    place = (marker.topic, marker.queue_id, marker.queue_offset, marker.attempt or 1, marker.version or 0)
    return _Drained(row.half_id, row.address, row.payload, *place)


_LOOKS: tuple[Callable[[_Run], Iterator[Anomaly]], ...] = (
    _lost_writes,
    _duplicates,
    _aborted_reads,
    _half_visible_reads,
    _torn_transactions,
    _conflicting_outcomes,
    _faulty_markers,
    _other_attempts,
    _inconsistent_offsets,
    _gaps,
    _polls,
    _non_monotonic_sends,
    _broken_orders,
    _checks_after_resolution,
    _discards_without_checks,
    _stuck_halves,
    _unstable_ranges,
    _replay_divergences,
    _versions,
    _local_disagreements,
    _refusals,
    _drained_otherwise,
    _left_open,
    _expired_early,
)
