"""The report of a comparison of a commit log with the database of its local transactions: its findings, one by one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from rmq_spark._core.vocabulary.text import count_of


class Standing(str, Enum):
    """The standing of an attempt or a half batch."""

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

    Attributes
    ----------
    half_id, app_id, batch_id, attempt :
        Of the half batch. ``attempt`` is None when the database does not know it.
    messages : int or None
        Number of its affected messages, if known.
    at : datetime or None
        When the database executed it, or when the log prepared it (UTC).
    what : str
        The finding, and the action to take.
    done : str or None
        The action of ``apply``; None without one.
    """

    standing: Standing
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
    """The result of a comparison.

    Attributes
    ----------
    since, made_at : datetime
        The start of the compared executions, and the time of the comparison (UTC).
    executed : int
        Attempts that the database executed since.
    settled : int
        Attempts that need no action.
    findings : tuple of Comparison
        All other attempts.
    streams : tuple of str
        A sentence for each checkpoint.
    careful : tuple of str
        Sentences about possible blind spots of the comparison.
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
        return tuple(f for f in self.findings if f.done is None and f.standing is not Standing.REPLAYED)

    def __str__(self) -> str:
        lines = [
            f"the database has executed {count_of(self.executed, 'attempt')} since {self.since:%Y-%m-%d %H:%M:%S}Z; "
            f"{self.settled} need nothing",
            *(f"careful: {sentence}" for sentence in self.careful),
            *self.streams,
            *map(str, self.findings),
        ]
        recoverable = [f for f in self.left if f.standing is Standing.LOST]
        if recoverable and not self.applied:
            lines.append("nothing was changed: --apply makes visible what can be made visible")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        report: dict[str, Any] = json.loads(self.content())
        return report

    def content(self) -> bytes:
        """Return the report as a JSON file's content."""
        return json.dumps(asdict(self), default=_plain, indent=1).encode()


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
