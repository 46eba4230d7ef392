"""Names of queues."""

from __future__ import annotations

from typing import TypeAlias

Queue: TypeAlias = tuple[str, int]
"""A topic, and the number of one of its queues."""
