"""Merges small files of a table into larger ones: the same rows, in fewer files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rmq_spark._core.storage.table import Change, Table

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


def compact(table: Table, choose: Callable[[Table], list[str]], merge: Callable[[list[str]], Change]) -> int:
    """Replace the files that are chosen by one; returns how many they were."""
    made: Change | None = None

    def propose(version: int) -> Change | None:
        nonlocal made
        # A race lost to an append leaves the merged file good. Merging anew each time would never win against a busy
        # writer, and op would grow without end.
        if made is not None and set(table.actions()["path"].to_pylist()).issuperset(made.remove):
            return made
        small = choose(table)
        if not small:
            return None
        made = merge(small)
        return made

    def landed(change: Change) -> bool:
        live = set(table.actions()["path"].to_pylist())
        return live.isdisjoint(change.remove)

    done = table.compare_and_set(propose, landed)
    return 0 if done is None else len(done.remove)
