"""Logs for machines: the fields of log records, and a formatter that writes each record as a line of JSON.

All loggers are below ``rmq_spark``. A record about a half batch names it in its fields (``extra``), see
:data:`FIELDS`. So a log search finds all records about a half batch.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import datetime, timezone
from typing import Any

from rmq_spark._core.vocabulary.redaction import redacted

__all__ = ["FIELDS", "JsonFormatter"]

FIELDS = (
    "half_id",
    "app_id",
    "batch_id",
    "transaction_id",
    "attempt",
    "producer_group",
    "consumer_group",
    "member",
    "topic",
    "queue_id",
    "queue_offset",
)
"""Fields of the package's records. A record has those that are known where it is logged."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Writes a log record as one line of JSON: ``time`` (ISO, UTC), ``level``, ``logger``, ``message``, its fields, and
    any ``exception``; within a span of OpenTelemetry also ``trace_id`` and ``span_id``.

    The line shows no secret that rmq_spark knows or recognizes: credentials in URIs, storage options, signatures.

    Examples
    --------
    >>> handler = logging.StreamHandler()
    >>> handler.setFormatter(JsonFormatter())
    >>> logging.getLogger("rmq_spark").addHandler(handler)  # doctest: +SKIP
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in fields and value is not None:
                fields[name] = _plain(value)
        fields.update(_trace())
        if record.exc_info:
            fields["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(fields, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int)) else redacted(value)


def _trace() -> dict[str, str]:
    """Return the ids of the current span, if the program uses OpenTelemetry."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if not hasattr(api, "get_current_span"):
        return {}
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
