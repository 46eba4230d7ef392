"""The story of a transaction, a message or a half batch, as values. ``tracing`` puts it together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple

from rmq_spark._core.vocabulary.text import message_count


class TraceKind(str, Enum):
    """What happened to messages."""

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
    """Messages that stand in a queue one after the other: the offsets of the first and of the last one."""

    topic: str
    queue_id: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True)
class TraceEvent:
    """Something that happened to messages of a half batch.

    Attributes
    ----------
    at : datetime
        UTC. Of ``drained``: since when, at the latest, the messages are in the table ``messages``; a merge of its
        files makes that later.
    kind : TraceKind
    messages : int
        How many of those that are traced. Of decisions on a half batch of which the op rows are pruned: of all.
    attempt : int or None
    decided_by : str or None
        ``execute`` (its local transaction), ``check``, ``discard`` (the policy for what was checked too often) or
        ``admin`` (a person).
    reason : str or None
    places : tuple of TracePlace
        Where messages became visible.
    until : datetime or None
        Of ``leased``: until when checkers leave it alone. Of ``committed``: when delayed messages are due.
    verdict : str or None
        Of ``conflict``: the verdict that came too late. Of ``conflict_resolved``: the one that counts.
    op_version : int or None
        The version of table ``op`` that says so.
    refused : bool or None
        Of ``rolled_back``: True when the local transaction ran and said no, which is final.
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
        """What happened, for people: a check's final rollback is told from one that a replay runs again."""
        return "refused" if self.refused and self.decided_by == "check" else self.kind.value

    def to_dict(self) -> dict[str, Any]:
        """The event for JSON: times as ISO texts."""
        return {
            "at": self.at.isoformat(),
            "kind": self.kind.value,
            "messages": self.messages,
            "attempt": self.attempt,
            "decided_by": self.decided_by,
            "reason": self.reason,
            "places": [place._asdict() for place in self.places],
            "until": None if self.until is None else self.until.isoformat(),
            "verdict": self.verdict,
            "op_version": self.op_version,
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Trace:
    """The story of a transaction, a message or a half batch, as far as the commit log still tells it.

    Attributes
    ----------
    half_id : str
    transaction_id, message_id : str or None
        What was asked for; both None for a half batch as a whole.
    producer_group, app_id, batch_id, transaction_per, query_id, fence_id :
        Its header; None where nothing is kept of it.
    prepared_at : datetime or None
        UTC; of a half batch that is forgotten, when its newest visible message was staged.
    attempt : int or None
        The newest one.
    messages : int
        How many messages this is about.
    outcome : mapping of str to int
        What became of them (see ``tracing.COUNTED``); empty where that cannot be told any more.
    topics : tuple of str
    where : {"half", "leaving", "left", "forgotten"}
        ``leaving`` and ``left`` half batches are settled for good. Of ``forgotten`` ones only visible messages tell.
    in_conflict : bool
        True when a verdict came too late, and no person has resolved that.
    lease_until : datetime or None
        Set while its local transaction is known to run.
    waits_for : tuple of str
        Half batches that hold committed messages up: pending ones, sent before with the same sharding key.
    events : tuple of TraceEvent
        In their order.
    unknown : tuple of str
        Sentences about what cannot be told any more.
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
        """The trace for JSON: times as ISO texts."""
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
        outcome = ", ".join(f"{count} {what}" for what, count in self.outcome.items()) or "not known any more"
        lines = [f"{name}: {message_count(self.messages)} of {self.producer_group}, {outcome}"]
        for event in self.events:
            by = f" by {event.decided_by}" if event.decided_by else ""
            why = f": {event.reason}" if event.reason else ""
            lines.append(f"  {event.at:%Y-%m-%d %H:%M:%S} {event.word}{by}, {message_count(event.messages)}{why}")
        return "\n".join([*lines, *(f"  ({sentence})" for sentence in self.unknown)])
