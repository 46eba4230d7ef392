"""Listeners that make a check's ROLLBACK binding, with a fence in the user's own database or Delta table.

A listener's module is imported when the listener is first used: not everyone has SQLAlchemy (the extra ``sql``) and
Spark (the extra ``spark``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.listeners.delta import DeltaTransactionListener
    from rmq_spark.listeners.sql import HalfTransaction, SqlTransactionListener, create_fence
    from rmq_spark.listeners.table import TableListener

__all__ = [
    "DeltaTransactionListener",
    "HalfTransaction",
    "SqlTransactionListener",
    "TableListener",
    "create_fence",
]

_MODULES = {
    "DeltaTransactionListener": "rmq_spark.listeners.delta",
    "HalfTransaction": "rmq_spark.listeners.sql",
    "SqlTransactionListener": "rmq_spark.listeners.sql",
    "TableListener": "rmq_spark.listeners.table",
    "create_fence": "rmq_spark.listeners.sql",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
