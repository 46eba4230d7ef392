"""The ``messages`` table: committed messages at their offsets, for every reader of Delta.

It holds what ``op`` placed, in the order of ``op``, up to one of its versions. So a reader sees whole transactions, and
of every queue the first messages without a gap. A drainer appends to it (``drain``); nobody else does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from rmq_spark.message import PROPERTIES, TIMESTAMP

if TYPE_CHECKING:
    from rmq_spark.storage.table import Table

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
        ("op_version", pa.int64()),  # of op, at which the message was placed
        ("transaction_per", pa.string()),
        ("transaction_key", pa.string()),
    ]
)
STATS_COLUMNS = ("topic", "queue_id", "queue_offset", "commit_timestamp", "op_version")
POSITION = "txmq.op"
"""The name under which the table keeps the version of ``op`` up to which it has all messages (Delta's ``txn``)."""


def drained_up_to(table: Table) -> int:
    """The version of ``op`` up to which the table has all messages; -1 when nobody has drained yet."""
    found = table.transaction_version(POSITION)
    return -1 if found is None else found
