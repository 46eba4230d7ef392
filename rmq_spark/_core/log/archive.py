"""The archive of a half batch that has left the table ``half``: who sent it, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark.errors import CorruptLogError, HalfBatchLeftError

DECISIONS_MAX = 100
"""The newest decisions on a half batch are kept, at most this many."""

ARCHIVED = pa.struct(
    [
        ("app_id", pa.string()),
        ("batch_id", pa.int64()),
        ("query_id", pa.string()),
        ("input_hash", pa.string()),
        ("fence_id", pa.string()),
        ("last_version", pa.int64()),  # of op, with a row of it
        ("committed", pa.int64()),
        ("rolled_back", pa.int64()),
        ("rolled_back_by_check", pa.int64()),
        ("rolled_back_by_discard", pa.int64()),
        (
            "decisions",
            pa.list_(
                pa.struct(
                    [
                        ("at", TIMESTAMP),
                        ("kind", pa.string()),
                        ("attempt", pa.int32()),
                        ("decided_by", pa.string()),
                        ("reason", pa.string()),
                        ("count", pa.int64()),
                        ("refused", pa.bool_()),
                    ]
                )
            ),
        ),
    ]
)

_OWN = [field.name for field in ARCHIVED if field.name != "decisions"]
_SHARED = ("half_id", "attempt", "transaction_per", "producer_group", "prepared_ms")
"""Columns of ``op`` that other kinds of rows have, too."""


@dataclass(frozen=True)
class ArchivedDecision:
    """A decision on a half batch that has left. ``refused``: a rollback because the local transaction ran and
    refused."""

    at: datetime
    kind: str
    attempt: int
    decided_by: str | None
    reason: str | None
    count: int
    refused: bool | None = None


@dataclass(frozen=True)
class Archived:
    """The archive of a half batch that has left.

    Attributes
    ----------
    app_id, batch_id, query_id, input_hash, fence_id, transaction_per, producer_group :
        As in the half batch's header.
    prepared_ms : int
        When the half batch was prepared.
    last_version : int
        The last version of ``op`` with a row of the half batch.
    attempt : int
        The newest one.
    committed, rolled_back, rolled_back_by_check, rolled_back_by_discard : int
        Numbers of messages, by outcome.
    decisions : tuple of ArchivedDecision
        The last :data:`DECISIONS_MAX` decisions, in their order.
    at : datetime or None
        When the half batch was archived; None before the row is written.
    """

    half_id: str
    app_id: str
    batch_id: int
    query_id: str | None
    input_hash: str | None
    fence_id: str | None
    transaction_per: str
    producer_group: str
    prepared_ms: int
    last_version: int
    attempt: int
    committed: int
    rolled_back: int = 0
    rolled_back_by_check: int = 0
    rolled_back_by_discard: int = 0
    decisions: Sequence[ArchivedDecision] = ()
    at: datetime | None = None

    @property
    def rows(self) -> int:
        """Number of its messages."""
        return self.committed + self.not_committed

    @property
    def not_committed(self) -> int:
        """Number of messages that were rolled back for any reason."""
        return self.rolled_back + self.rolled_back_by_check + self.rolled_back_by_discard

    @property
    def final(self) -> bool:
        """True when a replay has nothing to do: no rollback came from a check or from the discard policy."""
        return self.rolled_back_by_check + self.rolled_back_by_discard == 0

    def agrees(self, commit: int, rollback: int) -> bool:
        """True when at least this many messages have each verdict, so a repeated decision changes nothing."""
        return commit <= self.committed and rollback <= self.not_committed and commit + rollback <= self.rows

    def left_error(self) -> HalfBatchLeftError:
        """The error for callers that need more of the half batch than is kept."""
        counts = {
            "committed": self.committed,
            "rolled back": self.rolled_back,
            "rolled back by a check": self.rolled_back_by_check,
            "rolled back by the discard policy": self.rolled_back_by_discard,
        }
        outcome = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return HalfBatchLeftError(
            f"half batch {self.half_id!r} was settled and has left the table half: of its {self.rows} messages "
            f"{outcome}. What was committed is in the table messages; the rest is gone",
            self,
        )

    def struct(self) -> dict[str, Any]:
        """The value for the column ``archived`` of ``op``."""
        value = {name: getattr(self, name) for name in _OWN}
        return {**value, "decisions": [asdict(d) for d in self.decisions[-DECISIONS_MAX:]]}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Archived:
        """Make the archive from a row of ``op``. CorruptLogError: the row lacks what an ``archived`` row must have."""
        struct = row["archived"]
        try:
            decisions = tuple(ArchivedDecision(**d) for d in struct["decisions"])
            value = {name: struct[name] for name in _OWN} | {name: row[name] for name in _SHARED}
            archived = cls(**value, decisions=decisions, at=row["op_time"])
            needed = (archived.app_id, archived.batch_id, archived.prepared_ms)
            is_whole = archived.rows == row["count"] and None not in needed
        except TypeError:
            is_whole = False
        if not is_whole:
            raise CorruptLogError(
                f"table op has an archived row of half batch {row['half_id']!r} that does not say what became of it: "
                "it was changed by hand"
            )
        return archived
