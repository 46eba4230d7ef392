"""Chooses the transaction of a timeline."""

from __future__ import annotations

from rmq_spark._core.inspect.assemble_trace import trace
from rmq_spark._core.inspect.trace import Trace
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.report.report_figures import Figures
from rmq_spark.errors import HalfBatchNotFoundError, OptionError


def trace_of(engine: Engine, name: str) -> Trace:
    """Return the trace of a transaction, a half batch or a message, by its id.

    Raises
    ------
    OptionError
        When the id is invalid.
    HalfBatchNotFoundError
        When the log does not have it.
    """
    if name.count(":") == 1:
        return trace(engine, half_id=name)
    try:
        return trace(engine, name)
    except (OptionError, HalfBatchNotFoundError) as problem:
        try:
            return trace(engine, message_id=name)
        except (OptionError, HalfBatchNotFoundError):
            raise problem from None


def most_urgent_of(engine: Engine, figures: Figures) -> Trace | None:
    """Return the trace of a half batch in conflict, else of a quarantined one, else of the one that waited longest for
    its last verdict. None when there is none, or when upkeep has removed all of them."""
    waiting = [row["half_id"] for row in (*figures.conflicts, *figures.quarantined)]
    for half_id in [*waiting, *figures.slowest["half_id"].to_pylist()]:
        try:
            return trace(engine, half_id=half_id)
        except HalfBatchNotFoundError:
            continue
    return None
