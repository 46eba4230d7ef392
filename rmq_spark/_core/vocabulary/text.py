"""Numbers with their nouns."""

from __future__ import annotations


def plural(noun: str) -> str:
    """``messages``, ``half batches``."""
    return f"{noun}{'es' if noun.endswith('ch') else 's'}"


def count_of(number: int, noun: str) -> str:
    """``1 message``, ``1,234 messages``, ``2 half batches``."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def message_count(count: int) -> str:
    """``1 message``, ``1234 messages``: without commas, as errors and traces have numbers."""
    return f"{count} {'message' if count == 1 else 'messages'}"
