"""Upkeep of a log by a process of its own, with graces that are over at once: ``python -m tests.crash.upkeep LOG``."""

from __future__ import annotations

import sys

from rmq_spark import CommitLog
from tests.support.inside import Graces, maintain
from tests.support.limits import limited

GRACES = Graces(reader_s=0.0, audit_s=0.0, idempotency_s=1e9)


def keep_up(path: str) -> None:
    """One round, which finds everything worth its while."""
    with limited(PRUNED_SHARE_MIN=0.0, ROWS_LET_GO_MIN=1, STRIPPED_BYTES_MIN=1, OP_FILES_MAX=2, MESSAGES_FILES_MAX=2):
        maintain(CommitLog.open(path).engine, GRACES)


if __name__ == "__main__":
    keep_up(sys.argv[1])
