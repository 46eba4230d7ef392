"""The commit log: Delta tables for half messages, op markers and topics, and the one way to commit to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.commitlog.log import CommitLog as CommitLog


def __getattr__(name: str) -> object:
    # Lazy: executors import rmq_spark.storage.files and must not load deltalake with it.
    if name == "CommitLog":
        from rmq_spark.commitlog.log import CommitLog

        return CommitLog
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
