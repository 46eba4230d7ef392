"""Figures of commit logs and of this process, for Prometheus, and for logs of Spark's queries.

``LogCollector`` reads a commit log at each scrape. ``ProcessMetrics`` counts what this process does. Both need the
extra ``metrics``. A name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmq_spark.metrics.figures import LogFigures as LogFigures
    from rmq_spark.metrics.figures import LogWatch as LogWatch
    from rmq_spark.metrics.log_collector import LogCollector as LogCollector
    from rmq_spark.metrics.process import ProcessMetrics as ProcessMetrics
    from rmq_spark.metrics.pushing import push as push
    from rmq_spark.metrics.pushing import write_textfile as write_textfile
    from rmq_spark.metrics.query_listener import QueryListener as QueryListener

_WHERE = {
    "LogCollector": "log_collector",
    "LogFigures": "figures",
    "LogWatch": "figures",
    "ProcessMetrics": "process",
    "QueryListener": "query_listener",
    "push": "pushing",
    "write_textfile": "pushing",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"rmq_spark.metrics.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'rmq_spark.metrics' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
