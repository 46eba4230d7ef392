"""A listener of Spark's streaming queries that adds the log's figures to each progress."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rmq_spark._core.client.commit_log import CommitLog
from rmq_spark._core.metrics.log_figures import LogFigures, LogWatch
from rmq_spark._core.vocabulary.message import require_group_name
from rmq_spark._core.vocabulary.options import seconds
from rmq_spark._core.vocabulary.redaction import traceback_of
from rmq_spark.errors import OptionError

try:
    from pyspark.sql.streaming.listener import StreamingQueryListener
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "pyspark":
        raise
    raise OptionError("QueryListener needs pyspark: install rmq_spark with its extra spark") from None

logger = logging.getLogger(__name__)

EVERY_S = 10.0


class QueryListener(StreamingQueryListener):
    """Logs pending half batches, a group's lag and undrained messages with the progress of Spark's streaming queries.

    Each record has the figures as fields (``extra``), so that a JSON formatter keeps them. So a blocked query, or a
    growing backlog, shows beside Spark's own numbers.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    consumer_group : str, optional
        The group whose lag is logged. By default the largest lag of all groups.
    every : float
        Least seconds between two reads of the figures, for any number of queries.
    on_figures : callable, optional
        Called with the figures of each record as a mapping, for another system of metrics.
    storage_options : mapping, optional
        For a path: passed to delta-rs.

    Notes
    -----
    A failed look is logged, and affects no query.

    Examples
    --------
    >>> spark.streams.addListener(txmq.metrics.QueryListener("shop/log", "points"))  # doctest: +SKIP
    """

    def __init__(
        self,
        log: CommitLog | str | os.PathLike[str],
        consumer_group: str | None = None,
        *,
        every: float = EVERY_S,
        on_figures: Callable[[Mapping[str, Any]], None] | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self._group = None if consumer_group is None else require_group_name(consumer_group, "consumerGroup")
        self._every_s = seconds(every, "every")
        self._on_figures = on_figures
        self._watch = LogWatch(log, storage_options)
        self._lock = threading.RLock()
        self._logged_s: float | None = None
        self._runtime = self._watch.runtime

    def onQueryStarted(self, event: Any) -> None:
        """Do nothing: there are no figures before the first progress."""

    def onQueryProgress(self, event: Any) -> None:
        """Log the figures, at most once in ``every`` seconds."""
        try:
            if self._is_time():
                self._log_figures(event.progress)
        except Exception as problem:
            logger.warning("the figures of a query's progress were not told: %s", traceback_of(problem))

    def onQueryIdle(self, event: Any) -> None:
        """Do nothing."""

    def onQueryTerminated(self, event: Any) -> None:
        """Do nothing."""

    def _is_time(self) -> bool:
        with self._lock:
            now_s = self._runtime.monotonic()
            if self._logged_s is not None and now_s - self._logged_s < self._every_s:
                return False
            self._logged_s = now_s
            return True

    def _log_figures(self, progress: Any) -> None:
        with self._lock:
            figures = self._watch.look()
        fields = {**_of_query(progress), **fields_of(figures, self._group)}
        logger.info(
            "query %s, batch %d: %d half batches are pending (the oldest for %.0f s), %s is behind by %d messages "
            "(%.0f s), %d messages are not drained",
            fields["query_name"] or fields["query_id"], fields["batch_id"], fields["pending_half_batches"],
            fields["oldest_pending_seconds"], self._group or "the slowest group", fields["lag_messages"],
            fields["lag_seconds"], fields["undrained_messages"], extra=fields,
        )  # fmt: skip
        if self._on_figures is not None:
            self._on_figures(fields)


def _of_query(progress: Any) -> dict[str, Any]:
    return {
        "query_id": str(progress.id),
        "run_id": str(progress.runId),
        "query_name": progress.name,
        "batch_id": int(progress.batchId),
        "input_rows": int(progress.numInputRows),
    }


def fields_of(figures: LogFigures, consumer_group: str | None = None) -> dict[str, float | int]:
    """Return figures as flat fields, for logs. Names end in their unit, except for counts."""
    groups = {group for group, _ in figures.lags} if consumer_group is None else {consumer_group}
    lags = [figures.lag_of(group) for group in groups]
    return {
        "pending_half_batches": sum(group.half_batches for group in figures.pending.values()) + figures.not_looked_at,
        "half_messages": sum(figures.half_messages.values()),
        "oldest_pending_seconds": figures.oldest_pending_s,
        "quarantined_messages": sum(figures.quarantined.values()),
        "conflicts": figures.conflicts,
        "undrained_messages": figures.undrained_messages,
        "undrained_bytes": figures.undrained_bytes,
        "publish_lag_seconds": figures.publish_lag_s,
        "lag_messages": max((lag.messages for lag in lags), default=0),
        "lag_seconds": max((lag.seconds for lag in lags), default=0.0),
    }
