"""Ids of transactions and messages. They are derived from half id, attempt, key and address, and never stored."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.vocabulary.verdicts import BATCH, KEY
from rmq_spark.errors import OptionError


def transaction_ids(half_id: str, attempt: int | pa.Array, per: str, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
    """Return the transaction ids of rows: ``<half_id>:<attempt>``, then a colon and the key or ``<file_no>.<row_no>``,
    unless the half batch is one transaction. ``attempt`` is one for all rows, or one for each.

    Ids are derived, not stored. Every replay of an attempt gives the same ids, and each attempt gives others.
    """
    attempts = pa.scalar(attempt) if isinstance(attempt, int) else attempt
    head = pc.binary_join_element_wise(pa.scalar(half_id), pc.cast(attempts, pa.string()), ":")
    if per == BATCH:
        return pa.repeat(head, rows.num_rows) if isinstance(head, pa.Scalar) else head
    tail = pc.cast(rows["transaction_key"], pa.string()) if per == KEY else _addresses(rows["file_no"], rows["row_no"])
    return pc.binary_join_element_wise(head, tail, ":")


def _addresses(file_no: pa.Array, row_no: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(pc.cast(file_no, pa.string()), pc.cast(row_no, pa.string()), ".")


def batch_transaction_id(half_id: str, attempt: int) -> str:
    """Return the id of a half batch's only transaction (``transactionPer=batch``)."""
    return f"{half_id}:{attempt}"


def message_ids(half_id: pa.Array | pa.Scalar, file_no: pa.Array, row_no: pa.Array) -> pa.Array:
    """Return message ids: ``<half_id>:<file_no>.<row_no>``, the address of a half row, which never changes."""
    return pc.binary_join_element_wise(half_id, _addresses(file_no, row_no), ":")


_TRANSACTION_ID = re.compile(r"([^:]+:\d{1,19}(?:-[0-9a-f]+)?):(\d{1,9})(?::(.+))?", re.DOTALL)
_MESSAGE_ID = re.compile(r"([^:]+:\d{1,19}(?:-[0-9a-f]+)?):(\d{1,18})\.(\d{1,18})")


def parse_transaction_id(text: str) -> tuple[str, int, str | None]:
    """Split a transaction id into the half id, the attempt, and the key or address (None where a half batch is one
    transaction). OptionError: the text is no transaction id."""
    match = _TRANSACTION_ID.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise OptionError(f"{text!r} is not a transaction id: <half_id>:<attempt> is expected, and perhaps :<key>")
    return match[1], int(match[2]), match[3]


def parse_message_id(text: str) -> tuple[str, int, int]:
    """Split a message id into the half id, the file number and the row number. OptionError: the text is none."""
    match = _MESSAGE_ID.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise OptionError(f"{text!r} is not a message id: <half_id>:<file>.<row> is expected")
    return match[1], int(match[2]), int(match[3])
