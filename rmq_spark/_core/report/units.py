"""Formats numbers, sizes and times for people."""

from __future__ import annotations

_AMOUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(count: float) -> str:
    """Format a number: ``950``, ``12.4k``, ``3.1M``."""
    for length, unit in _AMOUNTS:
        if count >= length:
            shown = count / length
            return f"{shown:.0f}{unit}" if shown >= 99.5 else f"{shown:.1f}{unit}"
    return f"{count:,.0f}"


def rate(count: float, seconds: float) -> str:
    """Format a rate: ``3.2 a second``, ``150 an hour``.

    The unit is the smallest that gives 1 or more and is not longer than the time. Without one: ``0.6 a minute``.
    """
    if count == 0 or seconds <= 0:
        return ""
    for length, unit in ((1.0, "a second"), (60.0, "a minute"), (3600.0, "an hour"), (86400.0, "a day")):
        per_unit = count * length / max(seconds, length)
        if length > max(seconds, 60.0):
            break
        if per_unit >= 1:
            number = f"{per_unit:.1f}".removesuffix(".0") if per_unit < 10 else amount(round(per_unit))
            return f"{number} {unit}"
    per_unit = count * 60 / max(seconds, 60.0)
    return f"{per_unit:.1f} a minute" if per_unit >= 0.1 else ""


def have(count: int) -> str:
    """Return "has" or "have" for a count."""
    return "has" if count == 1 else "have"


def are(count: int) -> str:
    """Return "is" or "are" for a count."""
    return "is" if count == 1 else "are"
