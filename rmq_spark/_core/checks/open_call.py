"""A call of a listener, which may hang. Nobody can end a call from outside: it goes on, and a later round takes its
answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rmq_spark._core.runtime.runtime import Runtime

T = TypeVar("T")

STOP_POLL_S = 0.2


@dataclass(frozen=True)
class OpenCall(Generic[T]):
    """A call that has begun, and may have returned."""

    began_s: float
    result: Future[T] = field(default_factory=Future)

    @classmethod
    def begin(cls, runtime: Runtime, call: Callable[[], T], thread_name: str | None) -> OpenCall[T]:
        """Begin a call in a thread of this name, or make it here when there is no name."""
        open_call = cls(runtime.monotonic())
        if thread_name is None:
            open_call._run(call, Exception)  # an exit or an interrupt of the user ends this thread
        else:  # nothing else would report what ends such a thread
            runtime.start_thread(lambda: open_call._run(call, BaseException), thread_name, daemon=True)
        return open_call

    def _run(self, call: Callable[[], T], caught: type[BaseException]) -> None:
        try:
            result = call()
        except caught as problem:
            self.result.set_exception(problem)
        else:
            self.result.set_result(result)

    @property
    def has_returned(self) -> bool:
        return self.result.done()


def wait_for(calls: Collection[OpenCall[Any]], seconds_left: Callable[[], float]) -> None:
    """Wait until the calls have returned, while seconds are left."""
    while not all(call.has_returned for call in calls) and (left_s := seconds_left()) > 0:
        wait([call.result for call in calls], min(STOP_POLL_S, left_s))
