"""What ``txmq doctor`` and the report find: how things stand, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How bad it is, from good to bad."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    CRITICAL = "critical"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it.

    Attributes
    ----------
    check : str
        What was looked at.
    level : Level
        ``note``: nothing need be done. ``warning``: look at it today. ``critical``: messages are stuck, hidden or at
        risk.
    what : str
    remedy : str or None
        A command, or what else to do.
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
    """Return the worst level of some findings."""
    order = list(Level)
    return max((f.level for f in findings), key=order.index, default=Level.OK)
