"""The ``messages`` table: committed messages at their offsets, for every reader of Delta.

It holds what ``op`` placed, in the order of ``op``, up to one version of ``op``. So a reader sees whole transactions,
and the first messages of each queue without a gap. Only drainers append to it (``drain``).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pyarrow as pa

from rmq_spark._core.vocabulary.message import PROPERTIES, TIMESTAMP
from rmq_spark.errors import CorruptLogError

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table

SOURCE_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("msg_id", pa.string()),
        ("transaction_id", pa.string()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("sharding_key", pa.string()),
        ("properties", PROPERTIES),
        ("body", pa.binary()),
        ("producer_group", pa.string()),
        ("born_timestamp", TIMESTAMP),
        ("store_timestamp", TIMESTAMP),
        ("commit_timestamp", TIMESTAMP),
    ]
)
"""The columns of the source, in order."""
NAME = "messages"
MESSAGES_SCHEMA = pa.schema(
    [
        *SOURCE_SCHEMA,
        ("half_id", pa.string()),
        ("file_no", pa.int64()),
        ("row_no", pa.int64()),
        ("attempt", pa.int32()),
        ("op_version", pa.int64()),
        ("transaction_per", pa.string()),
        ("transaction_key", pa.string()),
    ]
)
RETENTION_S = 7 * 86_400
"""Seconds for which entries of the table's Delta log and replaced files stay, so that other readers can go on where
they stand, and go back. A log with a longer ``log_retention`` keeps them for that."""
POSITION = "txmq.op"
"""Name under which the table keeps the version of ``op`` up to which it has all messages (Delta's ``txn``)."""
LAST_PLACED = "txmq.op.placed"
"""Name for the last version of ``op`` that placed some of them."""
LAST_COMMIT = "txmq.op.commit"
"""Name for a hash of that version's commit id. It exposes an ``op`` that was set back and has grown again."""


def drained_up_to(table: Table) -> int:
    """The version of ``op`` up to which the table has all messages; -1 before the first drain."""
    position = table.transaction_version(POSITION)
    return -1 if position is None else position


def transactions_of(end: int, rows: pa.Table) -> dict[str, int]:
    """The ``txn`` entries of the commit that brings the table up to version ``end`` of ``op``. ``rows`` are the last op
    rows of its messages."""
    if rows.num_rows == 0:
        return {POSITION: end}
    last = rows.sort_by("version").slice(rows.num_rows - 1)
    commit = commit_number(last["commit_id"][0].as_py())
    return {POSITION: end, LAST_PLACED: last["version"][0].as_py(), LAST_COMMIT: commit}


def commit_number(commit_id: str) -> int:
    """A number for a commit id, small enough for Delta."""
    return int(hashlib.sha256(commit_id.encode()).hexdigest()[:15], 16)


def history_s(table: Table) -> float:
    """Seconds for which files that left a table stay for readers that do not know this package: in ``messages`` as long
    as its Delta log names them, in other tables none."""
    return table.history_s if table.name == NAME else 0.0


def require_drained(table: Table, version: int, why: str) -> None:
    """Raise CorruptLogError when ``messages``, read after ``op``, lacks what ``op`` placed up to a version. ``why`` is
    the middle of the error's sentence: how one knows that it was drained."""
    if drained_up_to(table) < version:
        raise CorruptLogError(
            f"table messages has what op placed up to version {drained_up_to(table)}, and {why} up to version "
            f"{version}: an older copy of messages was put in its place, and the messages between are only in the "
            "newer one. Restore it"
        )
