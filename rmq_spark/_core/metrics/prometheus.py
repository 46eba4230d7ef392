"""Prometheus' client, when it is installed."""

from __future__ import annotations

from rmq_spark.errors import OptionError

try:
    import prometheus_client as prometheus
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "prometheus_client":
        raise
    raise OptionError("metrics need prometheus-client: install rmq_spark with its extra metrics") from None

__all__ = ["prometheus"]
