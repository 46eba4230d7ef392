"""Numbers with their nouns and units."""

from __future__ import annotations

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")


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


def message_count(count: int) -> str:
    """``1 message``, ``1234 messages``: without commas, as errors and traces have numbers."""
    return f"{count} {'message' if count == 1 else 'messages'}"
