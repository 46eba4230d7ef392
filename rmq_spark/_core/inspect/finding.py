"""The findings of ``txmq doctor`` and of the report: a problem, and its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """The severity of a finding, from good to bad."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    CRITICAL = "critical"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """A finding, and its remedy.

    Attributes
    ----------
    check : str
        The subject of the check.
    level : Level
        ``note``: no action is needed. ``warning``: look at it today. ``critical``: messages are stuck, hidden or at
        risk.
    what : str
    remedy : str or None
        A command, or another action.
    """

    check: str
    level: Level
    what: str
    remedy: str | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.remedy or ''}".strip()

    def to_dict(self) -> dict[str, str | None]:
        return {"check": self.check, "level": self.level.value, "what": self.what, "remedy": self.remedy}


def worst(findings: Sequence[Finding]) -> Level:
    """Return the worst level of the findings."""
    order = list(Level)
    return max((f.level for f in findings), key=order.index, default=Level.OK)
