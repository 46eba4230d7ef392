"""What somebody else does in the midst of a call: another process, another thread, or a store that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from rmq_spark._core.runtime.failpoints import set_hook
from tests.support.failpoints import POINTS, hooked
from tests.support.sends import raising


class Died(BaseException):
    """A process dies: nothing that it has begun goes on."""


@contextmanager
def seen_at(point: str, meet: Callable[..., object] = lambda **_: None, **known: Any) -> Iterator[list[dict[str, Any]]]:
    """What the place knows each time that it is reached; ``meet(**knows)`` is called each time. With ``known``, only
    where the place knows just that: ``table="op"``."""
    assert point in POINTS
    seen: list[dict[str, Any]] = []

    def hook(reached: str, **knows: Any) -> None:
        if before is not None:
            before(reached, **knows)
        if reached == point and known.items() <= knows.items():
            seen.append(knows)
            meet(**knows)

    before = set_hook(hook)
    try:
        yield seen
    finally:
        set_hook(before)


def unhooked() -> AbstractContextManager[None]:
    """What happens meanwhile comes to no failpoint."""
    return hooked(lambda *_, **__: None)


@contextmanager
def at(point: str, act: Callable[[], object], **known: Any) -> Iterator[None]:
    """Let something happen the next time that a failpoint is reached, and no later time. It must be reached."""
    left = [act]
    with seen_at(point, lambda **_: left and left.pop()(), **known):
        yield
    assert not left, f"nobody came to {point!r}"


@contextmanager
def dies_at(point: str, **known: Any) -> Iterator[None]:
    """The process dies at a failpoint."""

    def die(**knows: Any) -> None:
        raise Died

    with pytest.raises(Died), seen_at(point, die, **known):
        yield


def before_next(of: Any, method: str, act: Callable[[], object]) -> None:
    """Let something happen right before the next call of a method of this object, and before no later one."""
    real, left = getattr(of, method), [act]

    def late(*arguments: Any, **named: Any) -> Any:
        if left:
            left.pop()()
        return real(*arguments, **named)

    setattr(of, method, late)


@contextmanager
def no_thread_starts() -> Iterator[None]:
    """The machine has no more threads for this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        yield
