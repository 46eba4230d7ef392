"""Failpoints: the named places of the protocol at which a test lets a process die, stop, fail or wait.

At each place the code calls ``reach("prepared", ...)``. In a program that does nothing. A test sets a hook, which gets
the name and the values that are known there. ``tests/support/failpoints.py`` lists the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_hook: Callable[..., None] | None = None


def reach(point: str, **known: Any) -> None:
    """Call the hook, if there is one, with a failpoint and the values that are known there."""
    if _hook is not None:
        _hook(point, **known)


def set_hook(hook: Callable[..., None] | None) -> Callable[..., None] | None:
    """Set the hook of this process, or none, and return the previous one."""
    global _hook
    before, _hook = _hook, hook
    return before
