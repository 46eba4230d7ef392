"""Logs for machines: the fields that our records have, and a formatter that writes a line of JSON for each.

All loggers are below ``rmq_spark``. A record about a half batch says which one in fields of its own (``extra``), see
:data:`FIELDS`. So a log search finds all that was ever said of one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Protocol

from rmq_spark._core.vocabulary.redaction import one_line, redacted, traceback_of
from rmq_spark.errors import TxmqError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.half_batch import HalfBatch

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
"""Fields of our records. Each has those that are known where it is made."""
FORMAT_ENV = "TXMQ_LOG_FORMAT"
"""``json`` makes the commands write their logs as lines of JSON."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class Header(Protocol):
    """What names a half batch (:class:`rmq_spark._core.log.half.HalfHeader`)."""

    @property
    def half_id(self) -> str: ...
    @property
    def app_id(self) -> str: ...
    @property
    def batch_id(self) -> int: ...
    @property
    def producer_group(self) -> str: ...


def of_batch(batch: HalfBatch) -> dict[str, Any]:
    """The fields of a record about a half batch. The transaction's id is the one that all ids in it begin with."""
    from rmq_spark._core.vocabulary.ids import batch_transaction_id

    return {
        "half_id": batch.half_id,
        "app_id": batch.app_id,
        "batch_id": batch.batch_id,
        "transaction_id": batch_transaction_id(batch.half_id, batch.attempt),
        "attempt": batch.attempt,
        "producer_group": batch.producer_group,
    }


def of_header(header: Header) -> dict[str, Any]:
    """The fields of a record about a half batch where no attempt is meant."""
    return {name: getattr(header, name) for name in ("half_id", "app_id", "batch_id", "producer_group")}


def failure(problem: BaseException) -> str:
    """What a log says of a failure: the sentence of one of our errors, and the traceback of any other."""
    return one_line(redacted(problem)) if isinstance(problem, TxmqError) else traceback_of(problem)


class JsonFormatter(logging.Formatter):
    """Writes a log record as one line of JSON: ``time`` (ISO, UTC), ``level``, ``logger``, ``message``, its fields, and
    ``exception`` where there is one; within a span of OpenTelemetry also ``trace_id`` and ``span_id``.

    Nothing in it shows a secret that rmq_spark knows or recognizes: credentials in URIs, storage options, signatures.

    Examples
    --------
    >>> handler = logging.StreamHandler()
    >>> handler.setFormatter(JsonFormatter())
    >>> logging.getLogger("rmq_spark").addHandler(handler)  # doctest: +SKIP
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in said and value is not None:
                said[name] = _plain(value)
        said.update(_trace())
        if record.exc_info:
            said["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(said, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int)) else redacted(value)


def _trace() -> dict[str, str]:
    """The ids of the current span, where the program uses OpenTelemetry."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or not hasattr(api, "get_current_span"):
        return {}
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def open_closed_streams() -> None:
    """Put an empty file in the place of each standard stream that is closed (``>&-``), where Python has None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def json_handler() -> logging.Handler | None:
    """A handler that writes lines of JSON to standard error, where the environment asks for that."""
    if os.environ.get(FORMAT_ENV, "").lower() != "json":
        return None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    return handler
