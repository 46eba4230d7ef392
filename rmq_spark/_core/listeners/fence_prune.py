"""Prunes fence rows of half batches that have left the table ``half``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from rmq_spark._core.listeners.fence import Fence
from rmq_spark._core.vocabulary.options import FENCE_RETENTION_S_MIN, Duration, seconds
from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rmq_spark._core.client.commit_log import CommitLog
    from rmq_spark._core.protocol.engine import Engine


def prune_fence(fence: Fence, older_than: Duration, logs: Sequence[CommitLog | Engine]) -> Iterator[int]:
    """See :meth:`SqlTransactionListener.prune`. Return the number of deleted rows, page by page."""
    older_than_s = seconds(older_than, "older_than")
    if older_than_s < FENCE_RETENTION_S_MIN:
        raise OptionError(
            f"{older_than!r} is less than 7 days ({FENCE_RETENTION_S_MIN:.0f} s): fence rows must outlive the half "
            "batches that they speak for",
            argument="older_than",
        )
    if not logs:
        raise OptionError("prune needs the commit logs whose rows may go: write prune(older_than, log)")
    # This room is below that of the public log.
    engines = cast("list[Engine]", [getattr(log, "engine", log) for log in logs])
    for engine in engines:
        if not callable(getattr(engine, "still_in_half", None)):
            raise OptionError(
                f"prune got {type(engine).__name__} {str(engine)[:100]!r}: open logs are expected, one after the "
                "other, as prune(older_than, CommitLog.open(path), ...)"
            )
    doubt_s = max(engine.clock_doubt_s() for engine in engines)
    return fence.prune(older_than_s + doubt_s, {engine.id: engine.still_in_half for engine in engines})
