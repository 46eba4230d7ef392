"""Finds the transactions that are old enough to be checked."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.vocabulary.message import CHECK_IMMUNITY_PROPERTY
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY

COLUMNS = ("properties", "transaction_key")
"""Columns of a half batch's messages that :func:`is_old_enough` needs."""


def is_old_enough(messages: pa.Table, per: str, age_s: float, timeout_s: float) -> pa.Array | bool:
    """Return which messages are in transactions that are old enough: all (True), none (False), or a boolean for each.

    A transaction is old enough after ``timeout_s``. If some of its messages have the property
    CHECK_IMMUNITY_TIME_IN_SECONDS, the longest of these times counts instead, even if it is shorter.
    """
    seconds = _immunity_s(messages["properties"])
    if seconds is None:
        return age_s >= timeout_s
    if per == BATCH:
        return bool(age_s >= pc.max(seconds).as_py())
    if per == KEY:
        key = messages["transaction_key"]
        longest = pa.table({"key": key, "s": seconds}).group_by("key", use_threads=False).aggregate([("s", "max")])
        seconds = longest["s_max"].take(pc.index_in(key, value_set=longest["key"].combine_chunks()))
    is_old = pc.greater_equal(pa.scalar(age_s), pc.fill_null(seconds, timeout_s))
    return is_old.combine_chunks() if isinstance(is_old, pa.ChunkedArray) else is_old


def _immunity_s(properties: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return the property of each message (null for a message without it), or None when no message has it."""
    if properties.null_count == len(properties):
        return None
    text = pc.map_lookup(properties, pa.scalar(CHECK_IMMUNITY_PROPERTY), "last")
    # The sink accepts digits only. Anything else was written by hand and counts as missing, as in RocketMQ.
    text = pc.if_else(pc.match_substring_regex(text, r"^[0-9]{1,11}$"), text, None)
    return None if text.null_count == len(text) else pc.cast(text, pa.float64())
