"""Reads a log again before it is reported as damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from rmq_spark.errors import CorruptLogError, OffsetOutOfRangeError

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table  # executors import this module, without deltalake


class Looks(Protocol):
    """An object that reads tables of a log."""

    def looked_at(self) -> Iterable[Table]:
        """The tables that it reads."""


P = ParamSpec("P")
Looking = TypeVar("Looking", bound=Looks)
Found = TypeVar("Found")


def looks_again(look: Callable[Concatenate[Looking, P], Found]) -> Callable[Concatenate[Looking, P], Found]:
    """Let a method that finds damage, or misses offsets, run again on the newest state before it raises.

    A process may be stopped (SIGSTOP, a suspended machine) for longer than replaced files and old entries of a Delta
    log are kept. The files that it goes on from are gone then, and the log is sound.
    """

    @wraps(look)
    def call(self: Looking, /, *args: P.args, **kwargs: P.kwargs) -> Found:
        try:
            return look(self, *args, **kwargs)
        except (CorruptLogError, OffsetOutOfRangeError):
            for table in self.looked_at():
                table.refresh()
        return look(self, *args, **kwargs)

    return call
