"""Half batches as the sink sends them: two partitions of six messages, by a query with a listener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_spark import CheckService, CommitLog, TransactionListener
from tests.support.half_batches import another, prepare_one
from tests.support.inside import (
    KEY,
    HalfFile,
    HalfHeader,
    HalfRecord,
    HalfWriter,
    Lineage,
    Naming,
    TwoPhase,
    batch_name,
)

KEYS = ("a", "b", "a", "c", "b", "d")
QUERY = "query-1"


def header(
    per: str = "batch",
    batch_id: int = 0,
    query_id: str | None = QUERY,
    input_hash: str | None = "hash",
    fence_id: str | None = None,
    naming: Naming = Naming.COUNTED,
) -> HalfHeader:
    return HalfHeader(batch_name("app", batch_id), "app", batch_id, query_id, input_hash, fence_id, per, "shop", naming)


def stage(log: CommitLog, head: HalfHeader, keys: Sequence[str] = KEYS) -> list[HalfFile]:
    """Two partitions of messages; a body is ``<batch>-<key>-<number>``."""
    column = "k" if head.transaction_per == KEY else None
    writer = HalfWriter(head, log.topics(), "orders", column)
    files: list[HalfFile] = []
    for partition in (0, 1):
        mine = [(i, k) for i, k in enumerate(keys) if i % 2 == partition]
        columns: dict[str, list[Any]] = {"body": [f"{head.batch_id}-{k}-{i}" for i, k in mine]}
        if column:
            columns["k"] = [k for _, k in mine]
        files += log.engine.stage(writer, pa.table(columns).to_batches(), partition)
    return files


def bodies(*keys: str, batch_id: int = 0) -> list[str]:
    """Those of a half batch, or of some keys of it."""
    return sorted(f"{batch_id}-{k}-{i}" for i, k in enumerate(KEYS) if not keys or k in keys)


def prepared(log: CommitLog, per: str = "batch", batch_id: int = 0, fence_id: str | None = None) -> HalfRecord:
    """A half batch whose driver died right after prepare."""
    head = header(per, batch_id, fence_id=fence_id)
    return prepare_one(log.engine, head, stage(log, head))


def send(
    log: CommitLog,
    listener: TransactionListener,
    head: HalfHeader | None = None,
    checkpoint: Any = None,
    timeout_s: float = 0.0,
    **more: Any,
) -> Any:
    """Send a half batch from the first phase to the last; returns the outcome."""
    head = head or header()
    two_phase = TwoPhase(log.engine, listener, replay_check_timeout_s=timeout_s, **more)
    return two_phase.send(head, lambda: stage(log, head), lineage=checkpoint and Lineage(checkpoint))


def check(log: CommitLog, listener: TransactionListener, group: str = "shop") -> None:
    """A round of checks by another process."""
    CheckService(another(log), {group: listener}, transaction_timeout=0, round_timeout=None).run_once()


def visible(log: CommitLog) -> list[str]:
    """The bodies that a reader sees, sorted; offsets have no gaps."""
    table = another(log).read("orders", columns=["body", "queue_id", "queue_offset"])
    for queue in set(table["queue_id"].to_pylist()):
        offsets = [r["queue_offset"] for r in table.to_pylist() if r["queue_id"] == queue]
        assert offsets == list(range(len(offsets)))
    return sorted(b.decode() for b in table["body"].to_pylist())
