"""Reads a log again before reporting damage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from rmq_spark.errors import CorruptLogError, OffsetOutOfRangeError

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table  # executors import this module, without deltalake


class ReadsTables(Protocol):
    """An object that reads tables of a log."""

    def tables_to_refresh(self) -> Iterable[Table]:
        """The tables that its methods read."""


P = ParamSpec("P")
Reader = TypeVar("Reader", bound=ReadsTables)
Found = TypeVar("Found")


def retry_on_newest_state(method: Callable[Concatenate[Reader, P], Found]) -> Callable[Concatenate[Reader, P], Found]:
    """Let a method that finds damage, or misses offsets, run again on the newest state before it raises.

    A process may be stopped (SIGSTOP, a suspended machine) for longer than replaced files and old entries of a Delta
    log are kept. Then the files that it had seen are gone, and the log is sound.
    """

    @wraps(method)
    def call(self: Reader, /, *args: P.args, **kwargs: P.kwargs) -> Found:
        try:
            return method(self, *args, **kwargs)
        except (CorruptLogError, OffsetOutOfRangeError):
            for table in self.tables_to_refresh():
                table.refresh()
        return method(self, *args, **kwargs)

    return call
