"""What somebody else does in the midst of a call: another process, another thread, or a store that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def before_next(of: Any, method: str, act: Callable[[], object]) -> None:
    """Let something happen right before the next call of a method of this object, and before no later one."""
    real, left = getattr(of, method), [act]

    def late(*arguments: Any, **named: Any) -> Any:
        if left:
            left.pop()()
        return real(*arguments, **named)

    setattr(of, method, late)


def after_next(of: Any, method: str, act: Callable[[], object]) -> None:
    """Let something happen right after the next call of a method of this object, before its caller hears of it."""
    real, left = getattr(of, method), [act]

    def slow(*arguments: Any, **named: Any) -> Any:
        done = real(*arguments, **named)
        if left:
            left.pop()()
        return done

    setattr(of, method, slow)
