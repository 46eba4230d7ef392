"""Charts of a commit log for notebooks: ``from rmq_spark import plots``. Each function returns an Altair chart.

They are the charts of ``txmq report``. Altair is in the extra ``report``.

Examples
--------
>>> from rmq_spark import plots  # doctest: +SKIP
>>> plots.throughput("shop/log", since="1d")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.inspect.standing import Standing
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.report import charts, over_time
from rmq_spark._core.report.report_figures import listed, look_back, settled_in
from rmq_spark._core.report.span import SINCE, Span

if TYPE_CHECKING:
    from rmq_spark._core.report.drawing import Chart

__all__ = ["checks", "lag", "largest", "pending", "slowest", "throughput", "topics", "verdicts"]

Log = CommitLog | str | os.PathLike[str]


def throughput(log: Log, since: str = SINCE) -> Chart:
    """Messages that became visible, by topic and time.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    since : str
        How far back: ``"7d"``, ``"12h"``.

    Raises
    ------
    OptionError
        When ``since`` is no duration, or Altair is not installed.
    """
    engine = _open(log)
    _, span = look_back(engine, Span.of(engine, since))
    return charts.throughput(over_time.throughput(engine, span), span).chart


def verdicts(log: Log, since: str = SINCE) -> Chart:
    """Messages by their verdict and time. The parameters are those of :func:`throughput`."""
    engine = _open(log)
    history, span = look_back(engine, Span.of(engine, since))
    return charts.verdicts(over_time.verdicts(history, span), span).chart


def checks(log: Log, since: str = SINCE) -> Chart:
    """Half batches that checks asked about, by answer and time. The parameters are those of :func:`throughput`."""
    engine = _open(log)
    history, span = look_back(engine, Span.of(engine, since))
    return charts.checks(over_time.checks(history, span), span).chart


def pending(log: Log) -> Chart:
    """Messages without a verdict, by age.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    """
    return charts.pending(Standing(_open(log)).pending).chart


def lag(log: Log) -> Chart:
    """The lag of consumer groups: messages, and the time for which the oldest has waited.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    """
    return charts.lag(Standing(_open(log)).groups).chart


def largest(log: Log, since: str = SINCE) -> Chart:
    """The settled half batches with the most messages. The parameters are those of :func:`throughput`."""
    engine = _open(log)
    return charts.largest(listed(engine, settled_in(engine, Span.of(engine, since)), "messages")).chart


def slowest(log: Log, since: str = SINCE) -> Chart:
    """The settled half batches that waited longest for their last verdict. The parameters are those of
    :func:`throughput`."""
    engine = _open(log)
    return charts.slowest(listed(engine, settled_in(engine, Span.of(engine, since)), "seconds")).chart


def topics(log: Log) -> Chart:
    """The sizes of topics in the table messages.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    """
    return charts.topics(Standing(_open(log)).topics.values()).chart


def _open(log: Log) -> Engine:
    """Return a separate handle, so that users of the log need not wait."""
    return engine_of(log).another()
