"""The header of a half batch: its name, its identity, and all other values that its rows share."""

from __future__ import annotations

import hashlib
from dataclasses import field
from enum import Enum

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.runtime.runtime import RUNTIME, Runtime
from rmq_spark._core.vocabulary.immutable import immutable

HEADER_COLUMNS = [
    "half_id",
    "app_id",
    "batch_id",
    "query_id",
    "input_hash",
    "fence_id",
    "transaction_per",
    "producer_group",
]
OWN_CHARS = 12
"""Hexadecimal digits at the end of a half id that distinguish half batches of one name."""


FIRST = -1
"""The value of ``follows`` for an application's first half batch."""


class Naming(Enum):
    """How a half batch got its name (``app_id`` and ``batch_id``), and so how a retry is recognised."""

    COUNTED = "counted"
    """The application numbers its batches: a stream. Each checkpoint counts from 0, so a retry needs the same
    ``query_id``. The newest number is kept as a Delta transaction."""
    GIVEN = "given"
    """As COUNTED, but a user gave application and number (a batch write): the name alone identifies a retry."""
    KEY = "key"
    """``app_id`` is an idempotency key and names this half batch only. It becomes no Delta transaction, because the
    table would keep every key for ever."""
    MADE_UP = "made up"
    """``app_id`` was generated for this half batch, so it cannot have been prepared before."""


@immutable
class HalfHeader:
    """The values that all rows of a half batch share (the first columns of ``half``)."""

    half_id: str
    """The identity, which no other half batch ever has: see :func:`half_id_of` and :func:`new_half_id`. Op markers,
    fences and message ids carry it."""
    app_id: str
    batch_id: int
    query_id: str | None
    input_hash: str | None
    fence_id: str | None
    """The name of the store that holds the local transaction: a fence's id, or a listener's ``store_id``."""
    transaction_per: str
    producer_group: str
    naming: Naming = field(default=Naming.COUNTED, compare=False)
    follows: int | None = field(default=None, compare=False)
    """The batch that must be the application's last one before, or :data:`FIRST`; None: any."""

    @classmethod
    def of(
        cls,
        naming: Naming,
        app_id: str,
        batch_id: int,
        *,
        query_id: str | None = None,
        input_hash: str | None = None,
        fence_id: str | None,
        transaction_per: str,
        producer_group: str,
        runtime: Runtime = RUNTIME,
    ) -> HalfHeader:
        """The header of a half batch, with its identity."""
        if naming is Naming.KEY:
            half_id = new_half_id(app_id, batch_id, runtime)
        else:
            half_id = half_id_of(app_id, batch_id, query_id, input_hash)
        return cls(
            half_id, app_id, batch_id, query_id, input_hash, fence_id, transaction_per, producer_group, naming=naming
        )

    @property
    def name(self) -> str:
        """The name by which a replay finds the half batch."""
        return batch_name(self.app_id, self.batch_id)

    @property
    def numbered(self) -> bool:
        """Whether ``batch_id`` is one of the numbers that the application gives its batches."""
        return self.naming is Naming.COUNTED or self.naming is Naming.GIVEN


def batch_name(app_id: str, batch_id: int) -> str:
    """The name by which a replay finds a half batch. ``app_id`` has no colon, so two batches never share a name. A name
    can come back: an idempotency key after it expired, or a batch in a restored log."""
    return f"{app_id}:{batch_id}"


def half_id_of(app_id: str, batch_id: int, query_id: str | None = None, input_hash: str | None = None) -> str:
    """The identity of a half batch without an idempotency key: its name, and a digest of its query and its input as far
    as they are known.

    The same batch has the same identity in each run, also in a restored log: its fence still answers for it. A batch of
    the same number with other input has another identity.
    """
    name = batch_name(app_id, batch_id)
    if query_id is None and input_hash is None:  # the user wants a retry to be known by its name alone
        return name
    return f"{name}-{hashlib.sha256(f'{query_id} {input_hash}'.encode()).hexdigest()[:OWN_CHARS]}"


def new_half_id(app_id: str, batch_id: int, runtime: Runtime = RUNTIME) -> str:
    """An identity for a half batch whose name may come back (an idempotency key): its name, and digits that no other
    half batch of this name has."""
    return f"{batch_name(app_id, batch_id)}-{runtime.unique_id()[:OWN_CHARS]}"


def names_of(half_ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """The names of half batches. A half id without digits of its own is the name."""
    return pc.replace_substring_regex(half_ids, "-[^:]*$", "")


def after_name(name: str) -> str:
    """A text that sorts after all half ids of a name and before those of greater names."""
    return f"{name}."


def name_of(half_id: str) -> str:
    """The name of one half batch; see :func:`names_of`."""
    head, _, number = half_id.rpartition(":")
    return f"{head}:{number.partition('-')[0]}"
