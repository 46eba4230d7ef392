"""What happened in a run: the operations of every process, and what the tables held at the end.

A history has two sources. The workload notes what each of its processes did and was told (:data:`TOLD`). At the end,
``observation.py`` reads the tables without the code under test and notes every row (:data:`FOUND`). The anomaly checker
holds one against the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

FINAL = "final"
"""The ``operation`` of the reads after :attr:`Kind.END`: all that is visible then."""


class Kind(str, Enum):
    """What an event is about."""

    SEND = "send"
    """A message handed to a producer. One event a message; OK has the verdict that the producer was told."""
    PREPARE = "prepare"
    """A half batch."""
    EXECUTE = "execute"
    """A local transaction, noted by the listener; OK has its verdict."""
    DECIDE = "decide"
    """A verdict; OK: the process was told that it is final. One event a transaction."""
    CHECK = "check"
    """A listener asked about a transaction; OK has its answer, FAIL: it gave none. ``version``: one of ``op`` that the
    checker had certainly seen before it chose what to ask about."""
    RESOLVE = "resolve"
    """A person's verdict on a half batch."""
    READ = "read"
    """A message in a whole reading of a topic from offset 0, which ``operation`` names."""
    POLL = "poll"
    """A message that a consumer got."""
    POLLED = "polled"
    """A consumer moved on in a queue, from ``queue_offset`` (included) to ``next_offset`` (excluded)."""
    DRAINED = "drained"
    """A row of the table ``messages`` in a reading of it, which ``operation`` names; its ``version`` is that of ``op``.
    BEGIN: the version up to which the table has everything by its own word."""
    VERSION = "version"
    """OK: a writer was told that its commit, named by ``payload``, is this version of a table."""

    LOCAL = "local"
    """What a local transaction left in its database for a message."""
    REFUSED = "refused"
    """A local transaction that said no, as its database tells."""
    HALF_ROW = "half row"
    """A row of ``half``; ``transaction_id`` is that of attempt 1, ``time`` that of its prepare."""
    TOPIC = "topic"
    """A row of ``topics``."""
    MARKER = "marker"
    """An op row's word about one half row: ``op`` is its kind. In version order."""
    LISTED = "listed"
    """A version of a table that is in its log, with the name of its commit in ``payload``."""
    EXPIRED = "expired"
    """A message that ``op`` let expire; ``sequence`` is how old it was then, in seconds."""
    END = "end"
    """Nothing runs any more, and nothing should be open."""


TOLD = frozenset(list(Kind)[: list(Kind).index(Kind.LOCAL)])
FOUND = frozenset(set(Kind) - TOLD)


class Phase(str, Enum):
    """How far an operation has come."""

    BEGIN = "begin"
    OK = "ok"
    FAIL = "fail"  # it did not happen
    UNKNOWN = "unknown"  # nobody can say whether it happened


@dataclass(frozen=True)
class Event:
    """One line of a history; what a kind does not need stays None.

    Attributes
    ----------
    process : str
        One incarnation of a process: what starts anew after a crash has a new name.
    time : float
        Seconds, by the process's clock.
    half_id, transaction_id, batch_id, attempt
        As in the log. A transaction id has its attempt in it.
    key, sequence : str, int
        The key whose order counts (its sharding key), and the message's number among those sent with this key.
    payload : str
        :func:`payload_hash` of the body. No two messages of a run share one, so it names the message.
    topic, queue_id, queue_offset, next_offset
        A place in a queue.
    verdict : str
        COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOWN.
    op, who, reason, address : str
        Of a marker: the kind of op row, who decided and why, and ``<file_no>.<row_no>`` of the half row.
    refused : bool
        Of a marker: the rollback is final.
    table, version : str, int
        A Delta table and one of its versions.
    operation : str
        What belongs together: one run of a batch, one reading, one commit.
    """

    kind: Kind
    phase: Phase = Phase.OK
    process: str = ""
    time: float = 0.0
    half_id: str | None = None
    transaction_id: str | None = None
    batch_id: int | None = None
    attempt: int | None = None
    key: str | None = None
    sequence: int | None = None
    payload: str | None = None
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    next_offset: int | None = None
    verdict: str | None = None
    op: str | None = None
    who: str | None = None
    reason: str | None = None
    refused: bool | None = None
    address: str | None = None
    table: str | None = None
    version: int | None = None
    operation: str | None = None

    def to_json(self) -> str:
        """One line, without what is not there."""
        return json.dumps({name: value for name in _NAMES if (value := getattr(self, name)) is not None})

    @classmethod
    def from_json(cls, line: str) -> Event:
        values: dict[str, Any] = json.loads(line)
        return cls(**{**values, "kind": Kind(values["kind"]), "phase": Phase(values["phase"])})

    def __str__(self) -> str:
        words = [f"{n}={v}" for n in _NAMES[4:] if (v := getattr(self, n)) is not None]
        return f"{self.process or '-'} {self.kind.value} {self.phase.value} {' '.join(words)}"


_NAMES = [f.name for f in fields(Event)]


class History:
    """Events in the order in which they were noted; any thread may append.

    Parameters
    ----------
    path : path, optional
        A file to which the events are appended as JSON lines, a single write each, so that several processes can share
        it and a killed one leaves whole lines. Without it they are kept in memory.
    clock : callable
        Seconds, for the events' time.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, clock: Callable[[], float] = time.time) -> None:
        self._events: list[Event] = []
        self._clock = clock
        self._lock = threading.Lock()
        self.path = None if path is None else Path(path)
        self._file = None if path is None else os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)

    @classmethod
    def load(cls, *paths: str | os.PathLike[str]) -> History:
        """The events of files, in memory; of several files in the order of their times."""
        history = cls()
        for path in paths:
            with open(path, encoding="utf-8") as lines:
                history._events += [Event.from_json(line) for line in lines]
        if len(paths) > 1:
            history._events.sort(key=lambda e: e.time)
        return history

    def append(self, event: Event) -> None:
        if self._file is None:
            with self._lock:
                self._events.append(event)
            return
        line = f"{event.to_json()}\n".encode()
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"{self.path} took {written} of {len(line)} bytes: the history is not whole any more")

    def extend(self, events: Iterable[Event]) -> None:
        for event in events:
            self.append(event)

    def note(self, kind: Kind, phase: Phase = Phase.OK, process: str = "", **values: Any) -> Event:
        """Append an event of this moment."""
        event = Event(kind, phase, process, self._clock(), **values)
        self.append(event)
        return event

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def events(self) -> list[Event]:
        """All events so far; of a file also those of other processes."""
        return self._events if self.path is None else History.load(self.path)._events

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)


def payload_hash(body: bytes | str) -> str:
    """What stands for a message's body in a history."""
    raw = body.encode() if isinstance(body, str) else bytes(body)
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
