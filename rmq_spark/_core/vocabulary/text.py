"""Numbers with their nouns and units, and durations."""

from __future__ import annotations

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
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
    parts: list[str] = []
    for unit, length in _UNITS:
        number, left = divmod(left, length)
        if number or parts:
            parts.append(f"{number}{unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0")) or "0s"


def message_count(count: int) -> str:
    """``1 message``, ``1234 messages``: without commas, as errors and traces have numbers."""
    return f"{count} {'message' if count == 1 else 'messages'}"
