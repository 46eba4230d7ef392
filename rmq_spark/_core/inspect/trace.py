"""The trace of a transaction, a message or a half batch, as values. ``inspect/assemble_trace.py`` assembles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple

from rmq_spark._core.vocabulary.text import message_count


class TraceKind(str, Enum):
    """The kinds of events of messages."""

    PREPARED = "prepared"
    LEASED = "leased"
    CHECKED = "checked"
    COMMITTED = "committed"
    PLACED = "placed"
    ROLLED_BACK = "rolled_back"
    QUARANTINED = "quarantined"
    REOPENED = "reopened"
    CONFLICT = "conflict"
    RESOLVED = "conflict_resolved"
    DRAINED = "drained"
    ARCHIVED = "archived"

    def __str__(self) -> str:
        return self.value


class TracePlace(NamedTuple):
    """Adjacent messages in a queue: the offsets of the first and of the last one."""

    topic: str
    queue_id: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True)
class TraceEvent:
    """An event of messages of a half batch.

    Attributes
    ----------
    at : datetime
        UTC. For ``drained``: the latest time at which the messages came into the table ``messages``; a merge of its
        files makes it later.
    kind : TraceKind
    messages : int
        Number of traced messages. For decisions on a half batch whose op rows are pruned: of all its messages.
    attempt : int or None
    decided_by : str or None
        ``execute`` (its local transaction), ``check``, ``discard`` (the policy for messages checked too often) or
        ``admin`` (a person).
    reason : str or None
    places : tuple of TracePlace
        The places where messages became visible.
    until : datetime or None
        For ``leased``: the lease's end. For ``committed``: the due time of delayed messages.
    verdict : str or None
        For ``conflict``: the verdict that came too late. For ``conflict_resolved``: the verdict that counts.
    op_version : int or None
        The version of table ``op`` with this event.
    refused : bool or None
        For ``rolled_back``: True when the local transaction ran and refused, which is final.
    """

    at: datetime
    kind: TraceKind
    messages: int
    attempt: int | None = None
    decided_by: str | None = None
    reason: str | None = None
    places: tuple[TracePlace, ...] = ()
    until: datetime | None = None
    verdict: str | None = None
    op_version: int | None = None
    refused: bool | None = None

    @property
    def word(self) -> str:
        """The event for people: ``refused`` for a check's final rollback, which no replay runs again."""
        return "refused" if self.refused and self.decided_by == "check" else self.kind.value

    def to_dict(self) -> dict[str, Any]:
        """Return the event for JSON, with times as ISO texts."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "at": self.at.isoformat(),
            "kind": self.kind.value,
            "places": [place._asdict() for place in self.places],
            "until": None if self.until is None else self.until.isoformat(),
        }


@dataclass(frozen=True)
class Trace:
    """The trace of a transaction, a message or a half batch, as far as the commit log still has it.

    Attributes
    ----------
    half_id : str
    transaction_id, message_id : str or None
        The requested id; both None for a half batch as a whole.
    producer_group, app_id, batch_id, transaction_per, query_id, fence_id :
        The header; None where it is no longer kept.
    prepared_at : datetime or None
        UTC; for a forgotten half batch, the time at which its newest visible message was staged.
    attempt : int or None
        The newest attempt.
    messages : int
        Number of traced messages.
    outcome : mapping of str to int
        Number of messages by state (see ``story.COUNTED``); empty where it is no longer known.
    topics : tuple of str
    where : {"half", "leaving", "left", "forgotten"}
        ``leaving`` and ``left`` half batches are settled for good. Of ``forgotten`` ones only visible messages are
        left.
    in_conflict : bool
        True when a verdict came too late, and no person has resolved the conflict.
    lease_until : datetime or None
        Set while the local transaction is known to run.
    waits_for : tuple of str
        Half batches that hold back committed messages: pending ones, sent before with the same sharding key.
    events : tuple of TraceEvent
        Ordered by time.
    unknown : tuple of str
        Sentences about what is no longer known.
    """

    half_id: str
    where: str
    messages: int
    outcome: Mapping[str, int]
    transaction_id: str | None = None
    message_id: str | None = None
    app_id: str | None = None
    batch_id: int | None = None
    producer_group: str | None = None
    transaction_per: str | None = None
    query_id: str | None = None
    fence_id: str | None = None
    prepared_at: datetime | None = None
    attempt: int | None = None
    topics: tuple[str, ...] = ()
    in_conflict: bool = False
    lease_until: datetime | None = None
    waits_for: tuple[str, ...] = ()
    events: tuple[TraceEvent, ...] = ()
    unknown: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the trace for JSON, with times as ISO texts."""
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("prepared_at", "lease_until"):
            shown[name] = None if shown[name] is None else shown[name].isoformat()
        return {
            **shown,
            "outcome": dict(self.outcome),
            "topics": list(self.topics),
            "waits_for": list(self.waits_for),
            "events": [event.to_dict() for event in self.events],
            "unknown": list(self.unknown),
        }

    def __str__(self) -> str:
        name = self.message_id or self.transaction_id or self.half_id
        outcome = ", ".join(f"{count} {state}" for state, count in self.outcome.items()) or "not known any more"
        lines = [f"{name}: {message_count(self.messages)} of {self.producer_group}, {outcome}"]
        for event in self.events:
            by = f" by {event.decided_by}" if event.decided_by else ""
            reason = f": {event.reason}" if event.reason else ""
            lines.append(f"  {event.at:%Y-%m-%d %H:%M:%S} {event.word}{by}, {message_count(event.messages)}{reason}")
        return "\n".join([*lines, *(f"  ({sentence})" for sentence in self.unknown)])


def late_verdicts(trace: Trace) -> list[TraceEvent]:
    """Return the verdicts that came too late, and that no person has resolved."""
    late: list[TraceEvent] = []
    for event in trace.events:
        if event.kind is TraceKind.RESOLVED:
            late.clear()
        elif event.kind is TraceKind.CONFLICT:
            late.append(event)
    return late
