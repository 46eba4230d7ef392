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


def slowest_of(engine: Engine, figures: Figures) -> Trace | None:
    """Return the trace of the half batch that waited longest for its last verdict; None when none was settled, or
    upkeep has removed it since."""
    for half_id in figures.slowest["half_id"].to_pylist():
        try:
            return trace(engine, half_id=half_id)
        except HalfBatchNotFoundError:
            continue
    return None
