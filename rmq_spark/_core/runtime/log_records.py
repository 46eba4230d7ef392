"""What a log record says about a half batch, and about a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rmq_spark._core.vocabulary.ids import batch_transaction_id
from rmq_spark._core.vocabulary.redaction import one_line, redacted, traceback_of
from rmq_spark.errors import TxmqError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.half_batch import HalfBatch
    from rmq_spark._core.log.half_header import HalfHeader


def of_header(header: HalfHeader | HalfBatch, attempt: int | None = None) -> dict[str, Any]:
    """Return the fields of a record about a half batch, or about an attempt of it, whose transaction ids all begin with
    ``transaction_id``."""
    fields = {name: getattr(header, name) for name in ("half_id", "app_id", "batch_id", "producer_group")}
    if attempt is None:
        return fields
    return {**fields, "transaction_id": batch_transaction_id(header.half_id, attempt), "attempt": attempt}


def of_batch(batch: HalfBatch) -> dict[str, Any]:
    return of_header(batch, batch.attempt)


def failure(problem: BaseException) -> str:
    """Return the sentence of a TxmqError, and the traceback of any other exception."""
    return one_line(redacted(problem)) if isinstance(problem, TxmqError) else traceback_of(problem)
