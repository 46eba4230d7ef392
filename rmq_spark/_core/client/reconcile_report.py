"""The report of a comparison of a commit log with the database of its local transactions: its findings, one by one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from rmq_spark._core.vocabulary.text import count_of


class FindingKind(str, Enum):
    SETTLED = "settled"
    REPLAYED = "replayed"
    LOST = "lost"
    PERSON = "person"
    UNKNOWN_TO_THE_DATABASE = "unknown to the database"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Comparison:
    """The comparison's result for one attempt.

    ``attempt`` is None when the database does not know it, ``messages`` the number of its affected messages, if known,
    and ``at`` when the database executed it, or when the log prepared it (UTC). ``what`` is the finding, and the action
    to take; ``done`` the action of ``apply``, if any.
    """

    standing: FindingKind
    half_id: str
    app_id: str | None
    batch_id: int | None
    attempt: int | None
    messages: int | None
    at: datetime | None
    what: str
    done: str | None = None

    def __str__(self) -> str:
        attempt = "" if self.attempt is None else f", attempt {self.attempt}"
        at = "" if self.at is None else f" at {self.at:%Y-%m-%d %H:%M:%S}Z"
        done = "" if self.done is None else f". {self.done}"
        of = "" if self.messages is None else f" ({count_of(self.messages, 'message')})"
        return f"{self.standing}: half batch {self.half_id!r}{attempt}{at}{of}: {self.what}{done}"


@dataclass(frozen=True)
class ReconcileReport:
    """The result of a comparison of what was executed since a time (UTC).

    ``executed``: attempts that the database executed since. ``settled``: those that need no action. ``findings``: all
    other attempts. ``streams`` has a sentence for each checkpoint, ``careful`` sentences about possible blind spots of
    the comparison.
    """

    log: str
    log_id: str
    since: datetime
    made_at: datetime
    applied: bool
    executed: int
    settled: int
    findings: tuple[Comparison, ...]
    streams: tuple[str, ...] = ()
    careful: tuple[str, ...] = ()

    @property
    def left(self) -> tuple[Comparison, ...]:
        """The findings that still need ``apply`` or a person."""
        return tuple(f for f in self.findings if f.done is None and f.standing is not FindingKind.REPLAYED)

    def __str__(self) -> str:
        lines = [
            f"the database has executed {count_of(self.executed, 'attempt')} since {self.since:%Y-%m-%d %H:%M:%S}Z; "
            f"{self.settled} need nothing",
            *(f"careful: {sentence}" for sentence in self.careful),
            *self.streams,
            *map(str, self.findings),
        ]
        recoverable = [f for f in self.left if f.standing is FindingKind.LOST]
        if recoverable and not self.applied:
            lines.append("nothing was changed: --apply makes visible what can be made visible")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.content())
        return report

    def content(self) -> bytes:
        return json.dumps(asdict(self), default=_plain, indent=1).encode()


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
