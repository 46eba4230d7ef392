"""Numbers with their nouns and units, rates, and durations."""

from __future__ import annotations

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
_AMOUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def plural(noun: str) -> str:
    """``messages``, ``half batches``."""
    return f"{noun}{'es' if noun.endswith('ch') else 's'}"


def count_of(number: int, noun: str) -> str:
    """``1 message``, ``1,234 messages``, ``2 half batches``."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def byte_size(count: float) -> str:
    """Format bytes in powers of 1000: ``0 B``, ``812 B``, ``4.2 MB``."""
    power = 0
    while count >= 999.5 and power < len(_SIZES) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.0f} {_SIZES[power]}" if power == 0 or count >= 99.5 else f"{count:.1f} {_SIZES[power]}"


def duration(seconds: float) -> str:
    """Format seconds in at most two units: ``0s``, ``166ms``, ``1.5s``, ``45s``, ``2m 30s``, ``2d 6h``."""
    if 0 < seconds < 0.9995:
        return f"{round(seconds * 1000)}ms"
    if 0 < seconds < 9.95:
        return f"{seconds:.1f}s".replace(".0", "")
    left = max(0, round(seconds))
    amounts: list[str] = []
    for unit, length in _UNITS:
        number, left = divmod(left, length)
        if number or amounts:
            amounts.append(f"{number}{unit}")
    return " ".join(amount for amount in amounts[:2] if not amount.startswith("0")) or "0s"


def message_count(count: int) -> str:
    """``1 message``, ``1234 messages``: without commas, as errors and traces have numbers."""
    return f"{count} {'message' if count == 1 else 'messages'}"


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
