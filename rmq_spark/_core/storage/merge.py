"""Merges small files of a table into larger ones with the same rows."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rmq_spark._core.storage.table import Change, Table, live_paths

logger = logging.getLogger(__name__)


def compact(table: Table, choose: Callable[[Table], list[str]], merge: Callable[[list[str]], Change]) -> int:
    """Replace the files that ``choose`` returns by one, and return how many they were."""
    merged: Change | None = None

    def propose(version: int) -> Change | None:
        nonlocal merged
        # A merged file stays valid when an append wins the race. Merging anew each time would never win against a busy
        # writer, and op would grow without end.
        if merged is not None and set(live_paths(table)).issuperset(merged.remove):
            return merged
        paths = choose(table)
        if not paths:
            return None
        merged = merge(paths)
        return merged

    def landed(change: Change) -> bool:
        return set(live_paths(table)).isdisjoint(change.remove)

    committed = table.compare_and_set(propose, landed)
    return 0 if committed is None else len(committed.remove)
