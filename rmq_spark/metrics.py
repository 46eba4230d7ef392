"""Metrics of commit logs and of this process, for Prometheus and for logs of Spark's queries.

``LogCollector`` reads commit logs at each scrape. ``ProcessMetrics`` counts this process's work. Both need the extra
``metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.metrics.log_collector import LogCollector as LogCollector
    from rmq_spark._core.metrics.log_figures import LogFigures as LogFigures
    from rmq_spark._core.metrics.log_figures import LogWatch as LogWatch
    from rmq_spark._core.metrics.process import ProcessMetrics as ProcessMetrics
    from rmq_spark._core.metrics.push_gateway import push as push
    from rmq_spark._core.metrics.push_gateway import write_textfile as write_textfile
    from rmq_spark._core.metrics.query_listener import QueryListener as QueryListener

__getattr__, __dir__, __all__ = public(__name__)
